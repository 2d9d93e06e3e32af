/*
 * Blocks for stores: when a leg ends, it offers its full blocks to the stores that rendezvous hashing names
 * (sched/ring.h), segment by segment. The store answers which blocks it wants, and gets a lease on those.
 *
 *     offer (pages held) --WANT--> lease (pages held) --> ended
 *                        \--no answer within STORE_WANT_NS--> dropped
 *
 * Nothing here can fail a request.
 */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "sched/ring.h"
#include "worker/worker_internal.h"

/* An offer that is not answered within this time is dropped. */
static const uint64_t STORE_WANT_NS = 2 * NS_PER_S;

static void send_offer(struct worker *w, const struct leg *leg, const char *store, struct xfer_id id,
                       const struct block_key *keys, uint32_t first, uint32_t n)
{
    struct bytes b = {0};
    const struct store_keys_msg m = {.id_incarnation = id.incarnation,
                                     .id_counter = id.counter,
                                     .first_index = first,
                                     .n_keys = (uint16_t)n,
                                     .keys = keys[first].b,
                                     .address = w->xfer_address, /* where the store pulls from */
                                     .address_len = (uint16_t)strlen(w->xfer_address),
                                     .tenant = leg->tenant};
    store_keys_encode(&m, &b);
    xfer_send(w->xfer, store, STORE_OFFER, b.data, (uint32_t)b.len);
    bytes_free(&b);
}

/*
 * Holds the page of block i once more; the caller gives the hold back. The page is the sequence's own or,
 * behind a sliding window, the cache's. False if it is not in the cache any more.
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

/* Offers blocks [first, end), from the first one that is still there up to the first gap, to one store. */
static void offer(struct worker *w, struct leg *leg, const char *store, uint32_t first, uint32_t end)
{
    uint32_t n_keys, n_computed;
    const struct block_key *keys = engine_seq_keys(leg->seq, &n_keys, &n_computed);
    struct page_ref page;
    /* Blocks whose pages were reused in the meantime are left out. */
    while (first < end && !take_block(w, leg, keys, first, &page))
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
    LIST_INSERT_HEAD(&w->offers, o, in_worker);
    send_offer(w, leg, store, o->id, keys, first, o->held.n);
}

/* Each segment goes to its first store, and to its second one, too, if it begins in the hot blocks. */
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

/* Grants a lease on the wanted pages, which gets holds of its own before the caller drops the offer's. */
static void lease_wanted(struct worker *w, struct offer *o, const struct store_want_msg *m)
{
    uint32_t n = 0;
    while (n < m->n && store_want_at(m, n) < o->held.n)
        n++;
    if (!n || n < m->n) /* nothing is wanted, or a position is outside the offer */
        return;
    if (lease_is_open(w, o->id)) /* a peer has asked for blocks with an id that is this worker's to give */
        return;
    struct worker_lease *l = lease_open(w, o->id, 0, false);
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

static void offer_close(struct worker *w, struct offer *o)
{
    LIST_REMOVE(o, in_worker);
    held_drop(w, &o->held, false);
    free(o);
}

/* A store's answer to an offer. Unknown ids are ignored: the offer may have expired. */
void store_wanted(struct worker *w, const struct bytes *message)
{
    struct store_want_msg m;
    struct offer *o, *next;
    if (store_want_decode(message->data, message->len, &m)) {
        log_warn(&w->log, "store sent a want that can't be read");
        return;
    }
    LIST_FOREACH_SAFE (o, &w->offers, in_worker, next)
        if (o->id.incarnation == m.id_incarnation && o->id.counter == m.id_counter) {
            lease_wanted(w, o, &m);
            offer_close(w, o);
            return;
        }
}

void store_expire(struct worker *w, uint64_t now, bool all)
{
    struct offer *o, *next;
    LIST_FOREACH_SAFE (o, &w->offers, in_worker, next)
        if (all || o->deadline_ns <= now)
            offer_close(w, o);
}
