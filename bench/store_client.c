#include "bench/store_client.h"

#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/random.h"
#include "proto/wire/store_msg.h"

static const uint64_t PATIENCE_NS = 30 * NS_PER_S;

static struct block_key key_of(const struct bench_client *c, uint32_t i)
{
    struct block_key k;
    uint64_t b = (uint64_t)c->generation << 32 | i, a = random_mix(b);
    memcpy(k.b, &a, 8);
    memcpy(k.b + 8, &b, 8);
    return k;
}

/* ------------------------------------------------------------------ callbacks */

static void end_flight(struct bench_flight *f, bool is_ok)
{
    struct bench_client *c = f->client;
    pthread_mutex_lock(&c->lock);
    f->is_ok = is_ok;
    f->is_busy = false;
    f->took_ns = clock_now(&c->clock) - f->began_ns;
    pthread_cond_signal(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

static void on_lease_end(void *user, struct xfer_id id, enum td_status status, bool in_doubt)
{
    (void)id, (void)in_doubt;
    end_flight(user, status == TD_OK);
}

static void on_wire_lease_end(void *user, struct xfer_id id, enum td_status status, bool in_doubt)
{
    (void)user, (void)id, (void)status, (void)in_doubt; /* only the reader's end counts */
}

static void on_pull_end(void *user, struct xfer_id id, const struct xfer_pull_result *result)
{
    (void)id;
    struct bench_flight *f = user;
    end_flight(f, result->status == TD_OK && result->n_pages == f->n);
}

static void *flight_address(void *user, struct xfer_id id, uint32_t index)
{
    (void)id;
    const struct bench_flight *f = user;
    return index < f->n ? f->client->landing + (uint64_t)(f->first + index) * f->client->page_bytes : NULL;
}

static struct xfer_page page_at(const struct bench_client *c, uint32_t block)
{
    return (struct xfer_page){c->source + (uint64_t)block * c->page_bytes, 1};
}

static void grant(struct bench_flight *f, const struct xfer_page *pages, uint32_t n,
                  void (*on_end)(void *, struct xfer_id, enum td_status, bool))
{
    struct xfer *x = f->client->holder;
    xfer_lease_grant(x,
                     &(struct xfer_lease_params){.id = f->id, .duration_ns = PATIENCE_NS, .on_end = on_end, .user = f});
    xfer_lease_announce(x, f->id, 0, pages, n, 0, (uint16_t)f->client->layout.n_layers);
    xfer_lease_finish(x, f->id, n, NULL, 0);
}

static struct bench_flight *find_flight(struct bench_client *c, uint64_t counter)
{
    struct bench_flight *found = NULL;
    pthread_mutex_lock(&c->lock);
    for (int i = 0; i < BENCH_FLIGHTS; i++)
        if (c->flights[i].is_busy && c->flights[i].id.counter == counter)
            found = &c->flights[i];
    pthread_mutex_unlock(&c->lock);
    return found;
}

static void on_message(void *user, struct xfer_peer *peer, uint16_t kind, const void *data, uint32_t len_bytes)
{
    (void)peer;
    struct bench_client *c = user;
    struct store_want_msg m;
    struct xfer_page pages[BENCH_REQUEST_BLOCKS];
    if (kind != STORE_WANT || store_want_decode(data, len_bytes, &m) || m.n > BENCH_REQUEST_BLOCKS)
        return;
    struct bench_flight *f = find_flight(c, m.id_counter);
    if (!f)
        return;
    /* Not all blocks were wanted: some were dropped for room, or known. */
    if (m.n != f->n) {
        end_flight(f, false);
        return;
    }
    for (uint32_t i = 0; i < m.n; i++)
        pages[i] = page_at(c, f->first + store_want_at(&m, i));
    grant(f, pages, m.n, on_lease_end);
}

/* ------------------------------------------------------------------- requests */

static void ask_store(struct bench_client *c, const struct bench_flight *f, enum store_msg_kind kind)
{
    struct block_key keys[BENCH_REQUEST_BLOCKS];
    struct bytes b = {0};
    struct xfer *from = kind == STORE_OFFER ? c->holder : c->reader;
    const char *address = kind == STORE_OFFER ? xfer_address(c->holder) : "";
    for (uint32_t i = 0; i < f->n; i++)
        keys[i] = key_of(c, f->first + i);
    const struct store_keys_msg m = {.id_incarnation = f->id.incarnation,
                                     .id_counter = f->id.counter,
                                     .first_index = f->first,
                                     .n_keys = (uint16_t)f->n,
                                     .keys = keys[0].b,
                                     .address = address,
                                     .address_len = (uint16_t)strlen(address)};
    store_keys_encode(&m, &b);
    xfer_send(from, c->store, (uint16_t)kind, b.data, (uint32_t)b.len);
    bytes_free(&b);
}

static void pull(struct bench_client *c, struct bench_flight *f, const char *address)
{
    xfer_pull_start(c->reader, &(struct xfer_pull_params){.id = f->id,
                                                          .address = address,
                                                          .deadline_ns = f->began_ns + PATIENCE_NS,
                                                          .place = flight_address,
                                                          .on_end = on_pull_end,
                                                          .user = f});
}

static void start(struct bench_client *c, struct bench_flight *f, enum bench_move move, uint32_t first, uint32_t n)
{
    struct xfer_page pages[BENCH_REQUEST_BLOCKS];
    pthread_mutex_lock(&c->lock);
    *f = (struct bench_flight){.client = c,
                               .id = {1, ++c->next_id},
                               .first = first,
                               .n = n,
                               .began_ns = clock_now(&c->clock),
                               .is_busy = true};
    pthread_mutex_unlock(&c->lock);
    switch (move) {
    case BENCH_WIRE:
        for (uint32_t i = 0; i < n; i++)
            pages[i] = page_at(c, first + i);
        grant(f, pages, n, on_wire_lease_end);
        pull(c, f, xfer_address(c->holder));
        break;
    /* The lookup goes first: a pull that arrives before its lease has to ask again. */
    case BENCH_HIT:
        ask_store(c, f, STORE_LOOKUP);
        pull(c, f, c->store);
        break;
    case BENCH_PUT:
        ask_store(c, f, STORE_OFFER);
        break;
    }
}

static struct bench_flight *wait_idle(struct bench_client *c)
{
    struct bench_flight *idle = NULL;
    pthread_mutex_lock(&c->lock);
    for (;;) {
        for (int i = 0; i < BENCH_FLIGHTS && !idle; i++)
            if (!c->flights[i].is_busy)
                idle = &c->flights[i];
        if (idle)
            break;
        pthread_cond_wait(&c->changed, &c->lock);
    }
    pthread_mutex_unlock(&c->lock);
    return idle;
}

static bool wait_all(struct bench_client *c)
{
    bool ok = true;
    pthread_mutex_lock(&c->lock);
    for (int i = 0; i < BENCH_FLIGHTS; i++) {
        while (c->flights[i].is_busy)
            pthread_cond_wait(&c->changed, &c->lock);
        ok = ok && (!c->flights[i].client || c->flights[i].is_ok);
    }
    pthread_mutex_unlock(&c->lock);
    return ok;
}

static bool is_same(const struct bench_client *c, uint32_t first, uint32_t n)
{
    uint64_t at = first * c->page_bytes;
    return c->is_lossy || !memcmp(c->source + at, c->landing + at, n * c->page_bytes);
}

bool bench_client_move(struct bench_client *c, enum bench_move move, uint32_t first, uint32_t n)
{
    bool ok = true;
    memset(c->flights, 0, sizeof(c->flights));
    for (uint32_t i = 0; i < n && ok; i += c->n_request) {
        struct bench_flight *f = wait_idle(c);
        ok = !f->client || f->is_ok;
        if (ok)
            start(c, f, move, first + i, n - i < c->n_request ? n - i : c->n_request);
    }
    return wait_all(c) && ok;
}

bool bench_client_check(const struct bench_client *c)
{
    return is_same(c, 0, c->n_blocks);
}

bool bench_client_time(struct bench_client *c, enum bench_move move, uint32_t first, uint32_t n, uint64_t *ns_out)
{
    memset(c->flights, 0, sizeof(c->flights));
    start(c, &c->flights[0], move, first, n);
    bool ok = wait_all(c);
    *ns_out = c->flights[0].took_ns;
    return ok && (move == BENCH_PUT || is_same(c, first, n));
}

/* ------------------------------------------------------------------ open, close */

static enum td_status open_end(struct bench_client *c, const char *name, const char *listen, const char *transports,
                               void *arena, int arena_fd, struct xfer **out, struct td_error *e)
{
    const struct xfer_config x = {.backend = XFER_NET,
                                  .name = name,
                                  .listen = listen,
                                  .transports = transports,
                                  .incarnation = random_u64(),
                                  .layout = &c->layout,
                                  .arena = arena,
                                  .arena_bytes = c->n_blocks * c->page_bytes,
                                  .arena_fd = arena_fd,
                                  .silence_ns = 5 * NS_PER_S,
                                  .clock = &c->clock,
                                  .log = &c->log,
                                  .callbacks = {.user = c, .on_message = on_message}};
    return xfer_open(&x, out, e);
}

enum td_status bench_client_open(struct bench_client *c, uint32_t n_layers, uint64_t bytes, const char *transports,
                                 struct td_error *error_out)
{
    void *source = NULL, *landing = NULL;
    *c = (struct bench_client){.layout = {NUM_BF16, n_layers, 8, 64, 16}};
    clock_init_real(&c->clock);
    c->log = (struct log){.who = "bench", .level = LOG_ERROR, .fd = 2};
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->changed, NULL);
    c->page_bytes = kv_layout_page_bytes(&c->layout);
    c->n_request = (uint32_t)(BENCH_REQUEST_BYTES / c->page_bytes);
    c->n_blocks = (uint32_t)(bytes / BENCH_REQUEST_BYTES) * c->n_request;
    if (!c->n_blocks)
        return td_fail(error_out, TD_ERR_INVALID, "bytes: %d MiB at least", BENCH_REQUEST_BYTES >> 20);
    enum td_status s = mem_map_shared(c->n_blocks * c->page_bytes, &source, &c->source_fd);
    c->source = source;
    if (!s)
        s = mem_map(c->n_blocks * c->page_bytes, &landing);
    c->landing = landing;
    if (s)
        return td_fail(error_out, s, "no memory for the working set");
    for (uint64_t i = 0; i < c->n_blocks * c->page_bytes / 8; i++)
        ((uint64_t *)source)[i] = (random_mix(i) & 0x83ff83ff83ff83ff) | 0x3c003c003c003c00;
    s = open_end(c, "holder", "127.0.0.1:0", transports, source, c->source_fd, &c->holder, error_out);
    return s ? s : open_end(c, "reader", NULL, transports, landing, 0, &c->reader, error_out);
}

void bench_client_close(struct bench_client *c)
{
    xfer_close(c->reader); /* each of these calls accepts NULL */
    xfer_close(c->holder);
    if (c->source)
        mem_unmap(c->source, c->n_blocks * c->page_bytes);
    if (c->landing)
        mem_unmap(c->landing, c->n_blocks * c->page_bytes);
    if (c->source_fd)
        close(c->source_fd);
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->changed);
}
