#include "worker/event_queue.h"

#include <stdlib.h>

/* More blocks than a snapshot can have: the first one takes the numbers before this. */
static const uint64_t FIRST_EVENT = 1ull << 32;

void event_queue_init(struct event_queue *q, uint64_t incarnation)
{
    *q = (struct event_queue){.incarnation = incarnation, .next = FIRST_EVENT};
}

void event_queue_free(struct event_queue *q)
{
    free(q->events);
    *q = (struct event_queue){0};
}

void event_queue_add(struct event_queue *q, const struct block_event *event)
{
    q->events = MEM_ROOM(q->events, q->n, q->cap, 256);
    q->events[q->n++] = *event;
}

/* Sends all events, numbered from `first` on, to one router, or to all if `to` is NULL; empties the queue. */
static void send_numbered(struct event_queue *q, uint64_t first, struct link_server *links, struct link *to)
{
    for (uint32_t at = 0; at < q->n;) {
        uint32_t count = q->n - at < EVENTS_MAX ? q->n - at : EVENTS_MAX;
        struct bytes b = {0};
        events_encode(&(struct events_header){q->incarnation, first + at, count}, q->events + at, &b);
        Tandem__Worker__V1__WorkerMessage m = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
        m.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_EVENTS;
        m.events = (ProtobufCBinaryData){b.len, (uint8_t *)b.data};
        if (to)
            link_send(to, &m);
        else
            link_server_send_all(links, &m);
        bytes_free(&b);
        at += count;
    }
    q->n = 0;
}

void event_queue_flush(struct event_queue *q, struct link_server *links)
{
    uint64_t first = q->next;
    q->next += q->n;
    send_numbered(q, first, links, NULL);
}

void event_queue_begin_snapshot(struct event_queue *q, struct link_server *links, enum block_tier tier)
{
    event_queue_flush(q, links);
    event_queue_add(q, &(struct block_event){.kind = BLOCK_CLEARED, .tier = tier});
}

void event_queue_end_snapshot(struct event_queue *q, struct link *to)
{
    send_numbered(q, q->next - q->n, NULL, to);
}
