/*
 * The fast products of linear.cu by Hopper's own instructions: the same three launches, for any number of
 * rows.
 *
 * There is one CTA for each multiprocessor, and it walks over tiles of outputs by rows. In each CTA one warp
 * has the tensor memory accelerator fill stages of shared memory with weights and rows, as far ahead as there
 * are stages, also for the next tile. One warpgroup for every 64 outputs multiplies what is in the stages
 * (weights are the first operand, rows the second, so that few rows waste little). While one warpgroup stores
 * its sums, the other may go on by as many stages as there are.
 *
 *     k        ascending in steps of 16, all in one accumulator. Numbers missing in the last step are zeros;
 *              steps with only zeros are left out. So neither tile nor stage changes bits.
 *     tiles    the shape that is estimated to finish first, from the tiles that a multiprocessor gets and the
 *              cost of one: its products, or the bytes that it loads. The narrow shapes exist to let every
 *              multiprocessor read weights, and many stages to have enough loads in flight.
 *     boxes    all weights of a stage, and all its rows, come by one copy each: many small copies keep the
 *              tensor memory accelerator busier than their bytes do. So each shape has its own tensor map of
 *              a matrix. Numbers outside the matrix become zeros and are not read.
 *     start    weights do not depend on the kernels before, so the first stages are filled with them while
 *              those kernels end (launch.cuh).
 *     order    bands of BAND_ROWS rows, and in a band all rows for some outputs first. So the CTAs read about
 *              as much of the weights as of the rows at a time, and the second-level cache holds it.
 *
 * A tile of 32 outputs is half of one product; the other half multiplies whatever follows in shared memory,
 * and its sums are not stored.
 *
 * Packed weights: no tensor memory accelerator can widen codes, so a warpgroup does: it copies codes of
 * the next stages by cp.async, and writes their numbers into a stage in the order that a copy would have.
 * The rest is the same, and so are the bits, for few rows as for many: those of a matrix of the numbers
 * that the codes stand for.
 *
 * Sorted rows: first[] is on the device only, so a warp counts tiles by itself. The box of a tile may reach
 * into the rows of the next matrix; their sums are not stored.
 */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/packed.cuh"
#include "kernels/cuda/stages.cuh"

static constexpr uint32_t WARP = 32, ALL = 0xffffffff;
static constexpr uint32_t BAND_ROWS = 2048, PRODUCERS = 128;

struct hopper_job {
    alignas(64) struct cuda_map w; /* of the only matrix */
    alignas(64) struct cuda_map x; /* its parts: matrices (1 for sorted rows) */
    const struct cuda_map *ws;     /* maps of a stack; NULL: one matrix */
    struct linear_job job;
    uint32_t n_row_tiles; /* of all matrices; unknown here for sorted rows */
};

/*
 * Tiles of OUTS x ROWS sums. A stage has K numbers of each output and row, in slabs of 64, weights before
 * rows. W: the format of the weights; the codes of AHEAD stages are on their way, behind the stages.
 */
template <uint32_t OUTS_, uint32_t ROWS_, uint32_t K_, k_weights W_> struct hopper_shape {
    static constexpr uint32_t OUTS = OUTS_, ROWS = ROWS_, K = K_;
    static constexpr k_weights W = W_;
    static constexpr bool PACKED = W != WEIGHTS_AS_STORED;
    static constexpr uint32_t WARPGROUPS = OUTS <= 64 ? 1 : 2, WARPS = WARPGROUPS * 4, THREADS = (WARPS + 4) * WARP;
    static constexpr uint32_t SLABS = K / CUDA_SLAB_NUMBERS, ROW_BYTES = CUDA_SLAB_NUMBERS * 2; /* of a slab */
    static constexpr uint32_t W_SLAB = OUTS * ROW_BYTES, X_SLAB = ROWS * ROW_BYTES, X_AT = W_SLAB * SLABS;
    static constexpr uint32_t STAGE = (W_SLAB + X_SLAB) * SLABS, ROOM = 226 * 1024;
    /* Pieces of 16 bytes of codes: of a row of a stage, of a stage, and of a producing thread. */
    static constexpr uint32_t CODES = codes_in_piece<W>, PIECES = K / CODES, IN_STAGE = OUTS * PIECES;
    static constexpr uint32_t EACH = IN_STAGE / PRODUCERS, AHEAD = PACKED ? 3 : 0;
    static constexpr uint32_t CODES_BYTES = AHEAD * IN_STAGE * 16;
    using stages = struct stages<(ROOM - CODES_BYTES) / STAGE, STAGE>;
    static constexpr uint32_t SHARED_BYTES = sizeof(stages) + CODES_BYTES;
    /* Registers of a producing thread, and of the others. */
    static constexpr uint32_t GIVEN = PACKED ? 72 : 40, TAKEN = PACKED ? 216 : 232;
    static constexpr uint32_t BAND = BAND_ROWS / ROWS;
    static_assert(stages::N >= (PACKED ? 3 : 4) && SHARED_BYTES <= 227 * 1024 && sizeof(stages) % 16 == 0,
                  "a multiprocessor has room for it");
    static_assert(IN_STAGE % PRODUCERS == 0, "codes are shared evenly");
};

