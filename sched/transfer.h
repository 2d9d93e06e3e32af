/*
 * What a hand-over takes after its prefill, and when the second token comes: predicted from the flows at both ends, and learned.
 *
 * While a prompt is computed its pages flow already, layer by layer. What is exposed is what still flows when the prefill ends:
 *
 *     exposed = a + max(b f last, b f tokens - hidden)
 *
 *     tokens   of which the decode worker has no KV yet; last: of them the part that is announced when the prefill ends
 *     hidden   milliseconds of the prefill, during which the others flow
 *     f        flows that share the busier of the two ports, this one among them
 *
 * a and b are learned by recursive least squares; the second token comes a step later, and half of the step that runs when the last
 * byte comes, and later still by what was measured beyond that.
 *
 * A value; observing gives the next one. Milliseconds and tokens throughout.
 */
#pragma once

#include "sched/cost.h"

struct transfer { /* of one request */
    double tokens, last, flows, hidden_ms;
};

struct transfer_model { /* of what comes to one worker */
    struct rls line;    /* a, and b for 1,000 tokens */
    double gap_extra_ms;
    struct cost_term exposed_error, gap_error;
};

struct transfer_model transfer_make(void);

double transfer_exposed_ms(const struct transfer_model *m, const struct transfer *t);
/* The share of the prefill's time during which its pages flow. */
double transfer_demand(const struct transfer_model *m, const struct transfer *t);
/* Between first and second token, where steps take step_ms and somebody decodes there with that likelihood. */
double transfer_gap_ms(const struct transfer_model *m, double exposed_ms, double step_ms, double likelihood);

struct transfer_model transfer_observe(struct transfer_model m, const struct transfer *t, double exposed_ms);
struct transfer_model transfer_observe_gap(struct transfer_model m, double predicted_ms, double gap_ms);
