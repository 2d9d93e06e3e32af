/* Codecs: a decoded page is within the bound that kvstore/codec.h states, and bytes that no encoder made are
 * refused. */
#include "kvstore/codec.h"

#include <math.h>

#include "base/mem.h"
#include "base/random.h"
#include "kernels/scalar.h"
#include "tests/tap.h"

static const struct kv_layout LAYOUTS[] = {
    {NUM_F32, 2, 2, 64, 16}, {NUM_BF16, 2, 2, 128, 16}, {NUM_F16, 2, 2, 80, 16}, {NUM_F32, 1, 1, 7, 3},
    {NUM_BF16, 3, 1, 65, 5}, {NUM_F16, 1, 2, 20, 4},    {NUM_BF16, 1, 1, 1, 1},  {NUM_F8_E4M3, 2, 2, 64, 16},
};
enum { N_LAYOUTS = sizeof(LAYOUTS) / sizeof(LAYOUTS[0]), GROUP = 64 };

static double get(const struct kv_layout *l, const uint8_t *page, size_t i)
{
    return scalar_from(page, (uint32_t)num_type_bytes(l->dtype), l->dtype == NUM_BF16, i);
}

static void put(const struct kv_layout *l, uint8_t *page, size_t i, float x)
{
    uint16_t h = l->dtype == NUM_BF16 ? scalar_to_bf16(x) : scalar_to_f16(x);
    if (l->dtype == NUM_F32)
        memcpy(page + 4 * i, &x, 4);
    else if (l->dtype == NUM_F8_E4M3)
        page[i] = scalar_to_e4m3(x);
    else
        memcpy(page + 2 * i, &h, 2);
}

/* Makes a page of sums of uniform numbers. Groups have sizes from 2^-12 to 2^12, with zeros and a few large
 * numbers among them. */
static uint8_t *make_page(const struct kv_layout *l, uint64_t seed)
{
    size_t n = kv_layout_page_bytes(l) / num_type_bytes(l->dtype);
    uint8_t *page = mem_array(n, num_type_bytes(l->dtype));
    for (size_t i = 0; i < n; i++) {
        uint64_t r = random_at(seed, i, 0);
        double sum = (double)(r & 0xffff) + (double)(r >> 16 & 0xffff) + (double)(r >> 32 & 0xffff) - 1.5 * 0xffff;
        double x = ldexp(sum / 0x10000, (int)(random_at(seed, i / l->head_dim, 1) % 25) - 12);
        put(l, page, i, r >> 60 == 0 ? 0 : r >> 60 == 1 ? (float)(8 * x) : (float)x);
    }
    return page;
}

/* Half a unit in the last place of the dtype near x. */
static double rounding(const struct kv_layout *l, double x)
{
    return l->dtype == NUM_F32    ? ldexp(fabs(x), -24)
           : l->dtype == NUM_BF16 ? ldexp(fabs(x), -9)
                                  : ldexp(fabs(x), -12) + ldexp(1, -25);
}

static double bound(enum block_codec codec, double x, double amax)
{
    double quantum = codec == BLOCK_INT8 ? amax / 254 : fmax(fabs(x) / 16, amax / 458752);
    return quantum + ldexp(amax, -15);
}

static void check_bound(const struct kv_layout *l, enum block_codec codec, const uint8_t *page, const uint8_t *back)
{
    size_t n = kv_layout_page_bytes(l) / num_type_bytes(l->dtype);
    for (size_t row = 0; row < n; row += l->head_dim)
        for (size_t at = 0; at < l->head_dim; at += GROUP) {
            size_t len = l->head_dim - at < GROUP ? l->head_dim - at : GROUP;
            double amax = 0;
            for (size_t i = 0; i < len; i++)
                amax = fmax(amax, fabs(get(l, page, row + at + i)));
            for (size_t i = 0; i < len; i++) {
                double x = get(l, page, row + at + i), y = get(l, back, row + at + i);
                double most = bound(codec, x, amax) + 2 * rounding(l, fmax(fabs(x), fabs(y)));
                ck_assert_msg(fabs(x - y) <= most, "%s %s: %g came back as %g, at most %g off", block_codec_name(codec),
                              num_type_name(l->dtype), x, y, most);
                ck_assert_msg(x != 0 || y == 0, "%s: zero came back as %g", block_codec_name(codec), y);
            }
        }
}

