/* The bench measures something plausible; with arguments it prints the table (for people, not run by the suite). */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "transfer/bench.h"

START_TEST(test_bench_moves_bytes_over_the_transport_it_was_told)
{
    static const char *const tls[] = {"auto", "tcp"};
    static const uint64_t sizes[] = {65536, 1 << 20};
    const struct xfer_bench_config c = {.tls = tls,
                                        .n_tls = 2,
                                        .page_bytes = sizes,
                                        .n_page_bytes = 2,
                                        .arena_bytes = 16 << 20,
                                        .min_ns = 50 * NS_PER_MS};
    struct xfer_bench_row rows[4];
    struct td_error error = {""};
    ck_assert_msg(xfer_bench(&c, rows, &error) == TD_OK, "%s", error.text);
    for (int i = 0; i < 4; i++) {
        ck_assert_uint_ge(rows[i].bytes, c.arena_bytes);
        ck_assert_uint_eq(rows[i].page_bytes, sizes[i % 2]);
        ck_assert(rows[i].gb_per_s > 0 && rows[i].memcpy_gb_per_s > 0);
        ck_assert_str_eq(rows[i].transport, i < 2 ? "posix" : "tcp/lo");
    }
}
END_TEST

START_TEST(test_bench_refuses_odd_pages)
{
    static const char *const tls[] = {"tcp"};
    static const uint64_t sizes[] = {1000};
    const struct xfer_bench_config c = {.tls = tls, .n_tls = 1, .page_bytes = sizes, .n_page_bytes = 1};
    struct xfer_bench_row row;
    struct td_error error = {""};
    ck_assert_int_eq(xfer_bench(&c, &row, &error), TD_ERR_INVALID);
    ck_assert(error.text[0]);
}
END_TEST

static int print_table(int n_tls, char **tls)
{
    static const uint64_t sizes[] = {16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20};
    enum { N = sizeof(sizes) / sizeof(sizes[0]) };
    struct xfer_bench_config c = {
        .tls = (const char *const *)tls, .n_tls = (uint32_t)n_tls, .page_bytes = sizes, .n_page_bytes = N};
    struct xfer_bench_row *rows = calloc((size_t)n_tls * N, sizeof(*rows));
    struct td_error error = {""};
    enum td_status s = xfer_bench(&c, rows, &error);
    for (int i = 0; !s && i < n_tls * N; i++)
        fprintf(stderr, "%-10s %-12s %6llu KiB  %6.2f GB/s  memcpy %6.2f GB/s\n", rows[i].tls, rows[i].transport,
                (unsigned long long)(rows[i].page_bytes >> 10), rows[i].gb_per_s, rows[i].memcpy_gb_per_s);
    if (s)
        fprintf(stderr, "%s\n", error.text);
    free(rows);
    return s ? 1 : 0;
}

int main(int argc, char **argv)
{
    if (argc > 1)
        return print_table(argc - 1, argv + 1);
    Suite *s = suite_create("transfer bench");
    TCase *tc = tcase_create("bench");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, test_bench_moves_bytes_over_the_transport_it_was_told);
    tcase_add_test(tc, test_bench_refuses_odd_pages);
    suite_add_tcase(s, tc);
    SRunner *sr = srunner_create(s);
    srunner_run_all(sr, CK_ENV);
    int failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed ? 1 : 0;
}
