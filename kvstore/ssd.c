/*
 * Ownership in RocksDB's C API: options own the table options' filter policy and share the cache and the rate
 * limiter, which are destroyed after them; the database copies the options; a pinned slice holds a version of
 * the database, so it must not outlive the read lock under which it was got.
 *
 * The database is used under a read-write lock, because after a background error (a corrupt blob met by
 * garbage collection) it refuses every write until the writer opens it anew, while readers are inside: no
 * queue can express that. The writer itself reads s->db without the lock: only the writer changes it.
 *
 * After a failed write to its log RocksDB must not write to that log again: it does so by itself once there
 * is room, and aborts the process (an assertion in Debian's build). So a failed logged write ends all writing
 * until the database is opened anew; reading goes on. A failed flush or compaction ends writing, too: RocksDB
 * tries to mend these by itself, but what it then writes is not known here.
 *
 * RocksDB's text log (LOG) lies in memory and is unlinked once the database is open: a text after a failed
 * write to that file aborts the process (the same assertion). On a full disk that is the next warning, or one
 * of the headers that RocksDB writes while it opens, at any log level. (It does not open without such a file,
 * and its C API has no other kind of log.)
 *
 * Rejected: one record per block (RocksDB 7.8 reads blobs while it iterates, so opening would read the whole
 * disk); garbage collection from the start (it rewrote 15 % of data that is written once and deleted);
 * checking RocksDB's CRC (costs a tenth of the speed, and does not prove that the value belongs to the key
 * and the layout).
 */
#include "kvstore/ssd_internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/thread.h"

enum { MAX_OPEN_FILES = 512, N_MEMTABLES = 3, PROBE_BYTES = 1 << 20, BACKGROUND_NICE = 10 };
static const uint64_t MEMTABLE_MIN = 64 << 10, MEMTABLE_MAX = 64 << 20;
static const uint64_t CACHE_BYTES = 32 << 20; /* for index blocks; blobs are not cached here */
/* Most of the file system's room that is left to other programs. */
static const uint64_t RESERVE_MAX = 1 << 30;
/* Longest time that learning keeps the writer from writing. */
static const uint64_t LEARN_NS = 10 * NS_PER_MS;

/* Argument of the thread that opens the database. */
struct opening {
    struct ssd *ssd;
    bool to_read; /* open read-only */
    char *text;   /* the error in RocksDB's words; NULL: opened */
};

enum td_status ssd_convert_error(char *text)
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

/* A record's key: kind 'b' or 'm', then the block key. */
static void record_key(char kind, const struct block_key *key, char out[RECORD_KEY_BYTES])
{
    out[0] = kind;
    memcpy(out + 1, key->b, BLOCK_KEY_BYTES);
}

static bool key_of_record(const char *record, size_t len_bytes, struct block_key *out)
{
    if (len_bytes != RECORD_KEY_BYTES)
        return false;
    memcpy(out->b, record + 1, BLOCK_KEY_BYTES);
    return true;
}

/* -------------------------------------------------------------- directory */

void ssd_measure(struct ssd *s)
{
    dir_files_update(s->files);
    atomic_store(&s->dir_bytes, dir_files_disk_bytes(s->files));
    s->since_bytes = 0;
}

uint64_t ssd_limit_bytes(const struct ssd *s)
{
    struct statvfs v;
    if (statvfs(s->config.dir, &v))
        return s->config.capacity_bytes;
    uint64_t total = (uint64_t)v.f_blocks * v.f_frsize, free_bytes = (uint64_t)v.f_bavail * v.f_frsize;
    uint64_t reserve = total / 20 < RESERVE_MAX ? total / 20 : RESERVE_MAX;
    /* A small store can't take more than that from others. */
    if (reserve > s->config.capacity_bytes)
        reserve = s->config.capacity_bytes;
    /* Otherwise a full database could not be opened anew. */
    if (reserve < PROBE_BYTES + ssd_batch_bytes(s))
        reserve = PROBE_BYTES + ssd_batch_bytes(s);
    uint64_t have = atomic_load(&s->dir_bytes) + free_bytes;
    uint64_t possible = have > reserve ? have - reserve : 0;
    return possible < s->config.capacity_bytes ? possible : s->config.capacity_bytes;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *ftw)
{
    (void)st, (void)kind, (void)ftw;
    return remove(path);
}

