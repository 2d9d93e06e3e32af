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
static void put_rope_rows(struct forward *f, const struct forward_batch *b)
{
    memcpy(f->rope_rows, b->positions, b->n_rows * sizeof(*f->rope_rows));
    for (uint32_t i = 0; i < b->n_seqs && f->c.rope[0].type == ROPE_LONGROPE; i++)
        for (uint32_t r = 0; r < b->seqs[i].n_rows && model_config_is_long(&f->c, b->n_tokens[i]); r++)
            f->rope_rows[b->seqs[i].first_row + r] += f->max_positions;
    f->put_rope_rows = k_put(f->kernels, f->rope_rows, b->n_rows * sizeof(*f->rope_rows));
}

static void run_head(struct forward *f, const struct forward_batch *b)
{
    struct kernels *k = f->kernels;
    uint32_t n = b->n_logit_rows;
    size_t vocab = f->c.vocab_size;
    const uint32_t *rows = k_put(k, b->logit_rows, n * sizeof(*rows));
    k_embed(k, f->x, NUM_F32, f->c.hidden, rows, n, 1, f->normed);
    k_rmsnorm(k, f->normed, f->final_norm, f->c.rms_eps, n, f->c.hidden, f->normed);
    k_linear(k, f->head, f->normed, n, f->logits, false);
    if (f->c.logits_cap > 0)
        k_softcap(k, f->logits, n * vocab, f->c.logits_cap);
    k_sample_rows(k, f->logits, f->c.vocab_size, n, k_put(k, b->draws, n * sizeof(*b->draws)), f->sampled);
    k_read(k, f->host_sampled, f->sampled, n * sizeof(*f->sampled));
    for (uint32_t i = 0; i < n; i++)
        if (b->wants_logits[i])
            k_read(k, f->host_logits + i * vocab, f->logits + i * vocab, vocab * sizeof(float));
}

/* Ranges of layers whose pages are on their way to the host, in order: those from n_told on. */
struct ranges {
    uint32_t marks[K_MAX_MARKS];
    uint16_t ends[K_MAX_MARKS];
    uint32_t n, n_told;
};

static uint16_t range_begin(const struct ranges *r, uint32_t i)
{
    return i ? r->ends[i - 1] : 0;
}

static void queue_range(struct forward *f, const struct forward_batch *b, struct ranges *r, uint32_t end)
{
    assert(r->n < K_MAX_MARKS);
    r->ends[r->n] = (uint16_t)end;
    if (b->on_queued)
        b->on_queued(b->user, range_begin(r, r->n), (uint16_t)end);
    r->marks[r->n++] = k_mark(f->kernels);
}

static void tell_ranges(struct forward *f, const struct forward_batch *b, struct ranges *r, bool all)
{
    for (; r->n_told < r->n && (all || k_passed(f->kernels, r->marks[r->n_told])); r->n_told++) {
        k_wait(f->kernels, r->marks[r->n_told]);
        b->on_layers(b->user, range_begin(r, r->n_told), r->ends[r->n_told]);
    }
}

void forward_run(struct forward *f, const struct forward_batch *b)
{
    assert(b->n_rows >= 1 && b->n_rows <= f->max_rows && b->n_logit_rows <= f->max_logit_rows);
    struct kernels *k = f->kernels;
    k_step(k);
    k_put_seqs(k, b->seqs, b->n_seqs, f->layout.page_tokens);
    const uint32_t *ids = k_put(k, b->ids, b->n_rows * sizeof(*ids));
    put_rope_rows(f, b);
    k_embed(k, f->embedding, f->embedding_type, f->c.hidden, ids, b->n_rows, f->embedding_scale, f->x);
    struct ranges ranges = {0};
    for (uint32_t l = 0; l < f->c.n_layers; l++) {
        forward_attention(f, l, b);
        forward_mlp(f, l, b);
        if (b->on_layers && ((l + 1) % b->layers_per_call == 0 || l + 1 == f->c.n_layers))
            queue_range(f, b, &ranges, l + 1);
        tell_ranges(f, b, &ranges, false);
    }
    if (b->n_logit_rows)
        run_head(f, b);
    tell_ranges(f, b, &ranges, true);
    k_finish(k);
}
