/*
 * One request, from placement to its end.
 *
 *     QUEUED --request_place--> PLACED --end, failure, client gone--> OVER (freed)
 *        ^                        |
 *        +----replan_request------+
 *
 * Split: both legs are sent at once under one transfer id. The first token comes from the prefill worker; it
 * is shown as soon as the decode worker has reserved its pages (ACCEPTED), which it was asked for long
 * before. Aggregated and kept: one worker has the only leg, and tokens are shown at once.
 *
 * The two workers have separate streams, so their messages arrive in any order. What must hold:
 *   - Both workers send the first token. A token is taken only at the next position, so the second copy is
 *     dropped.
 *   - The end of the decode leg may come before the end of the prefill leg (q->over); the answer is finished
 *     by the later one. The end of the prefill leg brings times, cached tokens and scores.
 *   - A cancelled handover ends both legs. The decode worker's end may come first and does not say why; the
 *     prefill worker's end does.
 *   - Blame first, then replan_request(): the new plan avoids the blamed workers, and replan_request() may
 *     free the request.
 *   - Ending a request frees it. After answer_finish(), request_fail(), replan_request(), or if
 *     answer_token() returned true, q must not be touched.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "router/router_internal.h"

/* hot_count() from which on a second store copies a segment: requests in about a minute. */
static const double HOT_AT = 8;
/* A worker may see the deadline pass this much earlier. */
static const uint64_t DEADLINE_SLACK_NS = 100 * NS_PER_MS;

/* Frees the arrays of n tokens, not the tokens themselves. */
static void free_tokens(struct shown_token *tokens, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        free(tokens[i].top_ids);
        free(tokens[i].top_logprobs);
    }
}

/* ---------------------------------------------------------------- placement */

void request_unplace(struct request *q)
{
    struct router *r = q->router;
    struct request **at = &r->placed[q->counter % PLACED_BUCKETS];
    dispatch_cancel(q);
    while (*at != q)
        at = &(*at)->next_placed;
    *at = q->next_placed;
    r->n_running--;
    q->placed_prefill = q->placed_decode = NULL;
    q->decode_accepted = q->prefill_done = q->over = q->proven = false;
    free_tokens(q->held, q->n_held);
    q->n_held = 0;
}

void request_drop(struct request *q)
{
    struct router *r = q->router;
    if (q->state == REQUEST_PLACED) {
        request_unplace(q);
    } else {
        r->n_queued--;
        r->queued_tokens -= q->p.n_ids;
        r->n_unsubmitted -= !q->submitted;
    }
    if (q->submitted)
        scheduler_end(r->scheduler, &q->sched, clock_now(&r->clock), q->answered);
    TAILQ_REMOVE(&r->requests, q, in_router);
    LIST_REMOVE(q, in_calls);
    q->state = REQUEST_OVER;
    request_free(q);
}

/* One answer less of its key, and of the first one also those that have not begun. What was never placed cost
 * nothing. */
static void give_back(struct request *q)
{
    bool is_first = choices_is_first(q), begun = q->choices && q->choices->begun;
    if (q->is_counted)
        keys_ended(q->router->keys, q->p.key, is_first && !begun ? q->p.n_choices : 1, !q->placed_ns && is_first,
                   q->p.sampling.n_prompt);
}

void request_free(struct request *q)
{
    give_back(q);
    choices_leave(q);
    token_stream_close(q->detok);
    reply_close(q->reply);
    params_free(&q->p);
    bytes_free(&q->text);
    free(q->keys);
    free(q->sched.matched_blocks);
    free_tokens(q->tokens, q->n_tokens);
    free_tokens(q->held, q->n_held);
    free(q->tokens);
    free(q->held);
    free(q->prompt.logprobs);
    free(q->prompt.ranks);
    free(q->prompt.top_ids);
    free(q->prompt.top_logprobs);
    rpc_call_unref(q->call);
    free(q);
}

void request_refuse(struct request *q, const char *text, uint32_t retry_after_ms)
{
    char req[LOG_WORD_BYTES];
    log_debug(&q->router->log, "request refused req=%s code=%s text='%s'", request_log_id(q, req),
              rpc_code_name(RPC_RESOURCE_EXHAUSTED), text);
    rpc_call_finish(q->call, RPC_RESOURCE_EXHAUSTED, text, retry_after_ms);
    request_free(q);
}

