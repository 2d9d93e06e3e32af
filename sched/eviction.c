#include "sched/eviction.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "sched/eviction_duel.h"
#include "sched/eviction_ghosts.h"
#include "sched/eviction_learn.h"

struct eviction_slot { /* a copy of the rank: reading it from the items costs most of the time */
    uint64_t rank;
    struct eviction_item *item;
};

struct heap {
    struct eviction_slot *slots; /* parent of i at (i - 1) / 2; the victim is the first */
    uint32_t n, cap;
};

/* The state shared by the orders of one room. */
struct eviction_room {
    uint32_t n_orders;
    uint64_t n, most;      /* items in the orders; the most since terms were last made */
    struct ghosts *ghosts; /* history of blocks that left; NULL: the policy does not use it */

    /* Only for the tandem policy. */
    struct learn *learn; /* NULL: another policy */
    struct duel *duel;   /* contains the terms */
    uint32_t version;    /* learn.version when the terms were made */
    uint32_t n_rankings; /* how often all ranks changed: by new terms, or by a change between terms and lru */
    double filled;       /* factor on the size of the cache for which terms are made */
    uint32_t shape;      /* shape of the present request */
    bool is_generous;    /* blocks of the present request get generous terms */
    double owed;         /* lives that should have got generous terms, less those that did */

    /* Copy of the block used last; the next block in its chain may not exceed it (hold_back). */
    struct eviction_item last;
};

struct eviction {
    enum eviction_policy policy;
    struct eviction_room *room;
    struct heap small, main; /* main: s3-fifo only */
    uint64_t next_sequence;
    uint32_t n_rankings; /* tandem: room.n_rankings at the last rank_anew() */
};

static const char *const NAMES[] = {"lru", "lfu", "s3fifo", "tandem"};

bool eviction_policy_from_name(const char *name, enum eviction_policy *out)
{
    for (int i = 0; i < EVICTION_POLICIES; i++) {
        if (strcmp(name, NAMES[i]))
            continue;
        *out = (enum eviction_policy)i;
        return true;
    }
    return false;
}

const char *eviction_policy_name(enum eviction_policy policy)
{
    return NAMES[policy];
}

/* -------------------------------------------------------------------- life */

struct eviction *eviction_open(enum eviction_policy policy)
{
    struct eviction *e = mem_zalloc(sizeof(*e));
    e->policy = policy;
    e->room = mem_zalloc(sizeof(*e->room));
    e->room->n_orders = 1;
    e->room->last.chain_index = UINT32_MAX; /* nothing was used yet, so nothing follows it */
    if (policy == EVICTION_S3FIFO || policy == EVICTION_TANDEM)
        e->room->ghosts = ghosts_open();
    if (policy == EVICTION_TANDEM) {
        e->room->learn = mem_zalloc(sizeof(*e->room->learn));
        e->room->duel = mem_zalloc(sizeof(*e->room->duel));
        e->room->filled = 1;
    }
    return e;
}

struct eviction *eviction_open_beside(struct eviction *first)
{
    struct eviction *e = mem_zalloc(sizeof(*e));
    e->policy = first->policy;
    e->room = first->room;
    e->room->n_orders++;
    return e;
}

static void heap_close(struct heap *h)
{
    for (uint32_t i = 0; i < h->n; i++)
        h->slots[i].item->at = 0;
    free(h->slots);
}

void eviction_close(struct eviction *e)
{
    if (!e)
        return;
    e->room->n -= eviction_count(e);
    heap_close(&e->small);
    heap_close(&e->main);
    if (!--e->room->n_orders) {
        ghosts_close(e->room->ghosts);
        free(e->room->learn);
        free(e->room->duel);
        free(e->room);
    }
    free(e);
}

/* -------------------------------------------------------------------- heap */

