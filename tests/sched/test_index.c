/* Compares the prefix index with a naive model, with growth, clears, a limit of blocks, and readers in other
 * threads. */
#include <stdatomic.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/random.h"
#include "base/thread.h"
#include "sched/index.h"
#include "sched/ring.h"
#include "tests/tap.h"

static struct block_key key(uint32_t chain, uint32_t i)
{
    struct block_key k = {{0}};
    uint64_t a = random_at(9, chain, i), b = random_at(10, chain, i);
    memcpy(k.b, &a, 8);
    memcpy(k.b + 8, &b, 8);
    return k;
}

static void keys_of(uint32_t chain, uint32_t n, struct block_key *out)
{
    for (uint32_t i = 0; i < n; i++)
        out[i] = key(chain, i);
}

/* Reports blocks [first, first + n) of a chain in one batch. */
static void tell(struct index *x, uint32_t holder, enum block_event_kind kind, enum block_tier tier, uint32_t chain,
                 uint32_t first, uint32_t n)
{
    struct block_event *events = mem_array(n, sizeof(*events));
    for (uint32_t i = 0; i < n; i++)
        events[i] = (struct block_event){kind, tier, first + i, key(chain, first + i)};
    index_apply(x, holder, events, n);
    free(events);
}

static void sweep_all(struct index *x)
{
    while (index_sweep(x, 100))
        ;
}

/* ------------------------------------------------------------ the model */

enum { CHAINS = 12, LENGTH = 40, HOLDERS = 40 };

struct model {
    bool has[HOLDERS][CHAINS][LENGTH][2];
};

static uint32_t model_match(const struct model *m, uint32_t holder, uint32_t chain)
{
    uint32_t n = 0;
    while (n < LENGTH && (m->has[holder][chain][n][0] || m->has[holder][chain][n][1]))
        n++;
    return n;
}

static void check_chain(const struct model *m, const struct index *x, uint32_t chain)
{
    struct block_key keys[LENGTH];
    struct holder_set all = {{0}}, some = {{0}};
    uint32_t lengths[INDEX_MAX_HOLDERS], of_some[INDEX_MAX_HOLDERS];
    keys_of(chain, LENGTH, keys);
    for (uint32_t h = 0; h < HOLDERS; h++) {
        holder_set_add(&all, h);
        if (h % 3 == chain % 3)
            holder_set_add(&some, h);
    }
    memset(of_some, 0xff, sizeof(of_some));
    index_match_each(x, &all, keys, LENGTH, lengths);
    index_match_each(x, &some, keys, LENGTH, of_some);
    for (uint32_t h = 0; h < HOLDERS; h++) {
        uint32_t want = model_match(m, h, chain), part = want / 2;
        ck_assert_uint_eq(lengths[h], want);
        ck_assert_uint_eq(of_some[h], h % 3 == chain % 3 ? want : UINT32_MAX);
        ck_assert_uint_eq(index_match(x, h, keys, LENGTH), want);
        ck_assert_uint_eq(index_match(x, h, keys, part), part);
    }
}

static void check_disk(const struct model *m, const struct index *x, uint32_t chain, uint32_t a, uint32_t b)
{
    struct block_key keys[LENGTH];
    struct holder_set both = holder_set_of(a);
    holder_set_add(&both, b);
    keys_of(chain, LENGTH, keys);
    uint32_t n = 0;
    for (uint32_t i = 0; i < LENGTH; i++)
        n += !m->has[a][chain][i][0] && !m->has[b][chain][i][0];
    ck_assert_uint_eq(index_on_disk(x, &both, keys, LENGTH), n);
}

static void check_accounts(const struct model *m, const struct index *x)
{
    for (uint32_t h = 0; h < HOLDERS; h++) {
        uint64_t want = 0, n_want = 0, n, sum;
        for (uint32_t c = 0; c < CHAINS; c++)
            for (uint32_t i = 0; i < LENGTH; i++)
                for (int tier = 0; tier < 2; tier++)
                    if (m->has[h][c][i][tier]) {
                        struct block_key k = key(c, i);
                        want += block_digest(&k, tier ? TIER_SSD : TIER_DRAM);
                        n_want++;
                    }
        ck_assert(index_digest(x, h, &n, &sum));
        ck_assert_uint_eq(n, n_want);
        ck_assert_uint_eq(sum, want);
    }
}

