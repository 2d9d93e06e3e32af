/* Values of templates: making, comparing and iterating them, and writing them as Python does. */
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <utf8proc.h>

#include "model/template_internal.h"

enum { CHUNK_BYTES = 16 << 10, MAX_VALUE_DEPTH = 200 };

struct chunk {
    struct chunk *next;
    max_align_t data[];
};

/* ------------------------------------------------------------------- arena */

void *arena_take(struct arena *a, size_t len)
{
    len = (len + 15) & ~(size_t)15;
    if (len > a->left) {
        size_t room = len > CHUNK_BYTES ? len : CHUNK_BYTES;
        struct chunk *c = mem_zalloc(sizeof(*c) + room);
        c->next = a->chunks;
        a->chunks = c;
        a->at = (char *)c->data;
        a->left = room;
        a->total += room;
    }
    void *p = a->at;
    a->at += len;
    a->left -= len;
    return p;
}

struct str arena_str(struct arena *a, const char *p, size_t n)
{
    char *copy = arena_take(a, n + 1);
    if (n)
        memcpy(copy, p, n);
    return (struct str){copy, n};
}

void arena_free(struct arena *a)
{
    for (struct chunk *c = a->chunks, *next; c; c = next) {
        next = c->next;
        free(c);
    }
    *a = (struct arena){0};
}

/* ------------------------------------------------------------------ errors */

struct value run_fail(struct template_run *r, const char *format, ...)
{
    char text[200];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (!r->status)
        r->status = td_fail(r->e, TD_ERR_INVALID, "line %u: %s", r->at ? r->at->line : 0, text);
    return value_none();
}

struct value run_undefined(struct template_run *r, struct value v)
{
    return run_fail(r, "'%.*s' is undefined", v.s.n < 100 ? (int)v.s.n : 100, v.s.p);
}

bool run_room(struct template_run *r, size_t len)
{
    if (len <= TEMPLATE_MAX_MEMORY && r->arena.total + len <= TEMPLATE_MAX_MEMORY)
        return !r->status;
    if (!r->status)
        r->status = td_fail(r->e, TD_ERR_NO_SPACE, "the template needs too much memory");
    return false;
}

/* Counts an element that was written to out as a step, and checks the limits. */
static void run_wrote(struct template_run *r, const struct bytes *out)
{
    if (r->status || (out->len <= TEMPLATE_MAX_OUTPUT && ++r->steps <= TEMPLATE_MAX_STEPS))
        return;
    r->status = td_fail(r->e, TD_ERR_NO_SPACE, "the template writes too much");
}

/* ------------------------------------------------------------------ making */

struct value value_none(void)
{
    return (struct value){.kind = V_NONE};
}

struct value value_bool(bool b)
{
    return (struct value){.kind = V_BOOL, .b = b};
}

struct value value_int(int64_t i)
{
    return (struct value){.kind = V_INT, .i = i};
}

struct value value_float(double f)
{
    return (struct value){.kind = V_FLOAT, .f = f};
}

struct value value_str(const char *p, size_t n)
{
    return (struct value){.kind = V_STR, .s = {p, n}};
}

struct value value_copy(struct template_run *r, const char *p, size_t n)
{
    if (!run_room(r, n))
        return value_str("", 0);
    return (struct value){.kind = V_STR, .s = arena_str(&r->arena, p, n)};
}

struct value value_bytes(struct template_run *r, struct bytes *b)
{
    struct value v = value_copy(r, b->data ? b->data : "", b->len);
    bytes_free(b);
    return v;
}

struct value value_list(struct template_run *r, bool tuple)
{
    struct template_list *l = arena_take(&r->arena, sizeof(*l));
    l->tuple = tuple;
    return (struct value){.kind = V_LIST, .list = l};
}

struct value value_dict(struct template_run *r)
{
    return (struct value){.kind = V_DICT, .dict = arena_take(&r->arena, sizeof(struct dict))};
}

static void *grown(struct template_run *r, const void *items, size_t n, size_t *cap, size_t item_bytes)
{
    size_t more = *cap ? *cap * 2 : 4;
    if (!run_room(r, more * item_bytes))
        return NULL;
    void *p = arena_take(&r->arena, more * item_bytes);
    if (n)
        memcpy(p, items, n * item_bytes);
    *cap = more;
    return p;
}

