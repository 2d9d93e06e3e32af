/*
 * The result of a run, live (tandem replay) or in virtual time (tandem simulate). Both have one kind of
 * report, so that prediction and measurement can be compared.
 *
 * A run is a list of requests in the order of the trace, and some facts about the cluster. From it come
 * report_json(), a superset of what vLLM's serving benchmark writes, and report_html(), one page that needs
 * no network. report_parse() makes the run again from the JSON, so that two runs can be compared later.
 *
 * All times are in milliseconds. Points in time of a request count from the start of the run, durations from
 * its arrival. Arrival is the time that the trace gives, not when the request was sent. For a request that
 * was refused and came back, durations count from when it came back.
 *
 * Goodput has four definitions in the literature; each figure is printed with the name of its definition:
 *   at_rate     requests per second that met every stated limit (AIPerf, vLLM bench --goodput)
 *   effective   the same, without requests that were refused at first and came back (Mooncake: a refused or
 *               cut off request is a loss, also if it comes back), as requests and as tokens per second
 *   distserve   highest rate at which >= 90 % of all requests meet both limits, per worker; needs --find-max
 *   mlperf      highest rate at which the 99th percentiles of TTFT and of TPOT are each within their limit;
 *               needs --find-max
 *
 * Inter-token latencies come from the times of tokens, never from messages that carry several.
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
    uint32_t n_prompt, n_output;     /* n_output: tokens received */
    uint32_t n_asked;                /* tokens of the whole answer; 0: not known */
    double ttft_slo_ms, tpot_slo_ms; /* limits of this request; 0: those of the run */
    uint32_t cached[4];              /* prompt tokens found in the worker's pool, a peer's pool, DRAM, SSD */
    int32_t prefill, decode;         /* index into report_run.workers; -1: none, or unknown */
    double arrived_ms;               /* since the start of the run */
    double sent_late_ms;             /* 0 in virtual time */
    double ttft_ms, tpot_ms, e2e_ms; /* NAN: there is none (refused; fewer than two tokens) */
    /* Parts of TTFT and of the first gap; NAN: unknown. */
    double queue_ms, load_ms, prefill_ms, transfer_ms;
    double first_gap_ms; /* split plan: between first and second token; NAN: unknown */
    double predicted_ttft_ms, predicted_tpot_ms, predicted_first_gap_ms; /* NAN: there is none */
    double refused_after_ms, retry_after_ms;                             /* NAN: it was not refused */
    uint32_t reason; /* 1 + index into report_run.reasons; 0: none */
    uint32_t router; /* 1 + number of the last router it was sent to; 0: unknown, or there is one router */
    bool came_back, admitted_then;
    const float *token_ms; /* [n_output] ms since arrival; borrowed; NULL: not kept */
};

/* Nothing is known of it yet: no worker, no times. */
extern const struct report_request REPORT_REQUEST_NONE;

/* Who computed the request: two workers, a decode worker alone, or a prefill worker alone. */
enum report_plan { REPORT_PLAN_UNKNOWN, REPORT_SPLIT, REPORT_AGGREGATED, REPORT_KEPT, REPORT_PLANS };

struct report_worker {
    const char *name, *role; /* "prefill-1"; "prefill" | "decode" | "both" | "store" */
    double busy_ms, joules;  /* NAN: unknown */
    const float *load;       /* [n_load] busy share of each tick of load_tick_ms; borrowed; NULL: unknown */
    uint32_t n_load;
};

/* One rate of a search for the highest rate. Shares are of all requests; a refused request misses every
 * limit. */
struct report_point {
    double rate, offered_rate, goodput; /* rate: as in report_run; the others are requests per second */
    double met_share, ttft_share, tpot_share;
};

struct report_run {
    const char *kind;                /* "replay" | "simulate" */
    const char *label;               /* shown in comparisons, e.g. "8+8 tandem" */
    const char *trace;               /* file name without its folders */
    const char *settings;            /* JSON object with the options of the run; may be NULL */
    double ttft_slo_ms, tpot_slo_ms; /* 0: none */
    double rate;                     /* factor by which arrivals are faster than in the trace */
    double duration_ms;              /* from the first arrival to the last answer */
    double arrivals_ms;              /* from the first arrival to the last one */
    double warm_ms;                  /* predictions for earlier arrivals are not counted */
    double load_tick_ms;
    const struct report_request *requests;
    uint64_t n_requests;
    const char *const *tenants;
    uint32_t n_tenants;         /* >= 1 */
    const char *const *reasons; /* texts, each once */
    uint32_t n_reasons;
    const struct report_worker *workers;
    uint32_t n_workers;
    const struct report_point *points; /* of --find-max, sorted by rate; NULL: none */
    uint32_t n_points;
    bool valid;
    const char *why_invalid; /* NULL when valid */
};

