/*
 * Dispatch: messages to workers about a request's legs, and what the scheduler counts on workers for it.
 *
 * A leg carries all that a worker needs: the ids (prompt and tokens generated before), the end of the
 * original prompt, the sampling, the worker of the other leg, the stores. It is not acknowledged by a message
 * of its own: the number of its message is kept until the worker's heartbeat names a number that is at least
 * that (replan.c). Heartbeats also list the legs that a worker has; a leg that was received and is not listed
 * was forgotten.
 *
 * Room on a worker is given back at once when a leg ends (dispatch_decoded(), dispatch_prompt_computed()), so
 * the scheduler never counts work that is over. None of these functions frees the request.
 */
#include <string.h>

#include "base/random.h"
#include "proto/wire/store_msg.h"
#include "router/router_internal.h"

enum { MAX_RUNS = 256, MAX_HOLDERS = 1 }; /* of one leg: runs of blocks to load; other workers to load from */

static Tandem__Worker__V1__TransferId transfer_id(const struct request *q)
{
    Tandem__Worker__V1__TransferId id = TANDEM__WORKER__V1__TRANSFER_ID__INIT;
    id.incarnation = q->router->incarnation;
    id.counter = q->counter;
    return id;
}

/* Memory for what a leg's message points to; it must live until the message is sent. */
struct store_list {
    Tandem__Worker__V1__Store stores[MAX_STORES], *store_list[MAX_STORES];
    Tandem__Worker__V1__StoreRun runs[MAX_RUNS], *run_list[MAX_RUNS];
    const struct peer *peers[MAX_STORES];
    ProtobufCBinaryData holders[MAX_HOLDERS];
};

/*
 * Adds a run of n blocks from `first` on. source: index of the store, or the number of stores for the holder.
 */
static void add_run(struct store_list *l, Tandem__Worker__V1__Leg *leg, uint32_t source, uint32_t first, uint32_t n)
{
    Tandem__Worker__V1__StoreRun *run = l->run_list[leg->n_store_runs] = &l->runs[leg->n_store_runs];
    tandem__worker__v1__store_run__init(run);
    run->store = source;
    run->first_block = first;
    run->n_blocks = n;
    leg->n_store_runs++;
}

/*
 * The store with the longest run of blocks in [first, end) that begins at `first`; returns its length, 0 if
 * no store has that block. Stores with equal runs are chosen at random, so that copies share the load.
 */
static uint32_t longest_run(const struct request *q, const struct store_list *l, size_t n_stores, uint32_t first,
                            uint32_t end, uint32_t *store_out)
{
    uint32_t best = 0;
    uint64_t start = random_at(q->router->incarnation, q->counter, first) % n_stores;
    for (size_t i = 0; i < n_stores; i++) {
        uint32_t at = (uint32_t)((start + i) % n_stores);
        struct holder_set store = holder_set_of(l->peers[at]->holder);
        uint32_t n = index_match_segments(q->router->index, &store, q->keys, first, end);
        if (n > best) {
            best = n;
            *store_out = at;
        }
    }
    return best;
}

/*
 * The worker that has the longest prefix (*n_out blocks) and that `to` can read; equals are chosen at random.
 * NULL: none has more than `first` blocks.
 */
static const struct peer *longest_holder(const struct request *q, const struct peer *to, uint32_t first,
                                         uint32_t *n_out)
{
    const struct router *r = q->router;
    const struct peer *best = NULL;
    uint64_t start = random_at(r->incarnation, q->counter, first) % r->n_peers;
    *n_out = first;
    for (uint32_t i = 0; i < r->n_peers; i++) {
        const struct peer *p = r->peers[(start + i) % r->n_peers];
        if (p == to || !peer_lends(p) || !scheduler_can_read(r->scheduler, to->holder, p->holder))
            continue;
        uint32_t n = index_match(r->index, p->holder, q->keys, q->plan.loaded_blocks);
        if (n > *n_out) {
            *n_out = n;
            best = p;
        }
    }
    return best;
}

