/*
 * OpenAI's chat completions and completions, with the further members that vLLM has.
 *
 * Both APIs ask for the same thing in other words, so they share the table of members but for the prompt, and
 * what they answer differs in a few words, too.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gateway/members.h"
#include "gateway/scores.h"
#include "proto/ask/ask_params.h"

enum { DEFAULT_MAX_TOKENS = 16 /* of a completion, as OpenAI and vLLM have it */ };

/* ------------------------------------------------------------------ members */

static enum td_status read_stream_options(struct gw_reading *r, const struct gw_member *m, json_t *v,
                                          struct td_error *e)
{
    const char *name;
    json_t *option;
    if (!json_is_object(v))
        return td_fail(e, TD_ERR_INVALID, "%s: must be an object", m->name);
    json_object_foreach(v, name, option)
    {
        if (!strcmp(name, "include_usage") && json_is_boolean(option))
            r->task->wants_usage = json_is_true(option);
        else if (!strcmp(name, "continuous_usage_stats") && json_is_boolean(option))
            r->task->wants_usage_each = json_is_true(option);
        else if (strcmp(name, "include_obfuscation") || !json_is_boolean(option))
            return td_fail(e, TD_ERR_INVALID, "%s.%.32s: no such member, or not true or false", m->name, name);
    }
    return TD_OK;
}

static enum td_status read_n(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    enum td_status s = gw_member_put(r, m, v, e);
    if (!s)
        r->task->n_choices = (uint32_t)json_integer_value(v);
    return s;
}

/* A chat: whether tokens are scored; how many others beside them is another member. */
static enum td_status read_chat_logprobs(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    r->task->wants_scores = json_is_true(v);
    return gw_member_put(r, m, v, e);
}

/* A completion: both in one number. */
static enum td_status read_logprobs(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    enum td_status s = json_is_false(v) ? TD_OK : gw_member_put(r, m, v, e);
    if (s || json_is_false(v))
        return s;
    r->task->wants_scores = true;
    json_object_set_new(r->ask, "logprobs", json_true());
    return TD_OK;
}

/* OpenAI and vLLM have signed seeds: the same bits, unsigned. */
static enum td_status read_seed(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    if (!json_is_integer(v))
        return td_fail(e, TD_ERR_INVALID, "%s: must be a whole number", m->name);
    json_object_set_new(r->ask, m->ask, ask_seed_json((uint64_t)json_integer_value(v)));
    return TD_OK;
}

/* -1 is vLLM's word for all. */
static enum td_status read_top_k(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    if (json_is_integer(v) && json_integer_value(v) == -1)
        json_object_set_new(r->ask, m->ask, json_integer(0));
    else
        return gw_member_put(r, m, v, e);
    return TD_OK;
}

/* Both names of the same thing may be given, if they say the same. */
static enum td_status read_max_tokens(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    json_t *before = json_object_get(r->ask, m->ask);
    if (before && !json_equal(before, v))
        return td_fail(e, TD_ERR_INVALID, "%s: max_tokens and max_completion_tokens differ", m->name);
    return gw_member_put(r, m, v, e);
}

/* In vLLM the lower priority goes first. */
static enum td_status read_priority(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    json_t *turned = json_is_integer(v) ? json_integer(-json_integer_value(v)) : json_incref(v);
    enum td_status s = gw_member_put(r, m, turned, e);
    json_decref(turned);
    return s;
}

/* -1 is vLLM's word for as many as the model takes. */
static enum td_status read_truncate(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    if (json_is_integer(v) && json_integer_value(v) == -1)
        json_object_set_new(r->ask, m->ask, json_integer(UINT32_MAX));
    else
        return gw_member_put(r, m, v, e);
    return TD_OK;
}

/* vLLM's, of the whole prompt: the likeliest tokens beside each of its tokens. */
static enum td_status read_prompt_logprobs(struct gw_reading *r, const struct gw_member *m, json_t *v,
                                           struct td_error *e)
{
    struct gw_task *t = r->task;
    if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) > ASK_MAX_TOP_LOGPROBS)
        return td_fail(e, TD_ERR_INVALID, "%s: must be a whole number, at most %d", m->name, ASK_MAX_TOP_LOGPROBS);
    t->wants_prompt_list = true;
    t->n_prompt_top = (uint32_t)json_integer_value(v);
    return TD_OK;
}

static enum td_status read_best_of(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    r->best_of = json_integer_value(v);
    return json_is_integer(v) ? TD_OK : td_fail(e, TD_ERR_INVALID, "%s: must be a whole number", m->name);
}

