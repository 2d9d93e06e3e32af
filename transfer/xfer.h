/*
 * Moves KV pages between processes. The reader pulls: whoever has pages grants leases, the reader asks for pages and says
 * where they land, so no remote process ever writes into a pool on its own, and a dying reader harms nobody.
 *
 *   holder:  xfer_lease_grant -> xfer_lease_announce (as layers get ready) -> xfer_lease_finish -> on_lease_end, once
 *   reader:  xfer_pull_start -> (units arrive, each verified) -> on_pull_end, once
 *
 * States of a lease, on the holder's side:
 *
 *     OPEN --finish--> COMPLETE --reader's release--> ENDED(ok)
 *       |                 |
 *       +--- expiry, peer lost, cancel, frozen reader ---> DRAINING --nothing in flight--> ENDED(reason)
 *
 * A page of a lease may be read by the wire until on_lease_end; a page of a pull may be written until on_pull_end. Cancel
 * means: stop issuing, wait for what is in flight, then the end callback. No page with a transfer in flight is handed out.
 *
 * A unit is (run of pages, range of layers), contiguous inside each page. The checksum of each page part covers its
 * identity (transfer id, page index, layer range, generation) and its bytes, so that a swapped, shifted or stale part fails.
 *
 * A lease may be pulled by one reader. Pulls may overtake the grant: they are answered "not yet" and asked again until
 * their deadline. Everything stale (incarnation, generation, ended lease) is refused by name and counted.
 *
 * Liveness: the xfer thread, which never computes for long, sends heartbeats every 250 ms on every connection; 1 s of
 * silence is death. A goodbye tells a leave from a death. Peers must prove the cluster secret (HMAC-SHA-256 over both nonces
 * and incarnations) and have the same layout before anything else is accepted: a page is moved whole, as it lies in the pool.
 *
 * Threads: one thread "xfer" owns all of it; the functions here may be called from any thread and only enqueue; callbacks
 * come on the xfer thread and must not block. Errors: nothing here aborts on what a peer does.
 *
 * Backends: XFER_NET (TCP, transfer/wire_tcp.c, or UCX, transfer/wire_ucx.c; for peers on one host payloads straight from the
 * holder's arena, if that is shared: transfer/wire_mapped.c) and XFER_LOOPBACK (between xfers of one process, found by address in
 * the given hub). Both run the same protocol code over transfer/wire.h.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/log.h"
#include "base/status.h"
#include "proto/wire/kv_layout.h"

struct xfer;
struct xfer_peer; /* a connected, authenticated process; valid from on_peer_up to on_peer_down */
struct xfer_hub;  /* where loopback xfers of one process find one another */

enum xfer_backend { XFER_NET, XFER_LOOPBACK };

/* Names one transfer of one request for ever: who made it up, and a counter of theirs. */
struct xfer_id {
    uint64_t incarnation;
    uint64_t counter;
};

struct xfer_stats { /* a snapshot; sums since start */
    uint64_t bytes_in, bytes_out, pages_in, pages_out;
    uint64_t pulls_ok, pulls_failed, checksum_errors, refused_stale, not_yet, stalled, messages_dropped;
    uint64_t slower; /* connections by a slower transport than `tls` asks for */
    uint32_t leases_open, pulls_open, peers_up;
};

struct xfer_callbacks {
    void *user;
    /* Optional. Between up and down the peer may be used; messages and ends of that peer come before its down. */
    void (*on_peer_up)(void *user, struct xfer_peer *peer, uint64_t incarnation, const char *name);
    void (*on_peer_down)(void *user, struct xfer_peer *peer, uint64_t incarnation,
                         enum td_status why); /* TD_OK: goodbye */
    /* A message of the layers above (kind is theirs); data borrowed during the call. */
    void (*on_message)(void *user, struct xfer_peer *peer, uint16_t kind, const void *data, uint32_t len_bytes);
};

