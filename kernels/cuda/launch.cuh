/*
 * Launches that overlap (programmatic dependent launch, CUDA C++ Programming Guide): on Hopper the blocks of
 * a kernel may be placed while the kernel before it ends, so that decoding steps, with hundreds of short
 * kernels, don't wait for each launch.
 *
 * A kernel that is launched by launch_next() calls wait_for_kernels_before() first thing, in every block and
 * on every path: only then is memory as the operations before it left it, and a later kernel, which waits
 * for this one alone, may rely on all before. What does not depend on earlier kernels, such as weights, may
 * be read before the call.
 */
#pragma once

#include "kernels/cuda/cuda.h"

/* Lets the next kernel be placed as soon as all blocks of this one are; it still waits for its end. */
static __device__ __forceinline__ void let_next_start(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

static __device__ __forceinline__ void wait_for_kernels_before(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

static __device__ __forceinline__ void begin_kernel(void)
{
    let_next_start();
    wait_for_kernels_before();
}

/* The memory that the launch gives each block, from a multiple of 1 KiB on. */
template <class T> static __device__ __forceinline__ T *dynamic_shared(void)
{
    extern __shared__ __align__(1024) uint8_t memory_of_the_launch[];
    return (T *)memory_of_the_launch;
}

/* A launch that waits for the kernels before it. */
template <class... P, class... A>
static void launch_kernel(cudaStream_t stream, void (*kernel)(P...), dim3 grid, uint32_t threads, size_t shared_bytes,
                          const A &...args)
{
    kernel<<<grid, threads, shared_bytes, stream>>>(static_cast<P>(args)...);
}

template <class... P, class... A>
static void launch_next(cudaStream_t stream, void (*kernel)(P...), dim3 grid, uint32_t threads, size_t shared_bytes,
                        const A &...args)
{
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = grid;
    c.blockDim = dim3(threads);
    c.dynamicSmemBytes = shared_bytes;
    c.stream = stream;
    c.attrs = &overlap;
    c.numAttrs = cuda_launches_overlap() ? 1 : 0;
    cudaLaunchKernelEx(&c, kernel, static_cast<P>(args)...);
}
