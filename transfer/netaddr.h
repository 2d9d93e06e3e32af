/* "HOST:PORT" to socket addresses and back, and which network device an address belongs to. May block in the resolver. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/status.h"

/* "127.0.0.1:0", "[::1]:9000", "host:9000", ":9000" (any). TD_ERR_INVALID or TD_ERR_NOT_FOUND; error_out names the text. */
enum td_status netaddr_resolve(const char *text, struct sockaddr_storage *out, socklen_t *len_out,
                               struct td_error *error_out);

/* The same, of a name with several addresses the one of number `nth`, counted round: an attempt that failed is followed by another address. */
enum td_status netaddr_resolve_nth(const char *text, uint32_t nth, struct sockaddr_storage *out, socklen_t *len_out,
                                   struct td_error *error_out);
/* Whether resolving takes no name service: "HOST:PORT" whose host is an address in figures, or none. */
bool netaddr_is_numeric(const char *text);
void netaddr_format(const struct sockaddr_storage *address, char *out, uint32_t out_bytes);

/*
 * The device through which this machine has or reaches the address: "lo" for loopback, the device that holds it, else the one
 * whose route leads there. false if there is none (any-addresses included).
 */
bool netaddr_device(const struct sockaddr_storage *address, socklen_t len, char out[64]);

/*
 * The RDMA device behind a network device, with its port, as UCX names it ("mlx5_0:1"); false if there is none. sysfs: "/sys".
 * A device on top of others (a bond, a VLAN) has none of its own.
 */
bool netaddr_rdma_device(const char *sysfs, const char *device, char out[64]);

/* The first device that is up and not loopback, else "lo". */
void netaddr_any_device(char out[64]);
