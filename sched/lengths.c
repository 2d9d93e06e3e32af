#include "sched/lengths.h"

#include <math.h>
#include <string.h>

#include "base/random.h"

enum { PER_OCTAVE = 4 };
static const double FADE = 0.998;  /* factor on older answers for each new one: the latest 500 count most */
static const double PRIOR = 256;   /* assumed tokens of an answer before any answer has ended */
static const double BORROWED = 20; /* weight of all tenants' histogram in a tenant's, in answers */

static uint32_t bucket_of(double n)
{
    double b = n < 1 ? 0 : floor(log2(n) * PER_OCTAVE) + 1;
    return b < LENGTHS_BUCKETS ? (uint32_t)b : LENGTHS_BUCKETS - 1;
}

static void sum_up(const struct lengths *l, struct lengths_histogram *h)
{
    for (uint32_t i = LENGTHS_BUCKETS; i--;) {
        h->above[i] = h->above[i + 1] + h->weight[i];
        h->tokens_above[i] = h->tokens_above[i + 1] + h->weight[i] * l->middle[i];
    }
}

void lengths_init(struct lengths *l)
{
    memset(l, 0, sizeof(*l));
    for (uint32_t i = 1; i < LENGTHS_BUCKETS; i++)
        l->middle[i] = exp2((i - 0.5) / PER_OCTAVE);
    l->all.weight[bucket_of(PRIOR)] = l->all.total = 1;
    sum_up(l, &l->all);
}

static void add_answer(const struct lengths *l, struct lengths_histogram *h, uint32_t n_tokens, uint32_t max_tokens)
{
    for (uint32_t i = 0; i < LENGTHS_BUCKETS; i++)
        h->weight[i] *= FADE;
    h->weight[bucket_of(n_tokens)] += 1;
    h->total = h->total * FADE + 1;
    h->at_most = h->at_most * FADE + (n_tokens >= max_tokens);
    sum_up(l, h);
}

static uint32_t histogram_of(uint64_t tenant)
{
    return (uint32_t)(random_mix(tenant) % LENGTHS_SLOTS);
}

void lengths_observe(struct lengths *l, uint64_t tenant, uint32_t n_tokens, uint32_t max_tokens)
{
    add_answer(l, &l->all, n_tokens, max_tokens);
    add_answer(l, &l->slots[histogram_of(tenant)], n_tokens, max_tokens);
}

/* The first bucket whose middle is above n tokens. */
static uint32_t first_above(const struct lengths *l, double n)
{
    uint32_t i = bucket_of(n);
    return i < LENGTHS_BUCKETS && l->middle[i] <= n ? i + 1 : i;
}

double lengths_remaining(const struct lengths *l, uint64_t tenant, uint32_t n_so_far, uint32_t max_tokens)
{
    const struct lengths_histogram *own = &l->slots[histogram_of(tenant)], *all = &l->all;
    double most = max_tokens > n_so_far ? max_tokens - n_so_far : 0;
    double known = 1 / (BORROWED + own->total), share = BORROWED * known / all->total;
    uint32_t from = first_above(l, n_so_far), over = first_above(l, max_tokens); /* longer answers get cut */
    over = over < from ? from : over;
    double weight = own->above[from] * known + all->above[from] * share;
    double cut = own->above[over] * known + all->above[over] * share;
    double tokens = (own->tokens_above[from] - own->tokens_above[over]) * known +
                    (all->tokens_above[from] - all->tokens_above[over]) * share;
    double sum = tokens - n_so_far * (weight - cut) + most * cut;
    double left = weight > 1e-9 ? sum / weight : fmax(n_so_far, 1); /* longer than any known: as long again */
    /* Share of answers that had max_tokens tokens. */
    double asked = own->at_most * known + share * all->at_most;
    return fmin(fmax(asked * most + (1 - asked) * left, 1), most);
}
