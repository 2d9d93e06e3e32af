/*
 * Operations that compute every row (or number) by itself, spread over the pool in pieces of some thousand
 * numbers.
 *
 * Parts that an instruction set does faster go through its table. The rest is written here once, without fma
 * (two products and a sum, each rounded, are the same on every machine) or by scalar_fma. So there is only
 * one version of it.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/scalar.h"
#include "kernels/cpu/state.h"

/* Arguments of one operation. Each member names the operations that use it. */
struct row_job {
    const struct cpu_ops *ops;
    uint32_t n_rows, rows_per_piece, dim;
    const float *in, *weight;
    float *out;
    float eps, scale;
    void (*row)(const struct row_job *job, size_t row);
    const void *table; /* take_rows */
    enum num_type type;
    const uint32_t *ids; /* take_rows: ids; rope, combine: rows of a table */
    size_t row_stride, head_stride;
    uint32_t n_heads, n;
    const struct k_glu *glu;
    const struct k_rotary *rotary;
    const struct k_router *router;
    uint32_t *experts;
};

static void run_rows(void *arg, uint32_t piece, uint32_t thread)
{
    (void)thread;
    const struct row_job *job = arg;
    uint32_t first = piece * job->rows_per_piece, left = job->n_rows - first;
    for (uint32_t i = 0; i < (left < job->rows_per_piece ? left : job->rows_per_piece); i++)
        job->row(job, first + i);
}

/* row_numbers: the work of one row, in numbers. */
static void spread_rows(struct cpu_kernels *k, struct row_job *job, size_t row_numbers)
{
    size_t rows = PIECE_NUMBERS / (row_numbers ? row_numbers : 1);
    job->ops = k->ops;
    job->rows_per_piece = rows ? (uint32_t)rows : 1;
    pool_run(k->pool, run_rows, job, (job->n_rows + job->rows_per_piece - 1) / job->rows_per_piece);
}

/* For operations on numbers without rows: NUMBERS numbers make a row. */
enum { NUMBERS = 1024 };

static void spread_numbers(struct cpu_kernels *k, struct row_job *job, size_t n)
{
    job->n_rows = (uint32_t)((n + NUMBERS - 1) / NUMBERS);
    spread_rows(k, job, NUMBERS);
}

static size_t numbers_left(size_t n, size_t row)
{
    return n - row * NUMBERS < NUMBERS ? n - row * NUMBERS : NUMBERS;
}

/* ------------------------------------------------------------- elementwise */

static void take_row(const struct row_job *job, size_t row)
{
    const uint8_t *at = (const uint8_t *)job->table + (size_t)job->ids[row] * job->dim * num_type_bytes(job->type);
    float *out = job->out + row * job->dim;
    job->ops->to_f32(at, job->type, job->dim, out);
    for (uint32_t i = 0; i < job->dim && job->scale != 1; i++)
        out[i] = out[i] * job->scale;
}

void cpu_take_rows(struct kernels *k, const void *table, enum num_type type, uint32_t dim, const uint32_t *ids,
                   uint32_t n_rows, float scale, float *out)
{
    struct row_job job = {.row = take_row, .n_rows = n_rows, .dim = dim, .table = table, .type = type, .ids = ids};
    job.scale = scale;
    job.out = out;
    spread_rows(cpu_of(k), &job, dim);
}

static void rmsnorm_row(const struct row_job *job, size_t row)
{
    job->ops->rmsnorm(job->in + row * job->dim, job->weight, job->eps, job->dim, job->out + row * job->dim);
}

void cpu_rmsnorm(struct kernels *k, const float *x, const float *w, float eps, uint32_t n_rows, uint32_t dim, float *y)
{
    struct row_job job = {.row = rmsnorm_row, .n_rows = n_rows, .dim = dim, .in = x, .weight = w, .eps = eps, .out = y};
    spread_rows(cpu_of(k), &job, dim);
}

static void head_norm_row(const struct row_job *job, size_t row)
{
    for (uint32_t h = 0; h < job->n_heads; h++) {
        float *x = job->out + row * job->row_stride + h * job->head_stride;
        job->ops->rmsnorm(x, job->weight, job->eps, job->dim, x);
    }
}

void cpu_head_norm(struct kernels *k, float *x, size_t row_stride, uint32_t n_heads, size_t head_stride, const float *w,
                   float eps, uint32_t n_rows, uint32_t dim)
{
    struct row_job job = {.row = head_norm_row, .n_rows = n_rows, .dim = dim, .weight = w, .eps = eps, .out = x};
    job.row_stride = row_stride;
    job.n_heads = n_heads;
    job.head_stride = head_stride;
    spread_rows(cpu_of(k), &job, (size_t)n_heads * dim);
}

