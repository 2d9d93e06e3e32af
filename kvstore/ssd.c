/*
 * Who owns what of RocksDB's C API here: options own the table options' filter policy and copy the table options; the
 * database copies the options; a pinned slice holds a version of the database, so it never outlives one read.
 *
 * The database is reached under a read-write lock, because a background error (a corrupt blob met by garbage collection)
 * refuses every write until the database is opened anew, by the writer, while readers are inside: no queue can express that.
 *
 * Rejected: one record a block (RocksDB 7.8 reads blobs while it iterates, so opening would read the whole disk); garbage
 * collection always on (it rewrote 15 % of data that is written once and deleted); checking RocksDB's CRC (a tenth of the
 * speed, and it doesn't prove that the value belongs to the key and the layout); direct I/O for flushes (a file system
 * without it could not be used).
 */
#include "kvstore/ssd.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <rocksdb/c.h>

#include "base/mem.h"
#include "base/queue.h"
#include "base/thread.h"

enum {
    RECORD_KEY_BYTES = 1 + BLOCK_KEY_BYTES,
    MAX_OPEN_FILES = 512,
    N_MEMTABLES = 3,
    IDLE_MS = 500,
    READERS_MAX = 64,
    SLACK = 16
};
static const uint64_t MEMTABLE_MIN = 64 << 10, MEMTABLE_MAX = 128 << 20;
static const uint64_t RESERVE_MAX = 1 << 30;           /* of the file system, left to others */
static const uint64_t RECLAIM_EVERY_NS = NS_PER_S / 5; /* while it gives too little */
static const uint64_t REOPEN_EVERY_NS = 5 * NS_PER_S;

enum op_kind { OP_PUT, OP_DELETE, OP_STOP };

struct op { /* for the writer */
    struct mail mail;
    enum op_kind kind;
    struct block_key key;
    uint32_t chain_index;
    const void *payload;
    void *token;
};

struct read { /* for a reader */
    struct read *next;
    struct block_key key;
    void *page, *token;
};

struct found {
    struct block_key key;
    uint32_t chain_index;
};

struct ssd {
    struct ssd_config config;
    char *db_path, *aside_path;
    int lock_fd;
    uint64_t page_bytes, memtable_bytes;

    pthread_rwlock_t db_lock; /* see the note above */
    rocksdb_t *db;            /* NULL: lost, the writer tries to open it again */
    rocksdb_options_t *options;
    rocksdb_readoptions_t *read_options;
    rocksdb_writeoptions_t *write_options;

    struct mailbox ops;
    pthread_t writer;
    bool is_writer_up, is_changed;                   /* is_changed: the directory, since tidy */
    uint64_t since_bytes, reopened_ns, fruitless_ns; /* fruitless_ns: of the last reclaim, if it gave too little */

    pthread_mutex_t read_lock; /* a list that several threads take from: a mailbox has one reader */
    pthread_cond_t read_wake;
    struct read *reads, **reads_tail;
    bool is_stopping;
    pthread_t readers[READERS_MAX];
    uint32_t n_readers;

    _Atomic uint64_t dir_bytes, queued_bytes, written_bytes, read_bytes, write_errors, read_errors, dropped_layout,
        reclaims, reopens;
    _Atomic bool was_set_aside, is_writable, is_cancelling;
};

/* RocksDB's words to a status; frees them. */
static enum td_status convert_error(char *text)
{
    if (!text)
        return TD_OK;
    enum td_status s = TD_ERR_IO;
    if (strstr(text, "No space left"))
        s = TD_ERR_NO_SPACE;
    else if (!strncmp(text, "Corruption", 10))
        s = TD_ERR_CORRUPT;
    else if (!strncmp(text, "NotFound", 8))
        s = TD_ERR_NOT_FOUND;
    rocksdb_free(text);
    return s;
}

static void record_key(char kind, const struct block_key *key, char out[RECORD_KEY_BYTES])
{
    out[0] = kind;
    memcpy(out + 1, key->b, BLOCK_KEY_BYTES);
}

/* -------------------------------------------------------------- directory */

