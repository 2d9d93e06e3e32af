/*
 * The pages of one worker, in the states of engine/kvpool.h: held by legs, cached, free. A block that can be
 * asked for again has a name, which is its number. The pages of answers are cached like other pages and push
 * them out, but no trace asks for them.
 */
#include <assert.h>
#include <stdlib.h>

#include "base/mem.h"
#include "base/random.h"
#include "replay/simulate_internal.h"

enum { HEAD = 0, LEAST_SLOTS = 64 };

void pool_init(struct sim_pool *p, uint32_t n_pages)
{
    *p = (struct sim_pool){
        .n_pages = n_pages, .n_free = n_pages, .n_entries = 1, .cap_entries = 64, .n_slots = LEAST_SLOTS};
    p->entries = mem_array(p->cap_entries, sizeof(*p->entries));
    p->slots = mem_array(p->n_slots, sizeof(*p->slots));
}

void pool_fini(struct sim_pool *p)
{
    free(p->entries);
    free(p->slots);
    *p = (struct sim_pool){0};
}

/* ----------------------------------------------------------------- entries */

static void unlink_entry(struct sim_pool *p, uint32_t i)
{
    struct sim_entry *e = &p->entries[i];
    p->entries[e->prev].next = e->next;
    p->entries[e->next].prev = e->prev;
    p->n_idle -= e->n_pages;
}

static void link_last(struct sim_pool *p, uint32_t i)
{
    struct sim_entry *e = &p->entries[i], *head = &p->entries[HEAD];
    e->prev = head->prev;
    e->next = HEAD;
    p->entries[head->prev].next = i;
    head->prev = i;
    p->n_idle += e->n_pages;
}

static uint32_t new_entry(struct sim_pool *p, uint32_t block, uint32_t n_pages, uint32_t n_holds)
{
    uint32_t i = p->first_free;
    if (i) {
        p->first_free = p->entries[i].next;
    } else {
        if (p->n_entries == p->cap_entries) {
            p->cap_entries *= 2;
            p->entries = mem_resize(p->entries, p->cap_entries, sizeof(*p->entries));
        }
        i = p->n_entries++;
    }
    p->entries[i] = (struct sim_entry){.block = block, .n_pages = n_pages, .n_holds = n_holds};
    return i;
}

static void free_entry(struct sim_pool *p, uint32_t i)
{
    p->entries[i].next = p->first_free;
    p->first_free = i;
}

/* ------------------------------------------------------------------- names */

static uint32_t home(const struct sim_pool *p, uint32_t block)
{
    return (uint32_t)random_mix(block) & (p->n_slots - 1);
}

static uint32_t find_slot(const struct sim_pool *p, uint32_t block)
{
    uint32_t i = home(p, block);
    while (p->slots[i] && p->entries[p->slots[i]].block != block)
        i = (i + 1) & (p->n_slots - 1);
    return i;
}

static void grow_slots(struct sim_pool *p)
{
    uint32_t n_old = p->n_slots, *old = p->slots;
    p->n_slots *= 2;
    p->slots = mem_array(p->n_slots, sizeof(*p->slots));
    for (uint32_t i = 0; i < n_old; i++)
        if (old[i])
            p->slots[find_slot(p, p->entries[old[i]].block)] = old[i];
    free(old);
}

static void add_name(struct sim_pool *p, uint32_t entry)
{
    if (2 * ++p->n_named > p->n_slots)
        grow_slots(p);
    p->slots[find_slot(p, p->entries[entry].block)] = entry;
}

/* Moves later entries of the cluster up, so that no search ends too early (Knuth 6.4, algorithm R). */
static void remove_name(struct sim_pool *p, uint32_t block)
{
    uint32_t mask = p->n_slots - 1, hole = find_slot(p, block);
    for (uint32_t i = (hole + 1) & mask; p->slots[i]; i = (i + 1) & mask) {
        uint32_t from = home(p, p->entries[p->slots[i]].block);
        if (((i - from) & mask) >= ((i - hole) & mask)) {
            p->slots[hole] = p->slots[i];
            hole = i;
        }
    }
    p->slots[hole] = 0;
    p->n_named--;
}

