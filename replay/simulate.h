/*
 * A cluster in virtual time: runs a trace against N prefill workers, M decode workers and S stores. It uses
 * the scheduler of the live router, the engine's batching and admission, and the stores' eviction. A cost
 * model takes the place of the kernels, and a network model lets flows share the ports that they use.
 *
 * Each worker is a state machine that runs steps: prompts in chunks (sched/batching.h), and one token for
 * each running sequence. Runs of equal decode steps are taken at once. A pool holds pages; pages without a
 * holder stay as cache until they are needed (least recently used first, a chain from its tail). A sequence
 * takes the pages of its prompt when it is admitted, in order of arrival, and one more page as it grows. When
 * there is no page, the newest sequence gives all of its pages back and waits again.
 *
 * A split request has two legs, dispatched together. The decode worker takes pages and pulls what the prefill
 * worker announces, layer by layer. The first token is shown when the prefill has ended and the decode worker
 * has accepted; the sequence joins the batch when the last byte has arrived. With no prefill workers each
 * decode worker does both phases.
 *
 * Each worker draws the power of what it does (idle, prompts, decoding) at its clock. With a power budget,
 * the power of all workers is read every two seconds, and clocks follow it as those of POLCA do
 * (sched/power.h). The scheduler learns from the steps what is slower then.
 *
 * Not simulated: processor time of the processes themselves (rpc_ms stands for a message), answers as
 * prefixes of later prompts (a trace names only what prompts share), disks that become slow by themselves.
 *
 * As in a live cluster, the scheduler starts from coefficients that may be wrong (profile_error) and learns
 * from steps that are noisy (noise). The same configuration and trace give the same result. A step of a
 * workflow arrives when the step before it has ended; if a step is refused, the steps after it are refused,
 * too.
 *
 * Threads: one owner for each run; several runs may go on at once. The trace is borrowed.
 */
#pragma once

#include "replay/trace.h"
#include "sched/eviction.h"
#include "sched/power.h"
#include "sched/scheduler.h"

enum { SIMULATE_MAX_ROUTERS = 16 };
/* Least time between two reports of a worker, and between two reports of what a router has queued. */
#define SIMULATE_REPORT_MS 10.0

enum { SIMULATE_TICKS = 240 }; /* even: when the run gets longer, two ticks become one */

/* What a request is beside its line of the trace. */
struct simulate_ask {
    uint64_t tenant;
    int64_t follows;     /* index of an earlier request that must end before this one is sent; -1: none */
    uint32_t steps_left; /* steps of its workflow after this one */
    double workflow_ms;  /* deadline, counted from the arrival of the workflow's first step; 0: none */
};

/* A worker dies at at_ms and comes back empty at back_ms; INFINITY: never. */
struct simulate_fault {
    uint32_t worker;
    double at_ms, back_ms;
};

/* A router dies with its requests. Later requests go to the other routers. */
struct simulate_router_fault {
    uint32_t router;
    double at_ms;
};

struct simulate_stores {
    uint32_t n; /* 0: none */
    enum eviction_policy eviction;
    double dram_bytes, ssd_bytes; /* of each store; 0: no such tier */
    double port_gb_s, ssd_gb_s;   /* of each store, GB/s; 0: no limit */
};

/* Power of a worker at its highest clock, in watts; all 0: not known. */
struct simulate_power {
    double idle, prefill, decode;
};

static inline bool simulate_power_known(const struct simulate_power *p)
{
    return p->idle > 0 || p->prefill > 0 || p->decode > 0;
}

/* What a worker did, for tests that compare it with the engine. */
enum simulate_what {
    SIMULATE_LEG,      /* a leg of the request arrived */
    SIMULATE_ADMITTED, /* it has its pages for the first time; n: tokens found in the prefix cache */
    SIMULATE_PREEMPTED,
    SIMULATE_OVER, /* its pages are free again */
};

struct simulate_note {
    enum simulate_what what;
    uint32_t worker;
    uint64_t request, at_ns;
    uint32_t n;
};

