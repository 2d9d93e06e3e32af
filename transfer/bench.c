#include "transfer/bench.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/random.h"
#include "transfer/xfer.h"

#define PATIENCE_NS (60 * NS_PER_S)

enum { UNIT = 4096, LAYERS_MAX = 16 };

struct side {
    struct xfer *x;
    uint8_t *arena;
};

struct bench {
    struct clock clock;
    struct kv_layout layout;
    uint64_t page_bytes, arena_bytes;
    uint32_t n_pages;
    struct side holder, reader;
    pthread_mutex_t lock; /* the caller waits for the two ends of one transfer; a mailbox for that would say less */
    pthread_cond_t changed;
    uint32_t n_ends;
    enum td_status status;
};

static void ended(struct bench *b, enum td_status status)
{
    pthread_mutex_lock(&b->lock);
    b->n_ends++;
    if (status)
        b->status = status;
    pthread_cond_signal(&b->changed);
    pthread_mutex_unlock(&b->lock);
}

static void on_lease_end(void *user, struct xfer_id id, enum td_status status, bool in_doubt)
{
    (void)id;
    (void)in_doubt;
    ended(user, status);
}

static void on_pull_end(void *user, struct xfer_id id, const struct xfer_pull_result *result)
{
    (void)id;
    ended(user, result->status);
}

static void *place(void *user, struct xfer_id id, uint32_t index)
{
    struct bench *b = user;
    (void)id;
    return b->reader.arena + index * b->page_bytes;
}

/* All pages once; both ends are awaited. */
static enum td_status transfer_once(struct bench *b, uint64_t counter)
{
    struct xfer_id id = {1, counter};
    struct xfer_lease_params lease = {.id = id, .duration_ns = PATIENCE_NS, .on_end = on_lease_end, .user = b};
    struct xfer_page *pages = mem_array(b->n_pages, sizeof(pages[0]));
    for (uint32_t i = 0; i < b->n_pages; i++)
        pages[i] = (struct xfer_page){b->holder.arena + i * b->page_bytes, 1};
    b->n_ends = 0;
    xfer_lease_grant(b->holder.x, &lease);
    xfer_lease_announce(b->holder.x, id, 0, pages, b->n_pages, 0, (uint16_t)b->layout.n_layers);
    xfer_lease_finish(b->holder.x, id, b->n_pages, NULL, 0);
    free(pages);
    struct xfer_pull_params pull = {.id = id,
                                    .address = xfer_address(b->holder.x),
                                    .deadline_ns = clock_now(&b->clock) + PATIENCE_NS,
                                    .place = place,
                                    .on_end = on_pull_end,
                                    .user = b};
    xfer_pull_start(b->reader.x, &pull);
    pthread_mutex_lock(&b->lock);
    while (b->n_ends < 2)
        pthread_cond_wait(&b->changed, &b->lock);
    enum td_status s = b->status;
    pthread_mutex_unlock(&b->lock);
    return s;
}

static double measure_memcpy(struct bench *b)
{
    double best = 0;
    for (int round = 0; round < 3; round++) {
        uint64_t begin = clock_now(&b->clock);
        for (uint32_t i = 0; i < b->n_pages; i++)
            memcpy(b->reader.arena + i * b->page_bytes, b->holder.arena + i * b->page_bytes, b->page_bytes);
        double gb_per_s = (double)(b->n_pages * b->page_bytes) / (double)(clock_now(&b->clock) - begin);
        best = gb_per_s > best ? gb_per_s : best;
    }
    return best;
}

static enum td_status side_open(struct bench *b, struct side *s, const char *name, const char *tls,
                                const struct log *log, struct td_error *error_out)
{
    void *arena;
    if (mem_map(b->arena_bytes, &arena))
        return td_fail(error_out, TD_ERR_NO_MEMORY, "no memory for an arena of %llu bytes",
                       (unsigned long long)b->arena_bytes);
    s->arena = arena;
    memset(arena, name[0], b->arena_bytes); /* not the one page of zeros that everything might share */
    const struct xfer_config c = {.backend = XFER_UCX,
                                  .name = name,
                                  .listen = "127.0.0.1:0",
                                  .tls = tls,
                                  .incarnation = random_u64(),
                                  .layout = &b->layout,
                                  .arena = arena,
                                  .arena_bytes = b->arena_bytes,
                                  .clock = &b->clock,
                                  .log = log};
    return xfer_open(&c, &s->x, error_out);
}

