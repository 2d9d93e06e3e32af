/*
 * Anthropic's Messages, and its count of tokens.
 *
 * A stream is a list of blocks, of text, of reasoning, or a call of a function each:
 *
 *     message_start, {content_block_start, content_block_delta..., content_block_stop}..., message_delta,
 *     message_stop
 *
 * How much of the prompt was cached is known at the end, so message_start counts all of it as input, and
 * message_delta has the final numbers.
 */
#include <stdio.h>
#include <string.h>

#include "gateway/members.h"

/* ------------------------------------------------------------------ members */

/* Reasoning is asked for in the ways that templates know, and shown only if it was asked for. */
static enum td_status read_thinking(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    const char *type = json_string_value(json_object_get(v, "type"));
    bool is_off = type && !strcmp(type, "disabled");
    if (!is_off && (!type || (strcmp(type, "enabled") != 0 && strcmp(type, "adaptive") != 0)))
        return td_fail(e, TD_ERR_INVALID, "%s.type: must be 'enabled', 'adaptive' or 'disabled'", m->name);
    r->task->shows_reasoning = !is_off;
    gw_member_reasons(r, !is_off);
    return TD_OK;
}

/* {"name", "description", "input_schema"}: a function as OpenAI has it. */
static enum td_status read_tools(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    size_t i;
    json_t *tool, *tools = json_array();
    enum td_status s = json_is_array(v) ? TD_OK : td_fail(e, TD_ERR_INVALID, "%s: must be a list", m->name);
    json_array_foreach(v, i, tool)
    {
        json_t *name = json_object_get(tool, "name"), *schema = json_object_get(tool, "input_schema"),
               *description = json_object_get(tool, "description");
        if (!s && (!json_is_string(name) || !json_is_object(schema)))
            s = td_fail(e, TD_ERR_INVALID, "%s[%zu]: only functions with name and input_schema are supported", m->name,
                        i);
        json_t *function = json_object();
        json_object_set(function, "name", name);
        if (description)
            json_object_set(function, "description", description);
        json_object_set(function, "parameters", schema);
        json_array_append_new(tools, json_pack("{s:s, s:o}", "type", "function", "function", function));
    }
    if (!s)
        s = gw_member_tools(r, m, tools, e);
    json_decref(tools);
    return s;
}

/* A block of an assistant's message that is no text: a call, or reasoning. False: it is neither. */
static bool take_said(json_t *message, json_t *block)
{
    const char *type = json_string_value(json_object_get(block, "type"));
    if (type && (!strcmp(type, "thinking") || !strcmp(type, "redacted_thinking"))) {
        json_t *text = json_object_get(block, "thinking");
        if (text)
            json_object_set(message, "reasoning_content", text);
        return true;
    }
    if (!type || strcmp(type, "tool_use") != 0)
        return false;
    json_t *calls = json_object_get(message, "tool_calls"), *id = json_object_get(block, "id"),
           *name = json_object_get(block, "name"), *input = json_object_get(block, "input");
    if (!calls) {
        calls = json_array();
        json_object_set_new(message, "tool_calls", calls);
    }
    json_array_append_new(calls, json_pack("{s:O*, s:s, s:{s:O*, s:O*}}", "id", id, "type", "function", "function",
                                           "name", name, "arguments", input));
    return true;
}

/* The result of a call becomes a message of its own, before the rest. False: it is none. */
static bool take_result(json_t *list, json_t *block)
{
    const char *type = json_string_value(json_object_get(block, "type"));
    json_t *content = json_object_get(block, "content");
    if (!type || strcmp(type, "tool_result") != 0)
        return false;
    json_array_append_new(list, json_pack("{s:s, s:O*, s:o}", "role", "tool", "tool_call_id",
                                          json_object_get(block, "tool_use_id"), "content",
                                          content ? json_incref(content) : json_string("")));
    return true;
}

