/* What a TCP connection has carried. In a file of its own: the kernel's header that has the fields and libc's
 * that others need define the same names. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct rpc_flow {
    uint64_t read_bytes;  /* by this process */
    uint64_t acked_bytes; /* sent, and acknowledged by the peer */
};
/* False: the descriptor is not of a TCP connection. Any thread. */
bool rpc_flow_of(int fd, struct rpc_flow *out);
/* Whether neither side has closed it. True for what is not of a TCP connection. Any thread. */
bool rpc_flow_is_open(int fd);
