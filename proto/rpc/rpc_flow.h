/* TCP connections by their descriptors: what they have carried, which one it is, and its end. In a file of
 * its own: the kernel's header that has the fields and libc's that others need define the same names. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct rpc_flow {
    uint64_t read_bytes;  /* by this process */
    uint64_t acked_bytes; /* sent, and acknowledged by the peer */
};
/* False: the descriptor is not of a TCP connection. Any thread. */
bool rpc_flow_of(int fd, struct rpc_flow *out);
/* A number that no other socket of this boot has; 0: the descriptor is of none. */
uint64_t rpc_flow_cookie(int fd);
/* The descriptor of this process's latest connection to that address (as rpc_address_print() writes it); -1:
 * none. Looks at all descriptors. */
int rpc_flow_find(const char *address);
/* Closes the connection with this cookie. gRPC owns the descriptor and may close it at any time, so a copy of
 * it is checked and shut down; gRPC then reads the end. What the kernel had received is dropped: gRPC would
 * still read it, as thousands of calls. */
void rpc_flow_cut(int fd, uint64_t cookie);
/* Whether neither side has closed it. True for what is not of a TCP connection. Any thread. */
bool rpc_flow_is_open(int fd);
