/*
 * HTTP/1.1 server: connections, requests, answers. What is served is its user's concern.
 *
 * A request is handed over when its head and body are here. It is answered at once or later, whole or as a
 * stream, from any thread:
 *
 *   on_request -> http_answer()                                  from on_request or later
 *              -> http_begin() -> http_write()* -> http_end()    as a stream
 *   on_gone    the client has hung up while its request was under way; at most once. The request must be
 *              ended all the same.
 *
 * A connection has one request at a time. While that one is under way, nothing else is read, so a client that
 * sends more waits. A client that closes its sending side counts as gone (as with most servers), because
 * nobody can tell it from one that has left.
 *
 * Why not a library for all of it. libevent's evhttp stops reading while a request waits, so it can't notice
 * a client that hangs up, and bounds neither connections nor the time for a head. libwebsockets 4.1 misses
 * hang-ups on event streams (its issue 2455). libmicrohttpd looks at every waiting stream each time when one
 * has something to send, and at none of them for a hang-up. What is left is little, because the door
 * (proto/rpc/rpc_accept.h) accepts, bounds and ends TLS already, and http-parser reads the syntax.
 *
 * Ownership: an http_conn belongs to the server; its user may use it from on_request to http_answer() or
 * http_end(), which give it back. Nothing that a request says is valid longer.
 *
 * Threads: on_request and on_gone come on one of the server's threads, "http-N". Answers may come from any
 * thread, one at a time for a request. An answer is written to the socket by the thread that gives it, if the
 * socket takes it: so a token costs no wake-up.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/mem.h"
#include "gateway/http_reader.h"
#include "proto/rpc/rpc.h"

struct http_server;
struct http_conn; /* a connection, and the request that it has under way */

enum { HTTP_THREADS_MOST = 16 };

struct http_server_config {
    const char *listen;                        /* "HOST:PORT" or "unix:/path" */
    const struct rpc_tls_files *tls;           /* with a certificate the listener speaks TLS; NULL: plain text */
    uint32_t n_threads;                        /* 1 to HTTP_THREADS_MOST */
    uint32_t max_connections, max_per_address; /* as rpc_door_config */
    const char *trusted_proxies;               /* the same */
    struct http_limits limits;
    uint64_t max_read_bytes;   /* of the requests of all connections that are being read */
    uint32_t request_ms;       /* time for a head and a body */
    uint32_t idle_ms;          /* a connection without a request is closed after this time */
    uint32_t filler_ms;        /* http_begin() */
    uint32_t stall_ms;         /* a client that takes nothing of its answer for this long is dropped */
    uint32_t frozen_ms;        /* sent bytes may stay unacknowledged for this long */
    uint32_t max_unsent_bytes; /* in the kernel, for each connection; 0: the system's */
    const struct log *log;
    void (*on_request)(struct http_conn *c, void *user);
    /* Under a lock of the connection: may call http_user() and nothing else of this server. */
    void (*on_gone)(struct http_conn *c);
    /* Under the same lock: all bytes of an answer have been taken, after http_write() said false. */
    void (*on_drained)(struct http_conn *c);
    /* Appends the body for a request that is refused here, in the shape that its target's API has. */
    void (*describe)(const char *target, int status, const char *why, struct bytes *body_out);
    void *user; /* passed to on_request */
};

struct http_server_stats {
    uint32_t connections;                              /* open; up to a second old */
    uint64_t requests, refused;                        /* whole requests; those that were refused here */
    uint64_t connections_refused, connections_dropped; /* as rpc_server_stats */
    uint64_t gone, stalled;                            /* clients that left or took nothing, with a request under way */
};

enum td_status http_server_open(const struct http_server_config *config, struct http_server **out,
                                struct td_error *error_out);
const char *http_server_address(const struct http_server *s); /* with the port filled in */
struct http_server_stats http_server_stats(struct http_server *s);
/* Accepts no more connections and refuses requests: when it returns, on_request does not run and won't any
 * more. Connections with a request stay until that one is ended. */
void http_server_drain(struct http_server *s);
/* Every request must have been ended. NULL is fine. */
void http_server_close(struct http_server *s);

/* ------------------------------------------------------------------ a request */

void http_set_user(struct http_conn *c, void *user); /* in on_request */
void *http_user(const struct http_conn *c);
const char *http_method(const struct http_conn *c);
const char *http_target(const struct http_conn *c);                   /* path and query, as sent */
const char *http_header(const struct http_conn *c, const char *name); /* NULL: not there */
const struct bytes *http_body(const struct http_conn *c);
void http_free_body(struct http_conn *c); /* it is not needed any more */

/* ------------------------------------------------------------------ an answer */

/* headers: further lines, "Name: value\r\n"...; NULL: none. */
void http_answer(struct http_conn *c, int status, const char *headers, const void *body, size_t len_bytes);
/* filler: sent when nothing else was for filler_ms; borrowed, NULL: none. */
void http_begin(struct http_conn *c, int status, const char *headers, const char *filler);
/* False: the client does not take it as fast as it comes; go on after on_drained, which may come before this
 * returns. What was given is kept and will be sent. */
bool http_write(struct http_conn *c, const void *data, size_t len_bytes);
void http_end(struct http_conn *c);
