/*
 * Where a request goes: a pure function over a snapshot, called by the live router and by the simulator.
 *
 * Everything is predicted in milliseconds. Of a worker that prefills: when it is free, what of the prefix is there or worth loading,
 * and how long the rest takes. Of a worker that decodes: how its steps will be when the prefill ends (who will have left by then, who
 * comes), whether the pages will be there, and whether those that run there stay within their limits. The time to first token
 * does not depend on the decode worker nor its step on the prefill worker, so both are chosen in one pass each: O(workers). The first
 * gap, between first and second token, depends on both: what is still to be moved when the prefill ends (sched/transfer.h), of which a
 * decode worker that has some of the prompt's blocks gets less.
 *
 * Any worker can do both phases; what prompts get beside sequences that decode is the share of time that those sequences' limits
 * leave (sched/batching.h, the rule by which workers run their steps). So a decode worker that prefills by itself (aggregated) and a
 * prefill worker that goes on to decode (kept) are one candidate more each. Nothing decodes where prompts that were promised a TTFT
 * would then be too late.
 *
 * Policies (all on the same predictions; which one decides is a name):
 *
 *   tandem        of what meets the limits, the least cost: work + waiting; what is loaded or found is work that isn't done. Ties by
 *                 seed. Refuses what can't meet its limits. Choices of one call share a decode worker while it has room.
 *   mooncake      Algorithm 1 of the paper (FAST '25): least TTFT; a prefix is fetched where the best match is over
 *                 POLICY_BALANCE times the local one. Refuses by TTFT and TBT.
 *   headroom      (Glia's HRA, arXiv 2510.27176): fewest in flight among those with pages for prompt and 0.6 of it, and 3 % left.
 *   mixed-pool    (Splitwise): shortest queue in the prompt pool, least memory in the token pool. A full pool borrows a machine of the
 *                 other pool, which takes both phases: aggregated on a token machine, kept on a prompt machine.
 *   cache-aware   (SGLang's gateway): longest match in the worker's own pool where it is over half of the prompt, else, and when loads
 *                 differ too much, the fewest in flight.
 *   least-loaded, round-robin, random.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "sched/transfer.h"

enum policy {
    POLICY_TANDEM,
    POLICY_MOONCAKE,
    POLICY_HEADROOM,
    POLICY_MIXED_POOL,
    POLICY_CACHE_AWARE,
    POLICY_LEAST_LOADED,
    POLICY_ROUND_ROBIN,
    POLICY_RANDOM,
    POLICIES
};
#define POLICY_NAMES "tandem|mooncake|headroom|mixed-pool|cache-aware|least-loaded|round-robin|random"

/* aggregated: a decode worker prefills by itself; kept: a prefill worker goes on and decodes. Either way one worker has it all. */
enum plan_kind { PLAN_SPLIT, PLAN_AGGREGATED, PLAN_KEPT, PLAN_REFUSE };
enum plan_force { FORCE_NONE, FORCE_SPLIT, FORCE_AGGREGATED, FORCE_KEPT };
#define PLAN_FORCE_NAMES "auto|split|aggregated|kept"
/* What stores hold is loaded or computed, whichever is faster; or always the one. */
enum prefix_rule { PREFIX_AUTO, PREFIX_LOAD, PREFIX_COMPUTE };
enum worker_role { ROLE_PREFILL, ROLE_DECODE, ROLE_STORE };

enum { POLICY_HORIZONS = 8 };
#define POLICY_NO_KEEPER  UINT32_MAX
#define POLICY_ANY_KEEPER (UINT32_MAX - 1)              /* it was admitted: no place is kept from it */
extern const double POLICY_HORIZON_MS[POLICY_HORIZONS]; /* from 0, rising */
extern const double POLICY_BALANCE;                     /* Mooncake's kvcache_balancing_threshold */

struct policy_load { /* of a worker, by what decodes there */
    double running, context, pages;
    double brevity; /* sum of 1 / tokens of the answer: what a delay of 1 ms adds to all of their TPOTs together */
};

struct policy_worker {
    enum worker_role role;
    bool usable;
    const struct cost_model *cost;
    uint32_t chunk_tokens, max_batch, total_pages, max_context;
    double
        busy_ms; /* of computing the prompts that it has, or will have before this one, if nothing decoded beside them */
    double share;         /* policy_prompt_share() after busy_ms, if the caller knows it; 0: it does not */
    double queued_tokens; /* of these prompts, those to be computed */
    uint32_t n_prompts;   /* their number */
    double
        patience; /* how many times as long they may take until one misses its TTFT limit, >= 1; INFINITY: none has one */
    double prompt_use;      /* share of the latest seconds during which it had prompts */
    double role_prompt_use; /* its mean over the workers of this role that are up */
    double stretch;         /* TPOT that requests decoded by its role had lately, over what was predicted */
    double
        booked_ms; /* new work must be computed within this time, unless it holds a booking here; INFINITY: any time */
    bool takes_prompts; /* has less than two chunks of work; else what goes there waits at the router */
    /* Loading a prefix from stores: for itself, for each block in their memory, for each on their disks. */
    double load_ms, load_dram_ms, load_ssd_ms;
    double fetch_ms, fetch_block_ms;       /* the same from other workers; both at once take as long as the slower */
    const struct transfer_model *transfer; /* of what comes to it; NULL: it takes no time */
    double sends, receives;                /* prompts that flow from it and to it */
    const uint64_t *unread; /* bits of the workers from which it can read no pages, by index; NULL: of none. Borrowed */
    struct policy_load at[POLICY_HORIZONS]; /* what runs, or will, if nothing more comes; pages with what is to grow */
    double tpot_limit_ms;                   /* the tightest of what runs there; 0: none */
};