/* ------------------------------------------------------------------- tiles */

/*
 * Each lane has one of 32 matrices from first on: its row tiles, and their sum up to and including this lane.
 */
struct lane_tiles {
    uint32_t own, up_to;
};

template <class S>
static __device__ __forceinline__ struct lane_tiles count_lane_tiles(const struct linear_job &job, uint32_t first)
{
    uint32_t lane = threadIdx.x % WARP, i = first + lane;
    uint32_t own = i < job.n_matrices ? tiles(job.first[i + 1] - job.first[i], S::ROWS) : 0, sum = own;
    for (uint32_t apart = 1; apart < WARP; apart *= 2) {
        uint32_t other = __shfl_up_sync(ALL, sum, apart);
        sum += lane >= apart ? other : 0;
    }
    return {own, sum};
}

template <class S> static __device__ __forceinline__ uint32_t count_row_tiles(const struct hopper_job &h)
{
    if (!h.job.first)
        return h.n_row_tiles;
    uint32_t n = 0;
    for (uint32_t first = 0; first < h.job.n_matrices; first += WARP)
        n += __shfl_sync(ALL, count_lane_tiles<S>(h.job, first).up_to, WARP - 1);
    return n;
}

/* Sorted rows: finds row tile `number`, which must exist. */
template <class S>
static __device__ __forceinline__ void find_sorted(const struct linear_job &job, uint32_t number, struct tile *t)
{
    for (uint32_t first = 0;; first += WARP) {
        const struct lane_tiles l = count_lane_tiles<S>(job, first);
        uint32_t beyond = __ballot_sync(ALL, l.up_to > number);
        if (beyond) {
            uint32_t at = (uint32_t)__ffs((int)beyond) - 1;
            t->matrix = first + at;
            t->row0 = job.first[t->matrix] + (number - __shfl_sync(ALL, l.up_to - l.own, at)) * S::ROWS;
            t->n_rows = min(job.first[t->matrix + 1] - t->row0, S::ROWS);
            return;
        }
        number -= __shfl_sync(ALL, l.up_to, WARP - 1);
    }
}

/* Finds tile `number`. False: there are fewer tiles. All lanes of a warp call it. */
template <class S>
static __device__ __forceinline__ bool find_tile(const struct hopper_job &h, uint32_t n_row_tiles, uint32_t number,
                                                 struct tile *t)
{
    uint32_t across = tiles(h.job.n_out, S::OUTS), first = number / (S::BAND * across) * S::BAND;
    if (first >= n_row_tiles)
        return false;
    uint32_t within = number - first * across, height = min(n_row_tiles - first, S::BAND);
    uint32_t row_tile = first + within % height;
    t->out0 = within / height * S::OUTS;
    if (t->out0 >= across * S::OUTS)
        return false;
    if (h.job.first) {
        find_sorted<S>(h.job, row_tile, t);
    } else {
        uint32_t per_matrix = tiles(h.job.p.n_rows, S::ROWS);
        t->matrix = row_tile / per_matrix;
        t->row0 = row_tile % per_matrix * S::ROWS;
        t->n_rows = min(h.job.p.n_rows - t->row0, S::ROWS);
    }
    return true;
}

