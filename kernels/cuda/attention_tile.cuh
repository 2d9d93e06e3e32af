/*
 * Attention with tensor cores (attention_fast.cu, _hopper.cu, _latent.cu): which block of threads computes
 * what, tiles of keys and values in shared memory, products with them, the softmax of a block, and runs of
 * blocks.
 */
#pragma once

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/scalar.h"

/* ------------------------------------------------- fast: who computes what */

static constexpr uint32_t THREADS = 128, WARPS = THREADS / WARP;
static constexpr uint32_t NARROW = 16, WIDE = 64, WIDE_HOPPER = 128; /* queries of a tile */

/* The sequences of one form, launched together. */
struct form {
    uint32_t n_queries; /* queries of a tile */
    bool narrow;
    /*
     * A block of threads computes one run of a tile, and stores a partial if the sequence has several runs.
     */
    bool split;
    float *partials; /* [item][kv head]: o [n_queries][v_dim], then m, l [n_queries][2] */
};

static __host__ __device__ __forceinline__ uint32_t first_run(const struct attention &t, uint32_t first_pos)
{
    return first_key(first_pos, t.window) / CUDA_SPLIT;
}

static __host__ __device__ __forceinline__ uint32_t count_runs(const struct attention &t, uint32_t first_pos,
                                                               uint32_t n_rows)
{
    return (first_pos + n_rows - 1) / CUDA_SPLIT - first_run(t, first_pos) + 1;
}

/* The items of a sequence: its tiles or, if split, the runs of its tiles; 0 in the other form. */
static __host__ __device__ __forceinline__ uint32_t count_items(const struct attention &t, const struct form &f,
                                                                uint32_t first_pos, uint32_t n_rows)
{
    uint32_t n_queries = n_rows * t.group;
    if ((n_queries <= NARROW) != f.narrow)
        return 0;
    return (n_queries + f.n_queries - 1) / f.n_queries * (f.split ? count_runs(t, first_pos, n_rows) : 1);
}

static __host__ __device__ __forceinline__ size_t partial_floats(const struct form &f, uint32_t head_dim)
{
    return (size_t)f.n_queries * (head_dim + 2);
}

/* The work of a block of threads. */
struct item {
    struct cuda_seq seq;
    uint32_t kv_head;
    uint32_t first_query, n_queries; /* first query of the tile; queries of the sequence */
    /* Keys that some query of the tile sees; if split, only keys of the run. */
    uint32_t first_key, last_key;
    bool partial;
};

/*
 * Finds the sequence of an item, and changes *item to its number within the sequence. Every warp searches by
 * itself.
 */
static __device__ __forceinline__ uint32_t find_seq(const struct attention &t, const struct form &f, uint32_t *item)
{
    uint32_t lane = threadIdx.x % WARP;
    for (uint32_t first = 0; first < t.n_seqs; first += WARP) {
        uint32_t s = first + lane, own = 0;
        if (s < t.n_seqs)
            own = count_items(t, f, t.seqs[s].first_pos, t.seqs[s].n_rows);
        uint32_t end = own;
        for (uint32_t apart = 1; apart < WARP; apart *= 2) {
            uint32_t other = __shfl_up_sync(ALL, end, apart);
            end += lane >= apart ? other : 0;
        }
        uint32_t beyond = __ballot_sync(ALL, end > *item);
        if (beyond) {
            uint32_t at = (uint32_t)__ffs((int)beyond) - 1;
            *item -= __shfl_sync(ALL, end - own, at);
            return first + at;
        }
        *item -= __shfl_sync(ALL, end, WARP - 1);
    }
    return t.n_seqs;
}

