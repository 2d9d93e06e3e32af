/*
 * gRPC for tandem: calls with protobuf-c messages, the same object on both sides. Nothing of gRPC C core shows here.
 *
 * A call is a stream of messages each way and one end. Unary and server-streaming methods are calls that send one message
 * one way. Callbacks come on the rpc threads (two per server, two per core for all clients of the process: one thread with an
 * event always ready never reads the network), one at a time per call, and must not block.
 *
 *   server:  on_open -> on_message* -> [on_half_close] -> (rpc_call_finish by us, or cancel) -> on_end, once
 *   client:  rpc_call_start -> on_message* -> on_end, once
 *
 * Ownership: the call is counted. The rpc layer holds it until on_end returned; who wants to use it longer, or from another
 * thread, takes a ref first. After on_end sends are ignored. A message given to on_message belongs to the rpc layer, unless
 * it is taken.
 *
 * Bounds: a call queues at most max_queued_bytes of unsent messages, each counted with some 150 bytes for its keep (one
 * message is always taken, however large); then rpc_call_send answers TD_ERR_NO_SPACE, and the caller decides (the
 * router keeps the tokens and sends them later; rpc_server_cut_unread ends who takes nothing). A server has at most max_calls calls. Messages over max_message_bytes are refused. A message that can't be
 * parsed ends the call: INVALID_ARGUMENT from a server, INTERNAL at a client whose server sent it.
 *
 * Every server also serves grpc.health.v1.Health (Check, Watch) and server reflection v1alpha over the descriptors given.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <protobuf-c/protobuf-c.h>

#include "base/fault.h"
#include "base/log.h"
#include "base/status.h"

enum rpc_code { /* gRPC's numbers */
                RPC_OK = 0,
                RPC_CANCELLED = 1,
                RPC_UNKNOWN = 2,
                RPC_INVALID_ARGUMENT = 3,
                RPC_DEADLINE_EXCEEDED = 4,
                RPC_NOT_FOUND = 5,
                RPC_ALREADY_EXISTS = 6,
                RPC_PERMISSION_DENIED = 7,
                RPC_RESOURCE_EXHAUSTED = 8,
                RPC_FAILED_PRECONDITION = 9,
                RPC_ABORTED = 10,
                RPC_OUT_OF_RANGE = 11,
                RPC_UNIMPLEMENTED = 12,
                RPC_INTERNAL = 13,
                RPC_UNAVAILABLE = 14,
                RPC_DATA_LOSS = 15,
                RPC_UNAUTHENTICATED = 16,
};

const char *rpc_code_name(enum rpc_code code);           /* "INVALID_ARGUMENT" */
enum rpc_code rpc_code_of_status(enum td_status status); /* the one place where ours become gRPC's */

/* Text as a message's bytes; borrowed. */
static inline ProtobufCBinaryData rpc_data(const char *text)
{
    return (ProtobufCBinaryData){strlen(text), (uint8_t *)(uintptr_t)text};
}

/*
 * A process that stands still for ten seconds must lose no connection, so a ping may stay unanswered for longer than that. A caller
 * that must notice a frozen peer sooner has heartbeats of its own. (It is the time that sent bytes may stay unacknowledged, too.)
 */
enum { RPC_FROZEN_MS = 15000 };

struct rpc_call;

struct rpc_handlers {
    /* A message arrived. Not for after on_end. */
    void (*on_message)(struct rpc_call *call, const ProtobufCMessage *message);
    /* Server: the client has sent its last message. Optional; without it, a client that sent none at all is answered with
     * INVALID_ARGUMENT. */
    void (*on_half_close)(struct rpc_call *call);
    /* The call is over, exactly once. code: what the server said (client side), or what became of it (server side:
     * RPC_OK if we finished it and the client took it, RPC_CANCELLED if the client left or its deadline passed, the code
     * of rpc_call_abort, INVALID_ARGUMENT if the client's message made no sense). */
    void (*on_end)(struct rpc_call *call, enum rpc_code code, const char *text);
};

