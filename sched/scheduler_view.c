/*
 * Workers: what they report, and the snapshot (scheduler.views) that decisions are made on.
 *
 * A view is computed from the worker's lists of requests and its latest report. The load at the horizons is
 * computed anew when `changed` is set or SCHEDULER_REFRESH_MS have passed (view_running()); the prompts and
 * flows at each refresh.
 */
#include <assert.h>
#include <math.h>
#include <string.h>

#include "sched/scheduler_internal.h"

enum { OLD_AT_ONCE = 16 }; /* workers whose sequences one refresh looks at because of their age */

static const double CHUNKS_AHEAD = 2;           /* a worker takes prompts while it has less than this */
static const double MOST_SINCE_REPORT_MS = 100; /* progress since a report counts for at most this time */
/* Share of its work that a running prompt has left at least. */
static const double LEAST_LEFT = 0.02;
static const double USE_MS = 5000;                         /* time constant of prompt_use */
static const double FADE_MS = 30000, FADE_EVERY_MS = 1000; /* cost_fade(): time constant, period */
static const double LEAST_ANSWER = 3; /* tokens: shorter answers count as this long in policy_load.brevity */

void scheduler_changed(struct scheduler *s)
{
    s->dirty = true;
    s->alone = NULL;
}

/* A worker came, went, or became (un)usable: the next pass must not be put off. */
static void workers_changed(struct scheduler *s)
{
    s->look.is_valid = false;
    s->is_dry = true;
    scheduler_changed(s);
}

/* ----------------------------------------------------------------- workers */

static const double LOADING[] = {SCHEDULER_LOADING_PRIOR}, FETCHING[] = {SCHEDULER_FETCHING_PRIOR};

/* Sets what does not change with load. */
static void fill_view(struct scheduler *s, uint32_t w)
{
    const struct sched_worker *k = &s->workers[w];
    struct policy_worker *v = &s->views[w];
    v->role = k->info.role;
    v->cost = &k->cost;
    v->chunk_tokens = k->info.chunk_tokens;
    v->max_batch = k->info.max_batch;
    v->total_pages = k->info.n_pages;
    v->max_context = k->info.max_context;
    v->load_ms = k->load_ms;
    v->load_dram_ms = k->dram_ms;
    v->load_ssd_ms = k->ssd_ms;
    v->fetch_ms = k->fetch_ms;
    v->fetch_block_ms = k->fetch_block_ms;
    v->unread = NULL;
    for (uint32_t i = 0; i < SCHEDULER_MAX_WORKERS / 64; i++)
        v->unread = k->unread[i] ? k->unread : v->unread;
}

static uint64_t n_steps(const struct sched_worker *k)
{
    return k->cost.prefill.n_samples + k->cost.decode.n_samples;
}

/* The worker of the role with the most measured steps; NULL: none has any. */
static const struct sched_worker *most_measured(const struct scheduler *s, enum worker_role role)
{
    const struct sched_worker *best = NULL;
    for (uint32_t w = 0; w < s->n_workers; w++) {
        const struct sched_worker *k = &s->workers[w];
        if (k->info.role == role && n_steps(k) > (best ? n_steps(best) : 0))
            best = k;
    }
    return best;
}

/*
 * A new worker is assumed to be as fast as the measured ones of its role; with a slow profile it might never
 * be tried.
 */
static struct cost_model first_cost(const struct scheduler *s, enum worker_role role)
{
    const struct sched_worker *best = most_measured(s, role);
    return best ? cost_like(&best->cost) : cost_make(&s->config.profile);
}

/*
 * Another process has taken worker k's number. If no other worker of the role was measured, the former
 * process's speed is the best first guess.
 */
static void start_anew(struct scheduler *s, struct sched_worker *k, enum worker_role role)
{
    struct cost_model former = k->cost;
    bool is_measured = n_steps(k) && k->info.role == role;
    /* Handovers with the former process are not ended yet, and end_moving() will lower these counts. */
    *k = (struct sched_worker){.bookings = k->bookings, .n_sends = k->n_sends, .n_receives = k->n_receives};
    k->load_ms = LOADING[0], k->dram_ms = LOADING[1], k->ssd_ms = LOADING[2];
    k->fetch_ms = FETCHING[0], k->fetch_block_ms = FETCHING[1];
    if (is_measured && !most_measured(s, role))
        k->cost = cost_like(&former);
}

