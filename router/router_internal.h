/*
 * State and functions shared by the files of router/.
 *
 * Threads: everything belongs to the owner thread (router_run) unless marked otherwise. rpc and text threads
 * read the options, the model, the tokenizer and the atomics; they reach the owner only by notes in
 * router.mailbox.
 *
 * Ownership: the router owns its peers and requests. Functions that may free a request say so; their callers
 * must not touch it afterwards. Loops over router.requests read `next` before they act on a request. That is
 * safe because acting on one request frees no other one.
 */
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
#include "base/list.h"
#include "base/queue.h"
#include "base/secret.h"
#include "model/chat.h"
#include "model/config.h"
#include "model/reply.h"
#include "model/tokenizer.h"
#include "proto/rpc/rpc.h"
#include "proto/wire/events.h"
#include "proto/wire/kv_layout.h"
#include "router/keys.h"
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
#include "worker/proof.h"

enum {
    MAX_WORKERS = INDEX_MAX_HOLDERS,
    MAX_STORES = 64, /* stores named in one leg */
    MAX_PROMPT_LOGPROBS = 65536,
    MAX_PROMPT_SCORES = 1 << 18, /* scores of one prompt: at 9 bytes each they fit into one message */
    MAX_PIN_MS = 24 * 3600 * 1000,
};

#define ROUTER_METRICS(X)                                                                                              \
    X(ROUTER_ACCEPTED, METRIC_COUNTER, "tandem_requests_total", "requests that passed validation")                     \
    X(ROUTER_INVALID, METRIC_COUNTER, "tandem_requests_invalid_total", "requests refused at the door")                 \
    X(ROUTER_CALLS_REFUSED, METRIC_COUNTER, "tandem_calls_refused_total", "calls refused: --max-calls are open")       \
    X(ROUTER_CONNECTIONS, METRIC_GAUGE, "tandem_connections", "open connections of clients")                           \
    X(ROUTER_CONNECTIONS_REFUSED, METRIC_COUNTER, "tandem_connections_refused_total", "closed: --max-connections")     \
    X(ROUTER_CONNECTIONS_DROPPED, METRIC_COUNTER, "tandem_connections_dropped_total", "closed: silent or idle")        \
    X(ROUTER_NOTES_REFUSED, METRIC_COUNTER, "tandem_mailbox_refused_total", "calls refused: as many wait for a look")  \
    X(ROUTER_TEXTS_REFUSED, METRIC_COUNTER, "tandem_texts_refused_total", "calls refused: --text-bytes wait already")  \
    X(ROUTER_KEYLESS, METRIC_COUNTER, "tandem_calls_without_key_total", "calls refused: no API key that is known")     \
    X(ROUTER_RATED, METRIC_COUNTER, "tandem_requests_rated_total", "requests refused by the rates of their key")       \
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
    X(ROUTER_PAGES_USED, METRIC_GAUGE, "tandem_kv_pages_used_ratio", "share of all workers' pages that requests hold") \
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

/* Why a request is re-planned; the label of tandem_replans_total. */
enum replan_reason {
    REPLAN_LOST,     /* a worker is lost */
    REPLAN_TRANSFER, /* the KV did not arrive, or arrived damaged */
    REPLAN_REFUSED,  /* a worker refused the leg: it drains, or has no room */
    REPLAN_UNHEARD,  /* a worker did not acknowledge the leg in time, or has forgotten it */
    REPLAN_STALLED,  /* a worker sends heartbeats but makes no progress */
    REPLAN_FAILED,   /* any other failure of a worker */
    REPLAN_REASONS
};

enum { TRACE_BYTES = 56 }; /* a traceparent of W3C's Trace Context, version 00, with its end */

/*
 * A client's request after validation. Filled by an rpc or text thread, then handed over to the owner thread.
 */
