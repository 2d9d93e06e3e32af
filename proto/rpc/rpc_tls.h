/*
 * TLS of a listener (rpc.h has the options).
 *
 * A server ends TLS before gRPC: the door accepts (rpc_accept.h), the handshake runs on its thread within the
 * door's bounds, and then a thread of this file, "rpc-tls", carries bytes between the connection and one end
 * of a socket pair, whose other end gRPC has. Each direction holds at most one piece of 16 KiB, so whoever
 * does not read stops the other side, as on a plain connection. While bytes come all the time, the thread
 * takes them every half millisecond, since waking up for each message costs more than encrypting it (measured
 * by tests/security/test_overhead.py: 29 % of the router's time for each token without this, 7 % with it).
 *
 *     client == TLS ==> connection | rpc-tls: SSL_read, SSL_write | socket pair ==> gRPC
 *
 * Why not gRPC's own TLS: a descriptor that is handed to it can't have any (1.51). Kernel TLS, which would
 * need no thread, was left out: few kernels have it, and gRPC does not know its control records.
 *
 * TLS 1.2 and 1.3, one protocol by ALPN, no compression, no renegotiation. Certificates are PEM files. They
 * are read again when one has changed; if they can't be, or don't fit, the old ones stay, and the log says so
 * once. Connections that exist keep the certificate with which they began.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "proto/rpc/rpc.h"

struct rpc_tls; /* the certificates of a listener, and its connections */

/* files->ca: clients must show a certificate that it signed; NULL: they need none. protocol: its name
 * in ALPN, "h2" or "http/1.1". files' texts and log are borrowed. */
enum td_status rpc_tls_open(const struct rpc_tls_files *files, const char *protocol, const struct log *log,
                            struct rpc_tls **out, struct td_error *error_out);
void rpc_tls_start(struct rpc_tls *t); /* starts the thread */
/* Ends the connections, those with unsent bytes after a second; joins the thread. NULL is fine. */
void rpc_tls_close(struct rpc_tls *t);

/* The rest: on the door's thread. */
void rpc_tls_refresh(struct rpc_tls *t); /* about once a second */

struct rpc_tls_link;                                            /* a connection */
struct rpc_tls_link *rpc_tls_accept(struct rpc_tls *t, int fd); /* fd stays the caller's until the handover */
enum rpc_tls_step { RPC_TLS_WAITS, RPC_TLS_SPEAKS, RPC_TLS_FAILED };
/*
 * Goes on with the handshake; then SPEAKS, with the first bytes of content copied to out (they are not
 * taken). WAITS: for a readable or writable descriptor, edge-triggered. FAILED: why_out (64 bytes) says why.
 */
enum rpc_tls_step rpc_tls_greet(struct rpc_tls_link *l, char *out, int n_bytes, int *n_out, char why_out[64]);
/* Hands the connection over; returns gRPC's end of the pair; -1: there is no descriptor, and nothing was
 * handed over. max_unsent_bytes: of what gRPC writes; 0: the system's. */
int rpc_tls_hand_over(struct rpc_tls *t, struct rpc_tls_link *l, uint32_t max_unsent_bytes);
void rpc_tls_drop(struct rpc_tls_link *l); /* one that was not handed over; does not close fd */
