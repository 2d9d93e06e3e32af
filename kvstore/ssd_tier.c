/*
 * Writing. The writer has a mailbox. Single blocks go through the write-ahead log and are durable at once.
 * When many blocks wait, they are written as a batch without the log, which halves the bytes written: a batch
 * is durable, and answered, when it is flushed, which happens at a batch's size or when nothing more waits.
 *
 * Reading. The readers take from one list. A reader notes when it began, so that any thread can see that it
 * is late: a thread that hangs in the kernel can't report that itself.
 *
 * The rate is a token bucket of a tenth of a second: bursts are written evenly. RocksDB's flushes behind it
 * keep to the same rate and run at a lower priority, because they are what readers feel (docs/store.md).
 *
 * After an error. A write, delete or flush that failed may have been done all the same, or may be done later
 * from what RocksDB keeps in memory; and a block that was to be deleted is still there. So after any failure
 * the tier is in doubt: the database is opened anew and listed, and the owner corrects its table (on_listed).
 * This also repeats deletes that failed, because the owner deletes what it does not know. Rejected: a list of
 * what failed. It would have to know what a failed flush wrote, and would grow as long as the disk is full.
 *
 * Injected faults act here, between a block and the database, so that everything that protects from them is
 * above or below.
 */
#include "kvstore/ssd_tier.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "base/queue.h"
#include "base/thread.h"
#include "kvstore/forgotten.h"
#include "kvstore/ssd.h"

enum { IDLE_MS = 500, COLLECTING_MS = 20, READERS_MAX = 64, HUGE_BYTES = 2 << 20 };
static const uint64_t REOPEN_EVERY_NS = 3 * NS_PER_S;
static const uint64_t WATCH_EVERY_NS = NS_PER_S;
static const uint64_t LEARN_EVERY_NS = 20 * NS_PER_MS;
static const uint64_t BUCKET_NS = NS_PER_S / 10;

enum op_kind { OP_PUT, OP_DELETE, OP_COMPARED, OP_STOP };

struct ssd_op { /* a request to the writer */
    struct mail mail;
    enum op_kind kind;
    struct ssd_put put; /* OP_DELETE uses only the key */
    /* OP_DELETE: see ssd_tier_delete; is_all: key NULL. */
    bool for_good, is_all;
    struct block_header header;
    const void *payload; /* bytes to be stored; they belong to the codec until its next encode */
};

struct read { /* a request to the readers */
    struct read *next;
    struct block_key key;
    void *page, *token;
};

struct ssd_reader {
    struct ssd_tier *tier;
    pthread_t thread;
    _Atomic uint64_t began_ns; /* when its read began, 0: it reads nothing; other threads look at it */
    void *buffer;              /* buffer_bytes, part of the tier's buffers; NULL: none */
    struct codec *codec;
};

/* A block that was listed at opening. is_ours: it has our layout and can be served. */
struct found {
    struct block_header header;
    bool is_ours;
};

struct listing {
    struct ssd_tier *tier;
    struct found *found;
    uint64_t n, cap;
    struct td_error why; /* the first block of another layout or with a damaged header: what is wrong with it */
};

struct ssd_tier {
    struct ssd_tier_config config;
    struct ssd *db;
    uint64_t page_bytes, buffer_bytes, buffers_bytes;
    /* One mapping for all readers, so that it gets huge pages. NULL: no memory; reads go through RocksDB. */
    void *buffers;

    struct mailbox ops;
    pthread_t writer;
    struct codec *codec;           /* used by the writer only */
    struct forgotten *forgotten;   /* used by the writer only, once it runs */
    bool is_writer_up, is_changed; /* is_changed: the directory changed since it was tidied */
    bool has_more;                 /* there are more places to learn */
    bool has_failed;               /* a write, delete or flush failed: the database must be opened anew */
    bool is_moved;                 /* another directory has the name, and `forgotten` is not of it */
    uint32_t n_compared_due;       /* on_listed calls without their ssd_tier_compared yet */
    /* reclaims: rounds of collecting when places were last learned, at learned_ns. */
    uint64_t reclaims, learned_ns;
    uint64_t reopened_ns, watched_ns; /* when it was last tried, and when the directory was looked for */
    uint64_t bucket_bytes, bucket_ns; /* bytes that may be written now, as of bucket_ns */
    struct ssd_op *unsynced;          /* puts that are written but not durable yet, newest first */
    uint64_t unsynced_bytes;

