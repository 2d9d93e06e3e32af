/* Random inputs and comparisons for the tests of the kernels. */
#pragma once

#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "kernels/kernels.h"

static inline uint64_t data_bits(uint64_t seed, uint64_t i)
{
    return random_at(20240, seed, i);
}

static inline uint32_t data_range(uint64_t seed, uint64_t i, uint32_t low, uint32_t high)
{
    return low + (uint32_t)(data_bits(seed, i) % (high - low + 1));
}

/* n numbers in (-scale, scale), now and then a zero of either sign; free() them. */
static inline float *data_floats(uint64_t seed, size_t n, float scale)
{
    float *x = mem_array(n, sizeof(*x));
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = data_bits(seed, i);
        x[i] = (float)(random_unit(bits) * 2 - 1) * scale;
        if (bits % 61 == 0)
            x[i] = bits % 2 ? 0.0f : -0.0f;
    }
    return x;
}

/* The same numbers as type. */
static inline void *data_as(const float *x, enum num_type type, size_t n)
{
    void *out = mem_array(n, num_type_bytes(type));
    k_convert_from_f32(x, type, n, out);
    return out;
}

static inline struct kernels *data_open(enum kernels_isa isa, uint32_t n_threads)
{
    struct kernels *k = NULL;
    struct td_error error;
    struct kernels_config config = {.isa = isa, .n_threads = n_threads};
    enum td_status s = kernels_open(&config, &k, &error);
    if (s == TD_ERR_UNSUPPORTED)
        return NULL;
    ck_assert_int_eq(s, TD_OK);
    return k;
}

/* Equal bits; NaNs are equal whatever they carry. */
static inline void data_equal(const float *a, const float *b, size_t n, const char *what)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t x, y;
        memcpy(&x, a + i, 4);
        memcpy(&y, b + i, 4);
        if (x != y && !(a[i] != a[i] && b[i] != b[i]))
            ck_abort_msg("%s: [%zu] %a is not %a", what, i, (double)a[i], (double)b[i]);
    }
}

static inline int data_main(Suite *s)
{
    SRunner *runner = srunner_create(s);
    srunner_run_all(runner, CK_ENV);
    int failures = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failures ? 1 : 0;
}
