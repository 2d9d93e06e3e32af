#include "proto/rpc/rpc_flow.h"

#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

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

enum { ESTABLISHED = 1 }; /* TCP_ESTABLISHED of <netinet/tcp.h> */

bool rpc_flow_is_open(int fd)
{
    struct tcp_info info = {0};
    socklen_t len = sizeof(info);
    return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len) || info.tcpi_state == ESTABLISHED;
}