void scheduler_worker_up(struct scheduler *s, uint32_t w, const struct sched_worker_info *info)
{
    struct sched_worker *k = &s->workers[w];
    assert(w < SCHEDULER_MAX_WORKERS && !k->first && LIST_EMPTY(&k->running));
    if (k->info.incarnation != info->incarnation)
        start_anew(s, k, info->role);
    if (!k->cost.prefill.n)
        k->cost = first_cost(s, info->role);
    if (!k->transfer.line.n)
        k->transfer = transfer_make();
    k->info = *info;
    k->report = (struct sched_report){0};
    k->up = k->changed = true;
    k->prompt_use = 0;
    s->n_workers = w < s->n_workers ? s->n_workers : w + 1;
    s->views[w].usable = info->role != ROLE_STORE;
    workers_changed(s);
    fill_view(s, w);
}

void scheduler_worker_usable(struct scheduler *s, uint32_t w, bool usable)
{
    usable &= s->workers[w].up && s->workers[w].info.role != ROLE_STORE;
    if (s->views[w].usable != usable)
        workers_changed(s);
    s->views[w].usable = s->pass[w].usable = usable;
}

bool scheduler_can_read(const struct scheduler *s, uint32_t w, uint32_t from)
{
    return !(s->workers[w].unread[from / 64] >> (from % 64) & 1);
}

void scheduler_worker_reads(struct scheduler *s, uint32_t w, uint32_t from, bool can)
{
    uint64_t bit = 1ull << (from % 64);
    if (scheduler_can_read(s, w, from) == can)
        return;
    s->workers[w].unread[from / 64] ^= bit;
    workers_changed(s);
    if (s->workers[w].up)
        fill_view(s, w);
}

void scheduler_worker_down(struct scheduler *s, uint32_t w)
{
    assert(!s->workers[w].first && LIST_EMPTY(&s->workers[w].running));
    s->workers[w].up = false;
    memset(s->workers[w].unread, 0, sizeof(s->workers[w].unread));
    for (uint32_t i = 0; i < s->n_workers; i++) /* another process may get this number */
        scheduler_worker_reads(s, i, w, true);
    s->workers[w].report = (struct sched_report){0};
    s->views[w] = (struct policy_worker){0};
    workers_changed(s);
}

void scheduler_observe_step(struct scheduler *s, uint32_t w, const struct cost_step *step)
{
    struct sched_worker *k = &s->workers[w];
    k->cost = k->n_believed ? cost_believe(k->cost, step) : cost_observe(k->cost, step);
    k->n_believed -= k->n_believed > 0;
    k->is_measured = true;
}

/* Tokens to compute, at dispatch, of the first `n` prompts of a worker. */
static double tokens_sent(const struct sched_worker *k, uint32_t n)
{
    double tokens = 0;
    for (const struct sched_request *q = k->first; q && n; q = q->prefill_next, n--)
        tokens += q->plan.new_tokens;
    return tokens;
}

static bool is_same_report(const struct sched_report *a, const struct sched_report *b)
{
    return a->own_prompts == b->own_prompts && a->own_tokens == b->own_tokens && a->n_prompts == b->n_prompts &&
           a->tokens == b->tokens && a->square == b->square && a->running == b->running && a->context == b->context &&
           a->generated == b->generated && a->tpot_limit_ms == b->tpot_limit_ms && a->n_routers == b->n_routers &&
           a->queued_ms == b->queued_ms;
}

bool scheduler_tenant_weight(struct scheduler *s, uint64_t tenant, double weight)
{
    return fair_set_weight(s->fair, tenant, weight);
}

void scheduler_observe_report(struct scheduler *s, uint32_t w, const struct sched_report *report, uint64_t now)
{
    struct sched_worker *k = &s->workers[w];
    bool differs = !is_same_report(&k->report, report);
    k->report = *report;
    k->report_ns = now;
    k->others_ns = report->n_prompts ? now : k->others_ns;
    k->own_done = fmax(tokens_sent(k, report->own_prompts) - report->own_tokens, 0);
    k->changed |= differs;
    if (differs)
        scheduler_changed(s);
}

void scheduler_observe_loading(struct scheduler *s, uint32_t w, double load_ms, double dram_ms, double ssd_ms)
{
    struct sched_worker *k = &s->workers[w];
    k->load_ms = load_ms;
    k->dram_ms = dram_ms;
    k->ssd_ms = ssd_ms;
    fill_view(s, w);
}

void scheduler_observe_fetching(struct scheduler *s, uint32_t w, double fetch_ms, double block_ms)
{
    s->workers[w].fetch_ms = fetch_ms;
    s->workers[w].fetch_block_ms = block_ms;
    fill_view(s, w);
}

