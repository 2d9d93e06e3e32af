/*
 * The worker's side of the bench is an xfer whose arena holds the working set. It puts and reads everything in requests of
 * REQUEST blocks, one at a time, as a worker with one sequence would. Waiting is by condition: the callbacks of its xfer count.
 */
#include "kvstore/bench.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/random.h"
#include "base/thread.h"
#include "kvstore/kvstore_internal.h"

enum { REQUEST = 64, MEMCPY_RUNS = 3, THREADS_MAX = 64 };
#define DIMS "layers=16,hidden=512,heads=8,kv_heads=8,head_dim=64,ffn=64,vocab=256" /* 512 KiB a block in bf16 */
static const char *const GB_S = "GB/s";

struct client {
    struct kvstore_config config;
    struct kvstore *store;
    pthread_t main;
    struct xfer_hub *hub;
    struct xfer *xfer;
    struct clock clock;
    struct log log;
    uint64_t incarnation, next_id, page_bytes;
    uint8_t *arena;
    uint32_t n_blocks, first; /* first: block of the request that is on its way */
    char *dir;
    pthread_mutex_t lock; /* the record below: callbacks write it, the bench waits for it */
    pthread_cond_t changed;
    uint32_t n_ended, n_pages;
    enum td_status status;
};

static void add_row(struct kvstore_bench *b, const char *name, double value, double limit)
{
    struct kvstore_bench_row *r = &b->rows[b->n_rows++];
    *r = (struct kvstore_bench_row){
        .unit = GB_S, .value = value, .limit = limit, .share = limit > 0 ? value / limit : 0};
    snprintf(r->name, sizeof(r->name), "%s", name);
}

static double gb_per_s(const struct client *c, uint64_t since_ns)
{
    return (double)(c->n_blocks * c->page_bytes) / (double)(clock_now(&c->clock) - since_ns);
}

static struct block_key key_of(uint32_t i)
{
    struct block_key k;
    uint64_t a = random_mix(i), b = i;
    memcpy(k.b, &a, 8);
    memcpy(k.b + 8, &b, 8);
    return k;
}

/* ------------------------------------------------------------------ limits */

static double measure_memcpy(const struct client *c, uint8_t *to)
{
    double best = 0;
    for (int i = 0; i < MEMCPY_RUNS; i++) {
        uint64_t before = clock_now(&c->clock);
        memcpy(to, c->arena, c->n_blocks * c->page_bytes);
        double v = gb_per_s(c, before);
        best = v > best ? v : best;
    }
    return best;
}

struct disk_reader {
    const struct client *client;
    int fd;
    uint32_t first, step;
    uint8_t *buffer;
    bool failed;
};

static void *read_direct(void *arg)
{
    struct disk_reader *r = arg;
    uint64_t size = r->client->page_bytes;
    for (uint32_t i = r->first; i < r->client->n_blocks; i += r->step)
        r->failed |= pread(r->fd, r->buffer, size, (off_t)(i * size)) != (ssize_t)size;
    return NULL;
}

/* Each thread reads into the scratch page by page; that they overwrite nothing of one another is all that matters. */
static bool read_file(const struct client *c, int fd, uint8_t *scratch, uint32_t n_threads)
{
    struct disk_reader readers[THREADS_MAX];
    pthread_t threads[THREADS_MAX];
    bool failed = false;
    for (uint32_t i = 0; i < n_threads; i++) {
        readers[i] = (struct disk_reader){c, fd, i, n_threads, scratch + i * c->page_bytes, false};
        threads[i] = thread_start("direct", read_direct, &readers[i]);
    }
    for (uint32_t i = 0; i < n_threads; i++) {
        pthread_join(threads[i], NULL);
        failed |= readers[i].failed;
    }
    return !failed;
}

