/*
 * Which tier a block lies in, and what moves between the tiers.
 *
 * Down: a block that has arrived is dirty. It is queued for the SSD at once and stays in DRAM until something
 * else needs its slot. If the write queue is full, it waits in the table's list of dirty blocks; room in the
 * queue is given out in that order. Up: a block on SSD is read straight into a slot and then lies in both
 * tiers.
 *
 * A slot is taken from the block in DRAM that eviction names: first of tenants above their quota (table.h),
 * then the next clean one. A dirty block is lost, and counted, only for a new block, which is at least as
 * likely to be asked for. While blocks are being read from SSD, new blocks leave a part of the slots to them,
 * however far the writer is behind: then a dirty block goes for each new one, of whatever tenant.
 *
 * Threads: the main thread, except the callbacks on_put, on_read, on_over and on_listed, which come on the
 * SSD tier's threads and only push mail.
 */
#include <stdlib.h>
#include <string.h>

#include "kvstore/kvstore_internal.h"

/* New blocks may hold all but 1 / READING_PART of the slots while blocks are read from SSD. */
enum { READING_PART = 4 };
/* A slow SSD is tried this often; blocks are "being read" for LATELY_NS after the last wish to read. */
static const uint64_t PROBE_EVERY_NS = NS_PER_S / 2;
static const uint64_t LATELY_NS = NS_PER_S;

uint8_t *tier_address(const struct kvstore *s, const struct store_entry *e)
{
    return (uint8_t *)s->arena + (uint64_t)e->slot * s->page_bytes;
}

/* --------------------------------------------------------------------- DRAM */

/* The event comes first: setting ABSENT may end e. */
static void leave_dram(struct kvstore *s, struct store_entry *e)
{
    store_count(s, STORE_EVICTED_DRAM, 1);
    store_event(s, BLOCK_REMOVED, TIER_DRAM, e);
    table_set_dram(s->table, e, DRAM_ABSENT);
}

/* Blocks are being read, and new blocks that are not written yet have used up their part of the slots:
 * from now on one of them goes for each new one. */
static bool is_swamped(const struct kvstore *s)
{
    uint32_t total = table_audit(s->table).total;
    bool is_read = s->loading_ns && clock_now(&s->clock) < s->loading_ns + LATELY_NS;
    return is_read && table_unwritten(s->table) >= total - total / READING_PART;
}

/* True if there is a free slot now. A victim is never a block of the present request: its last_used is the
 * present tick. */
bool tier_make_slot(struct kvstore *s, uint32_t for_tenant, bool is_new)
{
    bool is_full = is_new && is_swamped(s);
    if (!is_new)
        s->loading_ns = clock_now(&s->clock);
    if (!is_full && table_slots_free(s->table))
        return true;
    struct store_entry *e = is_full ? NULL : table_victim_over_quota(s->table, for_tenant, is_new, s->tick);
    if (!e && !is_full)
        e = table_victim_clean(s->table, s->tick);
    if (!e && is_new)
        e = table_victim_dirty(s->table, s->tick);
    if (!e)
        return false;
    store_count(s, STORE_LOST_DIRTY, e->is_listed);
    leave_dram(s, e);
    return true;
}

/* The pull of an offered block has ended. */
void tier_filled(struct kvstore *s, struct store_entry *e, bool is_verified)
{
    if (!is_verified) {
        table_set_dram(s->table, e, DRAM_ABSENT);
        return;
    }
    table_set_dram(s->table, e, DRAM_READY);
    store_event(s, BLOCK_ADDED, TIER_DRAM, e);
}

/* ---------------------------------------------------------------------- SSD */

static void on_found(void *user, const struct block_header *h)
{
    struct kvstore *s = user;
    if (!table_find(s->table, &h->key))
        table_set_ssd(s->table, table_add(s->table, &h->key, h->index, h->tenant, 0), SSD_DURABLE);
}

static void post(struct kvstore *s, enum store_work_kind kind, void *token, enum td_status status)
{
    struct store_work *work = store_work_new(kind);
    work->entry = token;
    work->status = status;
    mailbox_push(&s->mailbox, &work->mail);
}

static void on_put(void *user, void *token, enum td_status status)
{
    post(user, WORK_WRITTEN, token, status);
}

static void on_read(void *user, void *token, enum td_status status)
{
    post(user, WORK_LOADED, token, status);
}

static void on_over(void *user, uint64_t n_bytes)
{
    struct kvstore *s = user;
    struct store_work *work = store_work_new(WORK_SSD_OVER);
    work->n_bytes = n_bytes;
    mailbox_push(&s->mailbox, &work->mail);
}

static void on_listed(void *user, struct bytes *keys)
{
    struct kvstore *s = user;
    struct store_work *work = store_work_new(WORK_SSD_LISTED);
    work->data = *keys;
    mailbox_push(&s->mailbox, &work->mail);
}

