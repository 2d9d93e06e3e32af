/*
 * One layer, as in Touvron et al. 2023, section 2.2, with the letters of Vaswani et al. 2017:
 *
 *     h = norm(x)                                   x [T][hidden]: T rows (tokens) of the residual stream
 *     q, k, v = W_q h, W_k h, W_v h                 q [T][n_heads][d], k and v [T][n_kv_heads][d]
 *     q, k = rope(q), rope(k)                       Su et al. 2021
 *     o = softmax(q K^T / sqrt(d)) V                K, V: the sequence's pages, this step's k and v included
 *     x = x + W_o o                                 grouped queries: Ainslie et al. 2023
 *     h = norm(x)
 *     x = x + W_down (act(W_gate h) * (W_up h))     Shazeer 2020
 *
 * What families change: q and k may be normed before rope, the results of both halves after their last matrix
 * (norm_after); a layer may have a window; attention may run on latents (forward_latent.c), and the second
 * half may be a mixture of experts (forward_experts.c). Behaviour follows from which weights are NULL and
 * from the config. How ranks, adapters and packed formats take part is in forward_linear.c.
 */
#include "engine/forward_internal.h"

struct k_attn forward_attention(const struct forward *f, uint32_t l, const struct forward_rows *r)
{
    const float *sinks = f->layers[l].attention.sinks;
    return (struct k_attn){.layout = &f->kept_layout,
                           .layer = l - f->kept_layer,
                           .first_kv_head = f->kept_kv_head,
                           .n_kv_heads = f->c.family->latent ? 1 : own(f, &f->share.kv_heads),
                           .n_heads = own(f, &f->share.heads),
                           .v_dim = f->c.head_dim,
                           .scale = f->c.score_scale,
                           .cap = f->c.attn_cap,
                           .sinks = sinks ? sinks + own_first(f, &f->share.heads) : NULL,
                           .window = f->c.layers[l] & LAYER_WINDOW ? f->c.window : 0,
                           .seqs = r->seqs,
                           .n_seqs = r->n_seqs};
}

/* q, k, v of each row lie side by side in qkv. Stores k and v in the pages of their sequences; writes o. */
static void grouped_query(struct forward *f, uint32_t l, const struct forward_rows *r, float *qkv, float *o)
{
    const struct attention_weights *w = &f->layers[l].attention;
    const struct k_rotary *rope = &f->rope[f->c.layers[l] & LAYER_WINDOW];
    const uint32_t heads = own(f, &f->share.heads), kv_heads = own(f, &f->share.kv_heads), d = f->c.head_dim;
    const uint32_t stride = f->in_dim;
    float *q = qkv, *k = q + (size_t)heads * d, *v = k + (size_t)kv_heads * d;
    struct kernels *ops = f->kernels;

    if (w->q_norm) {
        k_head_norm(ops, q, stride, heads, d, w->q_norm, f->c.rms_eps, r->n_rows, d);
        k_head_norm(ops, k, stride, kv_heads, d, w->k_norm, f->c.rms_eps, r->n_rows, d);
    }
    k_rope(ops, q, stride, heads + kv_heads, d, rope, r->rope, r->n_rows); /* q, and k right behind it */

    struct k_attn a = forward_attention(f, l, r);
    a.q = q, a.k = k, a.v = v, a.out = o;
    a.q_stride = a.kv_stride = stride;
    k_kv_store(ops, &a);
    k_attention(ops, &a);
}

void forward_layer(struct forward *f, uint32_t l, const struct forward_rows *r)
{
    const struct attention_weights *attn = &f->layers[l].attention;
    const struct feed_forward *ff = &f->layers[l].feed_forward;
    float *h = f->normed, *qkv = f->in, *o = f->attn;

    k_rmsnorm(f->kernels, r->x, attn->norm, f->c.rms_eps, r->n_rows, f->c.hidden, h);
    forward_linear(f, &attn->in, h, r, qkv);
    if (f->c.family->latent)
        forward_latent(f, l, r, qkv, o);
    else
        grouped_query(f, l, r, qkv, o);
    forward_add(f, &attn->out, &f->share.values, o, attn->norm_after, r); /* x += W_o o */

    k_rmsnorm(f->kernels, r->x, ff->norm, f->c.rms_eps, r->n_rows, f->c.hidden, h);
    if (ff->router) {
        forward_experts(f, ff, h, r); /* x += sum over experts */
    } else {
        forward_linear(f, &ff->dense.gate_up, h, r, f->gate_up);
        forward_glu(f, f->gate_up, r->n_rows, &f->share.dense, f->hidden);
        forward_add(f, &ff->dense.down, &f->share.dense, f->hidden, ff->norm_after, r); /* x += W_down hidden */
    }
}
