/*
 * Multi-head latent attention (DeepSeek-V2, section 2.1.1) in its absorbed form. Keys and values of all heads
 * are linear functions of one small vector of a token, the latent. W_UK is applied to the query and W_UV to
 * the result instead of to every key and value, so attention runs on the latents as they are stored. Prompts
 * and decoding use the same form: their bits would differ otherwise.
 */
#include "engine/forward_internal.h"

static const float LATENT_NORM_EPS = 1e-6f; /* constant in the reference, independent of rms_norm_eps */

/*
 * One matrix for each head: in [T][n_heads][in_dim] -> out [T][n_heads][out_dim], in the columns that the
 * matrices have.
 */
static void each_head(struct forward *f, const struct k_stack *w, const float *in, size_t in_stride, size_t in_dim,
                      float *out, size_t out_dim, uint32_t n_rows)
{
    const struct k_each e = {in, out, in_stride, in_dim, own(f, &f->share.heads) * out_dim, out_dim};
    k_linear_each(f->kernels, w, &e, n_rows);
}

/*
 * Every rank has the whole latent. If the ranks share the pages' memory, rank 0 stores it, and the others
 * wait for that.
 */
static void store_latent(struct forward *f, const struct k_attn *a)
{
    bool share = f->rank.tensor && !forward_has_own_pages(f);
    if (!share || f->rank.rank == 0)
        k_kv_store(f->kernels, a);
    if (share)
        k_barrier(f->rank.tensor, f->rank.rank);
}

void forward_latent(struct forward *f, uint32_t l, const struct forward_rows *r, float *in, float *o)
{
    const struct attention_weights *w = &f->layers[l].attention;
    const struct model_latent *m = &f->c.latent;
    struct kernels *ops = f->kernels;
    uint32_t heads = own(f, &f->share.heads), q_dim = f->c.head_dim, row = m->kv_rank + m->rope_dim, rows = r->n_rows;
    size_t q_stride = f->in_dim;
    float *q = in, *latent = in + f->in_dim - row;
    if (w->q_b) {
        k_head_norm(ops, q, f->in_dim, 1, m->q_rank, w->q_norm, LATENT_NORM_EPS, rows, m->q_rank);
        k_linear_each(ops, w->q_b, &(struct k_each){q, f->q, f->in_dim, 0, (size_t)heads * q_dim, 0}, rows);
        q = f->q;
        q_stride = (size_t)heads * q_dim;
    }
    k_head_norm(ops, latent, f->in_dim, 1, row, w->k_norm, LATENT_NORM_EPS, rows, m->kv_rank);
    each_head(f, w->to_latent, q, q_stride, q_dim, f->latent_q, row, rows);
    const struct k_each rest = {q + m->nope_dim, f->latent_q + m->kv_rank, q_stride, q_dim, (size_t)heads * row, row};
    k_copy_heads(ops, &rest, heads, m->rope_dim, rows);
    k_rope(ops, f->latent_q + m->kv_rank, (size_t)heads * row, heads, row, &f->rope[0], r->rope, rows);
    k_rope(ops, latent + m->kv_rank, f->in_dim, 1, m->rope_dim, &f->rope[0], r->rope, rows);
    struct k_attn a = forward_attention(f, l, r);
    a.q = f->latent_q;
    a.q_stride = (size_t)heads * row;
    a.k = latent;
    a.kv_stride = f->in_dim;
    a.v_dim = m->kv_rank;
    a.out = f->latent_out;
    store_latent(f, &a);
    k_attention(ops, &a);
    each_head(f, w->value, f->latent_out, (size_t)heads * m->kv_rank, m->kv_rank, o, m->v_dim, rows);
}
