/*
 * Payloads over UCX: shared memory on one host, RDMA between the hosts of a trusted network. This layer lies
 * over TCP (wire_tcp.c), which carries all messages; only payloads take UCX.
 *
 * UCX asks nobody who they are, and its network transports let anybody who reaches them write into this
 * process's memory. So it has no listener here. After wire_trust, when both peers have proved the secret,
 * they exchange the addresses of their UCX workers over the proven connection:
 *
 *     HOST    which host, what of UCX is usable       both sides, at wire_trust
 *     WORKER  the address of this side's worker       when both HOSTs suit and the worker is made
 *     READY   this side's endpoint is made            from now on the other side may send payloads to it
 *
 * Until then, and if any step fails, payloads stay on TCP. A peer without this layer drops HOST. Network
 * transports are refused at the start unless the operator says that the network is trusted.
 *
 * Messages of this layer, told from the protocol's by their first two bytes; little-endian:
 *
 *     HOST    0 u16 0x5501  2 u16 flags (1: shared memory, 2: networks)  4 u32 0   8 boot_id[36]
 *     WORKER  0 u16 0x5502  2 u16 len  4 u32 check (low half of the checksum)      8 address[len]
 *     READY   0 u16 0x5503  2 u16 0    4 u32 0
 *
 * Why UCX is used this way (measured with UCX 1.13):
 *  - Active messages, no put, no get: over tcp they are emulated, and the survivor of a dead initiator may
 *    abort. With rendezvous the receiver names the destination of each payload, so nothing is ever written
 *    that was not asked for. For the same reason TCP_PUT_ENABLE=n: otherwise rendezvous over tcp uses tcp's
 *    put internally, and a peer that dies at the wrong moment aborts this process (assertion on
 *    PUT_TX_WAITING_ACK in tcp_ep.c; seen in 1 kill of 10 on a busy machine).
 *  - Over UCX's tcp payloads go eagerly and by copy (ZCOPY_THRESH=inf): there a rendezvous that a dying peer
 *    cuts off completes its zero-copy sends twice (assertion on comp->count in uct_iface.h; 1 kill of 30 on a
 *    busy machine), and eager messages have no such state. The receiver still says where each payload lands;
 *    the price is a copy on each side.
 *  - One worker per connection: a shared-memory sender that is killed can wedge the worker that it sends to,
 *    for all other peers of that worker and for ever.
 *  - Making a worker takes 3 ms and destroying one 1 ms, so a thread of its own does it ("xfer-connect").
 *    Everything else, endpoints included, belongs to the thread that calls wire_progress.
 *  - In peer-error mode shared memory is used only with POSIX_ERROR_HANDLING=y and RNDV_SCHEME=get_zcopy.
 *  - tcp segments are 1 MiB long and a part fits into one (TCP_PART_BYTES): UCX first puts a message of
 *    several segments together in its own memory, and each segment costs calls into the kernel on both sides;
 *    5 GB/s instead of 3.
 *  - The shared-memory ring has room for 4 MiB (128 x 32 KiB; UCX's default: 64 x 8 KiB). When other programs
 *    compute on every core, sender and receiver run in turns of some ms, and a ring is all that moves in a
 *    turn: 2.5 GB/s instead of 0.2. It costs 5 MiB of /dev/shm per connection. (Segments of 64 KiB trip an
 *    assertion in UCX.)
 *
 * UCX's part of a connection: NONE -> MAKING (worker being made) -> OPEN -> CLOSING (forced close; operations
 * end) -> DESTROYING (worker being destroyed) -> GONE. If operations have not ended within
 * CLOSE_PATIENCE_NS, the worker is destroyed with them. That is a safe end: after it nothing can touch their
 * memory. The connection is freed when the inner connection and UCX's part are both over.
 *
 * Who has a connection: the connector thread from job_push until take_results (MAKING and DESTROYING); the
 * xfer thread at all other times, and only it frees connections.
 *
 * Callbacks from inside UCX only note what happened; the protocol is told of completions by wire_progress
 * (tell_ended). Only the headers of payloads are handed on at once, because their bytes are valid during the
 * call only.
 */
#include "transfer/wire_ucx.h"

#include <errno.h>
#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/endian.h"
#include "base/list.h"
#include "base/mem.h"
#include "base/queue.h"
#include "base/thread.h"
#include "proto/wire/checksum.h"
#include "transfer/netaddr.h"
#include "transfer/wire_wrap.h"

