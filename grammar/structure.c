/*
 * An answer, or a part of one, that is put together: what calls of functions are in a model's convention.
 *
 *     {"any_of": [SEQUENCE, ...]}                         one of them
 *     {"any_of": [...], "separator": SEQUENCE}            one or several, with it between them
 *     {"any_of": [...], "before": SEQUENCE, "after": SEQUENCE}    with these around all of them
 *
 * A sequence is a list of
 *
 *     TEXT                  this text
 *     {"mark": TEXT}        the special token of this text, or the text
 *     {"schema": SCHEMA}    JSON
 *     {"regex": TEXT}       what the expression matches
 *     {"optional": SEQUENCE}
 */
#include <string.h>

#include "grammar/schema.h"

enum { DEPTH_MOST = 8 };

struct structure {
    struct gr_program *p;
    struct gr_json json;
    enum td_status status;
    struct td_error *e;
};

static uint32_t structure_fail(struct structure *s, enum td_status status, const char *what)
{
    if (!s->status)
        s->status = td_fail(s->e, status, "structure: %s", what);
    return GR_END;
}

static uint32_t put_mark(struct structure *s, const char *text, size_t len, uint32_t next)
{
    uint32_t special = gr_byte(s->p, (uint8_t)GRAMMAR_MARK, (uint8_t)GRAMMAR_MARK, gr_text(s->p, text, len, next));
    return gr_either(s->p, special, gr_text(s->p, text, len, next));
}

static uint32_t put_schema(struct structure *s, json_t *schema, uint32_t next)
{
    struct td_error why = {{0}};
    uint32_t rule = GR_END;
    enum td_status status = gr_schema_rule(s->p, &s->json, schema, &rule, &why);
    if (status && !s->status)
        s->status = td_fail(s->e, status, "%s", why.text);
    return gr_call(s->p, rule, true, next);
}

static uint32_t put_expression(struct structure *s, const char *text, size_t len, uint32_t next)
{
    struct gr_tree t = {0};
    struct gr_node *n = NULL;
    if (!s->status)
        s->status = gr_parse_pattern(&t, text, len, false, &n, s->e);
    uint32_t state = s->status ? GR_END : gr_emit(s->p, n, GR_RAW, next);
    gr_tree_free(&t);
    return state;
}

static uint32_t put_sequence(struct structure *s, json_t *list, uint32_t next, int depth)
{
    if (!list)
        return next;
    if (!json_is_array(list) || depth > DEPTH_MOST)
        return structure_fail(s, TD_ERR_INVALID, "a sequence must be a list, not nested too deeply");
    for (size_t i = json_array_size(list); i-- > 0 && !s->status;) {
        json_t *one = json_array_get(list, i), *mark = json_object_get(one, "mark"),
               *regex = json_object_get(one, "regex"), *schema = json_object_get(one, "schema"),
               *optional = json_object_get(one, "optional");
        if (json_is_string(one))
            next = gr_text(s->p, json_string_value(one), json_string_length(one), next);
        else if (json_is_string(mark))
            next = put_mark(s, json_string_value(mark), json_string_length(mark), next);
        else if (json_is_string(regex))
            next = put_expression(s, json_string_value(regex), json_string_length(regex), next);
        else if (schema)
            next = put_schema(s, schema, next);
        else if (optional)
            next = gr_either(s->p, put_sequence(s, optional, next, depth + 1), next);
        else
            structure_fail(s, TD_ERR_INVALID, "a sequence has texts, marks, schemas, expressions, and optional ones");
    }
    return next;
}

static uint32_t put_all(struct structure *s, const json_t *v)
{
    json_t *any = json_object_get(v, "any_of"), *separator = json_object_get(v, "separator"),
           *before = json_object_get(v, "before"), *after = json_object_get(v, "after"), *one;
    uint32_t end = put_sequence(s, after, GR_END, 0), tail = gr_later(s->p), first = tail, n = 0;
    uint32_t starts[GR_PROPERTIES_MOST];
    size_t i;
    json_array_foreach(any, i, one)
    {
        if (n < GR_PROPERTIES_MOST)
            starts[n++] = put_sequence(s, one, tail, 0);
        else
            structure_fail(s, TD_ERR_NO_SPACE, "too many functions");
    }
    if (!n)
        return structure_fail(s, TD_ERR_INVALID, "any_of must be a list, not empty");
    first = gr_split(s->p, starts, n);
    gr_become(s->p, tail, separator ? gr_either(s->p, put_sequence(s, separator, first, 0), end) : end);
    return put_sequence(s, before, first, 0);
}

enum td_status gr_compile_structure(struct gr_program *p, const char *text, size_t len, struct td_error *e)
{
    json_error_t je;
    struct structure s = {.p = p, .e = e};
    json_t *v = json_loadb(text, len, 0, &je);
    if (!v)
        return td_fail(e, TD_ERR_INVALID, "structure: not JSON: %s", je.text);
    gr_json_init(p, &s.json);
    p->start = put_all(&s, v);
    json_decref(v);
    return s.status;
}
