/*
 * A trace against one cache of a given size and policy: how many blocks of the prompts would have been found.
 *
 * A request asks for its blocks from the head on, and finds them up to the first that is not there; that one
 * and what follows is then stored, as far as the policy makes room without taking a block of this very
 * request. Time is the number of the request, as in the store. A block's identity covers all blocks before
 * it, whatever its id.
 *
 * The optimum is Belady's with bypass: the block whose next use is furthest in the future goes, which may be
 * the new one. Blocks of a prefix are used no later than what continues them, so it never leaves a hole, and
 * no policy can find more blocks.
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
    uint64_t n_first_uses;    /* blocks never asked for before: no cache finds them */
    uint64_t n_evicted;
    uint64_t n_stranded;   /* evicted while a block that continues them stayed */
    uint64_t victims_hash; /* of the victims in their order */
    uint64_t n_operations; /* on the order: uses, insertions, looks at the victim, evictions */
    uint64_t elapsed_ns;
};

/*
 * block_tokens: how many tokens a block has; a last one that is not full is left out then, as in a store,
 * which only has full ones. 0: whatever the trace names counts.
 */
struct evict_sim *evict_sim_open(const struct trace *trace, uint32_t block_tokens);
void evict_sim_close(struct evict_sim *s); /* NULL is fine */

/* capacity in blocks, >= 1. */
void evict_sim_run(struct evict_sim *s, enum eviction_policy policy, uint64_t capacity, struct evict_result *out);
void evict_sim_optimum(struct evict_sim *s, uint64_t capacity, struct evict_result *out);
