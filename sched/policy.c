#include "sched/policy.h"

#include <stddef.h>

#include "base/random.h"

enum {
    EXPECTED_ANSWER = 256, /* tokens, until lengths are learned: growth beyond it is what preemption is for */
    CHUNKS_AHEAD = 2,      /* a worker's own queue; all other waiting is done where it can be re-ordered */
};
static const double UNMEASURED_PREFILL_MS = 0.05, UNMEASURED_STEP_MS = 5; /* a worker that has done nothing yet */
static const double SPLIT_MS = 2;                                         /* prior cost of handing over */
static const double TIE = 1.05;

static uint32_t pages(uint64_t tokens, uint32_t block_tokens)
{
    return (uint32_t)((tokens + block_tokens - 1) / block_tokens);
}

uint32_t policy_reservation(const struct policy_request *r)
{
    uint32_t answer = r->max_tokens < EXPECTED_ANSWER ? r->max_tokens : EXPECTED_ANSWER;
    return pages((uint64_t)r->n_tokens + answer, r->block_tokens);
}

static double prefill_ms(const struct policy_worker *w, uint64_t tokens)
{
    return (double)tokens * (w->prefill_ms_per_token > 0 ? w->prefill_ms_per_token : UNMEASURED_PREFILL_MS);
}

static double step_ms(const struct policy_worker *w)
{
    return w->decode_ms_per_step > 0 ? w->decode_ms_per_step : UNMEASURED_STEP_MS;
}

static bool fits_ever(const struct policy_worker *w, const struct policy_request *r)
{
    uint64_t total = (uint64_t)r->n_tokens + r->max_tokens;
    return total <= w->max_context && pages(total, r->block_tokens) <= w->total_pages;
}

static bool has_room(const struct policy_worker *w, const struct policy_request *r)
{
    return w->running < w->max_batch && w->reserved_pages + policy_reservation(r) <= w->total_pages;
}

static bool takes_prompts(const struct policy_worker *w)
{
    return w->queued_tokens < (uint64_t)CHUNKS_AHEAD * w->chunk_tokens;
}

/* What is loaded is taken to lie in memory and on disk as the whole prefix does. */
static double load_ms(const struct policy_worker *w, const struct policy_request *r, uint32_t n_blocks)
{
    double on_disk = (double)n_blocks * r->store_blocks_ssd / r->store_blocks;
    double ms = w->load_ms + w->load_dram_ms * (n_blocks - on_disk) + w->load_ssd_ms * on_disk;
    return ms > 0 ? ms : 0;
}

/* TTFT on worker w; *store_blocks_out: what is worth loading (0: computing is faster, or nothing is there). */
static double predict_ttft(const struct policy_worker *w, const struct policy_request *r, uint32_t *store_blocks_out)
{
    uint32_t usable = (r->n_tokens - 1) / r->block_tokens; /* the last token is always computed */
    uint32_t own = w->matched_blocks < usable ? w->matched_blocks : usable;
    uint32_t there = r->prefix == PREFIX_COMPUTE ? 0 : r->store_blocks < usable ? r->store_blocks : usable;
    double load = 0;
    *store_blocks_out = 0;
    if (there > own) {
        double computing = prefill_ms(w, (uint64_t)(there - own) * r->block_tokens);
        load = load_ms(w, r, there - own);
        if (load < computing || w->prefill_ms_per_token <= 0 || r->prefix == PREFIX_LOAD) {
            *store_blocks_out = there;
            own = there;
        } else {
            load = 0;
        }
    }
    return r->waited_ms + prefill_ms(w, w->queued_tokens) + load +
           prefill_ms(w, r->n_tokens - (uint64_t)own * r->block_tokens);
}

struct search {
    const struct policy_worker *workers;
    const struct policy_request *r;
    uint64_t seed;
    struct plan best;
    bool found, could_fit;
    double best_cost, least_ttft, least_tpot;
};

static bool meets(const struct policy_request *r, double ttft, double tpot)
{
    double first = ttft - r->waited_ms;
    return (!r->ttft_ms || ttft <= r->ttft_ms) && (!r->tpot_ms || tpot <= r->tpot_ms) &&
           (r->remaining_ms == INT64_MAX || first <= (double)r->remaining_ms);
}