static enum td_status rename_aside(struct ssd *s, const char *why)
{
    nftw(s->aside_path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    if (rename(s->db_path, s->aside_path) && errno != ENOENT)
        return TD_ERR_IO;
    log_error(s->config.log, "blocks on SSD can't be opened: set aside, starting empty path=%s why='%s'", s->aside_path,
              why);
    s->was_set_aside = true;
    return TD_OK;
}

static char *path_of(const char *dir, const char *name)
{
    struct bytes b = {0};
    bytes_printf(&b, "%s/%s", dir, name);
    return b.data;
}

/* Whether the directory's file system has O_DIRECT. */
static bool has_direct(const struct ssd *s)
{
    char *path = path_of(s->config.dir, "lock");
    int fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
    free(path);
    if (fd >= 0)
        close(fd);
    return fd >= 0;
}

static enum td_status lock_dir(struct ssd *s, struct td_error *e)
{
    const char *dir = s->config.dir;
    bool may_make = s->config.mode == SSD_SERVE;
    if (may_make && mkdir(dir, 0700) && errno != EEXIST)
        return td_fail(e, TD_ERR_IO, "--dir %s: %s", dir, strerror(errno));
    struct stat st;
    if (may_make && !stat(dir, &st) && st.st_mode & 077)
        log_warn(s->config.log, "others on this host may enter the store's directory path=%s mode=%04o", dir,
                 (unsigned)st.st_mode & 07777);
    char *path = path_of(dir, "lock");
    s->lock_fd = may_make ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : open(path, O_RDONLY | O_CLOEXEC);
    int error = errno;
    free(path);
    errno = error;
    if (s->lock_fd < 0)
        return td_fail(e, may_make ? TD_ERR_IO : TD_ERR_NOT_FOUND, "--dir %s: %s", dir,
                       may_make || errno != ENOENT ? strerror(errno) : "no store was ever here");
    if (flock(s->lock_fd, LOCK_EX | LOCK_NB))
        return td_fail(e, TD_ERR_REFUSED, "--dir %s: a store uses it", dir);
    atomic_store(&s->is_direct, has_direct(s));
    return TD_OK;
}

static void unlock_dir(struct ssd *s)
{
    if (s->lock_fd >= 0)
        close(s->lock_fd);
    s->lock_fd = -1;
}

/* Whether the lock that we hold is that of the directory that has the name now. */
static bool has_lock(const struct ssd *s)
{
    struct stat ours, there;
    char *path = path_of(s->config.dir, "lock");
    bool has = s->lock_fd >= 0 && !fstat(s->lock_fd, &ours) && !stat(path, &there) && ours.st_ino == there.st_ino &&
               ours.st_dev == there.st_dev;
    free(path);
    return has;
}

bool ssd_is_there(struct ssd *s)
{
    char *path = path_of(s->db_path, "CURRENT"); /* a database always has it */
    bool is_there = has_lock(s) && !access(path, F_OK);
    free(path);
    if (!is_there) {
        s->broken = TD_ERR_IO;
        atomic_store(&s->has_failed, true);
    }
    return is_there;
}

bool ssd_can_write(const struct ssd *s)
{
    struct bytes path = {0};
    bytes_printf(&path, "%s/probe", s->config.dir);
    int fd = open(path.data, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    int error = fd < 0 ? errno : posix_fallocate(fd, 0, (off_t)(PROBE_BYTES + dir_files_len_bytes(s->files, ".log")));
    if (fd >= 0) {
        close(fd);
        unlink(path.data);
    }
    bytes_free(&path);
    errno = error;
    return !error;
}

/* ------------------------------------------------------------- open, close */

static void set_table_options(struct ssd *s)
{
    rocksdb_block_based_table_options_t *table = rocksdb_block_based_options_create();
    s->cache = rocksdb_cache_create_lru(CACHE_BYTES);
    rocksdb_block_based_options_set_block_cache(table, s->cache);
    rocksdb_block_based_options_set_filter_policy(table, rocksdb_filterpolicy_create_bloom(10));
    rocksdb_options_set_block_based_table_factory(s->options, table);
    rocksdb_block_based_options_destroy(table);
}

static void set_blob_options(struct ssd *s)
{
    rocksdb_options_t *o = s->options;
    rocksdb_options_set_compression(o, rocksdb_no_compression);
    rocksdb_options_set_enable_blob_files(o, 1);
    /* The "m" records stay out of blob files. */
    rocksdb_options_set_min_blob_size(o, BLOCK_HEADER_BYTES + 1);
    rocksdb_options_set_blob_file_size(o, s->memtable_bytes);
    rocksdb_options_set_blob_compression_type(o, rocksdb_no_compression);
    rocksdb_options_set_enable_blob_gc(o, 0);
    rocksdb_options_set_blob_gc_age_cutoff(o, 0.25);
    rocksdb_options_set_blob_compaction_readahead_size(o, 2 << 20);
}

/* ssd_close flushes by itself. RocksDB would also flush when it is closed, even after a failed write to
 * its log, and abort (see the note above). Its C API has no call for this option. */
static void leave_flushing_to_us(struct ssd *s)
{
    char *text = NULL;
    rocksdb_options_t *o = rocksdb_options_create();
    rocksdb_get_options_from_string(s->options, "avoid_flush_during_shutdown=true", o, &text);
    rocksdb_options_destroy(text ? o : s->options);
    s->options = text ? s->options : o;
    if (text)
        log_warn(s->config.log, "RocksDB takes no avoid_flush_during_shutdown: %s", text);
    ssd_convert_error(text);
}

static void make_options(struct ssd *s)
{
    rocksdb_options_t *o = s->options = rocksdb_options_create();
    set_table_options(s);
    set_blob_options(s);
    rocksdb_options_set_create_if_missing(o, s->config.mode == SSD_SERVE);
    rocksdb_options_set_write_buffer_size(o, s->memtable_bytes);
    /* From 4 on RocksDB throttles writers to 16 MB/s. */
    rocksdb_options_set_max_write_buffer_number(o, N_MEMTABLES);
    rocksdb_options_set_max_background_jobs(o, 8);
    rocksdb_options_set_level0_slowdown_writes_trigger(o, 200);
    rocksdb_options_set_level0_stop_writes_trigger(o, 400);
    rocksdb_options_set_max_open_files(o, MAX_OPEN_FILES);
    rocksdb_options_set_use_direct_reads(o, s->is_direct);
    /* Writes go through the page cache; this keeps them from piling up there. */
    rocksdb_options_set_bytes_per_sync(o, 1 << 20);
    rocksdb_options_set_wal_recovery_mode(o, rocksdb_point_in_time_recovery);
    rocksdb_options_set_recycle_log_file_num(o, 0);
    rocksdb_options_set_manifest_preallocation_size(o, 64 << 10);
    rocksdb_options_set_info_log_level(o, 4); /* 4: fatal errors only */
    rocksdb_options_set_stats_dump_period_sec(o, 0);
    if (s->config.background_bytes_per_s) {
        s->limiter = rocksdb_ratelimiter_create((int64_t)s->config.background_bytes_per_s, 10000, 10);
        rocksdb_options_set_ratelimiter(o, s->limiter);
    }
    leave_flushing_to_us(s);
    s->read_options = rocksdb_readoptions_create();
    rocksdb_readoptions_set_verify_checksums(s->read_options, 0);
    rocksdb_readoptions_set_fill_cache(s->read_options, 1);
    for (int i = 0; i < 2; i++)
        s->write_options[i] = rocksdb_writeoptions_create();
    rocksdb_writeoptions_disable_WAL(s->write_options[0], 1);
}

void ssd_step_back(void)
{
    /* On Linux this applies to the thread. */
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), BACKGROUND_NICE);
}

