/*
 * Connections: handshake, heartbeats, goodbye, user messages. (target.c has the addresses that we connect
 * to.)
 *
 * Handshake (c connected, a accepted):      c: HELLO  ->      a: HELLO  ->      c: AUTH  ->      a: AUTH
 *
 * The accepting side proves itself only to a peer that has proved itself. Each side checks version and layout
 * on its own, so each can name the field that differs. Nothing else is accepted before the proof. A peer that
 * is refused gets a GOODBYE with the reason.
 *
 * Liveness: a heartbeat goes out every heartbeat_ns on every connection that is up. A peer that nothing is
 * heard of for silence_ns is dead; the connection is closed by force, as after an error of the transport.
 * Time in which this process itself was stopped or starved does not count, neither here nor in any other
 * timer of transfer/ (base/absence.h).
 *
 * Goodbye: the side that leaves says GOODBYE and waits for the answer, for the close, or for
 * LEAVE_PATIENCE_NS. The other side ends everything of this connection, answers, and waits for the close,
 * twice as long. So a leave is never taken for a death.
 *
 * Order at the end of a connection: first its leases and pulls end (conn_detach), then the wire closes, then
 * on_closed tells on_peer_down if it was the peer's last connection. Callbacks about a peer therefore come
 * before its down.
 */
#include "transfer/impl.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/endian.h"
#include "base/mem.h"
#include "base/random.h"

/* Limit of user message parts in flight to a peer that does not read. */
enum { PARTS_OUT_MAX = 16384 };
#define LEAVE_PATIENCE_NS (250 * NS_PER_MS)

static void conn_set_state(struct conn *c, enum conn_state to)
{
    assert(to > c->state); /* states only advance, to the right in impl.h's drawing */
    c->state = to;
}

/* Limit of a handshake: a few round trips. */
uint64_t conn_handshake_ns(const struct xfer *x)
{
    return 2 * x->config.silence_ns;
}

/* ------------------------------------------------------------------- peers */

static struct xfer_peer *peer_get(struct xfer *x, uint64_t incarnation)
{
    struct xfer_peer *p = x->peers;
    while (p && p->incarnation != incarnation)
        p = p->next;
    if (p)
        return p;
    p = mem_zalloc(sizeof(*p));
    p->incarnation = incarnation;
    p->next = x->peers;
    x->peers = p;
    return p;
}

bool peer_is_up(const struct xfer *x, uint64_t incarnation)
{
    const struct xfer_peer *p = x->peers;
    while (p && p->incarnation != incarnation)
        p = p->next;
    return p && p->n_conns;
}

uint64_t xfer_peer_incarnation(const struct xfer_peer *peer)
{
    return peer->incarnation;
}

/* Adds the connection's transport to what xfer_transport() reports. */
static void add_transport(struct xfer *x, const char *now)
{
    pthread_mutex_lock(&x->transport_lock);
    size_t used = strlen(x->transport);
    if (!strstr(x->transport, now))
        snprintf(x->transport + used, sizeof(x->transport) - used, "%s%s", used ? "," : "", now);
    pthread_mutex_unlock(&x->transport_lock);
}

/* Whether a connection is slower than --transports asks for: than the first one of the list. UCX reports "rc"
 * as "rc_mlx5/mlx5_0:1". */
static bool is_slower(const char *transports, const char *now)
{
    char first[16];
    size_t n = strcspn(transports, ",");
    static const char *const KNOWN[] = {"rc", "dc", "ud", "ib", "posix", "sysv", "cma"};
    if (n >= sizeof(first))
        return false;
    snprintf(first, sizeof(first), "%.*s", (int)n, transports);
    if (!strcmp(first, "ib"))
        return !strstr(now, "rc") && !strstr(now, "dc") && !strstr(now, "ud");
    for (size_t i = 0; i < sizeof(KNOWN) / sizeof(KNOWN[0]); i++)
        if (!strcmp(first, KNOWN[i]))
            return !strstr(now, first);
    return false; /* "auto", "tcp", or a name that stands for several transports */
}