static uint64_t model_blocks(const struct model *m)
{
    uint64_t n = 0;
    for (uint32_t c = 0; c < CHAINS; c++)
        for (uint32_t i = 0; i < LENGTH; i++) {
            bool held = false;
            for (uint32_t h = 0; h < HOLDERS; h++)
                held |= m->has[h][c][i][0] || m->has[h][c][i][1];
            n += held;
        }
    return n;
}

/* Chains stay closed under prefixes: heads come first and go last. */
static void step_model(struct model *m, struct index *x, uint64_t r)
{
    uint32_t h = r % HOLDERS, c = (r >> 8) % CHAINS, i = (r >> 16) % LENGTH;
    enum block_tier tier = (r >> 30) % 3;
    bool add = (r >> 40) % 8 < 5;
    tell(x, h, add ? BLOCK_ADDED : BLOCK_REMOVED, tier, c, add ? 0 : i, add ? i + 1 : LENGTH - i);
    for (uint32_t j = 0; j < LENGTH; j++)
        if (add ? j <= i : j >= i)
            m->has[h][c][j][tier == TIER_SSD] = add;
}

START_TEST(test_index_agrees_with_a_naive_model)
{
    struct model *m = mem_zalloc(sizeof(*m));
    struct index *x = index_open(0);
    for (uint32_t step = 0; step < 20000; step++) {
        uint64_t r = random_at(77, step, 0);
        uint32_t h = r % HOLDERS;
        if (step % 50 == 49) {
            index_clear(x, h);
            memset(m->has[h], 0, sizeof(m->has[h]));
        } else {
            step_model(m, x, r);
        }
        if (step % 7 == 0)
            index_sweep(x, 300);
        if (step % 20 == 0) {
            check_chain(m, x, (r >> 8) % CHAINS);
            check_disk(m, x, (r >> 8) % CHAINS, h, (r >> 20) % HOLDERS);
        }
        if (step % 500 == 0)
            check_accounts(m, x);
        if (step % 1000 == 0) {
            sweep_all(x);
            ck_assert_uint_eq(index_blocks(x), model_blocks(m));
        }
    }
    for (uint32_t h = 0; h < HOLDERS; h++)
        index_clear(x, h);
    sweep_all(x);
    ck_assert_uint_eq(index_blocks(x), 0);
    index_close(x);
    free(m);
}
END_TEST

START_TEST(test_index_keeps_the_order_of_a_batch)
{
    struct index *x = index_open(0);
    struct block_key k[3];
    keys_of(1, 3, k);
    const struct block_event events[] = {
        {BLOCK_ADDED, TIER_WORKER, 0, k[0]}, {BLOCK_REMOVED, TIER_WORKER, 0, k[0]},
        {BLOCK_ADDED, TIER_SSD, 0, k[1]},    {BLOCK_CLEARED, TIER_WORKER, 0, {{0}}},
        {BLOCK_ADDED, TIER_SSD, 0, k[0]},    {BLOCK_ADDED, TIER_DRAM, 0, k[0]},
        {BLOCK_REMOVED, TIER_SSD, 0, k[0]},  {BLOCK_REMOVED, TIER_SSD, 0, k[2]},
    };
    index_apply(x, 511, events, sizeof(events) / sizeof(events[0]));
    struct holder_set one = holder_set_of(511);
    uint64_t n, sum;
    ck_assert_uint_eq(index_match(x, 511, k, 3), 1);
    ck_assert_uint_eq(index_on_disk(x, &one, k, 1), 0);
    ck_assert(index_digest(x, 511, &n, &sum));
    ck_assert_uint_eq(n, 1);
    ck_assert_uint_eq(sum, block_digest(&k[0], TIER_WORKER));
    index_close(x);
}
END_TEST

