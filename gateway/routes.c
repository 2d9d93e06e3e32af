/* Which path is served by what, and what all requests have in common: ids, CORS, bounds. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "gateway/gateway_internal.h"

struct gw_route {
    const char *method, *path;
    const struct gw_api *api; /* NULL: answered here */
};

static const struct gw_route ROUTES[] = {
    {"POST", "/v1/chat/completions", &GW_CHAT},
    {"POST", "/v1/completions", &GW_COMPLETIONS},
    {"POST", "/v1/responses", &GW_RESPONSES},
    {"POST", "/v1/messages", &GW_MESSAGES},
    {"POST", "/v1/messages/count_tokens", &GW_COUNT_TOKENS},
    {"GET", "/v1/models", &GW_MODELS},
    {"GET", "/v1/models/*", &GW_MODELS},
    {"POST", "/tokenize", &GW_TOKENIZE},
    {"POST", "/detokenize", &GW_DETOKENIZE},
    {"GET", "/tokenizer_info", &GW_TOKENIZER_INFO},
    {"GET", "/health", NULL},
};
enum { N_ROUTES = sizeof(ROUTES) / sizeof(ROUTES[0]) };

static bool matches(const struct gw_route *r, const char *target)
{
    size_t n = strcspn(target, "?"), want = strlen(r->path);
    if (r->path[want - 1] == '*')
        return n >= want && !strncmp(target, r->path, want - 1);
    return n == want && !strncmp(target, r->path, want);
}

static bool is_method(const char *method, const char *of_route)
{
    return !strcmp(method, of_route) || (!strcmp(method, "HEAD") && !strcmp(of_route, "GET"));
}

/* The client's own id if it can be one, else a new one. */
static void choose_id(const struct http_conn *conn, char out[GW_ID_BYTES])
{
    const char *theirs = http_header(conn, "x-request-id");
    size_t n = theirs ? strlen(theirs) : 0;
    bool is_good = n && n < GW_ID_BYTES;
    for (size_t i = 0; i < n && is_good; i++)
        is_good = theirs[i] > 0x20 && theirs[i] < 0x7f;
    if (is_good)
        snprintf(out, GW_ID_BYTES, "%s", theirs);
    else
        snprintf(out, GW_ID_BYTES, "%016llx%08x", (unsigned long long)random_u64(), (uint32_t)random_u64());
}

static void common_headers(const struct gateway *g, const char *id, struct bytes *out)
{
    bytes_printf(out, "x-request-id: %s\r\n", id);
    if (g->options.cors)
        bytes_printf(out,
                     "Access-Control-Allow-Origin: %s\r\nVary: Origin\r\n"
                     "Access-Control-Expose-Headers: x-request-id, retry-after, retry-after-ms\r\n",
                     g->options.cors);
}

/* A browser asks what it may send before it sends it. */
static void answer_preflight(struct http_conn *conn, const char *headers)
{
    struct bytes all = {0};
    bytes_printf(&all,
                 "%sAccess-Control-Allow-Methods: GET, POST\r\nAccess-Control-Allow-Headers: *, authorization\r\n"
                 "Access-Control-Max-Age: 600\r\n",
                 headers);
    http_answer(conn, 204, all.data, NULL, 0);
    bytes_free(&all);
}

static void answer_health(struct gateway *g, struct http_conn *conn, const char *headers)
{
    struct bytes all = {0};
    uint32_t n = gw_upstream_serving(g);
    char body[64];
    if (!n) {
        gw_error_answer(g, conn, 503, "no router serves (--routers)", headers, 0);
        return;
    }
    int len = snprintf(body, sizeof(body), "{\"status\":\"ok\",\"routers\":%u}", n);
    bytes_printf(&all, "Content-Type: application/json\r\n%s", headers);
    http_answer(conn, 200, all.data, body, (size_t)len);
    bytes_free(&all);
}

static void answer_unknown(struct gateway *g, struct http_conn *conn, const char *headers)
{
    struct bytes why = {0}, all = {0};
    const char *target = http_target(conn);
    for (int i = 0; i < N_ROUTES; i++)
        if (matches(&ROUTES[i], target)) {
            bytes_printf(&why, "%s is not possible here; %s is", http_method(conn), ROUTES[i].method);
            bytes_printf(&all, "%sAllow: %s\r\n", headers, ROUTES[i].method);
            gw_error_answer(g, conn, 405, why.data, all.data, 0);
            bytes_free(&why);
            bytes_free(&all);
            return;
        }
    bytes_printf(&why, "%.*s is not served here; what is: ", (int)strcspn(target, "?"), target);
    for (int i = 0; i < N_ROUTES; i++)
        bytes_printf(&why, "%s%s %s", i ? ", " : "", ROUTES[i].method, ROUTES[i].path);
    gw_error_answer(g, conn, 404, why.data, headers, 0);
    bytes_free(&why);
}

void gw_on_request(struct http_conn *conn, void *gateway)
{
    struct gateway *g = gateway;
    const char *target = http_target(conn), *method = http_method(conn);
    const struct gw_route *r = NULL;
    struct bytes headers = {0};
    char id[GW_ID_BYTES];
    choose_id(conn, id);
    common_headers(g, id, &headers);
    for (int i = 0; i < N_ROUTES && !r; i++)
        if (matches(&ROUTES[i], target) && is_method(method, ROUTES[i].method))
            r = &ROUTES[i];
    if (!r && g->options.cors && !strcmp(method, "OPTIONS"))
        answer_preflight(conn, headers.data);
    else if (!r)
        answer_unknown(g, conn, headers.data);
    else if (!r->api)
        answer_health(g, conn, headers.data);
    else if (atomic_load(&g->n_tasks) >= (uint32_t)g->options.max_requests)
        gw_error_answer(g, conn, 429, "too many requests are under way (max-requests)", headers.data, 1000);
    else
        gw_task_run(g, conn, r->api, id, headers.data);
    bytes_free(&headers);
}
