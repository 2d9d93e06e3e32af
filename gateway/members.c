#include "gateway/members.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "proto/ask/ask_params.h"

enum { NAME_BYTES = 96 };

enum td_status gw_member_put(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    enum td_status s = ask_param_check(ask_param_find(m->ask), m->name, v, e);
    if (!s)
        json_object_set(r->ask, m->ask, v);
    return s;
}

static const struct gw_member *find(const struct gw_member *table, const char *name)
{
    while (table->name && strcmp(table->name, name))
        table++;
    return table->name ? table : NULL;
}

enum td_status gw_members_read(struct gw_reading *r, json_t *body, struct td_error *e)
{
    const char *name;
    json_t *v;
    if (!r->task->members)
        r->task->members = r->table;
    json_object_foreach(body, name, v)
    {
        const struct gw_member *m = find(r->table, name);
        enum td_status s = TD_OK;
        if (!m)
            return td_fail(e, TD_ERR_INVALID, "%.64s: no such member", name);
        if (!json_is_null(v))
            s = m->read ? m->read(r, m, v, e) : gw_member_put(r, m, v, e);
        if (s)
            return s;
    }
    if (r->has_one_call && (json_object_get(r->ask, "must_call") || json_object_get(r->ask, "function")))
        json_object_set_new(r->ask, "one_call", json_true());
    return TD_OK;
}

void gw_members_rename(const struct gw_member *table, const char *text, char *out, size_t cap)
{
    size_t len = rpc_text_field(text), section = strcspn(text, ".");
    const char *name = section < len ? text + section + 1 : text;
    size_t n = strcspn(name, ".[:");
    while (len && table && table->name && !(table->ask && strlen(table->ask) == n && !strncmp(table->ask, name, n)))
        table++;
    if (len && table && table->name)
        snprintf(out, cap, "%s%s", table->name, name + n);
    else
        snprintf(out, cap, "%s", text);
}

enum td_status gw_member_ignored(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    (void)r, (void)m, (void)v, (void)e;
    return TD_OK;
}

enum td_status gw_member_false(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    (void)r;
    bool is_nothing = json_is_false(v) || (json_is_array(v) && !json_array_size(v)) ||
                      (json_is_object(v) && !json_object_size(v)) || (json_is_string(v) && !json_string_length(v));
    return is_nothing ? TD_OK : td_fail(e, TD_ERR_INVALID, "%s: is not supported", m->name);
}

/* ----------------------------------------------------------------- structured output */

/* Puts a value under the name of ask_params.h; errors name the member that has it. */
static enum td_status put_as(struct gw_reading *r, const char *ask, const char *name, json_t *v, struct td_error *e)
{
    const struct gw_member m = {name, ask, NULL};
    return gw_member_put(r, &m, v, e);
}

enum td_status gw_member_format(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    const char *type = json_string_value(json_object_get(v, "type"));
    json_t *inner = json_object_get(v, "json_schema"), *schema = json_object_get(inner ? inner : v, "schema");
    char name[NAME_BYTES];
    if (type && !strcmp(type, "text"))
        return TD_OK;
    if (type && !strcmp(type, "json_object"))
        return put_as(r, "json_object", m->name, json_true(), e);
    if (!type || strcmp(type, "json_schema") != 0)
        return td_fail(e, TD_ERR_INVALID, "%s.type: only 'text', 'json_object' and 'json_schema' are supported",
                       m->name);
    snprintf(name, sizeof(name), "%s%s.schema", m->name, inner ? ".json_schema" : "");
    return schema ? put_as(r, "json_schema", name, schema, e) : td_fail(e, TD_ERR_INVALID, "%s: is missing", name);
}

/* A schema may be JSON as text. */
static enum td_status read_schema(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    json_t *schema =
        json_is_string(v) ? json_loadb(json_string_value(v), json_string_length(v), 0, NULL) : json_incref(v);
    enum td_status s = schema ? gw_member_put(r, m, schema, e) : td_fail(e, TD_ERR_INVALID, "%s: is not JSON", m->name);
    json_decref(schema);
    return s;
}

