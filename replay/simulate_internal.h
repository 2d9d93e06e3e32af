/*
 * Shared by the parts of the simulator.
 *
 *     simulate.c         requests: arrival, the scheduler's answers, the end; the run
 *     simulate_node.c    workers: admission, steps, hand-over
 *     simulate_pool.c    the pages of one worker, and what is cached in them
 *     simulate_blocks.c  numbers of blocks, which workers have each block
 *     simulate_store.c   stores, and loading from them
 *     simulate_net.c     flows and ports
 *     simulate_power.c   the power of all workers, and their clocks
 *     simulate_events.c  the heap of events
 *
 * Everything runs in one thread. Events of equal time come in the order in which they were posted. An event
 * can't be withdrawn: the member run says what it belongs to, and an event whose run is out of date is
 * ignored when it comes.
 */
#pragma once

#include "base/clock.h"
#include "replay/simulate.h"

enum event_kind {
    EVENT_ARRIVAL,  /* request */
    EVENT_RETURN,   /* request */
    EVENT_PROBE,    /* request */
    EVENT_LEG,      /* request; run: its placement */
    EVENT_STEP_END, /* worker; run: its run of steps */
    EVENT_ANNOUNCE, /* request; run: its placement */
    EVENT_ACCEPTED, /* request; run: its placement */
    EVENT_FLOW_END, /* flow; run: its version */
    EVENT_FILLED,   /* request; run: its placement */
    EVENT_JOIN,     /* request; run: its placement */
    EVENT_TICK,
    EVENT_REPORT,     /* worker: it sends a report of its work */
    EVENT_REPORTED,   /* worker: the routers get its report */
    EVENT_DEMAND,     /* router: it reports what it has queued */
    EVENT_ROUTER_DIE, /* router */
    EVENT_SAMPLE,     /* power is read */
    EVENT_DIE,        /* worker */
    EVENT_LOST,       /* worker */
    EVENT_BACK,       /* worker */
    EVENT_GONE,       /* a role has had no worker for gone_ms; run: the time since when */
};

struct event {
    uint64_t at_ns, order; /* order: equal times come in the order of posting */
    enum event_kind kind;
    uint32_t subject;
    /* Names what the event belongs to; if that was cut short or planned anew, the event is ignored. */
    uint64_t run;
};

struct sim;
struct sim_seq;
struct sim_worker_node;

struct events {
    struct event *heap;
    uint64_t n, cap, n_made;
};

void events_post(struct events *e, uint64_t at_ns, enum event_kind kind, uint32_t subject, uint64_t run);
struct event events_take(struct events *e); /* the heap must not be empty */

/* ------------------------------------------------------------------- network */

struct port {
    double bytes_per_ns; /* 0: no limit */
    uint32_t first, n;   /* first: 1 + flow of the port's list, 0: none; n: length of the list */
};

struct flow {
    bool is_used, is_flowing, is_closed; /* is_flowing: bytes are left; is_closed: no more bytes are added */
    struct port *from, *to;
    /* Neighbours in the list of each port, 1 + flow; next[0] of a free flow: the next free one. */
    uint32_t next[2], prev[2];
    double left, bytes_per_ns;
    uint64_t settled_ns, version;
    /* Called when the flow is closed and empty; the flow has been freed. */
    void (*on_end)(struct sim *s, uint32_t subject);
    uint32_t subject;
};

struct net {
    struct flow *flows;
    uint32_t n_flows, first_free; /* first_free: 1 + flow; 0: none */
    uint64_t n_versions;
};

uint32_t net_open(struct sim *s, struct port *from, struct port *to, void (*on_end)(struct sim *, uint32_t),
                  uint32_t subject);
void net_add(struct sim *s, uint32_t flow, double bytes);
void net_finish(struct sim *s, uint32_t flow); /* closes the flow: on_end comes, perhaps at once */
void net_cancel(struct sim *s, uint32_t flow); /* frees the flow without on_end */
/* Cancels all flows of a subject that have this on_end. Looks at every flow. */
void net_cancel_all(struct sim *s, void (*on_end)(struct sim *, uint32_t), uint32_t subject);
void net_flow_ended(struct sim *s, uint32_t flow, uint64_t version);

