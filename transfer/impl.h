/*
 * What the files of the protocol share: the objects of one xfer, all of them owned by its thread.
 *
 *     xfer.c   the thread, commands from other threads, timers, counters
 *     peer.c   connections, handshake, heartbeats, goodbye, user messages
 *     target.c the addresses that we connect to: when, how many at once, and when again
 *     lease.c  the holder: leases, and what is being sent
 *     pull.c   the reader: pulls, and what is asked for
 *
 * A connection is directed: the side that connects reads on it. Two processes that pull from each other have two
 * connections; a peer is a process (an incarnation) with at least one connection that is up.
 *
 * What may outlive what: payloads in flight hold pointers to their connection and to their lease or pull. A connection goes
 * only after its wire says that nothing is in flight; a lease or pull only after its own count of payloads is zero.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <pthread.h>

#include "base/absence.h"
#include "base/clock.h"
#include "base/queue.h"
#include "transfer/proto.h"
#include "transfer/wire.h"
#include "transfer/xfer.h"

/* ------------------------------------------------------------------ by id */

enum { ID_BUCKETS = 1024, ENDED_KEPT = 4096, EARLY_KEPT = 1024 };

struct idnode {
    struct idnode *next;
    struct xfer_id id;
};

struct idmap {
    struct idnode *buckets[ID_BUCKETS];
};

static inline struct idnode **idmap_at(struct idmap *m, struct xfer_id id)
{
    uint64_t h = (id.counter ^ id.incarnation) * 0x9e3779b97f4a7c15ull;
    struct idnode **at = &m->buckets[h >> 54];
    while (*at && ((*at)->id.counter != id.counter || (*at)->id.incarnation != id.incarnation))
        at = &(*at)->next;
    return at;
}

static inline struct idnode *idmap_find(struct idmap *m, struct xfer_id id)
{
    return *idmap_at(m, id);
}

static inline void idmap_add(struct idmap *m, struct idnode *node, struct xfer_id id)
{
    struct idnode **at = idmap_at(m, id);
    node->id = id;
    node->next = NULL;
    *at = node;
}

static inline void idmap_remove(struct idmap *m, struct idnode *node)
{
    struct idnode **at = idmap_at(m, node->id);
    if (*at == node)
        *at = node->next;
}

/* -------------------------------------------------------------- connections */

/*
 *     CONNECTING --wire open--> HELLO --their hello--> AUTH --their proof--> UP --goodbye--> LEAVING
 *          |                      |                     |                    |                 |
 *          +----------------------+-- refused, silent --+--------------------+-----------------+--> CLOSING --> gone
 *
 * An accepted connection starts in HELLO. LEAVING: a goodbye was said by one side, everything of it was ended, and the
 * other side's answer or close is awaited for a bounded time.
 */
enum conn_state { CONN_CONNECTING, CONN_HELLO, CONN_AUTH, CONN_UP, CONN_LEAVING, CONN_CLOSING };

struct send_unit { /* asked for by a reader and not sent yet; page-major cursor */
    struct send_unit *next;
    struct lease *lease;
    uint32_t first, n, pos;
    uint16_t layer_begin, layer_end, part_layers, layer_pos; /* layer_pos: where the next part begins */
    enum fault_kind fault;                                   /* made on purpose: reuse, stale; else none */
};

struct conn {
    struct xfer *x;
    struct conn *next;
    struct wire_conn *wire;
    enum conn_state state;
    enum td_status why; /* of LEAVING and CLOSING */
    bool was_up, is_stalled;
    struct target *target;  /* NULL: accepted */
    struct xfer_peer *peer; /* while or after it was up */

    uint8_t hello_ours[PROTO_HELLO_MAX + PROTO_SEAL_BYTES], hello_theirs[PROTO_HELLO_MAX];
    uint32_t hello_ours_len, hello_theirs_len;
    uint64_t incarnation; /* of the peer */
    char name[PROTO_NAME_MAX + 1];

    uint32_t n_said, n_heard;   /* sealed messages */
    uint64_t heard_ns, beat_ns; /* last message in; next heartbeat out */
    uint64_t deadline_ns;       /* of handshake and leave */
    uint64_t begun_ns, up_ns;   /* when it was made; when the handshake was over */

    uint8_t *message; /* user message whose parts are arriving */
    uint32_t message_len, message_cap, message_total;
    uint16_t message_kind;
    uint32_t n_parts_out; /* user parts on their way */

    struct send_unit *out_units, **out_units_tail;
    uint32_t n_out_units;
    uint64_t out_bytes;  /* payload being sent */
    uint64_t in_bytes;   /* payload asked for and not arrived */
    uint64_t moved_ns;   /* when some last came */
    uint64_t part_bytes; /* what is asked for in one piece, unless a layer is longer */
};

