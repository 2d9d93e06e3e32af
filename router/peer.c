/*
 * One worker or store as the router sees it: its stream, what it says about itself, its load, its blocks.
 *
 *     CONNECTING --hello that matches--> READY --stream ends, or silence--> LOST --retry--> CONNECTING
 *         \--hello that doesn't match--> REFUSED --retry (it may be replaced)--> CONNECTING
 *     LOST --it registered, and has drained or was lost for FORGET_MS--> GONE --another registers--> LOST
 *
 * Threads: stream callbacks run on rpc threads and only post notes. A note carries the epoch of its stream.
 * The epoch rises whenever a stream is begun or given up, so notes of old streams are dropped, and struct
 * peer must live until the last note is gone.
 *
 * What must hold:
 *   - Messages are numbered on each stream, in both directions. A gap ends the stream. Heartbeats carry the
 *     number that the worker has received, so a stream on which our messages get lost ends, too.
 *   - A worker is marked unusable before its requests are re-planned (lose(), stall()), or the new plans
 *     would choose it again.
 *   - All its requests are re-planned or ended before scheduler_worker_down(), which asserts that.
 *   - Numbers that a worker sends are bounded before they reach the scheduler (bounded(), is_step()).
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "router/router_internal.h"
#include "worker/link.h"

enum { RETRY_MS = 100, RETRY_REFUSED_MS = 2000, FORGET_MS = 60000, EVENTS_AT_ONCE = 512 };

/* Bounds of what a worker may report. */
static const double MOST_STEP_MS = 24 * 3.6e6, MOST_TOKENS = 1e10, MOST_SQUARE = 1e18;

static const struct metric_info METRIC_INFO[] = {METRICS_TABLE(PEER_METRICS)};

static void set_state(struct peer *p, enum peer_state to)
{
    static const bool LEGAL[5][5] = {
        [PEER_CONNECTING] = {[PEER_READY] = true, [PEER_LOST] = true, [PEER_REFUSED] = true},
        [PEER_READY] = {[PEER_LOST] = true},
        [PEER_LOST] = {[PEER_CONNECTING] = true, [PEER_GONE] = true},
        [PEER_REFUSED] = {[PEER_CONNECTING] = true, [PEER_LOST] = true},
        [PEER_GONE] = {[PEER_LOST] = true},
    };
    if (!LEGAL[p->state][to])
        abort();
    p->router->pairs_changed |= p->state == PEER_READY || to == PEER_READY;
    p->state = to;
}

/* Requests are validated against the smallest context of all ready workers. If none is ready, the last value
 * stays, because they may come back. */
static void find_context(struct router *r)
{
    uint32_t least = 0;
    for (uint32_t i = 0; i < r->n_peers; i++) {
        const struct peer *p = r->peers[i];
        if (p->state == PEER_READY && p->role != ROLE_STORE && (!least || p->max_context < least))
            least = p->max_context;
    }
    if (least)
        atomic_store(&r->max_context, least);
}

/* ---------------------------------------------------- the call, rpc threads */

/* What a stream's callbacks need. Freed by on_end(), which comes exactly once. */
struct tie {
    struct peer *peer;
    uint64_t epoch;
};

static void on_message(struct rpc_call *call, const ProtobufCMessage *base)
{
    const struct tie *t = rpc_call_user(call);
    struct note *note = note_new(NOTE_WORKER);
    note->message = (Tandem__Worker__V1__WorkerMessage *)rpc_call_take(call, base);
    note->peer = t->peer;
    note->epoch = t->epoch;
    mailbox_push(&t->peer->router->mailbox, &note->mail);
}

static void on_end(struct rpc_call *call, enum rpc_code code, const char *text)
{
    struct tie *t = rpc_call_user(call);
    struct note *note = note_new(NOTE_WORKER_GONE);
    note->peer = t->peer;
    note->epoch = t->epoch;
    snprintf(note->text, sizeof(note->text), "%s: %.200s", rpc_code_name(code), text ? text : "");
    mailbox_push(&t->peer->router->mailbox, &note->mail);
    free(t);
}

/* ------------------------------------------------------------ owner thread */

/* Starts a stream and says hello on it. All state of the former stream is reset. */
static void connect_peer(struct peer *p)
{
    struct router *r = p->router;
    struct tie *t = mem_zalloc(sizeof(*t));
    *t = (struct tie){p, ++p->epoch};
    const struct rpc_call_params params = {.path = "/tandem.worker.v1.Worker/Attach",
                                           .response = &tandem__worker__v1__worker_message__descriptor,
                                           .handlers = {.on_message = on_message, .on_end = on_end},
                                           .user = t,
                                           .must_prove = true};
    set_state(p, PEER_CONNECTING);
    p->heard_ns = router_patience(r);
    p->n_said = p->n_heard = p->heard = 0;
    p->hears = (struct progress_acks){0};
    p->taken = p->n_legs = 0;
    p->legs_told = p->stalled = false;
    p->progress = (struct progress){0};
    p->whole = p->is_shared = false;
    p->told_ms = 0;
    p->n_unreached = 0;
    p->peers_told = 0;
    if (rpc_call_start(p->client, &params, &p->call)) {
        free(t);
        set_state(p, PEER_LOST);
        p->retry_ns = router_patience(r) + RETRY_MS * NS_PER_MS;
        return;
    }
    Tandem__Worker__V1__RouterHello hello = TANDEM__WORKER__V1__ROUTER_HELLO__INIT;
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    p->is_proved = false;
    p->said.incarnation = r->incarnation;
    secret_nonce(p->said.router);
    hello.protocol = LINK_PROTOCOL_VERSION;
    hello.incarnation = r->incarnation;
    hello.nonce = (ProtobufCBinaryData){sizeof(p->said.router), p->said.router};
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_HELLO;
    m.hello = &hello;
    peer_send(p, &m);
}

