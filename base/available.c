#include "base/available.h"

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Names of the same files and fields in the two versions of cgroups. */
struct cgroup_version {
    const char *mounts[2], *limit, *used, *inactive, *active;
};
static const struct cgroup_version V1 = {{"/sys/fs/cgroup/memory", NULL},
                                         "memory.limit_in_bytes",
                                         "memory.usage_in_bytes",
                                         "total_inactive_file",
                                         "total_active_file"};
static const struct cgroup_version V2 = {
    {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"}, "memory.max", "memory.current", "inactive_file", "active_file"};

static const uint64_t NO_LIMIT = 1ull << 60; /* version 1 writes a very large number for "no limit" */

/* Reads the number in a file. False: it has none, for example "max". */
static bool read_number(const char *dir, const char *name, uint64_t *out)
{
    char path[PATH_MAX];
    if (snprintf(path, sizeof(path), "%s/%s", dir, name) >= (int)sizeof(path))
        return false;
    FILE *f = fopen(path, "re");
    unsigned long long v = 0;
    bool ok = f && fscanf(f, "%llu", &v) == 1;
    if (f)
        fclose(f);
    *out = v;
    return ok;
}

/* The number behind `word` at the beginning of a line; 0: there is no such line. */
static uint64_t read_line(const char *path, const char *word)
{
    char line[256];
    unsigned long long v = 0;
    size_t n = strlen(word);
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof(line), f))
        if (!strncmp(line, word, n) && (line[n] == ' ' || line[n] == ':') && sscanf(line + n + 1, "%llu", &v) == 1)
            break;
    if (f)
        fclose(f);
    return v;
}

static void take_least(struct available_memory *m, uint64_t bytes, const char *what, const char *group)
{
    if (bytes >= m->bytes)
        return;
    m->bytes = bytes;
    snprintf(m->by, sizeof(m->by), "%s%s%s", what, *group ? " of cgroup " : "", group);
}

static void ask_group(const struct cgroup_version *v, const char *dir, const char *group, struct available_memory *m)
{
    char stat[PATH_MAX];
    uint64_t limit, used;
    if (!read_number(dir, v->limit, &limit) || limit >= NO_LIMIT || !read_number(dir, v->used, &used))
        return;
    if (snprintf(stat, sizeof(stat), "%s/memory.stat", dir) >= (int)sizeof(stat))
        return;
    uint64_t droppable = read_line(stat, v->inactive) + read_line(stat, v->active);
    used = used > droppable ? used - droppable : 0;
    take_least(m, limit > used ? limit - used : 0, v->limit, *group ? group : "/");
}

/* Asks a group and all groups above it; shortens path on the way. */
static void ask_groups(const char *root, const struct cgroup_version *v, char *path, struct available_memory *m)
{
    char dir[PATH_MAX];
    for (bool up = true; up;) {
        for (int i = 0; i < 2 && v->mounts[i]; i++)
            if (snprintf(dir, sizeof(dir), "%s%s%s", root, v->mounts[i], path) < (int)sizeof(dir))
                ask_group(v, dir, path, m);
        char *slash = strrchr(path, '/');
        up = slash != NULL;
        if (slash)
            *slash = 0;
    }
}

/* Whether the list "name,name,..." contains "memory". */
static bool has_memory(const char *controllers)
{
    for (const char *at = controllers; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (!strncmp(at, "memory", 6) && (at[6] == ',' || !at[6]))
            return true;
    return false;
}

/* Lines of /proc/self/cgroup: NUMBER:CONTROLLERS:PATH; version 2 has number 0 and no controllers. */
static void ask_cgroups(const char *root, struct available_memory *m)
{
    char line[PATH_MAX];
    snprintf(line, sizeof(line), "%s/proc/self/cgroup", root);
    FILE *f = fopen(line, "re");
    while (f && fgets(line, sizeof(line), f)) {
        line[strcspn(line, "\n")] = 0;
        char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path)
            continue;
        *path++ = 0;
        if (!strcmp(path, "/"))
            path++;
        if (!strncmp(line, "0:", 2) && !controllers[1])
            ask_groups(root, &V2, path, m);
        else if (has_memory(controllers + 1))
            ask_groups(root, &V1, path, m);
    }
    if (f)
        fclose(f);
}

struct available_memory available_memory(const char *root)
{
    struct available_memory m = {.bytes = UINT64_MAX};
    char path[PATH_MAX];
    snprintf(path, sizeof(path), "%s/proc/meminfo", root);
    uint64_t kib = read_line(path, "MemAvailable");
    if (kib)
        take_least(&m, kib << 10, "MemAvailable", "");
    ask_cgroups(root, &m);
    return m;
}

const char *available_text(uint64_t bytes, char out[24])
{
    static const char *const UNITS[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    double v = (double)bytes;
    int unit = 0;
    for (; v >= 1024 && unit < 4; unit++)
        v /= 1024;
    snprintf(out, 24, unit ? "%.1f %s" : "%.0f %s", v, UNITS[unit]);
    return out;
}
