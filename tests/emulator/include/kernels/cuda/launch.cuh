/* What kernels/cuda/launch.cuh declares, for the emulated device, on which kernels do not overlap. */
#pragma once

#include "kernels/cuda/cuda.h"

static inline void let_next_start(void)
{
}
static inline void wait_for_kernels_before(void)
{
}
static inline void begin_kernel(void)
{
}

template <class T> static inline T *dynamic_shared(void)
{
    return (T *)emulator::shared_memory;
}

/* Arguments are copied at the launch. */
template <class... P, class... A>
static void launch_kernel(cudaStream_t stream, void (*kernel)(P...), dim3 grid, uint32_t threads, size_t shared_bytes,
                          const A &...args)
{
    emulator::launch(stream, grid, dim3(threads), shared_bytes, [=] { kernel(static_cast<P>(args)...); });
}

template <class... P, class... A>
static void launch_next(cudaStream_t stream, void (*kernel)(P...), dim3 grid, uint32_t threads, size_t shared_bytes,
                        const A &...args)
{
    launch_kernel(stream, kernel, grid, threads, shared_bytes, args...);
}
