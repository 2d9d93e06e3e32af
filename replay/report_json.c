/*
 * Writes a run as JSON (docs/replay.md has the format).
 *
 * Requests are written column by column. A column that is the same for all requests is written as that one
 * value. This takes a fifth of the size of an object for each request, and a page reads it quickly. The JSON
 * is written by hand, because a tree of a million values takes longer than the statistics of the run.
 */
#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

#include "replay/report_internal.h"

#define COLUMN(name, type, member)                                                                                     \
    {                                                                                                                  \
        name, type, offsetof(struct report_request, member), false                                                     \
    }
const struct report_column report_columns[REPORT_COLUMNS] = {
    COLUMN("outcome", COLUMN_OUTCOME, outcome),
    COLUMN("tenant", COLUMN_U32, tenant),
    COLUMN("prompt_tokens", COLUMN_U32, n_prompt),
    COLUMN("output_tokens", COLUMN_U32, n_output),
    COLUMN("asked_tokens", COLUMN_U32, n_asked),
    COLUMN("ttft_slo_ms", COLUMN_LIMIT, ttft_slo_ms),
    COLUMN("tpot_slo_ms", COLUMN_LIMIT, tpot_slo_ms),
    COLUMN("cached_worker", COLUMN_U32, cached[0]),
    COLUMN("cached_peer", COLUMN_U32, cached[1]),
    COLUMN("cached_dram", COLUMN_U32, cached[2]),
    COLUMN("cached_ssd", COLUMN_U32, cached[3]),
    COLUMN("prefill", COLUMN_I32, prefill),
    COLUMN("decode", COLUMN_I32, decode),
    COLUMN("arrived_ms", COLUMN_DOUBLE, arrived_ms),
    COLUMN("sent_late_ms", COLUMN_DOUBLE, sent_late_ms),
    COLUMN("ttft_ms", COLUMN_DOUBLE, ttft_ms),
    COLUMN("tpot_ms", COLUMN_DOUBLE, tpot_ms),
    COLUMN("e2e_ms", COLUMN_DOUBLE, e2e_ms),
    COLUMN("queue_ms", COLUMN_DOUBLE, queue_ms),
    COLUMN("load_ms", COLUMN_DOUBLE, load_ms),
    COLUMN("prefill_ms", COLUMN_DOUBLE, prefill_ms),
    COLUMN("transfer_ms", COLUMN_DOUBLE, transfer_ms),
    {"first_gap_ms", COLUMN_DOUBLE, offsetof(struct report_request, first_gap_ms), true},
    COLUMN("predicted_ttft_ms", COLUMN_DOUBLE, predicted_ttft_ms),
    COLUMN("predicted_tpot_ms", COLUMN_DOUBLE, predicted_tpot_ms),
    {"predicted_first_gap_ms", COLUMN_DOUBLE, offsetof(struct report_request, predicted_first_gap_ms), true},
    COLUMN("refused_after_ms", COLUMN_DOUBLE, refused_after_ms),
    COLUMN("retry_after_ms", COLUMN_DOUBLE, retry_after_ms),
    COLUMN("came_back", COLUMN_BOOL, came_back),
    COLUMN("admitted_then", COLUMN_BOOL, admitted_then),
    {"reason", COLUMN_U32, offsetof(struct report_request, reason), true},
    {"router", COLUMN_U32, offsetof(struct report_request, router), true},
};
static_assert(sizeof(enum report_outcome) == sizeof(uint32_t), "an outcome is read and written as a number");

/* ------------------------------------------------------------------ values */

static void add_number(struct bytes *out, double value, int digits)
{
    char text[40];
    int n = isfinite(value) ? snprintf(text, sizeof(text), "%.*g", digits, value) : 0;
    bytes_append(out, n ? text : "null", n ? (size_t)n : 4);
}

