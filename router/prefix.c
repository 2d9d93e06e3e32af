/*
 * Prompts that clients pin or flush. Workers and stores are told the keys of the blocks and do the rest. Pins
 * are remembered here until they end, and told to each worker and store that becomes ready.
 *
 * A flush goes to the workers and stores that are ready, in order with other messages. The call does not wait
 * for them.
 *
 * Several routers, and a router that restarts: when a router attaches, workers and stores tell it their pins,
 * and later every change that another router asks for (worker/keeps.h). The router passes news on to the
 * peers that did not send them. Pins that were ended early are remembered for a while (struct unpinned): a
 * peer that was away at that time still reports them, and is then told that they have ended.
 */
#include <stdlib.h>
#include <string.h>

#include "router/router_internal.h"
#include "sched/pins.h"

enum { RETRY_MS = 1000, UNPINNED_KEPT = 1024 };

struct unpinned { /* a ring; entries with n 0 are free */
    struct {
        struct block_key last;
        uint32_t n;
        uint64_t until_ns; /* when the pin would have ended */
    } list[UNPINNED_KEPT];
    uint32_t at;
};

/* ----------------------------------------------------------------- telling */

static ProtobufCBinaryData keys_data(const struct block_key *keys, uint32_t n)
{
    return (ProtobufCBinaryData){(size_t)n * sizeof(*keys), (uint8_t *)(uintptr_t)keys};
}

static void send_keep(struct peer *p, const struct block_key *keys, uint32_t n, uint32_t ttl_ms)
{
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__Keep keep = TANDEM__WORKER__V1__KEEP__INIT;
    keep.keys = keys_data(keys, n);
    keep.ttl_ms = ttl_ms;
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_KEEP;
    m.keep = &keep;
    peer_send(p, &m);
}

static void send_pinned(void *user, const struct pin_entry *x)
{
    struct peer *p = user;
    uint64_t now = clock_now(&p->router->clock);
    if (x->until_ns > now)
        send_keep(p, x->keys, x->n, (uint32_t)((x->until_ns - now + NS_PER_MS - 1) / NS_PER_MS));
}

void prefix_tell(struct peer *p)
{
    pin_list_each(&p->router->pinned, send_pinned, p);
}

/* Number of peers that may come back and that a flush did not reach. */
static uint32_t count_away(const struct router *r)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < r->n_peers; i++)
        n += r->peers[i]->state != PEER_READY && r->peers[i]->state != PEER_GONE &&
             (!r->peers[i]->drained || r->peers[i]->role == ROLE_STORE); /* a store's disk outlives it */
    return n;
}

static uint32_t forget_pins(struct router *r, const struct block_key *keys, uint32_t n)
{
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__Forget forget = TANDEM__WORKER__V1__FORGET__INIT;
    uint32_t told = 0;
    forget.keys = keys_data(keys, n);
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_FORGET;
    m.forget = &forget;
    for (uint32_t i = 0; i < r->n_peers; i++) {
        if (r->peers[i]->state != PEER_READY)
            continue;
        peer_send(r->peers[i], &m);
        prefix_tell(r->peers[i]); /* pinned prompts may share the blocks that were just forgotten */
        told++;
    }
    return told;
}

static uint32_t keep(struct router *r, const struct block_key *keys, uint32_t n, uint32_t ttl_ms)
{
    uint32_t told = 0;
    for (uint32_t i = 0; i < r->n_peers; i++) {
        if (r->peers[i]->state != PEER_READY)
            continue;
        send_keep(r->peers[i], keys, n, ttl_ms);
        if (!ttl_ms)
            prefix_tell(r->peers[i]);
        told++;
    }
    return told;
}

/* ------------------------------------------------------------------ pinned */

static void remember(struct router *r, const struct block_key *last, uint32_t n, uint64_t until_ns)
{
    struct unpinned *u = r->unpinned = r->unpinned ? r->unpinned : mem_zalloc(sizeof(*u));
    uint32_t at = u->at++ % UNPINNED_KEPT;
    u->list[at].last = *last;
    u->list[at].n = n;
    u->list[at].until_ns = until_ns;
}

