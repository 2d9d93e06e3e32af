/* Runs the bench on shapes small enough to be quick. Checks that it fills its rows, not their values. */
#include <math.h>

#include "bench/kernels_bench.h"
#include "tests/kernels/data.h"

START_TEST(test_bench_fills_every_row)
{
    struct kernels_bench *b = mem_zalloc(sizeof(*b));
    struct td_error error;
    struct kernels_bench_config config = {.kernels = {.n_threads = 2}, .seconds_per_row = 1e-6, .shrink = 16};
    enum td_status s = kernels_bench(&config, b, &error);
    if (s != TD_ERR_UNSUPPORTED) { /* the CPU has no instruction set but plain C */
        ck_assert_int_eq(s, TD_OK);
        ck_assert_uint_eq(b->n_rows, 5 + (2 * 3 + 3) * 4 + 3);
        ck_assert_uint_eq(b->n_threads, 2);
        for (uint32_t i = 0; i < b->n_rows; i++) {
            ck_assert_uint_gt(strlen(b->rows[i].name), 0);
            ck_assert_ptr_nonnull(b->rows[i].unit);
            ck_assert(isfinite(b->rows[i].value) && b->rows[i].value > 0);
            ck_assert(i < 5 ? b->rows[i].limit == 0 : b->rows[i].share > 0);
            for (uint32_t j = 0; j < i; j++)
                ck_assert_str_ne(b->rows[i].name, b->rows[j].name);
        }
    }
    free(b);
}
END_TEST

START_TEST(test_bench_refuses_plain_c)
{
    struct kernels_bench *b = mem_zalloc(sizeof(*b));
    struct td_error error;
    struct kernels_bench_config config = {.kernels = {.isa = ISA_PLAIN}};
    ck_assert_int_eq(kernels_bench(&config, b, &error), TD_ERR_UNSUPPORTED);
    ck_assert_uint_eq(b->n_rows, 0);
    free(b);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kernels_bench");
    TCase *t = tcase_create("bench");
    tcase_set_timeout(t, 60);
    tcase_add_test(t, test_bench_fills_every_row);
    tcase_add_test(t, test_bench_refuses_plain_c);
    suite_add_tcase(s, t);
    return data_main(s);
}
