/*
 * Attention over paged KV with tensor cores.
 *
 * It is FlashAttention-2 (Dao 2023) with mma m16n8k16. A block of threads computes a kv head of a sequence
 * and a tile of queries. Queries are rows times heads of the group (m = row * group + head), so that KV is
 * read once for all of them. Tiles of KEYS keys and their values come by cp.async, in STAGES stages, in a
 * swizzled order without bank conflicts (threads widen pages of e4m3 on the way). Scores and weights stay in
 * registers, weights are rounded to bf16 for the second product, and sums are f32. Scores are in units of
 * log2.
 *
 *     wide     64 queries, 16 for each warp; a warp walks over all keys by itself; 2 stages     chunks of a
 *     prompt narrow   16 queries for all warps: each warp multiplies a quarter of the keys and, after
 *              decoding: rows * group <= 16 an exchange in shared memory, a quarter of the value columns; 3
 *              stages
 *     KEYS     64; 32 with head_dim 256, where accumulators leave no room for more
 *
 * Bits must not depend on the form, nor on the other queries of a tile. So both forms do the same arithmetic
 * for a query: keys in absolute blocks of KEYS; each CUDA_SPLIT positions are a partial (m, l, o) that begins
 * empty; partials are joined in ascending order (Milakov and Gimelshein 2018), by the block of threads that
 * computed them or by merge_runs; a sink is one more partial, (sink, 1, 0). Keys that a query does not see
 * have weight exactly 0. Joining an empty partial, or a block that is masked as a whole, then changes nothing
 * except the sign of a zero, and the last addition of +0 makes that +. Slots that hold no key, or a key
 * before every query's window, become zeros in shared memory and are not read (0 * NaN would be NaN).
 *
 * On Hopper attention_hopper.cu computes the items of both forms for head_dim 64 and 128, and
 * attention_latent.cu computes those of latents, on any device; plans and merge_runs are the ones here.
 *
 * Rejected: merging with the maximum of all runs known. The wide form walks over the keys once and does not
 * know it.
 */
#include "kernels/cuda/attention_tile.cuh"

#undef NDEBUG
#include <assert.h>

/* --------------------------------------------------------------- fast: wide */

template <int DIM> struct wide {
    static constexpr uint32_t STAGES = 2;
    static constexpr bool Q_SHARED = DIM == 256; /* no registers are left for queries */
    static constexpr uint32_t Q_BYTES = Q_SHARED ? WIDE * DIM * 2 : 0, RUN_BYTES = WIDE * DIM * 4;
    static constexpr uint32_t BYTES = STAGES * tile<DIM>::BYTES + Q_BYTES;
};

/* The 16 queries of a warp against a block of keys. */
template <int DIM, class Q>
static __device__ __forceinline__ void attend_block(const struct attention &t, const struct query at[2], const Q &q,
                                                    uint32_t block, bool seen, const uint8_t *kv, partial<DIM / 8> *x)
{
    using T = tile<DIM>;
    float s[T::KEYS / 8][4], shrink[2];
    uint32_t p[T::KEYS / 16][4];
    multiply_keys<DIM, T::KEYS / 8>(q, kv, 0, s);
    score<T::KEYS / 8>(t, at, block * T::KEYS, seen, s);
    weigh<T::KEYS / 8>(s, x, shrink);
    take_weights<T::KEYS / 8>(s, shrink, x, p);
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
    uint8_t *shared = dynamic_shared<uint8_t>();
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

/* In the narrow form a block of threads never has more than one run. */
template <int DIM>
static __global__ void __launch_bounds__(THREADS)
    attend_narrow(const __grid_constant__ struct attention t, const __grid_constant__ struct form f)
{
    uint8_t *shared = dynamic_shared<uint8_t>();
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
        const uint8_t *kv = shared + (block - first) % STAGES * T::BYTES;
        share_block<DIM, DIM>(t, at, q, block, kv, kv + T::PLANE_BYTES, (float *)(shared + narrow<DIM>::TILE_BYTES),
                              &x);
    }
    for (uint32_t r = 0; r < 2; r++)
        x.l[r] = row_sum(x.l[r]);
    uint32_t column = threadIdx.x / WARP * narrow<DIM>::COLUMNS * 8;
    if (column < DIM)
        store_tile<DIM>(t, f, i, at, m, column, x);
}

/* -------------------------------------------------------------- fast: merge */

static constexpr uint32_t MERGE_AHEAD = 8; /* partials that are being loaded */

