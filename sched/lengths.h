/*
 * How long answers get, learned for each tenant: a histogram of the lengths of recent answers, in which old
 * ones fade.
 *
 * The prediction lies between the learned length and max_tokens: the more of a tenant's answers had
 * max_tokens tokens, the nearer to max_tokens.
 *
 * What a running request will still generate is its mean residual life: the mean excess of the answers that
 * got longer than it is now. A tenant with few answers borrows from the histogram of all tenants. Tenants
 * share LENGTHS_SLOTS histograms by hash; two tenants in one slot are learned together.
 *
 * Threads: one owner. Memory: fixed.
 */
#pragma once

#include <stdint.h>

enum { LENGTHS_SLOTS = 256, LENGTHS_BUCKETS = 64 };

struct lengths_histogram {
    double weight[LENGTHS_BUCKETS], total;
    /* Sums over the buckets from i on: of the weights; of weight * middle of the bucket. */
    double above[LENGTHS_BUCKETS + 1], tokens_above[LENGTHS_BUCKETS + 1];
    double at_most; /* weight of the answers that had max_tokens tokens; part of total */
};

struct lengths {
    struct lengths_histogram all, slots[LENGTHS_SLOTS];
    double middle[LENGTHS_BUCKETS]; /* mean length, in tokens, that a bucket stands for */
};

void lengths_init(struct lengths *l);
void lengths_observe(struct lengths *l, uint64_t tenant, uint32_t n_tokens, uint32_t max_tokens);

/*
 * Tokens that an answer of n_so_far tokens will probably still get; 1 .. max_tokens - n_so_far, or 0 at
 * max_tokens.
 */
double lengths_remaining(const struct lengths *l, uint64_t tenant, uint32_t n_so_far, uint32_t max_tokens);
