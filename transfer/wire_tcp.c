/*
 * The TCP transport: one non-blocking socket per connection.
 *
 * A frame on the socket, little-endian:
 *
 *  0 u32 FRAME_MAGIC  4 u16 header_len  6 u16 0  8 u64 payload_len  16 header[header_len]
 *  then payload[payload_len]
 *
 * Frames of a connection are sent in order, so a long payload delays the messages behind it: a part of the
 * protocol's usual 256 KiB for 20 ms on a slow network (100 Mbit/s).
 *
 * A payload of at most LANDING_BYTES is read into a buffer that stays in the second-level cache, and goes to
 * its page from there, in the pass that sums it (wire_land). Read straight into the page it took a fifth more
 * processor time: the kernel's copy fetches each line of the page, which no cache holds, before it writes it.
 * Longer payloads (a layer of more than that) are read straight into the page, and so is what TLS has already
 * copied once.
 *
 * Strangers: until wire_trust a frame may carry no payload, so that one connection costs at most
 * BUFFER_BYTES. At most STRANGERS_MAX accepted connections may be unproved; then the oldest of them makes
 * room for a new one, because a peer proves itself within milliseconds.
 * The protocol limits how long the proof may take. When the process has no descriptor left, a spare one is
 * closed to accept a connection and close it. If that fails, too, nothing is accepted for PAUSE_MS: otherwise
 * the listener would stay readable and this thread would never sleep.
 *
 * wire_send only queues. The socket is written in the next turn, so that no done callback comes from inside
 * wire_send; what the socket does not take waits for EPOLLOUT. The done callback means that the kernel has a
 * copy of the payload, or that TLS has encrypted it.
 *
 * Rejected: MSG_ZEROCOPY (over loopback it copies all the same, and it needs a second kind of completion).
 * UCX's tcp (it accepts one-sided writes from anybody who can connect, and each connection costs 3 ms of a
 * core, with its shared memory also 5 MiB of /dev/shm).
 *
 * With TLS (tcp_tls.h) the same frames are its content. The handshake happens inside the first sends and
 * receives, so it has no state here, and its time and place are those of an unproved connection. The proof
 * that follows is the same as without TLS.
 *
 * A connection: RESOLVING (a name) -> CONNECTING -> OPEN -> gone; is_closing may be set at any time.
 * Callbacks come from tcp_progress only. A connection is freed in one place, reap, at the end of a turn:
 * after all events of the turn were handled, so the pointer in an event is never stale, and after all its
 * done callbacks were called.
 *
 * Threads: as wire.h says. Only on_resolved runs on a thread of names.h; it hands the connection back through
 * `resolved`.
 */
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/endian.h"
#include "base/list.h"
#include "base/mem.h"
#include "base/process.h"
#include "base/queue.h"
#include "transfer/names.h"
#include "transfer/netaddr.h"
#include "transfer/tcp_tls.h"
#include "transfer/wire.h"

#define WARN_EVERY_NS (30 * NS_PER_S)
#define FRAME_MAGIC   0x314d4454u /* "TDM1" */
#define TLS_HANDSHAKE 0x16        /* first byte of a record of TLS with a handshake */

enum { PREFIX_BYTES = 16, BUFFER_BYTES = 16 << 10, LANDING_BYTES = 256 << 10, LANDINGS_KEPT = 4, TURN_BYTES = 1 << 20 };
enum { STRANGERS_MAX = 256, BACKLOG = 512, ACCEPTS_A_TURN = 32, PAUSE_MS = 100, EVENTS_A_TURN = 64, PIECES = 32 };

enum tcp_conn_state { TCP_RESOLVING, TCP_CONNECTING, TCP_OPEN };

struct out { /* a frame to be sent; freed after its done callback */
    struct out *next;
    const uint8_t *payload;
    uint64_t payload_len, n_sent; /* n_sent counts prefix, header and payload */
    wire_done_fn *done;
    void *arg;
    enum td_status status;
    uint32_t head_len; /* length of prefix and header */
    uint8_t head[];
};

/* A queue of frames; tail points to the last link. */
struct outs {
    struct out *first, **tail;
};

