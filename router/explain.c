/*
 * The latest KEPT decisions, each with the CANDIDATES best candidates: a ring. Names are copied, since
 * workers come and go.
 *
 * Threads: the owner thread.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "router/router_internal.h"

enum { KEPT = 256, CANDIDATES = 16 };

struct weighed {
    char name[64];
    struct policy_candidate of;
};

struct decision {
    char label[ASK_MAX_LABEL_BYTES + 1], workflow[ASK_MAX_LABEL_BYTES + 1], prefill[64], decode[64];
    uint64_t at_ns;
    struct plan plan;
    double waited_ms, retry_after_ms;
    uint32_t n_prompt, n;
    struct weighed candidates[CANDIDATES];
};

struct explain {
    struct decision ring[KEPT];
    uint64_t n;
};

struct explain *explain_open(void)
{
    return mem_zalloc(sizeof(struct explain));
}

void explain_close(struct explain *x)
{
    free(x);
}

static double rank(const struct policy_candidate *c)
{
    return c->reason ? INFINITY : c->cost;
}

/* Inserts a candidate by cost; candidates that could not take the request come last. */
static void keep(struct decision *d, const struct router *r, const struct policy_candidate *c)
{
    uint32_t at = d->n;
    while (at && rank(&d->candidates[at - 1].of) > rank(c))
        at--;
    if (at == CANDIDATES)
        return;
    d->n += d->n < CANDIDATES;
    memmove(&d->candidates[at + 1], &d->candidates[at], (d->n - 1 - at) * sizeof(d->candidates[0]));
    d->candidates[at].of = *c;
    memcpy(d->candidates[at].name, r->peers[c->worker]->name, sizeof(d->candidates[at].name));
}

void explain_note(struct request *q, const struct plan *plan, double retry_after_ms)
{
    struct router *r = q->router;
    struct decision *d = &r->explain->ring[r->explain->n++ % KEPT];
    uint32_t n;
    const struct policy_candidate *c = scheduler_candidates(r->scheduler, &n);
    *d = (struct decision){.at_ns = clock_now(&r->clock),
                           .plan = *plan,
                           .retry_after_ms = retry_after_ms,
                           .n_prompt = q->p.sampling.n_prompt};
    d->waited_ms = answer_ms(d->at_ns - q->arrived_ns);
    if (q->p.label.len)
        memcpy(d->label, q->p.label.data, q->p.label.len);
    if (q->p.workflow.len)
        memcpy(d->workflow, q->p.workflow.data, q->p.workflow.len);
    if (plan->kind != PLAN_REFUSE) {
        memcpy(d->prefill, r->peers[plan->prefill]->name, sizeof(d->prefill));
        memcpy(d->decode, r->peers[plan->decode]->name, sizeof(d->decode));
    }
    for (uint32_t i = 0; i < n; i++)
        keep(d, r, &c[i]);
}

/* ----------------------------------------------------------------- answer */

struct told { /* a decision as a message, with the memory that the message points to */
    Tandem__Admin__V1__Decision m;
    Tandem__Admin__V1__Candidate candidates[CANDIDATES], *list[CANDIDATES];
};

static void tell_candidate(const struct weighed *w, Tandem__Admin__V1__Candidate *m)
{
    tandem__admin__v1__candidate__init(m);
    m->worker = rpc_data(w->name);
    m->prefill = w->of.as_prefill;
    m->decode = w->of.as_decode;
    m->matched_blocks = w->of.matched_blocks;
    m->store_blocks = w->of.peer_from;
    m->peer_blocks = w->of.loaded_blocks > w->of.peer_from ? w->of.loaded_blocks : 0;
    m->wait_ms = w->of.wait_ms;
    m->load_ms = w->of.load_ms;
    m->prefill_ms = w->of.prefill_ms;
    m->transfer_ms = w->of.transfer_ms;
    m->ttft_ms = w->of.ttft_ms;
    m->tpot_ms = w->of.tpot_ms;
    m->cost = w->of.cost;
    m->reason = rpc_data(w->of.reason ? w->of.reason : "");
}

static void tell_decision(const struct decision *d, uint64_t now, struct told *t)
{
    tandem__admin__v1__decision__init(&t->m);
    t->m.request_id = rpc_data(d->label);
    t->m.workflow_id = rpc_data(d->workflow);
    t->m.age_ms = answer_ms(now - d->at_ns);
    t->m.verdict = rpc_data(plan_name(d->plan.kind));
    t->m.reason = rpc_data(d->plan.reason ? d->plan.reason : "");
    t->m.prefill = rpc_data(d->prefill);
    t->m.decode = rpc_data(d->decode);
    t->m.waited_ms = d->waited_ms;
    t->m.ttft_ms = d->plan.ttft_ms;
    t->m.tpot_ms = d->plan.tpot_ms;
    t->m.retry_after_ms = d->retry_after_ms;
    t->m.prompt_tokens = d->n_prompt;
    t->m.n_candidates = d->n;
    t->m.candidates = t->list;
    for (uint32_t i = 0; i < d->n; i++) {
        tell_candidate(&d->candidates[i], &t->candidates[i]);
        t->list[i] = &t->candidates[i];
    }
}

void explain_answer(struct router *r, struct rpc_call *call, const char *label, uint32_t last)
{
    const struct explain *x = r->explain;
    Tandem__Admin__V1__ExplainResponse answer = TANDEM__ADMIN__V1__EXPLAIN_RESPONSE__INIT;
    uint64_t now = clock_now(&r->clock), n = x->n < KEPT ? x->n : KEPT;
    struct told *told = mem_array(KEPT, sizeof(*told));
    Tandem__Admin__V1__Decision *list[KEPT];
    answer.decisions = list;
    for (uint64_t i = 1; i <= n && (!last || answer.n_decisions < last); i++) {
        const struct decision *d = &x->ring[(x->n - i) % KEPT];
        if (*label && strcmp(d->label, label))
            continue;
        tell_decision(d, now, &told[answer.n_decisions]);
        list[answer.n_decisions] = &told[answer.n_decisions].m;
        answer.n_decisions++;
    }
    const struct td_error none = {{0}};
    router_answer_simple(call, &answer.base, TD_OK, &none);
    free(told);
}
