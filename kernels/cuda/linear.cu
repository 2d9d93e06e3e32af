/*
 * Products with weight matrices, in the two orders of summation of cuda.h.
 *
 * A CTA computes a tile of outputs by rows and walks along k. No sum is split along k, so the tile's shape
 * does not change bits, and is chosen by the number of rows.
 *
 *     exact   one accumulator for each output, fma(w, x, acc), k ascending. Tiles of weights and rows go
 *             through shared memory, widened; the next tiles are loaded into registers meanwhile. k ends at
 *             n_in: adding one more zero could change the sign of a -0.
 *     fast    mma m16n8k16, with outputs in the 16 and rows in the 8, so that few rows waste little. k
 *             ascending in steps of 16; numbers of the last step beyond n_in are zero on both sides. Weights
 *             and rows come by cp.async, several stages deep: with few rows this must stream weights at the
 *             speed of the memory.
 *
 * Shared memory of fast tiles: rows of K bf16, in chunks of 16 bytes. Chunk c of row r is at c ^ (r % 8), so
 * that the 8 rows of an ldmatrix are in different banks.
 *
 * Sorted rows: first[] is on the device only, so the grid has a slot for every tile that could exist. With
 * tiles of R rows, the tiles of matrix i begin at slot first[i] / R + i, which rises with i by at least the
 * tiles of matrix i. CTAs without a tile exit.
 */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear_tile.cuh"
#include "kernels/cuda/pack.cuh"

/* ------------------------------------------------------------------- exact */

template <uint32_t ROWS_, uint32_t OUTS_, uint32_t ROWS_EACH_, uint32_t OUTS_EACH_, uint32_t K_> struct exact_shape {
    static constexpr uint32_t ROWS = ROWS_, OUTS = OUTS_, ROWS_EACH = ROWS_EACH_, OUTS_EACH = OUTS_EACH_, K = K_;
    static constexpr uint32_t THREADS = ROWS / ROWS_EACH * (OUTS / OUTS_EACH);
};
using exact_few = exact_shape<4, 32, 1, 1, 64>;
using exact_many = exact_shape<64, 64, 4, 4, 16>;

/* A thread's share of a tile of numbers [n][K], on the way to shared memory [K][n]. */
template <uint32_t N, class S> struct carried {
    static constexpr uint32_t EACH = N * S::K / S::THREADS;
    float x[EACH];

    template <class Load> __device__ void fetch(uint32_t n, uint32_t n_k, Load load)
    {
#pragma unroll
        for (uint32_t i = 0; i < EACH; i++) {
            uint32_t at = i * S::THREADS + threadIdx.x, row = at / S::K, k = at % S::K;
            x[i] = row < n && k < n_k ? load(row, k) : 0;
        }
    }

    __device__ void store(float (*to)[N + 1]) const
    {
#pragma unroll
        for (uint32_t i = 0; i < EACH; i++) {
            uint32_t at = i * S::THREADS + threadIdx.x;
            to[at % S::K][at / S::K] = x[i];
        }
    }
};

template <class S>
static __device__ __forceinline__ void fetch_exact(const struct linear_job &job, const struct tile &t, const void *w,
                                                   const float *x, uint32_t k0, carried<S::OUTS, S> *next_w,
                                                   carried<S::ROWS, S> *next_x)
{
    uint32_t n_k = job.n_in - k0, bytes = job.type == NUM_F32 ? 4 : 2;
    next_w->fetch(job.n_out - t.out0, n_k, [&](uint32_t out, uint32_t k) {
        if (job.weights)
            return packed_weight(job, w, t.out0 + out, k0 + k);
        return scalar_from(w, bytes, job.type == NUM_BF16, (uint64_t)(t.out0 + out) * job.stride + k0 + k);
    });
    next_x->fetch(t.n_rows, n_k, [&](uint32_t row, uint32_t k) { return x[row * job.p.x_stride + k0 + k]; });
}

