/* The scheduler: life cycles, order, bounds. Rules for random sequences of events are in
 * test_scheduler_random.c. */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "sched/scheduler.h"
#include "tests/sched/scheduler_cluster.h"

/* -------------------------------------------------------------- life cycle */

START_TEST(test_scheduler_takes_a_request_through_its_life)
{
    struct cluster *c = cluster_open(1, 1);
    struct sched_request q = request(c, 1000);
    ck_assert(submit(c, &q));
    ck_assert_int_eq(q.state, SCHED_QUEUED);
    ck_assert_uint_eq(scheduler_queued_tokens(c->s), 1000);
    run(c);
    ck_assert_ptr_eq(c->placed[0], &q);
    ck_assert_int_eq(q.plan.kind, PLAN_SPLIT);
    struct sched_worker_stats prefill = stats_at(c->s, 0, c->now);
    ck_assert_uint_eq(prefill.n_prompts, 1);
    ck_assert(fabs(prefill.busy_ms - 102) < 1); /* two chunks, and 100 ms for the tokens */
    pass_ms(c, 50);
    ck_assert(fabs(stats_at(c->s, 0, c->now).busy_ms - 52) < 1);
    pass_ms(c, 52);
    scheduler_prefilled(c->s, &q, c->now);
    ck_assert_int_eq(q.state, SCHED_DECODING);
    ck_assert_uint_eq(stats_at(c->s, 0, c->now).n_prompts, 0);
    struct sched_worker_stats decode = stats_at(c->s, 1, c->now);
    ck_assert_uint_eq(decode.running, 1);
    ck_assert(decode.pages >= 1000.0 / BLOCK);
    scheduler_generated(&q, 40);
    scheduler_decoded(c->s, &q);
    scheduler_end(c->s, &q, c->now, true);
    ck_assert_int_eq(q.state, SCHED_OVER);
    assert_idle(c, 2);
    cluster_close(c);
}
END_TEST

START_TEST(test_scheduler_forgets_what_is_cancelled_in_any_state)
{
    struct cluster *c = cluster_open(1, 1);
    for (int state = 0; state < 4; state++) {
        struct sched_request other = request(c, 800), q = request(c, 1000);
        ck_assert(submit(c, &other) && submit(c, &q));
        if (state >= 1)
            run(c);
        if (state >= 2)
            scheduler_prefilled(c->s, &q, c->now);
        if (state >= 3)
            scheduler_decoded(c->s, &q);
        scheduler_end(c->s, &q, c->now, false);
        ck_assert_int_eq(q.state, SCHED_OVER);
        if (!state)
            run(c);
        ck_assert_int_eq(other.state, SCHED_PREFILLING);
        ck_assert_uint_eq(stats_at(c->s, 0, c->now).n_prompts, 1);
        ck_assert_uint_eq(stats_at(c->s, 1, c->now).running, 1);
        scheduler_end(c->s, &other, c->now, false);
        assert_idle(c, 2);
    }
    cluster_close(c);
}
END_TEST

START_TEST(test_scheduler_requeues_to_another_worker_when_one_is_lost)
{
    struct cluster *c = cluster_open(2, 1);
    struct sched_request q = request(c, 1000);
    ck_assert(submit(c, &q));
    run(c);
    uint32_t lost = q.plan.prefill;
    q.resumed = true;
    scheduler_requeue(c->s, &q, c->now);
    ck_assert_int_eq(q.state, SCHED_QUEUED);
    scheduler_worker_down(c->s, lost);
    run(c);
    ck_assert_int_eq(q.state, SCHED_PREFILLING);
    ck_assert_uint_eq(q.plan.prefill, 1 - lost);
    scheduler_end(c->s, &q, c->now, false);
    worker_up(c, lost, ROLE_PREFILL);
    assert_idle(c, 3);
    cluster_close(c);
}
END_TEST

static void incarnation_up(struct cluster *c, uint32_t w, enum worker_role role, uint64_t incarnation)
{
    scheduler_worker_up(c->s, w,
                        &(struct sched_worker_info){.role = role,
                                                    .chunk_tokens = CHUNK,
                                                    .max_batch = 64,
                                                    .n_pages = 20000,
                                                    .max_context = 100000,
                                                    .incarnation = incarnation});
}

/* Reports steps of 100 prompt tokens. */
static void measure(struct cluster *c, uint32_t w, double ms)
{
    const struct cost_step step = {.n_prompts = 1, .prefill_tokens = 100, .prefill_square = 10000, .ms = ms};
    for (int i = 0; i < 50; i++)
        scheduler_observe_step(c->s, w, &step);
}

static double step_ms(struct cluster *c, uint32_t w)
{
    struct sched_worker_stats stats = scheduler_worker_stats(c->s, w);
    return cost_step_ms(&stats.cost, 100, 10000, 0, 0);
}

