/*
 * The thread of an xfer, its commands and its timers.
 *
 * One turn: commands from other threads, one bounded step of the wire, requests and parts to be sent, timers
 * that are due. No step takes longer than a few ms, so heartbeats go out in time.
 *
 * A turn without work is repeated for SPIN_NS, because the next message is often that near (7 us, against 53
 * us through epoll), and for SPIN_MOVING_NS while bytes that were asked for are on their way: over TCP the
 * reader catches up with the holder again and again, and waking up costs it a fifth of the speed. Then the
 * thread sleeps until the wire, a command or a timer wakes it, and costs nothing while idle. It never yields:
 * since Linux 6.18 each sched_yield gives up the rest of a slice for good, and a thread that has yielded ten
 * thousand times is then kept off a contended core for seconds (measured: 3.4 s), which its peers take for
 * death.
 *
 * The timers are a walk over all connections, leases, pulls and targets, at most once per due_ns. Whoever
 * sets a deadline calls due_at; a timer that finds nothing to do sets its next time again.
 */
#include "transfer/impl.h"

#include <errno.h>
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/thread.h"
#include "proto/wire/checksum.h"
#include "transfer/slices.h"

#define SPIN_NS           30000ull
#define SPIN_MOVING_NS    100000ull
#define DEFAULT_HEARTBEAT (250 * NS_PER_MS)
#define DEFAULT_SILENCE   NS_PER_S
#define DEFAULT_IN_FLIGHT (32u << 20)
#define SLEEP_MAX_MS      250
/* A turn that is later than silence_ns / TURNS_OF_SILENCE counts as an absence of this process. */
#define TURNS_OF_SILENCE  4

/* -------------------------------------------------------------------- helpers */

bool bits_any(const uint64_t *bits, uint32_t begin, uint32_t end)
{
    for (uint32_t i = begin; i < end; i++)
        if (bits[i / 64] >> (i % 64) & 1)
            return true;
    return false;
}

bool bits_all(const uint64_t *bits, uint32_t begin, uint32_t end)
{
    for (uint32_t i = begin; i < end; i++)
        if (!(bits[i / 64] >> (i % 64) & 1))
            return false;
    return true;
}

void bits_set(uint64_t *bits, uint32_t begin, uint32_t end)
{
    for (uint32_t i = begin; i < end; i++)
        bits[i / 64] |= 1ull << (i % 64);
}

bool xfer_in_arena(const struct xfer *x, const void *p)
{
    uintptr_t base = (uintptr_t)x->config.arena, at = (uintptr_t)p;
    return at >= base && x->config.arena_bytes >= x->page_bytes && at - base <= x->config.arena_bytes - x->page_bytes;
}

/* --------------------------------------------------------------------- thread */

static bool run_commands(struct xfer *x)
{
    struct mail *mail = mailbox_take(&x->commands);
    bool any = mail != NULL;
    while (mail) {
        struct command *c = (struct command *)mail;
        mail = mail->next;
        c->run(x, c);
        free(c);
    }
    return any;
}

/*
 * due_ns is reset before the walk, and each object sets its own next time. Connections come first: closing
 * one ends its leases and pulls, which must not happen while those lists are being walked (see pull_stalled).
 * Targets come after pulls, which keep them alive.
 */
static void run_timers(struct xfer *x)
{
    if (x->now_ns < x->due_ns)
        return;
    x->due_ns = UINT64_MAX;
    for (struct conn *c = x->conns; c; c = c->next)
        conn_timer(c);
    struct lease *l, *next_lease;
    LIST_FOREACH_SAFE (l, &x->leases, in_xfer, next_lease)
        lease_timer(x, l);
    struct pull *p, *next_pull;
    LIST_FOREACH_SAFE (p, &x->pulls, in_xfer, next_pull)
        pull_timer(x, p);
    struct xfer_target **at = &x->targets;
    while (*at) {
        struct xfer_target *t = *at;
        if (target_timer(x, t)) {
            at = &t->next;
            continue;
        }
        *at = t->next;
        target_free(t);
    }
    targets_connect(x);
}

static bool pump(struct xfer *x)
{
    bool any = false;
    for (struct conn *c = x->conns; c; c = c->next) {
        if (c->state != CONN_UP)
            continue;
        any |= pull_pump(c);
        any |= lease_pump(c);
    }
    return any;
}

/* Reads this turn's time. All timers use it: it leaves out the time for which this process stood still,
 * because what the peers said meanwhile still waits to be read. */
static void begin_turn(struct xfer *x)
{
    uint64_t awake = x->now_ns + SLEEP_MAX_MS * NS_PER_MS;
    x->now_ns = absence_now(&x->absence, x->config.is_driven || x->due_ns < awake ? x->due_ns : awake);
}

/* wire_arm comes first: after it, events that arrive make the descriptor readable, so none is missed
 * between the last turn and the sleep. */