/* False: no query of the tile sees the run, or there are fewer items than blocks of threads. */
static __device__ __forceinline__ bool find_item(const struct attention &t, const struct form &f, struct item *i)
{
    uint32_t number = blockIdx.x, seq = find_seq(t, f, &number);
    if (seq == t.n_seqs)
        return false;
    i->seq = t.seqs[seq];
    i->kv_head = blockIdx.y;
    i->n_queries = i->seq.n_rows * t.group;
    uint32_t runs = count_runs(t, i->seq.first_pos, i->seq.n_rows), n_tiles = (i->n_queries - 1) / f.n_queries + 1;
    /* Tiles that see most keys begin first. */
    uint32_t tile = f.split ? number / runs : n_tiles - 1 - number;
    i->first_query = tile * f.n_queries;
    uint32_t last_query = min(i->first_query + f.n_queries, i->n_queries) - 1;
    i->first_key = first_key(i->seq.first_pos + i->first_query / t.group, t.window);
    i->last_key = i->seq.first_pos + last_query / t.group;
    i->partial = f.split && runs > 1;
    if (i->partial) {
        uint32_t begin = (first_run(t, i->seq.first_pos) + number % runs) * CUDA_SPLIT;
        i->first_key = max(i->first_key, begin);
        i->last_key = min(i->last_key, begin + CUDA_SPLIT - 1);
    }
    return i->first_key <= i->last_key;
}

/* The rows of a thread in a 16 x 8 accumulator, as rows and heads of the sequence. */
struct query {
    bool valid; /* false: a copy of another query, which is not stored */
    uint32_t row, head, pos, first_key;
};

static __device__ __forceinline__ struct query query_at(const struct attention &t, const struct item &i, uint32_t m)
{
    uint32_t in = min(m, i.n_queries - 1), row = in / t.group, pos = i.seq.first_pos + row;
    return {m < i.n_queries, i.seq.first_row + row, i.kv_head * t.group + in % t.group, pos, first_key(pos, t.window)};
}

/* ------------------------------------------------ fast: tiles in shared memory */

/*
 * Keys, then values. For each: 64 numbers of all rows, then the next 64, in rows of 128 bytes as Hopper's
 * products take them (hopper.cuh).
 */
template <int DIM> struct tile {
    static constexpr uint32_t KEYS = DIM >= 256 ? 32 : 64;
    static constexpr uint32_t ROW_BYTES = DIM * 2,
                              CHUNKS = ROW_BYTES / 16;    /* a chunk is what cp.async copies at once */
    static constexpr uint32_t COLUMNS_BYTES = KEYS * 128; /* 64 numbers of all rows */
    static constexpr uint32_t PLANE_BYTES = (DIM + 63) / 64 * COLUMNS_BYTES, BYTES = 2 * PLANE_BYTES;

    /* Chunks of eight rows in a column are in different banks. */
    static __device__ __forceinline__ uint32_t at(uint32_t row, uint32_t chunk)
    {
        return chunk / 8 * COLUMNS_BYTES + row * 128 + (chunk % 8 ^ row % 8) * 16;
    }
};

/*
 * The n-th piece that a thread loads, of rows of PIECES: its row, and its place in the row. The place is
 * the same for all n where threads load whole rows at once, which a compiler does not find by itself.
 */
template <uint32_t PIECES> static __device__ __forceinline__ uint32_t row_of(uint32_t n)
{
    uint32_t thread = threadIdx.x % THREADS;
    return THREADS % PIECES ? (n * THREADS + thread) / PIECES : n * (THREADS / PIECES) + thread / PIECES;
}

template <uint32_t PIECES> static __device__ __forceinline__ uint32_t piece_of(uint32_t n)
{
    uint32_t thread = threadIdx.x % THREADS;
    return THREADS % PIECES ? (n * THREADS + thread) % PIECES : thread % PIECES;
}

/* Widens 8 numbers of e4m3 to a chunk of bf16. */
static __device__ __forceinline__ void widen_chunk(uint8_t *to, uint32_t low, uint32_t high)
{
    const uint32_t pairs[4] = {low & 0xffff, low >> 16, high & 0xffff, high >> 16};
    uint32_t words[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        float a, b;
        from_e4m3_pair(pairs[i], &a, &b);
        words[i] = pack_bf16(a, b);
    }
    *(uint4 *)to = {words[0], words[1], words[2], words[3]};
}

/*
 * A plane (keys, or values) of a tile from pages of e4m3. A thread loads 16 numbers at once, and all that it
 * loads before it widens the first: these are the loads in flight. mine: of find_eight.
 */
