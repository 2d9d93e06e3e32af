/*
 * The holder's side: leases, and the parts that readers have asked for.
 *
 * A reader is bound by its first PULL_OPEN and is told of every announcement from then on. A reader that asks
 * before the grant is told "not yet", remembered, and bound when the lease is granted. (It asks again all the
 * same, because only EARLY_KEPT readers are remembered.)
 *
 * What a reader asks for is queued on its connection and sent part by part: checksum first, then the bytes
 * straight from the page. The queue is drained within a credit of bytes in flight, and by at most TURN_BYTES
 * a turn, so that making checksums never keeps the thread from its heartbeats.
 *
 * A lease ends in one place, lease_settle: when it is DRAINING and none of its parts is in flight. The pages
 * of a lease are in doubt if one of its parts was cut off by a forced close before the reader had released
 * the lease.
 */
#include "transfer/impl.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "proto/wire/checksum.h"

/* Requests that one reader may have queued; more is a violation of the protocol. */
enum { UNITS_QUEUED_MAX = 65536 };
/* Bytes sent per connection and turn, rounded up to a part. */
#define TURN_BYTES (4u << 20)

/* ---------------------------------------------------------------- life cycle */

static struct lease *lease_find(struct xfer *x, struct xfer_id id)
{
    return (struct lease *)idmap_find(&x->leases_by_id, id);
}

static void lease_set_state(struct lease *l, enum lease_state to)
{
    bool legal =
        (l->state == LEASE_OPEN && to == LEASE_COMPLETE) || (l->state != LEASE_DRAINING && to == LEASE_DRAINING);
    assert(legal);
    l->state = to;
}

static enum xfer_msg_reason reason_of(enum td_status end)
{
    if (end == TD_ERR_DEADLINE)
        return REFUSE_EXPIRED;
    return end == TD_ERR_CANCELLED ? REFUSE_CANCELLED : REFUSE_STALE;
}

/* A reader that asks for this lease later is told why it ended. The ring keeps the last ENDED_KEPT leases. */
static void remember_ended(struct xfer *x, struct xfer_id id, enum td_status end)
{
    struct idnode *same = idmap_find(&x->ended_by_id, id);
    if (same)
        idmap_remove(&x->ended_by_id, same);
    struct ended *e = &x->ended[x->ended_at++ % ENDED_KEPT];
    idmap_remove(&x->ended_by_id, &e->node);
    e->reason = reason_of(end);
    idmap_add(&x->ended_by_id, &e->node, id);
}

/* Ends a lease that is DRAINING as soon as none of its parts is in flight. Frees l: callers do not touch
 * it afterwards. The id is free again when on_end is called. */
static void lease_settle(struct xfer *x, struct lease *l)
{
    if (l->state != LEASE_DRAINING || l->in_flight)
        return;
    idmap_remove(&x->leases_by_id, &l->node);
    LIST_REMOVE(l, in_xfer);
    atomic_fetch_sub(&x->counters.leases_open, 1);
    remember_ended(x, l->node.id, l->end_status);
    log_debug(x->config.log, "lease ended xfer=%llx-%llu status=%s in_doubt=%d",
              (unsigned long long)l->node.id.incarnation, (unsigned long long)l->node.id.counter,
              td_status_name(l->end_status), l->in_doubt);
    l->params.on_end(l->params.user, l->node.id, l->end_status, l->in_doubt);
    free(l->pages);
    free(l->ready);
    free(l->units);
    free(l);
}

/* Removes the lease's queued units. They hold a pointer to the lease but are not counted in in_flight, so
 * they must go before lease_settle may free it. */
static void drop_units(struct conn *c, const struct lease *l)
{
    struct send_unit **at = &c->out_units;
    while (*at) {
        struct send_unit *u = *at;
        if (u->lease != l) {
            at = &u->next;
            continue;
        }
        *at = u->next;
        c->n_out_units--;
        free(u);
    }
    c->out_units_tail = at;
}

/* Stops sending and ends the lease with this status, now or when the last part in flight is done. The
 * reader is told, unless its release was the reason. May free l. */
