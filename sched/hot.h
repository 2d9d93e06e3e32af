/*
 * Counts how often keys were asked for recently. Counts halve every HOT_HALF_LIFE_NS; the table has a fixed
 * size. Two keys in one slot lower each other's count, so the table keeps the most frequent keys (the idea of
 * the lossy counters of Manku and Motwani 2002). A count may be too low, never too high.
 *
 * Threads: one owner.
 */
#pragma once

#include <stdint.h>

#include "base/clock.h"
#include "proto/wire/block_key.h"

enum { HOT_SLOTS = 4096 };
#define HOT_HALF_LIFE_NS (60 * NS_PER_S)

struct hot {
    struct {
        struct block_key key;
        double count;
        uint64_t seen_ns;
    } slots[HOT_SLOTS];
};

/* Counts one request for the key and returns the count, including this request. */
double hot_count(struct hot *h, const struct block_key *key, uint64_t now_ns);
