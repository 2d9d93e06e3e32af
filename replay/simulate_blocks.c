/* Numbers of blocks, and for each block a set of bits: the workers that have it. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "replay/simulate_internal.h"

/* Numbers blocks in the order of their first use, so that chains lie together in memory. */
void blocks_number(struct sim *s)
{
    const struct trace *t = s->trace;
    uint64_t n_slots = 64;
    while (n_slots < 2 * t->n_blocks)
        n_slots *= 2;
    uint32_t *slots = mem_array(n_slots, sizeof(*slots));
    uint64_t *ids = mem_array(t->n_blocks, sizeof(*ids));
    s->block_of = mem_array(t->n_blocks, sizeof(*s->block_of));
    for (uint64_t r = 0; r < s->n_seqs; r++) {
        const struct trace_request *q = &t->requests[r];
        for (uint64_t i = q->first_block; i < q->first_block + q->n_blocks; i++) {
            uint64_t at = random_mix(t->blocks[i]) & (n_slots - 1);
            while (slots[at] && ids[slots[at] - 1] != t->blocks[i])
                at = (at + 1) & (n_slots - 1);
            if (!slots[at]) {
                ids[s->n_blocks] = t->blocks[i];
                slots[at] = ++s->n_blocks;
            }
            s->block_of[i] = slots[at] - 1;
        }
    }
    s->holders = mem_array((uint64_t)s->n_blocks * s->n_words, sizeof(*s->holders));
    free(ids);
    free(slots);
}

uint32_t blocks_of(const struct sim *s, const struct trace_request *t)
{
    uint32_t full = t->n_prompt / s->c.block_tokens;
    return t->n_blocks < full ? t->n_blocks : full;
}

static uint64_t *holders_of(const struct sim *s, uint32_t block)
{
    return s->holders + (uint64_t)block * s->n_words;
}

void blocks_set(struct sim *s, uint32_t node, uint32_t block, bool has)
{
    uint64_t bit = 1ull << node % 64, *word = &holders_of(s, block)[node / 64];
    *word = has ? *word | bit : *word & ~bit;
}

uint32_t blocks_match_one(const struct sim *s, uint32_t node, const struct trace_request *t)
{
    uint32_t n = blocks_of(s, t), i = 0;
    while (i < n && holders_of(s, s->block_of[t->first_block + i])[node / 64] >> node % 64 & 1)
        i++;
    return i;
}

uint32_t blocks_match_peer(const struct sim *s, const struct trace_request *t, uint32_t but, uint32_t *peer_out)
{
    uint32_t best = 0;
    for (uint32_t w = 0; w < s->c.n_prefill; w++) {
        uint32_t n = w == but ? 0 : blocks_match_one(s, w, t);
        if (n > best) {
            best = n;
            *peer_out = w;
        }
    }
    return best;
}

static void note(const struct sim *s, uint64_t mask, uint32_t word, uint32_t n_blocks, uint32_t *matched)
{
    for (; mask; mask &= mask - 1) {
        uint32_t node = word * 64 + (uint32_t)__builtin_ctzll(mask);
        if (node < s->n_nodes)
            matched[node] = n_blocks * s->block_pages;
    }
}

void blocks_match(const struct sim *s, const struct trace_request *t, uint32_t *matched)
{
    uint32_t n = blocks_of(s, t);
    memset(matched, 0, s->n_nodes * sizeof(*matched));
    for (uint32_t w = 0; w < s->n_words; w++) {
        uint64_t mask = ~0ull;
        for (uint32_t i = 0; i < n && mask; i++) {
            uint64_t now = mask & holders_of(s, s->block_of[t->first_block + i])[w];
            if (i)
                note(s, mask & ~now, w, i, matched);
            mask = now;
        }
        if (n)
            note(s, mask, w, n, matched);
    }
}
