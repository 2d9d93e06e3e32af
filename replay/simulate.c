#include "replay/simulate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "replay/simulate_internal.h"
#include "sched/ring.h"

enum { TICK_MS = 20, PROBE_MS = 5 };

static uint32_t index_of(const struct sim *s, const struct sim_seq *q)
{
    return (uint32_t)(q - s->seqs);
}

/* ------------------------------------------------------------------- ends */

/* Sends the requests that follow q, or refuses them if q was not answered. */
static void step_over(struct sim *s, struct sim_seq *q, bool answered)
{
    for (struct sim_seq *next = q->next; next; next = next->sibling) {
        if (answered) {
            events_post(&s->events, s->now_ns + next->t->delay_ms * NS_PER_MS, EVENT_ARRIVAL, index_of(s, next), 0);
            continue;
        }
        next->out->refused = true;
        next->out->reason = "the request that it follows was not answered";
        next->out->refused_after_ms = NAN; /* the request was never sent */
        next->out->arrived_ms = next->out->end_ms = (double)s->now_ns * 1e-6;
        s->n_open--;
        step_over(s, next, false);
    }
}

void sim_request_ended(struct sim *s, struct sim_seq *q)
{
    struct simulated *o = q->out;
    double seen = s->c.length_error > 0 ? fmax(round(q->n_total * s->c.length_error), 1) : q->n_total;
    o->end_ms = (double)s->now_ns * 1e-6 + s->c.rpc_ms;
    o->end_ms = fmax(o->end_ms, (double)q->first_ns * 1e-6);
    o->n_output = q->n_generated;
    if (q->n_total > 1)
        o->tpot_ms = (o->end_ms - (double)q->first_ns * 1e-6) / (q->n_total - 1);
    for (int i = 0; i < 2; i++) /* if the first token was the last one, the decode leg is still there */
        if (q->legs[i].state != LEG_NONE)
            node_drop(s, i ? q->q.plan.decode : q->q.plan.prefill, q);
    scheduler_generated(&q->q, (uint32_t)seen);
    scheduler_end(scheduler_of(s, q), &q->q, s->now_ns, true);
    s->n_open--;
    step_over(s, q, true);
}

void sim_request_note_tokens(struct sim *s, struct sim_seq *q, uint32_t n, double first_ms, double each_ms)
{
    double from = (double)q->q.arrived_ns * 1e-6 - s->c.rpc_ms;
    for (uint32_t i = 0; q->out->token_ms && i < n; i++)
        q->out->token_ms[q->n_generated - (each_ms > 0 ? 0 : 1) + i] = (float)(first_ms + i * each_ms - from);
}

/* The client gets the first token when the decode worker has taken pages, too. */
static void show_first_token(struct sim *s, struct sim_seq *q, uint64_t at_ns)
{
    if (q->first_ns)
        return;
    q->first_ns = at_ns + ns_of(s->c.rpc_ms);
    q->out->ttft_ms = clock_ms_between(q->q.arrived_ns, q->first_ns);
    if (q->out->token_ms)
        q->out->token_ms[0] = (float)q->out->ttft_ms;
}

/* As live, only the first placement that computes the prompt counts: a later one also finds what the earlier
 * one left. */
static void tell_prefix(const struct sim *s, struct sim_seq *q)
{
    if (q->is_prefix_told)
        return;
    q->is_prefix_told = true;
    q->out->cached_tokens = q->own_tokens;
    q->out->peer_tokens = q->load_peer * s->c.block_tokens;
    q->out->dram_tokens = q->load_dram * s->c.block_tokens;
    q->out->ssd_tokens = q->load_ssd * s->c.block_tokens;
}

void sim_request_prefilled(struct sim *s, struct sim_seq *q)
{
    bool waits = q->q.plan.prefill != q->q.plan.decode && q->q.max_tokens != 1 && q->n_generated < q->n_total;
    q->prefilled_ns = s->now_ns;
    tell_prefix(s, q);
    if (!q->first_ns) {
        q->out->queue_ms = clock_ms_between(q->q.arrived_ns, q->admitted_ns);
        q->out->load_ms = clock_ms_between(q->admitted_ns, q->running_ns);
        q->out->prefill_ms = clock_ms_between(q->running_ns, s->now_ns);
    }
    scheduler_prefilled(scheduler_of(s, q), &q->q, s->now_ns);
    scheduler_generated(&q->q, q->n_generated - q->n_before);
    if (!waits || q->is_accepted)
        show_first_token(s, q, q->accepted_ns > s->now_ns ? q->accepted_ns : s->now_ns);
}

