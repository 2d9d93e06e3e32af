/*
 * How long a worker's steps take: predicted from coefficients that start from a profile and follow what the worker reports.
 *
 *     prefill of n tokens after c cached ones, in k chunks:   a k + b n + d n (n + 2 c)      (Mooncake, FAST '25, section 5;
 *                                                             the square telescopes, so chunks need not be summed)
 *     decode step of a batch:                                 a + b (sum of contexts) + d (sequences)
 *
 *     step with both:                                         the sum, less the decode step's fixed part a; never less than one alone
 *                                                             (the weights are read once, hidden behind the chunk's arithmetic;
 *                                                             measured: docs/simulate.md, Profiles)
 *
 * Coefficients are learned by recursive least squares of relative errors, so that short steps count as much as long ones, and in
 * units of the profile's coefficients, so that each may be off by as much. A machine whose speed changes at once (a throttled
 * clock, a noisy neighbour that comes or goes) is followed at once: where COST_RUN steps in a row are all off in one direction by
 * more than COST_JUMP, all coefficients are scaled by the median of their ratios; two are enough where they are shorter than
 * predicted, since nothing but speed makes a step short. An odd step among others that are as predicted (its process was stopped
 * meanwhile) teaches nothing. No coefficient is below 0.
 *
 * A model is a value: observing gives the next one. Milliseconds and tokens throughout.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "sched/rls.h"

#define COST_GUESS "2000,50,0.001:5000,0.05,50" /* a profile for a machine of which nothing is known */

struct cost_profile { /* milliseconds */
    double prefill[3], decode[3];
    /*
     * What a machine does beyond the model's shape; only cost_profile_step_ms() knows it. Factors of the square of a step's prompt
     * tokens, whatever stands before them, and of the square of the sum of contexts (may be below 0); the share of the decode
     * step's fixed part that a step with both takes all the same.
     */
    double chunk_square, context_square, unshared;
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

enum { COST_RUN = 5 };
#define COST_JUMP        1.5
#define COST_MUCH_SLOWER 1.25

struct cost_run {           /* steps that are off by more than COST_JUMP */
    double ratio[COST_RUN]; /* measured over predicted, of the latest in a row... */
    uint32_t n;             /* ...that are all off in one direction */
    double share;           /* of the latest some ten steps */
};

struct cost_model {
    double prefill_unit[3], decode_unit[3]; /* what a coefficient of 1 stands for: the profile's */
    /* How many times as long as the profile says steps took: the latest few, and the latest 500 or so; 0: not known. */
    double recent_prefill, recent_decode, usual_prefill, usual_decode;
    struct rls prefill, decode;
    struct cost_run prefill_run, decode_run;
    struct cost_term prefill_error, decode_error;
};

/*
 * "A,B,C:A,B,C" in microseconds (prefill, then decode; as --sim-prefill and --sim-decode). With ":P,Q,U" behind it also chunk_square
 * and context_square in microseconds, and unshared.
 */
enum td_status cost_profile_parse(const char *text, struct cost_profile *out, struct td_error *error_out);

struct cost_model cost_make(const struct cost_profile *profile);
struct cost_model cost_like(
    const struct cost_model *other); /* what it learned as the start, with as little confidence */
struct cost_model cost_observe(struct cost_model m, const struct cost_step *step);
/* cost_observe() of a step that was run to find out the speed: one such step is enough for a jump. */
struct cost_model cost_believe(struct cost_model m, const struct cost_step *step);
/*
 * models: of the n machines of one role (at most 512; more are left alone). An idle machine that looks a little slower than the median
 * machine gets no work, so no step would correct its model. Its coefficients move by `share` of their distance to the mean model of the
 * machines near the median. A machine that looks much slower (COST_MUCH_SLOWER) keeps its model, and so does one that looks faster.
 */
void cost_fade(struct cost_model *const *models, const bool *is_idle, uint32_t n, double share);
/* The profile's coefficients, all of prefill and all of decode multiplied by a factor; what was learned is ignored. */
struct cost_model cost_at_speed(const struct cost_model *m, double prefill, double decode);

/* All of n tokens, in chunks of at most chunk (0: one). 0 tokens take no time. */
double cost_prefill_ms(const struct cost_model *m, double n_tokens, double cached, uint32_t chunk);
double cost_decode_ms(const struct cost_model *m, double batch, double context);
/* One step: prompt tokens with their sum of n (n + 2 cached), beside a batch that decodes; 0 tokens or an empty batch is fine. */
double cost_step_ms(const struct cost_model *m, double n_tokens, double square, double batch, double context);
/* What a step with both saves compared with two steps, at most. */
double cost_shared_ms(const struct cost_model *m);
double cost_chunk_ms(const struct cost_model *m); /* of a chunk, whatever its tokens */
/* The largest chunk whose step stays within limit_ms beside that batch; 0: none does. At most max. */
uint32_t cost_chunk_within(const struct cost_model *m, double limit_ms, double batch, double context, double cached,
                           uint32_t max);

/* The largest chunk of one more prompt in a step that has prompts already and left_ms left. At most max. */
uint32_t cost_chunk_more(const struct cost_model *m, double left_ms, double cached, uint32_t max);
/* cost_step_ms() of known coefficients. */
double cost_profile_step_ms(const struct cost_profile *p, const struct cost_step *step);

void cost_term_observe(struct cost_term *t, double predicted, double actual);
