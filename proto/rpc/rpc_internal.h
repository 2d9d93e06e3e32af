/*
 * What the files of this folder share: the pump (operations of one server or client), the call, and the services every
 * server brings along.
 *
 * Locks: pump, then call; health, then call; never the other way round. User code runs under none.
 * gRPC is entered under a call's or the pump's lock: completions are only queued, so it never calls back.
 */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include <grpc/grpc.h>

#include "proto/rpc/rpc.h"

#define RPC_TEXT_BYTES 1025 /* a status text: 1 KiB and the NUL */

/*
 * What a completion queue hands back: embedded in the object that started the operation. Atomic, set with release and read
 * with acquire: gRPC orders the two anyway, but a thread checker that can't see into gRPC needs to see it here.
 */
struct rpc_tag {
    void (*_Atomic done)(struct rpc_tag *tag, bool ok);
};

static inline void rpc_tag_set(struct rpc_tag *tag, void (*done)(struct rpc_tag *tag, bool ok))
{
    atomic_store_explicit(&tag->done, done, memory_order_release);
}

struct rpc_queue; /* a completion queue and the threads that run its tags */

/*
 * The calls and other operations of one server or client, on a queue of its own (server) or on the one that all clients share. Nothing is started on the queue after its
 * shutdown: rpc_pump_fini waits until no call and no other operation is left, and both only begin while !closing.
 */
struct rpc_pump {
    grpc_completion_queue *queue;
    struct rpc_queue *own; /* NULL: shared */
    const struct log *log;
    uint32_t max_message_bytes;
    uint64_t max_queued_bytes;
    struct faults *faults;

    pthread_mutex_t lock;   /* not a mailbox: calls come and go on any thread, close() waits for a count */
    pthread_cond_t changed; /* a count below fell */
    bool closing;
    uint32_t n_calls;       /* on the list: from begin until on_end returned */
    uint32_t n_other;       /* requests for calls, shutdown, and ended calls with a send still out */
    struct rpc_call *calls; /* doubly linked by prev, next */

    /* a server's; the others on the list are being refused */
    uint32_t n_admitted;
    uint32_t n_refused_since; /* an admitted call ended */
    uint64_t n_refused, ended_ns;
    double end_gap_ns; /* between ends of admitted calls, of late */
};

void rpc_pump_init(struct rpc_pump *pump, bool is_server, uint32_t max_message_bytes, uint64_t max_queued_bytes,
                   const struct log *log);
/* Takes the call on the list; false: the pump is closing (a server's call is taken all the same). */
bool rpc_pump_add(struct rpc_pump *pump, struct rpc_call *call);
/* A server's call that is on the list. False: max_calls are open; 0 ms: too many calls are being refused already, so no answer may wait. */
bool rpc_pump_admit(struct rpc_pump *pump, struct rpc_call *call, uint32_t max_calls, uint32_t *retry_after_ms_out);
/* Off the list, but counted as another operation until rpc_pump_other_done. */
void rpc_pump_remove(struct rpc_pump *pump, struct rpc_call *call);
void rpc_pump_other_done(struct rpc_pump *pump);
/* A ref of each call on the list, in an array that is the caller's. */
struct rpc_call **rpc_pump_calls(struct rpc_pump *pump, uint32_t *n_out);
void rpc_pump_abort_all(struct rpc_pump *pump, enum rpc_code code, const char *text);
/* Waits until no call (and, if asked, no other operation) is left; false after timeout_ms. */
bool rpc_pump_wait(struct rpc_pump *pump, bool others_too, int timeout_ms);
/* Waits for the calls without a limit: their on_end is promised. Warns like the next. */
void rpc_pump_wait_calls(struct rpc_pump *pump);
/* Waits for everything without a limit, warning with numbers when it takes long; then ends a server's queue and threads. */
void rpc_pump_fini(struct rpc_pump *pump);
/*
 * Every on_end has returned: runs destroy(object), which calls rpc_pump_fini, on this thread, or on one of its own if a
 * frozen peer still holds up an operation after some seconds.
 */
void rpc_pump_destroy(struct rpc_pump *pump, void *(*destroy)(void *object), void *object);

struct rpc_header {
    char *name, *value;
};

/*
 * A call's life, as far as operations go:
 *
 *     CALL_OPEN --close or status arrived--> CALL_CLOSED --nothing pending--> CALL_ENDED
 *
 * OPEN takes sends. CLOSED starts no send; a client still reads what came before the status. In ENDED nothing is started
 * any more; on_end runs then, once, because exactly one completion brings `pending` to 0.
 */
enum rpc_call_state { CALL_OPEN, CALL_CLOSED, CALL_ENDED };