static void side_close(struct bench *b, struct side *s)
{
    xfer_close(s->x);
    mem_unmap(s->arena, b->arena_bytes);
    *s = (struct side){0};
}

static enum td_status measure(struct bench *b, uint64_t min_ns, struct xfer_bench_row *row)
{
    row->memcpy_gb_per_s = measure_memcpy(b);
    uint64_t counter = 1, bytes = 0;
    enum td_status s = transfer_once(b, counter++); /* connects, and brings everything into place */
    uint64_t begin = clock_now(&b->clock), now = begin;
    while (!s && now - begin < min_ns) {
        s = transfer_once(b, counter++);
        bytes += b->n_pages * b->page_bytes;
        now = clock_now(&b->clock);
    }
    char transport[256];
    xfer_transport(b->reader.x, transport, sizeof(transport));
    memcpy(row->transport, transport, sizeof(row->transport) - 1);
    row->transport[sizeof(row->transport) - 1] = 0;
    row->bytes = bytes;
    row->seconds = (double)(now - begin) * 1e-9;
    row->gb_per_s = row->seconds > 0 ? (double)bytes * 1e-9 / row->seconds : 0;
    return s;
}

/* Pages of that size: up to LAYERS_MAX layers of heads of 4 KiB. */
static struct kv_layout layout_of(uint64_t page_bytes)
{
    uint32_t units = (uint32_t)(page_bytes / UNIT), layers = LAYERS_MAX;
    while (units % layers)
        layers--;
    return (struct kv_layout){NUM_F16, layers, units / layers, 64, 16};
}

static enum td_status one_row(const struct xfer_bench_config *config, const char *tls, uint64_t page_bytes,
                              struct xfer_bench_row *row, struct td_error *error_out)
{
    struct bench b = {.page_bytes = page_bytes, .layout = layout_of(page_bytes)};
    if (!page_bytes || page_bytes % UNIT || page_bytes > 64u << 20 || kv_layout_check(&b.layout, NULL))
        return td_fail(error_out, TD_ERR_INVALID, "page of %llu bytes: expected a multiple of %d up to 64 MiB",
                       (unsigned long long)page_bytes, UNIT);
    clock_init_real(&b.clock);
    b.arena_bytes = config->arena_bytes ? config->arena_bytes : 128u << 20;
    b.n_pages = (uint32_t)(b.arena_bytes / page_bytes);
    if (!b.n_pages)
        return td_fail(error_out, TD_ERR_INVALID, "the arena is smaller than a page of %llu bytes",
                       (unsigned long long)page_bytes);
    pthread_mutex_init(&b.lock, NULL);
    pthread_cond_init(&b.changed, NULL);
    enum td_status s = side_open(&b, &b.holder, "holder", tls, config->log, error_out);
    if (!s)
        s = side_open(&b, &b.reader, "reader", tls, config->log, error_out);
    if (!s) {
        *row = (struct xfer_bench_row){.tls = tls, .page_bytes = page_bytes};
        s = measure(&b, config->min_ns ? config->min_ns : NS_PER_S, row);
        if (s)
            td_fail(error_out, s, "%s with pages of %llu bytes: %s", tls, (unsigned long long)page_bytes,
                    td_status_name(s));
    }
    side_close(&b, &b.reader);
    side_close(&b, &b.holder);
    pthread_cond_destroy(&b.changed);
    pthread_mutex_destroy(&b.lock);
    return s;
}

enum td_status xfer_bench(const struct xfer_bench_config *config, struct xfer_bench_row *rows,
                          struct td_error *error_out)
{
    for (uint32_t t = 0; t < config->n_tls; t++) {
        for (uint32_t i = 0; i < config->n_page_bytes; i++) {
            enum td_status s =
                one_row(config, config->tls[t], config->page_bytes[i], &rows[t * config->n_page_bytes + i], error_out);
            if (s)
                return s;
        }
    }
    return TD_OK;
}