struct landing { /* where a payload is put together before it goes to its page */
    SLIST_ENTRY(landing) in_wire;
    uint8_t bytes[LANDING_BYTES];
};

struct tcp_conn {
    struct wire_conn base;
    struct tcp_wire *w;
    struct tcp_conn *next;
    enum tcp_conn_state state;
    int fd;           /* -1: no socket */
    struct mail mail; /* brings the connection back from the thread that resolved its name */
    struct name_query query;
    char *address; /* connecting side: "HOST:PORT"; owned. NULL: accepted. */
    bool is_trusted, is_closing, error_told;
    bool is_stranger; /* accepted, and counted in n_strangers */
    bool is_blocked;  /* waits for EPOLLOUT: to send more, or to be connected */
    /* With TLS. awaits_input: bytes can be sent when some have come (a handshake). has_more: bytes were
     * read from the socket, of which no event will tell. */
    struct tcp_tls_conn *tls; /* NULL: plain */
    bool awaits_input, has_more;
    enum td_status error;
    struct outs outs;

    uint32_t begin, end; /* bytes of buffer that were read and not parsed yet: [begin, end) */
    bool has_payload;    /* a payload is arriving */
    uint64_t left;       /* bytes of it still to come */
    uint8_t *to;         /* where the next of them lands; NULL: they are discarded */
    void *token;
    struct landing *landing; /* it goes from here to `page`; NULL: straight to its page */
    uint8_t *page;
    uint64_t page_bytes; /* of the payload */
    uint8_t buffer[BUFFER_BYTES];
};

struct tcp_wire {
    struct wire base;
    int listen_fd, spare_fd;
    uint64_t resume_ns; /* nothing is accepted until then; 0: no pause */
    struct tcp_conn *conns;
    struct outs ended; /* frames whose done callback is due, in this turn or the next */
    uint32_t n_strangers;
    struct tcp_tls *tls; /* NULL: plain */
    struct clock clock;
    uint64_t warned_ns;
    struct names *names;
    struct mailbox resolved;
    SLIST_HEAD(, landing) landings; /* free ones, at most LANDINGS_KEPT; the last used, which is in a cache, first */
    uint32_t n_landings;
    uint8_t nowhere[64 << 10];
};

static struct tcp_conn *conn_of(struct wire_conn *c)
{
    return (struct tcp_conn *)c;
}

/* ------------------------------------------------------------------- frames */

static void outs_add(struct outs *o, struct out *out)
{
    out->next = NULL;
    *o->tail = out;
    o->tail = &out->next;
}

static struct out *outs_take(struct outs *o)
{
    struct out *out = o->first;
    if (out && !(o->first = out->next))
        o->tail = &o->first;
    return out;
}

/* The first frame has been sent, or never will be: its done callback is due. */
static void end_first(struct tcp_conn *c, enum td_status status)
{
    struct out *out = outs_take(&c->outs);
    out->status = status;
    outs_add(&c->w->ended, out);
}

static bool tell_ended(struct tcp_wire *w)
{
    struct out *out = w->ended.first; /* frames that the callbacks add are told in the next turn */
    bool any = out != NULL;
    w->ended = (struct outs){NULL, &w->ended.first};
    for (struct out *next; out; out = next) {
        next = out->next;
        if (out->done)
            out->done(out->arg, out->status);
        free(out);
    }
    return any;
}

/* Notes the first error; conn_turn tells the protocol. */
static void fail(struct tcp_conn *c, enum td_status why)
{
    if (!c->error)
        c->error = why;
}

/* The payload pointer stays in use until the frame ends. A frame that can't be sent ends in the next turn,
 * not here. */
static void tcp_send(struct wire_conn *base, const void *header, uint32_t header_len, const void *payload,
                     uint64_t payload_len, wire_done_fn *done, void *arg)
{
    struct tcp_conn *c = conn_of(base);
    assert(header_len <= WIRE_HEADER_MAX);
    struct out *out = mem_zalloc(sizeof(*out) + PREFIX_BYTES + header_len);
    put_u32(out->head, FRAME_MAGIC);
    put_u16(out->head + 4, (uint16_t)header_len);
    put_u64(out->head + 8, payload_len);
    memcpy(out->head + PREFIX_BYTES, header, header_len);
    out->head_len = PREFIX_BYTES + header_len;
    out->payload = payload;
    out->payload_len = payload_len;
    out->done = done;
    out->arg = arg;
    out->status = TD_ERR_PEER_LOST;
    outs_add(c->state != TCP_OPEN || c->error || c->is_closing ? &c->w->ended : &c->outs, out);
}

