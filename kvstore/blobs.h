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
 * Threads: blobs_scan belongs to one; blobs_read is free for all.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "proto/wire/block_key.h"

struct blobs;

struct blobs *blobs_open(const char *dir); /* RocksDB's; copied */
void blobs_close(struct blobs *b);         /* NULL is fine */

/* Looks through files and parts of files that are new, and forgets those that are gone. */
void blobs_scan(struct blobs *b);

/* Bytes that a buffer for values of up to len_bytes must have; it lies on a page's border. */
size_t blobs_buffer_bytes(size_t len_bytes);
/* *value_out lies in the buffer. TD_ERR_NOT_FOUND: no place is known; TD_ERR_IO: it could not be read from there. */
enum td_status blobs_read(struct blobs *b, const struct block_key *key, void *buffer, size_t buffer_bytes,
                          const void **value_out, size_t *len_out);
