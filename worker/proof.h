/*
 * How routers and workers (or stores) prove the cluster secret to each other, before anything else is said.
 *
 * Attach, a stream that the router opens:
 *   router -> worker   RouterHello: protocol, incarnation, the router's nonce
 *   worker -> router   Challenge: the worker's nonce, the addresses at which it is reached, and its signature
 *                      of ATTACH_WORKER
 *   router -> worker   Proof: its signature of ATTACH_ROUTER
 *   worker -> router   WorkerHello
 *
 * Join, calls of a worker that tells a router its address:
 *   worker -> router   the worker's nonce; from the second call on also the router's nonce of the answer
 *                      before, and its signature of JOIN_WORKER
 *   router -> worker   a nonce for the next call, and its signature of JOIN_ROUTER
 * A router keeps nothing for that: its nonces are signatures of the time, by a key of its own, and are good
 * for PROOF_JOIN_MS at least.
 *
 * What is signed (base/secret.h) begins with a word for each of the four, and holds both nonces, so that a
 * recorded signature is good for nothing. Somebody who listens where a router looks for one worker, and
 * passes everything on to another one, is noticed by the addresses (router/peer.c). Somebody on the path
 * between the two is not noticed by this; TLS notices him.
 */
#pragma once

#include <protobuf-c/protobuf-c.h>

#include "base/secret.h"

enum { PROOF_JOIN_MS = 30000 };

enum proof_of { ATTACH_WORKER, ATTACH_ROUTER, JOIN_WORKER, JOIN_ROUTER };

/* What both sides know when one signs. */
struct proof_said {
    uint64_t incarnation; /* of the router (Attach), of the worker (Join) */
    uint8_t router[SECRET_NONCE_BYTES], worker[SECRET_NONCE_BYTES];
    /* Where the worker says that it is reached. Join, and ATTACH_WORKER: by its options; at which address the
     * stream arrived (ATTACH_WORKER). NULL: not said. */
    const char *address, *local;
};

/* A nonce that came in a message. False: it has another length. */
bool proof_nonce_read(ProtobufCBinaryData from, uint8_t out[SECRET_NONCE_BYTES]);

void proof_sign(struct secret *secret, enum proof_of what, const struct proof_said *said,
                uint8_t mac_out[SECRET_MAC_BYTES]);
bool proof_verify(struct secret *secret, enum proof_of what, const struct proof_said *said, ProtobufCBinaryData mac);

/* A router's nonces for Join. key: drawn once by the router. */
void proof_join_nonce(const uint8_t key[SECRET_NONCE_BYTES], uint64_t now_ns, uint8_t out[SECRET_NONCE_BYTES]);
bool proof_join_nonce_is_good(const uint8_t key[SECRET_NONCE_BYTES], uint64_t now_ns,
                              const uint8_t nonce[SECRET_NONCE_BYTES]);
