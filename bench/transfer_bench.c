#include "bench/transfer_bench.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/endian.h"
#include "base/mem.h"
#include "base/random.h"
#include "bench/transfer_bare.h"
#include "transfer/xfer.h"

#define PATIENCE_NS   (60 * NS_PER_S)
#define DEFAULT_ARENA (256ull << 20)
#define WINDOW_BYTES  (32ull << 20) /* of both loops: the bytes in flight that an xfer allows a peer */

/* Layers of 64 KiB, pages of 2 MiB: 8 KV heads of 128 elements of 16 bits, 16 tokens, as in models of 8 to
 * 70 billion parameters. */
static const struct kv_layout LAYOUT = {NUM_F16, 32, 8, 128, 16};
enum { LAYER_BYTES = 64 << 10, PAGE_BYTES = 2 << 20, LAYERS = 32, DEFAULT_ROUNDS = 10, ROUNDS_MAX = 100 };

/*
 * What the reader asks of the holder, and the answer, as user messages of the transfer layer:
 *     OFFER    0 u64 counter   8 u64 unit_bytes   16 u64 total_bytes   24 u64 incarnation of the id
 *     OFFERED  0 u64 counter   8 u32 port of the bare loop (0: refused)
 */
enum message_kind { KIND_OFFER = 0x6201, KIND_OFFERED = 0x6202 };

struct bench_side {
    struct clock clock;
    const char *path;
    struct xfer *x;
    uint8_t *arena;
    uint64_t arena_bytes, incarnation;
    struct secret *secret;
};

static enum td_status side_open(struct bench_side *s, const char *name, const char *listen, const char *secret,
                                const struct xfer_callbacks *callbacks, const struct log *log,
                                struct td_error *error_out)
{
    void *arena;
    int fd = 0;
    bool is_mapped = !strcmp(s->path, "mapped"), is_shm = !strcmp(s->path, "shm"), is_tls = !strcmp(s->path, "tls");
    clock_init_real(&s->clock);
    if (is_mapped ? mem_map_shared(s->arena_bytes, &arena, &fd) : mem_map(s->arena_bytes, &arena))
        return td_fail(error_out, TD_ERR_NO_MEMORY, "no memory for an arena of %llu bytes",
                       (unsigned long long)s->arena_bytes);
    s->arena = arena;
    /* Untouched pages might all be the kernel's single page of zeros. */
    for (uint64_t i = 0; i < s->arena_bytes / 8; i++)
        ((uint64_t *)arena)[i] = random_mix(i + (uint64_t)name[0]);
    s->incarnation = random_u64();
    if (secret_open(is_tls && !(secret && *secret) ? "bench" : secret, NULL, log, &s->secret, error_out))
        return TD_ERR_INVALID;
    const struct xfer_config c = {.backend = XFER_NET,
                                  .name = name,
                                  .listen = listen,
                                  .is_trusted_network = true, /* what is measured is the caller's choice */
                                  .transports = is_mapped ? "auto"
                                                : is_shm  ? "ucx"
                                                : is_tls  ? "tcp"
                                                          : s->path,
                                  .encrypts = is_tls,
                                  .incarnation = s->incarnation,
                                  .secret = s->secret,
                                  .layout = &LAYOUT,
                                  .arena = arena,
                                  .arena_bytes = s->arena_bytes,
                                  .arena_fd = fd,
                                  .max_inflight_bytes = WINDOW_BYTES,
                                  .clock = &s->clock,
                                  .log = log,
                                  .callbacks = *callbacks};
    enum td_status status = xfer_open(&c, &s->x, error_out);
    if (fd)
        close(fd);
    return status;
}

static void side_close(struct bench_side *s)
{
    xfer_close(s->x);
    secret_close(s->secret);
    s->secret = NULL;
    mem_unmap(s->arena, s->arena_bytes);
    s->x = NULL;
    s->arena = NULL;
}

static enum td_status bare_open(struct bench_side *s, const char *address, bool serves, const struct log *log,
                                struct bare **out, struct td_error *error_out)
{
    bool is_auto = !strcmp(s->path, "mapped") || !strcmp(s->path, "shm");
    const struct bare_config c = {.transports = is_auto                   ? "posix,tcp"
                                                : !strcmp(s->path, "tls") ? "tcp"
                                                                          : s->path,
                                  .address = address,
                                  .arena = s->arena,
                                  .arena_bytes = s->arena_bytes,
                                  .log = log};
    return serves ? bare_serve(&c, out, error_out) : bare_connect(&c, out, error_out);
}

