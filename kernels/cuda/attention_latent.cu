/*
 * Attention over latents (DeepSeek-V2, 2024; absorbed, as its decoding is): a key has 576 numbers, all heads
 * have the same keys, and the first 512 numbers of a key are its value. So a tile of keys is loaded once for
 * both products, and for all heads of a row.
 *
 * A block of threads has 16 queries, as the narrow form has (attention_fast.cu): each warp multiplies a
 * quarter of the keys, then a quarter of the value columns, 64 sums in each thread. Queries are in shared
 * memory, because 36 fragments of them would fill the registers. Tiles of 32 keys come in 2 stages. Sequences
 * with more than 16 queries have tiles of 16, too, which compute their runs one after another if there are
 * enough of them.
 *
 * Rejected: tiles of 64 queries for four warps. Their sums (64 x 512) would need all registers; such a tile
 * takes more warps, each with columns of its own, as FlashMLA has them.
 */
#include "kernels/cuda/attention_tile.cuh"

using keys = tile<LATENT_DIM>;
static constexpr uint32_t STAGES = 2, STAGE_BYTES = keys::PLANE_BYTES;
static constexpr uint32_t QUERIES_AT = STAGES * STAGE_BYTES, SCORES_AT = QUERIES_AT + LATENT_DIM / 16 * WARP * 16;
static constexpr uint32_t BYTES = SCORES_AT + NARROW * narrow<LATENT_DIM>::STRIDE * 4,
                          RUN_BYTES = NARROW * LATENT_V * 4;
static constexpr int COLUMNS = LATENT_V / 8 / (int)WARPS;

static __global__ void __launch_bounds__(THREADS)
    attend(const __grid_constant__ struct attention t, const __grid_constant__ struct form f)
{
    uint8_t *shared = dynamic_shared<uint8_t>();
    struct item i;
    if (!find_item(t, f, &i))
        return;
    uint32_t lane = threadIdx.x % WARP, m = lane / 4;
    const struct query at[2] = {query_at(t, i, i.first_query + m), query_at(t, i, i.first_query + m + 8)};
    struct queries_of_block q = {(uint4 *)(shared + QUERIES_AT) + lane};
    uint32_t block = i.first_key / keys::KEYS, end = i.last_key / keys::KEYS + 1;
    struct runs_before before = {{}, {}, (float *)(shared + BYTES) + threadIdx.x, false};
    partial<COLUMNS> x;
    empty(&x);
    load_tile<LATENT_DIM, true>(t, i, block, shared);
    copy_async_commit();
    load_queries<LATENT_DIM>(t, at, &q);
    for (uint32_t stage = 0; block < end; block++, stage ^= 1) {
        copy_async_wait<0>();
        __syncthreads();
        if (block + 1 < end)
            load_tile<LATENT_DIM, true>(t, i, block + 1, shared + (stage ^ 1) * STAGE_BYTES);
        copy_async_commit();
        const uint8_t *k = shared + stage * STAGE_BYTES;
        share_block<LATENT_DIM, LATENT_V>(t, at, q, block, k, k, (float *)(shared + SCORES_AT), &x);
        if ((block + 1) * keys::KEYS % CUDA_SPLIT == 0 || block + 1 == end)
            end_run(&before, &x, block + 1 < end);
    }
    store_tile<LATENT_V>(t, f, i, at, m, threadIdx.x / WARP * COLUMNS * 8, x);
}

uint32_t attend_latent_bytes(void)
{
    return BYTES + RUN_BYTES;
}

void attend_latent(cudaStream_t stream, const struct attention &t, const struct form &f, uint32_t n_items,
                   bool keeps_runs)
{
    uint32_t shared = BYTES + (keeps_runs ? RUN_BYTES : 0);
    cudaFuncSetAttribute(attend, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    launch_kernel(stream, attend, dim3(n_items, t.n_kv_heads), THREADS, shared, t, f);
}
