#include "engine/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "kernels/kernels.h"

struct sampler {
    uint32_t vocab_size;
    uint32_t *counts;   /* occurrences of each id among generated tokens; all zero between calls */
    uint8_t *in_prompt; /* ids of the prompt; all zero between calls */
    void *scratch;      /* scratch memory of k_draw() and k_largest() */
    float *original;    /* logits before they were changed */
};

static bool in(float v, float min, float max)
{
    return v >= min && v <= max; /* false for NaN */
}

/* Whether some token may be drawn before min_tokens. */
static bool can_begin(const struct sampling *s)
{
    bool can = !s->n_allowed || !s->min_tokens;
    for (uint32_t i = 0; i < s->n_allowed && !can; i++) {
        can = true;
        for (uint32_t j = 0; j < s->n_stop_ids && can; j++)
            can = s->allowed[i] != s->stop_ids[j];
    }
    return can;
}

enum td_status sampling_check(const struct sampling *s, uint32_t vocab_size, struct td_error *e)
{
    const struct {
        const char *name;
        float value, min, max;
    } ranges[] = {{"temperature", s->temperature, 0, 100},
                  {"top_p", s->top_p, 1e-6f, 1},
                  {"min_p", s->min_p, 0, 1},
                  {"typical_p", s->typical_p, 0, 1},
                  {"presence_penalty", s->presence_penalty, -2, 2},
                  {"frequency_penalty", s->frequency_penalty, -2, 2},
                  {"repetition_penalty", s->repetition_penalty, 1e-3f, 10}};
    for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++)
        if (!in(ranges[i].value, ranges[i].min, ranges[i].max))
            return td_fail(e, TD_ERR_INVALID, "sampling.%s: %g is not in %g .. %g", ranges[i].name,
                           (double)ranges[i].value, (double)ranges[i].min, (double)ranges[i].max);
    if (s->n_bias > SAMPLING_MAX_BIAS)
        return td_fail(e, TD_ERR_INVALID, "sampling.logit_bias: %u entries, at most %d", s->n_bias, SAMPLING_MAX_BIAS);
    for (uint32_t i = 0; i < s->n_bias; i++)
        if (s->bias[i].id >= vocab_size || !(in(s->bias[i].bias, -100, 100) || s->bias[i].bias == -INFINITY))
            return td_fail(e, TD_ERR_INVALID, "sampling.logit_bias[%u]: id %u or bias %g out of range", i,
                           s->bias[i].id, (double)s->bias[i].bias);
    if (s->n_stop_ids > SAMPLING_MAX_STOP_IDS)
        return td_fail(e, TD_ERR_INVALID, "stopping.stop_ids: %u entries, at most %d", s->n_stop_ids,
                       SAMPLING_MAX_STOP_IDS);
    for (uint32_t i = 0; i < s->n_stop_ids; i++)
        if (s->stop_ids[i] >= vocab_size)
            return td_fail(e, TD_ERR_INVALID, "stopping.stop_ids[%u]: %u is not in the vocabulary of %u", i,
                           s->stop_ids[i], vocab_size);
    if (s->n_allowed > SAMPLING_MAX_ALLOWED)
        return td_fail(e, TD_ERR_INVALID, "sampling.allowed_ids: %u entries, at most %d", s->n_allowed,
                       SAMPLING_MAX_ALLOWED);
    for (uint32_t i = 0; i < s->n_allowed; i++)
        if (s->allowed[i] >= vocab_size)
            return td_fail(e, TD_ERR_INVALID, "sampling.allowed_ids[%u]: %u is not in the vocabulary of %u", i,
                           s->allowed[i], vocab_size);
    uint64_t n_bad_ids = 0;
    for (uint32_t i = 0; i < s->n_bad && s->n_bad <= SAMPLING_MAX_BAD; i++)
        n_bad_ids += s->bad_lengths[i] ? s->bad_lengths[i] : UINT32_MAX;
    if (s->n_bad > SAMPLING_MAX_BAD || n_bad_ids != s->n_bad_ids || s->n_bad_ids > SAMPLING_MAX_BAD_IDS)
        return td_fail(e, TD_ERR_INVALID, "sampling.bad_words: %u lists of %u ids, at most %d of %d, and none empty",
                       s->n_bad, s->n_bad_ids, SAMPLING_MAX_BAD, SAMPLING_MAX_BAD_IDS);
    for (uint32_t i = 0; i < s->n_bad_ids; i++)
        if (s->bad_ids[i] >= vocab_size)
            return td_fail(e, TD_ERR_INVALID, "sampling.bad_words: %u is not in the vocabulary of %u", s->bad_ids[i],
                           vocab_size);
    if (s->top_logprobs > SAMPLING_MAX_TOP_LOGPROBS || s->top_logprobs > vocab_size)
        return td_fail(e, TD_ERR_INVALID, "top_logprobs: %u, at most %d", s->top_logprobs, SAMPLING_MAX_TOP_LOGPROBS);
    if (s->min_tokens > s->max_tokens)
        return td_fail(e, TD_ERR_INVALID, "stopping.min_tokens: %u is more than max_tokens %u", s->min_tokens,
                       s->max_tokens);
    if (!can_begin(s))
        return td_fail(e, TD_ERR_INVALID, "sampling.allowed_ids: each of them ends the answer before min_tokens");
    return TD_OK;
}

