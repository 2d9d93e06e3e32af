/*
 * The SSD tier: blocks written by one thread from a bounded queue, and read by several, over the database of ssd.h.
 *
 * Writing and deleting is done in the order asked for, no faster than the rate allows; a put is durable when its callback says
 * so. Our checksums (block_header.h) decide whether a value is served. What is over the capacity the owner is asked to delete
 * (on_over). Blocks are written with the codec of the configuration, and read with that of their header.
 *
 * A read that takes longer than its deadline makes the tier slow, until one ends in time. Then it reads one block at a time, to
 * see whether it is better, and answers TD_NOT_YET to the others; a late read still ends with its callback. After an error of the disk
 * the database is opened anew, every few seconds until that succeeds, and its blocks are listed (on_listed); until then writes are
 * refused where the database can't be written, and reads go on as long as they can.
 *
 * Callbacks come on the writer's and the readers' threads, once for each call that returned TD_OK, also at close.
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
    /* While opening, on the caller's thread: a block that is durable. */
    void (*on_found)(void *user, const struct block_header *header);
    /* TD_OK: durable, and the payload is not needed any more. TD_ERR_NO_SPACE, TD_ERR_IO, TD_ERR_CORRUPT; TD_ERR_CANCELLED. */
    void (*on_put)(void *user, void *token, enum td_status status);
    /*
     * TD_OK: verified and copied. TD_ERR_NOT_FOUND; TD_ERR_CORRUPT, _CHECKSUM, _VERSION: must not be served; TD_ERR_IO;
     * TD_NOT_YET: the tier is slow or lost for now, the block may well be there.
     */
    void (*on_read)(void *user, void *token, enum td_status status);
    /* So many bytes must go for anything more to fit. */
    void (*on_over)(void *user, uint64_t bytes);
    /*
     * After an error: the keys of all blocks on disk, one behind the other, by rising key; they are the callee's to free. All that was
     * answered before is in it, and nothing that was asked for and is not answered yet must be. Blocks that the owner did not expect
     * are its to delete; then it calls ssd_tier_compared.
     */
    void (*on_listed)(void *user, struct bytes *keys);
};

struct ssd_tier_config {
    const char *dir; /* made if it isn't there; its parent must exist */
    uint64_t capacity_bytes;
    uint64_t queue_bytes;       /* payloads waiting to be written; one is always taken */
    uint64_t write_bytes_per_s; /* 0: as fast as it goes */
    uint64_t read_deadline_ns;  /* 0: none */
    uint32_t n_readers;
    enum block_codec codec;
    const struct kv_layout *layout; /* borrowed; values of another one are deleted */
    struct faults *faults;          /* borrowed; NULL: none */
    const struct clock *clock;
    const struct log *log;
    struct ssd_callbacks callbacks;
};

struct ssd_tier_stats {
    uint64_t dir_bytes, queued_bytes, written_bytes, read_bytes; /* the last three: pages, before encoding */
    uint64_t write_errors, read_errors, dropped_layout;          /* sums since opening */
    uint64_t reclaims, reopens;
    uint64_t n_places;                        /* values that are read straight from their files */
    bool was_set_aside, is_writable, is_slow; /* is_writable: the last put succeeded */
    bool is_in_doubt;                         /* after an error, until ssd_tier_compared */
};

/*
 * TD_ERR_REFUSED: another process has the directory. TD_ERR_IO: there is no directory to be had. A database that can't be
 * opened or listed is set aside, and an empty one opened.
 */
enum td_status ssd_tier_open(const struct ssd_tier_config *config, struct ssd_tier **out, struct td_error *error_out);
/* What is queued is answered TD_ERR_CANCELLED. NULL is fine. */
void ssd_tier_close(struct ssd_tier *t);

/* What a block takes: the mean of late ones. How many fit, with room for the log and for garbage: the owner deletes before. */
uint64_t ssd_tier_block_bytes(const struct ssd_tier *t);
uint64_t ssd_tier_max_blocks(const struct ssd_tier *t);

struct ssd_put {
    struct block_key key;
    uint32_t chain_index, tenant;
    const void *page; /* of the layout; unchanged until on_put */
    void *token;
};
/* TD_BUSY: the queue is full. */
enum td_status ssd_tier_put(struct ssd_tier *t, const struct ssd_put *put);
/*
 * After what was asked for before. for_good: if the disk takes no deletes now the block does not come back at the next start either
 * (kvstore/forgotten.h), and a put of it is refused until it was deleted. Such a delete is for every block that is to be forgotten, also
 * one that the owner does not know: it may be there all the same. It costs little where nothing is. key NULL: every block that the owner
 * may not know; for_good only.
 */
void ssd_tier_delete(struct ssd_tier *t, const struct block_key *key, bool for_good);
void ssd_tier_compared(struct ssd_tier *t); /* once for each on_listed, after the deletes that came of it */
/* page is written until on_read */
void ssd_tier_read(struct ssd_tier *t, const struct block_key *key, void *page, void *token);
void ssd_tier_hurry(struct ssd_tier *t); /* from now on only flushes are held to the rate: we are stopping */

bool ssd_tier_is_slow(struct ssd_tier *t);
struct ssd_tier_stats ssd_tier_stats(struct ssd_tier *t);
