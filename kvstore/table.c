#include "kvstore/table.h"

#include <assert.h>
#include <stdlib.h>

#include "base/mem.h"
#include "base/probing.h"

/* A tenant and its eviction orders. The slot of a tenant without entries may be given to another tenant. */
struct table_tenant {
    uint32_t id;
    double share;
    uint64_t n_entries, n_dram, n_ssd; /* entries; those that hold a slot; those DURABLE or QUEUED */
    struct eviction *clean, *dirty, *ssd;
};

struct store_table {
    bool has_ssd, has_quotas;
    /* The first one is the default tenant. A place without entries may be given to another tenant. */
    struct table_tenant tenants[TABLE_TENANTS];
    uint32_t n_tenants, n_named;
    double share;
    const struct tenant_share *named;
    /* Open addressing, linear probing, at most half full; keys are hashes already. */
    struct store_entry **buckets;
    uint64_t cap, n_entries;
    uint32_t *free_slots, *generations;
    uint32_t n_free, n_slots;
    TAILQ_HEAD(, store_entry) dirty;
    uint32_t n_unwritten;
    uint32_t n_use[4]; /* entries by enum slot_use */
    uint64_t n_ready, n_durable, n_queued, n_kept;
};

struct store_table *table_open(uint32_t n_slots, bool has_ssd, enum eviction_policy policy)
{
    struct store_table *t = mem_zalloc(sizeof(*t));
    TAILQ_INIT(&t->dirty);
    t->has_ssd = has_ssd;
    t->cap = 1024;
    t->buckets = mem_array(t->cap, sizeof(t->buckets[0]));
    t->n_slots = t->n_free = n_slots;
    t->free_slots = mem_array(n_slots, sizeof(t->free_slots[0]));
    t->generations = mem_array(n_slots, sizeof(t->generations[0]));
    for (uint32_t i = 0; i < n_slots; i++)
        t->free_slots[i] = n_slots - 1 - i;
    struct eviction *clean = eviction_open(policy);
    t->tenants[0] = (struct table_tenant){
        .share = 1, .clean = clean, .dirty = eviction_open_beside(clean), .ssd = eviction_open(policy)};
    t->n_tenants = 1;
    return t;
}

void table_close(struct store_table *t)
{
    if (!t)
        return;
    for (uint32_t i = 0; i < t->n_tenants; i++) {
        eviction_close(t->tenants[i].clean);
        eviction_close(t->tenants[i].dirty);
        eviction_close(t->tenants[i].ssd);
    }
    for (uint64_t i = 0; i < t->cap; i++)
        free(t->buckets[i]);
    free(t->buckets);
    free(t->free_slots);
    free(t->generations);
    free(t);
}

/* ---------------------------------------------------------------- tenants */

static double share_of(const struct store_table *t, uint32_t tenant)
{
    for (uint32_t i = 0; i < t->n_named; i++)
        if (t->named[i].tenant == tenant)
            return t->named[i].share;
    return t->share;
}

void table_set_quotas(struct store_table *t, double share, const struct tenant_share *named, uint32_t n_named)
{
    assert(!t->n_entries);
    t->has_quotas = share < 1 || n_named;
    t->share = share;
    t->named = named;
    t->n_named = n_named;
    t->tenants[0].share = share_of(t, 0);
}

/* Finds the tenant, or gives it a place: one without entries, a new one, or, if all TABLE_TENANTS are
 * taken, the default tenant's. */
static struct table_tenant *tenant_of(struct store_table *t, uint32_t id)
{
    struct table_tenant *first = t->tenants, *free = NULL;
    if (!t->has_quotas || !id)
        return first;
    for (uint32_t i = 1; i < t->n_tenants; i++) {
        if (t->tenants[i].id == id)
            return &t->tenants[i];
        if (!t->tenants[i].n_entries)
            free = &t->tenants[i];
    }
    if (!free && t->n_tenants == TABLE_TENANTS)
        return first;
    if (!free) {
        free = &t->tenants[t->n_tenants++];
        *free = (struct table_tenant){.clean = eviction_open_beside(first->clean),
                                      .dirty = eviction_open_beside(first->clean),
                                      .ssd = eviction_open_beside(first->ssd)};
    }
    free->id = id;
    free->share = share_of(t, id);
    return free;
}

/* ------------------------------------------------------------------- keys */

static uint64_t home(const struct store_table *t, const struct block_key *key)
{
    return block_key_hash(key) & (t->cap - 1);
}

/* Index of the key's bucket, or of the empty bucket where it would go. */
static uint64_t bucket(const struct store_table *t, const struct block_key *key)
{
    uint64_t i = home(t, key);
    while (t->buckets[i] && !block_key_equal(&t->buckets[i]->key, key))
        i = (i + 1) & (t->cap - 1);
    return i;
}

