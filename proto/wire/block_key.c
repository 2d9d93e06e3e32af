#include "proto/wire/block_key.h"

#include <assert.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/endian.h"
#include "base/mem.h"

void block_key_hex(const struct block_key *k, char out[33])
{
    for (int i = 0; i < BLOCK_KEY_BYTES; i++)
        snprintf(out + 2 * i, 3, "%02x", k->b[i]);
}

static struct block_key digest(const void *data, size_t len_bytes)
{
    uint8_t full[32];
    if (!EVP_Digest(data, len_bytes, full, NULL, EVP_sha256(), NULL))
        abort(); /* the crypto library has no SHA-256: no key can be made */
    struct block_key k;
    memcpy(k.b, full, sizeof(k.b));
    return k;
}

static void append_framed(struct bytes *b, const void *data, uint32_t len_bytes)
{
    uint8_t n[4];
    put_u32(n, len_bytes);
    bytes_append(b, n, 4);
    bytes_append(b, data, len_bytes);
}

struct block_key block_key_root(const struct block_key *fingerprint, const void *lora, uint32_t lora_len_bytes,
                                const void *salt, uint32_t salt_len_bytes)
{
    struct bytes b = {0};
    bytes_append(&b, "tandem-root-1", 13);
    bytes_append(&b, fingerprint->b, BLOCK_KEY_BYTES);
    append_framed(&b, lora, lora_len_bytes);
    append_framed(&b, salt, salt_len_bytes);
    struct block_key k = digest(b.data, b.len);
    bytes_free(&b);
    return k;
}

struct block_key block_key_next(const struct block_key *parent, const uint32_t *tokens, uint32_t block_tokens)
{
    uint8_t data[BLOCK_KEY_BYTES + 4 * 256];
    assert(block_tokens <= 256);
    memcpy(data, parent->b, BLOCK_KEY_BYTES);
    for (uint32_t i = 0; i < block_tokens; i++)
        put_u32(data + BLOCK_KEY_BYTES + 4 * i, tokens[i]);
    return digest(data, BLOCK_KEY_BYTES + 4 * (size_t)block_tokens);
}

uint32_t block_keys(const struct block_key *root, const uint32_t *tokens, uint32_t n_tokens, uint32_t block_tokens,
                    struct block_key *keys_out)
{
    uint32_t n = n_tokens / block_tokens;
    for (uint32_t i = 0; i < n; i++)
        keys_out[i] = block_key_next(i ? &keys_out[i - 1] : root, tokens + (size_t)i * block_tokens, block_tokens);
    return n;
}
