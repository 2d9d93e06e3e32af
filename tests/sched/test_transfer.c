/* Hand-overs: the time after the prefill is learned from flows; a stall teaches little. */
#include <math.h>

#include "base/random.h"
#include "sched/transfer.h"
#include "tests/tap.h"

static const double FIXED_MS = 1, PER_1000 = 2.6; /* for 128 KiB a token at 50 GB/s */

static double uniform(uint64_t i, uint64_t what)
{
    return random_unit(random_at(47, i, what));
}

/* Prompts of all lengths, many of them mostly cached, so that their pages outlast the prefill. */
static struct transfer some_transfer(uint64_t i)
{
    double tokens = 200 + 30000 * uniform(i, 0), computed = uniform(i, 1) < 0.5 ? tokens : 0.05 * tokens;
    return (struct transfer){tokens, fmin(computed, 4096) / 4, 1 + floor(3 * uniform(i, 2)), 3 + computed * 0.03};
}

static double truth(const struct transfer *t, double per_1000)
{
    double each = per_1000 * t->flows * 1e-3;
    return FIXED_MS + fmax(each * t->last, each * t->tokens - t->hidden_ms);
}

static double worst_error(const struct transfer_model *m, double per_1000)
{
    double worst = 0;
    for (uint64_t i = 1000; i < 1200; i++) {
        struct transfer t = some_transfer(i);
        worst = fmax(worst, fabs(transfer_exposed_ms(m, &t) / truth(&t, per_1000) - 1));
    }
    return worst;
}

static void learn(struct transfer_model *m, double per_1000, uint64_t from, uint64_t n)
{
    for (uint64_t i = from; i < from + n; i++) {
        struct transfer t = some_transfer(i);
        *m = transfer_observe(*m, &t, truth(&t, per_1000) * (0.9 + 0.2 * uniform(i, 3)));
    }
}

START_TEST(test_transfer_learns_a_port_and_follows_it)
{
    struct transfer_model m = transfer_make();
    learn(&m, PER_1000, 0, 200);
    ck_assert_msg(worst_error(&m, PER_1000) < 0.2, "%f", worst_error(&m, PER_1000));
    ck_assert_double_lt(m.exposed_error.error, 0.15);
    learn(&m, 10 * PER_1000, 200, 400);
    ck_assert_msg(worst_error(&m, 10 * PER_1000) < 0.25, "%f", worst_error(&m, 10 * PER_1000));
    learn(&m, PER_1000, 600, 400);
    ck_assert_msg(worst_error(&m, PER_1000) < 0.25, "%f", worst_error(&m, PER_1000));
}
END_TEST

/* The decode worker was stopped for seconds. Transfers that never needed the port must not teach anything
 * wrong. */
START_TEST(test_transfer_learns_little_from_a_stall)
{
    struct transfer_model m = transfer_make();
    learn(&m, PER_1000, 0, 200);
    for (uint64_t i = 0; i < 3; i++) {
        struct transfer t = some_transfer(5000 + i);
        m = transfer_observe(m, &t, 10000);
    }
    learn(&m, PER_1000, 300, 60);
    ck_assert_msg(worst_error(&m, PER_1000) < 0.3, "%f", worst_error(&m, PER_1000));
    for (uint64_t i = 0; i < 500; i++) {
        struct transfer nothing = {0, 0, 1, 100 * uniform(i, 4)};
        m = transfer_observe(m, &nothing, FIXED_MS);
    }
    ck_assert_msg(worst_error(&m, PER_1000) < 0.3, "%f", worst_error(&m, PER_1000));
}
END_TEST

START_TEST(test_transfer_gap_is_what_is_exposed_and_the_steps_after_it)
{
    struct transfer_model m = transfer_make();
    ck_assert_double_eq_tol(transfer_gap_ms(&m, 5, 10, 0), 15, 1e-9);
    ck_assert_double_eq_tol(transfer_gap_ms(&m, 5, 10, 1), 20, 1e-9); /* half of the running step is left */
    for (int i = 0; i < 200; i++)
        m = transfer_observe_gap(m, transfer_gap_ms(&m, 5, 10, 1), 23);
    ck_assert_double_eq_tol(transfer_gap_ms(&m, 5, 10, 1), 23, 0.1);
    ck_assert_double_lt(m.gap_error.error, 0.02);
    m = transfer_observe_gap(m, transfer_gap_ms(&m, 5, 10, 1), 60000);
    ck_assert_double_lt(transfer_gap_ms(&m, 5, 10, 1), 26);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("transfer");
    TCase *t = tcase_create("transfer");
    tcase_add_test(t, test_transfer_learns_a_port_and_follows_it);
    tcase_add_test(t, test_transfer_learns_little_from_a_stall);
    tcase_add_test(t, test_transfer_gap_is_what_is_exposed_and_the_steps_after_it);
    suite_add_tcase(s, t);
    return tap_main(s);
}
