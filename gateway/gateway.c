#include "gateway/gateway.h"

#include <stdlib.h>
#include <string.h>

#include "gateway/gateway_internal.h"
#include "worker/reach.h"

enum { FROZEN_MS = 30000, FILLER_MS = 15000, UNSENT_BYTES = 65536 };
#define TICK_NS NS_PER_S

#define AT(member) offsetof(struct gateway_options, member)
const struct option GATEWAY_OPTIONS[] = {
    {"listen", OPT_ADDRESS, AT(listen), "127.0.0.1:8000", "HOST:PORT", 0, 0,
     "address of the HTTP API; port 0 picks one"},
    {"routers", OPT_ADDRESS, AT(routers), "127.0.0.1:7470", "ADDR,...", 0, 0,
     "routers to ask; a request goes to one that serves and has the fewest calls from here"},
    RPC_TLS_OPTIONS(struct gateway_options),
    {"insecure", OPT_BOOL, AT(is_insecure), NULL, NULL, 0, 0,
     "allows a --listen that the network reaches without --tls-cert, or with routers that ask for no API keys"},
    {"cors", OPT_STRING, AT(cors), NULL, "ORIGIN", 0, 0,
     "web pages from there may call the API (Access-Control-Allow-Origin); '*': all; default: none"},
    {"name", OPT_STRING, AT(name), "gateway", "NAME", 0, 0, "name in logs"},
    {"metrics-listen", OPT_ADDRESS, AT(metrics_listen), NULL, "HOST:PORT", 0, 0,
     "address of Prometheus metrics over HTTP"},
    {"threads", OPT_INT, AT(threads), "2", NULL, 1, HTTP_THREADS_MOST, "threads that read requests"},
    {"max-connections", OPT_INT, AT(max_connections), "0", NULL, 0, 1e6,
     "most connections; idle ones make room; 0: half of the limit of open files"},
    {"max-connections-per-address", OPT_INT, AT(max_per_address), "0", NULL, 0, 1e6,
     "most connections from one address (IPv6: /64), but for this host's; 0: a quarter of --max-connections"},
    {"trusted-proxies", OPT_STRING, AT(trusted_proxies), NULL, "ADDR[/BITS],...", 0, 0,
     "load balancers and other addresses behind which there are many clients; bounds for each address do not hold for "
     "these"},
    {"max-requests", OPT_INT, AT(max_requests), "16384", NULL, 1, 1e6, "most requests under way"},
    {"max-prompts", OPT_INT, AT(max_prompts), "128", NULL, 1, 4096, "most prompts of one request"},
    {"max-head-bytes", OPT_BYTES, AT(max_head_bytes), "32K", NULL, 1024, HTTP_HEAD_MOST,
     "longest request line with headers"},
    {"max-body-bytes", OPT_BYTES, AT(max_body_bytes), "4M", NULL, 1024, 256 << 20, "longest body"},
    {"max-read-bytes", OPT_BYTES, AT(max_read_bytes), "256M", NULL, 1 << 20, 1e12,
     "most bytes of all requests that are being read"},
    {"request-ms", OPT_MS, AT(request_ms), "60s", NULL, 100, 3.6e6, "time that a client has to send a request"},
    {"idle-ms", OPT_MS, AT(idle_ms), "120s", NULL, 100, 3.6e6, "a connection without a request is closed after this"},
    {"stall-ms", OPT_MS, AT(stall_ms), "30s", NULL, 100, 3.6e6,
     "a client that takes nothing of its answer for this long is cut off"},
    {"log-level", OPT_CHOICE, AT(log_level), "info", "error|warn|info|debug", 0, 0,
     "log level; the log goes to stderr"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};

static const struct metric_info METRIC_INFO[] = {METRICS_TABLE(GW_METRICS)};

/* Numbers of the HTTP server and the tasks become metrics here. */
static void tick(void *gateway)
{
    struct gateway *g = gateway;
    struct http_server_stats s = http_server_stats(g->http);
    gw_upstream_tick(g);
    metrics_gauge(g->counters, GW_RUNNING, atomic_load(&g->n_tasks));
    metrics_gauge(g->counters, GW_CONNECTIONS, s.connections);
    metrics_gauge(g->counters, GW_ROUTERS, gw_upstream_serving(g));
    metrics_inc(g->counters, GW_GONE, s.gone - metrics_get(g->counters, GW_GONE));
    metrics_inc(g->counters, GW_STALLED, s.stalled - metrics_get(g->counters, GW_STALLED));
    metrics_inc(g->counters, GW_UNREAD, s.refused - metrics_get(g->counters, GW_UNREAD));
    metrics_inc(g->counters, GW_REQUESTS, s.requests - metrics_get(g->counters, GW_REQUESTS));
}

static enum td_status open_http(struct gateway *g, struct td_error *e)
{
    const struct gateway_options *o = &g->options;
    const struct http_server_config c = {
        .listen = o->listen,
        .tls = &o->tls,
        .n_threads = (uint32_t)o->threads,
        .max_connections = (uint32_t)o->max_connections,
        .max_per_address = (uint32_t)o->max_per_address,
        .trusted_proxies = o->trusted_proxies,
        .limits = {.max_head_bytes = (size_t)o->max_head_bytes, .max_body_bytes = (size_t)o->max_body_bytes},
        .max_read_bytes = (uint64_t)o->max_read_bytes,
        .request_ms = (uint32_t)o->request_ms,
        .idle_ms = (uint32_t)o->idle_ms,
        .stall_ms = (uint32_t)o->stall_ms,
        .filler_ms = FILLER_MS,
        .frozen_ms = FROZEN_MS,
        .max_unsent_bytes = UNSENT_BYTES,
        .log = &g->log,
        .on_request = gw_on_request,
        .on_gone = gw_task_on_gone,
        .on_drained = gw_task_on_drained,
        .describe = gw_error_body,
        .user = g};
    return http_server_open(&c, &g->http, e);
}

enum td_status gateway_open(const struct gateway_options *options, struct gateway **out, struct td_error *error_out)
{
    struct gateway *g = mem_zalloc(sizeof(*g));
    char address[64];
    g->options = *options;
    g->log = (struct log){.who = options->name, .level = (enum log_level)log_level_parse(options->log_level)};
    clock_init_real(&g->clock);
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->changed, NULL);
    g->metrics = metrics_open();
    g->counters = metrics_add(g->metrics, METRIC_INFO, sizeof(METRIC_INFO) / sizeof(METRIC_INFO[0]), NULL);
    enum td_status s = rpc_tls_check(&options->tls, false, error_out);
    if (!s)
        s = reach_guard("--listen", options->listen, options->tls.cert != NULL, options->is_insecure, error_out);
    if (!s)
        s = gw_upstream_open(g, error_out);
    if (!s && !options->is_insecure && !reach_is_local(options->listen))
        s = gw_upstream_asks_keys(g, error_out);
    if (!s)
        s = open_http(g, error_out);
    if (!s && options->metrics_listen)
        s = metrics_http_open(g->metrics, options->metrics_listen, &g->metrics_http, address, error_out);
    if (s) {
        gateway_close(g);
        return s;
    }
    g->ticker = ticker_start("gateway-tick", TICK_NS, tick, g);
    log_info(&g->log, "ready address=%s routers=%s", gateway_address(g), options->routers);
    *out = g;
    return TD_OK;
}

