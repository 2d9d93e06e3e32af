#include "proto/rpc/rpc_accept.h"

#include <arpa/inet.h>
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/host_port.h"
#include "base/list.h"
#include "base/mem.h"
#include "base/process.h"
#include "base/thread.h"
#include "proto/rpc/rpc_account.h"
#include "proto/rpc/rpc_flow.h"
#include "proto/rpc/rpc_senders.h"
#include "proto/rpc/rpc_tls.h"

enum { LISTENERS_MAX = 4, BACKLOG = 512, ACCEPTS_A_TURN = 32, PAUSE_MS = 100 };
enum { CONNECTIONS_LEAST = 64, CONNECTIONS_MOST = 16384, SHARE_OF_ADDRESS = 4 };
/* Connections that are looked at each time; bytes without a call; calls before a proof. */
enum { LOOKS_A_TIME = 512, NOISE_BYTES = 32 << 10, UNPROVED_CALLS = 8 };
/* The least of a stranger's message. Bytes of its call, as many as gRPC takes of one that is held, and of one
 * before a proof: of a message that is too long, but was not refused yet. See narrow(). */
enum { STRANGERS_BYTES = 256 << 10, STRANGERS_CALL_BYTES = 64 << 10 };
enum { STRANGERS_WINDOW = 16 << 10, STRANGERS_BUFFER = 64 << 10 };
/* Time between two looks at the connections that are held, and how many of these are looked at each time. */
enum { HELD_MS = 5, HELD_LOOKS = 64 };
#define NOISE_NS           (NS_PER_S / 2)
#define STRANGERS_NOISE_NS (2 * NS_PER_MS)
#define WARN_EVERY_NS      (10 * NS_PER_S)

struct newcomer {                  /* accepted, and silent so far; or it has spoken, and is held */
    TAILQ_ENTRY(newcomer) in_door; /* in waiting or held */
    int fd;
    struct rpc_tls_link *tls; /* NULL: plain text */
    struct rpc_origin from;
    bool is_trusted; /* a proxy's */
    bool is_narrow;  /* a stranger's: the kernel takes STRANGERS_WINDOW of it at a time, from now on */
    uint64_t until_ns;
    bool is_held;
};

struct connection {  /* handed on; the index in rpc_door.connections is its descriptor */
    uint64_t cookie; /* of its socket: no other socket of this boot has it; 0: no connection */
    struct rpc_origin from;
    struct sockaddr_in6 peer, local; /* with TLS: its two ends, also of IPv4; else its socket knows them */
    uint32_t n_calls;
    bool is_used;    /* a call of it was answered */
    bool has_proved; /* see rpc_door_proved() */
    bool is_trusted; /* a proxy's: its calls are many clients' */
    bool is_strangers;
    uint64_t idle_ns; /* since when it has no call */
    struct rpc_waste waste;
    int wire_fd; /* what its client's bytes come from: with TLS not its own descriptor */
    uint64_t wire_cookie;
    struct rpc_account account; /* of its bytes: see rpc_door_message() */
};

struct rpc_door {
    struct rpc_door_config config;
    struct clock clock;
    char *address;
    char *path; /* of a unix socket; NULL */
    int listeners[LISTENERS_MAX], n_listeners;
    int epoll_fd, wake_fd, spare_fd;
    uint64_t tick_ns, look_ns, full_look_ns; /* when tick() and look_at_flows() are due, at strangers' and all */
    uint32_t next_look;                      /* connection that is looked at next, modulo their number */
    uint64_t resume_ns;                      /* nothing is accepted until then; 0: no pause */
    /* The oldest first; used by the thread only. Held: too many of its address are new. */
    TAILQ_HEAD(newcomers, newcomer) waiting, held;
    uint32_t n_held;
    uint64_t held_ns; /* when admit_held() is due */
    _Atomic uint64_t warned_ns;
    pthread_t thread;
    bool is_running;
    atomic_bool stop;
    atomic_uint n_waiting;
    /* A lock, not a queue: calls of a connection begin and end on gRPC's threads, and the door needs their
     * count when it looks for an idle one. */
    pthread_mutex_t lock;
    struct connection *connections;
    uint32_t cap_connections;
    uint32_t n_calls;   /* of all connections */
    atomic_uint n_open; /* written under the lock */
    struct rpc_senders senders;
    struct rpc_networks trusted;
    struct rpc_door_stats stats;
};

/* ---------------------------------------------------------------- connections */

static void forget(struct rpc_door *d, struct connection *c)
{
    d->n_calls -= c->n_calls;
    *c = (struct connection){0};
}

static void warn(struct rpc_door *d, struct rpc_origin from, const char *what)
{
    char who[RPC_ORIGIN_BYTES];
    uint64_t now = clock_now(&d->clock), before = atomic_load(&d->warned_ns);
    if ((before && now - before < WARN_EVERY_NS) || !atomic_compare_exchange_strong(&d->warned_ns, &before, now))
        return;
    rpc_origin_print(from, who);
    log_warn(d->config.log, "%s from=%s address=%s open=%u waiting=%u", what, who, d->address, atomic_load(&d->n_open),
             atomic_load(&d->n_waiting));
}

/* A connection from there has ended by itself, without a call that was answered. To make one costs as much as
 * some calls. Call under the lock. */
static void unused(struct rpc_door *d, struct rpc_origin from, uint32_t waste, uint64_t now)
{
    if (!rpc_senders_waste(&d->senders, from, waste, now))
        return;
    rpc_senders_flood(&d->senders, from, now);
    d->stats.n_flood++;
    warn(d, from, "address has to wait: it makes connections and calls for nothing");
}

/* The connection has ended by itself. */
static void lost(struct rpc_door *d, struct connection *c)
{
    if (c->cookie && !c->is_used)
        unused(d, c->from, RPC_WASTE_UNUSED, clock_now(&d->clock));
    forget(d, c);
}

