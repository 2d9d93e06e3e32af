/*
 * A cluster in virtual time: a trace against N prefill and M decode workers and S stores under the scheduler of the live router,
 * the engine's own batching and admission, the stores' own eviction, a cost model in place of the kernels, and a network in which
 * flows share the ports that they use.
 *
 * Each worker is a state machine that runs steps: prompts in chunks (sched/batching.h), and one token for each running sequence;
 * runs of decode steps are taken at once. Its pool holds pages; what nobody holds stays as cache until the pages are
 * needed (least recently used first, a chain from its tail). A sequence takes the pages of its prompt when it is admitted, in
 * order of arrival, and one more as it grows; when there is none the newest one gives all of its own back and waits again.
 *
 * A split request has two legs, dispatched together: the decode worker takes pages and pulls what the prefill worker announces,
 * layer by layer; its first token is shown when both the prefill and that acceptance are there, and it joins the batch when the last
 * byte has come. With no prefill workers each decode worker does both.
 *
 * Each worker draws what it does (idle, prompts, decoding) at the clock that it has. With a budget, all workers' power is read every
 * two seconds, and clocks follow it as POLCA's do (sched/power.h); what is slower then, the scheduler learns from the steps.
 *
 * What it does not know: time spent by processes themselves (rpc_ms stands for a message), answers as prefixes of later prompts (a
 * trace names only what prompts share), and disks that get slow by themselves.
 *
 * The scheduler starts from coefficients that may be wrong (profile_error) and learns from steps that are noisy (noise), as live.
 * The same configuration and trace give the same result. A step of a workflow arrives when the one before it has ended; with one
 * that is refused, so are those that would follow.
 *
 * Threads: one owner; several runs may go on at once. The trace is borrowed.
 */
#pragma once

#include "replay/trace.h"
#include "sched/eviction.h"
#include "sched/power.h"
#include "sched/scheduler.h"

enum { SIMULATE_MAX_ROUTERS = 16 };
#define SIMULATE_REPORT_MS                                                                                             \
    10.0 /* at least between two reports of a worker, and between two of what a router has queued */

enum { SIMULATE_TICKS = 240 }; /* even: two ticks become one when the run gets longer */

struct simulate_ask { /* what a request is beside its line of the trace */
    uint64_t tenant;
    int64_t follows;     /* the request that must end before this one is sent, one before it in the trace; -1: none */
    uint32_t steps_left; /* of its workflow, after it */
    double workflow_ms;  /* from the arrival of its workflow's first step; 0: no deadline */
};

struct simulate_fault { /* a worker dies, and comes back empty */
    uint32_t worker;
    double at_ms, back_ms; /* INFINITY: never */
};

struct simulate_router_fault { /* a router dies, and its requests with it; those that come go to the others */
    uint32_t router;
    double at_ms;
};

struct simulate_stores {
    uint32_t n; /* 0: none */
    enum eviction_policy eviction;
    double dram_bytes, ssd_bytes; /* of each; 0: no such tier */
    double port_gb_s, ssd_gb_s;   /* of each; 0: no limit */
};

struct simulate_power { /* of a worker, in watts, at its highest clock; zeros: not known */
    double idle, prefill, decode;
};

static inline bool simulate_power_known(const struct simulate_power *p)
{
    return p->idle > 0 || p->prefill > 0 || p->decode > 0;
}

/* What a worker did, for tests that compare it with the engine. */
enum simulate_what {
    SIMULATE_LEG,      /* a request came */
    SIMULATE_ADMITTED, /* it has its pages, for the first time; n: tokens that the prefix cache had */
    SIMULATE_PREEMPTED,
    SIMULATE_OVER, /* its pages are given back */
};

struct simulate_note {
    enum simulate_what what;
    uint32_t worker;
    uint64_t request, at_ns;
    uint32_t n;
};

