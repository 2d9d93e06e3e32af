/*
 * Anthropic's Messages, and its count of tokens.
 *
 * A stream is one text block:
 *
 *     message_start, content_block_start, content_block_delta..., content_block_stop, message_delta,
 *     message_stop
 *
 * The numbers of tokens are known at the end, so message_start has 0, and message_delta has all of them.
 */
#include <stdio.h>
#include <string.h>

#include "gateway/members.h"

/* ------------------------------------------------------------------ members */

static enum td_status read_thinking(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    const char *type = json_string_value(json_object_get(v, "type"));
    (void)r;
    if (type && !strcmp(type, "disabled"))
        return TD_OK;
    return td_fail(e, TD_ERR_INVALID, "%s.type: only 'disabled' is supported", m->name);
}

static enum td_status read_tool_choice(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    const char *type = json_string_value(json_object_get(v, "type"));
    (void)r;
    if (type && (!strcmp(type, "none") || !strcmp(type, "auto")))
        return TD_OK;
    return td_fail(e, TD_ERR_INVALID, "%s.type: only 'none' and 'auto' are supported", m->name);
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
    {"messages", "messages", gw_member_messages},
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
    {"tools", NULL, gw_member_false},
    {"tool_choice", NULL, read_tool_choice},
    {"tandem", NULL, gw_member_tandem},
    {"metadata", NULL, gw_member_ignored},
    {"diagnostics", NULL, gw_member_ignored},
    IGNORED,
    {NULL, NULL, NULL},
};

static const struct gw_member COUNT_TOKENS[] = {
    {"model", "model", NULL},
    {"messages", "messages", gw_member_messages},
    {"system", NULL, gw_member_system},
    {"thinking", NULL, read_thinking},
    {"tools", NULL, gw_member_false},
    {"tool_choice", NULL, read_tool_choice},
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
    if (!s && strcmp(json_string_value(json_object_get(last, "role")), "user") != 0)
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

static void whole(struct gw_task *t, struct bytes *out)
{
    const struct gw_choice *c = &t->calls[0].choices[0];
    json_t *text = json_pack("{s:s, s:o}", "type", "text", "text", ask_text_json(c->text.data, c->text.len));
    ask_json_append(out, message_json(t, json_pack("[o]", text), c->end));
}

/* An event of this type; its other members are in v, which is freed. */
static void event(struct bytes *out, const char *type, json_t *v)
{
    bytes_printf(out, "event: %s\ndata: ", type);
    json_object_set_new(v, "type", json_string(type));
    ask_json_append(out, v);
    bytes_printf(out, "\n\n");
}

static void begin(struct gw_task *t, struct bytes *out)
{
    event(out, "message_start", json_pack("{s:o}", "message", message_json(t, json_array(), NULL)));
    event(out, "content_block_start",
          json_pack("{s:i, s:{s:s, s:s}}", "index", 0, "content_block", "type", "text", "text", ""));
}

static void delta(struct gw_task *t, struct gw_call *c, const Tandem__V1__GenerateResponse *m, struct bytes *out)
{
    (void)c;
    if (!t->started)
        begin(t, out);
    t->started = 1;
    if (m->text.len) {
        bytes_printf(out, "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,"
                          "\"delta\":{\"type\":\"text_delta\",\"text\":\"");
        ask_text_escape(out, m->text.data, m->text.len);
        bytes_printf(out, "\"}}\n\n");
    }
    if (!m->end)
        return;
    json_t *why = json_object();
    add_reason(why, m->end);
    event(out, "content_block_stop", json_pack("{s:i}", "index", 0));
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
