/* The routers that a gateway knows: which of them serve, and which one gets the next call. */
#include <stdlib.h>
#include <string.h>

#include "gateway/gateway_internal.h"
#include "grpc_health.pb-c.h"

enum { MESSAGE_BYTES_MOST = 1 << 30, HEALTH_MS = 2000, KEYS_MS = 10000 };
/* A router that a call found unreachable is asked last for this long. */
#define LOST_NS NS_PER_S

static enum td_status open_router(struct gateway *g, const char *address, size_t n, struct td_error *e)
{
    struct gw_router *r = &g->routers[g->n_routers];
    struct bytes copy = {0};
    bytes_append(&copy, address, n);
    const struct rpc_client_config c = {
        .target = copy.data, .tls = &g->options.tls, .max_message_bytes = MESSAGE_BYTES_MOST, .log = &g->log};
    r->address = copy.data;
    g->n_routers++;
    return rpc_client_open(&c, &r->client, e);
}

enum td_status gw_upstream_open(struct gateway *g, struct td_error *e)
{
    const char *at = g->options.routers;
    do {
        size_t n = strcspn(at, ",");
        if (g->n_routers == GW_ROUTERS_MOST)
            return td_fail(e, TD_ERR_INVALID, "--routers: more than %d", GW_ROUTERS_MOST);
        if (!n)
            return td_fail(e, TD_ERR_INVALID, "--routers: an address is empty");
        enum td_status s = open_router(g, at, n, e);
        if (s)
            return s;
        at += n + (at[n] == ',');
    } while (*at);
    return TD_OK;
}

void gw_upstream_close(struct gateway *g)
{
    for (uint32_t i = 0; i < g->n_routers; i++) {
        rpc_client_close(g->routers[i].client); /* ends a health check, too */
        free(g->routers[i].address);
    }
}

/* ------------------------------------------------------------------ health */

static void on_health(struct rpc_call *call, const ProtobufCMessage *base)
{
    struct gw_router *r = rpc_call_user(call);
    const Grpc__Health__V1__HealthCheckResponse *m = (const Grpc__Health__V1__HealthCheckResponse *)base;
    atomic_store(&r->is_serving, m->status == GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING);
}

static void on_health_end(struct rpc_call *call, enum rpc_code code, const char *text)
{
    struct gw_router *r = rpc_call_user(call);
    (void)text;
    if (code)
        atomic_store(&r->is_serving, false);
}

void gw_upstream_tick(struct gateway *g)
{
    const Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    for (uint32_t i = 0; i < g->n_routers; i++) {
        struct gw_router *r = &g->routers[i];
        const struct rpc_call_params params = {.path = "/grpc.health.v1.Health/Check",
                                               .response = &grpc__health__v1__health_check_response__descriptor,
                                               .handlers = {.on_message = on_health, .on_end = on_health_end},
                                               .user = r,
                                               .timeout_ms = HEALTH_MS};
        struct rpc_call *call = NULL;
        if (rpc_call_start(r->client, &params, &call))
            continue;
        rpc_call_send(call, &request.base);
        rpc_call_close_send(call);
        rpc_call_unref(call);
    }
}

uint32_t gw_upstream_serving(const struct gateway *g)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < g->n_routers; i++)
        n += atomic_load(&g->routers[i].is_serving);
    return n;
}

/* -------------------------------------------------------------------- keys */

enum td_status gw_upstream_asks_keys(struct gateway *g, struct td_error *e)
{
    Tandem__V1__ListModelsRequest request;
    tandem__v1__list_models_request__init(&request);
    for (uint32_t i = 0; i < g->n_routers; i++) {
        ProtobufCMessage *response = NULL;
        struct td_error why = {{0}};
        enum rpc_code code = rpc_unary(g->routers[i].client, "/tandem.v1.Tandem/ListModels", &request.base,
                                       &tandem__v1__list_models_response__descriptor, KEYS_MS, &response, &why);
        if (response)
            protobuf_c_message_free_unpacked(response, NULL);
        if (!code)
            return td_fail(e, TD_ERR_INVALID,
                           "--listen %s: the network reaches it, and the router %s asks for no API keys (its "
                           "--api-keys); --insecure allows that",
                           g->options.listen, g->routers[i].address);
        if (code != RPC_UNAUTHENTICATED)
            return td_fail(e, TD_ERR_INVALID,
                           "--listen %s: the network reaches it, and the router %s can't be asked whether it wants "
                           "API keys: %s",
                           g->options.listen, g->routers[i].address, why.text);
    }
    return TD_OK;
}

/* ------------------------------------------------------------------ choice */

/* Higher is better: it serves, or was at least not lost just now. */
static int rank(const struct gw_router *r, uint64_t now)
{
    uint64_t lost = atomic_load(&r->lost_ns);
    bool is_lost = lost && now < lost + LOST_NS;
    return is_lost ? 0 : atomic_load(&r->is_serving) ? 2 : 1;
}

struct gw_router *gw_upstream_pick(struct gateway *g, uint32_t tried)
{
    struct gw_router *best = NULL;
    uint64_t now = clock_now(&g->clock);
    uint32_t first = atomic_fetch_add(&g->next_router, 1); /* of equals each gets its turn */
    int best_rank = -1;
    for (uint32_t i = 0; i < g->n_routers; i++) {
        struct gw_router *r = &g->routers[(first + i) % g->n_routers];
        int its_rank = rank(r, now);
        if (tried >> (r - g->routers) & 1)
            continue;
        if (its_rank > best_rank || (its_rank == best_rank && atomic_load(&r->n_calls) < atomic_load(&best->n_calls))) {
            best = r;
            best_rank = its_rank;
        }
    }
    return best;
}
