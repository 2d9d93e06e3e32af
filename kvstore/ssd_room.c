/*
 * Room in the directory: the room of deleted blocks is collected on a thread of its own; the writer goes on
 * as long as there is room.
 *
 * The writer decides. The thread carries out one round at a time (a manual compaction); the writer sees its
 * end when it next asks for room.
 *
 *               above the goal and much was deleted, or nothing fits
 *      IDLE --------------------------------------------------------> MERGING
 *        ^                                                              |
 *        |  the goal is reached, little garbage is left,                |  dead bytes hide in live files
 *        |  or every file had its turn                                  v
 *        +----------------------------------------------------------- MOVING (repeated while it helps)
 *
 * Merging: deletes meet the records that they delete. Only then RocksDB counts the garbage, and removes blob
 * files that are dead as a whole. Merging rewrites keys and headers, about 300 bytes per block, and no
 * payload.
 *
 * Moving: live values of the oldest files are copied, so that RocksDB can delete these files. The number of
 * files is chosen so that the copies fit into half of the free room, and so that their size is at most
 * KEYS_SHARE times that of the keys, all of which each round rewrites. So a round is bounded, needs no more
 * room than there is, and is still worth the rewriting.
 *
 * The goal is a sixteenth below the limit. Between the two the writer goes on while room is collected; at the
 * limit it waits. Little garbage is a sixteenth of the limit, or a sixty-fourth when nothing fits: more work
 * is worth doing before the owner has to evict a block.
 *
 * Rejected: compactions of key ranges (keys are hashes: each file has values of every range, so no file dies
 * before the last range is compacted, and each flush makes a file that overlaps all of them); moving a fixed
 * quarter of the files (on a full disk there is no room for the copies; at 1 TiB it takes ten minutes);
 * RocksDB's own choice by blob_garbage_collection_force_threshold (it looks at the oldest files only,
 * whatever room there is). Changing RocksDB's options makes readers wait while the options are written to
 * disk, so the share that is moved is a power of two and rarely changes.
 */
#include "kvstore/ssd_internal.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/thread.h"

/* DELETIONS_MS: readers may keep a file from being deleted that long. */
enum { SLACK = 16, DELETIONS_MS = 1000, WAIT_MS = 20, KEYS_SHARE = 32 };
static const uint64_t COLLECT_EVERY_NS = NS_PER_S / 5; /* pause between collections that give too little */

/* ------------------------------------------------------------------ rounds */

static void set_options(struct ssd *s, double cutoff)
{
    char number[32], *text = NULL;
    const char *const names[] = {"enable_blob_garbage_collection", "blob_garbage_collection_age_cutoff"};
    const char *const values[] = {"true", number};
    if (s->room.cutoff == cutoff)
        return;
    snprintf(number, sizeof(number), "%.9f", cutoff);
    rocksdb_set_options(s->db, 2, names, values, &text);
    s->room.cutoff = text ? 0 : cutoff;
    ssd_convert_error(text);
}

static uint64_t count_blobs(const struct ssd *s)
{
    uint64_t n = 0;
    DIR *d = opendir(s->db_path);
    for (struct dirent *e; d && (e = readdir(d));) {
        const char *dot = strrchr(e->d_name, '.');
        n += dot && !strcmp(dot, ".blob");
    }
    if (d)
        closedir(d);
    return n;
}

/* Blob files in the directory that RocksDB does not count: files that it has yet to delete, and files that
 * it does not know. */
static uint64_t count_uncounted(const struct ssd *s)
{
    uint64_t there = count_blobs(s), counted = ssd_property(s, "rocksdb.num-blob-files");
    return there > counted ? there - counted : 0;
}

static bool is_at_work(const struct ssd *s)
{
    return ssd_property(s, "rocksdb.num-running-flushes") || ssd_property(s, "rocksdb.num-running-compactions");
}

/*
 * A compaction returns before the files that it emptied are deleted. Until they are gone their size must not
 * lead to evictions. Files that stay although nothing is being written are not RocksDB's to delete: they are
 * remembered in n_unknown and not waited for again.
 */
