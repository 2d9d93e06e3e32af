/* What the files of router/ share. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "admin.pb-c.h"
#include "base/absence.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/metrics.h"
#include "base/jobs.h"
#include "base/queue.h"
#include "model/chat.h"
#include "model/config.h"
#include "model/tokenizer.h"
#include "proto/rpc/rpc.h"
#include "proto/wire/events.h"
#include "proto/wire/kv_layout.h"
#include "router/router.h"
#include "proto/ask/ask_bounds.h"
#include "sched/hot.h"
#include "sched/index.h"
#include "sched/pin_list.h"
#include "sched/progress.h"
#include "sched/retry.h"
#include "sched/ring.h"
#include "sched/scheduler.h"
#include "tandem.pb-c.h"
#include "worker.pb-c.h"
#include "worker/adapters.h"

enum {
    MAX_WORKERS = INDEX_MAX_HOLDERS,
    MAX_STORES = 64, /* of which a leg is told */
    MAX_PROMPT_LOGPROBS = 65536,
    MAX_PROMPT_SCORES = 1 << 18, /* numbers for a prompt: in 9 bytes each they fit one message */
    MAX_PIN_MS = 24 * 3600 * 1000,
};

#define ROUTER_METRICS(X)                                                                                              \
    X(ROUTER_ACCEPTED, METRIC_COUNTER, "tandem_requests_total", "requests that passed validation")                     \
    X(ROUTER_INVALID, METRIC_COUNTER, "tandem_requests_invalid_total", "requests refused at the door")                 \
    X(ROUTER_CALLS_REFUSED, METRIC_COUNTER, "tandem_calls_refused_total", "calls refused: --max-calls are open")       \
    X(ROUTER_NOTES_REFUSED, METRIC_COUNTER, "tandem_mailbox_refused_total", "calls refused: as many wait for a look")  \
    X(ROUTER_TEXTS_REFUSED, METRIC_COUNTER, "tandem_texts_refused_total", "calls refused: --text-bytes wait already")  \
    X(ROUTER_REFUSED, METRIC_COUNTER, "tandem_requests_refused_total", "requests refused by admission")                \
    X(ROUTER_FAILED, METRIC_COUNTER, "tandem_requests_failed_total", "requests that ended with an error")              \
    X(ROUTER_FINISHED, METRIC_COUNTER, "tandem_requests_finished_total", "requests answered in full")                  \
    X(ROUTER_CANCELLED, METRIC_COUNTER, "tandem_requests_cancelled_total", "requests whose client left")               \
    X(ROUTER_UNREAD, METRIC_COUNTER, "tandem_clients_unread_total", "calls cut off: their clients did not read")       \
    X(ROUTER_BEHIND, METRIC_GAUGE, "tandem_clients_behind", "calls whose --send-bytes are full")                       \
    X(ROUTER_PROMPT_TOKENS, METRIC_COUNTER, "tandem_prompt_tokens_total", "prompt tokens of accepted requests")        \
    X(ROUTER_TOKENS, METRIC_COUNTER, "tandem_generation_tokens_total", "tokens sent to clients")                       \
    X(ROUTER_SPLIT, METRIC_COUNTER, "tandem_plans_split_total", "requests placed on two workers")                      \
    X(ROUTER_AGGREGATED, METRIC_COUNTER, "tandem_plans_aggregated_total", "requests placed on one decode worker")      \
    X(ROUTER_TTFT_MARGIN, METRIC_GAUGE, "tandem_ttft_margin_ratio", "by which waiting is taken to be longer")          \
    X(ROUTER_TPOT_MARGIN, METRIC_GAUGE, "tandem_tpot_margin_ratio", "by which steps must stay below a TPOT limit")     \
    X(ROUTER_KEPT, METRIC_COUNTER, "tandem_plans_kept_total", "requests that their prefill worker goes on to decode")  \
    X(ROUTER_TTFT, METRIC_SECONDS, "tandem_time_to_first_token_seconds", "arrival to first token")                     \
    X(ROUTER_TPOT, METRIC_SECONDS, "tandem_time_per_output_token_seconds", "mean gap between tokens of a request")     \
    X(ROUTER_TTFT_ERROR, METRIC_SECONDS, "tandem_ttft_prediction_error_seconds", "|predicted - actual| first token")   \
    X(ROUTER_QUEUED, METRIC_GAUGE, "tandem_requests_queued", "requests waiting to be placed")                          \
    X(ROUTER_RUNNING, METRIC_GAUGE, "tandem_requests_running", "requests placed on workers")                           \
    X(ROUTER_INDEX_BLOCKS, METRIC_GAUGE, "tandem_index_blocks", "blocks in the prefix index")                          \
    X(ROUTER_INDEX_BYTES, METRIC_GAUGE, "tandem_index_bytes", "memory of the prefix index")                            \
    X(ROUTER_INDEX_DROPPED, METRIC_COUNTER, "tandem_index_dropped_total", "blocks that found no place in the index")   \
    X(ROUTER_INDEX_GAPS, METRIC_COUNTER, "tandem_index_gaps_total", "event gaps that made a snapshot necessary")       \
    X(ROUTER_STALLED, METRIC_SECONDS, "tandem_replan_stall_seconds", "pause that a re-plan made in a stream")          \
    X(ROUTER_REPLAN_BUDGET, METRIC_GAUGE, "tandem_replan_budget", "re-plans that may be made now")                     \
    X(ROUTER_READY, METRIC_GAUGE, "tandem_router_ready", "1: the index is whole, requests are placed")
