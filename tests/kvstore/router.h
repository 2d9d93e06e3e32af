/*
 * A router as a store sees it: attaches, gets the hello, and records which block the store reports in which
 * tier.
 *
 * Rpc threads and the test's thread share the record. It has a mutex and a condition, because a test waits
 * for states of the record.
 */
#pragma once

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "base/random.h"
#include "proto/wire/events.h"
#include "tests/tap.h"
#include "worker/link.h"
#include "worker/proof.h"

enum { ROUTER_BLOCKS = 1 << 18 };

struct fake_router {
    struct log log;
    struct rpc_client *client;
    struct rpc_call *call;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool has_hello, is_over, has_gap;
    char role[16], xfer_address[160];
    uint32_t n_pages, n_loads, n_said;
    uint64_t incarnation, next_event;
    struct proof_said said;
    bool in_tier[3][ROUTER_BLOCKS]; /* indexed by the number of the block */
    uint32_t n_in[3], index[ROUTER_BLOCKS];
    uint64_t n_left[3]; /* how often a block left */
    uint32_t free_pages, cached_pages, held_pages, leased_pages, total_pages;
    uint64_t store_blocks_dram, store_blocks_ssd, store_bytes_ssd;
};

static inline struct block_key block_of(uint32_t n)
{
    struct block_key k;
    uint64_t a = random_mix(n), b = n;
    memcpy(k.b, &a, 8);
    memcpy(k.b + 8, &b, 8);
    return k;
}

static inline uint32_t number_of(const struct block_key *k)
{
    uint64_t n;
    memcpy(&n, k->b + 8, 8);
    return (uint32_t)n;
}

static inline void router_on_event(struct fake_router *r, const struct block_event *ev)
{
    uint32_t n = number_of(&ev->key);
    if (ev->kind == BLOCK_CLEARED) {
        for (int tier = 0; tier < 3; tier++)
            r->n_left[tier] += r->n_in[tier];
        memset(r->in_tier, 0, sizeof(r->in_tier));
        memset(r->n_in, 0, sizeof(r->n_in));
    } else if (n < ROUTER_BLOCKS) {
        bool is_in = ev->kind == BLOCK_ADDED;
        r->n_left[ev->tier] += r->in_tier[ev->tier][n] && !is_in;
        r->n_in[ev->tier] += (uint32_t)is_in - r->in_tier[ev->tier][n];
        r->in_tier[ev->tier][n] = is_in;
        r->index[n] = ev->index;
    }
}

static inline void router_on_events(struct fake_router *r, ProtobufCBinaryData d)
{
    struct events_header h;
    ck_assert_int_eq(events_decode(d.data, d.len, &h), TD_OK);
    for (uint32_t i = 0; i < h.count; i++) {
        struct block_event ev = events_at(d.data, i);
        r->has_gap |= ev.kind != BLOCK_CLEARED && r->next_event && h.first_sequence + i != r->next_event;
        r->next_event = h.first_sequence + i + 1;
        router_on_event(r, &ev);
    }
}

static inline void router_on_load(struct fake_router *r, const Tandem__Worker__V1__Load *l)
{
    r->n_loads++;
    r->free_pages = l->free_pages;
    r->cached_pages = l->cached_pages;
    r->held_pages = l->held_pages;
    r->leased_pages = l->leased_pages;
    r->total_pages = l->total_pages;
    r->store_blocks_dram = l->store_blocks_dram;
    r->store_blocks_ssd = l->store_blocks_ssd;
    r->store_bytes_ssd = l->store_bytes_ssd;
}

static inline void router_on_challenge(struct fake_router *r, struct rpc_call *call,
                                       const Tandem__Worker__V1__Challenge *challenge)
{
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__Proof proof = TANDEM__WORKER__V1__PROOF__INIT;
    uint8_t mac[SECRET_MAC_BYTES];
    ck_assert(proof_nonce_read(challenge->nonce, r->said.worker));
    struct proof_said said = r->said;
    char address[REACH_BYTES], local[RPC_PEER_BYTES];
    snprintf(address, sizeof(address), "%.*s", (int)challenge->address.len, (const char *)challenge->address.data);
    snprintf(local, sizeof(local), "%.*s", (int)challenge->local.len, (const char *)challenge->local.data);
    said.address = address;
    said.local = local;
    ck_assert(proof_verify(NULL, ATTACH_WORKER, &said, challenge->proof));
    proof_sign(NULL, ATTACH_ROUTER, &r->said, mac);
    proof.proof = (ProtobufCBinaryData){sizeof(mac), mac};
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_PROOF;
    m.proof = &proof;
    m.number = 2;
    ck_assert_int_eq(rpc_call_send(call, &m.base), TD_OK);
}

