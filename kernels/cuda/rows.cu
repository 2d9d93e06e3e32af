/*
 * Operations that compute every row (or number) by itself, and the sorting of rows by expert.
 *
 * All of it is exact, except fast norms: the same expressions as in kernels/cpu/plain.c and rows.c, and sums
 * in the same order. Such kernels wait for memory. So threads access four numbers (16 bytes) at once where
 * addresses and strides allow it, and single numbers elsewhere; that changes no bit.
 */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/scalar.h"

#undef NDEBUG
#include <assert.h>

static constexpr uint32_t THREADS = 256, WARP = 32, ALL = 0xffffffff, NONE = 0xffffffff;
static constexpr uint32_t LANES = 16; /* partial sums of a dot product, as in kernels/cpu/cpu.h */
/* Up to this length 16 threads sum a norm, straight from memory. */
static constexpr uint32_t SHORT_ROW = 512;
static constexpr uint32_t NORM_CHUNK = 8192; /* numbers of a longer row that are in shared memory at a time */
/* Shared memory of the sort: 48 KiB, which every device gives by default. */
static constexpr uint32_t SORT_WORDS = 12288;
static constexpr uint32_t SORT_AHEAD = 4; /* loads of 32 pairs in flight */
static constexpr uint32_t ROUTE_WARPS = 4;

/* blockIdx.x is a row; its units are divided over y and threads. unit() is the number of a thread's unit. */
static dim3 row_grid(uint32_t n_rows, size_t n_units)
{
    return dim3(n_rows, pieces(n_units, THREADS));
}

static __device__ __forceinline__ uint32_t unit(void)
{
    return blockIdx.y * THREADS + threadIdx.x;
}

/* ------------------------------------------------------------- elementwise */

template <enum num_type TYPE> static __device__ __forceinline__ float widen(uint16_t h)
{
    return TYPE == NUM_BF16 ? scalar_from_bf16(h) : scalar_from_f16(h);
}

template <enum num_type TYPE> static __device__ __forceinline__ float widen(float f)
{
    return f;
}

template <enum num_type TYPE, class T, int N>
static __global__ void take_rows(const void *table, uint32_t dim, const uint32_t *ids, float scale, float *out)
{
    begin_kernel();
    uint32_t i = unit() * N;
    if (i >= dim)
        return;
    const T *from = (const T *)table + (size_t)ids[blockIdx.x] * dim + i;
    pack<T, N> in = load<N>(from);
    pack<float, N> v;
    for (int j = 0; j < N; j++)
        v.at[j] = widen<TYPE>(in.at[j]) * scale;
    store(out + (size_t)blockIdx.x * dim + i, v);
}

void cuda_take_rows(cudaStream_t stream, const void *table, enum num_type type, uint32_t dim, const uint32_t *ids,
                    uint32_t n_rows, float scale, float *out)
{
    if (!n_rows)
        return;
    bool four = by_four(table, dim, dim) && by_four(out, dim, dim);
    auto *kernel = four ? take_rows<NUM_F32, float, 4> : take_rows<NUM_F32, float, 1>;
    if (type == NUM_F16)
        kernel = four ? take_rows<NUM_F16, uint16_t, 4> : take_rows<NUM_F16, uint16_t, 1>;
    if (type == NUM_BF16)
        kernel = four ? take_rows<NUM_BF16, uint16_t, 4> : take_rows<NUM_BF16, uint16_t, 1>;
    launch_next(stream, kernel, row_grid(n_rows, four ? dim / 4 : dim), THREADS, 0, table, dim, ids, scale, out);
}

template <int N> static __global__ void add_numbers(const float *x, size_t n, float *y)
{
    begin_kernel();
    size_t i = ((size_t)blockIdx.x * THREADS + threadIdx.x) * N;
    if (i >= n)
        return;
    pack<float, N> a = load<N>(x + i), b = load<N>(y + i);
    for (int j = 0; j < N; j++)
        b.at[j] = b.at[j] + a.at[j];
    store(y + i, b);
}

