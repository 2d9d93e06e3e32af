/*
 * Prefix index: which holders (workers and stores) have which blocks, fed by their sequenced events.
 *
 * The index is a hint; workers check again. A holder is a number that the caller assigns. A worker that has a
 * block also has all earlier blocks of the chain, so the end of its match is found by bisection, for all
 * workers at once. Stores hold chains by segments (sched/ring.h) and are looked up segment by segment.
 *
 * Threads: one writer. The functions under "readers" may be called by other threads between
 * index_read_begin() and index_read_end(); they take no lock. They report each holder of each block as it was
 * at some moment during the call. Memory that readers may still use is freed later. The writer waits for
 * readers only if INDEX_MAX_HOLDERS clears come within one sweep.
 *
 * Memory: 32 bytes for an entry, with 1/3 to 3/4 of the entries in use; about 300 bytes more for a block with
 * more than 8 holders. Bounded by max_blocks. Blocks beyond that, or for which there is no memory, are
 * dropped and counted. An empty index takes 500 KB.
 *
 * Sources of the algorithms: index_internal.h.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "proto/wire/block_key.h"
#include "proto/wire/events.h"

enum { INDEX_MAX_HOLDERS = 512, INDEX_MAX_READERS = 64 };

struct index;
struct index_reader;

/* A set of holders; zero-initialised is empty. */
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

/*
 * Applies a holder's events, in the order in which it sent them. Memory of workers and stores counts as one
 * tier.
 */
void index_apply(struct index *x, uint32_t holder, const struct block_event *events, uint32_t n);

/*
 * The holder died, or sends a snapshot: none of its blocks is found any more. index_sweep() cleans up later.
 */
void index_clear(struct index *x, uint32_t holder);

/*
 * Removes cleared holders from up to n entries, and frees memory that readers no longer use. Call it now and
 * then. False: there is nothing left to do.
 */
bool index_sweep(struct index *x, uint32_t n);

/* Blocks with a holder; blocks of cleared holders count until they are swept. */
uint64_t index_blocks(const struct index *x);
uint64_t index_bytes(const struct index *x);   /* memory in use */
uint64_t index_dropped(const struct index *x); /* blocks that were not taken, since index_open() */

/*
 * The number of the holder's blocks and the sum of their block_digest(); a block in two tiers counts twice.
 * O(1). False: some of its blocks were dropped since its last clear, so the numbers are too small.
 */
bool index_digest(const struct index *x, uint32_t holder, uint64_t *n_blocks_out, uint64_t *digest_out);

/* ----------------------------------------------------------------- readers */

/* Any thread. NULL if INDEX_MAX_READERS are open. */
struct index_reader *index_reader_open(struct index *x);
void index_reader_close(struct index_reader *r); /* NULL is fine */

/*
 * Keep the time between short, such as the lookups of one request: meanwhile no memory is freed. No nesting.
 */
void index_read_begin(struct index_reader *r);
void index_read_end(struct index_reader *r);

/*
 * Length, in blocks, of the longest prefix of keys[0..n) that the holder has, in any tier. O(log n) lookups.
 */
uint32_t index_match(const struct index *x, uint32_t holder, const struct block_key *keys, uint32_t n);

/*
 * index_match() for each holder of the set, to lengths_out[holder]. O(e log n) lookups for e different
 * lengths.
 */
void index_match_each(const struct index *x, const struct holder_set *holders, const struct block_key *keys, uint32_t n,
                      uint32_t lengths_out[INDEX_MAX_HOLDERS]);

/* Number of blocks from keys[first] on of which each is held by some store of the set. O(n / 64) lookups. */
uint32_t index_match_segments(const struct index *x, const struct holder_set *holders, const struct block_key *keys,
                              uint32_t first, uint32_t n);

/*
 * Estimates how many of keys[0..n), all held by the set, are only on disk: looks at 64 to 127 of them and
 * scales up.
 */
uint32_t index_on_disk(const struct index *x, const struct holder_set *holders, const struct block_key *keys,
                       uint32_t n);