enum { HOST = 0x5501, WORKER = 0x5502, READY = 0x5503, LAYER_HEADER = 8, BOOT_ID = WRAP_BOOT_ID_BYTES };
enum { AM_ID = 1, PROGRESS_BURST = 8, IDLE_TURNS = 64, IDLE_PERIOD = 8, ADDRESS_MAX = 320, WORKER_MAX = 1024 };
enum { TCP_PART_BYTES = 1020 << 10 }; /* a segment less headers; in parts of 256 KiB it is a third slower */
#define CLOSE_PATIENCE_NS (250 * NS_PER_MS)
#define SHM_LEAST         (512ull << 20) /* room for a hundred connections */

enum ucx_part_state { PART_NONE, PART_MAKING, PART_OPEN, PART_CLOSING, PART_DESTROYING, PART_GONE };
enum ucx_job_kind { JOB_MAKE, JOB_DESTROY, JOB_STOP };

struct ucx_conn;

/* Sent to the connector thread and back; part of the connection, which has at most one job at a time. */
struct ucx_job {
    struct mail mail;
    enum ucx_job_kind kind;
    struct ucx_conn *conn;
};

struct ucx_op { /* one send or receive, from the call into UCX to the protocol's callback; freed after it */
    LIST_ENTRY(ucx_op) in_conn;   /* while it is in flight */
    STAILQ_ENTRY(ucx_op) in_wire; /* when it has ended */
    struct ucx_conn *conn;
    wire_done_fn *done; /* of a send */
    void *arg;          /* send: argument of done; receive: the protocol's token */
    bool is_receive;
    enum td_status status;
    uint8_t header[];
};

struct ucx_wire {
    struct wrap_wire wrap;
    const char *list;      /* UCX_TLS; borrowed */
    uint16_t usable;       /* flags of our HOST */
    ucp_context_h context; /* NULL before the first worker, in a process that does not listen */
    ucp_mem_h arena;
    void *arena_base;
    uint64_t arena_bytes;
    char boot_id[BOOT_ID];
    uint32_t n_turns;
    STAILQ_HEAD(, ucx_op) ended; /* operations whose callback is due */
    struct mailbox jobs, results;
    pthread_t connector;
    bool connector_runs;
};

struct ucx_conn {
    struct wrap_conn wrap;
    struct ucx_wire *w;
    char address[ADDRESS_MAX]; /* connecting side: "HOST:PORT"; "": accepted */
    bool is_trusted;           /* the peer has proved the secret: messages of this layer are taken */
    bool has_host, has_worker; /* HOST and WORKER have come; a second one breaks the rules */
    bool is_ready;             /* READY has come: payloads may be sent to the peer's worker */

    enum ucx_part_state state;
    struct ucx_job job;
    enum td_status made; /* how JOB_MAKE ended */
    ucp_worker_h worker;
    int worker_fd;
    uint8_t theirs[WORKER_MAX]; /* address of the peer's worker */
    ucp_ep_h ep;                /* NULL: not made yet, or not possible: payloads stay on TCP */
    ucs_status_ptr_t close_request;
    LIST_HEAD(, ucx_op) ops; /* operations in flight */
    enum td_status error;    /* the connection is to be closed; conn_turn tells the protocol */
    enum { PAYLOADS_UNKNOWN, PAYLOADS_EAGER, PAYLOADS_RENDEZVOUS } payloads_by;
    uint64_t close_begin_ns;
    uint32_t n_idle; /* turns since something happened on this connection */
    bool is_armed;   /* was armed and nothing happened since, so an event wakes the thread */
};

static struct ucx_wire *wire_of(struct wire *w)
{
    return (struct ucx_wire *)w;
}

static struct ucx_conn *conn_of(struct wire_conn *c)
{
    return (struct ucx_conn *)c;
}

static uint64_t monotonic_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * NS_PER_S + (uint64_t)ts.tv_nsec;
}

/* ------------------------------------------------------------------ context */

static enum td_status map_arena(struct ucx_wire *w, struct td_error *error_out)
{
    if (!w->arena_bytes)
        return TD_OK;
    ucp_mem_map_params_t p = {.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
                              .address = w->arena_base,
                              .length = w->arena_bytes};
    ucs_status_t s = ucp_mem_map(w->context, &p, &w->arena);
    if (s == UCS_OK)
        return TD_OK;
    w->arena = NULL;
    return td_fail(error_out, TD_ERR_NO_MEMORY, "arena of %llu bytes can't be registered: %s",
                   (unsigned long long)w->arena_bytes, ucs_status_string(s));
}

/*
 * Each worker, so each connection, has a ring of 5 MiB in /dev/shm, where containers often have 64 MiB for
 * all processes together. UCX checks whether a ring fits only when it makes the ring: a connection would
 * fail, or take the room from other processes.
 */