/*
 * Gives the place to the process at `address`. Notes of the former process have an older epoch. If the
 * address is the former one, so may the process be, and its drain goes on.
 */
static enum td_status take_place(struct peer *p, const char *address, struct td_error *e)
{
    struct router *r = p->router;
    bool is_same = !strcmp(p->address, address);
    *p = (struct peer){.router = r,
                       .incarnation = is_same ? p->incarnation : 0,
                       .draining = is_same && p->draining,
                       .drain_asked = is_same && p->drain_asked,
                       .drain_ms = p->drain_ms,
                       .holder = p->holder,
                       .epoch = p->epoch + 1,
                       .counters = p->counters,
                       .legs = p->legs,
                       .state = PEER_LOST};
    snprintf(p->address, sizeof(p->address), "%s", address);
    snprintf(p->name, sizeof(p->name), "%.60s", address);
    const struct rpc_client_config c = {.target = p->address,
                                        .tls = &r->options.tls,
                                        .max_message_bytes = LINK_MAX_MESSAGE_BYTES,
                                        .max_queued_bytes = LINK_MAX_MESSAGE_BYTES,
                                        .faults = r->faults,
                                        .log = &r->log};
    return rpc_client_open(&c, &p->client, e);
}

struct peer *peer_open(struct router *r, const char *address, uint32_t holder)
{
    struct td_error e;
    char labels[32];
    struct peer *p = mem_zalloc(sizeof(*p));
    p->router = r;
    p->holder = holder;
    if (take_place(p, address, &e)) {
        log_error(&r->log, "worker address can't be used peer=%s text='%s'", address, e.text);
        free(p);
        return NULL;
    }
    snprintf(labels, sizeof(labels), "place=\"%u\"", holder);
    p->counters = metrics_add(r->metrics, METRIC_INFO, sizeof(METRIC_INFO) / sizeof(METRIC_INFO[0]), labels);
    return p;
}

void peer_disconnect(struct peer *p)
{
    p->epoch++; /* drops all notes of its stream */
    if (p->call) {
        rpc_call_cancel(p->call);
        rpc_call_unref(p->call);
        p->call = NULL;
    }
    rpc_client_close(p->client);
    p->client = NULL;
}

void peer_send(struct peer *p, Tandem__Worker__V1__RouterMessage *m)
{
    m->number = ++p->n_said;
    if (p->call && rpc_call_send(p->call, &m->base) == TD_ERR_NO_SPACE)
        rpc_call_cancel(p->call); /* it does not read; on_end() will report it as gone */
}

uint32_t peer_n_sent(const struct peer *p)
{
    return p->n_said - (p->call ? rpc_call_n_waiting(p->call) : 0);
}

/* Forgets its blocks, re-plans its requests, and only then takes it out of the scheduler. */
static void forget(struct peer *p)
{
    struct router *r = p->router;
    index_clear(r->index, p->holder);
    struct request *q, *next;
    TAILQ_FOREACH_SAFE (q, &r->requests, in_router, next) {
        if (q->state == REQUEST_PLACED)
            request_peer_lost(q, p, REPLAN_LOST);
    }
    scheduler_worker_down(r->scheduler, p->holder);
}

/*
 * The stream is over, or is given up, here or by gRPC (is_over is false). A draining worker has drained when
 * its stream is over, as far as we know; one that is only silent may still be there. If the same process says
 * hello again, it drains again (on_hello()): the message may have been lost with the stream. Order: the state
 * and the breaker change first, then requests are re-planned (forget()), so that no new plan uses this peer.
 */
static void lose(struct peer *p, const char *why, uint64_t retry_ms, bool is_over)
{
    bool was_ready = p->state == PEER_READY, has_drained = p->draining && !p->drained && is_over;
    p->tried = true;
    if (was_ready && !has_drained)
        log_warn(&p->router->log, "worker lost peer=%s why='%s'", p->name, why);
    p->epoch++;
    if (p->call) {
        if (p->is_proved)
            rpc_call_cancel(p->call);
        else
            rpc_call_hang_up(p->call); /* or it could send what it likes until the next attempt */
        rpc_call_unref(p->call);
        p->call = NULL;
    }
    if (p->state != PEER_REFUSED) {
        snprintf(p->why, sizeof(p->why), "%s", why);
        set_state(p, PEER_LOST);
        find_context(p->router);
    }
    p->retry_ns = router_patience(p->router) + retry_ms * NS_PER_MS;
    if (was_ready) {
        p->lost_ns = router_patience(p->router);
        if (!has_drained)
            peer_failed(p);
        forget(p);
    }
    if (has_drained && p->state == PEER_LOST) {
        log_info(&p->router->log, "worker drained peer=%s why='%s'", p->name, why);
        p->drained = true;
        if (p->registered)
            set_state(p, PEER_GONE);
    }
}

