/*
 * JSON Schema (2020-12, and what older drafts wrote in other words) as rules.
 *
 * Understood: true, type, enum, const, properties, required, additionalProperties, items, prefixItems,
 * minItems, maxItems, minLength, maxLength, pattern, format (the common ones; others say nothing),
 * minimum, maximum and their exclusive forms (whole numbers), multipleOf (1, 0.1, 0.01, ...), anyOf,
 * oneOf (of alternatives that can't both hold), allOf (where it merges), $ref within the schema,
 * recursive ones too. Annotations are passed over. Everything else is refused by name, rather than not
 * enforced.
 *
 * Properties may come in any order, each once; space may be wherever JSON allows it.
 *
 * Each subschema becomes a rule. allOf, $ref and what stands beside them are merged into one object first
 * (flatten); alternatives of anyOf are merged with what stands beside it.
 */
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "grammar/schema.h"

enum { DEPTH_MOST = 64, NAME_BYTES_MOST = 1024 };
static const size_t TEXT_BYTES_MOST = 256 << 10;
static const uint64_t WORK_MOST = 1 << 18; /* less than a tenth of a second */

/* A reference, and the rule that it leads to. */
struct reference {
    const json_t *target;
    uint32_t rule;
};

struct schema {
    struct gr_program *p;
    struct gr_json json;
    json_t *root;
    struct reference *references;
    uint32_t n_references, cap_references, depth;
    uint64_t n_work; /* of merging and comparing: spend() */
    json_t *made;    /* list of merged schemas, which live as long as this */
    enum td_status status;
    struct td_error *e;
};

static uint32_t rule_of(struct schema *s, json_t *schema);

/* The first thing that is wrong is kept. Returns a state, for convenience. */
__attribute__((format(printf, 3, 4))) static uint32_t schema_fail(struct schema *s, enum td_status status,
                                                                  const char *format, ...)
{
    if (s->status)
        return GR_END;
    char text[sizeof(s->e->text)];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    s->status = td_fail(s->e, status, "schema: %s", text);
    return GR_END;
}

static uint32_t unsupported(struct schema *s, const char *what)
{
    return schema_fail(s, TD_ERR_UNSUPPORTED, "%s is not supported", what);
}

/* Counts work that may grow faster than the text: merging what $ref and allOf lead to, again and again, and
 * comparing each alternative with each. False: it is too much, and the schema has failed. */
static bool spend(struct schema *s, uint64_t n)
{
    s->n_work += n;
    if (s->n_work > WORK_MOST)
        schema_fail(s, TD_ERR_NO_SPACE, "to merge its allOf and $ref, or to compare its oneOf, takes too much work");
    return !s->status;
}

/* Keeps a schema that was made here. */
static json_t *keep(struct schema *s, json_t *schema)
{
    json_array_append_new(s->made, schema);
    return schema;
}

/* -------------------------------------------------------------------- keywords */

static const char *const ANNOTATIONS[] = {
    "title", "description", "default",    "examples", "example",    "$schema",         "$id",
    "id",    "$comment",    "deprecated", "readOnly", "writeOnly",  "contentEncoding", "contentMediaType",
    "$defs", "definitions", "$anchor",    "nullable", "$vocabulary"};
static const char *const KEYWORDS[] = {"type",
                                       "enum",
                                       "const",
                                       "properties",
                                       "required",
                                       "additionalProperties",
                                       "items",
                                       "minItems",
                                       "maxItems",
                                       "prefixItems",
                                       "additionalItems",
                                       "minLength",
                                       "maxLength",
                                       "pattern",
                                       "format",
                                       "minimum",
                                       "maximum",
                                       "exclusiveMinimum",
                                       "exclusiveMaximum",
                                       "multipleOf",
                                       "anyOf",
                                       "oneOf",
                                       "allOf",
                                       "$ref",
                                       "uniqueItems",
                                       "minProperties"};

static bool is_among(const char *name, const char *const *names, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!strcmp(name, names[i]))
            return true;
    return false;
}
#define IS_AMONG(name, names) is_among(name, names, sizeof(names) / sizeof((names)[0]))

static bool check_keywords(struct schema *s, const json_t *schema)
{
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)schema, name, v)
    {
        bool is_annotation = IS_AMONG(name, ANNOTATIONS) || (name[0] == 'x' && name[1] == '-');
        if (!is_annotation && !IS_AMONG(name, KEYWORDS))
            unsupported(s, name);
    }
    if (json_is_true(json_object_get(schema, "nullable")))
        unsupported(s, "nullable");
    return !s->status;
}