void report_write_text(const char *text, struct bytes *out)
{
    bytes_append(out, "\"", 1);
    for (const unsigned char *p = (const unsigned char *)text; *p;) {
        utf8proc_int32_t c;
        utf8proc_ssize_t n = utf8proc_iterate(p, -1, &c);
        if (n < 1)
            bytes_append(out, "?", 1);
        else if (*p < 0x20 || *p == '"' || *p == '\\' || *p == '<' || *p == 0x7f)
            bytes_printf(out, "\\u%04x", *p);
        else
            bytes_append(out, p, (size_t)n);
        p += n < 1 ? 1 : n;
    }
    bytes_append(out, "\"", 1);
}

static void add_text(struct bytes *out, const char *name, const char *text)
{
    bytes_printf(out, ",\"%s\":", name);
    if (text)
        report_write_text(text, out);
    else
        bytes_append(out, "null", 4);
}

static void add_real(struct bytes *out, const char *name, double value)
{
    bytes_printf(out, ",\"%s\":", name);
    add_number(out, value, 10);
}

static void add_whole(struct bytes *out, const char *name, uint64_t value)
{
    bytes_printf(out, ",\"%s\":%" PRIu64, name, value);
}

/* ----------------------------------------------------------------- summary */

/* Members with the names of vLLM's serving benchmark. */
static void add_vllm(struct bytes *out, const struct report_summary *s)
{
    const struct {
        const char *name;
        const struct report_stats *stats;
    } all[] = {{"ttft", &s->ttft}, {"tpot", &s->tpot}, {"itl", &s->itl}, {"e2el", &s->e2e}};
    bytes_printf(out, "\"duration\":%.10g", s->duration_s);
    add_whole(out, "completed", s->answered);
    add_whole(out, "failed", s->failed);
    add_whole(out, "total_input_tokens", s->input_tokens);
    add_whole(out, "total_output_tokens", s->output_tokens);
    add_real(out, "request_throughput", s->request_throughput);
    add_real(out, "request_goodput", s->goodput_at_rate);
    add_real(out, "output_throughput", s->output_throughput);
    add_real(out, "total_token_throughput", s->total_token_throughput);
    for (int i = 0; i < 4; i++) {
        const double values[] = {all[i].stats->mean, all[i].stats->p50, all[i].stats->std, all[i].stats->p99};
        static const char *const NAMES[] = {"mean", "median", "std", "p99"};
        for (int k = 0; k < 4; k++) {
            bytes_printf(out, ",\"%s_%s_ms\":", NAMES[k], all[i].name);
            add_number(out, values[k], 10);
        }
    }
}

static void add_stats(struct bytes *out, const char *name, const struct report_stats *s)
{
    bytes_printf(out, ",\"%s\":{\"n\":%" PRIu64, name, s->n);
    add_real(out, "mean", s->mean);
    add_real(out, "std", s->std);
    add_real(out, "min", s->min);
    add_real(out, "p50", s->p50);
    add_real(out, "p75", s->p75);
    add_real(out, "p90", s->p90);
    add_real(out, "p95", s->p95);
    add_real(out, "p99", s->p99);
    add_real(out, "max", s->max);
    bytes_append(out, "}", 1);
}

/* Copies JSON, but escapes '<', which can only be inside a string there and might end a page's script. */
static void add_settings(struct bytes *out, const char *json)
{
    bytes_printf(out, ",\"settings\":");
    for (const char *p = json ? json : "null"; *p;) {
        size_t n = strcspn(p, "<");
        bytes_append(out, p, n);
        p += n;
        if (*p == '<') {
            bytes_append(out, "\\u003c", 6);
            p++;
        }
    }
}

