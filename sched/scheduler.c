#include "sched/scheduler_internal.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "sched/batching.h"
#include "sched/order.h"

enum { SCHEDULER_LOOK = 128, ENOUGH_WAIT = 16, FEW_RUNNING = 128 };

static const double MATCH_MS = 100, FRESH_MS = 1;
static const double BOOKED_MARGIN = 0.88; /* of its limit: what one that comes back is given place for */
/* Every refused request gets a booking where this share of them comes back; at least the share TRIED does, to find out. */
static const double FULLY_BOOKED = 0.05, TRIED = 0.02;
static const double REST_CAUTION = 1.5;
static const double LEAST_RETRY_MS = 20, MAX_RETRY_MS = 60000;
static const double MOST_AWAY_MS = 5000,
                    AWAY_GRACE_MS = 500; /* for which one that was told to come back keeps its tenant's turn */
static const double CHARGE_RATE = 0.02;
static const double APART_MS = 5.0 / (1000 * 128), MOST_APART_MS = 10, LOOKS_APART = 10;
static const double LEG_RATE = 0.02;
static const double FIRST_CAUTION = 1.0 / 3, MOST_CAUTION = 1; /* of waiting */
static const double FIRST_TPOT_MARGIN = 0.05, MOST_TPOT_MARGIN = 0.5;
/* Predictions nearer than these shares to a limit count in margins: of TTFT the predicted waiting, of TPOT the predicted step. */
static const double NEAR_TTFT = 0.2, NEAR_TPOT = 0.7;
static const double AVOID_MS = 2000; /* workers that failed a request */
static const double PROBE_AFTER_MS = 4000, PROBE_EVERY_MS = 1000;
enum { BELIEVED = 4 }; /* steps: a prompt's chunks, or the first ones that decode */
static const double STRETCH_RATE = 0.02, MOST_STRETCH = 4;
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

struct scheduler *scheduler_open(const struct scheduler_config *config)
{
    struct scheduler *s = mem_zalloc(sizeof(*s));
    s->config = *config;
    s->fair = fair_open(config->weights, config->n_weights);
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
                                   .peer_blocks = q->peer_blocks,
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
                                   .number = q->number,
                                   .seed = s->config.seed};
}

void scheduler_avoid(struct sched_request *q, uint32_t w)
{
    for (uint32_t i = 0; i < q->n_avoid && i < SCHEDULER_AVOID; i++)
        if (q->avoid[i] == w)
            return;
    q->avoid[q->n_avoid++ % SCHEDULER_AVOID] = w;
}

/*
 * Workers that failed q are out for a while, if there is another of their role. Not longer: another router may keep that one full, and
 * whether a worker goes on failing is for its breaker to say.
 */
static uint32_t hide_avoided(const struct scheduler *s, struct policy_worker *views, const struct sched_request *q,
                             uint64_t now, uint32_t *hidden_out)
{
    uint32_t n = 0;
    if (clock_ms_between(q->requeued_ns, now) > AVOID_MS)
        return 0;
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
    return m->recent_prefill > COST_MUCH_SLOWER * prefill || m->recent_decode > COST_MUCH_SLOWER * decode;
}

/* Whether q may find out how fast the worker is now. True: k->reference is the speed that q assumes. */
static bool may_probe(struct sched_worker *k, const struct sched_request *q, uint64_t now)
{
    if (k->prober == q)
        return true;
    if (!k->up || k->info.role == ROLE_STORE || k->first || k->running || k->prober || k->report.n_prompts ||
        k->report.running || (k->probed_ns && clock_ms_between(k->probed_ns, now) < PROBE_EVERY_MS))
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
        if (views[w].usable && may_probe(&s->workers[w], q, now)) {
            views[w].cost = &s->workers[w].reference;
            views[w].share = 0;
        }
}

static void hide_references(struct scheduler *s, struct policy_worker *views)
{
    for (uint32_t w = 0; w < s->n_workers; w++) {
        views[w].cost = scheduler_cost_of(s, &s->workers[w]);
        if (views[w].usable)
            scheduler_know_share(&views[w]);
    }
}

static void begin_probe(struct sched_worker *k, const struct sched_request *q, uint64_t now)
{
    if (!q->is_probe || k->prober || !may_probe(k, q, now))
        return;
    k->prober = q;
    k->probed_ns = now;
    k->n_probes++;
    k->n_believed = BELIEVED;
}

