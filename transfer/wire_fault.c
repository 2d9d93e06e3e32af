/*
 * A transport that injects faults. It lies between the protocol and a real transport, and does to
 * connections, messages and payloads what the script says (base/fault.h). It keeps the contract of wire.h,
 * whatever it does to the traffic: every payload ends with its callback, and on_closed comes last.
 *
 * A delayed message delays all messages behind it on its connection, as in a slow network; a reordered
 * message is overtaken by one. What the protocol must be told later (a done, an error) is told from progress.
 */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "transfer/wire_wrap.h"

enum { REORDER_MS = 10 }; /* the longest time for which a message waits to be overtaken */

struct parcel { /* a message that is not simply passed on */
    struct parcel *next;
    struct fault_conn *conn;
    const void *payload;
    void *copy; /* a corrupted copy of the payload; or NULL */
    uint64_t payload_len, due_ns;
    wire_done_fn *done;
    void *arg;
    enum td_status status;
    uint32_t n_sends, header_len;
    uint8_t header[];
};

struct parcels {
    struct parcel *head, **tail;
};

/* A payload that is received into separate memory, although the protocol was told that it has arrived. */
struct fault_early {
    struct fault_early *next;
    void *token;
    uint8_t elsewhere[];
};

struct fault_conn {
    struct wrap_conn wrap;
    struct fault_wire *w;
    struct parcels held;
    struct parcel *overtaken;
    struct fault_early *early; /* those whose payloads have not ended */
    uint32_t n_parcels;        /* parcels that are not done */
    uint64_t open_due_ns;
    bool is_open_held, is_broken;
};

struct fault_wire {
    struct wrap_wire wrap;
    struct faults *faults;
    const struct clock *clock;
    struct parcels over; /* parcels whose done callback is due */
};

static void parcels_init(struct parcels *q)
{
    q->head = NULL;
    q->tail = &q->head;
}

static void parcels_push(struct parcels *q, struct parcel *p)
{
    p->next = NULL;
    *q->tail = p;
    q->tail = &p->next;
}

static struct parcel *parcels_pop(struct parcels *q)
{
    struct parcel *p = q->head;
    if (p && !(q->head = p->next))
        q->tail = &q->head;
    return p;
}

/* ------------------------------------------------------------------- parcels */

static struct parcel *parcel_new(struct fault_conn *c, const void *header, uint32_t header_len, const void *payload,
                                 uint64_t payload_len, wire_done_fn *done, void *arg)
{
    struct parcel *p = mem_zalloc(sizeof(*p) + header_len);
    p->conn = c;
    p->payload = payload;
    p->payload_len = payload_len;
    p->done = done;
    p->arg = arg;
    p->n_sends = 1;
    p->header_len = header_len;
    memcpy(p->header, header, header_len);
    c->n_parcels++;
    return p;
}

static void parcel_over(struct parcel *p, enum td_status status)
{
    p->status = status;
    parcels_push(&p->conn->w->over, p);
}

static void on_sent(void *arg, enum td_status status)
{
    struct parcel *p = arg;
    if (status)
        p->status = status;
    if (!--p->n_sends)
        parcel_over(p, p->status);
}

static void parcel_send(struct parcel *p)
{
    struct fault_conn *c = p->conn;
    if (!c->wrap.inner || c->is_broken) {
        parcel_over(p, TD_ERR_PEER_LOST);
        return;
    }
    for (uint32_t i = p->n_sends; i; i--)
        wire_send(c->wrap.inner, p->header, p->header_len, p->copy ? p->copy : p->payload, p->payload_len, on_sent, p);
}

/* Sends p, behind what is held already; a message that waits to be overtaken follows it. */
static void forward(struct fault_conn *c, struct parcel *p)
{
    struct parcel *overtaken = c->overtaken;
    if (c->held.head) {
        parcels_push(&c->held, p);
        return;
    }
    c->overtaken = NULL;
    parcel_send(p);
    if (overtaken)
        parcel_send(overtaken);
}