static const struct gw_member STRUCTURED[] = {{"json", "json_schema", read_schema},
                                              {"regex", "regex", NULL},
                                              {"choice", "choice", NULL},
                                              {"grammar", "grammar", NULL},
                                              {"json_object", "json_object", NULL},
                                              {"disable_any_whitespace", NULL, gw_member_false},
                                              {"whitespace_pattern", NULL, gw_member_false},
                                              {NULL, NULL, NULL}};

enum td_status gw_member_inner(struct gw_reading *r, const struct gw_member *m, const struct gw_member *table,
                               json_t *v, struct td_error *e)
{
    struct gw_reading inner = {.task = r->task, .ask = r->ask, .table = table};
    struct td_error why = {{0}};
    if (!json_is_object(v))
        return td_fail(e, TD_ERR_INVALID, "%s: must be an object", m->name);
    enum td_status s = gw_members_read(&inner, v, &why);
    return s ? td_fail(e, s, "%s.%s", m->name, why.text) : TD_OK;
}

enum td_status gw_member_structured(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    return gw_member_inner(r, m, STRUCTURED, v, e);
}

enum td_status gw_member_parallel(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    if (!json_is_boolean(v))
        return td_fail(e, TD_ERR_INVALID, "%s: must be true or false", m->name);
    r->has_one_call = json_is_false(v);
    return TD_OK;
}

/* Adds values for the template, which count less than those that are there. Takes the reference. */
static void add_variables(struct gw_reading *r, json_t *more)
{
    json_t *all = json_object_get(r->ask, "variables");
    all = all ? json_copy(all) : json_object();
    json_object_update_missing(all, more);
    json_object_set_new(r->ask, "variables", all);
    json_decref(more);
}

void gw_member_reasons(struct gw_reading *r, bool is_on)
{
    add_variables(r, json_pack("{s:b, s:b}", "enable_thinking", is_on, "thinking", is_on));
}

enum td_status gw_member_effort(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    const char *effort = json_string_value(v);
    if (!effort)
        return td_fail(e, TD_ERR_INVALID, "%s: must be a text", m->name);
    add_variables(r, json_pack("{s:O}", "reasoning_effort", v));
    gw_member_reasons(r, strcmp(effort, "none") != 0);
    return TD_OK;
}

enum td_status gw_member_variables(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    json_t *before = json_incref(json_object_get(r->ask, m->ask));
    enum td_status s = gw_member_put(r, m, v, e);
    if (!s && before)
        add_variables(r, json_incref(before));
    json_decref(before);
    return s;
}

/* none: the functions are not offered. */
enum td_status gw_member_tools(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    bool is_empty = json_is_array(v) && !json_array_size(v);
    return r->has_no_tools || is_empty ? TD_OK : gw_member_put(r, m, v, e);
}

enum td_status gw_member_tool_choice(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    const char *word = json_string_value(v);
    if (word && !strcmp(word, "none")) {
        r->has_no_tools = true;
        json_object_del(r->ask, "tools");
        return TD_OK;
    }
    if (word && !strcmp(word, "auto"))
        return TD_OK;
    if (word && (!strcmp(word, "required") || !strcmp(word, "any"))) {
        json_object_set_new(r->ask, "must_call", json_true());
        return TD_OK;
    }
    json_t *function = json_object_get(v, "function"), *name = json_object_get(function ? function : v, "name");
    if (json_is_string(name)) {
        json_object_set(r->ask, "function", name);
        return TD_OK;
    }
    return td_fail(e, TD_ERR_INVALID, "%s: must be 'none', 'auto', 'required', or a function", m->name);
}