struct policy_request {
    uint32_t n_tokens, max_tokens; /* prompt (with what was generated before); most that may still be generated */
    double expected_tokens;        /* that will be; sched/lengths.h */
    uint32_t block_tokens;
    const uint32_t *matched_blocks; /* of each worker, in its own pool; NULL: nowhere */
    uint32_t store_blocks;          /* leading blocks that the stores hold together */
    uint32_t store_blocks_ssd;      /* of these, on disk only */
    uint32_t peer_blocks;           /* most leading blocks that a worker holds which others can ask for them */
    double ttft_ms, tpot_ms;        /* limits; 0: none */
    double tpot_margin;   /* by which a predicted TPOT must stay below a limit, as a share of the prediction */
    bool urgent;          /* it goes where its first token comes soonest, whatever that costs */
    double grace;         /* share of the time to come by which it may be later than ttft_ms */
    double caution, hope; /* against ttft_ms waiting is taken to be so much longer than it is predicted to be, and
                                       its own work so much shorter */
    double remaining_ms;  /* INFINITY: no deadline */
    double waited_ms;     /* since it arrived */
    enum policy policy;
    enum plan_force force;
    enum prefix_rule prefix;
    uint32_t keeper; /* the worker that keeps a place for it; POLICY_NO_KEEPER, POLICY_ANY_KEEPER */
    bool shares; /* another choice of a prompt that is there: decoded where all of its blocks are, if there is room */
    uint64_t number; /* of requests, for round-robin and ties */
    uint64_t seed;   /* of ties */
};

struct plan {
    enum plan_kind kind;
    bool now;                 /* both workers take it at once; else it waits at the router */
    uint32_t prefill, decode; /* indices into workers; equal unless it is split. PLAN_REFUSE: what would be soonest */
    uint32_t loaded_blocks;   /* leading blocks worth loading; 0: computing is faster, or nothing is there */
    /* The first of these blocks that another worker is asked for; stores are asked for the blocks before it. */
    uint32_t peer_from;
    uint32_t new_tokens;      /* that are computed: neither matched nor loaded */
    double ttft_ms, tpot_ms;  /* predicted, from arrival */
    double work_ms;           /* of the prefill worker: load, and prefill if nothing decoded beside it */
    double step_ms;           /* longest step of decoding alone while it decodes: what is held against TPOT limits */
    double prompt_share;      /* of the prefill worker's time */
    double stretch;           /* of the decode worker, in tpot_ms */
    double load_ms, start_ms; /* of it: loading; when it begins, from now */
    struct transfer transfer; /* of a split one */
    double gap_ms, token_ms;  /* between first and second token; between two later ones */
    const char *reason;       /* PLAN_REFUSE; static text */
    bool never;               /* PLAN_REFUSE: no waiting will help (it can't fit) */
    bool
        hopeless; /* PLAN_REFUSE: not, or hardly, with idle workers either, as long as nothing more of its prefix is there */
    double over_ms; /* PLAN_REFUSE: by how much the best missed its limit */
};

const char *plan_name(enum plan_kind kind); /* "split", "aggregated", "kept", "refused" */

/* Whether one worker does both phases. */
static inline bool plan_is_whole(enum plan_kind kind)
{
    return kind == PLAN_AGGREGATED || kind == PLAN_KEPT;
}

/* What was weighed, for those who ask why. */
struct policy_candidate {
    uint32_t worker;
    bool as_prefill, as_decode; /* both: aggregated or kept */
    uint32_t matched_blocks, loaded_blocks, peer_from;
    double wait_ms, load_ms, prefill_ms, transfer_ms, ttft_ms, tpot_ms, cost; /* transfer: exposed */
    const char *reason;                                                       /* NULL: it could take the request */
};

/* candidates_out: NULL, or room for 2 * n_workers; *n_candidates_out of them are written. */
struct plan policy_place(const struct policy_worker *workers, uint32_t n_workers, const struct policy_request *request,
                         struct policy_candidate *candidates_out, uint32_t *n_candidates_out);

/* Whether it holds predictions against limits at all. */
static inline bool policy_refuses(enum policy p)
{
    return p == POLICY_TANDEM || p == POLICY_MOONCAKE;
}

/* Whether some usable decode worker can read from it, or there is none to be cut off. */
bool policy_is_read(const struct policy_worker *workers, uint32_t n, uint32_t from);

/* Pages that a request takes on its decode worker: the prompt, and an answer of the length one should expect. */
uint32_t policy_pages(const struct policy_request *request);

/* The share of its time that a worker's prompts will get after a while, beside what decodes there. */
double policy_prompt_share(const struct policy_worker *w, double after_ms);

/* What passes between two tokens of a worker whose steps take step_ms without prompts, at its lately usual share of prompts. */
double policy_token_ms(const struct policy_worker *w, double step_ms);

/* What runs on a worker after a while. */
struct policy_load policy_load_at(const struct policy_worker *w, double after_ms);