struct params {
    /* The prompt (sampling.n_prompt ids), then the tokens generated before the last re-plan, or by a router
     * that was lost (n_resumed). */
    uint32_t *ids, n_ids, n_resumed;
    uint64_t resumed_bytes;                      /* of text that the client has got from that router, with the echo */
    Tandem__Worker__V1__SamplingParams sampling; /* points to the arrays below */
    Tandem__Worker__V1__Bias *bias, **bias_list;
    uint32_t *stop_ids, *allowed, *bad_lengths;
    struct token_ids bad; /* of bad words, one behind the other */
    struct bytes echo;    /* the prompt's text if it is to be shown before the answer */
    struct bytes stop[ASK_MAX_STOP_STRINGS];
    uint32_t n_stop;
    bool include_stop;
    double ttft_ms, tpot_ms; /* limits; 0: none */
    uint32_t n_choices;
    int32_t priority;
    uint32_t workflow_deadline_ms, workflow_steps_left; /* 0 ms: no workflow */
    int64_t remaining_ms;                               /* from arrival to its deadline; INT64_MAX: none */
    struct bytes tenant, salt, workflow;
    struct bytes label;      /* the request id; never empty */
    char trace[TRACE_BYTES]; /* the client's traceparent, or "" */
    struct bytes lora;       /* an adapter's name, or empty */
    struct bytes grammar; /* the text of what the answer must be, and its kind (grammar/grammar.h); empty: anything */
    uint32_t grammar_kind;
    struct api_key *key; /* whose request it is; NULL: no keys are asked for */
    json_t *tools;       /* functions that the answer may call; NULL: none */
    /* Reasoning and calls are told apart from text (parts.c); the prompt ends within reasoning. */
    bool wants_parts, begins_reasoning;
    bool is_strict; /* a grammar makes sure that calls are whole */
    bool want_ids, want_pieces, want_logprobs, want_prompt_logprobs, max_tokens_given, bypass_cache, skip_special;
};

enum request_state { REQUEST_QUEUED, REQUEST_PLACED, REQUEST_OVER };

struct shown_token {
    uint32_t id;
    float logprob;
    uint32_t n_top, *top_ids; /* the n_top likeliest tokens at this position; owned, as is top_logprobs */
    float *top_logprobs;
    uint64_t text_start; /* offset of this token's text in request.text */
};

enum { PLACED_BUCKETS = 4096, CALL_BUCKETS = 8192 };

/* Parts of a request's time, as legs report them. */
enum part { PART_QUEUE, PART_LOAD, PART_PREFILL, PART_TRANSFER, PART_EXPOSED, PART_WAIT, PART_DECODE, PARTS };

/*
 * The choices of one call (choices.c). Each choice is a request of its own. The first one runs alone until
 * its decode worker has the prompt's KV, or until it ends. Then the others start: they find the prompt in the
 * caches of both workers and share its full pages. The rest of the prompt they compute, and pull, into pages
 * of their own. Shared by the choices, freed with the last one.
 */
struct choices {
    uint32_t n_live, n_open; /* choices that are not freed; choices that are not answered in full */
    bool begun, failed;      /* the other choices were started; the call was ended by an error */
};

/* One request. Times in ns are by router.clock unless stated otherwise. */
struct request {
    TAILQ_ENTRY(request) in_router;
    LIST_ENTRY(request) in_calls; /* its bucket of router.calls */
    struct request *next_placed;  /* its bucket of router.placed; only in REQUEST_PLACED */
    struct router *router;
    struct rpc_call *call;   /* one reference; the choices of a call share the call */
    struct choices *choices; /* NULL: the call has only this choice */
    struct params p;
    struct block_key *keys, root; /* names of the n_keys full blocks of p.ids (owned); their root */
    char kv_codec[16];            /* the stores' codec when root was made; root depends on it */
    uint32_t n_keys;
    enum request_state state;
    struct plan plan;
    struct sched_request sched;
    bool is_counted; /* it is one of its key's open requests */
    bool submitted;  /* the scheduler knows it, so request_drop() calls scheduler_end() */
    uint32_t n_replans;

