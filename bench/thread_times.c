#include "bench/thread_times.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static bool read_line(const char *thread, const char *file, char *out, int out_bytes)
{
    char path[320];
    snprintf(path, sizeof(path), "/proc/self/task/%s/%s", thread, file);
    FILE *f = fopen(path, "re");
    bool ok = f && fgets(out, out_bytes, f);
    if (f)
        fclose(f);
    return ok;
}

static double *place_of(struct thread_times *t, const char *name)
{
    for (uint32_t i = 0; i < t->n; i++)
        if (!strcmp(t->of[i].name, name))
            return &t->of[i].ms;
    if (t->n == THREAD_TIMES_MAX)
        return NULL;
    snprintf(t->of[t->n].name, sizeof(t->of[0].name), "%s", name);
    return &t->of[t->n++].ms;
}

void thread_times_add(struct thread_times *t, double sign)
{
    DIR *dir = opendir("/proc/self/task");
    char name[THREAD_NAME_BYTES], times[96];
    for (struct dirent *e; dir && (e = readdir(dir));) {
        uint64_t ns;
        if (e->d_name[0] == '.' || !read_line(e->d_name, "comm", name, sizeof(name)) ||
            !read_line(e->d_name, "schedstat", times, sizeof(times)) || sscanf(times, "%" SCNu64, &ns) != 1)
            continue;
        name[strcspn(name, "\n")] = 0;
        double *ms = place_of(t, name);
        if (ms)
            *ms += sign * (double)ns * 1e-6;
    }
    if (dir)
        closedir(dir);
}

double thread_times_ms(const struct thread_times *t, const char *prefix)
{
    double ms = 0;
    for (uint32_t i = 0; i < t->n; i++)
        if (!strncmp(t->of[i].name, prefix, strlen(prefix)))
            ms += t->of[i].ms;
    return ms;
}
