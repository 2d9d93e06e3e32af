/* Lookups in the index. Any thread, inside a bracket (index.h). */
#include "sched/index_internal.h"
#include "sched/ring.h"

struct match_numbers { /* a set of holder ids, one bit for each */
    uint64_t words[ID_WORDS];
};

static void numbers_add(struct match_numbers *s, uint32_t id)
{
    s->words[id / 64] |= 1ull << id % 64;
}

static struct match_numbers numbers_of(const struct index *x, const struct holder_set *holders)
{
    struct match_numbers s = {{0}};
    for (uint32_t w = 0; w < INDEX_MAX_HOLDERS / 64; w++)
        for (uint64_t left = holders->words[w]; left; left &= left - 1) {
            uint32_t id = atomic_load(&x->id_of[w * 64 + (uint32_t)__builtin_ctzll(left)]);
            if (id != NO_ID)
                numbers_add(&s, id);
        }
    return s;
}

__attribute__((always_inline)) static inline void prefetch(const struct index *x, const struct block_key *key)
{
    table_prefetch(table_of(x, shard_of(key)), key);
}

static const struct index_entry *find_entry(const struct index *x, const struct block_key *key)
{
    bool found;
    const struct index_entry *e = table_probe(table_of(x, shard_of(key)), key, &found);
    return found ? e : NULL;
}

static uint64_t crowd_word(const struct crowd *c, uint32_t w, uint32_t tiers)
{
    return (tiers & IN_MEMORY ? atomic_load_explicit(&c->in_memory[w], memory_order_relaxed) : 0) |
           (tiers & ON_DISK ? atomic_load_explicit(&c->on_disk[w], memory_order_relaxed) : 0);
}

/* The holders of a block in some tiers: in the crowd, or in in_slots if there is no crowd. */
struct view {
    const struct crowd *crowd;
    uint32_t tiers;
    struct match_numbers in_slots;
};

static void look(const struct index *x, const struct block_key *key, uint32_t tiers, struct view *v)
{
    const struct index_entry *e = find_entry(x, key);
    uint64_t slots = e ? atomic_load_explicit(&e->slots[0], memory_order_acquire) : 0;
    v->tiers = tiers;
    v->crowd = crowd_of(slots);
    if (v->crowd)
        return;
    v->in_slots = (struct match_numbers){{0}};
    for (uint32_t i = 0; e && i < 2; i++) {
        for (; slots; slots >>= 16)
            if (slots & tiers)
                numbers_add(&v->in_slots, (slots & 0xffff) >> 2);
        slots = atomic_load_explicit(&e->slots[1], memory_order_relaxed);
    }
}

/* Whether one holder id has the block, in any tier. */
static bool look_for(const struct index *x, const struct block_key *key, uint32_t id)
{
    const struct index_entry *e = find_entry(x, key);
    uint64_t slots = e ? atomic_load_explicit(&e->slots[0], memory_order_acquire) : 0;
    const struct crowd *c = crowd_of(slots);
    if (c)
        return crowd_word(c, id / 64, ANYWHERE) >> id % 64 & 1;
    for (uint32_t i = 0; e && i < 2; i++) {
        for (; slots; slots >>= 16)
            if ((slots & 0xffff) >> 2 == id && (slots & ANYWHERE))
                return true;
        slots = atomic_load_explicit(&e->slots[1], memory_order_relaxed);
    }
    return false;
}

static uint64_t view_word(const struct view *v, uint32_t w)
{
    return v->crowd ? crowd_word(v->crowd, w, v->tiers) : v->in_slots.words[w];
}

/* Whether a holder of the set has the block in one of the tiers. */
static bool has(const struct index *x, const struct match_numbers *of, const struct block_key *key, uint32_t tiers)
{
    struct view v;
    uint64_t both = 0;
    look(x, key, tiers, &v);
    for (uint32_t w = 0; w < ID_WORDS; w++)
        both |= view_word(&v, w) & of->words[w];
    return both;
}

/* ------------------------------------------------------------------ chains */

struct match_candidate {
    uint16_t id, holder;
};

/* Candidates [first, first + n) have the first lo blocks, and do not have the first hi blocks. */
struct match_span {
    uint32_t lo, hi, first, n;
};

struct match_search {
    const struct index *x;
    const struct block_key *keys;
    uint32_t n_keys, n_spans, *lengths;
    struct match_candidate candidates[INDEX_MAX_HOLDERS];
    struct match_span spans[INDEX_MAX_HOLDERS]; /* not finished; each has at least one candidate */
};

/*
 * The length to try next. 0 and n_keys are the most likely results, so 1 and n_keys are tried first. If all
 * or none of the candidates have the first block, one lookup decides for all of them.
 */
static uint32_t middle(const struct match_search *s, const struct match_span *p)
{
    return !p->lo ? 1 : p->hi > s->n_keys ? s->n_keys : p->lo + (p->hi - p->lo) / 2;
}

/* Moves candidates that have the block to the front; returns how many. */
static uint32_t partition(struct match_candidate *c, uint32_t n, const struct view *have)
{
    uint32_t k = 0;
    for (uint32_t i = 0; i < n; i++) {
        struct match_candidate now = c[i];
        c[i] = c[k];
        c[k] = now;
        k += view_word(have, now.id / 64) >> now.id % 64 & 1;
    }
    return k;
}

