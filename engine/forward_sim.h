/*
 * Simulated compute (--engine sim): a step takes the time that a cost model says, and the process sleeps
 * meanwhile. Everything else is real: processes, RPC, pages, transfers.
 *
 * Tokens still depend on the KV. The slot of each token, in every layer, holds a 64-bit word made from the
 * token's id and the word of the token before it, which is read from its page as stored. The next token is
 * drawn from the last word. Each step also reads one past position in all layers. So a page that is missing,
 * misplaced or stale changes the tokens, and tests against golden output stay meaningful.
 *
 * Threads: engine thread.
 */
#pragma once

#include "base/clock.h"
#include "engine/forward.h"
#include "sched/cost.h"

struct sim_cost {
    struct cost_profile step_ns; /* cost model in nanoseconds */
    double noise;                /* sigma of the log-normal factor (mean 1) on each step */
};

/* Parses "A,B,C", in microseconds, to nanoseconds. TD_ERR_INVALID names the option. */
enum td_status sim_cost_parse(const char *option, const char *text, double out[3], struct td_error *error_out);

struct forward_sim;

/* Copies layout, borrows clock. TD_ERR_INVALID if a head of the layout is smaller than a 64-bit word. */
enum td_status forward_sim_open(const struct kv_layout *layout, uint32_t vocab_size, const struct sim_cost *cost,
                                const struct clock *clock, struct forward_sim **out, struct td_error *error_out);
void forward_sim_close(struct forward_sim *f); /* NULL is fine */

/*
 * As forward_run(). The cost model predicts the duration from `step`; on_layers comes evenly over that time.
 */
void forward_sim_run(struct forward_sim *f, const struct forward_batch *batch, const struct cost_step *step,
                     float *logits_out, struct k_sampled *sampled_out);
