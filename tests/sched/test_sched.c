#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/random.h"
#include "sched/batching.h"
#include "sched/drain.h"
#include "sched/hot.h"
#include "sched/margin.h"
#include "sched/ring.h"
#include "sched/rls.h"
#include "tests/tap.h"

static struct cost_model model(void)
{
    struct cost_profile p;
    ck_assert_int_eq(cost_profile_parse("3526,18.5,0.000535:5228,0.0293,8.088", &p, NULL), TD_OK);
    return cost_make(&p);
}

START_TEST(test_batching_decodes_first_then_prompts_in_order)
{
    const struct cost_model m = model();
    const struct batch_item items[] = {
        {300, 0, false, 100, 0}, {1, 1000, true, 1, INFINITY}, {50, 0, false, 128, 0}, {1, 0, true, 1, INFINITY}};
    uint32_t rows[4];
    ck_assert_uint_eq(batching_plan(items, 4, 200, &m, 0, rows), 152);
    ck_assert_uint_eq(rows[0], 100);
    ck_assert_uint_eq(rows[1], 1);
    ck_assert_uint_eq(rows[2], 50);
    ck_assert_uint_eq(rows[3], 1);
    ck_assert_uint_eq(batching_plan(items, 4, 100, &m, 0, rows), 100);
    ck_assert_uint_eq(rows[0], 98);
    ck_assert_uint_eq(rows[2], 0);
    ck_assert_uint_eq(batching_plan(items, 1, 200, &m, 0, rows), 100); /* alone */
    ck_assert_uint_eq(batching_plan(items + 1, 3, 2, &m, 0, rows), 2);
    ck_assert_uint_eq(rows[1], 0);
}
END_TEST

START_TEST(test_batching_lets_prompts_share_a_step_up_to_its_fill)
{
    const struct cost_model m = model();
    const struct batch_item items[] = {{200, 0, false, 8192, 0}, {200, 0, false, 8192, 0}, {200, 0, false, 8192, 0}};
    const struct batch_item large[] = {{5000, 0, false, 8192, 0}, {200, 0, false, 8192, 0}};
    uint32_t rows[3];
    ck_assert_uint_eq(batching_plan(items, 3, 8192, &m, 0, rows), BATCHING_FILL);
    ck_assert_uint_eq(rows[2], BATCHING_FILL - 400);
    ck_assert_uint_eq(batching_plan(large, 2, 8192, &m, 0, rows), 5000);
    ck_assert_uint_eq(rows[1], 0);
}
END_TEST

