/*
 * Matrices in fewer bits: how a group of numbers is encoded; and that a product with the codes has the bits
 * of the product with the numbers that they stand for. On every device, alone, in stacks, and with a
 * checkpoint's own codes.
 */
#include "kernels/packed.h"
#include "tests/kernels/device.h"

/* ------------------------------------------------------------------ groups */

/* Scale of a group by the rules of kernels.h. */
static float told_scale(enum k_weights weights, const float *w, uint32_t n)
{
    float most = 0;
    for (uint32_t i = 0; i < n; i++)
        most = fmaxf(most, fabsf(w[i]));
    uint16_t rounded;
    float scale = most / 127;
    if (weights == WEIGHTS_FP8)
        return most / 448;
    k_convert_from_f32(&scale, NUM_BF16, 1, &rounded);
    k_convert_to_f32(&rounded, NUM_BF16, 1, &scale);
    return scale;
}

static float told_number(enum k_weights weights, float w, float scale)
{
    uint8_t e4m3;
    float x = scale > 0 ? w / scale : 0;
    if (weights == WEIGHTS_INT8)
        return scale * fmaxf(-127, fminf(127, rintf(x)));
    k_convert_from_f32(&x, NUM_F8_E4M3, 1, &e4m3);
    k_convert_to_f32(&e4m3, NUM_F8_E4M3, 1, &x);
    return scale * x;
}

/* The bf16 numbers that the rows of W stand for in that format. */
static uint16_t *told_matrix(enum k_weights weights, const float *w, uint32_t n_out, uint32_t n_in)
{
    uint16_t *out = mem_array((size_t)n_out * n_in, sizeof(*out));
    for (size_t row = 0; row < n_out; row++)
        for (uint32_t at = 0; at < n_in; at += K_GROUP) {
            const float *group = w + row * n_in + at;
            uint32_t n = n_in - at < K_GROUP ? n_in - at : K_GROUP;
            bool int4 = weights == WEIGHTS_INT4;
            float scale = int4 ? packed_scale(weights, group, n) : told_scale(weights, group, n), x;
            for (uint32_t i = 0; i < n; i++) {
                x = int4 ? scale * fmaxf(-8, fminf(7, rintf(scale > 0 ? group[i] / scale : 0)))
                         : told_number(weights, group[i], scale);
                k_convert_from_f32(&x, NUM_BF16, 1, &out[row * n_in + at + i]);
            }
        }
    return out;
}

static double loss_of(enum k_weights weights, const float *w, uint32_t n, float scale)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        double d = (double)(w[i] - scalar_from_bf16(packed_to_bf16(weights, packed_code(weights, w[i], scale), scale)));
        sum += d * d;
    }
    return sum;
}

/* Numbers that are normally distributed, as weights are: half the sum of 8 uniform numbers. */
static float *normal_floats(uint64_t seed, size_t n)
{
    float *x = data_floats(seed, n, 1);
    for (int i = 1; i < 8; i++) {
        float *y = data_floats(seed + 1000 * (uint64_t)i, n, 1);
        for (size_t j = 0; j < n; j++)
            x[j] += y[j];
        free(y);
    }
    return x;
}

START_TEST(test_packed_numbers_are_as_near_as_the_format_allows)
{
    enum { GROUPS = 2000 };
    /* Relative to the root mean square; measured: 0.0058, 0.0262, 0.0953. */
    static const double BOUNDS[] = {0, 0.0070, 0.030, 0.105};
    float *w = normal_floats(1, GROUPS * K_GROUP);
    double all = 0, loss[4] = {0}, plain_int4 = 0;
    for (uint32_t g = 0; g < GROUPS; g++) {
        const float *group = w + g * K_GROUP;
        float most = 0;
        for (uint32_t i = 0; i < K_GROUP; i++) {
            all += (double)group[i] * (double)group[i];
            most = fmaxf(most, fabsf(group[i]));
        }
        for (enum k_weights f = WEIGHTS_INT8; f <= WEIGHTS_INT4; f++)
            loss[f] += loss_of(f, group, K_GROUP, packed_scale(f, group, K_GROUP));
        plain_int4 += loss_of(WEIGHTS_INT4, group, K_GROUP, most / 7);
    }
    for (enum k_weights f = WEIGHTS_INT8; f <= WEIGHTS_INT4; f++)
        ck_assert_double_lt(sqrt(loss[f] / all), BOUNDS[f]);
    ck_assert_double_lt(loss[WEIGHTS_INT4], plain_int4); /* searching for the scale pays off */
    free(w);
}
END_TEST

