/*
 * Recursive least squares with forgetting (Haykin, Adaptive Filter Theory, chapter on RLS): a linear model
 * that follows measurements. A model is a value: observing returns the next one.
 *
 *     y = w . x,   the latest 1 / (1 - RLS_FORGET) samples count most
 *
 * Coefficients start at a prior with a confidence: the number of samples of size 1 that the prior is worth.
 * Errors are cut at a few times their usual size (Huber's psi): a single stall teaches little; a lasting
 * change raises the usual size, and is followed.
 */
#pragma once

#include <stdint.h>

enum { RLS_MAX = 4 };
#define RLS_FORGET 0.98

struct rls {
    uint32_t n; /* coefficients, <= RLS_MAX */
    uint64_t n_samples;
    double w[RLS_MAX], p[RLS_MAX][RLS_MAX];
    double trace_max; /* most that the trace of p may be: that of the start */
    double spread;    /* usual size of an error */
};

struct rls rls_make(uint32_t n, const double *prior, double confidence);
struct rls rls_observe(struct rls m, const double *x, double y);
double rls_predict(const struct rls *m, const double *x);
