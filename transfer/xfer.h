/*
 * Moves KV pages between processes. The reader pulls: the holder of pages grants a lease, and the reader asks
 * for pages and says where they land. So no remote process ever writes into a pool on its own, and a reader
 * that dies cannot damage anybody's memory.
 *
 *   holder: xfer_lease_grant -> xfer_lease_announce (as layers get ready) -> xfer_lease_finish -> on_end once
 *   reader: xfer_pull_start -> (parts arrive, each is verified) -> on_end once
 *
 * States of a lease, on the holder's side (a frozen reader counts as a lost peer):
 *
 *     OPEN --finish--> COMPLETE --reader's release--> ENDED(ok)
 *       |                 |
 *       +--- expiry, peer lost, cancel ---> DRAINING --nothing in flight--> ENDED(reason)
 *
 * The wire may read a page of a lease until the lease's on_end, and may write a page of a pull until the
 * pull's on_end. Cancelling means: send and ask for nothing more, wait for what is in flight, then call
 * on_end.
 *
 * A unit is (run of pages, range of layers), contiguous inside each page. The checksum of each part covers
 * its identity (transfer id, page index, layer range, generation) and its bytes, so a swapped, shifted or
 * stale part fails.
 *
 * One reader may pull a lease. A pull may arrive before the grant: the holder answers "not yet", and the
 * reader asks again until the pull's deadline. Everything stale (incarnation, generation, ended lease) is
 * refused with its reason and counted.
 *
 * Liveness: the xfer thread never computes for long and sends a heartbeat every 250 ms on every connection. A
 * peer that was silent for 1 s is dead. A goodbye message tells a leave from a death. A peer must prove the
 * cluster secret (HMAC-SHA-256 over both nonces and incarnations) and have the same layout before anything
 * else is accepted from it: a page is moved whole, as it lies in the pool.
 *
 * Threads: one thread "xfer" owns everything. The functions below may be called from any thread, unless they
 * say otherwise; they only enqueue a command. Callbacks come on the xfer thread and must not block.
 * Errors: nothing that a peer does aborts this process.
 *
 * Backends: XFER_NET is TCP (transfer/wire_tcp.c) or UCX (transfer/wire_ucx.c); between processes of one host
 * payloads are copied straight from the holder's arena if it is shared (transfer/wire_mapped.c).
 * XFER_LOOPBACK connects xfers of one process, found by address in the given hub. All run the same protocol
 * code over transfer/wire.h.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/log.h"
#include "base/secret.h"
#include "base/status.h"
#include "proto/wire/kv_layout.h"

struct xfer;
struct xfer_peer; /* a connected process that proved the secret; usable from on_peer_up to on_peer_down */
struct xfer_hub;  /* registry through which loopback xfers of one process find each other */

enum xfer_backend { XFER_NET, XFER_LOOPBACK };

/* Names one transfer of one request, never reused: incarnation of the router that made the id, and its
 * counter. */
struct xfer_id {
    uint64_t incarnation;
    uint64_t counter;
};

struct xfer_stats { /* a snapshot; all but the last three count since start */
    uint64_t bytes_in, bytes_out, pages_in, pages_out;
    uint64_t pulls_ok, pulls_failed, checksum_errors, refused_stale, not_yet, stalled, messages_dropped;
    uint64_t slower; /* connections whose transport is slower than `transports` asks for */
    uint32_t leases_open, pulls_open, peers_up;
};

struct xfer_callbacks {
    void *user;
    /* Optional. The peer may be used from up to down. All its messages, and the ends of its leases and
     * pulls, come before its down. */
    void (*on_peer_up)(void *user, struct xfer_peer *peer, uint64_t incarnation, const char *name);
    void (*on_peer_down)(void *user, struct xfer_peer *peer, uint64_t incarnation,
                         enum td_status why); /* TD_OK: the peer said goodbye */
    /* A message from the layers above, which define kind. data is borrowed during the call. */
    void (*on_message)(void *user, struct xfer_peer *peer, uint16_t kind, const void *data, uint32_t len_bytes);
};

