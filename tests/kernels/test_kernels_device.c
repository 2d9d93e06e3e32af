/* Compares every operation of a device except attention with plain C on the CPU: exact operations bit for
 * bit, those with another order of summation within bounds. Then a row's bits in any batch. */
#include "kernels/backend.h"
#include "tests/kernels/device.h"

/* ------------------------------------------------------------------ memory */

START_TEST(test_what_is_written_is_read)
{
    open_exact(_i);
    static const size_t LENGTHS[] = {1, 3, 127, 128, 4097, 1 << 20, (4 << 20) + 1, (19 << 20) + 5};
    for (size_t i = 0; i < sizeof(LENGTHS) / sizeof(LENGTHS[0]); i++) {
        size_t n = LENGTHS[i];
        uint8_t *out = mem_zalloc(n), *in = mem_zalloc(n);
        for (size_t j = 0; j < n; j++)
            out[j] = (uint8_t)data_bits(i, j / 8);
        void *p = NULL;
        ck_assert_int_eq(k_alloc(sides[1], n, &p), TD_OK);
        k_write(sides[1], p, out, n);
        uint8_t first = out[0];
        out[0] = (uint8_t)~first; /* the call has returned, so the source may change */
        k_read(sides[1], in, p, n);
        k_finish(sides[1]);
        ck_assert_uint_eq(in[0], first);
        ck_assert_mem_eq(in + 1, out + 1, n - 1);
        k_free(sides[1], p);
        free(out);
        free(in);
    }
    close_device();
}
END_TEST

START_TEST(test_many_small_reads_are_there_after_one_finish)
{
    open_exact(_i);
    enum { N = 1000 };
    float *x = data_floats(1, N, 1), y[N] = {0};
    void *p = alloc(sides[1], x, N * sizeof(float));
    for (uint32_t i = 0; i < N; i++)
        k_read(sides[1], &y[i], (float *)p + i, sizeof(float));
    k_finish(sides[1]);
    data_equal(y, x, N, "numbers");
    k_free(sides[1], p);
    free(x);
    close_device();
}
END_TEST

/* Arrays of a step, more than fit at first; their sources change as soon as they are put; over several
 * steps. */
START_TEST(test_what_is_put_is_there_for_the_step)
{
    open_exact(_i);
    enum { N = 50000, PUTS = 9, STEPS = 9 };
    float *x = data_floats(1, N, 1), *sum = mem_array(N, sizeof(float)), *work = mem_array(N, sizeof(float));
    struct kernels *k = sides[1];
    void *y = alloc(k, sum, N * sizeof(float));
    for (int step = 0; step < STEPS; step++) {
        k_step(k);
        const float *at[PUTS];
        float *kept[PUTS]; /* the CPU reads the array itself */
        for (int i = 0; i < PUTS; i++) {
            for (uint32_t j = 0; j < N; j++)
                work[j] = x[j] * (float)(i + step);
            kept[i] = mem_dup(work, N * sizeof(float));
            at[i] = k_put(k, kept[i], N * sizeof(float));
        }
        for (int i = 0; i < PUTS; i++) {
            k_add(k, at[i], N, y);
            for (uint32_t j = 0; j < N; j++)
                sum[j] = sum[j] + kept[i][j];
        }
        for (int i = 0; i < PUTS; i++) {
            if (DEVICES[_i].device != DEVICE_CPU)
                memset(kept[i], 0xff, N * sizeof(float));
            free(kept[i]);
        }
    }
    k_read(k, work, y, N * sizeof(float));
    k_finish(k);
    data_equal(work, sum, N, "sum of what was put");
    k_free(k, y);
    free(x);
    free(sum);
    free(work);
    close_device();
}
END_TEST

/* Runs of an array are doubled one after the other and read asynchronously. Each is there at its mark, in
 * mapped memory or not. */
START_TEST(test_what_is_read_aside_is_there_at_its_mark)
{
    open_exact(_i);
    enum { N = 40000, RUNS = 8, EACH = N / RUNS };
    struct kernels *k = sides[1];
    float *x = data_floats(1, N, 1), *host = mem_dup(x, N * sizeof(float)), *other = mem_zalloc(N * sizeof(float));
    void *twice = alloc(k, x, N * sizeof(float)), *mapped = NULL;
    uint32_t marks[RUNS];
    ck_assert_int_eq(k_map(k, host, N * sizeof(float), &mapped), TD_OK);
    k_write(k, mapped, x, N * sizeof(float));
    for (int round = 0; round < 2; round++) {
        for (uint32_t run = 0; run < RUNS; run++) {
            float *at = (float *)mapped + run * EACH;
            k_add(k, (float *)twice + run * EACH, EACH, at);
            k_read_aside(k, (run % 2 ? host : other) + run * EACH, at, EACH * sizeof(float));
            marks[run] = k_mark(k);
        }
        for (uint32_t run = 0; run < RUNS; run++) {
            k_wait(k, marks[run]);
            ck_assert(k_passed(k, marks[run]));
            for (uint32_t i = run * EACH; i < (run + 1) * EACH; i++)
                ck_assert((run % 2 ? host : other)[i] == (round ? x[i] + x[i] + x[i] : x[i] + x[i]));
        }
        k_finish(k);
    }
    k_unmap(k, mapped);
    k_free(k, twice);
    free(x);
    free(host);
    free(other);
    close_device();
}
END_TEST

/* Pieces of an array are written asynchronously, over what an operation before has written, in mapped
 * memory or not, more often than there are events for marks. */
START_TEST(test_what_is_written_aside_is_there_at_its_mark)
{
    open_exact(_i);
    enum { N = 12000, PIECES = 3, EACH = N / PIECES, ROUNDS = K_MAX_MARKS + 20 };
    struct kernels *k = sides[1];
    const struct k_pieces all = {EACH * sizeof(float), 2 * EACH * sizeof(float), PIECES};
    float *x = data_floats(1, 2 * N, 1), *host = mem_dup(x, 2 * N * sizeof(float)),
          *got = mem_zalloc(N * sizeof(float));
    void *mapped = NULL, *to = alloc(k, x, N * sizeof(float)), *one = alloc(k, x, N * sizeof(float));
    uint64_t mark = 0;
    ck_assert_int_eq(k_map(k, host, 2 * N * sizeof(float), &mapped), TD_OK);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        const float *from = round % 3 ? host : x;
        if (round % 4 == 1) /* nothing is on its way */
            k_add(k, one, N, to);
        k_write_pieces_aside(k, to, from, &all);
        uint64_t now = k_write_mark(k);
        ck_assert(now >= mark);
        mark = now;
        if (round % 4)
            continue;
        k_write_wait(k, mark);
        ck_assert(k_written(k, mark) && k_written(k, mark + 1));
        k_read(k, got, to, N * sizeof(float));
        k_finish(k);
        for (uint32_t i = 0; i < N; i++)
            ck_assert(got[i] == x[i / EACH * 2 * EACH + i % EACH]);
    }
    k_unmap(k, mapped);
    k_free(k, to);
    k_free(k, one);
    free(x);
    free(host);
    free(got);
    close_device();
}
END_TEST

/* An asynchronous read without a mark has ended after k_finish. The next read waits for its operations
 * again. */