static void lease_drain(struct xfer *x, struct lease *l, enum td_status why)
{
    if (l->state == LEASE_DRAINING)
        return;
    lease_set_state(l, LEASE_DRAINING);
    l->end_status = why;
    struct conn *c = l->reader;
    if (c) {
        drop_units(c, l);
        if (!l->released && conn_is_up(c)) {
            uint8_t out[WIRE_HEADER_MAX];
            conn_say(c, out, xfer_msg_put_refuse(out, l->node.id, reason_of(why)));
        }
        l->in_doubt |= why == TD_ERR_PEER_LOST && l->in_flight && !l->released;
        l->reader = NULL;
    }
    lease_settle(x, l);
}

void lease_conn_lost(struct conn *c)
{
    for (uint32_t i = 0; i < EARLY_KEPT; i++)
        if (c->x->early[i].conn == c)
            c->x->early[i].conn = NULL;
    struct lease *l, *next;
    LIST_FOREACH_SAFE (l, &c->x->leases, in_xfer, next) {
        if (l->reader == c)
            lease_drain(c->x, l, TD_ERR_PEER_LOST);
    }
}

/* The leases granted to a connected process that never pulled. Nothing of them was read, so nothing is in
 * doubt. */
void lease_peer_lost(struct xfer *x, uint64_t incarnation)
{
    struct lease *l, *next;
    LIST_FOREACH_SAFE (l, &x->leases, in_xfer, next) {
        if (!l->reader && l->params.reader_is_up && l->params.reader_incarnation == incarnation)
            lease_drain(x, l, TD_ERR_PEER_LOST);
    }
}

void lease_cancel_all(struct xfer *x)
{
    struct lease *l, *next;
    LIST_FOREACH_SAFE (l, &x->leases, in_xfer, next) {
        lease_drain(x, l, TD_ERR_CANCELLED);
    }
}

/* Ends the lease if it has expired. May free l. */
void lease_timer(struct xfer *x, struct lease *l)
{
    if (l->state == LEASE_DRAINING)
        return;
    if (x->now_ns >= l->expires_ns)
        lease_drain(x, l, TD_ERR_DEADLINE);
    else
        due_at(x, l->expires_ns);
}

/* The reader showed that it still wants the lease: the time to expiry starts anew. */
static void lease_touch(struct xfer *x, struct lease *l)
{
    l->expires_ns = x->now_ns + l->params.duration_ns;
    due_at(x, l->expires_ns);
}

/* ------------------------------------------------------ what the holder says */

struct grant_command {
    struct command head;
    struct xfer_lease_params params;
};

static void run_grant(struct xfer *x, struct command *command)
{
    const struct xfer_lease_params *p = &((struct grant_command *)command)->params;
    if (x->stopping || lease_find(x, p->id)) {
        p->on_end(p->user, p->id, x->stopping ? TD_ERR_CANCELLED : TD_ERR_INVALID, false);
        return;
    }
    struct lease *l = mem_zalloc(sizeof(*l));
    l->params = *p;
    LIST_INSERT_HEAD(&x->leases, l, in_xfer);
    idmap_add(&x->leases_by_id, &l->node, p->id);
    atomic_fetch_add(&x->counters.leases_open, 1);
    lease_touch(x, l);
    if (p->reader_is_up && !peer_is_up(x, p->reader_incarnation)) {
        lease_drain(x, l, TD_ERR_PEER_LOST);
        return;
    }
    struct early *e = (struct early *)idmap_find(&x->early_by_id, p->id);
    if (!e)
        return;
    idmap_remove(&x->early_by_id, &e->node);
    /* Either the reader has given the lease up before it was granted, or it is bound now. The incarnation
     * that it meant was checked when its PULL_OPEN came, hence the 0. */
    if (p->reader_is_up && e->released_by == p->reader_incarnation)
        lease_drain(x, l, TD_ERR_CANCELLED);
    else if (e->conn)
        lease_on_open(e->conn, p->id, 0);
    e->conn = NULL;
}

void xfer_lease_grant(struct xfer *x, const struct xfer_lease_params *params)
{
    struct grant_command *c = mem_zalloc(sizeof(*c));
    c->head.run = run_grant;
    c->params = *params;
    command_push(x, &c->head);
}