static void await_deletions(struct ssd *s)
{
    struct ssd_room *r = &s->room;
    uint64_t n = count_uncounted(s);
    struct timespec step = {.tv_nsec = NS_PER_MS};
    for (int ms = 0; n > r->n_unknown && ms < DELETIONS_MS && !atomic_load(&r->is_cancelled); n = count_uncounted(s)) {
        nanosleep(&step, NULL);
        ms += (int)(step.tv_nsec / (long)NS_PER_MS);
        step.tv_nsec += step.tv_nsec < 32 * (long)NS_PER_MS ? step.tv_nsec : 0;
    }
    if (n < r->n_unknown)
        r->n_unknown = n;
    else if (!atomic_load(&r->is_cancelled) && !is_at_work(s))
        r->n_unknown = count_uncounted(s); /* again: work that ended just now has deleted its files */
}

/* The caller makes sure that the database stays open meanwhile. with_values: moves values, too. */
static void compact(struct ssd *s, bool with_values)
{
    rocksdb_compactoptions_t *o = rocksdb_compactoptions_create();
    if (with_values)
        /* force: there are live values to move. */
        rocksdb_compactoptions_set_bottommost_level_compaction(o, 2);
    rocksdb_compact_range_opt(s->db, o, NULL, 0, NULL, 0); /* has no result */
    rocksdb_compactoptions_destroy(o);
    await_deletions(s);
}

/* The thread "ssd-collect". It holds the database's read lock during a round, but not r->lock. */
static void *run_rounds(void *arg)
{
    struct ssd *s = arg;
    struct ssd_room *r = &s->room;
    ssd_step_back();
    pthread_mutex_lock(&r->lock);
    while (!r->is_stopping) {
        if (r->round == ROOM_IDLE) {
            pthread_cond_wait(&r->changed, &r->lock);
            continue;
        }
        bool with_values = r->round == ROOM_MOVING;
        pthread_mutex_unlock(&r->lock);
        pthread_rwlock_rdlock(&s->db_lock);
        if (s->db && !atomic_load(&r->is_cancelled) && !atomic_load(&s->has_failed))
            compact(s, with_values);
        pthread_rwlock_unlock(&s->db_lock);
        pthread_mutex_lock(&r->lock);
        r->round = ROOM_IDLE;
        pthread_cond_broadcast(&r->changed);
    }
    pthread_mutex_unlock(&r->lock);
    return NULL;
}

static bool is_under_way(struct ssd_room *r)
{
    pthread_mutex_lock(&r->lock);
    bool is = r->round != ROOM_IDLE;
    pthread_mutex_unlock(&r->lock);
    return is;
}

static void start_round(struct ssd *s, enum room_state round)
{
    struct ssd_room *r = &s->room;
    if (!r->is_up)
        r->thread = thread_start("ssd-collect", run_rounds, s);
    r->is_up = true;
    r->state = round;
    pthread_mutex_lock(&r->lock);
    r->round = round;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->lock);
}

/* Waits for the round to end, or briefly for what RocksDB does by itself. */
static void wait_for_round(struct ssd_room *r)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    pthread_mutex_lock(&r->lock);
    until.tv_nsec += (r->round != ROOM_IDLE ? WAIT_MS : 2) * (long)NS_PER_MS;
    until.tv_sec += until.tv_nsec / (long)NS_PER_S;
    until.tv_nsec %= (long)NS_PER_S;
    pthread_cond_timedwait(&r->changed, &r->lock, &until);
    pthread_mutex_unlock(&r->lock);
}

void ssd_room_init(struct ssd *s)
{
    pthread_mutex_init(&s->room.lock, NULL);
    pthread_cond_init(&s->room.changed, NULL);
}

/* Ends a round that is under way. It stops after a few values, because RocksDB checks after each. */
static void cancel_round(struct ssd *s)
{
    struct ssd_room *r = &s->room;
    if (is_under_way(r)) {
        atomic_store(&r->is_cancelled, true);
        rocksdb_disable_manual_compaction(s->db);
        while (is_under_way(r))
            wait_for_round(r);
        rocksdb_enable_manual_compaction(s->db);
        atomic_store(&r->is_cancelled, false);
    }
    r->state = ROOM_IDLE;
    r->is_in_need = false;
}

