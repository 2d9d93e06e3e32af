/*
 * Grammars as text: the common ground of GBNF (llama.cpp) and Lark, and lists of texts.
 *
 *     root ::= "yes" | "no" [0-9]+ item{1,3}      # GBNF; the first rule to look at is `root`
 *     start: "yes" | "no" DIGIT+                  // Lark; it is `start`
 *     DIGIT: /[0-9]/
 *
 * A rule goes on until the next one begins. A literal may have the escapes of JSON. Not understood, and
 * refused by name: %directives, flags of literals and expressions, templates, rules that begin with
 * themselves.
 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "grammar/grammar_internal.h"

enum { NAME_MOST = 128, RULES_MOST = 10000, DEPTH_MOST = 100 };
static const size_t TEXT_BYTES_MOST = 256 << 10;

struct ebnf_rule {
    char name[NAME_MOST];
    uint32_t state; /* later becomes what the rule is */
    struct gr_node *node;
    bool is_there;
};

struct ebnf {
    struct gr_program *p;
    struct gr_tree t;
    const char *text;
    size_t len, at;
    struct ebnf_rule *rules;
    uint32_t n_rules, cap_rules, depth;
    enum td_status status;
    struct td_error *e;
};

static bool fail(struct ebnf *g, enum td_status status, const char *what)
{
    uint32_t line = 1;
    for (size_t i = 0; i < g->at && i < g->len; i++)
        line += g->text[i] == '\n';
    if (!g->status)
        g->status = td_fail(g->e, status, "grammar: %s, in line %u", what, line);
    return false;
}

static char look(const struct ebnf *g)
{
    return g->at < g->len ? g->text[g->at] : 0;
}

static void skip_space(struct ebnf *g)
{
    while (g->at < g->len) {
        if (look(g) == '#' || (look(g) == '/' && g->at + 1 < g->len && g->text[g->at + 1] == '/'))
            while (g->at < g->len && look(g) != '\n')
                g->at++;
        else if (strchr(" \t\r\n", look(g)))
            g->at++;
        else
            return;
    }
}