START_TEST(test_packed_groups_of_any_numbers_stay_finite)
{
    static const float EDGES[] = {0, -0.0f, 1, -1, 0x1p-149f, 0x1p-101f, 0x1p-99f, 0x1p99f, 0x1p101f, 3e38f, -3e38f};
    enum { N = sizeof(EDGES) / sizeof(EDGES[0]) };
    for (uint64_t i = 0; i < 3000; i++)
        for (enum k_weights f = WEIGHTS_INT8; f <= WEIGHTS_INT4; f++) {
            float w[K_GROUP];
            for (uint32_t j = 0; j < K_GROUP; j++)
                w[j] = EDGES[data_bits(i, j) % (i % 2 ? N : 6)];
            w[data_range(i, 99, 0, 31)] = i % 7 ? 1 : i % 3 ? __builtin_nanf("") : __builtin_inff();
            float scale = packed_scale(f, w, K_GROUP);
            ck_assert(scale == 0 || (scale >= 0x1p-100f && scale <= 0x1p100f));
            for (uint32_t j = 0; j < K_GROUP; j++) {
                float x = scalar_from_bf16(packed_to_bf16(f, packed_code(f, w[j], scale), scale));
                ck_assert(isfinite(x) && (x == 0 || fabsf(x) >= 0x1p-126f));
            }
        }
}
END_TEST

/* ---------------------------------------------------------------- products */

struct packed_case {
    uint32_t n_rows, n_in, n_out;
    enum k_weights weights;
    enum compute compute;
    bool bias;
};

static struct k_matrix *pack(struct kernels *k, const struct packed_case *c, const struct k_matrix_part *part,
                             enum k_weights weights)
{
    struct k_matrix *m = NULL;
    ck_assert_int_eq(k_matrix_pack(k, part, 1, c->n_in, c->compute, weights, &m), TD_OK);
    return m;
}

/* x W^T by the device, copied to the host. */
static float *product(const struct packed_case *c, const struct k_matrix *m, const float *x)
{
    size_t n = (size_t)c->n_rows * c->n_out;
    float *y = mem_zalloc(n * sizeof(float));
    void *in = alloc(sides[1], x, (size_t)c->n_rows * c->n_in * sizeof(float)),
         *out = alloc(sides[1], y, n * sizeof(float));
    k_linear(sides[1], m, in, c->n_rows, out, false);
    k_read(sides[1], y, out, n * sizeof(float));
    k_finish(sides[1]);
    k_free(sides[1], in);
    k_free(sides[1], out);
    return y;
}

static void check_same_product(const struct packed_case *c, const struct k_matrix_part *packed,
                               const struct k_matrix_part *plain, uint64_t seed)
{
    struct k_matrix *a = pack(sides[1], c, packed, c->weights), *b = pack(sides[1], c, plain, WEIGHTS_AS_STORED);
    float *x = data_floats(seed + 7, (size_t)c->n_rows * c->n_in, 1.5f);
    float *y = product(c, a, x), *z = product(c, b, x);
    data_equal(y, z, (size_t)c->n_rows * c->n_out, "product of fewer bits");
    k_matrix_free(sides[1], a);
    k_matrix_free(sides[1], b);
    free(x);
    free(y);
    free(z);
}

static struct packed_case random_case(uint64_t i, enum compute compute)
{
    return (struct packed_case){.n_rows = data_range(i, 1, 1, i % 4 ? 9 : 150),
                                .n_in = data_range(i, 2, 1, i % 3 ? 200 : 1300),
                                .n_out = data_range(i, 3, 1, 150),
                                .weights = (enum k_weights)(WEIGHTS_INT8 + i % 3),
                                .compute = compute,
                                .bias = i % 2};
}

