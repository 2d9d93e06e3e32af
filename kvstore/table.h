/*
 * What the store holds: entries by block key, and which slots of the arena are free. Data only: no I/O, no
 * clock, no locks.
 *
 * A block may lie in DRAM (one slot), on SSD, or both:
 *
 *   dram:  ABSENT --pull--> FILLING --verified--> READY --evicted--> ABSENT
 *            \------read---> LOADING --verified--/         FILLING and LOADING fall back to ABSENT on failure
 *
 *   ssd:   ABSENT --queued--> QUEUED --written--> DURABLE --didn't verify--> ABSENT
 *                                \--failed--> REFUSED <--evicted--/        REFUSED --offered again--> ABSENT
 *
 * A REFUSED block is not written again until it is offered again. Otherwise a block for which the SSD has no
 * room would be written and evicted again and again as long as it is in DRAM.
 *
 * An entry that is in no tier and not pinned is freed at once. The functions that can free an entry say so
 * ("may end e").
 *
 * With an SSD, a READY block whose ssd state is ABSENT is dirty: it waits in a list for room in the write
 * queue. Three eviction orders hold the blocks that may be evicted: clean ones in DRAM, dirty ones in DRAM,
 * and those on SSD. A block that is pinned, being written or being loaded is in none of them.
 *
 * A kept block (table_set_kept) may not be evicted from the last tier: from SSD if there is one, else from
 * DRAM. So a store with an SSD may still evict its copy in DRAM.
 *
 * Tenants: a block belongs to the tenant that offered it first. With quotas each tenant has eviction orders
 * of its own over the same room; what is learned about uses is shared, and the next victim is the best among
 * the tenants' first ones. A tenant that holds more than its share of the slots, or of the blocks on SSD, is
 * evicted from before others, the one furthest above its share first. A quota is no reservation: a tenant may
 * use all room that nobody needs. At most TABLE_TENANTS tenants are distinguished at a time; further ones
 * count as the default tenant.
 *
 * Threads: one owner.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"
#include "base/status.h"
#include "proto/wire/block_key.h"
#include "sched/eviction.h"

enum dram_state { DRAM_ABSENT, DRAM_FILLING, DRAM_LOADING, DRAM_READY };
enum ssd_state { SSD_ABSENT, SSD_QUEUED, SSD_DURABLE, SSD_REFUSED };
enum { TABLE_TENANTS = 64 };
enum slot_use { SLOT_NONE, SLOT_HELD, SLOT_LEASED, SLOT_CACHED };

struct store_entry { /* may be read freely; the functions below change it, except load_ns and load_status */
    struct block_key key;
    uint32_t chain_index; /* position of the block in its chain */
    uint32_t tenant;      /* tenant id as in store_msg.h */
    /* Leases that hold the block. */
    uint32_t pins;
    uint32_t slot; /* valid while dram is not ABSENT */
    enum dram_state dram;
    enum ssd_state ssd;
    /* Tick of the last request that used it. */
    uint64_t last_used;
    uint64_t load_ns;           /* set by the table's owner: when the last read from SSD began */
    enum td_status load_status; /* set by the table's owner: how the last read from SSD ended */
    enum slot_use use;
    struct eviction_item in_dram, on_ssd;
    struct table_tenant *owner;  /* the tenant that the entry is counted under, and in whose orders it is */
    struct eviction *dram_order; /* the order that in_dram is in: clean or dirty; NULL: none */
    TAILQ_ENTRY(store_entry) in_dirty;
    bool is_listed; /* in the list of dirty blocks */
    bool is_unwritten, is_kept;
};

struct store_table;

struct store_table *table_open(uint32_t n_slots, bool has_ssd, enum eviction_policy policy);
void table_close(struct store_table *t); /* NULL is fine */

struct tenant_share {
    uint32_t tenant;
    double share; /* of each tier, 0 to 1 */
};
/* Call before the first entry is added. share: of each tenant that is not named. named is borrowed. share
 * 1 and no names: no quotas. */
void table_set_quotas(struct store_table *t, double share, const struct tenant_share *named, uint32_t n_named);

/* NULL: unknown key. */
struct store_entry *table_find(const struct store_table *t, const struct block_key *key);
/* Adds an entry in no tier. The caller must give it a tier before it calls anything else that may end it. */
struct store_entry *table_add(struct store_table *t, const struct block_key *key, uint32_t chain_index, uint32_t tenant,
                              uint64_t now);

/* A kept block is not evicted from the last tier. */
void table_set_kept(struct store_table *t, struct store_entry *e, bool kept);
uint64_t table_kept(const struct store_table *t); /* number of kept entries */

/* A request for blocks, or an offer, begins. missing: hashes of its keys that are in no tier, head first
 * (eviction_request). */
void table_request(struct store_table *t, const uint64_t *missing, uint32_t n);
void table_touch(struct store_table *t, struct store_entry *e, uint64_t now);
/* Offered again: counts as used now, but eviction does not learn from it. */
void table_keep(struct store_table *t, struct store_entry *e, uint64_t now);
/* A block in no tier was offered, and there was no slot for it: eviction learns from that, too. */
void table_refused(struct store_table *t, const struct block_key *key, uint32_t chain_index, uint64_t now);
void table_pin(struct store_table *t, struct store_entry *e);
void table_unpin(struct store_table *t, struct store_entry *e);                        /* may end e */
void table_set_dram(struct store_table *t, struct store_entry *e, enum dram_state to); /* ABSENT may end e */
/* ABSENT and REFUSED may free e. */
void table_set_ssd(struct store_table *t, struct store_entry *e, enum ssd_state to);

/* Leaving ABSENT takes a free slot, which must exist. A slot's generation rises when the slot is given
 * back. */
uint32_t table_slots_free(const struct store_table *t);
uint32_t table_slot_generation(const struct store_table *t, uint32_t slot);

/* The next victim of each kind, if it was last used before tick `before`; NULL: none. */
struct store_entry *table_victim_clean(const struct store_table *t, uint64_t before);
struct store_entry *table_victim_dirty(const struct store_table *t, uint64_t before);
struct store_entry *table_victim_ssd(const struct store_table *t, uint64_t before);
/*
 * Next victim of a tenant above its quota. NULL if there is none, or if all its blocks are pinned or
 * otherwise in use. In DRAM the room is needed for a block of for_tenant, which is counted as if it were
 * there already; dirty blocks are taken only if may_be_dirty and no clean one is found, and the caller may
 * lose them.
 */
struct store_entry *table_victim_over_quota(const struct store_table *t, uint32_t for_tenant, bool may_be_dirty,
                                            uint64_t before);
struct store_entry *table_victim_ssd_over_quota(const struct store_table *t, uint64_t before);
uint32_t table_unwritten(const struct store_table *t); /* slots of blocks that are FILLING, dirty or QUEUED */
/* The dirty block that has waited longest; NULL: none. */
struct store_entry *table_first_dirty(const struct store_table *t);

struct table_audit { /* each slot counted once: free + cached + leased + held = total */
    uint32_t free, cached, leased, held, total;
    uint64_t n_dram, n_ssd, n_queued, n_entries; /* blocks READY, DURABLE, QUEUED; entries in any state */
};
struct table_audit table_audit(const struct store_table *t);

void table_each(const struct store_table *t, void (*visit)(void *user, const struct store_entry *e), void *user);
