/*
 * Predicts how long a handover takes after its prefill, and when the second token comes.
 *
 * Pages flow while the prompt is computed, layer by layer. The exposed transfer is what still flows when the
 * prefill ends:
 *
 *     exposed = a + max(b f last, b f tokens - hidden)
 *
 *     tokens   tokens whose KV the decode worker does not have
 *     last     the part of these tokens that is announced only when the prefill ends
 *     hidden   duration of the prefill in ms: the other tokens flow meanwhile
 *     f        number of flows that share the busier of the two ports, this one included
 *     a, b     learned by recursive least squares
 *
 * The second token comes one step after the last byte, plus half of the step that runs when that byte
 * arrives, plus a learned difference.
 *
 * A model is a value: observing returns the next one. Units: milliseconds and tokens.
 */
#pragma once

#include "sched/cost.h"

struct transfer { /* the handover of one request; letters as above */
    double tokens, last, flows, hidden_ms;
};

struct transfer_model {  /* handovers to one worker */
    struct rls line;     /* a, and b for 1,000 tokens */
    double gap_extra_ms; /* mean of measured first gaps beyond the prediction */
    struct cost_term exposed_error, gap_error;
};

struct transfer_model transfer_make(void);

double transfer_exposed_ms(const struct transfer_model *m, const struct transfer *t);
/* The share (0..1) of the prefill's time in which its pages flow. */
double transfer_demand(const struct transfer_model *m, const struct transfer *t);
/*
 * The first gap on a worker whose steps take step_ms. likelihood (0..1): that another sequence decodes there.
 */
double transfer_gap_ms(const struct transfer_model *m, double exposed_ms, double step_ms, double likelihood);

struct transfer_model transfer_observe(struct transfer_model m, const struct transfer *t, double exposed_ms);
struct transfer_model transfer_observe_gap(struct transfer_model m, double predicted_ms, double gap_ms);
