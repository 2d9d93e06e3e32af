/*
 * What each address from which connections come has cost a door lately, and what follows: how long it waits
 * for the next connection, and for its next call.
 *
 * An address is one of IPv4, or the first half of one of IPv6, because a host has all of the second half.
 * Loopback and unix sockets have none: there all clients look alike.
 *
 * Threads: the caller's lock. The table has a fixed size; the address that was not heard of for longest makes
 * room, and those that wait do so last.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "proto/rpc/rpc.h"

enum { RPC_SENDERS = 256 };
enum { RPC_FLOOD_MEMORY_MS = 600000 };
enum {                        /* how much counts */
       RPC_WASTE_LONG = 64,   /* a call whose headers are too long */
       RPC_WASTE_SILENT = 16, /* one without a request */
       RPC_WASTE_GUESS = 16,  /* one whose key, or proof, is wrong */
       RPC_WASTE_YOUNG = 4,   /* one that is given up young */
       RPC_WASTE_REFUSED = 1, /* one that is refused because the calls of its method are too many */
       RPC_WASTE_UNUSED = 16, /* a connection without a call that was answered */
       RPC_WASTE_HELD = 64,   /* a connection whose client leaves while it is held, because many are new */
       RPC_WASTE_MOST = 4000, /* in a second */
};
enum { RPC_PACED_CALLS = 1000, RPC_PACED_WAIT_MS = 2000 };

/* Calls that an address begins at once before one of them was answered; and for each that was; at most. How
 * long others wait; how many a second begin if a flood came from there. */
enum { RPC_CREDIT_FIRST = 8, RPC_CREDIT_EACH = 2, RPC_CREDIT_MOST = 1024 };
enum { RPC_CREDIT_WAIT_MS = 100, RPC_CREDIT_RATE = 25 };

struct rpc_origin {
    uint64_t key; /* 0: no address */
};
struct rpc_origin rpc_origin_of(const struct sockaddr_storage *a);
enum { RPC_ORIGIN_BYTES = 32 };
/* "10.0.0.1", "2001:db8::/64", or "here": no address. */
void rpc_origin_print(struct rpc_origin o, char out[RPC_ORIGIN_BYTES]);

struct rpc_waste { /* of calls and connections that came to nothing, since then */
    uint32_t n;
    uint64_t since_ns;
};
/* Adds to it. True: it is more than RPC_WASTE_MOST within a second, and begins anew. */
bool rpc_waste_add(struct rpc_waste *w, uint32_t n, uint64_t now_ns);

struct rpc_sender {
    struct rpc_origin from;
    uint64_t heard_ns;
    struct rpc_waste waste;
    uint64_t until_ns; /* new connections are refused until then */
    uint32_t n_before; /* floods that were remembered when the last one came */
    uint64_t paced_ns; /* the paced calls so far take until then, one after the other */
    uint32_t n_credit; /* calls that begin at once */
    bool was_answered; /* a call from there */
};
struct rpc_senders {
    struct rpc_sender all[RPC_SENDERS];
};

/* As rpc_waste_add(), for all connections from there. After floods that are remembered, it counts twice for
 * each. False for no address. */
bool rpc_senders_waste(struct rpc_senders *s, struct rpc_origin from, uint32_t n, uint64_t now_ns);
/* A flood came from there: the address waits for RPC_FLOOD_WAIT_MS, twice as long for each flood that follows
 * within RPC_FLOOD_MEMORY_MS, up to 2^RPC_FLOOD_DOUBLINGS times. */
void rpc_senders_flood(struct rpc_senders *s, struct rpc_origin from, uint64_t now_ns);
bool rpc_senders_must_wait(struct rpc_senders *s, struct rpc_origin from, uint64_t now_ns);
/*
 * When a call of a paced method may begin: RPC_PACED_CALLS a second, after as many at once (the generic cell
 * rate algorithm of ITU-T I.371, as a virtual schedule). UINT64_MAX: it would wait for longer than
 * RPC_PACED_WAIT_MS, and is not counted.
 */
uint64_t rpc_senders_pace(struct rpc_senders *s, struct rpc_origin from, uint64_t now_ns);
/*
 * When a call of a method with a queue may begin: now, or, from an address of which more calls were begun
 * than its answered ones stand for, after RPC_CREDIT_WAIT_MS, in which clients that send requests and leave
 * are gone. For RPC_FLOOD_MEMORY_MS after a flood such calls begin at RPC_CREDIT_RATE; UINT64_MAX as above.
 */
uint64_t rpc_senders_credit(struct rpc_senders *s, struct rpc_origin from, uint64_t now_ns);
/* A call from there was answered. */
void rpc_senders_answered(struct rpc_senders *s, struct rpc_origin from, uint64_t now_ns);
/* Whether no call from there was answered so far; false for no address. */
bool rpc_senders_is_stranger(const struct rpc_senders *s, struct rpc_origin from);
uint32_t rpc_senders_floods(const struct rpc_senders *s, struct rpc_origin from, uint64_t now_ns); /* remembered */