enum { METRICS_ENUM(ROUTER_METRICS) };

#define PEER_METRICS(X)                                                                                                \
    X(PEER_BREAKER, METRIC_GAUGE, "tandem_worker_breaker", "0: closed, 1: one request tries it, 2: open")              \
    X(PEER_BUSY, METRIC_GAUGE, "tandem_worker_busy_seconds", "until the prompts sent to it are computed, predicted")   \
    X(PEER_PREFILL_ERROR, METRIC_GAUGE, "tandem_worker_prefill_error_ratio", "|predicted - actual| / actual of steps") \
    X(PEER_DECODE_ERROR, METRIC_GAUGE, "tandem_worker_decode_error_ratio", "the same of steps that only decode")       \
    X(PEER_LEG_ERROR, METRIC_GAUGE, "tandem_worker_leg_error_ratio", "the same of a prefill leg, loading included")    \
    X(PEER_TRANSFER_ERROR, METRIC_GAUGE, "tandem_worker_transfer_error_ratio", "the same of transfers to it, exposed") \
    X(PEER_GAP_ERROR, METRIC_GAUGE, "tandem_worker_first_gap_error_ratio", "the same of first gaps after a transfer")  \
    X(PEER_UNREACHED, METRIC_GAUGE, "tandem_worker_peers_unreached", "workers and stores that it can't connect to")    \
    X(PEER_PROBES, METRIC_GAUGE, "tandem_worker_probes", "requests that found out whether it is still slow")
enum { METRICS_ENUM(PEER_METRICS) };

/* Why a request is planned anew; the label of tandem_replans_total. */
enum replan_reason {
    REPLAN_LOST,     /* a worker is gone */
    REPLAN_TRANSFER, /* the KV did not get from one to the other, or not unharmed */
    REPLAN_REFUSED,  /* a worker takes nothing: it drains, or has no room */
    REPLAN_UNHEARD,  /* a leg was not acknowledged in time, or forgotten */
    REPLAN_STALLED,  /* a worker is there and gets nowhere */
    REPLAN_FAILED,   /* anything else that a worker did wrong */
    REPLAN_REASONS
};

