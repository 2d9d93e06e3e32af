/*
 * The client: channels, their operations on the queue that all clients share, and the blocking unary call,
 * built on the asynchronous one.
 *
 * gRPC's own retries are off: only the caller knows whether a request that may have reached a server can be
 * repeated. Each client has its own connection (no shared subchannels), so closing one client affects no
 * other.
 */
#include "proto/rpc/rpc_internal.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <grpc/support/time.h>

#include "base/mem.h"
#include "proto/rpc/rpc_flow.h"

enum { UNARY_LOOK_MS = 20, CHANNELS_MOST = 64, CHANNEL_CALLS = RPC_CONNECTION_CALLS / 2 };

struct rpc_client {
    struct rpc_pump pump;
    char *target;
    struct rpc_tls_files tls;
    uint32_t frozen_ms;
    bool must_prove;
    /* One connection each; under the pump's lock. A server takes RPC_CONNECTION_CALLS on one, so there is a
     * further channel when each has CHANNEL_CALLS. */
    struct rpc_channel channels[CHANNELS_MOST];
    uint32_t n_channels;
    char *authorization; /* value of that header of every call; NULL: none */
};

/* ------------------------------------------------------------------ channel */

enum { LOOK_AT_FILES_S = 1 };

static grpc_channel_credentials *tls_credentials(const struct rpc_tls_files *f)
{
    grpc_tls_certificate_provider *files =
        grpc_tls_certificate_provider_file_watcher_create(f->key, f->cert, f->ca, LOOK_AT_FILES_S);
    grpc_tls_credentials_options *options = grpc_tls_credentials_options_create();
    grpc_tls_credentials_options_set_certificate_provider(options, files);
    grpc_tls_credentials_options_watch_root_certs(options);
    if (f->cert)
        grpc_tls_credentials_options_watch_identity_key_cert_pairs(options);
    grpc_tls_certificate_provider_release(files);
    return grpc_tls_credentials_create(options);
}

static grpc_channel *channel_create(const char *target, const struct rpc_tls_files *tls, uint32_t max_message_bytes,
                                    uint32_t frozen_ms)
{
    bool is_tls = tls->ca && strncmp(target, "unix:", 5);
    int limit = (int)max_message_bytes, frozen = frozen_ms ? (int)frozen_ms : RPC_FROZEN_MS;
    grpc_arg args[] = {
        RPC_INT_ARG(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, limit),
        RPC_INT_ARG(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, limit),
        RPC_INT_ARG(GRPC_ARG_KEEPALIVE_TIME_MS, 1000),
        RPC_INT_ARG(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, frozen),
        RPC_INT_ARG(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),
        RPC_INT_ARG(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0),
        RPC_INT_ARG(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100),
        /* Despite its name this is the time that one attempt may take, handshake included: enough for a
         * busy machine, and for a second SYN. */
        RPC_INT_ARG(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 4000),
        RPC_INT_ARG(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000),
        RPC_INT_ARG(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, 500),
        RPC_INT_ARG(GRPC_ARG_ENABLE_RETRIES, 0),
        RPC_INT_ARG(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1),
        /* Peers of a cluster are reached directly, whatever http_proxy says. */
        RPC_INT_ARG(GRPC_ARG_ENABLE_HTTP_PROXY, 0),
        RPC_INT_ARG(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1),
        /* A channel without calls keeps its connection. The filter that would end it takes time for each
         * message. */
        RPC_INT_ARG(GRPC_ARG_CLIENT_IDLE_TIMEOUT_MS, INT_MAX),
        RPC_INT_ARG(GRPC_ARG_TCP_MAX_READ_CHUNK_SIZE, RPC_READ_CHUNK_BYTES),
        RPC_UNCOMPRESSED,
        {.type = GRPC_ARG_STRING, /* the last one: left out without a name */
         .key = (char *)GRPC_SSL_TARGET_NAME_OVERRIDE_ARG,
         .value.string = is_tls ? (char *)(uintptr_t)tls->name : NULL},
    };
    size_t n_args = sizeof(args) / sizeof(*args);
    grpc_channel_args all = {.num_args = n_args - (is_tls && tls->name ? 0 : 1), .args = args};
    grpc_channel_credentials *creds = is_tls ? tls_credentials(tls) : grpc_insecure_credentials_create();
    grpc_channel *channel = grpc_channel_create(target, creds, &all);
    grpc_channel_credentials_release(creds);
    return channel;
}