/*
 * Each side gets half of the CPUs, as two machines would have their own. Otherwise the scheduler sometimes
 * runs both sides on one CPU in turns, and that would be measured. Threads inherit this from the thread that
 * makes them.
 */
static void use_cpus(const cpu_set_t *all, int half)
{
    cpu_set_t mine;
    int n = CPU_COUNT(all), seen = 0;
    CPU_ZERO(&mine);
    for (int i = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, all) && (half < 0 || (seen++ < n / 2) == !half))
            CPU_SET(i, &mine);
    if (n > 1)
        pthread_setaffinity_np(pthread_self(), sizeof(mine), &mine);
}

/* -------------------------------------------------------------------- holder */

struct xfer_bench_server {
    struct bench_side side;
    struct bare *bare;
    uint32_t bare_port;
};

static void on_lease_end(void *user, struct xfer_id id, enum td_status status, bool in_doubt)
{
    (void)user;
    (void)id;
    (void)status;
    (void)in_doubt;
}

/* Announces the lease. Units below a page: all pages for one range of layers after another, as a prefill
 * completes them. Else runs of whole pages. */
static void announce_lease(struct xfer_bench_server *s, struct xfer_id id, uint64_t unit_bytes, uint32_t n_pages)
{
    struct xfer_page *pages = mem_array(n_pages, sizeof(pages[0]));
    for (uint32_t i = 0; i < n_pages; i++)
        pages[i] = (struct xfer_page){s->side.arena + (uint64_t)i * PAGE_BYTES, 1};
    uint32_t n_layers = unit_bytes < PAGE_BYTES ? (uint32_t)(unit_bytes / LAYER_BYTES) : LAYERS;
    uint32_t run = unit_bytes < PAGE_BYTES ? n_pages : (uint32_t)(unit_bytes / PAGE_BYTES);
    for (uint32_t layer = 0; layer < LAYERS; layer += n_layers) {
        uint32_t end = layer + n_layers < LAYERS ? layer + n_layers : LAYERS;
        for (uint32_t i = 0; i < n_pages; i += run)
            xfer_lease_announce(s->side.x, id, i, pages + i, run < n_pages - i ? run : n_pages - i, (uint16_t)layer,
                                (uint16_t)end);
    }
    xfer_lease_finish(s->side.x, id, n_pages, NULL, 0);
    free(pages);
}

static void on_offer(void *user, struct xfer_peer *peer, uint16_t kind, const void *data, uint32_t len)
{
    struct xfer_bench_server *s = user;
    uint8_t answer[12];
    if (kind != KIND_OFFER || len != 32)
        return;
    uint64_t counter = get_u64(data), unit = get_u64((const uint8_t *)data + 8);
    uint64_t total = get_u64((const uint8_t *)data + 16), incarnation = get_u64((const uint8_t *)data + 24);
    bool is_ok = unit && unit % LAYER_BYTES == 0 && (unit < PAGE_BYTES || unit % PAGE_BYTES == 0) && total &&
                 total % PAGE_BYTES == 0 && total <= s->side.arena_bytes;
    put_u64(answer, counter);
    put_u32(answer + 8, is_ok ? s->bare_port : 0);
    if (is_ok) {
        const struct xfer_lease_params lease = {
            .id = {incarnation, counter}, .duration_ns = PATIENCE_NS, .on_end = on_lease_end, .user = s};
        xfer_lease_grant(s->side.x, &lease);
        announce_lease(s, lease.id, unit, (uint32_t)(total / PAGE_BYTES));
    }
    xfer_send_peer(s->side.x, peer, KIND_OFFERED, answer, sizeof(answer));
}

/* The host of "HOST:PORT", with another port. */
static void with_port(const char *address, uint32_t port, char *out, size_t out_bytes)
{
    const char *colon = strrchr(address, ':');
    snprintf(out, out_bytes, "%.*s:%u", colon ? (int)(colon - address) : (int)strlen(address), address, port);
}

