#include "proto/rpc/rpc_tls.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/list.h"
#include "base/mem.h"
#include "base/thread.h"

enum { PIECE_BYTES = 16384, PIECES_A_TURN = 16, EVENTS_A_TURN = 64, FILES = 3, KEY_UPDATES_MOST = 64 };
#define LAST_BYTES_NS NS_PER_S /* how long what is unsent has at the end */
/* Between the begins of two turns. The tokens of a decode step are as many messages within less than a
 * millisecond: a turn for each of them costs more than encrypting them all. */
#define PACE_NS       (NS_PER_MS / 2)

struct side { /* one of a link's two descriptors */
    struct rpc_tls_link *link;
    int fd;
    bool is_readable; /* there may be something to read, or the end: an event said so */
    bool hangs_up;    /* the other end will send nothing more */
    bool wants_out;   /* events tell when it can be written to */
};

struct way {       /* one direction */
    uint8_t *kept; /* read, and not taken by the other side yet; NULL: nothing */
    int at, n;
    bool is_over; /* nothing follows */
};

struct rpc_tls_link {
    LIST_ENTRY(rpc_tls_link) in_tls;
    TAILQ_ENTRY(rpc_tls_link) in_ready;
    bool is_ready; /* has work left that no event will tell of */
    SSL *ssl;
    struct side outer, inner; /* the connection; our end of the pair */
    struct way in, out;       /* to gRPC; to the client */
    /* Changes of keys since the client's last content, of which KEY_UPDATES_MOST may come: each costs more
     * than it cost the client, who can make them beforehand. */
    uint32_t n_key_updates;
};

struct rpc_tls {
    const char *paths[FILES];   /* cert, key, ca (or NULL) */
    unsigned char protocol[16]; /* as ALPN sends it: its length, its name */
    struct stat seen[FILES];
    const struct log *log;
    SSL_CTX *context; /* used by the door's thread */
    struct clock clock;
    int epoll_fd, wake_fd;
    pthread_t thread;
    bool is_running;
    atomic_bool stop;
    pthread_mutex_t lock; /* a list of new links, not a queue: one thread fills it now and then */
    LIST_HEAD(, rpc_tls_link) fresh;
    /* Used by the thread only. */
    LIST_HEAD(, rpc_tls_link) links;
    TAILQ_HEAD(ready_links, rpc_tls_link) ready;
    uint8_t scratch[PIECE_BYTES];
};

/* ------------------------------------------------------------------ certificates */

static const char *reason(void)
{
    unsigned long code = ERR_peek_last_error();
    const char *text = code ? ERR_reason_error_string(code) : NULL;
    return text ? text : "not understood";
}

/* protocol: as ALPN sends it, its length first. */
static int choose_protocol(SSL *ssl, const unsigned char **out, unsigned char *n_out, const unsigned char *offered,
                           unsigned int n_offered, void *protocol)
{
    const unsigned char *p = protocol;
    (void)ssl;
    return SSL_select_next_proto((unsigned char **)(uintptr_t)out, n_out, p, 1u + *p, offered, n_offered) ==
                   OPENSSL_NPN_NEGOTIATED
               ? SSL_TLSEXT_ERR_OK
               : SSL_TLSEXT_ERR_ALERT_FATAL;
}

static enum td_status load(SSL_CTX *c, const char *cert, const char *key, const char *ca, struct td_error *e)
{
    ERR_clear_error();
    if (cert && SSL_CTX_use_certificate_chain_file(c, cert) != 1)
        return td_fail(e, TD_ERR_INVALID, "--tls-cert %s: %s", cert, reason());
    if (key && SSL_CTX_use_PrivateKey_file(c, key, SSL_FILETYPE_PEM) != 1)
        return td_fail(e, TD_ERR_INVALID, "--tls-key %s: %s", key, reason());
    if (key && SSL_CTX_check_private_key(c) != 1)
        return td_fail(e, TD_ERR_INVALID, "--tls-key %s: is not the key of --tls-cert %s", key, cert);
    if (ca && SSL_CTX_load_verify_file(c, ca) != 1)
        return td_fail(e, TD_ERR_INVALID, "--tls-ca %s: %s", ca, reason());
    return TD_OK;
}