    /* Guards the list of reads: several threads take from it, and a mailbox has one reader. */
    pthread_mutex_t lock;
    pthread_cond_t read_wake, nap_wake;
    struct read *reads, **reads_tail;
    bool is_stopping;
    struct ssd_reader readers[READERS_MAX];
    uint32_t n_readers;

    _Atomic uint64_t stored_bytes; /* running mean of the stored size of recent blocks; 0: none yet */
    _Atomic uint64_t queued_bytes, written_bytes, read_bytes, write_errors, read_errors, dropped_layout, reopens;
    _Atomic bool is_in_doubt; /* disk and owner may disagree */
    _Atomic bool is_writable, is_cancelling, is_hurried, is_slow, is_probing;
};

/* Sleeps, but wakes up when the tier is closed. */
static void nap(struct ssd_tier *t, uint64_t ns)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    ns += (uint64_t)until.tv_nsec;
    until.tv_sec += (time_t)(ns / NS_PER_S);
    until.tv_nsec = (long)(ns % NS_PER_S);
    pthread_mutex_lock(&t->lock);
    while (!t->is_stopping && !pthread_cond_timedwait(&t->nap_wake, &t->lock, &until))
        ;
    pthread_mutex_unlock(&t->lock);
}

/* ----------------------------------------------------------------- writing */

static void note_stored(struct ssd_tier *t, uint64_t n_bytes)
{
    uint64_t mean = atomic_load(&t->stored_bytes);
    atomic_store(&t->stored_bytes, mean ? (63 * mean + n_bytes + 63) / 64 : n_bytes);
}

/* From here until ssd_tier_compared: disk and owner may disagree, and the writer opens the database anew. */
static void doubt(struct ssd_tier *t)
{
    t->has_failed = true;
    atomic_store(&t->is_in_doubt, true);
}

static void encode(struct ssd_tier *t, struct ssd_op *op)
{
    const struct ssd_put *put = &op->put;
    size_t n;
    enum block_codec codec = codec_encode(t->codec, t->config.codec, put->page, &op->payload, &n);
    op->header = (struct block_header){.key = put->key,
                                       .layout = *t->config.layout,
                                       .n_tokens = t->config.layout->page_tokens,
                                       .index = put->chain_index,
                                       .tenant = put->tenant,
                                       .codec = codec,
                                       .payload_bytes = n,
                                       .checksum = block_checksum(&put->key, put->chain_index, op->payload, n)};
}

/* Carries out an injected fault: the value that is written does not match its header, or the put fails or
 * lies. */
static enum td_status put_faulty(struct ssd_tier *t, const struct ssd_op *op, const uint8_t header[BLOCK_HEADER_BYTES],
                                 bool is_logged, const struct fault *fault)
{
    struct block_key key = op->put.key, other = key;
    struct bytes value = {0};
    uint64_t len = op->header.payload_bytes;
    enum td_status status = TD_OK;
    switch (fault->kind) {
    case FAULT_FAIL:
        return TD_ERR_IO;
    case FAULT_FULL:
        return TD_ERR_NO_SPACE;
    case FAULT_LIE:
        return TD_OK;
    case FAULT_DUPLICATE:
        fault_flip(fault, other.b, sizeof(other.b));
        status = ssd_put(t->db, &other, header, op->payload, len, is_logged);
        return status ? status : ssd_put(t->db, &key, header, op->payload, len, is_logged);
    case FAULT_TRUNCATE:
        return ssd_put(t->db, &key, header, op->payload, fault->bits % len, is_logged);
    case FAULT_CORRUPT:
        bytes_append(&value, header, BLOCK_HEADER_BYTES);
        bytes_append(&value, op->payload, len);
        fault_flip(fault, value.data, value.len);
        status = ssd_put(t->db, &key, (uint8_t *)value.data, value.data + BLOCK_HEADER_BYTES, len, is_logged);
        bytes_free(&value);
        return status;
    case FAULT_DELAY:
        nap(t, fault->delay_ns);
        break;
    default:
        break;
    }
    return ssd_put(t->db, &key, header, op->payload, len, is_logged);
}

static enum td_status put_block(struct ssd_tier *t, const struct ssd_op *op, bool is_logged)
{
    uint8_t header[BLOCK_HEADER_BYTES];
    block_header_encode(&op->header, header);
    struct fault fault = faults_draw(t->config.faults, FAULT_DISK_PUT);
    if (fault.kind != FAULT_NONE)
        return put_faulty(t, op, header, is_logged, &fault);
    return ssd_put(t->db, &op->put.key, header, op->payload, op->header.payload_bytes, is_logged);
}

