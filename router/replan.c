/*
 * Re-plans: a request whose worker, transfer or leg failed goes back into the queue, ahead of new requests,
 * with its prompt and the tokens generated so far, under a new transfer id. The client sees a pause, then the
 * same stream.
 *
 *     PLACED --worker lost or stalled, transfer failed, leg refused, unheard, forgotten--> QUEUED --> PLACED
 *         \--all tokens were here already--> OVER        \--no budget, or too often--> UNAVAILABLE
 *
 * Why nothing is missing, doubled or changed:
 * - Tokens are a function of ids, sampling and absolute position, so what a worker generates after (prompt +
 *   tokens so far) is what the lost one would have generated. Limits and penalties count from
 *   sampling.n_prompt, the end of the original prompt.
 * - The old id is fenced: its legs are cancelled where possible, and router_find() does not know it any more,
 *   so late messages under it are dropped. A token is appended only at its own position (request_token()).
 * - Text, held-back bytes and stop strings belong to the request, not to a placement (answer.c). First tokens
 *   held for a decode worker that never reserved are dropped: they are generated again.
 *
 * The same lets another router go on (resume): its request begins with the tokens that the client has got,
 * and is queued as a new one.
 *
 * How often: one budget for all requests (sched/retry.h), and MAX_REPLANS for each. For two seconds a request
 * avoids a worker that failed it, if there is another one; the failure also counts for that worker's breaker.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "router/router_internal.h"

enum { MAX_REPLANS = 5 };

static const char *const REASONS[REPLAN_REASONS] = {"lost", "transfer", "refused", "unheard", "stalled", "failed"};

bool replan_wants_scores(const struct request *q)
{
    return q->p.want_prompt_logprobs && !q->prompt.n;
}

/* ------------------------------------------------------------------- times */

/*
 * After a loss, all time from the last token of the lost placement to the next token is "stalled"; queue,
 * load and prefill of the new placement are not counted again. Times that a leg can't report any more (it was
 * lost, or cancelled at a stop string) are taken from the router's clock.
 */
void replan_times(struct request *q, bool lost)
{
    if ((lost || q->decode) && q->begun_token_ns) {
        if (!q->prefill_done)
            q->now_ms[PART_PREFILL] = answer_ms(q->begun_token_ns - q->begun_ns);
        q->now_ms[PART_EXPOSED] = q->now_ms[PART_WAIT] = 0;
        q->now_ms[PART_DECODE] = answer_ms(q->last_token_ns - q->begun_token_ns);
        q->stall_ns = lost ? q->last_token_ns : 0;
    } else if (lost) {
        memset(q->now_ms, 0, sizeof(q->now_ms));
        q->stall_ns = q->stall_ns ? q->stall_ns : q->begun_ns;
    }
    for (int i = 0; i < PARTS; i++) {
        bool within_stall = i == PART_QUEUE || i == PART_LOAD || i == PART_PREFILL;
        if (!q->n_replans || !within_stall)
            q->times_ms[i] += q->now_ms[i];
        q->now_ms[i] = 0;
    }
}

/* ---------------------------------------------------------------- re-plan */

/* Whether the last token is one of the request's stop ids. */
static bool ends_by_stop(const struct request *q)
{
    for (size_t i = 0; q->n_tokens && i < q->p.sampling.n_stop_ids; i++)
        if (q->p.sampling.stop_ids[i] == q->tokens[q->n_tokens - 1].id)
            return true;
    return false;
}

/* Appends the tokens since the last placement to p.ids, and the keys of the blocks that they fill to keys. */
static void take_tokens(struct request *q)
{
    uint32_t page = q->router->layout.page_tokens, n = q->p.sampling.n_prompt + q->n_tokens;
    q->p.ids = mem_resize(q->p.ids, n, sizeof(*q->p.ids));
    while (q->p.n_ids < n) {
        q->p.ids[q->p.n_ids] = q->tokens[q->p.n_ids - q->p.sampling.n_prompt].id;
        q->p.n_ids++;
    }
    q->keys = mem_resize(q->keys, n / page, sizeof(*q->keys));
    for (; q->n_keys < n / page; q->n_keys++)
        q->keys[q->n_keys] =
            block_key_next(q->n_keys ? &q->keys[q->n_keys - 1] : &q->root, q->p.ids + (size_t)q->n_keys * page, page);
}

/* Whether all tokens of the answer are here. */
static bool is_complete(const struct request *q)
{
    return q->n_tokens >= q->p.sampling.max_tokens || ends_by_stop(q);
}

void replan_resumed(struct request *q)
{
    if (!is_complete(q))
        return;
    q->scores = replan_wants_scores(q);
    q->over_by_length = !ends_by_stop(q);
    if (!q->scores)
        answer_finish(q, q->over_by_length);
}

/*
 * The old placement ends (request_unplace()) before the ids change, since a new placement gets a new counter.
 */