/* ------------------------------------------------------------------ references */

/* The schema that a pointer "#/a/b" names; NULL: there is none. */
static json_t *resolve(struct schema *s, const char *pointer)
{
    json_t *at = s->root;
    spend(s, strlen(pointer) / 8);
    if (pointer[0] != '#' || (pointer[1] && pointer[1] != '/'))
        return NULL;
    for (pointer += 1; at && *pointer;) {
        char name[NAME_BYTES_MOST];
        size_t n = 0;
        for (pointer++; *pointer && *pointer != '/' && n + 1 < sizeof(name); pointer++) {
            char c = *pointer;
            if (c == '~' && (pointer[1] == '0' || pointer[1] == '1'))
                c = *++pointer == '0' ? '~' : '/';
            name[n++] = c;
        }
        name[n] = 0;
        at = json_is_array(at) ? json_array_get(at, (size_t)strtoul(name, NULL, 10)) : json_object_get(at, name);
    }
    return at;
}

static uint32_t rule_of_reference(struct schema *s, const char *pointer)
{
    json_t *target = resolve(s, pointer);
    if (!target)
        return schema_fail(s, TD_ERR_INVALID, "$ref '%.128s' leads to nothing", pointer);
    spend(s, s->n_references);
    for (uint32_t i = 0; i < s->n_references; i++)
        if (s->references[i].target == target)
            return s->references[i].rule;
    uint32_t rule = gr_later(s->p);
    s->references = MEM_ROOM(s->references, s->n_references, s->cap_references, 8);
    s->references[s->n_references++] = (struct reference){target, rule};
    gr_become(s->p, rule, rule_of(s, target));
    return rule;
}

/* ---------------------------------------------------------------------- merging */

static bool is_open(const json_t *schema) /* it allows everything */
{
    return !schema || json_is_true(schema) || (json_is_object(schema) && !json_object_size(schema));
}

/* Values in it, with itself. */
static uint64_t weight(const json_t *a)
{
    uint64_t n = 1;
    const char *name;
    size_t i;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)a, name, v) n += weight(v);
    json_array_foreach((json_t *)(uintptr_t)a, i, v) n += weight(v);
    return n;
}

static bool equal(struct schema *s, const json_t *a, const json_t *b)
{
    bool may_be = json_typeof(a) == json_typeof(b) && json_object_size(a) == json_object_size(b) &&
                  json_array_size(a) == json_array_size(b);
    return a == b || (may_be && spend(s, weight(a)) && json_equal(a, b));
}

static json_t *both(struct schema *s, json_t *a, json_t *b)
{
    if (is_open(a) || is_open(b))
        return json_incref(is_open(a) ? (b ? b : json_true()) : a);
    if (json_is_false(a) || json_is_false(b))
        return json_false();
    return equal(s, a, b) ? json_incref(a) : json_pack("{s:[O,O]}", "allOf", a, b);
}

/* Whether a value of this type may have the type that is named. */
static bool has_type(const json_t *types, const char *type)
{
    size_t i;
    json_t *t;
    if (!types)
        return true;
    if (json_is_string(types))
        return !strcmp(json_string_value(types), type) ||
               (!strcmp(type, "integer") && !strcmp(json_string_value(types), "number"));
    json_array_foreach((json_t *)(uintptr_t)types, i, t) if (has_type(t, type)) return true;
    return false;
}

static json_t *both_types(const json_t *a, const json_t *b)
{
    static const char *const TYPES[] = {"object", "array", "string", "number", "integer", "boolean", "null"};
    json_t *list = json_array();
    for (size_t i = 0; i < 7; i++)
        if (has_type(a, TYPES[i]) && has_type(b, TYPES[i]) &&
            (strcmp(TYPES[i], "integer") != 0 || !json_array_size(list) || !has_type(list, "integer")))
            json_array_append_new(list, json_string(TYPES[i]));
    return list;
}

static json_t *both_lists(struct schema *s, json_t *a, json_t *b, bool is_union)
{
    json_t *list = is_union ? json_copy(a) : json_array(), *x, *y;
    size_t i, k;
    if (!spend(s, (uint64_t)json_array_size(a) * json_array_size(b)))
        return list;
    json_array_foreach(b, i, y)
    {
        bool is_there = false;
        json_array_foreach(a, k, x) is_there |= equal(s, x, y);
        if (is_there != is_union)
            json_array_append(list, y);
    }
    return list;
}

