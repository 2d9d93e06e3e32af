/*
 * What the files of the protocol share: the objects of one xfer, all owned by its thread.
 *
 *     xfer.c   the thread, commands from other threads, timers, counters
 *     peer.c   connections, handshake, heartbeats, goodbye, user messages
 *     target.c the addresses that this process connects to: when, how many at once, and when again
 *     lease.c  the holder: leases, and parts being sent
 *     pull.c   the reader: pulls, and parts asked for
 *
 * A connection is directed: the side that connects pulls over it. Two processes that pull from each other
 * have two connections; a peer is a process (an incarnation) with at least one connection that is up.
 *
 * Lifetimes: a payload in flight holds pointers to its connection and to its lease or pull. So a connection
 * is freed only in on_closed, which the wire calls when nothing is in flight on it; a lease or pull is freed
 * only when its own count of payloads (in_flight, arriving) is zero.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <pthread.h>

#include "base/absence.h"
#include "base/clock.h"
#include "base/list.h"
#include "base/queue.h"
#include "transfer/xfer_msg.h"
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
    /* Returns the link that points to the node with this id, or the NULL link at which such a node would be
 * added. */
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

/* Removes exactly this node; does nothing if the map holds another node, or none, under its id. */
static inline void idmap_remove(struct idmap *m, struct idnode *node)
{
    struct idnode **at = idmap_at(m, node->id);
    if (*at == node)
        *at = node->next;
}

/* -------------------------------------------------------------- connections */

/*
 * CONNECTING --wire open--> HELLO --hello came--> AUTH --proof came--> UP --goodbye--> LEAVING
 *      |                      |                    |                  |               |
 *      +----------------------+- refused, silent --+------------------+---------------+--> CLOSING --> gone
 *
 * An accepted connection starts in HELLO. LEAVING: one side said goodbye, all leases and pulls of the
 * connection were ended, and the other side's answer or close is awaited for a bounded time.
 */
enum conn_state { CONN_CONNECTING, CONN_HELLO, CONN_AUTH, CONN_UP, CONN_LEAVING, CONN_CLOSING };

/* What a reader asked for and was not sent yet. It is sent page by page, each page's layers in order. */
struct send_unit {
    struct send_unit *next;
    struct lease *lease;
    /* Pages [first, first + n); pos counts the pages sent completely. */
    uint32_t first, n, pos;
    /* part_layers: layers per part at most. layer_pos: first layer of the next part, in page first + pos. */
    uint16_t layer_begin, layer_end, part_layers, layer_pos;
    enum fault_kind fault; /* injected fault (reuse or stale), else none */
};

struct conn {
    struct xfer *x;
    struct conn *next;
    struct wire_conn *wire;
    enum conn_state state;
    enum td_status why; /* reason for LEAVING or CLOSING; TD_OK: goodbye */
    /* was_up: has reached UP. is_stalled: a pull found its bytes missing; conn_timer closes the
     * connection. */
    bool was_up, is_stalled;
    struct xfer_target *target; /* NULL: the peer connected to us */
    struct xfer_peer *peer;     /* set when the connection came up, and kept */

    uint8_t hello_ours[XFER_MSG_HELLO_MAX + XFER_MSG_SEAL_BYTES], hello_theirs[XFER_MSG_HELLO_MAX];
    uint32_t hello_ours_len, hello_theirs_len;
    uint64_t incarnation; /* of the peer, as its HELLO says; proved from UP on */
    char name[XFER_MSG_NAME_MAX + 1];

    uint32_t n_said, n_heard;   /* sealed messages sent and received: the seal's numbers */
    uint64_t heard_ns, beat_ns; /* when the peer last showed life; when the next heartbeat is due */
    uint64_t deadline_ns;       /* limit for the handshake or the leave */
    uint64_t begun_ns, up_ns;   /* when it was made; when the handshake ended */