/* --------------------------------------------------------------------- pools */

struct sim_entry {    /* a cached or held block, or pages of an answer, which are only cached */
    uint32_t block;   /* NO_BLOCK: pages of an answer */
    uint32_t n_holds; /* legs that hold it; 0: the entry is in the list of evictable entries */
    uint32_t n_pages;
    /* List of evictable entries, least recently used first; next also links free entries. */
    uint32_t prev, next;
    uint32_t owner; /* of an answer: 1 + the preempted request that may take the pages up again; 0: none */
};

struct sim_pool {
    uint32_t n_pages, n_free, n_idle; /* n_idle: cached pages that nobody holds */
    struct sim_entry *entries;        /* [0] is the head of the list */
    uint32_t n_entries, cap_entries, first_free;
    /* Entries by block: a hash table with open addressing; 0: empty slot. */
    uint32_t *slots, n_slots, n_named;
};

#define NO_BLOCK UINT32_MAX

void pool_init(struct sim_pool *p, uint32_t n_pages);
void pool_fini(struct sim_pool *p);
/* Takes n_pages, all or none. Evicts cached pages for it. */
bool pool_take(struct sim *s, struct sim_worker_node *n, uint32_t n_pages);
void pool_give(struct sim_worker_node *n, uint32_t n_pages);
uint32_t pool_takeable(const struct sim_worker_node *n);   /* free and evictable pages */
bool pool_hold(struct sim_worker_node *n, uint32_t block); /* false: the block is not in the pool */
void pool_unhold(struct sim_worker_node *n, uint32_t block);
/* Makes n_pages that were taken into the block, which the caller holds. False: the pool has the block
 * already, and the pages stay as they were. */
bool pool_name(struct sim *s, struct sim_worker_node *n, uint32_t block, uint32_t n_pages);
/* Caches n_pages that were taken, of an answer. Only the request that computed them may ask for them again,
 * if it was preempted: q->answer then names them. q is NULL if the request is over. */
void pool_cache_answer(struct sim *s, struct sim_worker_node *n, uint32_t n_pages, struct sim_seq *q);
/* Takes the pages of q->answer that are still cached. Returns their number. */
uint32_t pool_take_answer(struct sim_worker_node *n, struct sim_seq *q);
/* q gives up its claim on q->answer, if it has one. */
void pool_leave_answer(struct sim_worker_node *n, struct sim_seq *q);
void pool_forget(struct sim *s, struct sim_worker_node *n); /* empties the pool, whoever holds pages */

/* --------------------------------------------------------------------- blocks */

void blocks_number(struct sim *s);
/* Number of full blocks of a prompt. */
uint32_t blocks_of(const struct sim *s, const struct trace_request *t);
/* The longest match, in blocks, on a prefill worker other than `but`. *peer_out is set if it is not 0. */
uint32_t blocks_match_peer(const struct sim *s, const struct trace_request *t, uint32_t but, uint32_t *peer_out);
uint32_t blocks_match_one(const struct sim *s, uint32_t node, const struct trace_request *t);
/* Sets matched[w] to the pages that worker w has of the prompt. */
void blocks_match(const struct sim *s, const struct trace_request *t, uint32_t *matched);
void blocks_set(struct sim *s, uint32_t node, uint32_t block, bool has);

/* --------------------------------------------------------------------- stores */

struct stored { /* a block's place in the tiers of its store */
    struct eviction_item dram, ssd;
};

struct store {
    struct port out, in, disk;
    struct eviction *dram, *ssd;
    uint64_t max_dram, max_ssd; /* blocks */
};

void stores_open(struct sim *s);
void stores_close(struct sim *s);
/* Number of leading blocks that stores have; *on_disk_out of them are only on disk. */
uint32_t stores_match(const struct sim *s, const struct trace_request *t, uint32_t *on_disk_out);
/* A worker has computed blocks [first, end): offers them to the stores that they belong to. */
void stores_offer(struct sim *s, struct sim_worker_node *n, const struct trace_request *t, uint32_t first,
                  uint32_t end);
