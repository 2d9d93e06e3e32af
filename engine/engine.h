/*
 * The engine: sequences over a paged pool, run in steps of one batch each. It knows no network: the worker
 * brings what has to come from elsewhere and tells others what they need to know, by callbacks.
 *
 * A sequence:
 *
 *     WAITING --pages taken--> on_admitted --> RUNNING --steps: prompt chunks, then tokens--> ENDED (on_end)
 *        ^                        |   ^ filled    |
 *        |                        v   |           +--goal FIRST_TOKEN: one token--> ENDED
 *        |                      FILLING
 *        +---------- preempted (pages ran out; the newest goes) ----- RUNNING
 *
 * on_admitted may call engine_seq_fill() to keep the sequence FILLING while KV arrives in its pages;
 * engine_seq_filled() lets it run, on a device as soon as its copies of these pages are there. An ended
 * sequence keeps its pages until engine_seq_close(), which is legal in every state, but not inside a
 * callback.
 *
 * Same tokens, always: a sequence's tokens and log-probabilities depend on its own tokens and sampling only,
 * not on the chunking, the batch, a preemption, or the place its KV came from.
 *
 * Threads: one (engine). Callbacks come inside engine_step(), with three exceptions: on_load comes inside
 * engine_open(), on_end also inside engine_seq_append(), and on_block inside every call that names or reuses
 * a page.
 * Errors: opening validates and names the field; steps can't fail.
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
#include "grammar/grammar.h"
#include "kernels/kernels.h"
#include "model/model.h"
#include "sched/cost.h"

struct engine;
struct seq;

enum seq_state { SEQ_WAITING, SEQ_FILLING, SEQ_RUNNING, SEQ_ENDED };
enum seq_goal {
    SEQ_GENERATE,    /* computes the prompt and generates all tokens here */
    SEQ_FIRST_TOKEN, /* computes the prompt and one token; layers are announced as they become complete */
    /* Gets the first token from elsewhere, and the prompt's KV as far as the prefix cache lacks it. */
    SEQ_ADOPT,
};
enum seq_finish {
    FINISH_NONE,
    FINISH_STOP,
    FINISH_LENGTH,
    FINISH_BROKEN, /* logits were not finite: no token was drawn from them */
    FINISH_STUCK,  /* of its grammar nothing can follow that the vocabulary has, or that is found in time */
};

struct engine_callbacks {
    void *user;
    /*
     * Pages are taken. The first n_matched_blocks need nothing: they are in the prefix cache, or no layer
     * needs them any more (engine_first_page_after). Comes once for a sequence, not again after a preemption.
     */
    void (*on_admitted)(void *user, struct seq *seq, uint32_t n_matched_blocks);
    /* FIRST_TOKEN only: pages [first, first + n) have all their tokens in layers [begin, end). */
    void (*on_pages_ready)(void *user, struct seq *seq, uint32_t first, uint32_t n, uint16_t begin, uint16_t end);
    void (*on_token)(void *user, struct seq *seq, const struct sampled *token); /* borrowed */
    void (*on_end)(void *user, struct seq *seq, enum seq_finish finish);
    /* A block got its name or lost it (kvpool_config.on_block). */
    void (*on_block)(void *user, bool added, const struct block_key *key, uint32_t chain_index);
    /* A batch is about to run; it should take expected_ms at most (sched/progress.h). May be NULL. */
    void (*on_step)(void *user, double expected_ms);
    /* While engine_open() packs weights: n_done of n_layers are packed (of rank 0). May be NULL. */
    void (*on_load)(void *user, uint32_t n_done, uint32_t n_layers);
};

struct engine_config {
    /* [n_tensor * n_pipeline] (engine/ranks.h), borrowed; not used with sim. */
    struct kernels *const *kernels;
    uint32_t n_tensor, n_pipeline;   /* 0 means 1 */
    uint32_t piece_rows;             /* rows of one piece, if there are several stages (ranks.h); 0: 256 */
    const struct model *model;       /* borrowed; NULL with sim */
    struct adapter *const *adapters; /* [n_adapters] for this model; array and adapters are borrowed */
    uint32_t n_adapters;
    const struct sim_cost *sim;       /* simulated compute without weights; copied; NULL: real */
    const struct model_config *shape; /* with sim: the shape of the model that is simulated; copied */
    enum compute compute;
    enum k_weights weights;
    enum num_type kv_dtype;
    uint32_t page_tokens; /* equals the cluster's block_tokens */
    uint32_t n_pages;
    /* Prompt and answer; at most the model's positions. 0: the model's positions, or what the pool holds. */
    uint32_t max_context;
    uint32_t max_batch;    /* sequences running at once */
    uint32_t max_rows;     /* rows of one step */
    uint32_t chunk_tokens; /* most prompt tokens of one sequence in one step; 0: max_rows */
    /* Most on_pages_ready calls in one step for a run of pages; 0: 4. Fewer if pages are small. */
    uint32_t announce_calls;
    uint64_t quarantine_ns;
    const struct clock *clock;
    const struct log *log;
    const char *weight_cache; /* directory of packed weights that processes share; NULL: none */
    struct engine_callbacks callbacks;
};

