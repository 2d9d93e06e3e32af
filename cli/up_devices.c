#include "cli/up_devices.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>

static const char OPTION[] = "--device=cuda:";

/* CUDA counts the devices before the first one that is not there. */
static uint32_t count_named(const char *visible)
{
    uint32_t n = 0;
    for (const char *at = visible; *at && strncmp(at, "-1", 2) != 0; at += *at == ',') {
        size_t len = strcspn(at, ",");
        n += len > 0;
        at += len;
    }
    return n;
}

uint32_t up_devices_count(const char *visible, const char *folder)
{
    uint32_t n = 0, n_named = visible ? count_named(visible) : UINT32_MAX;
    DIR *d = opendir(folder);
    if (!d)
        return n_named;
    for (const struct dirent *e; (e = readdir(d));)
        n += e->d_name[0] != '.';
    closedir(d);
    return n_named < n ? n_named : n;
}

enum td_status up_devices_check(uint32_t n_workers, uint32_t n_ranks, uint32_t n_devices, struct td_error *error_out)
{
    uint32_t n = n_workers * n_ranks;
    if (n <= n_devices)
        return TD_OK;
    return td_fail(error_out, TD_ERR_INVALID,
                   "--device cuda: %u devices are needed (workers: %u, ranks of each: %u), %u are there; start fewer "
                   "workers, or give --device cuda:N, which all of them then use",
                   n, n_workers, n_ranks, n_devices);
}

static bool has(const struct child *c, uint32_t device)
{
    for (uint32_t i = 0; i < c->args.n; i++) {
        unsigned first;
        if (!strncmp(c->args.words[i], OPTION, sizeof(OPTION) - 1) &&
            sscanf(c->args.words[i] + sizeof(OPTION) - 1, "%u", &first) == 1 && first == device)
            return true;
    }
    return false;
}

static bool is_taken(const struct child *children, uint32_t n, uint32_t device)
{
    for (uint32_t i = 0; i < n; i++)
        if (children[i].state != CHILD_ENDED && has(&children[i], device))
            return true;
    return false;
}

uint32_t up_devices_next(const struct child *children, uint32_t n, uint32_t n_ranks)
{
    uint32_t device = 0;
    while (is_taken(children, n, device))
        device += n_ranks;
    return device;
}
