/*
 * What is remembered of blocks that left: a table of fixed size by hash of key, where the new replaces the least
 * recently used of eight. Two keys of one hash are taken for one another: that costs a wrong guess, nothing else.
 *
 * Memory: 24 bytes a place; as many places as the next power of two from four times the blocks that are here, at least
 * 32768.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct ghost {
    uint64_t key_hash, last_used;
    uint32_t n_uses; /* 0: an empty place */
    uint8_t shape;
    bool was_tail, is_generous;
};

struct ghosts;

struct ghosts *ghosts_open(void);
void ghosts_close(struct ghosts *g); /* NULL is fine */
void ghosts_reserve(struct ghosts *g, uint64_t n_blocks);
void ghosts_put(struct ghosts *g, const struct ghost *ghost);
bool ghosts_has(const struct ghosts *g, uint64_t key_hash);
bool ghosts_take(struct ghosts *g, uint64_t key_hash,
                 struct ghost *out); /* it is here again, and no longer remembered */
