/* Converts "HOST:PORT" to socket addresses and back, and finds the network device of an address. Resolving
 * may block. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/status.h"

/* Accepts "127.0.0.1:0", "[::1]:9000", "host:9000", ":9000" (any address). TD_ERR_INVALID or
 * TD_ERR_NOT_FOUND; error_out names the text. */
enum td_status netaddr_resolve(const char *text, struct sockaddr_storage *out, socklen_t *len_out,
                               struct td_error *error_out);

/* As netaddr_resolve. If the name has several addresses, takes number `nth`, modulo their number, so that
 * the next attempt after a failure takes another address. */
enum td_status netaddr_resolve_nth(const char *text, uint32_t nth, struct sockaddr_storage *out, socklen_t *len_out,
                                   struct td_error *error_out);
/* Whether resolving needs no name service: the host of "HOST:PORT" is a numeric address or empty. */
bool netaddr_is_numeric(const char *text);
void netaddr_format(const struct sockaddr_storage *address, char *out, uint32_t out_bytes);

/* Finds the device by which this machine has or reaches the address: "lo" for loopback, the device that
 * holds the address, else the device of the route to it. False: there is none (also for any-addresses). */
bool netaddr_device(const struct sockaddr_storage *address, socklen_t len, char out[64]);

/*
 * Finds the RDMA device behind a network device, with its port, as UCX names it ("mlx5_0:1"); false: there is
 * none. sysfs: "/sys", or a test's directory. A device on top of others (a bond, a VLAN) has none of its own.
 */
bool netaddr_rdma_device(const char *sysfs, const char *device, char out[64]);

/* The first device that is up and not loopback, else "lo". */
void netaddr_any_device(char out[64]);
