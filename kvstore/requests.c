/*
 * Lookups and offers: what workers ask of the store.
 *
 * A lookup is answered by a lease over the longest stored prefix. Pinning the prefix is one step on the main
 * thread, so that what was found can't go away. Blocks on SSD are read into slots and announced strictly in
 * order, so that the first block that doesn't verify can still end the prefix. The lease is granted before
 * anything is read, even if nothing was found, because the worker's pull is waiting for it.
 *
 * An offer is answered on the main thread, too, so that of two offers of a block only the first is wanted: it
 * has made the entry FILLING. The answer goes to the address in the offer, not to the peer that sent it: a
 * peer's handle is valid on the xfer thread only, and the pull needs the address anyway.
 *
 * Both are tied to the incarnation of the process that asked. If that process dies before it pulls, or before
 * it is pulled from, its slots are free at once, even if another process starts at its address: none of its
 * bytes can be on their way. Slots that a reader had begun to read wait until it can't read them any more
 * (request_lease_ended).
 *
 * Peers choose the ids. An id that is in use is refused here: the transfer layer knows leases by id, and two
 * leases of one id would be mixed up.
 */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "kvstore/kvstore_internal.h"

/* Deadline of pulling an offer; a worker that takes longer loses it. */
static const uint64_t FILL_NS = 10 * NS_PER_S;

void request_on_message(void *user, struct xfer_peer *peer, uint16_t kind, const void *data, uint32_t len_bytes)
{
    struct kvstore *s = user;
    struct store_work *work = store_work_new(WORK_MESSAGE);
    work->sender = xfer_peer_incarnation(peer);
    work->message_kind = kind;
    bytes_append(&work->data, data, len_bytes);
    mailbox_push(&s->mailbox, &work->mail);
}

/* ------------------------------------------------------------------- leases */

static void on_lease_end(void *user, struct xfer_id id, enum td_status status, bool in_doubt)
{
    (void)id, (void)status;
    struct store_lease *l = user;
    struct store_work *work = store_work_new(WORK_LEASE_END);
    work->lease = l;
    work->in_doubt = in_doubt;
    mailbox_push(&l->store->mailbox, &work->mail);
}

static bool is_leased(const struct kvstore *s, struct xfer_id id)
{
    for (const struct store_lease *l = s->leases; l; l = l->next)
        if (l->id.incarnation == id.incarnation && l->id.counter == id.counter && !l->is_ended)
            return true;
    return false;
}

static struct store_lease *lease_open(struct kvstore *s, struct xfer_id id, uint64_t reader, uint32_t cap)
{
    struct store_lease *l = mem_zalloc(sizeof(*l));
    l->store = s;
    l->id = id;
    l->moved_ns = absence_now(&s->absence, 0);
    l->entries = mem_array(cap, sizeof(l->entries[0]));
    l->from_ssd = mem_array(cap, sizeof(l->from_ssd[0]));
    l->next = s->leases;
    s->leases = l;
    s->n_wire++;
    xfer_lease_grant(s->xfer, &(struct xfer_lease_params){.id = id,
                                                          .reader_incarnation = reader,
                                                          .reader_is_up = true,
                                                          .duration_ns = (uint64_t)s->options.lease_ms * NS_PER_MS,
                                                          .on_end = on_lease_end,
                                                          .user = l});
    return l;
}

/* Shortens the lease to its first n entries; counts the others as misses. */
static void lease_cut(struct kvstore *s, struct store_lease *l, uint32_t n, uint32_t why)
{
    store_count(s, why, l->n - n);
    for (uint32_t i = n; i < l->n; i++)
        table_unpin(s->table, l->entries[i]);
    l->n = n;
}

/* Tells the reader how many blocks the lease has. After this the lease does not change. */
static void lease_finish(struct kvstore *s, struct store_lease *l)
{
    struct store_found found = {0};
    uint8_t tail[STORE_FOUND_BYTES];
    for (uint32_t i = 0; i < l->n; i++)
        found.n_ssd += l->from_ssd[i];
    found.n_dram = l->n - found.n_ssd;
    store_count(s, STORE_HITS_DRAM, found.n_dram);
    store_count(s, STORE_HITS_SSD, found.n_ssd);
    store_found_encode(&found, tail);
    l->is_finished = true;
    xfer_lease_finish(s->xfer, l->id, l->n, tail, sizeof(tail));
}

