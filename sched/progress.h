/*
 * Finds stalled workers: heartbeats go on, but a device hangs, threads are deadlocked, or a step never ends.
 * Pure functions: the worker says what to expect, the router judges.
 *
 * With each heartbeat the worker reports how many steps have ended, how many of the router's messages its
 * engine thread has taken, and how long the running step should take. A worker is stalled if it has something
 * to do and ends no step and takes no message for PROGRESS_PATIENCE_MS plus PROGRESS_TIMES times that
 * prediction, or if it steps and takes none of the messages that wait. The router measures this by
 * router_patience() (base/absence.h).
 *
 * The prediction is generous, because a slow worker that is taken for stalled loses its requests:
 * - Before PROGRESS_MEASURED steps of a kind were measured, the model is a guess. It counts PROGRESS_GUESS
 *   times, and at least PROGRESS_FIRST_MS, since a first step may load kernels: a minute in all.
 * - Afterwards it is multiplied by the worst recent ratio of measured to predicted time, because odd steps
 *   teach the model nothing (sched/cost.h).
 *
 * Rejected: a fixed limit (a prompt of 100,000 tokens in one chunk on a small machine takes longer than any
 * useful limit); judging by tokens (a worker that computes a long prompt sends none).
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

struct progress_past {            /* kept by the worker; all zero: nothing was measured */
    uint32_t n_prefill, n_decode; /* measured steps with prompts, with decoding sequences */
    double late;                  /* worst measured / predicted of the latest steps; fades */
};

/* How long a step may take, at most, if all is well; step->ms is not read. */
double progress_expect_ms(const struct progress_past *p, const struct cost_model *m, const struct cost_step *step);
/* A step has ended. m: the model before it learned from this step. */
void progress_measured(struct progress_past *p, const struct cost_model *m, const struct cost_step *step);

struct progress_report {      /* from a heartbeat */
    uint64_t n_steps;         /* steps that have ended */
    uint32_t n_taken, n_sent; /* number of the last message taken by the engine, of the last one sent */
    bool busy;                /* there is something to compute */
    double expected_ms;       /* expected duration of the running step; 0: none runs */
    double running_ms;        /* how long it has run */
};

/*
 * How long the other side has acknowledged none of the messages that it owes. Who acknowledges some, however
 * slowly, lives: hundreds of messages at once take seconds where many processes share a core. That a single
 * message is late is the leg's concern (router/replan.c).
 */
struct progress_acks { /* all zero: nothing was sent */
    uint64_t since_ns; /* the latest acknowledgement, or when a first message was owed; 0: none is owed */
    uint32_t n_acked;
};
/* n_acked, n_sent: numbers of the last one acknowledged, handed to gRPC. now_ns: any clock, not 0. */
double progress_unacked_ms(struct progress_acks *a, uint32_t n_acked, uint32_t n_sent, uint64_t now_ns);

struct progress {               /* kept by the router; all zero: nothing was reported */
    uint64_t n_steps, moved_ns; /* moved_ns: latest progress */
    struct progress_acks taken;
};

/* False: the worker is stalled. The next report with progress makes it true again. */
bool progress_judge(struct progress *p, const struct progress_report *r, uint64_t now_ns);
