/* Which devices the workers of `tandem up --device cuda` get. */
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/up_devices.h"
#include "tests/tap.h"

START_TEST(test_devices_are_counted_without_cuda)
{
    char folder[] = "/tmp/tandem-devices-XXXXXX", path[64];
    ck_assert_ptr_nonnull(mkdtemp(folder));
    ck_assert_uint_eq(up_devices_count(NULL, folder), 0);
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof(path), "%s/%d", folder, i);
        ck_assert_int_eq(mkdir(path, 0700), 0);
    }
    static const struct {
        const char *visible;
        uint32_t n;
    } CASES[] = {{NULL, 3},       {"", 0},  {"0", 1}, {"2,0", 2}, {"0,1,2,3,4", 3}, {"GPU-8932f937,GPU-d4f", 2},
                 {"0,-1,1,2", 1}, {"-1", 0}};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++)
        ck_assert_msg(up_devices_count(CASES[i].visible, folder) == CASES[i].n, "%s", CASES[i].visible);
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof(path), "%s/%d", folder, i);
        rmdir(path);
    }
    rmdir(folder);
    ck_assert_uint_eq(up_devices_count(NULL, folder), UINT32_MAX); /* it can't be told */
    ck_assert_uint_eq(up_devices_count("0,1", folder), 2);
}
END_TEST

START_TEST(test_more_workers_than_devices_are_refused)
{
    struct td_error e = {""};
    ck_assert_int_eq(up_devices_check(2, 1, 2, &e), TD_OK);
    ck_assert_int_eq(up_devices_check(2, 4, 8, &e), TD_OK);
    ck_assert_int_eq(up_devices_check(16, 16, UINT32_MAX, &e), TD_OK);
    ck_assert_int_eq(up_devices_check(2, 1, 1, &e), TD_ERR_INVALID);
    ck_assert_int_eq(up_devices_check(2, 4, 7, &e), TD_ERR_INVALID);
    ck_assert_msg(strstr(e.text, "8 devices are needed (workers: 2, ranks of each: 4), 7 are there") &&
                      strstr(e.text, "--device cuda:N"),
                  "%s", e.text);
}
END_TEST

START_TEST(test_a_worker_gets_the_first_devices_that_are_free)
{
    struct child children[6] = {{.role = CHILD_ROUTER}};
    for (uint32_t i = 1; i < 6; i++) {
        ck_assert_uint_eq(up_devices_next(children, 6, 2), 2 * (i - 1));
        args_add(&children[i].args, "tandem-decode");
        args_add(&children[i].args, "--device=cuda:%u", 2 * (i - 1));
        args_add(&children[i].args, "--name=w");
    }
    ck_assert_uint_eq(up_devices_next(children, 6, 2), 10);
    children[3].state = CHILD_BACKOFF; /* it comes back */
    ck_assert_uint_eq(up_devices_next(children, 6, 2), 10);
    children[5].state = children[3].state = CHILD_ENDED;
    ck_assert_uint_eq(up_devices_next(children, 6, 2), 4);
    for (uint32_t i = 1; i < 6; i++)
        args_free(&children[i].args);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("devices of tandem up");
    TCase *tc = tcase_create("devices");
    tcase_add_test(tc, test_devices_are_counted_without_cuda);
    tcase_add_test(tc, test_more_workers_than_devices_are_refused);
    tcase_add_test(tc, test_a_worker_gets_the_first_devices_that_are_free);
    suite_add_tcase(s, tc);
    return tap_main(s);
}
