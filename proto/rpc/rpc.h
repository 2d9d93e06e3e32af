/*
 * gRPC for tandem: calls with protobuf-c messages, the same object on both sides. Callers see nothing of
 * gRPC's C core.
 *
 * A call is a stream of messages in each direction and one end. Unary and server-streaming methods are calls
 * that send one message in one direction. Callbacks come on the rpc threads (two per server; two per core for
 * all clients of the process, because a single thread that always has an event ready never reads the
 * network), one at a time per call, and must not block.
 *
 *   server:  on_open -> on_message* -> [on_half_close] -> (rpc_call_finish by us, or cancel) -> on_end, once
 *   client:  rpc_call_start -> on_message* -> on_end, once
 *
 * Ownership: a call is counted. The rpc layer holds it until on_end has returned. Code that uses it longer,
 * or from another thread, takes a ref first. After on_end sends are ignored. A message given to on_message
 * belongs to the rpc layer, unless it is taken.
 *
 * Bounds: a call queues at most max_queued_bytes of unsent messages, each counted with some 150 bytes of
 * overhead. (One message is always taken, however large.) Beyond that rpc_call_send answers TD_ERR_NO_SPACE,
 * and the caller decides: the router keeps the tokens and sends them later; rpc_server_cut_unread ends calls
 * whose client takes nothing. A server has at most max_calls calls. Messages longer than max_message_bytes
 * are refused. A message that can't be parsed ends the call: with INVALID_ARGUMENT at a server, with INTERNAL
 * at a client.
 *
 * Every server also serves grpc.health.v1.Health (Check, Watch) and server reflection (v1, v1alpha) over the
 * given descriptors.
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

const char *rpc_code_name(enum rpc_code code); /* "INVALID_ARGUMENT" */
/* The only place where td_status becomes a gRPC code. */
enum rpc_code rpc_code_of_status(enum td_status status);

/* Text as a message's bytes; borrowed. */
static inline ProtobufCBinaryData rpc_data(const char *text)
{
    return (ProtobufCBinaryData){strlen(text), (uint8_t *)(uintptr_t)text};
}

/*
 * A process that stands still for ten seconds must not lose a connection, so a ping may stay unanswered for
 * longer than that. A caller that must notice a frozen peer sooner has its own heartbeats. (Sent bytes may
 * stay unacknowledged for the same time.)
 */
enum { RPC_FROZEN_MS = 15000 };

struct rpc_call;

struct rpc_handlers {
    /* A message has arrived. Never after on_end. */
    void (*on_message)(struct rpc_call *call, const ProtobufCMessage *message);
    /* Server: the client has sent its last message. Optional; without it a client that sent no message at
     * all is answered with INVALID_ARGUMENT. */
    void (*on_half_close)(struct rpc_call *call);
    /*
     * The call is over; exactly once. code on the client side: what the server said. On the server side:
     * RPC_OK if we finished the call and the client received the end, RPC_CANCELLED if the client left or its
     * deadline passed, the code of rpc_call_abort, or INVALID_ARGUMENT if the client's message could not be
     * parsed.
     */
    void (*on_end)(struct rpc_call *call, enum rpc_code code, const char *text);
};

/* Inside on_message: takes the message over; the caller frees it with protobuf_c_message_free_unpacked(m,
 * NULL). */
ProtobufCMessage *rpc_call_take(struct rpc_call *call, const ProtobufCMessage *message);

/* Inside on_message: bytes of memory that the unpacked message takes, which may be several times its wire
 * size. */
size_t rpc_call_message_bytes(const struct rpc_call *call);

struct rpc_call *rpc_call_ref(struct rpc_call *call);
void rpc_call_unref(struct rpc_call *call);
void rpc_call_set_user(struct rpc_call *call, void *user); /* before the handlers run, or inside one */
void *rpc_call_user(const struct rpc_call *call);

/* Any thread. True already before on_end runs: nothing that is sent from now on will be read. */
bool rpc_call_over(struct rpc_call *call);

/* Server side: a number for the connection that carries the call; calls of one connection have the same
 * number, which no other connection ever has. */
uint64_t rpc_call_connection(const struct rpc_call *call);
/* Who is at the other end: "10.0.0.1:4242"; on a unix socket "uid=0 pid=12" (at a server) or "unix:/path" (at
 * a client). "?": not known, or not any more. */
enum { RPC_PEER_BYTES = 128 };
void rpc_call_peer(struct rpc_call *call, char out[RPC_PEER_BYTES]);
/* Server side: at which address of this host the connection arrived, "10.0.0.1:7000". "": on a unix socket,
 * or not known any more. */
void rpc_call_local(const struct rpc_call *call, char out[RPC_PEER_BYTES]);
/* The other side of a call with must_prove has proved itself. Call it before anything is sent that it answers
 * with a message longer than RPC_UNPROVED_BYTES. */