    uint8_t *message; /* user message being put together from its parts; owned */
    uint32_t message_len, message_cap, message_total;
    uint16_t message_kind;
    uint32_t n_parts_out; /* parts of user messages sent and not done; bounded */

    /* Queue of parts to send. A unit is not counted in its lease's in_flight: it must go before the lease
     * does. */
    struct send_unit *out_units, **out_units_tail;
    uint32_t n_out_units;
    uint64_t out_bytes; /* bytes of parts given to wire_send and not done: the holder's credit */
    /* Bytes asked for and not arrived completely: asked_bytes of its pulls, and parts that are arriving.
     * The reader's credit. */
    uint64_t in_bytes;
    uint64_t moved_ns;   /* when a part last began or ended arriving */
    uint64_t part_bytes; /* preferred part length; 0: PART_BYTES of pull.c. A part is at least one layer. */
};

struct xfer_peer { /* freed by xfer_close only, so that a late use of the pointer is harmless */
    struct xfer_peer *next;
    uint64_t incarnation;
    char name[XFER_MSG_NAME_MAX + 1];
    uint32_t n_conns; /* connections that are up; 0: the peer is down */
};

struct outgoing { /* a user message that waits for its connection */
    struct outgoing *next;
    uint64_t deadline_ns;
    uint16_t kind;
    uint32_t len;
    uint8_t data[];
};

struct xfer_target { /* an address that this process connects to */
    struct xfer_target *next;
    char *address;
    /* The connection to it in any state, also one that is closing; NULL: none. */
    struct conn *conn;
    uint32_t n_failures; /* failed attempts since it was last connected */
    /* Attempts since start: successive attempts take the addresses of a name in turn. */
    uint32_t n_attempts;
    uint32_t n_short; /* connections in a row that were lost within STEADY_NS of their handshake */
    uint64_t next_attempt_ns;
    uint64_t order;   /* random rank among addresses without failed attempts; different in each process */
    uint32_t n_pulls; /* pulls that name it; not 0: keeps the target alive */
    struct outgoing *messages, **messages_tail;
    /* is_wanted: listed by xfer_want. is_unreached: reported by xfer_unreached. */
    bool is_wanted, is_unreached;
    bool is_needed;     /* has a reason to be connected; set by target_timer */
    uint64_t trying_ns; /* since when it has been tried without success; 0: connected, or not needed */
};

/* ------------------------------------------------------------ leases, pulls */

enum lease_state { LEASE_OPEN, LEASE_COMPLETE, LEASE_DRAINING };

struct lease_unit {
    uint32_t first, n;
    uint16_t layer_begin, layer_end;
};

struct lease {
    struct idnode node;
    LIST_ENTRY(lease) in_xfer;
    struct xfer_lease_params params;
    enum lease_state state;
    struct conn *reader;
    uint64_t reader_incarnation; /* set when the reader is bound, by its first PULL_OPEN */
    uint64_t expires_ns;
    struct xfer_page *pages;
    uint64_t *ready; /* [page][words]: a bit for each announced layer */
    uint32_t n_pages, cap_pages;
    struct lease_unit *units; /* announcements kept for a reader that is not bound yet */
    uint32_t n_units, cap_units;
    uint32_t n_final, tail_len;
    uint8_t tail[XFER_MSG_TAIL_MAX];
    uint32_t in_flight;
    bool released, in_doubt;
    enum td_status end_status;
};

enum pull_state { PULL_WAITING, PULL_OPENING, PULL_ACTIVE, PULL_DRAINING };

struct pull_page { /* indexed as in the lease */
    bool is_known; /* announced in at least one layer, so the generation is valid */
    uint32_t generation;
    uint16_t n_verified; /* layers verified */
};