void sim_request_accepted(struct sim *s, struct sim_seq *q, uint64_t at_ns)
{
    q->is_accepted = true;
    q->accepted_ns = at_ns;
    if (q->prefilled_ns)
        show_first_token(s, q, at_ns);
    events_post(&s->events, at_ns, EVENT_ACCEPTED, index_of(s, q), q->placement);
}

/* ------------------------------------------------------- the router's part */

static void match_blocks(void *user, struct sched_request *q_)
{
    struct sim *s = user;
    struct sim_seq *q = q_->user;
    uint32_t on_disk;
    blocks_match(s, q->t, q_->matched_blocks);
    q_->store_blocks = stores_match(s, q->t, &on_disk) * s->block_pages;
    q_->store_blocks_ssd = on_disk * s->block_pages;
    for (uint32_t w = 0; s->c.peers && w < s->c.n_prefill; w++)
        if (q_->matched_blocks[w] > q_->store_blocks) {
            q_->store_blocks = q_->matched_blocks[w];
            q_->store_blocks_ssd = 0;
        }
}

static void start_legs(struct sim *s, struct sim_seq *q)
{
    bool split = q->q.plan.prefill != q->q.plan.decode;
    if (split && q->q.max_tokens == 1)
        scheduler_decoded(scheduler_of(s, q), &q->q);
    else if (split)
        node_leg(s, q->q.plan.decode, q);
    node_leg(s, q->q.plan.prefill, q);
}

static void placed(void *user, struct sched_request *q_)
{
    struct sim *s = user;
    struct sim_seq *q = q_->user;
    free(q_->matched_blocks);
    q_->matched_blocks = NULL;
    q->placement++;
    q->n_before = q->n_generated;
    q->admitted_ns = q->running_ns = q->prefilled_ns = q->accepted_ns = 0;
    q->is_accepted = q->is_closed = q->is_sent = q->was_preempted = false;
    q->unsent = q->coming = 0;
    q->flow = q->n_loads = q->load_end = 0;
    q->own_tokens = q->load_peer = q->load_dram = q->load_ssd = 0;
    q->out->prefill = q_->plan.prefill;
    q->out->decode = q_->plan.decode;
    events_post(&s->events, s->now_ns + ns_of(s->c.rpc_ms), EVENT_LEG, index_of(s, q), q->placement);
}

static void prepare(struct sim *s, struct sim_seq *q)
{
    q->q.matched_ns = 0;
    q->q.matched_blocks = mem_array(s->n_nodes, sizeof(uint32_t));
}

/* Asks whether the request would be admitted if it came now; asks again after PROBE_MS if not. */
static void probe(struct sim *s, struct sim_seq *q)
{
    struct sched_request asked = q->q;
    asked.arrived_ns = s->now_ns;
    asked.identity = asked.matched_ns = 0;
    asked.matched_blocks = mem_array(s->n_nodes, sizeof(uint32_t));
    q->out->admissible_ms += PROBE_MS;
    bool admitted = scheduler_would_admit(scheduler_of(s, q), &asked, s->now_ns);
    if (!admitted && (asked.plan.hopeless || !s->n_open))
        q->out->admissible_ms = 0;
    else if (!admitted)
        events_post(&s->events, s->now_ns + PROBE_MS * NS_PER_MS, EVENT_PROBE, index_of(s, q), 0);
    free(asked.matched_blocks);
}