static bool goes_before(const struct eviction_slot *x, const struct eviction_slot *y)
{
    if (x->rank != y->rank)
        return x->rank < y->rank;
    const struct eviction_item *a = x->item, *b = y->item;
    if (a->last_used != b->last_used)
        return a->last_used < b->last_used;
    if (a->chain_index != b->chain_index)
        return a->chain_index > b->chain_index;
    return a->sequence < b->sequence;
}

static void heap_put(struct heap *h, uint32_t i, struct eviction_slot slot)
{
    h->slots[i] = slot;
    slot.item->at = i + 1;
}

/* Puts the item at place i, whose content is lost, or below, where it belongs. */
static void sink(struct heap *h, uint32_t i, struct eviction_item *item)
{
    const struct eviction_slot slot = {item->rank, item};
    for (uint32_t child; (child = 2 * i + 1) < h->n; i = child) {
        if (child + 1 < h->n && goes_before(&h->slots[child + 1], &h->slots[child]))
            child++;
        if (!goes_before(&h->slots[child], &slot))
            break;
        heap_put(h, i, h->slots[child]);
    }
    heap_put(h, i, slot);
}

/* Puts the item at place i, then moves it up or down to where it belongs. */
static void heap_settle(struct heap *h, uint32_t i, struct eviction_item *item)
{
    const struct eviction_slot slot = {item->rank, item};
    for (; i && goes_before(&slot, &h->slots[(i - 1) / 2]); i = (i - 1) / 2)
        heap_put(h, i, h->slots[(i - 1) / 2]);
    sink(h, i, item);
}

static void heap_push(struct heap *h, struct eviction_item *item)
{
    h->slots = MEM_ROOM(h->slots, h->n, h->cap, 64);
    heap_settle(h, h->n++, item);
}

static void heap_remove(struct heap *h, struct eviction_item *item)
{
    uint32_t i = item->at - 1;
    struct eviction_item *last = h->slots[--h->n].item;
    item->at = 0;
    if (last != item)
        heap_settle(h, i, last);
}

static struct heap *heap_of(struct eviction *e, const struct eviction_item *item)
{
    return item->in_main ? &e->main : &e->small;
}

/* ----------------------------------------------------------------- history */

static uint32_t class_of(const struct eviction_item *item)
{
    return learn_class(item->n_uses, item->shape, item->was_tail);
}

/* Gives an item without history what is remembered of its block. */
static void recall(struct eviction_room *r, struct eviction_item *item)
{
    struct ghost g;
    item->rank = 0;
    item->frequency = 0;
    item->in_main = false;
    item->is_generous = false;
    item->shape = 0;
    if (!r->ghosts || !ghosts_take(r->ghosts, item->key_hash, &g))
        return;
    item->in_main = !r->learn;
    item->n_uses = g.n_uses;
    item->shape = g.shape;
    item->was_tail = g.was_tail;
    item->is_generous = g.is_generous;
    item->last_used = g.last_used;
}

/* Whether the block used last, in the same request, is the one before this block in its chain. */
static bool follows(const struct eviction_room *r, const struct eviction_item *item, uint64_t now)
{
    return now == r->last.last_used && item->chain_index && item->chain_index == r->last.chain_index + 1;
}

static void end_life(struct eviction_room *r, const struct eviction_item *item, bool was_here, uint64_t now)
{
    if (!r->learn || !item->n_uses || now <= item->last_used)
        return;
    learn_end(r->learn, class_of(item), now - item->last_used);
    duel_end(r->duel, class_of(item), item->is_generous, was_here, item->last_used, now);
}

/*
 * Blocks stay generous while they are here, so further requests get generous terms only if too few lives have
 * them.
 */
static void settle_owed(struct eviction_room *r, const struct eviction_item *item)
{
    const struct learn_terms *t = &r->duel->terms;
    uint32_t c = class_of(item);
    double most = (double)r->n + 1;
    if (t->generous[c] == t->tight[c])
        return;
    r->owed += t->share - item->is_generous;
    r->owed = r->owed > most ? most : r->owed < -most ? -most : r->owed;
}

