/* What a status says beyond code and text, as clients of Google's APIs read it: google.rpc.Status. */
#include "proto/rpc/rpc_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "google_rpc.pb-c.h"

size_t rpc_text_field(const char *text)
{
    size_t n = strspn(text, "abcdefghijklmnopqrstuvwxyz_-.[]0123456789");
    return n && text[n] == ':' ? n : 0;
}

/* Whether such a status is about what the request says. */
static bool is_about_request(enum rpc_code code)
{
    return code == RPC_INVALID_ARGUMENT || code == RPC_NOT_FOUND || code == RPC_PERMISSION_DENIED ||
           code == RPC_UNIMPLEMENTED;
}

/* *any: the message, packed; its value is to be freed. */
static void pack_any(const char *type_url, const ProtobufCMessage *m, Google__Rpc__Any *any)
{
    google__rpc__any__init(any);
    any->type_url = (char *)type_url;
    any->value.data = mem_array(protobuf_c_message_get_packed_size(m), 1);
    any->value.len = protobuf_c_message_pack(m, any->value.data);
}

static void pack_violation(const char *text, size_t field_bytes, Google__Rpc__Any *any)
{
    Google__Rpc__BadRequest m = GOOGLE__RPC__BAD_REQUEST__INIT;
    Google__Rpc__BadRequest__FieldViolation v = GOOGLE__RPC__BAD_REQUEST__FIELD_VIOLATION__INIT, *list[] = {&v};
    v.field = mem_dup(text, field_bytes + 1);
    v.field[field_bytes] = 0;
    v.description = (char *)text + field_bytes + 1 + strspn(text + field_bytes + 1, " ");
    m.field_violations = list;
    m.n_field_violations = 1;
    pack_any("type.googleapis.com/google.rpc.BadRequest", &m.base, any);
    free(v.field);
}

static void pack_retry(uint32_t retry_after_ms, Google__Rpc__Any *any)
{
    Google__Rpc__RetryInfo m = GOOGLE__RPC__RETRY_INFO__INIT;
    Google__Rpc__Duration delay = GOOGLE__RPC__DURATION__INIT;
    delay.seconds = retry_after_ms / 1000;
    delay.nanos = (int32_t)(retry_after_ms % 1000 * 1000000);
    m.retry_delay = &delay;
    pack_any("type.googleapis.com/google.rpc.RetryInfo", &m.base, any);
}

size_t rpc_details_pack(enum rpc_code code, const char *text, uint32_t retry_after_ms, uint8_t **out)
{
    Google__Rpc__Status m = GOOGLE__RPC__STATUS__INIT;
    Google__Rpc__Any anys[2], *list[] = {&anys[0], &anys[1]};
    size_t field_bytes = is_about_request(code) ? rpc_text_field(text) : 0;
    if (field_bytes)
        pack_violation(text, field_bytes, &anys[m.n_details++]);
    if (retry_after_ms)
        pack_retry(retry_after_ms, &anys[m.n_details++]);
    if (!m.n_details)
        return 0;
    m.code = (int32_t)code;
    m.message = (char *)text;
    m.details = list;
    *out = mem_array(google__rpc__status__get_packed_size(&m), 1);
    size_t n = google__rpc__status__pack(&m, *out);
    for (size_t i = 0; i < m.n_details; i++)
        free(anys[i].value.data);
    return n;
}