void cuda_add(cudaStream_t stream, const float *x, size_t n, float *y)
{
    if (!n)
        return;
    bool four = by_four(x, n, n) && by_four(y, n, n);
    auto *kernel = four ? add_numbers<4> : add_numbers<1>;
    launch_next(stream, kernel, pieces(four ? n / 4 : n, THREADS), THREADS, 0, x, n, y);
}

template <int N> static __global__ void softcap_numbers(float *x, size_t n, float cap)
{
    begin_kernel();
    size_t i = ((size_t)blockIdx.x * THREADS + threadIdx.x) * N;
    if (i >= n)
        return;
    pack<float, N> v = load<N>(x + i);
    for (int j = 0; j < N; j++)
        v.at[j] = scalar_softcap(v.at[j], cap);
    store(x + i, v);
}

void cuda_softcap(cudaStream_t stream, float *x, size_t n, float cap)
{
    if (!n)
        return;
    bool four = by_four(x, n, n);
    auto *kernel = four ? softcap_numbers<4> : softcap_numbers<1>;
    launch_next(stream, kernel, pieces(four ? n / 4 : n, THREADS), THREADS, 0, x, n, cap);
}

template <int N> static __global__ void copy_heads(struct k_each e, uint32_t n_heads, uint32_t dim)
{
    begin_kernel();
    uint32_t a_head = dim / N, h = unit() / a_head, i = unit() % a_head * N;
    if (h < n_heads)
        store(e.y + blockIdx.x * e.y_stride + h * e.y_step + i,
              load<N>(e.x + blockIdx.x * e.x_stride + h * e.x_step + i));
}

void cuda_copy_heads(cudaStream_t stream, const struct k_each *e, uint32_t n_heads, uint32_t dim, uint32_t n_rows)
{
    if (!n_rows || !n_heads || !dim)
        return;
    bool four = by_four(e->x, e->x_stride, e->x_step) && by_four(e->y, e->y_stride, e->y_step) && dim % 4 == 0;
    auto *kernel = four ? copy_heads<4> : copy_heads<1>;
    launch_next(stream, kernel, row_grid(n_rows, (size_t)n_heads * dim / (four ? 4 : 1)), THREADS, 0, *e, n_heads, dim);
}

static __device__ __forceinline__ float gated(const struct k_glu &glu, float g, float u)
{
    if (glu.act == ACT_CLAMPED)
        return scalar_clamped(g, u, glu.alpha, glu.limit);
    if (glu.act == ACT_GELU_TANH)
        return scalar_gelu(g) * u;
    return scalar_swish(g, g) * u;
}

template <int N>
static __global__ void glu_rows(const float *gate_up, uint32_t dim, struct k_glu glu, float *out, uint16_t *rounded)
{
    begin_kernel();
    uint32_t i = unit() * N;
    if (i >= dim)
        return;
    const float *gate = gate_up + (size_t)blockIdx.x * 2 * dim + i;
    pack<float, N> g = load<N>(gate), u = load<N>(gate + dim);
    for (int j = 0; j < N; j++)
        g.at[j] = gated(glu, g.at[j], u.at[j]);
    size_t at = (size_t)blockIdx.x * dim + i;
    store(out + at, g);
    if (rounded)
        store_rounded(rounded + at, g);
}

void cuda_glu(cudaStream_t stream, const float *gate_up, uint32_t n_rows, uint32_t dim, const struct k_glu *glu,
              float *out, void *rounded)
{
    if (!n_rows)
        return;
    bool four = by_four(gate_up, dim, dim) && by_four(out, dim, dim);
    auto *kernel = four ? glu_rows<4> : glu_rows<1>;
    launch_next(stream, kernel, row_grid(n_rows, four ? dim / 4 : dim), THREADS, 0, gate_up, dim, *glu, out,
                (uint16_t *)rounded);
}

/* One pair for each thread. */
static __global__ void rope_rows(float *x, size_t row_stride, uint32_t n_heads, size_t head_stride, struct k_rotary r,
                                 const uint32_t *table_rows)
{
    begin_kernel();
    uint32_t half = r.dim / 2, h = unit() / half, i = unit() % half;
    if (h >= n_heads)
        return;
    const float *cs = r.cos_sin + ((size_t)table_rows[blockIdx.x] * half + i) * 2;
    float *a = x + blockIdx.x * row_stride + h * head_stride + (r.interleaved ? 2 * i : i);
    float *b = a + (r.interleaved ? 1 : half), c = cs[0], s = cs[1], u = *a, v = *b;
    *a = u * c - v * s;
    *b = v * c + u * s;
}

