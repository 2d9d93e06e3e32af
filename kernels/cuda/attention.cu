/*
 * Attention over paged KV: storing, the exact form, and one with tensor cores.
 *
 * The fast form is FlashAttention-2 (Dao 2023) with mma m16n8k16: a block of threads takes a kv head of a sequence and a tile of
 * queries, which are rows times the heads of the group (m = row * group + head), so that KV is read once for all of them. Tiles of
 * KEYS keys and their values come by cp.async, STAGES of them, in a swizzled order that leaves no bank conflicts; scores and
 * weights stay in registers, weights are rounded to bf16 for the second product, and sums are f32. Scores are in units of log2.
 *
 *     wide     64 queries, 16 a warp, who goes over all keys by itself; 2 stages        chunks of a prompt
 *     narrow   16 queries, whom the warps share: each multiplies a quarter of the keys  decoding: rows * group <= 16
 *              and, after an exchange in shared memory, a quarter of the value columns; 3 stages
 *     KEYS     64; 32 with head_dim 256, where accumulators leave no room for more
 *
 * Bits must not depend on the form, nor on who else is in a tile. So the two do the same arithmetic on a query: keys in absolute
 * blocks of KEYS; every CUDA_SPLIT positions are a partial (m, l, o) of their own that begins empty; partials are joined in
 * ascending order (Milakov and Gimelshein 2018), in the block that has computed them or by merge_runs; a sink is one more, (sink,
 * 1, 0). What a query does not see weighs exactly 0: joining an empty partial, or a block that is masked as a whole, changes
 * nothing but the sign of a zero, which the last addition of +0 makes +. Slots that hold no key, or one before everybody's window,
 * become zeros in shared memory and are not read (0 * NaN would be NaN).
 *
 * Rejected: merging with the maximum of all runs at hand, which the wide form, who passes over the keys once, has not.
 */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/scalar.h"

#undef NDEBUG
#include <assert.h>

static constexpr uint32_t WARP = 32, ALL = 0xffffffff;
static constexpr uint32_t LANES = 16, KEY_BLOCK = 32; /* of the exact form, as in kernels/cpu/cpu.h */
static constexpr float NEVER = -__builtin_inff();     /* the score of what is not seen */

/* What kernels need of struct k_attn and struct cuda_batch. Offsets within a page are in bytes. */
struct attention {
    const float *q, *k, *v, *sinks;
    float *out;
    const struct cuda_seq *seqs;
    uint8_t *const *pages;
    const uint32_t *row_seq;
    size_t q_stride, kv_stride;
    size_t layer_at, head_bytes, plane_bytes; /* the layer, from a kv head to the next, from K to V (latent: 0) */
    uint32_t n_seqs, n_heads, n_kv_heads, group, head_dim, v_dim, page_tokens, window, row_bytes;
    float scale, cap;
};

static struct attention describe(const struct k_attn *a, const struct cuda_batch *b)
{
    const struct kv_layout *l = a->layout;
    struct attention t = {};
    t.q = a->q, t.k = a->k, t.v = a->v, t.sinks = a->sinks, t.out = a->out;
    t.seqs = b->seqs, t.pages = b->pages, t.row_seq = b->row_seq;
    t.q_stride = a->q_stride, t.kv_stride = a->kv_stride;
    t.layer_at = a->layer * kv_layout_layer_bytes(l);
    t.head_bytes = kv_layout_head_bytes(l);
    t.plane_bytes = l->kind == KV_LATENT ? 0 : l->n_kv_heads * t.head_bytes;
    t.n_seqs = b->n_seqs, t.n_heads = a->n_heads, t.n_kv_heads = l->n_kv_heads;
    t.group = a->n_heads / l->n_kv_heads, t.head_dim = l->head_dim, t.v_dim = a->v_dim;
    t.page_tokens = l->page_tokens, t.window = a->window;
    t.row_bytes = l->head_dim * (uint32_t)num_type_bytes(l->dtype);
    t.scale = a->scale, t.cap = a->cap;
    return t;
}

static __host__ __device__ __forceinline__ uint32_t first_key(uint32_t pos, uint32_t window)
{
    return window && pos >= window ? pos - window + 1 : 0;
}

/* K of a position. */
static __device__ __forceinline__ uint8_t *key_at(const struct attention &t, const struct cuda_seq &s, uint32_t kv_head,
                                                  uint32_t pos)
{
    return t.pages[s.pages + pos / t.page_tokens] + t.layer_at + kv_head * t.head_bytes +
           pos % t.page_tokens * t.row_bytes;
}