START_TEST(test_scheduler_forgets_a_worker_whose_place_another_process_takes)
{
    struct cluster *c = cluster_open(0, 1);
    incarnation_up(c, 1, ROLE_PREFILL, 11);
    incarnation_up(c, 2, ROLE_PREFILL, 12);
    measure(c, 1, 1000);
    measure(c, 2, 20);
    scheduler_observe_loading(c->s, 1, 7, 7, 7);
    scheduler_worker_down(c->s, 1);
    incarnation_up(c, 1, ROLE_PREFILL, 11); /* the same process, which had lost its connection */
    ck_assert_double_gt(step_ms(c, 1), 500);
    scheduler_worker_down(c->s, 1);
    /* Another process, taken to be as fast as the workers of its role. */
    incarnation_up(c, 1, ROLE_PREFILL, 13);
    ck_assert_double_le(step_ms(c, 1), 30);
    ck_assert_uint_eq(scheduler_worker_stats(c->s, 1).cost.prefill_error.n, 0);
    scheduler_worker_down(c->s, 1);
    incarnation_up(c, 1, ROLE_DECODE, 14); /* the same with another role */
    scheduler_worker_down(c->s, 2);
    /* The only worker of its role: the former one is the best guess. */
    incarnation_up(c, 2, ROLE_PREFILL, 15);
    ck_assert_double_le(step_ms(c, 2), 30);
    assert_idle(c, 3);
    cluster_close(c);
}
END_TEST

START_TEST(test_scheduler_sends_nothing_to_a_draining_worker_and_waits_for_one)
{
    struct cluster *c = cluster_open(2, 1);
    struct sched_request qs[8], waiting = request(c, 100);
    scheduler_worker_usable(c->s, 1, false);
    for (int i = 0; i < 8; i++) {
        qs[i] = request(c, 100);
        ck_assert(submit(c, &qs[i]));
        run(c);
        ck_assert_uint_eq(qs[i].plan.prefill, 0);
    }
    scheduler_worker_usable(c->s, 0, false);
    waiting.ttft_ms = 100; /* without a worker nothing is known, so nothing is refused */
    ck_assert(submit(c, &waiting));
    run(c);
    ck_assert_int_eq(waiting.state, SCHED_QUEUED);
    scheduler_worker_usable(c->s, 1, true);
    run(c);
    ck_assert_int_eq(waiting.state, SCHED_PREFILLING);
    ck_assert_uint_eq(waiting.plan.prefill, 1);
    for (int i = 0; i < 8; i++)
        scheduler_end(c->s, &qs[i], c->now, false);
    scheduler_end(c->s, &waiting, c->now, false);
    assert_idle(c, 3);
    cluster_close(c);
}
END_TEST

/* A request's plan is used as it is, unless a worker changed since then or time has passed. */
START_TEST(test_scheduler_decides_again_when_a_worker_left_after_admission)
{
    for (int what = 0; what < 4; what++) {
        struct cluster *c = cluster_open(2, 1);
        struct sched_request q = request(c, 100), other = request(c, 100);
        ck_assert(submit(c, &q));
        uint32_t first = q.plan.prefill;
        if (what == 1)
            scheduler_worker_usable(c->s, first, false);
        else if (what == 2)
            scheduler_worker_down(c->s, first);
        else if (what == 3)
            ck_assert(submit(c, &other));
        run(c);
        ck_assert_int_eq(q.state, SCHED_PREFILLING);
        ck_assert_uint_eq(c->n_placed, what == 3 ? 2 : 1);
        ck_assert_uint_eq(q.plan.prefill, what == 1 || what == 2 ? 1 - first : first);
        ck_assert(what != 3 || other.plan.prefill != first);
        scheduler_end(c->s, &q, c->now, false);
        scheduler_end(c->s, &other, c->now, false);
        assert_idle(c, 3);
        cluster_close(c);
    }
}
END_TEST

static double decode_ms(struct cluster *c, uint32_t w)
{
    struct sched_worker_stats stats = stats_at(c->s, w, c->now);
    return cost_decode_ms(&stats.cost, 8, 8000);
}

/* Reports a step of worker w each half second for some seconds, `slower` times as long as the profile
 * says. */
static void steps_for(struct cluster *c, double seconds, uint32_t w, double slower)
{
    for (double t = 0; t < seconds; t += 0.5) {
        const struct cost_step step = {.batch = 8, .context = 8000, .ms = slower * (5 + 0.4 + 0.16)};
        scheduler_observe_step(c->s, w, &step);
        pass_ms(c, 500);
        scheduler_refresh(c->s, c->now);
    }
}

/* Reports a step of 1,000 prompt tokens on worker 0, `slower` times as long as the profile says. */
static void prompt_step(struct cluster *c, double slower)
{
    struct cost_profile p;
    ck_assert_int_eq(cost_profile_parse(PROFILE, &p, NULL), TD_OK);
    struct cost_step step = {.n_prompts = 1, .prefill_tokens = 1000, .prefill_square = 1e6};
    step.ms = slower * cost_profile_step_ms(&p, &step);
    scheduler_observe_step(c->s, 0, &step);
    pass_ms(c, step.ms);
}

static double prompt_ms(struct cluster *c)
{
    struct sched_worker_stats stats = stats_at(c->s, 0, c->now);
    return cost_prefill_ms(&stats.cost, 1000, 0, 0);
}

