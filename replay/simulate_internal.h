/*
 * What the parts of the simulator share.
 *
 *     simulate.c         requests: arrival, the scheduler's answers, the end; the run
 *     simulate_node.c    workers: admission, steps, hand-over
 *     simulate_pool.c    the pages of one worker, and what is cached in them
 *     simulate_blocks.c  names of blocks, who has them
 *     simulate_store.c   stores, and loading from them
 *     simulate_net.c     flows and ports
 *     simulate_power.c   what all workers draw, and their clocks
 *     simulate_events.c  the heap
 */
#pragma once

#include "base/clock.h"
#include "replay/simulate.h"

enum event_kind {
    EVENT_ARRIVAL,  /* request */
    EVENT_RETURN,   /* request */
    EVENT_PROBE,    /* request */
    EVENT_LEG,      /* request; run: its placement */
    EVENT_STEP_END, /* worker; run */
    EVENT_ANNOUNCE, /* request; run: its placement */
    EVENT_ACCEPTED, /* request; run: its placement */
    EVENT_FLOW_END, /* flow; run: its version */
    EVENT_FILLED,   /* request; run: its placement */
    EVENT_JOIN,     /* request; run: its placement */
    EVENT_TICK,
    EVENT_REPORT,     /* worker: it says what it has to do */
    EVENT_REPORTED,   /* worker: routers hear that */
    EVENT_DEMAND,     /* router: it says what it has queued */
    EVENT_ROUTER_DIE, /* router */
    EVENT_SAMPLE,     /* of power */
    EVENT_DIE,        /* worker */
    EVENT_LOST,       /* worker */
    EVENT_BACK,       /* worker */
    EVENT_GONE,       /* a role has had no worker for gone_ms; run: when the last was lost */
};

struct event {
    uint64_t at_ns, order; /* equal times in the order of their making */
    enum event_kind kind;
    uint32_t subject;
    uint64_t run; /* what was cut short, or planned anew, is not what ends */
};

struct sim;
struct sim_seq;
struct sim_worker_node;

struct events {
    struct event *heap;
    uint64_t n, cap, n_made;
};

void events_post(struct events *e, uint64_t at_ns, enum event_kind kind, uint32_t subject, uint64_t run);
struct event events_take(struct events *e); /* there is one */

/* ------------------------------------------------------------------- network */

struct port {
    double bytes_per_ns; /* 0: no limit */
    uint32_t first, n;   /* flows */
};

struct flow {
    bool is_used, is_flowing, is_closed; /* closed: nothing more is added */
    struct port *from, *to;
    uint32_t next[2], prev[2]; /* among those of each port */
    double left, bytes_per_ns;
    uint64_t settled_ns, version;
    void (*on_end)(struct sim *s, uint32_t subject); /* it is closed and empty; the flow is free already */
    uint32_t subject;
};

struct net {
    struct flow *flows;
    uint32_t n_flows, first_free; /* 1 + flow */
    uint64_t n_versions;
};

uint32_t net_open(struct sim *s, struct port *from, struct port *to, void (*on_end)(struct sim *, uint32_t),
                  uint32_t subject);
void net_add(struct sim *s, uint32_t flow, double bytes);
void net_finish(struct sim *s, uint32_t flow); /* no more is added: on_end comes, perhaps at once */
void net_cancel(struct sim *s, uint32_t flow); /* no on_end */
/* All flows of a subject that would end with on_end. Looks at every flow. */
void net_cancel_all(struct sim *s, void (*on_end)(struct sim *, uint32_t), uint32_t subject);
void net_flow_ended(struct sim *s, uint32_t flow, uint64_t version);

/* --------------------------------------------------------------------- pools */

struct sim_entry {    /* a cached or held block, or the pages of an answer that are only cached */
    uint32_t block;   /* NO_BLOCK: an answer's */
    uint32_t n_holds; /* of legs; 0: in the list of what may go */
    uint32_t n_pages;
    uint32_t prev, next; /* least recently used first; of free ones next */
    uint32_t owner;      /* an answer's: 1 + the preempted request that may take it up again; 0: none */
};

struct sim_pool {
    uint32_t n_pages, n_free, n_idle; /* idle: cached, held by nobody */
    struct sim_entry *entries;        /* [0] is the list's head */
    uint32_t n_entries, cap_entries, first_free;
    uint32_t *slots, n_slots, n_named; /* entries by block; open addressing, 0: none */
};

#define NO_BLOCK UINT32_MAX

void pool_init(struct sim_pool *p, uint32_t n_pages);
void pool_fini(struct sim_pool *p);
/* All or none; cached ones go for it. */
bool pool_take(struct sim *s, struct sim_worker_node *n, uint32_t n_pages);
void pool_give(struct sim_worker_node *n, uint32_t n_pages);
uint32_t pool_takeable(const struct sim_worker_node *n);   /* free and cached */
bool pool_hold(struct sim_worker_node *n, uint32_t block); /* false: it isn't there */
void pool_unhold(struct sim_worker_node *n, uint32_t block);
/* n_pages that were taken become the block, held; false: it is there already, and they stay what they
 * were. */
