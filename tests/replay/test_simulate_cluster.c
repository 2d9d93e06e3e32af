/* The cluster in virtual time: pages, wires, stores, deaths; and its report. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "replay/simulate_report.h"
#include "tests/replay/simulate_made.h"

static void must_all_be_answered(const struct simulate_result *r)
{
    ck_assert_uint_eq(r->n_refused, 0);
    for (uint64_t i = 0; i < r->n_requests; i++)
        ck_assert_msg(r->requests[i].end_ms >= r->requests[i].arrived_ms + r->requests[i].ttft_ms &&
                          r->requests[i].ttft_ms > 0,
                      "request %lu", (unsigned long)i);
}

/* ------------------------------------------------------------------- pages */

START_TEST(test_simulate_sequences_that_grow_out_of_the_pages_wait_and_all_end)
{
    struct maker m = {0};
    struct simulate_config c = config_of(1, 1);
    struct simulate_result r;
    uint64_t preempted = 0;
    for (uint32_t i = 0; i < 40; i++)
        add(&m, i, 1000, 400, 0, 0);
    c.page_tokens = 16;
    c.n_pages = 1000; /* 15 prompts and what they get to; who expects short answers takes more */
    c.policy = POLICY_LEAST_LOADED;
    c.ttft_ms = c.tpot_ms = 0;
    simulate_run(&m.trace, &c, &r);
    must_all_be_answered(&r);
    for (uint64_t i = 0; i < r.n_requests; i++) {
        preempted += r.requests[i].n_preempted;
        ck_assert_uint_eq(r.requests[i].n_output, 400);
    }
    ck_assert_uint_eq(r.requests[0].n_preempted, 0); /* the oldest always gets on */
    ck_assert_uint_gt(preempted, 0);
    simulate_result_fini(&r);
    maker_fini(&m);
}
END_TEST

/* Four prompts, then the first again: with pages for all it is found, with pages for two it is gone. */
START_TEST(test_simulate_what_is_cached_goes_when_pages_are_needed)
{
    for (int large = 0; large < 2; large++) {
        struct maker m = {0};
        struct simulate_config c = config_of(1, 1);
        struct simulate_result r;
        for (uint32_t i = 0; i < 5; i++)
            add(&m, i * 3000, 8192 + 10, 2, i % 4, 16);
        c.n_pages = large ? 80 : 34;
        c.force = FORCE_SPLIT;
        c.ttft_ms = c.tpot_ms = 0;
        simulate_run(&m.trace, &c, &r);
        ck_assert_uint_eq(r.requests[3].cached_tokens, 0);
        ck_assert_uint_eq(r.requests[4].cached_tokens, large ? 8192 : 0);
        simulate_result_fini(&r);
        maker_fini(&m);
    }
}
END_TEST

/* ------------------------------------------------------------------- wires */

static double exposed(double gb_s, uint32_t n_at_once)
{
    struct maker m = {0};
    struct simulate_config c = config_of(n_at_once, 1);
    struct simulate_result r;
    for (uint32_t i = 0; i < n_at_once; i++)
        add(&m, 0, 8000, 20, 0, 0);
    c.port_gb_s = gb_s;
    c.link_ms = 0;
    c.force = FORCE_SPLIT;
    c.policy = POLICY_ROUND_ROBIN;
    c.ttft_ms = c.tpot_ms = 0;
    simulate_run(&m.trace, &c, &r);
    double most = 0;
    for (uint64_t i = 0; i < r.n_requests; i++)
        most = fmax(most, r.requests[i].transfer_ms);
    ck_assert_msg(fabs(r.bytes_moved / (n_at_once * 8000.0 * 131072) - 1) < 1e-9, "%f", r.bytes_moved);
    simulate_result_fini(&r);
    maker_fini(&m);
    return most;
}

/* Fast: only the last part of the last chunk (8000 - 4096 tokens, a quarter). Slow: all but what went during the prefill. */
START_TEST(test_simulate_a_hand_over_overlaps_the_prefill)
{
    double last = 976 * 131072 / 50e6, fast = exposed(50, 1);
    ck_assert_msg(fabs(fast - last) < 1e-3, "%f, expected %f", fast, last);
    double slow = exposed(1, 1), all = 8000 * 131072 / 1e6;
    ck_assert_msg(slow > 0.75 * all && slow < all, "%f of %f", slow, all);
    ck_assert_double_eq(exposed(0, 1), 0);
}
END_TEST

