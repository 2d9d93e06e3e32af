/* Calls through the door of the router: a client's or operator's message to the method, then its answer. */
#pragma once

#include <fcntl.h>
#include <time.h>

#include "world.h"

static inline uint64_t door_wall_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * NS_PER_S + (uint64_t)t.tv_nsec;
}

/* Runs the owner thread until the condition holds: text threads are real. Fails the test after 20 s. */
#define router_turns_until(condition)                                                                                  \
    do {                                                                                                               \
        uint64_t turns_limit = door_wall_ns() + 20 * NS_PER_S;                                                         \
        while (!(condition)) {                                                                                         \
            ck_assert_msg(door_wall_ns() < turns_limit, "waited in vain for: %s", #condition);                         \
            router_turn(router);                                                                                       \
        }                                                                                                              \
    } while (0)

/* The message has been delivered; nothing is handled yet that the owner or a text thread has to handle. */
static inline struct rpc_call *door_open(const char *path, const ProtobufCMessage *m)
{
    const struct rpc_server *listener = !strncmp(path, "/tandem.admin.", 14)    ? router->admin
                                        : !strncmp(path, "/tandem.worker.", 15) ? router->cluster
                                                                                : router->rpc;
    struct rpc_call *call = call_to(rpc_server_address(listener), path);
    call_says(call, m);
    return call;
}

/* The client reads the end, or leaves. */
static inline void door_close(struct rpc_call *call)
{
    call_leaves(call);
    rpc_call_unref(call);
}

/* Asks and waits for the end. The caller closes it. */
static inline struct rpc_call *door_ask(const char *path, const ProtobufCMessage *m)
{
    struct rpc_call *call = door_open(path, m);
    router_turns_until(call->finished);
    return call;
}

/* The only message of an answer that went well. */
static inline const void *door_answer(const struct rpc_call *call)
{
    ck_assert_msg(call->code == RPC_OK, "%s: %s", rpc_code_name(call->code), call->text);
    ck_assert_uint_eq(call->n_sent, 1);
    return call->sent[0];
}

/* Asks, and fails unless the call ends with this code and a text that begins like this. */
static inline void door_refuses(const char *path, const ProtobufCMessage *m, enum rpc_code code, const char *text)
{
    struct rpc_call *call = door_ask(path, m);
    ck_assert_msg(call->code == code && !strncmp(call->text, text, strlen(text)), "%s '%s' instead of %s '%s'",
                  rpc_code_name(call->code), call->text, rpc_code_name(code), text);
    ck_assert_uint_eq(call->n_sent, 0);
    door_close(call);
}

/* How many messages of this kind p got; *last_out (may be NULL): the last one. */
static inline uint32_t told(const struct peer *p, int kind, const Tandem__Worker__V1__RouterMessage **last_out)
{
    uint32_t n = 0;
    for (uint32_t i = 0; p->call && i < p->call->n_sent; i++) {
        const Tandem__Worker__V1__RouterMessage *m = (Tandem__Worker__V1__RouterMessage *)p->call->sent[i];
        if ((int)m->kind_case != kind)
            continue;
        n++;
        if (last_out)
            *last_out = m;
    }
    return n;
}

/* What the router logs from now on is expected, and not shown. */
static inline void world_hush(void)
{
    static int nowhere;
    nowhere = nowhere ? nowhere : open("/dev/null", O_WRONLY);
    router->log.fd = nowhere;
}

/* The peer's stream breaks. */
static inline void world_lose(struct peer *p)
{
    peer_gone(p, "UNAVAILABLE: it left");
    ck_assert_int_eq(p->state, PEER_LOST);
}