void ssd_room_reset(struct ssd *s)
{
    cancel_round(s);
    s->room.cutoff = 0;
}

void ssd_room_fini(struct ssd *s)
{
    struct ssd_room *r = &s->room;
    cancel_round(s);
    pthread_mutex_lock(&r->lock);
    r->is_stopping = true;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->lock);
    if (r->is_up)
        pthread_join(r->thread, NULL);
    pthread_cond_destroy(&r->changed);
    pthread_mutex_destroy(&r->lock);
}

/* ---------------------------------------------------------------- decisions */

/* Ends writing if a flush or compaction has failed since the database was opened. */
static void note_background(struct ssd *s)
{
    if (!s->broken && ssd_property(s, "rocksdb.background-errors"))
        s->broken = TD_ERR_IO;
}

static uint64_t goal_bytes(const struct ssd *s)
{
    uint64_t limit = ssd_limit_bytes(s);
    return limit - limit / SLACK;
}

static uint64_t garbage_bytes(const struct ssd *s)
{
    return ssd_property(s, "rocksdb.live-blob-file-garbage-size");
}

/*
 * Size of the directory. While values are moved the measured size says little, because copies lie beside
 * their originals. Then it is the size before the round, plus the copies that the round makes, plus what was
 * put since.
 */
static uint64_t size_bytes(const struct ssd *s)
{
    const struct ssd_room *r = &s->room;
    uint64_t unseen = s->since_bytes > s->unlogged_bytes ? s->since_bytes : s->unlogged_bytes;
    if (r->state == ROOM_MOVING)
        return r->planned_bytes + s->put_bytes - r->put_before_bytes;
    return atomic_load(&s->dir_bytes) + unseen;
}

/* True if `need` bytes fit; room for one more blob file is left for copies. *excess_out: bytes above the
 * limit. */
static bool fits(const struct ssd *s, uint64_t need, uint64_t *excess_out)
{
    uint64_t limit = ssd_limit_bytes(s), size = size_bytes(s) + need + (need ? s->memtable_bytes : 0);
    *excess_out = size > limit ? size - limit : 0;
    return size <= limit;
}

/* The smallest power of two that is at least one of n files. */
static double least_part(uint64_t n_files)
{
    double part = 1;
    while (part * (double)n_files >= 2)
        part /= 2;
    return part;
}

/* Starts to move the oldest files. Their share is a power of two; see "Moving" in the note above. */
static void start_moving(struct ssd *s)
{
    struct ssd_room *r = &s->room;
    uint64_t n_files = ssd_property(s, "rocksdb.num-blob-files"), all = ssd_property(s, "rocksdb.live-blob-file-size");
    uint64_t limit = ssd_limit_bytes(s), size = size_bytes(s);
    double live = (double)(all - garbage_bytes(s)), room = limit > size ? (double)(limit - size) / 2 : 0;
    double most = (double)KEYS_SHARE * (double)ssd_property(s, "rocksdb.total-sst-files-size");
    double least = least_part(n_files), part = 0.5;
    while (part > least && (part * live > room || part * (double)all > most))
        part /= 2;
    uint64_t n = (uint64_t)(part * (double)n_files) + 1;
    r->files_left -= n < r->files_left ? n : r->files_left;
    r->planned_bytes = size + (uint64_t)(part * live);
    r->put_before_bytes = s->put_bytes;
    set_options(s, part);
    start_round(s, ROOM_MOVING);
}

static void start_merging(struct ssd *s)
{
    s->dead_bytes = 0;
    s->room.files_left = ssd_property(s, "rocksdb.num-blob-files");
    start_round(s, ROOM_MERGING);
}

/* Starts a collection that the writer waits for. First the log and the memtables are flushed, because they
 * take room, too. */
static bool start_in_need(struct ssd *s)
{
    s->room.is_in_need = true;
    if (ssd_sync(s))
        return false;
    start_merging(s);
    return true;
}

/*
 * A round has ended; true if another one goes on. If nothing fits after a collection that began early, or
 * during which blocks were deleted (the writer goes on while there is room), another one is made before the
 * owner is asked to evict. That ends, because the writer, which also deletes, waits then.
 */