/* ------------------------------------------------------------------ kernel */

/* Load the weights, or rows, of a tile from k on into a stage. */
template <class S>
static __device__ __forceinline__ void fill_weights(const void *w, const struct tile &t, uint32_t k, uint8_t *stage,
                                                    uint64_t *full)
{
    barrier_expect(full, S::STAGE); /* its rows, too */
    copy_box(stage, w, full, t.out0, k / CUDA_SLAB_NUMBERS, 0);
}

template <class S>
static __device__ __forceinline__ void fill_rows(const struct hopper_job &h, const struct tile &t, uint32_t k,
                                                 uint8_t *stage, uint64_t *full)
{
    copy_box(stage + S::X_AT, &h.x, full, t.row0, k / CUDA_SLAB_NUMBERS, h.job.first ? 0 : t.matrix);
}

template <class S>
static __device__ __forceinline__ const struct cuda_map *weights_of(const struct hopper_job &h, const struct tile &t)
{
    return h.ws ? h.ws + t.matrix : &h.w;
}

/*
 * Fills the first stages with weights only, and returns their number. Which tiles there are of sorted rows is
 * known only when the kernels before have ended.
 */
template <class S>
static __device__ __forceinline__ uint32_t fill_ahead(const struct hopper_job &h, typename S::stages *stages)
{
    struct tile t;
    uint32_t n = 0;
    if (h.job.first || !find_tile<S>(h, h.n_row_tiles, blockIdx.x, &t))
        return 0;
    const struct cuda_map *w = weights_of<S>(h, t);
    if (h.ws)
        fence_map(w);
    for (uint32_t k = 0; k < h.job.n_in && n < S::stages::N; k += S::K, n++)
        if (threadIdx.x % WARP == 0)
            fill_weights<S>(w, t, k, stages->data[n], &stages->full[n]);
    __syncwarp();
    return n;
}

template <class S>
static __device__ __forceinline__ void produce(const struct hopper_job &h, typename S::stages *stages)
{
    struct turn<typename S::stages> turn;
    struct tile t;
    uint32_t n_ahead = fill_ahead<S>(h, stages);
    wait_for_kernels_before();
    uint32_t n_row_tiles = count_row_tiles<S>(h);
    for (uint32_t number = blockIdx.x; find_tile<S>(h, n_row_tiles, number, &t); number += gridDim.x) {
        const struct cuda_map *w = weights_of<S>(h, t);
        if (h.ws)
            fence_map(w);
        for (uint32_t k = 0; k<h.job.n_in; k += S::K, turn.next(), n_ahead -= n_ahead> 0)
            if (threadIdx.x % WARP == 0) {
                uint8_t *stage = wait_empty(stages, turn);
                if (!n_ahead)
                    fill_weights<S>(w, t, k, stage, &stages->full[turn.stage]);
                fill_rows<S>(h, t, k, stage, &stages->full[turn.stage]);
            }
        __syncwarp();
    }
}

/* Walks over the stages of a CTA: the present one has the numbers of a tile from k on. */
template <class S> struct walk {
    struct tile t;
    uint32_t number, k;
    bool any;

    __device__ __forceinline__ void begin(const struct hopper_job &h, uint32_t n_row_tiles)
    {
        number = blockIdx.x;
        k = 0;
        any = find_tile<S>(h, n_row_tiles, number, &t);
    }

    __device__ __forceinline__ void next(const struct hopper_job &h, uint32_t n_row_tiles)
    {
        k += S::K;
        if (!any || k < h.job.n_in)
            return;
        k = 0;
        number += gridDim.x;
        any = find_tile<S>(h, n_row_tiles, number, &t);
    }
};

/* Piece i of a producing thread: its output in the tile, and its place in the stage's part of a row. */
template <class S> static __device__ __forceinline__ uint32_t piece_out(uint32_t i)
{
    return (i * PRODUCERS + threadIdx.x % PRODUCERS) / S::PIECES;
}

template <class S> static __device__ __forceinline__ uint32_t piece_at(uint32_t i)
{
    return (i * PRODUCERS + threadIdx.x % PRODUCERS) % S::PIECES;
}