static __device__ uint32_t items_before(const struct attention &t, const struct form &f, uint32_t seq)
{
    uint32_t sum = 0;
    for (uint32_t s = threadIdx.x % WARP; s < seq; s += WARP)
        sum += count_items(t, f, t.seqs[s].first_pos, t.seqs[s].n_rows);
    for (uint32_t half = WARP / 2; half; half /= 2)
        sum += __shfl_xor_sync(ALL, sum, half);
    return sum;
}

/* Joins n partials, which are step floats apart, for the lane's N columns. */
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

/* One warp for each query, or for each 256 columns of it. */
template <int DIM> static __global__ void __launch_bounds__(THREADS) merge_runs(struct attention t, struct form f)
{
    begin_kernel();
    constexpr uint32_t PARTS = DIM <= 256 ? 1 : DIM / 256;
    constexpr int N = DIM == 96 ? 4 : DIM / (int)(PARTS * WARP); /* columns of a lane */
    uint32_t row = blockIdx.x, warp = blockIdx.y * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    uint32_t head = warp / PARTS, column = (warp % PARTS * WARP + lane) * N;
    uint32_t seq = t.row_seq[row];
    const struct cuda_seq s = t.seqs[seq];
    uint32_t runs = count_runs(t, s.first_pos, s.n_rows), pos = s.first_pos + row - s.first_row;
    if (head >= t.n_heads || runs == 1 || !count_items(t, f, s.first_pos, s.n_rows))
        return;
    uint32_t query = (row - s.first_row) * t.group + head % t.group, at = query % f.n_queries;
    uint32_t begin = first_run(t, s.first_pos), from = first_run(t, pos), n = pos / CUDA_SPLIT + 1 - from;
    size_t item = items_before(t, f, seq) + query / f.n_queries * runs + from - begin, size = partial_floats(f, DIM);
    if (column >= DIM)
        return;
    const float *o = f.partials + (item * t.n_kv_heads + head / t.group) * size;
    float m = NEVER, l = 0;
    pack<float, N> sum =
        join_runs<N>(o + at * DIM + column, o + f.n_queries * DIM + 2 * at, t.n_kv_heads * size, n, &m, &l);
    struct joint end = finish(t, head, m, l);
    for (int d = 0; d < N; d++)
        sum.at[d] = finished(end, sum.at[d]);
    size_t to = ((size_t)row * t.n_heads + head) * DIM + column;
    store(t.out + to, sum);
    if (t.rounded)
        store_rounded(t.rounded + to, sum);
}

/* ------------------------------------------------------------- fast: launch */

static bool is_latent(const struct attention &t)
{
    return t.v_dim != t.head_dim;
}

/* A form, and the number of its items. */
struct attention_plan {
    struct form form;
    size_t n_items;
    bool long_ones; /* some sequence has two or more runs */
};

static struct attention_plan plan_form(const struct attention &t, const struct cuda_batch *b, bool narrow, bool split)
{
    uint32_t n_queries = narrow || is_latent(t) ? NARROW : t.hopper ? WIDE_HOPPER : WIDE;
    struct attention_plan p = {{n_queries, narrow, split, 0}, 0, false};
    if (b->single_runs) { /* a step that is replayed launches as many as there could be */
        uint32_t n_tiles = count_items(t, {p.form.n_queries, narrow, false, 0}, 0, 1);
        p.n_items = n_tiles * (split ? b->single_runs : b->n_seqs);
        p.long_ones = n_tiles && b->single_runs > b->n_seqs;
        return p;
    }
    for (uint32_t i = 0; i < b->n_seqs; i++) {
        const struct k_attn_seq *s = &b->host[i];
        uint32_t n = count_items(t, p.form, s->first_pos, s->n_rows);
        p.n_items += n;
        p.long_ones |= n && count_runs(t, s->first_pos, s->n_rows) > 1;
    }
    return p;
}

/*
 * Narrow tiles are always split; wide tiles are split if there are too few of them to keep the device busy.
 */
static void make_plans(const struct attention &t, const struct cuda_batch *b, struct attention_plan plans[2])
{
    plans[0] = plan_form(t, b, true, true);
    plans[1] = plan_form(t, b, false, false);
    if (plans[1].long_ones && plans[1].n_items * t.n_kv_heads < 2 * device_number(cudaDevAttrMultiProcessorCount))
        plans[1] = plan_form(t, b, false, true);
}

static size_t plan_bytes(const struct attention &t, const struct attention_plan &p)
{
    return p.form.split && p.long_ones ? p.n_items * t.n_kv_heads * partial_floats(p.form, t.v_dim) * 4 : 0;
}