/* A worker ran at a twelfth of its speed for a while, and now runs at full speed again. Requests that it
 * could serve in time used to be refused for ever, because none was sent that could have shown its speed. */
START_TEST(test_scheduler_probes_an_idle_worker_that_is_thought_slow)
{
    /* Slow for ten requests; or long enough for the low speed to count as usual. */
    for (int is_long = 0; is_long < 2; is_long++) {
        struct cluster *c = cluster_open(1, 1);
        for (int i = 0; i < 50; i++)
            prompt_step(c, 1);
        double right = prompt_ms(c);
        for (int i = 0; i < (is_long ? 3000 : 10); i++)
            prompt_step(c, 12);
        ck_assert_double_gt(prompt_ms(c), 10 * right);
        uint64_t began = c->now;
        uint32_t n_refused = 0, n_probes = 0;
        for (int i = 0; i < 100 && prompt_ms(c) > 1.3 * right; i++) {
            struct sched_request q = request(c, 1000);
            q.ttft_ms = 2.2 * right;
            pass_ms(c, 100);
            if (!submit(c, &q)) {
                n_refused++;
                continue;
            }
            ck_assert(q.is_probe);
            run(c);
            n_probes++;
            struct sched_request second = request(c, 1000);
            second.ttft_ms = 2.2 * right;
            ck_assert(!submit(c, &second));         /* one probe at a time */
            prompt_step(c, n_probes == 1 ? 12 : 1); /* the first probe finds the worker still slow */
            scheduler_prefilled(c->s, &q, c->now);
            scheduler_end(c->s, &q, c->now, true);
        }
        ck_assert_msg(prompt_ms(c) < 1.3 * right, "still %g, not %g", prompt_ms(c), right);
        ck_assert_uint_eq(n_probes, 2);
        ck_assert_uint_eq(stats_at(c->s, 0, c->now).n_probes, 2);
        ck_assert_msg((n_refused > 0 || !is_long) && c->now - began < (is_long ? 12000 : 3000) * NS_PER_MS, "%g ms",
                      (double)(c->now - began) * 1e-6);
        struct sched_request q = request(c, 1000);
        q.ttft_ms = 1.5 * right;
        ck_assert(submit(c, &q) && !q.is_probe);
        scheduler_end(c->s, &q, c->now, false);
        cluster_close(c);
    }
}
END_TEST

/* A new worker counts as fast as the others are now, not as they were when it came. */
START_TEST(test_scheduler_gives_work_to_a_new_worker_whose_role_has_become_faster)
{
    struct scheduler_config config = config_of(mem_zalloc(sizeof(struct cluster)));
    struct cluster *c = cluster_with(&config, 1, 1);
    struct sched_request qs[40];
    uint32_t n_new = 0;
    steps_for(c, 20, 1, 1.4);
    worker_up(c, 2, ROLE_DECODE);
    steps_for(c, 60, 1, 1);
    for (int i = 0; i < 40; i++) {
        qs[i] = request(c, 100);
        ck_assert(submit(c, &qs[i]));
        run(c);
        n_new += qs[i].plan.decode == 2;
        scheduler_prefilled(c->s, &qs[i], c->now);
        scheduler_end(c->s, &qs[i], c->now, false);
    }
    ck_assert_msg(n_new > 10 && n_new < 30, "%u of 40", n_new);
    cluster_close(c);
}
END_TEST

/* Kept plans wait for a prefill worker, as split plans do. */
START_TEST(test_scheduler_waits_for_workers_of_the_roles_that_its_plans_need)
{
    struct scheduler_config config = config_of(mem_zalloc(sizeof(struct cluster)));
    config.force = FORCE_KEPT;
    struct cluster *c = cluster_with(&config, 0, 1);
    struct sched_request q = request(c, 100);
    ck_assert(submit(c, &q));
    run(c);
    ck_assert_int_eq(q.state, SCHED_QUEUED);
    worker_up(c, 1, ROLE_PREFILL);
    run(c);
    ck_assert_int_eq(q.state, SCHED_PREFILLING);
    ck_assert(q.plan.prefill == 1 && q.plan.decode == 1);
    scheduler_end(c->s, &q, c->now, false);
    cluster_close(c);
}
END_TEST

START_TEST(test_scheduler_keeps_what_it_knows_of_workers_while_nothing_happens)
{
    struct cluster *c = cluster_open(1, 2);
    steps_for(c, 5, 1, 1);
    steps_for(c, 20, 2, 10);
    double slow = decode_ms(c, 2), fast = decode_ms(c, 1);
    for (int i = 0; i < 100; i++) {
        pass_ms(c, 1000);
        scheduler_refresh(c->s, c->now);
    }
    ck_assert_double_eq(decode_ms(c, 2), slow);
    ck_assert_double_eq(decode_ms(c, 1), fast);
    cluster_close(c);
}
END_TEST

