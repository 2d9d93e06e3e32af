#include "sched/eviction_learn.h"

#include <math.h>
#include <string.h>

static const uint64_t TABLES_EVERY = 4096; /* least uses between two tables; making them takes some 100 us */
/* weight, in lives, of all classes in those with one number of uses. */
static const double LIKE_ALL = 32;
static const double LIKE_SAME_USES = 500; /* weight, in lives, of all shapes with these uses in one class */
static const int PRICE_STEPS = 30;        /* halvings of the range of the price, 15 decades */

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

/* Sum over several classes: lives begun; lives ended, by age. */
struct lives {
    double begun, ended[LEARN_BINS];
};

static void add_class(struct lives *to, const struct learn *l, uint32_t c)
{
    to->begun += l->begun[c];
    for (uint32_t b = 0; b < l->n_bins; b++)
        to->ended[b] += l->ended[c][b];
}

/*
 * h[b]: the probability that a life that reached bin b ends in it. n_like lives with the hazards `like` are
 * added as a prior; like NULL: lives that never end.
 *
 * Young lives count as if they did not end in the bins that they have not reached. At the start that
 * understates late uses, which errs towards lru.
 */
static void make_hazards(const struct lives *lives, uint32_t n_bins, const double *like, double n_like, double *h)
{
    double alive = lives->begun;
    for (uint32_t b = 0; b < n_bins; b++) {
        double expected = like ? n_like * like[b] : 0, n = alive + n_like;
        h[b] = n > 0 ? fmin((lives->ended[b] + expected) / n, 1) : 0;
        alive = fmax(alive - lives->ended[b], 0);
    }
}

/* Makes index and room of a class. Lives that end in a bin are assumed to end in its middle, on average. */
static void make_class(struct learn *l, uint32_t c, const double *h)
{
    double alive = 1, stay[LEARN_BINS]; /* stay: expected time in bin b of a life that reached it */
    l->room[c][0] = 0;
    for (uint32_t b = 0; b < l->n_bins; b++) {
        stay[b] = (bin_start(b + 1) - bin_start(b)) * (1 - h[b] / 2);
        l->room[c][b + 1] = l->room[c][b] + alive * stay[b];
        alive *= 1 - h[b];
    }
    for (uint32_t from = 0; from < l->n_bins; from++) {
        double hits = 0, room = 0, best = 0;
        alive = 1;
        for (uint32_t b = from; b < l->n_bins; b++) {
            hits += alive * h[b];
            room += alive * stay[b];
            alive *= 1 - h[b];
            best = fmax(best, hits / room);
        }
        l->index[c][from] = best;
    }
}

