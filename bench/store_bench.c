/* Each measurement opens the store that it needs, moves the whole working set, and closes the store. Bytes
 * written by RocksDB are those written by this process (/proc/self/io) while nothing else wrote. */
#include "bench/store_bench.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/endian.h"
#include "base/random.h"
#include "base/thread.h"
#include "bench/store_client.h"
#include "kvstore/kvstore_internal.h"

enum {
    THREADS_MAX = 64,
    ROUNDS_MAX = 64,
    SAMPLES_MAX = 1 << 16,
    LARGE_LAYERS = 32,
    SMALL_LAYERS = 8,
    DURABLE_ROUNDS = 3,
    INDEX_RECORDS = 64,          /* records per imitated file: 64 MiB of blocks of 1 MiB */
    FIRST_INDEX_FILE = 900000000 /* RocksDB's file numbers never get that high */
};
static const char *const GB_S = "GB/s";

struct store_bench_run {
    const struct kvstore_bench_config *config;
    struct kvstore_bench *out;
    struct bench_client client;
    struct bytes dir, store_dir;
    struct kvstore_config store_config;
    struct kvstore *store;
    pthread_t main;
    uint32_t n_rounds, n_threads;
    char dims[96];
    struct td_error *error;
};

struct round {
    double before, value, after; /* limit before, store, limit after */
};

