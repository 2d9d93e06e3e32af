/*
 * Pages on the wire: leases that others pull from us, pulls of ours, and the store.
 *
 * A page gets a transfer hold before the wire may touch it and loses it when the end callback said that nothing moves any
 * more. The callbacks come on the xfer thread and only post; the pool is touched on the engine thread alone.
 */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "worker/worker_internal.h"

static const uint64_t STORE_LOAD_NS = 10 * NS_PER_S; /* a slower store is treated as a miss */
static const uint64_t STORE_WANT_NS = 2 * NS_PER_S;  /* a store that doesn't answer an offer loses it */

void held_add(struct worker *w, struct held_pages *h, struct page_ref page)
{
    if (h->n == h->cap) {
        h->cap = h->cap ? h->cap * 2 : 16;
        h->pages = mem_resize(h->pages, h->cap, sizeof(*h->pages));
    }
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

static void on_lease_end(void *user, struct xfer_id id, enum td_status status, bool in_doubt)
{
    (void)id;
    struct lease *l = user;
    struct work *work = work_new(WORK_LEASE_END);
    work->lease = l;
    work->status = status;
    work->in_doubt = in_doubt;
    mailbox_push(&l->worker->mailbox, &work->mail);
}

struct lease *lease_open(struct worker *w, struct xfer_id id, uint64_t reader_incarnation)
{
    struct lease *l = mem_zalloc(sizeof(*l));
    l->worker = w;
    l->id = id;
    l->next = w->leases;
    if (w->leases)
        w->leases->prev = l;
    w->leases = l;
    w->n_wire++;
    xfer_lease_grant(w->xfer, &(struct xfer_lease_params){.id = id,
                                                          .reader_incarnation = reader_incarnation,
                                                          .duration_ns = (uint64_t)w->options.lease_ms * NS_PER_MS,
                                                          .on_end = on_lease_end,
                                                          .user = l});
    return l;
}

void lease_close(struct worker *w, struct lease *l, bool in_doubt)
{
    *(l->prev ? &l->prev->next : &w->leases) = l->next;
    if (l->next)
        l->next->prev = l->prev;
    held_drop(w, &l->held, in_doubt);
    w->n_wire--;
    free(l);
}

/* ------------------------------------------------------------------ pulls */

static void *place(void *user, struct xfer_id id, uint32_t index)
{
    (void)id;
    const struct pull *p = user;
    return index < p->held.n ? p->addresses[index] : NULL;
}

static void on_pull_end(void *user, struct xfer_id id, const struct xfer_pull_result *result)
{
    (void)id;
    struct pull *p = user;
    struct work *work = work_new(WORK_PULL_END);
    work->pull = p;
    work->status = result->status;
    work->result = *result;
    if (result->tail_len_bytes <= sizeof(work->tail_data))
        memcpy(work->tail_data, result->tail ? result->tail : "", result->tail ? result->tail_len_bytes : 0);
    work->result.tail = work->tail_data;
    mailbox_push(&p->worker->mailbox, &work->mail);
}

struct pull *pull_open(struct worker *w, struct leg *leg, uint32_t first, uint32_t n)
{
    uint32_t n_pages;
    const struct page_ref *pages = engine_seq_pages(leg->seq, &n_pages);
    struct pull *p = mem_zalloc(sizeof(*p));
    p->worker = w;
    p->leg = leg;
    p->first = first;
    p->next = w->pulls;
    if (w->pulls)
        w->pulls->prev = p;
    w->pulls = p;
    p->addresses = mem_array(n, sizeof(*p->addresses));
    for (uint32_t i = 0; i < n; i++) {
        p->addresses[i] = kvpool_address(engine_pool(w->engine), pages[first + i]);
        held_add(w, &p->held, pages[first + i]);
    }
    leg->pull = p;
    return p;
}

void pull_close(struct worker *w, struct pull *p)
{
    *(p->prev ? &p->prev->next : &w->pulls) = p->next;
    if (p->next)
        p->next->prev = p->prev;
    held_drop(w, &p->held, false); /* the end callback: nothing writes any more */
    w->n_wire--;
    free(p->addresses);
    free(p);
}

void pull_start(struct worker *w, struct pull *p, struct xfer_id id, const char *address, uint64_t incarnation,
                uint64_t deadline_ns)
{
    w->n_wire++;
    p->id = id;
    xfer_pull_start(w->xfer, &(struct xfer_pull_params){.id = id,
                                                        .address = address,
                                                        .holder_incarnation = incarnation,
                                                        .deadline_ns = deadline_ns,
                                                        .place = place,
                                                        .on_end = on_pull_end,
                                                        .user = p});
}

/* ------------------------------------------------------------------ store */

static uint32_t clamp_keys(uint32_t n)
{
    return n < STORE_MAX_KEYS ? n : STORE_MAX_KEYS;
}

static void send_keys(struct worker *w, const char *store, enum store_msg_kind kind, struct xfer_id id,
                      const struct block_key *keys, uint32_t first, uint32_t n)
{
    struct bytes b = {0};
    const char *address = kind == STORE_OFFER ? xfer_address(w->xfer) : ""; /* where the store pulls from */
    const struct store_keys_msg m = {.id_incarnation = id.incarnation,
                                     .id_counter = id.counter,
                                     .first_index = first,
                                     .n_keys = (uint16_t)n,
                                     .keys = keys[first].b,
                                     .address = address,
                                     .address_len = (uint16_t)strlen(address)};
    store_keys_encode(&m, &b);
    xfer_send(w->xfer, store, (uint16_t)kind, b.data, (uint32_t)b.len);
    bytes_free(&b);
}

bool store_load(struct worker *w, struct leg *leg, uint32_t n_matched)
{
    uint32_t n_tokens, n_keys, n_computed;
    engine_seq_tokens(leg->seq, &n_tokens);
    const struct block_key *keys = engine_seq_keys(leg->seq, &n_keys, &n_computed);
    uint32_t usable = (n_tokens - 1) / w->geometry.layout.page_tokens; /* the last token is computed here */
    uint32_t until = leg->store_blocks < usable ? leg->store_blocks : usable;
    if (!leg->store || until <= n_matched)
        return false;
    uint32_t n = clamp_keys(until - n_matched);
    uint64_t limit = clock_now(&w->clock) + STORE_LOAD_NS;
    struct xfer_id id = worker_new_id(w);
    struct pull *p = pull_open(w, leg, n_matched, n);
    p->from_store = true;
    send_keys(w, leg->store, STORE_LOOKUP, id, keys, n_matched, n);
    pull_start(w, p, id, leg->store, 0, limit < leg->deadline_ns ? limit : leg->deadline_ns);
    return true;
}

void store_offer(struct worker *w, struct leg *leg, uint32_t first_block)
{
    uint32_t n_keys, n_computed, n_pages;
    const struct block_key *keys = engine_seq_keys(leg->seq, &n_keys, &n_computed);
    const struct page_ref *pages = engine_seq_pages(leg->seq, &n_pages);
    if (!leg->store || n_computed <= first_block)
        return;
    uint32_t n = clamp_keys(n_computed - first_block);
    struct offer *o = mem_zalloc(sizeof(*o));
    o->id = worker_new_id(w);
    o->deadline_ns = clock_now(&w->clock) + STORE_WANT_NS;
    for (uint32_t i = 0; i < n; i++)
        held_add(w, &o->held, pages[first_block + i]);
    o->next = w->offers;
    w->offers = o;
    send_keys(w, leg->store, STORE_OFFER, o->id, keys, first_block, n);
}

/* The wanted pages move from the offer to a lease, the others are let go. */
static void lease_wanted(struct worker *w, struct offer *o, const struct store_want_msg *m)
{
    uint32_t n = 0;
    while (n < m->n && store_want_at(m, n) < o->held.n)
        n++;
    if (!n || n < m->n) /* nothing wanted, or positions outside the offer */
        return;
    struct lease *l = lease_open(w, o->id, 0);
    struct xfer_page *pages = mem_array(n, sizeof(*pages));
    for (uint32_t i = 0; i < n; i++) {
        struct page_ref ref = o->held.pages[store_want_at(m, i)];
        pages[i] = (struct xfer_page){kvpool_address(engine_pool(w->engine), ref), ref.generation};
        held_add(w, &l->held, ref);
    }
    xfer_lease_announce(w->xfer, o->id, 0, pages, n, 0, (uint16_t)w->geometry.layout.n_layers);
    xfer_lease_finish(w->xfer, o->id, n, NULL, 0);
    free(pages);
}

void store_wanted(struct worker *w, const struct bytes *message)
{
    struct store_want_msg m;
    if (store_want_decode(message->data, message->len, &m)) {
        log_warn(&w->log, "store sent a want that can't be read");
        return;
    }
    for (struct offer **at = &w->offers; *at; at = &(*at)->next) {
        struct offer *o = *at;
        if (o->id.incarnation != m.id_incarnation || o->id.counter != m.id_counter)
            continue;
        lease_wanted(w, o, &m);
        *at = o->next;
        held_drop(w, &o->held, false);
        free(o);
        return;
    }
}

void store_expire(struct worker *w, uint64_t now, bool all)
{
    for (struct offer **at = &w->offers; *at;) {
        struct offer *o = *at;
        if (!all && o->deadline_ns > now) {
            at = &o->next;
            continue;
        }
        *at = o->next;
        held_drop(w, &o->held, false);
        free(o);
    }
}

void wire_on_message(void *user, struct xfer_peer *peer, uint16_t kind, const void *data, uint32_t len_bytes)
{
    (void)peer;
    struct worker *w = user;
    if (kind != STORE_WANT)
        return;
    struct work *work = work_new(WORK_WANT);
    bytes_append(&work->data, data, len_bytes);
    mailbox_push(&w->mailbox, &work->mail);
}
