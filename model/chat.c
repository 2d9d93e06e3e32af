#include "model/chat.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/template.h"

enum { MAX_CONFIG_BYTES = 64 << 20, MAX_MESSAGES = 100000, MAX_ROLE = 64, MAX_FUNCTION = 128 };

struct chat_template {
    /* with_tools NULL: plain is for all requests. Both NULL: there is no template. */
    struct template *plain, *with_tools;
    char *source;
    json_t *variables; /* special tokens, which every template sees */
};

static const char *const SPECIAL[] = {"bos_token", "eos_token", "unk_token",  "sep_token",
                                      "pad_token", "cls_token", "mask_token", "additional_special_tokens"};

/* The text of a special token: a text, "content" of an object, or a list of the texts of several tokens. */
static json_t *token_text(json_t *v)
{
    json_t *content = json_is_object(v) ? json_object_get(v, "content") : v;
    if (json_is_string(content))
        return json_incref(content);
    if (!json_is_array(v))
        return NULL;
    json_t *list = json_array(), *item;
    size_t i;
    json_array_foreach(v, i, item)
    {
        json_t *text = token_text(item);
        if (text)
            json_array_append_new(list, text);
    }
    return list;
}

static void keep_special(struct chat_template *c, json_t *config)
{
    for (size_t i = 0; i < sizeof(SPECIAL) / sizeof(SPECIAL[0]); i++) {
        json_t *text = token_text(json_object_get(config, SPECIAL[i]));
        if (text)
            json_object_set_new(c->variables, SPECIAL[i], text);
    }
}

static enum td_status parse_named(struct chat_template *c, const char *where, const char *text, size_t len,
                                  struct template **out, struct td_error *e)
{
    struct td_error why = {{0}};
    enum td_status s = template_parse(text, len, out, &why);
    if (s)
        return td_fail(e, s, "%s: %s (--chat-template FILE uses another)", where, why.text);
    if (out == &c->with_tools || !c->source) {
        free(c->source);
        c->source = mem_strdup(text);
    }
    return TD_OK;
}

/* Parses chat_template of tokenizer_config.json: a text, or a list of named ones. */
static enum td_status parse_config(struct chat_template *c, json_t *v, struct td_error *e)
{
    static const char WHERE[] = "tokenizer_config.json: chat_template";
    size_t i;
    json_t *item;
    enum td_status s = TD_OK;
    if (json_is_string(v))
        return parse_named(c, WHERE, json_string_value(v), json_string_length(v), &c->plain, e);
    json_array_foreach(v, i, item)
    {
        json_t *text = json_object_get(item, "template");
        const char *name = json_string_value(json_object_get(item, "name"));
        struct template **to = !name                       ? NULL
                               : !strcmp(name, "default")  ? &c->plain
                               : !strcmp(name, "tool_use") ? &c->with_tools
                                                           : NULL;
        if (!s && to && !*to && json_is_string(text))
            s = parse_named(c, WHERE, json_string_value(text), json_string_length(text), to, e);
    }
    return s;
}

static enum td_status read_file(struct chat_template *c, const char *path, struct td_error *e)
{
    char *data = NULL;
    size_t len = 0;
    enum td_status s = file_read(path, TEMPLATE_MAX_SOURCE, &data, &len, e);
    if (!s)
        s = parse_named(c, path, data, len, &c->plain, e);
    free(data);
    return s;
}

static enum td_status read_config(struct chat_template *c, const char *dir, json_t **out, struct td_error *e)
{
    char path[4096], *data = NULL;
    size_t len = 0;
    json_error_t je;
    snprintf(path, sizeof(path), "%s/tokenizer_config.json", dir);
    enum td_status s = file_read(path, MAX_CONFIG_BYTES, &data, &len, e);
    if (s)
        return s == TD_ERR_NOT_FOUND ? TD_OK : s;
    /* The field model_max_length may be 10^30. */
    json_t *root = json_loadb(data, len, JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL, &je);
    free(data);
    if (!json_is_object(root)) {
        json_decref(root);
        return td_fail(e, TD_ERR_CORRUPT, "tokenizer_config.json: line %d: %s", root ? 1 : je.line,
                       root ? "not an object" : je.text);
    }
    keep_special(c, root);
    *out = root;
    return TD_OK;
}

/* Takes the requested file, else the directory's own template, else the one in its configuration. */
static enum td_status choose_template(struct chat_template *c, const char *dir, const char *file, json_t *config,
                                      struct td_error *e)
{
    char path[4096];
    struct td_error why = {{0}};
    if (file)
        return strcmp(file, "none") ? read_file(c, file, e) : TD_OK;
    snprintf(path, sizeof(path), "%s/chat_template.jinja", dir);
    enum td_status s = read_file(c, path, &why);
    if (s == TD_ERR_NOT_FOUND)
        return parse_config(c, json_object_get(config, "chat_template"), e);
    return s ? td_fail(e, s, "%s", why.text) : TD_OK;
}

