/* What engine.c (steps) and seq.c (one sequence) share. */
#pragma once

#include <stdatomic.h>

#include "base/list.h"
#include "engine/engine.h"
#include "engine/ranks.h"
#include "sched/batching.h"
#include "sched/progress.h"
#include "sched/sequence.h"

struct seq {
    TAILQ_ENTRY(seq) in_engine;
    struct engine *engine;
    enum seq_state state;
    enum seq_goal goal;
    struct sampling sampling;
    struct block_key root;
    uint32_t adapter; /* 0: none */
    void *user;

    uint32_t *tokens, n_tokens, cap_tokens, n_prompt;
    struct grammar_cursor *cursor; /* where the answer is in its grammar; NULL: it has none */
    const uint32_t *mask;          /* with a cursor, in a step that draws; NULL: no token may come */
    uint32_t n_computed;           /* leading tokens whose KV is in the pages */
    /* [first_page, n_pages) are held, each with one sequence hold of the pool. */
    struct page_ref *pages;
    uint8_t **addresses; /* [n_views of the engine][cap_pages], host or device address of each page */
    /* Pages before it were given up: they are behind the window of every layer (kv_layout.h). */
    uint32_t first_page;
    uint32_t n_pages, cap_pages;
    /* Which set of longrope frequencies its KV uses (model_config_is_long). Its block keys depend on it. */
    bool is_long;
    uint64_t written;       /* its pages are on the devices with this mark (ranks.h); 0: they are there */
    struct block_key *keys; /* [n_keys] of the full blocks of tokens[] */
    /* Blocks with a key; blocks whose pages were named; pages that on_pages_ready reported in all layers. */
    uint32_t n_keys, n_named, n_reported;

    uint32_t chunk_tokens;
    double tpot_ms;
    uint32_t n_before;           /* tokens before the first one that was pushed here */
    struct prompt_scores scores; /* logprobs NULL: not asked for */

    uint32_t n_rows; /* rows in the step that is being planned or run */
    /* decode_ns: start of its first step after the prompt. running_ns: end of filling, or admitted_ns. */
    uint64_t opened_ns, admitted_ns, running_ns, first_token_ns, decode_ns;
    struct seq_times times;
};

struct engine {
    struct engine_config config;
    struct model_config model;
    struct kv_layout layout;
    struct kvpool *pool;
    struct ranks *ranks;     /* NULL: compute is simulated */
    struct forward_sim *sim; /* NULL: compute is real */
    uint32_t n_views;        /* memories in which pages have an address (ranks.h) */
    struct sampler *sampler;
    /* Of the sequences with a grammar that draw in this step, a bit for each token. */
    uint32_t *masks, cap_masks;
    atomic_bool has_masks; /* they are made */
    struct block_key fingerprint;
    char numerics[K_NUMERICS_BYTES];
    TAILQ_HEAD(seq_list, seq) seqs; /* in order of arrival */
    uint32_t n_active;              /* sequences that are FILLING or RUNNING */
    uint64_t written;               /* the last mark of pages that are copied to the devices */

    /* Arrays of one step, max_rows or max_batch long. */
    uint32_t *ids, *positions, *logit_rows, max_logit_rows;
    struct k_attn_seq *attn_seqs; /* [n_views][n_batch] */
    uint32_t *seq_tokens;
    uint32_t *adapter_rows; /* [n_adapters + 1] (forward.h) */
    struct seq **batch;     /* sequences in the step, [n_batch] */
    uint32_t n_batch;
    struct batch_item *items; /* input of batching_plan() */
    uint32_t *item_rows;
    float *logits;
    bool *wants_logits;
    struct k_draw *draws;
    struct k_sampled *sampled;

    struct cost_step last_step;
    struct cost_model cost; /* predicts the duration of this engine's steps */
    struct progress_past past;
    /* How long (ms) steps have run without prompt tokens although prompts waited. */
    double starved_ms;
    bool is_starving; /* the running step is such a step */
};

static inline uint32_t pages_for(const struct engine *e, uint32_t n_tokens)
{
    return sequence_pages(n_tokens, e->config.page_tokens);
}

/* Takes pages until it has n_pages. False, with nothing taken, if the pool can't give them. */
bool seq_grow(struct seq *s, uint32_t n_pages);
/* WAITING -> RUNNING, or FILLING if on_admitted says so. False, with nothing taken, if pages are lacking. */
bool seq_admit(struct seq *s);
bool seq_is_there(struct seq *s); /* whether its pages are where it computes, or still on their way */
/* RUNNING -> WAITING; gives all pages up. Named blocks stay in the prefix cache. */
void seq_preempt(struct seq *s);
/* The KV of tokens [0, n_total) is in the pages: names full blocks and gives up pages behind the window. */
void seq_computed(struct seq *s, uint32_t n_total);
/* Appends a token; ends the sequence at a stop token, a length or its goal. */
void seq_push_token(struct seq *s, uint32_t token);
void seq_end(struct seq *s, enum seq_finish finish);
void seq_break(struct seq *s); /* ends it with FINISH_BROKEN and takes the names of its blocks away */

/* Runs steps of the sizes that will come, on a device (engine_warm.c). Call it before the first sequence. */
void engine_warm(struct engine *e);
