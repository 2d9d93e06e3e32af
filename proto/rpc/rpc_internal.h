/*
 * What the files of this folder share: the pump (operations of one server or client), the call, and the
 * services that every server has.
 *
 * Lock order: pump before call; health before call. Callbacks of users run under no lock. gRPC is called
 * under a call's or the pump's lock; that is safe because completions are only queued, so gRPC never calls
 * back.
 */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include <grpc/compression.h>
#include <grpc/grpc.h>

#include "base/list.h"
#include "proto/rpc/rpc.h"

#define RPC_TEXT_BYTES 1025 /* a status text: 1 KiB and the NUL */

#define RPC_READ_CHUNK_BYTES (64 << 10) /* that gRPC reads, and then handles, at a time */

#define RPC_INT_ARG(name, n)                                                                                           \
    {                                                                                                                  \
        .type = GRPC_ARG_INTEGER, .key = (char *)(name), .value.integer = (n)                                          \
    }
/*
 * Arguments of every channel and server: messages are not compressed. One of 1 MiB may hold 1 GiB, which gRPC
 * makes before it looks at any limit, and the filters take time for each message that is not compressed, too.
 * The first argument refuses the call; without the last one a client unpacks before it looks at the first.
 */
#define RPC_UNCOMPRESSED                                                                                               \
    RPC_INT_ARG(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1 << GRPC_COMPRESS_NONE),                          \
        RPC_INT_ARG(GRPC_ARG_ENABLE_PER_MESSAGE_COMPRESSION, 0),                                                       \
        RPC_INT_ARG(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0)

/*
 * What a completion queue hands back; embedded in the object that started the operation. Atomic, set with
 * release and read with acquire: gRPC orders the two anyway, but a thread checker that can't see into gRPC
 * needs to see it here.
 */
struct rpc_tag {
    void (*_Atomic done)(struct rpc_tag *tag, bool ok);
};

static inline void rpc_tag_set(struct rpc_tag *tag, void (*done)(struct rpc_tag *tag, bool ok))
{
    atomic_store_explicit(&tag->done, done, memory_order_release);
}

struct rpc_places { /* for calls that are open at the same time */
    uint32_t n_admitted;
    /* The oldest first. main: those that have brought no message, or no proof, yet. common: all. */
    TAILQ_HEAD(, rpc_call) can_go;
};

struct rpc_queue; /* a completion queue and the threads that run its tags */

/*
 * The calls and other operations of one server or client, on a queue of its own (server) or on the queue that
 * all clients share. Nothing is started on the queue after its shutdown: rpc_pump_fini waits until no call
 * and no other operation is left, and both begin only while !closing.
 */
struct rpc_pump {
    grpc_completion_queue *queue;
    struct rpc_queue *own; /* NULL: the queue is shared */
    const struct log *log;
    uint32_t max_message_bytes;
    uint64_t max_queued_bytes;
    struct faults *faults;

    /* Not a mailbox: calls begin and end on any thread, and close() waits for a count. */
    pthread_mutex_t lock;
    pthread_cond_t changed; /* one of the counts below has fallen */
    bool closing;
    uint32_t n_calls; /* calls on the list: from begin until on_end has returned */
    uint32_t n_other; /* requests for calls, the shutdown, an echo, and ended calls whose send is not done */
    LIST_HEAD(, rpc_call) calls;

    /* Servers only. Calls on the list that are not admitted are being refused. Methods that anybody may call
     * (health, reflection, unknown ones) have places of their own, so that they take none from others. */
    struct rpc_places main, common;
    uint32_t n_refused_since; /* refused since the last admitted call of main ended */
    uint64_t n_refused, ended_ns;
    double end_gap_ns; /* mean time between ends of recent admitted calls */
};

void rpc_pump_init(struct rpc_pump *pump, bool is_server, uint32_t max_message_bytes, uint64_t max_queued_bytes,
                   const struct log *log);
/* Puts the call on the list. False: the pump is closing (a server's call is put on the list all the same). */
bool rpc_pump_add(struct rpc_pump *pump, struct rpc_call *call);
/*
 * Admits a server's call that is on the list. False: max_calls are open. *retry_after_ms_out 0: too many
 * calls are being refused already, so the answer must not wait for its client. When all places are taken, the
 * oldest call that has brought no message for 200 ms is ended for the new one: clients that mean it send
 * their request with the call. A common call is always admitted: the oldest is ended for it.
 */
