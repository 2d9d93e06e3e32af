#include "worker/proof.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/endian.h"
#include "base/mem.h"

bool proof_nonce_read(ProtobufCBinaryData from, uint8_t out[SECRET_NONCE_BYTES])
{
    if (from.len != SECRET_NONCE_BYTES)
        return false;
    memcpy(out, from.data, SECRET_NONCE_BYTES);
    return true;
}

static struct bytes text_of(enum proof_of what, const struct proof_said *said)
{
    static const char *const WORDS[] = {"tandem-attach-worker", "tandem-attach-router", "tandem-join-worker",
                                        "tandem-join-router"};
    struct bytes b = {0};
    uint8_t number[8];
    bytes_append(&b, WORDS[what], strlen(WORDS[what]) + 1);
    put_u64(number, said->incarnation);
    bytes_append(&b, number, sizeof(number));
    bytes_append(&b, said->router, sizeof(said->router));
    bytes_append(&b, said->worker, sizeof(said->worker));
    if (said->address)
        bytes_append(&b, said->address, strlen(said->address));
    if (said->local) {
        bytes_append(&b, "", 1);
        bytes_append(&b, said->local, strlen(said->local));
    }
    return b;
}

void proof_sign(struct secret *secret, enum proof_of what, const struct proof_said *said,
                uint8_t mac_out[SECRET_MAC_BYTES])
{
    struct bytes b = text_of(what, said);
    secret_sign(secret, b.data, b.len, mac_out);
    bytes_free(&b);
}

bool proof_verify(struct secret *secret, enum proof_of what, const struct proof_said *said, ProtobufCBinaryData mac)
{
    struct bytes b = text_of(what, said);
    bool is_good = secret_verify(secret, b.data, b.len, mac.data, mac.len);
    bytes_free(&b);
    return is_good;
}

static void nonce_of(const uint8_t key[SECRET_NONCE_BYTES], uint64_t slot, uint8_t out[SECRET_NONCE_BYTES])
{
    uint8_t number[8], mac[SECRET_MAC_BYTES];
    unsigned n = 0;
    put_u64(number, slot);
    if (!HMAC(EVP_sha256(), key, SECRET_NONCE_BYTES, number, sizeof(number), mac, &n))
        abort(); /* as in base/secret.c */
    memcpy(out, mac, SECRET_NONCE_BYTES);
}

void proof_join_nonce(const uint8_t key[SECRET_NONCE_BYTES], uint64_t now_ns, uint8_t out[SECRET_NONCE_BYTES])
{
    nonce_of(key, now_ns / (PROOF_JOIN_MS * NS_PER_MS), out);
}

bool proof_join_nonce_is_good(const uint8_t key[SECRET_NONCE_BYTES], uint64_t now_ns,
                              const uint8_t nonce[SECRET_NONCE_BYTES])
{
    uint8_t now[SECRET_NONCE_BYTES], before[SECRET_NONCE_BYTES];
    uint64_t slot = now_ns / (PROOF_JOIN_MS * NS_PER_MS);
    nonce_of(key, slot, now);
    nonce_of(key, slot - 1, before);
    return !CRYPTO_memcmp(nonce, now, sizeof(now)) || !CRYPTO_memcmp(nonce, before, sizeof(before));
}
