/* A store in this process, a worker that is an xfer over loopback, and a router attached by gRPC: the
 * surroundings of tests of the whole store. */
#pragma once

#include "base/thread.h"
#include "kvstore/kvstore.h"
#include "proto/wire/store_msg.h"
#include "tests/kvstore/dirs.h"
#include "tests/kvstore/router.h"
#include "tests/transfer/node.h"

#define DIMS "layers=2,hidden=32,heads=2,kv_heads=2,head_dim=16,ffn=64,vocab=256"
static const struct kv_layout LAYOUT = {NUM_F32, 2, 2, 16, 16}; /* the layout of DIMS: a page of 8 KiB */
enum { PAGE = 8192, WORKER_PAGES = 256 };

static uint32_t offering; /* tenant of offered blocks; a static, since each test has a process */

struct world {
    struct temp_dir dir;
    struct xfer_hub *hub;
    struct kvstore_config config;
    struct kvstore *store;
    pthread_t thread;
    struct node *worker;
    struct fake_router *router;
    uint64_t next_id;
};

static inline void *run(void *store)
{
    kvstore_run(store);
    return NULL;
}

static inline void start_store(struct world *w)
{
    struct td_error e = {""};
    enum td_status s = kvstore_open(&w->config, &w->store, &e);
    ck_assert_msg(s == TD_OK, "kvstore_open: %s", e.text);
    w->thread = thread_start("main", run, w->store);
    w->router = router_attach(kvstore_address(w->store));
}

static inline void stop_store(struct world *w)
{
    router_detach(w->router);
    kvstore_stop(w->store);
    pthread_join(w->thread, NULL);
    kvstore_close(w->store);
}

static inline void world_open(struct world *w, uint32_t n_slots, bool has_ssd)
{
    *w = (struct world){.dir = temp_dir_make(), .hub = xfer_hub_open()};
    w->config = (struct kvstore_config){
        .hub = w->hub,
        .options = {.geometry = {.dummy = DIMS, .numerics = "f32", .kv_dtype = "auto", .block_tokens = 16},
                    .name = "store",
                    .listen = "127.0.0.1:0",
                    .log_level = "error",
                    .dir = has_ssd ? w->dir.store : NULL,
                    .dram_bytes = (int64_t)n_slots * PAGE,
                    .ssd_bytes = 256 << 20,
                    .read_threads = 2,
                    .read_deadline_ms = 10000,
                    .write_queue_bytes = 64 << 20,
                    .lease_ms = 10000,
                    .silence_ms = 1000}};
}

static inline void world_start(struct world *w)
{
    start_store(w);
    w->worker = node_open(&(struct node_params){
        .backend = "loopback", .hub = w->hub, .name = "worker", .n_pages = WORKER_PAGES, .layout = LAYOUT});
}

static inline void world_close(struct world *w)
{
    node_check_quiet(w->worker);
    ck_assert(!ROUTER_READ(w->router, w->router->has_gap));
    node_close(w->worker);
    stop_store(w);
    xfer_hub_close(w->hub);
    temp_dir_remove(&w->dir);
}

/* ------------------------------------------------------------- the worker's part */

static inline void send_keys(struct node *n, const char *store, enum store_msg_kind kind, uint64_t id, uint32_t first,
                             uint32_t count)
{
    struct block_key keys[WORKER_PAGES];
    struct bytes b = {0};
    for (uint32_t i = 0; i < count; i++)
        keys[i] = block_of(first + i);
    const struct store_keys_msg m = {.id_incarnation = node_id(id).incarnation,
                                     .id_counter = id,
                                     .first_index = first,
                                     .n_keys = (uint16_t)count,
                                     .keys = keys[0].b,
                                     .address = n->address,
                                     .address_len = kind == STORE_OFFER ? (uint16_t)strlen(n->address) : 0,
                                     .tenant = offering};
    store_keys_encode(&m, &b);
    xfer_send(n->x, store, (uint16_t)kind, b.data, (uint32_t)b.len);
    bytes_free(&b);
}

