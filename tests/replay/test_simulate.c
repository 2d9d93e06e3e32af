/* The cluster in virtual time: identities of any queueing system, and the scheduler's behaviour on small
 * synthetic loads. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/replay/simulate_made.h"

static double goodput(const struct simulate_config *c, const struct simulate_result *r)
{
    uint32_t met = 0;
    for (uint64_t i = 0; i < r->n_requests; i++) {
        const struct simulated *q = &r->requests[i];
        met += !q->refused && (!(c->ttft_ms > 0) || q->ttft_ms <= c->ttft_ms) && q->tpot_ms <= c->tpot_ms;
    }
    return met / (r->requests[r->n_requests - 1].arrived_ms * 1e-3);
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double busy_share(const struct simulate_result *r, uint32_t from, uint32_t to)
{
    double sum = 0;
    for (uint32_t w = from; w < to; w++)
        sum += r->workers[w].busy_ms / r->duration_ms;
    return sum / (to - from);
}

/* Checks that two results are equal, bit for bit. */
static void must_be_same(const struct simulate_result *a, const struct simulate_result *b)
{
    ck_assert(a->n_refused == b->n_refused && a->duration_ms == b->duration_ms && a->n_steps == b->n_steps &&
              a->n_late_refused == b->n_late_refused);
    for (uint32_t w = 0; w < a->n_workers; w++) {
        const struct simulated_worker *p = &a->workers[w], *q = &b->workers[w];
        ck_assert(p->busy_ms == q->busy_ms && p->prefill_ms == q->prefill_ms &&
                  !memcmp(&p->joules, &q->joules, sizeof(p->joules)));
    }
    for (uint64_t i = 0; i < a->n_requests; i++) {
        const struct simulated *p = &a->requests[i], *q = &b->requests[i];
        if (p->refused != q->refused || p->ttft_ms != q->ttft_ms || p->tpot_ms != q->tpot_ms ||
            p->end_ms != q->end_ms || p->prefill != q->prefill || p->decode != q->decode ||
            p->predicted_ttft_ms != q->predicted_ttft_ms || p->retry_after_ms != q->retry_after_ms)
            ck_abort_msg("request %lu differs", (unsigned long)i);
    }
}

/* -------------------------------------------------------------- identities */

START_TEST(test_simulate_gives_the_same_result_twice)
{
    struct maker m = {0};
    struct simulate_config c = config_of(2, 3);
    struct simulate_result a, b;
    make_mixed(&m, 1500, 25);
    c.noise = 0.1;
    c.profile_error = 2;
    c.retry_share = 0.2;
    simulate_run(&m.trace, &c, &a);
    simulate_run(&m.trace, &c, &b);
    must_be_same(&a, &b);
    ck_assert_uint_gt(a.n_refused, 0);
    simulate_result_fini(&a);
    simulate_result_fini(&b);
    maker_fini(&m);
}
END_TEST

struct edge { /* a request arrives or ends */
    double at;
    int by;
};

static int compare_edges(const void *a, const void *b)
{
    const struct edge *x = a, *y = b;
    return (x->at > y->at) - (x->at < y->at);
}