template <class T> static __device__ __forceinline__ T *shuffle_pointer(T *p, uint32_t lane)
{
    return (T *)(uintptr_t)__shfl_sync(ALL, (unsigned long long)(uintptr_t)p, lane);
}

/* ------------------------------------------------------------------- store */

static constexpr uint32_t STORE_THREADS = 128;

template <enum num_type TYPE> static __device__ __forceinline__ uint16_t narrowed(float f, uint16_t *)
{
    return TYPE == NUM_BF16 ? scalar_to_bf16(f) : scalar_to_f16(f);
}

template <enum num_type TYPE> static __device__ __forceinline__ float narrowed(float f, float *)
{
    return f;
}

template <enum num_type TYPE, class T, int N> static __device__ __forceinline__ void store_as(const float *x, T *to)
{
    pack<float, N> v = load<N>(x);
    pack<T, N> h;
    for (int j = 0; j < N; j++)
        h.at[j] = narrowed<TYPE>(v.at[j], (T *)0);
    store(to, h);
}

/* A row in x; N numbers a thread, of K and of V. */
template <enum num_type TYPE, class T, int N> static __global__ void store_rows(struct attention t)
{
    uint32_t i = (blockIdx.y * STORE_THREADS + threadIdx.x) * N;
    if (i >= t.n_kv_heads * t.head_dim)
        return;
    const struct cuda_seq s = t.seqs[t.row_seq[blockIdx.x]];
    uint8_t *key = key_at(t, s, i / t.head_dim, s.first_pos + blockIdx.x - s.first_row);
    store_as<TYPE, T, N>(t.k + blockIdx.x * t.kv_stride + i, (T *)key + i % t.head_dim);
    if (t.plane_bytes)
        store_as<TYPE, T, N>(t.v + blockIdx.x * t.kv_stride + i, (T *)(key + t.plane_bytes) + i % t.head_dim);
}

void cuda_kv_store(cudaStream_t stream, const struct k_attn *a, const struct cuda_batch *b)
{
    const struct attention t = describe(a, b);
    if (!b->n_rows)
        return;
    bool four = by_four(a->k, a->kv_stride, t.head_dim) && by_four(a->v, 0, 0);
    auto *kernel = four ? store_rows<NUM_F32, float, 4> : store_rows<NUM_F32, float, 1>;
    if (a->layout->dtype == NUM_F16)
        kernel = four ? store_rows<NUM_F16, uint16_t, 4> : store_rows<NUM_F16, uint16_t, 1>;
    if (a->layout->dtype == NUM_BF16)
        kernel = four ? store_rows<NUM_BF16, uint16_t, 4> : store_rows<NUM_BF16, uint16_t, 1>;
    size_t n = (size_t)t.n_kv_heads * t.head_dim / (four ? 4 : 1);
    kernel<<<dim3(b->n_rows, pieces(n, STORE_THREADS)), STORE_THREADS, 0, stream>>>(t);
}

/* ------------------------------------------------------------------- exact */

template <enum num_type TYPE> static __device__ __forceinline__ float widened(const void *x, uint32_t i)
{
    return scalar_from(x, TYPE == NUM_F32 ? 4 : 2, TYPE == NUM_BF16, i);
}

/* Each step adds or compares halves onto each other; every lane gets the result. */
static __device__ __forceinline__ float tree_sum(float x, uint32_t mask, uint32_t lanes)
{
    for (uint32_t half = lanes / 2; half; half /= 2)
        x = x + __shfl_xor_sync(mask, x, half);
    return x;
}

static __device__ __forceinline__ float warp_max(float x)
{
    for (uint32_t half = WARP / 2; half; half /= 2)
        x = scalar_max(__shfl_xor_sync(ALL, x, half), x);
    return x;
}

/* Scores of the block's keys first .. n-1, 16 threads a key, as the specified dot product has 16 sums. Lane j has key j's K. */
template <enum num_type TYPE>
static __device__ __forceinline__ void exact_scores(const struct attention &t, const float *q, const uint8_t *key,
                                                    uint32_t first, uint32_t n, float *scores)
{
    uint32_t lane = threadIdx.x % LANES, half = threadIdx.x / LANES, halves = blockDim.x / LANES;
    for (uint32_t j = half; j < KEY_BLOCK; j += halves) {
        const uint8_t *k = shuffle_pointer(key, j);
        if (j < first || j >= n)
            continue;
        float sum = 0;
#pragma unroll 8
        for (uint32_t i = lane; i < t.head_dim; i += LANES)
            sum = scalar_fma(q[i], widened<TYPE>(k, i), sum);
        sum = tree_sum(sum, 0xffffu << (half % 2 * LANES), LANES) * t.scale;
        if (lane == 0)
            scores[j] = t.cap > 0 ? scalar_softcap(sum, t.cap) : sum;
    }
}