/* The transport has chosen how payloads of this connection travel. */
static void on_transport(void *user)
{
    struct conn *c = user;
    struct xfer *x = c->x;
    char now[128] = "";
    wire_transport(c->wire, now, sizeof(now));
    c->part_bytes = wire_part_bytes(c->wire);
    if (is_slower(x->config.transports, now) && !atomic_fetch_add(&x->counters.slower, 1))
        log_warn(x->config.log,
                 "a peer is reached by a slower transport than --transports asks for, maybe for want of a card; "
                 "ucx_info -d shows what there is peer=%s asked=%s transport=%s",
                 c->name, x->config.transports, now);
    log_info(x->config.log, "way of a peer's payloads peer=%s transport=%s", c->name, now);
    add_transport(x, now);
}

static void note_transport(struct xfer *x, struct conn *c)
{
    char now[128] = "";
    wire_transport(c->wire, now, sizeof(now));
    log_info(x->config.log, "peer connected peer=%s incarnation=%016llx direction=%s transport=%s", c->name,
             (unsigned long long)c->incarnation, c->target ? "out" : "in", now);
    add_transport(x, now);
}

/* The handshake is over. on_peer_up comes before any message or pull of this connection. */
static void conn_up(struct conn *c)
{
    struct xfer *x = c->x;
    conn_set_state(c, CONN_UP);
    c->was_up = true;
    c->up_ns = x->now_ns;
    c->beat_ns = x->now_ns + x->config.heartbeat_ns;
    due_at(x, c->beat_ns);
    struct xfer_peer *p = c->peer = peer_get(x, c->incarnation);
    memcpy(p->name, c->name, sizeof(p->name));
    note_transport(x, c);
    c->part_bytes = wire_part_bytes(c->wire);
    wire_trust(c->wire);
    if (p->n_conns++ == 0) {
        atomic_fetch_add(&x->counters.peers_up, 1);
        if (x->config.callbacks.on_peer_up)
            x->config.callbacks.on_peer_up(x->config.callbacks.user, p, p->incarnation, p->name);
    }
    if (c->target) {
        target_is_up(c);
        pull_on_up(c->target);
    }
}

/* A connection is gone. If it was the peer's last, ends unread leases of the peer, then tells
 * on_peer_down. */
static void peer_leave(struct conn *c)
{
    struct xfer *x = c->x;
    struct xfer_peer *p = c->peer;
    if (!p || --p->n_conns)
        return;
    log_info(x->config.log, "peer down peer=%s incarnation=%016llx why=%s", p->name, (unsigned long long)p->incarnation,
             c->why ? td_status_name(c->why) : "goodbye");
    atomic_fetch_sub(&x->counters.peers_up, 1);
    lease_peer_lost(x, p->incarnation);
    if (x->config.callbacks.on_peer_down)
        x->config.callbacks.on_peer_down(x->config.callbacks.user, p, p->incarnation, c->why);
}

/* ------------------------------------------------------------- beginning, end */

struct conn *conn_add(struct xfer *x, enum conn_state state)
{
    struct conn *c = mem_zalloc(sizeof(*c));
    c->x = x;
    c->state = state;
    c->out_units_tail = &c->out_units;
    c->begun_ns = c->heard_ns = x->now_ns;
    c->deadline_ns = x->now_ns + conn_handshake_ns(x);
    due_at(x, c->deadline_ns);
    c->next = x->conns;
    x->conns = c;
    return c;
}

/* Ends all leases and pulls of the connection; those with parts in flight end when the wire has ended the
 * parts. They send nothing, because the state is no longer UP. */
static void conn_detach(struct conn *c)
{
    lease_conn_lost(c);
    pull_conn_lost(c);
}

/* The state changes first, so that nothing is sent while leases and pulls end. on_closed comes later, from
 * wire_progress. */
void conn_close(struct conn *c, enum td_status why)
{
    if (c->state == CONN_CLOSING)
        return;
    if (c->state != CONN_LEAVING)
        c->why = why;
    bool was_up = c->state == CONN_UP;
    conn_set_state(c, CONN_CLOSING);
    if (was_up)
        conn_detach(c);
    if (c->target && !c->was_up)
        target_failed(c, c->why);
    wire_close(c->wire);
}