static bool header_is_legal(const char *name, const char *value)
{
    grpc_slice key = grpc_slice_from_static_string(name), val = grpc_slice_from_static_string(value);
    return grpc_header_key_is_legal(key) && !grpc_is_binary_header(key) && grpc_header_nonbin_value_is_legal(val);
}

static grpc_channel *channel_of(struct rpc_client *c)
{
    return channel_create(c->target, &c->tls, c->pump.max_message_bytes, c->frozen_ms);
}

/* Counts the call for the first channel that has room for it, or for the one that has fewest. */
static grpc_channel *take_channel(struct rpc_client *c, struct rpc_call *call)
{
    pthread_mutex_lock(&c->pump.lock);
    struct rpc_channel *found = &c->channels[0];
    for (uint32_t i = 1; i < c->n_channels && found->n_calls >= CHANNEL_CALLS; i++)
        if (c->channels[i].n_calls < CHANNEL_CALLS || c->channels[i].n_calls < found->n_calls)
            found = &c->channels[i];
    if (found->n_calls >= CHANNEL_CALLS && c->n_channels < CHANNELS_MOST) {
        found = &c->channels[c->n_channels++];
        found->grpc = channel_of(c);
    }
    found->n_calls++;
    call->channel = found;
    grpc_channel *grpc = found->grpc;
    pthread_mutex_unlock(&c->pump.lock);
    return grpc;
}

enum td_status rpc_client_open(const struct rpc_client_config *config, struct rpc_client **out,
                               struct td_error *error_out)
{
    if (config->max_message_bytes > INT32_MAX)
        return td_fail(error_out, TD_ERR_INVALID, "max_message_bytes: at most %d", INT32_MAX);
    if (!config->target || !strchr(config->target, ':'))
        return td_fail(error_out, TD_ERR_INVALID, "target: %s is neither HOST:PORT nor unix:/path",
                       config->target ? config->target : "nothing");
    struct bytes authorization = {0};
    if (config->tls && rpc_tls_check(config->tls, false, error_out))
        return TD_ERR_INVALID;
    if (config->bearer)
        bytes_printf(&authorization, "Bearer %s", config->bearer);
    if (config->bearer && !header_is_legal("authorization", authorization.data)) {
        bytes_free(&authorization);
        return td_fail(error_out, TD_ERR_INVALID, "the key holds characters that no header may have");
    }
    struct rpc_client *c = mem_zalloc(sizeof(*c));
    rpc_pump_init(&c->pump, false, config->max_message_bytes, config->max_queued_bytes, config->log);
    c->pump.faults = config->faults;
    c->authorization = authorization.data;
    c->target = mem_strdup(config->target);
    c->tls = config->tls ? *config->tls : (struct rpc_tls_files){0};
    c->frozen_ms = config->frozen_ms;
    c->must_prove = config->must_prove;
    c->channels[c->n_channels++].grpc = channel_of(c);
    *out = c;
    return TD_OK;
}

static void *client_destroy(void *arg)
{
    struct rpc_client *c = arg;
    for (uint32_t i = 0; i < c->n_channels; i++)
        grpc_channel_destroy(c->channels[i].grpc);
    rpc_pump_fini(&c->pump);
    free(c->target);
    free(c->authorization);
    free(c);
    return NULL;
}

void rpc_client_close(struct rpc_client *c)
{
    if (!c)
        return;
    pthread_mutex_lock(&c->pump.lock);
    c->pump.closing = true;
    pthread_mutex_unlock(&c->pump.lock);
    rpc_pump_abort_all(&c->pump, RPC_CANCELLED, "client closing");
    rpc_pump_wait_calls(&c->pump);
    rpc_pump_destroy(&c->pump, client_destroy, c);
}

/* ------------------------------------------------------------------ calls */

