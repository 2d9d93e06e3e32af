#include "worker/reach.h"

#include <stdio.h>
#include <string.h>

enum { PORT_BYTES = 9 }; /* room for brackets and a port that join() may add */

static bool is_unix(const char *address)
{
    return !strncmp(address, "unix:", 5);
}

/* The length of HOST in HOST:PORT or in HOST alone. A bare IPv6 address has several colons and no port. */
static int host_len(const char *address)
{
    const char *colon = strrchr(address, ':');
    bool is_bare = !colon || (address[0] != '[' && strchr(address, ':') != colon) || strchr(colon, ']');
    return (int)(is_bare ? strlen(address) : (size_t)(colon - address));
}

/* Whether address ends with a port. */
static bool has_port(const char *address)
{
    return address[host_len(address)] == ':';
}

static bool is_wildcard(const char *address)
{
    int n = host_len(address);
    return !n || (n == 7 && !memcmp(address, "0.0.0.0", 7)) || (n == 4 && !memcmp(address, "[::]", 4)) ||
           (n == 2 && !memcmp(address, "::", 2)) || (n == 1 && *address == '*');
}

static enum td_status check_address(const char *option, const char *address, bool may_be_wildcard, struct td_error *e)
{
    if (strlen(address) >= REACH_BYTES - PORT_BYTES)
        return td_fail(e, TD_ERR_INVALID, "%s: longer than %d bytes", option, REACH_BYTES - PORT_BYTES - 1);
    if (!may_be_wildcard && !is_unix(address) && is_wildcard(address))
        return td_fail(
            e, TD_ERR_INVALID,
            "%s %s is every address of this host, which tells nobody where to connect; --advertise HOST does", option,
            address);
    return TD_OK;
}

bool reach_is_local(const char *address)
{
    int n = host_len(address);
    return is_unix(address) || !strncmp(address, "127.", 4) || (n == 9 && !memcmp(address, "localhost", 9)) ||
           (n == 5 && !memcmp(address, "[::1]", 5)) || (n == 3 && !memcmp(address, "::1", 3));
}

enum td_status reach_guard(const char *option, const char *address, bool asks_proof, bool is_insecure,
                           struct td_error *e)
{
    if (is_insecure || asks_proof || reach_is_local(address))
        return TD_OK;
    return td_fail(e, TD_ERR_INVALID,
                   "%s %s: the network reaches it, and nothing proves who connects; --insecure allows that", option,
                   address);
}

enum td_status reach_listen(const struct reach_config *config, char xfer_listen_out[REACH_BYTES],
                            struct td_error *error_out)
{
    const char *told = config->advertise;
    bool tells = told && !is_unix(told);
    enum td_status s = told ? check_address("--advertise", told, false, error_out) : TD_OK;
    if (!s)
        s = check_address("--listen", config->listen, tells, error_out);
    if (!s && config->xfer_listen)
        s = check_address("--xfer-listen", config->xfer_listen, tells, error_out);
    if (s)
        return s;
    if (config->xfer_listen)
        snprintf(xfer_listen_out, REACH_BYTES, "%s", config->xfer_listen + (*config->xfer_listen == '*'));
    else if (is_unix(config->listen))
        /* A router that reaches a unix socket is on this host. */
        snprintf(xfer_listen_out, REACH_BYTES, "127.0.0.1:0");
    else
        snprintf(xfer_listen_out, REACH_BYTES, "%.*s:0", *config->listen == '*' ? 0 : host_len(config->listen),
                 config->listen);
    return TD_OK;
}

/* host with the port of `listens`, in brackets if it is an IPv6 address. */
static void join(char out[REACH_BYTES], const char *host, const char *listens)
{
    int n = host_len(host);
    bool needs_brackets = host[0] != '[' && memchr(host, ':', (size_t)n);
    snprintf(out, REACH_BYTES, "%s%.*s%s%s", needs_brackets ? "[" : "", n, host, needs_brackets ? "]" : "",
             listens + host_len(listens));
}

void reach_rpc(const struct reach_config *config, const char *listens, char out[REACH_BYTES])
{
    const char *told = config->advertise;
    if (told && !has_port(told) && !is_unix(listens))
        join(out, told, listens);
    else
        snprintf(out, REACH_BYTES, "%s", told ? told : listens);
}

void reach_xfer(const struct reach_config *config, const char *listens, char out[REACH_BYTES])
{
    const char *told = config->advertise;
    bool has_own_host = config->xfer_listen && !is_wildcard(config->xfer_listen);
    if (told && !is_unix(told) && !has_own_host)
        join(out, told, listens);
    else
        snprintf(out, REACH_BYTES, "%s", listens);
}