static void end_probe(struct sched_worker *k, const struct sched_request *q)
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
    uint32_t hidden[SCHEDULER_AVOID], n_hidden = hide_avoided(s, views, q, now, hidden);
    struct policy_candidate *log = s->logs ? s->candidates : NULL;
    uint32_t *n_log = s->logs ? &s->n_candidates : NULL;
    struct plan plan = {.kind = PLAN_REFUSE};
    if (q->is_probe)
        show_references(s, views, q, now);
    if (terms.admitted) { /* where it would be admitted now: what it was promised is kept there */
        ask = ask_of(s, q, now, new_terms(s));
        plan = policy_place(views, s->n_workers, &ask, log, n_log);
        ask = ask_of(s, q, now, terms);
    }
    if (plan.kind == PLAN_REFUSE)
        plan = policy_place(views, s->n_workers, &ask, log, n_log);
    if (plan.kind == PLAN_REFUSE && terms.admitted) {
        ask.keeper = POLICY_ANY_KEEPER;
        plan = policy_place(views, s->n_workers, &ask, log, n_log);
    }
    if (q->is_probe)
        hide_references(s, views);
    for (uint32_t i = 0; i < n_hidden; i++)
        views[hidden[i]].usable = true;
    if (plan.kind == PLAN_REFUSE && n_hidden) /* rather with one that failed it than not at all */
        plan = policy_place(views, s->n_workers, &ask, log, n_log);
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
    q->look = 0;
    q->next = NULL;
    q->prev = s->last_queued;
    *(s->last_queued ? &s->last_queued->next : &s->queued) = q;
    s->last_queued = q;
    if (!s->n_queued++)
        s->drain = drain_begin(s->drain, now);
    s->queued_tokens += q->n_tokens;
    q->queued_ms = q->work_ms;
    s->queued_ms += q->queued_ms;
    s->block_tokens = q->block_tokens;
    s->n_back += is_back(q);
    scheduler_changed(s);
    fair_push(s->fair, q->tenant, q->due_ms, q->n_tokens, q, now);
}

static void dequeue(struct scheduler *s, struct sched_request *q)
{
    *(q->prev ? &q->prev->next : &s->queued) = q->next;
    *(q->next ? &q->next->prev : &s->last_queued) = q->prev;
    s->n_queued--;
    s->queued_tokens -= q->n_tokens;
    s->queued_ms = s->n_queued ? s->queued_ms - q->queued_ms : 0;
    s->n_back -= is_back(q);
    s->look.before_ms -= q->look == s->look.number ? q->queued_ms : 0;
    scheduler_changed(s);
    fair_remove(s->fair, q->tenant, q->due_ms, q->n_tokens, q);
}

/* Its place inside its tenant's part of the queue. */
static void put_at(struct scheduler *s, struct sched_request *q, double due_ms, uint64_t now)
{
    fair_remove(s->fair, q->tenant, q->due_ms, q->n_tokens, q);
    q->due_ms = due_ms;
    fair_push(s->fair, q->tenant, q->due_ms, q->n_tokens, q, now);
}

static bool is_overdue(const struct sched_request *q)
{
    return q->due_ms < ORDER_OVERDUE_MS / 2;
}

/* A request that waited too long is the first of its tenant. The list is by arrival, but for those that were queued again, who are resumed. */
static void promote_overdue(struct scheduler *s, uint64_t now)
{
    for (struct sched_request *q = s->queued; q; q = q->next) {
        bool waited = now > q->arrived_ns + s->config.max_wait_ns;
        if (!waited && !q->resumed)
            return;
        if (waited && !is_overdue(q))
            put_at(s, q, ORDER_OVERDUE_MS + (double)q->arrived_ns * 1e-6, now);
    }
}

/*
 * A pass: first those that came back, whose places are kept; then by order. The first are looked for to the end of the queue before
 * the others begin: what a walk points to is not refused, and freed, between two of its steps.
 */
struct walk {
    struct sched_request *back;
};

static struct walk walk_begin(struct scheduler *s, uint64_t now)
{
    promote_overdue(s, now);
    fair_begin(s->fair, now);
    return (struct walk){s->n_back ? s->queued : NULL};
}