bool rpc_pump_admit(struct rpc_pump *pump, struct rpc_call *call, uint32_t max_calls, uint32_t *retry_after_ms_out);
/* A server's call is no longer silent: its first message has come, or its proof. */
void rpc_pump_spoke(struct rpc_pump *pump, struct rpc_call *call);
/* Ends the calls that were opened before this time and have brought no message. */
void rpc_pump_end_silent(struct rpc_pump *pump, uint64_t before_ns);
/* Takes the call off the list; it counts as another operation until rpc_pump_other_done. */
void rpc_pump_remove(struct rpc_pump *pump, struct rpc_call *call);
void rpc_pump_leave_channel(struct rpc_call *call);
void rpc_pump_other_begin(struct rpc_pump *pump);
void rpc_pump_other_done(struct rpc_pump *pump);
/* Returns a ref of each call on the list, in an array that the caller frees. */
struct rpc_call **rpc_pump_calls(struct rpc_pump *pump, uint32_t *n_out);
void rpc_pump_abort_all(struct rpc_pump *pump, enum rpc_code code, const char *text);
/* Waits until no call (others_too: and no other operation) is left; false after timeout_ms. */
bool rpc_pump_wait(struct rpc_pump *pump, bool others_too, int timeout_ms);
/* Waits for the calls without a limit, because each of them gets its on_end. Warns as rpc_pump_fini does. */
void rpc_pump_wait_calls(struct rpc_pump *pump);
/* Waits for everything without a limit, and warns with numbers if that takes long; then ends a server's
 * queue and threads. */
void rpc_pump_fini(struct rpc_pump *pump);
/* Call when every on_end has returned. Runs destroy(object), which calls rpc_pump_fini: on this thread, or
 * on one of its own if a frozen peer still holds up an operation after some seconds. */
void rpc_pump_destroy(struct rpc_pump *pump, void *(*destroy)(void *object), void *object);

struct rpc_header {
    char *name, *value;
};

/*
 * States of a call, for its operations:
 *
 *     CALL_OPEN --close or status arrived--> CALL_CLOSED --nothing pending--> CALL_ENDED
 *
 * OPEN accepts sends. CLOSED starts no send; a client still reads the messages that came before the status.
 * ENDED starts nothing; on_end runs then, once, because exactly one completion brings `pending` to 0.
 */
enum rpc_call_state { CALL_OPEN, CALL_CLOSED, CALL_ENDED };

struct rpc_send; /* a packed message in the queue */

struct rpc_channel { /* of a client: one connection at a time */
    grpc_channel *grpc;
    uint32_t n_calls;        /* under the pump's lock */
    _Atomic uint64_t proved; /* number of the last connection that carried a proof; 0: none */
};

struct rpc_call {
    _Atomic uint32_t refs;
    bool is_server, one_request, has_queue;
    bool must_prove; /* its messages do not end its silence; rpc_call_proved() does */
    atomic_bool is_proved;
    bool is_common;     /* anybody may call this method: its place is one of pump->common */
    bool admitted;      /* it has a place of the pump */
    bool was_admitted;  /* its request was read, or waited for; a refused call's is not */
    bool is_too_much;   /* refused: the calls from its address are too many */
    bool is_too_long;   /* refused: its headers are, and were not taken */
    uint64_t begins_ns; /* it is held until then; 0: it is not */
    TAILQ_ENTRY(rpc_call) in_held;
    struct rpc_pump *pump; /* valid until call_release */
    LIST_ENTRY(rpc_call) in_pump;
    TAILQ_ENTRY(rpc_call) in_places; /* under the pump's lock, as the next two */
    bool can_go;
    uint64_t opened_ns;
    char *path;
    struct rpc_handlers handlers;
    const ProtobufCMessageDescriptor *incoming;
    void *user;
    gpr_timespec deadline;
    struct rpc_header *headers;
    uint32_t n_headers;

    struct rpc_tag close_tag, recv_tag, send_tag;
    struct rpc_door *door;       /* server: knows the connection */
    int fd;                      /* descriptor of the connection, as long as it lasts; client: see rpc_call_floods() */
    uint64_t connection;         /* number of the connection; client: the same */
    uint64_t read_bytes;         /* client: of the connection, when rpc_call_floods() first looked at it */
    uint32_t n_looks;            /* client: for its connection */
    struct rpc_channel *channel; /* client; valid as the pump is */
    uint32_t n_received;         /* used by the chain of receives only */
    size_t message_bytes;        /* memory of the message that on_message has */
    bool message_taken;          /* on_message keeps the message */
    uint32_t retry_after_ms;     /* client: from the trailing metadata; server: to be sent */