START_TEST(test_scheduler_lets_a_worker_have_two_chunks_ahead)
{
    struct cluster *c = cluster_open(2, 1);
    struct sched_request qs[10];
    for (int i = 0; i < 10; i++) {
        qs[i] = request(c, CHUNK);
        ck_assert(submit(c, &qs[i]));
    }
    run(c);
    ck_assert_uint_eq(c->n_placed, 4);
    ck_assert_uint_eq(stats_at(c->s, 0, c->now).n_prompts, 2);
    ck_assert_uint_eq(stats_at(c->s, 1, c->now).n_prompts, 2);
    ck_assert_uint_eq(scheduler_queued(c->s), 6);
    scheduler_prefilled(c->s, c->placed[0], c->now);
    run(c);
    ck_assert_uint_eq(c->n_placed, 5);
    for (int i = 0; i < 10; i++)
        scheduler_end(c->s, &qs[i], c->now, false);
    assert_idle(c, 3);
    cluster_close(c);
}
END_TEST

/* --------------------------------------------------------------- admission */

START_TEST(test_scheduler_forgets_other_routers_with_the_workers_that_told_of_them)
{
    struct cluster *c = cluster_open(1, 1);
    struct sched_request q = request(c, 4 * CHUNK), first = request(c, 4 * CHUNK), next = request(c, 4 * CHUNK);
    const struct sched_report report = {.n_routers = 3, .queued_ms = 1e6};
    double promised[2];
    for (uint32_t round = 0; round < 2; round++) {
        struct sched_request *mine[] = {&first, &next, &q};
        for (uint32_t i = 0; i < 3; i++) {
            *mine[i] = request(c, 4 * CHUNK);
            ck_assert(submit(c, mine[i]));
            run(c);
        }
        promised[round] = q.promised_ttft_ms;
        for (uint32_t i = 0; i < 3; i++)
            scheduler_end(c->s, mine[i], c->now, false);
        scheduler_observe_report(c->s, 0, &report, c->now);
        scheduler_worker_down(c->s, 0);
        worker_up(c, 0, ROLE_PREFILL);
    }
    ck_assert_msg(promised[0] == promised[1], "%f, then %f", promised[0], promised[1]);
    cluster_close(c);
}
END_TEST

START_TEST(test_scheduler_refuses_before_any_work_what_would_be_late)
{
    struct cluster *c = cluster_open(1, 1);
    struct sched_request qs[20];
    uint32_t admitted = 0;
    /* Each is 50 ms of work and may wait 400 ms, so seven or eight are admitted. */
    for (int i = 0; i < 20; i++) {
        qs[i] = request(c, 500);
        qs[i].ttft_ms = 400;
        double retry = -1;
        bool taken = scheduler_submit(c->s, &qs[i], c->now, &retry);
        ck_assert_msg(taken || (qs[i].state == SCHED_OVER && retry > 0 && qs[i].plan.reason), "%d", i);
        ck_assert(!taken || qs[i].promised_ttft_ms <= 400);
        admitted += taken;
        run(c);
    }
    ck_assert_msg(admitted >= 6 && admitted <= 8, "%u", admitted);
    struct sched_request never = request(c, 99990), resumed = request(c, 500);
    double retry = -1;
    ck_assert(!scheduler_submit(c->s, &never, c->now, &retry));
    ck_assert(never.plan.never && retry == 0); /* coming back would be useless */
    resumed.ttft_ms = 1;
    resumed.resumed = true;
    ck_assert(submit(c, &resumed));
    ck_assert_uint_eq(c->n_refused, 0);
    scheduler_end(c->s, &resumed, c->now, false);
    for (int i = 0; i < 20; i++)
        if (qs[i].state != SCHED_OVER)
            scheduler_end(c->s, &qs[i], c->now, false);
    assert_idle(c, 2);
    cluster_close(c);
}
END_TEST

START_TEST(test_scheduler_does_not_admit_what_would_break_a_promise)
{
    struct cluster *c = cluster_open(1, 1);
    struct sched_request busy[2], promised = request(c, 1000), urgent = request(c, 3000), small = request(c, 100);
    for (int i = 0; i < 2; i++) {
        busy[i] = request(c, CHUNK);
        ck_assert(submit(c, &busy[i]));
    }
    run(c);
    promised.ttft_ms = 300; /* 102 ms of queue, 102 ms of work */
    ck_assert(submit(c, &promised));
    run(c);
    urgent.priority = 1; /* it would go first, with 300 ms of work */
    urgent.ttft_ms = 1000;
    ck_assert(!submit(c, &urgent));
    ck_assert_ptr_nonnull(strstr(urgent.plan.reason, "others"));
    small.priority = 1;
    small.ttft_ms = 1000;
    ck_assert(submit(c, &small));
    for (int i = 0; i < 2; i++)
        scheduler_prefilled(c->s, &busy[i], c->now);
    run(c);
    ck_assert_ptr_eq(c->placed[2], &small);
    ck_assert_ptr_eq(c->placed[3], &promised);
    struct sched_request *const all[] = {&busy[0], &busy[1], &promised, &small};
    for (int i = 0; i < 4; i++)
        scheduler_end(c->s, all[i], c->now, false);
    assert_idle(c, 2);
    cluster_close(c);
}
END_TEST

