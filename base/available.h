/*
 * How much memory this process can still use without swapping: what the system says (MemAvailable), or less
 * if a cgroup has less left.
 *
 * For a cgroup, and for each one above it, this is its limit less the memory in use; file pages that could be
 * dropped are not in use. Files read: memory.max, memory.current and memory.stat (version 2);
 * memory.limit_in_bytes, memory.usage_in_bytes and memory.stat (version 1). In a container the path in
 * /proc/self/cgroup may not be visible; the container's own limits are then at the mount point, where the
 * walk ends.
 *
 * Threads: any. Errors: none; a file that can't be read sets no limit.
 */
#pragma once

#include <stdint.h>

struct available_memory {
    uint64_t bytes; /* UINT64_MAX: unknown */
    char by[160];   /* source of the number: "MemAvailable", or "memory.max of cgroup /a/b" */
};

/* root: prefix of /proc and /sys: "", or a test's directory. */
struct available_memory available_memory(const char *root);

/* Formats a size: "900.0 GiB", "512 bytes". */
const char *available_text(uint64_t bytes, char out[24]);