template <class S>
static __device__ __forceinline__ void copy_codes(const struct hopper_job &h, const struct walk<S> &w, uint4 *to)
{
    if (w.any) {
        const uint8_t *codes = (const uint8_t *)weights_of(h.job, w.t);
#pragma unroll
        for (uint32_t i = 0; i < S::EACH; i++) {
            uint32_t out = w.t.out0 + piece_out<S>(i), k = w.k + piece_at<S>(i) * S::CODES;
            bool valid = out < h.job.n_out && k < h.job.stride;
            const uint8_t *from = codes + (size_t)out * code_bytes(h.job) + k / S::CODES * 16;
            copy_async16(to + i * PRODUCERS + threadIdx.x % PRODUCERS, valid ? from : codes, valid);
        }
    }
    copy_async_commit(); /* also an empty group: waiting counts groups */
}

template <class S>
static __device__ __forceinline__ void fetch_scales(const struct hopper_job &h, const struct walk<S> &w,
                                                    float scales[S::EACH])
{
    if (!w.any)
        return;
    const void *all = weights_of(h.job, w.t);
#pragma unroll
    for (uint32_t i = 0; i < S::EACH; i++) {
        uint32_t out = w.t.out0 + piece_out<S>(i), k = w.k + piece_at<S>(i) * S::CODES;
        scales[i] = out < h.job.n_out && k < h.job.stride ? scale_of(h.job, all, S::W, out, k) : 0;
    }
}

/* Widens the codes that a thread has copied to where the weights of a stage are. */
template <class S>
static __device__ __forceinline__ void widen_stage(const uint4 *codes, const float scales[S::EACH], uint8_t *stage)
{
#pragma unroll
    for (uint32_t i = 0; i < S::EACH; i++) {
        uint4 piece = codes[i * PRODUCERS + threadIdx.x % PRODUCERS];
        uint32_t out = piece_out<S>(i);
#pragma unroll
        for (uint32_t j = 0; j < S::CODES / 8; j++) {
            uint32_t chunk = piece_at<S>(i) * (S::CODES / 8) + j;
            *(uint4 *)(stage + chunk / 8 * S::W_SLAB + out * S::ROW_BYTES + (chunk % 8 ^ out % 8) * 16) =
                widen_chunk<S::W>(piece, j, scales[i]);
        }
    }
}

/*
 * Packed weights: a warpgroup copies codes, AHEAD stages ahead, and widens them into the stages. Each thread
 * reads only codes that it has copied. Scales are read one stage ahead.
 */
template <class S>
static __device__ __forceinline__ void produce_widened(const struct hopper_job &h, typename S::stages *stages)
{
    uint4 *codes = (uint4 *)(stages + 1);
    bool is_first = threadIdx.x % PRODUCERS == 0;
    struct turn<typename S::stages> turn;
    struct walk<S> now, after, ahead;
    float scales[S::EACH], next[S::EACH];
    wait_for_kernels_before();
    uint32_t n_row_tiles = count_row_tiles<S>(h), slot = 0;
    now.begin(h, n_row_tiles);
    ahead = now;
    for (uint32_t n = 0; n < S::AHEAD; n++, ahead.next(h, n_row_tiles))
        copy_codes<S>(h, ahead, codes + n * S::IN_STAGE);
    fetch_scales<S>(h, now, next);
    while (now.any) {
        after = now;
        after.next(h, n_row_tiles);
#pragma unroll
        for (uint32_t i = 0; i < S::EACH; i++)
            scales[i] = next[i];
        fetch_scales<S>(h, after, next);
        uint8_t *stage = wait_empty(stages, turn);
        uint64_t *full = &stages->full[turn.stage];
        if (is_first) {
            barrier_expect(full, S::X_SLAB * S::SLABS);
            fill_rows<S>(h, now.t, now.k, stage, full);
        }
        copy_async_wait<S::AHEAD - 1>();
        widen_stage<S>(codes + slot * S::IN_STAGE, scales, stage);
        fence_async();
        barrier_arrive(full);
        copy_codes<S>(h, ahead, codes + slot * S::IN_STAGE);
        ahead.next(h, n_row_tiles);
        slot = slot + 1 < S::AHEAD ? slot + 1 : 0;
        now = after;
        turn.next();
    }
}

/* Operands at step 0 of a stage. */
struct operands {
    uint64_t w, x;
};

