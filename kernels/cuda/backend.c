/*
 * The CUDA backend: opening a device, and the operations that are a single launch.
 *
 * All operations are queued in one stream; only the calls named in kernels.h wait. An error of this or an
 * earlier operation ends the process, because the state of the device is then unknown.
 */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/mem.h"
#include "kernels/cuda/state.h"

#undef NDEBUG
#include <assert.h>

/* Compute capability 8.0: cp.async, and mma with bf16. */
enum { OLDEST_MAJOR = 8 };

void cuda_die(const char *operation, const char *why)
{
    fprintf(stderr, "tandem: cuda: operation=%s error=\"%s\"\n", operation, why);
    fflush(stderr);
    _exit(EXIT_FAILURE); /* no handler may wait for the device, and no core file has all pinned memory in it */
}

void cuda_must(cudaError_t error, const char *operation)
{
    if (error != cudaSuccess)
        cuda_die(operation, cudaGetErrorString(error));
}

/* Every thread has its own current device; the cached number here is the thread's, too. */
static cudaError_t select_device(int ordinal)
{
    static _Thread_local int current = -1;
    cudaError_t e = current == ordinal ? cudaSuccess : cudaSetDevice(ordinal);
    current = e == cudaSuccess ? ordinal : -1;
    return e;
}

struct cuda *cuda_select(struct kernels *k)
{
    struct cuda *c = (struct cuda *)k;
    CUDA_MUST(select_device(c->ordinal));
    return c;
}

struct cuda *cuda_enter(struct kernels *k)
{
    struct cuda *c = cuda_select(k);
    cuda_send_puts(c);
    c->rounded_before = c->rounded_now;
    c->rounded_now = (struct cuda_rounded){0};
    return c;
}

static const char *isa_name(const struct kernels *k)
{
    return ((const struct cuda *)k)->isa;
}

static uint32_t n_threads(const struct kernels *k)
{
    (void)k;
    return 1;
}

static void close_backend(struct kernels *k)
{
    struct cuda *c = cuda_enter(k);
    if (c->stream)
        CUDA_MUST(cudaStreamSynchronize(c->stream));
    cuda_replay_forget(c);
    free(c->graphs);
    cuda_product_close(c);
    cuda_collective_close(c);
    cuda_memory_close(c);
    if (c->stream)
        CUDA_MUST(cudaStreamDestroy(c->stream));
    free(c);
}

/* ------------------------------------------------------------- elementwise */

static void take_rows(struct kernels *k, const void *table, enum num_type type, uint32_t dim, const uint32_t *ids,
                      uint32_t n_rows, float scale, float *out)
{
    cuda_take_rows(cuda_enter(k)->stream, table, type, dim, ids, n_rows, scale, out);
    CUDA_MUST(cudaGetLastError());
}

static void rmsnorm(struct kernels *k, const float *x, const float *w, float eps, uint32_t n_rows, uint32_t dim,
                    float *y)
{
    struct cuda *c = cuda_enter(k);
    cuda_norm(c->stream, x, y, dim, 1, dim, w, eps, n_rows, dim, c->compute == COMPUTE_BF16,
              cuda_round_too(c, y, n_rows, dim));
    CUDA_MUST(cudaGetLastError());
}

static void head_norm(struct kernels *k, float *x, size_t row_stride, uint32_t n_heads, size_t head_stride,
                      const float *w, float eps, uint32_t n_rows, uint32_t dim)
{
    struct cuda *c = cuda_enter(k);
    cuda_norm(c->stream, x, x, row_stride, n_heads, head_stride, w, eps, n_rows, dim, c->compute == COMPUTE_BF16, NULL);
    CUDA_MUST(cudaGetLastError());
}

static void add(struct kernels *k, const float *x, size_t n, float *y)
{
    cuda_add(cuda_enter(k)->stream, x, n, y);
    CUDA_MUST(cudaGetLastError());
}

static void copy_heads(struct kernels *k, const struct k_each *e, uint32_t n_heads, uint32_t dim, uint32_t n_rows)
{
    cuda_copy_heads(cuda_enter(k)->stream, e, n_heads, dim, n_rows);
    CUDA_MUST(cudaGetLastError());
}

