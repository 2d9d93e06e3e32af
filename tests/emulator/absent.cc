/* Hopper's instructions, which the emulated device does not have. */
#include <stdlib.h>

#include "kernels/cuda/attention_tile.cuh"

void attend_hopper(cudaStream_t, const struct attention &, const struct form &, uint32_t, bool)
{
    abort();
}

cudaError_t cuda_linear_hopper_open(bool *has_out)
{
    *has_out = false;
    return cudaSuccess;
}

bool cuda_launches_overlap(void)
{
    return false;
}

uint32_t cuda_hopper_shapes(void)
{
    return 0;
}

struct cuda_tile cuda_hopper_tile(uint32_t)
{
    abort();
}

uint32_t cuda_hopper_choose(const struct cuda_matrix *, uint32_t, uint32_t, bool)
{
    abort();
}

void cuda_linear_hopper(cudaStream_t, const struct cuda_matrix *, const struct cuda_product *, uint32_t,
                        const struct cuda_map *)
{
    abort();
}

void cuda_each_hopper(cudaStream_t, const struct cuda_stack *, const struct cuda_product *, uint32_t,
                      const struct cuda_map *, size_t)
{
    abort();
}

void cuda_sorted_hopper(cudaStream_t, const struct cuda_stack *, const struct cuda_product *, uint32_t,
                        const struct cuda_map *, const uint32_t *)
{
    abort();
}