static uint32_t miss_reason(enum td_status load_status)
{
    if (tier_is_corrupt(load_status))
        return STORE_MISS_CORRUPT;
    return load_status == TD_NOT_YET ? STORE_MISS_SLOW : STORE_MISS_IO;
}

/* Announces the blocks that have become ready, in order. Finishes the lease when none is left to wait for. */
static void lease_advance(struct kvstore *s, struct store_lease *l)
{
    uint32_t first = l->n_announced, n = first;
    while (n < l->n && l->entries[n]->dram == DRAM_READY)
        n++;
    if (n > first) {
        struct xfer_page *pages = mem_array(n - first, sizeof(*pages));
        for (uint32_t i = first; i < n; i++)
            pages[i - first] = (struct xfer_page){tier_address(s, l->entries[i]),
                                                  table_slot_generation(s->table, l->entries[i]->slot)};
        xfer_lease_announce(s->xfer, l->id, first, pages, n - first, 0, (uint16_t)s->geometry.layout.n_layers);
        free(pages);
        l->n_announced = n;
        l->moved_ns = absence_now(&s->absence, 0);
    }
    if (n < l->n && l->entries[n]->dram == DRAM_LOADING)
        return;
    if (n < l->n)
        lease_cut(s, l, n, miss_reason(l->entries[n]->load_status));
    lease_finish(s, l);
}

void request_advance_all(struct kvstore *s)
{
    for (struct store_lease *l = s->must_advance ? s->leases : NULL; l; l = l->next)
        if (!l->is_finished && !l->is_ended)
            lease_advance(s, l);
    s->must_advance = false;
}

/* A read that is under way goes on, into a slot that stays taken until it ends; no lease waits for it any
 * more. */
bool request_expire(struct kvstore *s, uint64_t now)
{
    uint64_t patience_ns = (uint64_t)s->options.read_deadline_ms * NS_PER_MS;
    bool is_waiting = false;
    for (struct store_lease *l = s->leases; l; l = l->next) {
        if (l->is_finished || l->is_ended)
            continue;
        is_waiting = true;
        if (!patience_ns || now < l->moved_ns + patience_ns)
            continue;
        lease_cut(s, l, l->n_announced, STORE_MISS_SLOW);
        lease_finish(s, l);
    }
    return is_waiting;
}

static void lease_free(struct kvstore *s, struct store_lease *l)
{
    for (uint32_t i = 0; i < l->n; i++)
        table_unpin(s->table, l->entries[i]);
    free(l->entries);
    free(l->from_ssd);
    free(l);
}

/* in_doubt: a lost reader may still be reading the slots, so they stay pinned for as long as a peer may be
 * silent. */
void request_lease_ended(struct kvstore *s, struct store_lease *l, bool in_doubt)
{
    s->n_wire--;
    if (!l->is_finished)
        store_count(s, STORE_MISS_ENDED, l->n);
    l->is_ended = true;
    uint64_t now = absence_now(&s->absence, 0);
    l->free_ns = in_doubt ? now + (uint64_t)s->options.silence_ms * NS_PER_MS : 0;
    request_free_doubtful(s, now, false);
}

/* Frees leases that have ended and whose time has come. all: whatever the time. */
void request_free_doubtful(struct kvstore *s, uint64_t now, bool all)
{
    for (struct store_lease **at = &s->leases; *at;) {
        struct store_lease *l = *at;
        if (!l->is_ended || (!all && l->free_ns > now)) {
            at = &l->next;
            continue;
        }
        *at = l->next;
        lease_free(s, l);
    }
}

/* ------------------------------------------------------------------ lookups */

static bool is_stored(const struct store_entry *e)
{
    return e && (e->dram == DRAM_READY || e->dram == DRAM_LOADING || e->ssd == SSD_DURABLE);
}

/* Tells the table which keys the store lacks, so that eviction can tell a continued chain from a new one. */
static void note_missing(struct kvstore *s, const struct store_keys_msg *m)
{
    uint64_t missing[STORE_MAX_KEYS];
    uint32_t n = 0;
    for (uint32_t i = 0; i < m->n_keys; i++) {
        struct block_key key = store_keys_at(m, i);
        if (!is_stored(table_find(s->table, &key)))
            missing[n++] = block_key_hash(&key);
    }
    table_request(s->table, missing, n);
}

