/*
 * The KV store process: blocks by key in DRAM, and below it on SSD.
 *
 *   LOOKUP(id, keys)  pins the longest stored prefix in one step (what was found can't be evicted any more),
 *   grants
 *                     lease id over it, announces the blocks in DRAM at once and the others as they arrive
 *                     from SSD and verify. The first block that doesn't verify ends the prefix. The lease's
 *                     tail says how many blocks came from DRAM and how many from SSD.
 *   OFFER(id, keys)   answers WANT with the blocks that the store doesn't have and has room for, and pulls
 *                     them. A pulled block is visible only after its bytes were verified.
 *
 * DRAM: one arena of slots of one page each, registered with the transfer layer, so that a hit is read
 * straight from it.
 *
 * SSD: RocksDB with blob files (ssd.c and ssd_room.c; no other file calls RocksDB) behind one writer thread
 * with a bounded queue and a limited rate, and reader threads that take values straight from the blob files
 * (ssd_tier.h). Blocks on SSD may be encoded (--codec; codec.h). A lossy codec is told to routers, which use
 * separate block keys for such a store.
 *
 * A block moves from DRAM to SSD by write-back: it is written when it is first put. If the writer is behind,
 * the block stays dirty, and is written later or dropped and counted. At a clean stop everything dirty is
 * written.
 *
 * No failure is an error for a request: it is a miss, counted by reason. Nothing blocks serving: a directory
 * that can't be opened is set aside (renamed) and the store starts empty; a disk that is slow, full or
 * failing makes a smaller cache (docs/store.md).
 *
 * Threads: "main" owns the table, the tiers and the leases, and gets mail from the others: "xfer" (the wire),
 * "ssd-write", "ssd-read-N", and "beat", which tells routers every 250 ms that the store lives. Routers
 * attach as to a worker (worker/link.h) and get block events with tiers.
 */
#pragma once

#include "base/options.h"
#include "proto/rpc/rpc.h"
#include "transfer/xfer.h"
#include "worker/geometry.h"

struct kvstore;

/* Defaults that the bench also needs; docs/store.md says how they were found. */
#define KVSTORE_READ_THREADS    4
#define KVSTORE_WRITE_MIB_PER_S 400

struct kvstore_options {
    struct rpc_tls_files tls;
    struct geometry_options geometry; /* only the layout is used; no weights are read */
    const char *name, *listen, *xfer_listen, *transports, *secret, *secret_file, *metrics_listen, *eviction, *dir,
        *codec, *faults, *routers, *advertise, *log_level;
    bool is_trusted_network, is_insecure, encrypts;
    int64_t dram_bytes, ssd_bytes, read_threads, read_deadline_ms, write_queue_bytes, write_bytes_per_s, lease_ms;
    int64_t silence_ms;
    const char *tenant_quotas;
    double tenant_quota; /* share of each tier that one tenant may hold under pressure; 0 means 1 */
};

extern const struct option KVSTORE_OPTIONS[];

struct kvstore_config {
    struct kvstore_options options;
    struct xfer_hub *hub; /* for loopback transfers within one process; NULL: as --transports says */
};

enum td_status kvstore_open(const struct kvstore_config *config, struct kvstore **out, struct td_error *error_out);
enum td_status kvstore_run(struct kvstore *s); /* returns after kvstore_stop */
/* Any thread. Takes no new work and writes dirty blocks, then kvstore_run returns. A second call ends it
 * at once. */
void kvstore_stop(struct kvstore *s);
void kvstore_reload(struct kvstore *s); /* any thread; reads --faults=@FILE again */
void kvstore_close(struct kvstore *s);  /* NULL is fine */

const char *kvstore_address(const struct kvstore *s); /* of the gRPC service, with the port filled in */
/* The transfer address, to which workers send lookups and offers. */
const char *kvstore_xfer_address(const struct kvstore *s);
