/*
 * Calls that must be made, as a structure for a grammar (grammar/structure.c): each convention's marks, the
 * names that were offered, and the schemas of their arguments. Reasoning may come before, without the
 * character '<'.
 */
#include <stdio.h>
#include <string.h>

#include "model/reply_internal.h"

static void add_text(json_t *list, const char *text)
{
    json_array_append_new(list, json_string(text));
}

static void add_mark(json_t *list, const char *text)
{
    json_array_append_new(list, json_pack("{s:s}", "mark", text));
}

static void add_regex(json_t *list, const char *text)
{
    json_array_append_new(list, json_pack("{s:s}", "regex", text));
}

static void add_schema(json_t *list, json_t *function)
{
    json_t *schema = json_object_get(function, "parameters");
    schema = json_is_object(schema) ? json_copy(schema) : json_object();
    if (!json_object_get(schema, "type"))
        json_object_set_new(schema, "type", json_string("object"));
    json_array_append_new(list, json_pack("{s:o}", "schema", schema));
}

/* Adds an expression that matches each of these texts, and nothing else. */
static void add_choice(json_t *list, json_t *texts)
{
    struct bytes regex = {0};
    size_t i;
    json_t *v;
    json_array_foreach(texts, i, v)
    {
        bytes_append(&regex, i ? "|" : "(", 1);
        for (const char *c = json_is_string(v) ? json_string_value(v) : ""; *c; c++) {
            if (strchr("\\^$.|?*+()[]{}/-", *c))
                bytes_append(&regex, "\\", 1);
            bytes_append(&regex, c, 1);
        }
    }
    bytes_append(&regex, ")", 1);
    add_regex(list, regex.data);
    bytes_free(&regex);
}

/* The value of an argument between marks: a text as it is, anything else as JSON. */
static void add_value(json_t *list, json_t *schema)
{
    const char *type = json_string_value(json_object_get(schema, "type"));
    json_t *texts = json_object_get(schema, "enum");
    if (json_array_size(texts) && type && !strcmp(type, "string"))
        add_choice(list, texts);
    else if (!type || !strcmp(type, "string"))
        add_regex(list, "[^<]*");
    else
        json_array_append_new(list, json_pack("{s:O}", "schema", schema));
}

static bool is_required(json_t *parameters, const char *name)
{
    size_t i;
    json_t *v;
    json_array_foreach(json_object_get(parameters, "required"), i,
                       v) if (json_is_string(v) && !strcmp(json_string_value(v), name)) return true;
    return false;
}

/* Arguments as pairs of marks or tags, in the order of the schema. */
static void add_pairs(json_t *list, json_t *function, const char *open, const char *middle, const char *close)
{
    json_t *parameters = json_object_get(function, "parameters"), *schema;
    const char *name;
    json_object_foreach(json_object_get(parameters, "properties"), name, schema)
    {
        json_t *one = json_array();
        add_text(one, open);
        add_text(one, name);
        add_text(one, middle);
        add_value(one, schema);
        add_text(one, close);
        if (is_required(parameters, name))
            json_array_extend(list, one);
        else
            json_array_append_new(list, json_pack("{s:O}", "optional", one));
        json_decref(one);
    }
}