struct xfer_config {
    enum xfer_backend backend;
    struct xfer_hub *hub; /* loopback only; borrowed */
    const char *name;     /* shown to peers and in logs; copied */
    /* "HOST:PORT"; port 0 picks one. Loopback: any unique text. NULL: does not listen. */
    const char *listen;
    /* "HOST:PORT" that peers are told. UCX over a network only: a listener on an any-address uses this
     * address's network device. NULL: the first device that is up. */
    const char *reached_at;
    /*
     * "auto": TCP, and the mapped arena between processes of one host. "tcp": TCP alone. "ucx": UCX's shared
     * memory on one host, else TCP. A UCX_TLS list ("rc,tcp"): payloads by UCX where both sides can, else by
     * TCP. Borrowed until xfer_close.
     */
    const char *transports;
    /* Nobody on the network is a stranger: UCX's network transports may be in the list. Without it they are
     * TD_ERR_INVALID, because whoever reaches them can write into this process's memory. */
    bool is_trusted_network;
    uint64_t incarnation;           /* of this process; not 0 */
    struct secret *secret;          /* the cluster secret; borrowed; NULL: none */
    bool encrypts;                  /* what goes over TCP is encrypted, by the secret; peers must do the same */
    const struct kv_layout *layout; /* copied by xfer_open */
    void *arena; /* the pool's memory, in which all pages lie: borrowed, mapped and registered once */
    uint64_t arena_bytes;
    /* From mem_map_shared; lets readers on this host map the arena if transports is "auto". Borrowed. 0: not
     * shared. */
    int arena_fd;
    uint64_t heartbeat_ns, silence_ns; /* 0: 250 ms and 1 s */
    uint32_t max_inflight_bytes;       /* limit of bytes in flight per connection and direction; 0: 32 MiB */
    struct faults *faults;             /* borrowed; NULL: none */
    /* No thread: the caller calls xfer_step on one thread, so that runs can be replayed exactly. */
    bool is_driven;
    const struct clock *clock;
    const struct log *log;
    struct xfer_callbacks callbacks;
};

struct xfer_hub *xfer_hub_open(void);
void xfer_hub_close(struct xfer_hub *hub); /* after all its xfers are closed */

/* Starts the threads and listens. On TD_ERR_IO error_out names the address. *out is the caller's, until
 * xfer_close. */
enum td_status xfer_open(const struct xfer_config *config, struct xfer **out, struct td_error *error_out);
/* Ends all leases and pulls with TD_ERR_CANCELLED, says goodbye, joins the threads, frees x. NULL is fine.
 * Driven: only after xfer_stop returned true. */
void xfer_close(struct xfer *x);

/* Driven only: one turn, never waits. True if anything happened; if false, nothing will happen before
 * *due_ns_out (by the clock) unless a peer sends something or a function here is called. */
bool xfer_step(struct xfer *x, uint64_t *due_ns_out);
/* Driven only: begins what xfer_close does. Returns true when all has ended; until then call xfer_step,
 * then this again. */
bool xfer_stop(struct xfer *x);

/* Address it listens on, with the port filled in; "" if it does not listen. */
const char *xfer_address(const struct xfer *x);
struct xfer_stats xfer_stats(struct xfer *x);
/* Transports that connections have used so far, as the endpoints report them ("mapped,tcp"); "" before the
 * first peer. */
void xfer_transport(struct xfer *x, char *out, uint32_t out_bytes);

/*
 * The peers from which pages will be pulled: connected now, so that the first transfer does not wait for it,
 * and again whenever the connection ends. Each call replaces the list. An address is unreached when it has
 * not been connected for 1.5 times silence_ns and at least one attempt has failed; that is logged, and
 * attempts go on about once a second.
 */
enum { XFER_ADDRESS_BYTES = 128 };
void xfer_want(struct xfer *x, const char *const *addresses, uint32_t n); /* addresses are copied */
/* Copies up to cap unreached addresses to out and returns their number. */
uint32_t xfer_unreached(struct xfer *x, char (*out)[XFER_ADDRESS_BYTES], uint32_t cap);
/* Valid at any time after on_peer_up, until xfer_close. */
uint64_t xfer_peer_incarnation(const struct xfer_peer *peer);

/* Sends a message to the process at an address and connects first if needed. data is copied. A message
 * that can't be delivered is dropped and counted; the sender is not told. */
void xfer_send(struct xfer *x, const char *address, uint16_t kind, const void *data, uint32_t len_bytes);
void xfer_send_peer(struct xfer *x, struct xfer_peer *peer, uint16_t kind, const void *data, uint32_t len_bytes);

/* ------------------------------------------------------------------- holder */

