/* Reports: figures computed by hand, identities that a run must keep, and JSON from which the run can be made
 * again. */
#include <jansson.h>
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "replay/report.h"
#include "tests/tap.h"

/*
 * Four requests of two tenants within 2 s, with limits of 100 ms (TTFT) and 10 ms (TPOT):
 *   0  answered: 5 tokens at 40, 50, 60, 70, 80 ms; met
 *   1  answered: 3 tokens at 200, 205, 215 ms; missed the run's TTFT limit
 *   2  refused after 3 ms, told to come back in 500 ms, came back and was answered: 2 tokens at 60, 75 ms;
 *      missed TPOT
 *   3  refused after 1 ms
 */
static const float TOKENS[3][5] = {{40, 50, 60, 70, 80}, {200, 205, 215}, {60, 75}};
static const char *const TENANTS[] = {"a", "b\"</script>"};
static const float LOAD[] = {0.25f, 1};
static const struct report_worker WORKERS[] = {{"prefill-0", "prefill", 500, 10, LOAD, 2},
                                               {"decode-0", "decode", 1000, 30, NULL, 0}};
static const struct report_point POINTS[] = {
    {1, 2, 2, 1, 1, 1}, {2, 4, 3.7, 0.92, 0.985, 0.995}, {3, 6, 3, 0.5, 0.6, 0.9}};

static const char *const REASONS[] = {"slo.ttft_ms can't be met", "</script>"};

static struct report_request REQUESTS[4];

static struct report_run hand_made(void)
{
    for (int i = 0; i < 4; i++)
        REQUESTS[i] = REPORT_REQUEST_NONE;
    struct report_request *q = REQUESTS;
    for (int i = 0; i < 3; i++) {
        q[i].token_ms = TOKENS[i];
        q[i].n_output = q[i].n_asked = (uint32_t[]){5, 3, 2}[i];
        q[i].ttft_ms = (double)TOKENS[i][0];
        q[i].e2e_ms = (double)TOKENS[i][q[i].n_output - 1];
        q[i].tpot_ms = (q[i].e2e_ms - q[i].ttft_ms) / (q[i].n_output - 1);
        q[i].predicted_ttft_ms = (double[]){50, 150, 60}[i];
        q[i].predicted_tpot_ms = 12;
        q[i].prefill = 0;
        q[i].decode = 1;
        q[i].queue_ms = 1.0 / 3;
    }
    for (int i = 0; i < 4; i++) {
        q[i].arrived_ms = (double[]){0, 400, 900, 1000}[i];
        q[i].n_prompt = 100 * ((uint32_t)i + 1);
        q[i].tenant = (uint32_t)i % 2;
        q[i].sent_late_ms = i;
    }
    q[0].tpot_slo_ms = 10.3;
    q[0].cached[0] = 64;
    q[1].cached[3] = 36;
    q[2].came_back = q[2].admitted_then = true;
    q[2].refused_after_ms = 3;
    q[2].retry_after_ms = 500;
    q[3].outcome = REPORT_REFUSED;
    q[3].refused_after_ms = 1;
    q[3].reason = 1;
    return (struct report_run){.kind = "replay",
                               .label = "by hand",
                               .trace = "none.jsonl",
                               .settings = "{\"x\":\"</script>\"}",
                               .ttft_slo_ms = 100,
                               .tpot_slo_ms = 10,
                               .rate = 1,
                               .duration_ms = 2000,
                               .arrivals_ms = 1000,
                               .warm_ms = 100,
                               .load_tick_ms = 1000,
                               .requests = REQUESTS,
                               .n_requests = 4,
                               .tenants = TENANTS,
                               .n_tenants = 2,
                               .reasons = REASONS,
                               .n_reasons = 2,
                               .workers = WORKERS,
                               .n_workers = 2,
                               .points = POINTS,
                               .n_points = 3,
                               .valid = false,
                               .why_invalid = "to see it"};
}

