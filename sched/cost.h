/*
 * How long a worker's steps take: predicted from coefficients that start from a profile and follow what the worker reports.
 *
 *     prefill of n tokens after c cached ones, in k chunks:   a k + b n + d n (n + 2 c)      (Mooncake, FAST '25, section 5;
 *                                                             the square telescopes, so chunks need not be summed)
 *     decode step of a batch:                                 a + b (sum of contexts) + d (sequences)
 *
 * A step with both takes the sum. Learned by recursive least squares of relative errors, so that short steps count as much as
 * long ones, and in units of the profile's coefficients, so that it may be off by as much in each. A model is a value: observing
 * gives the next one. Milliseconds and tokens throughout.
 */
#pragma once

#include <stdint.h>

#include "base/status.h"
#include "sched/rls.h"

struct cost_profile { /* milliseconds */
    double prefill[3], decode[3];
};

struct cost_step { /* of one worker, measured */
    uint32_t n_prompts, prefill_tokens;
    double prefill_square; /* sum over its prompts of n (n + 2 cached) */
    uint32_t batch;        /* sequences that decoded */
    double context;        /* sum of theirs */
    double ms;
};

struct cost_term { /* |predicted - actual| / actual, the mean of the latest some twenty */
    double error;
    uint64_t n;
};

struct cost_model {
    double prefill_unit[3], decode_unit[3]; /* what a coefficient of 1 stands for: the profile's */
    struct rls prefill, decode;
    struct cost_term prefill_error, decode_error;
};

/* "A,B,C:A,B,C" in microseconds (prefill, then decode; as --sim-prefill and --sim-decode). */
enum td_status cost_profile_parse(const char *text, struct cost_profile *out, struct td_error *error_out);

struct cost_model cost_make(const struct cost_profile *profile);
struct cost_model cost_like(
    const struct cost_model *other); /* what it learned as the start, with as little confidence */
/*
 * m, where it predicts longer steps than other: half way to it, with little confidence. For a worker that is thought slow and
 * therefore gets no work that would show whether it is.
 */
struct cost_model cost_doubt(struct cost_model m, const struct cost_model *other);
struct cost_model cost_observe(struct cost_model m, const struct cost_step *step);

/* All of n tokens, in chunks of at most chunk (0: one). 0 tokens take no time. */
double cost_prefill_ms(const struct cost_model *m, double n_tokens, double cached, uint32_t chunk);
double cost_decode_ms(const struct cost_model *m, double batch, double context);
/* The largest chunk whose step stays within limit_ms beside that batch; 0: none does. At most max. */
uint32_t cost_chunk_within(const struct cost_model *m, double limit_ms, double batch, double context, double cached,
                           uint32_t max);

void cost_term_observe(struct cost_term *t, double predicted, double actual);