struct simulate_config {
    uint32_t n_prefill, n_decode;
    uint32_t n_routers; /* that have these workers together; each request comes to one of them by chance. 0: one */
    uint32_t chunk_tokens, max_batch, n_pages, max_context; /* of each worker */
    uint32_t n_decode_pages;                                /* of decode workers; 0: n_pages */
    uint32_t max_rows;                                      /* of a step; 0: a chunk and what decodes */
    uint32_t block_tokens;                                  /* the trace's: 512 for Mooncake's */
    uint32_t page_tokens;                                   /* divides block_tokens; 0: the same */
    struct cost_profile cost;                               /* true */
    const struct cost_profile *decode_cost; /* of decode workers, where they are other machines; or NULL */
    double profile_error;                   /* the scheduler starts with the true coefficients times this */
    double noise;                           /* of step times: sigma of a log-normal factor */
    double kv_bytes_per_token;              /* on the wire and in stores; 0: nothing to move */
    double port_gb_s;                       /* of each worker, each way; 0: no limit */
    double link_ms, rpc_ms;                 /* a hand-over beyond its bytes; a message between router and worker */
    struct simulate_stores stores;
    bool
        peers; /* prefixes are fetched from other prefill workers' pools, too (Mooncake's pool of the workers' memory) */
    double rate;                /* arrivals come so many times faster */
    double ttft_ms, tpot_ms;    /* limits asked for; 0: none */
    uint32_t max_queued;        /* requests that may wait; 0: any number */
    uint64_t max_queued_tokens; /* prompt tokens that may wait; 0: any number */
    double max_wait_ms;         /* after which a request is the first of its tenant; 0: 120 s */
    enum policy policy;
    enum scheduler_order order;
    enum plan_force force;
    enum prefix_rule prefix;
    uint32_t max_tokens; /* that requests ask for at most; 0: exactly as many as will come */
    double length_error; /* answers seem so many times longer to who learns their lengths; 0: as they are */
    double retry_share;  /* of the refused that come back once, when they were told to */
    double
        probe_share;   /* of the refused with a retry-after: each 5 ms it is tried whether they would be admitted now */
    double silence_ms; /* after which a dead worker is known to be dead */
    double gone_ms;    /* how long requests wait when no worker of a role that they need is left; then they fail */
    struct simulate_power power[2];  /* of prefill and of decode workers; those that do both are the latter */
    double power_budget_w;           /* of all workers, whose power is known then; 0: none */
    uint32_t n_power_first;          /* workers whose clocks go first: the last ones by number */
    bool power_brake_only;           /* clocks stay up until the budget is passed: what POLCA is compared with */
    const struct simulate_ask *asks; /* of each request; NULL: all of one tenant, and by themselves */
    const struct fair_weight *weights;
    uint32_t n_weights;
    const struct simulate_fault *faults;
    uint32_t n_faults;
    const struct simulate_router_fault *router_faults;
    uint32_t n_router_faults;
    uint64_t seed;
    uint64_t n_requests; /* of the trace; 0: all */
    bool keep_tokens;    /* when each token came */
    double load_tick_ms; /* of the load over time, at first: doubled until SIMULATE_TICKS hold the run; 0: no load */
    void (*observe)(void *user, const struct simulate_note *note); /* NULL: nobody; must not call back */
    void *observer;
};

struct simulated {                               /* a request, in the order of the trace */
    bool refused, came_back, admitted_then;      /* came_back: after it was refused; admitted_then: and was taken */
    bool failed;                                 /* no worker was left for it; n_output: the tokens shown before */
    const char *reason;                          /* why it was refused or failed; static text, NULL: it was neither */
    double arrived_ms, ttft_ms, tpot_ms, end_ms; /* arrived: first; ttft: from the arrival that was admitted */
    double asked_ms;                             /* when the one that was admitted came */
    double predicted_ttft_ms, predicted_tpot_ms;
    double first_gap_ms, predicted_first_gap_ms; /* of a split one; 0: it had none */
    double refused_after_ms, retry_after_ms,     /* NAN: it was not sent; 0: it was not told to come back */
        admissible_ms; /* admissible: after its first refusal, as one that comes anew; 0: not tried */
    double queue_ms, load_ms, prefill_ms, transfer_ms; /* transfer: what of it came after the prefill */
    uint32_t prefill, decode, router;
    uint32_t cached_tokens, peer_tokens, dram_tokens, ssd_tokens; /* from the worker itself, another one, stores */
    uint32_t n_output, n_preempted, n_replans;
    float *token_ms; /* [n_output] since arrival, with keep_tokens; of the result's own */
};

struct simulated_worker {
    enum worker_role role;
    double busy_ms, prefill_ms;        /* prefill: of it, in steps with prompts */
    double joules;                     /* NAN: its power is not known */
    uint32_t pages_free, pages_cached; /* at the end */
    float *load; /* [n_load] share busy in each tick of the result's load_tick_ms; NULL: not asked for */
    uint32_t n_load;
};

struct simulated_power {           /* zeros without a budget */
    double peak_share;             /* highest sample, as a share of the budget */
    uint64_t n_brakes;             /* times that the brake was asked for */
    double level_ms[POWER_LEVELS]; /* at each level of clocks */
};

struct simulate_result {
    struct simulated *requests;
    uint64_t n_requests, n_refused, n_failed, n_late_refused, n_steps;
    double duration_ms, load_tick_ms;
    struct simulated_worker *workers;
    uint32_t n_workers;
    struct simulated_power power;
    uint64_t store_hits_dram, store_hits_ssd, store_lost; /* blocks */
    double bytes_moved, bytes_loaded;                     /* between workers; from stores */
    float *tokens;                                        /* what token_ms points into */
};

void simulate_run(const struct trace *trace, const struct simulate_config *config, struct simulate_result *out);
void simulate_result_fini(struct simulate_result *r);