static bool is_of_name(char c)
{
    return c == '_' || c == '-' || (c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z');
}

/* The name at g->at, which is passed; empty: there is none. */
static void read_name(struct ebnf *g, char out[NAME_MOST])
{
    size_t n = 0;
    while (is_of_name(look(g)) && n + 1 < NAME_MOST)
        out[n++] = g->text[g->at++];
    out[n] = 0;
}

/* Whether a rule begins here: its name is passed with what follows it. */
static bool begins_rule(struct ebnf *g, char name[NAME_MOST])
{
    size_t from = g->at;
    read_name(g, name);
    while (look(g) == ' ' || look(g) == '\t')
        g->at++;
    bool is_gbnf = g->len - g->at >= 3 && !memcmp(g->text + g->at, "::=", 3), is_lark = look(g) == ':' && !is_gbnf;
    if (*name && (is_gbnf || is_lark)) {
        g->at += is_gbnf ? 3 : 1;
        return true;
    }
    g->at = from;
    return false;
}

static struct ebnf_rule *rule_of(struct ebnf *g, const char *name)
{
    for (uint32_t i = 0; i < g->n_rules; i++)
        if (!strcmp(g->rules[i].name, name))
            return &g->rules[i];
    if (g->n_rules == RULES_MOST) {
        fail(g, TD_ERR_NO_SPACE, "there are too many rules");
        return NULL;
    }
    g->rules = MEM_ROOM(g->rules, g->n_rules, g->cap_rules, 16);
    struct ebnf_rule *r = &g->rules[g->n_rules++];
    *r = (struct ebnf_rule){.state = gr_later(g->p)};
    snprintf(r->name, sizeof(r->name), "%s", name);
    return r;
}

/* ------------------------------------------------------------------------ atoms */

/* The end of what begins with this delimiter at g->at; escapes are passed. 0: there is none. */
static size_t end_of(const struct ebnf *g, char delimiter)
{
    for (size_t i = g->at + 1; i < g->len && g->text[i] != '\n'; i++) {
        if (g->text[i] == '\\')
            i++;
        else if (g->text[i] == delimiter)
            return i;
    }
    return 0;
}

static bool read_literal(struct ebnf *g, struct gr_node **out)
{
    size_t end = end_of(g, '"');
    json_t *v = end ? json_loadb(g->text + g->at, end + 1 - g->at, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL) : NULL;
    if (!v)
        return fail(g, TD_ERR_INVALID, "a literal does not end, or has an escape that JSON does not have");
    *out = gr_node_text(&g->t, json_string_value(v), json_string_length(v));
    json_decref(v);
    g->at = end + 1;
    return look(g) != 'i' || is_of_name(g->at + 1 < g->len ? g->text[g->at + 1] : 0) ||
           fail(g, TD_ERR_UNSUPPORTED, "literals without regard to case are not supported");
}

static bool read_expression(struct ebnf *g, struct gr_node **out)
{
    size_t end = end_of(g, '/');
    enum td_status s;
    struct td_error why = {{0}};
    if (!end)
        return fail(g, TD_ERR_INVALID, "an expression does not end");
    s = gr_parse_pattern(&g->t, g->text + g->at + 1, end - g->at - 1, false, out, &why);
    if (s)
        return fail(g, s, why.text);
    g->at = end + 1;
    return !is_of_name(look(g)) || fail(g, TD_ERR_UNSUPPORTED, "flags of expressions are not supported");
}

static bool read_alternatives(struct ebnf *g, struct gr_node **out);

static bool read_group(struct ebnf *g, struct gr_node **out)
{
    char close = look(g) == '(' ? ')' : ']';
    g->at++;
    if (++g->depth > DEPTH_MOST)
        return fail(g, TD_ERR_NO_SPACE, "groups are nested too deeply");
    if (!read_alternatives(g, out))
        return false;
    g->depth--;
    if (look(g) != close)
        return fail(g, TD_ERR_INVALID, "a group does not end");
    g->at++;
    return true;
}

static bool read_atom(struct ebnf *g, struct gr_node **out)
{
    char name[NAME_MOST];
    char c = look(g);
    if (c == '"')
        return read_literal(g, out);
    if (c == '/')
        return read_expression(g, out);
    if (c == '(')
        return read_group(g, out);
    if (c == '[') {
        struct td_error why = {{0}};
        enum td_status s = gr_parse_class(&g->t, g->text, g->len, &g->at, out, &why);
        return !s || fail(g, s, why.text);
    }
    if (c == '.') {
        g->at++;
        return !gr_parse_pattern(&g->t, ".", 1, false, out, NULL);
    }
    read_name(g, name);
    if (!*name)
        return fail(g, TD_ERR_INVALID, "a literal, class, group or name is expected");
    struct ebnf_rule *r = rule_of(g, name);
    *out = r ? gr_node_rule(&g->t, r->state) : NULL;
    return r != NULL;
}

/* ------------------------------------------------------------------ combinations */

static uint32_t read_number(struct ebnf *g)
{
    uint32_t n = 0;
    while (look(g) >= '0' && look(g) <= '9' && n < 100000)
        n = n * 10 + (uint32_t)(g->text[g->at++] - '0');
    return n;
}

static bool read_times(struct ebnf *g, struct gr_node **node)
{
    uint32_t least = look(g) == '+', most = look(g) == '?' ? 1 : UINT32_MAX;
    if (look(g) == '{') {
        g->at++;
        least = most = read_number(g);
        if (look(g) == ',') {
            g->at++;
            most = look(g) == '}' ? UINT32_MAX : read_number(g);
        }
        if (look(g) != '}' || (most != UINT32_MAX && most < least))
            return fail(g, TD_ERR_INVALID, "a count is wrong");
    } else if (!look(g) || !strchr("*+?", look(g))) {
        return true;
    }
    g->at++;
    *node = gr_node_times(&g->t, *node, least, most);
    return true;
}

static bool ends_sequence(struct ebnf *g)
{
    char name[NAME_MOST];
    size_t from = g->at;
    bool is_over = g->at >= g->len || strchr("|)]%", look(g)) || begins_rule(g, name);
    g->at = from;
    return is_over;
}

static bool read_sequence(struct ebnf *g, struct gr_node **out)
{
    *out = NULL;
    for (skip_space(g); !ends_sequence(g); skip_space(g)) {
        struct gr_node *n = NULL;
        if (!read_atom(g, &n) || !read_times(g, &n))
            return false;
        *out = gr_node_cat(&g->t, *out, n);
    }
    return true;
}

static bool read_alternatives(struct ebnf *g, struct gr_node **out)
{
    if (!read_sequence(g, out))
        return false;
    while (look(g) == '|') {
        struct gr_node *other;
        g->at++;
        if (!read_sequence(g, &other))
            return false;
        *out = gr_node_alt(&g->t, *out, other);
    }
    return true;
}

static bool read_rules(struct ebnf *g)
{
    char name[NAME_MOST];
    for (skip_space(g); g->at < g->len; skip_space(g)) {
        struct gr_node *node;
        if (look(g) == '%')
            return fail(g, TD_ERR_UNSUPPORTED, "directives (%...) are not supported");
        if (!begins_rule(g, name))
            return fail(g, TD_ERR_INVALID, "a rule is expected: NAME ::= ..., or NAME: ...");
        struct ebnf_rule *r = rule_of(g, name);
        if (!r || r->is_there)
            return r && fail(g, TD_ERR_INVALID, "a rule is there twice");
        r->is_there = true;
        uint32_t i = (uint32_t)(r - g->rules);
        if (!read_alternatives(g, &node))
            return false;
        g->rules[i].node = node; /* the list may have moved */
    }
    return true;
}

static void emit_rules(struct ebnf *g)
{
    const struct ebnf_rule *first = NULL;
    for (uint32_t i = 0; i < g->n_rules; i++) {
        struct ebnf_rule *r = &g->rules[i];
        if (!r->is_there && !g->status)
            g->status = td_fail(g->e, TD_ERR_INVALID, "grammar: there is no rule '%s'", r->name);
        if (g->status)
            return;
        gr_become(g->p, r->state, gr_emit(g->p, r->node, GR_RAW, GR_END));
        if (!strcmp(r->name, "root") || !strcmp(r->name, "start"))
            first = r;
    }
    if (!first)
        g->status = td_fail(g->e, TD_ERR_INVALID, "grammar: there is no rule 'root' or 'start'");
    else
        g->p->start = gr_call(g->p, first->state, true, GR_END);
}

enum td_status gr_compile_ebnf(struct gr_program *p, const char *text, size_t len, struct td_error *e)
{
    struct ebnf g = {.p = p, .text = text, .len = len, .e = e};
    if (len > TEXT_BYTES_MOST)
        return td_fail(e, TD_ERR_NO_SPACE, "grammar: %zu bytes, at most %zu", len, TEXT_BYTES_MOST);
    if (read_rules(&g))
        emit_rules(&g);
    gr_tree_free(&g.t);
    free(g.rules);
    return g.status;
}

/* ------------------------------------------------------------------------ choice */

enum td_status gr_compile_choice(struct gr_program *p, const char *text, size_t len, struct td_error *e)
{
    json_error_t je;
    json_t *list = json_loadb(text, len, JSON_ALLOW_NUL, &je), *v;
    size_t i, n = json_array_size(list);
    struct bytes *texts = mem_array(n + 1, sizeof(*texts));
    enum td_status s = n ? TD_OK : td_fail(e, TD_ERR_INVALID, "choice: must be a list of texts, not empty");
    json_array_foreach(list, i, v)
    {
        if (!json_string_length(v)) /* also of what is no text */
            s = td_fail(e, TD_ERR_INVALID, "choice[%zu]: must be a text, not empty", i);
        else
            bytes_append(&texts[i], json_string_value(v), json_string_length(v));
    }
    if (!s)
        p->start = gr_one_of(p, texts, (uint32_t)n, GR_END);
    for (i = 0; i < n; i++)
        bytes_free(&texts[i]);
    free(texts);
    json_decref(list);
    return s;
}
