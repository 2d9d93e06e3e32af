/*
 * How weights and pages are divided among ranks, and how ranks exchange what each has computed.
 *
 * Query heads stay with their kv head; columns of matrices are divided at multiples of 16 where there are
 * enough of them. Small weights are on every rank: norms, routers, the latent's projection.
 */
#include "engine/forward_internal.h"

enum { UNIT = 16 };

/*
 * Divides n columns into n_ranks runs, in multiples of unit if there are enough. TD_ERR_INVALID if a rank
 * gets none.
 */
static enum td_status share_out(struct share *out, const char *what, uint32_t n, uint32_t unit, uint32_t n_ranks,
                                struct td_error *e)
{
    if (n / unit < n_ranks)
        unit = 1;
    for (uint32_t i = 0; i < n_ranks; i++)
        out->first[i] = (uint32_t)((uint64_t)(n / unit) * i / n_ranks * unit);
    out->first[n_ranks] = n;
    return n && n < n_ranks
               ? td_fail(e, TD_ERR_INVALID, "%u %s can't be shared among %u tensor-parallel ranks", n, what, n_ranks)
               : TD_OK;
}

/* The same division with n columns for each one of s. */
static struct share times(const struct share *s, uint32_t n, uint32_t n_ranks)
{
    struct share out;
    for (uint32_t i = 0; i <= n_ranks; i++)
        out.first[i] = s->first[i] * n;
    return out;
}

/* Query heads stay with their kv head. With a latent, which all ranks have, they are divided freely. */
static enum td_status share_heads(struct forward *f, uint32_t n, struct td_error *e)
{
    const struct model_config *c = &f->c;
    if (c->family->latent)
        return share_out(&f->share.heads, "heads", c->n_heads, 1, n, e);
    if (c->n_kv_heads % n)
        return td_fail(e, TD_ERR_INVALID, "%u kv heads can't be shared evenly among %u tensor-parallel ranks",
                       c->n_kv_heads, n);
    enum td_status s = share_out(&f->share.kv_heads, "kv heads", c->n_kv_heads, 1, n, e);
    f->share.heads = times(&f->share.kv_heads, c->n_heads / c->n_kv_heads, n);
    return s;
}

enum td_status forward_share_open(struct forward *f, struct td_error *e)
{
    const struct model_config *c = &f->c;
    uint32_t n = f->rank.n_tensor;
    const struct {
        struct share *at;
        const char *what;
        uint32_t n;
    } columns[] = {{&f->share.hidden, "hidden numbers", c->hidden},
                   {&f->share.dense, "intermediate numbers", c->intermediate},
                   {&f->share.expert, "intermediate numbers of an expert", c->moe.intermediate},
                   {&f->share.shared, "intermediate numbers of the shared expert", c->moe.shared_intermediate},
                   {&f->share.vocab, "tokens of the vocabulary", c->vocab_size}};
    enum td_status s = share_heads(f, n, e);
    for (size_t i = 0; i < sizeof(columns) / sizeof(columns[0]) && !s; i++)
        s = share_out(columns[i].at, columns[i].what, columns[i].n, UNIT, n, e);
    f->share.values = times(&f->share.heads, c->family->latent ? c->latent.v_dim : c->head_dim, n);
    return s;
}

/* -------------------------------------------------------------------- columns */

const float *forward_gather(struct forward *f, const struct share *s, uint32_t n_rows, const float *mine, float *all)
{
    if (!f->rank.tensor)
        return mine;
    k_gather(f->rank.tensor, f->rank.rank, s->first, K_EVERY_RANK, n_rows, mine, all);
    return all;
}

float *forward_own_columns(struct forward *f, const struct forward_rows *r)
{
    if (!f->rank.tensor)
        return r->x;
    uint32_t n = own(f, &f->share.hidden);
    const struct k_each e = {
        .x = r->x + own_first(f, &f->share.hidden), .y = f->own, .x_stride = f->c.hidden, .y_stride = n};
    k_copy_heads(f->kernels, &e, 1, n, r->n_rows);
    return f->own;
}

/* ---------------------------------------------------------------------- pages */

/* The latent is one kv head, which every rank has. */
static uint32_t own_kv_heads(const struct forward *f)
{
    return f->c.family->latent ? 1 : own(f, &f->share.kv_heads);
}

