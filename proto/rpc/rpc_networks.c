#include "proto/rpc/rpc_networks.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

static const uint8_t MAPPED[12] = {[10] = 0xff, [11] = 0xff}; /* RFC 4291, 2.5.5.2 */

/* False: it is no network. */
static bool read_one(const char *text, struct rpc_network *out)
{
    char address[INET6_ADDRSTRLEN];
    const char *slash = strchr(text, '/');
    size_t len = slash ? (size_t)(slash - text) : strlen(text);
    if (len >= sizeof(address))
        return false;
    memcpy(address, text, len);
    address[len] = 0;
    unsigned before = 0; /* bits before an address of IPv4 */
    if (inet_pton(AF_INET, address, out->address + sizeof(MAPPED)) == 1) {
        memcpy(out->address, MAPPED, sizeof(MAPPED));
        before = 8 * sizeof(MAPPED);
    } else if (inet_pton(AF_INET6, address, out->address) != 1) {
        return false;
    }
    const unsigned most = 8 * sizeof(out->address) - before;
    char *end = NULL;
    unsigned long bits = slash ? strtoul(slash + 1, &end, 10) : most;
    if (slash && (slash[1] < '0' || slash[1] > '9' || *end))
        return false;
    out->bits = before + (unsigned)bits;
    return bits <= most;
}

enum td_status rpc_networks_read(const char *option, const char *text, struct rpc_networks *out,
                                 struct td_error *error_out)
{
    *out = (struct rpc_networks){0};
    char *copy = mem_strdup(text ? text : ""), *rest = copy, *one;
    enum td_status s = TD_OK;
    while (!s && *copy && (one = strsep(&rest, ","))) {
        one += strspn(one, " ");
        size_t len = strlen(one);
        while (len && one[len - 1] == ' ')
            one[--len] = 0;
        out->list = mem_resize(out->list, out->n + 1, sizeof(*out->list));
        if (read_one(one, &out->list[out->n]))
            out->n++;
        else
            s = td_fail(error_out, TD_ERR_INVALID, "%s: '%s' is no address, with or without /BITS", option, one);
    }
    free(copy);
    if (s)
        rpc_networks_free(out);
    return s;
}

static bool has(const struct rpc_network *n, const uint8_t address[16])
{
    unsigned whole = n->bits / 8, rest = n->bits % 8;
    if (memcmp(n->address, address, whole) != 0)
        return false;
    return !rest || (n->address[whole] ^ address[whole]) >> (8 - rest) == 0;
}

bool rpc_networks_have(const struct rpc_networks *n, const struct sockaddr_storage *a)
{
    uint8_t address[16];
    if (a->ss_family == AF_INET) {
        memcpy(address, MAPPED, sizeof(MAPPED));
        memcpy(address + sizeof(MAPPED), &((const struct sockaddr_in *)a)->sin_addr, 4);
    } else if (a->ss_family == AF_INET6) {
        memcpy(address, &((const struct sockaddr_in6 *)a)->sin6_addr, 16);
    } else {
        return false;
    }
    for (uint32_t i = 0; i < n->n; i++)
        if (has(&n->list[i], address))
            return true;
    return false;
}

void rpc_networks_free(struct rpc_networks *n)
{
    free(n->list);
    *n = (struct rpc_networks){0};
}

void rpc_address_print(const struct sockaddr_storage *a, char *out, size_t out_bytes)
{
    char host[INET6_ADDRSTRLEN + 16], port[8];
    struct sockaddr_storage plain = *a;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&plain;
    if (a->ss_family == AF_INET6 && IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr)) {
        struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = v6->sin6_port};
        memcpy(&v4.sin_addr, v6->sin6_addr.s6_addr + sizeof(MAPPED), sizeof(v4.sin_addr));
        memcpy(&plain, &v4, sizeof(v4));
    }
    bool is_v6 = plain.ss_family == AF_INET6;
    if ((is_v6 || plain.ss_family == AF_INET) &&
        !getnameinfo((struct sockaddr *)&plain, is_v6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in), host,
                     sizeof(host), port, sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV))
        snprintf(out, out_bytes, is_v6 ? "[%s]:%s" : "%s:%s", host, port);
}
