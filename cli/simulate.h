/* tandem simulate: what its parts share. A point is one set of options, which is made into a configuration,
 * run and reported. */
#pragma once

#include "cli/cli.h"
#include "replay/profile.h"
#include "replay/simulate_report.h"

enum { SIMULATE_FAULTS = 64 };

struct simulate_options {
    int64_t prefill, decode, requests, chunk_tokens, max_rows, max_batch, page_tokens, block_tokens, pages, pool_bytes,
        max_context, max_tokens, silence_ms, gone_ms, stores, store_dram, store_ssd, seed, jobs, power_first, routers,
        queue_requests, queue_tokens, max_wait_ms;
    const char *profile, *decode_profile, *policy, *order, *plan, *prefix, *eviction, *fail, *watts, *power_control,
        *tenants, *label, *sweep, *output, *html;
    double ttft_ms, tpot_ms, rate, noise, profile_error, kv_bytes, port_gb_s, store_ssd_gb_s, link_ms, rpc_ms,
        length_error, retry_share, power_budget, price;
    bool json, peers;
};

extern const struct option SIMULATE_TABLE[];

struct simulate_point { /* a configuration and everything that it points to */
    struct simulate_options o;
    struct simulate_config config;
    struct worker_profile profiles[2]; /* of prefill workers, of decode workers */
    struct simulate_fault faults[SIMULATE_FAULTS];
    struct simulate_router_fault router_faults[SIMULATE_MAX_ROUTERS];
    struct fair_weight *weights;
    struct simulate_result result;
    struct simulate_report report;
    char label[128], *settings;
    char *overrides; /* in a sweep: the options of this point, "prefill=4 rate=2" */
};

/* Fills the rest from p->o. TD_ERR_INVALID names the option. The point must not be moved: it points into
 * itself. */
enum td_status simulate_point_init(struct simulate_point *p, const struct trace *trace, struct td_error *error_out);
void simulate_point_run(struct simulate_point *p, const struct trace *trace, const char *trace_name);
void simulate_point_fini(struct simulate_point *p);

/* Runs all points of --sweep on several cores. argv as the command got it. Returns the exit code. */
int simulate_sweep(const struct trace *trace, const char *trace_name, const struct simulate_options *o, int argc,
                   char **argv);
bool simulate_write_file(const char *path, const struct bytes *text);