START_TEST(test_what_is_read_aside_is_there_after_finish_without_a_mark)
{
    open_exact(_i);
    enum { N = 5000, ROUNDS = 3 };
    struct kernels *k = sides[1];
    float *x = data_floats(1, N, 1), *sum = mem_dup(x, N * sizeof(float)), *host = mem_dup(x, N * sizeof(float));
    void *once = alloc(k, x, N * sizeof(float)), *mapped = NULL;
    ck_assert_int_eq(k_map(k, host, N * sizeof(float), &mapped), TD_OK);
    k_write(k, mapped, x, N * sizeof(float));
    for (int round = 0; round < ROUNDS; round++) {
        k_add(k, once, N, mapped);
        k_read_aside(k, host, mapped, N * sizeof(float));
        k_finish(k);
        for (uint32_t i = 0; i < N; i++)
            sum[i] = sum[i] + x[i];
        data_equal(host, sum, N, "read aside");
    }
    k_unmap(k, mapped);
    k_free(k, once);
    free(x);
    free(sum);
    free(host);
    close_device();
}
END_TEST

START_TEST(test_mapped_memory_is_kept_alike)
{
    open_exact(_i);
    enum { N = 100000 };
    struct kernels *k = sides[1];
    float *host = data_floats(1, N, 1), *doubled = mem_dup(host, N * sizeof(float));
    for (uint32_t i = 0; i < N; i++)
        doubled[i] = host[i] + host[i];
    void *x = alloc(k, host, N * sizeof(float)), *mapped = NULL;
    ck_assert_int_eq(k_map(k, host, N * sizeof(float), &mapped), TD_OK);
    k_write(k, mapped, host, N * sizeof(float));
    k_add(k, x, N, mapped);
    k_read(k, host, mapped, N * sizeof(float));
    k_finish(k);
    data_equal(host, doubled, N, "mapped");
    k_unmap(k, mapped);
    k_unmap(k, NULL);
    k_free(k, x);
    k_free(k, NULL);
    free(host);
    free(doubled);
    close_device();
}
END_TEST

/* ------------------------------------------------------------------ linear */

struct linear_case {
    uint32_t n_in, n_out[2];
    enum num_type type[2];
    enum compute compute;
    bool accumulate, bias;
};

/* A matrix, and on the host the numbers that bound its error: |W| as stored, [n_out][n_in], and the bias. */
struct weights {
    struct k_matrix *at[2];
    float *size, *bias_size;
    uint32_t n_in, n_out;
};

static struct weights weights_open(const struct linear_case *c, uint64_t seed)
{
    struct weights w = {.n_in = c->n_in, .n_out = c->n_out[0] + c->n_out[1]};
    w.size = mem_array((size_t)w.n_out * w.n_in, sizeof(float));
    w.bias_size = mem_array(w.n_out, sizeof(float));
    struct k_matrix_part parts[2];
    void *data[2], *bias = NULL;
    for (uint32_t i = 0; i < 2; i++) {
        size_t n = (size_t)c->n_out[i] * c->n_in, at = i * (size_t)c->n_out[0];
        float *x = data_floats(seed + i, n, 1);
        for (size_t j = 0; j < n; j++)
            w.size[at * c->n_in + j] = fabsf(x[j]);
        data[i] = data_as(x, c->type[i], n);
        parts[i] = (struct k_matrix_part){.data = data[i], .type = c->type[i], .n_out = c->n_out[i]};
        free(x);
    }
    if (c->bias) {
        float *x = data_floats(seed + 2, c->n_out[0], 2);
        for (uint32_t j = 0; j < c->n_out[0]; j++)
            w.bias_size[j] = fabsf(x[j]);
        parts[0].bias = bias = x;
        parts[0].bias_type = NUM_F32;
    }
    for (int i = 0; i < 2; i++)
        ck_assert_int_eq(
            k_matrix_pack(sides[i], parts, c->n_out[1] ? 2 : 1, c->n_in, c->compute, WEIGHTS_AS_STORED, &w.at[i]),
            TD_OK);
    free(data[0]);
    free(data[1]);
    free(bias);
    return w;
}

static void weights_free(struct weights *w)
{
    k_matrix_free(sides[0], w->at[0]);
    k_matrix_free(sides[1], w->at[1]);
    free(w->size);
    free(w->bias_size);
}

/* Checks that y is within 2^-12 of the sum of the terms' absolute values. A missing product exceeds that. */
static void linear_near(const struct weights *w, const float *x, const float *y_before, const struct twin *y)
{
    float *want = twin_read(y, 0), *got = twin_read(y, 1);
    for (size_t i = 0; i < y->len_bytes / sizeof(float); i++) {
        const float *row = x + i / w->n_out * w->n_in, *size = w->size + i % w->n_out * w->n_in;
        double all = (double)w->bias_size[i % w->n_out] + (y_before ? fabs((double)y_before[i]) : 0);
        for (uint32_t j = 0; j < w->n_in; j++)
            all += fabs((double)row[j]) * (double)size[j];
        if (!(fabs((double)got[i] - (double)want[i]) <= 0x1p-12 * all))
            ck_abort_msg("[%zu] %g is far from %g (of %g)", i, (double)got[i], (double)want[i], all);
    }
    free(want);
    free(got);
}

static void check_linear(const struct linear_case *c, uint32_t n_rows, uint64_t seed)
{
    struct weights w = weights_open(c, seed);
    size_t n_y = (size_t)n_rows * w.n_out;
    float *x = data_floats(seed + 7, (size_t)n_rows * c->n_in, 1.5f), *before = data_floats(seed + 8, n_y, 1);
    struct twin in = twin_of(x, (size_t)n_rows * c->n_in * sizeof(float)), y = twin_of(before, n_y * sizeof(float));
    for (int i = 0; i < 2; i++)
        k_linear(sides[i], w.at[i], in.at[i], n_rows, y.at[i], c->accumulate);
    if (c->compute == COMPUTE_F32)
        twin_equal(&y, "linear");
    else
        linear_near(&w, x, c->accumulate ? before : NULL, &y);
    twin_free(&in);
    twin_free(&y);
    weights_free(&w);
    free(x);
    free(before);
}

static struct linear_case random_case(uint64_t s, enum compute compute)
{
    return (struct linear_case){.n_in = data_range(s, 2, 1, 150),
                                .n_out = {data_range(s, 3, 1, 150), s % 3 ? 0 : data_range(s, 4, 1, 80)},
                                .type = {1 + data_bits(s, 5) % 3, 1 + data_bits(s, 6) % 3},
                                .compute = compute,
                                .accumulate = data_bits(s, 7) % 2,
                                .bias = data_bits(s, 8) % 2};
}

START_TEST(test_linear_f32_equals_plain_for_any_shape)
{
    open_exact(_i);
    for (uint64_t s = 0; s < CASES; s++) {
        struct linear_case c = random_case(s, COMPUTE_F32);
        check_linear(&c, data_range(s, 1, 1, s % 4 ? 20 : 300), s);
    }
    close_device();
}
END_TEST

