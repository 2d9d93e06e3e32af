/*
 * How often keys were asked for lately: a count that halves every HOT_HALF_LIFE_NS, in a table of fixed size. Two keys that
 * meet in one slot wear each other down, so the table keeps those that come most (the idea of the lossy counters of Manku and
 * Motwani 2002). An estimate: it can be too low, never too high.
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

/* Counts one request and returns the count, this one included. */
double hot_count(struct hot *h, const struct block_key *key, uint64_t now_ns);