static enum td_status measure_disk(const struct client *c, uint8_t *scratch, uint32_t n_threads, double *write_out,
                                   double *read_out, struct td_error *e)
{
    char path[4096];
    snprintf(path, sizeof(path), "%s/bench-direct", c->dir);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_DIRECT | O_CLOEXEC, 0600);
    if (fd < 0)
        return td_fail(e, errno == EINVAL ? TD_ERR_UNSUPPORTED : TD_ERR_IO, "%s: %s", path, strerror(errno));
    uint64_t before = clock_now(&c->clock);
    bool ok = true;
    for (uint32_t i = 0; i < c->n_blocks && ok; i++)
        ok = pwrite(fd, c->arena + i * c->page_bytes, c->page_bytes, (off_t)(i * c->page_bytes)) ==
             (ssize_t)c->page_bytes;
    *write_out = gb_per_s(c, before);
    before = clock_now(&c->clock);
    ok = ok && read_file(c, fd, scratch, n_threads);
    *read_out = gb_per_s(c, before);
    close(fd);
    unlink(path);
    return ok ? TD_OK : td_fail(e, TD_ERR_IO, "%s: %s", path, strerror(errno));
}

/* What the store wrote is read from the disk next time, not from memory. */
static void empty_page_cache(const struct client *c)
{
    char path[4096];
    snprintf(path, sizeof(path), "%s/store/blocks", c->dir);
    DIR *d = opendir(path);
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
}

/* ------------------------------------------------------------------ client */