START_TEST(test_simulate_keeps_the_identities_of_queues)
{
    struct maker m = {0};
    struct simulate_config c = config_of(2, 3);
    struct simulate_result r;
    make_mixed(&m, 1500, 60);
    c.ttft_ms = c.tpot_ms = 0;
    simulate_run(&m.trace, &c, &r);
    ck_assert_uint_eq(r.n_refused, 0);
    struct edge *edges = mem_array(2 * r.n_requests, sizeof(*edges));
    double sojourn = 0, work = 0, busy = 0, area = 0, before = 0;
    for (uint64_t i = 0; i < r.n_requests; i++) {
        const struct simulated *q = &r.requests[i];
        const struct trace_request *t = &m.trace.requests[i];
        double latency = q->end_ms - q->arrived_ms;
        if (fabs(q->ttft_ms + (t->n_output - 1) * q->tpot_ms - latency) > 1e-4)
            ck_abort_msg("request %lu: %f + %u * %f is not %f", (unsigned long)i, q->ttft_ms, t->n_output - 1,
                         q->tpot_ms, latency);
        double n = t->n_prompt - q->cached_tokens; /* without noise the least time of its prompt is known */
        work += c.cost.prefill[1] * n + c.cost.prefill[2] * n * (n + 2.0 * q->cached_tokens);
        sojourn += latency;
        edges[2 * i] = (struct edge){q->arrived_ms, 1};
        edges[2 * i + 1] = (struct edge){q->end_ms, -1};
        ck_assert(q->cached_tokens < t->n_prompt && q->cached_tokens % BLOCK == 0);
    }
    qsort(edges, 2 * r.n_requests, sizeof(*edges), compare_edges);
    int there = 0;
    for (uint64_t i = 0; i < 2 * r.n_requests; i++) {
        area += there * (edges[i].at - before);
        before = edges[i].at;
        there += edges[i].by;
        ck_assert_int_ge(there, 0);
    }
    ck_assert_int_eq(there, 0);
    /* Little's law: the area under the number of requests is the sum of their times. */
    ck_assert(fabs(area / sojourn - 1) < 1e-9);
    for (uint32_t w = 0; w < r.n_workers; w++) {
        busy += r.workers[w].busy_ms;
        ck_assert(r.workers[w].busy_ms <= r.duration_ms * (1 + 1e-9));
    }
    ck_assert_msg(busy > work, "%f ms of work in %f", work, busy);
    free(edges);
    simulate_result_fini(&r);
    maker_fini(&m);
}
END_TEST

START_TEST(test_simulate_a_lone_request_takes_what_the_model_says)
{
    struct maker m = {0};
    struct simulate_config c = config_of(1, 1);
    struct simulate_result r;
    add(&m, 0, 4000, 11, 1, 0);
    c.force = FORCE_SPLIT;
    simulate_run(&m.trace, &c, &r);
    const struct simulated *q = &r.requests[0];
    const double *p = c.cost.prefill, *d = c.cost.decode;
    double prefill = p[0] + 4000 * p[1] + 4000.0 * 4000 * p[2], link = c.link_ms + 1000 * 131072 / 40e6;
    ck_assert_msg(fabs(q->ttft_ms - prefill) < 1e-3, "%f %f", q->ttft_ms, prefill);
    double steps = 10 * (d[0] + d[2]) + d[1] * (10 * 4000 + 45);
    ck_assert_msg(fabs(q->end_ms - prefill - link - steps) < 0.1, "%f %f", q->end_ms, prefill + link + steps);
    simulate_result_fini(&r);
    maker_fini(&m);
}
END_TEST

/* ----------------------------------------------------- what it is used for */

START_TEST(test_simulate_tandem_has_the_goodput_of_the_best_policy)
{
    struct maker m = {0};
    make_mixed(&m, 3000, 12);
    double of[POLICIES];
    for (enum policy p = 0; p < POLICIES; p++) {
        struct simulate_config c = config_of(4, 4);
        struct simulate_result r;
        c.policy = p;
        c.noise = 0.1;
        simulate_run(&m.trace, &c, &r);
        of[p] = goodput(&c, &r);
        printf("# policy %d: goodput %.2f/s, busy %.2f and %.2f\n", p, of[p], busy_share(&r, 0, 4),
               busy_share(&r, 4, 8));
        ck_assert_msg(of[POLICY_TANDEM] >= of[p], "policy %d: %f, tandem %f", p, of[p], of[POLICY_TANDEM]);
        simulate_result_fini(&r);
    }
    maker_fini(&m);
}
END_TEST

/* Measures the relative errors of promised TTFTs, after the first 20 % of the requests. Returns how busy the
 * prefill workers were. */