START_TEST(test_index_matches_a_prefix_whose_segments_are_spread_over_stores)
{
    enum { N = 5 * RING_SEGMENT_BLOCKS };
    struct index *x = index_open(0);
    struct block_key keys[N];
    struct holder_set first = holder_set_of(0), second = holder_set_of(1), both = holder_set_of(0);
    holder_set_add(&both, 1);
    keys_of(1, N, keys); /* store 0: segments 0, 1, 3 and half of 4; store 1: segment 2 */
    tell(x, 0, BLOCK_ADDED, TIER_DRAM, 1, 0, 2 * RING_SEGMENT_BLOCKS);
    tell(x, 1, BLOCK_ADDED, TIER_DRAM, 1, 2 * RING_SEGMENT_BLOCKS, RING_SEGMENT_BLOCKS);
    tell(x, 0, BLOCK_ADDED, TIER_SSD, 1, 3 * RING_SEGMENT_BLOCKS, RING_SEGMENT_BLOCKS * 3 / 2);
    ck_assert_uint_eq(index_match_segments(x, &first, keys, 0, N), 2 * RING_SEGMENT_BLOCKS);
    ck_assert_uint_eq(index_match_segments(x, &first, keys, 0, 100), 100);
    ck_assert_uint_eq(index_match_segments(x, &second, keys, 0, N), 0);
    ck_assert_uint_eq(index_match_segments(x, &second, keys, 2 * RING_SEGMENT_BLOCKS + 3, N), RING_SEGMENT_BLOCKS - 3);
    ck_assert_uint_eq(index_match_segments(x, &both, keys, 0, N), N - RING_SEGMENT_BLOCKS / 2);
    ck_assert_uint_eq(index_match_segments(x, &both, keys, 7, 8), 1);
    ck_assert_uint_eq(index_on_disk(x, &both, keys, 3 * RING_SEGMENT_BLOCKS), 0);
    ck_assert_uint_eq(index_on_disk(x, &both, keys, 4 * RING_SEGMENT_BLOCKS), RING_SEGMENT_BLOCKS);
    index_close(x);
}
END_TEST

/* ------------------------------------------------- growth, holders, limits */

START_TEST(test_index_holds_blocks_of_all_holders_in_little_memory)
{
    enum { SHARED = 100, OWN = 400 };
    struct index *x = index_open(0);
    struct block_key keys[SHARED + OWN];
    uint32_t lengths[INDEX_MAX_HOLDERS];
    struct holder_set all = {{0}};
    for (uint32_t h = 0; h < INDEX_MAX_HOLDERS; h++) {
        holder_set_add(&all, h);
        tell(x, h, BLOCK_ADDED, TIER_WORKER, 1000, 0, SHARED);
        tell(x, h, BLOCK_ADDED, TIER_WORKER, h, 0, OWN);
    }
    ck_assert_uint_eq(index_blocks(x), SHARED + INDEX_MAX_HOLDERS * OWN);
    sweep_all(x); /* frees tables that were replaced */
    ck_assert_uint_lt(index_bytes(x), 100 * index_blocks(x));
    for (uint32_t h = 0; h < INDEX_MAX_HOLDERS; h += 37) {
        keys_of(h, OWN, keys);
        index_match_each(x, &all, keys, OWN, lengths);
        for (uint32_t other = 0; other < INDEX_MAX_HOLDERS; other++)
            ck_assert_uint_eq(lengths[other], other == h ? OWN : 0);
    }
    keys_of(1000, SHARED, keys);
    keys_of(2000, OWN, keys + SHARED);
    index_match_each(x, &all, keys, SHARED + OWN, lengths);
    for (uint32_t h = 0; h < INDEX_MAX_HOLDERS; h++)
        ck_assert_uint_eq(lengths[h], SHARED);
    index_close(x);
}
END_TEST