/* Keeps a span for the next round, or writes its length if that is known. */
static void keep(struct match_search *s, struct match_span p)
{
    if (p.n && p.hi - p.lo > 1) {
        s->spans[s->n_spans++] = p;
        return;
    }
    for (uint32_t i = 0; i < p.n; i++)
        s->lengths[s->candidates[p.first + i].holder] = p.lo;
}

/* One round for a span. Most spans soon have one candidate, which has a faster lookup. */
static void bisect(struct match_search *s, const struct match_span *p)
{
    uint32_t m = middle(s, p), k;
    const struct block_key *key = &s->keys[m - 1];
    if (p->n == 1) {
        bool has_it = look_for(s->x, key, s->candidates[p->first].id);
        keep(s, has_it ? (struct match_span){m, p->hi, p->first, 1} : (struct match_span){p->lo, m, p->first, 1});
        return;
    }
    struct view have;
    look(s->x, key, ANYWHERE, &have);
    k = partition(&s->candidates[p->first], p->n, &have);
    keep(s, (struct match_span){m, p->hi, p->first, k});
    keep(s, (struct match_span){p->lo, m, p->first + k, p->n - k});
}

/* Bisects all spans in rounds, so that the memory reads of one round overlap. */
static void bisect_all(struct match_search *s)
{
    struct match_span now[INDEX_MAX_HOLDERS];
    while (s->n_spans) {
        uint32_t n = s->n_spans;
        memcpy(now, s->spans, n * sizeof(now[0]));
        s->n_spans = 0;
        for (uint32_t i = 0; i < n; i++)
            prefetch(s->x, &s->keys[middle(s, &now[i]) - 1]);
        for (uint32_t i = 0; i < n; i++)
            bisect(s, &now[i]);
    }
}

void index_match_each(const struct index *x, const struct holder_set *holders, const struct block_key *keys, uint32_t n,
                      uint32_t lengths_out[INDEX_MAX_HOLDERS])
{
    struct match_search s;
    uint32_t n_candidates = 0;
    s.x = x;
    s.keys = keys;
    s.n_keys = n;
    s.lengths = lengths_out;
    s.n_spans = 0;
    for (uint32_t w = 0; w < INDEX_MAX_HOLDERS / 64; w++)
        for (uint64_t left = holders->words[w]; left; left &= left - 1) {
            uint32_t holder = w * 64 + (uint32_t)__builtin_ctzll(left), id = atomic_load(&x->id_of[holder]);
            lengths_out[holder] = 0;
            if (id != NO_ID)
                s.candidates[n_candidates++] = (struct match_candidate){(uint16_t)id, (uint16_t)holder};
        }
    keep(&s, (struct match_span){0, n + 1, 0, n_candidates});
    bisect_all(&s);
}

uint32_t index_match(const struct index *x, uint32_t holder, const struct block_key *keys, uint32_t n)
{
    uint32_t lengths[INDEX_MAX_HOLDERS];
    struct holder_set one = holder_set_of(holder);
    index_match_each(x, &one, keys, n, lengths);
    return lengths[holder];
}

/* ---------------------------------------------------------------- segments */

/* keys[0..n) belong to one segment. A store that has any of its blocks has the blocks from the first on. */
static uint32_t match_segment(const struct index *x, const struct match_numbers *of, const struct block_key *keys,
                              uint32_t n)
{
    if (has(x, of, &keys[n - 1], ANYWHERE))
        return n;
    uint32_t lo = 0, hi = n;
    while (hi - lo > 1) {
        uint32_t m = lo ? lo + (hi - lo) / 2 : 1;
        if (has(x, of, &keys[m - 1], ANYWHERE))
            lo = m;
        else
            hi = m;
    }
    return lo;
}

uint32_t index_match_segments(const struct index *x, const struct holder_set *holders, const struct block_key *keys,
                              uint32_t first, uint32_t n)
{
    struct match_numbers of = numbers_of(x, holders);
    uint32_t at = first;
    while (at < n) {
        uint32_t end = (at / RING_SEGMENT_BLOCKS + 1) * RING_SEGMENT_BLOCKS;
        end = end < n ? end : n;
        at += match_segment(x, &of, keys + at, end - at);
        if (at < end)
            break;
    }
    return at - first;
}

uint32_t index_on_disk(const struct index *x, const struct holder_set *holders, const struct block_key *keys,
                       uint32_t n)
{
    enum { LOOKED_AT = 64 };
    struct match_numbers of = numbers_of(x, holders);
    uint32_t step = n > LOOKED_AT ? n / LOOKED_AT : 1, looked_at = 0, on_disk = 0;
    for (uint32_t i = 0; i < n; i += step)
        prefetch(x, &keys[i]);
    for (uint32_t i = 0; i < n; i += step, looked_at++)
        on_disk += !has(x, &of, &keys[i], IN_MEMORY);
    return looked_at ? (uint32_t)((uint64_t)n * on_disk / looked_at) : 0;
}