START_TEST(test_quantised_pages_come_back_within_the_bound)
{
    const struct kv_layout *l = &LAYOUTS[_i];
    struct codec *c = codec_open(l);
    size_t page_bytes = kv_layout_page_bytes(l), len;
    uint8_t *back = mem_array(page_bytes, 1);
    const void *data;
    for (uint64_t seed = 0; seed < 8; seed++) {
        uint8_t *page = make_page(l, seed);
        for (enum block_codec codec = BLOCK_INT8; codec <= BLOCK_FP8; codec++) {
            /* Numbers of one byte do not shrink, nor do groups of a single number, which also need a
             * scale. */
            if (codec_encode(c, codec, page, &data, &len) == BLOCK_RAW) {
                ck_assert(l->head_dim == 1 || l->dtype == NUM_F8_E4M3);
                ck_assert_ptr_eq(data, page);
                continue;
            }
            ck_assert_uint_lt(len, page_bytes);
            ck_assert_int_eq(codec_decode(c, codec, data, len, back), TD_OK);
            check_bound(l, codec, page, back);
        }
        free(page);
    }
    free(back);
    codec_close(c);
}
END_TEST

/* Such an encoding would have more bytes than the page, so no encoder makes it. */
START_TEST(test_quantised_pages_of_one_byte_numbers_are_refused)
{
    const struct kv_layout l = {NUM_F8_E4M3, 1, 1, 64, 1};
    struct codec *c = codec_open(&l);
    uint8_t data[2 * (4 + 64)] = {0}, page[2 * 64];
    ck_assert_int_eq(codec_decode(c, BLOCK_INT8, data, sizeof(data), page), TD_ERR_CORRUPT);
    ck_assert_int_eq(codec_decode(c, BLOCK_FP8, data, sizeof(data), page), TD_ERR_CORRUPT);
    codec_close(c);
}
END_TEST

/* All 254 finite codes, by the definition of e4m3: sign, four bits of exponent with bias 7, three bits of
 * mantissa. */
START_TEST(test_fp8_keeps_every_e4m3_number_as_it_is)
{
    const struct kv_layout l = {NUM_F32, 1, 1, 64, 2}; /* K and V of two tokens, so four groups */
    struct codec *c = codec_open(&l);
    float page[256] = {0}, back[256];
    const void *data;
    size_t len;
    for (int i = 0; i < 254; i++) {
        int code = i / 2, e = code >> 3, m = code & 7;
        double x = e ? ldexp(1 + m / 8.0, e - 7) : ldexp(m, -9);
        page[i / 63 % 4 * 64 + i % 63] = (float)(i % 2 ? -x : x);
    }
    page[63] = page[127] = page[191] = page[255] = 448; /* makes the scale of each group 1 */
    ck_assert_int_eq(codec_encode(c, BLOCK_FP8, page, &data, &len), BLOCK_FP8);
    ck_assert_int_eq(codec_decode(c, BLOCK_FP8, data, len, back), TD_OK);
    for (int i = 0; i < 256; i++)
        ck_assert_msg(page[i] == back[i], "%g came back as %g", page[i], back[i]);
    codec_close(c);
}
END_TEST

