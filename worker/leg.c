/*
 * What all legs have in common; leg.h has the kinds.
 *
 * What must hold:
 *   - Engine callbacks (leg_on_...) never free a leg, because engine_step() still walks its sequences. An end
 *     is only noted there; leg_flush() frees the leg after the step.
 *   - link_leg_ended() comes after the LegEnd was queued (link.h): leg_free() calls it, so every end is sent
 *     before.
 *   - Holds for the wire are taken while the sequence still holds the page: announcing, offering to stores
 *     and opening a pull all come before engine_seq_close().
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "worker/worker_internal.h"

enum { MAX_ADDRESS = 128 };

static bool same_id(struct xfer_id a, struct xfer_id b)
{
    return a.incarnation == b.incarnation && a.counter == b.counter;
}

Tandem__Worker__V1__TransferId leg_message_id(struct xfer_id id)
{
    Tandem__Worker__V1__TransferId m = TANDEM__WORKER__V1__TRANSFER_ID__INIT;
    m.incarnation = id.incarnation;
    m.counter = id.counter;
    return m;
}

/* ------------------------------------------------------------------- ends */

static const char *finish_name(enum seq_finish f)
{
    return f == FINISH_STOP ? "stop" : f == FINISH_LENGTH ? "length" : "";
}

static void send_end(struct link *link, struct xfer_id id, enum td_status status, const char *text,
                     Tandem__Worker__V1__LegEnd *end)
{
    Tandem__Worker__V1__WorkerMessage m = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
    Tandem__Worker__V1__TransferId mid = leg_message_id(id);
    end->id = &mid;
    end->status = status;
    end->text = rpc_data(text);
    m.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_END;
    m.end = end;
    link_send(link, &m);
}

/* Fills a LegEnd. Its arrays are borrowed from the sequence: send the message before leg_free(). */
static void fill_end(const struct leg *leg, Tandem__Worker__V1__LegEnd *end, Tandem__Worker__V1__PhaseTimes *times)
{
    struct seq_times t = engine_seq_times(leg->seq);
    const struct prompt_scores *scores = engine_seq_prompt_scores(leg->seq);
    times->queue = t.queue;
    times->prefix_load = leg->kind->computes_prompt ? t.fill : 0;
    times->prefill = leg->kind->computes_prompt ? t.prefill : 0;
    times->transfer = leg->transfer_ns;
    times->exposed_transfer = leg->exposed_ns;
    times->decode_wait = t.decode_wait;
    times->decode = t.decode;
    end->times = times;
    end->cached_worker = leg->cached_worker;
    end->cached_peer = leg->cached_peer;
    end->cached_dram = leg->cached_dram;
    end->cached_ssd = leg->cached_ssd;
    end->finish_reason = rpc_data(finish_name(leg->finish));
    if (!scores)
        return;
    end->prompt_logprobs = scores->logprobs;
    end->prompt_ranks = scores->ranks;
    end->n_prompt_logprobs = end->n_prompt_ranks = scores->n;
    end->prompt_top_ids = scores->top_ids;
    end->prompt_top_logprobs = scores->top_logprobs;
    end->n_prompt_top_ids = end->n_prompt_top_logprobs = (size_t)(scores->n - 1) * scores->n_top;
}

/* Frees the leg and its sequence. A pull or lease that has not ended stays in its list until it ends. */
static void leg_free(struct worker *w, struct leg *leg)
{
    for (uint32_t i = 0; i < w->n_out; i++) /* tokens of a cancelled leg that were not sent yet */
        if (w->out[i].leg == leg)
            w->out[i].leg = NULL;
    if (leg->pull)
        leg->pull->leg = NULL;
    prefix_drop(w, leg);
    engine_seq_close(w->engine, leg->seq);
    LIST_REMOVE(leg, in_worker);
    w->backlog.changed = true;
    link_leg_ended(leg->link, leg->id.counter);
    link_unref(leg->link);
    for (uint32_t i = 0; i < leg->n_stores; i++)
        free(leg->stores[i].address);
    for (uint32_t i = 0; i < leg->n_holders; i++)
        free(leg->holders[i]);
    free(leg->holders);
    free(leg->stores);
    free(leg->runs);
    free(leg->peer);
    free(leg);
}