/* What b's properties say of a name: its schema, or that of all others. */
static json_t *property_of(const json_t *schema, const char *name)
{
    json_t *one = json_object_get(json_object_get(schema, "properties"), name);
    return one ? one : json_object_get(schema, "additionalProperties");
}

static void merge_properties(struct schema *s, json_t *to, json_t *a, json_t *b)
{
    json_t *all = json_object(), *v;
    const char *name;
    spend(s, json_object_size(json_object_get(a, "properties")) + json_object_size(json_object_get(b, "properties")));
    json_object_foreach(json_object_get(a, "properties"), name, v)
        json_object_set_new(all, name, both(s, v, property_of(b, name)));
    json_object_foreach(json_object_get(b, "properties"), name, v) if (!json_object_get(all, name))
        json_object_set_new(all, name, both(s, v, property_of(a, name)));
    json_object_set_new(to, "properties", all);
    json_object_set_new(
        to, "additionalProperties",
        both(s, json_object_get(a, "additionalProperties"), json_object_get(b, "additionalProperties")));
}

static const char *const LEAST[] = {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"};
static const char *const MOST[] = {"maximum", "exclusiveMaximum", "maxLength", "maxItems"};

/* One keyword that both have, with different values. NULL: they do not merge. */
static json_t *merge_keyword(struct schema *s, const char *name, json_t *a, json_t *b)
{
    if (equal(s, a, b))
        return json_incref(a);
    if (!strcmp(name, "type"))
        return both_types(a, b);
    if (!strcmp(name, "enum"))
        return both_lists(s, a, b, false);
    if (!strcmp(name, "required"))
        return both_lists(s, a, b, true);
    if (!strcmp(name, "items"))
        return both(s, a, b);
    if (IS_AMONG(name, LEAST) && json_is_number(a) && json_is_number(b))
        return json_incref(json_number_value(a) > json_number_value(b) ? a : b);
    if (IS_AMONG(name, MOST) && json_is_number(a) && json_is_number(b))
        return json_incref(json_number_value(a) < json_number_value(b) ? a : b);
    return IS_AMONG(name, ANNOTATIONS) ? json_incref(a) : NULL;
}

/* A schema that says what both say; NULL, with an error: they do not merge. Owned by the caller. */
static json_t *merge(struct schema *s, json_t *a, json_t *b)
{
    const char *name;
    json_t *to, *v;
    if (!json_is_object(a) || !json_is_object(b))
        return both(s, a, b);
    spend(s, 1 + json_object_size(a) + json_object_size(b));
    to = json_copy(a);
    json_object_foreach(b, name, v)
    {
        json_t *mine = json_object_get(a, name), *one = mine ? merge_keyword(s, name, mine, v) : json_incref(v);
        bool is_later = !strcmp(name, "properties") || !strcmp(name, "additionalProperties");
        if (one)
            json_object_set_new(to, name, one);
        else if (!is_later)
            schema_fail(s, TD_ERR_UNSUPPORTED, "%s twice, in allOf or beside $ref, is not supported", name);
    }
    if (json_object_get(to, "properties") || json_object_get(to, "additionalProperties"))
        merge_properties(s, to, a, b);
    return to;
}

/* The schema without allOf and $ref; owned by s. */
static json_t *flatten(struct schema *s, json_t *schema, uint32_t depth)
{
    json_t *parts = json_object_get(schema, "allOf"), *part, *all;
    const char *pointer = json_string_value(json_object_get(schema, "$ref"));
    size_t i;
    if ((!parts && !pointer) || !spend(s, 1))
        return schema;
    if (depth > DEPTH_MOST) {
        schema_fail(s, TD_ERR_UNSUPPORTED, "$ref or allOf within itself");
        return schema;
    }
    all = keep(s, json_copy(schema));
    json_object_del(all, "allOf");
    json_object_del(all, "$ref");
    if (pointer) {
        json_t *target = resolve(s, pointer);
        if (!target)
            schema_fail(s, TD_ERR_INVALID, "$ref '%.128s' leads to nothing", pointer);
        else
            all = keep(s, merge(s, all, flatten(s, target, depth + 1)));
    }
    json_array_foreach(parts, i, part) if (!s->status) all = keep(s, merge(s, all, flatten(s, part, depth + 1)));
    return all;
}

/* Whether nothing but annotations stands beside the keyword. */
static bool is_alone(const json_t *schema, const char *keyword)
{
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)schema, name,
                        v) if (strcmp(name, keyword) != 0 && !IS_AMONG(name, ANNOTATIONS)) return false;
    return true;
}

