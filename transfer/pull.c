/*
 * The reader's side: pulls.
 *
 *   WAITING for the connection -> OPENING: has asked for the lease; after "not yet" asks again -> ACTIVE
 *   -> DRAINING -> ended
 *
 * Announcements queue units, except of pages that the reader has already. Units are asked for in parts,
 * within the connection's credit; the pulls of a connection take turns.
 *
 * Each layer of each page has three bits: announced, asked for, landed. Each is set at most once, in that
 * order, so whatever a peer sends can land neither twice nor where nothing was asked for. A payload that is
 * not expected is discarded by the transport. A part counts only after its checksum agrees.
 *
 * A pull ends in one place, pull_settle: when it is DRAINING and no payload is landing in its pages. Parts
 * that were asked for but have not begun to arrive need not be waited for: when they come, pull_of does not
 * find the pull and they are discarded.
 *
 * Handlers walk x->pulls while they send. This is safe because wire_send never calls back (transfer/wire.h),
 * and pull_drain frees at most the pull that it is given.
 */
#include "transfer/impl.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "proto/wire/checksum.h"

#define PART_BYTES (256u << 10) /* a part is still in the second-level cache when it is summed */
#define REOPEN_MIN (2 * NS_PER_MS)
#define REOPEN_MAX (50 * NS_PER_MS)

enum bit_set { ANNOUNCED, ASKED, LANDED, N_BIT_SETS };

/* The bitmap of layers of one page, for one of the three sets. */
static uint64_t *page_bits(const struct xfer *x, const struct pull *p, uint32_t index, enum bit_set set)
{
    return p->bits + ((size_t)index * N_BIT_SETS + set) * x->words;
}

static uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static struct pull *pull_find(struct xfer *x, struct xfer_id id)
{
    return (struct pull *)idmap_find(&x->pulls_by_id, id);
}

/* The pull that this connection may speak of. NULL if it uses another connection, or is ending, or has
 * ended. */
static struct pull *pull_of(struct conn *c, struct xfer_id id)
{
    struct pull *p = pull_find(c->x, id);
    return p && p->conn == c && p->state != PULL_DRAINING ? p : NULL;
}

static void pull_set_state(struct pull *p, enum pull_state to)
{
    assert(p->state != PULL_DRAINING && to > p->state);
    p->state = to;
}

/* ------------------------------------------------------------------- the end */

/* The id is free again and no pointer to p is left in any list, so on_end may start another pull of the
 * same id. p->target is alive because n_pulls still counts this pull. */
static void tell_end(struct xfer *x, struct pull *p)
{
    bool is_ok = p->end_status == TD_OK;
    struct xfer_pull_result r = {.status = p->end_status,
                                 .n_pages = is_ok ? p->n_final : p->n_prefix,
                                 .tail = p->tail,
                                 .tail_len_bytes = p->tail_len,
                                 .bytes = p->bytes,
                                 .first_announce_ns = p->first_announce_ns,
                                 .last_announce_ns = p->last_announce_ns,
                                 .done_ns = absence_of(&x->absence, clock_now(x->config.clock))};
    atomic_fetch_sub(&x->counters.pulls_open, 1);
    atomic_fetch_add(is_ok ? &x->counters.pulls_ok : &x->counters.pulls_failed, 1);
    log_debug(x->config.log, "pull ended xfer=%llx-%llu address=%s status=%s pages=%u bytes=%llu",
              (unsigned long long)p->node.id.incarnation, (unsigned long long)p->node.id.counter, p->target->address,
              td_status_name(r.status), r.n_pages, (unsigned long long)r.bytes);
    p->params.on_end(p->params.user, p->node.id, &r);
}

/* Ends a pull that is DRAINING as soon as nothing is arriving. Frees p: callers do not touch it
 * afterwards. */
static void pull_settle(struct xfer *x, struct pull *p)
{
    if (p->state != PULL_DRAINING || p->arriving)
        return;
    idmap_remove(&x->pulls_by_id, &p->node);
    LIST_REMOVE(p, in_xfer);
    tell_end(x, p);
    p->target->n_pulls--;
    due_at(x, x->now_ns); /* its target may not be needed any more */
    free(p->pages);
    free(p->places);
    free(p->bits);
    free(p->units);
    free(p);
}

/*
 * Stops asking and ends the pull with this status, now or when the last arriving part has ended. The credit
 * of parts that have not begun to arrive is given back at once, because they will be discarded. May free p.
 */