START_TEST(test_simulate_flows_share_a_port)
{
    double alone = exposed(2, 1), four = exposed(2, 4), all = 8000 * 131072 / 2e6;
    ck_assert_msg(fabs(four - alone - 3 * all) < 0.02 * all, "%f and %f, each %f", alone, four, all);
}
END_TEST

/* ------------------------------------------------------------------- stores */

/* The same prompt again, on another worker: from the store when that is faster. Returns the second's time to first token. */
static double second_ttft(double gb_s, double dram, double ssd, struct simulated *second_out)
{
    struct maker m = {0};
    struct simulate_config c = config_of(2, 1);
    struct simulate_result r;
    add(&m, 0, 16384 + 100, 5, 1, 32);
    add(&m, 5000, 16384 + 100, 5, 1, 32);
    c.policy = POLICY_ROUND_ROBIN;
    c.force = FORCE_SPLIT;
    c.ttft_ms = c.tpot_ms = 0;
    c.stores = (struct simulate_stores){.n = 2, .dram_bytes = dram, .ssd_bytes = ssd, .port_gb_s = gb_s, .ssd_gb_s = 3};
    c.port_gb_s = gb_s;
    simulate_run(&m.trace, &c, &r);
    ck_assert_uint_ne(r.requests[0].prefill, r.requests[1].prefill);
    *second_out = r.requests[1];
    double ttft = r.requests[1].ttft_ms;
    simulate_result_fini(&r);
    maker_fini(&m);
    return ttft;
}

START_TEST(test_simulate_prefixes_come_from_stores_when_that_is_faster)
{
    struct simulated q;
    double computed = second_ttft(50, 0, 0, &q);
    ck_assert_uint_eq(q.dram_tokens + q.ssd_tokens, 0);
    double loaded = second_ttft(50, 64e9, 0, &q);
    ck_assert_uint_eq(q.dram_tokens, 16384);
    ck_assert_msg(q.load_ms >= 16384 / 2 * 131072 / 50e6 && loaded < computed / 4, "%f, computed %f", loaded, computed);
    loaded = second_ttft(50, 0, 64e9, &q);
    ck_assert_uint_eq(q.ssd_tokens, 16384);
    ck_assert_msg(q.load_ms >= 16384 / 2 * 131072 / 3e6, "%f", q.load_ms);
}
END_TEST

/* ------------------------------------------------------------------- deaths */

START_TEST(test_simulate_requests_of_a_dead_worker_are_planned_anew)
{
    struct maker m = {0};
    struct simulate_config c = config_of(2, 2);
    struct simulate_result r;
    uint64_t replans = 0, back = 0;
    make_mixed(&m, 400, 120);
    c.ttft_ms = c.tpot_ms = 0;
    c.faults = (struct simulate_fault[]){{2, 8000, 20000}, {0, 12000, INFINITY}};
    c.n_faults = 2;
    simulate_run(&m.trace, &c, &r);
    must_all_be_answered(&r);
    for (uint64_t i = 0; i < r.n_requests; i++) {
        const struct simulated *q = &r.requests[i];
        replans += q->n_replans;
        back += q->decode == 2 && q->arrived_ms > 20000;
        ck_assert_uint_eq(q->n_output, m.trace.requests[i].n_output);
        if (q->arrived_ms > 13000 + 1)
            ck_assert_uint_ne(q->prefill, 0);
        if (q->arrived_ms > 9000 && q->arrived_ms < 18000 && !q->n_replans)
            ck_assert_uint_ne(q->decode, 2);
    }
    printf("# %lu planned anew, %lu on the one that came back\n", (unsigned long)replans, (unsigned long)back);
    ck_assert_uint_gt(replans, 2);
    ck_assert_uint_gt(back, 5);
    simulate_result_fini(&r);
    maker_fini(&m);
}
END_TEST

/* ------------------------------------------------------------ what one learns */

START_TEST(test_simulate_decode_workers_may_be_other_machines)
{
    struct maker m = {0};
    struct simulate_config c = config_of(1, 1);
    struct cost_profile slow = c.cost;
    double tpot[2];
    add(&m, 0, 4000, 101, 0, 0);
    for (int i = 0; i < 3; i++)
        slow.decode[i] *= 2;
    c.force = FORCE_SPLIT;
    c.link_ms = c.port_gb_s = 0;
    c.tpot_ms = 0;
    for (int i = 0; i < 2; i++) {
        struct simulate_result r;
        c.decode_cost = i ? &slow : NULL;
        simulate_run(&m.trace, &c, &r);
        tpot[i] = r.requests[0].tpot_ms;
        simulate_result_fini(&r);
    }
    ck_assert_msg(fabs(tpot[1] / tpot[0] - 2) < 1e-3, "%f %f", tpot[0], tpot[1]);
    maker_fini(&m);
}
END_TEST

