/*
 * The request queue and what is known about the workers: admits, orders, dispatches, observes. The live
 * router and the simulator drive the same object. It has no clock, no network and no threads: callers pass
 * the time, and equal calls give equal decisions.
 *
 *     scheduler_submit --refused at once--> OVER
 *          \--admitted--> QUEUED --place()--> PREFILLING --scheduler_prefilled--> DECODING
 *                           ^----------- scheduler_requeue -----'-------------------'
 *     scheduler_end leads from any state to OVER, config.refuse from QUEUED.
 *
 * A pass (scheduler_run) walks through the queue in order and calls policy_place() for each request, on a
 * copy of the snapshot that already contains the requests before it (list scheduling). Requests that both
 * workers can take now are dispatched. Workers have at most two chunks of work ahead; the rest waits here,
 * where it can still be re-ordered. A pass looks at the first SCHEDULER_LOOK (128) requests. The requests
 * behind them count by their predicted work, at the pace at which the queue was emptied lately.
 *
 * Admission. A pass with the new request predicts its own times and what it does to requests that were
 * admitted before. If it would miss its limits, or make an admitted request miss its TTFT limit, it is
 * refused before any work, with a time to come back. For a new request, predicted waiting counts for more by
 * a margin that follows the errors of earlier predictions (sched/margin.h). Its own work
 * counts (1 - SCHEDULER_HOPE) times, so a request that need not wait is tried even if that work is predicted
 * a little above its limit.
 *
 * Bookings. A refused request is told when there will be room, and a place is booked for it on the worker
 * that has room first (sched/booking.h). If it comes back in time, it is held to its whole limit and goes
 * before all others. Bookings take room from others, so only few of the refused get one while hardly any
 * client comes back. An admitted request is served, if need be in a place that is booked for another. It is
 * dropped only if it would exceed its TTFT limit by more than a tenth of the time that it still needs:
 * serving such requests too makes more requests late than it helps, and a queue in which all are a little
 * late stays late.
 *
 * Several routers may use the same workers. Each adds what workers report about the others
 * (scheduler_observe_report) to its own books. Requests queued at other routers are on no worker yet. They
 * are assumed to be dispatched alongside this queue: each request of this queue brings (work queued elsewhere
 * / work queued here) requests like it, at most one for each other router, since every router dispatches when
 * a worker takes prompts. Where this mispredicts, margins grow.
 *
 * Probes. What was learned about a worker may be out of date, and a worker that is thought slow gets no
 * request that would show it. So if a request would be refused, and an idle worker is much slower than usual,
 * or slower than its profile and without a step for PROBE_AFTER_MS, the request is admitted as a probe, as if
 * that worker had its usual speed (or the profile's). A worker has at most one probe at a time, and none
 * within PROBE_EVERY_MS of the last. The steps of a probe are believed at once. A probe may miss its limits.
 *
 * Order. Tenants: fair queueing of what they are charged (prompt and answer tokens) over their weights
 * (sched/fair.h). Inside a tenant: the time at which a request is due, which is arrival + limit (a deadline
 * less the work), earlier by PRIORITY_MS for each priority class. With one TTFT limit for all this is first
 * come, first served. (Order by slack would put long prompts before short ones and costs a tenth of the
 * goodput at twice the load.) A request without any limit gets one that grows with its work, up to
 * MAX_PATIENCE_MS: shortest first, but overtaken only by requests of its tenant that arrive within that time.
 * A step of a workflow is due at the workflow's deadline plus WORKFLOW_WORK times the work that is left of
 * the workflow: where not all deadlines can be kept, earliest deadline first serves workflows that miss
 * theirs anyway, and shorter ones first keeps more. A step whose workflow can't keep its deadline goes last.
 * A request that waited longer than max_wait_ns goes first in its tenant.
 *
 * Competing tenants. A request within its tenant's share goes before requests of tenants that were admitted
 * beyond their shares, and is not refused because they would then be late. To make this rare, a request is
 * admitted only if it would also be on time if all tenants that want something now took their shares
 * (take_turn_beside_others). Places are booked only for tenants that had less than the others. A full queue
 * drops the last requests of the tenant that has the most for its weight.
 *
 * Threads: one owner. Ownership: requests are the caller's. The scheduler links them from submit until the
 * refusal (return value or config.refuse) or scheduler_end.
 */
