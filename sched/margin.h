/*
 * How far predictions must stay below a limit, so that few who were promised to be within it are not: a quantile of the errors that
 * were measured, followed online: a step up for each error above it, a small step down for each below, in the ratio at which MARGIN_MISSES of all errors are
 * above (Robbins and Monro, 1951; as adaptive conformal inference uses it, Gibbs and Candes, 2021.) Steps are as large as errors usually
 * are, so nothing has a unit. Only errors of predictions that came near their limit should be told: of others nothing hangs on them.
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
struct margin margin_note(struct margin m, bool missed);     /* where only this is known, or matters */
