/*
 * One xfer with an arena and a record of its callbacks, for the tests of this folder.
 *
 * The xfer's thread and the test's thread share the record. It has a mutex and a condition, because a test
 * waits for states of the record; a queue of events would have to be searched anyway. Pages are filled with a
 * pattern of the transfer's counter, the index and the position, so that a byte in a wrong place is noticed.
 */
#pragma once

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/random.h"
#include "tests/tap.h"
#include "transfer/xfer.h"

enum { NODE_IDS = 512 };

struct lease_record {
    uint32_t ends;
    enum td_status status;
    bool in_doubt;
};

struct pull_record {
    uint32_t ends, n_pages, progress, placed, tail_len;
    enum td_status status;
    uint64_t bytes;
    uint32_t place_limit; /* indexes from this one on get no place; 0: no limit */
    uint32_t place_base;  /* first used page of the arena */
    uint8_t tail[256];
};

struct node {
    struct xfer *x;
    struct clock clock;
    struct log log;
    struct kv_layout layout;
    size_t page_bytes, arena_bytes;
    uint8_t *arena;
    uint64_t incarnation;
    char address[160];
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct lease_record leases[NODE_IDS]; /* indexed by counter modulo NODE_IDS */
    struct pull_record pulls[NODE_IDS];
    struct secret *secret;
    uint32_t ups, downs, n_messages, pulls_ended, leases_ended, pulls_ok;
    enum td_status down_why;
    struct xfer_peer *peer;
    uint64_t peer_incarnation;
    struct bytes message;
    uint16_t message_kind;
};

struct node_params {
    const char *backend; /* "loopback", "mapped" (arena shared), or as xfer_config.transports */
    struct xfer_hub *hub;
    const char *name, *secret, *listen;
    uint32_t n_pages;
    struct kv_layout layout; /* all zero: SMALL_LAYOUT */
    uint64_t incarnation;
    uint32_t max_inflight_bytes;
    uint64_t silence_ns; /* 0: the default */
};

static inline uint64_t wall_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * NS_PER_S + (uint64_t)ts.tv_nsec;
}

/* Waits for a change, at most 20 ms. False after the deadline. */
static inline bool node_wait_turn(struct node *n, uint64_t deadline_ns)
{
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    ts.tv_nsec += 20 * 1000000;
    if (ts.tv_nsec >= 1000000000) {
        ts.tv_nsec -= 1000000000;
        ts.tv_sec++;
    }
    pthread_cond_timedwait(&n->changed, &n->lock, &ts);
    return wall_ns() < deadline_ns;
}

