#include "sched/cost.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

/*
 * Units where the profile has 0. Prefill: ms for a chunk, a token, its square. Decode: a step, a token, a
 * sequence.
 */
static const double LEAST_PREFILL[3] = {1e-2, 1e-6, 1e-11}, LEAST_DECODE[3] = {1e-2, 1e-8, 1e-4};
/* Samples that the profile is worth: few, since own steps are better. */
static const double CONFIDENCE = 0.05;
static const double TERM_RATE = 0.05, LEAST_MS = 1e-3;
static const double RECENT_RATE = 0.3, USUAL_RATE = 0.002; /* weight of one step in recent_*, usual_* */
enum { MOST_COMPARED = 512 };
/*
 * Steps in a row that make a jump: COST_SHORT_RUN if they are shorter than predicted or the model has learned
 * from none; else COST_RUN.
 */
enum { COST_SHORT_RUN = 2 };
/* Weight of one step in cost_run.share; below this share, steps that are off by COST_JUMP teach nothing. */
static const double ODD_RATE = 0.1, ODD_SHARE = 0.2;

enum td_status cost_profile_parse(const char *text, struct cost_profile *out, struct td_error *error_out)
{
    double *p = out->prefill, *d = out->decode, more[3] = {0};
    int end = 0, rest = 0;
    bool is_read = sscanf(text, "%lf,%lf,%lf:%lf,%lf,%lf%n", &p[0], &p[1], &p[2], &d[0], &d[1], &d[2], &end) == 6;
    if (is_read && text[end])
        is_read = sscanf(text + end, ":%lf,%lf,%lf%n", &more[0], &more[1], &more[2], &rest) == 3;
    if (!is_read || text[end + rest])
        return td_fail(error_out, TD_ERR_INVALID, "'%s': expected A,B,C:A,B,C or A,B,C:A,B,C:P,Q,U in microseconds",
                       text);
    if (!(more[0] >= 0 && isfinite(more[0]) && isfinite(more[1]) && more[2] >= 0 && more[2] <= 1))
        return td_fail(error_out, TD_ERR_INVALID, "'%s': P may not be below 0, and U lies in 0..1", text);
    out->chunk_square = more[0] * 1e-3;
    out->context_square = more[1] * 1e-3;
    out->unshared = more[2];
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
    struct cost_model m = {.prefill_run = {.share = 1}, .decode_run = {.share = 1}};
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
    m.prefill_run = m.decode_run = (struct cost_run){.share = 1};
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

double cost_shared_ms(const struct cost_model *m)
{
    return fmax(m->decode_unit[0] * m->decode.w[0], 0);
}

double cost_chunk_ms(const struct cost_model *m)
{
    return fmax(m->prefill_unit[0] * m->prefill.w[0], 0);
}

double cost_step_ms(const struct cost_model *m, double n, double square, double batch, double context)
{
    double prefill = predict_prefill(m, 1, n, square), decode = cost_decode_ms(m, batch, context);
    return prefill > 0 && decode > 0 ? fmax(prefill + decode - cost_shared_ms(m), fmax(prefill, decode))
                                     : prefill + decode;
}

double cost_profile_step_ms(const struct cost_profile *c, const struct cost_step *s)
{
    const double *p = c->prefill, *d = c->decode, n = s->prefill_tokens;
    const double top = c->context_square < 0 ? -d[1] / (2 * c->context_square) : INFINITY;
    /* With a negative square, time does not fall beyond its top. */
    const double context = fmin(s->context, top);
    double prefill = n > 0 ? p[0] + p[1] * n + p[2] * s->prefill_square + c->chunk_square * n * n : 0;
    double decode = s->batch ? d[0] + d[1] * context + d[2] * s->batch + c->context_square * context * context : 0;
    return prefill > 0 && decode > 0 ? fmax(prefill + decode - (1 - c->unshared) * d[0], fmax(prefill, decode))
                                     : prefill + decode;
}

/* The positive root of d n^2 + (b + 2 d cached) n = left, corrected for rounding by the loop at the end. */
uint32_t cost_chunk_more(const struct cost_model *m, double left, double cached, uint32_t max)
{
    const double *u = m->prefill_unit, *w = m->prefill.w;
    double d = u[2] * w[2], b = u[1] * w[1] + 2 * d * cached;
    if (left <= 0)
        return 0;
    if (b * max + d * max * max <= left)
        return max;
    double below = b + sqrt(fmax(b * b + 4 * d * left, 0));
    uint32_t n = below > 0 ? (uint32_t)fmin(2 * left / below + 1, max) : max;
    while (n && b * n + d * n * n > left)
        n--;
    return n;
}

uint32_t cost_chunk_within(const struct cost_model *m, double limit_ms, double batch, double context, double cached,
                           uint32_t max)
{
    double decode = cost_decode_ms(m, batch, context);
    double left = decode > limit_ms ? 0 : fmin(limit_ms, limit_ms - decode + (batch > 0 ? cost_shared_ms(m) : 0));
    return cost_chunk_more(m, left - cost_chunk_ms(m), cached, max);
}

void cost_term_observe(struct cost_term *t, double predicted, double actual)
{
    if (!(actual > 0))
        return;
    double error = fmin(fabs(predicted - actual) / actual, 10);
    t->error = t->n ? t->error + TERM_RATE * (error - t->error) : error;
    t->n++;
}

/*
 * Teaches one model by a step. x: the features in ms of the profile; changed. Errors are relative to the
 * prediction: relative to the measured time, steps that happened to be short would count too much.
 */
static void learn(struct rls *m, struct cost_term *term, double x[3], double predicted, double ms)
{
    if (!(ms > LEAST_MS))
        return;
    double profiled = x[0] + x[1] + x[2], sum = 0;
    cost_term_observe(term, predicted, ms);
    for (int i = 0; i < 3; i++)
        x[i] /= predicted;
    *m = rls_observe(*m, x, ms / predicted);
    for (int i = 0; i < 3; i++) /* >= 0: otherwise a busy worker could look faster than an idle one */
        sum += m->w[i] = fmax(m->w[i], 0);
    /* All are 0: take the profile's shape at the speed of this step. */
    for (int i = 0; i < 3 && !(sum > 0); i++)
        m->w[i] = ms / profiled;
}

/* The median of ratios that are all above or all below 1; of two ratios, the one nearer to 1. */
static double median(const double *ratios, uint32_t n)
{
    double sorted[COST_RUN];
    for (uint32_t i = 0; i < n; i++) {
        uint32_t at = i;
        for (; at && sorted[at - 1] > ratios[i]; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = ratios[i];
    }
    return sorted[ratios[0] > 1 ? (n - 1) / 2 : n / 2];
}

enum odd { AS_USUAL, ODD, JUMPED }; /* ODD: the step teaches nothing. JUMPED: all coefficients were scaled. */

/*
 * Classifies a step by ratio = measured / predicted. A model that has learned nothing (cost_make(),
 * cost_like()) knows its machine only by a guess: its first step may be long because the machine is slow, or
 * because the process was stopped. So two steps must be off in one direction, and the one nearer to the
 * prediction counts. If they are off in turns, the guess has the wrong shape, and the short ones teach.
 */
static enum odd look(struct rls *m, struct cost_run *run, double ratio, bool is_sure)
{
    bool is_off = ratio > COST_JUMP || ratio < 1 / COST_JUMP, is_rare = run->share < ODD_SHARE;
    bool is_new = !m->n_samples, turns = run->n && (ratio > 1) != (run->ratio[0] > 1);
    uint32_t enough = is_sure ? 1 : ratio < 1 || is_new ? COST_SHORT_RUN : COST_RUN;
    run->share += ODD_RATE * (is_off - run->share);
    if (!is_off || turns)
        run->n = 0;
    if (!is_off)
        return AS_USUAL;
    run->ratio[run->n++] = ratio;
    if (run->n < enough)
        return run->n == 1 && !is_rare && (!is_new || (turns && ratio < 1)) ? AS_USUAL : ODD;
    double factor = median(run->ratio, run->n); /* one factor: the ratios between coefficients stay */
    for (int i = 0; i < 3; i++)
        m->w[i] *= factor;
    run->n = 0;
    run->share = 1;
    return JUMPED;
}

/* Moves *value towards speed, on a logarithmic scale. */
static void follow(double *value, double speed, double rate)
{
    *value = *value > 0 ? *value * pow(speed / *value, rate) : speed;
}

/* Time by the profile. */
static double as_profiled(const double unit[3], const double x[3])
{
    return unit[0] * x[0] + unit[1] * x[1] + unit[2] * x[2];
}

/* In a step with both, only prefill learns: from the measured time less the predicted part of decoding. */
static struct cost_model observe(struct cost_model m, const struct cost_step *s, bool is_sure)
{
    const double prompts[] = {s->prefill_tokens > 0, s->prefill_tokens, s->prefill_square};
    const double batch[] = {s->batch > 0, s->context, s->batch};
    const double *p = m.prefill_unit, *d = m.decode_unit;
    double decode = cost_decode_ms(&m, s->batch, s->context);
    double both = cost_step_ms(&m, s->prefill_tokens, s->prefill_square, s->batch, s->context);
    if (!(s->ms > LEAST_MS) || !(both > 0))
        return m;
    double speed = s->ms / (as_profiled(p, prompts) + as_profiled(d, batch)), ratio = s->ms / both;
    enum odd prefill_odd = s->prefill_tokens ? look(&m.prefill, &m.prefill_run, ratio, is_sure) : AS_USUAL;
    enum odd decode_odd = s->batch ? look(&m.decode, &m.decode_run, ratio, is_sure) : AS_USUAL;
    if (s->prefill_tokens) {
        follow(&m.recent_prefill, speed, is_sure ? 1 : RECENT_RATE);
        if (!prefill_odd)
            follow(&m.usual_prefill, speed, USUAL_RATE);
    }
    if (s->batch) {
        follow(&m.recent_decode, speed, is_sure ? 1 : RECENT_RATE);
        if (!decode_odd)
            follow(&m.usual_decode, speed, USUAL_RATE);
    }
    if (prefill_odd || decode_odd)
        return m;
    if (s->prefill_tokens) {
        double prefill = predict_prefill(&m, 1, s->prefill_tokens, s->prefill_square);
        learn(&m.prefill, &m.prefill_error, (double[]){p[0], p[1] * prompts[1], p[2] * prompts[2]}, prefill,
              s->ms - (both - prefill));
    } else {
        learn(&m.decode, &m.decode_error, (double[]){d[0], d[1] * batch[1], d[2] * batch[2]}, decode, s->ms);
    }
    return m;
}

struct cost_model cost_observe(struct cost_model m, const struct cost_step *step)
{
    return observe(m, step, false);
}

struct cost_model cost_believe(struct cost_model m, const struct cost_step *step)
{
    return observe(m, step, true);
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double *weights(struct cost_model *m, bool is_decode)
{
    return is_decode ? m->decode.w : m->prefill.w;
}

/* Predicted time of a typical prompt or batch, by which workers are compared. */
static double reference_ms(const struct cost_model *m, bool is_decode)
{
    return is_decode ? cost_decode_ms(m, 8, 16000) : cost_prefill_ms(m, 2000, 0, 0);
}

static void fade(struct cost_model *const *models, const bool *is_idle, uint32_t n, double share, bool is_decode)
{
    double ms[MOST_COMPARED], sorted[MOST_COMPARED], mean[3] = {0};
    uint32_t n_near = 0;
    for (uint32_t k = 0; k < n; k++)
        sorted[k] = ms[k] = reference_ms(models[k], is_decode);
    qsort(sorted, n, sizeof(*sorted), compare);
    double median = sorted[(n - 1) / 2]; /* of two workers, the faster one */
    for (uint32_t k = 0; k < n; k++) {
        bool is_near = ms[k] < median * COST_MUCH_SLOWER && median < ms[k] * COST_MUCH_SLOWER;
        n_near += is_near;
        for (int i = 0; i < 3 && is_near; i++)
            mean[i] += weights(models[k], is_decode)[i];
    }
    for (uint32_t k = 0; k < n; k++)
        for (int i = 0; i < 3 && is_idle[k] && ms[k] > median && ms[k] < median * COST_MUCH_SLOWER; i++) {
            double *w = &weights(models[k], is_decode)[i];
            *w += share * (mean[i] / n_near - *w);
        }
}

void cost_fade(struct cost_model *const *models, const bool *is_idle, uint32_t n, double share)
{
    for (int is_decode = 0; is_decode < 2 && n > 1 && n <= MOST_COMPARED; is_decode++)
        fade(models, is_idle, n, share, is_decode);
}

struct cost_model cost_at_speed(const struct cost_model *m, double prefill, double decode)
{
    struct cost_model at = *m;
    for (int i = 0; i < 3; i++) {
        at.prefill.w[i] = prefill;
        at.decode.w[i] = decode;
    }
    return at;
}
