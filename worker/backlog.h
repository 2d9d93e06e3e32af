/*
 * What a worker tells each router of the other routers: prompts and sequences of theirs that it has, and what they have queued. A router
 * adds that to its own books (sched_report in sched/scheduler.h). With one router attached nothing is told.
 *
 * A report is sent when something changed, at most every BACKLOG_LEAST_MS, and at least every BACKLOG_MOST_MS while there are sequences.
 * It follows the tokens and ends of the same step on each stream, so what it says of a router's own prompts is what that router knows.
 * (Rejected: heartbeats. They come every 250 ms from a thread that knows no sequences; at four times the load two routers admitted
 * twice what the workers could do in that time.)
 *
 * Threads: engine. Links are borrowed between attach and leave.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "worker/link.h"

enum { BACKLOG_LEAST_MS = 10, BACKLOG_MOST_MS = 250 };

struct worker;

struct backlog_router {
    struct link *link;
    double queued_ms; /* as it told */
};

struct backlog { /* zeros: no router */
    struct backlog_router *routers;
    uint32_t n_routers, cap;
    bool changed;
    bool is_told; /* the latest report knew of several routers */
    uint64_t told_ns;
};

void backlog_attach(struct backlog *b, struct link *link);
void backlog_leave(struct backlog *b, const struct link *link);
void backlog_demand(struct backlog *b, const struct link *link, double queued_ms);
void backlog_free(struct backlog *b);

/* Sends what is due. Returns for how many milliseconds the engine thread may sleep, at most most_ms. */
uint32_t backlog_tell(struct worker *w, uint64_t now_ns, uint32_t most_ms);