static void consider(struct search *s, uint32_t prefill, uint32_t decode)
{
    const struct policy_worker *p = &s->workers[prefill], *d = &s->workers[decode];
    if (!fits_ever(p, s->r) || !fits_ever(d, s->r))
        return;
    s->could_fit = true;
    uint32_t store_blocks;
    double ttft = predict_ttft(p, s->r, &store_blocks);
    double tpot = step_ms(d);
    if (prefill == decode && d->running) /* its running sequences wait for our chunks, we for their steps */
        ttft += step_ms(d) * (1 + s->r->n_tokens / (d->chunk_tokens ? d->chunk_tokens : 1));
    else if (prefill != decode)
        ttft += SPLIT_MS;
    s->least_ttft = !s->least_ttft || ttft < s->least_ttft ? ttft : s->least_ttft;
    s->least_tpot = !s->least_tpot || tpot < s->least_tpot ? tpot : s->least_tpot;
    if (!meets(s->r, ttft, tpot))
        return;
    if (!has_room(d, s->r) || !takes_prompts(p) || (prefill != decode && !has_room(p, s->r)))
        return;
    /* decode load breaks the tie that TTFT leaves open */
    double cost = ttft + tpot * (1 + (double)d->reserved_pages / (d->total_pages ? d->total_pages : 1));
    bool tie = s->found && cost < s->best_cost * TIE && s->best_cost < cost * TIE;
    bool better = !s->found || (tie ? random_at(s->seed, prefill, decode) & 1 : cost < s->best_cost);
    s->found = true;
    if (!better)
        return;
    s->best_cost = cost;
    s->best = (struct plan){.kind = prefill == decode ? PLAN_AGGREGATED : PLAN_SPLIT,
                            .prefill = prefill,
                            .decode = decode,
                            .store_blocks = store_blocks,
                            .ttft_ms = ttft,
                            .tpot_ms = tpot};
}

static struct plan refuse(const struct search *s)
{
    const struct policy_request *r = s->r;
    struct plan p = {.kind = PLAN_REFUSE, .ttft_ms = s->least_ttft, .tpot_ms = s->least_tpot};
    p.retry_after_ms = 100;
    if (!s->could_fit) {
        p.reason = "prompt and max_tokens fit no worker's context or pool";
        p.never = true;
    } else if (r->remaining_ms != INT64_MAX && s->least_ttft - r->waited_ms > (double)r->remaining_ms) {
        p.reason = "slo.deadline_ms can't be met";
    } else if (r->ttft_ms && s->least_ttft > r->ttft_ms) {
        p.reason = "slo.ttft_ms can't be met";
        p.retry_after_ms += (uint32_t)(s->least_ttft - r->ttft_ms);
    } else if (r->tpot_ms && s->least_tpot > r->tpot_ms) {
        p.reason = "slo.tpot_ms can't be met";
        p.retry_after_ms += 1000;
    } else {
        p.kind = PLAN_WAIT;
        p.reason = "no room yet";
    }
    return p;
}

struct plan policy_place(const struct policy_worker *workers, uint32_t n_workers, const struct policy_request *request,
                         uint64_t seed)
{
    struct search s = {.workers = workers, .r = request, .seed = seed};
    bool any_prefill = false, any_decode = false;
    for (uint32_t i = 0; i < n_workers; i++) {
        any_prefill |= workers[i].usable && workers[i].role == ROLE_PREFILL;
        any_decode |= workers[i].usable && workers[i].role == ROLE_DECODE;
    }
    if (!any_decode || (request->force == FORCE_SPLIT && !any_prefill))
        return (struct plan){.kind = PLAN_REFUSE,
                             .reason = any_decode ? "no prefill worker is up" : "no decode worker is up",
                             .retry_after_ms = 1000};
    for (uint32_t d = 0; d < n_workers; d++) {
        if (!workers[d].usable || workers[d].role != ROLE_DECODE)
            continue;
        if (request->force != FORCE_SPLIT)
            consider(&s, d, d);
        for (uint32_t p = 0; p < n_workers && request->force != FORCE_AGGREGATED; p++)
            if (workers[p].usable && workers[p].role == ROLE_PREFILL)
                consider(&s, p, d);
    }
    if (!s.found)
        return refuse(&s);
    return s.best;
}
