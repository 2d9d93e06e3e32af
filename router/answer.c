/*
 * What the client gets: tokens become text, stop strings are found, and the last message says how it went.
 *
 * A token's text is held back while it may begin a stop string, and the token with it: tokens beyond a stop
 * are neither shown nor counted. All of this state belongs to the request, not to a placement, so a re-plan
 * continues where the last token left it.
 *
 * A client that reads slowly fills its call's queue (--send-bytes). Then tokens stay in the request, which
 * keeps them anyway, and are sent later, many in one message, so that the queue's bytes hold tokens and not
 * message overhead. At the end everything is queued. A client that takes nothing from a full queue is cut off
 * after a time (router.c). Rejected: to cut off a client that leaves a token unread for some time. HTTP/2
 * window updates come for half a window at a time, so a client that reads 50 tokens a second seems to read
 * nothing for seconds.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "router/router_internal.h"

enum {
    MAX_SHOWN = 1024,  /* tokens in one message */
    MAX_PARTS = 64,    /* the same if parts are told apart: such a message is never too large */
    KEEP_BYTES = 8192, /* with more than this in the call's queue, tokens wait to be sent together... */
    KEEP_TOKENS = 32,  /* ...until there are this many */
};

double answer_ms(uint64_t ns)
{
    return (double)ns * 1e-6;
}

static Tandem__V1__GenerateEnd end_message(void)
{
    return (Tandem__V1__GenerateEnd)TANDEM__V1__GENERATE_END__INIT;
}

static enum td_status send(struct request *q, Tandem__V1__GenerateResponse *m, bool last)
{
    Tandem__V1__GenerateBegin begin = TANDEM__V1__GENERATE_BEGIN__INIT;
    m->choice = q->p.sampling.choice;
    if (!q->told_begin) {
        begin.model = q->p.lora.len ? (ProtobufCBinaryData){q->p.lora.len, (uint8_t *)q->p.lora.data}
                                    : rpc_data(q->router->model_name);
        begin.prompt_tokens = q->p.sampling.n_prompt;
        m->begin = &begin;
    }
    enum td_status s = last ? rpc_call_send_over(q->call, &m->base) : rpc_call_send(q->call, &m->base);
    q->told_begin |= !s;
    return s;
}

/* Sends the prompt's text, once, before everything else. */
static enum td_status show_echo(struct request *q, bool last)
{
    Tandem__V1__GenerateResponse m = TANDEM__V1__GENERATE_RESPONSE__INIT;
    m.text = (ProtobufCBinaryData){q->p.echo.len, (uint8_t *)q->p.echo.data};
    enum td_status s = m.text.len ? send(q, &m, last) : TD_OK;
    if (s != TD_ERR_NO_SPACE)
        bytes_free(&q->p.echo);
    return s;
}

/* What tokens stand for, as fields of a message: one entry for each id that was added. */
struct pieces {
    struct bytes bytes;
    ProtobufCBinaryData *list; /* until pieces_end(), data is an offset in bytes */
    size_t n, cap;
};

static void pieces_add(struct pieces *p, const struct request *q, const uint32_t *ids, size_t n)
{
    for (size_t i = 0; i < n && q->p.want_pieces; i++) {
        size_t from = p->bytes.len;
        token_stream_piece(q->detok, ids[i], &p->bytes);
        p->list = MEM_ROOM(p->list, p->n, p->cap, 16);
        p->list[p->n++] = (ProtobufCBinaryData){p->bytes.len - from, (uint8_t *)from};
    }
}

static void pieces_end(struct pieces *p)
{
    for (size_t i = 0; i < p->n; i++)
        p->list[i].data = (uint8_t *)p->bytes.data + (uintptr_t)p->list[i].data;
}

static void pieces_free(struct pieces *p)
{
    bytes_free(&p->bytes);
    free(p->list);
}

/*
 * Sends one message: text [shown, upto) and the next `count` tokens; end: NULL or the end of the answer.
 * TD_ERR_NO_SPACE: the queue is full and nothing was sent. TD_ERR_INVALID with more than one token: the
 * message would be too large, send fewer.
 */