/* Blocks of calls and results become what chats of OpenAI have. */
static enum td_status read_chat(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    size_t i, k;
    json_t *message, *block, *list = json_array();
    json_array_foreach(v, i, message)
    {
        json_t *blocks = json_object_get(message, "content"), *rest = json_array(), *plain;
        bool has_other = false;
        if (!json_is_array(blocks)) {
            json_array_append(list, message);
            json_decref(rest);
            continue;
        }
        plain = json_pack("{s:O*}", "role", json_object_get(message, "role"));
        json_array_foreach(blocks, k, block)
        {
            if (take_said(plain, block) || take_result(list, block))
                has_other = true;
            else
                json_array_append(rest, block);
        }
        if (json_array_size(rest) || !has_other)
            json_object_set(plain, "content", rest);
        if (json_object_size(plain) > 1)
            json_array_append(list, plain);
        json_decref(plain);
        json_decref(rest);
    }
    enum td_status s = gw_member_messages(r, m, json_is_array(v) ? list : v, e);
    json_decref(list);
    return s;
}

static enum td_status read_tool_choice(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    const char *type = json_string_value(json_object_get(v, "type"));
    json_t *is_single = json_object_get(v, "disable_parallel_tool_use");
    bool is_tool = type && !strcmp(type, "tool");
    r->has_one_call = json_is_true(is_single);
    return gw_member_tool_choice(r, m, is_tool ? v : json_object_get(v, "type"), e);
}

static const struct gw_member OUTPUT_CONFIG[] = {
    {"format", NULL, gw_member_format}, {"effort", NULL, gw_member_ignored}, {NULL, NULL, NULL}};

static enum td_status read_output_config(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    return gw_member_inner(r, m, OUTPUT_CONFIG, v, e);
}

/* What means nothing here. */
#define IGNORED                                                                                                        \
    {"service_tier", NULL, gw_member_ignored}, {"cache_control", NULL, gw_member_ignored},                             \
        {"inference_geo", NULL, gw_member_ignored}, {"speed", NULL, gw_member_ignored},                                \
        {"user_profile_id", NULL, gw_member_ignored},                                                                  \
    {                                                                                                                  \
        "workspace_id", NULL, gw_member_ignored                                                                        \
    }

static const struct gw_member MESSAGES[] = {
    {"model", "model", gw_member_model},
    {"messages", "messages", read_chat},
    {"system", NULL, gw_member_system},
    {"max_tokens", "max_tokens", NULL},
    {"stop_sequences", "stop", NULL},
    {"stream", NULL, gw_member_stream},
    {"temperature", "temperature", NULL},
    {"top_p", "top_p", NULL},
    {"top_k", "top_k", NULL},
    {"thinking", NULL, read_thinking},
    {"output_config", NULL, read_output_config},
    {"output_format", NULL, gw_member_format},
    {"tools", "tools", read_tools},
    {"tool_choice", "must_call", read_tool_choice},
    {"tandem", NULL, gw_member_tandem},
    {"metadata", NULL, gw_member_ignored},
    {"diagnostics", NULL, gw_member_ignored},
    IGNORED,
    {NULL, NULL, NULL},
};

static const struct gw_member COUNT_TOKENS[] = {
    {"model", "model", NULL},
    {"messages", "messages", read_chat},
    {"system", NULL, gw_member_system},
    {"thinking", NULL, read_thinking},
    {"tools", "tools", read_tools},
    {"tool_choice", "must_call", read_tool_choice},
    IGNORED,
    {NULL, NULL, NULL},
};

/* Members, then what follows from several of them. */
static enum td_status read_members(struct gw_reading *r, json_t *body, struct td_error *e)
{
    enum td_status s = gw_members_read(r, body, e);
    if (!s)
        s = gw_system_first(r, "messages", e);
    json_t *list = json_object_get(r->ask, "messages"), *last = json_array_get(list, json_array_size(list) - 1);
    const char *role = json_string_value(json_object_get(last, "role"));
    if (!s && strcmp(role, "user") != 0 && strcmp(role, "tool") != 0)
        s = td_fail(e, TD_ERR_INVALID, "messages: the last one must be the user's; an answer can't be continued");
    json_decref(r->system); /* of a request that is refused */
    return s;
}