START_TEST(test_linear_f32_keeps_subnormal_numbers_and_signs_of_zero)
{
    open_exact(_i);
    enum { N_IN = 3, N_OUT = 4 };
    static const float W[N_OUT][N_IN] = {
        {0, 0, -0x1p-100f}, {0x1p-80f, 0x1p-80f, 0}, {-0x1p-149f, 0x1p-149f, 0}, {1, -1, 0x1p-140f}};
    static const float X[2][N_IN] = {{1, 1, 0x1p-60f}, {1, 1, 0x1.8p-5f}}; /* the first sum is -0 */
    struct k_matrix_part part = {.data = W, .type = NUM_F32, .n_out = N_OUT};
    struct twin x = twin_of(X, sizeof(X)), y = twin_floats(1, 2 * N_OUT, 1);
    for (int i = 0; i < 2; i++) {
        struct k_matrix *m = NULL;
        ck_assert_int_eq(k_matrix_pack(sides[i], &part, 1, N_IN, COMPUTE_F32, WEIGHTS_AS_STORED, &m), TD_OK);
        k_linear(sides[i], m, x.at[i], 2, y.at[i], false);
        k_finish(sides[i]);
        k_matrix_free(sides[i], m);
    }
    twin_same_bytes(&y, "edges of the range");
    twin_free(&x);
    twin_free(&y);
    close_device();
}
END_TEST

START_TEST(test_linear_bf16_is_near_plain_for_any_shape)
{
    open_fast(_i);
    for (uint64_t s = 100; s < 100 + CASES; s++) {
        struct linear_case c = random_case(s, COMPUTE_BF16);
        check_linear(&c, data_range(s, 1, 1, s % 4 ? 40 : 300), s);
    }
    close_device();
}
END_TEST

START_TEST(test_linear_in_any_order_is_near_plain)
{
    open_device(_i, COMPUTE_BF16, true);
    for (uint64_t s = 200; s < 212; s++) {
        struct linear_case c = random_case(s, COMPUTE_BF16);
        c.n_out[0] = c.n_out[0] * 4; /* aligned as cuBLAS requires */
        c.n_out[1] = 0;
        check_linear(&c, data_range(s, 1, 65, 200), s);
    }
    close_device();
}
END_TEST

/* Many stages of K, and outputs over many tiles. */
START_TEST(test_linear_is_right_for_large_shapes)
{
    for (enum compute compute = COMPUTE_F32; compute <= COMPUTE_BF16; compute++) {
        open_device(_i, compute, false);
        struct linear_case c = {.n_in = 2056, .n_out = {270, 0}, .type = {NUM_BF16, NUM_BF16}, .compute = compute};
        check_linear(&c, 2, 1);
        c.n_in = 520;
        check_linear(&c, 150, 2);
        c.n_in = 24;
        c.n_out[0] = 1700;
        check_linear(&c, 900, 3);
        close_device();
    }
}
END_TEST

/* Checks that the rows of x [n_rows][n_in], some at a time, give what all of them together gave. */
static void check_batches(struct kernels *k, const struct k_matrix *m, const float *x, uint32_t n_in, uint32_t n_out,
                          uint32_t n_rows, const float *all)
{
    static const uint32_t SIZES[] = {1, 3, 17, 200};
    void *in = alloc(k, x, (size_t)n_rows * n_in * sizeof(float));
    float *y = mem_array((size_t)n_rows * n_out, sizeof(float));
    void *out = alloc(k, y, (size_t)n_rows * n_out * sizeof(float));
    for (uint32_t s = 0; s < sizeof(SIZES) / sizeof(SIZES[0]); s++) {
        uint32_t step = SIZES[s] < 17 ? 29 : SIZES[s]; /* single rows are only sampled */
        for (uint32_t row = 0; row < n_rows; row += step) {
            uint32_t left = n_rows - row, n = left < SIZES[s] ? left : SIZES[s];
            k_linear(k, m, (float *)in + (size_t)row * n_in, n, out, false);
            k_read(k, y, out, (size_t)n * n_out * sizeof(float));
            k_finish(k);
            data_equal(y, all + (size_t)row * n_out, (size_t)n * n_out, "rows of a batch");
        }
    }
    k_free(k, in);
    k_free(k, out);
    free(y);
}

START_TEST(test_linear_row_is_the_same_alone_and_in_a_batch)
{
    enum { N_ROWS = 330, N_IN = 297, N_OUT = 135 };
    for (enum compute compute = COMPUTE_F32; compute <= COMPUTE_BF16; compute++) {
        open_device(_i, compute, false);
        struct linear_case c = {.n_in = N_IN, .n_out = {N_OUT, 0}, .type = {NUM_BF16, NUM_BF16}, .compute = compute};
        struct weights w = weights_open(&c, 5);
        float *x = data_floats(6, N_ROWS * N_IN, 1), *all = mem_array(N_ROWS * N_OUT, sizeof(float));
        void *in = alloc(sides[1], x, N_ROWS * N_IN * sizeof(float)),
             *out = alloc(sides[1], all, N_ROWS * N_OUT * sizeof(float));
        k_linear(sides[1], w.at[1], in, N_ROWS, out, false);
        k_read(sides[1], all, out, N_ROWS * N_OUT * sizeof(float));
        k_finish(sides[1]);
        check_batches(sides[1], w.at[1], x, N_IN, N_OUT, N_ROWS, all);
        k_free(sides[1], in);
        k_free(sides[1], out);
        weights_free(&w);
        free(x);
        free(all);
        close_device();
    }
}
END_TEST

/* Sizes around those of tiles and of pieces that are copied at once, in all three dimensions. */
START_TEST(test_linear_bf16_is_near_plain_at_the_edges_of_tiles)
{
    static const uint32_t ROWS[] = {1, 7, 31, 32, 33, 64, 65, 128, 300}, OUTS[] = {1, 31, 33, 64, 127, 129};
    static const uint32_t N_IN[] = {8, 16, 63, 64, 65, 127, 128, 136, 257};
    open_fast(_i);
    for (uint32_t i = 0; i < 2 * sizeof(ROWS) / sizeof(ROWS[0]); i++) {
        struct linear_case c = {.n_in = N_IN[i * 5 % 9],
                                .n_out = {OUTS[i % 6], 0},
                                .type = {NUM_BF16, NUM_BF16},
                                .compute = COMPUTE_BF16,
                                .accumulate = i % 2,
                                .bias = i % 3};
        check_linear(&c, ROWS[i % 9], i);
    }
    close_device();
}
END_TEST

