/*
 * The router: the client API, all text, and the decision where each request goes.
 *
 * It never touches KV bytes. One "owner" thread holds the prefix index, the snapshot of the cluster, the one queue and all
 * requests. Rpc threads check sizes and deliver workers' messages; threads for texts (--text-threads) render, tokenize and validate
 * before a request reaches the owner. Workers
 * are connected to by address; what they are (role, model, layout) they say themselves, and a worker that doesn't match the
 * first one is refused, field by field.
 *
 * A worker is lost when its stream ends or it says nothing for silence_ms; its requests are then planned anew, with what was
 * generated so far (router/replan.c). It is connected to again for ever. A new router places nothing before it knows what the
 * workers hold.
 */
#pragma once

#include <stdint.h>

#include "base/options.h"
#include "base/status.h"

struct router;

struct router_options {
    const char *model, *listen, *workers, *secret, *cache_key, *metrics_listen, *plan, *policy, *order, *profile,
        *tenants, *prefix, *faults, *log_level, *name, *chat_template;
    int64_t silence_ms, dispatch_ms, gone_ms, settle_ms, replan_burst, max_wait_ms;
    int64_t queue_tokens, queue_requests, index_blocks, pin_blocks, max_message_bytes, max_calls, send_bytes, stall_ms,
        text_threads, text_bytes;
};

extern const struct option ROUTER_OPTIONS[];

enum td_status router_open(const struct router_options *options, struct router **out, struct td_error *error_out);
enum td_status router_run(struct router *r); /* until router_stop */
/* Any thread: no new requests; those that run are finished, then router_run returns. Twice: at once. */
void router_stop(struct router *r);
void router_close(struct router *r); /* NULL is fine */

const char *router_address(const struct router *r); /* port filled in */
