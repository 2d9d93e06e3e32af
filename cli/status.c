/*
 * tandem status: what the router knows about its workers and about itself.
 *
 * --json prints one object; scripts rely on its shape:
 *   {"model", "fingerprint", "queued", "running", "accepted", "refused", "failed", "finished",
 *    "index_blocks", "ready", "replans",
 *    "replan_budget", "plans": {"split", "aggregated", "kept"} (placements; each re-plan counts),
 *    "workers": [{"name", "role", "pid", "state", "address", "transport", "incarnation" (16 hex digits),
 *                 "pages": {"free", "cached", "held", "leased", "quarantined", "total"},
 *                 "kv_bytes_in", "kv_bytes_out", "running", "waiting", "weight_bytes", "breaker",
 *                 "unreached": [names of peers that it can't connect to],
 *                 "store": {"blocks_dram", "blocks_ssd", "bytes_ssd"} (role store only)}]}
 *
 * --wait asks again until every worker is ready and the router's health is SERVING, so that a script can send
 * requests after it.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "admin.pb-c.h"
#include "base/clock.h"
#include "cli/admin.h"
#include "cli/cli.h"
#include "cli/table.h"
#include "grpc_health.pb-c.h"

enum { CALL_MS = 5000, CALL_WAITING_MS = 1000, POLL_MS = 50 };

typedef Tandem__Admin__V1__StatusResponse status_response;
typedef Tandem__Admin__V1__WorkerStatus worker_status;

struct status_options {
    struct admin_at at;
    double wait_s;
    bool json;
};

#define AT(member) offsetof(struct status_options, member)
static const struct option TABLE[] = {
    ADMIN_OPTIONS(struct status_options),
    {"json", OPT_BOOL, AT(json), NULL, NULL, 0, 0, "prints one JSON object"},
    {"wait", OPT_DOUBLE, AT(wait_s), "0", "SECONDS", 0, 86400,
     "waits until every worker is ready; exit code 1 if they are not in time"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};

static bool text_is(ProtobufCBinaryData b, const char *text)
{
    return b.len == strlen(text) && !memcmp(b.data, text, b.len);
}

static json_t *json_data(ProtobufCBinaryData b)
{
    return ask_text_json(b.data, b.len);
}

static json_t *json_worker(const worker_status *w)
{
    static const Tandem__Admin__V1__Pages NONE = TANDEM__ADMIN__V1__PAGES__INIT;
    const Tandem__Admin__V1__Pages *p = w->pages ? w->pages : &NONE;
    char incarnation[17];
    snprintf(incarnation, sizeof(incarnation), "%016" PRIx64, w->incarnation);
    json_t *o = json_pack(
        "{s:o, s:o, s:I, s:o, s:o, s:o, s:s, s:{s:I, s:I, s:I, s:I, s:I, s:I}, s:I, s:I, s:I, s:I, s:I, s:o}", "name",
        json_data(w->name), "role", json_data(w->role), "pid", (json_int_t)w->pid, "state", json_data(w->state),
        "address", json_data(w->address), "transport", json_data(w->transport), "incarnation", incarnation, "pages",
        "free", (json_int_t)p->free, "cached", (json_int_t)p->cached, "held", (json_int_t)p->held, "leased",
        (json_int_t)p->leased, "quarantined", (json_int_t)p->quarantined, "total", (json_int_t)p->total, "kv_bytes_in",
        (json_int_t)w->kv_bytes_in, "kv_bytes_out", (json_int_t)w->kv_bytes_out, "running", (json_int_t)w->running,
        "waiting", (json_int_t)w->waiting, "weight_bytes", (json_int_t)w->weight_bytes, "breaker",
        json_data(w->breaker));
    json_t *unreached = json_array();
    for (size_t i = 0; i < w->n_unreached; i++)
        json_array_append_new(unreached, json_data(w->unreached[i]));
    json_object_set_new(o, "unreached", unreached);
    if (text_is(w->role, "store"))
        json_object_set_new(o, "store",
                            json_pack("{s:I, s:I, s:I}", "blocks_dram", (json_int_t)w->store_blocks_dram, "blocks_ssd",
                                      (json_int_t)w->store_blocks_ssd, "bytes_ssd", (json_int_t)w->store_bytes_ssd));
    return o;
}

static void print_json(const status_response *s)
{
    json_t *workers = json_array();
    for (size_t i = 0; i < s->n_workers; i++)
        json_array_append_new(workers, json_worker(s->workers[i]));
    cli_print_json(json_pack(
        "{s:o, s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:b, s:I, s:I, s:{s:I, s:I, s:I}, s:o}", "model",
        json_data(s->model), "fingerprint", json_data(s->fingerprint), "queued", (json_int_t)s->queued, "running",
        (json_int_t)s->running, "accepted", (json_int_t)s->accepted, "refused", (json_int_t)s->refused, "failed",
        (json_int_t)s->failed, "finished", (json_int_t)s->finished, "index_blocks", (json_int_t)s->index_blocks,
        "ready", s->ready, "replans", (json_int_t)s->replans, "replan_budget", (json_int_t)s->replan_budget, "plans",
        "split", (json_int_t)s->placed_split, "aggregated", (json_int_t)s->placed_aggregated, "kept",
        (json_int_t)s->placed_kept, "workers", workers));
}

static void print_workers(const status_response *s)
{
    static const char *const TITLES[] = {"NAME",   "ROLE", "PID",   "STATE",   "TRANSPORT", "FREE",  "CACHED", "HELD",
                                         "LEASED", "QUAR", "TOTAL", "RUNNING", "WAITING",   "KV IN", "KV OUT"};
    struct table t;
    table_init(&t, sizeof(TITLES) / sizeof(TITLES[0]), 0x1b, TITLES);
    for (size_t i = 0; i < s->n_workers; i++) {
        const worker_status *w = s->workers[i];
        const ProtobufCBinaryData texts[] = {w->name, w->role, w->state, w->transport};
        for (int j = 0; j < 4; j++) {
            table_cell(&t, "%.*s", (int)texts[j].len, texts[j].len ? (const char *)texts[j].data : "");
            if (j == 1)
                table_cell(&t, "%u", w->pid);
        }
        const Tandem__Admin__V1__Pages *p = w->pages;
        const uint32_t numbers[] = {p ? p->free : 0,        p ? p->cached : 0, p ? p->held : 0, p ? p->leased : 0,
                                    p ? p->quarantined : 0, p ? p->total : 0,  w->running,      w->waiting};
        for (int j = 0; j < 8; j++)
            table_cell(&t, "%u", numbers[j]);
        table_bytes(&t, w->kv_bytes_in);
        table_bytes(&t, w->kv_bytes_out);
    }
    table_print(&t, stdout);
    table_fini(&t);
}

static void print_stores(const status_response *s)
{
    static const char *const TITLES[] = {"STORE", "BLOCKS IN DRAM", "BLOCKS ON SSD", "BYTES ON SSD"};
    struct table t;
    table_init(&t, 4, 1, TITLES);
    for (size_t i = 0; i < s->n_workers; i++) {
        const worker_status *w = s->workers[i];
        if (!text_is(w->role, "store"))
            continue;
        table_cell(&t, "%.*s", (int)w->name.len, (const char *)w->name.data);
        table_cell(&t, "%" PRIu64, w->store_blocks_dram);
        table_cell(&t, "%" PRIu64, w->store_blocks_ssd);
        table_bytes(&t, w->store_bytes_ssd);
    }
    if (t.n_cells > t.n_columns) {
        putchar('\n');
        table_print(&t, stdout);
    }
    table_fini(&t);
}

static void print_unreached(const status_response *s)
{
    for (size_t i = 0; i < s->n_workers; i++)
        for (size_t j = 0; j < s->workers[i]->n_unreached; j++) {
            ProtobufCBinaryData reader = s->workers[i]->name, holder = s->workers[i]->unreached[j];
            printf("%.*s can't connect to %.*s: they get no requests together\n", (int)reader.len,
                   (const char *)reader.data, (int)holder.len, (const char *)holder.data);
        }
}

static void print_table(const status_response *s)
{
    printf("model %.*s  fingerprint %.*s\n", (int)s->model.len, (const char *)s->model.data,
           s->fingerprint.len ? (int)s->fingerprint.len : 1,
           s->fingerprint.len ? (const char *)s->fingerprint.data : "-");
    printf("requests: %u queued, %u running; %" PRIu64 " accepted, %" PRIu64 " refused, %" PRIu64 " failed, %" PRIu64
           " finished, %" PRIu64 " planned anew; %" PRIu64 " blocks in the index%s\n",
           s->queued, s->running, s->accepted, s->refused, s->failed, s->finished, s->replans, s->index_blocks,
           s->ready ? "" : "; not placing requests yet");
    printf("placed: %" PRIu64 " split, %" PRIu64 " aggregated, %" PRIu64 " kept\n\n", s->placed_split,
           s->placed_aggregated, s->placed_kept);
    print_workers(s);
    print_stores(s);
    print_unreached(s);
}

/* The first worker that is not ready, or has not reported its pages yet (a store may have none). NULL: all
 * are ready. */
