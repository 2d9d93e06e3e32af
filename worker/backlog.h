/*
 * What a worker tells each router about the others: prompts and sequences of the other routers that it has,
 * and the work that those routers have queued. A router adds that to its own books (sched_report in
 * sched/scheduler.h). Nothing is sent while only one router is attached.
 *
 * A report is sent when something changed, at most every BACKLOG_LEAST_MS, and at least every BACKLOG_MOST_MS
 * while there are legs. On each stream it follows the tokens and ends of the same step, so what it says about
 * a router's own prompts agrees with what that router has heard.
 *
 * (Rejected: putting it into heartbeats. They come every 250 ms, from a thread that knows no sequences; at
 * four times the load two routers admitted twice what the workers could do in that time.)
 *
 * Threads: engine. Links are borrowed from backlog_attach() to backlog_leave().
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "worker/link.h"

enum { BACKLOG_LEAST_MS = 10, BACKLOG_MOST_MS = 250 };

struct worker;

struct backlog_router {
    struct link *link;
    double queued_ms; /* work in the router's queue, as its last Demand said */
};

struct backlog { /* zeroed: no router */
    struct backlog_router *routers;
    uint32_t n_routers, cap;
    bool changed;
    /* The last report counted several routers: when others leave, the last router must hear of it. */
    bool is_told;
    uint64_t told_ns;
};

void backlog_attach(struct backlog *b, struct link *link);
void backlog_leave(struct backlog *b, const struct link *link);
void backlog_demand(struct backlog *b, const struct link *link, double queued_ms);
void backlog_free(struct backlog *b);

/*
 * Sends the reports that are due. Returns how many milliseconds the engine thread may sleep, at most most_ms.
 */
uint32_t backlog_tell(struct worker *w, uint64_t now_ns, uint32_t most_ms);
