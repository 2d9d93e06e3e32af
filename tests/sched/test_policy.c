/* Placement: properties of every policy on random snapshots, then each rule by itself. */
#include <math.h>
#include <string.h>

#include "base/random.h"
#include "sched/batching.h"
#include "sched/policy_internal.h"
#include "tests/tap.h"

enum { MOST = 12, ROUNDS = 4000, TOKENS = 512 };

static struct cost_model models[3];

static void set_up(void)
{
    static const char *const TEXTS[] = {"3526,18.5,0.000535:5228,0.0293,8.088", "500,100,0.001:5000,0.05,20",
                                        "20000,5,0.0001:20000,0.01,2"};
    for (int i = 0; i < 3; i++) {
        struct cost_profile p;
        ck_assert_int_eq(cost_profile_parse(TEXTS[i], &p, NULL), TD_OK);
        models[i] = cost_make(&p);
    }
}

struct draw { /* a stream of random numbers */
    uint64_t seed, n;
};

static uint64_t below(struct draw *d, uint64_t n)
{
    return random_at(d->seed, 17, d->n++) % n;
}

static double within(struct draw *d, double low, double high)
{
    return low + (high - low) * random_unit(random_at(d->seed, 18, d->n++));
}

struct scene {
    struct policy_worker workers[MOST];
    uint32_t n, matched[MOST];
    struct policy_request r;
};

static struct policy_worker worker(enum worker_role role)
{
    return (struct policy_worker){.role = role,
                                  .usable = role != ROLE_STORE,
                                  .cost = &models[0],
                                  .chunk_tokens = 8192,
                                  .max_batch = 64,
                                  .total_pages = 1000,
                                  .max_context = 131072,
                                  .booked_ms = INFINITY,
                                  .patience = INFINITY,
                                  .stretch = 1,
                                  .takes_prompts = true};
}

static struct policy_request ask(uint32_t tokens)
{
    return (struct policy_request){.n_tokens = tokens,
                                   .max_tokens = 1000,
                                   .expected_tokens = 200,
                                   .block_tokens = TOKENS,
                                   .remaining_ms = INFINITY,
                                   .keeper = POLICY_NO_KEEPER};
}

/* steady: running sequences stay on a decode worker, so that a later time is never better. */
static void make_load(struct draw *d, struct policy_worker *w, bool steady)
{
    double leaves = within(d, 100, 20000);
    struct policy_load now = {.running = (double)below(d, w->max_batch + 1)};
    now.context = now.running * within(d, 100, 8000);
    now.pages = fmin(ceil(now.context / TOKENS) + now.running, w->total_pages);
    for (uint32_t i = 0; i < POLICY_HORIZONS; i++) {
        double stays = steady ? 1 : exp(-POLICY_HORIZON_MS[i] / leaves);
        w->at[i] = (struct policy_load){now.running * stays, now.context * stays, now.pages * stays};
    }
    w->tpot_limit_ms = below(d, 3) ? 0 : within(d, 10, 60);
}

static struct policy_worker make_worker(struct draw *d, enum worker_role role, bool steady)
{
    struct policy_worker w = worker(role);
    w.usable = role != ROLE_STORE && below(d, 8);
    w.cost = &models[below(d, 3)];
    w.chunk_tokens = 512u << below(d, 5);
    w.max_batch = 1 + (uint32_t)below(d, 200);
    w.total_pages = 20 + (uint32_t)below(d, 1000);
    w.max_context = 4096u << below(d, 6);
    w.n_prompts = (uint32_t)below(d, 4);
    w.busy_ms = w.n_prompts ? within(d, 1, 900) : 0;
    w.queued_tokens = w.n_prompts * within(d, 100, 8000);
    w.takes_prompts = w.queued_tokens < 2.0 * w.chunk_tokens;
    w.booked_ms = below(d, 6) ? INFINITY : within(d, 0, 1000);
    w.load_ms = within(d, 0, 10);
    w.load_dram_ms = within(d, 0.1, 15);
    w.load_ssd_ms = within(d, 1, 40);
    if (role == ROLE_DECODE)
        make_load(d, &w, steady);
    return w;
}

static void make_scene(struct scene *s, uint64_t seed, bool steady)
{
    struct draw d = {seed, 0};
    memset(s, 0, sizeof(*s));
    s->n = 2 + (uint32_t)below(&d, MOST - 1);
    s->r = ask(1 + (uint32_t)below(&d, 1u << (6 + below(&d, 11))));
    s->r.max_tokens = (uint32_t)below(&d, 4000);
    s->r.expected_tokens = within(&d, 0, s->r.max_tokens);
    s->r.matched_blocks = below(&d, 3) ? s->matched : NULL;
    for (uint32_t i = 0; i < s->n; i++) {
        s->workers[i] = make_worker(&d, (enum worker_role)(below(&d, 9) / 4), steady);
        s->matched[i] = below(&d, 2) ? (uint32_t)below(&d, s->r.n_tokens / TOKENS + 1) : 0;
    }
    s->r.store_blocks = below(&d, 2) ? (uint32_t)below(&d, s->r.n_tokens / TOKENS + 1) : 0;
    s->r.store_blocks_ssd = (uint32_t)below(&d, s->r.store_blocks + 1);
    s->r.peer_blocks = below(&d, 2) ? (uint32_t)below(&d, s->r.n_tokens / TOKENS + 1) : 0;
    s->r.ttft_ms = below(&d, 2) ? within(&d, 20, 3000) : 0;
    s->r.tpot_ms = below(&d, 2) ? within(&d, 5, 80) : 0;
    s->r.remaining_ms = below(&d, 4) ? INFINITY : within(&d, 10, 5000);
    s->r.waited_ms = below(&d, 2) ? within(&d, 0, 200) : 0;
    s->r.policy = (enum policy)(seed % POLICIES);
    s->r.force = below(&d, 3) ? FORCE_NONE : (enum plan_force)(1 + below(&d, 2));
    s->r.prefix = (enum prefix_rule)below(&d, 3);
    s->r.number = below(&d, 1000);
}

static struct plan place(const struct scene *s)
{
    return policy_place(s->workers, s->n, &s->r, NULL, NULL);
}

static bool fits(const struct policy_worker *w, const struct policy_request *r)
{
    uint64_t total = (uint64_t)r->n_tokens + r->max_tokens;
    return total <= w->max_context && (total + r->block_tokens - 1) / r->block_tokens <= w->total_pages;
}

static bool has_room(const struct policy_worker *w, const struct policy_request *r)
{
    return w->at[0].running + 1 <= w->max_batch && w->at[0].pages + policy_pages(r) <= w->total_pages;
}

/* -------------------------------------------------------------- properties */

