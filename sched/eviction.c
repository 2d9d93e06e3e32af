#include "sched/eviction.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "sched/eviction_ghosts.h"
#include "sched/eviction_learn.h"

struct slot { /* the rank again, since going to the items for it is what costs time */
    uint64_t rank;
    struct eviction_item *item;
};

struct heap {
    struct slot *slots; /* parent of i at (i - 1) / 2; the victim is the first */
    uint32_t n, cap;
};

/* What orders over one room have in common. */
struct room {
    uint32_t n_orders;
    uint64_t n, most;      /* items in the orders; the most since terms were made */
    struct ghosts *ghosts; /* NULL: the policy asks for none */
    struct learn *learn;   /* tandem */
    struct learn_terms terms;
    uint64_t promised[LEARN_CLASSES]; /* no block was kept for longer since promises were cut */
    uint32_t n_cuts;

    /* The last block used: the next one in its chain, used at the same time, may not outrank it. */
    uint64_t now, rank;
    uint32_t chain_index, n_uses;
};

struct eviction {
    enum eviction_policy policy;
    struct room *room;
    struct heap small, main; /* main: s3-fifo only */
    uint64_t next_sequence;
    uint32_t n_cuts; /* tandem: of the room's, those done here */
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
    e->room->chain_index = UINT32_MAX; /* nothing was used yet, so nothing follows it */
    if (policy == EVICTION_S3FIFO || policy == EVICTION_TANDEM)
        e->room->ghosts = ghosts_open();
    if (policy == EVICTION_TANDEM)
        e->room->learn = mem_zalloc(sizeof(*e->room->learn));
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
        free(e->room);
    }
    free(e);
}

/* -------------------------------------------------------------------- heap */

static bool goes_before(const struct slot *x, const struct slot *y)
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

static void place(struct heap *h, uint32_t i, struct slot slot)
{
    h->slots[i] = slot;
    slot.item->at = i + 1;
}

/* Moves the item, whose place i is free to be overwritten, down to where it belongs. */
static void sink(struct heap *h, uint32_t i, struct eviction_item *item)
{
    const struct slot slot = {item->rank, item};
    for (uint32_t child; (child = 2 * i + 1) < h->n; i = child) {
        if (child + 1 < h->n && goes_before(&h->slots[child + 1], &h->slots[child]))
            child++;
        if (!goes_before(&h->slots[child], &slot))
            break;
        place(h, i, h->slots[child]);
    }
    place(h, i, slot);
}

/* The same, up or down. */
static void settle(struct heap *h, uint32_t i, struct eviction_item *item)
{
    const struct slot slot = {item->rank, item};
    for (; i && goes_before(&slot, &h->slots[(i - 1) / 2]); i = (i - 1) / 2)
        place(h, i, h->slots[(i - 1) / 2]);
    sink(h, i, item);
}

static void heap_push(struct heap *h, struct eviction_item *item)
{
    if (h->n == h->cap) {
        h->cap = h->cap ? 2 * h->cap : 64;
        h->slots = mem_resize(h->slots, h->cap, sizeof(h->slots[0]));
    }
    settle(h, h->n++, item);
}

static void heap_remove(struct heap *h, struct eviction_item *item)
{
    uint32_t i = item->at - 1;
    struct eviction_item *last = h->slots[--h->n].item;
    item->at = 0;
    if (last != item)
        settle(h, i, last);
}

static struct heap *heap_of(struct eviction *e, const struct eviction_item *item)
{
    return item->in_main ? &e->main : &e->small;
}

/* ----------------------------------------------------------------- history */

static uint32_t class_of(const struct eviction_item *item)
{
    return learn_class(item->n_uses, item->was_tail);
}

/* An item without history gets that of its block, if it is remembered. */
static void recall(struct room *r, struct eviction_item *item)
{
    struct ghost g;
    item->rank = 0;
    item->frequency = 0;
    item->in_main = false;
    if (!r->ghosts || !ghosts_take(r->ghosts, item->key_hash, &g))
        return;
    item->in_main = !r->learn;
    item->n_uses = g.n_uses;
    item->was_tail = g.was_tail;
    item->last_used = g.last_used;
}

/* The block before this one in its chain was used last, in the same request. */
static bool follows(const struct room *r, const struct eviction_item *item, uint64_t now)
{
    return now == r->now && item->chain_index && item->chain_index == r->chain_index + 1;
}

/* A life ends, the next one begins. */
static void count(struct room *r, struct eviction_item *item, uint64_t now)
{
    if (r->learn && item->n_uses && now > item->last_used)
        learn_end(r->learn, class_of(item), now - item->last_used);
    item->was_tail = item->is_tail && (item->was_tail || !item->n_uses);
    item->n_uses += item->n_uses < UINT32_MAX;
    if (follows(r, item, now) && item->n_uses > r->n_uses)
        item->n_uses = r->n_uses; /* the ghosts forgot the head, but not the tail */
    if (r->learn)
        learn_begin(r->learn, class_of(item));
}

