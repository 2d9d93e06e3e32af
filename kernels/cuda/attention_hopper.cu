/*
 * Attention over paged KV by Hopper's own instructions, for head_dim 64 and 128: what attention_fast.cu
 * computes, in the same blocks, runs and order, and with the same softmax, after FlashAttention-3 (Shah et
 * al. 2024).
 *
 * A block of threads has a producing warpgroup, which gathers tiles of keys and values into stages of shared
 * memory, and consuming warpgroups of 64 queries each, which multiply the tiles. Queries and weights come
 * from registers, keys and values from the stages. A consumer queues two products: the scores of a block, and
 * the weights of the block before times its values. It works on the softmax of the former while the tensor
 * cores work on the latter, or on the products of another consumer. At the end of a run it waits for all of
 * them.
 *
 *     wide     two consumers, 128 queries; one block of threads on a multiprocessor   chunks of a prompt
 *     narrow   one consumer, at most NARROW of whose 64 queries exist; two blocks     decoding
 *
 * Both forms are one kernel, so a row goes through the same instructions in either. The idle queries cost
 * little compared with reading keys and values.
 *
 * The producer gathers by cp.async, 16 bytes for each thread, because the tokens of a page can be at any
 * address, and a slot without a key must become zeros. A tensor map would have to span all memory in which
 * pages may be, and numbers behind the last key would have to be cleared afterwards. cp.async writes as
 * threads do. So the producer waits for its copies, one block behind the one that it requests, and fences
 * before it tells the consumers. Pages of e4m3 come as they are, AHEAD tiles of them, in half the bytes; the
 * producer's threads widen what they have copied into the stages.
 */
#include "kernels/cuda/attention_tile.cuh"
#include "kernels/cuda/stages.cuh"

/* E4M3: pages are of e4m3. */
template <int DIM_, uint32_t CONSUMERS_, bool E4M3_> struct hopper {
    static constexpr int DIM = DIM_;
    static constexpr bool E4M3 = E4M3_;
    static constexpr uint32_t CONSUMERS = CONSUMERS_, QUERIES = 64 * CONSUMERS, CTA = (CONSUMERS + 1) * THREADS;
    static constexpr uint32_t CTAS = CONSUMERS == 1 ? 2 : 1; /* blocks of threads on a multiprocessor */
    /* Behind the stages: tiles of codes that are on their way, then the joined earlier runs. */
    static constexpr uint32_t AHEAD = !E4M3 ? 0 : CONSUMERS == 1 ? 3 : 2;
    static constexpr uint32_t CODES_BYTES = AHEAD * sizeof(codes<DIM>), RUN_BYTES = QUERIES * DIM * 4;
    static constexpr uint32_t ROOM = (CONSUMERS == 1 ? E4M3 ? 112 : 96 : E4M3 ? 160 : 128) * 1024;
    using stages = struct stages<(ROOM - CODES_BYTES) / tile<DIM>::BYTES, tile<DIM>::BYTES>;
    static_assert(sizeof(stages) % 16 == 0, "codes are copied by 16 bytes");
    /* Registers of a thread of the producer, and of a consumer. */
    static constexpr uint32_t GIVEN = 40, TAKEN = CONSUMERS == 1 ? 216 : 232;
    static constexpr uint32_t BLOCKS = CUDA_SPLIT / tile<DIM>::KEYS; /* blocks of keys in a run */
};

template <class H>
static __device__ __forceinline__ void produce(const struct attention &t, const struct item &i,
                                               typename H::stages *stages)
{
    constexpr uint32_t KEYS = tile<H::DIM>::KEYS;
    uint32_t first = i.first_key / KEYS, end = i.last_key / KEYS + 1;
    struct turn<typename H::stages> turn, before;
    for (uint32_t block = first; block < end; block++, turn.next()) {
        load_tile<H::DIM>(t, i, block, wait_empty(stages, turn));
        copy_async_commit();
        if (block == first)
            continue;
        copy_async_wait<1>();
        fence_async();
        barrier_arrive(&stages->full[before.stage]);
        before.next();
    }
    copy_async_wait<0>();
    fence_async();
    barrier_arrive(&stages->full[before.stage]);
}

