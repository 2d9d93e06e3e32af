/* What every test program's main() is: one suite, run with libcheck's environment, TAP on stdout. */
#pragma once

#include <check.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* Whether tests run in processes of their own; without (CK_FORK=no), those that are meant to abort can't run. */
static inline bool tap_forks(void)
{
    const char *fork = getenv("CK_FORK");
    return !fork || strcmp(fork, "no") != 0;
}

/* Whether TANDEM_LONG asks for what takes long: by this name, or for all. */
static inline bool tap_is_long(const char *name)
{
    const char *asked = getenv("TANDEM_LONG");
    return asked && (!strcmp(asked, name) || !strcmp(asked, "all"));
}

static inline int tap_main(Suite *suite)
{
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_ENV);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? 1 : 0;
}