/* Forgets the connections that gRPC has closed. Call under the lock. */
static void sweep(struct rpc_door *d)
{
    uint32_t n = 0;
    for (uint32_t fd = 0; fd < d->cap_connections; fd++) {
        struct connection *c = &d->connections[fd];
        if (c->cookie && rpc_flow_cookie((int)fd) != c->cookie)
            lost(d, c);
        n += c->cookie != 0;
    }
    atomic_store(&d->n_open, n);
}

static uint32_t count_from(const struct rpc_door *d, struct rpc_origin from)
{
    uint32_t n = 0;
    for (uint32_t fd = 0; fd < d->cap_connections; fd++)
        n += d->connections[fd].cookie && d->connections[fd].from.key == from.key;
    return n;
}

/* Closes a connection. */
static void cut(struct rpc_door *d, struct connection *c)
{
    rpc_flow_cut((int)(c - d->connections), c->cookie);
    forget(d, c);
    atomic_fetch_sub(&d->n_open, 1);
}

/* Whether as many connections from there as may be are new: younger than a second, and no call of them was
 * answered yet. */
static bool are_many_new(struct rpc_door *d, struct rpc_origin from)
{
    uint64_t now = clock_now(&d->clock);
    uint32_t n_new = 0, n_used = 0;
    for (uint32_t fd = 0; fd < d->cap_connections && from.key && d->config.max_new; fd++) {
        struct connection *c = &d->connections[fd];
        if (!c->cookie || c->from.key != from.key)
            continue;
        n_used += c->is_used;
        n_new += !c->is_used && now - c->account.began_ns < NS_PER_S && rpc_flow_cookie((int)fd) == c->cookie;
    }
    return n_new && n_new >= d->config.max_new * (1 + n_used);
}

/* Closes the connection that has been idle for longest: of the connections from one address, or of all (no
 * address). False: no connection is idle. */
static bool close_idle(struct rpc_door *d, struct rpc_origin from)
{
    struct connection *found = NULL;
    for (uint32_t fd = 0; fd < d->cap_connections; fd++) {
        struct connection *c = &d->connections[fd];
        if (c->cookie && !c->n_calls && (!found || c->idle_ns < found->idle_ns) &&
            (!from.key || c->from.key == from.key))
            found = c;
    }
    if (!found)
        return false;
    cut(d, found);
    d->stats.n_idle++;
    return true;
}

/* Whether there is room for one more connection from there; makes room if it can. Call under the lock. */
static bool make_room(struct rpc_door *d, struct rpc_origin from)
{
    if (d->n_open >= d->config.max_connections) {
        sweep(d);
        if (d->n_open >= d->config.max_connections && !close_idle(d, (struct rpc_origin){0}))
            return false;
    }
    if (!from.key || count_from(d, from) < d->config.max_per_address)
        return true;
    sweep(d);
    return count_from(d, from) < d->config.max_per_address || close_idle(d, from);
}

/* What the kernel takes of a connection before it is read. It raises the window again by itself if it may
 * choose the buffer; the buffer has room for all that the first window let come. */
static void narrow(int fd)
{
    int buffer = STRANGERS_BUFFER, window = STRANGERS_WINDOW;
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &buffer, sizeof(buffer));
    setsockopt(fd, IPPROTO_TCP, TCP_WINDOW_CLAMP, &window, sizeof(window));
}

static void widen(int fd)
{
    int none = 0, window = INT_MAX;
    setsockopt(fd, SOL_SOCKET, SO_BUF_LOCK, &none, sizeof(none));
    setsockopt(fd, IPPROTO_TCP, TCP_WINDOW_CLAMP, &window, sizeof(window));
}

/* Whether a new connection's bytes are bounded as a stranger's. Call under the lock. */
static bool is_stranger(const struct rpc_door *d, struct rpc_origin from)
{
    if (!d->config.max_message_bytes)
        return false;
    return d->config.must_prove ? from.key != 0 : rpc_senders_is_stranger(&d->senders, from);
}

/* The connection is no stranger's any more. Call under the lock. */
static void know(struct connection *c)
{
    c->is_strangers = false;
    if (rpc_flow_cookie(c->wire_fd) == c->wire_cookie)
        widen(c->wire_fd);
}

/* The connection has spoken the protocol: hands it on, or closes it at a bound. */
static void hand_on(struct rpc_door *d, const struct newcomer *w)
{
    int fd = w->fd;
    struct rpc_tls_link *tls = w->tls;
    struct rpc_origin from = w->from;
    struct sockaddr_in6 peer = {0}, local = {0};
    socklen_t len = sizeof(peer), local_len = sizeof(local);
    int outer = fd;
    pthread_mutex_lock(&d->lock);
    bool has_room = make_room(d, from);
    if (has_room && tls) {
        getpeername(outer, (struct sockaddr *)&peer, &len);
        getsockname(outer, (struct sockaddr *)&local, &local_len);
        fd = rpc_tls_hand_over(d->config.tls, tls, d->config.max_unsent_bytes);
        has_room = fd >= 0;
    }
    uint64_t now = clock_now(&d->clock);
    bool is_strangers = is_stranger(d, from);
    if (w->is_narrow && !is_strangers)
        widen(outer);
    if (is_strangers && d->look_ns > now + STRANGERS_NOISE_NS)
        d->look_ns = now + STRANGERS_NOISE_NS;
    if (has_room && (uint32_t)fd >= d->cap_connections) {
        uint32_t cap = (uint32_t)fd * 2;
        d->connections = mem_resize(d->connections, cap, sizeof(*d->connections));
        memset(d->connections + d->cap_connections, 0, (cap - d->cap_connections) * sizeof(*d->connections));
        d->cap_connections = cap;
    }
    if (has_room) {
        d->n_open += !d->connections[fd].cookie;
        lost(d, &d->connections[fd]);
        d->connections[fd] = (struct connection){.cookie = rpc_flow_cookie(fd),
                                                 .from = from,
                                                 .is_trusted = w->is_trusted,
                                                 .is_strangers = is_strangers,
                                                 .peer = peer,
                                                 .local = local,
                                                 .idle_ns = now,
                                                 .wire_fd = outer,
                                                 .wire_cookie = rpc_flow_cookie(outer),
                                                 .account = rpc_account_open(now)};
    }
    d->stats.n_refused += !has_room;
    pthread_mutex_unlock(&d->lock);
    if (has_room) {
        d->config.take(d->config.user, fd, !from.key);
        return;
    }
    if (tls)
        rpc_tls_drop(tls);
    close(outer);
    warn(d, from, "connection refused: as many are open as the server takes");
}