static void enqueue_again(struct request *q, bool scores)
{
    struct router *r = q->router;
    request_unplace(q);
    take_tokens(q);
    q->scores = scores;
    q->over_by_length = !ends_by_stop(q);
    q->n_replans++;
    q->state = REQUEST_QUEUED;
    r->n_queued++;
    r->queued_tokens += q->p.n_ids;
    place_again(q);
}

void replan_request(struct request *q, enum replan_reason reason, const char *text)
{
    struct router *r = q->router;
    char why[400];
    bool complete = is_complete(q), often = q->n_replans == MAX_REPLANS;
    replan_times(q, true);
    if (complete && !replan_wants_scores(q)) { /* all tokens came; only the leg's end was lost */
        answer_finish(q, !ends_by_stop(q));
        return;
    }
    if (often || !retry_budget_take(&r->budget, clock_now(&r->clock))) {
        snprintf(why, sizeof(why), "%s; %s", text,
                 often ? "it was planned anew too often already" : "too much is being planned anew");
        request_fail(q, RPC_UNAVAILABLE, why, 1000);
        return;
    }
    char req[LOG_WORD_BYTES], workflow[LOG_WORD_BYTES];
    log_debug(&r->log, "request planned anew req=%s workflow=%s reason=%s tokens=%u text='%s'", request_log_id(q, req),
              log_word(q->p.workflow.data, q->p.workflow.len, workflow), REASONS[reason], q->n_tokens, text);
    metrics_inc(r->replans[reason], 0, 1);
    enqueue_again(q, complete);
}

void replan_blame(struct request *q, struct peer *p)
{
    scheduler_avoid(&q->sched, p->holder);
    peer_failed(p);
}

/* ------------------------------------------------- unheard, forgotten legs */

/* Whether the leg in message *said is not acknowledged; sets *said to 0 once it is. */
static bool is_unheard(const struct peer *p, uint32_t *said)
{
    if (!p || p->heard >= *said)
        *said = 0;
    return *said;
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/*
 * Whether the worker received the leg, does not have it any more, and sent no end. An end is always sent
 * before the heartbeat without the leg (worker/link.h), so no end is on its way.
 */
static bool is_forgotten(const struct peer *p, uint32_t leg, uint64_t counter)
{
    return p && leg && p->legs_told && leg <= p->taken &&
           !(p->n_legs && bsearch(&counter, p->legs, p->n_legs, sizeof(counter), by_value));
}

/* Blames the workers that lost their leg, then re-plans q. */
static void give_elsewhere(struct request *q, bool prefill, bool decode, const char *what)
{
    char text[160];
    snprintf(text, sizeof(text), "worker %s %s a leg", (prefill ? q->prefill : q->decode)->name, what);
    if (prefill)
        replan_blame(q, q->prefill);
    if (decode)
        replan_blame(q, q->decode);
    replan_request(q, REPLAN_UNHEARD, text);
}

static void check_legs(struct request *q, uint64_t now, uint64_t patience)
{
    bool prefill = is_forgotten(q->prefill, q->prefill_done ? 0 : q->prefill_leg, q->counter);
    bool decode = is_forgotten(q->decode, q->decode_leg, q->counter);
    if (prefill || decode) {
        give_elsewhere(q, prefill, decode, "has forgotten");
        return;
    }
    prefill = is_unheard(q->prefill, &q->prefill_said);
    decode = is_unheard(q->decode, &q->decode_said);
    if ((prefill && q->prefill_said > peer_n_sent(q->prefill)) || (decode && q->decode_said > peer_n_sent(q->decode)))
        q->said_ns = now; /* it still waits in this process */
    if ((prefill || decode) && now > q->said_ns + patience)
        give_elsewhere(q, prefill, decode, "did not acknowledge");
}

void replan_tick(struct router *r, uint64_t now)
{
    uint64_t patience = (uint64_t)r->options.dispatch_ms * NS_PER_MS;
    for (uint32_t i = 0; i < r->n_peers; i++)
        if (r->peers[i]->legs_told && r->peers[i]->n_legs)
            qsort(r->peers[i]->legs, r->peers[i]->n_legs, sizeof(*r->peers[i]->legs), by_value);
    struct request *q, *next;
    TAILQ_FOREACH_SAFE (q, &r->requests, in_router, next) {
        if (q->state == REQUEST_PLACED)
            check_legs(q, now, patience);
    }
    for (uint32_t i = 0; i < r->n_peers; i++)
        r->peers[i]->legs_told = false;
}

void replan_metrics(struct router *r)
{
    static const struct metric_info INFO = {METRIC_COUNTER, "tandem_replans_total", "requests planned anew"};
    for (int i = 0; i < REPLAN_REASONS; i++) {
        char labels[32];
        snprintf(labels, sizeof(labels), "reason=\"%s\"", REASONS[i]);
        r->replans[i] = metrics_add(r->metrics, &INFO, 1, labels);
    }
}