/* --------------------------------------------------------------------- constants */

static uint32_t rule_of_value(struct schema *s, json_t *v)
{
    json_t *names = json_array(), *properties = json_object(), *one;
    const char *name;
    size_t i;
    json_t *made;
    if (json_is_array(v)) {
        json_t *items = json_array();
        json_array_foreach(v, i, one) json_array_append_new(items, json_pack("{s:O}", "const", one));
        made = json_pack("{s:s, s:o, s:b, s:I}", "type", "array", "prefixItems", items, "items", 0, "minItems",
                         (json_int_t)json_array_size(v));
    } else {
        json_object_foreach(v, name, one)
        {
            json_object_set_new(properties, name, json_pack("{s:O}", "const", one));
            json_array_append_new(names, json_string(name));
        }
        made = json_pack("{s:s, s:O, s:O, s:b}", "type", "object", "properties", properties, "required", names,
                         "additionalProperties", 0);
    }
    json_decref(names);
    json_decref(properties);
    return rule_of(s, keep(s, made));
}

/* Adds the texts of a value that is neither list nor object. */
static void add_texts(struct bytes **texts, uint32_t *n, uint32_t *cap, json_t *v)
{
    for (int is_ascii = 0; is_ascii < (json_is_string(v) ? 2 : 1); is_ascii++) {
        *texts = MEM_ROOM(*texts, *n, *cap, 16);
        struct bytes *b = &(*texts)[*n];
        *b = (struct bytes){0};
        if (json_is_string(v)) {
            gr_quote(b, json_string_value(v), json_string_length(v), is_ascii);
        } else {
            char *text = json_dumps(v, JSON_ENCODE_ANY | JSON_REAL_PRECISION(17));
            bytes_append(b, text, strlen(text));
            free(text);
        }
        ++*n;
    }
}

static const char *type_name(const json_t *v)
{
    return json_is_object(v)    ? "object"
           : json_is_array(v)   ? "array"
           : json_is_string(v)  ? "string"
           : json_is_integer(v) ? "integer"
           : json_is_real(v)    ? "number"
           : json_is_null(v)    ? "null"
                                : "boolean";
}

/* One of the values that have a type of the schema. What else it says of them is not looked at, so it
 * must say nothing. */
static uint32_t rule_of_values(struct schema *s, const json_t *schema, json_t *values)
{
    static const char *const BESIDE[] = {"type", "enum", "const"};
    uint32_t n = 0, cap = 0, n_rules = 0, *rules = mem_array(json_array_size(values) + 1, sizeof(*rules));
    struct bytes *texts = NULL;
    size_t i;
    json_t *v;
    const char *name;
    json_object_foreach((json_t *)(uintptr_t)schema, name,
                        v) if (!IS_AMONG(name, BESIDE) && !IS_AMONG(name, ANNOTATIONS))
        schema_fail(s, TD_ERR_UNSUPPORTED, "%s beside enum or const is not supported", name);
    json_array_foreach(values, i, v)
    {
        if (!has_type(json_object_get(schema, "type"), type_name(v)))
            continue;
        if (json_is_object(v) || json_is_array(v))
            rules[n_rules++] = gr_call(s->p, rule_of_value(s, v), true, GR_END);
        else
            add_texts(&texts, &n, &cap, v);
    }
    if (!n && !n_rules)
        schema_fail(s, TD_ERR_INVALID, "no value of enum or const has the type");
    if (n)
        rules[n_rules++] = gr_one_of(s->p, texts, n, GR_END);
    for (uint32_t k = 0; k < n; k++)
        bytes_free(&texts[k]);
    uint32_t rule = n_rules ? gr_split(s->p, rules, n_rules) : GR_END;
    free(texts);
    free(rules);
    return rule;
}

/* ------------------------------------------------------------------ alternatives */

/* Whether no value can be of both: they have other types, or a required property with other constants.
 * depth: of the properties that were gone through. */