/* Has enough rows and outputs for a device's largest tiles; with fewer rows it takes smaller ones. */
START_TEST(test_linear_bf16_row_is_the_same_in_tiles_of_any_size)
{
    enum { N_ROWS = 2100, N_IN = 72, N_OUT = 1100 };
    static const uint32_t SIZES[] = {1, 60, 300, 1000};
    open_fast(_i);
    struct kernels *k = sides[1];
    struct linear_case c = {.n_in = N_IN, .n_out = {N_OUT, 0}, .type = {NUM_BF16, NUM_BF16}, .compute = COMPUTE_BF16};
    c.bias = true;
    struct weights w = weights_open(&c, 5);
    float *x = data_floats(6, N_ROWS * N_IN, 1), *all = mem_array(N_ROWS * N_OUT, sizeof(float));
    float *y = mem_array(1000 * N_OUT, sizeof(float));
    struct twin in = twin_of(x, N_ROWS * N_IN * sizeof(float)), out = twin_of(all, N_ROWS * N_OUT * sizeof(float));
    for (int i = 0; i < 2; i++)
        k_linear(sides[i], w.at[i], in.at[i], N_ROWS, out.at[i], false);
    linear_near(&w, x, NULL, &out);
    k_read(k, all, out.at[1], N_ROWS * N_OUT * sizeof(float));
    for (uint32_t i = 0; i < sizeof(SIZES) / sizeof(SIZES[0]); i++) {
        uint32_t n = SIZES[i], row = (N_ROWS - n) / 2;
        k_linear(k, w.at[1], (float *)in.at[1] + row * N_IN, n, out.at[1], false);
        k_read(k, y, out.at[1], n * N_OUT * sizeof(float));
        k_finish(k);
        data_equal(y, all + row * N_OUT, n * N_OUT, "rows of a smaller batch");
    }
    twin_free(&in);
    twin_free(&out);
    weights_free(&w);
    free(x);
    free(y);
    free(all);
    close_device();
}
END_TEST

/* Compares transposed or interleaved parts, also with biases, with plain ones. */
START_TEST(test_matrix_parts_may_be_transposed_or_interleaved)
{
    enum { N_OUT = 9, N_IN = 5 };
    uint16_t straight[2 * N_OUT * N_IN], mixed[2 * N_OUT * N_IN], bias[2 * N_OUT], mixed_bias[2 * N_OUT];
    for (uint32_t o = 0; o < 2 * N_OUT; o++) {
        bias[o] = mixed_bias[o % N_OUT * 2 + o / N_OUT] = (uint16_t)(0x3f80 + o);
        for (uint32_t i = 0; i < N_IN; i++)
            straight[o * N_IN + i] = mixed[i * 2 * N_OUT + o % N_OUT * 2 + o / N_OUT] =
                (uint16_t)(0x3f00 + data_bits(o, i) % 128);
    }
    struct k_matrix_part one = {.data = straight, .type = NUM_BF16, .n_out = 2 * N_OUT}, two[2];
    one.bias = bias;
    one.bias_type = NUM_BF16;
    for (uint32_t i = 0; i < 2; i++)
        two[i] = (struct k_matrix_part){.data = mixed + i,
                                        .type = NUM_BF16,
                                        .n_out = N_OUT,
                                        .out_stride = 2,
                                        .in_stride = 2 * N_OUT,
                                        .bias = mixed_bias + i,
                                        .bias_type = NUM_BF16,
                                        .bias_stride = 2};
    for (enum compute compute = COMPUTE_F32; compute <= COMPUTE_BF16; compute++) {
        open_device(_i, compute, false);
        struct kernels *k = sides[1];
        struct k_matrix *a = NULL, *b = NULL;
        ck_assert_int_eq(k_matrix_pack(k, &one, 1, N_IN, compute, WEIGHTS_AS_STORED, &a), TD_OK);
        ck_assert_int_eq(k_matrix_pack(k, two, 2, N_IN, compute, WEIGHTS_AS_STORED, &b), TD_OK);
        ck_assert_uint_eq(k_matrix_bytes(k, a), k_matrix_bytes(k, b));
        float *x = data_floats(1, 3 * N_IN, 1), y[2][3 * 2 * N_OUT];
        void *in = alloc(k, x, 3 * N_IN * sizeof(float)), *out = alloc(k, y, sizeof(y));
        k_linear(k, a, in, 3, out, false);
        k_linear(k, b, in, 3, (float *)out + 3 * 2 * N_OUT, false);
        k_read(k, y, out, sizeof(y));
        k_finish(k);
        data_equal(y[1], y[0], 3 * 2 * N_OUT, "interleaved");
        k_matrix_free(k, a);
        k_matrix_free(k, b);
        k_free(k, in);
        k_free(k, out);
        free(x);
        close_device();
    }
}
END_TEST

START_TEST(test_matrix_pack_refuses_empty_shapes)
{
    open_exact(_i);
    float w[4] = {0};
    struct k_matrix *m = NULL;
    struct k_matrix_part part = {.data = w, .type = NUM_F32, .n_out = 0};
    ck_assert_int_eq(k_matrix_pack(sides[1], &part, 1, 4, COMPUTE_F32, WEIGHTS_AS_STORED, &m), TD_ERR_INVALID);
    part.n_out = 1;
    ck_assert_int_eq(k_matrix_pack(sides[1], &part, 1, 0, COMPUTE_F32, WEIGHTS_AS_STORED, &m), TD_ERR_INVALID);
    ck_assert_int_eq(k_matrix_pack(sides[1], &part, 1, 4, (enum compute)9, WEIGHTS_AS_STORED, &m), TD_ERR_INVALID);
    part.type = (enum num_type)9;
    ck_assert_int_eq(k_matrix_pack(sides[1], &part, 1, 4, COMPUTE_F32, WEIGHTS_AS_STORED, &m), TD_ERR_INVALID);
    ck_assert_ptr_null(m);
    close_device();
}
END_TEST

/* ------------------------------------------------------------------ stacks */

/* A stack on both sides, and its matrices one by one. */
struct stacks {
    struct k_stack *at[2];
    struct k_matrix *alone[2][8];
    uint32_t n;
};

static struct stacks stacks_open(const struct linear_case *c, uint32_t n)
{
    struct stacks s = {.n = n};
    struct k_matrix *matrices[2][8];
    for (uint32_t i = 0; i < n; i++)
        for (int again = 0; again < 2; again++) {
            struct weights w = weights_open(c, 50 + 10 * i);
            for (int side = 0; side < 2; side++)
                *(again ? &s.alone[side][i] : &matrices[side][i]) = w.at[side];
            free(w.size);
            free(w.bias_size);
        }
    for (int side = 0; side < 2; side++)
        ck_assert_int_eq(k_stack_open(sides[side], matrices[side], n, &s.at[side]), TD_OK);
    return s;
}

static void stacks_close(struct stacks *s)
{
    for (int side = 0; side < 2; side++) {
        k_stack_close(sides[side], s->at[side]);
        for (uint32_t i = 0; i < s->n; i++)
            k_matrix_free(sides[side], s->alone[side][i]);
    }
}

/* Checks that row t of matrix i (row row_of(t, i) of x and y) is what the device's k_linear gives. */
static void check_alone(const struct stacks *s, uint32_t i, const float *x, uint32_t n_in, const float *y,
                        uint32_t n_out)
{
    float *row = mem_array(n_out, sizeof(float));
    void *in = alloc(sides[1], x, n_in * sizeof(float)), *out = alloc(sides[1], row, n_out * sizeof(float));
    k_linear(sides[1], s->alone[1][i], in, 1, out, false);
    k_read(sides[1], row, out, n_out * sizeof(float));
    k_finish(sides[1]);
    data_equal(y, row, n_out, "row of a stack");
    k_free(sides[1], in);
    k_free(sides[1], out);
    free(row);
}

