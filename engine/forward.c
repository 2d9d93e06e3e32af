/*
 * Runs a batch: embedding, all layers (forward_layer.c has the equations), the head; in pieces if there are
 * several stages; and replayed if the device recorded a step of this size.
 */
#include "engine/forward.h"

#include <assert.h>
#include <string.h>

#include "base/mem.h"
#include "engine/forward_internal.h"

/*
 * Rows of the rotary table: positions; for a long sequence under longrope, rows in the table's second half.
 */
static void fill_rope_rows(struct forward *f, const struct forward_batch *b)
{
    memcpy(f->rope_rows, b->positions, b->n_rows * sizeof(*f->rope_rows));
    for (uint32_t i = 0; i < b->n_seqs && f->c.rope[0].type == ROPE_LONGROPE; i++)
        for (uint32_t r = 0; r < b->seqs[i].n_rows && model_config_is_long(&f->c, b->n_tokens[i]); r++)
            f->rope_rows[b->seqs[i].first_row + r] += f->max_positions;
}

/* Hands the batch's arrays to the kernels for this step. */
static void put_batch(struct forward *f, const struct forward_batch *b)
{
    struct kernels *k = f->kernels;
    uint32_t n = b->n_logit_rows;
    fill_rope_rows(f, b);
    f->put = (struct forward_put){.ids = k_put(k, b->ids, b->n_rows * sizeof(*b->ids)),
                                  .rope_rows = k_put(k, f->rope_rows, b->n_rows * sizeof(*f->rope_rows)),
                                  .logit_rows = k_put(k, b->logit_rows, n * sizeof(*b->logit_rows)),
                                  .draws = k_put(k, b->draws, n * sizeof(*b->draws))};
}

static void embed(struct forward *f, uint32_t n_rows)
{
    k_take_rows(f->kernels, f->embedding, f->embedding_type, f->c.hidden, f->put.ids, n_rows, f->embedding_scale, f->x);
}

/* Final norm, output matrix, and draws, for the rows whose logits are wanted. */
static void run_head(struct forward *f, const struct forward_batch *b)
{
    struct kernels *k = f->kernels;
    uint32_t n = b->n_logit_rows;
    k_take_rows(k, f->x, NUM_F32, f->c.hidden, f->put.logit_rows, n, 1, f->normed);
    k_rmsnorm(k, f->normed, f->final_norm, f->c.rms_eps, n, f->c.hidden, f->normed);
    k_linear(k, f->head, f->normed, n, f->own_logits, false);
    if (f->rank.tensor)
        k_gather(f->rank.tensor, f->rank.rank, f->share.vocab.first, 0, n, f->own_logits, f->logits);
    if (!f->host_logits)
        return;
    if (f->c.logits_cap > 0)
        k_softcap(k, f->logits, (size_t)n * f->c.vocab_size, f->c.logits_cap);
    k_sample_rows(k, f->logits, f->c.vocab_size, n, f->put.draws, f->sampled);
}

/* Queues the copies of results to the host; they are there after k_finish(). */
static void read_head(struct forward *f, const struct forward_batch *b)
{
    struct kernels *k = f->kernels;
    size_t vocab = f->c.vocab_size;
    k_read(k, f->host_sampled, f->sampled, b->n_logit_rows * sizeof(*f->sampled));
    for (uint32_t i = 0; i < b->n_logit_rows; i++)
        if (b->wants_logits[i])
            k_read(k, f->host_logits + i * vocab, f->logits + i * vocab, vocab * sizeof(float));
}

/* Ranges of layers whose pages are being copied to the host, in order; n_told of them were announced. */
struct ranges {
    uint32_t marks[K_MAX_MARKS];
    uint16_t ends[K_MAX_MARKS];
    uint32_t n, n_told;
};

static uint16_t range_begin(const struct forward *f, const struct ranges *r, uint32_t i)
{
    return i ? r->ends[i - 1] : (uint16_t)f->rank.first_layer;
}

/* Layers up to `end` are queued: queues the copies of their pages, and marks them. */
static void queue_range(struct forward *f, const struct forward_batch *b, struct ranges *r, uint32_t end)
{
    assert(r->n < K_MAX_MARKS);
    r->ends[r->n] = (uint16_t)end;
    if (b->on_queued)
        b->on_queued(b->user, f, range_begin(f, r, r->n), (uint16_t)end);
    r->marks[r->n++] = k_mark(f->kernels);
}

/* Calls on_layers for each range whose copies are complete; all: waits for the rest. */
static void tell_ranges(struct forward *f, const struct forward_batch *b, struct ranges *r, bool all)
{
    for (; r->n_told < r->n && (all || k_passed(f->kernels, r->marks[r->n_told])); r->n_told++) {
        k_wait(f->kernels, r->marks[r->n_told]);
        b->on_layers(b->user, range_begin(f, r, r->n_told), r->ends[r->n_told]);
    }
}

/* ------------------------------------------------------------------- pieces */

/*
 * With several stages a batch goes through them in pieces: the next stage works on a piece while this one
 * works on the piece after it (chunked pipeline parallelism, Qin et al. 2024, Mooncake, section 5.1). Each
 * piece reads the weights once more, so a piece has at least piece_rows rows, and a batch that only decodes
 * is usually one piece. All stages cut in the same places. Rows of a sequence stay in order, so the KV of
 * earlier rows is always there.
 */
static uint32_t count_pieces(const struct forward *f, const struct forward_batch *b)
{
    uint32_t n = f->rank.before || f->rank.after ? b->n_rows / f->rank.piece_rows : 1;
    return n ? n : 1;
}

