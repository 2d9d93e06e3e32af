/* What ssd.c (the database and its records) and ssd_room.c (the room they take) share; only these two call
 * RocksDB. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include <rocksdb/c.h>

#include "kvstore/blobs.h"
#include "kvstore/dir_files.h"
#include "kvstore/ssd.h"

enum { RECORD_KEY_BYTES = 1 + BLOCK_KEY_BYTES };

enum room_state { /* see ssd_room.c */
                  ROOM_IDLE,
                  ROOM_MERGING,
                  ROOM_MOVING
};

struct ssd_room {
    /* Used by the writer only, down to `thread`. */
    enum room_state state;
    uint64_t files_left; /* blob files that had no turn to be moved yet */
    /* RocksDB's age cutoff: the share of files, oldest first, whose values are moved; 0: not set. */
    double cutoff;
    uint64_t fruitless_ns; /* when the last collection ended that gave too little; 0: it gave enough */
    bool is_in_need;       /* the present collection began when nothing fitted any more */
    bool must_evict;       /* it gave too little, and the owner was not asked to delete yet */
    uint64_t planned_bytes, put_before_bytes; /* used while values are moved: see size_bytes in ssd_room.c */
    bool is_up;                               /* the thread runs */
    pthread_t thread;

    /* Used by the thread that compacts: ssd-collect, or the writer in ssd_compact. */
    uint64_t n_unknown; /* blob files in the directory that RocksDB does not count */

    /* Guards the rest. The writer asks for one round and waits a little for its end: a queue would hold
     * one entry. */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    enum room_state round; /* the round that was asked for, until it ends; ROOM_IDLE: none */
    bool is_stopping;
    _Atomic bool is_cancelled;
};

struct ssd {
    struct ssd_config config;
    char *db_path, *aside_path;
    int lock_fd;
    uint64_t memtable_bytes;
    _Atomic bool is_direct;
    bool was_set_aside;

    struct dir_files *files; /* files of the database directory */
    struct blobs *blobs;

    pthread_rwlock_t db_lock; /* see the note at the beginning of ssd.c */
    rocksdb_t *db;            /* NULL: lost */
    rocksdb_options_t *options;
    rocksdb_cache_t *cache;
    rocksdb_ratelimiter_t *limiter;
    rocksdb_readoptions_t *read_options;
    rocksdb_writeoptions_t *write_options[2]; /* [0]: without the write-ahead log, [1]: with it */

    enum td_status broken; /* not TD_OK: writing has ended for this reason, until ssd_reopen */
    /* since_bytes: put since the directory was measured. unlogged_bytes: of all puts, those only in
     * memory. */
    uint64_t since_bytes, unlogged_bytes;
    /* put_bytes: of all puts. value_bytes: of the last put. dead_bytes: deletes since deletes were merged,
     * each counted as value_bytes. */
    uint64_t put_bytes, value_bytes, dead_bytes;
    struct ssd_room room;
    /* A write to the log failed: nothing may be flushed, which a compaction would do. */
    _Atomic bool has_failed;
    _Atomic uint64_t dir_bytes, n_places, reclaims;
};

/* Converts RocksDB's error text to a status and frees it; NULL is TD_OK. */
enum td_status ssd_convert_error(char *text);
uint64_t ssd_property(const struct ssd *s, const char *name);
void ssd_measure(struct ssd *s); /* measures the directory */
/* Limit of the directory's size: the configured capacity, and no more than leaves a reserve of the file
 * system free. */
uint64_t ssd_limit_bytes(const struct ssd *s);
/*
 * Whether a file of some size fits beside the database. This tells a full or read-only file system from an
 * error that opening anew may mend. The size includes the log, because opening writes the log's contents into
 * files.
 */
bool ssd_can_write(const struct ssd *s);

void ssd_room_init(struct ssd *s);
void ssd_room_reset(struct ssd *s); /* call before the database is closed: ends the collection under way */
void ssd_room_fini(struct ssd *s);
