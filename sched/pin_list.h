/*
 * Pins as clients ask for them: a prompt's chain of blocks, and an end. sched/pins.h keeps the single blocks;
 * this list knows which blocks belong together, so that one pin can be ended without ending those of other
 * prompts, and can be told to a router that restarts.
 *
 * Keys are chained, so the last key and the length name the prompt. A hash table by the last key; expiry
 * looks at all entries, rarely.
 *
 * Ownership: keys are copied. Threads: one owner. Times are by the caller's clock and never 0.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "proto/wire/block_key.h"

/*
 * A pin's end is passed on as a remaining time, so each message makes it a little later. A change below
 * PIN_NEWS_NS is ignored; otherwise a pin that processes tell each other would never end.
 */
#define PIN_NEWS_NS NS_PER_S

struct pin_entry {
    struct pin_entry *next;
    struct block_key *keys; /* [n], n >= 1 */
    uint32_t n;
    uint32_t owner; /* whose share it counts in: a number below PIN_OWNERS */
    uint64_t until_ns;
};

/* Owners are hashes of tenants' names: now and then two have one share. Owner 0 has none: pins that other
 * routers asked for. */
enum { PIN_OWNERS = 1024 };

struct pin_list { /* all zero: empty */
    struct pin_entry **buckets;
    uint32_t n_buckets, n_entries;
    uint32_t n_blocks; /* sum over all entries; a block in several pins counts several times */
    uint32_t of_owner[PIN_OWNERS];
    uint64_t next_ns; /* at or before the earliest end; 0: the list is empty */
};

enum pin_change { PIN_KNOWN, PIN_NEWS /* new, or longer by PIN_NEWS_NS */, PIN_NO_ROOM, PIN_NO_SHARE };

void pin_list_free(struct pin_list *l); /* empties the list */
/*
 * Adds a pin, or makes a known one longer; an end that is later by PIN_NEWS_NS or less changes nothing.
 * PIN_NO_ROOM: it is new, and would exceed max_blocks. pin_list_add_for: it counts in the owner's share;
 * PIN_NO_SHARE: that would exceed max_of_owner.
 */
enum pin_change pin_list_add_for(struct pin_list *l, const struct block_key *keys, uint32_t n, uint64_t until_ns,
                                 uint32_t max_blocks, uint32_t owner, uint32_t max_of_owner);
enum pin_change pin_list_add(struct pin_list *l, const struct block_key *keys, uint32_t n, uint64_t until_ns,
                             uint32_t max_blocks);
/* Removes a pin. Returns when it would have ended; 0: it was not there. */
uint64_t pin_list_remove(struct pin_list *l, const struct block_key *keys, uint32_t n);
void pin_list_expire(struct pin_list *l, uint64_t now_ns);
/* each() must not change the list. */
void pin_list_each(const struct pin_list *l, void (*each)(void *user, const struct pin_entry *e), void *user);
