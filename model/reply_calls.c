#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "model/reply_internal.h"

enum { NAME_MOST = 128, PYTHON_DEPTH = 32 };

size_t reply_space(const char *text, size_t len)
{
    size_t n = 0;
    while (n < len && strchr(" \t\r\n", text[n]) && text[n])
        n++;
    return n;
}

int reply_mark(const char *text, size_t len, const char *mark)
{
    size_t n = strlen(mark);
    if (memcmp(text, mark, len < n ? len : n))
        return -1;
    return len >= n;
}

bool reply_scan(struct reply_scan *s, const char *raw, size_t len)
{
    while (s->at < len) {
        char c = raw[s->at++];
        bool was_text = s->quote;
        if (s->is_escaped)
            s->is_escaped = false;
        else if (was_text && c == '\\')
            s->is_escaped = true;
        else if (was_text && c == s->quote)
            s->quote = 0;
        else if (!was_text && (c == '"' || c == '\''))
            s->quote = c;
        else if (!was_text && (c == '[' || c == '{'))
            s->depth++;
        else if (!was_text && (c == ']' || c == '}'))
            s->depth -= s->depth > 0;
        else
            continue;
        if (!s->depth && !s->quote && !s->is_escaped)
            return true;
    }
    return false;
}

void calls_read_free(struct calls_read *c)
{
    for (size_t i = 0; i < c->n; i++) {
        free(c->calls[i].name);
        bytes_free(&c->calls[i].arguments);
    }
    free(c->calls);
    *c = (struct calls_read){0};
}

static struct call_read *add_call(struct calls_read *c, const char *name, size_t len)
{
    c->calls = MEM_ROOM(c->calls, c->n, c->cap, 4);
    struct call_read *call = &c->calls[c->n++];
    *call = (struct call_read){.name = mem_zalloc(len + 1)};
    memcpy(call->name, name, len);
    return call;
}

json_t *reply_tool(json_t *tools, const char *name, size_t len)
{
    size_t i;
    json_t *tool;
    json_array_foreach(tools, i, tool)
    {
        json_t *function = json_object_get(tool, "function"),
               *its = json_object_get(function ? function : tool, "name");
        if (json_is_string(its) && json_string_length(its) == len && !memcmp(json_string_value(its), name, len))
            return function ? function : tool;
    }
    return NULL;
}

static void put_json(struct bytes *out, const json_t *v)
{
    char *text = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT);
    bytes_append(out, text, strlen(text));
    free(text);
}

/* --------------------------------------------------------------------------- JSON */

/* What is behind a value that came: 1: the mark `end` (or there is none), to *at behind it; 0, -1: as
 * reply_mark. */
static int ends(const char *raw, size_t len, const char *end, bool is_over, size_t *at)
{
    size_t from = *at + reply_space(raw + *at, len - *at);
    int is_there = reply_mark(raw + from, len - from, end);
    if (!*end || (is_over && from == len))
        return 1;
    if (is_there == 1)
        *at = from + strlen(end);
    return is_there;
}

/* The value of JSON at raw[*at]. NULL: *state_out is 0 (the rest is to come) or -1. An error near the end
 * may be a character, an escape or a word that is not there as a whole. */
static json_t *load(const char *raw, size_t len, size_t *at, int *state_out)
{
    enum { NEAR = 16 };
    json_error_t e;
    json_t *v = json_loadb(raw + *at, len - *at, JSON_DISABLE_EOF_CHECK, &e);
    bool is_open = json_error_code(&e) == json_error_premature_end_of_input || *at + (size_t)e.position + NEAR >= len;
    *state_out = v ? 1 : is_open ? 0 : -1;
    if (v)
        *at += (size_t)e.position;
    return v;
}

/* One object {"name", "arguments" or "parameters"}. */
static bool take_object(json_t *tools, const json_t *v, struct calls_read *out)
{
    const json_t *name = json_object_get(v, "name"), *arguments = json_object_get(v, "arguments");
    json_t *own = NULL;
    if (!arguments)
        arguments = json_object_get(v, "parameters");
    if (json_is_string(arguments)) /* an object as text */
        arguments = own = json_loadb(json_string_value(arguments), json_string_length(arguments), 0, NULL);
    else if (!arguments)
        arguments = own = json_object();
    bool is_call = json_is_string(name) && json_is_object(arguments) &&
                   reply_tool(tools, json_string_value(name), json_string_length(name));
    if (is_call)
        put_json(&add_call(out, json_string_value(name), json_string_length(name))->arguments, arguments);
    json_decref(own);
    return is_call;
}