static void measure(struct ssd *s)
{
    uint64_t sum = 0;
    DIR *d = opendir(s->db_path);
    if (!d)
        return;
    for (struct dirent *e; (e = readdir(d));) {
        struct stat st;
        if (!fstatat(dirfd(d), e->d_name, &st, AT_SYMLINK_NOFOLLOW) && S_ISREG(st.st_mode))
            sum += (uint64_t)st.st_blocks * 512;
    }
    closedir(d);
    atomic_store(&s->dir_bytes, sum);
    s->since_bytes = 0;
}

/* What the directory may measure: as configured, and a reserve of the file system is left free. */
static uint64_t limit_bytes(const struct ssd *s)
{
    struct statvfs v;
    if (statvfs(s->config.dir, &v))
        return s->config.capacity_bytes;
    uint64_t total = (uint64_t)v.f_blocks * v.f_frsize, free_bytes = (uint64_t)v.f_bavail * v.f_frsize;
    uint64_t reserve = total / 20 < RESERVE_MAX ? total / 20 : RESERVE_MAX;
    uint64_t have = atomic_load(&s->dir_bytes) + free_bytes;
    uint64_t possible = have > reserve ? have - reserve : 0;
    return possible < s->config.capacity_bytes ? possible : s->config.capacity_bytes;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *ftw)
{
    (void)st, (void)kind, (void)ftw;
    return remove(path);
}

