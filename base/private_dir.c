#include "base/private_dir.h"

#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

bool private_dir_default(char *out, size_t out_bytes)
{
    const char *base = getenv("XDG_RUNTIME_DIR");
    int n = base && *base ? snprintf(out, out_bytes, "%s/tandem", base)
                          : snprintf(out, out_bytes, "/tmp/tandem-%u", (unsigned)geteuid());
    return n >= 0 && (size_t)n < out_bytes;
}

static enum td_status check_ours(const char *path, struct stat *st, struct td_error *e)
{
    if (lstat(path, st) || !S_ISDIR(st->st_mode))
        return td_fail(e, TD_ERR_IO, "%s: is no directory", path);
    if (st->st_uid != geteuid())
        return td_fail(e, TD_ERR_IO, "%s: belongs to another user (uid %u)", path, (unsigned)st->st_uid);
    return TD_OK;
}

enum td_status private_dir_make(const char *path, struct td_error *e)
{
    char part[PATH_MAX];
    struct stat st;
    snprintf(part, sizeof(part), "%s", path);
    for (char *slash = strchr(part + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(part, 0777);
        *slash = '/';
    }
    if (mkdir(path, 0700) && errno != EEXIST)
        return td_fail(e, TD_ERR_IO, "%s: can't be made: %s", path, strerror(errno));
    return check_ours(path, &st, e);
}

enum td_status private_dir_check(const char *path, struct td_error *e)
{
    struct stat st;
    enum td_status s = check_ours(path, &st, e);
    if (!s && st.st_mode & 022)
        s = td_fail(e, TD_ERR_IO, "%s: others may write into it; chmod 700 helps", path);
    return s;
}