/* ------------------------------------------------------------------ reading */

static enum td_status read_messages(struct gw_task *t, json_t *body, struct td_error *e)
{
    struct gw_reading r = {.task = t, .ask = json_object(), .table = MESSAGES};
    enum td_status s = read_members(&r, body, e);
    if (!s)
        s = gw_headers_read(&r, e);
    if (!s && !json_object_get(r.ask, "max_tokens"))
        s = td_fail(e, TD_ERR_INVALID, "max_tokens: is missing");
    gw_task_calls(t, 1);
    if (!s)
        s = gw_ask_generate(t, 0, r.ask, e);
    json_decref(r.ask);
    return s;
}

static enum td_status read_count(struct gw_task *t, json_t *body, struct td_error *e)
{
    struct gw_reading r = {.task = t, .ask = json_object(), .table = COUNT_TOKENS};
    struct ask_message *m = NULL;
    enum td_status s = read_members(&r, body, e);
    if (!s)
        s = ask_message_make(r.ask, &m, e);
    if (!s)
        gw_task_tokenize(t, ask_message_get(m));
    ask_message_free(m);
    json_decref(r.ask);
    return s;
}

/* ------------------------------------------------------------------ answers */

static json_t *usage_json(const struct gw_task *t)
{
    return json_pack("{s:I, s:I, s:I, s:I}", "input_tokens", (json_int_t)(t->prompt_tokens - t->cached_tokens),
                     "cache_read_input_tokens", (json_int_t)t->cached_tokens, "cache_creation_input_tokens",
                     (json_int_t)0, "output_tokens", (json_int_t)t->completion_tokens);
}

/* Adds why the answer ended; end: NULL: it goes on. */
static void add_reason(json_t *to, const Tandem__V1__GenerateEnd *end)
{
    const char *reason = !end                   ? NULL
                         : end->stop_string.len ? "stop_sequence"
                         : gw_is_cut(end)       ? "max_tokens"
                         : gw_calls(end)        ? "tool_use"
                                                : "end_turn";
    json_object_set_new(to, "stop_reason", reason ? json_string(reason) : json_null());
    json_object_set_new(to, "stop_sequence",
                        end && end->stop_string.len ? ask_text_json(end->stop_string.data, end->stop_string.len)
                                                    : json_null());
}

static json_t *message_json(const struct gw_task *t, json_t *content, const Tandem__V1__GenerateEnd *end)
{
    char id[GW_ID_BYTES + 8];
    snprintf(id, sizeof(id), "msg_%s", t->id);
    json_t *v = json_pack("{s:s, s:s, s:s, s:s, s:o, s:o}", "id", id, "type", "message", "role", "assistant", "model",
                          t->model ? t->model : "", "content", content, "usage", usage_json(t));
    add_reason(v, end);
    return v;
}

static json_t *call_json(json_t *id, json_t *name, json_t *input)
{
    return json_pack("{s:s, s:o, s:o, s:o}", "type", "tool_use", "id", id, "name", name, "input", input);
}

static void whole(struct gw_task *t, struct bytes *out)
{
    const struct gw_choice *c = &t->calls[0].choices[0];
    json_t *content = json_array(), *call;
    size_t i;
    if (c->reasoning.len && t->shows_reasoning)
        json_array_append_new(content, json_pack("{s:s, s:o, s:s}", "type", "thinking", "thinking",
                                                 ask_text_json(c->reasoning.data, c->reasoning.len), "signature", ""));
    if (c->text.len || !json_array_size(c->calls))
        json_array_append_new(
            content, json_pack("{s:s, s:o}", "type", "text", "text", ask_text_json(c->text.data, c->text.len)));
    json_array_foreach(c->calls, i, call)
    {
        json_t *arguments = json_object_get(call, "arguments"),
               *input = json_loadb(json_string_value(arguments), json_string_length(arguments), JSON_ALLOW_NUL, NULL);
        json_array_append_new(content,
                              call_json(json_incref(json_object_get(call, "id")),
                                        json_incref(json_object_get(call, "name")), input ? input : json_object()));
    }
    ask_json_append(out, message_json(t, content, c->end));
}

