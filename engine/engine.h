/*
 * The engine: sequences over a paged pool, run in steps of one batch each. No network: what has to be brought from elsewhere
 * or told to somebody is the worker's, by callbacks.
 *
 * A sequence:
 *
 *     WAITING --pages taken--> on_admitted --> RUNNING --step: prompt chunks, then tokens--> ENDED (on_end)
 *        ^                        |   ^ filled    |
 *        |                        v   |           +--goal FIRST_TOKEN: one token--> ENDED
 *        |                      FILLING
 *        +---------- preempted (pages ran out; the newest goes) ----- RUNNING
 *
 * on_admitted may call engine_seq_fill() to keep the sequence FILLING while KV arrives in its pages; engine_seq_filled()
 * lets it run. Pages stay held until engine_seq_close(), which is legal in every state and at any time outside a callback
 * of that sequence.
 *
 * Same tokens, always: a sequence's tokens and log-probabilities depend on its own tokens and sampling only, not on the
 * chunking, the batch, a preemption, or where its KV came from.
 *
 * Threads: one (engine); callbacks come inside engine_step(), on_load inside engine_open(). Errors: opening validates and names the field; steps can't
 * fail.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "engine/forward_sim.h"
#include "engine/kvpool.h"
#include "engine/sampler.h"
#include "kernels/kernels.h"
#include "model/model.h"
#include "sched/cost.h"

struct engine;
struct seq;

enum seq_state { SEQ_WAITING, SEQ_FILLING, SEQ_RUNNING, SEQ_ENDED };
enum seq_goal {
    SEQ_GENERATE,    /* prompt and all tokens here */
    SEQ_FIRST_TOKEN, /* prompt and one token; layers are reported as they get ready */
    SEQ_ADOPT,       /* the first token comes from elsewhere, and what of the prompt's KV is not in the prefix cache */
};
enum seq_finish {
    FINISH_NONE,
    FINISH_STOP,
    FINISH_LENGTH,
    FINISH_BROKEN, /* logits were not finite: no token was drawn of them */
};

struct engine_callbacks {
    void *user;
    /* Pages are taken, those of the first n_matched_blocks from the prefix cache, or not needed (engine_first_page_after). */
    void (*on_admitted)(void *user, struct seq *seq, uint32_t n_matched_blocks);
    /* FIRST_TOKEN only: pages [first, first + n) hold their last token in layers [begin, end). */
    void (*on_pages_ready)(void *user, struct seq *seq, uint32_t first, uint32_t n, uint16_t begin, uint16_t end);
    void (*on_token)(void *user, struct seq *seq, const struct sampled *token); /* borrowed */
    void (*on_end)(void *user, struct seq *seq, enum seq_finish finish);
    /* A block got or lost its name (kvpool_config.on_block). */
    void (*on_block)(void *user, bool added, const struct block_key *key, uint32_t chain_index);
    /* A batch is about to run, and should take so long: generously, sched/progress.h. May be NULL. */
    void (*on_step)(void *user, double expected_ms);
    /* While engine_open reads the model: so many of its layers are packed (with several ranks: of rank 0's). May be NULL. */
    void (*on_load)(void *user, uint32_t n_done, uint32_t n_layers);
};

struct engine_config {
    struct kernels *const *kernels;  /* [n_tensor * n_pipeline] (engine/ranks.h), borrowed; not used with sim */
    uint32_t n_tensor, n_pipeline;   /* 0: 1 */
    uint32_t piece_rows;             /* with several stages: ranks.h; 0: 256 */
    const struct model *model;       /* borrowed; NULL with sim */
    struct adapter *const *adapters; /* [n_adapters] of the model; borrowed, the array too */
    uint32_t n_adapters;
    const struct sim_cost *sim;       /* simulated compute, no weights; copied; NULL: real */
    const struct model_config *shape; /* with sim: what the model would be; copied */
    enum compute compute;
    enum k_weights weights;
    enum num_type kv_dtype;
    uint32_t page_tokens; /* = the cluster's block_tokens */
    uint32_t n_pages;
    uint32_t max_context;    /* prompt and answer; <= the model's positions; 0: the model's, or what the pool holds */
    uint32_t max_batch;      /* sequences running at once */
    uint32_t max_rows;       /* rows of one step */
    uint32_t chunk_tokens;   /* most prompt tokens of one sequence in one step; 0: max_rows */
    uint32_t announce_calls; /* on_pages_ready calls a step and page run, at most; 0: 4 */
    uint64_t quarantine_ns;
    const struct clock *clock;
    const struct log *log;
    const char *weight_cache; /* directory of packed weights that processes share (engine/weight_cache.h); NULL: none */
    struct engine_callbacks callbacks;
};