static void sleep_until_due(struct xfer *x)
{
    int ms = wire_arm(x->wire);
    if (!ms)
        return;
    uint64_t now = absence_of(&x->absence, clock_now(x->config.clock));
    if (now >= x->due_ns)
        return;
    uint64_t wait_ns = x->due_ns - now, most = SLEEP_MAX_MS * NS_PER_MS;
    int timer_ms = (int)((wait_ns < most ? wait_ns : most) / NS_PER_MS) + 1;
    if (ms < 0 || timer_ms < ms)
        ms = timer_ms;
    struct epoll_event events[4];
    epoll_wait(x->epoll_fd, events, 4, ms);
}

static bool turn(struct xfer *x)
{
    begin_turn(x);
    bool any = run_commands(x);
    any |= wire_progress(x->wire);
    any |= pump(x);
    run_timers(x);
    return any;
}

/* Stopping is complete when the last connection is gone, too: only then no memory of the arena is in use. */
static bool is_over(const struct xfer *x)
{
    return x->stopping && !x->conns && LIST_EMPTY(&x->leases) && LIST_EMPTY(&x->pulls);
}

/* Whether bytes that were asked for have not arrived. */
static bool is_moving(const struct xfer *x)
{
    const struct conn *c = x->conns;
    while (c && !c->in_bytes)
        c = c->next;
    return c;
}

static void *run(void *arg)
{
    struct xfer *x = arg;
    slices_ask_short();
    uint64_t busy_ns = 0;
    for (;;) {
        bool any = turn(x);
        if (is_over(x))
            return NULL;
        if (any)
            busy_ns = x->now_ns;
        else if (x->now_ns - busy_ns > (is_moving(x) ? SPIN_MOVING_NS : SPIN_NS))
            sleep_until_due(x);
    }
}

/* ------------------------------------------------------------- open and close */

static enum td_status check_config(const struct xfer_config *config, struct td_error *error_out)
{
    if (!config->layout || !config->clock || !config->name || !config->incarnation)
        return td_fail(error_out, TD_ERR_INVALID, "xfer: layout, clock, name and incarnation are needed");
    if (config->encrypts && !secret_is_set(config->secret))
        return td_fail(error_out, TD_ERR_INVALID, "--kv-encrypt: needs the cluster secret (--secret, --secret-file)");
    return kv_layout_check(config->layout, error_out);
}

static struct xfer *xfer_new(const struct xfer_config *config)
{
    struct xfer *x = mem_zalloc(sizeof(*x));
    x->config = *config;
    x->name = mem_strdup(config->name);
    for (char *p = x->name; *p; p++) /* shown to people and written to other processes' logs */
        if (*p < 0x21 || *p > 0x7e)
            *p = '_';
    x->secret = config->secret;
    x->layout = *config->layout;
    x->page_bytes = kv_layout_page_bytes(&x->layout);
    x->layer_bytes = kv_layout_layer_bytes(&x->layout);
    x->words = (x->layout.n_layers + 63) / 64;
    uint64_t fit = config->arena_bytes / x->page_bytes;
    x->pages_max = fit < XFER_MSG_PAGES_MAX ? (uint32_t)fit : XFER_MSG_PAGES_MAX;
    x->config.transports = config->transports ? config->transports : "auto";
    x->config.heartbeat_ns = config->heartbeat_ns ? config->heartbeat_ns : DEFAULT_HEARTBEAT;
    x->config.silence_ns = config->silence_ns ? config->silence_ns : DEFAULT_SILENCE;
    x->config.max_inflight_bytes = config->max_inflight_bytes ? config->max_inflight_bytes : DEFAULT_IN_FLIGHT;
    x->ended = mem_array(ENDED_KEPT, sizeof(x->ended[0]));
    x->early = mem_array(EARLY_KEPT, sizeof(x->early[0]));
    absence_init(&x->absence, config->clock, x->config.silence_ns / TURNS_OF_SILENCE);
    x->now_ns = x->absence.read_ns;
    x->due_ns = UINT64_MAX;
    mailbox_init(&x->commands);
    pthread_mutex_init(&x->transport_lock, NULL);
    x->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    return x;
}

static void xfer_free(struct xfer *x)
{
    wire_free(x->wire);
    while (x->targets) {
        struct xfer_target *t = x->targets;
        x->targets = t->next;
        target_free(t);
    }
    while (x->peers) {
        struct xfer_peer *p = x->peers;
        x->peers = p->next;
        free(p);
    }
    if (x->epoll_fd >= 0)
        close(x->epoll_fd);
    mailbox_fini(&x->commands);
    pthread_mutex_destroy(&x->transport_lock);
    free(x->ended);
    free(x->early);
    free(x->unreached);
    free(x->name);
    free(x);
}

static void watch(struct xfer *x, int fd)
{
    struct epoll_event e = {.events = EPOLLIN};
    epoll_ctl(x->epoll_fd, EPOLL_CTL_ADD, fd, &e);
}

/* Logs how pages are copied and summed on this CPU. The first xfer of a process measures the ways; the
 * others reuse the choice. */
