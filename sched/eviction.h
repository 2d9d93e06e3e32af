/*
 * Which block goes first when room is needed: an order over items, the same for DRAM, SSD and the simulator.
 *
 * Four policies stand behind one interface:
 *
 *   lru      the least recently used goes first.
 *   lfu      the least often used while it was here; among those, the least recently used.
 *   s3fifo   two queues and one bit of history (Yang et al., SOSP'23): what was not used again in the small one goes.
 *   tandem   a block has a time until which it is kept: last use + what its class is worth. Classes are counts of past
 *            uses, and how much was new in the requests; what one is worth is learned from the intervals between uses
 *            (sched/eviction_learn.h). Where lru would have found more of late, the order is lru's
 *            (sched/eviction_duel.h). docs/eviction.md has the reasons and the figures.
 *
 * A use of a chain is a use of all its blocks from the head on, at one time, head first. Equal ranks go by last use,
 * then the one furthest from the head first, then in order of insertion; so a chain is eaten from its tail, and no
 * order depends on addresses. In lru, lfu and tandem a block never goes before one that continues it, also when other
 * requests continue it too: its rank is never below theirs, since whatever uses them uses it. s3fifo gives no such
 * promise.
 *
 * Only what may be evicted is in the order: who pins a block removes its item and inserts it again later. So a victim
 * is always takeable. History is in the item and survives that; what is known about blocks that left is in a bounded
 * table, by hash of key.
 *
 * The same calls give the same victims. Time is the caller's, in any unit that rises. Every change is O(log n), to look
 * is O(1) amortised; when tandem has learned, the next look costs O(n), once in n / 4 uses at most (some 60 ms with a
 * million blocks).
 *
 * Memory: 48 bytes an item and 16 for its place. s3fifo and tandem also have 24 for each block that left and is
 * remembered: a power of two of places, from four times as many as there are items, at least 32768.
 *
 * Threads: one owner for all orders of one room.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum eviction_policy { EVICTION_LRU, EVICTION_LFU, EVICTION_S3FIFO, EVICTION_TANDEM, EVICTION_POLICIES };

/* "lru", "lfu", "s3fifo", "tandem"; EVICTION_NAMES is what an option table takes. */
#define EVICTION_NAMES "lru|lfu|s3fifo|tandem"
bool eviction_policy_from_name(const char *name, enum eviction_policy *out);
const char *eviction_policy_name(enum eviction_policy policy);

struct eviction_item {    /* embedded in what is to be evicted; zero-initialised: not in an order, without history */
    uint64_t key_hash;    /* the owner's, set before the first use; 0 everywhere: blocks that left are not told apart */
    uint64_t last_used;   /* read freely */
    uint64_t rank;        /* lowest goes first; the policy's */
    uint64_t sequence;    /* of insertion */
    uint32_t chain_index; /* set by insert, or by the owner before the first use */
    uint32_t at;          /* 1 + place in the heap; 0: in none */
    uint32_t n_uses;      /* 0: without history */
    uint8_t frequency;    /* s3fifo: uses since it was queued, 0 .. 3 */
    uint8_t shape;        /* tandem: the best of the requests that used it */
    bool in_main : 1;     /* s3fifo: which queue */
    bool is_tail : 1;     /* optional, set before a use: the request ends in it, and it may not be full */
    bool was_tail : 1;    /* at the last use */
    bool is_generous : 1; /* tandem: one of the requests that used it got generous terms */
};

struct eviction;

struct eviction *eviction_open(enum eviction_policy policy);
/* One more order over blocks in the same room: an item may go from one to the other, and what is learned is shared. */
struct eviction *eviction_open_beside(struct eviction *first);
/* NULL is fine. The items are the caller's. Orders of one room are closed in any order. */
void eviction_close(struct eviction *e);

static inline bool eviction_contains(const struct eviction_item *item)
{
    return item->at != 0;
}

/*
 * Optional, before the uses of a request: the blocks that it asks for and that are not here, head first. How many of
 * them are remembered says how much of the request is new, which is part of the class of all that it uses. Holds until
 * the next call; what is used without one counts as part of a request of which much is new.
 */
void eviction_request(struct eviction *e, const uint64_t *key_hashes, uint32_t n);

/* last_used other than the item's is a use at that time; an item without history is always used first. */
void eviction_insert(struct eviction *e, struct eviction_item *item, uint32_t chain_index, uint64_t last_used);
/* A use; in e or in none. The first of an item without history asks whether its block is remembered. */
void eviction_touch(struct eviction *e, struct eviction_item *item, uint64_t now);
/* As touch, but nobody gained from the block being here (who offers it has it): nothing is learned from it. */
void eviction_keep(struct eviction *e, struct eviction_item *item, uint64_t now);
void eviction_remove(struct eviction *e, struct eviction_item *item); /* not in e: nothing */
/* The block left: it is removed and remembered, and the item is without history. Without this nothing is remembered. */
void eviction_leave(struct eviction *e, struct eviction_item *item);
/*
 * A block that was asked for, isn't here and gets no room, since what would go is worth more: a use, then a leave.
 * Without it a policy that refuses would never learn that what it refuses comes back. The item is only in, and not
 * kept.
 */
void eviction_refused(struct eviction *e, struct eviction_item *item, uint64_t now);

struct eviction_item *eviction_victim(struct eviction *e); /* NULL if nothing may go; stays in e */
uint64_t eviction_count(const struct eviction *e);