static enum td_status show_part(struct request *q, uint64_t upto, uint32_t count, Tandem__V1__GenerateEnd *end,
                                bool last)
{
    Tandem__V1__GenerateResponse m = TANDEM__V1__GENERATE_RESPONSE__INIT;
    Tandem__V1__TokenEvent *events = mem_array(count, sizeof(*events)), **list = mem_array(count, sizeof(*list));
    struct pieces pieces = {{0}};
    for (uint32_t i = 0; i < count; i++) {
        tandem__v1__token_event__init(&events[i]);
        const struct shown_token *t = &q->tokens[q->n_told + i];
        events[i].id = t->id;
        events[i].logprob = q->p.want_logprobs ? t->logprob : 0;
        events[i].n_top_ids = events[i].n_top_logprobs = t->n_top;
        events[i].top_ids = t->top_ids;
        events[i].top_logprobs = t->top_logprobs;
        pieces_add(&pieces, q, &t->id, 1);
        pieces_add(&pieces, q, t->top_ids, t->n_top);
        list[i] = &events[i];
    }
    pieces_end(&pieces);
    for (uint32_t i = 0, at = 0; i < count && pieces.n; i++) {
        events[i].piece = pieces.list[at];
        events[i].top_pieces = &pieces.list[at + 1];
        events[i].n_top_pieces = events[i].n_top_ids;
        at += 1 + (uint32_t)events[i].n_top_ids;
    }
    struct parts parts;
    parts_fill(q, upto, end != NULL, &m, &parts);
    if (q->p.want_ids || q->p.want_logprobs || q->p.sampling.top_logprobs) {
        m.n_tokens = count;
        m.tokens = list;
    }
    m.end = end;
    enum td_status s = TD_OK;
    if (end && !q->stopped_by && q->reply && reply_calls(q->reply) && end->finish_reason.data[0] == 's')
        end->finish_reason = rpc_data("tool_calls");
    if (m.text.len || m.reasoning.len || m.n_tool_calls || m.n_tokens || end)
        s = send(q, &m, last);
    if (s != TD_ERR_NO_SPACE && !(s == TD_ERR_INVALID && count > 1)) {
        q->n_told += count;
        if (q->p.key)
            keys_charge_output(q->router->keys, q->p.key, count);
        q->shown = upto;
    }
    parts_free(q, &parts, s != TD_ERR_NO_SPACE && !(s == TD_ERR_INVALID && count > 1));
    free(events);
    free(list);
    pieces_free(&pieces);
    return s;
}

/* Sends text [shown, upto) and its tokens as far as the queue has room. last: queue it even without room. */
static void show(struct request *q, uint64_t upto, bool all_tokens, bool last)
{
    uint32_t n = q->n_told;
    while (n < q->n_tokens && (all_tokens || q->tokens[n].text_start < upto || !q->p.n_stop))
        n++;
    uint32_t most = q->reply ? MAX_PARTS : MAX_SHOWN; /* halved while a message would be too large */
    enum td_status s = show_echo(q, last);
    while (s != TD_ERR_NO_SPACE && (q->n_told < n || q->shown < upto)) {
        uint32_t count = n - q->n_told < most ? n - q->n_told : most;
        uint64_t end = q->n_told + count < n ? q->tokens[q->n_told + count].text_start : upto;
        end = end > upto ? upto : end < q->shown ? q->shown : end;
        s = show_part(q, end, count, NULL, last);
        most = s == TD_ERR_INVALID && count > 1 ? count / 2 : most;
    }
}

/* Tokens that this router gave to the client. */
static uint32_t told_here(const struct request *q)
{
    return q->n_told - q->p.n_resumed;
}

static double tpot_ms(const struct request *q)
{
    return told_here(q) > 1 ? answer_ms(q->last_token_ns - q->first_token_ns) / (told_here(q) - 1) : 0;
}

static void fill_timing(const struct request *q, Tandem__V1__Timing *t)
{
    uint64_t now = clock_now(&q->router->clock);
    t->tokenize = answer_ms(q->tokenized_ns - q->arrived_ns);
    t->queue = q->times_ms[PART_QUEUE] + answer_ms((q->placed_ns ? q->placed_ns : now) - q->tokenized_ns);
    t->stalled = q->stalled_ms;
    t->prefix_load = q->times_ms[PART_LOAD];
    t->prefill = q->times_ms[PART_PREFILL];
    t->transfer = q->times_ms[PART_TRANSFER];
    t->exposed_transfer = q->times_ms[PART_EXPOSED];
    t->decode_wait = q->times_ms[PART_WAIT];
    t->decode = q->times_ms[PART_DECODE];
    t->ttft = q->first_token_ns ? answer_ms(q->first_token_ns - q->arrived_ns) : 0;
    t->tpot = tpot_ms(q);
    t->total = answer_ms(now - q->arrived_ns);
    t->residual = t->total - (t->tokenize + t->queue + t->prefix_load + t->prefill + t->exposed_transfer +
                              t->decode_wait + t->decode + t->stalled);
}

static void observe(struct request *q)
{
    struct router *r = q->router;
    double ttft = answer_ms(q->first_token_ns - q->arrived_ns);
    metrics_inc(r->counters, ROUTER_FINISHED, 1);
    if (!told_here(q))
        return;
    if (!q->p.n_resumed) { /* else its first token came long ago */
        metrics_observe_ns(r->counters, ROUTER_TTFT, q->first_token_ns - q->arrived_ns);
        metrics_observe_ns(r->counters, ROUTER_TTFT_ERROR, (uint64_t)(fabs(ttft - q->predicted_ttft_ms) * 1e6));
    }
    if (told_here(q) > 1)
        metrics_observe_ns(r->counters, ROUTER_TPOT, (uint64_t)(tpot_ms(q) * 1e6));
}

