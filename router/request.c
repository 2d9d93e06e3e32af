/*
 * One request, from placement to its end: sends the legs, turns tokens into text, finds stop strings, and says how it went.
 *
 *     QUEUED --request_place--> PLACED --end, failure, client gone--> OVER (freed)
 *
 * Split: both legs go out at once under one transfer id. The first token (from the prefill worker) is shown as soon as the
 * decode worker has accepted, asked for long before. The text of a token is held back while it may begin a stop string, and
 * the token with it, so that the overshoot is neither shown nor counted.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "proto/wire/store_msg.h"
#include "router/router_internal.h"

enum { MAX_RUNS = 256 };
static const double HOT_AT = 8; /* requests within a minute or so from which on a segment deserves a second copy */

static double ms(uint64_t ns)
{
    return (double)ns * 1e-6;
}

static void finish_by_leg(struct request *q, bool length);

static void unlink_request(struct request *q)
{
    struct router *r = q->router;
    *(q->prev ? &q->prev->next : &r->requests) = q->next;
    *(q->next ? &q->next->prev : &r->last_request) = q->prev;
    if (q->state == REQUEST_QUEUED) {
        r->n_queued--;
        r->queued_tokens -= q->p.n_ids;
    } else if (q->state == REQUEST_PLACED) {
        struct request **at = &r->placed[q->counter % PLACED_BUCKETS];
        while (*at != q)
            at = &(*at)->next_placed;
        *at = q->next_placed;
        r->n_running--;
    }
    q->state = REQUEST_OVER;
    r->replan = true;
}

void request_free(struct request *q)
{
    token_stream_close(q->detok);
    params_free(&q->p);
    bytes_free(&q->text);
    free(q->keys);
    free(q->tokens);
    free(q->held);
    free(q->prompt_logprobs);
    rpc_call_unref(q->call);
    free(q);
}

/* ------------------------------------------------------------------- legs */

static Tandem__Worker__V1__TransferId transfer_id(const struct request *q)
{
    Tandem__Worker__V1__TransferId id = TANDEM__WORKER__V1__TRANSFER_ID__INIT;
    id.incarnation = q->router->incarnation;
    id.counter = q->counter;
    return id;
}

struct store_list { /* what a leg's message points to */
    Tandem__Worker__V1__Store stores[MAX_STORES], *store_list[MAX_STORES];
    Tandem__Worker__V1__StoreRun runs[MAX_RUNS], *run_list[MAX_RUNS];
    const struct peer *peers[MAX_STORES];
};

/* The store that goes on longest from block `first`; of equals one by chance, so that copies share the load. */
static uint32_t longest_run(const struct request *q, const struct store_list *l, size_t n_stores, uint32_t first,
                            uint32_t *store_out)
{
    uint32_t best = 0;
    uint64_t start = random_at(q->router->incarnation, q->counter, first) % n_stores;
    for (size_t i = 0; i < n_stores; i++) {
        uint32_t at = (uint32_t)((start + i) % n_stores);
        struct holder_set store = holder_set_of(l->peers[at]->holder);
        uint32_t n = index_match_segments(q->router->index, &store, q->keys, first, q->plan.store_blocks);
        if (n > best) {
            best = n;
            *store_out = at;
        }
    }
    return best;
}

static void list_runs(const struct request *q, struct store_list *l, Tandem__Worker__V1__Leg *leg)
{
    uint32_t store = 0, n;
    for (uint32_t first = 0; first < q->plan.store_blocks && leg->n_store_runs < MAX_RUNS && leg->n_stores;
         first += n) {
        if (!(n = longest_run(q, l, leg->n_stores, first, &store)))
            return;
        Tandem__Worker__V1__StoreRun *run = l->run_list[leg->n_store_runs] = &l->runs[leg->n_store_runs];
        tandem__worker__v1__store_run__init(run);
        run->store = store;
        run->first_block = first;
        run->n_blocks = n;
        leg->n_store_runs++;
    }
}