template <int DIM>
static __device__ __forceinline__ void load_plane_e4m3(const struct item &i, uint32_t first, const uint8_t *mine,
                                                       size_t at_plane, uint8_t *to)
{
    using T = tile<DIM>;
    constexpr uint32_t PIECES = DIM / 16, N = T::KEYS * PIECES / THREADS;
    uint4 loaded[N];
#pragma unroll
    for (uint32_t n = 0; n < N; n++) {
        uint32_t row = row_of<PIECES>(n), piece = piece_of<PIECES>(n);
        const uint8_t *from = shuffle_pointer(mine, row / 8) + row % 8 * DIM + piece * 16 + at_plane;
        bool valid = first + row >= i.first_key && first + row <= i.last_key;
        loaded[n] = valid ? *(const uint4 *)from : uint4{};
    }
#pragma unroll
    for (uint32_t n = 0; n < N; n++) {
        uint32_t row = row_of<PIECES>(n), piece = piece_of<PIECES>(n);
        widen_chunk(to + T::at(row, 2 * piece), loaded[n].x, loaded[n].y);
        widen_chunk(to + T::at(row, 2 * piece + 1), loaded[n].z, loaded[n].w);
    }
}

/* Where lane i finds keys `first` + 8 i and the seven after, which are in a page. NULL: nobody sees them. */
template <int DIM>
static __device__ __forceinline__ const uint8_t *find_eight(const struct attention &t, const struct item &i,
                                                            uint32_t first)
{
    uint32_t lane = threadIdx.x % WARP, eight = first + lane * 8;
    bool seen = lane < tile<DIM>::KEYS / 8 && eight + 7 >= i.first_key && eight <= i.last_key;
    return seen ? key_at(t, i.seq, i.kv_head, eight) : NULL;
}

/*
 * The codes of a tile from pages of e4m3, on their way. Each thread copies pieces of 16 numbers to places
 * of its own, waits for its copies, and widens them into the tile, so no thread waits for another one.
 */
template <int DIM> struct codes {
    static constexpr uint32_t PIECES = DIM / 16, EACH = tile<DIM>::KEYS * PIECES / THREADS; /* of a plane */
    uint4 planes[2][EACH][THREADS];
};

template <int DIM>
static __device__ __forceinline__ void copy_codes(const struct attention &t, const struct item &i, uint32_t block,
                                                  struct codes<DIM> *to)
{
    using C = codes<DIM>;
    uint32_t first = block * tile<DIM>::KEYS, thread = threadIdx.x % THREADS;
    const uint8_t *mine = find_eight<DIM>(t, i, first);
#pragma unroll
    for (uint32_t n = 0; n < C::EACH; n++) {
        uint32_t row = row_of<C::PIECES>(n), piece = piece_of<C::PIECES>(n);
        const uint8_t *k = shuffle_pointer(mine, row / 8) + row % 8 * DIM + piece * 16;
        bool valid = first + row >= i.first_key && first + row <= i.last_key;
        copy_async16(&to->planes[0][n][thread], k, valid);
        copy_async16(&to->planes[1][n][thread], k + t.plane_bytes, valid);
    }
}

template <int DIM> static __device__ __forceinline__ void widen_codes(const struct codes<DIM> *from, uint8_t *to)
{
    using C = codes<DIM>;
    using T = tile<DIM>;
    uint32_t thread = threadIdx.x % THREADS;
#pragma unroll
    for (uint32_t n = 0; n < 2 * C::EACH; n++) {
        uint32_t plane = n / C::EACH, row = row_of<C::PIECES>(n % C::EACH), piece = piece_of<C::PIECES>(n % C::EACH);
        uint4 loaded = from->planes[plane][n % C::EACH][thread];
        uint8_t *at = to + plane * T::PLANE_BYTES;
        widen_chunk(at + T::at(row, 2 * piece), loaded.x, loaded.y);
        widen_chunk(at + T::at(row, 2 * piece + 1), loaded.z, loaded.w);
    }
}

/*
 * THREADS threads begin to load keys block * KEYS and following, and their values unless these are a part of
 * the keys (LATENT).
 */
