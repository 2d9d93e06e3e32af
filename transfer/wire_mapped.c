/*
 * Payloads between processes of one host: the reader maps the holder's arena, read-only, and copies from it.
 * That is one pass over memory, which sums as it copies, instead of two copies through a ring and a separate
 * sum.
 *
 * This layer lies over TCP, or over UCX over TCP; TCP carries all messages. So a peer's death, its silence
 * and the rest of the protocol are as without it; only payloads that lie in the arena are lent instead of
 * sent. If the peer is on another host, or can't map the arena (another user, another container, no
 * descriptors), nothing is lent and payloads are sent. A process that was told which transports to use
 * neither offers its arena nor maps others, but has this layer all the same, because the other side may
 * offer.
 *
 *     accepted side (the holder)                    connecting side (the reader)
 *     OFFER, when the peer has proved itself  ->    on the thread "xfer-map": is it this host? opens
 *                                                   /proc/PID/fd/FD, checks that it is that very file,
 *                                                   and sealed; maps it
 *     from now on it lends                    <-    TAKEN
 *     LEND (where, and the message)           ->    copies at once, in the handler
 *     the payload is done                     <-    RETURN (how many), in batches
 *
 * Messages of this layer, told from the protocol's by their first two bytes; little-endian:
 *
 *     OFFER   0 u16 0x4d01  2 u16 0           4 u32 pid   8 u32 fd  12 u32 0   16 u64 arena_bytes
 *            24 u64 inode  32 boot_id[36]                  of /proc/sys/kernel/random/boot_id
 *     TAKEN   0 u16 0x4d02  2 u16 0           4 u32 0
 *     LEND    0 u16 0x4d03  2 u16 header_len  4 u32 0     8 u64 offset   16 u64 len   24 header[header_len]
 *     RETURN  0 u16 0x4d04  2 u16 0           4 u32 n
 *
 * Why the process number and not SCM_RIGHTS: no second listener and no second proof is needed. The file is
 * identified by its inode on this boot, so a process number that meanwhile belongs to another process leads
 * to a file that is refused. The seals fix the length (no SIGBUS) and keep the reader, and everybody else,
 * from ever writing.
 *
 * What is weaker than with messages: after a forced close on the holder's side the reader may go on reading
 * until it hears of the close. It only reads, and what it reads is checked; the lease that was cut off is in
 * doubt, so its pages rest in quarantine.
 *
 * A connection of this layer is freed by reap when three things are over: the inner connection (on_closed),
 * its loans, and its view (unmapped by the thread). The order is: inner connection, then loans, then view.
 *
 * Threads: as wire.h says. "xfer-map" is started by the first offer, because mapping and unmapping take long.
 * It uses only the job, the offer and the view of a connection, and only between job_push and take_results.
 */
#include <assert.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/endian.h"
#include "base/mem.h"
#include "base/queue.h"
#include "base/thread.h"
#include "transfer/wire_wrap.h"

enum { OFFER = 0x4d01, TAKEN = 0x4d02, LEND = 0x4d03, RETURN = 0x4d04 };
enum { BOOT_ID = WRAP_BOOT_ID_BYTES, OFFER_BYTES = 32 + BOOT_ID, LEND_HEADER = 24, RETURN_EVERY = 16 };

enum view_state { VIEW_NONE, VIEW_MAPPING, VIEW_READY, VIEW_UNMAPPING, VIEW_GONE };
enum map_job_kind { JOB_MAP, JOB_UNMAP, JOB_STOP };

struct mapped_conn;

/* Sent to the thread and back; part of the connection, which has at most one job at a time. */
struct map_job {
    struct mail mail;
    enum map_job_kind kind;
    struct mapped_conn *conn;
};

struct loan { /* a payload that the peer may be reading; returned in the order of lending */
    struct loan *next;
    wire_done_fn *done;
    void *arg;
};

struct mapped_conn {
    struct wrap_conn wrap;
    struct mapped_wire *w;
    /* is_broken: the peer broke the rules; conn_turn tells the protocol. */
    bool is_accepted, is_trusted, is_broken;

