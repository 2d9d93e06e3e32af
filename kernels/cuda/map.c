/*
 * Tensor maps: what Hopper's tensor memory accelerator needs to know of a matrix to copy boxes of it into
 * shared memory. The driver encodes them. The runtime finds the driver's function, so the driver is not
 * linked.
 */
#include <assert.h>
#include <string.h>

#include "kernels/cuda/state.h"

/* MAP_DRIVER: the first driver that has tensor maps. */
enum { MAP_DRIVER = 12000, RANK = 4 };

bool cuda_map_open(struct cuda *c)
{
    void *found = NULL;
    enum cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    cudaError_t e =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, MAP_DRIVER, cudaEnableDefault, &result);
    if (e != cudaSuccess || result != cudaDriverEntryPointSuccess) {
        cudaGetLastError(); /* clears the error, so that the next operation does not see it */
        return false;
    }
    memcpy(&c->encode_map, &found, sizeof(found)); /* ISO C has no cast from a data pointer to a function */
    return true;
}

void cuda_map_rows(struct cuda *c, const struct cuda_mapped *m, uint32_t box_rows, uint32_t box_slabs,
                   struct cuda_map *out)
{
    assert(m->stride % CUDA_SLAB_NUMBERS == 0);
    const cuuint64_t number = sizeof(uint16_t);
    const cuuint64_t dims[RANK] = {CUDA_SLAB_NUMBERS, m->n_rows, m->stride / CUDA_SLAB_NUMBERS, m->n_parts};
    /* In bytes, of all dimensions but the first. */
    const cuuint64_t strides[RANK - 1] = {m->row_stride * number, CUDA_SLAB_NUMBERS * number, m->stride * number};
    const cuuint32_t box[RANK] = {CUDA_SLAB_NUMBERS, box_rows, box_slabs, 1}, steps[RANK] = {1, 1, 1, 1};
    CUtensorMap map;
    CUresult r = c->encode_map(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, RANK, (void *)(uintptr_t)m->data, dims, strides,
                               box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS)
        cuda_die(__func__, "cuTensorMapEncodeTiled refused");
    static_assert(sizeof(*out) == sizeof(map), "a map is copied as it is");
    memcpy(out, &map, sizeof(map));
}