/* Draws an injected fault; TD_OK: the operation may go on. */
static enum td_status meet_fault(struct ssd_tier *t, enum fault_site site)
{
    struct fault fault = faults_draw(t->config.faults, site);
    if (fault.kind == FAULT_DELAY)
        nap(t, fault.delay_ns);
    return fault.kind == FAULT_FAIL ? TD_ERR_IO : fault.kind == FAULT_FULL ? TD_ERR_NO_SPACE : TD_OK;
}

/* Waits until the bucket holds n_bytes, and takes them. */
static void take_tokens(struct ssd_tier *t, uint64_t n_bytes)
{
    uint64_t rate = t->config.write_bytes_per_s, depth = rate / (NS_PER_S / BUCKET_NS);
    if (!rate)
        return;
    if (depth < t->page_bytes)
        depth = t->page_bytes;
    while (!atomic_load(&t->is_cancelling) && !atomic_load(&t->is_hurried)) {
        uint64_t now = clock_now(t->config.clock);
        double add = (double)(now - t->bucket_ns) * 1e-9 * (double)rate;
        t->bucket_bytes = (double)(depth - t->bucket_bytes) < add ? depth : t->bucket_bytes + (uint64_t)add;
        t->bucket_ns = now;
        if (t->bucket_bytes >= n_bytes)
            break;
        nap(t, (uint64_t)((double)(n_bytes - t->bucket_bytes) / (double)rate * 1e9) + NS_PER_MS);
    }
    t->bucket_bytes -= t->bucket_bytes < n_bytes ? t->bucket_bytes : n_bytes;
}

/* Collecting room moves values and deletes files whose places are known, so places are learned while it
 * goes on. */
static void learn_moved(struct ssd_tier *t)
{
    uint64_t reclaims = ssd_reclaims(t->db), now = clock_now(t->config.clock);
    if (reclaims == t->reclaims && (!ssd_is_collecting(t->db) || now - t->learned_ns < LEARN_EVERY_NS))
        return;
    t->reclaims = reclaims;
    ssd_learn(t->db);
    t->learned_ns = clock_now(t->config.clock);
}

/* True if `need` bytes fit. Waits while room is being collected, unless need is 0; asks the owner to
 * delete if collecting did not help. */
static bool make_room(struct ssd_tier *t, uint64_t need)
{
    for (;;) {
        uint64_t over;
        enum td_status status = ssd_make_room(t->db, need, &over);
        learn_moved(t);
        if (over)
            t->config.callbacks.on_over(t->config.callbacks.user, over);
        if (status != TD_NOT_YET || !need || atomic_load(&t->is_cancelling))
            return status == TD_OK;
    }
}

static void note_write(struct ssd_tier *t, enum td_status status)
{
    bool is_ok = status == TD_OK;
    if (!is_ok)
        atomic_fetch_add(&t->write_errors, 1);
    if (atomic_exchange(&t->is_writable, is_ok) != is_ok)
        log_warn(t->config.log, "SSD tier %s status=%s", is_ok ? "takes writes again" : "doesn't take writes",
                 td_status_name(status));
}

static void answer(struct ssd_tier *t, struct ssd_op *op, enum td_status status)
{
    if (status == TD_OK)
        atomic_fetch_add(&t->written_bytes, t->page_bytes);
    atomic_fetch_sub(&t->queued_bytes, t->page_bytes);
    t->config.callbacks.on_put(t->config.callbacks.user, op->put.token, status);
    free(op);
}

/* Answers the whole batch: flushed with it, or lost with it. */
static void answer_batch(struct ssd_tier *t, enum td_status status)
{
    struct ssd_op *op = t->unsynced;
    t->unsynced = NULL;
    t->unsynced_bytes = 0;
    for (struct ssd_op *next; op; op = next) {
        next = (struct ssd_op *)op->mail.next;
        answer(t, op, status);
    }
}

/* Flushes the batch and answers it. Learns the places of the new files, so that readers find them. */
static void sync_batch(struct ssd_tier *t)
{
    if (!t->unsynced)
        return;
    enum td_status status = meet_fault(t, FAULT_DISK_FLUSH);
    if (!status)
        status = ssd_sync(t->db);
    if (status)
        doubt(t);
    note_write(t, status);
    answer_batch(t, status);
    ssd_learn(t->db);
}

static bool add_key(void *user, const struct block_key *key, const void *header, size_t len_bytes)
{
    (void)header, (void)len_bytes;
    bytes_append(user, key->b, BLOCK_KEY_BYTES);
    return true;
}