void rpc_call_proved(struct rpc_call *call);

/*
 * Any thread. Packs the message before it returns. TD_ERR_NO_SPACE: the queue is full, nothing is sent.
 * TD_ERR_CANCELLED: the call is over, or its end was asked for. TD_ERR_INVALID: larger than
 * max_message_bytes.
 */
enum td_status rpc_call_send(struct rpc_call *call, const ProtobufCMessage *message);
/* As rpc_call_send, but ignores max_queued_bytes: the caller limits what it sends in this way. */
enum td_status rpc_call_send_over(struct rpc_call *call, const ProtobufCMessage *message);
uint64_t rpc_call_queued_bytes(struct rpc_call *call); /* queued bytes that are not in the kernel yet */
uint32_t rpc_call_n_waiting(struct rpc_call *call);    /* queued messages that gRPC does not have yet */

/* Any thread. Milliseconds until the caller's deadline; INT64_MAX if it set none. */
int64_t rpc_call_remaining_ms(const struct rpc_call *call);

/* Value of a request header (server side), or NULL. Valid as long as the call. */
const char *rpc_call_header(const struct rpc_call *call, const char *name);

/* ---------------------------------------------------------------------- TLS */

/* Paths of PEM files; NULL: not given. They are read again when they change. */
struct rpc_tls_files {
    const char *cert, *key; /* of this process; both or none */
    const char *ca;         /* who signs the certificates of others */
    const char *name;       /* of a client: that servers' certificates have, instead of their address */
};

/* Options of every process; S has the member tls (struct rpc_tls_files). */
#define RPC_TLS_OPTIONS(S)                                                                                             \
    {"tls-cert",                                                                                                       \
     OPT_STRING,                                                                                                       \
     offsetof(S, tls.cert),                                                                                            \
     NULL,                                                                                                             \
     "FILE",                                                                                                           \
     0,                                                                                                                \
     0,                                                                                                                \
     "certificate of this process, PEM: its listeners and its connections in the cluster speak TLS"},                  \
        {"tls-key", OPT_STRING, offsetof(S, tls.key), NULL, "FILE", 0, 0, "its private key, PEM"},                     \
        {"tls-ca",                                                                                                     \
         OPT_STRING,                                                                                                   \
         offsetof(S, tls.ca),                                                                                          \
         NULL,                                                                                                         \
         "FILE",                                                                                                       \
         0,                                                                                                            \
         0,                                                                                                            \
         "CA of the cluster, PEM: every process of it must show a certificate that this CA has signed"},               \
    {                                                                                                                  \
        "tls-name", OPT_STRING, offsetof(S, tls.name), NULL, "NAME", 0, 0,                                             \
            "name in the certificates of other processes; default: the host of their address"                          \
    }

/* TD_ERR_INVALID: a half pair, or a file that can't be read or is none; error_out names the option.
 * is_member: of a cluster, which needs all three files or none. */
enum td_status rpc_tls_check(const struct rpc_tls_files *files, bool is_member, struct td_error *error_out);

/* ------------------------------------------------------------------- server */

struct rpc_method {
    const char *path; /* "/tandem.v1.Tandem/Generate" */
    const ProtobufCMessageDescriptor *request;
    struct rpc_handlers handlers;
    /* A call has arrived; call rpc_call_set_user here. */
    void (*on_open)(struct rpc_call *call, void *server_user);
    /* A second message ends the call with INVALID_ARGUMENT and is not delivered. Such a call is answered at
     * once, for whoever asks: above a rate, the calls from an address wait until their time, or are refused
     * if that is far off (rpc_senders.h). */
    bool one_request;
    /* Its calls wait in a bounded queue of the method's own instead; those from an address of which more were
     * begun than answered are held for a moment before (rpc_senders_credit()). */
    bool has_queue;
    /* Until rpc_call_proved() the call counts as one without a message, which has RPC_FIRST_MESSAGE_MS, and a
     * message longer than RPC_UNPROVED_BYTES ends it. */
    bool must_prove;
};

/* Places for calls that anybody may make (health, reflection, unknown methods), if a quarter of max_calls is
 * not more. They take none of max_calls, and the oldest makes room. */
#define RPC_COMMON_CALLS 64
#define RPC_BYTES        (128ull << 20)
/* Calls that a connection from another host may have open, if a server has no lower bound; clients of ours
 * make more connections. Connections of an address that may be new (rpc_door_config.max_new). Bytes of the
 * names and values of a call's headers. */
enum { RPC_CONNECTION_CALLS = 256, RPC_NEW_CONNECTIONS = 4, RPC_HEADERS_BYTES = 16384 };
/* A call that has brought no message by then is ended. What a stranger may send in one message: unpacked it
 * takes many times as much. What comes on a connection until rpc_call_floods() is true. */
