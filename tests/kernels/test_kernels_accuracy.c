/* Compares plain C with double precision and libm. Also tests the functions that all instruction sets must
 * share. */
#include <math.h>

#include "tests/kernels/data.h"

/* Distance in units in the last place of the reference, rounded to f32. */
static double ulps(float got, double want)
{
    float near = fabsf((float)want);
    double ulp = (double)(nextafterf(near, INFINITY) - near);
    return fabs((double)got - want) / ulp;
}

START_TEST(test_exp_is_within_two_ulps_and_ends_at_its_limits)
{
    double worst = 0;
    for (int i = 0; i < 200000; i++) {
        float x = (float)(-87 + 174.0 * i / 200000);
        worst = fmax(worst, ulps(k_exp(x), exp((double)x)));
    }
    ck_assert_double_lt(worst, 2);
    ck_assert(k_exp(0) == 1);
    ck_assert(k_exp(-87.5f) == 0 && k_exp(-INFINITY) == 0);
    ck_assert(isinf(k_exp(87.5f)) && isinf(k_exp(INFINITY)));
    ck_assert(isnan(k_exp(NAN)));
}
END_TEST

START_TEST(test_log_is_within_two_ulps)
{
    double worst = 0;
    for (uint32_t i = 0; i < 200000; i++) {
        uint32_t bits = (uint32_t)(1 + (uint64_t)i * 0x7f7fffff / 200000);
        float x;
        memcpy(&x, &bits, 4);
        worst = fmax(worst, ulps(k_log(x), log((double)x)));
    }
    for (int i = 1; i < 100000; i++) {
        float x = 0.5f + (float)i / 50000;
        worst = fmax(worst, x == 1 ? 0 : ulps(k_log(x), log((double)x)));
    }
    ck_assert_double_lt(worst, 2);
    ck_assert(k_log(1) == 0);
    ck_assert(isinf(k_log(0)) && k_log(0) < 0);
    ck_assert(isnan(k_log(-1)) && isnan(k_log(NAN)));
    ck_assert(isinf(k_log(INFINITY)));
}
END_TEST

START_TEST(test_rope_table_is_within_1e_7_of_libm)
{
    enum { HALF = 32, POSITIONS = 20000 };
    double inv_freq[HALF];
    float *t = mem_array((size_t)POSITIONS * HALF * 2, sizeof(*t));
    for (int i = 0; i < HALF; i++)
        inv_freq[i] = pow(10000, -i / (double)HALF);
    k_rope_table(inv_freq, HALF, POSITIONS, 1, t);
    for (uint32_t p = 0; p < POSITIONS; p += 7)
        for (uint32_t i = 0; i < HALF; i++) {
            const float *cs = t + ((size_t)p * HALF + i) * 2;
            ck_assert_double_eq_tol((double)cs[0], (double)(float)cos(p * inv_freq[i]), 6.1e-8);
            ck_assert_double_eq_tol((double)cs[1], (double)(float)sin(p * inv_freq[i]), 6.1e-8);
        }
    free(t);
}
END_TEST

START_TEST(test_linear_f32_is_near_double)
{
    struct kernels *k = data_open(ISA_PLAIN, 1);
    enum { N_IN = 500, N_OUT = 70, N_ROWS = 3 };
    for (enum num_type type = NUM_F32; type <= NUM_BF16; type++) {
        float *w = data_floats(1, N_IN * N_OUT, 1), *x = data_floats(2, N_IN * N_ROWS, 1), y[N_ROWS * N_OUT];
        void *stored = data_as(w, type, N_IN * N_OUT);
        k_convert_to_f32(stored, type, N_IN * N_OUT, w);
        struct k_matrix_part part = {.data = stored, .type = type, .n_out = N_OUT};
        struct k_matrix *m = NULL;
        ck_assert_int_eq(k_matrix_pack(k, &part, 1, N_IN, COMPUTE_F32, WEIGHTS_AS_STORED, &m), TD_OK);
        k_linear(k, m, x, N_ROWS, y, false);
        k_linear(k, m, x, N_ROWS, y, true);
        for (int r = 0; r < N_ROWS; r++)
            for (int c = 0; c < N_OUT; c++) {
                double sum = 0;
                for (int i = 0; i < N_IN; i++)
                    sum += (double)w[c * N_IN + i] * (double)x[r * N_IN + i];
                ck_assert_double_eq_tol((double)y[r * N_OUT + c], 2 * sum, 1e-4);
            }
        k_matrix_free(k, m);
        free(stored);
        free(w);
        free(x);
    }
    kernels_close(k);
}
END_TEST