static void glu(struct kernels *k, const float *gate_up, uint32_t n_rows, uint32_t dim, const struct k_glu *glu,
                float *out)
{
    struct cuda *c = cuda_enter(k);
    cuda_glu(c->stream, gate_up, n_rows, dim, glu, out, cuda_round_too(c, out, n_rows, dim));
    CUDA_MUST(cudaGetLastError());
}

static void softcap(struct kernels *k, float *x, size_t n, float cap)
{
    cuda_softcap(cuda_enter(k)->stream, x, n, cap);
    CUDA_MUST(cudaGetLastError());
}

static void rope(struct kernels *k, float *x, size_t row_stride, uint32_t n_heads, size_t head_stride,
                 const struct k_rotary *r, const uint32_t *table_rows, uint32_t n_rows)
{
    cuda_rope(cuda_enter(k)->stream, x, row_stride, n_heads, head_stride, r, table_rows, n_rows);
    CUDA_MUST(cudaGetLastError());
}

/* ----------------------------------------------------------------- experts */

static void route(struct kernels *k, const struct k_router *r, const float *logits, uint32_t n_rows, uint32_t stride,
                  uint32_t *experts_out, float *weights_out)
{
    cuda_route(cuda_enter(k)->stream, r, logits, n_rows, stride, experts_out, weights_out);
    CUDA_MUST(cudaGetLastError());
}

static void sort_slots(struct kernels *k, const struct k_slots *s, uint32_t n_experts, uint32_t n_rows)
{
    cuda_sort_slots(cuda_enter(k)->stream, s, n_experts, n_rows);
    CUDA_MUST(cudaGetLastError());
}

static void combine(struct kernels *k, const float *x, uint32_t dim, const uint32_t *rows, const float *weights,
                    uint32_t n, uint32_t n_rows, float *y)
{
    cuda_combine(cuda_enter(k)->stream, x, dim, rows, weights, n, n_rows, y);
    CUDA_MUST(cudaGetLastError());
}

static void sample_rows(struct kernels *k, const float *logits, uint32_t n, uint32_t n_rows, const struct k_draw *draws,
                        struct k_sampled *out)
{
    cuda_sample_rows(cuda_enter(k)->stream, logits, n, n_rows, draws, out);
    CUDA_MUST(cudaGetLastError());
}

/* --------------------------------------------------------------- attention */

static const struct cuda_batch *batch_of(const struct cuda *c, const struct k_attn *a)
{
    assert(c->batch.host == a->seqs && c->batch.n_seqs == a->n_seqs);
    return &c->batch;
}

static void kv_store(struct kernels *k, const struct k_attn *a)
{
    struct cuda *c = cuda_enter(k);
    cuda_kv_store(c->stream, a, batch_of(c, a));
    CUDA_MUST(cudaGetLastError());
}

static void attention(struct kernels *k, const struct k_attn *a)
{
    struct cuda *c = cuda_enter(k);
    const struct cuda_batch *b = batch_of(c, a);
    if (c->compute == COMPUTE_BF16 && cuda_attention_fits(a))
        cuda_attention_fast(c->stream, a, b, c->is_hopper, cuda_scratch(c, cuda_attention_scratch(a, b, c->is_hopper)),
                            cuda_round_too(c, a->out, b->n_rows, (size_t)a->n_heads * a->v_dim));
    else
        cuda_attention_exact(c->stream, a, b);
    CUDA_MUST(cudaGetLastError());
}

/* ------------------------------------------------------------------ opening */

static const struct kernels_backend BACKEND = {
    .isa_name = isa_name,
    .n_threads = n_threads,
    .close = close_backend,
    .memory = cuda_memory,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .map = cuda_map,
    .is_pinned = cuda_is_pinned,
    .unmap = cuda_unmap,
    .put = cuda_put,
    .step = cuda_step,
    .write = cuda_write_pieces,
    .read = cuda_read,
    .finish = cuda_finish,
    .replay_rows = cuda_replay_rows,
    .replay = cuda_replay,
    .replay_end = cuda_replay_end,
    .read_aside = cuda_read_aside,
    .mark = cuda_mark,
    .passed = cuda_passed,
    .wait = cuda_wait,
    .write_aside = cuda_write_aside,
    .write_mark = cuda_write_mark,
    .written = cuda_written,
    .write_wait = cuda_write_wait,
    .matrix_pack = cuda_matrix_pack,
    .matrix_free = cuda_matrix_free,
    .matrix_bytes = cuda_matrix_bytes,
    .stack_open = cuda_stack_open,
    .stack_close = cuda_stack_close,
    .stack_bytes = cuda_stack_bytes,
    .linear = cuda_linear,
    .linear_each = cuda_linear_each,
    .linear_sorted = cuda_linear_sorted,
    .take_rows = take_rows,
    .rmsnorm = rmsnorm,
    .head_norm = head_norm,
    .add = add,
    .copy_heads = copy_heads,
    .glu = glu,
    .softcap = softcap,
    .rope = rope,
    .route = route,
    .sort_slots = sort_slots,
    .combine = combine,
    .sample_rows = sample_rows,
    .offer = cuda_offer,
    .follow = cuda_follow,
    .reach = cuda_reach,
    .links_open = cuda_links_open,
    .links_close = cuda_links_close,
    .links_gather = cuda_links_gather,
    .put_seqs = cuda_put_seqs,
    .kv_store = kv_store,
    .attention = attention,
    .run_limit = cuda_run_limit,
#ifdef CUPTI_PATH
    .trace_begin = cuda_trace_begin,
    .trace_end = cuda_trace_end,
#endif
};