static bool is_shm_small(const struct ucx_wire *w)
{
    struct statvfs v;
    if (statvfs("/dev/shm", &v) || !v.f_blocks || (uint64_t)v.f_bavail * v.f_frsize >= SHM_LEAST)
        return false;
    log_warn(
        w->wrap.base.log,
        "/dev/shm has %llu of %llu MiB free: connections on this host take tcp, not shared memory (from %llu MiB on)",
        (unsigned long long)((uint64_t)v.f_bavail * v.f_frsize >> 20),
        (unsigned long long)((uint64_t)v.f_blocks * v.f_frsize >> 20), (unsigned long long)(SHM_LEAST >> 20));
    return true;
}

static enum td_status context_open(struct ucx_wire *w, const char *device, struct td_error *error_out)
{
    enum td_status s = wire_ucx_context_open(w->list, device, &w->context, error_out);
    if (s)
        return s;
    log_debug(w->wrap.base.log, "ucx context opened transports=%s device=%s", w->list, device);
    return map_arena(w, error_out);
}

/* The network device of an address. An any-address belongs to no device; then it is the device of
 * reached_at, else the first that is up. */
static void find_device(const char *address, const char *reached_at, char out[64])
{
    struct sockaddr_storage at;
    socklen_t len;
    struct td_error ignored;
    if (!netaddr_resolve(address, &at, &len, &ignored) && netaddr_device(&at, len, out))
        return;
    if (!reached_at || netaddr_resolve(reached_at, &at, &len, &ignored) || !netaddr_device(&at, len, out))
        netaddr_any_device(out);
}

/* --------------------------------------------------------- connector thread */

static ucs_status_t am_callback(void *arg, const void *header, size_t header_len, void *data, size_t len,
                                const ucp_am_recv_param_t *param);

/* Makes the connection's worker. In a process that does not listen it also opens the context, for the device
 * of the first address. */
static enum td_status worker_make(struct ucx_wire *w, struct ucx_conn *c)
{
    ucp_am_handler_param_t am = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS | UCP_AM_HANDLER_PARAM_FIELD_CB |
                      UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = AM_ID,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = am_callback,
        .arg = c,
    };
    struct td_error error = {""};
    if (!w->context) {
        char device[64];
        find_device(c->address, NULL, device);
        enum td_status s = context_open(w, device, &error);
        if (s) {
            log_error(w->wrap.base.log, "payloads stay on tcp reason=%s", error.text);
            return s;
        }
    }
    enum td_status s = wire_ucx_worker_open(w->context, &c->worker, &c->worker_fd);
    if (!s && ucp_worker_set_am_recv_handler(c->worker, &am) != UCS_OK) {
        ucp_worker_destroy(c->worker);
        s = TD_ERR_IO;
    }
    if (s) {
        c->worker = NULL;
        log_error(w->wrap.base.log, "no ucx worker could be made (open files? shared memory?): payloads stay on tcp");
    }
    return s;
}

static void worker_end(struct ucx_conn *c)
{
    ucp_worker_destroy(c->worker);
    c->worker = NULL;
}

static void *connector_run(void *arg)
{
    struct ucx_wire *w = arg;
    for (;;) {
        mailbox_wait(&w->jobs, -1);
        struct mail *mail = mailbox_take(&w->jobs);
        while (mail) {
            struct ucx_job *job = (struct ucx_job *)mail;
            mail = mail->next;
            if (job->kind == JOB_STOP)
                return NULL;
            if (job->kind == JOB_MAKE)
                job->conn->made = worker_make(w, job->conn);
            else
                worker_end(job->conn);
            mailbox_push(&w->results, &job->mail);
        }
    }
}

static void job_push(struct ucx_conn *c, enum ucx_job_kind kind)
{
    c->state = kind == JOB_MAKE ? PART_MAKING : PART_DESTROYING;
    c->job = (struct ucx_job){.kind = kind, .conn = c};
    mailbox_push(&c->w->jobs, &c->job.mail);
}

/* --------------------------------------------------------------- operations */

static struct ucx_op *op_new(struct ucx_conn *c, uint32_t header_len)
{
    struct ucx_op *op = mem_zalloc(sizeof(*op) + header_len);
    op->conn = c;
    LIST_INSERT_HEAD(&c->ops, op, in_conn);
    return op;
}

/* Moves the operation from the connection's list to w->ended; its callback comes from tell_ended. */
static void op_end(struct ucx_op *op, enum td_status status)
{
    struct ucx_conn *c = op->conn;
    op->status = status;
    LIST_REMOVE(op, in_conn);
    STAILQ_INSERT_TAIL(&c->w->ended, op, in_wire);
}