enum td_status engine_open(const struct engine_config *config, struct engine **out, struct td_error *error_out);
void engine_close(struct engine *e); /* all sequences closed before; NULL is fine */

struct kvpool *engine_pool(struct engine *e);
const struct kv_layout *engine_layout(const struct engine *e);
uint32_t engine_max_context(const struct engine *e);
uint64_t engine_weight_bytes(const struct engine *e); /* 0: simulated */
/* ranks_measure_gathers(); between steps. */
double engine_measure_gathers(struct engine *e, uint32_t n_rows);
const char *engine_numerics(const struct engine *e); /* numerics_id; "sim" */
/* Fingerprint of model, format of weights, KV dtype, numerics and layout: equal means KV is interchangeable. */
struct block_key engine_fingerprint(const struct engine *e);

struct seq_params {
    const uint32_t *ids; /* copied; prompt, then tokens generated before (a resumed request) */
    uint32_t n_ids, n_prompt;
    struct sampling sampling; /* copied, arrays too */
    struct block_key root;    /* of the prefix keys: another one for each adapter */
    uint32_t adapter;         /* 0: none; else adapters[adapter - 1] */
    enum seq_goal goal;
    bool prompt_logprobs;  /* computes the whole prompt, so nothing is matched */
    uint32_t chunk_tokens; /* most of its prompt in a step; 0: the engine's */
    double tpot_ms;        /* from its first token here on; chunks of others' prompts keep it; finite; 0: none */
    void *user;
};

/* Validates at this door: ids, lengths against context and pool, sampling, tpot_ms. TD_ERR_INVALID names the field. */
enum td_status engine_seq_check(const struct engine *e, const struct seq_params *p, struct td_error *error_out);
enum td_status engine_seq_open(struct engine *e, const struct seq_params *p, struct seq **out,
                               struct td_error *error_out);
void engine_seq_close(struct engine *e, struct seq *seq); /* NULL is fine */

/* Inside on_admitted (always for ADOPT): the sequence waits until its KV was brought. */
void engine_seq_fill(struct engine *e, struct seq *seq);
/*
 * The first n_tokens are in the pages and verified (fewer than asked for is fine, the rest is computed; for ADOPT all of
 * the prompt, followed by engine_seq_append of the first token). Full pages are named.
 */
void engine_seq_filled(struct engine *e, struct seq *seq, uint32_t n_tokens);
/* ADOPT: a token sampled elsewhere; may end the sequence (on_end is called at once). */
void engine_seq_append(struct engine *e, struct seq *seq, uint32_t token);

void *engine_seq_user(const struct seq *seq);
enum seq_state engine_seq_state(const struct seq *seq);
const uint32_t *engine_seq_tokens(const struct seq *seq, uint32_t *n_out);
uint32_t engine_seq_computed(const struct seq *seq); /* leading tokens whose KV is in the pages */
/* [first_page, n) are held; those before were given up, behind a sliding window. */
const struct page_ref *engine_seq_pages(const struct seq *seq, uint32_t *n_out);
uint32_t engine_seq_first_page(const struct seq *seq);
/* The first page that is needed to go on where n_tokens end: what a hand-over begins with. */
uint32_t engine_first_page_after(const struct engine *e, uint32_t n_tokens);
/* Keys of the full blocks of all tokens so far, and how many of them hold computed KV. */
const struct block_key *engine_seq_keys(const struct seq *seq, uint32_t *n_out, uint32_t *n_computed_out);

struct prompt_scores {   /* of each prompt token given those before; the first has none */
    uint32_t n, n_top;   /* tokens of the prompt; sampling.top_logprobs */
    float *logprobs;     /* [n]; [0] is NaN */
    uint32_t *ranks;     /* [n]; 1: the likeliest; [0] is 0 */
    uint32_t *top_ids;   /* [n - 1][n_top] of tokens from the second on, the likeliest first */
    float *top_logprobs; /* [n - 1][n_top] */
};
const struct prompt_scores *engine_seq_prompt_scores(const struct seq *seq); /* NULL if not asked for */

struct seq_times { /* nanoseconds; 0 while not over */
    uint64_t queue, fill, prefill, decode_wait, decode;
    uint32_t n_preempted;
};
struct seq_times engine_seq_times(const struct seq *seq);

struct engine_load {
    uint32_t running, waiting, filling;
    uint64_t waiting_tokens; /* prompt tokens not computed yet */
};
struct engine_load engine_load(const struct engine *e);

/* The batch that the last engine_step() ran, and how long it took. */
struct cost_step engine_last_step(const struct engine *e);

/* One step: sweeps, admits, runs one batch. Returns the rows computed: 0 means there is nothing to do right now. */
uint32_t engine_step(struct engine *e);
