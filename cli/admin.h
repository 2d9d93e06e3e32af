/*
 * How commands of operators reach a router's admin API: at --admin, or at the socket that belongs to --router
 * (router/socket.h), which exists on the router's host only.
 */
#pragma once

#include "base/options.h"
#include "cli/cli.h"

struct admin_at { /* member `at` of a command's options */
    const char *router, *admin, *admin_key;
};

#define ADMIN_OPTIONS(S)                                                                                               \
    {"router",                                                                                                         \
     OPT_ADDRESS,                                                                                                      \
     offsetof(S, at.router),                                                                                           \
     NULL,                                                                                                             \
     "HOST:PORT",                                                                                                      \
     0,                                                                                                                \
     0,                                                                                                                \
     "a router of this host; default: $TANDEM_ROUTER, else " CLI_DEFAULT_ROUTER},                                      \
        {"admin",                                                                                                      \
         OPT_ADDRESS,                                                                                                  \
         offsetof(S, at.admin),                                                                                        \
         NULL,                                                                                                         \
         "ADDR",                                                                                                       \
         0,                                                                                                            \
         0,                                                                                                            \
         "admin address of a router; default: $TANDEM_ADMIN, else the admin socket of --router"},                      \
    {                                                                                                                  \
        "admin-key", OPT_SECRET, offsetof(S, at.admin_key), NULL, "TEXT", 0, 0,                                        \
            "admin key of that address; default: $TANDEM_ADMIN_KEY"                                                    \
    }

enum { ADMIN_ADDRESS_BYTES = 160 };

/* Where the admin API is. TD_ERR_INVALID: --router is not on this host. TD_ERR_REFUSED: others can
 * put a socket where the router's would be. */
enum td_status admin_address(const struct admin_at *at, char out[ADMIN_ADDRESS_BYTES], struct td_error *error_out);
/* A client for it; close it with rpc_client_close(). NULL: the reason was printed. */
struct rpc_client *admin_connect(const char *command, const struct admin_at *at);
/* As cli_rpc_fail(), for a call of that client. */
int admin_fail(const char *command, const struct admin_at *at, enum rpc_code code, const char *text);
