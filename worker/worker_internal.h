/* What the files of worker/ share. Everything here belongs to the engine thread unless it says otherwise. */
#pragma once

#include "base/absence.h"
#include "base/queue.h"
#include "engine/engine.h"
#include "proto/wire/events.h"
#include "proto/wire/store_msg.h"
#include "sched/rls.h"
#include "worker/adapters.h"
#include "worker/backlog.h"
#include "worker/keeps.h"
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
    X(WORKER_SLOWER, METRIC_GAUGE, "tandem_worker_slower_connections", "by a slower transport than --tls asks for")
enum { METRICS_ENUM(WORKER_METRICS) };

/* Pages whose bytes the wire may touch: under one lease, pull or offer. Freed when the wire is quiet. */
struct held_pages {
    struct page_ref *pages;
    uint32_t n, cap;
};

struct pull {
    struct pull *prev, *next; /* the worker's list, for audits */
    struct worker *worker;
    struct xfer_id id;
    struct leg *leg; /* NULL: cancelled, only the pages are waited for */
    uint32_t n_have; /* pages of the lease before the first of held: they are there already */
    struct held_pages held;
    uint8_t **addresses; /* of held; n_have and these are read on the xfer thread, fixed before the pull starts */
};

struct lease {
    struct lease *prev, *next; /* the worker's list, for audits */
    struct worker *worker;
    struct xfer_id id;
    struct held_pages held;
};

struct offer { /* told the store which blocks there are; waiting to hear which it wants */
    struct offer *next;
    struct xfer_id id;
    struct held_pages held;
    uint64_t deadline_ns;
};

enum { MAX_STORES = 64, MAX_HOLDERS = 16, STEPS_TOLD = 16 };

struct store_ref {
    char *address; /* of its transfers */
    uint64_t id;   /* for sched/ring.h */
};

struct
    store_run { /* blocks [first, first + n) of the prompt are thought to be with stores[store], or, from n_stores on, holders */
    uint32_t store, first, n;
};

struct load { /* what one source of a leg's prefix was asked for */
    struct xfer_id id;
    uint32_t source;          /* as store_run.store */
    uint32_t *blocks, n, cap; /* of the prompt, ascending */
    struct pull *pull;        /* NULL: not begun, or over */
    bool is_over;
    uint32_t n_have, n_got; /* leading ones of blocks: that were here before, that are here now */
    struct store_found found;
};

struct leg {
    struct leg *prev, *next;
    struct xfer_id id;
    enum _Tandem__Worker__V1__LegKind kind;
    struct link *link;
    struct seq *seq;
    struct lease *lease; /* PREFILL with a decode leg to follow */
    struct pull *pull;   /* DECODE: of the hand-over */
    char *peer;          /* transfer address; NULL: none */
    struct store_ref *stores;
    char **holders; /* addresses of other workers that have some of the prompt's blocks */
    struct store_run *runs;
    uint32_t n_stores, n_holders, n_runs, hot_blocks, tenant;

    struct load *loads;             /* prefix.c */
    uint32_t n_loads, n_loading;    /* asked; being pulled */
    uint32_t load_first, n_matched; /* first block asked for; blocks that were in the pool when it got its pages */
    struct store_found found;       /* of all stores */
    uint32_t n_from_holders;        /* blocks */
    uint64_t asked_ns, load_begin_ns, stores_done_ns, holders_done_ns;

    uint64_t peer_incarnation;
    uint32_t n_prompt, n_from_store;
    uint32_t n_ids, n_new;    /* tokens that it came with; that its router expects to be computed */
    double tpot_ms;           /* 0: no limit */
    uint32_t first_page;      /* of the sequence, with which a hand-over begins: nobody sees those before it */
    char req[LOG_WORD_BYTES]; /* the request's id for logs, escaped */
    uint64_t deadline_ns, pull_done_ns, prefill_end_ns, transfer_ns, exposed_ns, wait_ns;
    uint32_t cached_worker, cached_peer, cached_dram, cached_ssd;
    struct sampled first_token;
    bool ended;
    enum seq_finish finish;
};

struct out_token {
    struct leg *leg;
    uint32_t position;
    struct sampled token;
};

struct worker {
    const char *role;
    struct worker_options options;
    char name[64];
    struct clock clock;
    struct absence absence; /* of the engine thread: a long step is one, too, as nobody is heard in it */
    struct log log;
    uint64_t incarnation, next_counter;
    struct geometry geometry;
    struct model *model;
    struct kernels *kernels[K_MAX_RANKS]; /* of the ranks; the others NULL */
    struct adapters adapters;
    Tandem__Worker__V1__Adapter **adapters_said, *adapter_said; /* [adapters.n] as hellos have them */
    struct block_key *adapter_keys;
    struct engine *engine;
    struct xfer *xfer;
    struct link_server *links;
    struct registrar *registrar;
    struct wants wants;
    struct reach_config reach;
    char xfer_listen[REACH_BYTES], rpc_address[REACH_BYTES],
        xfer_address[REACH_BYTES]; /* the last two as others are told */
    uint64_t drain_until_ns;       /* 0: not draining */
    uint64_t load_told_ns;         /* when it was last said how far the loading is */
    struct metrics *metrics;
    struct metrics_set *counters;
    struct metrics_http *metrics_http;
    char metrics_address[64];
    struct faults *faults; /* NULL: none */
    struct mailbox mailbox;

