/*
 * The transport between xfers of one process: envelopes in mailboxes. The receiver's thread copies the
 * payload straight from the sender's pages into its own, then sends the envelope back as the receipt. So the
 * sender's memory is borrowed for exactly as long as with a real network, and the same errors of the protocol
 * show.
 *
 * Two connections, one on each side, share a link. A side knows the other one only as the wire to push to;
 * that pointer is cleared under the hub's lock when a wire goes. A connection is freed when it was closed and
 * all its receipts are back.
 */
#include "transfer/wire.h"

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/queue.h"
#include "transfer/xfer.h"

struct loop_wire;
struct loop_conn;

struct xfer_hub {
    /* A mutex, because it also keeps a wire from being freed while another thread pushes to it. */
    pthread_mutex_t lock;
    struct loop_wire *wires;
};

struct loopback_link { /* shared by the two connections and the envelopes in flight */
    atomic_int refs;
    struct loop_wire *wire[2]; /* under the hub's lock; [0] connected, [1] accepted */
    struct loop_conn *conn[2]; /* each is touched by its own side's thread only */
    atomic_bool is_closed[2];
};

enum envelope_kind { ENV_OPEN, ENV_MESSAGE, ENV_RECEIPT, ENV_LOST };

struct envelope {
    struct mail mail;
    enum envelope_kind kind;
    int to; /* side of the link that receives it */
    struct loopback_link *link;
    const void *payload;
    uint64_t payload_len;
    wire_done_fn *done;
    void *arg;
    enum td_status status;
    uint32_t header_len;
    uint8_t header[];
};

struct loop_conn {
    struct wire_conn base;
    struct loop_conn *next;
    struct loopback_link *link;
    int side;
    uint32_t n_receipts; /* receipts that are awaited */
    bool is_closing, error_told;
};

struct loop_wire {
    struct wire base;
    struct xfer_hub *hub;
    struct loop_wire *next;
    struct loop_conn *conns;
    struct mailbox box;
};

struct xfer_hub *xfer_hub_open(void)
{
    struct xfer_hub *hub = mem_zalloc(sizeof(*hub));
    pthread_mutex_init(&hub->lock, NULL);
    return hub;
}

void xfer_hub_close(struct xfer_hub *hub)
{
    if (!hub)
        return;
    assert(!hub->wires);
    pthread_mutex_destroy(&hub->lock);
    free(hub);
}

static void link_unref(struct loopback_link *l)
{
    if (atomic_fetch_sub(&l->refs, 1) == 1)
        free(l);
}

static struct envelope *envelope_new(enum envelope_kind kind, struct loopback_link *link, int to, uint32_t header_len)
{
    struct envelope *e = mem_zalloc(sizeof(*e) + header_len);
    e->kind = kind;
    e->link = link;
    e->to = to;
    e->header_len = header_len;
    atomic_fetch_add(&link->refs, 1);
    return e;
}

static void envelope_free(struct envelope *e)
{
    link_unref(e->link);
    free(e);
}

/* False: that side is gone, and the caller keeps the envelope. */
static bool push_envelope(struct xfer_hub *hub, struct envelope *e)
{
    pthread_mutex_lock(&hub->lock);
    struct loop_wire *w = e->link->wire[e->to];
    if (w)
        mailbox_push(&w->box, &e->mail);
    pthread_mutex_unlock(&hub->lock);
    return w != NULL;
}

static void push_or_free(struct xfer_hub *hub, struct envelope *e)
{
    if (!push_envelope(hub, e))
        envelope_free(e);
}

static struct loop_conn *conn_new(struct loop_wire *w, struct loopback_link *link, int side)
{
    struct loop_conn *c = mem_zalloc(sizeof(*c));
    c->base.wire = &w->base;
    c->link = link;
    c->side = side;
    c->next = w->conns;
    w->conns = c;
    link->conn[side] = c;
    atomic_fetch_add(&link->refs, 1);
    return c;
}

/* ------------------------------------------------------------------- calls */

static struct wire_conn *loop_connect(struct wire *base, const char *address, uint32_t attempt, void *user)
{
    (void)attempt; /* names of xfers have one address */
    struct loop_wire *w = (struct loop_wire *)base;
    struct loopback_link *link = mem_zalloc(sizeof(*link));
    struct loop_conn *c = conn_new(w, link, 0);
    c->base.user = user;