void list_push(struct template_run *r, struct template_list *l, struct value v)
{
    if (l->n == l->cap) {
        struct value *items = grown(r, l->items, l->n, &l->cap, sizeof(*items));
        if (!items)
            return;
        l->items = items;
    }
    l->items[l->n++] = v;
}

struct value *dict_find(const struct dict *d, struct value key)
{
    for (size_t i = 0; i < d->n; i++)
        if (value_equal(d->items[i].key, key, 0))
            return &d->items[i].value;
    return NULL;
}

void dict_set(struct template_run *r, struct dict *d, struct value key, struct value v)
{
    struct value *there = dict_find(d, key);
    if (there) {
        *there = v;
        return;
    }
    if (d->n == d->cap) {
        struct pair *items = grown(r, d->items, d->n, &d->cap, sizeof(*items));
        if (!items)
            return;
        d->items = items;
    }
    d->items[d->n++] = (struct pair){key, v};
}

static struct value json_object_value(struct template_run *r, json_t *v, uint32_t depth)
{
    struct value d = value_dict(r);
    const char *key;
    size_t len, n = json_object_size(v);
    json_t *item;
    if (!n || !run_room(r, n * sizeof(*d.dict->items)))
        return d;
    d.dict->items = arena_take(&r->arena, n * sizeof(*d.dict->items));
    d.dict->cap = n;
    /* Keys differ from each other, and outlive the run. */
    json_object_keylen_foreach(v, key, len, item) d.dict->items[d.dict->n++] =
        (struct pair){value_str(key, len), value_json(r, item, depth + 1)};
    return d;
}

struct value value_json(struct template_run *r, json_t *v, uint32_t depth)
{
    size_t i;
    json_t *item;
    struct value list;
    if (depth > MAX_VALUE_DEPTH)
        return run_fail(r, "values are nested too deeply");
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return json_object_value(r, v, depth);
    case JSON_ARRAY:
        list = value_list(r, false);
        json_array_foreach(v, i, item) list_push(r, list.list, value_json(r, item, depth + 1));
        return list;
    case JSON_STRING:
        return value_str(json_string_value(v), json_string_length(v));
    case JSON_INTEGER:
        return value_int(json_integer_value(v));
    case JSON_REAL:
        return value_float(json_real_value(v));
    case JSON_TRUE:
    case JSON_FALSE:
        return value_bool(json_is_true(v));
    case JSON_NULL:
        break;
    }
    return value_none();
}

/* -------------------------------------------------------------- comparison */

bool value_true(struct value v)
{
    switch (v.kind) {
    case V_BOOL:
        return v.b;
    case V_INT:
        return v.i != 0;
    case V_FLOAT:
        return v.f != 0;
    case V_STR:
        return v.s.n != 0;
    case V_LIST:
        return v.list->n != 0;
    case V_DICT:
        return v.dict->n != 0;
    case V_UNDEFINED:
    case V_NONE:
        return false;
    default:
        return true;
    }
}

bool value_number(struct value v, double *out)
{
    *out = v.kind == V_BOOL ? v.b : v.kind == V_INT ? (double)v.i : v.kind == V_FLOAT ? v.f : 0;
    return v.kind == V_BOOL || v.kind == V_INT || v.kind == V_FLOAT;
}

static bool dict_equal(const struct dict *a, const struct dict *b, uint32_t depth)
{
    if (a->n != b->n)
        return false;
    for (size_t i = 0; i < a->n; i++) {
        const struct value *other = dict_find(b, a->items[i].key);
        if (!other || !value_equal(a->items[i].value, *other, depth + 1))
            return false;
    }
    return true;
}