static double measure_errors(double gap_ms, double noise, double profile_error, double *p50_out, double *p90_out)
{
    struct maker m = {0};
    struct simulate_config c = config_of(4, 4);
    struct simulate_result r;
    uint32_t n = 0;
    make_mixed(&m, 3000, gap_ms);
    c.noise = noise;
    c.profile_error = profile_error;
    c.force = FORCE_SPLIT;
    simulate_run(&m.trace, &c, &r);
    double *errors = mem_array(r.n_requests, sizeof(*errors)), busy = busy_share(&r, 0, 4);
    for (uint64_t i = r.n_requests / 5; i < r.n_requests; i++)
        if (!r.requests[i].refused)
            errors[n++] = fabs(r.requests[i].predicted_ttft_ms / r.requests[i].ttft_ms - 1);
    qsort(errors, n, sizeof(*errors), compare);
    *p50_out = errors[n / 2];
    *p90_out = errors[n * 9 / 10];
    printf("# gap %.0f ms, noise %.2f, profile x %.0f: busy %.2f, error p50 %.3f p90 %.3f of %u\n", gap_ms, noise,
           profile_error, busy, *p50_out, *p90_out, n);
    fflush(stdout);
    free(errors);
    simulate_result_fini(&r);
    maker_fini(&m);
    return busy;
}

/*
 * The remaining error is the noise of future steps, which nobody can predict: the error of one step with a
 * log-normal factor of sigma 0.1 has a median of 0.067 and a 90th percentile of 0.164. Without noise the
 * medians are below 0.001.
 */
START_TEST(test_simulate_times_to_first_token_are_as_promised)
{
    static const double GAPS_MS[] = {80, 30}; /* workers are busy for a third, for nine tenths of the time */
    double p50, p90, busy;
    for (int i = 0; i < 2; i++) {
        measure_errors(GAPS_MS[i], 0, 1, &p50, &p90);
        ck_assert_msg(p50 < 0.01 && p90 < 0.05, "profile known, no noise: %f %f", p50, p90);
        measure_errors(GAPS_MS[i], 0.05, 1, &p50, &p90);
        ck_assert_msg(p50 <= 0.05 && p90 <= 0.15, "profile known: %f %f", p50, p90);
    }
    busy = measure_errors(30, 0.1, 2, &p50, &p90);
    ck_assert_msg(busy >= 0.7, "%f", busy);
    /* The bounds of the noise alone, see above. */
    ck_assert_msg(p50 <= 0.06 && p90 <= 0.17, "%f %f", p50, p90);
}
END_TEST

START_TEST(test_simulate_shares_a_full_cluster_by_the_weights_of_tenants)
{
    enum { N = 9300, WINDOW_MS = 60000 };
    static const struct fair_weight WEIGHTS[] = {{1, 1}, {2, 3}};
    struct maker m = {0};
    struct simulate_config c = config_of(1, 1);
    struct simulate_ask *asks = mem_array(N, sizeof(*asks));
    struct simulate_result r;
    double shares[2][2] = {{0}};
    for (uint32_t i = 0; i < N; i++) {
        /* Twice the requests and a third of the weight; both tenants want more than they get. */
        bool floods = i % 3 < 2;
        add(&m, i * 13, 4000 + (uint32_t)(uniform(i, 1) * 4000), 20, 0, 0);
        asks[i] = (struct simulate_ask){.tenant = floods ? 1 : 2, .follows = -1};
    }
    c.ttft_ms = c.tpot_ms = 0;
    c.asks = asks;
    c.weights = WEIGHTS;
    c.n_weights = 2;
    simulate_run(&m.trace, &c, &r);
    /* Prefills that ended while requests arrive: both tenants are backlogged then. */
    for (uint32_t i = 0; i < N; i++) {
        const struct simulated *q = &r.requests[i];
        uint32_t window = (uint32_t)((q->arrived_ms + q->ttft_ms) / WINDOW_MS);
        if (window < 2)
            shares[window][asks[i].tenant - 1] += m.trace.requests[i].n_prompt + 20;
    }
    for (uint32_t w = 0; w < 2; w++) {
        double share = shares[w][0] / (shares[w][0] + shares[w][1]);
        printf("# window %u: share %.3f\n", w, share);
        ck_assert_msg(fabs(share - 0.25) <= 0.05 * 0.25, "window %u: %f", w, share);
    }
    simulate_result_fini(&r);
    maker_fini(&m);
    free(asks);
}
END_TEST

