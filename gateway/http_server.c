/*
 * Connections of the HTTP server (http_server.h).
 *
 *              whole request                     given back, all bytes taken
 *     READING -----------------> ANSWERING ------------------------------------> READING (kept alive)
 *        |  can't be read: answered here, then  \                         \
 *        +--------------------------------------> CLOSING (what still comes is dropped, at most LINGER_NS)
 *
 * The door hands a connection to one of the loops, which owns it from then on. A loop's thread reads; whoever
 * answers writes, under the connection's lock, and what the socket does not take waits in `out` for the
 * loop's thread. A lock, not a queue: a token that had to be handed to the loop would cost a wake-up.
 *
 * A request is given back by mail to the loop, as the last thing that the answering thread does with the
 * connection; only then may the loop free it. (A request that is answered inside on_request needs no mail.)
 *
 * Descriptors are edge-triggered and watched for everything once, so that a connection costs one epoll_ctl in
 * its life. CLOSING exists because closing a socket with unread bytes makes the kernel drop what the client
 * has not read yet.
 */
#include "gateway/http_server.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/list.h"
#include "base/queue.h"
#include "base/thread.h"
#include "proto/rpc/rpc_accept.h"
#include "proto/rpc/rpc_tls.h"

enum { EVENTS_A_TURN = 64, PIECE_BYTES = 16384, FULL_BYTES = 32768 };
#define LINGER_NS NS_PER_S

enum http_state { HTTP_READING, HTTP_ANSWERING, HTTP_CLOSING };

struct http_conn {
    struct mail mail; /* first: a new connection, or a request that is given back */
    LIST_ENTRY(http_conn) in_loop;
    struct http_loop *loop;
    int fd;
    void *user;
    /* Used by the loop's thread; while ANSWERING the request in reader may be looked at by its user. */
    enum http_state state;
    struct http_reader reader;
    struct bytes kept;      /* read, and belongs to the next request */
    uint64_t door_number;   /* of the request's call at the door; 0: none */
    uint64_t counted_bytes; /* of server.read_bytes */
    uint64_t since_ns;      /* in this state */
    bool is_known, is_readable, hangs_up, is_returned, has_continued;
    pthread_mutex_t lock; /* guards the rest; see the note above */
    struct bytes out;     /* not taken by the socket yet, from out_at on */
    size_t out_at;
    uint64_t wrote_ns; /* the socket took bytes, or out was empty */
    const char *filler;
    bool is_stream, is_chunked, closes; /* of the answer; closes: the connection ends after it */
    bool in_request;                    /* on_request runs */
    bool is_ended;                      /* by its user */
    bool is_told, is_broken;            /* on_gone was called; the socket takes no more */
    bool is_full;                       /* http_write() said false */
};

struct http_loop {
    struct http_server *server;
    int epoll_fd;
    struct mailbox mailbox;
    pthread_t thread;
    bool is_running;
    LIST_HEAD(, http_conn) conns;
    uint64_t tick_ns;
    atomic_uint n_turns;
    char scratch[PIECE_BYTES];
};

struct http_server {
    struct http_server_config config;
    struct clock clock;
    struct rpc_door *door;
    struct http_loop *loops;
    uint32_t n_loops, next_loop; /* next_loop: used by the door's thread */
    atomic_bool drains, stop;
    _Atomic uint64_t read_bytes, n_requests, n_refused, n_gone, n_stalled;
};

static uint64_t now_of(const struct http_conn *c)
{
    return clock_now(&c->loop->server->clock);
}

static void set_state(struct http_conn *c, enum http_state state)
{
    assert(state != HTTP_READING || c->state == HTTP_ANSWERING);
    assert(state != HTTP_CLOSING || c->state == HTTP_ANSWERING);
    c->state = state;
    c->since_ns = now_of(c);
}

/* -------------------------------------------------------------------- writing (under the lock) */

static bool has_unsent(const struct http_conn *c)
{
    return c->out_at < c->out.len;
}

static void break_off(struct http_conn *c)
{
    c->is_broken = true;
    c->out_at = 0;
    bytes_free(&c->out);
    shutdown(c->fd, SHUT_RDWR); /* wakes the loop's thread, if this is another one */
}

