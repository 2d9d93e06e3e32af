#include "replay/report_internal.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

const struct report_request REPORT_REQUEST_NONE = {.prefill = -1,
                                                   .decode = -1,
                                                   .ttft_ms = NAN,
                                                   .tpot_ms = NAN,
                                                   .e2e_ms = NAN,
                                                   .queue_ms = NAN,
                                                   .load_ms = NAN,
                                                   .prefill_ms = NAN,
                                                   .transfer_ms = NAN,
                                                   .predicted_ttft_ms = NAN,
                                                   .first_gap_ms = NAN,
                                                   .predicted_tpot_ms = NAN,
                                                   .predicted_first_gap_ms = NAN,
                                                   .refused_after_ms = NAN,
                                                   .retry_after_ms = NAN};

/* -------------------------------------------------------------- statistics */

enum { RADIX_BITS = 11, RADIX = 1 << RADIX_BITS, RADIX_PASSES = 6 };

/* Bits of a double, changed so that they sort as unsigned numbers; value_of() is the inverse. */
static uint64_t key_of(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits >> 63 ? ~bits : bits | 1ull << 63;
}

static double value_of(uint64_t key)
{
    uint64_t bits = key >> 63 ? key & ~(1ull << 63) : ~key;
    double value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* Radix sort, from the lowest digit. For millions of gaps between tokens it takes a quarter of qsort's
 * time. */
static void sort(double *values, uint64_t n)
{
    uint64_t *keys = mem_array(2 * n, sizeof(*keys)), *room = keys + n, *from = keys;
    for (uint64_t i = 0; i < n; i++)
        keys[i] = key_of(values[i]);
    for (int pass = 0; pass < RADIX_PASSES; pass++) {
        uint64_t first[RADIX + 1] = {0};
        int shift = pass * RADIX_BITS;
        for (uint64_t i = 0; i < n; i++)
            first[(from[i] >> shift & (RADIX - 1)) + 1]++;
        for (int k = 0; k < RADIX; k++)
            first[k + 1] += first[k];
        for (uint64_t i = 0; i < n; i++)
            room[first[from[i] >> shift & (RADIX - 1)]++] = from[i];
        uint64_t *swap = from;
        from = room;
        room = swap;
    }
    for (uint64_t i = 0; i < n; i++)
        values[i] = value_of(from[i]);
    free(keys);
}

static double quantile(const double *sorted, uint64_t n, double share)
{
    double at = share * (double)(n - 1);
    uint64_t low = (uint64_t)at;
    return low + 1 < n ? sorted[low] + (at - (double)low) * (sorted[low + 1] - sorted[low]) : sorted[n - 1];
}

struct report_stats report_stats_of(double *values, uint64_t n)
{
    uint64_t kept = 0;
    double sum = 0, squares = 0;
    for (uint64_t i = 0; i < n; i++)
        if (isfinite(values[i])) {
            sum += values[i];
            values[kept++] = values[i];
        }
    if (!kept)
        return (struct report_stats){0, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN};
    double mean = sum / (double)kept;
    for (uint64_t i = 0; i < kept; i++)
        squares += (values[i] - mean) * (values[i] - mean);
    sort(values, kept);
    return (struct report_stats){.n = kept,
                                 .mean = mean,
                                 .std = sqrt(squares / (double)kept),
                                 .min = values[0],
                                 .p50 = quantile(values, kept, 0.5),
                                 .p75 = quantile(values, kept, 0.75),
                                 .p90 = quantile(values, kept, 0.9),
                                 .p95 = quantile(values, kept, 0.95),
                                 .p99 = quantile(values, kept, 0.99),
                                 .max = values[kept - 1]};
}

/* ----------------------------------------------------------------- summary */

static double limit_of(double own, double run)
{
    return own > 0 ? own : run > 0 ? run : INFINITY;
}

static bool is_ttft_met(const struct report_run *run, const struct report_request *q)
{
    return q->outcome == REPORT_ANSWERED && !(q->ttft_ms > limit_of(q->ttft_slo_ms, run->ttft_slo_ms));
}

static bool is_tpot_met(const struct report_run *run, const struct report_request *q)
{
    return q->outcome == REPORT_ANSWERED && !(q->tpot_ms > limit_of(q->tpot_slo_ms, run->tpot_slo_ms));
}

bool report_is_met(const struct report_run *run, const struct report_request *q)
{
    return is_ttft_met(run, q) && is_tpot_met(run, q);
}

enum report_plan report_plan_of(const struct report_run *run, const struct report_request *q)
{
    if (q->prefill < 0 || q->decode < 0 || (uint32_t)q->decode >= run->n_workers)
        return REPORT_PLAN_UNKNOWN;
    if (q->prefill != q->decode)
        return REPORT_SPLIT;
    return strcmp(run->workers[q->decode].role, "prefill") ? REPORT_AGGREGATED : REPORT_KEPT;
}

struct counts { /* sums for the rates */
    uint64_t effective, effective_tokens;
};

static void count_request(const struct report_run *run, const struct report_request *q, struct report_summary *out,
                          struct counts *c)
{
    uint64_t *const outcomes[] = {&out->answered, &out->refused, &out->failed, &out->cut_short};
    bool met = report_is_met(run, q);
    ++*outcomes[q->outcome];
    out->sent++;
    out->met += met;
    out->came_back += q->came_back;
    out->admitted_then += q->admitted_then;
    if (q->outcome != REPORT_ANSWERED)
        return;
    out->input_tokens += q->n_prompt;
    out->output_tokens += q->n_output;
    for (int i = 0; i < 4; i++)
        out->cached_tokens[i] += q->cached[i];
    out->plans[report_plan_of(run, q)]++;
    c->effective += met && !q->came_back;
    c->effective_tokens += met && !q->came_back ? q->n_output : 0;
}

static double ratio(double a, double b)
{
    return b > 0 ? a / b : 0;
}

static void set_rates(const struct report_run *run, const struct counts *c, struct report_summary *s)
{
    double seconds = s->duration_s = run->duration_ms * 1e-3;
    s->offered_rate = ratio((double)s->sent, run->arrivals_ms * 1e-3);
    s->request_throughput = ratio((double)s->answered, seconds);
    s->output_throughput = ratio((double)s->output_tokens, seconds);
    s->total_token_throughput = ratio((double)(s->input_tokens + s->output_tokens), seconds);
    s->goodput_at_rate = ratio((double)s->met, seconds);
    s->goodput_effective = ratio((double)c->effective, seconds);
    s->goodput_effective_tokens = ratio((double)c->effective_tokens, seconds);
    s->attainment = ratio((double)s->met, (double)s->sent);
    s->attainment_admitted = ratio((double)s->met, (double)s->answered);
}

typedef double field_of(const struct report_request *q);

static double ttft_of(const struct report_request *q)
{
    return q->outcome == REPORT_ANSWERED ? q->ttft_ms : NAN;
}

static double tpot_of(const struct report_request *q)
{
    return q->outcome == REPORT_ANSWERED ? q->tpot_ms : NAN;
}

static double e2e_of(const struct report_request *q)
{
    return q->outcome == REPORT_ANSWERED ? q->e2e_ms : NAN;
}

static double late_of(const struct report_request *q)
{
    return q->sent_late_ms;
}

static double refused_of(const struct report_request *q)
{
    return q->refused_after_ms;
}

static double retry_of(const struct report_request *q)
{
    return q->retry_after_ms;
}

static struct report_stats stats_of_field(const struct report_run *run, double *room, field_of *field)
{
    for (uint64_t i = 0; i < run->n_requests; i++)
        room[i] = field(&run->requests[i]);
    return report_stats_of(room, run->n_requests);
}

static struct report_stats stats_of_gaps(const struct report_run *run)
{
    uint64_t n = 0, most = 0;
    for (uint64_t i = 0; i < run->n_requests; i++)
        most += run->requests[i].token_ms ? run->requests[i].n_output : 0;
    double *gaps = mem_array(most, sizeof(*gaps));
    for (uint64_t i = 0; i < run->n_requests; i++) {
        const struct report_request *q = &run->requests[i];
        for (uint32_t k = 1; q->outcome == REPORT_ANSWERED && q->token_ms && k < q->n_output; k++)
            gaps[n++] = (double)q->token_ms[k] - (double)q->token_ms[k - 1];
    }
    struct report_stats s = report_stats_of(gaps, n);
    free(gaps);
    return s;
}

enum promise { PROMISE_TTFT, PROMISE_TPOT, PROMISE_FIRST_GAP };

static double actual_of(const struct report_request *q, enum promise what)
{
    return what == PROMISE_TTFT ? ttft_of(q) : what == PROMISE_TPOT ? tpot_of(q) : q->first_gap_ms;
}

static double predicted_of(const struct report_request *q, enum promise what)
{
    return what == PROMISE_TTFT   ? q->predicted_ttft_ms
           : what == PROMISE_TPOT ? q->predicted_tpot_ms
                                  : q->predicted_first_gap_ms;
}

/* Relative errors of predictions. naive: the error of predicting the value of the request before. */
static struct report_stats stats_of_errors(const struct report_run *run, double *room, enum promise what, bool naive)
{
    double last = NAN;
    uint64_t n = 0;
    for (uint64_t i = 0; i < run->n_requests; i++) {
        const struct report_request *q = &run->requests[i];
        double actual = actual_of(q, what), predicted = predicted_of(q, what);
        if (!(actual > 0))
            continue;
        if (q->arrived_ms >= run->warm_ms && isfinite(predicted))
            room[n++] = fabs((naive ? last : predicted) - actual) / actual;
        last = actual;
    }
    return report_stats_of(room, n);
}

static void set_energy(const struct report_run *run, struct report_summary *s)
{
    s->total_joules = run->n_workers ? 0 : NAN;
    for (uint32_t i = 0; i < run->n_workers; i++)
        s->total_joules += run->workers[i].joules;
    s->joules_per_token = s->output_tokens ? s->total_joules / (double)s->output_tokens : NAN;
}

static uint32_t n_engines(const struct report_run *run)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < run->n_workers; i++)
        n += strcmp(run->workers[i].role, "store") != 0;
    return n;
}