/* ------------------------------------------------------------------- pages */

/* Evicts the least recently used entry. Of an answer it takes only as many pages as are needed, from its
 * end. */
static void evict(struct sim *s, struct sim_worker_node *n, uint32_t n_pages)
{
    struct sim_pool *p = &n->pool;
    uint32_t victim = p->entries[HEAD].next;
    struct sim_entry *e = &p->entries[victim];
    assert(victim != HEAD);
    if (e->block == NO_BLOCK && e->n_pages > n_pages) {
        e->n_pages -= n_pages;
        p->n_idle -= n_pages;
        p->n_free += n_pages;
        return;
    }
    unlink_entry(p, victim);
    p->n_free += e->n_pages;
    if (e->block != NO_BLOCK) {
        remove_name(p, e->block);
        blocks_set(s, (uint32_t)(n - s->nodes), e->block, false);
    }
    if (e->owner)
        s->seqs[e->owner - 1].answer = 0;
    free_entry(p, victim);
}

bool pool_take(struct sim *s, struct sim_worker_node *n, uint32_t n_pages)
{
    struct sim_pool *p = &n->pool;
    if (p->n_free + p->n_idle < n_pages)
        return false;
    while (p->n_free < n_pages)
        evict(s, n, n_pages - p->n_free);
    p->n_free -= n_pages;
    return true;
}

uint32_t pool_takeable(const struct sim_worker_node *n)
{
    return n->pool.n_free + n->pool.n_idle;
}

void pool_give(struct sim_worker_node *n, uint32_t n_pages)
{
    n->pool.n_free += n_pages;
}

bool pool_hold(struct sim_worker_node *n, uint32_t block)
{
    struct sim_pool *p = &n->pool;
    uint32_t i = p->slots[find_slot(p, block)];
    if (!i)
        return false;
    if (!p->entries[i].n_holds++)
        unlink_entry(p, i);
    return true;
}

void pool_unhold(struct sim_worker_node *n, uint32_t block)
{
    struct sim_pool *p = &n->pool;
    uint32_t i = p->slots[find_slot(p, block)];
    assert(i && p->entries[i].n_holds);
    if (!--p->entries[i].n_holds)
        link_last(p, i);
}

bool pool_name(struct sim *s, struct sim_worker_node *n, uint32_t block, uint32_t n_pages)
{
    if (n->pool.slots[find_slot(&n->pool, block)])
        return false;
    add_name(&n->pool, new_entry(&n->pool, block, n_pages, 1));
    blocks_set(s, (uint32_t)(n - s->nodes), block, true);
    return true;
}

void pool_cache_answer(struct sim *s, struct sim_worker_node *n, uint32_t n_pages, struct sim_seq *q)
{
    if (!n_pages)
        return;
    uint32_t i = new_entry(&n->pool, NO_BLOCK, n_pages, 0);
    link_last(&n->pool, i);
    if (q) {
        q->answer = i;
        n->pool.entries[i].owner = 1 + (uint32_t)(q - s->seqs);
    }
}

uint32_t pool_take_answer(struct sim_worker_node *n, struct sim_seq *q)
{
    uint32_t i = q->answer, n_pages = n->pool.entries[i].n_pages;
    unlink_entry(&n->pool, i);
    free_entry(&n->pool, i);
    q->answer = 0;
    return n_pages;
}

void pool_leave_answer(struct sim_worker_node *n, struct sim_seq *q)
{
    if (q->answer)
        n->pool.entries[q->answer].owner = 0;
    q->answer = 0;
}

void pool_forget(struct sim *s, struct sim_worker_node *n)
{
    struct sim_pool *p = &n->pool;
    uint32_t n_pages = p->n_pages;
    for (uint32_t i = 0; i < p->n_slots; i++)
        if (p->slots[i])
            blocks_set(s, (uint32_t)(n - s->nodes), p->entries[p->slots[i]].block, false);
    pool_fini(p);
    pool_init(p, n_pages);
}