/* Whether the request was answered within its limits. */
bool report_is_met(const struct report_run *run, const struct report_request *q);

/* The plan, as it follows from the workers and their roles. Unknown if a worker is unknown. */
enum report_plan report_plan_of(const struct report_run *run, const struct report_request *q);

/* Statistics of the finite values; quantiles as numpy's default (linear interpolation between closest ranks).
 * n = 0: all are NAN. */
struct report_stats {
    uint64_t n;
    double mean, std, min, p50, p75, p90, p95, p99, max;
};
struct report_stats report_stats_of(double *values, uint64_t n); /* sorts values */

/* A set of offered requests, whatever their outcome. Shares of tokens count the prompts, because the length
 * of a refused answer is unknown. Shares are NAN if n is 0. */
struct report_offered {
    uint64_t n, tokens;                 /* requests; tokens of their prompts */
    uint32_t least_tokens, most_tokens; /* tokens of the shortest and of the longest prompt */
    double refused_share, met_share;    /* shares of the requests */
    /* Shares of the tokens. cached_share: tokens found in caches by answered requests. */
    double refused_token_share, met_token_share, cached_share;
};
enum { REPORT_QUARTERS = 4 };

struct report_summary {
    uint64_t sent, answered, refused, failed, cut_short, met, came_back, admitted_then;
    uint64_t input_tokens, output_tokens, cached_tokens[4];
    uint64_t plans[REPORT_PLANS]; /* of the answered requests */
    double duration_s, offered_rate, request_throughput, output_throughput, total_token_throughput;
    double goodput_at_rate, goodput_effective, goodput_effective_tokens, attainment, attainment_admitted;
    struct report_offered offered; /* all requests */
    /* By length, divided at the quartiles of the offered prompts' lengths. */
    struct report_offered quarters[REPORT_QUARTERS];
    struct report_stats ttft, tpot, itl, e2e, sent_late, refused_after, retry_after, ttft_error, ttft_error_last_value,
        tpot_error, first_gap_error;
    double joules_per_token, total_joules; /* NAN: there is no power model */
    /* Offered rates, per worker and of the cluster; NAN: no points, or no good one. */
    double goodput_distserve, goodput_mlperf;
    /* Lowest tried rates above these that were not good enough; NAN: none, so the limit is higher. */
    double distserve_under, mlperf_under;
};
void report_summarize(const struct report_run *run, struct report_summary *out);
/* Numbers of requests that ended for a reason, and the tokens of their prompts. */
struct report_reason {
    uint64_t refused, failed, tokens; /* failed: includes requests that were cut short */
};
void report_count_reasons(const struct report_run *run, struct report_reason *out); /* [n_reasons] */

/* Collects the reasons of a run, each text once. From REPORT_MAX_REASONS texts on, further ones become "other
 * reasons". */
enum { REPORT_MAX_REASONS = 32 };
struct report_reasons {
    const char *texts[REPORT_MAX_REASONS + 1]; /* borrowed */
    uint32_t n;
};
/* Returns the value for report_request.reason, 1 + the text's place; adds a new text. 0 for NULL and "". */
uint32_t report_reason_of(struct report_reasons *r, const char *text);

/* The run as one point of a search. */
struct report_point report_point_of(const struct report_run *run);

/*
 * Checks identities that hold in any run: an answered request got as many tokens as it asked for; TTFT + (n -
 * 1) TPOT is its latency; and Little's law (the mean number of requests in the system, counted event by event
 * from the start of the run to its stated end, is the rate times the mean time in the system). TD_ERR_CORRUPT
 * names the broken identity.
 */
enum td_status report_check(const struct report_run *run, struct td_error *error_out);

/* Appends a JSON string. Invalid UTF-8 becomes '?', and '<' is escaped, so that it can stand in a page's
 * script. */
void report_write_text(const char *text, struct bytes *out);

void report_table(const struct report_run *run, struct bytes *out); /* appends the table for a terminal */
/* Appends one JSON object; docs/replay.md has the format. with_requests adds every request, so that
 * report_parse() can make the whole run again. */
void report_json(const struct report_run *run, bool with_requests, struct bytes *out);
/* Appends one page for one run, or for several runs that are compared. Plots are inline; it opens from a
 * file, light and dark, narrow and wide. */
void report_html(const struct report_run *const *runs, uint32_t n_runs, struct bytes *out);

/* Reads a report that report_json() wrote with its requests. TD_ERR_INVALID names the member. Free with
 * report_close(). */
struct report_file;
enum td_status report_parse(const char *data, size_t size, struct report_file **out, struct td_error *error_out);
const struct report_run *report_file_run(const struct report_file *f);
void report_close(struct report_file *f); /* NULL is fine */