void peer_gone(struct peer *p, const char *why)
{
    lose(p, why, p->state == PEER_REFUSED ? RETRY_REFUSED_MS : RETRY_MS, !rpc_text_is_silence(why));
}

static void end_stream(struct peer *p, const char *why)
{
    lose(p, why, p->state == PEER_REFUSED ? RETRY_REFUSED_MS : RETRY_MS, false);
}

void peer_tick(struct peer *p, uint64_t now)
{
    uint64_t silence = (uint64_t)p->router->options.silence_ms * NS_PER_MS;
    if (p->state == PEER_LOST && p->registered && now > p->lost_ns + FORGET_MS * NS_PER_MS) {
        log_info(&p->router->log, "worker forgotten peer=%s", p->name);
        set_state(p, PEER_GONE);
    } else if ((p->state == PEER_LOST || p->state == PEER_REFUSED) && !p->call && now >= p->retry_ns) {
        if (p->state == PEER_REFUSED)
            set_state(p, PEER_LOST);
        connect_peer(p);
    } else if (p->call && p->state == PEER_CONNECTING && rpc_call_floods(p->call)) {
        lose(p, "it sends what nobody has asked for", rpc_flood_wait_ms(p->n_floods++), false);
    } else if (p->call && now > p->heard_ns + silence) {
        end_stream(p, p->state == PEER_CONNECTING ? "no answer" : "silent");
    }
}

/* Whether p is ready and takes work of the role. */
static bool is_there(const struct peer *p, enum worker_role role)
{
    return p->role == role && p->state == PEER_READY && !p->draining && !p->stalled;
}

bool peer_lends(const struct peer *p)
{
    return p->role != ROLE_STORE && p->xfer_address[0] && is_there(p, p->role);
}

bool peer_has_role(const struct router *r, enum worker_role role)
{
    for (uint32_t i = 0; i < r->n_peers; i++)
        if (is_there(r->peers[i], role))
            return true;
    return false;
}

/* An open breaker counts only while another worker of the role has a closed one: a bad worker beats none. */
bool peer_usable(const struct peer *p, uint64_t now)
{
    const struct router *r = p->router;
    if (p->role == ROLE_STORE || !is_there(p, p->role) || breaker_usable(&p->breaker, now))
        return p->role != ROLE_STORE && is_there(p, p->role);
    for (uint32_t i = 0; i < r->n_peers; i++)
        if (is_there(r->peers[i], p->role) && r->peers[i]->breaker.state == BREAKER_CLOSED)
            return false;
    return true;
}

/* Tells the scheduler whether p may get new work. */
static void tell_usable(struct peer *p)
{
    scheduler_worker_usable(p->router->scheduler, p->holder, peer_usable(p, clock_now(&p->router->clock)));
}

void peer_drains(struct peer *p)
{
    if (p->draining)
        return;
    log_info(&p->router->log, "worker drains peer=%s", p->name);
    p->draining = true;
    tell_usable(p);
}

/* ---------------------------------------------------------- coming, leaving */

/* A place whose process is gone, as far as we know: of this address if there is one. NULL: none. */
static struct peer *free_place(struct router *r, const char *address)
{
    struct peer *any = NULL;
    for (uint32_t i = 0; i < r->n_peers; i++) {
        if (r->peers[i]->state != PEER_GONE)
            continue;
        if (!any || !strcmp(r->peers[i]->address, address))
            any = r->peers[i];
    }
    return any;
}

enum td_status peer_register(struct router *r, const char *address, struct td_error *e)
{
    struct peer *p, *old = free_place(r, address);
    uint32_t holder = old ? old->holder : r->n_peers;
    for (uint32_t i = 0; i < r->n_peers; i++)
        if (r->peers[i]->state != PEER_GONE && !strcmp(r->peers[i]->address, address))
            return TD_OK;
    if (holder == MAX_WORKERS)
        return td_fail(e, TD_ERR_NO_SPACE, "%d workers and stores are here already", MAX_WORKERS);
    if (old) {
        rpc_client_close(old->client);
        p = take_place(old, address, e) ? NULL : old;
    } else {
        p = peer_open(r, address, holder);
    }
    if (!p)
        return td_fail(e, TD_ERR_INVALID, "address: '%s' can't be used", address);
    if (!old)
        r->peers[r->n_peers++] = p;
    p->registered = true;
    p->lost_ns = router_patience(r);
    log_info(&r->log, "worker registered address=%s", address);
    return TD_OK;
}

/* A worker that drains already ignores it. */
static void tell_drain(struct peer *p)
{
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__Drain drain = TANDEM__WORKER__V1__DRAIN__INIT;
    drain.limit_ms = p->drain_ms;
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_DRAIN;
    m.drain = &drain;
    peer_send(p, &m);
}

