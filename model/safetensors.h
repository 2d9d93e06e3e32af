/*
 * safetensors as views into a mapping: nothing is copied; names, shapes and offsets are checked before use.
 *
 *   0  u64 header length N (little-endian, <= 100 MB, 8 + N <= file)
 *   8  N bytes JSON: {"name": {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {...}}
 *   8 + N  data
 *
 * Refused: offsets outside the file, reversed, overlapping or with a hole, a shape whose product overflows or
 * differs from the byte span, duplicate names. model.h decides which dtypes a tensor may have.
 *
 * Threads: immutable after opening.
 * Ownership: tensors borrow from the safetensors object.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "proto/wire/kv_layout.h" /* for enum num_type */

struct tensor {
    const char *name;
    /* 0: a dtype that is not computed with, such as U8 (codes of a format). */
    enum num_type type;
    uint32_t n_dims;
    uint64_t shape[4];
    const void *data;
    uint64_t len_bytes;
};

struct safetensors;

/* Opens model.safetensors, or model.safetensors.index.json with its shards. */
enum td_status safetensors_open_dir(const char *dir, struct safetensors **out, struct td_error *error_out);
enum td_status safetensors_open_file(const char *path, struct safetensors **out, struct td_error *error_out);
/* One file in memory, borrowed until close. For the fuzzer. */
enum td_status safetensors_open_memory(const void *data, size_t len_bytes, struct safetensors **out,
                                       struct td_error *error_out);
void safetensors_close(struct safetensors *s); /* NULL is fine */

/* NULL if there is no such tensor. */
const struct tensor *safetensors_find(const struct safetensors *s, const char *name);
uint32_t safetensors_count(const struct safetensors *s);
const struct tensor *safetensors_at(const struct safetensors *s, uint32_t i); /* sorted by name */
