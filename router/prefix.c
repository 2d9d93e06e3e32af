/*
 * Prompts that clients pin or flush. Workers and stores are told the keys of their blocks and do the rest; what is pinned is remembered
 * here until it is over, for those that come or return.
 *
 * A flush is heard by those that are ready, each in the order of what it was told before. Nobody waits for them.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "router/router_internal.h"

struct pinned {
    struct pinned *next;
    struct block_key *keys;
    uint32_t n;
    uint64_t until_ns;
};

enum { RETRY_MS = 1000 };

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

static void send_pinned(struct peer *p, const struct pinned *x, uint64_t now)
{
    if (x->until_ns > now)
        send_keep(p, x->keys, x->n, (uint32_t)((x->until_ns - now + NS_PER_MS - 1) / NS_PER_MS));
}

void prefix_tell(struct peer *p)
{
    uint64_t now = clock_now(&p->router->clock);
    for (const struct pinned *x = p->router->pinned; x; x = x->next)
        send_pinned(p, x, now);
}

/* The others are somewhere, or will be back, and know nothing of it. */
static uint32_t count_away(const struct router *r)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < r->n_peers; i++)
        n += r->peers[i]->state != PEER_READY && r->peers[i]->state != PEER_GONE && !r->peers[i]->drained;
    return n;
}

static uint32_t forget(struct router *r, const struct block_key *keys, uint32_t n)
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
        prefix_tell(r->peers[i]); /* other prompts may begin with the same blocks */
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

static void unpin(struct router *r, struct pinned **at)
{
    struct pinned *x = *at;
    *at = x->next;
    r->n_pinned -= x->n;
    free(x->keys);
    free(x);
}

void prefix_tick(struct router *r, uint64_t now)
{
    for (struct pinned **at = &r->pinned; *at;)
        if ((*at)->until_ns <= now)
            unpin(r, at);
        else
            at = &(*at)->next;
}

void prefix_close(struct router *r)
{
    while (r->pinned)
        unpin(r, &r->pinned);
}

/* Keys are chained: equal last ones are equal all. */
static struct pinned **find(struct router *r, const struct block_key *keys, uint32_t n)
{
    struct pinned **at = &r->pinned;
    while (*at && ((*at)->n != n || !block_key_equal(&(*at)->keys[n - 1], &keys[n - 1])))
        at = &(*at)->next;
    return at;
}

static enum td_status pin(struct router *r, const struct block_key *keys, uint32_t n, uint64_t until_ns,
                          struct td_error *e)
{
    struct pinned *x = *find(r, keys, n);
    if (!x && r->n_pinned + n > (uint64_t)r->options.pin_blocks)
        return td_fail(e, TD_ERR_NO_SPACE,
                       "prefix: %u blocks, and %u of at most %lld are pinned already (--pin-blocks)", n, r->n_pinned,
                       (long long)r->options.pin_blocks);
    if (!x) {
        x = mem_zalloc(sizeof(*x));
        *x = (struct pinned){r->pinned, mem_dup(keys, n * sizeof(*keys)), n, 0};
        r->pinned = x;
        r->n_pinned += n;
    }
    x->until_ns = until_ns > x->until_ns ? until_ns : x->until_ns;
    return TD_OK;
}

/* ------------------------------------------------------------------- calls */

/* False: the call has ended, nobody has told what the names are made of. */
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
        s = pin(r, keys, n, clock_now(&r->clock) + ttl_ms * NS_PER_MS, &e);
    else if (n && *find(r, keys, n))
        unpin(r, find(r, keys, n));
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
    if (n && *find(r, keys, n))
        unpin(r, find(r, keys, n));
    answer.prefix_tokens = n * r->layout.page_tokens;
    answer.told = n ? forget(r, keys, n) : 0;
    answer.away = count_away(r);
    free(keys);
    router_answer_simple(call, &answer.base, TD_OK, NULL);
}

void prefix_flush_all(struct router *r, struct rpc_call *call)
{
    Tandem__Admin__V1__FlushResponse answer = TANDEM__ADMIN__V1__FLUSH_RESPONSE__INIT;
    prefix_close(r);
    answer.told = forget(r, NULL, 0);
    answer.away = count_away(r);
    router_answer_simple(call, &answer.base, TD_OK, NULL);
}