enum td_status tier_open_ssd(struct kvstore *s, struct td_error *error_out)
{
    const struct kvstore_options *o = &s->options;
    uint64_t half = s->arena_bytes / 2; /* half of the arena: queued blocks can't be evicted */
    const struct ssd_tier_config c = {.dir = o->dir,
                                      .capacity_bytes = (uint64_t)o->ssd_bytes,
                                      .queue_bytes =
                                          (uint64_t)o->write_queue_bytes < half ? (uint64_t)o->write_queue_bytes : half,
                                      .write_bytes_per_s = (uint64_t)o->write_bytes_per_s,
                                      .read_deadline_ns = (uint64_t)o->read_deadline_ms * NS_PER_MS,
                                      .n_readers = (uint32_t)o->read_threads,
                                      .codec = s->codec,
                                      .faults = s->faults,
                                      .layout = &s->geometry.layout,
                                      .clock = &s->clock,
                                      .log = &s->log,
                                      .callbacks = {.user = s,
                                                    .on_found = on_found,
                                                    .on_put = on_put,
                                                    .on_read = on_read,
                                                    .on_over = on_over,
                                                    .on_listed = on_listed}};
    enum td_status status = ssd_tier_open(&c, &s->ssd, error_out);
    if (status)
        return status;
    struct ssd_tier_stats st = ssd_tier_stats(s->ssd);
    store_count(s, STORE_SSD_DROPPED, st.dropped_layout);
    store_count(s, STORE_SSD_SET_ASIDE, st.was_set_aside);
    return TD_OK;
}

/* Takes the block off the SSD: `to` is REFUSED if it was evicted, ABSENT if it can't be served. May end e. */
static void leave_ssd(struct kvstore *s, struct store_entry *e, enum ssd_state to)
{
    store_event(s, BLOCK_REMOVED, TIER_SSD, e);
    /* s->ssd is NULL while closing. The block stays on disk then, and fails to verify again later. */
    if (s->ssd)
        ssd_tier_delete(s->ssd, &e->key, false);
    table_set_ssd(s->table, e, to);
}

/* Evicts one block; false if there is none that may go. */
static bool evict_ssd(struct kvstore *s)
{
    struct store_entry *e = table_victim_ssd_over_quota(s->table, UINT64_MAX);
    if (!e && !(e = table_victim_ssd(s->table, UINT64_MAX)))
        return false;
    store_count(s, STORE_EVICTED_SSD, 1);
    leave_ssd(s, e, SSD_REFUSED);
    return true;
}

/* is_durable is read first: if the block is not DURABLE, leaving DRAM ends e. */
bool tier_forget(struct kvstore *s, struct store_entry *e)
{
    bool is_durable = e->ssd == SSD_DURABLE;
    if (e->pins || e->dram == DRAM_FILLING || e->dram == DRAM_LOADING || e->ssd == SSD_QUEUED)
        return false;
    if (e->dram == DRAM_READY) {
        store_event(s, BLOCK_REMOVED, TIER_DRAM, e);
        table_set_dram(s->table, e, DRAM_ABSENT);
    }
    if (is_durable) {
        store_event(s, BLOCK_REMOVED, TIER_SSD, e);
        table_set_ssd(s->table, e, SSD_ABSENT);
    }
    return true;
}

void tier_forget_on_disk(struct kvstore *s, const struct block_key *key)
{
    if (s->ssd)
        ssd_tier_delete(s->ssd, key, true);
}

/* Deletes blocks of at least n_bytes in sum, as far as there are any. */
void tier_make_ssd_room(struct kvstore *s, uint64_t n_bytes)
{
    for (uint64_t done = 0; done < n_bytes && s->ssd && evict_ssd(s); done += ssd_tier_block_bytes(s->ssd))
        ;
}

struct comparison {
    const struct bytes *keys; /* on disk */
    struct bytes lost;        /* keys that the table has as DURABLE and the disk does not have */
};

static int compare_keys(const void *a, const void *b)
{
    return memcmp(a, b, BLOCK_KEY_BYTES);
}

/* A block that is being read is left out: the read fails, and reports it. */
static void note_lost(void *user, const struct store_entry *e)
{
    struct comparison *c = user;
    size_t n = c->keys->len / BLOCK_KEY_BYTES;
    if (e->ssd == SSD_DURABLE && e->dram != DRAM_LOADING &&
        (!n || !bsearch(e->key.b, c->keys->data, n, BLOCK_KEY_BYTES, compare_keys)))
        bytes_append(&c->lost, e->key.b, BLOCK_KEY_BYTES);
}

static struct store_entry *find_at(const struct kvstore *s, const struct bytes *keys, size_t at,
                                   struct block_key *key_out)
{
    memcpy(key_out->b, keys->data + at, BLOCK_KEY_BYTES);
    return table_find(s->table, key_out);
}

/* After an error of the disk: corrects the table by the list of what is on disk. Unknown blocks are
 * deleted from disk; DURABLE ones that are missing leave the table. */
