/*
 * How long answers get, learned per tenant: a histogram of the lengths that ended lately, in which old ones fade.
 *
 * The prediction lies between the learned length and max_tokens: the larger the share of a tenant's answers that had max_tokens tokens,
 * the nearer to max_tokens.
 *
 * What a running request will still generate is its mean residual life: of the answers that got longer than it is now, how much
 * longer. A tenant that is not known yet, or not well, is filled up with everybody's. Tenants share LENGTHS_SLOTS histograms by
 * hash; two that meet are learned together.
 *
 * Threads: one owner. Memory: fixed.
 */
#pragma once

#include <stdint.h>

enum { LENGTHS_SLOTS = 256, LENGTHS_BUCKETS = 64 };

struct lengths_histogram {
    double weight[LENGTHS_BUCKETS], total;
    double above[LENGTHS_BUCKETS + 1],
        tokens_above[LENGTHS_BUCKETS + 1]; /* sums from a bucket on: weights, and times the middle */
    double at_most;                        /* weight of the answers that had max_tokens tokens; part of total */
};

struct lengths {
    struct lengths_histogram all, slots[LENGTHS_SLOTS];
    double middle[LENGTHS_BUCKETS]; /* of each bucket's lengths */
};

void lengths_init(struct lengths *l);
void lengths_observe(struct lengths *l, uint64_t tenant, uint32_t n_tokens, uint32_t max_tokens);

/* Tokens that an answer of n_so_far tokens will still get, at most max_tokens in all. At least 1 while it is below that. */
double lengths_remaining(const struct lengths *l, uint64_t tenant, uint32_t n_so_far, uint32_t max_tokens);
