/*
 * Geometry of the KV of one layer group: how a page is laid out, and what two processes compare when they meet.
 *
 * A page holds page_tokens consecutive tokens over all layers of the group, in one contiguous range:
 *
 *     [layer 0..n_layers)[K, V][kv_head 0..n_kv_heads)[slot 0..page_tokens)[head_dim]      elements of dtype
 *
 * so any range of layers is contiguous inside a page, which is what transfer announces, pulls and checks.
 *
 * On the wire (kv_layout_encode), little-endian, 24 bytes:
 *
 *      0  u16 version (1)     2  u16 dtype       4  u32 n_layers     8  u32 n_kv_heads
 *     12  u32 head_dim       16  u32 page_tokens 20  u32 reserved, 0
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum num_type { NUM_F32 = 1, NUM_F16 = 2, NUM_BF16 = 3 }; /* values travel: never renumber */

struct kv_layout {
    enum num_type dtype;
    uint32_t n_layers, n_kv_heads, head_dim, page_tokens;
};

enum { KV_LAYOUT_WIRE_BYTES = 24 };

static inline size_t num_type_bytes(enum num_type t)
{
    return t == NUM_F32 ? 4 : 2;
}
const char *num_type_name(enum num_type t);                    /* "f32", "f16", "bf16" */
int num_type_parse(const char *name, enum num_type *type_out); /* 0, or -1 if it is none of them */

/* Bytes of one K or V slice of one head in one page, of one layer (K and V), of a whole page. */
static inline size_t kv_layout_head_bytes(const struct kv_layout *l)
{
    return (size_t)l->page_tokens * l->head_dim * num_type_bytes(l->dtype);
}
static inline size_t kv_layout_layer_bytes(const struct kv_layout *l)
{
    return 2 * l->n_kv_heads * kv_layout_head_bytes(l);
}
static inline size_t kv_layout_page_bytes(const struct kv_layout *l)
{
    return l->n_layers * kv_layout_layer_bytes(l);
}

/* Every field within sane bounds (no product can overflow). TD_ERR_INVALID names the field. */
enum td_status kv_layout_check(const struct kv_layout *l, struct td_error *error_out);

/* TD_OK, or TD_ERR_VERSION naming the first field that differs and both values. */
enum td_status kv_layout_match(const struct kv_layout *ours, const struct kv_layout *theirs,
                               struct td_error *error_out);

void kv_layout_encode(const struct kv_layout *l, uint8_t out[KV_LAYOUT_WIRE_BYTES]);
enum td_status kv_layout_decode(const uint8_t *data, size_t len_bytes, struct kv_layout *out,
                                struct td_error *error_out);