struct pull {
    struct idnode node;
    LIST_ENTRY(pull) in_xfer;
    struct xfer_pull_params params; /* params.address: the target's */
    enum pull_state state;
    struct xfer_target *target;
    struct conn *conn;
    uint64_t began_ns;
    /* When to send PULL_OPEN next; pause after the next "not yet". */
    uint64_t open_ns, open_backoff_ns;
    struct pull_page *pages;
    void **places;  /* [page] in our arena; NULL: not placed, or among the first n_have */
    uint64_t *bits; /* [page][ANNOUNCED, ASKED, LANDED][words]: a bit for each layer */
    uint32_t n_pages, cap_pages;
    /* Announced and not asked for yet: units[units_head .. n_units). */
    struct lease_unit *units;
    uint32_t units_head, n_units, cap_units;
    uint32_t ask_page;
    /* Cursor in the first unit: ask_page pages of it were asked for, and ask_layer layers of the next
     * page. */
    uint16_t ask_layer;
    /* asked_bytes: asked for, not begun to arrive. arriving: parts that the wire is writing into our
     * pages. */
    uint64_t asked_bytes;
    uint32_t arriving;
    /* n_complete: pulled pages verified in all layers. n_prefix: pages [0, n_prefix) are in place (n_have
     * included). */
    uint32_t n_complete, n_prefix;
    bool finished;
    uint32_t n_final, tail_len;
    uint8_t tail[XFER_MSG_TAIL_MAX];
    enum td_status end_status;
    /* When a part last began or ended arriving, or was asked for while nothing was outstanding. */
    uint64_t moved_ns;
    uint64_t bytes, first_announce_ns, last_announce_ns;
};

/* ---------------------------------------------------------------------- xfer */

struct ended { /* a lease that has ended: a late pull is told the reason */
    struct idnode node;
    enum xfer_msg_reason reason;
};

struct early { /* a reader that asked before the lease was granted; it is bound at the grant */
    struct idnode node;
    struct conn *conn;    /* where it asked; NULL: that connection is gone, or the reader released the id */
    uint64_t released_by; /* incarnation of the process that released the id before the grant; 0: none */
};

struct counters {
    _Atomic uint64_t bytes_in, bytes_out, pages_in, pages_out, pulls_ok, pulls_failed, checksum_errors, refused_stale,
        not_yet, stalled, messages_dropped, slower;
    _Atomic uint32_t leases_open, pulls_open, peers_up;
};

struct xfer {
    /* As given, with zeros replaced by defaults. Of its strings only transports is used after xfer_open. */
    struct xfer_config config;
    char *name;
    struct secret *secret; /* borrowed */
    struct kv_layout layout;
    uint64_t page_bytes, layer_bytes;
    /* words: 64-bit words of a bitmap of layers. pages_max: pages that fit the arena. */
    uint32_t words, pages_max;
    struct wire *wire;
    struct mailbox commands;
    int epoll_fd;
    pthread_t thread;
    bool stopping;
    struct absence absence;
    /* now_ns: time of this turn. due_ns: when the timers have work next. Both exclude this process's
     * absences. */
    uint64_t now_ns, due_ns;

    struct conn *conns;
    struct xfer_peer *peers;
    struct xfer_target *targets;
    uint64_t next_connect_ns; /* no new connection begins before this time (target.c) */
    LIST_HEAD(, lease) leases;
    LIST_HEAD(, pull) pulls;
    struct idmap leases_by_id, pulls_by_id, ended_by_id, early_by_id;
    struct ended *ended; /* [ENDED_KEPT], a ring; ended_at counts entries written */
    struct early *early; /* [EARLY_KEPT], a ring; early_at counts entries written */
    uint32_t ended_at, early_at;

    struct counters counters;
    /* Guards the three members below: any thread may read them, they seldom change, and no answer by
     * message is worth it. */
    pthread_mutex_t transport_lock;
    char transport[256];
    char (*unreached)[XFER_ADDRESS_BYTES];
    uint32_t n_unreached;
};

/* A command from another thread: run on the xfer thread, then freed. Modules embed it as the first member
 * of their own. */
