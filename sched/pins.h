/*
 * Which blocks to keep, and until when. A pin names a block whether it is there or not, so a block that comes
 * later is kept, too. A pin is a wish: the owner of the blocks decides what is evicted before them.
 *
 * A table with open addressing, at most half full. Pins that have ended are removed when the earliest end has
 * passed.
 *
 * Threads: one owner. Times are by the caller's clock and never 0.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "proto/wire/block_key.h"

enum { PINS_MAX = 1 << 17 }; /* blocks */

struct pin {
    struct block_key key;
    uint64_t until_ns; /* 0: the bucket is empty */
};

struct pins { /* all zero: empty */
    struct pin *buckets;
    uint32_t cap, n;
    uint64_t next_ns; /* at or before the earliest end; 0: there are no pins */
};

void pins_free(struct pins *p); /* empties the table */

/*
 * Pins a block until until_ns, or until a later end that was set before. False: PINS_MAX blocks are pinned.
 */
bool pins_keep(struct pins *p, const struct block_key *key, uint64_t until_ns);
void pins_drop(struct pins *p, const struct block_key *key);
bool pins_has(const struct pins *p, const struct block_key *key);

/* Removes ended pins and calls over() for each; over() must not call functions of this file. */
void pins_expire(struct pins *p, uint64_t now_ns, void (*over)(void *user, const struct block_key *key), void *user);