struct sampler *sampler_open(uint32_t vocab_size)
{
    struct sampler *s = mem_zalloc(sizeof(*s));
    s->vocab_size = vocab_size;
    s->counts = mem_array(vocab_size, sizeof(*s->counts));
    s->in_prompt = mem_array(vocab_size, 1);
    s->scratch = mem_array(vocab_size, k_draw_scratch_bytes(1));
    s->original = mem_array(vocab_size, sizeof(*s->original));
    return s;
}

void sampler_close(struct sampler *s)
{
    if (!s)
        return;
    free(s->counts);
    free(s->in_prompt);
    free(s->scratch);
    free(s->original);
    free(s);
}

static bool penalizes(const struct sampling *p)
{
    return p->presence_penalty != 0 || p->frequency_penalty != 0 || p->repetition_penalty != 1.0f;
}

static void penalize_one(struct sampler *s, const struct sampling *p, uint32_t id, float *logits)
{
    if (p->repetition_penalty != 1.0f)
        logits[id] = logits[id] > 0 ? logits[id] / p->repetition_penalty : logits[id] * p->repetition_penalty;
    if (s->counts[id]) /* presence and frequency penalties count generated tokens only */
        logits[id] -= p->presence_penalty + p->frequency_penalty * (float)s->counts[id];
}

static void penalize(struct sampler *s, const struct sampling *p, const uint32_t *tokens, uint32_t n_tokens,
                     uint32_t n_prompt, float *logits)
{
    if (!penalizes(p))
        return;
    for (uint32_t i = 0; i < n_tokens; i++) {
        if (i < n_prompt)
            s->in_prompt[tokens[i]] = 1;
        else
            s->counts[tokens[i]]++;
    }
    for (uint32_t i = 0; i < n_tokens; i++) {
        uint32_t id = tokens[i];
        if (!s->counts[id] && !s->in_prompt[id])
            continue; /* this id was handled at its first occurrence */
        penalize_one(s, p, id, logits);
        s->counts[id] = 0;
        s->in_prompt[id] = 0;
    }
}

/* ------------------------------------------------------------------- finish */

/* generated: the tokens that were generated. */
static void forbid_bad(const struct sampling *p, const uint32_t *generated, uint32_t n, float *logits)
{
    const uint32_t *ids = p->bad_ids;
    for (uint32_t i = 0; i < p->n_bad; i++) {
        uint32_t before = p->bad_lengths[i] - 1;
        if (before <= n && (!before || !memcmp(ids, generated + n - before, before * sizeof(*ids))))
            logits[ids[before]] = -INFINITY;
        ids += before + 1;
    }
}

static void forbid(struct sampler *s, const struct sampling *p, bool too_early, const uint32_t *mask, float *logits)
{
    for (uint32_t i = 0; too_early && !mask && i < p->n_stop_ids; i++)
        logits[p->stop_ids[i]] = -INFINITY;
    for (uint32_t at = 0; mask && at < s->vocab_size; at += 32)
        for (uint32_t i = at; mask[at / 32] != UINT32_MAX && i < at + 32 && i < s->vocab_size; i++)
            if (!(mask[at / 32] >> i % 32 & 1))
                logits[i] = -INFINITY;
    if (!p->n_allowed)
        return;
    float *kept = s->scratch; /* scratch has room, and is not in use yet */
    for (uint32_t i = 0; i < p->n_allowed; i++)
        kept[i] = logits[p->allowed[i]];
    for (uint32_t i = 0; i < s->vocab_size; i++)
        logits[i] = -INFINITY;
    for (uint32_t i = 0; i < p->n_allowed; i++)
        logits[p->allowed[i]] = kept[i];
}

