#include "replay/evict_sim.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/random.h"

struct evict_node { /* a block */
    struct eviction_item item;
    uint64_t key;
    uint32_t parent;     /* NONE: the block is the head of a chain */
    uint32_t n_children; /* continuations that are in the cache */
    bool is_stored;
};

struct evict_sim {
    const struct trace *trace;
    uint32_t block_tokens;
    struct evict_node *nodes;
    uint64_t n_nodes;
    uint32_t *uses;     /* node of each block of each request, requests in the order of arrival */
    uint64_t *next_use; /* for each entry of uses: 1 + number of the request that uses the node next */
    uint64_t n_uses;
    uint64_t *missing; /* keys; has room for all blocks of a request */
    uint32_t *buckets; /* 1 + node; open addressing */
    uint64_t n_buckets;
};

static const uint32_t NONE = UINT32_MAX;

/* ------------------------------------------------------------------ blocks */

static uint32_t node_of(struct evict_sim *s, uint64_t key, uint32_t parent, uint32_t chain_index)
{
    uint64_t i = key & (s->n_buckets - 1);
    for (; s->buckets[i]; i = (i + 1) & (s->n_buckets - 1))
        if (s->nodes[s->buckets[i] - 1].key == key)
            return s->buckets[i] - 1;
    s->nodes[s->n_nodes] = (struct evict_node){.key = key, .parent = parent, .item.chain_index = chain_index};
    s->buckets[i] = (uint32_t)++s->n_nodes;
    return s->buckets[i] - 1;
}

/* Number of a request's blocks that take part. */
static uint32_t blocks_of(const struct evict_sim *s, uint64_t request)
{
    const struct trace_request *r = &s->trace->requests[request];
    uint32_t n_full = s->block_tokens ? r->n_prompt / s->block_tokens : r->n_blocks;
    return n_full < r->n_blocks ? n_full : r->n_blocks;
}

static void name_blocks(struct evict_sim *s)
{
    const struct trace *t = s->trace;
    for (uint64_t r = 0; r < t->n_requests; r++) {
        const uint64_t *ids = trace_blocks(t, &t->requests[r]);
        uint64_t key = 0;
        uint32_t parent = NONE;
        for (uint32_t i = 0, n = blocks_of(s, r); i < n; i++) {
            key = random_at(key, i, ids[i]);
            parent = node_of(s, key, parent, i);
            s->uses[s->n_uses++] = parent;
        }
    }
}

/* Goes backwards through the uses: the use seen last is the next one. */
static void look_ahead(struct evict_sim *s)
{
    uint64_t *next = mem_array(s->n_nodes + 1, sizeof(*next));
    for (uint64_t i = 0; i < s->n_nodes; i++)
        next[i] = s->trace->n_requests + 1;
    uint64_t at = s->n_uses;
    for (uint64_t r = s->trace->n_requests; r-- > 0;) {
        for (uint32_t n = blocks_of(s, r); n > 0; n--) {
            uint32_t node = s->uses[--at];
            s->next_use[at] = next[node];
            next[node] = r + 1;
        }
    }
    free(next);
}

struct evict_sim *evict_sim_open(const struct trace *trace, uint32_t block_tokens)
{
    struct evict_sim *s = mem_zalloc(sizeof(*s));
    uint64_t n = trace->n_blocks + 1;
    s->trace = trace;
    s->block_tokens = block_tokens;
    s->nodes = mem_array(n, sizeof(*s->nodes));
    s->uses = mem_array(n, sizeof(*s->uses));
    s->next_use = mem_array(n, sizeof(*s->next_use));
    for (s->n_buckets = 64; s->n_buckets < 2 * n;)
        s->n_buckets *= 2;
    s->buckets = mem_array(s->n_buckets, sizeof(*s->buckets));
    s->missing = mem_array(n, sizeof(*s->missing));
    name_blocks(s);
    look_ahead(s);
    return s;
}

void evict_sim_close(struct evict_sim *s)
{
    if (!s)
        return;
    free(s->nodes);
    free(s->uses);
    free(s->next_use);
    free(s->buckets);
    free(s->missing);
    free(s);
}

/* ------------------------------------------------------------------- cache */

struct cache {
    struct evict_sim *sim;
    struct eviction *order;
    struct evict_result *out;
    uint64_t n, capacity;
};

static void cache_open(struct cache *c, struct evict_sim *s, enum eviction_policy policy, uint64_t capacity,
                       struct evict_result *out)
{
    *c = (struct cache){.sim = s, .order = eviction_open(policy), .out = out, .capacity = capacity};
    *out = (struct evict_result){.n_asked = s->n_uses, .n_first_uses = s->n_nodes};
    for (uint64_t i = 0; i < s->n_nodes; i++) {
        struct evict_node *n = &s->nodes[i];
        n->item = (struct eviction_item){.key_hash = n->key, .chain_index = n->item.chain_index};
        n->n_children = 0;
        n->is_stored = false;
    }
}