/* Says goodbye with the reason and ends everything on this connection. The close follows with the peer's
 * answer, or by time. */
static void conn_leave(struct conn *c, enum td_status why, bool is_reply)
{
    uint8_t out[WIRE_HEADER_MAX];
    conn_say(c, out, xfer_msg_put_goodbye(out, is_reply, why));
    if (c->state == CONN_LEAVING)
        return;
    bool was_up = c->state == CONN_UP;
    c->why = why;
    conn_set_state(c, CONN_LEAVING);
    c->deadline_ns = c->x->now_ns + LEAVE_PATIENCE_NS * (is_reply ? 2 : 1);
    due_at(c->x, c->deadline_ns);
    if (was_up)
        conn_detach(c);
}

void conn_leave_all(struct xfer *x)
{
    for (struct conn *c = x->conns; c; c = c->next) {
        if (c->state == CONN_UP)
            conn_leave(c, TD_OK, false);
        else if (c->state != CONN_LEAVING)
            conn_close(c, TD_ERR_CANCELLED);
    }
}

static void on_accept(void *user, struct wire_conn *wire)
{
    struct xfer *x = user;
    if (x->stopping)
        return;
    struct conn *c = conn_add(x, CONN_HELLO);
    c->wire = wire;
    wire->user = c;
}

static void send_hello(struct conn *c)
{
    struct xfer *x = c->x;
    struct xfer_msg_hello h = {.incarnation = x->config.incarnation, .layout = x->layout};
    put_u64(h.nonce, random_u64());
    put_u64(h.nonce + 8, random_u64());
    snprintf(h.name, sizeof(h.name), "%s", x->name);
    c->hello_ours_len = xfer_msg_put_hello(c->hello_ours, &h);
    conn_say(c, c->hello_ours, c->hello_ours_len);
}

static void on_open(void *user)
{
    struct conn *c = user;
    if (c->state != CONN_CONNECTING)
        return;
    conn_set_state(c, CONN_HELLO);
    /* The time so far was our own work (resolving, connecting), not the peer's. */
    c->deadline_ns = c->x->now_ns + conn_handshake_ns(c->x);
    send_hello(c);
}

static void on_error(void *user, enum td_status why)
{
    struct conn *c = user;
    if (c->state < CONN_LEAVING)
        log_debug(c->x->config.log, "connection lost peer=%s address=%s status=%s", c->name,
                  c->target ? c->target->address : "", td_status_name(why));
    conn_close(c, TD_ERR_PEER_LOST);
}

/* The transport has ended all its payloads, so nothing points to the connection any more, except its
 * target and peer. */
static void on_closed(void *user)
{
    struct conn *c = user;
    struct xfer *x = c->x;
    assert(c->state == CONN_CLOSING && !c->out_bytes && !c->in_bytes && !c->n_out_units);
    struct conn **at = &x->conns;
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
    if (c->target)
        target_lost(c);
    peer_leave(c);
    free(c->message);
    free(c);
}

/* ----------------------------------------------------------------- handshake */

/* Refuses the peer: tells it the reason and fails the attempt. */
static void conn_refuse(struct conn *c, enum td_status why, const char *reason)
{
    log_limited(c->x->config.log, LOG_WARN, "peer refused peer=%s address=%s status=%s reason=%s",
                c->name[0] ? c->name : "?", c->target ? c->target->address : "", td_status_name(why), reason);
    conn_leave(c, why, false);
    if (c->target)
        target_failed(c, why);
}

/* What the side with this role signs: both HELLOs as they were sent. */
static struct bytes said_by(const struct conn *c, char role)
{
    if (c->target)
        return xfer_msg_said(role, c->hello_ours, c->hello_ours_len, c->hello_theirs, c->hello_theirs_len);
    return xfer_msg_said(role, c->hello_theirs, c->hello_theirs_len, c->hello_ours, c->hello_ours_len);
}

static void send_auth(struct conn *c)
{
    uint8_t mac[XFER_MSG_MAC_BYTES], out[WIRE_HEADER_MAX];
    struct bytes said = said_by(c, c->target ? 'c' : 'a');
    secret_sign(c->x->secret, said.data, said.len, mac);
    bytes_free(&said);
    conn_say(c, out, xfer_msg_put_auth(out, mac));
}