/* ---------------------------------------------------------------- snapshot */

void scheduler_know_share(struct policy_worker *v)
{
    v->share = policy_prompt_share(v, v->busy_ms);
}

/*
 * Work left of q, the first prompt. With other routers the worker's report says how far it came; otherwise
 * the time since q began does.
 */
static double head_left_ms(const struct sched_worker *k, const struct sched_request *q, double share, uint64_t now)
{
    double done = k->report.n_routers ? q->work_ms * k->own_done / fmax(q->plan.new_tokens, 1)
                                      : clock_ms_between(q->began_ns, now) * share;
    return fmax(q->work_ms - done, LEAST_LEFT * q->work_ms);
}

/* Adds prompts of other routers, and takes off what was computed since the report. */
static void view_others_prompts(const struct sched_worker *k, struct policy_worker *v, double share, uint64_t now)
{
    const struct sched_report *r = &k->report;
    if (!r->n_routers)
        return;
    double since = fmin(clock_ms_between(k->report_ns, now) * share, MOST_SINCE_REPORT_MS);
    double chunks = fmax(r->n_prompts, ceil(r->tokens / k->info.chunk_tokens));
    if (r->n_prompts)
        v->busy_ms += cost_step_ms(v->cost, r->tokens, r->square, 0, 0) + (chunks - 1) * cost_chunk_ms(v->cost);
    v->busy_ms *= 1 - fmin(since / fmax(v->busy_ms, 1), 1 - LEAST_LEFT);
    v->queued_tokens += r->tokens;
    v->n_prompts += r->n_prompts;
}

/* The worker's prompts. A prompt that takes longer than predicted counts as nearly done (LEAST_LEFT). */
static void view_prompts(struct scheduler *s, uint32_t w, uint64_t now)
{
    struct sched_worker *k = &s->workers[w];
    struct policy_worker *v = &s->views[w];
    double share = policy_prompt_share(v, 0);
    v->busy_ms = v->queued_tokens = 0;
    v->n_prompts = k->n_prompts;
    v->patience = INFINITY;
    for (const struct sched_request *q = k->first; q; q = q->prefill_next) {
        double left = q == k->first ? head_left_ms(k, q, share, now) : q->work_ms;
        v->busy_ms += left;
        v->queued_tokens += q->work_ms > 0 ? q->plan.new_tokens * left / q->work_ms : 0;
        if (q->ttft_ms > 0 && !q->resumed)
            v->patience = fmin(v->patience, (q->ttft_ms - clock_ms_between(q->arrived_ns, now)) * share / v->busy_ms);
    }
    view_others_prompts(k, v, share, now);
    v->patience = fmax(v->patience, 1);
    k->prompt_use += (1 - exp(-clock_ms_between(k->used_ns, now) / USE_MS)) * ((v->n_prompts > 0) - k->prompt_use);
    k->used_ns = now;
    v->prompt_use = k->prompt_use;
    v->stretch = s->stretch[k->info.role];
    v->takes_prompts = v->queued_tokens < CHUNKS_AHEAD * k->info.chunk_tokens;
    v->booked_ms = bookings_limit_ms(&k->bookings, now);
    scheduler_know_share(v);
}

/*
 * Adds q to the load at each horizon, by the probability that it still runs then: exp(-time / expected rest).
 * From the second on, each horizon is twice the one before, so the probability is the square of the former
 * one.
 */
static void add_load(const struct scheduler *s, const struct sched_request *q, double step_ms, struct policy_load *at)
{
    double left = lengths_remaining(&s->lengths, q->tenant, q->n_generated, q->max_tokens);
    double until_first = q->max_tokens > 0 ? exp(-POLICY_HORIZON_MS[1] / fmax(left * step_ms, 1)) : 0;
    double brevity = 1 / fmax(q->n_generated + left, LEAST_ANSWER), stays = q->max_tokens > 0, squared = until_first;
    for (uint32_t i = 0; i < POLICY_HORIZONS; i++) {
        double context = q->n_tokens + q->n_generated + fmin(POLICY_HORIZON_MS[i] / step_ms, left);
        at[i].running += stays;
        at[i].context += stays * context;
        at[i].pages += stays * q->n_pages;
        at[i].brevity += stays * brevity;
        stays = i ? squared * squared : until_first;
        squared = stays;
    }
}

static double less(double a, double b)
{
    return a > b ? a - b : 0;
}