struct store_entry *table_find(const struct store_table *t, const struct block_key *key)
{
    return t->buckets[bucket(t, key)];
}

static void grow_table(struct store_table *t)
{
    struct store_entry **old = t->buckets;
    uint64_t n = t->cap;
    t->cap *= 2;
    t->buckets = mem_array(t->cap, sizeof(t->buckets[0]));
    for (uint64_t i = 0; i < n; i++)
        if (old[i])
            t->buckets[bucket(t, &old[i]->key)] = old[i];
    free(old);
}

struct store_entry *table_add(struct store_table *t, const struct block_key *key, uint32_t chain_index, uint32_t tenant,
                              uint64_t now)
{
    if (2 * (t->n_entries + 1) > t->cap)
        grow_table(t);
    struct store_entry *e = mem_zalloc(sizeof(*e));
    e->key = *key;
    e->chain_index = e->in_dram.chain_index = e->on_ssd.chain_index = chain_index;
    e->in_dram.key_hash = e->on_ssd.key_hash = block_key_hash(key);
    e->last_used = now;
    e->tenant = tenant;
    e->owner = tenant_of(t, tenant);
    e->owner->n_entries++;
    uint64_t i = bucket(t, key);
    assert(!t->buckets[i]);
    t->buckets[i] = e;
    t->n_entries++;
    t->n_use[SLOT_NONE]++;
    return e;
}

/* Removes the entry and frees it. */
static void remove_entry(struct store_table *t, struct store_entry *e)
{
    uint64_t mask = t->cap - 1, hole = bucket(t, &e->key);
    for (uint64_t i = (hole + 1) & mask; t->buckets[i]; i = (i + 1) & mask)
        if (probing_fills(hole, i, home(t, &t->buckets[i]->key), mask)) {
            t->buckets[hole] = t->buckets[i];
            hole = i;
        }
    t->buckets[hole] = NULL;
    t->n_entries--;
    t->n_kept -= e->is_kept;
    e->owner->n_entries--;
    free(e);
}

/* ----------------------------------------------------------------- orders */

static enum slot_use use_of(const struct store_entry *e)
{
    if (e->dram == DRAM_ABSENT)
        return SLOT_NONE;
    if (e->dram != DRAM_READY)
        return SLOT_HELD;
    return e->pins ? SLOT_LEASED : SLOT_CACHED;
}

static bool is_dirty(const struct store_table *t, const struct store_entry *e)
{
    return t->has_ssd && e->dram == DRAM_READY && e->ssd == SSD_ABSENT;
}

/* The block is only here, or may be: its slot should not be taken to read another block into it. */
static bool is_unwritten(const struct store_table *t, const struct store_entry *e)
{
    return t->has_ssd &&
           (e->dram == DRAM_FILLING || (e->dram == DRAM_READY && (e->ssd == SSD_ABSENT || e->ssd == SSD_QUEUED)));
}

static void list_dirty(struct store_table *t, struct store_entry *e, bool wanted)
{
    if (wanted == e->is_listed)
        return;
    e->is_listed = wanted;
    if (wanted)
        TAILQ_INSERT_TAIL(&t->dirty, e, in_dirty);
    else
        TAILQ_REMOVE(&t->dirty, e, in_dirty);
}

/* Called after each change of state: moves the entry to the list, the orders and the counts that its state
 * asks for. Ends e if it is in no tier and not pinned, so callers do not touch e afterwards. */
static void settle(struct store_table *t, struct store_entry *e)
{
    enum slot_use use = use_of(e);
    t->n_use[e->use]--;
    t->n_use[e->use = use]++;
    list_dirty(t, e, is_dirty(t, e));
    t->n_unwritten -= e->is_unwritten;
    t->n_unwritten += e->is_unwritten = is_unwritten(t, e);

    struct eviction *order = NULL;
    if (use == SLOT_CACHED && e->ssd != SSD_QUEUED && (t->has_ssd || !e->is_kept))
        order = is_dirty(t, e) ? e->owner->dirty : e->owner->clean;
    if (order != e->dram_order) {
        if (e->dram_order)
            eviction_remove(e->dram_order, &e->in_dram);
        if (order)
            eviction_insert(order, &e->in_dram, e->chain_index, e->last_used);
        e->dram_order = order;
    }
    bool may_leave_ssd = e->ssd == SSD_DURABLE && !e->pins && e->dram != DRAM_LOADING && !e->is_kept;
    if (may_leave_ssd && !eviction_contains(&e->on_ssd))
        eviction_insert(e->owner->ssd, &e->on_ssd, e->chain_index, e->last_used);
    else if (!may_leave_ssd)
        eviction_remove(e->owner->ssd, &e->on_ssd);

    if (e->dram == DRAM_ABSENT && (e->ssd == SSD_ABSENT || e->ssd == SSD_REFUSED) && !e->pins) {
        t->n_use[SLOT_NONE]--;
        remove_entry(t, e);
    }
}

