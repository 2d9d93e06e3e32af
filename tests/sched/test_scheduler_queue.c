/* The scheduler's queue: its bounds, tenants that share it, requests that wait too long, and decisions in
 * long queues. */
#include "tests/sched/scheduler_cluster.h"

START_TEST(test_scheduler_refuses_what_its_queue_has_no_room_for)
{
    struct scheduler_config config = config_of(mem_zalloc(sizeof(struct cluster)));
    config.max_queued = 3;
    config.max_queued_tokens = 2000;
    struct cluster *c = cluster_with(&config, 0, 0);
    struct sched_request large = request(c, 50000), qs[5];
    ck_assert(submit(c, &large)); /* an empty queue takes a request of any size */
    scheduler_end(c->s, &large, c->now, false);
    for (int i = 0; i < 5; i++) {
        qs[i] = request(c, i == 2 ? 1900 : 100);
        qs[i].resumed = i == 4;
        /* The third has too many tokens; then there is room again. */
        ck_assert_int_eq(submit(c, &qs[i]), i != 2);
        if (i == 2)
            ck_assert_ptr_nonnull(strstr(qs[i].plan.reason, "queue is full"));
    }
    struct sched_request more = request(c, 1);
    ck_assert(!submit(c, &more)); /* four are queued, one of them resumed */
    ck_assert_int_eq(more.state, SCHED_OVER);
    ck_assert_uint_eq(scheduler_queued(c->s), 4);
    for (int i = 0; i < 5; i++)
        if (i != 2)
            scheduler_end(c->s, &qs[i], c->now, false);
    assert_idle(c, 0);
    cluster_close(c);
}
END_TEST

/* Another router keeps the only other worker full: a request goes back to the worker that failed it instead
 * of waiting for ever. */
START_TEST(test_scheduler_avoids_a_worker_for_a_while_only)
{
    struct cluster *c = cluster_open(2, 1);
    struct sched_request q = request(c, 4 * CHUNK);
    struct sched_report full = {.n_prompts = 5, .square = 1e7, .n_routers = 1};
    ck_assert(submit(c, &q));
    run(c);
    ck_assert_uint_eq(c->n_placed, 1);
    uint32_t failed = q.plan.prefill, other = 1 - failed;
    scheduler_avoid(&q, failed);
    scheduler_requeue(c->s, &q, c->now);
    for (int ms = 0; ms < 1000 && c->n_placed == 1; ms += 50) {
        full.tokens = 10 * CHUNK + ms;
        scheduler_observe_report(c->s, other, &full, c->now);
        run(c);
        pass_ms(c, 50);
    }
    ck_assert_uint_eq(c->n_placed, 1); /* the worker is avoided */
    for (int ms = 0; ms < 2000 && c->n_placed == 1; ms += 50) {
        full.tokens = 10 * CHUNK + ms;
        scheduler_observe_report(c->s, other, &full, c->now);
        run(c);
        pass_ms(c, 50);
    }
    ck_assert_uint_eq(c->n_placed, 2);
    ck_assert_uint_eq(q.plan.prefill, failed);
    scheduler_end(c->s, &q, c->now, true);
    cluster_close(c);
}
END_TEST

/* Only time passes: then the worker that failed the request is allowed again. */
START_TEST(test_scheduler_looks_again_when_a_worker_is_not_avoided_any_more)
{
    struct cluster *c = cluster_open(2, 1);
    struct sched_request q = request(c, 4 * CHUNK);
    ck_assert(submit(c, &q));
    run(c);
    uint32_t failed = q.plan.prefill;
    const struct sched_report full = {.n_prompts = 50, .tokens = 1e5, .square = 1e10, .n_routers = 1};
    scheduler_avoid(&q, failed);
    scheduler_requeue(c->s, &q, c->now);
    scheduler_observe_report(c->s, 1 - failed, &full, c->now);
    for (int ms = 0; ms < 3000 && c->n_placed == 1; ms += 100) {
        run(c);
        pass_ms(c, 100);
    }
    ck_assert_uint_eq(c->n_placed, 2);
    ck_assert_uint_eq(q.plan.prefill, failed);
    scheduler_end(c->s, &q, c->now, true);
    cluster_close(c);
}
END_TEST

