/*
 * Instructions of Hopper (sm_90a), one function each: barriers and bulk copies of tensors (PTX manual,
 * sections 9.7.13.15 and 9.7.9.27), and products by warpgroups, which are four consecutive warps from a
 * multiple of four on (section 9.7.15).
 *
 * Order within a warpgroup: multiply_fence() before the first product on registers that other code wrote; any
 * number of products; multiply_commit(); multiply_wait(). Between a product and its wait nothing may touch
 * its registers, or the shared memory that it reads. Products and bulk copies access shared memory through
 * the asynchronous proxy: a thread that wrote there by other means calls fence_async() before it tells
 * others.
 *
 * Operands in shared memory: rows of 128 bytes (64 bf16). Eight rows are an atom of 1024 bytes, aligned to
 * 1024. Chunk c of 16 bytes of row r is at c ^ (r % 8): the 128-byte swizzle of tensor maps.
 */
#pragma once

#include <stdint.h>

#include "kernels/cuda/ptx.cuh"

/* In images for other devices these kernels have no body; launching them there is a mistake. */
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
static constexpr bool IS_HOPPER = false;
#else
static constexpr bool IS_HOPPER = true;
#endif

static __device__ __forceinline__ uint32_t shared_address(const void *shared)
{
    return (uint32_t)__cvta_generic_to_shared(shared);
}

/* ----------------------------------------------------------------- barriers */

/*
 * A barrier is eight bytes in shared memory. A phase ends when n threads have arrived and the expected bytes
 * are there; then the next phase begins. Phases have parities 0, 1, 0, ... Waiting for the parity of the
 * phase before the first one returns at once.
 */
static __device__ __forceinline__ void barrier_init(uint64_t *barrier, uint32_t n)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(n) : "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/* Arrives; the phase also waits for len_bytes of bulk copies. */
static __device__ __forceinline__ void barrier_expect(uint64_t *barrier, uint32_t len_bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(len_bytes)
                 : "memory");
}

static __device__ __forceinline__ void barrier_wait(uint64_t *barrier, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred over;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
                 "@!over bra again;\n"
                 "}" ::"r"(shared_address(barrier)),
                 "r"(parity)
                 : "memory");
}

/*
 * Orders the thread's writes to shared memory before accesses of the asynchronous proxy that follow a
 * barrier.
 */
