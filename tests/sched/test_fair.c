/* The tenants' queue: whose turn it is, and for how long one that was away is ahead. */
#include <math.h>
#include <string.h>

#include "base/clock.h"
#include "base/random.h"
#include "sched/fair.h"
#include "tests/tap.h"

enum { HALF_LIFE_MS = 30000, N = 200 };

struct item {
    uint64_t tenant;
    double key, amount;
};

static struct fair *open_with(const struct fair_weight *weights, uint32_t n)
{
    return fair_open(HALF_LIFE_MS * NS_PER_MS, weights, n);
}

static uint64_t ms(double at)
{
    return (uint64_t)(at * 1e6);
}

/* Serves the first of the queue; it comes back at once, so that its tenant always waits. */
static struct item *serve(struct fair *f, double at_ms)
{
    fair_begin(f, ms(at_ms));
    struct item *i = fair_next(f);
    fair_remove(f, i->tenant, i->key, i);
    fair_charge(f, i->tenant, i->amount, ms(at_ms));
    i->key = at_ms;
    fair_push(f, i->tenant, i->key, i);
    return i;
}

START_TEST(test_fair_serves_backlogged_tenants_by_their_weights)
{
    const struct fair_weight weights[] = {{1, 1}, {2, 3}};
    struct fair *f = open_with(weights, 2);
    struct item items[20];
    double served[3] = {0};
    for (uint32_t i = 0; i < 20; i++) {
        items[i] = (struct item){1 + i % 2, i, 1};
        fair_push(f, items[i].tenant, items[i].key, &items[i]);
    }
    for (uint32_t i = 0; i < 6000; i++) { /* ten minutes; amounts of all sizes, larger ones for the light tenant */
        struct item *next = serve(f, i * 100.0);
        served[next->tenant] += next->amount;
        next->amount = (next->tenant == 1 ? 2000 : 700) * (0.1 + random_unit(random_at(1, i, 1)));
    }
    double share = served[1] / (served[1] + served[2]);
    ck_assert_msg(fabs(share - 0.25) < 0.25 * 0.05, "%f", share);
    fair_close(f);
}
END_TEST

START_TEST(test_fair_lets_an_idle_tenant_catch_up_but_not_for_ever)
{
    struct fair *f = open_with(NULL, 0);
    struct item busy[4], idle[4];
    for (uint32_t i = 0; i < 4; i++) {
        busy[i] = (struct item){1, i, 100};
        fair_push(f, 1, i, &busy[i]);
    }
    double now = 0;
    for (; now < 20 * HALF_LIFE_MS; now += 100)
        ck_assert_uint_eq(serve(f, now)->tenant, 1);
    for (uint32_t i = 0; i < 4; i++) {
        idle[i] = (struct item){2, now + i, 100};
        fair_push(f, 2, now + i, &idle[i]);
    }
    double until = now;
    while (serve(f, until)->tenant == 2)
        until += 100;
    /* It is owed what counts of the other's use: use u of rate r in steady state is r H / ln 2; it catches up while that halves. */
    ck_assert_msg(until - now > 0.5 * HALF_LIFE_MS && until - now < 1.5 * HALF_LIFE_MS, "%f", until - now);
    uint32_t second = 0;
    for (uint32_t i = 0; i < 1000; i++)
        second += serve(f, until + i * 100.0)->tenant == 2;
    ck_assert_msg(second > 450 && second < 550, "%u", second);
    fair_close(f);
}
END_TEST

START_TEST(test_fair_orders_by_key_inside_a_tenant_and_equals_as_they_came)
{
    struct fair *f = open_with(NULL, 0);
    struct item items[N];
    for (uint32_t i = 0; i < N; i++) {
        items[i] = (struct item){1, (double)(random_at(2, i, 0) % 20), 1};
        fair_push(f, 1, items[i].key, &items[i]);
    }
    fair_begin(f, 0);
    struct item *before = fair_next(f), *next;
    uint32_t n = 1;
    for (; (next = fair_next(f)); before = next, n++) {
        ck_assert(before->key <= next->key);
        ck_assert(before->key < next->key || before < next);
    }
    ck_assert_uint_eq(n, N);
    fair_close(f);
}
END_TEST

