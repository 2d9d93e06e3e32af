/*
 * What lies between the protocol and a transport: connections, small messages, and payloads whose place the receiver
 * chooses. The protocol (peer.c, lease.c, pull.c) knows nothing of UCX; a transport knows nothing of leases.
 *
 * A message is a header of at most WIRE_HEADER_MAX bytes; it may carry one contiguous payload, borrowed until its done
 * callback. Headers of one connection arrive in the order they were sent; payloads may complete in any order.
 *
 * Life of a connection, as the protocol sees it:
 *
 *     wire_connect -> on_open -> messages -> [on_error, at most once] -> wire_close -> done callbacks -> on_closed
 *        accepted: on_accept -> messages -> ...
 *
 * wire_close is a forced close and may be called at any time, also from a callback. After it no message and no error comes
 * any more; every payload in flight, both ways, ends with its callback; then on_closed comes, once, and the connection is
 * gone. So after on_closed no byte is read from, or written to, memory that the connection was given.
 *
 * Threads: all calls but the constructors and wire_free belong to the thread that calls wire_progress, which is
 * also where all callbacks come. No callback comes from inside wire_send or wire_connect.
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

struct wire_conn { /* the head of each transport's own connection */
    struct wire *wire;
    void *user; /* the protocol's; set by wire_connect, or by on_accept */
};

typedef void wire_done_fn(void *arg, enum td_status status);

struct wire_events {
    void *user;
    void (*on_accept)(void *user, struct wire_conn *conn); /* sets conn->user, or leaves it NULL: closed at once */
    void (*on_open)(void *conn_user); /* only connections we asked for: may be sent to from now on */
    void (*on_message)(void *conn_user, const uint8_t *header, uint32_t header_len);
    /* Where the payload of this message lands; NULL: it is thrown away, and on_payload_done does not come. */
    void *(*on_payload)(void *conn_user, const uint8_t *header, uint32_t header_len, uint64_t payload_len,
                        void **token_out);
    /* Brings a payload that lies in this process's sight to its place, once and whole; NULL: memcpy. A transport that has no
     * such moment (rendezvous) does not call it. */
    void (*land)(void *conn_user, void *token, void *to, const void *from, uint64_t len_bytes);
    void (*on_payload_done)(void *conn_user, void *token, enum td_status status);
    void (*on_transport)(void *conn_user); /* may be NULL: wire_transport() says something else from now on */
    void (*on_error)(void *conn_user, enum td_status why);
    void (*on_closed)(void *conn_user);
};

struct wire_ops {
    struct wire_conn *(*connect)(struct wire *w, const char *address, uint32_t attempt, void *user);
    void (*send)(struct wire_conn *c, const void *header, uint32_t header_len, const void *payload,
                 uint64_t payload_len, wire_done_fn *done, void *arg);
    void (*close)(struct wire_conn *c);
    void (*trust)(struct wire_conn *c); /* may be NULL */
    bool (*progress)(struct wire *w);
    int (*arm)(struct wire *w);
    void (*transport)(struct wire_conn *c, char *out, uint32_t out_bytes);
    uint64_t (*part_bytes)(struct wire_conn *c); /* may be NULL */
    void (*free)(struct wire *w);
};

struct wire { /* the head of each transport */
    const struct wire_ops *ops;
    struct wire_events events;
    const struct log *log;
    char address[128]; /* where it listens, "" if it does not */
    int fd;            /* an epoll set that becomes readable when there is something to do, once armed */
};

struct wire_config {
    const char *listen;     /* NULL: does not */
    const char *reached_at; /* xfer_config.reached_at */
    const char *tls;
    void *arena;
    uint64_t arena_bytes;
    int arena_fd; /* 0: the arena is not shared */
    struct xfer_hub *hub;
    const struct log *log;
    struct wire_events events;
};

typedef enum td_status wire_open_fn(const struct wire_config *config, struct wire **out, struct td_error *error_out);
wire_open_fn wire_tcp_open, wire_ucx_open, wire_loopback_open;
wire_open_fn wire_mapped_open; /* TCP or UCX, and for peers on this host payloads straight from the holder's arena */
/* One of the others, with faults made on purpose. faults and clock borrowed. */
enum td_status wire_fault_open(const struct wire_config *config, wire_open_fn *open_inner, struct faults *faults,
                               const struct clock *clock, struct wire **out, struct td_error *error_out);

/* attempt: how many to that address failed before this one; of a name with several addresses each takes the next. */
static inline struct wire_conn *wire_connect(struct wire *w, const char *address, uint32_t attempt, void *user)
{
    return w->ops->connect(w, address, attempt, user);
}

/* header is copied. done may be NULL. */
static inline void wire_send(struct wire_conn *c, const void *header, uint32_t header_len, const void *payload,
                             uint64_t payload_len, wire_done_fn *done, void *arg)
{
    c->wire->ops->send(c, header, header_len, payload, payload_len, done, arg);
}

static inline void wire_close(struct wire_conn *c)
{
    c->wire->ops->close(c);
}

/* The peer has proved the secret: what a stranger must not be offered may be. Both sides call it. */
static inline void wire_trust(struct wire_conn *c)
{
    if (c->wire->ops->trust)
        c->wire->ops->trust(c);
}

/* One bounded turn; true if anything happened. */
static inline bool wire_progress(struct wire *w)
{
    return w->ops->progress(w);
}

/* Before sleeping on fd: 0 if there is work already, else for how many ms it may be slept (-1: any time). */
static inline int wire_arm(struct wire *w)
{
    return w->ops->arm(w);
}

/* What the connection really uses, as the transport reports it. */
static inline void wire_transport(struct wire_conn *c, char *out, uint32_t out_bytes)
{
    c->wire->ops->transport(c, out, out_bytes);
}

/* The length of a payload that travels best in one piece; 0: no matter. Others arrive all the same. */
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

/* All connections are closed. NULL is fine. */
static inline void wire_free(struct wire *w)
{
    if (w)
        w->ops->free(w);
}