static bool is_good(const struct report_point *p, bool mlperf)
{
    return mlperf ? p->ttft_share >= 0.99 && p->tpot_share >= 0.99 : p->met_share >= 0.9;
}

/* The highest good offered rate; NAN: none. *under_out: the lowest tried one above it that was too high; NAN:
 * the search has only seen good rates, and no limit. */
static double most_of(const struct report_run *run, bool mlperf, double *under_out)
{
    double most = NAN, rate = 0;
    *under_out = NAN;
    for (uint32_t i = 0; i < run->n_points; i++) {
        const struct report_point *p = &run->points[i];
        if (!is_good(p, mlperf))
            continue;
        most = fmax(most, p->offered_rate); /* fmax ignores NAN */
        rate = fmax(rate, p->rate);
    }
    for (uint32_t i = 0; i < run->n_points; i++)
        if (!is_good(&run->points[i], mlperf) && run->points[i].rate > rate)
            *under_out = fmin(*under_out, run->points[i].offered_rate);
    return most;
}

static void set_most(const struct report_run *run, struct report_summary *s)
{
    double workers = n_engines(run) ? n_engines(run) : 1;
    s->goodput_distserve = most_of(run, false, &s->distserve_under) / workers;
    s->distserve_under /= workers;
    s->goodput_mlperf = most_of(run, true, &s->mlperf_under);
}

