/*
 * The one queue, and what is known of the workers: admits, orders, dispatches, observes. The live router and the simulator drive the
 * same object; it knows no clock, no wire and no thread, and the same calls give the same decisions.
 *
 *     scheduler_submit --refused at once--> (over)
 *          \--admitted--> QUEUED --place()--> PREFILLING --scheduler_prefilled--> DECODING --scheduler_end--> (over)
 *                           ^---------------------- scheduler_requeue (re-planned) --------------'
 *
 * A pass (scheduler_run) goes through the queue in order and asks policy_place() for each request, on a copy of the snapshot in which
 * those before it have their places already: list scheduling. What both workers take now is dispatched; workers keep at most two
 * chunks of work ahead, the rest waits here, where it can still be re-ordered. The same pass answers, for a new request, what it
 * will get and what it does to those admitted before: one that would miss its limits, or make another miss, is refused
 * before any work, with the time after which it would have been admitted. For new requests waiting counts for more than is
 * predicted by as much as waiting was lately mispredicted (sched/margin.h): what is left covers noise. One that has to wait for
 * nobody is tried even where its own work is predicted to take a little longer than its limit (SCHEDULER_HOPE). A pass looks at the first 128
 * requests (SCHEDULER_LOOK in scheduler.c); what is behind them counts by its work, at the pace at which the queue was emptied lately.
 *
 * One that was refused is told when there will be room. A place is booked for it on the worker that has room first (sched/booking.h): if
 * it comes when it was told to, it is held to its whole limit and goes before all others. Bookings take room from others, so where
 * hardly anybody comes back only few of the refused get one. One that was admitted is served, if need be in a place that is kept for
 * another, unless it would be later than its limit by more than a tenth of the time that it would still take: serving those too makes
 * more late than it helps, and a queue in which everybody is a little late stays so.
 *
 * Several routers may use the same workers. Each adds to its own books what workers report of the others' (scheduler_observe_report).
 * What other routers have queued is not on any worker yet; it is taken to get its turns beside this router's own queue: as much for each
 * request of this queue as the other queues are longer than this one, at most one for each other router (every router sends when a
 * worker takes prompts, so all of them get a turn then). Where that mispredicts, margins grow.
 *
 * What was learned may be wrong by now, and nobody would find out: a worker that is thought slow gets no request that shows whether it
 * is. So where a request would be refused, and an idle worker is much slower than it usually is, or slower than its profile and was not
 * measured for PROBE_AFTER_MS, the request is admitted as a probe: on that worker, as if it had its usual (the profile's) speed. One at
 * a time for a worker, and not within PROBE_EVERY_MS of the last; its steps are believed at once. A probe may miss its limits.
 *
 * Order: tenants by fair queueing of what they are charged (prompt and answer tokens) over their weights (sched/fair.h); inside a
 * tenant by the moment at which each is due: arrival + limit (of a deadline, less the work), earlier by PRIORITY_MS for each
 * class. (Under one TTFT limit for all that is first come, first served; going by slack instead would put long prompts before short
 * ones, and costs a tenth of the goodput at twice the load.) A request with no limit gets one that grows with its work (shortest
 * first) up to MAX_PATIENCE_MS (ageing): so it is overtaken only by those of its tenant that arrive within that time. A step of a
 * workflow is due at the workflow's deadline, later by some times the work that is left of it (where not all deadlines can be kept, earliest deadline first works for those that will
 * miss theirs; shorter ones first keeps most); one that can't make it any more goes last. Who waited longer than max_wait_ns is the
 * first of its tenant.
 *
 * Tenants that compete: a request that is within its tenant's share goes before requests of others that were admitted by more than
 * theirs, and is not refused because those would be late then. So that this is rare, a request is admitted only if it would be on
 * time even if all tenants that want something now took their shares (take_turn_beside_others). Places are booked only for tenants
 * that have had less than the others. A full queue gives up the last requests of whoever has most of it for its weight.
 *
 * Threads: one owner. Ownership: requests are the caller's, linked here from submit to the refusal or scheduler_end.
 */
#pragma once

#include "base/clock.h"
#include "sched/fair.h"
#include "sched/lengths.h"
#include "sched/policy.h"

enum { SCHEDULER_MAX_WORKERS = 512, SCHEDULER_AVOID = 4 };
#define SCHEDULER_HOPE 0.02

enum order { ORDER_TANDEM, ORDER_FCFS, ORDER_EDF, ORDER_SHORTEST, ORDERS };
#define ORDER_NAMES "tandem|fcfs|edf|shortest"

enum sched_state { SCHED_NEW, SCHED_QUEUED, SCHED_PREFILLING, SCHED_DECODING, SCHED_OVER };

