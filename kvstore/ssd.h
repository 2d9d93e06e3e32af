/*
 * Blocks in a directory: a RocksDB database with blob files. ssd.c and ssd_room.c are the only files that
 * call RocksDB.
 *
 * A block has two records, which are written together: "b" key -> header and payload (a blob), and "m" key ->
 * the header alone, so that listing the blocks reads none of their payloads. When a logged put returns, the
 * block survives the death of the process (it is in the write-ahead log); after ssd_sync all puts do, and
 * survive a loss of power, too.
 *
 * Capacity is the measured size of the directory on disk, and never more than the file system can spare.
 * While room is collected, files that replace others lie beside them: then the directory may exceed its
 * capacity by up to two memtables (1/64 of the capacity each; 64 KiB at least, 64 MiB at most).
 * Deletes give room back only when whole blob files are dead: ssd_make_room has deletes merged, and has
 * values moved when dead bytes hide in files that also have live ones (ssd_room.c).
 *
 * The directory holds "blocks" (the database), "lock", and "blocks.aside": the last database that could not
 * be opened. It may be removed or replaced while the store runs: what it had is lost then (ssd_is_there).
 * Reads bypass the page cache if the file system can do that, so that the store's memory is what --dram-bytes
 * says.
 *
 * Threads: any thread may call ssd_get, ssd_get_into, ssd_release, ssd_find, ssd_neighbour and the functions
 * marked so below; everything else belongs to one thread, the writer.
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
    /* Made if it doesn't exist (its parent must); a database that can't be opened is set aside. */
    SSD_SERVE,
    SSD_INSPECT, /* must exist; nothing is written */
    SSD_REPAIR   /* must exist; may be written, nothing is set aside */
};

struct ssd_config {
    const char *dir;
    enum ssd_mode mode;
    uint64_t capacity_bytes;
    uint64_t background_bytes_per_s; /* limit of flushing and of collecting garbage; 0: none */
    const struct clock *clock;
    const struct log *log;
};

/*
 * TD_ERR_REFUSED: another process has the directory. TD_ERR_IO: the directory can't be made or used.
 * TD_ERR_NOT_FOUND: nothing there to inspect. With SSD_SERVE, a database that can't be opened is opened
 * read-only if the disk is full (ssd_is_open is false then); else it is set aside, and an empty one is
 * opened.
 */
enum td_status ssd_open(const struct ssd_config *config, struct ssd **out, struct td_error *error_out);
void ssd_close(struct ssd *s); /* NULL is fine */

/* Lowers the calling thread's priority, and that of threads that RocksDB starts from it. */
void ssd_step_back(void);

/* Renames the database to "blocks.aside", replacing an earlier one there, and opens an empty one. */
enum td_status ssd_set_aside(struct ssd *s, const char *why, struct td_error *error_out);
bool ssd_was_set_aside(const struct ssd *s);

/* header has len_bytes bytes and is not checked; borrowed during the call. Return false to end the visit. */
typedef bool ssd_visit_fn(void *user, const struct block_key *key, const void *header, size_t len_bytes);
enum td_status ssd_each(struct ssd *s, ssd_visit_fn *visit, void *user, struct td_error *error_out);

/* is_logged: durable on return, and written twice. Otherwise durable after ssd_sync, and written once: for
 * bulk. TD_ERR_NO_SPACE, TD_ERR_IO, TD_ERR_CORRUPT. */
enum td_status ssd_put(struct ssd *s, const struct block_key *key, const uint8_t header[BLOCK_HEADER_BYTES],
                       const void *payload, size_t len_bytes, bool is_logged);
uint64_t ssd_batch_bytes(const struct ssd *s); /* when this much was put without log, ssd_sync is due */
enum td_status ssd_delete(struct ssd *s, const struct block_key *key);

struct ssd_value { /* header and payload as stored, not checked; borrowed until ssd_release */
    const void *data;
    size_t len_bytes;
    void *pin;
};
/* TD_ERR_NOT_FOUND, TD_ERR_CORRUPT, TD_ERR_IO. TD_NOT_YET: the database is lost for now. After TD_OK the
 * caller must call ssd_release, on the same thread. */
enum td_status ssd_get(struct ssd *s, const struct block_key *key, struct ssd_value *out);
void ssd_release(struct ssd *s, struct ssd_value *value);
/*
 * Faster than ssd_get: reads the stored value into the caller's page-aligned buffer of ssd_buffer_bytes.
 * *value_out lies in it; nothing is to be released. TD_ERR_NOT_FOUND, or TD_NOT_YET: use ssd_get. A value
 * that does not verify may be an old copy: use ssd_get then, too.
 */
enum td_status ssd_get_into(struct ssd *s, const struct block_key *key, void *buffer, size_t buffer_bytes,
                            const void **value_out, size_t *len_out);
size_t ssd_buffer_bytes(size_t payload_bytes);
/* TD_OK: the block is there. TD_ERR_NOT_FOUND: it is not. Any other status: unknown. Reads no payload. Any
 * thread. */
enum td_status ssd_find(struct ssd *s, const struct block_key *key);
/* Finds another key that is there; TD_ERR_NOT_FOUND if there is none. For injected faults. */
enum td_status ssd_neighbour(struct ssd *s, const struct block_key *key, struct block_key *out);

enum td_status ssd_sync(struct ssd *s); /* everything that was put is in files, and these are on the disk */

/*
 * TD_OK: need_bytes more fit (need 0: the directory is within its limit). Room of deleted blocks is collected
 * by a thread, which begins before the room is needed. TD_NOT_YET: room is being collected, ask again; waits
 * up to 20 ms if need_bytes is not 0. TD_ERR_NO_SPACE: collecting did not help, or did not help a short time
 * ago. *over_out: bytes of blocks that should be deleted; 0 unless a collection has just failed to help.
 */
enum td_status ssd_make_room(struct ssd *s, uint64_t need_bytes, uint64_t *over_out);
bool ssd_is_collecting(const struct ssd *s);
enum td_status ssd_compact(struct ssd *s); /* removes all garbage, however long it takes */
/* Call after the last change: measures the directory again. Returns false once nothing goes on in the
 * background. */
bool ssd_tidy(struct ssd *s);
/* Learns the places of values written since the last call, so that ssd_get_into finds them. May read a
 * page of each new value. Takes up to 10 ms; returns true if it is done. */
bool ssd_learn(struct ssd *s);

/* False: the directory was removed, or another one has its name. Then nothing is written any more, and
 * ssd_reopen is due. */
bool ssd_is_there(struct ssd *s);
/* Closes the database and opens it anew after an error, in the directory that has the name now; makes one if
 * there is none. TD_ERR_IO: the directory can't be made or written, is full, or the database is lost.
 * TD_ERR_REFUSED: another process has the directory. */
enum td_status ssd_reopen(struct ssd *s, struct td_error *error_out);
/* Open for writing; false: ssd_reopen is due, but reads may still work. */
bool ssd_is_open(const struct ssd *s);

struct ssd_info {
    uint64_t dir_bytes, limit_bytes, blob_bytes, garbage_bytes, n_blob_files;
    bool is_direct; /* reads bypass the page cache */
};
struct ssd_info ssd_info(struct ssd *s);
uint64_t ssd_dir_bytes(const struct ssd *s); /* this and the next two: any thread */
uint64_t ssd_places(const struct ssd *s);    /* values whose place in a file is known */
uint64_t ssd_reclaims(const struct ssd *s);  /* rounds of collecting that have ended since opening */
