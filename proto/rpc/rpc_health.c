/*
 * grpc.health.v1.Health: one state for the server as a whole (""), and the same state for each of its
 * services.
 *
 * Watchers are told under the lock, so that each of them sees the states in the order in which they were set.
 */
#include "proto/rpc/rpc_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/list.h"
#include "base/mem.h"
#include "grpc_health.pb-c.h"

typedef Grpc__Health__V1__HealthCheckRequest health_request;
typedef Grpc__Health__V1__HealthCheckResponse health_response;

struct watcher {
    LIST_ENTRY(watcher) in_health;
    struct rpc_call *call;
};

struct rpc_health {
    const struct rpc_method *methods;
    uint32_t n_methods;
    /* Not a mailbox: a watcher's first answer and a change must not overtake each other. */
    pthread_mutex_t lock;
    bool serving;
    LIST_HEAD(, watcher) watchers;
};

struct rpc_health *rpc_health_open(const struct rpc_method *methods, uint32_t n_methods)
{
    struct rpc_health *h = mem_zalloc(sizeof(*h));
    h->methods = methods;
    h->n_methods = n_methods;
    pthread_mutex_init(&h->lock, NULL);
    return h;
}

void rpc_health_close(struct rpc_health *h)
{
    if (!h)
        return;
    pthread_mutex_destroy(&h->lock);
    free(h);
}

static bool health_knows(const struct rpc_health *h, const char *service)
{
    size_t len = strlen(service);
    if (!len)
        return true;
    for (uint32_t i = 0; i < h->n_methods; i++) {
        const char *path = h->methods[i].path;
        if (path[0] == '/' && !strncmp(path + 1, service, len) && path[1 + len] == '/')
            return true;
    }
    return false;
}

static enum td_status health_send(struct rpc_call *call, Grpc__Health__V1__HealthCheckResponse__ServingStatus status)
{
    health_response response = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
    response.status = status;
    return rpc_call_send(call, &response.base);
}

static enum td_status health_send_state(struct rpc_call *call, bool serving)
{
    return health_send(call, serving ? GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING
                                     : GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING);
}

/* ------------------------------------------------------------------ Check */

static void check_open(struct rpc_call *call, void *user)
{
    rpc_call_set_user(call, user);
}

static void check_message(struct rpc_call *call, const ProtobufCMessage *message)
{
    struct rpc_health *h = rpc_call_user(call);
    const health_request *request = (const health_request *)message;
    if (!health_knows(h, request->service)) {
        rpc_call_finish(call, RPC_NOT_FOUND, "unknown service", 0);
        return;
    }
    pthread_mutex_lock(&h->lock);
    bool serving = h->serving;
    pthread_mutex_unlock(&h->lock);
    health_send_state(call, serving);
    rpc_call_finish(call, RPC_OK, "", 0);
}

/* ------------------------------------------------------------------ Watch */

struct watch_user {
    struct rpc_health *health;
    struct watcher watcher; /* .call is set while the watcher is on the list */
};

static void watch_open(struct rpc_call *call, void *user)
{
    struct watch_user *w = mem_zalloc(sizeof(*w));
    w->health = user;
    rpc_call_set_user(call, w);
}

static void watch_message(struct rpc_call *call, const ProtobufCMessage *message)
{
    struct watch_user *w = rpc_call_user(call);
    struct rpc_health *h = w->health;
    const health_request *request = (const health_request *)message;
    if (w->watcher.call) {
        rpc_call_finish(call, RPC_INVALID_ARGUMENT, "one request only", 0);
        return;
    }
    /* The protocol keeps the stream open in case the service appears. */
    if (!health_knows(h, request->service)) {
        health_send(call, GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVICE_UNKNOWN);
        return;
    }
    pthread_mutex_lock(&h->lock);
    w->watcher.call = call;
    LIST_INSERT_HEAD(&h->watchers, &w->watcher, in_health);
    health_send_state(call, h->serving);
    pthread_mutex_unlock(&h->lock);
}

static void watch_end(struct rpc_call *call, enum rpc_code code, const char *text)
{
    (void)code;
    (void)text;
    struct watch_user *w = rpc_call_user(call);
    struct watcher *me = &w->watcher;
    pthread_mutex_lock(&w->health->lock);
    if (me->call)
        LIST_REMOVE(me, in_health);
    pthread_mutex_unlock(&w->health->lock);
    free(w);
}

void rpc_health_set(struct rpc_health *h, bool serving)
{
    struct watcher *w;
    pthread_mutex_lock(&h->lock);
    bool changed = h->serving != serving;
    h->serving = serving;
    LIST_FOREACH (w, &h->watchers, in_health)
        if (changed && health_send_state(w->call, serving) == TD_ERR_NO_SPACE)
            rpc_call_abort(w->call, RPC_RESOURCE_EXHAUSTED, "watcher does not read");
    pthread_mutex_unlock(&h->lock);
}

void rpc_health_methods(struct rpc_health *h, struct rpc_service_method out[RPC_HEALTH_METHODS])
{
    out[0] = (struct rpc_service_method){
        .path = "/grpc.health.v1.Health/Check",
        .request = &grpc__health__v1__health_check_request__descriptor,
        .handlers = {.on_message = check_message},
        .on_open = check_open,
        .open_user = h,
        .one_request = true,
        .is_common = true,
        .is_paced = true,
    };
    out[1] = (struct rpc_service_method){
        .path = "/grpc.health.v1.Health/Watch",
        .request = &grpc__health__v1__health_check_request__descriptor,
        .handlers = {.on_message = watch_message, .on_end = watch_end},
        .on_open = watch_open,
        .open_user = h,
        .one_request = true,
        .is_common = true,
        .is_paced = true,
    };
}