/* The lowest id of a mask, which has one. */
static uint32_t first_of(const uint32_t *mask)
{
    uint32_t i = 0;
    while (!mask[i])
        i++;
    return i * 32 + (uint32_t)__builtin_ctz(mask[i]);
}

static void tell_top(struct sampler *s, const float *logits, uint32_t k, float normalizer, struct sampled *out)
{
    out->n_top = k_largest(logits, s->vocab_size, k, s->scratch, out->top_ids);
    for (uint32_t i = 0; i < out->n_top; i++)
        out->top_logprobs[i] = logits[out->top_ids[i]] - normalizer;
}

static bool is_too_early(const struct sampling *p, uint32_t n_generated)
{
    return n_generated < p->min_tokens && p->n_stop_ids;
}

static bool changes_logits(const struct sampling *p, uint32_t n_generated)
{
    return penalizes(p) || p->n_bias || p->n_allowed || p->n_bad || p->is_masked || is_too_early(p, n_generated);
}

bool sampling_wants_logits(const struct sampling *p, uint32_t n_generated)
{
    return p->top_logprobs || changes_logits(p, n_generated);
}

static struct k_draw draw_at(const struct sampling *p, uint32_t position)
{
    return (struct k_draw){.temperature = p->temperature,
                           .top_k = p->top_k,
                           .top_p = p->top_p,
                           .min_p = p->min_p,
                           .typical_p = p->typical_p,
                           .u = random_unit(random_at(p->seed, p->choice, position))};
}

struct k_draw sampling_draw(const struct sampling *p, uint32_t n_tokens, uint32_t n_prompt)
{
    return changes_logits(p, n_tokens - n_prompt) ? (struct k_draw){0} : draw_at(p, n_tokens);
}

void sampler_finish(struct sampler *s, const struct sampling *p, const uint32_t *tokens, uint32_t n_tokens,
                    uint32_t n_prompt, const struct k_sampled *drawn, const uint32_t *mask, float *logits,
                    struct sampled *out)
{
    uint32_t n_generated = n_tokens - n_prompt;
    *out = (struct sampled){.id = drawn->id, .logprob = drawn->logit - drawn->logsumexp};
    if (!sampling_wants_logits(p, n_generated))
        return;
    tell_top(s, logits, p->top_logprobs, drawn->logsumexp, out);
    if (!changes_logits(p, n_generated))
        return;
    memcpy(s->original, logits, s->vocab_size * sizeof(float));
    penalize(s, p, tokens, n_tokens, n_prompt, logits);
    for (uint32_t i = 0; i < p->n_bias; i++)
        logits[p->bias[i].id] += p->bias[i].bias;
    forbid_bad(p, tokens + n_prompt, n_generated, logits);
    forbid(s, p, is_too_early(p, n_generated), mask, logits);
    const struct k_draw draw = draw_at(p, n_tokens);
    uint32_t best = k_argmax(logits, s->vocab_size);
    if (logits[best] == -INFINITY) /* nothing may be drawn: every allowed id is forbidden, too */
        out->id = mask ? first_of(mask) : p->n_allowed ? p->allowed[0] : best;
    else
        out->id = k_draw(logits, s->vocab_size, best, &draw, s->scratch);
    out->logprob = s->original[out->id] - drawn->logsumexp;
}

uint32_t sampler_score(struct sampler *s, const float *logits, float logsumexp, uint32_t id, uint32_t top_logprobs,
                       struct sampled *out)
{
    uint32_t rank = 1;
    for (uint32_t i = 0; i < s->vocab_size; i++)
        rank += logits[i] > logits[id] || (logits[i] == logits[id] && i < id);
    *out = (struct sampled){.id = id, .logprob = logits[id] - logsumexp};
    tell_top(s, logits, top_logprobs, logsumexp, out);
    return rank;
}
