/* Traces that don't come with the project lie in $TANDEM_SHARED, or in ../shared beside the source tree. */
#pragma once

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* False, and a line that names the test, if the file isn't there. */
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
