/* The control of a row of machines by its samples: what it asks for and when, by hand and on synthetic
 * rows. */
#include <math.h>

#include "base/random.h"
#include "sched/power.h"
#include "tests/tap.h"

#define SAMPLE_NS (2 * NS_PER_S)

struct row { /* the state of the control, and the time of the next sample */
    struct power_state s;
    uint64_t now_ns;
};

static void sample(struct row *r, double share)
{
    r->s = power_observe(r->s, share, r->now_ns);
    r->now_ns += SAMPLE_NS;
}

/* Gives samples of `share` for for_ns; the last one is at the end of that time. */
static void stay_at(struct row *r, double share, uint64_t for_ns)
{
    for (uint64_t end = r->now_ns + for_ns; r->now_ns <= end;)
        sample(r, share);
}

static void must_be(const struct row *r, uint32_t asked, uint32_t held)
{
    ck_assert_msg(r->s.asked == asked && r->s.held == held,
                  "after %.0f s: %u asked for and %u in effect, not %u and %u", (double)(r->now_ns - SAMPLE_NS) * 1e-9,
                  r->s.asked, r->s.held, asked, held);
}

START_TEST(test_power_asks_for_more_as_a_row_gets_nearer_to_its_budget)
{
    static const struct {
        double share;
        uint32_t asked;
    } FROM_REST[] = {{0, 0}, {0.799, 0},           {0.8, 1},        {0.889, 1}, {0.89, 2},
                     {1, 2}, {1.001, POWER_BRAKE}, {9, POWER_BRAKE}};
    for (size_t i = 0; i < sizeof(FROM_REST) / sizeof(FROM_REST[0]); i++) {
        struct row r = {.now_ns = 0};
        sample(&r, FROM_REST[i].share);
        must_be(&r, FROM_REST[i].asked, 0);
    }
}
END_TEST

START_TEST(test_power_a_clock_holds_only_after_its_delay)
{
    struct row r = {.now_ns = 7 * NS_PER_S};
    sample(&r, 0.82);
    stay_at(&r, 0.82, POWER_DELAY_NS - 2 * SAMPLE_NS);
    must_be(&r, 1, 0);
    sample(&r, 0.82);
    must_be(&r, 1, 1);
    struct power_state early = {.asked = 1, .asked_ns = 100}, late = early;
    early = power_observe(early, 0.82, 100 + POWER_DELAY_NS - 1);
    late = power_observe(late, 0.82, 100 + POWER_DELAY_NS);
    ck_assert(early.held == 0 && late.held == 1);
}
END_TEST

START_TEST(test_power_a_higher_level_takes_the_place_of_one_that_is_awaited)
{
    struct row r = {.now_ns = 0};
    sample(&r, 0.82);
    stay_at(&r, 0.82, 10 * NS_PER_S);
    uint64_t asked_ns = r.now_ns;
    stay_at(&r, 0.9, POWER_DELAY_NS - SAMPLE_NS);
    must_be(&r, 2, 0);
    ck_assert_uint_eq(r.s.asked_ns, asked_ns); /* it was asked for once, although each sample would ask */
    sample(&r, 0.9);
    must_be(&r, 2, 2);
}
END_TEST

START_TEST(test_power_others_go_down_only_when_the_first_are_down_and_that_is_not_enough)
{
    struct row r = {.now_ns = 0};
    stay_at(&r, 0.95, POWER_DELAY_NS);
    must_be(&r, 2, 2); /* this sample was still drawn at the former clocks */
    struct row enough = r;
    stay_at(&enough, 0.88, 4 * POWER_DELAY_NS);
    must_be(&enough, 2, 2);
    sample(&r, 0.89);
    must_be(&r, 3, 2);
    stay_at(&r, 0.89, POWER_DELAY_NS - SAMPLE_NS);
    must_be(&r, 3, 3);
    ck_assert(power_clocks_at(2).others == 1 && power_clocks_at(3).others < 1);
}
END_TEST

START_TEST(test_power_levels_are_left_only_well_below_where_they_began)
{
    static const struct {
        uint32_t level;
        double stays, leaves;
        uint32_t then;
    } CASES[] = {{1, 0.75, 0.749, 0}, {2, 0.84, 0.839, 1}, {2, 0.84, 0.7, 0}, {3, 0.84, 0.839, 1}, {3, 0.84, 0.7, 0}};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        uint32_t level = CASES[i].level;
        struct row r = {.s = {.asked = level, .held = level}, .now_ns = 1};
        stay_at(&r, CASES[i].stays, 4 * POWER_DELAY_NS);
        must_be(&r, level, level);
        sample(&r, CASES[i].leaves);
        must_be(&r, CASES[i].then, level);
        stay_at(&r, CASES[i].leaves, POWER_DELAY_NS - SAMPLE_NS);
        must_be(&r, CASES[i].then, CASES[i].then);
    }
}
END_TEST

START_TEST(test_power_what_was_asked_for_comes_though_the_row_calmed_down)
{
    struct row r = {.now_ns = 0};
    sample(&r, 0.9);
    stay_at(&r, 0.5, POWER_DELAY_NS - SAMPLE_NS);
    must_be(&r, 2, 2);
    sample(&r, 0.5);
    must_be(&r, 0, 2);
    stay_at(&r, 0.5, POWER_DELAY_NS - 3 * SAMPLE_NS);
    must_be(&r, 0, 2);
    sample(&r, 0.86); /* more than the level asked for last */
    must_be(&r, 1, 2);
    sample(&r, 0.9); /* level 2 is still in effect */
    must_be(&r, 3, 2);
}
END_TEST

