#include "transfer/netaddr.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/host_port.h"

bool netaddr_is_numeric(const char *text)
{
    char host[HOST_BYTES];
    const char *port;
    struct in6_addr ignored;
    return !host_port_split(text, host, &port, NULL) &&
           (!host[0] || inet_pton(AF_INET, host, &ignored) == 1 || inet_pton(AF_INET6, host, &ignored) == 1);
}

enum td_status netaddr_resolve_nth(const char *text, uint32_t nth, struct sockaddr_storage *out, socklen_t *len_out,
                                   struct td_error *error_out)
{
    char host[HOST_BYTES];
    const char *port;
    enum td_status s = host_port_split(text, host, &port, error_out);
    if (s)
        return s;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV | AI_PASSIVE};
    struct addrinfo *found = NULL, *a;
    int rc = getaddrinfo(host[0] ? host : NULL, port, &hints, &found);
    if (rc)
        return td_fail(error_out, TD_ERR_NOT_FOUND, "address %.180s: %s", text, gai_strerror(rc));
    uint32_t n = 0;
    for (a = found; a; a = a->ai_next)
        n++;
    a = found;
    for (nth %= n; nth; nth--)
        a = a->ai_next;
    memset(out, 0, sizeof(*out));
    memcpy(out, a->ai_addr, a->ai_addrlen);
    *len_out = a->ai_addrlen;
    freeaddrinfo(found);
    return TD_OK;
}

enum td_status netaddr_resolve(const char *text, struct sockaddr_storage *out, socklen_t *len_out,
                               struct td_error *error_out)
{
    return netaddr_resolve_nth(text, 0, out, len_out, error_out);
}

void netaddr_format(const struct sockaddr_storage *address, char *out, uint32_t out_bytes)
{
    char host[INET6_ADDRSTRLEN] = "?";
    if (address->ss_family == AF_INET) {
        const struct sockaddr_in *a = (const struct sockaddr_in *)address;
        inet_ntop(AF_INET, &a->sin_addr, host, sizeof(host));
        snprintf(out, out_bytes, "%s:%u", host, ntohs(a->sin_port));
        return;
    }
    const struct sockaddr_in6 *a = (const struct sockaddr_in6 *)address;
    inet_ntop(AF_INET6, &a->sin6_addr, host, sizeof(host));
    snprintf(out, out_bytes, "[%s]:%u", host, ntohs(a->sin6_port));
}

static bool same_host(const struct sockaddr *a, const struct sockaddr_storage *b)
{
    if (!a || a->sa_family != b->ss_family)
        return false;
    if (a->sa_family == AF_INET)
        return ((const struct sockaddr_in *)a)->sin_addr.s_addr == ((const struct sockaddr_in *)b)->sin_addr.s_addr;
    return a->sa_family == AF_INET6 && !memcmp(&((const struct sockaddr_in6 *)a)->sin6_addr,
                                               &((const struct sockaddr_in6 *)b)->sin6_addr, sizeof(struct in6_addr));
}

static bool is_loopback(const struct sockaddr_storage *a)
{
    if (a->ss_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)a)->sin_addr.s_addr) >> 24 == 127;
    return a->ss_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)a)->sin6_addr);
}

static bool is_any(const struct sockaddr_storage *a)
{
    if (a->ss_family == AF_INET)
        return ((const struct sockaddr_in *)a)->sin_addr.s_addr == htonl(INADDR_ANY);
    return a->ss_family == AF_INET6 && IN6_IS_ADDR_UNSPECIFIED(&((const struct sockaddr_in6 *)a)->sin6_addr);
}

static bool device_holding(const struct sockaddr_storage *address, char out[64])
{
    struct ifaddrs *all = NULL;
    if (getifaddrs(&all))
        return false;
    bool found = false;
    for (struct ifaddrs *i = all; i && !found; i = i->ifa_next) {
        found = same_host(i->ifa_addr, address);
        if (found)
            snprintf(out, 64, "%s", i->ifa_name);
    }
    freeifaddrs(all);
    return found;
}

/* Connecting a datagram socket sends nothing, but makes the kernel choose the route, and with it our own
 * address. */
static bool device_towards(const struct sockaddr_storage *address, socklen_t len, char out[64])
{
    int fd = socket(address->ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return false;
    struct sockaddr_storage own = {0};
    socklen_t own_len = sizeof(own);
    bool routed = connect(fd, (const struct sockaddr *)address, len) == 0 &&
                  getsockname(fd, (struct sockaddr *)&own, &own_len) == 0;
    close(fd);
    return routed && device_holding(&own, out);
}

bool netaddr_device(const struct sockaddr_storage *address, socklen_t len, char out[64])
{
    if (is_any(address))
        return false;
    if (is_loopback(address)) {
        snprintf(out, 64, "lo");
        return true;
    }
    return device_holding(address, out) || device_towards(address, len, out);
}

/* The port of the card behind the network device. sysfs counts ports from 0, RDMA from 1. */
static int port_of(const char *sysfs, const char *device)
{
    char path[256];
    int port = 0;
    snprintf(path, sizeof(path), "%s/class/net/%s/dev_port", sysfs, device);
    FILE *f = fopen(path, "re");
    if (f && fscanf(f, "%d", &port) != 1)
        port = 0;
    if (f)
        fclose(f);
    return port + 1;
}

bool netaddr_rdma_device(const char *sysfs, const char *device, char out[64])
{
    char path[256], name[48] = "";
    snprintf(path, sizeof(path), "%s/class/net/%s/device/infiniband", sysfs, device);
    DIR *dir = opendir(path);
    if (!dir)
        return false;
    for (struct dirent *e; !name[0] && (e = readdir(dir));)
        if (e->d_name[0] != '.' && strlen(e->d_name) < sizeof(name))
            memcpy(name, e->d_name, strlen(e->d_name) + 1);
    closedir(dir);
    if (name[0])
        snprintf(out, 64, "%s:%d", name, port_of(sysfs, device));
    return name[0] != 0;
}

void netaddr_any_device(char out[64])
{
    snprintf(out, 64, "lo");
    struct ifaddrs *all = NULL;
    if (getifaddrs(&all))
        return;
    for (struct ifaddrs *i = all; i; i = i->ifa_next) {
        if (!i->ifa_addr || i->ifa_addr->sa_family != AF_INET || !(i->ifa_flags & IFF_UP) ||
            i->ifa_flags & IFF_LOOPBACK)
            continue;
        snprintf(out, 64, "%s", i->ifa_name);
        break;
    }
    freeifaddrs(all);
}
