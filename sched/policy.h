/*
 * Where a request goes: a pure function over a snapshot, called by the live router and by the simulator.
 *
 * For every prefill candidate: TTFT = queue + prefix load + prefill of what is not cached there. For every decode candidate:
 * free pages for prompt and answer, and predicted TPOT. The pair with the least predicted TTFT that meets the request's
 * limits wins; near ties (5 %) are drawn by the seed. A decode worker that prefills by itself (aggregated) is a candidate
 * like the others: it wins where splitting doesn't pay.
 *
 * Refusals come before any work: what can't fit, what can't meet its TTFT, TPOT or deadline. What only has to wait for
 * room is PLAN_WAIT: the caller keeps it queued and asks again.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum plan_kind { PLAN_SPLIT, PLAN_AGGREGATED, PLAN_WAIT, PLAN_REFUSE };
enum plan_force { FORCE_NONE, FORCE_SPLIT, FORCE_AGGREGATED };
/* What stores hold is loaded or computed, whichever is faster; or always the one. */
enum prefix_rule { PREFIX_AUTO, PREFIX_LOAD, PREFIX_COMPUTE };
enum worker_role { ROLE_PREFILL, ROLE_DECODE, ROLE_STORE };

struct policy_worker {
    enum worker_role role;
    bool usable;
    uint32_t matched_blocks; /* of this request, in its own pool */
    uint64_t queued_tokens;  /* prompt tokens sent to it and not computed yet */
    uint32_t chunk_tokens;   /* of one of its steps */
    uint32_t running, max_batch;
    uint32_t total_pages, reserved_pages; /* reserved: by requests that were placed there, growth included */
    uint32_t max_context;
    double prefill_ms_per_token, decode_ms_per_step; /* 0: not measured yet */
    /* Of a load from stores, as measured: for itself, for each block in their memory, for each on their disks. */
    double load_ms, load_dram_ms, load_ssd_ms;
};

struct policy_request {
    uint32_t n_tokens, max_tokens;
    uint32_t block_tokens;
    uint32_t store_blocks;     /* leading blocks that the stores hold together */
    uint32_t store_blocks_ssd; /* of these, on disk only */
    uint32_t ttft_ms, tpot_ms; /* 0: no limit */
    int64_t remaining_ms;      /* INT64_MAX: no deadline */
    double waited_ms;          /* so far, in the router's queue */
    enum plan_force force;
    enum prefix_rule prefix;
};

struct plan {
    enum plan_kind kind;
    uint32_t prefill, decode; /* indices into workers; equal when aggregated */
    uint32_t store_blocks;   /* leading blocks worth loading from stores; 0: computing is faster, or nothing is there */
    double ttft_ms, tpot_ms; /* predicted, from arrival */
    const char *reason;      /* PLAN_REFUSE, PLAN_WAIT; static text */
    bool never;              /* PLAN_REFUSE: no waiting will help (it can't fit) */
    uint32_t retry_after_ms; /* PLAN_REFUSE */
};

struct plan policy_place(const struct policy_worker *workers, uint32_t n_workers, const struct policy_request *request,
                         uint64_t seed);

/* Pages that placing this request takes on its decode worker: the prompt, and an answer of the length one should expect. */
uint32_t policy_reservation(const struct policy_request *request);