static void was_refused(struct sim *s, struct sim_seq *q, double retry_after_ms)
{
    bool first = !q->out->came_back;
    s->n_open--;
    free(q->q.matched_blocks);
    q->q.matched_blocks = NULL;
    q->out->refused = true;
    q->out->reason = q->q.plan.reason;
    q->out->end_ms = (double)s->now_ns * 1e-6;
    if (first && retry_after_ms > 0 && random_unit(random_at(s->c.seed, 2ull << 40, q->q.number)) < s->c.probe_share)
        events_post(&s->events, s->now_ns + PROBE_MS * NS_PER_MS, EVENT_PROBE, index_of(s, q), 0);
    if (first) {
        q->out->retry_after_ms = retry_after_ms;
        q->out->refused_after_ms = (double)s->now_ns * 1e-6 - q->out->arrived_ms;
    }
    if (!first || retry_after_ms <= 0 ||
        random_unit(random_at(s->c.seed, 1ull << 40, q->q.number)) >= s->c.retry_share) {
        step_over(s, q, false);
        return;
    }
    q->out->came_back = true;
    s->n_open++;
    events_post(&s->events, s->now_ns + ns_of(retry_after_ms), EVENT_RETURN, index_of(s, q), 0);
}

/* Routers report to workers what they have queued, at most once every SIMULATE_REPORT_MS. */
static void expect_demand(struct sim *s, uint32_t r)
{
    struct sim_router *router = &s->routers[r];
    if (s->n_routers == 1 || router->tells || router->is_down)
        return;
    router->tells = true;
    events_post(&s->events, s->now_ns + ns_of(SIMULATE_REPORT_MS + s->c.rpc_ms), EVENT_DEMAND, r, 0);
}

static void tell_demand(struct sim *s, uint32_t r)
{
    struct sim_router *router = &s->routers[r];
    double queued_ms = router->is_down ? 0 : scheduler_queued_ms(router->scheduler), before = router->queued_ms;
    router->tells = false;
    router->queued_ms = queued_ms;
    if (fabs(queued_ms - before) > 0.05 * fmax(queued_ms, before))
        for (uint32_t w = 0; w < s->n_nodes; w++)
            node_report(s, w);
    if (queued_ms > 0)
        expect_demand(s, r);
}

static const char *missing_role(const struct sim *s)
{
    for (uint32_t w = 0; w < s->n_nodes; w++)
        if (s->nodes[w].is_known && s->nodes[w].role == ROLE_DECODE)
            return "no prefill worker is up";
    return "no decode worker is up";
}

/* Ends a request without an answer and without a time to come back, as UNAVAILABLE of the live router. */
static void fail(struct sim *s, struct sim_seq *q, const char *reason)
{
    scheduler_end(scheduler_of(s, q), &q->q, s->now_ns, false);
    free(q->q.matched_blocks);
    q->q.matched_blocks = NULL;
    q->out->refused = false;
    q->out->failed = true;
    q->out->reason = reason;
    /* A first token is not shown before the decode worker has accepted. */
    q->out->n_output = q->first_ns ? q->n_generated : 0;
    q->out->end_ms = (double)s->now_ns * 1e-6;
    s->n_open--;
    step_over(s, q, false);
}

static void refused(void *user, struct sched_request *q_, double retry_after_ms)
{
    struct sim *s = user;
    struct sim_seq *q = q_->user;
    s->result->n_late_refused++;
    if (q->first_ns) /* the client has tokens already, so the answer is cut short */
        fail(s, q, q_->plan.reason);
    else
        was_refused(s, q, retry_after_ms);
}

/* A random router of those that are up. */
static uint32_t choose_router(const struct sim *s, const struct sim_seq *q)
{
    uint32_t n_up = 0;
    for (uint32_t r = 0; r < s->n_routers; r++)
        n_up += !s->routers[r].is_down;
    uint32_t nth = (uint32_t)(random_at(s->c.seed, 3ull << 40, q->q.number) % n_up), r = 0;
    while (s->routers[r].is_down || nth--)
        r++;
    return r;
}

static void submit(struct sim *s, struct sim_seq *q)
{
    double retry_after_ms, workflow_ms = s->c.asks ? s->c.asks[index_of(s, q)].workflow_ms : 0;
    if (!q->out->came_back)
        q->out->arrived_ms = (double)s->now_ns * 1e-6;
    if (workflow_ms > 0)
        q->q.workflow_deadline_ns = ns_of(q->head->out->arrived_ms + workflow_ms);
    q->out->asked_ms = (double)s->now_ns * 1e-6;
    q->q.arrived_ns = s->now_ns;
    /* A request that comes back goes to the router that refused it. */
    if (!q->out->came_back || s->routers[q->router].is_down)
        q->out->router = q->router = choose_router(s, q);
    prepare(s, q);
    expect_demand(s, q->router);
    if (!scheduler_submit(scheduler_of(s, q), &q->q, s->now_ns, &retry_after_ms)) {
        q->out->predicted_ttft_ms = q->q.plan.ttft_ms;
        was_refused(s, q, retry_after_ms);
        return;
    }
    q->out->admitted_then = q->out->came_back;
    q->out->refused = false;
    q->out->reason = NULL;
    q->out->predicted_ttft_ms = q->q.promised_ttft_ms;
    q->out->predicted_tpot_ms = q->q.promised_tpot_ms;
    if (s->is_gone)
        fail(s, q, missing_role(s));
}