enum { RPC_FIRST_MESSAGE_MS = 10000, RPC_UNPROVED_BYTES = 4096, RPC_UNASKED_BYTES = 64 << 10 };

struct rpc_server_config {
    const char *listen; /* "HOST:PORT" (port 0 picks one) or "unix:/path" */
    bool is_private;    /* a unix socket gets mode 0600: nobody but our user connects */
    /* The listener speaks TLS if there is a certificate; with a CA, clients must show a certificate that it
     * signed. Borrowed, outlives the server; NULL, and for a unix socket: plain text. */
    const struct rpc_tls_files *tls;
    const struct rpc_method *methods; /* borrowed, outlives the server */
    uint32_t n_methods;
    /* Serialized FileDescriptorSet (protoc --include_imports), for reflection. */
    const uint8_t *descriptors;
    size_t descriptors_len_bytes; /* 0: none */
    uint32_t max_message_bytes;   /* 0: 4 MiB */
    uint32_t max_calls;           /* open at once; 0: no limit */
    /* Connections open at once; 0: half of the limit of open files. From one address, but for this host's; 0:
     * a quarter of that. */
    uint32_t max_connections, max_per_address;
    const char *trusted_proxies; /* as rpc_door_config; NULL: none */
    uint64_t max_queued_bytes;   /* per call; 0: 1 MiB */
    uint64_t max_rpc_bytes;      /* that gRPC takes for connections, calls and unread messages; 0: RPC_BYTES */
    uint32_t frozen_ms;          /* a client that answers no ping for this long has left; 0: RPC_FROZEN_MS */
    /* Limit in the kernel, per TCP connection (TCP_NOTSENT_LOWAT); 0: the system's. */
    uint32_t max_unsent_bytes;
    struct faults *faults; /* for messages that this server sends; borrowed; NULL: none */
    const struct log *log;
    void *user; /* passed to on_open */
};

struct rpc_server;
enum td_status rpc_server_open(const struct rpc_server_config *config, struct rpc_server **out,
                               struct td_error *error_out);
const char *rpc_server_address(const struct rpc_server *s); /* with the port filled in */
struct rpc_server_stats {
    /*
     * Calls refused because max_calls were open. Each was answered with RESOURCE_EXHAUSTED and, as
     * retry-after-ms, the time in which as many of the open calls end as were refused since the last end.
     * Calls that anybody may make are none of them.
     */
    uint64_t calls_refused;
    uint32_t connections; /* open; up to a second old */
    /* Closed because as many were open as the server takes; because they said nothing, spoke another
     * protocol, failed in the handshake of TLS, or had no call while others needed their place. */
    uint64_t connections_refused, connections_dropped;
};
struct rpc_server_stats rpc_server_stats(struct rpc_server *s);
/* Sets the state that grpc.health.v1 reports for "" and for every service; NOT_SERVING until it is first
 * set. */
void rpc_server_set_serving(struct rpc_server *s, bool serving);
struct rpc_patience {
    /* How long a client may take nothing: of a full queue, and of any queue. */
    int64_t full_ms, any_ms;
    /* How long this process stood still since the last look: clients took nothing then, either. */
    uint64_t away_ns;
};
/*
 * Aborts, with RPC_RESOURCE_EXHAUSTED, each call of whose full queue the client took nothing for full_ms, or
 * of whose queue it took nothing for any_ms. Returns their number. *n_full_out: calls whose queue is full.
 * What a client takes shows only when its flow-control window is updated (gRPC: half a window, at least 32
 * KiB).
 */
uint32_t rpc_server_cut_unread(struct rpc_server *s, const struct rpc_patience *patience, uint32_t *n_full_out);
/*
 * Takes no new calls, cancels the running ones, waits for every on_end, joins the threads. NULL is fine. A
 * frozen peer delays this by some seconds at most; on a unix socket the threads may stay until that peer is
 * gone.
 */
void rpc_server_close(struct rpc_server *s);

/* The field that the text of a refusal begins with: bytes of "slo.ttft_ms" in "slo.ttft_ms: is negative"; 0:
 * none. */
size_t rpc_text_field(const char *text);
/* Cleans text to printable UTF-8, as fields of type string must be, cuts it between characters, always
 * terminates it. */
void rpc_text_clean(const char *text, size_t len_bytes, char *out, size_t out_bytes);
bool rpc_text_is_clean(const char *text, size_t len_bytes);
/* Whether the text with which a client's call ended by RPC_UNAVAILABLE says that nobody answered in time,
 * or that no way leads there: the server may be alive. Else it has closed the connection, or nobody
 * listens. */
bool rpc_text_is_silence(const char *text);

/* Server side, any thread, once: sends what is queued, then the status. retry_after_ms > 0 is sent in
 * trailing metadata as "retry-after-ms". It is also in google.rpc.Status ("grpc-status-details-bin"), as is
 * the field that the text begins with, where the request is wrong. text is cut to 1 KiB and cleaned to
 * printable UTF-8. */
