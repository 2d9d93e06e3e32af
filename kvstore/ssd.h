/*
 * Blocks on SSD: RocksDB with blob files behind a bounded queue. The only file that sees RocksDB.
 *
 * Writing and deleting is done by one thread, in the order asked for; a put is durable when its callback says so: the
 * write-ahead log has it, which survives the death of the process, not of the power. Reading is done by several threads with
 * pinned gets; RocksDB's slow checksums are off, ours (block_header.h) decide whether a value is served.
 *
 * Two records a block, written together: "b" key -> header and payload (a blob), and "m" key -> the header alone, so that
 * opening lists the blocks without reading their bytes.
 *
 * Capacity is what the directory measures on disk, never more than the file system can spare. Deleting gives room back only
 * as whole blob files die: the writer compacts when it is over, and collects garbage when dead bytes hide in live files; what
 * is still too much it asks the owner to delete (on_over).
 *
 * The directory holds "blocks" (the database), "lock", and "blocks.aside": the last one that could not be opened.
 *
 * Callbacks come on the writer's and the readers' threads, once for each call that returned TD_OK, also at close.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "proto/wire/block_header.h"

struct ssd;

struct ssd_callbacks {
    void *user;
    /* While opening, on the caller's thread: a block that is durable. */
    void (*on_found)(void *user, const struct block_key *key, uint32_t chain_index);
    /* TD_OK: durable, and the payload is not needed any more. TD_ERR_NO_SPACE, TD_ERR_IO, TD_ERR_CORRUPT; TD_ERR_CANCELLED. */
    void (*on_put)(void *user, void *token, enum td_status status);
    /* TD_OK: verified and copied. TD_ERR_NOT_FOUND; TD_ERR_CORRUPT, _CHECKSUM, _VERSION: must not be served; TD_ERR_IO. */
    void (*on_read)(void *user, void *token, enum td_status status);
    /* So many bytes must go for anything more to fit. */
    void (*on_over)(void *user, uint64_t bytes);
};

struct ssd_config {
    const char *dir; /* made if it isn't there; its parent must exist */
    uint64_t capacity_bytes;
    uint64_t queue_bytes; /* payloads waiting to be written; one is always taken */
    uint32_t n_readers;
    const struct kv_layout *layout; /* borrowed; values of another one are deleted */
    const struct clock *clock;
    const struct log *log;
    struct ssd_callbacks callbacks;
};

struct ssd_stats {
    uint64_t dir_bytes, queued_bytes, written_bytes, read_bytes;
    uint64_t write_errors, read_errors, dropped_layout; /* sums since opening */
    uint64_t reclaims, reopens;
    bool was_set_aside, is_writable; /* is_writable: the last put succeeded */
};

/*
 * TD_ERR_REFUSED: another process has the directory. TD_ERR_IO: there is no directory to be had. A database that can't be
 * opened or listed is set aside, and an empty one opened.
 */
enum td_status ssd_open(const struct ssd_config *config, struct ssd **out, struct td_error *error_out);
/* What is queued is answered TD_ERR_CANCELLED. NULL is fine. */
void ssd_close(struct ssd *s);

/* How many blocks fit, with room for the log and for garbage: the owner deletes before it puts more. */
uint64_t ssd_max_blocks(const struct ssd *s);

/* payload: one page of the layout, unchanged until on_put. TD_BUSY: the queue is full. */
enum td_status ssd_put(struct ssd *s, const struct block_key *key, uint32_t chain_index, const void *payload,
                       void *token);
void ssd_delete(struct ssd *s, const struct block_key *key); /* after what was asked for before */
void ssd_read(struct ssd *s, const struct block_key *key, void *page, void *token); /* page is written until on_read */

struct ssd_stats ssd_stats(const struct ssd *s);
