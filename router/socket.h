/*
 * Where operators and registering processes find a router of this host, if its options don't say.
 *
 * A router that listens on HOST:PORT has its sockets in the default run directory: PORT.admin and
 * PORT.cluster. One that listens on unix:PATH has them beside that: PATH.admin, PATH.cluster. So commands
 * need no other option than --router, and nobody but the router's user can connect.
 */
#pragma once

#include "base/status.h"

enum { ROUTER_SOCKET_BYTES = 128 };

/* out: "unix:/run/user/1000/tandem/7470.admin". listen: the client API's address, with its port. kind:
 * "admin", "cluster". Makes nothing. TD_ERR_INVALID: no port, or the path is too long for a socket. */
enum td_status router_socket(const char *listen, const char *kind, char out[ROUTER_SOCKET_BYTES],
                             struct td_error *error_out);