enum td_status xfer_bench_serve(const char *listen, const char *path, const char *secret, uint64_t arena_bytes,
                                const struct log *log, struct xfer_bench_server **out, struct td_error *error_out)
{
    struct xfer_bench_server *s = mem_zalloc(sizeof(*s));
    s->side.path = path;
    s->side.arena_bytes = arena_bytes ? arena_bytes : DEFAULT_ARENA;
    const struct xfer_callbacks callbacks = {.user = s, .on_message = on_offer};
    enum td_status status = side_open(&s->side, "holder", listen, secret, &callbacks, log, error_out);
    char address[160];
    if (!status) {
        with_port(xfer_address(s->side.x), 0, address, sizeof(address));
        status = bare_open(&s->side, address, true, log, &s->bare, error_out);
    }
    if (status) {
        xfer_bench_server_close(s);
        return status;
    }
    s->bare_port = (uint32_t)strtoul(strrchr(bare_address(s->bare), ':') + 1, NULL, 10);
    *out = s;
    return TD_OK;
}

const char *xfer_bench_server_address(const struct xfer_bench_server *s)
{
    return xfer_address(s->side.x);
}

void xfer_bench_server_close(struct xfer_bench_server *s)
{
    if (!s)
        return;
    bare_close(s->bare);
    side_close(&s->side);
    free(s);
}

/* -------------------------------------------------------------------- reader */

struct bench_reader {
    struct bench_side side;
    char address[160]; /* of the holder */
    struct bare *bare;
    uint64_t counter, total_bytes;
    uint8_t *copy_from; /* source of memcpy */
    /* The caller waits for one answer or one end; a mailbox would not be simpler. */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t offered; /* counter of the last answer */
    uint32_t bare_port;
    bool is_ended;
    enum td_status status;
};

static void on_offered(void *user, struct xfer_peer *peer, uint16_t kind, const void *data, uint32_t len)
{
    struct bench_reader *r = user;
    (void)peer;
    if (kind != KIND_OFFERED || len != 12)
        return;
    pthread_mutex_lock(&r->lock);
    r->offered = get_u64(data);
    r->bare_port = get_u32((const uint8_t *)data + 8);
    pthread_cond_signal(&r->changed);
    pthread_mutex_unlock(&r->lock);
}

static void on_pull_end(void *user, struct xfer_id id, const struct xfer_pull_result *result)
{
    struct bench_reader *r = user;
    (void)id;
    pthread_mutex_lock(&r->lock);
    r->is_ended = true;
    r->status = result->status;
    pthread_cond_signal(&r->changed);
    pthread_mutex_unlock(&r->lock);
}

static void *page_address(void *user, struct xfer_id id, uint32_t index)
{
    struct bench_reader *r = user;
    (void)id;
    return r->side.arena + (uint64_t)index * PAGE_BYTES;
}

static enum td_status wait_offered(struct bench_reader *r, uint64_t counter)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 10;
    int late = 0;
    pthread_mutex_lock(&r->lock);
    while (r->offered != counter && !late)
        late = pthread_cond_timedwait(&r->changed, &r->lock, &until);
    enum td_status s = r->offered != counter ? TD_ERR_PEER_LOST : (r->bare_port ? TD_OK : TD_ERR_INVALID);
    pthread_mutex_unlock(&r->lock);
    return s;
}

/* Pulls everything once. *ns_out: from the first question to the last verified byte. */
static enum td_status pull_once(struct bench_reader *r, uint64_t unit_bytes, uint64_t *ns_out)
{
    uint8_t offer[32];
    struct xfer_id id = {r->side.incarnation, ++r->counter};
    put_u64(offer, id.counter);
    put_u64(offer + 8, unit_bytes);
    put_u64(offer + 16, r->total_bytes);
    put_u64(offer + 24, id.incarnation);
    xfer_send(r->side.x, r->address, KIND_OFFER, offer, sizeof(offer));
    enum td_status s = wait_offered(r, id.counter);
    if (s)
        return s;
    uint64_t begin = clock_now(&r->side.clock);
    const struct xfer_pull_params pull = {.id = id,
                                          .address = r->address,
                                          .deadline_ns = begin + PATIENCE_NS,
                                          .place = page_address,
                                          .on_end = on_pull_end,
                                          .user = r};
    r->is_ended = false;
    xfer_pull_start(r->side.x, &pull);
    pthread_mutex_lock(&r->lock);
    while (!r->is_ended)
        pthread_cond_wait(&r->changed, &r->lock);
    s = r->status;
    pthread_mutex_unlock(&r->lock);
    *ns_out = clock_now(&r->side.clock) - begin;
    return s;
}

