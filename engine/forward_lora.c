/*
 * Adapters (model/adapter.h): to += B (A x), after the matrix itself. For each matrix that some adapter
 * changes there are two stacks, of A and of B, with one matrix for each adapter; rows are sorted by adapter
 * (segments as in Punica, Chen et al. 2024). The order of sums in a row depends on that row only.
 *
 * Projections that are packed as one matrix (q, k, v) are one here, too: their A are stacked vertically, and
 * B is block diagonal. All adapters have the rank of the largest, padded with zeros. B includes the scale.
 */
#include <stdlib.h>

#include "base/mem.h"
#include "engine/forward_internal.h"

/* An adapted matrix: its parts, the largest rank of any adapter for each part, and the sum of these. */
struct adapted {
    const struct part_name *parts;
    uint32_t n_parts, ranks[MAX_PARTS], rank;
    uint32_t n_in, n_out; /* n_out: this rank's share */
    uint32_t layer;
};

/* The shapes of what adapters add to a matrix; rank 0: nothing. */
static struct adapted adapted_shapes(const struct forward *f, uint32_t layer, const struct part_name *parts,
                                     uint32_t n_parts, uint32_t n_in)
{
    struct adapted t = {.parts = parts, .n_parts = n_parts, .n_in = n_in, .layer = layer};
    for (uint32_t p = 0; p < n_parts; p++) {
        struct adapter_matrix m;
        for (uint32_t i = 0; i < f->n_adapters; i++)
            if (adapter_find(f->adapters[i], layer, parts[p].name, &m) && m.rank > t.ranks[p])
                t.ranks[p] = m.rank;
        t.rank += t.ranks[p];
        t.n_out += parts[p].n_out;
    }
    return t;
}

static size_t row_bytes(const struct tensor *t)
{
    return t->shape[1] * num_type_bytes(t->type);
}

/* Fills down [rank][n_in] and up [n_out][rank] of one adapter. Both are zeroed before. */
static void fill_parts(const struct adapter *a, const struct adapted *t, float *down, float *up)
{
    float *row = mem_array(ADAPTER_MAX_RANK, sizeof(*row));
    uint32_t at_rank = 0, at_out = 0;
    for (uint32_t p = 0; p < t->n_parts; p++) {
        const struct part_name *part = &t->parts[p];
        struct adapter_matrix m;
        bool has = adapter_find(a, t->layer, part->name, &m);
        if (has)
            k_convert_to_f32(m.a->data, m.a->type, (uint64_t)m.rank * t->n_in, down + (size_t)at_rank * t->n_in);
        for (uint32_t o = 0; o < part->n_out && has; o++) {
            const uint8_t *from = (const uint8_t *)m.b->data + (part->first + o) * row_bytes(m.b);
            k_convert_to_f32(from, m.b->type, m.rank, row);
            for (uint32_t r = 0; r < m.rank; r++)
                up[(size_t)(at_out + o) * t->rank + at_rank + r] = row[r] * m.scale;
        }
        at_rank += t->ranks[p];
        at_out += part->n_out;
    }
    free(row);
}

static enum td_status pack(const struct forward *f, const float *numbers, uint32_t n_out, uint32_t n_in,
                           struct k_matrix **out)
{
    const struct k_matrix_part part = {.data = numbers, .type = NUM_F32, .n_out = n_out};
    return k_matrix_pack(f->kernels, &part, 1, n_in, f->form.compute, WEIGHTS_AS_STORED, out);
}

static enum td_status pack_adapter(const struct forward *f, const struct adapter *a, const struct adapted *t,
                                   struct k_matrix **down_out, struct k_matrix **up_out)
{
    float *down = mem_array((size_t)t->rank * t->n_in, sizeof(*down));
    float *up = mem_array((size_t)t->n_out * t->rank, sizeof(*up));
    fill_parts(a, t, down, up);
    enum td_status s = pack(f, down, t->rank, t->n_in, down_out);
    if (!s)
        s = pack(f, up, t->n_out, t->rank, up_out);
    free(down);
    free(up);
    return s;
}

/* Makes a stack of the matrices and takes them over; if s or the stack is an error, frees them. */
static enum td_status stack_up(const struct forward *f, struct k_matrix **all, enum td_status s, struct k_stack **out)
{
    if (!s)
        s = k_stack_open(f->kernels, all, f->n_adapters, out);
    for (uint32_t i = 0; i < f->n_adapters && s; i++)
        k_matrix_free(f->kernels, all[i]);
    free(all);
    return s;
}

enum td_status forward_lora_open(struct forward *f, uint32_t layer, const struct part_name *parts, uint32_t n_parts,
                                 uint32_t n_in, struct lora *out, struct td_error *e)
{
    const struct adapted t = adapted_shapes(f, layer, parts, n_parts, n_in);
    if (!t.rank)
        return TD_OK;
    struct k_matrix **downs = mem_array(f->n_adapters, sizeof(struct k_matrix *));
    struct k_matrix **ups = mem_array(f->n_adapters, sizeof(struct k_matrix *));
    enum td_status s = TD_OK;
    for (uint32_t i = 0; i < f->n_adapters && !s; i++)
        s = pack_adapter(f, f->adapters[i], &t, &downs[i], &ups[i]);
    s = stack_up(f, downs, s, &out->down);
    s = stack_up(f, ups, s, &out->up);
    out->n_in = t.n_in;
    out->n_out = t.n_out;
    f->lora_rank = t.rank > f->lora_rank ? t.rank : f->lora_rank;
    f->lora_n_out = t.n_out > f->lora_n_out ? t.n_out : f->lora_n_out;
    return s ? td_fail(e, s, "no memory for the adapters of layer %u", layer) : TD_OK;
}

void forward_lora(struct forward *f, const struct lora *w, const float *x, const struct forward_rows *r, float *to)
{
    struct kernels *k = f->kernels;
    uint32_t n = r->adapted.n_rows;
    size_t row = r->adapted.first_row;
    if (!w->up || !n)
        return;
    k_linear_sorted(k, w->down, r->adapted.first, n, x + row * w->n_in, f->lora_mid);
    k_linear_sorted(k, w->up, r->adapted.first, n, f->lora_mid, f->lora_out);
    k_add(k, f->lora_out, (size_t)n * w->n_out, to + row * w->n_out);
}

/* Clamps row to [begin, end] and counts from begin. */
static uint32_t within(uint32_t row, uint32_t begin, uint32_t end)
{
    return row < begin ? 0 : (row < end ? row : end) - begin;
}

struct adapted_rows forward_adapted_rows(struct forward *f, const uint32_t *adapter_rows, uint32_t begin, uint32_t end)
{
    struct adapted_rows a = {0};
    if (!adapter_rows)
        return a;
    a.first_row = within(adapter_rows[0], begin, end);
    a.n_rows = within(adapter_rows[f->n_adapters], begin, end) - a.first_row;
    for (uint32_t i = 0; i <= f->n_adapters; i++)
        f->adapter_first[i] = within(adapter_rows[i], begin, end) - a.first_row;
    a.first = k_put(f->kernels, f->adapter_first, (f->n_adapters + 1ul) * sizeof(*f->adapter_first));
    return a;
}