enum table_order { CLEAN, DIRTY, ON_SSD };

static struct eviction_item *first_of(const struct table_tenant *n, enum table_order order)
{
    return eviction_victim(order == CLEAN ? n->clean : order == DIRTY ? n->dirty : n->ssd);
}

/* The entry of an item of the given order, if it was last used before `before`. */
static struct store_entry *victim(struct eviction_item *item, enum table_order order, uint64_t before)
{
    size_t offset = order == ON_SSD ? offsetof(struct store_entry, on_ssd) : offsetof(struct store_entry, in_dram);
    if (!item || item->last_used >= before)
        return NULL;
    return (struct store_entry *)(void *)((char *)item - offset);
}

/* Compares the first items of several tenants by the rule that sched/eviction.h has inside one order. */
static bool goes_before(const struct eviction_item *a, const struct eviction_item *b)
{
    if (a->rank != b->rank)
        return a->rank < b->rank;
    if (a->last_used != b->last_used)
        return a->last_used < b->last_used;
    if (a->chain_index != b->chain_index)
        return a->chain_index > b->chain_index;
    return a->sequence < b->sequence;
}

static struct store_entry *victim_of_all(const struct store_table *t, enum table_order order, uint64_t before)
{
    struct eviction_item *best = NULL, *item;
    for (uint32_t i = 0; i < t->n_tenants; i++)
        if ((item = first_of(&t->tenants[i], order)) && (!best || goes_before(item, best)))
            best = item;
    return victim(best, order, before);
}

struct store_entry *table_victim_clean(const struct store_table *t, uint64_t before)
{
    return victim_of_all(t, CLEAN, before);
}

struct store_entry *table_victim_dirty(const struct store_table *t, uint64_t before)
{
    return victim_of_all(t, DIRTY, before);
}

struct store_entry *table_victim_ssd(const struct store_table *t, uint64_t before)
{
    return victim_of_all(t, ON_SSD, before);
}

/* Blocks by which the tenant is above its share. On SSD the capacity in blocks is what lies there now,
 * because room is needed only when the SSD is full. */
static double excess(const struct store_table *t, const struct table_tenant *n, enum table_order order,
                     uint32_t for_tenant)
{
    if (order == ON_SSD)
        return (double)n->n_ssd - n->share * (double)(t->n_durable + t->n_queued);
    return (double)(n->n_dram + (n->id == for_tenant)) - n->share * t->n_slots;
}

static struct store_entry *victim_over_quota(const struct store_table *t, enum table_order order, uint32_t for_tenant,
                                             uint64_t before)
{
    struct store_entry *best = NULL, *e;
    double most = 0, over;
    for (uint32_t i = 0; t->has_quotas && i < t->n_tenants; i++) {
        const struct table_tenant *n = &t->tenants[i];
        if ((over = excess(t, n, order, for_tenant)) > most && (e = victim(first_of(n, order), order, before))) {
            most = over;
            best = e;
        }
    }
    return best;
}

struct store_entry *table_victim_over_quota(const struct store_table *t, uint32_t for_tenant, bool may_be_dirty,
                                            uint64_t before)
{
    struct store_entry *e = victim_over_quota(t, CLEAN, for_tenant, before);
    return e || !may_be_dirty ? e : victim_over_quota(t, DIRTY, for_tenant, before);
}

struct store_entry *table_victim_ssd_over_quota(const struct store_table *t, uint64_t before)
{
    return victim_over_quota(t, ON_SSD, 0, before);
}

uint32_t table_unwritten(const struct store_table *t)
{
    return t->n_unwritten;
}

struct store_entry *table_first_dirty(const struct store_table *t)
{
    return TAILQ_FIRST(&t->dirty);
}

/* ----------------------------------------------------------------- states */

/* A tier that the block is not in is not told: it learns of last_used when the block enters it. */
static void use(struct store_entry *e, uint64_t now, void (*how)(struct eviction *, struct eviction_item *, uint64_t))
{
    e->last_used = now;
    if (e->dram != DRAM_ABSENT)
        how(e->dram_order ? e->dram_order : e->owner->clean, &e->in_dram, now);
    if (e->ssd == SSD_DURABLE)
        how(e->owner->ssd, &e->on_ssd, now);
}

void table_request(struct store_table *t, const uint64_t *missing, uint32_t n)
{
    /* All tenants' orders share what is learned about one tier. */
    eviction_request(t->tenants[0].clean, missing, n);
    eviction_request(t->tenants[0].ssd, missing, n);
}