static void pull_drain(struct xfer *x, struct pull *p, enum td_status why, bool tell_holder)
{
    if (p->state == PULL_DRAINING)
        return;
    struct conn *c = p->conn;
    if (c) {
        c->in_bytes -= p->asked_bytes;
        p->asked_bytes = 0;
        if (tell_holder && conn_is_up(c)) {
            uint8_t out[WIRE_HEADER_MAX];
            conn_say(c, out, xfer_msg_put_release(out, p->node.id, why));
        }
    }
    pull_set_state(p, PULL_DRAINING);
    p->end_status = why;
    p->conn = NULL;
    pull_settle(x, p);
}

/* Done when the holder has said how many pages there are, and all of them are in place. */
static void pull_finish_if_done(struct xfer *x, struct pull *p)
{
    if (p->state == PULL_ACTIVE && p->finished && p->n_complete + least(p->params.n_have, p->n_final) == p->n_final)
        pull_drain(x, p, TD_OK, true);
}

void pull_conn_lost(struct conn *c)
{
    struct pull *p, *next;
    LIST_FOREACH_SAFE (p, &c->x->pulls, in_xfer, next) {
        if (p->conn == c)
            pull_drain(c->x, p, TD_ERR_PEER_LOST, false);
    }
}

void pull_cancel_all(struct xfer *x)
{
    struct pull *p, *next;
    LIST_FOREACH_SAFE (p, &x->pulls, in_xfer, next) {
        pull_drain(x, p, TD_ERR_CANCELLED, true);
    }
}

/* --------------------------------------------------------------- beginning */

static void send_open(struct xfer *x, struct pull *p, uint64_t again_ns)
{
    uint8_t out[WIRE_HEADER_MAX];
    conn_say(p->conn, out, xfer_msg_put_pull_open(out, p->node.id, p->params.holder_incarnation));
    p->open_ns = x->now_ns + again_ns;
    due_at(x, p->open_ns);
}

/* PULL_OPEN is repeated even when all is well: each message of the reader extends the lease. */
static uint64_t touch_ns(const struct xfer *x)
{
    return 2 * x->config.heartbeat_ns;
}

/* Asks for the lease over the target's connection, which is up. May free p. */
static void pull_begin(struct xfer *x, struct pull *p)
{
    struct conn *c = p->target->conn;
    if (p->params.holder_incarnation && p->params.holder_incarnation != c->incarnation) {
        atomic_fetch_add(&x->counters.refused_stale, 1);
        pull_drain(x, p, TD_ERR_STALE, false);
        return;
    }
    pull_set_state(p, PULL_OPENING);
    p->conn = c;
    p->n_prefix = p->params.n_have;
    send_open(x, p, touch_ns(x));
}

void pull_on_up(struct xfer_target *t)
{
    struct xfer *x = t->conn->x;
    struct pull *p, *next;
    LIST_FOREACH_SAFE (p, &x->pulls, in_xfer, next) {
        if (p->target == t && p->state == PULL_WAITING)
            pull_begin(x, p);
    }
}

void pull_on_refused(struct xfer_target *t, enum td_status why)
{
    struct xfer *x = t->conn->x;
    struct pull *p, *next;
    LIST_FOREACH_SAFE (p, &x->pulls, in_xfer, next) {
        if (p->target == t && p->state == PULL_WAITING)
            pull_drain(x, p, why, false);
    }
}

/* When a holder that can't be connected to counts as lost, even if the deadline is later: its process may
 * never come back. */
static uint64_t given_up_at(const struct xfer *x, const struct pull *p)
{
    return p->began_ns + 2 * x->config.silence_ns;
}

struct pull_command {
    struct command head;
    struct xfer_pull_params params;
    char address[];
};

