/* Eviction orders: each policy on small cases, and rules for all of them, checked by a model; they are data
 * only. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "sched/eviction.h"
#include "sched/eviction_duel.h"
#include "sched/eviction_ghosts.h"
#include "sched/eviction_learn.h"
#include "tests/tap.h"

enum { LRU = EVICTION_LRU, LFU = EVICTION_LFU, S3FIFO = EVICTION_S3FIFO, TANDEM = EVICTION_TANDEM };

static struct eviction_item *take(struct eviction *e)
{
    struct eviction_item *victim = eviction_victim(e);
    if (victim)
        eviction_leave(e, victim);
    return victim;
}

START_TEST(test_eviction_policies_have_names)
{
    enum eviction_policy p;
    for (int i = 0; i < EVICTION_POLICIES; i++) {
        ck_assert(eviction_policy_from_name(eviction_policy_name((enum eviction_policy)i), &p));
        ck_assert_int_eq(p, i);
        ck_assert_ptr_nonnull(strstr(EVICTION_NAMES, eviction_policy_name((enum eviction_policy)i)));
    }
    p = EVICTION_LFU;
    ck_assert(!eviction_policy_from_name("lr", &p));
    ck_assert(!eviction_policy_from_name("", &p));
    ck_assert_int_eq(p, EVICTION_LFU);
}
END_TEST

/* ---------------------------------------------------------------- policies */

START_TEST(test_eviction_of_one_request_goes_from_the_tail)
{
    struct eviction *e = eviction_open((enum eviction_policy)_i);
    struct eviction_item old = {0}, head = {0}, middle = {0}, tail = {0};
    eviction_insert(e, &old, 0, 10);
    eviction_insert(e, &head, 0, 20);
    eviction_insert(e, &middle, 1, 20);
    eviction_insert(e, &tail, 2, 20);
    struct eviction_item *expected[] = {&old, &tail, &middle, &head};
    for (int i = 0; i < 4; i++)
        ck_assert_ptr_eq(take(e), expected[i]);
    ck_assert_ptr_null(eviction_victim(e));
    eviction_close(e);
}
END_TEST

START_TEST(test_eviction_lru_takes_the_least_recently_used)
{
    struct eviction *e = eviction_open(EVICTION_LRU);
    struct eviction_item a = {0}, b = {0};
    eviction_insert(e, &a, 0, 1);
    eviction_insert(e, &b, 0, 2);
    eviction_touch(e, &a, 3);
    ck_assert_ptr_eq(eviction_victim(e), &b);
    eviction_remove(e, &b);
    eviction_touch(e, &b, 9); /* the item is in no order, so only its history changes */
    ck_assert_uint_eq(b.last_used, 9);
    ck_assert_uint_eq(eviction_count(e), 1);
    eviction_close(e);
}
END_TEST

START_TEST(test_eviction_lfu_takes_the_least_often_used_then_the_least_recently)
{
    struct eviction *e = eviction_open(EVICTION_LFU);
    struct eviction_item often = {0}, once = {0}, later = {0};
    eviction_insert(e, &often, 0, 1);
    eviction_touch(e, &often, 2);
    eviction_touch(e, &often, 2); /* counts as the same use */
    eviction_insert(e, &once, 0, 3);
    eviction_insert(e, &later, 0, 4);
    ck_assert_uint_eq(often.n_uses, 2);
    ck_assert_ptr_eq(take(e), &once);
    ck_assert_ptr_eq(take(e), &later);
    ck_assert_ptr_eq(take(e), &often);
    eviction_close(e);
}
END_TEST

START_TEST(test_eviction_s3fifo_keeps_what_was_used_again_and_what_came_back)
{
    struct eviction *e = eviction_open(EVICTION_S3FIFO);
    struct eviction_item used = {.key_hash = 1}, once = {.key_hash = 2}, back = {.key_hash = 3}, fill[20] = {0};
    eviction_insert(e, &back, 0, 1);
    eviction_leave(e, &back);
    eviction_insert(e, &used, 0, 2);
    eviction_insert(e, &once, 0, 3);
    eviction_insert(e, &back, 0, 4); /* a remembered block goes into the main queue at once */
    eviction_touch(e, &used, 5);
    eviction_touch(e, &used, 6);
    for (uint64_t i = 0; i < 20; i++) {
        fill[i].key_hash = 100 + i;
        eviction_insert(e, &fill[i], 0, 10 + i);
    }
    ck_assert_ptr_eq(take(e), &once);
    for (int i = 0; i < 19; i++) { /* while the small queue has more than a tenth, victims come from it */
        struct eviction_item *v = take(e);
        ck_assert(v != &used && v != &back);
    }
    eviction_close(e);
}
END_TEST