/*
 * A block of threads has a query, a thread one number of the output. Every warp does the softmax of a block of keys for itself,
 * lane j key j; the 16 sums of the weights and their tree are one tree over 32 lanes. Scores alternate between two places, so
 * that one barrier a block is enough.
 */
template <enum num_type TYPE> static __global__ void __launch_bounds__(1024) attend_exact(struct attention t)
{
    extern __shared__ float q[];
    __shared__ float scores[2][KEY_BLOCK];
    uint32_t row = blockIdx.x / t.n_heads, head = blockIdx.x % t.n_heads, lane = threadIdx.x % WARP, d = threadIdx.x;
    const struct cuda_seq s = t.seqs[t.row_seq[row]];
    uint32_t pos = s.first_pos + row - s.first_row, begin = first_key(pos, t.window);
    float m = t.sinks ? t.sinks[head] : NEVER, l = t.sinks ? 1 : 0, out = 0;
    for (uint32_t i = threadIdx.x; i < t.head_dim; i += blockDim.x)
        q[i] = t.q[row * t.q_stride + head * t.head_dim + i];
    __syncthreads();
    for (uint32_t block = begin / KEY_BLOCK * KEY_BLOCK; block <= pos; block += KEY_BLOCK) {
        uint32_t n = min(pos + 1 - block, KEY_BLOCK), first = begin > block ? begin - block : 0;
        bool seen = lane >= first && lane < n;
        const uint8_t *key = seen ? key_at(t, s, head / t.group, block + lane) : 0;
        float *place = scores[block / KEY_BLOCK % 2];
        exact_scores<TYPE>(t, q, key, first, n, place);
        __syncthreads();
        float score = seen ? place[lane] : NEVER, m_new = scalar_max(warp_max(scalar_max(score, NEVER)), m);
        float shrink = scalar_exp(m - m_new), p = seen ? scalar_exp(score - m_new) : 0;
        l = scalar_fma(l, shrink, tree_sum(p, ALL, WARP));
        m = m_new;
        out = out * shrink;
#pragma unroll 4
        for (uint32_t j = first; j < n; j++) {
            float weight = __shfl_sync(ALL, p, j);
            const uint8_t *v = shuffle_pointer(key, j) + t.plane_bytes;
            if (d < t.v_dim)
                out = scalar_fma(weight, widened<TYPE>(v, d), out);
        }
    }
    if (d < t.v_dim)
        t.out[(size_t)blockIdx.x * t.v_dim + d] = out * (1.0f / l);
}

void cuda_attention_exact(cudaStream_t stream, const struct k_attn *a, const struct cuda_batch *b)
{
    const struct attention t = describe(a, b);
    uint32_t threads = a->v_dim < 128 ? 128 : pieces(a->v_dim, WARP) * WARP;
    assert(threads <= 1024);
    if (!b->n_rows)
        return;
    auto *kernel = attend_exact<NUM_F32>;
    if (a->layout->dtype == NUM_F16)
        kernel = attend_exact<NUM_F16>;
    if (a->layout->dtype == NUM_BF16)
        kernel = attend_exact<NUM_BF16>;
    kernel<<<b->n_rows * a->n_heads, threads, t.head_dim * sizeof(float), stream>>>(t);
}

/* ------------------------------------------------- fast: who computes what */

static constexpr uint32_t THREADS = 128, WARPS = THREADS / WARP;
static constexpr uint32_t NARROW = 16, WIDE = 64; /* queries of a tile */

