#include "sched/scheduler.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "sched/batching.h"
#include "sched/booking.h"
#include "sched/drain.h"
#include "sched/margin.h"
#include "sched/order.h"

enum { SCHEDULER_LOOK = 128 };

static const double CHUNKS_AHEAD = 2;
static const double REFRESH_MS = 50, MATCH_MS = 100, FRESH_MS = 1;
static const double BOOKED_MARGIN = 0.88; /* of its limit: what one that comes back is given place for */
static const double RETURN_RATE = 0.02;
/* Every refused request gets a booking where this share of them comes back; at least the share TRIED does, to find out. */
static const double FULLY_BOOKED = 0.05, TRIED = 0.02;
static const double REST_CAUTION = 1.5;
static const double LEAST_RETRY_MS = 20, MAX_RETRY_MS = 60000;
static const double LEAST_LEFT = 0.02; /* of a prefill that takes longer than it should: what is left of it */
static const double LEG_RATE = 0.02;
static const double FIRST_CAUTION = 1.0 / 3, MOST_CAUTION = 1; /* of waiting */
static const double FIRST_TPOT_MARGIN = 0.05, MOST_TPOT_MARGIN = 0.5;
/* Predictions nearer than these shares to a limit count in margins: of TTFT the predicted waiting, of TPOT the predicted step. */
static const double NEAR_TTFT = 0.2, NEAR_TPOT = 0.7;
static const double PROBE_AFTER_MS = 4000, PROBE_EVERY_MS = 1000, MUCH_SLOWER = 1.25;
enum { BELIEVED = 4 }; /* steps: a prompt's chunks, or the first ones that decode */
static const double USE_MS = 5000, STRETCH_RATE = 0.02, MOST_STRETCH = 4;
static const double LEAST_ANSWER = 3;        /* tokens: a shorter answer counts as this long in what delays cost */
static const double TRACE_OF_PROMPTS = 0.02; /* of a worker's time: below, its steps are taken to be without */

struct terms {                   /* on which a prediction is held against the TTFT limit */
    double grace, caution, hope; /* sched/policy.h */
    bool admitted;               /* rather than refused it has a place that is kept for another */
    bool urgent;
};
static const struct terms BACK = {0, 0, SCHEDULER_HOPE, false, false};
static const struct terms PROMISED = {0, 0, SCHEDULER_HOPE, true, true};
/* A queued request that is predicted to be later than this is refused. */
static const struct terms LATE = {0.1, 0, 0, true, true};

struct worker {
    bool up;
    struct sched_worker_info info;
    struct cost_model cost, reference; /* reference: what a probe assumes */
    uint64_t measured_ns, probed_ns;   /* its latest step, and probe */
    uint64_t n_probes;
    const struct sched_request *prober; /* the probe that it has; NULL: none */
    uint32_t n_believed;                /* steps to come that a probe made */
    bool is_measured;                   /* since the last look */
    double prompt_use;                  /* sched/policy.h */
    uint64_t used_ns;                   /* when prompt_use was last brought up to date */
    struct cost_term leg_error;
    double leg_extra_ms; /* of a prefill leg beyond its predicted steps: the mean */
    double load_ms, dram_ms, ssd_ms;
    struct transfer_model transfer;     /* of what comes to it */
    uint32_t n_sends, n_receives;       /* of prompts that are computed, and whose pages still flow */
    struct sched_request *first, *last; /* dispatched prompts */
    uint32_t n_prompts;
    struct sched_request *running;
    uint32_t n_running;
    uint64_t refreshed_ns;
    bool changed;
    struct bookings bookings;
};

struct scheduler {
    struct scheduler_config config;
    struct worker workers[SCHEDULER_MAX_WORKERS];
    struct policy_worker views[SCHEDULER_MAX_WORKERS], pass[SCHEDULER_MAX_WORKERS];
    struct policy_candidate candidates[2 * SCHEDULER_MAX_WORKERS]; /* of the last decision */
    uint32_t n_candidates;
    uint32_t n_workers;
    struct lengths lengths;
    struct margin ttft_margin, tpot_margin;
    double stretch[2];   /* by role: of one worker it would keep those away who could show that it is over */
    double return_share; /* of those for whom a place was kept lately, who came */
    struct fair *fair;
    struct sched_request *queued, *last_queued;
    uint64_t queued_tokens;
    struct drain drain;
    uint32_t n_queued, n_back; /* back: those that came back when they were told to */
    bool dirty;
    struct sched_request *alone;    /* whose plan was made at planned_ns of what still is; NULL: none */
    uint64_t planned_ns, passed_ns; /* passed: the latest pass through all that it looks at */
};

static void changed(struct scheduler *s)
{
    s->dirty = true;
    s->alone = NULL;
}

struct scheduler *scheduler_open(const struct scheduler_config *config)
{
    struct scheduler *s = mem_zalloc(sizeof(*s));
    s->config = *config;
    s->fair = fair_open(config->half_life_ns, config->weights, config->n_weights);
    lengths_init(&s->lengths);
    s->ttft_margin = margin_make(FIRST_CAUTION, MOST_CAUTION);
    s->tpot_margin = margin_make(FIRST_TPOT_MARGIN, MOST_TPOT_MARGIN);
    s->return_share = FULLY_BOOKED;
    s->stretch[ROLE_PREFILL] = s->stretch[ROLE_DECODE] = 1;
    return s;
}

void scheduler_close(struct scheduler *s)
{
    if (s)
        fair_close(s->fair);
    free(s);
}

/* ----------------------------------------------------------------- workers */

static void fill_view(struct scheduler *s, uint32_t w)
{
    const struct worker *k = &s->workers[w];
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
}

static uint64_t n_steps(const struct worker *k)
{
    return k->cost.prefill.n_samples + k->cost.decode.n_samples;
}

/* The one of its role that was measured most; NULL: none was. */
static const struct worker *most_measured(const struct scheduler *s, enum worker_role role)
{
    const struct worker *best = NULL;
    for (uint32_t w = 0; w < s->n_workers; w++) {
        const struct worker *k = &s->workers[w];
        if (k->info.role == role && n_steps(k) > (best ? n_steps(best) : 0))
            best = k;
    }
    return best;
}

