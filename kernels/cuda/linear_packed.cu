/*
 * Fast products with matrices in packed formats (cuda.h): the bits of linear.cu with the bf16 numbers that
 * the codes stand for.
 *
 * Hopper has kernels of its own for them (linear_hopper.cu). Few rows must stream codes at the speed of
 * the memory. Codes come by cp.async, several stages deep, and each stage is widened into a tile of bf16,
 * which the tensor cores multiply as in linear.cu. Scales are read into registers one stage ahead. With
 * many rows the whole matrix is widened once instead (cuda_widen), for the plain products.
 *
 * Rows of codes are whole stages long, with zeros behind n_in.
 */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear_tile.cuh"

/* A tile as fast_shape, with packed codes. */
template <class S_, enum k_weights W_>
struct packed_shape {
    using S = S_; static constexpr enum k_weights W = W_; static constexpr uint32_t CODES = codes_in_piece<W>;
    /* Widening is a chain in each warp, so many small blocks of threads on a multiprocessor hide it best. */
    static constexpr uint32_t STAGES = S::ROWS <= 16 ? 3 : 2;
    /* Pieces of 16 bytes in a stage's part of a row. */
    static constexpr uint32_t ROW = S::K / CODES;
    static constexpr uint32_t EACH = S::OUTS * ROW / S::THREADS;           /* pieces of each thread */
    static constexpr uint32_t STAGE = S::OUTS * ROW + S::ROWS * S::CHUNKS; /* codes, then rows */
    /* The widened tile, then stages. */
    static constexpr uint32_t BYTES = (S::OUTS * S::CHUNKS + STAGE * STAGES) * 16;
    static_assert(S::K == CUDA_PACKED_ALIGN && S::OUTS * ROW % S::THREADS == 0 && BYTES <= 99 * 1024,
                  "stages are whole, copies are shared evenly");
};

/* Piece i (16 bytes) of a thread: its output, and its first k in the stage. */
template <class P> static __device__ __forceinline__ uint32_t piece_out(uint32_t i)
{
    return (i * P::S::THREADS + threadIdx.x) / P::ROW;
}

template <class P> static __device__ __forceinline__ uint32_t piece_chunk(uint32_t i)
{
    return (i * P::S::THREADS + threadIdx.x) % P::ROW;
}

template <class P>
static __device__ __forceinline__ void copy_codes(uint4 *stage, const uint8_t *w, uint32_t row_bytes, uint32_t n_outs,
                                                  uint32_t at)
{
#pragma unroll
    for (uint32_t i = 0; i < P::EACH; i++) {
        uint32_t out = piece_out<P>(i);
        const uint8_t *from = w + (size_t)out * row_bytes + (at * P::ROW + piece_chunk<P>(i)) * 16;
        copy_async16(stage + i * P::S::THREADS + threadIdx.x, out < n_outs ? from : w, out < n_outs);
    }
}

template <class P>
static __device__ __forceinline__ void fetch_scales(const struct linear_job &job, const void *w, const struct tile &t,
                                                    uint32_t at, float scales[P::EACH])
{
#pragma unroll
    for (uint32_t i = 0; i < P::EACH; i++) {
        uint32_t out = t.out0 + piece_out<P>(i), k = at * P::S::K + piece_chunk<P>(i) * P::CODES;
        scales[i] = out < job.n_out && k < job.stride ? scale_of(job, w, P::W, out, k) : 0;
    }
}

/* Widens a thread's codes of a stage to where load_matrix4 reads their numbers. */
template <class P>
static __device__ __forceinline__ void widen_stage(const uint4 *stage, const float scales[P::EACH], uint4 *tile)
{
#pragma unroll
    for (uint32_t i = 0; i < P::EACH; i++) {
        uint4 piece = stage[i * P::S::THREADS + threadIdx.x];
#pragma unroll
        for (uint32_t j = 0; j < P::CODES / 8; j++)
            *chunk_at<typename P::S>(tile, piece_out<P>(i), piece_chunk<P>(i) * (P::CODES / 8) + j) =
                widen_chunk<P::W>(piece, j, scales[i]);
    }
}

template <class P> static __global__ void __launch_bounds__(P::S::THREADS) linear_packed(const struct linear_job job)
{
    begin_kernel();
    using S = typename P::S;
    uint4 *tile = dynamic_shared<uint4>(), *stages = tile + S::OUTS * S::CHUNKS;
    struct tile t;
    if (!find_tile(job, S::ROWS, S::OUTS, &t))
        return;
    const void *all = weights_of(job, t);
    const uint8_t *w = (const uint8_t *)all + (size_t)t.out0 * code_bytes(job);
    const uint16_t *x = rows_of<uint16_t>(job, t);
    uint32_t n_steps = (job.n_in + 15) / 16, n_stages = job.stride / S::K;
    auto copy = [&](uint32_t i) {
        uint4 *stage = stages + i % P::STAGES * P::STAGE;
        if (i < n_stages) {
            copy_codes<P>(stage, w, code_bytes(job), job.n_out - t.out0, i);
            copy_rows<S, S::ROWS>(stage + S::OUTS * P::ROW, x, job.p.x_stride, t.n_rows, i * S::K, job.stride);
        }
        copy_async_commit(); /* also an empty group: waiting counts groups */
    };
    float scales[P::EACH], next[P::EACH], sum[S::OUT_FRAGMENTS][S::ROW_FRAGMENTS][4] = {};
    for (uint32_t i = 0; i < P::STAGES - 1; i++)
        copy(i);
    fetch_scales<P>(job, all, t, 0, next);
    for (uint32_t i = 0; i < n_stages; i++) {
        uint4 *stage = stages + i % P::STAGES * P::STAGE;
#pragma unroll
        for (uint32_t j = 0; j < P::EACH; j++)
            scales[j] = next[j];
        fetch_scales<P>(job, all, t, i + 1, next);
        copy_async_wait<P::STAGES - 2>();
        /*
         * After this, stage i is complete, and no thread reads the tile or the stage that is overwritten
         * next.
         */
        __syncthreads();
        copy(i + P::STAGES - 1);
        widen_stage<P>(stage, scales, tile);
        __syncthreads();
#pragma unroll
        for (uint32_t step = 0; step < S::K / 16; step++)
            if (i * (S::K / 16) + step < n_steps)
                multiply_step<S>(tile, stage + S::OUTS * P::ROW, step, sum);
    }
    put_sums<S>(target_of(job, t), sum);
}

