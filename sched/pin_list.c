#include "sched/pin_list.h"

#include <stdlib.h>

#include "base/mem.h"

enum { FIRST_BUCKETS = 64 };

static struct pin_entry **bucket(const struct pin_list *l, const struct block_key *last)
{
    return &l->buckets[block_key_hash(last) & (l->n_buckets - 1)];
}

/* The pointer to the entry, or the NULL at the end of its bucket. */
static struct pin_entry **find_pin(const struct pin_list *l, const struct block_key *keys, uint32_t n)
{
    struct pin_entry **at = bucket(l, &keys[n - 1]);
    while (*at && ((*at)->n != n || !block_key_equal(&(*at)->keys[n - 1], &keys[n - 1])))
        at = &(*at)->next;
    return at;
}

static void take_out(struct pin_list *l, struct pin_entry **at)
{
    struct pin_entry *e = *at;
    *at = e->next;
    l->n_entries--;
    l->n_blocks -= e->n;
    l->of_owner[e->owner] -= e->n;
    free(e->keys);
    free(e);
}

static void grow_list(struct pin_list *l)
{
    struct pin_list old = *l;
    l->n_buckets = old.n_buckets ? 2 * old.n_buckets : FIRST_BUCKETS;
    l->buckets = mem_array(l->n_buckets, sizeof(*l->buckets));
    for (uint32_t i = 0; i < old.n_buckets; i++)
        for (struct pin_entry *e = old.buckets[i], *next; e; e = next) {
            struct pin_entry **at = bucket(l, &e->keys[e->n - 1]);
            next = e->next;
            e->next = *at;
            *at = e;
        }
    free(old.buckets);
}

void pin_list_free(struct pin_list *l)
{
    for (uint32_t i = 0; i < l->n_buckets; i++)
        while (l->buckets[i])
            take_out(l, &l->buckets[i]);
    free(l->buckets);
    *l = (struct pin_list){0};
}

enum pin_change pin_list_add(struct pin_list *l, const struct block_key *keys, uint32_t n, uint64_t until_ns,
                             uint32_t max_blocks)
{
    return pin_list_add_for(l, keys, n, until_ns, max_blocks, 0, UINT32_MAX);
}

enum pin_change pin_list_add_for(struct pin_list *l, const struct block_key *keys, uint32_t n, uint64_t until_ns,
                                 uint32_t max_blocks, uint32_t owner, uint32_t max_of_owner)
{
    if (l->n_entries >= l->n_buckets)
        grow_list(l);
    struct pin_entry **at = find_pin(l, keys, n), *e = *at;
    if (e && until_ns <= e->until_ns)
        return PIN_KNOWN;
    if (!e && (n > max_blocks || l->n_blocks > max_blocks - n))
        return PIN_NO_ROOM;
    if (!e && owner && (n > max_of_owner || l->of_owner[owner] > max_of_owner - n))
        return PIN_NO_SHARE;
    enum pin_change change = !e || until_ns - e->until_ns > PIN_NEWS_NS ? PIN_NEWS : PIN_KNOWN;
    if (!e) {
        e = *at = mem_zalloc(sizeof(*e));
        e->keys = mem_dup(keys, n * sizeof(*keys));
        e->n = n;
        e->owner = owner;
        l->of_owner[owner] += n;
        l->n_entries++;
        l->n_blocks += n;
    }
    if (change == PIN_NEWS)
        e->until_ns = until_ns;
    if (!l->next_ns || e->until_ns < l->next_ns)
        l->next_ns = e->until_ns;
    return change;
}

uint64_t pin_list_remove(struct pin_list *l, const struct block_key *keys, uint32_t n)
{
    struct pin_entry **at = l->n_entries ? find_pin(l, keys, n) : NULL;
    if (!at || !*at)
        return 0;
    uint64_t until_ns = (*at)->until_ns;
    take_out(l, at);
    return until_ns;
}

void pin_list_expire(struct pin_list *l, uint64_t now_ns)
{
    if (!l->next_ns || now_ns < l->next_ns)
        return;
    l->next_ns = 0;
    for (uint32_t i = 0; i < l->n_buckets; i++)
        for (struct pin_entry **at = &l->buckets[i]; *at;) {
            if ((*at)->until_ns <= now_ns) {
                take_out(l, at);
                continue;
            }
            if (!l->next_ns || (*at)->until_ns < l->next_ns)
                l->next_ns = (*at)->until_ns;
            at = &(*at)->next;
        }
}

void pin_list_each(const struct pin_list *l, void (*each)(void *user, const struct pin_entry *e), void *user)
{
    for (uint32_t i = 0; i < l->n_buckets; i++)
        for (const struct pin_entry *e = l->buckets[i]; e; e = e->next)
            each(user, e);
}