void cuda_rope(cudaStream_t stream, float *x, size_t row_stride, uint32_t n_heads, size_t head_stride,
               const struct k_rotary *r, const uint32_t *table_rows, uint32_t n_rows)
{
    size_t n_pairs = (size_t)n_heads * (r->dim / 2);
    if (n_rows && n_pairs)
        launch_next(stream, rope_rows, row_grid(n_rows, n_pairs), THREADS, 0, x, row_stride, n_heads, head_stride, *r,
                    table_rows);
}

/* ------------------------------------------------------------------- norms */

struct norm {
    const float *x;
    float *y; /* may be x */
    const float *w;
    size_t row_stride, head_stride;
    uint32_t n_heads, dim;
    float eps;
    uint16_t *rounded; /* [rows][dim]; NULL: not wanted */
};

static __device__ __forceinline__ size_t norm_at(const struct norm &n, uint32_t i)
{
    return i / n.n_heads * n.row_stride + i % n.n_heads * n.head_stride;
}

static __device__ __forceinline__ float norm_factor(const struct norm &n, float sum)
{
    return 1.0f / __fsqrt_rn(sum / (float)n.dim + n.eps);
}

/* The specified tree over 16 partial sums, one in each lane. Every lane gets the result. */
static __device__ __forceinline__ float lanes_tree(float sum, uint32_t mask)
{
    for (uint32_t half = LANES / 2; half; half /= 2)
        sum = sum + __shfl_xor_sync(mask, sum, half, LANES);
    return sum;
}

/* Short rows: 16 threads for each, which read 64 bytes at a time. */
static __global__ void norm_short(struct norm n, uint32_t n_all)
{
    begin_kernel();
    uint32_t at = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    if (at >= n_all)
        return;
    const float *x = n.x + norm_at(n, at);
    float *y = n.y + norm_at(n, at), sum = 0;
#pragma unroll 8
    for (uint32_t i = lane; i < n.dim; i += LANES)
        sum = scalar_fma(x[i], x[i], sum);
    float r = norm_factor(n, lanes_tree(sum, 0xffffu << (threadIdx.x % WARP / LANES * LANES)));
#pragma unroll 8
    for (uint32_t i = lane; i < n.dim; i += LANES) {
        float scaled = x[i] * r * n.w[i];
        y[i] = scaled;
        if (n.rounded)
            store_rounded(n.rounded + (size_t)at * n.dim + i, pack<float, 1>{scaled});
    }
}

/* Scales the row after its sum is known; the row is in a cache by then. */
template <int N> static __device__ __forceinline__ void norm_scale(const struct norm &n, float r)
{
    const float *x = n.x + norm_at(n, blockIdx.x);
    float *y = n.y + norm_at(n, blockIdx.x);
    for (uint32_t i = threadIdx.x * N; i < n.dim; i += blockDim.x * N) {
        pack<float, N> v = load<N>(x + i), w = load<N>(n.w + i);
        for (int j = 0; j < N; j++)
            v.at[j] = v.at[j] * r * w.at[j];
        store(y + i, v);
        if (n.rounded)
            store_rounded(n.rounded + (size_t)blockIdx.x * n.dim + i, v);
    }
}

/*
 * One block of threads for each row. All threads load it into shared memory, and 16 of them sum it in the
 * specified order: a chain of dim / 16 multiplications. This is short compared with the loads, and other
 * blocks run meanwhile.
 */
template <int N> static __global__ void __launch_bounds__(THREADS) norm_exact(struct norm n)
{
    begin_kernel();
    float *chunk = dynamic_shared<float>();
    __shared__ float r;
    const float *x = n.x + norm_at(n, blockIdx.x);
    float sum = 0;
    for (uint32_t first = 0; first < n.dim; first += NORM_CHUNK) {
        uint32_t len = min(n.dim - first, NORM_CHUNK);
        for (uint32_t i = threadIdx.x * N; i < len; i += THREADS * N)
            store(chunk + i, load<N>(x + first + i));
        __syncthreads();
        if (threadIdx.x < LANES)
#pragma unroll 8
            for (uint32_t i = threadIdx.x; i < len; i += LANES)
                sum = scalar_fma(chunk[i], chunk[i], sum);
        __syncthreads();
    }
    if (threadIdx.x < LANES) {
        sum = lanes_tree(sum, 0xffff);
        r = norm_factor(n, sum); /* all threads write the same value */
    }
    __syncthreads();
    norm_scale<N>(n, r);
}

