/*
 * A bare loop of UCX active messages: what the wire gives when nobody leases, asks, checks or counts. The measure for the
 * transfer engine, so it has everything that costs UCX itself in common with it: endpoints by socket address in peer error
 * mode, a worker of its own for the connection, the same options, registered pools of the same size, payloads by rendezvous
 * or eagerly as wire_ucx.c decides, one thread a side that polls, then sleeps.
 *
 * The server streams messages from its arena, as many at a time as the window allows; the client lands them in its own, one
 * behind the other, and counts bytes.
 *
 * Threads: one inside each side; the calls here belong to one other thread. Errors: TD_ERR_PEER_LOST once the connection is gone.
 */
#pragma once

#include <stdint.h>

#include "base/log.h"
#include "base/status.h"

struct bare;

struct bare_config {
    const char *tls;     /* as in xfer_config */
    const char *address; /* server: to listen on, port 0 picks one; client: the server's */
    void *arena;         /* touched; borrowed */
    uint64_t arena_bytes;
    const struct log *log;
};

enum td_status bare_serve(const struct bare_config *config, struct bare **out, struct td_error *error_out);
enum td_status bare_connect(const struct bare_config *config, struct bare **out, struct td_error *error_out);
const char *bare_address(const struct bare *b); /* server: with its port */

/* Client: total_bytes in messages of message_bytes, at most window_bytes (but one message) of them on their way. Blocks. */
enum td_status bare_fetch(struct bare *b, uint64_t message_bytes, uint64_t window_bytes, uint64_t total_bytes);
void bare_close(struct bare *b); /* NULL is fine; the client before its server */
