/* What the files of router/ share. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "admin.pb-c.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/metrics.h"
#include "base/queue.h"
#include "model/chat.h"
#include "model/config.h"
#include "model/tokenizer.h"
#include "proto/rpc/rpc.h"
#include "proto/wire/events.h"
#include "proto/wire/kv_layout.h"
#include "router/router.h"
#include "sched/hot.h"
#include "sched/index.h"
#include "sched/policy.h"
#include "sched/ring.h"
#include "tandem.pb-c.h"
#include "worker.pb-c.h"

enum {
    MAX_STOP_STRINGS = 16,
    MAX_STOP_BYTES = 256,
    MAX_LABEL_BYTES = 64,
    MAX_WORKERS = INDEX_MAX_HOLDERS,
    MAX_STORES = 64, /* of which a leg is told */
    MAX_PROMPT_LOGPROBS = 65536,
};

#define ROUTER_METRICS(X)                                                                                              \
    X(ROUTER_ACCEPTED, METRIC_COUNTER, "tandem_requests_total", "requests that passed validation")                     \
    X(ROUTER_INVALID, METRIC_COUNTER, "tandem_requests_invalid_total", "requests refused at the door")                 \
    X(ROUTER_REFUSED, METRIC_COUNTER, "tandem_requests_refused_total", "requests refused by admission")                \
    X(ROUTER_FAILED, METRIC_COUNTER, "tandem_requests_failed_total", "requests that ended with an error")              \
    X(ROUTER_FINISHED, METRIC_COUNTER, "tandem_requests_finished_total", "requests answered in full")                  \
    X(ROUTER_CANCELLED, METRIC_COUNTER, "tandem_requests_cancelled_total", "requests whose client left")               \
    X(ROUTER_PROMPT_TOKENS, METRIC_COUNTER, "tandem_prompt_tokens_total", "prompt tokens of accepted requests")        \
    X(ROUTER_TOKENS, METRIC_COUNTER, "tandem_generation_tokens_total", "tokens sent to clients")                       \
    X(ROUTER_SPLIT, METRIC_COUNTER, "tandem_plans_split_total", "requests placed on two workers")                      \
    X(ROUTER_AGGREGATED, METRIC_COUNTER, "tandem_plans_aggregated_total", "requests placed on one worker")             \
    X(ROUTER_TTFT, METRIC_SECONDS, "tandem_time_to_first_token_seconds", "arrival to first token")                     \
    X(ROUTER_TPOT, METRIC_SECONDS, "tandem_time_per_output_token_seconds", "mean gap between tokens of a request")     \
    X(ROUTER_TTFT_ERROR, METRIC_SECONDS, "tandem_ttft_prediction_error_seconds", "|predicted - actual| first token")   \
    X(ROUTER_QUEUED, METRIC_GAUGE, "tandem_requests_queued", "requests waiting to be placed")                          \
    X(ROUTER_RUNNING, METRIC_GAUGE, "tandem_requests_running", "requests placed on workers")                           \
    X(ROUTER_INDEX_BLOCKS, METRIC_GAUGE, "tandem_index_blocks", "blocks in the prefix index")                          \
    X(ROUTER_INDEX_BYTES, METRIC_GAUGE, "tandem_index_bytes", "memory of the prefix index")                            \
    X(ROUTER_INDEX_DROPPED, METRIC_COUNTER, "tandem_index_dropped_total", "blocks that found no place in the index")   \
    X(ROUTER_INDEX_GAPS, METRIC_COUNTER, "tandem_index_gaps_total", "event gaps that made a snapshot necessary")
enum { METRICS_ENUM(ROUTER_METRICS) };

/* A client's request after validation; filled by the rpc thread that got it, then the owner's. */
struct params {
    uint32_t *ids, n_ids;
    Tandem__Worker__V1__SamplingParams sampling; /* arrays below */
    Tandem__Worker__V1__Bias *bias, **bias_list;
    uint32_t *stop_ids;
    struct bytes stop[MAX_STOP_STRINGS];
    uint32_t n_stop;
    uint32_t ttft_ms, tpot_ms;
    int32_t priority;
    int64_t remaining_ms; /* at arrival; INT64_MAX: none */
    struct bytes tenant, salt, label;
    bool want_ids, want_logprobs, want_prompt_logprobs, max_tokens_given;
};

enum request_state { REQUEST_QUEUED, REQUEST_PLACED, REQUEST_OVER };

struct shown_token {
    uint32_t id;
    float logprob;
    uint64_t text_start; /* offset in the whole text where what it adds begins */
};

enum { PLACED_BUCKETS = 4096 };

struct request {
    struct request *prev, *next; /* owner's list, in order of arrival */
    struct request *next_placed; /* in its bucket of router.placed */
    struct router *router;
    struct rpc_call *call;
    struct params p;
    struct block_key *keys, root;
    char kv_codec[16]; /* that root is made of */
    uint32_t n_keys;
    enum request_state state;
    struct plan plan;
    struct policy_request ask;
    struct peer *prefill, *decode; /* equal when aggregated; NULL when their leg is over */
    struct peer *placed_prefill, *placed_decode;
    char prefill_name[64], decode_name[64];
    uint64_t counter; /* of its transfer id */
    uint32_t reserved_pages, queued_tokens, hot_blocks;
    bool decode_accepted, prefill_done, alone; /* alone: no decode leg was sent */
    bool over, over_by_length;                 /* the decode leg ended before what the prefill leg has to tell came */

