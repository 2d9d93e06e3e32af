/* What every test program's main() is: one suite, run with libcheck's environment, TAP on stdout. */
#pragma once

#include <check.h>

static inline int tap_main(Suite *suite)
{
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_ENV);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? 1 : 0;
}
