/*
 * The cluster secret, with which processes prove to each other that they belong together.
 *
 * It comes from an option, or from a file: one secret a line. The first one signs, all of them are accepted.
 * The file is read again when it has changed, so the secret is changed without a restart: add the new one as
 * the second line on every host, then make it the first, then remove the old one.
 *
 * A signature is HMAC-SHA-256 (RFC 2104). Whoever signs adds a label of its own and what both sides said,
 * nonces included, so that no signature fits anywhere else.
 *
 * Threads: any. A file that can't be read any more, or is bad, leaves the secrets as they were, with one
 * error in the log.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/log.h"
#include "base/status.h"

enum { SECRET_MAC_BYTES = 32, SECRET_NONCE_BYTES = 16, SECRET_FILE_MOST = 8 };

/* Options of every process with a secret; S has the members secret, secret_file and is_insecure. */
#define SECRET_OPTIONS(S)                                                                                              \
    {"secret", OPT_SECRET, offsetof(S, secret), NULL, "TEXT", 0, 0, "cluster secret; better set in the environment"},  \
        {"secret-file",                                                                                                \
         OPT_STRING,                                                                                                   \
         offsetof(S, secret_file),                                                                                     \
         NULL,                                                                                                         \
         "FILE",                                                                                                       \
         0,                                                                                                            \
         0,                                                                                                            \
         "cluster secrets, one a line: the first proves, all are accepted; read again when it changes"},               \
    {                                                                                                                  \
        "insecure", OPT_BOOL, offsetof(S, is_insecure), NULL, NULL, 0, 0,                                              \
            "allows listeners that the network reaches and that ask nobody for a proof"                                \
    }

struct secret;

/* text and file: options, of which at most one is given; NULL both: no secret, and all signatures of
 * processes without one are good. log is borrowed. TD_ERR_INVALID, TD_ERR_IO: the file can't be read, is
 * readable by others, is empty, or has over SECRET_FILE_MOST lines. */
enum td_status secret_open(const char *text, const char *file, const struct log *log, struct secret **out,
                           struct td_error *error_out);
void secret_close(struct secret *s); /* NULL is fine */

/* Whether there is one. s may be NULL, here and below: none. */
bool secret_is_set(const struct secret *s);

void secret_sign(struct secret *s, const void *data, size_t n_bytes, uint8_t mac_out[SECRET_MAC_BYTES]);
/* The same by the i-th of the accepted secrets; 0 is the one that signs. False: there are no more. */
bool secret_sign_by(struct secret *s, uint32_t i, const void *data, size_t n_bytes, uint8_t mac_out[SECRET_MAC_BYTES]);
/* In constant time for each secret. False also for a mac of another length. */
bool secret_verify(struct secret *s, const void *data, size_t n_bytes, const uint8_t *mac, size_t mac_bytes);

void secret_nonce(uint8_t out[SECRET_NONCE_BYTES]); /* from the system's generator */

/* The secret that signs, for a key that is derived from it; "" without one. The caller frees it. */
char *secret_text(struct secret *s);