static bool tell_ended(struct ucx_wire *w)
{
    /* Callbacks may end further operations: the next call tells them. */
    STAILQ_HEAD(, ucx_op) now = STAILQ_HEAD_INITIALIZER(now);
    struct ucx_op *op;
    STAILQ_CONCAT(&now, &w->ended);
    bool any = !STAILQ_EMPTY(&now);
    while ((op = STAILQ_FIRST(&now))) {
        STAILQ_REMOVE_HEAD(&now, in_wire);
        if (op->is_receive)
            w->wrap.base.events.on_payload_done(op->conn->wrap.base.user, op->arg, op->status);
        else if (op->done)
            op->done(op->arg, op->status);
        free(op);
    }
    return any;
}

/* Called by UCX inside a progress or close call, or, while a worker is being destroyed, on the connector
 * thread. */
static void send_callback(void *request, ucs_status_t status, void *user_data)
{
    struct ucx_op *op = user_data;
    /* While DESTROYING this runs on the connector thread, and take_results ends the operation. */
    if (op->conn->state != PART_DESTROYING)
        op_end(op, wire_ucx_convert(status));
    ucp_request_free(request);
}

static void receive_callback(void *request, ucs_status_t status, size_t length, void *user_data)
{
    (void)length;
    send_callback(request, status, user_data);
}

/* Whether the memory lies in the registered arena. Other memory is registered by UCX itself, per
 * operation. */
static bool in_arena(const struct ucx_wire *w, const void *p, uint64_t len)
{
    uintptr_t base = (uintptr_t)w->arena_base, at = (uintptr_t)p;
    return at >= base && len <= w->arena_bytes && at - base <= w->arena_bytes - len;
}

/* Something happens on this connection: it gets progress in each turn, and is armed anew before the thread
 * sleeps. */
static void conn_stir(struct ucx_conn *c)
{
    c->n_idle = 0;
    c->is_armed = false;
}

/* Whether payloads of this connection go over tcp. UCX is asked once, when the first payload is sent. */
static bool over_tcp(struct ucx_conn *c)
{
    char names[128] = "";
    if (c->payloads_by == PAYLOADS_UNKNOWN) {
        wire_ucx_transport(c->ep, names, sizeof(names));
        c->payloads_by = !strncmp(names, "tcp", 3) ? PAYLOADS_EAGER : PAYLOADS_RENDEZVOUS;
    }
    return c->payloads_by == PAYLOADS_EAGER;
}

static bool may_send(const struct ucx_conn *c)
{
    return c->state == PART_OPEN && c->ep && c->is_ready && !c->error && !c->wrap.is_closing;
}

static void send_payload(struct ucx_conn *c, struct ucx_op *op, uint32_t header_len, const void *payload,
                         uint64_t payload_len)
{
    ucp_request_param_t p = {.op_attr_mask =
                                 UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS,
                             .cb.send = send_callback,
                             .user_data = op,
                             .flags = over_tcp(c) ? UCP_AM_SEND_FLAG_EAGER : UCP_AM_SEND_FLAG_RNDV};
    if (c->w->arena && in_arena(c->w, payload, payload_len)) {
        p.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
        p.memh = c->w->arena;
    }
    ucs_status_ptr_t r = ucp_am_send_nbx(c->ep, AM_ID, op->header, header_len, payload, payload_len, &p);
    /* Done or refused at once: then UCX does not call back. */
    if (!UCS_PTR_IS_PTR(r))
        op_end(op, wire_ucx_convert(UCS_PTR_STATUS(r)));
}

static void ucx_send(struct wire_conn *base, const void *header, uint32_t header_len, const void *payload,
                     uint64_t payload_len, wire_done_fn *done, void *arg)
{
    struct ucx_conn *c = conn_of(base);
    bool is_ours = payload_len && may_send(c);
    assert(header_len <= WIRE_HEADER_MAX);
    if (c->wrap.inner && !is_ours) {
        wire_send(c->wrap.inner, header, header_len, payload, payload_len, done, arg);
        return;
    }
    struct ucx_op *op = op_new(c, header_len);
    memcpy(op->header, header, header_len);
    op->done = done;
    op->arg = arg;
    conn_stir(c);
    if (is_ours)
        send_payload(c, op, header_len, payload, payload_len);
    else /* there is no connection any more; the callback comes in the next turn, not from inside wire_send */
        op_end(op, TD_ERR_PEER_LOST);
}

static void receive(struct ucx_conn *c, void *data, size_t len, void *destination, void *token, bool is_rendezvous)
{
    struct ucx_op *op = op_new(c, 0);
    op->is_receive = true;
    op->arg = token;
    if (!is_rendezvous) {
        wire_land(&c->w->wrap.base.events, c->wrap.base.user, token, destination, data, len);
        op_end(op, TD_OK);
        return;
    }
    ucp_request_param_t p = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                             .cb.recv_am = receive_callback,
                             .user_data = op};
    if (c->w->arena && in_arena(c->w, destination, len)) {
        p.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
        p.memh = c->w->arena;
    }
    ucs_status_ptr_t r = ucp_am_recv_data_nbx(c->worker, data, destination, len, &p);
    if (!UCS_PTR_IS_PTR(r))
        op_end(op, wire_ucx_convert(UCS_PTR_STATUS(r)));
}