/* Gives the owner the list of blocks. has_failed is cleared before the callback: what fails after this
 * needs another list. */
static void list_blocks(struct ssd_tier *t)
{
    struct bytes keys = {0};
    struct td_error e = {""};
    if (ssd_each(t->db, add_key, &keys, &e)) {
        log_error(t->config.log, "SSD tier can't be listed, and is opened anew in %d s: %s",
                  (int)(REOPEN_EVERY_NS / NS_PER_S), e.text);
        bytes_free(&keys);
        return;
    }
    t->has_failed = false;
    t->n_compared_due++;
    t->config.callbacks.on_listed(t->config.callbacks.user, &keys);
}

/* The deletes that resulted from the list came before this in the queue, so they are done, or have failed
 * (has_failed). */
static void note_compared(struct ssd_tier *t)
{
    t->n_compared_due--;
    if (!t->n_compared_due && !t->has_failed)
        atomic_store(&t->is_in_doubt, false);
}

static enum td_status delete_now(struct ssd_tier *t, const struct block_key *key)
{
    enum td_status status = meet_fault(t, FAULT_DISK_DELETE);
    return status ? status : ssd_delete(t->db, key);
}

/* Deletes the blocks that were forgotten while the disk took no deletes. */
static enum td_status work_off(struct ssd_tier *t)
{
    struct bytes keys = {0};
    struct td_error e;
    uint32_t n;
    const struct block_key *some = forgotten_keys(t->forgotten, &n);
    enum td_status status = TD_OK;
    if (forgotten_all(t->forgotten))
        status = ssd_each(t->db, add_key, &keys, &e);
    else
        bytes_append(&keys, some, n * sizeof(*some));
    for (size_t i = 0; i < keys.len && !status; i += BLOCK_KEY_BYTES) {
        struct block_key key;
        memcpy(key.b, keys.data + i, BLOCK_KEY_BYTES);
        status = delete_now(t, &key);
    }
    bytes_free(&keys);
    if (!status)
        forgotten_clear(t->forgotten);
    return status;
}

/* Opens the database anew and lists it. Order: first the batch is ended, because the new database does not
 * have it; then forgotten blocks are deleted, so that they are not in the list. */
static void reopen(struct ssd_tier *t)
{
    uint64_t now = clock_now(t->config.clock);
    struct td_error e = {""};
    if (t->reopened_ns && now - t->reopened_ns < REOPEN_EVERY_NS)
        return;
    t->reopened_ns = now;
    atomic_fetch_add(&t->reopens, 1);
    if (ssd_is_open(t->db))
        sync_batch(t);
    answer_batch(t, TD_ERR_IO); /* if it was not flushed just now, it is lost */
    doubt(t);
    t->is_moved |= !ssd_is_there(t->db);
    if (ssd_reopen(t->db, &e)) {
        log_error(t->config.log, "SSD tier can't be opened again for now: %s", e.text);
        return;
    }
    log_warn(t->config.log, "SSD tier opened again after an error");
    if (t->is_moved) {
        forgotten_close(t->forgotten);
        t->forgotten = forgotten_open(t->config.dir, t->config.log);
        t->is_moved = false;
    }
    t->is_changed = true;
    if (!work_off(t))
        list_blocks(t);
}

static bool must_reopen(const struct ssd_tier *t)
{
    return t->has_failed || !ssd_is_open(t->db);
}

/*
 * Sees whether the directory is still there. Somebody may remove or replace it, or mount something over it;
 * RocksDB goes on writing to the files that it has open, and what it calls durable would be lost.
 */
static void watch(struct ssd_tier *t)
{
    uint64_t now = clock_now(t->config.clock);
    if (must_reopen(t) || now - t->watched_ns < WATCH_EVERY_NS)
        return;
    t->watched_ns = now;
    if (ssd_is_there(t->db))
        return;
    log_error(t->config.log, "the store's directory was removed or replaced, and is begun anew dir=%s", t->config.dir);
    doubt(t);
}

static enum td_status write_block(struct ssd_tier *t, const struct ssd_op *op, bool is_logged)
{
    watch(t);
    if (must_reopen(t))
        reopen(t);
    if (!ssd_is_open(t->db) || forgotten_has(t->forgotten, &op->put.key))
        return TD_ERR_NO_SPACE; /* or a worse error, which must_reopen deals with */
    t->is_changed = true;
    if (!make_room(t, op->header.payload_bytes + BLOCK_HEADER_BYTES)) {
        /* A block of this key may be in a list that the owner has not compared. The owner skips it there,
         * because it is QUEUED; so it is deleted here. */
        if (t->n_compared_due && delete_now(t, &op->put.key))
            doubt(t);
        return TD_ERR_NO_SPACE;
    }
    enum td_status status = put_block(t, op, is_logged);
    if (!status)
        note_stored(t, op->header.payload_bytes);
    else
        doubt(t);
    return status;
}

