/*
 * Block events: what a worker or store tells the router about the blocks that it holds. A batch on the wire,
 * little-endian:
 *
 *      0  u16 version (1)   2  u16 reserved, 0   4  u32 count (<= 65,536)
 *      8  u64 incarnation of the holder
 *     16  u64 sequence number of the first event; the others follow without a gap
 *     24  count times 24 bytes:
 *          0  u8 kind   1  u8 tier   2  u16 reserved, 0  4  u32 index of the block in its chain  8  key (16)
 *
 * After a gap in the numbers, or a new incarnation, the router asks for a snapshot: a CLEARED event, then
 * every block.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/mem.h"
#include "base/random.h"
#include "base/status.h"
#include "proto/wire/block_key.h"

enum block_event_kind { BLOCK_ADDED = 1, BLOCK_REMOVED = 2, BLOCK_CLEARED = 3 };
enum block_tier { TIER_WORKER = 0, TIER_DRAM = 1, TIER_SSD = 2 };
enum { EVENTS_HEADER_BYTES = 24, EVENT_BYTES = 24, EVENTS_MAX = 65536 };

struct block_event {
    enum block_event_kind kind;
    enum block_tier tier;
    uint32_t index;
    struct block_key key;
};

struct events_header {
    uint64_t incarnation, first_sequence;
    uint32_t count;
};

/* Appends a batch to out. */
void events_encode(const struct events_header *h, const struct block_event *events, struct bytes *out);

/* Checks every byte of the batch and returns its header. After that events_at reads event i < count. */
enum td_status events_decode(const void *data, size_t len_bytes, struct events_header *out);
struct block_event events_at(const void *data, uint32_t i);

/* Sum this over the blocks of a set to get a number for the set: it can be updated and compared without an
 * order. The memory of a worker and the DRAM of a store count as one tier, as in the index. */
static inline uint64_t block_digest(const struct block_key *key, enum block_tier tier)
{
    return random_at(block_key_hash(key), tier == TIER_SSD, 0);
}