/* Sends one unit as ANNOUNCE messages of at most XFER_MSG_UNIT_PAGES pages. */
static void tell_unit(struct lease *l, const struct lease_unit *u)
{
    struct xfer_msg_unit m = {.id = l->node.id, .layer_begin = u->layer_begin, .layer_end = u->layer_end};
    for (uint32_t done = 0; done < u->n; done += m.n) {
        m.first = u->first + done;
        m.n = (uint16_t)(u->n - done < XFER_MSG_UNIT_PAGES ? u->n - done : XFER_MSG_UNIT_PAGES);
        for (uint32_t i = 0; i < m.n; i++)
            m.generations[i] = l->pages[m.first + i].generation;
        uint8_t out[WIRE_HEADER_MAX];
        conn_say(l->reader, out, xfer_msg_put_unit(out, MSG_ANNOUNCE, &m));
    }
}

static void tell_finish(struct lease *l)
{
    uint8_t out[WIRE_HEADER_MAX];
    conn_say(l->reader, out, xfer_msg_put_finish(out, l->node.id, l->n_final, l->tail, l->tail_len));
}

struct announce_command {
    struct command head;
    struct xfer_id id;
    struct lease_unit unit;
    struct xfer_page pages[];
};

/* Makes room for pages [0, n), with zeroed state. */
static void lease_reserve(struct xfer *x, struct lease *l, uint32_t n)
{
    if (n > l->cap_pages) {
        uint32_t cap = l->cap_pages ? l->cap_pages : 16;
        while (cap < n)
            cap *= 2;
        l->pages = mem_resize(l->pages, cap, sizeof(l->pages[0]));
        l->ready = mem_resize(l->ready, (size_t)cap * x->words, sizeof(l->ready[0]));
        memset(l->pages + l->cap_pages, 0, (cap - l->cap_pages) * sizeof(l->pages[0]));
        memset(l->ready + (size_t)l->cap_pages * x->words, 0, (size_t)(cap - l->cap_pages) * x->words * 8);
        l->cap_pages = cap;
    }
    if (n > l->n_pages)
        l->n_pages = n;
}

static void run_announce(struct xfer *x, struct command *command)
{
    struct announce_command *c = (struct announce_command *)command;
    struct lease *l = lease_find(x, c->id);
    if (!l || l->state == LEASE_DRAINING)
        return; /* the lease ended meanwhile, and its owner was told or will be */
    assert(l->state == LEASE_OPEN);
    lease_reserve(x, l, c->unit.first + c->unit.n);
    for (uint32_t i = 0; i < c->unit.n; i++) {
        uint32_t at = c->unit.first + i;
        assert(!l->pages[at].data || l->pages[at].data == c->pages[i].data);
        l->pages[at] = c->pages[i];
        bits_set(l->ready + (size_t)at * x->words, c->unit.layer_begin, c->unit.layer_end);
    }
    if (l->reader) {
        tell_unit(l, &c->unit);
        return;
    }
    l->units = MEM_ROOM(l->units, l->n_units, l->cap_units, 16);
    l->units[l->n_units++] = c->unit;
}

void xfer_lease_announce(struct xfer *x, struct xfer_id id, uint32_t first_index, const struct xfer_page *pages,
                         uint32_t n_pages, uint16_t layer_begin, uint16_t layer_end)
{
    if (!n_pages)
        return;
    assert(layer_begin < layer_end && layer_end <= x->layout.n_layers);
    assert(first_index < x->pages_max && n_pages <= x->pages_max - first_index);
    for (uint32_t i = 0; i < n_pages; i++)
        assert(xfer_in_arena(x, pages[i].data));
    struct announce_command *c = mem_zalloc(sizeof(*c) + n_pages * sizeof(pages[0]));
    c->head.run = run_announce;
    c->id = id;
    c->unit = (struct lease_unit){first_index, n_pages, layer_begin, layer_end};
    memcpy(c->pages, pages, n_pages * sizeof(pages[0]));
    command_push(x, &c->head);
}

