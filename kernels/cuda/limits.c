/* Limits of a device (bench/kernels_bench.h). */
#include "kernels/cuda/state.h"

enum { LARGEST_PRODUCT = 8192 };

/* Copies one piece after another into the buffer for reads; no read may be in flight. */
static double read_link(struct cuda *c, const uint8_t *memory, size_t len_bytes)
{
    cuda_finish(&c->base);
    size_t n = len_bytes < CUDA_READS_BYTES ? len_bytes : CUDA_READS_BYTES;
    for (size_t at = 0; at + n <= len_bytes; at += n)
        CUDA_MUST(cudaMemcpyAsync(c->reads.host, memory + at, n, cudaMemcpyDeviceToHost, c->stream));
    return (double)(len_bytes / n * n);
}

/* The largest square product of cuBLAS that fits: two matrices of bf16, one of f32. */
static double multiply(struct cuda *c, uint8_t *memory, size_t len_bytes)
{
    size_t n = LARGEST_PRODUCT;
    while (n * n * 8 > len_bytes)
        n /= 2;
    struct cuda_matrix m = {.compute = COMPUTE_BF16, .type = NUM_BF16, .data = memory};
    m.n_out = m.n_in = m.stride = (uint32_t)n;
    struct cuda_product p = {.x = memory + n * n * 2, .x_stride = n, .y_stride = n, .n_rows = (uint32_t)n};
    p.y = (float *)(void *)(memory + n * n * 4);
    return cuda_product_blas(c, &m, &p) ? 2.0 * (double)n * (double)n * (double)n : 0;
}

double cuda_run_limit(struct kernels *k, enum kernels_limit limit, void *memory, size_t len_bytes)
{
    struct cuda *c = cuda_enter(k);
    double amount = 0;
    switch (limit) {
    case LIMIT_READ:
        cuda_read_all(c->stream, memory, len_bytes, memory);
        amount = (double)len_bytes;
        break;
    case LIMIT_COPY:
        CUDA_MUST(
            cudaMemcpyAsync((uint8_t *)memory + len_bytes, memory, len_bytes, cudaMemcpyDeviceToDevice, c->stream));
        amount = (double)len_bytes;
        break;
    case LIMIT_LINK:
        amount = read_link(c, memory, len_bytes);
        break;
    case LIMIT_F32:
        amount = cuda_multiply_add(c->stream, memory);
        break;
    case LIMIT_BF16:
        amount = multiply(c, memory, 2 * len_bytes);
        break;
    case LIMIT_READ_ONE: /* one thread of a device says nothing */
    case N_LIMITS:
        break;
    }
    CUDA_MUST(cudaGetLastError());
    return amount;
}
