/* tandem bench transfer: KV pages between two endpoints, against a bare loop and memcpy; with --serve and
 * --peer between two hosts. */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/process.h"
#include "bench/bench.h"
#include "bench/transfer_bench.h"

enum { PATHS_MAX = 8 };
static const struct log LOG = {.who = "bench", .level = LOG_WARN};
static const uint64_t UNITS[] = {64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20};
enum { N_UNITS = sizeof(UNITS) / sizeof(UNITS[0]) };

static void add_sums(struct bench_rows *out)
{
    struct xfer_bench_sum sums[XFER_BENCH_SUMS];
    if (xfer_bench_sums(64 << 20, sums))
        return;
    for (int i = 0; i < XFER_BENCH_SUMS; i++) {
        if (sums[i].cold_gb_per_s > 0) {
            bench_add(out, "GB/s", sums[i].cold_gb_per_s, 0, "sum, cold: %s", sums[i].name);
            bench_add(out, "GB/s", sums[i].hot_gb_per_s, 0, "sum, 256 KiB in cache: %s", sums[i].name);
        }
        if (sums[i].copy_gb_per_s > 0)
            bench_add(out, "GB/s", sums[i].copy_gb_per_s, sums[0].copy_gb_per_s, "copy and sum, cold: %s",
                      sums[i].name);
    }
}

static void add_ways(struct bench_rows *out)
{
    struct xfer_bench_ways w;
    if (xfer_bench_copies(64 << 20, &w))
        return;
    for (uint32_t i = 0; i < w.n; i++) {
        const struct xfer_bench_way *way = &w.ways[i];
        const char *mark = way->is_chosen ? " (chosen)" : "";
        bench_add(out, "GB/s", way->gb_per_s, w.memcpy_gb_per_s, "way to copy and sum, cold, of memcpy: %s%s",
                  way->name, mark);
        bench_add(out, "GB/s", way->start_gb_per_s, w.start_memcpy_gb_per_s,
                  "way to copy and sum, as measured at start: %s%s", way->name, mark);
    }
    bench_add(out, "ms", w.start_ms, 0, "measuring the ways at start");
}

/* Encryption, and the same wire without it, one after the other. */
static void add_tls(struct bench_rows *out, const struct xfer_bench_row *rows, uint32_t n)
{
    double aes = 0;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < n && !strcmp(rows[i].path, "tls"); k++) {
            if (strcmp(rows[k].path, "tcp") != 0 || rows[k].unit_bytes != rows[i].unit_bytes)
                continue;
            aes = aes > 0 ? aes : xfer_bench_aes_gb_per_s();
            bench_add(out, "GB/s", rows[i].gb_per_s, 1 / (1 / aes + 1 / rows[k].gb_per_s),
                      "tls, units of %" PRIu64 " KiB: of tcp, then AES-256-GCM", rows[i].unit_bytes >> 10);
        }
    if (aes > 0)
        bench_add(out, "GB/s", aes, 0, "AES-256-GCM of 16 KiB, one thread");
}

static void add_row(struct bench_rows *out, const struct xfer_bench_row *r)
{
    char name[64];
    snprintf(name, sizeof(name), "%s, units of %" PRIu64 " KiB", r->path, r->unit_bytes >> 10);
    bench_add(out, "GB/s", r->gb_per_s, r->bare_gb_per_s, "%s: of the bare loop", name);
    bench_add(out, "%", 100 * r->spread, 0, "%s: A against A", name);
    bench_add(out, "GB/s", r->gb_per_s, r->memcpy_gb_per_s, "%s: of memcpy", name);
    if (r->cpu_ms_per_gb > 0)
        bench_add(out, "ms/GB", r->cpu_ms_per_gb, r->bare_cpu_ms_per_gb, "%s: processor time beside the bare loop's",
                  name);
}

static enum td_status serve(const struct bench_options *o, const char *path, struct td_error *e)
{
    struct xfer_bench_server *s;
    process_block_signals();
    enum td_status status = xfer_bench_serve(o->serve, path, o->secret, (uint64_t)o->bytes, &LOG, &s, e);
    if (status)
        return status;
    fprintf(stderr, "tandem bench: serving on %s until a signal comes\n", xfer_bench_server_address(s));
    sigset_t stop;
    int got;
    sigemptyset(&stop);
    sigaddset(&stop, SIGINT);
    sigaddset(&stop, SIGTERM);
    sigwait(&stop, &got);
    xfer_bench_server_close(s);
    return TD_OK;
}

/* Cuts "a+b" into words, in place. Lists of UCX transports contain commas, so lists are joined by plus
 * signs. */
static uint32_t split(char *text, const char *words[PATHS_MAX])
{
    uint32_t n = 0;
    char *rest = NULL;
    for (char *word = strtok_r(text, "+", &rest); word && n < PATHS_MAX; word = strtok_r(NULL, "+", &rest))
        words[n++] = word;
    return n;
}

static enum td_status measure_paths(const struct bench_options *o, const char *const *paths, uint32_t n_paths,
                                    struct bench_rows *out, struct td_error *error_out)
{
    struct xfer_bench_config c = {.paths = paths,
                                  .n_paths = n_paths,
                                  .unit_bytes = UNITS,
                                  .n_units = N_UNITS,
                                  .n_rounds = (uint32_t)o->rounds,
                                  .arena_bytes = (uint64_t)o->bytes,
                                  .peer = o->peer,
                                  .secret = o->secret,
                                  .log = &LOG};
    while (c.arena_bytes && c.n_units && UNITS[c.n_units - 1] > c.arena_bytes)
        c.n_units--;
    uint32_t n = c.n_paths * c.n_units;
    struct xfer_bench_row *rows = mem_array(n, sizeof(rows[0]));
    enum td_status s = xfer_bench(&c, rows, error_out);
    for (uint32_t i = 0; i < n && !s; i++)
        add_row(out, &rows[i]);
    if (!s)
        add_tls(out, rows, n);
    if (!s && !o->peer) {
        add_ways(out);
        add_sums(out);
    }
    free(rows);
    return s;
}

enum td_status bench_transfer(const struct bench_options *o, struct bench_rows *out, struct td_error *error_out)
{
    const char *paths[PATHS_MAX];
    char *text = mem_strdup(o->paths);
    uint32_t n_paths = split(text, paths);
    enum td_status s;
    if (!n_paths)
        s = td_fail(error_out, TD_ERR_INVALID, "--paths: there is none in \"%s\"", o->paths);
    else if (o->serve)
        s = serve(o, paths[0], error_out);
    else
        s = measure_paths(o, paths, o->peer ? 1 : n_paths, out, error_out);
    free(text);
    return s;
}