void tier_compare_ssd(struct kvstore *s, const struct bytes *keys)
{
    struct comparison c = {.keys = keys};
    struct block_key key;
    uint64_t n_orphans = 0;
    for (size_t i = 0; i < keys->len; i += BLOCK_KEY_BYTES) {
        const struct store_entry *e = find_at(s, keys, i, &key);
        /* If the put of a QUEUED block fails, the tier is in doubt again and another list comes. */
        if (e && (e->ssd == SSD_DURABLE || e->ssd == SSD_QUEUED))
            continue;
        ssd_tier_delete(s->ssd, &key, false);
        n_orphans++;
    }
    table_each(s->table, note_lost, &c);
    for (size_t i = 0; i < c.lost.len; i += BLOCK_KEY_BYTES)
        leave_ssd(s, find_at(s, &c.lost, i, &key), SSD_ABSENT);
    uint64_t n_lost = c.lost.len / BLOCK_KEY_BYTES;
    log_info(&s->log, "blocks on SSD compared blocks=%llu orphans=%llu lost=%llu",
             (unsigned long long)(keys->len / BLOCK_KEY_BYTES), (unsigned long long)n_orphans,
             (unsigned long long)n_lost);
    store_count(s, STORE_SSD_ORPHANS, n_orphans);
    store_count(s, STORE_SSD_LOST, n_lost);
    bytes_free(&c.lost);
    ssd_tier_compared(s->ssd);
    tier_write_dirty(s);
}

/* Needs a free slot. tier_loaded comes when the read has ended. */
void tier_start_load(struct kvstore *s, struct store_entry *e)
{
    table_set_dram(s->table, e, DRAM_LOADING);
    e->load_ns = clock_now(&s->clock);
    ssd_tier_read(s->ssd, &e->key, tier_address(s, e), e);
}

bool tier_is_corrupt(enum td_status status)
{
    return status == TD_ERR_CORRUPT || status == TD_ERR_CHECKSUM || status == TD_ERR_VERSION ||
           status == TD_ERR_NOT_FOUND;
}

bool tier_is_slow(const struct kvstore *s)
{
    return s->ssd && ssd_tier_is_slow(s->ssd);
}

void tier_probe(struct kvstore *s, struct store_entry *e)
{
    uint64_t now = clock_now(&s->clock);
    if (e->dram != DRAM_ABSENT || e->ssd != SSD_DURABLE || now - s->probed_ns < PROBE_EVERY_NS ||
        !tier_make_slot(s, e->tenant, false))
        return;
    s->probed_ns = now;
    tier_start_load(s, e);
}

/* After TD_NOT_YET the block may still be on SSD and stays DURABLE. A block with any other error is
 * deleted, so that it is wanted when it is offered again. */
void tier_loaded(struct kvstore *s, struct store_entry *e, enum td_status status)
{
    s->must_advance = true;
    e->load_status = status;
    if (!status) {
        metrics_observe_ns(s->counters, STORE_LOAD_SECONDS, clock_now(&s->clock) - e->load_ns);
        table_set_dram(s->table, e, DRAM_READY);
        store_event(s, BLOCK_ADDED, TIER_DRAM, e);
    } else {
        table_set_dram(s->table, e, DRAM_ABSENT); /* does not end e, which is DURABLE */
        if (status != TD_ERR_CANCELLED && status != TD_NOT_YET) {
            store_count(s, tier_is_corrupt(status) ? STORE_SSD_CORRUPT : STORE_SSD_READ_ERRORS, 1);
            leave_ssd(s, e, SSD_ABSENT);
        }
    }
}

void tier_written(struct kvstore *s, struct store_entry *e, enum td_status status)
{
    if (!status) {
        store_count(s, STORE_SSD_WRITES, 1);
        store_event(s, BLOCK_ADDED, TIER_SSD, e);
        table_set_ssd(s->table, e, SSD_DURABLE);
    } else {
        if (status != TD_ERR_CANCELLED)
            store_count(s, status == TD_ERR_NO_SPACE ? STORE_SSD_WRITE_FULL : STORE_SSD_WRITE_ERRORS, 1);
        table_set_ssd(s->table, e, SSD_REFUSED);
    }
    tier_write_dirty(s);
}

/* Gives dirty blocks to the write queue until it is full. Makes room by the count of blocks, so that the
 * directory rarely grows beyond its limit. */
void tier_write_dirty(struct kvstore *s)
{
    for (struct store_entry *e; s->ssd && (e = table_first_dirty(s->table));) {
        const struct ssd_put put = {e->key, e->chain_index, e->tenant, tier_address(s, e), e};
        if (ssd_tier_put(s->ssd, &put) == TD_BUSY)
            break;
        table_set_ssd(s->table, e, SSD_QUEUED);
        struct table_audit a = table_audit(s->table);
        /* If the disk takes no writes, evicting makes no room. */
        bool is_writable = ssd_tier_stats(s->ssd).is_writable;
        if (is_writable && a.n_ssd + a.n_queued > ssd_tier_max_blocks(s->ssd))
            evict_ssd(s);
    }
}

bool tier_is_settled(const struct kvstore *s)
{
    return !s->ssd || (!table_first_dirty(s->table) && !table_audit(s->table).n_queued);
}