static void list_stores(const struct request *q, Tandem__Worker__V1__LegKind kind, struct store_list *l,
                        Tandem__Worker__V1__Leg *leg)
{
    const struct router *r = q->router;
    for (uint32_t i = 0; i < r->n_peers; i++) {
        const struct peer *p = r->peers[i];
        if (p->role != ROLE_STORE || p->state != PEER_READY || strcmp(p->kv_codec, q->kv_codec))
            continue; /* one that came since with another codec gets no blocks of this name */
        Tandem__Worker__V1__Store *s = l->store_list[leg->n_stores] = &l->stores[leg->n_stores];
        tandem__worker__v1__store__init(s);
        s->xfer_address = rpc_data(p->xfer_address);
        s->id = ring_id(p->name, strlen(p->name));
        l->peers[leg->n_stores++] = p;
    }
    leg->stores = l->store_list;
    leg->store_runs = l->run_list;
    if (kind == TANDEM__WORKER__V1__LEG_KIND__LEG_DECODE)
        return; /* the prompt's blocks are the other leg's */
    leg->hot_blocks = q->hot_blocks;
    list_runs(q, l, leg);
}

static void send_leg(struct request *q, struct peer *to, Tandem__Worker__V1__LegKind kind, const struct peer *other)
{
    Tandem__Worker__V1__Leg leg = TANDEM__WORKER__V1__LEG__INIT;
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__TransferId id = transfer_id(q);
    struct store_list stores;
    leg.id = &id;
    leg.kind = kind;
    leg.n_ids = q->p.n_ids;
    leg.ids = q->p.ids;
    leg.sampling = &q->p.sampling;
    leg.prefix_root = (ProtobufCBinaryData){BLOCK_KEY_BYTES, q->root.b};
    if (other) {
        leg.peer_xfer_address = rpc_data(other->xfer_address);
        leg.peer_incarnation = other->incarnation;
    }
    list_stores(q, kind, &stores, &leg);
    if (q->p.remaining_ms != INT64_MAX) {
        int64_t left = q->p.remaining_ms - (int64_t)ms(clock_now(&q->router->clock) - q->arrived_ns);
        leg.remaining_ms = left > 0 ? left : 1;
    }
    leg.tenant = store_tenant(q->p.tenant.data, q->p.tenant.len);
    leg.request_id = (ProtobufCBinaryData){q->p.label.len, (uint8_t *)q->p.label.data};
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_LEG;
    m.leg = &leg;
    peer_send(to, &m);
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

/* What was counted on a worker for this request is counted no longer. */
static void release_prefill(struct request *q)
{
    if (q->prefill) {
        q->prefill->queued_tokens -= q->queued_tokens;
        q->router->replan = true;
    }
    q->prefill = NULL;
}

static void release_decode(struct request *q)
{
    if (q->decode) {
        q->decode->reserved_pages -= q->reserved_pages;
        q->decode->running--;
        q->router->replan = true;
    }
    q->decode = NULL;
}

/* How many of its leading blocks are in segments that are asked for often. */
static uint32_t count_hot(struct request *q)
{
    uint32_t n = 0;
    for (uint32_t at = 0; at < q->n_keys; at += RING_SEGMENT_BLOCKS) {
        double count = hot_count(q->router->hot, &q->keys[at], q->placed_ns);
        if (count >= HOT_AT && n == at)
            n = at + RING_SEGMENT_BLOCKS < q->n_keys ? at + RING_SEGMENT_BLOCKS : q->n_keys;
    }
    return n;
}

void request_place(struct request *q, const struct plan *plan)
{
    struct router *r = q->router;
    struct peer *prefill = r->peers[plan->prefill], *decode = r->peers[plan->decode];
    q->plan = *plan;
    q->placed_ns = clock_now(&r->clock);
    r->n_queued--;
    r->queued_tokens -= q->p.n_ids;
    r->n_running++;
    q->state = REQUEST_PLACED;
    q->counter = ++r->next_counter;
    q->next_placed = r->placed[q->counter % PLACED_BUCKETS];
    r->placed[q->counter % PLACED_BUCKETS] = q;
    q->hot_blocks = count_hot(q);
    q->alone = plan->kind == PLAN_SPLIT && q->p.sampling.max_tokens <= 1; /* nothing would be left to decode */
    q->prefill = q->placed_prefill = prefill;
    q->decode = q->placed_decode = decode;
    memcpy(q->prefill_name, prefill->name, sizeof(q->prefill_name));
    memcpy(q->decode_name, decode->name, sizeof(q->decode_name));
    q->reserved_pages = policy_reservation(&q->ask);
    uint32_t known = index_match(r->index, prefill->holder, q->keys, q->n_keys) * q->ask.block_tokens;
    known = plan->store_blocks * q->ask.block_tokens > known ? plan->store_blocks * q->ask.block_tokens : known;
    q->queued_tokens = q->p.n_ids > known ? q->p.n_ids - known : 1;
    prefill->queued_tokens += q->queued_tokens;
    decode->reserved_pages += q->reserved_pages;
    decode->running++;
    metrics_inc(r->counters, plan->kind == PLAN_SPLIT ? ROUTER_SPLIT : ROUTER_AGGREGATED, 1);
    if (plan->kind == PLAN_AGGREGATED) {
        q->decode_accepted = true;
        send_leg(q, decode, TANDEM__WORKER__V1__LEG_KIND__LEG_AGGREGATED, NULL);
        return;
    }
    if (q->alone) {
        q->decode_accepted = true;
        send_leg(q, prefill, TANDEM__WORKER__V1__LEG_KIND__LEG_PREFILL, NULL);
        release_decode(q);
        return;
    }
    send_leg(q, decode, TANDEM__WORKER__V1__LEG_KIND__LEG_DECODE, prefill);
    send_leg(q, prefill, TANDEM__WORKER__V1__LEG_KIND__LEG_PREFILL, decode);
}

/* Both legs cancelled, off the lists, freed. The call was finished before, or is gone. */
static void drop(struct request *q)
{
    /* Also a prefill leg that is done: its pages may be waiting for a reader that never comes. */
    if (q->placed_prefill && q->placed_prefill->state == PEER_READY)
        cancel_leg(q, q->placed_prefill);
    if (q->decode && q->decode != q->placed_prefill)
        cancel_leg(q, q->decode);
    release_prefill(q);
    release_decode(q);
    unlink_request(q);
    request_free(q);
}

void request_fail(struct request *q, enum rpc_code code, const char *text, uint32_t retry_after_ms)
{
    log_debug(&q->router->log, "request failed req=%.*s code=%s text='%s'", (int)q->p.label.len,
              q->p.label.data ? q->p.label.data : "", rpc_code_name(code), text);
    metrics_inc(q->router->counters,
                code == RPC_RESOURCE_EXHAUSTED && q->state == REQUEST_QUEUED ? ROUTER_REFUSED : ROUTER_FAILED, 1);
    rpc_call_finish(q->call, code, text, retry_after_ms);
    drop(q);
}

void request_gone(struct request *q)
{
    metrics_inc(q->router->counters, ROUTER_CANCELLED, 1);
    drop(q);
}

void request_peer_lost(struct request *q, struct peer *peer)
{
    char text[160];
    bool prefill_lost = q->prefill == peer, decode_lost = q->decode == peer;
    if (!prefill_lost && !decode_lost)
        return;
    if (prefill_lost && !decode_lost && q->prefill_done) { /* its part was over, maybe its pages are here already */
        release_prefill(q);
        return;
    }
    if (prefill_lost && q->over) { /* all tokens are here, only its times are not */
        release_prefill(q);
        finish_by_leg(q, q->over_by_length);
        return;
    }
    snprintf(text, sizeof(text), "%s worker %s was lost", prefill_lost ? "prefill" : "decode", peer->name);
    request_fail(q, RPC_UNAVAILABLE, text, 0);
}

/* ---------------------------------------------------------------- answers */

static Tandem__V1__GenerateEnd end_message(void)
{
    return (Tandem__V1__GenerateEnd)TANDEM__V1__GENERATE_END__INIT;
}

/* Sends text [shown, upto) and the tokens that begin before upto. */
static enum td_status show(struct request *q, uint64_t upto, bool all_tokens, Tandem__V1__GenerateEnd *end)
{
    Tandem__V1__GenerateResponse m = TANDEM__V1__GENERATE_RESPONSE__INIT;
    uint32_t n = q->n_told;
    while (n < q->n_tokens && (all_tokens || q->tokens[n].text_start < upto || !q->p.n_stop))
        n++;
    uint32_t count = n - q->n_told;
    Tandem__V1__TokenEvent *events = mem_array(count, sizeof(*events)), **list = mem_array(count, sizeof(*list));
    for (uint32_t i = 0; i < count; i++) {
        tandem__v1__token_event__init(&events[i]);
        events[i].id = q->tokens[q->n_told + i].id;
        events[i].logprob = q->p.want_logprobs ? q->tokens[q->n_told + i].logprob : 0;
        list[i] = &events[i];
    }
    m.text = (ProtobufCBinaryData){upto - q->shown, (uint8_t *)q->text.data + q->shown};
    if (q->p.want_ids || q->p.want_logprobs) {
        m.n_tokens = count;
        m.tokens = list;
    }
    m.end = end;
    q->n_told = n;
    enum td_status s = TD_OK;
    if (m.text.len || m.n_tokens || end)
        s = rpc_call_send(q->call, &m.base);
    q->shown = upto;
    free(events);
    free(list);
    return s;
}

static double tpot_ms(const struct request *q)
{
    return q->n_told > 1 ? ms(q->last_token_ns - q->first_token_ns) / (q->n_told - 1) : 0;
}

static void fill_timing(const struct request *q, Tandem__V1__Timing *t)
{
    uint64_t now = clock_now(&q->router->clock);
    t->tokenize = ms(q->tokenized_ns - q->arrived_ns);
    t->queue = q->times_ms[PART_QUEUE] + ms(q->placed_ns - q->tokenized_ns);
    t->prefix_load = q->times_ms[PART_LOAD];
    t->prefill = q->times_ms[PART_PREFILL];
    t->transfer = q->times_ms[PART_TRANSFER];
    t->exposed_transfer = q->times_ms[PART_EXPOSED];
    t->decode_wait = q->times_ms[PART_WAIT];
    t->decode = q->times_ms[PART_DECODE];
    t->ttft = q->first_token_ns ? ms(q->first_token_ns - q->arrived_ns) : 0;
    t->tpot = tpot_ms(q);
    t->total = ms(now - q->arrived_ns);
    t->residual = t->total - (t->tokenize + t->queue + t->prefix_load + t->prefill + t->exposed_transfer +
                              t->decode_wait + t->decode);
}

static void observe(struct request *q)
{
    struct router *r = q->router;
    double ttft = ms(q->first_token_ns - q->arrived_ns);
    metrics_inc(r->counters, ROUTER_FINISHED, 1);
    if (!q->n_told)
        return;
    metrics_observe_ns(r->counters, ROUTER_TTFT, q->first_token_ns - q->arrived_ns);
    metrics_observe_ns(r->counters, ROUTER_TTFT_ERROR, (uint64_t)(fabs(ttft - q->plan.ttft_ms) * 1e6));
    if (q->n_told > 1)
        metrics_observe_ns(r->counters, ROUTER_TPOT, (uint64_t)(tpot_ms(q) * 1e6));
}

/* upto: bytes of the text that belong to the answer. */
static void finish(struct request *q, const char *reason, uint64_t upto, bool all_tokens)
{
    Tandem__V1__GenerateEnd end = end_message();
    Tandem__V1__Usage usage = TANDEM__V1__USAGE__INIT;
    Tandem__V1__CachedTokens cached = TANDEM__V1__CACHED_TOKENS__INIT;
    Tandem__V1__Timing timing = TANDEM__V1__TIMING__INIT;
    Tandem__V1__Placement placement = TANDEM__V1__PLACEMENT__INIT;
    Tandem__V1__Predicted predicted = TANDEM__V1__PREDICTED__INIT;
    show(q, upto, all_tokens, NULL);
    fill_timing(q, &timing);
    cached.worker = q->cached_worker;
    cached.peer = q->cached_peer;
    cached.dram = q->cached_dram;
    cached.ssd = q->cached_ssd;
    usage.prompt_tokens = q->p.n_ids;
    usage.completion_tokens = q->n_told;
    usage.cached_tokens = &cached;
    placement.prefill = rpc_data(q->prefill_name);
    placement.decode = rpc_data(q->decode_name);
    placement.plan = rpc_data(q->plan.kind == PLAN_SPLIT ? "split" : "aggregated");
    predicted.ttft_ms = q->plan.ttft_ms;
    predicted.tpot_ms = q->plan.tpot_ms;
    end.finish_reason = rpc_data(reason);
    end.usage = &usage;
    end.timing = &timing;
    end.seed = q->p.sampling.seed;
    end.placement = &placement;
    end.predicted = &predicted;
    end.prompt_logprobs = q->prompt_logprobs;
    end.n_prompt_logprobs = q->n_prompt_logprobs;
    if (q->cached_worker + q->cached_peer + q->cached_dram + q->cached_ssd)
        end.kv_codec = rpc_data(q->kv_codec);
    end.request_id = (ProtobufCBinaryData){q->p.label.len, (uint8_t *)q->p.label.data};
    show(q, q->shown, false, &end);
    metrics_inc(q->router->counters, ROUTER_TOKENS, q->n_told);
    observe(q);
    rpc_call_finish(q->call, RPC_OK, "", 0);
    drop(q);
}

/* ----------------------------------------------------------------- tokens */

/* Where the first stop string begins that ends at or after from; UINT64_MAX: nowhere. */
static uint64_t find_stop(const struct request *q, uint64_t from)
{
    uint64_t best = UINT64_MAX;
    for (uint32_t i = 0; i < q->p.n_stop; i++) {
        const struct bytes *stop = &q->p.stop[i];
        uint64_t start = from > stop->len ? from - stop->len : 0;
        const char *at = memmem(q->text.data + start, q->text.len - start, stop->data, stop->len);
        if (at && (uint64_t)(at - q->text.data) < best)
            best = (uint64_t)(at - q->text.data);
    }
    return best;
}

/* Bytes at the end that may begin a stop string. */
static uint64_t held_back(const struct request *q)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < q->p.n_stop; i++) {
        const struct bytes *stop = &q->p.stop[i];
        uint64_t n = stop->len - 1 < q->text.len ? stop->len - 1 : q->text.len;
        for (; n > most; n--)
            if (!memcmp(q->text.data + q->text.len - n, stop->data, n)) {
                most = n;
                break;
            }
    }
    return most;
}

