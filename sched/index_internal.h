/*
 * Shared by the files of the index: its tables, and the numbers ("ids") by which holders are stored in them.
 *
 * Keys are hashes. They are split over N_SHARDS tables by their top byte. A table uses open addressing with
 * linear probing (Knuth, vol. 3, 6.4); the position is the hash scaled to the capacity (Lemire 2019), so a
 * table may have any size and is copied in order. An entry is half a cache line:
 *
 *      0  key (16)   16  8 slots of u16: holder id (from 1) << 2 | on disk << 1 | in memory
 *
 * A block with more than 8 holders has a crowd instead: u16 CROWD, then the 48-bit address of a bitmap by
 * holder id.
 *
 * Readers need no lock, because
 * - an entry keeps its key for the life of the table, also when no holder has the block any more. The first
 *   store to slots[0] publishes the entry; slots[0] is never zero again. Entries without holders disappear
 *   when the table is copied;
 * - each holder of an entry is one bit field in one word, which only the writer writes, and it never moves
 *   within a table;
 * - a replaced table is complete and never changes. It is freed after every reader was outside its bracket at
 *   least once (epoch-based reclamation, Fraser 2004);
 * - a cleared holder gets a new id. The old id is reused after a whole sweep has removed it and then every
 *   reader was outside its bracket.
 */
#pragma once

#include <stdatomic.h>

#include "base/mem.h"
#include "sched/index.h"

enum {
    N_SHARDS = 256,
    N_IDS = 2 * INDEX_MAX_HOLDERS, /* allows INDEX_MAX_HOLDERS clears within one sweep */
    ID_WORDS = N_IDS / 64,
    NO_ID = 0,
    N_SLOTS = 8,
    IN_MEMORY = 1,
    ON_DISK = 2,
    ANYWHERE = IN_MEMORY | ON_DISK,
    VACANT = 0x4000, /* a slot that was used before: no tier, but not zero */
    CROWD = 0x8000,
    MIN_CAP = 32,
    GROUP = 4,       /* entries in two cache lines: searches begin at multiples, capacities are multiples */
    LOOK_AHEAD = 16, /* how many events ahead index_apply() prefetches */
};
_Static_assert((N_IDS - 1) << 2 < VACANT, "a slot has room for a holder number");

struct index_entry {
    _Atomic uint64_t key[2], slots[2];
};
_Static_assert(sizeof(struct index_entry) == 32, "two entries are a cache line");

struct crowd {
    struct crowd *next; /* crowds of one table; freed with the table */
    _Atomic uint64_t in_memory[ID_WORDS], on_disk[ID_WORDS];
};

/* Separate from its entries, so that all N_SHARDS of them stay in the processor's cache. */
struct index_table {
    struct index_entry *entries; /* [cap] */
    struct index_table *next;    /* in index.replaced */
    /* When it was replaced: readers that began before this epoch may still use it. */
    uint64_t epoch;
    struct crowd *crowds;
    uint32_t cap;
};

enum id_state { ID_FREE, ID_LIVE, ID_RETIRED, ID_SWEPT, ID_RESTING }; /* drawn in index.c */

struct id {
    enum id_state state;
    bool dropped;    /* some of its blocks were dropped */
    uint64_t epoch;  /* ID_RESTING: readers that began before this epoch may still see the id */
    uint64_t n, sum; /* ID_LIVE: number of its blocks; sum of their digests */
};

struct index_reader {
    _Alignas(64) _Atomic uint64_t epoch; /* index.epoch at index_read_begin(); 0: outside a bracket */
    const _Atomic uint64_t *now;         /* index.epoch */
    atomic_flag taken;
};

struct index {
    struct index_table *_Atomic tables[N_SHARDS];
    _Atomic uint16_t id_of[INDEX_MAX_HOLDERS]; /* id of each holder; NO_ID: it has no blocks */
    /* Rises when a table is replaced and when a sweep begins or ends. */
    _Alignas(64) _Atomic uint64_t epoch;
    struct index_reader readers[INDEX_MAX_READERS];