/* One end of the connection. False: it has ended. Call under the lock. (A connection with an open call keeps
 * its descriptor; when it has ended, another may have it.) */
static bool end_of(struct rpc_door *d, int fd, uint64_t connection, bool is_peer, struct sockaddr_storage *out)
{
    socklen_t len = sizeof(*out);
    *out = (struct sockaddr_storage){0};
    if (!connection || rpc_flow_cookie(fd) != connection)
        return false;
    if (d->config.tls)
        memcpy(out, is_peer ? &d->connections[fd].peer : &d->connections[fd].local, sizeof(struct sockaddr_in6));
    else if (is_peer ? getpeername(fd, (struct sockaddr *)out, &len) : getsockname(fd, (struct sockaddr *)out, &len))
        return false;
    return true;
}

void rpc_door_peer(struct rpc_door *d, int fd, uint64_t connection, char *out, size_t out_bytes)
{
    struct sockaddr_storage a;
    struct ucred who = {0};
    socklen_t len = sizeof(who);
    snprintf(out, out_bytes, "?");
    pthread_mutex_lock(&d->lock);
    if (end_of(d, fd, connection, true, &a)) {
        rpc_address_print(&a, out, out_bytes);
        if (a.ss_family == AF_UNIX && !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &len))
            snprintf(out, out_bytes, "uid=%u pid=%d", (unsigned)who.uid, (int)who.pid);
    }
    pthread_mutex_unlock(&d->lock);
}

void rpc_door_local(struct rpc_door *d, int fd, uint64_t connection, char *out, size_t out_bytes)
{
    struct sockaddr_storage a;
    *out = 0;
    pthread_mutex_lock(&d->lock);
    if (end_of(d, fd, connection, false, &a))
        rpc_address_print(&a, out, out_bytes);
    pthread_mutex_unlock(&d->lock);
}

static bool must_wait(struct rpc_door *d, struct rpc_origin from)
{
    pthread_mutex_lock(&d->lock);
    bool waits = rpc_senders_must_wait(&d->senders, from, clock_now(&d->clock));
    d->stats.n_refused += waits;
    pthread_mutex_unlock(&d->lock);
    return waits;
}

/* Closes the connection, and those from its address that were made long ago and never used. */
static void end_flood(struct rpc_door *d, struct connection *flood, uint64_t now)
{
    struct rpc_origin from = flood->from;
    rpc_senders_flood(&d->senders, from, now);
    cut(d, flood);
    d->stats.n_flood++;
    for (uint32_t fd = 0; fd < d->cap_connections; fd++) {
        struct connection *c = &d->connections[fd];
        if (c->cookie && !c->n_calls && !c->is_used && now - c->idle_ns > NS_PER_S && c->from.key == from.key) {
            cut(d, c);
            d->stats.n_idle++;
        }
    }
}

/* Calls of the connection came to nothing. True: it was closed, because they are too many, of its own or with
 * those of all connections from there. */
static bool wasted(struct rpc_door *d, struct connection *c, uint32_t waste, uint64_t now)
{
    if (c->is_trusted)
        return false;
    bool is_flood = rpc_waste_add(&c->waste, waste, now);
    is_flood |= rpc_senders_waste(&d->senders, c->from, waste, now);
    if (is_flood)
        end_flood(d, c, now);
    return is_flood;
}

/* ---------------------------------------------------------------------- bytes */

static bool is_unproved(const struct rpc_door *d, const struct connection *c)
{
    return d->config.must_prove && !c->has_proved;
}

static struct rpc_allowance allowance(const struct rpc_door *d, const struct connection *c, uint64_t now)
{
    uint64_t most = d->config.max_message_bytes;
    most = most < NOISE_BYTES ? NOISE_BYTES : most;
    if (is_unproved(d, c))
        return (struct rpc_allowance){NOISE_BYTES, STRANGERS_CALL_BYTES, NOISE_BYTES, NOISE_NS};
    if (!c->is_strangers)
        return (struct rpc_allowance){most, most, NOISE_BYTES, NOISE_NS};
    uint32_t n = rpc_senders_floods(&d->senders, c->from, now);
    uint64_t few = most >> n, least = most < STRANGERS_BYTES ? most : STRANGERS_BYTES;
    return (struct rpc_allowance){few < least ? least : few, STRANGERS_CALL_BYTES >> n, NOISE_BYTES >> (n < 2 ? n : 2),
                                  STRANGERS_NOISE_NS};
}

/* Whether more has come than the connection's calls explain. Call under the lock. */
static bool is_unexplained(const struct rpc_door *d, struct connection *c, uint64_t now)
{
    struct rpc_flow flow;
    if (!c->cookie || !rpc_flow_of(c->wire_fd, &flow))
        return false;
    const struct rpc_allowance may = allowance(d, c, now);
    return rpc_account_is_over(&c->account, &flow, c->n_calls, &may, now) &&
           rpc_flow_cookie(c->wire_fd) == c->wire_cookie;
}

/* A call from there was answered. Call under the lock. */
static void welcome(struct rpc_door *d, struct rpc_origin from)
{
    for (uint32_t fd = 0; fd < d->cap_connections; fd++) {
        struct connection *c = &d->connections[fd];
        if (c->cookie && c->is_strangers && c->from.key == from.key)
            know(c);
    }
}