    struct leg *legs;
    struct backlog backlog;
    struct keeps keeps;
    struct offer *offers;
    struct lease *leases;
    struct pull *pulls;
    uint32_t n_wire; /* pulls and leases not ended: closing waits for them */
    struct out_token *out;
    uint32_t n_out, cap_out;
    struct block_event *events;
    uint32_t n_events, cap_events;
    uint64_t next_event;

    pthread_mutex_t load_lock; /* beat reads what engine wrote: a few words, no queue needed */
    struct engine_load load;
    struct kvpool_audit audit;
    struct cost_step steps[STEPS_TOLD];
    uint32_t n_steps; /* since the last message */
    uint64_t steps_begun, steps_ended;
    double step_expected_ms; /* of the step that runs; 0: none runs */
    struct absence
        beat_absence; /* steps are timed by it: a step does not take the time in which the process stands still */
    uint64_t beat_ns, seen_step, seen_ns; /* the last look; the step that ran then, and when it was first seen */
    struct rls
        loading; /* ms of a load from stores: 1, blocks in their memory, on their disks; engine writes both under the lock */
    struct rls fetching; /* ms of a load from other workers: 1, blocks */
    _Atomic bool stopping, forced, beat_stop;
};

enum work_kind { WORK_LINK, WORK_PULL_END, WORK_LEASE_END, WORK_WANT, WORK_LOOKUP, WORK_STOP };

struct work { /* what other threads tell the engine thread */
    struct mail mail;
    enum work_kind kind;
    struct link_mail *link;
    struct pull *pull;
    struct lease *lease;
    enum td_status status;
    bool in_doubt;
    struct xfer_pull_result result; /* tail points at tail_data */
    uint8_t tail_data[256];
    struct bytes data; /* WORK_WANT, WORK_LOOKUP: a message */
    uint64_t sender;   /* of it: the process's incarnation */
};

struct work *work_new(enum work_kind kind);
struct xfer_id worker_new_id(struct worker *w);
void held_add(struct worker *w, struct held_pages *h, struct page_ref page);
void held_drop(struct worker *w, struct held_pages *h, bool in_doubt); /* and frees the array */

/* leg.c */
void leg_start(struct worker *w, struct link *link, const Tandem__Worker__V1__Leg *m);
void leg_cancel(struct worker *w, struct xfer_id id, enum td_status why, const char *text);
void leg_cancel_link(struct worker *w, const struct link *link);
void leg_expire(struct worker *w, uint64_t now);
void leg_cancel_all(struct worker *w, enum td_status why, const char *text);
void leg_flush(struct worker *w); /* after a step: tokens, ends */
void leg_pull_ended(struct worker *w, struct work *work);
void leg_on_admitted(void *user, struct seq *seq, uint32_t n_matched);
void leg_on_pages_ready(void *user, struct seq *seq, uint32_t first, uint32_t n, uint16_t begin, uint16_t end);
void leg_on_token(void *user, struct seq *seq, const struct sampled *token);
void leg_on_end(void *user, struct seq *seq, enum seq_finish finish);

/* wire.c: leases and pulls */
/* reader_incarnation 0: whoever names the id first. reader_is_up: it asked, so the lease ends when it is not connected any more. */
struct lease *lease_open(struct worker *w, struct xfer_id id, uint64_t reader_incarnation, bool reader_is_up);
/* What arrives lands in pages[which[0]], pages[which[1]], ...; which NULL: pages[0], pages[1], ... leg NULL: nobody waits for it. */
struct pull *pull_open(struct worker *w, struct leg *leg, const struct page_ref *pages, const uint32_t *which,
                       uint32_t n);
void lease_cancel(struct worker *w, struct xfer_id id);             /* nothing if it is over */
void lease_close(struct worker *w, struct lease *l, bool in_doubt); /* after on_end */
void pull_close(struct worker *w, struct pull *p);
void pull_start(struct worker *w, struct pull *p, struct xfer_id id, const char *address, uint64_t incarnation,
                uint64_t deadline_ns);
void wire_on_message(void *user, struct xfer_peer *peer, uint16_t kind, const void *data, uint32_t len_bytes);

/* prefix.c */
void prefix_ask(struct worker *w, struct leg *leg); /* the leg has come */
/* It has its pages, the first n_have of them filled. False: there is nothing to wait for. Else engine_seq_filled is called in the end. */
bool prefix_load(struct worker *w, struct leg *leg, uint32_t n_have);
bool prefix_pull_ended(struct worker *w, struct leg *leg, const struct pull *p,
                       const struct work *work);                                   /* false: not of a load */
void prefix_drop(struct worker *w, struct leg *leg);                               /* what is under way is cancelled */
void prefix_asked(struct worker *w, const struct bytes *message, uint64_t reader); /* by another worker */

/* store.c */
void store_offer(struct worker *w, struct leg *leg, uint32_t first_block);
void store_wanted(struct worker *w, const struct bytes *message);
void store_expire(struct worker *w, uint64_t now, bool all);

/* audit.c */
void audit_answer(struct worker *w, struct link *link, uint64_t nonce); /* after flush_events */