/* A client's request after validation; filled by the rpc thread that got it, then the owner's. */
struct params {
    uint32_t *ids, n_ids; /* the prompt (sampling.n_prompt of them), then what was generated before the last re-plan */
    Tandem__Worker__V1__SamplingParams sampling; /* arrays below */
    Tandem__Worker__V1__Bias *bias, **bias_list;
    uint32_t *stop_ids, *allowed;
    struct bytes echo; /* shown before the answer */
    struct bytes stop[ASK_MAX_STOP_STRINGS];
    uint32_t n_stop;
    double ttft_ms, tpot_ms; /* limits; 0: none */
    uint32_t n_choices;
    int32_t priority;
    uint32_t workflow_deadline_ms, workflow_steps_left; /* 0 ms: no workflow */
    int64_t remaining_ms;                               /* at arrival; INT64_MAX: none */
    struct bytes tenant, salt, label, workflow, lora;   /* lora: an adapter's name, or empty */
    bool want_ids, want_logprobs, want_prompt_logprobs, max_tokens_given, bypass_cache, skip_special;
};

enum request_state { REQUEST_QUEUED, REQUEST_PLACED, REQUEST_OVER };

struct shown_token {
    uint32_t id;
    float logprob;
    uint32_t n_top, *top_ids; /* the likeliest; owned */
    float *top_logprobs;
    uint64_t text_start; /* offset in the whole text where what it adds begins */
};

enum { PLACED_BUCKETS = 4096 };

enum part { PART_QUEUE, PART_LOAD, PART_PREFILL, PART_TRANSFER, PART_EXPOSED, PART_WAIT, PART_DECODE, PARTS };

/*
 * The choices of one call (choices.c). Each is a request of its own; the first goes alone until its decode worker has the prompt's
 * KV, or it is over. So the others find the prompt in the caches of both workers, and share its full pages: what is left they
 * compute, and pull, into pages of their own.
 */
struct choices {
    uint32_t n_live, n_open; /* requests not freed; not answered in full */
    bool begun, failed;      /* the others are there; the call was ended, so that nothing more is said in it */
};

struct request {
    struct request *prev, *next; /* owner's list, in order of arrival */
    struct request *next_placed; /* in its bucket of router.placed */
    struct router *router;
    struct rpc_call *call;
    struct choices *choices; /* NULL: the only one */
    struct params p;
    struct block_key *keys, root; /* of the full blocks of p.ids */
    char kv_codec[16];            /* that root is made of */
    uint32_t n_keys;
    enum request_state state;
    struct plan plan;
    struct sched_request sched;
    bool submitted; /* to the scheduler */
    uint32_t n_replans;

    /* of the present placement */
    struct peer *prefill, *decode; /* equal when one worker has both phases; NULL when their leg is over */
    struct peer *placed_prefill, *placed_decode;
    char prefill_name[64], decode_name[64];
    uint64_t counter;                   /* of its transfer id: what comes under an old one is not for us any more */
    uint32_t prefill_said, decode_said; /* numbers of the messages that brought the legs; 0: heard */
    uint32_t prefill_leg, decode_leg;   /* the same numbers, also when heard; 0: there is no such leg */
    uint32_t hot_blocks, n_before;      /* tokens generated before it was placed */
    bool decode_accepted, prefill_done, alone; /* alone: no decode leg was sent */
    bool over, over_by_length;                 /* the decode leg ended before what the prefill leg has to tell came */
    bool proven;                               /* the decode worker sent a token */
    bool scores;                               /* all tokens are here; only the prompt is scored (again) */
    uint64_t begun_ns, begun_token_ns;         /* when it was placed, and its first token; 0: none yet */
    uint64_t said_ns;                          /* when its legs were sent, by router_patience() */
    double now_ms[PARTS];                      /* what its legs told */
    uint32_t n_held;                           /* arrived before the decode worker accepted */
    struct shown_token *held;

    struct token_stream *detok;
    struct bytes text; /* whole answer so far */
    uint64_t shown;    /* bytes of it that the client has */
    struct shown_token *tokens;
    uint32_t n_tokens, cap_tokens, n_told;                                       /* n_told: given to the client */
    uint64_t arrived_ns, tokenized_ns, placed_ns, first_token_ns, last_token_ns; /* placed_ns: for the first time */
    uint64_t stall_ns;      /* since when a lost placement gives nothing; 0: all is well */
    double times_ms[PARTS]; /* of placements before, and of this one once it is over */
    double stalled_ms, predicted_ttft_ms, predicted_tpot_ms;
    bool cache_told, answered;
    uint32_t cached_worker, cached_peer, cached_dram, cached_ssd;
    struct { /* as GenerateEnd has them; n 0: not there yet */
        float *logprobs, *top_logprobs;
        uint32_t *ranks, *top_ids;
        size_t n, n_top;
    } prompt;
};

