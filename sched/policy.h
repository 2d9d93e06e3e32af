/*
 * Chooses where a request runs: a pure function over a snapshot of the workers, called by the live router and
 * by the simulator.
 *
 * Everything is predicted in milliseconds. For a worker that would prefill: when it is free, which part of
 * the prefix it has or should load, and how long the rest of the prompt takes. For a worker that would
 * decode: how long its steps will be when the prefill ends (running sequences leave, dispatched ones join),
 * whether pages will be free, and whether the sequences there stay within their limits. TTFT does not depend
 * on the decode worker, and the decode step does not depend on the prefill worker, so each is chosen in one
 * pass over the workers: O(workers). Only the first gap, between first and second token, depends on both: it
 * contains the pages that still have to move when the prefill ends (sched/transfer.h). A decode worker that
 * has some of the prompt's blocks gets fewer pages.
 *
 * Any worker can do both phases. Prompts that share a worker with decoding sequences get the share of time
 * that the TPOT limits of those sequences leave (sched/batching.h; workers build their steps by the same
 * rule). So each worker is also a candidate for both phases: aggregated on a decode worker, kept on a prefill
 * worker. A request does not start to decode on a worker where it would slow down prompts so much that one of
 * them misses its TTFT limit.
 *
 * Policies. All use the same predictions; enum policy says which one decides:
 *
 *   tandem        The cheapest plan that meets the limits. Cost = work + weighted waiting; cached and loaded
 *                 tokens are no work. Near ties are broken by the seed. Refuses a request that can't meet its
 *                 limits. Choices of one call share a decode worker while it has room.
 *   mooncake      Algorithm 1 of the paper (FAST '25): least TTFT. A prefix is fetched if the best match is
 *                 more than POLICY_BALANCE times the local one. Refuses by TTFT and TPOT (the paper's TBT).
 *   headroom      (Glia's HRA, arXiv 2510.27176): fewest requests in flight. Decode workers that have pages
 *                 for 1.6 times the prompt and keep 3 % of their pages free go before the others.
 *   mixed-pool    (Splitwise): shortest queue in the prompt pool, least memory in use in the token pool. A
 *                 full pool borrows a machine of the other pool for both phases: aggregated on a token
 *                 machine, kept on a prompt machine.
 *   cache-aware   (SGLang's gateway): the longest match in a prefill worker's own pool if it covers more than
 *                 half of the prompt and loads are even; otherwise the fewest requests in flight.
 *   least-loaded, round-robin, random.
 *
 * Threads: no state; any thread may call. Ownership: everything in the arguments is borrowed for the call.
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

/* Aggregated: a decode worker does both phases. Kept: a prefill worker does both phases. */
enum plan_kind { PLAN_SPLIT, PLAN_AGGREGATED, PLAN_KEPT, PLAN_REFUSE };
enum plan_force { FORCE_NONE, FORCE_SPLIT, FORCE_AGGREGATED, FORCE_KEPT };
#define PLAN_FORCE_NAMES "auto|split|aggregated|kept"
/*
 * Blocks of stores and other workers: loaded or computed, whichever is faster; always loaded; never loaded.
 */
enum prefix_rule { PREFIX_AUTO, PREFIX_LOAD, PREFIX_COMPUTE };
enum worker_role { ROLE_PREFILL, ROLE_DECODE, ROLE_STORE };

enum { POLICY_HORIZONS = 8 };
/* Values of policy_request.keeper. NO: it has no booking. ANY: bookings of other requests are ignored. */
#define POLICY_NO_KEEPER  UINT32_MAX
#define POLICY_ANY_KEEPER (UINT32_MAX - 1)
extern const double POLICY_HORIZON_MS[POLICY_HORIZONS]; /* from now; the first is 0, rising */
extern const double POLICY_BALANCE;                     /* Mooncake's kvcache_balancing_threshold */

/*
 * Expected decoding load of a worker at one moment. A sequence counts by the probability that it still runs.
 */
struct policy_load {
    /* running: sequences. context: tokens of their KV. pages: for prompts and whole expected answers. */
    double running, context, pages;
    double brevity; /* sum of 1 / (tokens of the answer): the ms that a delay of 1 ms adds to all TPOTs */
};

