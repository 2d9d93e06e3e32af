/*
 * Two sides, of one or several runs each: what changed between them, and whether that is noise.
 *
 * The interval of a change is that of 1,000 resamplings (a bootstrap): runs of a side are drawn again with
 * replacement, and within each stretches of a tenth of its requests in the order of arrival, because requests
 * that were in the system together are not independent of each other (Kuensch 1989). Where run i of both
 * sides got the same requests, both are resampled alike, so that what the requests themselves differ in drops
 * out. A change is noise when its 95 % interval holds none. With one run a side, what differs from run to run
 * can't be seen: the interval is then too narrow, and n_runs says so.
 *
 * Threads: any.
 */
#pragma once

#include "replay/report.h"

enum compare_verdict { COMPARE_NOISE, COMPARE_BETTER, COMPARE_WORSE };

struct compare_row {
    const char *name;
    bool is_share;       /* change is a difference; else b / a - 1 */
    double a, b, change; /* NAN: a side has no figure */
    double low, high;    /* 95 % of the resamplings' changes */
    double p;            /* twice the share of those on the other side of none, at least 0.001 */
    enum compare_verdict verdict;
};

enum { COMPARE_ROWS = 16 };
struct compare_result {
    struct compare_row rows[COMPARE_ROWS];
    uint32_t n_runs; /* of the side with fewer */
    bool paired;     /* both sides got the same requests */
};

/* n_a, n_b >= 1; each run has at least one request. */
void compare_runs(const struct report_run *const *a, uint32_t n_a, const struct report_run *const *b, uint32_t n_b,
                  uint64_t seed, struct compare_result *out);
