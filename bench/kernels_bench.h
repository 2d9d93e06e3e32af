/*
 * How fast the kernels are on this machine, as a share of what the machine can do.
 *
 * The limits are measured in the same run: memory bandwidth by reading far more than the caches hold,
 * arithmetic by the instruction alone in registers. An operation is compared with the limit that binds it
 * (roofline; Williams, Waterman and Patterson 2009): bandwidth if moving its bytes takes longer than its
 * arithmetic, else arithmetic. Every number is the best of several runs, because other load on the machine
 * only makes numbers worse; the limits' runs are spread over the bench.
 *
 * Shapes are those of a Llama with one billion parameters and attention at a context of 2048; on a device
 * eight billion, and contexts up to 16,384. There the limit of bf16 arithmetic is the largest product of
 * cuBLAS, and pages are also read over the link to the host.
 *
 * Threads: the caller waits; nothing is printed. About 15 seconds and 0.6 GB with the defaults; some GB of a
 * device.
 * Errors: TD_ERR_UNSUPPORTED for plain C, which is not meant to be fast; TD_ERR_NO_MEMORY.
 */
#pragma once

#include "kernels/kernels.h"

enum { KERNELS_BENCH_ROWS = 64 };

struct kernels_bench_config {
    struct kernels_config kernels;
    double seconds_per_row; /* 0: 0.2; a row takes at least three runs */
    uint32_t shrink;        /* divides shapes and buffers, to make a test quick; 0 and 1: no division */
    bool limits_only;       /* no operation is measured */
};

struct kernels_bench_row {
    char name[64];    /* e.g. "linear f32 2048x8192 T=1" (n_out x n_in) */
    const char *unit; /* "GB/s" or "GFLOP/s" */
    double value;
    double limit; /* 0 for rows that are limits themselves */
    double share; /* value / limit */
};

struct kernels_bench {
    const char *isa;
    uint32_t n_threads;
    uint32_t n_rows;
    struct kernels_bench_row rows[KERNELS_BENCH_ROWS]; /* limits first */
};

enum td_status kernels_bench(const struct kernels_bench_config *config, struct kernels_bench *out,
                             struct td_error *error_out);