static const worker_status *unready(const status_response *s)
{
    for (size_t i = 0; i < s->n_workers; i++) {
        const worker_status *w = s->workers[i];
        bool told = text_is(w->role, "store") || (w->pages && w->pages->total);
        if (!text_is(w->state, "ready") || !told)
            return w;
    }
    return NULL;
}

static status_response *ask_status(struct rpc_client *c, int64_t timeout_ms, enum rpc_code *code_out,
                                   struct td_error *e)
{
    const Tandem__Admin__V1__StatusRequest request = TANDEM__ADMIN__V1__STATUS_REQUEST__INIT;
    ProtobufCMessage *m = NULL;
    *code_out = rpc_unary(c, "/tandem.admin.v1.Admin/Status", &request.base,
                          &tandem__admin__v1__status_response__descriptor, timeout_ms, &m, e);
    return *code_out ? NULL : (status_response *)m;
}

static bool serving(struct rpc_client *c, struct td_error *e)
{
    const Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    ProtobufCMessage *m = NULL;
    struct td_error text = {{0}};
    enum rpc_code code = rpc_unary(c, "/grpc.health.v1.Health/Check", &request.base,
                                   &grpc__health__v1__health_check_response__descriptor, CALL_WAITING_MS, &m, &text);
    bool yes = !code && ((const Grpc__Health__V1__HealthCheckResponse *)m)->status ==
                            GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING;
    if (!code)
        protobuf_c_message_free_unpacked(m, NULL);
    if (!yes)
        td_fail(e, TD_ERR_PEER_LOST, "the router's health is not SERVING");
    return yes;
}