enum td_status peer_drain(struct router *r, const char *name, uint32_t limit_ms, struct td_error *e)
{
    for (uint32_t i = 0; i < r->n_peers; i++) {
        struct peer *p = r->peers[i];
        if (p->state != PEER_READY || strcmp(p->name, name))
            continue;
        p->drain_asked = true;
        p->drain_ms = limit_ms;
        peer_drains(p);
        tell_drain(p);
        return TD_OK;
    }
    return td_fail(e, TD_ERR_NOT_FOUND, "name: no worker '%s' is ready", name);
}

/* ------------------------------------------------------------ the breaker */

void peer_succeeded(struct peer *p)
{
    p->probe = 0;
    p->failed_with = 0;
    breaker_succeeded(&p->breaker);
    tell_usable(p);
}

void peer_failed(struct peer *p)
{
    bool was_open = p->breaker.state == BREAKER_OPEN;
    p->probe = 0;
    breaker_failed(&p->breaker, clock_now(&p->router->clock));
    tell_usable(p);
    if (!was_open && p->breaker.state == BREAKER_OPEN)
        log_warn(&p->router->log, "worker fails too often and is left out peer=%s ms=%llu", p->name,
                 (unsigned long long)(p->breaker.wait_ns / NS_PER_MS));
}

/* -------------------------------------------------------------- messages */

static void copy_text(char *out, size_t size, ProtobufCBinaryData b)
{
    size_t n = b.len < size - 1 ? b.len : size - 1;
    if (n)
        memcpy(out, b.data, n);
    out[n] = 0;
}

static bool parse_role(ProtobufCBinaryData b, enum worker_role *out)
{
    static const char *const NAMES[] = {"prefill", "decode", "store"};
    for (int i = 0; i < 3; i++)
        if (b.len == strlen(NAMES[i]) && !memcmp(b.data, NAMES[i], b.len)) {
            *out = (enum worker_role)i;
            return true;
        }
    return false;
}

/* Stores may come before the first worker. One whose layout turns out to be another is asked again, and then
 * refused by the field that differs. */
static void part_from_other_stores(struct router *r)
{
    struct td_error e;
    for (uint32_t i = 0; i < r->n_peers; i++) {
        struct peer *p = r->peers[i];
        if (p->state == PEER_READY && p->role == ROLE_STORE && kv_layout_match(&r->layout, &p->layout, &e))
            end_stream(p, e.text);
    }
}

/* Takes over what the first worker serves. The router's own model must have the same vocabulary size. */
static enum td_status adopt(struct router *r, const Tandem__Worker__V1__WorkerHello *h, const struct kv_layout *layout,
                            struct td_error *e)
{
    if (h->vocab_size != r->config.vocab_size)
        return td_fail(e, TD_ERR_VERSION, "vocab_size differs: the router's model has %u, the worker's %u",
                       r->config.vocab_size, h->vocab_size);
    pthread_mutex_lock(&r->hello_lock);
    memcpy(r->fingerprint.b, h->fingerprint.data, BLOCK_KEY_BYTES);
    copy_text(r->numerics, sizeof(r->numerics), h->numerics);
    r->layout = *layout;
    adapters_adopt(r, h);
    r->known = true;
    pthread_mutex_unlock(&r->hello_lock);
    atomic_store(&r->block_tokens, layout->page_tokens);
    part_from_other_stores(r);
    return TD_OK;
}

static uint32_t count_stores(const struct router *r)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < r->n_peers; i++)
        n += r->peers[i]->state == PEER_READY && r->peers[i]->role == ROLE_STORE;
    return n;
}

/* A name is shown on terminals, written to logs, and a string in messages: printable UTF-8. */
static bool is_name(const char *text)
{
    return *text && rpc_text_is_clean(text, strlen(text));
}

static enum td_status check_name(bool is_named, const Tandem__Worker__V1__WorkerHello *h, struct td_error *e)
{
    char address[sizeof(((struct peer *)0)->xfer_address)];
    copy_text(address, sizeof(address), h->xfer_address);
    if (!is_named)
        return td_fail(e, TD_ERR_PROTOCOL, "name: empty, or not printable UTF-8");
    return is_name(address) ? TD_OK : td_fail(e, TD_ERR_PROTOCOL, "xfer_address: empty, or not printable UTF-8");
}

/* What a worker says of itself decides what the cluster accepts, so values that can't be are refused. */
static enum td_status check_values(const Tandem__Worker__V1__WorkerHello *h, const struct kv_layout *layout,
                                   enum worker_role role, struct td_error *e)
{
    static const uint32_t MOST = 1 << 24; /* as in the workers' options */
    const struct {
        const char *name;
        uint32_t value, least;
    } values[] = {{"max_context", h->max_context, layout->page_tokens},
                  {"max_batch", h->max_batch, 1},
                  {"chunk_tokens", h->chunk_tokens, 1}};
    for (size_t i = 0; role != ROLE_STORE && i < sizeof(values) / sizeof(values[0]); i++)
        if (values[i].value < values[i].least || values[i].value > MOST)
            return td_fail(e, TD_ERR_PROTOCOL, "%s: %u is not in %u..%u", values[i].name, values[i].value,
                           values[i].least, MOST);
    if (role != ROLE_STORE && !h->n_pages)
        return td_fail(e, TD_ERR_PROTOCOL, "n_pages: there is no page for KV");
    return TD_OK;
}