START_TEST(test_index_tells_every_length_of_holders_that_share_a_part)
{
    enum { N = 6250 };
    struct index *x = index_open(0);
    struct block_key *keys = mem_array(N, sizeof(*keys));
    uint32_t lengths[INDEX_MAX_HOLDERS];
    struct holder_set all = {{0}};
    keys_of(5, N, keys);
    for (uint32_t h = 0; h < INDEX_MAX_HOLDERS; h++) {
        holder_set_add(&all, h);
        tell(x, h, BLOCK_ADDED, TIER_WORKER, 5, 0, h * N / (INDEX_MAX_HOLDERS - 1));
    }
    index_match_each(x, &all, keys, N, lengths);
    for (uint32_t h = 0; h < INDEX_MAX_HOLDERS; h++)
        ck_assert_uint_eq(lengths[h], h * N / (INDEX_MAX_HOLDERS - 1));
    index_match_each(x, &all, keys, 0, lengths);
    ck_assert_uint_eq(lengths[INDEX_MAX_HOLDERS - 1], 0);
    free(keys);
    index_close(x);
}
END_TEST

START_TEST(test_index_forgets_a_cleared_holder_at_once_and_frees_it_by_and_by)
{
    enum { N = 50000 };
    struct index *x = index_open(0);
    struct block_key keys[8];
    uint64_t n, sum;
    for (uint32_t h = 0; h < 12; h++)
        tell(x, h, BLOCK_ADDED, h % 2 ? TIER_SSD : TIER_DRAM, 1, 0, 8);
    tell(x, 3, BLOCK_ADDED, TIER_DRAM, 2, 0, N);
    uint64_t bytes = index_bytes(x);
    index_clear(x, 3);
    ck_assert(index_digest(x, 3, &n, &sum));
    ck_assert_uint_eq(n, 0);
    ck_assert_uint_eq(sum, 0);
    for (uint32_t chain = 1; chain <= 2; chain++) {
        keys_of(chain, 8, keys);
        ck_assert_uint_eq(index_match(x, 3, keys, 8), 0);
    }
    tell(x, 3, BLOCK_ADDED, TIER_DRAM, 2, 0, 4); /* a snapshot arrives before the sweep */
    ck_assert_uint_eq(index_match(x, 3, keys, 8), 4);
    ck_assert_uint_eq(index_blocks(x), N + 8);
    uint32_t n_steps = 1;
    while (index_sweep(x, 1000))
        n_steps++;
    ck_assert_uint_gt(n_steps, N / 1000);
    ck_assert_uint_eq(index_blocks(x), 4 + 8);
    ck_assert_uint_lt(index_bytes(x), bytes / 2);
    ck_assert_uint_eq(index_match(x, 3, keys, 8), 4);
    keys_of(1, 8, keys);
    for (uint32_t h = 0; h < 12; h++)
        ck_assert_uint_eq(index_match(x, h, keys, 8), h == 3 ? 0 : 8);
    index_close(x);
}
END_TEST

START_TEST(test_index_takes_more_clears_than_it_has_numbers)
{
    enum { CLEARS = 5 * INDEX_MAX_HOLDERS };
    struct index *x = index_open(0);
    struct block_key keys[2];
    for (uint32_t i = 0; i < CLEARS; i++) {
        tell(x, i % 3, BLOCK_ADDED, TIER_DRAM, i, 0, 2);
        tell(x, 3, BLOCK_ADDED, TIER_DRAM, i, 0, 1);
        index_clear(x, i % 3);
    }
    for (uint32_t i = 0; i < CLEARS; i++) {
        keys_of(i, 2, keys);
        for (uint32_t h = 0; h < 4; h++)
            ck_assert_uint_eq(index_match(x, h, keys, 2), h == 3);
    }
    sweep_all(x);
    ck_assert_uint_eq(index_blocks(x), CLEARS);
    index_close(x);
}
END_TEST