bool value_equal(struct value a, struct value b, uint32_t depth)
{
    double x, y;
    if (a.kind == V_INT && b.kind == V_INT)
        return a.i == b.i;
    if (value_number(a, &x) && value_number(b, &y))
        return x == y;
    if (a.kind != b.kind || depth > MAX_VALUE_DEPTH)
        return false;
    switch (a.kind) {
    case V_STR:
        return str_is(a.s, b.s);
    case V_LIST:
        if (a.list->n != b.list->n || a.list->tuple != b.list->tuple)
            return false;
        for (size_t i = 0; i < a.list->n; i++)
            if (!value_equal(a.list->items[i], b.list->items[i], depth + 1))
                return false;
        return true;
    case V_DICT:
        return dict_equal(a.dict, b.dict, depth);
    case V_NONE:
    case V_UNDEFINED:
        return true;
    case V_FUNCTION:
        return a.i == b.i;
    case V_METHOD:
        return a.bound->method == b.bound->method && value_equal(a.bound->self, b.bound->self, depth + 1);
    default:
        return a.dict == b.dict; /* the same object */
    }
}

int value_compare(struct template_run *r, struct value a, struct value b)
{
    double x, y;
    if (a.kind == V_INT && b.kind == V_INT)
        return a.i < b.i ? -1 : a.i > b.i;
    if (value_number(a, &x) && value_number(b, &y))
        return x < y ? -1 : x > y;
    if (a.kind == V_STR && b.kind == V_STR) { /* the order of UTF-8 bytes is that of the characters */
        size_t n = a.s.n < b.s.n ? a.s.n : b.s.n;
        int order = memcmp(a.s.p, b.s.p, n);
        return order ? order : a.s.n < b.s.n ? -1 : a.s.n > b.s.n;
    }
    if (a.kind == V_LIST && b.kind == V_LIST) {
        for (size_t i = 0; i < a.list->n && i < b.list->n && !r->status; i++)
            if (!value_equal(a.list->items[i], b.list->items[i], 0))
                return value_compare(r, a.list->items[i], b.list->items[i]);
        return a.list->n < b.list->n ? -1 : a.list->n > b.list->n;
    }
    if (a.kind == V_UNDEFINED || b.kind == V_UNDEFINED)
        run_undefined(r, a.kind == V_UNDEFINED ? a : b);
    else
        run_fail(r, "'%s' and '%s' have no order", value_type(a), value_type(b));
    return 0;
}

const char *value_type(struct value v)
{
    static const char *const NAMES[] = {"undefined", "none",      "bool", "int",   "float",    "str",   "list",
                                        "dict",      "namespace", "loop", "macro", "function", "method"};
    return v.kind == V_LIST && v.list->tuple ? "tuple" : NAMES[v.kind];
}

/* ----------------------------------------------------------------- writing */

/*
 * As Python's repr: the fewest digits that read back the same; with an exponent below 1e-4 and from 1e16 on.
 */
static void write_float(double f, struct bytes *out)
{
    char text[40];
    int precision = 0;
    if (isnan(f) || isinf(f)) {
        bytes_printf(out, "%s", isnan(f) ? "nan" : f < 0 ? "-inf" : "inf");
        return;
    }
    do
        snprintf(text, sizeof(text), "%.*e", precision, f);
    while (strtod(text, NULL) != f && ++precision < 17);
    int exponent = atoi(strchr(text, 'e') + 1);
    if (exponent >= -4 && exponent < 16) {
        snprintf(text, sizeof(text), "%.*f", precision > exponent ? precision - exponent : 0, f);
        bytes_printf(out, "%s%s", text, strchr(text, '.') ? "" : ".0");
        return;
    }
    *strchr(text, 'e') = 0;
    bytes_printf(out, "%se%c%02d", text, exponent < 0 ? '-' : '+', abs(exponent));
}

static bool printable(utf8proc_int32_t c)
{
    utf8proc_category_t k = utf8proc_category(c);
    return c == ' ' || (k != UTF8PROC_CATEGORY_CN && (k < UTF8PROC_CATEGORY_ZS || k > UTF8PROC_CATEGORY_CO));
}