static bool take_value(json_t *tools, json_t *v, struct calls_read *out)
{
    size_t i;
    json_t *item;
    if (!json_is_array(v))
        return take_object(tools, v, out);
    json_array_foreach(v, i, item) if (!take_object(tools, item, out)) return false;
    return json_array_size(v) > 0;
}

static ptrdiff_t parse_json(const struct convention *c, json_t *tools, const char *raw, size_t len, bool is_over,
                            struct calls_read *out)
{
    size_t at = 0;
    int state;
    for (;;) {
        at += reply_space(raw + at, len - at);
        json_t *v = load(raw, len, &at, &state);
        bool is_call = v && take_value(tools, v, out);
        json_decref(v);
        if (!is_call)
            return v || is_over ? -1 : state;
        if (!c->bare) {
            state = ends(raw, len, c->end, is_over, &at);
            return state == 1 ? (ptrdiff_t)at : state;
        }
        while (at < len && raw[at] && strchr(" \t\r\n;", raw[at]))
            at++;
        if (at == len)
            return is_over ? (ptrdiff_t)at : 0;
        if (raw[at] != c->bare)
            return -1;
    }
}

/* -------------------------------------------------------------------------- named */

static bool is_name(const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (!isalnum((unsigned char)text[i]) && (!text[i] || !strchr("_-.", text[i])))
            return false;
    return len > 0 && len <= NAME_MOST;
}

static const char *find(const char *text, size_t len, const char *mark)
{
    return memmem(text, len, mark, strlen(mark));
}

/* The name before c->after_name. 1: to *name and *at behind the mark. */
static int read_name(const struct convention *c, const char *raw, size_t len, size_t *at, const char **name,
                     size_t *name_len)
{
    int state = reply_mark(raw, len, c->before_name);
    if (state != 1)
        return state;
    size_t from = strlen(c->before_name), most = 2 * NAME_MOST; /* with an id */
    const char *mark = find(raw + from, len - from < most ? len - from : most, c->after_name);
    if (!mark)
        return len - from >= most ? -1 : 0;
    const char *id = memchr(raw + from, '[', (size_t)(mark - raw) - from); /* Mistral: an id of the call may follow */
    const char *end = id ? id : mark;
    *name = raw + from;
    *name_len = (size_t)(end - *name);
    *name_len -= *name_len - reply_space(*name, *name_len) ? 0 : *name_len;
    *at = (size_t)(mark - raw) + strlen(c->after_name);
    return is_name(*name, *name_len) ? 1 : -1;
}

static ptrdiff_t parse_named(const struct convention *c, json_t *tools, const char *raw, size_t len, bool is_over,
                             struct calls_read *out)
{
    const char *name;
    size_t name_len, at;
    int state = read_name(c, raw, len, &at, &name, &name_len);
    if (state != 1)
        return state;
    if (!reply_tool(tools, name, name_len))
        return -1;
    at += reply_space(raw + at, len - at);
    json_t *v = load(raw, len, &at, &state);
    if (!json_is_object(v)) {
        json_decref(v);
        return v ? -1 : state;
    }
    state = ends(raw, len, c->after_arguments, is_over, &at);
    if (state == 1)
        state = ends(raw, len, c->end, is_over, &at);
    if (state == 1)
        put_json(&add_call(out, name, name_len)->arguments, v);
    json_decref(v);
    return state == 1 ? (ptrdiff_t)at : state;
}

/* ------------------------------------------------------------------ keys and tags */

/* The value of an argument whose text this is: text, unless the schema says that it is something else. */
static json_t *argument(const json_t *function, const char *key, const char *text, size_t len)
{
    const json_t *properties = json_object_get(json_object_get(function, "parameters"), "properties");
    const json_t *type = json_object_get(json_object_get(properties, key), "type");
    bool is_text = json_is_string(type) && !strcmp(json_string_value(type), "string");
    json_t *v = is_text ? NULL : json_loadb(text, len, JSON_DECODE_ANY, NULL);
    return v ? v : json_stringn(text, len);
}