/* Number of its leading blocks in segments that are asked for often; counts this request, too. */
static uint32_t count_hot(struct request *q)
{
    uint32_t n = 0;
    for (uint32_t at = 0; at < q->n_keys; at += RING_SEGMENT_BLOCKS) {
        double count = hot_count(q->router->hot, &q->keys[at], q->begun_ns);
        if (count >= HOT_AT && n == at)
            n = at + RING_SEGMENT_BLOCKS < q->n_keys ? at + RING_SEGMENT_BLOCKS : q->n_keys;
    }
    return n;
}

/*
 * A worker whose breaker was open gets q as its only request, to show that it works again. Until q succeeds
 * or fails there, the scheduler sends nothing else.
 */
static void use_breaker(struct request *q, struct peer *p)
{
    if (!breaker_used(&p->breaker))
        return;
    p->probe = q->counter;
    scheduler_worker_usable(q->router->scheduler, p->holder, false);
}

const char *request_log_id(const struct request *q, char out[LOG_WORD_BYTES])
{
    return log_word(q->p.label.data, q->p.label.len, out);
}

void request_place(struct request *q, const struct plan *plan)
{
    static const int PLANS[] = {
        [PLAN_SPLIT] = ROUTER_SPLIT, [PLAN_AGGREGATED] = ROUTER_AGGREGATED, [PLAN_KEPT] = ROUTER_KEPT};
    struct router *r = q->router;
    struct peer *prefill = r->peers[plan->prefill], *decode = r->peers[plan->decode];
    q->plan = *plan;
    q->begun_ns = clock_now(&r->clock);
    q->said_ns = router_patience(r);
    q->begun_token_ns = 0;
    q->n_before = q->n_tokens;
    r->n_queued--;
    r->queued_tokens -= q->p.n_ids;
    r->n_running++;
    q->state = REQUEST_PLACED;
    q->counter = ++r->next_counter;
    q->next_placed = r->placed[q->counter % PLACED_BUCKETS];
    r->placed[q->counter % PLACED_BUCKETS] = q;
    if (!q->n_replans) {
        q->placed_ns = q->begun_ns;
        q->hot_blocks = count_hot(q);
        retry_budget_first(&r->budget, q->begun_ns);
    }
    /* The prefill leg alone gives everything: the last token, or scores. */
    q->alone = plan->kind == PLAN_SPLIT && (q->scores || q->p.sampling.max_tokens <= q->n_tokens + 1);
    q->decode_accepted = q->alone || plan_is_whole(plan->kind);
    q->prefill = q->placed_prefill = prefill;
    q->decode = q->placed_decode = decode;
    memcpy(q->prefill_name, prefill->name, sizeof(q->prefill_name));
    memcpy(q->decode_name, decode->name, sizeof(q->decode_name));
    use_breaker(q, prefill);
    use_breaker(q, decode);
    metrics_inc(r->counters, PLANS[plan->kind], 1);
    char req[LOG_WORD_BYTES];
    log_debug(&r->log, "request placed req=%s xfer=%" PRIx64 "-%" PRIu64 " plan=%s prefill=%s decode=%s",
              request_log_id(q, req), r->incarnation, q->counter, plan_name(plan->kind), prefill->name, decode->name);
    dispatch_send(q);
}

void request_fail(struct request *q, enum rpc_code code, const char *text, uint32_t retry_after_ms)
{
    char req[LOG_WORD_BYTES], workflow[LOG_WORD_BYTES];
    log_debug(&q->router->log, "request failed req=%s workflow=%s code=%s text='%s'", request_log_id(q, req),
              log_word(q->p.workflow.data, q->p.workflow.len, workflow), rpc_code_name(code), text);
    metrics_inc(q->router->counters,
                code == RPC_RESOURCE_EXHAUSTED && q->state == REQUEST_QUEUED ? ROUTER_REFUSED : ROUTER_FAILED, 1);
    if (choices_failed(q))
        rpc_call_finish(q->call, code, text, retry_after_ms);
    request_drop(q);
}

