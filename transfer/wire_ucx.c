/*
 * The UCX transport: active messages, one ucp_worker per connection; payloads by rendezvous, over tcp
 * eagerly.
 *
 * Why it is built this way (measured with UCX 1.13):
 *  - No put, no get: over tcp they are emulated, and the survivor of a dead initiator may abort. With
 *    rendezvous the receiver names the destination of each payload, so nothing is ever written that was not
 *    asked for. For the same reason TCP_PUT_ENABLE=n: otherwise rendezvous over tcp uses tcp's put
 *    internally, and a peer that dies at the wrong moment aborts this process (assertion on
 *    PUT_TX_WAITING_ACK in tcp_ep.c; seen in 1 kill of 10 on a busy machine).
 *  - Over tcp payloads go eagerly and by copy (ZCOPY_THRESH=inf): there a rendezvous that a dying peer cuts
 *    off completes its zero-copy sends twice (assertion on comp->count in uct_iface.h; 1 kill of 30 on a busy
 *    machine), and eager messages have no such state. The receiver still says where each payload lands; the
 *    price is a copy on each side.
 *  - One worker per connection: a shared-memory sender that is killed can wedge the worker that it sends to,
 *    for all other peers of that worker and for ever. The listener's worker only accepts.
 *  - Making a worker takes 3 ms and destroying one 1 ms, so a thread of its own does it ("xfer-connect");
 *    names are resolved on other threads (transfer/names.h). Everything else, endpoints included, belongs to
 *    the thread that calls wire_progress.
 *  - tcp is in every list of transports: sockaddr endpoints need it. In peer-error mode shared memory is used
 *    only with POSIX_ERROR_HANDLING=y and RNDV_SCHEME=get_zcopy; without them payloads go over tcp all the
 *    same.
 *  - tcp segments are 1 MiB long and a part fits into one (TCP_PART_BYTES): UCX first puts a message of
 *    several segments together in its own memory, and each segment costs calls into the kernel on both sides;
 *    5 GB/s instead of 3.
 *  - The shared-memory ring has room for 4 MiB (128 x 32 KiB; UCX's default: 64 x 8 KiB). When other programs
 *    compute on every core, sender and receiver run in turns of some ms, and a ring is all that moves in a
 *    turn: 2.5 GB/s instead of 0.2. It costs 5 MiB of /dev/shm per connection. (Segments of 64 KiB trip an
 *    assertion in UCX.)
 *
 * A connection: MAKING (worker being made) -> OPEN -> CLOSING (forced close; operations end) -> DESTROYING
 * (worker being destroyed) -> GONE. If operations have not ended within CLOSE_PATIENCE_NS, the worker is
 * destroyed with them. That is a safe end: after it nothing can touch their memory.
 *
 * Who has a connection: the connector thread from job_push until take_results (MAKING and DESTROYING), before
 * that a thread of names.h while its name is resolved; the xfer thread at all other times, and only it frees
 * connections (conn_free).
 *
 * Callbacks from inside UCX only note what happened; the protocol is told of completions by wire_progress
 * (tell_ended). Only messages are handed on at once, because their bytes are valid during the call only.
 */
#include "transfer/wire_ucx.h"

#include <errno.h>
#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/list.h"
#include "base/mem.h"
#include "base/queue.h"
#include "base/thread.h"
#include "transfer/names.h"
#include "transfer/netaddr.h"
#include "transfer/wire.h"

enum { AM_ID = 1, PROGRESS_BURST = 8, ACCEPTS_PENDING_MAX = 256, IDLE_TURNS = 64, IDLE_PERIOD = 8 };
enum { TCP_PART_BYTES = 1020 << 10 }; /* a segment less headers; in parts of 256 KiB it is a third slower */
#define CLOSE_PATIENCE_NS (250 * NS_PER_MS)
#define WARN_EVERY_NS     (30 * NS_PER_S)
#define SHM_LEAST         (512ull << 20) /* room for a hundred connections */

enum ucx_conn_state { CONN_MAKING, CONN_OPEN, CONN_CLOSING, CONN_DESTROYING, CONN_GONE };
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
    bool is_receive, ended;
    enum td_status status;
    uint8_t header[];
};

