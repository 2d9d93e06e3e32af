/*
 * Stores. A block belongs to one store, by the segment of its chain (sched/ring.h). A store has memory over
 * disk, each with the eviction order of the real store. An offered block is written to both at once; a block
 * loaded from disk is in memory afterwards, too. Simpler than live: a block is there as soon as its worker
 * offers it, and writing to disk takes no time.
 */
#include <stdlib.h>

#include "base/mem.h"
#include "base/random.h"
#include "replay/simulate_internal.h"
#include "sched/ring.h"

static double bytes_per_ns(double gb_s)
{
    return gb_s; /* GB/s are 1e9 bytes in 1e9 ns */
}

void stores_open(struct sim *s)
{
    const struct simulate_stores *c = &s->c.stores;
    double block_bytes = s->c.kv_bytes_per_token * s->c.block_tokens;
    if (!c->n)
        return;
    s->stores = mem_array(c->n, sizeof(*s->stores));
    s->stored = mem_array(s->n_blocks, sizeof(*s->stored));
    for (uint32_t i = 0; i < c->n; i++)
        s->stores[i] = (struct store){.out.bytes_per_ns = bytes_per_ns(c->port_gb_s),
                                      .in.bytes_per_ns = bytes_per_ns(c->port_gb_s),
                                      .disk.bytes_per_ns = bytes_per_ns(c->ssd_gb_s),
                                      .dram = eviction_open(c->eviction),
                                      .ssd = eviction_open(c->eviction),
                                      .max_dram = (uint64_t)(c->dram_bytes / block_bytes),
                                      .max_ssd = (uint64_t)(c->ssd_bytes / block_bytes)};
}

void stores_close(struct sim *s)
{
    for (uint32_t i = 0; s->stores && i < s->c.stores.n; i++) {
        eviction_close(s->stores[i].dram);
        eviction_close(s->stores[i].ssd);
    }
    free(s->stores);
    free(s->stored);
}

static uint32_t block_at(const struct sim *s, const struct trace_request *t, uint32_t i)
{
    return s->block_of[t->first_block + i];
}

static struct store *store_of(const struct sim *s, const struct trace_request *t, uint32_t i)
{
    uint32_t segment = RING_SEGMENT_BLOCKS / s->block_pages;
    segment = segment ? segment : 1;
    return &s->stores[random_mix(block_at(s, t, i / segment * segment)) % s->c.stores.n];
}

static bool is_there(const struct stored *b)
{
    return eviction_contains(&b->dram) || eviction_contains(&b->ssd);
}

uint32_t stores_match(const struct sim *s, const struct trace_request *t, uint32_t *on_disk_out)
{
    uint32_t n = s->stores ? blocks_of(s, t) : 0, i = 0, on_disk = 0;
    for (; i < n && is_there(&s->stored[block_at(s, t, i)]); i++)
        on_disk += !eviction_contains(&s->stored[block_at(s, t, i)].dram);
    *on_disk_out = on_disk;
    return i;
}

/* ------------------------------------------------------------------ contents */

/* Inserts a block into a tier, or notes its use, then evicts by the order, which may name the block itself.
 * Time is the number of uses, as in the store. */
static void put_block(struct sim *s, struct eviction *order, struct eviction_item *item, uint64_t capacity,
                      uint32_t index, bool gained)
{
    uint64_t now = s->n_orders;
    if (eviction_contains(item)) {
        (gained ? eviction_touch : eviction_keep)(order, item, now);
        return;
    }
    if (!capacity)
        return;
    eviction_insert(order, item, index, now);
    while (eviction_count(order) > capacity) {
        struct eviction_item *victim = eviction_victim(order);
        s->result->store_lost++;
        eviction_leave(order, victim);
    }
}

static void store_block(struct sim *s, const struct trace_request *t, uint32_t i, bool gained)
{
    struct store *store = store_of(s, t, i);
    struct stored *b = &s->stored[block_at(s, t, i)];
    b->dram.key_hash = b->ssd.key_hash = random_mix(block_at(s, t, i)) | 1;
    put_block(s, store->dram, &b->dram, store->max_dram, i, gained);
    put_block(s, store->ssd, &b->ssd, store->max_ssd, i, gained);
}

static void ignore(struct sim *s, uint32_t subject)
{
    (void)s, (void)subject;
}

