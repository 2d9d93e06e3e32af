/*
 * Stages of shared memory that a producer fills and consumers empty, in turn, on Hopper. Whoever walks along them has a turn of its own;
 * all walk the same way.
 */
#pragma once

#include "kernels/cuda/hopper.cuh"

template <uint32_t N> struct stages {
    uint64_t full[N], empty[N];

    /* One thread calls it; all of the CTA go on after a barrier. */
    __device__ __forceinline__ void init(uint32_t n_fill, uint32_t n_empty)
    {
        for (uint32_t i = 0; i < N; i++) {
            barrier_init(&full[i], n_fill);
            barrier_init(&empty[i], n_empty);
        }
        fence_async();
    }
};

template <uint32_t N> struct turn {
    uint32_t stage = 0, parity = 0;

    __device__ __forceinline__ void next(void)
    {
        stage = stage + 1 < N ? stage + 1 : 0;
        parity ^= stage == 0;
    }
};

template <uint32_t N> static __device__ __forceinline__ void wait_full(struct stages<N> *s, const struct turn<N> &t)
{
    barrier_wait(&s->full[t.stage], t.parity);
}

/* At once, the first time around. */
template <uint32_t N> static __device__ __forceinline__ void wait_empty(struct stages<N> *s, const struct turn<N> &t)
{
    barrier_wait(&s->empty[t.stage], t.parity ^ 1);
}

/* What the warp has read of the stage may be overwritten: one of its threads says so. */
template <uint32_t N> static __device__ __forceinline__ void release(struct stages<N> *s, uint32_t stage)
{
    if (threadIdx.x % 32 == 0)
        barrier_arrive(&s->empty[stage]);
}