struct ucx_wire {
    struct wire base;
    ucp_context_h context;
    ucp_mem_h arena;
    char *tls;
    void *arena_base;
    uint64_t arena_bytes;
    ucp_worker_h listen_worker;
    ucp_listener_h listener;
    struct ucx_conn *conns;
    uint32_t n_making, n_turns;
    STAILQ_HEAD(, ucx_op) ended; /* operations whose callback is due */
    struct names *names;
    struct mailbox jobs, results, requests;
    uint64_t warned_ns; /* used by the connector thread only */
    pthread_t connector;
    bool connector_runs;
};

struct ucx_conn {
    struct wire_conn base;
    struct ucx_wire *w;
    struct ucx_conn *next;
    enum ucx_conn_state state;
    struct ucx_job job;
    char *address;              /* connecting side: "HOST:PORT"; owned. NULL: accepted. */
    struct name_query query;    /* resolves address */
    ucp_conn_request_h request; /* accepting side: the request to answer; NULL once it was used */
    enum td_status made;        /* how JOB_MAKE ended */
    ucp_worker_h worker;
    int worker_fd;
    ucp_ep_h ep;
    ucs_status_ptr_t close_request;
    LIST_HEAD(, ucx_op) ops; /* operations in flight */
    enum td_status error;
    bool error_told, close_asked;
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
    if (strcmp(w->tls, "auto") != 0 || statvfs("/dev/shm", &v) || !v.f_blocks ||
        (uint64_t)v.f_bavail * v.f_frsize >= SHM_LEAST)
        return false;
    log_warn(
        w->base.log,
        "/dev/shm has %llu of %llu MiB free: connections on this host take tcp, not shared memory (from %llu MiB on)",
        (unsigned long long)((uint64_t)v.f_bavail * v.f_frsize >> 20),
        (unsigned long long)((uint64_t)v.f_blocks * v.f_frsize >> 20), (unsigned long long)(SHM_LEAST >> 20));
    return true;
}

static enum td_status context_open(struct ucx_wire *w, const char *device, struct td_error *error_out)
{
    const char *tls = is_shm_small(w) ? "tcp" : w->tls;
    enum td_status s = wire_ucx_context_open(tls, device, &w->context, error_out);
    if (s)
        return s;
    log_debug(w->base.log, "ucx context opened transports=%s device=%s", tls, device);
    return map_arena(w, error_out);
}

/* --------------------------------------------------------- connector thread */

static ucs_status_t am_callback(void *arg, const void *header, size_t header_len, void *data, size_t len,
                                const ucp_am_recv_param_t *param);

/* Makes a worker with its epoll descriptor. c NULL: for the listener, which receives no messages. */
static enum td_status worker_make(ucp_context_h context, struct ucx_conn *c, ucp_worker_h *out, int *fd_out)
{
    ucp_am_handler_param_t am = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS | UCP_AM_HANDLER_PARAM_FIELD_CB |
                      UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = AM_ID,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = am_callback,
        .arg = c,
    };
    ucp_worker_h worker;
    enum td_status s = wire_ucx_worker_open(context, &worker, fd_out);
    if (s)
        return s;
    if (c && ucp_worker_set_am_recv_handler(worker, &am) != UCS_OK) {
        ucp_worker_destroy(worker);
        return TD_ERR_IO;
    }
    *out = worker;
    return TD_OK;
}

/* On the connector thread: makes the connection's worker. It also opens the context if this process does
 * not listen, because then the first address decides which network device is used. */
static enum td_status conn_make(struct ucx_wire *w, struct ucx_conn *c)
{
    struct td_error error = c->query.why;
    if (c->address) {
        enum td_status s = c->query.target_len ? TD_OK : TD_ERR_NOT_FOUND;
        char device[64];
        /* A process that does not listen opens its context for the device of the first address. */
        if (!s && !w->context) {
            if (!netaddr_device(&c->query.target, c->query.target_len, device))
                netaddr_any_device(device);
            s = context_open(w, device, &error);
        }
        if (s) {
            /* Wanted peers are tried for ever. */
            bool is_news = monotonic_ns() - w->warned_ns > WARN_EVERY_NS;
            w->warned_ns = is_news ? monotonic_ns() : w->warned_ns;
            log_write(w->base.log, is_news ? LOG_WARN : LOG_DEBUG, "can't connect address=%s reason=%s", c->address,
                      error.text);
            return s;
        }
    }
    enum td_status s = worker_make(w->context, c, &c->worker, &c->worker_fd);
    if (s)
        log_error(w->base.log, "no ucx worker could be made (open files? shared memory?)");
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
                job->conn->made = conn_make(w, job->conn);
            else
                worker_end(job->conn);
            mailbox_push(&w->results, &job->mail);
        }
    }
}