enum td_status gw_member_stream(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    r->task->is_stream = json_is_true(v);
    return json_is_boolean(v) ? TD_OK : td_fail(e, TD_ERR_INVALID, "%s: must be true or false", m->name);
}

enum td_status gw_member_model(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    enum td_status s = gw_member_put(r, m, v, e);
    if (!s)
        r->task->model = mem_strdup(json_string_value(v));
    return s;
}

/* ---------------------------------------------------------------- messages */

/* A list of text parts as one text, a line for each part; NULL, with an error: a part is something else. */
static json_t *join_parts(const char *where, json_t *parts, struct td_error *e)
{
    struct bytes text = {0};
    size_t i;
    json_t *part, *whole = NULL;
    bool is_good = true;
    json_array_foreach(parts, i, part)
    {
        const char *type = json_string_value(json_object_get(part, "type"));
        json_t *its = json_object_get(part, "text");
        is_good = type && (!strcmp(type, "text") || !strcmp(type, "input_text") || !strcmp(type, "output_text")) &&
                  json_is_string(its);
        if (!is_good) {
            td_fail(e, TD_ERR_INVALID, "%s[%zu]: only parts {\"type\": \"text\", \"text\": ...} are understood", where,
                    i);
            break;
        }
        if (i)
            bytes_append(&text, "\n", 1);
        bytes_append(&text, json_string_value(its), json_string_length(its));
    }
    if (is_good)
        whole = json_stringn(text.data ? text.data : "", text.len);
    bytes_free(&text);
    return whole;
}

/* Arguments of calls come as text, and templates want the object that the text is. */
static void open_arguments(json_t *message)
{
    size_t i;
    json_t *call;
    json_array_foreach(json_object_get(message, "tool_calls"), i, call)
    {
        json_t *function = json_object_get(call, "function"), *text = json_object_get(function, "arguments"), *v;
        if (!json_is_string(text))
            continue;
        v = json_loadb(json_string_value(text), json_string_length(text), JSON_ALLOW_NUL, NULL);
        if (v)
            json_object_set_new(function, "arguments", v);
    }
}

/* list: the name of the member that has the messages. */
static enum td_status read_message(const char *list, json_t *message, size_t i, struct td_error *e)
{
    char where[NAME_BYTES];
    json_t *role = json_object_get(message, "role"), *content = json_object_get(message, "content"), *text;
    if (!json_is_object(message))
        return td_fail(e, TD_ERR_INVALID, "%s[%zu]: must be an object", list, i);
    if (!json_is_string(role))
        return td_fail(e, TD_ERR_INVALID, "%s[%zu].role: must be a text", list, i);
    if (!strcmp(json_string_value(role), "developer"))
        json_object_set_new(message, "role", json_string("system"));
    if (content && !json_is_null(content) && !json_is_string(content) && !json_is_array(content))
        return td_fail(e, TD_ERR_INVALID, "%s[%zu].content: must be a text, or a list of parts", list, i);
    if ((!content || json_is_null(content)) && !json_object_get(message, "tool_calls"))
        return td_fail(e, TD_ERR_INVALID, "%s[%zu].content: is missing", list, i);
    if (json_is_array(content)) {
        snprintf(where, sizeof(where), "%s[%zu].content", list, i);
        if (!(text = join_parts(where, content, e)))
            return TD_ERR_INVALID;
        json_object_set_new(message, "content", text);
    }
    open_arguments(message);
    return TD_OK;
}

enum td_status gw_member_messages(struct gw_reading *r, const struct gw_member *m, json_t *list, struct td_error *e)
{
    size_t i;
    json_t *v;
    if (!json_is_array(list) || !json_array_size(list))
        return td_fail(e, TD_ERR_INVALID, "%s: must be a list of messages, not empty", m->name);
    json_array_foreach(list, i, v)
    {
        enum td_status s = read_message(m->name, v, i, e);
        if (s)
            return s;
    }
    return gw_member_put(r, m, list, e);
}

