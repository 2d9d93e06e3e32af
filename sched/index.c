#include "sched/index.h"

#include <stdlib.h>

#include "base/mem.h"
#include "sched/ring.h"

struct entry { /* empty when nobody holds it and it was never used; a hole when nobody holds it any more */
    struct block_key key;
    uint64_t fast, ssd; /* bit h: holder h has it in memory, on disk */
    bool used;
};

struct index {
    struct entry *entries;
    uint64_t cap, n_used, n_blocks; /* n_used counts holes too */
};

struct index *index_open(void)
{
    struct index *x = mem_zalloc(sizeof(*x));
    x->cap = 1024;
    x->entries = mem_array(x->cap, sizeof(*x->entries));
    return x;
}

void index_close(struct index *x)
{
    if (!x)
        return;
    free(x->entries);
    free(x);
}

/* The key's entry, or the empty one where it would go. */
static struct entry *slot(const struct index *x, const struct block_key *key)
{
    uint64_t i = block_key_hash(key) & (x->cap - 1);
    while (x->entries[i].used && !block_key_equal(&x->entries[i].key, key))
        i = (i + 1) & (x->cap - 1);
    return &x->entries[i];
}

static bool held(const struct entry *e)
{
    return e->fast | e->ssd;
}

/* Grows where it is full of blocks, or only drops holes. */
static void rehash(struct index *x)
{
    struct entry *old = x->entries;
    uint64_t n = x->cap;
    while (x->n_blocks * 4 > x->cap)
        x->cap *= 2;
    x->entries = mem_array(x->cap, sizeof(*x->entries));
    x->n_used = x->n_blocks;
    for (uint64_t i = 0; i < n; i++)
        if (held(&old[i]))
            *slot(x, &old[i].key) = old[i];
    free(old);
}

void index_add(struct index *x, uint32_t holder, enum block_tier tier, const struct block_key *key)
{
    if (x->n_used * 2 >= x->cap)
        rehash(x);
    struct entry *e = slot(x, key);
    if (!e->used) {
        e->used = true;
        e->key = *key;
        x->n_used++;
    }
    x->n_blocks += !held(e);
    *(tier == TIER_SSD ? &e->ssd : &e->fast) |= 1ull << holder;
}

void index_remove(struct index *x, uint32_t holder, enum block_tier tier, const struct block_key *key)
{
    struct entry *e = slot(x, key);
    bool was = held(e);
    *(tier == TIER_SSD ? &e->ssd : &e->fast) &= ~(1ull << holder);
    x->n_blocks -= was && !held(e);
}

void index_clear(struct index *x, uint32_t holder)
{
    for (uint64_t i = 0; i < x->cap; i++) {
        struct entry *e = &x->entries[i];
        bool was = held(e);
        e->fast &= ~(1ull << holder);
        e->ssd &= ~(1ull << holder);
        x->n_blocks -= was && !held(e);
    }
}

static bool has(const struct index *x, uint64_t holders, const struct block_key *key)
{
    const struct entry *e = slot(x, key);
    return (e->fast | e->ssd) & holders;
}

uint32_t index_match(const struct index *x, uint64_t holders, const struct block_key *keys, uint32_t n)
{
    uint32_t have = 0, step = 1; /* keys[0..have) are there */
    while (have + step <= n && has(x, holders, &keys[have + step - 1])) {
        have += step;
        step *= 2;
    }
    for (uint32_t limit = have + step < n + 1 ? have + step : n + 1; have + 1 < limit;) { /* keys[limit-1] is not */
        uint32_t middle = have + (limit - have) / 2;
        if (has(x, holders, &keys[middle - 1]))
            have = middle;
        else
            limit = middle;
    }
    return have;
}

uint32_t index_match_segments(const struct index *x, uint64_t holders, const struct block_key *keys, uint32_t first,
                              uint32_t n)
{
    uint32_t at = first;
    while (at < n) {
        uint32_t end = (at / RING_SEGMENT_BLOCKS + 1) * RING_SEGMENT_BLOCKS;
        end = end < n ? end : n;
        uint32_t m = index_match(x, holders, keys + at, end - at);
        at += m;
        if (at < end)
            break;
    }
    return at - first;
}

uint32_t index_on_disk(const struct index *x, uint64_t holders, const struct block_key *keys, uint32_t n)
{
    enum { LOOKED_AT = 64 };
    uint32_t step = n > LOOKED_AT ? n / LOOKED_AT : 1, looked_at = 0, on_disk = 0;
    for (uint32_t i = 0; i < n; i += step, looked_at++)
        on_disk += !(slot(x, &keys[i])->fast & holders);
    return looked_at ? (uint32_t)((uint64_t)n * on_disk / looked_at) : 0;
}

uint64_t index_digest(const struct index *x, uint32_t holder, uint64_t *n_blocks_out)
{
    uint64_t sum = 0, n = 0;
    for (uint64_t i = 0; i < x->cap; i++) {
        const struct entry *e = &x->entries[i];
        uint64_t fast = e->fast >> holder & 1, ssd = e->ssd >> holder & 1;
        n += fast + ssd;
        sum += fast ? block_digest(&e->key, TIER_WORKER) : 0;
        sum += ssd ? block_digest(&e->key, TIER_SSD) : 0;
    }
    *n_blocks_out = n;
    return sum;
}

uint64_t index_blocks(const struct index *x)
{
    return x->n_blocks;
}