static void job_push(struct ucx_conn *c, enum ucx_job_kind kind)
{
    c->job = (struct ucx_job){.kind = kind, .conn = c};
    mailbox_push(&c->w->jobs, &c->job.mail);
}

/* On a thread of names.h, or inside ucx_connect for a numeric address. */
static void on_resolved(struct name_query *q)
{
    job_push((struct ucx_conn *)((char *)q - offsetof(struct ucx_conn, query)), JOB_MAKE);
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
    op->ended = true;
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
            w->base.events.on_payload_done(op->conn->base.user, op->arg, op->status);
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
    if (op->conn->state != CONN_DESTROYING)
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

static void ucx_send(struct wire_conn *base, const void *header, uint32_t header_len, const void *payload,
                     uint64_t payload_len, wire_done_fn *done, void *arg)
{
    struct ucx_conn *c = conn_of(base);
    assert(header_len <= WIRE_HEADER_MAX);
    struct ucx_op *op = op_new(c, header_len);
    conn_stir(c);
    memcpy(op->header, header, header_len);
    op->done = done;
    op->arg = arg;
    if (c->state != CONN_OPEN || c->close_asked || c->error) {
        op_end(op, TD_ERR_PEER_LOST);
        return;
    }
    ucp_request_param_t p = {.op_attr_mask =
                                 UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS,
                             .cb.send = send_callback,
                             .user_data = op,
                             .flags = payload_len && !over_tcp(c) ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER};
    if (payload_len && c->w->arena && in_arena(c->w, payload, payload_len)) {
        p.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
        p.memh = c->w->arena;
    }
    ucs_status_ptr_t r = ucp_am_send_nbx(c->ep, AM_ID, op->header, header_len, payload, payload_len, &p);
    /* Done or refused at once: then UCX does not call back. */
    if (!UCS_PTR_IS_PTR(r))
        op_end(op, wire_ucx_convert(UCS_PTR_STATUS(r)));
}

static void receive(struct ucx_conn *c, void *data, size_t len, void *destination, void *token, bool is_rendezvous)
{
    struct ucx_op *op = op_new(c, 0);
    op->is_receive = true;
    op->arg = token;
    if (!is_rendezvous) {
        wire_land(&c->w->base.events, c->base.user, token, destination, data, len);
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
    if (c->state != CONN_OPEN || c->close_asked || c->error || header_len > WIRE_HEADER_MAX)
        return UCS_OK;
    const struct wire_events *e = &c->w->base.events;
    if (!len) {
        e->on_message(c->base.user, header, (uint32_t)header_len);
        return UCS_OK;
    }
    void *token = NULL;
    void *destination = e->on_payload(c->base.user, header, (uint32_t)header_len, len, &token);
    if (destination)
        receive(c, data, len, destination, token, param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV);
    return UCS_OK;
}

/* -------------------------------------------------------------- connections */

static struct ucx_conn *conn_new(struct ucx_wire *w)
{
    struct ucx_conn *c = mem_zalloc(sizeof(*c));
    c->base.wire = &w->base;
    c->w = w;
    c->worker_fd = -1;
    c->next = w->conns;
    w->conns = c;
    w->n_making++;
    return c;
}

static struct wire_conn *ucx_connect(struct wire *base, const char *address, uint32_t attempt, void *user)
{
    struct ucx_conn *c = conn_new(wire_of(base));
    c->base.user = user;
    c->address = mem_strdup(address);
    c->query = (struct name_query){.address = c->address, .attempt = attempt, .done = on_resolved};
    names_resolve(c->w->names, &c->query);
    return &c->base;
}

struct request_mail {
    struct mail mail;
    ucp_conn_request_h request;
};

static void listener_callback(ucp_conn_request_h request, void *arg)
{
    struct ucx_wire *w = arg;
    struct request_mail *r = mem_zalloc(sizeof(*r));
    r->request = request;
    mailbox_push(&w->requests, &r->mail);
}

/* accept false: rejects all requests. */
static bool take_requests(struct ucx_wire *w, bool accept)
{
    struct mail *mail = mailbox_take(&w->requests);
    bool any = mail != NULL;
    while (mail) {
        struct request_mail *r = (struct request_mail *)mail;
        mail = mail->next;
        if (!accept || w->n_making >= ACCEPTS_PENDING_MAX) {
            ucp_listener_reject(w->listener, r->request);
        } else {
            struct ucx_conn *c = conn_new(w);
            c->request = r->request;
            job_push(c, JOB_MAKE);
        }
        free(r);
    }
    return any;
}

static void error_callback(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    struct ucx_conn *c = arg;
    (void)ep;
    if (c->state == CONN_OPEN && !c->error)
        c->error = status == UCS_OK ? TD_ERR_PEER_LOST : wire_ucx_convert(status);
}

static ucs_status_t endpoint_make(struct ucx_conn *c)
{
    ucs_status_t s = wire_ucx_endpoint_open(c->worker, c->request, (const struct sockaddr *)&c->query.target,
                                            c->query.target_len, error_callback, c, &c->ep);
    c->request = NULL; /* UCX has used the request up, even if this failed */
    return s;
}

/* c: the connection to which the descriptor belongs; NULL: to none. */
static void watch(struct ucx_wire *w, int fd, struct ucx_conn *c)
{
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(w->base.fd, EPOLL_CTL_ADD, fd, &e);
}

/* The connector thread has made the connection's worker, or failed to. Makes the endpoint and tells the
 * protocol. */
static void conn_made(struct ucx_conn *c)
{
    struct ucx_wire *w = c->w;
    w->n_making--;
    bool is_accepted = !c->address;
    if (c->made) { /* there is no worker */
        if (c->request)
            ucp_listener_reject(w->listener, c->request);
        c->request = NULL;
        c->error = TD_ERR_PEER_LOST;
    } else {
        watch(w, c->worker_fd, c);
        if (c->close_asked && c->request) {
            ucp_listener_reject(w->listener, c->request);
            c->request = NULL;
        } else if (!c->close_asked && endpoint_make(c) != UCS_OK) {
            c->ep = NULL;
            c->error = TD_ERR_PEER_LOST;
        }
    }
    c->state = CONN_OPEN;
    if (c->close_asked)
        return;
    if (is_accepted && c->error) {
        c->close_asked = true; /* the protocol has not heard of it yet */
    } else if (is_accepted) {
        w->base.events.on_accept(w->base.events.user, &c->base);
        c->close_asked = c->close_asked || !c->base.user;
    } else if (!c->error) {
        w->base.events.on_open(c->base.user);
    }
}

static void conn_free(struct ucx_conn *c)
{
    struct ucx_wire *w = c->w;
    struct ucx_conn **at = &w->conns;
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
    void *user = c->base.user;
    free(c->address);
    free(c);
    if (user)
        w->base.events.on_closed(user);
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
            conn_made(c);
            continue;
        }
        c->state = CONN_GONE;
        /* Operations that never ended: the worker that knew of them is destroyed, so nothing uses their
         * memory. */
        while (!LIST_EMPTY(&c->ops))
            op_end(LIST_FIRST(&c->ops), TD_ERR_CANCELLED);
    }
    return any;
}