/* A thread sums every blockDim.x-th four numbers, whether or not it can load them at once. */
template <int N> static __device__ __forceinline__ float norm_part(const float *x, uint32_t dim)
{
    float sum = 0;
#pragma unroll 2
    for (uint32_t i = threadIdx.x * 4; i < dim; i += blockDim.x * 4)
        for (uint32_t j = i; j < i + 4 && j < dim; j += N) {
            pack<float, N> v = load<N>(x + j);
            for (int l = 0; l < N; l++)
                sum = scalar_fma(v.at[l], v.at[l], sum);
        }
    return sum;
}

static __device__ __forceinline__ float warp_sum(float sum)
{
    for (uint32_t half = WARP / 2; half; half /= 2)
        sum = sum + __shfl_xor_sync(ALL, sum, half);
    return sum;
}

template <int N> static __global__ void norm_fast(struct norm n)
{
    begin_kernel();
    __shared__ float sums[WARP];
    float sum = warp_sum(norm_part<N>(n.x + norm_at(n, blockIdx.x), n.dim));
    if (threadIdx.x % WARP == 0)
        sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    sum = warp_sum(threadIdx.x % WARP < blockDim.x / WARP ? sums[threadIdx.x % WARP] : 0);
    norm_scale<N>(n, norm_factor(n, sum));
}

static void launch_norm_fast(cudaStream_t stream, const struct norm *n, uint32_t n_all, bool four)
{
    uint32_t warps = pieces(n->dim, 4 * WARP);
    auto *kernel = four ? norm_fast<4> : norm_fast<1>;
    launch_next(stream, kernel, n_all, (warps < WARP ? warps : WARP) * WARP, 0, *n);
}

static void launch_norm_exact(cudaStream_t stream, const struct norm *n, uint32_t n_all, bool four)
{
    size_t shared = (n->dim < NORM_CHUNK ? n->dim : NORM_CHUNK) * sizeof(float);
    auto *kernel = four ? norm_exact<4> : norm_exact<1>;
    launch_next(stream, kernel, n_all, THREADS, shared, *n);
}

void cuda_norm(cudaStream_t stream, const float *x, float *y, size_t row_stride, uint32_t n_heads, size_t head_stride,
               const float *w, float eps, uint32_t n_rows, uint32_t dim, bool fast, void *rounded)
{
    const struct norm n = {x, y, w, row_stride, head_stride, n_heads, dim, eps, (uint16_t *)rounded};
    uint32_t n_all = n_rows * n_heads;
    bool four = by_four(x, row_stride, head_stride) && by_four(y, dim, dim) && by_four(w, dim, dim);
    if (!n_all)
        return;
    if (dim <= SHORT_ROW)
        launch_next(stream, norm_short, pieces(n_all, THREADS / LANES), THREADS, 0, n, n_all);
    else if (fast)
        launch_norm_fast(stream, &n, n_all, four);
    else
        launch_norm_exact(stream, &n, n_all, four);
}

/* ----------------------------------------------------------------- routing */

/* A candidate and its index; index NONE: there was none. */
struct rows_choice {
    float x;
    uint32_t at;
};

static __device__ __forceinline__ bool better(struct rows_choice a, struct rows_choice b)
{
    return a.at != NONE && (b.at == NONE || a.x > b.x || (a.x == b.x && a.at < b.at));
}

/* Bit j of a lane's mask stands for index 32 j + lane. */
static __device__ __forceinline__ bool is_set(uint32_t mask, uint32_t i)
{
    return mask >> (i / WARP) & 1;
}

/*
 * Takes the largest of x[n] that is not taken, of equal ones the lowest index. The whole warp gets its index.
 */