/* If a rendezvous is not received here, UCX discards it and tells the sender that it is done. */
static ucs_status_t am_callback(void *arg, const void *header, size_t header_len, void *data, size_t len,
                                const ucp_am_recv_param_t *param)
{
    struct ucx_conn *c = arg;
    if (c->state != PART_OPEN || c->wrap.is_closing || c->error || header_len > WIRE_HEADER_MAX)
        return UCS_OK;
    const struct wire_events *e = &c->w->wrap.base.events;
    if (!len) {
        e->on_message(c->wrap.base.user, header, (uint32_t)header_len);
        return UCS_OK;
    }
    void *token = NULL;
    void *destination = e->on_payload(c->wrap.base.user, header, (uint32_t)header_len, len, &token);
    if (destination)
        receive(c, data, len, destination, token, param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV);
    return UCS_OK;
}

/* ------------------------------------------------------- messages of this layer */

/* c: the connection to which the descriptor belongs; NULL: to none. */
static void watch(struct ucx_wire *w, int fd, struct ucx_conn *c)
{
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(w->wrap.base.fd, EPOLL_CTL_ADD, fd, &e);
}

static void say(struct ucx_conn *c, uint16_t type, uint16_t n, uint32_t check, const void *bytes, uint32_t len)
{
    uint8_t out[WIRE_HEADER_MAX];
    put_u16(out, type);
    put_u16(out + 2, n);
    put_u32(out + 4, check);
    if (len)
        memcpy(out + LAYER_HEADER, bytes, len);
    if (c->wrap.inner && !c->wrap.is_closing)
        wire_send(c->wrap.inner, out, LAYER_HEADER + len, NULL, 0, NULL, NULL);
}

static uint32_t check_of(const void *bytes, uint32_t len)
{
    return (uint32_t)checksum_bytes(&(struct checksum_identity){0}, bytes, len);
}

static void error_callback(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    struct ucx_conn *c = arg;
    (void)ep;
    if (c->state == PART_OPEN && !c->error)
        c->error = status == UCS_OK ? TD_ERR_PEER_LOST : wire_ucx_convert(status);
}

static void break_off(struct ucx_conn *c, const char *what)
{
    log_warn(c->w->wrap.base.log, "peer broke the rules of ucx what=%s", what);
    c->error = TD_ERR_PROTOCOL;
}

/* Payloads stay on TCP, for good. The protocol is told, because --transports may have asked for more. */
static void stay_on_tcp(struct ucx_conn *c, const char *why)
{
    log_debug(c->w->wrap.base.log, "payloads stay on tcp reason=%s", why);
    wrap_on_transport(&c->wrap);
}

/* Both must have shared memory on one host, or both a network that is trusted. */
static void on_host(struct ucx_conn *c, uint16_t flags, const uint8_t *boot_id)
{
    struct ucx_wire *w = c->w;
    bool is_our_host = w->boot_id[0] && !memcmp(boot_id, w->boot_id, BOOT_ID);
    uint16_t both = flags & w->usable;
    c->has_host = true;
    if ((both & WIRE_UCX_SHM && is_our_host) || both & WIRE_UCX_NETWORKS)
        job_push(c, JOB_MAKE);
    else
        stay_on_tcp(c, is_our_host ? "one side has no shared memory" : "another host");
}

/* Called when both workers are made. Where one can't reach the other (two containers of one host, say), UCX
 * says so here. */
static void endpoint_make(struct ucx_conn *c)
{
    if (wire_ucx_endpoint_open(c->worker, c->theirs, error_callback, c, &c->ep) != UCS_OK) {
        c->ep = NULL;
        stay_on_tcp(c, "the peer's worker can't be reached");
        return;
    }
    conn_stir(c);
    say(c, READY, 0, 0, NULL, 0);
}

static void on_worker(struct ucx_conn *c, const uint8_t *address, uint32_t len)
{
    memcpy(c->theirs, address, len);
    c->has_worker = true;
    if (c->state == PART_OPEN) /* else worker_made goes on */
        endpoint_make(c);
}