static bool are_apart(struct schema *s, json_t *a, json_t *b, uint32_t depth)
{
    if (depth > DEPTH_MOST || !spend(s, 1))
        return false;
    json_t *x = flatten(s, a, 0), *y = flatten(s, b, 0), *types, *v, *values;
    const char *name;
    size_t i;
    bool is_apart;
    if (!json_is_object(x) || !json_is_object(y))
        return json_is_false(x) || json_is_false(y);
    types = both_types(json_object_get(x, "type"), json_object_get(y, "type"));
    is_apart = !json_array_size(types);
    json_decref(types);
    json_t *one = json_object_get(x, "const"), *other = json_object_get(y, "const");
    if (one && other && !equal(s, one, other))
        return true;
    if ((values = json_object_get(x, "enum")) && json_object_get(y, "enum")) {
        json_t *shared = both_lists(s, values, json_object_get(y, "enum"), false);
        is_apart |= !json_array_size(shared);
        json_decref(shared);
    }
    json_array_foreach(json_object_get(x, "required"), i, v)
    {
        size_t k;
        json_t *w;
        name = json_string_value(v);
        json_array_foreach(json_object_get(y, "required"), k,
                           w) if (name && spend(s, 1) && json_equal(v, w) &&
                                  json_object_get(json_object_get(x, "properties"), name) &&
                                  json_object_get(json_object_get(y, "properties"), name)) is_apart |=
            are_apart(s, json_object_get(json_object_get(x, "properties"), name),
                      json_object_get(json_object_get(y, "properties"), name), depth + 1);
    }
    return is_apart;
}

static uint32_t rule_of_alternatives(struct schema *s, json_t *schema, const char *keyword)
{
    json_t *list = json_object_get(schema, keyword), *rest = keep(s, json_copy(schema)), *v, *w;
    uint32_t n = 0, *rules = mem_array(json_array_size(list) + 1, sizeof(*rules));
    size_t i, k;
    bool is_one_of = !strcmp(keyword, "oneOf");
    json_object_del(rest, keyword);
    json_array_foreach(list, i, v)
    {
        for (k = 0; is_one_of && k < i && !s->status && (w = json_array_get(list, k)); k++)
            if (!are_apart(s, v, w, 0))
                unsupported(s, "oneOf of alternatives that may both hold");
        json_t *one = is_alone(schema, keyword) ? v : keep(s, merge(s, rest, flatten(s, v, 0)));
        if (!s->status && !json_is_false(one))
            rules[n++] = gr_call(s->p, rule_of(s, one), true, GR_END);
    }
    if (!n)
        schema_fail(s, TD_ERR_INVALID, "%s has no alternative", keyword);
    uint32_t rule = n ? gr_split(s->p, rules, n) : GR_END;
    free(rules);
    return rule;
}

/* --------------------------------------------------------------------- strings */

static uint32_t quoted(struct schema *s, const struct gr_node *n)
{
    return gr_byte(s->p, '"', '"', gr_emit(s->p, n, GR_IN_STRING, s->p->strings.end));
}

static uint32_t rule_of_pattern(struct schema *s, const char *pattern, size_t len, bool is_search)
{
    struct gr_tree t = {0};
    struct gr_node *n = NULL;
    struct td_error why = {{0}};
    uint32_t rule = GR_END;
    enum td_status status = gr_parse_pattern(&t, pattern, len, is_search, &n, &why);
    if (status)
        schema_fail(s, status, "pattern: %s", why.text);
    else
        rule = quoted(s, n);
    gr_tree_free(&t);
    return rule;
}

/* A whole number at least 0; `otherwise` if it is absent. */
static uint32_t count_of(struct schema *s, const json_t *schema, const char *name, uint32_t otherwise)
{
    const json_t *v = json_object_get(schema, name);
    double n = json_number_value(v);
    if (!v)
        return otherwise;
    if (!json_is_number(v) || n < 0 || floor(n) != n)
        return schema_fail(s, TD_ERR_INVALID, "%s must be a whole number, at least 0", name);
    return n > 100000
               ? (otherwise == UINT32_MAX ? UINT32_MAX : schema_fail(s, TD_ERR_NO_SPACE, "%s is too large", name))
               : (uint32_t)n;
}

static uint32_t rule_of_string(struct schema *s, const json_t *schema)
{
    const json_t *pattern = json_object_get(schema, "pattern");
    const char *format = json_string_value(json_object_get(schema, "format")), *known = schema_format(format);
    uint32_t least = count_of(s, schema, "minLength", 0), most = count_of(s, schema, "maxLength", UINT32_MAX);
    bool has_length = least || most != UINT32_MAX;
    if ((pattern != NULL) + (known != NULL) + has_length > 1)
        return unsupported(s, "more than one of pattern, format, minLength and maxLength");
    if (least > most)
        return schema_fail(s, TD_ERR_INVALID, "minLength is more than maxLength");
    if (pattern && !json_is_string(pattern))
        return schema_fail(s, TD_ERR_INVALID, "pattern must be a text");
    if (pattern)
        return rule_of_pattern(s, json_string_value(pattern), json_string_length(pattern), true);
    if (known)
        return rule_of_pattern(s, known, strlen(known), false);
    if (!has_length)
        return s->json.string;
    struct gr_tree t = {0};
    const struct gr_span all = {0, 0x10ffff};
    uint32_t rule = quoted(s, gr_node_times(&t, gr_node_class(&t, &all, 1), least, most));
    gr_tree_free(&t);
    return rule;
}

