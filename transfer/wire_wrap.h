/*
 * What transports that lie over another one share (faults, mapped arena, UCX): an outer connection for each
 * inner one, which forwards events of the inner one until the protocol closes it.
 *
 * A wrapper's own structs begin with these, and its events of the inner transport are the functions below,
 * but for those in which it does more.
 *
 * Ownership: an outer connection is the wrapper's, from wrap_conn_init() until wrap_reap() frees it.
 * Threads: xfer. Errors: none.
 */
#pragma once

#include "base/list.h"
#include "transfer/wire.h"

/*
 * Layers send messages of their own to the same layer of a peer that has proved itself. Their types begin at
 * WRAP_TYPE_LEAST; the protocol's are below. The uppermost layer (wire_mapped.c) drops those that no layer
 * took: the peer has a layer that this process lacks.
 */
enum { WRAP_TYPE_LEAST = 0x4d00, WRAP_BOOT_ID_BYTES = 36 };

struct wrap_conn {
    struct wire_conn base; /* what the protocol sees */
    LIST_ENTRY(wrap_conn) in_wire;
    struct wire_conn *inner; /* NULL: there is none, or it has ended */
    bool is_closing;         /* the protocol has closed it: of all events only on_closed is still to come */
    bool error_told;
};

struct wrap_wire {
    struct wire base;
    struct wire *inner;
    LIST_HEAD(, wrap_conn) conns; /* the newest first: a loop does not meet those that begin during it */
};

/* c is zeroed memory of malloc that begins with the wrap_conn. */
void wrap_conn_init(struct wrap_wire *w, struct wrap_conn *c);
/* Asks the protocol whether it takes a connection that the inner transport accepted. If not, frees c. */
void wrap_accept(struct wrap_wire *w, struct wrap_conn *c, struct wire_conn *inner);
/* Once: on_error, unless the connection is being closed. */
void wrap_tell_error(struct wrap_conn *c, enum td_status why);
/*
 * Frees the first connection that is closed, whose inner one has ended, and that is_over() allows, and tells
 * on_closed. One in a turn, because the callback may change the list. True if there was one.
 */
bool wrap_reap(struct wrap_wire *w, bool (*is_over)(const struct wrap_conn *c));

/* Identity of this host until it is booted again; out[0] is 0 if it can't be read: no host counts as ours. */
void wrap_boot_id(char out[WRAP_BOOT_ID_BYTES]);

static inline const struct wire_events *wrap_events(const struct wrap_conn *c)
{
    return &c->base.wire->events;
}

/* Events of the inner connection; user is the struct wrap_conn. */
void wrap_on_open(void *user);
void wrap_on_message(void *user, const uint8_t *header, uint32_t header_len);
void *wrap_on_payload(void *user, const uint8_t *header, uint32_t header_len, uint64_t payload_len, void **token_out);
void wrap_land(void *user, void *token, void *to, const void *from, uint64_t len_bytes);
void wrap_on_payload_done(void *user, void *token, enum td_status status);
void wrap_on_transport(void *user);
void wrap_on_error(void *user, enum td_status why);
void wrap_on_closed(void *user);
