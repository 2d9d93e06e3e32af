#include "sched/pins.h"

#include <stdlib.h>

#include "base/mem.h"

enum { FIRST_CAP = 256 };

static uint32_t home(const struct pins *p, const struct block_key *key)
{
    return (uint32_t)block_key_hash(key) & (p->cap - 1);
}

/* The key's place, or the free place where it would go. */
static struct pin *pin_slot(const struct pins *p, const struct block_key *key)
{
    uint32_t i = home(p, key);
    while (p->places[i].until_ns && !block_key_equal(&p->places[i].key, key))
        i = (i + 1) & (p->cap - 1);
    return &p->places[i];
}

/* Moves the pins that end after now_ns into a new table of cap places. */
static void rebuild(struct pins *p, uint32_t cap, uint64_t now_ns)
{
    struct pins old = *p;
    *p = (struct pins){.places = mem_array(cap, sizeof(*p->places)), .cap = cap};
    for (uint32_t i = 0; i < old.cap; i++)
        if (old.places[i].until_ns > now_ns)
            pins_keep(p, &old.places[i].key, old.places[i].until_ns);
    free(old.places);
}

void pins_free(struct pins *p)
{
    free(p->places);
    *p = (struct pins){0};
}

bool pins_keep(struct pins *p, const struct block_key *key, uint64_t until_ns)
{
    if (2 * (p->n + 1) > p->cap)
        rebuild(p, p->cap ? 2 * p->cap : FIRST_CAP, 0);
    struct pin *at = pin_slot(p, key);
    if (!at->until_ns && p->n == PINS_MAX)
        return false;
    p->n += !at->until_ns;
    at->key = *key;
    if (at->until_ns < until_ns)
        at->until_ns = until_ns;
    if (!p->next_ns || until_ns < p->next_ns)
        p->next_ns = until_ns;
    return true;
}

/*
 * Following entries of the same run move up, so that searches need not skip holes (Knuth 6.4, algorithm R).
 */
void pins_drop(struct pins *p, const struct block_key *key)
{
    if (!pins_has(p, key))
        return;
    uint32_t mask = p->cap - 1, hole = (uint32_t)(pin_slot(p, key) - p->places);
    for (uint32_t i = (hole + 1) & mask; p->places[i].until_ns; i = (i + 1) & mask) {
        uint32_t from_home = (i - home(p, &p->places[i].key)) & mask;
        if (from_home < ((i - hole) & mask))
            continue;
        p->places[hole] = p->places[i];
        hole = i;
    }
    p->places[hole].until_ns = 0;
    p->n--;
}

bool pins_has(const struct pins *p, const struct block_key *key)
{
    return p->n && pin_slot(p, key)->until_ns;
}

void pins_expire(struct pins *p, uint64_t now_ns, void (*over)(void *user, const struct block_key *key), void *user)
{
    if (!p->next_ns || now_ns < p->next_ns)
        return;
    for (uint32_t i = 0; i < p->cap; i++)
        if (p->places[i].until_ns && p->places[i].until_ns <= now_ns)
            over(user, &p->places[i].key);
    rebuild(p, p->cap, now_ns);
}
