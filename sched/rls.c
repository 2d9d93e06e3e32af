#include "sched/rls.h"

#include <math.h>

static const double FAR = 4; /* errors are cut at this many spreads */
static const double SPREAD_RATE = 0.1;

struct rls rls_make(uint32_t n, const double *prior, double confidence)
{
    struct rls m = {.n = n, .trace_max = n / confidence};
    for (uint32_t i = 0; i < n; i++) {
        m.w[i] = prior[i];
        m.p[i][i] = 1 / confidence;
    }
    return m;
}

double rls_predict(const struct rls *m, const double *x)
{
    double y = 0;
    for (uint32_t i = 0; i < m->n; i++)
        y += m->w[i] * x[i];
    return y;
}

/* Cuts the error, and updates the spread. */
static double cut(struct rls *m, double error)
{
    double size = fabs(error), most = FAR * m->spread;
    if (!m->n_samples) {
        m->spread = size;
        return error;
    }
    m->spread += SPREAD_RATE * (fmin(size, 2 * most + 1e-9) - m->spread);
    return size > most && most > 0 ? copysign(most, error) : error;
}

/*
 * Forgetting makes p grow without bound in directions that no sample covers (samples that are all alike can't
 * tell coefficients apart), until noise dominates the coefficients. So the confidence never falls below that
 * of the start. p is scaled as a whole, so it stays positive definite.
 */
static void forget(struct rls *m)
{
    double trace = 0;
    for (uint32_t i = 0; i < m->n; i++)
        trace += m->p[i][i];
    double factor = fmin(1 / RLS_FORGET, m->trace_max / trace);
    for (uint32_t i = 0; i < m->n; i++)
        for (uint32_t j = 0; j < m->n; j++)
            m->p[i][j] *= factor;
}

struct rls rls_observe(struct rls m, const double *x, double y)
{
    double px[RLS_MAX], scale = RLS_FORGET, error = cut(&m, y - rls_predict(&m, x));
    for (uint32_t i = 0; i < m.n; i++) {
        px[i] = 0;
        for (uint32_t j = 0; j < m.n; j++)
            px[i] += m.p[i][j] * x[j];
        scale += x[i] * px[i];
    }
    for (uint32_t i = 0; i < m.n; i++) {
        m.w[i] += px[i] / scale * error;
        for (uint32_t j = 0; j < m.n; j++)
            m.p[i][j] -= px[i] * px[j] / scale;
    }
    forget(&m);
    m.n_samples++;
    return m;
}