static void damage(struct parcel *p, const struct fault *fault)
{
    if (fault->kind == FAULT_TRUNCATE && p->payload_len)
        p->payload_len = 1 + fault->bits % p->payload_len; /* sometimes nothing is cut off */
    else if (fault->kind == FAULT_TRUNCATE)
        p->header_len = 1 + (uint32_t)(fault->bits % p->header_len);
    else if (fault->kind == FAULT_CORRUPT && !p->payload_len)
        fault_flip(fault, p->header, p->header_len);
    else if (fault->kind == FAULT_CORRUPT) {
        p->copy = mem_array(p->payload_len, 1);
        memcpy(p->copy, p->payload, p->payload_len);
        fault_flip(fault, p->copy, p->payload_len);
    } else if (fault->kind == FAULT_DUPLICATE) {
        p->n_sends = 2;
    }
}

static void strike(struct fault_conn *c, struct parcel *p, const struct fault *fault)
{
    switch (fault->kind) {
    case FAULT_DROP:
    case FAULT_LIE:
        parcel_over(p, TD_OK);
        break;
    case FAULT_FAIL:
        c->is_broken = true;
        parcel_over(p, TD_ERR_PEER_LOST);
        break;
    case FAULT_DELAY:
        p->due_ns = clock_now(c->w->clock) + fault->delay_ns;
        parcels_push(&c->held, p);
        break;
    case FAULT_REORDER:
        if (c->overtaken || c->held.head) {
            forward(c, p);
            break;
        }
        p->due_ns = clock_now(c->w->clock) + REORDER_MS * NS_PER_MS;
        c->overtaken = p;
        break;
    default:
        damage(p, fault);
        forward(c, p);
    }
}

/* --------------------------------------------------------------------- calls */

static struct fault_conn *conn_new(struct fault_wire *w)
{
    struct fault_conn *c = mem_zalloc(sizeof(*c));
    wrap_conn_init(&w->wrap, &c->wrap);
    c->w = w;
    parcels_init(&c->held);
    return c;
}

static struct wire_conn *fault_connect(struct wire *base, const char *address, uint32_t attempt, void *user)
{
    struct fault_wire *w = (struct fault_wire *)base;
    struct fault_conn *c = conn_new(w);
    struct fault fault = faults_draw(w->faults, FAULT_WIRE_CONNECT);
    c->wrap.base.user = user;
    if (fault.kind == FAULT_FAIL)
        c->is_broken = true;
    else
        c->wrap.inner = wire_connect(w->wrap.inner, address, attempt, c);
    if (fault.kind == FAULT_DELAY)
        c->open_due_ns = clock_now(w->clock) + fault.delay_ns;
    return &c->wrap.base;
}

static void fault_send(struct wire_conn *base, const void *header, uint32_t header_len, const void *payload,
                       uint64_t payload_len, wire_done_fn *done, void *arg)
{
    struct fault_conn *c = (struct fault_conn *)base;
    struct fault fault = faults_draw(c->w->faults, payload_len ? FAULT_WIRE_PAYLOAD : FAULT_WIRE_MESSAGE);
    bool is_plain =
        !fault.kind && !c->held.head && !c->overtaken && c->wrap.inner && !c->is_broken && !c->wrap.is_closing;
    if (is_plain) {
        wire_send(c->wrap.inner, header, header_len, payload, payload_len, done, arg);
        return;
    }
    struct parcel *p = parcel_new(c, header, header_len, payload, payload_len, done, arg);
    if (c->wrap.is_closing || !c->wrap.inner)
        parcel_over(p, TD_ERR_PEER_LOST);
    else if (fault.kind)
        strike(c, p, &fault);
    else
        forward(c, p);
}