static void note_end(struct client *c, enum td_status status, uint32_t n_pages)
{
    pthread_mutex_lock(&c->lock);
    c->n_ended++;
    c->n_pages = n_pages;
    c->status = status;
    pthread_cond_signal(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

static void on_lease_end(void *user, struct xfer_id id, enum td_status status, bool in_doubt)
{
    (void)id, (void)in_doubt;
    note_end(user, status, REQUEST);
}

static void on_pull_end(void *user, struct xfer_id id, const struct xfer_pull_result *result)
{
    (void)id;
    note_end(user, result->status, result->n_pages);
}

static void *place(void *user, struct xfer_id id, uint32_t index)
{
    (void)id;
    struct client *c = user;
    return index < REQUEST ? c->arena + (uint64_t)(c->first + index) * c->page_bytes : NULL;
}

/* WANT: everything is wanted, because nothing is offered twice and all of it has room. */
static void on_message(void *user, struct xfer_peer *peer, uint16_t kind, const void *data, uint32_t len_bytes)
{
    (void)peer;
    struct client *c = user;
    struct store_want_msg m;
    struct xfer_page pages[REQUEST];
    if (kind != STORE_WANT || store_want_decode(data, len_bytes, &m) || m.n > REQUEST)
        return;
    struct xfer_id id = {m.id_incarnation, m.id_counter};
    for (uint32_t i = 0; i < m.n; i++)
        pages[i] = (struct xfer_page){c->arena + (uint64_t)(c->first + store_want_at(&m, i)) * c->page_bytes, 1};
    xfer_lease_grant(c->xfer, &(struct xfer_lease_params){
                                  .id = id, .duration_ns = 10 * NS_PER_S, .on_end = on_lease_end, .user = c});
    xfer_lease_announce(c->xfer, id, 0, pages, m.n, 0, (uint16_t)c->store->geometry.layout.n_layers);
    xfer_lease_finish(c->xfer, id, m.n, NULL, 0);
}

static void ask(struct client *c, enum store_msg_kind kind, struct xfer_id id)
{
    struct block_key keys[REQUEST];
    struct bytes b = {0};
    const char *address = kind == STORE_OFFER ? xfer_address(c->xfer) : "";
    for (uint32_t i = 0; i < REQUEST; i++)
        keys[i] = key_of(c->first + i);
    const struct store_keys_msg m = {.id_incarnation = id.incarnation,
                                     .id_counter = id.counter,
                                     .first_index = c->first,
                                     .n_keys = REQUEST,
                                     .keys = keys[0].b,
                                     .address = address,
                                     .address_len = (uint16_t)strlen(address)};
    store_keys_encode(&m, &b);
    xfer_send(c->xfer, xfer_address(c->store->xfer), (uint16_t)kind, b.data, (uint32_t)b.len);
    bytes_free(&b);
}

/* All blocks, one request after the other; false if one did not give all of its blocks. */
static bool move_all(struct client *c, enum store_msg_kind kind)
{
    bool ok = true;
    for (c->first = 0; c->first < c->n_blocks && ok; c->first += REQUEST) {
        struct xfer_id id = {c->incarnation, ++c->next_id};
        uint32_t before = c->n_ended;
        if (kind == STORE_LOOKUP)
            xfer_pull_start(c->xfer, &(struct xfer_pull_params){.id = id,
                                                                .address = xfer_address(c->store->xfer),
                                                                .deadline_ns = clock_now(&c->clock) + 60 * NS_PER_S,
                                                                .place = place,
                                                                .on_end = on_pull_end,
                                                                .user = c});
        ask(c, kind, id);
        pthread_mutex_lock(&c->lock);
        while (c->n_ended == before)
            pthread_cond_wait(&c->changed, &c->lock);
        ok = c->status == TD_OK && c->n_pages == REQUEST;
        pthread_mutex_unlock(&c->lock);
    }
    return ok;
}

static void *run_store(void *store)
{
    kvstore_run(store);
    return NULL;
}

static enum td_status open_store(struct client *c, struct td_error *e)
{
    enum td_status s = kvstore_open(&c->config, &c->store, e);
    if (!s)
        c->main = thread_start("store", run_store, c->store);
    return s;
}

/* What is dirty is written before this returns. */
static void close_store(struct client *c)
{
    if (!c->store)
        return;
    kvstore_stop(c->store);
    pthread_join(c->main, NULL);
    kvstore_close(c->store);
    c->store = NULL;
}

static enum td_status open_client(struct client *c, const struct kvstore_bench_config *config, struct td_error *e)
{
    struct geometry g;
    uint64_t bytes = config->bytes ? config->bytes : 512ull << 20;
    clock_init_real(&c->clock);
    c->log = (struct log){.who = "bench", .level = LOG_ERROR};
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->changed, NULL);
    c->incarnation = random_u64();
    c->hub = xfer_hub_open();
    struct bytes store_dir = {0};
    bytes_printf(&store_dir, "%s/store", c->dir);
    c->config = (struct kvstore_config){
        .hub = c->hub,
        .options = {.geometry = {.dummy = DIMS, .numerics = "bf16", .kv_dtype = "auto", .block_tokens = 16},
                    .name = "store",
                    .listen = "127.0.0.1:0",
                    .log_level = "error",
                    .dir = store_dir.data,
                    .dram_bytes = (int64_t)bytes,
                    .ssd_bytes = (int64_t)(4 * bytes),
                    .read_threads = config->read_threads ? config->read_threads : 4,
                    .write_queue_bytes = (int64_t)bytes / 4,
                    .lease_ms = 10000,
                    .silence_ms = 5000}};
    enum td_status s = geometry_resolve(&c->config.options.geometry, &g, e);
    if (s)
        return s;
    c->page_bytes = kv_layout_page_bytes(&g.layout);
    c->n_blocks = (uint32_t)(bytes / c->page_bytes / REQUEST * REQUEST);
    if (!c->n_blocks)
        return td_fail(e, TD_ERR_INVALID, "bytes: %llu at least", (unsigned long long)(REQUEST * c->page_bytes));
    void *arena;
    s = mem_map(c->n_blocks * c->page_bytes, &arena);
    if (s)
        return td_fail(e, s, "no memory for the working set");
    c->arena = arena;
    for (uint64_t i = 0; i < c->n_blocks * c->page_bytes / 8; i++)
        ((uint64_t *)arena)[i] = random_mix(i);
    const struct xfer_config x = {.backend = XFER_LOOPBACK,
                                  .hub = c->hub,
                                  .name = "bench",
                                  .listen = "bench",
                                  .incarnation = c->incarnation,
                                  .layout = &g.layout,
                                  .arena = c->arena,
                                  .arena_bytes = c->n_blocks * c->page_bytes,
                                  .silence_ns = 5 * NS_PER_S,
                                  .clock = &c->clock,
                                  .log = &c->log,
                                  .callbacks = {.user = c, .on_message = on_message}};
    return xfer_open(&x, &c->xfer, e);
}

static void close_client(struct client *c)
{
    if (c->store)
        close_store(c);
    xfer_close(c->xfer); /* NULL is fine, as everywhere here */
    xfer_hub_close(c->hub);
    if (c->arena)
        mem_unmap(c->arena, c->n_blocks * c->page_bytes);
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->changed);
    free((void *)(uintptr_t)c->config.options.dir);
}