static void choose_copy(const struct log *log)
{
    const struct checksum_choice *c = checksum_choose();
    log_info(log, "pages are copied and summed way=\"%s\" gb_per_s=%.1f memcpy_gb_per_s=%.1f measured_ms=%.1f",
             c->ways[c->chosen].name, c->ways[c->chosen].gb_per_s, c->memcpy_gb_per_s, (double)c->took_ns * 1e-6);
    for (uint32_t i = 0; i < c->n_ways; i++)
        log_debug(log, "way to copy and sum way=\"%s\" gb_per_s=%.1f", c->ways[i].name, c->ways[i].gb_per_s);
}

enum td_status xfer_open(const struct xfer_config *config, struct xfer **out, struct td_error *error_out)
{
    enum td_status s = check_config(config, error_out);
    if (s)
        return s;
    struct xfer *x = xfer_new(config);
    struct wire_config w = {.listen = config->listen,
                            .reached_at = config->reached_at,
                            .transports = x->config.transports,
                            .is_trusted_network = config->is_trusted_network,
                            .encrypt = config->encrypts ? config->secret : NULL,
                            .arena = config->arena,
                            .arena_bytes = config->arena_bytes,
                            .arena_fd = config->arena_fd,
                            .hub = config->hub,
                            .log = config->log,
                            .events = PEER_WIRE_EVENTS};
    w.events.user = x;
    wire_open_fn *open_wire = config->backend == XFER_NET ? wire_mapped_open : wire_loopback_open;
    s = x->epoll_fd < 0 ? td_fail(error_out, TD_ERR_IO, "xfer: no epoll descriptor: %s", strerror(errno)) : TD_OK;
    if (!s)
        s = config->faults ? wire_fault_open(&w, open_wire, config->faults, config->clock, &x->wire, error_out)
                           : open_wire(&w, &x->wire, error_out);
    if (s) {
        xfer_free(x);
        return s;
    }
    watch(x, x->wire->fd);
    watch(x, mailbox_fd(&x->commands));
    choose_copy(config->log);
    absence_log(&x->absence, config->log);
    if (!config->is_driven)
        x->thread = thread_start("xfer", run, x);
    *out = x;
    return TD_OK;
}

/* Pulls and leases end first, while their connections can still carry releases and refusals. */
static void run_stop(struct xfer *x, struct command *c)
{
    (void)c;
    x->stopping = true;
    pull_cancel_all(x);
    lease_cancel_all(x);
    conn_leave_all(x);
}

bool xfer_step(struct xfer *x, uint64_t *due_ns_out)
{
    bool any = turn(x);
    int ms = wire_arm(x->wire);
    uint64_t due = x->due_ns;
    if (ms >= 0 && x->now_ns + (uint64_t)ms * NS_PER_MS < due)
        due = x->now_ns + (uint64_t)ms * NS_PER_MS;
    *due_ns_out = due == UINT64_MAX ? due : due + x->absence.away_ns;
    return any;
}

bool xfer_stop(struct xfer *x)
{
    if (!x->stopping)
        run_stop(x, NULL);
    return is_over(x);
}

void xfer_close(struct xfer *x)
{
    if (!x)
        return;
    if (x->config.is_driven) {
        assert(is_over(x));
    } else {
        struct command *stop = mem_zalloc(sizeof(*stop));
        stop->run = run_stop;
        command_push(x, stop);
        pthread_join(x->thread, NULL);
    }
    begin_turn(x);
    /* Commands of the last callbacks: grants and pulls end with TD_ERR_CANCELLED, messages are dropped. */
    run_commands(x);
    xfer_free(x);
}

/* ---------------------------------------------------------------- looking at it */

const char *xfer_address(const struct xfer *x)
{
    return x->wire->address;
}

struct xfer_stats xfer_stats(struct xfer *x)
{
    struct counters *c = &x->counters;
    return (struct xfer_stats){.bytes_in = atomic_load(&c->bytes_in),
                               .bytes_out = atomic_load(&c->bytes_out),
                               .pages_in = atomic_load(&c->pages_in),
                               .pages_out = atomic_load(&c->pages_out),
                               .pulls_ok = atomic_load(&c->pulls_ok),
                               .pulls_failed = atomic_load(&c->pulls_failed),
                               .checksum_errors = atomic_load(&c->checksum_errors),
                               .refused_stale = atomic_load(&c->refused_stale),
                               .not_yet = atomic_load(&c->not_yet),
                               .stalled = atomic_load(&c->stalled),
                               .messages_dropped = atomic_load(&c->messages_dropped),
                               .slower = atomic_load(&c->slower),
                               .leases_open = atomic_load(&c->leases_open),
                               .pulls_open = atomic_load(&c->pulls_open),
                               .peers_up = atomic_load(&c->peers_up)};
}

void xfer_transport(struct xfer *x, char *out, uint32_t out_bytes)
{
    pthread_mutex_lock(&x->transport_lock);
    snprintf(out, out_bytes, "%s", x->transport);
    pthread_mutex_unlock(&x->transport_lock);
}
