/* What engine.c (steps) and seq.c (one sequence) share. */
#pragma once

#include "engine/engine.h"
#include "engine/ranks.h"
#include "sched/batching.h"
#include "sched/progress.h"
#include "sched/sequence.h"

struct seq {
    struct seq *prev, *next; /* engine's list, in order of arrival */
    struct engine *engine;
    enum seq_state state;
    enum seq_goal goal;
    struct sampling sampling;
    struct block_key root;
    uint32_t adapter; /* 0: none */
    void *user;

    uint32_t *tokens, n_tokens, cap_tokens, n_prompt;
    uint32_t n_computed; /* tokens whose KV is in the pages */
    struct page_ref *pages;
    uint8_t **addresses; /* [engine's n_views][cap_pages] of pages */
    uint32_t first_page; /* those before it were given up: no layer sees them any more (kv_layout.h) */
    uint32_t n_pages, cap_pages;
    bool is_long;                         /* model_config_is_long: what its KV was computed by, and its keys say */
    struct block_key *keys;               /* of full blocks of tokens[] */
    uint32_t n_keys, n_named, n_reported; /* n_reported: pages told by on_pages_ready in all layers */

    uint32_t chunk_tokens;
    double tpot_ms;
    uint32_t n_before;           /* tokens before the first one that came here */
    struct prompt_scores scores; /* logprobs NULL: not asked for */

    uint32_t n_rows; /* in the step being built */
    uint64_t opened_ns, admitted_ns, running_ns, first_token_ns,
        decode_ns; /* decode_ns: its first step past the prompt */
    struct seq_times times;
};

struct engine {
    struct engine_config config;
    struct model_config model;
    struct kv_layout layout;
    struct kvpool *pool;
    struct ranks *ranks;     /* NULL: simulated */
    struct forward_sim *sim; /* NULL: real */
    uint32_t n_views;        /* memories in which pages lie (ranks.h) */
    struct sampler *sampler;
    struct block_key fingerprint;
    char numerics[K_NUMERICS_BYTES];
    struct seq *head, *tail;
    uint32_t n_active; /* FILLING and RUNNING */

    /* one step's arrays, max_rows or max_batch long */
    uint32_t *ids, *positions, *logit_rows, max_logit_rows;
    struct k_attn_seq *attn_seqs; /* [n_views][n_batch] */
    uint32_t *seq_tokens;
    uint32_t *adapter_rows; /* [n_adapters + 1] (forward.h) */
    struct seq **batch;     /* sequences in the step */
    uint32_t n_batch;
    struct batch_item *items; /* what the plan is made from */
    uint32_t *item_rows;
    float *logits;
    bool *wants_logits;
    struct k_draw *draws;
    struct k_sampled *sampled;

    struct cost_step last_step;
    struct cost_model cost; /* of this engine's steps */
    struct progress_past past;
    double starved_ms; /* how long steps have had no prompt tokens though prompts were there */
    bool is_starving;  /* in the step that runs */
};

static inline uint32_t pages_for(const struct engine *e, uint32_t n_tokens)
{
    return sequence_pages(n_tokens, e->config.page_tokens);
}

bool seq_grow(struct seq *s, uint32_t n_pages);     /* takes pages up to n_pages; false: none left */
bool seq_admit(struct seq *s);                      /* WAITING -> RUNNING or FILLING; false: no pages */
void seq_preempt(struct seq *s);                    /* RUNNING -> WAITING */
void seq_computed(struct seq *s, uint32_t n_total); /* KV of tokens [0, n_total) is there: names full blocks */
void seq_push_token(struct seq *s, uint32_t token); /* appends, ends the sequence when it is over */
void seq_end(struct seq *s, enum seq_finish finish);
void seq_break(struct seq *s); /* ends it as FINISH_BROKEN; nobody finds its blocks any more */
