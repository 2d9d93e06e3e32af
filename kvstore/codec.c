/* Loops over groups have no branches on data, and a constant length in the usual case, so that the
 * compiler vectorizes them. */
#include "kvstore/codec.h"

#include <stdlib.h>
#include <string.h>
#include <zstd.h>

#include "base/endian.h"
#include "base/mem.h"
#include "kernels/scalar.h"

enum { GROUP = 64, SCALE_BYTES = 4, LENGTH_BYTES = 4, ZSTD_LEVEL = 1 };
/* 1.5 * 2^23: adding it rounds to an integer, which is left in the low bits. */
#define ROUND_MAGIC 12582912.0f

struct codec {
    struct kv_layout layout;
    size_t page_bytes, quantized_bytes;
    uint8_t *out, *planes; /* page_bytes each; allocated when first needed */
    ZSTD_CCtx *compress;
    ZSTD_DCtx *decompress;
};

static size_t rows_of(const struct kv_layout *l)
{
    return (size_t)l->n_layers * kv_layout_planes(l) * l->n_kv_heads * l->page_tokens;
}

struct codec *codec_open(const struct kv_layout *layout)
{
    struct codec *c = mem_zalloc(sizeof(*c));
    size_t n_groups = (layout->head_dim + GROUP - 1) / GROUP;
    c->layout = *layout;
    c->page_bytes = kv_layout_page_bytes(layout);
    c->quantized_bytes = rows_of(layout) * (n_groups * SCALE_BYTES + layout->head_dim);
    return c;
}

void codec_close(struct codec *c)
{
    if (!c)
        return;
    ZSTD_freeCCtx(c->compress);
    ZSTD_freeDCtx(c->decompress);
    free(c->out);
    free(c->planes);
    free(c);
}

static uint8_t *buffer(uint8_t **at, size_t len_bytes)
{
    return *at ? *at : (*at = mem_array(len_bytes, 1));
}

/* ------------------------------------------------------------------- groups */

static inline void load(const struct kv_layout *l, const uint8_t *from, size_t n, float *x)
{
    if (l->dtype == NUM_F32) {
        memcpy(x, from, 4 * n);
        return;
    }
    uint16_t h[GROUP];
    memcpy(h, from, 2 * n);
    if (l->dtype == NUM_BF16)
        for (size_t i = 0; i < n; i++)
            x[i] = scalar_from_bf16(h[i]);
    else
        for (size_t i = 0; i < n; i++)
            x[i] = scalar_from_f16(h[i]);
}

static inline void store(const struct kv_layout *l, const float *x, size_t n, uint8_t *to)
{
    if (l->dtype == NUM_F32) {
        memcpy(to, x, 4 * n);
        return;
    }
    uint16_t h[GROUP];
    if (l->dtype == NUM_BF16)
        for (size_t i = 0; i < n; i++)
            h[i] = (uint16_t)((bits_of(x[i]) + 0x7fff + (bits_of(x[i]) >> 16 & 1)) >> 16); /* x is finite */
    else
        for (size_t i = 0; i < n; i++)
            h[i] = scalar_to_f16(x[i]);
    memcpy(to, h, 2 * n);
}

/* The bits of the largest magnitude. They order as the numbers do, and a NaN is above all of them. */
static inline int32_t largest(const float *x, size_t n)
{
    int32_t most = 0;
    for (size_t i = 0; i < n; i++) {
        int32_t b = (int32_t)(bits_of(x[i]) & 0x7fffffff);
        most = b > most ? b : most;
    }
    return most;
}

static inline void to_int8(const float *restrict x, size_t n, float factor, uint8_t *restrict q)
{
    for (size_t i = 0; i < n; i++)
        q[i] = (uint8_t)bits_of(x[i] * factor + ROUND_MAGIC);
}

static inline void from_int8(const uint8_t *restrict q, size_t n, float scale, float *restrict x)
{
    for (size_t i = 0; i < n; i++)
        x[i] = (float)(int8_t)q[i] * scale;
}

static inline void to_fp8(const float *restrict x, size_t n, float factor, uint8_t *restrict q)
{
    for (size_t i = 0; i < n; i++)
        q[i] = scalar_to_e4m3(x[i] * factor);
}

static inline void from_fp8(const uint8_t *restrict q, size_t n, float scale, float *restrict x)
{
    for (size_t i = 0; i < n; i++)
        x[i] = scalar_from_e4m3(q[i]) * scale;
}