/*
 * Lists the blocks to load: from stores up to plan.peer_from, then from one other worker. The index may have
 * changed since the plan was made: the list then ends early, and the worker computes the rest.
 */
static void list_runs(const struct request *q, const struct peer *to, struct store_list *l,
                      Tandem__Worker__V1__Leg *leg)
{
    uint32_t store = 0, n = 0, first = 0, end;
    const struct peer *holder = NULL;
    for (; first < q->plan.peer_from && leg->n_store_runs < MAX_RUNS - 1 && leg->n_stores; first += n) {
        if (!(n = longest_run(q, l, leg->n_stores, first, q->plan.peer_from, &store)))
            return;
        add_run(l, leg, store, first, n);
    }
    if (first >= q->plan.peer_from && first < q->plan.loaded_blocks)
        holder = longest_holder(q, to, first, &end);
    if (!holder)
        return;
    leg->holders = l->holders;
    l->holders[leg->n_holders++] = rpc_data(holder->xfer_address);
    add_run(l, leg, (uint32_t)leg->n_stores, first, end - first);
}

/* Names the stores, for reading and for offering blocks; for a leg that prefills also the blocks to load. */
static void list_stores(const struct request *q, const struct peer *to, Tandem__Worker__V1__LegKind kind,
                        struct store_list *l, Tandem__Worker__V1__Leg *leg)
{
    const struct router *r = q->router;
    for (uint32_t i = 0; i < r->n_peers && !q->p.bypass_cache; i++) {
        const struct peer *p = r->peers[i];
        if (p->role != ROLE_STORE || p->state != PEER_READY || p->draining || strcmp(p->kv_codec, q->kv_codec))
            continue; /* a store that came since then with another codec has no blocks under these names */
        if (!scheduler_can_read(r->scheduler, to->holder, p->holder))
            continue; /* the worker can't connect to it */
        Tandem__Worker__V1__Store *s = l->store_list[leg->n_stores] = &l->stores[leg->n_stores];
        tandem__worker__v1__store__init(s);
        s->xfer_address = rpc_data(p->xfer_address);
        s->id = ring_id(p->name, strlen(p->name));
        l->peers[leg->n_stores++] = p;
    }
    leg->stores = l->store_list;
    leg->store_runs = l->run_list;
    if (kind == TANDEM__WORKER__V1__LEG_KIND__LEG_DECODE)
        return; /* the prefill leg loads the prompt's blocks */
    leg->hot_blocks = q->hot_blocks;
    list_runs(q, to, l, leg);
}

/*
 * The request's sampling, without what the router has already: scores of the prompt; with q->scores, tokens.
 */
static Tandem__Worker__V1__SamplingParams sampling_of(const struct request *q)
{
    Tandem__Worker__V1__SamplingParams s = q->p.sampling;
    s.prompt_logprobs = replan_wants_scores(q);
    if (q->scores)
        s.max_tokens = s.min_tokens = 0;
    return s;
}

/*
 * Sends one leg; other: the worker of the other leg, NULL: there is none. Returns the number of the message.
 */
