/*
 * Whether a worker whose heartbeats go on still gets on: a device that hangs, a deadlock, a step that never ends. Pure; the
 * worker says what to expect, the router judges.
 *
 * The worker tells with each heartbeat how many steps have ended, which of the router's messages its engine thread has taken, and
 * how long the running step should take. A worker that has something to do and shows neither a step nor a message for
 * PROGRESS_PATIENCE_MS and PROGRESS_TIMES times that prediction has stopped. The router counts the time by its own patient clock
 * (base/absence.h).
 *
 * The prediction is generous, because a slow worker that is taken for a stopped one takes its requests with it:
 * - Before PROGRESS_MEASURED steps of a kind were measured the model is a guess. It may be PROGRESS_GUESS times off, and a first step
 *   may load kernels: it gets PROGRESS_FIRST_MS at least, a minute in all.
 * - Afterwards the model counts as much longer as the worst of the latest steps took (an odd step teaches the model nothing,
 *   sched/cost.h).
 *
 * Rejected: a fixed limit (a prompt of 100,000 tokens in one chunk on a small machine takes longer than any useful limit); judging by
 * tokens that come (a worker that computes a long prompt sends none).
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "sched/cost.h"

#define PROGRESS_PATIENCE_MS 3000.0
#define PROGRESS_TIMES       5.0
#define PROGRESS_GUESS       100.0
#define PROGRESS_FIRST_MS    12000.0
enum { PROGRESS_MEASURED = 5 };

struct progress_past { /* the worker's; all zero: nothing was measured */
    uint32_t n_prefill, n_decode;
    double late; /* measured / predicted of the worst of the latest steps; fades */
};

/* What to expect of a step (its ms are not read). */
double progress_expect_ms(const struct progress_past *p, const struct cost_model *m, const struct cost_step *step);
/* m: as it was before the step. */
void progress_measured(struct progress_past *p, const struct cost_model *m, const struct cost_step *step);

struct progress_report { /* of a heartbeat */
    uint64_t n_steps;
    uint32_t n_taken, n_said; /* messages: taken by the worker, sent to it */
    bool busy;                /* there is something to compute */
    double expected_ms;       /* of the running step; 0: none runs */
    double running_ms;        /* for how long it has run */
};

struct progress {                           /* the router's; all zero: nothing was reported */
    uint64_t n_steps, moved_ns, untaken_ns; /* untaken: since when `untaken` was not taken; 0: nothing waits */
    uint32_t n_taken, untaken;
};

/* False: the worker has stopped. The next report that shows anything moving makes it true again. */
bool progress_judge(struct progress *p, const struct progress_report *r, uint64_t now_ns);