void leg_abort(struct worker *w, struct leg *leg, enum td_status why, const char *text, bool tell)
{
    if (leg->pull)
        xfer_pull_cancel(w->xfer, leg->pull->id);
    if (leg->lease)
        xfer_lease_cancel(w->xfer, leg->lease->id);
    if (tell) {
        Tandem__Worker__V1__LegEnd end = TANDEM__WORKER__V1__LEG_END__INIT;
        Tandem__Worker__V1__PhaseTimes times = TANDEM__WORKER__V1__PHASE_TIMES__INIT;
        fill_end(leg, &end, &times);
        send_end(leg->link, leg->id, why, text, &end);
    }
    metrics_inc(w->counters, WORKER_LEGS_FAILED, 1);
    log_debug(&w->log, "leg ended req=%s status=%s text='%s'", leg->req, td_status_name(why), text);
    leg_free(w, leg);
}

void leg_cancel(struct worker *w, struct xfer_id id, enum td_status why, const char *text)
{
    struct leg *l;
    LIST_FOREACH (l, &w->legs, in_worker)
        if (same_id(l->id, id)) {
            leg_abort(w, l, why, text, true);
            return;
        }
    lease_cancel(w, id);
}

void leg_cancel_link(struct worker *w, const struct link *link)
{
    struct leg *l, *next;
    LIST_FOREACH_SAFE (l, &w->legs, in_worker, next)
        if (l->link == link)
            leg_abort(w, l, TD_ERR_PEER_LOST, "router lost", false);
}

void leg_cancel_all(struct worker *w, enum td_status why, const char *text)
{
    while (!LIST_EMPTY(&w->legs))
        leg_abort(w, LIST_FIRST(&w->legs), why, text, true);
}

void leg_expire(struct worker *w, uint64_t now)
{
    struct leg *l, *next;
    LIST_FOREACH_SAFE (l, &w->legs, in_worker, next)
        if (l->deadline_ns <= now)
            leg_abort(w, l, TD_ERR_DEADLINE, "deadline passed on the worker", true);
}

/* ------------------------------------------------------------------ start */

static const struct leg_kind AGGREGATED_LEG = {.name = "aggregated",
                                               .goal = SEQ_GENERATE,
                                               .computes_prompt = true,
                                               .generates = true,
                                               .admitted = leg_admit_prompt};

/* By the number of the kind in messages. */
static const struct leg_kind *const KINDS[] = {[TANDEM__WORKER__V1__LEG_KIND__LEG_PREFILL] = &PREFILL_LEG,
                                               [TANDEM__WORKER__V1__LEG_KIND__LEG_DECODE] = &DECODE_LEG,
                                               [TANDEM__WORKER__V1__LEG_KIND__LEG_AGGREGATED] = &AGGREGATED_LEG};
enum { N_KINDS = sizeof(KINDS) / sizeof(KINDS[0]) };

/* A copy with a terminating 0, which the caller frees; NULL if b is empty. */
static char *text_of(ProtobufCBinaryData b)
{
    if (!b.len)
        return NULL;
    char *s = mem_zalloc(b.len + 1);
    memcpy(s, b.data, b.len);
    return s;
}