/* ----------------------------------------------------------- against a model */

static bool precedes(const struct eviction_item *a, const struct eviction_item *b)
{
    if (a->last_used != b->last_used)
        return a->last_used < b->last_used;
    return a->chain_index != b->chain_index ? a->chain_index > b->chain_index : a->sequence < b->sequence;
}

START_TEST(test_eviction_lru_agrees_with_a_search_over_all)
{
    enum { N = 200, STEPS = 20000 };
    struct eviction *e = eviction_open(EVICTION_LRU);
    struct eviction_item items[N] = {0};
    for (uint64_t step = 0; step < STEPS; step++) {
        struct eviction_item *x = &items[random_at(1, step, 0) % N];
        uint64_t what = random_at(1, step, 1) % 4, when = random_at(1, step, 2) % 50;
        if (!eviction_contains(x))
            eviction_insert(e, x, (uint32_t)(random_at(1, step, 3) % 5), when);
        else if (what == 0)
            eviction_remove(e, x);
        else
            eviction_touch(e, x, when);
        const struct eviction_item *best = NULL;
        uint64_t n = 0;
        for (int i = 0; i < N; i++) {
            n += eviction_contains(&items[i]);
            if (eviction_contains(&items[i]) && (!best || precedes(&items[i], best)))
                best = &items[i];
        }
        ck_assert_ptr_eq(eviction_victim(e), best);
        ck_assert_uint_eq(eviction_count(e), n);
    }
    eviction_close(e);
}
END_TEST

/* A forest of chains that fork; the parent of block i is before it. Whole paths from a root are used and
 * pinned. */
enum { FOREST = 3000, MAX_DEPTH = 64 };

struct forest {
    struct eviction *order;
    struct eviction_item *items;
    uint32_t parent[FOREST], depth[FOREST], pins[FOREST], n_children[FOREST];
    bool is_here[FOREST];
    uint64_t n_here, capacity;
    uint64_t hash; /* hash of the victims */
    uint64_t n_victims, n_stranded;
};

static void forest_open(struct forest *f, enum eviction_policy policy, uint64_t capacity)
{
    memset(f, 0, sizeof(*f));
    f->order = eviction_open(policy);
    f->items = mem_array(FOREST, sizeof(*f->items));
    f->capacity = capacity;
    for (uint32_t i = 0; i < FOREST; i++) {
        uint32_t p = i < 10 ? i : (uint32_t)(random_at(2, i, 0) % i);
        f->parent[i] = i < 10 || f->depth[p] == MAX_DEPTH - 1 ? FOREST : p;
        f->depth[i] = f->parent[i] == FOREST ? 0 : f->depth[p] + 1;
    }
}

static void forest_close(struct forest *f)
{
    eviction_close(f->order);
    free(f->items);
}

static void forest_add(struct forest *f, uint32_t block, int by)
{
    f->is_here[block] = by > 0;
    f->n_here += (uint64_t)by;
    if (f->parent[block] != FOREST)
        f->n_children[f->parent[block]] += (uint32_t)by;
}

static bool forest_room(struct forest *f, uint64_t now)
{
    if (f->n_here < f->capacity)
        return true;
    struct eviction_item *item = eviction_victim(f->order);
    if (!item || item->last_used == now)
        return false;
    uint32_t block = (uint32_t)(item - f->items);
    ck_assert_uint_eq(f->pins[block], 0);
    ck_assert(f->is_here[block]);
    f->n_stranded += f->n_children[block] > 0;
    f->hash = random_at(f->hash, block, 0);
    f->n_victims++;
    eviction_leave(f->order, item);
    forest_add(f, block, -1);
    return true;
}

static uint32_t forest_path(const struct forest *f, uint32_t tip, uint32_t *path)
{
    uint32_t n = f->depth[tip] + 1;
    for (uint32_t i = n; i-- > 0; tip = f->parent[tip])
        path[i] = tip;
    return n;
}