struct xfer_lease_params {
    struct xfer_id id;
    uint64_t reader_incarnation; /* only this process may pull; 0: the first process that names the id */
    /* The reader asked for the lease, so it is connected now: the lease ends with its last connection,
     * also if unread. */
    bool reader_is_up;
    /* The lease expires after this; each message of the reader about the lease starts the time anew. */
    uint64_t duration_ns;
    /*
     * Called once, when nothing of this lease is in flight any more. TD_OK: the reader released it after it
     * had verified everything. Else TD_ERR_DEADLINE (expired), TD_ERR_PEER_LOST or TD_ERR_CANCELLED.
     * in_doubt: bytes may still be on their way to a reader that never released the lease, so the pages
     * belong into quarantine.
     */
    void (*on_end)(void *user, struct xfer_id id, enum td_status status, bool in_doubt);
    void *user;
};

/* params are copied. on_end gets TD_ERR_INVALID if the id is in use. */
void xfer_lease_grant(struct xfer *x, const struct xfer_lease_params *params);

/* One page of a lease. Its index in the transfer follows from its place in the announcement, from 0. */
struct xfer_page {
    const void *data;    /* in the arena; must not change until on_end */
    uint32_t generation; /* of the page in its pool */
};

/* Layers [layer_begin, layer_end) of pages [first_index, first_index + n_pages) are complete: their bytes
 * won't change any more. pages[] is copied. Each layer of a page may be announced once. */
void xfer_lease_announce(struct xfer *x, struct xfer_id id, uint32_t first_index, const struct xfer_page *pages,
                         uint32_t n_pages, uint16_t layer_begin, uint16_t layer_end);

/*
 * Completes the lease: the transfer has n_pages pages, and every layer of each was announced before this
 * call. tail (up to 256 bytes, copied) goes to the reader with it; the layers above define it (first token
 * and so on).
 */
void xfer_lease_finish(struct xfer *x, struct xfer_id id, uint32_t n_pages, const void *tail, uint32_t tail_len_bytes);
void xfer_lease_cancel(struct xfer *x, struct xfer_id id);

/* ------------------------------------------------------------------- reader */

struct xfer_pull_result {
    /*
     * TD_OK: all n_pages pages are in place: the first n_have, and the pulled ones, verified. TD_ERR_STALE,
     * _NOT_FOUND, _CANCELLED: the holder refused. TD_ERR_PEER_LOST: also if bytes that were asked for do not
     * come. TD_ERR_CHECKSUM, _PROTOCOL: what the holder sent was wrong. TD_ERR_VERSION, _AUTH: the handshake
     * failed. TD_ERR_DEADLINE, _NO_SPACE, _INVALID: see xfer_pull_params. TD_ERR_CANCELLED: also by us.
     */
    enum td_status status;
    /* TD_OK: pages of the lease, n_have included. Else: pages [0, n_pages) are in place and verified (or
     * were the first n_have). */
    uint32_t n_pages;
    const void *tail; /* from xfer_lease_finish; borrowed during the callback */
    uint32_t tail_len_bytes;
    uint64_t bytes; /* bytes that arrived and were verified */
    /* By this process's clock less its absences (base/absence.h). The first two are the first and last
     * announcement of pages that had to be pulled; 0 if there was none. */
    uint64_t first_announce_ns, last_announce_ns, done_ns;
};

struct xfer_pull_params {
    struct xfer_id id;
    const char *address;         /* of the holder; copied */
    uint64_t holder_incarnation; /* 0: any process at that address */
    /*
     * Absolute, by our clock; moves later by each absence of this process. It also limits how long "not yet"
     * is accepted. If the holder can't be connected to, the pull ends earlier, after two times silence_ns,
     * with TD_ERR_PEER_LOST.
     */
    uint64_t deadline_ns;
    /*
     * The first n_have pages of the lease are in place already: they are neither placed nor asked for, and
     * nothing is written into them. The pull waits for the holder's finish even if these are all pages.
     * TD_ERR_INVALID ends the pull if n_have exceeds the lease's pages (known at its finish), or at once if
     * it exceeds the arena.
     */
    uint32_t n_have;
    /* Returns where page `index` lands: page_bytes in the arena. Called once per index, when the page is
     * first announced. NULL ends the pull with TD_ERR_NO_SPACE. */
    void *(*place)(void *user, struct xfer_id id, uint32_t index);
    /* Optional: pages [0, n_verified) are complete and verified, or are among the first n_have. Rises; may
     * skip values. */
    void (*on_progress)(void *user, struct xfer_id id, uint32_t n_verified);
    /* Called once, when nothing writes into the pages any more. */
    void (*on_end)(void *user, struct xfer_id id, const struct xfer_pull_result *result);
    void *user;
};

/* params are copied. on_end gets TD_ERR_INVALID if the id is being pulled already. */
void xfer_pull_start(struct xfer *x, const struct xfer_pull_params *params);
void xfer_pull_cancel(struct xfer *x, struct xfer_id id);
