/*
 * How kernels run on the CPU: the words of CUDA C++ that kernels/cuda uses, for a C++ compiler.
 *
 * Threads of a block are fibers of one thread of the CPU, and blocks run one after another. A fiber runs
 * until it waits for others: at __syncthreads(), or at an operation of its warp. So between two such
 * places any order of the threads is possible on a device, and here one of two is taken, in turn:
 * ascending or descending. What a kernel relies on without waiting for it is then wrong in half of its
 * blocks, at least. A block in which threads wait for each other in vain, or whose warp does different
 * operations at once, ends the process with a message.
 *
 * Shared memory begins with bytes that are a NaN, and ends with bytes that must not change. Copies by
 * cp.async and products of warpgroups happen when the thread waits for them, and copies of boxes when no
 * thread can go on without them; until then the targets of copies are NaN, too. This finds mistakes in
 * what kernels say; it says nothing about a device that differs from its manual, nor about speed.
 *
 * One kernel runs at a time (the lock of runtime.cc).
 */
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__   static /* blocks run one after another */
#define __align__(n) alignas(n)

struct uint3 {
    uint32_t x, y, z;
};

struct dim3 {
    uint32_t x, y, z;
    dim3(uint32_t x_ = 1, uint32_t y_ = 1, uint32_t z_ = 1) : x(x_), y(y_), z(z_)
    {
    }
};

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return {x, y, z, w};
}

namespace emulator
{
enum { WARP = 32, SLOT_BYTES = 32, SHARED_BYTES = 227 << 10 /* the most */, MARGIN_BYTES = 1 << 10 };

/* What the lanes of a warp do together: all of a mask must do the same. */
enum operation { SHUFFLE, BALLOT, MATCH, SYNC, LOAD_MATRIX, MULTIPLY, WAIT_PRODUCTS };

struct alignas(16) slot { /* what a lane brings */
    uint8_t bytes[SLOT_BYTES];
};

/* Of the thread that runs. */
extern uint3 thread_index, block_index;
extern dim3 block_size, grid_size;
extern uint8_t shared_memory[]; /* [SHARED_BYTES], and a margin */

/* Waits for the lanes of the mask, of which the caller is one. Returns what each of the warp's lanes
 * brought, valid until the caller's next call. combine, if not NULL, is called once: it makes results of
 * it in place. */
const slot *meet(uint32_t mask, operation what, const void *mine, size_t len_bytes, void (*combine)(slot *all) = NULL);
void meet_block(void);

void copy_later(void *to, const void *from, bool valid); /* 16 bytes; cp.async */
void copies_commit(void);
void copies_wait(uint32_t pending);

/* Barriers in shared memory, copies of boxes to it, and products of warpgroups (hopper.cc). */
struct product { /* a lane's part: d[n][4] */
    float *d;
    uint32_t n;
    const uint32_t *a; /* [4]; NULL: a is in shared memory */
    uint64_t shared_a, b;
    bool transposed;
};
void barrier_init(uint64_t *barrier, uint32_t n);
void barrier_arrive(uint64_t *barrier, uint32_t len_bytes);
void barrier_wait(uint64_t *barrier, uint32_t parity);
void copy_box_later(void *shared, const void *map, uint64_t *barrier, uint32_t row, uint32_t slab, uint32_t part);
void multiply_later(const struct product &p);
void products_commit(void);
void products_wait(uint32_t pending);

/* Queues a kernel; `thread` is what one thread does. */
void launch(struct emulated_stream *stream, dim3 grid, dim3 block, size_t shared_bytes, std::function<void()> thread);

static inline uint32_t lane(void)
{
    return thread_index.x % WARP;
}

template <class T> static inline T value_of(const slot &s)
{
    T value;
    static_assert(sizeof(value) <= SLOT_BYTES, "a slot is large enough");
    memcpy(&value, s.bytes, sizeof(value));
    return value;
}

/* The value that lane `from` brings; one's own if there is no such lane. */
template <class T> static inline T shuffle(uint32_t mask, T mine, int64_t from)
{
    const slot *all = meet(mask, SHUFFLE, &mine, sizeof(mine));
    return from < 0 || from >= WARP ? mine : value_of<T>(all[from]);
}
} // namespace emulator

template <class K> static inline cudaError_t cudaFuncSetAttribute(K *, enum cudaFuncAttribute, int shared_bytes)
{
    return shared_bytes <= emulator::SHARED_BYTES ? cudaSuccess : cudaErrorInvalidValue;
}

struct cudaFuncAttributes {
    int ptxVersion; /* of the image that runs */
};

template <class K> static inline cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, K *)
{
    int major = 0;
    cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
    out->ptxVersion = 10 * major;
    return e;
}

#define threadIdx emulator::thread_index
#define blockIdx  emulator::block_index
#define blockDim  emulator::block_size
#define gridDim   emulator::grid_size

static inline void __syncthreads(void)
{
    emulator::meet_block();
}

static inline void __syncwarp(uint32_t mask = 0xffffffff)
{
    emulator::meet(mask, emulator::SYNC, NULL, 0);
}

template <class T> static inline T __shfl_sync(uint32_t mask, T x, uint32_t from)
{
    return emulator::shuffle(mask, x, from % emulator::WARP);
}

/* Among the `width` lanes around one's own. */
template <class T> static inline T __shfl_xor_sync(uint32_t mask, T x, uint32_t with, uint32_t width = emulator::WARP)
{
    uint32_t lane = emulator::lane(), other = lane ^ with;
    return emulator::shuffle(mask, x, other / width == lane / width ? other : lane);
}

template <class T> static inline T __shfl_up_sync(uint32_t mask, T x, uint32_t apart)
{
    return emulator::shuffle(mask, x, (int64_t)emulator::lane() - apart);
}

template <class T> static inline T __shfl_down_sync(uint32_t mask, T x, uint32_t apart)
{
    return emulator::shuffle(mask, x, (int64_t)emulator::lane() + apart);
}

static inline uint32_t __ballot_sync(uint32_t mask, bool mine)
{
    const emulator::slot *all = emulator::meet(mask, emulator::BALLOT, &mine, sizeof(mine));
    uint32_t votes = 0;
    for (uint32_t i = 0; i < emulator::WARP; i++)
        if (mask >> i & 1 && emulator::value_of<bool>(all[i]))
            votes |= 1u << i;
    return votes;
}

template <class T> static inline uint32_t __match_any_sync(uint32_t mask, T mine)
{
    const emulator::slot *all = emulator::meet(mask, emulator::MATCH, &mine, sizeof(mine));
    uint32_t equal = 0;
    for (uint32_t i = 0; i < emulator::WARP; i++)
        if (mask >> i & 1 && emulator::value_of<T>(all[i]) == mine)
            equal |= 1u << i;
    return equal;
}

template <class T> static inline T atomicAdd(T *to, T x)
{
    T before = *to;
    *to = before + x;
    return before;
}

static inline int __ffs(int x)
{
    return __builtin_ffs(x);
}

static inline int __popc(uint32_t x)
{
    return __builtin_popcount(x);
}

static inline float __fdividef(float a, float b)
{
    return a / b;
}

static inline float __fsqrt_rn(float x)
{
    return sqrtf(x);
}

template <class A, class B> static inline auto min(A a, B b) -> decltype(a + b)
{
    return a < b ? a : b;
}

template <class A, class B> static inline auto max(A a, B b) -> decltype(a + b)
{
    return a > b ? a : b;
}
