/*
 * The attention half of a layer: rotary grouped-query attention (Ainslie et al. 2023), or multi-head latent
 * attention (DeepSeek-V2, section 2.1.1) in its absorbed form. In the latter, keys and values of all heads
 * are linear functions of one small vector of a token, the latent. W_UK is applied to the query and W_UV to
 * the result instead of to every key and value, so attention runs on the latents as they are stored. Prompts
 * and decoding use the same form: their bits would differ otherwise.
 */
#include "engine/forward_internal.h"

static const float LATENT_NORM_EPS = 1e-6f; /* constant in the reference, independent of rms_norm_eps */

static struct k_attn attention_of(const struct forward *f, uint32_t l, const struct forward_rows *r)
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

/* in [T][n_heads + 2 n_kv_heads][head_dim] -> attn [T][n_heads][head_dim] */
static void plain_attention(struct forward *f, uint32_t l, const struct forward_rows *r)
{
    const struct attention_weights *y = &f->layers[l].attention;
    struct kernels *k = f->kernels;
    uint32_t heads = own(f, &f->share.heads), kv_heads = own(f, &f->share.kv_heads), dim = f->c.head_dim;
    float *q = f->in, *keys = q + (size_t)heads * dim, *values = keys + (size_t)kv_heads * dim;
    if (y->q_norm) {
        k_head_norm(k, q, f->in_dim, heads, dim, y->q_norm, f->c.rms_eps, r->n_rows, dim);
        k_head_norm(k, keys, f->in_dim, kv_heads, dim, y->k_norm, f->c.rms_eps, r->n_rows, dim);
    }
    const struct k_rotary *rope = &f->rope[f->c.layers[l] & LAYER_WINDOW];
    k_rope(k, q, f->in_dim, heads + kv_heads, dim, rope, r->rope, r->n_rows); /* q and k lie side by side */
    struct k_attn a = attention_of(f, l, r);
    a.q = q;
    a.k = keys;
    a.v = values;
    a.q_stride = a.kv_stride = f->in_dim;
    a.out = f->attn;
    k_kv_store(k, &a);
    k_attention(k, &a);
}

/*
 * One matrix for each head: x [T][n_heads][x_dim] -> y [T][n_heads][y_dim], in the columns that the matrices
 * have.
 */
static void each_head(struct forward *f, const struct k_stack *w, const float *x, size_t x_stride, size_t x_dim,
                      float *y, size_t y_dim, uint32_t n_rows)
{
    const struct k_each e = {x, y, x_stride, x_dim, own(f, &f->share.heads) * y_dim, y_dim};
    k_linear_each(f->kernels, w, &e, n_rows);
}

/*
 * Every rank has the whole latent. If the ranks share the pages' memory, rank 0 stores it; the empty gather
 * makes the others wait for that.
 */
static void store_latent(struct forward *f, const struct k_attn *a)
{
    static const uint32_t NOTHING[K_MAX_RANKS + 1];
    bool share = f->rank.tensor && !forward_has_own_pages(f);
    if (!share || f->rank.rank == 0)
        k_kv_store(f->kernels, a);
    if (share)
        k_gather(f->rank.tensor, f->rank.rank, NOTHING, K_EVERY_RANK, 0, NULL, NULL);
}

/*
 * A row of in holds q [n_heads][nope, rope] (or q_a, if there is a q_rank), then the latent [kv_rank, rope].
 * The result is attn [T][n_heads][v_dim].
 */
static void latent_attention(struct forward *f, uint32_t l, const struct forward_rows *r)
{
    const struct attention_weights *y = &f->layers[l].attention;
    const struct model_latent *m = &f->c.latent;
    struct kernels *k = f->kernels;
    uint32_t heads = own(f, &f->share.heads), q_dim = f->c.head_dim, row = m->kv_rank + m->rope_dim, rows = r->n_rows;
    size_t q_stride = f->in_dim;
    float *q = f->in, *latent = f->in + f->in_dim - row;
    if (y->q_b) {
        k_head_norm(k, q, f->in_dim, 1, m->q_rank, y->q_norm, LATENT_NORM_EPS, rows, m->q_rank);
        k_linear_each(k, y->q_b, &(struct k_each){q, f->q, f->in_dim, 0, (size_t)heads * q_dim, 0}, rows);
        q = f->q;
        q_stride = (size_t)heads * q_dim;
    }
    k_head_norm(k, latent, f->in_dim, 1, row, y->k_norm, LATENT_NORM_EPS, rows, m->kv_rank);
    each_head(f, y->to_latent, q, q_stride, q_dim, f->latent_q, row, rows);
    const struct k_each rest = {q + m->nope_dim, f->latent_q + m->kv_rank, q_stride, q_dim, (size_t)heads * row, row};
    k_copy_heads(k, &rest, heads, m->rope_dim, rows);
    k_rope(k, f->latent_q + m->kv_rank, (size_t)heads * row, heads, row, &f->rope[0], r->rope, rows);
    k_rope(k, latent + m->kv_rank, f->in_dim, 1, m->rope_dim, &f->rope[0], r->rope, rows);
    struct k_attn a = attention_of(f, l, r);
    a.q = f->latent_q;
    a.q_stride = (size_t)heads * row;
    a.k = latent;
    a.kv_stride = f->in_dim;
    a.v_dim = m->kv_rank;
    a.out = f->latent_out;
    store_latent(f, &a);
    k_attention(k, &a);
    each_head(f, y->value, f->latent_out, (size_t)heads * m->kv_rank, m->kv_rank, f->attn, m->v_dim, rows);
}

void forward_attention(struct forward *f, uint32_t l, const struct forward_rows *r)
{
    const struct attention_weights *y = &f->layers[l].attention;
    k_rmsnorm(f->kernels, r->x, y->norm, f->c.rms_eps, r->n_rows, f->c.hidden, f->normed);
    k_linear(f->kernels, y->in, f->normed, r->n_rows, f->in, false);
    forward_lora(f, &y->in_lora, f->normed, r, f->in);
    if (f->c.family->latent)
        latent_attention(f, l, r);
    else
        plain_attention(f, l, r);
    const float *values = forward_gather(f, &f->share.values, r->n_rows, f->attn, f->whole);
    forward_project(f, y->out, &y->out_lora, values, y->norm_after, r);
}