    bool may_lend; /* the peer has mapped our arena */
    struct loan *loans, **loans_tail;

    enum view_state view_state; /* our mapping of the peer's arena */
    struct map_job job;
    uint8_t offer[OFFER_BYTES];
    const uint8_t *view;
    uint64_t view_bytes;
    /* Payloads copied since the last RETURN. */
    uint32_t n_to_return;
    /* A payload was lent to us in this turn. RETURN then waits for the next turn, because more may follow. */
    bool has_lent;
};

struct mapped_wire {
    struct wrap_wire wrap;
    const uint8_t *arena;
    uint64_t arena_bytes;
    int arena_fd;    /* our own descriptor; 0: not shared */
    bool is_willing; /* transports is "auto": offers its arena, and maps those of others */
    char boot_id[BOOT_ID];
    struct mailbox jobs, results;
    pthread_t thread;
    bool thread_runs;
};

/* ---------------------------------------------------------------- the thread */

static bool is_our_host(const struct mapped_wire *w, const uint8_t *offer)
{
    return w->boot_id[0] && !memcmp(offer + 32, w->boot_id, BOOT_ID);
}

/*
 * Opens the file that was offered, or returns -1 if it is another file: inode and length must agree, and the
 * seals must fix the length and forbid all writing except through the holder's existing mapping. The file is
 * checked (O_PATH) before it is opened for reading: a reused descriptor number may lead to a device, and
 * opening a device can have effects.
 */
static int open_offered(const char *path, uint64_t inode, uint64_t len_bytes)
{
    const int needed = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE;
    struct stat st;
    char same[64];
    int fd = -1, at = open(path, O_PATH | O_CLOEXEC);
    if (at < 0)
        return -1;
    snprintf(same, sizeof(same), "/proc/self/fd/%d", at);
    if (fstat(at, &st) == 0 && S_ISREG(st.st_mode) && st.st_ino == inode && (uint64_t)st.st_size == len_bytes)
        fd = open(same, O_RDONLY | O_CLOEXEC);
    close(at);
    int seals = fd < 0 ? -1 : fcntl(fd, F_GET_SEALS);
    if (fd < 0 || (seals >= 0 && (seals & needed) == needed))
        return fd;
    close(fd);
    return -1;
}

/* Maps the offered arena read-only; NULL if it is not of this host, not the file that was offered, or
 * can't be mapped. */
static const uint8_t *map_view(const struct mapped_wire *w, const uint8_t *offer, uint64_t *len_out)
{
    char path[64];
    const void *view = NULL;
    uint64_t len_bytes = get_u64(offer + 16);
    if (!is_our_host(w, offer) || !len_bytes || len_bytes > SIZE_MAX / 2)
        return NULL;
    snprintf(path, sizeof(path), "/proc/%u/fd/%u", get_u32(offer + 4), get_u32(offer + 8));
    int fd = open_offered(path, get_u64(offer + 24), len_bytes);
    if (fd < 0)
        return NULL;
    if (!mem_map_view(len_bytes, fd, &view))
        *len_out = len_bytes;
    close(fd);
    return view;
}

static void *map_run(void *arg)
{
    struct mapped_wire *w = arg;
    for (;;) {
        mailbox_wait(&w->jobs, -1);
        struct mail *mail = mailbox_take(&w->jobs);
        while (mail) {
            struct map_job *job = (struct map_job *)mail;
            mail = mail->next;
            if (job->kind == JOB_STOP)
                return NULL;
            struct mapped_conn *c = job->conn;
            if (job->kind == JOB_MAP)
                c->view = map_view(w, c->offer, &c->view_bytes);
            else
                munmap((void *)(uintptr_t)c->view, c->view_bytes);
            mailbox_push(&w->results, &job->mail);
        }
    }
}