/* A process that two addresses lead to counts once, and better without somebody between. */
static enum td_status check_incarnation(const struct peer *p, uint64_t incarnation, struct td_error *e)
{
    for (uint32_t i = 0; i < p->router->n_peers; i++) {
        struct peer *other = p->router->peers[i];
        if (other == p || other->state != PEER_READY || other->incarnation != incarnation)
            continue;
        if (other->is_passed_on && !p->is_passed_on)
            end_stream(other, "somebody passes its stream on to a worker that is here");
        else
            return td_fail(e, TD_ERR_INVALID, "incarnation: this is the process at %s, which is here already",
                           other->address);
    }
    return TD_OK;
}

/*
 * Whether the peer fits this cluster; the error names the first field that differs. The first worker is
 * adopted.
 */
static enum td_status check_hello(struct peer *p, const Tandem__Worker__V1__WorkerHello *h, struct kv_layout *layout,
                                  struct td_error *e)
{
    struct router *r = p->router;
    enum worker_role role;
    if (h->protocol != LINK_PROTOCOL_VERSION)
        return td_fail(e, TD_ERR_VERSION, "protocol differs: ours %d, theirs %u", LINK_PROTOCOL_VERSION, h->protocol);
    if (!parse_role(h->role, &role) || !h->incarnation)
        return td_fail(e, TD_ERR_PROTOCOL, "role or incarnation is missing");
    enum td_status s = check_incarnation(p, h->incarnation, e);
    if (!s)
        s = kv_layout_decode(h->layout.data, h->layout.len, layout, e);
    if (s)
        return s;
    s = check_values(h, layout, role, e);
    if (s)
        return s;
    if (role == ROLE_STORE && count_stores(r) == MAX_STORES)
        return td_fail(e, TD_ERR_NO_SPACE, "there are %d stores already", MAX_STORES);
    if (role == ROLE_STORE)
        return r->known ? kv_layout_match(&r->layout, layout, e) : TD_OK;
    if (h->fingerprint.len != BLOCK_KEY_BYTES)
        return td_fail(e, TD_ERR_PROTOCOL, "fingerprint is missing");
    s = adapters_check_hello(h, e);
    if (s)
        return s;
    if (!r->known)
        return adopt(r, h, layout, e);
    s = kv_layout_match(&r->layout, layout, e);
    if (s)
        return s;
    if (h->numerics.len != strlen(r->numerics) || memcmp(h->numerics.data, r->numerics, h->numerics.len))
        return td_fail(e, TD_ERR_VERSION, "numerics differ: ours %s, theirs %.*s", r->numerics, (int)h->numerics.len,
                       (const char *)h->numerics.data);
    if (memcmp(h->fingerprint.data, r->fingerprint.b, BLOCK_KEY_BYTES))
        return td_fail(e, TD_ERR_VERSION, "fingerprint differs: other weights under the same shape");
    return adapters_match(r, h, e);
}

/*
 * All stores must have the same codec: a request has one name for each block, and the codec is part of the
 * name.
 */
static enum td_status check_codec(const struct peer *p, const char *codec, struct td_error *e)
{
    for (uint32_t i = 0; i < p->router->n_peers; i++) {
        const struct peer *other = p->router->peers[i];
        if (other != p && other->role == ROLE_STORE && other->state == PEER_READY && strcmp(other->kv_codec, codec))
            return td_fail(e, TD_ERR_VERSION, "kv_codec differs: store %s has %s, this one %s", other->name,
                           other->kv_codec[0] ? other->kv_codec : "a lossless one",
                           codec[0] ? codec : "a lossless one");
    }
    return TD_OK;
}

static void tell_scheduler(struct peer *p)
{
    const struct sched_worker_info info = {.role = p->role,
                                           .chunk_tokens = p->chunk_tokens,
                                           .max_batch = p->max_batch,
                                           .n_pages = p->n_pages,
                                           .max_context = p->max_context,
                                           .incarnation = p->incarnation};
    scheduler_worker_up(p->router->scheduler, p->holder, &info);
    tell_usable(p);
}

/* Tells the worker why it is refused; the worker then ends the stream. */
static void refuse(struct peer *p, const char *why)
{
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__Refusal refusal = TANDEM__WORKER__V1__REFUSAL__INIT;
    snprintf(p->why, sizeof(p->why), "%s", why);
    set_state(p, PEER_REFUSED);
    refusal.why = rpc_data(p->why);
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_REFUSAL;
    m.refusal = &refusal;
    peer_send(p, &m);
    if (p->call)
        rpc_call_close_send(p->call);
}

