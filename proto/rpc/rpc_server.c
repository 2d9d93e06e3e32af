/*
 * The server: two of gRPC's (for connections from this host, and from others) on one completion queue, 64
 * requests for calls outstanding at each, one table of methods.
 *
 * Methods are not registered with gRPC: one generic request lets us answer UNIMPLEMENTED with our own text,
 * and is one path for all calls. A slot asks for the next call before it opens the one that it got, so that
 * handlers do not reduce the number of outstanding requests.
 */
#include "proto/rpc/rpc_internal.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>

#include "base/mem.h"
#include "proto/rpc/rpc_accept.h"
#include "proto/rpc/rpc_tls.h"

#define N_SLOTS           64
#define RPC_HTTP2_PREFACE "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" /* RFC 9113, 3.4 */

struct rpc_slot { /* one outstanding request for a call */
    struct rpc_tag tag;
    struct rpc_server *server;
    grpc_server *from;
    grpc_call *grpc;
    grpc_call_details details;
    grpc_metadata_array headers;
};

struct rpc_shutdown { /* of a server of gRPC */
    struct rpc_tag tag;
    struct rpc_server *server;
};

struct rpc_server {
    struct rpc_pump pump;
    grpc_server *grpc[2]; /* for connections from this host, and from others */
    struct rpc_door *door;
    grpc_server_credentials *credentials;
    struct rpc_health *health;
    struct rpc_reflection *reflection;
    struct rpc_service_method *methods; /* the user's methods, then those of our own services */
    uint32_t n_methods;
    struct rpc_slot slots[2][N_SLOTS];
    struct rpc_shutdown shutdowns[2];
    uint32_t max_calls;
    TAILQ_HEAD(, rpc_call) held;          /* under the pump's lock; each entry is a ref */
    uint64_t ticked_ns, patient_until_ns; /* used by the door's thread */
};

static void slot_done(struct rpc_tag *tag, bool ok);

/* ------------------------------------------------------------------ calls */

