/* Attention over paged KV: storing, and the exact form, which has the CPU's bits. */
#include "kernels/cuda/attention.cuh"
#include "kernels/scalar.h"

#undef NDEBUG
#include <assert.h>

static constexpr uint32_t LANES = 16, KEY_BLOCK = 32; /* as in kernels/cpu/cpu.h */

/* ------------------------------------------------------------------- store */

static constexpr uint32_t STORE_THREADS = 128;

template <enum num_type TYPE> static __device__ __forceinline__ uint16_t narrowed(float f, uint16_t *)
{
    return TYPE == NUM_BF16 ? scalar_to_bf16(f) : scalar_to_f16(f);
}

template <enum num_type TYPE> static __device__ __forceinline__ uint8_t narrowed(float f, uint8_t *)
{
    return scalar_to_e4m3(f);
}

template <enum num_type TYPE> static __device__ __forceinline__ float narrowed(float f, float *)
{
    return f;
}

template <enum num_type TYPE, class T, int N> static __device__ __forceinline__ void store_as(const float *x, T *to)
{
    pack<float, N> v = load<N>(x);
    pack<T, N> h;
    for (int j = 0; j < N; j++)
        h.at[j] = narrowed<TYPE>(v.at[j], (T *)0);
    store(to, h);
}

/* blockIdx.x is a row. A thread stores N numbers of K and of V. */
template <enum num_type TYPE, class T, int N> static __global__ void store_rows(struct attention t)
{
    begin_kernel();
    uint32_t i = (blockIdx.y * STORE_THREADS + threadIdx.x) * N;
    if (i >= t.n_kv_heads * t.head_dim)
        return;
    const struct cuda_seq s = t.seqs[t.row_seq[blockIdx.x]];
    uint8_t *key = key_at(t, s, i / t.head_dim, s.first_pos + blockIdx.x - s.first_row);
    store_as<TYPE, T, N>(t.k + blockIdx.x * t.kv_stride + i, (T *)key + i % t.head_dim);
    if (t.plane_bytes)
        store_as<TYPE, T, N>(t.v + blockIdx.x * t.kv_stride + i, (T *)(key + t.plane_bytes) + i % t.head_dim);
}

void cuda_kv_store(cudaStream_t stream, const struct k_attn *a, const struct cuda_batch *b)
{
    const struct attention t = describe(a, b);
    if (!b->n_rows)
        return;
    bool four = by_four(a->k, a->kv_stride, t.head_dim) && by_four(a->v, 0, 0);
    auto *kernel = four ? store_rows<NUM_F32, float, 4> : store_rows<NUM_F32, float, 1>;
    if (a->layout->dtype == NUM_F16)
        kernel = four ? store_rows<NUM_F16, uint16_t, 4> : store_rows<NUM_F16, uint16_t, 1>;
    if (a->layout->dtype == NUM_BF16)
        kernel = four ? store_rows<NUM_BF16, uint16_t, 4> : store_rows<NUM_BF16, uint16_t, 1>;
    if (a->layout->dtype == NUM_F8_E4M3)
        kernel = four ? store_rows<NUM_F8_E4M3, uint8_t, 4> : store_rows<NUM_F8_E4M3, uint8_t, 1>;
    size_t n = (size_t)t.n_kv_heads * t.head_dim / (four ? 4 : 1);
    launch_next(stream, kernel, dim3(b->n_rows, pieces(n, STORE_THREADS)), STORE_THREADS, 0, t);
}

/* ------------------------------------------------------------------- exact */

template <enum num_type TYPE> static __device__ __forceinline__ float widened(const void *x, uint32_t i)
{
    return scalar_from(x, TYPE == NUM_F32 ? 4 : TYPE == NUM_F8_E4M3 ? 1 : 2, TYPE == NUM_BF16, i);
}

/* Each step adds or compares halves onto each other. Every lane gets the result. */
static __device__ __forceinline__ float tree_sum(float x, uint32_t mask, uint32_t lanes)
{
    for (uint32_t half = lanes / 2; half; half /= 2)
        x = x + __shfl_xor_sync(mask, x, half);
    return x;
}

static __device__ __forceinline__ float warp_max(float x)
{
    for (uint32_t half = WARP / 2; half; half /= 2)
        x = scalar_max(__shfl_xor_sync(ALL, x, half), x);
    return x;
}

/*
 * Scores of keys first .. n - 1 of the block: 16 threads for each key, as the specified dot product has 16
 * partial sums. Lane j has the K of key j.
 */