START_TEST(test_linear_bf16_is_near_double_over_rounded_inputs)
{
    struct kernels *k = data_open(ISA_PLAIN, 1);
    enum { N_IN = 301, N_OUT = 70 };
    float *w = data_floats(1, N_IN * N_OUT, 1), *x = data_floats(2, N_IN, 1), y[N_OUT];
    struct k_matrix_part part = {.data = w, .type = NUM_F32, .n_out = N_OUT};
    struct k_matrix *m = NULL;
    ck_assert_int_eq(k_matrix_pack(k, &part, 1, N_IN, COMPUTE_BF16, WEIGHTS_AS_STORED, &m), TD_OK);
    k_linear(k, m, x, 1, y, false);
    uint16_t *rounded = data_as(w, NUM_BF16, N_IN * N_OUT), *x16 = data_as(x, NUM_BF16, N_IN);
    k_convert_to_f32(rounded, NUM_BF16, N_IN * N_OUT, w);
    k_convert_to_f32(x16, NUM_BF16, N_IN, x);
    for (int c = 0; c < N_OUT; c++) {
        double sum = 0;
        for (int i = 0; i < N_IN; i++)
            sum += (double)w[c * N_IN + i] * (double)x[i];
        ck_assert_double_eq_tol((double)y[c], sum, 1e-4);
    }
    k_matrix_free(k, m);
    free(rounded);
    free(x16);
    free(w);
    free(x);
    kernels_close(k);
}
END_TEST

START_TEST(test_rmsnorm_and_activations_are_near_double)
{
    struct kernels *k = data_open(ISA_PLAIN, 1);
    enum { DIM = 333 };
    float *x = data_floats(1, 2 * DIM, 8), *w = data_floats(2, DIM, 2), y[DIM], z[DIM], g[DIM], c[DIM], s[DIM];
    double sum = 0;
    k_rmsnorm(k, x, w, 1e-5f, 1, DIM, y);
    k_glu(k, x, 1, DIM, &(struct k_glu){.act = ACT_SILU}, z);
    k_glu(k, x, 1, DIM, &(struct k_glu){.act = ACT_GELU_TANH}, g);
    k_glu(k, x, 1, DIM, &(struct k_glu){ACT_CLAMPED, 1.702f, 5}, c);
    memcpy(s, x, sizeof(s));
    k_softcap(k, s, DIM, 5);
    for (int i = 0; i < DIM; i++)
        sum += (double)x[i] * (double)x[i];
    for (int i = 0; i < DIM; i++) {
        double a = (double)x[i];
        ck_assert_double_eq_tol((double)y[i], a / sqrt(sum / DIM + 1e-5) * (double)w[i], 1e-6);
        ck_assert_double_eq_tol((double)z[i], a / (1 + exp(-a)) * (double)x[DIM + i], 2e-5);
        double u = (double)x[DIM + i], gelu = 0.5 * a * (1 + tanh(sqrt(2 / M_PI) * (a + 0.044715 * a * a * a)));
        ck_assert_double_eq_tol((double)g[i], gelu * u, 2e-5);
        double gate = fmin(a, 5), up = fmax(fmin(u, 5), -5);
        ck_assert_double_eq_tol((double)c[i], (up + 1) * (gate / (1 + exp(-1.702 * gate))), 2e-5);
        ck_assert_double_eq_tol((double)s[i], 5 * tanh(a / 5), 1e-6);
    }
    free(x);
    free(w);
    kernels_close(k);
}
END_TEST