static void repr_str(struct str s, struct bytes *out)
{
    bool single = memchr(s.p, '\'', s.n) && !memchr(s.p, '"', s.n);
    char quote = single ? '"' : '\'';
    bytes_append(out, &quote, 1);
    for (size_t i = 0; i < s.n;) {
        utf8proc_int32_t c;
        utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)s.p + i, (utf8proc_ssize_t)(s.n - i), &c);
        n = n < 1 ? 1 : n;
        if (c == quote || c == '\\')
            bytes_printf(out, "\\%c", (char)c);
        else if (c == '\n' || c == '\r' || c == '\t')
            bytes_printf(out, "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
        else if (c >= 0 && printable(c))
            bytes_append(out, s.p + i, (size_t)n);
        else
            bytes_printf(out, c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", (unsigned)c);
        i += (size_t)n;
    }
    bytes_append(out, &quote, 1);
}

/* repr() */
static void value_repr(struct template_run *r, struct value v, uint32_t depth, struct bytes *out);

static void repr_items(struct template_run *r, struct value v, uint32_t depth, struct bytes *out)
{
    bool list = v.kind == V_LIST, tuple = list && v.list->tuple;
    size_t n = list ? v.list->n : v.dict->n;
    bytes_printf(out, "%s", tuple ? "(" : list ? "[" : "{");
    for (size_t i = 0; i < n && !r->status; i++) {
        if (i)
            bytes_printf(out, ", ");
        if (!list) {
            value_repr(r, v.dict->items[i].key, depth + 1, out);
            bytes_printf(out, ": ");
        }
        value_repr(r, list ? v.list->items[i] : v.dict->items[i].value, depth + 1, out);
        run_wrote(r, out);
    }
    bytes_printf(out, "%s", tuple ? n == 1 ? ",)" : ")" : list ? "]" : "}");
}

static void value_repr(struct template_run *r, struct value v, uint32_t depth, struct bytes *out)
{
    if (depth > MAX_VALUE_DEPTH)
        run_fail(r, "values are nested too deeply");
    else if (v.kind == V_STR)
        repr_str(v.s, out);
    else if (v.kind == V_LIST || v.kind == V_DICT)
        repr_items(r, v, depth, out);
    else if (v.kind == V_UNDEFINED)
        bytes_printf(out, "Undefined");
    else
        value_write(r, v, out);
}

void value_write(struct template_run *r, struct value v, struct bytes *out)
{
    switch (v.kind) {
    case V_UNDEFINED:
        break;
    case V_NONE:
        bytes_printf(out, "None");
        break;
    case V_BOOL:
        bytes_printf(out, "%s", v.b ? "True" : "False");
        break;
    case V_INT:
        bytes_printf(out, "%lld", (long long)v.i);
        break;
    case V_FLOAT:
        write_float(v.f, out);
        break;
    case V_STR:
        bytes_append(out, v.s.p, v.s.n);
        break;
    case V_LIST:
    case V_DICT:
        value_repr(r, v, 0, out);
        break;
    default:
        run_fail(r, "a %s can't be shown", value_type(v));
    }
}

struct value value_text(struct template_run *r, struct value v)
{
    struct bytes b = {0};
    if (v.kind == V_STR)
        return v;
    value_write(r, v, &b);
    return value_bytes(r, &b);
}

/* -------------------------------------------------------------------- JSON */

static void json_str(struct str s, bool ascii, struct bytes *out)
{
    bytes_append(out, "\"", 1);
    for (size_t i = 0; i < s.n;) {
        static const char FROM[] = "\b\f\n\r\t\"\\", TO[] = "bfnrt\"\\";
        unsigned char b = (unsigned char)s.p[i];
        const char *simple = b ? strchr(FROM, b) : NULL;
        utf8proc_int32_t c = b;
        utf8proc_ssize_t n = 1;
        if (b >= 0x80)
            n = utf8proc_iterate((const utf8proc_uint8_t *)s.p + i, (utf8proc_ssize_t)(s.n - i), &c);
        n = n < 1 ? 1 : n;
        if (simple)
            bytes_printf(out, "\\%c", TO[simple - FROM]);
        else if (c < 0x20 || (ascii && c >= 0x7f && c < 0x10000))
            bytes_printf(out, c == 0x7f ? "%c" : "\\u%04x", (unsigned)c);
        else if (ascii && c >= 0x10000)
            bytes_printf(out, "\\u%04x\\u%04x", 0xd800 + ((unsigned)c - 0x10000) / 1024, 0xdc00 + (unsigned)c % 1024);
        else
            bytes_append(out, s.p + i, (size_t)n);
        i += (size_t)n;
    }
    bytes_append(out, "\"", 1);
}