START_TEST(test_policy_never_takes_an_unusable_too_small_or_full_worker_nor_a_store)
{
    uint32_t taken[POLICIES] = {0};
    for (uint64_t seed = 0; seed < ROUNDS * POLICIES; seed++) {
        struct scene s;
        make_scene(&s, seed, false);
        struct plan p = place(&s);
        if (p.kind == PLAN_REFUSE)
            continue;
        const struct policy_worker *prefill = &s.workers[p.prefill], *decode = &s.workers[p.decode];
        ck_assert_uint_lt(p.prefill, s.n);
        ck_assert_uint_lt(p.decode, s.n);
        ck_assert(prefill->usable && decode->usable);
        ck_assert(fits(prefill, &s.r) && fits(decode, &s.r));
        ck_assert_int_eq(decode->role, p.kind == PLAN_KEPT ? ROLE_PREFILL : ROLE_DECODE);
        ck_assert_int_eq(prefill->role, p.kind == PLAN_AGGREGATED ? ROLE_DECODE : ROLE_PREFILL);
        ck_assert_int_eq(p.kind != PLAN_SPLIT, p.prefill == p.decode);
        ck_assert_msg(!p.now || (prefill->takes_prompts && has_room(decode, &s.r)), "seed %lu", (unsigned long)seed);
        taken[s.r.policy]++;
    }
    for (uint32_t i = 0; i < POLICIES; i++)
        ck_assert_msg(taken[i] > ROUNDS / 10, "policy %u: %u", i, taken[i]);
}
END_TEST

START_TEST(test_policy_hands_no_pages_to_a_worker_that_can_not_read_them)
{
    uint32_t split[POLICIES] = {0};
    for (uint64_t seed = 0; seed < ROUNDS * POLICIES; seed++) {
        struct scene s;
        uint64_t unread[MOST];
        make_scene(&s, seed, false);
        for (uint32_t i = 0; i < s.n; i++) {
            unread[i] = random_at(seed, 19, i) & random_at(seed, 20, i);
            s.workers[i].unread = &unread[i];
        }
        struct plan p = place(&s);
        if (p.kind == PLAN_SPLIT)
            ck_assert_msg(!(unread[p.decode] >> p.prefill & 1), "seed %lu", (unsigned long)seed);
        split[s.r.policy] += p.kind == PLAN_SPLIT;
    }
    for (uint32_t i = 0; i < POLICIES; i++)
        ck_assert_msg(split[i] > ROUNDS / 20, "policy %u: %u", i, split[i]);
}
END_TEST

/* If the best pair can't connect, another pair is chosen; if there is none, one worker does both phases. */
START_TEST(test_policy_goes_around_a_pair_that_can_not_connect)
{
    for (enum policy policy = 0; policy < POLICIES; policy++) {
        uint32_t matched[3] = {8, 0, 0};
        struct policy_worker w[3] = {worker(ROLE_PREFILL), worker(ROLE_PREFILL), worker(ROLE_DECODE)};
        struct policy_request r = ask(8 * TOKENS + 1);
        uint64_t unread = 1;
        r.matched_blocks = matched;
        r.policy = policy;
        r.force = FORCE_SPLIT;
        w[2].unread = &unread;
        for (r.number = 0; r.number < 4; r.number++)
            ck_assert_msg(policy_place(w, 3, &r, NULL, NULL).prefill == 1, "policy %d", (int)policy);
        unread = 3;
        ck_assert_int_eq(policy_place(w, 3, &r, NULL, NULL).kind, PLAN_REFUSE);
        r.force = FORCE_NONE;
        ck_assert_msg(policy_place(w, 3, &r, NULL, NULL).kind != PLAN_REFUSE, "policy %d", (int)policy);
    }
}
END_TEST

START_TEST(test_policy_gives_the_same_plan_for_the_same_input)
{
    struct policy_candidate seen[2 * MOST];
    for (uint64_t seed = 0; seed < ROUNDS; seed++) {
        struct scene s, t;
        uint32_t n;
        make_scene(&s, seed, false);
        t = s;
        t.r.matched_blocks = s.r.matched_blocks ? t.matched : NULL;
        struct plan a = place(&s), b = policy_place(t.workers, t.n, &t.r, seen, &n);
        ck_assert_uint_le(n, 2 * s.n);
        ck_assert(a.kind == b.kind && a.now == b.now && a.prefill == b.prefill && a.decode == b.decode);
        ck_assert(a.loaded_blocks == b.loaded_blocks && a.prompt_share == b.prompt_share && a.reason == b.reason);
        ck_assert(a.ttft_ms == b.ttft_ms && a.tpot_ms == b.tpot_ms && a.work_ms == b.work_ms);
        ck_assert(a.never == b.never && a.hopeless == b.hopeless && a.over_ms == b.over_ms);
    }
}
END_TEST

START_TEST(test_policy_keeps_limits_or_refuses)
{
    uint32_t kept = 0;
    for (uint64_t seed = 0; seed < ROUNDS * POLICIES; seed++) {
        struct scene s;
        make_scene(&s, seed, false);
        struct plan p = place(&s);
        if (!policy_refuses(s.r.policy) || p.kind == PLAN_REFUSE)
            continue;
        kept++;
        ck_assert(!(s.r.ttft_ms > 0) || p.ttft_ms <= s.r.ttft_ms + 1e-9);
        ck_assert(!(s.r.tpot_ms > 0) || s.r.policy != POLICY_TANDEM ||
                  p.step_ms <= s.r.tpot_ms); /* Mooncake's limit is about the first step */
        ck_assert(p.ttft_ms - s.r.waited_ms <= s.r.remaining_ms + 1e-9);
        ck_assert(p.ttft_ms - s.r.waited_ms >= p.work_ms - p.load_ms - 1e-9);
    }
    ck_assert_uint_gt(kept, ROUNDS / 10);
}
END_TEST

START_TEST(test_policy_doubts_waiting_and_hopes_for_work)
{
    uint32_t kept = 0, hoped = 0;
    for (uint64_t seed = 0; seed < ROUNDS * POLICIES; seed++) {
        struct scene s;
        make_scene(&s, seed, false);
        s.r.caution = 0.5;
        s.r.hope = 0.1;
        struct plan p = place(&s);
        if (!policy_refuses(s.r.policy) || p.kind == PLAN_REFUSE || !(s.r.ttft_ms > 0))
            continue;
        double waiting = p.ttft_ms - p.work_ms;
        kept++;
        hoped += p.ttft_ms > s.r.ttft_ms;
        ck_assert_double_le(0.9 * p.work_ms + waiting + 0.5 * fmax(waiting, 0), s.r.ttft_ms + 1e-9);
    }
    ck_assert_uint_gt(kept, ROUNDS / 10);
    ck_assert_uint_gt(hoped, 0);
}
END_TEST