static __device__ uint32_t take_largest(const float *x, uint32_t n, uint32_t *taken)
{
    uint32_t lane = threadIdx.x % WARP;
    struct rows_choice best = {0, NONE};
    for (uint32_t i = lane; i < n; i += WARP)
        if (!is_set(*taken, i) && (best.at == NONE || x[i] > best.x))
            best = {x[i], i};
    for (uint32_t half = WARP / 2; half; half /= 2) {
        struct rows_choice other = {__shfl_xor_sync(ALL, best.x, half), __shfl_xor_sync(ALL, best.at, half)};
        if (better(other, best))
            best = other;
    }
    uint32_t at = __shfl_sync(ALL, best.at, 0); /* with NaNs, lanes may differ */
    if (at % WARP == lane)
        *taken |= 1u << (at / WARP);
    return at;
}

/* The mask of experts in all groups except the best ones. groups: room for one number of each group. */
static __device__ uint32_t leave_groups(const struct k_router &r, const float *logits, float *groups)
{
    uint32_t lane = threadIdx.x % WARP, size = r.n_experts / r.n_groups, chosen = 0, taken = 0;
    for (uint32_t g = lane; g < r.n_groups; g += WARP) {
        float best = logits[g * size];
        for (uint32_t i = 1; i < size; i++)
            best = scalar_max(logits[g * size + i], best);
        groups[g] = best;
    }
    for (uint32_t i = 0; i < r.n_groups_used; i++)
        take_largest(groups, r.n_groups, &chosen); /* each lane reads only what it wrote */
    for (uint32_t g = lane; g < r.n_groups; g += WARP)
        groups[g] = is_set(chosen, g);
    __syncwarp();
    for (uint32_t e = lane; e < r.n_experts; e += WARP)
        taken |= (uint32_t)(groups[e / size] == 0) << (e / WARP);
    return taken;
}

/* Sums over all experts, in order of index. */
static __device__ float sum_all(const float *logits, uint32_t n, float top)
{
    float sum = 0;
    for (uint32_t first = 0; first < n; first += WARP) {
        uint32_t e = first + threadIdx.x % WARP;
        float p = e < n ? scalar_exp(logits[e] - top) : 0;
        for (uint32_t i = 0; i < WARP; i++)
            sum = sum + __shfl_sync(ALL, p, i);
    }
    return sum;
}

static __device__ float largest_of_all(const float *logits, uint32_t n, float top)
{
    for (uint32_t e = threadIdx.x % WARP; e < n; e += WARP)
        top = scalar_max(logits[e], top);
    for (uint32_t half = WARP / 2; half; half /= 2)
        top = scalar_max(__shfl_xor_sync(ALL, top, half), top);
    return top;
}

/* One warp for each row; lane i has choice i. */
static __global__ void route_rows(struct k_router r, const float *all_logits, uint32_t n_rows, uint32_t stride,
                                  uint32_t *experts, float *weights)
{
    begin_kernel();
    __shared__ float groups[ROUTE_WARPS][K_MAX_EXPERTS];
    uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row = blockIdx.x * ROUTE_WARPS + warp;
    if (row >= n_rows)
        return;
    const float *logits = all_logits + (size_t)row * r.n_experts;
    uint32_t taken = r.n_groups_used < r.n_groups ? leave_groups(r, logits, groups[warp]) : 0, mine = 0, first = 0;
    for (uint32_t i = 0; i < r.n_used; i++) {
        uint32_t at = take_largest(logits, r.n_experts, &taken);
        first = i ? first : at;
        mine = i == lane ? at : mine;
    }
    float top = logits[first], sum = 0;
    if (!r.normalized) /* the largest logit may be in a group that was left out */
        top = largest_of_all(logits, r.n_experts, top);
    float w = scalar_exp(logits[mine] - top);
    if (!r.normalized)
        sum = sum_all(logits, r.n_experts, top);
    for (uint32_t i = 0; i < r.n_used && r.normalized; i++)
        sum = sum + __shfl_sync(ALL, w, i);
    if (lane < r.n_used) {
        experts[(size_t)row * stride + lane] = mine;
        weights[(size_t)row * stride + lane] = w / sum * r.scale;
    }
}

