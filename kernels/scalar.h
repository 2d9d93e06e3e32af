/*
 * Arithmetic of single numbers, with the same bits however it is compiled: by FMA instructions if the
 * including file has them, else by exact double arithmetic; in device code by intrinsics that round as IEEE
 * 754 says.
 *
 * exp: x = n ln2 + r, |r| <= ln2 / 2, ln2 in two parts (Cody and Waite 1980); e^r = 1 + r + r^2 P(r) with P
 * of degree 4, a Chebyshev interpolation computed with 50 digits; the result is scaled by 2^n. Error below
 * 1.5 ulp. log: x = 2^e m, m in [sqrt(1/2), sqrt(2)); log(1 + f) = f - f^2 / 2 + f^3 Q(f) with Q of degree 8,
 * computed in the same way.
 *
 * VDPBF16PS, as measured: acc = fma(odd, odd, acc), then acc = fma(even, even, acc). Subnormal inputs count
 * as zero and subnormal results become zero, whatever MXCSR says. A result is subnormal if it is so after
 * rounding to 24 bits with an unlimited exponent, as always on x86 with flush-to-zero.
 */
#pragma once

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define SCALAR static __device__ __forceinline__
#else
#define SCALAR static inline
#endif

#define EXP_LIMIT 87.0f
#define EXP_MAGIC 12582912.0f /* 1.5 * 2^23: adding it rounds to an integer, left in the low bits */
#define LOG2_E    0x1.715476p+0f
#define LN2_HI    0x1.62e8p-1f /* 14 bits: n times it is exact */
#define LN2_LO    -0x1.e8082ep-16f
#define EXP_C0    0.5f
#define EXP_C1    0x1.5554dcp-3f
#define EXP_C2    0x1.55551ap-5f
#define EXP_C3    0x1.120b68p-7f
#define EXP_C4    0x1.6d1102p-10f