void request_gone(struct request *q)
{
    char req[LOG_WORD_BYTES];
    log_debug(&q->router->log, "request cancelled by its client req=%s", request_log_id(q, req));
    metrics_inc(q->router->counters, ROUTER_CANCELLED, 1);
    request_drop(q);
}

void request_peer_lost(struct request *q, struct peer *peer, enum replan_reason reason)
{
    char text[160];
    bool prefill_lost = q->prefill == peer, decode_lost = q->decode == peer;
    if (!prefill_lost && !decode_lost)
        return;
    /* The request may not need this worker any more: its pages may have moved. */
    if (prefill_lost && !decode_lost && q->prefill_done) {
        dispatch_release_prefill(q);
        return;
    }
    const char *part = prefill_lost && decode_lost ? "" : prefill_lost ? "prefill " : "decode ";
    snprintf(text, sizeof(text), "%sworker %s %s", part, peer->name,
             reason == REPLAN_STALLED ? "makes no progress" : "was lost");
    if (reason == REPLAN_STALLED)
        scheduler_avoid(&q->sched, peer->holder);
    replan_request(q, reason, text);
}

/* ----------------------------------------------------------------- tokens */

/* A message under the present counter shows that the worker has received its leg. */
static void note_heard(struct request *q, const struct peer *from)
{
    if (from == q->prefill)
        q->prefill_said = 0;
    if (from == q->decode)
        q->decode_said = 0;
}

/* The decode worker generates tokens, so it has the prompt's KV: handover and both workers are fine. */
static void succeeded(struct request *q)
{
    q->proven = true;
    choices_begin(q);
    peer_succeeded(q->placed_decode);
    if (q->placed_prefill != q->placed_decode)
        peer_succeeded(q->placed_prefill);
}

void request_token(struct request *q, struct peer *from, const Tandem__Worker__V1__Token *t)
{
    uint32_t next = q->n_tokens + q->n_held;
    note_heard(q, from);
    dispatch_prompt_computed(q);
    if (from == q->decode && !q->proven)
        succeeded(q);
    if ((from != q->placed_prefill && from != q->placed_decode) || t->position < next)
        return; /* from a worker outside this placement, or the second copy of the first token */
    if (t->token >= q->router->config.vocab_size || t->position > next) {
        char req[LOG_WORD_BYTES];
        log_error(&q->router->log, "worker sent a token outside the vocabulary, or left one out req=%s peer=%s",
                  request_log_id(q, req), from->name);
        replan_blame(q, from);
        replan_request(q, REPLAN_FAILED, "a worker sent a token outside the vocabulary, or left one out");
        return;
    }
    struct shown_token token = {.id = t->token, .logprob = t->logprob};
    if (t->n_top_ids == t->n_top_logprobs && t->n_top_ids) {
        token.n_top = (uint32_t)t->n_top_ids;
        token.top_ids = mem_dup(t->top_ids, t->n_top_ids * sizeof(*token.top_ids));
        token.top_logprobs = mem_dup(t->top_logprobs, t->n_top_ids * sizeof(*token.top_logprobs));
    }
    if (q->decode_accepted) {
        answer_token(q, token);
        return;
    }
    q->held = mem_resize(q->held, q->n_held + 1, sizeof(*q->held));
    q->held[q->n_held++] = token;
}

/*
 * The decode worker has reserved: shows the held tokens. True: the request is over and freed. answer_token()
 * may free q, so the list is taken off q first, and the arrays of tokens after the end are freed here.
 */
static bool show_held(struct request *q)
{
    uint32_t n = q->n_held;
    q->decode_accepted = true;
    q->n_held = 0;
    struct shown_token *held = q->held;
    bool over = false;
    q->held = NULL;
    for (uint32_t i = 0; i < n; i++) {
        if (over)
            free_tokens(&held[i], 1);
        else
            over = answer_token(q, held[i]);
    }
    free(held);
    return over;
}

void request_accepted(struct request *q)
{
    char req[LOG_WORD_BYTES];
    log_debug(&q->router->log, "request accepted req=%s peer=%s", request_log_id(q, req), q->decode_name);
    note_heard(q, q->decode);
    show_held(q);
}

