#include "sched/cost.h"

#include <math.h>
#include <stdio.h>

/* Units where the profile says 0: milliseconds, per token, per its square; per token of context, per sequence. */
static const double LEAST_PREFILL[3] = {1e-2, 1e-6, 1e-11}, LEAST_DECODE[3] = {1e-2, 1e-8, 1e-4};
static const double CONFIDENCE = 0.05; /* of the profile, in samples: little; a worker's own steps are better */
static const double TERM_RATE = 0.05, LEAST_MS = 1e-3;
static const double TYPICAL_TOKENS = 1000, TYPICAL_BATCH = 8, SLOWER = 1.1;

enum td_status cost_profile_parse(const char *text, struct cost_profile *out, struct td_error *error_out)
{
    double *p = out->prefill, *d = out->decode;
    int end = 0;
    if (sscanf(text, "%lf,%lf,%lf:%lf,%lf,%lf%n", &p[0], &p[1], &p[2], &d[0], &d[1], &d[2], &end) != 6 || text[end])
        return td_fail(error_out, TD_ERR_INVALID, "'%s': expected A,B,C:A,B,C in microseconds", text);
    for (int i = 0; i < 3; i++) {
        if (!(p[i] >= 0 && d[i] >= 0 && isfinite(p[i]) && isfinite(d[i])))
            return td_fail(error_out, TD_ERR_INVALID, "'%s': none may be below 0", text);
        p[i] *= 1e-3;
        d[i] *= 1e-3;
    }
    return TD_OK;
}

static struct rls make(const double prior[3], const double least[3], double unit_out[3])
{
    double first[3];
    for (int i = 0; i < 3; i++) {
        unit_out[i] = fmax(prior[i], least[i]);
        first[i] = prior[i] / unit_out[i];
    }
    return rls_make(3, first, CONFIDENCE);
}

struct cost_model cost_make(const struct cost_profile *profile)
{
    struct cost_model m = {.prefill_error = {0}};
    m.prefill = make(profile->prefill, LEAST_PREFILL, m.prefill_unit);
    m.decode = make(profile->decode, LEAST_DECODE, m.decode_unit);
    return m;
}

struct cost_model cost_like(const struct cost_model *other)
{
    struct cost_model m = *other;
    m.prefill = rls_make(3, other->prefill.w, CONFIDENCE);
    m.decode = rls_make(3, other->decode.w, CONFIDENCE);
    m.prefill_error = m.decode_error = (struct cost_term){0};
    return m;
}

static struct rls half_way(const struct rls *m, const struct rls *other)
{
    double middle[3];
    for (int i = 0; i < 3; i++)
        middle[i] = (m->w[i] + other->w[i]) / 2;
    return rls_make(3, middle, CONFIDENCE);
}

struct cost_model cost_doubt(struct cost_model m, const struct cost_model *other)
{
    if (cost_prefill_ms(&m, TYPICAL_TOKENS, 0, 0) > SLOWER * cost_prefill_ms(other, TYPICAL_TOKENS, 0, 0))
        m.prefill = half_way(&m.prefill, &other->prefill);
    if (cost_decode_ms(&m, TYPICAL_BATCH, TYPICAL_BATCH * TYPICAL_TOKENS) >
        SLOWER * cost_decode_ms(other, TYPICAL_BATCH, TYPICAL_BATCH * TYPICAL_TOKENS))
        m.decode = half_way(&m.decode, &other->decode);
    return m;
}

static double predict_prefill(const struct cost_model *m, double chunks, double tokens, double square)
{
    const double *u = m->prefill_unit, x[] = {u[0] * chunks, u[1] * tokens, u[2] * square};
    return tokens > 0 ? fmax(rls_predict(&m->prefill, x), LEAST_MS) : 0;
}

double cost_prefill_ms(const struct cost_model *m, double n, double cached, uint32_t chunk)
{
    return predict_prefill(m, chunk ? ceil(n / chunk) : 1, n, n * (n + 2 * cached));
}

double cost_decode_ms(const struct cost_model *m, double batch, double context)
{
    const double *u = m->decode_unit, x[] = {u[0], u[1] * context, u[2] * batch};
    return batch > 0 ? fmax(rls_predict(&m->decode, x), LEAST_MS) : 0;
}

/* The positive root of d n^2 + (b + 2 d cached) n = left - a, which is what fits but for rounding. */
uint32_t cost_chunk_within(const struct cost_model *m, double limit_ms, double batch, double context, double cached,
                           uint32_t max)
{
    double left = limit_ms - cost_decode_ms(m, batch, context);
    const double *u = m->prefill_unit, *w = m->prefill.w;
    if (cost_prefill_ms(m, max, cached, 0) <= left)
        return max;
    double d = u[2] * w[2], b = u[1] * w[1] + 2 * d * cached, room = left - u[0] * w[0];
    double below = b + sqrt(fmax(b * b + 4 * d * room, 0));
    uint32_t n = room <= 0 ? 0 : below > 0 ? (uint32_t)fmin(2 * room / below + 1, max) : max;
    while (n && cost_prefill_ms(m, n, cached, 0) > left)
        n--;
    return n;
}

void cost_term_observe(struct cost_term *t, double predicted, double actual)
{
    if (!(actual > 0))
        return;
    double error = fmin(fabs(predicted - actual) / actual, 10);
    t->error = t->n ? t->error + TERM_RATE * (error - t->error) : error;
    t->n++;
}

/* Relative to the prediction: to what was measured would favour the steps that happened to be short. */
static void learn(struct rls *m, struct cost_term *term, double x[3], double predicted, double ms)
{
    if (!(ms > LEAST_MS))
        return;
    cost_term_observe(term, predicted, ms);
    for (int i = 0; i < 3; i++)
        x[i] /= predicted;
    *m = rls_observe(*m, x, ms / predicted);
}

struct cost_model cost_observe(struct cost_model m, const struct cost_step *s)
{
    double prefill = predict_prefill(&m, 1, s->prefill_tokens, s->prefill_square);
    double decode = cost_decode_ms(&m, s->batch, s->context);
    const double *p = m.prefill_unit, *d = m.decode_unit;
    if (s->prefill_tokens)
        learn(&m.prefill, &m.prefill_error, (double[]){p[0], p[1] * s->prefill_tokens, p[2] * s->prefill_square},
              prefill, s->ms - decode);
    else if (s->batch)
        learn(&m.decode, &m.decode_error, (double[]){d[0], d[1] * s->context, d[2] * s->batch}, decode, s->ms);
    return m;
}
