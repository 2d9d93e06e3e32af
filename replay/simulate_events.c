#include "base/mem.h"
#include "replay/simulate_internal.h"

static bool earlier(const struct event *a, const struct event *b)
{
    return a->at_ns < b->at_ns || (a->at_ns == b->at_ns && a->order < b->order);
}

void events_post(struct events *e, uint64_t at_ns, enum event_kind kind, uint32_t subject, uint64_t run)
{
    e->heap = MEM_ROOM(e->heap, e->n, e->cap, 1024);
    struct event new = {at_ns, e->n_made++, kind, subject, run};
    uint64_t i = e->n++;
    for (; i && earlier(&new, &e->heap[(i - 1) / 2]); i = (i - 1) / 2)
        e->heap[i] = e->heap[(i - 1) / 2];
    e->heap[i] = new;
}

struct event events_take(struct events *e)
{
    struct event first = e->heap[0], last = e->heap[--e->n];
    uint64_t i = 0;
    for (;;) {
        uint64_t child = 2 * i + 1;
        if (child >= e->n)
            break;
        child += child + 1 < e->n && earlier(&e->heap[child + 1], &e->heap[child]);
        if (!earlier(&e->heap[child], &last))
            break;
        e->heap[i] = e->heap[child];
        i = child;
    }
    e->heap[i] = last;
    return first;
}