static inline bool is_want_of(const struct node *n, uint64_t id)
{
    struct store_want_msg m;
    return n->message_kind == STORE_WANT && !store_want_decode(n->message.data, n->message.len, &m) &&
           m.id_counter == id;
}

/* Offers blocks [first, first + count) and grants the wanted ones. Returns how many were wanted;
 * positions_out may be NULL. */
static inline uint32_t offer_at(struct node *n, const char *store, uint64_t id, uint32_t first, uint32_t count,
                                uint16_t *positions_out)
{
    pthread_mutex_lock(&n->lock);
    n->leases[id % NODE_IDS] = (struct lease_record){0};
    pthread_mutex_unlock(&n->lock);
    send_keys(n, store, STORE_OFFER, id, first, count);
    NODE_WAIT(n, is_want_of(n, id));
    struct store_want_msg m;
    pthread_mutex_lock(&n->lock);
    store_want_decode(n->message.data, n->message.len, &m);
    struct xfer_page pages[WORKER_PAGES];
    for (uint32_t i = 0; i < m.n; i++) {
        uint16_t at = store_want_at(&m, i);
        ck_assert_uint_lt(at, count);
        node_fill(n, at, first + at, 0); /* the bytes of a block follow from its number */
        pages[i] = (struct xfer_page){n->arena + at * n->page_bytes, 1};
        if (positions_out)
            positions_out[i] = at;
    }
    pthread_mutex_unlock(&n->lock);
    if (m.n) {
        node_grant(n, id, 10 * NS_PER_S);
        xfer_lease_announce(n->x, node_id(id), 0, pages, m.n, 0, (uint16_t)n->layout.n_layers);
        xfer_lease_finish(n->x, node_id(id), m.n, NULL, 0);
        NODE_WAIT(n, n->leases[id % NODE_IDS].ends == 1);
        ck_assert_int_eq(n->leases[id % NODE_IDS].status, TD_OK);
    }
    return m.n;
}

static inline uint32_t offer(struct world *w, uint32_t first, uint32_t count)
{
    return offer_at(w->worker, kvstore_xfer_address(w->store), ++w->next_id, first, count, NULL);
}

/* Looks up blocks [first, first + count) and compares all bytes that came. Returns the number of blocks that
 * came. */
static inline uint32_t lookup_at(struct node *n, const char *store, uint64_t id, uint32_t first, uint32_t count,
                                 struct store_found *found_out)
{
    struct store_found found;
    struct pull_record *r = &n->pulls[id % NODE_IDS];
    memset(n->arena, 0, n->arena_bytes);
    pthread_mutex_lock(&n->lock);
    *r = (struct pull_record){0}; /* the record may have been used before */
    pthread_mutex_unlock(&n->lock);
    node_pull(n, id, store, 0, 20 * NS_PER_S);
    send_keys(n, store, STORE_LOOKUP, id, first, count);
    NODE_WAIT_S(n, 20, r->ends == 1);
    ck_assert_int_eq(r->status, TD_OK);
    ck_assert_uint_le(r->n_pages, count);
    for (uint32_t i = 0; i < r->n_pages; i++)
        ck_assert_msg(node_page_is(n, i, first + i, 0), "block %u has wrong bytes", first + i);
    ck_assert_int_eq(store_found_decode(r->tail, r->tail_len, &found), TD_OK);
    ck_assert_uint_eq(found.n_dram + found.n_ssd, r->n_pages);
    if (found_out)
        *found_out = found;
    return r->n_pages;
}

static inline uint32_t lookup(struct world *w, uint32_t first, uint32_t count, struct store_found *found_out)
{
    return lookup_at(w->worker, kvstore_xfer_address(w->store), ++w->next_id, first, count, found_out);
}
