/*
 * How much memory this process can still take without swapping: what the system says (MemAvailable), or less if a cgroup leaves less.
 *
 * Of a cgroup, and of each one above it, counts its limit less what is used, where pages of files that could be dropped are not used:
 * memory.max, memory.current and memory.stat (version 2), memory.limit_in_bytes, memory.usage_in_bytes and memory.stat (version 1). In a
 * container the path in /proc/self/cgroup may not be one that it can see; its own limits then stand at the mount point, where the walk ends.
 *
 * Threads: any. Errors: none; what can't be read limits nothing.
 */
#pragma once

#include <stdint.h>

struct available_memory {
    uint64_t bytes; /* UINT64_MAX: not known */
    char by[160];   /* what says so: "MemAvailable", "memory.max of cgroup /a/b" */
};

/* root: where /proc and /sys are looked for: "", or a test's directory. */
struct available_memory available_memory(const char *root);

/* "900.0 GiB", "512 bytes" */
const char *available_text(uint64_t bytes, char out[24]);