START_TEST(test_power_brake_comes_soon_and_ends_with_all_clocks_down)
{
    for (uint32_t level = 0; level < POWER_BRAKE; level++) {
        struct row r = {.s = {.asked = level, .held = level}, .now_ns = 1};
        sample(&r, 1.01);
        must_be(&r, POWER_BRAKE, level);
        stay_at(&r, 0.5, POWER_BRAKE_NS); /* the brake comes even if the row is calm by then */
        must_be(&r, POWER_BRAKE, POWER_BRAKE);
        struct row full = r;
        stay_at(&full, 0.95, 4 * POWER_DELAY_NS);
        must_be(&full, POWER_BRAKE, POWER_BRAKE);
        sample(&r, 0.949);
        must_be(&r, 3, POWER_BRAKE);
        stay_at(&r, 0.3, POWER_DELAY_NS - SAMPLE_NS); /* still at the brake: no less than level 3 */
        must_be(&r, 3, 3);
    }
}
END_TEST

/* Power of a row with an unknown demand that follows its clocks: n machines, of which half go first. */
static double share_of(double demand, uint32_t level)
{
    struct power_clocks c = power_clocks_at(level);
    return demand * (0.2 + 0.8 * (power_draw_factor(c.first) + power_draw_factor(c.others)) / 2);
}

START_TEST(test_power_a_row_that_flutters_is_held_below_its_budget)
{
    uint32_t over[2] = {0}, brakes = 0;
    for (uint64_t seed = 0; seed < 20; seed++) {
        struct row r = {.now_ns = 0};
        /* Two hours in which the demand rises and falls once, with variations of 0.06 around that. */
        for (uint64_t i = 0; i < 3600; i++) {
            double demand =
                0.95 - 0.3 * cos((double)i / 3600 * 2 * M_PI) + 0.06 * (2 * random_unit(random_at(seed, i, 0)) - 1);
            demand = fmin(demand, 1.15);
            bool was_braked = r.s.asked == POWER_BRAKE;
            over[0] += demand > 1;
            over[1] += share_of(demand, r.s.held) > 1;
            sample(&r, share_of(demand, r.s.held));
            brakes += r.s.asked == POWER_BRAKE && !was_braked;
        }
        ck_assert_uint_eq(r.s.held, 0);
    }
    ck_assert_msg(over[0] > 20000 && over[1] == 0 && brakes == 0,
                  "%u samples over the budget by demand, %u in truth, %u brakes", over[0], over[1], brakes);
}
END_TEST

START_TEST(test_power_asks_for_no_less_when_more_is_drawn)
{
    for (uint64_t i = 0; i < 100000; i++) {
        struct power_state s = {.asked = (uint32_t)(random_unit(random_at(1, i, 0)) * POWER_LEVELS),
                                .held = (uint32_t)(random_unit(random_at(1, i, 1)) * POWER_LEVELS)};
        uint64_t now = (uint64_t)(random_unit(random_at(1, i, 2)) * 2 * POWER_DELAY_NS);
        double share = 1.2 * random_unit(random_at(1, i, 3)), more = share + 0.3 * random_unit(random_at(1, i, 4));
        struct power_state less = power_observe(s, share, now), most = power_observe(s, more, now);
        ck_assert_msg(most.asked >= less.asked && most.held == less.held,
                      "from %u, %u in effect: %f asks for %u, %f for %u", s.asked, s.held, share, less.asked, more,
                      most.asked);
        ck_assert(less.held == s.held || less.held == s.asked);
    }
}
END_TEST

START_TEST(test_power_lower_clocks_take_longer_and_draw_less)
{
    ck_assert(power_prefill_factor(1) == 1 && power_decode_factor(1) == 1 && power_draw_factor(1) == 1);
    for (double clock = 0.2; clock < 1; clock += 0.01) {
        double next = clock + 0.01;
        ck_assert(power_prefill_factor(clock) > power_prefill_factor(next));
        ck_assert(power_decode_factor(clock) > power_decode_factor(next));
        ck_assert(power_draw_factor(clock) < power_draw_factor(next));
        ck_assert(power_decode_factor(clock) < power_prefill_factor(clock));
    }
    for (uint32_t level = 1; level < POWER_LEVELS; level++) {
        struct power_clocks now = power_clocks_at(level), before = power_clocks_at(level - 1);
        ck_assert(now.first <= before.first && now.others <= before.others && now.first <= now.others);
        ck_assert(now.first < before.first || now.others < before.others);
    }
    double first = power_clocks_at(2).first; /* a fifth of the peak for at most 7 % */
    ck_assert(fabs(0.2 + 0.8 * power_draw_factor(first) - 0.8) < 0.01 && power_decode_factor(first) < 1.07);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("power");
    TCase *t = tcase_create("power");
    tcase_add_test(t, test_power_asks_for_more_as_a_row_gets_nearer_to_its_budget);
    tcase_add_test(t, test_power_a_clock_holds_only_after_its_delay);
    tcase_add_test(t, test_power_a_higher_level_takes_the_place_of_one_that_is_awaited);
    tcase_add_test(t, test_power_others_go_down_only_when_the_first_are_down_and_that_is_not_enough);
    tcase_add_test(t, test_power_levels_are_left_only_well_below_where_they_began);
    tcase_add_test(t, test_power_what_was_asked_for_comes_though_the_row_calmed_down);
    tcase_add_test(t, test_power_brake_comes_soon_and_ends_with_all_clocks_down);
    tcase_add_test(t, test_power_a_row_that_flutters_is_held_below_its_budget);
    tcase_add_test(t, test_power_asks_for_no_less_when_more_is_drawn);
    tcase_add_test(t, test_power_lower_clocks_take_longer_and_draw_less);
    suite_add_tcase(s, t);
    return tap_main(s);
}
