/*
 * Which block goes first when room is needed: a pure order over items, the same for DRAM, SSD and the simulator.
 *
 * An item's score is (time of last use, place in its chain): the least recently used goes first, and of those used at the
 * same time the one furthest from the head of its chain. A request gives all blocks that it touches the same time, so a chain
 * is eaten from its tail, and heads, which many requests share, outlive their tails. Equal scores go in order of insertion,
 * so the order never depends on addresses.
 *
 * Only what may be evicted is in it: who pins a block removes its item and inserts it again later, with the time of its last
 * use. So a victim is always takeable. A binary heap of borrowed items: O(log n) for every change, O(1) to look.
 *
 * Threads: one owner.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum eviction_policy { EVICTION_LRU };

struct eviction_item {  /* embedded in what is to be evicted; zero-initialised: not in an order */
    uint64_t last_used; /* in any unit that rises */
    uint64_t sequence;
    uint32_t chain_index;
    uint32_t at; /* 1 + place in the heap; 0: in none */
};

struct eviction;

struct eviction *eviction_open(enum eviction_policy policy);
void eviction_close(struct eviction *e); /* NULL is fine; the items are the caller's */

static inline bool eviction_contains(const struct eviction_item *item)
{
    return item->at != 0;
}
void eviction_insert(struct eviction *e, struct eviction_item *item, uint32_t chain_index, uint64_t last_used);
void eviction_touch(struct eviction *e, struct eviction_item *item, uint64_t now); /* in e or not: its time is set */
void eviction_remove(struct eviction *e, struct eviction_item *item);              /* not in e: nothing */

struct eviction_item *eviction_victim(const struct eviction *e); /* NULL if nothing may go; stays in e */
uint64_t eviction_count(const struct eviction *e);