    struct token_stream *detok;
    struct bytes text; /* whole answer so far */
    uint64_t shown;    /* bytes of it that the client has */
    struct shown_token *tokens;
    uint32_t n_tokens, cap_tokens, n_told; /* n_told: given to the client */
    uint32_t n_held;                       /* arrived before the decode worker accepted */
    struct {
        uint32_t id;
        float logprob;
    } * held;
    uint64_t arrived_ns, tokenized_ns, placed_ns, first_token_ns, last_token_ns, stalled_ns;
    double times_ms[9]; /* enum part */
    uint32_t cached_worker, cached_peer, cached_dram, cached_ssd;
    float *prompt_logprobs;
    size_t n_prompt_logprobs;
};

enum part { PART_TOKENIZE, PART_QUEUE, PART_LOAD, PART_PREFILL, PART_TRANSFER, PART_EXPOSED, PART_WAIT, PART_DECODE };

enum peer_state { PEER_CONNECTING, PEER_READY, PEER_LOST, PEER_REFUSED };

struct peer { /* a worker or store; owner thread */
    struct router *router;
    uint32_t holder; /* in the index; its place in router.peers */
    char address[128];
    enum peer_state state;
    struct rpc_client *client;
    struct rpc_call *call;
    uint64_t epoch; /* of the call: mail of an older one is dropped */
    uint64_t retry_ns, heard_ns, next_event;
    uint32_t n_said, n_heard; /* messages of this call, each way */
    uint32_t unheard;         /* up to here the worker had not heard, at unheard_ns; 0 ns: it has heard all */
    uint64_t unheard_ns;
    enum worker_role role;
    char name[64], xfer_address[128], transport[64], why[256], kv_codec[16];
    uint32_t pid;
    uint64_t incarnation, weight_bytes;
    uint32_t n_pages, max_context, max_batch, chunk_tokens;
    struct kv_layout layout;
    bool snapshot_asked;
    Tandem__Worker__V1__Load load; /* the last one; transport copied above */
    uint32_t reserved_pages, running;
    uint64_t queued_tokens;
};

enum note_kind { NOTE_REQUEST, NOTE_REQUEST_GONE, NOTE_WORKER, NOTE_WORKER_GONE, NOTE_STATUS, NOTE_AUDIT, NOTE_STOP };

struct note { /* what rpc threads tell the owner */
    struct mail mail;
    enum note_kind kind;
    struct request *request;
    struct peer *peer;
    uint64_t epoch;
    Tandem__Worker__V1__WorkerMessage *message;
    struct rpc_call *call; /* NOTE_STATUS, NOTE_AUDIT; NOTE_REQUEST_GONE */
    char text[256];
};

struct router {
    struct router_options options;
    struct log log;
    struct clock clock;
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
    struct mailbox mailbox;
    _Atomic bool stopping, forced;

    /* what the first worker said; compared with the others. rpc threads read max_context and block_tokens. */
    _Atomic uint32_t max_context, block_tokens;
    bool known;
    struct block_key fingerprint;
    struct kv_layout layout;
    char kv_codec[16]; /* lossy one of the stores that were last here: prefix keys are made of it; "": none */
    char numerics[32];
    pthread_mutex_t hello_lock; /* fingerprint and numerics, for ListModels on rpc threads */

    struct peer *peers[MAX_WORKERS];
    uint32_t n_peers;
    struct index *index;
    struct hot *hot;                        /* segments of prompts */
    struct request *placed[PLACED_BUCKETS]; /* by counter: every token of every step is looked up here */
    struct request *requests, *last_request;
    uint64_t queued_tokens;
    uint32_t n_queued, n_running;
    bool replan; /* something changed that may let a queued request go */
};

/* params.c: from the client's message; TD_ERR_INVALID or _UNSUPPORTED name the field */
enum td_status params_parse(struct router *r, const Tandem__V1__GenerateRequest *m, int64_t grpc_remaining_ms,
                            struct params *out, struct td_error *error_out);
void params_free(struct params *p);
enum td_status params_chat(struct router *r, const Tandem__V1__ChatPrompt *chat, struct bytes *text_out,
                           struct td_error *error_out);

/* api.c: the methods, on rpc threads */
extern const struct rpc_method ROUTER_METHODS[];
extern const uint32_t N_ROUTER_METHODS;
void router_answer_status(struct router *r, struct rpc_call *call);

/* request.c: one request, owner thread */
void request_free(struct request *q);
void request_place(struct request *q, const struct plan *plan);
void request_fail(struct request *q, enum rpc_code code, const char *text, uint32_t retry_after_ms);
void request_gone(struct request *q); /* the client left */
void request_token(struct request *q, struct peer *from, const Tandem__Worker__V1__Token *t);
void request_accepted(struct request *q);
void request_leg_end(struct request *q, struct peer *from, const Tandem__Worker__V1__LegEnd *end);
void request_peer_lost(struct request *q, struct peer *peer);

/* peer.c: one worker, owner thread but for callbacks */
struct peer *peer_open(struct router *r, const char *address, uint32_t holder);
void peer_disconnect(struct peer *p); /* for good: no mail of it comes afterwards; freed by the router */
void peer_message(struct peer *p, const Tandem__Worker__V1__WorkerMessage *m);
void peer_gone(struct peer *p, const char *why);
void peer_tick(struct peer *p, uint64_t now);
void peer_send(struct peer *p, Tandem__Worker__V1__RouterMessage *m); /* numbers it */

struct note *note_new(enum note_kind kind);
struct request *router_find(struct router *r, const Tandem__Worker__V1__TransferId *id);

/* audit.c; owner thread */
void audit_start(struct router *r, struct rpc_call *call);
void audit_answered(struct peer *p, const Tandem__Worker__V1__Audit *m);
void audit_tick(struct router *r, uint64_t now);
void audit_drop(struct router *r); /* when stopping */