/* ------------------------------------------------------------------- writing */

/* Registers or changes the events to wait for; is_blocked follows. */
static void watch(struct tcp_conn *c, int op, bool for_writing)
{
    struct epoll_event e = {.events = EPOLLIN | (for_writing ? EPOLLOUT : 0u), .data.ptr = c};
    epoll_ctl(c->w->base.fd, op, c->fd, &e);
    c->is_blocked = for_writing;
}

/* Collects the unsent rest of the first frames, as many as fit into `pieces`; returns the number of
 * pieces. */
static int gather(const struct tcp_conn *c, struct iovec pieces[PIECES])
{
    int n = 0;
    for (struct out *out = c->outs.first; out && n + 2 <= PIECES; out = out->next) {
        if (out->n_sent < out->head_len)
            pieces[n++] = (struct iovec){out->head + out->n_sent, out->head_len - out->n_sent};
        uint64_t of_payload = out->n_sent < out->head_len ? 0 : out->n_sent - out->head_len;
        if (of_payload < out->payload_len)
            pieces[n++] = (struct iovec){(void *)(uintptr_t)(out->payload + of_payload), out->payload_len - of_payload};
    }
    return n;
}

static void note_sent(struct tcp_conn *c, uint64_t n_bytes)
{
    for (struct out *out; n_bytes && (out = c->outs.first);) {
        uint64_t left = out->head_len + out->payload_len - out->n_sent, n = n_bytes < left ? n_bytes : left;
        out->n_sent += n;
        n_bytes -= n;
        if (n == left)
            end_first(c, TD_OK);
    }
}

/* After a write error, a part of a frame may have been sent: nothing can follow it. */
static void stop_writing(struct tcp_conn *c)
{
    shutdown(c->fd, SHUT_RDWR);
    while (c->outs.first)
        end_first(c, TD_ERR_PEER_LOST);
}

/* Writes until the socket takes no more or TURN_BYTES are written. A write error is not told here: reading
 * tells it, after what the peer had sent before it went has been read. */
static bool conn_write(struct tcp_conn *c)
{
    struct iovec pieces[PIECES];
    bool any = false;
    for (uint64_t n_bytes = 0; c->outs.first && !c->is_blocked && !c->awaits_input && n_bytes < TURN_BYTES;) {
        struct msghdr m = {.msg_iov = pieces, .msg_iovlen = (size_t)gather(c, pieces)};
        ssize_t n = c->tls ? tcp_tls_send(c->tls, pieces[0].iov_base, pieces[0].iov_len)
                           : sendmsg(c->fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            c->awaits_input = c->tls && tcp_tls_wants_read(c->tls);
            if (!c->awaits_input)
                watch(c, EPOLL_CTL_MOD, true);
            break;
        }
        any = true;
        if (n < 0) {
            stop_writing(c);
            break;
        }
        n_bytes += (uint64_t)n;
        note_sent(c, (uint64_t)n);
    }
    if (c->tls && !c->is_blocked && !tcp_tls_flush(c->tls)) {
        if (errno == EAGAIN)
            watch(c, EPOLL_CTL_MOD, true);
        else
            stop_writing(c);
    }
    return any;
}

/* ------------------------------------------------------------------- reading */

static struct landing *landing_take(struct tcp_wire *w)
{
    struct landing *l = SLIST_FIRST(&w->landings);
    if (!l)
        return mem_zalloc(sizeof(*l));
    SLIST_REMOVE_HEAD(&w->landings, in_wire);
    w->n_landings--;
    return l;
}

static void landing_give_back(struct tcp_wire *w, struct landing *l)
{
    if (w->n_landings == LANDINGS_KEPT) {
        free(l);
        return;
    }
    SLIST_INSERT_HEAD(&w->landings, l, in_wire);
    w->n_landings++;
}

