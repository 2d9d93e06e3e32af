/*
 * OpenAI's Responses, as the Open Responses text has them, without state: nothing is stored, so an answer
 * can't be asked for later, or be built upon by its id.
 *
 * A stream is a list of items: reasoning, a message of one part, calls of functions.
 *
 *     response.created, response.in_progress,
 *     {response.output_item.added, response.output_item.done} of each item; between them, of a message,
 *         response.content_part.added, response.output_text.delta..., response.output_text.done,
 *         response.content_part.done;
 *     of reasoning response.reasoning_text.delta..., response.reasoning_text.done;
 *     of a call response.function_call_arguments.delta..., response.function_call_arguments.done;
 *     response.completed or response.incomplete
 *
 * Each event has a number of its own, and the later ones repeat the item, which is therefore kept.
 */
#include <stdio.h>
#include <string.h>

#include "gateway/members.h"

/* ------------------------------------------------------------------ members */

/* A call that was made before, or what came of it, as a message of a chat. NULL: the item is neither. */
static json_t *call_message(const json_t *item, const char *type)
{
    json_t *id = json_object_get(item, "call_id");
    if (!strcmp(type, "function_call"))
        return json_pack("{s:s, s:[{s:O*, s:s, s:{s:O*, s:O*}}]}", "role", "assistant", "tool_calls", "id", id, "type",
                         "function", "function", "name", json_object_get(item, "name"), "arguments",
                         json_object_get(item, "arguments"));
    if (!strcmp(type, "function_call_output"))
        return json_pack("{s:s, s:O*, s:O*}", "role", "tool", "tool_call_id", id, "content",
                         json_object_get(item, "output"));
    return NULL;
}

/* Adds an item of the input to the messages. Calls that follow each other are one message; reasoning is left
 * out. */
static enum td_status add_item(json_t *list, json_t *item, size_t i, struct td_error *e)
{
    const char *type = json_string_value(json_object_get(item, "type"));
    json_t *last = json_array_get(list, json_array_size(list) - 1), *before = json_object_get(last, "tool_calls");
    if (type && !strcmp(type, "reasoning"))
        return TD_OK;
    json_t *message = type ? call_message(item, type) : NULL, *calls = json_object_get(message, "tool_calls");
    if (before && calls) {
        json_array_extend(before, calls);
        json_decref(message);
        return TD_OK;
    }
    if (!message && type && strcmp(type, "message") != 0)
        return td_fail(e, TD_ERR_INVALID,
                       "input[%zu].type: must be 'message', 'function_call', 'function_call_output' or 'reasoning'", i);
    message = message ? message : json_incref(item);
    json_object_del(message, "type");
    json_object_del(message, "id");
    json_object_del(message, "status");
    json_array_append_new(list, message);
    return TD_OK;
}

static enum td_status read_input(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    size_t i;
    json_t *item, *list = json_is_string(v) ? json_pack("[{s:s, s:O}]", "role", "user", "content", v) : json_array();
    enum td_status s = TD_OK;
    json_array_foreach(v, i, item) s = s ? s : add_item(list, item, i, e);
    if (!s)
        s = gw_member_messages(r, m, list, e);
    json_decref(list);
    return s;
}

/* {"type": "function", "name", "parameters", ...}: a function as chats have it. */
static enum td_status read_tools(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    size_t i;
    json_t *tool, *tools = json_array();
    enum td_status s = json_is_array(v) ? TD_OK : td_fail(e, TD_ERR_INVALID, "%s: must be a list", m->name);
    json_array_foreach(v, i, tool)
    {
        const char *type = json_string_value(json_object_get(tool, "type"));
        json_t *function = json_copy(tool);
        if (!s && (!type || strcmp(type, "function") != 0))
            s = td_fail(e, TD_ERR_INVALID, "%s[%zu].type: only 'function' is supported", m->name, i);
        json_object_del(function, "type");
        json_array_append_new(tools, json_pack("{s:s, s:o}", "type", "function", "function", function));
    }
    if (!s)
        s = gw_member_tools(r, m, tools, e);
    json_decref(tools);
    return s;
}

static const struct gw_member TEXT[] = {
    {"format", NULL, gw_member_format}, {"verbosity", NULL, gw_member_ignored}, {NULL, NULL, NULL}};

static enum td_status read_text(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    return gw_member_inner(r, m, TEXT, v, e);
}

static const struct gw_member REASONING[] = {{"effort", NULL, gw_member_effort},
                                             {"summary", NULL, gw_member_ignored},
                                             {"generate_summary", NULL, gw_member_ignored},
                                             {NULL, NULL, NULL}};

static enum td_status read_reasoning(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    return gw_member_inner(r, m, REASONING, v, e);
}

