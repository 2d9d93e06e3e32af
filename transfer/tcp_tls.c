#include "transfer/tcp_tls.h"

#include <errno.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

static const unsigned char AES_256_GCM_SHA384[] = {0x13, 0x02};
static const char KEY_LABEL[] = "tandem-kv-key-1", IDENTITY_LABEL[] = "tandem-kv-identity-1";
enum { READ_BYTES = 128 << 10 }; /* most of a read from the socket: eight records */
enum { WRITE_BYTES = 64 << 10 }; /* a connection collects 64 KiB of records, or less until a flush */

struct tcp_tls {
    SSL_CTX *context;
    struct secret *secret;
};

struct tcp_tls_conn {
    SSL *ssl;
    BIO *unsent; /* collects records; the session owns it */
    struct tcp_tls *tls;
    uint8_t identity[SECRET_MAC_BYTES]; /* of a client */
    bool wants_read;
    char why[64];
};

/* ------------------------------------------------------------------------ keys */

static SSL_SESSION *session_of(SSL *ssl, struct tcp_tls *t, uint32_t i)
{
    uint8_t key[SECRET_MAC_BYTES];
    SSL_SESSION *s = SSL_SESSION_new();
    const SSL_CIPHER *cipher = SSL_CIPHER_find(ssl, AES_256_GCM_SHA384);
    if (!s || !cipher || !secret_sign_by(t->secret, i, KEY_LABEL, sizeof(KEY_LABEL), key) ||
        !SSL_SESSION_set1_master_key(s, key, sizeof(key)) || !SSL_SESSION_set_cipher(s, cipher) ||
        !SSL_SESSION_set_protocol_version(s, TLS1_3_VERSION)) {
        SSL_SESSION_free(s); /* the file of secrets has just lost a line, or no memory */
        s = NULL;
    }
    OPENSSL_cleanse(key, sizeof(key));
    return s;
}

/* A client uses the secret that signs. */
static int use_key(SSL *ssl, const EVP_MD *md, const unsigned char **id, size_t *id_len, SSL_SESSION **session)
{
    struct tcp_tls_conn *c = SSL_get_app_data(ssl);
    (void)md;
    *session = secret_sign_by(c->tls->secret, 0, IDENTITY_LABEL, sizeof(IDENTITY_LABEL), c->identity)
                   ? session_of(ssl, c->tls, 0)
                   : NULL;
    *id = c->identity;
    *id_len = sizeof(c->identity);
    return *session != NULL;
}

/* A server takes each that is accepted. Without one the handshake goes on, and fails for want of a
 * certificate. */
static int find_key(SSL *ssl, const unsigned char *id, size_t id_len, SSL_SESSION **session)
{
    struct tcp_tls_conn *c = SSL_get_app_data(ssl);
    uint8_t mine[SECRET_MAC_BYTES];
    *session = NULL;
    for (uint32_t i = 0; !*session && secret_sign_by(c->tls->secret, i, IDENTITY_LABEL, sizeof(IDENTITY_LABEL), mine);
         i++)
        if (id_len == sizeof(mine) && !CRYPTO_memcmp(id, mine, sizeof(mine)))
            *session = session_of(ssl, c->tls, i);
    if (!*session)
        snprintf(c->why, sizeof(c->why), "the cluster secret differs");
    return 1;
}