enum td_status chat_template_open(const char *dir, const char *file, struct chat_template **out,
                                  struct td_error *error_out)
{
    struct chat_template *c = mem_zalloc(sizeof(*c));
    json_t *config = NULL;
    c->variables = json_object();
    enum td_status s = read_config(c, dir, &config, error_out);
    if (!s)
        s = choose_template(c, dir, file, config, error_out);
    json_decref(config);
    if (s) {
        chat_template_close(c);
        return s;
    }
    *out = c;
    return TD_OK;
}

void chat_template_close(struct chat_template *c)
{
    if (!c)
        return;
    template_close(c->plain);
    template_close(c->with_tools);
    json_decref(c->variables);
    free(c->source);
    free(c);
}

bool chat_template_present(const struct chat_template *c)
{
    return c->plain || c->with_tools;
}

const char *chat_template_source(const struct chat_template *c)
{
    return c->source ? c->source : "";
}

const char *chat_template_special(const struct chat_template *c, const char *name)
{
    const char *text = json_string_value(json_object_get(c->variables, name));
    return text ? text : "";
}

#define WORD "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"

/*
 * Which roles exist is the template's choice. But a role must be a word, so that it can't write into the
 * prompt.
 */
static bool is_role(json_t *v)
{
    size_t len = json_string_length(v);
    return len && len <= MAX_ROLE && strspn(json_string_value(v), WORD) == len;
}

/* Calls are told apart by the functions' names, so none may look like a part of a convention (reply.h). */
static enum td_status check_tools(const struct chat_template *c, json_t *tools, struct td_error *e)
{
    size_t i;
    json_t *tool;
    if (!json_is_array(tools))
        return td_fail(e, TD_ERR_INVALID, "chat.tools: not a list");
    if (json_array_size(tools) && !strstr(chat_template_source(c), "tools"))
        return td_fail(e, TD_ERR_INVALID, "chat.tools: the model's chat template can't offer functions");
    json_array_foreach(tools, i, tool)
    {
        json_t *function = json_object_get(tool, "function"),
               *name = json_object_get(function ? function : tool, "name");
        size_t len = json_string_length(name);
        if (!len || len > MAX_FUNCTION || strspn(json_string_value(name), WORD ".") != len)
            return td_fail(e, TD_ERR_INVALID,
                           "chat.tools[%zu]: must be a function, whose name has letters, digits, _ - . only", i);
    }
    return TD_OK;
}

static enum td_status check_request(const struct chat_template *c, const struct chat_request *q, struct td_error *e)
{
    size_t i;
    json_t *m;
    if (!chat_template_present(c))
        return td_fail(e, TD_ERR_UNSUPPORTED, "chat: the model has no chat template");
    if (!json_array_size(q->messages) || json_array_size(q->messages) > MAX_MESSAGES)
        return td_fail(e, TD_ERR_INVALID, "chat.messages: empty, or more than %d", MAX_MESSAGES);
    json_array_foreach(q->messages, i, m)
    {
        if (!is_role(json_object_get(m, "role")))
            return td_fail(e, TD_ERR_INVALID, "chat.messages[%zu].role: expected letters, digits, _ or -", i);
    }
    if (q->variables && !json_is_object(q->variables))
        return td_fail(e, TD_ERR_INVALID, "chat.variables: not an object");
    return q->tools ? check_tools(c, q->tools, e) : TD_OK;
}

enum td_status chat_template_render(const struct chat_template *c, const struct chat_request *q, struct bytes *out,
                                    struct td_error *error_out)
{
    enum td_status s = check_request(c, q, error_out);
    if (s)
        return s;
    const struct template *t = (q->tools && c->with_tools) || !c->plain ? c->with_tools : c->plain;
    struct td_error why = {{0}};
    json_t *all = json_copy(c->variables);
    if (q->variables)
        json_object_update(all, q->variables);
    json_object_set(all, "messages", q->messages);
    json_object_set_new(all, "tools", q->tools ? json_incref(q->tools) : json_null());
    if (!json_object_get(all, "documents"))
        json_object_set_new(all, "documents", json_null());
    json_object_set_new(all, "add_generation_prompt", json_boolean(q->add_generation_prompt));
    s = template_render(t, all, 0, out, &why);
    json_decref(all);
    return s ? td_fail(error_out, s, "chat template: %s", why.text) : TD_OK;
}
