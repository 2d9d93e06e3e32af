/*
 * How fast the store is on this machine, as a share of what memory and disk can do.
 *
 * A store and a worker in this process, over loopback transfers (which copy once, and check every byte on both sides): blocks
 * are put, read back from DRAM, and, after a restart and with the page cache emptied of them, from SSD. The limits are measured
 * in the same run: memcpy by one thread, and O_DIRECT writing and reading of a file in the same directory, blocks of the same
 * size, as many reading threads as the store has.
 *
 * Threads: the caller waits; nothing is printed.
 * Errors:  TD_ERR_UNSUPPORTED where the directory's file system has no O_DIRECT; TD_ERR_IO; TD_ERR_NO_MEMORY.
 */
#pragma once

#include <stdint.h>

#include "base/status.h"

enum { KVSTORE_BENCH_ROWS = 8 };

struct kvstore_bench_config {
    const char *dir;       /* exists; what the bench makes there it removes */
    uint64_t bytes;        /* working set; 0: 512 MiB. Three times as much memory is needed */
    uint32_t read_threads; /* 0: 4 */
};

struct kvstore_bench_row { /* as struct kernels_bench_row */
    char name[64];
    const char *unit; /* "GB/s" */
    double value;
    double limit; /* 0 for a row that is a limit itself */
    double share; /* value / limit */
};

struct kvstore_bench {
    uint32_t n_rows;
    uint64_t block_bytes;
    struct kvstore_bench_row rows[KVSTORE_BENCH_ROWS]; /* limits first */
};

enum td_status kvstore_bench(const struct kvstore_bench_config *config, struct kvstore_bench *out,
                             struct td_error *error_out);