static void store_node(struct cache *c, struct evict_node *n, uint64_t time)
{
    eviction_insert(c->order, &n->item, n->item.chain_index, time);
    n->is_stored = true;
    c->n++;
    c->out->n_operations++;
    if (n->parent != NONE)
        c->sim->nodes[n->parent].n_children++;
}

static void evict(struct cache *c, struct evict_node *n)
{
    eviction_leave(c->order, &n->item);
    n->is_stored = false;
    c->n--;
    c->out->n_operations++;
    c->out->n_evicted++;
    c->out->n_stranded += n->n_children > 0;
    c->out->victims_hash = random_at(c->out->victims_hash, n->key, 0);
    if (n->parent != NONE)
        c->sim->nodes[n->parent].n_children--;
}

static struct evict_node *victim(struct cache *c)
{
    c->out->n_operations++;
    struct eviction_item *item = eviction_victim(c->order);
    return item ? (struct evict_node *)(void *)((char *)item - offsetof(struct evict_node, item)) : NULL;
}

/* False: room could only be made by evicting a block that this request uses. */
static bool evict_for(struct cache *c, uint64_t time)
{
    if (c->n < c->capacity)
        return true;
    struct evict_node *n = victim(c);
    if (!n || n->item.last_used == time)
        return false;
    evict(c, n);
    return true;
}

/* ------------------------------------------------------------------ policy */

/* Only a partial last block is a tail. A request that ends with a full block says nothing about that
 * block. */
static bool is_tail(const struct cache *c, uint32_t i, uint32_t n_uses)
{
    return !c->sim->block_tokens && i + 1 == n_uses;
}

static void tell_missing(struct cache *c, const uint32_t *uses, uint32_t n_uses)
{
    const struct evict_node *nodes = c->sim->nodes;
    uint32_t n = 0;
    for (uint32_t i = 0; i < n_uses; i++)
        if (!nodes[uses[i]].is_stored)
            c->sim->missing[n++] = nodes[uses[i]].key;
    eviction_request(c->order, c->sim->missing, n);
}

static void request(struct cache *c, const uint32_t *uses, uint32_t n_uses, uint64_t time)
{
    struct evict_node *nodes = c->sim->nodes;
    uint32_t i = 0;
    tell_missing(c, uses, n_uses);
    for (; i < n_uses && nodes[uses[i]].is_stored; i++) {
        nodes[uses[i]].item.is_tail = is_tail(c, i, n_uses);
        eviction_touch(c->order, &nodes[uses[i]].item, time);
        c->out->n_operations++;
    }
    c->out->n_hits += i;
    for (bool has_room = true; i < n_uses; i++) {
        struct evict_node *n = &nodes[uses[i]];
        n->item.is_tail = is_tail(c, i, n_uses);
        has_room = has_room && (n->is_stored || evict_for(c, time));
        if (n->is_stored)
            eviction_touch(c->order, &n->item, time);
        else if (has_room)
            store_node(c, n, time);
        else
            eviction_refused(c->order, &n->item, time);
    }
}

void evict_sim_run(struct evict_sim *s, enum eviction_policy policy, uint64_t capacity, struct evict_result *out)
{
    struct clock clock;
    struct cache c;
    clock_init_real(&clock);
    cache_open(&c, s, policy, capacity, out);
    uint64_t at = 0, start_ns = clock_now(&clock);
    for (uint64_t r = 0; r < s->trace->n_requests; r++) {
        request(&c, s->uses + at, blocks_of(s, r), r + 1);
        at += blocks_of(s, r);
    }
    out->elapsed_ns = clock_now(&clock) - start_ns;
    eviction_close(c.order);
}

/* ----------------------------------------------------------------- optimum */

/* The block with the furthest next use goes first. This is LRU with a time that runs backwards from the end
 * of the trace. */
void evict_sim_optimum(struct evict_sim *s, uint64_t capacity, struct evict_result *out)
{
    struct clock clock;
    struct cache c;
    clock_init_real(&clock);
    cache_open(&c, s, EVICTION_LRU, capacity, out);
    uint64_t start_ns = clock_now(&clock), end = s->trace->n_requests + 1;
    for (uint64_t i = 0; i < s->n_uses; i++) {
        struct evict_node *n = &s->nodes[s->uses[i]];
        out->n_hits += n->is_stored;
        if (n->is_stored)
            eviction_touch(c.order, &n->item, end - s->next_use[i]);
        else
            store_node(&c, n, end - s->next_use[i]);
        if (c.n > capacity)
            evict(&c, victim(&c));
    }
    out->elapsed_ns = clock_now(&clock) - start_ns;
    eviction_close(c.order);
}