/* The same for pages of e4m3. A thread reads only codes that it has copied. */
template <class H>
static __device__ __forceinline__ void produce_widened(const struct attention &t, const struct item &i,
                                                       typename H::stages *stages)
{
    constexpr uint32_t KEYS = tile<H::DIM>::KEYS;
    auto *ahead = (struct codes<H::DIM> *)(stages + 1);
    uint32_t first = i.first_key / KEYS, end = i.last_key / KEYS + 1;
    struct turn<typename H::stages> turn;
    auto copy = [&](uint32_t block) {
        if (block < end)
            copy_codes<H::DIM>(t, i, block, &ahead[(block - first) % H::AHEAD]);
        copy_async_commit(); /* also an empty group: waiting counts groups */
    };
    for (uint32_t n = 0; n < H::AHEAD; n++)
        copy(first + n);
    for (uint32_t block = first; block < end; block++, turn.next()) {
        uint8_t *to = wait_empty(stages, turn);
        copy_async_wait<H::AHEAD - 1>();
        widen_codes<H::DIM>(&ahead[(block - first) % H::AHEAD], to);
        fence_async();
        barrier_arrive(&stages->full[turn.stage]);
        copy(block + H::AHEAD);
    }
}

/* Queues s = q k^T. */
template <class H>
static __device__ __forceinline__ void queue_scores(const queries_registers<H::DIM> &q, const uint8_t *kv,
                                                    float (&s)[tile<H::DIM>::KEYS / 8][4])
{
    uint64_t k = operand_at(kv);
#pragma unroll
    for (uint32_t n = 0; n < tile<H::DIM>::KEYS / 8; n++)
        for (uint32_t i = 0; i < 4; i++)
            s[n][i] = 0;
    multiply_fence();
#pragma unroll
    for (uint32_t step = 0; step < H::DIM / 16; step++)
        multiply_64(s, q.step[step], operand_further(k, step / 4 * tile<H::DIM>::COLUMNS_BYTES + step % 4 * 32));
    multiply_commit();
}

/* Queues o += p v. */
template <class H>
static __device__ __forceinline__ void queue_values(const uint32_t (&p)[tile<H::DIM>::KEYS / 16][4], const uint8_t *kv,
                                                    float (&o)[H::DIM / 8][4])
{
    using T = tile<H::DIM>;
    uint64_t v = operand_at(kv + T::PLANE_BYTES, T::COLUMNS_BYTES);
    multiply_fence();
#pragma unroll
    for (uint32_t step = 0; step < T::KEYS / 16; step++)
        multiply_64_transposed(o, p[step], operand_further(v, step * 16 * 128));
    multiply_commit();
}

/* The queries of a warpgroup, and the range of what they see. */
template <int DIM> struct group {
    struct query at[2];       /* the two queries of this thread */
    struct query first, last; /* of the warpgroup */
    queries_registers<DIM> q;
};

/* Softmax of a block whose scores are complete. */
template <class H>
static __device__ __forceinline__ void soften(const struct attention &t, const struct group<H::DIM> &g, uint32_t block,
                                              float (&s)[tile<H::DIM>::KEYS / 8][4], partial<H::DIM / 8> *x,
                                              float shrink[2])
{
    constexpr uint32_t KEYS = tile<H::DIM>::KEYS;
    uint32_t key = block * KEYS;
    score<KEYS / 8>(t, g.at, key, key >= g.last.first_key && key + KEYS - 1 <= g.first.pos, s);
    weigh<KEYS / 8>(s, x, shrink);
}

/* Blocks [block, end) of a run. */
template <class H>
static __device__ __forceinline__ void attend_run(const struct attention &t, const struct group<H::DIM> &g,
                                                  uint32_t block, uint32_t end, typename H::stages *stages,
                                                  struct turn<typename H::stages> *turn, partial<H::DIM / 8> *x)
{
    constexpr uint32_t KEYS = tile<H::DIM>::KEYS;
    float s[KEYS / 8][4], shrink[2];
    uint32_t p[KEYS / 16][4], before = turn->stage;
    queue_scores<H>(g.q, wait_full(stages, *turn), s);
    multiply_wait<0>(s);
    soften<H>(t, g, block, s, x, shrink);
    take_weights<KEYS / 8>(s, shrink, x, p);
    for (block++, turn->next(); block < end; block++, turn->next()) {
        queue_scores<H>(g.q, wait_full(stages, *turn), s);
        queue_values<H>(p, stages->data[before], x->o);
        multiply_wait<1>(s);
        soften<H>(t, g, block, s, x, shrink);
        multiply_wait<0>(x->o);
        release(stages, before);
        take_weights<KEYS / 8>(s, shrink, x, p);
        before = turn->stage;
    }
    queue_values<H>(p, stages->data[before], x->o);
    multiply_wait<0>(x->o);
    release(stages, before);
}