static void json_key(struct template_run *r, struct value key, bool ascii, struct bytes *out)
{
    struct bytes text = {0};
    if (key.kind == V_NONE)
        bytes_printf(&text, "null");
    else if (key.kind == V_BOOL)
        bytes_printf(&text, "%s", key.b ? "true" : "false");
    else if (key.kind == V_LIST)
        run_fail(r, "tojson: a key is a tuple");
    else
        value_write(r, key, &text);
    json_str((struct str){text.data ? text.data : "", text.len}, ascii, out);
    bytes_free(&text);
}

static void json_line(const struct json_style *s, uint32_t depth, struct bytes *out)
{
    bytes_printf(out, "\n");
    for (uint32_t i = 0; i < depth; i++)
        bytes_append(out, s->indent.p, s->indent.n);
}

static int by_key(const void *a, const void *b)
{
    const struct pair *x = a, *y = b;
    if (x->key.kind != V_STR || y->key.kind != V_STR)
        return 0;
    size_t n = x->key.s.n < y->key.s.n ? x->key.s.n : y->key.s.n;
    int order = memcmp(x->key.s.p, y->key.s.p, n);
    return order ? order : x->key.s.n < y->key.s.n ? -1 : x->key.s.n > y->key.s.n;
}

static void json_items(struct template_run *r, struct value v, const struct json_style *s, uint32_t depth,
                       struct bytes *out)
{
    bool list = v.kind == V_LIST;
    size_t n = list ? v.list->n : v.dict->n;
    struct pair *pairs = list ? NULL : mem_dup(v.dict->items, n * sizeof(*pairs));
    if (!list && s->sorted && n)
        qsort(pairs, n, sizeof(*pairs), by_key);
    bytes_append(out, list ? "[" : "{", 1);
    for (size_t i = 0; i < n && !r->status; i++) {
        if (i)
            bytes_append(out, s->item.p, s->item.n);
        if (s->indent.p)
            json_line(s, depth + 1, out);
        if (!list) {
            json_key(r, pairs[i].key, s->ascii, out);
            bytes_append(out, s->key.p, s->key.n);
        }
        value_tojson(r, list ? v.list->items[i] : pairs[i].value, s, depth + 1, out);
        run_wrote(r, out);
    }
    if (s->indent.p && n)
        json_line(s, depth, out);
    bytes_append(out, list ? "]" : "}", 1);
    free(pairs);
}

void value_tojson(struct template_run *r, struct value v, const struct json_style *s, uint32_t depth, struct bytes *out)
{
    if (depth > MAX_VALUE_DEPTH)
        run_fail(r, "values are nested too deeply");
    else if (v.kind == V_NONE)
        bytes_printf(out, "null");
    else if (v.kind == V_BOOL)
        bytes_printf(out, "%s", v.b ? "true" : "false");
    else if (v.kind == V_STR)
        json_str(v.s, s->ascii, out);
    else if (v.kind == V_LIST || v.kind == V_DICT)
        json_items(r, v, s, depth, out);
    else if (v.kind == V_FLOAT && !isfinite(v.f))
        bytes_printf(out, "%s", isnan(v.f) ? "NaN" : v.f < 0 ? "-Infinity" : "Infinity");
    else if (v.kind == V_INT || v.kind == V_FLOAT)
        value_write(r, v, out);
    else if (v.kind == V_UNDEFINED)
        run_undefined(r, v);
    else
        run_fail(r, "tojson of a %s", value_type(v));
}

/* --------------------------------------------------------------- iteration */

