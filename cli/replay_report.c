/* Makes a report of the slots that the senders of tandem replay have filled. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/replay.h"

enum { TICKS = 120 };

/* ----------------------------------------------------------------- workers */

static int32_t worker_of(struct replay_board *b, const char *name, const char *role)
{
    uint32_t i = 0;
    if (!*name)
        return -1;
    while (i < b->n_workers && strcmp(b->workers[i].name, name))
        i++;
    if (i == REPLAY_MAX_WORKERS)
        return -1;
    if (i == b->n_workers) { /* the worker joined after the start */
        snprintf(b->workers[i].name, sizeof(b->workers[i].name), "%s", name);
        snprintf(b->workers[i].role, sizeof(b->workers[i].role), "%s", role);
        b->n_workers++;
    }
    return (int32_t)i;
}

struct report_span { /* a time in which a worker works for a request */
    double from_ms, to_ms;
};

static int by_start(const void *a, const void *b)
{
    const struct report_span *x = a, *y = b;
    return (x->from_ms > y->from_ms) - (x->from_ms < y->from_ms);
}

static void add_busy(float *load, double tick_ms, double from_ms, double to_ms)
{
    for (int k = (int)(from_ms / tick_ms); k < TICKS && k * tick_ms < to_ms; k++)
        load[k] += (float)((fmin(to_ms, (k + 1) * tick_ms) - fmax(from_ms, k * tick_ms)) / tick_ms);
}

/* Adds the union of the spans to the load. Returns its length in ms. */
static double add_spans(struct report_span *spans, uint64_t n, double tick_ms, float *load)
{
    double busy = 0, from = 0, to = 0;
    qsort(spans, n, sizeof(*spans), by_start);
    for (uint64_t i = 0; i <= n; i++) {
        if (i < n && spans[i].from_ms <= to) {
            to = fmax(to, spans[i].to_ms);
            continue;
        }
        if (to > from) {
            add_busy(load, tick_ms, from, to);
            busy += to - from;
        }
        if (i < n) {
            from = spans[i].from_ms;
            to = spans[i].to_ms;
        }
    }
    return busy;
}

/* The times in which a worker prefilled or decoded, as far as the answers tell. */
static uint64_t spans_of(const struct replay_result *out, int32_t worker, struct report_span *spans)
{
    uint64_t n = 0;
    for (uint64_t i = 0; i < out->run.n_requests; i++) {
        const struct report_request *q = &out->requests[i];
        double first = q->arrived_ms + q->ttft_ms;
        if (q->outcome != REPORT_ANSWERED)
            continue;
        if (q->prefill == worker && isfinite(q->prefill_ms))
            spans[n++] = (struct report_span){fmax(first - q->prefill_ms, 0), first};
        if (q->decode == worker && q->n_output > 1)
            spans[n++] = (struct report_span){first, q->arrived_ms + q->e2e_ms};
    }
    return n;
}

static void add_workers(struct replay_result *out, const struct replay *r)
{
    uint32_t n = r->board->n_workers;
    struct report_span *spans = mem_array(2 * out->run.n_requests, sizeof(*spans));
    out->workers = mem_array(n, sizeof(*out->workers));
    out->loads = mem_array((size_t)n * TICKS, sizeof(*out->loads));
    out->run.load_tick_ms = fmax(out->run.duration_ms, 1) / TICKS;
    for (uint32_t i = 0; i < n; i++) {
        const struct replay_worker *w = &r->board->workers[i];
        float *load = out->loads + (size_t)i * TICKS;
        bool store = !strcmp(w->role, "store");
        out->workers[i] = (struct report_worker){.name = w->name, .role = w->role, .busy_ms = NAN, .joules = NAN};
        if (store)
            continue;
        out->workers[i].busy_ms = add_spans(spans, spans_of(out, (int32_t)i, spans), out->run.load_tick_ms, load);
        out->workers[i].load = load;
        out->workers[i].n_load = TICKS;
    }
    free(spans);
    out->run.workers = out->workers;
    out->run.n_workers = n;
}

/* ---------------------------------------------------------------- requests */

static void add_requests(struct replay_result *out, const struct replay *r)
{
    uint64_t n = 0;
    out->requests = mem_array(r->n, sizeof(*out->requests));
    for (uint64_t i = 0; i < r->n; i++) {
        const struct replay_slot *slot = &r->slots[i];
        if (slot->state == SLOT_WAITS)
            continue;
        out->requests[n] = slot->q;
        bool aggregated = !strcmp(slot->plan, "aggregated"), kept = !strcmp(slot->plan, "kept");
        out->requests[n].prefill = worker_of(r->board, slot->prefill, aggregated ? "decode" : "prefill");
        out->requests[n].decode = worker_of(r->board, slot->decode, kept ? "prefill" : "decode");
        out->requests[n].reason = report_reason_of(&out->reasons, slot->reason);
        n++;
    }
    out->run.requests = out->requests;
    out->run.n_requests = n;
    out->run.reasons = out->reasons.texts;
    out->run.n_reasons = out->reasons.n;
}