static void glu_row(const struct row_job *job, size_t row)
{
    const float *gate = job->in + row * 2 * job->dim;
    job->ops->glu(gate, gate + job->dim, job->dim, job->glu, job->out + row * job->dim);
}

void cpu_glu(struct kernels *k, const float *gate_up, uint32_t n_rows, uint32_t dim, const struct k_glu *glu,
             float *out)
{
    struct row_job job = {.row = glu_row, .n_rows = n_rows, .dim = dim, .in = gate_up, .glu = glu, .out = out};
    spread_rows(cpu_of(k), &job, dim);
}

struct row_numbers {
    const float *x;
    float *y, cap;
    size_t n;
};

static void add_numbers(const struct row_job *job, size_t row)
{
    const struct row_numbers *a = job->table;
    const float *x = a->x + row * NUMBERS;
    float *y = a->y + row * NUMBERS;
    for (size_t i = 0, n = numbers_left(a->n, row); i < n; i++)
        y[i] = y[i] + x[i];
}

void cpu_add(struct kernels *k, const float *x, size_t n, float *y)
{
    struct row_job job = {.row = add_numbers, .table = &(struct row_numbers){.x = x, .y = y, .n = n}};
    spread_numbers(cpu_of(k), &job, n);
}

static void softcap_numbers(const struct row_job *job, size_t row)
{
    const struct row_numbers *a = job->table;
    job->ops->softcap(a->y + row * NUMBERS, numbers_left(a->n, row), a->cap);
}

void cpu_softcap(struct kernels *k, float *x, size_t n, float cap)
{
    struct row_job job = {.row = softcap_numbers, .table = &(struct row_numbers){.y = x, .n = n, .cap = cap}};
    spread_numbers(cpu_of(k), &job, n);
}

static void copy_row(const struct row_job *job, size_t row)
{
    const struct k_each *e = job->table;
    for (uint32_t h = 0; h < job->n_heads; h++)
        memcpy(e->y + row * e->y_stride + h * e->y_step, e->x + row * e->x_stride + h * e->x_step,
               job->dim * sizeof(float));
}

void cpu_copy_heads(struct kernels *k, const struct k_each *e, uint32_t n_heads, uint32_t dim, uint32_t n_rows)
{
    struct row_job job = {.row = copy_row, .n_rows = n_rows, .dim = dim, .n_heads = n_heads, .table = e};
    spread_rows(cpu_of(k), &job, (size_t)n_heads * dim);
}

/* -------------------------------------------------------------------- rope */

static void rope_row(const struct row_job *job, size_t row)
{
    const struct k_rotary *r = job->rotary;
    uint32_t half = r->dim / 2, step = r->interleaved ? 2 : 1, apart = r->interleaved ? 1 : half;
    const float *cs = r->cos_sin + (size_t)job->ids[row] * half * 2;
    for (uint32_t h = 0; h < job->n_heads; h++) {
        float *a = job->out + row * job->row_stride + h * job->head_stride, *b = a + apart;
        for (uint32_t i = 0; i < half; i++, a += step, b += step) {
            float c = cs[2 * i], s = cs[2 * i + 1], x = *a, y = *b;
            *a = x * c - y * s;
            *b = y * c + x * s;
        }
    }
}

void cpu_rope(struct kernels *k, float *x, size_t row_stride, uint32_t n_heads, size_t head_stride,
              const struct k_rotary *r, const uint32_t *table_rows, uint32_t n_rows)
{
    struct row_job job = {.row = rope_row, .n_rows = n_rows, .rotary = r, .ids = table_rows, .out = x};
    job.row_stride = row_stride;
    job.n_heads = n_heads;
    job.head_stride = head_stride;
    spread_rows(cpu_of(k), &job, (size_t)n_heads * r->dim);
}

/* ----------------------------------------------------------------- experts */

/* Index of the largest of x[n] that is not taken; of equal ones the lowest. */
static uint32_t largest(const float *x, const bool *taken, uint32_t n)
{
    uint32_t best = UINT32_MAX;
    for (uint32_t i = 0; i < n; i++)
        if (!taken[i] && (best == UINT32_MAX || x[i] > x[best]))
            best = i;
    return best;
}

/* Marks the experts of all but the best groups as taken. */
static void leave_groups(const struct k_router *r, const float *logits, bool *taken)
{
    float best[K_MAX_EXPERTS];
    bool chosen[K_MAX_EXPERTS] = {false};
    uint32_t size = r->n_experts / r->n_groups;
    for (uint32_t g = 0; g < r->n_groups; g++) {
        best[g] = logits[g * size];
        for (uint32_t i = 1; i < size; i++)
            best[g] = scalar_max(logits[g * size + i], best[g]);
    }
    for (uint32_t i = 0; i < r->n_groups_used; i++)
        chosen[largest(best, chosen, r->n_groups)] = true;
    for (uint32_t e = 0; e < r->n_experts; e++)
        taken[e] = !chosen[e / size];
}

