/* Checks that the bench measures something plausible. With arguments (paths, then units in KiB) it prints the
 * table for people. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "bench/transfer_bench.h"
#include "tests/tap.h"

START_TEST(test_bench_moves_bytes_over_the_transport_it_was_told)
{
    static const char *const paths[] = {"shm", "tcp"}, *const transports[] = {"tcp,posix", "tcp"};
    static const uint64_t sizes[] = {64 << 10, 4 << 20};
    const struct xfer_bench_config c = {
        .paths = paths, .n_paths = 2, .unit_bytes = sizes, .n_units = 2, .arena_bytes = 16 << 20, .n_rounds = 2};
    struct xfer_bench_row rows[4];
    struct td_error error = {""};
    ck_assert_msg(xfer_bench(&c, rows, &error) == TD_OK, "%s", error.text);
    for (int i = 0; i < 4; i++) {
        ck_assert_uint_eq(rows[i].bytes, 4 * c.arena_bytes);
        ck_assert_uint_eq(rows[i].unit_bytes, sizes[i % 2]);
        ck_assert(rows[i].gb_per_s > 0 && rows[i].bare_gb_per_s > 0 && rows[i].memcpy_gb_per_s > 0);
        ck_assert(rows[i].share > 0 && rows[i].bare_message_bytes <= sizes[i % 2]);
        ck_assert_str_eq(rows[i].transport, transports[i / 2]);
    }
}
END_TEST

START_TEST(test_bench_reads_from_a_server_of_its_own)
{
    static const char *const paths[] = {"tcp"};
    static const uint64_t sizes[] = {2 << 20};
    struct xfer_bench_server *server;
    struct xfer_bench_row row;
    struct td_error error = {""};
    ck_assert_int_eq(xfer_bench_serve("127.0.0.1:0", "tcp", "s3cret", 16 << 20, NULL, &server, &error), TD_OK);
    struct xfer_bench_config c = {.paths = paths,
                                  .n_paths = 1,
                                  .unit_bytes = sizes,
                                  .n_units = 1,
                                  .arena_bytes = 16 << 20,
                                  .n_rounds = 1,
                                  .peer = xfer_bench_server_address(server),
                                  .secret = "s3cret"};
    ck_assert_msg(xfer_bench(&c, &row, &error) == TD_OK, "%s", error.text);
    ck_assert_str_eq(row.transport, "tcp");
    c.arena_bytes = 32 << 20; /* more than the server has */
    ck_assert_int_eq(xfer_bench(&c, &row, &error), TD_ERR_INVALID);
    xfer_bench_server_close(server);
}
END_TEST

START_TEST(test_bench_refuses_odd_units)
{
    static const char *const paths[] = {"tcp"};
    static const uint64_t sizes[] = {1000};
    const struct xfer_bench_config c = {.paths = paths, .n_paths = 1, .unit_bytes = sizes, .n_units = 1};
    struct xfer_bench_row row;
    struct td_error error = {""};
    ck_assert_int_eq(xfer_bench(&c, &row, &error), TD_ERR_INVALID);
    ck_assert(error.text[0]);
}
END_TEST

START_TEST(test_bench_of_sums_has_a_figure_for_each_way)
{
    struct xfer_bench_sum sums[XFER_BENCH_SUMS];
    ck_assert_int_eq(xfer_bench_sums(2 << 20, sums), TD_OK);
    for (int i = 0; i < 4; i++) /* CRC32C is not on every machine */
        ck_assert(sums[i].copy_gb_per_s > 0 && (!i || (sums[i].cold_gb_per_s > 0 && sums[i].hot_gb_per_s > 0)));
}
END_TEST

/* Compares with memcpy in the same run. An idle machine shows 100 % of memcpy and more; half of it holds on a
 * busy one. Ten tries at most. */
