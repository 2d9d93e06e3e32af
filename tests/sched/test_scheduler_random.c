/*
 * The scheduler under random actions in random order: after each action everything that is visible from
 * outside must be right.
 *
 * A seed makes a configuration and a stream of actions: requests of all kinds, alone and in bursts after long
 * stalls; clients that come back when they were told to, or earlier, or later; progress; losses of one worker
 * and of all; steps, reports and loading times, absurd ones in some seeds. Each request is an allocation of
 * its own, which is overwritten and freed at its end, if need be inside the callback that refuses it, so that
 * AddressSanitizer finds any later use.
 *
 * Default: 30,000 passes. TANDEM_LONG=scheduler: 1,000,000. TANDEM_SEED=N: that seed alone.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "sched/scheduler.h"
#include "tests/tap.h"

enum { WORKERS = 7, STORE = WORKERS - 1, OPEN = 250, AWAY = 64, TENANTS = 6, BLOCK = 16, STEPS = 2000 };
static const char PROFILE[] = "1000,100,0:5000,0.05,20";
static const double LEAST_RETRY_MS = 20, MOST_RETRY_MS = 60000;

#define COUNTS(X)                                                                                                      \
    X(passes)                                                                                                          \
    X(submits)                                                                                                         \
    X(bursts)                                                                                                          \
    X(stalls)                                                                                                          \
    X(on_time)                                                                                                         \
    X(early)                                                                                                           \
    X(late)                                                                                                            \
    X(refused_at_once)                                                                                                 \
    X(refused_late)                                                                                                    \
    X(placed)                                                                                                          \
    X(ended)                                                                                                           \
    X(ended_in_place)                                                                                                  \
    X(requeued)                                                                                                        \
    X(lost)                                                                                                            \
    X(lost_all)                                                                                                        \
    X(steps)                                                                                                           \
    X(reports)                                                                                                         \
    X(would)                                                                                                           \
    X(probes)                                                                                                          \
    X(over_bounds_by_resumed)

struct counts {
#define FIELD(name) uint64_t name;
    COUNTS(FIELD)
#undef FIELD
};

enum stage { NOBODY, QUEUED, PLACED };

struct client { /* a request, from its submit to its one end */
    enum stage stage;
    struct sched_request *q; /* an allocation of its own */
    uint32_t matched[WORKERS];
    bool decoded;
};

struct away { /* a client that was told to come back */
    uint64_t at_ns, told_ns;
    struct sched_request ask;
};

struct random {
    struct scheduler *s;
    struct scheduler_config config;
    struct client clients[OPEN];
    struct away away[AWAY];
    uint32_t n_away;
    struct sched_worker_info infos[WORKERS];
    bool up[WORKERS], usable[WORKERS], absurd, any_call;
    uint64_t seed, draws, now, number, n_probes[WORKERS];
    struct counts *counts;
};

static uint64_t below(struct random *f, uint64_t n)
{
    return random_at(f->seed, 3, f->draws++) % n;
}

static bool one_in(struct random *f, uint64_t n)
{
    return !below(f, n);
}

/* A number from 1 to most; all orders of magnitude are equally likely. */
static double magnitude(struct random *f, double most)
{
    return exp(random_unit(random_at(f->seed, 4, f->draws++)) * log(most));
}

