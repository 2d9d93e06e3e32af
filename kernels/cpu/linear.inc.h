/*
 * The inner loops of k_linear, written once for both vector widths. The including file defines VL, vf, struct
 * vpair, the v_* functions, and v_step(w, x, acc, kind), which adds one step to a vector of sums.
 *
 * A tile is up to 6 rows by as many outputs as accumulators fit into registers. Outputs come in pairs of
 * vectors whose columns are 16 apart, because a vector of bf16 words widens into such a pair (cpu.h). A block
 * of STEP_BLOCK steps is finished for all rows before the next block begins, so a panel's block is read from
 * memory once and then from the L2 cache. Between blocks, sums wait in memory, which keeps their bits. Blocks
 * in a packed format are widened first; a single tile widens fewer steps at a time, so that they are still in
 * the L1 cache.
 */
#pragma once

#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/unroll.h"

enum linear_kind { LINEAR_F32, LINEAR_F16, LINEAR_BF16, LINEAR_DP };

enum { TILE_ROWS = 6, PAIRS = 32 / VL };

/* Vector pairs of a tile: a whole panel for one row; for more rows as many as fit into registers. */
static inline int tile_pairs(int rows)
{
    if (VL == 16 || rows == 1)
        return PAIRS;
    return rows == 2 ? 2 : 1;
}

static inline int pair_column(int pair)
{
    return VL == 16 ? 32 * pair : pair / 2 * 32 + pair % 2 * 8;
}

#include "kernels/cpu/packed.inc.h"

static inline __attribute__((always_inline)) struct vpair load_pair(const uint8_t *step, int pair,
                                                                    enum linear_kind kind)
{
    int c = pair_column(pair);
    if (kind == LINEAR_BF16)
        return v_widen_pair(step + pair * VL * 4);
    if (kind == LINEAR_F16)
        return (struct vpair){v_from_f16(step + 2 * c), v_from_f16(step + 2 * (c + 16))};
    return (struct vpair){v_load((const void *)(step + 4 * c)), v_load((const void *)(step + 4 * (c + 16)))};
}

struct cpu_tile {
    const uint8_t *w; /* step 0 of this block */
    size_t step_bytes;
    uint32_t n_steps;
    /* Row 0, step 0. For LINEAR_DP words of two bf16, which are only moved as floats. */
    const float *x;
    size_t x_stride;
    float *sums;      /* [rows][PANEL] */
    uint32_t n_near;  /* cache lines to fetch with each step into L1, PREFETCH_BYTES ahead */
    uint32_t n_ahead; /* the same from `ahead` on, into L2 */
    const uint8_t *ahead;
};