struct rpc_send; /* a packed message in the queue */

struct rpc_call {
    _Atomic uint32_t refs;
    bool is_server, one_request;
    bool admitted;         /* counted in pump->n_admitted */
    struct rpc_pump *pump; /* valid until released */
    struct rpc_call *prev, *next;
    char *path;
    struct rpc_handlers handlers;
    const ProtobufCMessageDescriptor *incoming;
    void *user;
    gpr_timespec deadline;
    struct rpc_header *headers;
    uint32_t n_headers;

    struct rpc_tag close_tag, recv_tag, send_tag;
    uint64_t connection;     /* server: hash of the peer's address */
    uint32_t n_received;     /* the receive chain's own */
    size_t message_bytes;    /* of the message that on_message has */
    bool message_taken;      /* on_message keeps the message */
    uint32_t retry_after_ms; /* client: from the trailing metadata; server: to be sent */

    /* A lock and not a queue: the sender wants to know at once whether its message fits. */
    pthread_mutex_t lock;
    enum rpc_call_state state;
    grpc_call *grpc;
    uint32_t pending;  /* close and receive batches out or being handled, callbacks included */
    bool end_returned; /* on_end is over; a send that is still out releases the call */
    bool aborted;      /* ended by our side: nothing is sent or delivered any more */
    bool unparsed;     /* client: ended because of what the server sent; overrules its status */

    struct rpc_send *send_head, **send_tail;
    struct rpc_send *overtaken; /* a fault: goes after the next */
    uint64_t queued_bytes;      /* what waits, and what is in flight */
    uint64_t inflight_bytes;
    uint64_t taken_ns; /* when gRPC last took a message, or the queue began to fill */
    uint64_t full_ns;  /* when a message first found no room since then; 0: there was room */
    bool sending;      /* one batch with send operations is out */
    bool metadata_sent;
    bool finish_wanted; /* server: status given; client: no more messages */
    bool finish_sent;
    bool wait_for_ready;
    enum rpc_code finish_code;
    char *finish_text;
    enum rpc_code abort_code;
    char *abort_text;

    /* written by gRPC, read when their batch is done */
    grpc_byte_buffer *recv_buffer;
    int recv_cancelled;
    grpc_metadata_array recv_initial, recv_trailing;
    grpc_status_code recv_status;
    grpc_slice recv_details;
};

/* refs: 1, the layer's own. path is copied. */
struct rpc_call *rpc_call_new(struct rpc_pump *pump, bool is_server, const char *path);
/* Both need call->grpc set and the call on the pump's list; from here on the layer ends it by itself. */
void rpc_call_run_server(struct rpc_call *call, void (*on_open)(struct rpc_call *call, void *user), void *user);
enum td_status rpc_call_run_client(struct rpc_call *call);
/* Before run: queues the first message and possibly the end of sending, so that they leave in one batch with the headers. */
enum td_status rpc_call_preload(struct rpc_call *call, const ProtobufCMessage *message);

/* Under no lock: true if the call was aborted because nothing of it was taken for so long. n_full rises if its queue was full. */
bool rpc_call_cut_unread(struct rpc_call *call, uint64_t now_ns, const struct rpc_patience *patience, uint32_t *n_full);
uint64_t rpc_now_ns(void);

/* text cleaned to printable UTF-8, cut between characters, always terminated. */
void rpc_text_clean(const char *text, size_t len_bytes, char *out, size_t out_bytes);

/* grpc_init for the life of the process, and silence. */
void rpc_core_init(void);

/* ------------------------------------------------------------------ services of every server */

struct rpc_service_method { /* one row of a server's table */
    const char *path;
    const ProtobufCMessageDescriptor *request;
    struct rpc_handlers handlers;
    void (*on_open)(struct rpc_call *call, void *open_user);
    void *open_user;
    bool one_request, reserve;
};

struct rpc_health;
/* methods (borrowed) name the services that can be asked for. */
struct rpc_health *rpc_health_open(const struct rpc_method *methods, uint32_t n_methods);
void rpc_health_close(struct rpc_health *h);
void rpc_health_set(struct rpc_health *h, bool serving);
#define RPC_HEALTH_METHODS 2
void rpc_health_methods(struct rpc_health *h, struct rpc_service_method out[RPC_HEALTH_METHODS]);

struct rpc_reflection;
/* TD_ERR_INVALID if the bytes are no FileDescriptorSet. data is borrowed. */
enum td_status rpc_reflection_open(const uint8_t *data, size_t len_bytes, struct rpc_reflection **out);
void rpc_reflection_close(struct rpc_reflection *r);
void rpc_reflection_method(struct rpc_reflection *r, struct rpc_service_method *out);
