/* When a queued request is due: the order inside its tenant (sched/scheduler.h says why). */
#pragma once

#include "sched/scheduler.h"

#define ORDER_LATE_MS    1e12    /* the order of what can't be on time any more: after all that can */
#define ORDER_OVERDUE_MS (-2e12) /* of what waited too long: before all else */

double order_key(enum order order, const struct sched_request *q, uint64_t now_ns); /* the least goes first */
/* Its workflow can't keep its deadline any more. */
bool order_is_lost(const struct sched_request *q, uint64_t now_ns);
