/* The table's states, counts and orders. The table is data only, so a model checks everything. */
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "kvstore/table.h"
#include "tests/tap.h"

static struct block_key key_of(uint64_t n)
{
    struct block_key k;
    uint64_t a = random_mix(n), b = random_mix(n + 1000000007);
    memcpy(k.b, &a, 8);
    memcpy(k.b + 8, &b, 8);
    return k;
}

static struct store_entry *add(struct store_table *t, uint64_t n, uint32_t chain_index, uint64_t now)
{
    struct block_key k = key_of(n);
    return table_add(t, &k, chain_index, 0, now);
}

static struct store_entry *find(struct store_table *t, uint64_t n)
{
    struct block_key k = key_of(n);
    return table_find(t, &k);
}

static struct store_entry *add_ready(struct store_table *t, uint64_t n, uint32_t chain_index, uint64_t now)
{
    struct store_entry *e = add(t, n, chain_index, now);
    table_set_dram(t, e, DRAM_FILLING);
    table_set_dram(t, e, DRAM_READY);
    return e;
}

static void make_durable(struct store_table *t, struct store_entry *e)
{
    table_set_ssd(t, e, SSD_QUEUED);
    table_set_ssd(t, e, SSD_DURABLE);
}

static void check_sum(const struct store_table *t)
{
    struct table_audit a = table_audit(t);
    ck_assert_uint_eq(a.free + a.cached + a.leased + a.held, a.total);
}

/* ------------------------------------------------------------------- table */

START_TEST(test_table_finds_what_was_added_and_forgets_what_left)
{
    enum { N = 5000 };
    struct store_table *t = table_open(N, false, EVICTION_LRU);
    for (uint64_t i = 0; i < N; i++)
        add_ready(t, i, 0, i);
    ck_assert_uint_eq(table_audit(t).n_entries, N);
    for (uint64_t i = 0; i < N; i += 2)
        table_set_dram(t, find(t, i), DRAM_ABSENT);
    for (uint64_t i = 0; i < N; i++)
        ck_assert_int_eq(find(t, i) != NULL, i % 2);
    ck_assert_uint_eq(table_slots_free(t), N / 2);
    check_sum(t);
    table_close(t);
}
END_TEST

START_TEST(test_table_pinned_block_is_in_no_eviction_order)
{
    struct store_table *t = table_open(4, true, EVICTION_LRU);
    struct store_entry *e = add_ready(t, 1, 0, 1);
    ck_assert_ptr_eq(table_victim_dirty(t, 10), e);
    ck_assert_ptr_null(table_victim_clean(t, 10));
    make_durable(t, e);
    ck_assert_ptr_eq(table_victim_clean(t, 10), e);
    ck_assert_ptr_eq(table_victim_ssd(t, 10), e);
    table_pin(t, e);
    table_pin(t, e);
    ck_assert_ptr_null(table_victim_clean(t, 10));
    ck_assert_ptr_null(table_victim_ssd(t, 10));
    ck_assert_uint_eq(table_audit(t).leased, 1);
    table_unpin(t, e);
    ck_assert_ptr_null(table_victim_clean(t, 10));
    table_unpin(t, e);
    ck_assert_ptr_eq(table_victim_clean(t, 10), e);
    ck_assert_ptr_null(table_victim_clean(t, 1)); /* a request's own blocks are no victims */
    check_sum(t);
    table_close(t);
}
END_TEST

START_TEST(test_table_block_being_written_is_not_evictable)
{
    struct store_table *t = table_open(4, true, EVICTION_LRU);
    struct store_entry *e = add_ready(t, 1, 0, 1);
    ck_assert_ptr_eq(table_first_dirty(t), e);
    table_set_ssd(t, e, SSD_QUEUED);
    ck_assert_ptr_null(table_first_dirty(t));
    ck_assert_ptr_null(table_victim_clean(t, 10));
    ck_assert_ptr_null(table_victim_dirty(t, 10));
    table_set_ssd(t, e, SSD_REFUSED); /* it stays in DRAM, and writing is not tried again */
    ck_assert_ptr_null(table_first_dirty(t));
    ck_assert_ptr_eq(table_victim_clean(t, 10), e);
    table_close(t);
}
END_TEST

START_TEST(test_table_entry_ends_with_its_last_tier_and_pin)
{
    struct store_table *t = table_open(2, true, EVICTION_LRU);
    struct store_entry *e = add_ready(t, 1, 0, 1);
    make_durable(t, e);
    table_set_dram(t, e, DRAM_ABSENT);
    ck_assert_ptr_eq(find(t, 1), e);
    table_pin(t, e);
    table_set_dram(t, e, DRAM_LOADING);
    table_set_dram(t, e, DRAM_ABSENT); /* the block could not be read */
    table_set_ssd(t, e, SSD_ABSENT);
    ck_assert_ptr_eq(find(t, 1), e);
    table_unpin(t, e);
    ck_assert_ptr_null(find(t, 1));
    ck_assert_uint_eq(table_audit(t).n_entries, 0);
    check_sum(t);
    table_close(t);
}
END_TEST

START_TEST(test_table_slot_generation_rises_with_reuse)
{
    struct store_table *t = table_open(1, false, EVICTION_LRU);
    struct store_entry *a = add_ready(t, 1, 0, 1);
    uint32_t slot = a->slot, before = table_slot_generation(t, slot);
    table_set_dram(t, a, DRAM_ABSENT);
    struct store_entry *b = add_ready(t, 2, 0, 2);
    ck_assert_uint_eq(b->slot, slot);
    ck_assert_uint_gt(table_slot_generation(t, slot), before);
    table_close(t);
}
END_TEST