    /*
     * This placement: set by request_place(), valid in REQUEST_PLACED. prefill and decode are equal if one
     * worker does both phases. decode is NULL if the decode leg is over or was not sent. prefill stays when
     * its leg is over; it is NULL if that worker was lost later.
     */
    struct peer *prefill, *decode;
    struct peer *placed_prefill, *placed_decode; /* the workers of the plan, until request_unplace() */
    char prefill_name[64], decode_name[64];
    uint64_t counter; /* of its transfer id; new for each placement, so messages of an old one find nothing */
    /* Number of the message with the leg; 0: the worker has received it. */
    uint32_t prefill_said, decode_said;
    uint32_t prefill_leg, decode_leg; /* the same number, also after that; 0: there is no such leg */
    /* Leading blocks that are asked for often; tokens before this placement. */
    uint32_t hot_blocks, n_before;
    /* The decode worker has reserved, or need not; the prefill leg has ended; no decode leg was sent. */
    bool decode_accepted, prefill_done, alone;
    /* The decode leg has ended (by length), the prefill leg's end is on its way. */
    bool over, over_by_length;
    bool proven;                       /* the decode worker sent a token */
    bool scores;                       /* the answer is complete; this placement only scores the prompt */
    uint64_t begun_ns, begun_token_ns; /* when it was placed; when its first token came, 0: not yet */
    uint64_t said_ns;                  /* when its legs were sent, by router_patience() */
    double now_ms[PARTS];              /* times that its legs reported */
    uint32_t n_held;                   /* tokens that came before the decode worker had reserved */
    struct shown_token *held;          /* these tokens; owned */

    /* The answer, over all placements. */
    struct token_stream *detok;
    bool told_begin;     /* the client has the first message, with GenerateBegin */
    struct bytes text;   /* the whole answer so far */
    struct reply *reply; /* tells its parts apart; NULL: they are not */
    uint64_t fed;        /* bytes of text that the reply has */
    uint64_t shown;      /* bytes of text that were given to the client */
    uint32_t stopped_by; /* 1 + index of the stop string that ended the answer; 0: none */
    struct shown_token *tokens;
    uint32_t n_tokens, cap_tokens, n_told; /* n_told: tokens given to the client */
    /* placed_ns: first placement. */
    uint64_t arrived_ns, tokenized_ns, placed_ns, first_token_ns, last_token_ns;
    uint64_t stall_ns;      /* since when the client waits because of a lost placement; 0: it does not */
    double times_ms[PARTS]; /* sums over all placements that are over */
    double stalled_ms, predicted_ttft_ms, predicted_tpot_ms;
    bool cache_told, answered; /* the four counts below are set; the answer is complete */
    /*
     * Prompt tokens whose KV was found: in the worker's pool, in another worker's, in a store's DRAM, on its
     * SSD.
     */
    uint32_t cached_worker, cached_peer, cached_dram, cached_ssd;
    struct { /* scores of the prompt, laid out as in GenerateEnd; n 0: not there yet */
        float *logprobs, *top_logprobs;
        uint32_t *ranks, *top_ids;
        size_t n, n_top;
    } prompt;
};

/* PEER_GONE: the place is free for another worker or store, or for the same one if it comes back. */
enum peer_state { PEER_CONNECTING, PEER_READY, PEER_LOST, PEER_REFUSED, PEER_GONE };

/* What a heartbeat says of pages, work and stored blocks; Status shows it. */
struct peer_load {
    uint32_t free_pages, cached_pages, held_pages, leased_pages, quarantined_pages, total_pages;
    uint32_t running, waiting;
    uint64_t kv_bytes_in, kv_bytes_out;
    uint64_t store_blocks_dram, store_blocks_ssd, store_bytes_ssd;
};

/*
 * One worker or store. Owned by the router and freed only with it: notes of rpc threads point to it. When a
 * process goes for good, another one may take its place. Times in ns are by router_patience().
 */
