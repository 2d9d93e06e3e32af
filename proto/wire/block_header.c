#include "proto/wire/block_header.h"

#include <string.h>
#include <xxhash.h>

#include "base/endian.h"
#include "proto/wire/checksum.h"

enum { BLOCK_VERSION = 1 };

static const char *const CODEC_NAMES[BLOCK_CODECS] = {"none", "zstd", "int8", "fp8"};

const char *block_codec_name(enum block_codec codec)
{
    return codec < BLOCK_CODECS ? CODEC_NAMES[codec] : "unknown";
}

bool block_codec_from_name(const char *name, enum block_codec *out)
{
    for (int i = 0; i < BLOCK_CODECS; i++)
        if (!strcmp(name, CODEC_NAMES[i])) {
            *out = (enum block_codec)i;
            return true;
        }
    return false;
}

static struct checksum_identity identity_of(const struct block_key *key, uint32_t index)
{
    return (struct checksum_identity){.id_a = get_u64(key->b), .id_b = get_u64(key->b + 8), .index = index};
}

uint64_t block_checksum(const struct block_key *key, uint32_t index, const void *payload, size_t len_bytes)
{
    struct checksum_identity id = identity_of(key, index);
    return checksum_bytes(&id, payload, len_bytes);
}

void block_header_encode(const struct block_header *h, uint8_t out[BLOCK_HEADER_BYTES])
{
    memcpy(out, "TDKB", 4);
    put_u16(out + 4, BLOCK_VERSION);
    put_u16(out + 6, BLOCK_HEADER_BYTES);
    memcpy(out + 8, h->key.b, BLOCK_KEY_BYTES);
    kv_layout_encode(&h->layout, out + 24);
    put_u32(out + 48, h->n_tokens);
    put_u32(out + 52, h->index);
    put_u64(out + 56, h->payload_bytes);
    put_u64(out + 64, h->checksum);
    put_u32(out + 72, h->codec);
    put_u32(out + 76, h->tenant);
    put_u64(out + 80, XXH3_64bits(out, 80));
}

enum td_status block_header_decode(const void *data, size_t len_bytes, struct block_header *out)
{
    const uint8_t *b = data;
    if (len_bytes < BLOCK_HEADER_BYTES || memcmp(b, "TDKB", 4))
        return TD_ERR_CORRUPT;
    if (get_u16(b + 4) != BLOCK_VERSION)
        return TD_ERR_VERSION;
    if (get_u16(b + 6) != BLOCK_HEADER_BYTES || get_u64(b + 80) != XXH3_64bits(b, 80))
        return TD_ERR_CORRUPT;
    if (get_u32(b + 72) >= BLOCK_CODECS)
        return TD_ERR_VERSION;
    struct block_header h = {.n_tokens = get_u32(b + 48),
                             .index = get_u32(b + 52),
                             .tenant = get_u32(b + 76),
                             .codec = (enum block_codec)get_u32(b + 72),
                             .payload_bytes = get_u64(b + 56),
                             .checksum = get_u64(b + 64)};
    memcpy(h.key.b, b + 8, BLOCK_KEY_BYTES);
    if (kv_layout_decode(b + 24, KV_LAYOUT_WIRE_BYTES, &h.layout, NULL))
        return TD_ERR_CORRUPT;
    *out = h;
    return TD_OK;
}

static enum td_status verify_header(const void *value, size_t len_bytes, const struct block_key *key,
                                    const struct kv_layout *layout, struct block_header *out)
{
    enum td_status s = block_header_decode(value, len_bytes, out);
    if (s)
        return s;
    if (!block_key_equal(&out->key, key) || out->payload_bytes != len_bytes - BLOCK_HEADER_BYTES)
        return TD_ERR_CORRUPT;
    if (kv_layout_match(layout, &out->layout, NULL))
        return TD_ERR_VERSION;
    uint64_t page = kv_layout_page_bytes(layout);
    bool fits = out->codec == BLOCK_RAW ? out->payload_bytes == page : out->payload_bytes && out->payload_bytes < page;
    return fits ? TD_OK : TD_ERR_VERSION;
}

enum td_status block_verify(const void *value, size_t len_bytes, const struct block_key *key,
                            const struct kv_layout *layout, struct block_header *out)
{
    struct block_header h;
    enum td_status s = verify_header(value, len_bytes, key, layout, &h);
    if (s)
        return s;
    if (block_checksum(key, h.index, (const uint8_t *)value + BLOCK_HEADER_BYTES, h.payload_bytes) != h.checksum)
        return TD_ERR_CHECKSUM;
    *out = h;
    return TD_OK;
}

enum td_status block_take(const void *value, size_t len_bytes, const struct block_key *key,
                          const struct kv_layout *layout, void *page, struct block_header *out)
{
    struct block_header h;
    enum td_status s = verify_header(value, len_bytes, key, layout, &h);
    if (s)
        return s;
    if (h.codec != BLOCK_RAW)
        return TD_ERR_UNSUPPORTED;
    struct checksum_identity id = identity_of(key, h.index);
    if (checksum_copy(&id, page, (const uint8_t *)value + BLOCK_HEADER_BYTES, h.payload_bytes) != h.checksum)
        return TD_ERR_CHECKSUM;
    *out = h;
    return TD_OK;
}
