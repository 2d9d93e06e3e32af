/*
 * A file of packed matrices, in the order in which a forward pass packs them, that processes map instead of packing them again.
 *
 * All numbers are little-endian. Checksums are XXH3-64 (proto/wire/checksum.h) with the index of the matrix in them, so that a matrix
 * in another one's place fails, too.
 *
 *        0    8  "TANDEMPW"
 *        8    4  format, WEIGHT_FILE_FORMAT
 *       12    4  number of matrices n, at least 1
 *       16    8  length of the file
 *       24    8  where the table begins: behind the last matrix
 *       32    8  checksum of the table
 *       40  192  key, text, filled up with zeros: what the matrices are of and packed for
 *      232    8  checksum of bytes 0 .. 232
 *     4096       matrices, each at a multiple of 64, zeros between them
 *    table 24 n  of each matrix: offset, length, checksum, 8 bytes each; ends with the file
 *
 * A reader trusts nothing before it has checked it: sizes and offsets against the length of the file, each matrix against its
 * checksum. The whole content is read at each opening, because a flipped bit in a weight would go unnoticed for ever, and because
 * it costs little: XXH3 runs at the speed of memory, the model's fingerprint (SHA-256 of all weights) takes several times as long.
 *
 * Whoever changes how matrices are packed (kernels/cpu) or in which order (engine/forward_weights.c) raises WEIGHT_FILE_FORMAT;
 * test_weight_cache.c pins the bytes.
 *
 * Threads: one for each object. Errors: TD_ERR_CORRUPT and TD_ERR_VERSION say what is wrong with the file, TD_ERR_IO and
 * TD_ERR_NO_SPACE what the system said.
 */
#pragma once

#include <stdint.h>

#include "base/mem.h"

enum { WEIGHT_FILE_FORMAT = 1, WEIGHT_FILE_KEY_BYTES = 192 };

/* A mapped one; zero: none. */
struct weight_file {
    const uint8_t *base;
    uint64_t len_bytes;
    uint32_t n;
};

/* Maps and checks the file of len_bytes at fd, which may be closed then. */
enum td_status weight_file_map(int fd, uint64_t len_bytes, const char *key, struct weight_file *out,
                               struct td_error *error_out);
void weight_file_unmap(struct weight_file *f); /* of zero: nothing */
/* Matrix i of the n, 64-byte aligned. */
const void *weight_file_at(const struct weight_file *f, uint32_t i, uint64_t *len_bytes_out);

/* One that is written; zero but for fd, which is the caller's, of an empty file. */
struct weight_writer {
    int fd;
    uint64_t at;
    uint32_t n;
    struct bytes table;
};
enum td_status weight_writer_add(struct weight_writer *w, const void *data, uint64_t len_bytes,
                                 struct td_error *error_out);
/* After the last matrix: table and header; then all of it is on the disk. */
enum td_status weight_writer_end(struct weight_writer *w, const char *key, struct td_error *error_out);
void weight_writer_free(struct weight_writer *w);