static void end_payload(struct tcp_conn *c, enum td_status status)
{
    c->has_payload = false;
    if (c->landing) {
        if (!status)
            wire_land(&c->w->base.events, c->base.user, c->token, c->page, c->landing->bytes, c->page_bytes);
        landing_give_back(c->w, c->landing);
        c->landing = NULL;
    }
    if (c->to)
        c->w->base.events.on_payload_done(c->base.user, c->token, status);
}

/* n bytes of the payload have landed; tells the protocol after the last one. */
static void take_payload(struct tcp_conn *c, uint64_t n)
{
    c->to = c->to ? c->to + n : NULL;
    c->left -= n;
    if (!c->left)
        end_payload(c, TD_OK);
}

static void begin_frame(struct tcp_conn *c, const uint8_t *header, uint32_t header_len, uint64_t payload_len)
{
    const struct wire_events *e = &c->w->base.events;
    if (!payload_len) {
        e->on_message(c->base.user, header, header_len);
        return;
    }
    c->token = NULL;
    c->to = e->on_payload(c->base.user, header, header_len, payload_len, &c->token);
    c->left = payload_len;
    c->has_payload = true;
    if (c->to && payload_len <= LANDING_BYTES && !c->tls) {
        c->landing = landing_take(c->w);
        c->page = c->to;
        c->page_bytes = payload_len;
        c->to = c->landing->bytes;
    }
}

/* Parses one frame up to its payload. False: no complete frame header in the buffer, or a malformed one. */
static bool parse_one(struct tcp_conn *c)
{
    const uint8_t *p = c->buffer + c->begin;
    uint32_t n = c->end - c->begin;
    if (n < PREFIX_BYTES)
        return false;
    uint32_t header_len = get_u16(p + 4);
    uint64_t payload_len = get_u64(p + 8);
    if (get_u32(p) != FRAME_MAGIC || get_u16(p + 6) || header_len > WIRE_HEADER_MAX ||
        (payload_len && !c->is_trusted)) {
        if (!c->tls && p[0] == TLS_HANDSHAKE)
            log_limited(c->w->base.log, LOG_WARN,
                        "a peer encrypts its transfers (--kv-encrypt), this process does not");
        log_debug(c->w->base.log, "malformed frame");
        fail(c, TD_ERR_PROTOCOL);
        return false;
    }
    if (n < PREFIX_BYTES + header_len)
        return false;
    c->begin += PREFIX_BYTES + header_len;
    begin_frame(c, p + PREFIX_BYTES, header_len, payload_len);
    return true;
}

/* Hands on what was read until the buffer holds less than a frame header. Handlers may close the
 * connection. */
static void parse(struct tcp_conn *c)
{
    while (!c->is_closing && !c->error) {
        uint64_t n = c->end - c->begin;
        if (c->has_payload && n) {
            n = n < c->left ? n : c->left;
            if (c->to)
                memcpy(c->to, c->buffer + c->begin, n);
            c->begin += (uint32_t)n;
            take_payload(c, n);
        } else if (c->has_payload || !parse_one(c)) {
            break;
        }
    }
    memmove(c->buffer, c->buffer + c->begin, c->end - c->begin);
    c->end -= c->begin;
    c->begin = 0;
}

/* One readv: first the rest of a payload, straight to its place, then what follows it, into the buffer.
 * Returns readv's result. */
static ssize_t read_some(struct tcp_conn *c)
{
    struct iovec to[2];
    int n = 0;
    if (c->has_payload && c->to)
        to[n++] = (struct iovec){c->to, c->left};
    else if (c->has_payload)
        to[n++] = (struct iovec){c->w->nowhere, c->left < sizeof(c->w->nowhere) ? c->left : sizeof(c->w->nowhere)};
    uint64_t first = n ? to[0].iov_len : 0;
    if (first == c->left) /* else more than one piece of payload is left, and nothing else can follow */
        to[n++] = (struct iovec){c->buffer + c->end, BUFFER_BYTES - c->end};
    ssize_t got = c->tls ? tcp_tls_receive(c->tls, to[0].iov_base, to[0].iov_len) : readv(c->fd, to, n);
    if (got <= 0)
        return got;
    uint64_t of_payload = (uint64_t)got < first ? (uint64_t)got : first;
    c->end += (uint32_t)((uint64_t)got - of_payload);
    if (of_payload)
        take_payload(c, of_payload);
    return got;
}

