#include "proto/rpc/rpc_senders.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"

/* What an address of IPv4 begins with: no network of IPv6 does (0000::/8 is reserved, RFC 4291). */
static const uint8_t V4[4] = {0, 0, 0xff, 0xff};

struct rpc_origin rpc_origin_of(const struct sockaddr_storage *a)
{
    uint8_t bytes[8] = {0};
    bool is_local = true, is_v4 = a->ss_family == AF_INET;
    const uint8_t *v4 = (const uint8_t *)&((const struct sockaddr_in *)a)->sin_addr;
    if (a->ss_family == AF_INET6) {
        const struct in6_addr *v6 = &((const struct sockaddr_in6 *)a)->sin6_addr;
        is_v4 = IN6_IS_ADDR_V4MAPPED(v6);
        v4 = v6->s6_addr + 12;
        memcpy(bytes, v6->s6_addr, sizeof(bytes));
        is_local = IN6_IS_ADDR_LOOPBACK(v6);
    }
    if (is_v4) {
        memcpy(bytes, V4, sizeof(V4));
        memcpy(bytes + sizeof(V4), v4, 4);
        is_local = v4[0] == IN_LOOPBACKNET;
    }
    struct rpc_origin o = {0};
    if (!is_local)
        memcpy(&o.key, bytes, sizeof(bytes));
    return o;
}

void rpc_origin_print(struct rpc_origin o, char out[RPC_ORIGIN_BYTES])
{
    uint8_t bytes[16] = {0};
    memcpy(bytes, &o, sizeof(o));
    bool is_v4 = !memcmp(bytes, V4, sizeof(V4));
    snprintf(out, RPC_ORIGIN_BYTES, "here");
    if (!o.key)
        return;
    inet_ntop(is_v4 ? AF_INET : AF_INET6, is_v4 ? bytes + sizeof(V4) : bytes, out, RPC_ORIGIN_BYTES - 4);
    if (!is_v4)
        strcat(out, "/64");
}

bool rpc_waste_add(struct rpc_waste *w, uint32_t n, uint64_t now_ns)
{
    if (now_ns - w->since_ns > NS_PER_S)
        *w = (struct rpc_waste){0, now_ns};
    w->n += n;
    bool is_much = w->n > RPC_WASTE_MOST;
    w->n = is_much ? 0 : w->n;
    return is_much;
}

/* RPC_SENDERS: it is not in the table. */
static int find(const struct rpc_senders *s, struct rpc_origin from)
{
    int i = 0;
    while (i < RPC_SENDERS && !(from.key && s->all[i].from.key == from.key))
        i++;
    return i;
}

/* Whether a makes room before b. */
static bool goes_first(const struct rpc_sender *a, const struct rpc_sender *b, uint64_t now_ns)
{
    bool a_waits = a->until_ns > now_ns, b_waits = b->until_ns > now_ns;
    return a_waits != b_waits ? b_waits : a->heard_ns < b->heard_ns;
}

/* NULL: it is no address. */
static struct rpc_sender *take(struct rpc_senders *s, struct rpc_origin from, uint64_t now_ns)
{
    int i = find(s, from);
    struct rpc_sender *found = i < RPC_SENDERS ? &s->all[i] : NULL;
    if (!from.key)
        return NULL;
    if (!found) {
        found = &s->all[0];
        for (i = 1; i < RPC_SENDERS; i++)
            if (goes_first(&s->all[i], found, now_ns))
                found = &s->all[i];
        *found = (struct rpc_sender){.from = from, .n_credit = RPC_CREDIT_FIRST};
    }
    found->heard_ns = now_ns;
    return found;
}

/* That are remembered. */
static uint32_t n_floods(const struct rpc_sender *it, uint64_t now_ns)
{
    bool is_known = it->until_ns && now_ns < it->until_ns + RPC_FLOOD_MEMORY_MS * NS_PER_MS;
    return is_known ? it->n_before + 1 : 0;
}

bool rpc_senders_waste(struct rpc_senders *s, struct rpc_origin from, uint32_t n, uint64_t now_ns)
{
    struct rpc_sender *it = take(s, from, now_ns);
    return it && rpc_waste_add(&it->waste, n << n_floods(it, now_ns), now_ns);
}

void rpc_senders_flood(struct rpc_senders *s, struct rpc_origin from, uint64_t now_ns)
{
    struct rpc_sender *it = take(s, from, now_ns);
    if (!it)
        return;
    uint32_t n = n_floods(it, now_ns);
    it->n_before = n < RPC_FLOOD_DOUBLINGS ? n : RPC_FLOOD_DOUBLINGS;
    it->n_credit = 0;
    it->until_ns = now_ns + rpc_flood_wait_ms(it->n_before) * NS_PER_MS;
}

bool rpc_senders_must_wait(struct rpc_senders *s, struct rpc_origin from, uint64_t now_ns)
{
    int i = find(s, from);
    return i < RPC_SENDERS && s->all[i].until_ns > now_ns;
}

/* When the next call begins if `rate` a second do, after as many as take at_once_ns. */
static uint64_t schedule(struct rpc_sender *it, uint64_t at_once_ns, uint32_t rate, uint64_t now_ns)
{
    uint64_t begins = it->paced_ns > now_ns ? it->paced_ns : now_ns;
    uint64_t waits_until = begins < now_ns + at_once_ns ? now_ns : begins - at_once_ns;
    if (waits_until > now_ns + RPC_PACED_WAIT_MS * NS_PER_MS)
        return UINT64_MAX;
    it->paced_ns = begins + NS_PER_S / rate;
    return waits_until;
}

uint64_t rpc_senders_pace(struct rpc_senders *s, struct rpc_origin from, uint64_t now_ns)
{
    struct rpc_sender *it = take(s, from, now_ns);
    return it ? schedule(it, NS_PER_S, RPC_PACED_CALLS, now_ns) : now_ns;
}

uint64_t rpc_senders_credit(struct rpc_senders *s, struct rpc_origin from, uint64_t now_ns)
{
    struct rpc_sender *it = take(s, from, now_ns);
    if (!it)
        return now_ns;
    if (it->n_credit) {
        it->n_credit--;
        return now_ns;
    }
    return n_floods(it, now_ns) ? schedule(it, 0, RPC_CREDIT_RATE, now_ns) : now_ns + RPC_CREDIT_WAIT_MS * NS_PER_MS;
}

void rpc_senders_answered(struct rpc_senders *s, struct rpc_origin from, uint64_t now_ns)
{
    struct rpc_sender *it = take(s, from, now_ns);
    if (!it)
        return;
    it->was_answered = true;
    if (it->n_credit < RPC_CREDIT_MOST)
        it->n_credit += RPC_CREDIT_EACH;
}

bool rpc_senders_is_stranger(const struct rpc_senders *s, struct rpc_origin from)
{
    int i = find(s, from);
    return from.key && (i == RPC_SENDERS || !s->all[i].was_answered);
}

uint32_t rpc_senders_floods(const struct rpc_senders *s, struct rpc_origin from, uint64_t now_ns)
{
    int i = find(s, from);
    return i < RPC_SENDERS ? n_floods(&s->all[i], now_ns) : 0;
}