START_TEST(test_scheduler_refuses_late_what_can_not_be_on_time_any_more)
{
    struct cluster *c = cluster_open(1, 1);
    struct sched_request busy[2], late = request(c, 500), resumed = request(c, 500), next = request(c, 10);
    for (int i = 0; i < 2; i++) {
        /* The second one exceeds the work that a worker should have ahead. */
        busy[i] = request(c, i ? 2000 : 1000);
        ck_assert(submit(c, &busy[i]));
    }
    run(c);
    late.ttft_ms = 500;
    ck_assert(submit(c, &late));
    resumed.ttft_ms = 500;
    resumed.resumed = true;
    ck_assert(submit(c, &resumed));
    pass_ms(c, 600); /* the worker makes no progress */
    ck_assert(submit(c, &next));
    run(c);
    ck_assert_int_eq(late.state, SCHED_OVER);
    ck_assert_ptr_eq(c->refused[0], &late);
    ck_assert_uint_eq(c->n_refused, 1);
    ck_assert_int_eq(resumed.state, SCHED_QUEUED);
    struct sched_request *const all[] = {&busy[0], &busy[1], &resumed, &next};
    for (int i = 0; i < 4; i++)
        scheduler_end(c->s, all[i], c->now, false);
    assert_idle(c, 2);
    cluster_close(c);
}
END_TEST

/* The less work is left, the better it is known: the scheduler tolerates lateness of a tenth of the remaining
 * work, not of the limit. */
START_TEST(test_scheduler_bears_lateness_by_what_is_still_to_come)
{
    for (int late_ms = 15; late_ms <= 45; late_ms += 30) {
        struct cluster *c = cluster_open(1, 1);
        struct sched_request busy[2], q = request(c, 500), next = request(c, 10);
        for (int i = 0; i < 2; i++) {
            busy[i] = request(c, i ? 2000 : 1000);
            ck_assert(submit(c, &busy[i]));
        }
        run(c);
        q.ttft_ms = 500;
        next.ttft_ms = 5000; /* queued behind it */
        ck_assert(submit(c, &q));
        /* The worker has nearly ended the first one; then come 204 ms, and 51 ms of its own. */
        pass_ms(c, 243 + late_ms);
        ck_assert(submit(c, &next));
        run(c);
        ck_assert_int_eq(q.state, late_ms == 15 ? SCHED_QUEUED : SCHED_OVER);
        struct sched_request *const all[] = {&busy[0], &busy[1], &q, &next};
        for (int i = 0; i < 4; i++)
            if (all[i]->state != SCHED_OVER)
                scheduler_end(c->s, all[i], c->now, false);
        assert_idle(c, 2);
        cluster_close(c);
    }
}
END_TEST

/* A long limit allows a queue longer than a pass looks at. Requests are then refused for their limit, not for
 * the length of the queue. */
START_TEST(test_scheduler_admits_behind_more_than_a_pass_looks_at)
{
    enum { MOST = 1500 };
    struct cluster *c = cluster_open(1, 1);
    struct sched_request *qs = mem_array(MOST, sizeof(*qs));
    uint32_t admitted = 0;
    for (uint32_t i = 0; i < MOST; i++) { /* each is 11 ms of work, so 909 of them are in time */
        qs[i] = request(c, 100);
        qs[i].ttft_ms = 10000;
        if (!submit(c, &qs[i]))
            ck_assert_str_eq(qs[i].plan.reason, "slo.ttft_ms can't be met");
        admitted += qs[i].state != SCHED_OVER;
        run(c);
    }
    ck_assert_msg(admitted > 400 && admitted < 900, "%u", admitted);
    for (uint32_t i = 0; i < MOST; i++)
        if (qs[i].state != SCHED_OVER)
            scheduler_end(c->s, &qs[i], c->now, false);
    assert_idle(c, 2);
    cluster_close(c);
    free(qs);
}
END_TEST

/* In a queue longer than a pass looks at, only requests that are due earlier count: here 1.6 s, not 24 s. */
START_TEST(test_scheduler_does_not_count_what_is_due_later)
{
    enum { HIGH = 145, LOW = 2000 };
    struct cluster *c = cluster_open(1, 1);
    struct sched_request *qs = mem_array(HIGH + LOW, sizeof(*qs)), urgent;
    for (uint32_t i = 0; i < HIGH + LOW; i++) {
        qs[i] = request(c, 100);
        qs[i].priority = i < LOW ? 0 : 20;
        ck_assert(submit(c, &qs[i]));
    }
    urgent = request(c, 100);
    urgent.priority = 20;
    urgent.ttft_ms = 10000;
    ck_assert_msg(submit(c, &urgent), "%s, predicted %f", urgent.plan.reason, urgent.plan.ttft_ms);
    scheduler_end(c->s, &urgent, c->now, false);
    for (uint32_t i = 0; i < HIGH + LOW; i++)
        scheduler_end(c->s, &qs[i], c->now, false);
    assert_idle(c, 2);
    cluster_close(c);
    free(qs);
}
END_TEST

/* A first gap of two steps, then three steps as predicted: the margin for steps must not learn from the
 * gap. */
