/*
 * What the files of worker/ share. Everything here belongs to the engine thread unless its comment says
 * otherwise.
 */
#pragma once

#include "base/absence.h"
#include "base/list.h"
#include "base/queue.h"
#include "engine/engine.h"
#include "proto/wire/events.h"
#include "proto/wire/store_msg.h"
#include "sched/rls.h"
#include "worker/adapters.h"
#include "worker/grammars.h"
#include "worker/backlog.h"
#include "worker/event_queue.h"
#include "worker/keeps.h"
#include "worker/leg.h"
#include "worker/link.h"
#include "worker/reach.h"
#include "worker/register.h"
#include "worker/wants.h"
#include "worker/worker.h"

#define WORKER_METRICS(X)                                                                                              \
    X(WORKER_LEGS, METRIC_COUNTER, "tandem_worker_legs_total", "legs accepted")                                        \
    X(WORKER_LEGS_FAILED, METRIC_COUNTER, "tandem_worker_legs_failed_total", "legs that ended with an error")          \
    X(WORKER_LEGS_BROKEN, METRIC_COUNTER, "tandem_worker_nonfinite_logits_total",                                      \
      "legs that ended because logits were not finite")                                                                \
    X(WORKER_PROMPT_TOKENS, METRIC_COUNTER, "tandem_worker_prompt_tokens_total", "prompt tokens taken in")             \
    X(WORKER_CACHED_TOKENS, METRIC_COUNTER, "tandem_worker_cached_tokens_total", "prompt tokens found in this pool")   \
    X(WORKER_STORE_TOKENS, METRIC_COUNTER, "tandem_worker_store_tokens_total", "prompt tokens loaded from a store")    \
    X(WORKER_PEER_TOKENS, METRIC_COUNTER, "tandem_worker_peer_tokens_total",                                           \
      "prompt tokens loaded from other workers")                                                                       \
    X(WORKER_LENT_TOKENS, METRIC_COUNTER, "tandem_worker_lent_tokens_total",                                           \
      "prompt tokens whose KV other workers were offered, as they asked for it")                                       \
    X(WORKER_DECODE_CACHED_TOKENS, METRIC_COUNTER, "tandem_worker_decode_cached_tokens_total",                         \
      "prompt tokens of decode legs found in this pool, so not pulled")                                                \
    X(WORKER_TOKENS, METRIC_COUNTER, "tandem_worker_generated_tokens_total", "tokens sampled")                         \
    X(WORKER_STEPS, METRIC_COUNTER, "tandem_worker_steps_total", "batches run")                                        \
    X(WORKER_STEP_SECONDS, METRIC_SECONDS, "tandem_worker_step_seconds", "time of one batch")                          \
    X(WORKER_TRANSFER_SECONDS, METRIC_SECONDS, "tandem_worker_transfer_seconds", "first announcement to last byte")    \
    X(WORKER_PAGES_FREE, METRIC_GAUGE, "tandem_worker_pages_free", "pages that nobody holds or cached")                \
    X(WORKER_PAGES_CACHED, METRIC_GAUGE, "tandem_worker_pages_cached", "named pages, reusable at once")                \
    X(WORKER_PAGES_HELD, METRIC_GAUGE, "tandem_worker_pages_held", "pages of running sequences")                       \
    X(WORKER_PAGES_LEASED, METRIC_GAUGE, "tandem_worker_pages_leased", "pages that a transfer may touch")              \
    X(WORKER_PAGES_QUARANTINED, METRIC_GAUGE, "tandem_worker_pages_quarantined", "pages in doubt")                     \
    X(WORKER_GRAMMAR_BYTES, METRIC_GAUGE, "tandem_worker_grammar_bytes", "grammars kept for structured output")        \
    X(WORKER_SLOWER, METRIC_GAUGE, "tandem_worker_slower_connections", "by a slower way than --transports asks for")
enum { METRICS_ENUM(WORKER_METRICS) };

/*
 * Pages whose bytes the wire may touch, each with one transfer hold of the pool. One array belongs to one
 * lease, pull or offer, and is dropped when nothing of it is in flight any more.
 */
struct held_pages {
    struct page_ref *pages;
    uint32_t n, cap;
};