/* ---------------------------------------------------------------------- calls */

/* More calls are under way than are taken and answered, and this connection has more than its part of
 * them. */
static bool holds_too_many(struct rpc_door *d, const struct connection *c)
{
    uint32_t most = d->config.max_calls, each = d->config.max_connection_calls, n_open = atomic_load(&d->n_open);
    if (c->from.key && ((each && c->n_calls > 2 * each) || (is_unproved(d, c) && c->n_calls > UNPROVED_CALLS)))
        return true;
    return most && d->n_calls > 2 * most + RPC_CALLS_LEAST && c->n_calls > RPC_CALLS_LEAST &&
           c->n_calls > d->n_calls / n_open / 2;
}

static const char UNEXPLAINED[] = "connection closed: it sends bytes that belong to no call";
static const char GIVEN_UP[] = "connection closed: it opens calls and gives them up";

/* Its client has closed the connection. gRPC tells calls first. */
static bool has_left(const struct connection *c)
{
    return !rpc_flow_is_open(c->wire_fd) || rpc_flow_cookie(c->wire_fd) != c->wire_cookie;
}

uint64_t rpc_door_call_begin(struct rpc_door *d, int fd)
{
    uint64_t cookie = 0;
    const char *why = NULL;
    struct rpc_origin from = {0};
    uint64_t now = clock_now(&d->clock);
    pthread_mutex_lock(&d->lock);
    if (fd >= 0 && (uint32_t)fd < d->cap_connections && d->connections[fd].cookie) {
        struct connection *c = &d->connections[fd];
        from = c->from;
        if (holds_too_many(d, c)) {
            why = "connection closed: it opens calls faster than they can be answered";
            end_flood(d, c, now);
        } else if (c->is_strangers && is_unexplained(d, c, now)) {
            why = UNEXPLAINED;
            end_flood(d, c, now);
        } else if (has_left(c)) {
            if (wasted(d, c, RPC_WASTE_YOUNG, now))
                why = GIVEN_UP;
        } else {
            cookie = c->cookie;
            c->n_calls++;
            rpc_account_call(&c->account);
            d->n_calls++;
        }
    }
    pthread_mutex_unlock(&d->lock);
    if (why)
        warn(d, from, why);
    return cookie;
}

void rpc_door_call_end(struct rpc_door *d, int fd, uint64_t connection, uint32_t waste)
{
    uint64_t now = clock_now(&d->clock);
    bool is_cut = false;
    struct rpc_origin from = {0};
    pthread_mutex_lock(&d->lock);
    struct connection *c = connection ? &d->connections[fd] : NULL;
    if (c && c->cookie == connection) {
        from = c->from;
        d->n_calls--;
        c->idle_ns = --c->n_calls ? c->idle_ns : now;
        c->is_used |= !waste;
        is_cut = waste && wasted(d, c, waste, now);
    }
    pthread_mutex_unlock(&d->lock);
    if (is_cut)
        warn(d, from, GIVEN_UP);
}

uint64_t rpc_door_pace(struct rpc_door *d, int fd, uint64_t connection, bool has_queue)
{
    uint64_t now = clock_now(&d->clock), begins = now;
    pthread_mutex_lock(&d->lock);
    struct connection *c = connection ? &d->connections[fd] : NULL;
    if (c && c->cookie == connection)
        begins = (has_queue ? rpc_senders_credit : rpc_senders_pace)(&d->senders, c->from, now);
    pthread_mutex_unlock(&d->lock);
    return begins <= now ? 0 : begins;
}

void rpc_door_answered(struct rpc_door *d, int fd, uint64_t connection)
{
    pthread_mutex_lock(&d->lock);
    struct connection *c = connection ? &d->connections[fd] : NULL;
    if (c && c->cookie == connection) {
        rpc_senders_answered(&d->senders, c->from, clock_now(&d->clock));
        if (c->is_strangers)
            welcome(d, c->from);
    }
    pthread_mutex_unlock(&d->lock);
}

bool rpc_door_has_left(struct rpc_door *d, int fd, uint64_t connection)
{
    pthread_mutex_lock(&d->lock);
    struct connection *c = connection ? &d->connections[fd] : NULL;
    bool left = !c || c->cookie != connection || has_left(c);
    pthread_mutex_unlock(&d->lock);
    return left;
}

void rpc_door_proved(struct rpc_door *d, int fd, uint64_t connection)
{
    pthread_mutex_lock(&d->lock);
    struct connection *c = connection ? &d->connections[fd] : NULL;
    if (c && c->cookie == connection) {
        c->has_proved = true;
        if (c->is_strangers)
            know(c);
    }
    pthread_mutex_unlock(&d->lock);
}

void rpc_door_message(struct rpc_door *d, int fd, uint64_t connection, size_t len_bytes)
{
    pthread_mutex_lock(&d->lock);
    struct connection *c = connection ? &d->connections[fd] : NULL;
    if (c && c->cookie == connection)
        rpc_account_message(&c->account, len_bytes);
    pthread_mutex_unlock(&d->lock);
}

void rpc_door_unread(struct rpc_door *d, int fd, uint64_t connection, bool was_refused)
{
    uint64_t now = clock_now(&d->clock);
    pthread_mutex_lock(&d->lock);
    struct connection *c = connection ? &d->connections[fd] : NULL;
    if (c && c->cookie == connection)
        rpc_account_unread(&c->account, d->config.max_message_bytes, !was_refused && c->is_strangers, now);
    pthread_mutex_unlock(&d->lock);
}

/* Closes the connections on which more came than their calls explain, if it is time to look, at all or at
 * those of strangers; returns ms until it is the next time, or -1: nobody is connected. Of many connections
 * it looks at some each time. */