template <class S> static __global__ void __launch_bounds__(S::THREADS) linear_exact(const struct linear_job job)
{
    constexpr uint32_t ACROSS = S::OUTS / S::OUTS_EACH;
    __shared__ float w_tile[S::K][S::OUTS + 1], x_tile[S::K][S::ROWS + 1];
    struct tile t;
    if (!find_tile(job, S::ROWS, S::OUTS, &t))
        return;
    const void *w = weights_of(job, t);
    const float *x = rows_of<float>(job, t);
    uint32_t row0 = threadIdx.x / ACROSS * S::ROWS_EACH, out0 = threadIdx.x % ACROSS;
    float sum[S::ROWS_EACH][S::OUTS_EACH] = {};
    carried<S::OUTS, S> next_w;
    carried<S::ROWS, S> next_x;
    fetch_exact<S>(job, t, w, x, 0, &next_w, &next_x);
    for (uint32_t k0 = 0; k0 < job.n_in; k0 += S::K) {
        __syncthreads();
        next_w.store(w_tile);
        next_x.store(x_tile);
        __syncthreads();
        if (k0 + S::K < job.n_in)
            fetch_exact<S>(job, t, w, x, k0 + S::K, &next_w, &next_x);
        uint32_t n_k = min(job.n_in - k0, S::K);
#pragma unroll 4
        for (uint32_t k = 0; k < n_k; k++)
#pragma unroll
            for (uint32_t i = 0; i < S::ROWS_EACH; i++)
#pragma unroll
                for (uint32_t j = 0; j < S::OUTS_EACH; j++)
                    sum[i][j] = scalar_fma(w_tile[k][out0 + j * ACROSS], x_tile[k][row0 + i], sum[i][j]);
    }
    struct target to = target_of(job, t);
#pragma unroll
    for (uint32_t i = 0; i < S::ROWS_EACH; i++)
#pragma unroll
        for (uint32_t j = 0; j < S::OUTS_EACH; j++)
            put(to, row0 + i, out0 + j * ACROSS, sum[i][j]);
}

/* -------------------------------------------------------------------- fast */

template <class S> static __global__ void __launch_bounds__(S::THREADS) linear_fast(const struct linear_job job)
{
    uint4 *stages = dynamic_shared<uint4>();
    struct tile t;
    if (!find_tile(job, S::ROWS, S::OUTS, &t))
        return;
    const uint16_t *w = (const uint16_t *)weights_of(job, t) + (size_t)t.out0 * job.stride;
    const uint16_t *x = rows_of<uint16_t>(job, t);
    uint32_t n_steps = (job.n_in + 15) / 16, n_stages = (job.n_in + S::K - 1) / S::K;
    auto copy = [&](uint32_t i) {
        uint4 *stage = stages + i % S::STAGES * S::STAGE;
        if (i < n_stages) {
            copy_rows<S, S::OUTS>(stage, w, job.stride, job.n_out - t.out0, i * S::K, job.stride);
            copy_rows<S, S::ROWS>(stage + S::OUTS * S::CHUNKS, x, job.p.x_stride, t.n_rows, i * S::K, job.stride);
        }
        copy_async_commit(); /* also an empty group: waiting counts groups */
    };
    for (uint32_t i = 0; i < S::STAGES - 1; i++)
        copy(i);
    float sum[S::OUT_FRAGMENTS][S::ROW_FRAGMENTS][4] = {};
    for (uint32_t i = 0; i < n_stages; i++) {
        copy_async_wait<S::STAGES - 2>();
        /* After this, stage i is complete, and no thread reads the stage that is overwritten next. */
        __syncthreads();
        copy(i + S::STAGES - 1);
        uint4 *stage = stages + i % S::STAGES * S::STAGE;
#pragma unroll
        for (uint32_t step = 0; step < S::K / 16; step++)
            if (i * (S::K / 16) + step < n_steps)
                multiply_step<S>(stage, stage + S::OUTS * S::CHUNKS, step, sum);
    }
    put_sums<S>(target_of(job, t), sum);
}

/* ---------------------------------------------------------------- launches */

template <class S> static void launch_exact(cudaStream_t stream, const struct linear_job &job)
{
    launch_kernel(stream, linear_exact<S>, grid_of(job, S::ROWS, S::OUTS), S::THREADS, 0, job);
}

template <class S> static void launch_fast(cudaStream_t stream, const struct linear_job &job)
{
    launch_kernel(stream, linear_fast<S>, grid_of(job, S::ROWS, S::OUTS), S::THREADS, S::BYTES, job);
}

static void exact(cudaStream_t stream, const struct linear_job &job)
{
    if (!job.p.n_rows)
        return;
    if (typical_rows(job) <= 4 * exact_few::ROWS)
        launch_exact<exact_few>(stream, job);
    else
        launch_exact<exact_many>(stream, job);
}

