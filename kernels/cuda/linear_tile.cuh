/*
 * What all products by mma.sync share (linear.cu, linear_packed.cu): which tile a CTA computes, where its
 * sums go, and the steps of the tensor cores on tiles in shared memory. The head of linear.cu describes how
 * tiles lie there.
 */
#pragma once

#include "kernels/cuda/packed.cuh"

constexpr uint32_t NONE = UINT32_MAX;

static __device__ inline uint32_t find_matrix(const struct linear_job &job, uint32_t height)
{
    __shared__ uint32_t found;
    if (threadIdx.x == 0)
        found = NONE;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < job.n_matrices; i += blockDim.x) {
        uint32_t slot = job.first[i] / height + i;
        if (blockIdx.x >= slot && job.first[i] + (blockIdx.x - slot) * height < job.first[i + 1])
            found = i;
    }
    __syncthreads();
    return found;
}

/* The tile of this CTA. False: it has none. */
static __device__ inline bool find_tile(const struct linear_job &job, uint32_t height, uint32_t width, struct tile *t)
{
    uint32_t end = job.p.n_rows;
    t->matrix = blockIdx.z;
    t->row0 = blockIdx.x * height;
    t->out0 = blockIdx.y * width;
    if (job.first) {
        t->matrix = find_matrix(job, height);
        if (t->matrix == NONE)
            return false;
        uint32_t begin = job.first[t->matrix];
        t->row0 = begin + (blockIdx.x - begin / height - t->matrix) * height;
        end = job.first[t->matrix + 1];
    }
    t->n_rows = min(end - t->row0, height);
    return true;
}

static __device__ inline float packed_weight(const struct linear_job &job, const void *w, uint32_t out, uint32_t k)
{
    const uint8_t *codes = (const uint8_t *)w + (size_t)out * code_bytes(job);
    uint8_t code = job.weights == WEIGHTS_INT4 ? codes[k / 2] >> (k % 2 * 4) & 15 : codes[k];
    return scalar_from_bf16(packed_to_bf16(job.weights, code, scale_of(job, w, job.weights, out, k)));
}

template <class X> static __device__ const X *rows_of(const struct linear_job &job, const struct tile &t)
{
    return (const X *)job.p.x + t.matrix * job.x_step + t.row0 * job.p.x_stride;
}

static __device__ __forceinline__ void put(const struct target &to, uint32_t row, uint32_t out, float sum)
{
    if (row >= to.n_rows || out >= to.n_outs)
        return;
    float *y = to.y + row * to.y_stride + out;
    *y = finished(to, sum, to.bias ? to.bias[out] : 0, to.accumulate ? *y : 0);
}

/* -------------------------------------------------------------------- fast */

/* A tile of OUTS x ROWS for WARPS_OUT x WARPS_ROW warps. A stage has K numbers of each output and row. */
template <uint32_t OUTS_, uint32_t ROWS_, uint32_t WARPS_OUT_, uint32_t WARPS_ROW_, uint32_t K_, uint32_t STAGES_>
struct fast_shape {
    static constexpr uint32_t OUTS = OUTS_, ROWS = ROWS_, WARPS_OUT = WARPS_OUT_, WARPS_ROW = WARPS_ROW_;
    static constexpr uint32_t K = K_, STAGES = STAGES_, THREADS = WARPS_OUT * WARPS_ROW * 32;
    /* Chunks of 16 bytes in a stage's part of a row. */
    static constexpr uint32_t CHUNKS = K / 8;
    static constexpr uint32_t STAGE = (OUTS + ROWS) * CHUNKS; /* chunks */
    static constexpr uint32_t BYTES = STAGE * STAGES * 16;
    static constexpr uint32_t WARP_OUTS = OUTS / WARPS_OUT, WARP_ROWS = ROWS / WARPS_ROW;
    static constexpr uint32_t OUT_FRAGMENTS = WARP_OUTS / 16, ROW_FRAGMENTS = WARP_ROWS / 8;
    static_assert(CHUNKS % 8 == 0 && ROW_FRAGMENTS % 2 == 0 && BYTES <= 99 * 1024,
                  "as swizzle, ldmatrix and sm_86 want");
    static_assert(OUTS * CHUNKS % THREADS == 0 && ROWS * CHUNKS % THREADS == 0, "copies are shared evenly");
};
using fast_few = fast_shape<32, 16, 2, 1, 128, 6>;
using fast_some = fast_shape<32, 64, 2, 2, 128, 4>;
using fast_many = fast_shape<128, 128, 2, 4, 64, 3>;

