/*
 * Stages of shared memory that a producer fills and consumers empty, in turn, on Hopper. Each warp that walks
 * along the stages has a turn of its own; all walk in the same order.
 */
#pragma once

#include "kernels/cuda/hopper.cuh"

template <uint32_t N_, uint32_t BYTES_> struct stages {
    static constexpr uint32_t N = N_, BYTES = BYTES_;
    static_assert(BYTES % 1024 == 0, "every stage begins with an atom (hopper.cuh), as shared memory does");
    uint8_t data[N][BYTES];
    uint64_t full[N], empty[N];

    /* Called by one thread; a barrier of the whole CTA must follow. */
    __device__ __forceinline__ void init(uint32_t n_fill, uint32_t n_empty)
    {
        for (uint32_t i = 0; i < N; i++) {
            barrier_init(&full[i], n_fill);
            barrier_init(&empty[i], n_empty);
        }
        fence_async();
    }
};

template <class S> struct turn {
    uint32_t stage = 0, parity = 0;

    __device__ __forceinline__ void next(void)
    {
        stage = stage + 1 < S::N ? stage + 1 : 0;
        parity ^= stage == 0;
    }
};

/* Waits until the stage is full, and returns its memory. */
template <class S> static __device__ __forceinline__ const uint8_t *wait_full(S *s, const struct turn<S> &t)
{
    barrier_wait(&s->full[t.stage], t.parity);
    return s->data[t.stage];
}

/* Waits until the stage may be filled, which is at once in the first round, and returns its memory. */
template <class S> static __device__ __forceinline__ uint8_t *wait_empty(S *s, const struct turn<S> &t)
{
    barrier_wait(&s->empty[t.stage], t.parity ^ 1);
    return s->data[t.stage];
}

/* Tells, by one thread of the warp, that what the warp has read of the stage may be overwritten. */
template <class S> static __device__ __forceinline__ void release(S *s, uint32_t stage)
{
    if (threadIdx.x % 32 == 0)
        barrier_arrive(&s->empty[stage]);
}