/* The reader's side of one transfer; exists from pull_open() until pull_close(), which follows its end. */
struct worker_pull {
    LIST_ENTRY(worker_pull) in_worker; /* the list that audits walk */
    struct worker *worker;
    struct xfer_id id;
    struct leg *leg; /* NULL: nobody waits for the KV; the pull only holds its pages until it has ended */
    /*
     * The xfer thread reads n_have, held.n and addresses (landing_address() in transfers.c): all are written
     * before pull_start() and not changed while the pull runs.
     */
    uint32_t n_have; /* leading pages of the lease that are in the pool already and are not pulled */
    struct held_pages held;
    uint8_t **addresses; /* [held.n]; page n_have + i of the lease lands at addresses[i] */
};

/* The holder's side of one transfer; exists from lease_open() until lease_close(), which follows its end. */
struct worker_lease {
    LIST_ENTRY(worker_lease) in_worker; /* the list that audits walk */
    struct worker *worker;
    struct xfer_id id;
    struct held_pages held;
};

/* Blocks whose keys were sent to a store; their pages are held until it answers, or until the deadline. */
struct offer {
    LIST_ENTRY(offer) in_worker;
    struct xfer_id id;
    struct held_pages held;
    uint64_t deadline_ns;
};

enum { STEPS_TOLD = 16 };

struct out_token {
    struct leg *leg;
    uint32_t position;
    struct sampled token;
};

/* The whole worker. Members without a lock belong to the engine thread or stay as worker_open() set them. */
struct worker {
    const char *role;
    struct worker_options options;
    char name[64];
    struct clock clock;
    /* Time of the engine thread. A long step counts as an absence, because the thread hears nobody in it. */
    struct absence absence;
    struct log log;
    struct secret *secret; /* NULL: none */
    uint64_t incarnation, next_counter;
    struct geometry geometry;
    struct model *model;
    struct kernels *kernels[K_MAX_RANKS]; /* one for each rank; the rest NULL */
    struct adapters adapters;
    struct grammars *grammars;
    Tandem__Worker__V1__Adapter **adapters_said, *adapter_said; /* [adapters.n], for hello messages */
    struct block_key *adapter_keys;
    struct engine *engine;
    struct xfer *xfer;
    struct link_server *links;
    struct registrar *registrar;
    struct wants wants;
    struct reach_config reach;
    /* Where transfers listen, and what others are told of it (worker/reach.h). */
    char xfer_listen[REACH_BYTES], xfer_address[REACH_BYTES];
    uint64_t drain_until_ns; /* 0: not draining */
    uint64_t load_told_ns;   /* when the progress of loading was logged last */
    struct metrics *metrics;
    struct metrics_set *counters;
    struct metrics_http *metrics_http;
    char metrics_address[64];
    struct faults *faults; /* NULL: none */
    struct mailbox mailbox;

    LIST_HEAD(, leg) legs;
    struct backlog backlog;
    struct keeps keeps;
    LIST_HEAD(, offer) offers;
    LIST_HEAD(, worker_lease) leases;
    LIST_HEAD(, worker_pull) pulls;
    uint32_t n_wire; /* pulls and leases that have not ended; closing waits for them */
    /* Tokens sampled since the last leg_flush(). */
    struct out_token *out;
    uint32_t n_out, cap_out;
    struct event_queue events;

    /*
     * Guards the members from here to fetching: the engine thread writes them and the beat thread reads them.
     * A lock instead of a queue, because a reader wants the latest few words only.
     */
    pthread_mutex_t load_lock;
    struct engine_load load;
    struct kvpool_audit audit;
    /* A ring: steps since the last Load message. When n_steps exceeds STEPS_TOLD, it has the latest ones. */
    struct cost_step steps[STEPS_TOLD];
    uint32_t n_steps;
    uint64_t steps_begun, steps_ended;
    double step_expected_ms; /* expected duration of the running step in ms; 0: none runs */
    /* Times running steps, so that a step is not charged for time in which the process stood still. */
    struct absence beat_absence;
    /* Time of the last Load, the step that ran then, and when a Load first saw that step. */
    uint64_t beat_ns, seen_step, seen_ns;
    /* Predicts the ms of a load from stores, from {1, blocks in their DRAM, blocks on their SSD}. */
    struct rls loading;
    /* Predicts the ms of a load from other workers, from {1, blocks}. */
    struct rls fetching;
    _Atomic bool stopping, forced;
};