static void keep_token(struct request *q, uint32_t id, float logprob)
{
    if (q->n_tokens == q->cap_tokens) {
        q->cap_tokens = q->cap_tokens ? q->cap_tokens * 2 : 32;
        q->tokens = mem_resize(q->tokens, q->cap_tokens, sizeof(*q->tokens));
    }
    q->tokens[q->n_tokens++] = (struct shown_token){id, logprob, q->text.len};
}

/* The prompt is computed: its worker may take the next one. */
static void prompt_computed(struct request *q)
{
    if (q->prefill)
        q->prefill->queued_tokens -= q->queued_tokens;
    q->queued_tokens = 0;
    q->router->replan = true;
}

/* Returns true when the request is over. */
static bool deliver(struct request *q, uint32_t id, float logprob)
{
    struct router *r = q->router;
    uint64_t before = q->text.len, now = clock_now(&r->clock);
    bool unread = rpc_call_queued_bytes(q->call) > 0; /* what was sent before this token */
    keep_token(q, id, logprob);
    token_stream_push(q->detok, id, &q->text);
    q->last_token_ns = now;
    if (!q->first_token_ns) {
        q->first_token_ns = now;
        prompt_computed(q);
    }
    uint64_t stop = q->n_tokens > q->p.sampling.min_tokens ? find_stop(q, before) : UINT64_MAX;
    if (stop != UINT64_MAX) {
        finish(q, "stop", stop > q->shown ? stop : q->shown, false);
        return true;
    }
    uint64_t upto = q->text.len - held_back(q);
    enum td_status s = show(q, upto > q->shown ? upto : q->shown, false, NULL);
    q->stalled_ns = !unread ? 0 : q->stalled_ns ? q->stalled_ns : now;
    if (s == TD_ERR_NO_SPACE || (unread && now - q->stalled_ns > (uint64_t)r->options.stall_ms * NS_PER_MS)) {
        rpc_call_abort(q->call, RPC_RESOURCE_EXHAUSTED, "the client does not read");
        metrics_inc(r->counters, ROUTER_FAILED, 1);
        drop(q);
        return true;
    }
    return false;
}

