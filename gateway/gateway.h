/*
 * The gateway: HTTP for clients that speak OpenAI's API. A translation and nothing else: each
 * request becomes calls of tandem.v1.Tandem (proto/tandem.proto) at one of the routers, which own all text
 * and all decisions. The gateway sees only public messages, and keeps nothing but open requests. So several
 * of them can run, and any of them can be restarted.
 *
 * Threads: "http-N" read requests and start calls; rpc threads translate what routers answer and write it to
 * the client's socket; a ticker asks the routers whether they serve.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/options.h"
#include "base/status.h"
#include "proto/rpc/rpc.h"

struct gateway;

struct gateway_options {
    struct rpc_tls_files tls;
    const char *listen, *routers, *metrics_listen, *cors, *trusted_proxies, *log_level, *name;
    int64_t threads, max_connections, max_per_address, max_requests, max_prompts, max_head_bytes, max_body_bytes,
        max_read_bytes, request_ms, idle_ms, stall_ms;
    bool is_insecure;
};

extern const struct option GATEWAY_OPTIONS[]; /* help texts say what each option does */

enum td_status gateway_open(const struct gateway_options *options, struct gateway **out, struct td_error *error_out);
/* Serves until gateway_stop(). */
enum td_status gateway_run(struct gateway *g);
/* Any thread. The first call refuses new requests, and gateway_run() returns when all requests are over. A
 * second call: at once. */
void gateway_stop(struct gateway *g);
void gateway_close(struct gateway *g); /* NULL is fine */

const char *gateway_address(const struct gateway *g); /* with the port that was chosen; borrowed */