/* Releases n blocks that no query of the warpgroup sees. */
template <class S> static __device__ __forceinline__ void pass(S *stages, struct turn<S> *turn, uint32_t n)
{
    for (; n; n--, turn->next()) {
        wait_full(stages, *turn);
        release(stages, turn->stage);
    }
}

template <class H>
static __device__ __forceinline__ void consume(const struct attention &t, const struct form &f, const struct item &i,
                                               uint32_t warp, typename H::stages *stages)
{
    constexpr uint32_t KEYS = tile<H::DIM>::KEYS;
    uint32_t consumer = warp / WARPS, of_group = i.first_query + consumer * 64;
    uint32_t m = warp * 16 + threadIdx.x % WARP / 4;
    struct group<H::DIM> g = {
        {query_at(t, i, i.first_query + m), query_at(t, i, i.first_query + m + 8)}, query_at(t, i, of_group),
            query_at(t, i, of_group + 63),
        {
        }
    };
    load_queries<H::DIM>(t, g.at, &g.q);
    uint32_t first = i.first_key / KEYS, end = i.last_key / KEYS + 1;
    /* Up to own_end, the queries see some key of each block. */
    uint32_t block = min(max(g.first.first_key / KEYS, first), end);
    uint32_t own_end = g.first.valid ? min(g.last.pos / KEYS + 1, end) : 0;
    float *runs = (float *)((uint8_t *)(stages + 1) + H::CODES_BYTES);
    struct runs_before before = {{}, {}, runs + consumer * 64 * H::DIM + threadIdx.x % THREADS, false};
    struct turn<typename H::stages> turn;
    partial<H::DIM / 8> x;
    empty(&x);
    pass(stages, &turn, block - first);
    while (block < own_end) {
        uint32_t run_end = min((block / H::BLOCKS + 1) * H::BLOCKS, own_end);
        attend_run<H>(t, g, block, run_end, stages, &turn, &x);
        block = run_end;
        end_run(&before, &x, block < own_end);
    }
    pass(stages, &turn, end - block);
    store_tile<H::DIM>(t, f, i, g.at, m, 0, x);
}

template <class H>
static __global__ void __launch_bounds__(H::CTA, H::CTAS)
    attend(const __grid_constant__ struct attention t, const __grid_constant__ struct form f)
{
    uint8_t *shared = dynamic_shared<uint8_t>();
    if constexpr (IS_HOPPER) {
        begin_kernel();
        auto *stages = (typename H::stages *)shared;
        /* A shuffle, so that the compiler, too, knows that all lanes have the same value. */
        uint32_t warp = __shfl_sync(ALL, threadIdx.x / WARP, 0);
        struct item i;
        if (!find_item(t, f, &i))
            return;
        if (threadIdx.x == 0)
            stages->init(THREADS, H::CONSUMERS * WARPS);
        __syncthreads();
        if (warp >= H::CONSUMERS * WARPS) {
            registers_give<H::GIVEN>();
            if constexpr (H::E4M3)
                produce_widened<H>(t, i, stages);
            else
                produce<H>(t, i, stages);
        } else {
            registers_take<H::TAKEN>();
            consume<H>(t, f, i, warp, stages);
        }
    }
}

template <class H>
static void launch(cudaStream_t stream, const struct attention &t, const struct form &f, uint32_t n_items,
                   bool keeps_runs)
{
    uint32_t shared = sizeof(typename H::stages) + H::CODES_BYTES + (keeps_runs ? H::RUN_BYTES : 0);
    cudaFuncSetAttribute(attend<H>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    launch_next(stream, attend<H>, dim3(n_items, t.n_kv_heads), H::CTA, shared, t, f);
}

template <bool E4M3>
static void launch_form(cudaStream_t stream, const struct attention &t, const struct form &f, uint32_t n_items,
                        bool keeps_runs)
{
    auto *chosen = launch<hopper<128, 2, E4M3>>;
    if (t.head_dim == 64)
        chosen = f.narrow ? launch<hopper<64, 1, E4M3>> : launch<hopper<64, 2, E4M3>>;
    else if (f.narrow)
        chosen = launch<hopper<128, 1, E4M3>>;
    chosen(stream, t, f, n_items, keeps_runs);
}

void attend_hopper(cudaStream_t stream, const struct attention &t, const struct form &f, uint32_t n_items,
                   bool keeps_runs)
{
    if (t.row_bytes == t.head_dim)
        launch_form<true>(stream, t, f, n_items, keeps_runs);
    else
        launch_form<false>(stream, t, f, n_items, keeps_runs);
}
