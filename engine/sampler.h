/*
 * From logits to a token: penalties, bias, temperature, top-k, top-p, min-p, typical-p, and the draw.
 *
 * The draw comes from a counter-based generator keyed by (seed, choice, absolute position of the new token), so where and
 * in which batch a token is sampled doesn't change it. Most rows are drawn where they were computed (k_sample_rows); a row that
 * penalties, bias or lists change comes to the host, which draws in the same way.
 *
 * Order of operations, as transformers has it: repetition, presence and frequency penalty, bias, forbidden and allowed ids,
 * temperature, top-k, top-p, min-p, typical-p (Meister et al. 2022, section 4). Log-probabilities are those of the unmodified
 * distribution.
 *
 * Threads: a sampler has scratch and belongs to one thread.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "kernels/kernels.h"
#include "model/config.h"

enum {
    SAMPLING_MAX_BIAS = 1024 + MODEL_MAX_SUPPRESSED,
    SAMPLING_MAX_STOP_IDS = 64,
    SAMPLING_MAX_ALLOWED = 4096,
    SAMPLING_MAX_TOP_LOGPROBS = 20,
};

struct logit_bias {
    uint32_t id;
    float bias; /* -100 .. 100, or -INFINITY: never drawn */
};

struct sampling {      /* plain data; arrays belong to whoever filled it */
    float temperature; /* 0: greedy */
    uint32_t top_k;    /* 0: all */
    float top_p, min_p;
    float typical_p; /* 0 and 1: all */
    float presence_penalty, frequency_penalty, repetition_penalty;
    uint64_t seed;
    uint32_t choice;
    const struct logit_bias *bias;
    uint32_t n_bias;
    const uint32_t *allowed; /* nothing else is drawn; none: everything is */
    uint32_t n_allowed;
    uint32_t top_logprobs;           /* so many of the likeliest tokens are told with each */
    uint32_t max_tokens, min_tokens; /* counted from n_prompt */
    const uint32_t *stop_ids;        /* end the sequence; never drawn before min_tokens */
    uint32_t n_stop_ids;
};

/* Every value in its range, ids inside the vocabulary. TD_ERR_INVALID names the field. */
enum td_status sampling_check(const struct sampling *s, uint32_t vocab_size, struct td_error *error_out);

struct sampler;
struct sampler *sampler_open(uint32_t vocab_size);
void sampler_close(struct sampler *s);

struct sampled { /* log-probabilities are natural, and of the unmodified distribution */
    uint32_t id, n_top;
    float logprob;
    uint32_t top_ids[SAMPLING_MAX_TOP_LOGPROBS]; /* the likeliest first */
    float top_logprobs[SAMPLING_MAX_TOP_LOGPROBS];
};

/* False: nothing but what the kernels draw (sampling_draw) is told, and the row of logits is not looked at. */
bool sampling_wants_logits(const struct sampling *s, uint32_t n_generated);

/* How the token that gets position n_tokens is drawn of the logits as they are; greedily, if they have to be changed before it is. */
struct k_draw sampling_draw(const struct sampling *s, uint32_t n_tokens, uint32_t n_prompt);

/*
 * tokens[0..n_tokens): prompt (n_prompt of them) and what was generated; the new token gets position n_tokens. drawn: as
 * sampling_draw() says, of the logits. logits[vocab] is modified; not read where sampling_wants_logits() says so.
 */
void sampler_finish(struct sampler *s, const struct sampling *p, const uint32_t *tokens, uint32_t n_tokens,
                    uint32_t n_prompt, const struct k_sampled *drawn, float *logits, struct sampled *out);

/*
 * A token that was there already: its log-probability and the likeliest ones in out; returns its rank, 1 for the largest logit, the lower
 * id first of equals. logsumexp of the row is finite.
 */
uint32_t sampler_score(struct sampler *s, const float *logits, float logsumexp, uint32_t id, uint32_t top_logprobs,
                       struct sampled *out);