/* False: the group can't be quantised. */
static inline bool encode_group(const struct kv_layout *l, enum block_codec codec, const uint8_t *from, size_t n,
                                uint8_t *to)
{
    float x[GROUP];
    load(l, from, n, x);
    float amax = float_of((uint32_t)largest(x, n)), most = codec == BLOCK_INT8 ? 127.0f : 448.0f;
    if (!(amax <= 0x1p100f))
        return false;
    bool is_zero = amax < 0x1p-100f;
    put_u32(to, is_zero ? 0 : bits_of(amax / most));
    float factor = is_zero ? 0 : most / amax;
    if (codec == BLOCK_INT8)
        to_int8(x, n, factor, to + SCALE_BYTES);
    else
        to_fp8(x, n, factor, to + SCALE_BYTES);
    return true;
}

/* False: no encoder makes such a scale. */
static inline bool decode_group(const struct kv_layout *l, enum block_codec codec, const uint8_t *from, size_t n,
                                uint8_t *to)
{
    float x[GROUP], scale = float_of(get_u32(from));
    if (!(scale >= 0 && scale <= 0x1p100f))
        return false;
    if (codec == BLOCK_INT8)
        from_int8(from + SCALE_BYTES, n, scale, x);
    else
        from_fp8(from + SCALE_BYTES, n, scale, x);
    store(l, x, n, to);
    return true;
}

static bool quantize(const struct kv_layout *l, enum block_codec codec, const uint8_t *page, uint8_t *out)
{
    size_t element = num_type_bytes(l->dtype), n_rows = rows_of(l);
    bool is_ok = true;
    for (size_t row = 0; row < n_rows && is_ok; row++)
        for (size_t at = 0; at < l->head_dim && is_ok; at += GROUP) {
            size_t n = l->head_dim - at < GROUP ? l->head_dim - at : GROUP;
            is_ok = n == GROUP ? encode_group(l, codec, page, GROUP, out) : encode_group(l, codec, page, n, out);
            page += n * element;
            out += SCALE_BYTES + n;
        }
    return is_ok;
}

static bool dequantize(const struct kv_layout *l, enum block_codec codec, const uint8_t *data, uint8_t *page)
{
    size_t element = num_type_bytes(l->dtype), n_rows = rows_of(l);
    bool is_ok = true;
    for (size_t row = 0; row < n_rows && is_ok; row++)
        for (size_t at = 0; at < l->head_dim && is_ok; at += GROUP) {
            size_t n = l->head_dim - at < GROUP ? l->head_dim - at : GROUP;
            is_ok = n == GROUP ? decode_group(l, codec, data, GROUP, page) : decode_group(l, codec, data, n, page);
            page += n * element;
            data += SCALE_BYTES + n;
        }
    return is_ok;
}

/* --------------------------------------------------------------------- zstd */

static void split16(const uint8_t *page, size_t n, uint8_t *planes)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t v = get_u16(page + 2 * i), r = v << 1 | v >> 15;
        planes[i] = (uint8_t)(r >> 8);
        planes[n + i] = (uint8_t)r;
    }
}

static void join16(const uint8_t *planes, size_t n, uint8_t *page)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t r = (uint32_t)planes[i] << 8 | planes[n + i];
        put_u16(page + 2 * i, (uint16_t)(r >> 1 | r << 15));
    }
}

static void split32(const uint8_t *page, size_t n, uint8_t *planes)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t v = get_u32(page + 4 * i), r = v << 1 | v >> 31;
        planes[i] = (uint8_t)(r >> 24);
        planes[n + i] = (uint8_t)(r >> 16);
        planes[2 * n + i] = (uint8_t)(r >> 8);
        planes[3 * n + i] = (uint8_t)r;
    }
}

static void join32(const uint8_t *planes, size_t n, uint8_t *page)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t r = (uint32_t)planes[i] << 24 | (uint32_t)planes[n + i] << 16 | (uint32_t)planes[2 * n + i] << 8 |
                     planes[3 * n + i];
        put_u32(page + 4 * i, r >> 1 | r << 31);
    }
}

/* Splits a page's elements into planes of bytes, so that similar bytes lie together. */
static void split(size_t element, const uint8_t *page, size_t n, uint8_t *planes)
{
    if (element == 1)
        memcpy(planes, page, n);
    else
        (element == 4 ? split32 : split16)(page, n, planes);
}