static void near(double value, double expected)
{
    ck_assert_double_eq_tol(value, expected, 1e-9);
}

START_TEST(test_report_statistics_are_those_of_numpy)
{
    double values[] = {7, NAN, 1, 4, INFINITY, 2, 9}; /* numpy.percentile([1, 2, 4, 7, 9], ...) */
    struct report_stats s = report_stats_of(values, 7);
    ck_assert_uint_eq(s.n, 5);
    near(s.mean, 4.6);
    near(s.std, sqrt(9.04));
    near(s.min, 1);
    near(s.p50, 4);
    near(s.p75, 7);
    near(s.p90, 8.2);
    near(s.p95, 8.6);
    near(s.p99, 8.92);
    near(s.max, 9);
    s = report_stats_of(values, 0);
    ck_assert(!s.n && isnan(s.mean) && isnan(s.p99));
    values[0] = 3;
    s = report_stats_of(values, 1);
    near(s.p99, 3);
    near(s.std, 0);
}
END_TEST

START_TEST(test_report_statistics_order_what_is_negative_and_what_is_tiny)
{
    double values[] = {1e300, -0.0, 3e-310, -1e-300, -7, 0, 1e-5, -1e300, 2};
    struct report_stats s = report_stats_of(values, 9);
    for (int i = 1; i < 9; i++)
        ck_assert_double_ge(values[i], values[i - 1]);
    ck_assert(s.min <= -1e300 && s.max >= 1e300 && !(fabs(s.p50) > 0));
}
END_TEST

START_TEST(test_report_summary_is_what_a_hand_computes)
{
    struct report_run run = hand_made();
    struct report_summary s;
    report_summarize(&run, &s);
    ck_assert_uint_eq(s.sent, 4);
    ck_assert_uint_eq(s.answered, 3);
    ck_assert_uint_eq(s.refused, 1);
    ck_assert_uint_eq(s.met, 1);
    ck_assert_uint_eq(s.came_back, 1);
    ck_assert_uint_eq(s.input_tokens, 600);
    ck_assert_uint_eq(s.output_tokens, 10);
    ck_assert_uint_eq(s.cached_tokens[3], 36);
    near(s.offered_rate, 4);
    near(s.request_throughput, 1.5);
    near(s.output_throughput, 5);
    near(s.total_token_throughput, 305);
    near(s.goodput_at_rate, 0.5);
    near(s.attainment, 0.25);
    near(s.attainment_admitted, 1.0 / 3);
    near(s.ttft.mean, 100);
    near(s.tpot.mean, (10 + 7.5 + 15) / 3);
    ck_assert_uint_eq(s.itl.n, 7); /* gaps: 10 10 10 10 5 10 15 */
    near(s.itl.mean, 10);
    near(s.itl.p50, 10);
    near(s.refused_after.mean, 2);
    near(s.retry_after.mean, 500);
    ck_assert_uint_eq(s.ttft_error.n, 2); /* the first one arrived before warm_ms */
    near(s.ttft_error.mean, (0.25 + 0) / 2);
    near(s.ttft_error_last_value.mean, (0.8 + 140.0 / 60) / 2);
    near(s.total_joules, 40);
    near(s.joules_per_token, 4);
    near(s.goodput_distserve, 2); /* 4/s on two workers */
    near(s.goodput_mlperf, 2);    /* at the second rate only 98.5 % meet TTFT */
    near(s.distserve_under, 3);
    near(s.mlperf_under, 4);
}
END_TEST

START_TEST(test_report_of_a_search_without_a_bad_rate_has_no_most)
{
    struct report_run run = hand_made();
    struct report_summary s;
    struct bytes text = {0};
    run.n_points = 2; /* the second rate is too high for mlperf only */
    report_summarize(&run, &s);
    near(s.goodput_distserve, 2);
    ck_assert(isnan(s.distserve_under));
    near(s.mlperf_under, 4);
    report_table(&run, &text);
    ck_assert_ptr_nonnull(strstr(
        text.data, "distserve at least 2.000/s per worker (the limit was not reached), mlperf 2.000/s (4.000 is"));
    bytes_clear(&text);
    run.points = &POINTS[2];
    run.n_points = 1;
    report_table(&run, &text);
    ck_assert_ptr_nonnull(strstr(text.data, "most           distserve none, mlperf none\n"));
    bytes_free(&text);
}
END_TEST