struct xfer_peer { /* kept until xfer_close, so that a late use of the pointer is harmless */
    struct xfer_peer *next;
    uint64_t incarnation;
    char name[PROTO_NAME_MAX + 1];
    uint32_t n_conns; /* 0: down */
};

struct outgoing { /* a user message waiting for its connection */
    struct outgoing *next;
    uint64_t deadline_ns;
    uint16_t kind;
    uint32_t len;
    uint8_t data[];
};

struct target { /* an address that we connect to */
    struct target *next;
    char *address;
    struct conn *conn;   /* NULL: none, not even one on its way out */
    uint32_t n_failures; /* attempts since it was last connected */
    uint32_t n_short;    /* connections in a row that were lost soon after their handshake */
    uint64_t next_attempt_ns;
    uint64_t order;   /* among those never tried; different in each process */
    uint32_t n_pulls; /* that name it */
    struct outgoing *messages, **messages_tail;
    bool is_wanted, is_unreached; /* xfer_want() */
    bool is_needed;               /* as its timer last saw it */
    uint64_t trying_ns;           /* since when it is not connected, and should be; 0: it is */
};

/* ------------------------------------------------------------ leases, pulls */

enum lease_state { LEASE_OPEN, LEASE_COMPLETE, LEASE_DRAINING };

struct lease_unit {
    uint32_t first, n;
    uint16_t layer_begin, layer_end;
};

struct lease {
    struct idnode node;
    struct lease *next, *prev;
    struct xfer_lease_params params;
    enum lease_state state;
    struct conn *reader;
    uint64_t reader_incarnation; /* once it was bound */
    uint64_t expires_ns;
    struct xfer_page *pages;
    uint64_t *ready; /* [page][words of layers]: announced */
    uint32_t n_pages, cap_pages;
    struct lease_unit *units; /* for a reader that comes later */
    uint32_t n_units, cap_units;
    uint32_t n_final, tail_len;
    uint8_t tail[PROTO_TAIL_MAX];
    uint32_t in_flight;
    bool released, in_doubt;
    enum td_status end_status;
};

enum pull_state { PULL_WAITING, PULL_OPENING, PULL_ACTIVE, PULL_DRAINING };

struct pull_page { /* as the holder counts them */
    bool is_known; /* it was announced in some layer: its generation holds */
    uint32_t generation;
    uint16_t n_verified; /* layers */
};

struct pull {
    struct idnode node;
    struct pull *next, *prev;
    struct xfer_pull_params params; /* address: the target's */
    enum pull_state state;
    struct target *target;
    struct conn *conn;
    uint64_t began_ns;
    uint64_t open_ns, open_backoff_ns; /* when to ask (again) for the lease */
    struct pull_page *pages;
    void **places;  /* of our own pages */
    uint64_t *bits; /* [page][announced, asked, landed][words of layers] */
    uint32_t n_pages, cap_pages;
    struct lease_unit *units; /* announced, not asked for yet: [head, n) */
    uint32_t units_head, n_units, cap_units;
    uint32_t ask_page;
    uint16_t ask_layer; /* cursor in the unit at head */
    uint64_t asked_bytes;
    uint32_t arriving;
    uint32_t n_complete, n_prefix; /* pages verified in all layers; of these, and those had, without a gap from 0 */
    bool finished;
    uint32_t n_final, tail_len;
    uint8_t tail[PROTO_TAIL_MAX];
    enum td_status end_status;
    uint64_t moved_ns; /* when bytes that were asked for last came, or were first asked for */
    uint64_t bytes, first_announce_ns, last_announce_ns;
};

/* ---------------------------------------------------------------------- xfer */

struct ended { /* a lease that was: so that a late pull is told by name */
    struct idnode node;
    enum proto_reason reason;
};

struct early { /* a reader that asked for a lease before there was one: it need not ask again */
    struct idnode node;
    struct conn *conn; /* NULL: gone */
};

struct counters {
    _Atomic uint64_t bytes_in, bytes_out, pages_in, pages_out, pulls_ok, pulls_failed, checksum_errors, refused_stale,
        not_yet, stalled, messages_dropped, slower;
    _Atomic uint32_t leases_open, pulls_open, peers_up;
};

struct xfer {
    struct xfer_config config; /* strings owned; zeros replaced by defaults */
    char *name, *secret;
    struct kv_layout layout;
    uint64_t page_bytes, layer_bytes;
    uint32_t words, pages_max; /* of a bitmap of layers; that fit the arena */
    struct wire *wire;
    struct mailbox commands;
    int epoll_fd;
    pthread_t thread;
    bool stopping;
    struct absence absence;
    uint64_t now_ns, due_ns; /* of this turn, when the timers have work next; both without this process's absences */

