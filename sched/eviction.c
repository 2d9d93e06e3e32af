#include "sched/eviction.h"

#include <stdlib.h>

#include "base/mem.h"

struct eviction {
    enum eviction_policy policy;
    struct eviction_item **heap; /* parent of i at (i - 1) / 2; the victim is the first */
    uint32_t n, cap;
    uint64_t next_sequence;
};

struct eviction *eviction_open(enum eviction_policy policy)
{
    struct eviction *e = mem_zalloc(sizeof(*e));
    e->policy = policy;
    return e;
}

void eviction_close(struct eviction *e)
{
    if (!e)
        return;
    for (uint32_t i = 0; i < e->n; i++)
        e->heap[i]->at = 0;
    free(e->heap);
    free(e);
}

static bool goes_before(const struct eviction_item *a, const struct eviction_item *b)
{
    if (a->last_used != b->last_used)
        return a->last_used < b->last_used;
    if (a->chain_index != b->chain_index)
        return a->chain_index > b->chain_index;
    return a->sequence < b->sequence;
}

static void place(struct eviction *e, uint32_t i, struct eviction_item *item)
{
    e->heap[i] = item;
    item->at = i + 1;
}

/* Moves the item, whose place i is free to be overwritten, to where it belongs. */
static void settle(struct eviction *e, uint32_t i, struct eviction_item *item)
{
    while (i && goes_before(item, e->heap[(i - 1) / 2])) {
        place(e, i, e->heap[(i - 1) / 2]);
        i = (i - 1) / 2;
    }
    for (uint32_t child; (child = 2 * i + 1) < e->n; i = child) {
        if (child + 1 < e->n && goes_before(e->heap[child + 1], e->heap[child]))
            child++;
        if (!goes_before(e->heap[child], item))
            break;
        place(e, i, e->heap[child]);
    }
    place(e, i, item);
}

void eviction_insert(struct eviction *e, struct eviction_item *item, uint32_t chain_index, uint64_t last_used)
{
    if (e->n == e->cap) {
        e->cap = e->cap ? 2 * e->cap : 64;
        e->heap = mem_resize(e->heap, e->cap, sizeof(e->heap[0]));
    }
    item->chain_index = chain_index;
    item->last_used = last_used;
    item->sequence = e->next_sequence++;
    e->heap[e->n] = item; /* room for settle(), which never reads it */
    settle(e, e->n++, item);
}

void eviction_touch(struct eviction *e, struct eviction_item *item, uint64_t now)
{
    item->last_used = now;
    if (item->at)
        settle(e, item->at - 1, item);
}

void eviction_remove(struct eviction *e, struct eviction_item *item)
{
    if (!item->at)
        return;
    uint32_t i = item->at - 1;
    struct eviction_item *last = e->heap[--e->n];
    item->at = 0;
    if (last != item)
        settle(e, i, last);
}

struct eviction_item *eviction_victim(const struct eviction *e)
{
    return e->n ? e->heap[0] : NULL;
}

uint64_t eviction_count(const struct eviction *e)
{
    return e->n;
}