START_TEST(test_report_goodput_by_its_definitions_differs)
{
    struct report_run run = hand_made();
    struct report_summary s;
    run.tpot_slo_ms = 20; /* now the request that came back is in time */
    report_summarize(&run, &s);
    ck_assert_uint_eq(s.met, 2);
    near(s.goodput_at_rate, 1);
    near(s.goodput_effective, 0.5);
    near(s.goodput_effective_tokens, 2.5);
    REQUESTS[1].ttft_slo_ms = 200; /* a request's own limit takes precedence */
    report_summarize(&run, &s);
    ck_assert_uint_eq(s.met, 3);
    struct report_point p = report_point_of(&run);
    near(p.met_share, 0.75);
    near(p.ttft_share, 0.75);
    near(p.goodput, 1.5);
}
END_TEST

/* Prompts of 100, 200, 300 and 400 tokens; the first request met its limits, the last one was refused. */
START_TEST(test_report_counts_over_all_that_was_offered)
{
    struct report_run run = hand_made();
    struct report_summary s;
    struct report_reason reasons[2];
    report_summarize(&run, &s);
    ck_assert(s.offered.n == 4 && s.offered.tokens == 1000);
    near(s.offered.refused_share, 0.25);
    near(s.offered.refused_token_share, 0.4);
    near(s.offered.met_share, 0.25);
    near(s.offered.met_token_share, 0.1);
    near(s.offered.cached_share, 0.1); /* 100 tokens were found; the answered prompts have 600 */
    for (uint32_t i = 0; i < 4; i++) {
        const struct report_offered *q = &s.quarters[i];
        ck_assert(q->n == 1 && q->least_tokens == 100 * (i + 1) && q->most_tokens == 100 * (i + 1));
        near(q->refused_share, i == 3);
        near(q->refused_token_share, i == 3);
        near(q->met_share, i == 0);
        near(q->cached_share, (double[]){0.64, 0.18, 0, 0}[i]);
    }
    for (int i = 0; i < 4; i++) /* equal lengths are in one quarter */
        REQUESTS[i].n_prompt = 7;
    report_summarize(&run, &s);
    ck_assert(s.quarters[0].n == 4 && !s.quarters[1].n && isnan(s.quarters[3].met_share));
    report_count_reasons(&run, reasons);
    ck_assert(reasons[0].refused == 1 && !reasons[0].failed && reasons[0].tokens == 7 && !reasons[1].refused);
    REQUESTS[0].outcome = REPORT_CUT_SHORT;
    REQUESTS[0].reason = 2;
    report_count_reasons(&run, reasons);
    ck_assert(reasons[1].failed == 1 && !reasons[1].refused);
}
END_TEST