enum td_status engine_open(const struct engine_config *config, struct engine **out, struct td_error *error_out);
void engine_close(struct engine *e); /* close all sequences first; NULL is fine */

struct kvpool *engine_pool(struct engine *e);
const struct kv_layout *engine_layout(const struct engine *e);
uint32_t engine_max_context(const struct engine *e);
uint64_t engine_weight_bytes(const struct engine *e); /* 0: simulated */
/* See ranks_measure_gathers(). Call it between steps. */
double engine_measure_gathers(struct engine *e, uint32_t n_rows);
const char *engine_numerics(const struct engine *e); /* the numerics_id; "sim" if simulated */
/* Covers model, format of weights, KV dtype, numerics and layout: if it is equal, KV can be exchanged. */
struct block_key engine_fingerprint(const struct engine *e);

struct seq_params {
    const uint32_t *ids; /* copied; the prompt, then tokens that were generated before (a resumed request) */
    uint32_t n_ids, n_prompt;
    struct sampling sampling; /* copied, with its arrays */
    struct grammar *grammar;  /* what the answer must be; a reference is kept; NULL: anything */
    struct block_key root;    /* root of the block keys; differs for each adapter */
    uint32_t adapter;         /* 0: none; else adapters[adapter - 1] */
    enum seq_goal goal;
    bool prompt_logprobs;  /* scores the whole prompt, so nothing is taken from the prefix cache */
    uint32_t chunk_tokens; /* most of its prompt tokens in one step; 0: the engine's */
    /* TPOT limit in ms from its first token here on, which chunks of other prompts respect; 0: none. */
    double tpot_ms;
    void *user;
};

/* Validates ids, lengths against context and pool, sampling, tpot_ms. TD_ERR_INVALID names the field. */
enum td_status engine_seq_open(struct engine *e, const struct seq_params *p, struct seq **out,
                               struct td_error *error_out);
void engine_seq_close(struct engine *e, struct seq *seq); /* NULL is fine */

/* Inside on_admitted only, and always for ADOPT: the sequence waits for engine_seq_filled(). */
void engine_seq_fill(struct engine *e, struct seq *seq);
/*
 * The KV of the first n_tokens is in the pages and verified; full pages get their names. Fewer tokens than
 * were asked for are fine, the rest is computed. For ADOPT n_tokens is the whole prompt, and
 * engine_seq_append() of the first token follows.
 */
void engine_seq_filled(struct engine *e, struct seq *seq, uint32_t n_tokens);
/* ADOPT: appends a token that was sampled elsewhere. If it ends the sequence, on_end comes at once. */
void engine_seq_append(struct engine *e, struct seq *seq, uint32_t token);

void *engine_seq_user(const struct seq *seq);
enum seq_state engine_seq_state(const struct seq *seq);
const uint32_t *engine_seq_tokens(const struct seq *seq, uint32_t *n_out);
uint32_t engine_seq_computed(const struct seq *seq); /* leading tokens whose KV is in the pages */
/* Pages [first_page, n) are held. The ones before were given up: they are behind a sliding window. */
const struct page_ref *engine_seq_pages(const struct seq *seq, uint32_t *n_out);
uint32_t engine_seq_first_page(const struct seq *seq);
/* The first page that a sequence of n_tokens still needs. A handover begins with it. */
uint32_t engine_first_page_after(const struct engine *e, uint32_t n_tokens);
/* Keys of all full blocks of the tokens so far; the first *n_computed_out of them have computed KV. */
const struct block_key *engine_seq_keys(const struct seq *seq, uint32_t *n_out, uint32_t *n_computed_out);

/* Log-probability of each prompt token, given the tokens before it; the first token has none. */
struct prompt_scores {
    uint32_t n, n_top; /* tokens of the prompt; sampling.top_logprobs */
    float *logprobs;   /* [n]; [0] is NaN */
    uint32_t *ranks;   /* [n]; rank 1 is the likeliest token; [0] is 0 */
    /* [n - 1][n_top], for tokens from the second on, the likeliest first. */
    uint32_t *top_ids;
    float *top_logprobs; /* [n - 1][n_top] */
};
const struct prompt_scores *engine_seq_prompt_scores(const struct seq *seq); /* NULL if not asked for */

struct seq_times { /* nanoseconds; 0 until the phase is over */
    uint64_t queue, fill, prefill, decode_wait, decode;
    uint32_t n_preempted;
};
struct seq_times engine_seq_times(const struct seq *seq);

struct engine_load {
    uint32_t running, waiting, filling;
    uint64_t waiting_tokens; /* prompt tokens that are not computed yet */
};
struct engine_load engine_load(const struct engine *e);

/* The batch of the last engine_step() and how long it took. */
struct cost_step engine_last_step(const struct engine *e);

/* One step: sweeps the pool, admits, runs a batch. Returns the rows computed; 0: nothing can be done now. */
uint32_t engine_step(struct engine *e);