/* ------------------------------------------------------------------- rows */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *v, uint32_t n)
{
    qsort(v, n, sizeof(*v), by_value);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

static struct kvstore_bench_row *add_row(struct store_bench_run *b, const char *unit, double value, double limit,
                                         const char *what, const char *how)
{
    struct kvstore_bench_row *r = &b->out->rows[b->out->n_rows++];
    *r = (struct kvstore_bench_row){
        .unit = unit, .value = value, .limit = limit, .share = limit > 0 ? value / limit : 0};
    snprintf(r->name, sizeof(r->name), "%s, %u KiB blocks, %s", what, (unsigned)(b->client.page_bytes >> 10), how);
    return r;
}

static void add_rounds(struct store_bench_run *b, const struct round *rounds, uint32_t n, const char *what,
                       const char *how)
{
    double value[ROUNDS_MAX], limit[ROUNDS_MAX], share[ROUNDS_MAX], spread[ROUNDS_MAX];
    for (uint32_t i = 0; i < n; i++) {
        const struct round *r = &rounds[i];
        value[i] = r->value;
        limit[i] = (r->before + r->after) / 2;
        share[i] = r->value / limit[i];
        spread[i] = (r->before > r->after ? r->before - r->after : r->after - r->before) / limit[i];
    }
    double v = median(value, n), l = median(limit, n);
    struct kvstore_bench_row *row = add_row(b, GB_S, v, l, what, how);
    row->share = median(share, n);
    row->spread = median(spread, n);
    size_t len = strlen(row->name);
    snprintf(row->name + len, sizeof(row->name) - len, " (+-%.0f %%)", 100 * row->spread);
}

static uint64_t now(const struct store_bench_run *b)
{
    return clock_now(&b->client.clock);
}

static double gb_per_s(const struct store_bench_run *b, uint64_t since_ns)
{
    return (double)(b->client.n_blocks * b->client.page_bytes) / (double)(now(b) - since_ns);
}

/* ------------------------------------------------------------------ store */

static void *run_store(void *store)
{
    kvstore_run(store);
    return NULL;
}

static enum td_status open_store(struct store_bench_run *b, uint64_t dram_bytes, uint64_t ssd_bytes, int64_t rate)
{
    struct kvstore_options *o = &b->store_config.options;
    o->dram_bytes = (int64_t)dram_bytes;
    o->ssd_bytes = (int64_t)ssd_bytes;
    o->write_bytes_per_s = rate;
    enum td_status s = kvstore_open(&b->store_config, &b->store, b->error);
    if (s)
        return s;
    b->client.store = xfer_address(b->store->xfer);
    b->main = thread_start("store", run_store, b->store);
    return TD_OK;
}

/* Everything dirty is written before this returns. */
static void close_store(struct store_bench_run *b)
{
    if (!b->store)
        return;
    kvstore_stop(b->store);
    pthread_join(b->main, NULL);
    kvstore_close(b->store);
    b->store = NULL;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *ftw)
{
    (void)st, (void)kind, (void)ftw;
    return remove(path);
}

static void remove_store(struct store_bench_run *b)
{
    close_store(b);
    nftw(b->store_dir.data, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static void wait_written(const struct store_bench_run *b)
{
    while (ssd_tier_stats(b->store->ssd).queued_bytes)
        usleep(1000);
}

/* Drops the store's files from the page cache, so that they are read from the disk next time. */
static void empty_page_cache(const struct store_bench_run *b)
{
    struct bytes path = {0};
    bytes_printf(&path, "%s/blocks", b->store_dir.data);
    DIR *d = opendir(path.data);
    for (struct dirent *e; d && (e = readdir(d));) {
        int fd = openat(dirfd(d), e->d_name, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            continue;
        fdatasync(fd);
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
    if (d)
        closedir(d);
    bytes_free(&path);
}

/* Bytes that this process has written to disks since it began. */
static uint64_t written_bytes(void)
{
    char *text;
    size_t len;
    uint64_t n = 0;
    if (file_read("/proc/self/io", 4096, &text, &len, NULL))
        return 0;
    const char *at = strstr(text, "\nwrite_bytes: ");
    if (at)
        n = strtoull(at + 14, NULL, 10);
    free(text);
    return n;
}

/* ------------------------------------------------------------------ raw disk */

struct disk_reader {
    const struct bench_client *client;
    int fd;
    uint32_t first, step;
    bool failed;
};

static void *read_direct(void *arg)
{
    struct disk_reader *r = arg;
    uint64_t size = r->client->page_bytes;
    /* Into the memory where a block that is read would land. */
    for (uint32_t i = r->first; i < r->client->n_blocks; i += r->step)
        r->failed |= pread(r->fd, r->client->landing + i * size, size, (off_t)(i * size)) != (ssize_t)size;
    return NULL;
}

static bool read_file(const struct store_bench_run *b, int fd)
{
    struct disk_reader readers[THREADS_MAX];
    pthread_t threads[THREADS_MAX];
    bool failed = false;
    for (uint32_t i = 0; i < b->n_threads; i++) {
        readers[i] = (struct disk_reader){&b->client, fd, i, b->n_threads, false};
        threads[i] = thread_start("direct", read_direct, &readers[i]);
    }
    for (uint32_t i = 0; i < b->n_threads; i++) {
        pthread_join(threads[i], NULL);
        failed |= readers[i].failed;
    }
    return !failed;
}

static bool write_file(const struct store_bench_run *b, int fd)
{
    uint64_t size = b->client.page_bytes;
    for (uint32_t i = 0; i < b->client.n_blocks; i++)
        if (pwrite(fd, b->client.source + i * size, size, (off_t)(i * size)) != (ssize_t)size)
            return false;
    return !fdatasync(fd);
}

/* Makes a file of the size of the working set beside the store's. It is on the disk when this returns, and
 * unlinked. -1: failed, and the reason was recorded. */
static int make_raw_file(struct store_bench_run *b, double *write_gb_s_out)
{
    struct bytes path = {0};
    bytes_printf(&path, "%s/direct", b->dir.data);
    int fd = open(path.data, O_RDWR | O_CREAT | O_TRUNC | O_DIRECT | O_CLOEXEC, 0600);
    if (fd >= 0)
        unlink(path.data);
    bytes_free(&path);
    uint64_t before = now(b);
    if (fd >= 0 && write_file(b, fd)) {
        *write_gb_s_out = gb_per_s(b, before);
        return fd;
    }
    td_fail(b->error, errno == EINVAL ? TD_ERR_UNSUPPORTED : TD_ERR_IO, "%s: %s", b->dir.data, strerror(errno));
    if (fd >= 0)
        close(fd);
    return -1;
}

/* -------------------------------------------------------------------- parts */

static double move_all(struct store_bench_run *b, enum bench_move move)
{
    uint64_t before = now(b);
    return bench_client_move(&b->client, move, 0, b->client.n_blocks) ? gb_per_s(b, before) : 0;
}

static enum td_status failed(struct store_bench_run *b, const char *what)
{
    return td_fail(b->error, TD_ERR_IO, "not all blocks could be %s", what);
}

/* Measures puts and hits in DRAM, and the wire as their limit. The store writes to SSD at its usual rate
 * meanwhile. */
static enum td_status measure_dram(struct store_bench_run *b)
{
    struct round puts[ROUNDS_MAX], hits[ROUNDS_MAX];
    uint64_t set = b->client.n_blocks * b->client.page_bytes;
    enum td_status s = open_store(b, set, (b->n_rounds + 2) * set, (int64_t)KVSTORE_WRITE_MIB_PER_S << 20);
    if (s)
        return s;
    move_all(b, BENCH_WIRE); /* connects, and touches all memory once */
    for (uint32_t i = 0; i < b->n_rounds; i++) {
        b->client.generation++; /* known blocks are not put again */
        wait_written(b);        /* blocks that are being written can't be evicted */
        puts[i].before = move_all(b, BENCH_WIRE);
        puts[i].value = move_all(b, BENCH_PUT);
        puts[i].after = move_all(b, BENCH_WIRE);
        if (puts[i].value <= 0)
            return failed(b, "put");
    }
    wait_written(b);
    for (uint32_t i = 0; i < b->n_rounds; i++) {
        hits[i].before = move_all(b, BENCH_WIRE);
        hits[i].value = move_all(b, BENCH_HIT);
        hits[i].after = move_all(b, BENCH_WIRE);
        if (hits[i].value <= 0 || !bench_client_check(&b->client))
            return failed(b, "read from DRAM");
    }
    add_rounds(b, hits, b->n_rounds, "hit in DRAM", "beside worker to worker");
    add_rounds(b, puts, b->n_rounds, "put until readable", "beside worker to worker");
    remove_store(b);
    return TD_OK;
}

/* Fills a store as fast as possible and closes it. */
static enum td_status fill_store(struct store_bench_run *b, double *gb_s_out)
{
    uint64_t set = b->client.n_blocks * b->client.page_bytes;
    enum td_status s = open_store(b, set, 4 * set, 0);
    if (s)
        return s;
    b->client.generation++;
    uint64_t before = now(b);
    if (move_all(b, BENCH_PUT) <= 0)
        return failed(b, "put");
    close_store(b);
    *gb_s_out = gb_per_s(b, before);
    return TD_OK;
}

static enum td_status write_raw(struct store_bench_run *b, double *gb_s_out)
{
    int fd = make_raw_file(b, gb_s_out);
    if (fd >= 0)
        close(fd);
    return fd < 0 ? TD_ERR_IO : TD_OK;
}

/* Each round fills an empty store; the last store stays. */
static enum td_status measure_durable(struct store_bench_run *b)
{
    struct round rounds[DURABLE_ROUNDS];
    uint64_t wrote = 0, set = b->client.n_blocks * b->client.page_bytes;
    uint32_t n = b->n_rounds < DURABLE_ROUNDS ? b->n_rounds : DURABLE_ROUNDS;
    enum td_status s = TD_OK;
    for (uint32_t i = 0; i < n && !s; i++) {
        remove_store(b);
        s = write_raw(b, &rounds[i].before);
        wrote = written_bytes();
        if (!s)
            s = fill_store(b, &rounds[i].value);
        wrote = written_bytes() - wrote;
        if (!s)
            s = write_raw(b, &rounds[i].after);
    }
    if (s)
        return s;
    add_rounds(b, rounds, n, "put until durable", "no rate, beside O_DIRECT writes and fdatasync");
    add_row(b, "x", (double)wrote / (double)set, 0, "bytes written for a byte put", "filling");
    return TD_OK;
}

static double read_raw(struct store_bench_run *b, int fd)
{
    uint64_t before = now(b);
    return read_file(b, fd) ? gb_per_s(b, before) : 0;
}

static enum td_status measure_ssd_rounds(struct store_bench_run *b, int fd)
{
    struct round rounds[ROUNDS_MAX];
    for (uint32_t i = 0; i < b->n_rounds; i++) {
        rounds[i].before = read_raw(b, fd);
        memset(b->client.landing, 0, b->client.n_blocks * b->client.page_bytes);
        rounds[i].value = move_all(b, BENCH_HIT);
        if (rounds[i].value <= 0 || !bench_client_check(&b->client))
            return failed(b, "read from SSD");
        rounds[i].after = read_raw(b, fd);
    }
    add_rounds(b, rounds, b->n_rounds, "hit on SSD", "beside O_DIRECT reads");
    return TD_OK;
}

static enum td_status measure_ssd(struct store_bench_run *b)
{
    uint64_t set = b->client.n_blocks * b->client.page_bytes;
    double write_gb_s;
    int fd = make_raw_file(b, &write_gb_s);
    if (fd < 0)
        return TD_ERR_IO;
    enum td_status s = measure_durable(b);
    if (!s) {
        empty_page_cache(b);
        /* Blocks that were read keep their slots until their reader releases them. */
        uint64_t least = 2ull * BENCH_FLIGHTS * BENCH_REQUEST_BYTES;
        s = open_store(b, set / 4 > least ? set / 4 : least, 4 * set, 0);
    }
    if (!s)
        s = measure_ssd_rounds(b, fd);
    close_store(b);
    close(fd);
    return s;
}

/* ------------------------------------------------------- reading under writes */

struct store_bench_load { /* a worker that puts new blocks until it is stopped */
    struct bench_client client;
    struct store_bench_run *bench;
    uint32_t first_generation;
    _Atomic bool is_on, is_over;
};

static void *put_new(void *arg)
{
    struct store_bench_load *l = arg;
    const uint64_t most = BENCH_REQUEST_BYTES; /* half of the write queue that is used here */
    for (uint32_t i = 0; !atomic_load(&l->is_over);) {
        if (!atomic_load(&l->is_on) || ssd_tier_stats(l->bench->store->ssd).queued_bytes > most) {
            usleep(1000);
            continue;
        }
        l->client.generation = l->first_generation + i / l->client.n_blocks;
        bench_client_move(&l->client, BENCH_PUT, i % l->client.n_blocks, l->client.n_request);
        i += l->client.n_request;
    }
    return NULL;
}

/* Number of blob files of 64 MiB in a directory of index_bytes. */
static uint32_t index_files(const struct store_bench_run *b)
{
    return (uint32_t)((b->config->index_bytes ? b->config->index_bytes : 1ull << 40) >> 26);
}

struct samples {
    double *ms;
    uint32_t n, n_missed;
};

/* Requests of 2 MiB at random places in the first part of the set, which is read so often that it is never
 * evicted. */
static void read_for(struct store_bench_run *b, uint32_t part, uint64_t for_ns, struct samples *s)
{
    struct bench_client *c = &b->client;
    uint32_t n_blocks = (uint32_t)((2 << 20) / c->page_bytes), n_places = c->n_blocks / part / n_blocks;
    uint64_t began = now(b), took;
    while (s->n < SAMPLES_MAX && now(b) < began + for_ns) {
        uint32_t at = (uint32_t)(random_at(3, s->n, 0) % n_places) * n_blocks;
        if (bench_client_time(c, BENCH_HIT, at, n_blocks, &took))
            s->ms[s->n++] = (double)took * 1e-6;
        else
            s->n_missed++;
    }
}

static double p99(struct samples *s)
{
    qsort(s->ms, s->n, sizeof(*s->ms), by_value);
    return s->ms[s->n - 1 - s->n / 100];
}

/* Alternates idle and busy turns, so that other work on the machine affects both alike. Afterwards the
 * load is off. */
static void read_by_turns(struct store_bench_run *b, struct store_bench_load *l, uint32_t part, struct samples *idle,
                          struct samples *busy)
{
    enum { TURNS = 4 };
    uint64_t turn_ns = (b->config->load_ns ? b->config->load_ns : 8 * NS_PER_S) / TURNS;
    atomic_store(&l->is_on, false);
    atomic_store(&l->is_over, false);
    pthread_t writer = thread_start("load", put_new, l);
    for (int i = 0; i < TURNS; i++) {
        atomic_store(&l->is_on, false);
        wait_written(b);
        read_for(b, part, turn_ns / 2, idle);
        atomic_store(&l->is_on, true);
        read_for(b, part, turn_ns, busy);
    }
    atomic_store(&l->is_over, true);
    pthread_join(writer, NULL);
    wait_written(b);
}

static enum td_status measure_under_load(struct store_bench_run *b, struct store_bench_load *l)
{
    struct samples idle = {.ms = mem_array(SAMPLES_MAX, sizeof(double))};
    struct samples busy = {.ms = mem_array(SAMPLES_MAX, sizeof(double))};
    struct ssd_tier_stats before = ssd_tier_stats(b->store->ssd);
    uint64_t wrote = written_bytes(), began = now(b);
    read_by_turns(b, l, 4, &idle, &busy);
    wrote = written_bytes() - wrote;
    double took = (double)(now(b) - began);
    struct ssd_tier_stats after = ssd_tier_stats(b->store->ssd);
    double put = (double)(after.written_bytes - before.written_bytes);
    enum td_status s = idle.n && busy.n && put > 0 ? TD_OK : failed(b, "read and put under load");
    if (!s) {
        double quiet = p99(&idle);
        add_row(b, "ms", quiet, 0, "p99 of reading 2 MiB from SSD", "idle");
        add_row(b, "ms", p99(&busy), quiet, "p99 of reading 2 MiB from SSD", "beside writes and collecting");
        add_row(b, "%", 100.0 * busy.n / (busy.n + busy.n_missed), 0, "reads that were answered in full",
                "beside writes and collecting");
        add_row(b, GB_S, put / took, 0, "written meanwhile", "at the default rate");
        add_row(b, "x", (double)wrote / put, 0, "bytes written for a byte put", "full directory");
        add_row(b, "times", (double)(after.reclaims - before.reclaims), 0, "room collected meanwhile",
                "full directory");
    }
    free(idle.ms);
    free(busy.ms);
    return s;
}

/* Makes a blob file as RocksDB does, with values of one byte; RocksDB does not know of it. */
static bool make_index_file(const struct store_bench_run *b, uint32_t i)
{
    enum { RECORD_BYTES = 32 + 1 + BLOCK_KEY_BYTES + 1 };
    struct bytes path = {0};
    uint8_t file[30 + INDEX_RECORDS * RECORD_BYTES] = {0};
    for (uint32_t r = 0; r < INDEX_RECORDS; r++) {
        uint8_t *at = file + 30 + r * RECORD_BYTES;
        put_u64(at, 1 + BLOCK_KEY_BYTES);
        put_u64(at + 8, 1);
        at[32] = 'b';
        put_u64(at + 33, random_at(7, i, 2 * r));
        put_u64(at + 41, random_at(7, i, 2 * r + 1));
    }
    bytes_printf(&path, "%s/blocks/%u.blob", b->store_dir.data, FIRST_INDEX_FILE + i);
    int fd = open(path.data, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    bool is_made = fd >= 0 && write(fd, file, sizeof(file)) == (ssize_t)sizeof(file);
    if (fd >= 0)
        close(fd);
    bytes_free(&path);
    return is_made;
}

static bool make_index(struct store_bench_run *b, struct store_bench_load *l)
{
    uint32_t n_files = index_files(b);
    for (uint32_t i = 0; i < n_files; i++)
        if (!make_index_file(b, i))
            return false;
    /* The store learns places after it has written something. */
    l->client.generation = l->first_generation + 99999;
    if (!bench_client_move(&l->client, BENCH_PUT, 0, 1))
        return false;
    for (uint64_t until = now(b) + 60 * NS_PER_S; now(b) < until; usleep(1000))
        if (ssd_tier_stats(b->store->ssd).n_places >= (uint64_t)n_files * INDEX_RECORDS)
            return true;
    return false;
}

static void add_latencies(struct store_bench_run *b, struct samples *idle, struct samples *busy)
{
    static const char *const P50 = "p50 of reading 2 MiB from SSD", *const P99 = "p99 of reading 2 MiB from SSD";
    double quiet = p99(idle), loud = p99(busy), quiet_half = median(idle->ms, idle->n);
    add_row(b, "ms", quiet_half, 0, P50, "idle, index of 1 TiB");
    add_row(b, "ms", median(busy->ms, busy->n), quiet_half, P50, "collecting, index of 1 TiB");
    add_row(b, "ms", quiet, 0, P99, "idle, index of 1 TiB");
    add_row(b, "ms", loud, quiet, P99, "collecting, index of 1 TiB");
}

/* Reading under writes in a directory that names the places of as many blocks as one of 1 TiB has. */
static enum td_status measure_with_index(struct store_bench_run *b, struct store_bench_load *l)
{
    struct samples idle = {.ms = mem_array(SAMPLES_MAX, sizeof(double))};
    struct samples busy = {.ms = mem_array(SAMPLES_MAX, sizeof(double))};
    struct ssd_tier_stats before = ssd_tier_stats(b->store->ssd);
    uint64_t began = now(b);
    l->first_generation += 100000; /* keys that the store does not have yet */
    read_by_turns(b, l, 4, &idle, &busy);
    struct ssd_tier_stats after = ssd_tier_stats(b->store->ssd);
    enum td_status s = idle.n && busy.n ? TD_OK : failed(b, "read beside a large index");
    if (!s) {
        add_latencies(b, &idle, &busy);
        add_row(b, GB_S, (double)(after.written_bytes - before.written_bytes) / (double)(now(b) - began), 0,
                "written meanwhile", "index of 1 TiB");
        add_row(b, "times", (double)(after.reclaims - before.reclaims), 0, "room collected meanwhile",
                "index of 1 TiB");
    }
    free(idle.ms);
    free(busy.ms);
    return s;
}

/* Opens the store anew, with its files dropped from the page cache. */
static enum td_status open_loaded(struct store_bench_run *b, struct store_bench_load *l, uint64_t dram_bytes)
{
    uint64_t set = b->client.n_blocks * b->client.page_bytes, index_bytes = index_files(b) * 4096ull;
    close_store(b);
    empty_page_cache(b);
    enum td_status s = open_store(b, dram_bytes, set + set / 2 + index_bytes, (int64_t)KVSTORE_WRITE_MIB_PER_S << 20);
    l->client.store = b->client.store;
    return s;
}

/* Uses the directory that measure_ssd left. */
static enum td_status measure_latency(struct store_bench_run *b)
{
    struct store_bench_load *l = mem_zalloc(sizeof(*l));
    l->bench = b;
    l->first_generation = 1000;
    enum td_status s =
        bench_client_open(&l->client, SMALL_LAYERS, 4 * BENCH_REQUEST_BYTES, b->config->transports, b->error);
    if (!s)
        s = open_loaded(b, l, 4 * BENCH_REQUEST_BYTES);
    if (!s)
        s = measure_under_load(b, l);
    if (!s)
        s = open_loaded(b, l, 4 * BENCH_REQUEST_BYTES);
    if (!s && !make_index(b, l))
        s = failed(b, "made for a large index");
    if (!s)
        s = measure_with_index(b, l);
    bench_client_close(&l->client);
    remove_store(b);
    free(l);
    return s;
}

/* ----------------------------------------------------------------- all of it */

static enum td_status open_client(struct store_bench_run *b, uint32_t n_layers)
{
    snprintf(b->dims, sizeof(b->dims), "layers=%u,hidden=512,heads=8,kv_heads=8,head_dim=64,ffn=64,vocab=256",
             n_layers);
    b->store_config.options = (struct kvstore_options){
        .geometry = {.dummy = b->dims, .numerics = "bf16", .kv_dtype = "auto", .block_tokens = 16},
        .name = "store",
        .listen = "127.0.0.1:0",
        .xfer_listen = "127.0.0.1:0",
        .transports = b->config->transports ? b->config->transports : "auto",
        .log_level = "error",
        .dir = b->store_dir.data,
        .codec = block_codec_name(b->config->codec),
        .read_threads = b->n_threads,
        .read_deadline_ms = 10000,
        .write_queue_bytes = 256 << 20,
        .lease_ms = 10000,
        .silence_ms = 5000};
    enum td_status s = bench_client_open(&b->client, n_layers, b->config->bytes ? b->config->bytes : 512ull << 20,
                                         b->config->transports, b->error);
    b->client.is_lossy = block_codec_is_lossy(b->config->codec);
    return s;
}

static enum td_status run_parts(struct store_bench_run *b)
{
    enum td_status s = open_client(b, LARGE_LAYERS);
    if (!s)
        s = measure_dram(b);
    if (!s)
        s = measure_ssd(b);
    remove_store(b);
    bench_client_close(&b->client);
    if (s)
        return s;

    s = open_client(b, SMALL_LAYERS);
    if (!s)
        s = measure_ssd(b);
    if (!s)
        s = measure_latency(b);
    remove_store(b);
    bench_client_close(&b->client);
    return s;
}

enum td_status kvstore_bench(const struct kvstore_bench_config *config, struct kvstore_bench *out,
                             struct td_error *error_out)
{
    struct kvstore_bench rows = {0};
    struct store_bench_run b = {.config = config, .out = &rows, .error = error_out};
    b.n_rounds = !config->n_rounds ? 6 : config->n_rounds < ROUNDS_MAX ? config->n_rounds : ROUNDS_MAX;
    b.n_threads = !config->read_threads                ? KVSTORE_READ_THREADS
                  : config->read_threads < THREADS_MAX ? config->read_threads
                                                       : THREADS_MAX;
    bytes_printf(&b.dir, "%s/tandem-bench-XXXXXX", config->dir);
    if (!mkdtemp(b.dir.data)) {
        enum td_status s = td_fail(error_out, TD_ERR_IO, "%s: %s", config->dir, strerror(errno));
        bytes_free(&b.dir);
        return s;
    }
    bytes_printf(&b.store_dir, "%s/store", b.dir.data);
    enum td_status s = run_parts(&b);
    rmdir(b.dir.data);
    bytes_free(&b.store_dir);
    bytes_free(&b.dir);
    if (!s)
        *out = rows;
    return s;
}
