/*
 * Runs a trace against one cache of a given size and policy: how many blocks of the prompts would have been
 * found.
 *
 * A request asks for its blocks from the head on, and finds them up to the first one that is missing. That
 * block and those after it are then stored, as far as the policy makes room without evicting a block of this
 * request. Time is the number of the request, as in the store. A block is identified by all ids from the head
 * to its own.
 *
 * The optimum is Belady's with bypass: the block whose next use is furthest in the future is evicted, which
 * may be the new block itself. A block is used no later than the blocks that continue it, so the optimum
 * never leaves a hole in a chain, and no policy can find more blocks.
 *
 * Threads: one owner. The trace is borrowed.
 */
#pragma once

#include <stdint.h>

#include "replay/trace.h"
#include "sched/eviction.h"

struct evict_sim;

struct evict_result {
    uint64_t n_asked, n_hits; /* blocks */
    uint64_t n_first_uses;    /* first uses of blocks, which no cache can find */
    uint64_t n_evicted;
    uint64_t n_stranded;   /* evicted blocks of which a continuation stayed in the cache */
    uint64_t victims_hash; /* hash of the evicted blocks in their order */
    uint64_t n_operations; /* operations of the policy: uses, insertions, looks at the victim, evictions */
    uint64_t elapsed_ns;
};

/* block_tokens: tokens of a block. A partial last block is then left out, as in a store, which has full
 * blocks only. 0: all blocks that the trace names count. */
struct evict_sim *evict_sim_open(const struct trace *trace, uint32_t block_tokens);
void evict_sim_close(struct evict_sim *s); /* NULL is fine */

/* Capacity in blocks, at least 1. */
void evict_sim_run(struct evict_sim *s, enum eviction_policy policy, uint64_t capacity, struct evict_result *out);
void evict_sim_optimum(struct evict_sim *s, uint64_t capacity, struct evict_result *out);