struct simulate_config {
    uint32_t n_prefill, n_decode;
    uint32_t n_routers; /* routers that share the workers; each request goes to a random one. 0: one router */
    uint32_t chunk_tokens, max_batch, n_pages, max_context; /* of each worker */
    uint32_t n_decode_pages;                                /* pages of each decode worker; 0: n_pages */
    uint32_t max_rows;        /* most rows of a step; 0: one chunk and one row for each decoding sequence */
    uint32_t block_tokens;    /* of the trace; Mooncake's have 512 */
    uint32_t page_tokens;     /* divides block_tokens; 0: the same number */
    struct cost_profile cost; /* the true coefficients */
    const struct cost_profile *decode_cost; /* of decode workers if their machines differ, else NULL */
    double profile_error;                   /* the scheduler starts from the true coefficients times this */
    double noise;                           /* of step times: sigma of a log-normal factor */
    double kv_bytes_per_token;              /* on the wire and in stores; 0: nothing to move */
    double port_gb_s;                       /* of each worker, in each direction, GB/s; 0: no limit */
    double link_ms;                         /* what a handover takes beyond the time of its bytes */
    double rpc_ms;                          /* a message between router and worker */
    struct simulate_stores stores;
    /* Prefixes are also fetched from pools of other prefill workers, as in Mooncake. */
    bool peers;
    double rate;                /* factor by which arrivals are faster than in the trace */
    double ttft_ms, tpot_ms;    /* limits of each request; 0: none */
    uint32_t max_queued;        /* requests that may wait; 0: any number */
    uint64_t max_queued_tokens; /* prompt tokens that may wait; 0: any number */
    double max_wait_ms;         /* a request that waited for this long is the first of its tenant; 0: 120 s */
    enum policy policy;
    enum scheduler_order order;
    enum plan_force force;
    enum prefix_rule prefix;
    uint32_t max_tokens; /* max_tokens of each request; 0: the length of its answer in the trace */
    double length_error; /* factor by which answers look longer to the learner of lengths; 0: as they are */
    double retry_share;  /* share of the refused requests that come back once, at their retry-after */
    /* Share of the requests refused with a retry-after for which admission is tried again each 5 ms. */
    double probe_share;
    double silence_ms; /* a dead worker is noticed after this time */
    /* Requests fail after this time without a worker of a role that they need. */
    double gone_ms;
    /* Of prefill and of decode workers; workers with both phases count as decode. */
    struct simulate_power power[2];
    double power_budget_w; /* of all workers together, whose power must be known; 0: none */
    /* Workers whose clocks are lowered first: those with the highest numbers. */
    uint32_t n_power_first;
    bool power_brake_only;           /* clocks stay up until the budget is exceeded: the baseline for POLCA */
    const struct simulate_ask *asks; /* one for each request; NULL: one tenant and no workflows */
    const struct fair_weight *weights;
    uint32_t n_weights;
    const struct simulate_fault *faults;
    uint32_t n_faults;
    const struct simulate_router_fault *router_faults;
    uint32_t n_router_faults;
    uint64_t seed;
    uint64_t n_requests; /* requests of the trace that are run; 0: all */
    bool keep_tokens;    /* keep the time of each token */
    /* First tick of the load over time. It is doubled until SIMULATE_TICKS ticks hold the run. 0: no load. */
    double load_tick_ms;
    void (*observe)(void *user, const struct simulate_note *note); /* NULL: none; must not call back */
    void *observer;
};

/* One request, in the order of the trace. Times in ms. */
struct simulated {
    bool refused, came_back, admitted_then; /* came_back: after a refusal; admitted_then: and was admitted */
    bool failed;                            /* no worker was left; n_output: tokens shown before */
    const char *reason;                     /* why it was refused or failed, static text; NULL: neither */
    double arrived_ms;                      /* first arrival */
    double asked_ms;                        /* the arrival that was admitted */
    double ttft_ms, tpot_ms;                /* ttft: since asked_ms */
    double end_ms;
    double predicted_ttft_ms, predicted_tpot_ms;
    double first_gap_ms, predicted_first_gap_ms; /* of a split plan; 0: none */
    double refused_after_ms;                     /* NAN: it was never sent */
    double retry_after_ms;                       /* 0: it was not told to come back */
    double admissible_ms; /* from its first refusal until a new request like it is admitted; 0: not tried */
    double queue_ms, load_ms, prefill_ms;
    double transfer_ms; /* exposed transfer */
    uint32_t prefill, decode, router;
    /* Prompt tokens by where their KV came from: the worker's own pool, another worker, DRAM and SSD of
     * stores. */
    uint32_t cached_tokens, peer_tokens, dram_tokens, ssd_tokens;
    uint32_t n_output, n_preempted, n_replans;
    float *token_ms; /* [n_output] since arrival, with keep_tokens; points into simulate_result.tokens */
};

struct simulated_worker {
    enum worker_role role;
    double busy_ms;                    /* in steps */
    double prefill_ms;                 /* in steps with prompts, part of busy_ms */
    double joules;                     /* NAN: its power is not known */
    uint32_t pages_free, pages_cached; /* at the end */
    float *load; /* [n_load] share of each tick (load_tick_ms) in which it was busy; NULL: not asked for */
    uint32_t n_load;
};

/* All 0 without a power budget. */
struct simulated_power {
    double peak_share;             /* highest sample, as a share of the budget */
    uint64_t n_brakes;             /* how often the brake was asked for */
    double level_ms[POWER_LEVELS]; /* time at each level of clocks */
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
    float *tokens;                                        /* the array into which token_ms points */
};

/* Free the result with simulate_result_fini(). */
void simulate_run(const struct trace *trace, const struct simulate_config *config, struct simulate_result *out);
void simulate_result_fini(struct simulate_result *r);