START_TEST(test_report_tells_the_plan_of_each_request_and_counts_them)
{
    struct report_run run = hand_made();
    struct report_summary s;
    struct report_file *f;
    struct td_error e = {{0}};
    struct bytes text = {0}, json = {0};
    REQUESTS[1].prefill = 1; /* a decode worker alone */
    REQUESTS[2].decode = 0;  /* a prefill worker alone */
    const enum report_plan plans[] = {REPORT_SPLIT, REPORT_AGGREGATED, REPORT_KEPT, REPORT_PLAN_UNKNOWN};
    for (int i = 0; i < 4; i++)
        ck_assert_int_eq(report_plan_of(&run, &REQUESTS[i]), plans[i]);
    report_summarize(&run, &s);
    ck_assert(s.plans[REPORT_SPLIT] == 1 && s.plans[REPORT_AGGREGATED] == 1 && s.plans[REPORT_KEPT] == 1);
    report_table(&run, &text);
    ck_assert_ptr_nonnull(strstr(text.data, "plans          1 split, 1 aggregated, 1 kept\n"));
    report_json(&run, true, &json);
    ck_assert_ptr_nonnull(strstr(json.data, "\"plans\":{\"split\":1,\"aggregated\":1,\"kept\":1}"));
    ck_assert_ptr_nonnull(strstr(json.data, "\"plan\":[1,2,3,0]"));
    ck_assert_msg(!report_parse(json.data, json.len, &f, &e), "%s", e.text);
    for (int i = 0; i < 4; i++)
        ck_assert_int_eq(report_plan_of(report_file_run(f), &report_file_run(f)->requests[i]), plans[i]);
    report_close(f);
    bytes_free(&text);
    bytes_free(&json);
}
END_TEST

START_TEST(test_report_reasons_stay_few)
{
    struct report_reasons r = {.n = 0};
    char texts[40][8];
    ck_assert_uint_eq(report_reason_of(&r, NULL), 0);
    ck_assert_uint_eq(report_reason_of(&r, ""), 0);
    for (uint32_t i = 0; i < 40; i++) {
        snprintf(texts[i], sizeof(texts[i]), "%u", i);
        ck_assert_uint_eq(report_reason_of(&r, texts[i]), i < REPORT_MAX_REASONS ? i + 1 : REPORT_MAX_REASONS + 1);
    }
    ck_assert_uint_eq(report_reason_of(&r, "3"), 4);
    ck_assert_str_eq(r.texts[r.n - 1], "other reasons");
}
END_TEST

START_TEST(test_report_check_finds_each_broken_identity)
{
    struct report_run run = hand_made();
    struct td_error e = {{0}};
    ck_assert_msg(!report_check(&run, &e), "%s", e.text);
    REQUESTS[1].n_asked = 4;
    ck_assert_int_eq(report_check(&run, &e), TD_ERR_CORRUPT);
    ck_assert_ptr_nonnull(strstr(e.text, "tokens in = out"));
    run = hand_made();
    REQUESTS[0].cached[1] = 40; /* 104 cached tokens of a prompt of 100 */
    ck_assert_int_eq(report_check(&run, &e), TD_ERR_CORRUPT);
    run = hand_made();
    REQUESTS[0].tpot_ms = 10.1;
    ck_assert_int_eq(report_check(&run, &e), TD_ERR_CORRUPT);
    ck_assert_ptr_nonnull(strstr(e.text, "latency"));
    run = hand_made();
    run.duration_ms = 960; /* the last answer ended at 975 */
    ck_assert_int_eq(report_check(&run, &e), TD_ERR_CORRUPT);
    ck_assert_ptr_nonnull(strstr(e.text, "Little"));
    run = hand_made();
    REQUESTS[1].e2e_ms = NAN;
    ck_assert_int_eq(report_check(&run, &e), TD_ERR_CORRUPT);
}
END_TEST

