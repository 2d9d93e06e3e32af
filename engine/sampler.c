#include "engine/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "kernels/kernels.h"

struct candidate {
    uint32_t id;
    float logit;
};

struct sampler {
    uint32_t vocab_size;
    uint32_t *counts;   /* occurrences of each id; zero between draws */
    uint8_t *in_prompt; /* likewise */
    struct candidate *candidates;
    float *weights;
    float *original; /* logits before anything was changed */
};

static bool in(float v, float min, float max)
{
    return v >= min && v <= max; /* false for NaN */
}

enum td_status sampling_check(const struct sampling *s, uint32_t vocab_size, struct td_error *e)
{
    const struct {
        const char *name;
        float value, min, max;
    } ranges[] = {{"temperature", s->temperature, 0, 100},
                  {"top_p", s->top_p, 1e-6f, 1},
                  {"min_p", s->min_p, 0, 1},
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
        if (s->bias[i].id >= vocab_size || !in(s->bias[i].bias, -100, 100))
            return td_fail(e, TD_ERR_INVALID, "sampling.logit_bias[%u]: id %u or bias %g out of range", i,
                           s->bias[i].id, (double)s->bias[i].bias);
    if (s->n_stop_ids > SAMPLING_MAX_STOP_IDS)
        return td_fail(e, TD_ERR_INVALID, "stopping.stop_ids: %u entries, at most %d", s->n_stop_ids,
                       SAMPLING_MAX_STOP_IDS);
    for (uint32_t i = 0; i < s->n_stop_ids; i++)
        if (s->stop_ids[i] >= vocab_size)
            return td_fail(e, TD_ERR_INVALID, "stopping.stop_ids[%u]: %u is not in the vocabulary of %u", i,
                           s->stop_ids[i], vocab_size);
    if (s->min_tokens > s->max_tokens)
        return td_fail(e, TD_ERR_INVALID, "stopping.min_tokens: %u is more than max_tokens %u", s->min_tokens,
                       s->max_tokens);
    return TD_OK;
}

struct sampler *sampler_open(uint32_t vocab_size)
{
    struct sampler *s = mem_zalloc(sizeof(*s));
    s->vocab_size = vocab_size;
    s->counts = mem_array(vocab_size, sizeof(*s->counts));
    s->in_prompt = mem_array(vocab_size, 1);
    s->candidates = mem_array(vocab_size, sizeof(*s->candidates));
    s->weights = mem_array(vocab_size, sizeof(*s->weights));
    s->original = mem_array(vocab_size, sizeof(*s->original));
    return s;
}

void sampler_close(struct sampler *s)
{
    if (!s)
        return;
    free(s->counts);
    free(s->in_prompt);
    free(s->candidates);
    free(s->weights);
    free(s->original);
    free(s);
}

static void penalize_one(struct sampler *s, const struct sampling *p, uint32_t id, float *logits)
{
    if (p->repetition_penalty != 1.0f)
        logits[id] = logits[id] > 0 ? logits[id] / p->repetition_penalty : logits[id] * p->repetition_penalty;
    if (s->counts[id]) /* presence and frequency count what was generated, not the prompt */
        logits[id] -= p->presence_penalty + p->frequency_penalty * (float)s->counts[id];
}

static void penalize(struct sampler *s, const struct sampling *p, const uint32_t *tokens, uint32_t n_tokens,
                     uint32_t n_prompt, float *logits)
{
    if (p->presence_penalty == 0 && p->frequency_penalty == 0 && p->repetition_penalty == 1.0f)
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
            continue; /* seen, and done */
        penalize_one(s, p, id, logits);
        s->counts[id] = 0;
        s->in_prompt[id] = 0;
    }
}

static int by_logit(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    if (x->logit != y->logit)
        return x->logit > y->logit ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

/* Everything that could be drawn, best first where an order is needed. */
static uint32_t gather(struct sampler *s, const struct sampling *p, const float *logits, float top)
{
    float cut = p->min_p > 0 ? top + k_log(p->min_p) * p->temperature : -INFINITY;
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->vocab_size; i++)
        if (logits[i] >= cut && logits[i] > -INFINITY)
            s->candidates[n++] = (struct candidate){i, logits[i]};
    if (p->top_p < 1 || (p->top_k && p->top_k < n))
        qsort(s->candidates, n, sizeof(*s->candidates), by_logit);
    return p->top_k && p->top_k < n ? p->top_k : n;
}

static uint32_t draw(struct sampler *s, const struct sampling *p, const float *logits, uint32_t position)
{
    float top = logits[k_argmax(logits, s->vocab_size)];
    uint32_t n = gather(s, p, logits, top), last = 0;
    double total = 0;
    for (uint32_t i = 0; i < n; i++) {
        s->weights[i] = k_exp((s->candidates[i].logit - top) / p->temperature);
        total += (double)s->weights[i];
    }
    if (p->top_p < 1) { /* the smallest set whose share reaches top_p */
        double want = total * (double)p->top_p, sum = 0;
        for (last = 0; last < n && sum < want; last++)
            sum += (double)s->weights[last];
        n = last ? last : 1;
        total = sum;
    }
    double u = random_unit(random_at(p->seed, p->choice, position)) * total, sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        sum += (double)s->weights[i];
        if (u < sum)
            return s->candidates[i].id;
    }
    return s->candidates[n - 1].id;
}

uint32_t sampler_draw(struct sampler *s, const struct sampling *p, const uint32_t *tokens, uint32_t n_tokens,
                      uint32_t n_prompt, float *logits, float *logprob_out)
{
    float normalizer = k_logsumexp(logits, s->vocab_size);
    memcpy(s->original, logits, s->vocab_size * sizeof(float));
    penalize(s, p, tokens, n_tokens, n_prompt, logits);
    for (uint32_t i = 0; i < p->n_bias; i++)
        logits[p->bias[i].id] += p->bias[i].bias;
    bool forbid = n_tokens - n_prompt < p->min_tokens;
    for (uint32_t i = 0; forbid && i < p->n_stop_ids; i++)
        logits[p->stop_ids[i]] = -INFINITY;
    uint32_t id = p->temperature == 0 ? k_argmax(logits, s->vocab_size) : draw(s, p, logits, n_tokens);
    *logprob_out = s->original[id] - normalizer;
    return id;
}