/* It comes back every RETRY_REFUSED_MS with what it had: only a new reason is logged. */
static void refuse_peer(struct peer *p, const char *why)
{
    if (strcmp(p->why, why))
        log_error(&p->router->log, "worker refused peer=%s why='%s'", p->name, why);
    refuse(p, why);
}

/* Another peer at one of these two addresses of a worker. NULL: none. */
static const struct peer *peer_at(const struct peer *p, const char *address, const char *local)
{
    for (uint32_t i = 0; i < p->router->n_peers; i++) {
        const struct peer *other = p->router->peers[i];
        if (other != p && other->state != PEER_GONE &&
            (!strcmp(other->address, address) || (*local && !strcmp(other->reached, local))))
            return other;
    }
    return NULL;
}

/*
 * The worker proves the secret first, so that the proof of this side goes to nobody else. It also says where
 * it is reached. If that is neither the address that was dialled nor the one that the connection was made to,
 * somebody passes the stream on: a proxy, if this router knows no other way to the worker. Otherwise it may
 * be anybody who listens at a port that another worker has left.
 */
static void on_challenge(struct peer *p, const Tandem__Worker__V1__Challenge *challenge)
{
    struct router *r = p->router;
    uint8_t proof[SECRET_MAC_BYTES];
    char address[sizeof(p->address)], local[RPC_PEER_BYTES], reached[RPC_PEER_BYTES], why[sizeof(p->why)];
    copy_text(address, sizeof(address), challenge->address);
    copy_text(local, sizeof(local), challenge->local);
    p->said.address = address;
    p->said.local = local;
    bool is_known = proof_nonce_read(challenge->nonce, p->said.worker) &&
                    proof_verify(r->secret, ATTACH_WORKER, &p->said, challenge->proof);
    p->said.address = p->said.local = NULL;
    if (!is_known) {
        refuse_peer(p, "challenge: not by this cluster's secret");
        return;
    }
    rpc_call_peer(p->call, reached);
    p->is_passed_on = strcmp(address, p->address) && (!*local || strcmp(local, reached));
    if (p->is_passed_on && peer_at(p, address, local)) {
        snprintf(why, sizeof(why), "address: somebody passes this stream on to the worker at %.100s", address);
        refuse_peer(p, why);
        return;
    }
    snprintf(p->reached, sizeof(p->reached), "%s", p->is_passed_on ? "" : local);
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__Proof answer = TANDEM__WORKER__V1__PROOF__INIT;
    proof_sign(r->secret, ATTACH_ROUTER, &p->said, proof);
    answer.proof = (ProtobufCBinaryData){sizeof(proof), proof};
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_PROOF;
    m.proof = &answer;
    p->is_proved = true;
    p->n_floods = 0;
    rpc_call_proved(p->call);
    peer_send(p, &m);
}

static void on_hello(struct peer *p, const Tandem__Worker__V1__WorkerHello *h)
{
    struct router *r = p->router;
    struct td_error e = {{0}};
    struct kv_layout layout;
    copy_text(p->name, sizeof(p->name), h->name);
    bool is_named = is_name(p->name);
    if (!is_named)
        snprintf(p->name, sizeof(p->name), "%.63s", p->address);
    parse_role(h->role, &p->role);
    rpc_text_clean((const char *)h->kv_codec.data, h->kv_codec.len, p->kv_codec, sizeof(p->kv_codec));
    if (check_name(is_named, h, &e) || check_hello(p, h, &layout, &e) ||
        (p->role == ROLE_STORE && check_codec(p, p->kv_codec, &e))) {
        refuse_peer(p, e.text);
        return;
    }
    copy_text(p->xfer_address, sizeof(p->xfer_address), h->xfer_address);
    p->pid = h->pid;
    if (p->incarnation != h->incarnation)
        breaker_try(&p->breaker, clock_now(&r->clock));
    p->draining &= p->incarnation == h->incarnation;
    p->drain_asked &= p->draining;
    p->incarnation = h->incarnation;
    p->n_pages = h->n_pages;
    p->max_context = h->max_context;
    p->max_batch = h->max_batch;
    p->chunk_tokens = h->chunk_tokens;
    p->weight_bytes = h->weight_bytes;
    p->layout = layout;
    p->next_event = 0; /* a worker sends its snapshot without being asked */
    p->drained = false;
    p->snapshot_asked = true;
    if (p->role == ROLE_STORE)
        memcpy(r->kv_codec, p->kv_codec, sizeof(r->kv_codec));
    set_state(p, PEER_READY);
    find_context(r);
    tell_scheduler(p);
    prefix_tell(p);
    if (p->drain_asked)
        tell_drain(p);
    log_info(&r->log, "worker ready peer=%s incarnation=%016llx xfer=%s", p->name, (unsigned long long)p->incarnation,
             p->xfer_address);
}

/* Events are missing: asks for a snapshot, once until it comes. */
static void ask_snapshot(struct peer *p)
{
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__SnapshotRequest s = TANDEM__WORKER__V1__SNAPSHOT_REQUEST__INIT;
    if (p->snapshot_asked)
        return;
    p->snapshot_asked = true;
    metrics_inc(p->router->counters, ROUTER_INDEX_GAPS, 1);
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_SNAPSHOT;
    m.snapshot = &s;
    peer_send(p, &m);
}

