/* Methods of texts, lists and dicts, and the functions that every template sees. */
#include <stdlib.h>
#include <utf8proc.h>

#include "model/template_internal.h"

enum { MAX_RANGE = 100000 };

typedef struct value method_fn(struct template_run *r, struct value self, const struct template_args *a);

/* ------------------------------------------------------------------- texts */

static bool text_arg(struct template_run *r, const struct template_args *a, uint32_t i, const char *name,
                     struct str *out)
{
    struct value v;
    if (!template_arg(a, i, name, &v) || v.kind == V_NONE)
        return false;
    if (v.kind != V_STR) {
        run_fail(r, "'%s' is a %s, expected a text", name, value_type(v));
        return false;
    }
    *out = v.s;
    return true;
}

static int64_t int_arg(struct template_run *r, const struct template_args *a, uint32_t i, const char *name,
                       int64_t otherwise)
{
    struct value v;
    if (!template_arg(a, i, name, &v) || v.kind == V_NONE)
        return otherwise;
    if (v.kind != V_INT)
        run_fail(r, "'%s' is a %s, expected a whole number", name, value_type(v));
    return v.kind == V_INT ? v.i : otherwise;
}

static struct value from_str(struct str s)
{
    return value_str(s.p, s.n);
}

static struct value strip_sides(struct template_run *r, struct value self, const struct template_args *a, bool left,
                                bool right)
{
    struct str chars;
    bool given = text_arg(r, a, 0, "chars", &chars);
    return from_str(str_strip(self.s, given ? &chars : NULL, left, right));
}

static struct value m_strip(struct template_run *r, struct value self, const struct template_args *a)
{
    return strip_sides(r, self, a, true, true);
}

static struct value m_lstrip(struct template_run *r, struct value self, const struct template_args *a)
{
    return strip_sides(r, self, a, true, false);
}

static struct value m_rstrip(struct template_run *r, struct value self, const struct template_args *a)
{
    return strip_sides(r, self, a, false, true);
}

static struct value m_upper(struct template_run *r, struct value self, const struct template_args *a)
{
    (void)a;
    return str_case(r, self.s, true);
}

static struct value m_lower(struct template_run *r, struct value self, const struct template_args *a)
{
    (void)a;
    return str_case(r, self.s, false);
}

static struct value m_capitalize(struct template_run *r, struct value self, const struct template_args *a)
{
    return filter_apply(r, filter_find(STR("capitalize")), self, a);
}

/*
 * Each run of letters gets an upper-case first letter. The filter of that name differs: it divides words at
 * spaces.
 */
static struct value m_title(struct template_run *r, struct value self, const struct template_args *a)
{
    struct bytes b = {0};
    bool inside = false;
    (void)a;
    for (size_t i = 0, n; i < self.s.n && !r->status; i += n) {
        utf8proc_int32_t c;
        n = str_offset((struct str){self.s.p + i, self.s.n - i}, 1);
        utf8proc_iterate((const utf8proc_uint8_t *)self.s.p + i, (utf8proc_ssize_t)n, &c);
        utf8proc_category_t k = utf8proc_category(c);
        struct value one = str_case(r, (struct str){self.s.p + i, n}, !inside);
        bytes_append(&b, one.s.p, one.s.n);
        inside = k == UTF8PROC_CATEGORY_LU || k == UTF8PROC_CATEGORY_LL || k == UTF8PROC_CATEGORY_LT;
    }
    return value_bytes(r, &b);
}

/* Whether s has that text, or any of a tuple of texts, at its front or end. */
static bool at_end(struct template_run *r, struct str s, struct value v, bool front)
{
    if (v.kind == V_LIST && v.list->tuple) {
        for (size_t i = 0; i < v.list->n; i++)
            if (at_end(r, s, v.list->items[i], front))
                return true;
        return false;
    }
    if (v.kind != V_STR) {
        run_fail(r, "startswith or endswith of a %s", value_type(v));
        return false;
    }
    return v.s.n <= s.n && !memcmp(front ? s.p : s.p + s.n - v.s.n, v.s.p, v.s.n);
}

