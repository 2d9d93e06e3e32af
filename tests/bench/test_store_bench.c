/* Runs the bench on a small working set and checks that its rows make sense. TANDEM_BENCH=1 takes the full
 * set and prints the rows. */
#include <stdbool.h>

#include "base/clock.h"
#include "bench/store_bench.h"
#include "tests/kvstore/dirs.h"
#include "tests/tap.h"

static const char *row_without_value(const struct kvstore_bench *b)
{
    for (uint32_t i = 0; i < b->n_rows; i++)
        if (!(b->rows[i].value > 0) && strcmp(b->rows[i].unit, "times") != 0)
            return b->rows[i].name;
    return NULL;
}

START_TEST(test_kvstore_bench_fills_its_rows)
{
    struct temp_dir d = temp_dir_make();
    struct kvstore_bench b;
    struct td_error e = {""};
    bool full = getenv("TANDEM_BENCH") != NULL;
    const struct kvstore_bench_config c = {.dir = d.root,
                                           .bytes = full ? 0 : 64 << 20,
                                           .read_threads = full ? 0 : 2,
                                           .n_rounds = full ? 0 : 1,
                                           .load_ns = full ? 0 : NS_PER_S / 2,
                                           .index_bytes = full ? 0 : 4ull << 30};
    enum td_status s = kvstore_bench(&c, &b, &e);
    /* Tries again: within half a second on a busy machine there may be no read, or nothing may be written. */
    for (int i = 0; i < 3 && (s ? s != TD_ERR_UNSUPPORTED : row_without_value(&b) != NULL); i++) {
        fprintf(stderr, "# again: %s\n", s ? e.text : row_without_value(&b));
        s = kvstore_bench(&c, &b, &e);
    }
    if (s == TD_ERR_UNSUPPORTED) { /* no O_DIRECT here */
        temp_dir_remove(&d);
        return;
    }
    ck_assert_msg(s == TD_OK, "kvstore_bench: %s", e.text);
    for (uint32_t i = 0; i < b.n_rows; i++) {
        const struct kvstore_bench_row *r = &b.rows[i];
        if (full)
            fprintf(stderr, "# %-74s %7.2f %s %4.0f %%\n", r->name, r->value, r->unit, 100 * r->share);
        ck_assert_str_ne(r->unit, "");
        ck_assert_msg(r->value > 0 || !strcmp(r->unit, "times"), "%s: %f", r->name, r->value);
    }
    ck_assert_uint_eq(b.n_rows, 20);
    ck_assert_int_eq(rmdir(d.root), 0); /* nothing is left behind */
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kvstore bench");
    TCase *c = tcase_create("bench");
    tcase_set_timeout(c, 120);
    tcase_add_test(c, test_kvstore_bench_fills_its_rows);
    suite_add_tcase(s, c);
    return tap_main(s);
}
