/*
 * Prefix index: which holders (workers and stores) have which blocks, fed by their sequenced events.
 *
 * It is a hint: workers check again. A holder is a number that the caller gives out. A worker's chain is closed under
 * prefixes, so where its match ends is found by bisection, for all workers at once; stores hold chains by segments
 * (sched/ring.h) and are asked segment by segment.
 *
 * Threads: one writer. Readers call what stands under "readers"; on other threads than the writer's they bracket their calls
 * by index_read_begin and _end, and take no lock. Each holder of each block is then reported as it was at some moment during
 * the call. What readers may still look at is freed later; the writer waits for the ends of their brackets only if
 * INDEX_MAX_HOLDERS clears come within one sweep.
 *
 * Memory: 32 bytes a block with up to 8 holders, at a load of 1/3 to 3/4; about 300 more for a block with more holders.
 * Bounded by max_blocks; what is beyond it, or finds no memory, is dropped and counted. An empty index is 500 KB.
 *
 * Sources: index_internal.h names those of its parts.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "proto/wire/block_key.h"
#include "proto/wire/events.h"

enum { INDEX_MAX_HOLDERS = 512, INDEX_MAX_READERS = 64 };

struct index;
struct index_reader;

/* Some of the holders; zero-initialised is none. */
struct holder_set {
    uint64_t words[INDEX_MAX_HOLDERS / 64];
};

static inline void holder_set_add(struct holder_set *s, uint32_t holder)
{
    s->words[holder / 64] |= 1ull << holder % 64;
}
static inline struct holder_set holder_set_of(uint32_t holder)
{
    struct holder_set s = {{0}};
    holder_set_add(&s, holder);
    return s;
}

struct index *index_open(uint64_t max_blocks); /* 0: no limit */
void index_close(struct index *x);             /* NULL is fine; no reader is left */

/* ------------------------------------------------------------------ writer */

/* What the holder says, in its order. Memory of a worker and of a store are one tier here. */
void index_apply(struct index *x, uint32_t holder, const struct block_event *events, uint32_t n);

/* It died, or sends a snapshot. At once nothing of it is found any more; what it leaves behind is for index_sweep. */
void index_clear(struct index *x, uint32_t holder);

/*
 * Looks at up to n entries for what cleared holders left behind, and frees what readers no longer use. False: nothing more
 * is to be done. To be called now and then.
 */
bool index_sweep(struct index *x, uint32_t n);

/* Blocks that somebody has, or had before a clear that is not swept yet. */
uint64_t index_blocks(const struct index *x);
uint64_t index_bytes(const struct index *x);   /* of memory */
uint64_t index_dropped(const struct index *x); /* blocks that found no place, since it was opened */

/*
 * All that holder has, a block in two tiers counted twice: how many, and the sum of their block_digest(). Kept up all the
 * time. False: some of its blocks were dropped since its last clear.
 */
bool index_digest(const struct index *x, uint32_t holder, uint64_t *n_blocks_out, uint64_t *digest_out);

/* ----------------------------------------------------------------- readers */

/* Any thread. NULL when there are INDEX_MAX_READERS already. */
struct index_reader *index_reader_open(struct index *x);
void index_reader_close(struct index_reader *r); /* NULL is fine */

/* What lies between is one request's lookups or so: memory that the writer drops meanwhile stays. No nesting. */
void index_read_begin(struct index_reader *r);
void index_read_end(struct index_reader *r);

/* Length of the longest prefix of keys[0..n) that the holder has, in any tier. O(log n) lookups. */
uint32_t index_match(const struct index *x, uint32_t holder, const struct block_key *keys, uint32_t n);

/* The same of each of the holders: lengths_out[holder]; others are not written. O(e log n) lookups for e different lengths. */
void index_match_each(const struct index *x, const struct holder_set *holders, const struct block_key *keys, uint32_t n,
                      uint32_t lengths_out[INDEX_MAX_HOLDERS]);

/* How many blocks from keys[first] on are each with one of the stores, which hold chains by segments. O(n / 64) lookups. */
uint32_t index_match_segments(const struct index *x, const struct holder_set *holders, const struct block_key *keys,
                              uint32_t first, uint32_t n);

/* How many of keys[0..n), which the holders have, are on disk only: counted on up to 64 of them, and scaled up. */
uint32_t index_on_disk(const struct index *x, const struct holder_set *holders, const struct block_key *keys,
                       uint32_t n);