static struct value ends_of(struct template_run *r, struct value self, const struct template_args *a, bool front)
{
    struct value v;
    if (!template_arg(a, 0, "prefix", &v))
        return run_fail(r, "startswith or endswith without an argument");
    struct str s = self.s;
    int64_t n = (int64_t)str_chars(s), from = int_arg(r, a, 1, "start", 0);
    from = from < 0 ? (from + n < 0 ? 0 : from + n) : from;
    if (from > n)
        return value_bool(false);
    size_t at = str_offset(s, (size_t)from);
    return value_bool(at_end(r, (struct str){s.p + at, s.n - at}, v, front));
}

static struct value m_startswith(struct template_run *r, struct value self, const struct template_args *a)
{
    return ends_of(r, self, a, true);
}

static struct value m_endswith(struct template_run *r, struct value self, const struct template_args *a)
{
    return ends_of(r, self, a, false);
}

static struct value m_replace(struct template_run *r, struct value self, const struct template_args *a)
{
    struct str old, with;
    if (!text_arg(r, a, 0, "old", &old) || !text_arg(r, a, 1, "new", &with))
        return run_fail(r, "replace wants two texts");
    return str_replace(r, self.s, old, with, int_arg(r, a, 2, "count", -1));
}

static struct value m_removeprefix(struct template_run *r, struct value self, const struct template_args *a)
{
    struct str x;
    if (!text_arg(r, a, 0, "prefix", &x))
        return run_fail(r, "removeprefix wants a text");
    bool there = x.n <= self.s.n && !memcmp(self.s.p, x.p, x.n);
    return there ? value_str(self.s.p + x.n, self.s.n - x.n) : self;
}

static struct value m_removesuffix(struct template_run *r, struct value self, const struct template_args *a)
{
    struct str x;
    if (!text_arg(r, a, 0, "suffix", &x))
        return run_fail(r, "removesuffix wants a text");
    bool there = x.n <= self.s.n && !memcmp(self.s.p + self.s.n - x.n, x.p, x.n);
    return there ? value_str(self.s.p, self.s.n - x.n) : self;
}

/* Splits at white space as Python does: not at the ends, and once for each run. */
static struct value split_spaces(struct template_run *r, struct str s, int64_t most, bool from_right)
{
    struct value out = value_list(r, false);
    s = str_strip(s, NULL, true, true);
    while (s.n && !r->status) {
        struct str word = s;
        size_t cut = 0;
        bool found = false;
        /* Finds the first space, or the last one. */
        for (size_t i = 0, n; i < s.n && (!found || from_right); i += n) {
            n = str_offset((struct str){s.p + i, s.n - i}, 1);
            if (str_strip((struct str){s.p + i, n}, NULL, true, false).n == 0) {
                cut = i + (from_right ? n : 0);
                found = true;
            }
        }
        if (!found || !most--) {
            list_push(r, out.list, from_str(s));
            break;
        }
        word = from_right ? (struct str){s.p + cut, s.n - cut} : (struct str){s.p, cut};
        list_push(r, out.list, from_str(word));
        s = from_right ? str_strip((struct str){s.p, cut}, NULL, false, true)
                       : str_strip((struct str){s.p + cut, s.n - cut}, NULL, true, false);
    }
    return out;
}

static const char *find_last(struct str s, struct str what)
{
    for (size_t i = s.n - what.n + 1; s.n >= what.n && i-- > 0;)
        if (!memcmp(s.p + i, what.p, what.n))
            return s.p + i;
    return NULL;
}

static struct value split_at(struct template_run *r, struct str s, struct str by, int64_t most, bool from_right)
{
    struct value out = value_list(r, false);
    while (!r->status) {
        const char *hit = !most ? NULL : from_right ? find_last(s, by) : memmem(s.p, s.n, by.p, by.n);
        if (!hit)
            break;
        most--;
        size_t at = (size_t)(hit - s.p);
        struct str rest = {hit + by.n, s.n - at - by.n};
        list_push(r, out.list, from_right ? from_str(rest) : value_str(s.p, at));
        s = from_right ? (struct str){s.p, at} : rest;
    }
    list_push(r, out.list, from_str(s));
    return out;
}