/* A worker that has done nothing yet is taken to be as fast as those of its role that have; else it might never be tried. */
static struct cost_model first_cost(const struct scheduler *s, enum worker_role role)
{
    const struct worker *best = most_measured(s, role);
    return best ? cost_like(&best->cost) : cost_make(&s->config.profile);
}

void scheduler_worker_up(struct scheduler *s, uint32_t w, const struct sched_worker_info *info)
{
    struct worker *k = &s->workers[w];
    assert(w < SCHEDULER_MAX_WORKERS && !k->first && !k->running);
    if (!k->cost.prefill.n)
        k->cost = first_cost(s, info->role);
    if (!k->transfer.line.n)
        k->transfer = transfer_make();
    k->info = *info;
    k->up = k->changed = true;
    k->prompt_use = 0;
    s->n_workers = w < s->n_workers ? s->n_workers : w + 1;
    s->views[w].usable = info->role != ROLE_STORE;
    changed(s);
    fill_view(s, w);
}

void scheduler_worker_usable(struct scheduler *s, uint32_t w, bool usable)
{
    usable &= s->workers[w].up && s->workers[w].info.role != ROLE_STORE;
    if (s->views[w].usable != usable)
        changed(s);
    s->views[w].usable = s->pass[w].usable = usable;
}

void scheduler_worker_down(struct scheduler *s, uint32_t w)
{
    assert(!s->workers[w].first && !s->workers[w].running);
    s->workers[w].up = false;
    s->views[w] = (struct policy_worker){0};
    changed(s);
}

void scheduler_observe_step(struct scheduler *s, uint32_t w, const struct cost_step *step)
{
    struct worker *k = &s->workers[w];
    k->cost = k->n_believed ? cost_believe(k->cost, step) : cost_observe(k->cost, step);
    k->n_believed -= k->n_believed > 0;
    k->is_measured = true;
}

void scheduler_observe_loading(struct scheduler *s, uint32_t w, double load_ms, double dram_ms, double ssd_ms)
{
    struct worker *k = &s->workers[w];
    k->load_ms = load_ms;
    k->dram_ms = dram_ms;
    k->ssd_ms = ssd_ms;
    fill_view(s, w);
}

/* ---------------------------------------------------------------- snapshot */

/* What its prompts still take. The head's time runs from when it began; one that overruns is always nearly done. */
static void view_prompts(struct scheduler *s, uint32_t w, uint64_t now)
{
    struct worker *k = &s->workers[w];
    struct policy_worker *v = &s->views[w];
    double share = policy_prompt_share(v, 0);
    v->busy_ms = v->queued_tokens = 0;
    v->n_prompts = k->n_prompts;
    v->patience = INFINITY;
    for (const struct sched_request *q = k->first; q; q = q->prefill_next) {
        double left = q->work_ms;
        if (q == k->first)
            left = fmax(left - clock_ms_between(q->began_ns, now) * share, LEAST_LEFT * left);
        v->busy_ms += left;
        v->queued_tokens += q->work_ms > 0 ? q->plan.new_tokens * left / q->work_ms : 0;
        if (q->ttft_ms > 0 && !q->resumed)
            v->patience = fmin(v->patience, (q->ttft_ms - clock_ms_between(q->arrived_ns, now)) * share / v->busy_ms);
    }
    v->patience = fmax(v->patience, 1);
    k->prompt_use += (1 - exp(-clock_ms_between(k->used_ns, now) / USE_MS)) * ((k->first != NULL) - k->prompt_use);
    k->used_ns = now;
    v->prompt_use = k->prompt_use;
    v->stretch = s->stretch[k->info.role];
    v->takes_prompts = v->queued_tokens < CHUNKS_AHEAD * k->info.chunk_tokens;
    v->booked_ms = bookings_limit_ms(&k->bookings, now);
}

static struct policy_load load_of(const struct scheduler *s, const struct sched_request *q, double step_ms,
                                  double at_ms)
{
    double left = lengths_remaining(&s->lengths, q->tenant, q->n_generated, q->max_tokens);
    double stays = q->max_tokens > 0 ? exp(-at_ms / fmax(left * step_ms, 1)) : 0;
    double context = q->n_tokens + q->n_generated + fmin(at_ms / step_ms, left);
    return (struct policy_load){stays, stays * context, stays * q->n_pages,
                                stays / fmax(q->n_generated + left, LEAST_ANSWER)};
}

/* Who will have left after a while, if answers get as long as they do lately. */
static void view_running(struct scheduler *s, uint32_t w, uint64_t now)
{
    struct worker *k = &s->workers[w];
    struct policy_worker *v = &s->views[w];
    double context = 0;
    for (const struct sched_request *q = k->running; q; q = q->running_next)
        context += q->n_tokens + q->n_generated;
    double step = policy_token_ms(v, fmax(cost_decode_ms(&k->cost, k->n_running, context), 0.1));
    memset(v->at, 0, sizeof(v->at));
    v->tpot_limit_ms = 0;
    for (const struct sched_request *q = k->running; q; q = q->running_next) {
        for (uint32_t i = 0; i < POLICY_HORIZONS; i++) {
            struct policy_load l = load_of(s, q, step, POLICY_HORIZON_MS[i]);
            v->at[i].running += l.running;
            v->at[i].context += l.context;
            v->at[i].pages += l.pages;
            v->at[i].brevity += l.brevity;
        }
        if (q->tpot_ms > 0 && (!(v->tpot_limit_ms > 0) || q->tpot_ms < v->tpot_limit_ms))
            v->tpot_limit_ms = q->tpot_ms;
    }
    k->changed = false;
    k->refreshed_ns = now;
}

/* Others of its role say how fast a worker is, until it has run a step. */
static const struct cost_model *cost_of(const struct scheduler *s, const struct worker *k)
{
    const struct worker *other = n_steps(k) ? NULL : most_measured(s, k->info.role);
    return other ? &other->cost : &k->cost;
}

