/*
 * How far predictions must stay below a limit so that few requests miss a limit that they were promised to
 * meet.
 *
 * The margin is a quantile of measured errors, followed online: it rises by a step for each error above it
 * and falls by a small step for each error below it, in the ratio at which MARGIN_MISSES of all errors are
 * above (Robbins and Monro, 1951; used this way by adaptive conformal inference, Gibbs and Candes, 2021). The
 * step is proportional to the usual size of errors. Callers leave out predictions that were far from their
 * limit, since their errors do no harm.
 *
 * A value: observing returns the next one.
 */
#pragma once

#include <stdbool.h>

#define MARGIN_MISSES 0.015 /* share of errors that may be above the margin */

struct margin {
    double value, most; /* the margin, a share of the prediction; 0 .. most */
    double spread;      /* mean size of errors */
};

struct margin margin_make(double first, double most);
struct margin margin_observe(struct margin m, double error); /* measured / predicted - 1 */
struct margin margin_note(struct margin m, bool missed);     /* for errors whose size does not matter */