template <int DIM, bool LATENT = false>
static __device__ __forceinline__ void load_tile(const struct attention &t, const struct item &i, uint32_t block,
                                                 uint8_t *to)
{
    using T = tile<DIM>;
    uint32_t first = block * T::KEYS;
    const uint8_t *mine = find_eight<DIM>(t, i, first);
    if (t.row_bytes == DIM) {
        load_plane_e4m3<DIM>(i, first, mine, 0, to);
        if (!LATENT)
            load_plane_e4m3<DIM>(i, first, mine, t.plane_bytes, to + T::PLANE_BYTES);
        return;
    }
#pragma unroll 2
    for (uint32_t n = 0; n < T::KEYS * T::CHUNKS / THREADS; n++) {
        uint32_t row = row_of<T::CHUNKS>(n), chunk = piece_of<T::CHUNKS>(n);
        const uint8_t *k = shuffle_pointer(mine, row / 8) + row % 8 * T::ROW_BYTES + chunk * 16;
        bool valid = first + row >= i.first_key && first + row <= i.last_key;
        copy_async16(to + T::at(row, chunk), k, valid);
        if (!LATENT)
            copy_async16(to + T::PLANE_BYTES + T::at(row, chunk), k + t.plane_bytes, valid);
    }
}

/*
 * Queries as the first operand of mma, 16 columns for each step: in registers, or in shared memory, where
 * each thread reads its own.
 */
template <int DIM> struct queries_registers {
    uint32_t step[DIM / 16][4];

    __device__ __forceinline__ void set(uint32_t i, const uint32_t a[4])
    {
        for (uint32_t j = 0; j < 4; j++)
            step[i][j] = a[j];
    }
    __device__ __forceinline__ void get(uint32_t i, uint32_t a[4]) const
    {
        for (uint32_t j = 0; j < 4; j++)
            a[j] = step[i][j];
    }
};

struct queries_shared {
    uint4 *mine;

    __device__ __forceinline__ void set(uint32_t i, const uint32_t a[4])
    {
        mine[i * THREADS] = make_uint4(a[0], a[1], a[2], a[3]);
    }
    __device__ __forceinline__ void get(uint32_t i, uint32_t a[4]) const
    {
        uint4 v = mine[i * THREADS];
        a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
    }
};

/* In shared memory, where all warps have the same queries. */
struct queries_of_block {
    uint4 *mine; /* of the lane */

    __device__ __forceinline__ void set(uint32_t i, const uint32_t a[4])
    {
        if (i % WARPS == threadIdx.x / WARP)
            mine[i * WARP] = make_uint4(a[0], a[1], a[2], a[3]);
    }
    __device__ __forceinline__ void get(uint32_t i, uint32_t a[4]) const
    {
        uint4 v = mine[i * WARP];
        a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
    }
};

template <int DIM, class Q>
static __device__ __forceinline__ void load_queries(const struct attention &t, const struct query at[2], Q *q)
{
    const float *x[2];
    for (uint32_t r = 0; r < 2; r++)
        x[r] = t.q + at[r].row * t.q_stride + at[r].head * DIM + threadIdx.x % 4 * 2;
#pragma unroll
    for (uint32_t i = 0; i < DIM / 16; i++, x[0] += 16, x[1] += 16) {
        uint32_t a[4] = {pack_bf16(x[0][0], x[0][1]), pack_bf16(x[1][0], x[1][1]), pack_bf16(x[0][8], x[0][9]),
                         pack_bf16(x[1][8], x[1][9])};
        q->set(i, a);
    }
}

/* s[16][8 N] = q k^T, for keys from `first` of the tile on. */
template <int DIM, int N, class Q>
static __device__ __forceinline__ void multiply_keys(const Q &q, const uint8_t *k, uint32_t first, float s[N][4])
{
    uint32_t lane = threadIdx.x % WARP;
#pragma unroll
    for (uint32_t n = 0; n < N; n++)
        for (uint32_t i = 0; i < 4; i++)
            s[n][i] = 0;
#pragma unroll
    for (uint32_t step = 0; step < DIM / 16; step += 2) {
        uint32_t a[2][4], b[4];
        q.get(step, a[0]);
        q.get(step + 1, a[1]);
#pragma unroll
        for (uint32_t n = 0; n < N; n++) {
            load_matrix4(b, k + tile<DIM>::at(first + 8 * n + lane % 8, 2 * step + lane / 8));
            multiply_16x8x16(s[n], a[0], b);
            multiply_16x8x16(s[n], a[1], b + 2);
        }
    }
}

