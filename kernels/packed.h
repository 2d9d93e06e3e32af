/*
 * Weights in packed formats: the scale of a group, the code of a number, and the number of a code (kernels.h,
 * enum k_weights). Every backend packs and widens by these functions, or by code with the same bits.
 *
 * A scale is 0 or between 2^-100 and 2^100. So no product with a code is subnormal or overflows, no check is
 * needed, and a processor that flushes subnormals gives the same bits. Numbers beyond the range become the
 * largest code, and so does NaN.
 */
#pragma once

#include "kernels/kernels.h"
#include "kernels/scalar.h"

#define PACKED_LARGEST 0x1p100f
#define PACKED_MAGIC   12582912.0f /* 1.5 * 2^23: adding it rounds to an integer */

SCALAR float packed_bound(float scale)
{
    return scale >= 1 / PACKED_LARGEST ? scalar_min(scale, PACKED_LARGEST) : 0;
}

SCALAR float packed_round(float x, float least, float most)
{
    return scalar_max(scalar_min(x, most), least) + PACKED_MAGIC - PACKED_MAGIC;
}

/* packed_floor3 rounds down to 3 significant bits; packed_ceil3 rounds a positive x up. */
SCALAR float packed_floor3(float x)
{
    return float_of(bits_of(x) & 0xffe00000);
}

SCALAR float packed_ceil3(float x)
{
    return packed_floor3(float_of(bits_of(x) + 0x1fffff));
}

/*
 * The squared error of int4 for one number. Rounds like packed_round(), but with integers, which compilers
 * vectorize.
 */
SCALAR float packed_loss_of(float w, float scale, float factor)
{
    int32_t q = (int32_t)(bits_of(w * factor + PACKED_MAGIC) - bits_of(PACKED_MAGIC));
    q = q < 7 ? q : 7;
    float d = w - scale * (float)(q > -8 ? q : -8);
    return d * d;
}

/* The sum over n numbers, in 8 partial sums, each in ascending order. */
SCALAR float packed_loss(const float *w, uint32_t n, float scale)
{
    enum { SUMS = 8 };
    float sums[SUMS] = {0}, factor = 1 / scale;
    uint32_t i = 0;
    for (; i + SUMS <= n; i += SUMS)
        for (uint32_t j = 0; j < SUMS; j++)
            sums[j] = sums[j] + packed_loss_of(w[i + j], scale, factor);
    for (uint32_t j = 0; i + j < n; j++)
        sums[j] = sums[j] + packed_loss_of(w[i + j], scale, factor);
    for (uint32_t j = 1; j < SUMS; j++)
        sums[0] = sums[0] + sums[j];
    return sums[0];
}

/*
 * The scale with the smallest error among scales of 3 significant bits: the one that reaches the largest
 * number, and the next
 * 3 below it. Clamping outliers may cost less than coarser steps for all other numbers (Banner et al. 2019,
 * "Post training 4-bit quantization"). 3 bits are enough for that search, and a product then has at most 6.
 */
SCALAR float packed_scale_int4(const float *w, uint32_t n, float most)
{
    float best = packed_ceil3(most / 7), scale = best, least = packed_loss(w, n, best);
    for (int i = 0; i < 3; i++) {
        scale = float_of(bits_of(scale) - 0x200000);
        float loss = packed_loss(w, n, scale);
        if (loss < least) {
            least = loss;
            best = scale;
        }
    }
    return best;
}

/* The scale of a group of n numbers. */
SCALAR float packed_scale(enum k_weights weights, const float *w, uint32_t n)
{
    float most = 0;
    for (uint32_t i = 0; i < n; i++)
        most = scalar_max(float_of(bits_of(w[i]) & 0x7fffffff), most);
    if (!packed_bound(most))
        return 0;
    most = scalar_min(most, PACKED_LARGEST);
    if (weights == WEIGHTS_INT4)
        return packed_bound(packed_scale_int4(w, n, most));
    return packed_bound(weights == WEIGHTS_FP8 ? most / 448 : scalar_from_bf16(scalar_to_bf16(most / 127)));
}

/* The code of w. int8: two's complement; fp8: e4m3; int4: two's complement in the low 4 bits. */
SCALAR uint8_t packed_code(enum k_weights weights, float w, float scale)
{
    if (!scale)
        return 0;
    float x = w / scale;
    if (weights == WEIGHTS_FP8)
        return scalar_to_e4m3(scalar_max(scalar_min(x, 448), -448));
    if (weights == WEIGHTS_INT4)
        return (uint8_t)((int32_t)packed_round(x, -8, 7) & 15);
    return (uint8_t)(int32_t)packed_round(x, -127, 127);
}

/* The number q of a code, before scaling. */
SCALAR float packed_number(enum k_weights weights, uint8_t code)
{
    if (weights == WEIGHTS_FP8)
        return scalar_from_e4m3(code);
    return weights == WEIGHTS_INT4 ? (float)((int32_t)(code ^ 8) - 8) : (float)(int8_t)code;
}

SCALAR uint16_t packed_to_bf16(enum k_weights weights, uint8_t code, float scale)
{
    return scalar_to_bf16(packed_number(weights, code) * scale);
}

/* For codes from elsewhere: replaces the NaN of e4m3, which packing never makes, by the largest number. */
SCALAR uint8_t packed_keep(uint8_t e4m3)
{
    return (e4m3 & 0x7f) == 0x7f ? (uint8_t)(e4m3 - 1) : e4m3;
}

/* Bytes of a scale; bits of a code. */
SCALAR uint32_t packed_scale_bytes(enum k_weights weights)
{
    return weights == WEIGHTS_FP8 ? 4 : 2;
}

SCALAR uint32_t packed_bits(enum k_weights weights)
{
    return weights == WEIGHTS_INT4 ? 4 : 8;
}
