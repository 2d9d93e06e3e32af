/*
 * proto/rpc/rpc.h in memory, for tests of router/: what the router sends is kept in a list, nothing comes by
 * itself.
 *
 * A test program that links calls.c gets these functions instead of those of proto/rpc (the linker takes
 * nothing from a library that is there already), so the router under test is the real one, from router_open()
 * to router_close(), without sockets and rpc threads. The bounds of a call's queue are those of rpc.h.
 *
 * Threads: one, the test's. Ownership: calls are counted as in rpc.h; the test holds one reference of each
 * client's call.
 */
#pragma once

#include "proto/rpc/rpc.h"

struct rpc_call {
    uint32_t n_refs;
    void *user;
    struct rpc_handlers handlers; /* of a worker's stream; a client's call has none */
    bool reads;                   /* what is sent leaves the queue at once; false: only by call_read() */
    uint64_t queued_bytes, max_queued_bytes;
    uint32_t max_message_bytes;
    ProtobufCMessage **sent; /* unpacked copies of all messages; owned */
    uint32_t n_sent;
    bool finished, over; /* rpc_call_finish() was called; the other side left, or was cancelled */
    /* How often rpc_call_finish() was called: the first call counts, and no other should follow. */
    uint32_t n_finishes;
    enum rpc_code code; /* as it was finished */
    char text[512];
    uint32_t retry_after_ms;
};

/* A call of a client that reads at once. Free it with rpc_call_unref(). */
struct rpc_call *call_open(void);
void call_read(struct rpc_call *call); /* the client takes all that is queued */