static void make_tables(struct learn *l)
{
    struct lives all = {0};
    double common[LEARN_BINS], same[LEARN_BINS], h[LEARN_BINS];
    for (uint32_t c = 0; c < LEARN_TAILS; c++)
        add_class(&all, l, c);
    make_hazards(&all, l->n_bins, NULL, 0, common);
    for (uint32_t uses = 0; uses < LEARN_USES; uses++) {
        struct lives some = {0}, tails = {0};
        for (uint32_t c = uses; c < LEARN_TAILS; c += LEARN_USES)
            add_class(&some, l, c);
        make_hazards(&some, l->n_bins, common, LIKE_ALL, same);
        for (uint32_t c = uses; c < LEARN_TAILS; c += LEARN_USES) {
            struct lives one = {0};
            add_class(&one, l, c);
            make_hazards(&one, l->n_bins, same, LIKE_SAME_USES, h);
            make_class(l, c, h);
        }
        add_class(&tails, l, LEARN_TAILS + uses);
        make_hazards(&tails, l->n_bins, NULL, LIKE_ALL, h);
        make_class(l, LEARN_TAILS + uses, h);
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
    make_tables(l);
    l->n_uses = 0;
    l->version++;
    if (l->n_counted >= learn_memory(n_blocks))
        halve(l);
}

/* ------------------------------------------------------------------- terms */

/* A class is kept until the start of this bin, at this price; 0: not at all. */
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
 * Orders n classes that are `step` apart: a later class is kept at least as long as an earlier one, since a
 * block has at least the uses and the shape of the blocks that continue it. If the counts say otherwise, the
 * later class is kept longer, or, if almost all lives began in the later class, the earlier ones shorter.
 */
static void put_in_order(const struct learn *l, uint32_t first, uint32_t step, uint32_t n, uint32_t *bins)
{
    const uint32_t end = first + n * step;
    for (uint32_t c = first + step; c < end; c += step) {
        double n_longer = 0;
        for (uint32_t k = first; k < c; k += step)
            n_longer += bins[k] > bins[c] ? l->begun[k] : 0;
        if (4 * n_longer > l->begun[c] && bins[c] < bins[c - step])
            bins[c] = bins[c - step];
        for (uint32_t k = first; k < c; k += step)
            bins[k] = bins[k] < bins[c] ? bins[k] : bins[c];
    }
}

/* Orders by uses, then by shape; the third loop restores the order by uses where the second one broke it. */
static void put_all_in_order(const struct learn *l, uint32_t *bins)
{
    for (uint32_t c = 0; c < LEARN_CLASSES; c += LEARN_USES)
        put_in_order(l, c, 1, LEARN_USES, bins);
    for (uint32_t c = 0; c < LEARN_USES; c++)
        put_in_order(l, c, LEARN_USES, LEARN_SHAPES, bins);
    for (uint32_t c = 0; c < LEARN_TAILS; c++) {
        if (c >= LEARN_USES && bins[c] < bins[c - LEARN_USES])
            bins[c] = bins[c - LEARN_USES];
        if (c % LEARN_USES && bins[c] < bins[c - 1])
            bins[c] = bins[c - 1];
    }
    for (uint32_t c = 0; c < LEARN_USES; c++)
        bins[LEARN_TAILS + c] = bins[LEARN_TAILS + c] < bins[c] ? bins[LEARN_TAILS + c] : bins[c];
}

/* Terms of all classes at this price. Returns the room that they take: Little's law over lives. */
static double terms_at(const struct learn *l, double price, uint64_t *keep_for)
{
    uint32_t bins[LEARN_CLASSES];
    double room = 0;
    for (uint32_t c = 0; c < LEARN_CLASSES; c++)
        bins[c] = kept_bins(l, c, price);
    put_all_in_order(l, bins);
    for (uint32_t c = 0; c < LEARN_CLASSES; c++) {
        keep_for[c] = bins[c] ? (uint64_t)fmin(bin_start(bins[c]), 0x1p62) : 0;
        room += l->begun[c] / l->span * l->room[c][bins[c]];
    }
    return room;
}

void learn_terms_make(const struct learn *l, double n_blocks, struct learn_terms *out)
{
    double dear = 0, n = n_blocks;
    memset(out, 0, sizeof(*out));
    for (uint32_t c = 0; c < LEARN_CLASSES; c++)
        for (uint32_t b = 0; b < l->n_bins; b++)
            dear = fmax(dear, l->index[c][b]);
    if (!l->version || dear <= 0 || l->span <= 0)
        return; /* nothing is known: all terms are 0, so the order is by last use */
    dear *= 2;
    double cheap = dear * 1e-15, tight_room = 0, generous_room = terms_at(l, cheap, out->generous);
    terms_at(l, dear, out->tight);
    for (int i = 0; i < PRICE_STEPS && generous_room > n; i++) {
        double price = sqrt(cheap * dear);
        uint64_t keep_for[LEARN_CLASSES];
        double room = terms_at(l, price, keep_for);
        bool fits = room <= n;
        memcpy(fits ? out->tight : out->generous, keep_for, sizeof(keep_for));
        *(fits ? &dear : &cheap) = price;
        *(fits ? &tight_room : &generous_room) = room;
    }
    for (uint32_t c = 0; c < LEARN_CLASSES;
         c++) /* put_all_in_order() may have lengthened a class more at the higher price */
        out->generous[c] = out->generous[c] > out->tight[c] ? out->generous[c] : out->tight[c];
    out->share = generous_room > n ? (n - tight_room) / (generous_room - tight_room) : 1;
}