static void run_pull(struct xfer *x, struct command *command)
{
    const struct pull_command *c = (const struct pull_command *)command;
    const struct xfer_pull_params *params = &c->params;
    if (x->stopping || pull_find(x, params->id) || params->n_have > x->pages_max) {
        struct xfer_pull_result r = {.status = x->stopping ? TD_ERR_CANCELLED : TD_ERR_INVALID, .done_ns = x->now_ns};
        params->on_end(params->user, params->id, &r);
        return;
    }
    struct pull *p = mem_zalloc(sizeof(*p));
    p->params = *params;
    p->params.deadline_ns = absence_of(&x->absence, params->deadline_ns);
    p->target = target_get(x, c->address);
    p->params.address = p->target->address;
    p->target->n_pulls++;
    p->open_backoff_ns = REOPEN_MIN;
    p->began_ns = x->now_ns;
    LIST_INSERT_HEAD(&x->pulls, p, in_xfer);
    idmap_add(&x->pulls_by_id, &p->node, params->id);
    atomic_fetch_add(&x->counters.pulls_open, 1);
    due_at(x, p->params.deadline_ns);
    due_at(x, given_up_at(x, p));
    if (conn_is_up(p->target->conn))
        pull_begin(x, p);
    else
        target_kick(x, p->target);
}

void xfer_pull_start(struct xfer *x, const struct xfer_pull_params *params)
{
    size_t len = strlen(params->address);
    struct pull_command *c = mem_zalloc(sizeof(*c) + len + 1);
    c->head.run = run_pull;
    c->params = *params;
    memcpy(c->address, params->address, len + 1);
    c->params.address = NULL;
    command_push(x, &c->head);
}

struct pull_cancel_command {
    struct command head;
    struct xfer_id id;
};

static void run_cancel(struct xfer *x, struct command *command)
{
    struct pull *p = pull_find(x, ((struct pull_cancel_command *)command)->id);
    if (p)
        pull_drain(x, p, TD_ERR_CANCELLED, true);
}

void xfer_pull_cancel(struct xfer *x, struct xfer_id id)
{
    struct pull_cancel_command *c = mem_zalloc(sizeof(*c));
    c->head.run = run_cancel;
    c->id = id;
    command_push(x, &c->head);
}

/*
 * When a pull whose bytes don't come is given up. The patience is longer than silence_ns, so that a dead peer
 * is noticed as such first. While other pulls of the connection make progress, this one may be queued behind
 * them, so it gets up to five times the patience.
 */
static uint64_t stalled_at(const struct xfer *x, const struct pull *p)
{
    uint64_t patience = 2 * x->config.silence_ns, alone = p->moved_ns + patience, last = p->moved_ns + 5 * patience;
    uint64_t at = p->conn->moved_ns + patience > alone ? p->conn->moved_ns + patience : alone;
    return at < last ? at : last;
}

/* The peer lives and has refused nothing, but the bytes don't come. If a part has begun to arrive, only a
 * forced close can stop it from writing; else the pull ends and the connection stays. */
static void pull_stalled(struct xfer *x, struct pull *p)
{
    log_warn(x->config.log, "pull is stalled xfer=%llx-%llu address=%s asked_bytes=%llu arriving=%u",
             (unsigned long long)p->node.id.incarnation, (unsigned long long)p->node.id.counter, p->target->address,
             (unsigned long long)p->asked_bytes, p->arriving);
    atomic_fetch_add(&x->counters.stalled, 1);
    if (!p->arriving) {
        pull_drain(x, p, TD_ERR_PEER_LOST, true);
        return;
    }
    /* conn_timer closes the connection in the next turn. Closing it here would free other pulls of the
     * list that the caller is walking. */
    p->conn->is_stalled = true;
    due_at(x, x->now_ns);
}

void pull_timer(struct xfer *x, struct pull *p)
{
    if (p->state == PULL_DRAINING)
        return;
    bool is_unreached = p->state == PULL_WAITING && p->target->n_failures;
    if (x->now_ns >= p->params.deadline_ns || (is_unreached && x->now_ns >= given_up_at(x, p))) {
        pull_drain(x, p, is_unreached ? TD_ERR_PEER_LOST : TD_ERR_DEADLINE, true);
        return;
    }
    due_at(x, p->params.deadline_ns);
    if (p->state == PULL_WAITING) {
        uint64_t at = given_up_at(x, p), later = x->now_ns + x->config.silence_ns;
        due_at(x, at > x->now_ns ? at : later); /* it may still be in its first attempt */
        return;
    }
    if (p->asked_bytes || p->arriving) {
        if (x->now_ns >= stalled_at(x, p)) {
            pull_stalled(x, p);
            return;
        }
        due_at(x, stalled_at(x, p));
    }
    if (x->now_ns >= p->open_ns)
        send_open(x, p, touch_ns(x));
    due_at(x, p->open_ns);
}

/* ------------------------------------------------------ what the holder says */