START_TEST(test_index_drops_what_is_beyond_its_limit_and_counts_it)
{
    enum { MAX = 5000 };
    struct index *x = index_open(MAX);
    struct block_key k = key(1, 0);
    uint64_t n, sum;
    tell(x, 0, BLOCK_ADDED, TIER_DRAM, 1, 0, MAX - 100);
    tell(x, 1, BLOCK_ADDED, TIER_DRAM, 2, 0, 300);
    ck_assert_uint_eq(index_blocks(x), MAX);
    ck_assert_uint_eq(index_dropped(x), 200);
    ck_assert(index_digest(x, 0, &n, &sum));
    ck_assert(!index_digest(x, 1, &n, &sum));
    ck_assert_uint_eq(n, 100);
    tell(x, 1, BLOCK_ADDED, TIER_DRAM, 1, 0, 10); /* a second holder of a block takes no room */
    ck_assert_uint_eq(index_dropped(x), 200);
    ck_assert_uint_eq(index_match(x, 1, &k, 1), 1);
    tell(x, 1, BLOCK_REMOVED, TIER_DRAM, 2, 0, 300);
    tell(x, 2, BLOCK_ADDED, TIER_DRAM, 3, 0, 100); /* removed blocks leave room */
    ck_assert_uint_eq(index_dropped(x), 200);
    index_clear(x, 0);
    tell(x, 1, BLOCK_CLEARED, TIER_DRAM, 0, 0, 1);
    tell(x, 1, BLOCK_ADDED, TIER_DRAM, 4, 0, MAX - 100); /* and so do cleared ones, before any sweep */
    ck_assert_uint_eq(index_dropped(x), 200);
    ck_assert_uint_eq(index_blocks(x), MAX);
    ck_assert(index_digest(x, 1, &n, &sum));
    ck_assert_uint_eq(n, MAX - 100);
    index_close(x);
}
END_TEST

START_TEST(test_index_stays_small_while_blocks_come_and_go)
{
    enum { AT_ONCE = 10000, STEP = 1000, STEPS = 200 };
    struct index *x = index_open(0);
    uint64_t most = 0;
    for (uint32_t i = 0; i < STEPS; i++) {
        tell(x, 0, BLOCK_ADDED, TIER_DRAM, 1, i * STEP, STEP);
        if (i >= AT_ONCE / STEP)
            tell(x, 0, BLOCK_REMOVED, TIER_DRAM, 1, i * STEP - AT_ONCE, STEP);
        sweep_all(x);
        most = index_bytes(x) > most ? index_bytes(x) : most;
    }
    ck_assert_uint_eq(index_blocks(x), AT_ONCE);
    ck_assert_uint_lt(most, AT_ONCE * 160 + 100000);
    index_close(x);
}
END_TEST

/* ----------------------------------------------------------------- threads */

enum { READERS = 3, FIXED = 300, HOT_HOLDERS = 6, FIXED_CHAIN = 1, ROUNDS = 60 };

struct shared {
    struct index *index;
    _Atomic bool over;
    _Atomic uint64_t n_wrong, n_lookups;
};

/* Whether the chain that never changes is found in full, and the chain that never existed is not found. */
static bool looks_right(const struct index *x, const struct block_key *keys, const struct block_key *never)
{
    struct holder_set workers = {{0}}, store = holder_set_of(100);
    uint32_t lengths[INDEX_MAX_HOLDERS];
    bool right = true;
    for (uint32_t h = 0; h < 2 * HOT_HOLDERS; h++)
        holder_set_add(&workers, h);
    index_match_each(x, &workers, keys, FIXED, lengths);
    for (uint32_t h = 0; h < HOT_HOLDERS; h++)
        right &= lengths[h] == FIXED - h;
    for (uint32_t h = HOT_HOLDERS; h < 2 * HOT_HOLDERS; h++)
        right &= lengths[h] <= FIXED;
    right &= index_match_segments(x, &store, keys, 0, FIXED) == FIXED;
    right &= index_on_disk(x, &store, keys, FIXED) == FIXED;
    index_match_each(x, &workers, never, FIXED, lengths);
    for (uint32_t h = 0; h < 2 * HOT_HOLDERS; h++)
        right &= lengths[h] == 0;
    return right;
}

static void *read_on(void *arg)
{
    struct shared *s = arg;
    struct index_reader *r = index_reader_open(s->index);
    struct block_key keys[FIXED], never[FIXED];
    keys_of(FIXED_CHAIN, FIXED, keys);
    keys_of(FIXED_CHAIN + 1, FIXED, never);
    while (!atomic_load(&s->over)) {
        index_read_begin(r);
        bool right = looks_right(s->index, keys, never);
        index_read_end(r);
        atomic_fetch_add(&s->n_wrong, !right);
        atomic_fetch_add(&s->n_lookups, 1);
    }
    index_reader_close(r);
    return NULL;
}

