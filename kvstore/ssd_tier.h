/*
 * The SSD tier: blocks written by one thread from a bounded queue, and read by several threads, over the
 * database of ssd.h.
 *
 * Puts and deletes are done in the order in which they were asked for, no faster than the configured rate; a
 * put is durable when its callback says so. Our checksums (block_header.h) decide whether a value is served.
 * If the directory is over its capacity, the owner is asked to delete blocks (on_over). Blocks are written
 * with the configured codec, and read with the codec that their header names.
 *
 * A read that takes longer than its deadline makes the tier slow, until a read ends in time. A slow tier
 * reads one block at a time, as a probe, and answers TD_NOT_YET to all other reads; a late read still ends
 * with its callback. After an error of the disk the database is opened anew, every few seconds until that
 * succeeds, and its blocks are listed (on_listed); so it is after the directory was removed or replaced,
 * which is seen within a second. Until then writes are refused while the database can't be written, and reads
 * go on as long as they can.
 *
 * Threads: the functions are for one thread, the owner's; ssd_tier_read, ssd_tier_is_slow and ssd_tier_stats
 * may be called from any. Callbacks come on the writer's and the readers' threads: on_put once for each put
 * that returned TD_OK, on_read once for each read, also at close.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/log.h"
#include "base/status.h"
#include "kvstore/codec.h"

struct ssd_tier;

struct ssd_callbacks {
    void *user;
    /* While opening, on the caller's thread: called for each block that is durable. */
    void (*on_found)(void *user, const struct block_header *header);
    /* TD_OK: durable. Else TD_ERR_NO_SPACE, TD_ERR_IO, TD_ERR_CORRUPT or TD_ERR_CANCELLED. The page is not
     * needed any more in any case. */
    void (*on_put)(void *user, void *token, enum td_status status);
    /*
     * TD_OK: verified and copied to the page. TD_ERR_NOT_FOUND. TD_ERR_CORRUPT, _CHECKSUM, _VERSION: the
     * block must not be served. TD_ERR_IO. TD_NOT_YET: the tier is slow or lost for now, the block may still
     * be there. TD_ERR_CANCELLED: the tier is closing.
     */
    void (*on_read)(void *user, void *token, enum td_status status);
    /* Blocks of this many bytes should be deleted so that anything more fits. */
    void (*on_over)(void *user, uint64_t bytes);
    /*
     * After an error: the keys of all blocks on disk, concatenated, in rising order; the callee owns *keys.
     * The list contains all puts answered before; a put that is queued now may be in it or not. The owner
     * deletes the blocks that it does not know, then calls ssd_tier_compared.
     */
    void (*on_listed)(void *user, struct bytes *keys);
};

struct ssd_tier_config {
    const char *dir; /* made if it doesn't exist; its parent must exist */
    uint64_t capacity_bytes;
    uint64_t queue_bytes;       /* limit of payloads waiting to be written; one is always taken */
    uint64_t write_bytes_per_s; /* limit of writing; 0: none */
    uint64_t read_deadline_ns;  /* a read that takes longer makes the tier slow; 0: never */
    uint32_t n_readers;
    enum block_codec codec;
    const struct kv_layout *layout; /* borrowed; values with another layout are deleted */
    struct faults *faults;          /* borrowed; NULL: none */
    const struct clock *clock;
    const struct log *log;
    struct ssd_callbacks callbacks;
};

struct ssd_tier_stats {
    /* The last three count pages before encoding. */
    uint64_t dir_bytes, queued_bytes, written_bytes, read_bytes;
    uint64_t write_errors, read_errors, dropped_layout; /* sums since opening */
    uint64_t reclaims, reopens;
    uint64_t n_places; /* values whose place in a file is known, so that they are read straight from it */
    bool was_set_aside, is_writable, is_slow; /* is_writable: the last put succeeded */
    bool is_in_doubt;                         /* after an error, until ssd_tier_compared */
};

/* TD_ERR_REFUSED: another process has the directory. TD_ERR_IO: the directory can't be made or used. A
 * database that can't be opened or listed is set aside, and an empty one opened. */
enum td_status ssd_tier_open(const struct ssd_tier_config *config, struct ssd_tier **out, struct td_error *error_out);
/* Queued puts and reads end with TD_ERR_CANCELLED, then the threads are joined. NULL is fine. */
void ssd_tier_close(struct ssd_tier *t);

/* block_bytes: mean size of a recent block on SSD. max_blocks: blocks that fit, leaving room for the log
 * and for garbage; the owner evicts before it puts more. */
uint64_t ssd_tier_block_bytes(const struct ssd_tier *t);
uint64_t ssd_tier_max_blocks(const struct ssd_tier *t);

struct ssd_put {
    struct block_key key;
    uint32_t chain_index, tenant;
    const void *page; /* one page of the layout; must not change until on_put */
    void *token;
};
/* TD_BUSY: the queue is full, and on_put does not come. */
enum td_status ssd_tier_put(struct ssd_tier *t, const struct ssd_put *put);
/*
 * Deletes the block after everything that was asked for before. for_good: if the disk takes no deletes now,
 * the block must not come back at the next start either (kvstore/forgotten.h), and a put of it is refused
 * until it has been deleted. Use for_good for each block that is to be forgotten, also for one that the owner
 * does not know: it may be on disk all the same; if it is not, this costs little. key NULL: every block that
 * the owner may not know; only with for_good.
 */
void ssd_tier_delete(struct ssd_tier *t, const struct block_key *key, bool for_good);
/* Once for each on_listed, after the deletes that resulted from it. */
void ssd_tier_compared(struct ssd_tier *t);
/* Reads a block into page, which is written until on_read. */
void ssd_tier_read(struct ssd_tier *t, const struct block_key *key, void *page, void *token);
/* The store is stopping: from now on only RocksDB's flushes keep to the rate. */
void ssd_tier_hurry(struct ssd_tier *t);

bool ssd_tier_is_slow(struct ssd_tier *t);
struct ssd_tier_stats ssd_tier_stats(struct ssd_tier *t);