static void begin_life(struct eviction_room *r, const struct eviction_item *item)
{
    if (!r->learn)
        return;
    learn_begin(r->learn, class_of(item));
    duel_begin(r->duel, class_of(item));
    settle_owed(r, item);
}

/*
 * Counts one more use. While a block is here, its number of uses, shape and generosity never fall, and they
 * never exceed those of the block before it in its chain (hold_back). The rank rises with each of them and
 * with the time of the last use, so it is never above the rank of the block before, whatever the terms are
 * and however often they change.
 */
static void count_use(struct eviction_room *r, struct eviction_item *item)
{
    item->was_tail = item->is_tail && (item->was_tail || !item->n_uses);
    item->n_uses += item->n_uses < UINT32_MAX;
    if (r->learn) {
        item->shape = item->shape > r->shape ? item->shape : (uint8_t)r->shape;
        item->is_generous |= r->is_generous;
    }
}

/*
 * Limits an item to the block before it: the history of a head may be forgotten while that of its tail is
 * not.
 */
static void hold_back(struct eviction_room *r, struct eviction_item *item)
{
    item->n_uses = item->n_uses < r->last.n_uses ? item->n_uses : r->last.n_uses;
    item->shape = item->shape < r->last.shape ? item->shape : r->last.shape;
    item->is_generous &= r->last.is_generous;
}

/*
 * Kept blocks should just fill the cache: if the last terms kept more than fits, the next are made for less
 * room.
 */
static void adjust_filled(struct eviction_room *r)
{
    r->filled *= r->duel->ahead > 0 ? 0.97 : 1.03;
    r->filled = r->filled < 0.5 ? 0.5 : r->filled > 2 ? 2 : r->filled;
}

/* Terms change only between requests, so that all blocks of a chain are ranked by the same terms. */
static void advance(struct eviction_room *r, uint64_t now)
{
    if (now == r->last.last_used)
        return;
    r->is_generous = r->owed >= 0;
    duel_advance(r->duel, now, r->n);
    learn_advance(r->learn, now, r->n);
    if (r->version == r->learn->version)
        return;
    struct learn_terms terms;
    bool were_in_force = r->duel->in_force;
    adjust_filled(r);
    learn_terms_make(r->learn, r->filled * (double)r->most, &terms);
    duel_terms(r->duel, &terms, now, r->most);
    r->n_rankings += were_in_force || r->duel->in_force;
    r->version = r->learn->version;
    r->most = r->n;
}

static uint64_t rank_of(const struct eviction *e, const struct eviction_item *item, bool is_new)
{
    const struct eviction_room *r = e->room;
    switch (e->policy) {
    case EVICTION_TANDEM: /* the time until which it is kept */
        return item->last_used +
               (r->duel->in_force ? learn_keep_for(&r->duel->terms, class_of(item), item->is_generous) : 0);
    case EVICTION_S3FIFO:
        return is_new ? item->last_used : item->rank;
    case EVICTION_LFU:
        return item->n_uses;
    default:
        return item->last_used;
    }
}

static void use(struct eviction *e, struct eviction_item *item, uint64_t now, bool gains)
{
    struct eviction_room *r = e->room;
    bool is_new = !item->n_uses;
    if (r->learn)
        advance(r, now);
    if (is_new)
        recall(r, item);
    else if (gains && now != item->last_used && item->frequency < 3)
        item->frequency++;
    if (is_new || (gains && now != item->last_used)) {
        end_life(r, item, !is_new, now);
        item->is_generous &= !is_new; /* a new block: nothing here continues it, so this may fall */
        count_use(r, item);
        if (follows(r, item, now))
            hold_back(r, item);
        begin_life(r, item);
    } else if (follows(r, item, now)) {
        hold_back(r, item);
    }
    item->last_used = now;
    item->rank = rank_of(e, item, is_new);
    r->last = *item;
}

/* ------------------------------------------------------------------- calls */

