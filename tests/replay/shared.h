/* Traces that are not part of the project are in $TANDEM_SHARED, or in ../shared beside the source tree. */
#pragma once

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* False if the file does not exist; it then prints a line that names the test. */
static inline bool shared_path(const char *test, const char *name, char *out, size_t size)
{
    const char *dir = getenv("TANDEM_SHARED"), *root = getenv("TANDEM_SOURCE_ROOT");
    if (dir)
        snprintf(out, size, "%s/traces/%s", dir, name);
    else
        snprintf(out, size, "%s/../shared/traces/%s", root ? root : ".", name);
    if (!access(out, R_OK))
        return true;
    printf("# SKIP %s: no %s\n", test, out);
    return false;
}