/* The job belongs to the thread until take_results has it back; view_state says so. */
static void job_push(struct mapped_conn *c, enum map_job_kind kind)
{
    struct mapped_wire *w = c->w;
    if (!w->thread_runs)
        w->thread = thread_start("xfer-map", map_run, w);
    w->thread_runs = true;
    c->view_state = kind == JOB_MAP ? VIEW_MAPPING : VIEW_UNMAPPING;
    c->job = (struct map_job){.kind = kind, .conn = c};
    mailbox_push(&w->jobs, &c->job.mail);
}

/* Sends a message of this layer; nothing after the close. */
static void say(struct mapped_conn *c, uint16_t type, uint32_t n)
{
    uint8_t out[8];
    put_u16(out, type);
    put_u16(out + 2, 0);
    put_u32(out + 4, n);
    if (c->wrap.inner && !c->wrap.is_closing)
        wire_send(c->wrap.inner, out, sizeof(out), NULL, 0, NULL, NULL);
}

static bool take_results(struct mapped_wire *w)
{
    struct mail *mail = mailbox_take(&w->results);
    bool any = mail != NULL;
    while (mail) {
        struct mapped_conn *c = ((struct map_job *)mail)->conn;
        enum map_job_kind kind = ((struct map_job *)mail)->kind;
        mail = mail->next;
        c->view_state = kind == JOB_MAP && c->view ? VIEW_READY : VIEW_GONE;
        /* A connection that was closed meanwhile keeps its view here; conn_turn has it unmapped. */
        if (kind == JOB_UNMAP || c->wrap.is_closing)
            continue;
        log_debug(w->wrap.base.log, "arena of a peer %s bytes=%llu", c->view ? "is mapped" : "can't be mapped",
                  (unsigned long long)c->view_bytes);
        if (c->view_state == VIEW_READY) {
            say(c, TAKEN, 0);
            wrap_on_transport(&c->wrap);
        }
    }
    return any;
}

/* --------------------------------------------------------------------- loans */

/* Whether [p, p + len) lies in our arena. */
static bool in_arena(const struct mapped_wire *w, const void *p, uint64_t len)
{
    uintptr_t base = (uintptr_t)w->arena, at = (uintptr_t)p;
    return at >= base && len <= w->arena_bytes && at - base <= w->arena_bytes - len;
}

static void add_loan(struct mapped_conn *c, wire_done_fn *done, void *arg)
{
    struct loan *l = mem_zalloc(sizeof(*l));
    *l = (struct loan){.done = done, .arg = arg};
    *c->loans_tail = l;
    c->loans_tail = &l->next;
}

static void lend(struct mapped_conn *c, const void *header, uint32_t header_len, const void *payload, uint64_t len)
{
    uint8_t out[WIRE_HEADER_MAX];
    put_u16(out, LEND);
    put_u16(out + 2, (uint16_t)header_len);
    put_u32(out + 4, 0);
    put_u64(out + 8, (uint64_t)((const uint8_t *)payload - c->w->arena));
    put_u64(out + 16, len);
    memcpy(out + LEND_HEADER, header, header_len);
    wire_send(c->wrap.inner, out, LEND_HEADER + header_len, NULL, 0, NULL, NULL);
}

/* The oldest loan ends: RETURN counts loans in the order of LEND. */
static void end_loan(struct mapped_conn *c, enum td_status status)
{
    struct loan *l = c->loans;
    c->loans = l->next;
    if (!c->loans)
        c->loans_tail = &c->loans;
    if (l->done)
        l->done(l->arg, status);
    free(l);
}

static void break_off(struct mapped_conn *c, const char *what)
{
    log_warn(c->w->wrap.base.log, "peer broke the rules of the mapped arena what=%s", what);
    c->is_broken = true;
}

/* Copies at once, so the loan is over when this returns. What comes from the peer is checked: the range
 * must lie in the view. */