static void *open_in_background(void *arg)
{
    struct opening *o = arg;
    struct ssd *s = o->ssd;
    ssd_step_back();
    s->db = o->to_read ? rocksdb_open_for_read_only(s->options, s->db_path, 0, &o->text)
                       : rocksdb_open(s->options, s->db_path, &o->text);
    return NULL;
}

/* Unlinks the text log and its directory. RocksDB has the file open and goes on writing to it. */
static void remove_log_dir(const char *path)
{
    DIR *d = opendir(path);
    for (struct dirent *e; d && (e = readdir(d));)
        unlinkat(dirfd(d), e->d_name, 0); /* fails for "." and ".." */
    if (d)
        closedir(d);
    rmdir(path);
}

/* Opens the database on a new thread, because the threads that flush and compact inherit its priority.
 * The directory of the text log exists only while the database opens, so a process that is killed later
 * leaves nothing in /dev/shm. Without /dev/shm the text log lies in the database. */
static enum td_status open_how(struct ssd *s, bool to_read, struct td_error *e)
{
    struct opening o = {s, to_read, NULL};
    char log_dir[] = "/dev/shm/tandem-log-XXXXXX"; /* see the note above */
    bool has_log_dir = mkdtemp(log_dir);
    rocksdb_options_set_db_log_dir(s->options, has_log_dir ? log_dir : "");
    pthread_join(thread_start("ssd-open", open_in_background, &o), NULL);
    if (has_log_dir)
        remove_log_dir(log_dir);
    char *text = o.text;
    if (!text)
        return TD_OK;
    td_fail(e, TD_ERR_IO, "--dir %s: %.180s", s->config.dir, text);
    s->db = NULL;
    return ssd_convert_error(text);
}

