/*
 * Paged KV pool: one arena, cut into pages, counted by two kinds of holders, and the prefix cache over it.
 *
 * A sequence holds a page while attention may read it; a transfer holds it while bytes may move in or out. A
 * page is handed out again only when both counts are zero, so a late write can't land in somebody else's page
 * (why this is not one count: a cancelled request drops its sequence hold at once, its transfer hold only
 * when the wire is quiet).
 *
 * A full page whose KV is computed and verified may get a name (block key). A named page that nobody holds
 * stays cached: kvpool_match() finds it. When free pages run out, cached ones are reused at once, the least
 * recently used first; the tail of a chain goes before its head. Blocks that a client pinned (kvpool_keep) go
 * after all others.
 *
 *             take              transfer_hold
 *     FREE ---------> HELD <-------------------> LEASED
 *      ^  ^            |     transfer_unhold        |
 *      |  |            +--- the last hold ends -----+
 *      |  +- unnamed --+-- named --> CACHED --take or match--> HELD
 *      |               +-- in doubt --> QUARANTINED
 *      +------------------ timer -----------+
 *
 * Threads: everything here belongs to the engine thread.
 * Errors: TD_ERR_NO_SPACE is the only one that a caller handles; broken invariants abort, in release builds
 * too.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/status.h"
#include "proto/wire/block_key.h"
#include "proto/wire/kv_layout.h"

struct kvpool;

/* Names a page. The generation tells a stale reference from a live one. */
struct page_ref {
    uint32_t index;      /* 0 .. n_pages-1 */
    uint32_t generation; /* rises each time the page is handed out */
};

struct kvpool_config {
    const struct kv_layout *layout; /* one layer group; copied */
    uint32_t n_pages;               /* >= 1 */
    uint64_t quarantine_ns;         /* how long (ns) a page in doubt is kept from reuse */
    const struct clock *clock;
    /* Optional. A page got a name or lost it. Comes inside other calls and must not call the pool. */
    void (*on_block)(void *user, bool added, const struct block_key *key, uint32_t chain_index);
    void *user;
};

/* Maps and touches n_pages * page bytes. TD_ERR_NO_MEMORY if the system refuses; nothing is left behind. */
enum td_status kvpool_open(const struct kvpool_config *config, struct kvpool **out);
void kvpool_close(struct kvpool *pool); /* NULL is fine; aborts if a transfer still holds a page */

void *kvpool_arena(const struct kvpool *pool, uint64_t *bytes_out);
/* Descriptor by which readers on this host map the arena (mem_map_shared). Borrowed; 0: not shared. */
int kvpool_arena_fd(const struct kvpool *pool);
uint8_t *kvpool_address(const struct kvpool *pool, struct page_ref page); /* aborts on a stale reference */

/*
 * Takes n pages for one sequence, all or none (TD_ERR_NO_SPACE). Each gets one sequence hold and a new
 * generation. pages_out[0..n) is written only on success.
 */
enum td_status kvpool_take(struct kvpool *pool, uint32_t n, struct page_ref *pages_out);

/*
 * Finds the longest prefix of keys[0..n) that is cached or in use, and adds one sequence hold to each of its
 * pages. Returns its length.
 */
uint32_t kvpool_match(struct kvpool *pool, const struct block_key *keys, uint32_t n, struct page_ref *pages_out);

/*
 * The same for sequences that need only the last pages of a prefix, because of a window. Returns the end of
 * the longest prefix whose pages from kv_layout_first_kept(its end) on are all found. *first_out is the first
 * page that is held; pages_out[*first_out .. end) is written.
 */
uint32_t kvpool_match_window(struct kvpool *pool, const struct block_key *keys, uint32_t n, struct page_ref *pages_out,
                             uint32_t *first_out);

/* Adds a sequence hold. Aborts if nobody holds the page: its content could be reused at any time. */
void kvpool_hold(struct kvpool *pool, struct page_ref page);
/* Drops a sequence hold of each page. Pages are in token order; the last ones are reused first. */
void kvpool_unhold(struct kvpool *pool, const struct page_ref *pages, uint32_t n);

/* The same for transfers. in_doubt: the page goes to quarantine when its last hold ends. */
void kvpool_transfer_hold(struct kvpool *pool, struct page_ref page);
void kvpool_transfer_unhold(struct kvpool *pool, struct page_ref page, bool in_doubt);

/*
 * Names a page that a sequence holds. Its KV must be complete, and computed or verified. If another page has
 * the key already, this one stays unnamed.
 */
void kvpool_name(struct kvpool *pool, struct page_ref page, const struct block_key *key, uint32_t chain_index);

/* Calls each() for every named block: a snapshot for the router's index. */
void kvpool_each_block(const struct kvpool *pool,
                       void (*each)(void *user, const struct block_key *key, uint32_t chain_index), void *user);

/*
 * Pins a block until until_ns, whether the pool has it or not: its page is reused last. until_ns 0 ends the
 * pin. At most PINS_MAX blocks are pinned (sched/pins.h).
 */
void kvpool_keep(struct kvpool *pool, const struct block_key *key, uint64_t until_ns);
/* Takes the block's name and its pin away, so that nobody finds it. Sequences that hold the page keep it. */
void kvpool_forget(struct kvpool *pool, const struct block_key *key);
/* Forgets every block and every pin. */
void kvpool_flush(struct kvpool *pool);

/* Ends quarantines and pins whose time is over. The engine calls it in every step, idle or not. */
void kvpool_sweep(struct kvpool *pool);

/*
 * Each page is counted once, in the first state that applies of quarantined, leased, held, cached, free. The
 * sum is total.
 */
struct kvpool_audit {
    uint32_t free, cached, held, leased, quarantined, total;
};
struct kvpool_audit kvpool_audit(const struct kvpool *pool);
/* The holds of page `index` (< total) by sequences and by transfers. */
void kvpool_page_holds(const struct kvpool *pool, uint32_t index, uint32_t *by_sequences_out,
                       uint32_t *by_transfers_out);
