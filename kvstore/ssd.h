/*
 * Blocks in a directory: a RocksDB database with blob files. ssd.c and ssd_room.c are the only files that see RocksDB.
 *
 * Two records a block, written together: "b" key -> header and payload (a blob), and "m" key -> the header alone, so that
 * listing the blocks reads none of their bytes. A logged put survives the death of the process when it returns (the
 * write-ahead log has it); after ssd_sync all that was put does, and the loss of power too.
 *
 * Capacity is what the directory measures on disk, never more than the file system can spare. Deleting gives room back only
 * as whole blob files die: ssd_make_room has deletes merged, and values moved when dead bytes hide in live files (ssd_room.c).
 *
 * The directory holds "blocks" (the database), "lock", and "blocks.aside": the last one that could not be opened. Reads go
 * past the page cache where the file system can do that: memory is what --dram-bytes says.
 *
 * Threads: ssd_get, ssd_get_into and ssd_release are free for all; everything else belongs to one thread.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "proto/wire/block_header.h"

struct ssd;

enum ssd_mode {
    SSD_SERVE,   /* made if it isn't there (its parent must exist); what can't be opened is set aside */
    SSD_INSPECT, /* must be there; nothing is written */
    SSD_REPAIR   /* must be there; may be written, nothing is set aside */
};

struct ssd_config {
    const char *dir;
    enum ssd_mode mode;
    uint64_t capacity_bytes;
    uint64_t background_bytes_per_s; /* most that flushing and collecting garbage write; 0: no limit */
    const struct clock *clock;
    const struct log *log;
};

/*
 * TD_ERR_REFUSED: another process has the directory. TD_ERR_IO: there is no directory to be had. TD_ERR_NOT_FOUND: nothing
 * there to inspect. When serving, a database that can't be opened is opened for reading alone if the disk is full (ssd_is_open is false);
 * else it is set aside, and an empty one opened.
 */
enum td_status ssd_open(const struct ssd_config *config, struct ssd **out, struct td_error *error_out);
void ssd_close(struct ssd *s); /* NULL is fine */

/* This thread, and those that RocksDB starts from it, get the processor after all others. */
void ssd_step_back(void);

/* Renames the database to "blocks.aside", whatever stood there before, and opens an empty one. */
enum td_status ssd_set_aside(struct ssd *s, const char *why, struct td_error *error_out);
bool ssd_was_set_aside(const struct ssd *s);

/* header: of len_bytes, not checked. False ends the visit. */
typedef bool ssd_visit_fn(void *user, const struct block_key *key, const void *header, size_t len_bytes);
enum td_status ssd_each(struct ssd *s, ssd_visit_fn *visit, void *user, struct td_error *error_out);

/*
 * is_logged: durable at once, and written twice; else durable after ssd_sync, and written once: for bulk. TD_ERR_NO_SPACE,
 * TD_ERR_IO, TD_ERR_CORRUPT.
 */
enum td_status ssd_put(struct ssd *s, const struct block_key *key, const uint8_t header[BLOCK_HEADER_BYTES],
                       const void *payload, size_t len_bytes, bool is_logged);
uint64_t ssd_batch_bytes(const struct ssd *s); /* after so much that is not logged, ssd_sync is due */
enum td_status ssd_delete(struct ssd *s, const struct block_key *key);

struct ssd_value { /* header and payload as they stand there, not checked; lent until ssd_release */
    const void *data;
    size_t len_bytes;
    void *pin;
};
/* TD_ERR_NOT_FOUND, TD_ERR_CORRUPT, TD_ERR_IO; TD_NOT_YET: the database is lost for now. Release only after TD_OK. */
enum td_status ssd_get(struct ssd *s, const struct block_key *key, struct ssd_value *out);
void ssd_release(struct ssd *s, struct ssd_value *value);
/*
 * The same, faster, into a buffer of the caller's of ssd_buffer_bytes, on a page's border; there is nothing to release.
 * TD_NOT_YET also: not to be had that way now. What doesn't verify may be an old copy: ssd_get decides.
 */
enum td_status ssd_get_into(struct ssd *s, const struct block_key *key, void *buffer, size_t buffer_bytes,
                            const void **value_out, size_t *len_out);
size_t ssd_buffer_bytes(size_t payload_bytes);
/* TD_OK: it is there. TD_ERR_NOT_FOUND; else it can't be said. Reads no payload. Any thread. */
enum td_status ssd_find(struct ssd *s, const struct block_key *key);
/* Some other key that is there; TD_ERR_NOT_FOUND if there is none. */
enum td_status ssd_neighbour(struct ssd *s, const struct block_key *key, struct block_key *out);

enum td_status ssd_sync(struct ssd *s); /* all that was put lies in files, and those are on the disk */

/*
 * Whether need_bytes more fit (0: whether the directory is within its limit). Room that deleted blocks take is collected by a thread
 * beside the caller's, from some time before it is needed. TD_NOT_YET: it is being collected, ask again (waits 20 ms at most if need_bytes);
 * TD_ERR_NO_SPACE: collecting did not help, or did not a short time ago: *over_out is what should be deleted; it is 0 between those times.
 */
enum td_status ssd_make_room(struct ssd *s, uint64_t need_bytes, uint64_t *over_out);
bool ssd_is_collecting(const struct ssd *s);
enum td_status ssd_compact(struct ssd *s); /* all garbage goes, however long it takes */
/* After the last change: measures again; false once nothing goes on in the background. */
bool ssd_tidy(struct ssd *s);
/* So that ssd_get_into finds what was written since; may read a page of each new value. Takes 10 ms at most, and says whether it is done. */
bool ssd_learn(struct ssd *s);

/* After an error. TD_ERR_IO: the directory can't be written, is full, or the database is lost. */
enum td_status ssd_reopen(struct ssd *s, struct td_error *error_out);
bool ssd_is_open(const struct ssd *s); /* for writing; else ssd_reopen is due. Reads may go on all the same */

struct ssd_info {
    uint64_t dir_bytes, limit_bytes, blob_bytes, garbage_bytes, n_blob_files;
    bool is_direct; /* past the page cache */
};
struct ssd_info ssd_info(struct ssd *s);
uint64_t ssd_dir_bytes(const struct ssd *s); /* these three: any thread */
uint64_t ssd_places(const struct ssd *s);    /* values whose place in a file is known */
uint64_t ssd_reclaims(const struct ssd *s);  /* rounds of collecting that ended since opening */