START_TEST(test_scheduler_learns_no_margin_from_first_gaps)
{
    struct cluster *c = cluster_open(1, 1);
    for (int i = 0; i < 300; i++) {
        struct sched_request q = request(c, 100);
        q.max_tokens = 5;
        q.tpot_ms = 7;
        ck_assert_msg(submit(c, &q), "%d: %s", i, q.plan.reason);
        run(c);
        pass_ms(c, q.plan.work_ms);
        scheduler_prefilled(c->s, &q, c->now);
        pass_ms(c, 10);
        scheduler_second_token(c->s, &q, c->now);
        pass_ms(c, 3 * q.plan.step_ms);
        scheduler_generated(&q, 5);
        scheduler_end(c->s, &q, c->now, true);
    }
    ck_assert_msg(scheduler_margins(c->s).tpot < 0.06, "%f", scheduler_margins(c->s).tpot);
    assert_idle(c, 2);
    cluster_close(c);
}
END_TEST

START_TEST(test_scheduler_pass_goes_on_when_the_first_in_the_queue_is_refused_and_freed)
{
    struct cluster *c = cluster_open(1, 1);
    struct sched_request busy, late[2], next;
    pass_ms(c, 1e6);
    busy = request(c, 3000); /* exceeds the work that a worker should have ahead */
    ck_assert(submit(c, &busy));
    run(c);
    ck_assert_int_eq(busy.state, SCHED_PREFILLING);
    for (int i = 0; i < 2; i++) {
        late[i] = request(c, 500);
        late[i].ttft_ms = 700;
        ck_assert(submit(c, &late[i]));
    }
    pass_ms(c, 800);
    next = request(c, 10);
    ck_assert(submit(c, &next));
    c->frees = true;
    run(c);
    ck_assert_uint_eq(c->n_refused, 2);
    ck_assert_int_eq(next.state, SCHED_PREFILLING);
    ck_assert_int_eq(late[0].state, SCHED_NEW); /* the scheduler has not touched them since */
    ck_assert_int_eq(late[1].state, SCHED_NEW);
    struct sched_request *const all[] = {&busy, &next};
    for (int i = 0; i < 2; i++)
        scheduler_end(c->s, all[i], c->now, false);
    assert_idle(c, 2);
    cluster_close(c);
}
END_TEST

START_TEST(test_scheduler_keeps_a_place_for_one_that_comes_back_when_told)
{
    struct cluster *c = cluster_open(1, 1);
    struct sched_request first = request(c, 3000), q = request(c, 5000), others[40];
    uint32_t taken = 0, n_others = 0;
    first.ttft_ms = q.ttft_ms = 700;
    q.identity = 77;
    ck_assert(submit(c, &first));
    run(c);
    double retry = 0;
    ck_assert(!scheduler_submit(c->s, &q, c->now, &retry)); /* 300 ms of queue and 500 ms of work */
    ck_assert_msg(retry >= 150 && retry <= 350, "%f", retry);
    uint64_t back = c->now + (uint64_t)(retry * 1e6);
    /* These requests would fill the worker meanwhile. */
    for (; c->now + NS_PER_MS * 10 < back && n_others < 40; n_others++) {
        pass_ms(c, 9);
        others[n_others] = request(c, 900);
        others[n_others].ttft_ms = 700;
        taken += submit(c, &others[n_others]);
        run(c);
    }
    ck_assert_msg(taken < n_others / 2, "%u of %u", taken, n_others);
    c->now = back;
    scheduler_prefilled(c->s, &first, c->now - NS_PER_MS);
    /* Admitted requests were predicted to have ended by then, or nearly. */
    for (uint32_t i = 0; i < n_others; i++)
        if (others[i].state == SCHED_PREFILLING)
            scheduler_prefilled(c->s, &others[i], c->now);
    ck_assert(submit(c, &q));
    ck_assert(q.promised_ttft_ms <= 700);
    struct sched_request *const both[] = {&first, &q};
    for (int i = 0; i < 2; i++)
        scheduler_end(c->s, both[i], c->now, false);
    for (uint32_t i = 0; i < n_others; i++)
        if (others[i].state != SCHED_OVER)
            scheduler_end(c->s, &others[i], c->now, false);
    assert_idle(c, 2);
    cluster_close(c);
}
END_TEST

START_TEST(test_scheduler_keeps_no_place_for_one_that_does_not_come)
{
    struct cluster *c = cluster_open(1, 1);
    struct sched_request first = request(c, 3000), q = request(c, 5000), other = request(c, 4000);
    double retry = 0;
    first.ttft_ms = q.ttft_ms = 700;
    other.ttft_ms = 700;
    q.identity = 77;
    ck_assert(submit(c, &first));
    run(c);
    ck_assert(!scheduler_submit(c->s, &q, c->now, &retry));
    pass_ms(c, retry);
    scheduler_end(c->s, &first, c->now, false);
    other.arrived_ns = c->now;
    ck_assert(!scheduler_would_admit(c->s, &other, c->now)); /* the place is booked */
    pass_ms(c, 51);
    other.arrived_ns = c->now;
    ck_assert(scheduler_would_admit(c->s, &other, c->now)); /* but not for ever */
    ck_assert_uint_eq(scheduler_queued(c->s), 0);
    assert_idle(c, 2);
    cluster_close(c);
}
END_TEST