#pragma once

#include "base/clock.h"
#include "base/list.h"
#include "sched/fair.h"
#include "sched/lengths.h"
#include "sched/policy.h"

enum { SCHEDULER_MAX_WORKERS = 512, SCHEDULER_AVOID = 4 };
/* policy_request.hope: share of its own work by which a request may be predicted above its TTFT limit. */
#define SCHEDULER_HOPE 0.02

enum scheduler_order { ORDER_TANDEM, ORDER_FCFS, ORDER_EDF, ORDER_SHORTEST, ORDERS };
#define ORDER_NAMES "tandem|fcfs|edf|shortest"

enum sched_state { SCHED_NEW, SCHED_QUEUED, SCHED_PREFILLING, SCHED_DECODING, SCHED_OVER };

struct sched_request {
    /* Set by the caller before scheduler_submit(). */
    void *user;
    uint64_t number; /* counter of requests, rising */
    uint64_t tenant; /* hash of the tenant's name */
    /* Hash of prompt and tenant: recognises a refused request that comes back; 0: it can't. */
    uint64_t identity;
    int32_t priority; /* a higher priority goes first */
    /* Prompt tokens; most tokens that may still be generated; tokens of a block. */
    uint32_t n_tokens, max_tokens, block_tokens;
    double ttft_ms, tpot_ms;          /* limits; 0: none */
    uint64_t arrived_ns, deadline_ns; /* deadline_ns: UINT64_MAX: none */
    uint64_t workflow_deadline_ns;    /* UINT64_MAX: it belongs to no workflow */
    uint32_t workflow_steps_left;     /* steps of the workflow after this one */
    bool resumed;                     /* re-planned: it goes first in its tenant, and no limit refuses it */
    bool shares;                      /* as in struct policy_request */
    /* The latest workers that failed it: avoided for AVOID_MS after a requeue. Set by scheduler_avoid(). */
    uint32_t avoid[SCHEDULER_AVOID], n_avoid;
    /* Owned by the caller, who brings them up to date in config.match. As in struct policy_request. */
    uint32_t *matched_blocks;
    uint32_t store_blocks, store_blocks_ssd, peer_blocks;

    /* Set by the scheduler; the caller only reads them. */
    enum sched_state state;
    bool is_probe;                             /* admitted to find out whether a worker is still slow */
    struct plan plan;                          /* as dispatched; of a refused request: the refusal */
    double promised_ttft_ms, promised_tpot_ms; /* predicted when it was admitted */
    /* When it was dispatched, last matched (config.match), had its first and its second token; 0: not yet. */
    uint64_t placed_ns, matched_ns, first_ns, second_ns;
    uint64_t requeued_ns; /* latest scheduler_requeue() */
    double due_ms;        /* order inside its tenant: the smallest goes first (order_key()) */
    /* The worker that had booked a place for it: it goes before all others; POLICY_NO_KEEPER. */
    uint32_t keeper;
    /* Predicted answer; tokens charged to its tenant; predicted time of its prefill leg, load included. */
    double expected_tokens, charged, work_ms;
    /* work_ms when it was queued; part of the queue's sum. */
    double queued_ms;
    /* Tokens since it was placed; pages of prompt and expected answer. */
    uint32_t n_generated, n_pages;
    uint64_t look;                       /* number of the latest struct look that saw it */
    bool on_prefill, on_decode;          /* linked in its prefill, its decode worker's list */
    bool is_moving;                      /* its prompt is computed and its pages still flow */
    TAILQ_ENTRY(sched_request) in_queue; /* all queued requests, in the order of queueing */
    /* Prompts of its prefill worker, in the order of dispatch. */
    struct sched_request *prefill_next;
    LIST_ENTRY(sched_request) in_decode; /* requests of its decode worker */
    /* When its prefill began: it was dispatched, or became first of its prefill worker, if later. */
    uint64_t began_ns;
};