/* Pins the longest stored prefix. At most one entry per slot is pinned, however often a peer repeats a
 * key. */
static void pin_prefix(struct kvstore *s, struct store_lease *l, const struct store_keys_msg *m)
{
    uint32_t most = table_audit(s->table).total, why = STORE_MISS_ABSENT;
    bool is_slow = tier_is_slow(s);
    for (; l->n < m->n_keys && l->n < most; l->n++) {
        struct block_key key = store_keys_at(m, l->n);
        struct store_entry *e = table_find(s->table, &key);
        if (!is_stored(e))
            break;
        if (is_slow && e->dram != DRAM_READY) {
            why = STORE_MISS_SLOW;
            tier_probe(s, e);
            break;
        }
        table_touch(s->table, e, s->tick);
        table_pin(s->table, e);
        l->entries[l->n] = e;
        l->from_ssd[l->n] = e->dram != DRAM_READY;
    }
    store_count(s, why, m->n_keys - l->n);
}

static void lookup(struct kvstore *s, const struct store_keys_msg *m, uint64_t reader)
{
    struct xfer_id id = {m->id_incarnation, m->id_counter};
    if (is_leased(s, id)) {
        log_warn(&s->log, "lookup with an id that is in use refused xfer=%llx-%llu", (unsigned long long)id.incarnation,
                 (unsigned long long)id.counter);
        store_count(s, STORE_BAD_MESSAGES, 1);
        return;
    }
    store_count(s, STORE_ASKED, m->n_keys);
    struct store_lease *l = lease_open(s, id, reader, m->n_keys);
    if (atomic_load(&s->stopping)) {
        store_count(s, STORE_MISS_STOPPING, m->n_keys);
        lease_finish(s, l);
        return;
    }
    pin_prefix(s, l, m);
    for (uint32_t i = 0; i < l->n; i++) {
        if (l->entries[i]->dram != DRAM_ABSENT)
            continue;
        if (!tier_make_slot(s, l->entries[i]->tenant, false)) {
            lease_cut(s, l, i, STORE_MISS_NO_SLOT);
            break;
        }
        tier_start_load(s, l->entries[i]);
    }
    log_debug(&s->log, "lookup xfer=%llx-%llu asked=%u found=%u", (unsigned long long)id.incarnation,
              (unsigned long long)id.counter, m->n_keys, l->n);
    lease_advance(s, l);
}

/* ------------------------------------------------------------------- offers */

static void *fill_place(void *user, struct xfer_id id, uint32_t index)
{
    (void)id;
    const struct fill *f = user;
    return index < f->n ? f->addresses[index] : NULL;
}

static void fill_on_progress(void *user, struct xfer_id id, uint32_t n_verified)
{
    (void)id;
    struct fill *f = user;
    if (n_verified > atomic_load(&f->n_verified))
        atomic_store(&f->n_verified, n_verified);
}

static void fill_on_end(void *user, struct xfer_id id, const struct xfer_pull_result *result)
{
    struct fill *f = user;
    if (result->status == TD_OK)
        fill_on_progress(f, id, result->n_pages);
    struct store_work *work = store_work_new(WORK_FILL_END);
    work->fill = f;
    mailbox_push(&f->store->mailbox, &work->mail);
}

static void fill_start(struct kvstore *s, struct fill *f, const char *address)
{
    s->n_wire++;
    xfer_pull_start(s->xfer, &(struct xfer_pull_params){.id = f->id,
                                                        .address = address,
                                                        .holder_incarnation = f->holder,
                                                        .deadline_ns = clock_now(&s->clock) + FILL_NS,
                                                        .place = fill_place,
                                                        .on_progress = fill_on_progress,
                                                        .on_end = fill_on_end,
                                                        .user = f});
}

static void fill_free(struct fill *f)
{
    free(f->entries);
    free(f->addresses);
    free(f);
}

/* Keeps the blocks that have arrived and verified, even if others did not come: they are a prefix of the
 * offer. */
void request_fill_ended(struct kvstore *s, struct fill *f)
{
    uint32_t n_ok = atomic_load(&f->n_verified) < f->n ? atomic_load(&f->n_verified) : f->n;
    s->n_wire--;
    store_count(s, STORE_PUTS, n_ok);
    store_count(s, STORE_DROP_TRANSFER, f->n - n_ok);
    if (n_ok < f->n)
        log_debug(&s->log, "offered blocks did not arrive xfer=%llx-%llu got=%u of=%u",
                  (unsigned long long)f->id.incarnation, (unsigned long long)f->id.counter, n_ok, f->n);
    for (uint32_t i = 0; i < f->n; i++)
        tier_filled(s, f->entries[i], i < n_ok);
    fill_free(f);
    tier_write_dirty(s);
}