enum td_status forward_pages_open(struct forward *f, const struct forward_config *config, struct td_error *e)
{
    const uint32_t n_pages = config->n_pages;
    struct kv_layout part = f->layout;
    part.n_kv_heads = own_kv_heads(f);
    part.n_layers = f->rank.end_layer - f->rank.first_layer;
    void *kept = NULL;
    enum td_status s = k_map_part(f->kernels, f->arena, n_pages * kv_layout_page_bytes(&f->layout),
                                  n_pages * kv_layout_page_bytes(&part), &kept);
    if (s)
        return td_fail(e, s, "no memory for a pool of %u pages of %zu bytes", n_pages, kv_layout_page_bytes(&part));
    f->kept_arena = kept;
    if (!k_is_pinned(f->kernels, kept))
        log_warn(config->log,
                 "the pool's host memory can't be pinned: pages are copied by way of a buffer, which is slower and "
                 "holds up steps (raise ulimit -l, or make the pool smaller) bytes=%zu",
                 n_pages * kv_layout_page_bytes(&f->layout));
    f->kept_layout = forward_has_own_pages(f) ? part : f->layout;
    f->kept_kv_head = forward_has_own_pages(f) || f->c.family->latent ? 0 : own_first(f, &f->share.kv_heads);
    f->kept_layer = forward_has_own_pages(f) ? f->rank.first_layer : 0;
    return TD_OK;
}

bool forward_has_own_pages(const struct forward *f)
{
    return f->kept_arena != f->arena;
}

uint16_t forward_end_layer(const struct forward *f)
{
    return (uint16_t)f->rank.end_layer;
}

uint8_t *forward_page(const struct forward *f, uint32_t page)
{
    return f->kept_arena + page * kv_layout_page_bytes(&f->kept_layout);
}

/*
 * The rank's heads in all planes of layers [begin, end) of a page, as pieces; *host_out and *kept_out are
 * where they begin.
 */
static struct k_pieces part_of(const struct forward *f, uint32_t page, uint32_t begin, uint32_t end, uint8_t **host_out,
                               uint8_t **kept_out)
{
    const struct kv_layout *l = &f->layout;
    uint32_t first_head = f->c.family->latent ? 0 : own_first(f, &f->share.kv_heads);
    *host_out = f->arena + page * kv_layout_page_bytes(l) + begin * kv_layout_layer_bytes(l) +
                first_head * kv_layout_head_bytes(l);
    *kept_out = forward_page(f, page) + (begin - f->kept_layer) * kv_layout_layer_bytes(&f->kept_layout);
    if (own_kv_heads(f) == l->n_kv_heads)
        return (struct k_pieces){(end - begin) * kv_layout_layer_bytes(l), kv_layout_page_bytes(l), 1};
    return (struct k_pieces){.piece_bytes = own_kv_heads(f) * kv_layout_head_bytes(l),
                             .stride_bytes = l->n_kv_heads * kv_layout_head_bytes(l),
                             .n = (end - begin) * kv_layout_planes(l)};
}

void forward_write_page(struct forward *f, uint32_t page)
{
    uint8_t *host = NULL, *kept = NULL;
    if (!forward_has_own_pages(f))
        return;
    const struct k_pieces p = part_of(f, page, f->rank.first_layer, f->rank.end_layer, &host, &kept);
    k_write_pieces_aside(f->kernels, kept, host, &p);
}

uint64_t forward_write_mark(struct forward *f)
{
    return k_write_mark(f->kernels);
}

bool forward_written(struct forward *f, uint64_t mark)
{
    return k_written(f->kernels, mark);
}

void forward_write_wait(struct forward *f, uint64_t mark)
{
    k_write_wait(f->kernels, mark);
}

void forward_read_page(struct forward *f, uint32_t page, uint16_t begin, uint16_t end)
{
    uint8_t *host = NULL, *kept = NULL;
    uint32_t first = begin > f->rank.first_layer ? begin : f->rank.first_layer;
    if (!forward_has_own_pages(f) || end <= first)
        return;
    const struct k_pieces p = part_of(f, page, first, end < f->rank.end_layer ? end : f->rank.end_layer, &host, &kept);
    k_read_pieces_aside(f->kernels, host, kept, &p);
}