static uint32_t least_of(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static double step_of(const struct cost_model *m, const struct batch_item *items, const uint32_t *rows, uint32_t n)
{
    double tokens = 0, square = 0, batch = 0, context = 0;
    for (uint32_t i = 0; i < n; i++)
        if (items[i].decoding) {
            batch++;
            context += items[i].n_computed;
        } else {
            tokens += rows[i];
            square += rows[i] * (rows[i] + 2.0 * items[i].n_computed);
        }
    return cost_step_ms(m, tokens, square, batch, context);
}

/* A step takes as many prompt tokens as fit within the time of the sequence that is closest to its limit, and
 * not one more. */
START_TEST(test_batching_steps_take_the_time_that_limits_leave)
{
    const struct cost_model m = model();
    for (uint64_t seed = 0; seed < 500; seed++) {
        struct batch_item items[20];
        uint32_t rows[20], n = 2 + (uint32_t)(random_at(5, seed, 0) % 18);
        double room = 5 + 200 * random_unit(random_at(5, seed, 1)), least = INFINITY;
        for (uint32_t i = 0; i < n; i++) {
            items[i] = (struct batch_item){1, (uint32_t)(random_at(6, seed, i) % 20000), i > 1, 1, INFINITY};
            if (i > 1) {
                items[i].room_ms = room * (1 + random_unit(random_at(7, seed, i)));
                least = fmin(least, items[i].room_ms);
            } else {
                items[i].chunk = 4096;
                items[i].n_pending = 1 + (uint32_t)(random_at(8, seed, i) % 6000);
            }
        }
        double starved = 100 * random_unit(random_at(5, seed, 2));
        batching_plan(items, n, 1 << 20, &m, starved, rows);
        double took = step_of(&m, items, rows, n);
        uint32_t none[20] = {0}, most = items[0].n_pending < 4096 ? items[0].n_pending : 4096;
        double decode = step_of(&m, items, none, n), floor = decode + BATCHING_FLOOR * (starved + decode);
        ck_assert_msg(took <= fmax(least, floor) + 1e-6, "%g over %g", took, fmax(least, floor));
        ck_assert(rows[0] >= BATCHING_LEAST || rows[0] == most || !rows[0]);
        if (rows[0] < most) {
            uint32_t more[20] = {rows[0] ? rows[0] + 1 : least_of(BATCHING_LEAST, most)};
            ck_assert(step_of(&m, items, more, n) > fmax(least, floor) - 1e-6);
        }
    }
}
END_TEST

/*
 * A prompt of any length gets through beside a batch under a limit, and the batch keeps its limit unless it
 * breaks it alone. This also holds if the fixed part of a chunk is most of the limit, or more than it. The
 * prompt gets the predicted share of the time.
 */
START_TEST(test_batching_keeps_limits_while_prompts_pass)
{
    static const struct {
        const char *profile;
        double limit;
    } MACHINES[] = {{"3526,18.5,0.000535:5228,0.0293,8.088", 30},
                    {"43300,160,0.001:16500,0.05,300", 60},
                    {"43300,160,0.001:16500,0.05,300", 45}, /* a full batch alone takes 40 ms */
                    {"16500,18.6,0:5740,0.05,0", 12.94}};
    const uint32_t batch = (uint32_t)(_i % 4) * 20;
    const double limit = MACHINES[_i / 4].limit;
    struct cost_profile p;
    ck_assert_int_eq(cost_profile_parse(MACHINES[_i / 4].profile, &p, NULL), TD_OK);
    const struct cost_model m = cost_make(&p);
    const double decode = cost_decode_ms(&m, batch, 4000.0 * batch);
    struct batch_item items[64] = {{.n_pending = 1}};
    uint32_t rows[64], n_steps = 0;
    double now = 0, starved = 0;
    while (items[0].n_computed < 200000) {
        items[0].n_pending = 200000 - items[0].n_computed;
        items[0].chunk = 4096;
        for (uint32_t i = 1; i <= batch; i++)
            items[i] = (struct batch_item){1, 4000, true, 1, batching_room_ms(limit, n_steps + 1, now)};
        batching_plan(items, batch + 1, 8192, &m, starved, rows);
        double took = step_of(&m, items, rows, batch + 1);
        now += took;
        starved = rows[0] ? 0 : starved + took;
        items[0].n_computed += rows[0];
        n_steps++;
        ck_assert(decode * (1 + BATCHING_FLOOR) > limit || !batch || now / n_steps <= limit);
    }
    double chunk = cost_prefill_ms(&m, 4096, 0, 0);
    double share = batch ? batching_prompt_share(decode, chunk, cost_chunk_ms(&m), cost_shared_ms(&m), limit) : 1;
    double alone = cost_prefill_ms(&m, 200000, 0, 4096);
    ck_assert_msg(fabs(now * share / alone - 1) < 0.15, "%u: %g of %g", batch, now * share, alone);
}
END_TEST

/* Short prompts behind a long one that waits for time do not take that time away: whatever comes, the long
 * one makes progress. */
START_TEST(test_batching_lets_no_prompt_starve_behind_short_ones)
{
    enum { BATCH = 60, N = BATCH + 2, LONG = 20000 };
    struct cost_profile p;
    ck_assert_int_eq(cost_profile_parse("43300,160,0.001:16500,0.05,300", &p, NULL), TD_OK);
    const struct cost_model m = cost_make(&p);
    struct batch_item items[N] = {{.chunk = 4096}, {.chunk = 4096}};
    uint32_t rows[N], n_steps = 0;
    double now = 0, starved = 0;
    while (now < 60000) {
        items[0].n_pending = LONG - items[0].n_computed;
        items[1].n_pending = 30; /* a new short prompt is always there */
        for (uint32_t i = 2; i < N; i++)
            items[i] = (struct batch_item){1, 4000, true, 1, batching_room_ms(45, n_steps + 1, now)};
        batching_plan(items, N, 8192, &m, starved, rows);
        double took = step_of(&m, items, rows, N);
        starved = batching_starves(items, rows, N) ? starved + took : 0;
        items[0].n_computed += rows[0];
        now += took;
        n_steps++;
    }
    ck_assert_msg(items[0].n_computed > 10000, "%u", items[0].n_computed);
}
END_TEST

/* Hours without a queue say nothing about the pace of a queue, and old queues say little. */
START_TEST(test_drain_is_the_pace_of_late_queues)
{
    struct drain d = {0};
    uint64_t now = NS_PER_S;
    ck_assert_double_eq(drain_pace(&d), 0);
    for (int i = 0; i < 20000; i++) { /* each request comes to an empty queue */
        d = drain_begin(d, now);
        d = drain_observe(d, 200, false, now);
        now += NS_PER_S / 5;
    }
    ck_assert_double_eq(drain_pace(&d), 0);
    d = drain_begin(d, now);
    for (int pace = 1; pace <= 3; pace += 2)
        for (int i = 0; i < 300; i++) {
            now += (uint64_t)(100 * pace) * NS_PER_MS;
            d = drain_observe(d, 100, true, now);
        }
    ck_assert_double_eq_tol(drain_pace(&d), 3, 0.1);
}
END_TEST

START_TEST(test_margin_is_the_quantile_of_errors_that_it_says)
{
    for (int scale = 0; scale < 3; scale++) {
        struct margin m = margin_make(0.05, 1), noted = margin_make(0.05, 1);
        double size = (double[]){0.01, 0.05, 0.2}[scale];
        uint32_t above = 0, missed = 0, n = 20000;
        for (uint64_t i = 0; i < 2 * n; i++) {
            double error = size * (random_unit(random_at(3, i, 0)) + random_unit(random_at(3, i, 1)));
            above += i >= n && error > m.value;
            missed += i >= n && error > noted.value;
            m = margin_observe(m, error);
            noted = margin_note(noted, error > noted.value);
        }
        ck_assert_msg(above < 2 * MARGIN_MISSES * n && above > MARGIN_MISSES * n / 2, "%u", above);
        ck_assert_msg(missed < 2 * MARGIN_MISSES * n && missed > MARGIN_MISSES * n / 2, "%u", missed);
        ck_assert(m.value <= 2.2 * size);
    }
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
    for (uint32_t i = 0; i < 5000; i++) /* the same sample for ever must not make a coefficient diverge */
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
        uint32_t before = ring_place(ids, STORES - 1, &k, 0); /* the place without the last store */
        counts[owner]++;
        ck_assert_uint_ne(owner, copy);
        ck_assert(before == owner || owner == STORES - 1); /* blocks only move to the new store */
        if (owner == STORES - 1)
            ck_assert_uint_eq(before, copy); /* the next store in line takes over a lost one's blocks */
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
    for (uint32_t i = 0; i < 2000; i++, now += NS_PER_MS) { /* other tenants sometimes share its slots */
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
    tcase_add_test(t, test_batching_steps_take_the_time_that_limits_leave);
    tcase_add_loop_test(t, test_batching_keeps_limits_while_prompts_pass, 0, 16);
    tcase_add_test(t, test_batching_lets_no_prompt_starve_behind_short_ones);
    tcase_add_test(t, test_drain_is_the_pace_of_late_queues);
    tcase_add_test(t, test_margin_is_the_quantile_of_errors_that_it_says);
    tcase_add_test(t, test_rls_learns_a_line_and_follows_when_it_changes);
    tcase_add_test(t, test_ring_moves_only_the_share_of_a_store_that_comes_or_goes);
    tcase_add_test(t, test_hot_counts_what_comes_often_and_forgets);
    suite_add_tcase(s, t);
    return tap_main(s);
}
