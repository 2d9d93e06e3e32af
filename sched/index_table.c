/* Tables of the index: entries, slots, crowds, and copies without dead entries. Writer's thread only. */
#include <stdlib.h>

#include "sched/index_internal.h"

static const uint64_t EACH = 0x0001000100010001; /* EACH * n has n in each slot of a word */

/* ----------------------------------------------------------------- memory */

struct index_table *index_table_open(struct index *x, uint32_t cap)
{
    void *entries;
    size_t len = (size_t)cap * sizeof(struct index_entry);
    struct index_table *t = x->spare;
    if (t && t->cap >= cap && t->cap - cap <= cap / 4) {
        x->spare = NULL;
        memset(t->entries, 0, (size_t)t->cap * sizeof(struct index_entry));
        return t;
    }
    entries = index_memory_take(x, len);
    if (!entries)
        return NULL;
    t = mem_zalloc(sizeof(*t));
    t->entries = memset(entries, 0, len);
    t->cap = cap;
    x->bytes += sizeof(*t);
    return t;
}

static void free_crowds(struct index *x, struct index_table *t)
{
    while (t->crowds) {
        struct crowd *c = t->crowds;
        t->crowds = c->next;
        x->bytes -= sizeof(*c);
        free(c);
    }
}

void index_table_free(struct index *x, struct index_table *t)
{
    if (!t)
        return;
    free_crowds(x, t);
    x->bytes -= sizeof(*t);
    index_memory_give(x, t->entries, (size_t)t->cap * sizeof(struct index_entry));
    free(t);
}

void index_table_spare(struct index *x, struct index_table *t)
{
    free_crowds(x, t);
    index_table_free(x, x->spare);
    x->spare = t;
}

/* ------------------------------------------------------------------- words */

static uint64_t get(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_relaxed); /* only the writer writes it */
}

static void put(_Atomic uint64_t *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_release);
}

static bool is_live(const struct index *x, uint32_t slot)
{
    uint32_t id = slot >> 2;
    return (slot & ANYWHERE) && x->live[id / 64] >> id % 64 & 1;
}

static uint32_t slot_get(const struct index_entry *e, uint32_t i)
{
    return get(&e->slots[i / 4]) >> 16 * (i % 4) & 0xffff;
}

static void slot_put(struct index_entry *e, uint32_t i, uint64_t slot)
{
    uint32_t shift = 16 * (i % 4);
    put(&e->slots[i / 4], (get(&e->slots[i / 4]) & ~(0xffffull << shift)) | slot << shift);
}

/* Index of the first slot whose top bit is set, in a mask for each of the two words; N_SLOTS: none. */
static uint32_t first_slot(uint64_t in_first, uint64_t in_second)
{
    return in_first    ? (uint32_t)__builtin_ctzll(in_first) / 16
           : in_second ? (uint32_t)__builtin_ctzll(in_second) / 16 + 4
                       : N_SLOTS;
}

/*
 * Sets the top bit of each slot with this id: where the difference is zero (Warren, Hacker's Delight, 6-1).
 */
static uint64_t slots_with(uint64_t word, uint32_t id)
{
    uint64_t difference = (word & ~(EACH * ANYWHERE)) ^ EACH * (id << 2), low = EACH * 0x7fff;
    return ~(((difference & low) + low) | difference | low);
}

static uint32_t slot_of(const struct index_entry *e, uint32_t id)
{
    return first_slot(slots_with(get(&e->slots[0]), id), slots_with(get(&e->slots[1]), id));
}

/* Sets the top bit of each slot without a tier. */
static uint64_t slots_free(uint64_t word)
{
    return (~(word | word >> 1) & EACH) << 15;
}

static uint32_t free_slot(const struct index *x, const struct index_entry *e)
{
    uint32_t i = first_slot(slots_free(get(&e->slots[0])), slots_free(get(&e->slots[1])));
    if (i == N_SLOTS) /* otherwise a slot of a cleared holder */
        for (i = 0; i < N_SLOTS && is_live(x, slot_get(e, i));)
            i++;
    return i;
}

/* ------------------------------------------------------------------ crowds */

