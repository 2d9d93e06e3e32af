/*
 * Products: chooses the order of summation, and the code that computes.
 *
 * COMPUTE_BF16 first rounds its rows into scratch, unless the operation before has done so. Then our own
 * product computes, by Hopper's own instructions on such a device; a row has the same bits in any batch.
 * If the backend was opened with any_order, cuBLAS computes where there are many rows. Its algorithm is
 * looked up once for each shape and power of two of rows. Algorithms that split k over CTAs are left out,
 * because two runs of them may differ.
 */
#include <stdlib.h>

#include "base/mem.h"
#include "kernels/cuda/state.h"

enum {
    WORKSPACE_BYTES = 32 << 20,
    BLAS_MIN_ROWS = 65,  /* fewer rows only read the weights, which our own products do as fast */
    WIDEN_MIN_ROWS = 65, /* from here on a packed matrix is widened as a whole; fewer rows stream its codes */
    BLAS_ALIGN = 16,     /* alignment in bytes of all operands */
};

struct cuda_plan {
    uint32_t n_out, stride;
    uint32_t max_rows; /* a power of two */
    bool usable;
    cublasLtMatmulAlgo_t algo;
};

static enum td_status blas_open(struct cuda *c, struct td_error *error_out)
{
    cublasStatus_t s = cublasLtCreate(&c->blas);
    if (s != CUBLAS_STATUS_SUCCESS)
        return td_fail(error_out, TD_ERR_DEVICE, "device cuda: cuBLAS: %s", cublasLtGetStatusString(s));
    if (cuda_alloc(&c->base, WORKSPACE_BYTES, &c->workspace))
        return td_fail(error_out, TD_ERR_NO_MEMORY, "device cuda: no memory for cuBLAS");
    return TD_OK;
}

enum td_status cuda_product_open(struct cuda *c, struct td_error *error_out)
{
    cudaError_t e = cuda_linear_open();
    if (e == cudaSuccess)
        e = cuda_packed_open();
    if (e != cudaSuccess)
        return td_fail(error_out, TD_ERR_UNSUPPORTED, "device cuda: no kernels for this device: %s",
                       cudaGetErrorString(e));
    e = cuda_linear_hopper_open(&c->is_hopper);
    if (e != cudaSuccess)
        return td_fail(error_out, TD_ERR_UNSUPPORTED, "device cuda: no kernels for Hopper: %s", cudaGetErrorString(e));
    c->is_hopper = c->is_hopper && cuda_map_open(c);
    return c->any_order ? blas_open(c, error_out) : TD_OK;
}

void cuda_product_close(struct cuda *c)
{
    if (c->blas)
        cublasLtDestroy(c->blas);
    CUDA_MUST(cudaFree(c->workspace));
    free(c->plans);
}

/* y^T [n_out][T] = W x^T, as cuBLAS sees it: column-major, with W transposed. */
struct blas_shape {
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t w, x, y;
};

static void blas_must(cublasStatus_t s)
{
    if (s != CUBLAS_STATUS_SUCCESS)
        cuda_die("cuBLAS", cublasLtGetStatusString(s));
}

static void blas_shape_init(struct blas_shape *b, const struct cuda_matrix *m, uint32_t n_rows)
{
    cublasOperation_t transposed = CUBLAS_OP_T;
    blas_must(cublasLtMatmulDescInit(&b->product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    blas_must(
        cublasLtMatmulDescSetAttribute(&b->product, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed)));
    blas_must(cublasLtMatrixLayoutInit(&b->w, CUDA_R_16BF, m->stride, m->n_out, m->stride));
    blas_must(cublasLtMatrixLayoutInit(&b->x, CUDA_R_16BF, m->stride, n_rows, m->stride));
    blas_must(cublasLtMatrixLayoutInit(&b->y, CUDA_R_32F, m->n_out, n_rows, m->n_out));
}

static void prefer(cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t what, uint32_t value)
{
    blas_must(cublasLtMatmulPreferenceSetAttribute(p, what, &value, sizeof(value)));
}

static void plan_choose(struct cuda *c, const struct cuda_matrix *m, struct cuda_plan *plan)
{
    struct blas_shape b;
    blas_shape_init(&b, m, plan->max_rows);
    cublasLtMatmulPreferenceOpaque_t preference;
    blas_must(cublasLtMatmulPreferenceInit(&preference));
    uint64_t workspace_bytes = WORKSPACE_BYTES;
    blas_must(cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                   &workspace_bytes, sizeof(workspace_bytes)));
    prefer(&preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, CUBLASLT_REDUCTION_SCHEME_NONE);
    prefer(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, BLAS_ALIGN);
    prefer(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, BLAS_ALIGN);
    prefer(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, BLAS_ALIGN);
    prefer(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, BLAS_ALIGN);
    cublasLtMatmulHeuristicResult_t best;
    int n_found = 0;
    cublasStatus_t s =
        cublasLtMatmulAlgoGetHeuristic(c->blas, &b.product, &b.w, &b.x, &b.y, &b.y, &preference, 1, &best, &n_found);
    plan->usable = s == CUBLAS_STATUS_SUCCESS && n_found && best.state == CUBLAS_STATUS_SUCCESS;
    if (plan->usable)
        plan->algo = best.algo;
}