static void use_in_place(struct eviction *e, struct eviction_item *item, uint64_t now, bool gains)
{
    use(e, item, now, gains);
    if (item->at)
        heap_settle(heap_of(e, item), item->at - 1, item);
}

void eviction_touch(struct eviction *e, struct eviction_item *item, uint64_t now)
{
    use_in_place(e, item, now, true);
}

void eviction_keep(struct eviction *e, struct eviction_item *item, uint64_t now)
{
    use_in_place(e, item, now, false);
}

void eviction_insert(struct eviction *e, struct eviction_item *item, uint32_t chain_index, uint64_t last_used)
{
    struct eviction_room *r = e->room;
    item->chain_index = chain_index;
    if (!item->n_uses || item->last_used != last_used)
        use(e, item, last_used, true);
    if (r->learn)
        item->rank = rank_of(e, item, false); /* the terms may have changed since its last use */
    item->sequence = e->next_sequence++;
    heap_push(heap_of(e, item), item);
    if (++r->n > r->most)
        r->most = r->n;
    if (r->ghosts)
        ghosts_reserve(r->ghosts, r->n);
}

void eviction_remove(struct eviction *e, struct eviction_item *item)
{
    if (!item->at)
        return;
    heap_remove(heap_of(e, item), item);
    e->room->n--;
}

void eviction_leave(struct eviction *e, struct eviction_item *item)
{
    struct eviction_room *r = e->room;
    eviction_remove(e, item);
    if (item->n_uses && r->ghosts)
        ghosts_put(r->ghosts, &(struct ghost){.key_hash = item->key_hash,
                                              .last_used = item->last_used,
                                              .n_uses = item->n_uses,
                                              .shape = item->shape,
                                              .was_tail = item->was_tail,
                                              .is_generous = item->is_generous});
    item->n_uses = 0;
}

void eviction_request(struct eviction *e, const uint64_t *key_hashes, uint32_t n)
{
    struct eviction_room *r = e->room;
    uint32_t n_known = 0;
    while (r->learn && n_known < n && ghosts_has(r->ghosts, key_hashes[n_known]))
        n_known++;
    r->shape = learn_shape(n - n_known);
}

void eviction_refused(struct eviction *e, struct eviction_item *item, uint64_t now)
{
    eviction_touch(e, item, now);
    eviction_leave(e, item);
}

/*
 * s3fifo: a block that was used since it was queued moves to the end of the main queue; the first block that
 * was not is the victim.
 */
static struct eviction_item *fifo_victim(struct eviction *e)
{
    for (;;) {
        bool from_small = e->small.n && (!e->main.n || e->small.n > (e->small.n + e->main.n) / 10);
        struct heap *h = from_small ? &e->small : &e->main;
        if (!h->n)
            return NULL;
        struct eviction_item *item = h->slots[0].item;
        if (item->frequency <= from_small)
            return item;
        heap_remove(h, item);
        item->frequency = from_small ? 0 : item->frequency - 1;
        item->in_main = true;
        item->rank = e->room->last.last_used;
        heap_push(&e->main, item);
    }
}

/* Ranks all items by the terms now in force. O(n), at most once in n / 4 uses. */
static void rank_anew(struct eviction *e)
{
    struct heap *h = &e->small;
    e->n_rankings = e->room->n_rankings;
    for (uint32_t i = 0; i < h->n; i++)
        h->slots[i].rank = h->slots[i].item->rank = rank_of(e, h->slots[i].item, false);
    for (uint32_t i = h->n / 2; i-- > 0;)
        sink(h, i, h->slots[i].item);
}

struct eviction_item *eviction_victim(struct eviction *e)
{
    if (e->n_rankings != e->room->n_rankings)
        rank_anew(e);
    if (e->policy == EVICTION_S3FIFO)
        return fifo_victim(e);
    return e->small.n ? e->small.slots[0].item : NULL;
}

uint64_t eviction_count(const struct eviction *e)
{
    return (uint64_t)e->small.n + e->main.n;
}
