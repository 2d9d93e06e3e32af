/*
 * Simulated compute (--engine sim): a step takes the time that a cost model says, while the process sleeps; everything else is
 * real: processes, RPC, pages, transfers.
 *
 * Tokens still depend on the KV. Each token's slot, in every layer, holds a word made from the word of the token before it (read
 * from its page, as stored) and its own id; the next token is drawn from the last word. Each step also reads a past position in
 * all layers: a page that is missing, misplaced or stale changes the tokens, and golden output still means what it means.
 *
 * Threads: engine thread.
 */
#pragma once

#include "base/clock.h"
#include "engine/forward.h"
#include "sched/cost.h"

struct sim_cost {
    struct cost_profile step_ns; /* sched/cost.h, in nanoseconds */
    double noise;                /* sigma of a log-normal factor of mean 1 on each step */
};

/* "A,B,C" in microseconds. TD_ERR_INVALID names the option. */
enum td_status sim_cost_parse(const char *option, const char *text, double out[3], struct td_error *error_out);

struct forward_sim;

/* layout copied, clock borrowed. TD_ERR_INVALID: a head of the layout holds less than a word. */
enum td_status forward_sim_open(const struct kv_layout *layout, uint32_t vocab_size, const struct sim_cost *cost,
                                const struct clock *clock, struct forward_sim **out, struct td_error *error_out);
void forward_sim_close(struct forward_sim *f); /* NULL is fine */

/* As forward_run; the step, as the cost model is told of it, says how long it takes. on_layers comes at even times over it. */
void forward_sim_run(struct forward_sim *f, const struct forward_batch *batch, const struct cost_step *step,
                     float *logits_out, struct k_sampled *sampled_out);
