/*
 * Rules that the engine and the simulator share: the pages of a sequence, and its part in a step. Pure
 * functions.
 *
 * A sequence has n_tokens known tokens, of which the first n_prompt are its prompt and the first n_computed
 * have their KV in pages.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "sched/cost.h"

/*
 * Pages for the KV of n_tokens. A sequence takes them when it is admitted, and one more when it outgrows
 * them.
 */
static inline uint32_t sequence_pages(uint32_t n_tokens, uint32_t page_tokens)
{
    return (n_tokens + page_tokens - 1) / page_tokens;
}

/*
 * Most leading pages that it can take from the prefix cache: the last token is always computed, into its own
 * page.
 */
static inline uint32_t sequence_reusable_pages(uint32_t n_tokens, uint32_t page_tokens)
{
    return (n_tokens - 1) / page_tokens;
}

/*
 * Whether it decodes, and so goes before prompts (sched/batching.h): past its prompt, one token to compute.
 */
static inline bool sequence_decodes(uint32_t n_tokens, uint32_t n_prompt, uint32_t n_computed)
{
    return n_tokens > n_prompt && n_tokens - n_computed == 1;
}

/* Adds n_rows > 0 rows of this sequence to the description of a step for the cost model. */
static inline void sequence_add_to_step(struct cost_step *step, uint32_t n_rows, uint32_t n_tokens, uint32_t n_prompt,
                                        uint32_t n_computed)
{
    double n = n_rows, cached = n_computed;
    if (n_rows == 1 && n_tokens > n_prompt) {
        step->batch++;
        step->context += cached;
        return;
    }
    step->n_prompts++;
    step->prefill_tokens += n_rows;
    step->prefill_square += n * (n + 2 * cached);
}
