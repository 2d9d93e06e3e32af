/*
 * The server: one completion queue, 64 requests for calls outstanding, one table of methods.
 *
 * Methods are not registered with gRPC: a single generic request lets us answer UNIMPLEMENTED in our own words and keeps
 * one path for all. A slot asks for the next call before the one it got is opened, so handlers don't shrink the window.
 */
#include "proto/rpc/rpc_internal.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>

#include "base/mem.h"

#define N_SLOTS 64

struct slot { /* one outstanding request for a call */
    struct rpc_tag tag;
    struct rpc_server *server;
    grpc_call *grpc;
    grpc_call_details details;
    grpc_metadata_array headers;
};

struct rpc_server {
    struct rpc_pump pump;
    grpc_server *grpc;
    char *address;
    struct rpc_health *health;
    struct rpc_reflection *reflection;
    struct rpc_service_method *methods; /* the user's, then our own services' */
    uint32_t n_methods;
    struct slot slots[N_SLOTS];
    struct rpc_tag shutdown_tag;
};

static void slot_done(struct rpc_tag *tag, bool ok);

/* ------------------------------------------------------------------ calls */

/* Under the pump's lock, so that nothing is asked for once `closing` is set. */
static void slot_request(struct slot *slot)
{
    struct rpc_server *s = slot->server;
    slot->grpc = NULL;
    grpc_call_details_init(&slot->details);
    grpc_metadata_array_init(&slot->headers);
    rpc_tag_set(&slot->tag, slot_done);
    grpc_call_error error = grpc_server_request_call(s->grpc, &slot->grpc, &slot->details, &slot->headers,
                                                     s->pump.queue, s->pump.queue, &slot->tag);
    if (error == GRPC_CALL_OK)
        s->pump.n_other++;
    else
        log_error(s->pump.log, "rpc request for a call refused error=%s", grpc_call_error_to_string(error));
}

static char *text_of_slice(grpc_slice slice)
{
    size_t len = GRPC_SLICE_LENGTH(slice);
    char *text = mem_zalloc(len + 1);
    if (len)
        memcpy(text, GRPC_SLICE_START_PTR(slice), len);
    return text;
}

/* Copies, because the originals go with the grpc_call, and a call may be held longer. Binary headers are left out. */
static void call_take_headers(struct rpc_call *call, const grpc_metadata_array *headers)
{
    call->headers = mem_array(headers->count, sizeof(*call->headers));
    for (size_t i = 0; i < headers->count; i++) {
        if (grpc_is_binary_header(headers->metadata[i].key))
            continue;
        struct rpc_header *h = &call->headers[call->n_headers++];
        h->name = text_of_slice(headers->metadata[i].key);
        h->value = text_of_slice(headers->metadata[i].value);
    }
}

static struct rpc_call *call_of_slot(struct slot *slot)
{
    char *path = text_of_slice(slot->details.method);
    struct rpc_call *call = rpc_call_new(&slot->server->pump, true, path);
    free(path);
    call->grpc = slot->grpc;
    gpr_timespec deadline = slot->details.deadline;
    if (gpr_time_cmp(deadline, gpr_inf_future(deadline.clock_type)) != 0)
        call->deadline = gpr_convert_clock_type(deadline, GPR_CLOCK_MONOTONIC);
    call_take_headers(call, &slot->headers);
    return call;
}

static void slot_clear(struct slot *slot)
{
    grpc_call_details_destroy(&slot->details);
    grpc_metadata_array_destroy(&slot->headers);
}

static void open_unknown(struct rpc_call *call, void *user)
{
    (void)user;
    struct bytes text = {0};
    bytes_printf(&text, "unknown method %s", call->path);
    rpc_call_finish(call, RPC_UNIMPLEMENTED, text.data, 0);
    bytes_free(&text);
}

