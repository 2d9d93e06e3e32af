/*
 * What the transport and the bare loop that it is measured against (bench_bare.c) share, so that both speak to UCX with the same
 * options. No other file sees UCX.
 *
 * Threads: free for all, but for an endpoint, which belongs to its worker's thread.
 */
#pragma once

#include <stdint.h>
#include <ucp/api/ucp.h>

#include "base/status.h"

/* Environment, logging and signals of UCX, once per process; before anything else of UCX. */
void wire_ucx_setup(void);

enum td_status wire_ucx_convert(ucs_status_t s);

/* tls: "auto" or a UCX_TLS list; device: of the network, as UCX_NET_DEVICES. */
enum td_status wire_ucx_context_open(const char *tls, const char *device, ucp_context_h *out,
                                     struct td_error *error_out);

/* A worker for one thread at a time. TD_ERR_IO: no descriptors, or no shared memory. */
enum td_status wire_ucx_worker_open(ucp_context_h context, ucp_worker_h *out, int *fd_out);

/* Peer error mode, by address or from a request, which is used up. */
ucs_status_t wire_ucx_endpoint_open(ucp_worker_h worker, ucp_conn_request_h request, const struct sockaddr *address,
                                    socklen_t address_len, ucp_err_handler_cb_t on_error, void *arg, ucp_ep_h *out);

/* The transports that carry messages, e.g. "posix,tcp/lo", the one for payloads first. */
void wire_ucx_transport(ucp_ep_h ep, char *out, uint32_t out_bytes);
