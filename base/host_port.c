#include "base/host_port.h"

#include <stdbool.h>
#include <string.h>

enum td_status host_port_split(const char *text, char host[HOST_BYTES], const char **port_out,
                               struct td_error *error_out)
{
    const char *colon = strrchr(text, ':');
    if (!colon || !colon[1] || (size_t)(colon - text) >= HOST_BYTES)
        return td_fail(error_out, TD_ERR_INVALID, "address %.200s: expected HOST:PORT", text);
    size_t n = (size_t)(colon - text);
    bool is_bracketed = n >= 2 && text[0] == '[' && text[n - 1] == ']';
    memcpy(host, text + is_bracketed, n - 2u * is_bracketed);
    host[n - 2u * is_bracketed] = 0;
    *port_out = colon + 1;
    return TD_OK;
}
