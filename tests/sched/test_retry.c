#include <math.h>

#include "sched/retry.h"
#include "tests/tap.h"

START_TEST(test_budget_is_the_burst_and_a_tenth_of_the_traffic)
{
    struct retry_budget b = {.burst = 20};
    uint64_t now = NS_PER_S;
    uint32_t n = 0;
    for (int i = 0; i < 100; i++)
        retry_budget_first(&b, now);
    while (retry_budget_take(&b, now))
        n++;
    ck_assert_uint_eq(n, 30);
    ck_assert(retry_budget_left(&b, now) < 1);
    for (int i = 0; i < 10; i++)
        retry_budget_first(&b, now);
    ck_assert(retry_budget_take(&b, now));
    ck_assert(!retry_budget_take(&b, now));
}
END_TEST

START_TEST(test_budget_comes_back_with_time_and_never_over_the_burst)
{
    struct retry_budget b = {.burst = 100};
    uint64_t now = NS_PER_S;
    while (retry_budget_take(&b, now)) {
    }
    ck_assert_double_eq_tol(retry_budget_left(&b, now + RETRY_MEMORY_NS), 100 * (1 - exp(-1)), 1e-6);
    ck_assert_double_eq_tol(retry_budget_left(&b, now + 100 * RETRY_MEMORY_NS), 100, 1e-6);
}
END_TEST

START_TEST(test_budget_that_everything_asks_for_allows_a_tenth)
{
    struct retry_budget b = {.burst = 10};
    uint32_t n = 0;
    for (uint64_t i = 0; i < 60000; i++) { /* 1000 requests a second for a minute, which all fail */
        retry_budget_first(&b, i * NS_PER_MS);
        n += retry_budget_take(&b, i * NS_PER_MS);
    }
    ck_assert_uint_ge(n, 6000);
    ck_assert_uint_le(n, 6000 + 10 * 7 + 1); /* there is one burst every ten seconds */
}
END_TEST

START_TEST(test_breaker_opens_after_failures_and_tries_one_at_a_time)
{
    struct breaker b = {0};
    uint64_t now = NS_PER_S;
    for (int i = 0; i < BREAKER_FAILURES - 1; i++)
        breaker_failed(&b, now);
    ck_assert(breaker_usable(&b, now));
    breaker_failed(&b, now);
    ck_assert_int_eq(b.state, BREAKER_OPEN);
    for (uint64_t wait = BREAKER_WAIT_NS, i = 0; i < 4; i++) {
        ck_assert(!breaker_usable(&b, now + wait - 1));
        now += wait;
        ck_assert(breaker_usable(&b, now));
        ck_assert(breaker_used(&b));
        ck_assert(!breaker_usable(&b, now)); /* one try at a time */
        ck_assert(!breaker_used(&b));
        breaker_failed(&b, now);
        wait = 2 * wait < BREAKER_LONGEST_NS ? 2 * wait : BREAKER_LONGEST_NS;
    }
    now += BREAKER_LONGEST_NS;
    breaker_used(&b);
    breaker_try(&b, now); /* the client of the try left, so another request may try */
    ck_assert(breaker_usable(&b, now));
    ck_assert(breaker_used(&b));
    breaker_succeeded(&b);
    ck_assert_int_eq(b.state, BREAKER_CLOSED);
    ck_assert(breaker_usable(&b, now));
}
END_TEST

START_TEST(test_breaker_forgives_what_mostly_succeeds_and_what_is_long_ago)
{
    struct breaker b = {0};
    for (int i = 0; i < 100; i++) {
        breaker_failed(&b, NS_PER_S);
        breaker_succeeded(&b);
    }
    ck_assert_int_eq(b.state, BREAKER_CLOSED);
    for (uint64_t i = 1; i < 100; i++)
        breaker_failed(&b, i * (BREAKER_WINDOW_NS + 1));
    ck_assert_int_eq(b.state, BREAKER_CLOSED);
    for (int i = 0; i < BREAKER_FAILURES; i++)
        breaker_failed(&b, 2000 * NS_PER_S);
    ck_assert(!breaker_usable(&b, 2000 * NS_PER_S));
    breaker_try(&b, 2000 * NS_PER_S); /* the worker was started anew */
    ck_assert(breaker_usable(&b, 2000 * NS_PER_S));
    ck_assert_int_eq(b.state, BREAKER_OPEN); /* usable for one try only */
}
END_TEST

START_TEST(test_breaker_that_is_tripped_is_open_at_once_and_tries_again_later)
{
    struct breaker b = {BREAKER_CLOSED};
    breaker_trip(&b, NS_PER_S);
    ck_assert_int_eq(b.state, BREAKER_OPEN);
    ck_assert(!breaker_usable(&b, NS_PER_S + BREAKER_WAIT_NS - 1));
    ck_assert(breaker_usable(&b, NS_PER_S + BREAKER_WAIT_NS));
    ck_assert(breaker_used(&b));
    breaker_succeeded(&b);
    ck_assert_int_eq(b.state, BREAKER_CLOSED);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("retry");
    TCase *t = tcase_create("retry");
    tcase_add_test(t, test_budget_is_the_burst_and_a_tenth_of_the_traffic);
    tcase_add_test(t, test_budget_comes_back_with_time_and_never_over_the_burst);
    tcase_add_test(t, test_budget_that_everything_asks_for_allows_a_tenth);
    tcase_add_test(t, test_breaker_opens_after_failures_and_tries_one_at_a_time);
    tcase_add_test(t, test_breaker_forgives_what_mostly_succeeds_and_what_is_long_ago);
    tcase_add_test(t, test_breaker_that_is_tripped_is_open_at_once_and_tries_again_later);
    suite_add_tcase(s, t);
    return tap_main(s);
}
