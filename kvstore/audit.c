/* Accounts for every slot and block of the store: compares the table with what its leases hold. */
#include <stdio.h>
#include <string.h>

#include "kvstore/kvstore_internal.h"

struct tally {
    uint64_t n_blocks, digest, n_pins;
};

static void visit(void *user, const struct store_entry *e)
{
    struct tally *t = user;
    t->n_pins += e->pins;
    if (e->dram == DRAM_READY) {
        t->n_blocks++;
        t->digest += block_digest(&e->key, TIER_DRAM);
    }
    if (e->ssd == SSD_DURABLE) {
        t->n_blocks++;
        t->digest += block_digest(&e->key, TIER_SSD);
    }
}

void kvstore_audit_answer(struct kvstore *s, struct link *link, uint64_t nonce)
{
    struct table_audit slots = table_audit(s->table);
    struct tally tally = {0};
    uint64_t n_held = 0;
    char problem[160] = "";
    Tandem__Worker__V1__Audit m = TANDEM__WORKER__V1__AUDIT__INIT;
    Tandem__Worker__V1__WorkerMessage message = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
    table_each(s->table, visit, &tally);
    for (const struct store_lease *l = s->leases; l; l = l->next, m.leases++)
        n_held += l->n;
    if (slots.free + slots.cached + slots.leased + slots.held != slots.total)
        snprintf(problem, sizeof(problem), "the states of the slots don't add up to %u", slots.total);
    else if (tally.n_pins != n_held)
        snprintf(problem, sizeof(problem), "blocks are pinned %llu times, leases hold %llu",
                 (unsigned long long)tally.n_pins, (unsigned long long)n_held);
    ProtobufCBinaryData text = {strlen(problem), (uint8_t *)problem};
    m.nonce = nonce;
    m.free = slots.free;
    m.cached = slots.cached;
    m.held = slots.held;
    m.leased = slots.leased;
    m.total = slots.total;
    m.blocks = tally.n_blocks;
    m.digest = tally.digest;
    m.pulls = s->n_wire > m.leases ? s->n_wire - m.leases : 0;
    m.n_problems = text.len > 0;
    m.problems = &text;
    message.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_AUDIT;
    message.audit = &m;
    link_send(link, &message);
}
