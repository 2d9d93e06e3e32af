/*
 * The addresses that we connect to: which is tried, when, and when again.
 *
 * Pace. With UCX a connection costs both sides some 10 ms of a core. So a process connects to one address
 * after the other: attempts begin at least EVERY_NS apart (at most 50 a second), and after each successful
 * attempt there is a pause as long as the attempt took, at most half of silence_ns. When the machine is short
 * of cores, attempts take longer and the pace slows down with them. Without this pace, 32 + 32 peers on 2
 * cores begin a thousand handshakes in one second; each takes longer than the silence after which a peer is
 * dead, so all are given up and begun again. An attempt that has lasted half of silence_ns no longer holds up
 * the next one, because its address may be one that never answers.
 *
 * Order. Addresses without a failed attempt since they were last connected come first: those that a pull or a
 * message waits for, then the others, in an order that differs between processes, so that not all processes
 * connect to the same peer first. Then come the addresses that failed: again first those that something waits
 * for, and among them the one whose next attempt was due first.
 *
 * Again. After a failed attempt, and after a connection that was lost within STEADY_NS of its handshake, the
 * next attempt waits for 50 ms, doubled each time up to 1 s; half of it is random. A connection that lasted
 * longer is made anew at once.
 *
 * Rejected: a fixed rate alone (a rate that 2 cores can bear makes a worker with 16 peers wait for seconds).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/mem.h"
#include "base/random.h"
#include "transfer/impl.h"

#define EVERY_NS       (20 * NS_PER_MS)
#define STEADY_NS      (5 * NS_PER_S)
#define BACKOFF_MIN_NS (50 * NS_PER_MS)
#define BACKOFF_MAX_NS NS_PER_S

/* Finds or makes the target of an address. Targets are freed by run_timers when target_timer says that
 * nothing needs them. */
struct xfer_target *target_get(struct xfer *x, const char *address)
{
    struct xfer_target *t = x->targets;
    while (t && strcmp(t->address, address))
        t = t->next;
    if (t)
        return t;
    t = mem_zalloc(sizeof(*t));
    t->address = mem_strdup(address);
    t->messages_tail = &t->messages;
    t->order = random_at(x->config.incarnation, XXH3_64bits(address, strlen(address)), 0);
    t->next = x->targets;
    x->targets = t;
    return t;
}

static struct outgoing *message_pop(struct xfer_target *t)
{
    struct outgoing *m = t->messages;
    t->messages = m->next;
    if (!t->messages)
        t->messages_tail = &t->messages;
    return m;
}

/* Keeps m (owned from here on) until the target is up, or drops it when a handshake's limit has passed. */
void target_queue(struct xfer *x, struct xfer_target *t, struct outgoing *m)
{
    m->deadline_ns = x->now_ns + conn_handshake_ns(x);
    *t->messages_tail = m;
    t->messages_tail = &m->next;
    due_at(x, m->deadline_ns);
    target_kick(x, t);
}

void target_free(struct xfer_target *t)
{
    while (t->messages)
        free(message_pop(t));
    free(t->address);
    free(t);
}

/* --------------------------------------------------------- when it ends, and again */

/* Waits between half of the time and all of it, different in each process: processes that lost the same
 * peer must not come back at the same moment. */
static void back_off(struct xfer *x, struct xfer_target *t, uint32_t n_before)
{
    uint64_t wait = BACKOFF_MIN_NS << (n_before < 5 ? n_before : 5);
    wait = wait < BACKOFF_MAX_NS ? wait : BACKOFF_MAX_NS;
    t->next_attempt_ns = x->now_ns + wait / 2 + random_at(t->order, n_before, 1) % (wait / 2);
    due_at(x, t->next_attempt_ns);
}

/* If the peer refused the connection, pulls and messages that wait for it fail now: trying again would not
 * help them. */