static enum td_status call_set_headers(struct rpc_client *c, struct rpc_call *call, const char *const *headers)
{
    uint32_t n = 0;
    while (headers && headers[2 * n])
        n++;
    call->headers = mem_array(n + 1, sizeof(*call->headers));
    if (c->authorization)
        call->headers[call->n_headers++] =
            (struct rpc_header){mem_strdup("authorization"), mem_strdup(c->authorization)};
    for (uint32_t i = 0; i < n; i++) {
        if (!headers[2 * i + 1] || !header_is_legal(headers[2 * i], headers[2 * i + 1]))
            return TD_ERR_INVALID;
        call->headers[call->n_headers++] =
            (struct rpc_header){mem_strdup(headers[2 * i]), mem_strdup(headers[2 * i + 1])};
    }
    return TD_OK;
}

static void call_create_grpc(struct rpc_client *c, struct rpc_call *call, const struct rpc_call_params *params)
{
    if (params->timeout_ms > 0)
        call->deadline =
            gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(params->timeout_ms, GPR_TIMESPAN));
    grpc_slice path = grpc_slice_from_copied_string(params->path);
    call->grpc =
        grpc_channel_create_call(take_channel(c, call), NULL, 0, c->pump.queue, path, NULL, call->deadline, NULL);
    grpc_slice_unref(path);
}

/* first: sent together with the headers and the end of sending; NULL for a stream. */
static enum td_status call_start(struct rpc_client *c, const struct rpc_call_params *params,
                                 const ProtobufCMessage *first, struct rpc_call **out)
{
    struct rpc_call *call = rpc_call_new(&c->pump, false, params->path);
    call->handlers = params->handlers;
    call->incoming = params->response;
    call->user = params->user;
    call->wait_for_ready = params->wait_for_ready;
    call->must_prove = params->must_prove;
    enum td_status status = call_set_headers(c, call, params->headers);
    if (status == TD_OK && first)
        status = rpc_call_preload(call, first);
    if (status == TD_OK) {
        call_create_grpc(c, call, params);
        if (!rpc_pump_add(&c->pump, call)) {
            rpc_pump_leave_channel(call);
            grpc_call_unref(call->grpc);
            status = TD_ERR_CANCELLED;
        }
    }
    if (status != TD_OK) {
        rpc_call_unref(call);
        return status;
    }
    struct rpc_call *before = *out;
    *out = rpc_call_ref(call); /* before the first callback can come */
    status = rpc_call_run_client(call);
    if (status != TD_OK) {
        *out = before;
        rpc_pump_remove(&c->pump, call);
        rpc_pump_leave_channel(call);
        grpc_call_unref(call->grpc);
        rpc_pump_other_done(&c->pump);
        rpc_call_unref(call);
        rpc_call_unref(call);
    }
    return status;
}

enum td_status rpc_call_start(struct rpc_client *c, const struct rpc_call_params *params, struct rpc_call **out)
{
    return call_start(c, params, NULL, out);
}

/* Which connection the call is on. False: none, as far as we know. */
static bool find_connection(struct rpc_call *call)
{
    char address[RPC_PEER_BYTES];
    if (!call->connection)
        rpc_call_peer(call, address);
    if (!call->connection && address[0] != '?') {
        call->fd = rpc_flow_find(address);
        call->connection = rpc_flow_cookie(call->fd);
    }
    return call->connection;
}

void rpc_client_proved(struct rpc_call *call)
{
    if (find_connection(call))
        atomic_store(&call->channel->proved, call->connection);
}

/* A connection leads to the process that has proved itself on it as long as it lasts. */
static bool is_trusted(struct rpc_call *call)
{
    return find_connection(call) && call->connection == atomic_load(&call->channel->proved);
}

bool rpc_call_floods(struct rpc_call *call)
{
    struct rpc_flow flow;
    bool is_known = call->connection;
    if (!call->must_prove || atomic_load(&call->is_proved))
        return false;
    call->n_looks += !is_known;
    if (!is_known && call->n_looks & (call->n_looks - 1)) /* less and less often while there is no connection */
        return false;
    if (!find_connection(call) || is_trusted(call) || !rpc_flow_of(call->fd, &flow) ||
        rpc_flow_cookie(call->fd) != call->connection)
        return false;
    if (!is_known)
        call->read_bytes = flow.read_bytes;
    return flow.read_bytes > call->read_bytes + RPC_UNASKED_BYTES;
}