/* Large tiles read their inputs least often: used if there is one for nearly every multiprocessor. */
static void fast(cudaStream_t stream, const struct linear_job &job)
{
    enum { ENOUGH_TILES = 96 };
    if (!job.p.n_rows)
        return;
    dim3 large = grid_of(job, fast_many::ROWS, fast_many::OUTS);
    uint32_t n_rows = typical_rows(job);
    if (n_rows <= fast_few::ROWS)
        launch_fast<fast_few>(stream, job);
    else if (n_rows <= fast_some::ROWS || (uint64_t)large.x * large.y * large.z < ENOUGH_TILES)
        launch_fast<fast_some>(stream, job);
    else
        launch_fast<fast_many>(stream, job);
}

template <class S> static cudaError_t allow_shared(void)
{
    return cudaFuncSetAttribute(linear_fast<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::BYTES);
}

cudaError_t cuda_linear_open(void)
{
    cudaError_t e = allow_shared<fast_few>();
    if (e == cudaSuccess)
        e = allow_shared<fast_some>();
    return e == cudaSuccess ? allow_shared<fast_many>() : e;
}

void cuda_linear_exact(cudaStream_t stream, const struct cuda_matrix *w, const struct cuda_product *p)
{
    exact(stream, job_of(w, p));
}

void cuda_linear_fast(cudaStream_t stream, const struct cuda_matrix *w, const struct cuda_product *p)
{
    fast(stream, job_of(w, p));
}

void cuda_each_exact(cudaStream_t stream, const struct cuda_stack *s, const struct cuda_product *p, size_t x_step,
                     size_t y_step)
{
    exact(stream, each_job_of(s, p, x_step, y_step));
}

void cuda_each_fast(cudaStream_t stream, const struct cuda_stack *s, const struct cuda_product *p, size_t x_step,
                    size_t y_step)
{
    fast(stream, each_job_of(s, p, x_step, y_step));
}

void cuda_sorted_exact(cudaStream_t stream, const struct cuda_stack *s, const struct cuda_product *p,
                       const uint32_t *first)
{
    exact(stream, sorted_job_of(s, p, first));
}

void cuda_sorted_fast(cudaStream_t stream, const struct cuda_stack *s, const struct cuda_product *p,
                      const uint32_t *first)
{
    fast(stream, sorted_job_of(s, p, first));
}

/* -------------------------------------------------------------------- rows */

static __global__ void add_bias(const float *bias, uint32_t n, float *y, size_t y_stride)
{
    begin_kernel();
    float *row = y + blockIdx.x * y_stride;
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x)
        row[i] = row[i] + bias[i];
}

void cuda_add_bias(cudaStream_t stream, const float *bias, uint32_t n, uint32_t n_rows, float *y, size_t y_stride)
{
    if (n_rows)
        launch_next(stream, add_bias, n_rows, 256, 0, bias, n, y, y_stride);
}

static constexpr uint32_t ROUND_THREADS = 256;

/* N: numbers that a thread rounds; 4: rows can be loaded by four. */
template <int N>
static __global__ void round_rows(const float *x, size_t x_stride, size_t x_step, uint32_t n_parts, uint32_t n,
                                  uint32_t *to, size_t to_stride)
{
    begin_kernel();
    const float *from = x + blockIdx.x / n_parts * x_stride + blockIdx.x % n_parts * x_step;
    uint32_t i = (blockIdx.y * ROUND_THREADS + threadIdx.x) * N;
    if (i >= to_stride)
        return;
    pack<float, N> v = {};
    if (N == 4 && i + N <= n)
        v = load<N>(from + i);
    else
        for (int j = 0; j < N; j++)
            v.at[j] = i + j < n ? from[i + j] : 0;
    pack<uint32_t, N / 2> words;
    for (int j = 0; j < N / 2; j++)
        words.at[j] = pack_bf16(v.at[2 * j], v.at[2 * j + 1]);
    store(to + (blockIdx.x * to_stride + i) / 2, words);
}

void cuda_round_rows(cudaStream_t stream, const float *x, size_t x_stride, size_t x_step, uint32_t n_parts, uint32_t n,
                     uint32_t n_rows, void *to, size_t to_stride)
{
    if (!n_rows)
        return;
    bool four = by_four(x, x_stride, x_step) && to_stride % 4 == 0;
    auto *kernel = four ? round_rows<4> : round_rows<2>;
    dim3 grid(n_rows * n_parts, pieces(to_stride, ROUND_THREADS * (four ? 4 : 2)));
    launch_next(stream, kernel, grid, ROUND_THREADS, 0, x, x_stride, x_step, n_parts, n, (uint32_t *)to, to_stride);
}