static void loaded(struct sim *s, struct sim_seq *q)
{
    struct sim_worker_node *n = &s->nodes[q->q.plan.prefill];
    double took = clock_ms_between(q->admitted_ns, s->now_ns);
    if (q->legs[0].state != LEG_FILLING || !n->is_up)
        return;
    const double x[] = {1, (double)(q->load_dram + q->load_peer) * s->block_pages,
                        (double)q->load_ssd * s->block_pages};
    n->loading = rls_observe(n->loading, x, took);
    for (uint32_t r = 0; r < s->n_routers; r++)
        scheduler_observe_loading(s->routers[r].scheduler, q->q.plan.prefill, n->loading.w[0], n->loading.w[1],
                                  n->loading.w[2]);
    node_filled(s, q, q->load_end);
}

/* ----------------------------------------------------------------- failures */

/* Ends all that the request has on workers. The new placement makes its late events void. */
static void leave_workers(struct sim *s, struct sim_seq *q)
{
    if (q->flow)
        net_cancel(s, q->flow - 1);
    q->flow = 0;
    stores_cancel(s, q);
    q->placement++;
    for (int i = 0; i < 2; i++)
        if (q->legs[i].state != LEG_NONE)
            node_drop(s, i ? q->q.plan.decode : q->q.plan.prefill, q);
}

/* Plans a request anew, with its prompt and the tokens so far, ahead of new requests. */
static void replan(struct sim *s, struct sim_seq *q, uint32_t dead)
{
    leave_workers(s, q);
    q->out->n_replans++;
    q->q.n_tokens = q->t->n_prompt + q->n_generated;
    q->q.max_tokens -= q->n_generated - q->n_before;
    q->q.resumed = q->n_generated > 0;
    scheduler_avoid(&q->q, dead);
    prepare(s, q);
    scheduler_requeue(scheduler_of(s, q), &q->q, s->now_ns);
}

/* Ends the requests of a dead router, and their legs. */
static void router_dies(struct sim *s, uint32_t r)
{
    for (uint64_t i = 0; i < s->n_seqs; i++) {
        struct sim_seq *q = &s->seqs[i];
        bool is_queued = q->q.state == SCHED_QUEUED,
             is_placed = q->q.state == SCHED_PREFILLING || q->q.state == SCHED_DECODING;
        if (q->router != r || !(is_queued || is_placed))
            continue;
        if (is_placed)
            leave_workers(s, q);
        fail(s, q, "its router was lost");
    }
    s->routers[r].is_down = true;
    tell_demand(s, r);
    for (uint32_t i = 0; i < s->n_nodes; i++)
        if (s->nodes[i].is_up)
            node_go_on(s, i);
}

/* Whether the routers know a worker of each role that requests need. */
static bool can_serve(const struct sim *s)
{
    bool has[2] = {false, s->c.force != FORCE_SPLIT};
    for (uint32_t w = 0; w < s->n_nodes; w++)
        has[s->nodes[w].role == ROLE_PREFILL] |= s->nodes[w].is_known;
    return has[0] && has[1];
}

/* No worker has come back in time: fails all queued requests, which the scheduler would keep until a worker
 * comes. */
static void fail_queued(struct sim *s)
{
    s->is_gone = true;
    for (uint64_t i = 0; i < s->n_seqs; i++)
        if (s->seqs[i].q.state == SCHED_QUEUED)
            fail(s, &s->seqs[i], missing_role(s));
}

static void expect_gone(struct sim *s)
{
    if (can_serve(s) || s->able_ns < UINT64_MAX)
        return;
    s->able_ns = s->now_ns;
    events_post(&s->events, s->now_ns + ns_of(s->c.gone_ms), EVENT_GONE, 0, s->able_ns);
}

