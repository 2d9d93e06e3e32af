#include "sched/transfer.h"

#include <math.h>

/* a before the first measurement: the decode worker's message that all came. */
static const double FIRST_MS = 2;
static const double CONFIDENCE = 0.01;  /* of that first guess: hardly any */
static const double LEAST_MS = 1;       /* least scale of an error: shorter transfers do not matter */
static const double STEP = 1e-3;        /* least difference of b over which a slope is taken */
static const double GAP_RATE = 0.05;    /* gap_extra_ms is a mean of about the latest 20 gaps */
static const double MOST_EXTRA_MS = 50; /* most that one gap counts, so that a stall teaches little */

struct transfer_model transfer_make(void)
{
    return (struct transfer_model){.line = rls_make(2, (double[]){FIRST_MS, 0}, CONFIDENCE)};
}

/* The exposed transfer without a, at b milliseconds for 1,000 tokens. */
static double flowing_ms(const struct transfer *t, double b)
{
    double each = b * t->flows * 1e-3;
    return fmax(each * t->last, each * t->tokens - t->hidden_ms);
}

/* The inverse of flowing_ms(), which is the greater of two rising lines: the b that gives this value. */
static double speed_of(const struct transfer *t, double flowing)
{
    double by_last = flowing / fmax(t->flows * t->last * 1e-3, 1e-9);
    return fmin(by_last, (flowing + t->hidden_ms) / fmax(t->flows * t->tokens * 1e-3, 1e-9));
}

double transfer_exposed_ms(const struct transfer_model *m, const struct transfer *t)
{
    return m->line.w[0] + flowing_ms(t, m->line.w[1]);
}

double transfer_demand(const struct transfer_model *m, const struct transfer *t)
{
    double alone = m->line.w[1] * t->tokens * 1e-3;
    return alone > 0 ? fmin(alone / fmax(t->hidden_ms, alone), 1) : 0;
}

double transfer_gap_ms(const struct transfer_model *m, double exposed_ms, double step_ms, double likelihood)
{
    return fmax(exposed_ms + (1 + likelihood / 2) * step_ms + m->gap_extra_ms, step_ms);
}

/*
 * Between the present b and the b of this sample flowing_ms() is treated as one line: with the slope at the
 * present b alone a wrong b might never be corrected. Errors are divided by the longer of predicted and
 * measured time, so short transfers count as much as long ones and stalls count little.
 */
struct transfer_model transfer_observe(struct transfer_model m, const struct transfer *t, double exposed_ms)
{
    double predicted = transfer_exposed_ms(&m, t), b = m.line.w[1];
    double scale = fmax(fmax(predicted, exposed_ms), LEAST_MS);
    cost_term_observe(&m.exposed_error, predicted, exposed_ms);
    double there = speed_of(t, fmax(exposed_ms - m.line.w[0], 0));
    double step = fabs(there - b) > STEP ? there - b : STEP;
    double slope = (flowing_ms(t, b + step) - flowing_ms(t, b)) / step, x[] = {1 / scale, slope / scale};
    m.line = rls_observe(m.line, x, rls_predict(&m.line, x) + (exposed_ms - predicted) / scale);
    m.line.w[0] = fmax(m.line.w[0], 0);
    m.line.w[1] = fmax(m.line.w[1], 0);
    return m;
}

struct transfer_model transfer_observe_gap(struct transfer_model m, double predicted_ms, double gap_ms)
{
    double extra = gap_ms - (predicted_ms - m.gap_extra_ms);
    cost_term_observe(&m.gap_error, predicted_ms, gap_ms);
    m.gap_extra_ms += GAP_RATE * (fmax(fmin(extra, MOST_EXTRA_MS), -MOST_EXTRA_MS) - m.gap_extra_ms);
    return m;
}
