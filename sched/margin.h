/*
 * How far predictions must stay below a limit, so that few requests miss a limit that they were promised to meet.
 *
 * The margin is a quantile of measured errors, followed online: it rises by a step for each error above it and falls by a small step for
 * each error below, in the ratio at which MARGIN_MISSES of all errors are above (Robbins and Monro, 1951; adaptive conformal inference
 * uses it so, Gibbs and Candes, 2021). Steps are as large as errors usually are, so the margin needs no unit. Callers leave out
 * predictions that were far from their limit: their errors do no harm.
 *
 * A value; observing gives the next one.
 */
#pragma once

#include <stdbool.h>

#define MARGIN_MISSES 0.015 /* share of errors that may be above the margin */

struct margin {
    double value, most; /* 0 .. most */
    double spread;      /* what errors are usually off by */
};

struct margin margin_make(double first, double most);
struct margin margin_observe(struct margin m, double error); /* measured / predicted - 1 */
struct margin margin_note(struct margin m, bool missed);     /* where the error has no size that matters */