    /* The members below belong to the writer alone. */
    uint64_t live[ID_WORDS]; /* bit i: ids[i] is ID_LIVE; slots with other ids count as free */
    struct id ids[N_IDS];
    uint32_t n_used[N_SHARDS], n_held[N_SHARDS]; /* entries with a key; entries with a holder, swept or not */
    uint64_t n_blocks, max_blocks, n_dropped, bytes;
    struct memory_piece *pieces;  /* memory for entries (index_memory.c) */
    struct index_table *replaced; /* tables that readers may still use */
    /* The table that was freed last; the next copy of about its size reuses its memory. */
    struct index_table *spare;
    bool sweeping;
    uint32_t n_retired, sweep_shard, sweep_at; /* ids to sweep; position of the sweep: shard, entry */
};

/* ------------------------------------------------------ tables, any thread */

static inline uint32_t shard_of(const struct block_key *key)
{
    return block_key_hash(key) >> 56;
}

static inline struct index_table *table_of(const struct index *x, uint32_t shard)
{
    return atomic_load(&x->tables[shard]);
}

static inline uint32_t table_home(const struct index_table *t, const struct block_key *key)
{
    return (uint32_t)((block_key_hash(key) >> 24 & UINT32_MAX) * t->cap >> 32) & ~(GROUP - 1u);
}

/* Always inlined: the compiler removes calls of a function whose only effect is a prefetch. */
__attribute__((always_inline)) static inline void table_prefetch(const struct index_table *t,
                                                                 const struct block_key *key)
{
    const struct index_entry *e = &t->entries[table_home(t, key)];
    __builtin_prefetch(e);
    __builtin_prefetch(e + 2);
}

/* To be called when those lines have arrived: prefetches the next two if the search will go on there. */
__attribute__((always_inline)) static inline void table_prefetch_more(const struct index_table *t,
                                                                      const struct block_key *key)
{
    const struct index_entry *e = &t->entries[table_home(t, key)];
    if (atomic_load_explicit(&e[GROUP - 1].slots[0], memory_order_relaxed)) {
        __builtin_prefetch(e + GROUP);
        __builtin_prefetch(e + GROUP + 2);
    }
}

static inline bool entry_is(const struct index_entry *e, const struct block_key *key)
{
    uint64_t k[2];
    memcpy(k, key->b, sizeof(k));
    return atomic_load_explicit(&e->key[0], memory_order_relaxed) == k[0] &&
           atomic_load_explicit(&e->key[1], memory_order_relaxed) == k[1];
}

static inline struct index_entry *table_next(const struct index_table *t, struct index_entry *e)
{
    return e + 1 == t->entries + t->cap ? t->entries : e + 1;
}

/* The key's entry (*found_out true), or the unused entry where the search ends. */
static inline struct index_entry *table_probe(const struct index_table *t, const struct block_key *key, bool *found_out)
{
    for (struct index_entry *e = &t->entries[table_home(t, key)];; e = table_next(t, e)) {
        bool used = atomic_load_explicit(&e->slots[0], memory_order_acquire);
        if (!used || entry_is(e, key)) {
            *found_out = used;
            return e;
        }
    }
}

/* The crowd that slots[0] points to; NULL: the holders are in the slots. */
static inline struct crowd *crowd_of(uint64_t slots)
{
    return (slots & 0xffff) == CROWD ? (struct crowd *)(uintptr_t)(slots >> 16) : NULL;
}

/* ---------------------------------------------------------- tables, writer */

/*
 * Memory aligned to a cache line, not zeroed; NULL: no memory. Returned by index_memory_give() with its
 * length.
 */
void *index_memory_take(struct index *x, size_t len_bytes);
void index_memory_give(struct index *x, void *taken, size_t len_bytes);

struct index_table *index_table_open(struct index *x, uint32_t cap); /* NULL: no memory */
void index_table_free(struct index *x, struct index_table *t);       /* NULL is fine */
/* Keeps it as index.spare; frees the former one. */
void index_table_spare(struct index *x, struct index_table *t);

/*
 * Copies a shard's live entries into a new table with three entries for each block. False: no memory, nothing
 * changed.
 */
bool index_shard_copy(struct index *x, uint32_t shard);

/* Gives an unused entry its key. The caller must fill a slot next: that publishes the entry. */
void index_entry_take(struct index_entry *e, const struct block_key *key);

/* Adds or removes one tier of one holder. False: nothing changed. */
bool index_entry_add(struct index *x, struct index_table *t, struct index_entry *e, uint32_t id, uint32_t tier);
bool index_entry_remove(struct index_entry *e, uint32_t id, uint32_t tier);
bool index_entry_held(const struct index_entry *e);
void index_entry_sweep(const struct index *x, struct index_entry *e); /* removes ids that are not ID_LIVE */