bool pool_name(struct sim *s, struct sim_worker_node *n, uint32_t block, uint32_t n_pages);
/* Taken ones, for which nobody asks but the request that computed them, if it was preempted: q->answer (NULL:
 * it is over). */
void pool_cache_answer(struct sim *s, struct sim_worker_node *n, uint32_t n_pages, struct sim_seq *q);
uint32_t pool_take_answer(struct sim_worker_node *n,
                          struct sim_seq *q); /* pages that are left of q->answer: taken again */
void pool_leave_answer(struct sim_worker_node *n,
                       struct sim_seq *q); /* q->answer, if any, is an answer like others from now on */
void pool_forget(struct sim *s, struct sim_worker_node *n); /* all is free, whoever held it */

/* --------------------------------------------------------------------- blocks */

void blocks_number(struct sim *s);
uint32_t blocks_of(const struct sim *s, const struct trace_request *t); /* full ones */
/* The longest match of a prefill worker other than `but`, and which. */
uint32_t blocks_match_peer(const struct sim *s, const struct trace_request *t, uint32_t but, uint32_t *peer_out);
uint32_t blocks_match_one(const struct sim *s, uint32_t node, const struct trace_request *t);
/* In pages, of each worker. */
void blocks_match(const struct sim *s, const struct trace_request *t, uint32_t *matched);
void blocks_set(struct sim *s, uint32_t node, uint32_t block, bool has);

/* --------------------------------------------------------------------- stores */

struct stored { /* a block, as its store knows it */
    struct eviction_item dram, ssd;
};

struct store {
    struct port out, in, disk;
    struct eviction *dram, *ssd;
    uint64_t max_dram, max_ssd; /* blocks */
};

void stores_open(struct sim *s);
void stores_close(struct sim *s);
/* Leading blocks that are there, and how many of them only on disk. */
uint32_t stores_match(const struct sim *s, const struct trace_request *t, uint32_t *on_disk_out);
/* A worker has computed blocks [first, end): they go to where they belong. */
void stores_offer(struct sim *s, struct sim_worker_node *n, const struct trace_request *t, uint32_t first,
                  uint32_t end);
/* Starts to load blocks [first, end) for a leg; seq_filled() comes. False: nothing to load. */
bool stores_load(struct sim *s, struct sim_worker_node *n, struct sim_seq *q, uint32_t first, uint32_t end);
void stores_cancel(struct sim *s, struct sim_seq *q); /* what is being loaded for it stops; no seq_filled() */

/* ---------------------------------------------------------- requests, workers */

enum leg_state { LEG_NONE, LEG_WAITING, LEG_FILLING, LEG_PROMPT, LEG_DECODING, LEG_LEASED };

struct sim_leg {
    enum leg_state state;
    uint32_t n_pages, n_private; /* that it has; of them those that it does not hold by name */
    uint32_t n_blocks;           /* of the prompt, by name... */
    /* ...but for these, in order: they were here already, and its own pages have no name */
    uint32_t *twice, n_twice;
    uint32_t n_computed, goal; /* tokens; goal: at which the next one is sampled */
    uint32_t rows;             /* of the step that runs */
    uint64_t order;
};

struct sim_seq { /* a request on its way */
    struct sched_request q;
    const struct trace_request *t;
    struct simulated *out;
    uint32_t n_generated, n_total; /* of the answer */
    uint64_t first_ns, placement;  /* rises each time it is placed */
    uint32_t n_before;             /* of the answer, when it was placed */
    uint64_t admitted_ns, running_ns, prefilled_ns, accepted_ns;
    struct sim_leg legs[2]; /* where it prefills, and where it only decodes */
    /* Accepted: by the decode worker; closed: all was announced. */
    bool is_accepted, is_closed, is_sent, was_preempted;
    bool is_prefix_told;          /* what was found of the prompt is in the result */
    uint32_t answer, answer_page; /* of a preempted one: entry of its pool, 0: none; its first page */
    uint32_t flow;                /* 1 + that of the hand-over */
    double unsent, coming;        /* bytes announced that don't flow yet; and within the step that runs */
    uint32_t own_tokens;          /* found in the prefill worker's own pool, by this placement */
    uint32_t n_loads, load_end, load_peer, load_dram, load_ssd; /* flows under way; blocks */
    struct sim_seq *next, *sibling;                             /* sent when this one has ended: a list */
    const struct sim_seq *head;                                 /* of its workflow */
    uint32_t router;
};

struct sim_list {
    struct sim_seq **at;
    uint32_t n, cap;
};