/* The text between two marks at raw[*at]. False: it is not there. */
static bool between(const char *raw, size_t len, size_t *at, const char *open, const char *close, const char **text,
                    size_t *text_len)
{
    *at += reply_space(raw + *at, len - *at);
    if (reply_mark(raw + *at, len - *at, open) != 1)
        return false;
    *text = raw + *at + strlen(open);
    const char *end = find(*text, len - (size_t)(*text - raw), close);
    if (!end)
        return false;
    *text_len = (size_t)(end - *text);
    *at = (size_t)(end - raw) + strlen(close);
    return true;
}

static bool put_argument(json_t *arguments, const json_t *function, const char *key, size_t key_len, const char *text,
                         size_t len)
{
    char name[NAME_MOST + 1] = "";
    if (!is_name(key, key_len))
        return false;
    memcpy(name, key, key_len);
    json_t *v = argument(function, name, text, len);
    return v && !json_object_set_new(arguments, name, v); /* NULL: not UTF-8 */
}

/* Lines around a value are not of it. */
static void trim_lines(const char **text, size_t *len)
{
    if (*len && **text == '\n') {
        ++*text;
        --*len;
    }
    *len -= *len && (*text)[*len - 1] == '\n';
}

/* The arguments of a call that is whole, from raw[*at] on. NULL: they are wrong. */
static json_t *read_arguments(const struct convention *c, const json_t *function, const char *raw, size_t len,
                              size_t *at)
{
    json_t *arguments = json_object();
    const char *key, *text;
    size_t key_len, text_len;
    bool is_fine = true, is_tags = c->form == CALL_TAGS;
    while (is_fine &&
           between(raw, len, at, is_tags ? "<parameter=" : "<arg_key>", is_tags ? ">" : "</arg_key>", &key, &key_len)) {
        is_fine = between(raw, len, at, is_tags ? "" : "<arg_value>", is_tags ? "</parameter>" : "</arg_value>", &text,
                          &text_len);
        if (is_fine && is_tags)
            trim_lines(&text, &text_len);
        is_fine = is_fine && put_argument(arguments, function, key, key_len, text, text_len);
    }
    if (is_fine)
        return arguments;
    json_decref(arguments);
    return NULL;
}

static ptrdiff_t parse_pairs(const struct convention *c, json_t *tools, const char *raw, size_t len, bool is_over,
                             struct calls_read *out)
{
    const char *end = find(raw, len, c->end), *name;
    size_t at = 0, name_len;
    if (!end)
        return is_over ? -1 : 0;
    size_t n = (size_t)(end - raw);
    if (c->form == CALL_TAGS) {
        if (!between(raw, n, &at, "<function=", ">", &name, &name_len))
            return -1;
    } else {
        at = reply_space(raw, n);
        name = raw + at;
        for (name_len = 0; at + name_len < n && !strchr(" \t\r\n<", name[name_len]);)
            name_len++;
        at += name_len;
    }
    const json_t *function = reply_tool(tools, name, name_len);
    json_t *arguments = function ? read_arguments(c, function, raw, n, &at) : NULL;
    at += reply_space(raw + at, n - at);
    if (c->form == CALL_TAGS && reply_mark(raw + at, n - at, "</function>") == 1)
        at += strlen("</function>");
    at += reply_space(raw + at, n - at);
    if (arguments && at == n)
        put_json(&add_call(out, name, name_len)->arguments, arguments);
    bool is_call = arguments && at == n;
    json_decref(arguments);
    return is_call ? (ptrdiff_t)(n + strlen(c->end)) : -1;
}

/* ------------------------------------------------------------------------- Python */

struct python {
    const char *at, *end;
    int state; /* 1; 0: it ended too early; -1: it is wrong */
    int depth;
};

static bool python_stop(struct python *p, int state)
{
    if (p->state == 1)
        p->state = state;
    return false;
}

/* Skips white space, and takes a character. */
static bool python_takes(struct python *p, char c)
{
    p->at += reply_space(p->at, (size_t)(p->end - p->at));
    if (p->at == p->end)
        return python_stop(p, 0);
    if (*p->at != c)
        return false;
    p->at++;
    return true;
}

static bool python_wants(struct python *p, char c)
{
    return python_takes(p, c) || python_stop(p, -1);
}

