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
    /* Pages for 15 prompts and little of their answers; a router that expects short answers places more. */
    c.n_pages = 1000;
    c.policy = POLICY_LEAST_LOADED;
    c.ttft_ms = c.tpot_ms = 0;
    simulate_run(&m.trace, &c, &r);
    must_all_be_answered(&r);
    for (uint64_t i = 0; i < r.n_requests; i++) {
        preempted += r.requests[i].n_preempted;
        ck_assert_uint_eq(r.requests[i].n_output, 400);
    }
    ck_assert_uint_eq(r.requests[0].n_preempted, 0); /* the oldest sequence is never preempted */
    ck_assert_uint_gt(preempted, 0);
    simulate_result_fini(&r);
    maker_fini(&m);
}
END_TEST

/* Four prompts, then the first one again: it is found if there are pages for all, and gone if there are pages
 * for two. */
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

/* On a fast link only the last part of the last chunk is exposed (8000 - 4096 tokens, a quarter of them). On
 * a slow link all bytes that did not flow during the prefill are. */
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

/* At these ports a transfer outlasts most prefills. Predictions of the first gap are learned from earlier
 * transfers. */
START_TEST(test_simulate_first_gaps_are_predicted)
{
    struct report_stats errors[2];
    for (int slow = 0; slow < 2; slow++) {
        struct maker m = {0};
        struct simulate_config c = config_of(4, 4);
        struct simulate_result r;
        struct simulate_report report;
        struct report_summary summary;
        make_mixed(&m, 2000, 150);
        c.port_gb_s = slow ? 4 : 50;
        c.force = FORCE_SPLIT;
        c.ttft_ms = c.tpot_ms = 0;
        simulate_run(&m.trace, &c, &r);
        simulate_report_init(&report, &m.trace, &c, &r);
        report_summarize(&report.run, &summary);
        errors[slow] = summary.first_gap_error;
        printf("# first gap predicted within %.3f (median), %.3f (p90)\n", errors[slow].p50, errors[slow].p90);
        simulate_report_fini(&report);
        simulate_result_fini(&r);
        maker_fini(&m);
    }
    ck_assert_double_lt(errors[0].p50, 0.25); /* half a step is random */
    ck_assert_double_lt(errors[1].p50, 0.25);
}
END_TEST

/* ------------------------------------------------------------------- stores */

/* Sends the same prompt again, to another worker, which loads it from the store if that is faster. Returns
 * the second request's time to first token. */
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

static uint32_t tokens_before(const struct simulated *q, double at_ms)
{
    uint32_t n = 0;
    while (n < q->n_output && q->arrived_ms + (double)q->token_ms[n] < at_ms)
        n++;
    return n;
}

/* Tokens generated before a worker's death were shown; only those of the running step are lost. */
START_TEST(test_simulate_tokens_from_before_a_death_stay)
{
    struct maker m = {0};
    struct simulate_config c = config_of(1, 2);
    struct simulate_result whole, cut;
    add(&m, 0, 4000, 400, 0, 0);
    c.force = FORCE_SPLIT;
    c.keep_tokens = true;
    simulate_run(&m.trace, &c, &whole);
    c.faults = &(struct simulate_fault){whole.requests[0].decode, 1000, INFINITY};
    c.n_faults = 1;
    simulate_run(&m.trace, &c, &cut);
    uint32_t had = tokens_before(&whole.requests[0], 1000), has = tokens_before(&cut.requests[0], 1000);
    ck_assert(cut.requests[0].n_replans == 1 && had > 50);
    ck_assert_msg(has == had, "%u tokens before the death, of %u", has, had);
    double busy = whole.workers[whole.requests[0].decode].busy_ms, died = cut.workers[whole.requests[0].decode].busy_ms;
    ck_assert_msg(died > 500 && died < busy, "%f of %f ms", died, busy);
    simulate_result_fini(&whole);
    simulate_result_fini(&cut);
    maker_fini(&m);
}
END_TEST

/* The second placement of a request finds in the worker the blocks that the first one loaded from the stores.
 * A request that is cut off while it loads loads them again. */