void report_summarize(const struct report_run *run, struct report_summary *out)
{
    double *room = mem_array(run->n_requests, sizeof(*room));
    struct counts c = {0};
    *out = (struct report_summary){0};
    for (uint64_t i = 0; i < run->n_requests; i++)
        count_request(run, &run->requests[i], out, &c);
    set_rates(run, &c, out);
    report_sum_offered(run, out);
    out->ttft = stats_of_field(run, room, ttft_of);
    out->tpot = stats_of_field(run, room, tpot_of);
    out->e2e = stats_of_field(run, room, e2e_of);
    out->sent_late = stats_of_field(run, room, late_of);
    out->refused_after = stats_of_field(run, room, refused_of);
    out->retry_after = stats_of_field(run, room, retry_of);
    out->itl = stats_of_gaps(run);
    out->ttft_error = stats_of_errors(run, room, PROMISE_TTFT, false);
    out->ttft_error_last_value = stats_of_errors(run, room, PROMISE_TTFT, true);
    out->tpot_error = stats_of_errors(run, room, PROMISE_TPOT, false);
    out->first_gap_error = stats_of_errors(run, room, PROMISE_FIRST_GAP, false);
    set_energy(run, out);
    set_most(run, out);
    free(room);
}

struct report_point report_point_of(const struct report_run *run)
{
    uint64_t met = 0, ttft = 0, tpot = 0;
    for (uint64_t i = 0; i < run->n_requests; i++) {
        met += report_is_met(run, &run->requests[i]);
        ttft += is_ttft_met(run, &run->requests[i]);
        tpot += is_tpot_met(run, &run->requests[i]);
    }
    double n = (double)run->n_requests;
    return (struct report_point){.rate = run->rate,
                                 .offered_rate = ratio(n, run->arrivals_ms * 1e-3),
                                 .goodput = ratio((double)met, run->duration_ms * 1e-3),
                                 .met_share = ratio((double)met, n),
                                 .ttft_share = ratio((double)ttft, n),
                                 .tpot_share = ratio((double)tpot, n)};
}

