/* Checks the pool's invariants under random operations: two kinds of holders, names, quarantine. The states
 * always add up. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "engine/kvpool.h"
#include "tests/tap.h"

enum { PAGES = 50 };

struct fixture {
    struct clock clock;
    struct kvpool *pool;
    int64_t n_named;
};

static void on_block(void *user, bool added, const struct block_key *key, uint32_t index)
{
    (void)key, (void)index;
    ((struct fixture *)user)->n_named += added ? 1 : -1;
}

static void setup(struct fixture *f)
{
    static const struct kv_layout layout = {NUM_F32, 1, 1, 4, 16};
    *f = (struct fixture){0};
    clock_init_virtual(&f->clock, 1);
    const struct kvpool_config c = {&layout, PAGES, 1000, &f->clock, on_block, f};
    ck_assert_int_eq(kvpool_open(&c, &f->pool), TD_OK);
}

static struct block_key key(uint64_t n)
{
    struct block_key k = {{0}};
    uint64_t a = random_at(1, n, 0), b = random_at(2, n, 0);
    memcpy(k.b, &a, 8);
    memcpy(k.b + 8, &b, 8);
    return k;
}

static void check_sum(const struct fixture *f)
{
    struct kvpool_audit a = kvpool_audit(f->pool);
    ck_assert_uint_eq(a.free + a.cached + a.held + a.leased + a.quarantined, PAGES);
}

START_TEST(test_kvpool_page_in_transfer_is_not_handed_out)
{
    struct fixture f;
    struct page_ref pages[PAGES], again[PAGES];
    setup(&f);
    ck_assert_int_eq(kvpool_take(f.pool, PAGES, pages), TD_OK);
    kvpool_transfer_hold(f.pool, pages[7]);
    kvpool_unhold(f.pool, pages, PAGES);
    ck_assert_uint_eq(kvpool_audit(f.pool).leased, 1);
    ck_assert_int_eq(kvpool_take(f.pool, PAGES, again), TD_ERR_NO_SPACE);
    ck_assert_int_eq(kvpool_take(f.pool, PAGES - 1, again), TD_OK);
    for (int i = 0; i < PAGES - 1; i++)
        ck_assert_uint_ne(again[i].index, pages[7].index);
    kvpool_transfer_unhold(f.pool, pages[7], true);
    ck_assert_uint_eq(kvpool_audit(f.pool).quarantined, 1);
    kvpool_sweep(f.pool);
    ck_assert_int_eq(kvpool_take(f.pool, 1, again + PAGES - 1), TD_ERR_NO_SPACE);
    clock_advance(&f.clock, 1000);
    kvpool_sweep(f.pool);
    ck_assert_int_eq(kvpool_take(f.pool, 1, again + PAGES - 1), TD_OK);
    ck_assert_uint_eq(again[PAGES - 1].index, pages[7].index);
    ck_assert_uint_gt(again[PAGES - 1].generation, pages[7].generation);
    kvpool_unhold(f.pool, again, PAGES);
    kvpool_close(f.pool);
}
END_TEST

START_TEST(test_kvpool_stale_reference_aborts)
{
    struct fixture f;
    struct page_ref page, next[PAGES];
    setup(&f);
    kvpool_take(f.pool, 1, &page);
    kvpool_unhold(f.pool, &page, 1);
    kvpool_take(f.pool, PAGES, next);
    kvpool_address(f.pool, page); /* the page has another generation by now */
}
END_TEST

START_TEST(test_kvpool_tail_of_a_chain_goes_before_its_head)
{
    struct fixture f;
    struct page_ref chain[10], more[PAGES - 5], found[10];
    struct block_key keys[10];
    setup(&f);
    kvpool_take(f.pool, 10, chain);
    for (uint32_t i = 0; i < 10; i++) {
        keys[i] = key(i);
        kvpool_name(f.pool, chain[i], &keys[i], i);
    }
    kvpool_unhold(f.pool, chain, 10);
    ck_assert_uint_eq(kvpool_audit(f.pool).cached, 10);
    ck_assert_int_eq(kvpool_take(f.pool, PAGES - 5, more), TD_OK); /* 40 free pages and 5 cached ones */
    ck_assert_uint_eq(kvpool_match(f.pool, keys, 10, found), 5);
    ck_assert_uint_eq(found[0].index, chain[0].index);
    kvpool_unhold(f.pool, found, 5);
    kvpool_unhold(f.pool, more, PAGES - 5);
    kvpool_flush(f.pool);
    ck_assert_int_eq(f.n_named, 0);
    kvpool_close(f.pool);
}
END_TEST