static enum td_status fetch_once(struct bench_reader *r, uint64_t message_bytes, uint64_t *ns_out)
{
    uint64_t begin = clock_now(&r->side.clock);
    enum td_status s = bare_fetch(r->bare, message_bytes, WINDOW_BYTES, r->total_bytes);
    *ns_out = clock_now(&r->side.clock) - begin;
    return s;
}

static uint64_t copy_once(struct bench_reader *r)
{
    uint64_t begin = clock_now(&r->side.clock);
    for (uint64_t at = 0; at < r->total_bytes; at += PAGE_BYTES)
        memcpy(r->side.arena + at, r->copy_from + at, PAGE_BYTES);
    return clock_now(&r->side.clock) - begin;
}

static void reader_close(struct bench_reader *r)
{
    bare_close(r->bare);
    side_close(&r->side);
    mem_unmap(r->copy_from, r->total_bytes);
    pthread_cond_destroy(&r->changed);
    pthread_mutex_destroy(&r->lock);
    free(r);
}

static enum td_status reader_open(const struct xfer_bench_config *config, const char *path, const char *address,
                                  struct bench_reader **out, struct td_error *error_out)
{
    struct bench_reader *r = mem_zalloc(sizeof(*r));
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->changed, NULL);
    r->side.path = path;
    r->side.arena_bytes = r->total_bytes = config->arena_bytes ? config->arena_bytes : DEFAULT_ARENA;
    snprintf(r->address, sizeof(r->address), "%s", address);
    const struct xfer_callbacks callbacks = {.user = r, .on_message = on_offered};
    enum td_status s = side_open(&r->side, "reader", NULL, config->secret, &callbacks, config->log, error_out);
    void *from = NULL;
    if (!s && mem_map(r->total_bytes, &from))
        s = td_fail(error_out, TD_ERR_NO_MEMORY, "no memory to copy from");
    r->copy_from = from;
    uint64_t ns;
    if (!s && (s = pull_once(r, PAGE_BYTES, &ns))) /* connects, and learns where the bare loop listens */
        td_fail(error_out, s, "%s: %s", address, td_status_name(s));
    if (!s) {
        char bare[160];
        with_port(address, r->bare_port, bare, sizeof(bare));
        s = bare_open(&r->side, bare, false, config->log, &r->bare, error_out);
    }
    if (s) {
        reader_close(r);
        return s;
    }
    *out = r;
    return TD_OK;
}

/* -------------------------------------------------------------------- rounds */

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, uint32_t n)
{
    qsort(values, n, sizeof(values[0]), compare);
    return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

/* Finds the message size, of a few up to the unit, with which the bare loop is fastest. */
static enum td_status choose_message(struct bench_reader *r, uint64_t unit_bytes, uint64_t *best_out)
{
    static const uint64_t SIZES[] = {64 << 10, 128 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20};
    uint64_t best_ns = UINT64_MAX, ns;
    for (size_t i = 0; i < sizeof(SIZES) / sizeof(SIZES[0]) && SIZES[i] <= unit_bytes; i++) {
        for (int again = 0; again < 3; again++) {
            enum td_status s = fetch_once(r, SIZES[i], &ns);
            if (s)
                return s;
            if (ns < best_ns) {
                best_ns = ns;
                *best_out = SIZES[i];
            }
        }
    }
    return TD_OK;
}

/* Processor time of this process in ns; of both sides if both are in it. */
static double cpu_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
    return (double)ts.tv_sec * 1e9 + (double)ts.tv_nsec;
}

