/* Comparisons of runs: figures as in the reports, and intervals that distinguish a change from noise. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/random.h"
#include "replay/compare.h"
#include "tests/tap.h"

enum { N = 400 };

/* Makes latencies that depend on each other like those of a queue: each keeps 0.9 of the previous deviation
 * from the mean. */
static void make(struct report_request *q, uint64_t seed, double scale)
{
    double x = 0;
    for (uint32_t i = 0; i < N; i++) {
        double noise = 0;
        for (uint64_t k = 0; k < 12; k++)
            noise += random_unit(random_at(seed, i, k)) / 12 * 3.4641 - 0.1443375;
        x = 0.9 * x + noise * sqrt(1 - 0.81) * 2;
        q[i] = (struct report_request){.n_prompt = 100 + i % 7,
                                       .n_output = 11,
                                       .n_asked = 11,
                                       .cached = {i % 50},
                                       .arrived_ms = 10.0 * i,
                                       .ttft_ms = scale * (100 + 15 * x),
                                       .tpot_ms = scale * 10};
        q[i].e2e_ms = q[i].ttft_ms + 10 * q[i].tpot_ms;
    }
}

static struct report_run run_of(const struct report_request *q)
{
    static const char *const TENANTS[] = {""};
    return (struct report_run){.kind = "replay",
                               .label = "a",
                               .trace = "made",
                               .ttft_slo_ms = 110,
                               .duration_ms = 10.0 * N,
                               .requests = q,
                               .n_requests = N,
                               .tenants = TENANTS,
                               .n_tenants = 1};
}

static const struct compare_row *row(const struct compare_result *c, const char *name)
{
    for (int i = 0; i < COMPARE_ROWS; i++)
        if (!strcmp(c->rows[i].name, name))
            return &c->rows[i];
    ck_abort_msg("no row %s", name);
    return NULL;
}

START_TEST(test_compare_shows_the_figures_of_both_reports)
{
    static struct report_request x[N], y[N];
    make(x, 1, 1);
    make(y, 2, 1.5);
    y[3].outcome = REPORT_REFUSED;
    struct report_run a = run_of(x), b = run_of(y);
    const struct report_run *pa = &a, *pb = &b;
    struct compare_result c;
    struct report_summary s;
    compare_runs(&pa, 1, &pb, 1, 1, &c);
    report_summarize(&b, &s);
    ck_assert_double_eq_tol(row(&c, "TTFT mean")->b, s.ttft.mean, 1e-9);
    ck_assert_double_eq_tol(row(&c, "TTFT p50")->b, s.ttft.p50, 1e-9);
    ck_assert_double_eq_tol(row(&c, "TTFT p99")->b, s.ttft.p99, 1e-9);
    ck_assert_double_eq_tol(row(&c, "latency p99")->b, s.e2e.p99, 1e-9);
    ck_assert_double_eq_tol(row(&c, "met limits")->b, s.attainment, 1e-9);
    ck_assert_double_eq_tol(row(&c, "refused")->b, 1.0 / N, 1e-9);
    ck_assert_double_eq_tol(row(&c, "TPOT mean")->change, 0.5, 1e-9);
    /* The change of a share is a difference. */
    ck_assert_double_eq_tol(row(&c, "refused")->change, 1.0 / N, 1e-9);
}
END_TEST

START_TEST(test_compare_of_a_run_with_itself_is_noise)
{
    static struct report_request x[N];
    make(x, 1, 1);
    struct report_run a = run_of(x);
    const struct report_run *p = &a;
    struct compare_result c;
    compare_runs(&p, 1, &p, 1, 1, &c);
    ck_assert(c.paired);
    for (int i = 0; i < COMPARE_ROWS; i++) {
        ck_assert_int_eq(c.rows[i].verdict, COMPARE_NOISE);
        ck_assert(!(fabs(c.rows[i].change) > 0) && !(fabs(c.rows[i].low) > 0) && !(fabs(c.rows[i].high) > 0));
    }
}
END_TEST