/* Waits, under the node's lock, until the condition holds; fails the test after some seconds. */
#define NODE_WAIT_S(n, seconds, condition)                                                                             \
    do {                                                                                                               \
        uint64_t wait_deadline = wall_ns() + (uint64_t)((seconds) * (double)NS_PER_S);                                 \
        pthread_mutex_lock(&(n)->lock);                                                                                \
        bool wait_ok = true;                                                                                           \
        while (!(condition) && (wait_ok = node_wait_turn(n, wait_deadline)))                                           \
            ;                                                                                                          \
        wait_ok = wait_ok || (condition);                                                                              \
        pthread_mutex_unlock(&(n)->lock);                                                                              \
        ck_assert_msg(wait_ok, "waited in vain for: %s", #condition);                                                  \
    } while (0)
#define NODE_WAIT(n, condition) NODE_WAIT_S(n, 10, condition)

static inline void node_on_up(void *user, struct xfer_peer *peer, uint64_t incarnation, const char *name)
{
    struct node *n = user;
    (void)name;
    pthread_mutex_lock(&n->lock);
    n->ups++;
    n->peer = peer;
    n->peer_incarnation = incarnation;
    pthread_cond_broadcast(&n->changed);
    pthread_mutex_unlock(&n->lock);
}

static inline void node_on_down(void *user, struct xfer_peer *peer, uint64_t incarnation, enum td_status why)
{
    struct node *n = user;
    (void)peer;
    (void)incarnation;
    pthread_mutex_lock(&n->lock);
    n->downs++;
    n->down_why = why;
    pthread_cond_broadcast(&n->changed);
    pthread_mutex_unlock(&n->lock);
}

static inline void node_on_message(void *user, struct xfer_peer *peer, uint16_t kind, const void *data, uint32_t len)
{
    struct node *n = user;
    pthread_mutex_lock(&n->lock);
    n->n_messages++;
    n->peer = peer;
    n->message_kind = kind;
    bytes_clear(&n->message);
    bytes_append(&n->message, data, len);
    pthread_cond_broadcast(&n->changed);
    pthread_mutex_unlock(&n->lock);
}

static inline void node_on_lease_end(void *user, struct xfer_id id, enum td_status status, bool in_doubt)
{
    struct node *n = user;
    pthread_mutex_lock(&n->lock);
    struct lease_record *r = &n->leases[id.counter % NODE_IDS];
    r->ends++;
    r->status = status;
    r->in_doubt = in_doubt;
    n->leases_ended++;
    pthread_cond_broadcast(&n->changed);
    pthread_mutex_unlock(&n->lock);
}

static inline void *node_place(void *user, struct xfer_id id, uint32_t index)
{
    struct node *n = user;
    pthread_mutex_lock(&n->lock);
    struct pull_record *r = &n->pulls[id.counter % NODE_IDS];
    r->placed++;
    bool has_place = !r->place_limit || index < r->place_limit;
    uint8_t *at = n->arena + (r->place_base + index) * n->page_bytes;
    pthread_mutex_unlock(&n->lock);
    return has_place ? at : NULL;
}

static inline void node_on_progress(void *user, struct xfer_id id, uint32_t n_verified)
{
    struct node *n = user;
    pthread_mutex_lock(&n->lock);
    struct pull_record *r = &n->pulls[id.counter % NODE_IDS];
    if (n_verified > r->progress)
        r->progress = n_verified;
    pthread_cond_broadcast(&n->changed);
    pthread_mutex_unlock(&n->lock);
}

static inline void node_on_pull_end(void *user, struct xfer_id id, const struct xfer_pull_result *result)
{
    struct node *n = user;
    pthread_mutex_lock(&n->lock);
    struct pull_record *r = &n->pulls[id.counter % NODE_IDS];
    r->ends++;
    r->status = result->status;
    r->n_pages = result->n_pages;
    r->bytes = result->bytes;
    r->tail_len = result->tail_len_bytes;
    if (result->tail_len_bytes)
        memcpy(r->tail, result->tail, result->tail_len_bytes);
    n->pulls_ended++;
    n->pulls_ok += result->status == TD_OK;
    pthread_cond_broadcast(&n->changed);
    pthread_mutex_unlock(&n->lock);
}

static const struct kv_layout SMALL_LAYOUT = {NUM_F32, 4, 2, 16, 16}; /* layer 4 KiB, page 16 KiB */
static const struct kv_layout BIG_LAYOUT = {NUM_F32, 4, 8, 128, 32};  /* layer 256 KiB, page 1 MiB */
/* Layer 768 KiB, page 2.25 MiB: a page has several parts. */
static const struct kv_layout HUGE_LAYOUT = {NUM_F32, 3, 8, 128, 96};

static inline struct node *node_open(const struct node_params *p)
{
    static int n_opened;
    struct node *n = mem_zalloc(sizeof(*n));
    clock_init_real(&n->clock);
    n->log = (struct log){.who = p->name, .level = getenv("XFER_TEST_DEBUG") ? LOG_DEBUG : LOG_ERROR};
    n->layout = p->layout.n_layers ? p->layout : SMALL_LAYOUT;
    n->page_bytes = kv_layout_page_bytes(&n->layout);
    n->arena_bytes = n->page_bytes * p->n_pages;
    n->incarnation = p->incarnation ? p->incarnation : random_u64();
    bool is_mapped = !strcmp(p->backend, "mapped");
    int fd = 0;
    ck_assert_int_eq(is_mapped ? mem_map_shared(n->arena_bytes, (void **)&n->arena, &fd)
                               : mem_map(n->arena_bytes, (void **)&n->arena),
                     TD_OK);
    pthread_mutex_init(&n->lock, NULL);
    pthread_cond_init(&n->changed, NULL);
    bool is_loopback = !strcmp(p->backend, "loopback");
    ck_assert(!secret_open(p->secret, NULL, &n->log, &n->secret, NULL));
    char listen[64];
    if (is_loopback)
        snprintf(listen, sizeof(listen), "%s-%d", p->name, n_opened++);
    else
        snprintf(listen, sizeof(listen), "127.0.0.1:0");
    struct xfer_config c = {.backend = is_loopback ? XFER_LOOPBACK : XFER_NET,
                            .hub = p->hub,
                            .name = p->name,
                            .listen = p->listen ? p->listen : listen,
                            .transports = is_loopback ? NULL : (is_mapped ? "auto" : p->backend),
                            .is_trusted_network = true,
                            .incarnation = n->incarnation,
                            .secret = n->secret,
                            .layout = &n->layout,
                            .arena = n->arena,
                            .arena_bytes = n->arena_bytes,
                            .arena_fd = fd,
                            .max_inflight_bytes = p->max_inflight_bytes,
                            .silence_ns = p->silence_ns,
                            .clock = &n->clock,
                            .log = &n->log,
                            .callbacks = {n, node_on_up, node_on_down, node_on_message}};
    struct td_error error = {""};
    enum td_status s = xfer_open(&c, &n->x, &error);
    ck_assert_msg(s == TD_OK, "xfer_open: %s", error.text);
    if (fd)
        close(fd);
    snprintf(n->address, sizeof(n->address), "%s", xfer_address(n->x));
    return n;
}

static inline void node_close(struct node *n)
{
    if (!n)
        return;
    xfer_close(n->x);
    secret_close(n->secret);
    pthread_cond_destroy(&n->changed);
    pthread_mutex_destroy(&n->lock);
    mem_unmap(n->arena, n->arena_bytes);
    bytes_free(&n->message);
    free(n);
}

/* Checks that nothing is left open; called after each test. */
static inline void node_check_quiet(struct node *n)
{
    uint64_t deadline = wall_ns() + 5 * NS_PER_S;
    struct xfer_stats s = xfer_stats(n->x);
    while ((s.leases_open || s.pulls_open) && wall_ns() < deadline) {
        pthread_mutex_lock(&n->lock);
        node_wait_turn(n, deadline);
        pthread_mutex_unlock(&n->lock);
        s = xfer_stats(n->x);
    }
    ck_assert_uint_eq(s.leases_open, 0);
    ck_assert_uint_eq(s.pulls_open, 0);
}

static inline uint64_t pattern(uint64_t counter, uint32_t index, size_t word)
{
    return random_mix(counter * 0x100000001b3ull + index) ^ (word * 0x9e3779b97f4a7c15ull);
}

static inline void node_fill(struct node *n, uint32_t page, uint64_t counter, uint32_t index)
{
    uint64_t *w = (uint64_t *)(void *)(n->arena + page * n->page_bytes);
    for (size_t i = 0; i < n->page_bytes / 8; i++)
        w[i] = pattern(counter, index, i);
}

static inline bool node_page_is(const struct node *n, uint32_t page, uint64_t counter, uint32_t index)
{
    const uint64_t *w = (const uint64_t *)(const void *)(n->arena + page * n->page_bytes);
    for (size_t i = 0; i < n->page_bytes / 8; i++)
        if (w[i] != pattern(counter, index, i))
            return false;
    return true;
}

static inline struct xfer_id node_id(uint64_t counter)
{
    return (struct xfer_id){77, counter};
}

static inline void node_grant(struct node *n, uint64_t counter, uint64_t duration_ns)
{
    struct xfer_lease_params p = {
        .id = node_id(counter), .duration_ns = duration_ns, .on_end = node_on_lease_end, .user = n};
    xfer_lease_grant(n->x, &p);
}

/* Announces pages [first_index, first_index + n_pages). They lie in the arena from page first_page on; a
 * generation is 100 + index. */
static inline void node_announce(struct node *n, uint64_t counter, uint32_t first_page, uint32_t first_index,
                                 uint32_t n_pages, uint16_t layer_begin, uint16_t layer_end)
{
    struct xfer_page *pages = mem_array(n_pages, sizeof(pages[0]));
    for (uint32_t i = 0; i < n_pages; i++)
        pages[i] = (struct xfer_page){n->arena + (first_page + i) * n->page_bytes, 100 + first_index + i};
    xfer_lease_announce(n->x, node_id(counter), first_index, pages, n_pages, layer_begin, layer_end);
    free(pages);
}

/* Pulls the rest of a transfer whose first n_have pages the reader has already. */
static inline void node_pull_rest(struct node *n, uint64_t counter, const char *address, uint64_t holder_incarnation,
                                  uint64_t within_ns, uint32_t n_have)
{
    struct xfer_pull_params p = {.id = node_id(counter),
                                 .address = address,
                                 .holder_incarnation = holder_incarnation,
                                 .deadline_ns = clock_now(&n->clock) + within_ns,
                                 .n_have = n_have,
                                 .place = node_place,
                                 .on_progress = node_on_progress,
                                 .on_end = node_on_pull_end,
                                 .user = n};
    xfer_pull_start(n->x, &p);
}

static inline void node_pull(struct node *n, uint64_t counter, const char *address, uint64_t holder_incarnation,
                             uint64_t within_ns)
{
    node_pull_rest(n, counter, address, holder_incarnation, within_ns, 0);
}
