/*
 * Checksum of KV bytes: XXH3-64 seeded with their identity, so that the right bytes in the wrong place fail too.
 *
 * identity = XXH3-64 over 40 bytes, little-endian: u64 id_a, u64 id_b, u32 index, u32 generation, u32 part_begin,
 * u32 part_end, u64 n_bytes. What id_a and id_b are depends on the user: a transfer id, or the two halves of a block key.
 *
 * XXH3-64 with the widest vectors of the CPU is the fastest of those that see every bit, order included (docs/transfer.md has
 * the figures); the value is the same whatever the vectors.
 *
 * Copying and summing can be done in several ways, which all give the same bits. Which one is fastest depends on the generation of
 * the CPU, so each process measures them once and uses the fastest.
 *
 * Threads: everything here is free for all.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct checksum_identity {
    uint64_t id_a, id_b;
    uint32_t index, generation, part_begin, part_end;
};

uint64_t checksum_bytes(const struct checksum_identity *identity, const void *data, size_t len_bytes);

/*
 * Copies, and returns checksum_bytes() of what is then at to: one pass over memory instead of two. They don't overlap. The bytes
 * may change at from meanwhile; what is summed is what was stored. The first call measures, unless checksum_choose() was called.
 */
uint64_t checksum_copy(const struct checksum_identity *identity, void *to, const void *from, size_t len_bytes);

/* --------------------------------------------------------- ways to copy and sum */

enum { CHECKSUM_WAYS_MAX = 8 };

struct checksum_choice {
    uint32_t n_ways, chosen; /* ways that this CPU has; index of the fastest */
    struct {
        const char *name;
        double gb_per_s; /* decimal */
    } ways[CHECKSUM_WAYS_MAX];
    double memcpy_gb_per_s; /* measured beside them; it sums nothing */
    uint64_t took_ns;
};

/*
 * The choice of this process. The first call measures, which takes at most 5 ms, or one round of all ways (some 0.5 ms) where that
 * is longer; other threads wait for it.
 */
const struct checksum_choice *checksum_choose(void);

/*
 * Measures again, for tests and benchmarks; changes no choice. Each round every way copies 128 KiB, none of which is in a cache
 * before; the best round counts, so that what else the machine does costs rounds and not the result.
 */
void checksum_measure(struct checksum_choice *out);

/* checksum_copy() by one of the ways (way < n_ways); also for tests and benchmarks. */
uint64_t checksum_copy_by(uint32_t way, const struct checksum_identity *identity, void *to, const void *from,
                          size_t len_bytes);