static void add_run(struct bytes *out, const struct report_run *run)
{
    add_whole(out, "version", 1);
    add_text(out, "kind", run->kind);
    add_text(out, "label", run->label);
    add_text(out, "trace", run->trace);
    add_settings(out, run->settings);
    bytes_printf(out, ",\"valid\":%s", run->valid ? "true" : "false");
    add_text(out, "why_invalid", run->why_invalid);
    add_real(out, "ttft_slo_ms", run->ttft_slo_ms);
    add_real(out, "tpot_slo_ms", run->tpot_slo_ms);
    add_real(out, "rate", run->rate);
    add_real(out, "duration_ms", run->duration_ms);
    add_real(out, "arrivals_ms", run->arrivals_ms);
    add_real(out, "warm_ms", run->warm_ms);
    add_real(out, "load_tick_ms", run->load_tick_ms);
}

static void add_tiers(struct bytes *out, const struct report_summary *s)
{
    const uint64_t *c = s->cached_tokens;
    double all = (double)s->input_tokens;
    bytes_printf(out,
                 ",\"cached_tokens\":{\"worker\":%" PRIu64 ",\"peer\":%" PRIu64 ",\"dram\":%" PRIu64 ",\"ssd\":%" PRIu64
                 "}",
                 c[0], c[1], c[2], c[3]);
    add_real(out, "cached_share", all > 0 ? (double)(c[0] + c[1] + c[2] + c[3]) / all : 0);
}

static void add_plans(struct bytes *out, const struct report_summary *s)
{
    bytes_printf(out, ",\"plans\":{\"split\":%" PRIu64 ",\"aggregated\":%" PRIu64 ",\"kept\":%" PRIu64 "}",
                 s->plans[REPORT_SPLIT], s->plans[REPORT_AGGREGATED], s->plans[REPORT_KEPT]);
}

static void add_summary(struct bytes *out, const struct report_summary *s)
{
    add_whole(out, "sent", s->sent);
    add_whole(out, "answered", s->answered);
    add_whole(out, "refused", s->refused);
    add_whole(out, "cut_short", s->cut_short);
    add_whole(out, "met", s->met);
    add_whole(out, "came_back", s->came_back);
    add_whole(out, "admitted_then", s->admitted_then);
    add_real(out, "offered_rate", s->offered_rate);
    add_real(out, "attainment", s->attainment);
    add_real(out, "attainment_admitted", s->attainment_admitted);
    bytes_printf(out, ",\"goodput\":{\"at_rate\":");
    add_number(out, s->goodput_at_rate, 10);
    add_real(out, "effective", s->goodput_effective);
    add_real(out, "effective_tokens", s->goodput_effective_tokens);
    add_real(out, "distserve", s->goodput_distserve);
    add_real(out, "distserve_under", s->distserve_under);
    add_real(out, "mlperf", s->goodput_mlperf);
    add_real(out, "mlperf_under", s->mlperf_under);
    bytes_append(out, "}", 1);
    add_stats(out, "ttft_ms", &s->ttft);
    add_stats(out, "tpot_ms", &s->tpot);
    add_stats(out, "itl_ms", &s->itl);
    add_stats(out, "e2el_ms", &s->e2e);
    add_stats(out, "sent_late_ms", &s->sent_late);
    add_stats(out, "refused_after_ms", &s->refused_after);
    add_stats(out, "retry_after_ms", &s->retry_after);
    add_stats(out, "ttft_error", &s->ttft_error);
    add_stats(out, "ttft_error_last_value", &s->ttft_error_last_value);
    add_stats(out, "tpot_error", &s->tpot_error);
    add_stats(out, "first_gap_error", &s->first_gap_error);
    add_tiers(out, s);
    add_plans(out, s);
    add_real(out, "joules", s->total_joules);
    add_real(out, "joules_per_token", s->joules_per_token);
}

/* ----------------------------------------------------------------- offered */

static void add_offered(struct bytes *out, const struct report_offered *o)
{
    bytes_printf(out, "{\"requests\":%" PRIu64 ",\"prompt_tokens\":%" PRIu64, o->n, o->tokens);
    add_whole(out, "least_tokens", o->least_tokens);
    add_whole(out, "most_tokens", o->most_tokens);
    add_real(out, "refused_share", o->refused_share);
    add_real(out, "refused_token_share", o->refused_token_share);
    add_real(out, "met_share", o->met_share);
    add_real(out, "met_token_share", o->met_token_share);
    add_real(out, "cached_share", o->cached_share);
    bytes_append(out, "}", 1);
}