static void check_same(const struct report_run *a, const struct report_run *b)
{
    ck_assert_str_eq(a->kind, b->kind);
    ck_assert_str_eq(a->label, b->label);
    ck_assert_str_eq(a->why_invalid, b->why_invalid);
    ck_assert_str_eq(a->settings, b->settings);
    ck_assert(a->valid == b->valid && a->n_requests == b->n_requests && a->n_workers == b->n_workers);
    near(a->duration_ms, b->duration_ms);
    near(a->warm_ms, b->warm_ms);
    ck_assert_uint_eq(a->n_tenants, b->n_tenants);
    for (uint32_t i = 0; i < a->n_tenants; i++)
        ck_assert_str_eq(a->tenants[i], b->tenants[i]);
    for (uint32_t i = 0; i < a->n_workers; i++) {
        ck_assert_str_eq(a->workers[i].name, b->workers[i].name);
        near(a->workers[i].joules, b->workers[i].joules);
        ck_assert_uint_eq(a->workers[i].n_load, b->workers[i].n_load);
        ck_assert(!a->workers[i].n_load || !memcmp(a->workers[i].load, b->workers[i].load, sizeof(LOAD)));
    }
    ck_assert_uint_eq(a->n_reasons, b->n_reasons);
    for (uint32_t i = 0; i < a->n_reasons; i++)
        ck_assert_str_eq(a->reasons[i], b->reasons[i]);
    ck_assert_uint_eq(a->n_points, b->n_points);
    for (uint32_t i = 0; i < a->n_points; i++)
        near(a->points[i].ttft_share, b->points[i].ttft_share);
    for (uint64_t i = 0; i < a->n_requests; i++) {
        const struct report_request *p = &a->requests[i], *q = &b->requests[i];
        ck_assert(p->outcome == q->outcome && p->tenant == q->tenant && p->n_prompt == q->n_prompt);
        ck_assert(p->n_output == q->n_output && p->n_asked == q->n_asked && p->cached[3] == q->cached[3]);
        ck_assert_uint_eq(p->reason, q->reason);
        ck_assert(p->tpot_slo_ms == q->tpot_slo_ms && p->ttft_slo_ms == q->ttft_slo_ms);
        ck_assert(p->prefill == q->prefill && p->decode == q->decode && p->came_back == q->came_back);
        ck_assert(isnan(p->ttft_ms) == isnan(q->ttft_ms) && isnan(p->queue_ms) == isnan(q->queue_ms));
        ck_assert(isnan(p->queue_ms) || fabs(p->queue_ms - q->queue_ms) < 1e-9);
        ck_assert(!p->token_ms == !q->token_ms);
        ck_assert(!p->token_ms || !memcmp(p->token_ms, q->token_ms, p->n_output * sizeof(float)));
    }
}

START_TEST(test_report_json_gives_the_run_again)
{
    struct report_run run = hand_made();
    struct bytes text = {0}, again = {0};
    struct report_file *f = NULL;
    struct td_error e = {{0}};
    report_json(&run, true, &text);
    ck_assert_msg(!report_parse(text.data, text.len, &f, &e), "%s", e.text);
    check_same(&run, report_file_run(f));
    report_json(report_file_run(f), true, &again);
    ck_assert_str_eq(text.data, again.data);
    report_close(f);
    bytes_free(&text);
    bytes_free(&again);
}
END_TEST

/* Reports from before reasons existed. */
START_TEST(test_report_without_reasons_is_read)
{
    struct report_run run = hand_made();
    struct bytes text = {0};
    struct report_file *f = NULL;
    struct td_error e = {{0}};
    report_json(&run, true, &text);
    json_t *root = json_loadb(text.data, text.len, 0, NULL);
    json_object_del(root, "reasons");
    json_object_del(json_object_get(root, "requests"), "reason");
    json_object_del(json_object_get(root, "requests"), "first_gap_ms");
    json_object_del(json_object_get(root, "requests"), "predicted_first_gap_ms");
    char *changed = json_dumps(root, 0);
    ck_assert_msg(!report_parse(changed, strlen(changed), &f, &e), "%s", e.text);
    ck_assert_uint_eq(report_file_run(f)->n_reasons, 0);
    ck_assert_uint_eq(report_file_run(f)->requests[3].reason, 0);
    report_close(f);
    free(changed);
    json_decref(root);
    bytes_free(&text);
}
END_TEST