/* Whether there may be something to delete: now, or later when RocksDB repeats what failed. */
static bool may_be_there(struct ssd_tier *t, const struct ssd_op *op)
{
    if (atomic_load(&t->is_in_doubt) || !ssd_is_open(t->db))
        return true;
    return !op->is_all && ssd_find(t->db, &op->put.key) != TD_ERR_NOT_FOUND;
}

static void run_delete(struct ssd_tier *t, const struct ssd_op *op)
{
    if (op->for_good && !may_be_there(t, op))
        return;
    t->is_changed = true;
    if (!op->is_all && !delete_now(t, &op->put.key))
        return;
    if (op->for_good)
        forgotten_add(t->forgotten, op->is_all ? NULL : &op->put.key);
    atomic_fetch_add(&t->write_errors, !op->is_all);
    doubt(t);
}

/* Owns op. A put is part of a batch (not logged) if a quarter of a batch is waiting, or if a batch has
 * begun. */
static void run_put(struct ssd_tier *t, struct ssd_op *op)
{
    bool is_logged = !t->unsynced && atomic_load(&t->queued_bytes) < ssd_batch_bytes(t->db) / 4;
    if (!atomic_load(&t->is_cancelling)) {
        encode(t, op);
        take_tokens(t, op->header.payload_bytes);
    }
    if (atomic_load(&t->is_cancelling)) {
        answer(t, op, TD_ERR_CANCELLED);
        return;
    }
    enum td_status status = write_block(t, op, is_logged);
    if (status || is_logged) {
        note_write(t, status);
        answer(t, op, status);
        return;
    }
    op->mail.next = t->unsynced ? &t->unsynced->mail : NULL;
    t->unsynced = op;
    t->unsynced_bytes += op->header.payload_bytes;
    if (t->unsynced_bytes >= ssd_batch_bytes(t->db))
        sync_batch(t);
}

/* Called when there is nothing to do: RocksDB writes for a while after the last change, and that may
 * exceed the limit. */
static void tidy(struct ssd_tier *t)
{
    t->has_more = !ssd_learn(t->db);
    t->is_changed = ssd_tidy(t->db) || t->has_more;
    if (must_reopen(t))
        reopen(t);
    else
        make_room(t, 0);
}

static void *write_loop(void *arg)
{
    struct ssd_tier *t = arg;
    ssd_step_back();
    for (;;) {
        watch(t);
        struct mail *m = mailbox_take(&t->ops);
        if (!m)
            sync_batch(t);
        if (!m && !(m = mailbox_take(&t->ops))) {
            if (t->is_changed || must_reopen(t))
                tidy(t);
            mailbox_wait(&t->ops, t->has_more ? 1 : ssd_is_collecting(t->db) ? COLLECTING_MS : IDLE_MS);
        }
        for (struct mail *next; m; m = next) {
            next = m->next;
            struct ssd_op *op = (struct ssd_op *)m; /* mail is the first member of struct ssd_op */
            enum op_kind kind = op->kind;
            if (kind == OP_PUT) {
                run_put(t, op);
                continue;
            }
            if (kind == OP_DELETE)
                run_delete(t, op);
            if (kind == OP_COMPARED)
                note_compared(t);
            free(op);
            if (kind == OP_STOP) {
                sync_batch(t);
                return NULL; /* no mail is pushed after OP_STOP */
            }
        }
    }
}

/* ----------------------------------------------------------------- reading */

static void note_pace(struct ssd_tier *t, bool is_slow)
{
    if (atomic_exchange(&t->is_slow, is_slow) != is_slow)
        log_warn(t->config.log, "SSD tier %s", is_slow ? "is slow: only probes are read" : "reads in time again");
}

/* Readers whose read is older than the deadline. */
static uint32_t count_overdue(const struct ssd_tier *t)
{
    uint32_t n = 0;
    uint64_t now = clock_now(t->config.clock);
    for (uint32_t i = 0; t->config.read_deadline_ns && i < t->n_readers; i++) {
        uint64_t began = atomic_load(&t->readers[i].began_ns);
        n += began && now > began + t->config.read_deadline_ns;
    }
    return n;
}

