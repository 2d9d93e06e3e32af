#include "proto/rpc/rpc_flow.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/rpc/rpc_networks.h"

bool rpc_flow_of(int fd, struct rpc_flow *out)
{
    struct tcp_info info = {0};
    socklen_t len = sizeof(info);
    int unread = 0;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len) || ioctl(fd, SIOCINQ, &unread))
        return false;
    uint64_t came = info.tcpi_bytes_received;
    *out = (struct rpc_flow){came > (uint64_t)unread ? came - (uint64_t)unread : 0, info.tcpi_bytes_acked};
    return true;
}

uint64_t rpc_flow_cookie(int fd)
{
    uint64_t cookie = 0;
    socklen_t len = sizeof(cookie);
    return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &len) ? 0 : cookie;
}

/* port: of the address; compared first, because that is quick. IPv6 has it at the same place as IPv4. */
static bool leads_to(int fd, in_port_t port, const char *address)
{
    struct sockaddr_storage to = {0};
    socklen_t len = sizeof(to);
    char text[INET6_ADDRSTRLEN + 32] = "";
    if (getpeername(fd, (struct sockaddr *)&to, &len) || ((struct sockaddr_in *)&to)->sin_port != port)
        return false;
    rpc_address_print(&to, text, sizeof(text));
    return !strcmp(text, address);
}

int rpc_flow_find(const char *address)
{
    const char *colon = strrchr(address, ':');
    const in_port_t port = htons(colon ? (in_port_t)atoi(colon + 1) : 0);
    int found = -1;
    uint64_t latest = 0; /* cookies grow */
    DIR *fds = opendir("/proc/self/fd");
    const struct dirent *e;
    while (fds && (e = readdir(fds))) {
        int fd = e->d_name[0] == '.' ? -1 : atoi(e->d_name);
        if (!leads_to(fd, port, address) || rpc_flow_cookie(fd) < latest)
            continue;
        found = fd;
        latest = rpc_flow_cookie(fd);
    }
    if (fds)
        closedir(fds);
    return found;
}

void rpc_flow_cut(int fd, uint64_t cookie)
{
    char bytes[16 << 10];
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (copy >= 0 && rpc_flow_cookie(copy) == cookie) {
        shutdown(copy, SHUT_RDWR);
        while (recv(copy, bytes, sizeof(bytes), MSG_DONTWAIT) > 0)
            ;
    }
    if (copy >= 0)
        close(copy);
}

enum { ESTABLISHED = 1 }; /* TCP_ESTABLISHED of <netinet/tcp.h> */

bool rpc_flow_is_open(int fd)
{
    struct tcp_info info = {0};
    socklen_t len = sizeof(info);
    return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len) || info.tcpi_state == ESTABLISHED;
}