/* Inside on_message: the message is the caller's from here on, who frees it with protobuf_c_message_free_unpacked(m, NULL). */
ProtobufCMessage *rpc_call_take(struct rpc_call *call, const ProtobufCMessage *message);

/* Inside on_message: bytes of memory that the unpacked message takes, which may be several times its size on the wire. */
size_t rpc_call_message_bytes(const struct rpc_call *call);

struct rpc_call *rpc_call_ref(struct rpc_call *call);
void rpc_call_unref(struct rpc_call *call);
void rpc_call_set_user(struct rpc_call *call, void *user); /* before the handlers run, or inside one */
void *rpc_call_user(const struct rpc_call *call);

/* Any thread. True from before on_end runs: nothing that is sent will be read. */
bool rpc_call_over(struct rpc_call *call);

/* Server side: a number for the connection that the call came on; calls of one connection have the same. On a unix socket all have. */
uint64_t rpc_call_connection(const struct rpc_call *call);

/* Any thread. Packs now. TD_ERR_NO_SPACE: queue full, not sent. TD_ERR_CANCELLED: the call is over, or its end was asked for.
 * TD_ERR_INVALID: larger than max_message_bytes. */
enum td_status rpc_call_send(struct rpc_call *call, const ProtobufCMessage *message);
/* The same beyond max_queued_bytes: the caller bounds what it sends so. */
enum td_status rpc_call_send_over(struct rpc_call *call, const ProtobufCMessage *message);
uint64_t rpc_call_queued_bytes(struct rpc_call *call); /* sent, and not yet in the kernel */

/* Any thread. Milliseconds until the caller's deadline; INT64_MAX if it set none. */
int64_t rpc_call_remaining_ms(const struct rpc_call *call);

/* Value of a request header (server side), or NULL. Valid as long as the call. */
const char *rpc_call_header(const struct rpc_call *call, const char *name);

/* ------------------------------------------------------------------- server */

struct rpc_method {
    const char *path; /* "/tandem.v1.Tandem/Generate" */
    const ProtobufCMessageDescriptor *request;
    struct rpc_handlers handlers;
    /* A call arrived; set_user here. */
    void (*on_open)(struct rpc_call *call, void *server_user);
    bool one_request; /* a second message ends the call with INVALID_ARGUMENT, and is not delivered */
    bool reserve;     /* has places of its own when max_calls are open */
};

struct rpc_server_config {
    const char *listen;               /* "HOST:PORT" (port 0 picks one) or "unix:/path" */
    const struct rpc_method *methods; /* borrowed, outlives the server */
    uint32_t n_methods;
    const uint8_t *descriptors;   /* a serialized FileDescriptorSet (protoc --include_imports), for reflection */
    size_t descriptors_len_bytes; /* 0: none */
    uint32_t max_message_bytes;   /* 0: 4 MiB */
    uint32_t max_calls;           /* open at once; 0: any number */
    uint64_t max_queued_bytes;    /* per call; 0: 1 MiB */
    uint32_t frozen_ms;           /* after which a client that answers no ping has left; 0: RPC_FROZEN_MS */
    uint32_t max_unsent_bytes;    /* in the kernel, per connection over TCP (TCP_NOTSENT_LOWAT); 0: the system's */
    struct faults *faults;        /* on messages that we send; borrowed; NULL: none */
    const struct log *log;
    void *user; /* for on_open */
};

struct rpc_server;
enum td_status rpc_server_open(const struct rpc_server_config *config, struct rpc_server **out,
                               struct td_error *error_out);
const char *rpc_server_address(const struct rpc_server *s); /* port filled in */
/*
 * Calls beyond max_calls so far. Each was answered with RESOURCE_EXHAUSTED and, as retry-after-ms, the time in which as many of the open
 * calls end as were refused since the last end. Methods with `reserve` have RPC_RESERVED_CALLS more, for operators.
 */