static void worker_lost(struct sim *s, uint32_t w)
{
    for (uint64_t i = 0; i < s->n_seqs; i++) {
        struct sim_seq *q = &s->seqs[i];
        bool placed_on = q->q.state == SCHED_PREFILLING || q->q.state == SCHED_DECODING;
        bool prefills = q->q.plan.prefill == w && (q->legs[0].state != LEG_NONE || !q->prefilled_ns);
        if (placed_on && (prefills || q->q.plan.decode == w))
            replan(s, q, w);
    }
    pool_forget(s, &s->nodes[w]);
    s->nodes[w].waiting.n = s->nodes[w].filling.n = s->nodes[w].prompts.n = s->nodes[w].running.n =
        s->nodes[w].joined.n = 0;
    s->nodes[w].n_active = 0;
    for (uint32_t r = 0; r < s->n_routers; r++)
        scheduler_worker_down(s->routers[r].scheduler, w);
    s->nodes[w].is_known = s->nodes[w].reports_soon = false;
    if (s->is_gone)
        fail_queued(s);
    else
        expect_gone(s);
    for (uint32_t i = 0; i < s->n_nodes; i++)
        if (s->nodes[i].is_up)
            node_go_on(s, i);
}

static uint32_t pages_of_role(const struct simulate_config *c, enum worker_role role)
{
    return role == ROLE_DECODE && c->n_decode_pages ? c->n_decode_pages : c->n_pages;
}

static void worker_up(struct sim *s, uint32_t w)
{
    const struct simulate_config *c = &s->c;
    s->nodes[w].is_up = s->nodes[w].is_known = true;
    if (can_serve(s)) {
        s->is_gone = false;
        s->able_ns = UINT64_MAX;
    }
    const struct sched_worker_info info = {.role = s->nodes[w].role,
                                           .chunk_tokens = c->chunk_tokens,
                                           .max_batch = c->max_batch,
                                           .n_pages = pages_of_role(c, s->nodes[w].role),
                                           .max_context = c->max_context};
    for (uint32_t r = 0; r < s->n_routers; r++)
        scheduler_worker_up(s->routers[r].scheduler, w, &info);
}

/* --------------------------------------------------------------------- run */

static void open_nodes(struct sim *s)
{
    const struct simulate_config *c = &s->c;
    for (uint32_t i = 0; i < s->n_nodes; i++) {
        struct sim_worker_node *n = &s->nodes[i];
        n->role = i < c->n_prefill ? ROLE_PREFILL : ROLE_DECODE;
        n->cost = n->role == ROLE_DECODE && c->decode_cost ? *c->decode_cost : c->cost;
        n->model = cost_make(&s->believed);
        n->power = c->power[n->role == ROLE_DECODE];
        n->clock = 1;
        n->out = &s->result->workers[i];
        n->out->role = n->role;
        n->receives.bytes_per_ns = n->sends.bytes_per_ns = c->port_gb_s;
        /* As a live worker begins. */
        n->loading = rls_make(3, (const double[]){SCHEDULER_LOADING_PRIOR}, 0.1);
        pool_init(&n->pool, pages_of_role(c, n->role));
        n->reports = mem_array(s->n_routers, sizeof(*n->reports));
        worker_up(s, i);
    }
    expect_gone(s);
    for (uint32_t i = 0; i < c->n_router_faults; i++)
        events_post(&s->events, ns_of(c->router_faults[i].at_ms), EVENT_ROUTER_DIE, c->router_faults[i].router, 0);
    for (uint32_t i = 0; i < c->n_faults; i++) {
        events_post(&s->events, ns_of(c->faults[i].at_ms), EVENT_DIE, c->faults[i].worker, 0);
        events_post(&s->events, ns_of(c->faults[i].at_ms + c->silence_ms), EVENT_LOST, c->faults[i].worker, 0);
        if (c->faults[i].back_ms < INFINITY)
            events_post(&s->events, ns_of(fmax(c->faults[i].back_ms, c->faults[i].at_ms + c->silence_ms)), EVENT_BACK,
                        c->faults[i].worker, 0);
    }
}

static uint32_t max_tokens_of(const struct sim *s, const struct sim_seq *q)
{
    uint32_t room = s->c.max_context > q->t->n_prompt ? s->c.max_context - q->t->n_prompt : 0;
    if (!s->c.max_tokens)
        return q->n_total;
    return s->c.max_tokens < room ? s->c.max_tokens : room;
}

