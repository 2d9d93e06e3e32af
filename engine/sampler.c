#include "engine/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "kernels/kernels.h"

static const float LEAST = -40; /* logits that much below the largest, over the temperature, count as nothing */

struct candidate {
    uint32_t id;
    float key;    /* what is chosen by: the logit, or how typical it is */
    float weight; /* probability, times some constant */
};

struct sampler {
    uint32_t vocab_size;
    uint32_t *counts;   /* occurrences of each id; zero between draws */
    uint8_t *in_prompt; /* likewise */
    struct candidate *candidates;
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
    if (s->n_allowed > SAMPLING_MAX_ALLOWED)
        return td_fail(e, TD_ERR_INVALID, "sampling.allowed_ids: %u entries, at most %d", s->n_allowed,
                       SAMPLING_MAX_ALLOWED);
    for (uint32_t i = 0; i < s->n_allowed; i++)
        if (s->allowed[i] >= vocab_size)
            return td_fail(e, TD_ERR_INVALID, "sampling.allowed_ids[%u]: %u is not in the vocabulary of %u", i,
                           s->allowed[i], vocab_size);
    if (s->top_logprobs > SAMPLING_MAX_TOP_LOGPROBS || s->top_logprobs > vocab_size)
        return td_fail(e, TD_ERR_INVALID, "top_logprobs: %u, at most %d", s->top_logprobs, SAMPLING_MAX_TOP_LOGPROBS);
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
    if (s->counts[id]) /* presence and frequency count what was generated, not the prompt */
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
            continue; /* seen, and done */
        penalize_one(s, p, id, logits);
        s->counts[id] = 0;
        s->in_prompt[id] = 0;
    }
}

/* -------------------------------------------------------------- selection */

/* Larger keys first, of equal ones the lower id. */
static inline bool before(const struct candidate *a, const struct candidate *b)
{
    return a->key != b->key ? a->key > b->key : a->id < b->id;
}

static void swap(struct candidate *a, struct candidate *b)
{
    struct candidate c = *a;
    *a = *b;
    *b = c;
}

static void sort_few(struct candidate *c, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++)
        for (uint32_t j = i; j && before(&c[j], &c[j - 1]); j--)
            swap(&c[j], &c[j - 1]);
}

/* Moves what goes before a pivot from the middle of three to the front; returns how many: at least one, not all. */
static uint32_t partition(struct candidate *c, uint32_t n)
{
    uint32_t m = n / 2, kept = 0;
    if (before(&c[m], &c[0]))
        swap(&c[m], &c[0]);
    if (before(&c[n - 1], &c[0]))
        swap(&c[n - 1], &c[0]);
    if (before(&c[n - 1], &c[m]))
        swap(&c[n - 1], &c[m]);
    struct candidate pivot = c[m];
    swap(&c[m], &c[n - 1]);
    for (uint32_t i = 0; i + 1 < n; i++)
        if (before(&c[i], &pivot))
            swap(&c[i], &c[kept++]);
    swap(&c[kept], &c[n - 1]);
    return kept;
}

enum { FEW = 24 };

/* The first k in order go to the front, in some order. */
static void select_count(struct candidate *c, uint32_t n, uint32_t k)
{
    while (n > FEW && k && k < n) {
        uint32_t m = partition(c, n);
        if (m >= k) {
            n = m;
        } else {
            c += m + 1; /* the pivot is where it belongs */
            n -= m + 1;
            k -= m + 1;
        }
    }
    if (k && k < n)
        sort_few(c, n);
}

static double weight_of(const struct candidate *c, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += (double)c[i].weight;
    return sum;
}

/* As few of the first as together weigh that much go to the front; returns how many, at least one. */
static uint32_t select_weight(struct candidate *c, uint32_t n, double want)
{
    uint32_t begin = 0;
    while (n > FEW) {
        uint32_t m = partition(c + begin, n);
        double left = weight_of(c + begin, m), pivot = (double)c[begin + m].weight;
        if (left >= want && m) {
            n = m;
        } else if (left + pivot >= want || m + 1 == n) {
            return begin + m + 1;
        } else {
            want -= left + pivot;
            begin += m + 1;
            n -= m + 1;
        }
    }
    sort_few(c + begin, n);
    for (uint32_t i = 0; i < n; i++)
        if ((want -= (double)c[begin + i].weight) <= 0)
            return begin + i + 1;
    return begin + n;
}

/* A heap of the k best so far, the worst of them at its top. */
static void sink(struct candidate *heap, uint32_t n, uint32_t i)
{
    for (uint32_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && before(&heap[child], &heap[child + 1]))
            child++;
        if (!before(&heap[i], &heap[child]))
            return;
        swap(&heap[i], &heap[child]);
    }
}

/* The k largest logits of at least cut, in one pass; in some order. Returns how many there are. */
static uint32_t largest(const float *logits, uint32_t vocab_size, uint32_t k, float cut, struct candidate *heap)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < vocab_size; i++) {
        if (!(logits[i] >= cut))
            continue;
        const struct candidate c = {i, logits[i], 0};
        if (n < k) {
            heap[n++] = c;
            for (uint32_t j = n / 2; n == k && j-- > 0;)
                sink(heap, n, j);
        } else if (c.key > heap[0].key) { /* an equal one has a higher id */
            heap[0] = c;
            sink(heap, n, 0);
        }
    }
    return n;
}

/* -------------------------------------------------------------------- draw */

enum { HEAP_MAX = 1024 };

