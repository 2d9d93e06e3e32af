/* Codes and texts: names of codes, conversion of td_status, and cleaning of texts for the wire and for
 * logs. */
#include "proto/rpc/rpc_internal.h"

#include <string.h>

static const char *const CODE_NAMES[] = {
    "OK",        "CANCELLED",       "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
    "NOT_FOUND", "ALREADY_EXISTS",  "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
    "ABORTED",   "OUT_OF_RANGE",    "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
    "DATA_LOSS", "UNAUTHENTICATED",
};

const char *rpc_code_name(enum rpc_code code)
{
    return (unsigned)code < sizeof(CODE_NAMES) / sizeof(*CODE_NAMES) ? CODE_NAMES[code] : "UNKNOWN";
}

enum rpc_code rpc_code_of_status(enum td_status status)
{
    switch (status) {
    case TD_OK:
        return RPC_OK;
    case TD_NOT_YET:
    case TD_BUSY:
    case TD_ERR_PEER_LOST:
        return RPC_UNAVAILABLE;
    case TD_ERR_INVALID:
        return RPC_INVALID_ARGUMENT;
    case TD_ERR_NOT_FOUND:
        return RPC_NOT_FOUND;
    case TD_ERR_NO_SPACE:
    case TD_ERR_REFUSED:
        return RPC_RESOURCE_EXHAUSTED;
    case TD_ERR_CANCELLED:
        return RPC_CANCELLED;
    case TD_ERR_DEADLINE:
        return RPC_DEADLINE_EXCEEDED;
    case TD_ERR_UNSUPPORTED:
        return RPC_UNIMPLEMENTED;
    case TD_ERR_STALE:
        return RPC_ABORTED;
    case TD_ERR_FORBIDDEN:
        return RPC_PERMISSION_DENIED;
    case TD_ERR_VERSION:
        return RPC_FAILED_PRECONDITION;
    case TD_ERR_AUTH:
        return RPC_UNAUTHENTICATED;
    case TD_ERR_CHECKSUM:
        return RPC_DATA_LOSS;
    case TD_ERR_PROTOCOL:
    case TD_ERR_NO_MEMORY:
    case TD_ERR_DEVICE:
    case TD_ERR_CORRUPT:
    case TD_ERR_IO:
        return RPC_INTERNAL;
    }
    return RPC_UNKNOWN;
}

/* Length in bytes of the well-formed, printable character at p, or 0. Unicode 15, table 3-7. */
static size_t printable_len(const uint8_t *p, size_t left)
{
    if (p[0] < 0x80)
        return p[0] >= 0x20 && p[0] != 0x7f;
    size_t len = p[0] >= 0xf0 ? 4 : p[0] >= 0xe0 ? 3 : 2;
    if (p[0] < 0xc2 || p[0] > 0xf4 || len > left)
        return 0;
    for (size_t i = 1; i < len; i++)
        if ((p[i] & 0xc0) != 0x80)
            return 0;
    bool overlong = (p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xf0 && p[1] < 0x90);
    bool surrogate = p[0] == 0xed && p[1] > 0x9f;
    bool too_large = p[0] == 0xf4 && p[1] > 0x8f;
    bool control = p[0] == 0xc2 && p[1] < 0xa0;
    return overlong || surrogate || too_large || control ? 0 : len;
}

bool rpc_text_is_clean(const char *text, size_t len_bytes)
{
    size_t len = 0;
    for (size_t i = 0; i < len_bytes; i += len)
        if (!(len = printable_len((const uint8_t *)text + i, len_bytes - i)))
            return false;
    return true;
}

void rpc_text_clean(const char *text, size_t len_bytes, char *out, size_t out_bytes)
{
    const uint8_t *p = (const uint8_t *)text;
    size_t n = 0;
    for (size_t i = 0; i < len_bytes;) {
        size_t len = printable_len(p + i, len_bytes - i);
        size_t need = len ? len : 1;
        if (n + need >= out_bytes)
            break;
        if (len)
            memcpy(out + n, p + i, len);
        else
            out[n] = p[i] < 0x20 ? ' ' : '?';
        n += need;
        i += need;
    }
    out[n] = 0;
}

bool rpc_text_is_silence(const char *text)
{
    /* gRPC has no code for it. Of its own: keepalive, and the time of an attempt; of the kernel: the rest. */
    static const char *const WORDS[] = {"timed out", "timeout", "unreachable", "No route to host"};
    for (size_t i = 0; i < sizeof(WORDS) / sizeof(*WORDS); i++)
        if (strstr(text, WORDS[i]))
            return true;
    return false;
}