void rpc_call_hang_up(struct rpc_call *call)
{
    struct rpc_flow flow;
    if (find_connection(call) && !is_trusted(call) && rpc_flow_of(call->fd, &flow) && flow.read_bytes)
        rpc_flow_cut(call->fd, call->connection);
    rpc_call_cancel(call);
}

/* ------------------------------------------------------------------ unary */

struct unary {
    /* One waiter and one event, on the waiter's stack: a mailbox would be more code than the wait. */
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool done;
    ProtobufCMessage *response;
    enum rpc_code code;
    struct td_error text;
};

static void unary_message(struct rpc_call *call, const ProtobufCMessage *message)
{
    struct unary *u = rpc_call_user(call);
    if (u->response)
        return;
    u->response = rpc_call_take(call, message);
}

static void unary_end(struct rpc_call *call, enum rpc_code code, const char *text)
{
    struct unary *u = rpc_call_user(call);
    pthread_mutex_lock(&u->lock);
    u->code = code;
    rpc_text_clean(text, strlen(text), u->text.text, sizeof(u->text.text));
    u->done = true;
    pthread_cond_signal(&u->ended);
    pthread_mutex_unlock(&u->lock);
}

/* Waits for the end, or until it is time to look at what came. Under the lock. */
static void unary_wait(struct unary *u, struct rpc_call *call)
{
    struct timespec at;
    if (!call->must_prove) {
        pthread_cond_wait(&u->ended, &u->lock);
        return;
    }
    clock_gettime(CLOCK_REALTIME, &at);
    at.tv_nsec += UNARY_LOOK_MS * 1000000;
    at.tv_sec += at.tv_nsec / 1000000000;
    at.tv_nsec %= 1000000000;
    if (pthread_cond_timedwait(&u->ended, &u->lock, &at) && !u->done && rpc_call_floods(call)) {
        rpc_call_abort(call, RPC_ABORTED, "the server sends what nobody has asked for");
        rpc_call_hang_up(call);
    }
}

static enum rpc_code unary_result(struct unary *u, ProtobufCMessage **response_out, struct td_error *text_out)
{
    if (u->code == RPC_OK && u->response) {
        *response_out = u->response;
        return RPC_OK;
    }
    if (u->response)
        protobuf_c_message_free_unpacked(u->response, NULL);
    if (u->code == RPC_OK) {
        td_fail(&u->text, TD_ERR_PROTOCOL, "the server answered without a message");
        u->code = RPC_INTERNAL;
    }
    if (text_out)
        *text_out = u->text;
    return u->code;
}

enum rpc_code rpc_unary(struct rpc_client *c, const char *path, const ProtobufCMessage *request,
                        const ProtobufCMessageDescriptor *response, int64_t timeout_ms, ProtobufCMessage **response_out,
                        struct td_error *text_out)
{
    struct unary u = {.done = false};
    pthread_mutex_init(&u.lock, NULL);
    pthread_cond_init(&u.ended, NULL);
    struct rpc_call_params params = {
        .path = path,
        .response = response,
        .handlers = {.on_message = unary_message, .on_end = unary_end},
        .user = &u,
        .timeout_ms = timeout_ms,
        .must_prove = c->must_prove,
    };
    struct rpc_call *call = NULL;
    enum td_status status = call_start(c, &params, request, &call);
    if (status == TD_OK) {
        pthread_mutex_lock(&u.lock);
        while (!u.done)
            unary_wait(&u, call);
        pthread_mutex_unlock(&u.lock);
        rpc_call_unref(call);
    } else {
        u.code = rpc_code_of_status(status);
        td_fail(&u.text, status, "call not started: %s", td_status_name(status));
    }
    enum rpc_code code = unary_result(&u, response_out, text_out);
    pthread_cond_destroy(&u.ended);
    pthread_mutex_destroy(&u.lock);
    return code;
}