/* --------------------------------------------------------------------- numbers */

static uint32_t rule_of_number(struct schema *s, const json_t *schema, bool is_integer)
{
    static const char *const BOUNDS[] = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"};
    struct bytes expression = {0};
    struct schema_bounds b = {.is_integer = is_integer};
    bool is_bound = false;
    for (int i = 0; i < 5; i++)
        is_bound |= json_object_get(schema, BOUNDS[i]) != NULL;
    if (!is_bound)
        return is_integer ? s->json.integer : s->json.number;
    const char *wrong = schema_bounds_read(schema, &b);
    if (wrong)
        return unsupported(s, wrong);
    if (!schema_bounds_expression(&b, &expression))
        return schema_fail(s, TD_ERR_INVALID, "no number is within its bounds");
    struct gr_tree t = {0};
    struct gr_node *n = NULL;
    enum td_status status = gr_parse_pattern(&t, expression.data, expression.len, false, &n, s->e);
    uint32_t rule = status ? GR_END : gr_emit(s->p, n, GR_RAW, GR_END);
    s->status = s->status ? s->status : status;
    gr_tree_free(&t);
    bytes_free(&expression);
    return rule;
}

/* ---------------------------------------------------------------------- arrays */

/* ',' and an element, then next; space is taken before each of them. */
static uint32_t next_element(struct schema *s, uint32_t rule, uint32_t next)
{
    return gr_byte(s->p, ',', ',', gr_space(s->p, gr_call(s->p, rule, true, gr_space(s->p, next))));
}

static uint32_t limited(uint32_t n, uint32_t less)
{
    return n == UINT32_MAX ? n : n > less ? n - less : 0;
}

/* Elements behind the first `n`, then ']'. */
static uint32_t rest_of_array(struct schema *s, json_t *items, uint32_t n, uint32_t least, uint32_t most)
{
    uint32_t close = gr_byte(s->p, ']', ']', GR_END), few = limited(least, n), many = limited(most, n);
    if (json_is_false(items) || !many)
        return close;
    uint32_t body = next_element(s, rule_of(s, items ? items : json_true()), GR_END);
    return gr_call(s->p, gr_repeat(s->p, body, few, many), false, close);
}

static uint32_t rule_of_array(struct schema *s, json_t *schema)
{
    json_t *items = json_object_get(schema, "items"), *first = json_object_get(schema, "prefixItems");
    uint32_t least = count_of(s, schema, "minItems", 0), most = count_of(s, schema, "maxItems", UINT32_MAX), n, state;
    if (json_is_array(items)) { /* as drafts before 2020-12 have it */
        first = items;
        items = json_object_get(schema, "additionalItems");
    }
    n = (uint32_t)json_array_size(first);
    if (json_is_true(json_object_get(schema, "uniqueItems")) && most > 1)
        return unsupported(s, "uniqueItems");
    if (json_is_false(items) && most > n)
        most = n;
    if (least > most)
        return schema_fail(s, TD_ERR_INVALID, "minItems is more than there can be");
    if (!n && most) /* the first element has no comma */
        state = gr_call(s->p, rule_of(s, items ? items : json_true()), true,
                        gr_space(s->p, rest_of_array(s, items, 1, least, most)));
    else
        state = rest_of_array(s, items, n, least, most);
    for (uint32_t i = n; i-- > 0 && !s->status;) {
        uint32_t rule = rule_of(s, json_array_get(first, i)), close = gr_byte(s->p, ']', ']', GR_END);
        if (i >= most)
            state = close;
        else if (i)
            state = least > i ? next_element(s, rule, state) : gr_either(s->p, next_element(s, rule, state), close);
        else
            state = gr_call(s->p, rule, true, gr_space(s->p, state));
    }
    if (!least && (n || most) && most)
        state = gr_either(s->p, state, gr_byte(s->p, ']', ']', GR_END));
    return gr_byte(s->p, '[', '[', gr_space(s->p, state));
}

/* --------------------------------------------------------------------- objects */