void target_failed(struct conn *c, enum td_status why)
{
    struct xfer_target *t = c->target;
    struct xfer *x = c->x;
    back_off(x, t, t->n_failures++);
    if (why == TD_ERR_PEER_LOST || why == TD_ERR_CANCELLED)
        return;
    pull_on_refused(t, why);
    for (; t->messages; conn_drop_messages(x, 1))
        free(message_pop(t));
}

/* After a successful attempt the next one waits as long as this one took, so that connecting leaves half
 * of the time to other work. */
static void slow_down(const struct conn *c)
{
    struct xfer *x = c->x;
    uint64_t took = x->now_ns - c->begun_ns, most = x->config.silence_ns / 2,
             at = x->now_ns + (took < most ? took : most);
    x->next_connect_ns = at > x->next_connect_ns ? at : x->next_connect_ns;
}

void target_is_up(struct conn *c)
{
    struct xfer_target *t = c->target;
    slow_down(c);
    t->n_failures = 0;
    t->trying_ns = 0;
    due_at(c->x, c->x->now_ns);
    while (t->messages) {
        struct outgoing *m = message_pop(t);
        conn_send_message(c, m->kind, m->data, m->len);
        free(m);
    }
}

void target_lost(struct conn *c)
{
    struct xfer_target *t = c->target;
    struct xfer *x = c->x;
    t->conn = NULL;
    due_at(x, x->now_ns);
    if (!c->was_up)
        return; /* target_failed() has dealt with it */
    bool is_short = x->now_ns - c->up_ns < STEADY_NS;
    if (is_short)
        back_off(x, t, t->n_short);
    t->n_short = is_short ? t->n_short + 1 : 0;
}

/* ----------------------------------------------------------------------- pace */

void target_kick(struct xfer *x, struct xfer_target *t)
{
    if (!x->stopping && !t->conn) /* else the timer looks again when the present connection is gone */
        due_at(x, t->next_attempt_ns);
}

static void target_connect(struct xfer *x, struct xfer_target *t)
{
    struct conn *c = conn_add(x, CONN_CONNECTING);
    t->trying_ns = t->trying_ns ? t->trying_ns : x->now_ns;
    c->target = t;
    t->conn = c;
    c->wire = wire_connect(x->wire, t->address, t->n_attempts++, c);
}

/* Whether a is tried before b: see "Order" above. */
static bool goes_before(const struct xfer_target *a, const struct xfer_target *b)
{
    if (!a->n_failures != !b->n_failures)
        return !a->n_failures;
    bool a_is_urgent = a->n_pulls || a->messages, b_is_urgent = b->n_pulls || b->messages;
    if (a_is_urgent != b_is_urgent)
        return a_is_urgent;
    return a->n_failures ? a->next_attempt_ns < b->next_attempt_ns : a->order < b->order;
}

static struct xfer_target *next_target(const struct xfer *x)
{
    struct xfer_target *best = NULL;
    for (struct xfer_target *t = x->targets; t; t = t->next)
        if (t->is_needed && !t->conn && x->now_ns >= t->next_attempt_ns && (!best || goes_before(t, best)))
            best = t;
    return best;
}

/* Whether another attempt may begin now. If not, sets the time at which the timers look again (they also
 * run when an attempt ends). */
static bool may_connect(struct xfer *x)
{
    uint64_t at = x->next_connect_ns;
    for (const struct conn *c = x->conns; c; c = c->next) {
        uint64_t until = c->begun_ns + x->config.silence_ns / 2;
        if (c->target && c->state < CONN_UP && until > at)
            at = until;
    }
    if (x->now_ns < at)
        due_at(x, at);
    return x->now_ns >= at;
}

void targets_connect(struct xfer *x)
{
    struct xfer_target *t;
    while (!x->stopping && (t = next_target(x)) && may_connect(x)) {
        target_connect(x, t);
        x->next_connect_ns = x->now_ns + EVERY_NS;
    }
}

