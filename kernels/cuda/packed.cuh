/*
 * Packed matrices (cuda.h), as kernels read them: where codes and scales are, and the numbers of bf16 that
 * codes stand for.
 */
#pragma once

#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/packed.h"

static __device__ inline const void *weights_of(const struct linear_job &job, const struct tile &t)
{
    return job.datas ? job.datas[t.matrix] : job.data;
}

/* Bytes of a row of codes; the scales are behind all rows. */
static __device__ __forceinline__ uint32_t code_bytes(const struct linear_job &job)
{
    return job.stride * packed_bits(job.weights) / 8;
}

static __device__ __forceinline__ float scale_of(const struct linear_job &job, const void *w, enum k_weights weights,
                                                 uint32_t out, uint32_t k)
{
    const uint8_t *scales = (const uint8_t *)w + (size_t)job.n_out * code_bytes(job);
    size_t i = (size_t)out * (job.stride / K_GROUP) + k / K_GROUP;
    return weights == WEIGHTS_FP8 ? ((const float *)scales)[i] : scalar_from_bf16(((const uint16_t *)scales)[i]);
}

template <enum k_weights W> constexpr uint32_t codes_in_piece = W == WEIGHTS_INT4 ? 32 : 16; /* in 16 bytes */

/* Two neighbouring codes as bf16 numbers. */
template <enum k_weights W>
static __device__ __forceinline__ uint32_t widen_pair(uint32_t codes, uint32_t i, float scale)
{
    constexpr uint32_t BITS = W == WEIGHTS_INT4 ? 4 : 8, MASK = (1 << BITS) - 1;
    if constexpr (W == WEIGHTS_FP8) {
        float a, b;
        from_e4m3_pair(codes >> (2 * i * BITS), &a, &b);
        return pack_bf16(a * scale, b * scale);
    }
    uint8_t low = codes >> (2 * i * BITS) & MASK, high = codes >> ((2 * i + 1) * BITS) & MASK;
    return pack_bf16(packed_number(W, low) * scale, packed_number(W, high) * scale);
}

/* Chunk i (8 numbers of bf16) of a piece. */
template <enum k_weights W>
static __device__ __forceinline__ uint4 widen_chunk(const uint4 &piece, uint32_t i, float scale)
{
    constexpr uint32_t WORD = codes_in_piece<W> / 4; /* codes in 4 bytes */
    const uint32_t from[4] = {piece.x, piece.y, piece.z, piece.w};
    uint32_t words[4];
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
        uint32_t pair = 4 * i + j;
        words[j] = widen_pair<W>(from[2 * pair / WORD], pair % (WORD / 2), scale);
    }
    return {words[0], words[1], words[2], words[3]};
}
