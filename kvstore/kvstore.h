/*
 * The KV store process: blocks by key in DRAM, and below it on SSD.
 *
 *   LOOKUP(id, keys)  pins the longest stored prefix (one step: what was found can't be evicted any more), grants lease id
 *                     over it, announces what lies in DRAM at once and the rest as it arrives from SSD and verifies; the
 *                     first block that doesn't verify ends the prefix there. The lease's tail says how many came from where.
 *   OFFER(id, keys)   answers WANT with those it doesn't have and has room for; pulls them; a pulled block is visible only
 *                     after its bytes were verified.
 *
 * DRAM: one arena of slots of one page each, registered with the transfer layer, so that a hit is read straight from it.
 * On SSD they may be encoded (--codec; codec.h). A lossy codec is told to routers, which give such a store names of its own.
 * SSD: RocksDB with blob files (ssd.c, the only file that sees RocksDB) behind one bounded, rated writer thread, and reader threads
 * that take values straight from the blob files (ssd_tier.h). A block cools from DRAM to SSD by write-back: written when it is
 * first put (unless the writer is behind: then it stays dirty and is written before it is evicted, or dropped and counted). At
 * a clean stop everything dirty is written. A disk that is slow, full or failing makes a smaller cache (docs/store.md).
 *
 * Never an error for a request: any failure is a miss, counted by reason. It never blocks serving: a directory that can't be
 * opened is set aside (renamed) and the store starts empty; a full disk means a smaller cache.
 *
 * Threads: "main" owns the table, the tiers and leases (mailbox); "xfer" the wire; "ssd-write", "ssd-read-N"; "beat" tells
 * routers every 250 ms that we live. Routers attach as to a worker (worker/link.h) and get block events with tiers.
 */
#pragma once

#include "base/options.h"
#include "transfer/xfer.h"
#include "worker/geometry.h"

struct kvstore;

/* Defaults that the bench needs too; docs/store.md says how they were found. */
#define KVSTORE_READ_THREADS    4
#define KVSTORE_WRITE_MIB_PER_S 400

struct kvstore_options {
    struct geometry_options geometry; /* the layout only: no weights are read */
    const char *name, *listen, *xfer_listen, *tls, *secret, *metrics_listen, *eviction, *dir, *codec, *faults, *routers,
        *advertise, *log_level;
    int64_t dram_bytes, ssd_bytes, read_threads, read_deadline_ms, write_queue_bytes, write_bytes_per_s, lease_ms;
    int64_t silence_ms;
    const char *tenant_quotas;
    double tenant_quota; /* 0: as 1 */
};

extern const struct option KVSTORE_OPTIONS[];

struct kvstore_config {
    struct kvstore_options options;
    struct xfer_hub *hub; /* loopback transfers within one process; NULL: as tls says */
};

enum td_status kvstore_open(const struct kvstore_config *config, struct kvstore **out, struct td_error *error_out);
enum td_status kvstore_run(struct kvstore *s); /* until kvstore_stop */
/* Any thread: no new work, dirty blocks are written, then kvstore_run returns. Twice: at once. */
void kvstore_stop(struct kvstore *s);
void kvstore_reload(struct kvstore *s); /* any thread: --faults=@FILE is read again */
void kvstore_close(struct kvstore *s);  /* NULL is fine */

const char *kvstore_address(const struct kvstore *s);      /* of the gRPC service, port filled in */
const char *kvstore_xfer_address(const struct kvstore *s); /* where workers look up and offer */