/* ------------------------------------------------------------------ checks */

static enum td_status check_tokens(const struct report_run *run, uint64_t i, struct td_error *e)
{
    const struct report_request *q = &run->requests[i];
    uint64_t cached = 0;
    for (int k = 0; k < 4; k++)
        cached += q->cached[k];
    if (q->n_asked && q->n_output != q->n_asked)
        return td_fail(e, TD_ERR_CORRUPT, "tokens in = out: request %" PRIu64 " asked for %u tokens and got %u", i,
                       q->n_asked, q->n_output);
    if (cached > q->n_prompt)
        return td_fail(e, TD_ERR_CORRUPT, "tokens in = out: request %" PRIu64 " found %" PRIu64 " of %u prompt tokens",
                       i, cached, q->n_prompt);
    return TD_OK;
}

static enum td_status check_latency(const struct report_run *run, uint64_t i, struct td_error *e)
{
    const struct report_request *q = &run->requests[i];
    double gaps = q->n_output > 1 ? (q->n_output - 1) * q->tpot_ms : 0, sum = q->ttft_ms + gaps;
    if (!(fabs(sum - q->e2e_ms) <= 1e-3 + 1e-6 * fabs(q->e2e_ms)))
        return td_fail(e, TD_ERR_CORRUPT,
                       "TTFT + (n - 1) TPOT = latency: request %" PRIu64 " has %.3f + %u * %.4f ms, and %.3f ms", i,
                       q->ttft_ms, q->n_output ? q->n_output - 1 : 0, q->tpot_ms, q->e2e_ms);
    return TD_OK;
}

struct edge { /* a request arrives or ends */
    double at_ms;
    int step;
};

static int by_time(const void *a, const void *b)
{
    const struct edge *x = a, *y = b;
    return x->at_ms < y->at_ms ? -1 : x->at_ms > y->at_ms ? 1 : y->step - x->step; /* arrivals before ends */
}

/* Checks Little's law. The area under the number of requests in the system is found event by event; the
 * latencies are not added up. */
static enum td_status check_little(const struct report_run *run, struct td_error *e)
{
    struct edge *edges = mem_array(2 * run->n_requests, sizeof(*edges));
    uint64_t n = 0;
    double area = 0, times = 0, last_ms = 0, inside = 0, first_ms = INFINITY;
    for (uint64_t i = 0; i < run->n_requests; i++) {
        const struct report_request *q = &run->requests[i];
        first_ms = fmin(first_ms, q->arrived_ms);
        if (q->outcome != REPORT_ANSWERED)
            continue;
        edges[n++] = (struct edge){q->arrived_ms, 1};
        edges[n++] = (struct edge){q->arrived_ms + q->e2e_ms, -1};
        times += q->e2e_ms;
    }
    qsort(edges, n, sizeof(*edges), by_time);
    double end_ms = first_ms + run->duration_ms * (1 + 1e-9) + 1e-3;
    for (uint64_t i = 0; i < n; i++) {
        double at_ms = fmin(edges[i].at_ms, end_ms);
        area += inside * (at_ms - last_ms);
        last_ms = at_ms;
        inside += edges[i].step;
    }
    free(edges);
    double answered = (double)(n / 2), mean_inside = ratio(area, run->duration_ms),
           rate = ratio(answered, run->duration_ms), expected = rate * ratio(times, answered);
    if (!(fabs(mean_inside - expected) <= 1e-6 + 1e-4 * expected))
        return td_fail(e, TD_ERR_CORRUPT,
                       "Little's law: %.6g requests were in the system on average, rate times mean time is %.6g",
                       mean_inside, expected);
    return TD_OK;
}