static void on_hello(struct conn *c, const struct xfer_msg_hello *h, const uint8_t *bytes, uint32_t len)
{
    struct xfer *x = c->x;
    memcpy(c->hello_theirs, bytes, len);
    c->hello_theirs_len = len;
    c->incarnation = h->incarnation;
    memcpy(c->name, h->name, sizeof(c->name));
    /* Sent even if we refuse the peer, so that the other side can name the differing field itself. */
    if (!c->target)
        send_hello(c);
    struct td_error why = {""};
    if (kv_layout_match(&x->layout, &h->layout, &why)) {
        conn_refuse(c, TD_ERR_VERSION, why.text);
        return;
    }
    conn_set_state(c, CONN_AUTH);
    if (c->target)
        send_auth(c);
}

static void on_auth(struct conn *c, const uint8_t *mac)
{
    struct bytes said = said_by(c, c->target ? 'a' : 'c');
    bool is_good = secret_verify(c->x->secret, said.data, said.len, mac, XFER_MSG_MAC_BYTES);
    bytes_free(&said);
    if (!is_good) {
        conn_refuse(c, TD_ERR_AUTH, "the cluster secret differs");
        return;
    }
    if (!c->target)
        send_auth(c);
    conn_up(c);
}

static void on_goodbye(struct conn *c, bool is_reply, enum td_status status)
{
    switch (c->state) {
    case CONN_UP:
        conn_leave(c, status, true);
        return;
    case CONN_LEAVING:
        if (!is_reply)
            conn_leave(c, c->why, true);
        conn_close(c, c->why);
        return;
    default:
        if (status)
            log_limited(c->x->config.log, LOG_WARN, "refused by peer=%s address=%s status=%s", c->name,
                        c->target ? c->target->address : "", td_status_name(status));
        conn_close(c, status ? status : TD_ERR_PEER_LOST);
        return;
    }
}

/* ------------------------------------------------------------------ messages */

void conn_drop_messages(struct xfer *x, uint64_t n)
{
    atomic_fetch_add(&x->counters.messages_dropped, n);
}

static void part_sent(void *arg, enum td_status status)
{
    (void)status;
    ((struct conn *)arg)->n_parts_out--;
}

/* Sends a message as consecutive USER parts. It is dropped if the peer has not read PARTS_OUT_MAX parts. */
void conn_send_message(struct conn *c, uint16_t kind, const uint8_t *data, uint32_t len)
{
    if (c->n_parts_out + len / XFER_MSG_USER_PART >= PARTS_OUT_MAX) {
        log_warn(c->x->config.log, "message dropped: peer does not read peer=%s bytes=%u", c->name, len);
        conn_drop_messages(c->x, 1);
        return;
    }
    uint32_t at = 0;
    do {
        uint8_t out[WIRE_HEADER_MAX];
        uint32_t n = len - at < XFER_MSG_USER_PART ? len - at : XFER_MSG_USER_PART;
        uint32_t size = xfer_msg_put_user(out, kind, len, at, len ? data + at : NULL, n);
        c->n_parts_out++;
        wire_send(c->wire, out, xfer_msg_seal(out, size, ++c->n_said), NULL, 0, part_sent, c);
        at += n;
    } while (at < len);
}

static void tell_message(struct conn *c, uint16_t kind, const void *data, uint32_t len)
{
    const struct xfer_callbacks *cb = &c->x->config.callbacks;
    if (cb->on_message)
        cb->on_message(cb->user, c->peer, kind, data, len);
}

/* Parts of a message come in order and without another message between them, else the connection is
 * closed. */