/* Says why TLS has failed. A peer that does not encrypt is the likely reason in a handshake. */
static void tell_tls(struct tcp_conn *c, bool has_failed)
{
    if (!c->tls || !has_failed)
        return;
    log_limited(c->w->base.log, LOG_WARN, "encrypted connection failed%s%s why='%s'%s", c->address ? " address=" : "",
                c->address ? c->address : "", tcp_tls_why(c->tls),
                tcp_tls_is_up(c->tls) ? "" : "; both sides need --kv-encrypt, and the same secret");
}

/* Reads until the socket is empty, or its share of the turn is used up: less for a stranger. */
static bool conn_read(struct tcp_conn *c)
{
    bool any = false, is_stopped = true; /* by its share: after EAGAIN the rest is a part of a record */
    const uint64_t most = c->is_trusted ? TURN_BYTES : BUFFER_BYTES;
    for (uint64_t n_bytes = 0; n_bytes < most && !c->is_closing && !c->error;) {
        ssize_t n = read_some(c);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            is_stopped = false;
            break;
        }
        any = true;
        if (n <= 0) {
            tell_tls(c, n < 0);
            fail(c, TD_ERR_PEER_LOST);
            break;
        }
        n_bytes += (uint64_t)n;
        parse(c);
    }
    c->has_more = c->tls && is_stopped && !c->is_closing && !c->error && tcp_tls_has_more(c->tls);
    return any;
}

/* --------------------------------------------------------------- connections */

static struct tcp_conn *conn_new(struct tcp_wire *w, int fd, enum tcp_conn_state state)
{
    struct tcp_conn *c = mem_zalloc(sizeof(*c));
    c->base.wire = &w->base;
    c->w = w;
    c->fd = fd;
    c->state = state;
    c->outs.tail = &c->outs.first;
    c->next = w->conns;
    w->conns = c;
    return c;
}

static void send_at_once(int fd)
{
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

/* Warns at most every WARN_EVERY_NS, because wanted peers are tried for ever. */
static void not_connected(struct tcp_conn *c, const char *reason)
{
    struct tcp_wire *w = c->w;
    uint64_t now = clock_now(&w->clock);
    bool is_news = !w->warned_ns || now - w->warned_ns > WARN_EVERY_NS;
    w->warned_ns = is_news ? now : w->warned_ns;
    log_write(w->base.log, is_news ? LOG_WARN : LOG_DEBUG, "can't connect address=%s reason=%s", c->address, reason);
    fail(c, TD_ERR_PEER_LOST);
}

/* Begins to connect to c->query.target. An error is told in the next turn, because no callback may come
 * from inside wire_connect. */
static void connect_begin(struct tcp_conn *c)
{
    const struct sockaddr *to = (const struct sockaddr *)&c->query.target;
    c->state = TCP_CONNECTING;
    if (!c->query.target_len) {
        not_connected(c, c->query.why.text);
        return;
    }
    c->fd = socket(to->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->fd < 0 || (connect(c->fd, to, c->query.target_len) && errno != EINPROGRESS)) {
        not_connected(c, strerror(errno));
        return;
    }
    send_at_once(c->fd);
    watch(c, EPOLL_CTL_ADD, true);
}

/* On a thread of names.h, or inside tcp_connect for a numeric address. */
static void on_resolved(struct name_query *q)
{
    struct tcp_conn *c = (struct tcp_conn *)((char *)q - offsetof(struct tcp_conn, query));
    mailbox_push(&c->w->resolved, &c->mail);
}

static struct wire_conn *tcp_connect(struct wire *base, const char *address, uint32_t attempt, void *user)
{
    struct tcp_wire *w = (struct tcp_wire *)base;
    struct tcp_conn *c = conn_new(w, -1, TCP_RESOLVING);
    c->base.user = user;
    c->address = mem_strdup(address);
    c->query = (struct name_query){.address = c->address, .attempt = attempt, .done = on_resolved};
    names_resolve(w->names, &c->query);
    return &c->base;
}

/* Until its name is resolved a connection belongs to names.h and may not be freed; leaving RESOLVING takes
 * it back. */
static bool take_resolved(struct tcp_wire *w)
{
    struct mail *mail = mailbox_take(&w->resolved);
    bool any = mail != NULL;
    while (mail) {
        struct tcp_conn *c = (struct tcp_conn *)((char *)mail - offsetof(struct tcp_conn, mail));
        mail = mail->next;
        if (c->is_closing)
            c->state = TCP_CONNECTING; /* names.h is done with it: reap may free it */
        else
            connect_begin(c);
    }
    return any;
}

/* The attempt to connect has ended, well or not. */
static void connect_end(struct tcp_conn *c)
{
    int error = 0;
    socklen_t len = sizeof(error);
    if (getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &len) || error) {
        not_connected(c, strerror(error ? error : errno));
        return;
    }
    c->state = TCP_OPEN;
    c->tls = c->w->tls ? tcp_tls_begin(c->w->tls, c->fd, false) : NULL;
    watch(c, EPOLL_CTL_MOD, false);
    c->w->base.events.on_open(c->base.user);
}