/* Only marks it: conn_progress begins the close, so that no callback comes from inside wire_close. */
static void ucx_close(struct wire_conn *base)
{
    conn_of(base)->close_asked = true;
    atomic_store(&conn_of(base)->query.is_given_up, true);
}

static void close_begin(struct ucx_conn *c)
{
    c->state = CONN_CLOSING;
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
        log_warn(c->w->base.log, "operations outlived the close of their endpoint; its worker goes with them");
    /* From here on UCX's callbacks for this connection are ignored. */
    c->state = c->worker ? CONN_DESTROYING : CONN_GONE;
    if (c->worker) {
        epoll_ctl(c->w->base.fd, EPOLL_CTL_DEL, c->worker_fd, NULL);
        job_push(c, JOB_DESTROY);
    }
    return true;
}

/* ------------------------------------------------------------------ the turn */

static bool conn_progress(struct ucx_conn *c)
{
    bool any = false;
    for (int i = 0; c->worker && i < PROGRESS_BURST && ucp_worker_progress(c->worker); i++)
        any = true;
    c->n_idle++;
    if (any)
        conn_stir(c);
    if (c->state == CONN_OPEN && c->error && !c->close_asked && !c->error_told) {
        c->error_told = any = true;
        c->w->base.events.on_error(c->base.user, c->error);
    }
    if (c->state == CONN_OPEN && c->close_asked) {
        any = true;
        close_begin(c);
    }
    return any;
}