START_TEST(test_report_json_has_the_names_of_vllm)
{
    static const char *const NAMES[] = {"duration",           "completed",           "failed",
                                        "total_input_tokens", "total_output_tokens", "request_throughput",
                                        "request_goodput",    "output_throughput",   "total_token_throughput"};
    static const char *const OF[] = {"mean", "median", "std", "p99"}, *const WHAT[] = {"ttft", "tpot", "itl", "e2el"};
    struct report_run run = hand_made();
    struct bytes text = {0};
    char name[32];
    report_json(&run, false, &text);
    json_t *o = json_loadb(text.data, text.len, JSON_REJECT_DUPLICATES, NULL);
    ck_assert_ptr_nonnull(o);
    for (size_t i = 0; i < sizeof(NAMES) / sizeof(NAMES[0]); i++)
        ck_assert_msg(json_is_number(json_object_get(o, NAMES[i])), "%s", NAMES[i]);
    for (int i = 0; i < 16; i++) {
        snprintf(name, sizeof(name), "%s_%s_ms", OF[i / 4], WHAT[i % 4]);
        ck_assert_msg(json_is_number(json_object_get(o, name)), "%s", name);
    }
    near(json_number_value(json_object_get(o, "duration")), 2);
    near(json_number_value(json_object_get(o, "median_ttft_ms")), 60);
    ck_assert_ptr_null(json_object_get(o, "requests"));
    json_decref(o);
    bytes_free(&text);
}
END_TEST

/* Checks the refusal of the report with one member replaced. at: path of names with dots between them. */
static void check_refused(const char *at, json_t *value, const char *named)
{
    struct report_run run = hand_made();
    struct bytes text = {0};
    struct report_file *f = NULL;
    struct td_error e = {{0}};
    char path[64], *rest = path;
    report_json(&run, true, &text);
    json_t *root = json_loadb(text.data, text.len, 0, NULL), *o = root;
    snprintf(path, sizeof(path), "%s", at);
    for (char *dot; (dot = strchr(rest, '.')); rest = dot + 1) {
        *dot = 0;
        o = json_object_get(o, rest);
    }
    if (value)
        json_object_set_new(o, rest, value);
    else
        json_object_del(o, rest);
    char *changed = json_dumps(root, 0);
    ck_assert_int_eq(report_parse(changed, strlen(changed), &f, &e), TD_ERR_INVALID);
    ck_assert_msg(strstr(e.text, named) != NULL, "%s: %s", at, e.text);
    free(changed);
    json_decref(root);
    bytes_free(&text);
}

START_TEST(test_report_parse_names_what_is_wrong)
{
    struct report_file *f = NULL;
    struct td_error e = {{0}};
    check_refused("version", json_integer(2), "version");
    check_refused("kind", NULL, "kind");
    check_refused("duration_ms", json_real(-1), "duration_ms");
    check_refused("tenants", json_array(), "tenants");
    check_refused("workers", json_pack("[{s:s}]", "name", "x"), "workers[0].role");
    check_refused("points", json_pack("[{s:f}]", "rate", 1.0), "points[0].offered_rate");
    check_refused("requests", NULL, "requests");
    check_refused("requests.n", json_integer(5), "requests.n");
    check_refused("reasons", json_pack("[{s:i}]", "reason", 1), "reasons[0].reason");
    check_refused("requests.reason", json_integer(3), "requests.reason[0]");
    check_refused("requests.tpot_slo_ms", json_real(-1), "requests.tpot_slo_ms[0]");
    check_refused("requests.tenant", json_integer(2), "requests.tenant[0]");
    check_refused("requests.prefill", json_integer(2), "requests.prefill[0]");
    check_refused("requests.outcome", json_pack("[i,i,i,i]", 0, 0, 4, 0), "requests.outcome[2]");
    check_refused("requests.ttft_ms", json_pack("[f]", 1.0), "requests.ttft_ms");
    check_refused("requests.token_ms", json_pack("[n,n,[f],n]", 1.0), "requests.token_ms[2]");
    ck_assert_int_eq(report_parse("{\n\"a\":}", 7, &f, &e), TD_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(e.text, "line 2"));
}
END_TEST