static struct sched_request *walk_next(struct scheduler *s, struct walk *walk)
{
    struct sched_request *q;
    while ((q = walk->back)) {
        walk->back = q->next;
        if (is_back(q))
            return q;
    }
    do
        q = fair_next(s->fair);
    while (q && is_back(q));
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
    struct sched_worker *k = &s->workers[q->plan.decode];
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

static void add_running(struct sched_worker *k, struct sched_request *q)
{
    q->running_prev = NULL;
    q->running_next = k->running;
    if (k->running)
        k->running->running_prev = q;
    k->running = q;
    k->n_running++;
    k->changed |=
        k->n_running <= FEW_RUNNING; /* else scheduler_apply() is near enough until the next look at all of them */
    q->on_decode = true;
}

static void add_prompt(struct sched_worker *k, struct sched_request *q, uint64_t now)
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
    fair_serve(s->fair, q->tenant, q->charged, now);
    s->ms_per_charge += (s->ms_per_charge > 0 ? CHARGE_RATE : 1) * (q->queued_ms / q->charged - s->ms_per_charge);
    begin_probe(&s->workers[plan->prefill], q, now);
    begin_probe(&s->workers[plan->decode], q, now);
    add_prompt(&s->workers[plan->prefill], q, now);
    add_running(&s->workers[plan->decode], q);
    scheduler_apply(s->views, q, plan, plan->ttft_ms - clock_ms_between(q->arrived_ns, now), 1);
    s->config.place(s->config.user, q);
}

/* A tenant that was told to come back keeps its turn for so long. */
static void expect_back(struct scheduler *s, const struct sched_request *q, double retry_ms, uint64_t now)
{
    if (retry_ms > 0)
        fair_want(s->fair, q->tenant, now + (uint64_t)((fmin(retry_ms, MOST_AWAY_MS) + AWAY_GRACE_MS) * 1e6));
}

static void drop(struct scheduler *s, struct sched_request *q, const struct plan *plan, uint64_t now)
{
    double retry_ms = plan->never || plan->hopeless ? 0 : fmin(fmax(plan->over_ms, LEAST_RETRY_MS), MAX_RETRY_MS);
    dequeue(s, q);
    observe_ttft(s, q, INFINITY);
    q->plan = *plan;
    q->state = SCHED_OVER;
    expect_back(s, q, retry_ms, now);
    s->config.refuse(s->config.user, q, retry_ms);
}

/* All workers of the pass have so many milliseconds more to do. */
static void keep_busy(struct scheduler *s, double ms)
{
    for (uint32_t w = 0; w < s->n_workers && ms > 0; w++) {
        s->pass[w].busy_ms += ms * policy_prompt_share(&s->pass[w], s->pass[w].busy_ms);
        scheduler_know_share(&s->pass[w]);
    }
}

/*
 * The copy on which turns are taken. Where other routers have queues, all routers send when a worker takes prompts, and half of the
 * others' prompts come to it before this router's.
 */
static void begin_pass(struct scheduler *s)
{
    memcpy(s->pass, s->views, s->n_workers * sizeof(s->pass[0]));
    keep_busy(s, s->beside * s->queued_ms / fmax(s->n_queued, 1) / 2);
}

/* place() once more, for those who ask why: what it weighs is kept. */
static void explain(struct scheduler *s, struct policy_worker *views, struct sched_request *q, uint64_t now,
                    struct terms terms)
{
    s->logs = s->config.explain;
    if (s->logs)
        place(s, views, q, now, terms);
    s->logs = false;
}

/* One request's turn in a pass: its plan on the copy, which then has it. Decides: it is sent or refused now, if it can be. */
static struct plan take_turn(struct scheduler *s, struct sched_request *q, uint64_t now, struct terms terms,
                             bool decides)
{
    struct plan plan = place(s, s->pass, q, now, terms);
    if (decides && (plan.kind == PLAN_REFUSE || plan.now))
        explain(s, s->pass, q, now, terms);
    if (plan.kind != PLAN_REFUSE)
        scheduler_apply(s->pass, q, &plan, plan.ttft_ms - clock_ms_between(q->arrived_ns, now), 1 + s->beside);
    fair_take(s->fair, q->tenant, charge_of(q));
    return plan;
}

struct roles { /* usable workers are there */
    bool decode, prefill;
    bool read; /* a prefill worker that a decode worker can read from; only looked at where all plans are split */
};

