#include "sched/rls.h"

#include <math.h>

/* Forgetting lets p grow where nothing is observed; beyond this, one odd sample would overthrow everything. */
static const double P_MAX = 1e6;

static const double FAR = 4; /* spreads, from which on an error is cut */
static const double SPREAD_RATE = 0.1;

struct rls rls_make(uint32_t n, const double *prior, double confidence)
{
    struct rls m = {.n = n};
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

/* The error as far as it counts; the spread follows what comes. */
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
        for (uint32_t j = 0; j < m.n; j++) {
            double p = (m.p[i][j] - px[i] * px[j] / scale) / RLS_FORGET;
            m.p[i][j] = fmax(-P_MAX, fmin(p, P_MAX));
        }
    }
    m.n_samples++;
    return m;
}