static void on_lend(struct mapped_conn *c, const uint8_t *m, uint32_t len)
{
    const struct wire_events *e = &c->w->wrap.base.events;
    uint32_t header_len = get_u16(m + 2);
    if (c->view_state != VIEW_READY || len < LEND_HEADER || len != LEND_HEADER + header_len) {
        break_off(c, "lend");
        return;
    }
    uint64_t offset = get_u64(m + 8), n = get_u64(m + 16);
    if (!n || n > c->view_bytes || offset > c->view_bytes - n) {
        break_off(c, "lend beyond the arena");
        return;
    }
    void *token = NULL;
    void *to = e->on_payload(c->wrap.base.user, m + LEND_HEADER, header_len, n, &token);
    if (to) {
        wire_land(e, c->wrap.base.user, token, to, c->view + offset, n);
        e->on_payload_done(c->wrap.base.user, token, TD_OK);
    }
    c->has_lent = true;
    if (++c->n_to_return == RETURN_EVERY) {
        say(c, RETURN, c->n_to_return);
        c->n_to_return = 0;
    }
}

/* n is the number of oldest loans that the reader has copied. */
static void on_return(struct mapped_conn *c, uint32_t n)
{
    for (; n && c->loans; n--)
        end_loan(c, TD_OK);
    if (n)
        break_off(c, "returned more than was lent");
}

static void on_offer(struct mapped_conn *c, const uint8_t *m, uint32_t len)
{
    if (c->is_accepted || c->view_state != VIEW_NONE || len != OFFER_BYTES) {
        break_off(c, "offer");
        return;
    }
    if (!c->w->is_willing)
        return;
    memcpy(c->offer, m, OFFER_BYTES);
    job_push(c, JOB_MAP);
}

static void on_taken(struct mapped_conn *c)
{
    if (!c->is_accepted || !c->w->arena_fd || c->may_lend) {
        break_off(c, "taken");
        return;
    }
    c->may_lend = true;
    wrap_on_transport(&c->wrap);
}

/* -------------------------------------------------------------------- events */

static struct mapped_conn *conn_new(struct mapped_wire *w)
{
    struct mapped_conn *c = mem_zalloc(sizeof(*c));
    wrap_conn_init(&w->wrap, &c->wrap);
    c->w = w;
    c->loans_tail = &c->loans;
    return c;
}

static void on_accept(void *user, struct wire_conn *inner)
{
    struct mapped_wire *w = user;
    struct mapped_conn *c = conn_new(w);
    c->is_accepted = true;
    wrap_accept(&w->wrap, &c->wrap, inner);
}

static void on_message(void *user, const uint8_t *header, uint32_t len)
{
    struct mapped_conn *c = user;
    uint16_t type = len >= 8 ? get_u16(header) : 0;
    if (c->wrap.is_closing || c->is_broken)
        return;
    if (!c->is_trusted || type < WRAP_TYPE_LEAST)
        wrap_on_message(&c->wrap, header, len);
    else if (type < OFFER || type > RETURN)
        return; /* of a layer that only the peer has */
    else if (type == OFFER)
        on_offer(c, header, len);
    else if (type == TAKEN)
        on_taken(c);
    else if (type == LEND)
        on_lend(c, header, len);
    else
        on_return(c, get_u32(header + 4));
}

/* --------------------------------------------------------------------- calls */

static struct wire_conn *mapped_connect(struct wire *base, const char *address, uint32_t attempt, void *user)
{
    struct mapped_wire *w = (struct mapped_wire *)base;
    struct mapped_conn *c = conn_new(w);
    c->wrap.base.user = user;
    c->wrap.inner = wire_connect(w->wrap.inner, address, attempt, c);
    return &c->wrap.base;
}

/* A payload of the arena is lent if the peer has mapped the arena. Messages and loans use the same inner
 * connection, so they stay in order. */
static void mapped_send(struct wire_conn *base, const void *header, uint32_t header_len, const void *payload,
                        uint64_t payload_len, wire_done_fn *done, void *arg)
{
    struct mapped_conn *c = (struct mapped_conn *)base;
    bool is_lent = payload_len && c->may_lend && !c->wrap.is_closing && header_len + LEND_HEADER <= WIRE_HEADER_MAX &&
                   in_arena(c->w, payload, payload_len);
    /* Without a connection the loan is ended in the next turn, so that no callback comes from inside
     * wire_send. */
    if (is_lent || !c->wrap.inner)
        add_loan(c, done, arg);
    if (is_lent)
        lend(c, header, header_len, payload, payload_len);
    else if (c->wrap.inner)
        wire_send(c->wrap.inner, header, header_len, payload, payload_len, done, arg);
}