/* On a full disk the blocks can still be read: then the database is opened read-only (s->broken), until
 * ssd_reopen succeeds. */
static enum td_status open_db(struct ssd *s, struct td_error *e)
{
    struct td_error unused;
    s->broken = TD_OK;
    atomic_store(&s->has_failed, false);
    enum td_status status = open_how(s, s->config.mode == SSD_INSPECT, e);
    if (status && s->config.mode == SSD_SERVE && (status == TD_ERR_NO_SPACE || !ssd_can_write(s)) &&
        !open_how(s, true, &unused))
        s->broken = TD_ERR_NO_SPACE;
    return status;
}

enum td_status ssd_set_aside(struct ssd *s, const char *why, struct td_error *error_out)
{
    if (s->db)
        rocksdb_close(s->db);
    s->db = NULL;
    if (rename_aside(s, why))
        return td_fail(error_out, TD_ERR_IO, "--dir %s: %s", s->config.dir, strerror(errno));
    enum td_status status = open_db(s, error_out);
    ssd_measure(s);
    return status;
}

enum td_status ssd_open(const struct ssd_config *config, struct ssd **out, struct td_error *error_out)
{
    struct ssd *s = mem_zalloc(sizeof(*s));
    uint64_t part = config->capacity_bytes / 64;
    s->config = *config;
    s->memtable_bytes = part < MEMTABLE_MIN ? MEMTABLE_MIN : part > MEMTABLE_MAX ? MEMTABLE_MAX : part;
    s->db_path = path_of(config->dir, "blocks");
    s->aside_path = path_of(config->dir, "blocks.aside");
    s->lock_fd = -1;
    s->files = dir_files_open(s->db_path);
    s->blobs = blobs_open(s->db_path, s->files);
    pthread_rwlock_init(&s->db_lock, NULL);
    ssd_room_init(s);
    enum td_status status = lock_dir(s, error_out);
    if (!status) {
        struct td_error why = {""};
        make_options(s);
        status = open_db(s, &why);
        if (s->broken) {
            log_warn(config->log, "SSD tier is read, and takes no writes until there is room: %s", why.text);
            status = TD_OK;
        } else if (status && config->mode == SSD_SERVE) {
            status = ssd_set_aside(s, why.text, error_out);
        } else if (status) {
            td_fail(error_out, status, "%s", why.text);
        }
    }
    if (status) {
        ssd_close(s);
        return status;
    }
    ssd_measure(s);
    *out = s;
    return TD_OK;
}

