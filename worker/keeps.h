/*
 * The pins that a worker or store holds, prompt by prompt, and what it tells routers about them.
 *
 *     router A --Keep--> worker --Pins--> every other router        (news only: a new pin, a longer one, an
 *     end) worker --Pins: all that it holds--> a router that attaches
 *
 * So a router that starts anew learns the pins of its predecessor, and several routers know each other's
 * pins. A router merges what it hears: the longer pin wins.
 *
 * Rejected: routers that keep pins on disk (a router has no disk, and another host may take its place);
 * workers that tell keys only (a prompt could then not be unpinned without the blocks that it shares with
 * another prompt).
 *
 * Threads: the owner's (engine thread of a worker, main thread of a store).
 */
#pragma once

#include "sched/pin_list.h"
#include "worker/link.h"

struct keeps { /* zeroed: none */
    struct pin_list list;
};

/* Notes a router's Keep or Forget (m) and tells other routers. Pinning the blocks is the caller's part. */
void keeps_note(struct keeps *k, struct link_server *s, const struct link *from,
                const Tandem__Worker__V1__RouterMessage *m, uint64_t now_ns);
/* Sends every pin to one router, with the time that is left of it. */
void keeps_tell(const struct keeps *k, struct link *to, uint64_t now_ns);
void keeps_expire(struct keeps *k, uint64_t now_ns);
void keeps_free(struct keeps *k);