static enum td_status make_context(struct rpc_tls *t, SSL_CTX **out, struct td_error *e)
{
    const char *const *paths = t->paths;
    SSL_CTX *c = SSL_CTX_new(TLS_server_method());
    if (!c)
        abort(); /* no memory */
    SSL_CTX_set_min_proto_version(c, TLS1_2_VERSION);
    SSL_CTX_set_options(c, SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION | SSL_OP_CIPHER_SERVER_PREFERENCE);
    SSL_CTX_set_mode(c, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_RELEASE_BUFFERS);
    SSL_CTX_set_session_cache_mode(c, SSL_SESS_CACHE_OFF); /* tickets, which cost no memory, stay */
    SSL_CTX_set_session_id_context(c, (const unsigned char *)"tandem", 6);
    SSL_CTX_set_alpn_select_cb(c, choose_protocol, t->protocol);
    enum td_status s = load(c, paths[0], paths[1], paths[2], e);
    if (s) {
        SSL_CTX_free(c);
        return s;
    }
    if (paths[2]) {
        /* A session that is resumed shows no certificate: an expired one would be good for ever. */
        SSL_CTX_set_options(c, SSL_OP_NO_TICKET);
        SSL_CTX_set_num_tickets(c, 0);
        SSL_CTX_set_verify(c, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
        SSL_CTX_set_client_CA_list(c, SSL_load_client_CA_file(paths[2]));
    }
    *out = c;
    return TD_OK;
}

enum td_status rpc_tls_check(const struct rpc_tls_files *f, bool is_member, struct td_error *e)
{
    if (!f->cert != !f->key)
        return td_fail(e, TD_ERR_INVALID, "--tls-%s: is missing; --tls-%s is given", f->cert ? "key" : "cert",
                       f->cert ? "cert" : "key");
    if (is_member && !f->cert != !f->ca)
        return td_fail(e, TD_ERR_INVALID, "--tls-%s: is missing; --tls-%s is given", f->ca ? "cert" : "ca",
                       f->ca ? "ca" : "cert");
    if (!f->cert && !f->ca)
        return TD_OK;
    SSL_CTX *c = SSL_CTX_new(TLS_method());
    if (!c)
        abort(); /* no memory */
    enum td_status s = load(c, f->cert, f->key, f->ca, e);
    SSL_CTX_free(c);
    return s;
}

static bool is_same(const struct stat *a, const struct stat *b)
{
    return a->st_ino == b->st_ino && a->st_size == b->st_size && a->st_mtim.tv_sec == b->st_mtim.tv_sec &&
           a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

/* Whether a file has changed since the last time. */
static bool look(struct rpc_tls *t)
{
    bool has_changed = false;
    for (int i = 0; i < FILES; i++) {
        struct stat st = {0};
        if (t->paths[i] && stat(t->paths[i], &st))
            st = (struct stat){0};
        has_changed |= !is_same(&st, &t->seen[i]);
        t->seen[i] = st;
    }
    return has_changed;
}

void rpc_tls_refresh(struct rpc_tls *t)
{
    SSL_CTX *fresh;
    struct td_error e;
    if (!look(t))
        return;
    if (make_context(t, &fresh, &e)) {
        log_error(t->log, "the certificates stay as they were: %s", e.text);
        return;
    }
    SSL_CTX_free(t->context);
    t->context = fresh;
    log_info(t->log, "certificates read again file=%s", t->paths[0]);
}

/* ---------------------------------------------------------------------- handshake */

static void on_record(int is_sent, int version, int type, const void *bytes, size_t n, SSL *ssl, void *link)
{
    (void)version, (void)ssl;
    struct rpc_tls_link *l = link;
    l->n_key_updates += !is_sent && type == SSL3_RT_HANDSHAKE && n && *(const uint8_t *)bytes == SSL3_MT_KEY_UPDATE;
}

struct rpc_tls_link *rpc_tls_accept(struct rpc_tls *t, int fd)
{
    struct rpc_tls_link *l = mem_zalloc(sizeof(*l));
    l->outer = (struct side){.link = l, .fd = fd};
    l->inner = (struct side){.link = l, .fd = -1};
    l->ssl = SSL_new(t->context);
    if (!l->ssl || SSL_set_fd(l->ssl, fd) != 1)
        abort(); /* no memory */
    SSL_set_accept_state(l->ssl);
    SSL_clear_mode(l->ssl, SSL_MODE_AUTO_RETRY); /* returns after each change of keys */
    SSL_set_msg_callback(l->ssl, on_record);
    SSL_set_msg_callback_arg(l->ssl, l);
    return l;
}

static void forget(struct way *w)
{
    free(w->kept);
    w->kept = NULL;
}

void rpc_tls_drop(struct rpc_tls_link *l)
{
    forget(&l->in);
    forget(&l->out);
    SSL_free(l->ssl);
    if (l->inner.fd >= 0)
        close(l->inner.fd);
    free(l);
}

/* Whether ssl waits for its descriptor; false: it has failed or has been closed. */
static bool waits(SSL *ssl, int result)
{
    int why = SSL_get_error(ssl, result);
    return why == SSL_ERROR_WANT_READ || why == SSL_ERROR_WANT_WRITE;
}

enum rpc_tls_step rpc_tls_greet(struct rpc_tls_link *l, char *out, int n_bytes, int *n_out, char why_out[64])
{
    ERR_clear_error();
    int n = SSL_peek(l->ssl, out, n_bytes); /* makes the handshake, too */
    if (n > 0) {
        *n_out = n;
        return RPC_TLS_SPEAKS;
    }
    bool is_flood = l->n_key_updates > KEY_UPDATES_MOST;
    if (waits(l->ssl, n) && !is_flood)
        return RPC_TLS_WAITS;
    snprintf(why_out, 64, "%s", is_flood ? "keys change without content" : ERR_peek_last_error() ? reason() : "closed");
    ERR_clear_error();
    return RPC_TLS_FAILED;
}

static void watch(struct rpc_tls *t, struct side *side, int operation)
{
    uint32_t out = side->wants_out ? EPOLLOUT : 0;
    struct epoll_event e = {.events = EPOLLIN | EPOLLRDHUP | EPOLLET | out, .data.ptr = side};
    epoll_ctl(t->epoll_fd, operation, side->fd, &e);
}

/* Only a side that blocks is watched for room: gRPC's end would tell each time that gRPC has read. Changing
 * what is watched tells of room that there is already. */
static void want_out(struct rpc_tls *t, struct side *side, bool wants)
{
    if (side->wants_out == wants)
        return;
    side->wants_out = wants;
    watch(t, side, EPOLL_CTL_MOD);
}

static void wake(struct rpc_tls *t)
{
    uint64_t one = 1;
    if (write(t->wake_fd, &one, sizeof(one)) < 0 && errno != EAGAIN)
        log_error(t->log, "the thread of TLS can't be woken");
}

int rpc_tls_hand_over(struct rpc_tls *t, struct rpc_tls_link *l, uint32_t max_unsent_bytes)
{
    int pair[2], unsent = (int)(max_unsent_bytes / 2); /* the kernel doubles it */
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair))
        return -1;
    if (unsent)
        setsockopt(pair[1], SOL_SOCKET, SO_SNDBUF, &unsent, sizeof(unsent));
    l->inner.fd = pair[0];
    /* One call reads a record, not two. Only from now on: a client that does not speak TLS learns it by the
     * reset for what was not read. */
    SSL_set_read_ahead(l->ssl, 1);
    pthread_mutex_lock(&t->lock);
    LIST_INSERT_HEAD(&t->fresh, l, in_tls);
    pthread_mutex_unlock(&t->lock);
    wake(t);
    return pair[1];
}

