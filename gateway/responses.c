/*
 * OpenAI's Responses, as the Open Responses text has them, without state: nothing is stored, so an answer
 * can't be asked for later, or be built upon by its id.
 *
 * A stream is one message with one part:
 *
 *     response.created, response.in_progress, response.output_item.added, response.content_part.added,
 *     response.output_text.delta..., response.output_text.done, response.content_part.done,
 *     response.output_item.done, response.completed or response.incomplete
 *
 * Each event has a number of its own, and the later ones repeat the text, which is therefore kept.
 */
#include <stdio.h>
#include <string.h>

#include "gateway/members.h"

/* ------------------------------------------------------------------ members */

/* One item of the input: a message; its role and content are those of a chat. */
static enum td_status check_item(const json_t *item, size_t i, struct td_error *e)
{
    const char *type = json_string_value(json_object_get(item, "type"));
    if (type && strcmp(type, "message") != 0)
        return td_fail(e, TD_ERR_INVALID, "input[%zu].type: only 'message' is supported", i);
    return TD_OK;
}

static enum td_status read_input(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    size_t i;
    json_t *item, *list = json_is_string(v) ? json_pack("[{s:s, s:O}]", "role", "user", "content", v) : json_incref(v);
    enum td_status s = TD_OK;
    json_array_foreach(list, i, item)
    {
        s = s ? s : check_item(item, i, e);
        json_object_del(item, "type");
        json_object_del(item, "id");
        json_object_del(item, "status");
    }
    if (!s)
        s = gw_member_messages(r, m, list, e);
    json_decref(list);
    return s;
}

static const struct gw_member TEXT[] = {
    {"format", NULL, gw_member_format}, {"verbosity", NULL, gw_member_ignored}, {NULL, NULL, NULL}};

static enum td_status read_text(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    return gw_member_inner(r, m, TEXT, v, e);
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
    {"tools", NULL, gw_member_false},
    {"tool_choice", NULL, gw_member_tool_choice},
    {"truncation", NULL, read_truncation},
    {"background", NULL, gw_member_false},
    {"previous_response_id", NULL, read_previous},
    {"conversation", NULL, read_previous},
    {"prompt", NULL, gw_member_false},
    {"include", NULL, gw_member_false},
    {"top_logprobs", NULL, gw_member_false},
    {"tandem", NULL, gw_member_tandem},
    {"reasoning", NULL, gw_member_ignored},
    {"parallel_tool_calls", NULL, gw_member_ignored},
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

static json_t *part_json(const struct bytes *text)
{
    return json_pack("{s:s, s:o, s:[], s:[]}", "type", "output_text", "text", ask_text_json(text->data, text->len),
                     "annotations", "logprobs");
}

/* The message. text: NULL: nothing was said yet. */
static json_t *item_json(const struct gw_task *t, const char *status, const struct bytes *text)
{
    char id[GW_ID_BYTES + 8];
    snprintf(id, sizeof(id), "msg_%s", t->id);
    return json_pack("{s:s, s:s, s:s, s:s, s:o}", "type", "message", "id", id, "status", status, "role", "assistant",
                     "content", text ? json_pack("[o]", part_json(text)) : json_array());
}

static json_t *usage_json(const struct gw_task *t)
{
    return json_pack("{s:I, s:{s:I}, s:I, s:{s:i}, s:I}", "input_tokens", (json_int_t)t->prompt_tokens,
                     "input_tokens_details", "cached_tokens", (json_int_t)t->cached_tokens, "output_tokens",
                     (json_int_t)t->completion_tokens, "output_tokens_details", "reasoning_tokens", 0, "total_tokens",
                     (json_int_t)(t->prompt_tokens + t->completion_tokens));
}

/* The whole object. end: NULL: the answer is under way, and there is no output yet. */
static json_t *response_json(const struct gw_task *t, const struct gw_choice *c, const Tandem__V1__GenerateEnd *end)
{
    const char *status = !end ? "in_progress" : gw_is_cut(end) ? "incomplete" : "completed";
    char id[GW_ID_BYTES + 8];
    snprintf(id, sizeof(id), "resp_%s", t->id);
    json_t *v = json_pack("{s:s, s:s, s:I, s:s, s:s}", "id", id, "object", "response", "created_at",
                          (json_int_t)t->created_s, "status", status, "model", t->model ? t->model : "");
    json_object_set_new(v, "output", end ? json_pack("[o]", item_json(t, status, &c->text)) : json_array());
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
    ask_json_append(out, response_json(t, c, c->end));
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

/* What the events of the part have in common. */
static json_t *at_part(const struct gw_task *t)
{
    char id[GW_ID_BYTES + 8];
    snprintf(id, sizeof(id), "msg_%s", t->id);
    return json_pack("{s:s, s:i, s:i}", "item_id", id, "output_index", 0, "content_index", 0);
}

static void begin(struct gw_task *t, struct gw_choice *c, struct bytes *out)
{
    const struct bytes nothing = {0};
    json_t *part = at_part(t);
    event(t, out, "response.created", json_pack("{s:o}", "response", response_json(t, c, NULL)));
    event(t, out, "response.in_progress", json_pack("{s:o}", "response", response_json(t, c, NULL)));
    event(t, out, "response.output_item.added",
          json_pack("{s:i, s:o}", "output_index", 0, "item", item_json(t, "in_progress", NULL)));
    json_object_set_new(part, "part", part_json(&nothing));
    event(t, out, "response.content_part.added", part);
}

static void say_end(struct gw_task *t, struct gw_choice *c, const Tandem__V1__GenerateEnd *end, struct bytes *out)
{
    json_t *text = at_part(t), *part = at_part(t);
    json_object_set_new(text, "text", ask_text_json(c->text.data, c->text.len));
    json_object_set_new(text, "logprobs", json_array());
    json_object_set_new(part, "part", part_json(&c->text));
    event(t, out, "response.output_text.done", text);
    event(t, out, "response.content_part.done", part);
    event(t, out, "response.output_item.done",
          json_pack("{s:i, s:o}", "output_index", 0, "item",
                    item_json(t, gw_is_cut(end) ? "incomplete" : "completed", &c->text)));
    event(t, out, gw_is_cut(end) ? "response.incomplete" : "response.completed",
          json_pack("{s:o}", "response", response_json(t, c, end)));
}

static void delta(struct gw_task *t, struct gw_call *call, const Tandem__V1__GenerateResponse *m, struct bytes *out)
{
    struct gw_choice *c = &call->choices[0];
    if (!t->started)
        begin(t, c, out);
    t->started = 1;
    if (m->text.len) {
        json_t *v = at_part(t);
        bytes_append(&c->text, m->text.data, m->text.len);
        json_object_set_new(v, "delta", ask_text_json(m->text.data, m->text.len));
        json_object_set_new(v, "logprobs", json_array());
        event(t, out, "response.output_text.delta", v);
    }
    if (m->end)
        say_end(t, c, m->end, out);
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
