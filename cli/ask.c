#include "cli/ask.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static ProtobufCBinaryData bytes_of(json_t *v)
{
    return (ProtobufCBinaryData){json_string_length(v), (uint8_t *)(uintptr_t)json_string_value(v)};
}

/* ---------------------------------------------------------------- request */

struct ask_message { /* arrays that the message borrows until it is packed */
    Tandem__V1__GenerateRequest m;
    Tandem__V1__TokenPrompt tokens;
    Tandem__V1__ChatPrompt chat;
    Tandem__V1__ChatMessage *messages, **message_list;
    Tandem__V1__Sampling sampling;
    Tandem__V1__LogitBias *bias, **bias_list;
    Tandem__V1__Stopping stopping;
    Tandem__V1__Slo slo;
    char **dumps; /* JSON as text */
    size_t n_dumps;
    struct td_error error;
    bool bad;
};

static void complain(struct ask_message *b, const char *member, const char *what)
{
    if (!b->bad)
        td_fail(&b->error, TD_ERR_INVALID, "%s: %s", member, what);
    b->bad = true;
}

static uint32_t *id_list(struct ask_message *b, json_t *list, const char *member, size_t *n_out)
{
    size_t n = json_array_size(list), i;
    uint32_t *ids = mem_array(n, sizeof(*ids));
    json_t *v;
    if (!json_is_array(list))
        complain(b, member, "not a list");
    json_array_foreach(list, i, v)
    {
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) > UINT32_MAX)
            complain(b, member, "holds something else than token ids");
        else
            ids[i] = (uint32_t)json_integer_value(v);
    }
    *n_out = n;
    return ids;
}

/* A list or an object of the request, as text. */
static ProtobufCBinaryData dumped(struct ask_message *b, json_t *v)
{
    b->dumps = mem_resize(b->dumps, b->n_dumps + 1, sizeof(*b->dumps));
    char *text = json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY);
    b->dumps[b->n_dumps++] = text;
    return (ProtobufCBinaryData){strlen(text), (uint8_t *)text};
}

static void build_chat(struct ask_message *b, json_t *r, json_t *list)
{
    size_t n = json_array_size(list), i;
    json_t *v, *tools = json_object_get(r, "tools"), *variables = json_object_get(r, "variables");
    tandem__v1__chat_prompt__init(&b->chat);
    b->messages = mem_array(n, sizeof(*b->messages));
    b->message_list = mem_array(n, sizeof(*b->message_list));
    json_array_foreach(list, i, v)
    {
        bool plain = json_object_size(v) == 2 && json_is_string(json_object_get(v, "role")) &&
                     json_is_string(json_object_get(v, "content"));
        tandem__v1__chat_message__init(&b->messages[i]);
        if (plain) {
            b->messages[i].role = bytes_of(json_object_get(v, "role"));
            b->messages[i].content = bytes_of(json_object_get(v, "content"));
        } else {
            b->messages[i].json = dumped(b, v);
        }
        b->message_list[i] = &b->messages[i];
    }
    b->chat.n_messages = n;
    b->chat.messages = b->message_list;
    if (tools)
        b->chat.tools = dumped(b, tools);
    if (variables)
        b->chat.variables = dumped(b, variables);
    b->chat.no_generation_prompt = json_is_false(json_object_get(r, "add_generation_prompt"));
    b->m.prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_CHAT;
    b->m.chat = &b->chat;
}

static void build_prompt(struct ask_message *b, json_t *r)
{
    json_t *ids = json_object_get(r, "prompt_ids"), *messages = json_object_get(r, "messages"),
           *text = json_object_get(r, "prompt");
    if (ids) {
        tandem__v1__token_prompt__init(&b->tokens);
        b->tokens.ids = id_list(b, ids, "prompt_ids", &b->tokens.n_ids);
        b->m.prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_TOKENS;
        b->m.tokens = &b->tokens;
    } else if (messages) {
        build_chat(b, r, messages);
    } else if (json_is_string(text)) {
        b->m.prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_TEXT;
        b->m.text = bytes_of(text);
        b->m.has_add_special_tokens_case = TANDEM__V1__GENERATE_REQUEST__HAS_ADD_SPECIAL_TOKENS_ADD_SPECIAL_TOKENS;
        b->m.add_special_tokens = !json_is_false(json_object_get(r, "add_special_tokens"));
    } else {
        complain(b, "prompt", "none of prompt, prompt_ids, messages is there");
    }
}