static const struct transfer_model *transfer_of(const struct scheduler *s, const struct worker *k)
{
    const struct worker *best = k;
    for (uint32_t w = 0; w < s->n_workers && !k->transfer.line.n_samples; w++)
        if (s->workers[w].transfer.line.n_samples > best->transfer.line.n_samples)
            best = &s->workers[w];
    return &best->transfer;
}

/* What flows: prompts that are computed now, and those that wait for their last bytes. */
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

static void expire_bookings(struct scheduler *s, struct worker *k, uint64_t now)
{
    for (uint32_t n = bookings_expire(&k->bookings, now); n; n--)
        s->return_share -= RETURN_RATE * s->return_share;
}

/* How much of their time workers of a role have prompts: the next ones may come to any of them. */
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

void scheduler_refresh(struct scheduler *s, uint64_t now)
{
    for (uint32_t w = 0; w < s->n_workers; w++) {
        if (!s->workers[w].up || s->workers[w].info.role == ROLE_STORE)
            continue;
        expire_bookings(s, &s->workers[w], now);
        if (s->workers[w].is_measured || !s->workers[w].measured_ns)
            s->workers[w].measured_ns = now;
        s->workers[w].is_measured = false;
        s->views[w].cost = cost_of(s, &s->workers[w]);
        if (s->workers[w].changed || clock_ms_between(s->workers[w].refreshed_ns, now) > REFRESH_MS)
            view_running(s, w, now);
        view_prompts(s, w, now);
    }
    view_flows(s);
    view_roles(s);
}

/* What the next decision shall see of this one. Its pages count from now on, though it may begin later: so nobody overtakes it there. */
static void apply(struct policy_worker *views, const struct sched_request *q, const struct plan *plan, double begins_ms)
{
    struct policy_worker *p = &views[plan->prefill], *d = &views[plan->decode];
    double stays_ms = fmax(q->expected_tokens * plan->tpot_ms, 1);
    p->busy_ms += plan->work_ms;
    p->queued_tokens += plan->new_tokens;
    p->n_prompts++;
    p->takes_prompts = p->queued_tokens < CHUNKS_AHEAD * p->chunk_tokens;
    for (uint32_t i = 0; i < POLICY_HORIZONS; i++) {
        double ran = POLICY_HORIZON_MS[i] - begins_ms, there = ran > 0 ? exp(-ran / stays_ms) : 1;
        d->at[i].running += there;
        d->at[i].context += there * (q->n_tokens + q->expected_tokens / 2);
        d->at[i].brevity += there / fmax(q->expected_tokens, LEAST_ANSWER);
        d->at[i].pages += there * ceil((q->n_tokens + q->expected_tokens) / q->block_tokens);
    }
    if (q->tpot_ms > 0 && (!(d->tpot_limit_ms > 0) || q->tpot_ms < d->tpot_limit_ms))
        d->tpot_limit_ms = q->tpot_ms;
}

/* ---------------------------------------------------------------- decisions */

static struct policy_request ask_of(const struct scheduler *s, const struct sched_request *q, uint64_t now,
                                    struct terms terms)
{
    return (struct policy_request){.n_tokens = q->n_tokens,
                                   .max_tokens = q->max_tokens,
                                   .expected_tokens = q->expected_tokens,
                                   .block_tokens = q->block_tokens,
                                   .matched_blocks = q->matched_blocks,
                                   .store_blocks = q->store_blocks,
                                   .store_blocks_ssd = q->store_blocks_ssd,
                                   .ttft_ms = q->resumed ? 0 : q->ttft_ms,
                                   .grace = terms.grace,
                                   .tpot_ms = q->resumed ? 0 : q->tpot_ms,
                                   .tpot_margin = s->config.policy == POLICY_TANDEM ? s->tpot_margin.value : 0,
                                   .urgent = terms.urgent,
                                   .caution = terms.caution,
                                   .hope = terms.hope,
                                   .remaining_ms =
                                       q->deadline_ns == UINT64_MAX ? INFINITY : clock_ms_between(now, q->deadline_ns),
                                   .waited_ms = clock_ms_between(q->arrived_ns, now),
                                   .policy = s->config.policy,
                                   .force = s->config.force,
                                   .prefix = s->config.prefix,
                                   .keeper = q->keeper,
                                   .shares = q->shares,
                                   .number = q->number};
}

void scheduler_avoid(struct sched_request *q, uint32_t w)
{
    for (uint32_t i = 0; i < q->n_avoid && i < SCHEDULER_AVOID; i++)
        if (q->avoid[i] == w)
            return;
    q->avoid[q->n_avoid++ % SCHEDULER_AVOID] = w;
}

/* Workers that failed q are out as long as there is another of their role. */
static uint32_t hide_avoided(const struct scheduler *s, struct policy_worker *views, const struct sched_request *q,
                             uint32_t *hidden_out)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < q->n_avoid && i < SCHEDULER_AVOID; i++) {
        struct policy_worker *v = &views[q->avoid[i]];
        bool others = false;
        for (uint32_t w = 0; w < s->n_workers; w++)
            others |= &views[w] != v && views[w].usable && views[w].role == v->role;
        if (!v->usable || !others)
            continue;
        v->usable = false;
        hidden_out[n++] = q->avoid[i];
    }
    return n;
}

/* For one that comes for the first time. The policies of others keep the margin with which they were compared first. */
static struct terms new_terms(const struct scheduler *s)
{
    double caution = s->config.policy == POLICY_TANDEM ? s->ttft_margin.value : FIRST_CAUTION;
    return (struct terms){0, caution, SCHEDULER_HOPE, false, false};
}

/* ------------------------------------------------------------------ probes */

static bool is_slower(const struct cost_model *m, double prefill, double decode)
{
    return m->recent_prefill > MUCH_SLOWER * prefill || m->recent_decode > MUCH_SLOWER * decode;
}