/* ------------------------------------------------------------------------ relay */

/* Each moves up to n bytes. 0: the descriptor is not ready; -1: the side has ended. */
static int read_outer(struct rpc_tls_link *l, uint8_t *bytes, int n)
{
    uint32_t before = l->n_key_updates;
    ERR_clear_error();
    int got = SSL_read(l->ssl, bytes, n); /* of one record: another may follow */
    l->outer.is_readable = got > 0 || l->n_key_updates != before;
    if (got > 0)
        l->n_key_updates = 0;
    return got > 0 ? got : waits(l->ssl, got) && l->n_key_updates <= KEY_UPDATES_MOST ? 0 : -1;
}

static int write_outer(struct rpc_tls_link *l, uint8_t *bytes, int n)
{
    ERR_clear_error();
    int done = SSL_write(l->ssl, bytes, n);
    return done > 0 ? done : waits(l->ssl, done) ? 0 : -1;
}

static int read_inner(struct rpc_tls_link *l, uint8_t *bytes, int n)
{
    ssize_t got;
    do
        got = read(l->inner.fd, bytes, (size_t)n);
    while (got < 0 && errno == EINTR);
    /* Less than asked for was all, and an event tells of more; but of an end that came with it none does. */
    l->inner.is_readable = got == n || (got > 0 && l->inner.hangs_up);
    return got > 0 ? (int)got : got < 0 && errno == EAGAIN ? 0 : -1;
}