/* Runs workflows of 1 to 12 steps. A deadline is a multiple of the time of the steps alone. Returns the share
 * of workflows that kept it. */
static double attainment(enum scheduler_order order, double gap_ms)
{
    enum { FLOWS = 500, STEPS = 12 };
    struct maker m = {0};
    struct simulate_config c = config_of(2, 2);
    struct simulate_ask *asks = mem_array(FLOWS * STEPS, sizeof(*asks));
    struct simulate_result r;
    uint32_t n = 0, kept = 0;
    for (uint32_t f = 0; f < FLOWS; f++) {
        uint32_t steps = 1 + (uint32_t)(uniform(f, 20) * STEPS);
        double slack = log_uniform(2, 8, f, 21);
        for (uint32_t i = 0; i < steps; i++, n++) {
            uint64_t id = (uint64_t)f * STEPS + i;
            add(&m, f * gap_ms, (uint32_t)log_uniform(2000, 12000, id, 22), 20 + (uint32_t)(uniform(id, 23) * 80), 0,
                0);
            asks[n] = (struct simulate_ask){
                .follows = i ? (int64_t)n - 1 : -1, .steps_left = steps - 1 - i, .workflow_ms = slack * steps * 600};
        }
    }
    c.ttft_ms = c.tpot_ms = 0;
    c.asks = asks;
    c.order = order;
    c.noise = 0.1;
    simulate_run(&m.trace, &c, &r);
    for (uint32_t i = 0, first = 0; i < n; i++) {
        first = asks[i].follows < 0 ? i : first;
        kept += !asks[i].steps_left && !r.requests[i].refused &&
                r.requests[i].end_ms - r.requests[first].arrived_ms <= asks[i].workflow_ms;
    }
    printf("# order %d, gap %.0f ms: %.3f of %d kept, busy %.2f and %.2f\n", order, gap_ms, (double)kept / FLOWS, FLOWS,
           busy_share(&r, 0, 2), busy_share(&r, 2, 4));
    fflush(stdout);
    simulate_result_fini(&r);
    maker_fini(&m);
    free(asks);
    return (double)kept / FLOWS;
}

START_TEST(test_simulate_keeps_more_deadlines_of_workflows_than_other_orders)
{
    for (int i = 0; i < 2; i++) { /* a load a little above what can be kept, and one that just can */
        double gap = i ? 320 : 250, tandem = attainment(ORDER_TANDEM, gap);
        double first_come = attainment(ORDER_FCFS, gap), earliest = attainment(ORDER_EDF, gap);
        ck_assert_msg(tandem >= (i ? 1 : 1.3) * first_come, "%f, first come first served %f", tandem, first_come);
        ck_assert_msg(tandem >= earliest, "%f, earliest deadline first %f", tandem, earliest);
    }
}
END_TEST

/* ---------------------------------------------------------------- prefixes */

enum { CONCURRENT = 480 };

/* Makes requests with one prefix, each of which follows the one 480 before it; or conversations that arrive
 * by the clock. */
static void make_prefixes(struct maker *m, bool is_mixed)
{
    if (is_mixed) {
        make_mixed(m, 3000, 8);
        return;
    }
    for (uint32_t i = 0; i < 4000; i++)
        add(m, i * 0.01, 16 * BLOCK + 100 + (uint32_t)(uniform(i, 2) * 800), 20 + (uint32_t)(uniform(i, 3) * 200), 1,
            16);
}

static double hit_rate(const struct trace *t, const struct simulate_result *r)
{
    double cached = 0, all = 0;
    for (uint64_t i = 0; i < r->n_requests; i++) {
        cached += r->requests[i].cached_tokens;
        all += t->requests[i].n_prompt;
    }
    return cached / all;
}

