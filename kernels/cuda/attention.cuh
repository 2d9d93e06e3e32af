/*
 * Attention over paged KV: what storing, the exact form (attention.cu) and the forms with tensor cores
 * (attention_fast.cu) share.
 */
#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.cuh"

static constexpr uint32_t WARP = 32, ALL = 0xffffffff;
static constexpr float NEVER = -__builtin_inff(); /* score of a key that is not seen */

/* The parts of struct k_attn and struct cuda_batch that kernels need. Offsets within a page are in bytes. */
struct attention {
    const float *q, *k, *v, *sinks;
    float *out;
    uint16_t *rounded; /* out as bf16, too; NULL: not wanted. Fast forms only */
    const struct cuda_seq *seqs;
    uint8_t *const *pages;
    const uint32_t *row_seq;
    size_t q_stride, kv_stride;
    /* Offset of the layer's first kv head; bytes to the next head; bytes from K to V (latent: 0). */
    size_t layer_at, head_bytes, plane_bytes;
    uint32_t n_seqs, n_heads, n_kv_heads, group, head_dim, v_dim, page_tokens, window, row_bytes;
    float scale, cap;
    bool hopper; /* fast form: use attention_hopper.cu */
};

static inline struct attention describe(const struct k_attn *a, const struct cuda_batch *b)
{
    const struct kv_layout *l = a->layout;
    struct attention t = {};
    t.q = a->q, t.k = a->k, t.v = a->v, t.sinks = a->sinks, t.out = a->out;
    t.seqs = b->seqs, t.pages = b->pages, t.row_seq = b->row_seq;
    t.q_stride = a->q_stride, t.kv_stride = a->kv_stride;
    t.head_bytes = kv_layout_head_bytes(l);
    t.layer_at = a->layer * kv_layout_layer_bytes(l) + a->first_kv_head * t.head_bytes;
    t.plane_bytes = l->kind == KV_LATENT ? 0 : l->n_kv_heads * t.head_bytes;
    t.n_seqs = b->n_seqs, t.n_heads = a->n_heads, t.n_kv_heads = a->n_kv_heads;
    t.group = a->n_heads / a->n_kv_heads, t.head_dim = l->head_dim, t.v_dim = a->v_dim;
    t.page_tokens = l->page_tokens, t.window = a->window;
    t.row_bytes = l->head_dim * (uint32_t)num_type_bytes(l->dtype);
    t.scale = a->scale, t.cap = a->cap;
    return t;
}

static __host__ __device__ __forceinline__ uint32_t first_key(uint32_t pos, uint32_t window)
{
    return window && pos >= window ? pos - window + 1 : 0;
}

/* Address of a position's K. */
static __device__ __forceinline__ uint8_t *key_at(const struct attention &t, const struct cuda_seq &s, uint32_t kv_head,
                                                  uint32_t pos)
{
    return t.pages[s.pages + pos / t.page_tokens] + t.layer_at + kv_head * t.head_bytes +
           pos % t.page_tokens * t.row_bytes;
}

template <class T> static __device__ __forceinline__ T *shuffle_pointer(T *p, uint32_t lane)
{
    return (T *)(uintptr_t)__shfl_sync(ALL, (unsigned long long)(uintptr_t)p, lane);
}
