/*
 * The stores as a worker sees them: prefixes are loaded run by run from those that the router names, finished blocks are
 * offered to those that rendezvous hashing names (sched/ring.h), segment by segment.
 *
 * Nothing here can fail a request: what a store does not give is computed.
 */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "sched/ring.h"
#include "worker/worker_internal.h"

static const uint64_t STORE_LOAD_NS = 10 * NS_PER_S; /* a slower store is treated as a miss */
static const uint64_t STORE_WANT_NS = 2 * NS_PER_S;  /* a store that doesn't answer an offer loses it */

static void send_keys(struct worker *w, const struct leg *leg, const char *store, enum store_msg_kind kind,
                      struct xfer_id id, const struct block_key *keys, uint32_t first, uint32_t n)
{
    struct bytes b = {0};
    const char *address = kind == STORE_OFFER ? w->xfer_address : ""; /* where the store pulls from */
    const struct store_keys_msg m = {.id_incarnation = id.incarnation,
                                     .id_counter = id.counter,
                                     .first_index = first,
                                     .n_keys = (uint16_t)n,
                                     .keys = keys[first].b,
                                     .address = address,
                                     .address_len = (uint16_t)strlen(address),
                                     .tenant = leg->tenant};
    store_keys_encode(&m, &b);
    xfer_send(w->xfer, store, (uint16_t)kind, b.data, (uint32_t)b.len);
    bytes_free(&b);
}

/* ------------------------------------------------------------------ loading */

/* The run that goes on where n_have blocks end; NULL: there is none. */
static const struct store_run *run_at(const struct leg *leg, uint32_t n_have)
{
    for (uint32_t i = 0; i < leg->n_runs; i++)
        if (leg->runs[i].first <= n_have && n_have - leg->runs[i].first < leg->runs[i].n)
            return &leg->runs[i];
    return NULL;
}

bool store_load(struct worker *w, struct leg *leg, uint32_t n_have)
{
    uint32_t n_tokens, n_keys, n_computed;
    engine_seq_tokens(leg->seq, &n_tokens);
    const struct block_key *keys = engine_seq_keys(leg->seq, &n_keys, &n_computed);
    uint32_t usable = (n_tokens - 1) / w->geometry.layout.page_tokens; /* the last token is computed here */
    const struct store_run *run = run_at(leg, n_have);
    if (!run || usable <= n_have)
        return false;
    uint32_t end = run->first + run->n < usable ? run->first + run->n : usable;
    uint32_t n = end - n_have < STORE_MAX_KEYS ? end - n_have : STORE_MAX_KEYS;
    uint64_t limit = clock_now(&w->clock) + STORE_LOAD_NS;
    struct xfer_id id = worker_new_id(w);
    struct pull *p = pull_open(w, leg, n_have, n);
    p->from_store = true;
    leg->load_begin_ns = clock_now(&w->clock);
    send_keys(w, leg, leg->stores[run->store].address, STORE_LOOKUP, id, keys, n_have, n);
    pull_start(w, p, id, leg->stores[run->store].address, 0, limit < leg->deadline_ns ? limit : leg->deadline_ns);
    return true;
}

/* What the router needs to know in order to tell whether loading or computing is faster. */
static void note_speed(struct worker *w, const struct store_found *found, uint64_t took_ns)
{
    const double x[] = {1, found->n_dram, found->n_ssd};
    pthread_mutex_lock(&w->load_lock);
    w->loading = rls_observe(w->loading, x, (double)took_ns * 1e-6);
    pthread_mutex_unlock(&w->load_lock);
}

void store_load_ended(struct worker *w, struct leg *leg, const struct work *work, uint32_t first, uint32_t n_asked)
{
    struct store_found found = {0, 0};
    uint32_t page_tokens = w->geometry.layout.page_tokens, n = 0;
    if (!work->status && !store_found_decode(work->result.tail, work->result.tail_len_bytes, &found))
        n = work->result.n_pages;
    if (n) {
        note_speed(w, &found, clock_now(&w->clock) - leg->load_begin_ns);
        leg->cached_dram += found.n_dram * page_tokens;
        leg->cached_ssd += found.n_ssd * page_tokens;
        leg->n_from_store = first + n;
        metrics_inc(w->counters, WORKER_STORE_TOKENS, (uint64_t)n * page_tokens);
    } else if (work->status) {
        log_warn(&w->log, "store load failed, computing instead req=%s status=%s", leg->label,
                 td_status_name(work->status));
    }
    if (n < n_asked || !store_load(w, leg, first + n))
        engine_seq_filled(w->engine, leg->seq, (first + n) * page_tokens);
}

/* ----------------------------------------------------------------- offering */

/*
 * The page of block i: the sequence's, or where it lies behind a window, that of the cache, if it is still there. With one more
 * hold, which the caller gives back.
 */
static bool take_block(struct worker *w, const struct leg *leg, const struct block_key *keys, uint32_t i,
                       struct page_ref *out)
{
    uint32_t n_pages;
    if (i < engine_seq_first_page(leg->seq))
        return kvpool_match(engine_pool(w->engine), &keys[i], 1, out) == 1;
    *out = engine_seq_pages(leg->seq, &n_pages)[i];
    kvpool_hold(engine_pool(w->engine), *out);
    return true;
}

static void offer(struct worker *w, struct leg *leg, const char *store, uint32_t first, uint32_t end)
{
    uint32_t n_keys, n_computed;
    const struct block_key *keys = engine_seq_keys(leg->seq, &n_keys, &n_computed);
    struct page_ref page;
    while (first < end && !take_block(w, leg, keys, first, &page)) /* reused meanwhile */
        first++;
    if (first == end)
        return;
    kvpool_unhold(engine_pool(w->engine), &page, 1);
    struct offer *o = mem_zalloc(sizeof(*o));
    o->id = worker_new_id(w);
    o->deadline_ns = absence_now(&w->absence, 0) + STORE_WANT_NS;
    for (uint32_t i = first; i < end && take_block(w, leg, keys, i, &page); i++) {
        held_add(w, &o->held, page);
        kvpool_unhold(engine_pool(w->engine), &page, 1);
    }
    o->next = w->offers;
    w->offers = o;
    send_keys(w, leg, store, STORE_OFFER, o->id, keys, first, o->held.n);
}

void store_offer(struct worker *w, struct leg *leg, uint32_t first_block)
{
    uint32_t n_keys, n_computed;
    const struct block_key *keys = engine_seq_keys(leg->seq, &n_keys, &n_computed);
    uint64_t ids[MAX_STORES];
    for (uint32_t i = 0; i < leg->n_stores; i++)
        ids[i] = leg->stores[i].id;
    for (uint32_t begin = 0; begin < n_computed && leg->n_stores; begin += RING_SEGMENT_BLOCKS) {
        uint32_t end = begin + RING_SEGMENT_BLOCKS < n_computed ? begin + RING_SEGMENT_BLOCKS : n_computed;
        uint32_t first = begin > first_block ? begin : first_block;
        if (first < end)
            offer(w, leg, leg->stores[ring_place(ids, leg->n_stores, &keys[begin], 0)].address, first, end);
        if (begin < leg->hot_blocks && leg->n_stores > 1)
            offer(w, leg, leg->stores[ring_place(ids, leg->n_stores, &keys[begin], 1)].address, begin, end);
    }
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