/* What of iov the socket takes; the rest is kept. */
static void put(struct http_conn *c, struct iovec *iov, size_t n)
{
    size_t taken = 0;
    if (c->is_broken)
        return;
    if (!has_unsent(c)) {
        const struct msghdr m = {.msg_iov = iov, .msg_iovlen = n};
        ssize_t sent = sendmsg(c->fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno != EAGAIN && errno != EINTR) {
            break_off(c);
            return;
        }
        taken = sent > 0 ? (size_t)sent : 0;
        c->wrote_ns = now_of(c);
    }
    for (size_t i = 0; i < n; i++) {
        size_t skip = taken < iov[i].iov_len ? taken : iov[i].iov_len;
        if (skip < iov[i].iov_len)
            bytes_append(&c->out, (char *)iov[i].iov_base + skip, iov[i].iov_len - skip);
        taken -= skip;
    }
}

static void put_text(struct http_conn *c, const void *data, size_t n)
{
    struct iovec iov = {(void *)(uintptr_t)data, n};
    put(c, &iov, 1);
}

static void put_chunk(struct http_conn *c, const void *data, size_t n)
{
    char size[24];
    struct iovec iov[3] = {{size, 0}, {(void *)(uintptr_t)data, n}, {(char *)(uintptr_t) "\r\n", 2}};
    iov[0].iov_len = (size_t)snprintf(size, sizeof(size), "%zx\r\n", n);
    if (!n) /* the last one ends the body */
        return;
    if (c->is_chunked)
        put(c, iov, 3);
    else
        put(c, &iov[1], 1);
}

static void flush(struct http_conn *c)
{
    ssize_t sent = 1;
    while (has_unsent(c) && sent > 0) {
        sent = send(c->fd, c->out.data + c->out_at, c->out.len - c->out_at, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) {
            c->out_at += (size_t)sent;
            c->wrote_ns = now_of(c);
        } else if (errno == EINTR) {
            sent = 1;
        } else if (errno != EAGAIN) {
            break_off(c);
        }
    }
    if (has_unsent(c) || c->is_broken)
        return;
    c->out_at = 0;
    bytes_free(&c->out);
    if (c->is_full && !c->is_ended && !c->is_told)
        c->loop->server->config.on_drained(c);
    c->is_full = false;
}

static void put_head(struct http_conn *c, int status, const char *headers, const char *framing)
{
    struct bytes head = {0};
    char date[64];
    time_t now = time(NULL);
    struct tm tm;
    strftime(date, sizeof(date), "%a, %d %b %Y %H:%M:%S GMT", gmtime_r(&now, &tm));
    bytes_printf(&head, "HTTP/1.1 %d %s\r\nDate: %s\r\n%s%s%s\r\n", status, http_status_str((enum http_status)status),
                 date, headers ? headers : "", framing, c->closes ? "Connection: close\r\n" : "");
    put_text(c, head.data, head.len);
    bytes_free(&head);
}

static void put_answer(struct http_conn *c, int status, const char *headers, const void *body, size_t n)
{
    char framing[48];
    snprintf(framing, sizeof(framing), "Content-Length: %zu\r\n", n);
    put_head(c, status, headers, framing);
    if (n && strcmp(http_reader_method(&c->reader), "HEAD"))
        put_text(c, body, n);
}

/* -------------------------------------------------------------------- an answer, by any thread */

/* Gives the request back: the connection may not be used after this. */
static void give_back(struct http_conn *c)
{
    bool needs_mail = !c->in_request;
    struct mailbox *box = &c->loop->mailbox;
    c->is_ended = true;
    pthread_mutex_unlock(&c->lock);
    if (needs_mail)
        mailbox_push(box, &c->mail);
}

void http_answer(struct http_conn *c, int status, const char *headers, const void *body, size_t n)
{
    pthread_mutex_lock(&c->lock);
    put_answer(c, status, headers, body, n);
    give_back(c);
}

void http_begin(struct http_conn *c, int status, const char *headers, const char *filler)
{
    pthread_mutex_lock(&c->lock);
    c->is_chunked = !http_reader_is_old(&c->reader);
    c->closes |= !c->is_chunked;
    c->is_stream = true;
    c->filler = filler;
    put_head(c, status, headers, c->is_chunked ? "Transfer-Encoding: chunked\r\n" : "");
    pthread_mutex_unlock(&c->lock);
}

bool http_write(struct http_conn *c, const void *data, size_t n)
{
    pthread_mutex_lock(&c->lock);
    put_chunk(c, data, n);
    c->is_full |= c->out.len - c->out_at > FULL_BYTES;
    bool is_full = c->is_full;
    pthread_mutex_unlock(&c->lock);
    return !is_full;
}