static void forest_use(struct forest *f, uint32_t tip, uint64_t now)
{
    uint32_t path[MAX_DEPTH], n = forest_path(f, tip, path), i = 0;
    for (; i < n && f->is_here[path[i]]; i++)
        eviction_touch(f->order, &f->items[path[i]], now);
    for (bool has_room = true; i < n; i++) {
        struct eviction_item *item = &f->items[path[i]];
        item->key_hash = random_mix(path[i]);
        item->chain_index = f->depth[path[i]];
        has_room = has_room && (f->is_here[path[i]] || forest_room(f, now));
        if (f->is_here[path[i]]) { /* a block after a hole, which s3-fifo leaves */
            eviction_touch(f->order, item, now);
        } else if (has_room) {
            eviction_insert(f->order, item, item->chain_index, now);
            forest_add(f, path[i], 1);
        } else {
            eviction_refused(f->order, item, now);
        }
    }
}

/* by: 1 or -1. A pinned block is in no order, and comes back with its last use. */
static void forest_pin(struct forest *f, uint32_t tip, int by)
{
    uint32_t path[MAX_DEPTH], n = forest_path(f, tip, path);
    for (uint32_t i = 0; i < n; i++) {
        struct eviction_item *item = &f->items[path[i]];
        f->pins[path[i]] += (uint32_t)by;
        if (by > 0)
            eviction_remove(f->order, item);
        else if (!f->pins[path[i]])
            eviction_insert(f->order, item, item->chain_index, item->last_used);
    }
}

static void forest_run(struct forest *f, uint64_t n_steps)
{
    uint32_t pinned[8], n_pinned = 0;
    for (uint64_t now = 1; now <= n_steps; now++) {
        double u = random_unit(random_at(3, now, 0));
        uint32_t tip = (uint32_t)(u * u * FOREST); /* some blocks often, most of them seldom */
        forest_use(f, tip, now);
        if (n_pinned < 8 && f->is_here[tip]) {
            forest_pin(f, tip, 1);
            pinned[n_pinned++] = tip;
        }
        while (n_pinned && random_at(3, now, 1) % 3 == 0)
            forest_pin(f, pinned[--n_pinned], -1), now++;
    }
    while (n_pinned)
        forest_pin(f, pinned[--n_pinned], -1);
}

START_TEST(test_eviction_never_takes_a_block_before_one_that_continues_it)
{
    struct forest f;
    forest_open(&f, (enum eviction_policy)_i, 300);
    forest_run(&f, 30000);
    ck_assert_uint_gt(f.n_victims, 5000);
    if (_i != S3FIFO)
        ck_assert_uint_eq(f.n_stranded, 0);
    forest_close(&f);
}
END_TEST

START_TEST(test_eviction_same_calls_give_the_same_victims)
{
    struct forest a, b;
    forest_open(&a, (enum eviction_policy)_i, 200);
    free(mem_array(12345, 7));
    forest_open(&b, (enum eviction_policy)_i, 200);
    forest_run(&a, 20000);
    forest_run(&b, 20000);
    ck_assert_uint_gt(a.n_victims, 1000);
    ck_assert_uint_eq(a.n_victims, b.n_victims);
    ck_assert_uint_eq(a.hash, b.hash);
    forest_close(&a);
    forest_close(&b);
}
END_TEST

START_TEST(test_eviction_cost_does_not_grow_with_the_number_of_blocks)
{
    enum {
        N = 1000000
    }; /* A search over all blocks at each change would take 10^12 steps, hours beyond the time limit. */
    struct eviction *e = eviction_open((enum eviction_policy)_i);
    struct eviction_item *items = mem_array(N, sizeof(*items));
    for (uint64_t i = 0; i < N; i++) {
        items[i].key_hash = random_mix(i);
        eviction_insert(e, &items[i], (uint32_t)(i % 10), i / 10 + 1);
    }
    for (uint64_t i = 0; i < N; i++) {
        eviction_touch(e, &items[random_at(4, i, 0) % N], N + i / 10);
        struct eviction_item *victim = take(e);
        eviction_insert(e, victim, victim->chain_index, N + i / 10);
    }
    ck_assert_uint_eq(eviction_count(e), N);
    eviction_close(e);
    free(items);
}
END_TEST

