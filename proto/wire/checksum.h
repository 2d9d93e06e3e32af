/*
 * Checksum of KV bytes: XXH3-64, seeded with the identity of the bytes, so that the right bytes in the wrong
 * place fail, too.
 *
 * The seed is XXH3-64 over 40 bytes, little-endian: u64 id_a, u64 id_b, u32 index, u32 generation, u32
 * part_begin, u32 part_end, u64 n_bytes. id_a and id_b depend on the user: a transfer id, or the two halves
 * of a block key.
 *
 * XXH3-64 with the widest vectors of the CPU is the fastest checksum that depends on every bit and on their
 * order (figures in docs/transfer.md); the value does not depend on the vectors.
 *
 * Copying and summing can be done in several ways with the same result. Which one is fastest depends on the
 * generation of the CPU, so each process measures them once and uses the fastest.
 *
 * Threads: any.
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
 * Copies, and returns checksum_bytes() of the bytes that are then at `to`: one pass over memory instead of
 * two. The ranges must not overlap. The bytes at `from` may change meanwhile: what is summed is what was
 * stored. The first call measures, unless checksum_choose() was called before.
 */
uint64_t checksum_copy(const struct checksum_identity *identity, void *to, const void *from, size_t len_bytes);

/* --------------------------------------------------------- ways to copy and sum */

enum { CHECKSUM_WAYS_MAX = 8 };

struct checksum_choice {
    uint32_t n_ways, chosen; /* ways that this CPU can use; index of the fastest */
    struct {
        const char *name; /* decimal GB */
        double gb_per_s;  /* decimal */
    } ways[CHECKSUM_WAYS_MAX];
    double memcpy_gb_per_s; /* measured in the same rounds; it sums nothing */
    uint64_t took_ns;
};

/* The choice of this process. The first call measures: at most 5 ms, or one round of all ways (some 0.5
 * ms) if that takes longer. Other threads wait for it. */
const struct checksum_choice *checksum_choose(void);

/* Measures again, for tests and benchmarks; changes no choice. In each round every way copies 128 KiB that
 * no cache holds. The best round counts, so that other work on the machine costs rounds, not accuracy. */
void checksum_measure(struct checksum_choice *out);

/* checksum_copy() in one given way (way < n_ways); for tests and benchmarks, too. */
uint64_t checksum_copy_by(uint32_t way, const struct checksum_identity *identity, void *to, const void *from,
                          size_t len_bytes);