/* The connector thread has made our worker, or failed to. */
static void worker_made(struct ucx_conn *c)
{
    ucp_address_t *address = NULL;
    size_t len = 0;
    c->state = c->made ? PART_GONE : PART_OPEN;
    if (c->made) {
        stay_on_tcp(c, "no worker");
        return;
    }
    watch(c->w, c->worker_fd, c);
    if (ucp_worker_get_address(c->worker, &address, &len) != UCS_OK || len > WORKER_MAX) {
        stay_on_tcp(c, "no address of the worker");
    } else {
        say(c, WORKER, (uint16_t)len, check_of(address, (uint32_t)len), address, (uint32_t)len);
        if (c->has_worker)
            endpoint_make(c);
    }
    if (address)
        ucp_worker_release_address(c->worker, address);
}

static void on_ready(struct ucx_conn *c)
{
    c->is_ready = true;
    if (may_send(c))
        wrap_on_transport(&c->wrap);
}

/* A message of this layer, of at least LAYER_HEADER bytes. */
static void on_layer_message(struct ucx_conn *c, uint16_t type, const uint8_t *m, uint32_t len)
{
    uint16_t n = get_u16(m + 2);
    const uint8_t *bytes = m + LAYER_HEADER;
    if (type == HOST && !c->has_host && len == LAYER_HEADER + BOOT_ID)
        on_host(c, n, bytes);
    else if (type == WORKER && c->has_host && !c->has_worker && n && n <= WORKER_MAX &&
             len == LAYER_HEADER + (uint32_t)n && get_u32(m + 4) == check_of(bytes, n))
        on_worker(c, bytes, n);
    else if (type == READY && c->has_worker && !c->is_ready && len == LAYER_HEADER)
        on_ready(c);
    else
        break_off(c, type == HOST ? "host" : type == WORKER ? "worker" : "ready");
}

static void on_message(void *user, const uint8_t *header, uint32_t len)
{
    struct ucx_conn *c = user;
    uint16_t type = len >= LAYER_HEADER ? get_u16(header) : 0;
    if (c->wrap.is_closing || c->error)
        return;
    if (!c->is_trusted || type < HOST || type > READY)
        wrap_on_message(&c->wrap, header, len);
    else
        on_layer_message(c, type, header, len);
}

/* -------------------------------------------------------------- connections */

static struct ucx_conn *conn_new(struct ucx_wire *w)
{
    struct ucx_conn *c = mem_zalloc(sizeof(*c));
    wrap_conn_init(&w->wrap, &c->wrap);
    c->w = w;
    return c;
}

static struct wire_conn *ucx_connect(struct wire *base, const char *address, uint32_t attempt, void *user)
{
    struct ucx_wire *w = wire_of(base);
    struct ucx_conn *c = conn_new(w);
    c->wrap.base.user = user;
    snprintf(c->address, sizeof(c->address), "%s", address);
    c->wrap.inner = wire_connect(w->wrap.inner, address, attempt, c);
    return &c->wrap.base;
}

static void on_accept(void *user, struct wire_conn *inner)
{
    struct ucx_wire *w = user;
    wrap_accept(&w->wrap, &conn_new(w)->wrap, inner);
}

static void ucx_trust(struct wire_conn *base)
{
    struct ucx_conn *c = conn_of(base);
    c->is_trusted = true;
    wire_trust(c->wrap.inner);
    say(c, HOST, c->w->usable, 0, c->w->boot_id, BOOT_ID);
}

/* Only marks it: conn_turn begins the close of UCX's part, so that no callback comes from inside
 * wire_close. */
static void ucx_close(struct wire_conn *base)
{
    struct ucx_conn *c = conn_of(base);
    if (!c->wrap.is_closing)
        wire_close(c->wrap.inner);
    c->wrap.is_closing = true;
}

static bool take_results(struct ucx_wire *w)
{
    struct mail *mail = mailbox_take(&w->results);
    bool any = mail != NULL;
    while (mail) {
        struct ucx_job *job = (struct ucx_job *)mail;
        struct ucx_conn *c = job->conn;
        mail = mail->next;
        if (job->kind == JOB_MAKE) {
            worker_made(c);
            continue;
        }
        c->state = PART_GONE;
        /* Operations that never ended: the worker that knew of them is destroyed, so nothing uses their
         * memory. */
        while (!LIST_EMPTY(&c->ops))
            op_end(LIST_FIRST(&c->ops), TD_ERR_CANCELLED);
    }
    return any;
}

static void close_begin(struct ucx_conn *c)
{
    c->state = PART_CLOSING;
    c->close_begin_ns = monotonic_ns();
    if (!c->ep)
        return;
    ucp_request_param_t p = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_EP_CLOSE_FLAG_FORCE};
    c->close_request = ucp_ep_close_nbx(c->ep, &p);
    c->ep = NULL;
}

/* Returns true if the connection left CLOSING. The patience is needed because UCX may never end an
 * operation whose peer died. */
