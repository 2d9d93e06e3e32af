/* Compares several routers that share only the workers with one router under the same load. */
#include <stdio.h>

#include "tests/replay/simulate_made.h"

struct outcome {
    /* goodput: good answers per second. within: share of the admitted requests that met their limits.
     * error: median of |predicted - actual| / actual TTFT. */
    double goodput, within, error;
};

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static bool is_good(const struct simulate_config *c, const struct simulated *q)
{
    return !q->refused && !q->failed && !(c->ttft_ms > 0 && q->ttft_ms > c->ttft_ms) &&
           !(c->tpot_ms > 0 && q->tpot_ms > c->tpot_ms);
}

static struct outcome outcome_of(const struct simulate_config *c, const struct simulate_result *r)
{
    struct outcome o = {0};
    double *errors = mem_array(r->n_requests, sizeof(*errors)), first = INFINITY, last = 0;
    uint64_t n_good = 0, n_admitted = 0;
    for (uint64_t i = 0; i < r->n_requests; i++) {
        const struct simulated *q = &r->requests[i];
        first = fmin(first, q->arrived_ms);
        last = fmax(last, q->arrived_ms);
        if (q->refused || q->failed)
            continue;
        n_good += is_good(c, q);
        errors[n_admitted++] = fabs(q->predicted_ttft_ms - q->ttft_ms) / q->ttft_ms;
    }
    qsort(errors, n_admitted, sizeof(*errors), by_value);
    o.goodput = (double)n_good / (last - first) * 1e3;
    o.within = n_admitted ? (double)n_good / (double)n_admitted : 0;
    o.error = n_admitted ? errors[n_admitted / 2] : 0;
    free(errors);
    return o;
}

struct bed {
    const char *name;
    uint32_t n_prefill, n_decode, n_requests;
    double gap_ms, ttft_ms, tpot_ms, rpc_ms;
    double least; /* least goodput of four routers, as a share of one router's; 0: 0.93 */
};

static const struct bed BEDS[] = {
    /* The first three are run always, all of them with TANDEM_LONG=routers. */
    {"4 + 4, idle", 4, 4, 1500, 200, 1000, 30, 0.5},
    {"4 + 4, full", 4, 4, 4000, 25, 1000, 30, 0.5},
    {"2 + 2, tight", 2, 2, 2500, 25, 500, 20, 0.5},
    {"4 + 4, half of the load", 4, 4, 2500, 50, 1000, 30, 0.5},
    {"4 + 4, four times the load", 4, 4, 10000, 6, 1000, 30, 0.5},
    /* Queues of 5 s at each router. Whether a request finds its prefix on the worker that has room next is
     * left to chance; with four routers a quarter fewer do. */
    {"4 + 4, limits of 5 s", 4, 4, 6000, 12, 5000, 30, 0.5, 0.88},
    {"8 + 8, slow messages", 8, 8, 8000, 8, 1000, 30, 2},
    {"8 alike", 0, 8, 6000, 12, 1000, 30, 0.5},
};

static struct outcome run_bed(const struct bed *b, uint32_t n_routers)
{
    struct maker m = {{0}};
    struct simulate_result r;
    struct simulate_config c = config_of(b->n_prefill, b->n_decode);
    make_mixed(&m, b->n_requests, b->gap_ms);
    c.n_routers = n_routers;
    c.ttft_ms = b->ttft_ms;
    c.tpot_ms = b->tpot_ms;
    c.rpc_ms = b->rpc_ms;
    c.noise = 0.05;
    simulate_run(&m.trace, &c, &r);
    struct outcome o = outcome_of(&c, &r);
    printf("# %s, %u routers: %.2f/s, within %.4f, TTFT error %.3f\n", b->name, n_routers, o.goodput, o.within,
           o.error);
    simulate_result_fini(&r);
    maker_fini(&m);
    return o;
}

START_TEST(test_simulate_routers_that_share_only_the_workers)
{
    const struct bed *b = &BEDS[_i];
    struct outcome one = run_bed(b, 1), two = run_bed(b, 2), four = run_bed(b, 4);
    ck_assert_msg(two.goodput >= 0.93 * one.goodput, "%s, 2 routers: %.2f/s of %.2f", b->name, two.goodput,
                  one.goodput);
    ck_assert_msg(four.goodput >= (b->least > 0 ? b->least : 0.93) * one.goodput, "%s, 4 routers: %.2f/s of %.2f",
                  b->name, four.goodput, one.goodput);
    ck_assert_msg(two.within >= 0.95 && four.within >= 0.95, "%s: %.4f and %.4f of the admitted", b->name, two.within,
                  four.within);
    ck_assert_msg(two.error <= 0.15 && four.error <= 0.15, "%s: errors of %.3f and %.3f", b->name, two.error,
                  four.error);
}
END_TEST

/* Good answers per second of the requests that arrived from `from_s` to `to_s`. */
static double goodput_between(const struct simulate_config *c, const struct simulate_result *r, double from_s,
                              double to_s)
{
    uint64_t n = 0;
    for (uint64_t i = 0; i < r->n_requests; i++)
        n += r->requests[i].arrived_ms >= from_s * 1e3 && r->requests[i].arrived_ms < to_s * 1e3 &&
             is_good(c, &r->requests[i]);
    return (double)n / (to_s - from_s);
}

START_TEST(test_simulate_goes_on_without_a_router_that_dies)
{
    static const struct simulate_router_fault DIES = {1, 40000};
    struct maker m = {{0}};
    struct simulate_result r, whole;
    struct simulate_config c = config_of(4, 4);
    uint64_t n_failed = 0, n_there = 0;
    make_mixed(&m, 10000, 10);
    c.n_routers = 2;
    c.rpc_ms = 0.5;
    c.noise = 0.05;
    simulate_run(&m.trace, &c, &whole);
    c.router_faults = &DIES;
    c.n_router_faults = 1;
    simulate_run(&m.trace, &c, &r);
    for (uint64_t i = 0; i < r.n_requests; i++) {
        const struct simulated *q = &r.requests[i];
        n_failed += q->failed;
        ck_assert(!q->failed || (q->router == 1 && q->arrived_ms < 40000 && q->end_ms == 40000));
        n_there += q->router == 1 && q->arrived_ms >= 40000;
    }
    double after = goodput_between(&c, &r, 42, 62), before = goodput_between(&c, &whole, 42, 62);
    printf("# a router of 2 dies: %lu fail; from 2 s on %.1f/s, with both %.1f/s\n", (unsigned long)n_failed, after,
           before);
    ck_assert_msg(n_failed > 20 && !n_there, "%lu failed", (unsigned long)n_failed);
    ck_assert_msg(after >= 0.98 * before, "%.1f/s, %.1f/s with both", after, before);
    simulate_result_fini(&r);
    simulate_result_fini(&whole);
    maker_fini(&m);
}
END_TEST

int main(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0); /* so that output appears before a check fails */
    Suite *s = suite_create("simulate_routers");
    TCase *t = tcase_create("simulate_routers");
    tcase_set_timeout(t, 300);
    tcase_add_loop_test(t, test_simulate_routers_that_share_only_the_workers, 0,
                        tap_is_long("routers") ? (int)(sizeof(BEDS) / sizeof(BEDS[0])) : 3);
    tcase_add_test(t, test_simulate_goes_on_without_a_router_that_dies);
    suite_add_tcase(s, t);
    return tap_main(s);
}