/* ----------------------------------------------------------------- history */

START_TEST(test_eviction_history_survives_a_pin)
{
    struct eviction *e = eviction_open((enum eviction_policy)_i);
    struct eviction_item a = {.key_hash = 1}, b = {.key_hash = 2};
    eviction_insert(e, &a, 0, 1);
    eviction_touch(e, &a, 2);
    eviction_touch(e, &a, 3);
    eviction_insert(e, &b, 0, 4);
    eviction_remove(e, &a);
    ck_assert(!eviction_contains(&a));
    ck_assert_ptr_eq(eviction_victim(e), &b);
    uint64_t rank = a.rank;
    eviction_insert(e, &a, 0, 3);
    ck_assert_uint_eq(a.n_uses, 3);
    ck_assert_uint_eq(a.rank, rank);
    eviction_close(e);
}
END_TEST

START_TEST(test_eviction_block_that_left_or_was_refused_is_remembered)
{
    struct eviction *e = eviction_open(EVICTION_TANDEM);
    struct eviction_item a = {.key_hash = 7}, again = {.key_hash = 7}, other = {.key_hash = 8};
    eviction_insert(e, &a, 0, 1);
    eviction_touch(e, &a, 2);
    eviction_leave(e, &a);
    ck_assert(!eviction_contains(&a));
    eviction_refused(e, &a, 3);
    eviction_insert(e, &again, 0, 4);
    eviction_insert(e, &other, 0, 4);
    ck_assert_uint_eq(again.n_uses, 4);
    ck_assert_uint_eq(other.n_uses, 1);
    eviction_close(e);
}
END_TEST

START_TEST(test_eviction_keep_is_recent_but_no_use)
{
    struct eviction *e = eviction_open((enum eviction_policy)_i);
    struct eviction_item a = {.key_hash = 1}, b = {.key_hash = 2};
    eviction_insert(e, &a, 0, 1);
    eviction_insert(e, &b, 0, 2);
    eviction_keep(e, &a, 3);
    ck_assert_uint_eq(a.n_uses, 1);
    ck_assert_uint_eq(a.last_used, 3);
    ck_assert_ptr_eq(eviction_victim(e), _i == S3FIFO ? &a : &b);
    eviction_close(e);
}
END_TEST

/* As a store inserts the blocks that it finds on its disk. */
START_TEST(test_eviction_blocks_of_unknown_age_are_taken_first_from_the_tail)
{
    struct eviction *e = eviction_open((enum eviction_policy)_i);
    struct eviction_item found[3] = {0}, used = {.key_hash = 9};
    for (uint32_t i = 1; i <= 3; i++) {
        found[i % 3].key_hash = i % 3;
        eviction_insert(e, &found[i % 3], i % 3, 0);
        ck_assert_uint_eq(found[i % 3].n_uses, 1);
    }
    eviction_insert(e, &used, 0, 1);
    for (int i = 2; i >= 0; i--)
        ck_assert_ptr_eq(take(e), &found[i]);
    ck_assert_ptr_eq(take(e), &used);
    eviction_close(e);
}
END_TEST

START_TEST(test_eviction_orders_of_one_room_share_history)
{
    struct eviction *clean = eviction_open(EVICTION_TANDEM), *dirty = eviction_open_beside(clean);
    struct eviction_item a = {.key_hash = 1}, back = {.key_hash = 1};
    eviction_insert(dirty, &a, 0, 1);
    eviction_remove(dirty, &a);
    eviction_insert(clean, &a, 0, 1);
    ck_assert_uint_eq(a.n_uses, 1);
    ck_assert_uint_eq(eviction_count(dirty), 0);
    eviction_leave(clean, &a);
    eviction_close(clean);
    eviction_insert(dirty, &back, 0, 5);
    ck_assert_uint_eq(back.n_uses, 2);
    eviction_close(dirty);
}
END_TEST