static enum td_status check_device(const struct kernels_config *config, int *major_out, int *minor_out,
                                   struct td_error *error_out)
{
    int n = 0, ordinal = (int)config->ordinal;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess || !n)
        return td_fail(error_out, TD_ERR_UNSUPPORTED, "no CUDA device: %s", cudaGetErrorString(e));
    if (config->ordinal >= (uint32_t)n)
        return td_fail(error_out, TD_ERR_INVALID, "kernels.ordinal: %u is not in 0..%d", config->ordinal, n - 1);
    if ((e = cudaDeviceGetAttribute(major_out, cudaDevAttrComputeCapabilityMajor, ordinal)) != cudaSuccess ||
        (e = cudaDeviceGetAttribute(minor_out, cudaDevAttrComputeCapabilityMinor, ordinal)) != cudaSuccess ||
        (e = select_device(ordinal)) != cudaSuccess)
        return td_fail(error_out, TD_ERR_UNSUPPORTED, "CUDA device %d: %s", ordinal, cudaGetErrorString(e));
    if (*major_out < OLDEST_MAJOR)
        return td_fail(error_out, TD_ERR_UNSUPPORTED, "CUDA device %d: compute capability %d.%d, needed is %d.0",
                       ordinal, *major_out, *minor_out, OLDEST_MAJOR);
    return TD_OK;
}

static enum td_status fill(struct cuda *c, struct td_error *error_out)
{
    cudaError_t e = cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking);
    if (e != cudaSuccess)
        return td_fail(error_out, TD_ERR_DEVICE, "CUDA device %d: %s", c->ordinal, cudaGetErrorString(e));
    cuda_collective_open(c);
    enum td_status s = cuda_memory_open(c, error_out);
    return s ? s : cuda_product_open(c, error_out);
}

/* The symbol KERNELS_PLUGIN, the only one that plugin.map exports. */
enum td_status tandem_kernels_open(uint32_t abi, const struct kernels_config *config, struct kernels **out,
                                   struct td_error *error_out);

enum td_status tandem_kernels_open(uint32_t abi, const struct kernels_config *config, struct kernels **out,
                                   struct td_error *error_out)
{
    if (abi != KERNELS_ABI)
        return td_fail(error_out, TD_ERR_VERSION, "device cuda: the plugin has interface %d, this program %u",
                       KERNELS_ABI, abi);
    enum compute compute = config->compute ? config->compute : COMPUTE_F32;
    if (compute != COMPUTE_F32 && compute != COMPUTE_BF16)
        return td_fail(error_out, TD_ERR_INVALID, "kernels.compute: %d is unknown", (int)compute);
    int major = 0, minor = 0;
    enum td_status s = check_device(config, &major, &minor, error_out);
    if (s)
        return s;
    struct cuda *c = mem_zalloc(sizeof(*c));
    c->base.backend = &BACKEND;
    c->ordinal = (int)config->ordinal;
    c->compute = compute;
    c->any_order = config->any_order;
    snprintf(c->isa, sizeof(c->isa), "sm_%d%d", major, minor);
    s = fill(c, error_out);
    if (c->is_hopper)
        snprintf(c->isa, sizeof(c->isa), "sm_90a");
    if (s) {
        close_backend(&c->base);
        return s;
    }
    *out = &c->base;
    return TD_OK;
}