static void move(struct sim *s, struct port *from, struct port *to, double bytes,
                 void (*on_end)(struct sim *, uint32_t), uint32_t subject)
{
    uint32_t flow = net_open(s, from, to, on_end, subject);
    net_add(s, flow, bytes);
    net_finish(s, flow);
}

void stores_offer(struct sim *s, struct sim_worker_node *n, const struct trace_request *t, uint32_t first, uint32_t end)
{
    double *bytes;
    if (!s->stores || first >= end)
        return;
    s->n_orders++;
    bytes = mem_array(s->c.stores.n, sizeof(*bytes));
    for (uint32_t i = first; i < end; i++) {
        if (!is_there(&s->stored[block_at(s, t, i)]))
            bytes[store_of(s, t, i) - s->stores] += s->c.kv_bytes_per_token * s->c.block_tokens;
        store_block(s, t, i, false);
    }
    for (uint32_t i = 0; i < s->c.stores.n; i++)
        if (bytes[i] > 0)
            move(s, &n->sends, &s->stores[i].in, bytes[i], ignore, 0);
    free(bytes);
}

/* ------------------------------------------------------------------- loading */

static void part_came(struct sim *s, uint32_t request)
{
    struct sim_seq *q = &s->seqs[request];
    if (q->n_loads && !--q->n_loads)
        events_post(&s->events, s->now_ns + ns_of(s->c.link_ms), EVENT_FILLED, request, q->placement);
}

/* Loads the missing blocks from one other worker, as far as it has them. */
static bool load_from_peer(struct sim *s, struct sim_worker_node *n, struct sim_seq *q, uint32_t first, uint32_t end)
{
    uint32_t peer, there = blocks_match_peer(s, q->t, (uint32_t)(n - s->nodes), &peer),
                   request = (uint32_t)(q - s->seqs);
    end = end < there ? end : there;
    if (first >= end)
        return false;
    q->load_end = end;
    q->load_peer = end - first;
    q->load_dram = q->load_ssd = 0;
    q->n_loads = 1;
    s->result->bytes_loaded += s->c.kv_bytes_per_token * s->c.block_tokens * (end - first);
    move(s, &s->nodes[peer].sends, &n->receives, s->c.kv_bytes_per_token * s->c.block_tokens * (end - first), part_came,
         request);
    return true;
}

bool stores_load(struct sim *s, struct sim_worker_node *n, struct sim_seq *q, uint32_t first, uint32_t end)
{
    uint32_t on_disk, there = stores_match(s, q->t, &on_disk), request = (uint32_t)(q - s->seqs);
    double block = s->c.kv_bytes_per_token * s->c.block_tokens, *dram, *disk;
    const uint32_t asked = end;
    end = end < there ? end : there;
    if (!s->stores || first >= end)
        return s->c.peers && load_from_peer(s, n, q, first, asked);
    s->n_orders++;
    q->load_end = end;
    q->load_peer = q->load_dram = q->load_ssd = 0;
    dram = mem_array(2 * s->c.stores.n, sizeof(*dram));
    disk = dram + s->c.stores.n;
    for (uint32_t i = first; i < end; i++) {
        bool in_memory = eviction_contains(&s->stored[block_at(s, q->t, i)].dram);
        (in_memory ? dram : disk)[store_of(s, q->t, i) - s->stores] += block;
        *(in_memory ? &q->load_dram : &q->load_ssd) += 1;
    }
    for (uint32_t i = 0; i < end; i++) /* the whole chain counts as used, not only the loaded part */
        store_block(s, q->t, i, true);
    q->n_loads = 1; /* held until all flows are started, so that EVENT_FILLED can't come before */
    for (uint32_t i = 0; i < s->c.stores.n; i++)
        for (int k = 0; k < 2; k++)
            if ((k ? disk : dram)[i] > 0) {
                q->n_loads++;
                move(s, k ? &s->stores[i].disk : &s->stores[i].out, &n->receives, (k ? disk : dram)[i], part_came,
                     request);
            }
    free(dram);
    s->result->bytes_loaded += block * (end - first);
    s->result->store_hits_dram += q->load_dram;
    s->result->store_hits_ssd += q->load_ssd;
    part_came(s, request);
    return true;
}

void stores_cancel(struct sim *s, struct sim_seq *q)
{
    if (q->n_loads)
        net_cancel_all(s, part_came, (uint32_t)(q - s->seqs));
    q->n_loads = 0;
}