/*
 * Progress of a worker costs about half a microsecond, and of many peers most are quiet at any time. A quiet
 * connection gets progress in one of IDLE_PERIOD turns, unless it has an error to be told or is to be closed.
 * Its events still wake the thread from sleep.
 */
static bool may_skip(const struct ucx_wire *w, const struct ucx_conn *c)
{
    return c->n_idle > IDLE_TURNS && (w->n_turns + (uintptr_t)c / sizeof(*c)) % IDLE_PERIOD && !c->error &&
           !c->close_asked;
}

/* The order matters: a connection is freed only when w->ended is empty, so its done callbacks come before
 * on_closed. */
static bool ucx_progress(struct wire *base)
{
    struct ucx_wire *w = wire_of(base);
    bool any = false;
    w->n_turns++;
    if (w->listen_worker)
        for (int i = 0; i < PROGRESS_BURST && ucp_worker_progress(w->listen_worker); i++)
            any = true;
    any |= take_requests(w, true);
    any |= take_results(w);
    for (struct ucx_conn *c = w->conns; c; c = c->next) {
        if ((c->state == CONN_OPEN && !may_skip(w, c)) || c->state == CONN_CLOSING)
            any |= conn_progress(c);
        if (c->state == CONN_CLOSING)
            any |= close_step(c);
    }
    any |= tell_ended(w);
    /* Only when all done callbacks have been called. */
    for (struct ucx_conn *c = w->conns, *next; c && STAILQ_EMPTY(&w->ended); c = next) {
        next = c->next;
        if (c->state == CONN_GONE)
            conn_free(c);
    }
    return any;
}

/*
 * Arming a worker takes some ten calls into the kernel, and of many peers few have done anything since the
 * thread last slept. An armed worker stays armed until something happens; then either its progress reports
 * it, or its descriptor is readable (found here).
 */
