/* Vectors of 16, for code that both vector widths share; for files compiled with AVX-512 F, BW, VL and DQ. */
#pragma once
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/unroll.h"

#define VL 16

enum { SCORE_ROWS = 4, VALUE_ROWS = 6, VALUE_VECTORS = 4, PREFETCH_BYTES = 4096 };

typedef __m512 vf;
typedef __m512i vi;

static inline vf v_load(const float *p)
{
    return _mm512_loadu_ps(p);
}

static inline void v_store(float *p, vf a)
{
    _mm512_storeu_ps(p, a);
}

static inline vf v_set1(float a)
{
    return _mm512_set1_ps(a);
}

static inline vf v_broadcast(const float *p)
{
    float a;
    memcpy(&a, p, 4); /* p may point to two bf16 */
    return _mm512_set1_ps(a);
}

static inline vf v_add(vf a, vf b)
{
    return _mm512_add_ps(a, b);
}

static inline vf v_sub(vf a, vf b)
{
    return _mm512_sub_ps(a, b);
}

static inline vf v_mul(vf a, vf b)
{
    return _mm512_mul_ps(a, b);
}

static inline vf v_div(vf a, vf b)
{
    return _mm512_div_ps(a, b);
}

static inline vf v_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}

static inline vf v_max(vf a, vf b) /* a > b ? a : b */
{
    return _mm512_max_ps(a, b);
}

static inline vf v_min(vf a, vf b) /* a < b ? a : b */
{
    return _mm512_min_ps(a, b);
}

static inline vf v_negate(vf a)
{
    return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f));
}

static inline __mmask16 first_n(int n)
{
    return n >= VL ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1);
}

static inline vf v_load_n(const float *p, int n)
{
    return _mm512_maskz_loadu_ps(first_n(n), p);
}

static inline vf v_keep(vf a, int n)
{
    return _mm512_maskz_mov_ps(first_n(n), a);
}

static inline vf v_keep_or(vf a, int n, float other)
{
    return _mm512_mask_mov_ps(_mm512_set1_ps(other), first_n(n), a);
}

static inline vf v_drop_or(vf a, int n, float other) /* the first n lanes become other */
{
    return _mm512_mask_mov_ps(a, first_n(n), _mm512_set1_ps(other));
}

/* Sums of scalar_weight(). */
typedef __m512i vw;

static inline vw vw_zero(void)
{
    return _mm512_setzero_si512();
}

static inline vw vw_add_half(vw sum, __m256 e)
{
    __m512d d = _mm512_fmadd_pd(_mm512_cvtps_pd(e), _mm512_set1_pd(0x1p45), _mm512_set1_pd(0x1p52));
    return _mm512_add_epi64(sum, _mm512_and_si512(_mm512_castpd_si512(d), _mm512_set1_epi64(0xfffffffffffff)));
}

static inline vw vw_add_weights(vw sum, vf e)
{
    return vw_add_half(vw_add_half(sum, _mm512_castps512_ps256(e)), _mm512_extractf32x8_ps(e, 1));
}

static inline uint64_t vw_sum(vw sum)
{
    return (uint64_t)_mm512_reduce_add_epi64(sum);
}

static inline vf v_exp_scale(vf t)
{
    __m512i n = _mm512_add_epi32(_mm512_castps_si512(t), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(n, 23));
}

static inline vf v_exp_ends(vf x, vf e)
{
    const vf limit = _mm512_set1_ps(87);
    e = _mm512_mask_mov_ps(e, _mm512_cmp_ps_mask(x, limit, _CMP_GT_OQ), _mm512_set1_ps(__builtin_inff()));
    return _mm512_mask_mov_ps(e, _mm512_cmp_ps_mask(x, v_negate(limit), _CMP_LT_OQ), _mm512_setzero_ps());
}

static inline float v_max_lanes(vf a)
{
    return _mm512_reduce_max_ps(a);
}

/* Adds halves onto each other, as in plain.c. */
static inline float v_sum_lanes(const vf *a)
{
    __m256 x = _mm256_add_ps(_mm512_castps512_ps256(*a), _mm512_extractf32x8_ps(*a, 1));
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

static inline vf v_from_bf16(const void *p)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

static inline vf v_from_f16(const void *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256(p));
}

static inline vf v_from_i8(const void *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p)));
}

/*
 * e4m3 numbers divided by 256 (NaN: 480 / 256): read as f16, whose bias is 8 more, with the sign bit moved
 * up.
 */
static inline vf v_from_e4m3_256th(const void *p)
{
    __m256i h = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(p)), 7);
    return _mm512_cvtph_ps(_mm256_add_epi16(h, _mm256_and_si256(h, _mm256_set1_epi16(0x4000))));
}

static inline vf v_from_e4m3(const void *p)
{
    vf a = v_mul(v_from_e4m3_256th(p), v_set1(256)), size = _mm512_abs_ps(a);
    return _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(size, v_set1(480), _CMP_EQ_OQ), v_set1(__builtin_nanf("")));
}

