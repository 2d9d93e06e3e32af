#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "sched/batching.h"
#include "sched/hot.h"
#include "sched/ring.h"
#include "sched/rls.h"
#include "tests/tap.h"

START_TEST(test_batching_decodes_first_then_prompts_in_order)
{
    const struct batch_item items[] = {{300, false, 128, 100}, {1, true, 1, 1}, {50, false, 128, 128}, {1, true, 1, 1}};
    uint32_t rows[4];
    ck_assert_uint_eq(batching_plan(items, 4, 200, rows), 152);
    ck_assert_uint_eq(rows[0], 100); /* beside two that decode */
    ck_assert_uint_eq(rows[1], 1);
    ck_assert_uint_eq(rows[2], 50);
    ck_assert_uint_eq(rows[3], 1);
    ck_assert_uint_eq(batching_plan(items, 4, 100, rows), 100);
    ck_assert_uint_eq(rows[0], 98);
    ck_assert_uint_eq(rows[2], 0);
    ck_assert_uint_eq(batching_plan(items, 1, 200, rows), 128); /* alone */
    ck_assert_uint_eq(batching_plan(items + 1, 3, 2, rows), 2);
    ck_assert_uint_eq(rows[1], 0);
}
END_TEST

START_TEST(test_batching_lets_prompts_share_a_step_up_to_its_fill)
{
    const struct batch_item items[] = {{200, false, 8192, 1}, {200, false, 8192, 1}, {200, false, 8192, 1}};
    const struct batch_item large[] = {{5000, false, 8192, 1}, {200, false, 8192, 1}};
    uint32_t rows[3];
    ck_assert_uint_eq(batching_plan(items, 3, 8192, rows), BATCHING_FILL);
    ck_assert_uint_eq(rows[2], BATCHING_FILL - 400);
    ck_assert_uint_eq(batching_plan(large, 2, 8192, rows), 5000);
    ck_assert_uint_eq(rows[1], 0);
}
END_TEST

static struct block_key key(uint32_t chain, uint32_t i)
{
    struct block_key k = {{0}};
    uint64_t a = random_at(9, chain, i), b = random_at(10, chain, i);
    memcpy(k.b, &a, 8);
    memcpy(k.b + 8, &b, 8);
    return k;
}

START_TEST(test_rls_learns_a_line_and_follows_when_it_changes)
{
    struct rls m = rls_make(3, (const double[]){2, 0.2, 0.5}, 0.1);
    const double prior[] = {1, 10, 10};
    ck_assert(fabs(rls_predict(&m, prior) - 9) < 1e-9);
    for (uint32_t i = 0; i < 400; i++) {
        double a = (double)(random_at(3, i, 0) % 60), b = (double)(random_at(3, i, 1) % 60);
        double noise = random_unit(random_at(3, i, 2)) - 0.5;
        m = rls_observe(m, (const double[]){1, a, b}, 5 + 0.1 * a + (i < 200 ? 1.0 : 3.0) * b + noise);
        if (i == 199)
            ck_assert_msg(fabs(m.w[0] - 5) < 0.5 && fabs(m.w[1] - 0.1) < 0.02 && fabs(m.w[2] - 1) < 0.02, "%f %f %f",
                          m.w[0], m.w[1], m.w[2]);
    }
    ck_assert_msg(fabs(m.w[2] - 3) < 0.1, "%f", m.w[2]);
    for (uint32_t i = 0; i < 5000; i++) /* the same sample for ever: nothing runs away */
        m = rls_observe(m, (const double[]){1, 30, 0}, 8);
    ck_assert(fabs(rls_predict(&m, (const double[]){1, 30, 0}) - 8) < 0.01);
    ck_assert(fabs(rls_predict(&m, (const double[]){1, 0, 30})) < 500);
}
END_TEST

START_TEST(test_ring_moves_only_the_share_of_a_store_that_comes_or_goes)
{
    enum { STORES = 5, SEGMENTS = 20000 };
    uint64_t ids[STORES];
    uint32_t counts[STORES] = {0}, n_moved = 0;
    for (uint32_t i = 0; i < STORES; i++) {
        char name[16];
        snprintf(name, sizeof(name), "store-%u", i);
        ids[i] = ring_id(name, strlen(name));
    }
    for (uint32_t s = 0; s < SEGMENTS; s++) {
        struct block_key k = key(s, 0);
        uint32_t owner = ring_place(ids, STORES, &k, 0), copy = ring_place(ids, STORES, &k, 1);
        uint32_t before = ring_place(ids, STORES - 1, &k, 0); /* without the last one */
        counts[owner]++;
        ck_assert_uint_ne(owner, copy);
        ck_assert(before == owner || owner == STORES - 1); /* nothing moves but to the new one */
        if (owner == STORES - 1)
            ck_assert_uint_eq(before, copy); /* the next in line takes over what a lost one had */
        n_moved += before != owner;
    }
    for (uint32_t i = 0; i < STORES; i++)
        ck_assert_msg(counts[i] > SEGMENTS / STORES * 9 / 10 && counts[i] < SEGMENTS / STORES * 11 / 10, "%u: %u", i,
                      counts[i]);
    ck_assert_uint_eq(n_moved, counts[STORES - 1]);
}
END_TEST

START_TEST(test_hot_counts_what_comes_often_and_forgets)
{
    struct hot *h = mem_zalloc(sizeof(*h));
    struct block_key often = key(1, 1);
    uint64_t now = NS_PER_S;
    double count = 0;
    for (uint32_t i = 0; i < 2000; i++, now += NS_PER_MS) { /* strangers share its slots now and then */
        struct block_key once = key(2, i);
        ck_assert(hot_count(h, &once, now) <= 2);
        count = hot_count(h, &often, now);
        ck_assert(count <= i + 1);
    }
    ck_assert_msg(count > 1900, "%f", count);
    ck_assert(hot_count(h, &often, now + 10 * HOT_HALF_LIFE_NS) < 4);
    free(h);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("sched");
    TCase *t = tcase_create("sched");
    tcase_set_timeout(t, 30);
    tcase_add_test(t, test_batching_decodes_first_then_prompts_in_order);
    tcase_add_test(t, test_batching_lets_prompts_share_a_step_up_to_its_fill);
    tcase_add_test(t, test_rls_learns_a_line_and_follows_when_it_changes);
    tcase_add_test(t, test_ring_moves_only_the_share_of_a_store_that_comes_or_goes);
    tcase_add_test(t, test_hot_counts_what_comes_often_and_forgets);
    suite_add_tcase(s, t);
    return tap_main(s);
}
