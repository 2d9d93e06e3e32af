/*
 * A cluster in virtual time: a trace against N prefill and M decode workers under the scheduler of the live router, the engine's own
 * batching, and a cost model in place of the kernels.
 *
 * Each worker is a state machine that runs steps: prompts in chunks (sched/batching.h), or one token for each running sequence;
 * runs of identical decode steps are taken at once. A worker keeps the blocks of what it computed or received until its pool needs
 * them (least recently used first, a chain from its tail). A prefilled request joins its decode worker when the last chunk has
 * been transferred.
 *
 * The scheduler starts from coefficients that may be wrong (profile_error) and learns from steps that are noisy (noise), as live.
 * The same configuration and trace give the same result. A step of a workflow arrives when the one before it has ended; with one
 * that is refused, so are those that would follow.
 *
 * Threads: one owner. The trace is borrowed.
 */
#pragma once

#include "replay/trace.h"
#include "sched/scheduler.h"

struct simulate_ask { /* what a request is beside its line of the trace */
    uint64_t tenant;
    int64_t follows;     /* the request that must end before this one is sent, one before it in the trace; -1: none */
    uint32_t steps_left; /* of its workflow, after it */
    double workflow_ms;  /* from the arrival of its workflow's first step; 0: no deadline */
};

struct simulate_config {
    uint32_t n_prefill, n_decode;
    uint32_t chunk_tokens, max_batch, n_pages, max_context; /* of each worker; pages of block_tokens */
    uint32_t block_tokens;                                  /* the trace's: 512 for Mooncake's */
    struct cost_profile cost;                               /* true */
    double profile_error;              /* the scheduler starts with the true coefficients times this */
    double noise;                      /* of step times: sigma of a log-normal factor */
    double link_ms, link_ms_per_token; /* of a hand-over: what of the last chunk is exposed */
    double rate;                       /* arrivals come so many times faster */
    double ttft_ms, tpot_ms;           /* limits asked for; 0: none */
    enum policy policy;
    enum order order;
    enum plan_force force;
    double retry_share; /* of the refused that come back once, when they were told to */
    double
        probe_share; /* of the refused with a retry-after: each 5 ms it is tried whether they would be admitted now */
    const struct simulate_ask *asks; /* of each request; NULL: all of one tenant, and by themselves */
    const struct fair_weight *weights;
    uint32_t n_weights;
    uint64_t seed;
    uint64_t n_requests; /* of the trace; 0: all */
};

struct simulated {                               /* a request, in the order of the trace */
    bool refused, came_back, admitted_then;      /* came_back: after it was refused; admitted_then: and was taken */
    double arrived_ms, ttft_ms, tpot_ms, end_ms; /* arrived: first; ttft: from the arrival that was admitted */
    double predicted_ttft_ms, predicted_tpot_ms;
    double retry_after_ms,
        admissible_ms; /* admissible: after its first refusal, as one that comes anew; 0: not tried */
    uint32_t prefill, decode, cached_tokens;
};

struct simulate_result {
    struct simulated *requests; /* owned: free() */
    uint64_t n_requests, n_refused, n_late_refused;
    double duration_ms;
    double *busy_ms; /* of each worker; owned: free() */
    uint32_t n_workers;
};

void simulate_run(const struct trace *trace, const struct simulate_config *config, struct simulate_result *out);
void simulate_result_fini(struct simulate_result *r);