static void check_products(int device, enum compute compute)
{
    open_device(device, compute, false);
    for (uint64_t i = 0; i < CASES; i++) {
        struct packed_case c = random_case(i, compute);
        float *w = normal_floats(i, (size_t)c.n_out * c.n_in), *bias = data_floats(i, c.n_out, 1);
        uint16_t *told = told_matrix(c.weights, w, c.n_out, c.n_in);
        struct k_matrix_part packed = {.data = w, .type = NUM_F32, .n_out = c.n_out}, plain = packed;
        plain.data = told;
        plain.type = NUM_BF16;
        if (c.bias) {
            packed.bias = plain.bias = bias;
            packed.bias_type = plain.bias_type = NUM_F32;
        }
        check_same_product(&c, &packed, &plain, i);
        free(w);
        free(bias);
        free(told);
    }
    close_device();
}

START_TEST(test_exact_products_are_those_of_the_numbers_that_codes_stand_for)
{
    check_products(_i, COMPUTE_F32);
}
END_TEST

START_TEST(test_fast_products_are_those_of_the_numbers_that_codes_stand_for)
{
    check_products(_i, COMPUTE_BF16);
}
END_TEST

/* Codes and scales of a checkpoint. A scale belongs to a block of outputs by inputs. */
struct stored {
    uint8_t *codes;
    float *scales;
    struct k_matrix_part part;
};

static struct stored stored_open(const struct packed_case *c, uint32_t out_block, uint32_t in_block, uint64_t seed)
{
    uint32_t across = (c->n_in + in_block - 1) / in_block, down = (c->n_out + out_block - 1) / out_block;
    struct stored s = {mem_array((size_t)c->n_out * c->n_in, 1), mem_array((size_t)across * down, sizeof(float)), {0}};
    for (size_t i = 0; i < (size_t)c->n_out * c->n_in; i++)
        s.codes[i] = packed_keep((uint8_t)data_bits(seed, i));
    for (size_t i = 0; i < (size_t)across * down; i++)
        s.scales[i] = (float)(1 + data_range(seed + 1, i, 0, 1000)) * 0x1.234p-14f;
    s.part = (struct k_matrix_part){
        .data = s.codes,
        .type = NUM_F8_E4M3,
        .n_out = c->n_out,
        .scales = {
            .data = s.scales, .type = NUM_F32, .out_block = out_block, .in_block = in_block, .out_stride = across}};
    s.part.scales.in_stride = 1;
    return s;
}

/* The numbers that they stand for: bf16(code * scale). */
static uint16_t *stored_numbers(const struct packed_case *c, const struct stored *s)
{
    const struct k_scales *b = &s->part.scales;
    uint16_t *out = mem_array((size_t)c->n_out * c->n_in, sizeof(*out));
    for (uint32_t o = 0; o < c->n_out; o++)
        for (uint32_t i = 0; i < c->n_in; i++) {
            float x;
            k_convert_to_f32(&s->codes[(size_t)o * c->n_in + i], NUM_F8_E4M3, 1, &x);
            x *= s->scales[o / b->out_block * b->out_stride + i / b->in_block];
            k_convert_from_f32(&x, NUM_BF16, 1, &out[(size_t)o * c->n_in + i]);
        }
    return out;
}

START_TEST(test_e4m3_of_a_checkpoint_is_kept_or_becomes_bf16)
{
    static const uint32_t BLOCKS[][2] = {{128, 128}, {1, 1 << 20}, {1 << 20, 1 << 20}, {16, 32}, {4, 20}};
    for (enum compute compute = COMPUTE_F32; compute <= COMPUTE_BF16; compute++) {
        open_device(_i, compute, false);
        for (uint64_t i = 0; i < 10; i++) {
            struct packed_case c = random_case(i, compute);
            bool kept = i % 5 < 4; /* each group has one scale */
            struct stored s = stored_open(&c, BLOCKS[i % 5][0], BLOCKS[i % 5][1], i);
            uint16_t *numbers = stored_numbers(&c, &s);
            uint32_t first = i % 2 ? c.n_out / 3 : 0; /* the part may begin within a block */
            c.n_out -= first;
            s.part.n_out = c.n_out;
            s.part.data = s.codes + (size_t)first * c.n_in;
            s.part.scales.first_out = first;
            struct k_matrix_part plain = {.data = numbers + (size_t)first * c.n_in, .type = NUM_BF16, .n_out = c.n_out};
            for (enum k_weights w = WEIGHTS_AS_STORED; w <= WEIGHTS_FP8; w += WEIGHTS_FP8) {
                c.weights = w;
                if (kept || !w)
                    check_same_product(&c, &s.part, &plain, i);
            }
            free(numbers);
            free(s.codes);
            free(s.scales);
        }
        close_device();
    }
}
END_TEST