static void set_times(struct report_run *run)
{
    double first = INFINITY, last = 0, end = 0;
    for (uint64_t i = 0; i < run->n_requests; i++) {
        const struct report_request *q = &run->requests[i];
        first = fmin(first, q->arrived_ms);
        last = fmax(last, q->arrived_ms);
        end = fmax(end, q->arrived_ms);
        if (isfinite(q->e2e_ms)) /* e2e_ms of a request that came back counts from when it came back */
            end = fmax(end, q->arrived_ms + q->e2e_ms + (q->came_back ? q->refused_after_ms + q->retry_after_ms : 0));
        if (isfinite(q->refused_after_ms))
            end = fmax(end, q->arrived_ms + q->refused_after_ms);
    }
    run->duration_ms = run->n_requests ? end - first : 0;
    run->arrivals_ms = run->n_requests ? last - first : 0;
}

/* ---------------------------------------------------------------- settings */

static json_t *json_of_event(const struct replay_event *e)
{
    json_t *event = json_pack("{s:f,s:s,s:s}", "at_ms", e->at_ms, "action", e->action, "target", e->target);
    if (!strcmp(e->action, "faults"))
        json_object_set_new(event, "script", json_string(e->script));
    return event;
}

static char *settings_of(const struct replay *r, const struct replay_events *events)
{
    const struct replay_options *o = &r->o;
    json_t *faults = json_array();
    for (uint32_t i = 0; events && i < events->n; i++)
        json_array_append_new(faults, json_of_event(&events->list[i]));
    json_t *s = json_pack("{s:f,s:f,s:I,s:I,s:I,s:f,s:I,s:f,s:I,s:f,s:f,s:I,s:b,s:o}", "rate", o->rate, "length_scale",
                          o->length_scale, "max_output", (json_int_t)o->max_output, "concurrency",
                          (json_int_t)o->concurrency, "processes", (json_int_t)o->processes, "poisson", o->poisson,
                          "seed", (json_int_t)o->seed, "retry_share", o->retry_share, "block_tokens",
                          (json_int_t)r->trace->block_tokens, "ttft_ms", o->ttft_ms, "tpot_ms", o->tpot_ms, "left_out",
                          (json_int_t)r->left_out, "find_max", (int)o->find_max, "faults", faults);
    char *text = json_dumps(s, JSON_COMPACT | JSON_REAL_PRECISION(10));
    json_decref(s);
    return text;
}

/* -------------------------------------------------------------------- whole */

static void validate(struct replay_result *out, const struct replay *r)
{
    struct report_summary s;
    struct td_error e = {{0}};
    report_summarize(&out->run, &s);
    out->run.valid = false;
    out->run.why_invalid = out->why;
    if (r->n_senders_died)
        snprintf(out->why, sizeof(out->why), "%u of the senders ended early", r->n_senders_died);
    else if (report_check(&out->run, &e))
        snprintf(out->why, sizeof(out->why), "%s", e.text);
    else if (s.sent_late.n && s.sent_late.p99 > (double)r->o.max_lag_ms)
        snprintf(out->why, sizeof(out->why), "requests were sent too late (p99 of %.1f ms is over %d ms)",
                 s.sent_late.p99, (int)r->o.max_lag_ms);
    else
        out->run.valid = true;
    if (out->run.valid)
        out->run.why_invalid = NULL;
}

void replay_result_init(struct replay_result *out, const struct replay *r, const struct replay_events *events)
{
    *out = (struct replay_result){.run = {.kind = "replay",
                                          .label = r->o.label,
                                          .ttft_slo_ms = r->o.ttft_ms,
                                          .tpot_slo_ms = r->o.tpot_ms,
                                          .rate = r->o.rate,
                                          .warm_ms = (double)r->o.warm_ms,
                                          .tenants = (const char *const *)r->trace->tenants,
                                          .n_tenants = r->trace->n_tenants}};
    out->run.settings = out->settings = settings_of(r, events);
    add_requests(out, r);
    set_times(&out->run);
    add_workers(out, r);
    validate(out, r);
}

void replay_result_fini(struct replay_result *out)
{
    free(out->requests);
    free(out->workers);
    free(out->loads);
    free(out->settings);
}
