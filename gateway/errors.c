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

/* Bytes of the member that the text names: "messages[0].role" of "messages[0].role: is missing"; 0: none. */
static size_t member_of(const char *text)
{
    size_t n = strspn(text, "abcdefghijklmnopqrstuvwxyz_-.[]0123456789");
    return n && text[n] == ':' ? n : 0;
}

void gw_error_body(enum gw_shape shape, int status, const char *text, const char *id, struct bytes *out)
{
    const struct gw_error_kind *k = kind_of(status);
    json_t *message = gw_json_text(rpc_data(text)), *e;
    size_t n = status < 500 ? member_of(text) : 0;
    if (shape == GW_ANTHROPIC)
        e = json_pack("{s:s, s:{s:s, s:o}}", "type", "error", "error", "type", k->anthropic, "message", message);
    else
        e = json_pack("{s:{s:o, s:s, s:o, s:s?}}", "error", "message", message, "type", k->openai, "param",
                      n ? json_stringn(text, n) : json_null(), "code", k->code);
    if (id && shape == GW_ANTHROPIC)
        json_object_set_new(e, "request_id", json_string(id));
    gw_json_append(out, e);
}

void gw_error_describe(const char *target, int status, const char *why, struct bytes *out)
{
    gw_error_body(strncmp(target, "/v1/messages", 12) ? GW_OPENAI : GW_ANTHROPIC, status, why, NULL, out);
}