static uint64_t whole(struct ask_message *b, json_t *r, const char *member, double max)
{
    json_t *v = json_object_get(r, member);
    if (v && (!json_is_integer(v) || json_integer_value(v) < 0 || (double)json_integer_value(v) > max))
        complain(b, member, "not a whole number in range");
    return b->bad ? 0 : (uint64_t)json_integer_value(v);
}

/* A router that does not know fractions yet gets the limit rounded up: rounded down, a short one would be none. */
static uint32_t rounded_up(double ms)
{
    return (uint32_t)fmin(ceil(ms), UINT32_MAX);
}

void ask_limits(Tandem__V1__Slo *slo, double ttft_ms, double tpot_ms)
{
    slo->ttft_ms = rounded_up(ttft_ms);
    slo->tpot_ms = rounded_up(tpot_ms);
    slo->exact_ttft_ms = ttft_ms;
    slo->exact_tpot_ms = tpot_ms;
}

/* A limit of time, with fractions. */
static double limit_ms(struct ask_message *b, json_t *r, const char *member)
{
    json_t *v = json_object_get(r, member);
    double ms = json_number_value(v);
    if (v && (!json_is_number(v) || !(ms >= 0 && ms <= 1e12) || (ms > 0 && ms < OPTIONS_LEAST_MS)))
        complain(b, member, "not 0, nor milliseconds from 0.001 on");
    return b->bad ? 0 : ms;
}

static float real(struct ask_message *b, json_t *r, const char *member)
{
    json_t *v = json_object_get(r, member);
    if (v && !json_is_number(v))
        complain(b, member, "not a number");
    return (float)json_number_value(v);
}

static void build_bias(struct ask_message *b, json_t *bias)
{
    size_t n = json_object_size(bias), i = 0;
    const char *key;
    json_t *v;
    b->bias = mem_array(n, sizeof(*b->bias));
    b->bias_list = mem_array(n, sizeof(*b->bias_list));
    json_object_foreach(bias, key, v)
    {
        tandem__v1__logit_bias__init(&b->bias[i]);
        b->bias[i].id = (uint32_t)strtoul(key, NULL, 10);
        b->bias[i].bias = (float)json_number_value(v);
        b->bias_list[i] = &b->bias[i];
        i++;
    }
    b->sampling.n_logit_bias = n;
    b->sampling.logit_bias = b->bias_list;
}