static struct roles count_roles(const struct scheduler *s)
{
    struct roles r = {false, false, false};
    for (uint32_t w = 0; w < s->n_workers; w++) {
        if (!s->views[w].usable)
            continue;
        bool prefill = s->views[w].role == ROLE_PREFILL;
        r.decode |= s->views[w].role == ROLE_DECODE;
        r.prefill |= prefill;
        r.read |= prefill && s->config.force == FORCE_SPLIT && policy_is_read(s->views, s->n_workers, w);
    }
    return r;
}

static bool some_worker(const struct scheduler *s)
{
    struct roles r = count_roles(s);
    return r.decode && (s->config.force == FORCE_SPLIT ? r.read : s->config.force != FORCE_KEPT || r.prefill);
}

bool scheduler_is_cut(const struct scheduler *s)
{
    struct roles r = count_roles(s);
    return s->config.force == FORCE_SPLIT && r.decode && r.prefill && !r.read;
}

/* Whether a pass may still dispatch anything. */
static bool some_takes(const struct scheduler *s)
{
    for (uint32_t w = 0; w < s->n_workers; w++)
        if (s->pass[w].usable && s->pass[w].takes_prompts)
            return true;
    return false;
}

/* A step whose workflow can't keep its deadline any more goes behind all that can, until it has waited too long. */
static bool put_last(struct scheduler *s, struct sched_request *q, uint64_t now)
{
    if (s->config.order != ORDER_TANDEM || q->resumed || is_overdue(q) || q->due_ms >= ORDER_LATE_MS ||
        !order_is_lost(q, now))
        return false;
    put_at(s, q, q->due_ms + ORDER_LATE_MS, now);
    return true;
}

/* What admission just decided need not be decided again. */
static void dispatch_alone(struct scheduler *s, uint64_t now)
{
    struct plan plan = s->alone->plan;
    dispatch(s, s->alone, &plan, now);
    s->dirty = false;
}

/* Whether the queue would hold more than its bound, or this part of it. */
static bool is_over(const struct scheduler *s, double n, double tokens, double part)
{
    return n > part * s->config.max_queued || tokens > part * (double)s->config.max_queued_tokens;
}

/*
 * A queue that is not full takes any request; a full one takes those of tenants that have less than their share of it, and what is
 * too much then goes, the last of whoever has most (make_room). An empty part of it takes any request.
 */
static bool has_room(const struct scheduler *s, const struct sched_request *q, uint64_t now)
{
    uint32_t n = fair_count(s->fair, q->tenant);
    return q->resumed || is_back(q) || !n ||
           !is_over(s, s->n_queued + 1.0, (double)(s->queued_tokens + q->n_tokens), 1) ||
           !is_over(s, n + 1.0, fair_size(s->fair, q->tenant) + q->n_tokens, fair_share(s->fair, q->tenant, now));
}

/* Those that a full queue sends away come back one after the other, as fast as it is emptied. */
static double retry_when_full(struct scheduler *s, uint64_t now)
{
    double pace = drain_pace(&s->drain);
    double each = s->queued_ms / fmax(s->n_queued, 1) * (pace > 0 ? pace : 1.0 / fmax(s->n_workers, 1));
    s->full_ns = (s->full_ns > now ? s->full_ns : now) + (uint64_t)(fmin(each, MAX_RETRY_MS) * 1e6);
    uint64_t most = now + (uint64_t)(MAX_RETRY_MS * 1e6);
    s->full_ns = s->full_ns < most ? s->full_ns : most;
    return clock_ms_between(now, s->full_ns);
}

static struct plan full_plan(struct scheduler *s, uint64_t now)
{
    return (struct plan){.kind = PLAN_REFUSE, .reason = "the queue is full", .over_ms = retry_when_full(s, now)};
}

static bool is_resumed(const void *item)
{
    return ((const struct sched_request *)item)->resumed;
}

/* A queue that holds too much gives up what it would serve last, but no answer that its client has in part. */
static void make_room(struct scheduler *s, uint64_t now)
{
    while (s->n_queued > 1 && is_over(s, s->n_queued, (double)s->queued_tokens, 1)) {
        struct sched_request *q = fair_last(s->fair, s->n_queued <= s->config.max_queued, is_resumed);
        if (!q)
            return;
        const struct plan plan = full_plan(s, now);
        drop(s, q, &plan, now);
    }
}