/* ':' and a value, back to the object. */
static uint32_t colon(struct schema *s, uint32_t rule, uint32_t after)
{
    return gr_colon(s->p, gr_call(s->p, rule, true, gr_space(s->p, after)));
}

static void add_property(struct schema *s, uint32_t object, uint32_t i, const char *name, uint32_t rule, uint32_t after)
{
    size_t len = strlen(name);
    if (i >= GR_PROPERTIES_MOST || len > NAME_BYTES_MOST) {
        schema_fail(s, TD_ERR_NO_SPACE, "property '%.64s' is one too many, or its name too long", name);
        return;
    }
    for (int is_ascii = 0; is_ascii < 2; is_ascii++) {
        struct bytes quoted_name = {0};
        gr_quote(&quoted_name, name, len, is_ascii);
        gr_object_key(s->p, object, quoted_name.data, quoted_name.len, i);
        bytes_free(&quoted_name);
    }
    uint32_t state = colon(s, rule, after);
    s->p->objects[object].colons[i] = state;
    s->p->objects[object].all |= 1ull << i;
}

/* The number of a property, which is added if the object has none of that name. */
static uint32_t property_number(const json_t *properties, const char *name)
{
    const char *other;
    json_t *v;
    uint32_t i = 0;
    json_object_foreach((json_t *)(uintptr_t)properties, other, v)
    {
        if (!strcmp(name, other))
            return i;
        i++;
    }
    return i;
}

/* Properties, and names that are required without being properties. Returns how many. */
static uint32_t add_properties(struct schema *s, uint32_t object, json_t *properties, json_t *required, json_t *others,
                               uint32_t after)
{
    const char *name;
    json_t *v;
    size_t k;
    uint32_t n = 0;
    json_object_foreach(properties, name, v)
    {
        if (json_is_false(v))
            unsupported(s, "a property that must not be there (false)");
        if (s->status)
            return n;
        add_property(s, object, n++, name, rule_of(s, v), after);
    }
    json_array_foreach(required, k, v)
    {
        name = json_string_value(v);
        uint32_t i = name ? property_number(properties, name) : 0;
        if (!name)
            schema_fail(s, TD_ERR_INVALID, "required must be a list of names");
        else if (i == json_object_size(properties) && json_is_false(others))
            schema_fail(s, TD_ERR_INVALID, "'%.64s' is required and not allowed", name);
        else if (i == json_object_size(properties))
            add_property(s, object, i = n++, name, rule_of(s, others ? others : json_true()), after);
        if (s->status)
            return n;
        s->p->objects[object].required |= 1ull << i;
    }
    return n;
}

static uint32_t rule_of_object(struct schema *s, json_t *schema)
{
    json_t *properties = json_object_get(schema, "properties"), *required = json_object_get(schema, "required"),
           *others = json_object_get(schema, "additionalProperties");
    uint32_t object, after, key, first;
    if (count_of(s, schema, "minProperties", 0) > json_array_size(required))
        return unsupported(s, "minProperties");
    if (!json_object_size(properties) && !json_array_size(required) && is_open(others))
        return s->json.object;
    object = gr_object_new(s->p);
    after = gr_add(s->p, (struct gr_state){.op = GR_OP_OBJECT, .a = object, .b = GR_AFTER_VALUE});
    key = gr_add(s->p, (struct gr_state){.op = GR_OP_OBJECT, .a = object, .b = GR_NEXT_KEY});
    first = gr_add(s->p, (struct gr_state){.op = GR_OP_OBJECT, .a = object, .b = GR_FIRST_KEY});
    add_properties(s, object, properties, required, others, after);
    if (!s->status && !json_is_false(others)) {
        uint32_t name = gr_other_name(s->p, &s->json, object),
                 state = colon(s, rule_of(s, others ? others : json_true()), after);
        s->p->objects[object].other_key = name;
        s->p->objects[object].other_colon = state;
    }
    uint32_t comma = gr_byte(s->p, ',', ',', gr_space(s->p, key)), close = gr_byte(s->p, '}', '}', GR_END);
    s->p->objects[object].comma = comma;
    s->p->objects[object].close = close;
    return gr_byte(s->p, '{', '{', gr_space(s->p, first));
}

/* ------------------------------------------------------------------ a subschema */