static bool crowd_set(struct crowd *c, uint32_t slot, bool on)
{
    uint32_t id = slot >> 2;
    _Atomic uint64_t *word = &(slot & ON_DISK ? c->on_disk : c->in_memory)[id / 64];
    uint64_t was = get(word), is = on ? was | 1ull << id % 64 : was & ~(1ull << id % 64);
    put(word, is);
    return was != is;
}

static struct crowd *crowd_open(struct index *x, struct index_table *t)
{
    struct crowd *c = mem_zalloc(sizeof(*c));
    if ((uintptr_t)c >> 48)
        abort(); /* addresses in user space have at most 48 bits on all supported systems */
    c->next = t->crowds;
    t->crowds = c;
    x->bytes += sizeof(*c);
    return c;
}

/* ----------------------------------------------------------------- entries */

/* Lists the entry's live holders, each as a slot value. Returns how many. */
static uint32_t entry_list(const struct index *x, const struct index_entry *e, uint16_t out[N_IDS])
{
    uint32_t n = 0;
    const struct crowd *c = crowd_of(get(&e->slots[0]));
    for (uint32_t w = 0; c && w < ID_WORDS; w++) {
        uint64_t in_memory = get(&c->in_memory[w]), on_disk = get(&c->on_disk[w]);
        for (uint64_t left = (in_memory | on_disk) & x->live[w]; left; left &= left - 1) {
            uint32_t bit = (uint32_t)__builtin_ctzll(left);
            out[n++] = (uint16_t)((w * 64 + bit) << 2 | (on_disk >> bit & 1) << 1 | (in_memory >> bit & 1));
        }
    }
    for (uint32_t i = 0; !c && i < 2; i++)
        for (uint64_t slots = get(&e->slots[i]); slots; slots >>= 16)
            if (is_live(x, slots & 0xffff))
                out[n++] = slots & 0xffff;
    return n;
}

/*
 * Sets the holders of an entry that has none, or whose holders are all in the list. slots[0] is written last:
 * readers see the former holders or all new ones.
 */
static void entry_fill(struct index *x, struct index_table *t, struct index_entry *e, const uint16_t *list, uint32_t n)
{
    if (n <= N_SLOTS) {
        uint64_t words[2] = {0};
        for (uint32_t i = 0; i < n; i++)
            words[i / 4] |= (uint64_t)list[i] << 16 * (i % 4);
        put(&e->slots[1], words[1]);
        put(&e->slots[0], words[0]);
        return;
    }
    struct crowd *c = crowd_open(x, t);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t tier = IN_MEMORY; tier <= ON_DISK; tier++)
            if (list[i] & tier)
                crowd_set(c, (list[i] & ~(uint32_t)ANYWHERE) | tier, true);
    put(&e->slots[0], (uint64_t)(uintptr_t)c << 16 | CROWD);
}

bool index_entry_add(struct index *x, struct index_table *t, struct index_entry *e, uint32_t id, uint32_t tier)
{
    struct crowd *c = crowd_of(get(&e->slots[0]));
    if (c)
        return crowd_set(c, id << 2 | tier, true);
    uint32_t i = slot_of(e, id), slot = i < N_SLOTS ? slot_get(e, i) : id << 2;
    if (slot & tier)
        return false;
    if (i == N_SLOTS)
        i = free_slot(x, e);
    if (i < N_SLOTS) {
        slot_put(e, i, slot | tier);
        return true;
    }
    uint16_t list[N_IDS];
    uint32_t n = entry_list(x, e, list);
    list[n++] = (uint16_t)(slot | tier);
    entry_fill(x, t, e, list, n);
    return true;
}

bool index_entry_remove(struct index_entry *e, uint32_t id, uint32_t tier)
{
    struct crowd *c = crowd_of(get(&e->slots[0]));
    if (c)
        return crowd_set(c, id << 2 | tier, false);
    uint32_t i = slot_of(e, id), slot = i < N_SLOTS ? slot_get(e, i) : 0;
    if (!(slot & tier))
        return false;
    slot &= ~tier;
    slot_put(e, i, slot & ANYWHERE ? slot : VACANT);
    return true;
}

