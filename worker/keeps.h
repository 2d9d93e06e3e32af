/*
 * The pins that a worker or store holds, prompt by prompt, and what it tells routers of them.
 *
 *     router A --Keep--> worker --Pins--> every other router        (news only: a new pin, a longer one, an end)
 *     worker --Pins: all that it holds--> router that attaches
 *
 * So a router that starts anew learns what the one before it was asked for, and several routers know of each other's pins. A
 * router merges what it is told: the longer end wins.
 *
 * Rejected: routers that keep pins on disk (a router has no disk, and another host may take its place); a worker that tells keys
 * alone (a prompt could not be unpinned without the blocks that it shares with another).
 *
 * Threads: the owner's (engine thread, main thread of a store).
 */
#pragma once

#include "sched/pin_list.h"
#include "worker/link.h"

struct keeps { /* zeros: none */
    struct pin_list list;
};

/* m: a Keep or Forget, from a router. What it says of blocks is the caller's; here it is noted and told to the other routers. */
void keeps_note(struct keeps *k, struct link_server *s, const struct link *from,
                const Tandem__Worker__V1__RouterMessage *m, uint64_t now_ns);
void keeps_tell(const struct keeps *k, struct link *to, uint64_t now_ns);
void keeps_expire(struct keeps *k, uint64_t now_ns);
void keeps_free(struct keeps *k);
