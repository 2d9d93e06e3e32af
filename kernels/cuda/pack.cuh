/*
 * Groups of numbers that a thread loads and stores at once, and arithmetic for their launches.
 */
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "kernels/cuda/ptx.cuh"

template <class T, int N> struct alignas(sizeof(T) * N) pack {
    T at[N];
};

template <int N, class T> static __device__ __forceinline__ pack<T, N> load(const T *x)
{
    return *(const pack<T, N> *)x;
}

template <class T, int N> static __device__ __forceinline__ void store(T *y, const pack<T, N> &v)
{
    *(pack<T, N> *)y = v;
}

/* Stores numbers as bf16, rounded to nearest even. */
template <int N> static __device__ __forceinline__ void store_rounded(uint16_t *y, const pack<float, N> &v)
{
    pack<uint16_t, N> out;
    for (int j = 0; j < N; j++)
        out.at[j] = to_bf16(v.at[j]);
    store(y, out);
}

/* Whether floats that begin at p, with these distances, can be accessed four at a time. */
static inline bool by_four(const void *p, size_t stride, size_t step)
{
    return (uintptr_t)p % 16 == 0 && stride % 4 == 0 && step % 4 == 0;
}

/* An attribute of the current device. */
static inline uint32_t device_number(enum cudaDeviceAttr what)
{
    int device = 0, n = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&n, what, device);
    return (uint32_t)n;
}

static inline uint32_t pieces(size_t n, uint32_t of)
{
    return (uint32_t)((n + of - 1) / of);
}