/* Order: the collecting thread uses the database, so it ends first; then the flush; then RocksDB; then the
 * options that RocksDB shares. */
void ssd_close(struct ssd *s)
{
    if (!s)
        return;
    ssd_room_fini(s);
    if (s->db) {
        if (s->config.mode != SSD_INSPECT && ssd_sync(s)) /* so that the next start has no log to replay */
            log_warn(s->config.log, "SSD tier could not be flushed; its log is replayed at the next start");
        rocksdb_close(s->db);
    }
    if (s->options) {
        rocksdb_options_destroy(s->options);
        rocksdb_cache_destroy(s->cache);
        rocksdb_readoptions_destroy(s->read_options);
        rocksdb_writeoptions_destroy(s->write_options[0]);
        rocksdb_writeoptions_destroy(s->write_options[1]);
    }
    if (s->limiter)
        rocksdb_ratelimiter_destroy(s->limiter);
    unlock_dir(s);
    pthread_rwlock_destroy(&s->db_lock);
    blobs_close(s->blobs);
    dir_files_close(s->files);
    free(s->db_path);
    free(s->aside_path);
    free(s);
}

/* The collecting thread holds the read lock during a round, so the round is cancelled before the write
 * lock is taken. Puts that were only in memory are lost: the caller answers them as failed. */
enum td_status ssd_reopen(struct ssd *s, struct td_error *error_out)
{
    if (!has_lock(s)) {
        unlock_dir(s);
        enum td_status locked = lock_dir(s, error_out);
        if (locked) {
            unlock_dir(s);
            return locked;
        }
        rocksdb_options_set_use_direct_reads(s->options, s->is_direct); /* it may be another file system */
        ssd_measure(s); /* before a new database has files with the names of the old one's */
    }
    if (!ssd_can_write(s))
        return td_fail(error_out, TD_ERR_IO, "--dir %s: %s", s->config.dir, strerror(errno));
    ssd_room_reset(s);
    pthread_rwlock_wrlock(&s->db_lock);
    if (s->db)
        rocksdb_close(s->db);
    s->unlogged_bytes = 0;
    enum td_status status = open_db(s, error_out);
    pthread_rwlock_unlock(&s->db_lock);
    return status;
}

bool ssd_is_open(const struct ssd *s)
{
    return s->db && !s->broken;
}

bool ssd_was_set_aside(const struct ssd *s)
{
    return s->was_set_aside;
}

/* ----------------------------------------------------------------- records */

enum td_status ssd_each(struct ssd *s, ssd_visit_fn *visit, void *user, struct td_error *error_out)
{
    char *text = NULL;
    rocksdb_readoptions_t *o = rocksdb_readoptions_create();
    rocksdb_readoptions_set_iterate_upper_bound(o, "n", 1);
    /* No lock: this is the writer, and only the writer closes the database. */
    rocksdb_iterator_t *it = rocksdb_create_iterator(s->db, o);
    bool more = true;
    for (rocksdb_iter_seek(it, "m", 1); more && rocksdb_iter_valid(it); rocksdb_iter_next(it)) {
        size_t key_len, len;
        const char *k = rocksdb_iter_key(it, &key_len), *v = rocksdb_iter_value(it, &len);
        struct block_key key;
        more = !key_of_record(k, key_len, &key) || visit(user, &key, v, len);
    }
    rocksdb_iter_get_error(it, &text);
    rocksdb_iter_destroy(it);
    rocksdb_readoptions_destroy(o);
    if (text)
        td_fail(error_out, TD_ERR_IO, "--dir %s: %.180s", s->config.dir, text);
    return ssd_convert_error(text);
}