static int look_at_flows(struct rpc_door *d)
{
    uint64_t now = clock_now(&d->clock);
    uint32_t n_looks = 0;
    bool has_cut = false, is_full = now >= d->full_look_ns;
    uint64_t next_ns;
    struct rpc_origin from = {0};
    if (!d->config.max_message_bytes || !atomic_load(&d->n_open))
        return -1;
    if (now >= d->look_ns) {
        next_ns = d->full_look_ns = is_full ? now + RPC_LOOK_MS * NS_PER_MS : d->full_look_ns;
        pthread_mutex_lock(&d->lock);
        for (uint32_t i = 0; i < d->cap_connections && n_looks < LOOKS_A_TIME; i++) {
            struct connection *c = &d->connections[d->next_look++ % d->cap_connections];
            if (!c->cookie || (!is_full && !c->is_strangers))
                continue;
            n_looks++;
            if (is_unexplained(d, c, now)) {
                from = c->from;
                end_flood(d, c, now);
                has_cut = true;
            } else if (c->is_strangers) {
                bool has_noise = rpc_account_has_noise(&c->account, now);
                uint64_t ns = has_noise ? STRANGERS_NOISE_NS : RPC_STRANGERS_LOOK_MS * NS_PER_MS;
                next_ns = now + ns < next_ns ? now + ns : next_ns;
            }
        }
        pthread_mutex_unlock(&d->lock);
        if (is_full && d->config.look)
            d->config.look(d->config.user);
        d->look_ns = next_ns;
    }
    if (has_cut)
        warn(d, from, UNEXPLAINED);
    return (int)((d->look_ns - now) / NS_PER_MS) + 1;
}

struct rpc_door_stats rpc_door_stats(struct rpc_door *d)
{
    pthread_mutex_lock(&d->lock);
    struct rpc_door_stats stats = d->stats;
    stats.n_open = d->n_open;
    pthread_mutex_unlock(&d->lock);
    stats.n_waiting = atomic_load(&d->n_waiting);
    return stats;
}

/* -------------------------------------------------------------------- waiting */

static void newcomer_free(struct rpc_door *d, struct newcomer *w, bool closes)
{
    if (w->is_held) {
        TAILQ_REMOVE(&d->held, w, in_door);
        d->n_held--;
    } else {
        TAILQ_REMOVE(&d->waiting, w, in_door);
        atomic_fetch_sub(&d->n_waiting, 1);
    }
    epoll_ctl(d->epoll_fd, EPOLL_CTL_DEL, w->fd, NULL);
    if (closes && w->tls)
        rpc_tls_drop(w->tls);
    if (closes)
        close(w->fd);
    free(w);
}

static void count(struct rpc_door *d, uint64_t *n)
{
    pthread_mutex_lock(&d->lock);
    ++*n;
    pthread_mutex_unlock(&d->lock);
}

static void drop_late(struct rpc_door *d, struct newcomer *w)
{
    count(d, &d->stats.n_late);
    newcomer_free(d, w, true);
}

/* Keeps it until fewer connections of its address are new. False: they are few enough. */
static bool hold(struct rpc_door *d, struct newcomer *w)
{
    pthread_mutex_lock(&d->lock);
    bool are_many = are_many_new(d, w->from);
    pthread_mutex_unlock(&d->lock);
    if (!are_many)
        return false;
    uint32_t n = 0;
    const struct newcomer *other;
    TAILQ_FOREACH (other, &d->held, in_door)
        n += other->from.key == w->from.key;
    if (n >= RPC_HELD_MOST || atomic_load(&d->n_open) + d->n_held >= d->config.max_connections) {
        count(d, &d->stats.n_refused);
        warn(d, w->from, "connection refused: too many of its address are new, and held");
        newcomer_free(d, w, true);
        return true;
    }
    TAILQ_REMOVE(&d->waiting, w, in_door);
    atomic_fetch_sub(&d->n_waiting, 1);
    TAILQ_INSERT_TAIL(&d->held, w, in_door);
    d->n_held++;
    w->is_held = true;
    /* It is told again if its client has left meanwhile. */
    struct epoll_event e = {.events = EPOLLRDHUP | EPOLLET, .data.ptr = w};
    epoll_ctl(d->epoll_fd, EPOLL_CTL_MOD, w->fd, &e);
    return true;
}

/* Something was heard of a connection that is held. */
static void on_held(struct rpc_door *d, struct newcomer *w)
{
    if (rpc_flow_is_open(w->fd))
        return;
    pthread_mutex_lock(&d->lock);
    unused(d, w->from, RPC_WASTE_HELD, clock_now(&d->clock));
    pthread_mutex_unlock(&d->lock);
    newcomer_free(d, w, true);
}

static void enter(struct rpc_door *d, struct newcomer *w)
{
    struct newcomer it = *w;
    newcomer_free(d, w, false);
    hand_on(d, &it);
}

/* Hands on those that are held no longer, if it is time to look; returns ms until it is the next time, or -1:
 * none is held. */
static int admit_held(struct rpc_door *d)
{
    uint64_t now = clock_now(&d->clock);
    struct rpc_origin full = {0}; /* where the last one came from that is still held */
    struct newcomer *w = TAILQ_FIRST(&d->held), *next;
    if (!w)
        return -1;
    if (now < d->held_ns)
        return (int)((d->held_ns - now) / NS_PER_MS) + 1;
    for (int n_looks = 0; w && n_looks < HELD_LOOKS; w = next) {
        next = TAILQ_NEXT(w, in_door);
        if (w->until_ns > now && w->from.key == full.key)
            continue;
        n_looks++;
        pthread_mutex_lock(&d->lock);
        bool waits = rpc_senders_must_wait(&d->senders, w->from, now);
        bool stays = !waits && w->until_ns > now && are_many_new(d, w->from);
        d->stats.n_refused += waits;
        pthread_mutex_unlock(&d->lock);
        if (waits)
            newcomer_free(d, w, true);
        else if (stays)
            full = w->from;
        else
            enter(d, w);
    }
    d->held_ns = now + HELD_MS * NS_PER_MS;
    return HELD_MS;
}