void cuda_route(cudaStream_t stream, const struct k_router *r, const float *logits, uint32_t n_rows, uint32_t stride,
                uint32_t *experts, float *weights)
{
    assert(r->n_experts <= K_MAX_EXPERTS && r->n_used <= WARP);
    if (n_rows)
        launch_next(stream, route_rows, pieces(n_rows, ROUTE_WARPS), ROUTE_WARPS * WARP, 0, *r, logits, n_rows, stride,
                    experts, weights);
}

/* ------------------------------------------------------------------- slots */

/* Pairs of a row and a choice, in order of rows. Each warp has a range of them. */
struct pairs {
    uint32_t begin, end;
    const uint32_t *experts;
    uint32_t n_used, n_slots;
};

static __device__ struct pairs warp_pairs(const struct k_slots &s, uint32_t n_rows)
{
    uint32_t n = n_rows * s.n_used, warps = blockDim.x / WARP, a_warp = (n + warps - 1) / warps;
    uint32_t begin = threadIdx.x / WARP * a_warp;
    return {min(begin, n), min(begin + a_warp, n), s.experts, s.n_used, s.n_slots};
}

/* Loads the experts of SORT_AHEAD times 32 pairs from `first` on; NONE behind the end. */
static __device__ __forceinline__ void load_pairs(const struct pairs &p, uint32_t first, uint32_t e[SORT_AHEAD])
{
#pragma unroll
    for (uint32_t j = 0; j < SORT_AHEAD; j++) {
        uint32_t i = first + j * WARP + threadIdx.x % WARP;
        e[j] = i < p.end ? p.experts[i / p.n_used * p.n_slots + i % p.n_used] : NONE;
    }
}

/* Adds the warp's pairs to counts[expert]. */
static __device__ void count_pairs(const struct pairs &p, uint32_t *counts)
{
    for (uint32_t first = p.begin; first < p.end; first += SORT_AHEAD * WARP) {
        uint32_t e[SORT_AHEAD];
        load_pairs(p, first, e);
        for (uint32_t j = 0; j < SORT_AHEAD; j++)
            if (e[j] != NONE)
                atomicAdd(&counts[e[j]], 1u);
    }
}

/* Turns each warp's counts into the counts of the warps before it; total[expert] gets the sum. */
static __device__ void scan_warps(uint32_t *counts, uint32_t n_experts, uint32_t *total)
{
    for (uint32_t e = threadIdx.x; e < n_experts; e += blockDim.x) {
        uint32_t sum = 0;
        for (uint32_t w = 0; w < blockDim.x / WARP; w++) {
            uint32_t n = counts[w * n_experts + e];
            counts[w * n_experts + e] = sum;
            sum += n;
        }
        total[e] = sum;
    }
}

/* By one warp: turns counts in first[0 .. n - 1] into prefix sums, and first[n] into the sum of all. */
static __device__ void scan_experts(uint32_t *first, uint32_t n)
{
    uint32_t lane = threadIdx.x, before = 0;
    for (uint32_t i = lane; i - lane < n; i += WARP) {
        uint32_t own = i < n ? first[i] : 0, sum = own;
        for (uint32_t apart = 1; apart < WARP; apart *= 2) {
            uint32_t other = __shfl_up_sync(ALL, sum, apart);
            sum += lane >= apart ? other : 0;
        }
        if (i < n)
            first[i] = before + sum - own;
        before += __shfl_sync(ALL, sum, WARP - 1);
    }
    if (!lane)
        first[n] = before;
}

/*
 * Writes the slots of the warp's pairs. next[expert] counts pairs of that expert in earlier warps, and so far
 * in this one.
 */
static __device__ void place_pairs(const struct pairs &p, const struct k_slots &s, const uint32_t *first,
                                   uint32_t *next)
{
    uint32_t lane = threadIdx.x % WARP;
    for (uint32_t from = p.begin; from < p.end; from += SORT_AHEAD * WARP) {
        uint32_t experts[SORT_AHEAD];
        load_pairs(p, from, experts);
#pragma unroll
        for (uint32_t j = 0; j < SORT_AHEAD; j++) {
            uint32_t e = experts[j], i = from + j * WARP + lane, alike = __match_any_sync(ALL, e);
            uint32_t rank = __popc(alike & ((1u << lane) - 1)), slot = e != NONE ? first[e] + next[e] + rank : 0;
            __syncwarp();
            if (e != NONE) {
                if (!rank)
                    next[e] += __popc(alike);
                s.slots[i / p.n_used * p.n_slots + i % p.n_used] = slot;
                s.slot_row[slot] = i / p.n_used;
            }
            __syncwarp();
        }
    }
}