/* ------------------------------------------------------------------- ends */

/*
 * Counts prompt tokens that were not computed, by the first leg that reports them: after a re-plan, blocks of
 * the answer would count, too.
 */
static void note_cached(struct request *q, const Tandem__Worker__V1__LegEnd *end)
{
    const uint32_t from[] = {end->cached_worker, end->cached_peer, end->cached_dram, end->cached_ssd};
    uint32_t *const to[] = {&q->cached_worker, &q->cached_peer, &q->cached_dram, &q->cached_ssd};
    uint32_t left = q->p.sampling.n_prompt;
    for (int i = 0; i < 4 && !q->cache_told; i++) {
        *to[i] = from[i] < left ? from[i] : left;
        left -= *to[i];
    }
    q->cache_told = true;
}

/*
 * Adds a leg's times. Only the leg that prefilled counts its queue: a decode leg waits while the prefill
 * runs.
 */
static void note_times(struct request *q, const Tandem__Worker__V1__LegEnd *end)
{
    const Tandem__Worker__V1__PhaseTimes *t = end->times;
    if (!t)
        return;
    q->now_ms[PART_LOAD] += answer_ms(t->prefix_load);
    q->now_ms[PART_PREFILL] += answer_ms(t->prefill);
    q->now_ms[PART_TRANSFER] += answer_ms(t->transfer);
    q->now_ms[PART_EXPOSED] += answer_ms(t->exposed_transfer);
    q->now_ms[PART_WAIT] += answer_ms(t->decode_wait);
    q->now_ms[PART_DECODE] += answer_ms(t->decode);
    if (t->prefill)
        q->now_ms[PART_QUEUE] += answer_ms(t->queue);
}

/* Keeps the first complete scores of the prompt. */
static void note_scores(struct request *q, const Tandem__Worker__V1__LegEnd *end)
{
    size_t n = end->n_prompt_logprobs, n_top = end->n_prompt_top_ids;
    if (!n || q->prompt.n || end->n_prompt_ranks != n || end->n_prompt_top_logprobs != n_top)
        return;
    q->prompt.n = n;
    q->prompt.n_top = n_top;
    q->prompt.logprobs = mem_dup(end->prompt_logprobs, n * sizeof(float));
    q->prompt.ranks = mem_dup(end->prompt_ranks, n * sizeof(uint32_t));
    q->prompt.top_ids = mem_dup(end->prompt_top_ids, n_top * sizeof(uint32_t));
    q->prompt.top_logprobs = mem_dup(end->prompt_top_logprobs, n_top * sizeof(float));
}

/*
 * Whether any other worker would answer the same: the request is wrong, its deadline passed, or the model's
 * output is corrupt.
 */
static bool is_final(const struct request *q, int32_t status)
{
    uint64_t now = clock_now(&q->router->clock);
    if (status == TD_ERR_DEADLINE)
        return q->p.remaining_ms != INT64_MAX &&
               now + DEADLINE_SLACK_NS > q->arrived_ns + (uint64_t)q->p.remaining_ms * NS_PER_MS;
    return status == TD_ERR_INVALID || status == TD_ERR_UNSUPPORTED || status == TD_ERR_NOT_FOUND ||
           status == TD_ERR_CORRUPT;
}

/*
 * A transfer failed, and it is unknown on which side. The holder is blamed, and the reader too if it failed
 * with another holder before. The request avoids the reader first: the holder has the prompt in its cache,
 * and computing it elsewhere may take long. At a second failure it avoids both.
 */
static void blame_transfer(struct request *q, struct peer *reader, struct peer *holder)
{
    if (holder->state != PEER_READY)
        return; /* the holder is lost: that explains the failure */
    if (reader->failed_with != holder->holder + 1 && reader->failed_with)
        peer_failed(reader);
    reader->failed_with = holder->holder + 1;
    if (q->sched.n_avoid)
        scheduler_avoid(&q->sched, holder->holder);
    scheduler_avoid(&q->sched, reader->holder);
    peer_failed(holder);
}

/*
 * A leg ended with an error: fails the request if no other worker could do better, otherwise blames, then
 * re-plans.
 */
