/*
 * Flows between ports. The flows of a port share its rate equally, and a flow runs at the lesser of its two
 * shares. This is not quite max-min fair, since the unused part of a share is not given to other flows. In
 * return, a flow that starts or ends only touches its own two ports.
 *
 * Bytes may be added to a flow while it runs, as layers are computed. A flow that has moved all its bytes
 * stays open, at rest, until it is closed.
 */
#include <math.h>

#include "base/mem.h"
#include "replay/simulate_internal.h"

enum { FROM, TO };

static struct port *port_of(const struct flow *f, int side)
{
    return side == FROM ? f->from : f->to;
}

static double share(const struct port *p)
{
    return p->bytes_per_ns > 0 ? p->bytes_per_ns / p->n : INFINITY;
}

/* ---------------------------------------------------------------- lists */

static void join(struct sim *s, uint32_t index, int side)
{
    struct flow *f = &s->net.flows[index];
    struct port *p = port_of(f, side);
    f->prev[side] = 0;
    f->next[side] = p->first;
    if (p->first)
        s->net.flows[p->first - 1].prev[side] = index + 1;
    p->first = index + 1;
    p->n++;
}

static void leave(struct sim *s, uint32_t index, int side)
{
    struct flow *f = &s->net.flows[index];
    struct port *p = port_of(f, side);
    if (f->next[side])
        s->net.flows[f->next[side] - 1].prev[side] = f->prev[side];
    *(f->prev[side] ? &s->net.flows[f->prev[side] - 1].next[side] : &p->first) = f->next[side];
    p->n--;
}

/* ---------------------------------------------------------------- rates */

static void settle_flow(struct sim *s, struct flow *f)
{
    f->left = fmax(f->left - f->bytes_per_ns * (double)(s->now_ns - f->settled_ns), 0);
    f->settled_ns = s->now_ns;
}

static void expect_end(struct sim *s, uint32_t index)
{
    struct flow *f = &s->net.flows[index];
    f->version = ++s->net.n_versions;
    events_post(&s->events, s->now_ns + (uint64_t)ceil(f->left / f->bytes_per_ns), EVENT_FLOW_END, index, f->version);
}

static void set_rate(struct sim *s, uint32_t index)
{
    struct flow *f = &s->net.flows[index];
    double rate = fmin(share(f->from), share(f->to));
    if (rate == f->bytes_per_ns)
        return;
    settle_flow(s, f);
    f->bytes_per_ns = rate;
    expect_end(s, index);
}

static void set_rates(struct sim *s, const struct port *p, int side)
{
    for (uint32_t i = p->first; i; i = s->net.flows[i - 1].next[side])
        set_rate(s, i - 1);
}

static void stop_flow(struct sim *s, uint32_t index)
{
    struct flow *f = &s->net.flows[index];
    if (!f->is_flowing)
        return;
    f->is_flowing = false;
    f->version = ++s->net.n_versions;
    for (int side = FROM; side <= TO; side++) {
        leave(s, index, side);
        set_rates(s, port_of(f, side), side);
    }
}

/* ---------------------------------------------------------------- flows */

uint32_t net_open(struct sim *s, struct port *from, struct port *to, void (*on_end)(struct sim *, uint32_t),
                  uint32_t subject)
{
    struct net *n = &s->net;
    uint32_t index = n->first_free;
    if (index) {
        n->first_free = n->flows[--index].next[0];
    } else {
        if (!(n->n_flows & (n->n_flows - 1)))
            n->flows = mem_resize(n->flows, n->n_flows ? n->n_flows * 2 : 1, sizeof(*n->flows));
        index = n->n_flows++;
    }
    n->flows[index] = (struct flow){.is_used = true, .from = from, .to = to, .on_end = on_end, .subject = subject};
    return index;
}

static void free_flow(struct sim *s, uint32_t index)
{
    s->net.flows[index] = (struct flow){.next = {s->net.first_free}};
    s->net.first_free = index + 1;
}

static void end(struct sim *s, uint32_t index)
{
    struct flow f = s->net.flows[index];
    free_flow(s, index);
    f.on_end(s, f.subject);
}

void net_add(struct sim *s, uint32_t index, double bytes)
{
    struct flow *f = &s->net.flows[index];
    if (!(f->from->bytes_per_ns > 0) && !(f->to->bytes_per_ns > 0))
        return; /* no port has a limit: the bytes arrive at once */
    if (!f->is_flowing) {
        f->is_flowing = true;
        f->left = bytes;
        f->settled_ns = s->now_ns;
        f->bytes_per_ns = 0;
        for (int side = FROM; side <= TO; side++)
            join(s, index, side);
        for (int side = FROM; side <= TO; side++)
            set_rates(s, port_of(f, side), side);
    } else {
        settle_flow(s, f);
        f->left += bytes;
        expect_end(s, index);
    }
}

void net_finish(struct sim *s, uint32_t index)
{
    s->net.flows[index].is_closed = true;
    if (!s->net.flows[index].is_flowing)
        end(s, index);
}

void net_cancel(struct sim *s, uint32_t index)
{
    stop_flow(s, index);
    free_flow(s, index);
}

void net_cancel_all(struct sim *s, void (*on_end)(struct sim *, uint32_t), uint32_t subject)
{
    for (uint32_t i = 0; i < s->net.n_flows; i++)
        if (s->net.flows[i].is_used && s->net.flows[i].on_end == on_end && s->net.flows[i].subject == subject)
            net_cancel(s, i);
}

void net_flow_ended(struct sim *s, uint32_t index, uint64_t version)
{
    struct flow *f = &s->net.flows[index];
    if (!f->is_flowing || f->version != version)
        return;
    stop_flow(s, index);
    if (s->net.flows[index].is_closed)
        end(s, index);
}