static void mapped_close(struct wire_conn *base)
{
    struct mapped_conn *c = (struct mapped_conn *)base;
    if (!c->wrap.is_closing)
        wire_close(c->wrap.inner);
    c->wrap.is_closing = true;
}

/* Offers our arena; only the accepting side, which is the holder. */
static void mapped_trust(struct wire_conn *base)
{
    struct mapped_conn *c = (struct mapped_conn *)base;
    struct mapped_wire *w = c->w;
    struct stat st;
    c->is_trusted = true;
    wire_trust(c->wrap.inner);
    if (!c->is_accepted || !w->arena_fd || !w->boot_id[0] || fstat(w->arena_fd, &st))
        return;
    uint8_t out[OFFER_BYTES] = {0};
    put_u16(out, OFFER);
    put_u32(out + 4, (uint32_t)getpid());
    put_u32(out + 8, (uint32_t)w->arena_fd);
    put_u64(out + 16, w->arena_bytes);
    put_u64(out + 24, st.st_ino);
    memcpy(out + 32, w->boot_id, BOOT_ID);
    wire_send(c->wrap.inner, out, sizeof(out), NULL, 0, NULL, NULL);
}

/* ------------------------------------------------------------------ the turn */

/* Tells errors, sends the rest of a batch of RETURNs, and takes the steps after the inner connection's
 * end, in order: loans, then the view. */
static bool conn_turn(struct mapped_conn *c)
{
    bool any = c->is_broken && !c->wrap.error_told;
    if (any)
        wrap_tell_error(&c->wrap, TD_ERR_PROTOCOL);
    if (c->n_to_return && !c->has_lent) {
        say(c, RETURN, c->n_to_return);
        c->n_to_return = 0;
    }
    c->has_lent = false;
    for (; !c->wrap.inner && c->loans; any = true)
        end_loan(c, TD_ERR_CANCELLED);
    if (!c->wrap.inner && c->view_state == VIEW_READY)
        job_push(c, JOB_UNMAP);
    return any;
}

/* Whether nothing of this layer uses the connection any more. */
static bool is_over(const struct wrap_conn *base)
{
    const struct mapped_conn *c = (const struct mapped_conn *)base;
    bool has_job = c->view_state == VIEW_MAPPING || c->view_state == VIEW_READY || c->view_state == VIEW_UNMAPPING;
    return !c->loans && !has_job;
}

static bool mapped_progress(struct wire *base)
{
    struct mapped_wire *w = (struct mapped_wire *)base;
    struct wrap_conn *c;
    bool any = wire_progress(w->wrap.inner);
    any |= take_results(w);
    LIST_FOREACH (c, &w->wrap.conns, in_wire)
        any |= conn_turn((struct mapped_conn *)c);
    return any | wrap_reap(&w->wrap, is_over);
}

/* Whatever the next mapped_progress would do without an event must make this return 0. */
static int mapped_arm(struct wire *base)
{
    struct mapped_wire *w = (struct mapped_wire *)base;
    const struct wrap_conn *at;
    LIST_FOREACH (at, &w->wrap.conns, in_wire) {
        const struct mapped_conn *c = (const struct mapped_conn *)at;
        if ((c->is_broken && !c->wrap.error_told) || (!c->wrap.inner && c->view_state == VIEW_READY) ||
            c->n_to_return || (c->wrap.is_closing && !c->wrap.inner && is_over(at)))
            return 0;
    }
    return wire_arm(w->wrap.inner);
}

