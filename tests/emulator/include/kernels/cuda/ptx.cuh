/* What kernels/cuda/ptx.cuh declares, as the PTX manual draws it (section 9.7.14), for the emulated
 * device. */
#pragma once

#include "kernels/scalar.h"
#include "tests/emulator/emulator.h"

static inline void copy_async16(void *shared, const void *from, bool valid)
{
    emulator::copy_later(shared, from, valid);
}

static inline void copy_async_commit(void)
{
    emulator::copies_commit();
}

template <int PENDING> static inline void copy_async_wait(void)
{
    emulator::copies_wait(PENDING);
}

/* Row `row` of matrix m, whose address lane 8 m + row brings. */
static inline const uint16_t *matrix_row(const emulator::slot *all, uint32_t m, uint32_t row)
{
    return (const uint16_t *)emulator::value_of<const void *>(all[8 * m + row]);
}

static inline void load_matrix4(uint32_t r[4], const void *row)
{
    const emulator::slot *all = emulator::meet(0xffffffff, emulator::LOAD_MATRIX, &row, sizeof(row));
    uint32_t lane = emulator::lane();
    for (uint32_t m = 0; m < 4; m++)
        memcpy(&r[m], matrix_row(all, m, lane / 4) + lane % 4 * 2, 4);
}

static inline void load_matrix4_transposed(uint32_t r[4], const void *row)
{
    const emulator::slot *all = emulator::meet(0xffffffff, emulator::LOAD_MATRIX, &row, sizeof(row));
    uint32_t lane = emulator::lane();
    for (uint32_t m = 0; m < 4; m++) {
        uint32_t low = matrix_row(all, m, lane % 4 * 2)[lane / 4],
                 high = matrix_row(all, m, lane % 4 * 2 + 1)[lane / 4];
        r[m] = low | high << 16;
    }
}

struct fragments { /* of a lane */
    uint32_t a[4], b[2];
};

/* The pair of bf16 that is in a word, as floats. */
static inline void unpack_bf16(uint32_t word, float *low, float *high)
{
    *low = float_of(word << 16);
    *high = float_of(word & 0xffff0000);
}

/* From the fragments of all lanes, the sums of each. */
static inline void multiply_fragments(emulator::slot *all)
{
    float a[16][16], b[16][8]; /* [row][k], [k][column] */
    double sums[16][8] = {};
    for (uint32_t lane = 0; lane < emulator::WARP; lane++) {
        struct fragments f = emulator::value_of<struct fragments>(all[lane]);
        uint32_t row = lane / 4, k = lane % 4 * 2;
        for (uint32_t i = 0; i < 4; i++)
            unpack_bf16(f.a[i], &a[row + i % 2 * 8][k + i / 2 * 8], &a[row + i % 2 * 8][k + i / 2 * 8 + 1]);
        for (uint32_t i = 0; i < 2; i++)
            unpack_bf16(f.b[i], &b[k + i * 8][row], &b[k + i * 8 + 1][row]);
    }
    for (uint32_t row = 0; row < 16; row++)
        for (uint32_t k = 0; k < 16; k++)
            for (uint32_t column = 0; column < 8; column++)
                sums[row][column] += (double)a[row][k] * (double)b[k][column];
    for (uint32_t lane = 0; lane < emulator::WARP; lane++) {
        const double *upper = &sums[lane / 4][lane % 4 * 2], *lower = upper + 8 * 8;
        const double own[4] = {upper[0], upper[1], lower[0], lower[1]};
        memcpy(all[lane].bytes, own, sizeof(own));
    }
}

/* Sums of 16 products are exact before they are added to d, which no device promises. */
static inline void multiply_16x8x16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
    const struct fragments mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    const emulator::slot *all = emulator::meet(0xffffffff, emulator::MULTIPLY, &mine, sizeof(mine), multiply_fragments);
    double sums[4];
    memcpy(sums, all[emulator::lane()].bytes, sizeof(sums));
    for (uint32_t i = 0; i < 4; i++)
        d[i] = (float)(sums[i] + (double)d[i]);
}

static inline uint16_t to_bf16(float x)
{
    return scalar_to_bf16(x);
}

static inline uint32_t pack_bf16(float low, float high)
{
    return to_bf16(low) | (uint32_t)to_bf16(high) << 16;
}

static inline void from_e4m3_pair(uint32_t codes, float *low, float *high)
{
    *low = scalar_from_e4m3((uint8_t)codes);
    *high = scalar_from_e4m3((uint8_t)(codes >> 8));
}

static inline float exp2_fast(float x)
{
    float y = exp2f(x);
    return y < 0x1p-126f ? 0 : y;
}