enum td_status report_check(const struct report_run *run, struct td_error *error_out)
{
    enum td_status s = TD_OK;
    for (uint64_t i = 0; !s && i < run->n_requests; i++)
        if (run->requests[i].outcome == REPORT_ANSWERED) {
            s = check_tokens(run, i, error_out);
            if (!s)
                s = check_latency(run, i, error_out);
        }
    return s ? s : check_little(run, error_out);
}

/* ------------------------------------------------------------------- table */

static void add_line(struct bytes *out, const char *name, const struct report_stats *s)
{
    if (s->n && s->max > 0)
        bytes_printf(out, "%-14s mean %9.1f  p50 %9.1f  p90 %9.1f  p99 %9.1f ms\n", name, s->mean, s->p50, s->p90,
                     s->p99);
}

static void add_cached(struct bytes *out, const struct report_summary *s)
{
    static const char *const TIERS[] = {"worker", "peer", "DRAM", "SSD"};
    double all = (double)s->input_tokens, sum = 0;
    int any = 0;
    for (int i = 0; i < 4; i++)
        sum += (double)s->cached_tokens[i];
    bytes_printf(out, "cached         %.1f %% of the prompts' tokens", 100 * ratio(sum, all));
    for (int i = 0; i < 4; i++)
        if (s->cached_tokens[i])
            bytes_printf(out, "%s %s %.1f %%", any++ ? "," : ":", TIERS[i],
                         100 * ratio((double)s->cached_tokens[i], all));
    bytes_printf(out, "\n");
}

static void add_plans(struct bytes *out, const struct report_summary *s)
{
    const uint64_t *n = s->plans;
    if (n[REPORT_SPLIT] + n[REPORT_AGGREGATED] + n[REPORT_KEPT])
        bytes_printf(out, "plans          %" PRIu64 " split, %" PRIu64 " aggregated, %" PRIu64 " kept\n",
                     n[REPORT_SPLIT], n[REPORT_AGGREGATED], n[REPORT_KEPT]);
}

static void add_offered(struct bytes *out, const struct report_offered *o)
{
    bytes_printf(
        out,
        "offered        refused %.1f %% of the requests, %.1f %% of the prompts' tokens; met %.1f %%, %.1f %%; "
        "cached %.1f %% of the tokens\n",
        100 * o->refused_share, 100 * o->refused_token_share, 100 * o->met_share, 100 * o->met_token_share,
        100 * o->cached_share);
}

static void add_quarters(struct bytes *out, const struct report_summary *s)
{
    bool any = false;
    for (int i = 0; i < REPORT_QUARTERS; i++) {
        const struct report_offered *q = &s->quarters[i];
        if (!q->n)
            continue;
        bytes_printf(out,
                     any ? "; to %u: %.1f %%, %.1f %%" : "by length      to %u tokens: refused %.1f %%, met %.1f %%",
                     q->most_tokens, 100 * q->refused_share, 100 * q->met_share);
        any = true;
    }
    if (any)
        bytes_printf(out, "\n");
}

/* Lists the reasons, most frequent first. */
static void add_reasons(struct bytes *out, const struct report_run *run)
{
    enum { MOST = 5 };
    struct report_reason *counts = mem_array(run->n_reasons, sizeof(*counts));
    report_count_reasons(run, counts);
    for (int k = 0; k < MOST; k++) {
        uint32_t best = 0;
        for (uint32_t i = 1; i < run->n_reasons; i++)
            if (counts[i].refused + counts[i].failed > counts[best].refused + counts[best].failed)
                best = i;
        if (!run->n_reasons || !(counts[best].refused + counts[best].failed))
            break;
        bytes_printf(out, "%s%" PRIu64 " %s", k ? "; " : "reasons        ", counts[best].refused + counts[best].failed,
                     run->reasons[best]);
        counts[best] = (struct report_reason){0};
    }
    uint64_t others = 0;
    for (uint32_t i = 0; i < run->n_reasons; i++)
        others += counts[i].refused + counts[i].failed;
    if (others)
        bytes_printf(out, "; %" PRIu64 " others", others);
    if (run->n_reasons)
        bytes_printf(out, "\n");
    free(counts);
}