template <int DIM>
static void launch_items(cudaStream_t stream, const struct attention &t, const struct attention_plan &p)
{
    uint32_t shared = narrow<DIM>::BYTES;
    auto *kernel = attend_narrow<DIM>;
    if (!p.form.narrow) {
        kernel = attend_wide<DIM>;
        shared = wide<DIM>::BYTES + (p.long_ones && !p.form.split ? wide<DIM>::RUN_BYTES : 0);
    }
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    launch_kernel(stream, kernel, dim3((uint32_t)p.n_items, t.n_kv_heads), THREADS, shared, t, p.form);
}

/* DIM: numbers of an output. */
template <int DIM>
static void launch_form(cudaStream_t stream, const struct attention &t, const struct attention_plan &p, uint32_t n_rows)
{
    if (!p.n_items)
        return;
    bool keeps_runs = p.long_ones && !p.form.split;
    if (t.hopper)
        attend_hopper(stream, t, p.form, (uint32_t)p.n_items, keeps_runs);
    else if constexpr (DIM == LATENT_V)
        attend_latent(stream, t, p.form, (uint32_t)p.n_items, keeps_runs);
    else
        launch_items<DIM>(stream, t, p);
    if (p.form.split && p.long_ones)
        launch_next(stream, merge_runs<DIM>, dim3(n_rows, pieces(t.n_heads * pieces(DIM, 256), WARPS)), THREADS, 0, t,
                    p.form);
}

template <int DIM>
static void launch_fast(cudaStream_t stream, const struct attention &t, const struct cuda_batch *b, void *scratch)
{
    struct attention_plan plans[2];
    make_plans(t, b, plans);
    plans[0].form.partials = (float *)scratch;
    plans[1].form.partials = (float *)((uint8_t *)scratch + plan_bytes(t, plans[0]));
    for (uint32_t i = 0; i < 2; i++)
        launch_form<DIM>(stream, t, plans[i], b->n_rows);
}

/* Whether the device has 160 KiB of shared memory, the most that a launch (of head_dim 256) needs. */
template <int DIM> static bool has_room(void)
{
    uint32_t most = wide<DIM>::BYTES + wide<DIM>::RUN_BYTES;
    return device_number(cudaDevAttrMaxSharedMemoryPerBlockOptin) >=
           (most > narrow<DIM>::BYTES ? most : narrow<DIM>::BYTES);
}

bool cuda_attention_fits(const struct k_attn *a)
{
    const struct kv_layout *l = a->layout;
    if ((l->dtype != NUM_BF16 && l->dtype != NUM_F8_E4M3) || l->page_tokens % 8)
        return false;
    if (l->kind == KV_LATENT)
        return l->head_dim == LATENT_DIM && a->v_dim == LATENT_V &&
               device_number(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= attend_latent_bytes();
    if (l->kind != KV_PLAIN || a->v_dim != l->head_dim)
        return false;
    return l->head_dim == 64    ? has_room<64>()
           : l->head_dim == 96  ? has_room<96>()
           : l->head_dim == 128 ? has_room<128>()
                                : l->head_dim == 256 && has_room<256>();
}

static struct attention describe_fast(const struct k_attn *a, const struct cuda_batch *b, bool is_hopper)
{
    struct attention t = describe(a, b);
    t.hopper = is_hopper && (t.head_dim == 64 || t.head_dim == 128);
    return t;
}

size_t cuda_attention_scratch(const struct k_attn *a, const struct cuda_batch *b, bool is_hopper)
{
    const struct attention t = describe_fast(a, b, is_hopper);
    struct attention_plan plans[2];
    make_plans(t, b, plans);
    return plan_bytes(t, plans[0]) + plan_bytes(t, plans[1]);
}

void cuda_attention_fast(cudaStream_t stream, const struct k_attn *a, const struct cuda_batch *b, bool is_hopper,
                         void *scratch, void *rounded)
{
    struct attention t = describe_fast(a, b, is_hopper);
    assert(cuda_attention_fits(a));
    t.rounded = (uint16_t *)rounded;
    if (is_latent(t))
        launch_fast<LATENT_V>(stream, t, b, scratch);
    else if (t.head_dim == 64)
        launch_fast<64>(stream, t, b, scratch);
    else if (t.head_dim == 96)
        launch_fast<96>(stream, t, b, scratch);
    else if (t.head_dim == 128)
        launch_fast<128>(stream, t, b, scratch);
    else
        launch_fast<256>(stream, t, b, scratch);
}
