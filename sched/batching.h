/*
 * Chooses the sequences of the next engine step, and their tokens: a pure function, called by the engine and
 * by the simulator.
 *
 * Decoding sequences come first, one token each, since none may wait for a prompt (TPOT). The rest of the row
 * budget goes to prompts in order of arrival, in chunks as large as fit (Sarathi-Serve's stall-free batching,
 * Agrawal et al. 2024). Beside decoding sequences, time decides what fits: a step may take until the first
 * sequence would fall behind its TPOT limit, counted from its own first token. So a sequence that was faster
 * than its limit allows a larger chunk, a step never breaks a limit that a smaller chunk would have kept, and
 * the batch may grow after a prompt was placed. If the batch alone uses up the limit, prompts still get
 * BATCHING_FLOOR of the time, so that neither side waits for ever.
 *
 * A chunk has a fixed cost, whatever its tokens. On a machine where that is large (half of the limit), small
 * chunks in each step would use up the limit without progress for prompts. So a chunk waits until its step
 * has BATCHING_WORTH times the fixed cost to spare; steps that only decode save that time. Prompts behind it
 * wait, too.
 *
 * Prompts share a step only up to BATCHING_FILL tokens. Beyond that a step's time grows with its rows, so a
 * second prompt would delay the first and gain nothing.
 *
 * Units: tokens and milliseconds. A row is one token of one sequence in a step.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "sched/cost.h"

enum { BATCHING_FILL = 512, BATCHING_LEAST = 16 /* least tokens of a chunk, unless fewer are left */ };
#define BATCHING_FLOOR 0.1  /* share of a decoding step's time that prompts may always add */
#define BATCHING_WORTH 2.0  /* a chunk waits until the step has this many times its fixed cost to spare */
#define BATCHING_SAFE  0.95 /* share of a TPOT limit that steps with prompts may use up */
#define BATCHING_BURST 4.0  /* most time of one step, in TPOT limits, whatever was saved before */

struct batch_item {
    uint32_t n_pending;  /* tokens whose KV is not computed yet; >= 1 */
    uint32_t n_computed; /* tokens whose KV is computed: those before the pending ones */
    bool decoding;       /* its prompt is computed */
    uint32_t chunk;      /* most tokens of it in one step; >= 1 */
    double room_ms;      /* batching_room_ms() of a decoding sequence; not read for prompts */
};

/*
 * How long the next step may take so that a sequence stays within its TPOT limit. n_tokens: tokens so far;
 * the first came since_first_ms ago. INFINITY for limit 0; below 0 if it is behind already.
 */
double batching_room_ms(double tpot_limit_ms, uint32_t n_tokens, double since_first_ms);

/*
 * Plans one step. items: in order of arrival. rows_out[i]: tokens of item i in this step; 0: it waits.
 * budget: most rows of a step. cost: of this worker. starved_ms: how long steps have had no prompt tokens
 * although prompts were there. Returns the sum of rows_out.
 */
uint32_t batching_plan(const struct batch_item *items, uint32_t n, uint32_t budget, const struct cost_model *cost,
                       double starved_ms, uint32_t *rows_out);

/* Whether there are prompts of which none has tokens in the step that batching_plan() made. */
bool batching_starves(const struct batch_item *items, const uint32_t *rows, uint32_t n);

/* Duration of steps with prompts under a TPOT limit (> 0), if they take decode_ms without prompts. */
double batching_mixed_ms(double decode_ms, double tpot_limit_ms);

/*
 * The share (0..1) of a worker's time that prompts get in the long run by batching_plan(). decode_ms: step
 * without prompts. chunk_ms: a full chunk; fixed_ms: its fixed part. shared_ms: what a step with both saves.
 * tpot_limit_ms: 0: none.
 */
double batching_prompt_share(double decode_ms, double chunk_ms, double fixed_ms, double shared_ms,
                             double tpot_limit_ms);