START_TEST(test_linear_each_gives_what_linear_gives)
{
    enum { N = 5, N_IN = 37, N_OUT = 70, X_STEP = N_IN + 2, Y_STEP = N_OUT + 5 };
    enum { X_STRIDE = N * X_STEP + 3, Y_STRIDE = N * Y_STEP + 1 };
    for (int mode = 0; mode < 8; mode++) {
        struct linear_case c = {.n_in = N_IN, .n_out = {N_OUT, 0}, .type = {NUM_BF16, NUM_BF16}, .bias = mode % 2};
        c.compute = mode & 2 ? COMPUTE_BF16 : COMPUTE_F32;
        uint32_t n_rows = mode & 4 ? 70 : 3;
        open_device(_i, c.compute, false);
        struct stacks s = stacks_open(&c, N);
        float *x = data_floats(3, n_rows * X_STRIDE, 1);
        struct twin in = twin_of(x, n_rows * X_STRIDE * sizeof(float)),
                    out = twin_floats(4, n_rows * Y_STRIDE, 1); /* the room between heads must not change */
        for (int i = 0; i < 2; i++) {
            struct k_each e = {in.at[i], out.at[i], X_STRIDE, X_STEP, Y_STRIDE, Y_STEP};
            k_linear_each(sides[i], s.at[i], &e, n_rows);
        }
        if (c.compute == COMPUTE_F32)
            twin_equal(&out, "each");
        else
            twin_near(&out, n_rows * Y_STRIDE, 0.01f, "each");
        float *y = twin_read(&out, 1);
        for (uint32_t t = 0; t < n_rows; t += 23)
            for (uint32_t i = 0; i < N; i++)
                check_alone(&s, i, x + t * X_STRIDE + i * X_STEP, N_IN, y + t * Y_STRIDE + i * Y_STEP, N_OUT);
        stacks_close(&s);
        twin_free(&in);
        twin_free(&out);
        free(x);
        free(y);
        close_device();
    }
}
END_TEST

START_TEST(test_linear_sorted_gives_what_linear_gives)
{
    enum { N = 7, N_IN = 40, MODES = 4 };
    static const uint32_t FIRST[MODES][N + 1] = {{0, 0, 3, 3, 203, 204, 204, 204},
                                                 {0, 1, 1, 1, 1, 1, 2, 2},
                                                 {0, 0, 0, 0, 0, 0, 0, 130},
                                                 {0, 90, 190, 254, 319, 319, 447, 700}};
    for (int mode = 0; mode < 2 * MODES; mode++) {
        /* The same with large tiles. */
        const uint32_t *first = FIRST[mode % MODES], n_out = mode % MODES == 3 ? 900 : 50;
        struct linear_case c = {.n_in = N_IN, .n_out = {n_out, 0}, .type = {NUM_F16, NUM_F16}, .bias = mode % 2};
        c.compute = mode / MODES ? COMPUTE_BF16 : COMPUTE_F32;
        open_device(_i, c.compute, false);
        struct stacks s = stacks_open(&c, N);
        uint32_t n_rows = first[N];
        float *x = data_floats(3, n_rows * N_IN, 1);
        struct twin in = twin_of(x, n_rows * N_IN * sizeof(float)), out = twin_floats(4, n_rows * n_out, 1),
                    at = twin_of(first, sizeof(FIRST[0]));
        for (int i = 0; i < 2; i++)
            k_linear_sorted(sides[i], s.at[i], at.at[i], n_rows, in.at[i], out.at[i]);
        if (c.compute == COMPUTE_F32)
            twin_equal(&out, "sorted");
        else
            twin_near(&out, n_rows * n_out, 0.01f, "sorted");
        float *y = twin_read(&out, 1);
        for (uint32_t i = 0; i < N; i++)
            for (uint32_t t = first[i]; t < first[i + 1]; t += 13)
                check_alone(&s, i, x + t * N_IN, N_IN, y + t * n_out, n_out);
        stacks_close(&s);
        twin_free(&in);
        twin_free(&out);
        twin_free(&at);
        free(x);
        free(y);
        close_device();
    }
}
END_TEST

/* ------------------------------------------------------------- elementwise */

START_TEST(test_embed_equals_plain_for_every_type)
{
    open_exact(_i);
    enum { VOCAB = 11, MAX_DIM = 300, N_ROWS = 23 };
    static const uint32_t DIMS[] = {1, 37, 64, MAX_DIM};
    uint32_t ids[N_ROWS];
    for (uint32_t i = 0; i < N_ROWS; i++)
        ids[i] = data_range(4, i, 0, VOCAB - 1);
    float *x = data_floats(3, VOCAB * MAX_DIM, 4);
    struct twin rows = twin_of(ids, sizeof(ids));
    for (enum num_type type = NUM_F32; type <= NUM_BF16; type++)
        for (uint32_t d = 0; d < sizeof(DIMS) / sizeof(DIMS[0]); d++) {
            void *data = data_as(x, type, VOCAB * MAX_DIM);
            struct twin table = twin_of(data, VOCAB * MAX_DIM * num_type_bytes(type)),
                        out = twin_floats(1, N_ROWS * DIMS[d], 1);
            for (int i = 0; i < 2; i++)
                k_take_rows(sides[i], table.at[i], type, DIMS[d], rows.at[i], N_ROWS, d % 2 ? 1 : 22.6f, out.at[i]);
            twin_equal(&out, "embed");
            twin_free(&table);
            twin_free(&out);
            free(data);
        }
    twin_free(&rows);
    free(x);
    close_device();
}
END_TEST

/* Heads of random shapes, with room between them that must not change, or a whole row. */
static void check_norms(uint64_t s, bool exact)
{
    uint32_t n_rows = data_range(s, 1, 1, 40), dim = data_range(s, 2, 1, s % 3 ? 300 : 2100);
    uint32_t n_heads = s % 2 ? 1 : data_range(s, 3, 1, 5), apart = dim + (uint32_t)(s % 4);
    size_t stride = (size_t)n_heads * apart + s % 5;
    struct twin w = twin_floats(s, dim, 2), x = twin_floats(s + 1, n_rows * stride, s % 5 ? 2 : 100),
                y = twin_floats(s + 2, (size_t)n_rows * dim, 1), z = twin_floats(s + 3, (size_t)n_rows * dim, 1);
    for (int i = 0; i < 2; i++) {
        k_head_norm(sides[i], x.at[i], stride, n_heads, apart, w.at[i], 1e-6f, n_rows, dim);
        k_rmsnorm(sides[i], z.at[i], w.at[i], 1e-5f, n_rows, dim, y.at[i]);
        k_rmsnorm(sides[i], z.at[i], w.at[i], 1e-5f, n_rows, dim, z.at[i]);
    }
    if (exact) {
        twin_equal(&x, "norm of heads");
        twin_equal(&y, "norm");
        twin_equal(&z, "norm in place");
    } else {
        twin_near(&x, (uint32_t)stride, 1e-5f, "norm of heads");
        twin_near(&y, dim, 1e-5f, "norm");
        twin_near(&z, dim, 1e-5f, "norm in place");
    }
    twin_free(&w);
    twin_free(&x);
    twin_free(&y);
    twin_free(&z);
}

START_TEST(test_norms_equal_plain)
{
    open_exact(_i);
    for (uint64_t s = 0; s < CASES; s++)
        check_norms(s, true);
    close_device();
}
END_TEST