template <class S> static __device__ __forceinline__ struct operands operands_of(const uint8_t *stage, uint32_t out0)
{
    return {operand_at(stage + out0 * S::ROW_BYTES), operand_at(stage + S::X_AT)};
}

template <class S>
static __device__ __forceinline__ void multiply_step(const struct operands &o, uint32_t step,
                                                     float (&sum)[S::ROWS / 8][4])
{
    multiply_64(sum, operand_further(o.w, step / 4 * S::W_SLAB + step % 4 * 32),
                operand_further(o.x, step / 4 * S::X_SLAB + step % 4 * 32));
}

/* Reads y for several sums at once; otherwise each addition would wait for a read of its own. */
template <int N>
static __device__ __forceinline__ void put_sums(const struct target &to, uint32_t out0, const float (&sum)[N][4])
{
    constexpr int TOGETHER = N < 4 ? N : 4;
    uint32_t lane = threadIdx.x % WARP, out = out0 + lane / 4, row0 = lane % 4 * 2;
    float bias[2] = {0, 0}, *y[2] = {to.y + out + row0 * to.y_stride, to.y + out + (row0 + 1) * to.y_stride};
    if (to.bias)
        for (uint32_t half = 0; half < 2; half++)
            bias[half] = out + half * 8 < to.n_outs ? to.bias[out + half * 8] : 0;
#pragma unroll
    for (int j0 = 0; j0 < N; j0 += TOGETHER) {
        float before[TOGETHER][4] = {};
        auto each = [&](auto act) {
#pragma unroll
            for (int j = 0; j < TOGETHER; j++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (row0 + (j0 + j) * 8 + i % 2 < to.n_rows && out + i / 2 * 8 < to.n_outs)
                        act(j, i, y[i % 2] + j * 8 * to.y_stride + i / 2 * 8);
        };
        if (to.accumulate)
            each([&](int j, int i, const float *at) { before[j][i] = *at; });
        each([&](int j, int i, float *at) { *at = finished(to, sum[j0 + j][i], bias[i / 2], before[j][i]); });
        for (uint32_t r = 0; r < 2; r++)
            y[r] += TOGETHER * 8 * to.y_stride;
    }
}

/*
 * Multiplies all stages of a tile; the last one may hold fewer than K numbers. A stage is released when the
 * products of the next one are queued.
 */
template <class S>
static __device__ __forceinline__ void multiply_tile(uint32_t n_in, uint32_t out0, typename S::stages *stages,
                                                     struct turn<typename S::stages> *turn,
                                                     float (&sum)[S::ROWS / 8][4])
{
    uint32_t before = turn->stage, k = 0;
    for (; k + S::K <= n_in; k += S::K, turn->next()) {
        const struct operands o = operands_of<S>(wait_full(stages, *turn), out0);
        multiply_fence();
#pragma unroll
        for (uint32_t step = 0; step < S::K / 16; step++)
            multiply_step<S>(o, step, sum);
        multiply_commit();
        multiply_wait<1>();
        if (k)
            release(stages, before);
        before = turn->stage;
    }
    multiply_wait<0>(sum);
    if (k)
        release(stages, before);
    if (k == n_in)
        return;
    const struct operands o = operands_of<S>(wait_full(stages, *turn), out0);
    for (uint32_t step = 0; step < tiles(n_in - k, 16); step++) {
        multiply_fence();
        multiply_step<S>(o, step, sum);
        multiply_commit();
        multiply_wait<0>(sum);
    }
    release(stages, turn->stage);
    turn->next();
}

template <class S>
static __device__ __forceinline__ void consume(const struct hopper_job &h, uint32_t warp, typename S::stages *stages)
{
    struct turn<typename S::stages> turn;
    struct tile t;
    wait_for_kernels_before();
    uint32_t n_row_tiles = count_row_tiles<S>(h);
    for (uint32_t number = blockIdx.x; find_tile<S>(h, n_row_tiles, number, &t); number += gridDim.x) {
        float sum[S::ROWS / 8][4] = {};
        multiply_tile<S>(h.job.n_in, warp / 4 * 64, stages, &turn, sum);
        if (warp * 16 < S::OUTS)
            put_sums(target_of(h.job, t), warp * 16, sum);
    }
}

/*
 * The last warpgroup produces, by its first warp or, if it widens, by all. It gives registers that it does
 * not need to the others.
 */
template <class S>
static __global__ void __launch_bounds__(S::THREADS, 1) multiply(const __grid_constant__ struct hopper_job h)
{
    uint8_t *shared = dynamic_shared<uint8_t>();
    if constexpr (IS_HOPPER) {
        auto *stages = (typename S::stages *)shared;
        /* A shuffle, so that the compiler, too, knows that all lanes have the same value. */
        uint32_t warp = __shfl_sync(ALL, threadIdx.x / WARP, 0);
        let_next_start();
        if (threadIdx.x == 0)
            stages->init(S::PACKED ? 1 + PRODUCERS : 1, S::WARPS);
        __syncthreads();
        if (warp >= S::WARPS) {
            if constexpr (S::WARPGROUPS == 2)
                registers_give<S::GIVEN>();
            if constexpr (S::PACKED)
                produce_widened<S>(h, stages);
            else if (warp == S::WARPS)
                produce<S>(h, stages);
        } else {
            if constexpr (S::WARPGROUPS == 2)
                registers_take<S::TAKEN>();
            consume<S>(h, warp, stages);
        }
    }
}

/* ---------------------------------------------------------------- launches */

/*
 * A shape, and the cost of a tile: cycles for a number of k, by the products or by the bytes that a
 * multiprocessor gets in a cycle.
 */
struct hopper_choice {
    void (*kernel)(struct hopper_job);
    uint32_t outs, rows, slabs, threads, shared_bytes;
    double cost;
};

template <class S> static struct hopper_choice choice_of(void)
{
    constexpr double PRODUCTS = 2048, BYTES = 40;
    double products = S::OUTS * S::ROWS / PRODUCTS, bytes = (S::OUTS + S::ROWS) * 2 / BYTES;
    return {multiply<S>, S::OUTS, S::ROWS, S::SLABS, S::THREADS, S::SHARED_BYTES, products > bytes ? products : bytes};
}

/* Larger shapes come first: at equal cost they read less. */
static constexpr uint32_t N_CHOICES = 9;
template <enum k_weights W>
static const struct hopper_choice CHOICES[N_CHOICES] = {
    choice_of<hopper_shape<128, 256, 64, W>>(), choice_of<hopper_shape<128, 128, 64, W>>(),
    choice_of<hopper_shape<128, 64, 128, W>>(), choice_of<hopper_shape<64, 64, 128, W>>(),
    choice_of<hopper_shape<32, 64, 128, W>>(),  choice_of<hopper_shape<64, 32, 128, W>>(),
    choice_of<hopper_shape<32, 32, 128, W>>(),  choice_of<hopper_shape<64, 8, 256, W>>(),
    choice_of<hopper_shape<32, 8, 256, W>>()};

/* By enum k_weights; a shape has the same tiles in each. */
static const struct hopper_choice *const BY_WEIGHTS[] = {CHOICES<WEIGHTS_AS_STORED>, CHOICES<WEIGHTS_INT8>,
                                                         CHOICES<WEIGHTS_FP8>, CHOICES<WEIGHTS_INT4>};

uint32_t cuda_hopper_shapes(void)
{
    return N_CHOICES;
}

struct cuda_tile cuda_hopper_tile(uint32_t shape)
{
    const struct hopper_choice &c = BY_WEIGHTS[0][shape];
    return {c.outs, c.rows, c.slabs};
}

/* Row tiles of all matrices; for sorted rows, the number if all matrices had equally many rows. */
static uint32_t expect_row_tiles(uint32_t n, uint32_t n_rows, bool is_sorted, uint32_t height)
{
    uint32_t n_used = is_sorted && n_rows < n ? n_rows : n;
    return n_used * tiles(is_sorted ? tiles(n_rows, n_used) : n_rows, height);
}

uint32_t cuda_hopper_choose(const struct cuda_matrix *w, uint32_t n, uint32_t n_rows, bool is_sorted)
{
    uint32_t n_sms = device_number(cudaDevAttrMultiProcessorCount), best = 0;
    double least = 0;
    for (uint32_t i = 0; i < N_CHOICES && n_rows; i++) {
        const struct hopper_choice &c = BY_WEIGHTS[0][i];
        uint64_t n_tiles = (uint64_t)expect_row_tiles(n, n_rows, is_sorted, c.rows) * tiles(w->n_out, c.outs);
        double cost = (double)((n_tiles + n_sms - 1) / n_sms) * c.cost;
        if (!i || cost < least) {
            best = i;
            least = cost;
        }
    }
    return best;
}

static void launch(cudaStream_t stream, uint32_t shape, struct hopper_job *h)
{
    if (!h->job.p.n_rows)
        return;
    uint32_t n_sms = device_number(cudaDevAttrMultiProcessorCount);
    const struct hopper_choice *c = &BY_WEIGHTS[h->job.weights][shape];
    h->n_row_tiles = h->job.n_matrices * tiles(h->job.p.n_rows, c->rows);
    uint64_t n_tiles = h->n_row_tiles;
    if (h->job.first)
        n_tiles = h->job.p.n_rows / c->rows + h->job.n_matrices; /* an upper bound */
    n_tiles *= tiles(h->job.n_out, c->outs);
    uint32_t n_ctas = n_tiles < n_sms ? (uint32_t)n_tiles : n_sms;
    launch_next(stream, c->kernel, dim3(n_ctas), c->threads, c->shared_bytes, *h);
}

static bool overlaps[CUDA_MAX_DEVICES];

bool cuda_launches_overlap(void)
{
    int device = 0;
    return cudaGetDevice(&device) == cudaSuccess && device < CUDA_MAX_DEVICES && overlaps[device];
}

cudaError_t cuda_linear_hopper_open(bool *has_out)
{
    /* Older drivers refuse to record overlapping launches into a graph. */
    static const int RECORDS_OVERLAP = 12030;
    cudaFuncAttributes attributes;
    int device = 0, driver = 0;
    cudaError_t e = cudaFuncGetAttributes(&attributes, BY_WEIGHTS[0][0].kernel);
    /* Otherwise the device compiled an older image. */
    *has_out = e == cudaSuccess && attributes.ptxVersion >= 90;
    for (const struct hopper_choice *of : BY_WEIGHTS)
        for (const struct hopper_choice *c = of; c < of + N_CHOICES && e == cudaSuccess && *has_out; c++)
            e = cudaFuncSetAttribute(c->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)c->shared_bytes);
    if (e == cudaSuccess && cudaGetDevice(&device) == cudaSuccess && device < CUDA_MAX_DEVICES)
        overlaps[device] = *has_out && cudaDriverGetVersion(&driver) == cudaSuccess && driver >= RECORDS_OVERLAP;
    return e;
}