struct scheduler_config {
    enum policy policy;
    enum scheduler_order order;
    enum plan_force force;
    enum prefix_rule prefix;
    struct cost_profile profile;       /* a worker's coefficients while no worker of its role was measured */
    uint64_t max_wait_ns;              /* a request that waited longer goes first in its tenant */
    const struct fair_weight *weights; /* of tenants whose weight is not 1; copied */
    uint32_t n_weights;
    uint64_t max_queued_tokens; /* bounds of the queue: prompt tokens... */
    uint32_t max_queued;        /* ...and requests */
    bool explain;               /* keep the log of each decision for scheduler_candidates() */
    /* Every decision makes its own pass, however long the queue: the reference for tests. */
    bool whole_passes;
    /* Breaks ties; must differ between routers, or all of them choose the same worker. */
    uint64_t seed;
    void *user; /* first argument of the callbacks */
    /*
     * Sends q to its workers by q->plan. May call scheduler_prefilled(), scheduler_decoded() and
     * scheduler_end() for q, and scheduler_worker_usable(). It must not add or remove other requests. It may
     * free q after scheduler_end().
     */
    void (*place)(void *user, struct sched_request *q);
    /*
     * q was queued and is dropped; q->plan has the reason. retry_after_ms 0: no use in coming back. May free
     * q.
     */
    void (*refuse)(void *user, struct sched_request *q, double retry_after_ms);
    /* Brings q's counts of matched blocks up to date. NULL: they always are. */
    void (*match)(void *user, struct sched_request *q);
};

/*
 * A worker's report of its load, for several routers that use it. A router knows what it sent itself; from
 * the report it takes the load of the other routers, and how far the worker came with the router's own
 * prompts.
 */
struct sched_report {
    /*
     * Prompts of this router that the worker has and has not finished: a prefix of those sent; their
     * uncomputed tokens.
     */
    uint32_t own_prompts;
    double own_tokens;
    uint32_t n_prompts; /* prompts of other routers that are not computed */
    /* Of n_prompts: uncomputed tokens; sum of n (n + 2 cached), as in struct cost_step. */
    double tokens, square;
    uint32_t running;          /* sequences of other routers that decode, or will when their KV has arrived */
    double context, generated; /* of running: tokens of prompts and answers; tokens of answers */
    double tpot_limit_ms;      /* tightest TPOT limit of running; 0: none */
    uint32_t n_routers;        /* other routers that have work here or in their queues */
    /* Work in the queues of all other routers, for any worker, as they predict it. */
    double queued_ms;
};

struct sched_worker_info {
    enum worker_role role;
    uint32_t chunk_tokens, max_batch, n_pages, max_context; /* as in struct policy_worker */
    /* A new value: another process took this worker's number. */
    uint64_t incarnation;
};

struct scheduler;

struct scheduler *scheduler_open(const struct scheduler_config *config);
void scheduler_close(struct scheduler *s); /* NULL is fine */

/*
 * w < SCHEDULER_MAX_WORKERS is the caller's number. What was learned about a worker is kept while its
 * incarnation stays the same. Of a former incarnation only the speed is kept, as a first guess, if no other
 * worker of the role was measured.
 */
void scheduler_worker_up(struct scheduler *s, uint32_t w, const struct sched_worker_info *info);
/* usable false: new requests avoid the worker; what it has stays there. */
void scheduler_worker_usable(struct scheduler *s, uint32_t w, bool usable);
/*
 * Whether w can connect to worker `from`; if not, no plan hands pages from there to w. True again after
 * either went down.
 */
void scheduler_worker_reads(struct scheduler *s, uint32_t w, uint32_t from, bool can);
bool scheduler_can_read(const struct scheduler *s, uint32_t w, uint32_t from);
/*
 * Whether requests wait because only split plans are allowed and no decode worker can read a prefill worker's
 * pages.
 */
bool scheduler_is_cut(const struct scheduler *s);
/* The caller has requeued or ended all its requests before. */
void scheduler_worker_down(struct scheduler *s, uint32_t w);
/* One measured step of worker w: teaches its cost model. */
void scheduler_observe_step(struct scheduler *s, uint32_t w, const struct cost_step *step);
/* As fair_set_weight(). */
bool scheduler_tenant_weight(struct scheduler *s, uint64_t tenant, double weight);
void scheduler_observe_report(struct scheduler *s, uint32_t w, const struct sched_report *report, uint64_t now_ns);
/* Measured times of loading from stores, of fetching from other workers; as in struct policy_worker. */
void scheduler_observe_loading(struct scheduler *s, uint32_t w, double load_ms, double dram_ms, double ssd_ms);
/* The same times before anything was measured: load_ms, dram_ms, ssd_ms; fetch_ms, block_ms. */
#define SCHEDULER_LOADING_PRIOR  2, 0.2, 0.5
#define SCHEDULER_FETCHING_PRIOR 10, 0.2 /* fetch_ms is long: the other worker answers between two steps */
void scheduler_observe_fetching(struct scheduler *s, uint32_t w, double fetch_ms, double block_ms);

