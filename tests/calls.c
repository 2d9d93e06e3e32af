#include "tests/calls.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/list.h"
#include "base/mem.h"

/* What keeping a message costs, about as in proto/rpc/rpc_call.c. */
enum { OVERHEAD_BYTES = 150 };

struct rpc_client {
    char target[128];
};

enum { MAX_OPEN_CALLS = 256 };

struct rpc_server {
    LIST_ENTRY(rpc_server) in_list;
    struct rpc_server_config config;
    char address[128];
    struct rpc_call *calls[MAX_OPEN_CALLS]; /* one reference each, until on_end */
    uint32_t n_calls;
};

static LIST_HEAD(, rpc_server) servers;
static uint32_t last_port = 10000; /* for servers that listen on port 0 */
/* Guards the sent messages and the ends of all calls. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
void (*calls_stream)(struct rpc_call *call);
enum rpc_code (*calls_unary)(const char *target, const char *path, const ProtobufCMessage *request,
                             ProtobufCMessage **response_out, struct td_error *text_out);

struct rpc_call *call_open(void)
{
    struct rpc_call *call = mem_zalloc(sizeof(*call));
    *call = (struct rpc_call){.n_refs = 1, .reads = true, .max_queued_bytes = UINT64_MAX, .max_message_bytes = 4 << 20};
    return call;
}

void call_read(struct rpc_call *call)
{
    call->queued_bytes = 0;
    call->n_waiting = 0;
}

void call_forget(struct rpc_call *call)
{
    pthread_mutex_lock(&lock);
    while (call->n_sent)
        protobuf_c_message_free_unpacked(call->sent[--call->n_sent], NULL);
    pthread_mutex_unlock(&lock);
}

/* ---------------------------------------------------------------- every call */

struct rpc_call *rpc_call_ref(struct rpc_call *call)
{
    call->n_refs++;
    return call;
}

void rpc_call_unref(struct rpc_call *call)
{
    if (!call || --call->n_refs)
        return;
    for (uint32_t i = 0; i < call->n_sent; i++)
        protobuf_c_message_free_unpacked(call->sent[i], NULL);
    free(call->sent);
    free(call);
}

void rpc_call_set_user(struct rpc_call *call, void *user)
{
    call->user = user;
}

void *rpc_call_user(const struct rpc_call *call)
{
    return call->user;
}

bool rpc_call_over(struct rpc_call *call)
{
    return call->over;
}

uint64_t rpc_call_connection(const struct rpc_call *call)
{
    (void)call;
    return 1;
}

void rpc_call_peer(struct rpc_call *call, char out[RPC_PEER_BYTES])
{
    (void)call;
    snprintf(out, RPC_PEER_BYTES, "10.0.0.1:7000");
}

void rpc_call_local(const struct rpc_call *call, char out[RPC_PEER_BYTES])
{
    (void)call;
    snprintf(out, RPC_PEER_BYTES, "10.0.0.1:7000");
}

void rpc_call_proved(struct rpc_call *call)
{
    (void)call;
}

int64_t rpc_call_remaining_ms(const struct rpc_call *call)
{
    (void)call;
    return INT64_MAX;
}

const char *rpc_call_header(const struct rpc_call *call, const char *name)
{
    return !strcmp(name, "authorization") ? call->authorization : NULL;
}

ProtobufCMessage *rpc_call_take(struct rpc_call *call, const ProtobufCMessage *message)
{
    call->is_taken = true;
    return (ProtobufCMessage *)(uintptr_t)message;
}

size_t rpc_call_message_bytes(const struct rpc_call *call)
{
    (void)call;
    return 0;
}

static enum td_status keep(struct rpc_call *call, const ProtobufCMessage *message, bool over)
{
    size_t len = protobuf_c_message_get_packed_size(message);
    if (call->over || call->finished)
        return TD_ERR_CANCELLED;
    if (len > call->max_message_bytes)
        return TD_ERR_INVALID;
    if (!over && call->queued_bytes && call->queued_bytes + len + OVERHEAD_BYTES > call->max_queued_bytes)
        return TD_ERR_NO_SPACE;
    uint8_t *packed = mem_array(len ? len : 1, 1);
    protobuf_c_message_pack(message, packed);
    call->sent = mem_resize(call->sent, call->n_sent + 1, sizeof(*call->sent));
    call->sent[call->n_sent] = protobuf_c_message_unpack(message->descriptor, NULL, len, packed);
    free(packed);
    if (!call->sent[call->n_sent])
        abort();
    call->n_sent++;
    call->queued_bytes += call->reads ? 0 : len + OVERHEAD_BYTES;
    call->n_waiting += !call->reads;
    return TD_OK;
}