template <class S> static __device__ __forceinline__ uint4 *chunk_at(uint4 *stage, uint32_t row, uint32_t chunk)
{
    return stage + row * S::CHUNKS + (chunk ^ (row % 8));
}

/* Loads N rows of a stage, from k0 on. Numbers beyond n_rows or the stride become zero. */
template <class S, uint32_t N>
static __device__ __forceinline__ void copy_rows(uint4 *stage, const uint16_t *from, size_t stride, uint32_t n_rows,
                                                 uint32_t k0, uint32_t n_k)
{
#pragma unroll
    for (uint32_t i = 0; i < N * S::CHUNKS / S::THREADS; i++) {
        uint32_t at = i * S::THREADS + threadIdx.x, row = at / S::CHUNKS, chunk = at % S::CHUNKS, k = k0 + chunk * 8;
        bool valid = row < n_rows && k < n_k;
        copy_async16(chunk_at<S>(stage, row, chunk), valid ? from + row * stride + k : from, valid);
    }
}

/* One step of 16 k's, for everything that a warp computes. */
template <class S>
static __device__ __forceinline__ void multiply_step(uint4 *w, uint4 *x, uint32_t step,
                                                     float (*sum)[S::ROW_FRAGMENTS][4])
{
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t out0 = warp / S::WARPS_ROW * S::WARP_OUTS, row0 = warp % S::WARPS_ROW * S::WARP_ROWS;
    uint32_t a[S::OUT_FRAGMENTS][4], b[S::ROW_FRAGMENTS / 2][4];
#pragma unroll
    for (uint32_t i = 0; i < S::OUT_FRAGMENTS; i++)
        load_matrix4(a[i], chunk_at<S>(w, out0 + i * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
    for (uint32_t j = 0; j < S::ROW_FRAGMENTS / 2; j++)
        load_matrix4(b[j], chunk_at<S>(x, row0 + j * 16 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
#pragma unroll
    for (uint32_t i = 0; i < S::OUT_FRAGMENTS; i++)
#pragma unroll
        for (uint32_t j = 0; j < S::ROW_FRAGMENTS; j++)
            multiply_16x8x16(sum[i][j], a[i], b[j / 2] + j % 2 * 2);
}

template <class S>
static __device__ __forceinline__ void put_sums(const struct target &to, const float (*sum)[S::ROW_FRAGMENTS][4])
{
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t out0 = warp / S::WARPS_ROW * S::WARP_OUTS + lane / 4;
    uint32_t row0 = warp % S::WARPS_ROW * S::WARP_ROWS + lane % 4 * 2;
#pragma unroll
    for (uint32_t i = 0; i < S::OUT_FRAGMENTS; i++)
#pragma unroll
        for (uint32_t j = 0; j < S::ROW_FRAGMENTS; j++)
#pragma unroll
            for (uint32_t r = 0; r < 4; r++)
                put(to, row0 + j * 8 + r % 2, out0 + i * 16 + r / 2 * 8, sum[i][j][r]);
}

/* ---------------------------------------------------------------- launches */

static inline dim3 grid_of(const struct linear_job &job, uint32_t rows, uint32_t outs)
{
    uint32_t across = tiles(job.n_out, outs);
    return job.first ? dim3(job.p.n_rows / rows + job.n_matrices, across)
                     : dim3(tiles(job.p.n_rows, rows), across, job.n_matrices);
}

/* The average number of rows of a matrix. */
static inline uint32_t typical_rows(const struct linear_job &job)
{
    return job.first ? tiles(job.p.n_rows, job.n_matrices) : job.p.n_rows;
}