/* ---------------------------------------------------------------------- timer */

/* Copies the unreached addresses to where any thread may read them. */
static void list_unreached(struct xfer *x)
{
    uint32_t n = 0;
    pthread_mutex_lock(&x->transport_lock);
    for (struct xfer_target *t = x->targets; t; t = t->next)
        n += t->is_unreached;
    x->unreached = mem_resize(x->unreached, n, sizeof(*x->unreached));
    x->n_unreached = 0;
    for (struct xfer_target *t = x->targets; t; t = t->next)
        if (t->is_unreached)
            snprintf(x->unreached[x->n_unreached++], XFER_ADDRESS_BYTES, "%s", t->address);
    pthread_mutex_unlock(&x->transport_lock);
}

static void note_reach(struct xfer *x, struct xfer_target *t)
{
    uint64_t since = t->trying_ns, patience = x->config.silence_ns * 3 / 2;
    bool is_tried = t->is_wanted && since && !x->stopping,
         is_unreached = is_tried && t->n_failures && x->now_ns >= since + patience;
    if (is_tried && !is_unreached)
        due_at(x, since + patience);
    if (is_unreached == t->is_unreached)
        return;
    t->is_unreached = is_unreached;
    if (is_unreached)
        log_warn(x->config.log,
                 "peer can't be connected to: no KV comes from it (is it up and reached from here, and do both sides' "
                 "--transports mean TCP, "
                 "or both UCX?) address=%s",
                 t->address);
    else if (t->is_wanted && !x->stopping)
        log_info(x->config.log, "peer is connected again address=%s", t->address);
    list_unreached(x);
}

bool target_timer(struct xfer *x, struct xfer_target *t)
{
    while (t->messages && (x->stopping || x->now_ns >= t->messages->deadline_ns)) {
        log_warn(x->config.log, "message dropped: can't be reached address=%s", t->address);
        conn_drop_messages(x, 1);
        free(message_pop(t));
    }
    if (t->messages)
        due_at(x, t->messages->deadline_ns);
    t->is_needed = t->messages || t->n_pulls || (t->is_wanted && !x->stopping);
    if (!t->is_needed && !t->conn)
        t->trying_ns = 0;
    if (t->is_needed && !t->conn && x->now_ns < t->next_attempt_ns)
        due_at(x, t->next_attempt_ns);
    note_reach(x, t);
    return t->is_needed || t->conn || x->now_ns < t->next_attempt_ns;
}

struct want_command {
    struct command head;
    uint32_t n;
    char (*addresses)[XFER_ADDRESS_BYTES];
};

static void run_want(struct xfer *x, struct command *command)
{
    struct want_command *w = (struct want_command *)command;
    for (struct xfer_target *t = x->targets; t; t = t->next)
        t->is_wanted = false;
    for (uint32_t i = 0; i < w->n && !x->stopping; i++)
        target_get(x, w->addresses[i])->is_wanted = true;
    due_at(x, x->now_ns);
    free(w->addresses);
}

void xfer_want(struct xfer *x, const char *const *addresses, uint32_t n)
{
    struct want_command *w = mem_zalloc(sizeof(*w));
    w->head.run = run_want;
    w->addresses = n ? mem_array(n, sizeof(*w->addresses)) : NULL;
    for (uint32_t i = 0; i < n; i++)
        snprintf(w->addresses[w->n++], XFER_ADDRESS_BYTES, "%s", addresses[i]);
    command_push(x, &w->head);
}

uint32_t xfer_unreached(struct xfer *x, char (*out)[XFER_ADDRESS_BYTES], uint32_t cap)
{
    pthread_mutex_lock(&x->transport_lock);
    uint32_t n = x->n_unreached < cap ? x->n_unreached : cap;
    if (n)
        memcpy(out, x->unreached, n * sizeof(*out));
    pthread_mutex_unlock(&x->transport_lock);
    return n;
}
