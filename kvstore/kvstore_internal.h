/* What the files of the store share. Everything belongs to the main thread, unless it says otherwise. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "base/absence.h"
#include "base/metrics.h"
#include "base/queue.h"
#include "kvstore/kvstore.h"
#include "kvstore/ssd_tier.h"
#include "kvstore/table.h"
#include "proto/wire/store_msg.h"
#include "sched/pins.h"
#include "worker/event_queue.h"
#include "worker/keeps.h"
#include "worker/link.h"
#include "worker/reach.h"
#include "worker/register.h"

/* Sums that hold: blocks asked for = hits + misses by reason; blocks offered = puts + known + dropped by
 * reason. */
#define KVSTORE_METRICS(X)                                                                                             \
    X(STORE_ASKED, METRIC_COUNTER, "tandem_store_asked_blocks_total", "blocks asked for")                              \
    X(STORE_HITS_DRAM, METRIC_COUNTER, "tandem_store_hits_dram_blocks_total", "blocks served from DRAM")               \
    X(STORE_HITS_SSD, METRIC_COUNTER, "tandem_store_hits_ssd_blocks_total", "blocks served from SSD")                  \
    X(STORE_MISS_ABSENT, METRIC_COUNTER, "tandem_store_miss_absent_blocks_total", "beyond the longest stored prefix")  \
    X(STORE_MISS_NO_SLOT, METRIC_COUNTER, "tandem_store_miss_no_slot_blocks_total", "no slot to read them into")       \
    X(STORE_MISS_CORRUPT, METRIC_COUNTER, "tandem_store_miss_corrupt_blocks_total", "did not verify, or stand behind") \
    X(STORE_MISS_IO, METRIC_COUNTER, "tandem_store_miss_io_blocks_total", "could not be read, or stand behind")        \
    X(STORE_MISS_SLOW, METRIC_COUNTER, "tandem_store_miss_slow_blocks_total", "SSD too slow or away just now")         \
    X(STORE_MISS_ENDED, METRIC_COUNTER, "tandem_store_miss_ended_blocks_total", "reader was gone before it was ready") \
    X(STORE_MISS_STOPPING, METRIC_COUNTER, "tandem_store_miss_stopping_blocks_total", "asked while stopping")          \
    X(STORE_OFFERED, METRIC_COUNTER, "tandem_store_offered_blocks_total", "blocks offered")                            \
    X(STORE_PUTS, METRIC_COUNTER, "tandem_store_put_blocks_total", "blocks taken, verified and made visible")          \
    X(STORE_KNOWN, METRIC_COUNTER, "tandem_store_known_blocks_total", "offered blocks already here or on their way")   \
    X(STORE_DROP_NO_SLOT, METRIC_COUNTER, "tandem_store_drop_no_slot_blocks_total", "offered, no slot to take")        \
    X(STORE_DROP_TRANSFER, METRIC_COUNTER, "tandem_store_drop_transfer_blocks_total", "wanted, but never arrived")     \
    X(STORE_DROP_STOPPING, METRIC_COUNTER, "tandem_store_drop_stopping_blocks_total", "offered while stopping")        \
    X(STORE_BAD_MESSAGES, METRIC_COUNTER, "tandem_store_bad_messages_total", "messages that make no sense")            \
    X(STORE_EVICTED_DRAM, METRIC_COUNTER, "tandem_store_evicted_dram_blocks_total", "blocks that left DRAM")           \
    X(STORE_EVICTED_SSD, METRIC_COUNTER, "tandem_store_evicted_ssd_blocks_total", "blocks that left SSD for room")     \
    X(STORE_LOST_DIRTY, METRIC_COUNTER, "tandem_store_lost_dirty_blocks_total", "evicted before they were written")    \
    X(STORE_SSD_WRITES, METRIC_COUNTER, "tandem_store_ssd_written_blocks_total", "blocks made durable")                \
    X(STORE_SSD_WRITE_FULL, METRIC_COUNTER, "tandem_store_ssd_write_full_blocks_total", "not written: no space")       \
    X(STORE_SSD_WRITE_ERRORS, METRIC_COUNTER, "tandem_store_ssd_write_error_blocks_total", "not written: error")       \
    X(STORE_SSD_CORRUPT, METRIC_COUNTER, "tandem_store_ssd_corrupt_blocks_total", "read, did not verify, deleted")     \
    X(STORE_SSD_READ_ERRORS, METRIC_COUNTER, "tandem_store_ssd_read_error_blocks_total", "could not be read, deleted") \
    X(STORE_SSD_ORPHANS, METRIC_COUNTER, "tandem_store_ssd_orphan_blocks_total",                                       \
      "on disk after an error and not known: deleted")                                                                 \
    X(STORE_SSD_LOST, METRIC_COUNTER, "tandem_store_ssd_lost_blocks_total", "durable, and gone after an error")        \
    X(STORE_SSD_DROPPED, METRIC_COUNTER, "tandem_store_ssd_dropped_blocks_total", "of another layout, at start")       \
    X(STORE_SSD_SET_ASIDE, METRIC_COUNTER, "tandem_store_ssd_set_aside_total", "directories set aside at start")       \
    X(STORE_LOAD_SECONDS, METRIC_SECONDS, "tandem_store_ssd_read_seconds", "asked for until verified in DRAM")         \
    X(STORE_SSD_UP, METRIC_GAUGE, "tandem_store_ssd_up", "1: there is an SSD tier and it takes writes")                \
    X(STORE_SSD_SLOW, METRIC_GAUGE, "tandem_store_ssd_slow", "1: reads are late, only probes are sent")                \
    X(STORE_SSD_BYTES, METRIC_GAUGE, "tandem_store_ssd_bytes", "measured size of the directory")                       \
    X(STORE_SSD_BLOCK_BYTES, METRIC_GAUGE, "tandem_store_ssd_block_bytes",                                             \
      "what a block takes on SSD, mean of recent ones")                                                                \
    X(STORE_QUEUE_BYTES, METRIC_GAUGE, "tandem_store_write_queue_bytes", "waiting to be written")                      \
    X(STORE_BLOCKS_DRAM, METRIC_GAUGE, "tandem_store_blocks_dram", "blocks in DRAM")                                   \
    X(STORE_BLOCKS_SSD, METRIC_GAUGE, "tandem_store_blocks_ssd", "blocks on SSD")                                      \
    X(STORE_SLOTS_FREE, METRIC_GAUGE, "tandem_store_pages_free", "slots that nothing is in")                           \
    X(STORE_SLOTS_CACHED, METRIC_GAUGE, "tandem_store_pages_cached", "slots with blocks that nobody reads")            \
    X(STORE_SLOTS_LEASED, METRIC_GAUGE, "tandem_store_pages_leased", "slots with blocks under a lease")                \
    X(STORE_SLOTS_HELD, METRIC_GAUGE, "tandem_store_pages_held", "slots being filled")