START_TEST(test_policy_keeps_a_forced_kind)
{
    uint32_t n[3] = {0};
    for (uint64_t seed = 0; seed < ROUNDS * POLICIES; seed++) {
        struct scene s;
        make_scene(&s, seed, false);
        struct plan p = place(&s);
        if (p.kind == PLAN_REFUSE || s.r.force == FORCE_NONE)
            continue;
        n[s.r.force]++;
        ck_assert_int_eq(p.kind, s.r.force == FORCE_SPLIT ? PLAN_SPLIT : PLAN_AGGREGATED);
    }
    ck_assert(n[FORCE_SPLIT] > 100 && n[FORCE_AGGREGATED] > 100);
}
END_TEST

static void make_busier(struct policy_worker *w, double ms, double running)
{
    w->busy_ms += ms;
    w->queued_tokens += ms * 10;
    w->n_prompts += ms > 0;
    for (uint32_t i = 0; i < POLICY_HORIZONS; i++) {
        w->at[i].running += running;
        w->at[i].context += running * 1000;
        w->at[i].pages += running * 3;
    }
}

/* The TTFT or the work that is predicted with worker w as the place of the prefill; INFINITY: it can't
 * prefill. */
static double predicted(const struct scene *s, uint32_t w, bool work)
{
    struct policy_candidate seen[2 * MOST];
    double value = INFINITY;
    uint32_t n;
    policy_place(s->workers, s->n, &s->r, seen, &n);
    for (uint32_t i = 0; i < n; i++)
        if (seen[i].worker == w && seen[i].as_prefill && seen[i].prefill_ms > 0)
            value = fmin(value, work ? seen[i].load_ms + seen[i].prefill_ms : seen[i].ttft_ms);
    return value;
}

START_TEST(test_policy_predicts_no_less_for_a_busier_worker)
{
    uint32_t compared = 0;
    for (uint64_t seed = 0; seed < ROUNDS * POLICIES; seed++) {
        struct scene s;
        make_scene(&s, seed, true);
        struct plan p = place(&s);
        if (p.kind == PLAN_REFUSE)
            continue;
        s.r.store_blocks = p.kind == PLAN_AGGREGATED ? 0 : s.r.store_blocks;
        double before = predicted(&s, p.prefill, false);
        make_busier(&s.workers[p.prefill], 40, s.workers[p.prefill].role == ROLE_DECODE);
        double after = predicted(&s, p.prefill, false);
        ck_assert_msg(after == INFINITY || after >= before - 1e-9, "seed %lu: %f, then %f", (unsigned long)seed, before,
                      after);
        compared += after < INFINITY && before < INFINITY;
    }
    ck_assert_uint_gt(compared, ROUNDS);
}
END_TEST

START_TEST(test_policy_stays_with_its_choice_when_another_worker_gets_busier)
{
    uint32_t compared = 0;
    for (uint64_t seed = 0; seed < ROUNDS * POLICIES; seed++) {
        struct scene s;
        make_scene(&s, seed, true);
        struct plan p = place(&s);
        uint32_t other = (uint32_t)(random_at(seed, 5, 5) % s.n);
        if (p.kind == PLAN_REFUSE || other == p.prefill || other == p.decode || s.r.policy == POLICY_CACHE_AWARE)
            continue; /* cache-aware compares how far apart loads are, so any of them counts */
        make_busier(&s.workers[other], 100, s.workers[other].role == ROLE_DECODE);
        struct plan q = place(&s);
        ck_assert_msg(q.kind == p.kind && q.prefill == p.prefill && q.decode == p.decode, "seed %lu policy %d",
                      (unsigned long)seed, s.r.policy);
        ck_assert(q.ttft_ms == p.ttft_ms && q.tpot_ms == p.tpot_ms);
        compared++;
    }
    ck_assert_uint_gt(compared, ROUNDS);
}
END_TEST

START_TEST(test_policy_predicts_no_more_where_more_of_the_prefix_is)
{
    uint32_t compared = 0;
    for (uint64_t seed = 0; seed < ROUNDS * POLICIES; seed++) {
        struct scene s;
        make_scene(&s, seed, true);
        uint32_t w = (uint32_t)(random_at(seed, 6, 6) % s.n);
        /* Mooncake loads by a ratio that does not depend on times. */
        bool stores = s.r.store_blocks && s.r.policy != POLICY_MOONCAKE;
        s.r.store_blocks = stores ? s.r.store_blocks : 0;
        s.r.matched_blocks = s.matched;
        s.r.policy = s.r.policy == POLICY_MOONCAKE ? POLICY_MOONCAKE : POLICY_TANDEM;
        /* Loading may be hidden behind other requests' work. Then the work can't rise, but the time may. */
        double before = predicted(&s, w, stores);
        s.matched[w] += 1 + (uint32_t)(seed % 7);
        double after = predicted(&s, w, stores);
        if (before == INFINITY)
            continue;
        if (s.r.policy == POLICY_TANDEM)
            ck_assert_msg(after <= before + 1e-9, "seed %lu: %f, then %f", (unsigned long)seed, before, after);
        compared += s.r.policy == POLICY_TANDEM;
    }
    ck_assert_uint_gt(compared, ROUNDS);
}
END_TEST

START_TEST(test_policy_names_the_limit_that_is_missed)
{
    uint32_t n_ttft = 0, n_tpot = 0, n_deadline = 0;
    for (uint64_t seed = 0; seed < ROUNDS * POLICIES; seed++) {
        struct scene s;
        make_scene(&s, seed, true);
        s.r.policy = seed & 1 ? POLICY_TANDEM : POLICY_MOONCAKE;
        struct plan p = place(&s);
        if (p.kind != PLAN_REFUSE)
            continue;
        ck_assert_ptr_nonnull(p.reason);
        ck_assert(p.never || p.over_ms > 0);
        if (strstr(p.reason, "slo.ttft_ms can't")) {
            n_ttft++;
            ck_assert(s.r.ttft_ms > 0);
            ck_assert(p.ttft_ms > s.r.ttft_ms && fabs(p.ttft_ms - s.r.ttft_ms - p.over_ms) < 1e-6);
            s.r.ttft_ms = 0;
        } else if (strstr(p.reason, "slo.deadline_ms")) {
            n_deadline++;
            ck_assert(fabs(p.ttft_ms - s.r.waited_ms - s.r.remaining_ms - p.over_ms) < 1e-6);
            s.r.remaining_ms = INFINITY;
        } else if (strstr(p.reason, "slo.tpot_ms can't") && s.r.tpot_ms > 0 && p.tpot_ms > s.r.tpot_ms) {
            n_tpot++;
            s.r.tpot_ms = 0;
        } else {
            continue;
        }
        struct plan q = place(&s); /* without that limit the reason must be gone */
        ck_assert(q.kind != PLAN_REFUSE || q.reason != p.reason || !(s.r.tpot_ms > 0));
    }
    ck_assert_msg(n_ttft > 500 && n_tpot > 100 && n_deadline > 100, "%u %u %u", n_ttft, n_tpot, n_deadline);
}
END_TEST