START_TEST(test_bench_of_copies_shows_that_the_way_chosen_is_fast)
{
    double of_best = 0, of_memcpy = 0;
    const char *best_name = "", *chosen_name = "";
    for (int try = 0; try < 10 && (of_best < 0.8 || of_memcpy < 0.5); try++) {
        struct xfer_bench_ways w;
        double best = 0, chosen = 0;
        uint32_t n_chosen = 0;
        ck_assert_int_eq(xfer_bench_copies(32 << 20, &w), TD_OK);
        ck_assert_uint_ge(w.n, 4); /* the ways that need no vector instructions */
        for (uint32_t i = 0; i < w.n; i++) {
            ck_assert(w.ways[i].name && w.ways[i].gb_per_s > 0 && w.ways[i].start_gb_per_s > 0);
            best_name = w.ways[i].gb_per_s > best ? w.ways[i].name : best_name;
            chosen_name = w.ways[i].is_chosen ? w.ways[i].name : chosen_name;
            best = w.ways[i].gb_per_s > best ? w.ways[i].gb_per_s : best;
            chosen = w.ways[i].is_chosen ? w.ways[i].gb_per_s : chosen;
            n_chosen += w.ways[i].is_chosen;
        }
        ck_assert_uint_eq(n_chosen, 1);
        of_best = chosen / best;
        of_memcpy = chosen / w.memcpy_gb_per_s;
    }
    ck_assert_msg(of_best >= 0.8, "%s, %.2f of the fastest way, %s", chosen_name, of_best, best_name);
    ck_assert_msg(of_memcpy >= 0.5, "%.2f of memcpy", of_memcpy);
}
END_TEST

static int print_sums(void)
{
    struct xfer_bench_sum sums[XFER_BENCH_SUMS];
    if (xfer_bench_sums(64 << 20, sums))
        return 1;
    for (int i = 0; i < XFER_BENCH_SUMS; i++)
        fprintf(stderr, "%-28s cold %6.2f  hot %6.2f  copy %6.2f GB/s\n", sums[i].name, sums[i].cold_gb_per_s,
                sums[i].hot_gb_per_s, sums[i].copy_gb_per_s);
    return 0;
}

static int print_table(int argc, char **argv)
{
    enum { UNITS_MAX = 16 };
    uint64_t units[UNITS_MAX];
    uint32_t n_units = 0;
    for (int i = 2; i < argc && n_units < UNITS_MAX; i++)
        units[n_units++] = strtoull(argv[i], NULL, 10) << 10;
    const char *const paths[] = {argv[1]};
    const char *arena = getenv("BENCH_ARENA_MIB"), *rounds = getenv("BENCH_ROUNDS");
    static const struct log LOG = {.who = "bench", .level = LOG_WARN};
    struct xfer_bench_config c = {.paths = paths,
                                  .n_paths = 1,
                                  .unit_bytes = units,
                                  .n_units = n_units,
                                  .log = &LOG,
                                  .arena_bytes = arena ? strtoull(arena, NULL, 10) << 20 : 0,
                                  .n_rounds = rounds ? (uint32_t)atoi(rounds) : 0};
    struct xfer_bench_row rows[UNITS_MAX];
    struct td_error error = {""};
    enum td_status s = xfer_bench(&c, rows, &error);
    for (uint32_t i = 0; !s && i < n_units; i++)
        fprintf(stderr,
                "%-7s %-12s %7llu KiB  %6.2f GB/s  bare(%5llu KiB) %6.2f  share %5.1f %%  A/A %4.1f %%  memcpy %6.2f  "
                "cpu %4.0f, bare %4.0f ms/GB\n",
                rows[i].path, rows[i].transport, (unsigned long long)(rows[i].unit_bytes >> 10), rows[i].gb_per_s,
                (unsigned long long)(rows[i].bare_message_bytes >> 10), rows[i].bare_gb_per_s, 100 * rows[i].share,
                100 * rows[i].spread, rows[i].memcpy_gb_per_s, rows[i].cpu_ms_per_gb, rows[i].bare_cpu_ms_per_gb);
    if (s)
        fprintf(stderr, "%s\n", error.text);
    return s ? 1 : 0;
}

int main(int argc, char **argv)
{
    if (argc > 1)
        return strcmp(argv[1], "sums") ? print_table(argc, argv) : print_sums();
    Suite *s = suite_create("transfer bench");
    TCase *tc = tcase_create("bench");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, test_bench_moves_bytes_over_the_transport_it_was_told);
    tcase_add_test(tc, test_bench_reads_from_a_server_of_its_own);
    tcase_add_test(tc, test_bench_refuses_odd_units);
    tcase_add_test(tc, test_bench_of_sums_has_a_figure_for_each_way);
    tcase_add_test(tc, test_bench_of_copies_shows_that_the_way_chosen_is_fast);
    suite_add_tcase(s, tc);
    SRunner *sr = srunner_create(s);
    srunner_run_all(sr, CK_ENV);
    int failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed ? 1 : 0;
}