void rpc_call_finish(struct rpc_call *call, enum rpc_code code, const char *text, uint32_t retry_after_ms);
/* Ends the call now, without sending what is queued (for a client that does not read). */
void rpc_call_abort(struct rpc_call *call, enum rpc_code code, const char *text);

/* ------------------------------------------------------------------- client */

struct rpc_client; /* connections to one target, as many as its calls need */
struct rpc_client_config {
    const char *target; /* "HOST:PORT" or "unix:/path" */
    const char *bearer; /* copied; every call says "authorization: Bearer ..."; NULL: none */
    /* With a CA the server must show a certificate that it signed. NULL, and for a unix socket: plain text.
     * Copied, but not the names of the files. */
    const struct rpc_tls_files *tls;
    uint32_t max_message_bytes;
    uint64_t max_queued_bytes;
    uint32_t frozen_ms;    /* a server that answers no ping for this long is lost; 0: RPC_FROZEN_MS */
    struct faults *faults; /* for messages that this client sends; borrowed; NULL: none */
    const struct log *log;
    bool must_prove; /* rpc_unary() asks rpc_call_floods(); then it hangs up and gives RPC_ABORTED */
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
    bool must_prove;            /* until rpc_call_proved() a message longer than RPC_UNPROVED_BYTES ends the call */
    const char *const *headers; /* name, value, ..., NULL; copied; may be NULL */
};
/* The caller owns one ref of *out, which is written before the first callback. TD_ERR_INVALID: gRPC does
 * not accept a header. TD_ERR_CANCELLED: the client is closing. */
enum td_status rpc_call_start(struct rpc_client *c, const struct rpc_call_params *params, struct rpc_call **out);
void rpc_call_close_send(struct rpc_call *call); /* client: says that no more messages come from us */
void rpc_call_cancel(struct rpc_call *call);     /* ends on_message; on_end comes with RPC_CANCELLED */
/*
 * Client, one thread. Floods: with must_prove: whether more than RPC_UNASKED_BYTES have come on the call's
 * connection between the first such look and this one, before the proof. gRPC bounds neither what a server
 * sends that belongs to no call nor the time that this takes, so the caller looks every few hundredths of
 * a second, and hangs up: that ends the call and its connection, and drops what has come. A connection on
 * which nothing came is kept, as a server that stands still would find hundreds of them; so is one that
 * carried a proof before, on which nothing counts as a flood. On a unix socket nothing is seen, and
 * hanging up only ends the call.
 */
bool rpc_call_floods(struct rpc_call *call);
/* How long a client that sent a flood waits, or a server is left alone. n_before: its floods before that. */
enum { RPC_FLOOD_WAIT_MS = 2000, RPC_FLOOD_DOUBLINGS = 5 };
static inline uint64_t rpc_flood_wait_ms(uint32_t n_before)
{
    return (uint64_t)RPC_FLOOD_WAIT_MS << (n_before < RPC_FLOOD_DOUBLINGS ? n_before : RPC_FLOOD_DOUBLINGS);
}
void rpc_call_hang_up(struct rpc_call *call);
/*
 * Inside a client's on_message, or before a server's call runs: no other message is delivered until
 * rpc_call_resume(), by any thread. Flow control then stops the peer. A client's call still ends with the
 * server's status only after all messages, and at once if it is cancelled or its connection is lost. Resuming
 * what is not held does nothing.
 */
void rpc_call_hold(struct rpc_call *call);
void rpc_call_resume(struct rpc_call *call);
/* Client side, valid in on_end: "retry-after-ms" of the trailing metadata; 0 if there was none. */
uint32_t rpc_call_retry_after_ms(const struct rpc_call *call);

/*
 * Whether the threads that run clients' callbacks get processor time. Who judges the silence of others by
 * what these threads hear should not count the time in which they hear nothing (absence_deaf()).
 * One thread uses an echo.
 */
struct rpc_echo;
struct rpc_echo *rpc_echo_open(void);
void rpc_echo_close(struct rpc_echo *e); /* NULL is fine */
/* For how long an event has been under way through their queue; 0: it is back. Sends the next one when that
 * is due: 0.1 s after one that came back soon, at once after one that was late. */
uint64_t rpc_echo_age_ns(struct rpc_echo *e);

/* One request, one answer; blocks (not for rpc threads). The caller frees *response_out with
 * protobuf_c_message_free_unpacked(). text_out (may be NULL) gets the server's text on failure. */
enum rpc_code rpc_unary(struct rpc_client *c, const char *path, const ProtobufCMessage *request,
                        const ProtobufCMessageDescriptor *response, int64_t timeout_ms, ProtobufCMessage **response_out,
                        struct td_error *text_out);