static __device__ __forceinline__ void fence_async(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* -------------------------------------------------------------- registers */

/* Changes the registers of each thread of the warpgroup (section 9.7.19.5). Taking waits for giving. */
template <int N> static __device__ __forceinline__ void registers_give(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> static __device__ __forceinline__ void registers_take(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

/* ------------------------------------------------------------------- copies */

/* After this, a tensor map that the host wrote to global memory can be used. */
static __device__ __forceinline__ void fence_map(const void *map)
{
    asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}

/* Copies the box of a map that begins at a row and slab of a part; zeros outside. Called by one thread. */
static __device__ __forceinline__ void copy_box(void *shared, const void *map, uint64_t *barrier, uint32_t row,
                                                uint32_t slab, uint32_t part)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
                 "%5, %6}], [%2];" ::"r"(shared_address(shared)),
                 "l"(map), "r"(shared_address(barrier)), "r"(0), "r"(row), "r"(slab), "r"(part)
                 : "memory");
}

/* ----------------------------------------------------------------- products */

/*
 * The descriptor of an operand in shared memory (section 9.7.15.5.1.2.2). Its atoms are in rows: the next
 * eight rows are one atom further. Bits 0-13, 16-29 and 32-45 are in units of 16 bytes.
 *
 *      0-13  start address; 16 numbers further along a row is 32 bytes further
 *     16-29  transposed only: distance from 64 columns to the next 64
 *     32-45  distance from eight rows to the next eight: an atom
 *     62-63  1: swizzle of 128 bytes
 */
static __device__ __forceinline__ uint64_t operand_at(const void *shared, uint32_t columns_bytes = 16)
{
    return (shared_address(shared) & 0x3ffff) >> 4 | (uint64_t)(columns_bytes >> 4) << 16 |
           (uint64_t)(1024 >> 4) << 32 | 1ull << 62;
}

/* The same operand, `bytes` further. */
static __device__ __forceinline__ uint64_t operand_further(uint64_t operand, uint32_t bytes)
{
    return operand + (bytes >> 4);
}

static __device__ __forceinline__ void multiply_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void multiply_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Waits until at most PENDING of the warp's groups are in flight. */
template <int PENDING> static __device__ __forceinline__ void multiply_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* The same; d: registers of products that are then complete. */
template <int PENDING, int N> static __device__ __forceinline__ void multiply_wait(float (&d)[N][4])
{
    multiply_wait<PENDING>();
#pragma unroll
    for (int n = 0; n < N; n++)
        asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
}

/*
 * d[64][8 N] += a[64][16] b[16][8 N], bf16 in, f32 out. A thread holds the part of d that it would have of N
 * products m16n8k16; warp w has the rows from 16 w on. a is in shared memory, with k along a row, or in
 * registers, as m16n8k16 takes it. b is in shared memory, with k along a row or, transposed, with one row for
 * each k.
 */
#define SUMS_1(n)  "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define SUMS_4(n)  SUMS_1(n), SUMS_1(n + 1), SUMS_1(n + 2), SUMS_1(n + 3)
#define SUMS_8(n)  SUMS_4(n), SUMS_4(n + 4)
#define SUMS_16(n) SUMS_8(n), SUMS_8(n + 8)
#define SUMS_32(n) SUMS_16(n), SUMS_16(n + 16)
#define NAMES_1    "%0, %1, %2, %3"
#define NAMES_4                                                                                                        \
    "%0, %1, %2, %3, %4, %5, %6, %7"                                                                                   \
    ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_8                                                                                                        \
    NAMES_4 ", %16, %17, %18, %19, %20, %21, %22, %23"                                                                 \
            ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_16                                                                                                       \
    NAMES_8 ", %32, %33, %34, %35, %36, %37, %38, %39"                                                                 \
            ", %40, %41, %42, %43, %44, %45, %46, %47"                                                                 \
            ", %48, %49, %50, %51, %52, %53, %54, %55"                                                                 \
            ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_32                                                                                                       \
    NAMES_16 ", %64, %65, %66, %67, %68, %69, %70, %71"                                                                \
             ", %72, %73, %74, %75, %76, %77, %78, %79"                                                                \
             ", %80, %81, %82, %83, %84, %85, %86, %87"                                                                \
             ", %88, %89, %90, %91, %92, %93, %94, %95"                                                                \
             ", %96, %97, %98, %99, %100, %101, %102, %103"                                                            \
             ", %104, %105, %106, %107, %108, %109, %110, %111"                                                        \
             ", %112, %113, %114, %115, %116, %117, %118, %119"                                                        \
             ", %120, %121, %122, %123, %124, %125, %126, %127"

#define MULTIPLY(N, A, B, SOURCE, TAIL, ...)                                                                           \
    asm volatile("{\n"                                                                                                 \
                 ".reg .pred adds;\n"                                                                                  \
                 "setp.eq.u32 adds, 0, 0;\n"                                                                           \
                 "wgmma.mma_async.sync.aligned.m64n" SOURCE "k16.f32.bf16.bf16 {" NAMES_##N "}, " A ", " B             \
                                                                                            ", adds, 1, 1" TAIL ";\n"  \
                                                                                            "}"                        \
                 : SUMS_##N(0)                                                                                         \
                 : __VA_ARGS__                                                                                         \
                 : "memory")

#define MULTIPLY_SHARED(N, WIDTH, A, B)                                                                                \
    static __device__ __forceinline__ void multiply_64(float(&d)[N][4], uint64_t a, uint64_t b)                        \
    {                                                                                                                  \
        MULTIPLY(N, A, B, WIDTH, ", 0, 0", "l"(a), "l"(b));                                                            \
    }
MULTIPLY_SHARED(1, "8", "%4", "%5")
MULTIPLY_SHARED(4, "32", "%16", "%17")
MULTIPLY_SHARED(8, "64", "%32", "%33")
MULTIPLY_SHARED(16, "128", "%64", "%65")
MULTIPLY_SHARED(32, "256", "%128", "%129")

#define MULTIPLY_REGISTERS(NAME, N, WIDTH, A, B, TRANSPOSED)                                                           \
    static __device__ __forceinline__ void NAME(float(&d)[N][4], const uint32_t(&a)[4], uint64_t b)                    \
    {                                                                                                                  \
        MULTIPLY(N, A, B, WIDTH, ", " TRANSPOSED, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                 \
    }
MULTIPLY_REGISTERS(multiply_64, 8, "64", "{%32, %33, %34, %35}", "%36", "0")
MULTIPLY_REGISTERS(multiply_64_transposed, 8, "64", "{%32, %33, %34, %35}", "%36", "1")
MULTIPLY_REGISTERS(multiply_64_transposed, 16, "128", "{%64, %65, %66, %67}", "%68", "1")
