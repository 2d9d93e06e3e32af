/*
 * Requests: admission, the queue, passes, progress on workers.
 *
 * What must hold:
 *   - A request is linked in the queue exactly in SCHED_QUEUED. From dispatch() to leave_workers() it is in
 *     the running list of its decode worker and, until its prompt is computed, in the prompt list of its
 *     prefill worker. plan.prefill and plan.decode must not change while it is linked there.
 *   - config.place and config.refuse may free the request, so dispatch() and drop_queued() call them last.
 *   - views contains every dispatched request at any time: dispatch() adds it by scheduler_apply(), and the
 *     next scheduler_refresh() counts it from the lists. Passes write only to the copy `pass`.
 *   - During a walk only the request that walk_next() returned last may leave the queue.
 *   - Whatever may change a decision calls scheduler_changed(), or queued requests wait for another event.
 */
#include "sched/scheduler_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "sched/batching.h"
#include "sched/order.h"

/*
 * SCHEDULER_LOOK: most requests that a pass looks at. ENOUGH_WAIT: in a longer queue, a pass ends after this
 * many requests in a row that can't be dispatched. FEW_RUNNING: up to this many requests on a decode worker,
 * its load is computed anew for each that comes or goes.
 */
enum { SCHEDULER_LOOK = 128, ENOUGH_WAIT = 16, FEW_RUNNING = 128 };

/* Greatest age of a request's matched blocks; greatest age of the plan of a lone request. */
static const double MATCH_MS = 100, FRESH_MS = 1;
static const double BOOKED_MARGIN = 0.88; /* a booking is made for this share of the request's TTFT limit */
/* All refused requests get a booking if this share of clients come back; with fewer, fewer, but >= TRIED. */
static const double FULLY_BOOKED = 0.05, TRIED = 0.02;
static const double REST_CAUTION = 1.5; /* factor on the time for requests behind SCHEDULER_LOOK */
static const double LEAST_RETRY_MS = 20, MAX_RETRY_MS = 60000; /* bounds of a retry-after */
/* A tenant that was told to come back keeps its turn until then (<= MOST_AWAY_MS) plus AWAY_GRACE_MS. */
static const double MOST_AWAY_MS = 5000, AWAY_GRACE_MS = 500;
static const double CHARGE_RATE = 0.02; /* weight of one request in ms_per_charge */
/* Long queues: time between passes per (request * worker); its bound; age of a look, in such times. */
static const double APART_MS = 5.0 / (1000 * 128), MOST_APART_MS = 10, LOOKS_APART = 10;
static const double LEG_RATE = 0.02;                           /* weight of one leg in leg_extra_ms */
static const double FIRST_CAUTION = 1.0 / 3, MOST_CAUTION = 1; /* policy_request.caution: start, most */
static const double FIRST_TPOT_MARGIN = 0.05, MOST_TPOT_MARGIN = 0.5;
/* A request teaches a margin if its predicted waiting, or its step, was at least this share of the limit. */
static const double NEAR_TTFT = 0.2, NEAR_TPOT = 0.7;
static const double AVOID_MS = 2000; /* how long a request avoids workers that failed it */
static const double PROBE_AFTER_MS = 4000, PROBE_EVERY_MS = 1000;
enum { BELIEVED = 4 }; /* steps of a probe that are believed, prompt chunks and decode steps */
static const double STRETCH_RATE = 0.02, MOST_STRETCH = 4; /* weight of one answer; its most */
/* a worker with a smaller prompt_use has no prompts. */
static const double TRACE_OF_PROMPTS = 0.02;

/* How strictly a prediction is held against the TTFT limit. */
struct terms {
    double grace, caution, hope; /* as in struct policy_request */
    bool admitted;               /* it was admitted: it may take a place that is booked for another request */
    bool urgent;                 /* as in struct policy_request */
};
/* A request that comes back to its booking. */
static const struct terms BACK = {0, 0, SCHEDULER_HOPE, false, false};
/* A queued request, in a pass that decides about another one. */
static const struct terms PROMISED = {0, 0, SCHEDULER_HOPE, true, true};
/* A queued request in its own turn: it is dropped if it is later than this allows. */
static const struct terms LATE = {0.1, 0, 0, true, true};