START_TEST(test_policy_calls_hopeless_what_idle_workers_could_not_do_either)
{
    uint32_t n_hopeless = 0, n_hope = 0, n_never = 0;
    for (uint64_t seed = 0; seed < ROUNDS * POLICIES; seed++) {
        struct scene s;
        make_scene(&s, seed, false);
        s.r.policy = POLICY_TANDEM;
        s.r.tpot_ms = s.r.waited_ms = 0;
        s.r.remaining_ms = INFINITY;
        struct plan p = place(&s);
        if (p.kind != PLAN_REFUSE)
            continue;
        for (uint32_t i = 0; i < s.n; i++) {
            struct policy_worker *w = &s.workers[i];
            memset(w->at, 0, sizeof(w->at));
            w->busy_ms = w->queued_tokens = w->n_prompts = 0;
            w->booked_ms = INFINITY;
            w->tpot_limit_ms = 0;
        }
        struct plan idle = place(&s);
        bool some = false;
        for (uint32_t i = 0; i < s.n; i++)
            some |= s.workers[i].usable && fits(&s.workers[i], &s.r) &&
                    (s.workers[i].role == ROLE_DECODE ||
                     (s.workers[i].role == ROLE_PREFILL && s.r.force != FORCE_SPLIT && s.r.force != FORCE_AGGREGATED));
        ck_assert(!p.never || idle.kind == PLAN_REFUSE);
        ck_assert(some || p.never);
        ck_assert_msg(!p.hopeless || idle.kind == PLAN_REFUSE || idle.ttft_ms > 0.9 * s.r.ttft_ms, "seed %lu",
                      (unsigned long)seed);
        if (!p.never && !p.hopeless && strstr(p.reason, "slo.ttft_ms can't"))
            ck_assert_msg(idle.kind != PLAN_REFUSE, "seed %lu", (unsigned long)seed);
        n_never += p.never;
        n_hopeless += p.hopeless;
        n_hope += !p.never && !p.hopeless;
    }
    ck_assert_msg(n_hopeless > 200 && n_hope > 100 && n_never > 500, "%u %u %u", n_hopeless, n_hope, n_never);
}
END_TEST

/* ------------------------------------------------------------------- rules */

START_TEST(test_policy_goes_to_the_prefix_unless_the_queue_there_costs_more)
{
    struct policy_worker w[] = {worker(ROLE_PREFILL), worker(ROLE_PREFILL), worker(ROLE_DECODE)};
    struct policy_request r = ask(16000);
    uint32_t matched[] = {0, 30, 0};
    r.force = FORCE_SPLIT;
    r.matched_blocks = matched;
    double saved = cost_prefill_ms(&models[0], 16000, 0, 8192) - cost_prefill_ms(&models[0], 640, 15360, 8192);
    ck_assert_uint_eq(policy_place(w, 3, &r, NULL, NULL).prefill, 1);
    w[1].busy_ms = saved * 3; /* without a limit a second copy of the prefix costs something */
    ck_assert_uint_eq(policy_place(w, 3, &r, NULL, NULL).prefill, 1);
    w[1].busy_ms = saved * 9;
    ck_assert_uint_eq(policy_place(w, 3, &r, NULL, NULL).prefill, 0);
    r.ttft_ms = 60000;
    w[1].busy_ms = saved * 0.9; /* waiting costs less than work */
    ck_assert_uint_eq(policy_place(w, 3, &r, NULL, NULL).prefill, 1);
    w[1].busy_ms = saved * 3;
    ck_assert_uint_eq(policy_place(w, 3, &r, NULL, NULL).prefill, 0);
    /* Only the worker with the prefix meets the limit. */
    r.ttft_ms = cost_prefill_ms(&models[0], 16000, 0, 8192) * 0.8;
    w[1].busy_ms = 0;
    ck_assert_uint_eq(policy_place(w, 3, &r, NULL, NULL).prefill, 1);
    r.ttft_ms = 0;
    w[1].booked_ms = 1;
    /* The place is booked for another request. */
    ck_assert_uint_eq(policy_place(w, 3, &r, NULL, NULL).prefill, 0);
    r.keeper = POLICY_ANY_KEEPER;
    ck_assert_uint_eq(policy_place(w, 3, &r, NULL, NULL).prefill, 1);
}
END_TEST

/* Stores have 20 blocks, another worker has 31: the prefix is loaded from both, from either, or computed,
 * whichever is fastest. */
START_TEST(test_policy_loads_from_where_that_takes_least_time)
{
    struct policy_worker w[] = {worker(ROLE_PREFILL), worker(ROLE_DECODE), worker(ROLE_STORE)};
    struct policy_request r = ask(16000);
    r.force = FORCE_SPLIT;
    r.store_blocks = 20;
    r.peer_blocks = 31;
    w[0].load_ms = w[0].fetch_ms = 2;
    w[0].load_dram_ms = w[0].fetch_block_ms = 1;
    struct plan p = policy_place(w, 3, &r, NULL, NULL);
    /* Both loads run at the same time. */
    ck_assert(p.loaded_blocks == 31 && p.peer_from == 20 && fabs(p.load_ms - 22) < 1e-9);
    w[0].fetch_block_ms = 0.1;
    p = policy_place(w, 3, &r, NULL, NULL);
    ck_assert(p.loaded_blocks == 31 && p.peer_from == 0 && fabs(p.load_ms - 5.1) < 1e-9);
    w[0].fetch_ms = 1e4;
    p = policy_place(w, 3, &r, NULL, NULL);
    ck_assert(p.loaded_blocks == 20 && p.peer_from == 20 && fabs(p.load_ms - 22) < 1e-9);
    r.prefix = PREFIX_LOAD;
    p = policy_place(w, 3, &r, NULL, NULL);
    ck_assert(p.loaded_blocks == 31);
    r.prefix = PREFIX_AUTO;
    w[0].load_ms = 1e4;
    p = policy_place(w, 3, &r, NULL, NULL);
    ck_assert(p.loaded_blocks == 0 && p.peer_from == 0 && p.load_ms == 0);
    uint32_t matched[] = {31, 0, 0};
    r.matched_blocks = matched;
    w[0].fetch_ms = 2;
    p = policy_place(w, 3, &r, NULL, NULL);
    /* The worker has these blocks itself. */
    ck_assert(p.loaded_blocks == 0 && p.new_tokens == 16000 - 31 * TOKENS);
}
END_TEST