static json_t *python_text(struct python *p)
{
    struct bytes text = {0};
    char quote = *p->at++;
    json_t *v = NULL;
    for (; p->at < p->end && *p->at != quote; p->at++) {
        static const char NAMES[] = "ntr\\'\"", MEANINGS[] = "\n\t\r\\'\"";
        const char *known = *p->at == '\\' && p->at + 1 < p->end ? strchr(NAMES, p->at[1]) : NULL;
        if (known && *known) {
            bytes_append(&text, &MEANINGS[known - NAMES], 1);
            p->at++;
        } else {
            bytes_append(&text, p->at, 1);
        }
    }
    if (p->at < p->end) {
        p->at++;
        v = json_stringn(text.data ? text.data : "", text.len);
    }
    bytes_free(&text);
    if (!v)
        python_stop(p, p->at < p->end ? -1 : 0);
    return v;
}

/* A number, or a word. */
static json_t *python_word(struct python *p)
{
    static const struct {
        const char *word, *json;
    } WORDS[] = {{"True", "true"}, {"False", "false"}, {"None", "null"},
                 {"true", "true"}, {"false", "false"}, {"null", "null"}};
    const char *from = p->at;
    while (p->at < p->end && (isalnum((unsigned char)*p->at) || strchr("+-._", *p->at)) && *p->at)
        p->at++;
    size_t len = (size_t)(p->at - from);
    if (p->at == p->end)
        return python_stop(p, 0), NULL;
    for (size_t i = 0; i < sizeof(WORDS) / sizeof(WORDS[0]); i++)
        if (strlen(WORDS[i].word) == len && !memcmp(from, WORDS[i].word, len))
            return json_loads(WORDS[i].json, JSON_DECODE_ANY, NULL);
    json_t *v = len ? json_loadb(from, len, JSON_DECODE_ANY, NULL) : NULL;
    if (!json_is_number(v)) {
        json_decref(v);
        python_stop(p, -1);
        return NULL;
    }
    return v;
}

static json_t *python_value(struct python *p);

/* The items of a list or an object that was opened, to its closing bracket. */
static bool python_items(struct python *p, json_t *into, char close)
{
    while (p->state == 1 && !python_takes(p, close)) {
        if (p->state != 1)
            return false;
        json_t *key = json_is_object(into) ? python_value(p) : NULL;
        bool is_key = json_is_string(key) && strlen(json_string_value(key)) == json_string_length(key);
        if (json_is_object(into) && (!is_key || !python_wants(p, ':'))) {
            json_decref(key);
            return python_stop(p, -1);
        }
        json_t *v = python_value(p);
        if (v && key)
            json_object_setn_new(into, json_string_value(key), json_string_length(key), v);
        else if (v)
            json_array_append_new(into, v);
        json_decref(key);
        if (!v || (!python_takes(p, ',') && p->at < p->end && *p->at != close))
            return python_stop(p, -1);
    }
    return p->state == 1;
}

static json_t *python_value(struct python *p)
{
    p->at += reply_space(p->at, (size_t)(p->end - p->at));
    if (p->at == p->end)
        return python_stop(p, 0), NULL;
    if (*p->at == '\'' || *p->at == '"')
        return python_text(p);
    if (*p->at != '[' && *p->at != '{')
        return python_word(p);
    char open = *p->at++;
    json_t *v = open == '[' ? json_array() : json_object();
    bool is_fine = ++p->depth <= PYTHON_DEPTH ? python_items(p, v, open == '[' ? ']' : '}') : python_stop(p, -1);
    p->depth--;
    if (is_fine)
        return v;
    json_decref(v);
    return NULL;
}

static bool python_name(struct python *p, const char **name, size_t *len)
{
    p->at += reply_space(p->at, (size_t)(p->end - p->at));
    *name = p->at;
    while (p->at < p->end && is_name(p->at, 1))
        p->at++;
    *len = (size_t)(p->at - *name);
    if (p->at == p->end)
        return python_stop(p, 0);
    return is_name(*name, *len) || python_stop(p, -1);
}