    struct conn *conns;
    struct xfer_peer *peers;
    struct target *targets;
    uint64_t next_connect_ns; /* the pace of new connections (target.c) */
    struct lease *leases;
    struct pull *pulls;
    struct idmap leases_by_id, pulls_by_id, ended_by_id, early_by_id;
    struct ended *ended; /* [ENDED_KEPT], a ring */
    struct early *early; /* [EARLY_KEPT], a ring */
    uint32_t ended_at, early_at;

    struct counters counters;
    pthread_mutex_t transport_lock; /* what any thread reads and seldom changes: the two below */
    char transport[256];
    char (*unreached)[XFER_ADDRESS_BYTES];
    uint32_t n_unreached;
};

/* A command from another thread: run on the xfer thread, then freed. Each module embeds it in its own. */
struct command {
    struct mail mail;
    void (*run)(struct xfer *x, struct command *c);
};

static inline void command_push(struct xfer *x, struct command *c)
{
    mailbox_push(&x->commands, &c->mail);
}

/* The timers look again at t at the latest. */
static inline void due_at(struct xfer *x, uint64_t t)
{
    if (t < x->due_ns)
        x->due_ns = t;
}

bool bits_any(const uint64_t *bits, uint32_t begin, uint32_t end);
bool bits_all(const uint64_t *bits, uint32_t begin, uint32_t end);
void bits_set(uint64_t *bits, uint32_t begin, uint32_t end);

/* Whether [p, p + page_bytes) lies in the arena. */
bool xfer_in_arena(const struct xfer *x, const void *p);

/* target.c */
bool target_timer(struct xfer *x, struct target *t); /* false: nobody needs it any more */
void targets_connect(struct xfer *x); /* after their timers: begins as many connections as the pace allows */
struct target *target_get(struct xfer *x, const char *address);
void target_kick(struct xfer *x, struct target *t); /* somebody needs it connected */
void target_queue(struct xfer *x, struct target *t, struct outgoing *m);
void target_is_up(struct conn *c);                      /* sends what waited */
void target_failed(struct conn *c, enum td_status why); /* an attempt failed before the peer was up */
void target_lost(struct conn *c);                       /* its connection is gone */
void target_free(struct target *t);

/* peer.c */
extern const struct wire_events PEER_WIRE_EVENTS;    /* without user */
void conn_close(struct conn *c, enum td_status why); /* as lost, or for what the peer did */
void conn_timer(struct conn *c);
bool peer_is_up(const struct xfer *x, uint64_t incarnation);
void conn_leave_all(struct xfer *x); /* the process goes: goodbye to everybody */
struct conn *conn_add(struct xfer *x, enum conn_state state);
void conn_send_message(struct conn *c, uint16_t kind, const uint8_t *data, uint32_t len);
void conn_drop_messages(struct xfer *x, uint64_t n);
uint64_t conn_handshake_ns(const struct xfer *x);
static inline bool conn_is_up(const struct conn *c)
{
    return c && c->state == CONN_UP;
}
/* message: room for its seal behind it. */
static inline void conn_say(struct conn *c, uint8_t *message, uint32_t len)
{
    wire_send(c->wire, message, proto_seal(message, len, ++c->n_said), NULL, 0, NULL, NULL);
}

/* lease.c */
void lease_on_open(struct conn *c, struct xfer_id id, uint64_t holder_incarnation);
void lease_on_pull(struct conn *c, const struct proto_unit *u);
void lease_on_release(struct conn *c, struct xfer_id id, enum td_status status);
void lease_conn_lost(struct conn *c);
void lease_peer_lost(struct xfer *x, uint64_t incarnation); /* its last connection is gone */
bool lease_pump(struct conn *c); /* sends what is asked for, within credit and one turn's work */
void lease_timer(struct xfer *x, struct lease *l);
void lease_cancel_all(struct xfer *x);

/* pull.c */
void pull_on_up(struct target *t);                          /* its connection is up */
void pull_on_refused(struct target *t, enum td_status why); /* it can't be, and trying again won't help */
void pull_on_announce(struct conn *c, const struct proto_unit *u);
void pull_on_finish(struct conn *c, const struct proto_msg *m);
void pull_on_refuse(struct conn *c, struct xfer_id id, enum proto_reason reason);
void *pull_on_payload(struct conn *c, const struct proto_data *d, uint64_t payload_len, void **token_out);
void pull_land(void *token, void *to, const void *from, uint64_t len_bytes);
void pull_on_payload_done(struct conn *c, void *token, enum td_status status);
void pull_conn_lost(struct conn *c);
bool pull_pump(struct conn *c); /* asks for what was announced, within credit */
void pull_timer(struct xfer *x, struct pull *p);
void pull_cancel_all(struct xfer *x);