struct peer {
    struct router *router;
    uint32_t holder; /* its number in the index, in router.peers and in the scheduler */
    char address[128];
    enum peer_state state;
    struct rpc_client *client;    /* owned; NULL after peer_disconnect() */
    struct rpc_call *call;        /* its stream, one reference; NULL: none */
    uint64_t epoch;               /* of the stream: notes with another epoch are dropped */
    uint64_t retry_ns, heard_ns;  /* when to connect again; when its last message came */
    uint64_t next_event;          /* number of the next block event */
    struct proof_said said;       /* by hello and challenge of this stream */
    bool is_proved;               /* it has proved the secret on this stream */
    bool is_passed_on;            /* somebody stands between: the worker is reached at another address */
    char reached[RPC_PEER_BYTES]; /* to what its last stream was made, IP:PORT; "" on a unix socket, or passed on */
    uint32_t n_floods;            /* streams that brought something else than a proof, since the last proof */
    uint32_t n_said, n_heard;     /* number of the last message sent, received on this stream */
    struct progress_acks hears;
    uint32_t heard; /* number of the last message that the worker has received, as it says */
    uint32_t taken; /* number of the last message that its engine has handled, as it says */
    uint64_t *legs; /* counters of the legs that the worker has, as it says; owned */
    uint32_t n_legs;
    bool legs_told; /* legs was updated since the last replan_tick() */
    bool stalled;   /* its heartbeats go on, its steps do not */
    struct progress progress;
    bool draining;     /* it takes no new work and will exit; outlives its streams, ends with its process */
    bool drained;      /* it has exited after draining, as far as we know */
    bool drain_asked;  /* an operator asked us to drain it: told on each of its streams */
    uint32_t drain_ms; /* the limit that was asked for; 0: its own */
    /* It came by itself: its place is freed when it has drained or was lost for FORGET_MS. */
    bool registered;
    uint64_t lost_ns; /* since when it is lost */
    /* An attempt to connect has ended; a whole snapshot of its blocks came on this stream. */
    bool tried, whole;
    struct breaker breaker;
    /* 1 + holder of the other side in its latest failed transfer; 0: none since a success. */
    uint32_t failed_with;
    uint64_t probe; /* counter of the one request that tries it while its breaker is PROBING; 0: none */
    struct metrics_set *counters;
    enum worker_role role;
    char name[64], xfer_address[128], transport[64], why[256], kv_codec[16];
    uint32_t pid;
    uint64_t incarnation, weight_bytes;
    uint32_t n_pages, max_context, max_batch, chunk_tokens;
    struct kv_layout layout;
    bool snapshot_asked;   /* a snapshot of its blocks is on its way */
    uint32_t n_unreached;  /* peers that it may read from and can't connect to, as it says */
    uint64_t peers_told;   /* hash of the addresses that it was told on this stream; 0: none */
    bool is_shared;        /* other routers use it, too */
    uint32_t n_attached;   /* routers that use it, this one included; 0: not told */
    double told_ms;        /* work queued at this router, as it was last told */
    struct peer_load load; /* of its last heartbeat */
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

/* A message from an rpc or text thread to the owner thread, which frees it and what it points to. */
struct note {
    struct mail mail; /* first member: take_mail() casts */
    enum note_kind kind;
    uint64_t bytes;          /* its part of router.note_bytes; 0: it is not from a client and not counted */
    struct request *request; /* NOTE_REQUEST */
    struct peer *peer;       /* NOTE_WORKER, _WORKER_GONE; borrowed */
    uint64_t epoch;          /* NOTE_WORKER, _WORKER_GONE: peer.epoch of the stream */
    Tandem__Worker__V1__WorkerMessage *message; /* NOTE_WORKER */
    struct rpc_call *call;  /* the client's, a reference; not for NOTE_REQUEST, _WORKER, _WORKER_GONE, _STOP */
    char text[256];         /* NOTE_REGISTER: address; _DRAIN: name; _EXPLAIN: label; _WORKER_GONE: why */
    uint32_t number;        /* NOTE_DRAIN, _PIN: ms; NOTE_EXPLAIN: how many decisions */
    struct proof_said said; /* NOTE_REGISTER: of the call, for its answer */
    struct params *params;  /* NOTE_PIN, _FLUSH: its prompt, tenant and salt name the blocks */
};

struct router {
    struct router_options options;
    struct log log;
    struct clock clock;
    /* Times in which the owner thread, or those that read from workers, did not run: router_patience(). */
    struct absence absence;
    struct rpc_echo *echo;
    uint64_t incarnation, next_counter;
    struct model_config config;
    char model_name[128];
    struct tokenizer *tokenizer;
    struct chat_template *chat;
    /* How answers to chats tell their parts (parts.c). Special tokens that are marks: of reasoning, then of
     * calls. */
    const struct convention *convention; /* NULL: no calls of functions */
    bool has_reasoning;
    uint32_t *marks, n_reasoning_marks, n_marks, cap_marks;
    struct rpc_tls_files client_tls; /* of --listen */
    struct api_keys *keys;           /* NULL: clients need none */
    struct secret *secret;
    char *secret_text; /* the one that signed at the start; names of blocks depend on it without a cache key */
    uint8_t join_key[SECRET_NONCE_BYTES];     /* for the nonces of Join */
    struct rpc_server *rpc, *admin, *cluster; /* clients; operators, workers that register: NULL: none */
    struct metrics *metrics;
    struct metrics_set *counters;
    struct metrics_http *metrics_http;
    char metrics_address[64];
    struct faults *faults; /* NULL: none */
    struct audit *audit;   /* the audit that runs; NULL: none */
    uint64_t next_audit;   /* number of the latest audit */
    bool pairs_changed;    /* a peer came or went since pairs_tick() told workers about one another */
    struct mailbox mailbox;
    _Atomic uint32_t n_notes;             /* clients' notes in the mailbox */
    _Atomic uint64_t note_bytes, note_ns; /* bytes of these notes; recent mean time to handle a note */
    struct jobs *texts;                   /* text threads: they render and tokenize */
    /* Calls at the text threads: neither answered nor in the mailbox yet. */
    _Atomic uint32_t n_texts;
    _Atomic bool stopping, forced; /* router_stop() was called; it was called twice */

