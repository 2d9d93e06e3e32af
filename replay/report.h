/*
 * What a run did, live (tandem replay) or in virtual time (tandem simulate): one report for both, so that
 * prediction and truth stand side by side.
 *
 * A run is a list of requests in the order of the trace and some facts about the cluster. From it:
 * report_json(), a superset of what vLLM's serving benchmark writes, and report_html(), one page that needs
 * no network. Reading the JSON back gives the run again (report_parse), so that two runs can be compared
 * later.
 *
 * Times are milliseconds; those of a request count from the start of the run, lengths of time from its
 * arrival. Arrival is when the trace says, not when the sender got round to it; for the lengths of one that
 * was refused and came back, when it came back.
 *
 * Goodput has four definitions in the literature; each is named where it is printed:
 *   at_rate     requests per second that met every stated limit (AIPerf, vLLM bench --goodput)
 *   effective   the same, counting only requests that were answered whole, in time and at the first asking
 *               (Mooncake: what was refused or cut off is a loss, also if it came back), as requests and as
 *               tokens per second
 *   distserve   highest rate at which >= 90 % of all requests meet both limits, per worker; needs --find-max
 *   mlperf      highest rate at which the 99th percentiles of TTFT and of TPOT are each within their limit;
 *               needs --find-max
 *
 * Inter-token latencies come from the times of tokens, never of messages that carry several.
 *
 * Threads: one owner.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/mem.h"
#include "base/status.h"

enum report_outcome { REPORT_ANSWERED, REPORT_REFUSED, REPORT_FAILED, REPORT_CUT_SHORT };

struct report_request {
    enum report_outcome outcome;
    uint32_t tenant;                 /* index into report_run.tenants */
    uint32_t n_prompt, n_output;     /* n_output: tokens that came */
    uint32_t n_asked;                /* tokens of an answer in full; 0: not known */
    double ttft_slo_ms, tpot_slo_ms; /* its own limits; 0: those of the run */
    uint32_t cached[4];              /* prompt tokens from the worker itself, a peer, DRAM, SSD */
    int32_t prefill, decode;         /* index into report_run.workers; -1: none, or not known */
    double arrived_ms;               /* since the start of the run */
    double sent_late_ms;             /* 0 in virtual time */
    double ttft_ms, tpot_ms, e2e_ms; /* since arrival; NAN: it has none (refused; fewer than two tokens) */
    /* Parts of TTFT and of the first gap; NAN: not known. */
    double queue_ms, load_ms, prefill_ms, transfer_ms;
    double first_gap_ms; /* of a split one: between first and second token; NAN: not known */
    double predicted_ttft_ms, predicted_tpot_ms, predicted_first_gap_ms; /* NAN: none */
    double refused_after_ms, retry_after_ms;                             /* NAN: was not refused */
    uint32_t reason; /* 1 + index into report_run.reasons; 0: none is known */
    uint32_t router; /* 1 + number of the last router it was sent to; 0: unknown, or only one router */
    bool came_back, admitted_then;
    const float *token_ms; /* [n_output] since arrival, borrowed; NULL: not kept */
};

/* Which worker did what: two, a decode worker alone, a prefill worker alone. */
enum report_plan { REPORT_PLAN_UNKNOWN, REPORT_SPLIT, REPORT_AGGREGATED, REPORT_KEPT, REPORT_PLANS };

struct report_worker {
    const char *name, *role; /* "prefill-1", "prefill" | "decode" | "both" */
    double busy_ms, joules;  /* NAN: not known */
    const float *load;       /* [n_load] share busy in each tick of load_tick_ms, borrowed; NULL: none */
    uint32_t n_load;
};

/* One rate of a search for the most that a cluster bears; shares of all requests, refused ones being outside
 * of any limit. */
struct report_point {
    double rate, offered_rate, goodput; /* rate: as report_run's; the others per second */
    double met_share, ttft_share, tpot_share;
};

struct report_run {
    const char *kind;                /* "replay" | "simulate" */
    const char *label;               /* shown in comparisons, e.g. "8+8 tandem" */
    const char *trace;               /* file name without its folders */
    const char *settings;            /* JSON object of what was asked for; may be NULL */
    double ttft_slo_ms, tpot_slo_ms; /* 0: none */
    double rate;                     /* times faster than the trace */
    double duration_ms;              /* first arrival to last answer */
    double arrivals_ms;              /* first arrival to last arrival */
    double warm_ms;                  /* predictions before it are not counted */
    double load_tick_ms;
    const struct report_request *requests;
    uint64_t n_requests;
    const char *const *tenants;
    uint32_t n_tenants;         /* >= 1 */
    const char *const *reasons; /* texts, each once */
    uint32_t n_reasons;
    const struct report_worker *workers;
    uint32_t n_workers;
    const struct report_point *points; /* of --find-max or a sweep over rates, by rate; NULL: none */
    uint32_t n_points;
    bool valid;
    const char *why_invalid; /* NULL when valid */
};