/* Rounds to bf16, in the high halves. The input must have no NaN. */
static inline vi v_rounded(vf a)
{
    vi b = _mm512_castps_si512(a), odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(b, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
}

static inline void v_to_bf16(void *p, vf a)
{
    vi b = _mm512_castps_si512(a);
    vi rounded =
        _mm512_mask_or_epi32(v_rounded(a), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), b, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

static inline void v_to_f16(void *p, vf a)
{
    _mm256_storeu_si256(p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

/* Transposes 16 x 16: pairs, then fours, then 128-bit lanes. */
static inline void v_transpose(const float *from, size_t from_stride, float *to, size_t to_stride)
{
    __m512 a[16], b[16];
    UNROLL for (int i = 0; i < 16; i++) a[i] = v_load(from + (size_t)i * from_stride);
    UNROLL for (int i = 0; i < 16; i += 2)
    {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4)
    {
        a[i] = _mm512_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm512_shuffle_ps(b[i], b[i + 2], 0xee);
        a[i + 2] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
    UNROLL for (int i = 0; i < 4; i++)
    {
        b[i] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xdd);
    }
    UNROLL for (int i = 0; i < 4; i++)
    {
        v_store(to + (size_t)i * to_stride, _mm512_shuffle_f32x4(b[i], b[i + 8], 0x88));
        v_store(to + (size_t)(i + 8) * to_stride, _mm512_shuffle_f32x4(b[i], b[i + 8], 0xdd));
        v_store(to + (size_t)(i + 4) * to_stride, _mm512_shuffle_f32x4(b[i + 4], b[i + 12], 0x88));
        v_store(to + (size_t)(i + 12) * to_stride, _mm512_shuffle_f32x4(b[i + 4], b[i + 12], 0xdd));
    }
}

struct vpair {
    vf lo, hi; /* lo and hi are 16 outputs apart */
};

/* 32 numbers to words of bf16. The input must have no NaN. */
static inline vi v_words(vf a, vf b)
{
#ifdef __AVX512BF16__
    return (vi)_mm512_cvtne2ps_pbh(b, a);
#else
    __m256i low = _mm512_cvtepi32_epi16(_mm512_srli_epi32(v_rounded(a), 16));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), _mm512_cvtepi32_epi16(_mm512_srli_epi32(v_rounded(b), 16)),
                              1);
#endif
}

/*
 * The scales of int4 for a block of 128 numbers, one for each number. A scale is (1 + j / 4) 2^e. Entry 16 j
 * + q of a table is the bf16 product q (1 + j / 4) 2^123. Its exponent is then lowered by 123 - e,
 * saturating, so that zero stays zero.
 */
struct int4_scales {
    vi low, high; /* the table of products */
    vi j[4], less[4];
};

static inline vi v_int4_products(float even, float odd)
{
    const vf q = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    vi a = _mm512_castps_si512(v_mul(q, v_set1(even * 0x1p123f))),
       b = _mm512_castps_si512(v_mul(q, v_set1(odd * 0x1p123f)));
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(_mm512_srli_epi32(a, 16))),
                              _mm512_cvtepi32_epi16(_mm512_srli_epi32(b, 16)), 1);
}

static inline void v_int4_open(struct int4_scales *s, const uint16_t *scales)
{
    s->low = v_int4_products(1, 1.25f);
    s->high = v_int4_products(1.5f, 1.75f);
    UNROLL for (int i = 0; i < 4; i++)
    {
        vi x = _mm512_loadu_si512(scales + 32 * i);
        s->j[i] = _mm512_and_si512(_mm512_srli_epi16(x, 1), _mm512_set1_epi16(0x30));
        s->less[i] =
            _mm512_sub_epi16(_mm512_set1_epi16((127 + 123) << 7), _mm512_and_si512(x, _mm512_set1_epi16(0x7f80)));
    }
}

/* Numbers 32 i .. 32 i + 31 of a block. */
static inline vi v_int4_words(const uint8_t *codes, int i, const struct int4_scales *s)
{
    vi q = _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(codes), (unsigned)(4 * i)), _mm512_set1_epi16(15));
    return _mm512_subs_epu16(_mm512_permutex2var_epi16(s->low, _mm512_or_si512(q, s->j[i]), s->high), s->less[i]);
}

static inline vf v_of_words(vi words)
{
    return _mm512_castsi512_ps(words);
}

static inline struct vpair v_widen_words(vi words)
{
    return (struct vpair){_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)),
                          _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(-65536)))};
}

static inline void v_store_words(void *p, vi words)
{
    _mm512_storeu_si512(p, words);
}

/* Widens 16 words of two bf16 each (cpu.h). */
static inline struct vpair v_widen_pair(const void *p)
{
    return v_widen_words(_mm512_loadu_si512(p));
}