/* Sequences of one form, launched together. */
struct form {
    uint32_t n_queries; /* of a tile */
    bool narrow;
    bool split;      /* a block of threads has one run of a tile, and leaves a partial if the sequence has more */
    float *partials; /* [item][kv head]: o [n_queries][head_dim], then m, l [n_queries][2] */
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

/* An item is a tile of a sequence, or one of its runs. Sequences of the other form have none. */
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

/* What a block of threads is to do. */
struct item {
    struct cuda_seq seq;
    uint32_t kv_head;
    uint32_t first_query, n_queries; /* of the tile, of the sequence */
    uint32_t first_key, last_key;    /* what any of the tile's queries sees, in split form of the run */
    bool partial;
};

/* Sequence and number within it of an item; every warp finds them by itself. */
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

/* False: none of the tile's queries sees the run. */
static __device__ __forceinline__ bool find_item(const struct attention &t, const struct form &f, struct item *i)
{
    uint32_t number = blockIdx.x;
    i->seq = t.seqs[find_seq(t, f, &number)];
    i->kv_head = blockIdx.y;
    i->n_queries = i->seq.n_rows * t.group;
    uint32_t runs = count_runs(t, i->seq.first_pos, i->seq.n_rows), n_tiles = (i->n_queries - 1) / f.n_queries + 1;
    uint32_t tile = f.split ? number / runs : n_tiles - 1 - number; /* the one that sees most begins first */
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

/* Where a thread's two rows of a 16 x 8 accumulator are, in the sequence. */
struct query {
    bool valid; /* else it stands in for one, and is not stored */
    uint32_t row, head, pos, first_key;
};

static __device__ __forceinline__ struct query query_at(const struct attention &t, const struct item &i, uint32_t m)
{
    uint32_t in = min(m, i.n_queries - 1), row = in / t.group, pos = i.seq.first_pos + row;
    return {m < i.n_queries, i.seq.first_row + row, i.kv_head * t.group + in % t.group, pos, first_key(pos, t.window)};
}

/* ------------------------------------------------ fast: tiles in shared memory */

template <int DIM> struct tile {
    static constexpr uint32_t KEYS = DIM == 256 ? 32 : 64;
    static constexpr uint32_t ROW_BYTES = DIM * 2, CHUNKS = ROW_BYTES / 16; /* chunk: what cp.async takes at once */
    static constexpr uint32_t PLANE_BYTES = KEYS * ROW_BYTES, BYTES = 2 * PLANE_BYTES; /* K, then V */

    /* Chunks of eight rows in a column lie in different banks. */
    static __device__ __forceinline__ uint32_t at(uint32_t row, uint32_t chunk)
    {
        return row * ROW_BYTES + (chunk ^ (row & 7)) * 16;
    }
};

/* Begins to load the keys block * KEYS ... Eight of them lie together in a page; lane i looks up the i-th eight. */
template <int DIM>
static __device__ __forceinline__ void load_tile(const struct attention &t, const struct item &i, uint32_t block,
                                                 uint8_t *to)
{
    using T = tile<DIM>;
    constexpr uint32_t ROWS = THREADS / T::CHUNKS; /* that all threads load at once */
    uint32_t first = block * T::KEYS, lane = threadIdx.x % WARP, chunk = threadIdx.x % T::CHUNKS;
    uint32_t eight = first + lane * 8;
    const uint8_t *mine = 0;
    if (lane < T::KEYS / 8 && eight + 7 >= i.first_key && eight <= i.last_key)
        mine = key_at(t, i.seq, i.kv_head, eight);
#pragma unroll 2
    for (uint32_t r = 0; r < T::KEYS; r += ROWS) {
        uint32_t row = r + threadIdx.x / T::CHUNKS;
        const uint8_t *k = shuffle_pointer(mine, row / 8) + row % 8 * T::ROW_BYTES + chunk * 16;
        bool valid = first + row >= i.first_key && first + row <= i.last_key;
        copy_async16(to + T::at(row, chunk), k, valid);
        copy_async16(to + T::PLANE_BYTES + T::at(row, chunk), k + t.plane_bytes, valid);
    }
}

/* Queries as the first operand of mma, 16 columns a step: in registers, or in shared memory, where every thread has its own. */
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

/* s[16][8 N] = q k^T, keys from first of the tile. */
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

/* o[16][8 N] += p v, of v the columns from first. */
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

/* A partial, N columns of 8, of the thread's two rows. l: of the thread's own columns until it is complete. */
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

/* The four threads of a row. */
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

/* 2^(x - m), where m is the maximum; 0 if there is none yet. */
static __device__ __forceinline__ float weight(float x, float m)
{
    return exp2_fast(x - (m == NEVER ? 0 : m));
}

/* A product becomes a score in units of log2. */
static __device__ __forceinline__ float scaled(const struct attention &t, float x)
{
    if (t.cap > 0)
        return t.cap * LOG2_E * (1.0f - __fdividef(2.0f, exp2_fast(x * (2 * LOG2_E * t.scale / t.cap)) + 1.0f));
    return x * (t.scale * LOG2_E);
}

/* Products with keys from first on; seen: all of them are, by everybody. */
template <int N>
static __device__ __forceinline__ void score(const struct attention &t, const struct query at[2], uint32_t first,
                                             bool seen, float s[N][4])
{
#pragma unroll
    for (uint32_t n = 0; n < N; n++)
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t key = first + 8 * n + threadIdx.x % 4 * 2 + i % 2;
            bool sees = seen || (key >= at[i / 2].first_key && key <= at[i / 2].pos);
            s[n][i] = sees ? scaled(t, s[n][i]) : NEVER;
        }
}

/* A block's scores become weights in x->l and, as mma takes them, in p; x->o is ready to have their values added. */
template <int N, int M> static __device__ __forceinline__ void weigh(float s[N][4], partial<M> *x, uint32_t p[N / 2][4])
{
#pragma unroll
    for (uint32_t r = 0; r < 2; r++) {
        float m = x->m[r], sum = 0;
#pragma unroll
        for (uint32_t n = 0; n < N; n++)
            m = fmaxf(m, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        m = row_max(m);
        float shrink = weight(x->m[r], m);
#pragma unroll
        for (uint32_t n = 0; n < N; n++) {
            float a = weight(s[n][2 * r], m), b = weight(s[n][2 * r + 1], m);
            sum = sum + (a + b);
            p[n / 2][n % 2 * 2 + r] = pack_bf16(a, b);
        }
        x->l[r] = fmaf(x->l[r], shrink, sum);
        x->m[r] = m;
#pragma unroll
        for (uint32_t n = 0; n < M; n++) {
            x->o[n][2 * r] = x->o[n][2 * r] * shrink;
            x->o[n][2 * r + 1] = x->o[n][2 * r + 1] * shrink;
        }
    }
}

/* Two partials of a row: a o1 + b o2, a l1 + b l2, m. */
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

/* What all runs together must be multiplied by, after the head's sink. */
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

/* Rows m and m + 8 of the tile, columns from first: as a partial, or finished as the output. */
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
        if (i.partial && column == 0)
            store(base + f.n_queries * DIM + 2 * (m + 8 * r), pack<float, 2>{x.m[r], x.l[r]});
        if (!i.partial) {
            end = finish(t, at[r].head, x.m[r], x.l[r]);
            to = t.out + ((size_t)at[r].row * t.n_heads + at[r].head) * DIM + column;
        }
#pragma unroll
        for (uint32_t n = 0; n < N; n++)
            store(to + 8 * n, pack<float, 2>{finished(end, x.o[n][2 * r]), finished(end, x.o[n][2 * r + 1])});
    }
}