/* Whether q may find out how fast the worker is now. True: k->reference is the speed that q assumes. */
static bool may_probe(struct worker *k, const struct sched_request *q, uint64_t now)
{
    if (k->prober == q)
        return true;
    if (!k->up || k->info.role == ROLE_STORE || k->first || k->running || k->prober ||
        (k->probed_ns && clock_ms_between(k->probed_ns, now) < PROBE_EVERY_MS))
        return false;
    const struct cost_model *m = &k->cost;
    double prefill = m->usual_prefill > 0 ? m->usual_prefill : 1, decode = m->usual_decode > 0 ? m->usual_decode : 1;
    bool is_usual = !is_slower(m, prefill, decode);
    if (is_usual && clock_ms_between(k->measured_ns, now) > PROBE_AFTER_MS)
        prefill = decode = 1;
    k->reference = cost_at_speed(m, prefill, decode);
    return is_slower(m, prefill, decode);
}

/* Until hide_references(): q sees workers that it may probe at the speed that a probe assumes. */
static void show_references(struct scheduler *s, struct policy_worker *views, const struct sched_request *q,
                            uint64_t now)
{
    for (uint32_t w = 0; w < s->n_workers; w++)
        if (views[w].usable && may_probe(&s->workers[w], q, now))
            views[w].cost = &s->workers[w].reference;
}

static void hide_references(struct scheduler *s, struct policy_worker *views)
{
    for (uint32_t w = 0; w < s->n_workers; w++)
        views[w].cost = cost_of(s, &s->workers[w]);
}

static void begin_probe(struct worker *k, const struct sched_request *q, uint64_t now)
{
    if (!q->is_probe || k->prober || !may_probe(k, q, now))
        return;
    k->prober = q;
    k->probed_ns = now;
    k->n_probes++;
    k->n_believed = BELIEVED;
}

static void end_probe(struct worker *k, const struct sched_request *q)
{
    if (k->prober == q)
        k->prober = NULL;
}

static struct plan place(struct scheduler *s, struct policy_worker *views, struct sched_request *q, uint64_t now,
                         struct terms terms)
{
    if (s->config.match && (!q->matched_ns || clock_ms_between(q->matched_ns, now) > MATCH_MS)) {
        s->config.match(s->config.user, q);
        q->matched_ns = now;
    }
    struct policy_request ask = ask_of(s, q, now, terms);
    uint32_t hidden[SCHEDULER_AVOID], n_hidden = hide_avoided(s, views, q, hidden);
    struct policy_candidate *log = s->config.explain ? s->candidates : NULL;
    struct plan plan = {.kind = PLAN_REFUSE};
    if (q->is_probe)
        show_references(s, views, q, now);
    if (terms.admitted) { /* where it would be admitted now: what it was promised is kept there */
        ask = ask_of(s, q, now, new_terms(s));
        plan = policy_place(views, s->n_workers, &ask, log, &s->n_candidates);
        ask = ask_of(s, q, now, terms);
    }
    if (plan.kind == PLAN_REFUSE)
        plan = policy_place(views, s->n_workers, &ask, log, &s->n_candidates);
    if (plan.kind == PLAN_REFUSE && terms.admitted) {
        ask.keeper = POLICY_ANY_KEEPER;
        plan = policy_place(views, s->n_workers, &ask, log, &s->n_candidates);
    }
    if (q->is_probe)
        hide_references(s, views);
    for (uint32_t i = 0; i < n_hidden; i++)
        views[hidden[i]].usable = true;
    if (plan.kind == PLAN_REFUSE && n_hidden) /* rather with one that failed it than not at all */
        plan = policy_place(views, s->n_workers, &ask, log, &s->n_candidates);
    if (plan.kind != PLAN_REFUSE) {
        double extra = fmax(s->workers[plan.prefill].leg_extra_ms, -plan.work_ms / 2);
        plan.ttft_ms += extra;
        plan.work_ms += extra;
    }
    return plan;
}

static double charge_of(const struct sched_request *q)
{
    return q->n_tokens + q->expected_tokens;
}

/* ------------------------------------------------------------------- order */

/* It came back when it was told to. */
static bool is_back(const struct sched_request *q)
{
    return q->keeper != POLICY_NO_KEEPER;
}

static void enqueue(struct scheduler *s, struct sched_request *q, uint64_t now)
{
    q->due_ms = order_key(s->config.order, q, now);
    q->state = SCHED_QUEUED;
    q->next = NULL;
    q->prev = s->last_queued;
    *(s->last_queued ? &s->last_queued->next : &s->queued) = q;
    s->last_queued = q;
    if (!s->n_queued++)
        s->drain = drain_begin(s->drain, now);
    s->queued_tokens += q->n_tokens;
    q->queued_ms = q->work_ms;
    s->n_back += is_back(q);
    changed(s);
    fair_push(s->fair, q->tenant, q->due_ms, q);
}

static void dequeue(struct scheduler *s, struct sched_request *q)
{
    *(q->prev ? &q->prev->next : &s->queued) = q->next;
    *(q->next ? &q->next->prev : &s->last_queued) = q->prev;
    s->n_queued--;
    s->queued_tokens -= q->n_tokens;
    s->n_back -= is_back(q);
    changed(s);
    fair_remove(s->fair, q->tenant, q->due_ms, q);
}

/*
 * A pass: first those that came back, whose places are kept; then who waited too long; then by order. The first two are looked for to
 * the end of the queue before the third begins: what a walk points to is not refused, and freed, between two of its steps.
 */
struct walk {
    struct sched_request *back, *overdue;
};

static struct walk walk_begin(struct scheduler *s, uint64_t now)
{
    fair_begin(s->fair, now);
    return (struct walk){s->n_back ? s->queued : NULL, s->queued};
}

static struct sched_request *walk_next(struct scheduler *s, struct walk *walk, uint64_t now)
{
    struct sched_request *q;
    while ((q = walk->back)) {
        walk->back = q->next;
        if (is_back(q))
            return q;
    }
    while ((q = walk->overdue)) {
        walk->overdue = q->next;
        if (!is_back(q) && now > q->arrived_ns + s->config.max_wait_ns)
            return q;
    }
    do
        q = fair_next(s->fair);
    while (q && (is_back(q) || now > q->arrived_ns + s->config.max_wait_ns));
    return q;
}