START_TEST(test_eviction_request_of_few_new_blocks_gives_a_better_shape_for_good)
{
    struct eviction *e = eviction_open(EVICTION_TANDEM);
    struct eviction_item head = {.key_hash = 1}, next = {.key_hash = 2};
    uint64_t missing[40];
    for (uint64_t i = 0; i < 40; i++)
        missing[i] = 1 + i;
    eviction_request(e, missing, 40);
    eviction_insert(e, &head, 0, 1);
    ck_assert_uint_eq(head.shape, 0);
    eviction_request(e, missing + 1, 3); /* the head is in the cache */
    eviction_touch(e, &head, 2);
    eviction_insert(e, &next, 1, 2);
    ck_assert_uint_eq(head.shape, LEARN_SHAPES - 1);
    ck_assert_uint_eq(next.shape, LEARN_SHAPES - 1);
    eviction_leave(e, &next);
    eviction_leave(e, &head);
    eviction_request(e, missing, 10); /* two of them are remembered, eight are new */
    eviction_insert(e, &head, 0, 3);
    ck_assert_uint_eq(head.shape, LEARN_SHAPES - 1);
    eviction_insert(e, &(struct eviction_item){.key_hash = 3}, 2, 3);
    ck_assert_uint_eq(eviction_victim(e)->shape, LEARN_SHAPES - 2);
    eviction_close(e);
}
END_TEST

START_TEST(test_ghosts_keep_the_newest_in_bounded_room)
{
    enum { N = 1000000 };
    struct ghosts *g = ghosts_open();
    struct ghost ghost;
    uint64_t n_kept = 0;
    for (uint64_t i = 0; i < N; i++)
        ghosts_put(g, &(struct ghost){.key_hash = i, .last_used = i, .n_uses = 1});
    ck_assert(ghosts_take(g, N - 1, &ghost));
    ck_assert_uint_eq(ghost.last_used, N - 1);
    ck_assert(!ghosts_take(g, N - 1, &ghost)); /* only once */
    ck_assert(!ghosts_take(g, 0, &ghost));
    ghosts_reserve(g, 20000); /* entries survive growing */
    for (uint64_t i = 0; i < N; i++)
        n_kept += ghosts_take(g, i, &ghost);
    ck_assert_uint_gt(n_kept, 30000);
    ck_assert_uint_lt(n_kept, 32768);
    ghosts_close(g);
}
END_TEST

/* ---------------------------------------------------------------- learning */

enum { CHAIN = 10 };

struct cache { /* a cache of chains of CHAIN blocks without common heads */
    struct eviction *order;
    struct eviction_item *items;
    uint64_t n, capacity, now, n_hits;
};

static void cache_open(struct cache *c, enum eviction_policy policy, uint64_t capacity, uint64_t n_chains)
{
    *c = (struct cache){.order = eviction_open(policy), .capacity = capacity};
    c->items = mem_array(n_chains * CHAIN, sizeof(*c->items));
    for (uint64_t i = 0; i < n_chains * CHAIN; i++)
        c->items[i] = (struct eviction_item){.key_hash = random_mix(i), .chain_index = (uint32_t)(i % CHAIN)};
}

static void cache_close(struct cache *c)
{
    eviction_close(c->order);
    free(c->items);
}

static void cache_use(struct cache *c, uint64_t chain)
{
    c->now++;
    for (uint64_t i = chain * CHAIN; i < (chain + 1) * CHAIN; i++) {
        struct eviction_item *item = &c->items[i], *victim = NULL;
        if (eviction_contains(item)) {
            eviction_touch(c->order, item, c->now);
            c->n_hits++;
            continue;
        }
        if (c->n == c->capacity && (victim = eviction_victim(c->order)) && victim->last_used == c->now) {
            eviction_refused(c->order, item, c->now);
            continue;
        }
        if (victim)
            eviction_leave(c->order, victim);
        eviction_insert(c->order, item, item->chain_index, c->now);
        c->n += !victim;
    }
}

/* Every other request is one of 20 known prompts; the others are seen once. Returns the share of the known
 * prompts' blocks that were found. */
static double hits_in_a_scan(enum eviction_policy policy)
{
    enum { HOT = 20, N = 6000 };
    struct cache c;
    cache_open(&c, policy, 300, HOT + N);
    for (uint64_t i = 0; i < N; i++) {
        cache_use(&c, random_at(5, i, 0) % HOT);
        cache_use(&c, HOT + i);
    }
    double share = (double)c.n_hits / (N * CHAIN);
    cache_close(&c);
    return share;
}