START_TEST(test_table_dirty_blocks_wait_in_order_of_arrival)
{
    struct store_table *t = table_open(8, true, EVICTION_LRU);
    for (uint64_t i = 0; i < 4; i++)
        add_ready(t, i, 0, 10 - i);
    table_set_dram(t, find(t, 1), DRAM_ABSENT); /* removes one from the middle */
    for (uint64_t i = 0; i < 4; i++) {
        if (i == 1)
            continue;
        struct store_entry *e = table_first_dirty(t);
        ck_assert_ptr_eq(e, find(t, i));
        make_durable(t, e);
    }
    ck_assert_ptr_null(table_first_dirty(t));
    ck_assert_uint_eq(table_audit(t).n_ssd, 3);
    table_close(t);
}
END_TEST

START_TEST(test_table_offer_of_a_known_block_is_recent_but_no_use)
{
    struct store_table *t = table_open(4, false, EVICTION_LRU);
    struct store_entry *a = add_ready(t, 1, 0, 1), *b = add_ready(t, 2, 0, 2);
    table_keep(t, a, 3);
    ck_assert_ptr_eq(table_victim_clean(t, 10), b);
    ck_assert_uint_eq(a->in_dram.n_uses, 1);
    table_touch(t, a, 4);
    ck_assert_uint_eq(a->in_dram.n_uses, 2);
    table_close(t);
}
END_TEST

START_TEST(test_table_use_counts_in_each_tier_that_the_block_is_in)
{
    struct store_table *t = table_open(4, true, EVICTION_LRU);
    struct store_entry *e = add_ready(t, 1, 3, 1);
    table_touch(t, e, 2);
    make_durable(t, e); /* it is there since now, and was used once */
    ck_assert_uint_eq(e->in_dram.n_uses, 2);
    ck_assert_uint_eq(e->on_ssd.n_uses, 1);
    ck_assert_uint_eq(e->on_ssd.last_used, 2);
    table_set_dram(t, e, DRAM_ABSENT);
    table_touch(t, e, 5);
    ck_assert_uint_eq(e->in_dram.n_uses, 0);
    ck_assert_uint_eq(e->on_ssd.n_uses, 2);
    table_set_dram(t, e, DRAM_LOADING);
    table_set_dram(t, e, DRAM_READY);
    ck_assert_uint_ge(e->in_dram.n_uses, 1);
    ck_assert_uint_eq(e->in_dram.last_used, 5);
    ck_assert_ptr_eq(table_victim_clean(t, 10), e);
    table_close(t);
}
END_TEST

/* A pinned block is no victim in the last tier that has it; in the other tier it is like other blocks. */
START_TEST(test_table_kept_blocks_are_no_victims_in_their_last_tier)
{
    struct store_table *t = table_open(4, true, EVICTION_LRU);
    struct store_entry *a = add_ready(t, 1, 0, 1), *b = add_ready(t, 2, 0, 2);
    make_durable(t, a);
    make_durable(t, b);
    table_set_kept(t, a, true);
    ck_assert_uint_eq(table_kept(t), 1);
    ck_assert_ptr_eq(table_victim_ssd(t, UINT64_MAX), b);
    ck_assert_ptr_eq(table_victim_clean(t, UINT64_MAX), a);
    table_set_kept(t, a, false);
    ck_assert_ptr_eq(table_victim_ssd(t, UINT64_MAX), a);
    table_set_kept(t, b, true);
    table_set_dram(t, b, DRAM_ABSENT);
    table_set_ssd(t, b, SSD_ABSENT); /* the block is gone, and its pin with it */
    ck_assert_uint_eq(table_kept(t), 0);
    table_close(t);
    t = table_open(4, false, EVICTION_LRU);
    a = add_ready(t, 1, 0, 1);
    b = add_ready(t, 2, 0, 2);
    table_set_kept(t, a, true);
    ck_assert_ptr_eq(table_victim_clean(t, UINT64_MAX), b);
    check_sum(t);
    table_close(t);
}
END_TEST

START_TEST(test_table_aborts_when_a_pinned_block_is_thrown_out)
{
    struct store_table *t = table_open(1, false, EVICTION_LRU);
    struct store_entry *e = add_ready(t, 1, 0, 1);
    table_pin(t, e);
    table_set_dram(t, e, DRAM_ABSENT);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kvstore table");
    TCase *c = tcase_create("table");
    tcase_set_timeout(c, 60);
    tcase_add_test(c, test_table_finds_what_was_added_and_forgets_what_left);
    tcase_add_test(c, test_table_pinned_block_is_in_no_eviction_order);
    tcase_add_test(c, test_table_block_being_written_is_not_evictable);
    tcase_add_test(c, test_table_entry_ends_with_its_last_tier_and_pin);
    tcase_add_test(c, test_table_slot_generation_rises_with_reuse);
    tcase_add_test(c, test_table_dirty_blocks_wait_in_order_of_arrival);
    tcase_add_test(c, test_table_offer_of_a_known_block_is_recent_but_no_use);
    tcase_add_test(c, test_table_use_counts_in_each_tier_that_the_block_is_in);
    tcase_add_test(c, test_table_kept_blocks_are_no_victims_in_their_last_tier);
    if (tap_forks())
        tcase_add_test_raise_signal(c, test_table_aborts_when_a_pinned_block_is_thrown_out, 6);
    suite_add_tcase(s, c);
    return tap_main(s);
}