static void fault_close(struct wire_conn *base)
{
    struct fault_conn *c = (struct fault_conn *)base;
    if (c->wrap.is_closing)
        return;
    c->wrap.is_closing = true;
    for (struct parcel *p; (p = parcels_pop(&c->held));)
        parcel_over(p, TD_ERR_CANCELLED);
    if (c->overtaken)
        parcel_over(c->overtaken, TD_ERR_CANCELLED);
    c->overtaken = NULL;
    if (c->wrap.inner)
        wire_close(c->wrap.inner);
}

static void fault_trust(struct wire_conn *base)
{
    struct fault_conn *c = (struct fault_conn *)base;
    if (c->wrap.inner && !c->wrap.is_closing)
        wire_trust(c->wrap.inner);
}

/* -------------------------------------------------------------------- events */

static void on_accept(void *user, struct wire_conn *inner)
{
    struct fault_wire *w = user;
    wrap_accept(&w->wrap, &conn_new(w)->wrap, inner);
}

static void on_open(void *user)
{
    struct fault_conn *c = user;
    c->is_open_held = c->open_due_ns != 0;
    if (!c->is_open_held)
        wrap_on_open(&c->wrap);
}

static struct fault_early **early_at(struct fault_conn *c, const void *token)
{
    struct fault_early **at = &c->early;
    while (*at && (*at)->token != token)
        at = &(*at)->next;
    return at;
}

static void *on_payload(void *user, const uint8_t *header, uint32_t header_len, uint64_t payload_len, void **token_out)
{
    struct fault_conn *c = user;
    void *to = wrap_on_payload(&c->wrap, header, header_len, payload_len, token_out);
    if (!to || faults_draw(c->w->faults, FAULT_WIRE_ARRIVAL).kind != FAULT_EARLY)
        return to;
    struct fault_early *e = mem_zalloc(sizeof(*e) + payload_len);
    e->token = *token_out;
    e->next = c->early;
    c->early = e;
    return e->elsewhere;
}

static void land(void *user, void *token, void *to, const void *from, uint64_t len_bytes)
{
    struct fault_conn *c = user;
    if (!*early_at(c, token))
        wrap_land(&c->wrap, token, to, from, len_bytes);
}

static void on_payload_done(void *user, void *token, enum td_status status)
{
    struct fault_conn *c = user;
    struct fault_early **at = early_at(c, token), *e = *at;
    if (e)
        *at = e->next;
    free(e);
    wrap_on_payload_done(&c->wrap, token, status);
}

/* -------------------------------------------------------------------- the turn */

static bool tell_over(struct fault_wire *w)
{
    bool any = false;
    for (struct parcel *p; (p = parcels_pop(&w->over)); any = true) {
        if (p->done)
            p->done(p->arg, p->status);
        p->conn->n_parcels--;
        free(p->copy);
        free(p);
    }
    return any;
}

static bool release_due(struct fault_conn *c, uint64_t now)
{
    bool any = false;
    /* due_ns 0: it only waited behind another one. */
    for (struct parcel *p; (p = c->held.head) && p->due_ns <= now; any = true)
        parcel_send(parcels_pop(&c->held));
    if (c->overtaken && c->overtaken->due_ns <= now) {
        parcel_send(c->overtaken);
        c->overtaken = NULL;
        any = true;
    }
    if (c->is_open_held && c->open_due_ns <= now) {
        c->is_open_held = false;
        wrap_on_open(&c->wrap);
        any = true;
    }
    return any;
}

static bool conn_turn(struct fault_conn *c, uint64_t now)
{
    if (c->wrap.is_closing)
        return false;
    bool any = c->is_broken && !c->wrap.error_told;
    if (any)
        wrap_tell_error(&c->wrap, TD_ERR_PEER_LOST);
    return any | (!c->wrap.is_closing && release_due(c, now));
}

static bool is_over(const struct wrap_conn *c)
{
    return !((const struct fault_conn *)c)->n_parcels;
}

