/*
 * Sampling from each row of logits, on the device. A block of threads has one row.
 *
 * The sum of exponentials has the order of plain C (16 lanes strided by 16, then a tree). So only half a warp
 * adds; the other threads compute exponentials, one tile ahead of it. Draws use integers, which may be added
 * in any order. Sets are found by their digits (radix selection; Alabi et al. 2012); nothing is sorted.
 */
#include "kernels/cuda/launch.cuh"
#include "kernels/scalar.h"

enum { LANES = 16, THREADS = 512, TILE = 8 * THREADS, DIGITS = 256 };

static constexpr uint32_t NONE = UINT32_MAX, ALL = 0xffffffff;

struct largest {
    float x;
    uint32_t at; /* NONE: only NaNs so far */
};

static __device__ struct largest larger(struct largest a, struct largest b)
{
    if (b.at == NONE || (a.at != NONE && (a.x > b.x || (a.x == b.x && a.at < b.at))))
        return a;
    return b;
}

/* The largest among the lanes that take part; lane 0 gets it. */
static __device__ struct largest largest_of_warp(struct largest a)
{
    for (uint32_t half = 16; half; half /= 2) {
        struct largest b = {__shfl_down_sync(ALL, a.x, half), __shfl_down_sync(ALL, a.at, half)};
        a = larger(a, b);
    }
    return a;
}

/* The largest of a row; all threads get it. */
static __device__ struct largest find_largest(const float *x, uint32_t n)
{
    __shared__ struct largest warps[THREADS / 32], all;
    struct largest a = {-__builtin_inff(), NONE};
    for (uint32_t i = threadIdx.x; i < n; i += THREADS)
        if (x[i] > a.x || (x[i] == a.x && a.at == NONE))
            a = {x[i], i};
    a = largest_of_warp(a);
    if (threadIdx.x % 32 == 0)
        warps[threadIdx.x / 32] = a;
    __syncthreads();
    if (threadIdx.x < 32) {
        struct largest none = {-__builtin_inff(), NONE};
        a = largest_of_warp(threadIdx.x < THREADS / 32 ? warps[threadIdx.x] : none);
        if (threadIdx.x == 0)
            all = a;
    }
    __syncthreads();
    return all;
}

/*
 * Returns the sum in thread 0. A tile is overwritten only after the adding lanes have reached the barrier of
 * the next tile.
 */
static __device__ float sum_exp(const float *x, float max, uint32_t n)
{
    __shared__ float tiles[2][TILE];
    float sum = 0;
    for (uint32_t first = 0; first < n; first += TILE) {
        float *tile = tiles[first / TILE % 2];
        uint32_t n_tile = min(n - first, (uint32_t)TILE);
        for (uint32_t i = threadIdx.x; i < n_tile; i += THREADS)
            tile[i] = scalar_exp(x[first + i] - max);
        __syncthreads();
        if (threadIdx.x < LANES)
#pragma unroll 8
            for (uint32_t i = threadIdx.x; i < n_tile; i += LANES)
                sum = sum + tile[i];
    }
    if (threadIdx.x < 32)
        for (uint32_t half = LANES / 2; half; half /= 2)
            sum = sum + __shfl_down_sync(ALL, sum, half);
    return sum;
}

/* ------------------------------------------------------------------- draw */

/*
 * A set that consists of the first ids in some order (k_draw, kernels.h) is given by the key of its last
 * member. A key has the number in its high half, so that larger keys come first, and the complement of the id
 * in its low half, so that no two keys are equal.
 */
struct row {
    const float *x;
    uint32_t n;
    float max, temperature;
    uint64_t last_logit, last_typical; /* keys of the last members; 0: all ids */
    float min_p, log_sum, expected;    /* log_sum and expected: for the surprise */
};