static enum td_status read_truncation(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    const char *word = json_string_value(v);
    (void)r;
    if (word && !strcmp(word, "disabled"))
        return TD_OK;
    return td_fail(e, TD_ERR_INVALID, "%s: only 'disabled' is supported", m->name);
}

static enum td_status read_previous(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    (void)r, (void)v;
    return td_fail(e, TD_ERR_INVALID, "%s: answers are not stored; send the whole conversation as input", m->name);
}

static const struct gw_member RESPONSES[] = {
    {"model", "model", gw_member_model},
    {"input", "messages", read_input},
    {"instructions", NULL, gw_member_system},
    {"max_output_tokens", "max_tokens", NULL},
    {"stream", NULL, gw_member_stream},
    {"temperature", "temperature", NULL},
    {"top_p", "top_p", NULL},
    {"presence_penalty", "presence_penalty", NULL},
    {"frequency_penalty", "frequency_penalty", NULL},
    {"text", NULL, read_text},
    {"tools", "tools", read_tools},
    {"tool_choice", "must_call", gw_member_tool_choice},
    {"truncation", NULL, read_truncation},
    {"background", NULL, gw_member_false},
    {"previous_response_id", NULL, read_previous},
    {"conversation", NULL, read_previous},
    {"prompt", NULL, gw_member_false},
    {"include", NULL, gw_member_false},
    {"top_logprobs", NULL, gw_member_false},
    {"tandem", NULL, gw_member_tandem},
    {"reasoning", NULL, read_reasoning},
    {"parallel_tool_calls", NULL, gw_member_parallel},
    {"max_tool_calls", NULL, gw_member_ignored},
    {"stream_options", NULL, gw_member_ignored},
    {"user", NULL, gw_member_ignored},
    {"metadata", NULL, gw_member_ignored},
    {"store", NULL, gw_member_ignored},
    {"service_tier", NULL, gw_member_ignored},
    {"safety_identifier", NULL, gw_member_ignored},
    {"prompt_cache_key", NULL, gw_member_ignored},
    {"prompt_cache_retention", NULL, gw_member_ignored},
    {NULL, NULL, NULL},
};

static enum td_status read_responses(struct gw_task *t, json_t *body, struct td_error *e)
{
    struct gw_reading r = {.task = t, .ask = json_object(), .table = RESPONSES};
    enum td_status s = gw_members_read(&r, body, e);
    if (!s)
        s = gw_system_first(&r, "input", e);
    if (!s)
        s = gw_headers_read(&r, e);
    gw_task_calls(t, 1);
    if (!s)
        s = gw_ask_generate(t, 0, r.ask, e);
    json_decref(r.system); /* of a request that is refused */
    json_decref(r.ask);
    return s;
}

/* ------------------------------------------------------------------ answers */

static json_t *part_json(json_t *text)
{
    return json_pack("{s:s, s:o, s:[], s:[]}", "type", "output_text", "text", text, "annotations", "logprobs");
}

/* "msg_..." and so on; the first item of the kind that most answers have only one of has no number. */
static json_t *id_json(const struct gw_task *t, const char *kind, uint32_t number)
{
    char id[GW_ID_BYTES + 32];
    snprintf(id, sizeof(id), number ? "%s_%s_%u" : "%s_%s", kind, t->id, number);
    return json_string(id);
}

/* text: NULL: nothing was said yet. */
static json_t *message_json(const struct gw_task *t, uint32_t number, const char *status, json_t *text)
{
    return json_pack("{s:s, s:o, s:s, s:s, s:o}", "type", "message", "id", id_json(t, "msg", number), "status", status,
                     "role", "assistant", "content", text ? json_pack("[o]", part_json(text)) : json_array());
}

static json_t *reasoning_json(const struct gw_task *t, uint32_t number, const char *status, json_t *text)
{
    return json_pack("{s:s, s:o, s:s, s:[], s:o}", "type", "reasoning", "id", id_json(t, "rs", number), "status",
                     status, "summary", "content",
                     text ? json_pack("[{s:s, s:o}]", "type", "reasoning_text", "text", text) : json_array());
}

static json_t *call_json(const struct gw_task *t, uint32_t number, const char *status, json_t *id, json_t *name,
                         json_t *arguments)
{
    return json_pack("{s:s, s:o, s:s, s:o, s:o, s:o}", "type", "function_call", "id", id_json(t, "fc", number),
                     "status", status, "call_id", id, "name", name, "arguments", arguments);
}