START_TEST(test_fast_norms_are_near_plain)
{
    open_fast(_i);
    for (uint64_t s = 0; s < CASES; s++)
        check_norms(s, false);
    close_device();
}
END_TEST

START_TEST(test_norm_of_a_row_is_the_same_alone_and_in_a_batch)
{
    open_fast(_i);
    enum { N_ROWS = 70, DIM = 1500 };
    struct kernels *k = sides[1];
    float *x = data_floats(1, N_ROWS * DIM, 1), *all = mem_array(N_ROWS * DIM, sizeof(float)), row[DIM];
    struct twin w = twin_floats(2, DIM, 1), in = twin_of(x, N_ROWS * DIM * sizeof(float)), out = in;
    out = twin_of(all, N_ROWS * DIM * sizeof(float));
    k_rmsnorm(k, in.at[1], w.at[1], 1e-5f, N_ROWS, DIM, out.at[1]);
    k_read(k, all, out.at[1], N_ROWS * DIM * sizeof(float));
    for (uint32_t t = 0; t < N_ROWS; t += 7) {
        k_rmsnorm(k, (float *)in.at[1] + t * DIM, w.at[1], 1e-5f, 1, DIM, out.at[1]);
        k_read(k, row, out.at[1], sizeof(row));
        k_finish(k);
        data_equal(row, all + t * DIM, DIM, "norm of one row");
    }
    twin_free(&w);
    twin_free(&in);
    twin_free(&out);
    free(x);
    free(all);
    close_device();
}
END_TEST

/* Also where another operation has changed the rows since. */
START_TEST(test_a_product_that_follows_has_the_bits_of_a_later_one)
{
    static const uint32_t DIMS[] = {8, 64, 200, 576, 1024, 4096}, ROWS[] = {1, 3, 70, 200};
    open_fast(_i);
    struct kernels *k = sides[1];
    const struct k_glu glu = {ACT_SILU, 0, 0};
    for (uint32_t i = 0; i < 24; i++) {
        uint32_t dim = DIMS[i % 6], n_rows = ROWS[i / 6];
        size_t n = (size_t)n_rows * dim;
        struct twin x = twin_floats(i, 2 * n, 1), y = twin_floats(i + 1, n, 1), w = twin_floats(i + 2, dim, 1);
        struct product after_norm = product_open(k, n_rows, dim), after_glu = product_open(k, n_rows, dim),
                       after_add = product_open(k, n_rows, dim), of_fewer = product_open(k, n_rows, dim);
        k_rmsnorm(k, x.at[1], w.at[1], 1e-5f, n_rows, dim, y.at[1]);
        product_check(k, &after_norm, y.at[1], n_rows);
        k_glu(k, x.at[1], n_rows, dim, &glu, y.at[1]);
        product_check(k, &after_glu, y.at[1], n_rows);
        k_rmsnorm(k, x.at[1], w.at[1], 1e-5f, n_rows, dim, y.at[1]);
        k_add(k, x.at[1], n, y.at[1]);
        product_check(k, &after_add, y.at[1], n_rows);
        k_rmsnorm(k, x.at[1], w.at[1], 1e-5f, n_rows, dim, y.at[1]);
        product_check(k, &of_fewer, y.at[1], n_rows / 2 + 1);
        twin_free(&x);
        twin_free(&y);
        twin_free(&w);
    }
    close_device();
}
END_TEST

START_TEST(test_elementwise_equals_plain)
{
    open_exact(_i);
    for (uint64_t s = 0; s < CASES; s++) {
        uint32_t n_rows = data_range(s, 1, 1, 70), dim = data_range(s, 2, 1, 300);
        size_t n = (size_t)n_rows * dim;
        struct twin x = twin_floats(s, 2 * n, s % 5 ? 2 : 100), y = twin_floats(s + 1, n, 2);
        for (enum k_act act = ACT_SILU; act <= ACT_CLAMPED; act++) {
            const struct k_glu glu = {act, 1.702f, 1.5f};
            for (int i = 0; i < 2; i++)
                k_glu(sides[i], x.at[i], n_rows, dim, &glu, y.at[i]);
            twin_equal(&y, "glu");
        }
        for (int i = 0; i < 2; i++)
            k_add(sides[i], x.at[i], n, y.at[i]);
        twin_equal(&y, "add");
        for (int i = 0; i < 2; i++)
            k_softcap(sides[i], y.at[i], n, 3);
        twin_equal(&y, "softcap");
        twin_free(&x);
        twin_free(&y);
    }
    close_device();
}
END_TEST

START_TEST(test_copied_and_rotated_heads_equal_plain)
{
    open_exact(_i);
    enum { POSITIONS = 64, MAX_HALF = 64, MAX_ROWS = 30 };
    float *table = data_floats(1, POSITIONS * MAX_HALF * 2, 1);
    struct twin cos_sin = twin_of(table, POSITIONS * MAX_HALF * 2 * sizeof(float));
    for (uint64_t s = 0; s < CASES; s++) {
        uint32_t n_rows = data_range(s, 1, 1, MAX_ROWS), n_heads = data_range(s, 2, 1, 6);
        uint32_t dim = 2 * data_range(s, 3, 1, MAX_HALF), apart = dim + (uint32_t)(s % 7), at[MAX_ROWS];
        size_t stride = (size_t)n_heads * apart + s % 5, n = n_rows * stride;
        for (uint32_t i = 0; i < n_rows; i++)
            at[i] = data_range(s + 1, i, 0, POSITIONS - 1);
        struct twin x = twin_floats(s, n, 2), y = twin_floats(s + 2, n, 2), rows = twin_of(at, sizeof(at));
        for (int i = 0; i < 2; i++) {
            struct k_rotary r = {cos_sin.at[i], dim, s % 2};
            k_rope(sides[i], x.at[i], stride, n_heads, apart, &r, rows.at[i], n_rows);
            struct k_each e = {x.at[i], y.at[i], stride, apart, stride, apart};
            k_copy_heads(sides[i], &e, n_heads, dim, n_rows);
        }
        twin_equal(&x, "rope");
        twin_equal(&y, "copy");
        twin_free(&x);
        twin_free(&y);
        twin_free(&rows);
    }
    twin_free(&cos_sin);
    free(table);
    close_device();
}
END_TEST

/* ----------------------------------------------------------------- experts */

START_TEST(test_route_equals_plain)
{
    open_exact(_i);
    for (uint64_t s = 0; s < CASES; s++) {
        uint32_t n_groups = s % 2 ? 1 : data_range(s, 1, 1, 8), size = data_range(s, 2, 1, s % 4 ? 16 : 128);
        struct k_router r = {
            .n_experts = n_groups * size, .n_groups = n_groups, .normalized = s % 3 == 0, .scale = 2.5f};
        r.n_groups_used = data_range(s, 3, 1, n_groups);
        uint32_t most = r.n_groups_used * size < K_MAX_USED ? r.n_groups_used * size : K_MAX_USED;
        r.n_used = data_range(s, 4, 1, most);
        uint32_t n_rows = data_range(s, 5, 1, 50), stride = r.n_used + (uint32_t)(s % 2);
        float *logits = data_floats(s, (size_t)n_rows * r.n_experts, 4);
        for (uint32_t i = 0; i < n_rows * r.n_experts && s % 5 == 0; i++)
            logits[i] = floorf(logits[i]); /* makes ties */
        struct twin in = twin_of(logits, (size_t)n_rows * r.n_experts * sizeof(float)),
                    experts = twin_floats(1, (size_t)n_rows * stride, 1),
                    weights = twin_floats(2, (size_t)n_rows * stride, 1);
        for (int i = 0; i < 2; i++)
            k_route(sides[i], &r, in.at[i], n_rows, stride, experts.at[i], weights.at[i]);
        twin_same_bytes(&experts, "experts");
        twin_equal(&weights, "weights");
        twin_free(&in);
        twin_free(&experts);
        twin_free(&weights);
        free(logits);
    }
    close_device();
}
END_TEST