static struct value split_any(struct template_run *r, struct value self, const struct template_args *a, bool from_right)
{
    struct str by;
    int64_t most = int_arg(r, a, 1, "maxsplit", -1);
    bool given = text_arg(r, a, 0, "sep", &by);
    if (given && !by.n)
        return run_fail(r, "split at an empty text");
    struct value out = given ? split_at(r, self.s, by, most, from_right) : split_spaces(r, self.s, most, from_right);
    for (size_t i = 0, j = out.list->n; from_right && i + 1 < j--;
         i++) { /* pieces were found from the end: reverses them */
        struct value swap = out.list->items[i];
        out.list->items[i] = out.list->items[j];
        out.list->items[j] = swap;
    }
    return out;
}

static struct value m_split(struct template_run *r, struct value self, const struct template_args *a)
{
    return split_any(r, self, a, false);
}

static struct value m_rsplit(struct template_run *r, struct value self, const struct template_args *a)
{
    return split_any(r, self, a, true);
}

static struct value m_partition(struct template_run *r, struct value self, const struct template_args *a)
{
    struct str by;
    struct value out = value_list(r, true);
    if (!text_arg(r, a, 0, "sep", &by) || !by.n)
        return run_fail(r, "partition wants a text");
    const char *hit = memmem(self.s.p, self.s.n, by.p, by.n);
    size_t at = hit ? (size_t)(hit - self.s.p) : self.s.n;
    list_push(r, out.list, value_str(self.s.p, at));
    list_push(r, out.list, value_str(by.p, hit ? by.n : 0));
    list_push(r, out.list, hit ? value_str(hit + by.n, self.s.n - at - by.n) : value_str("", 0));
    return out;
}

static struct value m_splitlines(struct template_run *r, struct value self, const struct template_args *a)
{
    struct value out = value_list(r, false), keep = value_bool(false);
    struct str s = self.s;
    template_arg(a, 0, "keepends", &keep);
    while (s.n && !r->status) {
        size_t i = 0, end = 0;
        while (i < s.n && s.p[i] != '\n' && s.p[i] != '\r' && s.p[i] != '\v' && s.p[i] != '\f')
            i++;
        if (i < s.n)
            end = s.p[i] == '\r' && i + 1 < s.n && s.p[i + 1] == '\n' ? 2 : 1;
        list_push(r, out.list, value_str(s.p, i + (value_true(keep) ? end : 0)));
        s = (struct str){s.p + i + end, s.n - i - end};
    }
    return out;
}

static struct value m_join(struct template_run *r, struct value self, const struct template_args *a)
{
    struct bytes b = {0};
    struct value v;
    if (!template_arg(a, 0, "iterable", &v))
        return run_fail(r, "join wants a list");
    const struct template_list *l = value_iterate(r, v);
    for (size_t i = 0; i < l->n && !r->status; i++) {
        if (l->items[i].kind != V_STR)
            run_fail(r, "join of a %s", value_type(l->items[i]));
        else if (i)
            bytes_append(&b, self.s.p, self.s.n);
        if (!r->status)
            bytes_append(&b, l->items[i].s.p, l->items[i].s.n);
        run_room(r, b.len);
    }
    return value_bytes(r, &b);
}

static struct value find_text(struct template_run *r, struct value self, const struct template_args *a, bool last)
{
    struct str what;
    if (!text_arg(r, a, 0, "sub", &what))
        return run_fail(r, "find wants a text");
    const char *hit = last ? find_last(self.s, what) : memmem(self.s.p, self.s.n, what.p, what.n);
    return value_int(hit ? (int64_t)str_chars((struct str){self.s.p, (size_t)(hit - self.s.p)}) : -1);
}

static struct value m_find(struct template_run *r, struct value self, const struct template_args *a)
{
    return find_text(r, self, a, false);
}

static struct value m_rfind(struct template_run *r, struct value self, const struct template_args *a)
{
    return find_text(r, self, a, true);
}

