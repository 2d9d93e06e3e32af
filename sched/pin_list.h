/*
 * Pins as clients ask for them: a prompt's chain of blocks, and until when. The blocks themselves are kept by sched/pins.h; this list
 * knows which of them belong together, so that a pin can be ended without those of other prompts, and can be told to a router that
 * starts anew.
 *
 * Keys are chained: the last key and the length name the prompt. Hashed by the last key; expiry looks at all of them, rarely.
 *
 * Ownership: keys are copied. Threads: one owner. Times are the caller's clock, never 0.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "proto/wire/block_key.h"

/* A pin that is told from process to process gets later by what the messages take. Less than this is no news: else it would never end. */
#define PIN_NEWS_NS NS_PER_S

struct pin_entry {
    struct pin_entry *next;
    struct block_key *keys; /* [n], n >= 1 */
    uint32_t n;
    uint64_t until_ns;
};

struct pin_list { /* zeros: none */
    struct pin_entry **buckets;
    uint32_t n_buckets, n_entries;
    uint32_t n_blocks; /* of all entries; shared ones count each time */
    uint64_t next_ns;  /* the earliest end or before it; 0: none */
};

enum pin_change { PIN_KNOWN, PIN_NEWS /* new, or longer by PIN_NEWS_NS */, PIN_NO_ROOM };

void pin_list_free(struct pin_list *l); /* none any more */
/* The longer of two ends wins. PIN_NO_ROOM: it is new, and there would be more than max_blocks. */
enum pin_change pin_list_add(struct pin_list *l, const struct block_key *keys, uint32_t n, uint64_t until_ns,
                             uint32_t max_blocks);
/* Returns when it would have ended; 0: it is not there. */
uint64_t pin_list_remove(struct pin_list *l, const struct block_key *keys, uint32_t n);
void pin_list_expire(struct pin_list *l, uint64_t now_ns);
/* each() must not change the list. */
void pin_list_each(const struct pin_list *l, void (*each)(void *user, const struct pin_entry *e), void *user);
