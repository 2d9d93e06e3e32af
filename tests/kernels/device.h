/*
 * Shared by the suites of a device, which run plain C on the CPU and the device side by side with the same
 * inputs.
 *
 * The device is CUDA's first one, or the CPU's own fast version, which tests the suites themselves.
 * TANDEM_DEVICE=cpu or cuda selects one of them. If the machine does not have a device, its tests are skipped
 * by name.
 */
#pragma once

#include <math.h>
#include <stdio.h>

#include "tests/ask_device.h"
#include "tests/kernels/data.h"
#include "tests/tap.h"

enum { N_DEVICES = 2, CASES = 40 /* random cases of a test */ };

static const struct {
    const char *name;
    enum kernels_device device;
} DEVICES[N_DEVICES] = {{"cpu", DEVICE_CPU}, {"cuda", DEVICE_CUDA}};

/* Both sides of a comparison: [0] plain C, [1] the device. */
static struct kernels *sides[2];

static inline void open_device(int i, enum compute compute, bool any_order)
{
    struct td_error error = {0};
    struct kernels_config config = {.device = DEVICES[i].device, .compute = compute, .any_order = any_order};
    sides[0] = data_open(ISA_PLAIN, 1);
    ck_assert_msg(!kernels_open(&config, &sides[1], &error), "%s", error.text);
}

static inline void open_exact(int i)
{
    open_device(i, COMPUTE_F32, false);
}

static inline void open_fast(int i)
{
    open_device(i, COMPUTE_BF16, false);
}

static inline void close_device(void)
{
    kernels_close(sides[0]);
    kernels_close(sides[1]);
}

/* The same bytes on both sides. The functions below compare first and call libcheck only at the end, because
 * libcheck writes every assertion to a file. */
struct twin {
    void *at[2];
    size_t len_bytes;
};

static inline void *alloc(struct kernels *k, const void *host, size_t len_bytes)
{
    void *p = NULL;
    ck_assert_int_eq(k_alloc(k, len_bytes, &p), TD_OK);
    k_write(k, p, host, len_bytes);
    return p;
}

static inline struct twin twin_of(const void *host, size_t len_bytes)
{
    return (struct twin){{alloc(sides[0], host, len_bytes), alloc(sides[1], host, len_bytes)}, len_bytes};
}

static inline struct twin twin_floats(uint64_t seed, size_t n, float scale)
{
    float *x = data_floats(seed, n, scale);
    struct twin t = twin_of(x, n * sizeof(*x));
    free(x);
    return t;
}

static inline void twin_free(struct twin *t)
{
    for (int i = 0; i < 2; i++)
        k_free(sides[i], t->at[i]);
}

/* Copies the bytes of a side to the host. Free with free(). */
static inline void *twin_read(const struct twin *t, int side)
{
    void *host = mem_zalloc(t->len_bytes);
    k_read(sides[side], host, t->at[side], t->len_bytes);
    k_finish(sides[side]);
    return host;
}

static inline void twin_equal(const struct twin *t, const char *what)
{
    float *want = twin_read(t, 0), *got = twin_read(t, 1);
    data_equal(got, want, t->len_bytes / sizeof(float), what);
    free(want);
    free(got);
}

static inline void twin_same_bytes(const struct twin *t, const char *what)
{
    uint8_t *want = twin_read(t, 0), *got = twin_read(t, 1);
    for (size_t i = 0; i < t->len_bytes; i++)
        if (want[i] != got[i])
            ck_abort_msg("%s: byte %zu", what, i);
    free(want);
    free(got);
}

/* Checks rows of dim numbers: both sides differ by at most `share` of the largest number in the row. */
static inline void twin_near(const struct twin *t, uint32_t dim, float share, const char *what)
{
    float *want = twin_read(t, 0), *got = twin_read(t, 1);
    size_t n = t->len_bytes / sizeof(float);
    for (size_t row = 0; row < n; row += dim) {
        float largest = 0;
        for (size_t i = row; i < row + dim; i++)
            largest = fmaxf(largest, fabsf(want[i]));
        for (size_t i = row; i < row + dim; i++)
            if (!(fabsf(got[i] - want[i]) <= share * largest))
                ck_abort_msg("%s: [%zu] %g is far from %g (of %g)", what, i, (double)got[i], (double)want[i],
                             (double)largest);
    }
    free(want);
    free(got);
}

/*
 * A product that follows the operation that wrote its rows [n_rows][n_in] has the bits of a later one: a
 * device may keep more of the rows for it. No operation may come between those rows and product_check().
 */
struct product {
    struct k_matrix *m;
    float *out[2]; /* on the device: of the first product, and of a later one */
    size_t n_out;
};

static inline struct product product_open(struct kernels *k, uint32_t n_rows, uint32_t n_in)
{
    enum { OUTS = 40 };
    struct product p = {.n_out = (size_t)n_rows * OUTS};
    float *w = data_floats(n_in, (size_t)OUTS * n_in, 1), *zeros = mem_zalloc(p.n_out * sizeof(*zeros));
    void *as_bf16 = data_as(w, NUM_BF16, (size_t)OUTS * n_in);
    const struct k_matrix_part part = {.data = as_bf16, .type = NUM_BF16, .n_out = OUTS};
    ck_assert_int_eq(k_matrix_pack(k, &part, 1, n_in, COMPUTE_BF16, WEIGHTS_AS_STORED, &p.m), TD_OK);
    for (int i = 0; i < 2; i++)
        p.out[i] = alloc(k, zeros, p.n_out * sizeof(*zeros));
    free(w);
    free(zeros);
    free(as_bf16);
    return p;
}

static inline void product_check(struct kernels *k, struct product *p, const float *rows, uint32_t n_rows)
{
    float *got[2];
    for (int i = 0; i < 2; i++)
        k_linear(k, p->m, rows, n_rows, p->out[i], false);
    for (int i = 0; i < 2; i++) {
        got[i] = mem_array(p->n_out, sizeof(float));
        k_read(k, got[i], p->out[i], p->n_out * sizeof(float));
    }
    k_finish(k);
    data_equal(got[0], got[1], p->n_out, "the product that follows");
    for (int i = 0; i < 2; i++) {
        k_free(k, p->out[i]);
        free(got[i]);
    }
    k_matrix_free(k, p->m);
}

/* -------------------------------------------------------------------- main */

/* Runs each test on each device; _i is the index of the device. Without a device all tests are skipped. */
static inline int device_main(const char *name, const TTest *const *tests, uint32_t n_tests)
{
    const char *only = getenv("TANDEM_DEVICE");
    char why[256] = "";
    uint32_t n_present = 0;
    Suite *suite = suite_create(name);
    for (int i = 0; i < N_DEVICES; i++) {
        if (only && strcmp(only, DEVICES[i].name) != 0)
            continue;
        ask_device(DEVICES[i].device, why, sizeof(why));
        TCase *t = tcase_create(DEVICES[i].name);
        tcase_set_timeout(t, 120);
        for (uint32_t j = 0; j < n_tests; j++)
            if (!*why)
                tcase_add_loop_test(t, tests[j], i, i + 1);
            else if (only)
                printf("ok %u - %s # SKIP %s\n", j + 1, tests[j]->name, why);
            else
                printf("# SKIP %s: %s\n", tests[j]->name, why);
        if (!*why)
            n_present++;
        suite_add_tcase(suite, t);
    }
    fflush(stdout); /* else each forked test would print the buffer again */
    if (n_present)
        return tap_main(suite);
    srunner_free(srunner_create(suite)); /* only a runner can free a suite */
    printf("1..%u\n", n_tests);
    return 0;
}