START_TEST(test_policy_loads_from_stores_where_that_takes_less_time)
{
    struct policy_worker w[] = {worker(ROLE_PREFILL), worker(ROLE_DECODE), worker(ROLE_STORE)};
    struct policy_request r = ask(16000);
    r.force = FORCE_SPLIT;
    r.store_blocks = 31;
    w[0].load_ms = 2;
    w[0].load_dram_ms = 1;
    w[0].load_ssd_ms = 100; /* longer than computing a block */
    struct plan p = policy_place(w, 3, &r, NULL, NULL);
    ck_assert_uint_eq(p.loaded_blocks, 31);
    ck_assert(fabs(p.load_ms - 33) < 1e-9);
    r.store_blocks_ssd = 31;
    ck_assert_uint_eq(policy_place(w, 3, &r, NULL, NULL).loaded_blocks, 0);
    r.prefix = PREFIX_LOAD;
    ck_assert_uint_eq(policy_place(w, 3, &r, NULL, NULL).loaded_blocks, 31);
    r.store_blocks_ssd = 0;
    r.prefix = PREFIX_COMPUTE;
    ck_assert_uint_eq(policy_place(w, 3, &r, NULL, NULL).loaded_blocks, 0);
    r.prefix = PREFIX_AUTO;
    r.n_tokens = 31 * TOKENS; /* the last token is always computed, so its block is not loaded */
    ck_assert_uint_eq(policy_place(w, 3, &r, NULL, NULL).loaded_blocks, 30);
}
END_TEST

START_TEST(test_policy_mooncake_fetches_by_the_ratio_of_matches)
{
    struct policy_worker w[] = {worker(ROLE_PREFILL), worker(ROLE_DECODE), worker(ROLE_STORE)};
    struct policy_request r = ask(40000);
    uint32_t matched[] = {0, 0, 0};
    r.matched_blocks = matched;
    r.policy = POLICY_MOONCAKE;
    r.store_blocks = 40;
    for (matched[0] = 0; matched[0] < 40; matched[0]++)
        ck_assert_uint_eq(policy_place(w, 3, &r, NULL, NULL).loaded_blocks, matched[0] * POLICY_BALANCE < 40 ? 40 : 0);
}
END_TEST

START_TEST(test_policy_mooncake_takes_the_least_time_to_first_token)
{
    struct policy_worker w[] = {worker(ROLE_PREFILL), worker(ROLE_PREFILL), worker(ROLE_DECODE), worker(ROLE_DECODE)};
    struct policy_request r = ask(16000);
    r.policy = POLICY_MOONCAKE;
    w[0].busy_ms = 20;
    w[2].at[0].running = 30;
    for (r.number = 0; r.number < 20; r.number++) {
        struct plan p = policy_place(w, 4, &r, NULL, NULL);
        ck_assert_uint_eq(p.prefill, 1);
        ck_assert_uint_eq(p.decode, 3);
    }
    r.ttft_ms = 10;
    ck_assert_int_eq(policy_place(w, 4, &r, NULL, NULL).kind, PLAN_REFUSE);
    r.policy = POLICY_LEAST_LOADED; /* the other policies know no limits */
    ck_assert_int_eq(policy_place(w, 4, &r, NULL, NULL).kind, PLAN_SPLIT);
}
END_TEST

START_TEST(test_policy_prompts_get_the_time_that_the_limits_of_others_leave)
{
    struct policy_worker w = worker(ROLE_DECODE);
    struct policy_request r = ask(16000);
    struct plan p = policy_place(&w, 1, &r, NULL, NULL);
    ck_assert_int_eq(p.kind, PLAN_AGGREGATED);
    ck_assert(p.prompt_share == 1);
    double alone = p.ttft_ms;
    for (uint32_t i = 0; i < POLICY_HORIZONS; i++)
        w.at[i] = (struct policy_load){30, 30000, 90};
    p = policy_place(&w, 1, &r, NULL, NULL); /* its two steps share one of the fixed parts */
    double steps = 2 * (cost_decode_ms(&models[0], 30, 30000) - cost_shared_ms(&models[0]));
    ck_assert(fabs(p.ttft_ms / (cost_prefill_ms(&models[0], 16000, 0, 8192) + steps) - 1) < 0.01);
    w.tpot_limit_ms = 40;
    p = policy_place(&w, 1, &r, NULL, NULL);
    double left = 1 - cost_decode_ms(&models[0], 30, 30000) / (BATCHING_SAFE * 40);
    ck_assert(fabs(p.prompt_share / left - 1) < 0.1); /* a bit more because of the step's fixed part */
    ck_assert(fabs(p.ttft_ms * p.prompt_share / alone - 1) < 0.01);
    w.tpot_limit_ms = 6;
    ck_assert_int_eq(policy_place(&w, 1, &r, NULL, NULL).kind, PLAN_REFUSE);
}
END_TEST

static void fill(struct policy_worker *w, struct policy_load load)
{
    for (uint32_t i = 0; i < POLICY_HORIZONS; i++)
        w->at[i] = load;
}

/* Checks that the choice is the same for every number of a request, so chance does not decide. */
static void check_goes_to(const struct policy_worker *w, uint32_t n, struct policy_request r, uint32_t prefill)
{
    for (r.number = 0; r.number < 50; r.number++)
        ck_assert_uint_eq(policy_place(w, n, &r, NULL, NULL).prefill, prefill);
}

START_TEST(test_policy_without_limits_delays_long_answers_rather_than_short_ones)
{
    struct policy_worker w[] = {worker(ROLE_DECODE), worker(ROLE_DECODE)};
    fill(&w[0], (struct policy_load){5, 20000, 50, .brevity = 5 / 20.0});
    fill(&w[1], (struct policy_load){5, 20000, 50, .brevity = 5 / 500.0});
    check_goes_to(w, 2, ask(16000), 1);
    fill(&w[0], w[1].at[0]);
    fill(&w[1], (struct policy_load){5, 20000, 50, .brevity = 5 / 20.0});
    check_goes_to(w, 2, ask(16000), 0);
}
END_TEST

/* A prefill worker that kept sequences computes a prompt that decodes elsewhere: the sequences are delayed
 * all the same. */
START_TEST(test_policy_without_limits_counts_kept_sequences_that_a_split_prompt_delays)
{
    struct policy_worker w[] = {worker(ROLE_PREFILL), worker(ROLE_PREFILL), worker(ROLE_DECODE)};
    struct policy_request r = ask(16000);
    r.force = FORCE_SPLIT;
    fill(&w[0], (struct policy_load){2, 4000, 10, .brevity = 2 / 50.0});
    w[1].busy_ms = 200;
    check_goes_to(w, 3, r, 1);
}
END_TEST

/* Future prompts may come to any worker of the role, so only the present ones distinguish workers. */
START_TEST(test_policy_without_limits_ignores_which_worker_had_prompts_lately)
{
    struct policy_worker w[] = {worker(ROLE_DECODE), worker(ROLE_DECODE)};
    w[0].prompt_use = 0.5;
    w[0].role_prompt_use = w[1].role_prompt_use = 0.25;
    w[1].busy_ms = 150;
    check_goes_to(w, 2, ask(2000), 0);
}
END_TEST

/* If no worker has the prefix, a second copy costs nothing: slow workers are judged by their time, however
 * busy the fast ones are. */