/* o[16][8 N] += p v, for the columns of v from `first` on. */
template <int DIM, int N>
static __device__ __forceinline__ void multiply_values(const uint32_t p[][4], const uint8_t *v, uint32_t first,
                                                       float o[N][4])
{
    uint32_t lane = threadIdx.x % WARP;
#pragma unroll
    for (uint32_t step = 0; step < tile<DIM>::KEYS / 16; step++)
#pragma unroll
        for (uint32_t n = 0; n < N; n += 2) {
            uint32_t b[4];
            load_matrix4_transposed(b, v + tile<DIM>::at(step * 16 + lane % 16, first / 8 + n + lane / 16));
            multiply_16x8x16(o[n], p[step], b);
            multiply_16x8x16(o[n + 1], p[step], b + 2);
        }
}

/* ----------------------------------------------------------- fast: softmax */

/*
 * A partial: N columns of 8 numbers for the thread's two rows. l covers the thread's own columns until it is
 * complete.
 */
template <int N> struct partial {
    float o[N][4], m[2], l[2];
};

template <int N> static __device__ __forceinline__ void empty(partial<N> *x)
{
    for (uint32_t r = 0; r < 2; r++) {
        x->m[r] = NEVER;
        x->l[r] = 0;
    }
#pragma unroll
    for (uint32_t n = 0; n < N; n++)
        for (uint32_t i = 0; i < 4; i++)
            x->o[n][i] = 0;
}

/* The maximum over the four threads of a row. */
static __device__ __forceinline__ float row_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(ALL, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL, x, 2));
}

static __device__ __forceinline__ float row_sum(float x)
{
    x = x + __shfl_xor_sync(ALL, x, 1);
    return x + __shfl_xor_sync(ALL, x, 2);
}

/* 2^(x - m), m being the maximum so far; 0 if there is none. */
static __device__ __forceinline__ float weight(float x, float m)
{
    return exp2_fast(x - (m == NEVER ? 0 : m));
}

/* Turns products into scores in units of log2. */
template <int N> static __device__ __forceinline__ void scale(const struct attention &t, float s[N][4])
{
    if (t.cap > 0) {
        float by = 2 * LOG2_E * t.scale / t.cap;
#pragma unroll
        for (uint32_t i = 0; i < 4 * N; i++) {
            float *x = &s[i / 4][i % 4];
            *x = t.cap * LOG2_E * (1.0f - __fdividef(2.0f, exp2_fast(*x * by) + 1.0f));
        }
    } else {
        float by = t.scale * LOG2_E;
#pragma unroll
        for (uint32_t i = 0; i < 4 * N; i++)
            s[i / 4][i % 4] = s[i / 4][i % 4] * by;
    }
}

/* Masks the products with keys from `first` on. seen: every query sees all of them. */
template <int N>
static __device__ __forceinline__ void score(const struct attention &t, const struct query at[2], uint32_t first,
                                             bool seen, float s[N][4])
{
    scale<N>(t, s);
    if (seen)
        return;
#pragma unroll
    for (uint32_t n = 0; n < N; n++)
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t key = first + 8 * n + threadIdx.x % 4 * 2 + i % 2;
            if (key < at[i / 2].first_key || key > at[i / 2].pos)
                s[n][i] = NEVER;
        }
}

/*
 * Turns a block's scores into weights and adds them to x->l. Sums with earlier weights must be multiplied by
 * shrink.
 */
