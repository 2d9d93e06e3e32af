/*
 * What kernels/cuda/hopper.cuh declares, for the emulated device. Barriers and operands are laid out as
 * the PTX manual has them, so that the addresses which kernels compute are tested, too; registers are not
 * counted.
 */
#pragma once

#include "kernels/cuda/ptx.cuh"

static constexpr bool IS_HOPPER = true;

static inline uint32_t shared_address(const void *shared)
{
    return (uint32_t)((const uint8_t *)shared - emulator::shared_memory);
}

/* ----------------------------------------------------------------- barriers */

static inline void barrier_init(uint64_t *barrier, uint32_t n)
{
    emulator::barrier_init(barrier, n);
}

static inline void barrier_arrive(uint64_t *barrier)
{
    emulator::barrier_arrive(barrier, 0);
}

static inline void barrier_expect(uint64_t *barrier, uint32_t len_bytes)
{
    emulator::barrier_arrive(barrier, len_bytes);
}

static inline void barrier_wait(uint64_t *barrier, uint32_t parity)
{
    emulator::barrier_wait(barrier, parity);
}

static inline void fence_async(void)
{
}
template <int N> static inline void registers_give(void)
{
}
template <int N> static inline void registers_take(void)
{
}
static inline void fence_map(const void *)
{
}

static inline void copy_box(void *shared, const void *map, uint64_t *barrier, uint32_t row, uint32_t slab,
                            uint32_t part)
{
    emulator::copy_box_later(shared, map, barrier, row, slab, part);
}

/* ----------------------------------------------------------------- products */

static inline uint64_t operand_at(const void *shared, uint32_t columns_bytes = 16)
{
    return (shared_address(shared) & 0x3ffff) >> 4 | (uint64_t)(columns_bytes >> 4) << 16 |
           (uint64_t)(1024 >> 4) << 32 | 1ull << 62;
}

static inline uint64_t operand_further(uint64_t operand, uint32_t bytes)
{
    return operand + (bytes >> 4);
}

static inline void multiply_fence(void)
{
}

static inline void multiply_commit(void)
{
    emulator::products_commit();
}

template <int PENDING> static inline void multiply_wait(void)
{
    emulator::products_wait(PENDING);
}

template <int PENDING, int N> static inline void multiply_wait(float (&)[N][4])
{
    emulator::products_wait(PENDING);
}

template <int N> static inline void multiply_64(float (&d)[N][4], uint64_t a, uint64_t b)
{
    emulator::multiply_later({&d[0][0], N, NULL, a, b, false});
}

template <int N> static inline void multiply_64(float (&d)[N][4], const uint32_t (&a)[4], uint64_t b)
{
    emulator::multiply_later({&d[0][0], N, a, 0, b, false});
}

template <int N> static inline void multiply_64_transposed(float (&d)[N][4], const uint32_t (&a)[4], uint64_t b)
{
    emulator::multiply_later({&d[0][0], N, a, 0, b, true});
}
