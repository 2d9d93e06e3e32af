/*
 * AVX2, FMA and F16C: vectors of 8.
 *
 * VDPBF16PS is two fmas here, with the processor set to treat subnormals as zero: this rounds and flushes
 * exactly as the instruction does (scalar.h).
 */
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/unroll.h"

#define VL 8

enum { SCORE_ROWS = 4, VALUE_ROWS = 6, VALUE_VECTORS = 2, PREFETCH_BYTES = 4096 };

typedef __m256 vf;
typedef __m256i vi;

static inline vf v_load(const float *p)
{
    return _mm256_loadu_ps(p);
}

static inline void v_store(float *p, vf a)
{
    _mm256_storeu_ps(p, a);
}

static inline vf v_set1(float a)
{
    return _mm256_set1_ps(a);
}

static inline vf v_broadcast(const float *p)
{
    float a;
    memcpy(&a, p, 4); /* p may point to two bf16 */
    return _mm256_set1_ps(a);
}

static inline vf v_add(vf a, vf b)
{
    return _mm256_add_ps(a, b);
}

static inline vf v_sub(vf a, vf b)
{
    return _mm256_sub_ps(a, b);
}

static inline vf v_mul(vf a, vf b)
{
    return _mm256_mul_ps(a, b);
}

static inline vf v_div(vf a, vf b)
{
    return _mm256_div_ps(a, b);
}

static inline vf v_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}

static inline vf v_max(vf a, vf b) /* a > b ? a : b */
{
    return _mm256_max_ps(a, b);
}

static inline vf v_min(vf a, vf b) /* a < b ? a : b */
{
    return _mm256_min_ps(a, b);
}

static inline vf v_negate(vf a)
{
    return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f));
}

/* All ones in the first n lanes. */
static inline __m256i first_n(int n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static inline vf v_load_n(const float *p, int n)
{
    return _mm256_maskload_ps(p, first_n(n));
}

static inline vf v_keep(vf a, int n)
{
    return _mm256_and_ps(a, _mm256_castsi256_ps(first_n(n)));
}

static inline vf v_keep_or(vf a, int n, float other)
{
    return _mm256_blendv_ps(_mm256_set1_ps(other), a, _mm256_castsi256_ps(first_n(n)));
}

static inline vf v_drop_or(vf a, int n, float other) /* the first n lanes become other */
{
    return _mm256_blendv_ps(a, _mm256_set1_ps(other), _mm256_castsi256_ps(first_n(n)));
}

/* Sums of scalar_weight(). */
typedef __m256i vw;

static inline vw vw_zero(void)
{
    return _mm256_setzero_si256();
}

static inline vw vw_add_half(vw sum, __m128 e)
{
    __m256d d = _mm256_fmadd_pd(_mm256_cvtps_pd(e), _mm256_set1_pd(0x1p45), _mm256_set1_pd(0x1p52));
    return _mm256_add_epi64(sum, _mm256_and_si256(_mm256_castpd_si256(d), _mm256_set1_epi64x(0xfffffffffffff)));
}

static inline vw vw_add_weights(vw sum, vf e)
{
    return vw_add_half(vw_add_half(sum, _mm256_castps256_ps128(e)), _mm256_extractf128_ps(e, 1));
}

static inline uint64_t vw_sum(vw sum)
{
    uint64_t lane[4];
    _mm256_storeu_si256((__m256i *)(void *)lane, sum);
    return lane[0] + lane[1] + lane[2] + lane[3];
}

static inline vf v_exp_scale(vf t)
{
    __m256i n = _mm256_add_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
}

static inline vf v_exp_ends(vf x, vf e)
{
    const vf limit = _mm256_set1_ps(87);
    e = _mm256_blendv_ps(e, _mm256_set1_ps(__builtin_inff()), _mm256_cmp_ps(x, limit, _CMP_GT_OQ));
    return _mm256_andnot_ps(_mm256_cmp_ps(x, v_negate(limit), _CMP_LT_OQ), e);
}

static inline float v_max_lanes(vf a)
{
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

/* Adds 16 lanes in two vectors, halves onto each other, as in plain.c. */
static inline float v_sum_lanes(const vf *a)
{
    vf x = v_add(a[0], a[1]);
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

static inline vf v_from_bf16(const void *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}

static inline vf v_from_f16(const void *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128(p));
}

static inline vf v_from_i8(const void *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)));
}

/*
 * e4m3 numbers divided by 256 (NaN: 480 / 256): read as f16, whose bias is 8 more, with the sign bit moved
 * up.
 */
static inline vf v_from_e4m3_256th(const void *p)
{
    __m128i h = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64(p)), 7);
    return _mm256_cvtph_ps(_mm_add_epi16(h, _mm_and_si128(h, _mm_set1_epi16(0x4000))));
}

static inline vf v_from_e4m3(const void *p)
{
    vf a = v_mul(v_from_e4m3_256th(p), v_set1(256)), size = _mm256_andnot_ps(v_set1(-0.0f), a);
    return _mm256_blendv_ps(a, v_set1(__builtin_nanf("")), _mm256_cmp_ps(size, v_set1(480), _CMP_EQ_OQ));
}

