/* The order of queued requests inside a tenant; sched/scheduler.h gives the reasons. */
#pragma once

#include "sched/scheduler.h"

#define ORDER_LATE_MS    1e12 /* added to the key of requests that can't be on time: after all others */
/* Plus arrival: the key of requests that waited too long, before all others. */
#define ORDER_OVERDUE_MS (-2e12)

/* The key, in ms; the least goes first. Needs q's work_ms, promised_tpot_ms and expected_tokens. */
double order_key(enum scheduler_order order, const struct sched_request *q, uint64_t now_ns);
/* Whether q's workflow can't keep its deadline any more. */
bool order_is_lost(const struct sched_request *q, uint64_t now_ns);