/* Call under the pump's lock, so that nothing is asked for once `closing` is set. */
static void slot_request(struct rpc_slot *slot)
{
    struct rpc_server *s = slot->server;
    slot->grpc = NULL;
    grpc_call_details_init(&slot->details);
    grpc_metadata_array_init(&slot->headers);
    rpc_tag_set(&slot->tag, slot_done);
    grpc_call_error error = grpc_server_request_call(slot->from, &slot->grpc, &slot->details, &slot->headers,
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

/* Copies the headers, because the originals are freed with the grpc_call, and a call may be kept longer.
 * Binary headers are left out. */
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

/* gRPC names a connection that it was handed by its descriptor, "fd:12". */
static int descriptor_of(grpc_call *grpc)
{
    char *peer = grpc_call_get_peer(grpc);
    int fd = -1;
    if (!peer || sscanf(peer, "fd:%d", &fd) != 1)
        fd = -1;
    gpr_free(peer);
    return fd;
}

/* gRPC keeps to its own bound only when the client has acknowledged it, and one field may be named often. */
static bool headers_are_too_long(const grpc_metadata_array *headers)
{
    size_t n_bytes = 0;
    for (size_t i = 0; i < headers->count; i++)
        n_bytes += GRPC_SLICE_LENGTH(headers->metadata[i].key) + GRPC_SLICE_LENGTH(headers->metadata[i].value);
    return n_bytes > RPC_HEADERS_BYTES;
}

/* NULL: its connection was closed as a flood, which may have left many. They cost as little as they can. */
static struct rpc_call *call_of_slot(struct rpc_slot *slot)
{
    int fd = descriptor_of(slot->grpc);
    uint64_t connection = rpc_door_call_begin(slot->server->door, fd);
    if (!connection) {
        grpc_call_unref(slot->grpc);
        return NULL;
    }
    char *path = text_of_slice(slot->details.method);
    struct rpc_call *call = rpc_call_new(&slot->server->pump, true, path);
    free(path);
    call->grpc = slot->grpc;
    call->fd = fd;
    call->connection = connection;
    call->door = slot->server->door;
    gpr_timespec deadline = slot->details.deadline;
    if (gpr_time_cmp(deadline, gpr_inf_future(deadline.clock_type)) != 0)
        call->deadline = gpr_convert_clock_type(deadline, GPR_CLOCK_MONOTONIC);
    call->is_too_long = headers_are_too_long(&slot->headers);
    if (!call->is_too_long)
        call_take_headers(call, &slot->headers);
    return call;
}

static void slot_clear(struct rpc_slot *slot)
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

/* user: milliseconds after which the client may come back; NULL: the answer must not wait for its client. */
static void open_refused(struct rpc_call *call, void *user)
{
    const char *text = call->is_too_much ? "too many calls of this method come from this address"
                                         : "as many calls are open as the server takes";
    if (user)
        rpc_call_finish(call, RPC_RESOURCE_EXHAUSTED, text, *(uint32_t *)user);
    else
        rpc_call_abort(call, RPC_RESOURCE_EXHAUSTED, text);
}

/* A call of a paced method that comes early is held; false: it is refused. */
static bool call_pace(struct rpc_server *s, struct rpc_call *call, bool has_queue)
{
    uint32_t retry_after_ms = RPC_PACED_WAIT_MS;
    uint64_t begins = rpc_door_pace(s->door, call->fd, call->connection, has_queue);
    call->is_too_much = begins == UINT64_MAX;
    if (call->is_too_much) {
        pthread_mutex_lock(&s->pump.lock);
        s->pump.n_refused++;
        pthread_mutex_unlock(&s->pump.lock);
        rpc_call_run_server(call, open_refused, &retry_after_ms);
        return false;
    }
    call->begins_ns = begins;
    if (begins)
        rpc_call_hold(call);
    return true;
}

/* Before it runs: whoever lets go of it may do so at once. */
static void call_keep_held(struct rpc_server *s, struct rpc_call *call)
{
    rpc_call_ref(call);
    pthread_mutex_lock(&s->pump.lock);
    TAILQ_INSERT_TAIL(&s->held, call, in_held);
    pthread_mutex_unlock(&s->pump.lock);
}

/* Lets go of the held calls whose time has come. */
static void release_held(struct rpc_server *s, uint64_t now)
{
    TAILQ_HEAD(, rpc_call) due = TAILQ_HEAD_INITIALIZER(due);
    pthread_mutex_lock(&s->pump.lock);
    struct rpc_call *call = TAILQ_FIRST(&s->held), *next;
    for (; call; call = next) {
        next = TAILQ_NEXT(call, in_held);
        if (call->begins_ns > now)
            continue;
        TAILQ_REMOVE(&s->held, call, in_held);
        TAILQ_INSERT_TAIL(&due, call, in_held);
    }
    pthread_mutex_unlock(&s->pump.lock);
    while ((call = TAILQ_FIRST(&due))) {
        TAILQ_REMOVE(&due, call, in_held);
        if (rpc_door_has_left(s->door, call->fd, call->connection))
            rpc_call_abort(call, RPC_CANCELLED, "client left"); /* gRPC may tell it much later */
        else
            rpc_call_resume(call);
        rpc_call_unref(call);
    }
}

static void open_too_long(struct rpc_call *call, void *user)
{
    (void)user;
    rpc_call_abort(call, RPC_RESOURCE_EXHAUSTED, "the headers are too long");
}

static bool call_admit(struct rpc_server *s, struct rpc_call *call)
{
    uint32_t retry_after_ms = 0;
    call->was_admitted = !s->max_calls;
    call->opened_ns = rpc_now_ns();
    if (!s->max_calls || rpc_pump_admit(&s->pump, call, s->max_calls, &retry_after_ms))
        return true;
    rpc_call_run_server(call, open_refused, retry_after_ms ? &retry_after_ms : NULL);
    return false;
}

static void call_open(struct rpc_server *s, struct rpc_call *call)
{
    if (call->is_too_long) {
        call->opened_ns = rpc_now_ns();
        rpc_call_run_server(call, open_too_long, NULL);
        return;
    }
    for (uint32_t i = 0; i < s->n_methods; i++) {
        const struct rpc_service_method *m = &s->methods[i];
        if (strcmp(m->path, call->path) != 0)
            continue;
        call->is_common = m->is_common;
        if ((m->is_paced && !call_pace(s, call, m->has_queue)) || !call_admit(s, call))
            return;
        call->handlers = m->handlers;
        call->incoming = m->request;
        call->one_request = m->one_request;
        call->has_queue = m->has_queue;
        call->must_prove = m->must_prove;
        if (call->begins_ns)
            call_keep_held(s, call);
        rpc_call_run_server(call, m->on_open, m->open_user);
        return;
    }
    call->is_common = true;
    if (call_admit(s, call))
        rpc_call_run_server(call, open_unknown, NULL);
}

static void slot_done(struct rpc_tag *tag, bool ok)
{
    struct rpc_slot *slot = (struct rpc_slot *)(void *)((char *)tag - offsetof(struct rpc_slot, tag));
    struct rpc_server *s = slot->server;
    struct rpc_call *call = ok ? call_of_slot(slot) : NULL;
    /* The call is counted before the slot is released. */
    bool closing = call && !rpc_pump_add(&s->pump, call);
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

/*
 * One connection gets at most half of the calls, or twice all of them where they are few: then it is told
 * that there are too many, instead of waiting for a stream. Refused calls count, too: a client that fetches
 * no answers gets no more.
 */
static int streams_of_a_connection(uint32_t max_calls)
{
    uint64_t half = max_calls / 2, twice = 2 * (uint64_t)(max_calls < 1024 ? max_calls : 1024);
    uint64_t n = half > twice ? half : twice;
    return max_calls && n < INT32_MAX ? (int)n : INT32_MAX;
}

static grpc_server *server_create(uint32_t max_message_bytes, const struct rpc_server_config *config,
                                  grpc_resource_quota *quota, int max_streams)
{
    int limit = (int)max_message_bytes, frozen = config->frozen_ms ? (int)config->frozen_ms : RPC_FROZEN_MS;
    grpc_arg args[] = {
        RPC_INT_ARG(GRPC_ARG_MAX_CONCURRENT_STREAMS, max_streams),
        RPC_INT_ARG(GRPC_ARG_ALLOW_REUSEPORT, 0),
        RPC_INT_ARG(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, limit),
        RPC_INT_ARG(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, limit),
        /*
         * A frozen client with a call is noticed after frozen_ms; clients may ping as often, also through
         * minutes of silence. A client without calls is not pinged: gRPC for Python, for example, answers no
         * pings then, and would find its connection closed.
         */
        RPC_INT_ARG(GRPC_ARG_KEEPALIVE_TIME_MS, 1000),
        RPC_INT_ARG(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, frozen),
        RPC_INT_ARG(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 0),
        RPC_INT_ARG(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0),
        /*
         * The door ends floods of pings. gRPC would close the connection, too, but a client that reads
         * nothing keeps it from that, and then each ping makes an error of its own: 15 MiB and a tenth of a
         * second for what lies in the kernel's buffer.
         */
        RPC_INT_ARG(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0),
        /* At most some hundred calls of one connection, instead of 4 MiB. */
        RPC_INT_ARG(GRPC_ARG_TCP_MAX_READ_CHUNK_SIZE, RPC_READ_CHUNK_BYTES),
        RPC_UNCOMPRESSED,
        {.type = GRPC_ARG_POINTER,
         .key = (char *)GRPC_ARG_RESOURCE_QUOTA,
         .value.pointer = {.p = quota, .vtable = grpc_resource_quota_arg_vtable()}},
    };
    grpc_channel_args all = {.num_args = sizeof(args) / sizeof(*args), .args = args};
    return grpc_server_create(&all, NULL);
}

/* Two, because gRPC has one bound on the streams of a connection for each server. */
static void servers_create(struct rpc_server *s, const struct rpc_server_config *config)
{
    grpc_resource_quota *quota = grpc_resource_quota_create("server");
    grpc_resource_quota_resize(quota, config->max_rpc_bytes ? config->max_rpc_bytes : RPC_BYTES);
    for (int k = 0; k < 2; k++) {
        int most = streams_of_a_connection(config->max_calls);
        most = k && most > RPC_CONNECTION_CALLS ? RPC_CONNECTION_CALLS : most;
        s->grpc[k] = server_create(s->pump.max_message_bytes, config, quota, most);
        grpc_server_register_completion_queue(s->grpc[k], s->pump.queue, NULL);
    }
    grpc_resource_quota_unref(quota);
}

/* On the door's thread. */
static void take_connection(void *user, int fd, bool is_local)
{
    struct rpc_server *s = user;
    grpc_server_add_channel_from_fd(s->grpc[is_local ? 0 : 1], fd, s->credentials);
}

/* On the door's thread, 20 times a second. */
static void server_look(void *user)
{
    release_held(user, rpc_now_ns());
}

/*
 * On the door's thread, once a second: ends calls without a message, and returns the memory of a flood. If
 * this process stood still, the messages of those calls may lie unread: they get their time anew.
 */
static void server_tick(void *user)
{
    struct rpc_server *s = user;
    uint64_t now = rpc_now_ns(), patience = RPC_FIRST_MESSAGE_MS * 1000000ull;
    if (s->ticked_ns && now - s->ticked_ns > patience / 2)
        s->patient_until_ns = now + patience;
    s->ticked_ns = now;
    release_held(s, now); /* nobody may be connected any more */
    if (now > s->patient_until_ns && now > patience)
        rpc_pump_end_silent(&s->pump, now - patience);
    mem_return_freed(now);
}

/* Whether clients prove themselves before any of the user's methods takes more than a short message. */
static bool all_must_prove(const struct rpc_server_config *config)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < config->n_methods; i++)
        n += config->methods[i].must_prove;
    return n && n == config->n_methods;
}

static enum td_status server_listen(struct rpc_server *s, const struct rpc_server_config *config,
                                    struct td_error *error_out)
{
    struct rpc_tls *tls = NULL;
    const struct rpc_tls_files *f = config->tls;
    s->credentials = grpc_insecure_server_credentials_create(); /* the door ends TLS */
    if (f && f->cert && strncmp(config->listen, "unix:", 5)) {
        enum td_status status = rpc_tls_open(f, "h2", config->log, &tls, error_out);
        if (status)
            return status;
    }
    const struct rpc_door_config door = {.listen = config->listen,
                                         .preface = RPC_HTTP2_PREFACE,
                                         .tls = tls,
                                         .is_private = config->is_private,
                                         .max_connections = config->max_connections,
                                         .max_per_address = config->max_per_address,
                                         .max_new = RPC_NEW_CONNECTIONS,
                                         .trusted_proxies = config->trusted_proxies,
                                         .frozen_ms = config->frozen_ms ? config->frozen_ms : RPC_FROZEN_MS,
                                         .max_calls = config->max_calls,
                                         .max_connection_calls = RPC_CONNECTION_CALLS,
                                         .max_message_bytes = s->pump.max_message_bytes,
                                         .must_prove = all_must_prove(config),
                                         .max_unsent_bytes = config->max_unsent_bytes,
                                         .log = config->log,
                                         .take = take_connection,
                                         .tick = server_tick,
                                         .look = server_look,
                                         .user = s};
    return rpc_door_open(&door, &s->door, error_out);
}

static void server_fill_methods(struct rpc_server *s, const struct rpc_server_config *config)
{
    s->methods = mem_array(config->n_methods + RPC_HEALTH_METHODS + RPC_REFLECTION_METHODS, sizeof(*s->methods));
    for (uint32_t i = 0; i < config->n_methods; i++) {
        const struct rpc_method *m = &config->methods[i];
        s->methods[s->n_methods++] = (struct rpc_service_method){
            .path = m->path,
            .request = m->request,
            .handlers = m->handlers,
            .on_open = m->on_open,
            .open_user = config->user,
            .one_request = m->one_request,
            .must_prove = m->must_prove,
            .is_paced = m->one_request,
            .has_queue = m->has_queue,
        };
    }
    s->health = rpc_health_open(config->methods, config->n_methods);
    rpc_health_methods(s->health, &s->methods[s->n_methods]);
    s->n_methods += RPC_HEALTH_METHODS;
    rpc_reflection_methods(s->reflection, &s->methods[s->n_methods]);
    s->n_methods += RPC_REFLECTION_METHODS;
}

static void server_start(struct rpc_server *s)
{
    for (int k = 0; k < 2; k++)
        grpc_server_start(s->grpc[k]);
    pthread_mutex_lock(&s->pump.lock);
    for (int i = 0; i < 2 * N_SLOTS; i++) {
        struct rpc_slot *slot = &s->slots[i / N_SLOTS][i % N_SLOTS];
        slot->server = s;
        slot->from = s->grpc[i / N_SLOTS];
        slot_request(slot);
    }
    pthread_mutex_unlock(&s->pump.lock);
    rpc_door_start(s->door);
}

enum td_status rpc_server_open(const struct rpc_server_config *config, struct rpc_server **out,
                               struct td_error *error_out)
{
    if (config->max_message_bytes > INT32_MAX)
        return td_fail(error_out, TD_ERR_INVALID, "max_message_bytes: at most %d", INT32_MAX);
    struct rpc_server *s = mem_zalloc(sizeof(*s));
    TAILQ_INIT(&s->held);
    rpc_pump_init(&s->pump, true, config->max_message_bytes, config->max_queued_bytes, config->log);
    s->pump.faults = config->faults;
    servers_create(s, config);
    s->max_calls = config->max_calls;
    enum td_status status = rpc_reflection_open(config->descriptors, config->descriptors_len_bytes, &s->reflection);
    if (status != TD_OK) {
        td_fail(error_out, status, "descriptors: not a FileDescriptorSet");
        goto fail;
    }
    server_fill_methods(s, config);
    status = server_listen(s, config, error_out);
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
    return rpc_door_address(s->door);
}

uint32_t rpc_server_cut_unread(struct rpc_server *s, const struct rpc_patience *patience, uint32_t *n_full_out)
{
    uint32_t n, n_cut = 0;
    struct rpc_call **calls = rpc_pump_calls(&s->pump, &n);
    uint64_t now = rpc_now_ns();
    *n_full_out = 0;
    for (uint32_t i = 0; i < n; i++) {
        n_cut += rpc_call_cut_unread(calls[i], now, patience, n_full_out);
        rpc_call_unref(calls[i]);
    }
    free(calls);
    return n_cut;
}

struct rpc_server_stats rpc_server_stats(struct rpc_server *s)
{
    struct rpc_door_stats door = rpc_door_stats(s->door);
    pthread_mutex_lock(&s->pump.lock);
    uint64_t n = s->pump.n_refused;
    pthread_mutex_unlock(&s->pump.lock);
    return (struct rpc_server_stats){.calls_refused = n,
                                     .connections = door.n_open + door.n_waiting,
                                     .connections_refused = door.n_refused,
                                     .connections_dropped = door.n_late + door.n_idle + door.n_flood + door.n_foreign};
}

void rpc_server_set_serving(struct rpc_server *s, bool serving)
{
    rpc_health_set(s->health, serving);
}

/* ------------------------------------------------------------------ close */

static void shutdown_done(struct rpc_tag *tag, bool ok)
{
    (void)ok;
    struct rpc_shutdown *it = (struct rpc_shutdown *)(void *)((char *)tag - offsetof(struct rpc_shutdown, tag));
    rpc_pump_other_done(&it->server->pump);
}

/* The rest of closing: no callback of the user can come any more. */
static void *server_destroy(void *arg)
{
    struct rpc_server *s = arg;
    rpc_pump_fini(&s->pump);
    struct rpc_call *call;
    while ((call = TAILQ_FIRST(&s->held))) { /* no thread is left */
        TAILQ_REMOVE(&s->held, call, in_held);
        rpc_call_unref(call);
    }
    for (int k = 0; k < 2; k++)
        grpc_server_destroy(s->grpc[k]);
    rpc_health_close(s->health);
    rpc_reflection_close(s->reflection);
    rpc_door_close(s->door);
    grpc_server_credentials_release(s->credentials);
    free(s->methods);
    free(s);
    return NULL;
}

void rpc_server_close(struct rpc_server *s)
{
    if (!s)
        return;
    if (s->door)
        rpc_door_stop(s->door);
    pthread_mutex_lock(&s->pump.lock);
    s->pump.closing = true;
    s->pump.n_other += 2;
    for (int k = 0; k < 2; k++) {
        s->shutdowns[k].server = s;
        rpc_tag_set(&s->shutdowns[k].tag, shutdown_done);
    }
    pthread_mutex_unlock(&s->pump.lock);
    for (int k = 0; k < 2; k++)
        grpc_server_shutdown_and_notify(s->grpc[k], s->pump.queue, &s->shutdowns[k].tag);
    /* First with a status that clients can read; then by cutting the connections, which idle and frozen
     * clients need. */
    rpc_pump_abort_all(&s->pump, RPC_UNAVAILABLE, "server closing");
    rpc_pump_wait(&s->pump, false, 1000);
    for (int k = 0; k < 2; k++)
        grpc_server_cancel_all_calls(s->grpc[k]);
    rpc_pump_wait_calls(&s->pump);
    rpc_pump_destroy(&s->pump, server_destroy, s);
}