static void build_sampling(struct ask_message *b, json_t *r)
{
    Tandem__V1__Sampling *s = &b->sampling;
    tandem__v1__sampling__init(s);
#define PRESENT(member, case_field, case_value)                                                                        \
    if (json_object_get(r, #member)) {                                                                                 \
        s->case_field = case_value;                                                                                    \
        s->member = real(b, r, #member);                                                                               \
    }
    PRESENT(temperature, has_temperature_case, TANDEM__V1__SAMPLING__HAS_TEMPERATURE_TEMPERATURE)
    PRESENT(top_p, has_top_p_case, TANDEM__V1__SAMPLING__HAS_TOP_P_TOP_P)
    PRESENT(min_p, has_min_p_case, TANDEM__V1__SAMPLING__HAS_MIN_P_MIN_P)
    PRESENT(typical_p, has_typical_p_case, TANDEM__V1__SAMPLING__HAS_TYPICAL_P_TYPICAL_P)
    PRESENT(repetition_penalty, has_repetition_penalty_case,
            TANDEM__V1__SAMPLING__HAS_REPETITION_PENALTY_REPETITION_PENALTY)
#undef PRESENT
    if (json_object_get(r, "top_k")) {
        s->has_top_k_case = TANDEM__V1__SAMPLING__HAS_TOP_K_TOP_K;
        s->top_k = (uint32_t)whole(b, r, "top_k", UINT32_MAX);
    }
    if (json_object_get(r, "seed")) {
        s->has_seed_case = TANDEM__V1__SAMPLING__HAS_SEED_SEED;
        s->seed = whole(b, r, "seed", 9.3e18);
    }
    if (json_is_true(json_object_get(r, "greedy"))) {
        s->has_temperature_case = TANDEM__V1__SAMPLING__HAS_TEMPERATURE_TEMPERATURE;
        s->temperature = 0;
    }
    s->presence_penalty = real(b, r, "presence_penalty");
    s->frequency_penalty = real(b, r, "frequency_penalty");
    s->n = (uint32_t)whole(b, r, "n", UINT32_MAX);
    if (json_object_get(r, "allowed_ids"))
        s->allowed_ids = id_list(b, json_object_get(r, "allowed_ids"), "allowed_ids", &s->n_allowed_ids);
    if (json_object_get(r, "logit_bias"))
        build_bias(b, json_object_get(r, "logit_bias"));
    b->m.sampling = s;
}

static void build_stopping(struct ask_message *b, json_t *r)
{
    Tandem__V1__Stopping *s = &b->stopping;
    json_t *stop = json_object_get(r, "stop"), *v;
    size_t i;
    tandem__v1__stopping__init(s);
    if (json_object_get(r, "max_tokens")) {
        s->has_max_tokens_case = TANDEM__V1__STOPPING__HAS_MAX_TOKENS_MAX_TOKENS;
        s->max_tokens = (uint32_t)whole(b, r, "max_tokens", UINT32_MAX);
    }
    s->min_tokens = (uint32_t)whole(b, r, "min_tokens", UINT32_MAX);
    s->ignore_eos = json_is_true(json_object_get(r, "ignore_eos"));
    s->n_stop = json_is_string(stop) ? 1 : json_array_size(stop);
    s->stop = mem_array(s->n_stop, sizeof(*s->stop));
    if (json_is_string(stop))
        s->stop[0] = bytes_of(stop);
    json_array_foreach(stop, i, v) s->stop[i] = bytes_of(v);
    if (json_object_get(r, "stop_ids"))
        s->stop_ids = id_list(b, json_object_get(r, "stop_ids"), "stop_ids", &s->n_stop_ids);
    b->m.stopping = s;
}

static void build(struct ask_message *b, json_t *r)
{
    json_t *id = json_object_get(r, "id"), *priority = json_object_get(r, "priority");
    tandem__v1__generate_request__init(&b->m);
    tandem__v1__slo__init(&b->slo);
    build_prompt(b, r);
    build_sampling(b, r);
    build_stopping(b, r);
    ask_limits(&b->slo, limit_ms(b, r, "ttft_ms"), limit_ms(b, r, "tpot_ms"));
    b->slo.deadline_ms = (uint32_t)whole(b, r, "deadline_ms", UINT32_MAX);
    b->m.slo = &b->slo;
    b->m.priority = (int32_t)json_integer_value(priority);
    b->m.model = bytes_of(json_object_get(r, "model"));
    b->m.lora = bytes_of(json_object_get(r, "lora"));
    b->m.tenant = bytes_of(json_object_get(r, "tenant"));
    b->m.cache_salt = bytes_of(json_object_get(r, "cache_salt"));
    b->m.workflow_id = bytes_of(json_object_get(r, "workflow_id"));
    b->m.request_id = bytes_of(id);
    if (b->m.request_id.len > 64) /* a label of ours comes back by itself; the server's is for logs */
        b->m.request_id.len = 64;
    b->m.want_ids = true;
    b->m.want_logprobs = json_is_true(json_object_get(r, "logprobs"));
    b->m.top_logprobs = (uint32_t)whole(b, r, "top_logprobs", UINT32_MAX);
    b->m.echo = json_is_true(json_object_get(r, "echo"));
    if (json_is_boolean(json_object_get(r, "skip_special_tokens"))) {
        b->m.has_skip_special_tokens_case = TANDEM__V1__GENERATE_REQUEST__HAS_SKIP_SPECIAL_TOKENS_SKIP_SPECIAL_TOKENS;
        b->m.skip_special_tokens = json_is_true(json_object_get(r, "skip_special_tokens"));
    }
    b->m.bypass_cache = json_is_true(json_object_get(r, "bypass_cache"));
    b->m.want_prompt_logprobs = json_is_true(json_object_get(r, "prompt_logprobs"));
}

void ask_message_free(struct ask_message *b)
{
    if (!b)
        return;
    for (size_t i = 0; i < b->n_dumps; i++)
        free(b->dumps[i]);
    free(b->dumps);
    free(b->tokens.ids);
    free(b->messages);
    free(b->message_list);
    free(b->bias);
    free(b->sampling.allowed_ids);
    free(b->bias_list);
    free(b->stopping.stop);
    free(b->stopping.stop_ids);
    free(b);
}

Tandem__V1__GenerateRequest *ask_message_get(struct ask_message *b)
{
    return &b->m;
}

enum td_status ask_message_make(json_t *request, struct ask_message **out, struct td_error *e)
{
    struct ask_message *b = mem_zalloc(sizeof(*b));
    *out = NULL;
    build(b, request);
    if (b->bad) {
        *e = b->error;
        ask_message_free(b);
        return TD_ERR_INVALID;
    }
    *out = b;
    return TD_OK;
}

/* ----------------------------------------------------------------- answer */

/* [[id, log-probability], ...], the likeliest first */
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
        return; /* nobody asked for it */
    Tandem__V1__GenerateEnd **end = c ? &c->end : &a->end;
    bytes_append(c ? &c->text : &a->text, m->text.data, m->text.len);
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
    struct ask_message *b;
    struct td_error e = {{0}};
    struct ask *a = mem_zalloc(sizeof(*a));
    *a = (struct ask){.request = request, .on_text = on_text, .on_done = on_done, .user = user};
    a->ids = json_array();
    a->logprobs = json_array();
    a->top_logprobs = json_array();
    bool bad = ask_message_make(request, &b, &e) != TD_OK;
    uint32_t n_choices = bad ? 1 : b->sampling.n;
    a->n_more = n_choices > 1 && n_choices <= ASK_MAX_CHOICES ? n_choices - 1 : 0;
    for (uint32_t i = 0; i < a->n_more; i++)
        a->more[i] = (struct ask_choice){.ids = json_array(), .logprobs = json_array(), .top_logprobs = json_array()};
    const struct rpc_call_params params = {.path = "/tandem.v1.Tandem/Generate",
                                           .response = &tandem__v1__generate_response__descriptor,
                                           .handlers = {on_message, NULL, on_end},
                                           .user = a};
    if (bad || rpc_call_start(c, &params, &a->call)) {
        a->code = bad ? RPC_INVALID_ARGUMENT : RPC_UNAVAILABLE;
        snprintf(a->error, sizeof(a->error), "%s", bad ? e.text : "the call could not be started");
        ask_message_free(b);
        on_done(a);
        return a;
    }
    struct rpc_call *call = rpc_call_ref(a->call); /* on_done may free the ask before we are through */
    rpc_call_send(call, &b->m.base);
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
        if (a->more[i].end)
            tandem__v1__generate_end__free_unpacked(a->more[i].end, NULL);
    }
    bytes_free(&a->text);
    if (a->end)
        tandem__v1__generate_end__free_unpacked(a->end, NULL);
    if (a->call)
        rpc_call_unref(a->call);
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

/* The first token has none. */
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
    json_object_set_new(o, "finish_reason", cli_json_text(e->finish_reason.data, e->finish_reason.len));
    if (e->kv_codec.len)
        json_object_set_new(o, "kv_codec", cli_json_text(e->kv_codec.data, e->kv_codec.len));
    if (e->usage)
        json_object_set_new(o, "usage", usage_json(e->usage));
    if (e->timing)
        json_object_set_new(o, "timing", timing_json(e->timing));
    if (e->placement) {
        json_t *p = json_object();
        json_object_set_new(p, "prefill", cli_json_text(e->placement->prefill.data, e->placement->prefill.len));
        json_object_set_new(p, "decode", cli_json_text(e->placement->decode.data, e->placement->decode.len));
        json_object_set_new(p, "plan", cli_json_text(e->placement->plan.data, e->placement->plan.len));
        json_object_set_new(o, "placement", p);
    }
    if (e->predicted)
        json_object_set_new(o, "predicted",
                            json_pack("{s:f,s:f}", "ttft_ms", e->predicted->ttft_ms, "tpot_ms", e->predicted->tpot_ms));
    json_object_set_new(o, "seed", json_integer((json_int_t)e->seed));
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

static void add_choice(json_t *o, const struct ask *a, const struct bytes *text, json_t *ids, json_t *logprobs,
                       json_t *top_logprobs, const Tandem__V1__GenerateEnd *end)
{
    json_object_set(o, "token_ids", ids);
    json_object_set_new(o, "text", cli_json_text(text->data, text->len));
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
        json_object_set_new(e, "message", cli_json_text(a->error, strlen(a->error)));
        if (a->retry_after_ms)
            json_object_set_new(e, "retry_after_ms", json_integer(a->retry_after_ms));
        json_object_set_new(o, "error", e);
        return o;
    }
    add_choice(o, a, &a->text, a->ids, a->logprobs, a->top_logprobs, a->end);
    if (!a->n_more)
        return o;
    json_t *choices = json_array();
    for (uint32_t i = 0; i < a->n_more; i++) {
        const struct ask_choice *c = &a->more[i];
        json_t *one = json_object();
        add_choice(one, a, &c->text, c->ids, c->logprobs, c->top_logprobs, c->end);
        json_array_append_new(choices, one);
    }
    json_object_set_new(o, "choices", choices);
    return o;
}