template <int N, int M> static __device__ __forceinline__ void weigh(float s[N][4], partial<M> *x, float shrink[2])
{
#pragma unroll
    for (uint32_t r = 0; r < 2; r++) {
        float m = x->m[r], sum = 0;
#pragma unroll
        for (uint32_t n = 0; n < N; n++)
            m = fmaxf(m, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        m = row_max(m);
        shrink[r] = weight(x->m[r], m);
#pragma unroll
        for (uint32_t n = 0; n < N; n++) {
            s[n][2 * r] = weight(s[n][2 * r], m);
            s[n][2 * r + 1] = weight(s[n][2 * r + 1], m);
            sum = sum + (s[n][2 * r] + s[n][2 * r + 1]);
        }
        x->l[r] = fmaf(x->l[r], shrink[r], sum);
        x->m[r] = m;
    }
}

/*
 * Writes weights to p, in the form that a product takes, and prepares x->o for the addition of their values.
 */
template <int N, int M>
static __device__ __forceinline__ void take_weights(const float s[N][4], const float shrink[2], partial<M> *x,
                                                    uint32_t p[N / 2][4])
{
#pragma unroll
    for (uint32_t i = 0; i < 2 * N; i++)
        p[i / 4][i % 4] = pack_bf16(s[i / 2][i % 2 * 2], s[i / 2][i % 2 * 2 + 1]);
#pragma unroll
    for (uint32_t i = 0; i < 4 * M; i++)
        x->o[i / 4][i % 4] = x->o[i / 4][i % 4] * shrink[i % 4 / 2];
}

/* Factors that join two partials of a row: a o1 + b o2, a l1 + b l2, maximum m. */
struct joint {
    float m, a, b;
};

static __device__ __forceinline__ struct joint join(float m1, float m2)
{
    float m = fmaxf(m1, m2);
    return {m, weight(m1, m), weight(m2, m)};
}

static __device__ __forceinline__ float joined(const struct joint &j, float x1, float x2)
{
    return fmaf(x2, j.b, x1 * j.a);
}

/* The joined earlier runs, while the next run is computed: m and l in registers, o in shared memory. */
struct runs_before {
    float m[2], l[2], *o;
    bool any;
};

/* Ends a run: joins x to the earlier runs; if more runs follow, x begins empty. */
template <int N> static __device__ __forceinline__ void end_run(struct runs_before *before, partial<N> *x, bool more)
{
#pragma unroll
    for (uint32_t r = 0; r < 2; r++) {
        x->l[r] = row_sum(x->l[r]);
        struct joint j = {x->m[r], 0, 1};
        if (before->any) {
            j = join(before->m[r], x->m[r]);
            x->l[r] = joined(j, before->l[r], x->l[r]);
            x->m[r] = j.m;
        }
#pragma unroll
        for (uint32_t i = 0; i < 2 * N; i++) {
            float *o = &x->o[i / 2][2 * r + i % 2], *saved = before->o + (i * 2 + r) * THREADS;
            if (before->any)
                *o = joined(j, *saved, *o);
            if (more)
                *saved = *o;
        }
        before->m[r] = x->m[r];
        before->l[r] = x->l[r];
    }
    before->any = true;
    if (more)
        empty(x);
}

/* The factor for the sum of all runs, after the head's sink was joined. */
static __device__ __forceinline__ struct joint finish(const struct attention &t, uint32_t head, float m, float l)
{
    if (!t.sinks)
        return {m, 1, 1.0f / l};
    struct joint j = join(m, t.sinks[head] * LOG2_E);
    return {j.m, j.a, 1.0f / joined(j, l, 1)};
}

static __device__ __forceinline__ float finished(const struct joint &j, float o)
{
    return o * j.a * j.b + 0.0f;
}

/* Stores rows m and m + 8 of the tile, columns from `first` on: as a partial, or finished as the output. */
template <int DIM, int N>
static __device__ __forceinline__ void store_tile(const struct attention &t, const struct form &f, const struct item &i,
                                                  const struct query at[2], uint32_t m, uint32_t first,
                                                  const partial<N> &x)
{
    float *base = f.partials + (blockIdx.x * (size_t)gridDim.y + blockIdx.y) * partial_floats(f, DIM);
    uint32_t column = first + threadIdx.x % 4 * 2;
#pragma unroll
    for (uint32_t r = 0; r < 2; r++) {
        if (!at[r].valid)
            continue;
        struct joint end = {0, 1, 1};
        float *to = base + (m + 8 * r) * DIM + column;
        uint16_t *rounded = NULL;
        if (i.partial && column == 0)
            store(base + f.n_queries * DIM + 2 * (m + 8 * r), pack<float, 2>{x.m[r], x.l[r]});
        if (!i.partial) {
            end = finish(t, at[r].head, x.m[r], x.l[r]);
            size_t of_out = ((size_t)at[r].row * t.n_heads + at[r].head) * DIM + column;
            to = t.out + of_out;
            rounded = t.rounded ? t.rounded + of_out : NULL;
        }
#pragma unroll
        for (uint32_t n = 0; n < N; n++) {
            const pack<float, 2> two = {finished(end, x.o[n][2 * r]), finished(end, x.o[n][2 * r + 1])};
            store(to + 8 * n, two);
            if (rounded)
                store_rounded(rounded + 8 * n, two);
        }
    }
}

/* ----------------------------------------- fast: queries that all warps share */

template <int DIM> struct narrow {
    /* Of one warp; columns in pairs, as products take them: with head_dim 96 the last warp has none. */
    static constexpr uint32_t COLUMNS = (DIM / 8 + 2 * WARPS - 1) / (2 * WARPS) * 2, KEYS = tile<DIM>::KEYS / WARPS;
    static constexpr uint32_t STAGES = 3;
    /* Stride of scores: rows of a column are in different banks. */
    static constexpr uint32_t STRIDE = tile<DIM>::KEYS + 8;
    static constexpr uint32_t TILE_BYTES = STAGES * tile<DIM>::BYTES, BYTES = TILE_BYTES + NARROW * STRIDE * 4;
};

/* Exchanges scores through shared memory: the warp's scores become those of all keys. */
template <int DIM>
static __device__ __forceinline__ void exchange(float own[narrow<DIM>::KEYS / 8][4], float *scores,
                                                float s[tile<DIM>::KEYS / 8][4])
{
    uint32_t lane = threadIdx.x % WARP;
    float *at = scores + lane / 4 * narrow<DIM>::STRIDE + lane % 4 * 2;
    float *to = at + threadIdx.x / WARP * narrow<DIM>::KEYS;
#pragma unroll
    for (uint32_t n = 0; n < narrow<DIM>::KEYS / 8; n++)
        for (uint32_t r = 0; r < 2; r++)
            store(to + 8 * r * narrow<DIM>::STRIDE + 8 * n, pack<float, 2>{own[n][2 * r], own[n][2 * r + 1]});
    __syncthreads();
#pragma unroll
    for (uint32_t n = 0; n < tile<DIM>::KEYS / 8; n++)
        for (uint32_t r = 0; r < 2; r++) {
            pack<float, 2> two = load<2>(at + 8 * r * narrow<DIM>::STRIDE + 8 * n);
            s[n][2 * r] = two.at[0];
            s[n][2 * r + 1] = two.at[1];
        }
}

/* The queries of all warps against a block of keys. x has COLUMNS columns, the warp's, of V in a value. */
template <int DIM, int V, int COLUMNS, class Q>
static __device__ __forceinline__ void share_block(const struct attention &t, const struct query at[2], const Q &q,
                                                   uint32_t block, const uint8_t *k, const uint8_t *v, float *scores,
                                                   partial<COLUMNS> *x)
{
    using T = tile<DIM>;
    constexpr uint32_t KEYS = narrow<DIM>::KEYS;
    uint32_t warp = threadIdx.x / WARP, p[T::KEYS / 16][4];
    float own[KEYS / 8][4], s[T::KEYS / 8][4], shrink[2];
    multiply_keys<DIM, KEYS / 8>(q, k, warp * KEYS, own);
    score<KEYS / 8>(t, at, block * T::KEYS + warp * KEYS, false, own);
    exchange<DIM>(own, scores, s);
    weigh<T::KEYS / 8>(s, x, shrink);
    take_weights<T::KEYS / 8>(s, shrink, x, p);
    if (warp * COLUMNS * 8 < V)
        multiply_values<DIM, COLUMNS>(p, v, warp * COLUMNS * 8, x->o);
}

/* ------------------------------------------------------------ fast: Hopper */

/*
 * attention_hopper.cu: computes the items of a form, head_dim 64 or 128. keeps_runs: a block of threads
 * computes several runs of a tile, one after another.
 */
void attend_hopper(cudaStream_t stream, const struct attention &t, const struct form &f, uint32_t n_items,
                   bool keeps_runs);

/* ----------------------------------------------------------- fast: latents */

/* attention_latent.cu: the same for keys of LATENT_DIM numbers, the first LATENT_V of which are the
 * values. */
static constexpr int LATENT_DIM = 576, LATENT_V = 512;
uint32_t attend_latent_bytes(void); /* the most shared memory that it needs */
void attend_latent(cudaStream_t stream, const struct attention &t, const struct form &f, uint32_t n_items,
                   bool keeps_runs);
