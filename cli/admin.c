#include "cli/admin.h"

#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/private_dir.h"
#include "router/socket.h"
#include "transfer/netaddr.h"
#include "worker/reach.h"

static const char *or_environment(const char *option, const char *name)
{
    const char *env = getenv(name);
    return option ? option : env && *env ? env : NULL;
}

/* Whether a socket of this host can have the address. */
static bool is_here(const char *address)
{
    struct sockaddr_storage a;
    struct td_error e;
    socklen_t len;
    if (reach_is_local(address))
        return true;
    if (netaddr_resolve(address, &a, &len, &e))
        return false;
    if (a.ss_family == AF_INET6)
        ((struct sockaddr_in6 *)&a)->sin6_port = 0;
    else
        ((struct sockaddr_in *)&a)->sin_port = 0;
    int fd = socket(a.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool is_bound = fd >= 0 && !bind(fd, (struct sockaddr *)&a, len);
    if (fd >= 0)
        close(fd);
    return is_bound;
}

/* The admin socket is beside the router's unix socket, where others may have put one of theirs. */
static enum td_status check_beside(const char *router, const char *socket, struct td_error *e)
{
    struct stat client, admin;
    if (lstat(router + strlen("unix:"), &client) || lstat(socket + strlen("unix:"), &admin) ||
        client.st_uid == admin.st_uid)
        return TD_OK;
    return td_fail(e, TD_ERR_REFUSED, "%s: belongs to user %u, and the router's socket to user %u",
                   socket + strlen("unix:"), (unsigned)admin.st_uid, (unsigned)client.st_uid);
}

enum td_status admin_address(const struct admin_at *at, char out[ADMIN_ADDRESS_BYTES], struct td_error *e)
{
    const char *told = or_environment(at->admin, "TANDEM_ADMIN"), *router = cli_router(at->router);
    char dir[ROUTER_SOCKET_BYTES], socket[ROUTER_SOCKET_BYTES];
    struct stat st;
    if (told) {
        snprintf(out, ADMIN_ADDRESS_BYTES, "%s", told);
        return TD_OK;
    }
    if (!strchr(router, ':'))
        return td_fail(e, TD_ERR_INVALID, "--router: '%s' is neither HOST:PORT nor unix:PATH", router);
    if (!is_here(router))
        return td_fail(e, TD_ERR_INVALID, "--router %s is not on this host: --admin says where its operators ask",
                       router);
    bool is_in_dir = strncmp(router, "unix:", 5) && private_dir_default(dir, sizeof(dir)) && !lstat(dir, &st);
    if (is_in_dir && private_dir_check(dir, e)) /* somebody else could have put a socket there */
        return TD_ERR_REFUSED;
    enum td_status s = router_socket(router, "admin", socket, e);
    if (!s && !strncmp(router, "unix:", 5))
        s = check_beside(router, socket, e);
    if (!s)
        snprintf(out, ADMIN_ADDRESS_BYTES, "%s", socket);
    return s;
}

struct rpc_client *admin_connect(const char *command, const struct admin_at *at)
{
    char address[ADMIN_ADDRESS_BYTES];
    struct rpc_client *c = NULL;
    struct td_error e = {{0}};
    if (admin_address(at, address, &e)) {
        cli_fail(command, "%s", e.text);
        return NULL;
    }
    const struct rpc_tls_files tls = cli_tls();
    const struct rpc_client_config config = {.target = address,
                                             .tls = &tls,
                                             .bearer = or_environment(at->admin_key, "TANDEM_ADMIN_KEY"),
                                             .max_message_bytes = 64 << 20,
                                             .max_queued_bytes = 64 << 20};
    if (rpc_client_open(&config, &c, &e))
        cli_fail(command, "%s", e.text);
    return c;
}

int admin_fail(const char *command, const struct admin_at *at, enum rpc_code code, const char *text)
{
    char address[ADMIN_ADDRESS_BYTES] = "?";
    struct td_error e;
    struct stat st;
    admin_address(at, address, &e);
    const char *path = strncmp(address, "unix:", 5) ? NULL : address + 5;
    if (code == RPC_UNAVAILABLE && path && !lstat(path, &st) && st.st_uid != geteuid())
        return cli_fail(command, "%s: belongs to the router's user %u; operators are that user", path,
                        (unsigned)st.st_uid);
    return cli_rpc_fail(command, or_environment(at->admin, "TANDEM_ADMIN") ? address : cli_router(at->router), code,
                        text);
}
