/*
 * What the tandem policy learns: how long after a use the next one comes, by class of block, and so until when it is
 * worth keeping a block in a cache of a given size.
 *
 * Lives. From each use of a block begins a life, which ends with its next use, whether it was still here or is
 * remembered. For each class the lives begun are counted, and those ended by age, in bins of half an octave. So hazards
 * are those of the workload, not of what the cache happened to keep: caches of different sizes learn the same.
 *
 * Classes. The number of uses, and the shape of the requests that used the block: the fewer new blocks a request adds
 * to what was known, the likelier is it that it will be continued itself. A block keeps the best shape it ever had. So
 * neither number nor shape ever rises along a chain, and terms that rise with both never put a block behind one that
 * continues it, however often they change.
 *
 * Worth. A block of age a, kept for x longer at most, gives P(used within x) hits for E[time kept] of room. The best
 * ratio over all x,
 *
 *     index(a) = max over x of P(T <= a + x | T > a) / E[min(T, a + x) - a | T > a]
 *
 * is what a unit of room earns (Gittins 1979; for caches: hit density, Beckmann et al., NSDI'18). A price for room
 * decides until which age a class is kept: the last at which its index is not below the price, or not at all, if it is
 * below at the start. The price is the one at which, by rates and survival of the classes, what is kept just fills the
 * cache. Where one more step of the price would change a class from "not at all" to "long", a share of the lives gets
 * the one and the rest the other: so a cache that is far too small for a class keeps some of its chains long enough
 * instead of all of them too short.
 *
 * Counts are halved now and then, so that what was long ago is forgotten. Nothing else is to be set.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum {
    LEARN_USES = 8,                          /* 1, 2, 3, 4-7, 8-15, 16-31, 32-63, 64 and more uses */
    LEARN_SHAPES = 4,                        /* of the request: more than 16 new blocks, up to 16, up to 8, up to 4 */
    LEARN_TAILS = LEARN_SHAPES * LEARN_USES, /* first class of tails, whatever their shape */
    LEARN_CLASSES = LEARN_TAILS + LEARN_USES,
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
    double share; /* of the lives that are to get generous terms */
    uint64_t generous[LEARN_CLASSES], tight[LEARN_CLASSES];
};

static inline uint32_t learn_shape(uint32_t n_new)
{
    return n_new <= 4 ? 3 : n_new <= 8 ? 2 : n_new <= 16 ? 1 : 0;
}

static inline uint32_t learn_class(uint32_t n_uses, uint32_t shape, bool is_tail)
{
    uint32_t c = n_uses <= 3 ? n_uses - 1 : 31 - (uint32_t)__builtin_clz(n_uses) + 1;
    return (is_tail ? LEARN_TAILS : shape * LEARN_USES) + (c < LEARN_USES ? c : LEARN_USES - 1);
}

void learn_begin(struct learn *l, uint32_t class);
void learn_end(struct learn *l, uint32_t class, uint64_t age);

/* Time has come to now; makes tables when due. n_blocks: how many are here, by which what was long ago is told. */
void learn_advance(struct learn *l, uint64_t now, uint64_t n_blocks);

/* Uses after which counts are halved. */
static inline uint64_t learn_memory(uint64_t n_blocks)
{
    return n_blocks > 8192 ? 8 * n_blocks : 65536;
}

/*
 * Makes the terms for a cache of n_blocks. A class of more uses or of better shape never has worse terms, a tail never better ones
 * than other blocks.
 */
void learn_terms_make(const struct learn *l, double n_blocks, struct learn_terms *out);

static inline uint64_t learn_keep_for(const struct learn_terms *terms, uint32_t class, bool is_generous)
{
    return (is_generous ? terms->generous : terms->tight)[class];
}