/* --------------------------------------------------------------- fast: wide */

template <int DIM> struct wide {
    static constexpr uint32_t STAGES = 2;
    static constexpr bool Q_SHARED = DIM == 256; /* no registers are left for them */
    static constexpr uint32_t Q_BYTES = Q_SHARED ? WIDE * DIM * 2 : 0, RUN_BYTES = WIDE * DIM * 4;
    static constexpr uint32_t BYTES = STAGES * tile<DIM>::BYTES + Q_BYTES;
};

/* The runs before, while the next one is computed: m and l in registers, o in shared memory. */
struct runs_before {
    float m[2], l[2], *o;
    bool any;
};

/* A run has ended: x is joined to the runs before; if there are more to come it begins anew. */
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

/* The warp's 16 queries against a block of keys. */
template <int DIM, class Q>
static __device__ __forceinline__ void attend_block(const struct attention &t, const struct query at[2], const Q &q,
                                                    uint32_t block, bool seen, const uint8_t *kv, partial<DIM / 8> *x)
{
    using T = tile<DIM>;
    float s[T::KEYS / 8][4];
    uint32_t p[T::KEYS / 16][4];
    multiply_keys<DIM, T::KEYS / 8>(q, kv, 0, s);
    score<T::KEYS / 8>(t, at, block * T::KEYS, seen, s);
    weigh<T::KEYS / 8>(s, x, p);
    multiply_values<DIM, DIM / 8>(p, kv + T::PLANE_BYTES, 0, x->o);
}