void scheduler_take_load(const struct scheduler *s, const struct sched_request *q, double step_ms,
                         struct policy_load *at)
{
    struct policy_load its[POLICY_HORIZONS] = {{0}};
    add_load(s, q, step_ms, its);
    for (uint32_t i = 0; i < POLICY_HORIZONS; i++) {
        at[i].running = less(at[i].running, its[i].running);
        at[i].context = less(at[i].context, its[i].context);
        at[i].pages = less(at[i].pages, its[i].pages);
        at[i].brevity = less(at[i].brevity, its[i].brevity);
    }
}

static double tighter(double a, double b)
{
    return a > 0 && b > 0 ? fmin(a, b) : fmax(a, b);
}

/* Adds sequences of other routers: each counts as their mean, and they end as this router's do. */
static void view_others_running(const struct scheduler *s, const struct sched_worker *k, struct policy_worker *v,
                                double step)
{
    const struct sched_report *r = &k->report;
    if (!r->running)
        return;
    double n = r->running, generated = fmin(r->generated / n, k->info.max_context);
    double left = lengths_remaining(&s->lengths, 0, (uint32_t)generated, k->info.max_context);
    for (uint32_t i = 0; i < POLICY_HORIZONS; i++) {
        double stays = exp(-POLICY_HORIZON_MS[i] / fmax(left * step, 1));
        v->at[i].running += stays * n;
        v->at[i].context += stays * (r->context + n * fmin(POLICY_HORIZON_MS[i] / step, left));
        v->at[i].pages += stays * (r->context + n * left) / fmax(s->block_tokens, 1);
        v->at[i].brevity += stays * n / fmax(generated + left, LEAST_ANSWER);
    }
    v->tpot_limit_ms = tighter(v->tpot_limit_ms, r->tpot_limit_ms);
}

/* Computes the load at the horizons anew, with the learned lengths of answers. */
static void view_running(struct scheduler *s, uint32_t w, uint64_t now)
{
    struct sched_worker *k = &s->workers[w];
    struct policy_worker *v = &s->views[w];
    double context = k->report.context, n = k->n_running + k->report.running;
    const struct sched_request *q;
    LIST_FOREACH (q, &k->running, in_decode)
        context += q->n_tokens + q->n_generated;
    double step = policy_token_ms(v, fmax(cost_decode_ms(&k->cost, n, context), 0.1));
    memset(v->at, 0, sizeof(v->at));
    k->step_ms = step;
    v->tpot_limit_ms = 0;
    LIST_FOREACH (q, &k->running, in_decode) {
        add_load(s, q, step, v->at);
        v->tpot_limit_ms = tighter(v->tpot_limit_ms, q->tpot_ms);
    }
    view_others_running(s, k, v, step);
    k->changed = false;
    k->refreshed_ns = now;
}

const struct cost_model *scheduler_cost_of(const struct scheduler *s, const struct sched_worker *k)
{
    const struct sched_worker *other = n_steps(k) ? NULL : most_measured(s, k->info.role);
    return other ? &other->cost : &k->cost;
}

/* The worker's transfer model, or the most measured one of all workers before its first handover. */
static const struct transfer_model *transfer_of(const struct scheduler *s, const struct sched_worker *k)
{
    const struct sched_worker *best = k;
    for (uint32_t w = 0; w < s->n_workers && !k->transfer.line.n_samples; w++)
        if (s->workers[w].transfer.line.n_samples > best->transfer.line.n_samples)
            best = &s->workers[w];
    return &best->transfer;
}

/*
 * Flows of KV: handovers under way, and the prompts that are being computed, by the share of time in which
 * they flow.
 */
static void view_flows(struct scheduler *s)
{
    for (uint32_t w = 0; w < s->n_workers; w++) {
        s->views[w].transfer = transfer_of(s, &s->workers[w]);
        s->views[w].sends = s->workers[w].n_sends;
        s->views[w].receives = s->workers[w].n_receives;
    }
    for (uint32_t w = 0; w < s->n_workers; w++) {
        const struct sched_request *q = s->workers[w].first;
        if (q && q->plan.kind == PLAN_SPLIT)
            s->views[q->plan.decode].receives += transfer_demand(s->views[q->plan.decode].transfer, &q->plan.transfer);
    }
}

void scheduler_expire_bookings(struct scheduler *s, struct sched_worker *k, uint64_t now)
{
    for (uint32_t n = bookings_expire(&k->bookings, now); n; n--)
        s->return_share -= SCHEDULER_RETURN_RATE * s->return_share;
}

