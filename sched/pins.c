#include "sched/pins.h"

#include <stdlib.h>

#include "base/mem.h"
#include "base/probing.h"

enum { FIRST_CAP = 256 };

static uint32_t home(const struct pins *p, const struct block_key *key)
{
    return (uint32_t)block_key_hash(key) & (p->cap - 1);
}

/* The key's bucket, or the empty one where it would go. */
static struct pin *bucket_of(const struct pins *p, const struct block_key *key)
{
    uint32_t i = home(p, key);
    while (p->buckets[i].until_ns && !block_key_equal(&p->buckets[i].key, key))
        i = (i + 1) & (p->cap - 1);
    return &p->buckets[i];
}

/* Moves the pins that end after now_ns into a new table of cap buckets. */
static void rebuild(struct pins *p, uint32_t cap, uint64_t now_ns)
{
    struct pins old = *p;
    *p = (struct pins){.buckets = mem_array(cap, sizeof(*p->buckets)), .cap = cap};
    for (uint32_t i = 0; i < old.cap; i++)
        if (old.buckets[i].until_ns > now_ns)
            pins_keep(p, &old.buckets[i].key, old.buckets[i].until_ns);
    free(old.buckets);
}

void pins_free(struct pins *p)
{
    free(p->buckets);
    *p = (struct pins){0};
}

bool pins_keep(struct pins *p, const struct block_key *key, uint64_t until_ns)
{
    if (2 * (p->n + 1) > p->cap)
        rebuild(p, p->cap ? 2 * p->cap : FIRST_CAP, 0);
    struct pin *at = bucket_of(p, key);
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

void pins_drop(struct pins *p, const struct block_key *key)
{
    if (!pins_has(p, key))
        return;
    uint32_t mask = p->cap - 1, hole = (uint32_t)(bucket_of(p, key) - p->buckets);
    for (uint32_t i = (hole + 1) & mask; p->buckets[i].until_ns; i = (i + 1) & mask)
        if (probing_fills(hole, i, home(p, &p->buckets[i].key), mask)) {
            p->buckets[hole] = p->buckets[i];
            hole = i;
        }
    p->buckets[hole].until_ns = 0;
    p->n--;
}

bool pins_has(const struct pins *p, const struct block_key *key)
{
    return p->n && bucket_of(p, key)->until_ns;
}

void pins_expire(struct pins *p, uint64_t now_ns, void (*over)(void *user, const struct block_key *key), void *user)
{
    if (!p->next_ns || now_ns < p->next_ns)
        return;
    for (uint32_t i = 0; i < p->cap; i++)
        if (p->buckets[i].until_ns && p->buckets[i].until_ns <= now_ns)
            over(user, &p->buckets[i].key);
    rebuild(p, p->cap, now_ns);
}