enum peer_state { PEER_CONNECTING, PEER_READY, PEER_LOST, PEER_REFUSED, PEER_GONE }; /* GONE: its place is free */

struct peer { /* a worker or store; owner thread */
    struct router *router;
    uint32_t holder; /* in the index; its place in router.peers */
    char address[128];
    enum peer_state state;
    struct rpc_client *client;
    struct rpc_call *call;
    uint64_t epoch;              /* of the call: mail of an older one is dropped */
    uint64_t retry_ns, heard_ns; /* these and the others of a peer by router_patience() */
    uint64_t next_event;
    uint32_t n_said, n_heard; /* messages of this call, each way */
    uint32_t unheard;         /* up to here the worker had not heard, at unheard_ns; 0 ns: it has heard all */
    uint64_t unheard_ns;
    uint32_t heard; /* the last number that the worker said it heard */
    uint32_t taken; /* ...and that its engine has dealt with */
    uint64_t *legs; /* [n_legs] counters, in order: what it said it has */
    uint32_t n_legs;
    bool legs_told; /* since the last tick */
    bool stalled;   /* its heartbeats go on, its steps do not */
    struct progress progress;
    bool draining;     /* takes no new work, and ends */
    bool drained;      /* has ended so; forgotten if it came by itself, else connected to again for ever */
    bool registered;   /* came by itself: forgotten when it is lost for long */
    uint64_t lost_ns;  /* since when */
    bool tried, whole; /* a connection was tried since start; a whole snapshot came on this call */
    struct breaker breaker;
    uint32_t failed_with; /* holder + 1 of the worker that its last failed transfer was with; 0: none */
    uint64_t probe;       /* counter of the request that tries a worker whose breaker is open; 0: none */
    struct metrics_set *counters;
    enum worker_role role;
    char name[64], xfer_address[128], transport[64], why[256], kv_codec[16];
    uint32_t pid;
    uint64_t incarnation, weight_bytes;
    uint32_t n_pages, max_context, max_batch, chunk_tokens;
    struct kv_layout layout;
    bool snapshot_asked;
    uint32_t n_unreached;          /* of those that it may read from, told by it */
    uint64_t peers_told;           /* sum of the addresses that it was told on this call; 0: none */
    bool is_shared;                /* other routers use it, too */
    double told_ms;                /* of what is queued here, as it was told last */
    Tandem__Worker__V1__Load load; /* the last one; transport copied above */
};

enum note_kind {
    NOTE_REQUEST,
    NOTE_REQUEST_GONE,
    NOTE_WORKER,
    NOTE_WORKER_GONE,
    NOTE_STATUS,
    NOTE_AUDIT,
    NOTE_REGISTER,
    NOTE_DRAIN,
    NOTE_EXPLAIN,
    NOTE_PIN,
    NOTE_FLUSH,
    NOTE_FLUSH_ALL,
    NOTE_STOP
};

struct note { /* what rpc threads tell the owner */
    struct mail mail;
    enum note_kind kind;
    uint64_t bytes; /* counted in router.note_bytes; 0: a note of ours */
    struct request *request;
    struct peer *peer;
    uint64_t epoch;
    Tandem__Worker__V1__WorkerMessage *message;
    struct rpc_call *call; /* of the client, but for NOTE_REQUEST, _WORKER, _WORKER_GONE, _STOP */
    char text[256];        /* NOTE_REGISTER: address; NOTE_DRAIN: name; NOTE_EXPLAIN: label */
    uint32_t number;       /* NOTE_DRAIN, _PIN: ms; NOTE_EXPLAIN: how many */
    struct params *params; /* NOTE_PIN, _FLUSH: whose prompt, tenant and salt say which blocks */
};

