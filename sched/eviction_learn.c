#include "sched/eviction_learn.h"

#include <math.h>
#include <string.h>

#include "base/random.h"

static const uint64_t TABLES_EVERY = 4096; /* uses: making them costs some 50 us */
static const double LIKE_ALL = 32;         /* lives of a class: below, it is taken to be like all classes */
static const double FILLED = 0.95;         /* of the cache, by what is kept; the rest takes what comes in bursts */
static const uint64_t HALVE_EVERY = 32768; /* uses, at least; and two for each block that is here */

/* ------------------------------------------------------------------ counts */

static uint32_t bin_of(uint64_t age)
{
    if (age < 2)
        return 0;
    uint32_t octave = 63 - (uint32_t)__builtin_clzll(age);
    return 2 * octave + (uint32_t)(age >> (octave - 1) & 1);
}

static double bin_start(uint32_t b) /* 0, 1.5, 2, 3, 4, 6, 8, ... */
{
    return b ? ldexp(2 + (b & 1), (int)(b / 2) - 1) : 0;
}

void learn_begin(struct learn *l, uint32_t class)
{
    l->begun[class]++;
    l->n_uses++;
    l->n_counted++;
}

void learn_end(struct learn *l, uint32_t class, uint64_t age)
{
    uint32_t b = bin_of(age);
    l->ended[class][b]++;
    if (b >= l->n_bins)
        l->n_bins = b + 1;
}

static void halve(struct learn *l)
{
    l->span /= 2;
    for (uint32_t c = 0; c < LEARN_CLASSES; c++) {
        l->begun[c] /= 2;
        for (uint32_t b = 0; b < l->n_bins; b++)
            l->ended[c][b] /= 2;
    }
    l->n_counted = 0;
}

/* ------------------------------------------------------------------ tables */

/* h[b]: the chance that a life of any class but the tails', having reached bin b, ends in it. */
static void make_common_hazards(const struct learn *l, double *h)
{
    double alive = 0;
    for (uint32_t c = 0; c < LEARN_USE_CLASSES; c++)
        alive += l->begun[c];
    for (uint32_t b = 0; b < l->n_bins; b++) {
        double ended = 0;
        for (uint32_t c = 0; c < LEARN_USE_CLASSES; c++)
            ended += l->ended[c][b];
        h[b] = alive > ended ? ended / alive : (ended > 0);
        alive = fmax(alive - ended, 0);
    }
}

/*
 * The same of one class, which is taken to be like all until it was seen more often than LIKE_ALL times; tails are not,
 * they are to start with as what nobody comes back for.
 *
 * Lives that are still young count as if they would never end in the bins that they have not reached: at the start that
 * understates late uses, and so errs towards lru.
 */
static void make_hazards(const struct learn *l, uint32_t c, const double *common, double *h)
{
    double alive = l->begun[c];
    for (uint32_t b = 0; b < l->n_bins; b++) {
        double expected = c < LEARN_USE_CLASSES ? LIKE_ALL * common[b] : 0;
        h[b] = fmin((l->ended[c][b] + expected) / (alive + LIKE_ALL), 1);
        alive = fmax(alive - l->ended[c][b], 0);
    }
}

/* Ends are taken to lie in the middle of their bin, on average. */
static void make_class(struct learn *l, uint32_t c, const double *common)
{
    double h[LEARN_BINS], alive = 1;
    make_hazards(l, c, common, h);
    l->room[c][0] = 0;
    for (uint32_t b = 0; b < l->n_bins; b++) {
        double width = bin_start(b + 1) - bin_start(b);
        l->room[c][b + 1] = l->room[c][b] + alive * width * (1 - h[b] / 2);
        alive *= 1 - h[b];
    }
    for (uint32_t from = 0; from < l->n_bins; from++) {
        double hits = 0, room = 0, best = 0;
        alive = 1;
        for (uint32_t b = from; b < l->n_bins; b++) {
            hits += alive * h[b];
            room += alive * (bin_start(b + 1) - bin_start(b)) * (1 - h[b] / 2);
            alive *= 1 - h[b];
            best = fmax(best, hits / room);
        }
        l->index[c][from] = best;
    }
}