/* A token, or the end, ends the pause that a lost placement caused. */
static void end_stall(struct request *q)
{
    if (!q->stall_ns)
        return;
    uint64_t ns = clock_now(&q->router->clock) - q->stall_ns;
    q->stalled_ms += answer_ms(ns);
    q->stall_ns = 0;
    metrics_observe_ns(q->router->counters, ROUTER_STALLED, ns);
}

/*
 * Sends the rest and the end of the answer, then frees q. upto: bytes of q->text that belong to the answer.
 */
static void end_answer(struct request *q, const char *reason, uint64_t upto, bool all_tokens)
{
    Tandem__V1__GenerateEnd end = end_message();
    Tandem__V1__Usage usage = TANDEM__V1__USAGE__INIT;
    Tandem__V1__CachedTokens cached = TANDEM__V1__CACHED_TOKENS__INIT;
    Tandem__V1__Timing timing = TANDEM__V1__TIMING__INIT;
    Tandem__V1__Placement placement = TANDEM__V1__PLACEMENT__INIT;
    Tandem__V1__Predicted predicted = TANDEM__V1__PREDICTED__INIT;
    struct pieces pieces = {{0}};
    choices_begin(q);
    show(q, upto, all_tokens, true);
    end_stall(q);
    replan_times(q, false);
    fill_timing(q, &timing);
    cached.worker = q->cached_worker;
    cached.peer = q->cached_peer;
    cached.dram = q->cached_dram;
    cached.ssd = q->cached_ssd;
    usage.prompt_tokens = q->p.sampling.n_prompt;
    usage.completion_tokens = q->n_told;
    usage.cached_tokens = &cached;
    placement.prefill = rpc_data(q->prefill_name);
    placement.decode = rpc_data(q->decode_name);
    placement.plan = rpc_data(q->placed_ns ? plan_name(q->plan.kind) : "");
    predicted.ttft_ms = q->predicted_ttft_ms;
    predicted.tpot_ms = q->predicted_tpot_ms;
    end.finish_reason = rpc_data(reason);
    end.usage = &usage;
    end.timing = &timing;
    end.seed = q->p.sampling.seed;
    end.placement = &placement;
    end.predicted = &predicted;
    end.prompt_logprobs = q->prompt.logprobs;
    end.prompt_ranks = q->prompt.ranks;
    end.n_prompt_logprobs = end.n_prompt_ranks = q->prompt.n;
    if (q->p.want_ids) {
        end.prompt_ids = q->p.ids;
        end.n_prompt_ids = q->prompt.n;
    }
    end.prompt_top_ids = q->prompt.top_ids;
    end.prompt_top_logprobs = q->prompt.top_logprobs;
    end.n_prompt_top_ids = end.n_prompt_top_logprobs = q->prompt.n_top;
    pieces_add(&pieces, q, q->p.ids, q->prompt.n < q->p.n_ids ? q->prompt.n : q->p.n_ids);
    pieces_add(&pieces, q, q->prompt.top_ids, q->prompt.n_top);
    pieces_end(&pieces);
    if (pieces.n && pieces.n == q->prompt.n + q->prompt.n_top) {
        end.prompt_pieces = pieces.list;
        end.prompt_top_pieces = pieces.list + q->prompt.n;
        end.n_prompt_pieces = q->prompt.n;
        end.n_prompt_top_pieces = q->prompt.n_top;
    }
    end.replans = q->n_replans;
    if (q->cached_worker + q->cached_peer + q->cached_dram + q->cached_ssd)
        end.kv_codec = rpc_data(q->kv_codec);
    if (q->stopped_by)
        end.stop_string =
            (ProtobufCBinaryData){q->p.stop[q->stopped_by - 1].len, (uint8_t *)q->p.stop[q->stopped_by - 1].data};
    end.request_id = (ProtobufCBinaryData){q->p.label.len, (uint8_t *)q->p.label.data};
    show_part(q, q->shown, 0, &end, true);
    pieces_free(&pieces);
    char req[LOG_WORD_BYTES];
    log_debug(&q->router->log, "request finished req=%s reason=%s tokens=%u", request_log_id(q, req), reason,
              q->n_told);
    metrics_inc(q->router->counters, ROUTER_TOKENS, told_here(q));
    observe(q);
    if (choices_answered(q))
        rpc_call_finish(q->call, RPC_OK, "", 0);
    q->answered = true;
    request_drop(q);
}

/* ----------------------------------------------------------------- tokens */