/* Looks at the first bytes without taking them: the server reads them once more. Returns their number; 0:
 * none yet; -1: none will come. */
static int look_at(struct rpc_door *d, struct newcomer *w, char bytes[RPC_PREFACE_MOST])
{
    char why[64];
    int n = 0;
    if (w->tls) {
        enum rpc_tls_step step = rpc_tls_greet(w->tls, bytes, RPC_PREFACE_MOST, &n, why);
        if (step == RPC_TLS_FAILED)
            log_limited(d->config.log, LOG_INFO, "handshake of TLS failed address=%s why='%s'", d->address, why);
        return step == RPC_TLS_FAILED ? -1 : n;
    }
    n = (int)recv(w->fd, bytes, RPC_PREFACE_MOST, MSG_PEEK | MSG_DONTWAIT);
    return n > 0 ? n : n < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : -1;
}

/* False: too few bytes have come. */
static bool on_bytes(struct rpc_door *d, struct newcomer *w)
{
    char bytes[RPC_PREFACE_MOST];
    const char *preface = d->config.preface ? d->config.preface : "";
    int n = look_at(d, w, bytes), n_preface = (int)strlen(preface);
    if (!n)
        return false;
    if (n < 0 || memcmp(bytes, preface, (size_t)(n < n_preface ? n : n_preface)) != 0) {
        count(d, &d->stats.n_foreign);
        newcomer_free(d, w, true);
        return true;
    }
    if (n < n_preface && !w->tls) /* what a record of TLS has is all that can be seen; gRPC looks at the rest */
        return false;
    if (!hold(d, w))
        enter(d, w);
    return true;
}

static void set_options(const struct rpc_door *d, int fd)
{
    int on = 1, frozen = (int)d->config.frozen_ms, unsent = (int)d->config.max_unsent_bytes;
    if (d->path)
        return;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &frozen, sizeof(frozen));
    if (unsent)
        setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof(unsent));
}

static void accepted(struct rpc_door *d, int fd, const struct sockaddr_storage *from)
{
    bool is_trusted = rpc_networks_have(&d->trusted, from);
    const struct rpc_origin origin = is_trusted ? (struct rpc_origin){0} : rpc_origin_of(from);
    const struct linger at_once = {1, 0};
    count(d, &d->stats.n_accepted);
    if (must_wait(d, origin)) {
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once)); /* nothing of it stays in the kernel */
        close(fd);
        return;
    }
    if (atomic_load(&d->n_waiting) >= RPC_WAITING_MAX) { /* those who speak at once never wait that long */
        warn(d, TAILQ_FIRST(&d->waiting)->from, "silent connection dropped: too many wait");
        drop_late(d, TAILQ_FIRST(&d->waiting));
    }
    set_options(d, fd);
    pthread_mutex_lock(&d->lock);
    bool is_narrow = is_stranger(d, origin);
    pthread_mutex_unlock(&d->lock);
    if (is_narrow)
        narrow(fd);
    struct newcomer *w = mem_zalloc(sizeof(*w));
    *w = (struct newcomer){.fd = fd,
                           .from = origin,
                           .is_trusted = is_trusted,
                           .is_narrow = is_narrow,
                           .until_ns = clock_now(&d->clock) + RPC_HANDSHAKE_MS * NS_PER_MS};
    TAILQ_INSERT_TAIL(&d->waiting, w, in_door);
    atomic_fetch_add(&d->n_waiting, 1);
    if (d->config.tls)
        w->tls = rpc_tls_accept(d->config.tls, fd);
    /* Edge-triggered: a part of the preface must not wake the thread again and again. */
    uint32_t writes = w->tls ? EPOLLOUT : 0;
    struct epoll_event e = {.events = EPOLLIN | EPOLLRDHUP | EPOLLET | writes, .data.ptr = w};
    epoll_ctl(d->epoll_fd, EPOLL_CTL_ADD, fd, &e);
}

/* ------------------------------------------------------------------ accepting */

static int accept_one(int listener, struct sockaddr_storage *from)
{
    socklen_t len = sizeof(*from);
    *from = (struct sockaddr_storage){0};
    return accept4(listener, (struct sockaddr *)from, &len, SOCK_CLOEXEC | SOCK_NONBLOCK);
}

