/*
 * Inside of the gateway.
 *
 *     http_server --on_request--> routes.c --table--> a gw_api (below): body -> gw_task with gw_calls
 *                                                          |
 *     client <-- http_write -- gw_api.delta <-- task.c <-- gw_try (one for each prompt) -- upstream.c
 *
 * A call that loses its router goes on at another one: before the first message it is sent again, after it
 * each choice that is not over is resumed by itself.
 *
 * A task is one HTTP request. It owns its calls and its http_conn, from gw_task_run() until task.c has given
 * the last answer. Calls of one task end on different rpc threads, so a task has a lock.
 *
 * Order of locks: a task's, then a connection's (http_server.h), then a call's (rpc.h). http_server calls
 * on_gone and on_drained under the connection's lock, so they take no task's lock.
 */
#pragma once

#include <jansson.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/metrics.h"
#include "base/ticker.h"
#include "gateway/gateway.h"
#include "gateway/http_server.h"
#include "proto/ask/ask_bounds.h"
#include "proto/ask/ask_calls.h"
#include "proto/ask/ask_message.h"
#include "proto/ask/ask_text.h"
#include "tandem.pb-c.h"

enum { GW_ROUTERS_MOST = 16, GW_TRIES_MOST = 4, GW_ID_BYTES = ASK_MAX_LABEL_BYTES + 1, GW_ERROR_BYTES = 1024 };

#define GW_METRICS(X)                                                                                                  \
    X(GW_REQUESTS, METRIC_COUNTER, "tandem_gateway_requests_total", "requests that were read whole")                   \
    X(GW_REFUSED, METRIC_COUNTER, "tandem_gateway_refused_total", "requests answered with a status of 400 or above")   \
    X(GW_UNREAD, METRIC_COUNTER, "tandem_gateway_unread_total", "requests refused before they were whole, and checks") \
    X(GW_HELD, METRIC_COUNTER, "tandem_gateway_held_total", "times that a call waited for a client that reads slowly") \
    X(GW_RETRIED, METRIC_COUNTER, "tandem_gateway_retried_total", "calls begun again at another router")               \
    X(GW_RESUMED, METRIC_COUNTER, "tandem_gateway_resumed_total", "choices that another router went on with")          \
    X(GW_GONE, METRIC_COUNTER, "tandem_gateway_gone_total", "clients that left while their request was under way")     \
    X(GW_STALLED, METRIC_COUNTER, "tandem_gateway_stalled_total", "clients cut off because they took nothing")         \
    X(GW_RUNNING, METRIC_GAUGE, "tandem_gateway_running", "requests under way")                                        \
    X(GW_CONNECTIONS, METRIC_GAUGE, "tandem_gateway_connections", "open connections")                                  \
    X(GW_ROUTERS, METRIC_GAUGE, "tandem_gateway_routers_serving", "routers that serve")
enum { METRICS_ENUM(GW_METRICS) };

/* ----------------------------------------------------------------- routers */

struct gw_router {
    char *address;
    struct rpc_client *client;
    atomic_bool is_serving;   /* as it said last */
    atomic_uint n_calls;      /* under way from here */
    _Atomic uint64_t lost_ns; /* when a call found it unreachable; 0: never */
};

struct gateway {
    struct gateway_options options;
    struct log log;
    struct clock clock;
    struct http_server *http;
    struct metrics *metrics;
    struct metrics_set *counters;
    struct metrics_http *metrics_http;
    struct ticker *ticker;
    struct gw_router routers[GW_ROUTERS_MOST];
    uint32_t n_routers;
    atomic_uint n_tasks, n_stops;
    atomic_uint next_router;
    pthread_mutex_t lock; /* for the wait of gateway_run() only */
    pthread_cond_t changed;
};