bool index_entry_held(const struct index_entry *e)
{
    uint64_t any = 0, slots = get(&e->slots[0]);
    const struct crowd *c = crowd_of(slots);
    if (!c)
        return (slots | get(&e->slots[1])) & EACH * ANYWHERE;
    for (uint32_t w = 0; w < ID_WORDS; w++)
        any |= get(&c->in_memory[w]) | get(&c->on_disk[w]);
    return any;
}

void index_entry_sweep(const struct index *x, struct index_entry *e)
{
    struct crowd *c = crowd_of(get(&e->slots[0]));
    for (uint32_t w = 0; c && w < ID_WORDS; w++) {
        put(&c->in_memory[w], get(&c->in_memory[w]) & x->live[w]);
        put(&c->on_disk[w], get(&c->on_disk[w]) & x->live[w]);
    }
    for (uint32_t i = 0; !c && i < N_SLOTS; i++) {
        uint32_t slot = slot_get(e, i);
        if ((slot & ANYWHERE) && !is_live(x, slot))
            slot_put(e, i, VACANT);
    }
}

void index_entry_take(struct index_entry *e, const struct block_key *key)
{
    uint64_t k[2];
    memcpy(k, key->b, sizeof(k));
    put(&e->key[0], k[0]);
    put(&e->key[1], k[1]);
}

/* ------------------------------------------------------------------ copies */

static void replace(struct index *x, uint32_t shard, struct index_table *t)
{
    struct index_table *old = table_of(x, shard);
    atomic_store(&x->tables[shard], t);
    old->epoch = atomic_fetch_add(&x->epoch, 1) + 1;
    old->next = x->replaced;
    x->replaced = old;
    if (shard == x->sweep_shard)
        x->sweep_at = t->cap; /* the copy has nothing to sweep */
}

/* The place for a key that is not in the table. */
static struct index_entry *unused_entry(const struct index_table *t, const struct block_key *key)
{
    struct index_entry *e = &t->entries[table_home(t, key)];
    while (get(&e->slots[0]))
        e = table_next(t, e);
    return e;
}

static struct index_entry *copy_key(const struct index_entry *e, const struct index_table *to)
{
    uint64_t words[2] = {get(&e->key[0]), get(&e->key[1])};
    struct block_key key;
    memcpy(key.b, words, sizeof(words));
    struct index_entry *into = unused_entry(to, &key);
    index_entry_take(into, &key);
    return into;
}

/* Copies slots unchanged; allowed only if no cleared holder can still be in them. */
static void copy_slots(const struct index_entry *e, const struct index_table *to)
{
    struct index_entry *into = copy_key(e, to);
    put(&into->slots[1], get(&e->slots[1]));
    put(&into->slots[0], get(&e->slots[0]));
}

static uint32_t copy_entries(struct index *x, const struct index_table *from, struct index_table *to)
{
    uint16_t list[N_IDS];
    uint32_t n_copied = 0;
    bool all_live = !x->n_retired && !x->sweeping;
    for (uint32_t i = 0; i < from->cap; i++) {
        const struct index_entry *e = &from->entries[i];
        uint64_t slots = get(&e->slots[0]);
        if (!slots)
            continue;
        if (all_live && !crowd_of(slots)) {
            if (!index_entry_held(e))
                continue;
            copy_slots(e, to);
            n_copied++;
            continue;
        }
        uint32_t n = entry_list(x, e, list);
        if (!n)
            continue;
        entry_fill(x, to, copy_key(e, to), list, n);
        n_copied++;
    }
    return n_copied;
}

bool index_shard_copy(struct index *x, uint32_t shard)
{
    const struct index_table *from = table_of(x, shard);
    uint64_t cap = (x->n_held[shard] * 3ull + GROUP - 1) / GROUP * GROUP;
    struct index_table *to = cap <= UINT32_MAX ? index_table_open(x, cap > MIN_CAP ? (uint32_t)cap : MIN_CAP) : NULL;
    if (!to)
        return false;
    uint32_t n = copy_entries(x, from, to);
    x->n_blocks -= x->n_held[shard] - n;
    x->n_held[shard] = x->n_used[shard] = n;
    replace(x, shard, to);
    return true;
}
