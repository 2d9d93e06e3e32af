#include "replay/simulate_report.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"

static struct report_request request_of(const struct trace_request *t, const struct simulate_config *c,
                                        const struct simulated *q)
{
    bool answered = !q->refused && !q->failed, was_refused = q->refused || q->came_back;
    bool was_sent = !q->refused || !isnan(q->refused_after_ms);
    enum report_outcome unanswered = q->refused ? REPORT_REFUSED : q->n_output ? REPORT_CUT_SHORT : REPORT_FAILED;
    uint32_t n_asked = t->n_output ? t->n_output : 1;
    return (struct report_request){.outcome = answered ? REPORT_ANSWERED : unanswered,
                                   .tenant = t->tenant,
                                   .n_prompt = t->n_prompt,
                                   .n_output = q->n_output,
                                   .n_asked = c->max_tokens && n_asked > c->max_tokens ? c->max_tokens : n_asked,
                                   .ttft_slo_ms = t->ttft_ms,
                                   .tpot_slo_ms = t->tpot_ms,
                                   .cached = {q->cached_tokens, q->peer_tokens, q->dram_tokens, q->ssd_tokens},
                                   .prefill = answered ? (int32_t)q->prefill : -1,
                                   .decode = answered ? (int32_t)q->decode : -1,
                                   .arrived_ms = q->arrived_ms,
                                   .ttft_ms = answered ? q->ttft_ms : NAN,
                                   .tpot_ms = answered && q->n_output > 1 ? q->tpot_ms : NAN,
                                   .e2e_ms = answered ? q->end_ms - q->asked_ms : NAN,
                                   .queue_ms = answered ? q->queue_ms : NAN,
                                   .load_ms = answered ? q->load_ms : NAN,
                                   .prefill_ms = answered ? q->prefill_ms : NAN,
                                   .transfer_ms = answered ? q->transfer_ms : NAN,
                                   .first_gap_ms = answered && q->first_gap_ms > 0 ? q->first_gap_ms : NAN,
                                   .predicted_ttft_ms = answered ? q->predicted_ttft_ms : NAN,
                                   .predicted_tpot_ms = answered && q->n_output > 1 ? q->predicted_tpot_ms : NAN,
                                   .predicted_first_gap_ms =
                                       answered && q->first_gap_ms > 0 ? q->predicted_first_gap_ms : NAN,
                                   .refused_after_ms = was_refused ? q->refused_after_ms : NAN,
                                   .retry_after_ms = was_refused && q->retry_after_ms > 0 ? q->retry_after_ms : NAN,
                                   .router = c->n_routers > 1 && was_sent ? q->router + 1 : 0,
                                   .came_back = q->came_back,
                                   .admitted_then = q->admitted_then,
                                   .token_ms = answered ? q->token_ms : NULL};
}

static void add_workers(struct simulate_report *out, const struct simulate_config *c, const struct simulate_result *r)
{
    out->workers = mem_array(r->n_workers, sizeof(*out->workers));
    out->names = mem_array(r->n_workers, sizeof(*out->names));
    for (uint32_t i = 0; i < r->n_workers; i++) {
        const struct simulated_worker *w = &r->workers[i];
        bool prefill = w->role == ROLE_PREFILL;
        snprintf(out->names[i], sizeof(out->names[i]), "%s-%u", prefill ? "prefill" : "decode",
                 1 + i - (prefill ? 0 : c->n_prefill));
        out->workers[i] = (struct report_worker){.name = out->names[i],
                                                 .role = prefill        ? "prefill"
                                                         : c->n_prefill ? "decode"
                                                                        : "both",
                                                 .busy_ms = w->busy_ms,
                                                 .joules = w->joules,
                                                 .load = w->load,
                                                 .n_load = w->n_load};
    }
    out->run.workers = out->workers;
    out->run.n_workers = r->n_workers;
}

void simulate_report_init(struct simulate_report *out, const struct trace *trace, const struct simulate_config *config,
                          const struct simulate_result *result)
{
    double first = INFINITY, last = 0;
    struct td_error e = {{0}};
    *out = (struct simulate_report){.run = {.kind = "simulate",
                                            .ttft_slo_ms = config->ttft_ms,
                                            .tpot_slo_ms = config->tpot_ms,
                                            .rate = config->rate,
                                            .load_tick_ms = result->load_tick_ms,
                                            .tenants = (const char *const *)trace->tenants,
                                            .n_tenants = trace->n_tenants,
                                            .n_requests = result->n_requests,
                                            .valid = true}};
    out->requests = mem_array(result->n_requests, sizeof(*out->requests));
    for (uint64_t i = 0; i < result->n_requests; i++) {
        out->requests[i] = request_of(&trace->requests[i], config, &result->requests[i]);
        out->requests[i].reason = report_reason_of(&out->reasons, result->requests[i].reason);
        first = fmin(first, result->requests[i].arrived_ms);
        last = fmax(last, result->requests[i].arrived_ms);
    }
    out->run.requests = out->requests;
    out->run.reasons = out->reasons.texts;
    out->run.n_reasons = out->reasons.n;
    out->run.duration_ms = result->n_requests ? result->duration_ms - first : 0;
    out->run.arrivals_ms = result->n_requests ? last - first : 0;
    add_workers(out, config, result);
    if (report_check(&out->run, &e)) {
        snprintf(out->why, sizeof(out->why), "%s", e.text);
        out->run.valid = false;
        out->run.why_invalid = out->why;
    }
}

void simulate_report_fini(struct simulate_report *r)
{
    free(r->requests);
    free(r->workers);
    free(r->names);
}