static enum td_status read_prompt(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    if (!json_is_string(v) && !json_is_array(v))
        return td_fail(e, TD_ERR_INVALID, "%s: must be a text, a list of token ids, or a list of either", m->name);
    r->prompts = v;
    return TD_OK;
}

/* OpenAI's members that change nothing here. */
#define IGNORED(name)                                                                                                  \
    {                                                                                                                  \
        name, NULL, gw_member_ignored                                                                                  \
    }
#define SHARED                                                                                                         \
    {"model", "model", gw_member_model}, {"stream", NULL, gw_member_stream},                                           \
        {"stream_options", NULL, read_stream_options}, {"n", "n", read_n}, {"temperature", "temperature", NULL},       \
        {"top_p", "top_p", NULL}, {"presence_penalty", "presence_penalty", NULL},                                      \
        {"frequency_penalty", "frequency_penalty", NULL}, {"seed", "seed", read_seed}, {"stop", "stop", NULL},         \
        {"logit_bias", "logit_bias", NULL}, {"max_tokens", "max_tokens", read_max_tokens},                             \
        {"min_tokens", "min_tokens", NULL}, {"top_k", "top_k", read_top_k}, {"min_p", "min_p", NULL},                  \
        {"repetition_penalty", "repetition_penalty", NULL}, {"ignore_eos", "ignore_eos", NULL},                        \
        {"stop_token_ids", "stop_ids", NULL}, {"skip_special_tokens", "skip_special_tokens", NULL},                    \
        {"bad_words", "bad_words", NULL}, {"include_stop_str_in_output", "include_stop", NULL},                        \
        {"truncate_prompt_tokens", "truncate_prompt", read_truncate}, {"prompt_logprobs", NULL, read_prompt_logprobs}, \
        {"allowed_token_ids", "allowed_ids", NULL}, {"cache_salt", "cache_salt", NULL},                                \
        {"priority", "priority", read_priority}, {"tandem", NULL, gw_member_tandem},                                   \
        {"response_format", NULL, gw_member_format}, {"structured_outputs", NULL, gw_member_structured},               \
        IGNORED("user"), IGNORED("metadata"), IGNORED("store"), IGNORED("service_tier"), IGNORED("safety_identifier"), \
        IGNORED("prompt_cache_key"), IGNORED("prompt_cache_retention"), IGNORED("spaces_between_special_tokens"),      \
        IGNORED("request_id")

static const struct gw_member CHAT[] = {
    SHARED,
    {"messages", "messages", gw_member_messages},
    {"max_completion_tokens", "max_tokens", read_max_tokens},
    {"add_generation_prompt", "add_generation_prompt", NULL},
    {"chat_template_kwargs", "variables", gw_member_variables},
    {"reasoning_effort", NULL, gw_member_effort},
    {"logprobs", "logprobs", read_chat_logprobs},
    {"top_logprobs", "top_logprobs", NULL},
    {"tools", "tools", gw_member_tools},
    {"tool_choice", "must_call", gw_member_tool_choice},
    {"parallel_tool_calls", NULL, gw_member_parallel},
    IGNORED("verbosity"),
    IGNORED("prediction"),
    {NULL, NULL, NULL},
};

static const struct gw_member COMPLETIONS[] = {
    SHARED,
    {"prompt", NULL, read_prompt},
    {"echo", "echo", NULL},
    {"logprobs", "top_logprobs", read_logprobs},
    {"add_special_tokens", "add_special_tokens", NULL},
    {"suffix", NULL, gw_member_false},
    {"best_of", NULL, read_best_of},
    {NULL, NULL, NULL},
};

/* ------------------------------------------------------------------ reading */

/* The router has the prompt's scores when the answer ends. */
static enum td_status ask_prompt_scores(struct gw_reading *r, const char *member, struct td_error *e)
{
    struct gw_task *t = r->task;
    if (!t->wants_prompt_list && !t->wants_prompt_scores)
        return TD_OK;
    if (t->is_stream)
        return td_fail(e, TD_ERR_INVALID, "%s: only if stream is false", member);
    json_object_set_new(r->ask, "prompt_logprobs", json_true());
    if (t->n_prompt_top > t->n_top)
        json_object_set_new(r->ask, "top_logprobs", json_integer(t->n_prompt_top));
    return TD_OK;
}