START_TEST(test_fp8_rounds_to_the_nearest_and_ties_to_even)
{
    const struct kv_layout l = {NUM_F32, 1, 1, 8, 1};
    struct codec *c = codec_open(&l);
    const float page[16] = {448, 17, 19, 17.01f, 0x1p-10f, 0x1.8p-9f, -0x1.01p-10f, 464.0f / 2};
    const float want[8] = {448, 16, 20, 18, 0, 0x1p-8f, -0x1p-9f, 224};
    float back[16];
    const void *data;
    size_t len;
    ck_assert_int_eq(codec_encode(c, BLOCK_FP8, page, &data, &len), BLOCK_FP8);
    ck_assert_int_eq(codec_decode(c, BLOCK_FP8, data, len, back), TD_OK);
    for (int i = 0; i < 8; i++)
        ck_assert_msg(back[i] == want[i], "%g came back as %g, expected %g", page[i], back[i], want[i]);
    codec_close(c);
}
END_TEST

START_TEST(test_what_is_not_finite_is_kept_as_it_is)
{
    const struct kv_layout l = LAYOUTS[_i % 3];
    const float odd[] = {NAN, INFINITY, -INFINITY, 0x1p101f};
    struct codec *c = codec_open(&l);
    const void *data;
    size_t len, n = kv_layout_page_bytes(&l) / num_type_bytes(l.dtype);
    uint8_t *page = make_page(&l, 5);
    put(&l, page, n - 3, odd[_i / 3]);
    for (enum block_codec codec = BLOCK_INT8; codec <= BLOCK_FP8; codec++) {
        ck_assert_int_eq(codec_encode(c, codec, page, &data, &len), BLOCK_RAW);
        ck_assert_ptr_eq(data, page);
        ck_assert_uint_eq(len, kv_layout_page_bytes(&l));
    }
    free(page);
    codec_close(c);
}
END_TEST

START_TEST(test_numbers_too_small_to_scale_become_zero)
{
    const struct kv_layout l = {NUM_F32, 1, 1, 8, 1};
    struct codec *c = codec_open(&l);
    const float page[16] = {0x1p-149f, -0x1p-120f, 0, -0.0f, 0, 0, 0, 0, 0x1p-100f, 0x1p-101f};
    float back[16];
    const void *data;
    size_t len;
    ck_assert_int_eq(codec_encode(c, BLOCK_INT8, page, &data, &len), BLOCK_INT8);
    ck_assert_int_eq(codec_decode(c, BLOCK_INT8, data, len, back), TD_OK);
    for (int i = 0; i < 8; i++)
        ck_assert(back[i] == 0);
    ck_assert(fabsf(back[8] - 0x1p-100f) < 0x1p-115f && fabsf(back[9] - 0x1p-101f) <= 0x1p-100f / 254);
    codec_close(c);
}
END_TEST

START_TEST(test_zstd_gives_back_every_bit_and_what_does_not_shrink_stays_raw)
{
    const struct kv_layout *l = &LAYOUTS[_i];
    struct codec *c = codec_open(l);
    size_t page_bytes = kv_layout_page_bytes(l), len;
    uint8_t *back = mem_array(page_bytes, 1), *page = make_page(l, 3);
    const void *data;
    if (page_bytes > 1000) {
        put(l, page, 5, NAN);
        ck_assert_int_eq(codec_encode(c, BLOCK_ZSTD, page, &data, &len), BLOCK_ZSTD);
        ck_assert_uint_lt(len, page_bytes);
        ck_assert_int_eq(codec_decode(c, BLOCK_ZSTD, data, len, back), TD_OK);
        ck_assert_mem_eq(back, page, page_bytes);
    }
    for (size_t i = 0; i < page_bytes; i++)
        page[i] = (uint8_t)random_at(9, i, 0);
    ck_assert_int_eq(codec_encode(c, BLOCK_ZSTD, page, &data, &len), BLOCK_RAW);
    ck_assert_ptr_eq(data, page);
    free(page);
    free(back);
    codec_close(c);
}
END_TEST

/* Encodings that are cut, longer, random, or have flipped bits: never an access out of bounds (run under
 * ASan), and a wrong length is always noticed. */