struct finish_command {
    struct command head;
    struct xfer_id id;
    uint32_t n_pages, tail_len;
    uint8_t tail[XFER_MSG_TAIL_MAX];
};

static void run_finish(struct xfer *x, struct command *command)
{
    struct finish_command *c = (struct finish_command *)command;
    struct lease *l = lease_find(x, c->id);
    if (!l || l->state == LEASE_DRAINING)
        return;
    lease_set_state(l, LEASE_COMPLETE);
    l->n_final = c->n_pages;
    l->tail_len = c->tail_len;
    memcpy(l->tail, c->tail, c->tail_len);
    if (l->reader)
        tell_finish(l);
}

void xfer_lease_finish(struct xfer *x, struct xfer_id id, uint32_t n_pages, const void *tail, uint32_t tail_len_bytes)
{
    assert(tail_len_bytes <= XFER_MSG_TAIL_MAX && n_pages <= x->pages_max);
    struct finish_command *c = mem_zalloc(sizeof(*c));
    c->head.run = run_finish;
    c->id = id;
    c->n_pages = n_pages;
    c->tail_len = tail_len_bytes;
    if (tail_len_bytes)
        memcpy(c->tail, tail, tail_len_bytes);
    command_push(x, &c->head);
}

struct lease_cancel_command {
    struct command head;
    struct xfer_id id;
};

static void run_cancel(struct xfer *x, struct command *command)
{
    struct lease *l = lease_find(x, ((struct lease_cancel_command *)command)->id);
    if (l)
        lease_drain(x, l, TD_ERR_CANCELLED);
}

void xfer_lease_cancel(struct xfer *x, struct xfer_id id)
{
    struct lease_cancel_command *c = mem_zalloc(sizeof(*c));
    c->head.run = run_cancel;
    c->id = id;
    command_push(x, &c->head);
}

/* ------------------------------------------------------ what the reader says */

static void refuse_reader(struct conn *c, struct xfer_id id, enum xfer_msg_reason reason)
{
    struct counters *n = &c->x->counters;
    atomic_fetch_add(reason == REFUSE_NOT_YET ? &n->not_yet : &n->refused_stale, 1);
    uint8_t out[WIRE_HEADER_MAX];
    conn_say(c, out, xfer_msg_put_refuse(out, id, reason));
}

/* Refuses with the reason for which the lease ended; with else_reason if no lease of this id is
 * remembered. */
static void refuse_ended(struct conn *c, struct xfer_id id, enum xfer_msg_reason else_reason)
{
    const struct ended *e = (const struct ended *)idmap_find(&c->x->ended_by_id, id);
    refuse_reader(c, id, e ? e->reason : else_reason);
}

/*
 * From here on the lease belongs to this connection: it is told what was announced so far, in the order of
 * the announcements, then the finish if it has come. A lease is never bound again: when the connection is
 * lost, the lease ends.
 */
static void bind_reader(struct lease *l, struct conn *c)
{
    l->reader = c;
    l->reader_incarnation = c->incarnation;
    for (uint32_t i = 0; i < l->n_units; i++)
        tell_unit(l, &l->units[i]);
    l->n_units = 0;
    if (l->state == LEASE_COMPLETE)
        tell_finish(l);
}

/* The ring keeps EARLY_KEPT readers; the oldest is forgotten. */
static void remember_early(struct conn *c, struct xfer_id id)
{
    struct xfer *x = c->x;
    struct early *e = (struct early *)idmap_find(&x->early_by_id, id);
    if (!e) {
        e = &x->early[x->early_at++ % EARLY_KEPT];
        idmap_remove(&x->early_by_id, &e->node);
        idmap_add(&x->early_by_id, &e->node, id);
    }
    e->conn = c;
    e->released_by = 0;
}

/* A reader asks for a lease (or repeats this to extend it). It is bound if the lease is free and meant for
 * it. */