/*
 * In a long queue for many workers passes cost much and change little: so they are this far apart. 5 ms for 1000 that wait for 128
 * workers, who have two chunks ahead each; a queue that a pass sees whole is always looked at anew.
 */
static double pass_apart_ms(const struct scheduler *s)
{
    double size = (double)s->n_queued * s->n_workers;
    bool is_long = s->n_queued > SCHEDULER_LOOK && !s->config.whole_passes;
    return is_long ? fmin(size * APART_MS, MOST_APART_MS) : 0;
}

void scheduler_run(struct scheduler *s, uint64_t now)
{
    struct sched_request *q;
    make_room(s, now);
    if (s->avoids_ns &&
        clock_ms_between(s->avoids_ns, now) > AVOID_MS) { /* workers that were avoided are not any more */
        s->avoids_ns = 0;
        s->dirty = true;
    }
    if (!s->dirty || !s->n_queued || !some_worker(s))
        return;
    if (s->alone && s->alone->plan.now && clock_ms_between(s->planned_ns, now) < FRESH_MS) {
        dispatch_alone(s, now);
        return;
    }
    if (!s->is_dry && clock_ms_between(s->ran_ns, now) < pass_apart_ms(s))
        return;
    s->dirty = s->is_dry = false;
    s->ran_ns = now;
    scheduler_refresh(s, now);
    begin_pass(s);
    struct walk walk = walk_begin(s, now);
    bool is_whole = clock_ms_between(s->passed_ns, now) > SCHEDULER_REFRESH_MS;
    s->passed_ns = is_whole ? now : s->passed_ns;
    bool stopped = false; /* the rest has a look at the next tick for which a whole pass is due */
    uint32_t n_waits = 0; /* in a row */
    for (uint32_t n = 0; n < SCHEDULER_LOOK && some_worker(s) && !stopped && (q = walk_next(s, &walk)); n++) {
        if (put_last(s, q, now))
            continue;
        struct plan plan = take_turn(s, q, now, LATE, true);
        if (plan.kind == PLAN_REFUSE)
            drop(s, q, &plan, now);
        else if (plan.now)
            dispatch(s, q, &plan, now);
        n_waits = plan.now ? 0 : n_waits + 1;
        stopped = !is_whole && (!some_takes(s) || (n_waits == ENOUGH_WAIT && s->n_queued > SCHEDULER_LOOK));
    }
    s->dirty = stopped; /* what the pass itself changed, it has seen */
}

/* --------------------------------------------------------------- admission */

/* The worker that kept a place for it, and does no more now that it is here; POLICY_NO_KEEPER: none. */
static uint32_t booked_with(struct scheduler *s, const struct sched_request *q, uint64_t now)
{
    for (uint32_t w = 0; w < s->n_workers && q->identity; w++) {
        scheduler_expire_bookings(s, &s->workers[w], now);
        if (bookings_remove(&s->workers[w].bookings, q->identity)) {
            s->return_share += SCHEDULER_RETURN_RATE * (1 - s->return_share);
            return w;
        }
    }
    return POLICY_NO_KEEPER;
}

/* A pass that only looks: afterwards the copy has all that is queued. */
static void survey(struct scheduler *s, uint64_t now)
{
    struct sched_request *q;
    begin_pass(s);
    struct walk walk = walk_begin(s, now);
    for (uint32_t n = 0; n < SCHEDULER_LOOK && (q = walk_next(s, &walk)); n++)
        take_turn(s, q, now, LATE, false);
}

/* The worker and the time at which q will have room first, by what each would take for it. */
static struct sched_worker *first_room(struct scheduler *s, const struct sched_request *q, uint64_t now,
                                       struct booking *booking_out)
{
    const struct policy_request ask = ask_of(s, q, now, PROMISED);
    struct sched_worker *first = NULL;
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
        struct sched_worker *k = &s->workers[c->worker];
        uint64_t at = bookings_earliest(&k->bookings, now, s->pass[c->worker].busy_ms, wait, work);
        if (first ? at < booking_out->at_ns : at < UINT64_MAX) {
            first = k;
            *booking_out = (struct booking){q->identity, at, wait, work, q->tenant, charge_of(q)};
        }
    }
    return first;
}

