/*
 * Which block is evicted first: an order over items, used for DRAM, SSD and in the simulator.
 *
 * Four policies stand behind one interface:
 *
 *   lru      the least recently used block goes first.
 *   lfu      the block with the fewest uses since it came; among equals, the least recently used.
 *   s3fifo   two queues and a little history (Yang et al., SOSP'23): blocks of the small queue that are
 *            not used again go first.
 *   tandem   a block is kept until its last use + the worth of its class. A class is a number of past uses
 *            and how much of the requests was new; its worth is learned from the intervals between uses
 *            (sched/eviction_learn.h). While lru would find more, the order is lru's (sched/eviction_duel.h).
 *            docs/eviction.md has the reasons and the figures.
 *
 * A use of a chain is a use of all its blocks from the head on, at one time, head first. Blocks of equal rank
 * go by last use, then the one furthest from the head first, then in order of insertion. So a chain is
 * evicted from its tail, and no order depends on addresses. In lru, lfu and tandem a block never goes before
 * a block that continues it, even if several requests continue it: each use of those is a use of this block,
 * so its rank is never below theirs. s3fifo does not promise that.
 *
 * The order contains only blocks that may be evicted: a caller that pins a block removes its item and inserts
 * it again later. So a victim can always be taken. An item keeps its history meanwhile. The history of blocks
 * that left is kept in a bounded table by hash of the key.
 *
 * Equal calls give equal victims. Time is the caller's, in any unit that rises. A change takes O(log n),
 * finding a victim O(1) amortised. After tandem has learned, the next victim takes O(n), at most once in n /
 * 4 uses (some 60 ms with a million blocks).
 *
 * Memory: 48 bytes for an item and 16 for its place in the order. s3fifo and tandem also use 24 bytes for
 * each place in the table of blocks that left: a power of two of places, at least four times the number of
 * items and at least 32768.
 *
 * Threads: one owner for all orders of one room. A room is the memory that several orders share
 * (eviction_open_beside()).
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum eviction_policy { EVICTION_LRU, EVICTION_LFU, EVICTION_S3FIFO, EVICTION_TANDEM, EVICTION_POLICIES };

/* "lru", "lfu", "s3fifo", "tandem"; EVICTION_NAMES is what an option table takes. */
#define EVICTION_NAMES "lru|lfu|s3fifo|tandem"
bool eviction_policy_from_name(const char *name, enum eviction_policy *out);
const char *eviction_policy_name(enum eviction_policy policy);

/* Embedded in the caller's block. All zero: in no order, without history. */
struct eviction_item {
    /* Set by the caller before the first use; 0 for all: no block that left is recognised. */
    uint64_t key_hash;
    uint64_t last_used; /* the caller may read it */
    uint64_t rank;      /* set by the policy; the lowest goes first */
    uint64_t sequence;  /* number of the insertion */
    /* Blocks before it in its chain; set by insert, or by the caller before the first use. */
    uint32_t chain_index;
    uint32_t at;       /* 1 + place in the heap; 0: in no heap */
    uint32_t n_uses;   /* 0: no history */
    uint8_t frequency; /* s3fifo: uses since it was queued, 0 .. 3 */
    uint8_t shape;     /* tandem: the best shape of the requests that used it */
    bool in_main : 1;  /* s3fifo: it is in the main queue */
    /* optional, set before a use: the request ends in this block, which may not be full. */
    bool is_tail : 1;
    bool was_tail : 1;    /* it was a tail at its last use */
    bool is_generous : 1; /* tandem: one of the requests that used it got generous terms */
};

struct eviction;

struct eviction *eviction_open(enum eviction_policy policy);
/* A further order in the same room: items may move between the orders, and what is learned is shared. */
struct eviction *eviction_open_beside(struct eviction *first);
/* NULL is fine. The items stay the caller's. Orders of one room may be closed in any sequence. */
void eviction_close(struct eviction *e);

static inline bool eviction_contains(const struct eviction_item *item)
{
    return item->at != 0;
}

/*
 * Optional, before the uses of a request: names the blocks that it asks for and that are not here, head
 * first. How many of them are remembered tells how much of the request is new, which is part of the class of
 * all blocks that it uses. Valid until the next call. Uses without such a call count as uses by a request
 * with much new.
 */
void eviction_request(struct eviction *e, const uint64_t *key_hashes, uint32_t n);

/*
 * Inserts an item. If last_used differs from the item's, or the item has no history, this is a use at
 * last_used.
 */
void eviction_insert(struct eviction *e, struct eviction_item *item, uint32_t chain_index, uint64_t last_used);
/*
 * A use of an item in e or in no order. The first use of an item without history takes what is remembered of
 * its block.
 */
void eviction_touch(struct eviction *e, struct eviction_item *item, uint64_t now);
/* As touch, for a use that gained nothing from the block (its sender has it): nothing is learned. */
void eviction_keep(struct eviction *e, struct eviction_item *item, uint64_t now);
void eviction_remove(struct eviction *e, struct eviction_item *item); /* does nothing if it is not in e */
/* The block left: the item is removed, its history is remembered, and the item has no history any more. */
void eviction_leave(struct eviction *e, struct eviction_item *item);
/*
 * A block that was asked for, is not here and gets no room, since the victim is worth more: counts a use,
 * then a leave. Without this call the policy would never learn that refused blocks are asked for again. item
 * is only an input; it is not kept.
 */
void eviction_refused(struct eviction *e, struct eviction_item *item, uint64_t now);

/* The block to evict next; it stays in e. NULL: none. */
struct eviction_item *eviction_victim(struct eviction *e);
uint64_t eviction_count(const struct eviction *e);