/* Writes a round: holders come and go, also on the fixed chain's blocks; growth, crowds, clears and
 * sweeps. */
static void write_round(struct index *x, uint32_t round)
{
    for (uint32_t h = HOT_HOLDERS; h < 2 * HOT_HOLDERS; h++) {
        tell(x, h, BLOCK_ADDED, TIER_DRAM, FIXED_CHAIN, 0, FIXED);
        tell(x, h, BLOCK_ADDED, TIER_DRAM, 1000 + round % 7, h * 500, 500);
        index_sweep(x, 1000);
        if (random_at(3, round, h) % 2)
            index_clear(x, h);
        else
            tell(x, h, BLOCK_REMOVED, TIER_DRAM, FIXED_CHAIN, 0, FIXED);
    }
}

START_TEST(test_index_readers_always_find_what_is_always_there)
{
    pthread_t threads[READERS];
    struct shared s = {.index = index_open(0)};
    /* Few enough for slots, so that crowds are made while readers look. */
    for (uint32_t h = 0; h < HOT_HOLDERS; h++)
        tell(s.index, h, BLOCK_ADDED, TIER_WORKER, FIXED_CHAIN, 0, FIXED - h);
    tell(s.index, 100, BLOCK_ADDED, TIER_SSD, FIXED_CHAIN, 0, FIXED);
    for (uint32_t i = 0; i < READERS; i++)
        threads[i] = thread_start("reader", read_on, &s);
    for (uint32_t round = 0; round < ROUNDS || atomic_load(&s.n_lookups) < 200; round++)
        write_round(s.index, round);
    atomic_store(&s.over, true);
    for (uint32_t i = 0; i < READERS; i++)
        pthread_join(threads[i], NULL);
    ck_assert_uint_eq(atomic_load(&s.n_wrong), 0);
    sweep_all(s.index); /* this ends, since no reader holds a table any more */
    index_close(s.index);
}
END_TEST

START_TEST(test_index_keeps_for_a_reader_what_it_may_look_at)
{
    struct index *x = index_open(0);
    struct index_reader *r = index_reader_open(x), *others[INDEX_MAX_READERS];
    for (uint32_t i = 1; i < INDEX_MAX_READERS; i++)
        ck_assert_ptr_nonnull(others[i] = index_reader_open(x));
    ck_assert_ptr_null(index_reader_open(x));
    for (uint32_t i = 1; i < INDEX_MAX_READERS; i++)
        index_reader_close(others[i]);
    index_read_begin(r);
    tell(x, 0, BLOCK_ADDED, TIER_DRAM, 1, 0, 50000);
    uint64_t bytes = index_bytes(x);
    ck_assert(index_sweep(x, 1000));
    ck_assert_uint_eq(index_bytes(x), bytes);
    index_read_end(r);
    ck_assert(!index_sweep(x, 1000));
    ck_assert_uint_lt(index_bytes(x), bytes);
    index_reader_close(r);
    index_close(x);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("index");
    TCase *t = tcase_create("index");
    tcase_set_timeout(t, 60);
    tcase_add_test(t, test_index_agrees_with_a_naive_model);
    tcase_add_test(t, test_index_keeps_the_order_of_a_batch);
    tcase_add_test(t, test_index_matches_a_prefix_whose_segments_are_spread_over_stores);
    tcase_add_test(t, test_index_holds_blocks_of_all_holders_in_little_memory);
    tcase_add_test(t, test_index_tells_every_length_of_holders_that_share_a_part);
    tcase_add_test(t, test_index_forgets_a_cleared_holder_at_once_and_frees_it_by_and_by);
    tcase_add_test(t, test_index_takes_more_clears_than_it_has_numbers);
    tcase_add_test(t, test_index_drops_what_is_beyond_its_limit_and_counts_it);
    tcase_add_test(t, test_index_stays_small_while_blocks_come_and_go);
    tcase_add_test(t, test_index_readers_always_find_what_is_always_there);
    tcase_add_test(t, test_index_keeps_for_a_reader_what_it_may_look_at);
    suite_add_tcase(s, t);
    return tap_main(s);
}