/* role_prompt_use: mean prompt_use of the workers of each role that are up. */
static void view_roles(struct scheduler *s)
{
    double use[2] = {0}, n[2] = {0}; /* by role */
    for (uint32_t w = 0; w < s->n_workers; w++) {
        if (!s->workers[w].up || s->workers[w].info.role == ROLE_STORE)
            continue;
        use[s->views[w].role] += s->views[w].prompt_use;
        n[s->views[w].role]++;
    }
    for (uint32_t w = 0; w < s->n_workers; w++)
        if (s->workers[w].up && s->workers[w].info.role != ROLE_STORE)
            s->views[w].role_prompt_use = use[s->views[w].role] / n[s->views[w].role];
}

/*
 * beside: work queued at other routers over the work queued here. Each worker reports the routers that use
 * it.
 */
static void view_other_routers(struct scheduler *s)
{
    double queued_ms = 0, n = 0;
    for (uint32_t w = 0; w < s->n_workers; w++) {
        queued_ms = fmax(queued_ms, s->workers[w].report.queued_ms);
        n = fmax(n, s->workers[w].report.n_routers);
    }
    s->beside = fmin(queued_ms / fmax(s->queued_ms, 1), n);
}

static bool is_idle(const struct sched_worker *k)
{
    return !k->first && LIST_EMPTY(&k->running) && !k->report.n_prompts && !k->report.running;
}

/* Calls cost_fade() for each role, every FADE_EVERY_MS. */
static void fade_idle(struct scheduler *s, uint64_t now)
{
    double passed_ms = clock_ms_between(s->faded_ns, now);
    if (passed_ms < FADE_EVERY_MS)
        return;
    double share = s->faded_ns ? 1 - exp(-passed_ms / FADE_MS) : 0;
    s->faded_ns = now;
    for (enum worker_role role = ROLE_PREFILL; role < ROLE_STORE; role++) {
        struct cost_model *models[SCHEDULER_MAX_WORKERS];
        bool idle[SCHEDULER_MAX_WORKERS];
        uint32_t n = 0;
        for (uint32_t w = 0; w < s->n_workers; w++)
            if (s->workers[w].up && s->workers[w].info.role == role) {
                models[n] = &s->workers[w].cost;
                idle[n++] = is_idle(&s->workers[w]);
            }
        cost_fade(models, idle, n, share);
    }
}

void scheduler_refresh(struct scheduler *s, uint64_t now)
{
    fade_idle(s, now);
    uint32_t n_old = 0;
    for (uint32_t w = 0; w < s->n_workers; w++) {
        if (!s->workers[w].up || s->workers[w].info.role == ROLE_STORE)
            continue;
        scheduler_expire_bookings(s, &s->workers[w], now);
        if (s->workers[w].is_measured || !s->workers[w].measured_ns)
            s->workers[w].measured_ns = now;
        s->workers[w].is_measured = false;
        s->views[w].cost = scheduler_cost_of(s, &s->workers[w]);
        bool is_old = clock_ms_between(s->workers[w].refreshed_ns, now) > SCHEDULER_REFRESH_MS;
        if (s->workers[w].changed || (is_old && n_old++ < OLD_AT_ONCE))
            view_running(s, w, now);
        view_prompts(s, w, now);
    }
    view_flows(s);
    view_roles(s);
    view_other_routers(s);
}

void scheduler_apply(struct policy_worker *views, const struct sched_request *q, const struct plan *plan,
                     double begins_ms, double times)
{
    struct policy_worker *p = &views[plan->prefill], *d = &views[plan->decode];
    double stays_ms = fmax(q->expected_tokens * plan->tpot_ms, 1);
    p->busy_ms += times * plan->work_ms;
    p->queued_tokens += times * plan->new_tokens;
    p->n_prompts++;
    p->takes_prompts = p->queued_tokens < CHUNKS_AHEAD * p->chunk_tokens;
    for (uint32_t i = 0; i < POLICY_HORIZONS; i++) {
        double ran = POLICY_HORIZON_MS[i] - begins_ms, there = (ran > 0 ? exp(-ran / stays_ms) : 1) * times;
        d->at[i].running += there;
        d->at[i].context += there * (q->n_tokens + q->expected_tokens / 2);
        d->at[i].brevity += there / fmax(q->expected_tokens, LEAST_ANSWER);
        d->at[i].pages += there * ceil((q->n_tokens + q->expected_tokens) / q->block_tokens);
    }
    d->tpot_limit_ms = tighter(d->tpot_limit_ms, q->tpot_ms);
    scheduler_know_share(p);
    scheduler_know_share(d);
}