struct template_list *value_iterate(struct template_run *r, struct value v)
{
    if (v.kind == V_LIST)
        return v.list;
    struct value l = value_list(r, false);
    if (v.kind == V_DICT) {
        for (size_t i = 0; i < v.dict->n; i++)
            list_push(r, l.list, v.dict->items[i].key);
    } else if (v.kind == V_STR) {
        for (size_t i = 0, n; i < v.s.n && !r->status; i += n) {
            n = str_offset((struct str){v.s.p + i, v.s.n - i}, 1);
            list_push(r, l.list, value_str(v.s.p + i, n));
        }
    } else if (v.kind != V_UNDEFINED) {
        run_fail(r, "a %s can't be iterated over", value_type(v));
    }
    return l.list;
}

/* ------------------------------------------------------------------- texts */

size_t str_chars(struct str s)
{
    size_t n = 0;
    for (size_t i = 0; i < s.n; i++)
        n += ((unsigned char)s.p[i] & 0xc0) != 0x80;
    return n;
}

size_t str_offset(struct str s, size_t chars)
{
    size_t i = 0;
    for (; chars && i < s.n; chars--)
        for (i++; i < s.n && ((unsigned char)s.p[i] & 0xc0) == 0x80;)
            i++;
    return i;
}

static bool strips(struct str c, const struct str *chars)
{
    if (chars)
        return memmem(chars->p, chars->n, c.p, c.n) != NULL;
    utf8proc_int32_t u;
    if (c.n == 1)
        return c.p[0] == ' ' || (c.p[0] >= 9 && c.p[0] <= 13) || (c.p[0] >= 0x1c && c.p[0] <= 0x1f);
    utf8proc_iterate((const utf8proc_uint8_t *)c.p, (utf8proc_ssize_t)c.n, &u);
    utf8proc_category_t k = utf8proc_category(u);
    return u == 0x85 || k == UTF8PROC_CATEGORY_ZS || k == UTF8PROC_CATEGORY_ZL || k == UTF8PROC_CATEGORY_ZP;
}

struct str str_strip(struct str s, struct str *chars, bool left, bool right)
{
    while (left && s.n) {
        size_t n = str_offset(s, 1);
        if (!strips((struct str){s.p, n}, chars))
            break;
        s = (struct str){s.p + n, s.n - n};
    }
    while (right && s.n) {
        size_t at = s.n - 1;
        while (at && ((unsigned char)s.p[at] & 0xc0) == 0x80)
            at--;
        if (!strips((struct str){s.p + at, s.n - at}, chars))
            break;
        s.n = at;
    }
    return s;
}

struct value str_case(struct template_run *r, struct str s, bool upper)
{
    struct bytes b = {0};
    for (size_t i = 0; i < s.n;) {
        utf8proc_int32_t c;
        utf8proc_uint8_t text[4];
        utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)s.p + i, (utf8proc_ssize_t)(s.n - i), &c);
        if (n < 1)
            break; /* cannot happen: texts are UTF-8 */
        if (upper && c == 0xdf)
            bytes_append(&b, "SS", 2);
        else if (!upper && c == 0x130)
            bytes_append(&b, "i\xcc\x87", 3);
        else
            bytes_append(&b, text,
                         (size_t)utf8proc_encode_char(upper ? utf8proc_toupper(c) : utf8proc_tolower(c), text));
        i += (size_t)n;
    }
    return value_bytes(r, &b);
}

struct value str_replace(struct template_run *r, struct str s, struct str old, struct str with, int64_t count)
{
    struct bytes b = {0};
    size_t at = 0;
    if (!old.n) { /* the new text goes before every character, and to the end */
        for (size_t n; count && !r->status; count--, at += n) {
            bytes_append(&b, with.p, with.n);
            n = str_offset((struct str){s.p + at, s.n - at}, 1);
            bytes_append(&b, s.p + at, n);
            run_room(r, b.len);
            if (!n)
                break;
        }
    } else {
        for (const char *hit; count && !r->status && (hit = memmem(s.p + at, s.n - at, old.p, old.n)); count--) {
            bytes_append(&b, s.p + at, (size_t)(hit - s.p) - at);
            bytes_append(&b, with.p, with.n);
            at = (size_t)(hit - s.p) + old.n;
            run_room(r, b.len);
        }
    }
    bytes_append(&b, s.p + at, s.n - at);
    return value_bytes(r, &b);
}
