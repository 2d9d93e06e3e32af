/*
 * Compares two sides, each of one or several runs: what changed between them, and whether that is noise.
 *
 * The interval of a change comes from a bootstrap of 1,000 resamplings. The runs of a side are drawn with
 * replacement, and within a run stretches of a tenth of its requests in the order of arrival, because
 * requests that were in the system together are not independent (Kuensch 1989). If run i of both sides got
 * the same requests, both sides are resampled alike, so that differences between requests drop out. A change
 * is noise if its 95 % interval includes zero. With one run on each side, differences from run to run can't
 * be seen: the interval is then too narrow, and n_runs says so.
 *
 * Threads: any.
 */
#pragma once

#include "replay/report.h"

enum compare_verdict { COMPARE_NOISE, COMPARE_BETTER, COMPARE_WORSE };

struct compare_row {
    const char *name;
    bool is_share;       /* change is the difference; else change is b / a - 1 */
    double a, b, change; /* NAN: a side does not have the figure */
    double low, high;    /* limits of the 95 % interval of the change */
    double p;            /* twice the share of resamplings whose change has the other sign, at least 0.001 */
    enum compare_verdict verdict;
};

enum { COMPARE_ROWS = 16 };
struct compare_result {
    struct compare_row rows[COMPARE_ROWS];
    uint32_t n_runs; /* runs of the side with fewer */
    bool paired;     /* both sides got the same requests */
};

/* n_a, n_b >= 1; each run has at least one request. */
void compare_runs(const struct report_run *const *a, uint32_t n_a, const struct report_run *const *b, uint32_t n_b,
                  uint64_t seed, struct compare_result *out);
