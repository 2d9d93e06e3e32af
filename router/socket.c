#include "router/socket.h"

#include <stdio.h>
#include <string.h>
#include <sys/un.h>

#include "base/private_dir.h"

enum { PATH_BYTES = sizeof(((struct sockaddr_un *)0)->sun_path) };

enum td_status router_socket(const char *listen, const char *kind, char out[ROUTER_SOCKET_BYTES], struct td_error *e)
{
    char dir[PATH_BYTES];
    const char *colon = strrchr(listen, ':');
    int n = PATH_BYTES;
    if (!colon)
        return td_fail(e, TD_ERR_INVALID, "%s: neither HOST:PORT nor unix:PATH", listen);
    if (!strncmp(listen, "unix:", 5))
        n = snprintf(out, ROUTER_SOCKET_BYTES, "%s.%s", listen, kind);
    else if (private_dir_default(dir, sizeof(dir)))
        n = snprintf(out, ROUTER_SOCKET_BYTES, "unix:%s/%s.%s", dir, colon + 1, kind);
    return n < 5 + PATH_BYTES ? TD_OK
                              : td_fail(e, TD_ERR_INVALID,
                                        "the path of a socket has at most %d bytes; a shorter "
                                        "XDG_RUNTIME_DIR helps",
                                        PATH_BYTES - 1);
}
