/* Errors in the shapes of OpenAI's and Anthropic's APIs. */
#include <string.h>

#include "gateway/gateway_internal.h"

int gw_error_status(enum rpc_code code)
{
    switch (code) {
    case RPC_OK:
        return 200;
    case RPC_INVALID_ARGUMENT:
    case RPC_FAILED_PRECONDITION:
    case RPC_OUT_OF_RANGE:
        return 400;
    case RPC_UNAUTHENTICATED:
        return 401;
    case RPC_PERMISSION_DENIED:
        return 403;
    case RPC_NOT_FOUND:
        return 404;
    case RPC_ALREADY_EXISTS:
    case RPC_ABORTED:
        return 409;
    case RPC_RESOURCE_EXHAUSTED:
        return 429;
    case RPC_UNIMPLEMENTED:
        return 501;
    case RPC_UNAVAILABLE:
        return 503;
    case RPC_DEADLINE_EXCEEDED:
        return 504;
    case RPC_CANCELLED:
    case RPC_UNKNOWN:
    case RPC_INTERNAL:
    case RPC_DATA_LOSS:
        break;
    }
    return 500;
}

struct gw_error_kind {
    int status;
    const char *openai, *code, *anthropic;
};

static const struct gw_error_kind KINDS[] = {
    {400, "invalid_request_error", NULL, "invalid_request_error"},
    {401, "authentication_error", "invalid_api_key", "authentication_error"},
    {403, "permission_error", "permission_denied", "permission_error"},
    {404, "invalid_request_error", "not_found", "not_found_error"},
    {405, "invalid_request_error", "method_not_allowed", "invalid_request_error"},
    {408, "invalid_request_error", "request_timeout", "invalid_request_error"},
    {413, "invalid_request_error", "request_too_large", "request_too_large"},
    {429, "rate_limit_error", "rate_limit_exceeded", "rate_limit_error"},
    {431, "invalid_request_error", "headers_too_large", "request_too_large"},
    {503, "server_error", "unavailable", "overloaded_error"},
    {504, "server_error", "deadline_exceeded", "timeout_error"},
};

static const struct gw_error_kind *kind_of(int status)
{
    static const struct gw_error_kind OURS = {500, "server_error", NULL, "api_error"}, *const OTHER = &KINDS[0];
    for (size_t i = 0; i < sizeof(KINDS) / sizeof(KINDS[0]); i++)
        if (KINDS[i].status == status)
            return &KINDS[i];
    return status < 500 ? OTHER : &OURS;
}

/* Whether the target belongs to Anthropic's API. */
static bool is_anthropic(const char *target)
{
    return !strncmp(target, "/v1/messages", 12);
}

void gw_error_body(const char *target, int status, const char *text, struct bytes *out)
{
    const struct gw_error_kind *k = kind_of(status);
    json_t *message = ask_text_json(text, strlen(text));
    size_t n = status < 500 ? rpc_text_field(text) : 0;
    if (is_anthropic(target))
        ask_json_append(
            out, json_pack("{s:s, s:{s:s, s:o}}", "type", "error", "error", "type", k->anthropic, "message", message));
    else
        ask_json_append(out, json_pack("{s:{s:o, s:s, s:o, s:s?}}", "error", "message", message, "type", k->openai,
                                       "param", n ? json_stringn(text, n) : json_null(), "code", k->code));
}

void gw_error_answer(struct gateway *g, struct http_conn *conn, int status, const char *text, const char *headers,
                     uint32_t retry_after_ms)
{
    struct bytes body = {0}, all = {0};
    gw_error_body(http_target(conn), status, text, &body);
    bytes_printf(&all, "Content-Type: application/json\r\n%s", headers);
    if (retry_after_ms)
        bytes_printf(&all, "Retry-After: %u\r\nretry-after-ms: %u\r\n", (retry_after_ms + 999) / 1000, retry_after_ms);
    metrics_inc(g->counters, GW_REFUSED, 1);
    http_answer(conn, status, all.data, body.data, body.len);
    bytes_free(&body);
    bytes_free(&all);
}
