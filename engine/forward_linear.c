/*
 * The linear maps of a layer, with all that has a part in one: the packed matrix, what adapters add for their
 * rows, and, with several ranks, the gathering of columns.
 */
#include "engine/forward_internal.h"

void forward_linear(struct forward *f, const struct projection *w, const float *in, const struct forward_rows *r,
                    float *out)
{
    k_linear(f->kernels, w->matrix, in, r->n_rows, out, false);
    forward_lora(f, &w->lora, in, r, out);
}

void forward_add(struct forward *f, const struct projection *w, const struct share *in_share, const float *in,
                 const float *norm_after, const struct forward_rows *r)
{
    const float *y = forward_gather(f, in_share, r->n_rows, in, f->whole);
    if (!norm_after) {
        float *x = forward_own_columns(f, r);
        k_linear(f->kernels, w->matrix, y, r->n_rows, x, true);
        forward_lora(f, &w->lora, y, r, x);
        forward_gather(f, &f->share.hidden, r->n_rows, x, r->x);
        return;
    }
    float *part = f->rank.tensor ? f->own : f->normed;
    forward_linear(f, w, y, r, part);
    forward_gather(f, &f->share.hidden, r->n_rows, part, f->normed);
    k_rmsnorm(f->kernels, f->normed, norm_after, f->c.rms_eps, r->n_rows, f->c.hidden, f->normed);
    k_add(f->kernels, f->normed, (size_t)r->n_rows * f->c.hidden, r->x);
}

void forward_glu(struct forward *f, const float *gate_up, uint32_t n_rows, const struct share *s, float *out)
{
    static const enum k_act ACTS[] = {
        [GLU_SILU] = ACT_SILU, [GLU_GELU_TANH] = ACT_GELU_TANH, [GLU_CLAMPED] = ACT_CLAMPED};
    const struct k_glu glu = {ACTS[f->c.glu], f->c.glu_alpha, f->c.glu_limit};
    k_glu(f->kernels, gate_up, n_rows, own(f, s), &glu, out);
}