START_TEST(test_eviction_scan_does_not_flush_what_is_used)
{
    ck_assert_double_gt(hits_in_a_scan(EVICTION_TANDEM), 0.9);
    ck_assert_double_lt(hits_in_a_scan(EVICTION_LRU), 0.7); /* else the test would prove nothing */
}
END_TEST

START_TEST(test_eviction_forgets_what_was_popular_once)
{
    enum { SET = 25, N = 8000 };
    struct cache c;
    cache_open(&c, EVICTION_TANDEM, 300, 2 * SET + 2 * N);
    for (uint64_t i = 0; i < N; i++) {
        cache_use(&c, random_at(6, i, 0) % SET);
        cache_use(&c, 2 * SET + i);
    }
    for (uint64_t i = 0; i < N; i++) {
        c.n_hits = i == N / 2 ? 0 : c.n_hits;
        cache_use(&c, SET + random_at(6, i, 0) % SET);
        cache_use(&c, 2 * SET + N + i);
    }
    ck_assert_double_gt((double)c.n_hits / (N / 2 * CHAIN), 0.9);
    cache_close(&c);
}
END_TEST

/* A loop over more blocks than fit: LRU finds nothing. That the loop comes back has to be learned from
 * evicted blocks. */
START_TEST(test_eviction_keeps_a_part_of_a_loop_that_does_not_fit)
{
    enum { LOOP = 60, ROUNDS = 400 };
    struct cache c;
    cache_open(&c, EVICTION_TANDEM, 300, LOOP);
    for (uint64_t i = 0; i < LOOP * ROUNDS; i++) {
        c.n_hits = i == LOOP * ROUNDS / 2 ? 0 : c.n_hits;
        cache_use(&c, i % LOOP);
    }
    ck_assert_double_gt((double)c.n_hits / (LOOP * ROUNDS / 2 * CHAIN), 0.1);
    cache_close(&c);
}
END_TEST

START_TEST(test_learn_keeps_the_class_that_comes_back_as_long_as_it_takes)
{
    struct learn *l = mem_zalloc(sizeof(*l));
    struct learn_terms terms;
    uint32_t once = learn_class(1, 0, false), often = learn_class(5, 0, false);
    for (uint64_t now = 1; now <= 20000; now++) {
        learn_advance(l, now, 1000);
        learn_begin(l, once);
        learn_begin(l, often);
        if (now > 100)
            learn_end(l, often, 100); /* blocks of the other class never are */
    }
    learn_terms_make(l, 200, &terms); /* twice the needed room */
    ck_assert_uint_ge(learn_keep_for(&terms, often, true), 100);
    ck_assert_uint_eq(terms.tight[once], 0);
    /* Half the needed room: some blocks are kept long enough, the others not at all. */
    learn_terms_make(l, 50, &terms);
    ck_assert_uint_ge(terms.generous[often], 100);
    ck_assert_uint_eq(terms.tight[often], 0);
    ck_assert_double_gt(terms.share, 0.3);
    ck_assert_double_lt(terms.share, 0.7);
    free(l);
}
END_TEST

static void check_order(const uint64_t *keep_for)
{
    for (uint32_t c = 0; c < LEARN_CLASSES; c++) {
        if (c % LEARN_USES)
            ck_assert_uint_ge(keep_for[c], keep_for[c - 1]);
        if (c >= LEARN_USES && c < LEARN_TAILS)
            ck_assert_uint_ge(keep_for[c], keep_for[c - LEARN_USES]);
        if (c < LEARN_USES)
            ck_assert_uint_le(keep_for[LEARN_TAILS + c], keep_for[c]);
    }
}

START_TEST(test_learn_never_gives_less_for_more_uses_or_better_shape_or_more_for_a_tail)
{
    struct learn *l = mem_zalloc(sizeof(*l));
    struct learn_terms terms;
    for (uint64_t i = 1; i <= 200000; i++) {
        uint32_t class = (uint32_t)(random_at(7, i, 0) % LEARN_CLASSES);
        learn_advance(l, i, 100);
        learn_begin(l, class);
        if (random_at(7, i, 1) % 16 > class % 16)
            learn_end(l, class, random_at(7, i, 2) % (50u << class % 7));
        if (i % 5000)
            continue;
        learn_terms_make(l, 10 + (double)i / 1000, &terms);
        ck_assert_double_ge(terms.share, 0);
        ck_assert_double_le(terms.share, 1);
        check_order(terms.tight);
        check_order(terms.generous);
        for (uint32_t c = 0; c < LEARN_CLASSES; c++)
            ck_assert_uint_le(terms.tight[c], terms.generous[c]);
    }
    free(l);
}
END_TEST