template <enum num_type TYPE>
static __device__ __forceinline__ void exact_scores(const struct attention &t, const float *q, const uint8_t *key,
                                                    uint32_t first, uint32_t n, float *scores)
{
    uint32_t lane = threadIdx.x % LANES, half = threadIdx.x / LANES, halves = blockDim.x / LANES;
    for (uint32_t j = half; j < KEY_BLOCK; j += halves) {
        const uint8_t *k = shuffle_pointer(key, j);
        if (j < first || j >= n)
            continue;
        float sum = 0;
#pragma unroll 8
        for (uint32_t i = lane; i < t.head_dim; i += LANES)
            sum = scalar_fma(q[i], widened<TYPE>(k, i), sum);
        sum = tree_sum(sum, 0xffffu << (half % 2 * LANES), LANES) * t.scale;
        if (lane == 0)
            scores[j] = t.cap > 0 ? scalar_softcap(sum, t.cap) : sum;
    }
}

/*
 * A block of threads computes one query; a thread computes one number of the output. Every warp does the
 * softmax of a block of keys for itself, lane j for key j; the 16 partial sums of the weights and their tree
 * are one tree over 32 lanes. Scores use two places in turn, so one barrier for each block of keys is enough.
 */
template <enum num_type TYPE> static __global__ void __launch_bounds__(1024) attend_exact(struct attention t)
{
    begin_kernel();
    float *q = dynamic_shared<float>();
    __shared__ float scores[2][KEY_BLOCK];
    uint32_t row = blockIdx.x / t.n_heads, head = blockIdx.x % t.n_heads, lane = threadIdx.x % WARP, d = threadIdx.x;
    const struct cuda_seq s = t.seqs[t.row_seq[row]];
    uint32_t pos = s.first_pos + row - s.first_row, begin = first_key(pos, t.window);
    float m = t.sinks ? t.sinks[head] : NEVER, l = t.sinks ? 1 : 0, out = 0;
    for (uint32_t i = threadIdx.x; i < t.head_dim; i += blockDim.x)
        q[i] = t.q[row * t.q_stride + head * t.head_dim + i];
    __syncthreads();
    for (uint32_t block = begin / KEY_BLOCK * KEY_BLOCK; block <= pos; block += KEY_BLOCK) {
        uint32_t n = min(pos + 1 - block, KEY_BLOCK), first = begin > block ? begin - block : 0;
        bool seen = lane >= first && lane < n;
        const uint8_t *key = seen ? key_at(t, s, head / t.group, block + lane) : 0;
        float *place = scores[block / KEY_BLOCK % 2];
        exact_scores<TYPE>(t, q, key, first, n, place);
        __syncthreads();
        float score = seen ? place[lane] : NEVER, m_new = scalar_max(warp_max(scalar_max(score, NEVER)), m);
        float shrink = scalar_exp(m - m_new), p = seen ? scalar_exp(score - m_new) : 0;
        l = scalar_fma(l, shrink, tree_sum(p, ALL, WARP));
        m = m_new;
        out = out * shrink;
#pragma unroll 4
        for (uint32_t j = first; j < n; j++) {
            float weight = __shfl_sync(ALL, p, j);
            const uint8_t *v = shuffle_pointer(key, j) + t.plane_bytes;
            if (d < t.v_dim)
                out = scalar_fma(weight, widened<TYPE>(v, d), out);
        }
    }
    if (d < t.v_dim)
        t.out[(size_t)blockIdx.x * t.v_dim + d] = out * (1.0f / l);
}

void cuda_attention_exact(cudaStream_t stream, const struct k_attn *a, const struct cuda_batch *b)
{
    const struct attention t = describe(a, b);
    uint32_t threads = a->v_dim < 128 ? 128 : pieces(a->v_dim, WARP) * WARP;
    assert(threads <= 1024);
    if (!b->n_rows)
        return;
    auto *kernel = attend_exact<NUM_F32>;
    if (a->layout->dtype == NUM_F16)
        kernel = attend_exact<NUM_F16>;
    if (a->layout->dtype == NUM_BF16)
        kernel = attend_exact<NUM_BF16>;
    if (a->layout->dtype == NUM_F8_E4M3)
        kernel = attend_exact<NUM_F8_E4M3>;
    launch_next(stream, kernel, b->n_rows * a->n_heads, threads, t.head_dim * sizeof(float), t);
}