void learn_advance(struct learn *l, uint64_t now, uint64_t n_blocks)
{
    if (l->last_now && now > l->last_now)
        l->span += (double)(now - l->last_now);
    if (now > l->last_now)
        l->last_now = now;
    if (l->n_uses < TABLES_EVERY || l->n_uses < n_blocks / 4)
        return;
    double common[LEARN_BINS];
    make_common_hazards(l, common);
    for (uint32_t c = 0; c < LEARN_CLASSES; c++)
        make_class(l, c, common);
    l->n_uses = 0;
    l->version++;
    if (l->n_counted >= HALVE_EVERY && l->n_counted >= 2 * n_blocks)
        halve(l);
}

/* ------------------------------------------------------------------- terms */

/* The bin until whose start a class is kept at this price; 0: not at all. */
static uint32_t kept_bins(const struct learn *l, uint32_t c, double price)
{
    uint32_t b = l->n_bins;
    if (!b || l->index[c][0] < price)
        return 0;
    while (l->index[c][b - 1] < price)
        b--;
    return b;
}

/*
 * A class of more uses is kept no shorter than one of fewer, since a block has at least the uses of what continues it.
 * Where the counts say otherwise, both are kept longer, unless almost all lives began in the class of more uses.
 */
static void put_in_order(const struct learn *l, uint32_t *bins)
{
    for (uint32_t c = 1; c < LEARN_USE_CLASSES; c++) {
        double n_longer = 0;
        for (uint32_t k = 0; k < c; k++)
            n_longer += bins[k] > bins[c] ? l->begun[k] : 0;
        if (4 * n_longer > l->begun[c])
            bins[c] = bins[c - 1];
        for (uint32_t k = 0; k < c; k++)
            bins[k] = bins[k] < bins[c] ? bins[k] : bins[c];
    }
}

/* Terms of all classes at this price, and the room that they take: Little's law over lives. */
static double terms_at(const struct learn *l, double price, uint64_t *keep_for)
{
    uint32_t bins[LEARN_CLASSES], *tails = bins + LEARN_USE_CLASSES;
    double room = 0;
    for (uint32_t c = 0; c < LEARN_CLASSES; c++)
        bins[c] = kept_bins(l, c, price);
    put_in_order(l, bins);
    put_in_order(l, tails);
    for (uint32_t c = 0; c < LEARN_USE_CLASSES; c++)
        tails[c] = tails[c] < bins[c] ? tails[c] : bins[c];
    for (uint32_t c = 0; c < LEARN_CLASSES; c++) {
        keep_for[c] = bins[c] ? (uint64_t)fmin(bin_start(bins[c]), 0x1p62) : 0;
        room += l->begun[c] / l->span * l->room[c][bins[c]];
    }
    return room;
}

void learn_terms_make(const struct learn *l, uint64_t n_blocks, struct learn_terms *out)
{
    double dear = 0, n = FILLED * (double)n_blocks;
    memset(out, 0, sizeof(*out));
    out->version = l->version;
    for (uint32_t c = 0; c < LEARN_CLASSES; c++)
        for (uint32_t b = 0; b < l->n_bins; b++)
            dear = fmax(dear, l->index[c][b]);
    if (!l->version || dear <= 0 || l->span <= 0)
        return; /* nothing is known: all go by last use */
    dear *= 2;
    double cheap = dear * 1e-15, tight_room = 0, generous_room = terms_at(l, cheap, out->generous);
    terms_at(l, dear, out->tight);
    for (int i = 0; i < 60 && generous_room > n; i++) {
        double price = sqrt(cheap * dear);
        uint64_t keep_for[LEARN_CLASSES];
        double room = terms_at(l, price, keep_for);
        bool fits = room <= n;
        memcpy(fits ? out->tight : out->generous, keep_for, sizeof(keep_for));
        *(fits ? &dear : &cheap) = price;
        *(fits ? &tight_room : &generous_room) = room;
    }
    out->share = generous_room > n ? (n - tight_room) / (generous_room - tight_room) : 1;
}

uint64_t learn_keep_for(const struct learn_terms *terms, uint32_t class, uint64_t now)
{
    bool is_generous = random_unit(random_mix(now)) < terms->share;
    return (is_generous ? terms->generous : terms->tight)[class];
}
