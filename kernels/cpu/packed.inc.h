/*
 * Products with a matrix in a packed format (cpu.h). The bits are those of products with the bf16 numbers
 * that the codes stand for.
 *
 * Codes are widened in blocks of 128: WORDS vectors of bf16 words, as a plain panel has them in one step of
 * pairs or in two steps of single k's. For a few rows a block goes from registers straight into the sums:
 * widening then overlaps with memory and products, while storing words for another loop takes twice as long.
 * For more rows blocks are stored, and the tiles of linear.inc.h, which includes this file, multiply them.
 */
#pragma once

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/unroll.h"

enum {
    GROUP_CODES = K_GROUP * PANEL,
    BLOCK_CODES = 128,
    WORDS = BLOCK_CODES / (2 * VL),
    PANEL_VECTORS = PANEL / VL,
    FEW_ROWS = 4,
};

/* A scale for each code of a block. Members that the format does not use are not set. */
struct block_scales {
    vf wide[2 * WORDS]; /* int8: scales; fp8: 256 times the scales */
    struct int4_scales int4;
};

/*
 * Spreads a step's scales over a block: for single k's all of them twice, for pairs each of them twice in a
 * row.
 */
static inline void spread_halves(const uint16_t *scales, bool pairs, uint16_t *out)
{
    uint32_t twice[PANEL];
    if (!pairs) {
        memcpy(out, scales, PANEL * sizeof(*out));
        memcpy(out + PANEL, scales, PANEL * sizeof(*out));
        return;
    }
    for (uint32_t i = 0; i < PANEL; i++)
        twice[i] = scales[i] * 0x10001u;
    memcpy(out, twice, sizeof(twice));
}

/* The same, times 256, because e4m3 codes are widened to 1/256 of their value. */
static inline void spread_floats(const float *scales, bool pairs, float *out)
{
    for (uint32_t i = 0; i < PANEL && pairs; i++)
        out[2 * i] = out[2 * i + 1] = scales[i] * 256;
    for (uint32_t i = 0; i < PANEL && !pairs; i++)
        out[i] = out[i + PANEL] = scales[i] * 256;
}

static inline __attribute__((always_inline)) void scales_open(struct block_scales *s, const uint8_t *group,
                                                              enum k_weights weights, bool pairs)
{
    if (weights == WEIGHTS_FP8) {
        float floats[BLOCK_CODES];
        spread_floats((const void *)group, pairs, floats);
        UNROLL for (int i = 0; i < 2 * WORDS; i++) s->wide[i] = v_load(floats + i * VL);
        return;
    }
    uint16_t halves[BLOCK_CODES];
    spread_halves((const void *)group, pairs, halves);
    if (weights == WEIGHTS_INT4)
        v_int4_open(&s->int4, halves);
    else
        UNROLL for (int i = 0; i < 2 * WORDS; i++) s->wide[i] = v_from_bf16(halves + i * VL);
}

static inline __attribute__((always_inline)) vf wide_codes(const uint8_t *codes, enum k_weights weights)
{
    return weights == WEIGHTS_FP8 ? v_from_e4m3_256th(codes) : v_from_i8(codes);
}

/* Vector i of a block, widened and scaled. */
static inline __attribute__((always_inline)) vi words_of(const uint8_t *codes, int i, const struct block_scales *s,
                                                         enum k_weights weights)
{
    if (weights == WEIGHTS_INT4)
        return v_int4_words(codes, i, &s->int4);
    codes += i * 2 * VL;
    return v_words(v_mul(wide_codes(codes, weights), s->wide[2 * i]),
                   v_mul(wide_codes(codes + VL, weights), s->wide[2 * i + 1]));
}

static inline void prefetch_block(const uint8_t *codes, enum k_weights weights)
{
    __builtin_prefetch(codes + PREFETCH_BYTES, 0, 3);
    if (weights != WEIGHTS_INT4)
        __builtin_prefetch(codes + PREFETCH_BYTES + 64, 0, 3);
}

static inline __attribute__((always_inline)) uint32_t block_bytes(enum k_weights weights)
{
    return BLOCK_CODES * packed_bits(weights) / 8;
}

/* ------------------------------------------------------------- to the cache */

static inline __attribute__((always_inline)) void widen_groups(const struct k_matrix *m, uint32_t panel, uint32_t first,
                                                               uint32_t n, enum k_weights weights, uint16_t *to)
{
    bool pairs = m->compute == COMPUTE_BF16;
    for (uint32_t g = first; g < first + n; g++) {
        const uint8_t *group = matrix_group(m, panel, g), *codes = group + group_scales_bytes(m);
        struct block_scales s;
        scales_open(&s, group, weights, pairs);
        for (uint32_t i = 0; i < GROUP_CODES; i += BLOCK_CODES, codes += block_bytes(weights), to += BLOCK_CODES) {
            prefetch_block(codes, weights);
            UNROLL for (int j = 0; j < WORDS; j++) v_store_words(to + j * 2 * VL, words_of(codes, j, &s, weights));
        }
    }
}