/* ------------------------------------------------------------------ errors */

/* Only requests that were predicted to wait for long enough count. */
static void observe_ttft(struct scheduler *s, const struct sched_request *q, double ttft_ms)
{
    double waiting = q->promised_ttft_ms - q->work_ms;
    if (q->ttft_ms > 0 && !q->resumed && waiting > NEAR_TTFT * q->ttft_ms)
        s->ttft_margin = margin_note(s->ttft_margin, ttft_ms > q->ttft_ms);
}

/*
 * Of the gaps after the first, which has a prediction of its own. Only steps near their limit count. Beside prompts, steps that take
 * what the limit leaves are no error.
 */
static void observe_tpot(struct scheduler *s, const struct sched_request *q, uint64_t now)
{
    struct worker *k = &s->workers[q->plan.decode];
    if (!q->second_ns || q->resumed || q->n_generated < 3)
        return;
    double tpot = clock_ms_between(q->second_ns, now) / (q->n_generated - 2);
    double stretch = fmin(tpot / fmax(q->plan.token_ms / q->plan.stretch, 1e-3), MOST_STRETCH);
    s->stretch[k->info.role] += STRETCH_RATE * (stretch - s->stretch[k->info.role]);
    if (!(q->tpot_ms > 0) || q->plan.step_ms * (1 + s->tpot_margin.value) < NEAR_TPOT * q->tpot_ms)
        return;
    double claimed =
        k->prompt_use > TRACE_OF_PROMPTS ? fmax(q->plan.step_ms, BATCHING_SAFE * q->tpot_ms) : q->plan.step_ms;
    s->tpot_margin = margin_observe(s->tpot_margin, tpot / claimed - 1);
}

/* ------------------------------------------------------------------- passes */

static void add_running(struct worker *k, struct sched_request *q)
{
    q->running_prev = NULL;
    q->running_next = k->running;
    if (k->running)
        k->running->running_prev = q;
    k->running = q;
    k->n_running++;
    k->changed = q->on_decode = true;
}

static void add_prompt(struct worker *k, struct sched_request *q, uint64_t now)
{
    q->prefill_next = NULL;
    *(k->first ? &k->last->prefill_next : &k->first) = q;
    k->last = q;
    k->n_prompts++;
    q->on_prefill = true;
    q->began_ns = now;
}

static void dispatch(struct scheduler *s, struct sched_request *q, const struct plan *plan, uint64_t now)
{
    s->drain = drain_observe(s->drain, q->queued_ms, s->n_queued > 1, now);
    dequeue(s, q);
    q->plan = *plan;
    q->placed_ns = now;
    q->state = SCHED_PREFILLING;
    q->work_ms = plan->work_ms;
    q->n_generated = 0;
    q->n_pages = (uint32_t)ceil((q->n_tokens + q->expected_tokens) / q->block_tokens);
    q->charged = charge_of(q);
    fair_charge(s->fair, q->tenant, q->charged, now);
    begin_probe(&s->workers[plan->prefill], q, now);
    begin_probe(&s->workers[plan->decode], q, now);
    add_prompt(&s->workers[plan->prefill], q, now);
    add_running(&s->workers[plan->decode], q);
    apply(s->views, q, plan, plan->ttft_ms - clock_ms_between(q->arrived_ns, now));
    s->config.place(s->config.user, q);
}

static void drop(struct scheduler *s, struct sched_request *q, const struct plan *plan)
{
    dequeue(s, q);
    observe_ttft(s, q, INFINITY);
    q->plan = *plan;
    q->state = SCHED_OVER;
    s->config.refuse(s->config.user, q, plan->never || plan->hopeless ? 0 : fmax(plan->over_ms, LEAST_RETRY_MS));
}

/* One request's turn in a pass: its plan on the copy, which then has it. */
static struct plan take_turn(struct scheduler *s, struct sched_request *q, uint64_t now, struct terms terms)
{
    struct plan plan = place(s, s->pass, q, now, terms);
    if (plan.kind != PLAN_REFUSE)
        apply(s->pass, q, &plan, plan.ttft_ms - clock_ms_between(q->arrived_ns, now));
    fair_take(s->fair, q->tenant, charge_of(q));
    return plan;
}

static bool some_worker(const struct scheduler *s)
{
    bool decode = false, prefill = false;
    for (uint32_t w = 0; w < s->n_workers; w++) {
        decode |= s->views[w].usable && s->views[w].role == ROLE_DECODE;
        prefill |= s->views[w].usable && s->views[w].role == ROLE_PREFILL;
    }
    return decode && (prefill || (s->config.force != FORCE_SPLIT && s->config.force != FORCE_KEPT));
}

/* Whether a pass may still dispatch anything. */
static bool some_takes(const struct scheduler *s)
{
    for (uint32_t w = 0; w < s->n_workers; w++)
        if (s->pass[w].usable && s->pass[w].takes_prompts)
            return true;
    return false;
}

/* A step whose workflow can't keep its deadline any more goes behind all that can. */
static bool put_last(struct scheduler *s, struct sched_request *q, uint64_t now)
{
    if (s->config.order != ORDER_TANDEM || q->resumed || q->due_ms >= ORDER_LATE_MS || !order_is_lost(q, now))
        return false;
    fair_remove(s->fair, q->tenant, q->due_ms, q);
    q->due_ms += ORDER_LATE_MS;
    fair_push(s->fair, q->tenant, q->due_ms, q);
    return true;
}

/* What admission just decided need not be decided again. */
static void dispatch_alone(struct scheduler *s, uint64_t now)
{
    struct plan plan = s->alone->plan;
    dispatch(s, s->alone, &plan, now);
    s->dirty = false;
}