static enum td_status measure_limits(struct client *c, struct kvstore_bench *b, struct td_error *e)
{
    void *scratch;
    double write = 0, read = 0;
    if (mem_map(c->n_blocks * c->page_bytes, &scratch))
        return td_fail(e, TD_ERR_NO_MEMORY, "no memory for measuring limits");
    double copy = measure_memcpy(c, scratch);
    uint32_t n = (uint32_t)c->config.options.read_threads;
    enum td_status s = measure_disk(c, scratch, n < THREADS_MAX ? n : THREADS_MAX, &write, &read, e);
    mem_unmap(scratch, c->n_blocks * c->page_bytes);
    if (s)
        return s;
    add_row(b, "memcpy, one thread", copy, 0);
    add_row(b, "disk write, O_DIRECT, one thread", write, 0);
    add_row(b, "disk read, O_DIRECT", read, 0);
    return TD_OK;
}

static enum td_status measure_store(struct client *c, struct kvstore_bench *b, struct td_error *e)
{
    double copy = b->rows[0].value, write = b->rows[1].value, read = b->rows[2].value;
    enum td_status s = open_store(c, e);
    if (s)
        return s;
    uint64_t before = clock_now(&c->clock);
    if (!move_all(c, STORE_OFFER))
        return td_fail(e, TD_ERR_IO, "not all blocks could be put");
    add_row(b, "put, until readable", gb_per_s(c, before), copy);
    uint64_t hits = clock_now(&c->clock);
    if (!move_all(c, STORE_LOOKUP))
        return td_fail(e, TD_ERR_IO, "not all blocks could be read from DRAM");
    hits = clock_now(&c->clock) - hits;
    close_store(c);
    add_row(b, "put, until durable",
            (double)(c->n_blocks * c->page_bytes) / (double)(clock_now(&c->clock) - before - hits), write);
    add_row(b, "hit in DRAM", (double)(c->n_blocks * c->page_bytes) / (double)hits, copy);
    empty_page_cache(c);
    s = open_store(c, e);
    if (s)
        return s;
    before = clock_now(&c->clock);
    if (!move_all(c, STORE_LOOKUP))
        return td_fail(e, TD_ERR_IO, "not all blocks could be read from SSD");
    add_row(b, "hit on SSD", gb_per_s(c, before), read);
    return TD_OK;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *ftw)
{
    (void)st, (void)kind, (void)ftw;
    return remove(path);
}

enum td_status kvstore_bench(const struct kvstore_bench_config *config, struct kvstore_bench *out,
                             struct td_error *error_out)
{
    struct bytes dir = {0};
    struct client c = {0};
    struct kvstore_bench b = {0};
    bytes_printf(&dir, "%s/tandem-bench-XXXXXX", config->dir);
    if (!mkdtemp(dir.data)) {
        enum td_status s = td_fail(error_out, TD_ERR_IO, "%s: %s", config->dir, strerror(errno));
        bytes_free(&dir);
        return s;
    }
    c.dir = dir.data;
    enum td_status s = open_client(&c, config, error_out);
    if (!s)
        s = measure_limits(&c, &b, error_out);
    if (!s)
        s = measure_store(&c, &b, error_out);
    b.block_bytes = c.page_bytes;
    close_client(&c);
    nftw(dir.data, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    bytes_free(&dir);
    if (!s)
        *out = b;
    return s;
}
