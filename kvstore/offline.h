/*
 * A store's directory while no store runs on it: what `tandem store` looks at, checks, copies out of and tidies.
 *
 * Whoever opens it holds the lock that a store takes, so neither disturbs the other. Only offline_compact and offline_import
 * write.
 *
 * Threads: one. Errors: TD_ERR_REFUSED: a store uses the directory; TD_ERR_NOT_FOUND: none ever did; TD_ERR_CORRUPT, TD_ERR_IO: it
 * can't be opened.
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
    OFFLINE_MAKE /* OFFLINE_WRITE, and a directory is made where there is none */
};

enum td_status offline_open(const char *dir, enum offline_mode mode, const struct clock *clock, const struct log *log,
                            struct offline **out, struct td_error *error_out);
void offline_close(struct offline *o); /* NULL is fine */

/* A block as its header says, by rising key. status: TD_OK, or what is wrong with the header; then only key is set. */
struct offline_block {
    struct block_header header;
    enum td_status status;
};
typedef void offline_visit_fn(void *user, const struct offline_block *block);
enum td_status offline_each(struct offline *o, offline_visit_fn *visit, void *user, struct td_error *error_out);

enum { OFFLINE_TENANTS = 32 };
struct offline_info {
    uint64_t n_blocks, payload_bytes, stored_bytes; /* by the headers: as pages, and as encoded */
    uint64_t n_by_codec[BLOCK_CODECS];
    uint64_t dir_bytes, blob_bytes, garbage_bytes, n_blob_files;
    uint64_t n_bad_headers;
    struct kv_layout layout; /* of the first block; n_layouts says how many differ */
    uint32_t n_layouts, n_tenants;
    struct {
        uint32_t tenant; /* proto/wire/store_msg.h */
        uint64_t n_blocks, stored_bytes;
    } tenants[OFFLINE_TENANTS]; /* the first that were met; the last stands for all further ones */
};
enum td_status offline_info(struct offline *o, struct offline_info *out, struct td_error *error_out);

struct offline_report { /* the first is the sum of the others */
    uint64_t n_blocks, n_right, n_absent, n_corrupt, n_checksum, n_version, n_unreadable;
    uint64_t n_bytes; /* read */
};
/* Now and then while it works: blocks done of how many. */
typedef void offline_progress_fn(void *user, uint64_t n_done, uint64_t n_blocks);
/* Called for each block that is not right; NULL: nobody is. */
typedef void offline_bad_fn(void *user, const struct block_key *key, enum td_status why);

struct offline_work {
    offline_progress_fn *on_progress; /* NULL: nobody wants to know */
    offline_bad_fn *on_bad;
    void *user;
};

/* Reads and checks every block. */
enum td_status offline_verify(struct offline *o, const struct offline_work *work, struct offline_report *out,
                              struct td_error *error_out);
/*
 * The same, and writes what is right to a new file: header and payload of one block after the other (block_header.h), as they
 * are stored: the header names the codec.
 */
enum td_status offline_export(struct offline *o, const char *path, const struct offline_work *work,
                              struct offline_report *out, struct td_error *error_out);
/*
 * Reads a file of offline_export: each block that is right is put into the directory; one of the same key is replaced. TD_ERR_CORRUPT: a
 * block's header can't be read, so what follows it can't be found; what came before is kept.
 */
enum td_status offline_import(struct offline *o, const char *path, const struct offline_work *work,
                              struct offline_report *out, struct td_error *error_out);
/* Garbage goes; before and after are sizes of the directory. */
enum td_status offline_compact(struct offline *o, uint64_t *before_out, uint64_t *after_out,
                               struct td_error *error_out);