static void on_user(struct conn *c, const struct xfer_msg *m)
{
    if (m->user.offset != c->message_len ||
        (m->user.offset && (m->user.kind != c->message_kind || m->user.total_len != c->message_total))) {
        conn_close(c, TD_ERR_PROTOCOL);
        return;
    }
    if (m->user.len == m->user.total_len) {
        tell_message(c, m->user.kind, m->user.bytes, m->user.len);
        return;
    }
    uint32_t end = m->user.offset + m->user.len;
    /* Grows with the bytes that have come, not with the length that was promised. */
    if (end > c->message_cap) {
        uint32_t cap = 2 * end > 65536 ? 2 * end : 65536;
        c->message_cap = cap < m->user.total_len ? cap : m->user.total_len;
        c->message = mem_resize(c->message, c->message_cap, 1);
    }
    memcpy(c->message + m->user.offset, m->user.bytes, m->user.len);
    c->message_kind = m->user.kind;
    c->message_total = m->user.total_len;
    c->message_len = end;
    if (end < m->user.total_len)
        return;
    tell_message(c, m->user.kind, c->message, end);
    free(c->message);
    c->message = NULL;
    c->message_len = c->message_cap = 0;
}

/* Messages of a connection that is up. Any of the handlers may close the connection. */
static void dispatch(struct conn *c, const struct xfer_msg *m)
{
    switch (m->type) {
    case MSG_HEARTBEAT:
        return;
    case MSG_PULL_OPEN:
        lease_on_open(c, m->open.id, m->open.holder_incarnation);
        return;
    case MSG_PULL:
        lease_on_pull(c, &m->unit);
        return;
    case MSG_RELEASE:
        lease_on_release(c, m->release.id, m->release.status);
        return;
    case MSG_ANNOUNCE:
        pull_on_announce(c, &m->unit);
        return;
    case MSG_FINISH:
        pull_on_finish(c, m);
        return;
    case MSG_REFUSE:
        pull_on_refuse(c, m->refuse.id, m->refuse.reason);
        return;
    case MSG_USER:
        on_user(c, m);
        return;
    default:
        log_limited(c->x->config.log, LOG_WARN, "message out of order peer=%s type=%d", c->name, (int)m->type);
        conn_close(c, TD_ERR_PROTOCOL);
        return;
    }
}

/* Each message but DATA comes through here. It is counted in n_heard even if it is dropped, because the
 * seal numbers all of them. */
static void on_message(void *user, const uint8_t *header, uint32_t len)
{
    struct conn *c = user;
    struct xfer_msg m;
    struct td_error error = {""};
    if (c->state == CONN_CLOSING)
        return;
    enum td_status s = xfer_msg_unseal(header, &len, ++c->n_heard, &error);
    if (s) { /* damaged by the network, so another attempt may succeed */
        if (c->state < CONN_LEAVING)
            log_limited(c->x->config.log, LOG_WARN, "connection is unsound peer=%s reason=%s", c->name, error.text);
        conn_close(c, TD_ERR_PEER_LOST);
        return;
    }
    s = xfer_msg_decode(header, len, &m, &error);
    if (s) {
        if (c->state < CONN_LEAVING)
            conn_refuse(c, s, error.text);
        return;
    }
    c->heard_ns = c->x->now_ns;
    if (m.type == MSG_GOODBYE)
        on_goodbye(c, m.goodbye.is_reply, m.goodbye.status);
    else if (c->state == CONN_UP)
        dispatch(c, &m);
    else if (c->state == CONN_HELLO && m.type == MSG_HELLO)
        on_hello(c, &m.hello, header, len);
    else if (c->state == CONN_AUTH && m.type == MSG_AUTH)
        on_auth(c, m.mac);
    else if (c->state < CONN_UP)
        conn_close(c, TD_ERR_PROTOCOL);
}

/* DATA: it is not sealed, its checksum covers all its fields (xfer_msg.h). */
static void *on_payload(void *user, const uint8_t *header, uint32_t header_len, uint64_t payload_len, void **token_out)
{
    struct conn *c = user;
    struct xfer_msg m;
    if (c->state != CONN_UP)
        return NULL;
    if (xfer_msg_decode(header, header_len, &m, NULL) || m.type != MSG_DATA) {
        conn_close(c, TD_ERR_PROTOCOL);
        return NULL;
    }
    c->heard_ns = c->x->now_ns;
    return pull_on_payload(c, &m.data, payload_len, token_out);
}

static void land(void *user, void *token, void *to, const void *from, uint64_t len_bytes)
{
    (void)user;
    pull_land(token, to, from, len_bytes);
}