/* Answered within its limits. */
bool report_is_met(const struct report_run *run, const struct report_request *q);

/* By its workers and their roles. Unknown where a worker is not known. */
enum report_plan report_plan_of(const struct report_run *run, const struct report_request *q);

/* Order statistics as numpy's default (linear interpolation between closest ranks), of finite values only; n
 * = 0: all NAN. */
struct report_stats {
    uint64_t n;
    double mean, std, min, p50, p75, p90, p95, p99, max;
};
struct report_stats report_stats_of(double *values, uint64_t n); /* sorts values */

/*
 * A set of offered requests, whatever became of them. Shares of tokens count the prompts: what an answer
 * would have cost is not known of one that was refused. Shares are NAN when n is 0.
 */
struct report_offered {
    uint64_t n, tokens;                 /* requests; tokens of their prompts */
    uint32_t least_tokens, most_tokens; /* of a prompt */
    double refused_share, met_share;    /* of the requests */
    /* Of the tokens; cached: found, by the answered. */
    double refused_token_share, met_token_share, cached_share;
};
enum { REPORT_QUARTERS = 4 };

struct report_summary {
    uint64_t sent, answered, refused, failed, cut_short, met, came_back, admitted_then;
    uint64_t input_tokens, output_tokens, cached_tokens[4];
    uint64_t plans[REPORT_PLANS]; /* of the answered */
    double duration_s, offered_rate, request_throughput, output_throughput, total_token_throughput;
    double goodput_at_rate, goodput_effective, goodput_effective_tokens, attainment, attainment_admitted;
    struct report_offered offered; /* all requests */
    struct report_offered
        quarters[REPORT_QUARTERS]; /* by length: up to the quartiles of the offered prompts' lengths */
    struct report_stats ttft, tpot, itl, e2e, sent_late, refused_after, retry_after, ttft_error, ttft_error_last_value,
        tpot_error, first_gap_error;
    double joules_per_token, total_joules; /* NAN: no power model */
    double goodput_distserve,
        goodput_mlperf; /* offered rates, per worker and whole; NAN: no points, or none that is good enough */
    double distserve_under,
        mlperf_under; /* lowest rate above that was not good enough; NAN: none was, the limit is higher */
};
void report_summarize(const struct report_run *run, struct report_summary *out);
/* How many requests ended for a reason, and the tokens of their prompts. */
struct report_reason {
    uint64_t refused, failed, tokens; /* failed: or cut short */
};
void report_count_reasons(const struct report_run *run, struct report_reason *out); /* [n_reasons] */

/* Makes the list of a run's reasons: each text once, beyond REPORT_MAX_REASONS "other reasons". */
enum { REPORT_MAX_REASONS = 32 };
struct report_reasons {
    const char *texts[REPORT_MAX_REASONS + 1]; /* borrowed */
    uint32_t n;
};
/* What report_request.reason becomes: 1 + its place. NULL and "": 0. */
uint32_t report_reason_of(struct report_reasons *r, const char *text);

/* The run as one rate of a search. */
struct report_point report_point_of(const struct report_run *run);

/*
 * Identities that hold in any run: tokens asked for = tokens that came of the answered ones, TTFT + (n - 1)
 * TPOT = latency of each, and Little's law (mean number in the system, counted event by event from the start
 * of the run to its stated end, = rate times mean time in it). TD_ERR_CORRUPT names the one that is broken.
 */
enum td_status report_check(const struct report_run *run, struct td_error *error_out);

void report_table(const struct report_run *run, struct bytes *out); /* what a terminal shows */
/* One object; the format is in docs/replay.md. with_requests: also each request, so that report_parse gives
 * the whole run again. */
void report_json(const struct report_run *run, bool with_requests, struct bytes *out);
/* One page for one or several runs (compared), with its plots inline; opens from a file, light and dark,
 * narrow and wide. */
void report_html(const struct report_run *const *runs, uint32_t n_runs, struct bytes *out);

/* A report as report_json wrote it. TD_ERR_INVALID names the member. Owned: report_close. */
struct report_file;
enum td_status report_parse(const char *data, size_t size, struct report_file **out, struct td_error *error_out);
const struct report_run *report_file_run(const struct report_file *f);
void report_close(struct report_file *f); /* NULL is fine */
