/* Limits of a device: reading its memory, and arithmetic in f32. */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/scalar.h"

enum { THREADS = 256, LOADS = 8, CHAINS = 8, STEPS = 4096, BLOCKS_EACH = 16 /* for each multiprocessor */ };

static uint32_t n_blocks(void)
{
    return BLOCKS_EACH * device_number(cudaDevAttrMultiProcessorCount);
}

/* The compiler can't predict the sum, so it can't leave a read out. One value of 2^32 is stored. */
static __global__ void __launch_bounds__(THREADS) read_all(const uint4 *from, size_t n, uint32_t *to)
{
    uint32_t sum = 0;
    for (size_t i = (size_t)blockIdx.x * THREADS * LOADS + threadIdx.x; i < n;
         i += (size_t)gridDim.x * THREADS * LOADS) {
        uint4 x[LOADS];
#pragma unroll
        for (uint32_t j = 0; j < LOADS; j++)
            x[j] = i + j * THREADS < n ? from[i + j * THREADS] : uint4{0, 0, 0, 0};
#pragma unroll
        for (uint32_t j = 0; j < LOADS; j++)
            sum += x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
    }
    if (sum == 0x9e3779b9)
        *to = sum;
}

void cuda_read_all(cudaStream_t stream, const void *from, size_t len_bytes, void *to)
{
    launch_kernel(stream, read_all, n_blocks(), THREADS, 0, (const uint4 *)from, len_bytes / sizeof(uint4),
                  (uint32_t *)to);
}

static __global__ void __launch_bounds__(THREADS) multiply_add(float *to)
{
    float x[CHAINS], a = 0.999f + 1e-6f * (float)threadIdx.x;
#pragma unroll
    for (uint32_t j = 0; j < CHAINS; j++)
        x[j] = (float)j;
    for (uint32_t i = 0; i < STEPS; i++)
#pragma unroll
        for (uint32_t j = 0; j < CHAINS; j++)
            x[j] = scalar_fma(x[j], a, 1.0f);
    float sum = 0;
#pragma unroll
    for (uint32_t j = 0; j < CHAINS; j++)
        sum += x[j];
    if (sum < 0) /* never true */
        *to = sum;
}

double cuda_multiply_add(cudaStream_t stream, void *to)
{
    launch_kernel(stream, multiply_add, n_blocks(), THREADS, 0, (float *)to);
    return 2.0 * n_blocks() * THREADS * CHAINS * STEPS;
}
