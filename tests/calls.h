/*
 * proto/rpc/rpc.h in memory, for tests of router/ and worker/: what a process sends is kept in a list,
 * nothing comes by itself.
 *
 * A test program that links calls.c gets these functions instead of those of proto/rpc (the linker takes
 * nothing from a library that is there already), so the router or worker under test is the real one, from
 * its open function to its close function, without sockets and rpc threads. The bounds of a call's queue are
 * those of rpc.h.
 *
 * The test is the other side: it calls a server with call_to(), and speaks with call_says(). A server gets
 * on_end of a call from call_leaves() or rpc_server_close(), never inside its own functions.
 *
 * Threads: the test's is the rpc thread of all servers. Any thread may send to a call and finish it; the
 * list of sent messages is read when that thread is known to be done, or after `finished` was seen.
 * Ownership: calls are counted as in rpc.h; the test holds one reference of each client's call.
 */
#pragma once

#include <stdatomic.h>

#include "proto/rpc/rpc.h"

struct rpc_call {
    _Atomic uint32_t n_refs;
    void *user;
    struct rpc_handlers handlers;              /* of a stream or of a server's method; call_open() gives none */
    struct rpc_server *server;                 /* whose method was called; NULL: none, or it has got on_end */
    const ProtobufCMessageDescriptor *request; /* what our side gets: the requests of that method */
    char path[64];                             /* of a call that rpc_call_start() began */
    bool is_taken;                             /* the message that is being delivered was taken */
    bool reads;                                /* what is sent leaves the queue at once; false: only by call_read() */
    uint64_t queued_bytes, max_queued_bytes;
    uint32_t n_waiting;
    uint32_t max_message_bytes;
    ProtobufCMessage **sent; /* unpacked copies of all messages; owned */
    uint32_t n_sent;
    _Atomic bool finished, over; /* rpc_call_finish() was called; the other side left, or was cancelled */
    /* How often rpc_call_finish() was called: the first call counts, and no other should follow. */
    uint32_t n_finishes;
    enum rpc_code code; /* as it was finished */
    char text[512];
    uint32_t retry_after_ms;
    const char *authorization; /* that header of a client's call; borrowed */
};

/* A call of a client that reads at once. Free it with rpc_call_unref(). */
struct rpc_call *call_open(void);
void call_read(struct rpc_call *call);   /* the client takes all that is queued */
void call_forget(struct rpc_call *call); /* frees the list of sent messages: it begins anew */

/* Calls a method of the server that listens on the address. Free the call with rpc_call_unref(). */
struct rpc_call *call_to(const char *address, const char *path);
/* The server gets a copy of the message; nothing happens after its on_end. */
void call_says(struct rpc_call *call, const ProtobufCMessage *message);
void call_says_all(struct rpc_call *call); /* half-close: the client has no more messages */
/* The server's on_end: the client has got the end if the server finished the call, or leaves. */
void call_leaves(struct rpc_call *call);

/* The client of a call that rpc_call_start() began gets a copy of the message, and then the end. */
void call_hears(struct rpc_call *call, const ProtobufCMessage *message);
void call_ends(struct rpc_call *call, enum rpc_code code, const char *text, uint32_t retry_after_ms);

/* Answers a call that rpc_call_start() began, when its client has sent everything. NULL: nobody answers. */
extern void (*calls_stream)(struct rpc_call *call);

/*
 * Answers rpc_unary() on the thread that calls it; an answer that it puts into *response_out belongs to the
 * caller. NULL: every target is unavailable.
 */
extern enum rpc_code (*calls_unary)(const char *target, const char *path, const ProtobufCMessage *request,
                                    ProtobufCMessage **response_out, struct td_error *text_out);