static enum td_status measure_rounds(struct bench_reader *r, uint32_t n_rounds, struct xfer_bench_row *row)
{
    double ours[2 * ROUNDS_MAX], bare[ROUNDS_MAX], copy[ROUNDS_MAX], share[ROUNDS_MAX], spread[ROUNDS_MAX];
    double cpu[ROUNDS_MAX], bare_cpu[ROUNDS_MAX], bytes = (double)r->total_bytes;
    uint64_t ns[3];
    enum td_status s = choose_message(r, row->unit_bytes, &row->bare_message_bytes);
    s = s ? s : pull_once(r, row->unit_bytes, &ns[0]);
    for (uint32_t i = 0; !s && i < n_rounds; i++) {
        double cpu_0 = cpu_ns();
        s = pull_once(r, row->unit_bytes, &ns[0]);
        double cpu_1 = cpu_ns();
        s = s ? s : fetch_once(r, row->bare_message_bytes, &ns[1]);
        double cpu_2 = cpu_ns();
        s = s ? s : pull_once(r, row->unit_bytes, &ns[2]);
        if (s)
            break;
        double first = bytes / (double)ns[0], again = bytes / (double)ns[2];
        ours[2 * i] = first;
        ours[2 * i + 1] = again;
        bare[i] = bytes / (double)ns[1];
        copy[i] = bytes / (double)copy_once(r);
        share[i] = (first + again) / 2 / bare[i];
        spread[i] = (first > again ? first - again : again - first) / first;
        cpu[i] = (cpu_1 - cpu_0) * 1e3 / bytes;
        bare_cpu[i] = (cpu_2 - cpu_1) * 1e3 / bytes;
        row->bytes += 2 * r->total_bytes;
    }
    if (s)
        return s;
    row->gb_per_s = median(ours, 2 * n_rounds);
    row->bare_gb_per_s = median(bare, n_rounds);
    row->memcpy_gb_per_s = median(copy, n_rounds);
    row->share = median(share, n_rounds);
    row->spread = median(spread, n_rounds);
    row->cpu_ms_per_gb = median(cpu, n_rounds);
    row->bare_cpu_ms_per_gb = median(bare_cpu, n_rounds);
    return TD_OK;
}

static enum td_status one_path(const struct xfer_bench_config *config, const char *path, struct xfer_bench_row *rows,
                               struct td_error *error_out)
{
    struct xfer_bench_server *server = NULL;
    struct bench_reader *r = NULL;
    uint32_t n_rounds = config->n_rounds ? config->n_rounds : DEFAULT_ROUNDS;
    const char *address = config->peer;
    enum td_status s = TD_OK;
    cpu_set_t all;
    CPU_ZERO(&all);
    if (!address) {
        pthread_getaffinity_np(pthread_self(), sizeof(all), &all);
        use_cpus(&all, 0);
        s = xfer_bench_serve("127.0.0.1:0", path, config->secret, config->arena_bytes, config->log, &server, error_out);
        address = s ? NULL : xfer_bench_server_address(server);
        use_cpus(&all, 1);
    }
    s = s ? s : reader_open(config, path, address, &r, error_out);
    use_cpus(&all, -1);
    for (uint32_t i = 0; !s && i < config->n_units; i++) {
        struct xfer_bench_row *row = &rows[i];
        *row = (struct xfer_bench_row){.path = path, .unit_bytes = config->unit_bytes[i]};
        s = measure_rounds(r, n_rounds < ROUNDS_MAX ? n_rounds : ROUNDS_MAX, row);
        if (s)
            td_fail(error_out, s, "%s with units of %llu bytes: %s", path, (unsigned long long)row->unit_bytes,
                    td_status_name(s));
        else
            xfer_transport(r->side.x, row->transport, sizeof(row->transport));
        if (config->peer)
            row->cpu_ms_per_gb = row->bare_cpu_ms_per_gb = 0;
    }
    if (r)
        reader_close(r);
    xfer_bench_server_close(server);
    return s;
}

enum td_status xfer_bench(const struct xfer_bench_config *config, struct xfer_bench_row *rows,
                          struct td_error *error_out)
{
    uint64_t arena = config->arena_bytes ? config->arena_bytes : DEFAULT_ARENA;
    if (arena % PAGE_BYTES)
        return td_fail(error_out, TD_ERR_INVALID, "arena of %llu bytes: expected a multiple of %d",
                       (unsigned long long)arena, PAGE_BYTES);
    for (uint32_t i = 0; i < config->n_units; i++) {
        uint64_t unit = config->unit_bytes[i];
        if (!unit || unit % LAYER_BYTES || (unit > PAGE_BYTES && unit % PAGE_BYTES) || unit > arena)
            return td_fail(
                error_out, TD_ERR_INVALID,
                "unit of %llu bytes: expected a multiple of %d, from a page of %d on of that, within the arena",
                (unsigned long long)unit, LAYER_BYTES, PAGE_BYTES);
    }
    for (uint32_t i = 0; i < config->n_paths; i++) {
        enum td_status s = one_path(config, config->paths[i], rows + (size_t)i * config->n_units, error_out);
        if (s)
            return s;
    }
    return TD_OK;
}
