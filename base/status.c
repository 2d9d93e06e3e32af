#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>

enum td_group td_status_group(enum td_status status)
{
    if (status == TD_OK)
        return TD_GROUP_OK;
    if (status > 0)
        return TD_GROUP_NOT_YET;
    if (status > -20)
        return TD_GROUP_CALL;
    return status > -40 ? TD_GROUP_PEER : TD_GROUP_PROCESS;
}

const char *td_status_name(enum td_status status)
{
    switch (status) {
    case TD_OK:
        return "ok";
    case TD_NOT_YET:
        return "not_yet";
    case TD_BUSY:
        return "busy";
    case TD_ERR_INVALID:
        return "invalid";
    case TD_ERR_NOT_FOUND:
        return "not_found";
    case TD_ERR_NO_SPACE:
        return "no_space";
    case TD_ERR_CANCELLED:
        return "cancelled";
    case TD_ERR_DEADLINE:
        return "deadline";
    case TD_ERR_UNSUPPORTED:
        return "unsupported";
    case TD_ERR_REFUSED:
        return "refused";
    case TD_ERR_STALE:
        return "stale";
    case TD_ERR_FORBIDDEN:
        return "forbidden";
    case TD_ERR_PEER_LOST:
        return "peer_lost";
    case TD_ERR_PROTOCOL:
        return "protocol";
    case TD_ERR_VERSION:
        return "version";
    case TD_ERR_AUTH:
        return "auth";
    case TD_ERR_CHECKSUM:
        return "checksum";
    case TD_ERR_NO_MEMORY:
        return "no_memory";
    case TD_ERR_DEVICE:
        return "device";
    case TD_ERR_CORRUPT:
        return "corrupt";
    case TD_ERR_IO:
        return "io";
    }
    return "unknown";
}

enum td_status td_fail(struct td_error *error_out, enum td_status status, const char *format, ...)
{
    if (error_out) {
        va_list args;
        va_start(args, format);
        vsnprintf(error_out->text, sizeof(error_out->text), format, args);
        va_end(args);
    }
    return status;
}