enum td_status gw_member_system(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    if (!json_is_string(v) && !json_is_array(v))
        return td_fail(e, TD_ERR_INVALID, "%s: must be a text, or a list of parts", m->name);
    json_decref(r->system);
    r->system = json_is_string(v) ? json_incref(v) : join_parts(m->name, v, e);
    return r->system ? TD_OK : TD_ERR_INVALID;
}

enum td_status gw_system_first(struct gw_reading *r, const char *messages, struct td_error *e)
{
    json_t *list = json_object_get(r->ask, "messages"), *system = r->system;
    r->system = NULL;
    if (list && system)
        json_array_insert_new(list, 0, json_pack("{s:s, s:O}", "role", "system", "content", system));
    json_decref(system);
    return list ? TD_OK : td_fail(e, TD_ERR_INVALID, "%s: is missing", messages);
}

/* -------------------------------------------------------------------- calls */

enum td_status gw_ask_generate(struct gw_task *t, uint32_t i, json_t *ask, struct td_error *e)
{
    bool has_seed = json_object_get(ask, "seed") != NULL;
    json_object_set_new(ask, "id", json_string(t->id));
    if (!has_seed)
        json_object_set_new(ask, "seed", ask_seed_json(random_u64() >> 11)); /* 53 bits, as the router's */
    enum td_status s = gw_task_ask(t, i, ask, e);
    if (!s)
        ((Tandem__V1__GenerateRequest *)t->calls[i].request)->want_pieces = t->wants_scores || t->wants_prompt_list;
    if (!has_seed)
        json_object_del(ask, "seed");
    return s;
}

/* ------------------------------------------------------------------ tandem */

/* Parameters of how a request is served, which no other API has. */
static const struct gw_member TANDEM[] = {
    {"ttft_ms", "ttft_ms", NULL},
    {"tpot_ms", "tpot_ms", NULL},
    {"deadline_ms", "deadline_ms", NULL},
    {"priority", "priority", NULL},
    {"tenant", "tenant", NULL},
    {"lora", "lora", NULL},
    {"typical_p", "typical_p", NULL},
    {"cache_salt", "cache_salt", NULL},
    {"workflow_id", "workflow_id", NULL},
    {"workflow_deadline_ms", "workflow_deadline_ms", NULL},
    {"workflow_steps_left", "workflow_steps_left", NULL},
    {"bypass_cache", "bypass_cache", NULL},
    {NULL, NULL, NULL},
};

enum td_status gw_member_tandem(struct gw_reading *r, const struct gw_member *m, json_t *v, struct td_error *e)
{
    return gw_member_inner(r, m, TANDEM, v, e);
}

static enum td_status read_header(struct gw_reading *r, const char *header, const char *ask, struct td_error *e)
{
    const char *text = http_header(r->task->conn, header);
    json_t *v;
    if (!text || json_object_get(r->ask, ask))
        return TD_OK;
    enum td_status s = ask_param_parse(ask_param_find(ask), header, text, &v, e);
    if (!s)
        json_object_set_new(r->ask, ask, v);
    return s;
}

enum td_status gw_headers_read(struct gw_reading *r, struct td_error *e)
{
    static const char *const OTHERS[][2] = {{"x-slo-ttft-ms", "ttft_ms"}, {"x-slo-tpot-ms", "tpot_ms"}};
    enum td_status s = TD_OK;
    for (const struct gw_member *m = TANDEM; m->name && !s; m++) {
        char header[NAME_BYTES];
        snprintf(header, sizeof(header), "x-tandem-%s", m->name);
        for (char *c = header; *c; c++)
            *c = *c == '_' ? '-' : *c;
        s = read_header(r, header, m->ask, e);
    }
    for (size_t i = 0; i < sizeof(OTHERS) / sizeof(OTHERS[0]) && !s; i++)
        s = read_header(r, OTHERS[i][0], OTHERS[i][1], e);
    return s;
}