/* Makes room for pages [0, n), with zeroed state. */
static void pull_reserve(struct xfer *x, struct pull *p, uint32_t n)
{
    if (n > p->cap_pages) {
        uint32_t cap = p->cap_pages ? p->cap_pages : 16;
        while (cap < n)
            cap *= 2;
        size_t page_words = (size_t)N_BIT_SETS * x->words;
        p->pages = mem_resize(p->pages, cap, sizeof(p->pages[0]));
        p->bits = mem_resize(p->bits, cap * page_words, sizeof(p->bits[0]));
        p->places = mem_resize(p->places, cap, sizeof(p->places[0]));
        memset(p->pages + p->cap_pages, 0, (cap - p->cap_pages) * sizeof(p->pages[0]));
        memset(p->bits + p->cap_pages * page_words, 0, (cap - p->cap_pages) * page_words * sizeof(p->bits[0]));
        memset(p->places + p->cap_pages, 0, (cap - p->cap_pages) * sizeof(p->places[0]));
        p->cap_pages = cap;
    }
    if (n > p->n_pages)
        p->n_pages = n;
}

/* Finds the place of a page, unless the page is one of the first n_have. False: the caller has no room for
 * it. */
static bool pull_place(const struct xfer *x, struct pull *p, uint32_t index)
{
    if (index < p->params.n_have || p->places[index])
        return true;
    p->places[index] = p->params.place(p->params.user, p->node.id, index);
    assert(!p->places[index] || xfer_in_arena(x, p->places[index]));
    return p->places[index];
}

static void pull_violated(struct xfer *x, struct pull *p, const char *what)
{
    log_warn(x->config.log, "holder broke the protocol address=%s what=%s", p->target->address, what);
    pull_drain(x, p, TD_ERR_PROTOCOL, true);
}

/* Returns false if it ended the pull. */
static bool announce_page(struct xfer *x, struct pull *p, uint32_t index, uint32_t generation,
                          const struct xfer_msg_unit *u)
{
    struct pull_page *page = &p->pages[index];
    uint64_t *announced = page_bits(x, p, index, ANNOUNCED);
    if (bits_any(announced, u->layer_begin, u->layer_end) || (page->is_known && page->generation != generation)) {
        pull_violated(x, p, "announced twice");
        return false;
    }
    if (!page->is_known) {
        page->is_known = true;
        page->generation = generation;
        if (!pull_place(x, p, index)) {
            pull_drain(x, p, TD_ERR_NO_SPACE, true);
            return false;
        }
    }
    bits_set(announced, u->layer_begin, u->layer_end);
    return true;
}

/*
 * Joins a unit that follows the last queued one, in pages or in layers, so that both are asked for in one
 * message. Layers are joined only if nothing of the last unit was asked for: the cursor counts in its layer
 * range.
 */
static bool join_unit(struct pull *p, const struct lease_unit *u)
{
    struct lease_unit *last = p->units_head < p->n_units ? &p->units[p->n_units - 1] : NULL;
    if (!last)
        return false;
    bool is_begun = p->units_head == p->n_units - 1 && (p->ask_page || p->ask_layer);
    bool same_layers = last->layer_begin == u->layer_begin && last->layer_end == u->layer_end;
    if (same_layers && last->first + last->n == u->first) {
        last->n += u->n;
        return true;
    }
    if (!is_begun && last->first == u->first && last->n == u->n && last->layer_end == u->layer_begin) {
        last->layer_end = u->layer_end;
        return true;
    }
    return false;
}

static void push_unit(struct pull *p, const struct lease_unit *u)
{
    if (join_unit(p, u))
        return;
    if (p->units_head && p->units_head == p->n_units)
        p->units_head = p->n_units = 0;
    p->units = MEM_ROOM(p->units, p->n_units, p->cap_units, 16);
    p->units[p->n_units++] = *u;
}

/* Queues the pages of an announcement that the reader does not have yet. */
static void queue_unit(struct xfer *x, struct pull *p, const struct xfer_msg_unit *u)
{
    uint32_t n_had = p->params.n_have > u->first ? least(p->params.n_have - u->first, u->n) : 0;
    if (n_had == u->n)
        return;
    p->last_announce_ns = x->now_ns;
    if (!p->first_announce_ns)
        p->first_announce_ns = x->now_ns;
    push_unit(p, &(struct lease_unit){u->first + n_had, u->n - n_had, u->layer_begin, u->layer_end});
}