/* Terms change only between requests, so that a chain is ranked by one set of them. */
static void advance(struct room *r, uint64_t now)
{
    if (now == r->now)
        return;
    learn_advance(r->learn, now, r->n);
    if (r->terms.version == r->learn->version)
        return;
    learn_terms_make(r->learn, r->most, &r->terms);
    r->most = r->n;
    bool must_cut = false;
    for (uint32_t c = 0; c < LEARN_CLASSES; c++) {
        must_cut |= r->terms.generous[c] < r->promised[c];
        r->promised[c] = r->terms.generous[c] > r->promised[c] ? r->terms.generous[c] : r->promised[c];
    }
    if (!must_cut)
        return;
    memcpy(r->promised, r->terms.generous, sizeof(r->promised));
    r->n_cuts++;
}

/* Until when it is kept: never shorter than promised before, never longer than the block before it in its chain. */
static uint64_t keep_until(const struct room *r, const struct eviction_item *item, uint64_t now)
{
    uint64_t until = now + learn_keep_for(&r->terms, class_of(item), now);
    if (until < item->rank)
        until = item->rank;
    return follows(r, item, now) && until > r->rank ? r->rank : until;
}

/*
 * What was promised on better terms than today's is cut to these, or what was popular once would stay for as long as it
 * was popular then. Last use and class of a block are never below those of one that continues it, so the order of the
 * two stands.
 */
static void cut_promise(const struct room *r, struct eviction_item *item)
{
    uint64_t most = item->last_used + r->promised[class_of(item)];
    item->rank = item->rank < most ? item->rank : most;
}

static uint64_t rank_of(const struct eviction *e, const struct eviction_item *item, uint64_t now, bool is_new)
{
    switch (e->policy) {
    case EVICTION_TANDEM:
        return keep_until(e->room, item, now);
    case EVICTION_S3FIFO:
        return is_new ? now : item->rank;
    case EVICTION_LFU:
        return item->n_uses;
    default:
        return now;
    }
}

static void use(struct eviction *e, struct eviction_item *item, uint64_t now, bool gains)
{
    struct room *r = e->room;
    bool is_new = !item->n_uses;
    if (r->learn)
        advance(r, now);
    if (is_new)
        recall(r, item);
    else if (gains && now != item->last_used && item->frequency < 3)
        item->frequency++;
    if (is_new || (gains && now != item->last_used))
        count(r, item, now);
    item->rank = rank_of(e, item, now, is_new);
    item->last_used = now;
    r->now = now;
    r->rank = item->rank;
    r->n_uses = item->n_uses;
    r->chain_index = item->chain_index;
}

/* ------------------------------------------------------------------- calls */

static void use_in_place(struct eviction *e, struct eviction_item *item, uint64_t now, bool gains)
{
    use(e, item, now, gains);
    if (item->at)
        settle(heap_of(e, item), item->at - 1, item);
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
    struct room *r = e->room;
    item->chain_index = chain_index;
    if (!item->n_uses || item->last_used != last_used)
        use(e, item, last_used, true);
    if (r->learn)
        cut_promise(r, item);
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
    struct room *r = e->room;
    eviction_remove(e, item);
    if (item->n_uses && r->ghosts)
        ghosts_put(r->ghosts, &(struct ghost){.key_hash = item->key_hash,
                                              .last_used = item->last_used,
                                              .n_uses = item->n_uses,
                                              .was_tail = item->was_tail});
    item->n_uses = 0;
}

void eviction_refused(struct eviction *e, struct eviction_item *item, uint64_t now)
{
    eviction_touch(e, item, now);
    eviction_leave(e, item);
}

/* s3fifo: what was used since it was queued goes to the main queue, or once more round it; what was not, goes. */
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
        item->rank = e->room->now;
        heap_push(&e->main, item);
    }
}

/* All of them. The order may be another one afterwards, so it is made anew: O(n), once in n / 4 uses at most. */
static void cut_promises(struct eviction *e)
{
    struct heap *h = &e->small;
    e->n_cuts = e->room->n_cuts;
    for (uint32_t i = 0; i < h->n; i++) {
        cut_promise(e->room, h->slots[i].item);
        h->slots[i].rank = h->slots[i].item->rank;
    }
    for (uint32_t i = h->n / 2; i-- > 0;)
        sink(h, i, h->slots[i].item);
}

struct eviction_item *eviction_victim(struct eviction *e)
{
    if (e->n_cuts != e->room->n_cuts)
        cut_promises(e);
    if (e->policy == EVICTION_S3FIFO)
        return fifo_victim(e);
    return e->small.n ? e->small.slots[0].item : NULL;
}

uint64_t eviction_count(const struct eviction *e)
{
    return (uint64_t)e->small.n + e->main.n;
}