/* Starts to load blocks [first, end) for a leg; EVENT_FILLED comes when all have arrived. False: there is
 * nothing to load. */
bool stores_load(struct sim *s, struct sim_worker_node *n, struct sim_seq *q, uint32_t first, uint32_t end);
/* Stops what is being loaded for q; no EVENT_FILLED comes. */
void stores_cancel(struct sim *s, struct sim_seq *q);

/* ---------------------------------------------------------- requests, workers */

enum leg_state { LEG_NONE, LEG_WAITING, LEG_FILLING, LEG_PROMPT, LEG_DECODING, LEG_LEASED };

struct sim_leg {
    enum leg_state state;
    uint32_t n_pages, n_private; /* pages that it has; n_private: pages of these that have no block's name */
    uint32_t n_blocks;           /* leading blocks of the prompt that it holds by name; not those in twice */
    /* Indexes of blocks, ascending, that the pool already had when the leg computed them; the leg's own pages
     * of such a block have no name. */
    uint32_t *twice, n_twice;
    uint32_t n_computed, goal; /* tokens; goal: the number after which the next token is sampled */
    uint32_t rows;             /* rows in the running step */
    uint64_t order;
};

struct sim_seq { /* a request of the run */
    struct sched_request q;
    const struct trace_request *t;
    struct simulated *out;
    uint32_t n_generated, n_total; /* tokens of the answer: so far, in all */
    /* placement: rises each time the request is placed, so that late events of an earlier placement are
     * known. */
    uint64_t first_ns, placement;
    uint32_t n_before; /* n_generated when it was placed */
    uint64_t admitted_ns, running_ns, prefilled_ns, accepted_ns;
    struct sim_leg legs[2]; /* [0] where it prefills; [1] where it only decodes */
    /* is_accepted: by the decode worker; is_closed: everything is announced; is_sent: and the flow is
     * closed. */
    bool is_accepted, is_closed, is_sent, was_preempted;
    bool is_prefix_told; /* the result has the cached tokens of the prompt */
    /* If preempted: answer: entry in the pool, 0: none; answer_page: its first page. */
    uint32_t answer, answer_page;
    uint32_t flow; /* 1 + flow of the hand-over; 0: none */
    /* unsent: announced bytes that are not in the flow yet; coming: bytes of the running step. */
    double unsent, coming;
    uint32_t own_tokens; /* tokens found in the prefill worker's pool by this placement */
    /* n_loads: running flows of the loading; the others: blocks. */
    uint32_t n_loads, load_end, load_peer, load_dram, load_ssd;
    /* next: first request that follows this one; sibling: the next one that follows the same. */
    struct sim_seq *next, *sibling;
    const struct sim_seq *head; /* first request of its workflow */
    uint32_t router;
};

struct sim_list {
    struct sim_seq **at;
    uint32_t n, cap;
};

struct sim_worker_node { /* a worker */
    enum worker_role role;
    bool is_up, is_busy;
    bool is_known; /* the routers take it to be up, which they also do for silence_ms after its death */
    /* Ordered by arrival at the worker. running: sequences that joined since the step began come last.
     * filling: unordered. */
    struct sim_list waiting, filling, prompts, running;
    uint32_t n_active; /* sequences that have pages and are filling, computing or decoding */
    uint64_t began_ns, run;
    uint32_t n_steps; /* decode steps of the run; 0: one step with prompts */
    /* Sequences of the run: the first n_decoding of `running`; those that joined since come after them. */
    uint32_t n_decoding;
    double run_ms;
    double starved_ms; /* ms for which steps have had no prompt tokens although prompts were waiting */
    bool is_starving;  /* the running step is such a step */
    /* Of a run: time of its first step; by how much each step takes longer than the one before it. */
    double first_ms, longer_ms;
    /* ended: sequences that ended in the step; joined: those that joined since it began. */
    struct sim_list ended, joined;
    struct cost_profile cost; /* the true coefficients */
    /* The worker's own model, learned from its steps. It begins where the scheduler's does. */
    struct cost_model model;
    struct simulate_power power;
    double clock, watts; /* clock: of steps that begin now; watts: drawn during the run */
    struct simulated_worker *out;
    struct sim_pool pool;
    struct port receives, sends;
    struct rls loading;
    struct cost_step step;
    uint64_t n_random;
    struct sched_report *reports; /* [n_routers] the latest reports */
    uint64_t reported_ns;         /* when they were sent */
    /* reports_soon: EVENT_REPORT is posted; is_reporting: EVENT_REPORTED is posted; report_changed: another
     * report is due. */
    bool reports_soon, is_reporting, report_changed;
};