START_TEST(test_sorted_slots_equal_plain)
{
    open_exact(_i);
    for (uint64_t s = 0; s < CASES; s++) {
        uint32_t n_rows = data_range(s, 1, 1, s % 4 ? 60 : 700), n_experts = data_range(s, 2, 1, s % 3 ? 16 : 200);
        uint32_t n_used = data_range(s, 3, 1, n_experts < 8 ? n_experts : 8), n_slots = n_used + (uint32_t)(s % 2);
        uint32_t *chosen = mem_array((size_t)n_rows * n_slots, sizeof(*chosen));
        for (uint32_t t = 0; t < n_rows; t++)
            for (uint32_t i = 0, e = data_range(s, 10 + t, 0, n_experts - 1); i < n_used; i++)
                chosen[t * n_slots + i] = (e + i) % n_experts; /* each expert at most once */
        struct twin experts = twin_of(chosen, (size_t)n_rows * n_slots * sizeof(*chosen)),
                    weights = twin_floats(s, (size_t)n_rows * n_slots, 1),
                    slots = twin_of(chosen, (size_t)n_rows * n_slots * sizeof(*chosen)),
                    slot_row = twin_floats(1, (size_t)n_rows * n_used, 1), first = twin_floats(1, n_experts + 1ul, 1),
                    gate = twin_floats(s, n_rows, 3);
        for (int i = 0; i < 2; i++) {
            struct k_slots all = {n_used,      n_slots,        experts.at[i], weights.at[i],
                                  slots.at[i], slot_row.at[i], first.at[i],   s % 3 ? gate.at[i] : NULL};
            k_sort_slots(sides[i], &all, n_experts, n_rows);
        }
        twin_same_bytes(&slots, "slots");
        twin_same_bytes(&slot_row, "rows of slots");
        twin_same_bytes(&first, "first slots");
        twin_equal(&weights, "weights of slots");
        struct twin *const all[] = {&experts, &weights, &slots, &slot_row, &first, &gate};
        for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
            twin_free(all[i]);
        free(chosen);
    }
    close_device();
}
END_TEST

START_TEST(test_combine_equals_plain)
{
    open_exact(_i);
    enum { N_X = 50, ROWS = 40 };
    for (uint32_t n = 1; n <= 9; n += 4) {
        uint32_t dim = 13 * n + 200, from[ROWS * 9];
        for (uint32_t i = 0; i < ROWS * n; i++)
            from[i] = data_range(4, i, 0, N_X - 1);
        struct twin x = twin_floats(1, N_X * dim, 2), weights = twin_floats(2, ROWS * n, 1),
                    y = twin_floats(3, ROWS * dim, 1), rows = twin_of(from, sizeof(from));
        for (int i = 0; i < 2; i++)
            k_combine(sides[i], x.at[i], dim, rows.at[i], weights.at[i], n, ROWS, y.at[i]);
        twin_equal(&y, "combine");
        twin_free(&x);
        twin_free(&weights);
        twin_free(&y);
        twin_free(&rows);
    }
    close_device();
}
END_TEST

/* ---------------------------------------------------------------- sampling */

START_TEST(test_sampling_equals_plain)
{
    open_exact(_i);
    enum { ROWS = 26, MAX_N = 20011 };
    static const uint32_t LENGTHS[] = {1, 15, 1003, 4096, MAX_N};
    struct k_draw draws[ROWS];
    for (uint32_t r = 0; r < ROWS; r++)
        draws[r] = data_draw(r + (uint32_t)_i);
    struct twin by = twin_of(draws, sizeof(draws));
    for (uint32_t i = 0; i < sizeof(LENGTHS) / sizeof(LENGTHS[0]); i++) {
        uint32_t n = LENGTHS[i];
        float *x = data_floats(5 + i, (size_t)n * ROWS, i % 2 ? 3 : 40);
        x[n / 2] = x[n - 1] = 50; /* equal numbers: the lowest index comes first */
        x[n + n / 3] = NAN;
        x[2 * n + n / 3] = INFINITY;
        for (uint32_t j = 0; j < n; j++) {
            x[7 * n + j] = NAN;
            x[8 * n + j] = -INFINITY;
            for (uint32_t r = 9; r < ROWS; r += 3)
                x[r * n + j] = (float)(int)(x[r * n + j] * 4) / 4; /* makes many numbers equal */
        }
        struct twin in = twin_of(x, (size_t)n * ROWS * sizeof(float)),
                    out = twin_floats(1, ROWS * sizeof(struct k_sampled) / sizeof(float), 1);
        for (int side = 0; side < 2; side++)
            k_sample_rows(sides[side], in.at[side], n, ROWS, by.at[side], out.at[side]);
        struct k_sampled *want = twin_read(&out, 0), *got = twin_read(&out, 1);
        data_sampled_equal(got, want, ROWS);
        twin_free(&in);
        twin_free(&out);
        free(x);
        free(want);
        free(got);
    }
    twin_free(&by);
    close_device();
}
END_TEST

/* ------------------------------------------------------------------- replay */

enum { REPLAY_DIM = 72, REPLAY_OUT = 40, REPLAY_TABLE = 30, REPLAY_ROWS = 5 };

struct replayed {
    float *table, *x, *y;
    struct k_matrix *w;
};

static void queue_replayed(struct kernels *k, const struct replayed *r, const uint32_t *ids, uint32_t n_rows)
{
    k_take_rows(k, r->table, NUM_F32, REPLAY_DIM, ids, n_rows, 1, r->x);
    k_linear(k, r->w, r->x, n_rows, r->y, false);
    k_linear(k, r->w, r->x, n_rows, r->y, true);
}

/* Runs a step whose rows have other ids each time. Returns the first rows of y, on the host. */
static float *run_replayed(struct kernels *k, const struct replayed *r, uint32_t step, uint32_t n_rows, bool replays)
{
    uint8_t *page = (uint8_t *)r->x;
    struct k_attn_seq seqs[REPLAY_ROWS * 4];
    uint32_t ids[REPLAY_ROWS * 4];
    float *y = mem_array((size_t)REPLAY_ROWS * REPLAY_OUT, sizeof(*y));
    for (uint32_t i = 0; i < n_rows; i++) {
        ids[i] = (uint32_t)(data_bits(step, i) % REPLAY_TABLE);
        seqs[i] = (struct k_attn_seq){.first_row = i, .n_rows = 1, .first_pos = 0, .pages = &page};
    }
    k_step(k);
    const uint32_t *put = k_put(k, ids, n_rows * sizeof(*ids));
    k_put_seqs(k, seqs, n_rows, 16);
    if (!replays || !k_replay(k, n_rows)) {
        queue_replayed(k, r, put, n_rows);
        if (replays)
            k_replay_end(k);
    }
    k_read(k, y, r->y, (size_t)REPLAY_ROWS * REPLAY_OUT * sizeof(*y));
    k_finish(k);
    return y;
}