struct sched_request {
    /* set by the caller before submit */
    void *user;
    uint64_t number;   /* rises */
    uint64_t tenant;   /* hash of its name */
    uint64_t identity; /* of prompt and tenant: by it a request that comes back is known; 0: not */
    int32_t priority;  /* higher first */
    uint32_t n_tokens, max_tokens, block_tokens; /* prompt; most that may still be generated */
    double ttft_ms, tpot_ms;                     /* 0: no limit */
    uint64_t arrived_ns, deadline_ns;            /* UINT64_MAX: none */
    uint64_t workflow_deadline_ns;               /* UINT64_MAX: no workflow */
    uint32_t workflow_steps_left;                /* after this one */
    bool resumed; /* its client has tokens already: it goes first, and no limit refuses it */
    bool shares;  /* another choice of a prompt that is there (sched/policy.h) */
    uint32_t avoid[SCHEDULER_AVOID], n_avoid; /* workers that failed it: others first, for a while; scheduler_avoid() */
    /* kept by the caller when config.match is called */
    uint32_t *matched_blocks; /* of each worker; NULL: nowhere */
    uint32_t store_blocks, store_blocks_ssd, peer_blocks;

    /* the scheduler's */
    enum sched_state state;
    bool is_probe;                                       /* it finds out whether a worker is still as slow as it was */
    struct plan plan;                                    /* as dispatched; of a refused one, why */
    double promised_ttft_ms, promised_tpot_ms;           /* as admitted */
    uint64_t placed_ns, matched_ns, first_ns, second_ns; /* first: when its first token came */
    uint64_t requeued_ns;                                /* the latest time */
    double due_ms;                                       /* the order inside its tenant */
    uint32_t keeper; /* the worker that kept a place for it while it was away: it goes first; POLICY_NO_KEEPER */
    double expected_tokens, charged, work_ms;
    double queued_ms; /* of its work, as predicted when it was queued */
    uint32_t n_generated, n_pages;
    uint64_t look; /* the latest long look at the queue that saw it */
    bool on_prefill, on_decode;
    bool is_moving;                                    /* its prompt is computed, and its pages still flow */
    struct sched_request *prev, *next;                 /* all queued, by arrival */
    struct sched_request *prefill_next;                /* dispatched to its prefill worker, in order */
    struct sched_request *running_prev, *running_next; /* of its decode worker */
    uint64_t began_ns;                                 /* the head of a prefill worker's */
};

struct scheduler_config {
    enum policy policy;
    enum order order;
    enum plan_force force;
    enum prefix_rule prefix;
    struct cost_profile profile; /* coefficients of a worker when nobody of its role was measured */
    uint64_t max_wait_ns;
    const struct fair_weight *weights; /* of those that don't have 1 */
    uint32_t n_weights;
    uint64_t max_queued_tokens;
    uint32_t max_queued;
    bool explain;      /* keeps what each decision weighed, for scheduler_candidates() */
    bool whole_passes; /* each decision makes a pass of its own, however long the queue is: what tests compare with */
    uint64_t seed;     /* ties are broken by it: several routers with one seed would all choose the same worker */
    void *user;
    /* Dispatches q as q->plan says. May call scheduler_prefilled and scheduler_end for q, and nothing else. */
    void (*place)(void *user, struct sched_request *q);
    /* q->plan says why; q was queued, and is out. Coming back makes no sense: 0. */
    void (*refuse)(void *user, struct sched_request *q, double retry_after_ms);
    /* Brings q's matches up to date; NULL: they are. */
    void (*match)(void *user, struct sched_request *q);
};

/*
 * What a worker says of its load when several routers use it. Whatever a router has sent is in its own books; only the others' part is
 * taken from here, and how far the worker came with the router's own prompts.
 */
struct sched_report {
    uint32_t
        own_prompts;   /* prompts of this router that the worker knows and has not computed: the first that were sent */
    double own_tokens; /* tokens of own_prompts that are still to be computed */
    uint32_t n_prompts;        /* prompts of other routers that are not computed */
    double tokens, square;     /* tokens of n_prompts still to be computed; sum over n_prompts of n (n + 2 cached) */
    uint32_t running;          /* sequences of other routers that decode, or will when their KV is there */
    double context, generated; /* tokens of running in all; tokens of their answers */
    double tpot_limit_ms;      /* tightest TPOT limit of running; 0: none */
    uint32_t n_routers;        /* other routers that have anything here, or anything queued */
    double queued_ms;          /* work that all other routers have queued, for whichever worker, as they predict it */
};

struct sched_worker_info {
    enum worker_role role;
    uint32_t chunk_tokens, max_batch, n_pages, max_context;
    uint64_t incarnation; /* another one than before: what was learned at this number was another process's */
};

struct scheduler;

struct scheduler *scheduler_open(const struct scheduler_config *config);
void scheduler_close(struct scheduler *s); /* NULL is fine */