/* An unsigned number that rises with x. */
static __device__ __forceinline__ uint32_t ordered(float x)
{
    uint32_t bits = bits_of(x + 0.0f); /* -0 and 0 are equal */
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

static __device__ __forceinline__ uint64_t key_of(uint32_t high, uint32_t id)
{
    return (uint64_t)high << 32 | (uint32_t)~id;
}

struct by_logit {
    static __device__ __forceinline__ uint64_t key(const struct row &r, uint32_t i)
    {
        return key_of(ordered(r.x[i]), i);
    }
};

static __device__ __forceinline__ float surprise(const struct row &r, uint32_t i)
{
    return scalar_surprise(r.log_sum, r.x[i], r.max, r.temperature);
}

struct by_typical {
    static __device__ __forceinline__ uint64_t key(const struct row &r, uint32_t i)
    {
        return key_of(~bits_of(fabsf(surprise(r, i) - r.expected)), i);
    }
};

static __device__ __forceinline__ float likelihood(const struct row &r, uint32_t i)
{
    return scalar_likelihood(r.x[i], r.max, r.temperature);
}

/* The weight of id i if it is still in all sets, else 0. counts: each id weighs 1, or 0 if it is NaN. */
static __device__ __forceinline__ uint64_t weight_left(const struct row &r, uint32_t i, bool counts)
{
    if (r.last_logit && by_logit::key(r, i) < r.last_logit)
        return 0;
    if (counts)
        return r.x[i] == r.x[i];
    float e = likelihood(r, i);
    if (e < r.min_p || (r.last_typical && by_typical::key(r, i) < r.last_typical))
        return 0;
    return scalar_weight(e);
}

static __device__ uint64_t warp_sum(uint64_t sum)
{
    for (uint32_t half = 16; half; half /= 2)
        sum += __shfl_xor_sync(ALL, (unsigned long long)sum, half);
    return sum;
}

/* The sum over all threads; all of them get it. */
static __device__ uint64_t block_sum(uint64_t sum)
{
    __shared__ uint64_t warps[THREADS / 32];
    sum = warp_sum(sum);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        warps[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (uint32_t i = 0; i < THREADS / 32; i++)
        sum += warps[i];
    return sum;
}

static __device__ uint64_t sum_left(const struct row &r)
{
    uint64_t sum = 0;
    for (uint32_t i = threadIdx.x; i < r.n; i += THREADS)
        sum += weight_left(r, i, false);
    return block_sum(sum);
}

/*
 * Finds the digit in which the weight `want` is reached, from the highest digit down. *rest: the weight that
 * is wanted of that digit. By one warp.
 */
static __device__ uint32_t find_digit(const unsigned long long *weights, uint64_t want, uint64_t *rest)
{
    constexpr uint32_t EACH = DIGITS / 32;
    uint32_t lane = threadIdx.x % 32, highest = DIGITS - 1 - lane * EACH;
    uint64_t own = 0, before = 0;
    for (uint32_t i = 0; i < EACH; i++)
        own += weights[highest - i];
    for (uint32_t i = 0; i < 32; i++) {
        uint64_t other = __shfl_sync(ALL, (unsigned long long)own, i);
        before += i < lane ? other : 0;
    }
    bool here = before < want && want <= before + own;
    uint32_t digit = highest;
    uint64_t left = want - before;
    for (uint32_t i = 1; here && i < EACH && weights[digit] < left; i++)
        left -= weights[digit--];
    uint32_t lanes = __ballot_sync(ALL, here), from = lanes ? __ffs(lanes) - 1 : 0;
    *rest = __shfl_sync(ALL, (unsigned long long)(here ? left : 0), from);
    return __shfl_sync(ALL, digit, from);
}

/*
 * The key of the last of as few first ids as together have the weight `want`; 0 if all have less. Finds eight
 * bits at a time, the highest first, by the weights of keys that begin with the bits found so far. Ends early
 * if all these keys belong to the set.
 */
template <class KEY> static __device__ uint64_t last_of(const struct row &r, uint64_t want, bool counts)
{
    __shared__ unsigned long long weights[DIGITS];
    __shared__ uint64_t found, missing;
    uint64_t prefix = 0;
    for (uint32_t shift = 64 - 8;; shift -= 8) {
        for (uint32_t i = threadIdx.x; i < DIGITS; i += THREADS)
            weights[i] = 0;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < r.n; i += THREADS) {
            uint64_t key = KEY::key(r, i), w = 0;
            if (shift == 64 - 8 || key >> (shift + 8) == prefix)
                w = weight_left(r, i, counts);
            if (w)
                atomicAdd(&weights[key >> shift & (DIGITS - 1)], (unsigned long long)w);
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            uint64_t rest;
            uint32_t digit = find_digit(weights, want, &rest);
            if (threadIdx.x == 0) {
                found = rest ? prefix << 8 | digit : 0;
                missing = rest == weights[digit] ? 0 : rest;
            }
        }
        __syncthreads();
        prefix = found;
        want = missing;
        if (!want || !shift)
            return prefix << shift;
    }
}

/* The id at which the weight `at` is reached: narrows the range to the part of one warp, repeatedly. */
static __device__ uint32_t find_drawn(const struct row &r, uint64_t at)
{
    constexpr uint32_t WARPS = THREADS / 32;
    __shared__ uint64_t sums[WARPS];
    uint32_t first = 0, len = r.n, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    while (len > 1) {
        uint32_t part = (len + WARPS - 1) / WARPS, end = min(first + (warp + 1) * part, first + len);
        uint64_t sum = 0;
        for (uint32_t i = first + warp * part + lane; i < end; i += 32)
            sum += weight_left(r, i, false);
        sum = warp_sum(sum);
        if (lane == 0)
            sums[warp] = sum;
        __syncthreads();
        uint32_t w = 0;
        for (; at >= sums[w]; w++)
            at -= sums[w];
        first += w * part;
        len = min(part, len - w * part);
        __syncthreads();
    }
    return first;
}

static __device__ uint64_t share_left(const struct row &r, float share)
{
    uint64_t want = scalar_share(sum_left(r), (double)share);
    return want ? want : 1;
}

static __device__ void keep_typical(struct row *r, float share)
{
    uint64_t sum = sum_left(*r), expected = 0;
    r->log_sum = scalar_log_weight(sum);
    for (uint32_t i = threadIdx.x; i < r->n; i += THREADS)
        if (weight_left(*r, i, false))
            expected += scalar_expected(likelihood(*r, i), surprise(*r, i));
    r->expected = scalar_expectation(block_sum(expected), sum);
    uint64_t want = scalar_share(sum, (double)share);
    r->last_typical = last_of<by_typical>(*r, want ? want : 1, false);
}

static __device__ uint32_t draw(const float *x, uint32_t n, float max, const struct k_draw &by)
{
    struct row r = {x, n, max, by.temperature, 0, 0, 0, 0, 0};
    if (by.top_k && by.top_k < n)
        r.last_logit = last_of<by_logit>(r, by.top_k, true);
    if (by.top_p < 1) {
        uint64_t last = last_of<by_logit>(r, share_left(r, by.top_p), false);
        /* The new limit may be weaker than the old one. */
        r.last_logit = last > r.last_logit ? last : r.last_logit;
    }
    r.min_p = by.min_p;
    if (by.typical_p > 0 && by.typical_p < 1)
        keep_typical(&r, by.typical_p);
    return find_drawn(r, scalar_share(sum_left(r), by.u));
}

static __global__ void __launch_bounds__(THREADS)
    sample_rows(const float *logits, uint32_t n, const struct k_draw *draws, struct k_sampled *out)
{
    begin_kernel();
    const float *x = logits + (size_t)blockIdx.x * n;
    const struct k_draw by = draws[blockIdx.x];
    struct largest best = find_largest(x, n);
    uint32_t id = best.at == NONE ? 0 : best.at;
    float logsumexp = best.x;
    if (best.x != __builtin_inff() && best.x != -__builtin_inff()) {
        float sum = sum_exp(x, best.x, n);
        logsumexp = threadIdx.x ? 0 : scalar_log(sum) + best.x;
        if (by.temperature > 0)
            id = draw(x, n, best.x, by);
    }
    if (threadIdx.x == 0)
        out[blockIdx.x] = {id, x[id], logsumexp};
}

void cuda_sample_rows(cudaStream_t stream, const float *logits, uint32_t n, uint32_t n_rows, const struct k_draw *draws,
                      struct k_sampled *out)
{
    if (n_rows)
        launch_next(stream, sample_rows, n_rows, THREADS, 0, logits, n, draws, out);
}