/* Whether the store has the block or is getting it. A block that the SSD refused may be written again. */
static bool is_known(struct kvstore *s, struct store_entry *e)
{
    if (!e || (e->dram == DRAM_ABSENT && e->ssd != SSD_DURABLE))
        return false;
    table_keep(s->table, e, s->tick);
    if (e->ssd == SSD_REFUSED && e->dram == DRAM_READY)
        table_set_ssd(s->table, e, SSD_ABSENT);
    return true;
}

/* Adds the block to the fill if it is to be pulled; true if so. tier_make_slot comes before table_add: a
 * new entry must get a tier before anything else is done with the table. */
static bool want(struct kvstore *s, struct fill *f, const struct block_key *key, uint32_t chain_index, uint32_t tenant)
{
    struct store_entry *e = table_find(s->table, key);
    if (is_known(s, e)) {
        store_count(s, STORE_KNOWN, 1);
        return false;
    }
    if (!tier_make_slot(s, e ? e->tenant : tenant, true)) {
        store_count(s, STORE_DROP_NO_SLOT, 1);
        if (!e)
            table_refused(s->table, key, chain_index, s->tick);
        return false;
    }
    if (!e)
        e = table_add(s->table, key, chain_index, tenant, s->tick);
    table_touch(s->table, e, s->tick);
    table_set_dram(s->table, e, DRAM_FILLING);
    pinned_added(s, e);
    f->entries[f->n] = e;
    f->addresses[f->n++] = tier_address(s, e);
    return true;
}

static void offer(struct kvstore *s, const struct store_keys_msg *m, uint64_t holder)
{
    char address[STORE_ADDRESS_MAX + 1] = "";
    uint16_t positions[STORE_MAX_KEYS];
    struct bytes b = {0};
    struct fill *f = mem_zalloc(sizeof(*f));
    memcpy(address, m->address, m->address_len);
    f->store = s;
    f->holder = holder;
    f->id = (struct xfer_id){m->id_incarnation, m->id_counter};
    f->entries = mem_array(m->n_keys, sizeof(f->entries[0]));
    f->addresses = mem_array(m->n_keys, sizeof(f->addresses[0]));
    store_count(s, STORE_OFFERED, m->n_keys);
    if (atomic_load(&s->stopping))
        store_count(s, STORE_DROP_STOPPING, m->n_keys);
    for (uint32_t i = 0; i < m->n_keys && !atomic_load(&s->stopping); i++) {
        struct block_key key = store_keys_at(m, i);
        if (want(s, f, &key, m->first_index + i, m->tenant))
            positions[f->n - 1] = (uint16_t)i;
    }
    log_debug(&s->log, "offer xfer=%llx-%llu offered=%u wanted=%u", (unsigned long long)f->id.incarnation,
              (unsigned long long)f->id.counter, m->n_keys, f->n);
    store_want_encode(m->id_incarnation, m->id_counter, positions, (uint16_t)f->n, &b);
    xfer_send(s->xfer, address, STORE_WANT, b.data, (uint32_t)b.len);
    bytes_free(&b);
    if (f->n)
        fill_start(s, f, address);
    else
        fill_free(f);
    tier_write_dirty(s);
}

void request_message(struct kvstore *s, const struct store_work *work)
{
    struct store_keys_msg m;
    uint16_t kind = work->message_kind;
    bool is_known_kind = kind == STORE_LOOKUP || kind == STORE_OFFER;
    if (!is_known_kind || store_keys_decode(work->data.data, work->data.len, &m) ||
        (kind == STORE_OFFER && !m.address_len)) {
        log_warn(&s->log, "message of a worker makes no sense kind=%u bytes=%zu", kind, work->data.len);
        store_count(s, STORE_BAD_MESSAGES, 1);
        return;
    }
    s->tick++;
    note_missing(s, &m);
    if (kind == STORE_LOOKUP)
        lookup(s, &m, work->sender);
    else
        offer(s, &m, work->sender);
}