static bool all_ready(struct rpc_client *c, const status_response *s, struct td_error *e)
{
    const worker_status *w = unready(s);
    if (w)
        td_fail(e, TD_ERR_PEER_LOST, "%.*s: %.*s", (int)w->name.len, (const char *)w->name.data, (int)w->state.len,
                (const char *)w->state.data);
    return !w && serving(c, e);
}

/* Returns the last answer, or NULL. *ready_out: all became ready in time; if not, e says why. */
static status_response *ask_until_ready(struct rpc_client *c, double wait_s, bool *ready_out, enum rpc_code *code_out,
                                        struct td_error *e)
{
    struct clock clock;
    clock_init_real(&clock);
    uint64_t deadline = clock_now(&clock) + (uint64_t)(wait_s * (double)NS_PER_S);
    for (;;) {
        status_response *s = ask_status(c, CALL_WAITING_MS, code_out, e);
        *ready_out = s && all_ready(c, s, e);
        if (*ready_out || clock_now(&clock) >= deadline)
            return s;
        if (s)
            tandem__admin__v1__status_response__free_unpacked(s, NULL);
        nanosleep(&(struct timespec){.tv_nsec = POLL_MS * 1000000L}, NULL);
    }
}

int cli_status(int argc, char **argv)
{
    struct status_options o = {0};
    struct td_error e = {{0}};
    bool ready = false;
    int exit_code;
    if (!cli_options("status", "[options]", "Prints workers, their pages, moved bytes, and the router's counters.",
                     TABLE, argc, argv, &o, NULL, NULL, &exit_code))
        return exit_code;
    struct rpc_client *c = admin_connect("status", &o.at);
    if (!c)
        return 1;
    enum rpc_code code = RPC_OK;
    bool wait = o.wait_s > 0;
    status_response *s = wait ? ask_until_ready(c, o.wait_s, &ready, &code, &e) : ask_status(c, CALL_MS, &code, &e);
    if (s)
        o.json ? print_json(s) : print_table(s);
    if (!s)
        exit_code = admin_fail("status", &o.at, code, e.text);
    else if (wait && !ready)
        exit_code = cli_fail("status", "%s: not ready after %g s: %s", cli_router(o.at.router), o.wait_s, e.text);
    if (s)
        tandem__admin__v1__status_response__free_unpacked(s, NULL);
    rpc_client_close(c);
    return exit_code;
}