enum { METRICS_ENUM(KVSTORE_METRICS) };

struct store_lease { /* the answer to a lookup; keeps its entries pinned until the wire has ended it */
    struct store_lease *next;
    struct kvstore *store;
    struct xfer_id id;
    struct store_entry **entries;
    bool *from_ssd;
    /* entries[n_announced..n) are not announced yet: the first of them is being read from SSD. */
    uint32_t n, n_announced;
    bool is_finished; /* the reader was told how many blocks there are */
    bool is_ended;    /* the wire's lease has ended; kept until free_ns if it is in doubt */
    uint64_t free_ns;
    uint64_t moved_ns; /* when it was granted, or last announced a block */
};

struct fill { /* a pull of offered blocks */
    struct kvstore *store;
    uint64_t holder; /* incarnation of the process that offered them */
    struct xfer_id id;
    struct store_entry **entries;
    uint8_t **addresses; /* where they land; read on the xfer thread, and fixed before the pull starts */
    uint32_t n;
    _Atomic uint32_t n_verified;
};

enum store_work_kind {
    WORK_LINK,
    WORK_MESSAGE,
    WORK_LEASE_END,
    WORK_FILL_END,
    WORK_LOADED,
    WORK_WRITTEN,
    WORK_SSD_OVER,
    WORK_SSD_LISTED,
    WORK_STOP
};

struct store_work { /* a message from another thread to the main thread; freed by the main thread */
    struct mail mail;
    enum store_work_kind kind;
    struct link_mail *link;
    uint16_t message_kind;
    uint64_t sender; /* incarnation of the peer that sent the message */
    struct bytes data;
    struct store_lease *lease;
    struct fill *fill;
    struct store_entry *entry;
    enum td_status status;
    bool in_doubt;
    uint64_t n_bytes;
};

struct kvstore {
    struct kvstore_options options;
    char name[64];
    struct clock clock;
    struct absence absence; /* absences of the main thread */
    struct log log;
    struct secret *secret; /* NULL: none */
    uint64_t incarnation;
    struct geometry geometry;
    enum block_codec codec; /* of the SSD tier */
    uint64_t page_bytes, arena_bytes;
    void *arena;
    int arena_fd;                /* 0: the arena is not shared */
    struct tenant_share *quotas; /* shares of named tenants */
    uint32_t n_quotas;
    struct store_table *table;
    struct ssd_tier *ssd; /* NULL: there is no SSD tier */
    struct pins pins;
    struct keeps keeps;  /* the pins and flushes that routers are told of, prompt by prompt */
    struct bytes doomed; /* keys of blocks to be forgotten when they are no longer in use */
    uint64_t probed_ns;  /* when a slow SSD was last probed */
    uint64_t loading_ns; /* when a slot was last wanted for reading from SSD */
    bool must_advance;   /* a read from SSD has ended: leases may be able to announce more */
    struct faults *faults;
    struct xfer *xfer;
    struct link_server *links;
    struct registrar *registrar;
    struct reach_config reach;
    char xfer_listen[REACH_BYTES], xfer_address[REACH_BYTES]; /* as in worker/worker_internal.h */
    struct metrics *metrics;
    struct metrics_set *counters;
    struct metrics_http *metrics_http;
    char metrics_address[64];
    struct mailbox mailbox;