void scheduler_run(struct scheduler *s, uint64_t now)
{
    struct sched_request *q;
    if (!s->dirty || !s->n_queued || !some_worker(s))
        return;
    if (s->alone && s->alone->plan.now && clock_ms_between(s->planned_ns, now) < FRESH_MS) {
        dispatch_alone(s, now);
        return;
    }
    s->dirty = false;
    scheduler_refresh(s, now);
    memcpy(s->pass, s->views, s->n_workers * sizeof(s->pass[0]));
    struct walk walk = walk_begin(s, now);
    bool is_whole = clock_ms_between(s->passed_ns, now) > REFRESH_MS;
    s->passed_ns = is_whole ? now : s->passed_ns;
    bool stopped = false; /* the rest has a look at the next tick for which a whole pass is due */
    for (uint32_t n = 0; n < SCHEDULER_LOOK && some_worker(s) && !stopped && (q = walk_next(s, &walk, now)); n++) {
        if (put_last(s, q, now))
            continue;
        struct plan plan = take_turn(s, q, now, LATE);
        if (plan.kind == PLAN_REFUSE)
            drop(s, q, &plan);
        else if (plan.now)
            dispatch(s, q, &plan, now);
        stopped = !is_whole && !some_takes(s);
    }
    s->dirty = stopped; /* what the pass itself changed, it has seen */
}

/* --------------------------------------------------------------- admission */

/* The worker that kept a place for it, and does no more now that it is here; POLICY_NO_KEEPER: none. */
static uint32_t booked_with(struct scheduler *s, const struct sched_request *q, uint64_t now)
{
    for (uint32_t w = 0; w < s->n_workers && q->identity; w++) {
        expire_bookings(s, &s->workers[w], now);
        if (bookings_remove(&s->workers[w].bookings, q->identity)) {
            s->return_share += RETURN_RATE * (1 - s->return_share);
            return w;
        }
    }
    return POLICY_NO_KEEPER;
}

/* A pass that only looks: afterwards the copy has all that is queued. */
static void survey(struct scheduler *s, uint64_t now)
{
    struct sched_request *q;
    memcpy(s->pass, s->views, s->n_workers * sizeof(s->pass[0]));
    struct walk walk = walk_begin(s, now);
    for (uint32_t n = 0; n < SCHEDULER_LOOK && (q = walk_next(s, &walk, now)); n++)
        take_turn(s, q, now, LATE);
}

/* The worker and the time at which q will have room first, by what each would take for it. */
static struct worker *first_room(struct scheduler *s, const struct sched_request *q, uint64_t now,
                                 struct booking *booking_out)
{
    const struct policy_request ask = ask_of(s, q, now, PROMISED);
    struct worker *first = NULL;
    bool splits = false; /* what decode workers will be able to prefill is hard to tell */
    uint32_t n;
    for (uint32_t w = 0; w < s->n_workers; w++)
        splits |= s->views[w].usable && s->views[w].role == ROLE_PREFILL;
    survey(s, now);
    policy_place(s->pass, s->n_workers, &ask, s->candidates, &n);
    s->n_candidates = n;
    for (uint32_t i = 0; i < n; i++) {
        const struct policy_candidate *c = &s->candidates[i];
        double work = c->load_ms + c->prefill_ms, wait = fmax(q->ttft_ms * BOOKED_MARGIN - work, 0);
        if (!c->as_prefill || (c->as_decode && splits) || work > q->ttft_ms || c->prefill_ms <= 0)
            continue;
        struct worker *k = &s->workers[c->worker];
        uint64_t at = bookings_earliest(&k->bookings, now, s->pass[c->worker].busy_ms, wait, work);
        if (first ? at < booking_out->at_ns : at < UINT64_MAX) {
            first = k;
            *booking_out = (struct booking){q->identity, at, wait, work};
        }
    }
    return first;
}

/* A place that is kept is taken from others: where hardly anybody comes back, for few of those that are refused. */
static bool is_worth_a_place(const struct scheduler *s, const struct sched_request *q)
{
    return random_unit(random_at(q->number, q->identity, 0)) < fmax(s->return_share / FULLY_BOOKED, TRIED);
}

/* Says when there will be room for q, and may book it. 0: coming back makes no sense. */
static double book(struct scheduler *s, const struct sched_request *q, uint64_t now)
{
    struct booking b;
    double retry = q->plan.over_ms;
    if (q->plan.never || q->plan.hopeless)
        return 0;
    if (q->identity && q->ttft_ms > 0 && s->config.policy == POLICY_TANDEM) { /* others keep no places */
        struct worker *k = first_room(s, q, now, &b);
        if (k) {
            retry = fmax(clock_ms_between(now, b.at_ns), LEAST_RETRY_MS);
            b.at_ns = now + (uint64_t)(retry * 1e6);
            if (is_worth_a_place(s, q))
                bookings_add(&k->bookings, &b);
        }
    }
    return fmin(fmax(retry, LEAST_RETRY_MS), MAX_RETRY_MS);
}

/* Whether one that was admitted before would now miss what it was promised, because of q. */
static bool breaks(const struct scheduler *s, const struct sched_request *other, const struct plan *plan)
{
    return s->config.policy == POLICY_TANDEM && other->ttft_ms > 0 && !other->resumed &&
           other->promised_ttft_ms <= other->ttft_ms && (plan->kind == PLAN_REFUSE || plan->ttft_ms > other->ttft_ms);
}

/*
 * What a pass did not get to: it takes as long as such work took lately, or as what the pass has seen will (pace: of a millisecond of
 * work), whichever is longer, and longer by what nobody knows of a queue that is that long. All workers are busy with it.
 */
static void add_the_rest(struct scheduler *s, double rest_ms, double pace)
{
    double takes_ms = fmax(rest_ms, 0) * fmax(drain_pace(&s->drain), pace) * REST_CAUTION;
    for (uint32_t w = 0; w < s->n_workers; w++)
        s->pass[w].busy_ms += takes_ms * policy_prompt_share(&s->pass[w], s->pass[w].busy_ms);
}

static bool is_before(const struct sched_request *other, const struct sched_request *q)
{
    return other != q && other->due_ms <= q->due_ms;
}

/* All that is queued and due before q, whoever's it is. */
static double work_before(const struct scheduler *s, const struct sched_request *q)
{
    double ms = 0;
    for (const struct sched_request *other = s->queued; other; other = other->next)
        ms += is_before(other, q) ? other->queued_ms : 0;
    return ms;
}