/* Also checks reads that have not ended, so a reader that hangs makes the tier slow. */
bool ssd_tier_is_slow(struct ssd_tier *t)
{
    if (count_overdue(t))
        note_pace(t, true);
    return atomic_load(&t->is_slow);
}

/* Verifies and decodes a stored value into the page that was asked for. */
static enum td_status land(struct ssd_reader *self, const struct read *r, const void *value, size_t len)
{
    struct block_header h;
    return codec_take(self->codec, value, len, &r->key, r->page, &h);
}

static enum td_status get_faulty(struct ssd_reader *self, const struct read *r, const struct fault *fault)
{
    struct ssd_tier *t = self->tier;
    struct block_key key = r->key;
    struct ssd_value v;
    if (fault->kind == FAULT_DELAY)
        nap(t, fault->delay_ns);
    else if (fault->kind == FAULT_FAIL)
        return TD_ERR_IO;
    else if (fault->kind == FAULT_LIE && ssd_neighbour(t->db, &r->key, &key))
        return TD_ERR_NOT_FOUND;
    enum td_status status = ssd_get(t->db, &key, &v);
    if (status)
        return status;
    uint8_t *copy = mem_dup(v.data, v.len_bytes);
    if (fault->kind == FAULT_CORRUPT)
        fault_flip(fault, copy, v.len_bytes);
    status = land(self, r, copy, fault->kind == FAULT_TRUNCATE ? fault->bits % v.len_bytes : v.len_bytes);
    free(copy);
    ssd_release(t->db, &v);
    return status;
}

/* Reads straight from the blob file if the place is known. A value that does not verify there may be an
 * old copy, so RocksDB is asked then; its answer counts. */
static enum td_status get_block(struct ssd_reader *self, const struct read *r)
{
    struct ssd_tier *t = self->tier;
    struct ssd_value v;
    size_t len;
    struct fault fault = faults_draw(t->config.faults, FAULT_DISK_READ);
    if (fault.kind != FAULT_NONE)
        return get_faulty(self, r, &fault);
    const void *value;
    enum td_status status =
        self->buffer ? ssd_get_into(t->db, &r->key, self->buffer, t->buffer_bytes, &value, &len) : TD_NOT_YET;
    if (status == TD_ERR_NOT_FOUND || (!status && !land(self, r, value, len)))
        return status;
    status = ssd_get(t->db, &r->key, &v);
    if (status)
        return status;
    status = land(self, r, v.data, v.len_bytes);
    ssd_release(t->db, &v);
    return status;
}

/* While the tier is slow, one reader at a time probes it; the other reads end with TD_NOT_YET. */
static enum td_status read_in_time(struct ssd_reader *self, const struct read *r)
{
    struct ssd_tier *t = self->tier;
    bool is_probe = ssd_tier_is_slow(t);
    if (is_probe && atomic_exchange(&t->is_probing, true))
        return TD_NOT_YET;
    uint64_t began = clock_now(t->config.clock);
    atomic_store(&self->began_ns, began);
    enum td_status status = get_block(self, r);
    atomic_store(&self->began_ns, 0);
    if (t->config.read_deadline_ns)
        note_pace(t, clock_now(t->config.clock) - began > t->config.read_deadline_ns || count_overdue(t));
    if (is_probe)
        atomic_store(&t->is_probing, false);
    return status;
}

static void run_read(struct ssd_reader *self, const struct read *r)
{
    struct ssd_tier *t = self->tier;
    enum td_status status = atomic_load(&t->is_cancelling) ? TD_ERR_CANCELLED : read_in_time(self, r);
    if (!status)
        atomic_fetch_add(&t->read_bytes, t->page_bytes);
    else if (status != TD_ERR_CANCELLED && status != TD_NOT_YET) {
        char hex[33];
        block_key_hex(&r->key, hex);
        atomic_fetch_add(&t->read_errors, 1);
        log_warn(t->config.log, "block on SSD can't be served key=%s status=%s", hex, td_status_name(status));
    }
    t->config.callbacks.on_read(t->config.callbacks.user, r->token, status);
}

static void *read_loop(void *arg)
{
    struct ssd_reader *self = arg;
    struct ssd_tier *t = self->tier;
    for (;;) {
        pthread_mutex_lock(&t->lock);
        while (!t->reads && !t->is_stopping)
            pthread_cond_wait(&t->read_wake, &t->lock);
        struct read *r = t->reads;
        if (r && !(t->reads = r->next))
            t->reads_tail = &t->reads;
        pthread_mutex_unlock(&t->lock);
        if (!r)
            break;
        run_read(self, r);
        free(r);
    }
    return NULL;
}