START_TEST(test_steps_replayed_compute_with_what_was_put)
{
    open_fast(_i);
    struct kernels *k = sides[1];
    enum { MANY = 3000 };
    float *host = data_floats(3, (size_t)REPLAY_OUT * REPLAY_DIM, 1);
    const struct k_matrix_part part = {.data = host, .type = NUM_F32, .n_out = REPLAY_OUT};
    uint32_t n_rows = k_replay_rows(k, REPLAY_ROWS);
    ck_assert(!n_rows || (n_rows >= REPLAY_ROWS && n_rows <= 4 * REPLAY_ROWS));
    n_rows = n_rows ? n_rows : REPLAY_ROWS;
    struct twin table = twin_floats(1, REPLAY_TABLE * REPLAY_DIM, 1), x = twin_floats(2, MANY * REPLAY_DIM, 1),
                y = twin_floats(4, MANY * REPLAY_OUT, 1);
    struct replayed r = {table.at[1], x.at[1], y.at[1], NULL};
    ck_assert_int_eq(k_matrix_pack(k, &part, 1, REPLAY_DIM, COMPUTE_BF16, WEIGHTS_AS_STORED, &r.w), TD_OK);
    for (uint32_t step = 0; step < 12; step++) {
        if (step == 7) /* takes more scratch memory than before */
            k_linear(k, r.w, r.x, MANY, r.y, false);
        float *got = run_replayed(k, &r, step, n_rows, true), *want = run_replayed(k, &r, step, n_rows, false);
        data_equal(got, want, (size_t)REPLAY_ROWS * REPLAY_OUT, "replayed");
        float *other = run_replayed(k, &r, step + 100, n_rows, step % 2);
        ck_assert_msg(memcmp(got, other, sizeof(*got) * REPLAY_OUT), "step %u is the one before", step);
        free(got);
        free(want);
        free(other);
    }
    k_matrix_free(k, r.w);
    twin_free(&table);
    twin_free(&x);
    twin_free(&y);
    free(host);
    close_device();
}
END_TEST

/* ------------------------------------------------------------------ opening */

START_TEST(test_limits_are_known_or_zero)
{
    open_exact(_i);
    enum { HALF_BYTES = 1 << 20 };
    void *memory = NULL;
    ck_assert_int_eq(k_alloc(sides[1], 2 * HALF_BYTES, &memory), TD_OK);
    uint8_t *zeros = mem_array(2 * HALF_BYTES, 1);
    k_write(sides[1], memory, zeros, 2 * HALF_BYTES);
    free(zeros);
    for (enum kernels_limit i = 0; i < N_LIMITS; i++) {
        double amount = sides[1]->backend->run_limit(sides[1], i, memory, HALF_BYTES);
        /* A limit that this device does not have. */
        bool other = i == (DEVICES[_i].device == DEVICE_CPU ? LIMIT_LINK : LIMIT_READ_ONE);
        ck_assert(other ? !(amount > 0) : amount >= HALF_BYTES);
    }
    k_finish(sides[1]);
    k_free(sides[1], memory);
    close_device();
}
END_TEST

START_TEST(test_open_names_what_it_uses)
{
    open_fast(_i);
    ck_assert_int_eq(kernels_config(sides[1])->device, DEVICES[_i].device);
    ck_assert_uint_ge(kernels_n_threads(sides[1]), 1);
    char f32[K_NUMERICS_BYTES], bf16[K_NUMERICS_BYTES];
    k_numerics(sides[1], COMPUTE_F32, f32);
    k_numerics(sides[1], COMPUTE_BF16, bf16);
    ck_assert_str_eq(f32, kernels_numerics(kernels_config(sides[1]), COMPUTE_F32));
    if (DEVICES[_i].device == DEVICE_CUDA) {
        ck_assert(!strncmp(kernels_isa_name(sides[1]), "sm_", 3));
        ck_assert_ptr_nonnull(strstr(bf16, kernels_isa_name(sides[1])));
    } else {
        ck_assert_str_eq(bf16, kernels_numerics(kernels_config(sides[1]), COMPUTE_BF16));
    }
    close_device();
    struct kernels *k = NULL;
    struct td_error error = {0};
    struct kernels_config config = {.device = DEVICE_CUDA, .ordinal = 1000};
    if (DEVICES[_i].device == DEVICE_CUDA) {
        ck_assert_int_eq(kernels_open(&config, &k, &error), TD_ERR_INVALID);
        ck_assert_ptr_nonnull(strstr(error.text, "ordinal"));
        config = (struct kernels_config){.device = DEVICE_CUDA, .compute = (enum compute)77};
        ck_assert_int_eq(kernels_open(&config, &k, &error), TD_ERR_INVALID);
        ck_assert_ptr_nonnull(strstr(error.text, "compute"));
    }
}
END_TEST

int main(void)
{
    const TTest *const tests[] = {test_what_is_written_is_read,
                                  test_many_small_reads_are_there_after_one_finish,
                                  test_what_is_put_is_there_for_the_step,
                                  test_what_is_read_aside_is_there_at_its_mark,
                                  test_what_is_read_aside_is_there_after_finish_without_a_mark,
                                  test_what_is_written_aside_is_there_at_its_mark,
                                  test_mapped_memory_is_kept_alike,
                                  test_linear_f32_equals_plain_for_any_shape,
                                  test_linear_f32_keeps_subnormal_numbers_and_signs_of_zero,
                                  test_linear_bf16_is_near_plain_for_any_shape,
                                  test_linear_in_any_order_is_near_plain,
                                  test_linear_is_right_for_large_shapes,
                                  test_linear_row_is_the_same_alone_and_in_a_batch,
                                  test_linear_bf16_is_near_plain_at_the_edges_of_tiles,
                                  test_linear_bf16_row_is_the_same_in_tiles_of_any_size,
                                  test_matrix_parts_may_be_transposed_or_interleaved,
                                  test_matrix_pack_refuses_empty_shapes,
                                  test_linear_each_gives_what_linear_gives,
                                  test_linear_sorted_gives_what_linear_gives,
                                  test_embed_equals_plain_for_every_type,
                                  test_norms_equal_plain,
                                  test_fast_norms_are_near_plain,
                                  test_norm_of_a_row_is_the_same_alone_and_in_a_batch,
                                  test_a_product_that_follows_has_the_bits_of_a_later_one,
                                  test_elementwise_equals_plain,
                                  test_copied_and_rotated_heads_equal_plain,
                                  test_route_equals_plain,
                                  test_sorted_slots_equal_plain,
                                  test_combine_equals_plain,
                                  test_sampling_equals_plain,
                                  test_steps_replayed_compute_with_what_was_put,
                                  test_limits_are_known_or_zero,
                                  test_open_names_what_it_uses};
    return device_main("kernels_device", tests, sizeof(tests) / sizeof(tests[0]));
}
