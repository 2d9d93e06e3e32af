/*
 * The writer's side of the index, and the protocol between readers and writer.
 *
 * States of a holder's id:
 *
 *     FREE --first block--> LIVE --index_clear--> RETIRED --a sweep begins--> SWEPT --it ends--> RESTING
 *      ^----------------no reader that began before the end of the sweep is left-----------------/
 *
 * Only LIVE ids are found. A copy of a table leaves out all other ids, so a copied shard counts as swept.
 */
#include "sched/index.h"

#include <stdlib.h>
#include <time.h>

#include "sched/index_internal.h"

enum { SWEEP_STEP = 64 };

struct index *index_open(uint64_t max_blocks)
{
    void *memory;
    if (mem_try(sizeof(struct index), &memory))
        abort();
    struct index *x = memset(memory, 0, sizeof(*x));
    x->max_blocks = max_blocks;
    x->bytes = sizeof(*x);
    atomic_init(&x->epoch, 1);
    /* Different sizes, so that tables do not all grow at the same time. */
    for (uint32_t i = 0; i < N_SHARDS; i++) {
        struct index_table *t = index_table_open(x, (MIN_CAP + i * (MIN_CAP / 2) / N_SHARDS) / GROUP * GROUP);
        if (!t)
            abort();
        atomic_init(&x->tables[i], t);
    }
    for (uint32_t i = 0; i < INDEX_MAX_READERS; i++) {
        x->readers[i].now = &x->epoch;
        atomic_flag_clear(&x->readers[i].taken);
    }
    return x;
}

void index_close(struct index *x)
{
    if (!x)
        return;
    while (x->replaced) {
        struct index_table *t = x->replaced;
        x->replaced = t->next;
        index_table_free(x, t);
    }
    for (uint32_t i = 0; i < N_SHARDS; i++)
        index_table_free(x, table_of(x, i));
    index_table_free(x, x->spare);
    free(x);
}

/* ----------------------------------------------------------------- readers */

struct index_reader *index_reader_open(struct index *x)
{
    for (uint32_t i = 0; i < INDEX_MAX_READERS; i++)
        if (!atomic_flag_test_and_set(&x->readers[i].taken))
            return &x->readers[i];
    return NULL;
}

void index_reader_close(struct index_reader *r)
{
    if (r)
        atomic_flag_clear(&r->taken);
}

/*
 * Sequentially consistent, as are the writer's replacement of a table and its later look at the readers:
 * either the writer sees this reader, or this reader sees the new table.
 */
void index_read_begin(struct index_reader *r)
{
    atomic_store(&r->epoch, atomic_load(r->now));
}

void index_read_end(struct index_reader *r)
{
    atomic_store_explicit(&r->epoch, 0, memory_order_release);
}

/* The latest epoch for which holds: no reader uses what was replaced in it or before. */
static uint64_t passed_epoch(const struct index *x)
{
    uint64_t oldest = atomic_load(&x->epoch);
    for (uint32_t i = 0; i < INDEX_MAX_READERS; i++) {
        uint64_t began = atomic_load(&x->readers[i].epoch);
        if (began && began < oldest)
            oldest = began;
    }
    return oldest;
}

static void free_replaced(struct index *x)
{
    if (!x->replaced)
        return;
    uint64_t passed = passed_epoch(x);
    for (struct index_table **at = &x->replaced; *at;) {
        struct index_table *t = *at;
        if (t->epoch <= passed) {
            *at = t->next;
            index_table_spare(x, t);
        } else {
            at = &t->next;
        }
    }
}

/* ----------------------------------------------------------------- numbers */

/* An id that may be given out; NO_ID: none now. */
static uint32_t find_free(const struct index *x)
{
    uint64_t passed = passed_epoch(x);
    for (uint32_t i = 1; i < N_IDS; i++)
        if (x->ids[i].state == ID_FREE || (x->ids[i].state == ID_RESTING && x->ids[i].epoch <= passed))
            return i;
    return NO_ID;
}