START_TEST(test_policy_without_limits_charges_copies_only_of_what_another_has)
{
    struct policy_worker w[] = {worker(ROLE_PREFILL), worker(ROLE_PREFILL), worker(ROLE_DECODE)};
    struct policy_request r = ask(16000);
    r.force = FORCE_SPLIT;
    w[1].cost = &models[1]; /* it needs 1.6 s for the prompt, the other worker 0.4 s */
    w[0].busy_ms = 3000;
    w[0].n_prompts = 1;
    check_goes_to(w, 3, r, 1);
}
END_TEST

START_TEST(test_policy_keeps_on_the_prefill_worker_what_decode_workers_have_no_room_for)
{
    struct policy_worker w[] = {worker(ROLE_PREFILL), worker(ROLE_DECODE)};
    struct policy_request r = ask(4000);
    r.ttft_ms = 2000;
    r.tpot_ms = 40;
    ck_assert_int_ne(policy_place(w, 2, &r, NULL, NULL).kind, PLAN_KEPT);
    /* Its steps take 32 ms; with one more sequence they exceed the limit of 33 ms. */
    fill(&w[1], (struct policy_load){60, 900000, 900});
    w[1].tpot_limit_ms = 33;
    r.tpot_ms = 33;
    r.expected_tokens = 100;
    r.n_tokens = 40000;
    struct plan p = policy_place(w, 2, &r, NULL, NULL);
    ck_assert_int_eq(p.kind, PLAN_KEPT);
    ck_assert(p.prefill == 0 && p.decode == 0 && p.tpot_ms < 33);
    r.force = FORCE_SPLIT;
    ck_assert_int_eq(policy_place(w, 2, &r, NULL, NULL).kind, PLAN_REFUSE);
    r.force = FORCE_KEPT;
    ck_assert_int_eq(policy_place(w, 2, &r, NULL, NULL).kind, PLAN_KEPT);
}
END_TEST

START_TEST(test_policy_decodes_nowhere_where_promised_prompts_would_be_late)
{
    struct policy_worker w[] = {worker(ROLE_PREFILL)};
    struct policy_request r = ask(4000);
    r.force = FORCE_KEPT;
    r.ttft_ms = 2000;
    r.tpot_ms = 20;
    w[0].busy_ms = 1000;
    w[0].n_prompts = 3;
    w[0].patience = 1.5;
    /* The request decodes after the prompts. */
    ck_assert_int_eq(policy_place(w, 1, &r, NULL, NULL).kind, PLAN_KEPT);
    w[0].busy_ms = 300;
    fill(&w[0], (struct policy_load){1, 4000, 300});
    w[0].tpot_limit_ms = 100;
    r.n_tokens = 16; /* it decodes beside the prompts, and would leave them less than half of the time */
    r.tpot_ms = 9;
    w[0].busy_ms = 3000;
    w[0].patience = 1.1;
    struct decode_view tight = policy_view_decode(w, 0, &r, 0, NULL);
    w[0].patience = 100;
    struct decode_view loose = policy_view_decode(w, 0, &r, 0, NULL);
    ck_assert(tight.start > 0 && loose.start == 0);
}
END_TEST

/* Policies that know no limits wait only for room. */
START_TEST(test_policy_without_limits_places_what_no_limit_allows)
{
    struct policy_worker w[] = {worker(ROLE_PREFILL), worker(ROLE_DECODE)};
    for (enum policy p = 0; p < POLICIES; p++) {
        struct policy_request r = ask(4000);
        r.policy = p;
        r.force = FORCE_SPLIT;
        r.tpot_ms = 1; /* every step takes longer */
        struct plan plan = policy_place(w, 2, &r, NULL, NULL);
        ck_assert_msg(policy_refuses(p) ? plan.kind == PLAN_REFUSE : plan.kind == PLAN_SPLIT && plan.now, "%d", p);
    }
}
END_TEST

START_TEST(test_policy_margin_stays_below_a_tpot_limit)
{
    struct policy_worker w[] = {worker(ROLE_PREFILL), worker(ROLE_DECODE)};
    struct policy_request r = ask(4000);
    r.force = FORCE_SPLIT;
    double step = policy_view_decode(w, 1, &r, 0, NULL).step;
    r.tpot_ms = step * 1.05;
    ck_assert_int_eq(policy_place(w, 2, &r, NULL, NULL).kind, PLAN_SPLIT);
    r.tpot_margin = 0.1;
    ck_assert_int_eq(policy_place(w, 2, &r, NULL, NULL).kind, PLAN_REFUSE);
}
END_TEST

static struct transfer_model port(double ms_for_1000)
{
    struct transfer_model m = transfer_make();
    m.line.w[0] = 1;
    m.line.w[1] = ms_for_1000;
    return m;
}

/* Most of the prompt is cached by its prefill worker: its transfer is not hidden behind arithmetic. */
START_TEST(test_policy_prefers_a_decode_worker_that_has_the_prompt)
{
    const struct transfer_model slow = port(20);
    struct policy_worker w[] = {worker(ROLE_PREFILL), worker(ROLE_DECODE), worker(ROLE_DECODE)};
    struct policy_request r = ask(32 * TOKENS);
    uint32_t matched[] = {31, 0, 0};
    r.force = FORCE_SPLIT;
    r.matched_blocks = matched;
    w[1].transfer = w[2].transfer = &slow;
    for (uint32_t has = 1; has <= 2; has++)
        for (r.number = 0; r.number < 50; r.number++) {
            matched[1] = matched[2] = 0;
            double none = policy_place(w, 3, &r, NULL, NULL).gap_ms;
            matched[has] = 31;
            struct plan plan = policy_place(w, 3, &r, NULL, NULL);
            ck_assert_uint_eq(plan.decode, has);
            ck_assert_msg(plan.gap_ms < none / 5 && none > 250, "%f %f", plan.gap_ms, none);
        }
}
END_TEST

/* The predicted TPOT contains the first gap. A split plan does not promise a limit that the gap breaks. */
START_TEST(test_policy_counts_the_first_gap_against_tpot)
{
    const struct transfer_model slow = port(20);
    struct policy_worker w[] = {worker(ROLE_PREFILL), worker(ROLE_DECODE)};
    struct policy_request r = ask(32 * TOKENS);
    uint32_t matched[] = {31, 0};
    r.matched_blocks = matched;
    r.force = FORCE_SPLIT;
    r.expected_tokens = 5;
    double without = policy_place(w, 2, &r, NULL, NULL).tpot_ms;
    w[1].transfer = &slow;
    struct plan plan = policy_place(w, 2, &r, NULL, NULL);
    ck_assert_double_eq_tol(plan.tpot_ms, (plan.gap_ms + 3 * without) / 4, 1e-6);
    r.tpot_ms = plan.tpot_ms * 0.9;
    ck_assert_int_eq(policy_place(w, 2, &r, NULL, NULL).kind, PLAN_REFUSE);
    r.tpot_ms = plan.tpot_ms * 1.1;
    ck_assert_int_eq(policy_place(w, 2, &r, NULL, NULL).kind, PLAN_SPLIT);
    r.tpot_ms = plan.tpot_ms * 0.9;
    r.force = FORCE_NONE;
    ck_assert_int_eq(policy_place(w, 2, &r, NULL, NULL).kind, PLAN_KEPT);
    r.expected_tokens = r.max_tokens = 1; /* a single token has no gap */
    r.force = FORCE_SPLIT;
    ck_assert_int_eq(policy_place(w, 2, &r, NULL, NULL).kind, PLAN_SPLIT);
}
END_TEST

