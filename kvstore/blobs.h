/*
 * Where values lie in RocksDB's blob files, so that they can be read straight from the files.
 *
 * RocksDB reads a value into a buffer from malloc and then copies it into another one. So the disk reads into
 * small pages, which more than halves its speed where huge pages are available, and the processor passes over
 * the bytes twice for nothing. Therefore values are read here, past the page cache, into memory on huge
 * pages. RocksDB keeps the difficult work: order of writes, files, garbage.
 *
 * A place is a hint: the file may be gone, or the bytes there may belong to another block. The caller
 * verifies the value (block_header.h) and asks RocksDB if it is wrong, or if no place is known.
 *
 * A blob file (RocksDB's blob_log_format.h, version 1), little-endian: a header of 30 bytes, then records:
 *      0  u64 key bytes    8  u64 value bytes  16  u64 expiration   24  u32 crc of these  28  u32 crc of both
 *     32  key, value
 * ("both": key and value), and a footer once the file is complete.
 *
 * Threads: any thread may call blobs_read; everything else belongs to one thread.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "kvstore/dir_files.h"
#include "proto/wire/block_key.h"

struct blobs;

struct blobs_work {          /* work of scanning since opening, counted in places */
    uint64_t n_places;       /* places known now */
    uint64_t n_moved;        /* places looked at or moved, to forget files and to grow tables */
    uint64_t longest_locked; /* most places looked at while readers of a shard had to wait */
};

/* dir: RocksDB's directory, copied. files: the files in it, borrowed until blobs_close; their `mark`s
 * belong to this module. */
struct blobs *blobs_open(const char *dir, struct dir_files *files);
void blobs_close(struct blobs *b); /* NULL is fine */

/*
 * Learns the records of files that came or grew before the last dir_files_update, and forgets files that are
 * gone. The cost is proportional to these changes. Stops after for_ns (0: never) and continues there next
 * time; returns true if it is done.
 */
bool blobs_scan(struct blobs *b, uint64_t for_ns);
struct blobs_work blobs_work(const struct blobs *b);

/* Bytes that a page-aligned buffer needs for values of up to len_bytes. */
size_t blobs_buffer_bytes(size_t len_bytes);
/* *value_out lies in the buffer. TD_ERR_NOT_FOUND: no place is known, or its file is gone. TD_ERR_IO:
 * reading failed. */
enum td_status blobs_read(struct blobs *b, const struct block_key *key, void *buffer, size_t buffer_bytes,
                          const void **value_out, size_t *len_out);