START_TEST(test_damaged_encodings_are_refused_or_make_some_page)
{
    const struct kv_layout *l = &LAYOUTS[1];
    struct codec *c = codec_open(l);
    size_t page_bytes = kv_layout_page_bytes(l), len;
    uint8_t *page = make_page(l, 1), *back = mem_array(page_bytes, 1);
    const void *data;
    for (enum block_codec codec = BLOCK_ZSTD; codec < BLOCK_CODECS; codec++) {
        ck_assert_int_eq(codec_encode(c, codec, page, &data, &len), codec);
        uint8_t *copy = mem_array(len + 1, 1);
        memcpy(copy, data, len);
        ck_assert_int_eq(codec_decode(c, codec, copy, len - 1, back), TD_ERR_CORRUPT);
        ck_assert_int_eq(codec_decode(c, codec, copy, len + 1, back), TD_ERR_CORRUPT);
        ck_assert_int_eq(codec_decode(c, codec, copy, 0, back), TD_ERR_CORRUPT);
        for (uint64_t i = 0; i < 400; i++) {
            copy[random_at(i, 1, 0) % len] ^= (uint8_t)(1u << random_at(i, 2, 0) % 8);
            enum td_status s = codec_decode(c, codec, copy, len, back);
            ck_assert(s == TD_OK || s == TD_ERR_CORRUPT);
        }
        memset(copy, 0xff, len);
        ck_assert_int_eq(codec_decode(c, codec, copy, len, back), TD_ERR_CORRUPT); /* the scale is NaN */
        free(copy);
    }
    free(page);
    free(back);
    codec_close(c);
}
END_TEST

/* The bytes of a file must keep their meaning for ever. */
START_TEST(test_quantised_golden_bytes)
{
    const struct kv_layout l = {NUM_F32, 1, 1, 6, 1};
    static const uint8_t INT8[] = {0, 0, 0x80, 0x3f, 127, 0x81, 0, 1, 0xff, 64, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
                         FP8[] = {0, 0, 0x80, 0x3e, 0x7e, 0xfe, 0, 0x48, 0xc8, 0x78, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    const float of_int8[12] = {127, -127, 0, 1, -1, 64}, of_fp8[12] = {112, -112, 0, 1, -1, 64};
    struct codec *c = codec_open(&l);
    const void *data;
    size_t len;
    ck_assert_int_eq(codec_encode(c, BLOCK_INT8, of_int8, &data, &len), BLOCK_INT8);
    ck_assert_uint_eq(len, sizeof(INT8));
    ck_assert_mem_eq(data, INT8, len);
    ck_assert_int_eq(codec_encode(c, BLOCK_FP8, of_fp8, &data, &len), BLOCK_FP8);
    ck_assert_mem_eq(data, FP8, len);
    codec_close(c);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("codec");
    TCase *t = tcase_create("codec");
    tcase_add_loop_test(t, test_quantised_pages_come_back_within_the_bound, 0, N_LAYOUTS);
    tcase_add_test(t, test_quantised_pages_of_one_byte_numbers_are_refused);
    tcase_add_test(t, test_fp8_keeps_every_e4m3_number_as_it_is);
    tcase_add_test(t, test_fp8_rounds_to_the_nearest_and_ties_to_even);
    tcase_add_loop_test(t, test_what_is_not_finite_is_kept_as_it_is, 0, 9);
    tcase_add_test(t, test_numbers_too_small_to_scale_become_zero);
    tcase_add_loop_test(t, test_zstd_gives_back_every_bit_and_what_does_not_shrink_stays_raw, 0, N_LAYOUTS);
    tcase_add_test(t, test_damaged_encodings_are_refused_or_make_some_page);
    tcase_add_test(t, test_quantised_golden_bytes);
    suite_add_tcase(s, t);
    return tap_main(s);
}