struct sim_router { /* routers have the same workers, and share nothing else */
    struct scheduler *scheduler;
    bool is_down;
    double queued_ms; /* the queued work that it last reported to workers */
    bool tells;       /* EVENT_DEMAND is posted */
};

struct sim {
    const struct trace *trace;
    struct simulate_config c;
    struct cost_profile believed; /* the coefficients from which schedulers and workers start */
    uint32_t block_pages, page_tokens;
    struct sim_router *routers;
    uint32_t n_routers;
    struct sim_seq *seqs;
    uint64_t n_seqs, n_orders, now_ns, n_open;
    bool ticks;
    bool is_gone;     /* a role has had no worker for gone_ms, so requests fail as they come */
    uint64_t able_ns; /* when there last was a worker of each role; UINT64_MAX: there is one now */
    struct sim_worker_node *nodes;
    uint32_t n_nodes, n_words;
    uint32_t *block_of; /* [trace->n_blocks] number of each block of the trace */
    uint32_t n_blocks;
    uint64_t *holders; /* [n_blocks * n_words] a bit for each worker that has the block */
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

/* Worker w gets q's leg. */
void node_leg(struct sim *s, uint32_t w, struct sim_seq *q);
void node_step_ended(struct sim *s, uint32_t w);
void node_announce(struct sim *s, struct sim_seq *q);
/* Lets announced bytes flow, if the decode worker has accepted. */
void node_send(struct sim *s, struct sim_seq *q);
void node_join(struct sim *s, struct sim_seq *q); /* all of its pages have arrived: it decodes */
void node_filled(struct sim *s, struct sim_seq *q, uint32_t n_blocks);
void node_drop(struct sim *s, uint32_t w, struct sim_seq *q); /* its leg ends and gives its pages back */
void node_go_on(struct sim *s, uint32_t w);                   /* there may be room for waiting legs now */
void node_die(struct sim *s, uint32_t w);
void node_show_progress(struct sim *s);
/* Share of the highest clock; a running step ends as it began. */
void node_set_clock(struct sim *s, uint32_t w, double clock);
double node_watts(const struct sim_worker_node *n); /* its power now */
/* The worker's work has changed: it will send a report, if there are several routers. */
void node_report(struct sim *s, uint32_t w);
void node_send_report(struct sim *s, uint32_t w);
void node_reported(struct sim *s, uint32_t w);

/* The prompt is computed and the first token sampled; the decode worker has taken pages; the last token was
 * generated. */
void sim_request_prefilled(struct sim *s, struct sim_seq *q);
void sim_request_accepted(struct sim *s, struct sim_seq *q, uint64_t at_ns);
void sim_request_ended(struct sim *s, struct sim_seq *q);
void sim_request_note_tokens(struct sim *s, struct sim_seq *q, uint32_t n, double first_ms, double each_ms);
/* A worker was busy: adds the time to its load. */
void sim_note_load(struct sim *s, struct simulated_worker *w, double from_ms, double to_ms);

/* --------------------------------------------------------------------- power */

void budget_open(struct sim *s); /* posts the first sample, if there is a budget */
void budget_sample(struct sim *s);
void budget_close(struct sim *s);