/* If all plans are split, requests wait until a pair can connect; they are not refused. */
START_TEST(test_scheduler_keeps_requests_while_no_pair_can_connect)
{
    struct cluster *c = cluster_open(1, 1);
    struct sched_request first = request(c, CHUNK), later = request(c, CHUNK);
    ck_assert(submit(c, &first));
    scheduler_worker_reads(c->s, 1, 0, false);
    ck_assert(scheduler_is_cut(c->s));
    ck_assert(submit(c, &later));
    for (int i = 0; i < 20; i++) {
        run(c);
        pass_ms(c, 100);
    }
    ck_assert_uint_eq(c->n_placed + c->n_refused, 0);
    scheduler_worker_reads(c->s, 1, 0, true);
    ck_assert(!scheduler_is_cut(c->s));
    run(c);
    ck_assert_uint_eq(c->n_placed, 2);
    scheduler_end(c->s, &first, c->now, true);
    scheduler_end(c->s, &later, c->now, true);
    cluster_close(c);
}
END_TEST

START_TEST(test_scheduler_shares_workers_between_tenants_by_weight)
{
    const struct fair_weight weights[] = {{1, 1}, {2, 3}};
    struct scheduler_config config = config_of(mem_zalloc(sizeof(struct cluster)));
    config.weights = weights;
    config.n_weights = 2;
    struct cluster *c = cluster_with(&config, 1, 1);
    struct sched_request *qs = mem_array(MANY, sizeof(*qs));
    uint32_t n = 0, served[3] = {0}, ended = 0;
    for (; n < 40; n++) { /* the light tenant floods the queue */
        qs[n] = request(c, CHUNK);
        qs[n].tenant = n < 30 ? 1 : 2;
        ck_assert(submit(c, &qs[n]));
    }
    while (ended < 2000) {
        run(c);
        pass_ms(c, 52);
        struct sched_request *q = c->placed[ended++];
        served[q->tenant]++;
        scheduler_end(c->s, q, c->now, false);
        qs[n] = request(c, CHUNK);
        qs[n].tenant = q->tenant;
        ck_assert(submit(c, &qs[n++]));
    }
    ck_assert_msg(served[1] > 475 && served[1] < 525, "%u of 2000", served[1]);
    cluster_close(c);
    free(qs);
}
END_TEST

/* 60 requests of each of two tenants with weights 1 and 3, first all of one, then all of the other; 40 may
 * wait. */
START_TEST(test_scheduler_gives_a_tenant_its_share_of_a_full_queue)
{
    const struct fair_weight weights[] = {{1, 1}, {2, 3}};
    struct scheduler_config config = config_of(mem_zalloc(sizeof(struct cluster)));
    config.weights = weights;
    config.n_weights = 2;
    config.max_queued = 40;
    struct cluster *c = cluster_with(&config, 1, 1);
    struct sched_request *qs = mem_array(120, sizeof(*qs));
    uint32_t admitted[3] = {0}, queued[3] = {0};
    double retry, before = 0;
    for (uint32_t i = 0; i < 120; i++) {
        qs[i] = request(c, CHUNK);
        qs[i].tenant = i < 60 ? 1 : 2;
        bool is_admitted = scheduler_submit(c->s, &qs[i], c->now, &retry);
        admitted[qs[i].tenant] += is_admitted;
        /* Each is told to come back when the refused request before it has found room. */
        if (!is_admitted && i < 60) {
            ck_assert_ptr_nonnull(strstr(qs[i].plan.reason, "queue is full"));
            ck_assert_msg(retry > before && retry < 60 * 52, "%f after %f", retry, before);
            before = retry;
        }
        run(c);
        ck_assert_uint_le(scheduler_queued(c->s), 40);
    }
    ck_assert_msg(admitted[1] >= 40 && admitted[1] <= 43, "%u", admitted[1]);
    ck_assert_msg(admitted[2] >= 30 && admitted[2] <= 33, "%u", admitted[2]);
    for (uint32_t i = 0; i < 120; i++)
        queued[qs[i].tenant] += qs[i].state == SCHED_QUEUED;
    ck_assert_msg(queued[1] >= 9 && queued[1] <= 11 && queued[2] >= 29, "%u and %u", queued[1], queued[2]);
    ck_assert_uint_eq(c->n_refused, admitted[1] + admitted[2] - queued[1] - queued[2] - c->n_placed);
    for (uint32_t i = 0; i < 120; i++)
        scheduler_end(c->s, &qs[i], c->now, false);
    cluster_close(c);
    free(qs);
}
END_TEST

/* Both tenants have waited for longer than max_wait_ns: shares hold, and the oldest request of each tenant is
 * its first. */