enum td_status gw_upstream_open(struct gateway *g, struct td_error *error_out);
void gw_upstream_close(struct gateway *g);
void gw_upstream_tick(struct gateway *g); /* asks the routers whether they serve */
uint32_t gw_upstream_serving(const struct gateway *g);
/* TD_ERR_INVALID: a router answers without an API key, or can't be asked. Blocks. */
enum td_status gw_upstream_asks_keys(struct gateway *g, struct td_error *error_out);
/* A router that is not in `tried` (bits): one that serves rather than one that does not, and of equals the
 * one with the fewest calls. NULL: all were tried. */
struct gw_router *gw_upstream_pick(struct gateway *g, uint32_t tried);
static inline uint32_t gw_upstream_bit(const struct gateway *g, const struct gw_router *r)
{
    return 1u << (r - g->routers);
}

/* ------------------------------------------------------------------ errors */

/* Appends the body of an error, in the shape of the API to which the target belongs (as
 * http_server_config.describe). text: "member: what is wrong", or anything else. */
void gw_error_body(const char *target, int status, const char *text, struct bytes *out);
int gw_error_status(enum rpc_code code);
/* Answers with an error. headers: further lines; retry_after_ms: 0: coming back would not help. */
void gw_error_answer(struct gateway *g, struct http_conn *conn, int status, const char *text, const char *headers,
                     uint32_t retry_after_ms);

/* ------------------------------------------------------------------- tasks */

struct gw_task;

struct gw_choice {
    struct bytes text, reasoning; /* of an answer that is not streamed */
    json_t *calls;                /* the same: list of {"id", "name", "arguments"}; NULL: none */
    Tandem__V1__GenerateEnd *end; /* of such an answer */
    bool is_over;
    uint64_t n_bytes;  /* that came, as Resume counts them */
    uint64_t n_chars;  /* of tokens whose scores were shown */
    json_t *scores;    /* of an answer that is not streamed, if they are wanted (scores.h) */
    uint32_t n_tokens; /* that came */
    /* The ids of these tokens; only where another router could go on after them. */
    uint32_t *ids, n_ids, cap_ids;
};

/* A call at a router, for all choices or, after a router was lost, for one of them. */
struct gw_try {
    struct gw_call *call;
    struct gw_router *router;
    _Atomic(struct rpc_call *) rpc; /* on_gone and on_drained look at it without a lock; freed with the task */
    uint32_t first, n_choices;
    uint32_t tried; /* bits: routers that these choices were sent to since the last message */
};

struct gw_call {
    struct gw_task *task;
    uint32_t number; /* of the prompt in its request */
    /* For another router: kept until the first message, or to the end if a router could go on (resume). */
    ProtobufCMessage *request;
    struct gw_try *tries; /* n_choices of the task * GW_TRIES_MOST */
    uint32_t n_tries;
    bool has_answer;
    uint32_t prompt_tokens;     /* 0: not known yet */
    ProtobufCMessage *response; /* of a unary call */
    struct gw_choice choices[ASK_MAX_CHOICES];
};

/* Whether the answer was cut off by max_tokens. end: NULL: it goes on. */
static inline bool gw_is_cut(const Tandem__V1__GenerateEnd *end)
{
    return end && end->finish_reason.len == 6 && !memcmp(end->finish_reason.data, "length", 6);
}

/* Whether the answer ended by calling functions. */
static inline bool gw_calls(const Tandem__V1__GenerateEnd *end)
{
    return end && end->finish_reason.len == 10 && !memcmp(end->finish_reason.data, "tool_calls", 10);
}

/* How one of the HTTP APIs (openai.c, responses.c, anthropic.c, plain.c) says what a task has got. delta runs
 * under the task's lock; the others run while no call of the task is under way. */
