#include "cli/ask.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/ask/ask_calls.h"
#include "proto/ask/ask_params.h"

/* ----------------------------------------------------------------- answer */

/* [[id, log-probability], ...], most probable first. */
static json_t *top_json(const Tandem__V1__TokenEvent *t)
{
    json_t *list = json_array();
    for (size_t i = 0; i < t->n_top_ids && i < t->n_top_logprobs; i++)
        json_array_append_new(list, json_pack("[i, f]", (int)t->top_ids[i], (double)t->top_logprobs[i]));
    return list;
}

static void add_tokens(const Tandem__V1__GenerateResponse *m, json_t *ids, json_t *logprobs, json_t *top_logprobs)
{
    for (size_t i = 0; i < m->n_tokens; i++) {
        json_array_append_new(ids, json_integer(m->tokens[i]->id));
        json_array_append_new(logprobs, json_real((double)m->tokens[i]->logprob));
        json_array_append_new(top_logprobs, top_json(m->tokens[i]));
    }
}

static void on_message(struct rpc_call *call, const ProtobufCMessage *base)
{
    struct ask *a = rpc_call_user(call);
    const Tandem__V1__GenerateResponse *m = (const Tandem__V1__GenerateResponse *)base;
    struct ask_choice *c = m->choice && m->choice <= a->n_more ? &a->more[m->choice - 1] : NULL;
    if (m->choice && !c)
        return; /* a choice that was not asked for */
    Tandem__V1__GenerateEnd **end = c ? &c->end : &a->end;
    bytes_append(c ? &c->text : &a->text, m->text.data, m->text.len);
    bytes_append(c ? &c->reasoning : &a->reasoning, m->reasoning.data, m->reasoning.len);
    ask_calls_add(c ? &c->calls : &a->calls, m);
    add_tokens(m, c ? c->ids : a->ids, c ? c->logprobs : a->logprobs, c ? c->top_logprobs : a->top_logprobs);
    if (a->on_text && m->text.len && !c)
        a->on_text(a, m->text.data, m->text.len);
    if (m->end && !*end) {
        Tandem__V1__GenerateResponse *whole = (Tandem__V1__GenerateResponse *)rpc_call_take(call, base);
        *end = whole->end;
        whole->end = NULL;
        tandem__v1__generate_response__free_unpacked(whole, NULL);
    }
}

static void on_end(struct rpc_call *call, enum rpc_code code, const char *text)
{
    struct ask *a = rpc_call_user(call);
    a->code = code;
    a->retry_after_ms = rpc_call_retry_after_ms(call);
    snprintf(a->error, sizeof(a->error), "%s", text ? text : "");
    bool whole = a->end != NULL;
    for (uint32_t i = 0; i < a->n_more; i++)
        whole &= a->more[i].end != NULL;
    if (!code && !whole) {
        a->code = RPC_INTERNAL;
        snprintf(a->error, sizeof(a->error), "the stream ended without its last message");
    }
    a->on_done(a);
}