/* NAME(KEY=VALUE, ...) */
static bool python_call(struct python *p, json_t *tools, struct calls_read *out)
{
    const char *name, *key;
    size_t name_len, key_len;
    if (!python_name(p, &name, &name_len) || !python_wants(p, '('))
        return false;
    if (!reply_tool(tools, name, name_len))
        return python_stop(p, -1);
    json_t *arguments = json_object();
    while (p->state == 1 && !python_takes(p, ')') && p->state == 1) {
        json_t *v = python_name(p, &key, &key_len) && python_wants(p, '=') ? python_value(p) : NULL;
        if (v)
            json_object_setn_new(arguments, key, key_len, v);
        if (!v || (!python_takes(p, ',') && p->at < p->end && *p->at != ')'))
            python_stop(p, -1);
    }
    if (p->state == 1)
        put_json(&add_call(out, name, name_len)->arguments, arguments);
    json_decref(arguments);
    return p->state == 1;
}

/* raw begins behind the mark, or at the bracket if there was none. */
static ptrdiff_t parse_python(const struct convention *c, json_t *tools, const char *raw, size_t len, bool is_bare,
                              bool is_over, struct calls_read *out)
{
    struct python p = {.at = raw, .end = raw + len, .state = 1};
    bool is_first = true;
    if (python_wants(&p, '['))
        while (p.state == 1 && (is_first || python_takes(&p, ',')) && python_call(&p, tools, out))
            is_first = false;
    if (p.state == 1)
        python_wants(&p, ']');
    size_t at = (size_t)(p.at - raw);
    if (p.state == 1 && is_bare) {
        at += reply_space(raw + at, len - at);
        p.state = at < len ? -1 : is_over;
    } else if (p.state == 1) {
        p.state = ends(raw, len, c->end, is_over, &at);
    }
    return p.state == 1 ? (ptrdiff_t)at : is_over ? -1 : p.state;
}

/* --------------------------------------------------------- calls that will be whole */

/* Behind the value of JSON that begins at raw[at]; len: it goes on. Nothing is checked. */
static size_t value_end(const char *raw, size_t len, size_t at)
{
    struct reply_scan s = {.at = at};
    return reply_scan(&s, raw, len) ? s.at : len;
}

/* The name of the object at raw[at], and where its arguments begin. */
static bool peek_object(const char *raw, size_t len, size_t at, const char **name, size_t *name_len,
                        const char **arguments)
{
    *name = *arguments = NULL;
    while (at < len) {
        at += reply_space(raw + at, len - at);
        size_t key = at, key_end = value_end(raw, len, at);
        const char *colon = memchr(raw + key_end, ':', len - key_end);
        if (!colon || raw[key] != '"')
            break;
        at = (size_t)(colon - raw) + 1;
        at += reply_space(raw + at, len - at);
        size_t end = value_end(raw, len, at);
        if (reply_mark(raw + key, key_end - key, "\"name\"") == 1 && end < len) {
            *name = raw + at + 1;
            *name_len = end - at - 2;
        } else if (at < len && raw[at] == '{') {
            *arguments = raw + at;
        }
        at = end + reply_space(raw + end, len - end);
        if (at < len && raw[at++] != ',')
            break;
    }
    return *name && *arguments;
}

bool calls_peek(const struct convention *c, const char *raw, size_t len, const char **name_out, size_t *name_len_out,
                const char **arguments_out)
{
    size_t at = reply_space(raw, len);
    if (c->form == CALL_JSON && at < len && raw[at] == '{')
        return peek_object(raw, len, at + 1, name_out, name_len_out, arguments_out);
    if (c->form != CALL_NAMED || read_name(c, raw, len, &at, name_out, name_len_out) != 1)
        return false;
    at += reply_space(raw + at, len - at);
    *arguments_out = raw + at;
    return at < len;
}

/* ---------------------------------------------------------------------------- all */

ptrdiff_t calls_parse(const struct convention *c, json_t *tools, const char *raw, size_t len, bool is_bare,
                      bool is_over, struct calls_read *out)
{
    ptrdiff_t n;
    switch (c->form) {
    case CALL_NAMED:
        n = parse_named(c, tools, raw, len, is_over, out);
        break;
    case CALL_KEYS:
    case CALL_TAGS:
        n = parse_pairs(c, tools, raw, len, is_over, out);
        break;
    case CALL_PYTHON:
        n = parse_python(c, tools, raw, len, is_bare, is_over, out);
        break;
    default:
        n = parse_json(c, tools, raw, len, is_over, out);
        break;
    }
    if (n <= 0)
        calls_read_free(out);
    return n <= 0 && is_over ? -1 : n;
}
