/* The main() of every test program: runs one suite with libcheck's environment and prints TAP on stdout. */
#pragma once

#include <check.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/*
 * libcheck writes a line to a file whenever an assertion holds, to say after which one a test crashed. Here
 * each assertion writes one the first time that it holds, because in loops over bytes the writes took most of
 * the time.
 */
#define _mark_point(file, line)                                                                                        \
    (__extension__({                                                                                                   \
        static atomic_bool is_marked;                                                                                  \
        if (!atomic_exchange_explicit(&is_marked, true, memory_order_relaxed))                                         \
            (_mark_point)(file, line);                                                                                 \
    }))

/* Whether each test runs in a process of its own. Without (CK_FORK=no), tests that are meant to abort can't
 * run. */
static inline bool tap_forks(void)
{
    const char *fork = getenv("CK_FORK");
    return !fork || strcmp(fork, "no") != 0;
}

/* Whether TANDEM_LONG asks for the long version of these tests, by this name or by "all". */
static inline bool tap_is_long(const char *name)
{
    const char *asked = getenv("TANDEM_LONG");
    return asked && (!strcmp(asked, name) || !strcmp(asked, "all"));
}

enum { TAP_SKIPS_MAX = 32 };
static struct {
    const char *name, *why;
} tap_skips[TAP_SKIPS_MAX];
static unsigned tap_n_skips;

/* Call it instead of adding a test that can't run here: tap_main() reports the test as skipped. Both texts
 * are borrowed. */
static inline void tap_skip(const char *name, const char *why)
{
    if (tap_n_skips < TAP_SKIPS_MAX)
        tap_skips[tap_n_skips++].name = name;
    tap_skips[tap_n_skips - 1].why = why;
}

/* libcheck knows no skips and prints a plan of its own. Prints its lines, then the skips, then the plan of
 * both. */
static inline void tap_print_with_skips(FILE *log)
{
    char line[4096];
    unsigned n = 0;
    while (fgets(line, sizeof(line), log)) {
        if (!strncmp(line, "1..", 3))
            continue;
        n += !strncmp(line, "ok", 2) || !strncmp(line, "not ok", 6);
        fputs(line, stdout);
    }
    for (unsigned i = 0; i < tap_n_skips; i++)
        printf("ok %u - %s # SKIP %s\n", ++n, tap_skips[i].name, tap_skips[i].why);
    printf("1..%u\n", n);
    fflush(stdout);
}

static inline int tap_main(Suite *suite)
{
    SRunner *runner = srunner_create(suite);
    char path[] = "/tmp/tandem-tap-XXXXXX";
    int log = tap_n_skips ? mkstemp(path) : -1;
    if (log >= 0)
        srunner_set_tap(runner, path);
    srunner_run_all(runner, CK_ENV);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    if (log >= 0) {
        FILE *f = fdopen(log, "r");
        tap_print_with_skips(f);
        fclose(f);
        unlink(path);
    }
    return failed ? 1 : 0;
}