static struct value m_index(struct template_run *r, struct value self, const struct template_args *a)
{
    struct value v;
    if (self.kind == V_STR) {
        v = find_text(r, self, a, false);
        return v.kind == V_INT && v.i < 0 ? run_fail(r, "index: not there") : v;
    }
    for (size_t i = 0; template_arg(a, 0, "value", &v) && i < self.list->n; i++)
        if (value_equal(self.list->items[i], v, 0))
            return value_int((int64_t)i);
    return run_fail(r, "index: not there");
}

static struct value m_count(struct template_run *r, struct value self, const struct template_args *a)
{
    struct value v = value_none();
    int64_t n = 0;
    if (!template_arg(a, 0, "value", &v) || (self.kind == V_STR && v.kind != V_STR))
        return run_fail(r, "count of what?");
    if (self.kind == V_STR) {
        if (!v.s.n)
            return value_int((int64_t)str_chars(self.s) + 1);
        for (const char *at = self.s.p, *end = at + self.s.n; (at = memmem(at, (size_t)(end - at), v.s.p, v.s.n)); n++)
            at += v.s.n;
        return value_int(n);
    }
    for (size_t i = 0; i < self.list->n; i++)
        n += value_equal(self.list->items[i], v, 0);
    return value_int(n);
}

/* Whether the text is not empty and all its characters are in these categories. */
static struct value all_in(struct value self, bool (*in)(utf8proc_category_t, utf8proc_int32_t))
{
    for (size_t i = 0, n; i < self.s.n; i += n) {
        utf8proc_int32_t c;
        n = str_offset((struct str){self.s.p + i, self.s.n - i}, 1);
        utf8proc_iterate((const utf8proc_uint8_t *)self.s.p + i, (utf8proc_ssize_t)n, &c);
        if (!in(utf8proc_category(c), c))
            return value_bool(false);
    }
    return value_bool(self.s.n > 0);
}

static bool in_digits(utf8proc_category_t k, utf8proc_int32_t c)
{
    return k == UTF8PROC_CATEGORY_ND || c == 0xb2 || c == 0xb3 || c == 0xb9;
}

static bool in_letters(utf8proc_category_t k, utf8proc_int32_t c)
{
    (void)c;
    return k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LO;
}

static bool in_either(utf8proc_category_t k, utf8proc_int32_t c)
{
    return in_letters(k, c) || in_digits(k, c) || k == UTF8PROC_CATEGORY_NL || k == UTF8PROC_CATEGORY_NO;
}

static struct value m_isdigit(struct template_run *r, struct value self, const struct template_args *a)
{
    (void)r, (void)a;
    return all_in(self, in_digits);
}

static struct value m_isalpha(struct template_run *r, struct value self, const struct template_args *a)
{
    (void)r, (void)a;
    return all_in(self, in_letters);
}

static struct value m_isalnum(struct template_run *r, struct value self, const struct template_args *a)
{
    (void)r, (void)a;
    return all_in(self, in_either);
}

static struct value m_isspace(struct template_run *r, struct value self, const struct template_args *a)
{
    (void)r, (void)a;
    return value_bool(self.s.n && !str_strip(self.s, NULL, true, false).n);
}

/* ------------------------------------------------------------------- dicts */

static struct value m_items(struct template_run *r, struct value self, const struct template_args *a)
{
    struct value out = value_list(r, false);
    (void)a;
    for (size_t i = 0; i < self.dict->n && !r->status; i++) {
        struct value pair = value_list(r, true);
        list_push(r, pair.list, self.dict->items[i].key);
        list_push(r, pair.list, self.dict->items[i].value);
        list_push(r, out.list, pair);
    }
    return out;
}

static struct value m_keys(struct template_run *r, struct value self, const struct template_args *a)
{
    (void)a;
    return (struct value){.kind = V_LIST, .list = value_iterate(r, self)};
}

static struct value m_values(struct template_run *r, struct value self, const struct template_args *a)
{
    struct value out = value_list(r, false);
    (void)a;
    for (size_t i = 0; i < self.dict->n; i++)
        list_push(r, out.list, self.dict->items[i].value);
    return out;
}

static struct value m_get(struct template_run *r, struct value self, const struct template_args *a)
{
    struct value key, otherwise = value_none();
    if (!template_arg(a, 0, "key", &key))
        return run_fail(r, "get wants a key");
    template_arg(a, 1, "default", &otherwise);
    const struct value *there = dict_find(self.dict, key);
    return there ? *there : otherwise;
}