static bool fault_progress(struct wire *base)
{
    struct fault_wire *w = (struct fault_wire *)base;
    uint64_t now = clock_now(w->clock);
    struct wrap_conn *c;
    bool any = wire_progress(w->wrap.inner);
    LIST_FOREACH (c, &w->wrap.conns, in_wire)
        any |= conn_turn((struct fault_conn *)c, now);
    any |= tell_over(w);
    return any | wrap_reap(&w->wrap, is_over);
}

static uint64_t next_due(const struct fault_wire *w)
{
    uint64_t due = w->over.head ? 0 : UINT64_MAX;
    const struct wrap_conn *at;
    LIST_FOREACH (at, &w->wrap.conns, in_wire) {
        const struct fault_conn *c = (const struct fault_conn *)at;
        const uint64_t times[] = {
            c->held.head ? c->held.head->due_ns : UINT64_MAX, c->overtaken ? c->overtaken->due_ns : UINT64_MAX,
            c->is_open_held ? c->open_due_ns : UINT64_MAX,
            (c->is_broken && !c->wrap.error_told) || (c->wrap.is_closing && !c->wrap.inner) ? 0 : UINT64_MAX};
        for (int i = 0; i < 4; i++)
            due = times[i] < due ? times[i] : due;
    }
    return due;
}

static int fault_arm(struct wire *base)
{
    struct fault_wire *w = (struct fault_wire *)base;
    uint64_t now = clock_now(w->clock), due = next_due(w);
    int ms = wire_arm(w->wrap.inner);
    if (due <= now)
        return 0;
    if (due == UINT64_MAX)
        return ms;
    int due_ms = (int)((due - now) / NS_PER_MS) + 1;
    return ms < 0 || due_ms < ms ? due_ms : ms;
}

static void fault_transport(struct wire_conn *base, char *out, uint32_t out_bytes)
{
    struct fault_conn *c = (struct fault_conn *)base;
    if (c->wrap.inner)
        wire_transport(c->wrap.inner, out, out_bytes);
    else
        snprintf(out, out_bytes, "none");
}

static uint64_t fault_part_bytes(struct wire_conn *base)
{
    struct fault_conn *c = (struct fault_conn *)base;
    return c->wrap.inner ? wire_part_bytes(c->wrap.inner) : 0;
}

static void fault_free(struct wire *base)
{
    struct fault_wire *w = (struct fault_wire *)base;
    assert(LIST_EMPTY(&w->wrap.conns) && !w->over.head);
    wire_free(w->wrap.inner);
    free(w);
}

static const struct wire_ops OPS = {
    .connect = fault_connect,
    .send = fault_send,
    .close = fault_close,
    .trust = fault_trust,
    .progress = fault_progress,
    .arm = fault_arm,
    .transport = fault_transport,
    .part_bytes = fault_part_bytes,
    .free = fault_free,
};

enum td_status wire_fault_open(const struct wire_config *config, wire_open_fn *open_inner, struct faults *faults,
                               const struct clock *clock, struct wire **out, struct td_error *error_out)
{
    struct fault_wire *w = mem_zalloc(sizeof(*w));
    struct wire_config inner = *config;
    inner.events = (struct wire_events){.user = w,
                                        .on_accept = on_accept,
                                        .on_open = on_open,
                                        .on_message = wrap_on_message,
                                        .on_payload = on_payload,
                                        .land = land,
                                        .on_payload_done = on_payload_done,
                                        .on_transport = wrap_on_transport,
                                        .on_error = wrap_on_error,
                                        .on_closed = wrap_on_closed};
    enum td_status s = open_inner(&inner, &w->wrap.inner, error_out);
    if (s) {
        free(w);
        return s;
    }
    w->wrap.base = (struct wire){.ops = &OPS, .events = config->events, .log = config->log, .fd = w->wrap.inner->fd};
    memcpy(w->wrap.base.address, w->wrap.inner->address, sizeof(w->wrap.base.address));
    w->faults = faults;
    w->clock = clock;
    parcels_init(&w->over);
    *out = &w->wrap.base;
    return TD_OK;
}
