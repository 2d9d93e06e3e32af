/*
 * A bare loop of UCX active messages: what the wire can do without leases, requests, checksums and counters.
 * It is the measure for the transfer engine, so it shares with the engine everything that costs UCX itself:
 * endpoints by socket address in peer-error mode, a worker of its own for the connection, the same options,
 * registered pools of the same size, payloads by rendezvous or eagerly as wire_ucx.c decides, one thread per
 * side that polls, then sleeps.
 *
 * The server streams messages from its arena, as many at a time as the window allows. The client lands them
 * in its own arena, one behind the other, and counts bytes.
 *
 * Threads: one inside each side; the functions here belong to one other thread.
 * Errors: TD_ERR_PEER_LOST once the connection is gone.
 */
#pragma once

#include <stdint.h>

#include "base/log.h"
#include "base/status.h"

struct bare;

struct bare_config {
    const char *transports; /* UCX_TLS; with tcp, by which UCX connects to an address */
    const char *address;    /* server: where to listen, port 0 picks one; client: the server's address */
    void *arena;            /* already touched; borrowed */
    uint64_t arena_bytes;
    const struct log *log;
};

enum td_status bare_serve(const struct bare_config *config, struct bare **out, struct td_error *error_out);
enum td_status bare_connect(const struct bare_config *config, struct bare **out, struct td_error *error_out);
const char *bare_address(const struct bare *b); /* server: address with its port */

/* Client: fetches total_bytes in messages of message_bytes, at most window_bytes of them (but at least one
 * message) in flight. Blocks. */
enum td_status bare_fetch(struct bare *b, uint64_t message_bytes, uint64_t window_bytes, uint64_t total_bytes);
void bare_close(struct bare *b); /* NULL is fine; close the client before its server */