/* A holder may announce each layer of a page once, with one generation, and nothing after its finish;
 * anything else ends the pull. */
void pull_on_announce(struct conn *c, const struct xfer_msg_unit *u)
{
    struct xfer *x = c->x;
    struct pull *p = pull_of(c, u->id);
    if (!p)
        return;
    if (p->finished || u->layer_end > x->layout.n_layers || u->first + u->n > x->pages_max) {
        pull_violated(x, p, "announced out of range");
        return;
    }
    if (p->state == PULL_OPENING)
        pull_set_state(p, PULL_ACTIVE);
    pull_reserve(x, p, u->first + u->n);
    for (uint32_t i = 0; i < u->n; i++)
        if (!announce_page(x, p, u->first + i, u->generations[i], u))
            return;
    queue_unit(x, p, u);
}

/* The holder's last message about the lease: the number of pages and the tail. Everything must have been
 * announced. */
void pull_on_finish(struct conn *c, const struct xfer_msg *m)
{
    struct pull *p = pull_of(c, m->finish.id);
    if (!p)
        return;
    if (p->finished || m->finish.n_pages != p->n_pages) {
        pull_violated(c->x, p, "finished with another number of pages");
        return;
    }
    if (p->params.n_have > m->finish.n_pages) {
        log_warn(c->x->config.log, "pull has more pages than its lease xfer=%llx-%llu address=%s have=%u lease=%u",
                 (unsigned long long)p->node.id.incarnation, (unsigned long long)p->node.id.counter, p->target->address,
                 p->params.n_have, m->finish.n_pages);
        pull_drain(c->x, p, TD_ERR_INVALID, true);
        return;
    }
    if (p->state == PULL_OPENING)
        pull_set_state(p, PULL_ACTIVE);
    p->finished = true;
    p->n_final = m->finish.n_pages;
    p->tail_len = m->finish.tail_len;
    memcpy(p->tail, m->finish.tail, m->finish.tail_len);
    pull_finish_if_done(c->x, p);
}

static enum td_status status_of(enum xfer_msg_reason reason)
{
    switch (reason) {
    case REFUSE_NOT_YET:
        return TD_NOT_YET;
    case REFUSE_UNKNOWN:
        return TD_ERR_NOT_FOUND;
    case REFUSE_CANCELLED:
        return TD_ERR_CANCELLED;
    case REFUSE_STALE:
    case REFUSE_EXPIRED:
        break;
    }
    return TD_ERR_STALE;
}

void pull_on_refuse(struct conn *c, struct xfer_id id, enum xfer_msg_reason reason)
{
    struct pull *p = pull_of(c, id);
    if (!p)
        return;
    if (reason != REFUSE_NOT_YET) {
        pull_drain(c->x, p, status_of(reason), false);
        return;
    }
    if (p->state != PULL_OPENING)
        return;
    p->open_ns = c->x->now_ns + p->open_backoff_ns;
    p->open_backoff_ns = 2 * p->open_backoff_ns < REOPEN_MAX ? 2 * p->open_backoff_ns : REOPEN_MAX;
    due_at(c->x, p->open_ns);
}

/* -------------------------------------------------------------------- asking */

/* Layers in one part: as many as fit the part's length, at least one. */
static uint16_t layers_at_once(const struct conn *c)
{
    uint64_t n = (c->part_bytes ? c->part_bytes : PART_BYTES) / c->x->layer_bytes;
    return (uint16_t)(n < 1 ? 1 : (n < XFER_MSG_LAYERS_MAX ? n : XFER_MSG_LAYERS_MAX));
}

/* Bytes of the smallest useful request: one part. */
static uint64_t least_ask(const struct conn *c)
{
    return layers_at_once(c) * c->x->layer_bytes;
}

/* Moves the cursor n_pages pages on; leaves the unit when all its pages were asked for. */
static void move_cursor(struct pull *p, uint32_t n_pages)
{
    p->ask_page += n_pages;
    p->ask_layer = 0;
    if (p->ask_page == p->units[p->units_head].n) {
        p->units_head++;
        p->ask_page = 0;
    }
}

/*
 * Makes the next request from the first unit, for at most limit bytes, and moves the cursor. Returns its
 * bytes; 0 if limit is too small. It asks for whole pages if one fits into limit (the holder cuts them into
 * parts), else for one part of one page.
 */