/* Makes cached pages of blocks [first, first + n): named pages that nobody holds. */
static void cache(struct fixture *f, uint32_t first, uint32_t n)
{
    struct page_ref pages[PAGES];
    ck_assert_int_eq(kvpool_take(f->pool, n, pages), TD_OK);
    for (uint32_t i = 0; i < n; i++) {
        struct block_key k = key(first + i);
        kvpool_name(f->pool, pages[i], &k, 0);
    }
    kvpool_unhold(f->pool, pages, n);
}

static bool is_cached(struct fixture *f, uint32_t n)
{
    struct block_key k = key(n);
    struct page_ref page;
    if (!kvpool_match(f->pool, &k, 1, &page))
        return false;
    kvpool_unhold(f->pool, &page, 1);
    return true;
}

START_TEST(test_kvpool_pinned_blocks_go_last_until_the_pin_is_over)
{
    struct fixture f;
    struct page_ref all[PAGES];
    struct block_key pinned = key(3), later = key(99);
    setup(&f);
    kvpool_keep(f.pool, &later, 500); /* the pin comes before the block */
    cache(&f, 0, 10);
    kvpool_keep(f.pool, &pinned, 500);
    cache(&f, 100, 40); /* this fills the pool */
    cache(&f, 99, 1);   /* this evicts the oldest block */
    cache(&f, 200, 47); /* evicts all blocks but the two pinned ones and one more */
    ck_assert(is_cached(&f, 3) && is_cached(&f, 99));
    check_sum(&f);
    ck_assert_int_eq(kvpool_take(f.pool, PAGES, all), TD_OK); /* a pin never makes the pool refuse pages */
    kvpool_unhold(f.pool, all, PAGES);
    cache(&f, 3, 1);
    cache(&f, 300, 49);
    clock_advance(&f.clock, 499);
    kvpool_sweep(f.pool); /* the pin has ended: the block is like others, and was used last */
    cache(&f, 400, 49);
    ck_assert(is_cached(&f, 3));
    cache(&f, 500, 50);
    ck_assert(!is_cached(&f, 3));
    ck_assert_int_eq(f.n_named, PAGES);
    kvpool_flush(f.pool);
    kvpool_close(f.pool);
}
END_TEST

START_TEST(test_kvpool_forgotten_block_is_not_found_and_its_holder_keeps_the_page)
{
    struct fixture f;
    struct page_ref held, found;
    struct block_key keys[2] = {key(0), key(1)};
    setup(&f);
    cache(&f, 0, 2);
    kvpool_keep(f.pool, &keys[1], 500);
    ck_assert_uint_eq(kvpool_match(f.pool, keys, 1, &held), 1);
    kvpool_forget(f.pool, &keys[0]);
    kvpool_forget(f.pool, &keys[1]);
    kvpool_forget(f.pool, &keys[1]); /* no such block: nothing happens */
    ck_assert_int_eq(f.n_named, 0);
    ck_assert_uint_eq(kvpool_match(f.pool, keys, 1, &found), 0);
    ck_assert_uint_eq(kvpool_audit(f.pool).held, 1);
    ck_assert_uint_eq(kvpool_audit(f.pool).free, PAGES - 1);
    kvpool_address(f.pool, held);
    kvpool_unhold(f.pool, &held, 1);
    ck_assert_uint_eq(kvpool_audit(f.pool).free, PAGES);
    kvpool_close(f.pool);
}
END_TEST

struct held {
    struct page_ref page;
    uint32_t seq, xfer;
};

/* Pages behind a window may be gone: a prefix matches if its last pages are there, all of those that the
 * window needs. */