static enum td_status set_aside(struct ssd *s, const char *why)
{
    nftw(s->aside_path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    if (rename(s->db_path, s->aside_path) && errno != ENOENT)
        return TD_ERR_IO;
    log_error(s->config.log, "blocks on SSD can't be opened: set aside, starting empty path=%s why='%s'", s->aside_path,
              why);
    atomic_store(&s->was_set_aside, true);
    return TD_OK;
}

static enum td_status lock_dir(struct ssd *s, struct td_error *e)
{
    const char *dir = s->config.dir;
    char path[4096];
    if (mkdir(dir, 0700) && errno != EEXIST)
        return td_fail(e, TD_ERR_IO, "--dir %s: %s", dir, strerror(errno));
    snprintf(path, sizeof(path), "%s/lock", dir);
    s->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (s->lock_fd < 0)
        return td_fail(e, TD_ERR_IO, "--dir %s: %s", dir, strerror(errno));
    if (flock(s->lock_fd, LOCK_EX | LOCK_NB))
        return td_fail(e, TD_ERR_REFUSED, "--dir %s: another store uses it", dir);
    return TD_OK;
}

/* ------------------------------------------------------------- open, list */

static void make_options(struct ssd *s)
{
    rocksdb_options_t *o = s->options = rocksdb_options_create();
    rocksdb_block_based_table_options_t *table = rocksdb_block_based_options_create();
    rocksdb_block_based_options_set_filter_policy(table, rocksdb_filterpolicy_create_bloom(10));
    rocksdb_options_set_block_based_table_factory(o, table);
    rocksdb_block_based_options_destroy(table);
    rocksdb_options_set_create_if_missing(o, 1);
    rocksdb_options_set_compression(o, rocksdb_no_compression);
    rocksdb_options_set_enable_blob_files(o, 1);
    rocksdb_options_set_min_blob_size(o, BLOCK_HEADER_BYTES + 1); /* the lists of headers stay out of blob files */
    rocksdb_options_set_blob_file_size(o, s->memtable_bytes);
    rocksdb_options_set_blob_compression_type(o, rocksdb_no_compression);
    rocksdb_options_set_enable_blob_gc(o, 0);
    rocksdb_options_set_blob_gc_age_cutoff(o, 0.25);
    rocksdb_options_set_write_buffer_size(o, s->memtable_bytes);
    rocksdb_options_set_max_write_buffer_number(o, N_MEMTABLES); /* from 4 on it throttles writers to 16 MB/s */
    rocksdb_options_set_max_background_jobs(o, 8);
    rocksdb_options_set_level0_slowdown_writes_trigger(o, 200);
    rocksdb_options_set_level0_stop_writes_trigger(o, 400);
    rocksdb_options_set_max_open_files(o, MAX_OPEN_FILES);
    rocksdb_options_set_wal_recovery_mode(o, rocksdb_point_in_time_recovery);
    rocksdb_options_set_recycle_log_file_num(o, 0);
    rocksdb_options_set_manifest_preallocation_size(o, 64 << 10);
    rocksdb_options_set_keep_log_file_num(o, 2);
    rocksdb_options_set_max_log_file_size(o, 1 << 20);
    rocksdb_options_set_info_log_level(o, 2); /* warnings: it counts towards the capacity */
    rocksdb_options_set_stats_dump_period_sec(o, 0);
    s->read_options = rocksdb_readoptions_create();
    rocksdb_readoptions_set_verify_checksums(s->read_options, 0);
    rocksdb_readoptions_set_fill_cache(s->read_options, 1); /* of index blocks: blobs have no cache here */
    s->write_options = rocksdb_writeoptions_create();
}

static enum td_status open_db(struct ssd *s, struct td_error *e)
{
    char *text = NULL;
    s->db = rocksdb_open(s->options, s->db_path, &text);
    if (!text)
        return TD_OK;
    td_fail(e, TD_ERR_IO, "%.200s", text);
    s->db = NULL;
    return convert_error(text);
}

static enum td_status delete_block(struct ssd *s, const struct block_key *key)
{
    char *text = NULL, k[RECORD_KEY_BYTES];
    rocksdb_writebatch_t *b = rocksdb_writebatch_create();
    record_key('m', key, k);
    rocksdb_writebatch_delete(b, k, sizeof(k));
    record_key('b', key, k);
    rocksdb_writebatch_delete(b, k, sizeof(k));
    rocksdb_write(s->db, s->write_options, b, &text);
    rocksdb_writebatch_destroy(b);
    return convert_error(text);
}

/* A listed header that we can serve; else both records go. */
static bool is_ours(struct ssd *s, const void *value, size_t len_bytes, const struct block_key *key,
                    uint32_t *index_out)
{
    struct block_header h;
    if (!block_header_decode(value, len_bytes, &h) && block_key_equal(&h.key, key) &&
        !kv_layout_match(s->config.layout, &h.layout, NULL)) {
        *index_out = h.index;
        return true;
    }
    atomic_fetch_add(&s->dropped_layout, 1);
    delete_block(s, key);
    return false;
}

static enum td_status list_blocks(struct ssd *s, struct found **out, uint64_t *n_out, struct td_error *e)
{
    uint64_t n = 0, cap = 0;
    struct found *all = NULL;
    rocksdb_readoptions_t *o = rocksdb_readoptions_create();
    rocksdb_readoptions_set_iterate_upper_bound(o, "n", 1);
    rocksdb_iterator_t *it = rocksdb_create_iterator(s->db, o);
    for (rocksdb_iter_seek(it, "m", 1); rocksdb_iter_valid(it); rocksdb_iter_next(it)) {
        size_t key_len, len;
        const char *k = rocksdb_iter_key(it, &key_len), *v = rocksdb_iter_value(it, &len);
        struct found f;
        if (key_len != RECORD_KEY_BYTES)
            continue;
        memcpy(f.key.b, k + 1, BLOCK_KEY_BYTES);
        if (!is_ours(s, v, len, &f.key, &f.chain_index))
            continue;
        if (n == cap) {
            cap = cap ? 2 * cap : 256;
            all = mem_resize(all, cap, sizeof(*all));
        }
        all[n++] = f;
    }
    char *text = NULL;
    rocksdb_iter_get_error(it, &text);
    rocksdb_iter_destroy(it);
    rocksdb_readoptions_destroy(o);
    if (text) {
        td_fail(e, TD_ERR_IO, "%.200s", text);
        free(all);
        return convert_error(text);
    }
    *out = all;
    *n_out = n;
    return TD_OK;
}

static enum td_status open_and_list(struct ssd *s, struct found **out, uint64_t *n_out, struct td_error *e)
{
    enum td_status status = open_db(s, e);
    if (!status)
        status = list_blocks(s, out, n_out, e);
    if (status && s->db) {
        rocksdb_close(s->db);
        s->db = NULL;
    }
    return status;
}

/* ----------------------------------------------------------------- writer */

static enum td_status put_block(struct ssd *s, const struct op *op)
{
    uint8_t header[BLOCK_HEADER_BYTES];
    const struct block_header h = {.key = op->key,
                                   .layout = *s->config.layout,
                                   .n_tokens = s->config.layout->page_tokens,
                                   .index = op->chain_index,
                                   .payload_bytes = s->page_bytes,
                                   .checksum = block_checksum(&op->key, op->chain_index, op->payload, s->page_bytes)};
    block_header_encode(&h, header);
    char *text = NULL, k[RECORD_KEY_BYTES];
    const char *key = k, *parts[] = {(const char *)header, op->payload};
    const size_t key_len = sizeof(k), lens[] = {sizeof(header), s->page_bytes};
    rocksdb_writebatch_t *b = rocksdb_writebatch_create();
    record_key('m', &op->key, k);
    rocksdb_writebatch_put(b, k, sizeof(k), parts[0], lens[0]);
    record_key('b', &op->key, k);
    rocksdb_writebatch_putv(b, 1, &key, &key_len, 2, parts, lens);
    rocksdb_write(s->db, s->write_options, b, &text);
    rocksdb_writebatch_destroy(b);
    return convert_error(text);
}

static uint64_t property(struct ssd *s, const char *name)
{
    uint64_t v = 0;
    return rocksdb_property_int(s->db, name, &v) ? 0 : v;
}

static void compact(struct ssd *s, bool collect)
{
    static const char *const NAME[] = {"enable_blob_garbage_collection"};
    static const char *const ON[] = {"true"}, *const OFF[] = {"false"};
    char *text = NULL;
    rocksdb_compactoptions_t *o = rocksdb_compactoptions_create();
    if (collect) {
        rocksdb_set_options(s->db, 1, NAME, ON, &text);
        convert_error(text);
        rocksdb_compactoptions_set_bottommost_level_compaction(o, 2); /* force: there are live blobs to move */
    }
    rocksdb_compact_range_opt(s->db, o, NULL, 0, NULL, 0);
    text = NULL;
    if (collect)
        rocksdb_set_options(s->db, 1, NAME, OFF, &text);
    convert_error(text);
    rocksdb_compactoptions_destroy(o);
}

/*
 * Gives back what deleted blocks still take: the log and memtables first, then whole dead files, then dead bytes in the oldest
 * quarter of the files. With some slack, or the next block would need it again.
 */
static void reclaim(struct ssd *s)
{
    char *text = NULL;
    rocksdb_flushoptions_t *f = rocksdb_flushoptions_create();
    atomic_fetch_add(&s->reclaims, 1);
    rocksdb_flush(s->db, f, &text);
    rocksdb_flushoptions_destroy(f);
    if (convert_error(text))
        return;
    compact(s, false);
    measure(s);
    uint64_t limit = limit_bytes(s), goal = limit - limit / SLACK;
    if (atomic_load(&s->dir_bytes) <= goal || property(s, "rocksdb.live-blob-file-garbage-size") < limit / SLACK)
        return;
    compact(s, true);
    measure(s);
}

static bool fits(struct ssd *s, uint64_t need, uint64_t *excess_out)
{
    uint64_t limit = limit_bytes(s), size = atomic_load(&s->dir_bytes) + s->since_bytes + need;
    *excess_out = size > limit ? size - limit : 0;
    return size <= limit;
}

/* Room for need bytes more; 0: what lies there is within the limit. At most one fruitless reclaim in RECLAIM_EVERY_NS. */
static bool make_room(struct ssd *s, uint64_t need)
{
    uint64_t now = clock_now(s->config.clock), excess;
    if (fits(s, need, &excess))
        return true;
    measure(s);
    if (fits(s, need, &excess))
        return true;
    if (!s->fruitless_ns || now - s->fruitless_ns >= RECLAIM_EVERY_NS) {
        reclaim(s);
        s->fruitless_ns = fits(s, need, &excess) ? 0 : clock_now(s->config.clock);
        if (excess)
            s->config.callbacks.on_over(s->config.callbacks.user, excess + limit_bytes(s) / SLACK);
    }
    return !excess;
}

static bool has_room(struct ssd *s)
{
    if (s->since_bytes >= s->memtable_bytes / 2)
        measure(s);
    return make_room(s, s->page_bytes + BLOCK_HEADER_BYTES);
}

/* When there is nothing to do: RocksDB goes on writing for a while after the last change, and that may be too much. */
static void tidy(struct ssd *s)
{
    measure(s);
    s->is_changed =
        s->db && (property(s, "rocksdb.num-running-flushes") || property(s, "rocksdb.num-running-compactions"));
    if (s->db)
        make_room(s, 0);
}

/* After an error that RocksDB doesn't mend by itself. Disk full it does, 5 s after there is room. */
static void reopen(struct ssd *s)
{
    uint64_t now = clock_now(s->config.clock);
    struct td_error e = {""};
    if (s->reopened_ns && now - s->reopened_ns < REOPEN_EVERY_NS)
        return;
    s->reopened_ns = now;
    atomic_fetch_add(&s->reopens, 1);
    pthread_rwlock_wrlock(&s->db_lock);
    if (s->db)
        rocksdb_close(s->db);
    enum td_status status = open_db(s, &e);
    pthread_rwlock_unlock(&s->db_lock);
    if (status)
        log_error(s->config.log, "SSD tier is lost for now: %s", e.text);
    else
        log_warn(s->config.log, "SSD tier opened again after an error");
}

static void note_write(struct ssd *s, enum td_status status)
{
    bool is_ok = status == TD_OK;
    if (!is_ok)
        atomic_fetch_add(&s->write_errors, 1);
    if (atomic_exchange(&s->is_writable, is_ok) != is_ok)
        log_warn(s->config.log, "SSD tier %s status=%s", is_ok ? "takes writes again" : "doesn't take writes",
                 td_status_name(status));
}

static void run_put(struct ssd *s, const struct op *op)
{
    enum td_status status = TD_ERR_CANCELLED;
    if (!atomic_load(&s->is_cancelling)) {
        if (!s->db)
            reopen(s);
        status = !s->db ? TD_ERR_IO : has_room(s) ? put_block(s, op) : TD_ERR_NO_SPACE;
        note_write(s, status);
        s->is_changed = true;
        if (status == TD_OK) {
            s->since_bytes += s->page_bytes;
            atomic_fetch_add(&s->written_bytes, s->page_bytes);
        } else if (status != TD_ERR_NO_SPACE && s->db) {
            reopen(s);
        }
    }
    atomic_fetch_sub(&s->queued_bytes, s->page_bytes);
    s->config.callbacks.on_put(s->config.callbacks.user, op->token, status);
}

static void *write_loop(void *arg)
{
    struct ssd *s = arg;
    for (;;) {
        struct mail *m = mailbox_take(&s->ops);
        if (!m) {
            if (s->is_changed)
                tidy(s);
            mailbox_wait(&s->ops, IDLE_MS);
        }
        for (struct mail *next; m; m = next) {
            next = m->next;
            struct op *op = (struct op *)m; /* mail is its first member */
            enum op_kind kind = op->kind;
            if (kind == OP_PUT)
                run_put(s, op);
            else if (kind == OP_DELETE && s->db && delete_block(s, &op->key))
                atomic_fetch_add(&s->write_errors, 1); /* it is not in the table any more, or fails to verify again */
            s->is_changed |= kind == OP_DELETE;
            free(op);
            if (kind == OP_STOP)
                return NULL; /* nothing is pushed after it */
        }
    }
}

/* ---------------------------------------------------------------- readers */

static enum td_status get_block(struct ssd *s, const struct read *r)
{
    char *text = NULL, k[RECORD_KEY_BYTES];
    size_t len = 0;
    struct block_header h;
    record_key('b', &r->key, k);
    pthread_rwlock_rdlock(&s->db_lock);
    rocksdb_pinnableslice_t *slice = s->db ? rocksdb_get_pinned(s->db, s->read_options, k, sizeof(k), &text) : NULL;
    enum td_status status = !s->db ? TD_ERR_IO : text ? convert_error(text) : slice ? TD_OK : TD_ERR_NOT_FOUND;
    if (!status) {
        const char *value = rocksdb_pinnableslice_value(slice, &len);
        status = block_verify(value, len, &r->key, s->config.layout, &h);
        if (!status)
            memcpy(r->page, value + BLOCK_HEADER_BYTES, s->page_bytes);
    }
    if (slice)
        rocksdb_pinnableslice_destroy(slice);
    pthread_rwlock_unlock(&s->db_lock);
    return status;
}

static void run_read(struct ssd *s, const struct read *r)
{
    enum td_status status = atomic_load(&s->is_cancelling) ? TD_ERR_CANCELLED : get_block(s, r);
    if (!status)
        atomic_fetch_add(&s->read_bytes, s->page_bytes);
    else if (status != TD_ERR_CANCELLED) {
        char hex[33];
        block_key_hex(&r->key, hex);
        atomic_fetch_add(&s->read_errors, 1);
        log_warn(s->config.log, "block on SSD can't be served key=%s status=%s", hex, td_status_name(status));
    }
    s->config.callbacks.on_read(s->config.callbacks.user, r->token, status);
}

static void *read_loop(void *arg)
{
    struct ssd *s = arg;
    for (;;) {
        pthread_mutex_lock(&s->read_lock);
        while (!s->reads && !s->is_stopping)
            pthread_cond_wait(&s->read_wake, &s->read_lock);
        struct read *r = s->reads;
        if (r && !(s->reads = r->next))
            s->reads_tail = &s->reads;
        pthread_mutex_unlock(&s->read_lock);
        if (!r)
            return NULL;
        run_read(s, r);
        free(r);
    }
}

/* ------------------------------------------------------------ open, close */

static uint64_t clamp(uint64_t v, uint64_t least, uint64_t most)
{
    return v < least ? least : v > most ? most : v;
}

static char *path_of(const char *dir, const char *name)
{
    struct bytes b = {0};
    bytes_printf(&b, "%s/%s", dir, name);
    return b.data;
}

static void start_threads(struct ssd *s)
{
    uint32_t n = s->config.n_readers < READERS_MAX ? s->config.n_readers : READERS_MAX;
    s->writer = thread_start("ssd-write", write_loop, s);
    s->is_writer_up = true;
    for (char name[16]; s->n_readers < (n ? n : 1); s->n_readers++) {
        snprintf(name, sizeof(name), "ssd-read-%u", s->n_readers);
        s->readers[s->n_readers] = thread_start(name, read_loop, s);
    }
}

enum td_status ssd_open(const struct ssd_config *config, struct ssd **out, struct td_error *error_out)
{
    struct ssd *s = mem_zalloc(sizeof(*s));
    struct found *found = NULL;
    uint64_t n_found = 0;
    s->config = *config;
    s->page_bytes = kv_layout_page_bytes(config->layout);
    s->memtable_bytes = clamp(config->capacity_bytes / 64, MEMTABLE_MIN, MEMTABLE_MAX);
    s->db_path = path_of(config->dir, "blocks");
    s->aside_path = path_of(config->dir, "blocks.aside");
    s->lock_fd = -1;
    s->reads_tail = &s->reads;
    s->is_writable = true;
    mailbox_init(&s->ops);
    pthread_rwlock_init(&s->db_lock, NULL);
    pthread_mutex_init(&s->read_lock, NULL);
    pthread_cond_init(&s->read_wake, NULL);
    enum td_status status = lock_dir(s, error_out);
    if (!status) {
        struct td_error why;
        make_options(s);
        if (open_and_list(s, &found, &n_found, &why)) {
            status = set_aside(s, why.text);
            if (status || (status = open_and_list(s, &found, &n_found, &why)))
                td_fail(error_out, status, "--dir %s: %.180s", config->dir, why.text);
        }
    }
    if (status) {
        ssd_close(s);
        return status;
    }
    measure(s);
    for (uint64_t i = 0; i < n_found; i++)
        config->callbacks.on_found(config->callbacks.user, &found[i].key, found[i].chain_index);
    free(found);
    start_threads(s);
    *out = s;
    return TD_OK;
}

static void stop_threads(struct ssd *s)
{
    atomic_store(&s->is_cancelling, true);
    if (s->is_writer_up) {
        struct op *stop = mem_zalloc(sizeof(*stop));
        stop->kind = OP_STOP;
        mailbox_push(&s->ops, &stop->mail);
        pthread_join(s->writer, NULL);
    }
    pthread_mutex_lock(&s->read_lock);
    s->is_stopping = true;
    pthread_cond_broadcast(&s->read_wake);
    pthread_mutex_unlock(&s->read_lock);
    for (uint32_t i = 0; i < s->n_readers; i++)
        pthread_join(s->readers[i], NULL);
}

/* Memtables go to files, so that the next opening has no log to replay. */
static void close_db(struct ssd *s)
{
    if (s->db) {
        char *text = NULL;
        rocksdb_flushoptions_t *f = rocksdb_flushoptions_create();
        rocksdb_flush(s->db, f, &text);
        rocksdb_flushoptions_destroy(f);
        if (convert_error(text))
            log_warn(s->config.log, "SSD tier could not be flushed; its log is replayed at the next start");
        rocksdb_close(s->db);
    }
    if (s->options) {
        rocksdb_options_destroy(s->options);
        rocksdb_readoptions_destroy(s->read_options);
        rocksdb_writeoptions_destroy(s->write_options);
    }
}

void ssd_close(struct ssd *s)
{
    if (!s)
        return;
    stop_threads(s);
    close_db(s);
    if (s->lock_fd >= 0)
        close(s->lock_fd);
    mailbox_fini(&s->ops);
    pthread_rwlock_destroy(&s->db_lock);
    pthread_mutex_destroy(&s->read_lock);
    pthread_cond_destroy(&s->read_wake);
    free(s->db_path);
    free(s->aside_path);
    free(s);
}

/* ------------------------------------------------------------------- calls */

uint64_t ssd_max_blocks(const struct ssd *s)
{
    uint64_t value = s->page_bytes + 4 * BLOCK_HEADER_BYTES; /* both headers, and what RocksDB keeps beside them */
    return s->config.capacity_bytes / 8 * 7 / value;
}

enum td_status ssd_put(struct ssd *s, const struct block_key *key, uint32_t chain_index, const void *payload,
                       void *token)
{
    uint64_t queued = atomic_load(&s->queued_bytes);
    if (queued && queued + s->page_bytes > s->config.queue_bytes)
        return TD_BUSY;
    atomic_fetch_add(&s->queued_bytes, s->page_bytes);
    struct op *op = mem_zalloc(sizeof(*op));
    op->kind = OP_PUT;
    op->key = *key;
    op->chain_index = chain_index;
    op->payload = payload;
    op->token = token;
    mailbox_push(&s->ops, &op->mail);
    return TD_OK;
}

void ssd_delete(struct ssd *s, const struct block_key *key)
{
    struct op *op = mem_zalloc(sizeof(*op));
    op->kind = OP_DELETE;
    op->key = *key;
    mailbox_push(&s->ops, &op->mail);
}

void ssd_read(struct ssd *s, const struct block_key *key, void *page, void *token)
{
    struct read *r = mem_zalloc(sizeof(*r));
    *r = (struct read){NULL, *key, page, token};
    pthread_mutex_lock(&s->read_lock);
    *s->reads_tail = r;
    s->reads_tail = &r->next;
    pthread_cond_signal(&s->read_wake);
    pthread_mutex_unlock(&s->read_lock);
}

struct ssd_stats ssd_stats(const struct ssd *s)
{
    return (struct ssd_stats){.dir_bytes = atomic_load(&s->dir_bytes),
                              .queued_bytes = atomic_load(&s->queued_bytes),
                              .written_bytes = atomic_load(&s->written_bytes),
                              .read_bytes = atomic_load(&s->read_bytes),
                              .write_errors = atomic_load(&s->write_errors),
                              .read_errors = atomic_load(&s->read_errors),
                              .dropped_layout = atomic_load(&s->dropped_layout),
                              .reclaims = atomic_load(&s->reclaims),
                              .reopens = atomic_load(&s->reopens),
                              .was_set_aside = atomic_load(&s->was_set_aside),
                              .is_writable = atomic_load(&s->is_writable)};
}