struct ask *ask_start(struct rpc_client *c, json_t *request, void (*on_text)(struct ask *, const void *, size_t),
                      void (*on_done)(struct ask *), void *user)
{
    struct ask_message *b = NULL;
    struct td_error e = {{0}};
    struct ask *a = mem_zalloc(sizeof(*a));
    *a = (struct ask){.request = request, .on_text = on_text, .on_done = on_done, .user = user};
    a->ids = json_array();
    a->logprobs = json_array();
    a->top_logprobs = json_array();
    if (on_text && json_object_get(request, "messages"))
        json_object_set_new(request, "raw_answer", json_true());
    bool bad = ask_message_make(request, &b, &e) != TD_OK;
    uint32_t n_choices = bad ? 1 : ask_message_get(b)->sampling->n;
    a->n_more = n_choices > 1 && n_choices <= ASK_MAX_CHOICES ? n_choices - 1 : 0;
    for (uint32_t i = 0; i < a->n_more; i++)
        a->more[i] = (struct ask_choice){.ids = json_array(), .logprobs = json_array(), .top_logprobs = json_array()};
    const struct rpc_call_params params = {.path = "/tandem.v1.Tandem/Generate",
                                           .response = &tandem__v1__generate_response__descriptor,
                                           .handlers = {.on_message = on_message, .on_end = on_end},
                                           .user = a};
    struct rpc_call *call = NULL; /* not a member of the ask: on_done may free the ask from here on */
    if (bad || rpc_call_start(c, &params, &call)) {
        a->code = bad ? RPC_INVALID_ARGUMENT : RPC_UNAVAILABLE;
        snprintf(a->error, sizeof(a->error), "%s", bad ? e.text : "the call could not be started");
        ask_message_free(b);
        on_done(a);
        return a;
    }
    rpc_call_send(call, &ask_message_get(b)->base);
    rpc_call_close_send(call);
    rpc_call_unref(call);
    ask_message_free(b);
    return a;
}

void ask_free(struct ask *a)
{
    json_decref(a->request);
    json_decref(a->ids);
    json_decref(a->logprobs);
    json_decref(a->top_logprobs);
    for (uint32_t i = 0; i < a->n_more; i++) {
        json_decref(a->more[i].ids);
        json_decref(a->more[i].logprobs);
        json_decref(a->more[i].top_logprobs);
        bytes_free(&a->more[i].text);
        bytes_free(&a->more[i].reasoning);
        json_decref(a->more[i].calls);
        if (a->more[i].end)
            tandem__v1__generate_end__free_unpacked(a->more[i].end, NULL);
    }
    bytes_free(&a->text);
    bytes_free(&a->reasoning);
    json_decref(a->calls);
    if (a->end)
        tandem__v1__generate_end__free_unpacked(a->end, NULL);
    free(a);
}

static json_t *usage_json(const Tandem__V1__Usage *u)
{
    const Tandem__V1__CachedTokens *c = u->cached_tokens;
    return json_pack("{s:i,s:i,s:{s:i,s:i,s:i,s:i}}", "prompt_tokens", (int)u->prompt_tokens, "completion_tokens",
                     (int)u->completion_tokens, "cached_tokens", "worker", (int)(c ? c->worker : 0), "peer",
                     (int)(c ? c->peer : 0), "dram", (int)(c ? c->dram : 0), "ssd", (int)(c ? c->ssd : 0));
}

static json_t *timing_json(const Tandem__V1__Timing *t)
{
    return json_pack("{s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f}", "tokenize", t->tokenize, "queue",
                     t->queue, "prefix_load", t->prefix_load, "prefill", t->prefill, "transfer", t->transfer,
                     "exposed_transfer", t->exposed_transfer, "decode_wait", t->decode_wait, "decode", t->decode,
                     "residual", t->residual, "ttft", t->ttft, "tpot", t->tpot, "total", t->total, "stalled",
                     t->stalled);
}

/* Adds ranks and top ids of the prompt's tokens. The first token has null, since nothing predicts it. */
static void add_places(json_t *o, const Tandem__V1__GenerateEnd *e)
{
    json_t *ranks = json_array(), *all = json_array();
    size_t n = e->n_prompt_ranks, n_top = n > 1 ? e->n_prompt_top_ids / (n - 1) : 0;
    for (size_t t = 0; t < n; t++) {
        json_t *top = t ? json_array() : json_null();
        for (size_t i = (t - 1) * n_top; t && i < t * n_top; i++)
            json_array_append_new(top,
                                  json_pack("[i,f]", (int)e->prompt_top_ids[i], (double)e->prompt_top_logprobs[i]));
        json_array_append_new(all, top);
        json_array_append_new(ranks, t ? json_integer((json_int_t)e->prompt_ranks[t]) : json_null());
    }
    json_object_set_new(o, "prompt_ranks", ranks);
    if (n_top)
        json_object_set(o, "prompt_top_logprobs", all);
    json_decref(all);
}