/* The turn of q in a pass with it, and what happens to those behind it. */
static struct plan try_out(struct scheduler *s, struct sched_request *q, uint64_t now, struct terms terms)
{
    struct sched_request *other;
    struct plan plan = {.kind = PLAN_REFUSE};
    double seen_ms = 0, last_ms = 0; /* work that the pass has places for, and when the last of it begins */
    double before_ms = 0;            /* of what it has seen, the work that is due before q */
    bool seen = false;
    memcpy(s->pass, s->views, s->n_workers * sizeof(s->pass[0]));
    struct walk walk = walk_begin(s, now);
    for (uint32_t n = 0; n < SCHEDULER_LOOK && (other = walk_next(s, &walk, now)); n++) {
        struct plan turn = take_turn(s, other, now, other == q ? terms : PROMISED);
        if (other == q) {
            plan = turn;
            seen = true;
            if (plan.kind == PLAN_REFUSE)
                break;
            continue;
        }
        before_ms += is_before(other, q) ? other->queued_ms : 0;
        if (turn.kind != PLAN_REFUSE) {
            seen_ms += turn.work_ms;
            last_ms = fmax(last_ms, turn.start_ms);
        }
        if (seen && !is_back(q) && breaks(s, other, &turn)) {
            plan.kind = PLAN_REFUSE;
            plan.reason = "others that were admitted would miss their slo.ttft_ms";
            plan.over_ms = turn.kind == PLAN_REFUSE ? turn.over_ms : turn.ttft_ms - other->ttft_ms;
            break;
        }
    }
    if (!seen) {
        add_the_rest(s, work_before(s, q) - before_ms, last_ms / fmax(seen_ms, 1));
        plan = place(s, s->pass, q, now, terms);
    }
    return plan;
}

static bool refuse_now(struct scheduler *s, struct sched_request *q, uint64_t now, double *retry_after_ms_out)
{
    q->state = SCHED_OVER;
    *retry_after_ms_out = book(s, q, now);
    return false;
}

/* An empty queue takes any request. */
static bool has_room(const struct scheduler *s, const struct sched_request *q)
{
    return q->resumed || !s->n_queued ||
           (s->n_queued < s->config.max_queued && s->queued_tokens + q->n_tokens <= s->config.max_queued_tokens);
}

static bool some_probe(struct scheduler *s, const struct sched_request *q, uint64_t now)
{
    for (uint32_t w = 0; w < s->n_workers; w++)
        if (s->views[w].usable && may_probe(&s->workers[w], q, now))
            return true;
    return false;
}

/* Whether it could be answered in time if idle workers were not as slow as they were last. */
static void try_probe(struct scheduler *s, struct sched_request *q, uint64_t now, struct terms terms)
{
    if (!some_probe(s, q, now))
        return;
    q->is_probe = true;
    struct plan plan = place(s, s->views, q, now, terms);
    q->is_probe = plan.kind != PLAN_REFUSE && plan.now;
    if (q->is_probe)
        q->plan = plan;
}

/* True: it is queued. False: q->plan says why not. */
static bool admit(struct scheduler *s, struct sched_request *q, uint64_t now)
{
    struct terms terms = is_back(q) ? BACK : new_terms(s);
    scheduler_refresh(s, now);
    q->plan = place(s, s->views, q, now, terms);
    if (q->plan.kind == PLAN_REFUSE && !q->resumed && s->config.policy == POLICY_TANDEM)
        try_probe(s, q, now, terms);
    q->work_ms = q->plan.work_ms;
    q->promised_ttft_ms = q->plan.ttft_ms;
    q->promised_tpot_ms = q->plan.tpot_ms;
    if (q->plan.kind == PLAN_REFUSE && !q->resumed)
        return false;
    enqueue(s, q, now);
    if (s->n_queued == 1 && q->plan.kind != PLAN_REFUSE) {
        s->alone = q;
        s->planned_ns = now;
    }
    if (s->n_queued == 1 || q->resumed)
        return true;
    q->plan = try_out(s, q, now, terms);
    if (q->plan.kind == PLAN_REFUSE) {
        dequeue(s, q);
        return false;
    }
    q->promised_ttft_ms = q->plan.ttft_ms;
    q->promised_tpot_ms = q->plan.tpot_ms;
    return true;
}

static void prepare(struct scheduler *s, struct sched_request *q)
{
    q->expected_tokens = lengths_remaining(&s->lengths, q->tenant, 0, q->max_tokens);
    q->keeper = POLICY_NO_KEEPER;
    q->is_probe = false;
}

bool scheduler_submit(struct scheduler *s, struct sched_request *q, uint64_t now, double *retry_after_ms_out)
{
    prepare(s, q);
    if (!has_room(s, q)) {
        q->plan = (struct plan){.kind = PLAN_REFUSE, .reason = "the queue is full", .over_ms = 1000};
        return refuse_now(s, q, now, retry_after_ms_out);
    }
    if (!some_worker(s)) { /* nothing can be said yet */
        enqueue(s, q, now);
        return true;
    }
    q->keeper = booked_with(s, q, now);
    return admit(s, q, now) || refuse_now(s, q, now, retry_after_ms_out);
}

bool scheduler_would_admit(struct scheduler *s, struct sched_request *q, uint64_t now)
{
    bool dirty = s->dirty, admitted = false;
    prepare(s, q);
    if (has_room(s, q) && (!some_worker(s) || admit(s, q, now))) {
        admitted = true;
        if (q->state == SCHED_QUEUED)
            dequeue(s, q);
    }
    q->state = SCHED_NEW;
    s->dirty = dirty;
    return admitted;
}

/* ---------------------------------------------------------------- progress */

/* What the leg took from its turn on, against its prediction; the mean of the rest is added to those to come. */
static void observe_leg(struct worker *k, const struct sched_request *q, uint64_t now)
{
    double took = clock_ms_between(q->began_ns, now) * q->plan.prompt_share,
           extra = took - (q->work_ms - k->leg_extra_ms);
    cost_term_observe(&k->leg_error, q->work_ms, took);
    double most = 0.5 * q->work_ms + 1, rate = fmax(LEG_RATE, 1.0 / (double)(k->leg_error.n + 1));
    k->leg_extra_ms += rate * (fmax(fmin(extra, most), -most) - k->leg_extra_ms);
}