static void unpin(struct router *r, const struct block_key *keys, uint32_t n)
{
    uint64_t until_ns = n ? pin_list_remove(&r->pinned, keys, n) : 0;
    if (until_ns)
        remember(r, &keys[n - 1], n, until_ns);
}

/* Whether the prompt was unpinned here, and this end is not later than that pin's. */
static bool is_unpinned(const struct router *r, const struct block_key *keys, uint32_t n, uint64_t until_ns)
{
    for (uint32_t i = 0; r->unpinned && i < UNPINNED_KEPT; i++)
        if (r->unpinned->list[i].n == n && block_key_equal(&r->unpinned->list[i].last, &keys[n - 1]) &&
            until_ns <= r->unpinned->list[i].until_ns + PIN_NEWS_NS)
            return true;
    return false;
}

/* A client pins the prompt again. */
static void forget_unpinned(struct router *r, const struct block_key *keys, uint32_t n)
{
    for (uint32_t i = 0; r->unpinned && i < UNPINNED_KEPT; i++)
        if (r->unpinned->list[i].n == n && block_key_equal(&r->unpinned->list[i].last, &keys[n - 1]))
            r->unpinned->list[i].n = 0;
}

void prefix_tick(struct router *r, uint64_t now)
{
    pin_list_expire(&r->pinned, now);
}

void prefix_close(struct router *r)
{
    pin_list_free(&r->pinned);
    free(r->unpinned);
    r->unpinned = NULL;
}

static void remember_unpinned(void *user, const struct pin_entry *x)
{
    remember(user, &x->keys[x->n - 1], x->n, x->until_ns);
}

static void unpin_all(struct router *r)
{
    pin_list_each(&r->pinned, remember_unpinned, r);
    pin_list_free(&r->pinned);
}

/* Most blocks that the tenant of p may pin: what its key says, else half of all. */
static uint32_t pins_of_tenant(struct router *r, const struct params *p)
{
    struct key_terms terms = {.pin_blocks = UINT32_MAX};
    if (p->key)
        keys_terms(r->keys, p->key, &terms);
    return terms.pin_blocks != UINT32_MAX ? terms.pin_blocks : (uint32_t)r->options.pin_blocks / 2;
}

static enum td_status pin(struct router *r, const struct params *p, const struct block_key *keys, uint32_t n,
                          uint64_t until_ns, struct td_error *e)
{
    uint32_t most = pins_of_tenant(r, p);
    /* Without keys everybody may call himself what he likes: one tenant, and a share would only halve it. */
    uint32_t owner = r->keys ? 1 + (uint32_t)(ring_id(p->tenant.data, p->tenant.len) % (PIN_OWNERS - 1)) : 0;
    enum pin_change change =
        pin_list_add_for(&r->pinned, keys, n, until_ns, (uint32_t)r->options.pin_blocks, owner, most);
    if (change == PIN_NO_SHARE)
        return td_fail(e, TD_ERR_NO_SPACE, "prefix: %u blocks, and the tenant has pinned %u of at most %u", n,
                       r->pinned.of_owner[owner], most);
    if (change == PIN_NO_ROOM)
        return td_fail(e, TD_ERR_NO_SPACE,
                       "prefix: %u blocks, and %u of at most %lld are pinned already (--pin-blocks)", n,
                       r->pinned.n_blocks, (long long)r->options.pin_blocks);
    forget_unpinned(r, keys, n);
    return TD_OK;
}

/* ------------------------------------------------- what workers and stores tell */

static void tell_others(struct peer *from, const struct block_key *keys, uint32_t n, uint32_t ttl_ms)
{
    struct router *r = from->router;
    for (uint32_t i = 0; i < r->n_peers; i++)
        if (r->peers[i] != from && r->peers[i]->state == PEER_READY)
            send_keep(r->peers[i], keys, n, ttl_ms);
}

/*
 * A peer reports one pin. held: it had the pin before this router attached; otherwise a client of another
 * router asks for it now. True: the pin was ended here before, and the peer was told so.
 */
