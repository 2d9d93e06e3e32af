/* A stalled worker is distinguished from a slow one (sched/progress.h). */
#include <math.h>

#include "sched/progress.h"
#include "tests/tap.h"

static struct cost_model model(void)
{
    struct cost_profile p;
    /* A prompt takes 1 ms and 0.01 ms a token; a decode step 1 ms. */
    cost_profile_parse("1000,10,0:1000,0,0", &p, NULL);
    return cost_make(&p);
}

static struct cost_step prompt(double ms)
{
    return (struct cost_step){.n_prompts = 1, .prefill_tokens = 100, .prefill_square = 10000, .ms = ms};
}

static struct cost_step decode(double ms)
{
    return (struct cost_step){.batch = 4, .context = 400, .ms = ms};
}

/* For how many ms a worker is believed that repeats one report. */
static double believed_ms(struct progress_report r)
{
    struct progress p = {0};
    uint64_t now = 77 * NS_PER_S, began = now;
    while (progress_judge(&p, &r, now) && now - began < 10000 * NS_PER_S)
        now += 250 * NS_PER_MS;
    return clock_ms_between(began, now);
}

START_TEST(test_progress_of_a_running_step_is_waited_for_by_its_prediction)
{
    struct progress_report r = {.n_steps = 9, .n_taken = 5, .n_sent = 5, .busy = true, .expected_ms = 10};
    ck_assert_double_le(fabs(believed_ms(r) - 3050), 251);
    r.expected_ms = 20000; /* a step of 20 s that was predicted as 20 s */
    ck_assert_double_ge(believed_ms(r), 100000);
    r.expected_ms = 0; /* the worker is between two steps */
    ck_assert_double_le(fabs(believed_ms(r) - 3000), 251);
    r.busy = false; /* the worker has nothing to do */
    ck_assert_double_ge(believed_ms(r), 1e7 - 1000);
}
END_TEST

START_TEST(test_progress_of_messages_that_nobody_takes_is_missed_in_an_idle_worker_and_in_one_that_steps)
{
    struct progress_report r = {.n_steps = 9, .n_taken = 5, .n_sent = 6};
    ck_assert_double_le(fabs(believed_ms(r) - 3000), 251);
    struct progress p = {0};
    uint64_t now = NS_PER_S;
    bool moves = true;
    r.busy = true;
    for (int i = 0; i < 20 && moves; i++, now += 250 * NS_PER_MS) {
        moves = progress_judge(&p, &r, now);
        r.n_steps++;
        r.n_sent++; /* a later message does not make the first one younger */
    }
    ck_assert(!moves);
    r.n_taken = r.n_sent;
    ck_assert(progress_judge(&p, &r, now));
}
END_TEST

/* A machine that many processes share: 600 messages came at once and are taken in ten seconds. */
START_TEST(test_progress_of_messages_that_are_taken_slowly_is_progress)
{
    struct progress p = {0};
    struct progress_report r = {.n_steps = 9, .n_taken = 400, .n_sent = 1000};
    uint64_t now = NS_PER_S;
    for (; r.n_taken < r.n_sent; r.n_taken += 15, now += 250 * NS_PER_MS)
        ck_assert(progress_judge(&p, &r, now));
    r.n_taken = r.n_sent - 1; /* the last one is not taken */
    for (int i = 0; i < 12; i++, now += 250 * NS_PER_MS)
        ck_assert(progress_judge(&p, &r, now));
    now += 250 * NS_PER_MS;
    ck_assert(!progress_judge(&p, &r, now));
}
END_TEST

START_TEST(test_progress_of_a_step_that_ran_before_the_router_came_counts)
{
    struct progress p = {0};
    struct progress_report r = {.n_steps = 9, .n_taken = 1, .n_sent = 1, .expected_ms = 10, .running_ms = 60000};
    ck_assert(progress_judge(&p, &r, NS_PER_S));
    ck_assert(!progress_judge(&p, &r, NS_PER_S + 250 * NS_PER_MS));
    r.n_steps++;
    r.running_ms = 0;
    ck_assert(progress_judge(&p, &r, NS_PER_S + 500 * NS_PER_MS));
}
END_TEST

START_TEST(test_progress_that_was_never_measured_gets_a_minute)
{
    struct cost_model m = model();
    struct progress_past past = {0};
    struct cost_step p = prompt(0), d = decode(0);
    ck_assert_double_ge(progress_expect_ms(&past, &m, &p), 12000);
    for (int i = 0; i < PROGRESS_MEASURED; i++) {
        struct cost_step s = prompt(2);
        progress_measured(&past, &m, &s);
    }
    ck_assert_double_le(progress_expect_ms(&past, &m, &p), 3);
    /* A kind of step that was never measured. */
    ck_assert_double_ge(progress_expect_ms(&past, &m, &d), 12000);
}
END_TEST

START_TEST(test_progress_of_a_worker_a_thousand_times_slower_than_its_guess_is_believed)
{
    struct cost_model m = model();
    struct progress_past past = {0};
    for (int i = 0; i < 40; i++) {
        struct cost_step s = prompt(20000);
        double limit = PROGRESS_PATIENCE_MS + PROGRESS_TIMES * progress_expect_ms(&past, &m, &s);
        ck_assert_msg(limit > s.ms, "step %d: %g", i, limit);
        progress_measured(&past, &m, &s);
        m = cost_observe(m, &s);
    }
    struct cost_step s = prompt(0);
    ck_assert_double_le(progress_expect_ms(&past, &m, &s), 60000); /* this kind is known by now */
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("progress");
    TCase *t = tcase_create("progress");
    tcase_add_test(t, test_progress_of_a_running_step_is_waited_for_by_its_prediction);
    tcase_add_test(t, test_progress_of_messages_that_nobody_takes_is_missed_in_an_idle_worker_and_in_one_that_steps);
    tcase_add_test(t, test_progress_of_messages_that_are_taken_slowly_is_progress);
    tcase_add_test(t, test_progress_of_a_step_that_ran_before_the_router_came_counts);
    tcase_add_test(t, test_progress_that_was_never_measured_gets_a_minute);
    tcase_add_test(t, test_progress_of_a_worker_a_thousand_times_slower_than_its_guess_is_believed);
    suite_add_tcase(suite, t);
    return tap_main(suite);
}