/* Prints the highest good rate and the lowest one that was too high. Without the latter, the former is only
 * the highest tried rate. */
static void add_most(struct bytes *out, const char *name, double rate, double under, const char *unit)
{
    if (isnan(rate))
        bytes_printf(out, "%s none", name);
    else if (isnan(under))
        bytes_printf(out, "%s at least %.3f/s%s (the limit was not reached)", name, rate, unit);
    else
        bytes_printf(out, "%s %.3f/s%s (%.3f is too much)", name, rate, unit, under);
}

static void add_goodput(struct bytes *out, const struct report_run *run, const struct report_summary *s)
{
    bytes_printf(out,
                 "goodput        at_rate %.2f/s, effective %.2f/s (%.1f tokens/s); %.1f %% of all met their limits, "
                 "%.1f %% of the admitted\n",
                 s->goodput_at_rate, s->goodput_effective, s->goodput_effective_tokens, 100 * s->attainment,
                 100 * s->attainment_admitted);
    if (!run->n_points)
        return;
    add_most(out, "most           distserve", s->goodput_distserve, s->distserve_under, " per worker");
    add_most(out, ", mlperf", s->goodput_mlperf, s->mlperf_under, "");
    bytes_printf(out, "\n");
}

static void add_predictions(struct bytes *out, const struct report_run *run, const struct report_summary *s)
{
    const struct report_stats *p = &s->ttft_error, *naive = &s->ttft_error_last_value;
    if (p->n)
        bytes_printf(out, "TTFT predicted within %.1f %% (median), %.1f %% (p90); ", 100 * p->p50, 100 * p->p90);
    if (p->n && naive->n) /* the first request has none before it */
        bytes_printf(out, "by the last value %.1f %%, %.1f %%; ", 100 * naive->p50, 100 * naive->p90);
    if (p->n)
        bytes_printf(out, "%" PRIu64 " after %.0f s\n", p->n, run->warm_ms * 1e-3);
    if (s->tpot_error.n)
        bytes_printf(out, "TPOT predicted within %.1f %% (median), %.1f %% (p90)\n", 100 * s->tpot_error.p50,
                     100 * s->tpot_error.p90);
    if (s->first_gap_error.n)
        bytes_printf(out, "first gap of split ones predicted within %.1f %% (median), %.1f %% (p90)\n",
                     100 * s->first_gap_error.p50, 100 * s->first_gap_error.p90);
}

void report_table(const struct report_run *run, struct bytes *out)
{
    struct report_summary s;
    report_summarize(run, &s);
    bytes_printf(out,
                 "%s: %" PRIu64 " requests at %.2f/s: %" PRIu64 " answered, %" PRIu64 " refused, %" PRIu64
                 " failed, %" PRIu64 " cut short; %.1f s\n",
                 run->label, s.sent, s.offered_rate, s.answered, s.refused, s.failed, s.cut_short, s.duration_s);
    add_goodput(out, run, &s);
    if (s.met < s.sent) {
        add_offered(out, &s.offered);
        add_quarters(out, &s);
        add_reasons(out, run);
    }
    add_line(out, "TTFT", &s.ttft);
    add_line(out, "TPOT", &s.tpot);
    add_line(out, "ITL", &s.itl);
    add_line(out, "latency", &s.e2e);
    add_line(out, "refused after", &s.refused_after);
    add_line(out, "sent late by", &s.sent_late);
    bytes_printf(out, "tokens         %.1f/s out, %.1f/s in and out\n", s.output_throughput, s.total_token_throughput);
    add_cached(out, &s);
    add_plans(out, &s);
    add_predictions(out, run, &s);
    if (s.came_back)
        bytes_printf(out,
                     "came back      %" PRIu64 ", of whom %" PRIu64 " were admitted then; told to wait %.0f ms on "
                     "average\n",
                     s.came_back, s.admitted_then, s.retry_after.n ? s.retry_after.mean : 0);
    if (isfinite(s.joules_per_token))
        bytes_printf(out, "energy         %.3f J a token, %.1f kJ\n", s.joules_per_token, s.total_joules * 1e-3);
    if (!run->valid)
        bytes_printf(out, "NOT VALID: %s\n", run->why_invalid ? run->why_invalid : "");
}