void http_end(struct http_conn *c)
{
    pthread_mutex_lock(&c->lock);
    if (c->is_chunked)
        put_text(c, "0\r\n\r\n", 5);
    give_back(c);
}

/* -------------------------------------------------------------------- a request */

void http_set_user(struct http_conn *c, void *user)
{
    c->user = user;
}

void *http_user(const struct http_conn *c)
{
    return c->user;
}

const char *http_method(const struct http_conn *c)
{
    return http_reader_method(&c->reader);
}

const char *http_target(const struct http_conn *c)
{
    return c->reader.target.data;
}

const char *http_header(const struct http_conn *c, const char *name)
{
    return http_reader_header(&c->reader, name);
}

const struct bytes *http_body(const struct http_conn *c)
{
    return &c->reader.body;
}

void http_free_body(struct http_conn *c)
{
    bytes_free(&c->reader.body);
}

/* -------------------------------------------------------------------- a connection, by its loop */

static void conn_free(struct http_conn *c)
{
    struct http_server *s = c->loop->server;
    if (c->is_known)
        LIST_REMOVE(c, in_loop);
    atomic_fetch_sub(&s->read_bytes, c->counted_bytes);
    close(c->fd);
    http_reader_free(&c->reader);
    bytes_free(&c->kept);
    bytes_free(&c->out);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

/* Counts the bytes of the request that are here. False: all connections together have too many. */
static bool count_bytes(struct http_conn *c)
{
    struct http_server *s = c->loop->server;
    const struct http_reader *r = &c->reader;
    uint64_t have = r->target.len + r->headers.len + r->body.len, before = c->counted_bytes;
    c->counted_bytes = have;
    return atomic_fetch_add(&s->read_bytes, have - before) + (have - before) <= s->config.max_read_bytes ||
           have <= before;
}

/* Answers a request that its user never sees, and ends the connection. */
static void refuse(struct http_conn *c, int status, const char *why)
{
    struct http_server *s = c->loop->server;
    struct bytes body = {0};
    s->config.describe(c->reader.target.len ? c->reader.target.data : "", status, why, &body);
    atomic_fetch_add(&s->n_refused, 1);
    log_debug(s->config.log, "request refused status=%d why='%s'", status, why);
    set_state(c, HTTP_ANSWERING);
    pthread_mutex_lock(&c->lock);
    c->closes = true;
    c->is_ended = true;
    put_answer(c, status,
               status == 429 ? "Content-Type: application/json\r\nRetry-After: 1\r\n"
                             : "Content-Type: application/json\r\n",
               body.data, body.len);
    pthread_mutex_unlock(&c->lock);
    c->is_returned = true;
    bytes_free(&body);
}

static void dispatch(struct http_conn *c)
{
    struct http_server *s = c->loop->server;
    if (atomic_load(&s->drains)) {
        refuse(c, 503, "this process is shutting down");
        return;
    }
    set_state(c, HTTP_ANSWERING);
    c->door_number = rpc_door_call_begin(s->door, c->fd);
    if (!c->door_number) /* closed there: a flood, or an idle one for others */
        c->hangs_up = true;
    atomic_fetch_add(&s->n_requests, 1);
    c->closes = !c->reader.keeps_alive;
    c->in_request = true;
    s->config.on_request(c, s->config.user);
    pthread_mutex_lock(&c->lock);
    c->in_request = false;
    c->is_returned = c->is_ended;
    pthread_mutex_unlock(&c->lock);
}

static void say_continue(struct http_conn *c)
{
    if (!c->reader.wants_continue || c->has_continued)
        return;
    c->has_continued = true;
    pthread_mutex_lock(&c->lock);
    put_text(c, "HTTP/1.1 100 Continue\r\n\r\n", 25);
    pthread_mutex_unlock(&c->lock);
}

/* Feeds bytes to the reader; those behind the request are kept. */
static void feed(struct http_conn *c, const char *data, size_t n)
{
    size_t used;
    if (!c->reader.has_begun)
        c->since_ns = now_of(c);
    enum http_step step = http_reader_feed(&c->reader, data, n, &used);
    if (step == HTTP_WHOLE && used < n)
        bytes_append(&c->kept, data + used, n - used);
    if (step == HTTP_REFUSED)
        refuse(c, c->reader.status, c->reader.why);
    else if (!count_bytes(c))
        refuse(c, 429, "too many bytes of requests are being read (max-read-bytes)");
    else if (step == HTTP_WHOLE)
        dispatch(c);
    else if (c->reader.has_head)
        say_continue(c);
}

/* False: nothing more can be done now, or the connection is freed. */
static bool go_on_reading(struct http_conn *c)
{
    if (c->kept.len) {
        struct bytes kept = c->kept;
        c->kept = (struct bytes){0};
        feed(c, kept.data, kept.len);
        bytes_free(&kept);
        return true;
    }
    if (!c->is_readable && !c->hangs_up)
        return false;
    ssize_t n = recv(c->fd, c->loop->scratch, PIECE_BYTES, MSG_DONTWAIT);
    if (n > 0) {
        feed(c, c->loop->scratch, (size_t)n);
        return true;
    }
    if (n < 0 && errno == EINTR)
        return true;
    if (n < 0 && errno == EAGAIN) {
        c->is_readable = false;
        if (!c->hangs_up)
            return false;
    }
    conn_free(c);
    return false;
}

/* The request is over: what comes next on this connection. False: it is freed. */
static bool after_answer(struct http_conn *c, bool is_broken)
{
    struct http_server *s = c->loop->server;
    bool is_young = c->is_told && now_of(c) - c->since_ns < RPC_YOUNG_MS * NS_PER_MS;
    if (c->door_number)
        rpc_door_call_end(s->door, c->fd, c->door_number, is_young ? RPC_WASTE_YOUNG : 0);
    c->door_number = 0;
    if (is_broken || c->hangs_up) {
        conn_free(c);
        return false;
    }
    atomic_fetch_sub(&s->read_bytes, c->counted_bytes);
    c->counted_bytes = 0;
    http_reader_next(&c->reader);
    bool closes = c->closes || atomic_load(&s->drains);
    if (closes)
        shutdown(c->fd, SHUT_WR);
    set_state(c, closes ? HTTP_CLOSING : HTTP_READING);
    c->is_returned = c->has_continued = false;
    c->is_ended = c->is_stream = c->is_chunked = c->is_full = false;
    c->filler = NULL;
    c->user = NULL;
    return true;
}

/* False: the answer is not over, or the connection is freed. */
static bool go_on_answering(struct http_conn *c)
{
    struct http_server *s = c->loop->server;
    pthread_mutex_lock(&c->lock);
    if ((c->hangs_up || c->is_broken) && !c->is_told && !c->is_ended) {
        c->is_told = true;
        atomic_fetch_add(&s->n_gone, 1);
        if (!c->is_broken)
            break_off(c);
        s->config.on_gone(c);
    }
    bool is_broken = c->is_broken, is_over = c->is_returned && (is_broken || c->hangs_up || !has_unsent(c));
    pthread_mutex_unlock(&c->lock);
    return is_over && after_answer(c, is_broken);
}

/* Drops what still comes after the last answer. */
static void go_on_closing(struct http_conn *c)
{
    ssize_t n = 1;
    while (n > 0)
        n = recv(c->fd, c->loop->scratch, PIECE_BYTES, MSG_DONTWAIT);
    if (!n || errno != EAGAIN)
        conn_free(c);
}

/* Does all that can be done now. May free the connection. */
static void advance(struct http_conn *c)
{
    bool goes_on = true;
    while (goes_on) {
        switch (c->state) {
        case HTTP_READING:
            goes_on = go_on_reading(c);
            break;
        case HTTP_ANSWERING:
            goes_on = go_on_answering(c);
            break;
        case HTTP_CLOSING:
            go_on_closing(c);
            return;
        }
    }
}

/* -------------------------------------------------------------------- loops */

static void on_events(struct http_conn *c, uint32_t events)
{
    c->is_readable |= (events & EPOLLIN) != 0;
    c->hangs_up |= (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
    if (events & EPOLLOUT) {
        pthread_mutex_lock(&c->lock);
        flush(c);
        pthread_mutex_unlock(&c->lock);
    }
    advance(c);
}

static void adopt(struct http_loop *l, struct http_conn *c)
{
    struct epoll_event e = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.ptr = c};
    c->is_known = true;
    c->since_ns = now_of(c);
    LIST_INSERT_HEAD(&l->conns, c, in_loop);
    if (epoll_ctl(l->epoll_fd, EPOLL_CTL_ADD, c->fd, &e)) {
        log_error(l->server->config.log, "a connection can't be watched error='%s'", strerror(errno));
        conn_free(c);
    }
}

static void take_mail(struct http_loop *l)
{
    struct mail *m = mailbox_take(&l->mailbox), *next;
    for (; m; m = next) {
        struct http_conn *c = (struct http_conn *)(void *)m;
        next = m->next;
        if (!c->is_known) {
            adopt(l, c);
            continue;
        }
        c->is_returned = true;
        advance(c);
    }
}

static uint64_t due(uint64_t since_ns, uint64_t ms)
{
    return since_ns + ms * NS_PER_MS;
}

/* True: the connection has changed and must go on. */
static bool tick_answer(struct http_conn *c, uint64_t now)
{
    struct http_server *s = c->loop->server;
    pthread_mutex_lock(&c->lock);
    bool is_stalled = !c->is_broken && has_unsent(c) && now > due(c->wrote_ns, s->config.stall_ms);
    if (is_stalled) {
        atomic_fetch_add(&s->n_stalled, 1);
        break_off(c);
    } else if (c->is_stream && !c->is_ended && c->filler && !has_unsent(c) &&
               now > due(c->wrote_ns, c->loop->server->config.filler_ms)) {
        put_chunk(c, c->filler, strlen(c->filler));
    }
    pthread_mutex_unlock(&c->lock);
    return is_stalled;
}

static void tick_conn(struct http_conn *c, uint64_t now)
{
    struct http_server *s = c->loop->server;
    bool is_idle = c->state == HTTP_READING && !c->reader.has_begun;
    if (is_idle && (now > due(c->since_ns, s->config.idle_ms) || atomic_load(&s->drains))) {
        conn_free(c);
    } else if (c->state == HTTP_READING && !is_idle && now > due(c->since_ns, s->config.request_ms)) {
        refuse(c, 408, "the request is not here in time (request-ms)");
        advance(c);
    } else if (c->state == HTTP_CLOSING && now > c->since_ns + LINGER_NS) {
        conn_free(c);
    } else if (c->state == HTTP_ANSWERING && tick_answer(c, now)) {
        advance(c);
    }
}

static void tick_loop(struct http_loop *l)
{
    struct http_conn *c, *next;
    uint64_t now = clock_now(&l->server->clock);
    if (now < l->tick_ns)
        return;
    /* After a pause of the process clients get the time again that they could not use. */
    uint64_t away = l->tick_ns && now > l->tick_ns + NS_PER_S ? now - l->tick_ns : 0;
    l->tick_ns = now + NS_PER_S;
    LIST_FOREACH_SAFE (c, &l->conns, in_loop, next) {
        c->since_ns += away;
        tick_conn(c, now);
    }
}

static void close_all(struct http_loop *l)
{
    struct http_conn *c;
    take_mail(l);
    while ((c = LIST_FIRST(&l->conns))) {
        assert(c->state != HTTP_ANSWERING || c->is_returned);
        if (c->door_number)
            rpc_door_call_end(l->server->door, c->fd, c->door_number, 0);
        conn_free(c);
    }
}

static void *run_loop(void *arg)
{
    struct http_loop *l = arg;
    struct http_server *s = l->server;
    while (!atomic_load(&s->stop)) {
        struct epoll_event events[EVENTS_A_TURN];
        uint64_t now = clock_now(&s->clock);
        int wait_ms = l->tick_ns > now ? (int)((l->tick_ns - now) / NS_PER_MS) + 1 : 0;
        int n = epoll_wait(l->epoll_fd, events, EVENTS_A_TURN, wait_ms);
        bool has_mail = false;
        /* Mail comes last: it may free a connection that is among the events. */
        for (int i = 0; i < n; i++) {
            has_mail |= !events[i].data.ptr;
            if (events[i].data.ptr)
                on_events(events[i].data.ptr, events[i].events);
        }
        if (has_mail)
            take_mail(l);
        tick_loop(l);
        atomic_fetch_add(&l->n_turns, 1);
    }
    close_all(l);
    return NULL;
}

/* -------------------------------------------------------------------- the server */

static void take_fd(void *user, int fd, bool is_local)
{
    (void)is_local;
    struct http_server *s = user;
    struct http_conn *c = mem_zalloc(sizeof(*c));
    c->loop = &s->loops[s->next_loop++ % s->n_loops];
    c->fd = fd;
    c->is_readable = true; /* the door has seen the first bytes */
    pthread_mutex_init(&c->lock, NULL);
    http_reader_init(&c->reader, &s->config.limits);
    mailbox_push(&c->loop->mailbox, &c->mail);
}

static void tick_server(void *user)
{
    struct http_server *s = user;
    mem_return_freed(clock_now(&s->clock));
}

static enum td_status open_door(struct http_server *s, struct td_error *e)
{
    const struct http_server_config *config = &s->config;
    struct rpc_tls *tls = NULL;
    if (config->tls && config->tls->cert && strncmp(config->listen, "unix:", 5)) {
        enum td_status status = rpc_tls_open(config->tls, "http/1.1", config->log, &tls, e);
        if (status)
            return status;
    }
    const struct rpc_door_config door = {.listen = config->listen,
                                         .tls = tls,
                                         .max_connections = config->max_connections,
                                         .max_per_address = config->max_per_address,
                                         .trusted_proxies = config->trusted_proxies,
                                         .frozen_ms = config->frozen_ms,
                                         .max_unsent_bytes = config->max_unsent_bytes,
                                         .log = config->log,
                                         .take = take_fd,
                                         .tick = tick_server,
                                         .user = s};
    return rpc_door_open(&door, &s->door, e);
}

static enum td_status open_loop(struct http_loop *l, struct td_error *e)
{
    struct epoll_event mail = {.events = EPOLLIN, .data.ptr = NULL};
    LIST_INIT(&l->conns);
    mailbox_init(&l->mailbox);
    l->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (l->epoll_fd < 0 || epoll_ctl(l->epoll_fd, EPOLL_CTL_ADD, mailbox_fd(&l->mailbox), &mail))
        return td_fail(e, TD_ERR_IO, "no descriptor for an HTTP server");
    return TD_OK;
}

enum td_status http_server_open(const struct http_server_config *config, struct http_server **out,
                                struct td_error *error_out)
{
    struct http_server *s = mem_zalloc(sizeof(*s));
    http_reader_setup();
    s->config = *config;
    clock_init_real(&s->clock);
    s->loops = mem_array(config->n_threads, sizeof(*s->loops));
    enum td_status status = TD_OK;
    while (!status && s->n_loops < config->n_threads) {
        s->loops[s->n_loops].server = s;
        status = open_loop(&s->loops[s->n_loops++], error_out);
    }
    if (!status)
        status = open_door(s, error_out);
    if (status) {
        http_server_close(s);
        return status;
    }
    for (uint32_t i = 0; i < s->n_loops; i++) {
        char name[16];
        snprintf(name, sizeof(name), "http-%u", i);
        s->loops[i].thread = thread_start(name, run_loop, &s->loops[i]);
        s->loops[i].is_running = true;
    }
    rpc_door_start(s->door);
    *out = s;
    return TD_OK;
}

const char *http_server_address(const struct http_server *s)
{
    return rpc_door_address(s->door);
}

struct http_server_stats http_server_stats(struct http_server *s)
{
    struct rpc_door_stats d = rpc_door_stats(s->door);
    return (struct http_server_stats){.connections = d.n_open,
                                      .requests = atomic_load(&s->n_requests),
                                      .refused = atomic_load(&s->n_refused),
                                      .connections_refused = d.n_refused,
                                      .connections_dropped = d.n_late + d.n_idle + d.n_foreign,
                                      .gone = atomic_load(&s->n_gone),
                                      .stalled = atomic_load(&s->n_stalled)};
}

static void wake(struct http_loop *l)
{
    uint64_t one = 1;
    if (write(mailbox_fd(&l->mailbox), &one, sizeof(one)) < 0)
        log_error(l->server->config.log, "a thread of HTTP can't be woken");
}

void http_server_drain(struct http_server *s)
{
    const struct timespec rest = {.tv_nsec = NS_PER_MS};
    rpc_door_stop(s->door);
    atomic_store(&s->drains, true);
    for (uint32_t i = 0; i < s->n_loops; i++) {
        uint32_t before = atomic_load(&s->loops[i].n_turns);
        wake(&s->loops[i]);
        while (atomic_load(&s->loops[i].n_turns) == before) /* the turn in which it may not have seen it */
            nanosleep(&rest, NULL);
    }
}

void http_server_close(struct http_server *s)
{
    if (!s)
        return;
    if (s->door)
        rpc_door_stop(s->door); /* no connection comes any more */
    atomic_store(&s->stop, true);
    for (uint32_t i = 0; i < s->n_loops; i++) {
        struct http_loop *l = &s->loops[i];
        if (l->is_running) {
            wake(l);
            pthread_join(l->thread, NULL);
        }
        if (l->epoll_fd >= 0)
            close(l->epoll_fd);
        mailbox_fini(&l->mailbox);
    }
    rpc_door_close(s->door);
    free(s->loops);
    free(s);
}
