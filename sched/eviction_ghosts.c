#include "sched/eviction_ghosts.h"

#include <stdlib.h>

#include "base/mem.h"
#include "base/random.h"

enum { WAYS = 8, LEAST_PLACES = 32768 };

struct ghosts {
    struct ghost *places; /* [n_places]; sets of WAYS consecutive places */
    uint64_t n_places;
};

struct ghosts *ghosts_open(void)
{
    struct ghosts *g = mem_zalloc(sizeof(*g));
    g->n_places = LEAST_PLACES;
    g->places = mem_array(g->n_places, sizeof(*g->places));
    return g;
}

void ghosts_close(struct ghosts *g)
{
    if (!g)
        return;
    free(g->places);
    free(g);
}

static struct ghost *set_of(const struct ghosts *g, uint64_t key_hash)
{
    return g->places + (random_mix(key_hash) & (g->n_places / WAYS - 1)) * WAYS;
}

void ghosts_put(struct ghosts *g, const struct ghost *ghost)
{
    struct ghost *set = set_of(g, ghost->key_hash), *to = set;
    for (int i = 0; i < WAYS; i++) {
        if (set[i].n_uses && set[i].key_hash == ghost->key_hash) {
            to = &set[i];
            break;
        }
        if (to->n_uses && (!set[i].n_uses || set[i].last_used < to->last_used))
            to = &set[i];
    }
    *to = *ghost;
}

static struct ghost *find_ghost(const struct ghosts *g, uint64_t key_hash)
{
    struct ghost *set = set_of(g, key_hash);
    for (int i = 0; i < WAYS; i++)
        if (set[i].n_uses && set[i].key_hash == key_hash)
            return &set[i];
    return NULL;
}

bool ghosts_has(const struct ghosts *g, uint64_t key_hash)
{
    return find_ghost(g, key_hash) != NULL;
}

bool ghosts_take(struct ghosts *g, uint64_t key_hash, struct ghost *out)
{
    struct ghost *ghost = find_ghost(g, key_hash);
    if (!ghost)
        return false;
    *out = *ghost;
    ghost->n_uses = 0;
    return true;
}

void ghosts_reserve(struct ghosts *g, uint64_t n_blocks)
{
    if (4 * n_blocks <= g->n_places)
        return;
    struct ghost *old = g->places;
    uint64_t n = g->n_places;
    while (g->n_places < 4 * n_blocks)
        g->n_places *= 2;
    g->places = mem_array(g->n_places, sizeof(*g->places));
    for (uint64_t i = 0; i < n; i++)
        if (old[i].n_uses)
            ghosts_put(g, &old[i]);
    free(old);
}