void request_token(struct request *q, struct peer *from, const Tandem__Worker__V1__Token *t)
{
    uint32_t next = q->n_tokens + q->n_held;
    if ((from != q->placed_prefill && from != q->placed_decode) || t->position < next)
        return; /* a stranger's, or the first token for the second time */
    if (t->token >= q->router->config.vocab_size || t->position > next) {
        request_fail(q, RPC_INTERNAL, "a worker sent a token outside the vocabulary, or left one out", 0);
        return;
    }
    if (q->decode_accepted) {
        deliver(q, t->token, t->logprob);
        return;
    }
    q->held = mem_resize(q->held, q->n_held + 1, sizeof(*q->held));
    q->held[q->n_held].id = t->token;
    q->held[q->n_held++].logprob = t->logprob;
}

/* Returns true when the request is over. */
static bool show_held(struct request *q)
{
    uint32_t n = q->n_held;
    q->decode_accepted = true;
    q->n_held = 0;
    for (uint32_t i = 0; i < n; i++)
        if (deliver(q, q->held[i].id, q->held[i].logprob))
            return true;
    return false;
}

void request_accepted(struct request *q)
{
    show_held(q);
}

/* ------------------------------------------------------------------- ends */

static void note_times(struct request *q, const Tandem__Worker__V1__LegEnd *end)
{
    const Tandem__Worker__V1__PhaseTimes *t = end->times;
    if (t) {
        q->times_ms[PART_LOAD] += ms(t->prefix_load);
        q->times_ms[PART_PREFILL] += ms(t->prefill);
        q->times_ms[PART_TRANSFER] += ms(t->transfer);
        q->times_ms[PART_EXPOSED] += ms(t->exposed_transfer);
        q->times_ms[PART_WAIT] += ms(t->decode_wait);
        q->times_ms[PART_DECODE] += ms(t->decode);
        if (t->prefill) /* the decode leg's queue runs beside the prefill */
            q->times_ms[PART_QUEUE] += ms(t->queue);
    }
    q->cached_worker += end->cached_worker;
    q->cached_peer += end->cached_peer;
    q->cached_dram += end->cached_dram;
    q->cached_ssd += end->cached_ssd;
    if (end->n_prompt_logprobs && !q->prompt_logprobs) {
        q->n_prompt_logprobs = end->n_prompt_logprobs;
        q->prompt_logprobs = mem_dup(end->prompt_logprobs, end->n_prompt_logprobs * sizeof(float));
    }
}

