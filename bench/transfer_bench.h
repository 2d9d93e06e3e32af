/*
 * How fast pages move: an xfer that holds, one that pulls, verified as always, beside what limits them, all in the same run:
 *
 *   bare    a bare loop of UCX active messages over the same transport, with the message size that suits it best
 *   memcpy  one thread's copy of the same bytes
 *
 * Rounds are interleaved (ours, bare, ours again, memcpy), so that what else the machine does hits all alike; figures are
 * medians, and the spread says how far two runs of the same thing lie apart.
 *
 * A unit is what a holder announces at once: below a page (2 MiB here, 32 layers of 64 KiB) a range of layers of one page,
 * beyond it a run of pages.
 *
 * The two sides may be two machines: xfer_bench_serve on one, xfer_bench with that address on the other. They are one process
 * otherwise. Nothing is printed.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/log.h"
#include "base/status.h"
#include "proto/wire/checksum.h"

struct xfer_bench_config {
    /* "mapped" (the holder's arena, mapped by the reader), "shm" (UCX's shared memory), or a list as of xfer_config.tls */
    const char *const *paths;
    uint32_t n_paths;
    const uint64_t *unit_bytes; /* multiples of 64 KiB; whole pages from 2 MiB on */
    uint32_t n_units;
    uint64_t arena_bytes; /* of each side; also the size of one transfer; whole pages. 0: 256 MiB */
    uint32_t n_rounds;    /* 0: 10 */
    const char *peer;     /* "HOST:PORT" of xfer_bench_serve; NULL: this process is both sides */
    const char *secret;   /* of the peer; NULL is "" */
    const struct log *log;
};

struct xfer_bench_row {
    const char *path;   /* of the config */
    char transport[64]; /* as read back from the connection */
    uint64_t unit_bytes, bytes, bare_message_bytes;
    double gb_per_s, bare_gb_per_s, memcpy_gb_per_s; /* decimal; medians */
    double share;                                    /* of the bare loop; the median of the rounds' own shares */
    double spread;                                   /* |ours - ours again| / ours, median */
    /* Processor time of both sides for a GB, medians, 0 with a peer elsewhere: what stays the same beside other work. */
    double cpu_ms_per_gb, bare_cpu_ms_per_gb;
};

/* rows has room for n_paths * n_units, written in that order. error_out says which row failed. */
enum td_status xfer_bench(const struct xfer_bench_config *config, struct xfer_bench_row *rows,
                          struct td_error *error_out);

/* The other side, for a reader elsewhere. */
struct xfer_bench_server;
enum td_status xfer_bench_serve(const char *listen, const char *path, const char *secret, uint64_t arena_bytes,
                                const struct log *log, struct xfer_bench_server **out, struct td_error *error_out);
const char *xfer_bench_server_address(const struct xfer_bench_server *s);
void xfer_bench_server_close(struct xfer_bench_server *s); /* NULL is fine */

/* One way to sum a page, measured with one thread over memory that no cache holds, and over 256 KiB that one does. */
struct xfer_bench_sum {
    const char *name;
    double cold_gb_per_s, hot_gb_per_s; /* 0: not on this machine */
    double copy_gb_per_s;               /* copied and summed on the way, cold; memcpy: only copied */
};
enum { XFER_BENCH_SUMS = 6 };
enum td_status xfer_bench_sums(uint64_t bytes, struct xfer_bench_sum rows[XFER_BENCH_SUMS]);

/*
 * Ways to copy and sum (proto/wire/checksum.h), one thread, over `bytes` that no cache holds; rounds in turns with memcpy, the best
 * of each. start_gb_per_s: what the short measurement at start found, by which this process chose.
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
