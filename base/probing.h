/*
 * Deletion from a hash table with linear probing (Knuth, The Art of Computer Programming 6.4, algorithm R).
 * Entries behind the deleted one that are in the same run move up, so that no hole ends a search early:
 *
 *     for (i = (hole + 1) & mask; bucket i is in use; i = (i + 1) & mask)
 *         if (probing_fills(hole, i, home of i's key, mask)) {
 *             move bucket i into the hole;
 *             hole = i;
 *         }
 *     empty the hole
 *
 * The table has mask + 1 buckets, a power of two, of which at least one is empty. Threads: none; pure.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* Whether the entry in bucket i, whose search begins at bucket home, is still found in the hole. */
static inline bool probing_fills(uint64_t hole, uint64_t i, uint64_t home, uint64_t mask)
{
    return ((i - home) & mask) >= ((i - hole) & mask);
}