static json_t *call_sequence(const struct convention *c, json_t *function, const char *name)
{
    json_t *list = json_array();
    char text[256];
    bool is_parameters = c->bare == '{';
    switch (c->form) {
    case CALL_JSON:
        if (*c->end)
            add_mark(list, c->begin);
        snprintf(text, sizeof(text), "%s{\"name\": \"%s\", \"%s\": ", *c->end ? "\n" : "", name,
                 is_parameters ? "parameters" : "arguments");
        add_text(list, text);
        add_schema(list, function);
        add_text(list, *c->end ? "}\n" : "}");
        if (*c->end)
            add_mark(list, c->end);
        break;
    case CALL_NAMED:
        add_mark(list, c->begin);
        if (*c->before_name) { /* "function" and its mark */
            add_text(list, "function");
            add_mark(list, c->before_name + strlen("function"));
            add_text(list, name);
            add_text(list, c->after_name);
        } else {
            add_text(list, name);
            add_mark(list, c->after_name);
        }
        add_schema(list, function);
        if (*c->after_arguments) {
            add_text(list, "\n");
            add_text(list, c->after_arguments);
        }
        if (*c->end)
            add_mark(list, c->end);
        break;
    case CALL_KEYS:
        add_mark(list, c->begin);
        add_text(list, name);
        add_text(list, "\n");
        add_pairs(list, function, "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n");
        add_mark(list, c->end);
        break;
    case CALL_TAGS:
        add_mark(list, c->begin);
        snprintf(text, sizeof(text), "\n<function=%s>\n", name);
        add_text(list, text);
        add_pairs(list, function, "<parameter=", ">\n", "\n</parameter>\n");
        add_text(list, "</function>\n");
        add_mark(list, c->end);
        break;
    case CALL_CHANNELS:
        add_mark(list, "<|channel|>");
        snprintf(text, sizeof(text), "commentary to=functions.%s ", name);
        add_text(list, text);
        add_mark(list, "<|constrain|>");
        add_text(list, "json");
        add_mark(list, "<|message|>");
        add_schema(list, function);
        break;
    case CALL_PYTHON:
        break;
    }
    return list;
}

/* What may come before the calls: reasoning, then marks around all of them. */
static json_t *before_calls(const struct convention *c, bool has_reasoning, bool begins_reasoning)
{
    json_t *list = json_array(), *thought = json_array();
    const char *open = c->think[0] ? c->think[0] : "<think>", *close = c->think[1] ? c->think[1] : "</think>";
    if (c->form == CALL_CHANNELS) {
        add_mark(thought, "<|channel|>");
        add_text(thought, "analysis");
        add_mark(thought, "<|message|>");
        add_regex(thought, "[^<]*");
        add_mark(thought, "<|end|>");
        add_mark(thought, "<|start|>");
        add_text(thought, "assistant");
    } else {
        if (!begins_reasoning)
            add_mark(thought, open);
        add_regex(thought, "[^<]*");
        add_mark(thought, close);
        add_regex(thought, "\\n{0,2}");
    }
    if (has_reasoning && begins_reasoning)
        json_array_extend(list, thought);
    else if (has_reasoning)
        json_array_append_new(list, json_pack("{s:O}", "optional", thought));
    json_decref(thought);
    if (c->around[0])
        add_mark(list, c->around[0]);
    if (c->form == CALL_JSON && !*c->end && !c->bare) {
        add_mark(list, c->begin);
        add_text(list, "[");
    }
    return list;
}

json_t *convention_structure(const struct convention *c, json_t *tools, const char *only, bool is_parallel,
                             bool has_reasoning, bool begins_reasoning)
{
    json_t *any = json_array(), *v, *tool;
    size_t i;
    bool is_list = c && c->form == CALL_JSON && !*c->end && !c->bare;
    if (!c || c->form == CALL_PYTHON) {
        json_decref(any);
        return NULL;
    }
    json_array_foreach(tools, i, tool)
    {
        json_t *function = json_object_get(tool, "function");
        const char *name = json_string_value(json_object_get(function ? function : tool, "name"));
        if (name && (!only || !strcmp(name, only)))
            json_array_append_new(any, call_sequence(c, function ? function : tool, name));
    }
    v = json_pack("{s:o, s:o}", "any_of", any, "before", before_calls(c, has_reasoning, begins_reasoning));
    const char *between = c->bare ? "; " : is_list ? ", " : c->form == CALL_NAMED && !c->around[0] ? "" : "\n";
    if (is_parallel && c->form != CALL_CHANNELS)
        json_object_set_new(v, "separator", json_pack("[s]", between));
    if (is_list)
        json_object_set_new(v, "after", json_pack("[s]", "]"));
    else if (c->around[1])
        json_object_set_new(v, "after", json_pack("[{s:s}]", "mark", c->around[1]));
    return v;
}
