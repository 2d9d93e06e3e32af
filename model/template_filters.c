/* Filters and tests of templates, as Jinja has them. */
#include <math.h>
#include <stdlib.h>
#include <utf8proc.h>

#include "model/template_internal.h"

typedef struct value filter_fn(struct template_run *r, struct value v, const struct template_args *a);

static struct value undefined(const char *name)
{
    return (struct value){.kind = V_UNDEFINED, .s = {name, strlen(name)}};
}

static bool bool_arg(const struct template_args *a, uint32_t i, const char *name, bool otherwise)
{
    struct value v;
    return template_arg(a, i, name, &v) ? value_true(v) : otherwise;
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

static struct str text_of(struct template_run *r, struct value v)
{
    v = value_text(r, v);
    return r->status ? STR("") : v.s;
}

/* The value at path "a.b.0" in v, as attribute= means it. */
static struct value path_of(struct template_run *r, struct value v, struct value path)
{
    if (path.kind != V_STR)
        return run_item(r, v, path);
    for (struct str rest = path.s; !r->status;) {
        const char *dot = memchr(rest.p, '.', rest.n);
        struct str part = {rest.p, dot ? (size_t)(dot - rest.p) : rest.n};
        bool number = part.n > 0 && part.n < 10;
        int64_t index = 0;
        for (size_t i = 0; i < part.n; i++) {
            number &= part.p[i] >= '0' && part.p[i] <= '9';
            index = number ? index * 10 + (part.p[i] - '0') : 0;
        }
        v = run_item(r, v, number ? value_int(index) : value_str(part.p, part.n));
        if (!dot)
            return v;
        rest = (struct str){dot + 1, rest.n - part.n - 1};
    }
    return value_none();
}

/* The arguments from number i on. */
static struct template_args rest_of(const struct template_args *a, uint32_t i)
{
    struct template_args rest = *a;
    rest.n = a->n > i ? a->n - i : 0;
    for (uint32_t j = 0; j < rest.n; j++)
        rest.values[j] = a->values[i + j];
    return rest;
}

/* ------------------------------------------------------------------- texts */

static struct value f_upper(struct template_run *r, struct value v, const struct template_args *a)
{
    (void)a;
    return str_case(r, text_of(r, v), true);
}

static struct value f_lower(struct template_run *r, struct value v, const struct template_args *a)
{
    (void)a;
    return str_case(r, text_of(r, v), false);
}

static void append_cased(struct template_run *r, struct str s, bool upper, struct bytes *out)
{
    struct value v = str_case(r, s, upper);
    bytes_append(out, v.s.p, v.s.n);
}

static struct value f_capitalize(struct template_run *r, struct value v, const struct template_args *a)
{
    struct str s = text_of(r, v);
    struct bytes b = {0};
    size_t n = str_offset(s, 1);
    (void)a;
    append_cased(r, (struct str){s.p, n}, true, &b);
    append_cased(r, (struct str){s.p + n, s.n - n}, false, &b);
    return value_bytes(r, &b);
}

static struct value f_title(struct template_run *r, struct value v, const struct template_args *a)
{
    struct str s = text_of(r, v);
    struct bytes b = {0};
    bool begins = true;
    (void)a;
    for (size_t i = 0, n; i < s.n && !r->status; i += n) {
        n = str_offset((struct str){s.p + i, s.n - i}, 1);
        append_cased(r, (struct str){s.p + i, n}, begins, &b);
        begins = strchr("-({[<", s.p[i]) || !str_strip((struct str){s.p + i, n}, NULL, true, false).n;
    }
    return value_bytes(r, &b);
}

static struct value f_trim(struct template_run *r, struct value v, const struct template_args *a)
{
    struct value chars;
    struct str s = text_of(r, v);
    bool given = template_arg(a, 0, "chars", &chars) && chars.kind == V_STR;
    s = str_strip(s, given ? &chars.s : NULL, true, true);
    return value_str(s.p, s.n);
}

static struct value f_replace(struct template_run *r, struct value v, const struct template_args *a)
{
    struct value old, with;
    if (!template_arg(a, 0, "old", &old) || !template_arg(a, 1, "new", &with))
        return run_fail(r, "replace wants two texts");
    return str_replace(r, text_of(r, v), text_of(r, old), text_of(r, with), int_arg(r, a, 2, "count", -1));
}

static struct value f_string(struct template_run *r, struct value v, const struct template_args *a)
{
    (void)a;
    return value_text(r, v);
}

static struct value f_escape(struct template_run *r, struct value v, const struct template_args *a)
{
    static const char FROM[] = "&<>'\"";
    static const char *const TO[] = {"&amp;", "&lt;", "&gt;", "&#39;", "&#34;"};
    struct str s = text_of(r, v);
    struct bytes b = {0};
    (void)a;
    for (size_t i = 0; i < s.n; i++) {
        const char *hit = s.p[i] ? strchr(FROM, s.p[i]) : NULL;
        bytes_append(&b, hit ? TO[hit - FROM] : &s.p[i], hit ? strlen(TO[hit - FROM]) : 1);
    }
    return value_bytes(r, &b);
}

static struct value f_indent(struct template_run *r, struct value v, const struct template_args *a)
{
    struct value width;
    struct bytes b = {0}, pad = {0};
    struct str s = text_of(r, v);
    bool first = bool_arg(a, 1, "first", false), blank = bool_arg(a, 2, "blank", false);
    if (v.kind != V_STR)
        return run_fail(r, "indent of a %s", value_type(v));
    if (template_arg(a, 0, "width", &width) && width.kind == V_STR)
        bytes_append(&pad, width.s.p, width.s.n);
    else
        for (int64_t i = int_arg(r, a, 0, "width", 4); i > 0 && i < 1000; i--)
            bytes_append(&pad, " ", 1);
    if (first)
        bytes_append(&b, pad.data, pad.len);
    for (size_t i = 0; i < s.n && !r->status; i++) {
        bytes_append(&b, &s.p[i], 1);
        bool more = s.p[i] == '\n' && (blank || (i + 1 < s.n && s.p[i + 1] != '\n'));
        if (more)
            bytes_append(&b, pad.data, pad.len);
        run_room(r, b.len);
    }
    bytes_free(&pad);
    return value_bytes(r, &b);
}

static struct value f_tojson(struct template_run *r, struct value v, const struct template_args *a)
{
    struct value indent = value_none(), separators = value_none();
    struct bytes b = {0}, pad = {0};
    struct json_style s = {.ascii = bool_arg(a, 0, "ensure_ascii", false),
                           .sorted = bool_arg(a, 3, "sort_keys", false)};
    template_arg(a, 1, "indent", &indent);
    template_arg(a, 2, "separators", &separators);
    if (indent.kind == V_STR)
        bytes_append(&pad, indent.s.p, indent.s.n);
    for (int64_t i = indent.kind == V_INT ? indent.i : 0; i > 0 && i < 1000; i--)
        bytes_append(&pad, " ", 1);
    if (indent.kind != V_NONE)
        s.indent = (struct str){pad.data ? pad.data : "", pad.len};
    s.item = s.indent.p ? STR(",") : STR(", ");
    s.key = STR(": ");
    if (separators.kind == V_LIST && separators.list->n == 2 && separators.list->items[0].kind == V_STR &&
        separators.list->items[1].kind == V_STR) {
        s.item = separators.list->items[0].s;
        s.key = separators.list->items[1].s;
    }
    value_tojson(r, v, &s, 0, &b);
    bytes_free(&pad);
    return value_bytes(r, &b);
}

/* ----------------------------------------------------------------- numbers */

static struct value f_int(struct template_run *r, struct value v, const struct template_args *a)
{
    struct value otherwise = value_int(0);
    char text[64], *end;
    template_arg(a, 0, "default", &otherwise);
    if (v.kind == V_BOOL || v.kind == V_INT)
        return value_int(v.kind == V_BOOL ? v.b : v.i);
    if (v.kind == V_FLOAT && fabs(v.f) < 9e18)
        return value_int((int64_t)v.f);
    struct str s = v.kind == V_STR ? str_strip(v.s, NULL, true, true) : STR("");
    if (!s.n || s.n >= sizeof(text))
        return otherwise;
    snprintf(text, sizeof(text), "%.*s", (int)s.n, s.p);
    int64_t base = int_arg(r, a, 1, "base", 10);
    long long i = strtoll(text, &end, base >= 2 && base <= 36 ? (int)base : 10);
    if (!*end)
        return value_int(i);
    double f = strtod(text, &end);
    return *end || !(fabs(f) < 9e18) ? otherwise : value_int((int64_t)f);
}

static struct value f_float(struct template_run *r, struct value v, const struct template_args *a)
{
    struct value otherwise = value_float(0);
    double f;
    char text[64], *end;
    (void)r;
    template_arg(a, 0, "default", &otherwise);
    if (value_number(v, &f))
        return value_float(f);
    struct str s = v.kind == V_STR ? str_strip(v.s, NULL, true, true) : STR("");
    if (!s.n || s.n >= sizeof(text))
        return otherwise;
    snprintf(text, sizeof(text), "%.*s", (int)s.n, s.p);
    f = strtod(text, &end);
    return *end ? otherwise : value_float(f);
}

static struct value f_abs(struct template_run *r, struct value v, const struct template_args *a)
{
    (void)a;
    if (v.kind == V_INT && v.i != INT64_MIN)
        return value_int(v.i < 0 ? -v.i : v.i);
    return v.kind == V_FLOAT ? value_float(fabs(v.f)) : run_fail(r, "abs of a %s", value_type(v));
}

static struct value f_round(struct template_run *r, struct value v, const struct template_args *a)
{
    struct value method = value_str("common", 6);
    int64_t precision = int_arg(r, a, 0, "precision", 0);
    double f, scale = pow(10, (double)precision);
    template_arg(a, 1, "method", &method);
    if (!value_number(v, &f) || method.kind != V_STR)
        return run_fail(r, "round of a %s", value_type(v));
    if (str_is(method.s, STR("ceil")))
        return value_float(ceil(f * scale) / scale);
    if (str_is(method.s, STR("floor")))
        return value_float(floor(f * scale) / scale);
    if (v.kind != V_FLOAT && precision >= 0)
        return value_int(v.kind == V_BOOL ? v.b : v.i);
    /* Python rounds the decimal digits, ties to even. */
    char text[400];
    if (precision < 0 || precision > 20)
        return value_float(nearbyint(f * scale) / scale);
    snprintf(text, sizeof(text), "%.*f", (int)precision, f);
    return value_float(strtod(text, NULL));
}

/* ------------------------------------------------------------------- lists */

static struct value f_length(struct template_run *r, struct value v, const struct template_args *a)
{
    (void)a;
    if (v.kind == V_STR)
        return value_int((int64_t)str_chars(v.s));
    if (v.kind == V_DICT)
        return value_int((int64_t)v.dict->n);
    if (v.kind == V_UNDEFINED)
        return value_int(0);
    return v.kind == V_LIST ? value_int((int64_t)v.list->n) : run_fail(r, "length of a %s", value_type(v));
}

static struct value f_first(struct template_run *r, struct value v, const struct template_args *a)
{
    const struct template_list *l = value_iterate(r, v);
    (void)a;
    return l->n ? l->items[0] : undefined("the first of nothing");
}

static struct value f_last(struct template_run *r, struct value v, const struct template_args *a)
{
    const struct template_list *l = value_iterate(r, v);
    (void)a;
    return l->n ? l->items[l->n - 1] : undefined("the last of nothing");
}

static struct value f_list(struct template_run *r, struct value v, const struct template_args *a)
{
    const struct template_list *l = value_iterate(r, v);
    struct value out = value_list(r, false);
    (void)a;
    for (size_t i = 0; i < l->n; i++)
        list_push(r, out.list, l->items[i]);
    return out;
}

static struct value f_reverse(struct template_run *r, struct value v, const struct template_args *a)
{
    const struct template_list *l = value_iterate(r, v);
    struct value out = value_list(r, false);
    struct bytes b = {0};
    (void)a;
    for (size_t i = l->n; i-- > 0;) {
        list_push(r, out.list, l->items[i]);
        if (v.kind == V_STR)
            bytes_append(&b, l->items[i].s.p, l->items[i].s.n);
    }
    return v.kind == V_STR ? value_bytes(r, &b) : out;
}

static struct value f_join(struct template_run *r, struct value v, const struct template_args *a)
{
    const struct template_list *l = value_iterate(r, v);
    struct value by = value_str("", 0), path;
    struct bytes b = {0};
    template_arg(a, 0, "d", &by);
    struct str between = text_of(r, by);
    bool has_path = template_arg(a, 1, "attribute", &path);
    for (size_t i = 0; i < l->n && !r->status; i++) {
        if (i)
            bytes_append(&b, between.p, between.n);
        value_write(r, has_path ? path_of(r, l->items[i], path) : l->items[i], &b);
        run_room(r, b.len);
    }
    return value_bytes(r, &b);
}

static struct value f_items(struct template_run *r, struct value v, const struct template_args *a)
{
    if (v.kind == V_UNDEFINED)
        return value_list(r, false);
    struct template_bound b = {v, method_find(STR("items"))};
    return v.kind == V_DICT ? method_call(r, &b, a) : run_fail(r, "items of a %s", value_type(v));
}

/* The value to compare: the attribute's value, in lower case unless case matters. */
static struct value sort_key(struct template_run *r, struct value v, const struct value *path, bool case_matters)
{
    v = path ? path_of(r, v, *path) : v;
    return v.kind == V_STR && !case_matters ? str_case(r, v.s, false) : v;
}

/* A merge sort: stable, and it may fail in the middle. */
static void merge_sort(struct template_run *r, struct pair *p, struct pair *scratch, size_t n, bool down)
{
    if (n < 2 || r->status)
        return;
    size_t half = n / 2, i = 0, j = half, k = 0;
    merge_sort(r, p, scratch, half, down);
    merge_sort(r, p + half, scratch, n - half, down);
    memcpy(scratch, p, n * sizeof(*p));
    while (i < half && j < n) {
        int order = value_compare(r, scratch[i].key, scratch[j].key);
        p[k++] = (down ? order >= 0 : order <= 0) ? scratch[i++] : scratch[j++];
    }
    while (i < half)
        p[k++] = scratch[i++];
    while (j < n)
        p[k++] = scratch[j++];
}

static struct value sorted_by(struct template_run *r, const struct template_list *l, const struct value *path,
                              bool case_matters, bool down)
{
    struct value out = value_list(r, false);
    if (!run_room(r, 2 * l->n * sizeof(struct pair)))
        return out;
    struct pair *pairs = mem_array(2 * l->n, sizeof(*pairs));
    for (size_t i = 0; i < l->n; i++)
        pairs[i] = (struct pair){sort_key(r, l->items[i], path, case_matters), l->items[i]};
    merge_sort(r, pairs, pairs + l->n, l->n, down);
    for (size_t i = 0; i < l->n; i++)
        list_push(r, out.list, pairs[i].value);
    free(pairs);
    return out;
}

static struct value f_sort(struct template_run *r, struct value v, const struct template_args *a)
{
    struct value path;
    bool has = template_arg(a, 2, "attribute", &path) && path.kind != V_NONE;
    return sorted_by(r, value_iterate(r, v), has ? &path : NULL, bool_arg(a, 1, "case_sensitive", false),
                     bool_arg(a, 0, "reverse", false));
}

static struct value f_dictsort(struct template_run *r, struct value v, const struct template_args *a)
{
    struct value by = value_str("key", 3), index;
    if (v.kind != V_DICT)
        return run_fail(r, "dictsort of a %s", value_type(v));
    template_arg(a, 1, "by", &by);
    index = value_int(by.kind == V_STR && str_is(by.s, STR("value")));
    const struct template_args none = {.n = 0};
    return sorted_by(r, f_items(r, v, &none).list, &index, bool_arg(a, 0, "case_sensitive", false),
                     bool_arg(a, 2, "reverse", false));
}

static struct value f_unique(struct template_run *r, struct value v, const struct template_args *a)
{
    struct value path, out = value_list(r, false), seen = value_list(r, false);
    const struct template_list *l = value_iterate(r, v);
    bool case_matters = bool_arg(a, 0, "case_sensitive", false), has = template_arg(a, 1, "attribute", &path);
    for (size_t i = 0; i < l->n && !r->status; i++) {
        struct value key = sort_key(r, l->items[i], has ? &path : NULL, case_matters);
        bool known = false;
        for (size_t j = 0; j < seen.list->n && !known; j++)
            known = value_equal(seen.list->items[j], key, 0);
        r->steps += seen.list->n;
        if (known)
            continue;
        list_push(r, seen.list, key);
        list_push(r, out.list, l->items[i]);
    }
    return out;
}

static struct value extreme(struct template_run *r, struct value v, const struct template_args *a, int sign)
{
    struct value path, best = undefined("the extreme of nothing"), best_key = best;
    const struct template_list *l = value_iterate(r, v);
    bool case_matters = bool_arg(a, 0, "case_sensitive", false), has = template_arg(a, 1, "attribute", &path);
    for (size_t i = 0; i < l->n && !r->status; i++) {
        struct value key = sort_key(r, l->items[i], has ? &path : NULL, case_matters);
        if (i && value_compare(r, key, best_key) * sign <= 0)
            continue;
        best = l->items[i];
        best_key = key;
    }
    return best;
}

static struct value f_min(struct template_run *r, struct value v, const struct template_args *a)
{
    return extreme(r, v, a, -1);
}

static struct value f_max(struct template_run *r, struct value v, const struct template_args *a)
{
    return extreme(r, v, a, 1);
}

static struct value f_sum(struct template_run *r, struct value v, const struct template_args *a)
{
    struct value path, total = value_int(0);
    const struct template_list *l = value_iterate(r, v);
    bool has = template_arg(a, 0, "attribute", &path) && path.kind != V_NONE;
    double f, sum = 0;
    int64_t whole = 0;
    bool ints = true;
    template_arg(a, 1, "start", &total);
    if (total.kind == V_INT)
        whole = total.i;
    for (size_t i = 0; i < l->n && !r->status; i++) {
        struct value x = has ? path_of(r, l->items[i], path) : l->items[i];
        if (!value_number(x, &f))
            return run_fail(r, "sum of a %s", value_type(x));
        ints &= x.kind != V_FLOAT;
        sum += f;
        if (__builtin_add_overflow(whole, x.kind == V_INT ? x.i : (int64_t)(ints ? f : 0), &whole))
            return run_fail(r, "a number grows too large");
    }
    return ints ? value_int(whole) : value_float(sum);
}

static struct value f_map(struct template_run *r, struct value v, const struct template_args *a)
{
    struct value path, otherwise, out = value_list(r, false), name;
    const struct template_list *l = value_true(v) ? value_iterate(r, v) : out.list; /* of none, nothing */
    bool by_path = !a->n && template_arg(a, UINT32_MAX, "attribute", &path),
         has_default = template_arg(a, UINT32_MAX, "default", &otherwise);
    int filter = -1;
    if (!by_path && (!template_arg(a, 0, "filter", &name) || name.kind != V_STR || (filter = filter_find(name.s)) < 0))
        return run_fail(r, "map wants attribute=, or the name of a filter");
    struct template_args rest = rest_of(a, 1);
    for (size_t i = 0; i < l->n && !r->status; i++) {
        struct value x = by_path ? path_of(r, l->items[i], path) : filter_apply(r, filter, l->items[i], &rest);
        list_push(r, out.list, by_path && has_default && x.kind == V_UNDEFINED ? otherwise : x);
    }
    return out;
}

/* The elements for which the test named by argument i (without one: being true) gives want. */
static struct value chosen(struct template_run *r, struct value v, const struct template_args *a, bool by_path,
                           bool want)
{
    struct value path = value_none(), name, out = value_list(r, false);
    const struct template_list *l = value_true(v) ? value_iterate(r, v) : out.list;
    uint32_t first = by_path ? 1 : 0;
    bool has_test = a->n > first;
    int test = -1;
    if (by_path && !template_arg(a, 0, "attribute", &path))
        return run_fail(r, "selectattr or rejectattr without an attribute");
    name = has_test ? a->values[first] : value_none();
    if (has_test && (name.kind != V_STR || (test = test_find(name.s)) < 0))
        return run_fail(r, "test '%.*s' is not supported", name.kind == V_STR ? (int)name.s.n : 0, name.s.p);
    struct template_args rest = rest_of(a, first + 1);
    for (size_t i = 0; i < l->n && !r->status; i++) {
        struct value x = by_path ? path_of(r, l->items[i], path) : l->items[i];
        if ((has_test ? test_apply(r, test, x, &rest) : value_true(x)) == want)
            list_push(r, out.list, l->items[i]);
    }
    return out;
}

static struct value f_select(struct template_run *r, struct value v, const struct template_args *a)
{
    return chosen(r, v, a, false, true);
}

static struct value f_reject(struct template_run *r, struct value v, const struct template_args *a)
{
    return chosen(r, v, a, false, false);
}

static struct value f_selectattr(struct template_run *r, struct value v, const struct template_args *a)
{
    return chosen(r, v, a, true, true);
}

static struct value f_rejectattr(struct template_run *r, struct value v, const struct template_args *a)
{
    return chosen(r, v, a, true, false);
}

static struct value f_default(struct template_run *r, struct value v, const struct template_args *a)
{
    struct value otherwise = value_str("", 0);
    (void)r;
    template_arg(a, 0, "default_value", &otherwise);
    bool lacks = v.kind == V_UNDEFINED || (bool_arg(a, 1, "boolean", false) && !value_true(v));
    return lacks ? otherwise : v;
}

static struct value f_attr(struct template_run *r, struct value v, const struct template_args *a)
{
    struct value name;
    if (!template_arg(a, 0, "name", &name) || name.kind != V_STR)
        return run_fail(r, "attr wants a name");
    return v.kind == V_DICT ? undefined("an attribute of a dict") : run_attribute(r, v, name.s);
}

static struct value f_wordcount(struct template_run *r, struct value v, const struct template_args *a)
{
    struct template_bound b = {value_text(r, v), method_find(STR("split"))};
    const struct template_args none = {.n = 0};
    (void)a;
    return r->status ? v : value_int((int64_t)method_call(r, &b, &none).list->n);
}

static const struct {
    struct str name;
    filter_fn *apply;
} FILTERS[] = {
    {NAME("abs"), f_abs},           {NAME("attr"), f_attr},       {NAME("capitalize"), f_capitalize},
    {NAME("count"), f_length},      {NAME("d"), f_default},       {NAME("default"), f_default},
    {NAME("dictsort"), f_dictsort}, {NAME("e"), f_escape},        {NAME("escape"), f_escape},
    {NAME("first"), f_first},       {NAME("float"), f_float},     {NAME("indent"), f_indent},
    {NAME("int"), f_int},           {NAME("items"), f_items},     {NAME("join"), f_join},
    {NAME("last"), f_last},         {NAME("length"), f_length},   {NAME("list"), f_list},
    {NAME("lower"), f_lower},       {NAME("map"), f_map},         {NAME("max"), f_max},
    {NAME("min"), f_min},           {NAME("reject"), f_reject},   {NAME("rejectattr"), f_rejectattr},
    {NAME("replace"), f_replace},   {NAME("reverse"), f_reverse}, {NAME("round"), f_round},
    {NAME("safe"), f_string},       {NAME("select"), f_select},   {NAME("selectattr"), f_selectattr},
    {NAME("sort"), f_sort},         {NAME("string"), f_string},   {NAME("sum"), f_sum},
    {NAME("title"), f_title},       {NAME("tojson"), f_tojson},   {NAME("trim"), f_trim},
    {NAME("unique"), f_unique},     {NAME("upper"), f_upper},     {NAME("wordcount"), f_wordcount},
};
enum { N_FILTERS = sizeof(FILTERS) / sizeof(FILTERS[0]) };

int filter_find(struct str name)
{
    for (int i = 0; i < N_FILTERS; i++)
        if (str_is(FILTERS[i].name, name))
            return i;
    return -1;
}

struct value filter_apply(struct template_run *r, int filter, struct value v, const struct template_args *a)
{
    return FILTERS[filter].apply(r, v, a);
}

/* ------------------------------------------------------------------- tests */

enum test {
    IS_DEFINED,
    IS_UNDEFINED,
    IS_NONE,
    IS_STRING,
    IS_NUMBER,
    IS_INTEGER,
    IS_FLOAT,
    IS_BOOLEAN,
    IS_TRUE,
    IS_FALSE,
    IS_MAPPING,
    IS_SEQUENCE,
    IS_ITERABLE,
    IS_CALLABLE,
    IS_EVEN,
    IS_ODD,
    IS_LOWER,
    IS_UPPER,
    IS_DIVISIBLE, /* this test and the following ones take an argument */
    IS_IN,
    IS_SAME,
    IS_EQ,
    IS_NE,
    IS_LT,
    IS_LE,
    IS_GT,
    IS_GE,
};

static const struct {
    struct str name;
    enum test test;
} TESTS[] = {
    {NAME("defined"), IS_DEFINED},
    {NAME("undefined"), IS_UNDEFINED},
    {NAME("none"), IS_NONE},
    {NAME("string"), IS_STRING},
    {NAME("number"), IS_NUMBER},
    {NAME("integer"), IS_INTEGER},
    {NAME("float"), IS_FLOAT},
    {NAME("boolean"), IS_BOOLEAN},
    {NAME("true"), IS_TRUE},
    {NAME("false"), IS_FALSE},
    {NAME("mapping"), IS_MAPPING},
    {NAME("sequence"), IS_SEQUENCE},
    {NAME("iterable"), IS_ITERABLE},
    {NAME("callable"), IS_CALLABLE},
    {NAME("even"), IS_EVEN},
    {NAME("odd"), IS_ODD},
    {NAME("lower"), IS_LOWER},
    {NAME("upper"), IS_UPPER},
    {NAME("divisibleby"), IS_DIVISIBLE},
    {NAME("in"), IS_IN},
    {NAME("sameas"), IS_SAME},
    {NAME("eq"), IS_EQ},
    {NAME("equalto"), IS_EQ},
    {NAME("=="), IS_EQ},
    {NAME("ne"), IS_NE},
    {NAME("!="), IS_NE},
    {NAME("lt"), IS_LT},
    {NAME("lessthan"), IS_LT},
    {NAME("<"), IS_LT},
    {NAME("le"), IS_LE},
    {NAME("<="), IS_LE},
    {NAME("gt"), IS_GT},
    {NAME("greaterthan"), IS_GT},
    {NAME(">"), IS_GT},
    {NAME("ge"), IS_GE},
    {NAME(">="), IS_GE},
};
enum { N_TESTS = sizeof(TESTS) / sizeof(TESTS[0]) };

int test_find(struct str name)
{
    for (int i = 0; i < N_TESTS; i++)
        if (str_is(TESTS[i].name, name))
            return i;
    return -1;
}

static bool same_case(struct template_run *r, struct value v, bool upper)
{
    struct str s = text_of(r, v);
    struct value other = str_case(r, s, upper), turned = str_case(r, s, !upper);
    return str_is(other.s, s) && !str_is(turned.s, s); /* it has a letter, and all letters are in that case */
}

static bool same(struct value a, struct value b)
{
    if (a.kind != b.kind)
        return false;
    if (a.kind == V_LIST)
        return a.list == b.list;
    return a.kind == V_DICT ? a.dict == b.dict : value_equal(a, b, 0);
}

static bool relation(struct template_run *r, enum test t, struct value v, struct value x)
{
    struct template_bound b;
    v = t == IS_DIVISIBLE && v.kind == V_BOOL ? value_int(v.b) : v;
    switch (t) {
    case IS_DIVISIBLE:
        if (v.kind != V_INT || x.kind != V_INT || !x.i)
            run_fail(r, "divisibleby of a %s and a %s", value_type(v), value_type(x));
        return v.kind == V_INT && x.kind == V_INT && x.i && (x.i == -1 || v.i % x.i == 0);
    case IS_IN:
        if (x.kind == V_STR)
            return v.kind == V_STR && memmem(x.s.p, x.s.n, v.s.p, v.s.n);
        b.self = (struct value){.kind = V_LIST, .list = value_iterate(r, x)};
        for (size_t i = 0; i < b.self.list->n; i++)
            if (value_equal(b.self.list->items[i], v, 0))
                return true;
        return false;
    case IS_SAME:
        return same(v, x);
    case IS_EQ:
        return value_equal(v, x, 0);
    case IS_NE:
        return !value_equal(v, x, 0);
    case IS_LT:
        return value_compare(r, v, x) < 0;
    case IS_LE:
        return value_compare(r, v, x) <= 0;
    case IS_GT:
        return value_compare(r, v, x) > 0;
    default:
        return value_compare(r, v, x) >= 0;
    }
}

static bool parity(struct template_run *r, struct value v, int rest)
{
    double f;
    if (!value_number(v, &f))
        run_fail(r, "even or odd of a %s", value_type(v));
    return v.kind == V_INT ? (v.i % 2 != 0) == rest : f - floor(f / 2) * 2 == rest;
}

bool test_apply(struct template_run *r, int test, struct value v, const struct template_args *a)
{
    enum kind k = v.kind;
    struct value x = value_none();
    switch (TESTS[test].test) {
    case IS_DEFINED:
        return k != V_UNDEFINED;
    case IS_UNDEFINED:
        return k == V_UNDEFINED;
    case IS_NONE:
        return k == V_NONE;
    case IS_STRING:
        return k == V_STR;
    case IS_NUMBER:
        return k == V_INT || k == V_FLOAT || k == V_BOOL;
    case IS_INTEGER:
        return k == V_INT;
    case IS_FLOAT:
        return k == V_FLOAT;
    case IS_BOOLEAN:
        return k == V_BOOL;
    case IS_TRUE:
        return k == V_BOOL && v.b;
    case IS_FALSE:
        return k == V_BOOL && !v.b;
    case IS_MAPPING:
        return k == V_DICT;
    case IS_SEQUENCE:
    case IS_ITERABLE: /* Jinja's undefined counts as an empty iterable and sequence */
        return k == V_STR || k == V_LIST || k == V_DICT || k == V_UNDEFINED;
    case IS_CALLABLE:
        return k == V_MACRO || k == V_FUNCTION || k == V_METHOD;
    case IS_EVEN:
        return parity(r, v, 0);
    case IS_ODD:
        return parity(r, v, 1);
    case IS_LOWER:
        return same_case(r, v, false);
    case IS_UPPER:
        return same_case(r, v, true);
    default:
        if (!a->n) {
            run_fail(r, "test '%.*s' wants an argument", (int)TESTS[test].name.n, TESTS[test].name.p);
            return false;
        }
        x = a->values[0];
        return relation(r, TESTS[test].test, v, x);
    }
}