static enum td_status read_chat(struct gw_task *t, json_t *body, struct td_error *e)
{
    struct gw_reading r = {.task = t, .ask = json_object(), .table = CHAT};
    t->is_chat = true;
    gw_task_calls(t, 1);
    enum td_status s = gw_members_read(&r, body, e);
    if (!s)
        s = gw_headers_read(&r, e);
    if (!s && !json_object_get(r.ask, "messages"))
        s = td_fail(e, TD_ERR_INVALID, "messages: is missing");
    t->n_top = (uint32_t)json_integer_value(json_object_get(r.ask, "top_logprobs"));
    if (!s && t->n_top && !t->wants_scores)
        s = td_fail(e, TD_ERR_INVALID, "top_logprobs: logprobs must be true");
    if (!s)
        s = ask_prompt_scores(&r, "prompt_logprobs", e);
    if (!s)
        s = gw_ask_generate(t, 0, r.ask, e);
    json_decref(r.ask);
    return s;
}

/* The i-th prompt of the request, which is one text, one list of ids, or a list of either. */
static json_t *prompt_at(json_t *prompts, size_t i)
{
    bool is_one = json_is_string(prompts) || json_is_integer(json_array_get(prompts, 0));
    return is_one ? prompts : json_array_get(prompts, i);
}

static size_t count_prompts(json_t *prompts)
{
    return prompt_at(prompts, 0) == prompts ? 1 : json_array_size(prompts);
}

static enum td_status make_prompt(struct gw_reading *r, uint32_t i, struct td_error *e)
{
    json_t *prompt = prompt_at(r->prompts, i);
    const char *name = json_is_array(prompt) ? "prompt_ids" : "prompt";
    json_t *add_special = json_incref(json_object_get(r->ask, "add_special_tokens"));
    json_object_del(r->ask, "prompt");
    json_object_del(r->ask, "prompt_ids");
    json_object_set(r->ask, name, prompt);
    if (json_is_array(prompt))
        json_object_del(r->ask, "add_special_tokens"); /* ids are what they are */
    enum td_status s = gw_ask_generate(r->task, i, r->ask, e);
    if (add_special)
        json_object_set_new(r->ask, "add_special_tokens", add_special);
    return s;
}

static enum td_status make_prompts(struct gw_reading *r, struct td_error *e)
{
    struct gw_task *t = r->task;
    size_t n = r->prompts ? count_prompts(r->prompts) : 0, most = (size_t)t->g->options.max_prompts;
    if (!n)
        return td_fail(e, TD_ERR_INVALID, "prompt: %s", r->prompts ? "is empty" : "is missing");
    if (n > most)
        return td_fail(e, TD_ERR_INVALID, "prompt: %zu prompts, at most %zu (max-prompts)", n, most);
    if (r->best_of && r->best_of != (json_int_t)t->n_choices)
        return td_fail(e, TD_ERR_INVALID, "best_of: only the same number as n is supported");
    gw_task_calls(t, (uint32_t)n);
    for (uint32_t i = 0; i < n; i++) {
        enum td_status s = make_prompt(r, i, e);
        if (s)
            return s;
    }
    return TD_OK;
}

/* With echo the prompt's tokens are scored, too. */
static enum td_status ask_scores(struct gw_reading *r, struct td_error *e)
{
    struct gw_task *t = r->task;
    t->n_top = (uint32_t)json_integer_value(json_object_get(r->ask, "top_logprobs"));
    t->wants_prompt_scores = t->wants_scores && json_is_true(json_object_get(r->ask, "echo"));
    return ask_prompt_scores(r, t->wants_prompt_list ? "prompt_logprobs" : "logprobs: with echo", e);
}

static enum td_status read_completions(struct gw_task *t, json_t *body, struct td_error *e)
{
    struct gw_reading r = {.task = t, .ask = json_object(), .table = COMPLETIONS};
    enum td_status s = gw_members_read(&r, body, e);
    if (!s)
        s = gw_headers_read(&r, e);
    if (!s && !json_object_get(r.ask, "max_tokens"))
        json_object_set_new(r.ask, "max_tokens", json_integer(DEFAULT_MAX_TOKENS));
    if (!s)
        s = ask_scores(&r, e);
    if (!s)
        s = make_prompts(&r, e);
    json_decref(r.ask);
    return s;
}

/* ------------------------------------------------------------------ answers */

static json_t *usage_json(const struct gw_task *t)
{
    return json_pack("{s:I, s:I, s:I, s:{s:I}}", "prompt_tokens", (json_int_t)t->prompt_tokens, "completion_tokens",
                     (json_int_t)t->completion_tokens, "total_tokens",
                     (json_int_t)(t->prompt_tokens + t->completion_tokens), "prompt_tokens_details", "cached_tokens",
                     (json_int_t)t->cached_tokens);
}