/*
 * True: q is admitted and queued; a later scheduler_run() places it. False: q->plan has the reason,
 * *retry_after_ms_out the time after which to come back (0: never); q is not linked any more. O(workers) for
 * each of the first SCHEDULER_LOOK queued requests, O(1) for each further one.
 */
bool scheduler_submit(struct scheduler *s, struct sched_request *q, uint64_t now_ns, double *retry_after_ms_out);
/* Whether scheduler_submit() would admit q without a booking. q is not queued; the snapshot is refreshed. */
bool scheduler_would_admit(struct scheduler *s, struct sched_request *q, uint64_t now_ns);
/*
 * One pass, if a decision may have changed: calls config.place and config.refuse. Cheap otherwise; call it
 * often.
 */
void scheduler_run(struct scheduler *s, uint64_t now_ns);

/*
 * Worker w failed q: q avoids it for AVOID_MS after the scheduler_requeue() that follows. The latest
 * SCHEDULER_AVOID workers are remembered.
 */
void scheduler_avoid(struct sched_request *q, uint32_t w);
/* q's prompt is computed and its first token came. A second call does nothing. */
void scheduler_prefilled(struct scheduler *s, struct sched_request *q, uint64_t now_ns);
/* Split plans: all pages of q have arrived on its decode worker, exposed_ms after the end of the prefill. */
void scheduler_moved(struct scheduler *s, struct sched_request *q, double exposed_ms);
/* q's second token came, by any kind of plan. */
void scheduler_second_token(struct scheduler *s, struct sched_request *q, uint64_t at_ns);
/* q has n_tokens tokens since it was placed. */
void scheduler_generated(struct sched_request *q, uint32_t n_tokens);
/* q's decode leg is over; its prefill leg may still run. */
void scheduler_decoded(struct scheduler *s, struct sched_request *q);
/*
 * q leaves the scheduler, in any state. answered: its answer is complete, so its length and its TPOT are
 * learned.
 */
void scheduler_end(struct scheduler *s, struct sched_request *q, uint64_t now_ns, bool answered);
/*
 * Queues a dispatched request again after it lost a worker. The caller has set n_tokens, max_tokens and
 * resumed anew.
 */
void scheduler_requeue(struct scheduler *s, struct sched_request *q, uint64_t now_ns);

/* Brings the snapshot up to date. The functions below show its state at the latest refresh or pass. */
void scheduler_refresh(struct scheduler *s, uint64_t now_ns);
struct sched_worker_stats {
    double busy_ms, pages;       /* policy_worker.busy_ms; pages of its sequences, expected growth included */
    uint32_t n_prompts, running; /* this router's prompts and sequences there */
    struct cost_model cost;
    struct cost_term leg_error;                 /* prefill legs: load and compute, from their begin on */
    struct cost_term transfer_error, gap_error; /* handovers to this worker: exposed transfer, first gap */
    uint64_t n_probes;                          /* requests that were sent here as probes */
};
struct sched_worker_stats scheduler_worker_stats(const struct scheduler *s, uint32_t w);
struct scheduler_margins {
    double ttft, tpot; /* policy_request.caution of new requests, policy_request.tpot_margin */
};
struct scheduler_margins scheduler_margins(const struct scheduler *s);
uint32_t scheduler_queued(const struct scheduler *s);
uint64_t scheduler_queued_tokens(const struct scheduler *s);
/* Predicted work of all queued requests; other routers are told this number. */
double scheduler_queued_ms(const struct scheduler *s);
/*
 * The log of the last decision: valid inside config.place and config.refuse, and after a submit that was
 * refused. Borrowed.
 */
const struct policy_candidate *scheduler_candidates(const struct scheduler *s, uint32_t *n_out);