static const struct cuda_plan *plan_of(struct cuda *c, const struct cuda_matrix *m, uint32_t n_rows)
{
    struct cuda_plan want = {.n_out = m->n_out, .stride = m->stride, .max_rows = BLAS_MIN_ROWS - 1};
    while (want.max_rows < n_rows)
        want.max_rows *= 2;
    for (uint32_t i = 0; i < c->n_plans; i++) {
        const struct cuda_plan *p = &c->plans[i];
        if (p->n_out == want.n_out && p->stride == want.stride && p->max_rows == want.max_rows)
            return p;
    }
    plan_choose(c, m, &want);
    c->plans = mem_resize(c->plans, c->n_plans + 1, sizeof(*c->plans));
    c->plans[c->n_plans] = want;
    return &c->plans[c->n_plans++];
}

bool cuda_product_blas(struct cuda *c, const struct cuda_matrix *m, const struct cuda_product *p)
{
    struct td_error error;
    if (!c->blas && blas_open(c, &error))
        cuda_die(__func__, error.text);
    if ((uintptr_t)p->y % BLAS_ALIGN)
        return false;
    const struct cuda_plan *plan = plan_of(c, m, p->n_rows);
    if (!plan->usable)
        return false;
    struct blas_shape b;
    blas_shape_init(&b, m, p->n_rows);
    float one = 1, beta = p->accumulate ? 1 : 0;
    cublasStatus_t s = cublasLtMatmul(c->blas, &b.product, &one, m->data, &b.w, p->x, &b.x, &beta, p->y, &b.y, p->y,
                                      &b.y, &plan->algo, c->workspace, WORKSPACE_BYTES, c->stream);
    if (s == CUBLAS_STATUS_NOT_SUPPORTED || s == CUBLAS_STATUS_INVALID_VALUE)
        return false;
    blas_must(s);
    if (m->bias)
        cuda_add_bias(c->stream, m->bias, m->n_out, p->n_rows, p->y, p->y_stride);
    return true;
}

/* Whether the operation before has rounded p's rows, and as the matrix needs them. */
static bool are_rounded(const struct cuda *c, const struct cuda_matrix *m, uint32_t n_parts,
                        const struct cuda_product *p)
{
    const struct cuda_rounded *r = &c->rounded_before;
    return r->rows && r->rows == p->x && r->n_rows >= p->n_rows && n_parts == 1 && r->n == m->n_in &&
           r->n == m->stride && r->n == p->x_stride;
}

/*
 * Rounds n_parts parts of each row, x_step apart, to bf16 in scratch: [n_rows][n_parts][stride], behind
 * before_bytes that the caller uses. Updates p.
 */
static void round_rows_after(struct cuda *c, const struct cuda_matrix *m, size_t before_bytes, size_t x_step,
                             uint32_t n_parts, struct cuda_product *p)
{
    if (are_rounded(c, m, n_parts, p)) {
        cuda_scratch(c, before_bytes);
        p->x = c->rounded.at;
        return;
    }
    size_t x_stride = (size_t)n_parts * m->stride;
    uint8_t *to = cuda_scratch(c, before_bytes + p->n_rows * x_stride * sizeof(uint16_t));
    to += before_bytes;
    cuda_round_rows(c->stream, p->x, p->x_stride, x_step, n_parts, m->n_in, p->n_rows, to, m->stride);
    p->x = to;
    p->x_stride = x_stride;
}

static void round_rows(struct cuda *c, const struct cuda_matrix *m, size_t x_step, uint32_t n_parts,
                       struct cuda_product *p)
{
    round_rows_after(c, m, 0, x_step, n_parts, p);
}

/* The map of rounded rows, for the tiles of a shape. */
static struct cuda_map map_of(struct cuda *c, const struct cuda_matrix *m, uint32_t n_parts,
                              const struct cuda_product *p, uint32_t shape)
{
    const struct cuda_mapped rows = {p->x, m->stride, n_parts, p->n_rows, p->x_stride};
    struct cuda_tile t = cuda_hopper_tile(shape);
    struct cuda_map map = {{0}};
    if (p->n_rows)
        cuda_map_rows(c, &rows, t.rows, t.slabs, &map);
    return map;
}

/* Rows that are rounded, by Hopper's own products. */
static void linear_hopper(struct cuda *c, const struct cuda_matrix *m, struct cuda_product *p)
{
    uint32_t shape = cuda_hopper_choose(m, 1, p->n_rows, false);
    const struct cuda_map x = map_of(c, m, 1, p, shape);
    cuda_linear_hopper(c->stream, m, p, shape, &x);
}