/* The arrays of the result are borrowed from m and bias. */
static struct sampling sampling_of(const Tandem__Worker__V1__SamplingParams *m, struct logit_bias *bias)
{
    for (size_t i = 0; i < m->n_logit_bias; i++)
        bias[i] = (struct logit_bias){m->logit_bias[i]->id, m->logit_bias[i]->bias};
    return (struct sampling){.temperature = m->temperature,
                             .top_k = m->top_k,
                             .top_p = m->top_p,
                             .min_p = m->min_p,
                             .typical_p = m->typical_p,
                             .allowed = m->allowed_ids,
                             .n_allowed = (uint32_t)m->n_allowed_ids,
                             .bad_ids = m->bad_ids,
                             .n_bad_ids = (uint32_t)m->n_bad_ids,
                             .bad_lengths = m->bad_lengths,
                             .n_bad = (uint32_t)m->n_bad_lengths,
                             .top_logprobs = m->top_logprobs,
                             .presence_penalty = m->presence_penalty,
                             .frequency_penalty = m->frequency_penalty,
                             .repetition_penalty = m->repetition_penalty,
                             .seed = m->seed,
                             .choice = m->choice,
                             .bias = bias,
                             .n_bias = (uint32_t)m->n_logit_bias,
                             .max_tokens = m->max_tokens,
                             .min_tokens = m->min_tokens,
                             .stop_ids = m->stop_ids,
                             .n_stop_ids = (uint32_t)m->n_stop_ids};
}

static enum td_status check_stores(const Tandem__Worker__V1__Leg *m, struct td_error *e)
{
    if (m->n_stores > MAX_STORES || m->n_holders > MAX_HOLDERS || m->n_store_runs > m->n_ids)
        return td_fail(e, TD_ERR_INVALID, "leg.stores: %zu, holders: %zu, and %zu runs", m->n_stores, m->n_holders,
                       m->n_store_runs);
    for (size_t i = 0; i < m->n_stores; i++)
        if (!m->stores[i]->xfer_address.len || m->stores[i]->xfer_address.len > MAX_ADDRESS)
            return td_fail(e, TD_ERR_INVALID, "leg.stores[%zu].xfer_address: %zu bytes", i,
                           m->stores[i]->xfer_address.len);
    for (size_t i = 0; i < m->n_holders; i++)
        if (!m->holders[i].len || m->holders[i].len > MAX_ADDRESS)
            return td_fail(e, TD_ERR_INVALID, "leg.holders[%zu]: %zu bytes", i, m->holders[i].len);
    for (size_t i = 0; i < m->n_store_runs; i++) {
        const Tandem__Worker__V1__StoreRun *r = m->store_runs[i];
        if (r->store >= m->n_stores + m->n_holders || r->n_blocks > m->n_ids || r->first_block > m->n_ids)
            return td_fail(e, TD_ERR_INVALID, "leg.store_runs[%zu]: blocks %u+%u of store %u", i, r->first_block,
                           r->n_blocks, r->store);
    }
    return TD_OK;
}

/* Validates what a router sent: every field that is used as a size, an index or an address. */
static enum td_status check_message(struct worker *w, const Tandem__Worker__V1__Leg *m, struct td_error *e)
{
    if (!m->id || !m->id->incarnation)
        return td_fail(e, TD_ERR_INVALID, "leg.id: missing");
    if (!m->sampling)
        return td_fail(e, TD_ERR_INVALID, "leg.sampling: missing");
    if (m->prefix_root.len != BLOCK_KEY_BYTES)
        return td_fail(e, TD_ERR_INVALID, "leg.prefix_root: %zu bytes, expected %d", m->prefix_root.len,
                       BLOCK_KEY_BYTES);
    if ((uint32_t)m->kind >= N_KINDS)
        return td_fail(e, TD_ERR_INVALID, "leg.kind: %d is unknown", (int)m->kind);
    if (KINDS[m->kind]->check && KINDS[m->kind]->check(m, e))
        return TD_ERR_INVALID;
    if (m->lora.len && !adapters_find(&w->adapters, m->lora.data, m->lora.len))
        return td_fail(e, TD_ERR_INVALID, "leg.lora: no adapter '%.*s' here", (int)m->lora.len,
                       (const char *)m->lora.data);
    if (m->peer_xfer_address.len > MAX_ADDRESS || m->request_id.len > LOG_WORD_MAX)
        return td_fail(e, TD_ERR_INVALID, "leg: an address or the request id is too long");
    if (check_stores(m, e))
        return TD_ERR_INVALID;
    if (m->sampling->n_logit_bias > SAMPLING_MAX_BIAS || m->n_ids > UINT32_MAX / 2)
        return td_fail(e, TD_ERR_INVALID, "leg: too many ids or biases");
    const struct xfer_id id = {m->id->incarnation, m->id->counter};
    bool is_used = lease_is_open(w, id); /* of a leg that has ended, or of another worker's question */
    const struct leg *l;
    LIST_FOREACH (l, &w->legs, in_worker)
        is_used |= same_id(l->id, id);
    if (is_used)
        return td_fail(e, TD_ERR_INVALID, "leg.id: in use");
    return atomic_load(&w->stopping) ? td_fail(e, TD_ERR_REFUSED, "worker is draining") : TD_OK;
}