struct xfer_config {
    enum xfer_backend backend;
    struct xfer_hub *hub; /* loopback only */
    const char *name;     /* shown to peers and in logs */
    const char *listen;   /* "HOST:PORT"; port 0 picks one; loopback: any unique text; NULL: only connects out */
    /* "HOST:PORT" that peers are told: an any-address listens on its network device. NULL: on the first that is up */
    const char *reached_at;
    /* "auto": TCP, and on one host the mapped arena. "tcp": TCP alone. "ucx" (shared memory, tcp beyond) or a UCX_TLS list ("rc,tcp"): by UCX.
     * Both sides must say TCP, or both UCX. */
    const char *tls;
    uint64_t incarnation;           /* of this process */
    const char *secret;             /* cluster secret; NULL is "" */
    const struct kv_layout *layout; /* borrowed */
    void *arena;                    /* the pool's memory: mapped and registered once; all pages lie in it */
    uint64_t arena_bytes;
    int arena_fd; /* of mem_map_shared: readers on this host may map the arena, with tls "auto". Borrowed; 0: not shared */
    uint64_t heartbeat_ns, silence_ns; /* 0: 250 ms and 1 s */
    uint32_t max_inflight_bytes;       /* per peer and direction; 0: 32 MiB */
    struct faults *faults;             /* borrowed; NULL: none */
    bool is_driven; /* no thread of its own: the caller calls xfer_step, which makes runs that replay exactly */
    const struct clock *clock;
    const struct log *log;
    struct xfer_callbacks callbacks;
};

struct xfer_hub *xfer_hub_open(void);
void xfer_hub_close(struct xfer_hub *hub); /* after all its xfers */

/* Starts the threads and listens. TD_ERR_IO names the address. */
enum td_status xfer_open(const struct xfer_config *config, struct xfer **out, struct td_error *error_out);
/* Ends every lease and pull (TD_ERR_CANCELLED), says goodbye, joins the threads. NULL is fine. Driven: after xfer_stop. */
void xfer_close(struct xfer *x);

/* Driven only, on one thread: a turn that never waits; true if anything happened. Else nothing will before *due_ns_out. */
bool xfer_step(struct xfer *x, uint64_t *due_ns_out);
/* Driven only: begins what xfer_close does. True once all is over: step until then. */
bool xfer_stop(struct xfer *x);

const char *xfer_address(const struct xfer *x); /* where it listens, port filled in; "" if it does not */
struct xfer_stats xfer_stats(struct xfer *x);
/* The transports in use as read back from the endpoints, e.g. "posix", "tcp/lo"; "" before the first peer. */
void xfer_transport(struct xfer *x, char *out, uint32_t out_bytes);

/*
 * Peers that will be asked for pages: connected now, so that the first transfer does not pay for it, and again whenever that ends. A
 * call replaces the list. One that is not connected after 1.5 silences and a failed attempt is unreached, is logged, and is tried again once a second.
 */
enum { XFER_ADDRESS_BYTES = 128 };
void xfer_want(struct xfer *x, const char *const *addresses, uint32_t n); /* copied */
uint32_t xfer_unreached(struct xfer *x, char (*out)[XFER_ADDRESS_BYTES], uint32_t cap);
uint64_t xfer_peer_incarnation(const struct xfer_peer *peer); /* any time after on_peer_up */

/* A message to a process by address; connects first if need be. Dropped (and counted) if it can't be reached. data copied. */
void xfer_send(struct xfer *x, const char *address, uint16_t kind, const void *data, uint32_t len_bytes);
void xfer_send_peer(struct xfer *x, struct xfer_peer *peer, uint16_t kind, const void *data, uint32_t len_bytes);

/* ------------------------------------------------------------------- holder */