struct sim_worker_node { /* a worker */
    enum worker_role role;
    bool is_up, is_busy;
    bool is_known; /* the router takes it to be up: also for silence_ms after its death */
    struct sim_list waiting, filling, prompts,
        running;       /* by order of arrival, and as they joined; filling: in no order */
    uint32_t n_active; /* filling, computing, decoding */
    uint64_t began_ns, run;
    uint32_t n_steps;    /* of the run: 0 when prompts take part */
    uint32_t n_decoding; /* in the run: those that joined since follow behind */
    double run_ms;
    double starved_ms; /* how long steps have had no prompt tokens though prompts were there */
    bool is_starving;  /* in the step that runs */
    /* Of a run: its first step; by how much each takes longer than the one before it. */
    double first_ms, longer_ms;
    struct sim_list ended, joined; /* in the step that ended; since it began */
    struct cost_profile cost;      /* true */
    /* As the worker knows it by its own steps, beginning where the scheduler does. */
    struct cost_model model;
    struct simulate_power power;
    double clock, watts; /* clock: of steps that begin now; watts: drawn while the run goes on */
    struct simulated_worker *out;
    struct sim_pool pool;
    struct port receives, sends;
    struct rls loading;
    struct cost_step step;
    uint64_t n_random;
    struct sched_report *reports;                    /* as sent: for each router */
    uint64_t reported_ns;                            /* when the latest was sent */
    bool reports_soon, is_reporting, report_changed; /* a report will be sent; one is on its way */
};

struct sim_router { /* several have the same workers, and share nothing else */
    struct scheduler *scheduler;
    bool is_down;
    double queued_ms; /* as it told workers */
    bool tells;       /* it will again */
};

struct sim {
    const struct trace *trace;
    struct simulate_config c;
    struct cost_profile believed; /* of scheduler and workers, at the start */
    uint32_t block_pages, page_tokens;
    struct sim_router *routers;
    uint32_t n_routers;
    struct sim_seq *seqs;
    uint64_t n_seqs, n_orders, now_ns, n_open;
    bool ticks;
    bool is_gone;     /* no worker of a role was left for gone_ms: requests fail as they come */
    uint64_t able_ns; /* when there last was a worker of each role; UINT64_MAX: there is */
    struct sim_worker_node *nodes;
    uint32_t n_nodes, n_words;
    uint32_t *block_of; /* numbers of the trace's blocks */
    uint32_t n_blocks;
    uint64_t *holders; /* n_words for each block */
    struct store *stores;
    struct stored *stored;
    struct events events;
    struct net net;
    struct power_state power;
    uint64_t sampled_ns;
    struct simulate_result *result;
    struct batch_item *items;
    uint32_t *rows, cap_items;
    uint64_t n_tokens;
};

static inline uint64_t ns_of(double ms)
{
    return (uint64_t)(ms * 1e6 + 0.5);
}

static inline struct scheduler *scheduler_of(const struct sim *s, const struct sim_seq *q)
{
    return s->routers[q->router].scheduler;
}

/* Worker w takes q's leg up. */
void node_leg(struct sim *s, uint32_t w, struct sim_seq *q);
void node_step_ended(struct sim *s, uint32_t w);
void node_announce(struct sim *s, struct sim_seq *q);
void node_send(struct sim *s, struct sim_seq *q); /* what was announced, if its reader takes it */
void node_join(struct sim *s, struct sim_seq *q); /* all of its pages have come */
void node_filled(struct sim *s, struct sim_seq *q, uint32_t n_blocks);
void node_drop(struct sim *s, uint32_t w, struct sim_seq *q); /* its leg ends, pages and all */
void node_go_on(struct sim *s, uint32_t w);                   /* there may be room now */
void node_die(struct sim *s, uint32_t w);
void node_show_progress(struct sim *s);
void node_set_clock(struct sim *s, uint32_t w, double clock); /* of the highest; what runs ends as it began */
double node_watts(const struct sim_worker_node *n);           /* that it draws now */
void node_report(struct sim *s,
                 uint32_t w); /* what it has to do changed: routers will hear of it, if there are several */
void node_send_report(struct sim *s, uint32_t w);
void node_reported(struct sim *s, uint32_t w);

/* Its prompt is computed, and the first token sampled; the decode worker has taken pages; the last token
 * came. */
void sim_request_prefilled(struct sim *s, struct sim_seq *q);
void sim_request_accepted(struct sim *s, struct sim_seq *q, uint64_t at_ns);
void sim_request_ended(struct sim *s, struct sim_seq *q);
void sim_request_note_tokens(struct sim *s, struct sim_seq *q, uint32_t n, double first_ms, double each_ms);
/* A worker was busy: goes into its load over time. */
void sim_note_load(struct sim *s, struct simulated_worker *w, double from_ms, double to_ms);

/* --------------------------------------------------------------------- power */

void budget_open(struct sim *s); /* without a budget there are no samples */
void budget_sample(struct sim *s);
void budget_close(struct sim *s);
