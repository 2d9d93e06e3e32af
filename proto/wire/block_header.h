/*
 * Header of a KV block as the store keeps it on disk: the value is this header, then the page's bytes.
 *
 *      0  "TDKB"            4  u16 version (1)     6  u16 header bytes (88)
 *      8  key (16)         24  kv_layout (24)     48  u32 n_tokens    52  u32 index in its chain
 *     56  u64 payload bytes
 *     64  u64 checksum of the payload (checksum.h; id = key's halves, index, 0, 0, 0)
 *     72  u64 reserved, 0
 *     80  u64 XXH3-64 of bytes 0..79
 *
 * What doesn't verify is a miss, counted by reason, and dropped.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "proto/wire/block_key.h"
#include "proto/wire/kv_layout.h"

enum { BLOCK_HEADER_BYTES = 88 };

struct block_header {
    struct block_key key;
    struct kv_layout layout;
    uint32_t n_tokens, index;
    uint64_t payload_bytes, checksum;
};

uint64_t block_checksum(const struct block_key *key, uint32_t index, const void *payload, size_t len_bytes);
void block_header_encode(const struct block_header *h, uint8_t out[BLOCK_HEADER_BYTES]);

/* TD_ERR_CORRUPT: damaged; TD_ERR_VERSION: another version. Checks the header only. */
enum td_status block_header_decode(const void *data, size_t len_bytes, struct block_header *out);

/* Header and payload, for this key and layout: TD_OK, or TD_ERR_CORRUPT, _VERSION (also another layout), _CHECKSUM. */
enum td_status block_verify(const void *value, size_t len_bytes, const struct block_key *key,
                            const struct kv_layout *layout, struct block_header *out);
/* The same, and copies the payload to page in one pass; after TD_ERR_CHECKSUM wrong bytes lie there. */
enum td_status block_take(const void *value, size_t len_bytes, const struct block_key *key,
                          const struct kv_layout *layout, void *page, struct block_header *out);