template <int DIM, class Q>
static __device__ __forceinline__ void attend_tile(const struct attention &t, const struct form &f,
                                                   const struct item &i, uint8_t *shared, Q *q)
{
    using T = tile<DIM>;
    uint32_t warp = threadIdx.x / WARP, m = warp * 16 + threadIdx.x % WARP / 4;
    const struct query at[2] = {query_at(t, i, i.first_query + m), query_at(t, i, i.first_query + m + 8)};
    const struct query first = query_at(t, i, i.first_query + warp * 16);
    const struct query last = query_at(t, i, i.first_query + warp * 16 + 15);
    uint32_t block = i.first_key / T::KEYS, end = i.last_key / T::KEYS + 1;
    struct runs_before before = {{}, {}, (float *)(shared + wide<DIM>::BYTES) + threadIdx.x, false};
    partial<DIM / 8> x;
    empty(&x);
    load_tile<DIM>(t, i, block, shared);
    copy_async_commit();
    load_queries<DIM>(t, at, q);
    for (uint32_t stage = 0; block < end; block++, stage ^= 1) {
        copy_async_wait<0>();
        __syncthreads();
        if (block + 1 < end)
            load_tile<DIM>(t, i, block + 1, shared + (stage ^ 1) * T::BYTES);
        copy_async_commit();
        uint32_t key = block * T::KEYS, last_key = key + T::KEYS - 1;
        if (first.valid && key <= last.pos && last_key >= first.first_key)
            attend_block<DIM>(t, at, *q, block, key >= last.first_key && last_key <= first.pos,
                              shared + stage * T::BYTES, &x);
        if ((last_key + 1) % CUDA_SPLIT == 0 || block + 1 == end)
            end_run(&before, &x, block + 1 < end);
    }
    store_tile<DIM>(t, f, i, at, m, 0, x);
}

template <int DIM>
static __global__ void __launch_bounds__(THREADS)
    attend_wide(const __grid_constant__ struct attention t, const __grid_constant__ struct form f)
{
    extern __shared__ __align__(128) uint8_t shared[];
    struct item i;
    if (!find_item(t, f, &i))
        return;
    if constexpr (wide<DIM>::Q_SHARED) {
        struct queries_shared q = {(uint4 *)(shared + wide<DIM>::STAGES * tile<DIM>::BYTES) + threadIdx.x};
        attend_tile<DIM>(t, f, i, shared, &q);
    } else {
        queries_registers<DIM> q;
        attend_tile<DIM>(t, f, i, shared, &q);
    }
}

/* ------------------------------------------------------------- fast: narrow */

template <int DIM> struct narrow {
    static constexpr uint32_t STAGES = 3, COLUMNS = DIM / 8 / WARPS, KEYS = tile<DIM>::KEYS / WARPS; /* of a warp */
    static constexpr uint32_t STRIDE = tile<DIM>::KEYS + 8; /* of scores: rows of a column in different banks */
    static constexpr uint32_t TILE_BYTES = STAGES * tile<DIM>::BYTES, BYTES = TILE_BYTES + NARROW * STRIDE * 4;
};

/* The warp's scores become those of all keys, by way of shared memory. */
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

template <int DIM>
static __device__ __forceinline__ void share_block(const struct attention &t, const struct query at[2],
                                                   const queries_registers<DIM> &q, uint32_t block, uint8_t *kv,
                                                   float *scores, partial<narrow<DIM>::COLUMNS> *x)
{
    using T = tile<DIM>;
    constexpr uint32_t KEYS = narrow<DIM>::KEYS, COLUMNS = narrow<DIM>::COLUMNS;
    uint32_t warp = threadIdx.x / WARP, p[T::KEYS / 16][4];
    float own[KEYS / 8][4], s[T::KEYS / 8][4];
    multiply_keys<DIM, KEYS / 8>(q, kv, warp * KEYS, own);
    score<KEYS / 8>(t, at, block * T::KEYS + warp * KEYS, false, own);
    exchange<DIM>(own, scores, s);
    weigh<T::KEYS / 8>(s, x, p);
    multiply_values<DIM, COLUMNS>(p, kv + T::PLANE_BYTES, warp * COLUMNS * 8, x->o);
}