START_TEST(test_parts_of_a_packed_matrix_may_be_transposed_and_of_several_types)
{
    enum { N_OUT = 70, N_IN = 77 };
    open_exact(_i);
    float *w = data_floats(3, 2 * N_OUT * N_IN, 1), *turned = mem_array(N_OUT * N_IN, sizeof(float));
    uint16_t *second = data_as(w + N_OUT * N_IN, NUM_F16, N_OUT * N_IN);
    k_convert_to_f32(second, NUM_F16, N_OUT * N_IN, w + N_OUT * N_IN);
    for (uint32_t o = 0; o < N_OUT; o++)
        for (uint32_t i = 0; i < N_IN; i++)
            turned[i * N_OUT + o] = w[o * N_IN + i];
    for (enum k_weights f = WEIGHTS_INT8; f <= WEIGHTS_INT4; f++) {
        const struct packed_case c = {
            .n_rows = 3, .n_in = N_IN, .n_out = 2 * N_OUT, .weights = f, .compute = COMPUTE_F32};
        const struct k_matrix_part straight = {.data = w, .type = NUM_F32, .n_out = 2 * N_OUT};
        const struct k_matrix_part parts[] = {
            {.data = turned, .type = NUM_F32, .n_out = N_OUT, .out_stride = 1, .in_stride = N_OUT},
            {.data = second, .type = NUM_F16, .n_out = N_OUT}};
        struct k_matrix *a = pack(sides[1], &c, &straight, f), *b = NULL;
        ck_assert_int_eq(k_matrix_pack(sides[1], parts, 2, N_IN, COMPUTE_F32, f, &b), TD_OK);
        float *x = data_floats(4, 3 * N_IN, 1), *y = product(&c, a, x), *z = product(&c, b, x);
        data_equal(y, z, 3 * 2 * N_OUT, "parts");
        k_matrix_free(sides[1], a);
        k_matrix_free(sides[1], b);
        free(x);
        free(y);
        free(z);
    }
    free(w);
    free(turned);
    free(second);
    close_device();
}
END_TEST

/* A stack gives for sorted rows, and for every row with each matrix, what k_linear gives with the row's
 * matrix. */
static void check_stack(const struct packed_case *c, uint64_t seed)
{
    enum { N = 5, MAX = 64 };
    struct k_matrix *matrices[N], *alone[N];
    struct k_stack *stack = NULL;
    uint32_t first[N + 1] = {0}, n_rows = c->n_rows;
    for (uint32_t i = 0; i < N; i++) {
        float *w = normal_floats(seed + i, (size_t)c->n_out * c->n_in);
        const struct k_matrix_part part = {.data = w, .type = NUM_F32, .n_out = c->n_out};
        matrices[i] = pack(sides[1], c, &part, c->weights);
        alone[i] = pack(sides[1], c, &part, c->weights);
        first[i + 1] = i == N - 1 ? n_rows : data_range(seed, i, first[i], n_rows);
        free(w);
    }
    ck_assert_int_eq(k_stack_open(sides[1], matrices, N, &stack), TD_OK);
    size_t n_x = (size_t)n_rows * c->n_in, n_y = (size_t)n_rows * c->n_out;
    float *x = data_floats(seed + 9, n_x, 1), *y = mem_zalloc(N * n_y * sizeof(float));
    void *in = alloc(sides[1], x, n_x * sizeof(float)), *out = alloc(sides[1], y, N * n_y * sizeof(float));
    k_step(sides[1]);
    k_linear_sorted(sides[1], stack, k_put(sides[1], first, sizeof(first)), n_rows, in, out);
    k_read(sides[1], y, out, n_y * sizeof(float));
    k_finish(sides[1]);
    for (uint32_t i = 0; i < N; i++) {
        struct packed_case part = *c;
        part.n_rows = first[i + 1] - first[i];
        if (!part.n_rows)
            continue;
        float *want = product(&part, alone[i], x + (size_t)first[i] * c->n_in);
        data_equal(y + (size_t)first[i] * c->n_out, want, (size_t)part.n_rows * c->n_out, "sorted");
        free(want);
    }
    const struct k_each each = {in, out, c->n_in, 0, c->n_out, n_y};
    k_linear_each(sides[1], stack, &each, n_rows);
    k_read(sides[1], y, out, N * n_y * sizeof(float));
    k_finish(sides[1]);
    for (uint32_t i = 0; i < N; i++) {
        float *want = product(c, alone[i], x);
        data_equal(y + i * n_y, want, n_y, "each");
        free(want);
        k_matrix_free(sides[1], alone[i]);
    }
    k_stack_close(sides[1], stack);
    k_free(sides[1], in);
    k_free(sides[1], out);
    free(x);
    free(y);
}

