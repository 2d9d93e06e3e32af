/*
 * TLS 1.3 of the TCP transport (wire_tcp.c), by OpenSSL, with keys that follow from the cluster secret.
 *
 * An external pre-shared key with a Diffie-Hellman exchange (RFC 8446, psk_dhe_ke; RFC 9257): both sides
 * prove that they know the secret, no certificate is needed, and who learns the secret later can't read
 * what went by. Key and identity are HMAC-SHA-256(secret, label), each with a label of its own, so the
 * identity tells which of the accepted secrets it is, and nothing of it. No tickets, no early data, no
 * renegotiation; TLS_AES_256_GCM_SHA384.
 *
 * The handshake happens inside the first sends and receives. A session that has not used the key (a server
 * with a certificate, say) fails.
 *
 * Threads: as wire.h says.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/secret.h"

struct tcp_tls;      /* of a transport */
struct tcp_tls_conn; /* of a connection */

struct tcp_tls *tcp_tls_open(struct secret *secret); /* borrowed; it is set */
void tcp_tls_close(struct tcp_tls *t);               /* NULL is fine */

struct tcp_tls_conn *tcp_tls_begin(struct tcp_tls *t, int fd, bool is_server); /* fd is borrowed */
void tcp_tls_end(struct tcp_tls_conn *c); /* says goodbye if it can; NULL is fine */

/*
 * Both return the number of bytes, as read() and write() do, which may be fewer than given. 0 of receive:
 * the peer has ended the session. -1: errno is EAGAIN, and the descriptor has to become readable or
 * writable first (tcp_tls_wants_read); or EPROTO: tcp_tls_why() says why. After EAGAIN of send, the same
 * bytes are sent again.
 */
ssize_t tcp_tls_send(struct tcp_tls_conn *c, const void *data, size_t n_bytes);
ssize_t tcp_tls_receive(struct tcp_tls_conn *c, void *data, size_t n_bytes);
/* Gives the socket the records that tcp_tls_send has made. Until then it keeps up to 64 KiB of them, because
 * a call into the kernel for each record of 16 KiB costs a fifth of the speed. False: errno as above; after
 * EAGAIN it is called again. */
bool tcp_tls_flush(struct tcp_tls_conn *c);
bool tcp_tls_wants_read(const struct tcp_tls_conn *c);
/* Received bytes lie here, of which the descriptor does not tell; perhaps only a part of a record. */
bool tcp_tls_has_more(const struct tcp_tls_conn *c);
bool tcp_tls_is_up(const struct tcp_tls_conn *c); /* the handshake is over */
const char *tcp_tls_why(const struct tcp_tls_conn *c);