static inline void router_on_message(struct rpc_call *call, const ProtobufCMessage *base)
{
    struct fake_router *r = rpc_call_user(call);
    const Tandem__Worker__V1__WorkerMessage *m = (const Tandem__Worker__V1__WorkerMessage *)base;
    pthread_mutex_lock(&r->lock);
    if (m->kind_case == TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_CHALLENGE) {
        router_on_challenge(r, call, m->challenge);
    } else if (m->kind_case == TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_HELLO) {
        snprintf(r->role, sizeof(r->role), "%.*s", (int)m->hello->role.len, (const char *)m->hello->role.data);
        snprintf(r->xfer_address, sizeof(r->xfer_address), "%.*s", (int)m->hello->xfer_address.len,
                 (const char *)m->hello->xfer_address.data);
        r->n_pages = m->hello->n_pages;
        r->incarnation = m->hello->incarnation;
        r->has_hello = true;
    } else if (m->kind_case == TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_EVENTS) {
        router_on_events(r, m->events);
    } else if (m->kind_case == TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_LOAD) {
        router_on_load(r, m->load);
    }
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->lock);
}

static inline void router_on_end(struct rpc_call *call, enum rpc_code code, const char *text)
{
    struct fake_router *r = rpc_call_user(call);
    (void)code, (void)text;
    pthread_mutex_lock(&r->lock);
    r->is_over = true;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->lock);
}

/* Waits, under the lock, until the condition holds; fails the test after 20 s. */
#define ROUTER_WAIT(r, condition)                                                                                      \
    do {                                                                                                               \
        struct timespec router_until;                                                                                  \
        clock_gettime(CLOCK_REALTIME, &router_until);                                                                  \
        router_until.tv_sec += 60;                                                                                     \
        int router_late = 0;                                                                                           \
        pthread_mutex_lock(&(r)->lock);                                                                                \
        while (!(condition) && !router_late)                                                                           \
            router_late = pthread_cond_timedwait(&(r)->changed, &(r)->lock, &router_until);                            \
        bool router_holds = condition;                                                                                 \
        pthread_mutex_unlock(&(r)->lock);                                                                              \
        ck_assert_msg(router_holds, "waited in vain for: %s", #condition);                                             \
    } while (0)

/* The present value of an expression over the record. */
#define ROUTER_READ(r, expression) (pthread_mutex_lock(&(r)->lock), router_unlock(r, (uint64_t)(expression)))

static inline uint64_t router_unlock(struct fake_router *r, uint64_t value)
{
    pthread_mutex_unlock(&r->lock);
    return value;
}

static inline struct fake_router *router_attach(const char *address)
{
    struct fake_router *r = mem_zalloc(sizeof(*r));
    r->log = (struct log){.who = "router", .level = LOG_ERROR};
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->changed, NULL);
    const struct rpc_client_config c = {
        .target = address, .max_message_bytes = 64 << 20, .max_queued_bytes = 1 << 20, .log = &r->log};
    struct td_error e;
    ck_assert_int_eq(rpc_client_open(&c, &r->client, &e), TD_OK);
    const struct rpc_call_params params = {.path = "/tandem.worker.v1.Worker/Attach",
                                           .response = &tandem__worker__v1__worker_message__descriptor,
                                           .handlers = {router_on_message, NULL, router_on_end},
                                           .user = r,
                                           .wait_for_ready = true};
    ck_assert_int_eq(rpc_call_start(r->client, &params, &r->call), TD_OK);
    Tandem__Worker__V1__RouterHello hello = TANDEM__WORKER__V1__ROUTER_HELLO__INIT;
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    hello.protocol = LINK_PROTOCOL_VERSION;
    m.number = 1;
    hello.incarnation = random_u64();
    secret_nonce(r->said.router);
    r->said.incarnation = hello.incarnation;
    hello.nonce = (ProtobufCBinaryData){sizeof(r->said.router), r->said.router};
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_HELLO;
    m.hello = &hello;
    ck_assert_int_eq(rpc_call_send(r->call, &m.base), TD_OK);
    r->n_said = 2; /* the second message is the proof, in router_on_message() */
    ROUTER_WAIT(r, r->has_hello && r->next_event);
    return r;
}

/* Tells the store to keep blocks [first, first + n) for ttl_ms, or to forget them; n 0: all blocks. */
static inline void router_say(struct fake_router *r, bool keep, uint32_t first, uint32_t n, uint32_t ttl_ms)
{
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__Keep keep_m = TANDEM__WORKER__V1__KEEP__INIT;
    Tandem__Worker__V1__Forget forget_m = TANDEM__WORKER__V1__FORGET__INIT;
    struct block_key *keys = mem_array(n, sizeof(*keys));
    for (uint32_t i = 0; i < n; i++)
        keys[i] = block_of(first + i);
    keep_m.keys = forget_m.keys = (ProtobufCBinaryData){n * sizeof(*keys), (uint8_t *)keys};
    keep_m.ttl_ms = ttl_ms;
    m.number = ++r->n_said;
    m.kind_case =
        keep ? TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_KEEP : TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_FORGET;
    if (keep)
        m.keep = &keep_m;
    else
        m.forget = &forget_m;
    ck_assert_int_eq(rpc_call_send(r->call, &m.base), TD_OK);
    free(keys);
}

static inline void router_detach(struct fake_router *r)
{
    rpc_call_cancel(r->call);
    rpc_call_unref(r->call);
    rpc_client_close(r->client);
    pthread_mutex_destroy(&r->lock);
    pthread_cond_destroy(&r->changed);
    free(r);
}
