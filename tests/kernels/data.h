/* Random inputs and comparisons for the tests of the kernels. */
#pragma once

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "kernels/kernels.h"
#include "tests/tap.h"

static inline uint64_t data_bits(uint64_t seed, uint64_t i)
{
    return random_at(20240, seed, i);
}

static inline uint32_t data_range(uint64_t seed, uint64_t i, uint32_t low, uint32_t high)
{
    return low + (uint32_t)(data_bits(seed, i) % (high - low + 1));
}

/* n numbers in (-scale, scale), some of them zeros of either sign. Free with free(). */
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

/* The same numbers, converted to type. Free with free(). */
static inline void *data_as(const float *x, enum num_type type, size_t n)
{
    void *out = mem_array(n, num_type_bytes(type));
    k_convert_from_f32(x, type, n, out);
    return out;
}

/* Settings of draws: each one alone, and all together. Row i of any step uses DRAWS[i % N_DRAWS], with a u of
 * its own. */
static inline struct k_draw data_draw(uint32_t i)
{
    static const struct k_draw DRAWS[] = {
        {.temperature = 0, .top_p = 1},
        {.temperature = 1, .top_p = 1},
        {.temperature = 0.01f, .top_p = 1},
        {.temperature = 2, .top_p = 1, .top_k = 40},
        {.temperature = 30, .top_p = 1, .top_k = 2000},
        {.temperature = 1, .top_p = 0.9f},
        {.temperature = 100, .top_p = 0.99995f},
        {.temperature = 1.5f, .top_p = 0.95f, .top_k = 200},
        {.temperature = 1, .top_p = 1, .min_p = 0.05f},
        {.temperature = 1, .top_p = 1, .typical_p = 0.8f},
        {.temperature = 1, .top_p = 1, .typical_p = 1e-20f},
        {.temperature = 1.2f, .top_p = 0.98f, .top_k = 300, .min_p = 0.01f, .typical_p = 0.9f},
        {.temperature = 1, .top_p = 1e-6f, .top_k = 7},
    };
    struct k_draw d = DRAWS[i % (sizeof(DRAWS) / sizeof(DRAWS[0]))];
    d.u = i % 5 ? random_unit(data_bits(77, i)) : i % 2 ? 0 : 0x1.fffffffffffffp-1;
    return d;
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

/* Checks for equal bits. All NaNs count as equal. */
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

static inline void data_sampled_equal(const struct k_sampled *got, const struct k_sampled *want, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        ck_assert_msg(got[i].id == want[i].id, "row %u: %u, not %u", i, got[i].id, want[i].id);
        data_equal(&got[i].logit, &want[i].logit, 1, "logit");
        data_equal(&got[i].logsumexp, &want[i].logsumexp, 1, "logsumexp");
    }
}