static void add_all_offered(struct bytes *out, const struct report_summary *s)
{
    bytes_printf(out, ",\"offered\":");
    add_offered(out, &s->offered);
    bytes_printf(out, ",\"by_prompt_length\":[");
    for (int i = 0; i < REPORT_QUARTERS; i++) {
        bytes_append(out, ",", i > 0);
        add_offered(out, &s->quarters[i]);
    }
    bytes_append(out, "]", 1);
}

static void add_reasons(struct bytes *out, const struct report_run *run)
{
    struct report_reason *counts = mem_array(run->n_reasons, sizeof(*counts));
    report_count_reasons(run, counts);
    bytes_printf(out, ",\"reasons\":[");
    for (uint32_t i = 0; i < run->n_reasons; i++) {
        bytes_printf(out, i ? ",{\"reason\":" : "{\"reason\":");
        report_write_text(run->reasons[i], out);
        add_whole(out, "refused", counts[i].refused);
        add_whole(out, "failed", counts[i].failed);
        add_whole(out, "prompt_tokens", counts[i].tokens);
        bytes_append(out, "}", 1);
    }
    bytes_append(out, "]", 1);
    free(counts);
}

/* ------------------------------------------------------------------- lists */

static void add_tenants(struct bytes *out, const struct report_run *run)
{
    bytes_printf(out, ",\"tenants\":[");
    for (uint32_t i = 0; i < run->n_tenants; i++) {
        bytes_append(out, ",", i > 0);
        report_write_text(run->tenants[i] ? run->tenants[i] : "", out);
    }
    bytes_append(out, "]", 1);
}

static void add_workers(struct bytes *out, const struct report_run *run)
{
    bytes_printf(out, ",\"workers\":[");
    for (uint32_t i = 0; i < run->n_workers; i++) {
        const struct report_worker *w = &run->workers[i];
        bytes_printf(out, i ? ",{\"name\":" : "{\"name\":");
        report_write_text(w->name, out);
        add_text(out, "role", w->role);
        add_real(out, "busy_ms", w->busy_ms);
        add_real(out, "joules", w->joules);
        bytes_printf(out, ",\"load\":");
        for (uint32_t k = 0; w->load && k < w->n_load; k++) {
            bytes_append(out, k ? "," : "[", 1);
            add_number(out, (double)w->load[k], 4);
        }
        bytes_printf(out, w->load && w->n_load ? "]}" : "null}");
    }
    bytes_append(out, "]", 1);
}

static void add_points(struct bytes *out, const struct report_run *run)
{
    bytes_printf(out, ",\"points\":[");
    for (uint32_t i = 0; i < run->n_points; i++) {
        const struct report_point *p = &run->points[i];
        bytes_printf(out, i ? ",{\"rate\":" : "{\"rate\":");
        add_number(out, p->rate, 10);
        add_real(out, "offered_rate", p->offered_rate);
        add_real(out, "goodput", p->goodput);
        add_real(out, "met_share", p->met_share);
        add_real(out, "ttft_share", p->ttft_share);
        add_real(out, "tpot_share", p->tpot_share);
        bytes_append(out, "}", 1);
    }
    bytes_append(out, "]", 1);
}

/* ---------------------------------------------------------------- requests */

static size_t column_bytes(const struct report_column *c)
{
    bool is_double = c->type == COLUMN_DOUBLE || c->type == COLUMN_LIMIT;
    return is_double ? sizeof(double) : c->type == COLUMN_BOOL ? sizeof(bool) : sizeof(uint32_t);
}

static const void *cell_of(const struct report_request *q, const struct report_column *c)
{
    return (const char *)q + c->offset;
}