static inline __attribute__((always_inline)) void run_tile(const struct cpu_tile *t, int rows, int pair0,
                                                           enum linear_kind kind)
{
    const int pairs = tile_pairs(rows);
    vf acc[TILE_ROWS][2 * PAIRS];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int p = 0; p < pairs; p++)
    {
        acc[r][2 * p] = v_load(t->sums + r * PANEL + pair_column(pair0 + p));
        acc[r][2 * p + 1] = v_load(t->sums + r * PANEL + pair_column(pair0 + p) + 16);
    }
    const uint8_t *w = t->w, *ahead = t->ahead;
    for (uint32_t s = 0; s < t->n_steps; s++, w += t->step_bytes) {
        struct vpair wp[PAIRS];
        if (pair0 == 0) {
            for (uint32_t i = 0; i < t->n_near * 64; i += 64)
                __builtin_prefetch(w + PREFETCH_BYTES + i, 0, 3);
            for (uint32_t i = 0; i < t->n_ahead; i++, ahead += 64)
                __builtin_prefetch(ahead, 0, 2);
        }
        UNROLL for (int p = 0; p < pairs; p++) wp[p] = load_pair(w, pair0 + p, kind);
        UNROLL for (int r = 0; r < rows; r++)
        {
            vf x = v_broadcast(t->x + r * t->x_stride + s);
            UNROLL for (int p = 0; p < pairs; p++)
            {
                acc[r][2 * p] = v_step(wp[p].lo, x, acc[r][2 * p], kind);
                acc[r][2 * p + 1] = v_step(wp[p].hi, x, acc[r][2 * p + 1], kind);
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int p = 0; p < pairs; p++)
    {
        v_store(t->sums + r * PANEL + pair_column(pair0 + p), acc[r][2 * p]);
        v_store(t->sums + r * PANEL + pair_column(pair0 + p) + 16, acc[r][2 * p + 1]);
    }
}

static inline __attribute__((always_inline)) void tile_rows(const struct cpu_tile *t, int rows, enum linear_kind kind)
{
    for (int pair0 = 0; pair0 < PAIRS; pair0 += tile_pairs(rows))
        run_tile(t, rows, pair0, kind);
}

static inline __attribute__((always_inline)) void any_tile(const struct cpu_tile *t, uint32_t rows,
                                                           enum linear_kind kind)
{
    switch (rows) {
    case 1:
        tile_rows(t, 1, kind);
        break;
    case 2:
        tile_rows(t, 2, kind);
        break;
    case 3:
        tile_rows(t, 3, kind);
        break;
    case 4:
        tile_rows(t, 4, kind);
        break;
    case 5:
        tile_rows(t, 5, kind);
        break;
    default:
        tile_rows(t, 6, kind);
    }
}

/*
 * The stream of weights must not pause while later tiles work from the cache. So the tiles of a block divide
 * the lines of the next block among them; a single tile fetches its own block, a little ahead.
 */
static inline void plan_prefetch(struct cpu_tile *t, uint32_t index, uint32_t n_tiles)
{
    uint32_t lines = (uint32_t)(t->step_bytes / 64);
    t->n_near = n_tiles == 1 ? lines : 0;
    t->n_ahead = n_tiles > 1 && index < lines ? (lines + n_tiles - 1) / n_tiles : 0;
    t->ahead = t->w + STEP_BLOCK * t->step_bytes + (size_t)index * t->n_steps * t->n_ahead * 64;
}

/* The loops of one kind. They are separate functions, because registers would be short otherwise. */
struct linear_loops {
    void (*tile)(const struct cpu_tile *t, uint32_t rows);
    void (*few)(const struct few_job *f, uint32_t rows); /* NULL if the format is not packed */
};

/* Adds the steps of t, from `step` on, for all rows. Tiles have nearly equal heights. */
static inline void sum_block(const struct cpu_linear_job *job, struct cpu_tile *t, uint32_t step, uint32_t row0,
                             uint32_t n_rows, float *sums, const struct linear_loops *loops)
{
    uint32_t n_tiles = (n_rows + TILE_ROWS - 1) / TILE_ROWS;
    for (uint32_t i = 0, row = 0; i < n_tiles; i++) {
        uint32_t rows = (n_rows - row + n_tiles - i - 1) / (n_tiles - i);
        t->x = (const float *)job->x + (row0 + row) * t->x_stride + step;
        t->sums = sums + (size_t)row * PANEL;
        if (!job->w->weights)
            plan_prefetch(t, i, n_tiles);
        loops->tile(t, rows);
        row += rows;
    }
}

static inline void sum_packed(const struct cpu_linear_job *job, uint32_t panel, uint32_t row0, uint32_t n_rows,
                              float *sums, const struct linear_loops *loops)
{
    _Alignas(64) uint16_t wide[STEP_BLOCK * 2 * PANEL];
    const struct k_matrix *m = job->w;
    uint32_t each = group_steps(m), block = n_rows <= TILE_ROWS ? NEAR_BLOCK : STEP_BLOCK;
    if (n_rows <= FEW_ROWS) {
        loops->few(&(struct few_job){job, panel, (const float *)job->x + row0 * job->x_stride, sums}, n_rows);
        return;
    }
    struct cpu_tile t = {.w = (const uint8_t *)wide, .step_bytes = m->step_bytes, .x_stride = job->x_stride};
    for (uint32_t step = 0; step < m->n_steps; step += block) {
        t.n_steps = m->n_steps - step < block ? m->n_steps - step : block;
        widen(m, panel, step / each, (t.n_steps + each - 1) / each, wide);
        sum_block(job, &t, step, row0, n_rows, sums, loops);
    }
}

/* Adds all steps of a panel for some rows; leaves the sums in memory. */
static inline void sum_panel(const struct cpu_linear_job *job, uint32_t panel, uint32_t row0, uint32_t row1,
                             float *sums, const struct linear_loops *loops)
{
    const struct k_matrix *m = job->w;
    memset(sums, 0, (size_t)(row1 - row0) * PANEL * sizeof(float));
    if (m->weights) {
        sum_packed(job, panel, row0, row1 - row0, sums, loops);
        return;
    }
    struct cpu_tile t = {.step_bytes = m->step_bytes, .x_stride = job->x_stride};
    for (uint32_t step = 0; step < m->n_steps; step += STEP_BLOCK) {
        t.w = matrix_step(m, panel, step);
        t.n_steps = m->n_steps - step < STEP_BLOCK ? m->n_steps - step : STEP_BLOCK;
        sum_block(job, &t, step, row0, row1 - row0, sums, loops);
    }
}

static inline void put_sums(const struct cpu_linear_job *job, uint32_t panel, uint32_t row0, uint32_t row1, float *sums)
{
    uint32_t n_out = job->w->n_out, first = panel * PANEL, n = n_out - first < PANEL ? n_out - first : PANEL;
    for (uint32_t row = row0; row < row1; row++, sums += PANEL) {
        float *y = job->y + row * job->y_stride + first;
        if (job->w->bias)
            for (uint32_t c = 0; c < n; c++)
                sums[c] = sums[c] + job->w->bias[first + c];
        if (job->accumulate)
            for (uint32_t c = 0; c < n; c++)
                y[c] = y[c] + sums[c];
        else
            memcpy(y, sums, n * sizeof(float));
    }
}