static void remove_prompt(struct scheduler *s, struct sched_request *q, uint64_t now, bool observed)
{
    struct worker *k = &s->workers[q->plan.prefill];
    struct sched_request **at = &k->first, *before = NULL;
    if (!q->on_prefill)
        return;
    if (observed && k->first == q)
        observe_leg(k, q, now);
    while (*at != q) {
        before = *at;
        at = &(*at)->prefill_next;
    }
    *at = q->prefill_next;
    k->last = k->last == q ? before : k->last;
    k->n_prompts--;
    q->on_prefill = false;
    if (at == &k->first && k->first)
        k->first->began_ns = now;
    changed(s);
}

static void end_moving(struct scheduler *s, struct sched_request *q)
{
    if (!q->is_moving)
        return;
    q->is_moving = false;
    s->workers[q->plan.prefill].n_sends--;
    s->workers[q->plan.decode].n_receives--;
}

static void remove_running(struct scheduler *s, struct sched_request *q)
{
    struct worker *k = &s->workers[q->plan.decode];
    if (!q->on_decode)
        return;
    end_moving(s, q);
    *(q->running_prev ? &q->running_prev->running_next : &k->running) = q->running_next;
    if (q->running_next)
        q->running_next->running_prev = q->running_prev;
    k->n_running--;
    k->changed = true;
    changed(s);
    q->on_decode = false;
}

void scheduler_prefilled(struct scheduler *s, struct sched_request *q, uint64_t now)
{
    if (!q->first_ns) {
        q->first_ns = now;
        observe_ttft(s, q, clock_ms_between(q->arrived_ns, now));
    }
    remove_prompt(s, q, now, true);
    if (q->state != SCHED_PREFILLING)
        return;
    q->state = SCHED_DECODING;
    if (q->plan.kind == PLAN_SPLIT && q->on_decode && q->plan.transfer.tokens > 0) {
        q->is_moving = true;
        s->workers[q->plan.prefill].n_sends++;
        s->workers[q->plan.decode].n_receives++;
    }
}

void scheduler_moved(struct scheduler *s, struct sched_request *q, double exposed_ms)
{
    struct worker *k = &s->workers[q->plan.decode];
    if (q->state == SCHED_DECODING && q->plan.kind == PLAN_SPLIT)
        k->transfer = transfer_observe(k->transfer, &q->plan.transfer, exposed_ms);
    end_moving(s, q);
}

void scheduler_second_token(struct scheduler *s, struct sched_request *q, uint64_t at)
{
    struct worker *k = &s->workers[q->plan.decode];
    if (q->state == SCHED_DECODING && q->plan.kind == PLAN_SPLIT && !q->resumed && q->first_ns)
        k->transfer = transfer_observe_gap(k->transfer, q->plan.gap_ms, clock_ms_between(q->first_ns, at));
    q->second_ns = q->second_ns ? q->second_ns : at;
    end_moving(s, q);
}

void scheduler_generated(struct sched_request *q, uint32_t n_tokens)
{
    q->n_generated = n_tokens;
}

void scheduler_decoded(struct scheduler *s, struct sched_request *q)
{
    remove_running(s, q);
}

/* used: tokens that its tenant pays for, instead of what was expected. */
static void leave_workers(struct scheduler *s, struct sched_request *q, uint64_t now, double used)
{
    remove_prompt(s, q, now, false);
    remove_running(s, q);
    end_probe(&s->workers[q->plan.prefill], q);
    end_probe(&s->workers[q->plan.decode], q);
    fair_charge(s->fair, q->tenant, used - q->charged, now);
}

void scheduler_end(struct scheduler *s, struct sched_request *q, uint64_t now, bool answered)
{
    if (q->state == SCHED_QUEUED)
        dequeue(s, q);
    else if (q->state == SCHED_PREFILLING || q->state == SCHED_DECODING)
        leave_workers(s, q, now, q->n_tokens + q->n_generated);
    if (answered && q->state == SCHED_DECODING)
        observe_tpot(s, q, now);
    if (answered)
        lengths_observe(&s->lengths, q->tenant, q->n_generated, q->max_tokens);
    q->state = SCHED_OVER;
}

void scheduler_requeue(struct scheduler *s, struct sched_request *q, uint64_t now)
{
    q->keeper = POLICY_NO_KEEPER;
    leave_workers(s, q, now, 0); /* what it generated is part of its prompt from now on */
    q->n_generated = 0;
    q->matched_ns = 0;
    q->expected_tokens = lengths_remaining(&s->lengths, q->tenant, 0, q->max_tokens);
    enqueue(s, q, now);
}

/* -------------------------------------------------------------- from outside */

struct sched_worker_stats scheduler_worker_stats(const struct scheduler *s, uint32_t w)
{
    const struct worker *k = &s->workers[w];
    return (struct sched_worker_stats){.busy_ms = s->views[w].busy_ms,
                                       .pages = s->views[w].at[0].pages,
                                       .n_prompts = k->n_prompts,
                                       .running = k->n_running,
                                       .cost = k->cost,
                                       .leg_error = k->leg_error,
                                       .transfer_error = k->transfer.exposed_error,
                                       .gap_error = k->transfer.gap_error,
                                       .n_probes = k->n_probes};
}

struct scheduler_margins scheduler_margins(const struct scheduler *s)
{
    return (struct scheduler_margins){s->ttft_margin.value, s->tpot_margin.value};
}

uint32_t scheduler_queued(const struct scheduler *s)
{
    return s->n_queued;
}

uint64_t scheduler_queued_tokens(const struct scheduler *s)
{
    return s->queued_tokens;
}

const struct policy_candidate *scheduler_candidates(const struct scheduler *s, uint32_t *n_out)
{
    *n_out = s->n_candidates;
    return s->candidates;
}