static void join(size_t element, const uint8_t *planes, size_t n, uint8_t *page)
{
    if (element == 1)
        memcpy(page, planes, n);
    else
        (element == 4 ? join32 : join16)(planes, n, page);
}

/* Returns the encoded length; 0: the page does not shrink. */
static size_t compress(struct codec *c, const uint8_t *page)
{
    size_t n_planes = num_type_bytes(c->layout.dtype), n = c->page_bytes / n_planes, at = 0;
    uint8_t *out = buffer(&c->out, c->page_bytes), *planes = buffer(&c->planes, c->page_bytes);
    split(n_planes, page, n, planes);
    if (!c->compress && !(c->compress = ZSTD_createCCtx()))
        return 0;
    for (size_t i = 0; i < n_planes; i++) {
        size_t room = c->page_bytes - at;
        if (room <= LENGTH_BYTES)
            return 0;
        room = room - LENGTH_BYTES < n ? room - LENGTH_BYTES : n;
        size_t len = ZSTD_compressCCtx(c->compress, out + at + LENGTH_BYTES, room, planes + i * n, n, ZSTD_LEVEL);
        if (ZSTD_isError(len) || len >= n) {
            if (room < n)
                return 0;
            memcpy(out + at + LENGTH_BYTES, planes + i * n, n);
            len = n;
        }
        put_u32(out + at, (uint32_t)len);
        at += LENGTH_BYTES + len;
    }
    return at < c->page_bytes ? at : 0;
}

static bool decompress(struct codec *c, const uint8_t *data, size_t len_bytes, uint8_t *page)
{
    size_t n_planes = num_type_bytes(c->layout.dtype), n = c->page_bytes / n_planes;
    uint8_t *planes = buffer(&c->planes, c->page_bytes);
    if (!c->decompress && !(c->decompress = ZSTD_createDCtx()))
        return false;
    for (size_t i = 0; i < n_planes; i++) {
        if (len_bytes < LENGTH_BYTES)
            return false;
        size_t len = get_u32(data);
        if (len > n || len > len_bytes - LENGTH_BYTES)
            return false;
        if (len == n)
            memcpy(planes + i * n, data + LENGTH_BYTES, n);
        else if (ZSTD_decompressDCtx(c->decompress, planes + i * n, n, data + LENGTH_BYTES, len) != n)
            return false;
        data += LENGTH_BYTES + len;
        len_bytes -= LENGTH_BYTES + len;
    }
    join(n_planes, planes, n, page);
    return !len_bytes;
}

/* -------------------------------------------------------------------- calls */

enum block_codec codec_encode(struct codec *c, enum block_codec wanted, const void *page, const void **data_out,
                              size_t *len_out)
{
    size_t n = 0;
    if (wanted == BLOCK_ZSTD)
        n = compress(c, page);
    else if (wanted != BLOCK_RAW && c->quantized_bytes < c->page_bytes)
        n = quantize(&c->layout, wanted, page, buffer(&c->out, c->page_bytes)) ? c->quantized_bytes : 0;
    *data_out = n ? c->out : page;
    *len_out = n ? n : c->page_bytes;
    return n ? wanted : BLOCK_RAW;
}

enum td_status codec_decode(struct codec *c, enum block_codec codec, const void *data, size_t len_bytes, void *page)
{
    bool is_ok = codec == BLOCK_ZSTD
                     ? decompress(c, data, len_bytes, page)
                     : block_codec_is_lossy(codec) && len_bytes == c->quantized_bytes &&
                           c->quantized_bytes < c->page_bytes && dequantize(&c->layout, codec, data, page);
    return is_ok ? TD_OK : TD_ERR_CORRUPT;
}

enum td_status codec_take(struct codec *c, const void *value, size_t len_bytes, const struct block_key *key, void *page,
                          struct block_header *out)
{
    struct block_header h;
    enum td_status s = block_take(value, len_bytes, key, &c->layout, page, out);
    if (s != TD_ERR_UNSUPPORTED)
        return s;
    s = block_verify(value, len_bytes, key, &c->layout, &h);
    if (!s)
        s = codec_decode(c, h.codec, (const uint8_t *)value + BLOCK_HEADER_BYTES, h.payload_bytes, page);
    if (!s)
        *out = h;
    return s;
}
