#include "sched/order.h"

#include <math.h>

static const double PRIORITY_MS = 5000;
/* Assumed limit of a request without one: this many times its work, but at most MAX_PATIENCE_MS. */
static const double PATIENCE = 20, MAX_PATIENCE_MS = 60000;
/* a workflow is due this many times its remaining work after its deadline. */
static const double WORKFLOW_WORK = 2;

/* Time that its workflow still takes if all steps are like this one. */
static double workflow_ms_left(const struct sched_request *q)
{
    return (q->work_ms + q->promised_tpot_ms * q->expected_tokens) * (1 + q->workflow_steps_left);
}

bool order_is_lost(const struct sched_request *q, uint64_t now)
{
    return q->workflow_deadline_ns != UINT64_MAX &&
           clock_ms_between(now, q->workflow_deadline_ns) < workflow_ms_left(q);
}

/* Resumed requests (the client waits in a stream) go first in ORDER_TANDEM, but after overdue ones. */
double order_key(enum scheduler_order order, const struct sched_request *q, uint64_t now)
{
    double arrived = (double)q->arrived_ns * 1e-6;
    double deadline = q->deadline_ns == UINT64_MAX ? INFINITY : clock_ms_between(q->arrived_ns, q->deadline_ns);
    double workflow =
        q->workflow_deadline_ns == UINT64_MAX ? INFINITY : clock_ms_between(q->arrived_ns, q->workflow_deadline_ns);
    if (order == ORDER_FCFS)
        return arrived;
    if (order == ORDER_EDF)
        return arrived + fmin(fmin(deadline, workflow), q->ttft_ms > 0 ? q->ttft_ms : MAX_PATIENCE_MS);
    if (order == ORDER_SHORTEST)
        return q->n_tokens;
    if (q->resumed)
        return -ORDER_LATE_MS + arrived;
    double due = fmin(deadline - q->work_ms - q->promised_tpot_ms * q->expected_tokens,
                      workflow + WORKFLOW_WORK * workflow_ms_left(q));
    if (q->ttft_ms > 0)
        due = fmin(due, q->ttft_ms);
    else if (due == INFINITY)
        due = fmin(PATIENCE * q->work_ms, MAX_PATIENCE_MS);
    return arrived + due - PRIORITY_MS * q->priority + (order_is_lost(q, now) ? ORDER_LATE_MS : 0);
}