    /* What the first worker said; all others must agree. Any thread reads max_context and block_tokens. */
    /* The smallest context of all workers. 0: no worker came yet. */
    _Atomic uint32_t max_context, block_tokens;
    bool known; /* the first worker came */
    struct block_key fingerprint;
    struct kv_layout layout;
    char kv_codec[16]; /* lossy codec of the latest store; prefix keys depend on it. "": none, or lossless */
    char numerics[32];
    struct served_adapter {
        char name[MAX_ADAPTER_NAME + 1];
        struct block_key fingerprint;
    } adapters[MAX_ADAPTERS];
    uint32_t n_adapters;
    /* For fingerprint, numerics and adapters: the owner writes them once, other threads read them. */
    pthread_mutex_t hello_lock;

    struct peer *peers[MAX_WORKERS];
    uint32_t n_peers;
    struct index *index;
    struct hot *hot; /* how often segments of prompts are asked for */
    /* Hash table by counter, since every token looks up its request. */
    struct request *placed[PLACED_BUCKETS];
    TAILQ_HEAD(, request) requests; /* all requests in order of arrival; owned */
    /* The same ones, a hash table by call: clients may leave by the thousand. */
    LIST_HEAD(, request) calls[CALL_BUCKETS];
    uint64_t queued_tokens; /* tokens of the requests in REQUEST_QUEUED */
    /* Requests in REQUEST_QUEUED; in REQUEST_PLACED; in REQUEST_QUEUED and not yet known to the scheduler. */
    uint32_t n_queued, n_running, n_unsubmitted;
    uint64_t next_number; /* number of the latest submitted request */
    double demand_ms;     /* work queued here, as workers with other routers are told */
    struct scheduler *scheduler;
    struct explain *explain;
    struct pin_list pinned;    /* pinned prompts; workers and stores are told when they connect */
    struct unpinned *unpinned; /* pins that ended early, for peers that were away then; NULL: none */
    /* Requests are placed: all peers told their blocks, or had time to (settled()). */
    bool ready;
    uint64_t next_tick_ns;   /* when tick() runs next */
    uint64_t next_unread_ns; /* when to look next for clients that do not read */
    uint64_t away_ns;        /* absence.away_ns at the latest such look */
    /* When the router started; when router_can_serve() was last true. By router_patience(). */
    uint64_t opened_ns, able_ns;
    struct retry_budget budget;
    struct metrics_set *replans[REPLAN_REASONS];
};

/*
 * params.c; any thread. Builds params from a client's message; TD_ERR_INVALID and _UNSUPPORTED name the
 * field.
 */
enum td_status params_parse(struct router *r, const Tandem__V1__GenerateRequest *m, int64_t grpc_remaining_ms,
                            struct params *out, struct td_error *error_out);
/* TD_ERR_NOT_FOUND if the request names a model that is not served. An adapter is a model, too. */
enum td_status params_model(struct router *r, ProtobufCBinaryData name, struct td_error *error_out);
/*
 * A quick check before params_parse(): TD_ERR_INVALID if the prompt has more bytes or ids than the context
 * can hold.
 */
enum td_status params_fits(struct router *r, const Tandem__V1__GenerateRequest *m, struct td_error *error_out);
enum td_status params_text_fits(struct router *r, const char *field, size_t len_bytes, struct td_error *error_out);
enum td_status params_chat_fits(struct router *r, const Tandem__V1__ChatPrompt *chat, struct td_error *error_out);
/* Longest context in tokens: of the workers; of the model before a worker came. */
uint32_t params_context(const struct router *r);
void params_free(struct params *p);
/* A deep copy of the original request: without tokens generated since. */
struct params params_copy(const struct params *p);
/* *tools_out: the functions that the chat offers, which the caller owns, or NULL; tools_out may be NULL. */
enum td_status params_chat(struct router *r, const Tandem__V1__ChatPrompt *chat, struct bytes *text_out,
                           json_t **tools_out, struct td_error *error_out);

/* adapters.c: the adapters that the first worker named; all other workers must name the same. */
void adapters_adopt(struct router *r, const Tandem__Worker__V1__WorkerHello *h); /* caller holds hello_lock */
enum td_status adapters_check_hello(const Tandem__Worker__V1__WorkerHello *h, struct td_error *error_out);
enum td_status adapters_match(const struct router *r, const Tandem__Worker__V1__WorkerHello *h,
                              struct td_error *error_out);
/*
 * TD_ERR_NOT_FOUND, with the names that exist: p's adapter is not served. TD_OK also before a worker came.
 * Any thread.
 */
enum td_status adapters_ask(struct router *r, const struct params *p, struct td_error *error_out);
/* Whether an adapter of this name is served; false before a worker came. Any thread. */
bool adapters_has(struct router *r, ProtobufCBinaryData name);
/* Owner thread. The adapter that p asks for; NULL: p asks for none. */
const struct served_adapter *adapters_served(const struct router *r, const struct params *p);

/*
 * router.c. One turn of router_run(), for its thread: all mail, what time makes due, and placing. Never
 * waits. Tests call it instead of router_run().
 */
void router_turn(struct router *r);

/* api.c: the methods of the client API, on rpc threads. */
extern const struct rpc_method ROUTER_METHODS[];
extern const uint32_t N_ROUTER_METHODS;
/* What all methods share: the router becomes the call's user; a note that is handed to the owner thread, or
 * refused if too much waits; an end that concerns nobody. */
void api_on_open(struct rpc_call *call, void *router);
void api_tell_owner(struct router *r, struct note *note, struct rpc_call *call, uint64_t bytes);
void api_on_end(struct rpc_call *call, enum rpc_code code, const char *text);

/* admin.c: the methods of the admin and of the cluster listener, on rpc threads; both listeners. */
extern const struct rpc_method ADMIN_METHODS[];
extern const uint32_t N_ADMIN_METHODS;
extern const struct rpc_method ADMIN_JOIN_METHODS[1];
/* Opens the listeners that the options ask for. The client API must be open. */
enum td_status admin_open(struct router *r, struct td_error *error_out);
/* Owner thread. The first and the last answer a call; admin_register() releases the note's. */
void admin_answer_status(struct router *r, struct rpc_call *call);
void admin_register(struct router *r, struct note *n);
/* Ends the call with the answer, or with the error; releases the caller's reference. */
void router_answer_simple(struct rpc_call *call, const ProtobufCMessage *answer, enum td_status status,
                          const struct td_error *e);

/* request.c: one request. All of these may free q, except request_place(), request_unplace() and
 * request_log_id(). */
void request_free(struct request *q); /* only if it is on no list */
/* Ends a request that is on no list yet with RESOURCE_EXHAUSTED, and frees it. Any thread. */
void request_refuse(struct request *q, const char *text, uint32_t retry_after_ms);
/* Writes the request's id as one word for log lines. Returns out. Any thread. */
const char *request_log_id(const struct request *q, char out[LOG_WORD_BYTES]);
void request_place(struct request *q, const struct plan *plan);
/* Cancels its legs and takes it out of router.placed: messages with its old counter find nothing any more. */
void request_unplace(struct request *q);
void request_drop(struct request *q); /* off all lists, and freed. Its call is finished already, or shared */
void request_fail(struct request *q, enum rpc_code code, const char *text, uint32_t retry_after_ms);
void request_gone(struct request *q); /* the client left */
void request_token(struct request *q, struct peer *from, const Tandem__Worker__V1__Token *t);
void request_accepted(struct request *q); /* the decode worker has reserved */
void request_leg_end(struct request *q, struct peer *from, const Tandem__Worker__V1__LegEnd *end);
/* peer is lost or stalled: if q still needs it, q is re-planned. */
void request_peer_lost(struct request *q, struct peer *peer, enum replan_reason reason);

/* place.c: between requests and the scheduler. */
enum td_status place_open(struct router *r, struct td_error *e);
enum plan_force place_forced(const struct router *r);
/* Submits new requests and runs a pass; fails all queued requests if no worker came for gone_ms. */
void place_queued(struct router *r);
/* Queues a re-planned request; its ids contain its tokens. */
void place_again(struct request *q);

/* The names of a prompt's full blocks; the caller frees them. Only when r->known. */
struct block_key *place_keys(struct router *r, const struct params *p, uint32_t *n_out, struct block_key *root_out);
/* The longest prefix, in blocks, that one worker has or that the stores have together. */
uint32_t place_cached(struct router *r, const struct block_key *keys, uint32_t n);

/*
 * prefix.c: prompts that clients pin or flush. The first three end the call and release the caller's
 * reference.
 */
void prefix_pin(struct router *r, struct rpc_call *call, const struct params *p, uint32_t ttl_ms);
void prefix_flush(struct router *r, struct rpc_call *call, const struct params *p);
void prefix_flush_all(struct router *r, struct rpc_call *call);
void prefix_tell(struct peer *p); /* p became ready: tells it all pins */
/* p says what it pins, or what another router asked it to pin. */
void prefix_told(struct peer *p, const Tandem__Worker__V1__Pins *m);
void prefix_tick(struct router *r, uint64_t now);
void prefix_close(struct router *r);

/* dispatch.c: messages to workers about a request's legs, and its room on them. None frees q. */
void dispatch_send(struct request *q); /* sends the legs of q->plan under q->counter */
void dispatch_cancel(struct request *q);
void dispatch_release_prefill(struct request *q);
void dispatch_release_decode(struct request *q);
void dispatch_moved(struct request *q, double exposed_ms); /* its KV is on the decode worker */
/* Its decode leg is over; its prefill leg may still run. */
void dispatch_decoded(struct request *q);
void dispatch_prompt_computed(struct request *q); /* its prefill worker may take the next prompt */

/* choices.c */
void choices_open(struct request *q);  /* before router_enqueue(), if the call wants several choices */
void choices_begin(struct request *q); /* starts the other choices, once: they find the prompt's KV */
/* Q is answered. True: it was the last one, the caller ends the call. */
bool choices_answered(struct request *q);
bool choices_is_first(const struct request *q); /* of its call; a choice that is resumed is the only one */
bool choices_failed(struct request *q);         /* q failed. True: it is the first one, the caller ends the call */
void choices_leave(struct request *q);          /* q is being freed */
/* router.c: takes a request that passed validation into router.requests. */
void router_enqueue(struct router *r, struct request *q);
/* The client of the call left: all its choices are dropped. */
void router_call_gone(struct router *r, const struct rpc_call *call);

/* parts.c: text, reasoning and calls of an answer. */
enum { PART_ID_BYTES = 10 };
struct part_call {
    Tandem__V1__ToolCall m;
    char id[PART_ID_BYTES];
};
struct parts { /* what a message points to */
    struct part_call *calls;
    Tandem__V1__ToolCall **list;
};
void parts_open(struct router *r);   /* once, after the template and the tokenizer */
void parts_begin(struct request *q); /* opens what makes text of its tokens */
/* Goes on behind `bytes` that another router has told. *shown_out: bytes of q->text. False: it told
 * others. */
bool parts_resume(struct request *q, uint64_t bytes, uint64_t *shown_out);
/* Sets what text [q->shown, upto) tells; is_over: and what was held back. Then parts_free(), with whether it
 * was sent; if not, the next message has it. */
void parts_fill(struct request *q, uint64_t upto, bool is_over, Tandem__V1__GenerateResponse *m, struct parts *parts);
void parts_free(struct request *q, struct parts *parts, bool was_sent);

/* answer.c: what the client gets. */
/* Takes the tokens that another router sent (p.n_resumed), so that the answer goes on after them. Any thread.
 * TD_ERR_INVALID: they do not make the text that the client says it has. */
enum td_status answer_resume(struct request *q, struct td_error *e);
/* Adds a token, whose arrays it takes. True: the request is over and freed. */
bool answer_token(struct request *q, struct shown_token token);
/* Ends the answer, by length or by a stop, and frees q. */
void answer_finish(struct request *q, bool length);
/* Sends what found no room in the call's queue, or was kept back to fill a message. */
void answer_more(struct request *q);
double answer_ms(uint64_t ns);

/* replan.c: re-plans with the tokens generated so far. */
void replan_request(struct request *q, enum replan_reason reason, const char *text); /* may free q */
/* If q, queued with tokens of another router, is complete: it ends, or only scores its prompt. May free q. */
void replan_resumed(struct request *q);
bool replan_wants_scores(const struct request *q);    /* the client wants prompt scores and has none yet */
void replan_blame(struct request *q, struct peer *p); /* p failed q: q avoids it, its breaker counts it */
/* re-plans legs that are not acknowledged or forgotten. */
void replan_tick(struct router *r, uint64_t now);
void replan_times(struct request *q, bool lost); /* ends a placement: adds its now_ms to times_ms */
void replan_metrics(struct router *r);

/* pairs.c: which worker can read from which. */
void pairs_tick(struct router *r); /* tells workers about one another after a change */
void pairs_learn(struct peer *p, const Tandem__Worker__V1__Load *l);
/*
 * Names of peers that p can't connect to. names_out: room for router.n_peers; borrowed names. Returns how
 * many.
 */
uint32_t pairs_unreached(const struct peer *p, ProtobufCBinaryData *names_out);

/* peer.c: one worker or store. */
/* NULL: the address can't be used. The router frees it. */
struct peer *peer_open(struct router *r, const char *address, uint32_t holder);
/* A process says that it is at this address. TD_ERR_NO_SPACE: no place is left. Known addresses are TD_OK. */
enum td_status peer_register(struct router *r, const char *address, struct td_error *error_out);
enum td_status peer_drain(struct router *r, const char *name, uint32_t limit_ms, struct td_error *error_out);
/* For good, before the router frees it; its notes are dropped from now on. */
void peer_disconnect(struct peer *p);
void peer_message(struct peer *p, const Tandem__Worker__V1__WorkerMessage *m);
void peer_gone(struct peer *p, const char *why); /* its stream has ended */
void peer_tick(struct peer *p, uint64_t now);    /* now: router_patience() */
/* If other routers use it and it was told another value. */
void peer_tell_demand(struct peer *p, double queued_ms);
void peer_send(struct peer *p, Tandem__Worker__V1__RouterMessage *m); /* sets m->number */
/* Number of the last message that gRPC has. No worker is blamed for those that wait here; it is for one that
 * its side does not take. */
uint32_t peer_n_sent(const struct peer *p);

bool peer_has_role(const struct router *r, enum worker_role role); /* a peer of the role can take work */
/* It may get new work; now: by the clock. */
bool peer_usable(const struct peer *p, uint64_t now);
/* It is a worker from whose pool other workers may fetch blocks. */
bool peer_lends(const struct peer *p);
void peer_drains(struct peer *p);    /* it gets no new work from now on */
void peer_succeeded(struct peer *p); /* a leg went well: for the breaker */
void peer_failed(struct peer *p);    /* a leg failed: for the breaker */

/*
 * The time for judging silence and slowness (base/absence.h). Breakers, budgets and the scheduler use the
 * clock.
 */
static inline uint64_t router_patience(struct router *r)
{
    return absence_now(&r->absence, 0);
}

bool router_can_serve(const struct router *r); /* the workers that are there allow a plan */
struct note *note_new(enum note_kind kind);
/* The placed request with this transfer id; NULL: none, as for ids of earlier placements. */
struct request *router_find(struct router *r, const Tandem__Worker__V1__TransferId *id);

/* explain.c: the log of recent decisions. */
struct explain *explain_open(void);
void explain_close(struct explain *x); /* NULL is fine */
void explain_note(struct request *q, const struct plan *plan, double retry_after_ms);
/* Ends the call and releases the caller's reference. */
void explain_answer(struct router *r, struct rpc_call *call, const char *label, uint32_t last);

/* audit.c */
void audit_start(struct router *r, struct rpc_call *call);
void audit_answered(struct peer *p, const Tandem__Worker__V1__Audit *m);
void audit_tick(struct router *r, uint64_t now);
void audit_drop(struct router *r); /* ends a running audit when the router stops */