static uint32_t rule_of_type(struct schema *s, json_t *schema, const char *type)
{
    if (!strcmp(type, "object"))
        return rule_of_object(s, schema);
    if (!strcmp(type, "array"))
        return rule_of_array(s, schema);
    if (!strcmp(type, "string"))
        return rule_of_string(s, schema);
    if (!strcmp(type, "integer") || !strcmp(type, "number"))
        return rule_of_number(s, schema, type[0] == 'i');
    if (!strcmp(type, "boolean"))
        return s->json.truth;
    if (!strcmp(type, "null"))
        return s->json.null;
    return schema_fail(s, TD_ERR_INVALID, "type '%.32s' is unknown", type);
}

static uint32_t rule_of_types(struct schema *s, json_t *schema)
{
    static const char *const ALL[] = {"object", "array", "string", "number", "boolean", "null"};
    json_t *types = json_object_get(schema, "type"), *t;
    uint32_t rules[16], n = 0;
    size_t i;
    if (json_is_string(types))
        return rule_of_type(s, schema, json_string_value(types));
    if (types && (!json_is_array(types) || !json_array_size(types) || json_array_size(types) > 16))
        return schema_fail(s, TD_ERR_INVALID, "type must be a name or a list of names");
    for (i = 0; !types && i < 6 && !s->status; i++)
        rules[n++] = gr_call(s->p, rule_of_type(s, schema, ALL[i]), true, GR_END);
    json_array_foreach(types, i, t) if (!s->status && json_is_string(t)) rules[n++] =
        gr_call(s->p, rule_of_type(s, schema, json_string_value(t)), true, GR_END);
    return s->status || !n ? schema_fail(s, TD_ERR_INVALID, "type names nothing") : gr_split(s->p, rules, n);
}

static uint32_t rule_of_flat(struct schema *s, json_t *schema)
{
    json_t *values = json_object_get(schema, "enum"), *one = json_object_get(schema, "const");
    if (one)
        return rule_of_values(s, schema, keep(s, json_pack("[O]", one)));
    if (values && !json_is_array(values))
        return schema_fail(s, TD_ERR_INVALID, "enum must be a list");
    if (values)
        return rule_of_values(s, schema, values);
    if (json_object_get(schema, "anyOf"))
        return rule_of_alternatives(s, schema, "anyOf");
    if (json_object_get(schema, "oneOf"))
        return rule_of_alternatives(s, schema, "oneOf");
    return rule_of_types(s, schema);
}

static uint32_t rule_of(struct schema *s, json_t *schema)
{
    const char *pointer = json_string_value(json_object_get(schema, "$ref"));
    uint32_t rule = GR_END;
    if (s->status || s->p->is_full)
        return GR_END;
    if (is_open(schema))
        return s->json.value;
    if (json_is_false(schema))
        return unsupported(s, "false");
    if (!json_is_object(schema))
        return schema_fail(s, TD_ERR_INVALID, "a schema must be an object, true or false");
    if (++s->depth > DEPTH_MOST)
        return schema_fail(s, TD_ERR_NO_SPACE, "nested too deeply");
    if (!check_keywords(s, schema))
        return GR_END;
    if (pointer && is_alone(schema, "$ref")) {
        rule = rule_of_reference(s, pointer);
    } else {
        json_t *flat = flatten(s, schema, 0);
        if (!s->status && json_is_false(flat))
            schema_fail(s, TD_ERR_INVALID, "allOf allows nothing");
        if (!s->status && check_keywords(s, flat))
            rule = rule_of_flat(s, flat);
    }
    s->depth--;
    return rule;
}

enum td_status gr_schema_rule(struct gr_program *p, const struct gr_json *j, json_t *schema, uint32_t *rule_out,
                              struct td_error *e)
{
    struct schema s = {.p = p, .e = e, .json = *j, .root = schema, .made = json_array()};
    *rule_out = rule_of(&s, schema);
    json_decref(s.made);
    free(s.references);
    return s.status;
}

enum td_status gr_compile_schema(struct gr_program *p, const char *text, size_t len, struct td_error *e)
{
    json_error_t je;
    struct gr_json j;
    uint32_t rule;
    if (len > TEXT_BYTES_MOST)
        return td_fail(e, TD_ERR_NO_SPACE, "schema: %zu bytes, at most %zu", len, TEXT_BYTES_MOST);
    json_t *schema = json_loadb(text, len, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &je);
    if (!schema)
        return td_fail(e, TD_ERR_INVALID, "schema: not JSON: %s (line %d, column %d)", je.text, je.line, je.column);
    gr_json_init(p, &j);
    enum td_status s = gr_schema_rule(p, &j, schema, &rule, e);
    p->start = gr_space(p, gr_call(p, rule, true, GR_END)); /* space behind it would have no end */
    json_decref(schema);
    return s;
}
