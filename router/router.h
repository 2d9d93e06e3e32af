/*
 * The router: the client API, all text, and the decision where each request goes.
 *
 * It never touches KV bytes. The router connects to workers by address, or they register. Workers say
 * themselves what they are (role, model, layout); a worker that does not match the first one is refused, and
 * the refusal names the field. A worker is lost when its stream ends or it sends nothing for silence_ms. Its
 * requests are then re-planned with the tokens generated so far (router/replan.c). The router goes on trying
 * to connect to a lost worker, for ever if it is in --workers. A new router places nothing before it knows
 * which blocks the workers hold, or settle_ms have passed.
 *
 * Threads: one "owner" thread (router_run) has the prefix index, the snapshot of the cluster, the queue and
 * all requests. rpc threads check sizes and deliver workers' messages. Text threads (--text-threads) render,
 * tokenize and validate before a request reaches the owner.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/options.h"
#include "base/status.h"
#include "proto/rpc/rpc.h"

struct router;

struct router_options {
    struct rpc_tls_files tls;
    const char *tls_client_ca;
    const char *model, *listen, *admin_listen, *admin_key, *cluster_listen, *api_keys, *workers, *secret, *secret_file,
        *cache_key, *metrics_listen, *plan, *policy, *order, *profile, *tenants, *prefix, *faults, *log_level, *name,
        *chat_template, *trusted_proxies;
    int64_t silence_ms, dispatch_ms, gone_ms, settle_ms, replan_burst, max_wait_ms;
    int64_t queue_tokens, queue_requests, index_blocks, pin_blocks, max_message_bytes, max_calls, max_connections,
        max_per_address, rpc_bytes, send_bytes, stall_ms, text_threads, text_bytes;
    bool is_insecure;
};

extern const struct option ROUTER_OPTIONS[]; /* help texts say what each option does */

enum td_status router_open(const struct router_options *options, struct router **out, struct td_error *error_out);
/* Runs the owner thread until router_stop(). */
enum td_status router_run(struct router *r);
/*
 * Any thread. The first call refuses new requests, and router_run() returns when all requests are over. A
 * second call: at once.
 */
void router_stop(struct router *r);
void router_close(struct router *r); /* NULL is fine */

const char *router_address(const struct router *r); /* with the port that was chosen; borrowed */