/* Rounds to bf16, in the high halves. The input must have no NaN. */
static inline vi v_rounded(vf a)
{
    vi b = _mm256_castps_si256(a), odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(b, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}

static inline void v_to_bf16(void *p, vf a)
{
    vi quiet = _mm256_or_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x400000));
    vi nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    vi rounded = _mm256_srli_epi32(_mm256_blendv_epi8(v_rounded(a), quiet, nan), 16);
    vi packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0xd8);
    _mm_storeu_si128(p, _mm256_castsi256_si128(packed));
}

static inline void v_to_f16(void *p, vf a)
{
    _mm_storeu_si128(p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

/* Transposes 8 x 8: pairs, then fours, then 128-bit lanes. */
static inline void v_transpose(const float *from, size_t from_stride, float *to, size_t to_stride)
{
    __m256 a[8], b[8];
    UNROLL for (int i = 0; i < 8; i++) a[i] = v_load(from + (size_t)i * from_stride);
    UNROLL for (int i = 0; i < 8; i += 2)
    {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4)
    {
        a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
        a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
    UNROLL for (int i = 0; i < 4; i++)
    {
        v_store(to + (size_t)i * to_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
        v_store(to + (size_t)(i + 4) * to_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
}

struct vpair {
    vf lo, hi; /* lo and hi are 16 outputs apart */
};

static inline vf v_low_half(__m256i words)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}

static inline vf v_high_half(__m256i words)
{
    return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(-65536)));
}

/* 16 numbers to words of bf16. The input must have no NaN. */
static inline vi v_words(vf a, vf b)
{
    vi packed = _mm256_packus_epi32(_mm256_srli_epi32(v_rounded(a), 16), _mm256_srli_epi32(v_rounded(b), 16));
    return _mm256_permute4x64_epi64(packed, 0xd8);
}

/* The scales of int4 for a block of 128 numbers, one for each number. */
struct int4_scales {
    vf at[128 / VL];
};

static inline void v_int4_open(struct int4_scales *s, const uint16_t *scales)
{
    UNROLL for (int i = 0; i < 128 / VL; i++) s->at[i] = v_from_bf16(scales + i * VL);
}

static inline vf v_int4_digits(const uint8_t *codes, int digit)
{
    vi words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)codes));
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, 28 - 4 * digit), 28));
}

/* Numbers 16 i .. 16 i + 15 of a block. */
static inline vi v_int4_words(const uint8_t *codes, int i, const struct int4_scales *s)
{
    const uint8_t *from = codes + i % 2 * 32;
    return v_words(v_mul(v_int4_digits(from, i / 2), s->at[2 * i]),
                   v_mul(v_int4_digits(from + 16, i / 2), s->at[2 * i + 1]));
}

static inline vf v_of_words(vi words)
{
    return _mm256_castsi256_ps(words);
}

static inline struct vpair v_widen_words(vi words)
{
    return (struct vpair){v_low_half(words), v_high_half(words)};
}

static inline void v_store_words(void *p, vi words)
{
    _mm256_storeu_si256(p, words);
}

/* Widens 8 words of two bf16 each (cpu.h). */
static inline struct vpair v_widen_pair(const void *p)
{
    return v_widen_words(_mm256_loadu_si256(p));
}

#define v_step(w, x, acc, kind) ((kind) == LINEAR_DP ? step_dp(w, x, acc) : v_fma(w, x, acc))

static inline vf step_dp(vf w, vf x, vf acc)
{
    __m256i wi = _mm256_castps_si256(w), xi = _mm256_castps_si256(x);
    acc = v_fma(v_high_half(wi), v_high_half(xi), acc);
    return v_fma(v_low_half(wi), v_low_half(xi), acc);
}

#include "kernels/cpu/linear.inc.h"
#include "kernels/cpu/simd.inc.h"

/* These are calls of their own, so that no arithmetic moves across the change of mode. */
static __attribute__((noinline)) void multiply_dp(const struct cpu_tile *t, uint32_t rows)
{
    any_tile(t, rows, LINEAR_DP);
}

static __attribute__((noinline)) void multiply_few_dp(const struct few_job *f, uint32_t rows)
{
    any_few(f, rows, LINEAR_DP);
}

static const struct linear_loops PAIR_LOOPS = {multiply_dp, multiply_few_dp};

void cpu_avx2_linear_bf16(const struct cpu_linear_job *job, uint32_t panel, uint32_t row0, uint32_t row1)
{
    enum { FLUSH_TO_ZERO = 0x8000, SUBNORMALS_ARE_ZERO = 0x40 };
    _Alignas(64) float sums[ROW_BLOCK * PANEL];
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | FLUSH_TO_ZERO | SUBNORMALS_ARE_ZERO);
    sum_panel(job, panel, row0, row1, sums, &PAIR_LOOPS);
    _mm_setcsr(mode);
    put_sums(job, panel, row0, row1, sums);
}

double cpu_avx2_peak_bf16(void)
{
    return peak(LINEAR_DP);
}

const struct cpu_ops cpu_avx2 = {.name = "avx2",
                                 .linear_f32 = linear_f32,
                                 .linear_bf16 = cpu_avx2_linear_bf16,
                                 .peak_bf16 = cpu_avx2_peak_bf16,
                                 SIMD_OPS};