struct command {
    struct mail mail;
    void (*run)(struct xfer *x, struct command *c);
};

static inline void command_push(struct xfer *x, struct command *c)
{
    mailbox_push(&x->commands, &c->mail);
}

/* Makes the timers run at time t at the latest. */
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

/* False: the target is not needed any more and may be freed. */
bool target_timer(struct xfer *x, struct xfer_target *t);
/* Called after all target timers: begins as many connections as the pace allows. */
void targets_connect(struct xfer *x);
struct xfer_target *target_get(struct xfer *x, const char *address);
/* Something needs this target connected: looks at it as soon as allowed. */
void target_kick(struct xfer *x, struct xfer_target *t);
void target_queue(struct xfer *x, struct xfer_target *t, struct outgoing *m);
void target_is_up(struct conn *c);                      /* sends the messages that waited */
void target_failed(struct conn *c, enum td_status why); /* an attempt failed before the connection was up */
void target_lost(struct conn *c);                       /* its connection was freed */
void target_free(struct xfer_target *t);

/* peer.c */

extern const struct wire_events PEER_WIRE_EVENTS; /* `user` is not filled in */
/* Forced close; why: TD_ERR_PEER_LOST, or what the peer did wrong. */
void conn_close(struct conn *c, enum td_status why);
void conn_timer(struct conn *c);
bool peer_is_up(const struct xfer *x, uint64_t incarnation);
void conn_leave_all(struct xfer *x); /* says goodbye on all connections: this process leaves */
struct conn *conn_add(struct xfer *x, enum conn_state state);
void conn_send_message(struct conn *c, uint16_t kind, const uint8_t *data, uint32_t len);
void conn_drop_messages(struct xfer *x, uint64_t n);
uint64_t conn_handshake_ns(const struct xfer *x);
static inline bool conn_is_up(const struct conn *c)
{
    return c && c->state == CONN_UP;
}
/* Seals and sends a message. The buffer must have room for XFER_MSG_SEAL_BYTES behind the message. */
static inline void conn_say(struct conn *c, uint8_t *message, uint32_t len)
{
    wire_send(c->wire, message, xfer_msg_seal(message, len, ++c->n_said), NULL, 0, NULL, NULL);
}

/* lease.c */

void lease_on_open(struct conn *c, struct xfer_id id, uint64_t holder_incarnation);
void lease_on_pull(struct conn *c, const struct xfer_msg_unit *u);
void lease_on_release(struct conn *c, struct xfer_id id, enum td_status status);
void lease_conn_lost(struct conn *c);
/* Ends unread leases granted to a reader whose last connection is gone. */
void lease_peer_lost(struct xfer *x, uint64_t incarnation);
bool lease_pump(struct conn *c); /* sends what was asked for, within the credit and one turn's share */
void lease_timer(struct xfer *x, struct lease *l);
void lease_cancel_all(struct xfer *x);

/* pull.c */

void pull_on_up(struct xfer_target *t); /* the target's connection is up */
/* The peer refused the connection; another attempt would not help. */
void pull_on_refused(struct xfer_target *t, enum td_status why);
void pull_on_announce(struct conn *c, const struct xfer_msg_unit *u);
void pull_on_finish(struct conn *c, const struct xfer_msg *m);
void pull_on_refuse(struct conn *c, struct xfer_id id, enum xfer_msg_reason reason);
void *pull_on_payload(struct conn *c, const struct xfer_msg_data *d, uint64_t payload_len, void **token_out);
void pull_land(void *token, void *to, const void *from, uint64_t len_bytes);
void pull_on_payload_done(struct conn *c, void *token, enum td_status status);
void pull_conn_lost(struct conn *c);
bool pull_pump(struct conn *c); /* asks for what was announced, within the credit */
void pull_timer(struct xfer *x, struct pull *p);
void pull_cancel_all(struct xfer *x);