/* A place that is kept is taken from others: where hardly anybody comes back, for few of those that are refused. */
static bool is_worth_a_place(const struct scheduler *s, const struct sched_request *q)
{
    return random_unit(random_at(q->number, q->identity, 0)) < fmax(s->return_share / FULLY_BOOKED, TRIED);
}

/* What places are kept for its tenant, in what it will be charged. */
static double booked_for(const struct scheduler *s, const struct sched_request *q)
{
    double charge = 0;
    for (uint32_t w = 0; w < s->n_workers; w++)
        charge += bookings_charge(&s->workers[w].bookings, q->tenant);
    return charge;
}

/* Says when there will be room for q, and may book it. 0: coming back makes no sense. */
static double book(struct scheduler *s, const struct sched_request *q, uint64_t now)
{
    struct booking b;
    double retry = q->plan.over_ms;
    if (q->plan.never || q->plan.hopeless)
        return 0;
    if (q->identity && q->ttft_ms > 0 && s->config.policy == POLICY_TANDEM) { /* others keep no places */
        struct sched_worker *k = first_room(s, q, now, &b);
        if (k) {
            retry = fmax(clock_ms_between(now, b.at_ns), LEAST_RETRY_MS);
            b.at_ns = now + (uint64_t)(retry * 1e6);
            if (is_worth_a_place(s, q) && fair_is_behind(s->fair, q->tenant, booked_for(s, q) + charge_of(q), now))
                bookings_add(&k->bookings, &b);
        }
    }
    return fmin(fmax(retry, LEAST_RETRY_MS), MAX_RETRY_MS);
}

/*
 * Whether one that was admitted before would now miss what it was promised, because of q. Only one of its own tenant counts: before
 * those of others it goes by its share.
 */
static bool breaks(const struct scheduler *s, const struct sched_request *q, const struct sched_request *other,
                   const struct plan *plan)
{
    return s->config.policy == POLICY_TANDEM && fair_same(s->fair, other->tenant, q->tenant) && other->ttft_ms > 0 &&
           !other->resumed && other->promised_ttft_ms <= other->ttft_ms &&
           (plan->kind == PLAN_REFUSE || plan->ttft_ms > other->ttft_ms);
}

/*
 * What a pass did not get to: it takes as long as such work took lately, or as what the pass has seen will (pace: of a millisecond of
 * work), whichever is longer, and longer by what nobody knows of a queue that is that long. All workers are busy with it.
 */
static void add_the_rest(struct scheduler *s, double rest_ms, double pace)
{
    keep_busy(s, fmax(rest_ms, 0) * fmax(drain_pace(&s->drain), pace) * REST_CAUTION);
}

static bool is_before(const struct sched_request *other, const struct sched_request *q)
{
    return other != q && other->due_ms <= q->due_ms;
}

/* All that is queued and goes before q: of its own tenant what is due before it, of others what their shares are meanwhile. */
static double work_before(const struct scheduler *s, const struct sched_request *q, uint64_t now)
{
    double own = 0, others = 0;
    for (const struct sched_request *other = s->queued; other; other = other->next) {
        if (!fair_same(s->fair, other->tenant, q->tenant))
            others += other->queued_ms;
        else if (is_before(other, q))
            own += other->queued_ms;
    }
    return own + fmin(others, own * (1 / fair_share(s->fair, q->tenant, now) - 1));
}

/* Its turn, as if those whose share it is brought what goes before it: they may, and q could not be on time then. */
static struct plan take_turn_beside_others(struct scheduler *s, struct sched_request *q, uint64_t now,
                                           struct terms terms, double pace)
{
    double ms = fair_to_come(s->fair, q->tenant) * s->ms_per_charge * pace;
    if (!(ms > 0))
        return take_turn(s, q, now, terms, true);
    double busy[SCHEDULER_MAX_WORKERS];
    for (uint32_t w = 0; w < s->n_workers; w++)
        busy[w] = s->pass[w].busy_ms;
    keep_busy(s, ms);
    for (uint32_t w = 0; w < s->n_workers; w++)
        busy[w] = s->pass[w].busy_ms - busy[w];
    struct plan plan = take_turn(s, q, now, terms, true);
    for (uint32_t w = 0; w < s->n_workers; w++) {
        s->pass[w].busy_ms -= busy[w];
        scheduler_know_share(&s->pass[w]);
    }
    return plan;
}