struct router {
    struct router_options options;
    struct log log;
    struct clock clock;
    struct absence absence; /* of the owner thread */
    uint64_t incarnation, next_counter;
    struct model_config config;
    char model_name[128];
    struct tokenizer *tokenizer;
    struct chat_template *chat;
    struct rpc_server *rpc;
    struct metrics *metrics;
    struct metrics_set *counters;
    struct metrics_http *metrics_http;
    char metrics_address[64];
    struct faults *faults; /* NULL: none */
    struct audit *audit;   /* that runs; NULL: none */
    uint64_t next_audit;
    bool pairs_changed; /* workers came or went since they were told of one another */
    struct mailbox mailbox;
    _Atomic uint32_t n_notes;             /* of clients, in the mailbox */
    _Atomic uint64_t note_bytes, note_ns; /* note_ns: a note takes, of late */
    struct jobs *texts;                   /* threads that render and tokenize */
    _Atomic uint32_t n_texts;             /* calls handed to them and not yet answered, nor pushed to the mailbox */
    _Atomic bool stopping, forced;

    /* what the first worker said; compared with the others. rpc threads read max_context and block_tokens. */
    _Atomic uint32_t max_context, block_tokens;
    bool known;
    struct block_key fingerprint;
    struct kv_layout layout;
    char kv_codec[16]; /* lossy one of the stores that were last here: prefix keys are made of it; "": none */
    char numerics[32];
    struct served_adapter {
        char name[MAX_ADAPTER_NAME + 1];
        struct block_key fingerprint;
    } adapters[MAX_ADAPTERS];
    uint32_t n_adapters;
    pthread_mutex_t hello_lock; /* fingerprint, numerics, adapters: rpc threads read them */

    struct peer *peers[MAX_WORKERS];
    uint32_t n_peers;
    struct index *index;
    struct hot *hot;                        /* segments of prompts */
    struct request *placed[PLACED_BUCKETS]; /* by counter: every token of every step is looked up here */
    struct request *requests, *last_request;
    uint64_t queued_tokens;
    uint32_t n_queued, n_running, n_unsubmitted;
    uint64_t next_number; /* of requests */
    double demand_ms;     /* what is queued, as workers are told that others use, too */
    struct scheduler *scheduler;
    struct explain *explain;
    struct pin_list pinned;    /* prompts, for those that come or return */
    struct unpinned *unpinned; /* the latest, for those that were away then; NULL: none */
    bool ready;                /* requests are placed: the index is as whole as it can be */
    uint64_t next_unread_ns;   /* when to look for clients that do not read */
    uint64_t away_ns;          /* for which this process stood still, up to the latest look */
    uint64_t opened_ns,
        able_ns; /* able: when there last was a worker of each role that is needed; by router_patience() */
    struct retry_budget budget;
    struct metrics_set *replans[REPLAN_REASONS];
};

/* params.c: from the client's message; TD_ERR_INVALID or _UNSUPPORTED name the field */
enum td_status params_parse(struct router *r, const Tandem__V1__GenerateRequest *m, int64_t grpc_remaining_ms,
                            struct params *out, struct td_error *error_out);
/* TD_ERR_NOT_FOUND if a request names another model than the one that is served. */
enum td_status params_model(const struct router *r, ProtobufCBinaryData name, struct td_error *error_out);
/* Quick, before params_parse: TD_ERR_INVALID if the prompt has more bytes or ids than the context can hold. */
enum td_status params_fits(struct router *r, const Tandem__V1__GenerateRequest *m, struct td_error *error_out);
enum td_status params_text_fits(struct router *r, const char *field, size_t len_bytes, struct td_error *error_out);
enum td_status params_chat_fits(struct router *r, const Tandem__V1__ChatPrompt *chat, struct td_error *error_out);
uint32_t params_context(const struct router *r); /* tokens; the model's, before the first worker said its own */
void params_free(struct params *p);
struct params params_copy(const struct params *p); /* as it was when it came, all of it anew */
enum td_status params_chat(struct router *r, const Tandem__V1__ChatPrompt *chat, struct bytes *text_out,
                           struct td_error *error_out);