static bool close_step(struct ucx_conn *c)
{
    if (UCS_PTR_IS_PTR(c->close_request) && ucp_request_check_status(c->close_request) != UCS_INPROGRESS) {
        ucp_request_free(c->close_request);
        c->close_request = NULL;
    }
    bool is_pending = UCS_PTR_IS_PTR(c->close_request);
    if ((!LIST_EMPTY(&c->ops) || is_pending) && monotonic_ns() - c->close_begin_ns < CLOSE_PATIENCE_NS)
        return false;
    if (!LIST_EMPTY(&c->ops))
        log_warn(c->w->wrap.base.log, "operations outlived the close of their endpoint; its worker goes with them");
    /* From here on UCX's callbacks for this connection are ignored. */
    epoll_ctl(c->w->wrap.base.fd, EPOLL_CTL_DEL, c->worker_fd, NULL);
    job_push(c, JOB_DESTROY);
    return true;
}

/* ------------------------------------------------------------------ the turn */

static bool conn_turn(struct ucx_conn *c)
{
    bool any = false;
    for (int i = 0; i < PROGRESS_BURST && ucp_worker_progress(c->worker); i++)
        any = true;
    c->n_idle++;
    if (any)
        conn_stir(c);
    if (c->state == PART_OPEN && c->wrap.is_closing) {
        any = true;
        close_begin(c);
    }
    if (c->state == PART_CLOSING)
        any |= close_step(c);
    return any;
}

/*
 * Progress of a worker costs about half a microsecond, and of many peers most are quiet at any time. A quiet
 * connection gets progress in one of IDLE_PERIOD turns, unless it is to be closed. Its events still wake the
 * thread from sleep.
 */
static bool may_skip(const struct ucx_wire *w, const struct ucx_conn *c)
{
    return c->n_idle > IDLE_TURNS && (w->n_turns + (uintptr_t)c / sizeof(*c)) % IDLE_PERIOD && !c->wrap.is_closing;
}

static bool has_news(const struct ucx_conn *c)
{
    return c->error && !c->wrap.error_told && !c->wrap.is_closing;
}

/* Whether UCX's part is over, so that the connection may be freed when the inner one has ended. Its done
 * callbacks come first. */
static bool is_over(const struct wrap_conn *base)
{
    const struct ucx_conn *c = (const struct ucx_conn *)base;
    return (c->state == PART_NONE || c->state == PART_GONE) && LIST_EMPTY(&c->ops) && STAILQ_EMPTY(&c->w->ended);
}

static bool ucx_progress(struct wire *base)
{
    struct ucx_wire *w = wire_of(base);
    struct wrap_conn *at;
    bool any = wire_progress(w->wrap.inner);
    w->n_turns++;
    any |= take_results(w);
    LIST_FOREACH (at, &w->wrap.conns, in_wire) {
        struct ucx_conn *c = (struct ucx_conn *)at;
        if ((c->state == PART_OPEN && !may_skip(w, c)) || c->state == PART_CLOSING)
            any |= conn_turn(c);
        if (has_news(c)) {
            any = true;
            wrap_tell_error(&c->wrap, c->error);
        }
    }
    any |= tell_ended(w);
    return any | wrap_reap(&w->wrap, is_over);
}

/*
 * Arming a worker takes some ten calls into the kernel, and of many peers few have done anything since the
 * thread last slept. An armed worker stays armed until something happens; then either its progress reports
 * it, or its descriptor is readable (found here).
 */
static void stir_readable(struct ucx_wire *w)
{
    struct epoll_event events[64];
    int n = epoll_wait(w->wrap.base.fd, events, sizeof(events) / sizeof(events[0]), 0);
    for (int i = 0; i < n; i++)
        if (events[i].data.ptr)
            conn_stir(events[i].data.ptr);
}

static bool conn_arm(struct ucx_conn *c)
{
    if (!c->is_armed || !LIST_EMPTY(&c->ops))
        c->is_armed = ucp_worker_arm(c->worker) == UCS_OK;
    return c->is_armed;
}

/* Whatever the next ucx_progress would do without an event must make this return 0. */
static int ucx_arm(struct wire *base)
{
    struct ucx_wire *w = wire_of(base);
    const struct wrap_conn *at;
    if (!STAILQ_EMPTY(&w->ended))
        return 0;
    int sleep_ms = -1;
    stir_readable(w);
    LIST_FOREACH (at, &w->wrap.conns, in_wire) {
        struct ucx_conn *c = (struct ucx_conn *)at;
        if (has_news(c) || (c->state == PART_OPEN && at->is_closing) || (at->is_closing && !at->inner && is_over(at)))
            return 0;
        if (c->state == PART_CLOSING)
            sleep_ms = 1;
        if ((c->state == PART_OPEN || c->state == PART_CLOSING) && !conn_arm(c))
            return 0;
    }
    int inner_ms = wire_arm(w->wrap.inner);
    return sleep_ms < 0 || (inner_ms >= 0 && inner_ms < sleep_ms) ? inner_ms : sleep_ms;
}