/* The items of an answer that is not streamed. */
static json_t *items_json(const struct gw_task *t, const struct gw_choice *c, const char *status)
{
    json_t *items = json_array(), *call;
    size_t i;
    if (c->reasoning.len)
        json_array_append_new(items, reasoning_json(t, (uint32_t)json_array_size(items), status,
                                                    ask_text_json(c->reasoning.data, c->reasoning.len)));
    if (c->text.len || !json_array_size(c->calls))
        json_array_append_new(
            items, message_json(t, (uint32_t)json_array_size(items), status, ask_text_json(c->text.data, c->text.len)));
    json_array_foreach(c->calls, i, call) json_array_append_new(
        items, call_json(t, (uint32_t)json_array_size(items), status, json_incref(json_object_get(call, "id")),
                         json_incref(json_object_get(call, "name")), json_incref(json_object_get(call, "arguments"))));
    return items;
}

static json_t *usage_json(const struct gw_task *t)
{
    return json_pack("{s:I, s:{s:I}, s:I, s:{s:i}, s:I}", "input_tokens", (json_int_t)t->prompt_tokens,
                     "input_tokens_details", "cached_tokens", (json_int_t)t->cached_tokens, "output_tokens",
                     (json_int_t)t->completion_tokens, "output_tokens_details", "reasoning_tokens", 0, "total_tokens",
                     (json_int_t)(t->prompt_tokens + t->completion_tokens));
}

static const char *status_of(const Tandem__V1__GenerateEnd *end)
{
    return !end ? "in_progress" : gw_is_cut(end) ? "incomplete" : "completed";
}

/* The whole object, with its items. end: NULL: the answer is under way. */
static json_t *response_json(const struct gw_task *t, json_t *items, const Tandem__V1__GenerateEnd *end)
{
    const char *status = status_of(end);
    char id[GW_ID_BYTES + 8];
    snprintf(id, sizeof(id), "resp_%s", t->id);
    json_t *v = json_pack("{s:s, s:s, s:I, s:s, s:s}", "id", id, "object", "response", "created_at",
                          (json_int_t)t->created_s, "status", status, "model", t->model ? t->model : "");
    json_object_set_new(v, "output", items);
    json_object_set_new(v, "usage", end ? usage_json(t) : json_null());
    json_object_set_new(v, "incomplete_details",
                        gw_is_cut(end) ? json_pack("{s:s}", "reason", "max_output_tokens") : json_null());
    json_object_update_missing_new(v, json_pack("{s:n, s:n, s:n, s:[], s:s, s:b, s:b, s:b, s:{s:{s:s}}, s:s, s:{}}",
                                                "error", "instructions", "previous_response_id", "tools", "tool_choice",
                                                "none", "parallel_tool_calls", 0, "store", 0, "background", 0, "text",
                                                "format", "type", "text", "truncation", "disabled", "metadata"));
    return v;
}

static void whole(struct gw_task *t, struct bytes *out)
{
    const struct gw_choice *c = &t->calls[0].choices[0];
    ask_json_append(out, response_json(t, items_json(t, c, status_of(c->end)), c->end));
}

/* ------------------------------------------------------------------- events */

/* An event of this type; its other members are in v, which is freed. */
static void event(struct gw_task *t, struct bytes *out, const char *type, json_t *v)
{
    bytes_printf(out, "event: %s\ndata: ", type);
    json_object_set_new(v, "type", json_string(type));
    json_object_set_new(v, "sequence_number", json_integer((json_int_t)t->n_events++));
    ask_json_append(out, v);
    bytes_printf(out, "\n\n");
}

static const char *const KINDS[] = {[GW_TEXT] = "msg", [GW_REASONING] = "rs", [GW_FUNCTION] = "fc"};

/* What the events of the open item have in common. */
static json_t *at_item(const struct gw_task *t)
{
    uint32_t number = t->n_parts - 1;
    json_t *v =
        json_pack("{s:o, s:I}", "item_id", id_json(t, KINDS[t->part], number), "output_index", (json_int_t)number);
    if (t->part != GW_FUNCTION)
        json_object_set_new(v, "content_index", json_integer(0));
    return v;
}

static void say_item(struct gw_task *t, struct bytes *out, const char *type, json_t *item)
{
    event(t, out, type, json_pack("{s:I, s:o}", "output_index", (json_int_t)t->n_parts - 1, "item", item));
}

/* What was said of the open item so far, which is kept in c->text. */
static json_t *said(const struct gw_choice *c)
{
    return ask_text_json(c->text.data, c->text.len);
}

