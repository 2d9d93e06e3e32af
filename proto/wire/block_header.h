/*
 * Header of a KV block as the store keeps it on disk: the value is this header, then the payload: the page's bytes as they are,
 * or what a codec made of them (kvstore/codec.h).
 *
 *      0  "TDKB"            4  u16 version (1)     6  u16 header bytes (88)
 *      8  key (16)         24  kv_layout (24)     48  u32 n_tokens    52  u32 index in its chain
 *     56  u64 payload bytes
 *     64  u64 checksum of the payload (checksum.h; id = key's halves, index, 0, 0, 0)
 *     72  u8 codec            73  3 bytes reserved, 0    76  u32 tenant that first offered it; 0: the default one
 *     80  u64 XXH3-64 of bytes 0..79
 *
 * Blocks of before there were codecs and tenants have 0 there, which is what they are.
 * What doesn't verify is a miss, counted by reason, and dropped.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "proto/wire/block_key.h"
#include "proto/wire/kv_layout.h"

enum { BLOCK_HEADER_BYTES = 88 };

enum block_codec { BLOCK_RAW, BLOCK_ZSTD, BLOCK_INT8, BLOCK_FP8, BLOCK_CODECS }; /* stored: never renumber */
#define BLOCK_CODEC_NAMES "none|zstd|int8|fp8"

struct block_header {
    struct block_key key;
    struct kv_layout layout;
    uint32_t n_tokens, index, tenant;
    enum block_codec codec;
    uint64_t payload_bytes, checksum; /* as stored */
};

const char *block_codec_name(enum block_codec codec);
bool block_codec_from_name(const char *name, enum block_codec *out);
static inline bool block_codec_is_lossy(enum block_codec codec)
{
    return codec >= BLOCK_INT8;
}

uint64_t block_checksum(const struct block_key *key, uint32_t index, const void *payload, size_t len_bytes);
void block_header_encode(const struct block_header *h, uint8_t out[BLOCK_HEADER_BYTES]);

/* TD_ERR_CORRUPT: damaged; TD_ERR_VERSION: another version. Checks the header only. */
enum td_status block_header_decode(const void *data, size_t len_bytes, struct block_header *out);

/*
 * Header and payload, for this key and layout: TD_OK, or TD_ERR_CORRUPT, _VERSION (also another layout), _CHECKSUM. Whether an
 * encoded payload makes a page only its codec knows.
 */
enum td_status block_verify(const void *value, size_t len_bytes, const struct block_key *key,
                            const struct kv_layout *layout, struct block_header *out);
/*
 * The same, and copies the payload to page in one pass; after TD_ERR_CHECKSUM wrong bytes lie there. TD_ERR_UNSUPPORTED: it is
 * encoded, and nothing but the header was looked at.
 */
enum td_status block_take(const void *value, size_t len_bytes, const struct block_key *key,
                          const struct kv_layout *layout, void *page, struct block_header *out);
