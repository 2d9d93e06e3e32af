/*
 * What sampling needs to know of each row of logits, without the row leaving the device. The order of summation is plain C's
 * (16 lanes strided by 16, then a tree), so only half a warp adds; all others compute exponentials, a tile ahead of it.
 */
#include "kernels/cuda/cuda.h"
#include "kernels/scalar.h"

enum { LANES = 16, THREADS = 512, TILE = 8 * THREADS };

static constexpr uint32_t NONE = UINT32_MAX, ALL = 0xffffffff;

struct largest {
    float x;
    uint32_t at; /* NONE: nothing but NaNs so far */
};

static __device__ struct largest larger(struct largest a, struct largest b)
{
    if (b.at == NONE || (a.at != NONE && (a.x > b.x || (a.x == b.x && a.at < b.at))))
        return a;
    return b;
}

/* Of the threads that take part, the lanes of a warp; lane 0 has it. */
static __device__ struct largest largest_of_warp(struct largest a)
{
    for (uint32_t half = 16; half; half /= 2) {
        struct largest b = {__shfl_down_sync(ALL, a.x, half), __shfl_down_sync(ALL, a.at, half)};
        a = larger(a, b);
    }
    return a;
}

/* The same in all threads. */
static __device__ struct largest find_largest(const float *x, uint32_t n)
{
    __shared__ struct largest warps[THREADS / 32], all;
    struct largest a = {-__builtin_inff(), NONE};
    for (uint32_t i = threadIdx.x; i < n; i += THREADS)
        if (x[i] > a.x || (x[i] == a.x && a.at == NONE))
            a = {x[i], i};
    a = largest_of_warp(a);
    if (threadIdx.x % 32 == 0)
        warps[threadIdx.x / 32] = a;
    __syncthreads();
    if (threadIdx.x < 32) {
        struct largest none = {-__builtin_inff(), NONE};
        a = largest_of_warp(threadIdx.x < THREADS / 32 ? warps[threadIdx.x] : none);
        if (threadIdx.x == 0)
            all = a;
    }
    __syncthreads();
    return all;
}

/* In thread 0. A tile is written over only after those who add have come to the barrier of the next one. */
static __device__ float sum_exp(const float *x, float max, uint32_t n)
{
    __shared__ float tiles[2][TILE];
    float sum = 0;
    for (uint32_t first = 0; first < n; first += TILE) {
        float *tile = tiles[first / TILE % 2];
        uint32_t n_tile = min(n - first, (uint32_t)TILE);
        for (uint32_t i = threadIdx.x; i < n_tile; i += THREADS)
            tile[i] = scalar_exp(x[first + i] - max);
        __syncthreads();
        if (threadIdx.x < LANES)
#pragma unroll 8
            for (uint32_t i = threadIdx.x; i < n_tile; i += LANES)
                sum = sum + tile[i];
    }
    if (threadIdx.x < 32)
        for (uint32_t half = LANES / 2; half; half /= 2)
            sum = sum + __shfl_down_sync(ALL, sum, half);
    return sum;
}

static __global__ void __launch_bounds__(THREADS) best_rows(const float *logits, uint32_t n, struct k_best *out)
{
    const float *x = logits + (size_t)blockIdx.x * n;
    struct largest best = find_largest(x, n);
    struct k_best result = {best.at == NONE ? 0 : best.at, x[best.at == NONE ? 0 : best.at], best.x};
    if (best.x != __builtin_inff() && best.x != -__builtin_inff()) {
        float sum = sum_exp(x, best.x, n);
        result.logsumexp = threadIdx.x ? 0 : scalar_log(sum) + best.x;
    }
    if (threadIdx.x == 0)
        out[blockIdx.x] = result;
}

void cuda_best_rows(cudaStream_t stream, const float *logits, uint32_t n, uint32_t n_rows, struct k_best *out)
{
    if (n_rows)
        best_rows<<<n_rows, THREADS, 0, stream>>>(logits, n, out);
}