enum td_status ssd_neighbour(struct ssd *s, const struct block_key *key, struct block_key *out)
{
    char k[RECORD_KEY_BYTES];
    enum td_status status = TD_ERR_NOT_FOUND;
    rocksdb_readoptions_t *o = rocksdb_readoptions_create();
    rocksdb_readoptions_set_iterate_upper_bound(o, "n", 1);
    pthread_rwlock_rdlock(&s->db_lock);
    rocksdb_iterator_t *it = s->db ? rocksdb_create_iterator(s->db, o) : NULL;
    record_key('m', key, k);
    /* First the keys behind this one, then all from the start. */
    for (int round = 0; it && round < 2 && status; round++) {
        rocksdb_iter_seek(it, k, round ? 1 : sizeof(k));
        for (; rocksdb_iter_valid(it) && status; rocksdb_iter_next(it)) {
            size_t len;
            const char *found = rocksdb_iter_key(it, &len);
            if (key_of_record(found, len, out) && !block_key_equal(out, key))
                status = TD_OK;
        }
    }
    if (it)
        rocksdb_iter_destroy(it);
    pthread_rwlock_unlock(&s->db_lock);
    rocksdb_readoptions_destroy(o);
    return status;
}

/* Both records are written in one batch, so that a block has both or neither. */
enum td_status ssd_put(struct ssd *s, const struct block_key *key, const uint8_t header[BLOCK_HEADER_BYTES],
                       const void *payload, size_t len_bytes, bool is_logged)
{
    if (!ssd_is_open(s))
        return s->broken ? s->broken : TD_ERR_IO;
    char *text = NULL, k[RECORD_KEY_BYTES];
    const char *record = k, *parts[] = {(const char *)header, payload};
    const size_t record_len = sizeof(k), lens[] = {BLOCK_HEADER_BYTES, len_bytes};
    rocksdb_writebatch_t *b = rocksdb_writebatch_create();
    record_key('m', key, k);
    rocksdb_writebatch_put(b, k, sizeof(k), parts[0], lens[0]);
    record_key('b', key, k);
    rocksdb_writebatch_putv(b, 1, &record, &record_len, 2, parts, lens);
    rocksdb_write(s->db, s->write_options[is_logged], b, &text);
    rocksdb_writebatch_destroy(b);
    s->since_bytes += len_bytes;
    s->value_bytes = len_bytes;
    s->put_bytes += len_bytes;
    s->unlogged_bytes += is_logged ? 0 : len_bytes;
    enum td_status status = ssd_convert_error(text);
    if (is_logged && status)
        atomic_store(&s->has_failed, true);
    s->broken = is_logged ? status : s->broken;
    return status;
}

enum td_status ssd_delete(struct ssd *s, const struct block_key *key)
{
    if (!ssd_is_open(s))
        return s->broken ? s->broken : TD_ERR_IO;
    char *text = NULL, k[RECORD_KEY_BYTES];
    rocksdb_writebatch_t *b = rocksdb_writebatch_create();
    record_key('m', key, k);
    rocksdb_writebatch_delete(b, k, sizeof(k));
    record_key('b', key, k);
    rocksdb_writebatch_delete(b, k, sizeof(k));
    rocksdb_write(s->db, s->write_options[1], b, &text);
    rocksdb_writebatch_destroy(b);
    s->dead_bytes += s->value_bytes;
    if (text)
        atomic_store(&s->has_failed, true);
    return s->broken = ssd_convert_error(text);
}

/* The "m" record says whether the block is there. Reading it costs little, because these records are small
 * and cached. */
enum td_status ssd_find(struct ssd *s, const struct block_key *key)
{
    char *text = NULL, k[RECORD_KEY_BYTES];
    record_key('m', key, k);
    pthread_rwlock_rdlock(&s->db_lock);
    rocksdb_pinnableslice_t *slice = s->db ? rocksdb_get_pinned(s->db, s->read_options, k, sizeof(k), &text) : NULL;
    enum td_status status = !s->db ? TD_NOT_YET : text ? ssd_convert_error(text) : slice ? TD_OK : TD_ERR_NOT_FOUND;
    if (slice)
        rocksdb_pinnableslice_destroy(slice);
    pthread_rwlock_unlock(&s->db_lock);
    return status;
}

