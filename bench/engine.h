/* An engine without a worker, and sequences in it; shared by the areas engine and profile of tandem bench.
 * Prompts are the same in every run. */
#pragma once

#include "base/clock.h"
#include "bench/bench.h"
#include "engine/engine.h"
#include "worker/geometry.h"

enum { BENCH_ENGINE_SEQS = 256, BENCH_PAGE_TOKENS = 16 };

struct bench_engine {
    struct clock clock;
    struct geometry geometry;
    struct kernels *kernels[K_MAX_RANKS]; /* one for each rank; the others are NULL */
    struct model *model;
    struct engine *engine;
    struct seq *seqs[BENCH_ENGINE_SEQS];
    bool adopts; /* the last sequence was opened with goal SEQ_ADOPT */
    /* Most prompt tokens in a step, for sequences that are opened from now on; 0: the engine's default. */
    uint32_t seq_chunk_tokens;
    uint32_t n_tokens, n_ended; /* tokens and ended sequences, since the caller last set them to 0 */
    uint64_t hash;              /* hash of the tokens and the bits of their log-probabilities, likewise */
};

/* Reads the configuration of --model, else of --dummy. */
enum td_status bench_engine_resolve(struct bench_engine *b, const struct bench_options *o, struct td_error *error_out);
/* Loads the weights and makes a pool of pool_tokens tokens. chunk_tokens 0: max_rows. Call
 * bench_engine_close() also after a failure. */
enum td_status bench_engine_open(struct bench_engine *b, const struct bench_options *o, uint32_t pool_tokens,
                                 uint32_t max_rows, uint32_t chunk_tokens, struct td_error *error_out);
void bench_engine_close(struct bench_engine *b);

/* Opens a sequence with a prompt of n_prompt tokens in a free slot < BENCH_ENGINE_SEQS. max_tokens: most
 * tokens of its answer. */
enum td_status bench_engine_seq(struct bench_engine *b, uint32_t slot, uint32_t n_prompt, uint32_t max_tokens,
                                enum seq_goal goal, struct td_error *error_out);
/* Frees all slots and empties the prefix cache. */
void bench_engine_close_seqs(struct bench_engine *b);