static void no_stranger(struct tcp_conn *c)
{
    c->w->n_strangers -= c->is_stranger;
    c->is_stranger = false;
}

/* The peer sees the end at once; the protocol is told in the next turn. */
static void drop_oldest_stranger(struct tcp_wire *w)
{
    struct tcp_conn *oldest = NULL;
    for (struct tcp_conn *c = w->conns; c; c = c->next) /* the newest first */
        oldest = c->is_stranger ? c : oldest;
    no_stranger(oldest);
    fail(oldest, TD_ERR_PEER_LOST);
    if (oldest->fd >= 0)
        shutdown(oldest->fd, SHUT_RDWR);
}

/* A new connection. It stays a stranger until tcp_trust, until it is dropped for others, or until it is
 * freed. */
static void accepted(struct tcp_wire *w, int fd)
{
    if (w->n_strangers >= STRANGERS_MAX)
        drop_oldest_stranger(w);
    send_at_once(fd);
    struct tcp_conn *c = conn_new(w, fd, TCP_OPEN);
    c->is_stranger = true;
    c->tls = w->tls ? tcp_tls_begin(w->tls, fd, true) : NULL;
    w->n_strangers++;
    watch(c, EPOLL_CTL_ADD, false);
    w->base.events.on_accept(w->base.events.user, &c->base);
    c->is_closing = c->is_closing || !c->base.user;
}