/* The reference: softmax over all positions at once, in double, with K and V read back from f32 pages. */
START_TEST(test_attention_is_near_naive_double)
{
    struct kernels *k = data_open(ISA_PLAIN, 1);
    enum { N = 75, DIM = 20, HEADS = 4, KV = 2, STRIDE = (HEADS + 2 * KV) * DIM, PAGE = 16, N_PAGES = 5 };
    struct kv_layout layout = {NUM_F32, 1, KV, DIM, PAGE};
    uint8_t *pages[N_PAGES];
    for (int i = 0; i < N_PAGES; i++)
        pages[i] = mem_zalloc(kv_layout_page_bytes(&layout));
    float *qkv = data_floats(1, N * STRIDE, 2), *out = mem_array(N * HEADS * DIM, sizeof(float));
    struct k_attn_seq seq = {.n_rows = N, .pages = pages};
    float sinks[HEADS] = {0.5f, -1, 2, 0};
    struct k_attn a = {.layout = &layout,
                       .n_kv_heads = KV,
                       .n_heads = HEADS,
                       .q = qkv,
                       .k = qkv + HEADS * DIM,
                       .out = out,
                       .scale = 0.5f};
    a.v = qkv + (HEADS + KV) * DIM;
    a.q_stride = a.kv_stride = STRIDE;
    a.v_dim = DIM;
    a.window = _i & 1 ? 21 : 0;
    a.cap = _i & 2 ? 3 : 0;
    a.sinks = _i & 4 ? sinks : NULL;
    a.seqs = &seq;
    a.n_seqs = 1;
    k_kv_store(k, &a);
    k_attention(k, &a);
    for (int row = 0; row < N; row++)
        for (int h = 0; h < HEADS; h++) {
            const float *q = qkv + row * STRIDE + h * DIM;
            double p[N], total = a.sinks ? exp((double)sinks[h]) : 0, o[DIM] = {0};
            int first = a.window && row + 1 > (int)a.window ? row + 1 - (int)a.window : 0;
            for (int j = first; j <= row; j++) {
                const float *key = qkv + j * STRIDE + (HEADS + h / (HEADS / KV)) * DIM;
                double s = 0;
                for (int d = 0; d < DIM; d++)
                    s += (double)q[d] * (double)key[d];
                total += p[j] = exp(a.cap > 0 ? 3 * tanh(0.5 * s / 3) : 0.5 * s);
            }
            for (int j = first; j <= row; j++)
                for (int d = 0; d < DIM; d++)
                    o[d] += p[j] / total * (double)qkv[j * STRIDE + (HEADS + KV + h / (HEADS / KV)) * DIM + d];
            for (int d = 0; d < DIM; d++)
                ck_assert_double_eq_tol((double)out[(row * HEADS + h) * DIM + d], o[d], 1e-5);
        }
    for (int i = 0; i < N_PAGES; i++)
        free(pages[i]);
    free(qkv);
    free(out);
    kernels_close(k);
}
END_TEST

START_TEST(test_argmax_takes_the_first_of_equals_and_skips_nan)
{
    float x[100];
    for (int i = 0; i < 100; i++)
        x[i] = (float)(i % 37);
    ck_assert_uint_eq(k_argmax(x, 100), 36);
    x[5] = NAN;
    x[99] = 99;
    ck_assert_uint_eq(k_argmax(x, 100), 99);
    float same[3] = {-INFINITY, -INFINITY, -INFINITY}, zeros[2] = {-0.0f, 0.0f};
    ck_assert_uint_eq(k_argmax(same, 3), 0);
    ck_assert_uint_eq(k_argmax(zeros, 2), 0);
}
END_TEST

START_TEST(test_logsumexp_is_near_double)
{
    for (uint32_t n = 1; n < 3000; n = n * 3 + 1) {
        float *x = data_floats(n, n, 20);
        double sum = 0;
        for (uint32_t i = 0; i < n; i++)
            sum += exp((double)x[i]);
        ck_assert_double_eq_tol((double)k_logsumexp(x, n), log(sum), 3e-6 * fmax(1, fabs(log(sum))));
        free(x);
    }
    ck_assert(isinf(k_logsumexp((float[]){-INFINITY, -INFINITY}, 2)));
}
END_TEST

/* Every 16-bit pattern is widened and comes back unchanged. Every exponent narrows as arithmetic in double
 * gives it. */
START_TEST(test_conversions_round_to_nearest_even)
{
    for (uint32_t h = 0; h < 65536; h++)
        for (enum num_type type = NUM_F16; type <= NUM_BF16; type++) {
            uint16_t in = (uint16_t)h, back;
            float f;
            k_convert_to_f32(&in, type, 1, &f);
            k_convert_from_f32(&f, type, 1, &back);
            if (isnan(f))
                ck_assert(back >> 15 == in >> 15 && (back & 0x7fff) > (type == NUM_F16 ? 0x7c00 : 0x7f80));
            else
                ck_assert_uint_eq(back, in);
        }
    for (uint64_t i = 0; i < 200000; i++) {
        uint32_t bits = (uint32_t)data_bits(1, i);
        float f, low, high;
        uint16_t h;
        memcpy(&f, &bits, 4);
        k_convert_from_f32(&f, NUM_BF16, 1, &h);
        if (isnan(f)) {
            k_convert_to_f32(&h, NUM_BF16, 1, &low);
            ck_assert(isnan(low));
            continue;
        }
        bits &= 0xffff0000;
        memcpy(&low, &bits, 4);
        bits += 0x10000;
        memcpy(&high, &bits, 4);
        double down = fabs((double)f - (double)low), up = isinf(high) ? 0x1p120 - down : fabs((double)high - (double)f);
        uint16_t want = (uint16_t)(bits >> 16);
        if (down < up || (down == up && want % 2))
            want--;
        ck_assert_uint_eq(h, want);
    }
}
END_TEST