static enum td_status open_seq(struct worker *w, struct leg *leg, const Tandem__Worker__V1__Leg *m, struct td_error *e)
{
    struct logit_bias *bias = mem_array(m->sampling->n_logit_bias, sizeof(*bias));
    struct seq_params p = {.ids = m->ids,
                           .n_ids = (uint32_t)m->n_ids,
                           .n_prompt = m->sampling->n_prompt,
                           .sampling = sampling_of(m->sampling, bias),
                           .goal = KINDS[m->kind]->goal,
                           .prompt_logprobs = m->sampling->prompt_logprobs && KINDS[m->kind]->computes_prompt,
                           .tpot_ms = m->tpot_ms,
                           .adapter = adapters_find(&w->adapters, m->lora.data, m->lora.len),
                           .user = leg};
    memcpy(p.root.b, m->prefix_root.data, BLOCK_KEY_BYTES);
    enum td_status s = TD_OK;
    if (m->grammar.len)
        s = grammars_get(w->grammars, m->grammar_kind, m->grammar.data, m->grammar.len, &p.grammar, e);
    if (!s)
        s = engine_seq_open(w->engine, &p, &leg->seq, e);
    grammar_unref(p.grammar);
    free(bias);
    return s;
}

/* Copies the sources of the prompt's prefix from the message into the leg. */
static void take_stores(struct leg *leg, const Tandem__Worker__V1__Leg *m)
{
    leg->stores = mem_array(m->n_stores, sizeof(*leg->stores));
    leg->runs = mem_array(m->n_store_runs, sizeof(*leg->runs));
    leg->hot_blocks = m->hot_blocks;
    leg->tenant = m->tenant;
    for (size_t i = 0; i < m->n_stores; i++)
        leg->stores[leg->n_stores++] = (struct store_ref){text_of(m->stores[i]->xfer_address), m->stores[i]->id};
    leg->holders = mem_array(m->n_holders, sizeof(*leg->holders));
    for (size_t i = 0; i < m->n_holders; i++)
        leg->holders[leg->n_holders++] = text_of(m->holders[i]);
    for (size_t i = 0; i < m->n_store_runs; i++)
        leg->runs[leg->n_runs++] =
            (struct store_run){m->store_runs[i]->store, m->store_runs[i]->first_block, m->store_runs[i]->n_blocks};
}