/* An event of this type; its other members are in v, which is freed. */
static void event(struct bytes *out, const char *type, json_t *v)
{
    bytes_printf(out, "event: %s\ndata: ", type);
    json_object_set_new(v, "type", json_string(type));
    ask_json_append(out, v);
    bytes_printf(out, "\n\n");
}

static void close_block(struct gw_task *t, struct bytes *out)
{
    if (t->part)
        event(out, "content_block_stop", json_pack("{s:i}", "index", (int)t->n_parts - 1));
    t->part = GW_NOTHING;
}

static void open_block(struct gw_task *t, enum gw_part part, json_t *block, struct bytes *out)
{
    close_block(t, out);
    event(out, "content_block_start", json_pack("{s:i, s:o}", "index", (int)t->n_parts, "content_block", block));
    t->part = part;
    t->n_parts++;
}

/* What is new of the block that is open: of this type, in this member. */
static void say(const struct gw_task *t, const char *type, const char *member, ProtobufCBinaryData text,
                struct bytes *out)
{
    bytes_printf(out,
                 "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":%u,"
                 "\"delta\":{\"type\":\"%s\",\"%s\":\"",
                 t->n_parts - 1, type, member);
    ask_text_escape(out, text.data, text.len);
    bytes_printf(out, "\"}}\n\n");
}

static void delta(struct gw_task *t, struct gw_call *c, const Tandem__V1__GenerateResponse *m, struct bytes *out)
{
    (void)c;
    if (!t->started)
        event(out, "message_start", json_pack("{s:o}", "message", message_json(t, json_array(), NULL)));
    t->started = 1;
    if (m->reasoning.len && t->shows_reasoning) {
        if (t->part != GW_REASONING)
            open_block(t, GW_REASONING,
                       json_pack("{s:s, s:s, s:s}", "type", "thinking", "thinking", "", "signature", ""), out);
        say(t, "thinking_delta", "thinking", m->reasoning, out);
    }
    if (t->part != GW_TEXT && (m->text.len || (m->end && !t->n_parts && !m->n_tool_calls)))
        open_block(t, GW_TEXT, json_pack("{s:s, s:s}", "type", "text", "text", ""), out);
    if (m->text.len)
        say(t, "text_delta", "text", m->text, out);
    for (size_t i = 0; i < m->n_tool_calls; i++) {
        const Tandem__V1__ToolCall *d = m->tool_calls[i];
        if (d->id.len)
            open_block(t, GW_FUNCTION,
                       call_json(ask_text_json(d->id.data, d->id.len), ask_text_json(d->name.data, d->name.len),
                                 json_object()),
                       out);
        say(t, "input_json_delta", "partial_json", d->arguments, out);
    }
    if (!m->end)
        return;
    json_t *why = json_object();
    add_reason(why, m->end);
    close_block(t, out);
    event(out, "message_delta", json_pack("{s:o, s:o}", "delta", why, "usage", usage_json(t)));
}

static void end(struct gw_task *t, struct bytes *out)
{
    (void)t;
    event(out, "message_stop", json_object());
}

static void whole_count(struct gw_task *t, struct bytes *out)
{
    const Tandem__V1__TokenizeResponse *m = (const Tandem__V1__TokenizeResponse *)t->calls[0].response;
    bytes_printf(out, "{\"input_tokens\":%zu}", m->n_ids);
}

const struct gw_api GW_MESSAGES = {.path = "/v1/messages",
                                   .rpc = "/tandem.v1.Tandem/Generate",
                                   .response = &tandem__v1__generate_response__descriptor,
                                   .read = read_messages,
                                   .delta = delta,
                                   .end = end,
                                   .whole = whole,
                                   .error_event = "event: error\n"};
const struct gw_api GW_COUNT_TOKENS = {.path = "/v1/messages/count_tokens",
                                       .rpc = "/tandem.v1.Tandem/Tokenize",
                                       .response = &tandem__v1__tokenize_response__descriptor,
                                       .read = read_count,
                                       .whole = whole_count};