/* One call of a function, or what is new of it. */
static json_t *call_json(json_t *id, json_t *name, json_t *arguments)
{
    json_t *function = json_pack("{s:o}", "arguments", arguments), *call = json_object();
    if (name)
        json_object_set_new(function, "name", name);
    if (id)
        json_object_update_new(call, json_pack("{s:o, s:s}", "id", id, "type", "function"));
    json_object_set_new(call, "function", function);
    return call;
}

static json_t *message_json(const struct gw_choice *c)
{
    bool is_empty = !c->text.len && json_array_size(c->calls);
    json_t *m = json_pack("{s:s, s:o, s:n}", "role", "assistant", "content",
                          is_empty ? json_null() : ask_text_json(c->text.data, c->text.len), "refusal"),
           *calls = json_array(), *call;
    size_t i;
    if (c->reasoning.len)
        json_object_set_new(m, "reasoning_content", ask_text_json(c->reasoning.data, c->reasoning.len));
    json_array_foreach(c->calls, i, call) json_array_append_new(
        calls, call_json(json_incref(json_object_get(call, "id")), json_incref(json_object_get(call, "name")),
                         json_incref(json_object_get(call, "arguments"))));
    if (json_array_size(calls))
        json_object_set(m, "tool_calls", calls);
    json_decref(calls);
    return m;
}

static void whole(struct gw_task *t, struct bytes *out)
{
    json_t *choices = json_array();
    char id[GW_ID_BYTES + 16];
    json_t *prompt = NULL;
    for (uint32_t i = 0; i < t->n_calls; i++) {
        json_decref(prompt);
        prompt = t->wants_prompt_list ? gw_scores_prompt_list(t, t->calls[i].choices[0].end) : NULL;
        for (uint32_t k = 0; k < t->n_choices; k++) {
            const struct gw_choice *c = &t->calls[i].choices[k];
            json_t *one = json_pack("{s:I}", "index", (json_int_t)i * t->n_choices + k);
            if (t->is_chat)
                json_object_set_new(one, "message", message_json(c));
            else
                json_object_set_new(one, "text", ask_text_json(c->text.data, c->text.len));
            if (c->scores && t->wants_prompt_scores && t->calls[i].choices[0].end)
                gw_scores_add_prompt(t, c->scores, t->calls[i].choices[0].end);
            json_object_set(one, "logprobs", c->scores ? c->scores : json_null());
            if (prompt && !t->is_chat)
                json_object_set(one, "prompt_logprobs", prompt);
            json_object_set_new(one, "finish_reason",
                                c->end ? ask_text_json(c->end->finish_reason.data, c->end->finish_reason.len)
                                       : json_null());
            json_array_append_new(choices, one);
        }
    }
    snprintf(id, sizeof(id), "%s-%s", t->is_chat ? "chatcmpl" : "cmpl", t->id);
    json_t *all = json_pack("{s:s, s:s, s:I, s:s, s:o, s:o}", "id", id, "object",
                            t->is_chat ? "chat.completion" : "text_completion", "created", (json_int_t)t->created_s,
                            "model", t->model ? t->model : "", "choices", choices, "usage", usage_json(t));
    if (prompt && t->is_chat)
        json_object_set(all, "prompt_logprobs", prompt);
    json_decref(prompt);
    ask_json_append(out, all);
}

/* What every event of the stream begins with. The first message has come, or the answer has ended without. */
static void make_prefix(struct gw_task *t)
{
    bytes_printf(&t->prefix, "data: {\"id\":\"%s-%s\",\"object\":\"%s\",\"created\":%" PRId64 ",\"model\":\"",
                 t->is_chat ? "chatcmpl" : "cmpl", t->id, t->is_chat ? "chat.completion.chunk" : "text_completion",
                 t->created_s);
    ask_text_escape(&t->prefix, t->model ? t->model : "", t->model ? strlen(t->model) : 0);
    bytes_printf(&t->prefix, "\",\"choices\":[");
}

static void begin_event(struct gw_task *t, struct bytes *out)
{
    if (!t->prefix.len)
        make_prefix(t);
    bytes_append(out, t->prefix.data, t->prefix.len);
}

/* completion_tokens: as far as the choice has come. */
static void end_event(const struct gw_task *t, const struct gw_call *c, uint32_t choice, struct bytes *out)
{
    uint32_t n = c->choices[choice].n_tokens;
    if (t->wants_usage_each)
        bytes_printf(out, "],\"usage\":{\"prompt_tokens\":%u,\"completion_tokens\":%u,\"total_tokens\":%u}}\n\n",
                     c->prompt_tokens, n, c->prompt_tokens + n);
    else
        bytes_printf(out, "]}\n\n");
}