static void fail_second(double at_ms, uint32_t worker, struct simulated *out)
{
    static char *tenants[] = {""};
    struct maker m = {0};
    struct simulate_config c = config_of(2, 2);
    struct simulate_result r;
    struct simulate_report report;
    add(&m, 0, 16384 + 100, 5, 1, 32);
    add(&m, 5000, 16384 + 100, 400, 1, 32);
    m.trace.tenants = tenants;
    m.trace.n_tenants = 1;
    c.policy = POLICY_ROUND_ROBIN;
    c.force = FORCE_SPLIT;
    c.ttft_ms = c.tpot_ms = 0;
    c.silence_ms = 5;
    c.stores = (struct simulate_stores){.n = 2, .dram_bytes = 64e9};
    c.stores.port_gb_s = c.port_gb_s = 50;
    c.faults = &(struct simulate_fault){worker, at_ms, INFINITY};
    c.n_faults = 1;
    simulate_run(&m.trace, &c, &r);
    simulate_report_init(&report, &m.trace, &c, &r);
    ck_assert_msg(report.run.valid, "%s", report.run.why_invalid);
    ck_assert_uint_eq(r.requests[1].n_replans, 1);
    *out = r.requests[1];
    simulate_report_fini(&report);
    simulate_result_fini(&r);
    maker_fini(&m);
}

START_TEST(test_simulate_counts_the_prefix_of_the_placement_that_computed_the_prompt)
{
    struct simulated q;
    fail_second(5500, 3, &q); /* the worker dies while the request decodes */
    ck_assert_uint_eq(q.dram_tokens, 16384);
    ck_assert_uint_eq(q.cached_tokens, 0);
    fail_second(5001, 3, &q); /* it dies while the prefix is loaded, which is then loaded again */
    ck_assert_uint_eq(q.dram_tokens, 16384);
    ck_assert_uint_eq(q.cached_tokens, 0);
    double alone_ms = 16384 * 131072.0 / 50e6 + 1; /* plus a millisecond for the link */
    ck_assert_msg(fabs(q.load_ms - alone_ms) < 1e-3, "loaded in %f ms, which takes %f", q.load_ms, alone_ms);
}
END_TEST

enum { GONE_REQUESTS = 100, GONE_GAP_MS = 200, DIES_MS = 4000 };

struct gone { /* numbers of requests by outcome */
    uint32_t answered, failed, refused;
    double last_failed_ms; /* of requests that arrived before the worker was known to be dead */
};

/* Runs a cluster of which a worker dies 4 s into a load of 20 s. */
static struct gone run_without(uint32_t worker, double back_ms, enum plan_force force)
{
    static char *tenants[] = {""};
    struct maker m = {0};
    struct simulate_config c = config_of(1, 1);
    struct simulate_result r;
    struct simulate_report report;
    struct gone gone = {0};
    for (uint32_t i = 0; i < GONE_REQUESTS; i++)
        add(&m, i * GONE_GAP_MS, 2000, 100, 0, 0);
    m.trace.tenants = tenants;
    m.trace.n_tenants = 1;
    c.ttft_ms = c.tpot_ms = 0;
    c.force = force;
    c.gone_ms = 3000;
    c.keep_tokens = true;
    c.power[0] = c.power[1] = (struct simulate_power){100, 700, 400};
    c.power_budget_w = 1e6; /* samples continue while requests are open */
    c.faults = &(struct simulate_fault){worker, DIES_MS, back_ms};
    c.n_faults = 1;
    simulate_run(&m.trace, &c, &r);
    simulate_report_init(&report, &m.trace, &c, &r);
    ck_assert_msg(report.run.valid, "%s", report.run.why_invalid);
    for (uint64_t i = 0; i < r.n_requests; i++) {
        const struct simulated *q = &r.requests[i];
        enum report_outcome outcome = report.requests[i].outcome;
        gone.answered += outcome == REPORT_ANSWERED;
        gone.failed += outcome == REPORT_FAILED || outcome == REPORT_CUT_SHORT;
        gone.refused += outcome == REPORT_REFUSED;
        ck_assert((outcome == REPORT_CUT_SHORT) == (q->failed && q->n_output > 0));
        if (q->failed && q->arrived_ms < DIES_MS + c.silence_ms)
            gone.last_failed_ms = fmax(gone.last_failed_ms, q->end_ms);
        if (q->failed)
            ck_assert_msg(q->end_ms <= fmax(DIES_MS + c.silence_ms + c.gone_ms, q->arrived_ms) + 1, "%f", q->end_ms);
    }
    simulate_report_fini(&report);
    simulate_result_fini(&r);
    maker_fini(&m);
    return gone;
}