/* The holder's id; assigns one if it has none. May wait for readers, see index.h. */
static uint32_t id_make(struct index *x, uint32_t holder)
{
    uint32_t id = atomic_load_explicit(&x->id_of[holder], memory_order_relaxed);
    if (id != NO_ID)
        return id;
    while ((id = find_free(x)) == NO_ID) {
        index_sweep(x, UINT32_MAX);
        /* Resting ids wait for readers to leave their brackets. */
        nanosleep(&(struct timespec){.tv_nsec = 10000}, NULL);
    }
    x->ids[id] = (struct id){.state = ID_LIVE};
    x->live[id / 64] |= 1ull << id % 64;
    atomic_store(&x->id_of[holder], (uint16_t)id);
    return id;
}

/* Moves all ids in one state to another, in a new epoch. */
static void change_state(struct index *x, enum id_state from, enum id_state to)
{
    uint64_t now = atomic_fetch_add(&x->epoch, 1) + 1;
    for (uint32_t i = 0; i < N_IDS; i++)
        if (x->ids[i].state == from) {
            x->ids[i].state = to;
            x->ids[i].epoch = now;
        }
}

void index_clear(struct index *x, uint32_t holder)
{
    uint32_t id = atomic_load_explicit(&x->id_of[holder], memory_order_relaxed);
    if (id == NO_ID)
        return;
    x->ids[id].dropped = false;
    if (!x->ids[id].n)
        return; /* no entry contains this id */
    x->live[id / 64] &= ~(1ull << id % 64);
    x->ids[id].state = ID_RETIRED;
    atomic_store(&x->id_of[holder], NO_ID);
    x->n_retired++;
}

/* ---------------------------------------------------------------- sweeping */

/* Starts a sweep unless one runs. False: there is nothing to sweep. */
static bool begin_sweep(struct index *x)
{
    if (x->sweeping)
        return true;
    if (!x->n_retired)
        return false;
    change_state(x, ID_RETIRED, ID_SWEPT);
    x->n_retired = 0;
    x->sweep_shard = x->sweep_at = 0;
    return x->sweeping = true;
}

static void sweep_entries(struct index *x, struct index_table *t, uint32_t n)
{
    for (uint32_t end = x->sweep_at + n; x->sweep_at < end; x->sweep_at++) {
        struct index_entry *e = &t->entries[x->sweep_at];
        if (!index_entry_held(e))
            continue;
        index_entry_sweep(x, e);
        if (!index_entry_held(e)) {
            x->n_held[x->sweep_shard]--;
            x->n_blocks--;
        }
    }
}

/* The sweep has finished a shard: a nearly empty table is copied into a small one. */
static void next_shard(struct index *x, const struct index_table *t)
{
    if (t->cap > MIN_CAP && x->n_held[x->sweep_shard] < t->cap / 8)
        index_shard_copy(x, x->sweep_shard);
    x->sweep_at = 0;
    if (++x->sweep_shard < N_SHARDS)
        return;
    x->sweeping = false;
    change_state(x, ID_SWEPT, ID_RESTING);
}

bool index_sweep(struct index *x, uint32_t n)
{
    free_replaced(x);
    while (n && begin_sweep(x)) {
        struct index_table *t = table_of(x, x->sweep_shard);
        uint32_t step = t->cap - x->sweep_at < n ? t->cap - x->sweep_at : n;
        sweep_entries(x, t, step);
        n -= step;
        if (x->sweep_at == t->cap)
            next_shard(x, t);
    }
    return x->sweeping || x->n_retired || x->replaced;
}

/* ---------------------------------------------------------------- applying */

static bool is_full(const struct index *x)
{
    return x->max_blocks && x->n_blocks >= x->max_blocks;
}

/* Updates the account of a holder's id for index_digest(). */
static void count_held(struct index *x, uint32_t id, uint32_t tier, const struct block_key *key, bool added)
{
    uint64_t digest = block_digest(key, tier == ON_DISK ? TIER_SSD : TIER_WORKER);
    x->ids[id].n += added ? 1 : -1ull;
    x->ids[id].sum += added ? digest : -digest;
}