static uint64_t next_ask(struct pull *p, uint64_t limit, struct xfer_msg_unit *m)
{
    const struct lease_unit *u = &p->units[p->units_head];
    uint64_t layer = p->conn->x->layer_bytes, page = (uint64_t)(u->layer_end - u->layer_begin) * layer;
    uint16_t chunk = layers_at_once(p->conn), begin = (uint16_t)(u->layer_begin + p->ask_layer);
    *m = (struct xfer_msg_unit){.id = p->node.id, .first = u->first + p->ask_page, .n = 1, .layer_begin = begin};
    if (!p->ask_layer && page <= limit) {
        uint64_t n = limit / page, left = u->n - p->ask_page;
        n = n > left ? left : n;
        m->n = (uint16_t)(n > XFER_MSG_UNIT_PAGES ? XFER_MSG_UNIT_PAGES : n);
        m->layer_end = u->layer_end;
        m->part_layers = chunk < u->layer_end - u->layer_begin ? chunk : 0;
        move_cursor(p, m->n);
        return m->n * page;
    }
    m->layer_end = u->layer_end - begin < chunk ? u->layer_end : (uint16_t)(begin + chunk);
    uint64_t part = (uint64_t)(m->layer_end - begin) * layer;
    if (part > limit)
        return 0;
    p->ask_layer = (uint16_t)(p->ask_layer + chunk);
    if (m->layer_end == u->layer_end)
        move_cursor(p, 1);
    return part;
}

/* Sends one request. The ASKED bits are set before the message is sent, so the answer is always expected.
 * Returns its bytes. */
static uint64_t pull_ask(struct conn *c, struct pull *p, uint64_t credit)
{
    struct xfer_msg_unit m;
    uint64_t bytes = next_ask(p, credit, &m);
    if (!bytes)
        return 0;
    for (uint32_t i = 0; i < m.n; i++) {
        m.generations[i] = p->pages[m.first + i].generation;
        bits_set(page_bits(c->x, p, m.first + i, ASKED), m.layer_begin, m.layer_end);
    }
    if (!p->asked_bytes && !p->arriving)
        p->moved_ns = c->x->now_ns;
    p->asked_bytes += bytes;
    c->in_bytes += bytes;
    due_at(c->x, stalled_at(c->x, p));
    uint8_t out[WIRE_HEADER_MAX];
    conn_say(c, out, xfer_msg_put_unit(out, MSG_PULL, &m));
    return bytes;
}

/*
 * Asking goes in steps. Nothing is asked for until a quarter of the credit is free, else every part that
 * lands would cost a message back. One message asks for at most an eighth of the credit, so that pulls share
 * it.
 */
bool pull_pump(struct conn *c)
{
    struct xfer *x = c->x;
    uint64_t max = x->config.max_inflight_bytes, step = max / 8;
    bool any = false, again = c->in_bytes <= max - max / 4;
    /* Each pull sends one message in turn, so that a long pull does not starve the others. */
    while (again) {
        again = false;
        struct pull *p;
        LIST_FOREACH (p, &x->pulls, in_xfer) {
            if (p->conn != c || p->state != PULL_ACTIVE || p->units_head == p->n_units)
                continue;
            uint64_t credit = c->in_bytes < max ? max - c->in_bytes : 0, part = least_ask(c);
            uint64_t limit = step > part ? step : part;
            /* If nothing is outstanding, one part may go even if it is larger than the credit. */
            if (c->in_bytes && limit > credit)
                limit = credit;
            again |= pull_ask(c, p, limit) != 0;
        }
        any |= again;
    }
    return any;
}

/* ------------------------------------------------------------------ arriving */

/* A part that is landing in a page, from pull_on_payload to pull_on_payload_done; freed there. It keeps
 * its pull alive. */
struct part_arrival {
    struct pull *pull;
    struct xfer_msg_data data;
    uint64_t len, checksum;
    bool is_summed; /* checksum was computed while the part was copied */
    void *bytes;
};

/*
 * Called when a part begins to arrive: returns its destination if exactly this part was asked for and has not
 * landed. LANDED is set here, before the bytes are verified, so that a repeated part can't overwrite them.
 */
