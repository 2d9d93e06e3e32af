/*
 * Injected faults: a seeded script says which operation on the wire, on disk or in an RPC goes wrong, and
 * how. Tests use it; operators may use it to see what their clients see (--faults).
 *
 * A script is words between blanks: "seed=7 wire.payload:corrupt=0.01 disk.read:delay=0.05/20ms
 * wire.message:drop@100".
 *
 *     seed=N
 *     SITE:KIND[=SHARE][/DURATION][@FIRST[-LAST]]
 *         SHARE of the operations goes wrong (default 1: all); delays last DURATION (10ms); only operations
 *         FIRST to LAST of the site, counted from 1, are affected
 *
 *     site          kinds                                               one operation is
 *     wire.connect  delay fail                                          a connection attempt
 *     wire.message  delay drop truncate duplicate reorder corrupt fail  a message without payload, sent
 *     wire.payload  delay truncate duplicate reorder corrupt fail lie   a run of KV bytes, sent
 *     wire.arrival  early                                               a run of KV bytes that arrives
 *     lease         reuse stale expire                                  pages that a reader asks for
 *     disk.put      delay fail full truncate duplicate corrupt lie      a block written to SSD
 *     disk.read     delay fail truncate corrupt lie                     a block read from SSD
 *     disk.delete   delay fail full                                     a block deleted from SSD
 *     disk.flush    delay fail full                                     a flush of the blocks written so far
 *     rpc.message   drop duplicate reorder fail                         a message between router and worker
 *     step          delay stall                                         a step of a worker's engine
 *     leg           drop                                                a leg that a worker's engine takes
 *
 * fail: the operation reports failure (a connection breaks, a call ends). full: it fails because the disk is
 * full. lie: it reports success and did nothing; a read returns the bytes of another block. reuse: the bytes
 * are those of another page, as if the pool had given the page away. stale: the bytes come under an older
 * generation of the page. expire: the lease ends while it is being read. early: the transport reports that
 * the bytes have arrived, and they have not. stall: the operation does not end until the script is read
 * again. duplicate, on disk: the block is also written under another key. reorder: the message goes after the
 * next one.
 *
 * The fault of operation n of a site depends on (seed, site, n) alone. So a run in one thread replays
 * exactly; with several processes the script is what repeats.
 *
 * If the script is "@FILE", the content of FILE (at most 16 KiB) is the script, and faults_reload() reads it
 * again, so that the faults of a running server can be changed (tandem replay --at). A missing file is an
 * empty script. Operations are counted on over a reload; (seed, site, n) then means what the present script
 * says.
 *
 * Threads: any.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/log.h"
#include "base/metrics.h"
#include "base/status.h"

enum fault_site {
    FAULT_WIRE_CONNECT,
    FAULT_WIRE_MESSAGE,
    FAULT_WIRE_PAYLOAD,
    FAULT_DISK_PUT,
    FAULT_DISK_READ,
    FAULT_RPC_MESSAGE,
    FAULT_STEP,
    FAULT_LEG,
    FAULT_DISK_DELETE,
    FAULT_DISK_FLUSH,
    FAULT_LEASE,
    FAULT_WIRE_ARRIVAL,
    FAULT_SITES
};

enum fault_kind {
    FAULT_NONE,
    FAULT_DELAY,
    FAULT_DROP,
    FAULT_TRUNCATE,
    FAULT_DUPLICATE,
    FAULT_REORDER,
    FAULT_CORRUPT,
    FAULT_FAIL,
    FAULT_LIE,
    FAULT_STALL,
    FAULT_FULL,
    FAULT_REUSE,
    FAULT_STALE,
    FAULT_EXPIRE,
    FAULT_EARLY,
    FAULT_KINDS
};

struct fault {
    enum fault_kind kind;
    uint64_t delay_ns; /* used by FAULT_DELAY */
    uint64_t bits;     /* says which bit to flip or where to cut; uniform, repeatable */
};

struct faults;

/* An empty or NULL script gives *out NULL, which all functions accept as "no faults". log is borrowed. On
 * TD_ERR_INVALID error_out names the word. */
enum td_status faults_open(const char *script, const struct log *log, struct faults **out, struct td_error *error_out);
/* Reads "@FILE" again. If it can't be read or parsed, that is logged and the present script stays. Does
 * nothing for a script that is not a file. */
void faults_reload(struct faults *f);
void faults_close(struct faults *f);

/* Counts the operation and returns what happens to it. */
struct fault faults_draw(struct faults *f, enum fault_site site);

/* Number of times the script was read again: a stalled operation waits for it to change. */
uint64_t faults_reloads(const struct faults *f);

uint64_t faults_count(const struct faults *f, enum fault_site site, enum fault_kind kind);
/* Exports the counts as tandem_faults_total{site,kind}: all possible ones for "@FILE", else those in the
 * script. Call before the first faults_draw. metrics must outlive f. */
void faults_export(struct faults *f, struct metrics *m);

/* Flips the bit that the fault selects. n_bytes > 0. */
static inline void fault_flip(const struct fault *fault, void *data, uint64_t n_bytes)
{
    uint64_t bit = fault->bits % (8 * n_bytes);
    ((uint8_t *)data)[bit / 8] ^= (uint8_t)(1u << (bit % 8));
}
