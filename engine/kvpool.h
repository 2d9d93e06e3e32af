/*
 * Paged KV pool: one arena, cut into pages, counted by two kinds of holders, and the prefix cache over it.
 *
 * A sequence holds a page while attention may read it; a transfer holds it while bytes may move in or out. A page is
 * handed out again only when both counts are zero, so a late write can't land in somebody else's page (why this is not
 * one count: a cancelled request drops its sequence hold at once, its transfer hold only when the wire is quiet).
 *
 * A full page whose KV is computed and verified may get a name (block key). A named page that nobody holds stays cached:
 * found by kvpool_match, reused at once when pages run out, least recently used first; a chain's tail goes before its head. Blocks
 * that a client pinned (kvpool_keep) go after all others.
 *
 *            take                 hold/unhold            unhold, unnamed
 *     FREE ---------> HELD <------------------> LEASED ------------------> FREE
 *      ^                \--unhold, named--> CACHED --take or match--> HELD
 *      \--- timer --- QUARANTINED <--- transfer_unhold(in doubt)
 *
 * Threads: everything here belongs to the engine thread. Errors: TD_ERR_NO_SPACE is the only one a caller handles; broken
 * invariants abort, in release builds too.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/status.h"
#include "proto/wire/block_key.h"
#include "proto/wire/kv_layout.h"

struct kvpool;

struct page_ref {
    uint32_t index;      /* 0 .. n_pages-1 */
    uint32_t generation; /* rises each time the page is handed out */
};

struct kvpool_config {
    const struct kv_layout *layout; /* one layer group; copied */
    uint32_t n_pages;               /* >= 1 */
    uint64_t quarantine_ns;         /* how long a page in doubt is kept away */
    const struct clock *clock;
    /* Optional: a name was given to a page, or taken from it. Called inside other calls; must not call back. */
    void (*on_block)(void *user, bool added, const struct block_key *key, uint32_t chain_index);
    void *user;
};

/* Maps and touches n_pages * page bytes. TD_ERR_NO_MEMORY if the system refuses; nothing is left behind. */
enum td_status kvpool_open(const struct kvpool_config *config, struct kvpool **out);
void kvpool_close(struct kvpool *pool); /* NULL is fine; aborts if a transfer still holds a page */

void *kvpool_arena(const struct kvpool *pool, uint64_t *bytes_out);
int kvpool_arena_fd(
    const struct kvpool *pool); /* by which readers on this host map it (mem_map_shared); 0: there is none */
uint8_t *kvpool_address(const struct kvpool *pool, struct page_ref page); /* aborts on a stale reference */

/* Takes n pages for one sequence, all or none. pages_out[0..n) is written only on success. */
enum td_status kvpool_take(struct kvpool *pool, uint32_t n, struct page_ref *pages_out);
uint32_t kvpool_takeable(const struct kvpool *pool); /* free + cached */

/* The longest prefix of keys[0..n) that is cached or in use: each page gets a hold of the caller's sequence. */
uint32_t kvpool_match(struct kvpool *pool, const struct block_key *keys, uint32_t n, struct page_ref *pages_out);

/*
 * The same where only the last pages of a prefix are needed: the longest prefix whose pages from kv_layout_first_kept of its end
 * on are all there. *first_out: the first page held; pages_out[*first_out .. n) are written.
 */
uint32_t kvpool_match_window(struct kvpool *pool, const struct block_key *keys, uint32_t n, struct page_ref *pages_out,
                             uint32_t *first_out);

void kvpool_hold(struct kvpool *pool, struct page_ref page);
/* Pages of a sequence, in token order: the last become the first to be reused. */
void kvpool_unhold(struct kvpool *pool, const struct page_ref *pages, uint32_t n);

void kvpool_transfer_hold(struct kvpool *pool, struct page_ref page);
void kvpool_transfer_unhold(struct kvpool *pool, struct page_ref page, bool in_doubt);

/* Full, computed or verified pages only. Where the key is taken by another page, this one stays unnamed. */
void kvpool_name(struct kvpool *pool, struct page_ref page, const struct block_key *key, uint32_t chain_index);

/* Every named block, for a snapshot of the index. */
void kvpool_each_block(const struct kvpool *pool,
                       void (*each)(void *user, const struct block_key *key, uint32_t chain_index), void *user);

/* The block, there or not yet, is reused last until then; 0: as any other. No more than PINS_MAX are (sched/pins.h). */
void kvpool_keep(struct kvpool *pool, const struct block_key *key, uint64_t until_ns);
/* Takes the block's name, and its pin: nobody finds it. Who holds its page keeps it. */
void kvpool_forget(struct kvpool *pool, const struct block_key *key);
/* Forgets every block. */
void kvpool_flush(struct kvpool *pool);

/* Ends quarantines and pins that are due. The engine calls it every turn, idle or not. */
void kvpool_sweep(struct kvpool *pool);

/* Each page counted once, in the first that applies: quarantined, leased, held, cached, free. Their sum is total. */
struct kvpool_audit {
    uint32_t free, cached, held, leased, quarantined, total;
};
struct kvpool_audit kvpool_audit(const struct kvpool *pool);
/* How often page index (< total) is held by sequences and by transfers. */
void kvpool_page_holds(const struct kvpool *pool, uint32_t index, uint32_t *by_sequences_out,
                       uint32_t *by_transfers_out);