/* One worker in the snapshot. All times are predictions in milliseconds. */
struct policy_worker {
    enum worker_role role;
    bool usable; /* false: no plan uses this worker */
    const struct cost_model *cost;
    /*
     * chunk_tokens: most prompt tokens in one step. max_batch: most sequences that decode at once.
     * total_pages: size of its pool. max_context: most tokens of one sequence, prompt and answer.
     */
    uint32_t chunk_tokens, max_batch, total_pages, max_context;
    /* "Its prompts" are those that this worker has, or will have before the request at hand. */
    double busy_ms;       /* to load and compute all its prompts if nothing decoded beside them */
    double share;         /* policy_prompt_share() at busy_ms from now; 0: the caller has not computed it */
    double queued_tokens; /* tokens of its prompts that must still be computed: neither cached nor loaded */
    uint32_t n_prompts;   /* number of its prompts */
    /*
     * Factor (>= 1) by which its prompts may take longer before one misses its TTFT limit. INFINITY: no
     * limits.
     */
    double patience;
    double prompt_use;      /* share of the latest seconds in which it had prompts to compute */
    double role_prompt_use; /* mean prompt_use of the workers of this role that are up */
    double stretch;         /* measured over predicted TPOT: mean of recent requests decoded by this role */
    /* New work must finish within this time, unless it holds a booking on this worker. INFINITY: any time. */
    double booked_ms;
    bool takes_prompts; /* less than two chunks of work are ahead; otherwise prompts wait at the router */
    /* Loading from stores: for each load; for each block in their DRAM; for each block only on their SSD. */
    double load_ms, load_dram_ms, load_ssd_ms;
    /*
     * Loading from another worker's pool: once for each load; for each block. A load from stores and a load
     * from a worker run at the same time, so together they take as long as the slower one.
     */
    double fetch_ms, fetch_block_ms;
    const struct transfer_model *transfer; /* of KV that it receives; NULL: a transfer takes no time */
    /*
     * Prompts whose KV flows from it (sends) and to it (receives) now. A prompt still in prefill counts as a
     * part of 1.
     */
    double sends, receives;
    /* Bit i is set: this worker can't read pages of worker i. NULL: it can read all. Borrowed. */
    const uint64_t *unread;
    struct policy_load at[POLICY_HORIZONS]; /* decoding load at each horizon if no more requests come */
    double tpot_limit_ms;                   /* tightest TPOT limit of its sequences; 0: none */
};

/* One request. */
struct policy_request {
    /* The prompt, with tokens generated before a re-plan; most tokens that may still be generated. */
    uint32_t n_tokens, max_tokens;
    double expected_tokens; /* tokens that will probably be generated (sched/lengths.h) */
    uint32_t block_tokens;
    const uint32_t *matched_blocks; /* by worker: leading blocks in its own pool; NULL: 0 for all. Borrowed */
    uint32_t store_blocks;          /* leading blocks that the stores hold together */
    uint32_t store_blocks_ssd;      /* blocks of store_blocks that are only on SSD */
    uint32_t peer_blocks;           /* most leading blocks that any worker holds for others to fetch */
    double ttft_ms, tpot_ms;        /* limits; 0: none */
    double tpot_margin;             /* predicted step * (1 + tpot_margin) must be <= tpot_ms */
    bool urgent;                    /* its time to the first token is the cost, instead of work and waiting */
    /* Against ttft_ms, the predicted time from now to its first token counts (1 - grace) times. */
    double grace;
    /* Against ttft_ms, waiting since arrival counts (1 + caution) times, own work (1 - hope) times. */
    double caution, hope;
    double remaining_ms; /* until its deadline; INFINITY: it has none */
    double waited_ms;    /* since its arrival */
    enum policy policy;
    enum plan_force force;
    enum prefix_rule prefix;
    uint32_t keeper; /* the worker where it has a booking, or POLICY_NO_KEEPER, POLICY_ANY_KEEPER */
    /* Another choice of a running call: it decodes where all blocks of the prompt are, if there is room. */
    bool shares;
    uint64_t number; /* the router's counter of requests: for round-robin and for breaking ties */
    uint64_t seed;   /* for breaking ties */
};