static void add_cell(struct bytes *out, const struct report_request *q, const struct report_column *c, int digits)
{
    const void *cell = cell_of(q, c);
    switch (c->type) {
    case COLUMN_OUTCOME:
    case COLUMN_U32:
        bytes_printf(out, "%" PRIu32, *(const uint32_t *)cell);
        break;
    case COLUMN_I32:
        bytes_printf(out, "%" PRId32, *(const int32_t *)cell);
        break;
    case COLUMN_BOOL:
        bytes_printf(out, "%d", *(const bool *)cell);
        break;
    case COLUMN_LIMIT:
    case COLUMN_DOUBLE:
        add_number(out, *(const double *)cell, digits);
        break;
    }
}

static void add_column(struct bytes *out, const struct report_run *run, const struct report_column *c, int digits)
{
    bool same = true;
    for (uint64_t i = 1; same && i < run->n_requests; i++)
        same = !memcmp(cell_of(&run->requests[i], c), cell_of(&run->requests[0], c), column_bytes(c));
    bytes_printf(out, ",\"%s\":", c->name);
    if (same && run->n_requests) {
        add_cell(out, &run->requests[0], c, digits);
        return;
    }
    bytes_append(out, "[", 1);
    for (uint64_t i = 0; i < run->n_requests; i++) {
        bytes_append(out, ",", i > 0);
        add_cell(out, &run->requests[i], c, digits);
    }
    bytes_append(out, "]", 1);
}

static void add_tokens(struct bytes *out, const struct report_run *run, const struct report_parts *parts)
{
    bytes_printf(out, ",\"token_ms\":[");
    for (uint64_t i = 0; i < run->n_requests; i++) {
        const struct report_request *q = &run->requests[i];
        bool kept = parts->tokens_of && q->token_ms && i % parts->tokens_of == 0;
        bytes_append(out, ",", i > 0);
        bytes_printf(out, kept ? "[" : "null");
        for (uint32_t k = 0; kept && k < q->n_output; k++) {
            bytes_append(out, ",", k > 0);
            add_number(out, (double)q->token_ms[k], parts->digits < 9 ? parts->digits : 9);
        }
        bytes_append(out, "]", kept);
    }
    bytes_append(out, "]", 1);
}

/* The plan follows from the workers, so report_parse() does not read it. */
static void add_plan_column(struct bytes *out, const struct report_run *run)
{
    bytes_printf(out, ",\"plan\":[");
    for (uint64_t i = 0; i < run->n_requests; i++)
        bytes_printf(out, i ? ",%d" : "%d", (int)report_plan_of(run, &run->requests[i]));
    bytes_append(out, "]", 1);
}

static void add_requests(struct bytes *out, const struct report_run *run, const struct report_parts *parts)
{
    bytes_printf(out, ",\"requests\":{\"n\":%" PRIu64, run->n_requests);
    for (int i = 0; i < REPORT_COLUMNS; i++)
        add_column(out, run, &report_columns[i], parts->digits);
    add_plan_column(out, run);
    add_tokens(out, run, parts);
    bytes_append(out, "}", 1);
}

/* ------------------------------------------------------------------- plots */

enum { CDF_POINTS = 201, TIME_SLOTS = 60 };

static void add_list(struct bytes *out, const char *name, const double *values, uint32_t n)
{
    bytes_printf(out, "%s\"%s\":[", out->data[out->len - 1] == '{' ? "" : ",", name);
    for (uint32_t i = 0; i < n; i++) {
        bytes_append(out, ",", i > 0);
        add_number(out, values[i], 5);
    }
    bytes_append(out, "]", 1);
}

struct gap { /* time between two tokens */
    double at_ms, ms;
};