static void open_seq(struct sim *s, uint64_t i)
{
    const struct trace_request *t = &s->trace->requests[i];
    const struct simulate_ask *a = s->c.asks ? &s->c.asks[i] : NULL;
    struct sim_seq *q = &s->seqs[i];
    q->t = t;
    q->out = &s->result->requests[i];
    q->n_total = t->n_output ? t->n_output : 1;
    if (s->c.max_tokens && q->n_total > s->c.max_tokens)
        q->n_total = s->c.max_tokens;
    q->q = (struct sched_request){.user = q,
                                  .number = i,
                                  .identity = i + 1,
                                  .n_tokens = t->n_prompt,
                                  .max_tokens = max_tokens_of(s, q),
                                  .block_tokens = s->page_tokens,
                                  .ttft_ms = t->ttft_ms > 0 ? t->ttft_ms : s->c.ttft_ms,
                                  .tpot_ms = t->tpot_ms > 0 ? t->tpot_ms : s->c.tpot_ms,
                                  .priority = t->priority,
                                  .deadline_ns = UINT64_MAX,
                                  .workflow_deadline_ns = UINT64_MAX};
    if (s->c.keep_tokens)
        q->out->token_ms = s->result->tokens + s->n_tokens;
    s->n_tokens += q->n_total;
    q->head = q;
    if (s->trace->n_tenants && t->tenant)
        q->q.tenant = ring_id(s->trace->tenants[t->tenant], strlen(s->trace->tenants[t->tenant]));
    if (a) {
        q->q.tenant = a->tenant;
        q->q.workflow_steps_left = a->steps_left;
    }
    int64_t follows = a ? a->follows : (int64_t)t->follows - 1;
    if (follows >= 0) {
        q->sibling = s->seqs[follows].next;
        s->seqs[follows].next = q;
        q->head = s->seqs[follows].head;
    } else {
        events_post(&s->events, ns_of((double)t->arrival_ns * 1e-6 / s->c.rate), EVENT_ARRIVAL, (uint32_t)i, 0);
    }
}

static void open_seqs(struct sim *s)
{
    uint64_t n_tokens = 0;
    for (uint64_t i = 0; i < s->n_seqs && s->c.keep_tokens; i++)
        n_tokens += s->trace->requests[i].n_output ? s->trace->requests[i].n_output : 1;
    if (s->c.keep_tokens)
        s->result->tokens = mem_array(n_tokens, sizeof(float));
    for (uint64_t i = 0; i < s->n_seqs; i++)
        open_seq(s, i);
    s->n_open = s->n_seqs;
}

static void on_request_event(struct sim *s, const struct event *e, struct sim_seq *q)
{
    if (e->run && e->run != q->placement)
        return;
    switch (e->kind) {
    case EVENT_ARRIVAL:
    case EVENT_RETURN:
        node_show_progress(s);
        submit(s, q);
        break;
    case EVENT_PROBE:
        probe(s, q);
        break;
    case EVENT_LEG:
        start_legs(s, q);
        break;
    case EVENT_ANNOUNCE:
        node_announce(s, q);
        break;
    case EVENT_ACCEPTED:
        node_send(s, q);
        break;
    case EVENT_FILLED:
        loaded(s, q);
        break;
    default:
        if (s->nodes[q->q.plan.decode].is_up)
            node_join(s, q);
    }
}

static void on_event(struct sim *s, const struct event *e)
{
    struct sim_worker_node *n = &s->nodes[e->subject];
    switch (e->kind) {
    case EVENT_STEP_END:
        if (n->is_busy && n->run == e->run)
            node_step_ended(s, e->subject);
        break;
    case EVENT_FLOW_END:
        net_flow_ended(s, e->subject, e->run);
        break;
    case EVENT_TICK:
        s->ticks = false;
        break;
    case EVENT_REPORT:
        node_send_report(s, e->subject);
        break;
    case EVENT_REPORTED:
        node_reported(s, e->subject);
        break;
    case EVENT_DEMAND:
        tell_demand(s, e->subject);
        break;
    case EVENT_ROUTER_DIE:
        router_dies(s, e->subject);
        break;
    case EVENT_DIE:
        node_die(s, e->subject);
        break;
    case EVENT_LOST:
        worker_lost(s, e->subject);
        break;
    case EVENT_BACK:
        worker_up(s, e->subject);
        break;
    case EVENT_GONE:
        if (s->able_ns == e->run)
            fail_queued(s);
        break;
    default:
        on_request_event(s, e, &s->seqs[e->subject]);
    }
}

