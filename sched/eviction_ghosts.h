/*
 * The history of blocks that left: a table by hash of the key, in sets of eight places; a new entry replaces
 * the least recently used one of its set. Keys with equal hashes are confused; that costs a wrong guess and
 * nothing else.
 *
 * Memory: 24 bytes for each place; four times the number of blocks that are here, rounded up to a power of
 * two, at least 32768 places.
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
void ghosts_close(struct ghosts *g);                      /* NULL is fine */
void ghosts_reserve(struct ghosts *g, uint64_t n_blocks); /* makes the table large enough for n_blocks here */
void ghosts_put(struct ghosts *g, const struct ghost *ghost);
bool ghosts_has(const struct ghosts *g, uint64_t key_hash);
/* The block is here again: returns its history and forgets it. False: nothing is known of it. */
bool ghosts_take(struct ghosts *g, uint64_t key_hash, struct ghost *out);