static void add_end(json_t *o, const Tandem__V1__GenerateEnd *e)
{
    json_object_set_new(o, "finish_reason", ask_text_json(e->finish_reason.data, e->finish_reason.len));
    if (e->kv_codec.len)
        json_object_set_new(o, "kv_codec", ask_text_json(e->kv_codec.data, e->kv_codec.len));
    if (e->usage)
        json_object_set_new(o, "usage", usage_json(e->usage));
    if (e->timing)
        json_object_set_new(o, "timing", timing_json(e->timing));
    if (e->placement) {
        json_t *p = json_object();
        json_object_set_new(p, "prefill", ask_text_json(e->placement->prefill.data, e->placement->prefill.len));
        json_object_set_new(p, "decode", ask_text_json(e->placement->decode.data, e->placement->decode.len));
        json_object_set_new(p, "plan", ask_text_json(e->placement->plan.data, e->placement->plan.len));
        json_object_set_new(o, "placement", p);
    }
    if (e->predicted)
        json_object_set_new(o, "predicted",
                            json_pack("{s:f,s:f}", "ttft_ms", e->predicted->ttft_ms, "tpot_ms", e->predicted->tpot_ms));
    json_object_set_new(o, "seed", ask_seed_json(e->seed));
    json_object_set_new(o, "replans", json_integer((json_int_t)e->replans));
    if (e->n_prompt_logprobs) {
        json_t *list = json_array();
        for (size_t i = 0; i < e->n_prompt_logprobs; i++)
            json_array_append_new(list, isnan(e->prompt_logprobs[i]) ? json_null()
                                                                     : json_real((double)e->prompt_logprobs[i]));
        json_object_set_new(o, "prompt_logprobs", list);
        add_places(o, e);
    }
}

static void add_choice(json_t *o, const struct ask *a, const struct bytes *text, const struct bytes *reasoning,
                       json_t *calls, json_t *ids, json_t *logprobs, json_t *top_logprobs,
                       const Tandem__V1__GenerateEnd *end)
{
    json_object_set(o, "token_ids", ids);
    json_object_set_new(o, "text", ask_text_json(text->data, text->len));
    if (reasoning->len)
        json_object_set_new(o, "reasoning", ask_text_json(reasoning->data, reasoning->len));
    if (calls)
        json_object_set(o, "tool_calls", calls);
    if (json_is_true(json_object_get(a->request, "logprobs")))
        json_object_set(o, "logprobs", logprobs);
    if (json_object_get(a->request, "top_logprobs"))
        json_object_set(o, "top_logprobs", top_logprobs);
    add_end(o, end);
}

json_t *ask_result(const struct ask *a)
{
    json_t *o = json_object(), *id = json_object_get(a->request, "id");
    if (id)
        json_object_set(o, "id", id);
    if (a->code) {
        json_t *e = json_object();
        json_object_set_new(e, "code", json_string(rpc_code_name(a->code)));
        json_object_set_new(e, "message", ask_text_json(a->error, strlen(a->error)));
        if (a->retry_after_ms)
            json_object_set_new(e, "retry_after_ms", json_integer(a->retry_after_ms));
        json_object_set_new(o, "error", e);
        return o;
    }
    add_choice(o, a, &a->text, &a->reasoning, a->calls, a->ids, a->logprobs, a->top_logprobs, a->end);
    if (!a->n_more)
        return o;
    json_t *choices = json_array();
    for (uint32_t i = 0; i < a->n_more; i++) {
        const struct ask_choice *c = &a->more[i];
        json_t *one = json_object();
        add_choice(one, a, &c->text, &c->reasoning, c->calls, c->ids, c->logprobs, c->top_logprobs, c->end);
        json_array_append_new(choices, one);
    }
    json_object_set_new(o, "choices", choices);
    return o;
}