struct xfer_lease_params {
    struct xfer_id id;
    uint64_t reader_incarnation; /* only this process may pull; 0: whoever names the id first */
    bool reader_is_up;    /* it asked for the lease, so it is connected: the lease ends when it is not, also unread */
    uint64_t duration_ns; /* counted anew at every message of the reader about this lease */
    /*
     * Once, when no transfer of this lease is in flight any more. TD_OK: released by the reader after all was verified.
     * TD_ERR_DEADLINE: expired. TD_ERR_PEER_LOST. TD_ERR_CANCELLED. in_doubt: the reader never said it was done while
     * bytes may have been on their way, so the pages belong into quarantine.
     */
    void (*on_end)(void *user, struct xfer_id id, enum td_status status, bool in_doubt);
    void *user;
};

/* on_end gets TD_ERR_INVALID if the id is in use. */
void xfer_lease_grant(struct xfer *x, const struct xfer_lease_params *params);

/* One page of a lease: index counts from 0 within the transfer. */
struct xfer_page {
    const void *data;    /* in the arena; stays as it is until on_end */
    uint32_t generation; /* of the page in its pool */
};

/* Pages first_index.. (n_pages of them) are ready in layers [layer_begin, layer_end): their bytes won't change any more. */
void xfer_lease_announce(struct xfer *x, struct xfer_id id, uint32_t first_index, const struct xfer_page *pages,
                         uint32_t n_pages, uint16_t layer_begin, uint16_t layer_end);

/*
 * All there will be: the transfer has n_pages pages, every layer of which was or will have been announced before this
 * call. tail (<= 256 bytes, copied) goes to the reader with it: for the layers above (first token and so on).
 */
void xfer_lease_finish(struct xfer *x, struct xfer_id id, uint32_t n_pages, const void *tail, uint32_t tail_len_bytes);
void xfer_lease_cancel(struct xfer *x, struct xfer_id id);

/* ------------------------------------------------------------------- reader */

struct xfer_pull_result {
    enum td_status status; /* TD_OK: n_pages pages are there, those had, and those that arrived and were verified */
    /* Of the lease, n_have included; of a pull that failed: those known to be there, without a gap from 0. */
    uint32_t n_pages;
    const void *tail; /* of xfer_lease_finish; borrowed during the callback */
    uint32_t tail_len_bytes;
    uint64_t bytes; /* that arrived */
    /* By this process's clock, without its absences (base/absence.h); the first two are of announcements of pages that are not had: 0 if there were none. */
    uint64_t first_announce_ns, last_announce_ns, done_ns;
};

struct xfer_pull_params {
    struct xfer_id id;
    const char *address;         /* of the holder */
    uint64_t holder_incarnation; /* 0: any */
    /* Absolute, our clock, later by what this process is absent; also bounds "not yet". A holder that can't be reached for two
     * silences is lost before. */
    uint64_t deadline_ns;
    /*
     * The first n_have pages of the lease are there already: they are neither asked for nor placed, and nothing is written into
     * them. The pull waits for the holder's finish all the same, also where that is all of them. More than the lease turns out to have end it with TD_ERR_INVALID, then; more than fit the arena at once.
     */
    uint32_t n_have;
    /*
     * Where page index lands: page_bytes in the arena. Called once per index, when it is first announced; NULL ends the
     * pull with TD_ERR_NO_SPACE.
     */
    void *(*place)(void *user, struct xfer_id id, uint32_t index);
    /* Optional: pages [0, n_verified) are had, or complete and verified (rises; may skip values). */
    void (*on_progress)(void *user, struct xfer_id id, uint32_t n_verified);
    /* Once, when nothing writes into the pages any more. */
    void (*on_end)(void *user, struct xfer_id id, const struct xfer_pull_result *result);
    void *user;
};

/* on_end gets TD_ERR_INVALID if the id is being pulled already. params copied. */
void xfer_pull_start(struct xfer *x, const struct xfer_pull_params *params);
void xfer_pull_cancel(struct xfer *x, struct xfer_id id);
