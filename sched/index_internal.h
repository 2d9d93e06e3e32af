/*
 * What the files of the index share: its tables, and the numbers that holders have in them.
 *
 * The keys, which are hashes, are split over N_SHARDS tables by their top byte; a table is open addressing with linear probing
 * (Knuth, vol. 3, 6.4), the position being the hash scaled to the capacity (Lemire 2019), so that tables may have any
 * size and are copied in order. An entry, half a cache line:
 *
 *      0  key (16)   16  8 slots of u16: holder number (from 1) << 2 | on disk << 1 | in memory
 *
 * or, for a block that more have, a crowd: u16 CROWD, then 48 bits of the address of its bits by holder.
 *
 * Readers need no lock, because
 * - an entry keeps its key for the life of the table, also when nobody holds the block any more; it is published by the first
 *   store to slots[0], which is never zero again. Dead entries go when the table is copied;
 * - every holder is one bit field in one word, which only one thread writes, and never moves within a table;
 * - a table that was replaced is whole and never changes; it is freed when every reader has been outside its bracket
 *   (epoch-based reclamation, Fraser 2004);
 * - a cleared holder gets another number; the old one is given out again when a sweep over everything has taken it out
 *   and every reader has been outside its bracket.
 */
#pragma once

#include <stdatomic.h>

#include "base/mem.h"
#include "sched/index.h"

enum {
    N_SHARDS = 256,
    N_IDS = 2 * INDEX_MAX_HOLDERS, /* so many clears may come within one sweep */
    ID_WORDS = N_IDS / 64,
    NO_ID = 0,
    N_SLOTS = 8,
    IN_MEMORY = 1,
    ON_DISK = 2,
    ANYWHERE = IN_MEMORY | ON_DISK,
    VACANT = 0x4000, /* a slot that was used; no tier, no zero */
    CROWD = 0x8000,
    MIN_CAP = 32,
    GROUP = 4,       /* searches begin where two cache lines begin; capacities are multiples */
    LOOK_AHEAD = 16, /* entries whose memory is asked for before they are needed */
};
_Static_assert((N_IDS - 1) << 2 < VACANT, "a slot has room for a holder number");

struct entry {
    _Atomic uint64_t key[2], slots[2];
};
_Static_assert(sizeof(struct entry) == 32, "two entries are a cache line");

struct crowd {
    struct crowd *next; /* of its table, with which it is freed */
    _Atomic uint64_t in_memory[ID_WORDS], on_disk[ID_WORDS];
};

struct table { /* apart from its entries: all tables' together stay in the processor's cache */
    struct entry *entries;
    struct table *next; /* replaced ones */
    uint64_t epoch;     /* readers that began before it may use this table, which was replaced then */
    struct crowd *crowds;
    uint32_t cap;
};

enum id_state { ID_FREE, ID_LIVE, ID_RETIRED, ID_SWEPT, ID_RESTING }; /* drawn in index.c */

struct id {
    enum id_state state;
    bool dropped;    /* some of its blocks found no place */
    uint64_t epoch;  /* ID_RESTING */
    uint64_t n, sum; /* ID_LIVE: its blocks, and of their digests */
};

struct index_reader {
    _Alignas(64) _Atomic uint64_t epoch; /* in which it began; 0: it is outside */
    const _Atomic uint64_t *now;
    atomic_flag taken;
};

struct index {
    struct table *_Atomic tables[N_SHARDS];
    _Atomic uint16_t id_of[INDEX_MAX_HOLDERS]; /* holder number; NO_ID: it has nothing */
    _Alignas(64) _Atomic uint64_t epoch;       /* rises whenever something is replaced */
    struct index_reader readers[INDEX_MAX_READERS];