static double hits_of(bool is_mixed, enum policy policy)
{
    struct maker m = {0};
    struct simulate_config c = config_of(8, 8);
    struct simulate_result r;
    make_prefixes(&m, is_mixed);
    struct simulate_ask *asks = mem_array(m.trace.n_requests, sizeof(*asks));
    for (uint32_t i = 0; i < m.trace.n_requests; i++)
        asks[i].follows = !is_mixed && i >= CONCURRENT ? (int64_t)i - CONCURRENT : -1;
    c.asks = asks;
    c.policy = policy;
    c.ttft_ms = c.tpot_ms = 0;
    c.noise = 0.05;
    simulate_run(&m.trace, &c, &r);
    double hits = hit_rate(&m.trace, &r);
    printf("# %s, policy %d: hits %.3f\n", is_mixed ? "mixed" : "one prefix", policy, hits);
    fflush(stdout);
    simulate_result_fini(&r);
    maker_fini(&m);
    free(asks);
    return hits;
}

/* test_simulate_balance.c checks that the load is spread nevertheless. */
START_TEST(test_simulate_finds_prefixes_as_the_best_policy_does)
{
    double best = 0;
    for (enum policy p = POLICY_TANDEM + 1; p < POLICIES; p++)
        best = fmax(best, hits_of(_i, p));
    double hits = hits_of(_i, POLICY_TANDEM);
    ck_assert_msg(hits >= 0.9 * best, "%f, best %f", hits, best);
}
END_TEST

/* ------------------------------------------------------------------- power */

static const struct simulate_power WATTS = {140, 700, 420};
static const double LEVEL_1 = 0.904; /* clocks of the workers whose clocks go first */

static double joules_of(const struct simulate_result *r)
{
    double sum = 0;
    for (uint32_t w = 0; w < r->n_workers; w++)
        sum += r->workers[w].joules;
    return sum;
}

static double watts_at(double most, double clock)
{
    return WATTS.idle + (most - WATTS.idle) * power_draw_factor(clock);
}

/* A cluster of workers that do both phases, with steps that do not depend on contexts, and a budget of
 * budget_w watts. */
static struct simulate_config row_of(uint32_t n_workers, double budget_w)
{
    struct simulate_config c = config_of(0, n_workers);
    c.cost.decode[1] = 0;
    c.ttft_ms = c.tpot_ms = 0;
    c.max_tokens = 0;
    c.n_pages = 1 << 20;
    c.power[0] = c.power[1] = WATTS;
    c.power_budget_w = budget_w;
    c.n_power_first = n_workers / 2;
    return c;
}

/* Makes a load that rises for five minutes and falls again. */
static void make_hill(struct maker *m, double gap_ms)
{
    for (double at = 0; at < 600e3;) {
        uint64_t i = m->trace.n_requests;
        double load = 0.2 + 0.8 * sin(at / 600e3 * M_PI);
        add(m, at, (uint32_t)log_uniform(500, 4000, i, 1), (uint32_t)log_uniform(20, 400, i, 2), 0, 0);
        at += exponential(gap_ms / load, i, 3);
    }
}

START_TEST(test_simulate_a_budget_that_is_never_near_changes_nothing)
{
    struct maker m = {0};
    struct simulate_config c = config_of(2, 3);
    struct simulate_result free_of_it, within;
    make_mixed(&m, 1500, 25);
    c.noise = 0.1;
    c.retry_share = 0.2;
    c.power[0] = c.power[1] = WATTS;
    simulate_run(&m.trace, &c, &free_of_it);
    c.power_budget_w = 100 * 5 * WATTS.prefill;
    c.n_power_first = 3;
    simulate_run(&m.trace, &c, &within);
    must_be_same(&free_of_it, &within);
    ck_assert_uint_gt(within.n_refused, 0);
    ck_assert(free_of_it.power.peak_share == 0 && within.power.peak_share > 0 && within.power.peak_share <= 0.01);
    ck_assert(within.power.level_ms[0] > 0.999 * within.duration_ms && within.power.n_brakes == 0);
    simulate_result_fini(&free_of_it);
    simulate_result_fini(&within);
    maker_fini(&m);
}
END_TEST

/* The power of one worker that decodes all the time is near enough to the budget for the first level, which
 * takes effect 40 s after it was seen. */