/*
 * Block events for the index. A snapshot begins with BLOCK_CLEARED; other events must continue the sequence.
 */
static void on_events(struct peer *p, ProtobufCBinaryData b)
{
    struct router *r = p->router;
    struct events_header h;
    if (events_decode(b.data, b.len, &h) || h.incarnation != p->incarnation) {
        log_warn(&r->log, "events that can't be read peer=%s", p->name);
        ask_snapshot(p);
        return;
    }
    bool snapshot = h.count && events_at(b.data, 0).kind == BLOCK_CLEARED;
    if (!snapshot && h.first_sequence != p->next_event) {
        ask_snapshot(p);
        return;
    }
    if (snapshot)
        p->snapshot_asked = false;
    p->whole |= h.count < EVENTS_MAX; /* a longer snapshot comes in several messages */
    struct block_event events[EVENTS_AT_ONCE];
    for (uint32_t i = 0, n; i < h.count; i += n) {
        for (n = 0; n < EVENTS_AT_ONCE && i + n < h.count; n++)
            events[n] = events_at(b.data, i + n);
        index_apply(r->index, p->holder, events, n);
    }
    p->next_event = h.first_sequence + h.count;
}

/*
 * The worker makes no progress: its requests are re-planned. The stream stays, so the worker gets their
 * cancellations when it goes on. The breaker is tripped and the scheduler told first, so that no new plan
 * uses it.
 */
static void stall(struct peer *p)
{
    struct router *r = p->router;
    log_warn(&r->log, "worker makes no progress and is left out peer=%s steps=%llu", p->name,
             (unsigned long long)p->progress.n_steps);
    p->stalled = true;
    p->probe = 0;
    breaker_trip(&p->breaker, clock_now(&r->clock));
    tell_usable(p);
    struct request *q, *next;
    TAILQ_FOREACH_SAFE (q, &r->requests, in_router, next) {
        if (q->state == REQUEST_PLACED)
            request_peer_lost(q, p, REPLAN_STALLED);
    }
}

/* Judges by a heartbeat whether the worker makes progress, and keeps its list of legs for replan_tick(). */
static void judge_progress(struct peer *p, const Tandem__Worker__V1__Load *l)
{
    const struct progress_report report = {.n_steps = l->steps_ended,
                                           .n_taken = l->taken,
                                           .n_sent = peer_n_sent(p),
                                           .busy = l->busy,
                                           .expected_ms = l->step_expected_ms,
                                           .running_ms = l->step_running_ms};
    bool tells = l->taken || l->steps_ended || l->step_expected_ms > 0 || l->busy;
    if (!tells || p->role == ROLE_STORE) /* an older worker does not report progress */
        return;
    bool moves = progress_judge(&p->progress, &report, p->heard_ns);
    p->taken = l->taken;
    p->n_legs = (uint32_t)l->n_legs;
    p->legs = mem_resize(p->legs, l->n_legs, sizeof(*p->legs));
    if (l->n_legs)
        memcpy(p->legs, l->legs, l->n_legs * sizeof(*p->legs));
    p->legs_told = true;
    if (!moves && !p->stalled) {
        stall(p);
    } else if (moves && p->stalled) {
        log_info(&p->router->log, "worker makes progress again peer=%s", p->name);
        p->stalled = false;
        tell_usable(p);
    }
}

/* Bounds a number that a worker sent, so that no prediction becomes infinite. 0 if it is not finite. */
static double bounded(double x, double least, double most)
{
    return isfinite(x) ? fmin(fmax(x, least), most) : 0;
}

/* Whether a reported step has plausible values. */
static bool is_step(const Tandem__Worker__V1__Step *m)
{
    return m->ms > 0 && m->ms <= MOST_STEP_MS && m->prefill_square >= 0 && m->prefill_square <= MOST_SQUARE &&
           m->context >= 0 && m->context <= MOST_TOKENS && m->batch <= MOST_TOKENS && m->prefill_tokens <= MOST_TOKENS;
}

/* Passes measured times to the scheduler. */
static void learn(struct peer *p, const Tandem__Worker__V1__Load *l)
{
    struct scheduler *s = p->router->scheduler;
    scheduler_observe_loading(s, p->holder, bounded(l->load_ms, -MOST_STEP_MS, MOST_STEP_MS),
                              bounded(l->load_dram_ms, -MOST_STEP_MS, MOST_STEP_MS),
                              bounded(l->load_ssd_ms, -MOST_STEP_MS, MOST_STEP_MS));
    scheduler_observe_fetching(s, p->holder, bounded(l->fetch_ms, -MOST_STEP_MS, MOST_STEP_MS),
                               bounded(l->fetch_block_ms, -MOST_STEP_MS, MOST_STEP_MS));
    for (size_t i = 0; i < l->n_steps; i++) {
        const Tandem__Worker__V1__Step *m = l->steps[i];
        const struct cost_step step = {.n_prompts = m->n_prompts,
                                       .prefill_tokens = m->prefill_tokens,
                                       .prefill_square = m->prefill_square,
                                       .batch = m->batch,
                                       .context = m->context,
                                       .ms = m->ms};
        if (is_step(m))
            scheduler_observe_step(s, p->holder, &step);
    }
}