static int accept_one(struct tcp_wire *w)
{
    return accept4(w->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
}

static void keep_spare(struct tcp_wire *w)
{
    if (w->spare_fd < 0)
        w->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

/* No descriptor is left: closes the spare one to accept a connection and close it. If false, errno says
 * why (EAGAIN: no connection waits). */
static bool refuse_one(struct tcp_wire *w)
{
    if (w->spare_fd >= 0)
        close(w->spare_fd);
    w->spare_fd = -1;
    int fd = accept_one(w), error = errno;
    if (fd >= 0)
        close(fd);
    keep_spare(w);
    errno = error;
    return fd >= 0;
}

/* Sets the events of the listening socket. */
static void listen_for(struct tcp_wire *w, uint32_t events)
{
    struct epoll_event e = {.events = events, .data.ptr = w};
    epoll_ctl(w->base.fd, EPOLL_CTL_MOD, w->listen_fd, &e);
}

static void pause_accepts(struct tcp_wire *w)
{
    listen_for(w, 0);
    w->resume_ns = clock_now(&w->clock) + PAUSE_MS * NS_PER_MS;
}

static void resume_accepts(struct tcp_wire *w)
{
    if (!w->resume_ns || clock_now(&w->clock) < w->resume_ns)
        return;
    w->resume_ns = 0;
    listen_for(w, EPOLLIN);
}

static bool take_accepts(struct tcp_wire *w)
{
    bool any = false;
    keep_spare(w);
    for (int i = 0; i < ACCEPTS_A_TURN; i++, any = true) {
        int fd = accept_one(w);
        if (fd >= 0) {
            accepted(w, fd);
            continue;
        }
        if (errno == EINTR || errno == ECONNABORTED || ((errno == EMFILE || errno == ENFILE) && refuse_one(w)))
            continue;
        /* A connection may still wait, and can't be accepted. */
        if (errno != EAGAIN && errno != EWOULDBLOCK)
            pause_accepts(w);
        break;
    }
    return any;
}

static void tcp_trust(struct wire_conn *base)
{
    struct tcp_conn *c = conn_of(base);
    no_stranger(c);
    c->is_trusted = true;
}

/* Only marks it. The socket is closed in the next turn (end_conn), the memory is freed by reap. */
static void tcp_close(struct wire_conn *base)
{
    conn_of(base)->is_closing = true;
    atomic_store(&conn_of(base)->query.is_given_up, true);
}

/* ------------------------------------------------------------------ the turn */

/* A connection of an event can't have been freed: reap runs after all events of the turn. */
static bool handle(struct tcp_wire *w, const struct epoll_event *e)
{
    struct tcp_conn *c = e->data.ptr;
    if (!c) /* the mailbox of resolved names */
        return take_resolved(w);
    if (e->data.ptr == w)
        return take_accepts(w);
    if (c->is_closing || c->error)
        return false;
    if (c->state == TCP_CONNECTING)
        connect_end(c);
    else if (c->is_blocked && e->events & EPOLLOUT)
        watch(c, EPOLL_CTL_MOD, false);
    if (c->state == TCP_OPEN && e->events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
        c->awaits_input = false;
        conn_read(c);
    }
    return true;
}

/* Sends what the socket still takes, which may be a goodbye; then ends everything under way and closes the
 * socket. */
static void end_conn(struct tcp_conn *c)
{
    if (c->state == TCP_OPEN && !c->error)
        conn_write(c);
    while (c->outs.first)
        end_first(c, TD_ERR_CANCELLED);
    if (c->has_payload)
        end_payload(c, TD_ERR_CANCELLED);
    tcp_tls_end(c->tls);
    c->tls = NULL;
    if (c->fd >= 0)
        close(c->fd);
    c->fd = -1;
}

static bool conn_turn(struct tcp_conn *c)
{
    if (c->is_closing) {
        bool any = c->fd >= 0 || c->outs.first || c->has_payload;
        end_conn(c);
        return any;
    }
    if (c->error && !c->error_told) {
        c->error_told = true;
        c->w->base.events.on_error(c->base.user, c->error);
        return true;
    }
    bool any = c->has_more && !c->error && conn_read(c);
    return any | (c->state == TCP_OPEN && !c->error && conn_write(c));
}

/* Frees connections that are closed and not with names.h. It does nothing while done callbacks are due:
 * they come before on_closed, and may use the connection. */
static bool reap(struct tcp_wire *w)
{
    bool any = false;
    for (struct tcp_conn **at = &w->conns; *at && !w->ended.first;) {
        struct tcp_conn *c = *at;
        if (!c->is_closing || c->state == TCP_RESOLVING || c->fd >= 0) {
            at = &c->next;
            continue;
        }
        *at = c->next;
        no_stranger(c);
        void *user = c->base.user;
        free(c->address);
        free(c);
        any = true;
        if (user)
            w->base.events.on_closed(user);
        at = &w->conns; /* the callback may have changed the list */
    }
    return any;
}

/* The order matters: events, then each connection's own turn (which tells errors and ends frames), then
 * done callbacks, then reap. */
static bool tcp_progress(struct wire *base)
{
    struct tcp_wire *w = (struct tcp_wire *)base;
    struct epoll_event events[EVENTS_A_TURN];
    bool any = false;
    resume_accepts(w);
    int n = epoll_wait(w->base.fd, events, EVENTS_A_TURN, 0);
    for (int i = 0; i < n; i++)
        any |= handle(w, &events[i]);
    for (struct tcp_conn *c = w->conns; c; c = c->next)
        any |= conn_turn(c);
    any |= tell_ended(w);
    return any | reap(w);
}

/* Whatever the next tcp_progress would do without an event must make this return 0. */
static int tcp_arm(struct wire *base)
{
    struct tcp_wire *w = (struct tcp_wire *)base;
    if (w->ended.first)
        return 0;
    for (const struct tcp_conn *c = w->conns; c; c = c->next)
        if ((c->is_closing && c->state != TCP_RESOLVING) || (c->error && !c->error_told) ||
            (c->has_more && !c->error) || (c->outs.first && !c->is_blocked && !c->awaits_input))
            return 0;
    return w->resume_ns ? PAUSE_MS : -1;
}

static void tcp_transport(struct wire_conn *c, char *out, uint32_t out_bytes)
{
    snprintf(out, out_bytes, conn_of(c)->w->tls ? "tcp+tls" : "tcp");
}

/* ------------------------------------------------------------- open and free */

static void tcp_free(struct wire *base)
{
    struct tcp_wire *w = (struct tcp_wire *)base;
    names_close(w->names);
    /* Refused when accepted, so the protocol never had them. */
    for (struct tcp_conn *c = w->conns, *next; c; c = next) {
        next = c->next;
        assert(!c->base.user);
        tcp_tls_end(c->tls);
        if (c->fd >= 0)
            close(c->fd);
        free(c);
    }
    const int fds[] = {w->listen_fd, w->spare_fd, w->base.fd};
    for (size_t i = 0; i < sizeof(fds) / sizeof(fds[0]); i++)
        if (fds[i] >= 0)
            close(fds[i]);
    for (struct landing *l; (l = SLIST_FIRST(&w->landings)); free(l))
        SLIST_REMOVE_HEAD(&w->landings, in_wire);
    mailbox_fini(&w->resolved);
    tcp_tls_close(w->tls);
    free(w);
}

static const struct wire_ops OPS = {
    .connect = tcp_connect,
    .send = tcp_send,
    .close = tcp_close,
    .trust = tcp_trust,
    .progress = tcp_progress,
    .arm = tcp_arm,
    .transport = tcp_transport,
    .free = tcp_free,
};

static void watch_fd(struct tcp_wire *w, int fd, void *what)
{
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = what};
    epoll_ctl(w->base.fd, EPOLL_CTL_ADD, fd, &e);
}

static enum td_status listen_open(struct tcp_wire *w, const char *text, struct td_error *error_out)
{
    struct sockaddr_storage address;
    socklen_t len;
    int on = 1;
    enum td_status s = netaddr_resolve(text, &address, &len, error_out);
    if (s)
        return s;
    int fd = w->listen_fd = socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) ||
        bind(fd, (struct sockaddr *)&address, len) || listen(fd, BACKLOG) ||
        getsockname(fd, (struct sockaddr *)&address, &len))
        return td_fail(error_out, TD_ERR_IO, "listen %s: %s", text, strerror(errno));
    netaddr_format(&address, w->base.address, sizeof(w->base.address));
    watch_fd(w, fd, w);
    return TD_OK;
}

enum td_status wire_tcp_open(const struct wire_config *config, struct wire **out, struct td_error *error_out)
{
    process_raise_file_limit();
    struct tcp_wire *w = mem_zalloc(sizeof(*w));
    w->base = (struct wire){.ops = &OPS, .events = config->events, .log = config->log};
    w->listen_fd = -1;
    w->tls = config->encrypt ? tcp_tls_open(config->encrypt) : NULL;
    clock_init_real(&w->clock);
    w->ended.tail = &w->ended.first;
    w->names = names_open();
    mailbox_init(&w->resolved);
    w->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    w->base.fd = epoll_create1(EPOLL_CLOEXEC);
    enum td_status s =
        w->base.fd < 0 ? td_fail(error_out, TD_ERR_IO, "no epoll descriptor: %s", strerror(errno)) : TD_OK;
    if (!s && config->listen)
        s = listen_open(w, config->listen, error_out);
    if (s) {
        tcp_free(&w->base);
        return s;
    }
    watch_fd(w, mailbox_fd(&w->resolved), NULL);
    *out = &w->base;
    return TD_OK;
}