static void call_open(struct rpc_server *s, struct rpc_call *call)
{
    for (uint32_t i = 0; i < s->n_methods; i++) {
        const struct rpc_service_method *m = &s->methods[i];
        if (strcmp(m->path, call->path) != 0)
            continue;
        call->handlers = m->handlers;
        call->incoming = m->request;
        rpc_call_run_server(call, m->on_open, m->open_user);
        return;
    }
    rpc_call_run_server(call, open_unknown, NULL);
}

static void slot_done(struct rpc_tag *tag, bool ok)
{
    struct slot *slot = (struct slot *)(void *)((char *)tag - offsetof(struct slot, tag));
    struct rpc_server *s = slot->server;
    struct rpc_call *call = ok ? call_of_slot(slot) : NULL;
    bool closing = call && !rpc_pump_add(&s->pump, call); /* counted before the slot is not */
    slot_clear(slot);

    pthread_mutex_lock(&s->pump.lock);
    s->pump.n_other--;
    if (!s->pump.closing)
        slot_request(slot);
    pthread_cond_broadcast(&s->pump.changed);
    pthread_mutex_unlock(&s->pump.lock);

    if (closing)
        rpc_call_abort(call, RPC_UNAVAILABLE, "server closing");
    if (call)
        call_open(s, call);
}

/* ------------------------------------------------------------------ open */

static grpc_server *server_create(uint32_t max_message_bytes)
{
    int limit = (int)max_message_bytes;
    grpc_arg args[] = {
        {.type = GRPC_ARG_INTEGER, .key = (char *)GRPC_ARG_ALLOW_REUSEPORT, .value.integer = 0},
        {.type = GRPC_ARG_INTEGER, .key = (char *)GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, .value.integer = limit},
        {.type = GRPC_ARG_INTEGER, .key = (char *)GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, .value.integer = limit},
        /*
         * A frozen client with a call is noticed in two seconds; clients may ping as often through minutes of silence. One
         * without calls is left alone: gRPC for Python, for one, answers no pings then, and would find its connection closed.
         */
        {.type = GRPC_ARG_INTEGER, .key = (char *)GRPC_ARG_KEEPALIVE_TIME_MS, .value.integer = 1000},
        {.type = GRPC_ARG_INTEGER, .key = (char *)GRPC_ARG_KEEPALIVE_TIMEOUT_MS, .value.integer = 1000},
        {.type = GRPC_ARG_INTEGER, .key = (char *)GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, .value.integer = 0},
        {.type = GRPC_ARG_INTEGER, .key = (char *)GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, .value.integer = 0},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
         .value.integer = 200},
    };
    grpc_channel_args all = {.num_args = sizeof(args) / sizeof(*args), .args = args};
    return grpc_server_create(&all, NULL);
}

static enum td_status server_listen(struct rpc_server *s, const char *listen, struct td_error *error_out)
{
    bool is_unix = !strncmp(listen, "unix:", 5);
    const char *colon = strrchr(listen, ':');
    if (!colon)
        return td_fail(error_out, TD_ERR_INVALID, "listen: %s is neither HOST:PORT nor unix:/path", listen);
    grpc_server_credentials *creds = grpc_insecure_server_credentials_create();
    int port = grpc_server_add_http2_port(s->grpc, listen, creds);
    grpc_server_credentials_release(creds);
    if (port <= 0)
        return td_fail(error_out, TD_ERR_IO, "listen: cannot bind %s: in use, or no such address", listen);
    struct bytes address = {0};
    if (is_unix)
        bytes_printf(&address, "%s", listen);
    else
        bytes_printf(&address, "%.*s:%d", (int)(colon - listen), listen, port);
    s->address = address.data;
    return TD_OK;
}

