/*
 * Header of a KV block as the store keeps it on disk. The value is this header, then the payload: the page's
 * bytes unchanged, or encoded (kvstore/codec.h).
 *
 *      0  "TDKB"            4  u16 version (1)     6  u16 header bytes (88)
 *      8  key (16)         24  kv_layout (24)     48  u32 n_tokens    52  u32 index in its chain
 *     56  u64 payload bytes
 *     64  u64 checksum of the payload (checksum.h; id = key's halves, index, 0, 0, 0)
 *     72  u8 codec         73  3 bytes reserved, 0   76  u32 tenant that first offered it; 0: the default one
 *     80  u64 XXH3-64 of bytes 0..79
 *
 * Blocks written before codecs and tenants existed have 0 there, which means BLOCK_RAW and the default
 * tenant. A value that does not verify is a miss, counted by reason, and is dropped.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "proto/wire/block_key.h"
#include "proto/wire/kv_layout.h"

enum { BLOCK_HEADER_BYTES = 88 };

/* Stored on disk: never renumber. */
enum block_codec { BLOCK_RAW, BLOCK_ZSTD, BLOCK_INT8, BLOCK_FP8, BLOCK_CODECS };
#define BLOCK_CODEC_NAMES "none|zstd|int8|fp8"

struct block_header {
    struct block_key key;
    struct kv_layout layout;
    uint32_t n_tokens, index, tenant;
    enum block_codec codec;
    uint64_t payload_bytes, checksum; /* length and checksum of the payload as stored (encoded) */
};

const char *block_codec_name(enum block_codec codec);
bool block_codec_from_name(const char *name, enum block_codec *out);
static inline bool block_codec_is_lossy(enum block_codec codec)
{
    return codec >= BLOCK_INT8;
}

uint64_t block_checksum(const struct block_key *key, uint32_t index, const void *payload, size_t len_bytes);
void block_header_encode(const struct block_header *h, uint8_t out[BLOCK_HEADER_BYTES]);

/* TD_ERR_CORRUPT: damaged. TD_ERR_VERSION: another version. Checks the header only. */
enum td_status block_header_decode(const void *data, size_t len_bytes, struct block_header *out);

/* Checks header and payload for this key and layout: TD_OK, TD_ERR_CORRUPT, TD_ERR_VERSION (also another
 * layout) or TD_ERR_CHECKSUM. Only its codec can tell whether an encoded payload decodes to a page. */
enum td_status block_verify(const void *value, size_t len_bytes, const struct block_key *key,
                            const struct kv_layout *layout, struct block_header *out);
/* As block_verify, and copies the payload to page in the same pass; after TD_ERR_CHECKSUM page holds wrong
 * bytes. TD_ERR_UNSUPPORTED: the payload is encoded, and only the header was checked. */
enum td_status block_take(const void *value, size_t len_bytes, const struct block_key *key,
                          const struct kv_layout *layout, void *page, struct block_header *out);