static void mapped_transport(struct wire_conn *base, char *out, uint32_t out_bytes)
{
    struct mapped_conn *c = (struct mapped_conn *)base;
    if (c->may_lend || c->view_state == VIEW_READY)
        snprintf(out, out_bytes, "mapped");
    else
        wire_transport(c->wrap.inner, out, out_bytes);
}

static uint64_t mapped_part_bytes(struct wire_conn *base)
{
    return wire_part_bytes(((struct mapped_conn *)base)->wrap.inner);
}

/* ------------------------------------------------------------- open and free */

static void mapped_free(struct wire *base)
{
    struct mapped_wire *w = (struct mapped_wire *)base;
    assert(LIST_EMPTY(&w->wrap.conns));
    if (w->thread_runs) {
        struct map_job stop = {.kind = JOB_STOP};
        mailbox_push(&w->jobs, &stop.mail);
        pthread_join(w->thread, NULL);
        mailbox_take(&w->jobs);
    }
    wire_free(w->wrap.inner);
    mailbox_fini(&w->jobs);
    mailbox_fini(&w->results);
    if (w->arena_fd)
        close(w->arena_fd);
    if (w->wrap.base.fd >= 0)
        close(w->wrap.base.fd);
    free(w);
}

static const struct wire_ops OPS = {
    .connect = mapped_connect,
    .send = mapped_send,
    .close = mapped_close,
    .trust = mapped_trust,
    .progress = mapped_progress,
    .arm = mapped_arm,
    .transport = mapped_transport,
    .part_bytes = mapped_part_bytes,
    .free = mapped_free,
};

static void watch(struct mapped_wire *w, int fd)
{
    struct epoll_event e = {.events = EPOLLIN};
    epoll_ctl(w->wrap.base.fd, EPOLL_CTL_ADD, fd, &e);
}

static enum td_status open_inner(struct mapped_wire *w, struct wire_config *inner, struct td_error *error_out)
{
    const char *transports = inner->transports ? inner->transports : "auto";
    if (!strcmp(transports, "auto") || !strcmp(transports, "tcp"))
        return wire_tcp_open(inner, &w->wrap.inner, error_out);
    return wire_ucx_open(inner, &w->wrap.inner, error_out);
}

enum td_status wire_mapped_open(const struct wire_config *config, struct wire **out, struct td_error *error_out)
{
    struct mapped_wire *w = mem_zalloc(sizeof(*w));
    struct wire_config inner = *config;
    inner.events = (struct wire_events){.user = w,
                                        .on_accept = on_accept,
                                        .on_open = wrap_on_open,
                                        .on_message = on_message,
                                        .on_payload = wrap_on_payload,
                                        .land = wrap_land,
                                        .on_payload_done = wrap_on_payload_done,
                                        .on_transport = wrap_on_transport,
                                        .on_error = wrap_on_error,
                                        .on_closed = wrap_on_closed};
    w->wrap.base = (struct wire){.ops = &OPS, .events = config->events, .log = config->log};
    w->wrap.base.fd = epoll_create1(EPOLL_CLOEXEC);
    mailbox_init(&w->jobs);
    mailbox_init(&w->results);
    wrap_boot_id(w->boot_id);
    w->arena = config->arena;
    w->arena_bytes = config->arena_bytes;
    w->is_willing = !config->transports || !strcmp(config->transports, "auto");
    int fd = config->arena_fd && w->is_willing ? fcntl(config->arena_fd, F_DUPFD_CLOEXEC, 3) : 0;
    w->arena_fd = fd > 0 ? fd : 0;
    enum td_status s = w->wrap.base.fd < 0 || fd < 0
                           ? td_fail(error_out, TD_ERR_IO, "no descriptor for an arena or epoll")
                           : open_inner(w, &inner, error_out);
    if (s) {
        mapped_free(&w->wrap.base);
        return s;
    }
    memcpy(w->wrap.base.address, w->wrap.inner->address, sizeof(w->wrap.base.address));
    watch(w, w->wrap.inner->fd);
    watch(w, mailbox_fd(&w->results));
    *out = &w->wrap.base;
    return TD_OK;
}