START_TEST(test_simulate_decoding_is_slower_by_its_factor_and_draws_less)
{
    enum { N = 20000, LAST = 2000 };
    struct maker m = {0};
    struct simulate_config c = row_of(1, 0);
    struct simulate_result up, down;
    add(&m, 0, 4000, N, 0, 0);
    c.keep_tokens = true;
    c.n_power_first = 1;
    simulate_run(&m.trace, &c, &up);
    c.power_budget_w = WATTS.decode / 0.85;
    simulate_run(&m.trace, &c, &down);
    const float *a = up.requests[0].token_ms, *b = down.requests[0].token_ms;
    double slower = ((double)b[N - 1] - (double)b[N - LAST]) / ((double)a[N - 1] - (double)a[N - LAST]);
    ck_assert_msg(fabs(slower / power_decode_factor(LEVEL_1) - 1) < 1e-4, "%f", slower);
    ck_assert_msg(fabs(down.power.peak_share - 0.85) < 1e-9 && !down.power.n_brakes, "%f", down.power.peak_share);
    /* It is seen after 2 s. */
    ck_assert_msg(fabs(down.power.level_ms[0] - 42e3) < 1e-3, "%f", down.power.level_ms[0]);
    ck_assert(fabs(down.power.level_ms[0] + down.power.level_ms[1] - down.duration_ms) < 1e-3);
    double prefill = up.workers[0].prefill_ms;
    double want = WATTS.prefill * prefill + WATTS.decode * (up.duration_ms - prefill);
    ck_assert_msg(fabs(joules_of(&up) / (want * 1e-3) - 1) < 1e-9, "%f %f", joules_of(&up), want * 1e-3);
    want = WATTS.prefill * prefill + WATTS.decode * (42e3 - prefill) +
           watts_at(WATTS.decode, LEVEL_1) * down.power.level_ms[1];
    ck_assert_msg(fabs(joules_of(&down) / (want * 1e-3) - 1) < 1e-4, "%f %f", joules_of(&down), want * 1e-3);
    ck_assert(joules_of(&down) < joules_of(&up));
    simulate_result_fini(&up);
    simulate_result_fini(&down);
    maker_fini(&m);
}
END_TEST

START_TEST(test_simulate_clocks_go_down_where_they_were_told_to_first)
{
    double ttft[3];
    struct maker m = {0};
    add(&m, 0, 4000, 20000, 0, 0);
    add(&m, 61e3, 4000, 2, 0, 0); /* a second away from every sample */
    for (uint32_t n_first = 0; n_first <= 2; n_first++) {
        struct simulate_config c = row_of(2, (WATTS.idle + WATTS.decode) / 0.85);
        struct simulate_result r;
        c.n_prefill = c.n_decode = 1;
        c.force = FORCE_SPLIT;
        c.n_power_first = n_first;
        simulate_run(&m.trace, &c, &r);
        ttft[n_first] = r.requests[1].ttft_ms;
        ck_assert(r.power.level_ms[1] > 0);
        simulate_result_fini(&r);
    }
    ck_assert_msg(ttft[0] == ttft[1], "%f %f", ttft[0], ttft[1]); /* the last worker, which decodes */
    ck_assert_msg(fabs(ttft[2] / ttft[0] * LEVEL_1 - 1) < 1e-4, "%f %f", ttft[2], ttft[0]);
    maker_fini(&m);
}
END_TEST

/* More power than the budget: the brake comes three samples later, for one delay. Then all clocks are down,
 * or all are up. */