static void close_item(struct gw_task *t, struct gw_choice *c, const char *status, struct bytes *out)
{
    static const char *const DONE[] = {[GW_TEXT] = "response.output_text.done",
                                       [GW_REASONING] = "response.reasoning_text.done",
                                       [GW_FUNCTION] = "response.function_call_arguments.done"};
    if (!t->part)
        return;
    uint32_t number = t->n_parts - 1;
    json_t *v = at_item(t), *item, *call = json_array_get(c->calls, json_array_size(c->calls) - 1);
    json_object_set_new(v, t->part == GW_FUNCTION ? "arguments" : "text", said(c));
    if (t->part == GW_TEXT)
        json_object_set_new(v, "logprobs", json_array());
    event(t, out, DONE[t->part], v);
    if (t->part == GW_TEXT) {
        v = at_item(t);
        json_object_set_new(v, "part", part_json(said(c)));
        event(t, out, "response.content_part.done", v);
        item = message_json(t, number, status, said(c));
    } else if (t->part == GW_REASONING) {
        item = reasoning_json(t, number, status, said(c));
    } else {
        item = call_json(t, number, status, json_incref(json_object_get(call, "id")),
                         json_incref(json_object_get(call, "name")), said(c));
    }
    json_array_append(t->parts, item);
    say_item(t, out, "response.output_item.done", item);
    bytes_clear(&c->text);
    t->part = GW_NOTHING;
}

/* call: of GW_FUNCTION. */
static void open_item(struct gw_task *t, struct gw_choice *c, enum gw_part part, const json_t *call, struct bytes *out)
{
    static const char OPEN[] = "in_progress";
    close_item(t, c, "completed", out);
    t->part = part;
    uint32_t number = t->n_parts++;
    json_t *item = part == GW_TEXT        ? message_json(t, number, OPEN, NULL)
                   : part == GW_REASONING ? reasoning_json(t, number, OPEN, NULL)
                                          : call_json(t, number, OPEN, json_incref(json_object_get(call, "id")),
                                                      json_incref(json_object_get(call, "name")), json_string(""));
    say_item(t, out, "response.output_item.added", item);
    if (part != GW_TEXT)
        return;
    json_t *v = at_item(t);
    json_object_set_new(v, "part", part_json(json_string("")));
    event(t, out, "response.content_part.added", v);
}

static void say(struct gw_task *t, struct gw_choice *c, const char *type, ProtobufCBinaryData text, struct bytes *out)
{
    json_t *v = at_item(t);
    bytes_append(&c->text, text.data, text.len);
    json_object_set_new(v, "delta", ask_text_json(text.data, text.len));
    if (t->part == GW_TEXT)
        json_object_set_new(v, "logprobs", json_array());
    event(t, out, type, v);
}

static void begin(struct gw_task *t, struct bytes *out)
{
    t->started = 1;
    t->parts = json_array();
    event(t, out, "response.created", json_pack("{s:o}", "response", response_json(t, json_array(), NULL)));
    event(t, out, "response.in_progress", json_pack("{s:o}", "response", response_json(t, json_array(), NULL)));
}

static void delta(struct gw_task *t, struct gw_call *call, const Tandem__V1__GenerateResponse *m, struct bytes *out)
{
    struct gw_choice *c = &call->choices[0];
    if (!t->started)
        begin(t, out);
    if (m->reasoning.len) {
        if (t->part != GW_REASONING)
            open_item(t, c, GW_REASONING, NULL, out);
        say(t, c, "response.reasoning_text.delta", m->reasoning, out);
    }
    if (t->part != GW_TEXT && (m->text.len || (m->end && !t->n_parts && !m->n_tool_calls)))
        open_item(t, c, GW_TEXT, NULL, out);
    if (m->text.len)
        say(t, c, "response.output_text.delta", m->text, out);
    for (size_t i = 0; i < m->n_tool_calls; i++) {
        const Tandem__V1__ToolCall *d = m->tool_calls[i];
        if (d->id.len) {
            json_t *one = json_pack("{s:o, s:o}", "id", ask_text_json(d->id.data, d->id.len), "name",
                                    ask_text_json(d->name.data, d->name.len));
            open_item(t, c, GW_FUNCTION, one, out);
            c->calls = c->calls ? c->calls : json_array();
            json_array_append_new(c->calls, one);
        }
        say(t, c, "response.function_call_arguments.delta", d->arguments, out);
    }
    if (!m->end)
        return;
    close_item(t, c, status_of(m->end), out);
    event(t, out, gw_is_cut(m->end) ? "response.incomplete" : "response.completed",
          json_pack("{s:o}", "response", response_json(t, json_incref(t->parts), m->end)));
}

static void end(struct gw_task *t, struct bytes *out)
{
    (void)t, (void)out; /* the last message has said it */
}

const struct gw_api GW_RESPONSES = {.path = "/v1/responses",
                                    .rpc = "/tandem.v1.Tandem/Generate",
                                    .response = &tandem__v1__generate_response__descriptor,
                                    .read = read_responses,
                                    .delta = delta,
                                    .end = end,
                                    .whole = whole,
                                    .error_event = "event: error\n"};