uint64_t rpc_server_refused(struct rpc_server *s);
#define RPC_RESERVED_CALLS 64
/* grpc.health.v1, for "" and for every service among the methods alike; NOT_SERVING until first set. */
void rpc_server_set_serving(struct rpc_server *s, bool serving);
struct rpc_patience {
    int64_t full_ms, any_ms; /* with clients that take nothing of a full queue, of any queue */
    uint64_t away_ns; /* for which this process stood still since the last look: the client took nothing then, either */
};
/*
 * Aborts every call whose queue is full and of which the client took nothing for full_ms, or that has anything queued of which it took
 * nothing for any_ms: RPC_RESOURCE_EXHAUSTED. Returns how many; n_full_out: calls that found their queue full. What a client takes is
 * seen in steps of its window's updates (gRPC: half a window, at least 32 KiB).
 */
uint32_t rpc_server_cut_unread(struct rpc_server *s, const struct rpc_patience *patience, uint32_t *n_full_out);
/* No new calls, cancels what runs, waits for every on_end, joins the threads. NULL is fine. A frozen peer delays it by some
 * seconds at most; on a unix socket the threads may then stay until that peer is gone. */
void rpc_server_close(struct rpc_server *s);

/* Server side, any thread, once: what is queued is sent, then the status. retry_after_ms > 0 goes into trailing metadata
 * as "retry-after-ms". text is cut to 1 KiB and cleaned to printable UTF-8. */
void rpc_call_finish(struct rpc_call *call, enum rpc_code code, const char *text, uint32_t retry_after_ms);
/* Ends it now from our side, without sending what is queued (a client that does not read). */
void rpc_call_abort(struct rpc_call *call, enum rpc_code code, const char *text);

/* ------------------------------------------------------------------- client */

struct rpc_client; /* a channel to one target */
struct rpc_client_config {
    const char *target; /* "HOST:PORT" or "unix:/path" */
    uint32_t max_message_bytes;
    uint64_t max_queued_bytes;
    uint32_t frozen_ms;    /* of the server; 0: RPC_FROZEN_MS */
    struct faults *faults; /* as a server's */
    const struct log *log;
};
enum td_status rpc_client_open(const struct rpc_client_config *config, struct rpc_client **out,
                               struct td_error *error_out);
void rpc_client_close(struct rpc_client *c); /* cancels its calls, waits for every on_end; NULL is fine */

struct rpc_call_params {
    const char *path;
    const ProtobufCMessageDescriptor *response;
    struct rpc_handlers handlers; /* on_half_close unused */
    void *user;
    int64_t timeout_ms; /* <= 0: none */
    bool wait_for_ready;
    const char *const *headers; /* name, value, ..., NULL; copied; may be NULL */
};
/* The caller owns one ref of *out, which is written before the first callback comes. TD_ERR_INVALID: a header gRPC does not
 * carry. TD_ERR_CANCELLED: the client is closing. */
enum td_status rpc_call_start(struct rpc_client *c, const struct rpc_call_params *params, struct rpc_call **out);
void rpc_call_close_send(struct rpc_call *call); /* client: no more messages from us */
void rpc_call_cancel(struct rpc_call *call);     /* on_message stops, on_end comes with RPC_CANCELLED */
/* Client side, valid in on_end: "retry-after-ms" of the trailing metadata, 0 if there was none. */
uint32_t rpc_call_retry_after_ms(const struct rpc_call *call);

/*
 * One request, one answer, blocking (not for rpc threads). *response_out is freed with
 * protobuf_c_message_free_unpacked(); text_out (may be NULL) takes the server's words on failure.
 */
enum rpc_code rpc_unary(struct rpc_client *c, const char *path, const ProtobufCMessage *request,
                        const ProtobufCMessageDescriptor *response, int64_t timeout_ms, ProtobufCMessage **response_out,
                        struct td_error *text_out);
