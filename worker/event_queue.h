/*
 * Block events of a worker or store on their way to its routers (proto/wire/events.h).
 *
 * Events are noted where they happen and sent in batches, because the pool and the store's table may not call
 * the network. They must be flushed before anything that refers to them: tokens, a snapshot, an audit.
 *
 * A snapshot goes to one router and takes the numbers before the next event, so that what follows has no gap.
 *
 * Threads: one, the owner of the queue. Errors: none.
 */
#pragma once

#include "proto/wire/events.h"
#include "worker/link.h"

struct event_queue {
    uint64_t incarnation; /* of this process */
    struct block_event *events;
    uint32_t n, cap;
    uint64_t next; /* number of the next event that goes to every router */
};

void event_queue_init(struct event_queue *q, uint64_t incarnation);
void event_queue_free(struct event_queue *q); /* events that were not flushed are dropped */

void event_queue_add(struct event_queue *q, const struct block_event *event);
/* Sends all noted events to every router. */
void event_queue_flush(struct event_queue *q, struct link_server *links);

/*
 * Flushes, because the snapshot will contain the noted events, and begins a snapshot: CLEARED with that tier,
 * and what is added until event_queue_end_snapshot(), which sends it to `to`.
 */
void event_queue_begin_snapshot(struct event_queue *q, struct link_server *links, enum block_tier tier);
void event_queue_end_snapshot(struct event_queue *q, struct link *to);
