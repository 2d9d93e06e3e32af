/*
 * Pages on the wire: leases that others pull from this worker, and pulls by this worker.
 *
 * A page gets a transfer hold before the wire may touch it. It loses the hold after the end callback, which
 * says that no byte of it moves any more. The callbacks run on the xfer thread and only send mail: the engine
 * thread alone touches the pool. n_wire counts leases and pulls from their start until their mail is handled.
 */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "worker/worker_internal.h"

void held_add(struct worker *w, struct held_pages *h, struct page_ref page)
{
    h->pages = MEM_ROOM(h->pages, h->n, h->cap, 16);
    h->pages[h->n++] = page;
    kvpool_transfer_hold(engine_pool(w->engine), page);
}

void held_drop(struct worker *w, struct held_pages *h, bool in_doubt)
{
    for (uint32_t i = 0; i < h->n; i++)
        kvpool_transfer_unhold(engine_pool(w->engine), h->pages[i], in_doubt);
    free(h->pages);
    *h = (struct held_pages){0};
}

/* ----------------------------------------------------------------- leases */

/* On the xfer thread, exactly once for each lease. */
static void on_lease_end(void *user, struct xfer_id id, enum td_status status, bool in_doubt)
{
    (void)id;
    struct worker_lease *l = user;
    struct worker_work *work = worker_work_new(WORK_LEASE_END);
    work->lease = l;
    work->status = status;
    work->in_doubt = in_doubt;
    mailbox_push(&l->worker->mailbox, &work->mail);
}

struct worker_lease *lease_open(struct worker *w, struct xfer_id id, uint64_t reader_incarnation, bool reader_is_up)
{
    struct worker_lease *l = mem_zalloc(sizeof(*l));
    l->worker = w;
    l->id = id;
    LIST_INSERT_HEAD(&w->leases, l, in_worker);
    w->n_wire++;
    xfer_lease_grant(w->xfer, &(struct xfer_lease_params){.id = id,
                                                          .reader_incarnation = reader_incarnation,
                                                          .reader_is_up = reader_is_up,
                                                          .duration_ns = (uint64_t)w->options.lease_ms * NS_PER_MS,
                                                          .on_end = on_lease_end,
                                                          .user = l});
    return l;
}

bool lease_is_open(const struct worker *w, struct xfer_id id)
{
    const struct worker_lease *l;
    LIST_FOREACH (l, &w->leases, in_worker)
        if (l->id.incarnation == id.incarnation && l->id.counter == id.counter)
            return true;
    return false;
}

void lease_cancel(struct worker *w, struct xfer_id id)
{
    const struct worker_lease *l;
    LIST_FOREACH (l, &w->leases, in_worker)
        if (l->id.incarnation == id.incarnation && l->id.counter == id.counter)
            xfer_lease_cancel(w->xfer, id);
}

void lease_close(struct worker *w, struct worker_lease *l, bool in_doubt)
{
    LIST_REMOVE(l, in_worker);
    held_drop(w, &l->held, in_doubt);
    w->n_wire--;
    free(l);
}

/* ------------------------------------------------------------------ pulls */

/* On the xfer thread: where page `index` of the lease lands. NULL ends the pull: too many pages. */
static void *landing_address(void *user, struct xfer_id id, uint32_t index)
{
    (void)id;
    const struct worker_pull *p = user;
    return index - p->n_have < p->held.n ? p->addresses[index - p->n_have] : NULL;
}

/* On the xfer thread, once for each started pull. Copies the tail, which is valid in this call only. */
static void on_pull_end(void *user, struct xfer_id id, const struct xfer_pull_result *result)
{
    (void)id;
    struct worker_pull *p = user;
    struct worker_work *work = worker_work_new(WORK_PULL_END);
    work->pull = p;
    work->status = result->status;
    work->result = *result;
    if (result->tail_len_bytes <= sizeof(work->tail_data))
        memcpy(work->tail_data, result->tail ? result->tail : "", result->tail ? result->tail_len_bytes : 0);
    work->result.tail = work->tail_data;
    mailbox_push(&p->worker->mailbox, &work->mail);
}

struct worker_pull *pull_open(struct worker *w, struct leg *leg, const struct page_ref *pages, const uint32_t *which,
                              uint32_t n)
{
    struct worker_pull *p = mem_zalloc(sizeof(*p));
    p->worker = w;
    p->leg = leg;
    LIST_INSERT_HEAD(&w->pulls, p, in_worker);
    p->addresses = mem_array(n, sizeof(*p->addresses));
    for (uint32_t i = 0; i < n; i++) {
        struct page_ref page = pages[which ? which[i] : i];
        p->addresses[i] = kvpool_address(engine_pool(w->engine), page);
        held_add(w, &p->held, page);
    }
    return p;
}

void pull_close(struct worker *w, struct worker_pull *p)
{
    LIST_REMOVE(p, in_worker);
    /* No doubt here: after on_pull_end nothing writes into these pages. */
    held_drop(w, &p->held, false);
    w->n_wire--;
    free(p->addresses);
    free(p);
}

void pull_start(struct worker *w, struct worker_pull *p, struct xfer_id id, const char *address, uint64_t incarnation,
                uint64_t deadline_ns)
{
    w->n_wire++;
    p->id = id;
    xfer_pull_start(w->xfer, &(struct xfer_pull_params){.id = id,
                                                        .address = address,
                                                        .holder_incarnation = incarnation,
                                                        .deadline_ns = deadline_ns,
                                                        .n_have = p->n_have,
                                                        .place = landing_address,
                                                        .on_end = on_pull_end,
                                                        .user = p});
}

/* --------------------------------------------------------------- messages */

/* On the xfer thread: WANT of a store, LOOKUP of another worker. Other kinds are ignored. */
void transfers_on_message(void *user, struct xfer_peer *peer, uint16_t kind, const void *data, uint32_t len_bytes)
{
    struct worker *w = user;
    if (kind != STORE_WANT && kind != STORE_LOOKUP)
        return;
    struct worker_work *work = worker_work_new(kind == STORE_WANT ? WORK_WANT : WORK_LOOKUP);
    work->sender = xfer_peer_incarnation(peer);
    bytes_append(&work->data, data, len_bytes);
    mailbox_push(&w->mailbox, &work->mail);
}