START_TEST(test_simulate_ends_when_the_last_worker_of_a_role_is_gone)
{
    struct gone g = run_without(1, INFINITY, FORCE_NONE); /* no worker decodes */
    /* The numbers depend on the plans, which decide which requests had ended before. */
    ck_assert_msg(g.failed >= 75 && g.answered >= 10 && g.answered + g.failed == GONE_REQUESTS,
                  "%u answered, %u failed", g.answered, g.failed);
    ck_assert_double_eq_tol(g.last_failed_ms, DIES_MS + 1000 + 3000, 1);
    g = run_without(0, INFINITY, FORCE_SPLIT); /* no worker prefills, and decode workers must not */
    ck_assert_msg(g.failed >= 79 && g.answered >= 10 && g.answered + g.failed == GONE_REQUESTS,
                  "%u answered, %u failed", g.answered, g.failed);
    g = run_without(0, INFINITY, FORCE_NONE);
    ck_assert_uint_eq(g.answered, GONE_REQUESTS);
    g = run_without(1, DIES_MS + 3000, FORCE_NONE); /* the worker is back in time */
    ck_assert_uint_eq(g.answered, GONE_REQUESTS);
    /* Too late for requests around 4 s; later ones are answered. */
    g = run_without(1, DIES_MS + 6000, FORCE_NONE);
    ck_assert_msg(g.answered >= 60 && g.failed >= 20 && !g.refused, "%u answered, %u failed", g.answered, g.failed);
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

/* Prompts of 8 blocks: the prefill worker has pages for two, and the decode worker for many, or the other way
 * round. */
START_TEST(test_simulate_each_role_has_pages_of_its_own)
{
    for (int large_decode = 0; large_decode < 2; large_decode++) {
        struct maker m = {0};
        struct simulate_config c = config_of(1, 1);
        struct simulate_result r;
        double decoding = 0;
        for (uint32_t i = 0; i < 20; i++)
            add(&m, i, 8 * BLOCK - 100, 100, 0, 0);
        c.n_pages = large_decode ? 16 : 1600;
        c.n_decode_pages = large_decode ? 1600 : 16;
        c.force = FORCE_SPLIT;
        c.policy = POLICY_LEAST_LOADED;
        c.ttft_ms = c.tpot_ms = 0;
        simulate_run(&m.trace, &c, &r);
        must_all_be_answered(&r);
        for (uint64_t i = 0; i < r.n_requests; i++) /* all at the same time on average */
            decoding += (r.requests[i].end_ms - r.requests[i].arrived_ms - r.requests[i].ttft_ms) / r.duration_ms;
        ck_assert_msg(large_decode ? decoding > 2 : decoding <= 2, "%f", decoding);
        simulate_result_fini(&r);
        maker_fini(&m);
    }
}
END_TEST

/* A router that expects short answers puts too many sequences on one worker's pages. */
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
    ck_assert_msg(preempted[1] > 1.3 * (double)preempted[0], "%lu %lu", (unsigned long)preempted[0],
                  (unsigned long)preempted[1]);
}
END_TEST

/* ------------------------------------------------------------------- report */

/* As live: a request that was not told to come back, or was never sent, has no such times; zeros would lower
 * the means. */
