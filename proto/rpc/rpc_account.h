/*
 * Which bytes of a connection its calls explain; rpc_accept.h, rpc_door_message(), says what for.
 *
 * Threads: the caller's lock. Errors: none.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/rpc/rpc_flow.h"

enum { RPC_CALL_BYTES = 32 << 10, RPC_UNREAD_BYTES = 16 << 20, RPC_DOUBTFUL_BYTES = 256 << 10 };

struct rpc_account {
    uint64_t began_ns;
    uint64_t explained_bytes;         /* by calls and messages */
    uint64_t quiet_bytes, quiet_ns;   /* explained_bytes when it had no call and too many bytes, and since when */
    uint64_t unread_bytes, unread_ns; /* what calls with an unread message could still explain at that time */
    uint64_t surplus_bytes;           /* explained and never sent: it explains nothing later */
};

/* What may come that nothing explains: `few` bytes, and `each` for each open call; or, without a call,
 * `noise` for noise_ns. */
struct rpc_allowance {
    uint64_t few, each, noise, noise_ns;
};

struct rpc_account rpc_account_open(uint64_t now_ns);
void rpc_account_call(struct rpc_account *a); /* begins */
void rpc_account_message(struct rpc_account *a, size_t len_bytes);
/* A call ends whose message, of most_bytes at most, was not read. Such calls explain RPC_UNREAD_BYTES in a
 * second; doubtful ones RPC_DOUBTFUL_BYTES, and no bytes for the call itself. */
void rpc_account_unread(struct rpc_account *a, uint64_t most_bytes, bool is_doubtful, uint64_t now_ns);
/* Whether more has come than may. */
bool rpc_account_is_over(struct rpc_account *a, const struct rpc_flow *flow, uint32_t n_calls,
                         const struct rpc_allowance *may, uint64_t now_ns);
/* Whether it had noise at the last look, which will be too much if it stays. */
bool rpc_account_has_noise(const struct rpc_account *a, uint64_t looked_ns);
