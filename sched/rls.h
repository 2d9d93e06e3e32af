/*
 * Recursive least squares with forgetting (Haykin, Adaptive Filter Theory, chapter on RLS): a linear model that follows what is
 * measured. Pure: a model is a value, observing gives the next one.
 *
 *     y = w . x,   the latest 1 / (1 - RLS_FORGET) samples count most
 *
 * Coefficients start at a prior, with a confidence: how many samples of size 1 it is worth. A sample that is off by more than a few
 * times what samples are usually off counts as that far off and no more (Huber's psi): one stall teaches little, a change that lasts
 * raises what is usual, and is followed.
 */
#pragma once

#include <stdint.h>

enum { RLS_MAX = 4 };
#define RLS_FORGET 0.98

struct rls {
    uint32_t n; /* coefficients, <= RLS_MAX */
    uint64_t n_samples;
    double w[RLS_MAX], p[RLS_MAX][RLS_MAX];
    double trace_max; /* of p */
    double spread;    /* what samples are usually off by */
};

struct rls rls_make(uint32_t n, const double *prior, double confidence);
struct rls rls_observe(struct rls m, const double *x, double y);
double rls_predict(const struct rls *m, const double *x);