START_TEST(test_compare_finds_what_got_worse_and_what_got_better)
{
    static struct report_request x[N], y[N];
    make(x, 1, 1);
    make(y, 2, 1.2);
    struct report_run a = run_of(x), b = run_of(y);
    const struct report_run *pa = &a, *pb = &b;
    struct compare_result c;
    compare_runs(&pa, 1, &pb, 1, 1, &c);
    ck_assert_int_eq(row(&c, "TTFT mean")->verdict, COMPARE_WORSE);
    ck_assert_int_eq(row(&c, "met limits")->verdict, COMPARE_WORSE);
    ck_assert(row(&c, "TTFT mean")->low > 0.1 && row(&c, "TTFT mean")->high < 0.35);
    ck_assert_double_lt(row(&c, "TTFT mean")->p, 0.01);
    compare_runs(&pb, 1, &pa, 1, 1, &c);
    ck_assert_int_eq(row(&c, "TTFT mean")->verdict, COMPARE_BETTER);
    ck_assert_int_eq(row(&c, "TTFT p50")->verdict, COMPARE_BETTER);
}
END_TEST

/* Each pair comes from one source. About 5 % of 95 % intervals miss; with stretches that are too short far
 * more would miss. */
START_TEST(test_compare_takes_little_noise_for_a_change)
{
    enum { PAIRS = 60 };
    static struct report_request x[N], y[N];
    int missed = 0;
    for (uint64_t i = 0; i < PAIRS; i++) {
        make(x, 100 + 2 * i, 1);
        make(y, 101 + 2 * i, 1);
        y[0].n_prompt = 1; /* now the requests differ */
        struct report_run a = run_of(x), b = run_of(y);
        const struct report_run *pa = &a, *pb = &b;
        struct compare_result c;
        compare_runs(&pa, 1, &pb, 1, 1, &c);
        ck_assert(!c.paired);
        missed += row(&c, "TTFT mean")->verdict != COMPARE_NOISE;
    }
    printf("# %d of %d pairs from one source were told apart\n", missed, PAIRS);
    ck_assert_int_le(missed, PAIRS / 8);
}
END_TEST

START_TEST(test_compare_of_several_runs_sees_what_differs_from_run_to_run)
{
    static struct report_request x[6][N];
    struct report_run runs[6];
    const struct report_run *p[6];
    struct compare_result one, several;
    for (int i = 0; i < 6; i++) { /* each run has a different speed */
        make(x[i], 10, (double[]){0.8, 1, 1.2, 0.85, 1.05, 1.25}[i]);
        runs[i] = run_of(x[i]);
        p[i] = &runs[i];
    }
    compare_runs(p, 1, p + 3, 1, 1, &one);
    compare_runs(p, 3, p + 3, 3, 1, &several);
    ck_assert_int_eq(row(&one, "TTFT mean")->verdict, COMPARE_WORSE);
    ck_assert_uint_eq(several.n_runs, 3);
    /* Not paired: runs of 0.8 and 1 against runs of 0.85, 1.05 and 1.25. */
    compare_runs(p, 2, p + 3, 3, 1, &several);
    ck_assert(!several.paired);
    ck_assert_int_eq(row(&several, "TTFT mean")->verdict, COMPARE_NOISE);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("compare");
    TCase *c = tcase_create("compare");
    tcase_set_timeout(c, 120);
    tcase_add_test(c, test_compare_shows_the_figures_of_both_reports);
    tcase_add_test(c, test_compare_of_a_run_with_itself_is_noise);
    tcase_add_test(c, test_compare_finds_what_got_worse_and_what_got_better);
    tcase_add_test(c, test_compare_takes_little_noise_for_a_change);
    tcase_add_test(c, test_compare_of_several_runs_sees_what_differs_from_run_to_run);
    suite_add_tcase(s, c);
    return tap_main(s);
}