/* ------------------------------------------------------------- open, close */

static bool note_found(void *user, const struct block_key *key, const void *header, size_t len_bytes)
{
    struct listing *l = user;
    struct block_header h = {.index = 0};
    struct td_error why = {"header damaged"};
    /* It is deleted later: the disk takes no deletes now. */
    if (forgotten_has(l->tier->forgotten, key))
        return true;
    bool is_ours = !block_header_decode(header, len_bytes, &h) && block_key_equal(&h.key, key) &&
                   !kv_layout_match(l->tier->config.layout, &h.layout, &why);
    if (!is_ours && !l->why.text[0])
        l->why = why;
    l->found = MEM_ROOM(l->found, l->n, l->cap, 256);
    h.key = *key;
    l->found[l->n++] = (struct found){h, is_ours};
    return true;
}

/* Tells the owner of the blocks found, and deletes those that can't be served: both of their records. */
static void take_found(struct ssd_tier *t, const struct listing *l)
{
    for (uint64_t i = 0; i < l->n; i++) {
        const struct found *f = &l->found[i];
        if (f->is_ours) {
            note_stored(t, f->header.payload_bytes);
            t->config.callbacks.on_found(t->config.callbacks.user, &f->header);
            continue;
        }
        atomic_fetch_add(&t->dropped_layout, 1);
        if (ssd_delete(t->db, &f->header.key))
            doubt(t);
    }
    uint64_t n_dropped = atomic_load(&t->dropped_layout);
    if (n_dropped)
        log_warn(t->config.log, "blocks on SSD that can't be served are deleted dir=%s n=%llu why='%s'", t->config.dir,
                 (unsigned long long)n_dropped, l->why.text);
}

static void start_threads(struct ssd_tier *t)
{
    uint32_t n = t->config.n_readers < READERS_MAX ? t->config.n_readers : READERS_MAX;
    t->buffers_bytes = ((n ? n : 1) * t->buffer_bytes + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES;
    if (mem_map(t->buffers_bytes, &t->buffers))
        t->buffers = NULL;
    t->codec = codec_open(t->config.layout);
    t->writer = thread_start("ssd-write", write_loop, t);
    t->is_writer_up = true;
    for (char name[16]; t->n_readers < (n ? n : 1); t->n_readers++) {
        struct ssd_reader *r = &t->readers[t->n_readers];
        snprintf(name, sizeof(name), "ssd-read-%u", t->n_readers);
        r->tier = t;
        r->codec = codec_open(t->config.layout);
        r->buffer = t->buffers ? (uint8_t *)t->buffers + t->n_readers * t->buffer_bytes : NULL;
        r->thread = thread_start(name, read_loop, r);
    }
}

/* Forgotten blocks are deleted before the database is listed, so that they do not come back. */
enum td_status ssd_tier_open(const struct ssd_tier_config *config, struct ssd_tier **out, struct td_error *error_out)
{
    struct ssd_tier *t = mem_zalloc(sizeof(*t));
    struct listing l = {.tier = t};
    struct td_error why;
    t->config = *config;
    t->page_bytes = kv_layout_page_bytes(config->layout);
    t->buffer_bytes = ssd_buffer_bytes(t->page_bytes);
    t->reads_tail = &t->reads;
    t->is_changed = true; /* places of values must be learned */
    t->is_writable = true;
    mailbox_init(&t->ops);
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->read_wake, NULL);
    pthread_cond_init(&t->nap_wake, NULL);
    const struct ssd_config db = {.dir = config->dir,
                                  .mode = SSD_SERVE,
                                  .capacity_bytes = config->capacity_bytes,
                                  .background_bytes_per_s = config->write_bytes_per_s,
                                  .clock = config->clock,
                                  .log = config->log};
    enum td_status status = ssd_open(&db, &t->db, error_out);
    if (!status) {
        t->forgotten = forgotten_open(config->dir, config->log);
        if (work_off(t))
            doubt(t);
    }
    if (!status && ssd_each(t->db, note_found, &l, &why)) {
        l.n = 0;
        status = ssd_set_aside(t->db, why.text, error_out);
    }
    if (!status) {
        take_found(t, &l);
        start_threads(t);
        *out = t;
    } else {
        ssd_tier_close(t);
    }
    free(l.found);
    return status;
}

/* OP_STOP is the writer's last mail. Readers end when the list is empty: each read that is queued ends
 * with TD_ERR_CANCELLED. */