/* adapters.c: what the first worker said of adapters, and the others repeat */
void adapters_adopt(struct router *r, const Tandem__Worker__V1__WorkerHello *h); /* under hello_lock */
enum td_status adapters_check_hello(const Tandem__Worker__V1__WorkerHello *h, struct td_error *error_out);
enum td_status adapters_match(const struct router *r, const Tandem__Worker__V1__WorkerHello *h,
                              struct td_error *error_out);
/* TD_OK: p's adapter is served, or not known yet, or it asks for none. TD_ERR_NOT_FOUND tells which there are. Any thread. */
enum td_status adapters_ask(struct router *r, const struct params *p, struct td_error *error_out);
const struct served_adapter *adapters_served(const struct router *r, const struct params *p); /* owner; NULL: none */

/* api.c: the methods, on rpc threads */
extern const struct rpc_method ROUTER_METHODS[];
extern const uint32_t N_ROUTER_METHODS;
void router_answer_status(struct router *r, struct rpc_call *call);
/* Sends answer, or fails by status; gives the call up. */
void router_answer_simple(struct rpc_call *call, const ProtobufCMessage *answer, enum td_status status,
                          const struct td_error *e);

/* request.c: one request, owner thread. Any of these may end it. */
void request_free(struct request *q);
/* The request's id as one word for log lines. Returns out. */
const char *request_log_id(const struct request *q, char out[LOG_WORD_BYTES]);
void request_place(struct request *q, const struct plan *plan);
/* Off its workers and out of router.placed: what still comes under its id finds nobody. */
void request_unplace(struct request *q);
void request_drop(struct request *q); /* off all lists, freed; its call was finished before, or is gone */
void request_fail(struct request *q, enum rpc_code code, const char *text, uint32_t retry_after_ms);
void request_gone(struct request *q); /* the client left */
void request_token(struct request *q, struct peer *from, const Tandem__Worker__V1__Token *t);
void request_accepted(struct request *q);
void request_leg_end(struct request *q, struct peer *from, const Tandem__Worker__V1__LegEnd *end);
void request_peer_lost(struct request *q, struct peer *peer, enum replan_reason reason); /* or of no use any more */

/* place.c: what the scheduler decides */
enum td_status place_open(struct router *r, struct td_error *e);
enum plan_force place_forced(const struct router *r);
void place_queued(struct router *r);
void place_again(struct request *q); /* it was placed, and has its ids and tokens */

/* The keys of a prompt's full blocks, as workers name them: freed by the caller. Only when r->known. */
struct block_key *place_keys(struct router *r, const struct params *p, uint32_t *n_out, struct block_key *root_out);
/* The longest prefix that one worker or the stores have, in blocks. */
uint32_t place_cached(struct router *r, const struct block_key *keys, uint32_t n);

/* prefix.c: prompts that clients pin or flush; owner thread. These give the call up */
void prefix_pin(struct router *r, struct rpc_call *call, const struct params *p, uint32_t ttl_ms);
void prefix_flush(struct router *r, struct rpc_call *call, const struct params *p);
void prefix_flush_all(struct router *r, struct rpc_call *call);
void prefix_tell(struct peer *p); /* it is ready: what is pinned */
void prefix_told(struct peer *p,
                 const Tandem__Worker__V1__Pins *m); /* what it keeps, or what another router asked of it */
void prefix_tick(struct router *r, uint64_t now);
void prefix_close(struct router *r);

/* legs.c: what is sent to workers for a request, and what is counted on them */
void legs_send(struct request *q); /* by q->plan, under q->counter */
void legs_cancel(struct request *q);
void legs_release_prefill(struct request *q);
void legs_release_decode(struct request *q);
void legs_moved(struct request *q, double exposed_ms); /* what it decodes is there */
void legs_decoded(struct request *q);                  /* its decode leg is over; the other may not be */
void legs_prompt_computed(struct request *q);          /* its worker may take the next one */