static __device__ void place_shared(const struct k_slots &s, uint32_t n_rows)
{
    for (uint32_t t = threadIdx.x; t < n_rows; t += blockDim.x) {
        s.slots[t * s.n_slots + s.n_used] = n_rows * s.n_used + t;
        s.weights[t * s.n_slots + s.n_used] = s.gate ? 1.0f / (1.0f + scalar_exp(-s.gate[t])) : 1.0f;
    }
}

/*
 * A counting sort in one block of threads. Every warp counts a range of the pairs for itself. So the place of
 * a pair within its expert is known without looking at other warps again, and the sort is stable.
 */
static __global__ void __launch_bounds__(1024) sort_slots(struct k_slots s, uint32_t n_experts, uint32_t n_rows)
{
    begin_kernel();
    uint32_t *words = dynamic_shared<uint32_t>();
    uint32_t warps = blockDim.x / WARP, *first = words, *counts = words + n_experts + 1;
    uint32_t *own = counts + threadIdx.x / WARP * n_experts;
    struct pairs p = warp_pairs(s, n_rows);
    for (uint32_t i = threadIdx.x; i < warps * n_experts; i += blockDim.x)
        counts[i] = 0;
    __syncthreads();
    count_pairs(p, own);
    __syncthreads();
    scan_warps(counts, n_experts, first);
    __syncthreads();
    if (threadIdx.x < WARP)
        scan_experts(first, n_experts);
    __syncthreads();
    for (uint32_t e = threadIdx.x; e <= n_experts; e += blockDim.x)
        s.first[e] = first[e];
    place_pairs(p, s, first, own);
    if (s.n_slots > s.n_used)
        place_shared(s, n_rows);
}

void cuda_sort_slots(cudaStream_t stream, const struct k_slots *s, uint32_t n_experts, uint32_t n_rows)
{
    assert(n_experts >= 1 && n_experts <= K_MAX_EXPERTS && s->n_slots <= s->n_used + 1);
    uint32_t warps = (SORT_WORDS - 1) / n_experts - 1;
    warps = warps < 1024 / WARP ? warps : 1024 / WARP;
    launch_next(stream, sort_slots, 1, warps * WARP, ((warps + 1) * n_experts + 1) * sizeof(uint32_t), *s, n_experts,
                n_rows);
}

template <int N>
static __global__ void combine_rows(const float *x, uint32_t dim, const uint32_t *rows, const float *weights,
                                    uint32_t n, float *y)
{
    begin_kernel();
    uint32_t at = unit() * N;
    if (at >= dim)
        return;
    pack<float, N> sum = {0};
#pragma unroll 4
    for (uint32_t i = 0; i < n; i++) {
        size_t choice = (size_t)blockIdx.x * n + i;
        pack<float, N> v = load<N>(x + (size_t)rows[choice] * dim + at);
        for (int j = 0; j < N; j++)
            sum.at[j] = scalar_fma(weights[choice], v.at[j], sum.at[j]);
    }
    float *to = y + (size_t)blockIdx.x * dim + at;
    pack<float, N> v = load<N>(to);
    for (int j = 0; j < N; j++)
        v.at[j] = v.at[j] + sum.at[j];
    store(to, v);
}

void cuda_combine(cudaStream_t stream, const float *x, uint32_t dim, const uint32_t *rows, const float *weights,
                  uint32_t n, uint32_t n_rows, float *y)
{
    if (!n_rows)
        return;
    bool four = by_four(x, dim, dim) && by_four(y, dim, dim);
    auto *kernel = four ? combine_rows<4> : combine_rows<1>;
    launch_next(stream, kernel, row_grid(n_rows, four ? dim / 4 : dim), THREADS, 0, x, dim, rows, weights, n, y);
}
