/*
 * What the transport (wire_ucx.c) and the bare loop that it is measured against (bench/transfer_bare.c)
 * share, so that both use UCX with the same options. Only these files and wire_ucx_setup.c see UCX.
 *
 * Threads: any thread may call these functions, but an endpoint belongs to the thread of its worker.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <ucp/api/ucp.h>

#include "base/status.h"

/* Sets UCX's environment, logging and signal handling; once per process, before any other call of UCX. */
void wire_ucx_setup(void);

enum td_status wire_ucx_convert(ucs_status_t s);

/* What a list of transports can do; sent to peers (wire_ucx.c). */
enum { WIRE_UCX_SHM = 1, WIRE_UCX_NETWORKS = 2 };
/* list: as UCX_TLS. Names that are not known here count as networks. */
uint16_t wire_ucx_usable(const char *list);
/* TD_ERR_INVALID: the list has a network transport, and the network is not trusted. */
enum td_status wire_ucx_check(const char *list, bool is_trusted_network, bool encrypts, struct td_error *error_out);

/* transports: as UCX_TLS. device: network device, as in UCX_NET_DEVICES. The caller frees *out with
 * ucp_cleanup. */
enum td_status wire_ucx_context_open(const char *transports, const char *device, ucp_context_h *out,
                                     struct td_error *error_out);

/* Makes a worker, to be used by one thread at a time. TD_ERR_IO: no descriptors, or no shared memory. */
enum td_status wire_ucx_worker_open(ucp_context_h context, ucp_worker_h *out, int *fd_out);

/* Opens an endpoint in peer-error mode to the worker with this address (ucp_worker_get_address). */
ucs_status_t wire_ucx_endpoint_open(ucp_worker_h worker, const uint8_t *address, ucp_err_handler_cb_t on_error,
                                    void *arg, ucp_ep_h *out);

/* Lists the transports that carry messages, e.g. "posix,tcp/lo"; the one that carries payloads comes
 * first. */
void wire_ucx_transport(ucp_ep_h ep, char *out, uint32_t out_bytes);
