#include "proto/wire/kv_layout.h"

#include <string.h>

#include "base/endian.h"

enum { KV_LAYOUT_VERSION = 1 };

static const char *const KINDS[] = {"plain", "latent"};
static const char *const NAMES[] = {"", "f32", "f16", "bf16", "fp8"};

const char *num_type_name(enum num_type t)
{
    return t >= NUM_F32 && t <= NUM_F8_E4M3 ? NAMES[t] : "unknown";
}

int num_type_parse(const char *name, enum num_type *type_out)
{
    for (int i = NUM_F32; i <= NUM_F8_E4M3; i++) {
        if (!strcmp(name, NAMES[i])) {
            *type_out = (enum num_type)i;
            return 0;
        }
    }
    return -1;
}

struct layout_bound {
    const char *name;
    uint32_t value, max;
};

enum td_status kv_layout_check(const struct kv_layout *l, struct td_error *error_out)
{
    if (l->dtype < NUM_F32 || l->dtype > NUM_F8_E4M3)
        return td_fail(error_out, TD_ERR_INVALID, "kv_layout.dtype: %d is unknown", (int)l->dtype);
    if (l->kind > KV_LATENT)
        return td_fail(error_out, TD_ERR_INVALID, "kv_layout.kind: %d is unknown", (int)l->kind);
    if (l->kind == KV_LATENT && l->n_kv_heads != 1)
        return td_fail(error_out, TD_ERR_INVALID, "kv_layout.n_kv_heads: %u, latent has 1", l->n_kv_heads);
    const struct layout_bound bounds[] = {{"n_layers", l->n_layers, 1024},
                                          {"n_kv_heads", l->n_kv_heads, 1024},
                                          {"head_dim", l->head_dim, 1024},
                                          {"page_tokens", l->page_tokens, 256}};
    for (size_t i = 0; i < sizeof(bounds) / sizeof(bounds[0]); i++)
        if (bounds[i].value < 1 || bounds[i].value > bounds[i].max)
            return td_fail(error_out, TD_ERR_INVALID, "kv_layout.%s: %u is not in 1..%u", bounds[i].name,
                           bounds[i].value, bounds[i].max);
    if (l->window > 1u << 24)
        return td_fail(error_out, TD_ERR_INVALID, "kv_layout.window: %u is over %u", l->window, 1u << 24);
    return TD_OK;
}

enum td_status kv_layout_match(const struct kv_layout *ours, const struct kv_layout *theirs, struct td_error *error_out)
{
    const struct {
        const char *name;
        uint32_t a, b;
    } fields[] = {{"n_layers", ours->n_layers, theirs->n_layers},
                  {"n_kv_heads", ours->n_kv_heads, theirs->n_kv_heads},
                  {"head_dim", ours->head_dim, theirs->head_dim},
                  {"page_tokens", ours->page_tokens, theirs->page_tokens},
                  {"window", ours->window, theirs->window}};
    if (ours->kind != theirs->kind)
        return td_fail(error_out, TD_ERR_VERSION, "kv_layout.kind differs: ours %s, theirs %s", KINDS[ours->kind],
                       KINDS[theirs->kind]);
    if (ours->dtype != theirs->dtype)
        return td_fail(error_out, TD_ERR_VERSION, "kv_layout.dtype differs: ours %s, theirs %s",
                       num_type_name(ours->dtype), num_type_name(theirs->dtype));
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
        if (fields[i].a != fields[i].b)
            return td_fail(error_out, TD_ERR_VERSION, "kv_layout.%s differs: ours %u, theirs %u", fields[i].name,
                           fields[i].a, fields[i].b);
    return TD_OK;
}

void kv_layout_encode(const struct kv_layout *l, uint8_t out[KV_LAYOUT_WIRE_BYTES])
{
    put_u16(out, KV_LAYOUT_VERSION);
    out[2] = (uint8_t)l->dtype;
    out[3] = (uint8_t)l->kind;
    put_u32(out + 4, l->n_layers);
    put_u32(out + 8, l->n_kv_heads);
    put_u32(out + 12, l->head_dim);
    put_u32(out + 16, l->page_tokens);
    put_u32(out + 20, l->window);
}

enum td_status kv_layout_decode(const uint8_t *data, size_t len_bytes, struct kv_layout *out,
                                struct td_error *error_out)
{
    if (len_bytes != KV_LAYOUT_WIRE_BYTES)
        return td_fail(error_out, TD_ERR_PROTOCOL, "kv_layout: %zu bytes, expected %d", len_bytes,
                       KV_LAYOUT_WIRE_BYTES);
    if (get_u16(data) != KV_LAYOUT_VERSION)
        return td_fail(error_out, TD_ERR_VERSION, "kv_layout.version differs: ours %d, theirs %d", KV_LAYOUT_VERSION,
                       get_u16(data));
    struct kv_layout l = {.dtype = (enum num_type)data[2],
                          .kind = (enum kv_kind)data[3],
                          .n_layers = get_u32(data + 4),
                          .n_kv_heads = get_u32(data + 8),
                          .head_dim = get_u32(data + 12),
                          .page_tokens = get_u32(data + 16),
                          .window = get_u32(data + 20)};
    enum td_status s = kv_layout_check(&l, error_out);
    if (s)
        return s;
    *out = l;
    return TD_OK;
}