struct gw_api {
    const char *path;
    const char *rpc; /* the method of tandem.v1.Tandem that is called */
    const ProtobufCMessageDescriptor *response;
    /* Makes the task's calls out of the request. body is NULL for GET. error_out begins with the member. */
    enum td_status (*read)(struct gw_task *t, json_t *body, struct td_error *error_out);
    /* A stream's events for a message. The end of a choice is in it, too. */
    void (*delta)(struct gw_task *t, struct gw_call *call, const Tandem__V1__GenerateResponse *m, struct bytes *out);
    void (*end)(struct gw_task *t, struct bytes *out);   /* the last events of a stream */
    void (*whole)(struct gw_task *t, struct bytes *out); /* the body of an answer that is not streamed */
    const char *error_event;                             /* what the event of an error begins with; NULL: nothing */
};

/* What of an answer a stream is saying, where the parts of an answer follow each other. */
enum gw_part { GW_NOTHING, GW_TEXT, GW_REASONING, GW_FUNCTION };

struct gw_member;

struct gw_task {
    struct gateway *g;
    struct http_conn *conn;
    const struct gw_api *api;
    char id[GW_ID_BYTES]; /* of the request: the client's, or made here; also in headers */
    char *authorization;  /* header for the router; NULL: none */
    char *traceparent;    /* the same */
    char *headers;        /* further header lines of the answer */
    int64_t created_s;
    uint64_t began_ns;
    const struct gw_member *members; /* the table by which the request was read; NULL: it has none */
    char *model;                     /* as the request named it; NULL: it did not, and no answer came yet */
    struct bytes prefix;             /* what every event of a stream begins with; empty before the first */
    bool is_stream, wants_usage, wants_usage_each, is_chat, wants_scores, wants_prompt_scores, wants_prompt_list,
        shows_reasoning;
    uint32_t n_top;        /* likeliest tokens beside each scored token */
    uint32_t n_prompt_top; /* the same for wants_prompt_list */
    uint32_t n_choices;    /* for each prompt */
    struct gw_call *calls;
    uint32_t n_calls;
    atomic_bool is_gone;  /* the client */
    pthread_mutex_t lock; /* guards the rest: calls end on different threads */
    uint32_t n_left;      /* calls that are not over */
    bool has_begun;       /* the stream */
    uint64_t started;     /* bits: choices whose first event was sent */
    uint64_t n_events;    /* of a stream whose events have numbers */
    enum gw_part part;    /* of a stream: what it is saying, and how many parts it has begun */
    uint32_t n_parts;
    json_t *parts; /* the parts that are over, where a stream's last event repeats them */
    uint64_t prompt_tokens, completion_tokens, cached_tokens;
    enum rpc_code code; /* RPC_OK: nothing has failed */
    int status;         /* of gw_task_fail(); 0: none */
    uint32_t retry_after_ms;
    char why[GW_ERROR_BYTES];
    struct bytes events; /* scratch */
};

/* Makes n calls of the task, for read(). */
void gw_task_calls(struct gw_task *t, uint32_t n);
/* ask: a request in the names of proto/ask/ask_params.h, for call i. */
enum td_status gw_task_ask(struct gw_task *t, uint32_t i, json_t *ask, struct td_error *error_out);
/* The call is Tokenize, of the prompt of m. */
void gw_task_tokenize(struct gw_task *t, const Tandem__V1__GenerateRequest *m);
void gw_task_request(struct gw_task *t, uint32_t i, const ProtobufCMessage *request); /* copied */
/* Reads the request and starts the calls, or answers with an error. Takes over conn. */
void gw_task_run(struct gateway *g, struct http_conn *conn, const struct gw_api *api, const char *id,
                 const char *headers);
/* For whole(): the answer is this error instead. */
void gw_task_fail(struct gw_task *t, int status, const char *why);
void gw_task_on_gone(struct http_conn *conn);
void gw_task_on_drained(struct http_conn *conn);

/* ------------------------------------------------------------------ routes */

void gw_on_request(struct http_conn *conn, void *gateway);

extern const struct gw_api GW_CHAT, GW_COMPLETIONS, GW_RESPONSES, GW_MESSAGES, GW_COUNT_TOKENS, GW_MODELS, GW_TOKENIZE,
    GW_DETOKENIZE, GW_TOKENIZER_INFO;