enum td_status rpc_call_send(struct rpc_call *call, const ProtobufCMessage *message)
{
    pthread_mutex_lock(&lock);
    enum td_status s = keep(call, message, false);
    pthread_mutex_unlock(&lock);
    return s;
}

enum td_status rpc_call_send_over(struct rpc_call *call, const ProtobufCMessage *message)
{
    pthread_mutex_lock(&lock);
    enum td_status s = keep(call, message, true);
    pthread_mutex_unlock(&lock);
    return s;
}

uint64_t rpc_call_queued_bytes(struct rpc_call *call)
{
    return call->queued_bytes;
}

uint32_t rpc_call_n_waiting(struct rpc_call *call)
{
    return call->n_waiting;
}

void rpc_call_finish(struct rpc_call *call, enum rpc_code code, const char *text, uint32_t retry_after_ms)
{
    pthread_mutex_lock(&lock);
    call->n_finishes++;
    if (!call->over && !call->finished) {
        call->code = code;
        call->retry_after_ms = retry_after_ms;
        snprintf(call->text, sizeof(call->text), "%s", text ? text : "");
        call->finished = true; /* last: a test may wait for it */
    }
    pthread_mutex_unlock(&lock);
}

/* ------------------------------------------------------------ workers' streams */

void rpc_call_cancel(struct rpc_call *call)
{
    if (call->over)
        return;
    call->over = true;
    if (call->handlers.on_end && !call->server) /* a server hears of it later */
        call->handlers.on_end(call, RPC_CANCELLED, "cancelled");
}

void rpc_call_abort(struct rpc_call *call, enum rpc_code code, const char *text)
{
    rpc_call_finish(call, code, text, 0);
    rpc_call_cancel(call);
}

void rpc_call_close_send(struct rpc_call *call)
{
    call->finished = true;
    if (calls_stream)
        calls_stream(call);
}

uint32_t rpc_call_retry_after_ms(const struct rpc_call *call)
{
    return call->retry_after_ms;
}

struct rpc_echo *rpc_echo_open(void)
{
    return NULL;
}

void rpc_echo_close(struct rpc_echo *e)
{
    (void)e;
}

uint64_t rpc_echo_age_ns(struct rpc_echo *e)
{
    (void)e;
    return 0;
}

enum td_status rpc_client_open(const struct rpc_client_config *config, struct rpc_client **out,
                               struct td_error *error_out)
{
    (void)error_out;
    *out = mem_zalloc(sizeof(**out));
    snprintf((*out)->target, sizeof((*out)->target), "%s", config->target);
    return TD_OK;
}

void rpc_client_close(struct rpc_client *c)
{
    free(c);
}

void rpc_call_hang_up(struct rpc_call *call)
{
    rpc_call_cancel(call);
}

bool rpc_call_floods(struct rpc_call *call)
{
    (void)call;
    return false;
}

enum td_status rpc_call_start(struct rpc_client *c, const struct rpc_call_params *params, struct rpc_call **out)
{
    (void)c;
    *out = call_open();
    (*out)->handlers = params->handlers;
    (*out)->request = params->response; /* what comes in */
    snprintf((*out)->path, sizeof((*out)->path), "%s", params->path);
    (*out)->user = params->user;
    return TD_OK;
}

/* ------------------------------------------------------------------- server */

enum td_status rpc_server_open(const struct rpc_server_config *config, struct rpc_server **out,
                               struct td_error *error_out)
{
    (void)error_out;
    struct rpc_server *s = *out = mem_zalloc(sizeof(**out));
    size_t n = strlen(config->listen);
    s->config = *config;
    if (n > 2 && !strcmp(config->listen + n - 2, ":0"))
        snprintf(s->address, sizeof(s->address), "%.*s%u", (int)n - 1, config->listen, ++last_port);
    else
        snprintf(s->address, sizeof(s->address), "%s", config->listen);
    LIST_INSERT_HEAD(&servers, s, in_list);
    return TD_OK;
}