void leg_start(struct worker *w, struct link *link, const Tandem__Worker__V1__Leg *m)
{
    struct td_error e = {{0}};
    struct leg *leg = mem_zalloc(sizeof(*leg));
    enum td_status s = check_message(w, m, &e);
    if (!s)
        s = open_seq(w, leg, m, &e);
    if (s) {
        struct xfer_id id = {m->id ? m->id->incarnation : 0, m->id ? m->id->counter : 0};
        Tandem__Worker__V1__LegEnd end = TANDEM__WORKER__V1__LEG_END__INIT;
        log_debug(&w->log, "leg refused status=%s text='%s'", td_status_name(s), e.text);
        send_end(link, id, s, e.text, &end);
        free(leg);
        return;
    }
    leg->id = (struct xfer_id){m->id->incarnation, m->id->counter};
    leg->kind = KINDS[m->kind];
    leg->link = link_ref(link);
    take_stores(leg, m);
    leg->n_prompt = m->sampling->n_prompt;
    leg->n_ids = (uint32_t)m->n_ids;
    leg->n_new = m->new_tokens;
    leg->tpot_ms = m->tpot_ms;
    w->backlog.changed = true;
    leg->first_page = engine_first_page_after(w->engine, (uint32_t)m->n_ids);
    leg->peer = text_of(m->peer_xfer_address);
    leg->peer_incarnation = m->peer_incarnation;
    log_word(m->request_id.data, m->request_id.len, leg->req);
    leg->deadline_ns = m->remaining_ms > 0 && m->remaining_ms < INT64_MAX / 2000000
                           ? clock_now(&w->clock) + (uint64_t)m->remaining_ms * NS_PER_MS
                           : UINT64_MAX;
    LIST_INSERT_HEAD(&w->legs, leg, in_worker);
    link_leg_began(link, leg->id.counter);
    if (leg->kind->begin)
        leg->kind->begin(w, leg);
    char trace[LOG_WORD_BYTES];
    log_debug(&w->log, "leg received req=%s xfer=%" PRIx64 "-%" PRIu64 " kind=%s tokens=%zu trace=%s", leg->req,
              leg->id.incarnation, leg->id.counter, leg->kind->name, m->n_ids,
              m->traceparent.len ? log_word(m->traceparent.data, m->traceparent.len, trace) : "-");
    metrics_inc(w->counters, WORKER_LEGS, 1);
    metrics_inc(w->counters, WORKER_PROMPT_TOKENS, m->n_ids);
    prefix_ask(w, leg);
}

/* -------------------------------------------------- callbacks of the engine */

void leg_on_admitted(void *user, struct seq *seq, uint32_t n_matched)
{
    struct leg *leg = engine_seq_user(seq);
    leg->kind->admitted(user, leg, n_matched);
}

void leg_admit_prompt(struct worker *w, struct leg *leg, uint32_t n_matched)
{
    leg->cached_worker = n_matched * w->geometry.layout.page_tokens;
    metrics_inc(w->counters, WORKER_CACHED_TOKENS, leg->cached_worker);
    if (prefix_load(w, leg, n_matched))
        engine_seq_fill(w->engine, leg->seq);
}

void leg_on_pages_ready(void *user, struct seq *seq, uint32_t first, uint32_t n, uint16_t begin, uint16_t end)
{
    struct leg *leg = engine_seq_user(seq);
    if (leg->kind->pages_ready)
        leg->kind->pages_ready(user, leg, first, n, begin, end);
}

void leg_put_token(struct worker *w, struct leg *leg, const struct sampled *token)
{
    uint32_t n_tokens;
    engine_seq_tokens(leg->seq, &n_tokens);
    w->out = MEM_ROOM(w->out, w->n_out, w->cap_out, 64);
    w->out[w->n_out++] = (struct out_token){leg, n_tokens - leg->n_prompt, *token};
}

void leg_on_token(void *user, struct seq *seq, const struct sampled *token)
{
    struct worker *w = user;
    struct leg *leg = engine_seq_user(seq);
    uint32_t n_tokens;
    engine_seq_tokens(seq, &n_tokens);
    if (n_tokens == leg->n_ids)
        log_debug(&w->log, "first token req=%s", leg->req);
    leg->first_token = *token;
    leg_put_token(w, leg, token);
    metrics_inc(w->counters, WORKER_TOKENS, 1);
}

/* Only notes the end; leg_flush() frees the leg after the step. */
void leg_on_end(void *user, struct seq *seq, enum seq_finish finish)
{
    (void)user;
    struct leg *leg = engine_seq_user(seq);
    leg->ended = true;
    leg->finish = finish;
}

/* ------------------------------------------------------------ after a step */

