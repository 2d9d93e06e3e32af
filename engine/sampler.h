/*
 * From logits to a token: penalties, bias, temperature, top-k, top-p, min-p, typical-p, and the draw.
 *
 * The draw uses a counter-based generator keyed by (seed, choice, absolute position of the new token). So a
 * token does not depend on where, or in which batch, it is sampled. Most rows are drawn where they were
 * computed (k_sample_rows). A row whose logits are changed by penalties, bias or lists of ids is copied to
 * the host, which draws in the same way.
 *
 * The order of operations is that of transformers: repetition, presence and frequency penalty, bias,
 * forbidden, bad and allowed ids, temperature, top-k, top-p, min-p, typical-p (Meister et al. 2022,
 * section 4). Log-probabilities are those of the unmodified distribution.
 *
 * Threads: a sampler has scratch memory and belongs to one thread.
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
    SAMPLING_MAX_BAD = 128,
    SAMPLING_MAX_BAD_IDS = 65536,
    SAMPLING_MAX_TOP_LOGPROBS = 20,
};

struct logit_bias {
    uint32_t id;
    float bias; /* -100 .. 100, or -INFINITY: the id is never drawn */
};

/* Plain data. The arrays belong to the code that filled it. */
struct sampling {
    float temperature; /* 0: greedy */
    uint32_t top_k;    /* 0: no limit */
    float top_p, min_p;
    float typical_p; /* 0 or 1: no limit */
    float presence_penalty, frequency_penalty, repetition_penalty;
    uint64_t seed;
    uint32_t choice;
    const struct logit_bias *bias;
    uint32_t n_bias;
    const uint32_t *allowed; /* only these ids may be drawn; n_allowed 0: all ids */
    uint32_t n_allowed;
    const uint32_t *bad_ids, *bad_lengths; /* lists of ids, one behind the other: the last id of a list is not */
    uint32_t n_bad_ids, n_bad;             /* drawn behind the others of it, if those were generated */
    bool is_masked;                        /* sampler_finish() gets a mask for each token */
    uint32_t top_logprobs;                 /* number of likeliest tokens that are reported with each token */
    uint32_t max_tokens, min_tokens;       /* limits on generated tokens, counted from n_prompt */
    const uint32_t *stop_ids;              /* they end the sequence, and are not drawn before min_tokens */
    uint32_t n_stop_ids;
};

/* Every value must be in its range, and ids in the vocabulary. TD_ERR_INVALID names the field. */
enum td_status sampling_check(const struct sampling *s, uint32_t vocab_size, struct td_error *error_out);

struct sampler;
struct sampler *sampler_open(uint32_t vocab_size);
void sampler_close(struct sampler *s);

/* A token. Log-probabilities are natural logarithms, of the unmodified distribution. */
struct sampled {
    uint32_t id, n_top;
    float logprob;
    uint32_t top_ids[SAMPLING_MAX_TOP_LOGPROBS]; /* [n_top], the likeliest first */
    float top_logprobs[SAMPLING_MAX_TOP_LOGPROBS];
};

/* Whether sampler_finish() reads the row of logits. False: the result of k_sample_rows() is enough. */
bool sampling_wants_logits(const struct sampling *s, uint32_t n_generated);

/*
 * How the kernels draw the token at position n_tokens from unmodified logits. If the logits must be changed
 * first, the draw is greedy: the host draws again, and needs only the largest logit.
 */
struct k_draw sampling_draw(const struct sampling *s, uint32_t n_tokens, uint32_t n_prompt);

/*
 * Makes the token at position n_tokens. tokens[0 .. n_tokens) are the prompt (n_prompt tokens) and the
 * generated ones. drawn: the result of sampling_draw() on the row. logits[vocab] is modified; not read if
 * sampling_wants_logits() is false. mask: NULL, or if p->is_masked a bit for each id that may be drawn,
 * one of which is set; it decides about stop ids, too.
 */
void sampler_finish(struct sampler *s, const struct sampling *p, const uint32_t *tokens, uint32_t n_tokens,
                    uint32_t n_prompt, const struct k_sampled *drawn, const uint32_t *mask, float *logits,
                    struct sampled *out);

/*
 * Scores a given token: its log-probability and the likeliest tokens go to out. Returns its rank: 1 for the
 * largest logit; of equal logits the lower id comes first. logsumexp belongs to the row and is finite.
 */
uint32_t sampler_score(struct sampler *s, const float *logits, float logsumexp, uint32_t id, uint32_t top_logprobs,
                       struct sampled *out);
