/*
 * Checksum of KV bytes: XXH3-64 seeded with their identity, so that the right bytes in the wrong place fail too.
 *
 * identity = XXH3-64 over 40 bytes, little-endian: u64 id_a, u64 id_b, u32 index, u32 generation, u32 part_begin,
 * u32 part_end, u64 n_bytes. What id_a and id_b are depends on the user: a transfer id, or the two halves of a block key.
 *
 * XXH3-64 with the widest vectors of the CPU is the fastest of those that see every bit, order included (docs/transfer.md has
 * the figures); the value is the same whatever the vectors.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct checksum_identity {
    uint64_t id_a, id_b;
    uint32_t index, generation, part_begin, part_end;
};

uint64_t checksum_bytes(const struct checksum_identity *identity, const void *data, size_t len_bytes);

/* Copies, and returns checksum_bytes() of what is then at to: one pass over memory instead of two. They don't overlap. */
uint64_t checksum_copy(const struct checksum_identity *identity, void *to, const void *from, size_t len_bytes);