static void leg_failed(struct request *q, struct peer *from, bool prefill_leg, const Tandem__Worker__V1__LegEnd *end)
{
    char text[384];
    snprintf(text, sizeof(text), "worker %s: %.*s", from->name, (int)(end->text.len < 300 ? end->text.len : 300),
             end->text.data ? (const char *)end->text.data : "");
    if (is_final(q, end->status)) {
        request_fail(q, rpc_code_of_status(end->status), text, 0);
        return;
    }
    enum td_status s = end->status;
    bool refused = s == TD_ERR_REFUSED || s == TD_ERR_NO_SPACE || s > 0;
    bool moving =
        !refused && !prefill_leg && q->plan.kind == PLAN_SPLIT &&
        (td_status_group(s) == TD_GROUP_PEER || s == TD_ERR_STALE || s == TD_ERR_DEADLINE || s == TD_ERR_CANCELLED);
    if (moving) {
        blame_transfer(q, from, q->placed_prefill);
    } else if (s == TD_ERR_REFUSED) {
        peer_drains(from);
    } else {
        replan_blame(q, from);
    }
    replan_request(q, moving ? REPLAN_TRANSFER : refused ? REPLAN_REFUSED : REPLAN_FAILED, text);
}

/* The last leg has ended well: finishes the answer. */
static void finish_by_leg(struct request *q, bool length)
{
    /* The first token ended the answer: no decode worker was needed. */
    if (!q->decode_accepted && show_held(q))
        return;
    if (replan_wants_scores(q)) /* the leg with the scores was lost after it had sent its tokens */
        replan_request(q, REPLAN_FAILED, "the prompt's log-probabilities are missing");
    else
        answer_finish(q, length);
}

/*
 * Whether a decode leg ended because the prefill worker took its pages back, usually as the first token ended
 * the answer. The end of the prefill leg says why, and may come after this one: then only the decode worker's
 * place is freed here.
 */
static bool is_handover_cancelled(const struct request *q, const struct peer *from,
                                  const Tandem__Worker__V1__LegEnd *end)
{
    return end->status == TD_ERR_CANCELLED && q->plan.kind == PLAN_SPLIT && from == q->decode && !q->prefill_done;
}

static bool is_reason(const Tandem__Worker__V1__LegEnd *end, const char *reason)
{
    return end->finish_reason.len == strlen(reason) && !memcmp(end->finish_reason.data, reason, strlen(reason));
}

void request_leg_end(struct request *q, struct peer *from, const Tandem__Worker__V1__LegEnd *end)
{
    bool prefill_leg = from == q->prefill && q->plan.kind == PLAN_SPLIT && !q->prefill_done;
    if (from != q->prefill && from != q->decode)
        return;
    note_heard(q, from);
    if (is_handover_cancelled(q, from, end)) {
        dispatch_decoded(q);
        return;
    }
    if (end->status) {
        leg_failed(q, from, prefill_leg, end);
        return;
    }
    /* "length"; else "stop", or nothing. */
    bool length = q->scores ? q->over_by_length : is_reason(end, "length");
    if (q->alone || plan_is_whole(q->plan.kind))
        peer_succeeded(from);
    note_times(q, end);
    note_scores(q, end);
    if (prefill_leg || plan_is_whole(q->plan.kind))
        note_cached(q, end);
    if (prefill_leg) {
        q->prefill_done = true;
        dispatch_prompt_computed(q);
        if (end->finish_reason.len || q->over) {
            finish_by_leg(q, q->over ? q->over_by_length : length);
            /* The handover was cancelled for another reason than an end, for example a worker that stops. */
        } else if (!q->decode && !q->alone) {
            blame_transfer(q, q->placed_decode, from);
            replan_request(q, REPLAN_TRANSFER, "the handover of its KV was cancelled");
        }
        return;
    }
    if (end->times)
        dispatch_moved(q, answer_ms(end->times->exposed_transfer));
    dispatch_decoded(q);
    if (q->plan.kind == PLAN_SPLIT && !q->prefill_done) { /* the end of the prefill leg is on its way */
        q->over = true;
        q->over_by_length = length;
        return;
    }
    q->prefill_done = true;
    finish_by_leg(q, length);
}
