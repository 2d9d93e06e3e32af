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
    for (uint32_t i = 0; i < b->n_seqs && f->c.rope[0].type == ROPE_LONGROPE; i++)
        for (uint32_t r = 0; r < b->seqs[i].n_rows && model_config_is_long(&f->c, b->n_tokens[i]); r++)
            f->rope_rows[b->seqs[i].first_row + r] += f->max_positions;
}

static void put_batch(struct forward *f, const struct forward_batch *b)
{
    struct kernels *k = f->kernels;
    uint32_t n = b->n_logit_rows;
    fill_rope_rows(f, b);
    f->put = (struct forward_put){.ids = k_put(k, b->ids, b->n_rows * sizeof(*b->ids)),
                                  .rope_rows = k_put(k, f->rope_rows, b->n_rows * sizeof(*f->rope_rows)),
                                  .logit_rows = k_put(k, b->logit_rows, n * sizeof(*b->logit_rows)),
                                  .draws = k_put(k, b->draws, n * sizeof(*b->draws))};
    k_put_seqs(k, b->seqs, b->n_seqs, f->layout.page_tokens);
}

static void run_head(struct forward *f, const struct forward_batch *b)
{
    struct kernels *k = f->kernels;
    uint32_t n = b->n_logit_rows;
    k_embed(k, f->x, NUM_F32, f->c.hidden, f->put.logit_rows, n, 1, f->normed);
    k_rmsnorm(k, f->normed, f->final_norm, f->c.rms_eps, n, f->c.hidden, f->normed);
    k_linear(k, f->head, f->normed, n, f->logits, false);
    if (f->c.logits_cap > 0)
        k_softcap(k, f->logits, (size_t)n * f->c.vocab_size, f->c.logits_cap);
    k_sample_rows(k, f->logits, f->c.vocab_size, n, f->put.draws, f->sampled);
}

static void read_head(struct forward *f, const struct forward_batch *b)
{
    struct kernels *k = f->kernels;
    size_t vocab = f->c.vocab_size;
    k_read(k, f->host_sampled, f->sampled, b->n_logit_rows * sizeof(*f->sampled));
    for (uint32_t i = 0; i < b->n_logit_rows; i++)
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

/* All operations of a batch; ranges NULL: nobody is told of layers. */
static void run_batch(struct forward *f, const struct forward_batch *b, struct ranges *ranges)
{
    k_embed(f->kernels, f->embedding, f->embedding_type, f->c.hidden, f->put.ids, b->n_rows, f->embedding_scale, f->x);
    for (uint32_t l = 0; l < f->c.n_layers; l++) {
        forward_attention(f, l, b);
        forward_mlp(f, l, b);
        if (ranges && ((l + 1) % b->layers_per_call == 0 || l + 1 == f->c.n_layers))
            queue_range(f, b, ranges, l + 1);
        if (ranges)
            tell_ranges(f, b, ranges, false);
    }
    if (b->n_logit_rows)
        run_head(f, b);
}

/* --------------------------------------------------------- steps that repeat */

/* Of sequences with one row each, whose logits are wanted: so many rows are to be made of them, or 0. */
static uint32_t rows_to_replay(const struct forward *f, const struct forward_batch *b)
{
    if (b->n_rows != b->n_seqs || b->n_rows != b->n_logit_rows)
        return 0;
    uint32_t n = k_replay_rows(f->kernels, b->n_rows);
    return n <= f->max_rows && n <= f->max_logit_rows ? n : 0;
}

/* The batch, filled up with sequences of one token. */
static struct forward_batch fill_up(const struct forward *f, const struct forward_batch *b, uint32_t n_rows)
{
    const struct forward_made *m = &f->made;
    struct forward_batch all = *b;
    memcpy(m->ids, b->ids, b->n_rows * sizeof(*m->ids));
    memcpy(m->positions, b->positions, b->n_rows * sizeof(*m->positions));
    memcpy(m->n_tokens, b->n_tokens, b->n_rows * sizeof(*m->n_tokens));
    memcpy(m->logit_rows, b->logit_rows, b->n_rows * sizeof(*m->logit_rows));
    memcpy(m->seqs, b->seqs, b->n_rows * sizeof(*m->seqs));
    memcpy(m->draws, b->draws, b->n_rows * sizeof(*m->draws));
    for (uint32_t i = b->n_rows; i < n_rows; i++) {
        m->ids[i] = m->positions[i] = 0;
        m->n_tokens[i] = 1;
        m->logit_rows[i] = i;
        m->seqs[i] = (struct k_attn_seq){.first_row = i, .n_rows = 1, .pages = &m->page};
        m->draws[i] = (struct k_draw){0};
    }
    all.ids = m->ids;
    all.positions = m->positions;
    all.n_tokens = m->n_tokens;
    all.logit_rows = m->logit_rows;
    all.seqs = m->seqs;
    all.draws = m->draws;
    all.n_rows = all.n_seqs = all.n_logit_rows = n_rows;
    return all;
}

static void replay_batch(struct forward *f, const struct forward_batch *b, uint32_t n_rows)
{
    const struct forward_batch all = fill_up(f, b, n_rows);
    put_batch(f, &all);
    if (k_replay(f->kernels, n_rows))
        return;
    run_batch(f, &all, NULL);
    k_replay_end(f->kernels);
}

void forward_run(struct forward *f, const struct forward_batch *b)
{
    assert(b->n_rows >= 1 && b->n_rows <= f->max_rows && b->n_logit_rows <= f->max_logit_rows);
    struct ranges ranges = {0};
    uint32_t n_rows = rows_to_replay(f, b);
    k_step(f->kernels);
    if (n_rows) {
        replay_batch(f, b, n_rows);
        if (b->on_layers)
            queue_range(f, b, &ranges, f->c.n_layers);
    } else {
        put_batch(f, b);
        run_batch(f, b, b->on_layers ? &ranges : NULL);
    }
    read_head(f, b);
    tell_ranges(f, b, &ranges, true);
    k_finish(f->kernels);
}
