/* A batch through all layers, as in Touvron et al. 2023, section 2.2, and what families changed since (model/config.h). */
#include "engine/forward.h"

#include <assert.h>
#include <string.h>

#include "engine/forward_internal.h"

void forward_add(struct forward *f, uint32_t n_rows, const float *norm_after, float *y)
{
    uint32_t dim = f->c.hidden;
    if (norm_after)
        k_rmsnorm(f->kernels, y, norm_after, f->c.rms_eps, n_rows, dim, y);
    k_add(f->kernels, y, (size_t)n_rows * dim, f->x);
}

/* Rows of the rotary tables: positions, and where a longrope sequence is long, those of the second half. */
static void fill_rope_rows(struct forward *f, const struct forward_batch *b)
{
    memcpy(f->rope_rows, b->positions, b->n_rows * sizeof(*f->rope_rows));
    if (f->c.rope[0].type != ROPE_LONGROPE)
        return;
    for (uint32_t i = 0; i < b->n_seqs; i++)
        for (uint32_t r = 0; r < b->seqs[i].n_rows && model_config_is_long(&f->c, b->n_tokens[i]); r++)
            f->rope_rows[b->seqs[i].first_row + r] += f->max_positions;
}

static void run_head(struct forward *f, const struct forward_batch *b, float *logits_out)
{
    uint32_t dim = f->c.hidden;
    for (uint32_t i = 0; i < b->n_logit_rows; i++) /* rows ascend, so a copy never overwrites one still wanted */
        memmove(f->x + (size_t)i * dim, f->x + (size_t)b->logit_rows[i] * dim, dim * sizeof(float));
    k_rmsnorm(f->kernels, f->x, f->final_norm, f->c.rms_eps, b->n_logit_rows, dim, f->normed);
    k_linear(f->kernels, f->head, f->normed, b->n_logit_rows, logits_out, false);
    if (f->c.logits_cap > 0)
        k_softcap(f->kernels, logits_out, (size_t)b->n_logit_rows * f->c.vocab_size, f->c.logits_cap);
}

void forward_run(struct forward *f, const struct forward_batch *b, float *logits_out)
{
    assert(b->n_rows >= 1 && b->n_rows <= f->max_rows && b->n_logit_rows <= b->n_rows);
    const struct tensor *t = f->embedding;
    k_embed(f->kernels, t->data, t->type, f->c.hidden, b->ids, b->n_rows, f->embedding_scale, f->x);
    fill_rope_rows(f, b);
    uint32_t told = 0;
    for (uint32_t l = 0; l < f->c.n_layers; l++) {
        forward_attention(f, l, b);
        forward_mlp(f, l, b);
        if (b->on_layers && (l + 1 - told == b->layers_per_call || l + 1 == f->c.n_layers)) {
            b->on_layers(b->user, (uint16_t)told, (uint16_t)(l + 1));
            told = l + 1;
        }
    }
    if (b->n_logit_rows)
        run_head(f, b, logits_out);
}