void *pull_on_payload(struct conn *c, const struct xfer_msg_data *d, uint64_t payload_len, void **token_out)
{
    struct xfer *x = c->x;
    struct pull *p = pull_of(c, d->id);
    if (!p)
        return NULL; /* cancelled meanwhile, or never asked for */
    uint64_t len = (uint64_t)(d->layer_end - d->layer_begin) * x->layer_bytes;
    bool fits = d->index < p->n_pages && d->layer_end <= x->layout.n_layers && payload_len == len &&
                d->generation == p->pages[d->index].generation &&
                bits_all(page_bits(x, p, d->index, ASKED), d->layer_begin, d->layer_end) &&
                !bits_any(page_bits(x, p, d->index, LANDED), d->layer_begin, d->layer_end);
    if (!fits) {
        atomic_fetch_add(&x->counters.refused_stale, 1);
        pull_violated(x, p, "sent what was not asked for");
        return NULL;
    }
    struct part_arrival *a = mem_zalloc(sizeof(*a));
    *a = (struct part_arrival){.pull = p, .data = *d, .len = len};
    a->bytes = (uint8_t *)p->places[d->index] + d->layer_begin * x->layer_bytes;
    bits_set(page_bits(x, p, d->index, LANDED), d->layer_begin, d->layer_end);
    p->asked_bytes -= len;
    p->arriving++;
    p->moved_ns = c->moved_ns = x->now_ns;
    *token_out = a;
    return a->bytes;
}

static struct checksum_identity identity_of(const struct xfer_msg_data *d)
{
    return (struct checksum_identity){.id_a = d->id.incarnation,
                                      .id_b = d->id.counter,
                                      .index = d->index,
                                      .generation = d->generation,
                                      .part_begin = d->layer_begin,
                                      .part_end = d->layer_end};
}

void pull_land(void *token, void *to, const void *from, uint64_t len_bytes)
{
    struct part_arrival *a = token;
    const struct checksum_identity identity = identity_of(&a->data);
    a->checksum = checksum_copy(&identity, to, from, len_bytes);
    a->is_summed = true;
}

static bool is_genuine(const struct part_arrival *a)
{
    const struct xfer_msg_data *d = &a->data;
    const struct checksum_identity identity = identity_of(d);
    return (a->is_summed ? a->checksum : checksum_bytes(&identity, a->bytes, a->len)) == d->checksum;
}

/* A part has been verified: its page may be complete, the complete prefix may grow, the pull may be done.
 * May free p. */
static void count_verified(struct xfer *x, struct pull *p, const struct part_arrival *a)
{
    struct pull_page *page = &p->pages[a->data.index];
    p->bytes += a->len;
    atomic_fetch_add(&x->counters.bytes_in, a->len);
    page->n_verified = (uint16_t)(page->n_verified + a->data.layer_end - a->data.layer_begin);
    if (page->n_verified < x->layout.n_layers)
        return;
    p->n_complete++;
    atomic_fetch_add(&x->counters.pages_in, 1);
    uint32_t before = p->n_prefix;
    while (p->n_prefix < p->n_pages && p->pages[p->n_prefix].n_verified == x->layout.n_layers)
        p->n_prefix++;
    if (p->n_prefix > before && p->params.on_progress)
        p->params.on_progress(p->params.user, p->node.id, p->n_prefix);
    pull_finish_if_done(x, p);
}

/* Called exactly once for each part that was given a destination, also after a close. The wire writes no
 * more into it. May free the pull. */
void pull_on_payload_done(struct conn *c, void *token, enum td_status status)
{
    struct xfer *x = c->x;
    struct part_arrival *a = token;
    struct pull *p = a->pull;
    p->arriving--;
    p->moved_ns = c->moved_ns = x->now_ns;
    c->in_bytes -= a->len;
    if (!status)
        c->heard_ns = x->now_ns;
    if (p->state == PULL_DRAINING) {
        pull_settle(x, p);
    } else if (status) {
        pull_drain(x, p, TD_ERR_PEER_LOST, false);
    } else if (!is_genuine(a)) {
        atomic_fetch_add(&x->counters.checksum_errors, 1);
        log_warn(x->config.log, "checksum differs xfer=%llx-%llu address=%s index=%u layers=%u-%u",
                 (unsigned long long)p->node.id.incarnation, (unsigned long long)p->node.id.counter, p->target->address,
                 a->data.index, a->data.layer_begin, a->data.layer_end);
        pull_drain(x, p, TD_ERR_CHECKSUM, true);
    } else {
        count_verified(x, p, a);
    }
    free(a);
}