/* The decision. All times are predictions in milliseconds. */
struct plan {
    enum plan_kind kind;
    bool now; /* both workers can take it at once; false: it waits at the router */
    /*
     * Indices of workers, equal unless the plan is split. PLAN_REFUSE: prefill is the worker where the first
     * token would come soonest (0 if no worker could take the request), decode is 0.
     */
    uint32_t prefill, decode;
    uint32_t loaded_blocks; /* leading blocks that are there after loading; 0: nothing is loaded */
    /* The first block loaded from another worker (loaded_blocks: none). Those before it come from stores. */
    uint32_t peer_from;
    uint32_t new_tokens;     /* prompt tokens to compute: neither matched nor loaded */
    double ttft_ms, tpot_ms; /* from arrival; TPOT of the whole answer, with the first gap */
    /*
     * The prefill worker's time for this request, load and compute, if nothing decodes beside it.
     * PLAN_REFUSE: the least such time among all workers.
     */
    double work_ms;
    double step_ms;           /* longest step without prompts while it decodes; held against TPOT limits */
    double prompt_share;      /* share of the prefill worker's time that prompts get beside decoding */
    double stretch;           /* the decode worker's stretch, already a factor in tpot_ms */
    double load_ms, start_ms; /* loading its prefix, part of work_ms; from now until its prefill begins */
    struct transfer transfer; /* the handover of a split plan; all 0 for other plans */
    double gap_ms, token_ms;  /* between first and second token; mean between two later tokens */
    const char *reason;       /* PLAN_REFUSE: why. Static text */
    bool never;               /* PLAN_REFUSE: it fits no worker, so waiting does not help */
    /*
     * PLAN_REFUSE: even idle workers would miss or nearly miss its limit, unless more of its prefix is
     * cached.
     */
    bool hopeless;
    double over_ms; /* PLAN_REFUSE: by how much the best plan missed the limit */
};

const char *plan_name(enum plan_kind kind); /* "split", "aggregated", "kept", "refused" */

/* Whether one worker does both phases. */
static inline bool plan_is_whole(enum plan_kind kind)
{
    return kind == PLAN_AGGREGATED || kind == PLAN_KEPT;
}

/* One worker as the policy weighed it: the log of a decision. Times in ms, see struct plan. */
struct policy_candidate {
    uint32_t worker;
    bool as_prefill, as_decode; /* the phases that it was weighed for; both: aggregated or kept */
    uint32_t matched_blocks, loaded_blocks, peer_from;
    /* transfer_ms: exposed transfer. cost: in ms of work; INFINITY if it was not computed. */
    double wait_ms, load_ms, prefill_ms, transfer_ms, ttft_ms, tpot_ms, cost;
    const char *reason; /* why it could not take the request; NULL: it could. Static text */
};

/*
 * Returns the plan for one request; plan.kind is PLAN_REFUSE if there is none. candidates_out: NULL, or room
 * for 2 * n_workers entries; *n_candidates_out of them are written. With a log every worker is weighed, which
 * takes longer; the plan is the same.
 */
struct plan policy_place(const struct policy_worker *workers, uint32_t n_workers, const struct policy_request *request,
                         struct policy_candidate *candidates_out, uint32_t *n_candidates_out);

/* Whether the policy refuses requests that are predicted to miss their limits. */
static inline bool policy_refuses(enum policy p)
{
    return p == POLICY_TANDEM || p == POLICY_MOONCAKE;
}

/* Whether a usable decode worker can read pages of worker `from`. Also true if no decode worker is usable. */
bool policy_is_read(const struct policy_worker *workers, uint32_t n, uint32_t from);

/* Pages that a request needs on its decode worker: the prompt and an answer of expected_tokens. */
uint32_t policy_pages(const struct policy_request *request);

/* The share (0..1) of a worker's time that prompts get beside its decoding sequences, after_ms from now. */
double policy_prompt_share(const struct policy_worker *w, double after_ms);

/*
 * Mean time between two tokens of a sequence on a worker whose steps take step_ms without prompts. Prompts
 * are assumed for the share prompt_use of the time.
 */
double policy_token_ms(const struct policy_worker *w, double step_ms);

/* Decoding load of a worker after_ms from now: linear between two horizons; beyond the last one, the last. */
struct policy_load policy_load_at(const struct policy_worker *w, double after_ms);
