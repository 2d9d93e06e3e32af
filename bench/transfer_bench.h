/*
 * Measures how fast pages move between an xfer that holds and one that pulls, verified as always, and in the
 * same run what limits them:
 *
 *   bare    a bare loop of UCX active messages over the same transport, with its best message size
 *   memcpy  one thread's copy of the same bytes
 *
 * Rounds alternate (ours, bare, ours again, memcpy), so that other work on the machine affects all of them
 * alike. Figures are medians; the spread says how much two runs of the same thing differ.
 *
 * A unit is what a holder announces at once: below a page (2 MiB here, 32 layers of 64 KiB) a range of layers
 * of one page, above it a run of pages.
 *
 * The two sides may be two machines: xfer_bench_serve on one, xfer_bench with that address on the other.
 * Otherwise they are one process. Nothing is printed.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/log.h"
#include "base/status.h"
#include "proto/wire/checksum.h"

struct xfer_bench_config {
    /* "mapped" (the reader maps the holder's arena), "shm" (UCX's shared memory), "tls" (tcp, encrypted;
     * beside a bare loop that is not), or a list as in xfer_config.transports. */
    const char *const *paths;
    uint32_t n_paths;
    const uint64_t *unit_bytes; /* multiples of 64 KiB; from 2 MiB on whole pages */
    uint32_t n_units;
    uint64_t arena_bytes; /* of each side, and size of one transfer; whole pages. 0: 256 MiB */
    uint32_t n_rounds;    /* 0: 10 */
    const char *peer;     /* "HOST:PORT" of xfer_bench_serve; NULL: this process is both sides */
    const char *secret;   /* cluster secret of the peer; NULL is "" */
    const struct log *log;
};

struct xfer_bench_row {
    const char *path;   /* from the config */
    char transport[64]; /* as the connection reports it */
    uint64_t unit_bytes, bytes, bare_message_bytes;
    double gb_per_s, bare_gb_per_s, memcpy_gb_per_s; /* decimal GB; medians */
    double share;                                    /* of the bare loop: median of the rounds' shares */
    double spread;                                   /* |ours - ours again| / ours, median */
    /* Processor time of both sides per GB, medians; 0 if the peer is elsewhere. Other work on the machine
     * changes it least. */
    double cpu_ms_per_gb, bare_cpu_ms_per_gb;
};

/* rows has room for n_paths * n_units rows, written in that order. On failure error_out names the row. */
enum td_status xfer_bench(const struct xfer_bench_config *config, struct xfer_bench_row *rows,
                          struct td_error *error_out);

/* AES-256-GCM of blocks of 16 KiB in one thread, in GB/s: what TLS has to do with each byte, on each side. */
double xfer_bench_aes_gb_per_s(void);

/* The holder's side, for a reader on another machine. */
struct xfer_bench_server;
enum td_status xfer_bench_serve(const char *listen, const char *path, const char *secret, uint64_t arena_bytes,
                                const struct log *log, struct xfer_bench_server **out, struct td_error *error_out);
const char *xfer_bench_server_address(const struct xfer_bench_server *s);
void xfer_bench_server_close(struct xfer_bench_server *s); /* NULL is fine */

/* One way to sum a page, measured with one thread over memory that no cache holds (cold), and over 256 KiB
 * in a cache (hot). */
struct xfer_bench_sum {
    const char *name;
    double cold_gb_per_s, hot_gb_per_s; /* 0: not available on this machine */
    double copy_gb_per_s;               /* copied and summed in one pass, cold; for memcpy: only copied */
};
enum { XFER_BENCH_SUMS = 6 };
enum td_status xfer_bench_sums(uint64_t bytes, struct xfer_bench_sum rows[XFER_BENCH_SUMS]);

/*
 * Ways to copy and sum (proto/wire/checksum.h), one thread, over `bytes` that no cache holds; rounds
 * alternate with memcpy, and the best round counts. start_gb_per_s: the result of the short measurement at
 * start, by which this process chose its way.
 */
struct xfer_bench_way {
    const char *name;
    double gb_per_s, start_gb_per_s;
    bool is_chosen;
};
struct xfer_bench_ways {
    uint32_t n;
    struct xfer_bench_way ways[CHECKSUM_WAYS_MAX];
    double memcpy_gb_per_s, start_memcpy_gb_per_s, start_ms;
};
enum td_status xfer_bench_copies(uint64_t bytes, struct xfer_bench_ways *out);