START_TEST(test_stacks_of_packed_matrices_are_as_their_matrices)
{
    for (enum compute compute = COMPUTE_F32; compute <= COMPUTE_BF16; compute++) {
        open_device(_i, compute, false);
        for (uint64_t i = 0; i < 9; i++) {
            struct packed_case c = random_case(i, compute);
            c.n_in = c.n_in % 300 + 1;
            check_stack(&c, i);
        }
        close_device();
    }
}
END_TEST

/* A row's bits do not depend on the rows beside it, although few rows and many may be computed
 * differently. */
START_TEST(test_packed_row_is_the_same_alone_and_in_a_batch)
{
    enum { N_ROWS = 140, N_IN = 1100, N_OUT = 130 };
    for (enum compute compute = COMPUTE_F32; compute <= COMPUTE_BF16; compute++)
        for (enum k_weights f = WEIGHTS_INT8; f <= WEIGHTS_INT4; f++) {
            open_device(_i, compute, false);
            struct packed_case c = {.n_rows = N_ROWS, .n_in = N_IN, .n_out = N_OUT, .weights = f, .compute = compute};
            float *w = data_floats(5, N_OUT * N_IN, 1), *x = data_floats(6, N_ROWS * N_IN, 1);
            const struct k_matrix_part part = {.data = w, .type = NUM_F32, .n_out = N_OUT};
            struct k_matrix *m = pack(sides[1], &c, &part, f);
            float *all = product(&c, m, x);
            for (uint32_t row = 0, n = 1; row < N_ROWS; row += n, n = n * 3 % 29) {
                c.n_rows = row + n > N_ROWS ? N_ROWS - row : n;
                float *some = product(&c, m, x + (size_t)row * N_IN);
                data_equal(some, all + (size_t)row * N_OUT, (size_t)c.n_rows * N_OUT, "rows of a batch");
                free(some);
            }
            k_matrix_free(sides[1], m);
            free(w);
            free(x);
            free(all);
            close_device();
        }
}
END_TEST

START_TEST(test_packing_refuses_what_is_no_format)
{
    open_exact(_i);
    uint8_t w[64] = {0};
    struct k_matrix *m = NULL;
    struct k_matrix_part part = {.data = w, .type = NUM_F8_E4M3, .n_out = 1};
    ck_assert_int_eq(k_matrix_pack(sides[1], &part, 1, 64, COMPUTE_F32, (enum k_weights)9, &m), TD_ERR_INVALID);
    part.scales = (struct k_scales){.data = w, .type = NUM_F32, .out_block = 1};
    ck_assert_int_eq(k_matrix_pack(sides[1], &part, 1, 64, COMPUTE_F32, WEIGHTS_FP8, &m), TD_ERR_INVALID);
    part.scales.in_block = 64;
    part.scales.type = NUM_F8_E4M3;
    ck_assert_int_eq(k_matrix_pack(sides[1], &part, 1, 64, COMPUTE_F32, WEIGHTS_FP8, &m), TD_ERR_INVALID);
    ck_assert_ptr_null(m);
    close_device();
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {test_packed_numbers_are_as_near_as_the_format_allows,
                                  test_packed_groups_of_any_numbers_stay_finite,
                                  test_exact_products_are_those_of_the_numbers_that_codes_stand_for,
                                  test_fast_products_are_those_of_the_numbers_that_codes_stand_for,
                                  test_e4m3_of_a_checkpoint_is_kept_or_becomes_bf16,
                                  test_parts_of_a_packed_matrix_may_be_transposed_and_of_several_types,
                                  test_stacks_of_packed_matrices_are_as_their_matrices,
                                  test_packed_row_is_the_same_alone_and_in_a_batch,
                                  test_packing_refuses_what_is_no_format};
    return device_main("kernels_packed", tests, sizeof(tests) / sizeof(tests[0]));
}
