/*
 * State shared by the two files of the scheduler.
 *
 *     scheduler.c        requests: admission, the queue, passes, progress on workers
 *     scheduler_view.c   workers: their reports, and the snapshot for decisions
 */
#pragma once

#include "sched/booking.h"
#include "sched/drain.h"
#include "sched/margin.h"
#include "sched/scheduler.h"

#define SCHEDULER_REFRESH_MS  50.0 /* age at which a worker's load at the horizons is computed anew */
#define SCHEDULER_RETURN_RATE 0.02 /* weight of one booking in return_share */

struct sched_worker {
    bool up;
    struct sched_worker_info info;
    struct cost_model cost, reference; /* reference: the speed that a probe assumes; set by may_probe() */
    uint64_t measured_ns, probed_ns;   /* latest step, known at a refresh; latest probe */
    uint64_t n_probes;
    /* The probe that runs here; NULL: none. Cleared before the request leaves. */
    const struct sched_request *prober;
    /* Steps of a probe still to come: each is believed at once (cost_believe()). */
    uint32_t n_believed;
    bool is_measured;           /* a step was observed since the last refresh */
    double prompt_use;          /* as in struct policy_worker */
    uint64_t used_ns;           /* when prompt_use was last updated */
    struct cost_term leg_error; /* prefill legs */
    double leg_extra_ms;        /* mean time of a prefill leg beyond its predicted load and steps */
    double load_ms, dram_ms, ssd_ms, fetch_ms, fetch_block_ms; /* as in struct policy_worker */
    struct transfer_model transfer;                            /* of KV that it receives */
    uint32_t n_sends, n_receives; /* requests with is_moving whose pages flow from here, to here */
    /* Prompts dispatched here and not computed, in the order of dispatch; the first one is being computed. */
    struct sched_request *first, *last;
    uint32_t n_prompts;
    LIST_HEAD(, sched_request) running; /* requests whose plan decodes here, from dispatch on; no order */
    uint32_t n_running;
    struct sched_report report;
    uint64_t report_ns, others_ns; /* latest report; latest report with prompts of other routers */
    double own_done;               /* tokens of this router's prompts that are computed, by the report */
    uint64_t refreshed_ns;         /* when its load at the horizons was last computed */
    double step_ms;                /* mean time between tokens, at refreshed_ns */
    bool changed;                  /* its load must be computed anew at the next refresh */
    struct bookings bookings;
    uint64_t unread[SCHEDULER_MAX_WORKERS / 64]; /* bit i: it can't read pages of worker i */
};

/*
 * The result of a pass for a new request in a queue longer than SCHEDULER_LOOK. For some milliseconds, new
 * requests that are due after all requests that this pass saw are decided by it, without a pass of their own.
 * Requests dispatched since then are still counted: the copy of the snapshot contains them.
 */
struct look {
    bool is_valid;
    uint64_t number, at_ns; /* number: rising, from 1; sched_request.look of each request that it saw */
    double last_due_ms;     /* greatest due_ms of the requests that it saw */
    /* Work of the requests that it saw and that are still queued; dequeue() lowers it. */
    double before_ms;
    /* Work for which it found places; when the last of that work begins, from at_ns. */
    double seen_ms, start_ms;
    struct policy_worker pass[SCHEDULER_MAX_WORKERS]; /* the snapshot with all requests that it saw */
};

struct scheduler {
    struct scheduler_config config;
    struct sched_worker workers[SCHEDULER_MAX_WORKERS];
    /*
     * views: the snapshot with all dispatched requests. pass: the copy of one pass, with queued requests
     * added.
     */
    struct policy_worker views[SCHEDULER_MAX_WORKERS], pass[SCHEDULER_MAX_WORKERS];
    /* Log of the last decision, or of first_room(). */
    struct policy_candidate candidates[2 * SCHEDULER_MAX_WORKERS];
    uint32_t n_candidates;
    bool logs;          /* ask_policy() writes candidates */
    uint32_t n_workers; /* highest number ever up, plus 1; workers[w].up says which exist */
    struct lengths lengths;
    struct margin ttft_margin, tpot_margin;
    /*
     * Measured over predicted TPOT, by role (prefill, decode). Not by worker: a worker with a high stretch
     * would get no requests, so nothing would show that it is over.
     */
    double stretch[2];
    double return_share;                /* share of recent bookings whose client came back in time */
    struct fair *fair;                  /* owned; the queued requests by tenant */
    TAILQ_HEAD(, sched_request) queued; /* in the order of queueing */
    uint64_t queued_tokens;             /* their prompt tokens */
    double queued_ms;                   /* sum of their queued_ms */
    double beside;        /* other routers' work that is dispatched along with 1 ms of this queue's work */
    double ms_per_charge; /* recent mean of work, in ms, for each token charged to a tenant */
    uint64_t full_ns;     /* when the last client that a full queue refused was told to come back */
    struct drain drain;
    uint32_t block_tokens;     /* of the latest request */
    uint32_t n_queued, n_back; /* queued requests; those that came back to a booking */
    bool dirty;                /* a decision may have changed since the latest pass */
    struct look look;
    uint64_t n_walks; /* passes of admission, for look.number */
    bool is_dry;      /* a worker ran out of prompts, or workers changed: the next pass may not be put off */
    /* The only queued request; its plan is valid while nothing has changed since planned_ns. NULL: none. */
    struct sched_request *alone;
    /* Latest requeue of a request that avoids workers; 0: the pass after AVOID_MS was made. */
    uint64_t avoids_ns;
    uint64_t faded_ns; /* latest fade_idle() */
    /* When alone's plan was made; latest whole pass, which never stops early; latest pass of any kind. */
    uint64_t planned_ns, passed_ns, ran_ns;
};

/* Call it when a decision may have changed: the next scheduler_run() makes a pass. */
void scheduler_changed(struct scheduler *s);
/*
 * The cost model to predict with: the worker's own, or of the most measured worker of its role before its
 * first step. Borrowed.
 */
const struct cost_model *scheduler_cost_of(const struct scheduler *s, const struct sched_worker *k);
/* Removes bookings whose clients did not come in time; lowers return_share for each. */
void scheduler_expire_bookings(struct scheduler *s, struct sched_worker *k, uint64_t now_ns);
/* Recomputes v->share; call it after v's load changed. */
void scheduler_know_share(struct policy_worker *v);
/*
 * Adds q, placed by `plan`, to the snapshot `views` (times 1), and for times > 1 also requests like q that
 * other routers send meanwhile. begins_ms: from now until q decodes. Its pages count from now on, even if it
 * begins later, so that no other request takes them first.
 */
void scheduler_apply(struct policy_worker *views, const struct sched_request *q, const struct plan *plan,
                     double begins_ms, double times);
/*
 * Subtracts q, which has left its decode worker, from that worker's load, without visiting its other
 * sequences.
 */
void scheduler_take_load(const struct scheduler *s, const struct sched_request *q, double step_ms,
                         struct policy_load *at);
