/*
 * What the tandem policy learns: how long after a use the next use comes, by class of block, and from that
 * how long a block is worth keeping in a cache of a given size.
 *
 * Lives. Each use of a block begins a life, which ends with its next use, whether the block is still here or
 * only remembered. For each class the begun lives are counted, and the ended lives by age, in bins of half an
 * octave. So the hazards describe the workload and not what the cache happened to keep: caches of different
 * sizes learn the same.
 *
 * Classes. A class is a number of uses and a shape of request: the fewer new blocks a request adds to known
 * ones, the more likely it will be continued. A block keeps the best shape it ever had. So neither number nor
 * shape rises along a chain. Terms that rise with both therefore never evict a block before one that
 * continues it, however often the terms change.
 *
 * Worth. A block of age a that is kept for at most x longer gives P(used within x) hits for E[time kept] of
 * room. The best ratio over all x,
 *
 *     index(a) = max over x of P(T <= a + x | T > a) / E[min(T, a + x) - a | T > a]
 *
 * is what a unit of room earns (Gittins 1979; for caches: hit density, Beckmann et al., NSDI'18). A price for
 * room decides how long a class is kept: up to the last age at which its index is at least the price, or not
 * at all if it is below the price at age 0. The price is chosen so that the kept blocks, by rate and survival
 * of the classes, just fill the cache. If a small change of the price would change a class from "not at all"
 * to "long", a share of the lives gets the generous terms and the rest the tight ones: a cache that is far
 * too small for a class then keeps some of its chains long enough instead of all of them too short.
 *
 * Counts are halved now and then, so that old behaviour is forgotten. There is nothing else to configure.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum {
    LEARN_USES = 8, /* 1, 2, 3, 4-7, 8-15, 16-31, 32-63, 64 and more uses */
    /* New blocks of the request: more than 16, up to 16, up to 8, up to 4. */
    LEARN_SHAPES = 4,
    LEARN_TAILS = LEARN_SHAPES * LEARN_USES, /* first class of tails; tails have no shape */
    LEARN_CLASSES = LEARN_TAILS + LEARN_USES,
    LEARN_BINS = 128, /* half octaves of a 64-bit age */
};

struct learn {
    double begun[LEARN_CLASSES];                /* lives begun */
    double ended[LEARN_CLASSES][LEARN_BINS];    /* lives ended, by age */
    double span;                                /* time over which the lives were counted */
    uint64_t last_now;                          /* end of that time */
    uint64_t n_uses;                            /* uses since the tables below were made */
    uint64_t n_counted;                         /* uses since the counts were halved */
    uint32_t version;                           /* rises when the tables below are made */
    uint32_t n_bins;                            /* bins in use: no life ended in a later one */
    double index[LEARN_CLASSES][LEARN_BINS];    /* index(a) at the start of bin b */
    double room[LEARN_CLASSES][LEARN_BINS + 1]; /* expected time that one life is kept before bin b starts */
};

/* How long blocks of a class are kept after a use. */
struct learn_terms {
    double share; /* share of lives that get the generous terms; the others get the tight ones */
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

/*
 * The time is now; makes the tables when due. n_blocks: blocks here; it sets how often tables are made and
 * counts halved.
 */
void learn_advance(struct learn *l, uint64_t now, uint64_t n_blocks);

/* Number of uses after which counts are halved. */
static inline uint64_t learn_memory(uint64_t n_blocks)
{
    return n_blocks > 8192 ? 8 * n_blocks : 65536;
}

/*
 * Makes the terms for a cache of n_blocks. A class with more uses or a better shape never has shorter terms;
 * a tail never has longer terms than other blocks with as many uses.
 */
void learn_terms_make(const struct learn *l, double n_blocks, struct learn_terms *out);

static inline uint64_t learn_keep_for(const struct learn_terms *terms, uint32_t class, bool is_generous)
{
    return (is_generous ? terms->generous : terms->tight)[class];
}