static void stop_threads(struct ssd_tier *t)
{
    atomic_store(&t->is_cancelling, true);
    pthread_mutex_lock(&t->lock);
    t->is_stopping = true;
    pthread_cond_broadcast(&t->read_wake);
    pthread_cond_broadcast(&t->nap_wake);
    pthread_mutex_unlock(&t->lock);
    if (t->is_writer_up) {
        struct ssd_op *stop = mem_zalloc(sizeof(*stop));
        stop->kind = OP_STOP;
        mailbox_push(&t->ops, &stop->mail);
        pthread_join(t->writer, NULL);
    }
    for (uint32_t i = 0; i < t->n_readers; i++) {
        pthread_join(t->readers[i].thread, NULL);
        codec_close(t->readers[i].codec);
    }
    codec_close(t->codec);
}

void ssd_tier_close(struct ssd_tier *t)
{
    if (!t)
        return;
    stop_threads(t);
    mem_unmap(t->buffers, t->buffers_bytes);
    ssd_close(t->db);
    forgotten_close(t->forgotten);
    mailbox_fini(&t->ops);
    pthread_mutex_destroy(&t->lock);
    pthread_cond_destroy(&t->read_wake);
    pthread_cond_destroy(&t->nap_wake);
    free(t);
}

/* ------------------------------------------------------------------- calls */

uint64_t ssd_tier_block_bytes(const struct ssd_tier *t)
{
    uint64_t stored = atomic_load(&t->stored_bytes);
    /* Both headers, and RocksDB's own bytes per record. */
    return (stored ? stored : t->page_bytes) + 4 * BLOCK_HEADER_BYTES;
}

uint64_t ssd_tier_max_blocks(const struct ssd_tier *t)
{
    return t->config.capacity_bytes / 8 * 7 / ssd_tier_block_bytes(t);
}

/* The check of the queue is not atomic with the addition: one thread puts. */
enum td_status ssd_tier_put(struct ssd_tier *t, const struct ssd_put *put)
{
    uint64_t queued = atomic_load(&t->queued_bytes);
    if (queued && queued + t->page_bytes > t->config.queue_bytes)
        return TD_BUSY;
    atomic_fetch_add(&t->queued_bytes, t->page_bytes);
    struct ssd_op *op = mem_zalloc(sizeof(*op));
    op->kind = OP_PUT;
    op->put = *put;
    mailbox_push(&t->ops, &op->mail);
    return TD_OK;
}

void ssd_tier_delete(struct ssd_tier *t, const struct block_key *key, bool for_good)
{
    struct ssd_op *op = mem_zalloc(sizeof(*op));
    op->kind = OP_DELETE;
    op->for_good = for_good;
    op->is_all = !key;
    if (key)
        op->put.key = *key;
    mailbox_push(&t->ops, &op->mail);
}

void ssd_tier_compared(struct ssd_tier *t)
{
    struct ssd_op *op = mem_zalloc(sizeof(*op));
    op->kind = OP_COMPARED;
    mailbox_push(&t->ops, &op->mail);
}

void ssd_tier_read(struct ssd_tier *t, const struct block_key *key, void *page, void *token)
{
    struct read *r = mem_zalloc(sizeof(*r));
    *r = (struct read){NULL, *key, page, token};
    pthread_mutex_lock(&t->lock);
    *t->reads_tail = r;
    t->reads_tail = &r->next;
    pthread_cond_signal(&t->read_wake);
    pthread_mutex_unlock(&t->lock);
}

void ssd_tier_hurry(struct ssd_tier *t)
{
    atomic_store(&t->is_hurried, true);
}

struct ssd_tier_stats ssd_tier_stats(struct ssd_tier *t)
{
    return (struct ssd_tier_stats){.dir_bytes = ssd_dir_bytes(t->db),
                                   .queued_bytes = atomic_load(&t->queued_bytes),
                                   .written_bytes = atomic_load(&t->written_bytes),
                                   .read_bytes = atomic_load(&t->read_bytes),
                                   .write_errors = atomic_load(&t->write_errors),
                                   .read_errors = atomic_load(&t->read_errors),
                                   .dropped_layout = atomic_load(&t->dropped_layout),
                                   .reclaims = ssd_reclaims(t->db),
                                   .n_places = ssd_places(t->db),
                                   .reopens = atomic_load(&t->reopens),
                                   .was_set_aside = ssd_was_set_aside(t->db),
                                   .is_writable = atomic_load(&t->is_writable),
                                   .is_in_doubt = atomic_load(&t->is_in_doubt),
                                   .is_slow = atomic_load(&t->is_slow)};
}