struct tcp_tls *tcp_tls_open(struct secret *secret)
{
    struct tcp_tls *t = mem_zalloc(sizeof(*t));
    SSL_CTX *c = t->context = SSL_CTX_new(TLS_method());
    t->secret = secret;
    if (!c || !SSL_CTX_set_min_proto_version(c, TLS1_3_VERSION) ||
        !SSL_CTX_set_ciphersuites(c, "TLS_AES_256_GCM_SHA384") || !SSL_CTX_set_num_tickets(c, 0))
        abort(); /* no memory, or a library without the cipher: nothing could be encrypted */
    SSL_CTX_set_options(c, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION);
    SSL_CTX_set_mode(c, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_RELEASE_BUFFERS);
    SSL_CTX_set_session_cache_mode(c, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_read_ahead(c, 1);
    SSL_CTX_set_default_read_buffer_len(c, READ_BYTES);
    SSL_CTX_set_psk_use_session_callback(c, use_key);
    SSL_CTX_set_psk_find_session_callback(c, find_key);
    return t;
}

void tcp_tls_close(struct tcp_tls *t)
{
    if (!t)
        return;
    SSL_CTX_free(t->context);
    free(t);
}

/* ------------------------------------------------------------------- connections */

struct tcp_tls_conn *tcp_tls_begin(struct tcp_tls *t, int fd, bool is_server)
{
    struct tcp_tls_conn *c = mem_zalloc(sizeof(*c));
    c->tls = t;
    c->ssl = SSL_new(t->context);
    c->unsent = BIO_new(BIO_f_buffer());
    BIO *socket = BIO_new_socket(fd, BIO_NOCLOSE);
    if (!c->ssl || !c->unsent || !socket || !BIO_set_write_buffer_size(c->unsent, WRITE_BYTES) || !BIO_up_ref(socket))
        abort(); /* no memory */
    SSL_set_bio(c->ssl, socket, BIO_push(c->unsent, socket));
    SSL_set_app_data(c->ssl, c);
    if (is_server) {
        SSL_set_accept_state(c->ssl);
    } else {
        SSL_set_connect_state(c->ssl);
        SSL_set_verify(c->ssl, SSL_VERIFY_PEER, NULL); /* no certificate is good for anything here */
    }
    return c;
}

void tcp_tls_end(struct tcp_tls_conn *c)
{
    if (!c)
        return;
    ERR_clear_error();
    if (SSL_is_init_finished(c->ssl))
        SSL_shutdown(c->ssl);
    ERR_clear_error();
    SSL_free(c->ssl);
    free(c);
}

static ssize_t failed(struct tcp_tls_conn *c, const char *why)
{
    if (!c->why[0])
        snprintf(c->why, sizeof(c->why), "%s", why);
    ERR_clear_error();
    errno = EPROTO;
    return -1;
}

/* What the result of an operation means to its caller. */
static ssize_t result_of(struct tcp_tls_conn *c, int result)
{
    int what = SSL_get_error(c->ssl, result), error = errno;
    c->wants_read = what == SSL_ERROR_WANT_READ;
    if (result > 0)
        return SSL_session_reused(c->ssl) ? result : failed(c, "the secret was not used");
    if (what == SSL_ERROR_WANT_READ || what == SSL_ERROR_WANT_WRITE) {
        errno = EAGAIN;
        return -1;
    }
    unsigned long code = ERR_peek_last_error();
    bool has_ended = what == SSL_ERROR_ZERO_RETURN || (what == SSL_ERROR_SYSCALL && !code) ||
                     ERR_GET_REASON(code) == SSL_R_UNEXPECTED_EOF_WHILE_READING;
    if (has_ended && SSL_is_init_finished(c->ssl))
        return 0;
    const char *text = code && !has_ended ? ERR_reason_error_string(code) : NULL;
    return failed(c, text ? text : has_ended && error ? strerror(error) : "the peer has ended the handshake");
}

ssize_t tcp_tls_send(struct tcp_tls_conn *c, const void *data, size_t n_bytes)
{
    ERR_clear_error();
    errno = 0;
    ssize_t n = result_of(c, SSL_write(c->ssl, data, n_bytes < INT32_MAX ? (int)n_bytes : INT32_MAX));
    return n ? n : failed(c, "the peer has ended the session");
}

bool tcp_tls_flush(struct tcp_tls_conn *c)
{
    if (!BIO_wpending(c->unsent) || BIO_flush(c->unsent) > 0)
        return true;
    if (BIO_should_retry(c->unsent))
        errno = EAGAIN;
    else
        failed(c, "the connection broke");
    return false;
}

ssize_t tcp_tls_receive(struct tcp_tls_conn *c, void *data, size_t n_bytes)
{
    ERR_clear_error();
    errno = 0;
    return result_of(c, SSL_read(c->ssl, data, n_bytes < INT32_MAX ? (int)n_bytes : INT32_MAX));
}

bool tcp_tls_wants_read(const struct tcp_tls_conn *c)
{
    return c->wants_read;
}

bool tcp_tls_has_more(const struct tcp_tls_conn *c)
{
    return SSL_has_pending(c->ssl);
}

bool tcp_tls_is_up(const struct tcp_tls_conn *c)
{
    return SSL_is_init_finished(c->ssl);
}

const char *tcp_tls_why(const struct tcp_tls_conn *c)
{
    return c->why;
}