/* Mail to the engine thread: LINK comes from rpc threads, STOP from worker_stop(), the others from xfer. */
enum worker_work_kind { WORK_LINK, WORK_PULL_END, WORK_LEASE_END, WORK_WANT, WORK_LOOKUP, WORK_STOP };

/* One message of another thread to the engine thread, which frees it. */
struct worker_work {
    struct mail mail;
    enum worker_work_kind kind;
    struct link_mail *link;
    struct worker_pull *pull;
    struct worker_lease *lease;
    enum td_status status;
    bool in_doubt;
    struct xfer_pull_result result; /* its tail points at tail_data */
    uint8_t tail_data[256];
    struct bytes data; /* WORK_WANT, WORK_LOOKUP: the message */
    uint64_t sender;   /* WORK_WANT, WORK_LOOKUP: incarnation of the process that sent the message */
};

/*
 * One turn of worker_run(), for its thread: all mail, one step, and what a drain asks for. Sleeps at most
 * idle_ms, and only if there was nothing to compute. Tests call it instead of worker_run().
 */
void worker_turn(struct worker *w, uint32_t idle_ms);
struct worker_work *worker_work_new(enum worker_work_kind kind);
struct xfer_id worker_new_id(struct worker *w);
/* Adds a page and takes a transfer hold on it. Somebody else must hold the page already (kvpool.h). */
void held_add(struct worker *w, struct held_pages *h, struct page_ref page);
/* Gives up all transfer holds, frees the array. in_doubt: a peer may still read, so pages are quarantined. */
void held_drop(struct worker *w, struct held_pages *h, bool in_doubt);

/* transfers.c: leases and pulls */
/*
 * Grants a lease with no pages yet. reader_incarnation: the process that may pull it; 0: the first one that
 * asks for the id. reader_is_up: that process is connected now, so the lease ends when its connection does.
 * The caller has checked lease_is_open() where others choose the id: what is announced would go into the
 * lease that has it.
 */
struct worker_lease *lease_open(struct worker *w, struct xfer_id id, uint64_t reader_incarnation, bool reader_is_up);
bool lease_is_open(const struct worker *w, struct xfer_id id); /* until lease_close() */
/*
 * Makes a pull and holds its n pages: page i of what is pulled lands in pages[which[i]], or in pages[i] if
 * which is NULL. leg NULL: nobody waits for it. The arrays are borrowed during the call.
 */
struct worker_pull *pull_open(struct worker *w, struct leg *leg, const struct page_ref *pages, const uint32_t *which,
                              uint32_t n);
/* Does nothing if the lease is over. */
void lease_cancel(struct worker *w, struct xfer_id id);
void lease_close(struct worker *w, struct worker_lease *l, bool in_doubt); /* after on_lease_end: frees it */
/* Frees a pull after on_pull_end. */
void pull_close(struct worker *w, struct worker_pull *p);
/* Sends the pull on its way; on_pull_end comes exactly once, as WORK_PULL_END. */
void pull_start(struct worker *w, struct worker_pull *p, struct xfer_id id, const char *address, uint64_t incarnation,
                uint64_t deadline_ns);
void transfers_on_message(void *user, struct xfer_peer *peer, uint16_t kind, const void *data, uint32_t len_bytes);

/* prefix.c */
void prefix_ask(struct worker *w, struct leg *leg); /* when the leg starts */
/*
 * The sequence has its pages, the first n_have of which are filled. Returns true if loads were started: then
 * engine_seq_filled() is called when the last of them has ended.
 */
bool prefix_load(struct worker *w, struct leg *leg, uint32_t n_have);
/* Returns false if p is not a load of the leg's prefix. */
bool prefix_pull_ended(struct worker *w, struct leg *leg, const struct worker_pull *p, const struct worker_work *work);
void prefix_drop(struct worker *w, struct leg *leg); /* cancels all loads that have not ended */
/* Another worker asks for blocks. */
void prefix_asked(struct worker *w, const struct bytes *message, uint64_t reader);

/* store.c */
/* Offers the leg's computed blocks from first_block on to its stores. */
void store_offer(struct worker *w, struct leg *leg, uint32_t first_block);
void store_wanted(struct worker *w, const struct bytes *message);
/* Drops offers that no store answered in time; all: drops every offer. */
void store_expire(struct worker *w, uint64_t now, bool all);

/* audit.c */
void audit_answer(struct worker *w, struct link *link, uint64_t nonce); /* event_queue_flush() comes before */