static void stir_readable(struct ucx_wire *w)
{
    struct epoll_event events[64];
    int n = epoll_wait(w->base.fd, events, sizeof(events) / sizeof(events[0]), 0);
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

static int ucx_arm(struct wire *base)
{
    struct ucx_wire *w = wire_of(base);
    if (!STAILQ_EMPTY(&w->ended))
        return 0;
    int sleep_ms = -1;
    if (w->listen_worker && ucp_worker_arm(w->listen_worker) != UCS_OK)
        return 0;
    stir_readable(w);
    for (struct ucx_conn *c = w->conns; c; c = c->next) {
        if (c->state == CONN_OPEN && (c->close_asked || (c->error && !c->error_told)))
            return 0;
        if (c->state == CONN_GONE)
            return 0;
        if (c->state == CONN_CLOSING)
            sleep_ms = 1;
        if ((c->state == CONN_OPEN || c->state == CONN_CLOSING) && c->worker && !conn_arm(c))
            return 0;
    }
    return sleep_ms;
}

/* ---------------------------------------------------------- what is in use */

static void ucx_transport(struct wire_conn *base, char *out, uint32_t out_bytes)
{
    wire_ucx_transport(conn_of(base)->ep, out, out_bytes);
}

static uint64_t ucx_part_bytes(struct wire_conn *base)
{
    struct ucx_conn *c = conn_of(base);
    return c->ep && over_tcp(c) ? TCP_PART_BYTES : 0;
}

/* ------------------------------------------------------------- open and free */

/*
 * Drops what came while the last connections closed (peers were told goodbye, and connect again): requests,
 * and connections that were being made or were refused and not gone yet. The protocol has heard of none of
 * them.
 */
static void drop_unheard(struct ucx_wire *w)
{
    take_requests(w, false);
    mailbox_take(&w->results); /* the mail is part of the connections, which are freed below */
    for (struct ucx_conn *c = w->conns, *next; c; c = next) {
        next = c->next;
        if (c->request)
            ucp_listener_reject(w->listener, c->request);
        if (c->worker)
            ucp_worker_destroy(c->worker);
        free(c->address);
        free(c);
    }
    w->conns = NULL;
}

static void ucx_free(struct wire *base)
{
    struct ucx_wire *w = wire_of(base);
    /* Before the connector, to which names.h hands connections on. No connection is left to be resolved. */
    names_close(w->names);
    if (w->connector_runs) {
        struct ucx_job stop = {.kind = JOB_STOP};
        mailbox_push(&w->jobs, &stop.mail);
        pthread_join(w->connector, NULL);
        mailbox_take(&w->jobs);
    }
    drop_unheard(w);
    if (w->listener)
        ucp_listener_destroy(w->listener);
    if (w->listen_worker)
        ucp_worker_destroy(w->listen_worker);
    if (w->arena)
        ucp_mem_unmap(w->context, w->arena);
    if (w->context)
        ucp_cleanup(w->context);
    /* Requests that came between drop_unheard and the listener's end. */
    for (struct mail *m = mailbox_take(&w->requests), *next; m; m = next) {
        next = m->next;
        free(m);
    }
    mailbox_fini(&w->jobs);
    mailbox_fini(&w->results);
    mailbox_fini(&w->requests);
    if (w->base.fd >= 0)
        close(w->base.fd);
    free(w->tls);
    free(w);
}

/* Finds the network device to listen on. An any-address belongs to no device; then it is the device of
 * reached_at, else the first that is up. */
static void listen_device(const struct sockaddr_storage *address, socklen_t len, const char *reached_at, char out[64])
{
    struct sockaddr_storage told;
    socklen_t told_len;
    struct td_error ignored;
    if (netaddr_device(address, len, out))
        return;
    if (!reached_at || netaddr_resolve(reached_at, &told, &told_len, &ignored) || !netaddr_device(&told, told_len, out))
        netaddr_any_device(out);
}

static enum td_status listen_open(struct ucx_wire *w, const char *text, const char *reached_at,
                                  struct td_error *error_out)
{
    struct sockaddr_storage address;
    socklen_t len;
    char device[64];
    enum td_status st = netaddr_resolve(text, &address, &len, error_out);
    if (st)
        return st;
    listen_device(&address, len, reached_at, device);
    st = context_open(w, device, error_out);
    if (st)
        return st;
    int fd;
    if (worker_make(w->context, NULL, &w->listen_worker, &fd))
        return td_fail(error_out, TD_ERR_IO, "listen %s: no ucx worker could be made", text);
    watch(w, fd, NULL);
    ucp_listener_params_t p = {.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER,
                               .sockaddr = {.addr = (const struct sockaddr *)&address, .addrlen = len},
                               .conn_handler = {.cb = listener_callback, .arg = w}};
    ucs_status_t s = ucp_listener_create(w->listen_worker, &p, &w->listener);
    if (s != UCS_OK) {
        w->listener = NULL;
        return td_fail(error_out, TD_ERR_IO, "listen %s: %s", text, ucs_status_string(s));
    }
    ucp_listener_attr_t attr = {.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR};
    if (ucp_listener_query(w->listener, &attr) != UCS_OK)
        return td_fail(error_out, TD_ERR_IO, "listen %s: its port can't be read back", text);
    netaddr_format(&attr.sockaddr, w->base.address, sizeof(w->base.address));
    return TD_OK;
}

static const struct wire_ops OPS = {
    .connect = ucx_connect,
    .send = ucx_send,
    .close = ucx_close,
    .progress = ucx_progress,
    .arm = ucx_arm,
    .transport = ucx_transport,
    .part_bytes = ucx_part_bytes,
    .free = ucx_free,
};

enum td_status wire_ucx_open(const struct wire_config *config, struct wire **out, struct td_error *error_out)
{
    wire_ucx_setup();
    struct ucx_wire *w = mem_zalloc(sizeof(*w));
    w->base.ops = &OPS;
    w->base.events = config->events;
    w->base.log = config->log;
    w->tls = mem_strdup(config->tls ? config->tls : "auto");
    w->arena_base = config->arena;
    w->arena_bytes = config->arena_bytes;
    STAILQ_INIT(&w->ended);
    w->names = names_open();
    mailbox_init(&w->jobs);
    mailbox_init(&w->results);
    mailbox_init(&w->requests);
    w->base.fd = epoll_create1(EPOLL_CLOEXEC);
    enum td_status s =
        w->base.fd < 0 ? td_fail(error_out, TD_ERR_IO, "no epoll descriptor: %s", strerror(errno)) : TD_OK;
    if (!s && config->listen)
        s = listen_open(w, config->listen, config->reached_at, error_out);
    if (s) {
        ucx_free(&w->base);
        return s;
    }
    watch(w, mailbox_fd(&w->results), NULL);
    watch(w, mailbox_fd(&w->requests), NULL);
    w->connector = thread_start("xfer-connect", connector_run, w);
    w->connector_runs = true;
    *out = &w->base;
    return TD_OK;
}
