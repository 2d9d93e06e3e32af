/*
 * Which sequences take part in the next engine step, and with how many tokens: a pure function, called by the engine and by
 * the simulator.
 *
 * Decoding sequences come first, one token each (none of them may wait for a prompt: TPOT); what is left of the row budget
 * goes to prompts in order of arrival, as large chunks as fit (Sarathi-Serve's stall-free batching, Agrawal et al. 2024). Prompts
 * share a step only up to BATCHING_FILL tokens: from there on a step takes as much longer as it has more rows, so company would
 * delay the first and gain the second nothing.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum { BATCHING_FILL = 512 };

struct batch_item {
    uint32_t n_pending; /* tokens whose KV is not computed yet; >= 1 */
    bool decoding;      /* past its prompt */
    uint32_t chunk;     /* most of its tokens in a step, >= 1... */
    uint32_t beside;    /* ...and beside sequences that decode, which its step keeps waiting; >= 1 */
};

/* items in order of arrival. rows_out[i] = tokens of item i in this step (0: waits). budget: rows of one step. Returns the sum. */
uint32_t batching_plan(const struct batch_item *items, uint32_t n, uint32_t budget, uint32_t *rows_out);