static struct hopper_job hopper_job_of(const struct linear_job &job, const struct cuda_map *x)
{
    struct hopper_job h = {};
    h.job = job;
    h.x = *x;
    return h;
}

/* Packed weights have no maps. */
static const struct cuda_map *maps_of(const struct cuda_stack *s, uint32_t shape)
{
    return s->maps ? s->maps + (size_t)shape * s->n : NULL;
}

void cuda_linear_hopper(cudaStream_t stream, const struct cuda_matrix *w, const struct cuda_product *p, uint32_t shape,
                        const struct cuda_map *x)
{
    struct hopper_job h = hopper_job_of(job_of(w, p), x);
    if (w->maps)
        h.w = w->maps[shape];
    launch(stream, shape, &h);
}

void cuda_each_hopper(cudaStream_t stream, const struct cuda_stack *s, const struct cuda_product *p, uint32_t shape,
                      const struct cuda_map *x, size_t y_step)
{
    struct hopper_job h = hopper_job_of(each_job_of(s, p, 0, y_step), x);
    h.ws = maps_of(s, shape);
    launch(stream, shape, &h);
}

void cuda_sorted_hopper(cudaStream_t stream, const struct cuda_stack *s, const struct cuda_product *p, uint32_t shape,
                        const struct cuda_map *x, const uint32_t *first)
{
    struct hopper_job h = hopper_job_of(sorted_job_of(s, p, first), x);
    h.ws = maps_of(s, shape);
    launch(stream, shape, &h);
}
