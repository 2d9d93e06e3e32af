/*
 * The interface between the protocol and a transport: connections, small messages, and payloads whose
 * destination the receiver chooses. The protocol (peer.c, lease.c, pull.c) knows nothing of sockets or UCX; a
 * transport knows nothing of leases.
 *
 * A message is a header of at most WIRE_HEADER_MAX bytes. It may carry one contiguous payload, which the
 * transport borrows until the done callback. Headers without payload arrive in the order in which they were
 * sent; payloads may complete in any order.
 *
 * Life of a connection, as the protocol sees it:
 *
 *     wire_connect -> on_open -> messages -> [on_error, at most once]
 *        accepted: on_accept -> messages -> [on_error, at most once]
 *     then, in both cases: wire_close -> done callbacks -> on_closed
 *
 * wire_close is a forced close and may be called at any time, also from a callback. After it comes no message
 * and no error; each payload in flight, in both directions, ends with its callback; then on_closed comes,
 * once, and the transport has freed the connection. So after on_closed nothing reads or writes memory that
 * the connection was given.
 *
 * Threads: all calls except the constructors and wire_free belong to the thread that calls wire_progress. All
 * callbacks come on that thread, and never from inside wire_send or wire_connect: the protocol sends while it
 * walks its own lists.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/log.h"
#include "base/status.h"

enum { WIRE_HEADER_MAX = 2048 };

struct wire;
struct xfer_hub;
struct secret;

struct wire_conn { /* first member of each transport's own connection */
    struct wire *wire;
    void *user; /* the protocol's connection; set by wire_connect, or by on_accept */
};

typedef void wire_done_fn(void *arg, enum td_status status);

struct wire_events {
    void *user;
    /* Sets conn->user, or leaves it NULL: then the connection is closed at once, without on_closed. */
    void (*on_accept)(void *user, struct wire_conn *conn);
    void (*on_open)(void *conn_user); /* only after wire_connect: messages may be sent from now on */
    void (*on_message)(void *conn_user, const uint8_t *header, uint32_t header_len);
    /* Returns where the payload of this message lands. NULL: the payload is discarded, and on_payload_done
     * does not come. */
    void *(*on_payload)(void *conn_user, const uint8_t *header, uint32_t header_len, uint64_t payload_len,
                        void **token_out);
    /* Optional: copies a payload from memory of this process to its destination, once and whole; NULL:
     * memcpy. Transports that write to the destination directly (socket reads, rendezvous) do not call it. */
    void (*land)(void *conn_user, void *token, void *to, const void *from, uint64_t len_bytes);
    void (*on_payload_done)(void *conn_user, void *token, enum td_status status);
    /* Optional: the transport has chosen how payloads travel; wire_transport() and wire_part_bytes() may
     * answer something else from now on. */
    void (*on_transport)(void *conn_user);
    void (*on_error)(void *conn_user, enum td_status why);
    void (*on_closed)(void *conn_user);
};

struct wire_ops {
    struct wire_conn *(*connect)(struct wire *w, const char *address, uint32_t attempt, void *user);
    void (*send)(struct wire_conn *c, const void *header, uint32_t header_len, const void *payload,
                 uint64_t payload_len, wire_done_fn *done, void *arg);
    void (*close)(struct wire_conn *c);
    void (*trust)(struct wire_conn *c); /* optional */
    bool (*progress)(struct wire *w);
    int (*arm)(struct wire *w);
    void (*transport)(struct wire_conn *c, char *out, uint32_t out_bytes);
    uint64_t (*part_bytes)(struct wire_conn *c); /* optional */
    void (*free)(struct wire *w);
};

struct wire { /* first member of each transport */
    const struct wire_ops *ops;
    struct wire_events events;
    const struct log *log;
    char address[128]; /* address it listens on; "" if it does not listen */
    /* An epoll set; after wire_arm it becomes readable when there is something to do. */
    int fd;
};

struct wire_config {
    const char *listen;     /* NULL: does not listen */
    const char *reached_at; /* see xfer_config.reached_at */
    const char *transports; /* borrowed until wire_free */
    bool is_trusted_network;
    struct secret *encrypt; /* connections of TCP are TLS, by this secret; borrowed; NULL: plain */
    void *arena;
    uint64_t arena_bytes;
    int arena_fd; /* 0: the arena is not shared */
    struct xfer_hub *hub;
    const struct log *log;
    struct wire_events events;
};

typedef enum td_status wire_open_fn(const struct wire_config *config, struct wire **out, struct td_error *error_out);
wire_open_fn wire_tcp_open, wire_loopback_open;
wire_open_fn wire_ucx_open; /* over TCP, which carries the messages */
/* Over TCP, or over UCX; between processes of one host payloads are copied from the holder's arena. */
wire_open_fn wire_mapped_open;
/* Wraps one of the other transports and injects faults. faults and clock are borrowed. */
enum td_status wire_fault_open(const struct wire_config *config, wire_open_fn *open_inner, struct faults *faults,
                               const struct clock *clock, struct wire **out, struct td_error *error_out);

/* attempt: number of attempts to this address before. If the name has several addresses, each attempt
 * takes the next one. */
static inline struct wire_conn *wire_connect(struct wire *w, const char *address, uint32_t attempt, void *user)
{
    return w->ops->connect(w, address, attempt, user);
}

/* The header is copied; the payload is borrowed until done, which may be NULL. */
static inline void wire_send(struct wire_conn *c, const void *header, uint32_t header_len, const void *payload,
                             uint64_t payload_len, wire_done_fn *done, void *arg)
{
    c->wire->ops->send(c, header, header_len, payload, payload_len, done, arg);
}

static inline void wire_close(struct wire_conn *c)
{
    c->wire->ops->close(c);
}

/* Tells the transport that the peer has proved the secret, so that payloads (and the mapped arena) may be
 * used. Both sides call it. */
static inline void wire_trust(struct wire_conn *c)
{
    if (c->wire->ops->trust)
        c->wire->ops->trust(c);
}

/* One turn of bounded length. True if anything happened. */
static inline bool wire_progress(struct wire *w)
{
    return w->ops->progress(w);
}

/* Call before sleeping on fd. 0: there is work already. Else the longest sleep in ms, or -1 for no limit. */
static inline int wire_arm(struct wire *w)
{
    return w->ops->arm(w);
}

/* Name of the transport in use, as the transport reports it. */
static inline void wire_transport(struct wire_conn *c, char *out, uint32_t out_bytes)
{
    c->wire->ops->transport(c, out, out_bytes);
}

/* Length in bytes at which payloads travel best; 0: no preference. Other lengths work too. */
static inline uint64_t wire_part_bytes(struct wire_conn *c)
{
    return c->wire->ops->part_bytes ? c->wire->ops->part_bytes(c) : 0;
}

static inline void wire_land(const struct wire_events *events, void *conn_user, void *token, void *to, const void *from,
                             uint64_t len_bytes)
{
    if (events->land)
        events->land(conn_user, token, to, from, len_bytes);
    else
        memcpy(to, from, len_bytes);
}

/* All connections must be closed. NULL is fine. */
static inline void wire_free(struct wire *w)
{
    if (w)
        w->ops->free(w);
}