static void fail_by_status(struct request *q, const struct peer *from, const Tandem__Worker__V1__LegEnd *end)
{
    char text[384];
    enum rpc_code code = rpc_code_of_status(end->status);
    if (code == RPC_OK || code == RPC_UNKNOWN || code == RPC_CANCELLED)
        code = RPC_UNAVAILABLE; /* we did not cancel: drop() forgets requests that we do cancel */
    snprintf(text, sizeof(text), "worker %s: %.*s", from->name, (int)(end->text.len < 300 ? end->text.len : 300),
             end->text.data ? (const char *)end->text.data : "");
    request_fail(q, code, text, 0);
}

static void finish_by_leg(struct request *q, bool length)
{
    if (!q->decode_accepted && show_held(q)) /* the first token ended it: no decode worker is needed */
        return;
    token_stream_flush(q->detok, &q->text);
    uint64_t stop = find_stop(q, q->shown);
    if (stop != UINT64_MAX && stop >= q->shown)
        finish(q, "stop", stop, false);
    else
        finish(q, length ? "length" : "stop", q->text.len, true);
}

void request_leg_end(struct request *q, struct peer *from, const Tandem__Worker__V1__LegEnd *end)
{
    bool prefill_leg = from == q->prefill && q->plan.kind == PLAN_SPLIT && !q->prefill_done;
    if (from != q->prefill && from != q->decode)
        return;
    if (end->status) {
        if (prefill_leg)
            release_prefill(q); /* nothing to cancel there any more */
        else
            release_decode(q);
        fail_by_status(q, from, end);
        return;
    }
    bool length = end->finish_reason.len == 6; /* "length"; else "stop", or nothing */
    note_times(q, end);
    if (prefill_leg) {
        q->prefill_done = true;
        prompt_computed(q);
        if (end->finish_reason.len || q->over)
            finish_by_leg(q, q->over ? q->over_by_length : length);
        return;
    }
    release_decode(q);
    if (q->plan.kind == PLAN_SPLIT && !q->prefill_done) { /* its end, with the times, is on its way */
        q->over = true;
        q->over_by_length = length;
        return;
    }
    q->prefill_done = true;
    finish_by_leg(q, length);
}