START_TEST(test_scheduler_keeps_shares_when_all_wait_too_long)
{
    const struct fair_weight weights[] = {{1, 1}, {2, 3}};
    struct scheduler_config config = config_of(mem_zalloc(sizeof(struct cluster)));
    config.weights = weights;
    config.n_weights = 2;
    config.max_wait_ns = NS_PER_S;
    struct cluster *c = cluster_with(&config, 1, 1);
    struct sched_request *qs = mem_array(200, sizeof(*qs));
    uint32_t served[3] = {0}, first[3] = {0, UINT32_MAX, UINT32_MAX};
    for (uint32_t i = 0; i < 200; i++) {
        qs[i] = request(c, CHUNK);
        qs[i].tenant = i < 100 ? 1 : 2;
        qs[i].priority = i % 100 < 4 ? -1 : 0; /* the oldest requests are the last in their tenant's order */
        ck_assert(submit(c, &qs[i]));
    }
    pass_ms(c, 2000);
    for (uint32_t i = 0; i < 80; i++) {
        run(c);
        ck_assert_uint_gt(c->n_placed, i);
        struct sched_request *q = c->placed[i];
        first[q->tenant] = first[q->tenant] == UINT32_MAX ? (uint32_t)(q - qs) : first[q->tenant];
        served[q->tenant]++;
        pass_ms(c, 52);
        scheduler_end(c->s, q, c->now, false);
    }
    ck_assert_msg(served[1] >= 18 && served[1] <= 22, "%u of 80", served[1]);
    ck_assert(first[1] == 0 && first[2] == 100);
    for (uint32_t i = 0; i < 200; i++)
        scheduler_end(c->s, &qs[i], c->now, false);
    cluster_close(c);
    free(qs);
}
END_TEST

START_TEST(test_scheduler_takes_who_comes_back_to_a_kept_place_though_the_queue_is_full)
{
    struct scheduler_config config = config_of(mem_zalloc(sizeof(struct cluster)));
    config.max_queued = 8;
    struct cluster *c = cluster_with(&config, 1, 1);
    struct sched_request qs[40], again;
    double retry = 0;
    uint32_t n = 0;
    do { /* until a request is refused for its limit, and told when to come back */
        qs[n] = request(c, 8 * CHUNK);
        qs[n].identity = n + 1;
        qs[n].ttft_ms = 1500;
        qs[n].arrived_ns = c->now;
    } while (scheduler_submit(c->s, &qs[n], c->now, &retry) && (run(c), ++n) < 30);
    ck_assert(n < 30 && retry > 0 && !strstr(qs[n].plan.reason, "queue is full"));
    again = qs[n];
    pass_ms(c, retry);
    for (uint32_t i = 0; i < 9; i++) { /* other requests fill the queue meanwhile */
        qs[n + i] = request(c, 10);
        submit(c, &qs[n + i]);
    }
    again.arrived_ns = c->now;
    ck_assert_msg(scheduler_submit(c->s, &again, c->now, &retry), "%s", again.plan.reason);
    scheduler_close(c->s);
    free(c);
}
END_TEST

/* In long queues new requests are decided by the latest look at the queue. Compares with a scheduler that
 * makes a whole pass for each. */
START_TEST(test_scheduler_decides_in_long_queues_as_whole_passes_do)
{
    uint32_t n_admitted = 0, n_refused = 0;
    for (uint64_t seed = 0; seed < 40; seed++) {
        struct sched_request *qs[2];
        struct cluster *cs[2];
        uint32_t n = 0;
        for (uint32_t k = 0; k < 2; k++) {
            struct scheduler_config config = config_of(mem_zalloc(sizeof(struct cluster)));
            config.whole_passes = k;
            config.force = FORCE_NONE;
            cs[k] = cluster_with(&config, 2, 2);
            qs[k] = mem_array(MANY, sizeof(*qs[k]));
        }
        double ttft_ms = 5000 + (double)(random_at(seed, 0, 1) % 20000);
        for (uint32_t burst = 0; burst < 12; burst++) {
            uint32_t size = 20 + (uint32_t)(random_at(seed, burst, 2) % 120);
            for (uint32_t i = 0; i < size; i++, n++) {
                uint32_t n_tokens = 20 + (uint32_t)(random_at(seed, n, 3) % 4000);
                bool taken[2];
                for (uint32_t k = 0; k < 2; k++) {
                    qs[k][n] = request(cs[k], n_tokens);
                    qs[k][n].ttft_ms = ttft_ms;
                    qs[k][n].tpot_ms = 100;
                    taken[k] = submit(cs[k], &qs[k][n]);
                }
                ck_assert_msg(taken[0] == taken[1] && qs[0][n].promised_ttft_ms == qs[1][n].promised_ttft_ms,
                              "seed %lu, %u with %u queued: %d in %f ms, by a whole pass %d in %f ms",
                              (unsigned long)seed, n, scheduler_queued(cs[0]->s), taken[0], qs[0][n].promised_ttft_ms,
                              taken[1], qs[1][n].promised_ttft_ms);
                n_admitted += taken[0];
                n_refused += !taken[0];
            }
            /* Long enough for passes not to be too close to each other. */
            for (uint32_t k = 0; k < 2; k++) {
                pass_ms(cs[k], 100);
                run(cs[k]);
                for (uint32_t i = 0; i < 3 && cs[k]->n_placed; i++) {
                    struct sched_request *q = cs[k]->placed[cs[k]->n_placed - 1];
                    if (q->state == SCHED_PREFILLING)
                        scheduler_prefilled(cs[k]->s, q, cs[k]->now);
                }
                pass_ms(cs[k], 1);
                run(cs[k]);
            }
        }
        for (uint32_t k = 0; k < 2; k++) {
            cluster_close(cs[k]);
            free(qs[k]);
        }
    }
    ck_assert_msg(n_admitted > 4000 && n_refused > 1000, "%u admitted, %u refused", n_admitted, n_refused);
}
END_TEST