/* Runs all schedulers. True: some request is queued. */
static bool run_routers(struct sim *s)
{
    bool waits = false;
    for (uint32_t r = 0; r < s->n_routers; r++) {
        scheduler_run(s->routers[r].scheduler, s->now_ns);
        waits |= scheduler_queued(s->routers[r].scheduler) > 0;
    }
    return waits;
}

static void loop(struct sim *s)
{
    while (s->events.n) {
        struct event e = events_take(&s->events);
        s->now_ns = e.at_ns;
        /* Schedulers don't run for a sample, so a run far below its budget is the same as one without a
         * budget. */
        if (e.kind == EVENT_SAMPLE) {
            budget_sample(s);
            continue;
        }
        on_event(s, &e);
        if (run_routers(s) && !s->ticks) { /* queued requests are looked at again even if nothing happens */
            s->ticks = true;
            events_post(&s->events, s->now_ns + TICK_MS * NS_PER_MS, EVENT_TICK, 0, 0);
        }
    }
}

/* The coefficients from which schedulers and workers start. */
static struct cost_profile believed(const struct simulate_config *c)
{
    struct cost_profile p = c->cost;
    if (c->decode_cost)
        memcpy(p.decode, c->decode_cost->decode, sizeof(p.decode));
    for (int i = 0; i < 3; i++) {
        p.prefill[i] *= c->profile_error;
        p.decode[i] *= c->profile_error;
    }
    return p;
}

static struct scheduler *make_scheduler(struct sim *s, uint32_t r)
{
    const struct simulate_config *c = &s->c;
    struct scheduler_config sc = {.policy = c->policy,
                                  .order = c->order,
                                  .force = c->force,
                                  .prefix = c->prefix,
                                  .profile = s->believed,
                                  .weights = c->weights,
                                  .n_weights = c->n_weights,
                                  .seed = r ? random_mix(r) : 0,
                                  .max_wait_ns = c->max_wait_ms > 0 ? ns_of(c->max_wait_ms) : 120 * NS_PER_S,
                                  .max_queued_tokens = c->max_queued_tokens ? c->max_queued_tokens : UINT64_MAX / 2,
                                  .max_queued = c->max_queued ? c->max_queued : UINT32_MAX / 2,
                                  .user = s,
                                  .place = placed,
                                  .refuse = refused,
                                  .match = match_blocks};
    return scheduler_open(&sc);
}

/* ------------------------------------------------------------ load over time */

/* Merges pairs of ticks of all workers, until the ticks reach to_ms. */
static void stretch_load(struct sim *s, double to_ms)
{
    struct simulate_result *out = s->result;
    for (; to_ms >= SIMULATE_TICKS * out->load_tick_ms; out->load_tick_ms *= 2)
        for (uint32_t w = 0; w < out->n_workers; w++) {
            float *load = out->workers[w].load;
            for (uint32_t i = 0; i < SIMULATE_TICKS / 2; i++)
                load[i] = (load[2 * i] + load[2 * i + 1]) / 2;
            memset(load + SIMULATE_TICKS / 2, 0, SIMULATE_TICKS / 2 * sizeof(*load));
        }
}

void sim_note_load(struct sim *s, struct simulated_worker *w, double from_ms, double to_ms)
{
    if (!w->load)
        return;
    stretch_load(s, to_ms);
    double tick = s->result->load_tick_ms;
    for (uint32_t i = (uint32_t)(from_ms / tick); i <= (uint32_t)(to_ms / tick); i++)
        w->load[i] += (float)(fmax(fmin(to_ms, (i + 1) * tick) - fmax(from_ms, i * tick), 0) / tick);
}

static void open_load(struct sim *s)
{
    s->result->load_tick_ms = s->c.load_tick_ms;
    for (uint32_t w = 0; w < s->n_nodes && s->c.load_tick_ms > 0; w++)
        s->result->workers[w].load = mem_array(SIMULATE_TICKS, sizeof(float));
}

