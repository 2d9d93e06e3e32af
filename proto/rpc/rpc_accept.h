/*
 * The door of a server: listens, accepts connections and bounds them, and hands those that speak its protocol
 * to the server behind it: gRPC, or the gateway's HTTP.
 *
 * Why not gRPC's own listener: that of 1.51 stops listening for good when the process once has no descriptor
 * left, and it bounds neither connections nor the time in which a client has to say something. A newer gRPC
 * is not in Debian 12, and its C interface has no such bounds either. So the door accepts, and gRPC gets the
 * descriptor of a connection that has shown the first bytes of HTTP/2, or, with TLS, one end of a socket pair
 * at whose other end these bytes arrive (rpc_tls.h).
 *
 *     accepted -> waiting (silent: at most RPC_HANDSHAKE_MS, at most RPC_WAITING_MAX at a time) -> taken
 *                 (with TLS the handshake belongs to it)  \---> held ---/
 *
 * Bounds: when a new connection finds max_connections, or max_per_address from its address, the connection
 * without calls that has been idle for longest is closed for it; if there is none, the new one is closed. So
 * idle connections keep nobody out. Loopback and unix sockets have no bound for each address: there all
 * clients look alike. A spare descriptor is kept to refuse connections when no other is left.
 *
 * New connections. Of one address max_new connections may be younger than a second and have no call that
 * was answered, and as many more for each that has one. Further ones are held, at most RPC_HELD_MOST, until
 * there is room, or for RPC_HANDSHAKE_MS. What they sent stays in the kernel, so a client that makes
 * connections, sends requests and leaves costs little until it is known.
 *
 * A connection that the server has closed is found by its socket's cookie: gRPC tells nobody. Looking costs a
 * call into the kernel for each connection, so it is done once a second, and when a bound is reached. A
 * client that reads nothing is cut off by the kernel, after frozen_ms.
 *
 * Threads: one, "rpc-accept". stats, call_begin and call_end may be called from any
 * thread, the others from the thread that opened the door.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/log.h"
#include "base/status.h"
#include "proto/rpc/rpc_networks.h"
#include "proto/rpc/rpc_senders.h"

enum { RPC_HANDSHAKE_MS = 5000, RPC_WAITING_MAX = 256, RPC_HELD_MOST = 512, RPC_PREFACE_MOST = 24 };

struct rpc_door;
struct rpc_tls;

struct rpc_door_config {
    const char *listen; /* "HOST:PORT" or "unix:/path" */
    bool is_private;    /* a unix socket gets mode 0600 */
    /* What a client must say first, at most RPC_PREFACE_MOST bytes; others are closed. NULL: any byte. */
    const char *preface;
    uint32_t max_connections, max_per_address; /* 0: by the limit of open files; a quarter of max_connections */
    uint32_t max_new;                          /* of an address, see above; 0: no bound */
    /* Addresses behind which there are many clients (rpc_networks.h). They count as this host's, and calls of
     * their connections may come to nothing. */
    const char *trusted_proxies;
    uint32_t frozen_ms;            /* sent bytes may stay unacknowledged for this long */
    uint32_t max_calls;            /* 0: no bound; see rpc_door_call_begin() */
    uint32_t max_connection_calls; /* the same, of a connection from another host */
    uint32_t max_message_bytes;    /* 0: bytes are not bounded; see rpc_door_message() */
    bool must_prove;               /* messages are short until rpc_door_proved() */
    uint32_t max_unsent_bytes;     /* see rpc_server_config */
    struct rpc_tls *tls;           /* taken over, also if opening fails; NULL: plain text */
    const struct log *log;
    /* On the door's thread: takes over the descriptor of a connection. is_local: it has no address (see
     * rpc_senders.h). */
    void (*take)(void *user, int fd, bool is_local);
    void (*tick)(void *user); /* on the door's thread, about once a second; NULL: none */
    void (*look)(void *user); /* the same, every RPC_LOOK_MS while somebody is connected; NULL: none */
    void *user;
};

struct rpc_door_stats {
    uint32_t n_open, n_waiting;       /* handed on and not closed a second ago; silent so far */
    uint64_t n_accepted, n_refused;   /* refused: at a bound */
    uint64_t n_late, n_idle, n_flood; /* closed: late to speak; for others; see call_begin, call_end, message */
    uint64_t n_foreign;               /* closed: speaks another protocol, or its handshake of TLS has failed */
};

/*
 * Binds and listens; connections are taken from rpc_door_start() on. error_out names the address. A unix
 * socket that a process left which was killed is replaced; one at which somebody listens is not.
 */
enum td_status rpc_door_open(const struct rpc_door_config *config, struct rpc_door **out, struct td_error *error_out);
void rpc_door_start(struct rpc_door *d);
/* Stops listening and drops the connections that wait. Those handed on stay. */
void rpc_door_stop(struct rpc_door *d);
void rpc_door_close(struct rpc_door *d);                /* when no call is left; NULL is fine */
const char *rpc_door_address(const struct rpc_door *d); /* with the port filled in */
struct rpc_door_stats rpc_door_stats(struct rpc_door *d);