static bool go_on(struct ssd *s, uint64_t need)
{
    struct ssd_room *r = &s->room;
    uint64_t excess;
    note_background(s);
    /* Before the directory is measured, or files that go in between would be in a size taken as final. */
    bool is_busy = is_at_work(s);
    ssd_measure(s);
    enum room_state was = r->state;
    r->state = ROOM_MERGING; /* so that size_bytes is the directory's size again */
    bool is_full = !fits(s, need, &excess), is_enough = atomic_load(&s->dir_bytes) <= goal_bytes(s);
    if (!s->broken && is_full && is_busy) {
        r->state = was;
        return true; /* copies lie beside their originals: look again later */
    }
    atomic_fetch_add(&s->reclaims, 1);
    uint64_t least = ssd_limit_bytes(s) / (is_full ? 4 * SLACK : SLACK);
    if (!s->broken && !is_enough && r->files_left && garbage_bytes(s) >= least) {
        start_moving(s);
        return true;
    }
    r->state = ROOM_IDLE;
    if (!s->broken && r->cutoff > 0) /* RocksDB's own compactions shall move as little as possible */
        set_options(s, least_part(ssd_property(s, "rocksdb.num-blob-files")));
    if (!s->broken && is_full && (!r->is_in_need || s->dead_bytes))
        return start_in_need(s);
    r->is_in_need = false;
    r->must_evict = is_full;
    r->fruitless_ns = is_full ? clock_now(s->config.clock) : 0;
    return false;
}

/* Takes the next decision: begins a collection, or goes on with the present one. True while one is under
 * way. */
static bool collect(struct ssd *s, uint64_t need, bool is_full)
{
    struct ssd_room *r = &s->room;
    if (is_under_way(r))
        return true;
    if (r->state != ROOM_IDLE)
        return go_on(s, need);
    if (!ssd_is_open(s))
        return false;
    uint64_t now = clock_now(s->config.clock);
    if (is_full && (!r->fruitless_ns || now - r->fruitless_ns >= COLLECT_EVERY_NS)) {
        if (start_in_need(s))
            return true;
        r->must_evict = true;
        r->fruitless_ns = now;
        return false;
    }
    bool is_due = atomic_load(&s->dir_bytes) > goal_bytes(s) && s->dead_bytes >= ssd_limit_bytes(s) / (2 * SLACK);
    if (is_due)
        start_merging(s);
    return is_due;
}

enum td_status ssd_make_room(struct ssd *s, uint64_t need_bytes, uint64_t *over_out)
{
    struct ssd_room *r = &s->room;
    uint64_t excess;
    *over_out = 0;
    if (s->since_bytes >= s->memtable_bytes / 2)
        ssd_measure(s);
    if (!fits(s, need_bytes, &excess))
        ssd_measure(s);
    bool is_full = !fits(s, need_bytes, &excess), is_collecting = collect(s, need_bytes, is_full);
    if (!is_full || fits(s, need_bytes, &excess))
        return TD_OK;
    if (is_collecting) {
        if (need_bytes)
            wait_for_round(r);
        return TD_NOT_YET;
    }
    /* While the disk takes no writes, deleting would give no room back. */
    if (r->must_evict && (!s->broken || ssd_can_write(s)))
        *over_out = excess + ssd_limit_bytes(s) / SLACK;
    r->must_evict = false;
    return TD_ERR_NO_SPACE;
}

bool ssd_is_collecting(const struct ssd *s)
{
    return s->room.state != ROOM_IDLE;
}

enum td_status ssd_compact(struct ssd *s)
{
    cancel_round(s);
    enum td_status status = ssd_sync(s);
    if (status)
        return status;
    set_options(s, 1);
    compact(s, true);
    note_background(s);
    ssd_measure(s);
    set_options(s, least_part(ssd_property(s, "rocksdb.num-blob-files")));
    return s->broken;
}

bool ssd_tidy(struct ssd *s)
{
    ssd_measure(s);
    note_background(s);
    return ssd_is_collecting(s) || is_at_work(s);
}