    /* writer only */
    uint64_t live[ID_WORDS]; /* bit i: ids[i] is ID_LIVE; the others' slots count for nothing */
    struct id ids[N_IDS];
    uint32_t n_used[N_SHARDS], n_held[N_SHARDS]; /* entries with a key; of these, with a holder, perhaps retired */
    uint64_t n_blocks, max_blocks, n_dropped, bytes;
    struct piece *pieces; /* of memory for tables */
    struct table *replaced;
    struct table *spare; /* one that was freed last: the next copy of a shard of its size finds its memory mapped */
    bool sweeping;
    uint32_t n_retired, sweep_shard, sweep_at;
};

/* ------------------------------------------------------ tables, any thread */

static inline uint32_t shard_of(const struct block_key *key)
{
    return block_key_hash(key) >> 56;
}

static inline struct table *table_of(const struct index *x, uint32_t shard)
{
    return atomic_load(&x->tables[shard]);
}

static inline uint32_t table_home(const struct table *t, const struct block_key *key)
{
    return (uint32_t)((block_key_hash(key) >> 24 & UINT32_MAX) * t->cap >> 32) & ~(GROUP - 1u);
}

/* Always inlined: a function whose only effect is a prefetch is one without effects, to the compiler. */
__attribute__((always_inline)) static inline void table_prefetch(const struct table *t, const struct block_key *key)
{
    const struct entry *e = &t->entries[table_home(t, key)];
    __builtin_prefetch(e);
    __builtin_prefetch(e + 2);
}

/* Later, when that has come: the same of the next lines, where the search will go on. */
__attribute__((always_inline)) static inline void table_prefetch_more(const struct table *t,
                                                                      const struct block_key *key)
{
    const struct entry *e = &t->entries[table_home(t, key)];
    if (atomic_load_explicit(&e[GROUP - 1].slots[0], memory_order_relaxed)) {
        __builtin_prefetch(e + GROUP);
        __builtin_prefetch(e + GROUP + 2);
    }
}

static inline bool entry_is(const struct entry *e, const struct block_key *key)
{
    uint64_t k[2];
    memcpy(k, key->b, sizeof(k));
    return atomic_load_explicit(&e->key[0], memory_order_relaxed) == k[0] &&
           atomic_load_explicit(&e->key[1], memory_order_relaxed) == k[1];
}

static inline struct entry *table_next(const struct table *t, struct entry *e)
{
    return e + 1 == t->entries + t->cap ? t->entries : e + 1;
}

/* The key's entry, or the unused one where the search ends. */
static inline struct entry *table_probe(const struct table *t, const struct block_key *key, bool *found_out)
{
    for (struct entry *e = &t->entries[table_home(t, key)];; e = table_next(t, e)) {
        bool used = atomic_load_explicit(&e->slots[0], memory_order_acquire);
        if (!used || entry_is(e, key)) {
            *found_out = used;
            return e;
        }
    }
}

/* Of slots[0]: NULL where the slots hold the holders. */
static inline struct crowd *crowd_of(uint64_t slots)
{
    return (slots & 0xffff) == CROWD ? (struct crowd *)(uintptr_t)(slots >> 16) : NULL;
}

/* ---------------------------------------------------------- tables, writer */

void *index_memory_take(struct index *x, size_t len_bytes); /* a cache line's border, not zeroed; NULL: no memory */
void index_memory_give(struct index *x, void *taken, size_t len_bytes);

struct table *index_table_open(struct index *x, uint32_t cap); /* NULL: no memory */
void index_table_free(struct index *x, struct table *t);       /* NULL is fine */
void index_table_spare(struct index *x, struct table *t);      /* frees it when the next one comes */

/* Copies a shard's table without what is dead into one of three entries a block. False: no memory. */
bool index_shard_copy(struct index *x, uint32_t shard);

/* Gives an unused one its key; a slot is to be filled next. */
void index_entry_take(struct entry *e, const struct block_key *key);

/* One holder's tier of a block. False: it was so before. */
bool index_entry_add(struct index *x, struct table *t, struct entry *e, uint32_t id, uint32_t tier);
bool index_entry_remove(struct entry *e, uint32_t id, uint32_t tier);
bool index_entry_held(const struct entry *e);
void index_entry_sweep(const struct index *x, struct entry *e); /* takes out those that are not live */
