/*
 * A store's directory while no store runs on it: `tandem store` inspects, checks, exports and compacts it.
 *
 * An open directory is locked as by a running store, so neither can disturb the other. Only offline_compact
 * and offline_import write.
 *
 * Threads: one.
 * Errors: TD_ERR_REFUSED: a store uses the directory. TD_ERR_NOT_FOUND: no store ever used it.
 * TD_ERR_CORRUPT, TD_ERR_IO: it can't be opened.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "proto/wire/block_header.h"

struct offline;

enum offline_mode {
    OFFLINE_READ,
    OFFLINE_WRITE,
    OFFLINE_MAKE /* as OFFLINE_WRITE, and makes the directory if it doesn't exist */
};

enum td_status offline_open(const char *dir, enum offline_mode mode, const struct clock *clock, const struct log *log,
                            struct offline **out, struct td_error *error_out);
void offline_close(struct offline *o); /* NULL is fine */

/* One block by its header; blocks come by rising key. status: TD_OK, or what is wrong with the header;
 * then only header.key is set. */
struct offline_block {
    struct block_header header;
    enum td_status status;
};
typedef void offline_visit_fn(void *user, const struct offline_block *block);
enum td_status offline_each(struct offline *o, offline_visit_fn *visit, void *user, struct td_error *error_out);

enum { OFFLINE_TENANTS = 32 };
struct offline_info {
    /* From the headers: payloads as pages, and as stored (encoded). */
    uint64_t n_blocks, payload_bytes, stored_bytes;
    uint64_t n_by_codec[BLOCK_CODECS];
    uint64_t dir_bytes, blob_bytes, garbage_bytes, n_blob_files;
    uint64_t n_bad_headers;
    struct kv_layout layout; /* of the first block; n_layouts counts the different ones */
    uint32_t n_layouts, n_tenants;
    struct {
        uint32_t tenant; /* tenant id as in proto/wire/store_msg.h */
        uint64_t n_blocks, stored_bytes;
        /* In the order in which they were found; the last one counts all further tenants. */
    } tenants[OFFLINE_TENANTS];
};
enum td_status offline_info(struct offline *o, struct offline_info *out, struct td_error *error_out);

struct offline_report { /* n_blocks is the sum of the six counts behind it */
    uint64_t n_blocks, n_right, n_absent, n_corrupt, n_checksum, n_version, n_unreadable;
    uint64_t n_bytes; /* bytes read */
};
/* Called now and then while work goes on. */
typedef void offline_progress_fn(void *user, uint64_t n_done, uint64_t n_blocks);
/* Called for each block that is not right. */
typedef void offline_bad_fn(void *user, const struct block_key *key, enum td_status why);

struct offline_work {
    offline_progress_fn *on_progress; /* both callbacks may be NULL */
    offline_bad_fn *on_bad;
    void *user;
};

/* Reads and checks every block. */
enum td_status offline_verify(struct offline *o, const struct offline_work *work, struct offline_report *out,
                              struct td_error *error_out);
/* As offline_verify, and writes each good block to a new file at path: header and payload (block_header.h)
 * as stored, one block after the other. The header names the codec. */
enum td_status offline_export(struct offline *o, const char *path, const struct offline_work *work,
                              struct offline_report *out, struct td_error *error_out);
/*
 * Reads a file of offline_export and puts each good block into the directory, replacing a block of the same
 * key. TD_ERR_CORRUPT: a block's header can't be read, so the next block can't be found; blocks before it are
 * kept.
 */
enum td_status offline_import(struct offline *o, const char *path, const struct offline_work *work,
                              struct offline_report *out, struct td_error *error_out);
/* Removes garbage. *before_out, *after_out: size of the directory in bytes. */
enum td_status offline_compact(struct offline *o, uint64_t *before_out, uint64_t *after_out,
                               struct td_error *error_out);
