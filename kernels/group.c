/*
 * Groups of ranks, and gathers: by the backend's library if it has one for these ranks (links), else by
 * copies.
 *
 * A gather by copies: each rank offers its columns (a device records an event), all ranks meet, and each
 * copies the others' columns by its own operations, queued behind their offers. One meeting for each gather
 * is enough: a rank's offer is queued behind its copies of the previous gather. So a rank that follows the
 * offer knows that its own columns of the previous gather were read, and may overwrite them. Offers use two
 * places and events in turn, so a rank that is one gather ahead does not touch what the others still read.
 */
#include <stdatomic.h>
#include <stdlib.h>

#include "base/eventcount.h"
#include "base/mem.h"
#include "kernels/backend.h"

#undef NDEBUG /* a gather can't return an error */
#include <assert.h>

/* A rank in a group; `turn` is the place of its next offer. */
struct member {
    struct kernels *kernels;
    const float *offers[2];
    uint32_t turn;
};

struct k_group {
    struct k_links *links; /* NULL: gathers by copies */
    uint32_t n;
    _Atomic uint32_t n_here;
    struct eventcount all_here; /* raised by the last rank of each meeting */
    struct member members[K_MAX_RANKS];
};

/* ---------------------------------------------------------------- open, close */

enum td_status kernels_open_ranks(const struct kernels_config *config, uint32_t n, bool share_device,
                                  struct kernels **out, struct td_error *error_out)
{
    struct kernels *ranks[K_MAX_RANKS] = {0};
    struct kernels_config c = *config;
    enum td_status s = TD_OK;
    if (!n || n > K_MAX_RANKS)
        return td_fail(error_out, TD_ERR_INVALID, "%u ranks are not in 1..%d", n, K_MAX_RANKS);
    if (n > 1 && c.device == DEVICE_CPU)
        c.n_threads = cpu_threads(config) / n ? cpu_threads(config) / n : 1;
    for (uint32_t i = 0; i < n && !s; i++) {
        c.ordinal = config->ordinal + (share_device ? 0 : i);
        s = kernels_open(&c, &ranks[i], error_out);
    }
    for (uint32_t i = 0; i < n; i++)
        if (s)
            kernels_close(ranks[i]);
        else
            out[i] = ranks[i];
    return s;
}

void kernels_close_ranks(struct kernels *const *ranks, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        kernels_close(ranks[i]);
}

struct k_group *k_group_open(struct kernels *const *ranks, uint32_t n)
{
    assert(n >= 1 && n <= K_MAX_RANKS);
    struct k_group *g = mem_zalloc(sizeof(*g));
    g->n = n;
    for (uint32_t i = 0; i < n; i++) {
        assert(ranks[i]->backend == ranks[0]->backend);
        g->members[i].kernels = ranks[i];
    }
    g->links = ranks[0]->backend->links_open(ranks, n);
    return g;
}

void k_group_close(struct k_group *g)
{
    if (g && g->links)
        g->members[0].kernels->backend->links_close(g->links);
    free(g);
}

const char *k_group_transport(const struct k_group *g)
{
    if (g->links)
        return "nccl";
    return g->members[0].kernels->config.device == DEVICE_CPU ? "memory" : "copies";
}

/* --------------------------------------------------------------------- gather */

/* Returns when all ranks of the group have called it. */
static void meet(struct k_group *g)
{
    uint32_t seen = eventcount_read(&g->all_here);
    if (atomic_fetch_add(&g->n_here, 1) + 1 < g->n) {
        eventcount_wait(&g->all_here, seen);
        return;
    }
    atomic_store(&g->n_here, 0);
    eventcount_raise(&g->all_here);
}

/* Copies one rank's columns to their place in `all`, on k. */
static void take(struct kernels *k, const float *from, const uint32_t *first, uint32_t n_all, uint32_t n_rows,
                 float *all)
{
    uint32_t n = first[1] - first[0];
    const struct k_each e = {.x = from, .y = all + first[0], .x_stride = n, .y_stride = n_all};
    k_copy_heads(k, &e, 1, n, n_rows);
}

/* A barrier (a gather without columns) goes by offers, also if there are links. */
void k_gather(struct k_group *g, uint32_t rank, const uint32_t *first, uint32_t to, uint32_t n_rows, const float *mine,
              float *all)
{
    struct member *me = &g->members[rank];
    const struct kernels_backend *backend = me->kernels->backend;
    if (g->links && first[g->n]) {
        backend->links_gather(g->links, rank, first, to, n_rows, mine, all);
        return;
    }
    uint32_t turn = me->turn;
    me->turn = !turn;
    me->offers[turn] = mine;
    backend->offer(me->kernels, turn);
    meet(g);
    for (uint32_t i = 0; i < g->n; i++) {
        struct member *peer = &g->members[i];
        uint32_t n = first[i + 1] - first[i];
        const float *from = peer->offers[turn];
        if (peer != me)
            backend->follow(me->kernels, peer->kernels, turn);
        if (!n || (to != K_EVERY_RANK && to != rank))
            continue;
        if (peer != me)
            from = backend->reach(me->kernels, peer->kernels, from, (size_t)n_rows * n * sizeof(*from));
        take(me->kernels, from, first + i, first[g->n], n_rows, all);
    }
}

void k_barrier(struct k_group *g, uint32_t rank)
{
    static const uint32_t no_columns[K_MAX_RANKS + 1];
    k_gather(g, rank, no_columns, K_EVERY_RANK, 0, NULL, NULL);
}