enum td_status gateway_run(struct gateway *g)
{
    pthread_mutex_lock(&g->lock);
    while (!atomic_load(&g->n_stops))
        pthread_cond_wait(&g->changed, &g->lock);
    pthread_mutex_unlock(&g->lock);
    http_server_drain(g->http);
    pthread_mutex_lock(&g->lock);
    while (atomic_load(&g->n_tasks) && atomic_load(&g->n_stops) < 2)
        pthread_cond_wait(&g->changed, &g->lock);
    pthread_mutex_unlock(&g->lock);
    return TD_OK;
}

void gateway_stop(struct gateway *g)
{
    pthread_mutex_lock(&g->lock);
    atomic_fetch_add(&g->n_stops, 1);
    pthread_cond_signal(&g->changed);
    pthread_mutex_unlock(&g->lock);
}

void gateway_close(struct gateway *g)
{
    if (!g)
        return;
    ticker_stop(g->ticker);
    if (g->http)
        http_server_drain(g->http); /* nobody starts a call any more */
    gw_upstream_close(g);           /* ends all calls, and with them all tasks */
    http_server_close(g->http);
    metrics_http_close(g->metrics_http);
    metrics_close(g->metrics);
    pthread_mutex_destroy(&g->lock);
    pthread_cond_destroy(&g->changed);
    free(g);
}

const char *gateway_address(const struct gateway *g)
{
    return http_server_address(g->http);
}
