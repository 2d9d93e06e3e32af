/*
 * Instructions that CUDA C++ has no name for, one function each. Fragments are drawn in the PTX manual
 * (section 9.7.14).
 */
#pragma once

#include <stdint.h>

#include "kernels/scalar.h"

/* Copies 16 bytes from global to shared memory, asynchronously; writes zeros if not valid. */
static __device__ __forceinline__ void copy_async16(void *shared, const void *from, bool valid)
{
    uint32_t to = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

static __device__ __forceinline__ void copy_async_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most PENDING of the thread's groups are in flight. */
template <int PENDING> static __device__ __forceinline__ void copy_async_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/*
 * Loads four 8 x 8 matrices of 16-bit numbers. Lane l gives the address of row l % 8 (16 bytes) of matrix l /
 * 8.
 */
static __device__ __forceinline__ void load_matrix4(uint32_t r[4], const void *row)
{
    uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

/* The same, with each matrix transposed. */
static __device__ __forceinline__ void load_matrix4_transposed(uint32_t r[4], const void *row)
{
    uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

/* d[16 x 8] += a[16 x 16] b[16 x 8], a row-major, b column-major, bf16 in, f32 out. */
static __device__ __forceinline__ void multiply_16x8x16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* The nearest bf16, even ones at ties. */
static __device__ __forceinline__ uint16_t to_bf16(float x)
{
    uint16_t rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(x));
    return rounded;
}

/* Two bf16 (nearest even) in a word: low half, high half. */
static __device__ __forceinline__ uint32_t pack_bf16(float low, float high)
{
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

/* Two neighbouring numbers of e4m3, exactly. */
static __device__ __forceinline__ void from_e4m3_pair(uint32_t codes, float *low, float *high)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm("{ .reg .b32 halves; .reg .f16 l, h; cvt.rn.f16x2.e4m3x2 halves, %2; mov.b32 {l, h}, halves;\n"
        "cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(*low), "=f"(*high)
        : "h"((uint16_t)codes));
#else
    *low = scalar_from_e4m3((uint8_t)codes);
    *high = scalar_from_e4m3((uint8_t)(codes >> 8));
#endif
}

/* 2^x within 2 ulp. Subnormal results become zero; 2^-inf is 0. */
static __device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
