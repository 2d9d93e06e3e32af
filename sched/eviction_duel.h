/*
 * Compares the learned terms of the tandem policy with lru. The one that finds more blocks is in force.
 *
 * No second cache is simulated. Lives that have not ended are counted by class and by the slice of time in
 * which they began. From these counts follows what an lru cache of this size would hold now (all blocks used
 * since a certain time) and what a cache with the learned terms would hold (all blocks kept until a certain
 * time or longer). So a use that ends a life is a hit or a miss of lru, and a hit or a miss of the learned
 * terms. While the learned terms are in force, their hits are not estimated: they are the blocks that were
 * here.
 *
 * So learned terms that are wrong, too early or out of date cost some thousand uses, and a load from which
 * nothing can be learned gets lru.
 *
 * Rejected: two sampled caches (more memory, and a hundred sampled blocks tell little of a small cache); a
 * test of significance (it decides no better than a margin, and later).
 *
 * Memory: some 12 kB. Time is the caller's, as in eviction.h. Owned by one room.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "sched/eviction_learn.h"

enum { DUEL_SLICES = 64 };

struct duel {
    /* Start times, a ring of slices; the oldest slice reaches back to the first use. */
    uint64_t starts[DUEL_SLICES];
    /* Lives that go on, by slice of their begin. */
    int32_t alive[LEARN_CLASSES][DUEL_SLICES], total[DUEL_SLICES];
    uint32_t newest, n_slices;
    uint64_t n_uses; /* in the newest slice */

    struct learn_terms terms; /* the learned terms */
    /* a cache with these terms holds blocks kept until now + ahead or longer; may be < 0. */
    double ahead;
    uint64_t lru_since;    /* an lru cache holds the blocks used since this time */
    double hits, lru_hits; /* hits of the learned terms; hits of lru */
    uint64_t n_counted;    /* uses since the hits were halved */
    bool has_terms;        /* terms were learned */
    bool in_force;         /* the learned terms decide; false: lru */
};

void duel_begin(struct duel *d, uint32_t class);
/* was_here: the use found the block in the cache. */
void duel_end(struct duel *d, uint32_t class, bool is_generous, bool was_here, uint64_t began, uint64_t now);

/* The time is now; the cache has n_blocks blocks. */
void duel_advance(struct duel *d, uint64_t now, uint64_t n_blocks);

/* New terms were learned: decides whether they or lru are in force. */
void duel_terms(struct duel *d, const struct learn_terms *terms, uint64_t now, uint64_t n_blocks);