/* Each request uses one block of class c, which is used again after `again` requests; every other request
 * never comes back. Terms keep the class for keep_for. Returns whether they are in force at the end. */
static bool duel_after(uint64_t again, uint64_t keep_for, uint64_t n_blocks)
{
    struct duel *d = mem_zalloc(sizeof(*d));
    struct learn_terms terms = {.share = 1};
    const uint32_t c = learn_class(1, 0, false), once = learn_class(1, 1, false);
    terms.generous[c] = terms.tight[c] = keep_for;
    for (uint64_t now = 1; now <= 20000; now++) {
        duel_advance(d, now, n_blocks);
        if (now % 1000 == 0)
            duel_terms(d, &terms, now, n_blocks);
        if (now > 2 * again && now % 2)
            duel_end(d, c, true, keep_for >= again, now - 2 * again, now);
        duel_begin(d, now % 2 ? c : once);
    }
    bool in_force = d->in_force;
    free(d);
    return in_force;
}

START_TEST(test_duel_prefers_learned_terms_where_they_find_more_and_lru_where_not)
{
    /* LRU keeps blocks for 400 requests, and they come back after 600. */
    ck_assert(duel_after(300, 700, 400));
    ck_assert(!duel_after(300, 100, 400)); /* kept for too short a time */
    ck_assert(!duel_after(100, 700, 400)); /* both policies find all blocks */
}
END_TEST

int main(void)
{
    Suite *s = suite_create("eviction");
    TCase *c = tcase_create("eviction");
    tcase_set_timeout(c, 60);
    tcase_add_test(c, test_eviction_policies_have_names);
    tcase_add_loop_test(c, test_eviction_of_one_request_goes_from_the_tail, 0, EVICTION_POLICIES);
    tcase_add_test(c, test_eviction_lru_takes_the_least_recently_used);
    tcase_add_test(c, test_eviction_lfu_takes_the_least_often_used_then_the_least_recently);
    tcase_add_test(c, test_eviction_s3fifo_keeps_what_was_used_again_and_what_came_back);
    tcase_add_test(c, test_eviction_lru_agrees_with_a_search_over_all);
    tcase_add_loop_test(c, test_eviction_never_takes_a_block_before_one_that_continues_it, 0, EVICTION_POLICIES);
    tcase_add_loop_test(c, test_eviction_same_calls_give_the_same_victims, 0, EVICTION_POLICIES);
    tcase_add_loop_test(c, test_eviction_cost_does_not_grow_with_the_number_of_blocks, 0, EVICTION_POLICIES);
    tcase_add_loop_test(c, test_eviction_history_survives_a_pin, 0, EVICTION_POLICIES);
    tcase_add_test(c, test_eviction_block_that_left_or_was_refused_is_remembered);
    tcase_add_loop_test(c, test_eviction_keep_is_recent_but_no_use, 0, EVICTION_POLICIES);
    tcase_add_loop_test(c, test_eviction_blocks_of_unknown_age_are_taken_first_from_the_tail, 0, EVICTION_POLICIES);
    tcase_add_test(c, test_eviction_orders_of_one_room_share_history);
    tcase_add_test(c, test_eviction_request_of_few_new_blocks_gives_a_better_shape_for_good);
    tcase_add_test(c, test_ghosts_keep_the_newest_in_bounded_room);
    tcase_add_test(c, test_eviction_scan_does_not_flush_what_is_used);
    tcase_add_test(c, test_eviction_forgets_what_was_popular_once);
    tcase_add_test(c, test_eviction_keeps_a_part_of_a_loop_that_does_not_fit);
    tcase_add_test(c, test_learn_keeps_the_class_that_comes_back_as_long_as_it_takes);
    tcase_add_test(c, test_learn_never_gives_less_for_more_uses_or_better_shape_or_more_for_a_tail);
    tcase_add_test(c, test_duel_prefers_learned_terms_where_they_find_more_and_lru_where_not);
    suite_add_tcase(s, c);
    return tap_main(s);
}
