/*
 * An engine alone, and sequences in it: what the areas engine and profile of tandem bench share. Prompts are
 * the same at every run.
 */
#pragma once

#include "base/clock.h"
#include "bench/bench.h"
#include "engine/engine.h"
#include "worker/geometry.h"

enum { BENCH_ENGINE_SEQS = 256, BENCH_PAGE_TOKENS = 16 };

struct bench_engine {
    struct clock clock;
    struct geometry geometry;
    struct kernels *kernels[K_MAX_RANKS]; /* of the ranks; the others NULL */
    struct model *model;
    struct engine *engine;
    struct seq *seqs[BENCH_ENGINE_SEQS];
    bool adopts; /* what the last goal was */
    /* Of sequences opened from now on: most prompt tokens in a step; 0: the engine's. */
    uint32_t seq_chunk_tokens;
    uint32_t n_tokens, n_ended; /* of all sequences since the caller last set them to 0 */
    uint64_t hash;              /* of tokens and the bits of their log-probabilities, likewise */
};

/* The model of --model, else of --dummy; its configuration only. */
enum td_status bench_engine_resolve(struct bench_engine *b, const struct bench_options *o, struct td_error *error_out);
/* Weights and a pool of that many tokens. chunk_tokens 0: max_rows. bench_engine_close() also after a
 * failure. */
enum td_status bench_engine_open(struct bench_engine *b, const struct bench_options *o, uint32_t pool_tokens,
                                 uint32_t max_rows, uint32_t chunk_tokens, struct td_error *error_out);
void bench_engine_close(struct bench_engine *b);

/* A prompt of that length into slot < BENCH_ENGINE_SEQS, which is free; max_tokens: of the answer. */
enum td_status bench_engine_seq(struct bench_engine *b, uint32_t slot, uint32_t n_prompt, uint32_t max_tokens,
                                enum seq_goal goal, struct td_error *error_out);
/* Frees all slots and empties the prefix cache. */
void bench_engine_close_seqs(struct bench_engine *b);