    struct envelope *e = envelope_new(ENV_OPEN, link, 1, 0);
    /* Finding and pushing are one step under the lock, so that the other side can't be freed in between. */
    pthread_mutex_lock(&w->hub->lock);
    struct loop_wire *other = w->hub->wires;
    while (other && (!other->base.address[0] || strcmp(other->base.address, address)))
        other = other->next;
    link->wire[0] = w;
    link->wire[1] = other;
    if (other)
        mailbox_push(&other->box, &e->mail);
    pthread_mutex_unlock(&w->hub->lock);
    if (!other)
        envelope_free(e);
    /* Our own side is told in the next turn. */
    push_or_free(w->hub, envelope_new(other ? ENV_OPEN : ENV_LOST, link, 0, 0));
    return &c->base;
}

static void loop_send(struct wire_conn *base, const void *header, uint32_t header_len, const void *payload,
                      uint64_t payload_len, wire_done_fn *done, void *arg)
{
    struct loop_conn *c = (struct loop_conn *)base;
    struct loop_wire *w = (struct loop_wire *)base->wire;
    assert(header_len <= WIRE_HEADER_MAX);
    struct envelope *e = envelope_new(ENV_MESSAGE, c->link, !c->side, header_len);
    memcpy(e->header, header, header_len);
    e->payload = payload;
    e->payload_len = payload_len;
    e->done = done;
    e->arg = arg;
    c->n_receipts++;
    if (!c->is_closing && push_envelope(w->hub, e))
        return;
    e->kind = ENV_RECEIPT;
    e->to = c->side;
    e->status = TD_ERR_PEER_LOST;
    push_or_free(w->hub, e);
}

static void loop_close(struct wire_conn *base)
{
    struct loop_conn *c = (struct loop_conn *)base;
    if (c->is_closing)
        return;
    c->is_closing = true;
    atomic_store(&c->link->is_closed[c->side], true);
    struct loop_wire *w = (struct loop_wire *)base->wire;
    push_or_free(w->hub, envelope_new(ENV_LOST, c->link, !c->side, 0));
    /* This gives a turn in which progress notices that the connection is over. */
    push_or_free(w->hub, envelope_new(ENV_LOST, c->link, c->side, 0));
}

/* ------------------------------------------------------------------ the turn */

static enum td_status deliver(struct loop_wire *w, struct loop_conn *c, struct envelope *e)
{
    const struct wire_events *ev = &w->base.events;
    if (!c || c->is_closing || atomic_load(&e->link->is_closed[!c->side]))
        return TD_ERR_CANCELLED;
    if (!e->payload_len) {
        ev->on_message(c->base.user, e->header, e->header_len);
        return TD_OK;
    }
    void *token = NULL;
    void *to = ev->on_payload(c->base.user, e->header, e->header_len, e->payload_len, &token);
    if (to) {
        wire_land(ev, c->base.user, token, to, e->payload, e->payload_len);
        ev->on_payload_done(c->base.user, token, TD_OK);
    }
    return TD_OK;
}

static void opened(struct loop_wire *w, struct loop_conn *c, struct envelope *e)
{
    if (e->to == 0) {
        if (c && !c->is_closing)
            w->base.events.on_open(c->base.user);
        return;
    }
    c = conn_new(w, e->link, 1);
    w->base.events.on_accept(w->base.events.user, &c->base);
    if (!c->base.user)
        loop_close(&c->base);
}

static void handle(struct loop_wire *w, struct envelope *e)
{
    struct loop_conn *c = e->link->conn[e->to];
    switch (e->kind) {
    case ENV_OPEN:
        opened(w, c, e);
        break;
    case ENV_MESSAGE: /* goes back as the receipt */
        e->status = deliver(w, c, e);
        e->kind = ENV_RECEIPT;
        e->to = !e->to;
        push_or_free(w->hub, e);
        return;
    case ENV_RECEIPT:
        assert(c && c->n_receipts);
        c->n_receipts--;
        if (e->done)
            e->done(e->arg, e->status);
        break;
    case ENV_LOST:
        if (c && !c->is_closing && !c->error_told) {
            c->error_told = true;
            w->base.events.on_error(c->base.user, TD_ERR_PEER_LOST);
        }
        break;
    }
    envelope_free(e);
}

