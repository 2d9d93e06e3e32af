/*
 * What the tandem policy learns: how long after a use the next one comes, by class of block, and so until when it is
 * worth keeping a block in a cache of a given size.
 *
 * Lives. From each use of a block begins a life, which ends with its next use, whether it was still here or is
 * remembered. For each class the lives begun are counted, and those ended by age, in bins of half an octave. So hazards
 * are those of the workload, not of what the cache happened to keep: caches of different sizes learn the same.
 *
 * Worth. A block of age a, kept for x longer at most, gives P(used within x) hits for E[time kept] of room. The best
 * ratio over all x,
 *
 *     index(a) = max over x of P(T <= a + x | T > a) / E[min(T, a + x) - a | T > a]
 *
 * is what a unit of room earns (Gittins 1979; for caches: hit density, Beckmann et al., NSDI'18). A price for room
 * decides until which age a class is kept: the last at which its index is not below the price, or not at all, if it is
 * below at the start. The price is the one at which, by rates and survival of the classes, what is kept just fills the
 * cache. Where one more step of the price would change a class from "not at all" to "long", a share of the requests,
 * drawn by their time, gets the one and the rest the other: so a cache that is far too small for a class keeps some of
 * its chains long enough instead of all of them too short.
 *
 * Counts are halved now and then, so that what was long ago is forgotten. Nothing else is to be set.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum {
    LEARN_USE_CLASSES = 8, /* 1, 2, 3, 4-7, 8-15, 16-31, 32-63, 64 and more uses */
    LEARN_CLASSES = 2 * LEARN_USE_CLASSES,
    LEARN_BINS = 128, /* half octaves of 64 bits */
};

struct learn {
    double begun[LEARN_CLASSES];
    double ended[LEARN_CLASSES][LEARN_BINS];
    double span;        /* time that the counts stand for */
    uint64_t last_now;  /* up to which span reaches */
    uint64_t n_uses;    /* since the tables were made */
    uint64_t n_counted; /* since the counts were halved */
    uint32_t version;   /* rises when the tables below are made */
    uint32_t n_bins;    /* all ends are below this one */
    double index[LEARN_CLASSES][LEARN_BINS];
    double room[LEARN_CLASSES][LEARN_BINS + 1]; /* expected time kept by one life until the start of bin b */
};

/* For how long the blocks of a class are kept after a use. */
struct learn_terms {
    uint32_t version; /* of the tables that it was made from */
    double share;     /* of the requests that get generous terms */
    uint64_t generous[LEARN_CLASSES], tight[LEARN_CLASSES];
};

static inline uint32_t learn_class(uint32_t n_uses, bool is_tail)
{
    uint32_t c = n_uses <= 3 ? n_uses - 1 : 31 - (uint32_t)__builtin_clz(n_uses) + 1;
    return (is_tail ? LEARN_USE_CLASSES : 0) + (c < LEARN_USE_CLASSES ? c : LEARN_USE_CLASSES - 1);
}

void learn_begin(struct learn *l, uint32_t class);
void learn_end(struct learn *l, uint32_t class, uint64_t age);

/* Time has come to now; makes tables when due. n_blocks: how many are here, by which what was long ago is told. */
void learn_advance(struct learn *l, uint64_t now, uint64_t n_blocks);

/* For a cache of n_blocks. A class of more uses never has worse terms, a tail never better ones than other blocks. */
void learn_terms_make(const struct learn *l, uint64_t n_blocks, struct learn_terms *out);

uint64_t learn_keep_for(const struct learn_terms *terms, uint32_t class, uint64_t now);