enum td_status ssd_get_into(struct ssd *s, const struct block_key *key, void *buffer, size_t buffer_bytes,
                            const void **value_out, size_t *len_out)
{
    if (!s->is_direct)
        return TD_NOT_YET;
    enum td_status status = ssd_find(s, key);
    if (status)
        return status;
    return blobs_read(s->blobs, key, buffer, buffer_bytes, value_out, len_out) ? TD_NOT_YET : TD_OK;
}

size_t ssd_buffer_bytes(size_t payload_bytes)
{
    return blobs_buffer_bytes(BLOCK_HEADER_BYTES + payload_bytes);
}

bool ssd_learn(struct ssd *s)
{
    dir_files_update(s->files);
    if (!s->is_direct)
        return dir_files_visit_changed(s->files, NULL, NULL);
    bool is_done = blobs_scan(s->blobs, LEARN_NS);
    atomic_store(&s->n_places, blobs_work(s->blobs).n_places);
    return is_done;
}

enum td_status ssd_get(struct ssd *s, const struct block_key *key, struct ssd_value *out)
{
    char *text = NULL, k[RECORD_KEY_BYTES];
    record_key('b', key, k);
    pthread_rwlock_rdlock(&s->db_lock);
    rocksdb_pinnableslice_t *slice = s->db ? rocksdb_get_pinned(s->db, s->read_options, k, sizeof(k), &text) : NULL;
    if (slice && !text) {
        out->pin = slice;
        out->data = rocksdb_pinnableslice_value(slice, &out->len_bytes);
        return TD_OK; /* ssd_release unlocks */
    }
    enum td_status status = !s->db ? TD_NOT_YET : text ? ssd_convert_error(text) : TD_ERR_NOT_FOUND;
    if (slice)
        rocksdb_pinnableslice_destroy(slice);
    pthread_rwlock_unlock(&s->db_lock);
    return status;
}

void ssd_release(struct ssd *s, struct ssd_value *value)
{
    rocksdb_pinnableslice_destroy(value->pin);
    pthread_rwlock_unlock(&s->db_lock);
}

uint64_t ssd_property(const struct ssd *s, const char *name)
{
    uint64_t v = 0;
    return s->db && !rocksdb_property_int(s->db, name, &v) ? v : 0;
}

enum td_status ssd_sync(struct ssd *s)
{
    if (!ssd_is_open(s))
        return s->broken ? s->broken : TD_ERR_IO;
    char *text = NULL;
    rocksdb_flushoptions_t *f = rocksdb_flushoptions_create();
    rocksdb_flush(s->db, f, &text);
    rocksdb_flushoptions_destroy(f);
    s->unlogged_bytes = text ? s->unlogged_bytes : 0;
    return s->broken = ssd_convert_error(text);
}

struct ssd_info ssd_info(struct ssd *s)
{
    pthread_rwlock_rdlock(&s->db_lock);
    struct ssd_info i = {.dir_bytes = atomic_load(&s->dir_bytes),
                         .limit_bytes = ssd_limit_bytes(s),
                         .blob_bytes = ssd_property(s, "rocksdb.live-blob-file-size"),
                         .garbage_bytes = ssd_property(s, "rocksdb.live-blob-file-garbage-size"),
                         .n_blob_files = ssd_property(s, "rocksdb.num-blob-files"),
                         .is_direct = s->is_direct};
    pthread_rwlock_unlock(&s->db_lock);
    return i;
}

uint64_t ssd_batch_bytes(const struct ssd *s)
{
    return 2 * s->memtable_bytes;
}

uint64_t ssd_dir_bytes(const struct ssd *s)
{
    return atomic_load(&s->dir_bytes);
}

uint64_t ssd_places(const struct ssd *s)
{
    return atomic_load(&s->n_places);
}

uint64_t ssd_reclaims(const struct ssd *s)
{
    return atomic_load(&s->reclaims);
}