/* Widens n groups of a panel, from `first` on, to steps of a bf16 panel. */
static inline void widen(const struct k_matrix *m, uint32_t panel, uint32_t first, uint32_t n, uint16_t *to)
{
    if (m->weights == WEIGHTS_INT8)
        widen_groups(m, panel, first, n, WEIGHTS_INT8, to);
    else if (m->weights == WEIGHTS_FP8)
        widen_groups(m, panel, first, n, WEIGHTS_FP8, to);
    else
        widen_groups(m, panel, first, n, WEIGHTS_INT4, to);
}

/* --------------------------------------------------------------- few rows */

/* Up to FEW_ROWS rows times a panel; sums [rows][PANEL]. */
struct few_job {
    const struct cpu_linear_job *job;
    uint32_t panel;
    const float *x; /* the first row */
    float *sums;
};

struct few_sums {
    vf at[FEW_ROWS]
         /* Vectors in the order of a panel's columns; single k's: in pairs, 16 columns apart. */
         [PANEL_VECTORS];
};

static inline __attribute__((always_inline)) void add_pairs(struct few_sums *sums, const vi words[WORDS],
                                                            const float *x, size_t x_stride, int rows,
                                                            enum linear_kind kind)
{
    UNROLL for (int r = 0; r < rows; r++)
    {
        vf pair = v_broadcast(x + r * x_stride);
        UNROLL for (int i = 0; i < WORDS; i++) sums->at[r][i] =
            v_step(v_of_words(words[i]), pair, sums->at[r][i], kind);
    }
}

static inline __attribute__((always_inline)) void add_single(struct few_sums *sums, const vi words[WORDS / 2],
                                                             const float *x, size_t x_stride, int rows,
                                                             enum linear_kind kind)
{
    UNROLL for (int i = 0; i < WORDS / 2; i++)
    {
        struct vpair w = v_widen_words(words[i]);
        UNROLL for (int r = 0; r < rows; r++)
        {
            vf one = v_broadcast(x + r * x_stride);
            sums->at[r][2 * i] = v_step(w.lo, one, sums->at[r][2 * i], kind);
            sums->at[r][2 * i + 1] = v_step(w.hi, one, sums->at[r][2 * i + 1], kind);
        }
    }
}

static inline __attribute__((always_inline)) void sum_group(const struct k_matrix *m, const uint8_t *group,
                                                            const float *x, size_t x_stride, uint32_t n_steps,
                                                            struct few_sums *sums, int rows, enum linear_kind kind,
                                                            enum k_weights weights)
{
    const uint8_t *codes = group + group_scales_bytes(m);
    const bool pairs = kind == LINEAR_DP;
    struct block_scales s;
    scales_open(&s, group, weights, pairs);
    for (uint32_t step = 0; step < n_steps; step += pairs ? 1 : 2, codes += block_bytes(weights)) {
        vi words[WORDS];
        prefetch_block(codes, weights);
        UNROLL for (int i = 0; i < WORDS; i++) words[i] = words_of(codes, i, &s, weights);
        if (pairs) {
            add_pairs(sums, words, x + step, x_stride, rows, kind);
            continue;
        }
        add_single(sums, words, x + step, x_stride, rows, kind);
        if (step + 1 < n_steps)
            add_single(sums, words + WORDS / 2, x + step + 1, x_stride, rows, kind);
    }
}

static inline int few_column(int vector, bool pairs)
{
    return pairs ? vector * VL : pair_column(vector / 2) + vector % 2 * 16;
}

static inline __attribute__((always_inline)) void sum_rows(const struct few_job *f, int rows, enum linear_kind kind,
                                                           enum k_weights weights)
{
    const struct k_matrix *m = f->job->w;
    struct few_sums sums;
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int i = 0; i < PANEL_VECTORS; i++) sums.at[r][i] = v_set1(0);
    for (uint32_t step = 0, g = 0; step < m->n_steps; step += group_steps(m), g++) {
        uint32_t left = m->n_steps - step, n = left < group_steps(m) ? left : group_steps(m);
        sum_group(m, matrix_group(m, f->panel, g), f->x + step, f->job->x_stride, n, &sums, rows, kind, weights);
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int i = 0; i < PANEL_VECTORS; i++)
        v_store(f->sums + r * PANEL + few_column(i, kind == LINEAR_DP), sums.at[r][i]);
}

static inline __attribute__((always_inline)) void sum_formats(const struct few_job *f, int rows, enum linear_kind kind)
{
    if (f->job->w->weights == WEIGHTS_INT8)
        sum_rows(f, rows, kind, WEIGHTS_INT8);
    else if (f->job->w->weights == WEIGHTS_FP8)
        sum_rows(f, rows, kind, WEIGHTS_FP8);
    else
        sum_rows(f, rows, kind, WEIGHTS_INT4);
}

static inline __attribute__((always_inline)) void any_few(const struct few_job *f, uint32_t rows, enum linear_kind kind)
{
    switch (rows) {
    case 1:
        sum_formats(f, 1, kind);
        break;
    case 2:
        sum_formats(f, 2, kind);
        break;
    case 3:
        sum_formats(f, 3, kind);
        break;
    default:
        sum_formats(f, 4, kind);
    }
}