static void route_row(const struct row_job *job, size_t row)
{
    const struct k_router *r = job->router;
    const float *logits = job->in + row * r->n_experts;
    uint32_t *experts = job->experts + row * job->row_stride;
    float *weights = job->out + row * job->row_stride, sum = 0;
    bool taken[K_MAX_EXPERTS] = {false};
    if (r->n_groups_used < r->n_groups)
        leave_groups(r, logits, taken);
    for (uint32_t i = 0; i < r->n_used; i++) {
        experts[i] = largest(logits, taken, r->n_experts);
        taken[experts[i]] = true;
    }
    float top = logits[experts[0]];
    for (uint32_t e = 0; e < r->n_experts && !r->normalized;
         e++) /* the largest logit may be in a group that was left out */
        top = scalar_max(logits[e], top);
    for (uint32_t i = 0; i < r->n_used; i++)
        weights[i] = scalar_exp(logits[experts[i]] - top);
    if (r->normalized)
        for (uint32_t i = 0; i < r->n_used; i++)
            sum = sum + weights[i];
    else
        for (uint32_t e = 0; e < r->n_experts; e++)
            sum = sum + scalar_exp(logits[e] - top);
    for (uint32_t i = 0; i < r->n_used; i++)
        weights[i] = weights[i] / sum * r->scale;
}

void cpu_route(struct kernels *k, const struct k_router *r, const float *logits, uint32_t n_rows, uint32_t stride,
               uint32_t *experts_out, float *weights_out)
{
    struct row_job job = {.row = route_row, .n_rows = n_rows, .router = r, .in = logits, .out = weights_out};
    job.experts = experts_out;
    job.row_stride = stride;
    spread_rows(cpu_of(k), &job, 16ul * r->n_experts);
}

/* A counting sort, on the caller: there are at most some thousand pairs. */
void cpu_sort_slots(struct kernels *k, const struct k_slots *s, uint32_t n_experts, uint32_t n_rows)
{
    (void)k;
    memset(s->first, 0, (n_experts + 1ul) * sizeof(*s->first));
    for (uint32_t t = 0; t < n_rows; t++)
        for (uint32_t i = 0; i < s->n_used; i++)
            s->first[s->experts[t * s->n_slots + i] + 1]++;
    for (uint32_t e = 0; e < n_experts; e++)
        s->first[e + 1] += s->first[e];
    for (uint32_t t = 0; t < n_rows; t++)
        for (uint32_t i = 0; i < s->n_used; i++) {
            /* first[expert] moves to the end of its expert. */
            uint32_t slot = s->first[s->experts[t * s->n_slots + i]]++;
            s->slots[t * s->n_slots + i] = slot;
            s->slot_row[slot] = t;
        }
    memmove(s->first + 1, s->first, n_experts * sizeof(*s->first));
    s->first[0] = 0;
    for (uint32_t t = 0; t < n_rows && s->n_slots > s->n_used; t++) {
        s->slots[t * s->n_slots + s->n_used] = n_rows * s->n_used + t;
        s->weights[t * s->n_slots + s->n_used] = s->gate ? 1.0f / (1.0f + scalar_exp(-s->gate[t])) : 1.0f;
    }
}

static void combine_row(const struct row_job *job, size_t row)
{
    const float *weights = job->weight + row * job->n;
    const uint32_t *rows = job->ids + row * job->n;
    float *y = job->out + row * job->dim, sums[256];
    for (uint32_t first = 0; first < job->dim; first += 256) {
        uint32_t n = job->dim - first < 256 ? job->dim - first : 256;
        memset(sums, 0, sizeof(sums));
        for (uint32_t i = 0; i < job->n; i++) {
            const float *x = job->in + (size_t)rows[i] * job->dim + first;
            job->ops->axpy(weights[i], x, n, sums);
        }
        for (uint32_t d = 0; d < n; d++)
            y[first + d] = y[first + d] + sums[d];
    }
}

void cpu_combine(struct kernels *k, const float *x, uint32_t dim, const uint32_t *rows, const float *weights,
                 uint32_t n, uint32_t n_rows, float *y)
{
    struct row_job job = {.row = combine_row, .n_rows = n_rows, .dim = dim, .in = x, .weight = weights, .ids = rows};
    job.n = n;
    job.out = y;
    spread_rows(cpu_of(k), &job, (size_t)n * dim);
}