/*
 * A call on the connection with this descriptor begins, or ends. Begin returns the connection's number, for
 * end; 0: it is not known any more. When more than 2 * max_calls + RPC_CALLS_LEAST calls have begun and not
 * ended, a connection is closed as a flood's if it has more than half of its equal share of them, and more
 * than RPC_CALLS_LEAST: calls beyond max_calls are answered at once, so the others were reset meanwhile, and
 * on many connections each is served too slowly for rpc_door_call_end() to notice. So is one with more than
 * twice its max_connection_calls: clients that keep to the protocol wait for a stream; and with must_prove
 * one from another host with more than eight before its proof.
 */
enum { RPC_CALLS_LEAST = 64 };
uint64_t rpc_door_call_begin(struct rpc_door *d, int fd);
/*
 * A message of a call on the connection has come. The door looks 20 times a second how many bytes of each
 * connection this process has read, and closes one as a flood's that has sent more than its calls explain
 * (rpc_account.h): RPC_CALL_BYTES for each call, the messages twice, four fifths of what was sent to it (it
 * acknowledges pings and opens windows), 1 KB for each second, and one message of max_message_bytes for
 * itself and for each call that is under way. One that has no call gets 32 KiB instead of a message, after
 * half a second; one that has to prove itself first gets that at once, and 64 KiB for each call. What was
 * not used is not kept, beyond one message. Of more than 512 connections it looks at 512 each time.
 *
 * A stranger is an address from which no call of a method with a queue was answered so far. Its connections
 * get one message for themselves and 64 KiB for each call that is under way, half as much after each flood
 * that is remembered (of the message at least 256 KiB); without a call 32 KiB, for 2 ms. The door looks at
 * them 100 times a second and before each of their calls, and the kernel takes 16 KiB of them at a time:
 * gRPC reads up to 4 MiB at once, which may be 30,000 calls that are reset, or frames that are wrong, each of
 * which is an error with its time as text. Where clients have to prove themselves first, each connection from
 * another host is looked at and read in this way until it has; what it may send stays as above.
 *
 * Frames without content cost gRPC as much as calls, and while it reads them from one connection without a
 * pause, a thread of its own does nothing for others.
 */
enum { RPC_LOOK_MS = 50, RPC_STRANGERS_LOOK_MS = 10 };
void rpc_door_message(struct rpc_door *d, int fd, uint64_t connection, size_t len_bytes);
/* A call of a method with a queue was answered. */
void rpc_door_answered(struct rpc_door *d, int fd, uint64_t connection);
/* Whether the client at the other end has closed the connection, or the door has. */
bool rpc_door_has_left(struct rpc_door *d, int fd, uint64_t connection);
/* With must_prove: the client at the other end of the connection has proved itself. */
void rpc_door_proved(struct rpc_door *d, int fd, uint64_t connection);
/* A call ends whose message was not read, because this process refused it, or its client gave it up: as much
 * as one message may have come, but of all such calls of a connection RPC_UNREAD_BYTES in a second, and
 * RPC_DOUBTFUL_BYTES of the calls that a stranger gave up. Call it before rpc_door_call_end(). */
void rpc_door_unread(struct rpc_door *d, int fd, uint64_t connection, bool was_refused);
/* Both ends of the connection, as rpc_call_peer() and rpc_call_local() give them. */
void rpc_door_peer(struct rpc_door *d, int fd, uint64_t connection, char *out, size_t out_bytes);
void rpc_door_local(struct rpc_door *d, int fd, uint64_t connection, char *out, size_t out_bytes);
/*
 * waste: 0 for a call that was answered (not with UNAUTHENTICATED), or that was given up later than
 * RPC_YOUNG_MS after it began. A connection with more than RPC_WASTE_MOST in a second is closed, with those
 * from its address that have been open for a second without a call that was answered, and the address gets no
 * other for a while, unless it is this host's (rpc_senders.h; not for long, because others may be behind the
 * same address). The waste of all connections from an address counts together, too, with RPC_WASTE_UNUSED for
 * each that ended without a call that was answered.
 *
 * gRPC reads faster than calls are handled, and keeps some 9 KiB for each, also for those that were reset
 * meanwhile. So calls of a connection that was closed here, or by its client, are dropped unseen (call_begin
 * gives 0): otherwise what a flood had sent before it was noticed hides the next flood.
 */
enum { RPC_YOUNG_MS = 1000 };
void rpc_door_call_end(struct rpc_door *d, int fd, uint64_t connection, uint32_t waste);
/* When a call of a paced method may begin (rpc_senders_pace()), or one of a method that has a queue
 * (rpc_senders_credit()); 0: now. */
uint64_t rpc_door_pace(struct rpc_door *d, int fd, uint64_t connection, bool has_queue);
