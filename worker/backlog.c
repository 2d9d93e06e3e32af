#include "worker/backlog.h"

#include <math.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/mem.h"
#include "worker/worker_internal.h"

void backlog_attach(struct backlog *b, struct link *link)
{
    b->routers = MEM_ROOM(b->routers, b->n_routers, b->cap, 4);
    b->routers[b->n_routers++] = (struct backlog_router){.link = link};
    b->changed = true;
}

void backlog_leave(struct backlog *b, const struct link *link)
{
    for (uint32_t i = 0; i < b->n_routers; i++)
        if (b->routers[i].link == link) {
            b->routers[i] = b->routers[--b->n_routers];
            b->changed = true;
            return;
        }
}

void backlog_demand(struct backlog *b, const struct link *link, double queued_ms)
{
    for (uint32_t i = 0; i < b->n_routers; i++)
        if (b->routers[i].link == link)
            b->routers[i].queued_ms = isfinite(queued_ms) ? fmax(queued_ms, 0) : 0;
    b->changed = true;
}

void backlog_free(struct backlog *b)
{
    free(b->routers);
    *b = (struct backlog){0};
}

/* ------------------------------------------------------------------ reports */

/* Adds one prompt to a report: to the router's own sums, or to those of all other routers. */
static void add_prompt(Tandem__Worker__V1__Backlog *m, double to_compute, double cached, bool is_own)
{
    if (is_own) {
        m->own_prompts++;
        m->own_tokens += to_compute;
        return;
    }
    m->prompts++;
    m->tokens += to_compute;
    m->square += to_compute * (to_compute + 2 * cached);
}

/*
 * Adds a leg to the report of one router. A prompt that waits for its pages counts as its router expects it,
 * because how much of it is cached is known only when it has pages.
 */
static void add_leg(Tandem__Worker__V1__Backlog *m, const struct leg *leg, bool is_own)
{
    uint32_t n_tokens, computed = engine_seq_computed(leg->seq);
    bool prefills = leg->kind->computes_prompt && computed < leg->n_ids, decodes = leg->kind->generates;
    /* Older routers send n_new = 0. */
    bool waits = engine_seq_state(leg->seq) != SEQ_RUNNING && leg->n_new && leg->n_new <= leg->n_ids;
    double to_compute = waits ? leg->n_new : (double)leg->n_ids - computed;
    engine_seq_tokens(leg->seq, &n_tokens);
    if (leg->ended)
        return;
    if (prefills)
        add_prompt(m, to_compute, leg->n_ids - to_compute, is_own);
    if (!decodes || is_own)
        return;
    m->running++;
    m->context += n_tokens;
    m->generated += n_tokens - leg->n_prompt;
    m->tpot_ms = leg->tpot_ms > 0 && (!(m->tpot_ms > 0) || leg->tpot_ms < m->tpot_ms) ? leg->tpot_ms : m->tpot_ms;
}

/* Whether that router has a leg here. */
static bool has_legs(const struct worker *w, const struct link *link)
{
    const struct leg *l;
    LIST_FOREACH (l, &w->legs, in_worker)
        if (l->link == link)
            return true;
    return false;
}

/* Sends one router its report. */
static void tell_backlog(struct worker *w, const struct backlog_router *to)
{
    const struct backlog *b = &w->backlog;
    Tandem__Worker__V1__WorkerMessage m = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
    Tandem__Worker__V1__Backlog report = TANDEM__WORKER__V1__BACKLOG__INIT;
    const struct leg *l;
    report.attached = b->n_routers;
    LIST_FOREACH (l, &w->legs, in_worker)
        add_leg(&report, l, l->link == to->link);
    for (uint32_t i = 0; i < b->n_routers; i++) {
        const struct backlog_router *other = &b->routers[i];
        if (other == to || !(other->queued_ms > 0 || has_legs(w, other->link)))
            continue;
        report.routers++;
        report.queued_ms += other->queued_ms;
    }
    m.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_BACKLOG;
    m.backlog = &report;
    link_send(to->link, &m);
}

uint32_t backlog_tell(struct worker *w, uint64_t now, uint32_t most_ms)
{
    struct backlog *b = &w->backlog;
    double since = clock_ms_between(b->told_ns, now);
    if (b->n_routers < 2 && !b->is_told) {
        b->changed = false;
        return most_ms;
    }
    if (!b->changed && !(!LIST_EMPTY(&w->legs) && since >= BACKLOG_MOST_MS))
        return most_ms;
    if (since < BACKLOG_LEAST_MS)
        return BACKLOG_LEAST_MS < most_ms ? BACKLOG_LEAST_MS : most_ms;
    for (uint32_t i = 0; i < b->n_routers; i++)
        tell_backlog(w, &b->routers[i]);
    b->is_told = b->n_routers > 1;
    b->changed = false;
    b->told_ns = now;
    return most_ms;
}