static bool reap(struct loop_wire *w)
{
    bool any = false;
    struct loop_conn **at = &w->conns;
    while (*at) {
        struct loop_conn *c = *at;
        if (!c->is_closing || c->n_receipts) {
            at = &c->next;
            continue;
        }
        *at = c->next;
        any = true;
        pthread_mutex_lock(&w->hub->lock);
        c->link->wire[c->side] = NULL;
        pthread_mutex_unlock(&w->hub->lock);
        c->link->conn[c->side] = NULL;
        link_unref(c->link);
        void *user = c->base.user;
        free(c);
        if (user)
            w->base.events.on_closed(user);
        at = &w->conns; /* the callback may have changed the list */
    }
    return any;
}

static bool loop_progress(struct wire *base)
{
    struct loop_wire *w = (struct loop_wire *)base;
    struct mail *mail = mailbox_take(&w->box);
    bool any = mail != NULL;
    while (mail) {
        struct envelope *e = (struct envelope *)mail;
        mail = mail->next;
        handle(w, e);
    }
    return any | reap(w);
}

static int loop_arm(struct wire *base)
{
    (void)base;
    return -1; /* the mailbox's descriptor stays readable while it has mail */
}

static void loop_transport(struct wire_conn *c, char *out, uint32_t out_bytes)
{
    (void)c;
    snprintf(out, out_bytes, "loopback");
}

/* ------------------------------------------------------------- open and free */

/* Leaves the hub and takes the rest of the mailbox. After this nothing can push to us: the links of our
 * connections were cleared when these went, and any other link has its opening envelope here. */
static struct mail *leave_hub(struct loop_wire *w)
{
    pthread_mutex_lock(&w->hub->lock);
    struct loop_wire **at = &w->hub->wires;
    while (*at && *at != w)
        at = &(*at)->next;
    if (*at)
        *at = w->next;
    struct mail *rest = mailbox_take(&w->box);
    for (struct mail *m = rest; m; m = m->next) {
        struct envelope *e = (struct envelope *)m;
        e->link->wire[e->to] = NULL;
    }
    pthread_mutex_unlock(&w->hub->lock);
    return rest;
}

static void bounce(struct loop_wire *w, struct envelope *e)
{
    if (e->kind == ENV_RECEIPT || e->kind == ENV_LOST) {
        envelope_free(e);
        return;
    }
    if (e->kind == ENV_OPEN) {
        e->kind = ENV_LOST;
    } else {
        e->kind = ENV_RECEIPT;
        e->status = TD_ERR_PEER_LOST;
    }
    e->to = !e->to;
    push_or_free(w->hub, e);
}

static void loop_free(struct wire *base)
{
    struct loop_wire *w = (struct loop_wire *)base;
    assert(!w->conns);
    struct mail *mail = leave_hub(w);
    while (mail) {
        struct envelope *e = (struct envelope *)mail;
        mail = mail->next;
        bounce(w, e);
    }
    close(w->base.fd);
    mailbox_fini(&w->box);
    free(w);
}

static const struct wire_ops OPS = {
    .connect = loop_connect,
    .send = loop_send,
    .close = loop_close,
    .progress = loop_progress,
    .arm = loop_arm,
    .transport = loop_transport,
    .free = loop_free,
};

enum td_status wire_loopback_open(const struct wire_config *config, struct wire **out, struct td_error *error_out)
{
    if (!config->hub)
        return td_fail(error_out, TD_ERR_INVALID, "xfer: the loopback backend needs a hub");
    struct loop_wire *w = mem_zalloc(sizeof(*w));
    w->base.ops = &OPS;
    w->base.events = config->events;
    w->base.log = config->log;
    w->hub = config->hub;
    snprintf(w->base.address, sizeof(w->base.address), "%s", config->listen ? config->listen : "");
    mailbox_init(&w->box);
    w->base.fd = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event ev = {.events = EPOLLIN};
    epoll_ctl(w->base.fd, EPOLL_CTL_ADD, mailbox_fd(&w->box), &ev);

    pthread_mutex_lock(&w->hub->lock);
    bool is_taken = false;
    for (struct loop_wire *o = w->hub->wires; o; o = o->next)
        is_taken |= w->base.address[0] && !strcmp(o->base.address, w->base.address);
    if (!is_taken) {
        w->next = w->hub->wires;
        w->hub->wires = w;
    }
    pthread_mutex_unlock(&w->hub->lock);
    if (is_taken) {
        loop_free(&w->base);
        return td_fail(error_out, TD_ERR_IO, "listen %s: the name is taken", config->listen);
    }
    *out = &w->base;
    return TD_OK;
}
