/*
 * Geometry of the KV of one layer group: how a page is laid out, and what two processes compare when they
 * meet.
 *
 * A page holds page_tokens consecutive tokens over all layers of the group, in one contiguous range:
 *
 *     [layer 0..n_layers)[K, V][kv_head 0..n_kv_heads)[slot 0..page_tokens)[head_dim]      elements of dtype
 *
 * Any range of layers is contiguous inside a page: that is what transfer announces, pulls and checks.
 *
 * Two things vary: what is stored for a token, and for how long.
 *
 *     kind     plain: K and V as in the formula above. latent: one plane instead of two, whose rows are
 *              both K and V (multi-head latent attention: K is the whole row, V its beginning), with
 *              n_kv_heads 1.
 *     window   0: a page is kept as long as its sequence. Else no layer of the group sees further back than
 *              the last `window` tokens, and pages behind them are given up while the sequence lives
 *              (kv_layout_first_kept).
 *
 * On the wire (kv_layout_encode), little-endian, 24 bytes:
 *
 *      0  u16 version (1)     2  u8 dtype        3  u8 kind          4  u32 n_layers     8  u32 n_kv_heads
 *     12  u32 head_dim       16  u32 page_tokens 20  u32 window
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* These values are sent: never renumber. E4M3 is the OCP format (kernels/scalar.h); pages have no scales. */
enum num_type { NUM_F32 = 1, NUM_F16 = 2, NUM_BF16 = 3, NUM_F8_E4M3 = 4 };

enum kv_kind { KV_PLAIN = 0, KV_LATENT = 1 }; /* these values are sent, too */

struct kv_layout {
    enum num_type dtype;
    uint32_t n_layers, n_kv_heads, head_dim, page_tokens;
    enum kv_kind kind;
    uint32_t window; /* in tokens; 0: no window */
};

enum { KV_LAYOUT_WIRE_BYTES = 24 };

static inline size_t num_type_bytes(enum num_type t)
{
    return t == NUM_F32 ? 4 : t == NUM_F8_E4M3 ? 1 : 2;
}
const char *num_type_name(enum num_type t);                    /* "f32", "f16", "bf16", "fp8" */
int num_type_parse(const char *name, enum num_type *type_out); /* 0, or -1 if there is no such name */

/* Planes per layer: K and V, or the one plane that is both. */
static inline uint32_t kv_layout_planes(const struct kv_layout *l)
{
    return l->kind == KV_LATENT ? 1 : 2;
}

/* Bytes in one page: of one K or V plane of one head; of one layer, all planes; of all layers. */
static inline size_t kv_layout_head_bytes(const struct kv_layout *l)
{
    return (size_t)l->page_tokens * l->head_dim * num_type_bytes(l->dtype);
}
static inline size_t kv_layout_layer_bytes(const struct kv_layout *l)
{
    return (size_t)kv_layout_planes(l) * l->n_kv_heads * kv_layout_head_bytes(l);
}
static inline size_t kv_layout_page_bytes(const struct kv_layout *l)
{
    return l->n_layers * kv_layout_layer_bytes(l);
}

/* The first page that a sequence still needs when it goes on at position pos: no layer sees the pages
 * before it. The token before pos is always kept, whatever the window. */
static inline uint32_t kv_layout_first_kept(const struct kv_layout *l, uint32_t pos)
{
    return l->window && pos > l->window ? (pos - l->window) / l->page_tokens : 0;
}

/* Checks that every field is within bounds that keep all products from overflowing. On TD_ERR_INVALID
 * error_out names the field. */
enum td_status kv_layout_check(const struct kv_layout *l, struct td_error *error_out);

/* TD_OK, or TD_ERR_VERSION; error_out names the first field that differs, with both values. */
enum td_status kv_layout_match(const struct kv_layout *ours, const struct kv_layout *theirs,
                               struct td_error *error_out);

void kv_layout_encode(const struct kv_layout *l, uint8_t out[KV_LAYOUT_WIRE_BYTES]);
enum td_status kv_layout_decode(const uint8_t *data, size_t len_bytes, struct kv_layout *out,
                                struct td_error *error_out);