/* Whether q would be behind all that the latest look saw: by its due time, and no other tenant wants anything. */
static bool look_decides(const struct scheduler *s, const struct sched_request *q, uint64_t now)
{
    return s->look.is_valid && clock_ms_between(s->look.at_ns, now) < LOOKS_APART * pass_apart_ms(s) && !is_back(q) &&
           !q->resumed && q->due_ms >= s->look.last_due_ms && s->n_queued > SCHEDULER_LOOK &&
           fair_share(s->fair, q->tenant, now) == 1;
}

static struct plan place_behind_look(struct scheduler *s, struct sched_request *q, uint64_t now, struct terms terms)
{
    memcpy(s->pass, s->look.pass, s->n_workers * sizeof(s->pass[0]));
    add_the_rest(s, work_before(s, q, now) - s->look.before_ms, s->look.start_ms / fmax(s->look.seen_ms, 1));
    struct plan plan = place(s, s->pass, q, now, terms);
    if (plan.kind == PLAN_REFUSE)
        explain(s, s->pass, q, now, terms);
    return plan;
}

/* The turn of q in a pass with it, and what happens to those behind it. */
static struct plan try_out(struct scheduler *s, struct sched_request *q, uint64_t now, struct terms terms)
{
    struct sched_request *other;
    struct plan plan = {.kind = PLAN_REFUSE};
    double seen_ms = 0, last_ms = 0; /* work that the pass has places for, and when the last of it begins */
    double before_ms = 0;            /* of what it has seen, all but what is behind q in its tenant's part */
    double last_due_ms = 0;
    uint64_t number = ++s->n_walks;
    bool seen = false;
    if (look_decides(s, q, now))
        return place_behind_look(s, q, now, terms);
    s->look.is_valid = false; /* this walk marks what it sees */
    begin_pass(s);
    struct walk walk = walk_begin(s, now);
    for (uint32_t n = 0; n < SCHEDULER_LOOK && (other = walk_next(s, &walk)); n++) {
        if (other == q) {
            double pace = drain_pace(&s->drain);
            plan = take_turn_beside_others(s, q, now, terms, pace > 0 ? pace : last_ms / fmax(seen_ms, 1));
            seen = true;
            if (plan.kind == PLAN_REFUSE)
                break;
            continue;
        }
        struct plan turn = take_turn(s, other, now, PROMISED, false);
        before_ms += !fair_same(s->fair, other->tenant, q->tenant) || is_before(other, q) ? other->queued_ms : 0;
        other->look = number;
        last_due_ms = fmax(last_due_ms, other->due_ms);
        if (turn.kind != PLAN_REFUSE) {
            seen_ms += turn.work_ms;
            last_ms = fmax(last_ms, turn.start_ms);
        }
        if (seen && !is_back(q) && breaks(s, q, other, &turn)) {
            plan.kind = PLAN_REFUSE;
            plan.reason = "others that were admitted would miss their slo.ttft_ms";
            plan.over_ms = turn.kind == PLAN_REFUSE ? turn.over_ms : turn.ttft_ms - other->ttft_ms;
            break;
        }
    }
    if (!seen) {
        s->look.is_valid = true;
        s->look.number = number;
        s->look.at_ns = now;
        s->look.last_due_ms = last_due_ms;
        s->look.before_ms = before_ms;
        s->look.seen_ms = seen_ms;
        s->look.start_ms = last_ms;
        memcpy(s->look.pass, s->pass, s->n_workers * sizeof(s->pass[0]));
        plan = place_behind_look(s, q, now, terms);
    }
    return plan;
}