/* Who believes that answers are short puts too many on one worker's pages. */
START_TEST(test_simulate_lengths_may_be_mispredicted)
{
    uint64_t preempted[2] = {0};
    for (int wrong = 0; wrong < 2; wrong++) {
        struct maker m = {0};
        struct simulate_config c = config_of(2, 2);
        struct simulate_result r;
        for (uint32_t i = 0; i < 800; i++)
            add(&m, i * 12.0, 500, 900, 0, 0);
        c.page_tokens = 16;
        c.n_pages = 3000;
        c.ttft_ms = c.tpot_ms = 0;
        c.length_error = wrong ? 0.05 : 1;
        simulate_run(&m.trace, &c, &r);
        must_all_be_answered(&r);
        for (uint64_t i = 0; i < r.n_requests; i++)
            preempted[wrong] += r.requests[i].n_preempted;
        simulate_result_fini(&r);
        maker_fini(&m);
    }
    printf("# preempted %lu, and %lu when lengths are mispredicted\n", (unsigned long)preempted[0],
           (unsigned long)preempted[1]);
    ck_assert_msg(preempted[1] > 1.5 * (double)preempted[0], "%lu %lu", (unsigned long)preempted[0],
                  (unsigned long)preempted[1]);
}
END_TEST

/* ------------------------------------------------------------------- report */

START_TEST(test_simulate_report_checks_identities_and_names_a_broken_one)
{
    static char *tenants[] = {""};
    struct maker m = {0};
    struct simulate_config c = config_of(2, 2);
    struct simulate_result r;
    struct simulate_report report;
    struct report_summary s;
    make_mixed(&m, 400, 40);
    m.trace.tenants = tenants;
    m.trace.n_tenants = 1;
    c.keep_tokens = true;
    c.retry_share = 0.5;
    c.load_tick_ms = 500;
    c.power[0] = c.power[1] = (struct simulate_power){100, 700, 400};
    c.faults = (struct simulate_fault[]){{3, 5000, INFINITY}};
    c.n_faults = 1;
    simulate_run(&m.trace, &c, &r);
    simulate_report_init(&report, &m.trace, &c, &r);
    ck_assert_msg(report.run.valid, "%s", report.run.why_invalid);
    report_summarize(&report.run, &s);
    ck_assert_uint_eq(s.answered + s.refused, 400);
    ck_assert_uint_eq(s.answered, 400 - r.n_refused);
    ck_assert_uint_eq(s.itl.n, s.output_tokens - s.answered);
    double load = 0, busy = 0, least = 0.1 * 4 * r.duration_ms;
    for (uint32_t w = 0; w < r.n_workers; w++) {
        busy += r.workers[w].busy_ms;
        for (uint32_t i = 0; i < r.workers[w].n_load; i++)
            load += r.workers[w].load[i] * c.load_tick_ms;
    }
    ck_assert_msg(fabs(load / busy - 1) < 1e-3, "%f %f", load, busy);
    ck_assert_msg(s.total_joules > least && s.total_joules < 0.7 * 4 * r.duration_ms, "%f", s.total_joules);
    simulate_report_fini(&report);
    uint64_t broken = 0;
    while (r.requests[broken].refused || r.requests[broken].n_output < 2)
        broken++;
    r.requests[broken].n_output--;
    simulate_report_init(&report, &m.trace, &c, &r);
    ck_assert(!report.run.valid && report.run.why_invalid);
    simulate_report_fini(&report);
    simulate_result_fini(&r);
    maker_fini(&m);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("simulate_cluster");
    TCase *t = tcase_create("simulate_cluster");
    tcase_set_timeout(t, 60);
    tcase_add_test(t, test_simulate_sequences_that_grow_out_of_the_pages_wait_and_all_end);
    tcase_add_test(t, test_simulate_what_is_cached_goes_when_pages_are_needed);
    tcase_add_test(t, test_simulate_a_hand_over_overlaps_the_prefill);
    tcase_add_test(t, test_simulate_flows_share_a_port);
    tcase_add_test(t, test_simulate_prefixes_come_from_stores_when_that_is_faster);
    tcase_add_test(t, test_simulate_requests_of_a_dead_worker_are_planned_anew);
    tcase_add_test(t, test_simulate_decode_workers_may_be_other_machines);
    tcase_add_test(t, test_simulate_lengths_may_be_mispredicted);
    tcase_add_test(t, test_simulate_report_checks_identities_and_names_a_broken_one);
    suite_add_tcase(s, t);
    return tap_main(s);
}
