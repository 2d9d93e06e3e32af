/*
 * Which blocks are to be kept, and until when: pins of prompts, as clients ask for them. They name blocks, there or not, so that one
 * that comes later is kept, too. A pin is soft: whose blocks they are says what goes before them.
 *
 * Open addressing, at most half full; what is over is taken out when the earliest deadline has passed.
 *
 * Threads: one owner. Times are the caller's clock, never 0.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "proto/wire/block_key.h"

enum { PINS_MAX = 1 << 17 }; /* blocks */

struct pin {
    struct block_key key;
    uint64_t until_ns; /* 0: the place is free */
};

struct pins { /* zeros: none */
    struct pin *places;
    uint32_t cap, n;
    uint64_t next_ns; /* the earliest deadline or before it; 0: none */
};

void pins_free(struct pins *p); /* none any more */

/* Until then, or a later moment that was said before. False: PINS_MAX are kept already. */
bool pins_keep(struct pins *p, const struct block_key *key, uint64_t until_ns);
void pins_drop(struct pins *p, const struct block_key *key);
bool pins_has(const struct pins *p, const struct block_key *key);

/* Takes out what is over, and says so of each. Called inside; must not call back. */
void pins_expire(struct pins *p, uint64_t now_ns, void (*over)(void *user, const struct block_key *key), void *user);
