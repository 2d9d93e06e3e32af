/*
 * The worlds of tests/ (tests/router/world.h, tests/worker/world.h) in a fuzz target: their assertions abort,
 * and libcheck itself, which wants a runner, is not linked. Include it before them.
 */
#pragma once

#include <check.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

void(_mark_point)(const char *file, int line)
{
    (void)file, (void)line;
}

void _ck_assert_failed(const char *file, int line, const char *expr, const char *msg, ...)
{
    va_list args;
    va_start(args, msg);
    fprintf(stderr, "%s:%d: %s: ", file, line, expr);
    if (msg)
        vfprintf(stderr, msg, args);
    va_end(args);
    abort();
}