/* Ends the loads of all workers with the run. */
static void close_load(struct sim *s)
{
    struct simulate_result *out = s->result;
    if (!(s->c.load_tick_ms > 0))
        return;
    stretch_load(s, out->duration_ms);
    for (uint32_t w = 0; w < out->n_workers; w++)
        out->workers[w].n_load = (uint32_t)fmax(ceil(out->duration_ms / out->load_tick_ms), 1);
}

/* Sums that are known when all requests have ended. */
static void sum_up(struct sim *s)
{
    struct simulate_result *out = s->result;
    for (uint64_t i = 0; i < s->n_seqs; i++) {
        out->n_refused += out->requests[i].refused;
        out->n_failed += out->requests[i].failed;
        out->duration_ms = fmax(out->duration_ms, out->requests[i].end_ms);
    }
    for (uint32_t i = 0; i < s->n_nodes; i++) {
        struct sim_worker_node *n = &s->nodes[i];
        n->out->pages_free = n->pool.n_free;
        n->out->pages_cached = n->pool.n_idle;
        n->out->joules += n->power.idle * fmax(out->duration_ms - n->out->busy_ms, 0) * 1e-3;
        if (!simulate_power_known(&n->power))
            n->out->joules = NAN;
    }
    close_load(s);
    budget_close(s);
}

static void close_sim(struct sim *s)
{
    for (uint32_t i = 0; i < s->n_nodes; i++) {
        free(s->nodes[i].waiting.at);
        free(s->nodes[i].filling.at);
        free(s->nodes[i].reports);
        free(s->nodes[i].prompts.at);
        free(s->nodes[i].running.at);
        free(s->nodes[i].ended.at);
        free(s->nodes[i].joined.at);
        pool_fini(&s->nodes[i].pool);
    }
    for (uint64_t i = 0; i < s->n_seqs; i++) {
        free(s->seqs[i].q.matched_blocks);
        free(s->seqs[i].legs[0].twice);
        free(s->seqs[i].legs[1].twice);
    }
    stores_close(s);
    for (uint32_t r = 0; r < s->n_routers; r++)
        scheduler_close(s->routers[r].scheduler);
    free(s->routers);
    free(s->nodes);
    free(s->seqs);
    free(s->block_of);
    free(s->holders);
    free(s->events.heap);
    free(s->net.flows);
    free(s->items);
    free(s->rows);
}

void simulate_run(const struct trace *trace, const struct simulate_config *config, struct simulate_result *out)
{
    struct sim s = {.trace = trace, .c = *config, .result = out, .able_ns = UINT64_MAX};
    s.page_tokens = config->page_tokens ? config->page_tokens : config->block_tokens;
    s.block_pages = config->block_tokens / s.page_tokens;
    s.n_nodes = config->n_prefill + config->n_decode;
    s.n_words = (s.n_nodes + 63) / 64;
    s.n_seqs = config->n_requests && config->n_requests < trace->n_requests ? config->n_requests : trace->n_requests;
    *out = (struct simulate_result){.n_requests = s.n_seqs, .n_workers = s.n_nodes};
    out->requests = mem_array(s.n_seqs, sizeof(*out->requests));
    out->workers = mem_array(s.n_nodes, sizeof(*out->workers));
    s.nodes = mem_array(s.n_nodes, sizeof(*s.nodes));
    s.seqs = mem_array(s.n_seqs, sizeof(*s.seqs));
    s.believed = believed(config);
    s.n_routers = config->n_routers ? config->n_routers : 1;
    s.routers = mem_array(s.n_routers, sizeof(*s.routers));
    for (uint32_t r = 0; r < s.n_routers; r++)
        s.routers[r].scheduler = make_scheduler(&s, r);
    blocks_number(&s);
    stores_open(&s);
    open_load(&s);
    open_nodes(&s);
    open_seqs(&s);
    budget_open(&s);
    loop(&s);
    sum_up(&s);
    close_sim(&s);
}

void simulate_result_fini(struct simulate_result *r)
{
    for (uint32_t i = 0; i < r->n_workers; i++)
        free(r->workers[i].load);
    free(r->requests);
    free(r->workers);
    free(r->tokens);
    memset(r, 0, sizeof(*r));
}