static int write_inner(struct rpc_tls_link *l, uint8_t *bytes, int n)
{
    ssize_t done = send(l->inner.fd, bytes, (size_t)n, MSG_NOSIGNAL);
    return done >= 0 ? (int)done : errno == EAGAIN || errno == EINTR ? 0 : -1;
}

typedef int mover(struct rpc_tls_link *l, uint8_t *bytes, int n);

/* Writes what the direction has kept. True: something moved. */
static bool write_kept(struct rpc_tls_link *l, struct way *w, mover *writes)
{
    int done = writes(l, w->kept + w->at, w->n - w->at);
    w->at += done > 0 ? done : 0;
    if (done < 0) /* nobody takes it any more */
        l->in.is_over = l->out.is_over = true;
    if (done < 0 || w->at == w->n)
        forget(w);
    return done != 0;
}

/* Moves one piece. scratch has PIECE_BYTES; only what the other side does not take is kept, so that a
 * connection at rest has no buffer. True: something moved. */
static bool move(struct rpc_tls_link *l, struct way *w, const struct side *from, mover *reads, mover *writes,
                 uint8_t *scratch)
{
    if (w->kept)
        return write_kept(l, w, writes);
    if (w->is_over || !from->is_readable)
        return false;
    int n = reads(l, scratch, PIECE_BYTES);
    w->is_over = n < 0;
    if (n <= 0)
        return n < 0 || from->is_readable;
    int done = writes(l, scratch, n);
    if (done < 0)
        l->in.is_over = l->out.is_over = true;
    if (done >= 0 && done < n)
        *w = (struct way){.kept = mem_dup(scratch + done, (size_t)(n - done)), .n = n - done};
    return true;
}

static void make_ready(struct rpc_tls *t, struct rpc_tls_link *l)
{
    if (l->is_ready)
        return;
    l->is_ready = true;
    TAILQ_INSERT_TAIL(&t->ready, l, in_ready);
}

static void link_free(struct rpc_tls *t, struct rpc_tls_link *l)
{
    LIST_REMOVE(l, in_tls);
    if (l->is_ready)
        TAILQ_REMOVE(&t->ready, l, in_ready);
    ERR_clear_error();
    SSL_shutdown(l->ssl); /* says goodbye if it can at once */
    close(l->outer.fd);
    rpc_tls_drop(l);
}

/*
 * Carries what it can, and frees the link at its end: when the client has left and gRPC has what it said, or
 * when gRPC has closed and the client has what it was told. Descriptors are edge-triggered, so the link is
 * ready again if it stops before nothing moves any more.
 */
static void carry(struct rpc_tls *t, struct rpc_tls_link *l)
{
    bool moved = true;
    for (int i = 0; i < PIECES_A_TURN && moved; i++) {
        moved = move(l, &l->out, &l->inner, read_inner, write_outer, t->scratch);
        moved |= move(l, &l->in, &l->outer, read_outer, write_inner, t->scratch);
    }
    bool is_over = (l->in.is_over && !l->in.kept) || (l->out.is_over && !l->out.kept);
    if (is_over) {
        link_free(t, l);
        return;
    }
    want_out(t, &l->outer, l->out.kept || SSL_want_write(l->ssl));
    want_out(t, &l->inner, l->in.kept);
    if (moved)
        make_ready(t, l);
}

static void take_fresh(struct rpc_tls *t)
{
    struct rpc_tls_link *l;
    uint64_t n;
    if (read(t->wake_fd, &n, sizeof(n)) < 0 && errno != EAGAIN)
        log_error(t->log, "the thread of TLS can't be woken");
    pthread_mutex_lock(&t->lock);
    while ((l = LIST_FIRST(&t->fresh))) {
        LIST_REMOVE(l, in_tls);
        LIST_INSERT_HEAD(&t->links, l, in_tls);
        l->outer.is_readable = true; /* content may have come with the handshake */
        make_ready(t, l);
        watch(t, &l->outer, EPOLL_CTL_ADD);
        watch(t, &l->inner, EPOLL_CTL_ADD);
    }
    pthread_mutex_unlock(&t->lock);
}

