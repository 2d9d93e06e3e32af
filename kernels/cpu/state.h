/* A backend as opened: what the files that spread operations over the pool share. */
#pragma once

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/pool.h"

enum { PIECE_NUMBERS = 16384 }; /* elementwise work worth a claim */

struct kernels {
    const struct cpu_ops *ops;
    struct pool *pool;
    void *scratch; /* grows to the largest operation seen */
    size_t scratch_bytes;
};

/*
 * Memory of the operation that runs, until it asks again or ends. An operation can't fail, so a system that has none ends the
 * process.
 */
void *kernels_scratch(struct kernels *k, size_t len_bytes);
