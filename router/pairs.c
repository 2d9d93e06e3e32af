/*
 * Which workers can read pages from which peers. Each worker is told the addresses from which it may have to
 * read. It connects to them at once, and its heartbeats name those to which it can't connect. Until it has
 * connected after all (it goes on trying), such a worker is in no split plan with this reader, and such a
 * store is not named to it.
 *
 * A worker reads from stores and, if another worker has a prefix of its prompt, from that worker. It is told
 * at most CONNECTED_MAX addresses: stores first, then workers that hand prompts over to it, then the others.
 * The list begins at the worker's own place, so that different workers are told different addresses if there
 * are more. Pairs that were not told connect at the first use.
 */
#include <string.h>

#include "router/router_internal.h"

enum { CONNECTED_MAX = 16 };

enum { STORE, HANDS_OVER, OTHER, RANKS };

/* How urgently p needs a connection to `from`; STORE is the most urgent. */
static int rank(const struct peer *p, const struct peer *from)
{
    return from->role == ROLE_STORE ? STORE : from->role == ROLE_PREFILL && p->role == ROLE_DECODE ? HANDS_OVER : OTHER;
}

/* Whether p may have to read from `from`. With --prefix compute only handovers are read. */
static bool may_read(const struct peer *p, const struct peer *from)
{
    if (p == from || from->state != PEER_READY || !from->xfer_address[0])
        return false;
    bool loads = strcmp(p->router->options.prefix, "compute") != 0;
    return rank(p, from) == HANDS_OVER || loads;
}

/* Tells p its addresses, unless it was told the same before. */
static void tell_pairs(struct peer *p)
{
    struct router *r = p->router;
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__Peers peers = TANDEM__WORKER__V1__PEERS__INIT;
    ProtobufCBinaryData list[CONNECTED_MAX];
    for (int wanted = 0; wanted < RANKS; wanted++)
        for (uint32_t i = 0; i < r->n_peers && peers.n_xfer_addresses < CONNECTED_MAX; i++) {
            const struct peer *from = r->peers[(p->holder + i) % r->n_peers];
            if (may_read(p, from) && rank(p, from) == wanted)
                list[peers.n_xfer_addresses++] = rpc_data(from->xfer_address);
        }
    uint64_t told = 0; /* stays 0 for an empty list */
    for (size_t i = 0; i < peers.n_xfer_addresses; i++)
        told = ring_id((const char *)list[i].data, list[i].len) + 31 * told;
    if (told == p->peers_told)
        return;
    p->peers_told = told;
    peers.xfer_addresses = list;
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_PEERS;
    m.peers = &peers;
    peer_send(p, &m);
}

void pairs_tick(struct router *r)
{
    if (!r->pairs_changed)
        return;
    r->pairs_changed = false;
    for (uint32_t i = 0; i < r->n_peers; i++)
        if (r->peers[i]->state == PEER_READY && r->peers[i]->role != ROLE_STORE)
            tell_pairs(r->peers[i]);
}

static bool is_listed(const Tandem__Worker__V1__Load *l, const char *address)
{
    for (size_t i = 0; i < l->n_unreached; i++)
        if (l->unreached[i].len == strlen(address) && !memcmp(l->unreached[i].data, address, l->unreached[i].len))
            return true;
    return false;
}

void pairs_learn(struct peer *p, const Tandem__Worker__V1__Load *l)
{
    struct router *r = p->router;
    if (p->role == ROLE_STORE || (!l->n_unreached && !p->n_unreached))
        return;
    p->n_unreached = 0;
    for (uint32_t i = 0; i < r->n_peers; i++) {
        const struct peer *from = r->peers[i];
        if (!may_read(p, from))
            continue;
        bool can = !is_listed(l, from->xfer_address), could = scheduler_can_read(r->scheduler, p->holder, from->holder);
        p->n_unreached += !can;
        scheduler_worker_reads(r->scheduler, p->holder, from->holder, can);
        if (can != could && can)
            log_info(&r->log, "pair connects again reader=%s holder=%s", p->name, from->name);
        else if (can != could)
            log_warn(&r->log, "pair can't connect, and gets no requests together reader=%s holder=%s address=%s",
                     p->name, from->name, from->xfer_address);
    }
}

uint32_t pairs_unreached(const struct peer *p, ProtobufCBinaryData *names_out)
{
    const struct router *r = p->router;
    uint32_t n = 0;
    for (uint32_t i = 0; i < r->n_peers && p->n_unreached; i++)
        if (may_read(p, r->peers[i]) && !scheduler_can_read(r->scheduler, p->holder, r->peers[i]->holder))
            names_out[n++] = rpc_data(r->peers[i]->name);
    return n;
}