START_TEST(test_policy_waits_at_the_router_for_pages_and_for_room_ahead)
{
    struct policy_worker w[] = {worker(ROLE_PREFILL), worker(ROLE_DECODE)};
    struct policy_request r = ask(16000);
    r.force = FORCE_SPLIT;
    ck_assert(policy_place(w, 2, &r, NULL, NULL).now);
    w[0].takes_prompts = false;
    ck_assert(!policy_place(w, 2, &r, NULL, NULL).now);
    w[0].takes_prompts = true;
    for (uint32_t i = 0; i < POLICY_HORIZONS; i++) /* there is room after two to four seconds */
        w[1].at[i] = (struct policy_load){10, 10000, i < 5 ? 990 : 100};
    struct plan p = policy_place(w, 2, &r, NULL, NULL);
    ck_assert(p.kind == PLAN_SPLIT && !p.now && p.ttft_ms > 2000 && p.ttft_ms <= 4000);
    for (uint32_t i = 0; i < POLICY_HORIZONS; i++)
        w[1].at[i].pages = 990;
    p = policy_place(w, 2, &r, NULL, NULL); /* no room is in sight: the request waits, unless it must not */
    ck_assert(p.kind == PLAN_SPLIT && !p.now && p.ttft_ms > 16000);
    r.ttft_ms = 10000;
    p = policy_place(w, 2, &r, NULL, NULL);
    ck_assert(p.kind == PLAN_REFUSE && !p.never && strstr(p.reason, "slo.ttft_ms"));
}
END_TEST

/* Counts how often each of the first n workers is chosen for the prefill. */
static void count(enum policy policy, struct policy_worker *w, uint32_t n, uint32_t rounds, uint32_t *counts)
{
    struct policy_request r = ask(1000);
    r.policy = policy;
    r.force = FORCE_SPLIT;
    memset(counts, 0, n * sizeof(*counts));
    for (r.number = 0; r.number < rounds; r.number++)
        counts[policy_place(w, n + 1, &r, NULL, NULL).prefill]++;
}

START_TEST(test_policy_spreads_equal_workers)
{
    struct policy_worker w[9];
    uint32_t counts[8];
    for (int i = 0; i < 9; i++)
        w[i] = worker(i < 8 ? ROLE_PREFILL : ROLE_DECODE);
    count(POLICY_ROUND_ROBIN, w, 8, 800, counts);
    for (int i = 0; i < 8; i++)
        ck_assert_uint_eq(counts[i], 100);
    for (enum policy p = 0; p < POLICIES; p++) {
        count(p, w, 8, 4000, counts);
        for (int i = 0; i < 8; i++) /* within six standard deviations of 4000 draws */
            ck_assert_msg(counts[i] > 370 && counts[i] < 630, "policy %d, worker %d: %u of 4000", p, i, counts[i]);
    }
}
END_TEST

/* However busy that worker is, as long as it has room and the limit is kept; only for choices, and only if it
 * has the whole prompt. */
START_TEST(test_policy_choices_of_one_call_share_a_decode_worker)
{
    enum { THERE = 2 };
    struct policy_worker w[] = {worker(ROLE_PREFILL), worker(ROLE_DECODE), worker(ROLE_DECODE), worker(ROLE_DECODE)};
    const uint32_t matched[] = {4, 0, 4, 3};
    struct policy_request r = ask(4 * TOKENS + 100);
    r.matched_blocks = matched;
    r.force = FORCE_SPLIT;
    for (int i = 0; i < POLICY_HORIZONS; i++)
        w[THERE].at[i] = (struct policy_load){20, 40000, 100};
    for (r.number = 0; r.number < 100; r.number++) {
        r.shares = false;
        ck_assert_uint_ne(policy_place(w, 4, &r, NULL, NULL).decode, THERE);
        r.shares = true;
        ck_assert_uint_eq(policy_place(w, 4, &r, NULL, NULL).decode, THERE);
    }
    double tpot = policy_place(w, 4, &r, NULL, NULL).step_ms;
    r.tpot_ms = tpot * 0.99;
    ck_assert_uint_ne(policy_place(w, 4, &r, NULL, NULL).decode, THERE);
    r.tpot_ms = tpot;
    ck_assert_uint_eq(policy_place(w, 4, &r, NULL, NULL).decode, THERE);
    w[THERE].at[0].pages = w[THERE].total_pages - 2;
    ck_assert_uint_ne(policy_place(w, 4, &r, NULL, NULL).decode, THERE);
    w[THERE].at[0].pages = 100;
    w[THERE].max_batch = 20;
    ck_assert_uint_ne(policy_place(w, 4, &r, NULL, NULL).decode, THERE);
    w[THERE].max_batch = 64;
    r.n_tokens += TOKENS; /* now the worker lacks a block */
    ck_assert_uint_ne(policy_place(w, 4, &r, NULL, NULL).decode, THERE);
}
END_TEST

START_TEST(test_policy_headroom_and_mixed_pool_go_where_there_is_memory)
{
    struct policy_worker w[] = {worker(ROLE_PREFILL), worker(ROLE_DECODE), worker(ROLE_DECODE)};
    struct policy_request r = ask(16000);
    for (uint32_t i = 0; i < POLICY_HORIZONS; i++) {
        w[1].at[i] = (struct policy_load){1, 1000, 960};
        w[2].at[i] = (struct policy_load){20, 20000, 300};
    }
    for (uint32_t i = 0; i < 2; i++) {
        r.policy = i ? POLICY_MIXED_POOL : POLICY_HEADROOM;
        ck_assert_uint_eq(policy_place(w, 3, &r, NULL, NULL).decode, 2);
    }
    w[0].queued_tokens = 8000; /* the prompt machine's queue is full, so a token machine takes both phases */
    struct plan p = policy_place(w, 3, &r, NULL, NULL);
    ck_assert_int_eq(p.kind, PLAN_AGGREGATED);
}
END_TEST

START_TEST(test_policy_cache_aware_leaves_the_prefix_when_loads_are_uneven)
{
    struct policy_worker w[] = {worker(ROLE_PREFILL), worker(ROLE_PREFILL), worker(ROLE_DECODE)};
    struct policy_request r = ask(16000);
    uint32_t matched[] = {0, 20, 0};
    r.policy = POLICY_CACHE_AWARE;
    r.matched_blocks = matched;
    w[1].n_prompts = 30;
    ck_assert_uint_eq(policy_place(w, 3, &r, NULL, NULL).prefill, 1);
    w[1].n_prompts = 40;
    ck_assert_uint_eq(policy_place(w, 3, &r, NULL, NULL).prefill, 0);
    w[1].n_prompts = 30;
    matched[1] = 14; /* it has less than half of the prompt */
    ck_assert_uint_eq(policy_place(w, 3, &r, NULL, NULL).prefill, 0);
}
END_TEST

