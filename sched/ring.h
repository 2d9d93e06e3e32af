/*
 * Which of several stores a run of blocks belongs to: rendezvous hashing (Thaler and Ravishankar 1998). Every store gets a
 * score for a key; the highest owns it, the next ones hold the copies. A store that comes or goes moves its own share alone.
 *
 * What is placed is a segment, RING_SEGMENT_BLOCKS consecutive blocks of a chain, under the key of its first block: a prefix
 * is then read in few long runs, and a long one from several stores.
 */
#pragma once

#include <stdint.h>

#include "proto/wire/block_key.h"

enum { RING_SEGMENT_BLOCKS = 64 };

/* Of a store's name, which outlives its processes. */
uint64_t ring_id(const char *name, size_t len_bytes);

/* Index of the store with the rank-th highest score (0: the owner). rank < n; ids differ. */
uint32_t ring_place(const uint64_t *ids, uint32_t n, const struct block_key *segment, uint32_t rank);