/* A pass looks at the first requests of a queue only. Those behind them don't wait for something else to
 * happen. */
START_TEST(test_scheduler_fills_idle_workers_from_a_long_queue)
{
    enum { N = 400 };
    struct cluster *c = cluster_open(1, 8);
    struct sched_request *qs = mem_array(N, sizeof(*qs));
    for (uint32_t i = 0; i < N; i++) {
        qs[i] = request(c, 2); /* together less than the work that a worker may have ahead */
        ck_assert(submit(c, &qs[i]));
    }
    for (uint32_t ms = 0; ms < 100 && c->n_placed < N; ms += 20) {
        run(c);
        pass_ms(c, 20);
    }
    ck_assert_uint_eq(c->n_placed, N);
    for (uint32_t i = 0; i < N; i++)
        scheduler_end(c->s, &qs[i], c->now, false);
    assert_idle(c, 9);
    cluster_close(c);
    free(qs);
}
END_TEST

/* A step of a workflow that can't keep its deadline waits behind all other requests, but not longer than
 * max_wait_ns. */
START_TEST(test_scheduler_serves_a_lost_step_that_waited_too_long)
{
    struct scheduler_config config = config_of(mem_zalloc(sizeof(struct cluster)));
    config.max_wait_ns = 2 * NS_PER_S;
    struct cluster *c = cluster_with(&config, 1, 1);
    struct sched_request *qs = mem_array(MANY, sizeof(*qs)), lost = request(c, CHUNK);
    uint32_t n = 0, ended = 0;
    for (; n < 6; n++) {
        qs[n] = request(c, CHUNK);
        ck_assert(submit(c, &qs[n]));
    }
    lost.workflow_deadline_ns = c->now + 1;
    lost.workflow_steps_left = 3;
    uint64_t since = c->now;
    ck_assert(submit(c, &lost));
    /* Other requests are always there. */
    while (lost.state == SCHED_QUEUED && c->now < since + 10 * NS_PER_S) {
        run(c);
        pass_ms(c, 52);
        scheduler_end(c->s, c->placed[ended], c->now, false);
        ended++;
        qs[n] = request(c, CHUNK);
        ck_assert(submit(c, &qs[n++]));
    }
    double waited = (double)(lost.placed_ns - since) * 1e-6;
    ck_assert_msg(lost.state != SCHED_QUEUED && waited >= 2000 && waited <= 2000 + 2 * 52, "%f", waited);
    scheduler_close(c->s);
    free(c);
    free(qs);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("scheduler_queue");
    TCase *t = tcase_create("scheduler_queue");
    tcase_set_timeout(t, 60);
    tcase_add_test(t, test_scheduler_fills_idle_workers_from_a_long_queue);
    tcase_add_test(t, test_scheduler_looks_again_when_a_worker_is_not_avoided_any_more);
    tcase_add_test(t, test_scheduler_keeps_requests_while_no_pair_can_connect);
    tcase_add_test(t, test_scheduler_avoids_a_worker_for_a_while_only);
    tcase_add_test(t, test_scheduler_refuses_what_its_queue_has_no_room_for);
    tcase_add_test(t, test_scheduler_shares_workers_between_tenants_by_weight);
    tcase_add_test(t, test_scheduler_gives_a_tenant_its_share_of_a_full_queue);
    tcase_add_test(t, test_scheduler_keeps_shares_when_all_wait_too_long);
    tcase_add_test(t, test_scheduler_takes_who_comes_back_to_a_kept_place_though_the_queue_is_full);
    tcase_add_test(t, test_scheduler_decides_in_long_queues_as_whole_passes_do);
    tcase_add_test(t, test_scheduler_serves_a_lost_step_that_waited_too_long);
    suite_add_tcase(s, t);
    return tap_main(s);
}