static void use_pages(struct policy_worker *w, double running, double pages)
{
    for (uint32_t i = 0; i < POLICY_HORIZONS; i++)
        w->at[i] = (struct policy_load){running, 1000 * running, pages};
}

START_TEST(test_policy_mixed_pool_borrows_machines_of_either_pool)
{
    struct policy_worker w[] = {worker(ROLE_PREFILL), worker(ROLE_PREFILL), worker(ROLE_DECODE), worker(ROLE_DECODE)};
    struct policy_request r = ask(16000);
    r.policy = POLICY_MIXED_POOL;
    ck_assert_int_eq(policy_place(w, 4, &r, NULL, NULL).kind, PLAN_SPLIT);
    use_pages(&w[2], 20, 990); /* the token pool is full, by memory and by its batch */
    use_pages(&w[3], w[3].max_batch, 100);
    use_pages(&w[0], 4, 40);
    struct plan p = policy_place(w, 4, &r, NULL, NULL);
    ck_assert(p.kind == PLAN_KEPT && p.prefill == 1 && p.decode == 1 && p.now);
    w[1].queued_tokens = 8000; /* its queue is full, too */
    p = policy_place(w, 4, &r, NULL, NULL);
    ck_assert(p.kind == PLAN_KEPT && p.prefill == 0 && p.decode == 0);
    r.force = FORCE_SPLIT;
    ck_assert_int_eq(policy_place(w, 4, &r, NULL, NULL).kind, PLAN_SPLIT);
    r.force = FORCE_NONE;
    /* No machine has room: the request waits for the token machine with the least in memory. */
    use_pages(&w[0], 4, 990);
    p = policy_place(w, 4, &r, NULL, NULL);
    ck_assert(p.kind == PLAN_SPLIT && p.prefill == 0 && p.decode == 3 && !p.now);
    use_pages(&w[3], 4, 100); /* the token pool has room, and the prompt pool's queues are full */
    w[0].queued_tokens = 8000;
    p = policy_place(w, 4, &r, NULL, NULL);
    ck_assert(p.kind == PLAN_AGGREGATED && p.decode == 3);
}
END_TEST

/* With every policy. */
START_TEST(test_policy_keeps_where_it_is_forced_to)
{
    uint32_t n[POLICIES] = {0};
    for (uint64_t seed = 0; seed < ROUNDS * POLICIES; seed++) {
        struct scene s;
        make_scene(&s, seed, false);
        s.r.force = FORCE_KEPT;
        struct plan p = place(&s);
        if (p.kind == PLAN_REFUSE)
            continue;
        ck_assert_int_eq(p.kind, PLAN_KEPT);
        ck_assert(p.prefill == p.decode && s.workers[p.prefill].role == ROLE_PREFILL && s.workers[p.prefill].usable);
        n[s.r.policy]++;
    }
    for (uint32_t i = 0; i < POLICIES; i++)
        ck_assert_msg(n[i] > ROUNDS / 10, "policy %u: %u", i, n[i]);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("policy");
    TCase *t = tcase_create("policy");
    tcase_set_timeout(t, 60);
    tcase_add_checked_fixture(t, set_up, NULL);
    tcase_add_test(t, test_policy_never_takes_an_unusable_too_small_or_full_worker_nor_a_store);
    tcase_add_test(t, test_policy_hands_no_pages_to_a_worker_that_can_not_read_them);
    tcase_add_test(t, test_policy_goes_around_a_pair_that_can_not_connect);
    tcase_add_test(t, test_policy_gives_the_same_plan_for_the_same_input);
    tcase_add_test(t, test_policy_keeps_limits_or_refuses);
    tcase_add_test(t, test_policy_doubts_waiting_and_hopes_for_work);
    tcase_add_test(t, test_policy_keeps_a_forced_kind);
    tcase_add_test(t, test_policy_predicts_no_less_for_a_busier_worker);
    tcase_add_test(t, test_policy_stays_with_its_choice_when_another_worker_gets_busier);
    tcase_add_test(t, test_policy_predicts_no_more_where_more_of_the_prefix_is);
    tcase_add_test(t, test_policy_names_the_limit_that_is_missed);
    tcase_add_test(t, test_policy_calls_hopeless_what_idle_workers_could_not_do_either);
    tcase_add_test(t, test_policy_goes_to_the_prefix_unless_the_queue_there_costs_more);
    tcase_add_test(t, test_policy_loads_from_where_that_takes_least_time);
    tcase_add_test(t, test_policy_loads_from_stores_where_that_takes_less_time);
    tcase_add_test(t, test_policy_mooncake_fetches_by_the_ratio_of_matches);
    tcase_add_test(t, test_policy_mooncake_takes_the_least_time_to_first_token);
    tcase_add_test(t, test_policy_prompts_get_the_time_that_the_limits_of_others_leave);
    tcase_add_test(t, test_policy_without_limits_delays_long_answers_rather_than_short_ones);
    tcase_add_test(t, test_policy_without_limits_counts_kept_sequences_that_a_split_prompt_delays);
    tcase_add_test(t, test_policy_without_limits_ignores_which_worker_had_prompts_lately);
    tcase_add_test(t, test_policy_without_limits_charges_copies_only_of_what_another_has);
    tcase_add_test(t, test_policy_keeps_on_the_prefill_worker_what_decode_workers_have_no_room_for);
    tcase_add_test(t, test_policy_decodes_nowhere_where_promised_prompts_would_be_late);
    tcase_add_test(t, test_policy_without_limits_places_what_no_limit_allows);
    tcase_add_test(t, test_policy_margin_stays_below_a_tpot_limit);
    tcase_add_test(t, test_policy_prefers_a_decode_worker_that_has_the_prompt);
    tcase_add_test(t, test_policy_counts_the_first_gap_against_tpot);
    tcase_add_test(t, test_policy_waits_at_the_router_for_pages_and_for_room_ahead);
    tcase_add_test(t, test_policy_spreads_equal_workers);
    tcase_add_test(t, test_policy_choices_of_one_call_share_a_decode_worker);
    tcase_add_test(t, test_policy_headroom_and_mixed_pool_go_where_there_is_memory);
    tcase_add_test(t, test_policy_cache_aware_leaves_the_prefix_when_loads_are_uneven);
    tcase_add_test(t, test_policy_mixed_pool_borrows_machines_of_either_pool);
    tcase_add_test(t, test_policy_keeps_where_it_is_forced_to);
    suite_add_tcase(s, t);
    return tap_main(s);
}