/* The scores of a message, as the value of "logprobs". */
static void append_scores(struct gw_task *t, struct gw_call *c, const Tandem__V1__GenerateResponse *m,
                          struct bytes *out)
{
    if (!t->wants_scores || !m->n_tokens) {
        bytes_printf(out, "\"logprobs\":null");
        return;
    }
    json_t *scores = gw_scores_new(t);
    gw_scores_add(t, scores, m, &c->choices[m->choice].n_chars);
    bytes_printf(out, "\"logprobs\":");
    ask_json_append(out, scores);
}

static void delta_chat(struct gw_task *t, struct gw_call *c, const Tandem__V1__GenerateResponse *m, struct bytes *out)
{
    if (!(t->started >> m->choice & 1)) {
        begin_event(t, out);
        bytes_printf(out,
                     "{\"index\":%u,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
                     "\"finish_reason\":null}",
                     m->choice);
        end_event(t, c, m->choice, out);
        t->started |= 1ull << m->choice;
    }
    if (m->reasoning.len) {
        begin_event(t, out);
        bytes_printf(out, "{\"index\":%u,\"delta\":{\"reasoning_content\":\"", m->choice);
        ask_text_escape(out, m->reasoning.data, m->reasoning.len);
        bytes_printf(out, "\"},\"logprobs\":null,\"finish_reason\":null}");
        end_event(t, c, m->choice, out);
    }
    if (m->text.len || (t->wants_scores && m->n_tokens)) {
        begin_event(t, out);
        bytes_printf(out, "{\"index\":%u,\"delta\":{\"content\":\"", m->choice);
        ask_text_escape(out, m->text.data, m->text.len);
        bytes_printf(out, "\"},");
        append_scores(t, c, m, out);
        bytes_printf(out, ",\"finish_reason\":null}");
        end_event(t, c, m->choice, out);
    }
    for (size_t i = 0; i < m->n_tool_calls; i++) {
        const Tandem__V1__ToolCall *d = m->tool_calls[i];
        json_t *call = call_json(d->id.len ? ask_text_json(d->id.data, d->id.len) : NULL,
                                 d->name.len ? ask_text_json(d->name.data, d->name.len) : NULL,
                                 ask_text_json(d->arguments.data, d->arguments.len));
        json_object_set_new(call, "index", json_integer(d->index));
        begin_event(t, out);
        bytes_printf(out, "{\"index\":%u,\"delta\":{\"tool_calls\":[", m->choice);
        ask_json_append(out, call);
        bytes_printf(out, "]},\"logprobs\":null,\"finish_reason\":null}");
        end_event(t, c, m->choice, out);
    }
    if (m->end) {
        begin_event(t, out);
        bytes_printf(out, "{\"index\":%u,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"%.*s\"}", m->choice,
                     (int)m->end->finish_reason.len, (const char *)m->end->finish_reason.data);
        end_event(t, c, m->choice, out);
    }
}

static void delta_completion(struct gw_task *t, struct gw_call *c, const Tandem__V1__GenerateResponse *m,
                             struct bytes *out)
{
    if (!m->text.len && !m->end && !(t->wants_scores && m->n_tokens))
        return;
    begin_event(t, out);
    bytes_printf(out, "{\"index\":%u,\"text\":\"", c->number * t->n_choices + m->choice);
    ask_text_escape(out, m->text.data, m->text.len);
    bytes_printf(out, "\",");
    append_scores(t, c, m, out);
    if (m->end)
        bytes_printf(out, ",\"finish_reason\":\"%.*s\"}", (int)m->end->finish_reason.len,
                     (const char *)m->end->finish_reason.data);
    else
        bytes_printf(out, ",\"finish_reason\":null}");
    end_event(t, c, m->choice, out);
}

static void end(struct gw_task *t, struct bytes *out)
{
    if (t->wants_usage) {
        begin_event(t, out);
        bytes_printf(out, "],\"usage\":");
        ask_json_append(out, usage_json(t));
        bytes_printf(out, "}\n\n");
    }
    bytes_printf(out, "data: [DONE]\n\n");
}

const struct gw_api GW_CHAT = {.path = "/v1/chat/completions",
                               .rpc = "/tandem.v1.Tandem/Generate",
                               .response = &tandem__v1__generate_response__descriptor,
                               .read = read_chat,
                               .delta = delta_chat,
                               .end = end,
                               .whole = whole};
const struct gw_api GW_COMPLETIONS = {.path = "/v1/completions",
                                      .rpc = "/tandem.v1.Tandem/Generate",
                                      .response = &tandem__v1__generate_response__descriptor,
                                      .read = read_completions,
                                      .delta = delta_completion,
                                      .end = end,
                                      .whole = whole};