    /* A lock, not a queue: the sender wants to know at once whether its message fits. */
    pthread_mutex_t lock;
    enum rpc_call_state state;
    grpc_call *grpc;
    uint32_t pending;  /* close and receive batches that are out or being handled, callbacks included */
    bool end_returned; /* on_end has returned; a send that is still out will release the call */
    bool aborted;      /* ended by our side: nothing is sent or delivered any more */
    /* Client: ended because the server's message could not be parsed; takes precedence over its status. */
    bool unparsed;

    struct rpc_send *send_head, **send_tail;
    struct rpc_send *overtaken; /* injected fault: is sent after the next message */
    uint64_t queued_bytes;      /* of waiting messages and of the one in flight */
    uint32_t n_waiting;         /* waiting messages */
    uint64_t inflight_bytes;
    uint64_t taken_ns; /* when gRPC last took a message, or when the queue began to fill */
    /* Since when the queue is full: a message found no room, and none was taken since; 0: not full. */
    uint64_t full_ns;
    bool sending; /* a batch with send operations is out */
    bool metadata_sent;
    bool finish_wanted; /* server: the status was given; client: no more messages */
    bool finish_sent;
    bool wait_for_ready;
    enum rpc_code finish_code;
    char *finish_text;
    enum rpc_code abort_code;
    char *abort_text;

    /* Written by gRPC; valid when their batch is done. */
    grpc_byte_buffer *recv_buffer;
    bool is_held, waits_to_recv; /* rpc_call_hold(); a receive waits for rpc_call_resume() */
    int recv_cancelled;
    grpc_metadata_array recv_initial, recv_trailing;
    grpc_status_code recv_status;
    grpc_slice recv_details;
};

/* Makes a call with one ref, the layer's own. path is copied. */
struct rpc_call *rpc_call_new(struct rpc_pump *pump, bool is_server, const char *path);
/* Both need call->grpc set and the call on the pump's list. After this the layer ends the call by itself. */
void rpc_call_run_server(struct rpc_call *call, void (*on_open)(struct rpc_call *call, void *user), void *user);
enum td_status rpc_call_run_client(struct rpc_call *call);
/* Before run: queues the first message and the end of sending, so that they are sent in one batch with the
 * headers. */
enum td_status rpc_call_preload(struct rpc_call *call, const ProtobufCMessage *message);

/* Call under no lock. True: the call was aborted because its client took nothing for too long. *n_full
 * rises if its queue is full. */
bool rpc_call_cut_unread(struct rpc_call *call, uint64_t now_ns, const struct rpc_patience *patience, uint32_t *n_full);
uint64_t rpc_now_ns(void);
/* The server has proved the secret: the call's connection is trusted as long as it lasts. */
void rpc_client_proved(struct rpc_call *call);

/* google.rpc.Status with what there is to say beyond code and text. Returns its number of bytes; 0: nothing.
 * The caller frees *out. */
size_t rpc_details_pack(enum rpc_code code, const char *text, uint32_t retry_after_ms, uint8_t **out);

/* ------------------------------------------------------------------ services of every server */

struct rpc_service_method { /* one row of a server's method table */
    const char *path;
    const ProtobufCMessageDescriptor *request;
    struct rpc_handlers handlers;
    void (*on_open)(struct rpc_call *call, void *open_user);
    void *open_user;
    bool one_request, must_prove, is_common, is_paced, has_queue;
};

struct rpc_health;
/* methods (borrowed) gives the services that clients can ask for. */
struct rpc_health *rpc_health_open(const struct rpc_method *methods, uint32_t n_methods);
void rpc_health_close(struct rpc_health *h);
void rpc_health_set(struct rpc_health *h, bool serving);
#define RPC_HEALTH_METHODS 2
void rpc_health_methods(struct rpc_health *h, struct rpc_service_method out[RPC_HEALTH_METHODS]);

struct rpc_reflection;
/* TD_ERR_INVALID if the bytes are no FileDescriptorSet. data is borrowed. */
enum td_status rpc_reflection_open(const uint8_t *data, size_t len_bytes, struct rpc_reflection **out);
void rpc_reflection_close(struct rpc_reflection *r);
#define RPC_REFLECTION_METHODS 2
void rpc_reflection_methods(struct rpc_reflection *r, struct rpc_service_method out[RPC_REFLECTION_METHODS]);
