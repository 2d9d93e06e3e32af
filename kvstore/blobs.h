/*
 * Where values lie in RocksDB's blob files, so that they can be read straight from there.
 *
 * RocksDB reads a value into a buffer of its own from malloc, then copies it into another one. The disk is fed with small pages
 * that way, which more than halves its speed where huge ones are to be had, and the processor passes over the bytes twice for
 * nothing. So values are read here, past the page cache, into memory on huge pages; RocksDB keeps what is difficult: the
 * order of writes, files, garbage.
 *
 * A place is a hint: the file may be gone, or the bytes another block's. The caller verifies what it gets (block_header.h) and
 * asks RocksDB when it is not right, or when no place is known.
 *
 * A blob file (RocksDB's blob_log_format.h, version 1), little-endian: a header of 30 bytes, then records:
 *      0  u64 key bytes    8  u64 value bytes   16  u64 expiration   24  u32 crc of these   28  u32 crc of key and value
 *     32  key, value
 * and a footer once it is complete.
 *
 * Threads: blobs_read is free for all; everything else belongs to one.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "kvstore/dir_files.h"
#include "proto/wire/block_key.h"

struct blobs;

struct blobs_work {          /* what scanning did since opening, counted in places */
    uint64_t n_places;       /* known now */
    uint64_t n_moved;        /* looked at or moved to forget files, and to let tables grow */
    uint64_t longest_locked; /* most that were looked at while readers of a shard had to wait */
};

/* dir: RocksDB's, copied. files: what lies there; borrowed until blobs_close. Their marks belong to this. */
struct blobs *blobs_open(const char *dir, struct dir_files *files);
void blobs_close(struct blobs *b); /* NULL is fine */

/*
 * Looks through files and parts of files that are new as of dir_files_update, and forgets those that are gone: costs in proportion to
 * them. Stops after for_ns (0: never) and goes on from there the next time; returns whether it is done.
 */
bool blobs_scan(struct blobs *b, uint64_t for_ns);
struct blobs_work blobs_work(const struct blobs *b);

/* Bytes that a buffer for values of up to len_bytes must have; it lies on a page's border. */
size_t blobs_buffer_bytes(size_t len_bytes);
/* *value_out lies in the buffer. TD_ERR_NOT_FOUND: no place is known; TD_ERR_IO: it could not be read from there. */
enum td_status blobs_read(struct blobs *b, const struct block_key *key, void *buffer, size_t buffer_bytes,
                          const void **value_out, size_t *len_out);