/* w < SCHEDULER_MAX_WORKERS, the caller's number. A worker that was up before keeps what was learned of it; another incarnation does not. */
void scheduler_worker_up(struct scheduler *s, uint32_t w, const struct sched_worker_info *info);
void scheduler_worker_usable(struct scheduler *s, uint32_t w,
                             bool usable); /* false: what it has stays, nothing new comes */
/* Whether w can connect to worker `from`: else no plan hands pages from there to w. True until it is said, and after either went down. */
void scheduler_worker_reads(struct scheduler *s, uint32_t w, uint32_t from, bool can);
bool scheduler_can_read(const struct scheduler *s, uint32_t w, uint32_t from);
/* All plans are split, workers of both roles are there, and no pair of them can connect: requests wait. */
bool scheduler_is_cut(const struct scheduler *s);
void scheduler_worker_down(struct scheduler *s, uint32_t w); /* its requests were requeued or ended */
void scheduler_observe_step(struct scheduler *s, uint32_t w, const struct cost_step *step);
void scheduler_observe_report(struct scheduler *s, uint32_t w, const struct sched_report *report, uint64_t now_ns);
void scheduler_observe_loading(struct scheduler *s, uint32_t w, double load_ms, double dram_ms, double ssd_ms);
/* What loading is thought to take before anything was loaded: LOADING of load, dram, ssd; FETCHING of fetch, block. Milliseconds. */
#define SCHEDULER_LOADING_PRIOR  2, 0.2, 0.5
#define SCHEDULER_FETCHING_PRIOR 10, 0.2 /* the other worker answers between two steps */
void scheduler_observe_fetching(struct scheduler *s, uint32_t w, double fetch_ms, double block_ms);

/*
 * True: admitted, and queued; a pass will place it. False: q->plan says why not, *retry_after_ms_out when to come back.
 * O(queued * workers) for the first SCHEDULER_LOOK queued, and O(queued) for the rest.
 */
bool scheduler_submit(struct scheduler *s, struct sched_request *q, uint64_t now_ns, double *retry_after_ms_out);
/* Whether scheduler_submit() would admit it, as one that comes for the first time. It is not queued; the snapshot is brought up to date. */
bool scheduler_would_admit(struct scheduler *s, struct sched_request *q, uint64_t now_ns);
void scheduler_run(struct scheduler *s, uint64_t now_ns);

/* Before a scheduler_requeue(): for AVOID_MS after it. The latest SCHEDULER_AVOID are remembered. */
void scheduler_avoid(struct sched_request *q, uint32_t w);
void scheduler_prefilled(struct scheduler *s, struct sched_request *q, uint64_t now_ns); /* its prefill leg is over */
/* Of a split one: its pages are where it decodes; exposed_ms of that came after the prefill. */
void scheduler_moved(struct scheduler *s, struct sched_request *q, double exposed_ms);
void scheduler_second_token(struct scheduler *s, struct sched_request *q, uint64_t at_ns); /* of any plan */
void scheduler_generated(struct sched_request *q, uint32_t n_tokens); /* so many since it was placed */
void scheduler_decoded(struct scheduler *s, struct sched_request *q); /* its decode leg is over; the other may not be */
void scheduler_end(struct scheduler *s, struct sched_request *q, uint64_t now_ns, bool answered);
/* Placed, and to be placed again: n_tokens, max_tokens and resumed are set anew by the caller. */
void scheduler_requeue(struct scheduler *s, struct sched_request *q, uint64_t now_ns);

/* Seen from outside, as of the last pass or scheduler_refresh(). */
void scheduler_refresh(struct scheduler *s, uint64_t now_ns);
struct sched_worker_stats {
    double busy_ms, pages;
    uint32_t n_prompts, running;
    struct cost_model cost;
    struct cost_term leg_error;                 /* of a prefill leg: load and prefill, from its turn on */
    struct cost_term transfer_error, gap_error; /* of what comes to it: exposed transfer, first gap */
    uint64_t n_probes;                          /* requests that it got as probes */
};
struct sched_worker_stats scheduler_worker_stats(const struct scheduler *s, uint32_t w);
struct scheduler_margins {
    double ttft, tpot; /* shares: of waiting, and of a step */
};
struct scheduler_margins scheduler_margins(const struct scheduler *s);
uint32_t scheduler_queued(const struct scheduler *s);
uint64_t scheduler_queued_tokens(const struct scheduler *s);
double scheduler_queued_ms(const struct scheduler *s); /* work of what is queued: what other routers are told */
/* What the last decision weighed: inside place() and refuse(), and after a submit that was refused. Borrowed. */
const struct policy_candidate *scheduler_candidates(const struct scheduler *s, uint32_t *n_out);