START_TEST(test_f16_rounds_ties_to_even_and_overflows_to_infinity)
{
    static const struct {
        float in;
        uint16_t want;
    } CASES[] = {{1, 0x3c00},        {0x1.002p0f, 0x3c00},      {0x1.006p0f, 0x3c02},   {65504, 0x7bff},
                 {65519.9f, 0x7bff}, {65520, 0x7c00},           {0x1p-24f, 1},          {0x1p-25f, 0},
                 {0x1.8p-24f, 2},    {-0x1.00002p-25f, 0x8001}, {0x1.ff8p-15f, 0x03ff}, {0x1.ffcp-15f, 0x0400},
                 {-0.0f, 0x8000},    {INFINITY, 0x7c00}};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        float in[9];
        uint16_t out[9];
        for (int j = 0; j < 9; j++)
            in[j] = CASES[i].in;
        k_convert_from_f32(in, NUM_F16, 9, out);
        ck_assert_uint_eq(out[0], CASES[i].want);
        ck_assert_uint_eq(out[8], CASES[i].want);
    }
}
END_TEST

/* e4m3 by its definition: sign, four bits of exponent with bias 7, three bits of mantissa. */
static double e4m3_of(uint32_t code)
{
    uint32_t e = code >> 3 & 15, m = code & 7;
    double x = e ? ldexp(8 + m, (int)e - 10) : ldexp(m, -9);
    return code & 0x80 ? -x : x;
}

START_TEST(test_e4m3_has_its_numbers_rounds_ties_to_even_and_saturates)
{
    uint8_t codes[256], back[256];
    float x[256];
    for (uint32_t i = 0; i < 256; i++)
        codes[i] = (uint8_t)i;
    k_convert_to_f32(codes, NUM_F8_E4M3, 256, x);
    k_convert_from_f32(x, NUM_F8_E4M3, 256, back);
    for (uint32_t i = 0; i < 256; i++)
        if (i % 128 == 127)
            ck_assert(isnan(x[i]) && back[i] % 128 == 127);
        else
            ck_assert((double)x[i] == e4m3_of(i) && back[i] == i);
    for (uint32_t i = 0; i < 126; i++) { /* halfway between two codes, and a little to either side */
        double middle = (e4m3_of(i) + e4m3_of(i + 1)) / 2;
        float in[] = {(float)(middle * (1 - 1e-6)), (float)middle, (float)(middle * (1 + 1e-6))};
        k_convert_from_f32(in, NUM_F8_E4M3, 3, back);
        ck_assert(back[0] == i && back[1] == i + i % 2 && back[2] == i + 1);
    }
    const float large[] = {449, 1e30f, INFINITY, -465, -INFINITY};
    k_convert_from_f32(large, NUM_F8_E4M3, 5, back);
    for (uint32_t i = 0; i < 5; i++)
        ck_assert_uint_eq(back[i], i < 3 ? 0x7e : 0xfe);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kernels_accuracy");
    TCase *t = tcase_create("accuracy");
    tcase_set_timeout(t, 60);
    tcase_add_test(t, test_exp_is_within_two_ulps_and_ends_at_its_limits);
    tcase_add_test(t, test_log_is_within_two_ulps);
    tcase_add_test(t, test_rope_table_is_within_1e_7_of_libm);
    tcase_add_test(t, test_linear_f32_is_near_double);
    tcase_add_test(t, test_linear_bf16_is_near_double_over_rounded_inputs);
    tcase_add_test(t, test_rmsnorm_and_activations_are_near_double);
    tcase_add_loop_test(t, test_attention_is_near_naive_double, 0, 8);
    tcase_add_test(t, test_argmax_takes_the_first_of_equals_and_skips_nan);
    tcase_add_test(t, test_logsumexp_is_near_double);
    tcase_add_test(t, test_conversions_round_to_nearest_even);
    tcase_add_test(t, test_f16_rounds_ties_to_even_and_overflows_to_infinity);
    tcase_add_test(t, test_e4m3_has_its_numbers_rounds_ties_to_even_and_saturates);
    suite_add_tcase(s, t);
    return data_main(s);
}