START_TEST(test_simulate_a_row_above_its_budget_is_braked)
{
    struct maker m = {0};
    struct simulate_config c = row_of(1, WATTS.decode / 1.1);
    struct simulate_result r;
    add(&m, 0, 4000, 40000, 0, 0);
    c.n_power_first = 1;
    simulate_run(&m.trace, &c, &r);
    ck_assert_uint_eq(r.power.n_brakes, 1);
    ck_assert_msg(fabs(r.power.level_ms[0] - 8e3) < 1e-3 && fabs(r.power.level_ms[POWER_BRAKE] - 42e3) < 1e-3, "%f %f",
                  r.power.level_ms[0], r.power.level_ms[POWER_BRAKE]);
    ck_assert(fabs(r.power.level_ms[3] + 50e3 - r.duration_ms) < 1e-3);
    simulate_result_fini(&r);
    c.power_brake_only = true;
    simulate_run(&m.trace, &c, &r);
    ck_assert_uint_gt(r.power.n_brakes, 1); /* the power exceeds the budget again */
    ck_assert(r.power.level_ms[1] == 0 && r.power.level_ms[2] == 0 && r.power.level_ms[3] == 0);
    simulate_result_fini(&r);
    maker_fini(&m);
}
END_TEST

START_TEST(test_simulate_clocks_that_go_down_in_time_spare_the_brake)
{
    struct maker m = {0};
    struct simulate_config c = row_of(32, 32 * WATTS.prefill);
    struct simulate_result r[4];
    make_hill(&m, 12);
    simulate_run(&m.trace, &c, &r[0]); /* the highest power of the row, with all clocks up */
    ck_assert_msg(r[0].power.level_ms[0] == r[0].duration_ms, "%f", r[0].power.peak_share);
    c.power_budget_w *= r[0].power.peak_share / 1.03;
    for (int i = 1; i < 4; i++) {
        c.power_brake_only = i == 1;
        simulate_run(&m.trace, &c, &r[i]);
        printf("# %s: peak %.3f, %lu brakes, %.0f kJ, at each level %.0f %.0f %.0f %.0f %.0f s\n",
               c.power_brake_only ? "brake" : "polca", r[i].power.peak_share, (unsigned long)r[i].power.n_brakes,
               joules_of(&r[i]) * 1e-3, r[i].power.level_ms[0] * 1e-3, r[i].power.level_ms[1] * 1e-3,
               r[i].power.level_ms[2] * 1e-3, r[i].power.level_ms[3] * 1e-3, r[i].power.level_ms[4] * 1e-3);
    }
    fflush(stdout);
    ck_assert(r[1].power.n_brakes > 0 && r[1].power.peak_share > 1);
    ck_assert(r[2].power.n_brakes == 0 && r[2].power.peak_share <= 1);
    ck_assert(r[2].power.level_ms[2] > 0 && joules_of(&r[2]) < joules_of(&r[0]));
    must_be_same(&r[2], &r[3]);
    ck_assert(r[2].power.peak_share == r[3].power.peak_share && r[2].power.level_ms[1] == r[3].power.level_ms[1]);
    for (int i = 0; i < 4; i++)
        simulate_result_fini(&r[i]);
    maker_fini(&m);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("simulate");
    TCase *t = tcase_create("simulate");
    tcase_set_timeout(t, 120);
    tcase_add_test(t, test_simulate_gives_the_same_result_twice);
    tcase_add_test(t, test_simulate_keeps_the_identities_of_queues);
    tcase_add_test(t, test_simulate_a_lone_request_takes_what_the_model_says);
    tcase_add_test(t, test_simulate_tandem_has_the_goodput_of_the_best_policy);
    tcase_add_test(t, test_simulate_times_to_first_token_are_as_promised);
    tcase_add_test(t, test_simulate_shares_a_full_cluster_by_the_weights_of_tenants);
    tcase_add_test(t, test_simulate_keeps_more_deadlines_of_workflows_than_other_orders);
    tcase_add_loop_test(t, test_simulate_finds_prefixes_as_the_best_policy_does, 0, 2);
    tcase_add_test(t, test_simulate_a_budget_that_is_never_near_changes_nothing);
    tcase_add_test(t, test_simulate_decoding_is_slower_by_its_factor_and_draws_less);
    tcase_add_test(t, test_simulate_clocks_go_down_where_they_were_told_to_first);
    tcase_add_test(t, test_simulate_a_row_above_its_budget_is_braked);
    tcase_add_test(t, test_simulate_clocks_that_go_down_in_time_spare_the_brake);
    suite_add_tcase(s, t);
    return tap_main(s);
}