/* A block of threads never has more than one run. */
template <int DIM>
static __global__ void __launch_bounds__(THREADS)
    attend_narrow(const __grid_constant__ struct attention t, const __grid_constant__ struct form f)
{
    extern __shared__ __align__(128) uint8_t shared[];
    using T = tile<DIM>;
    constexpr uint32_t STAGES = narrow<DIM>::STAGES;
    struct item i;
    if (!find_item(t, f, &i))
        return;
    uint32_t m = threadIdx.x % WARP / 4, first = i.first_key / T::KEYS, end = i.last_key / T::KEYS + 1;
    const struct query at[2] = {query_at(t, i, m), query_at(t, i, m + 8)};
    for (uint32_t block = first; block < first + STAGES - 1; block++) {
        if (block < end)
            load_tile<DIM>(t, i, block, shared + (block - first) * T::BYTES);
        copy_async_commit();
    }
    queries_registers<DIM> q;
    load_queries<DIM>(t, at, &q);
    partial<narrow<DIM>::COLUMNS> x;
    empty(&x);
    for (uint32_t block = first; block < end; block++) {
        uint32_t next = block + STAGES - 1;
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        if (next < end)
            load_tile<DIM>(t, i, next, shared + (next - first) % STAGES * T::BYTES);
        copy_async_commit();
        share_block<DIM>(t, at, q, block, shared + (block - first) % STAGES * T::BYTES,
                         (float *)(shared + narrow<DIM>::TILE_BYTES), &x);
    }
    for (uint32_t r = 0; r < 2; r++)
        x.l[r] = row_sum(x.l[r]);
    store_tile<DIM>(t, f, i, at, m, threadIdx.x / WARP * narrow<DIM>::COLUMNS * 8, x);
}

/* -------------------------------------------------------------- fast: merge */

static constexpr uint32_t MERGE_AHEAD = 8; /* partials on their way */

static __device__ uint32_t items_before(const struct attention &t, const struct form &f, uint32_t seq)
{
    uint32_t sum = 0;
    for (uint32_t s = threadIdx.x % WARP; s < seq; s += WARP)
        sum += count_items(t, f, t.seqs[s].first_pos, t.seqs[s].n_rows);
    for (uint32_t half = WARP / 2; half; half /= 2)
        sum += __shfl_xor_sync(ALL, sum, half);
    return sum;
}

/* Joins n partials step floats apart, the lane's N columns of them. */
template <int N>
static __device__ __forceinline__ pack<float, N> join_runs(const float *o, const float *ml, size_t step, uint32_t n,
                                                           float *m, float *l)
{
    pack<float, N> sum = {0};
    for (uint32_t first = 0; first < n; first += MERGE_AHEAD) {
        pack<float, N> part[MERGE_AHEAD];
        pack<float, 2> own[MERGE_AHEAD];
#pragma unroll
        for (uint32_t i = 0; i < MERGE_AHEAD; i++) {
            size_t at = min(first + i, n - 1) * step;
            part[i] = load<N>(o + at);
            own[i] = load<2>(ml + at);
        }
#pragma unroll
        for (uint32_t i = 0; i < MERGE_AHEAD; i++) {
            if (first + i >= n)
                continue;
            struct joint j = join(*m, own[i].at[0]);
            *m = j.m;
            *l = joined(j, *l, own[i].at[1]);
            for (int d = 0; d < N; d++)
                sum.at[d] = joined(j, sum.at[d], part[i].at[d]);
        }
    }
    return sum;
}

/* A warp has a query. */
template <int DIM> static __global__ void __launch_bounds__(THREADS) merge_runs(struct attention t, struct form f)
{
    constexpr int N = DIM / WARP;
    uint32_t row = blockIdx.x, head = blockIdx.y * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    uint32_t seq = t.row_seq[row];
    const struct cuda_seq s = t.seqs[seq];
    uint32_t runs = count_runs(t, s.first_pos, s.n_rows), pos = s.first_pos + row - s.first_row;
    if (head >= t.n_heads || runs == 1 || !count_items(t, f, s.first_pos, s.n_rows))
        return;
    uint32_t query = (row - s.first_row) * t.group + head % t.group, at = query % f.n_queries;
    uint32_t begin = first_run(t, s.first_pos), from = first_run(t, pos), n = pos / CUDA_SPLIT + 1 - from;
    size_t item = items_before(t, f, seq) + query / f.n_queries * runs + from - begin, size = partial_floats(f, DIM);
    const float *o = f.partials + (item * t.n_kv_heads + head / t.group) * size;
    float m = NEVER, l = 0;
    pack<float, N> sum =
        join_runs<N>(o + at * DIM + lane * N, o + f.n_queries * DIM + 2 * at, t.n_kv_heads * size, n, &m, &l);
    struct joint end = finish(t, head, m, l);
    for (int d = 0; d < N; d++)
        sum.at[d] = finished(end, sum.at[d]);
    store(t.out + ((size_t)row * t.n_heads + head) * DIM + lane * N, sum);
}

/* ------------------------------------------------------------- fast: launch */