static void on_payload_done(void *user, void *token, enum td_status status)
{
    pull_on_payload_done(user, token, status);
}

const struct wire_events PEER_WIRE_EVENTS = {
    .on_accept = on_accept,
    .on_open = on_open,
    .on_message = on_message,
    .on_payload = on_payload,
    .land = land,
    .on_payload_done = on_payload_done,
    .on_transport = on_transport,
    .on_error = on_error,
    .on_closed = on_closed,
};

/* -------------------------------------------------------------------- timers */

/* Closes a connection that is silent, stalled or late with its handshake; sends the heartbeat when it is
 * due. */
void conn_timer(struct conn *c)
{
    struct xfer *x = c->x;
    if (c->state == CONN_CLOSING)
        return;
    if (c->state != CONN_UP) {
        if (x->now_ns >= c->deadline_ns)
            conn_close(c, TD_ERR_PEER_LOST);
        else
            due_at(x, c->deadline_ns);
        return;
    }
    if (c->is_stalled) {
        conn_close(c, TD_ERR_PEER_LOST);
        return;
    }
    uint64_t silent_at = c->heard_ns + x->config.silence_ns;
    if (x->now_ns >= silent_at) {
        log_limited(x->config.log, LOG_WARN, "peer is silent peer=%s ms=%llu", c->name,
                    (unsigned long long)((x->now_ns - c->heard_ns) / NS_PER_MS));
        conn_close(c, TD_ERR_PEER_LOST);
        return;
    }
    if (x->now_ns >= c->beat_ns) {
        uint8_t out[WIRE_HEADER_MAX];
        conn_say(c, out, xfer_msg_put_heartbeat(out));
        c->beat_ns = x->now_ns + x->config.heartbeat_ns;
    }
    due_at(x, c->beat_ns < silent_at ? c->beat_ns : silent_at);
}

/* ------------------------------------------------------------- user messages */

struct send_command {
    struct command head;
    struct xfer_peer *peer; /* destination: either peer or address */
    char *address;
    struct outgoing *message;
};

/* A connection to this peer that is up; preferably one that we made. */
static struct conn *conn_to_peer(struct xfer *x, const struct xfer_peer *peer)
{
    struct conn *found = NULL;
    for (struct conn *c = x->conns; c; c = c->next)
        if (c->peer == peer && c->state == CONN_UP && (!found || c->target))
            found = c;
    return found;
}

static void run_send(struct xfer *x, struct command *command)
{
    struct send_command *s = (struct send_command *)command;
    struct outgoing *m = s->message;
    struct xfer_target *t = s->address && !x->stopping ? target_get(x, s->address) : NULL;
    struct conn *c = s->peer ? conn_to_peer(x, s->peer) : (t ? t->conn : NULL);
    if (conn_is_up(c)) {
        conn_send_message(c, m->kind, m->data, m->len);
        free(m);
    } else if (t) {
        target_queue(x, t, m);
    } else {
        conn_drop_messages(x, 1);
        free(m);
    }
    free(s->address);
}

static void push_send(struct xfer *x, struct xfer_peer *peer, const char *address, uint16_t kind, const void *data,
                      uint32_t len)
{
    if (len > XFER_MSG_USER_MAX) {
        log_error(x->config.log, "message dropped: too long bytes=%u", len);
        conn_drop_messages(x, 1);
        return;
    }
    struct send_command *s = mem_zalloc(sizeof(*s));
    s->head.run = run_send;
    s->peer = peer;
    s->address = mem_strdup(address);
    s->message = mem_zalloc(sizeof(*s->message) + len);
    s->message->kind = kind;
    s->message->len = len;
    if (len)
        memcpy(s->message->data, data, len);
    command_push(x, &s->head);
}

void xfer_send(struct xfer *x, const char *address, uint16_t kind, const void *data, uint32_t len_bytes)
{
    push_send(x, NULL, address, kind, data, len_bytes);
}

void xfer_send_peer(struct xfer *x, struct xfer_peer *peer, uint16_t kind, const void *data, uint32_t len_bytes)
{
    push_send(x, peer, NULL, kind, data, len_bytes);
}
