#include "sched/eviction_duel.h"

#include <math.h>
#include <string.h>

/* Uses in a slice: at least LEAST_SLICE, and at least a sixteenth of the number of blocks. */
enum { LEAST_SLICE = 256, SLICES_PER_CACHE = 16 };
static const int FRONTIER_STEPS = 24;
/* Learned terms decide if their hits are at least this many times lru's. */
static const double MARGIN = 1.005;

/* Index of the slice that is i slices older than the newest. */
static uint32_t older(const struct duel *d, uint32_t i)
{
    return (d->newest + DUEL_SLICES - i) % DUEL_SLICES;
}

/*
 * By how many slices the slice of this time is older than the newest; n_slices: the time is before all
 * slices.
 */
static uint32_t slice_of(const struct duel *d, double time)
{
    uint32_t low = 0, high = d->n_slices;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if ((double)d->starts[older(d, middle)] <= time)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

void duel_begin(struct duel *d, uint32_t class)
{
    d->alive[class][d->newest]++;
    d->total[d->newest]++;
    d->n_uses++;
    d->n_counted++;
}

void duel_end(struct duel *d, uint32_t class, bool is_generous, bool was_here, uint64_t began, uint64_t now)
{
    uint32_t i = slice_of(d, (double)began);
    if (i < d->n_slices) {
        d->alive[class][older(d, i)]--;
        d->total[older(d, i)]--;
    }
    if (!d->has_terms)
        return;
    d->lru_hits += began >= d->lru_since;
    bool would_be_here = (double)(began + learn_keep_for(&d->terms, class, is_generous)) >= (double)now + d->ahead;
    d->hits += d->in_force ? was_here : would_be_here;
}

/* The time since which the used blocks just fill the cache. */
static uint64_t lru_since(const struct duel *d, uint64_t now, uint64_t n_blocks)
{
    double room = (double)n_blocks, end = (double)now;
    for (uint32_t i = 0; i < d->n_slices; i++) {
        double start = (double)d->starts[older(d, i)], n = d->total[older(d, i)];
        if (n > room)
            return (uint64_t)(end - (end - start) * room / n);
        room -= n;
        end = start;
    }
    return (uint64_t)end;
}

/* Joins the oldest slice to the one after it, so that slices still reach back to the first use. */
static void merge_oldest(struct duel *d)
{
    uint32_t from = older(d, DUEL_SLICES - 1), to = older(d, DUEL_SLICES - 2);
    d->starts[to] = d->starts[from];
    d->total[to] += d->total[from];
    for (uint32_t c = 0; c < LEARN_CLASSES; c++)
        d->alive[c][to] += d->alive[c][from];
}

void duel_advance(struct duel *d, uint64_t now, uint64_t n_blocks)
{
    if (!d->n_slices) {
        d->n_slices = 1;
        d->starts[d->newest] = now;
    }
    if (d->n_uses < LEAST_SLICE || d->n_uses < n_blocks / SLICES_PER_CACHE)
        return;
    d->lru_since = lru_since(d, now, n_blocks);
    if (d->n_slices == DUEL_SLICES)
        merge_oldest(d);
    else
        d->n_slices++;
    d->newest = (d->newest + 1) % DUEL_SLICES;
    d->n_uses = 0;
    d->starts[d->newest] = now;
    d->total[d->newest] = 0;
    for (uint32_t c = 0; c < LEARN_CLASSES; c++)
        d->alive[c][d->newest] = 0;
}

/* -------------------------------------------------------------- learned terms */

/* of[c][i]: lives of class c that go on, in the i newest slices. */
struct duel_sums {
    double of[LEARN_CLASSES][DUEL_SLICES + 1];
};

static void make_sums(const struct duel *d, struct duel_sums *s)
{
    for (uint32_t c = 0; c < LEARN_CLASSES; c++) {
        s->of[c][0] = 0;
        for (uint32_t i = 0; i < d->n_slices; i++)
            s->of[c][i + 1] = s->of[c][i] + d->alive[c][older(d, i)];
    }
}

/* Lives of the class that began since `time`, assuming that they are spread evenly over each slice. */
static double begun_since(const struct duel *d, const struct duel_sums *s, uint32_t class, double time, uint64_t now)
{
    uint32_t i = slice_of(d, time);
    if (time >= (double)now)
        return 0;
    if (i == d->n_slices)
        return s->of[class][i];
    double start = (double)d->starts[older(d, i)], end = i ? (double)d->starts[older(d, i - 1)] : (double)now + 1;
    return s->of[class][i] + (s->of[class][i + 1] - s->of[class][i]) * (end - time) / (end - start);
}

/* Number of blocks that are kept until this time or longer. */
static double kept_until(const struct duel *d, const struct duel_sums *s, double time, uint64_t now)
{
    double n = 0, share = d->terms.share;
    for (uint32_t c = 0; c < LEARN_CLASSES; c++) {
        if (s->of[c][d->n_slices] <= 0)
            continue;
        n += share * begun_since(d, s, c, time - (double)d->terms.generous[c], now);
        n += share < 1 ? (1 - share) * begun_since(d, s, c, time - (double)d->terms.tight[c], now) : 0;
    }
    return n;
}

/* duel.ahead: the time, from now, for which the blocks kept until then or longer just fill the cache. */
static double make_ahead(const struct duel *d, uint64_t now, uint64_t n_blocks)
{
    struct duel_sums sums;
    double low = (double)d->starts[older(d, d->n_slices - 1)], high = (double)now;
    make_sums(d, &sums);
    for (uint32_t c = 0; c < LEARN_CLASSES; c++)
        high = fmax(high, (double)now + (double)d->terms.generous[c]);
    for (int i = 0; i < FRONTIER_STEPS; i++) {
        double middle = (low + high) / 2;
        *(kept_until(d, &sums, middle, now) > (double)n_blocks ? &low : &high) = middle;
    }
    return high - (double)now;
}

void duel_terms(struct duel *d, const struct learn_terms *terms, uint64_t now, uint64_t n_blocks)
{
    d->terms = *terms;
    d->has_terms = true;
    d->ahead = make_ahead(d, now, n_blocks);
    d->lru_since = lru_since(d, now, n_blocks);
    d->in_force = d->hits >= MARGIN * d->lru_hits;
    if (d->n_counted >= learn_memory(n_blocks)) {
        d->n_counted = 0;
        d->hits /= 2;
        d->lru_hits /= 2;
    }
}
