/*
 * Names of KV blocks: a chain of hashes over the tokens.
 *
 *     root  = SHA-256("tandem-root-1" || fingerprint[16] || u32 len(lora) || lora || u32 len(salt) ||
 *     salt)[0..16) key_i = SHA-256(key_{i-1} || u32 little-endian token ids of block i)[0..16)
 *
 * Equal keys mean equal tokens from the start, equal weights, KV dtype, numerics and layout, the same adapter
 * and the same salt. Because keys are chained, the longest stored prefix is found by a search in one array. A
 * cryptographic hash and the salt keep tenants from reading or probing each other's cache.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK_KEY_BYTES = 16 };

struct block_key {
    uint8_t b[BLOCK_KEY_BYTES];
};

static inline bool block_key_equal(const struct block_key *a, const struct block_key *b)
{
    return !memcmp(a->b, b->b, BLOCK_KEY_BYTES);
}
static inline uint64_t block_key_hash(const struct block_key *k)
{
    uint64_t h;
    memcpy(&h, k->b, sizeof(h));
    return h;
}

void block_key_hex(const struct block_key *k, char out[33]);

struct block_key block_key_root(const struct block_key *fingerprint, const void *lora, uint32_t lora_len_bytes,
                                const void *salt, uint32_t salt_len_bytes);

/* Writes keys_out[0 .. n_tokens / block_tokens), one key per full block, and returns their number. */
uint32_t block_keys(const struct block_key *root, const uint32_t *tokens, uint32_t n_tokens, uint32_t block_tokens,
                    struct block_key *keys_out);
struct block_key block_key_next(const struct block_key *parent, const uint32_t *tokens, uint32_t block_tokens);