/* choices.c; owner thread */
void choices_open(struct request *q);                     /* of a request that wants several */
void choices_begin(struct request *q);                    /* its prompt is where it decodes: the others follow */
bool choices_answered(struct request *q);                 /* true: the call is over */
bool choices_failed(struct request *q);                   /* true: the call has to be ended by an error, now */
void choices_leave(struct request *q);                    /* it is being freed */
void router_enqueue(struct router *r, struct request *q); /* router.c: a request that passed validation */

/* answer.c: what the client gets. True: the request is over and freed. */
bool answer_token(struct request *q, struct shown_token token); /* takes what it owns */
void answer_finish(struct request *q, bool length);             /* no token comes any more; length, or a stop id */
void answer_more(struct request *q); /* what found no room in the call's queue, or was kept to go with more */
double answer_ms(uint64_t ns);

/* replan.c: planned anew, with what was generated so far */
void replan_request(struct request *q, enum replan_reason reason, const char *text);
bool replan_wants_scores(const struct request *q);
void replan_blame(struct request *q, struct peer *p); /* p failed it */
void replan_tick(struct router *r, uint64_t now);     /* legs that nobody heard of, or that were forgotten */
void replan_times(struct request *q, bool lost);      /* what of q->now_ms counts goes into q->times_ms */
void replan_metrics(struct router *r);

/* pairs.c */
void pairs_tick(struct router *r); /* tells workers of one another */
void pairs_learn(struct peer *p, const Tandem__Worker__V1__Load *l);
uint32_t pairs_unreached(const struct peer *p,
                         ProtobufCBinaryData *names_out); /* room for as many as there are peers */

/* peer.c: one worker, owner thread but for callbacks */
struct peer *peer_open(struct router *r, const char *address, uint32_t holder);
/* It is there, says it itself. TD_ERR_NO_SPACE: too many already. */
enum td_status peer_register(struct router *r, const char *address, struct td_error *error_out);
enum td_status peer_drain(struct router *r, const char *name, uint32_t limit_ms, struct td_error *error_out);
void peer_disconnect(struct peer *p); /* for good: no mail of it comes afterwards; freed by the router */
void peer_message(struct peer *p, const Tandem__Worker__V1__WorkerMessage *m);
void peer_gone(struct peer *p, const char *why);
void peer_tick(struct peer *p, uint64_t now);
void peer_tell_demand(struct peer *p, double queued_ms); /* if other routers use it, and it was told something else */
void peer_send(struct peer *p, Tandem__Worker__V1__RouterMessage *m); /* numbers it */

bool peer_has_role(const struct router *r, enum worker_role role); /* somebody could do it */
bool peer_usable(const struct peer *p, uint64_t now);              /* for new work */
bool peer_lends(
    const struct peer *p);        /* a worker that others may ask for blocks of its pool: its engine answers them */
void peer_drains(struct peer *p); /* it refused a leg: it gets nothing more */
void peer_succeeded(struct peer *p);
void peer_failed(struct peer *p);

/* The time by which workers and clients are judged (base/absence.h). Breakers, budgets and the scheduler go by the clock. */
static inline uint64_t router_patience(struct router *r)
{
    return absence_now(&r->absence, 0);
}

bool can_serve(const struct router *r); /* there is one of each role that is needed */
struct note *note_new(enum note_kind kind);
struct request *router_find(struct router *r, const Tandem__Worker__V1__TransferId *id);

/* explain.c; owner thread */
struct explain *explain_open(void);
void explain_close(struct explain *x); /* NULL is fine */
void explain_note(struct request *q, const struct plan *plan, double retry_after_ms);
void explain_answer(struct router *r, struct rpc_call *call, const char *label, uint32_t last); /* gives the call up */

/* audit.c; owner thread */
void audit_start(struct router *r, struct rpc_call *call);
void audit_answered(struct peer *p, const Tandem__Worker__V1__Audit *m);
void audit_tick(struct router *r, uint64_t now);
void audit_drop(struct router *r); /* when stopping */