/* Offset of the first stop string that ends after `from`, which becomes q->stopped_by; UINT64_MAX: there is
 * none. */
static uint64_t find_stop(struct request *q, uint64_t from)
{
    uint64_t best = UINT64_MAX;
    for (uint32_t i = 0; i < q->p.n_stop; i++) {
        const struct bytes *stop = &q->p.stop[i];
        uint64_t start = from >= stop->len ? from - stop->len + 1 : 0;
        const char *at = memmem(q->text.data + start, q->text.len - start, stop->data, stop->len);
        if (at && (uint64_t)(at - q->text.data) < best) {
            best = (uint64_t)(at - q->text.data);
            q->stopped_by = i + 1;
        }
    }
    return best;
}

/*
 * The first stop string in text that is new from `before` on. Up to min_tokens a stop string is ordinary
 * text. Older text is not looked at again, whether the client has read it or not.
 */
static uint64_t find_new_stop(struct request *q, uint64_t before)
{
    return q->n_tokens > q->p.sampling.min_tokens ? find_stop(q, before) : UINT64_MAX;
}

/* Ends the answer at the stop string that was found at `stop`. */
static void end_at_stop(struct request *q, uint64_t stop)
{
    end_answer(q, "stop", q->p.include_stop ? stop + q->p.stop[q->stopped_by - 1].len : stop, false);
}

/* Number of bytes at the end of the text that may be the beginning of a stop string. */
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

/* Sends what can't belong to a stop string any more. */
static void show_certain(struct request *q)
{
    uint64_t upto = q->text.len - held_back(q);
    show(q, upto > q->shown ? upto : q->shown, false, false);
}

static void keep_token(struct request *q, struct shown_token token)
{
    q->tokens = MEM_ROOM(q->tokens, q->n_tokens, q->cap_tokens, 32);
    token.text_start = q->text.len;
    q->tokens[q->n_tokens++] = token;
}

enum td_status answer_resume(struct request *q, struct td_error *e)
{
    uint64_t before = q->p.resumed_bytes ? q->p.echo.len : 0, shown = q->p.resumed_bytes - before;
    for (uint32_t i = 0; i < q->p.n_resumed; i++) {
        keep_token(q, (struct shown_token){.id = q->p.ids[q->p.sampling.n_prompt + i]});
        token_stream_push(q->detok, q->tokens[i].id, &q->text);
    }
    if (q->p.resumed_bytes < before || (q->reply ? !parts_resume(q, shown, &shown) : shown > q->text.len))
        return td_fail(e, TD_ERR_INVALID, "resume.text_bytes: %llu, but the echo has %zu, and the tokens have %zu",
                       (unsigned long long)q->p.resumed_bytes, q->p.echo.len, q->text.len);
    if (shown < q->text.len && ((uint8_t)q->text.data[shown] & 0xc0) == 0x80)
        return td_fail(e, TD_ERR_INVALID, "resume.text_bytes: %llu is within a character",
                       (unsigned long long)q->p.resumed_bytes);
    if (q->p.resumed_bytes)
        bytes_free(&q->p.echo);
    q->n_told = q->n_tokens;
    q->shown = shown;
    return TD_OK;
}

bool answer_token(struct request *q, struct shown_token token)
{
    struct router *r = q->router;
    uint64_t before = q->text.len, now = clock_now(&r->clock);
    keep_token(q, token);
    token_stream_push(q->detok, token.id, &q->text);
    q->last_token_ns = now;
    scheduler_generated(&q->sched, q->n_tokens - q->n_before);
    if (q->n_tokens - q->n_before == 2)
        scheduler_second_token(r->scheduler, &q->sched, now);
    if (!q->begun_token_ns) {
        char req[LOG_WORD_BYTES];
        log_debug(&r->log, "first token req=%s", request_log_id(q, req));
        q->begun_token_ns = now;
        q->first_token_ns = q->first_token_ns ? q->first_token_ns : now;
        end_stall(q);
    }
    uint64_t stop = find_new_stop(q, before);
    if (stop != UINT64_MAX) {
        end_at_stop(q, stop);
        return true;
    }
    if (q->n_tokens - q->n_told >= KEEP_TOKENS || rpc_call_queued_bytes(q->call) <= KEEP_BYTES)
        show_certain(q);
    return false;
}

void answer_more(struct request *q)
{
    if (q->n_told < q->n_tokens || q->shown < q->text.len)
        show_certain(q);
}

void answer_finish(struct request *q, bool length)
{
    uint64_t before = q->text.len;
    token_stream_flush(q->detok, &q->text);
    uint64_t stop = find_new_stop(q, before);
    if (stop != UINT64_MAX)
        end_at_stop(q, stop);
    else
        end_answer(q, length ? "length" : "stop", q->text.len, true);
}