static uint32_t device_number(enum cudaDeviceAttr what)
{
    int device = 0, n = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&n, what, device);
    return (uint32_t)n;
}

/* A form, and how much there is of it. */
struct plan {
    struct form form;
    size_t n_items;
    bool long_ones; /* some sequence has more than one run */
};

static struct plan plan_form(const struct attention &t, const struct cuda_batch *b, bool narrow, bool split)
{
    struct plan p = {{narrow ? NARROW : WIDE, narrow, split, 0}, 0, false};
    for (uint32_t i = 0; i < b->n_seqs; i++) {
        const struct k_attn_seq *s = &b->host[i];
        uint32_t n = count_items(t, p.form, s->first_pos, s->n_rows);
        p.n_items += n;
        p.long_ones |= n && count_runs(t, s->first_pos, s->n_rows) > 1;
    }
    return p;
}

/* Narrow tiles always split; wide ones where there are too few of them to keep the device busy. */
static void make_plans(const struct attention &t, const struct cuda_batch *b, struct plan plans[2])
{
    plans[0] = plan_form(t, b, true, true);
    plans[1] = plan_form(t, b, false, false);
    if (plans[1].long_ones && plans[1].n_items * t.n_kv_heads < 2 * device_number(cudaDevAttrMultiProcessorCount))
        plans[1] = plan_form(t, b, false, true);
}

static size_t plan_bytes(const struct attention &t, const struct plan &p)
{
    return p.form.split && p.long_ones ? p.n_items * t.n_kv_heads * partial_floats(p.form, t.head_dim) * 4 : 0;
}

template <int DIM>
static void launch_form(cudaStream_t stream, const struct attention &t, const struct plan &p, uint32_t n_rows)
{
    uint32_t shared = narrow<DIM>::BYTES;
    auto *kernel = attend_narrow<DIM>;
    if (!p.form.narrow) {
        kernel = attend_wide<DIM>;
        shared = wide<DIM>::BYTES + (p.long_ones && !p.form.split ? wide<DIM>::RUN_BYTES : 0);
    }
    if (!p.n_items)
        return;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    kernel<<<dim3((uint32_t)p.n_items, t.n_kv_heads), THREADS, shared, stream>>>(t, p.form);
    if (p.form.split && p.long_ones)
        merge_runs<DIM><<<dim3(n_rows, pieces(t.n_heads, WARPS)), THREADS, 0, stream>>>(t, p.form);
}

template <int DIM>
static void launch_fast(cudaStream_t stream, const struct attention &t, const struct cuda_batch *b, void *scratch)
{
    struct plan plans[2];
    make_plans(t, b, plans);
    plans[0].form.partials = (float *)scratch;
    plans[1].form.partials = (float *)((uint8_t *)scratch + plan_bytes(t, plans[0]));
    for (uint32_t i = 0; i < 2; i++)
        launch_form<DIM>(stream, t, plans[i], b->n_rows);
}

/* The most that a launch of head_dim 256 asks for is 160 KiB. */
template <int DIM> static bool has_room(void)
{
    uint32_t most = wide<DIM>::BYTES + wide<DIM>::RUN_BYTES;
    return device_number(cudaDevAttrMaxSharedMemoryPerBlockOptin) >=
           (most > narrow<DIM>::BYTES ? most : narrow<DIM>::BYTES);
}

bool cuda_attention_fits(const struct k_attn *a)
{
    const struct kv_layout *l = a->layout;
    if (l->dtype != NUM_BF16 || l->kind != KV_PLAIN || l->page_tokens % 8 || a->v_dim != l->head_dim)
        return false;
    return l->head_dim == 64    ? has_room<64>()
           : l->head_dim == 128 ? has_room<128>()
                                : l->head_dim == 256 && has_room<256>();
}

size_t cuda_attention_scratch(const struct k_attn *a, const struct cuda_batch *b)
{
    const struct attention t = describe(a, b);
    struct plan plans[2];
    make_plans(t, b, plans);
    return plan_bytes(t, plans[0]) + plan_bytes(t, plans[1]);
}

void cuda_attention_fast(cudaStream_t stream, const struct k_attn *a, const struct cuda_batch *b, void *scratch)
{
    const struct attention t = describe(a, b);
    assert(cuda_attention_fits(a));
    if (t.head_dim == 64)
        launch_fast<64>(stream, t, b, scratch);
    else if (t.head_dim == 128)
        launch_fast<128>(stream, t, b, scratch);
    else
        launch_fast<256>(stream, t, b, scratch);
}