/* What may be drawn by its logit alone. */
static uint32_t gather(struct sampler *s, const struct sampling *p, const float *logits, float top)
{
    bool by_share = p->min_p > 0 && p->top_p >= 1; /* nothing before min-p asks what the others weigh */
    float cut = top + (by_share ? k_log(p->min_p) - 0.01f : LEAST) * p->temperature;
    struct candidate *c = s->candidates;
    uint32_t n = 0;
    if (p->top_k && p->top_k <= HEAP_MAX)
        return largest(logits, s->vocab_size, p->top_k, cut, c);
    for (uint32_t i = 0; i < s->vocab_size; i++)
        if (logits[i] >= cut)
            c[n++] = (struct candidate){i, logits[i], 0};
    if (!p->top_k || p->top_k >= n)
        return n;
    select_count(c, n, p->top_k);
    return p->top_k;
}

/* Those whose surprise is nearest to what is to be expected. */
static uint32_t select_typical(struct candidate *c, uint32_t n, double share)
{
    double total = weight_of(c, n), entropy = 0;
    for (uint32_t i = 0; i < n; i++)
        entropy -= (double)c[i].weight / total * (double)k_log(c[i].weight / (float)total);
    for (uint32_t i = 0; i < n; i++)
        c[i].key = -fabsf(-k_log(c[i].weight / (float)total) - (float)entropy);
    return select_weight(c, n, share * total);
}

static uint32_t draw(struct sampler *s, const struct sampling *p, const float *logits, float top, uint32_t position)
{
    struct candidate *c = s->candidates;
    uint32_t n = gather(s, p, logits, top);
    for (uint32_t i = 0; i < n; i++)
        c[i].weight = k_exp((c[i].key - top) / p->temperature);
    if (p->top_p < 1)
        n = select_weight(c, n, weight_of(c, n) * (double)p->top_p);
    if (p->min_p > 0) {
        uint32_t kept = 0;
        for (uint32_t i = 0; i < n; i++) /* the largest weighs 1 */
            if (c[i].weight >= p->min_p)
                c[kept++] = c[i];
        n = kept;
    }
    if (p->typical_p > 0 && p->typical_p < 1)
        n = select_typical(c, n, (double)p->typical_p);
    double u = random_unit(random_at(p->seed, p->choice, position)) * weight_of(c, n), sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        sum += (double)c[i].weight;
        if (u < sum)
            return c[i].id;
    }
    return c[n - 1].id;
}

/* ------------------------------------------------------------------ before */

static void forbid(struct sampler *s, const struct sampling *p, bool too_early, float *logits)
{
    for (uint32_t i = 0; too_early && i < p->n_stop_ids; i++)
        logits[p->stop_ids[i]] = -INFINITY;
    if (!p->n_allowed)
        return;
    float *kept = (float *)(void *)s->candidates; /* scratch of larger elements, not used yet */
    for (uint32_t i = 0; i < p->n_allowed; i++)
        kept[i] = logits[p->allowed[i]];
    for (uint32_t i = 0; i < s->vocab_size; i++)
        logits[i] = -INFINITY;
    for (uint32_t i = 0; i < p->n_allowed; i++)
        logits[p->allowed[i]] = kept[i];
}

static void tell_top(struct sampler *s, const float *logits, uint32_t k, float normalizer, struct sampled *out)
{
    out->n_top = k ? largest(logits, s->vocab_size, k, -INFINITY, s->candidates) : 0;
    sort_few(s->candidates, out->n_top);
    for (uint32_t i = 0; i < out->n_top; i++) {
        out->top_ids[i] = s->candidates[i].id;
        out->top_logprobs[i] = s->candidates[i].key - normalizer;
    }
}

static bool is_too_early(const struct sampling *p, uint32_t n_generated)
{
    return n_generated < p->min_tokens && p->n_stop_ids;
}

static bool changes_logits(const struct sampling *p, uint32_t n_generated)
{
    return penalizes(p) || p->n_bias || p->n_allowed || is_too_early(p, n_generated);
}

bool sampling_wants_logits(const struct sampling *p, uint32_t n_generated)
{
    return p->temperature > 0 || p->top_logprobs || changes_logits(p, n_generated);
}

void sampler_draw(struct sampler *s, const struct sampling *p, const uint32_t *tokens, uint32_t n_tokens,
                  uint32_t n_prompt, const struct k_best *best, float *logits, struct sampled *out)
{
    uint32_t n_generated = n_tokens - n_prompt;
    float normalizer = best->logsumexp;
    *out = (struct sampled){.id = best->id, .logprob = best->logit - normalizer};
    if (!sampling_wants_logits(p, n_generated))
        return;
    const float *original = logits;
    tell_top(s, logits, p->top_logprobs, normalizer, out);
    if (changes_logits(p, n_generated))
        original = memcpy(s->original, logits, s->vocab_size * sizeof(float));
    penalize(s, p, tokens, n_tokens, n_prompt, logits);
    for (uint32_t i = 0; i < p->n_bias; i++)
        logits[p->bias[i].id] += p->bias[i].bias;
    forbid(s, p, is_too_early(p, n_generated), logits);
    if (original != logits)
        out->id = k_argmax(logits, s->vocab_size);
    if (logits[out->id] == -INFINITY) /* all that is allowed would end it too early: it ends */
        out->id = p->n_allowed ? p->allowed[0] : out->id;
    else if (p->temperature > 0)
        out->id = draw(s, p, logits, logits[out->id], n_tokens);
    out->logprob = original[out->id] - normalizer;
}
