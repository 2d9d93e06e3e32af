/*
 * What prefill and decode workers share: one engine, one transfer endpoint, and the legs that routers send.
 *
 * A leg is one worker's part of a request:
 *
 *   PREFILL     computes the prompt, samples the first token, leases its KV pages to the decode worker
 *   DECODE      reserves pages, pulls the KV, generates
 *   AGGREGATED  does both
 *
 * Both roles can run every kind of leg; the role only says what the router uses a worker for.
 *
 * Threads: "engine" is the caller of worker_run() and owns the engine, the pool and all legs. "xfer" owns the
 * wire. rpc threads deliver the messages of routers. "beat" tells routers every 250 ms that this process
 * lives, and never computes. All of them send mail to the engine thread.
 *
 * Errors: opening fails with one clear line. While running, a leg fails with a status of its own; only a
 * broken device or a broken invariant ends the process.
 */
#pragma once

#include <stdint.h>

#include "base/metrics.h"
#include "base/options.h"
#include "proto/rpc/rpc.h"
#include "transfer/xfer.h"
#include "worker/geometry.h"

struct worker;

struct worker_options {
    struct rpc_tls_files tls;
    struct geometry_options geometry;
    struct rank_options ranks;
    const char *name, *listen, *xfer_listen, *transports, *secret, *secret_file, *metrics_listen, *isa, *engine,
        *sim_prefill, *sim_decode, *faults, *routers, *advertise, *log_level, *lora, *packed_cache;
    bool no_packed_cache, is_trusted_network, is_insecure, encrypts;
    double sim_noise, device_memory;
    int64_t threads, pool_bytes, pool_most, pages, max_context, max_batch, max_rows, chunk_tokens;
    int64_t lease_ms, quarantine_ms, silence_ms, drain_ms;
};

extern const struct option WORKER_OPTIONS[];

struct worker_config {
    const char *role; /* "prefill" or "decode" */
    struct worker_options options;
    struct xfer_hub *hub; /* loopback transfers between workers of one process; NULL: as --transports says */
};

enum td_status worker_open(const struct worker_config *config, struct worker **out, struct td_error *error_out);
/* Serves until worker_stop(). The calling thread becomes the engine thread. */
enum td_status worker_run(struct worker *w);
/*
 * Any thread, but no signal handler (it allocates). Refuses new legs and lets worker_run() return when the
 * running ones and their leases are finished, or at the limit --drain-ms. A second call makes worker_run()
 * return at once.
 */
void worker_stop(struct worker *w);
void worker_close(struct worker *w); /* NULL is fine */

const char *worker_address(const struct worker *w); /* address of the gRPC service, port filled in */

/* A worker's whole main(): options, signals, open, run, close. Returns the exit status. */
int worker_main(const char *role, int argc, char **argv);