START_TEST(test_scheduler_refuses_nobody_that_it_admitted_for_a_place_that_it_keeps)
{
    struct cluster *c = cluster_open(1, 1);
    struct sched_request first = request(c, 3000), admitted = request(c, 2000), q = request(c, 5000);
    double retry = 0;
    admitted.ttft_ms = q.ttft_ms = 700;
    q.identity = 77;
    ck_assert(submit(c, &first));
    run(c);
    ck_assert(submit(c, &admitted));
    run(c);
    ck_assert_int_eq(admitted.state, SCHED_QUEUED); /* the worker has enough work ahead */
    q.arrived_ns = c->now;
    ck_assert(!scheduler_submit(c->s, &q, c->now, &retry)); /* 500 ms of queue and 500 ms of work */
    pass_ms(c, 350);                                        /* the worker made less progress than predicted */
    scheduler_prefilled(c->s, &first, c->now);
    run(c);
    /* Although it will not have ended when q comes back. */
    ck_assert_int_eq(admitted.state, SCHED_PREFILLING);
    scheduler_end(c->s, &first, c->now, false);
    scheduler_end(c->s, &admitted, c->now, false);
    assert_idle(c, 2);
    cluster_close(c);
}
END_TEST

/* ------------------------------------------------------------------- order */

/* Fills the worker, queues qs[0..n) a millisecond apart, and writes the order in which they are placed. */
static void place_in_order(const struct scheduler_config *config, struct sched_request *qs, uint32_t n,
                           uint32_t *order_out)
{
    struct cluster *c = cluster_with(config, 1, 1);
    struct sched_request busy = request(c, 4 * CHUNK);
    ck_assert(submit(c, &busy));
    run(c);
    for (uint32_t i = 0; i < n; i++) {
        pass_ms(c, 1);
        ck_assert(submit(c, &qs[i]));
    }
    run(c);
    ck_assert_uint_eq(c->n_placed, 1);
    scheduler_end(c->s, &busy, c->now, false);
    for (uint32_t i = 0; i < n; i++) {
        run(c);
        struct sched_request *q = c->placed[i + 1];
        ck_assert_uint_eq(c->n_placed, i + 2); /* each request fills the worker */
        order_out[i] = (uint32_t)(q - qs);
        scheduler_end(c->s, q, c->now, false);
    }
    assert_idle(c, 2);
    cluster_close(c);
}

static void assert_order(const struct scheduler_config *config, const struct sched_request *qs, uint32_t n,
                         const uint32_t *want)
{
    struct sched_request copy[8];
    uint32_t order[8];
    memcpy(copy, qs, n * sizeof(*qs));
    struct scheduler_config fresh = *config;
    fresh.user = mem_zalloc(sizeof(struct cluster));
    place_in_order(&fresh, copy, n, order);
    for (uint32_t i = 0; i < n; i++)
        ck_assert_msg(order[i] == want[i], "place %u: %u, not %u", i, order[i], want[i]);
}

START_TEST(test_scheduler_orders_by_priority_then_by_when_each_is_due)
{
    struct cluster dummy = {0};
    struct scheduler_config config = config_of(&dummy);
    struct sched_request qs[4];
    for (int i = 0; i < 4; i++) {
        qs[i] = request(&dummy, 2 * CHUNK);
        qs[i].ttft_ms = 5000 - 100.0 * i; /* the later a request came, the earlier it is due */
    }
    qs[1].priority = 1;
    assert_order(&config, qs, 4, (const uint32_t[]){1, 3, 2, 0});
    qs[2].resumed = true;
    assert_order(&config, qs, 4, (const uint32_t[]){2, 1, 3, 0});
    config.order = ORDER_FCFS;
    assert_order(&config, qs, 4, (const uint32_t[]){0, 1, 2, 3});
    config.order = ORDER_EDF;
    assert_order(&config, qs, 4, (const uint32_t[]){3, 2, 1, 0});
    config.order = ORDER_SHORTEST;
    for (int i = 0; i < 4; i++)
        qs[i].n_tokens = 3000 + 100 * (uint32_t)(i ^ 2);
    assert_order(&config, qs, 4, (const uint32_t[]){2, 3, 0, 1});
}
END_TEST

START_TEST(test_scheduler_puts_short_ones_first_where_nobody_has_a_limit)
{
    struct cluster dummy = {0};
    struct scheduler_config config = config_of(&dummy);
    struct sched_request qs[3];
    for (int i = 0; i < 3; i++)
        qs[i] = request(&dummy, 2 * CHUNK * (uint32_t)(3 - i));
    assert_order(&config, qs, 3, (const uint32_t[]){2, 1, 0});
}
END_TEST