void lease_on_open(struct conn *c, struct xfer_id id, uint64_t holder_incarnation)
{
    struct xfer *x = c->x;
    if (holder_incarnation && holder_incarnation != x->config.incarnation) {
        refuse_reader(c, id, REFUSE_STALE);
        return;
    }
    struct lease *l = lease_find(x, id);
    if (!l) {
        if (!idmap_find(&x->ended_by_id, id))
            remember_early(c, id);
        refuse_ended(c, id, REFUSE_NOT_YET);
        return;
    }
    bool is_other = (l->params.reader_incarnation && l->params.reader_incarnation != c->incarnation) ||
                    (l->reader && l->reader != c);
    if (l->state == LEASE_DRAINING || is_other) {
        refuse_reader(c, id, l->state == LEASE_DRAINING ? reason_of(l->end_status) : REFUSE_STALE);
        return;
    }
    lease_touch(x, l);
    if (!l->reader)
        bind_reader(l, c);
}

/* Whether every layer asked for was announced, with these generations. */
static bool is_ready(const struct xfer *x, const struct lease *l, const struct xfer_msg_unit *u)
{
    if (u->first + u->n > l->n_pages || u->layer_end > x->layout.n_layers)
        return false;
    for (uint32_t i = 0; i < u->n; i++)
        if (l->pages[u->first + i].generation != u->generations[i] ||
            !bits_all(l->ready + (size_t)(u->first + i) * x->words, u->layer_begin, u->layer_end))
            return false;
    return true;
}

/* Queues what a bound reader asks for. Nothing is sent from here, so that one turn's work stays bounded
 * (lease_pump). */
void lease_on_pull(struct conn *c, const struct xfer_msg_unit *u)
{
    struct xfer *x = c->x;
    struct lease *l = lease_find(x, u->id);
    if (!l || l->reader != c) {
        /* If it is draining, the reader was told why when that began. */
        if (!l || l->state != LEASE_DRAINING)
            refuse_ended(c, u->id, REFUSE_UNKNOWN);
        return;
    }
    lease_touch(x, l);
    if (!is_ready(x, l, u)) {
        log_warn(x->config.log, "pull names what is not announced peer=%s first=%u n=%u layers=%u-%u", c->name,
                 u->first, u->n, u->layer_begin, u->layer_end);
        refuse_reader(c, u->id, REFUSE_STALE);
        return;
    }
    struct fault fault = faults_draw(x->config.faults, FAULT_LEASE);
    if (fault.kind == FAULT_EXPIRE) {
        lease_drain(x, l, TD_ERR_DEADLINE);
        return;
    }
    if (c->n_out_units >= UNITS_QUEUED_MAX) {
        log_warn(x->config.log, "too many pulls queued peer=%s", c->name);
        conn_close(c, TD_ERR_PROTOCOL);
        return;
    }
    struct send_unit *s = mem_zalloc(sizeof(*s));
    *s = (struct send_unit){
        .lease = l, .first = u->first, .n = u->n, .layer_begin = u->layer_begin, .fault = fault.kind};
    s->layer_end = u->layer_end;
    s->part_layers = u->part_layers ? u->part_layers : (uint16_t)(u->layer_end - u->layer_begin);
    s->layer_pos = u->layer_begin;
    *c->out_units_tail = s;
    c->out_units_tail = &s->next;
    c->n_out_units++;
}

/* The reader is done with the lease (status TD_OK) or gives it up. `released` is set before the drain: the
 * reader uses nothing of the lease any more, so a part that is cut off after this leaves no doubt. */
void lease_on_release(struct conn *c, struct xfer_id id, enum td_status status)
{
    struct lease *l = lease_find(c->x, id);
    struct early *e = (struct early *)idmap_find(&c->x->early_by_id, id);
    if (e && e->conn == c) {
        e->conn = NULL;
        e->released_by = c->incarnation;
    }
    if (!l || l->reader != c)
        return;
    bool is_ok = status == TD_OK && l->state == LEASE_COMPLETE;
    l->released = true;
    lease_drain(c->x, l, is_ok ? TD_OK : TD_ERR_CANCELLED);
}

/* ------------------------------------------------------------------- sending */

struct lease_part { /* one part given to wire_send; keeps its lease and connection alive until part_sent */
    struct conn *conn;
    struct lease *lease;
    uint64_t len;
    bool is_last; /* the part holds the page's last layer; pages are counted by it */
};

