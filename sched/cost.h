/*
 * Predicts how long a worker's steps take. The coefficients start from a profile and follow the steps that
 * the worker reports.
 *
 *     prefill of n tokens after c cached ones, in k chunks:   a k + b n + d n (n + 2 c)
 *     decode step of a batch:                                 a + b (sum of contexts) + d (sequences)
 *     step with both:                                         the sum, less the decode step's a;
 *                                                             never less than either part alone
 *
 * The first formula is Mooncake's (FAST '25, section 5); the square telescopes, so chunks need not be summed.
 * In a step with both, the weights are read once, hidden behind the chunk's arithmetic (measured:
 * docs/simulate.md, Profiles).
 *
 * Learning. Recursive least squares of relative errors, so that short steps count as much as long ones. The
 * unit of each coefficient is the profile's value, so that the same confidence fits all of them. A sudden
 * change of speed (a throttled clock, a noisy neighbour) is followed at once: if COST_RUN steps in a row are
 * all off by more than COST_JUMP in one direction, all coefficients are scaled by the median of their ratios.
 * Two steps are enough if they are shorter than predicted, since only a faster machine makes a step short.
 * Two are also enough if the model has learned nothing yet, since its profile may be a guess. Of two ratios
 * the one nearer to 1 counts. A single odd step (its process was stopped meanwhile) teaches nothing, not even
 * the first one. No coefficient is below 0.
 *
 * A model is a value: observing returns the next one. No memory is allocated. Units: milliseconds and tokens.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "sched/rls.h"

#define COST_GUESS "2000,50,0.001:5000,0.05,50" /* a profile for an unknown machine */

/* Coefficients a, b, d of the formulas above, in milliseconds. */
struct cost_profile {
    double prefill[3], decode[3];
    /*
     * Beyond the shape of the formulas, for simulation; only cost_profile_step_ms() uses them. chunk_square:
     * for each square of a step's prompt tokens. context_square: for each square of the sum of contexts; may
     * be below 0. unshared: share of the decode step's fixed part that a step with both still takes.
     */
    double chunk_square, context_square, unshared;
};

/* One measured step of one worker. */
struct cost_step {
    uint32_t n_prompts, prefill_tokens; /* prompts in the step; their tokens that it computed */
    double prefill_square;              /* sum over these prompts of n (n + 2 cached) */
    uint32_t batch;                     /* sequences that decoded */
    double context;                     /* sum of the contexts of these sequences, in tokens */
    double ms;                          /* measured duration */
};

/* How exact predictions are: mean of |predicted - actual| / actual over about the latest twenty. */
struct cost_term {
    double error;
    uint64_t n; /* all observations so far */
};

enum { COST_RUN = 5 };
#define COST_JUMP        1.5  /* measured / predicted (or its inverse) from which on a step is off */
#define COST_MUCH_SLOWER 1.25 /* ratio of two times from which on one is much slower */

/* The steps that were off by more than COST_JUMP. */
struct cost_run {
    /* Measured / predicted of the latest steps in a row that are off in one direction. */
    double ratio[COST_RUN];
    uint32_t n;   /* number of these ratios */
    double share; /* share of steps that were off, of about the latest ten */
};

struct cost_model {
    double prefill_unit[3], decode_unit[3]; /* the profile's coefficients: the units of prefill.w, decode.w */
    /*
     * Measured time over the profile's time: mean of the latest few steps; of about the latest 500 that were
     * not odd. 0: not known.
     */
    double recent_prefill, recent_decode, usual_prefill, usual_decode;
    struct rls prefill, decode; /* w: a, b, d in units of the profile's */
    struct cost_run prefill_run, decode_run;
    struct cost_term prefill_error, decode_error;
};

/*
 * Parses "A,B,C:A,B,C" in microseconds: prefill, then decode, as in --sim-prefill and --sim-decode. An
 * optional ":P,Q,U" gives chunk_square and context_square in microseconds, and unshared (0..1).
 * TD_ERR_INVALID for any other text; *out is then undefined.
 */
enum td_status cost_profile_parse(const char *text, struct cost_profile *out, struct td_error *error_out);

struct cost_model cost_make(const struct cost_profile *profile);
/* A model that starts from the coefficients that `other` learned, with the low confidence of a new model. */
struct cost_model cost_like(const struct cost_model *other);
struct cost_model cost_observe(struct cost_model m, const struct cost_step *step);
/* As cost_observe(), for a step of a probe: one such step is enough to scale the model. */
struct cost_model cost_believe(struct cost_model m, const struct cost_step *step);
/*
 * models: the n workers of one role (at most 512; with more nothing changes). An idle worker that looks a
 * little slower than the median gets no work, so no step would correct its model. Its coefficients move by
 * `share` (0..1) of their distance to the mean model of the workers near the median. A worker that looks much
 * slower (COST_MUCH_SLOWER), or faster than the median, keeps its model.
 */
void cost_fade(struct cost_model *const *models, const bool *is_idle, uint32_t n, double share);
/*
 * The profile's coefficients times a factor for prefill and one for decode; learned coefficients are ignored.
 */
struct cost_model cost_at_speed(const struct cost_model *m, double prefill, double decode);

/*
 * Time to prefill n tokens after `cached` ones, in chunks of at most `chunk` tokens (0: in one chunk). 0
 * tokens take no time.
 */
double cost_prefill_ms(const struct cost_model *m, double n_tokens, double cached, uint32_t chunk);
double cost_decode_ms(const struct cost_model *m, double batch, double context);
/*
 * Time of one step: n_tokens prompt tokens (square: sum of n (n + 2 cached)) and a decoding batch. Either may
 * be 0.
 */
double cost_step_ms(const struct cost_model *m, double n_tokens, double square, double batch, double context);
/* The most that one step with prompts and a batch saves against two steps. */
double cost_shared_ms(const struct cost_model *m);
double cost_chunk_ms(const struct cost_model *m); /* fixed time of a chunk, whatever its tokens */
/* The largest chunk (<= max) whose step stays within limit_ms beside that batch; 0: none does. */
uint32_t cost_chunk_within(const struct cost_model *m, double limit_ms, double batch, double context, double cached,
                           uint32_t max);

/* The largest chunk (<= max) of a further prompt in a step that already has prompts and left_ms left. */
uint32_t cost_chunk_more(const struct cost_model *m, double left_ms, double cached, uint32_t max);
/* The time of a step by the profile alone, with the terms for simulation. */
double cost_profile_step_ms(const struct cost_profile *p, const struct cost_step *step);

void cost_term_observe(struct cost_term *t, double predicted, double actual);