static void keep_spare(struct rpc_door *d)
{
    if (d->spare_fd < 0)
        d->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

/* No descriptor is left: drops a silent connection, or one that is held, so that the new one gets its
 * descriptor. If there is none, closes an idle one for those that come later, and refuses the new one by the
 * spare descriptor. False: no connection waits, or even that failed. */
static bool refuse_one(struct rpc_door *d, int listener)
{
    struct sockaddr_storage from;
    warn(d, (struct rpc_origin){0}, "no descriptor is left for a connection");
    struct newcomer *w = TAILQ_EMPTY(&d->waiting) ? TAILQ_LAST(&d->held, newcomers) : TAILQ_FIRST(&d->waiting);
    if (w) {
        drop_late(d, w);
        return true;
    }
    if (d->spare_fd >= 0)
        close(d->spare_fd);
    d->spare_fd = -1;
    pthread_mutex_lock(&d->lock);
    close_idle(d, (struct rpc_origin){0});
    pthread_mutex_unlock(&d->lock);
    int fd = accept_one(listener, &from);
    if (fd >= 0)
        close(fd);
    keep_spare(d);
    return fd >= 0;
}

static void listen_for(struct rpc_door *d, uint32_t events)
{
    for (int i = 0; i < d->n_listeners; i++) {
        struct epoll_event e = {.events = events, .data.ptr = &d->listeners[i]};
        epoll_ctl(d->epoll_fd, EPOLL_CTL_MOD, d->listeners[i], &e);
    }
}

static void take_accepts(struct rpc_door *d, int listener)
{
    keep_spare(d);
    for (int i = 0; i < ACCEPTS_A_TURN; i++) {
        struct sockaddr_storage from;
        int fd = accept_one(listener, &from);
        if (fd >= 0) {
            accepted(d, fd, &from);
            continue;
        }
        int why = errno;
        if (why == EINTR || why == ECONNABORTED || ((why == EMFILE || why == ENFILE) && refuse_one(d, listener)))
            continue;
        if (why != EAGAIN && why != EWOULDBLOCK) { /* a connection may wait that can't be accepted */
            listen_for(d, 0);
            d->resume_ns = clock_now(&d->clock) + PAUSE_MS * NS_PER_MS;
        }
        break;
    }
}

/* Drops connections that were silent for too long; returns ms until the next one is late, or -1. */
static int drop_silent(struct rpc_door *d)
{
    uint64_t now = clock_now(&d->clock);
    struct newcomer *w;
    while ((w = TAILQ_FIRST(&d->waiting)) && w->until_ns <= now)
        if (!on_bytes(d, w)) /* it may have spoken while this process stood still */
            drop_late(d, w);
    if (d->resume_ns && d->resume_ns <= now) {
        d->resume_ns = 0;
        listen_for(d, EPOLLIN);
    }
    if (d->resume_ns)
        return PAUSE_MS;
    return w ? (int)((w->until_ns - now) / NS_PER_MS) + 1 : -1;
}

/* What is done once a second, if it is due; returns ms until it is due next. */
static int tick(struct rpc_door *d)
{
    uint64_t now = clock_now(&d->clock);
    if (now >= d->tick_ns) {
        pthread_mutex_lock(&d->lock);
        sweep(d);
        pthread_mutex_unlock(&d->lock);
        if (d->config.tls)
            rpc_tls_refresh(d->config.tls);
        if (d->config.tick)
            d->config.tick(d->config.user);
        d->tick_ns = now + NS_PER_S;
    }
    return (int)((d->tick_ns - now) / NS_PER_MS) + 1;
}

static bool is_listener(const struct rpc_door *d, const void *p)
{
    return (const int *)p >= d->listeners && (const int *)p < d->listeners + d->n_listeners;
}

/* One event a turn: handling one may free the connection of another. */
static void *run(void *arg)
{
    struct rpc_door *d = arg;
    while (!atomic_load(&d->stop)) {
        struct epoll_event e;
        unsigned silent_ms = (unsigned)drop_silent(d), wait_ms = (unsigned)tick(d);
        unsigned look_ms = (unsigned)look_at_flows(d), held_ms = (unsigned)admit_held(d); /* -1 is the largest */
        wait_ms = held_ms < wait_ms ? held_ms : wait_ms;
        wait_ms = silent_ms < wait_ms ? silent_ms : wait_ms;
        wait_ms = look_ms < wait_ms ? look_ms : wait_ms;
        if (epoll_wait(d->epoll_fd, &e, 1, (int)wait_ms) < 1 || e.data.ptr == d)
            continue;
        if (is_listener(d, e.data.ptr))
            take_accepts(d, *(int *)e.data.ptr);
        else if (((struct newcomer *)e.data.ptr)->is_held)
            on_held(d, e.data.ptr);
        else
            on_bytes(d, e.data.ptr);
    }
    return NULL;
}

/* ------------------------------------------------------------- open and close */

static enum td_status bind_one(struct rpc_door *d, const struct sockaddr *to, socklen_t len, struct td_error *e)
{
    int on = 1, off = 0, fd = socket(to->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd >= 0 && to->sa_family != AF_UNIX)
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (fd >= 0 && to->sa_family == AF_INET6)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    bool is_bound = fd >= 0 && !bind(fd, to, len);
    if (is_bound && to->sa_family == AF_UNIX && d->config.is_private) /* before anybody can connect */
        is_bound = !chmod(((const struct sockaddr_un *)to)->sun_path, 0600);
    if (is_bound && !listen(fd, BACKLOG)) {
        d->listeners[d->n_listeners++] = fd;
        return TD_OK;
    }
    enum td_status s = td_fail(e, TD_ERR_IO, "listen: cannot bind %s: %s", d->config.listen, strerror(errno));
    if (fd >= 0)
        close(fd);
    return s;
}

/* Whether a process listens there. */
static bool is_in_use(const struct sockaddr_un *to)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    bool in_use = fd >= 0 && (!connect(fd, (const struct sockaddr *)to, sizeof(*to)) || errno == EAGAIN);
    if (fd >= 0)
        close(fd);
    return in_use;
}

static enum td_status bind_unix(struct rpc_door *d, const char *path, struct td_error *e)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    struct stat st;
    if (!*path || strlen(path) >= sizeof(to.sun_path))
        return td_fail(e, TD_ERR_INVALID, "listen: %s: a path of 1 to %zu bytes is needed", d->config.listen,
                       sizeof(to.sun_path) - 1);
    memcpy(to.sun_path, path, strlen(path));
    bool is_socket = !lstat(path, &st) && S_ISSOCK(st.st_mode);
    if (is_socket && is_in_use(&to))
        return td_fail(e, TD_ERR_IO, "listen: cannot bind %s: another process listens there", d->config.listen);
    if (is_socket) /* left by a process that was killed */
        unlink(path);
    enum td_status s = bind_one(d, (struct sockaddr *)&to, sizeof(to), e);
    if (!s)
        d->path = mem_strdup(path);
    return s;
}

static void set_port(struct sockaddr *a, in_port_t port)
{
    if (a->sa_family == AF_INET6)
        ((struct sockaddr_in6 *)a)->sin6_port = port;
    else
        ((struct sockaddr_in *)a)->sin_port = port;
}

static in_port_t port_of(int fd)
{
    struct sockaddr_storage a;
    socklen_t len = sizeof(a);
    if (getsockname(fd, (struct sockaddr *)&a, &len))
        return 0;
    return a.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&a)->sin6_port : ((struct sockaddr_in *)&a)->sin_port;
}