/* ---------------------------------------------------------------- launches */

template <class S, enum k_weights W> static void launch(cudaStream_t stream, const struct linear_job &job)
{
    using P = packed_shape<S, W>;
    launch_next(stream, linear_packed<P>, grid_of(job, S::ROWS, S::OUTS), S::THREADS, P::BYTES, job);
}

template <enum k_weights W> static void launch_rows(cudaStream_t stream, const struct linear_job &job)
{
    if (typical_rows(job) <= fast_few::ROWS)
        launch<fast_few, W>(stream, job);
    else
        launch<fast_some, W>(stream, job);
}

static void launch_packed(cudaStream_t stream, const struct linear_job &job)
{
    if (!job.p.n_rows)
        return;
    if (job.weights == WEIGHTS_INT8)
        launch_rows<WEIGHTS_INT8>(stream, job);
    else if (job.weights == WEIGHTS_FP8)
        launch_rows<WEIGHTS_FP8>(stream, job);
    else
        launch_rows<WEIGHTS_INT4>(stream, job);
}

template <enum k_weights W> static cudaError_t allow_shared(void)
{
    using few = packed_shape<fast_few, W>;
    using some = packed_shape<fast_some, W>;
    cudaError_t e = cudaFuncSetAttribute(linear_packed<few>, cudaFuncAttributeMaxDynamicSharedMemorySize, few::BYTES);
    return e == cudaSuccess
               ? cudaFuncSetAttribute(linear_packed<some>, cudaFuncAttributeMaxDynamicSharedMemorySize, some::BYTES)
               : e;
}

cudaError_t cuda_packed_open(void)
{
    cudaError_t e = allow_shared<WEIGHTS_INT8>();
    if (e == cudaSuccess)
        e = allow_shared<WEIGHTS_FP8>();
    return e == cudaSuccess ? allow_shared<WEIGHTS_INT4>() : e;
}

void cuda_packed_fast(cudaStream_t stream, const struct cuda_matrix *w, const struct cuda_product *p)
{
    launch_packed(stream, job_of(w, p));
}

void cuda_packed_each_fast(cudaStream_t stream, const struct cuda_stack *s, const struct cuda_product *p, size_t x_step,
                           size_t y_step)
{
    launch_packed(stream, each_job_of(s, p, x_step, y_step));
}

void cuda_packed_sorted_fast(cudaStream_t stream, const struct cuda_stack *s, const struct cuda_product *p,
                             const uint32_t *first)
{
    launch_packed(stream, sorted_job_of(s, p, first));
}

/* A piece of 16 bytes for each thread; blockIdx.x is a row. */
template <enum k_weights W> static __global__ void widen_rows(const struct linear_job job, uint4 *to)
{
    constexpr uint32_t CODES = codes_in_piece<W>;
    uint32_t piece = blockIdx.y * blockDim.x + threadIdx.x, k = piece * CODES;
    if (k >= job.stride)
        return;
    const uint8_t *row = (const uint8_t *)job.data + (size_t)blockIdx.x * code_bytes(job);
    uint4 codes = ((const uint4 *)row)[piece];
    float scale = scale_of(job, job.data, W, blockIdx.x, k);
    uint4 *out = to + ((size_t)blockIdx.x * job.stride + k) / 8;
#pragma unroll
    for (uint32_t i = 0; i < CODES / 8; i++)
        out[i] = widen_chunk<W>(codes, i, scale);
}

template <enum k_weights W> static void launch_widen(cudaStream_t stream, const struct linear_job &job, void *to)
{
    dim3 grid(job.n_out, tiles(job.stride, 128 * codes_in_piece<W>));
    launch_kernel(stream, widen_rows<W>, grid, 128, 0, job, (uint4 *)to);
}

void cuda_widen(cudaStream_t stream, const struct cuda_matrix *w, void *to)
{
    struct cuda_product none = {};
    auto *launch = w->weights == WEIGHTS_INT8  ? launch_widen<WEIGHTS_INT8>
                   : w->weights == WEIGHTS_FP8 ? launch_widen<WEIGHTS_FP8>
                                               : launch_widen<WEIGHTS_INT4>;
    launch(stream, job_of(w, &none), to);
}