static bool told_one(struct peer *p, const struct block_key *keys, uint32_t n, uint32_t ttl_ms, bool held)
{
    struct router *r = p->router;
    uint64_t until_ns = clock_now(&r->clock) + ttl_ms * NS_PER_MS;
    if (!ttl_ms) { /* another router ended the pin, and told its peers */
        unpin(r, keys, n);
        return false;
    }
    if (held && is_unpinned(r, keys, n, until_ns)) {
        send_keep(p, keys, n, 0);
        return true;
    }
    forget_unpinned(r, keys, n);
    enum pin_change change = pin_list_add(&r->pinned, keys, n, until_ns, (uint32_t)r->options.pin_blocks);
    if (change == PIN_NEWS)
        tell_others(p, keys, n, ttl_ms);
    else if (change == PIN_NO_ROOM)
        log_warn(&r->log, "a pin of another router is left to who has it: --pin-blocks peer=%s blocks=%u", p->name, n);
    return false;
}

void prefix_told(struct peer *p, const Tandem__Worker__V1__Pins *m)
{
    bool some_over = false;
    for (size_t i = 0; i < m->n_keeps; i++) {
        ProtobufCBinaryData data = m->keeps[i]->keys;
        uint32_t ttl_ms = m->keeps[i]->ttl_ms < MAX_PIN_MS ? m->keeps[i]->ttl_ms : MAX_PIN_MS;
        if (!data.len || data.len % BLOCK_KEY_BYTES || data.len / BLOCK_KEY_BYTES > PINS_MAX) {
            log_warn(&p->router->log, "a pin that can't be read peer=%s bytes=%zu", p->name, data.len);
            continue;
        }
        struct block_key *keys = mem_dup(data.data, data.len);
        some_over |= told_one(p, keys, (uint32_t)(data.len / BLOCK_KEY_BYTES), ttl_ms, m->held);
        free(keys);
    }
    if (some_over)
        prefix_tell(p); /* other pinned prompts may share the blocks */
}

/* ------------------------------------------------------------------- calls */

/* False: the call was ended, since block keys can't be made before a first worker came. */
static bool can_name(struct router *r, struct rpc_call *call)
{
    if (r->known)
        return true;
    rpc_call_finish(call, RPC_UNAVAILABLE, "no worker is up yet", RETRY_MS);
    rpc_call_unref(call);
    return false;
}

void prefix_pin(struct router *r, struct rpc_call *call, const struct params *p, uint32_t ttl_ms)
{
    Tandem__V1__PinResponse answer = TANDEM__V1__PIN_RESPONSE__INIT;
    struct td_error e = {{0}};
    struct block_key root;
    uint32_t n;
    if (!can_name(r, call))
        return;
    struct block_key *keys = place_keys(r, p, &n, &root);
    enum td_status s = TD_OK;
    if (n && ttl_ms)
        s = pin(r, p, keys, n, clock_now(&r->clock) + ttl_ms * NS_PER_MS, &e);
    else
        unpin(r, keys, n);
    if (!s) {
        answer.prefix_tokens = n * r->layout.page_tokens;
        answer.cached_tokens = place_cached(r, keys, n) * r->layout.page_tokens;
        answer.told = n ? keep(r, keys, n, ttl_ms) : 0;
    }
    free(keys);
    router_answer_simple(call, &answer.base, s, &e);
}

void prefix_flush(struct router *r, struct rpc_call *call, const struct params *p)
{
    Tandem__V1__FlushResponse answer = TANDEM__V1__FLUSH_RESPONSE__INIT;
    struct block_key root;
    uint32_t n;
    if (!can_name(r, call))
        return;
    struct block_key *keys = place_keys(r, p, &n, &root);
    unpin(r, keys, n);
    answer.prefix_tokens = n * r->layout.page_tokens;
    answer.told = n ? forget_pins(r, keys, n) : 0;
    answer.away = count_away(r);
    free(keys);
    router_answer_simple(call, &answer.base, TD_OK, NULL);
}

void prefix_flush_all(struct router *r, struct rpc_call *call)
{
    Tandem__Admin__V1__FlushResponse answer = TANDEM__ADMIN__V1__FLUSH_RESPONSE__INIT;
    unpin_all(r);
    answer.told = forget_pins(r, NULL, 0);
    answer.away = count_away(r);
    router_answer_simple(call, &answer.base, TD_OK, NULL);
}
