/*
 * How fast pages move on this machine: two xfers in this process, one holds, one pulls, over UCX, verified as always. Beside
 * each figure stands what one thread's memcpy of the same pages reached in the same run, which is the limit for a copy
 * between two local processes.
 *
 * Blocks for some seconds. Nothing is printed.
 */
#pragma once

#include <stdint.h>

#include "base/log.h"
#include "base/status.h"

struct xfer_bench_config {
    const char *const *tls; /* UCX transports to try, one after the other: "auto" (shared memory), "tcp" */
    uint32_t n_tls;
    const uint64_t *page_bytes; /* each a multiple of 4096, up to 64 MiB */
    uint32_t n_page_bytes;
    uint64_t arena_bytes;  /* of each side; also the size of one transfer. 0: 128 MiB */
    uint64_t min_ns;       /* each row is measured at least so long; 0: 1 s */
    const struct log *log; /* may be NULL */
};

struct xfer_bench_row {
    const char *tls;    /* of the config */
    char transport[64]; /* as read back from the endpoint */
    uint64_t page_bytes, bytes;
    double seconds, gb_per_s, memcpy_gb_per_s; /* decimal */
};

/* rows has room for n_tls * n_page_bytes, written in that order. error_out says which row failed. */
enum td_status xfer_bench(const struct xfer_bench_config *config, struct xfer_bench_row *rows,
                          struct td_error *error_out);
