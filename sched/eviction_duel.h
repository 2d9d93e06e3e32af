/*
 * Whether what the tandem policy learned finds more than lru would. The better of the two is in force.
 *
 * No second cache is kept for this. Lives that have not ended are counted by class and by the slice of time in which
 * they began. These counts tell what an lru cache of this size would hold now: all blocks used since a certain time.
 * They also tell what a cache would hold that goes by the learned terms: all blocks kept until a certain time or
 * longer. A use that ends a life is then a hit of lru or not, and a hit of the learned terms or not. While the learned
 * terms are in force, what they find is not estimated: it is what was here.
 *
 * So learned terms that are wrong, too early or out of date cost some thousand uses, and a load that nothing can be
 * learned of gets lru.
 *
 * Rejected: two sampled caches (more memory, and a hundred sampled blocks tell little of a small cache); a test of
 * significance (it decides no better than a margin, and later).
 *
 * Memory: some 12 kB. Time is the caller's, as in eviction.h. Owned by one room.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "sched/eviction_learn.h"

enum { DUEL_SLICES = 64 };

struct duel {
    uint64_t starts[DUEL_SLICES]; /* a ring; the oldest slice reaches back to the first use */
    int32_t alive[LEARN_CLASSES][DUEL_SLICES], total[DUEL_SLICES];
    uint32_t newest, n_slices;
    uint64_t n_uses; /* in the newest slice */

    struct learn_terms terms; /* the learned ones */
    double ahead;          /* a cache going by them holds what is kept until now + ahead or longer; may be negative */
    uint64_t lru_since;    /* an lru cache holds what was used since */
    double hits, lru_hits; /* of the learned terms, of lru */
    uint64_t n_counted;    /* uses since hits were halved */
    bool has_terms;        /* terms were learned */
    bool in_force;         /* they decide, not lru */
};

void duel_begin(struct duel *d, uint32_t class);
/* was_here: the use found the block in the cache. */
void duel_end(struct duel *d, uint32_t class, bool is_generous, bool was_here, uint64_t began, uint64_t now);

/* Time has come to now; n_blocks are here. */
void duel_advance(struct duel *d, uint64_t now, uint64_t n_blocks);

/* New terms were learned. Decides which are in force. */
void duel_terms(struct duel *d, const struct learn_terms *terms, uint64_t now, uint64_t n_blocks);