static struct value m_copy(struct template_run *r, struct value self, const struct template_args *a)
{
    (void)r, (void)a;
    return self; /* values never change, so a copy is the value itself */
}

static struct value m_forbidden(struct template_run *r, struct value self, const struct template_args *a)
{
    (void)a;
    return run_fail(r, "a template may not change a %s", value_type(self));
}

/* ------------------------------------------------------------------- loops */

static struct value m_cycle(struct template_run *r, struct value self, const struct template_args *a)
{
    return a->n ? a->values[self.loop->i % a->n] : run_fail(r, "cycle of nothing");
}

static struct value m_changed(struct template_run *r, struct value self, const struct template_args *a)
{
    struct loop *l = self.loop;
    struct value now = value_list(r, true);
    for (uint32_t i = 0; i < a->n; i++)
        list_push(r, now.list, a->values[i]);
    bool changed = !l->has_changed || !value_equal(l->changed, now, 0);
    l->changed = now;
    l->has_changed = true;
    return value_bool(changed);
}

/* --------------------------------------------------------------- by name */

enum { OF_STR = 1 << V_STR, OF_LIST = 1 << V_LIST, OF_DICT = 1 << V_DICT, OF_LOOP = 1 << V_LOOP };

static const struct {
    struct str name;
    int kinds;
    method_fn *call;
} TEMPLATE_METHODS[] = {
    {NAME("strip"), OF_STR, m_strip},
    {NAME("lstrip"), OF_STR, m_lstrip},
    {NAME("rstrip"), OF_STR, m_rstrip},
    {NAME("upper"), OF_STR, m_upper},
    {NAME("lower"), OF_STR, m_lower},
    {NAME("capitalize"), OF_STR, m_capitalize},
    {NAME("title"), OF_STR, m_title},
    {NAME("startswith"), OF_STR, m_startswith},
    {NAME("endswith"), OF_STR, m_endswith},
    {NAME("replace"), OF_STR, m_replace},
    {NAME("removeprefix"), OF_STR, m_removeprefix},
    {NAME("removesuffix"), OF_STR, m_removesuffix},
    {NAME("split"), OF_STR, m_split},
    {NAME("rsplit"), OF_STR, m_rsplit},
    {NAME("partition"), OF_STR, m_partition},
    {NAME("splitlines"), OF_STR, m_splitlines},
    {NAME("join"), OF_STR, m_join},
    {NAME("find"), OF_STR, m_find},
    {NAME("rfind"), OF_STR, m_rfind},
    {NAME("isdigit"), OF_STR, m_isdigit},
    {NAME("isalpha"), OF_STR, m_isalpha},
    {NAME("isalnum"), OF_STR, m_isalnum},
    {NAME("isspace"), OF_STR, m_isspace},
    {NAME("index"), OF_STR | OF_LIST, m_index},
    {NAME("count"), OF_STR | OF_LIST, m_count},
    {NAME("items"), OF_DICT, m_items},
    {NAME("keys"), OF_DICT, m_keys},
    {NAME("values"), OF_DICT, m_values},
    {NAME("get"), OF_DICT, m_get},
    {NAME("copy"), OF_DICT | OF_LIST, m_copy},
    {NAME("append"), OF_LIST, m_forbidden},
    {NAME("extend"), OF_LIST, m_forbidden},
    {NAME("insert"), OF_LIST, m_forbidden},
    {NAME("remove"), OF_LIST, m_forbidden},
    {NAME("reverse"), OF_LIST, m_forbidden},
    {NAME("sort"), OF_LIST, m_forbidden},
    {NAME("pop"), OF_LIST | OF_DICT, m_forbidden},
    {NAME("clear"), OF_LIST | OF_DICT, m_forbidden},
    {NAME("update"), OF_DICT, m_forbidden},
    {NAME("setdefault"), OF_DICT, m_forbidden},
    {NAME("popitem"), OF_DICT, m_forbidden},
    {NAME("cycle"), OF_LOOP, m_cycle},
    {NAME("changed"), OF_LOOP, m_changed},
};
enum { N_METHODS = sizeof(TEMPLATE_METHODS) / sizeof(TEMPLATE_METHODS[0]) };