START_TEST(test_scheduler_puts_the_workflow_first_that_needs_least_and_a_lost_one_last)
{
    struct cluster dummy = {0};
    struct scheduler_config config = config_of(&dummy);
    struct sched_request qs[4];
    for (int i = 0; i < 4; i++) {
        qs[i] = request(&dummy, 2 * CHUNK);
        qs[i].workflow_deadline_ns = NS_PER_S + 30 * NS_PER_S;
        qs[i].workflow_steps_left = (uint32_t)i;
    }
    /* It can't meet its deadline any more, but others can. */
    qs[3].workflow_deadline_ns = NS_PER_S + NS_PER_S / 10;
    assert_order(&config, qs, 4, (const uint32_t[]){0, 1, 2, 3});
    /* More work is left, but the deadline is much earlier. */
    qs[2].workflow_deadline_ns = NS_PER_S + 20 * NS_PER_S;
    assert_order(&config, qs, 4, (const uint32_t[]){2, 0, 1, 3});
    config.order = ORDER_EDF; /* this order only compares deadlines */
    assert_order(&config, qs, 4, (const uint32_t[]){3, 2, 0, 1});
}
END_TEST

START_TEST(test_scheduler_lets_nobody_wait_longer_than_max_wait_while_others_are_placed)
{
    struct scheduler_config config = config_of(mem_zalloc(sizeof(struct cluster)));
    config.max_wait_ns = 2 * NS_PER_S;
    struct cluster *c = cluster_with(&config, 1, 1);
    struct sched_request low = request(c, CHUNK), *others = mem_array(MANY, sizeof(*others));
    uint32_t n = 0, ended = 0;
    low.priority = -100;
    for (; n < 4; n++) {
        others[n] = request(c, CHUNK);
        ck_assert(submit(c, &others[n]));
    }
    ck_assert(submit(c, &low));
    uint64_t since = c->now;
    while (low.state == SCHED_QUEUED && n < MANY) { /* a prompt ends every 52 ms, and one or two arrive */
        run(c);
        pass_ms(c, 52);
        if (c->placed[ended] != &low)
            scheduler_end(c->s, c->placed[ended], c->now, false);
        ended++;
        others[n] = request(c, CHUNK);
        ck_assert(submit(c, &others[n++]));
    }
    double waited = (double)(low.placed_ns - since) * 1e-6;
    ck_assert_msg(low.state == SCHED_PREFILLING && waited >= 2000 && waited <= 2000 + 2 * 52, "%f", waited);
    cluster_close(c);
    free(others);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("scheduler");
    TCase *t = tcase_create("scheduler");
    tcase_set_timeout(t, 60);
    tcase_add_test(t, test_scheduler_takes_a_request_through_its_life);
    tcase_add_test(t, test_scheduler_forgets_what_is_cancelled_in_any_state);
    tcase_add_test(t, test_scheduler_requeues_to_another_worker_when_one_is_lost);
    tcase_add_test(t, test_scheduler_forgets_a_worker_whose_place_another_process_takes);
    tcase_add_test(t, test_scheduler_sends_nothing_to_a_draining_worker_and_waits_for_one);
    tcase_add_test(t, test_scheduler_decides_again_when_a_worker_left_after_admission);
    tcase_add_test(t, test_scheduler_gives_work_to_a_new_worker_whose_role_has_become_faster);
    tcase_add_test(t, test_scheduler_waits_for_workers_of_the_roles_that_its_plans_need);
    tcase_add_test(t, test_scheduler_probes_an_idle_worker_that_is_thought_slow);
    tcase_add_test(t, test_scheduler_keeps_what_it_knows_of_workers_while_nothing_happens);
    tcase_add_test(t, test_scheduler_lets_a_worker_have_two_chunks_ahead);
    tcase_add_test(t, test_scheduler_refuses_before_any_work_what_would_be_late);
    tcase_add_test(t, test_scheduler_does_not_admit_what_would_break_a_promise);
    tcase_add_test(t, test_scheduler_refuses_late_what_can_not_be_on_time_any_more);
    tcase_add_test(t, test_scheduler_bears_lateness_by_what_is_still_to_come);
    tcase_add_test(t, test_scheduler_admits_behind_more_than_a_pass_looks_at);
    tcase_add_test(t, test_scheduler_does_not_count_what_is_due_later);
    tcase_add_test(t, test_scheduler_learns_no_margin_from_first_gaps);
    tcase_add_test(t, test_scheduler_pass_goes_on_when_the_first_in_the_queue_is_refused_and_freed);
    tcase_add_test(t, test_scheduler_keeps_a_place_for_one_that_comes_back_when_told);
    tcase_add_test(t, test_scheduler_keeps_no_place_for_one_that_does_not_come);
    tcase_add_test(t, test_scheduler_refuses_nobody_that_it_admitted_for_a_place_that_it_keeps);
    tcase_add_test(t, test_scheduler_orders_by_priority_then_by_when_each_is_due);
    tcase_add_test(t, test_scheduler_puts_short_ones_first_where_nobody_has_a_limit);
    tcase_add_test(t, test_scheduler_puts_the_workflow_first_that_needs_least_and_a_lost_one_last);
    tcase_add_test(t, test_scheduler_lets_nobody_wait_longer_than_max_wait_while_others_are_placed);
    tcase_add_test(t, test_scheduler_forgets_other_routers_with_the_workers_that_told_of_them);
    suite_add_tcase(s, t);
    return tap_main(s);
}