static bool refuse_now(struct scheduler *s, struct sched_request *q, uint64_t now, double *retry_after_ms_out)
{
    q->state = SCHED_OVER;
    *retry_after_ms_out = book(s, q, now);
    expect_back(s, q, *retry_after_ms_out, now);
    return false;
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
    s->logs = s->config.explain && !s->n_queued; /* then this is the decision */
    q->plan = place(s, s->views, q, now, terms);
    s->logs = false;
    if (q->plan.kind == PLAN_REFUSE && !q->resumed && s->config.policy == POLICY_TANDEM)
        try_probe(s, q, now, terms);
    q->work_ms = q->plan.work_ms;
    q->promised_ttft_ms = q->plan.ttft_ms;
    q->promised_tpot_ms = q->plan.tpot_ms;
    if (q->plan.kind == PLAN_REFUSE && !q->resumed) {
        if (s->n_queued) /* else the candidates are there */
            explain(s, s->views, q, now, terms);
        return false;
    }
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
    s->n_candidates = 0; /* those of the last decision are another request's */
    q->keeper = booked_with(s, q, now);
    if (!has_room(s, q, now)) {
        q->plan = full_plan(s, now);
        q->state = SCHED_OVER;
        *retry_after_ms_out = fmin(fmax(q->plan.over_ms, LEAST_RETRY_MS), MAX_RETRY_MS);
        expect_back(s, q, *retry_after_ms_out, now);
        return false;
    }
    if (!some_worker(s)) { /* nothing can be said yet */
        enqueue(s, q, now);
        return true;
    }
    return admit(s, q, now) || refuse_now(s, q, now, retry_after_ms_out);
}

bool scheduler_would_admit(struct scheduler *s, struct sched_request *q, uint64_t now)
{
    bool dirty = s->dirty, admitted = false;
    prepare(s, q);
    if (has_room(s, q, now) && (!some_worker(s) || admit(s, q, now))) {
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
static void observe_leg(struct sched_worker *k, const struct sched_request *q, uint64_t now)
{
    double took = clock_ms_between(q->began_ns, now) * q->plan.prompt_share,
           extra = took - (q->work_ms - k->leg_extra_ms);
    cost_term_observe(&k->leg_error, q->work_ms, took);
    double most = 0.5 * q->work_ms + 1, rate = fmax(LEG_RATE, 1.0 / (double)(k->leg_error.n + 1));
    k->leg_extra_ms += rate * (fmax(fmin(extra, most), -most) - k->leg_extra_ms);
}

static void remove_prompt(struct scheduler *s, struct sched_request *q, uint64_t now, bool observed)
{
    struct sched_worker *k = &s->workers[q->plan.prefill];
    struct sched_request **at = &k->first, *before = NULL;
    if (!q->on_prefill)
        return;
    if (observed && k->first == q && k->others_ns < q->began_ns)
        observe_leg(k, q, now);
    while (*at != q) {
        before = *at;
        at = &(*at)->prefill_next;
    }
    *at = q->prefill_next;
    k->last = k->last == q ? before : k->last;
    k->n_prompts--;
    q->on_prefill = false;
    if (at == &k->first)
        k->own_done = 0; /* of the one that left */
    if (at == &k->first && k->first)
        k->first->began_ns = now;
    s->is_dry |= !k->first;
    scheduler_changed(s);
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
    struct sched_worker *k = &s->workers[q->plan.decode];
    if (!q->on_decode)
        return;
    end_moving(s, q);
    *(q->running_prev ? &q->running_prev->running_next : &k->running) = q->running_next;
    if (q->running_next)
        q->running_next->running_prev = q->running_prev;
    k->n_running--;
    if (k->n_running < FEW_RUNNING)
        k->changed = true;
    else
        scheduler_take_load(s, q, k->step_ms, s->views[q->plan.decode].at);
    scheduler_changed(s);
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
    struct sched_worker *k = &s->workers[q->plan.decode];
    if (q->state == SCHED_DECODING && q->plan.kind == PLAN_SPLIT)
        k->transfer = transfer_observe(k->transfer, &q->plan.transfer, exposed_ms);
    end_moving(s, q);
}

void scheduler_second_token(struct scheduler *s, struct sched_request *q, uint64_t at)
{
    struct sched_worker *k = &s->workers[q->plan.decode];
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
    fair_correct(s->fair, q->tenant, used - q->charged);
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
    q->requeued_ns = now;
    s->avoids_ns = q->n_avoid ? now : s->avoids_ns;
    q->expected_tokens = lengths_remaining(&s->lengths, q->tenant, 0, q->max_tokens);
    enqueue(s, q, now);
}

/* -------------------------------------------------------------- from outside */

struct sched_worker_stats scheduler_worker_stats(const struct scheduler *s, uint32_t w)
{
    const struct sched_worker *k = &s->workers[w];
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

double scheduler_queued_ms(const struct scheduler *s)
{
    return s->queued_ms;
}

const struct policy_candidate *scheduler_candidates(const struct scheduler *s, uint32_t *n_out)
{
    *n_out = s->n_candidates;
    return s->candidates;
}
