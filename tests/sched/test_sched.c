#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "sched/batching.h"
#include "sched/hot.h"
#include "sched/policy.h"
#include "sched/ring.h"
#include "sched/rls.h"
#include "tests/tap.h"

START_TEST(test_batching_decodes_first_then_prompts_in_order)
{
    const struct batch_item items[] = {{300, 0}, {1, 1}, {50, 0}, {1, 1}};
    uint32_t rows[4];
    ck_assert_uint_eq(batching_plan(items, 4, 200, 128, rows), 180);
    ck_assert_uint_eq(rows[0], 128);
    ck_assert_uint_eq(rows[1], 1);
    ck_assert_uint_eq(rows[2], 50);
    ck_assert_uint_eq(rows[3], 1);
    ck_assert_uint_eq(batching_plan(items, 4, 100, 128, rows), 100);
    ck_assert_uint_eq(rows[0], 98);
    ck_assert_uint_eq(rows[2], 0);
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

static struct policy_worker worker(enum worker_role role)
{
    return (struct policy_worker){.role = role,
                                  .usable = true,
                                  .chunk_tokens = 256,
                                  .max_batch = 64,
                                  .total_pages = 1000,
                                  .max_context = 8192,
                                  .prefill_ms_per_token = 0.1,
                                  .decode_ms_per_step = 5};
}

static struct policy_request ask(uint32_t tokens)
{
    return (struct policy_request){
        .n_tokens = tokens, .max_tokens = 100, .block_tokens = 16, .remaining_ms = INT64_MAX};
}

START_TEST(test_policy_prefers_the_worker_that_has_the_prefix)
{
    struct policy_worker w[] = {worker(ROLE_PREFILL), worker(ROLE_PREFILL), worker(ROLE_DECODE)};
    struct policy_request r = ask(1600);
    r.force = FORCE_SPLIT;
    w[1].matched_blocks = 90;
    struct plan p = policy_place(w, 3, &r, 1);
    ck_assert_int_eq(p.kind, PLAN_SPLIT);
    ck_assert_uint_eq(p.prefill, 1);
    ck_assert_uint_eq(p.decode, 2);
    w[1].queued_tokens = 500; /* 50 ms of queue for 144 ms of prefill saved */
    ck_assert_uint_eq(policy_place(w, 3, &r, 1).prefill, 1);
    w[1].matched_blocks = 10; /* now for 16 ms */
    ck_assert_uint_eq(policy_place(w, 3, &r, 1).prefill, 0);
}
END_TEST

START_TEST(test_policy_refuses_what_cannot_be_met_and_says_when)
{
    struct policy_worker w[] = {worker(ROLE_PREFILL), worker(ROLE_DECODE)};
    struct policy_request r = ask(1600);
    r.ttft_ms = 100; /* needs 160 */
    struct plan p = policy_place(w, 2, &r, 1);
    ck_assert_int_eq(p.kind, PLAN_REFUSE);
    ck_assert_ptr_nonnull(strstr(p.reason, "ttft"));
    ck_assert_uint_gt(p.retry_after_ms, 0);
    ck_assert(!p.never);
    r = ask(1600);
    r.remaining_ms = 100;
    ck_assert_int_eq(policy_place(w, 2, &r, 1).kind, PLAN_REFUSE);
    r = ask(1600);
    r.tpot_ms = 1;
    ck_assert_ptr_nonnull(strstr(policy_place(w, 2, &r, 1).reason, "tpot"));
    r = ask(8100);
    p = policy_place(w, 2, &r, 1);
    ck_assert(p.kind == PLAN_REFUSE && p.never);
}
END_TEST

START_TEST(test_policy_waits_for_room_and_never_overfills)
{
    struct policy_worker w[] = {worker(ROLE_PREFILL), worker(ROLE_DECODE)};
    struct policy_request r = ask(1600);
    w[1].reserved_pages = 950;
    ck_assert_int_eq(policy_place(w, 2, &r, 1).kind, PLAN_WAIT);
    w[1].reserved_pages = 0;
    w[1].running = 64;
    ck_assert_int_eq(policy_place(w, 2, &r, 1).kind, PLAN_WAIT);
    w[1].running = 0;
    w[0].queued_tokens = 512;
    r.force = FORCE_SPLIT;
    ck_assert_int_eq(policy_place(w, 2, &r, 1).kind, PLAN_WAIT);
}
END_TEST

START_TEST(test_policy_without_prefill_workers_is_aggregated)
{
    struct policy_worker w[] = {worker(ROLE_DECODE), worker(ROLE_STORE)};
    struct policy_request r = ask(1600);
    ck_assert_int_eq(policy_place(w, 2, &r, 1).kind, PLAN_AGGREGATED);
    r.force = FORCE_SPLIT;
    ck_assert_int_eq(policy_place(w, 2, &r, 1).kind, PLAN_REFUSE);
    w[0].usable = false;
    r.force = FORCE_NONE;
    ck_assert_int_eq(policy_place(w, 2, &r, 1).kind, PLAN_REFUSE);
}
END_TEST

START_TEST(test_policy_loads_from_the_store_where_that_is_faster)
{
    struct policy_worker w[] = {worker(ROLE_PREFILL), worker(ROLE_DECODE), worker(ROLE_STORE)};
    struct policy_request r = ask(1600);
    r.force = FORCE_SPLIT;
    r.store_blocks = 80;
    w[0].load_ms = 2;
    w[0].load_dram_ms = 0.2;
    w[0].load_ssd_ms = 2; /* more than computing a block takes */
    struct plan p = policy_place(w, 3, &r, 1);
    ck_assert_uint_eq(p.store_blocks, 80);
    double by_memory = p.ttft_ms;
    r.store_blocks_ssd = 10;
    p = policy_place(w, 3, &r, 1);
    ck_assert_uint_eq(p.store_blocks, 80);
    ck_assert(p.ttft_ms > by_memory + 17 && p.ttft_ms < by_memory + 19);
    r.store_blocks_ssd = 80;
    ck_assert_uint_eq(policy_place(w, 3, &r, 1).store_blocks, 0); /* the disk is slower than computing */
    r.prefix = PREFIX_LOAD;
    ck_assert_uint_eq(policy_place(w, 3, &r, 1).store_blocks, 80);
    r.store_blocks_ssd = 0;
    r.prefix = PREFIX_COMPUTE;
    ck_assert_uint_eq(policy_place(w, 3, &r, 1).store_blocks, 0);
    r.prefix = PREFIX_AUTO;
    w[0].prefill_ms_per_token = 0.001; /* computing 16 tokens in 16 us */
    ck_assert_uint_eq(policy_place(w, 3, &r, 1).store_blocks, 0);
}
END_TEST

START_TEST(test_policy_spreads_equal_workers)
{
    struct policy_worker w[9];
    uint32_t counts[9] = {0};
    for (int i = 0; i < 8; i++)
        w[i] = worker(ROLE_PREFILL);
    w[8] = worker(ROLE_DECODE);
    struct policy_request r = ask(160);
    r.force = FORCE_SPLIT;
    for (uint64_t seed = 0; seed < 800; seed++)
        counts[policy_place(w, 9, &r, seed).prefill]++;
    for (int i = 0; i < 8; i++)
        ck_assert_uint_gt(counts[i], 0);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("sched");
    TCase *t = tcase_create("sched");
    tcase_set_timeout(t, 30);
    tcase_add_test(t, test_batching_decodes_first_then_prompts_in_order);
    tcase_add_test(t, test_policy_prefers_the_worker_that_has_the_prefix);
    tcase_add_test(t, test_policy_refuses_what_cannot_be_met_and_says_when);
    tcase_add_test(t, test_policy_waits_for_room_and_never_overfills);
    tcase_add_test(t, test_policy_without_prefill_workers_is_aggregated);
    tcase_add_test(t, test_policy_loads_from_the_store_where_that_is_faster);
    tcase_add_test(t, test_rls_learns_a_line_and_follows_when_it_changes);
    tcase_add_test(t, test_ring_moves_only_the_share_of_a_store_that_comes_or_goes);
    tcase_add_test(t, test_hot_counts_what_comes_often_and_forgets);
    tcase_add_test(t, test_policy_spreads_equal_workers);
    suite_add_tcase(s, t);
    return tap_main(s);
}
