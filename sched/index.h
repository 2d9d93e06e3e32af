/*
 * Prefix index: which holders (workers and stores) have which blocks, fed by their sequenced events.
 *
 * One entry a key with a bit for each holder and tier; open addressing, linear probing, at most half full. A worker's chain is
 * closed under prefixes, so its longest match is found by galloping over the request's key array: O(log n) lookups. It is a
 * hint: workers check again.
 *
 * Threads: one owner. Memory: 40 bytes an entry; index_blocks() says how many there are.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "proto/wire/block_key.h"
#include "proto/wire/events.h"

enum { INDEX_MAX_HOLDERS = 64 };

struct index;

struct index *index_open(void);
void index_close(struct index *x); /* NULL is fine */

/* holder < INDEX_MAX_HOLDERS, given out by the caller. */
void index_add(struct index *x, uint32_t holder, enum block_tier tier, const struct block_key *key);
void index_remove(struct index *x, uint32_t holder, enum block_tier tier, const struct block_key *key);
void index_clear(struct index *x, uint32_t holder); /* it died, or sends a snapshot */

/* Length of the longest prefix of keys[0..n) of which each block is with one of the holders (a bit for each), in any tier. */
uint32_t index_match(const struct index *x, uint64_t holders, const struct block_key *keys, uint32_t n);
/* The same of stores, which hold a chain by segments (sched/ring.h): how many blocks from keys[first] on. O(n / 64 log 64). */
uint32_t index_match_segments(const struct index *x, uint64_t holders, const struct block_key *keys, uint32_t first,
                              uint32_t n);
uint64_t index_blocks(const struct index *x);

/* How many of keys[0..n), which the holders have, are on disk only: counted on up to 64 of them, and scaled up. */
uint32_t index_on_disk(const struct index *x, uint64_t holders, const struct block_key *keys, uint32_t n);

/* All that holder has, a block in two tiers counted twice: how many, and the sum of their block_digest(). Walks everything. */
uint64_t index_digest(const struct index *x, uint32_t holder, uint64_t *n_blocks_out);