void table_touch(struct store_table *t, struct store_entry *e, uint64_t now)
{
    (void)t;
    use(e, now, eviction_touch);
}

void table_keep(struct store_table *t, struct store_entry *e, uint64_t now)
{
    (void)t;
    use(e, now, eviction_keep);
}

void table_refused(struct store_table *t, const struct block_key *key, uint32_t chain_index, uint64_t now)
{
    struct eviction_item item = {.key_hash = block_key_hash(key), .chain_index = chain_index};
    eviction_refused(t->tenants[0].clean, &item, now);
}

void table_set_kept(struct store_table *t, struct store_entry *e, bool kept)
{
    t->n_kept -= e->is_kept;
    t->n_kept += e->is_kept = kept;
    settle(t, e);
}

uint64_t table_kept(const struct store_table *t)
{
    return t->n_kept;
}

void table_pin(struct store_table *t, struct store_entry *e)
{
    e->pins++;
    settle(t, e);
}

void table_unpin(struct store_table *t, struct store_entry *e)
{
    assert(e->pins);
    e->pins--;
    settle(t, e);
}

/* eviction_leave comes before settle: settle would only take the item out of its order, and eviction would
 * not learn that the block has left DRAM. */
void table_set_dram(struct store_table *t, struct store_entry *e, enum dram_state to)
{
    static const bool LEGAL[4][4] = {
        [DRAM_ABSENT] = {[DRAM_FILLING] = true, [DRAM_LOADING] = true},
        [DRAM_FILLING] = {[DRAM_READY] = true, [DRAM_ABSENT] = true},
        [DRAM_LOADING] = {[DRAM_READY] = true, [DRAM_ABSENT] = true},
        [DRAM_READY] = {[DRAM_ABSENT] = true},
    };
    assert(LEGAL[e->dram][to]);
    assert(to != DRAM_ABSENT || e->dram != DRAM_READY || (!e->pins && e->ssd != SSD_QUEUED));
    if (e->dram == DRAM_ABSENT) {
        assert(t->n_free);
        e->slot = t->free_slots[--t->n_free];
        e->owner->n_dram++;
    }
    t->n_ready -= e->dram == DRAM_READY;
    t->n_ready += to == DRAM_READY;
    e->dram = to;
    if (to == DRAM_ABSENT) {
        t->generations[e->slot]++;
        t->free_slots[t->n_free++] = e->slot;
        e->owner->n_dram--;
        eviction_leave(e->dram_order ? e->dram_order : e->owner->clean, &e->in_dram);
        e->dram_order = NULL;
    }
    settle(t, e);
}

void table_set_ssd(struct store_table *t, struct store_entry *e, enum ssd_state to)
{
    static const bool LEGAL[4][4] = {
        /* DURABLE at once: a block that was found when the store opened. */
        [SSD_ABSENT] = {[SSD_QUEUED] = true, [SSD_DURABLE] = true},
        [SSD_QUEUED] = {[SSD_DURABLE] = true, [SSD_REFUSED] = true},
        [SSD_DURABLE] = {[SSD_ABSENT] = true, [SSD_REFUSED] = true},
        [SSD_REFUSED] = {[SSD_ABSENT] = true},
    };
    assert(LEGAL[e->ssd][to]);
    t->n_durable -= e->ssd == SSD_DURABLE;
    t->n_durable += to == SSD_DURABLE;
    t->n_queued -= e->ssd == SSD_QUEUED;
    t->n_queued += to == SSD_QUEUED;
    if (e->ssd == SSD_DURABLE)
        eviction_leave(e->owner->ssd, &e->on_ssd);
    e->owner->n_ssd -= e->ssd == SSD_DURABLE || e->ssd == SSD_QUEUED;
    e->owner->n_ssd += to == SSD_DURABLE || to == SSD_QUEUED;
    e->ssd = to;
    settle(t, e);
}

uint32_t table_slots_free(const struct store_table *t)
{
    return t->n_free;
}

uint32_t table_slot_generation(const struct store_table *t, uint32_t slot)
{
    return t->generations[slot];
}

struct table_audit table_audit(const struct store_table *t)
{
    return (struct table_audit){.free = t->n_free,
                                .cached = t->n_use[SLOT_CACHED],
                                .leased = t->n_use[SLOT_LEASED],
                                .held = t->n_use[SLOT_HELD],
                                .total = t->n_slots,
                                .n_dram = t->n_ready,
                                .n_ssd = t->n_durable,
                                .n_queued = t->n_queued,
                                .n_entries = t->n_entries};
}

void table_each(const struct store_table *t, void (*visit)(void *user, const struct store_entry *e), void *user)
{
    for (uint64_t i = 0; i < t->cap; i++)
        if (t->buckets[i])
            visit(user, t->buckets[i]);
}
