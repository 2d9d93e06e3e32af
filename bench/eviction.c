/*
 * The eviction policies on a trace: block hit rate by capacity, beside the rate that no policy can exceed
 * (replay/evict_sim.h), and the time of one operation of the policy (mean over the trace, fastest of three
 * runs).
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "bench/bench.h"
#include "replay/evict_sim.h"

enum { MAX_CAPACITIES = 16, RUNS = 3 };
static const size_t MAX_TRACE_BYTES = 1u << 30;

/* Parses "1000,10000,30000". */
static enum td_status parse_capacities(const char *text, uint64_t *out, uint32_t *n_out, struct td_error *e)
{
    uint32_t n = 0;
    for (const char *at = text;; at++) {
        char *end;
        errno = 0;
        uint64_t value = *at >= '0' && *at <= '9' ? strtoull(at, &end, 10) : 0;
        if (!value || errno || value > UINT32_MAX || n == MAX_CAPACITIES || (*end && *end != ','))
            return td_fail(e, TD_ERR_INVALID, "--capacity takes up to %d numbers of blocks with commas between them",
                           MAX_CAPACITIES);
        out[n++] = value;
        at = end;
        if (!*at)
            break;
    }
    *n_out = n;
    return TD_OK;
}

static double percent(const struct evict_result *r)
{
    return r->n_asked ? 100.0 * (double)r->n_hits / (double)r->n_asked : 0;
}

static void bench_capacity(struct evict_sim *s, uint64_t capacity, struct bench_rows *out)
{
    struct evict_result best, again, r[EVICTION_POLICIES];
    evict_sim_optimum(s, capacity, &best);
    for (int p = 0; p < EVICTION_POLICIES; p++) {
        evict_sim_run(s, (enum eviction_policy)p, capacity, &r[p]);
        for (int i = 1; i < RUNS; i++) {
            evict_sim_run(s, (enum eviction_policy)p, capacity, &again);
            r[p].elapsed_ns = again.elapsed_ns < r[p].elapsed_ns ? again.elapsed_ns : r[p].elapsed_ns;
        }
        bench_add(out, "%", percent(&r[p]), percent(&best), "hits with %" PRIu64 " blocks, %s", capacity,
                  eviction_policy_name((enum eviction_policy)p));
    }
    bench_add(out, "%", percent(&best), 0, "hits with %" PRIu64 " blocks, optimum", capacity);
    for (int p = 0; p < EVICTION_POLICIES; p++)
        bench_add(out, "ns", (double)r[p].elapsed_ns / (double)r[p].n_operations, 0,
                  "operation with %" PRIu64 " blocks, %s", capacity, eviction_policy_name((enum eviction_policy)p));
}

enum td_status bench_eviction(const struct bench_options *o, struct bench_rows *out, struct td_error *e)
{
    struct trace *trace = NULL;
    uint64_t capacities[MAX_CAPACITIES];
    uint32_t n = 0;
    if (!o->trace)
        return td_fail(e, TD_ERR_INVALID, "give --trace FILE");
    enum td_status s = parse_capacities(o->capacity, capacities, &n, e);
    if (!s)
        s = trace_read(o->trace, MAX_TRACE_BYTES, &trace, e);
    if (s)
        return s;
    if (!trace->n_blocks) {
        trace_close(trace);
        return td_fail(e, TD_ERR_INVALID, "%s says nothing about blocks", o->trace);
    }
    struct evict_sim *sim = evict_sim_open(trace, (uint32_t)o->block_tokens);
    for (uint32_t i = 0; i < n; i++)
        bench_capacity(sim, capacities[i], out);
    evict_sim_close(sim);
    trace_close(trace);
    return TD_OK;
}