const char *rpc_server_address(const struct rpc_server *s)
{
    return s->address;
}

struct rpc_server_stats rpc_server_stats(struct rpc_server *s)
{
    (void)s;
    return (struct rpc_server_stats){0};
}

void rpc_server_set_serving(struct rpc_server *s, bool serving)
{
    (void)s, (void)serving;
}

uint32_t rpc_server_cut_unread(struct rpc_server *s, const struct rpc_patience *patience, uint32_t *n_full_out)
{
    (void)s, (void)patience;
    *n_full_out = 0;
    return 0;
}

void rpc_server_close(struct rpc_server *s)
{
    if (!s)
        return;
    while (s->n_calls)
        call_leaves(s->calls[0]);
    LIST_REMOVE(s, in_list);
    free(s);
}

/* --------------------------------------------------------- the test's side */

static const struct rpc_method *find_method(const struct rpc_server *s, const char *path)
{
    for (uint32_t i = 0; i < s->config.n_methods; i++)
        if (!strcmp(s->config.methods[i].path, path))
            return &s->config.methods[i];
    abort();
}

struct rpc_call *call_to(const char *address, const char *path)
{
    struct rpc_server *s;
    LIST_FOREACH (s, &servers, in_list)
        if (!strcmp(s->address, address))
            break;
    if (!s || s->n_calls == MAX_OPEN_CALLS)
        abort();
    const struct rpc_method *m = find_method(s, path);
    struct rpc_call *call = call_open();
    call->server = s;
    call->request = m->request;
    call->handlers = m->handlers;
    call->max_queued_bytes = s->config.max_queued_bytes ? s->config.max_queued_bytes : 1 << 20;
    s->calls[s->n_calls++] = rpc_call_ref(call);
    m->on_open(call, s->config.user);
    return call;
}

static void deliver(struct rpc_call *call, const ProtobufCMessage *message)
{
    size_t len = protobuf_c_message_get_packed_size(message);
    uint8_t *packed = mem_array(len ? len : 1, 1);
    protobuf_c_message_pack(message, packed);
    ProtobufCMessage *copy = protobuf_c_message_unpack(call->request, NULL, len, packed);
    free(packed);
    if (!copy) /* fuzzed: protobuf-c reads a field number 0 of two bytes, packs it as one byte, and refuses that */
        return;
    call->is_taken = false;
    call->handlers.on_message(call, copy);
    if (!call->is_taken)
        protobuf_c_message_free_unpacked(copy, NULL);
}

void call_says(struct rpc_call *call, const ProtobufCMessage *message)
{
    if (call->server)
        deliver(call, message);
}

void call_hears(struct rpc_call *call, const ProtobufCMessage *message)
{
    if (!call->over)
        deliver(call, message);
}

void call_ends(struct rpc_call *call, enum rpc_code code, const char *text, uint32_t retry_after_ms)
{
    call->over = true;
    call->retry_after_ms = retry_after_ms;
    call->handlers.on_end(call, code, text);
}

void call_says_all(struct rpc_call *call)
{
    if (call->server && call->handlers.on_half_close)
        call->handlers.on_half_close(call);
}

void call_leaves(struct rpc_call *call)
{
    struct rpc_server *s = call->server;
    bool was_answered = call->finished && !call->over;
    if (!s)
        return;
    for (uint32_t i = 0; i < s->n_calls; i++)
        if (s->calls[i] == call)
            s->calls[i] = s->calls[--s->n_calls];
    call->over = true;
    call->server = NULL;
    call->handlers.on_end(call, was_answered ? RPC_OK : call->finished ? call->code : RPC_CANCELLED, "");
    rpc_call_unref(call);
}

enum rpc_code rpc_unary(struct rpc_client *c, const char *path, const ProtobufCMessage *request,
                        const ProtobufCMessageDescriptor *response, int64_t timeout_ms, ProtobufCMessage **response_out,
                        struct td_error *text_out)
{
    (void)response, (void)timeout_ms;
    return calls_unary ? calls_unary(c->target, path, request, response_out, text_out) : RPC_UNAVAILABLE;
}