START_TEST(test_simulate_report_has_no_times_of_what_was_not_said)
{
    static char *tenants[] = {""};
    struct maker m = {0};
    struct simulate_config c = config_of(1, 1);
    struct simulate_result r;
    struct simulate_report report;
    struct report_summary s;
    uint64_t told = 0, followers = 0;
    for (uint32_t i = 0; i < 60; i++)
        add(&m, i * 20, i % 3 ? 8000 : 100000, 20, 0, 0); /* long prompts never meet a limit of a second */
    for (uint32_t i = 3; i < 60; i += 3)
        m.trace.requests[i].follows = i - 2;
    m.trace.tenants = tenants;
    m.trace.n_tenants = 1;
    c.max_tokens = 0;
    simulate_run(&m.trace, &c, &r);
    simulate_report_init(&report, &m.trace, &c, &r);
    ck_assert_msg(report.run.valid, "%s", report.run.why_invalid);
    report_summarize(&report.run, &s);
    for (uint64_t i = 0; i < r.n_requests; i++) {
        bool sent = !m.trace.requests[i].follows || !r.requests[m.trace.requests[i].follows - 1].refused;
        told += r.requests[i].refused && sent && r.requests[i].retry_after_ms > 0;
        followers += r.requests[i].refused && !sent;
        ck_assert(!r.requests[i].refused == !r.requests[i].reason);
    }
    ck_assert_msg(told > 0 && told < r.n_refused && followers > 0, "%lu told, %lu followers, %lu refused",
                  (unsigned long)told, (unsigned long)followers, (unsigned long)r.n_refused);
    ck_assert_uint_eq(s.retry_after.n, told);
    ck_assert_uint_eq(s.refused_after.n, r.n_refused - followers);
    simulate_report_fini(&report);
    simulate_result_fini(&r);
    maker_fini(&m);
}
END_TEST

/* A load that keeps both workers busy to the end, in ticks of 1 ms at first: the means of the chart are those
 * of the workers. */
START_TEST(test_simulate_load_over_time_ends_with_the_run_and_stays_short)
{
    struct maker m = {0};
    struct simulate_config c = config_of(0, 2);
    struct simulate_result r;
    for (uint32_t i = 0; i < 200; i++)
        add(&m, 0, 2000, 400, 0, 0);
    c.ttft_ms = c.tpot_ms = 0;
    c.load_tick_ms = 1;
    simulate_run(&m.trace, &c, &r);
    ck_assert(r.duration_ms > 10 * SIMULATE_TICKS);
    for (uint32_t w = 0; w < 2; w++) {
        const struct simulated_worker *k = &r.workers[w];
        double sum = 0, busy = k->busy_ms / r.duration_ms;
        for (uint32_t i = 0; i < k->n_load; i++)
            sum += (double)k->load[i];
        ck_assert_uint_le(k->n_load, SIMULATE_TICKS);
        ck_assert_uint_gt(k->n_load, SIMULATE_TICKS / 2);
        ck_assert_uint_eq(k->n_load, r.workers[0].n_load);
        ck_assert_msg(fabs(sum * r.load_tick_ms / k->busy_ms - 1) < 1e-4, "%f of %f ms", sum * r.load_tick_ms,
                      k->busy_ms);
        ck_assert_msg(busy > 0.8 && fabs(sum / k->n_load - busy) < 0.01, "%f shown, %f busy", sum / k->n_load, busy);
    }
    simulate_result_fini(&r);
    maker_fini(&m);
}
END_TEST

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
            load += r.workers[w].load[i] * r.load_tick_ms;
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
    tcase_add_test(t, test_simulate_first_gaps_are_predicted);
    tcase_add_test(t, test_simulate_prefixes_come_from_stores_when_that_is_faster);
    tcase_add_test(t, test_simulate_requests_of_a_dead_worker_are_planned_anew);
    tcase_add_test(t, test_simulate_tokens_from_before_a_death_stay);
    tcase_add_test(t, test_simulate_counts_the_prefix_of_the_placement_that_computed_the_prompt);
    tcase_add_test(t, test_simulate_ends_when_the_last_worker_of_a_role_is_gone);
    tcase_add_test(t, test_simulate_decode_workers_may_be_other_machines);
    tcase_add_test(t, test_simulate_each_role_has_pages_of_its_own);
    tcase_add_test(t, test_simulate_lengths_may_be_mispredicted);
    tcase_add_test(t, test_simulate_report_has_no_times_of_what_was_not_said);
    tcase_add_test(t, test_simulate_load_over_time_ends_with_the_run_and_stays_short);
    tcase_add_test(t, test_simulate_report_checks_identities_and_names_a_broken_one);
    suite_add_tcase(s, t);
    return tap_main(s);
}
