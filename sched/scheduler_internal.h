/*
 * What the files of the scheduler share.
 *
 *     scheduler.c        requests: admission, the queue, passes, their progress on workers
 *     scheduler_view.c   workers: what they report, and the snapshot of them that decisions are made on
 */
#pragma once

#include "sched/booking.h"
#include "sched/drain.h"
#include "sched/margin.h"
#include "sched/scheduler.h"

#define SCHEDULER_REFRESH_MS  50.0
#define SCHEDULER_RETURN_RATE 0.02 /* of the share of those that come back */

struct sched_worker {
    bool up;
    struct sched_worker_info info;
    struct cost_model cost, reference; /* reference: what a probe assumes */
    uint64_t measured_ns, probed_ns;   /* its latest step, and probe */
    uint64_t n_probes;
    const struct sched_request *prober; /* the probe that it has; NULL: none */
    uint32_t n_believed;                /* steps to come that a probe made */
    bool is_measured;                   /* since the last look */
    double prompt_use;                  /* sched/policy.h */
    uint64_t used_ns;                   /* when prompt_use was last brought up to date */
    struct cost_term leg_error;
    double leg_extra_ms; /* of a prefill leg beyond its predicted steps: the mean */
    double load_ms, dram_ms, ssd_ms, fetch_ms, fetch_block_ms;
    struct transfer_model transfer;     /* of what comes to it */
    uint32_t n_sends, n_receives;       /* of prompts that are computed, and whose pages still flow */
    struct sched_request *first, *last; /* dispatched prompts */
    uint32_t n_prompts;
    struct sched_request *running;
    uint32_t n_running;
    struct sched_report report;
    uint64_t report_ns, others_ns; /* of the latest report, and of the latest that knew prompts of other routers */
    double own_done;               /* tokens of its own prompts that the report says are computed */
    uint64_t refreshed_ns;
    double step_ms; /* between tokens, as of then */
    bool changed;
    struct bookings bookings;
    uint64_t unread[SCHEDULER_MAX_WORKERS / 64]; /* bits of the workers from which it can read no pages */
};

/*
 * A pass that only looked, in a queue that is longer than SCHEDULER_LOOK. Newcomers behind all that it saw are decided by it for some
 * milliseconds: what was sent since is in it all the same.
 */
struct look {
    bool is_valid;
    uint64_t number, at_ns;   /* number: from 1 */
    double last_due_ms;       /* the latest of what it saw */
    double before_ms;         /* work of what it saw that is still queued */
    double seen_ms, start_ms; /* work that found a place, and when the last of it begins */
    struct policy_worker pass[SCHEDULER_MAX_WORKERS];
};

struct scheduler {
    struct scheduler_config config;
    struct sched_worker workers[SCHEDULER_MAX_WORKERS];
    struct policy_worker views[SCHEDULER_MAX_WORKERS], pass[SCHEDULER_MAX_WORKERS];
    struct policy_candidate candidates[2 * SCHEDULER_MAX_WORKERS]; /* of the last decision */
    uint32_t n_candidates;
    bool logs; /* what is weighed goes to candidates */
    uint32_t n_workers;
    struct lengths lengths;
    struct margin ttft_margin, tpot_margin;
    double stretch[2];   /* by role: of one worker it would keep those away who could show that it is over */
    double return_share; /* of those for whom a place was kept lately, who came */
    struct fair *fair;
    struct sched_request *queued, *last_queued;
    uint64_t queued_tokens;
    double queued_ms;     /* work of what is queued, as predicted when it was */
    double beside;        /* work of others that gets its turns beside each millisecond of this queue's */
    double ms_per_charge; /* work of a unit of what tenants are charged; of late */
    uint64_t full_ns;     /* until then those that a full queue sent away are told to come back, one after the other */
    struct drain drain;
    uint32_t block_tokens;     /* of the latest request */
    uint32_t n_queued, n_back; /* back: those that came back when they were told to */
    bool dirty;
    struct look look;
    uint64_t n_walks;
    bool is_dry;                 /* a worker has computed all of its prompts since the latest pass */
    struct sched_request *alone; /* whose plan was made at planned_ns of what still is; NULL: none */
    uint64_t avoids_ns;          /* when one that avoids workers was last queued again; 0: it has had its pass */
    uint64_t faded_ns;           /* when idle workers were last compared with others */
    uint64_t planned_ns, passed_ns, ran_ns; /* passed: the latest pass through all that it looks at; ran: the latest */
};

/* A decision may be another one now. */
void scheduler_changed(struct scheduler *s);
/* Others of its role say how fast a worker is, until it has run a step. Borrowed. */
const struct cost_model *scheduler_cost_of(const struct scheduler *s, const struct sched_worker *k);
/* Places that were kept for those who did not come. */
void scheduler_expire_bookings(struct scheduler *s, struct sched_worker *k, uint64_t now_ns);
void scheduler_know_share(struct policy_worker *v); /* after its load changed */
/*
 * What the next decision shall see of q, and of as much as `times - 1` like it that other routers send meanwhile. Its pages count from now
 * on, though it may begin later: so nobody overtakes it there.
 */
void scheduler_apply(struct policy_worker *views, const struct sched_request *q, const struct plan *plan,
                     double begins_ms, double times);
/* q has left its decode worker, whose sequences are not all looked at for that. */
void scheduler_take_load(const struct scheduler *s, const struct sched_request *q, double step_ms,
                         struct policy_load *at);