START_TEST(test_kvpool_window_matches_by_the_last_pages)
{
    enum { N = 8 };
    static const struct kv_layout layout = {
        .dtype = NUM_F32, .n_layers = 1, .n_kv_heads = 1, .head_dim = 4, .page_tokens = 16, .window = 20};
    struct fixture f = {0};
    clock_init_virtual(&f.clock, 1);
    const struct kvpool_config c = {&layout, PAGES, 1000, &f.clock, on_block, &f};
    ck_assert_int_eq(kvpool_open(&c, &f.pool), TD_OK);
    struct block_key keys[N];
    struct page_ref pages[N], others[PAGES], found[N];
    uint32_t first = 99;
    ck_assert_int_eq(kvpool_take(f.pool, N, pages), TD_OK);
    for (uint32_t i = 0; i < N; i++) {
        keys[i] = key(i);
        kvpool_name(f.pool, pages[i], &keys[i], i);
    }
    for (uint32_t i = 0; i < N; i++)
        kvpool_unhold(f.pool, &pages[i], 1); /* in the order of tokens, as a sequence does */
    for (uint32_t gone = 0; gone <= N; gone++) {
        uint32_t want = gone <= 6 ? N : 0; /* the window needs tokens from 108 on, which begin in page 6 */
        ck_assert_uint_eq(kvpool_match_window(f.pool, keys, N, found, &first), want);
        ck_assert_uint_eq(first, want ? 6 : 0);
        for (uint32_t i = first; i < want; i++)
            ck_assert_uint_eq(found[i].index, pages[i].index);
        kvpool_unhold(f.pool, found + first, want - first);
        if (gone == 0)
            ck_assert_int_eq(kvpool_take(f.pool, PAGES - N, others), TD_OK);
        if (gone < N)
            ck_assert_int_eq(kvpool_take(f.pool, 1, others + PAGES - N + gone), TD_OK);
    }
    kvpool_unhold(f.pool, others, PAGES);
    kvpool_close(f.pool);
}
END_TEST

START_TEST(test_kvpool_random_operations_keep_the_sum)
{
    struct fixture f;
    struct held held[2 * PAGES];
    uint32_t n = 0;
    setup(&f);
    for (uint64_t step = 0; step < 200000; step++) {
        uint64_t r = random_at(5, step, _i);
        struct held *h = n ? &held[(r >> 8) % n] : NULL;
        struct block_key k = key((r >> 16) % 60);
        switch (r % 8) {
        case 0:
        case 1: {
            struct page_ref page;
            if (n < 2 * PAGES && !kvpool_take(f.pool, 1, &page))
                held[n++] = (struct held){page, 1, 0};
            break;
        }
        case 2: {
            struct page_ref page;
            if (n < 2 * PAGES && kvpool_match(f.pool, &k, 1, &page))
                held[n++] = (struct held){page, 1, 0};
            break;
        }
        case 3:
            if (h && h->seq)
                kvpool_name(f.pool, h->page, &k, (uint32_t)(r >> 40) % 10);
            break;
        case 4:
            if (h) {
                kvpool_transfer_hold(f.pool, h->page);
                h->xfer++;
            }
            break;
        case 5:
            if (h && h->xfer) {
                kvpool_transfer_unhold(f.pool, h->page, r >> 60 == 0);
                h->xfer--;
            }
            break;
        case 6:
            if (h && h->seq) {
                kvpool_unhold(f.pool, &h->page, 1);
                h->seq--;
            }
            break;
        case 7:
            clock_advance(&f.clock, 300);
            kvpool_sweep(f.pool);
            break;
        }
        if (h && !h->seq && !h->xfer)
            *h = held[--n];
        if (step % 64 == 0)
            check_sum(&f);
    }
    while (n) {
        struct held *h = &held[--n];
        for (; h->xfer; h->xfer--)
            kvpool_transfer_unhold(f.pool, h->page, false);
        if (h->seq)
            kvpool_unhold(f.pool, &h->page, 1);
    }
    clock_advance(&f.clock, 2000);
    kvpool_sweep(f.pool);
    struct kvpool_audit a = kvpool_audit(f.pool);
    ck_assert_uint_eq(a.free + a.cached, PAGES);
    ck_assert_int_eq(f.n_named, a.cached);
    kvpool_close(f.pool);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kvpool");
    TCase *t = tcase_create("kvpool");
    tcase_set_timeout(t, 30);
    tcase_add_test(t, test_kvpool_page_in_transfer_is_not_handed_out);
    if (tap_forks())
        tcase_add_test_raise_signal(t, test_kvpool_stale_reference_aborts, SIGABRT);
    tcase_add_test(t, test_kvpool_tail_of_a_chain_goes_before_its_head);
    tcase_add_test(t, test_kvpool_pinned_blocks_go_last_until_the_pin_is_over);
    tcase_add_test(t, test_kvpool_forgotten_block_is_not_found_and_its_holder_keeps_the_page);
    tcase_add_test(t, test_kvpool_window_matches_by_the_last_pages);
    tcase_add_loop_test(t, test_kvpool_random_operations_keep_the_sum, 0, 4);
    suite_add_tcase(s, t);
    return tap_main(s);
}