/* ---------------------------------------------------------- what is in use */

static void ucx_transport(struct wire_conn *base, char *out, uint32_t out_bytes)
{
    struct ucx_conn *c = conn_of(base);
    if (may_send(c))
        wire_ucx_transport(c->ep, out, out_bytes);
    else if (c->wrap.inner)
        wire_transport(c->wrap.inner, out, out_bytes);
}

static uint64_t ucx_part_bytes(struct wire_conn *base)
{
    struct ucx_conn *c = conn_of(base);
    if (may_send(c))
        return over_tcp(c) ? TCP_PART_BYTES : 0;
    return c->wrap.inner ? wire_part_bytes(c->wrap.inner) : 0;
}

/* ------------------------------------------------------------- open and free */

static void ucx_free(struct wire *base)
{
    struct ucx_wire *w = wire_of(base);
    assert(LIST_EMPTY(&w->wrap.conns));
    if (w->connector_runs) {
        struct ucx_job stop = {.kind = JOB_STOP};
        mailbox_push(&w->jobs, &stop.mail);
        pthread_join(w->connector, NULL);
        mailbox_take(&w->jobs);
    }
    wire_free(w->wrap.inner);
    if (w->arena)
        ucp_mem_unmap(w->context, w->arena);
    if (w->context)
        ucp_cleanup(w->context);
    mailbox_fini(&w->jobs);
    mailbox_fini(&w->results);
    if (w->wrap.base.fd >= 0)
        close(w->wrap.base.fd);
    free(w);
}

static const struct wire_ops OPS = {
    .connect = ucx_connect,
    .send = ucx_send,
    .close = ucx_close,
    .trust = ucx_trust,
    .progress = ucx_progress,
    .arm = ucx_arm,
    .transport = ucx_transport,
    .part_bytes = ucx_part_bytes,
    .free = ucx_free,
};

/* Opens the context and TCP below. A process that does not listen opens the context later: then the first
 * address decides which network device is used. */
static enum td_status open_both(struct ucx_wire *w, const struct wire_config *config, struct td_error *error_out)
{
    struct wire_config inner = *config;
    inner.events = (struct wire_events){.user = w,
                                        .on_accept = on_accept,
                                        .on_open = wrap_on_open,
                                        .on_message = on_message,
                                        .on_payload = wrap_on_payload,
                                        .land = wrap_land,
                                        .on_payload_done = wrap_on_payload_done,
                                        .on_transport = wrap_on_transport,
                                        .on_error = wrap_on_error,
                                        .on_closed = wrap_on_closed};
    enum td_status s = wire_tcp_open(&inner, &w->wrap.inner, error_out);
    if (s || !config->listen || !w->usable)
        return s;
    char device[64];
    find_device(config->listen, config->reached_at, device);
    return context_open(w, device, error_out);
}

enum td_status wire_ucx_open(const struct wire_config *config, struct wire **out, struct td_error *error_out)
{
    wire_ucx_setup();
    struct ucx_wire *w = mem_zalloc(sizeof(*w));
    bool is_auto = !strcmp(config->transports, "ucx");
    w->wrap.base = (struct wire){.ops = &OPS, .events = config->events, .log = config->log};
    w->list = is_auto ? "posix" : config->transports;
    w->usable = wire_ucx_usable(w->list);
    if (is_auto && is_shm_small(w))
        w->usable = 0;
    wrap_boot_id(w->boot_id);
    w->arena_base = config->arena;
    w->arena_bytes = config->arena_bytes;
    STAILQ_INIT(&w->ended);
    mailbox_init(&w->jobs);
    mailbox_init(&w->results);
    w->wrap.base.fd = epoll_create1(EPOLL_CLOEXEC);
    enum td_status s = wire_ucx_check(w->list, config->is_trusted_network, config->encrypt, error_out);
    if (!s && w->wrap.base.fd < 0)
        s = td_fail(error_out, TD_ERR_IO, "no epoll descriptor: %s", strerror(errno));
    s = s ? s : open_both(w, config, error_out);
    if (s) {
        ucx_free(&w->wrap.base);
        return s;
    }
    memcpy(w->wrap.base.address, w->wrap.inner->address, sizeof(w->wrap.base.address));
    watch(w, w->wrap.inner->fd, NULL);
    watch(w, mailbox_fd(&w->results), NULL);
    w->connector = thread_start("xfer-connect", connector_run, w);
    w->connector_runs = true;
    *out = &w->wrap.base;
    return TD_OK;
}
