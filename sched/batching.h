/*
 * Which sequences take part in the next engine step, and with how many tokens: a pure function, called by the engine and by
 * the simulator.
 *
 * Decoding sequences come first, one token each (none of them may wait for a prompt: TPOT); what is left of the row budget
 * goes to prompts in order of arrival, as large chunks as fit (Sarathi-Serve's stall-free batching, Agrawal et al. 2024). How much
 * fits beside sequences that decode is a matter of time, not of tokens: a step may take until the first of them would fall behind its
 * TPOT limit, counted from its own first token. So a sequence that was faster than its limit so far lets a larger chunk pass, a step
 * never breaks a limit that a smaller chunk would have kept, and the batch may grow after a prompt was placed. Where the batch
 * alone uses up the limit, prompts still get BATCHING_FLOOR of the time: neither side waits for ever.
 *
 * A chunk costs a fixed time whatever its tokens. Where that is much (a machine whose smallest chunk takes half of the limit), small chunks
 * in every step would leave the limit no time and prompts no progress. So a chunk waits, while steps that only decode save time,
 * until its step has BATCHING_WORTH times the fixed part to spare; prompts behind it wait, too.
 *
 * Prompts share a step only up to BATCHING_FILL tokens: from there on a step takes as much longer as it has more rows, so company
 * would delay the first and gain the second nothing.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "sched/cost.h"

enum { BATCHING_FILL = 512, BATCHING_LEAST = 16 /* prompt tokens of a step, unless fewer are left */ };
#define BATCHING_FLOOR 0.1  /* of the time of a step that decodes only: what prompts may add in any case */
#define BATCHING_WORTH 2.0  /* what a chunk must have time for, in times its fixed part */
#define BATCHING_SAFE  0.95 /* of a TPOT limit that steps with prompts may use up */
#define BATCHING_BURST 4.0  /* TPOT limits of saved time that one step may take at most */

struct batch_item {
    uint32_t n_pending;  /* tokens whose KV is not computed yet; >= 1 */
    uint32_t n_computed; /* tokens before them */
    bool decoding;       /* past its prompt */
    uint32_t chunk;      /* most of its tokens in a step, >= 1 */
    double room_ms;      /* of one that decodes: batching_room_ms() */
};

/* How long a step may take, so that a sequence with n_tokens, the first of which came since_first_ms ago, stays within its limit. */
double batching_room_ms(double tpot_limit_ms, uint32_t n_tokens, double since_first_ms); /* limit 0: INFINITY */

/*
 * items in order of arrival. rows_out[i] = tokens of item i in this step (0: waits). budget: rows of one step. cost: what the
 * worker's steps take. starved_ms: for how long steps have had no prompt tokens though prompts were there. Returns the sum.
 */
uint32_t batching_plan(const struct batch_item *items, uint32_t n, uint32_t budget, const struct cost_model *cost,
                       double starved_ms, uint32_t *rows_out);

/* Whether prompts are there, and none takes part in the step that batching_plan() made. */
bool batching_starves(const struct batch_item *items, const uint32_t *rows, uint32_t n);

/* How long steps take as long as prompts are there, under a limit (> 0), where they take decode_ms without prompts. */
double batching_mixed_ms(double decode_ms, double tpot_limit_ms);

/*
 * The share of a worker's time that prompts get beside a batch whose steps take decode_ms alone, under that limit (0: none): full
 * chunks take chunk_ms, fixed_ms of it whatever its tokens, and a mixed step saves shared_ms. What batching_plan() comes to in
 * the long run.
 */
double batching_prompt_share(double decode_ms, double chunk_ms, double fixed_ms, double shared_ms,
                             double tpot_limit_ms);