int method_find(struct str name)
{
    for (int i = 0; i < N_METHODS; i++)
        if (str_is(TEMPLATE_METHODS[i].name, name))
            return i;
    return -1;
}

bool method_of(struct value self, int method)
{
    return TEMPLATE_METHODS[method].kinds >> self.kind & 1;
}

struct value method_call(struct template_run *r, const struct template_bound *b, const struct template_args *a)
{
    return TEMPLATE_METHODS[b->method].call(r, b->self, a);
}

/* --------------------------------------------------------------- functions */

static struct value f_range(struct template_run *r, const struct template_args *a)
{
    struct value out = value_list(r, false);
    int64_t first = int_arg(r, a, 0, "start", 0), stop = int_arg(r, a, 1, "stop", 0), by = int_arg(r, a, 2, "step", 1);
    if (a->n == 1) {
        stop = first;
        first = 0;
    }
    if (!a->n || !by)
        return run_fail(r, "range of nothing, or in steps of zero");
    bool over = false;
    for (int64_t i = first; !over && (by > 0 ? i < stop : i > stop) && !r->status;) {
        list_push(r, out.list, value_int(i));
        over = __builtin_add_overflow(i, by, &i);
        if (out.list->n > MAX_RANGE)
            return run_fail(r, "a range of more than %d", MAX_RANGE);
    }
    return out;
}

static struct value named_dict(struct template_run *r, const struct template_args *a)
{
    struct value d = value_dict(r), from;
    if (a->n) {
        from = a->values[0];
        if (from.kind != V_DICT)
            return run_fail(r, "dict or namespace of a %s", value_type(from));
        for (size_t i = 0; i < from.dict->n; i++)
            dict_set(r, d.dict, from.dict->items[i].key, from.dict->items[i].value);
    }
    for (uint32_t i = 0; i < a->n_named; i++)
        dict_set(r, d.dict, from_str(a->named[i].name), a->named[i].value);
    return d;
}

static struct value f_namespace(struct template_run *r, const struct template_args *a)
{
    struct value v = named_dict(r, a);
    if (v.kind == V_DICT)
        v.kind = V_NAMESPACE;
    return v;
}

static struct value f_raise(struct template_run *r, const struct template_args *a)
{
    struct value v = value_none();
    template_arg(a, 0, "message", &v);
    v = value_text(r, v);
    if (!r->status) /* its own message, without a line */
        r->status = td_fail(r->e, TD_ERR_INVALID, "%.*s", v.s.n < 200 ? (int)v.s.n : 200, v.s.p);
    return value_none();
}

static struct value f_strftime_now(struct template_run *r, const struct template_args *a)
{
    struct str format;
    struct tm t;
    char text[256], copy[128];
    if (!text_arg(r, a, 0, "format", &format) || format.n >= sizeof(copy))
        return run_fail(r, "strftime_now wants a format of less than %zu bytes", sizeof(copy));
    memcpy(copy, format.p, format.n);
    copy[format.n] = 0;
    localtime_r(&r->now, &t);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    size_t n = strftime(text, sizeof(text), copy, &t);
#pragma GCC diagnostic pop
    return value_copy(r, text, n);
}

static const struct {
    struct str name;
    struct value (*call)(struct template_run *r, const struct template_args *a);
} FUNCTIONS[] = {
    {NAME("range"), f_range},
    {NAME("dict"), named_dict},
    {NAME("namespace"), f_namespace},
    {NAME("raise_exception"), f_raise},
    {NAME("strftime_now"), f_strftime_now},
};
enum { N_FUNCTIONS = sizeof(FUNCTIONS) / sizeof(FUNCTIONS[0]) };

int function_find(struct str name)
{
    for (int i = 0; i < N_FUNCTIONS; i++)
        if (str_is(FUNCTIONS[i].name, name))
            return i;
    return -1;
}

struct value function_call(struct template_run *r, int function, const struct template_args *a)
{
    return FUNCTIONS[function].call(r, a);
}