static void carry_ready(struct rpc_tls *t)
{
    struct rpc_tls_link *l, *last = TAILQ_LAST(&t->ready, ready_links);
    bool is_last = !last;
    while (!is_last && (l = TAILQ_FIRST(&t->ready))) {
        is_last = l == last; /* those that are put back wait for the next turn */
        TAILQ_REMOVE(&t->ready, l, in_ready);
        l->is_ready = false;
        carry(t, l);
    }
}

/* Waits until PACE_NS after the last turn, unless links have work left. */
static void pace(struct rpc_tls *t, uint64_t last_ns)
{
    uint64_t past = clock_now(&t->clock) - last_ns;
    const struct timespec rest = {.tv_nsec = (long)(PACE_NS - past)};
    if (past < PACE_NS && TAILQ_EMPTY(&t->ready))
        nanosleep(&rest, NULL);
}

static void *run(void *arg)
{
    struct rpc_tls *t = arg;
    uint64_t end_ns = 0, turn_ns = 0;
    for (;;) {
        struct epoll_event events[EVENTS_A_TURN];
        pace(t, turn_ns);
        int n = epoll_wait(t->epoll_fd, events, EVENTS_A_TURN, TAILQ_EMPTY(&t->ready) ? (end_ns ? 20 : -1) : 0);
        turn_ns = clock_now(&t->clock);
        bool is_woken = false;
        /* Both sides of a link may be among them, and the first may end it: so they are noted first. */
        for (int i = 0; i < n; i++) {
            struct side *side = events[i].data.ptr;
            is_woken |= !side;
            if (!side)
                continue;
            side->is_readable = true;
            side->hangs_up |= (events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
            make_ready(t, side->link);
        }
        if (is_woken)
            take_fresh(t);
        carry_ready(t);
        if (!atomic_load(&t->stop))
            continue;
        end_ns = end_ns ? end_ns : clock_now(&t->clock) + LAST_BYTES_NS;
        if (LIST_EMPTY(&t->links) || clock_now(&t->clock) >= end_ns)
            return NULL;
    }
}

/* ---------------------------------------------------------------- open and close */

enum td_status rpc_tls_open(const struct rpc_tls_files *files, const char *protocol, const struct log *log,
                            struct rpc_tls **out, struct td_error *error_out)
{
    struct rpc_tls *t = mem_zalloc(sizeof(*t));
    const char *paths[FILES] = {files->cert, files->key, files->ca};
    memcpy(t->paths, paths, sizeof(paths));
    assert(strlen(protocol) < sizeof(t->protocol));
    *t->protocol = (unsigned char)strlen(protocol);
    memcpy(t->protocol + 1, protocol, strlen(protocol));
    t->log = log;
    clock_init_real(&t->clock);
    TAILQ_INIT(&t->ready);
    pthread_mutex_init(&t->lock, NULL);
    t->epoll_fd = t->wake_fd = -1;
    look(t);
    enum td_status s = make_context(t, &t->context, error_out);
    if (!s) {
        t->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        t->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
        if (t->wake_fd < 0 || t->epoll_fd < 0)
            s = td_fail(error_out, TD_ERR_IO, "no descriptor for TLS");
    }
    if (s) {
        rpc_tls_close(t);
        return s;
    }
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = NULL};
    epoll_ctl(t->epoll_fd, EPOLL_CTL_ADD, t->wake_fd, &e);
    *out = t;
    return TD_OK;
}

void rpc_tls_start(struct rpc_tls *t)
{
    t->thread = thread_start("rpc-tls", run, t);
    t->is_running = true;
}

void rpc_tls_close(struct rpc_tls *t)
{
    struct rpc_tls_link *l;
    if (!t)
        return;
    atomic_store(&t->stop, true);
    if (t->is_running) {
        wake(t);
        pthread_join(t->thread, NULL);
    }
    take_fresh(t);
    while ((l = LIST_FIRST(&t->links)))
        link_free(t, l);
    if (t->wake_fd >= 0)
        close(t->wake_fd);
    if (t->epoll_fd >= 0)
        close(t->epoll_fd);
    SSL_CTX_free(t->context);
    pthread_mutex_destroy(&t->lock);
    free(t);
}
