/*
 * A file of packed matrices, in the order in which a forward pass packs them. Processes map it instead of
 * packing again.
 *
 * All numbers are little-endian. Checksums are XXH3-64 (proto/wire/checksum.h). They include the index of the
 * matrix, so a matrix in the place of another one fails, too.
 *
 *        0    8  "TANDEMPW"
 *        8    4  format, WEIGHT_FILE_FORMAT
 *       12    4  number of matrices n, at least 1
 *       16    8  length of the file
 *       24    8  offset of the table, behind the last matrix
 *       32    8  checksum of the table
 *       40  192  key: text padded with zeros, which says what the matrices are and for what they are packed
 *      232    8  checksum of bytes 0 .. 231
 *     4096       matrices, each at a multiple of 64, with zeros between them
 *    table 24 n  for each matrix: offset, length, checksum, 8 bytes each; the table ends with the file
 *
 * A reader trusts nothing before it was checked: sizes and offsets against the length of the file, each
 * matrix against its checksum. Each opening reads the whole content, because a flipped bit in a weight would
 * never be noticed, and because it costs little: XXH3 runs at the speed of memory; the model's fingerprint
 * (SHA-256 of all weights) takes several times longer.
 *
 * A change of how matrices are packed (kernels/cpu), or in which order (engine/forward_weights.c), must raise
 * WEIGHT_FILE_FORMAT; test_weight_cache.c pins the bytes.
 *
 * Threads: one for each object.
 * Errors: TD_ERR_CORRUPT and TD_ERR_VERSION say what is wrong with the file, TD_ERR_IO and TD_ERR_NO_SPACE
 * what the system said.
 */
#pragma once

#include <stdint.h>

#include "base/mem.h"

enum { WEIGHT_FILE_FORMAT = 1, WEIGHT_FILE_KEY_BYTES = 192 };

/* A mapped file; zeroed: none. */
struct weight_file {
    const uint8_t *base;
    uint64_t len_bytes;
    uint32_t n;
};

/* Maps and checks the file of len_bytes at fd. The caller may close fd afterwards. */
enum td_status weight_file_map(int fd, uint64_t len_bytes, const char *key, struct weight_file *out,
                               struct td_error *error_out);
void weight_file_unmap(struct weight_file *f); /* does nothing if it is zeroed */
/* Matrix i (< n), 64-byte aligned. */
const void *weight_file_at(const struct weight_file *f, uint32_t i, uint64_t *len_bytes_out);

/* A file that is being written. Zeroed, except fd: an empty file, which the caller closes. */
struct weight_writer {
    int fd;
    uint64_t at;
    uint32_t n;
    struct bytes table;
};
enum td_status weight_writer_add(struct weight_writer *w, const void *data, uint64_t len_bytes,
                                 struct td_error *error_out);
/* After the last matrix: writes table and header, and returns when everything is on the disk. */
enum td_status weight_writer_end(struct weight_writer *w, const char *key, struct td_error *error_out);
void weight_writer_free(struct weight_writer *w);
