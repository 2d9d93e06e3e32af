/*
 * What the store holds: block keys to entries, and which slots of the arena are free. Data only: no I/O, no clock, no locks.
 *
 * A block may lie in DRAM (one slot), on SSD, or both:
 *
 *   dram:  ABSENT --pull--> FILLING --verified--> READY --evicted--> ABSENT
 *            \------read---> LOADING --verified--/         FILLING and LOADING fall back to ABSENT on failure
 *
 *   ssd:   ABSENT --queued--> QUEUED --in the log--> DURABLE --didn't verify--> ABSENT
 *                                \--failed--> REFUSED <--evicted--/        REFUSED --offered again--> ABSENT
 *
 * REFUSED is not written again by itself: else a block that SSD has no room for would go in a circle as long as it is in DRAM.
 *
 * An entry that is in no tier and that nobody pins is gone: the functions that can end one say so.
 *
 * A READY block that is in none of the SSD states above but ABSENT is dirty (if there is an SSD): it waits in a list for room
 * in the write queue. Three eviction orders hold what may go: clean blocks in DRAM, dirty ones, and blocks on SSD. Nothing that
 * is pinned, being written or being loaded is in any of them.
 *
 * A kept block (table_set_kept) is in no order of the last tier that it may be in: on SSD if there is one, else in DRAM. So a store with
 * an SSD gives up its copy in DRAM as any other.
 *
 * Tenants: a block belongs to the one that first offered it. With quotas each tenant has orders of its own over the same room:
 * what is learned of uses is shared, and the block that should go next is the first of all their firsts. A tenant that holds
 * more than its share of the slots, or of the blocks on SSD, is evicted from first, the one furthest above it before others. A
 * quota is no reservation: while nobody needs the room a tenant may have all of it. At most TABLE_TENANTS are told apart at a
 * time; blocks of further ones count as the default tenant's.
 *
 * Threads: one owner.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "proto/wire/block_key.h"
#include "sched/eviction.h"

enum dram_state { DRAM_ABSENT, DRAM_FILLING, DRAM_LOADING, DRAM_READY };
enum ssd_state { SSD_ABSENT, SSD_QUEUED, SSD_DURABLE, SSD_REFUSED };
enum { TABLE_TENANTS = 64 };
enum slot_use { SLOT_NONE, SLOT_HELD, SLOT_LEASED, SLOT_CACHED };

struct entry { /* read freely; changed by the functions below only, but for load_ns and load_status */
    struct block_key key;
    uint32_t chain_index; /* of the block in its chain */
    uint32_t tenant;      /* store_msg.h */
    uint32_t pins;
    uint32_t slot; /* while dram is not ABSENT */
    enum dram_state dram;
    enum ssd_state ssd;
    uint64_t last_used;
    uint64_t load_ns;           /* of the table's owner: when reading it from SSD began, */
    enum td_status load_status; /* and how it last ended */
    enum slot_use use;
    struct eviction_item in_dram, on_ssd;
    struct tenant *owner;        /* whose orders it is in */
    struct eviction *dram_order; /* which of the two in_dram is in; NULL: none */
    struct entry *dirty_prev, *dirty_next;
    bool is_listed; /* in the list of dirty blocks */
    bool is_unwritten, is_kept;
};

struct table;

struct table *table_open(uint32_t n_slots, bool has_ssd, enum eviction_policy policy);
void table_close(struct table *t); /* NULL is fine */

struct tenant_share {
    uint32_t tenant;
    double share; /* of each tier */
};
/* Before the first entry. share: of whoever is not among the named, which are borrowed; 1 and none named: no quotas. */
void table_set_quotas(struct table *t, double share, const struct tenant_share *named, uint32_t n_named);

struct entry *table_find(const struct table *t, const struct block_key *key); /* NULL: unknown */
/* A new entry in no tier: the caller gives it one before it does anything else with the table. */
struct entry *table_add(struct table *t, const struct block_key *key, uint32_t chain_index, uint32_t tenant,
                        uint64_t now);

void table_set_kept(struct table *t, struct entry *e, bool kept);
uint64_t table_kept(const struct table *t); /* entries */

/* A request for blocks or an offer of some begins: those that are in no tier, head first (eviction_request). */
void table_request(struct table *t, const uint64_t *missing, uint32_t n);
void table_touch(struct table *t, struct entry *e, uint64_t now);
void table_keep(struct table *t, struct entry *e,
                uint64_t now); /* offered again: as new, but not a use to learn from */
/* A block was offered that is in no tier, and there was no slot for it: eviction learns from that, too. */
void table_refused(struct table *t, const struct block_key *key, uint32_t chain_index, uint64_t now);
void table_pin(struct table *t, struct entry *e);
void table_unpin(struct table *t, struct entry *e);                        /* may end e */
void table_set_dram(struct table *t, struct entry *e, enum dram_state to); /* ABSENT may end e */
void table_set_ssd(struct table *t, struct entry *e, enum ssd_state to);   /* ABSENT and REFUSED may end e */

/* Leaving ABSENT takes a free slot: there must be one. Its generation rises when it is given back. */
uint32_t table_slots_free(const struct table *t);
uint32_t table_slot_generation(const struct table *t, uint32_t slot);

/* The block that should go next, if it was last used before `before`; NULL: none. */
struct entry *table_victim_clean(const struct table *t, uint64_t before);
struct entry *table_victim_dirty(const struct table *t, uint64_t before);
struct entry *table_victim_ssd(const struct table *t, uint64_t before);
/*
 * The same of tenants above their quotas; NULL: none, or none of theirs may go. In DRAM room is needed for a block of the tenant
 * given; dirty blocks only if there are no clean ones, and they may be lost.
 */
struct entry *table_victim_over_quota(const struct table *t, uint32_t for_tenant, bool may_be_dirty, uint64_t before);
struct entry *table_victim_ssd_over_quota(const struct table *t, uint64_t before);
uint32_t table_unwritten(const struct table *t); /* slots of blocks that arrive, are dirty, or are being written */
struct entry *table_first_dirty(const struct table *t); /* the one that waits longest; NULL: none */

struct table_audit { /* slots, each counted once: the first four add up to total */
    uint32_t free, cached, leased, held, total;
    uint64_t n_dram, n_ssd, n_queued, n_entries; /* blocks READY, DURABLE, QUEUED; entries of any kind */
};
struct table_audit table_audit(const struct table *t);

void table_each(const struct table *t, void (*visit)(void *user, const struct entry *e), void *user);