struct scheduler *scheduler_open(const struct scheduler_config *config)
{
    struct scheduler *s = mem_zalloc(sizeof(*s));
    TAILQ_INIT(&s->queued);
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

/* q as the policy sees it. A resumed request has no limits. */
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
 * For AVOID_MS after its requeue, makes workers that failed q unusable in views, if another worker of the
 * role is usable. Their indices go to hidden_out; returns how many. Not for longer: another router may keep
 * the other worker full, and a worker that keeps failing is left out by its breaker.
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

/* For a request without a booking. Other policies than tandem keep a fixed margin, to stay comparable. */
static struct terms new_terms(const struct scheduler *s)
{
    double caution = s->config.policy == POLICY_TANDEM ? s->ttft_margin.value : FIRST_CAUTION;
    return (struct terms){0, caution, SCHEDULER_HOPE, false, false};
}

/* ------------------------------------------------------------------ probes */

/* Whether recent steps took much longer than these multiples of the profile's times. */
static bool is_slower(const struct cost_model *m, double prefill, double decode)
{
    return m->recent_prefill > COST_MUCH_SLOWER * prefill || m->recent_decode > COST_MUCH_SLOWER * decode;
}

/* Whether q probes k, or may: k is idle, looks slow, had no probe lately. True: k->reference is set. */
static bool may_probe(struct sched_worker *k, const struct sched_request *q, uint64_t now)
{
    if (k->prober == q)
        return true;
    if (!k->up || k->info.role == ROLE_STORE || k->first || !LIST_EMPTY(&k->running) || k->prober ||
        k->report.n_prompts || k->report.running ||
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

/* Until hide_references(), views show the workers that q may probe at the speed that a probe assumes. */
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

/* Makes q the prober of k if q may probe k. Call it before q is linked there, since k must be idle. */
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

/*
 * The plan for q on `views`, which are the same afterwards. An admitted request is tried under three terms,
 * strictest first: as a new request, whose plan also keeps the promises to others; under its own terms; in
 * places that are booked for others. If all refuse, workers that failed it are tried too. What prefill legs
 * take beyond their prediction is added to the plan.
 */
static struct plan ask_policy(struct scheduler *s, struct policy_worker *views, struct sched_request *q, uint64_t now,
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
    if (terms.admitted) {
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
    if (plan.kind == PLAN_REFUSE && n_hidden) /* better on a worker that failed it than nowhere */
        plan = policy_place(views, s->n_workers, &ask, log, n_log);
    if (plan.kind != PLAN_REFUSE) {
        double extra = fmax(s->workers[plan.prefill].leg_extra_ms, -plan.work_ms / 2);
        plan.ttft_ms += extra;
        plan.work_ms += extra;
    }
    return plan;
}

/* Tokens that q's tenant is charged at dispatch; fair_correct() settles the difference at its end. */
static double charge_of(const struct sched_request *q)
{
    return q->n_tokens + q->expected_tokens;
}

/* ------------------------------------------------------------------- order */

/* Whether q came back to its booking in time. */
static bool is_back(const struct sched_request *q)
{
    return q->keeper != POLICY_NO_KEEPER;
}

/* Adds q to the list and to its tenant's part. Needs q->work_ms and the promised times, for order_key(). */
static void enqueue(struct scheduler *s, struct sched_request *q, uint64_t now)
{
    q->due_ms = order_key(s->config.order, q, now);
    q->state = SCHED_QUEUED;
    q->look = 0;
    TAILQ_INSERT_TAIL(&s->queued, q, in_queue);
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
    TAILQ_REMOVE(&s->queued, q, in_queue);
    s->n_queued--;
    s->queued_tokens -= q->n_tokens;
    s->queued_ms = s->n_queued ? s->queued_ms - q->queued_ms : 0;
    s->n_back -= is_back(q);
    s->look.before_ms -= q->look == s->look.number ? q->queued_ms : 0;
    scheduler_changed(s);
    fair_remove(s->fair, q->tenant, q->due_ms, q->n_tokens, q);
}

/* Moves q inside its tenant's part of the queue. */
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

/* Moves requests older than max_wait_ns to the front. The list is by arrival, except for resumed ones. */
static void promote_overdue(struct scheduler *s, uint64_t now)
{
    struct sched_request *q;
    TAILQ_FOREACH (q, &s->queued, in_queue) {
        bool waited = now > q->arrived_ns + s->config.max_wait_ns;
        if (!waited && !q->resumed)
            return;
        if (waited && !is_overdue(q))
            put_at(s, q, ORDER_OVERDUE_MS + (double)q->arrived_ns * 1e-6, now);
    }
}

/*
 * A walk through the queue: first all requests that came back to a booking, then the others in their order.
 * `back` is advanced before walk_next() returns a request, so that request may leave the queue and be freed.
 * The first part ends before the second begins: no step of the second part could free what `back` points to.
 */
struct walk {
    /* Where to look for the next request with a booking; NULL: that part is over. */
    struct sched_request *back;
};

static struct walk walk_begin(struct scheduler *s, uint64_t now)
{
    promote_overdue(s, now);
    fair_begin(s->fair, now);
    return (struct walk){s->n_back ? TAILQ_FIRST(&s->queued) : NULL};
}

static struct sched_request *walk_next(struct scheduler *s, struct walk *walk)
{
    struct sched_request *q;
    while ((q = walk->back)) {
        walk->back = TAILQ_NEXT(q, in_queue);
        if (is_back(q))
            return q;
    }
    do
        q = fair_next(s->fair);
    while (q && is_back(q));
    return q;
}

/* ------------------------------------------------------------------ errors */

/* Teaches the TTFT margin whether q met its limit, if q was predicted to wait long enough. */
static void observe_ttft(struct scheduler *s, const struct sched_request *q, double ttft_ms)
{
    double waiting = q->promised_ttft_ms - q->work_ms;
    if (q->ttft_ms > 0 && !q->resumed && waiting > NEAR_TTFT * q->ttft_ms)
        s->ttft_margin = margin_note(s->ttft_margin, ttft_ms > q->ttft_ms);
}

/*
 * Teaches the stretch of the role and the TPOT margin from the gaps after the first, which has its own
 * prediction. The margin learns only from predictions near the limit. On a worker with prompts, steps may
 * take all that the limit leaves, so only time beyond that is an error.
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

/* Above FEW_RUNNING, scheduler_apply() is exact enough until the next periodic refresh of the load. */
static void add_running(struct sched_worker *k, struct sched_request *q)
{
    LIST_INSERT_HEAD(&k->running, q, in_decode);
    k->n_running++;
    k->changed |= k->n_running <= FEW_RUNNING;
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

/*
 * Takes q out of the queue and gives it to the workers of `plan`. The order matters: drain_observe() must see
 * the queue with q in it, begin_probe() must see idle workers, and config.place comes last because it may end
 * and free q.
 */
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

/* q's tenant was told to come back after retry_ms (0: not to): it keeps its turn until then. */
static void expect_back(struct scheduler *s, const struct sched_request *q, double retry_ms, uint64_t now)
{
    if (retry_ms > 0)
        fair_want(s->fair, q->tenant, now + (uint64_t)((fmin(retry_ms, MOST_AWAY_MS) + AWAY_GRACE_MS) * 1e6));
}

/* Refuses a queued request. It counts as one that missed its limit. config.refuse may free q. */
static void drop_queued(struct scheduler *s, struct sched_request *q, const struct plan *plan, uint64_t now)
{
    double retry_ms = plan->never || plan->hopeless ? 0 : fmin(fmax(plan->over_ms, LEAST_RETRY_MS), MAX_RETRY_MS);
    dequeue(s, q);
    observe_ttft(s, q, INFINITY);
    q->plan = *plan;
    q->state = SCHED_OVER;
    expect_back(s, q, retry_ms, now);
    s->config.refuse(s->config.user, q, retry_ms);
}

/* Keeps each worker of the pass busy for `ms` more; busy_ms rises by the share of it that prompts get. */
static void keep_busy(struct scheduler *s, double ms)
{
    for (uint32_t w = 0; w < s->n_workers && ms > 0; w++) {
        s->pass[w].busy_ms += ms * policy_prompt_share(&s->pass[w], s->pass[w].busy_ms);
        scheduler_know_share(&s->pass[w]);
    }
}

/* Starts a pass on a fresh copy. On average, half of what other routers dispatch meanwhile arrives first. */
static void begin_pass(struct scheduler *s)
{
    memcpy(s->pass, s->views, s->n_workers * sizeof(s->pass[0]));
    keep_busy(s, s->beside * s->queued_ms / fmax(s->n_queued, 1) / 2);
}

/* Calls ask_policy() once more, only for its log (scheduler_candidates()). */
static void explain(struct scheduler *s, struct policy_worker *views, struct sched_request *q, uint64_t now,
                    struct terms terms)
{
    s->logs = s->config.explain;
    if (s->logs)
        ask_policy(s, views, q, now, terms);
    s->logs = false;
}

/* Plans q on the copy and adds it there. decides: this turn may dispatch or refuse q, so its log is kept. */
static struct plan take_turn(struct scheduler *s, struct sched_request *q, uint64_t now, struct terms terms,
                             bool decides)
{
    struct plan plan = ask_policy(s, s->pass, q, now, terms);
    if (decides && (plan.kind == PLAN_REFUSE || plan.now))
        explain(s, s->pass, q, now, terms);
    if (plan.kind != PLAN_REFUSE)
        scheduler_apply(s->pass, q, &plan, plan.ttft_ms - clock_ms_between(q->arrived_ns, now), 1 + s->beside);
    fair_take(s->fair, q->tenant, charge_of(q));
    return plan;
}

struct roles {
    bool decode, prefill; /* a usable worker of the role is there */
    /* A decode worker can read a prefill worker's pages; only set if all plans are split. */
    bool read;
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

/* Whether the usable workers allow any plan at all. */
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

/* Whether the pass can still dispatch a request to some worker. */
static bool some_takes(const struct scheduler *s)
{
    for (uint32_t w = 0; w < s->n_workers; w++)
        if (s->pass[w].usable && s->pass[w].takes_prompts)
            return true;
    return false;
}

/* Moves q, once, behind its tenant's others if its workflow can't keep its deadline and q is not overdue. */
static bool put_last(struct scheduler *s, struct sched_request *q, uint64_t now)
{
    if (s->config.order != ORDER_TANDEM || q->resumed || is_overdue(q) || q->due_ms >= ORDER_LATE_MS ||
        !order_is_lost(q, now))
        return false;
    put_at(s, q, q->due_ms + ORDER_LATE_MS, now);
    return true;
}

/* Dispatches the lone request by the plan of its admission, without a pass. dispatch() clears s->alone. */
static void dispatch_alone(struct scheduler *s, uint64_t now)
{
    struct plan plan = s->alone->plan;
    dispatch(s, s->alone, &plan, now);
    s->dirty = false;
}

/* Whether n requests with these prompt tokens exceed the share `part` of the queue's bounds. */
static bool exceeds_bounds(const struct scheduler *s, double n, double tokens, double part)
{
    return n > part * s->config.max_queued || tokens > part * (double)s->config.max_queued_tokens;
}

/*
 * A queue that is not full takes any request. A full queue takes requests of tenants that have less than
 * their share of it, and then drops the last request of the tenant that has most (make_room). A tenant with
 * no queued request, a resumed request and one that came back to a booking are always taken.
 */
static bool has_room(const struct scheduler *s, const struct sched_request *q, uint64_t now)
{
    uint32_t n = fair_count(s->fair, q->tenant);
    return q->resumed || is_back(q) || !n ||
           !exceeds_bounds(s, s->n_queued + 1.0, (double)(s->queued_tokens + q->n_tokens), 1) ||
           !exceeds_bounds(s, n + 1.0, fair_size(s->fair, q->tenant) + q->n_tokens,
                           fair_share(s->fair, q->tenant, now));
}

/* When a client refused by a full queue shall come back: one by one, at the pace of the queue. */
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

/* Drops requests that would be served last until the queue is within its bounds; never a resumed request. */
static void make_room(struct scheduler *s, uint64_t now)
{
    while (s->n_queued > 1 && exceeds_bounds(s, s->n_queued, (double)s->queued_tokens, 1)) {
        struct sched_request *q = fair_last(s->fair, s->n_queued <= s->config.max_queued, is_resumed);
        if (!q)
            return;
        const struct plan plan = full_plan(s, now);
        drop_queued(s, q, &plan, now);
    }
}

/*
 * Least time between two passes. Over a long queue for many workers a pass costs much and changes little,
 * since workers have two chunks of work ahead: 5 ms for 1000 requests and 128 workers. 0 if a pass sees the
 * whole queue.
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
    /* Avoided workers may be used again. */
    if (s->avoids_ns && clock_ms_between(s->avoids_ns, now) > AVOID_MS) {
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
    bool stopped = false;  /* ended early; a later whole pass looks at the rest */
    uint32_t n_waits = 0;  /* requests in a row that were not dispatched */
    bool moves_up = false; /* requests left the queue, so that later ones came within reach of a look */
    uint32_t n;
    for (n = 0; n < SCHEDULER_LOOK && some_worker(s) && !stopped && (q = walk_next(s, &walk)); n++) {
        if (put_last(s, q, now))
            continue;
        struct plan plan = take_turn(s, q, now, LATE, true);
        if (plan.kind == PLAN_REFUSE)
            drop_queued(s, q, &plan, now);
        else if (plan.now)
            dispatch(s, q, &plan, now);
        n_waits = plan.now ? 0 : n_waits + 1;
        moves_up |= plan.now || plan.kind == PLAN_REFUSE;
        stopped = !is_whole && (!some_takes(s) || (n_waits == ENOUGH_WAIT && s->n_queued > SCHEDULER_LOOK));
    }
    /* The pass has already seen the changes that it made itself, but not what moved up. */
    s->dirty = stopped || (moves_up && n == SCHEDULER_LOOK);
}

/* --------------------------------------------------------------- admission */

/* Removes q's booking and returns its worker; POLICY_NO_KEEPER: q has none. */
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

/* A pass that dispatches nothing: afterwards the copy contains the first SCHEDULER_LOOK queued requests. */
static void survey(struct scheduler *s, uint64_t now)
{
    struct sched_request *q;
    begin_pass(s);
    struct walk walk = walk_begin(s, now);
    for (uint32_t n = 0; n < SCHEDULER_LOOK && (q = walk_next(s, &walk)); n++)
        take_turn(s, q, now, LATE, false);
}

/* The worker that can prefill q soonest within its TTFT limit, and the booking. NULL: none. Uses `pass`. */
static struct sched_worker *first_room(struct scheduler *s, const struct sched_request *q, uint64_t now,
                                       struct booking *booking_out)
{
    const struct policy_request ask = ask_of(s, q, now, PROMISED);
    struct sched_worker *first = NULL;
    /*
     * A prefill worker is there: then none is booked on decode workers, whose free time is hard to predict.
     */
    bool splits = false;
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

/* Bookings keep other requests out, so few are made while hardly any client comes back. */
static bool is_worth_a_place(const struct scheduler *s, const struct sched_request *q)
{
    return random_unit(random_at(q->number, q->identity, 0)) < fmax(s->return_share / FULLY_BOOKED, TRIED);
}

/* Tokens that q's tenant will be charged for all requests that it has bookings for. */
static double booked_for(const struct scheduler *s, const struct sched_request *q)
{
    double charge = 0;
    for (uint32_t w = 0; w < s->n_workers; w++)
        charge += bookings_charge(&s->workers[w].bookings, q->tenant);
    return charge;
}

/* Milliseconds after which q shall come back, with a booking if it gets one; 0: coming back is useless. */
static double book(struct scheduler *s, const struct sched_request *q, uint64_t now)
{
    struct booking b;
    double retry = q->plan.over_ms;
    if (q->plan.never || q->plan.hopeless)
        return 0;
    /* Other policies make no bookings. */
    if (q->identity && q->ttft_ms > 0 && s->config.policy == POLICY_TANDEM) {
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
 * Whether `other`, admitted before, would miss its promised TTFT limit because of q; plan: its turn behind q.
 * Only requests of q's own tenant count: q goes before those of other tenants by right of its share.
 */
static bool breaks(const struct scheduler *s, const struct sched_request *q, const struct sched_request *other,
                   const struct plan *plan)
{
    return s->config.policy == POLICY_TANDEM && fair_same(s->fair, other->tenant, q->tenant) && other->ttft_ms > 0 &&
           !other->resumed && other->promised_ttft_ms <= other->ttft_ms &&
           (plan->kind == PLAN_REFUSE || plan->ttft_ms > other->ttft_ms);
}

/*
 * Adds queued work that the pass did not look at: rest_ms of it keeps all workers busy. One ms of that work
 * takes the longer of the pace at which the queue was emptied lately and `pace`, that of the requests in the
 * pass; both in ms. REST_CAUTION covers that plans change while a long queue lasts.
 */
static void add_the_rest(struct scheduler *s, double rest_ms, double pace)
{
    keep_busy(s, fmax(rest_ms, 0) * fmax(drain_pace(&s->drain), pace) * REST_CAUTION);
}

/* Whether `other`, of q's tenant, goes before q. */
static bool is_before(const struct sched_request *other, const struct sched_request *q)
{
    return other != q && other->due_ms <= q->due_ms;
}

/* Queued work, in ms, before q: its tenant's that is due earlier, and other tenants' shares meanwhile. */
static double work_before(const struct scheduler *s, const struct sched_request *q, uint64_t now)
{
    double own = 0, others = 0;
    const struct sched_request *other;
    TAILQ_FOREACH (other, &s->queued, in_queue) {
        if (!fair_same(s->fair, other->tenant, q->tenant))
            others += other->queued_ms;
        else if (is_before(other, q))
            own += other->queued_ms;
    }
    return own + fmin(others, own * (1 / fair_share(s->fair, q->tenant, now) - 1));
}

/*
 * The turn of q, with the work added that other tenants are entitled to bring before q: they may bring it
 * later, and q must be on time even then. That work is taken off the pass again, since it is not there yet.
 */
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

/* Whether the look is recent, q is due after all that it saw, and no other tenant wants anything. */
static bool look_decides(const struct scheduler *s, const struct sched_request *q, uint64_t now)
{
    return s->look.is_valid && clock_ms_between(s->look.at_ns, now) < LOOKS_APART * pass_apart_ms(s) && !is_back(q) &&
           !q->resumed && q->due_ms >= s->look.last_due_ms && s->n_queued > SCHEDULER_LOOK &&
           fair_share(s->fair, q->tenant, now) == 1;
}

/* The plan for q behind the latest look and the rest of the queue before q. */
static struct plan place_behind_look(struct scheduler *s, struct sched_request *q, uint64_t now, struct terms terms)
{
    memcpy(s->pass, s->look.pass, s->n_workers * sizeof(s->pass[0]));
    add_the_rest(s, work_before(s, q, now) - s->look.before_ms, s->look.start_ms / fmax(s->look.seen_ms, 1));
    struct plan plan = ask_policy(s, s->pass, q, now, terms);
    if (plan.kind == PLAN_REFUSE)
        explain(s, s->pass, q, now, terms);
    return plan;
}

/*
 * A pass for admission: the plan for q in its turn, or a refusal if it breaks a promise to a request behind
 * it. q is in the queue. If the pass ends before q's turn, the pass is kept as s->look and decides about q.
 */
static struct plan try_out(struct scheduler *s, struct sched_request *q, uint64_t now, struct terms terms)
{
    struct sched_request *other;
    struct plan plan = {.kind = PLAN_REFUSE};
    /* Work that got places in the pass; when the last of it begins, from now. */
    double seen_ms = 0, last_ms = 0;
    double before_ms = 0; /* work seen in the pass, without q's own tenant's requests behind q */
    double last_due_ms = 0;
    uint64_t number = ++s->n_walks;
    bool seen = false;
    if (look_decides(s, q, now))
        return place_behind_look(s, q, now, terms);
    s->look.is_valid = false; /* this walk overwrites the marks (sched_request.look) of the former look */
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

/* Ends the admission of q, which is not queued, with a time to come back. Returns false, for its caller. */
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

/* Makes q a probe if it could be dispatched now, within its limits, to a worker that may be probed. */
static void try_probe(struct scheduler *s, struct sched_request *q, uint64_t now, struct terms terms)
{
    if (!some_probe(s, q, now))
        return;
    q->is_probe = true;
    struct plan plan = ask_policy(s, s->views, q, now, terms);
    q->is_probe = plan.kind != PLAN_REFUSE && plan.now;
    if (q->is_probe)
        q->plan = plan;
}

/* True: q is queued. False: q is not, and q->plan has the reason. */
static bool admit(struct scheduler *s, struct sched_request *q, uint64_t now)
{
    struct terms terms = is_back(q) ? BACK : new_terms(s);
    scheduler_refresh(s, now);
    s->logs = s->config.explain && !s->n_queued; /* with an empty queue this placement is the decision */
    q->plan = ask_policy(s, s->views, q, now, terms);
    s->logs = false;
    if (q->plan.kind == PLAN_REFUSE && !q->resumed && s->config.policy == POLICY_TANDEM)
        try_probe(s, q, now, terms);
    q->work_ms = q->plan.work_ms;
    q->promised_ttft_ms = q->plan.ttft_ms;
    q->promised_tpot_ms = q->plan.tpot_ms;
    if (q->plan.kind == PLAN_REFUSE && !q->resumed) {
        if (s->n_queued) /* with an empty queue the log is there already */
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

/* Resets what admission sets. */
static void prepare(struct scheduler *s, struct sched_request *q)
{
    q->expected_tokens = lengths_remaining(&s->lengths, q->tenant, 0, q->max_tokens);
    q->keeper = POLICY_NO_KEEPER;
    q->is_probe = false;
}

bool scheduler_submit(struct scheduler *s, struct sched_request *q, uint64_t now, double *retry_after_ms_out)
{
    prepare(s, q);
    s->n_candidates = 0;                /* the log of the last decision is about another request */
    q->keeper = booked_with(s, q, now); /* before has_room(), which always takes a request with a booking */
    if (!has_room(s, q, now)) {
        q->plan = full_plan(s, now);
        q->state = SCHED_OVER;
        *retry_after_ms_out = fmin(fmax(q->plan.over_ms, LEAST_RETRY_MS), MAX_RETRY_MS);
        expect_back(s, q, *retry_after_ms_out, now);
        return false;
    }
    if (!some_worker(s)) { /* nothing can be predicted yet: it waits for workers */
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

/* Compares a prefill leg's time, from its begin on, with its prediction. leg_extra_ms: mean difference. */
static void observe_leg(struct sched_worker *k, const struct sched_request *q, uint64_t now)
{
    double took = clock_ms_between(q->began_ns, now) * q->plan.prompt_share,
           extra = took - (q->work_ms - k->leg_extra_ms);
    cost_term_observe(&k->leg_error, q->work_ms, took);
    double most = 0.5 * q->work_ms + 1, rate = fmax(LEG_RATE, 1.0 / (double)(k->leg_error.n + 1));
    k->leg_extra_ms += rate * (fmax(fmin(extra, most), -most) - k->leg_extra_ms);
}

/* observed: the prompt was computed. Its time counts if q was first and no other router had prompts there. */
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
        k->own_done = 0; /* it counted tokens of the prompt that left */
    if (at == &k->first && k->first)
        k->first->began_ns = now;
    s->is_dry |= !k->first;
    scheduler_changed(s);
}

/* q's pages do not flow any more. */
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
    LIST_REMOVE(q, in_decode);
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

/* Unlinks q from its workers. used: tokens that its tenant is charged in the end, instead of charge_of(). */
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
    leave_workers(s, q, now, 0); /* its next dispatch charges its answer so far as part of its prompt */
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
