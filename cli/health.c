/*
 * tandem health: asks processes of a cluster whether they answer and serve (grpc.health.v1), all at once. A
 * router answers clients, workers and stores answer without the secret: health is all that they say.
 *
 * The supervisor of tandem up runs it to find processes that live and don't answer (cli/supervise.c).
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "cli/cli.h"
#include "cli/table.h"
#include "grpc_health.pb-c.h"

/* An attempt to connect that takes longer fails as UNAVAILABLE, and would pass for an answer
 * (proto/rpc/rpc_client.c). */
enum { MOST_MS = 3000 };

struct health_options {
    int64_t timeout_ms;
    bool json, quiet;
};

#define AT(member) offsetof(struct health_options, member)
static const struct option TABLE[] = {
    {"json", OPT_BOOL, AT(json), NULL, NULL, 0, 0, "prints one JSON object"},
    {"quiet", OPT_BOOL, AT(quiet), NULL, NULL, 0, 0, "prints only the processes that do not serve"},
    {"timeout-ms", OPT_MS, AT(timeout_ms), "2s", NULL, 10, MOST_MS, "how long an answer may take"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};

struct checked {
    struct health_round *round;
    const char *address;
    struct rpc_client *client;
    struct rpc_call *call;
    const char *state;
    double ms;
};

struct health_round {
    struct clock clock;
    uint64_t start_ns;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int n_open; /* calls that have not ended */
};

static void on_message(struct rpc_call *call, const ProtobufCMessage *message)
{
    struct checked *c = rpc_call_user(call);
    c->state = ((const Grpc__Health__V1__HealthCheckResponse *)message)->status ==
                       GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING
                   ? "serving"
                   : "not-serving";
}

static void on_end(struct rpc_call *call, enum rpc_code code, const char *text)
{
    struct checked *c = rpc_call_user(call);
    (void)text;
    if (code)
        c->state = code == RPC_DEADLINE_EXCEEDED ? "silent" : code == RPC_UNAVAILABLE ? "unreachable" : "failing";
    c->ms = (double)(clock_now(&c->round->clock) - c->round->start_ns) / NS_PER_MS;
    pthread_mutex_lock(&c->round->lock);
    c->round->n_open--;
    pthread_cond_signal(&c->round->changed);
    pthread_mutex_unlock(&c->round->lock);
}

static enum td_status ask(struct checked *c, int64_t timeout_ms)
{
    const Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    const struct rpc_call_params params = {.path = "/grpc.health.v1.Health/Check",
                                           .response = &grpc__health__v1__health_check_response__descriptor,
                                           .handlers = {on_message, NULL, on_end},
                                           .user = c,
                                           .timeout_ms = timeout_ms};
    enum td_status s = rpc_call_start(c->client, &params, &c->call);
    if (s)
        return s;
    rpc_call_send(c->call, &request.base);
    rpc_call_close_send(c->call);
    return TD_OK;
}

/* False: one of the addresses is none, and nothing was asked. */
static bool ask_all(struct health_round *r, struct checked *all, int n, int64_t timeout_ms)
{
    for (int i = 0; i < n; i++) {
        all[i].round = r;
        all[i].client = cli_connect("health", all[i].address, NULL);
        if (!all[i].client)
            return false;
    }
    r->start_ns = clock_now(&r->clock);
    r->n_open = n;
    for (int i = 0; i < n; i++)
        if (ask(&all[i], timeout_ms))
            abort(); /* neither headers nor a client that closes */
    pthread_mutex_lock(&r->lock);
    while (r->n_open)
        pthread_cond_wait(&r->changed, &r->lock);
    pthread_mutex_unlock(&r->lock);
    return true;
}

static bool is_serving(const struct checked *c)
{
    return !strcmp(c->state, "serving");
}

static void print_json(const struct checked *all, int n, bool quiet)
{
    json_t *list = json_array();
    for (int i = 0; i < n; i++)
        if (!quiet || !is_serving(&all[i]))
            json_array_append_new(list, json_pack("{s:o, s:s, s:f}", "address",
                                                  ask_text_json(all[i].address, strlen(all[i].address)), "state",
                                                  all[i].state, "ms", all[i].ms));
    cli_print_json(json_pack("{s:o}", "processes", list));
}

static void print_table(const struct checked *all, int n, bool quiet)
{
    static const char *const TITLES[] = {"ADDRESS", "STATE", "MS"};
    struct table t;
    int n_rows = 0;
    table_init(&t, 3, 3, TITLES);
    for (int i = 0; i < n; i++) {
        if (quiet && is_serving(&all[i]))
            continue;
        n_rows++;
        table_cell(&t, "%s", all[i].address);
        table_cell(&t, "%s", all[i].state);
        table_cell(&t, "%.1f", all[i].ms);
    }
    if (n_rows)
        table_print(&t, stdout);
    table_fini(&t);
}

int cli_health(int argc, char **argv)
{
    struct health_options o = {0};
    const char **addresses = mem_array((size_t)argc + 1, sizeof(*addresses));
    int n = 0, exit_code;
    if (!cli_options("health", "[HOST:PORT...] [options]",
                     "Asks routers, workers and stores whether they answer and serve; without an address, the router "
                     "of TANDEM_ROUTER. The exit code is 1 if one does not serve.",
                     TABLE, argc, argv, &o, addresses, &n, &exit_code)) {
        free(addresses);
        return exit_code;
    }
    if (!n)
        addresses[n++] = cli_router(NULL);
    struct checked *all = mem_array((size_t)n, sizeof(*all));
    struct health_round r = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    clock_init_real(&r.clock);
    for (int i = 0; i < n; i++)
        all[i] = (struct checked){.address = addresses[i]};
    exit_code = 1;
    if (ask_all(&r, all, n, o.timeout_ms)) {
        exit_code = 0;
        for (int i = 0; i < n; i++)
            exit_code |= !is_serving(&all[i]);
        (o.json ? print_json : print_table)(all, n, o.quiet);
    }
    for (int i = 0; i < n; i++) {
        if (all[i].call)
            rpc_call_unref(all[i].call);
        rpc_client_close(all[i].client);
    }
    free(all);
    free(addresses);
    return exit_code;
}