/* ck_assert() would write to a file even if the condition holds. */
#define MUST(f, condition)                                                                                             \
    do                                                                                                                 \
        if (!(condition))                                                                                              \
            ck_abort_msg("seed %lu, draw %lu: %s", (unsigned long)(f)->seed, (unsigned long)(f)->draws, #condition);   \
    while (0)

/* ---------------------------------------------------------------- callbacks */

static void end_of(struct random *f, struct client *c)
{
    MUST(f, c->stage != NOBODY);
    memset(c->q, 0xa5, sizeof(*c->q));
    free(c->q);
    c->q = NULL;
    c->stage = NOBODY;
}

static void come_back(struct random *f, const struct sched_request *q, double retry_ms)
{
    MUST(f, retry_ms == 0 || (retry_ms >= LEAST_RETRY_MS && retry_ms <= MOST_RETRY_MS));
    /* The client never comes back, or once, or twice. */
    for (uint64_t n = retry_ms > 0 ? below(f, 3) : 0; n; n--) {
        uint64_t told = f->now + (uint64_t)(retry_ms * 1e6), at = told;
        if (one_in(f, 4))
            at = f->now + below(f, told - f->now);
        else if (one_in(f, 3))
            at += below(f, 3 * NS_PER_S);
        f->away[f->n_away < AWAY ? f->n_away++ : below(f, AWAY)] = (struct away){at, told, *q};
    }
}

static void on_place(void *user, struct sched_request *q)
{
    struct random *f = user;
    struct client *c = q->user;
    f->any_call = true;
    f->counts->placed++;
    MUST(f, c->q == q && c->stage == QUEUED && q->state == SCHED_PREFILLING);
    MUST(f, q->plan.kind != PLAN_REFUSE && q->plan.prefill < WORKERS && q->plan.decode < WORKERS);
    MUST(f, f->up[q->plan.prefill] && f->usable[q->plan.prefill]);
    MUST(f, f->up[q->plan.decode] && f->usable[q->plan.decode]);
    MUST(f, q->plan.ttft_ms >= 0 && q->plan.tpot_ms >= 0 && q->plan.work_ms >= 0);
    MUST(f, q->plan.new_tokens && q->plan.new_tokens <= q->n_tokens);
    MUST(f, q->plan.transfer.flows <= OPEN + 1.0);
    c->stage = PLACED;
    if (one_in(f, 50)) { /* its client has left */
        f->counts->ended++;
        f->counts->ended_in_place++;
        scheduler_end(f->s, q, f->now, false);
        end_of(f, c);
    } else if (one_in(f, 50)) {
        scheduler_prefilled(f->s, q, f->now);
    }
}

static void on_refuse(void *user, struct sched_request *q, double retry_after_ms)
{
    struct random *f = user;
    struct client *c = q->user;
    f->any_call = true;
    f->counts->refused_late++;
    MUST(f, c->q == q && c->stage == QUEUED && q->state == SCHED_OVER && q->plan.reason);
    come_back(f, q, retry_after_ms);
    end_of(f, c);
}

static void on_match(void *user, struct sched_request *q)
{
    struct random *f = user;
    struct client *c = q->user;
    uint32_t most = q->n_tokens / BLOCK + 1;
    f->any_call = true;
    MUST(f, c->q == q);
    for (uint32_t w = 0; w < WORKERS; w++)
        c->matched[w] = one_in(f, 3) ? (uint32_t)below(f, most) : 0;
    q->matched_blocks = one_in(f, 4) ? NULL : c->matched;
    q->store_blocks = one_in(f, 2) ? (uint32_t)below(f, most) : 0;
    q->store_blocks_ssd = (uint32_t)below(f, q->store_blocks + 1);
}

/* ------------------------------------------------------------------- checks */

/* Whether its neighbours in each list point to it, and it is only in the lists of its state. */
static bool is_linked(const struct client *c)
{
    const struct sched_request *q = c->q, *next = LIST_NEXT(q, in_decode), *after = q->prefill_next;
    bool placed = c->stage == PLACED, ok = true;
    if (c->stage == QUEUED) {
        ok &= q->state == SCHED_QUEUED && !q->on_prefill && !q->on_decode && !q->is_moving;
        const struct sched_request *later = TAILQ_NEXT(q, in_queue);
        ok &= *q->in_queue.tqe_prev == q;
        ok &= !later || (later->in_queue.tqe_prev == &q->in_queue.tqe_next && later->state == SCHED_QUEUED);
    }
    if (q->on_decode) {
        ok &= *q->in_decode.le_prev == q;
        ok &= !next || (next->in_decode.le_prev == &q->in_decode.le_next && next->on_decode &&
                        next->plan.decode == q->plan.decode);
    }
    if (q->on_prefill)
        ok &= !after || (after != q && after->on_prefill && after->plan.prefill == q->plan.prefill);
    return ok && (!placed || q->state == SCHED_PREFILLING || q->state == SCHED_DECODING) &&
           (!placed || q->on_decode == !c->decoded) && q->on_prefill == (q->state == SCHED_PREFILLING);
}

struct tally {
    uint32_t queued, last, resumed;
    uint64_t tokens, resumed_tokens;
    uint32_t prompts[WORKERS], prompts_last[WORKERS], running[WORKERS], running_last[WORKERS];
};

static struct tally tally_of(struct random *f)
{
    struct tally t = {0};
    for (uint32_t i = 0; i < OPEN; i++) {
        const struct sched_request *q = f->clients[i].q;
        if (!q)
            continue;
        MUST(f, is_linked(&f->clients[i]));
        if (q->state == SCHED_QUEUED) {
            t.queued++;
            t.last += !TAILQ_NEXT(q, in_queue);
            t.tokens += q->n_tokens;
            t.resumed += q->resumed;
            t.resumed_tokens += q->resumed ? q->n_tokens : 0;
        }
        if (q->on_prefill) {
            t.prompts[q->plan.prefill]++;
            t.prompts_last[q->plan.prefill] += !q->prefill_next;
        }
        if (q->on_decode) {
            t.running[q->plan.decode]++;
            t.running_last[q->plan.decode] += !LIST_NEXT(q, in_decode);
        }
    }
    return t;
}

static void check(struct random *f)
{
    const struct tally t = tally_of(f);
    MUST(f, t.queued == scheduler_queued(f->s) && t.tokens == scheduler_queued_tokens(f->s));
    MUST(f, t.last == (t.queued > 0)); /* one list */
    MUST(f, scheduler_queued_ms(f->s) >= -1e-3 && isfinite(scheduler_queued_ms(f->s)));
    const struct scheduler_margins margins = scheduler_margins(f->s);
    MUST(f, margins.ttft >= 0 && margins.ttft <= 1 && margins.tpot >= 0 && margins.tpot <= 1);
    if (one_in(f, 2)) /* else the figures are those of the last pass */
        scheduler_refresh(f->s, f->now);
    for (uint32_t w = 0; w < WORKERS; w++) {
        const struct sched_worker_stats stats = scheduler_worker_stats(f->s, w);
        MUST(f, stats.n_prompts == t.prompts[w] && stats.running == t.running[w]);
        MUST(f, t.prompts_last[w] == (t.prompts[w] > 0));
        MUST(f, t.running_last[w] == (t.running[w] > 0));
        MUST(f, stats.busy_ms >= 0 && isfinite(stats.busy_ms));
        MUST(f, stats.pages >= 0 && isfinite(stats.pages));
    }
}

/*
 * After a run the queue is within its bounds, with two exceptions. A single request may be larger. A request
 * whose client has tokens already is never given up; as long as it is the last one of the tenant that has
 * most, no other request is given up either.
 */
static void check_bounds(struct random *f, bool resumed_before)
{
    const struct tally t = tally_of(f);
    bool is_over = t.queued > f->config.max_queued || t.tokens > f->config.max_queued_tokens;
    if (!is_over || t.queued == 1)
        return;
    f->counts->over_bounds_by_resumed++;
    MUST(f, resumed_before);
}

/* ----------------------------------------------------------------- requests */

static struct client *free_client(struct random *f)
{
    for (uint32_t i = 0, at = (uint32_t)below(f, OPEN); i < OPEN; i++)
        if (f->clients[(at + i) % OPEN].stage == NOBODY)
            return &f->clients[(at + i) % OPEN];
    return NULL;
}

static struct client *some_client(struct random *f, enum stage stage)
{
    for (uint32_t i = 0, at = (uint32_t)below(f, OPEN); i < OPEN; i++)
        if (f->clients[(at + i) % OPEN].stage == stage)
            return &f->clients[(at + i) % OPEN];
    return NULL;
}

static struct sched_request new_ask(struct random *f)
{
    struct sched_request q = {.number = f->number++,
                              .n_tokens = (uint32_t)magnitude(f, one_in(f, 20) ? 300000 : 6000),
                              .max_tokens = (uint32_t)magnitude(f, one_in(f, 20) ? 1e6 : 500),
                              .block_tokens = BLOCK,
                              .deadline_ns = UINT64_MAX,
                              .workflow_deadline_ns = UINT64_MAX,
                              .tenant = below(f, TENANTS),
                              .identity = one_in(f, 5) ? 0 : 1 + below(f, 100000),
                              .priority = (int32_t)below(f, 5) - 2,
                              .ttft_ms = one_in(f, 3) ? 0 : magnitude(f, 5000),
                              .tpot_ms = one_in(f, 2) ? 0 : magnitude(f, 100),
                              .workflow_steps_left = (uint32_t)below(f, 4),
                              .resumed = one_in(f, 30),
                              .shares = one_in(f, 10)};
    if (one_in(f, 5))
        q.deadline_ns = f->now + below(f, 10) * NS_PER_S / 2 - (one_in(f, 10) ? NS_PER_S : 0);
    if (one_in(f, 5))
        q.workflow_deadline_ns = f->now + below(f, 20) * NS_PER_S;
    return q;
}

static void submit(struct random *f, const struct sched_request *ask)
{
    struct client *c = free_client(f);
    double retry = -1;
    if (!c)
        return;
    *c = (struct client){.stage = QUEUED, .q = mem_zalloc(sizeof(*c->q))};
    struct sched_request *q = c->q;
    *q = *ask;
    q->user = c;
    q->arrived_ns = f->now;
    q->matched_ns = 0;
    f->counts->submits++;
    if (one_in(f, 8)) {
        uint32_t queued = scheduler_queued(f->s);
        uint64_t tokens = scheduler_queued_tokens(f->s);
        f->counts->would++;
        scheduler_would_admit(f->s, q, f->now);
        MUST(f, queued == scheduler_queued(f->s) && tokens == scheduler_queued_tokens(f->s));
        MUST(f, q->state == SCHED_NEW);
        q->matched_ns = 0;
    }
    bool taken = scheduler_submit(f->s, q, f->now, &retry);
    MUST(f, taken == (q->state == SCHED_QUEUED));
    MUST(f, q->promised_ttft_ms >= 0 && q->promised_tpot_ms >= 0);
    if (taken)
        return;
    MUST(f, q->state == SCHED_OVER && !q->resumed && q->plan.reason);
    f->counts->refused_at_once++;
    come_back(f, q, retry);
    end_of(f, c);
}

static void submit_new(struct random *f)
{
    const struct sched_request ask = new_ask(f);
    submit(f, &ask);
}

/* Submits the next client that was told to come back, or sometimes one whose time has passed. The clock
 * advances to its time if that is near. */
static void submit_returning(struct random *f)
{
    uint64_t from = one_in(f, 4) ? 0 : f->now;
    uint32_t next = f->n_away;
    for (uint32_t i = 0; i < f->n_away; i++)
        if (f->away[i].at_ns >= from && (next == f->n_away || f->away[i].at_ns < f->away[next].at_ns))
            next = i;
    if (next == f->n_away || f->away[next].at_ns > f->now + 2 * NS_PER_S)
        return;
    struct away a = f->away[next];
    f->away[next] = f->away[--f->n_away];
    f->now = a.at_ns > f->now ? a.at_ns : f->now;
    struct sched_request ask = new_ask(f);
    ask.n_tokens = a.ask.n_tokens;
    ask.max_tokens = a.ask.max_tokens;
    ask.tenant = a.ask.tenant;
    ask.identity = a.ask.identity;
    ask.ttft_ms = a.ask.ttft_ms;
    ask.tpot_ms = a.ask.tpot_ms;
    ask.resumed = false;
    *(f->now < a.told_ns                     ? &f->counts->early
      : f->now <= a.told_ns + 50 * NS_PER_MS ? &f->counts->on_time
                                             : &f->counts->late) += 1;
    submit(f, &ask);
}

static void burst(struct random *f)
{
    f->counts->bursts++;
    for (uint64_t n = 5 + below(f, 60); n; n--) {
        submit_new(f);
        f->now += one_in(f, 4) ? below(f, NS_PER_MS) : 0;
    }
}

/* Nothing happens for up to some hours, then much at once. */
static void stall(struct random *f)
{
    f->counts->stalls++;
    f->now += (uint64_t)(magnitude(f, 1e7) * 1e6);
    burst(f);
}

static void requeue(struct random *f, struct client *c)
{
    struct sched_request *q = c->q;
    f->counts->requeued++;
    q->n_tokens += q->n_generated;
    q->max_tokens -= q->n_generated;
    q->resumed = q->resumed || q->n_generated;
    c->decoded = false;
    c->stage = QUEUED;
    scheduler_requeue(f->s, q, f->now);
}

static void end_client(struct random *f, struct client *c, bool answered)
{
    f->counts->ended++;
    scheduler_end(f->s, c->q, f->now, answered);
    end_of(f, c);
}

static void progress(struct random *f)
{
    struct client *c = some_client(f, PLACED);
    if (!c)
        return;
    struct sched_request *q = c->q;
    switch (below(f, 8)) {
    case 0:
    case 1:
        if (q->state == SCHED_PREFILLING)
            scheduler_prefilled(f->s, q, f->now);
        break;
    case 2:
        scheduler_generated(q, (uint32_t)below(f, (uint64_t)q->max_tokens + 1));
        break;
    case 3:
        if (one_in(f, 2))
            scheduler_moved(f->s, q, one_in(f, 20) ? magnitude(f, 1e12) : (double)below(f, 50));
        else if (q->state == SCHED_DECODING)
            scheduler_second_token(f->s, q, f->now);
        break;
    case 4:
        if (!c->decoded && one_in(f, 2)) {
            scheduler_decoded(f->s, q);
            c->decoded = true;
        }
        break;
    case 5:
    case 6:
        end_client(f, c, q->state == SCHED_DECODING && !one_in(f, 4));
        break;
    default:
        if (one_in(f, 4)) {
            scheduler_avoid(q, one_in(f, 2) ? q->plan.prefill : q->plan.decode);
            requeue(f, c);
        }
    }
}

/* A queued client leaves. */
static void hang_up(struct random *f)
{
    struct client *c = some_client(f, QUEUED);
    if (c)
        end_client(f, c, false);
}

/* ------------------------------------------------------------------ workers */

static void worker_up(struct random *f, uint32_t w)
{
    struct sched_worker_info *info = &f->infos[w];
    if (!info->chunk_tokens || one_in(f, 2)) { /* another process takes the place of the worker */
        *info = (struct sched_worker_info){.role = w == STORE     ? ROLE_STORE
                                                   : one_in(f, 2) ? ROLE_DECODE
                                                                  : ROLE_PREFILL,
                                           .chunk_tokens = (uint32_t)magnitude(f, 8192),
                                           .max_batch = (uint32_t)magnitude(f, 256),
                                           .n_pages = (uint32_t)magnitude(f, one_in(f, 4) ? 100 : 50000),
                                           .max_context = (uint32_t)magnitude(f, 1e6),
                                           .incarnation = ++f->number};
        if (!one_in(f, 4)) {
            info->n_pages += 2000;
            info->max_context += 20000;
        }
    }
    scheduler_worker_up(f->s, w, info);
    f->up[w] = f->usable[w] = true;
}

/*
 * A request whose prompt is computed stays where it decodes. The router also leaves it there while its pages
 * flow. Here it is planned anew in that case: if another process takes the place of the prefill worker, the
 * scheduler counts the worker's flows from 0, and subtracts one for this request when it ends.
 */
static void worker_lost(struct random *f, uint32_t w)
{
    for (uint32_t i = 0; i < OPEN; i++) {
        struct client *c = &f->clients[i];
        if (c->stage != PLACED)
            continue;
        bool prefills = c->q->plan.prefill == w && c->q->state == SCHED_PREFILLING;
        bool decodes = c->q->plan.decode == w && !c->decoded;
        if (!prefills && !decodes)
            continue;
        scheduler_avoid(c->q, w);
        if (one_in(f, 4))
            end_client(f, c, false);
        else
            requeue(f, c);
    }
    f->counts->lost++;
    scheduler_worker_down(f->s, w);
    f->up[w] = f->usable[w] = false;
}

static void lose_all(struct random *f)
{
    f->counts->lost_all++;
    for (uint32_t w = 0; w < WORKERS; w++)
        if (f->up[w])
            worker_lost(f, w);
    if (one_in(f, 2))
        burst(f);
    scheduler_run(f->s, f->now);
    for (uint32_t w = 0; w < WORKERS; w++)
        if (!one_in(f, 4))
            worker_up(f, w);
}

static void change_worker(struct random *f)
{
    uint32_t w = (uint32_t)below(f, WORKERS);
    if (!f->up[w]) {
        worker_up(f, w);
    } else if (one_in(f, 8)) {
        worker_lost(f, w);
    } else if (one_in(f, 3) || !f->usable[w]) {
        f->usable[w] = !f->usable[w];
        scheduler_worker_usable(f->s, w, f->usable[w]);
    }
}

/*
 * Numbers that no sane worker reports. Any double would be desirable; this range is what holds: with reports
 * above about 1e15, or steps whose time is not finite, predictions become infinite or NaN, and a NaN as key
 * ends in an assertion of sched/fair.c.
 */
static double absurd(struct random *f)
{
    static const double VALUES[] = {0, -0.0, 1e-300, 1e-9, 1, 1e6, 1e9, 1e12};
    return VALUES[below(f, sizeof(VALUES) / sizeof(VALUES[0]))];
}

static double measured(struct random *f, double value)
{
    static const double VALUES[] = {0, -0.0, 1e-300, 1e-9, 1, 1000, 3600000};
    return f->absurd && one_in(f, 10) ? VALUES[below(f, sizeof(VALUES) / sizeof(VALUES[0]))] : value;
}

static void observe_step(struct random *f)
{
    uint32_t w = (uint32_t)below(f, WORKERS - 1), batch = one_in(f, 2) ? 0 : (uint32_t)magnitude(f, 64);
    uint32_t tokens = batch && one_in(f, 2) ? 0 : (uint32_t)magnitude(f, 4096);
    double context = batch * magnitude(f, 3000), square = (double)tokens * tokens;
    double slower = one_in(f, 10) ? magnitude(f, 100) : 1, ms = (tokens ? 1 + 0.1 * tokens : 0) + (batch ? 5 : 0);
    f->counts->steps++;
    scheduler_observe_step(f->s, w,
                           &(struct cost_step){.n_prompts = tokens > 0,
                                               .prefill_tokens = f->absurd && one_in(f, 20) ? UINT32_MAX : tokens,
                                               .prefill_square = measured(f, square),
                                               .batch = f->absurd && one_in(f, 20) ? UINT32_MAX : batch,
                                               .context = measured(f, context),
                                               .ms = measured(f, ms * slower)});
}

/* Reports as the router passes them on: no number is below 0 or not finite. */
static void observe_report(struct random *f)
{
    uint32_t w = (uint32_t)below(f, WORKERS - 1);
    struct sched_report r = {0};
    if (!f->up[w])
        return;
    f->counts->reports++;
    if (!one_in(f, 3))
        r = (struct sched_report){.own_prompts = (uint32_t)below(f, 10),
                                  .own_tokens = (double)below(f, 20000),
                                  .n_prompts = (uint32_t)below(f, 5),
                                  .tokens = (double)below(f, 20000),
                                  .square = (double)below(f, 1000000),
                                  .running = (uint32_t)below(f, 30),
                                  .context = (double)below(f, 50000),
                                  .generated = (double)below(f, 3000),
                                  .tpot_limit_ms = one_in(f, 2) ? 0 : magnitude(f, 100),
                                  .n_routers = 1 + (uint32_t)below(f, 3),
                                  .queued_ms = magnitude(f, 10000)};
    if (f->absurd && one_in(f, 4)) {
        r = (struct sched_report){.own_prompts = one_in(f, 2) ? 1000000 : 0,
                                  .own_tokens = absurd(f),
                                  .n_prompts = one_in(f, 2) ? 1000000 : 0,
                                  .tokens = absurd(f),
                                  .square = absurd(f),
                                  .running = one_in(f, 2) ? 1000000 : (uint32_t)below(f, 3),
                                  .context = absurd(f),
                                  .generated = absurd(f),
                                  .tpot_limit_ms = absurd(f),
                                  .n_routers = one_in(f, 2) ? 1000000 : (uint32_t)below(f, 3),
                                  .queued_ms = absurd(f)};
    }
    scheduler_observe_report(f->s, w, &r, f->now);
}

static void observe_loading(struct random *f)
{
    uint32_t w = (uint32_t)below(f, WORKERS - 1);
    if (f->up[w])
        scheduler_observe_loading(f->s, w, measured(f, magnitude(f, 10) - 1), measured(f, magnitude(f, 2) - 1),
                                  measured(f, magnitude(f, 4) - 1));
}

/* --------------------------------------------------------------------- seeds */

/* Counts only runs that call back as passes, so some passes that change nothing are missing from the
 * count. */
static void run(struct random *f)
{
    const bool resumed = tally_of(f).resumed > 0;
    f->any_call = false;
    scheduler_run(f->s, f->now);
    f->counts->passes += f->any_call;
    check_bounds(f, resumed);
}

static void act(struct random *f)
{
    uint64_t what = below(f, 200);
    if (what < 50)
        submit_new(f);
    else if (what < 65)
        submit_returning(f);
    else if (what < 120)
        progress(f);
    else if (what < 160)
        run(f);
    else if (what < 170)
        observe_step(f);
    else if (what < 178)
        observe_report(f);
    else if (what < 181)
        observe_loading(f);
    else if (what < 188)
        change_worker(f);
    else if (what < 191)
        hang_up(f);
    else if (what == 191)
        stall(f);
    else if (what == 192)
        burst(f);
    else if (what == 193 && one_in(f, 8))
        lose_all(f);
    if (one_in(f, 2))
        f->now += below(f, one_in(f, 20) ? 400 * NS_PER_MS : 20 * NS_PER_MS);
}

static struct random *begin(uint64_t seed, struct counts *counts)
{
    static const struct fair_weight WEIGHTS[] = {{1, 1}, {2, 3}, {3, 0.01}, {4, 1000}};
    struct random *f = mem_zalloc(sizeof(*f));
    f->seed = seed;
    f->counts = counts;
    f->now = NS_PER_S;
    f->absurd = one_in(f, 4);
    f->config =
        (struct scheduler_config){.policy = one_in(f, 4) ? (enum policy)below(f, POLICIES) : POLICY_TANDEM,
                                  .order = one_in(f, 4) ? (enum scheduler_order)below(f, ORDERS) : ORDER_TANDEM,
                                  .force = one_in(f, 2) ? FORCE_NONE : (enum plan_force)below(f, 4),
                                  .prefix = one_in(f, 2) ? PREFIX_AUTO : (enum prefix_rule)below(f, 3),
                                  .max_wait_ns = (uint64_t)(magnitude(f, 1e5) * 1e6),
                                  .weights = WEIGHTS,
                                  .n_weights = (uint32_t)below(f, 5),
                                  .max_queued_tokens = one_in(f, 2) ? UINT64_MAX / 2 : (uint64_t)magnitude(f, 1e6),
                                  .max_queued = one_in(f, 3) ? UINT32_MAX / 2 : (uint32_t)magnitude(f, 200),
                                  .explain = one_in(f, 2),
                                  .seed = seed,
                                  .user = f,
                                  .place = on_place,
                                  .refuse = on_refuse,
                                  .match = on_match};
    ck_assert_int_eq(cost_profile_parse(PROFILE, &f->config.profile, NULL), TD_OK);
    f->s = scheduler_open(&f->config);
    for (uint32_t w = 0; w < WORKERS && !one_in(f, 8); w++)
        worker_up(f, w);
    return f;
}

/* All clients leave; nothing may be left. */
static void finish(struct random *f)
{
    for (uint32_t i = 0; i < OPEN; i++)
        if (f->clients[i].stage != NOBODY)
            end_client(f, &f->clients[i], false);
    for (uint32_t w = 0; w < WORKERS; w++) {
        const struct sched_report none = {0};
        if (f->up[w] && w != STORE)
            scheduler_observe_report(f->s, w, &none, f->now);
    }
    check(f);
    scheduler_refresh(f->s, f->now);
    for (uint32_t w = 0; w < WORKERS; w++) {
        const struct sched_worker_stats stats = scheduler_worker_stats(f->s, w);
        MUST(f, !stats.n_prompts && !stats.running && stats.busy_ms == 0 && fabs(stats.pages) < 1e-9);
        f->counts->probes += stats.n_probes;
    }
    scheduler_close(f->s);
    free(f);
}

static void run_seed(uint64_t seed, struct counts *counts)
{
    printf("# seed %lu\n", (unsigned long)seed);
    struct random *f = begin(seed, counts);
    for (uint32_t step = 0; step < STEPS; step++) {
        act(f);
        check(f);
    }
    finish(f);
}

static uint64_t passes_wanted(void)
{
    return tap_is_long("scheduler") ? 1000000 : 30000;
}

START_TEST(test_scheduler_holds_whatever_comes)
{
    const char *only = getenv("TANDEM_SEED");
    struct counts counts = {0};
    uint64_t first = only ? strtoull(only, NULL, 10) : 0, seed = first;
    do
        run_seed(seed++, &counts);
    while (!only && counts.passes < passes_wanted());
    MUST(&((struct random){.seed = seed}),
         counts.submits == counts.refused_at_once + counts.refused_late + counts.ended);
    printf("# %lu seeds:", (unsigned long)(seed - first));
#define PRINT(name) printf(" " #name " %lu", (unsigned long)counts.name);
    COUNTS(PRINT)
#undef PRINT
    printf("\n");
#define SEEN(name) ck_assert_msg(only || counts.name, "no " #name);
    COUNTS(SEEN)
#undef SEEN
}
END_TEST

int main(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0); /* the seed is printed before its failure */
    Suite *s = suite_create("scheduler_random");
    TCase *t = tcase_create("scheduler_random");
    tcase_set_timeout(t, getenv("TANDEM_LONG") ? 7200 : 120);
    tcase_add_test(t, test_scheduler_holds_whatever_comes);
    suite_add_tcase(s, t);
    return tap_main(s);
}