static uint64_t gaps_of(const struct report_run *run, struct gap **out)
{
    uint64_t n = 0, most = 0;
    for (uint64_t i = 0; i < run->n_requests; i++)
        most += run->requests[i].token_ms ? run->requests[i].n_output : 0;
    *out = mem_array(most, sizeof(**out));
    for (uint64_t i = 0; i < run->n_requests; i++) {
        const struct report_request *q = &run->requests[i];
        for (uint32_t k = 1; q->outcome == REPORT_ANSWERED && q->token_ms && k < q->n_output; k++)
            (*out)[n++] = (struct gap){q->arrived_ms + (double)q->token_ms[k],
                                       (double)q->token_ms[k] - (double)q->token_ms[k - 1]};
    }
    return n;
}

static int by_length(const void *a, const void *b)
{
    const struct gap *x = a, *y = b;
    return (x->ms > y->ms) - (x->ms < y->ms);
}

/* Slot of a gap. A run from a file may have any times: those outside the run count in its first or last
 * slot. */
static int slot_of(const struct gap *g, double step_ms)
{
    return (int)fmax(fmin(g->at_ms / step_ms, TIME_SLOTS - 1), 0);
}

/* The gaps are sorted by length, so the gaps of one slot come in that order, too. */
static void add_slots(struct bytes *out, const struct gap *gaps, uint64_t n, double step_ms)
{
    uint64_t counts[TIME_SLOTS] = {0}, seen[TIME_SLOTS] = {0};
    double p50[TIME_SLOTS], p99[TIME_SLOTS];
    for (int i = 0; i < TIME_SLOTS; i++)
        p50[i] = p99[i] = NAN;
    for (uint64_t i = 0; i < n; i++)
        counts[slot_of(&gaps[i], step_ms)]++;
    for (uint64_t i = 0; i < n; i++) {
        int slot = slot_of(&gaps[i], step_ms);
        uint64_t at = seen[slot]++;
        if (at == (counts[slot] - 1) / 2)
            p50[slot] = gaps[i].ms;
        if (at == (uint64_t)((double)(counts[slot] - 1) * 0.99))
            p99[slot] = gaps[i].ms;
    }
    add_list(out, "itl_p50_ms", p50, TIME_SLOTS);
    add_list(out, "itl_p99_ms", p99, TIME_SLOTS);
}

static void add_plots(struct bytes *out, const struct report_run *run)
{
    struct gap *gaps;
    uint64_t n = gaps_of(run, &gaps);
    double cdf[CDF_POINTS], step_ms = fmax(run->duration_ms, 1) / TIME_SLOTS;
    qsort(gaps, n, sizeof(*gaps), by_length);
    for (int i = 0; n && i < CDF_POINTS; i++)
        cdf[i] = gaps[(uint64_t)((double)(n - 1) * i / (CDF_POINTS - 1))].ms;
    bytes_printf(out, ",\"plots\":{");
    add_list(out, "itl_quantiles_ms", cdf, n ? CDF_POINTS : 0);
    add_real(out, "slot_ms", step_ms);
    add_slots(out, gaps, n, step_ms);
    bytes_append(out, "}", 1);
    free(gaps);
}

/* -------------------------------------------------------------------- whole */

void report_write_json(const struct report_run *run, const struct report_parts *parts, struct bytes *out)
{
    struct report_summary s;
    report_summarize(run, &s);
    bytes_append(out, "{", 1);
    add_vllm(out, &s);
    add_run(out, run);
    add_summary(out, &s);
    add_all_offered(out, &s);
    add_reasons(out, run);
    add_tenants(out, run);
    add_workers(out, run);
    add_points(out, run);
    if (parts->requests)
        add_requests(out, run, parts);
    if (parts->plots)
        add_plots(out, run);
    bytes_append(out, "}", 1);
}

void report_json(const struct report_run *run, bool with_requests, struct bytes *out)
{
    const struct report_parts parts = {.requests = with_requests, .tokens_of = 1, .digits = 12};
    report_write_json(run, &parts, out);
    bytes_append(out, "\n", 1);
}