/* Called once per part: the wire reads its bytes no more. May free the lease. */
static void part_sent(void *arg, enum td_status status)
{
    struct lease_part *p = arg;
    struct lease *l = p->lease;
    struct xfer *x = p->conn->x;
    p->conn->out_bytes -= p->len;
    l->in_flight--;
    if (!status) {
        /* The bytes were taken, so the peer lives. (With TCP the kernel's buffers took them, which are
         * bounded.) */
        p->conn->heard_ns = x->now_ns;
        atomic_fetch_add(&x->counters.bytes_out, p->len);
        atomic_fetch_add(&x->counters.pages_out, p->is_last);
    } else if (!l->released) {
        l->in_doubt = true;
    }
    free(p);
    lease_settle(x, l);
}

static uint16_t part_end(const struct send_unit *u)
{
    uint32_t end = (uint32_t)u->layer_pos + u->part_layers;
    return end < u->layer_end ? (uint16_t)end : u->layer_end;
}

/* Moves the cursor to the next part. True if the last part was the unit's last. */
static bool move_cursor(struct send_unit *u)
{
    u->layer_pos = part_end(u);
    if (u->layer_pos < u->layer_end)
        return false;
    u->layer_pos = u->layer_begin;
    return ++u->pos == u->n;
}

/* Injected fault: the same part of another page. */
static const uint8_t *other_page(const struct xfer *x, const struct xfer_page *page, const uint8_t *bytes)
{
    uint64_t page_bytes = x->layer_bytes * x->layout.n_layers;
    const uint8_t *data = page->data, *first = x->config.arena;
    return data == first ? bytes + page_bytes : first + (bytes - data);
}

/* Sums and sends the part under the cursor; returns its bytes. The checksum is made now, not at the
 * announcement: the page can't change meanwhile. */
static uint64_t send_part(struct conn *c, const struct send_unit *u)
{
    struct xfer *x = c->x;
    struct lease *l = u->lease;
    uint32_t index = u->first + u->pos;
    const struct xfer_page *page = &l->pages[index];
    uint16_t begin = u->layer_pos, end = part_end(u);
    const uint8_t *bytes = (const uint8_t *)page->data + begin * x->layer_bytes;
    struct lease_part *p = mem_zalloc(sizeof(*p));
    *p = (struct lease_part){c, l, (uint64_t)(end - begin) * x->layer_bytes, end == x->layout.n_layers};
    uint32_t generation = page->generation - (u->fault == FAULT_STALE);
    const struct checksum_identity identity = {.id_a = l->node.id.incarnation,
                                               .id_b = l->node.id.counter,
                                               .index = index,
                                               .generation = generation,
                                               .part_begin = begin,
                                               .part_end = end};
    const struct xfer_msg_data m = {.id = l->node.id,
                                    .index = index,
                                    .generation = generation,
                                    .layer_begin = begin,
                                    .layer_end = end,
                                    .checksum = checksum_bytes(&identity, bytes, p->len)};
    uint8_t out[WIRE_HEADER_MAX];
    uint32_t n = xfer_msg_put_data(out, &m);
    uint64_t len = p->len;
    l->in_flight++;
    c->out_bytes += len;
    if (u->fault == FAULT_REUSE)
        bytes = other_page(x, page, bytes);
    wire_send(c->wire, out, n, bytes, len, part_sent, p);
    return len;
}

/* At least one part may be in flight, even if it is larger than the credit. */
bool lease_pump(struct conn *c)
{
    uint64_t turn = 0, max = c->x->config.max_inflight_bytes;
    while (c->out_units && turn < TURN_BYTES) {
        struct send_unit *u = c->out_units;
        uint64_t len = (uint64_t)(part_end(u) - u->layer_pos) * c->x->layer_bytes;
        if (c->out_bytes && c->out_bytes + len > max)
            break;
        turn += send_part(c, u);
        if (!move_cursor(u))
            continue;
        c->out_units = u->next;
        if (!c->out_units)
            c->out_units_tail = &c->out_units;
        c->n_out_units--;
        free(u);
    }
    return turn != 0;
}
