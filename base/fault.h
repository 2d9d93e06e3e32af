/*
 * Faults on purpose: a seeded script says which operation on the wire, on disk or in an RPC goes wrong, and how. Tests run
 * on it; operators may, to see what their clients see (--faults).
 *
 * A script is words between blanks: "seed=7 wire.payload:corrupt=0.01 disk.read:delay=0.05/20ms wire.message:drop@100".
 *
 *     seed=N
 *     SITE:KIND[=SHARE][/DURATION][@FIRST[-LAST]]   SHARE of the operations (1: all), delays of DURATION (10ms), only the
 *                                                   operations numbered FIRST to LAST of that site, counted from 1
 *
 *     site          kinds                                            one operation is
 *     wire.connect  delay fail                                       a connection asked for
 *     wire.message  delay drop truncate duplicate reorder corrupt fail  a message without payload, sent
 *     wire.payload  delay truncate duplicate reorder corrupt fail lie   a run of KV bytes, sent
 *     disk.put      delay fail full truncate duplicate corrupt lie   a block written to SSD
 *     disk.read     delay fail truncate corrupt lie                  a block read from SSD
 *     rpc.message   drop duplicate reorder fail                      a message on the stream of router and worker, sent
 *     step          delay stall                                      a step of a worker's engine
 *     leg           drop                                             a leg that a worker's engine takes
 *     disk.delete   delay fail full                                  a block deleted from SSD
 *     disk.flush    delay fail full                                  the blocks written since the last flush made durable
 *     lease         reuse stale expire                               pages that a reader asks a holder for
 *     wire.arrival  early                                            a run of KV bytes that arrives
 *
 * fail: the operation says that it failed (a connection breaks, a call ends). full: it fails because the disk is full. lie: it says it was done, and nothing was; a
 * read gives the bytes of another block. reuse: the bytes are those of another page, as if the pool had given the page away. stale: they come
 * under an older generation of the page. expire: the lease ends while it is being read. early: the transport says that the bytes are
 * there, and they are not. stall: it does not end before the script is read again. duplicate on disk: written under another key too. reorder: goes after the next one.
 *
 * What happens to operation n of a site is a function of (seed, site, n) alone, so a run in one thread replays exactly, and
 * with many processes the script is what repeats.
 *
 * "@FILE" instead of a script: FILE's content (at most 16 KiB) is the script, and faults_reload() reads it anew, so that a running
 * server's faults can be changed (tandem replay --at). A file that is not there is an empty script. Operations are counted on,
 * and (seed, site, n) means what the script of the moment says.
 *
 * Threads: free for all.
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
    uint64_t delay_ns; /* of FAULT_DELAY */
    uint64_t bits;     /* where to corrupt or truncate: uniform, repeatable */
};

struct faults;

/* Empty or NULL script: *out is NULL, which all functions take as "none". log borrowed. TD_ERR_INVALID names the word. */
enum td_status faults_open(const char *script, const struct log *log, struct faults **out, struct td_error *error_out);
/* Reads "@FILE" again; one that can't be read or parsed is logged, and the script before stays. No file: does nothing. */
void faults_reload(struct faults *f);
void faults_close(struct faults *f);

/* What happens to this operation; it is counted. */
struct fault faults_draw(struct faults *f, enum fault_site site);

/* How often the script was read again: what stalls waits for another number. */
uint64_t faults_reloads(const struct faults *f);

uint64_t faults_count(const struct faults *f, enum fault_site site, enum fault_kind kind);
/*
 * Exports the counts as tandem_faults_total{site,kind}: of "@FILE" all that there may be, else those of the script. Before any draw.
 * metrics must outlive f.
 */
void faults_export(struct faults *f, struct metrics *m);

/* Flips the bit that the fault names. n_bytes > 0. */
static inline void fault_flip(const struct fault *fault, void *data, uint64_t n_bytes)
{
    uint64_t bit = fault->bits % (8 * n_bytes);
    ((uint8_t *)data)[bit / 8] ^= (uint8_t)(1u << (bit % 8));
}