    uint64_t tick; /* counts requests; an entry's last_used is the tick of a request */
    struct store_lease *leases;
    uint32_t n_wire; /* leases and pulls that have not ended; stopping waits for them */
    struct event_queue events;

    /* Guards audit, which the thread "beat" reads: a few words, no queue is needed. */
    pthread_mutex_t load_lock;
    struct table_audit audit;
    _Atomic bool stopping, forced;
    bool is_closing; /* the main loop has ended: mail is only freed */
};

/* kvstore.c */
struct store_work *store_work_new(enum store_work_kind kind);
void store_event(struct kvstore *s, enum block_event_kind kind, enum block_tier tier, const struct store_entry *e);
void store_count(struct kvstore *s, uint32_t metric, uint64_t by);

/* tiers.c: which tier a block lies in, and what moves between tiers */

/* Address of the entry's slot in the arena. */
uint8_t *tier_address(const struct kvstore *s, const struct store_entry *e);
/* Makes a slot free, by evicting if needed; false if that is impossible. is_new: the slot is for an
 * offered block, else for a block that is read from SSD. */
bool tier_make_slot(struct kvstore *s, uint32_t for_tenant, bool is_new);
/* Starts to read e from SSD; needs a free slot. */
void tier_start_load(struct kvstore *s, struct store_entry *e);
/* The block is missing or wrong, not merely unreadable now. */
bool tier_is_corrupt(enum td_status read_status);
bool tier_is_slow(const struct kvstore *s); /* blocks that are on SSD only count as absent */
/* Reads e although nobody waits for it, to see whether a slow SSD has recovered. */
void tier_probe(struct kvstore *s, struct store_entry *e);
void tier_loaded(struct kvstore *s, struct store_entry *e, enum td_status status);
void tier_filled(struct kvstore *s, struct store_entry *e, bool is_verified);
void tier_written(struct kvstore *s, struct store_entry *e, enum td_status status);
void tier_write_dirty(struct kvstore *s); /* as many blocks as the write queue takes */
void tier_make_ssd_room(struct kvstore *s, uint64_t n_bytes);
/* Corrects the table; keys: all blocks on disk, in rising order. */
void tier_compare_ssd(struct kvstore *s, const struct bytes *keys);
/* Takes e out of the table; false: it is in use. May end e. */
bool tier_forget(struct kvstore *s, struct store_entry *e);
/* Deletes the block from disk for good, also one that the table does not know: after an error it may be
 * there all the same. key NULL: every such block. */
void tier_forget_on_disk(struct kvstore *s, const struct block_key *key);
bool tier_is_settled(const struct kvstore *s); /* nothing is dirty or being written */
enum td_status tier_open_ssd(struct kvstore *s, struct td_error *error_out);

/* requests.c: lookups and offers, with their leases and pulls */
void request_on_message(void *user, struct xfer_peer *peer, uint16_t kind, const void *data, uint32_t len_bytes);
void request_message(struct kvstore *s, const struct store_work *work);
void request_lease_ended(struct kvstore *s, struct store_lease *l, bool in_doubt);
void request_fill_ended(struct kvstore *s, struct fill *f);
void request_advance_all(struct kvstore *s);
/* Ends leases that have waited too long for SSD; true if any lease still waits. */
bool request_expire(struct kvstore *s, uint64_t now);
void request_free_doubtful(struct kvstore *s, uint64_t now, bool all);

/* pinned.c: pins and flushes from routers. keys are concatenated block keys. */
void pinned_keep(struct kvstore *s, ProtobufCBinaryData keys, uint32_t ttl_ms);
void pinned_forget(struct kvstore *s, ProtobufCBinaryData keys); /* no keys: every block */
void pinned_added(struct kvstore *s, struct store_entry *e);     /* for each new entry: it may be pinned */
void pinned_tick(struct kvstore *s, uint64_t now);
/* Call before the SSD tier is closed, so that blocks to be forgotten that are still in use do not come back
 * at the next start. */
void pinned_forget_in_use(struct kvstore *s);

/* quotas.c: parses "NAME=SHARE,..."; text may be NULL. The caller frees *out. */
enum td_status quotas_parse(const char *text, struct tenant_share **out, uint32_t *n_out, struct td_error *error_out);

/* audit.c */

/* Call after event_queue_flush, so that the audit and the events agree. */
void kvstore_audit_answer(struct kvstore *s, struct link *link, uint64_t nonce);