static void server_fill_methods(struct rpc_server *s, const struct rpc_server_config *config)
{
    s->methods = mem_array(config->n_methods + RPC_HEALTH_METHODS + 1, sizeof(*s->methods));
    for (uint32_t i = 0; i < config->n_methods; i++) {
        const struct rpc_method *m = &config->methods[i];
        s->methods[s->n_methods++] = (struct rpc_service_method){
            .path = m->path,
            .request = m->request,
            .handlers = m->handlers,
            .on_open = m->on_open,
            .open_user = config->user,
        };
    }
    s->health = rpc_health_open(config->methods, config->n_methods);
    rpc_health_methods(s->health, &s->methods[s->n_methods]);
    s->n_methods += RPC_HEALTH_METHODS;
    rpc_reflection_method(s->reflection, &s->methods[s->n_methods++]);
}

static void server_start(struct rpc_server *s)
{
    grpc_server_start(s->grpc);
    pthread_mutex_lock(&s->pump.lock);
    for (int i = 0; i < N_SLOTS; i++) {
        s->slots[i].server = s;
        slot_request(&s->slots[i]);
    }
    pthread_mutex_unlock(&s->pump.lock);
}

enum td_status rpc_server_open(const struct rpc_server_config *config, struct rpc_server **out,
                               struct td_error *error_out)
{
    if (config->max_message_bytes > INT32_MAX)
        return td_fail(error_out, TD_ERR_INVALID, "max_message_bytes: at most %d", INT32_MAX);
    struct rpc_server *s = mem_zalloc(sizeof(*s));
    rpc_pump_init(&s->pump, "rpc-server", config->max_message_bytes, config->max_queued_bytes, config->log);
    s->pump.faults = config->faults;
    s->grpc = server_create(s->pump.max_message_bytes);
    grpc_server_register_completion_queue(s->grpc, s->pump.queue, NULL);
    enum td_status status = rpc_reflection_open(config->descriptors, config->descriptors_len_bytes, &s->reflection);
    if (status != TD_OK) {
        td_fail(error_out, status, "descriptors: not a FileDescriptorSet");
        goto fail;
    }
    server_fill_methods(s, config);
    status = server_listen(s, config->listen, error_out);
    if (status != TD_OK)
        goto fail;
    server_start(s);
    *out = s;
    return TD_OK;
fail:
    rpc_server_close(s);
    return status;
}

const char *rpc_server_address(const struct rpc_server *s)
{
    return s->address;
}

void rpc_server_set_serving(struct rpc_server *s, bool serving)
{
    rpc_health_set(s->health, serving);
}

/* ------------------------------------------------------------------ close */

static void shutdown_done(struct rpc_tag *tag, bool ok)
{
    (void)ok;
    struct rpc_server *s = (struct rpc_server *)(void *)((char *)tag - offsetof(struct rpc_server, shutdown_tag));
    rpc_pump_other_done(&s->pump);
}

/* The rest of closing, when nothing of the user's is in it any more. */
static void *server_destroy(void *arg)
{
    struct rpc_server *s = arg;
    rpc_pump_fini(&s->pump);
    grpc_server_destroy(s->grpc);
    rpc_health_close(s->health);
    rpc_reflection_close(s->reflection);
    free(s->methods);
    free(s->address);
    free(s);
    return NULL;
}

void rpc_server_close(struct rpc_server *s)
{
    if (!s)
        return;
    pthread_mutex_lock(&s->pump.lock);
    s->pump.closing = true;
    s->pump.n_other++;
    rpc_tag_set(&s->shutdown_tag, shutdown_done);
    pthread_mutex_unlock(&s->pump.lock);
    grpc_server_shutdown_and_notify(s->grpc, s->pump.queue, &s->shutdown_tag);
    /* First with a status the clients can read, then by cutting the connections, which idle and frozen clients need. */
    rpc_pump_abort_all(&s->pump, RPC_UNAVAILABLE, "server closing");
    rpc_pump_wait(&s->pump, false, 1000);
    grpc_server_cancel_all_calls(s->grpc);
    rpc_pump_wait_calls(&s->pump);
    rpc_pump_destroy(&s->pump, server_destroy, s);
}