SCALAR float float_of(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

SCALAR uint32_t bits_of(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

#ifdef __CUDACC__

SCALAR float scalar_fma(float a, float b, float c)
{
    return __fmaf_rn(a, b, c);
}

#else

/*
 * a b + c in double, rounded to odd (Boldo and Melquiond 2008). a b is exact, and a double rounded to odd
 * keeps the information on which side of any float or midpoint it is. So rounding it once more gives the
 * correctly rounded float.
 */
SCALAR double scalar_fma_odd(float a, float b, float c)
{
    double p = (double)a * b, s = p + c;
    double from_c = s - p, lost = (p - (s - from_c)) + (c - from_c);
    uint64_t bits;
    memcpy(&bits, &s, 8);
    if ((lost > 0 || lost < 0) && !(bits & 1)) {
        bits += (lost > 0) == (s > 0) ? 1 : UINT64_MAX;
        memcpy(&s, &bits, 8);
    }
    return s;
}

SCALAR float scalar_fma(float a, float b, float c)
{
#ifdef __FMA__
    return __builtin_fmaf(a, b, c);
#else
    return (float)scalar_fma_odd(a, b, c);
#endif
}

#endif

SCALAR float scalar_max(float a, float b)
{
    return a > b ? a : b;
}

SCALAR float scalar_min(float a, float b)
{
    return a < b ? a : b;
}

SCALAR float scalar_exp(float x)
{
    if (x > EXP_LIMIT)
        return __builtin_inff();
    if (x < -EXP_LIMIT)
        return 0;
    float t = scalar_fma(x, LOG2_E, EXP_MAGIC), n = t - EXP_MAGIC;
    float r = scalar_fma(n, -LN2_LO, scalar_fma(n, -LN2_HI, x));
    float p = scalar_fma(scalar_fma(scalar_fma(EXP_C4, r, EXP_C3), r, EXP_C2), r, EXP_C1);
    p = scalar_fma(scalar_fma(scalar_fma(p, r, EXP_C0), r, 1.0f), r, 1.0f);
    return p * float_of((bits_of(t) + 127u) << 23);
}

/* One number of k_glu and k_softcap (kernels.h). */
#define GELU_C0 0x1.988454p+0f /* 2 sqrt(2 / pi) */
#define GELU_C1 0x1.2444f2p-4f /* 0.044715 * GELU_C0 */

SCALAR float scalar_swish(float g, float z)
{
    return g / (1.0f + scalar_exp(-z));
}

SCALAR float scalar_gelu(float g)
{
    return scalar_swish(g, g * scalar_fma(g * g, GELU_C1, GELU_C0));
}

SCALAR float scalar_clamped(float g, float u, float alpha, float limit)
{
    g = scalar_min(g, limit);
    u = scalar_max(scalar_min(u, limit), -limit);
    return (u + 1.0f) * scalar_swish(g, alpha * g);
}

SCALAR float scalar_softcap(float x, float cap)
{
    return cap * (1.0f - 2.0f / (scalar_exp(2.0f * (x / cap)) + 1.0f));
}

SCALAR float scalar_log(float x)
{
    static const float Q[] = {0x1.1d8ea6p-4f,  -0x1.d635bcp-4f, 0x1.dea282p-4f,  -0x1.fcf4c6p-4f, 0x1.23d21ap-3f,
                              -0x1.555b4ap-3f, 0x1.999d5ap-3f,  -0x1.fffffcp-3f, 0x1.555554p-2f};
    if (x != x || x == __builtin_inff())
        return x;
    if (x <= 0)
        return x < 0 ? __builtin_nanf("") : -__builtin_inff();
    int32_t e = 0;
    if (x < 0x1p-126f) {
        x *= 0x1p23f;
        e = -23;
    }
    int32_t bits = (int32_t)bits_of(x), up = (bits - 0x3f3504f3) >> 23;
    float f = float_of((uint32_t)(bits - up * (1 << 23))) - 1.0f, n = (float)(e + up), f2 = f * f, q = Q[0];
    for (int i = 1; i < 9; i++)
        q = scalar_fma(q, f, Q[i]);
    float r = scalar_fma(n, LN2_LO, f2 * f * q);
    return scalar_fma(n, LN2_HI, scalar_fma(-0.5f, f2, r) + f);
}

/*
 * k_draw: exp of a logit, as a float and as an integer. Adding 2^52 leaves the rounded integer in the low
 * bits.
 */
SCALAR float scalar_likelihood(float x, float max, float temperature)
{
    return scalar_max(scalar_exp((x - max) / temperature), 0); /* NaN gives 0 */
}

SCALAR uint64_t scalar_weight(float e)
{
    double d = (double)e * 0x1p45 + 0x1p52;
    uint64_t bits;
    memcpy(&bits, &d, 8);
    return bits & 0xfffffffffffff;
}

/* Log of a sum of weights; -log(w / sum) for x; its part of the expected surprise, in units of 2^-38. */
SCALAR float scalar_log_weight(uint64_t sum)
{
    return scalar_log((float)((double)sum * 0x1p-45));
}

SCALAR float scalar_surprise(float log_sum, float x, float max, float temperature)
{
    return log_sum - (x - max) / temperature;
}

SCALAR uint64_t scalar_expected(float e, float surprise)
{
    return scalar_weight(e * surprise * 0x1p-7f);
}

SCALAR float scalar_expectation(uint64_t expected, uint64_t sum)
{
    return (float)((double)expected * 0x1p7 / (double)sum);
}

SCALAR uint64_t scalar_share(uint64_t sum, double share)
{
    return (uint64_t)((double)sum * share);
}

SCALAR uint16_t scalar_to_bf16(float f)
{
    uint32_t b = bits_of(f);
    if ((b & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(b >> 16 | 0x40);
    return (uint16_t)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

SCALAR float scalar_from_bf16(uint16_t h)
{
    return float_of((uint32_t)h << 16);
}

SCALAR uint16_t scalar_to_f16(float f)
{
    uint32_t b = bits_of(f), sign = b >> 16 & 0x8000;
    b &= 0x7fffffff;
    if (b > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (b >> 13 & 0x3ff));
    if (b >= 0x477ff000) /* 65520 and more */
        return (uint16_t)(sign | 0x7c00);
    if (b < 0x38800000) /* subnormal: adding 1/2 rounds to multiples of 2^-24 */
        return (uint16_t)(sign | (bits_of(float_of(b) + 0.5f) - 0x3f000000));
    b += 0xfff + (b >> 13 & 1);
    return (uint16_t)(sign | (b - 0x38000000) >> 13);
}

SCALAR float scalar_from_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 0x3ff;
    if (e == 31)
        return float_of(sign | 0x7f800000 | m << 13 | (m ? 0x400000 : 0));
    if (!e)
        return float_of(sign | bits_of((float)m * 0x1p-24f));
    return float_of(sign | (e + 112) << 23 | m << 13);
}

/* x < y ? a : b for x, y < 2^31, by masks: compilers make jumps of conditions, and then no vectors. */
SCALAR uint32_t scalar_pick(uint32_t x, uint32_t y, uint32_t a, uint32_t b)
{
    uint32_t mask = (uint32_t)((int32_t)(x - y) >> 31);
    return (a & mask) | (b & ~mask);
}

/*
 * E4M3 of the OCP's 8-bit floating point (revision 1.0, 2023): bias 7, no infinity, NaN is 0x7f, saturates at
 * 448. Below 2^-6 numbers are multiples of 2^-9, to which adding 1.5 * 2^14 rounds. Above, the bits are those
 * of f32 with 20 fewer.
 */
SCALAR uint8_t scalar_to_e4m3(float f)
{
    uint32_t b = bits_of(f), sign = b >> 24 & 0x80, nan;
    b &= 0x7fffffff;
    nan = scalar_pick(0x7f800000, b, 0x7f, 0);
    b = scalar_pick(b, 0x43e00000, b, 0x43e00000);
    uint32_t small = bits_of(float_of(b) + 24576.0f), normal = ((b + 0x7ffff + (b >> 20 & 1)) >> 20) - (120 << 3);
    return (uint8_t)(sign | (scalar_pick(b, 0x3c800000, small, normal) & 0x7f) | nan);
}

SCALAR float scalar_from_e4m3(uint8_t q)
{
    uint32_t a = q & 0x7f, sign = (uint32_t)(q & 0x80) << 24;
    uint32_t small = bits_of((float)(int32_t)a * 0x1p-9f), normal = (a << 20) + (120u << 23);
    return float_of(scalar_pick(a, 0x7f, scalar_pick(a, 8, small, normal), 0x7fc00000) | sign);
}

SCALAR float scalar_from(const void *src, uint32_t type_bytes, int is_bf16, uint64_t i)
{
    uint16_t h;
    float f;
    if (type_bytes == 1)
        return scalar_from_e4m3(((const uint8_t *)src)[i]);
    if (type_bytes == 4) {
        memcpy(&f, (const uint8_t *)src + 4 * i, 4);
        return f;
    }
    memcpy(&h, (const uint8_t *)src + 2 * i, 2);
    return is_bf16 ? scalar_from_bf16(h) : scalar_from_f16(h);
}

#ifndef __CUDACC__ /* tensor cores round differently */

/*
 * One half of VDPBF16PS: an fma that treats subnormals as zero, both in and out. a and b are bf16 in the high
 * half.
 */
SCALAR float scalar_dp_half(uint32_t a, uint32_t b, float acc)
{
    float fa = a & 0x7f800000 ? float_of(a) : float_of(a & 0x80000000);
    float fb = b & 0x7f800000 ? float_of(b) : float_of(b & 0x80000000);
    double s = scalar_fma_odd(fa, fb, acc), size = s < 0 ? -s : s;
    if (size < 0x1p-126 - 0x1p-151) {
        uint64_t bits;
        memcpy(&bits, &s, 8);
        return float_of((uint32_t)(bits >> 63) << 31);
    }
    return (float)s;
}

SCALAR float scalar_dp(uint32_t w, uint32_t x, float acc)
{
    acc = scalar_dp_half(w & 0xffff0000, x & 0xffff0000, acc);
    return scalar_dp_half(w << 16, x << 16, acc);
}

#endif