/* Binds each address of the name; with port 0 all get the port that the system picks for the first. */
static enum td_status bind_host(struct rpc_door *d, const char *host, const char *port, struct td_error *e)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *found = NULL;
    int why = getaddrinfo(*host ? host : NULL, port, &hints, &found);
    if (why)
        return td_fail(e, TD_ERR_IO, "listen: cannot bind %s: %s", d->config.listen, gai_strerror(why));
    enum td_status s = TD_ERR_IO;
    for (int wants_v6 = 1; wants_v6 >= 0; wants_v6--) /* "every address" of IPv6 has those of IPv4 in it */
        for (const struct addrinfo *a = found; a && d->n_listeners < LISTENERS_MAX; a = a->ai_next) {
            if ((a->ai_family == AF_INET6) != wants_v6 || (!*host && d->n_listeners))
                continue;
            if (d->n_listeners)
                set_port(a->ai_addr, port_of(d->listeners[0]));
            enum td_status one = bind_one(d, a->ai_addr, a->ai_addrlen, e);
            s = d->n_listeners ? TD_OK : one;
        }
    freeaddrinfo(found);
    return s;
}

static enum td_status bind_all(struct rpc_door *d, struct td_error *e)
{
    const char *listen = d->config.listen, *port;
    char host[HOST_BYTES];
    struct bytes address = {0};
    if (!strncmp(listen, "unix:", 5)) {
        d->address = mem_strdup(listen);
        return bind_unix(d, listen + 5, e);
    }
    if (host_port_split(listen, host, &port, NULL))
        return td_fail(e, TD_ERR_INVALID, "listen: %s is neither HOST:PORT nor unix:/path", listen);
    bool is_any = !*host || !strcmp(host, "*");
    enum td_status s = bind_host(d, is_any ? "" : host, port, e);
    if (s)
        return s;
    bytes_printf(&address, "%.*s:%u", is_any ? 4 : (int)(port - listen) - 1, is_any ? "[::]" : listen,
                 ntohs(port_of(d->listeners[0])));
    d->address = address.data;
    return TD_OK;
}

/* Half of the descriptors, because calls to others, files and the program itself need some, too. */
static void fill_bounds(struct rpc_door_config *c)
{
    struct rlimit files = {1024, 1024};
    getrlimit(RLIMIT_NOFILE, &files);
    uint64_t half = files.rlim_cur / 2;
    if (!c->max_connections)
        c->max_connections = half < CONNECTIONS_LEAST  ? CONNECTIONS_LEAST
                             : half > CONNECTIONS_MOST ? CONNECTIONS_MOST
                                                       : (uint32_t)half;
    if (!c->max_per_address)
        c->max_per_address = c->max_connections / SHARE_OF_ADDRESS + 1;
}

static void watch(struct rpc_door *d, int fd, void *what)
{
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = what};
    epoll_ctl(d->epoll_fd, EPOLL_CTL_ADD, fd, &e);
}

enum td_status rpc_door_open(const struct rpc_door_config *config, struct rpc_door **out, struct td_error *error_out)
{
    process_raise_file_limit();
    struct rpc_door *d = mem_zalloc(sizeof(*d));
    d->config = *config;
    fill_bounds(&d->config);
    clock_init_real(&d->clock);
    TAILQ_INIT(&d->waiting);
    TAILQ_INIT(&d->held);
    pthread_mutex_init(&d->lock, NULL);
    d->cap_connections = CONNECTIONS_LEAST;
    d->connections = mem_array(d->cap_connections, sizeof(*d->connections));
    d->spare_fd = -1;
    keep_spare(d);
    d->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    d->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    enum td_status s = rpc_networks_read("--trusted-proxies", config->trusted_proxies, &d->trusted, error_out);
    if (!s && (d->epoll_fd < 0 || d->wake_fd < 0))
        s = td_fail(error_out, TD_ERR_IO, "no descriptor for a server");
    if (!s)
        s = bind_all(d, error_out);
    if (s) {
        rpc_door_close(d);
        return s;
    }
    watch(d, d->wake_fd, d);
    for (int i = 0; i < d->n_listeners; i++)
        watch(d, d->listeners[i], &d->listeners[i]);
    *out = d;
    return TD_OK;
}

void rpc_door_start(struct rpc_door *d)
{
    if (d->config.tls)
        rpc_tls_start(d->config.tls);
    d->thread = thread_start("rpc-accept", run, d);
    d->is_running = true;
}

void rpc_door_stop(struct rpc_door *d)
{
    uint64_t one = 1;
    atomic_store(&d->stop, true);
    if (d->is_running) {
        if (write(d->wake_fd, &one, sizeof(one)) < 0)
            log_error(d->config.log, "the accepting thread can't be woken");
        pthread_join(d->thread, NULL);
        d->is_running = false;
    }
    struct newcomer *w;
    while ((w = TAILQ_FIRST(&d->waiting)) || (w = TAILQ_FIRST(&d->held)))
        newcomer_free(d, w, true);
    for (int i = 0; i < d->n_listeners; i++)
        close(d->listeners[i]);
    d->n_listeners = 0;
    if (d->path)
        unlink(d->path);
    free(d->path);
    d->path = NULL;
}

void rpc_door_close(struct rpc_door *d)
{
    if (!d)
        return;
    rpc_door_stop(d);
    rpc_tls_close(d->config.tls);
    const int fds[] = {d->spare_fd, d->wake_fd, d->epoll_fd};
    for (size_t i = 0; i < sizeof(fds) / sizeof(fds[0]); i++)
        if (fds[i] >= 0)
            close(fds[i]);
    pthread_mutex_destroy(&d->lock);
    rpc_networks_free(&d->trusted);
    free(d->connections);
    free(d->address);
    free(d);
}

const char *rpc_door_address(const struct rpc_door *d)
{
    return d->address;
}
