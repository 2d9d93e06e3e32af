/*
 * An account of every page: its holds are counted anew, from the holders' side, and compared with the pool's
 * own counts.
 *
 * Sequences hold pages for attention; leases, pulls and offers hold them for the wire. If the two sides
 * differ, a page has leaked, or is about to be handed out while it is still in use.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "worker/worker_internal.h"

enum { PROBLEMS_MAX = 16, PROBLEM_BYTES = 160 };

/* Holds of each page, by page index. */
struct account {
    uint32_t *by_sequences, *by_transfers;
};

/* The named blocks: their number, and the sum of their digests, which the router compares with its index. */
struct blocks {
    uint64_t n, digest;
};

static void count_held(uint32_t *counts, const struct held_pages *h)
{
    for (uint32_t i = 0; i < h->n; i++)
        counts[h->pages[i].index]++;
}

/* Counts the holds of all legs, leases, pulls and offers. */
static void count_all(struct worker *w, struct account *a, Tandem__Worker__V1__Audit *m)
{
    const struct leg *l;
    const struct worker_lease *lease;
    const struct worker_pull *p;
    const struct offer *o;
    LIST_FOREACH (l, &w->legs, in_worker) {
        uint32_t n = 0;
        m->legs++;
        const struct page_ref *pages = l->seq ? engine_seq_pages(l->seq, &n) : NULL;
        for (uint32_t i = l->seq ? engine_seq_first_page(l->seq) : 0; i < n; i++)
            a->by_sequences[pages[i].index]++;
    }
    LIST_FOREACH (lease, &w->leases, in_worker) {
        m->leases++;
        count_held(a->by_transfers, &lease->held);
    }
    LIST_FOREACH (p, &w->pulls, in_worker) {
        m->pulls++;
        count_held(a->by_transfers, &p->held);
    }
    LIST_FOREACH (o, &w->offers, in_worker)
        count_held(a->by_transfers, &o->held);
}

/* Writes a line for each page whose counts differ, at most PROBLEMS_MAX; returns how many. */
static uint32_t compare_pages(struct worker *w, const struct account *a, uint32_t n_pages,
                              char (*problems)[PROBLEM_BYTES])
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < n_pages && n < PROBLEMS_MAX; i++) {
        uint32_t sequences, transfers;
        kvpool_page_holds(engine_pool(w->engine), i, &sequences, &transfers);
        if (sequences != a->by_sequences[i] || transfers != a->by_transfers[i])
            snprintf(problems[n++], PROBLEM_BYTES,
                     "page %u: the pool counts %u sequences and %u transfers that hold it, there are %u and %u", i,
                     sequences, transfers, a->by_sequences[i], a->by_transfers[i]);
    }
    return n;
}

static void add_block(void *user, const struct block_key *key, uint32_t chain_index)
{
    (void)chain_index;
    struct blocks *b = user;
    b->n++;
    b->digest += block_digest(key, TIER_WORKER);
}

void audit_answer(struct worker *w, struct link *link, uint64_t nonce)
{
    struct kvpool *pool = engine_pool(w->engine);
    struct kvpool_audit pages = kvpool_audit(pool);
    struct account account = {mem_array(pages.total, sizeof(uint32_t)), mem_array(pages.total, sizeof(uint32_t))};
    char problems[PROBLEMS_MAX + 1][PROBLEM_BYTES];
    ProtobufCBinaryData texts[PROBLEMS_MAX + 1];
    struct blocks blocks = {0};
    Tandem__Worker__V1__Audit m = TANDEM__WORKER__V1__AUDIT__INIT;
    Tandem__Worker__V1__WorkerMessage message = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
    count_all(w, &account, &m);
    uint32_t n = compare_pages(w, &account, pages.total, problems);
    kvpool_each_block(pool, add_block, &blocks);
    if (pages.free + pages.cached + pages.held + pages.leased + pages.quarantined != pages.total)
        snprintf(problems[n++], PROBLEM_BYTES, "the states of the pages don't add up to %u", pages.total);
    for (uint32_t i = 0; i < n; i++) {
        texts[i] = (ProtobufCBinaryData){strlen(problems[i]), (uint8_t *)problems[i]};
        log_error(&w->log, "audit: %s", problems[i]);
    }
    m.nonce = nonce;
    m.free = pages.free;
    m.cached = pages.cached;
    m.held = pages.held;
    m.leased = pages.leased;
    m.quarantined = pages.quarantined;
    m.total = pages.total;
    m.blocks = blocks.n;
    m.digest = blocks.digest;
    m.n_problems = n;
    m.problems = texts;
    message.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_AUDIT;
    message.audit = &m;
    link_send(link, &message);
    free(account.by_sequences);
    free(account.by_transfers);
}