static uint32_t send_leg(struct request *q, struct peer *to, Tandem__Worker__V1__LegKind kind, const struct peer *other)
{
    Tandem__Worker__V1__Leg leg = TANDEM__WORKER__V1__LEG__INIT;
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__TransferId id = transfer_id(q);
    Tandem__Worker__V1__SamplingParams sampling = sampling_of(q);
    struct store_list stores;
    leg.id = &id;
    leg.kind = kind;
    leg.n_ids = q->scores ? sampling.n_prompt : q->p.n_ids;
    leg.ids = q->p.ids;
    leg.sampling = &sampling;
    leg.prefix_root = (ProtobufCBinaryData){BLOCK_KEY_BYTES, q->root.b};
    if (other) {
        leg.peer_xfer_address = rpc_data(other->xfer_address);
        leg.peer_incarnation = other->incarnation;
    }
    list_stores(q, to, kind, &stores, &leg);
    if (q->p.remaining_ms != INT64_MAX) {
        int64_t left = q->p.remaining_ms - (int64_t)answer_ms(clock_now(&q->router->clock) - q->arrived_ns);
        leg.remaining_ms = left > 0 ? left : 1;
    }
    leg.new_tokens = q->plan.new_tokens;
    leg.queued_ms = to->is_shared ? scheduler_queued_ms(q->router->scheduler) : 0;
    if (leg.queued_ms > 0)
        to->told_ms = leg.queued_ms;
    leg.tpot_ms = q->sched.resumed ? 0 : q->sched.tpot_ms;
    leg.lora = (ProtobufCBinaryData){q->p.lora.len, (uint8_t *)q->p.lora.data};
    leg.tenant = store_tenant(q->p.tenant.data, q->p.tenant.len);
    leg.traceparent = rpc_data(q->p.trace);
    leg.grammar = (ProtobufCBinaryData){q->p.grammar.len, (uint8_t *)q->p.grammar.data};
    leg.grammar_kind = q->p.grammar_kind;
    leg.request_id = (ProtobufCBinaryData){q->p.label.len, (uint8_t *)q->p.label.data};
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_LEG;
    m.leg = &leg;
    peer_send(to, &m);
    return to->n_said;
}

/* The decode leg goes first, so that its reservation is under way before the prefill begins. */
void dispatch_send(struct request *q)
{
    struct peer *prefill = q->prefill, *decode = q->decode;
    q->prefill_leg = q->decode_leg = 0;
    if (plan_is_whole(q->plan.kind)) {
        q->decode_leg = q->decode_said = send_leg(q, decode, TANDEM__WORKER__V1__LEG_KIND__LEG_AGGREGATED, NULL);
        return;
    }
    if (q->alone)
        dispatch_decoded(q);
    else
        q->decode_leg = q->decode_said = send_leg(q, decode, TANDEM__WORKER__V1__LEG_KIND__LEG_DECODE, prefill);
    q->prefill_leg = q->prefill_said =
        send_leg(q, prefill, TANDEM__WORKER__V1__LEG_KIND__LEG_PREFILL, q->alone ? NULL : decode);
}

static void cancel_leg(struct request *q, struct peer *to)
{
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__Cancel cancel = TANDEM__WORKER__V1__CANCEL__INIT;
    Tandem__Worker__V1__TransferId id = transfer_id(q);
    cancel.id = &id;
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_CANCEL;
    m.cancel = &cancel;
    peer_send(to, &m);
}

void dispatch_cancel(struct request *q)
{
    /* Cancel a prefill leg that has ended, too: its pages may still wait for a reader that never comes. */
    if (q->placed_prefill && q->placed_prefill->state == PEER_READY)
        cancel_leg(q, q->placed_prefill);
    if (q->decode && q->decode != q->placed_prefill && q->decode->state == PEER_READY)
        cancel_leg(q, q->decode);
    dispatch_release_prefill(q);
    dispatch_release_decode(q);
}

/* Worker p has nothing more to do with q. If q was the probe of p's breaker, another request may probe. */
static void release_worker(struct request *q, struct peer *p)
{
    if (p->probe == q->counter) { /* the probe gave neither success nor failure */
        p->probe = 0;
        breaker_try(&p->breaker, clock_now(&q->router->clock));
    }
}

void dispatch_release_prefill(struct request *q)
{
    if (q->prefill)
        release_worker(q, q->prefill);
    q->prefill = NULL;
    q->prefill_said = q->prefill_leg = 0;
}

void dispatch_release_decode(struct request *q)
{
    if (q->decode)
        release_worker(q, q->decode);
    q->decode = NULL;
    q->decode_said = q->decode_leg = 0;
}

void dispatch_prompt_computed(struct request *q)
{
    scheduler_prefilled(q->router->scheduler, &q->sched, clock_now(&q->router->clock));
}

void dispatch_moved(struct request *q, double exposed_ms)
{
    scheduler_moved(q->router->scheduler, &q->sched, exposed_ms);
}

void dispatch_decoded(struct request *q)
{
    dispatch_release_decode(q);
    scheduler_decoded(q->router->scheduler, &q->sched);
}