START_TEST(test_fair_walk_takes_turns_as_serving_would)
{
    const struct fair_weight weights[] = {{1, 1}, {2, 3}};
    struct fair *f = open_with(weights, 2);
    struct item items[N], *next;
    uint32_t n[3] = {0};
    for (uint32_t i = 0; i < N; i++) {
        items[i] = (struct item){1 + i % 2, i, 10};
        fair_push(f, items[i].tenant, i, &items[i]);
    }
    fair_begin(f, 0);
    for (uint32_t i = 0; i < 80 && (next = fair_next(f)); i++) {
        n[next->tenant]++;
        fair_take(f, next->tenant, next->amount);
    }
    ck_assert(n[1] >= 19 && n[1] <= 21);
    ck_assert(fair_use(f, 1, 0) == 0); /* a walk charges nothing */
    fair_begin(f, 0);
    for (uint32_t i = 0; i < N; i++)
        ck_assert_ptr_nonnull(fair_next(f));
    ck_assert_ptr_null(fair_next(f));
    fair_close(f);
}
END_TEST

START_TEST(test_fair_items_may_leave_in_the_middle_of_a_walk)
{
    for (uint64_t round = 0; round < 300; round++) {
        struct fair *f = open_with(NULL, 0);
        struct item items[N], *next;
        bool in[N], seen[N] = {false};
        for (uint32_t i = 0; i < N; i++) {
            items[i] = (struct item){random_at(round, i, 0) % 5, (double)(random_at(round, i, 1) % 50), 1};
            fair_push(f, items[i].tenant, items[i].key, &items[i]);
            in[i] = true;
        }
        fair_begin(f, 0);
        for (uint32_t step = 0; (next = fair_next(f)); step++) {
            uint32_t i = (uint32_t)(next - items), other = (uint32_t)(random_at(round, step, 2) % N);
            ck_assert(in[i] && !seen[i]);
            seen[i] = true;
            fair_take(f, next->tenant, 1);
            if (step % 2 && in[i]) { /* the one that was given out, and any other */
                fair_remove(f, next->tenant, next->key, next);
                in[i] = false;
            }
            if (step % 3 == 0 && in[other]) {
                fair_remove(f, items[other].tenant, items[other].key, &items[other]);
                in[other] = false;
            }
        }
        for (uint32_t i = 0; i < N; i++)
            ck_assert(seen[i] || !in[i]); /* nobody who stayed was passed over */
        fair_close(f);
    }
}
END_TEST

START_TEST(test_fair_use_halves_and_never_falls_below_zero)
{
    const struct fair_weight weights[] = {{7, 4}};
    struct fair *f = open_with(weights, 1);
    fair_charge(f, 7, 400, 0);
    fair_charge(f, 8, 400, 0);
    ck_assert(fabs(fair_use(f, 7, 0) - 100) < 1e-9 && fabs(fair_use(f, 8, 0) - 400) < 1e-9);
    ck_assert(fabs(fair_use(f, 8, ms(HALF_LIFE_MS)) - 200) < 1e-6);
    fair_charge(f, 8, -1000, ms(HALF_LIFE_MS));
    ck_assert(fair_use(f, 8, ms(HALF_LIFE_MS)) == 0);
    fair_close(f);
    fair_close(NULL);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("fair");
    TCase *t = tcase_create("fair");
    tcase_set_timeout(t, 30);
    tcase_add_test(t, test_fair_serves_backlogged_tenants_by_their_weights);
    tcase_add_test(t, test_fair_lets_an_idle_tenant_catch_up_but_not_for_ever);
    tcase_add_test(t, test_fair_orders_by_key_inside_a_tenant_and_equals_as_they_came);
    tcase_add_test(t, test_fair_walk_takes_turns_as_serving_would);
    tcase_add_test(t, test_fair_items_may_leave_in_the_middle_of_a_walk);
    tcase_add_test(t, test_fair_use_halves_and_never_falls_below_zero);
    suite_add_tcase(s, t);
    return tap_main(s);
}