START_TEST(test_report_table_says_what_was_measured_and_that_it_is_not_valid)
{
    struct report_run run = hand_made();
    struct bytes text = {0};
    report_table(&run, &text);
    ck_assert_ptr_nonnull(strstr(text.data, "4 requests at 4.00/s: 3 answered, 1 refused"));
    ck_assert_ptr_nonnull(strstr(text.data, "at_rate 0.50/s, effective 0.50/s"));
    ck_assert_ptr_nonnull(
        strstr(text.data, "distserve 2.000/s per worker (3.000 is too much), mlperf 2.000/s (4.000 is too much)"));
    ck_assert_ptr_nonnull(strstr(text.data, "16.7 % of the prompts' tokens: worker 10.7 %, SSD 6.0 %"));
    ck_assert_ptr_nonnull(strstr(text.data, "refused 25.0 % of the requests, 40.0 % of the prompts' tokens"));
    ck_assert_ptr_nonnull(strstr(text.data, "; to 400: 100.0 %, 0.0 %"));
    ck_assert_ptr_nonnull(strstr(text.data, "1 slo.ttft_ms can't be met\n"));
    ck_assert_ptr_nonnull(strstr(text.data, "NOT VALID: to see it"));
    bytes_clear(&text);
    run.n_requests = 1; /* none before it to predict by */
    run.warm_ms = 0;
    report_table(&run, &text);
    ck_assert_ptr_nonnull(strstr(text.data, "TTFT predicted within 25.0 % (median), 25.0 % (p90); 1 after 0 s\n"));
    ck_assert_ptr_null(strstr(text.data, "nan"));
    bytes_free(&text);
}
END_TEST

START_TEST(test_report_page_is_whole_and_holds_nothing_that_ends_its_script)
{
    struct report_run run = hand_made();
    const struct report_run *runs[] = {&run, &run};
    struct bytes text = {0};
    report_html(runs, 2, &text);
    ck_assert(!strncasecmp(text.data, "<!doctype html>", 15));
    ck_assert_ptr_null(strstr(text.data, "@RUNS@"));
    char *data = strstr(text.data, "[{\"duration\""), *end = data ? strstr(data, "</script>") : NULL;
    ck_assert_ptr_nonnull(end);
    json_t *o = json_loadb(data, (size_t)(end - data), JSON_REJECT_DUPLICATES, NULL);
    ck_assert_uint_eq(json_array_size(o), 2);
    const json_t *plots = json_object_get(json_array_get(o, 1), "plots");
    ck_assert_uint_eq(json_array_size(json_object_get(plots, "itl_quantiles_ms")), 201);
    json_decref(o);
    bytes_free(&text);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("report");
    TCase *c = tcase_create("report");
    tcase_set_timeout(c, 60);
    tcase_add_test(c, test_report_statistics_are_those_of_numpy);
    tcase_add_test(c, test_report_statistics_order_what_is_negative_and_what_is_tiny);
    tcase_add_test(c, test_report_summary_is_what_a_hand_computes);
    tcase_add_test(c, test_report_goodput_by_its_definitions_differs);
    tcase_add_test(c, test_report_of_a_search_without_a_bad_rate_has_no_most);
    tcase_add_test(c, test_report_counts_over_all_that_was_offered);
    tcase_add_test(c, test_report_tells_the_plan_of_each_request_and_counts_them);
    tcase_add_test(c, test_report_reasons_stay_few);
    tcase_add_test(c, test_report_check_finds_each_broken_identity);
    tcase_add_test(c, test_report_json_gives_the_run_again);
    tcase_add_test(c, test_report_without_reasons_is_read);
    tcase_add_test(c, test_report_json_has_the_names_of_vllm);
    tcase_add_test(c, test_report_parse_names_what_is_wrong);
    tcase_add_test(c, test_report_table_says_what_was_measured_and_that_it_is_not_valid);
    tcase_add_test(c, test_report_page_is_whole_and_holds_nothing_that_ends_its_script);
    suite_add_tcase(s, c);
    return tap_main(s);
}