/* Sends all tokens of this step that belong to legs of one router, in one message. */
static void send_tokens(struct worker *w, struct link *link)
{
    Tandem__Worker__V1__Token *tokens = mem_array(w->n_out, sizeof(*tokens)),
                              **list = mem_array(w->n_out, sizeof(*list));
    Tandem__Worker__V1__TransferId *ids = mem_array(w->n_out, sizeof(*ids));
    uint32_t n = 0;
    for (uint32_t i = 0; i < w->n_out; i++) {
        struct out_token *o = &w->out[i];
        if (!o->leg || o->leg->link != link)
            continue;
        tandem__worker__v1__token__init(&tokens[n]);
        ids[n] = leg_message_id(o->leg->id);
        tokens[n].id = &ids[n];
        tokens[n].token = o->token.id;
        tokens[n].logprob = o->token.logprob;
        tokens[n].top_ids = o->token.top_ids;
        tokens[n].top_logprobs = o->token.top_logprobs;
        tokens[n].n_top_ids = tokens[n].n_top_logprobs = o->token.n_top;
        tokens[n].position = o->position;
        list[n] = &tokens[n];
        n++;
        o->leg = NULL;
    }
    Tandem__Worker__V1__WorkerMessage m = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
    Tandem__Worker__V1__Tokens all = TANDEM__WORKER__V1__TOKENS__INIT;
    all.n_tokens = n;
    all.tokens = list;
    m.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_TOKENS;
    m.tokens = &all;
    link_send(link, &m);
    free(list);
    free(tokens);
    free(ids);
}

/* Ends a leg that has done its part. leg_free() comes last: LegEnd and offers borrow from the sequence. */
static void leg_finish(struct worker *w, struct leg *leg)
{
    Tandem__Worker__V1__LegEnd end = TANDEM__WORKER__V1__LEG_END__INIT;
    Tandem__Worker__V1__PhaseTimes times = TANDEM__WORKER__V1__PHASE_TIMES__INIT;
    if (leg->kind->finish)
        leg->kind->finish(w, leg);
    fill_end(leg, &end, &times);
    log_debug(&w->log, "leg finished req=%s reason=%s", leg->req, finish_name(leg->finish));
    send_end(leg->link, leg->id, TD_OK, "", &end);
    /* The worker that computed the prompt offers its blocks; a decode worker offers the answer's only. */
    store_offer(w, leg,
                leg->kind->computes_prompt ? leg->n_from_store : leg->n_prompt / w->geometry.layout.page_tokens);
    leg_free(w, leg);
}

/*
 * Ends a leg whose logits were not finite, or whose grammar can't be followed any further. Any worker with
 * these weights would compute the same, so the router does not try another one (router/request.c).
 */
static void leg_break(struct worker *w, struct leg *leg)
{
    if (leg->finish == FINISH_STUCK) {
        leg_abort(w, leg, TD_ERR_INVALID,
                  "structured: the answer can't go on: the vocabulary has no token that may follow, or the grammar is "
                  "too ambiguous here",
                  true);
        return;
    }
    log_error(&w->log, "logits are not finite req=%s", leg->req);
    metrics_inc(w->counters, WORKER_LEGS_BROKEN, 1);
    leg_abort(w, leg, TD_ERR_CORRUPT, "the model's logits are not finite: its weights, or the device, are broken",
              true);
}

void leg_flush(struct worker *w)
{
    for (uint32_t i = 0; i < w->n_out; i++)
        if (w->out[i].leg)
            send_tokens(w, w->out[i].leg->link);
    w->n_out = 0;
    struct leg *l, *next;
    LIST_FOREACH_SAFE (l, &w->legs, in_worker, next) {
        if (l->ended && (l->finish == FINISH_BROKEN || l->finish == FINISH_STUCK))
            leg_break(w, l);
        else if (l->ended)
            leg_finish(w, l);
    }
}

/* ------------------------------------------------------------ pulls ended */

void leg_pull_ended(struct worker *w, struct worker_work *work)
{
    struct worker_pull *p = work->pull;
    struct leg *leg = p->leg;
    bool is_load = leg && prefix_pull_ended(w, leg, p, work);
    pull_close(w, p);
    if (!leg || is_load)
        return;
    leg->pull = NULL;
    leg->kind->pull_ended(w, leg, work);
}
