/*
 * Addresses as text, and lists of networks: "10.0.0.7, 192.0.2.0/24, 2001:db8::/32". What is no network of
 * IPv4 or IPv6 is an error.
 *
 * Threads: a list is not changed after it was read. Ownership: whoever reads one frees it.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/status.h"

struct rpc_network {
    uint8_t address[16]; /* IPv4 as IPv6 maps it */
    unsigned bits;       /* of it that count */
};
struct rpc_networks {
    struct rpc_network *list;
    uint32_t n;
};

/* text: NULL or "": none. option: named in the error. */
enum td_status rpc_networks_read(const char *option, const char *text, struct rpc_networks *out,
                                 struct td_error *error_out);
bool rpc_networks_have(const struct rpc_networks *n, const struct sockaddr_storage *a);
void rpc_networks_free(struct rpc_networks *n);

/* Writes "10.0.0.1:4242" or "[::1]:4242"; IPv4 also where IPv6 maps it. Unchanged if it is neither. */
void rpc_address_print(const struct sockaddr_storage *a, char *out, size_t out_bytes);