static uint32_t larger(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

static uint32_t smaller(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Rows [begin, end) of the batch as a batch of their own. Its sequences are valid until the next call. */
static struct forward_rows cut(struct forward *f, const struct forward_batch *b, uint32_t begin, uint32_t end)
{
    struct forward_rows r = {f->x + (size_t)begin * f->c.hidden,
                             end - begin,
                             f->put.rope_rows + begin,
                             b->seqs,
                             b->n_seqs,
                             forward_adapted_rows(f, b->adapter_rows, begin, end)};
    if (r.n_rows == b->n_rows)
        return r;
    f->piece_seqs = mem_resize(f->piece_seqs, b->n_seqs, sizeof(*f->piece_seqs));
    r.seqs = f->piece_seqs;
    r.n_seqs = 0;
    for (uint32_t i = 0; i < b->n_seqs; i++) {
        const struct k_attn_seq *s = &b->seqs[i];
        uint32_t first = larger(s->first_row, begin), after = smaller(s->first_row + s->n_rows, end);
        if (first < after)
            f->piece_seqs[r.n_seqs++] = (struct k_attn_seq){.first_row = first - begin,
                                                            .n_rows = after - first,
                                                            .first_pos = s->first_pos + first - s->first_row,
                                                            .pages = s->pages};
    }
    return r;
}

/* Copies x of a piece from the first stage of a pair (rank 0) to the second (rank 1). */
static void hand_over(const struct forward *f, struct k_group *pair, uint32_t rank, const struct forward_rows *r)
{
    const uint32_t first[] = {0, f->c.hidden, f->c.hidden};
    if (pair)
        k_gather(pair, rank, first, 1, r->n_rows, r->x, r->x);
}

/* Whether on_layers is due after layer end - 1. */
static bool ends_range(const struct forward *f, const struct forward_batch *b, uint32_t end)
{
    return b->on_layers && (end % b->layers_per_call == 0 || end == f->rank.end_layer);
}

static void run_layers(struct forward *f, const struct forward_batch *b, const struct forward_rows *r, bool is_last,
                       struct ranges *ranges)
{
    for (uint32_t l = f->rank.first_layer; l < f->rank.end_layer; l++) {
        forward_layer(f, l, r);
        if (is_last && ends_range(f, b, l + 1))
            queue_range(f, b, ranges, l + 1);
        tell_ranges(f, b, ranges, false);
    }
}

/* Queues all operations of a batch. Layers are announced with the last piece, which completes them. */
static void run_batch(struct forward *f, const struct forward_batch *b, struct ranges *ranges)
{
    if (!f->rank.before)
        embed(f, b->n_rows);
    uint64_t n = count_pieces(f, b);
    for (uint64_t i = 0; i < n; i++) {
        const struct forward_rows r = cut(f, b, (uint32_t)(b->n_rows * i / n), (uint32_t)(b->n_rows * (i + 1) / n));
        k_put_seqs(f->kernels, r.seqs, r.n_seqs, f->layout.page_tokens);
        hand_over(f, f->rank.before, 1, &r);
        run_layers(f, b, &r, i + 1 == n, ranges);
        hand_over(f, f->rank.after, 0, &r);
    }
    if (b->n_logit_rows && !f->rank.after)
        run_head(f, b);
}

/* --------------------------------------------------------- steps that repeat */

/* Padded row count if this batch can be replayed (one row for each sequence, all with logits), else 0. */
static uint32_t rows_to_replay(const struct forward *f, const struct forward_batch *b)
{
    if (!forward_is_alone(f) || b->adapter_rows || b->n_rows != b->n_seqs || b->n_rows != b->n_logit_rows)
        return 0;
    uint32_t n = k_replay_rows(f->kernels, b->n_rows);
    return n <= f->max_rows && n <= f->max_logit_rows ? n : 0;
}

/* The batch, padded to n_rows with sequences of one token, whose KV goes to a page of their own. */
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

/* Replays a recorded step of this size, or runs the operations and records them. */
static void replay_batch(struct forward *f, const struct forward_batch *b, uint32_t n_rows)
{
    const struct forward_batch all = fill_up(f, b, n_rows);
    struct ranges none = {0};
    put_batch(f, &all);
    k_put_seqs(f->kernels, all.seqs, all.n_seqs, f->layout.page_tokens);
    if (k_replay(f->kernels, n_rows))
        return;
    const struct forward_rows r = cut(f, &all, 0, n_rows);
    embed(f, n_rows);
    run_layers(f, &all, &r, false, &none);
    run_head(f, &all);
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
            queue_range(f, b, &ranges, f->rank.end_layer);
    } else {
        put_batch(f, b);
        run_batch(f, b, &ranges);
    }
    if (f->host_logits && b->n_logit_rows)
        read_head(f, b);
    tell_ranges(f, b, &ranges, true);
    k_finish(f->kernels);
}

void forward_run_gathers(struct forward *f, uint32_t n_rows)
{
    const struct forward_rows r = {.x = f->x, .n_rows = n_rows};
    k_step(f->kernels);
    hand_over(f, f->rank.before, 1, &r);
    for (uint32_t l = f->rank.first_layer; l < f->rank.end_layer; l++) {
        bool mixture = f->c.layers[l] & LAYER_MOE;
        forward_gather(f, &f->share.values, n_rows, f->attn, f->whole);
        forward_gather(f, &f->share.hidden, n_rows, f->own, f->normed);
        if (mixture)
            forward_gather(f, &f->share.expert, n_rows * f->c.moe.n_used, f->hidden, f->whole);
        if (!mixture || f->c.moe.shared_intermediate)
            forward_gather(f, mixture ? &f->share.shared : &f->share.dense, n_rows, f->hidden, f->whole);
        forward_gather(f, &f->share.hidden, n_rows, f->own, f->normed);
    }
    hand_over(f, f->rank.after, 0, &r);
    k_finish(f->kernels);
}