static void linear_fast(struct cuda *c, const struct cuda_matrix *m, struct cuda_product *p)
{
    round_rows(c, m, 0, 1, p);
    if (c->any_order && p->n_rows >= BLAS_MIN_ROWS && cuda_product_blas(c, m, p))
        return;
    if (c->is_hopper)
        linear_hopper(c, m, p);
    else
        cuda_linear_fast(c->stream, m, p);
}

/*
 * A matrix in a packed format. Hopper's kernels widen its codes on the way. Elsewhere few rows stream codes,
 * and for many rows it is widened into scratch; both multiply by mma.sync. With any_order cuBLAS may multiply
 * many rows.
 */
static void linear_packed(struct cuda *c, const struct cuda_matrix *m, struct cuda_product *p)
{
    struct cuda_matrix wide = *m;
    if (c->is_hopper && !(c->any_order && p->n_rows >= BLAS_MIN_ROWS)) {
        round_rows(c, m, 0, 1, p);
        linear_hopper(c, m, p);
        return;
    }
    if (p->n_rows < WIDEN_MIN_ROWS) {
        round_rows_after(c, m, 0, 0, 1, p);
        cuda_packed_fast(c->stream, m, p);
        return;
    }
    round_rows_after(c, m, (size_t)m->n_out * m->stride * sizeof(uint16_t), 0, 1, p);
    wide.data = c->scratch.at;
    wide.weights = WEIGHTS_AS_STORED;
    cuda_widen(c->stream, m, c->scratch.at);
    if (!c->any_order || p->n_rows < BLAS_MIN_ROWS || !cuda_product_blas(c, &wide, p))
        cuda_linear_fast(c->stream, &wide, p);
}

void cuda_linear(struct kernels *k, const struct k_matrix *w, const float *x, uint32_t n_rows, float *y,
                 bool accumulate)
{
    struct cuda *c = cuda_enter(k);
    const struct cuda_matrix *m = &w->on;
    struct cuda_product p = {
        .x = x, .y = y, .x_stride = m->n_in, .y_stride = m->n_out, .n_rows = n_rows, .accumulate = accumulate};
    if (m->compute == COMPUTE_F32)
        cuda_linear_exact(c->stream, m, &p);
    else if (m->weights)
        linear_packed(c, m, &p);
    else
        linear_fast(c, m, &p);
    CUDA_MUST(cudaGetLastError());
}

static void each_fast(struct cuda *c, const struct cuda_stack *s, const struct k_each *e, struct cuda_product *p)
{
    round_rows(c, s->shape, e->x_step, s->n, p);
    if (c->is_hopper) {
        uint32_t shape = cuda_hopper_choose(s->shape, s->n, p->n_rows, false);
        const struct cuda_map x = map_of(c, s->shape, s->n, p, shape);
        cuda_each_hopper(c->stream, s, p, shape, &x, e->y_step);
    } else if (s->shape->weights) {
        cuda_packed_each_fast(c->stream, s, p, s->shape->stride, e->y_step);
    } else {
        cuda_each_fast(c->stream, s, p, s->shape->stride, e->y_step);
    }
}

void cuda_linear_each(struct kernels *k, const struct k_stack *s, const struct k_each *e, uint32_t n_rows)
{
    struct cuda *c = cuda_enter(k);
    struct cuda_product p = {.x = e->x, .y = e->y, .x_stride = e->x_stride, .y_stride = e->y_stride, .n_rows = n_rows};
    if (s->on.shape->compute == COMPUTE_F32)
        cuda_each_exact(c->stream, &s->on, &p, e->x_step, e->y_step);
    else
        each_fast(c, &s->on, e, &p);
    CUDA_MUST(cudaGetLastError());
}

static void sorted_fast(struct cuda *c, const struct cuda_stack *s, const uint32_t *first, struct cuda_product *p)
{
    round_rows(c, s->shape, 0, 1, p);
    if (c->is_hopper) {
        uint32_t shape = cuda_hopper_choose(s->shape, s->n, p->n_rows, true);
        const struct cuda_map x = map_of(c, s->shape, 1, p, shape);
        cuda_sorted_hopper(c->stream, s, p, shape, &x, first);
    } else if (s->shape->weights) {
        cuda_packed_sorted_fast(c->stream, s, p, first);
    } else {
        cuda_sorted_fast(c->stream, s, p, first);
    }
}

void cuda_linear_sorted(struct kernels *k, const struct k_stack *s, const uint32_t *first, uint32_t n_rows,
                        const float *x, float *y)
{
    struct cuda *c = cuda_enter(k);
    const struct cuda_matrix *m = s->on.shape;
    struct cuda_product p = {.x = x, .y = y, .x_stride = m->n_in, .y_stride = m->n_out, .n_rows = n_rows};
    if (m->compute == COMPUTE_F32)
        cuda_sorted_exact(c->stream, &s->on, &p, first);
    else
        sorted_fast(c, &s->on, first, &p);
    CUDA_MUST(cudaGetLastError());
}
