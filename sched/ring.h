/*
 * Which of several stores a segment belongs to: rendezvous hashing (Thaler and Ravishankar 1998). Each store
 * gets a score for a key; the store with the highest score owns it, the next ones hold the copies. When a
 * store comes or goes, only its own share moves.
 *
 * A segment is RING_SEGMENT_BLOCKS consecutive blocks of a chain, placed under the key of its first block: so
 * a prefix is read in few long runs, and a long prefix from several stores.
 */
#pragma once

#include <stdint.h>

#include "proto/wire/block_key.h"

enum { RING_SEGMENT_BLOCKS = 64 };

/* The id of a store, from its name: a restarted store with the same name keeps its segments. */
uint64_t ring_id(const char *name, size_t len_bytes);

/* Index of the store with the rank-th highest score (0: the owner). rank < n; ids differ. */
uint32_t ring_place(const uint64_t *ids, uint32_t n, const struct block_key *segment, uint32_t rank);
