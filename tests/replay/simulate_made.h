/* Synthetic traces and a small cluster for the tests of the simulator. */
#pragma once

#include <math.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/random.h"
#include "replay/profile.h"
#include "replay/simulate.h"
#include "tests/tap.h"

enum { BLOCK = 512 };

struct maker {
    struct trace trace;
    uint64_t cap_requests, cap_blocks, next_id;
};

/* Adds a request. Its first n_shared blocks are those of the chain, the others are its own. */
static inline void add_in_blocks(struct maker *m, uint32_t block_tokens, double at_ms, uint32_t n_prompt,
                                 uint32_t n_output, uint64_t chain, uint32_t n_shared)
{
    struct trace *t = &m->trace;
    uint32_t n_blocks = (n_prompt + block_tokens - 1) / block_tokens;
    if (t->n_requests == m->cap_requests) {
        m->cap_requests = m->cap_requests * 2 + 64;
        t->requests = mem_resize(t->requests, m->cap_requests, sizeof(*t->requests));
    }
    if (t->n_blocks + n_blocks > m->cap_blocks) {
        m->cap_blocks = m->cap_blocks * 2 + n_blocks;
        t->blocks = mem_resize(t->blocks, m->cap_blocks, sizeof(*t->blocks));
    }
    t->requests[t->n_requests++] =
        (struct trace_request){(uint64_t)(at_ms * 1e6), n_prompt, n_output, n_blocks, t->n_blocks};
    /* An id names its whole prefix, so each chain has ids of its own. */
    for (uint32_t i = 0; i < n_blocks; i++)
        t->blocks[t->n_blocks++] = i < n_shared ? chain << 32 | i : 1ull << 62 | m->next_id++;
}

static inline void add(struct maker *m, double at_ms, uint32_t n_prompt, uint32_t n_output, uint64_t chain,
                       uint32_t n_shared)
{
    add_in_blocks(m, BLOCK, at_ms, n_prompt, n_output, chain, n_shared);
}

static inline void maker_fini(struct maker *m)
{
    free(m->trace.requests);
    free(m->trace.blocks);
}

static inline double uniform(uint64_t i, uint64_t what)
{
    return random_unit(random_at(7, i, what));
}

static inline double exponential(double mean, uint64_t i, uint64_t what)
{
    return -mean * log(1 - uniform(i, what));
}

static inline double log_uniform(double low, double high, uint64_t i, uint64_t what)
{
    return low * exp(uniform(i, what) * log(high / low));
}

/* Makes conversations: prompts of 500 to 20,000 tokens, half of them with one of 40 prefixes, gap_ms apart on
 * average. */
static inline void make_mixed(struct maker *m, uint32_t n, double gap_ms)
{
    double at = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t n_prompt = (uint32_t)log_uniform(500, 20000, i, 1), chain = (uint32_t)(uniform(i, 2) * 80);
        uint32_t shared = chain < 40 ? n_prompt / BLOCK * 2 / 3 : 0;
        add(m, at, n_prompt, 1 + (uint32_t)log_uniform(20, 600, i, 3), chain + 1, shared);
        at += exponential(gap_ms, i, 4);
    }
}

static inline struct simulate_config config_of(uint32_t n_prefill, uint32_t n_decode)
{
    struct simulate_config c = {.n_prefill = n_prefill,
                                .n_decode = n_decode,
                                .chunk_tokens = 4096,
                                .max_batch = 256,
                                .n_pages = 1600,
                                .max_context = 131072,
                                .block_tokens = BLOCK,
                                .profile_error = 1,
                                .link_ms = 1,
                                .kv_bytes_per_token = 131072,
                                .port_gb_s = 40,
                                .max_tokens = 2048,
                                .silence_ms = 1000,
                                .gone_ms = 5000,
                                .rate = 1,
                                .ttft_ms = 1000,
                                .tpot_ms = 30,
                                .seed = 1};
    ck_assert_int_eq(cost_profile_parse(PROFILE_H200_8B, &c.cost, NULL), TD_OK);
    return c;
}