static struct peer_load load_of(const Tandem__Worker__V1__Load *l)
{
    return (struct peer_load){.free_pages = l->free_pages,
                              .cached_pages = l->cached_pages,
                              .held_pages = l->held_pages,
                              .leased_pages = l->leased_pages,
                              .quarantined_pages = l->quarantined_pages,
                              .total_pages = l->total_pages,
                              .running = l->running,
                              .waiting = l->waiting,
                              .kv_bytes_in = l->kv_bytes_in,
                              .kv_bytes_out = l->kv_bytes_out,
                              .store_blocks_dram = l->store_blocks_dram,
                              .store_blocks_ssd = l->store_blocks_ssd,
                              .store_bytes_ssd = l->store_bytes_ssd};
}

/* A heartbeat. */
static void on_load(struct peer *p, const Tandem__Worker__V1__Load *l)
{
    if (progress_unacked_ms(&p->hears, l->heard, peer_n_sent(p), p->heard_ns) >=
        (double)p->router->options.silence_ms) {
        end_stream(p, "it does not hear us");
        return;
    }
    p->heard = l->heard;
    if (l->draining)
        peer_drains(p);
    p->load = load_of(l);
    rpc_text_clean((const char *)l->transport.data, l->transport.len, p->transport, sizeof(p->transport));
    learn(p, l);
    pairs_learn(p, l);
    judge_progress(p, l);
}

/* Load of other routers on this worker. */
static void on_backlog(struct peer *p, const Tandem__Worker__V1__Backlog *m)
{
    const struct sched_report report = {.own_prompts = m->own_prompts,
                                        .own_tokens = bounded(m->own_tokens, 0, MOST_TOKENS),
                                        .n_prompts = m->prompts,
                                        .tokens = bounded(m->tokens, 0, MOST_TOKENS),
                                        .square = bounded(m->square, 0, MOST_SQUARE),
                                        .running = m->running,
                                        .context = bounded(m->context, 0, MOST_TOKENS),
                                        .generated = bounded(m->generated, 0, MOST_TOKENS),
                                        .tpot_limit_ms = bounded(m->tpot_ms, 0, MOST_STEP_MS),
                                        .n_routers = m->routers,
                                        .queued_ms = bounded(m->queued_ms, 0, MOST_TOKENS)};
    p->is_shared = m->attached > 1;
    p->n_attached = m->attached;
    if (p->role != ROLE_STORE)
        scheduler_observe_report(p->router->scheduler, p->holder, &report, clock_now(&p->router->clock));
}

void peer_tell_demand(struct peer *p, double queued_ms)
{
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__Demand demand = TANDEM__WORKER__V1__DEMAND__INIT;
    if (p->state != PEER_READY || !p->is_shared || p->told_ms == queued_ms)
        return;
    p->told_ms = queued_ms;
    demand.queued_ms = queued_ms;
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_DEMAND;
    m.demand = &demand;
    peer_send(p, &m);
}

/* Whether a message of this kind may come now: challenge, then hello, then all others. */
static bool is_due(const struct peer *p, int kind)
{
    if (p->state != PEER_READY)
        return kind == (p->is_proved ? TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_HELLO
                                     : TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_CHALLENGE);
    return kind != TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_HELLO &&
           kind != TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_CHALLENGE;
}

void peer_message(struct peer *p, const Tandem__Worker__V1__WorkerMessage *m)
{
    struct router *r = p->router;
    struct request *q;
    if (p->state == PEER_REFUSED) /* messages that were under way when it was refused */
        return;
    p->heard_ns = router_patience(r);
    if (m->number != ++p->n_heard) {
        end_stream(p, "a message is missing or doubled");
        return;
    }
    if (!is_due(p, m->kind_case)) {
        end_stream(p, "its messages are out of order");
        return;
    }
    switch (m->kind_case) {
    case TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_CHALLENGE:
        on_challenge(p, m->challenge);
        break;
    case TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_HELLO:
        on_hello(p, m->hello);
        break;
    case TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_ACCEPTED:
        if ((q = router_find(r, m->accepted->id)) && q->decode == p)
            request_accepted(q);
        break;
    case TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_TOKENS:
        for (size_t i = 0; i < m->tokens->n_tokens; i++) {
            const Tandem__Worker__V1__Token *t = m->tokens->tokens[i];
            if ((q = router_find(r, t->id)))
                request_token(q, p, t);
        }
        break;
    case TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_END:
        if ((q = router_find(r, m->end->id)))
            request_leg_end(q, p, m->end);
        break;
    case TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_LOAD:
        on_load(p, m->load);
        break;
    case TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_EVENTS:
        on_events(p, m->events);
        break;
    case TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_AUDIT:
        audit_answered(p, m->audit);
        break;
    case TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_BACKLOG:
        on_backlog(p, m->backlog);
        break;
    case TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_PINS:
        prefix_told(p, m->pins);
        break;
    default:
        break; /* a newer worker may send other kinds */
    }
}
