/* What ssd.c (the database and its records) and ssd_room.c (the room they take) share: the two files that see RocksDB. */
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

struct room {
    /* The writer's. */
    enum room_state state;
    uint64_t files_left;   /* blob files that had no turn to be moved yet */
    double cutoff;         /* RocksDB's: the oldest part of the files whose values are moved; 0: none are */
    uint64_t fruitless_ns; /* end of the last collection, if it gave too little */
    bool is_in_need;       /* the collection under way began when nothing fitted any more */
    bool must_evict;       /* it gave too little, and the owner was not told yet */
    uint64_t planned_bytes, put_before_bytes; /* while values are moved: see size_bytes */
    bool is_up;                               /* the thread */
    pthread_t thread;

    /* Of whoever compacts. */
    uint64_t n_unknown; /* blob files in the directory that RocksDB does not know */

    pthread_mutex_t lock; /* the rest: the writer asks for one round, and waits a little for its end: no queue of one */
    pthread_cond_t changed;
    enum room_state round; /* asked for, and under way; ROOM_IDLE: none */
    bool is_stopping;
    _Atomic bool is_cancelled;
};

struct ssd {
    struct ssd_config config;
    char *db_path, *aside_path;
    char log_path[32]; /* RocksDB's texts; empty: in the database */
    int lock_fd;
    uint64_t memtable_bytes;
    bool is_direct, was_set_aside;

    struct dir_files *files; /* of the database */
    struct blobs *blobs;

    pthread_rwlock_t db_lock; /* see the note at the beginning of ssd.c */
    rocksdb_t *db;            /* NULL: lost */
    rocksdb_options_t *options;
    rocksdb_cache_t *cache;
    rocksdb_ratelimiter_t *limiter;
    rocksdb_readoptions_t *read_options;
    rocksdb_writeoptions_t *write_options[2]; /* without the log, with it */

    enum td_status broken;                /* why nothing can be written any more */
    uint64_t since_bytes, unlogged_bytes; /* put since the directory was measured; of them in memory only */
    uint64_t put_bytes, value_bytes,
        dead_bytes; /* in all; the last one's; deleted since deletes were merged, as large as that */
    struct room room;
    _Atomic bool has_failed; /* a write to the log: nothing may be flushed any more, which a compaction does */
    _Atomic uint64_t dir_bytes, n_places, reclaims;
};

/* RocksDB's words to a status; frees them. */
enum td_status ssd_convert_error(char *text);
uint64_t ssd_property(const struct ssd *s, const char *name);
void ssd_measure(struct ssd *s); /* the directory */
/* What the directory may measure: as configured, and a reserve of the file system is left free. */
uint64_t ssd_limit_bytes(const struct ssd *s);
/*
 * Whether a file fits beside the database: what tells a full or read-only file system from an error that opening may mend.
 * Opening writes what only the log has into files.
 */
bool ssd_can_write(const struct ssd *s);

void ssd_room_init(struct ssd *s);
void ssd_room_reset(struct ssd *s); /* before the database is closed: nothing is collected then */
void ssd_room_fini(struct ssd *s);