/* The key's entry, created if necessary. NULL: max_blocks is reached, or there is no memory. */
static struct index_entry *make_entry(struct index *x, uint32_t shard, const struct block_key *key)
{
    bool found;
    struct index_entry *e = table_probe(table_of(x, shard), key, &found);
    if (found && index_entry_held(e))
        return e;
    while (is_full(x) && begin_sweep(x)) { /* first remove blocks of cleared holders */
        index_sweep(x, SWEEP_STEP);
        e = table_probe(table_of(x, shard), key, &found);
    }
    if (is_full(x))
        return NULL;
    if (found)
        return e;
    if (x->n_used[shard] >= table_of(x, shard)->cap / 4 * 3) {
        free_replaced(x);
        if (!index_shard_copy(x, shard))
            return NULL;
        e = table_probe(table_of(x, shard), key, &found);
    }
    x->n_used[shard]++;
    index_entry_take(e, key);
    return e;
}

static void add_holder(struct index *x, uint32_t id, uint32_t tier, const struct block_key *key)
{
    uint32_t shard = shard_of(key);
    struct index_entry *e = make_entry(x, shard, key);
    if (!e) {
        x->n_dropped++;
        x->ids[id].dropped = true;
        return;
    }
    bool was_held = index_entry_held(e);
    x->n_held[shard] += !was_held;
    x->n_blocks += !was_held;
    if (index_entry_add(x, table_of(x, shard), e, id, tier))
        count_held(x, id, tier, key, true);
}

static void drop_holder(struct index *x, uint32_t id, uint32_t tier, const struct block_key *key)
{
    bool found;
    uint32_t shard = shard_of(key);
    struct index_entry *e = table_probe(table_of(x, shard), key, &found);
    if (!found || !index_entry_remove(e, id, tier))
        return;
    count_held(x, id, tier, key, false);
    bool is_held = index_entry_held(e);
    x->n_held[shard] -= !is_held;
    x->n_blocks -= !is_held;
}

void index_apply(struct index *x, uint32_t holder, const struct block_event *events, uint32_t n)
{
    for (uint32_t i = 0; i < n + LOOK_AHEAD; i++) {
        if (i < n)
            table_prefetch(table_of(x, shard_of(&events[i].key)), &events[i].key);
        if (i >= LOOK_AHEAD / 2 && i - LOOK_AHEAD / 2 < n) {
            const struct block_key *near = &events[i - LOOK_AHEAD / 2].key;
            table_prefetch_more(table_of(x, shard_of(near)), near);
        }
        if (i < LOOK_AHEAD)
            continue;
        const struct block_event *ev = &events[i - LOOK_AHEAD];
        uint32_t tier = ev->tier == TIER_SSD ? ON_DISK : IN_MEMORY;
        uint32_t id = atomic_load_explicit(&x->id_of[holder], memory_order_relaxed);
        if (ev->kind == BLOCK_CLEARED)
            index_clear(x, holder);
        else if (ev->kind == BLOCK_ADDED)
            add_holder(x, id_make(x, holder), tier, &ev->key);
        else if (id != NO_ID)
            drop_holder(x, id, tier, &ev->key);
    }
}

/* ---------------------------------------------------------------- accounts */

uint64_t index_blocks(const struct index *x)
{
    return x->n_blocks;
}

uint64_t index_bytes(const struct index *x)
{
    return x->bytes;
}

uint64_t index_dropped(const struct index *x)
{
    return x->n_dropped;
}

bool index_digest(const struct index *x, uint32_t holder, uint64_t *n_blocks_out, uint64_t *digest_out)
{
    uint32_t id = atomic_load_explicit(&x->id_of[holder], memory_order_relaxed);
    *n_blocks_out = x->ids[id].n; /* ids[NO_ID] is all zero */
    *digest_out = x->ids[id].sum;
    return !x->ids[id].dropped;
}
