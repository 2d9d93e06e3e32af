/*
 * Runs the tree of a template. Scopes are a chain: the body of a loop, a macro and a with block have their
 * own, an if has none. A name is looked up outwards, and set in the scope of the statement.
 */
#include <math.h>
#include <stdlib.h>

#include "model/template_internal.h"

static struct value eval(struct template_run *r, struct scope *scope, const struct template_node *n);
static void execute(struct template_run *r, struct scope *scope, const struct template_node *n);

/* ------------------------------------------------------------------ limits */

static bool step(struct template_run *r, const struct template_node *n)
{
    r->at = n;
    if (++r->steps > TEMPLATE_MAX_STEPS && !r->status)
        r->status = td_fail(r->e, TD_ERR_NO_SPACE, "line %u: the template takes too many steps", n->line);
    if (r->out->len > TEMPLATE_MAX_OUTPUT && !r->status)
        r->status = td_fail(r->e, TD_ERR_NO_SPACE, "line %u: the template writes too much", n->line);
    return !r->status && run_room(r, 0);
}

static bool enter(struct template_run *r)
{
    if (++r->depth > TEMPLATE_MAX_DEPTH && !r->status)
        r->status = td_fail(r->e, TD_ERR_NO_SPACE, "line %u: the template is nested too deeply", r->at->line);
    return !r->status;
}

/* ------------------------------------------------------------------ scopes */

static struct scope *scope_new(struct template_run *r, struct scope *parent)
{
    struct scope *s = arena_take(&r->arena, sizeof(*s));
    s->parent = parent;
    return s;
}

static struct value *scope_find(struct scope *s, struct str name)
{
    for (; s; s = s->parent)
        for (size_t i = 0; i < s->n; i++)
            if (str_is(s->variables[i].name, name))
                return &s->variables[i].value;
    return NULL;
}

static void scope_set(struct template_run *r, struct scope *s, struct str name, struct value v)
{
    for (size_t i = 0; i < s->n; i++)
        if (str_is(s->variables[i].name, name)) {
            s->variables[i].value = v;
            return;
        }
    if (s->n == s->cap) {
        size_t cap = s->cap ? s->cap * 2 : 4;
        struct variable *more = arena_take(&r->arena, cap * sizeof(*more));
        if (s->n)
            memcpy(more, s->variables, s->n * sizeof(*more));
        s->variables = more;
        s->cap = cap;
    }
    s->variables[s->n++] = (struct variable){name, v};
}

static struct value lookup(struct scope *s, struct str name)
{
    const struct value *v = scope_find(s, name);
    int function = v ? -1 : function_find(name);
    if (v)
        return *v;
    if (function >= 0)
        return (struct value){.kind = V_FUNCTION, .i = function};
    return (struct value){.kind = V_UNDEFINED, .s = name};
}

/* -------------------------------------------------------------- attributes */

static struct value undefined(struct str name)
{
    return (struct value){.kind = V_UNDEFINED, .s = name};
}

static struct value loop_attribute(struct template_run *r, const struct loop *l, struct str name)
{
    const struct {
        struct str name;
        int64_t value;
    } NUMBERS[] = {{STR("index"), (int64_t)l->i + 1},
                   {STR("index0"), (int64_t)l->i},
                   {STR("revindex"), (int64_t)(l->items->n - l->i)},
                   {STR("revindex0"), (int64_t)(l->items->n - l->i) - 1},
                   {STR("length"), (int64_t)l->items->n},
                   {STR("depth"), l->depth0 + 1},
                   {STR("depth0"), l->depth0}};
    (void)r;
    for (size_t i = 0; i < sizeof(NUMBERS) / sizeof(NUMBERS[0]); i++)
        if (str_is(name, NUMBERS[i].name))
            return value_int(NUMBERS[i].value);
    if (str_is(name, STR("first")))
        return value_bool(l->i == 0);
    if (str_is(name, STR("last")))
        return value_bool(l->i + 1 == l->items->n);
    if (str_is(name, STR("previtem")))
        return l->i ? l->items->items[l->i - 1] : undefined(name);
    if (str_is(name, STR("nextitem")))
        return l->i + 1 < l->items->n ? l->items->items[l->i + 1] : undefined(name);
    return undefined(name);
}

/* x.name: attributes of the value's type come before members of that name. */
struct value run_attribute(struct template_run *r, struct value v, struct str name)
{
    int method = method_find(name);
    if (v.kind == V_UNDEFINED)
        return run_undefined(r, v);
    if (name.n && name.p[0] == '_')
        return undefined(name);
    if (method >= 0 && method_of(v, method)) {
        struct template_bound *b = arena_take(&r->arena, sizeof(*b));
        *b = (struct template_bound){v, method};
        return (struct value){.kind = V_METHOD, .bound = b};
    }
    if (v.kind == V_LOOP)
        return loop_attribute(r, v.loop, name);
    if (v.kind != V_DICT && v.kind != V_NAMESPACE)
        return undefined(name);
    const struct value *there = dict_find(v.dict, value_str(name.p, name.n));
    return there ? *there : undefined(name);
}

struct value run_item(struct template_run *r, struct value v, struct value key)
{
    struct str name = key.kind == V_STR ? key.s : STR("an element");
    if (v.kind == V_UNDEFINED)
        return run_undefined(r, v);
    if (v.kind == V_DICT) {
        const struct value *there = dict_find(v.dict, key);
        return there ? *there : key.kind == V_STR ? run_attribute(r, v, key.s) : undefined(name);
    }
    if (key.kind == V_BOOL)
        key = value_int(key.b);
    if (key.kind == V_INT && (v.kind == V_LIST || v.kind == V_STR)) {
        int64_t n = (int64_t)(v.kind == V_LIST ? v.list->n : str_chars(v.s)), i = key.i < 0 ? key.i + n : key.i;
        if (i < 0 || i >= n)
            return undefined(name);
        if (v.kind == V_LIST)
            return v.list->items[i];
        size_t at = str_offset(v.s, (size_t)i);
        return value_str(v.s.p + at, str_offset((struct str){v.s.p + at, v.s.n - at}, 1));
    }
    return key.kind == V_STR ? run_attribute(r, v, key.s) : undefined(name);
}

/* A bound of a slice, clipped as in Python. */
static bool slice_bound(struct template_run *r, struct value v, int64_t n, bool down, int64_t otherwise, int64_t *out)
{
    *out = otherwise;
    if (v.kind == V_NONE)
        return true;
    if (v.kind != V_INT) {
        run_fail(r, "a slice by a %s", value_type(v));
        return false;
    }
    int64_t i = v.i < 0 ? v.i + n : v.i, least = down ? -1 : 0, most = down ? n - 1 : n;
    *out = i < least ? least : i > most ? most : i;
    return true;
}

static struct value slice(struct template_run *r, struct scope *scope, const struct template_node *n)
{
    struct value v = eval(r, scope, n->kids[0]), part[3], out;
    int64_t step_by = 1, begin, end;
    for (int i = 0; i < 3; i++)
        part[i] = n->kids[1 + i] ? eval(r, scope, n->kids[1 + i]) : value_none();
    if (v.kind == V_UNDEFINED)
        return run_undefined(r, v);
    if (v.kind != V_LIST && v.kind != V_STR)
        return run_fail(r, "a slice of a %s", value_type(v));
    if (part[2].kind == V_INT)
        step_by = part[2].i;
    if (!step_by || (part[2].kind != V_INT && part[2].kind != V_NONE))
        return run_fail(r, "a slice with a bad step");
    struct template_list *items = value_iterate(r, v);
    int64_t length = (int64_t)items->n;
    bool down = step_by < 0;
    if (!slice_bound(r, part[0], length, down, down ? length - 1 : 0, &begin) ||
        !slice_bound(r, part[1], length, down, down ? -1 : length, &end))
        return value_none();
    struct bytes text = {0};
    out = value_list(r, v.kind == V_LIST && v.list->tuple);
    for (int64_t i = begin; down ? i > end : i < end; i += step_by) {
        if (v.kind == V_LIST)
            list_push(r, out.list, items->items[i]);
        else
            bytes_append(&text, items->items[i].s.p, items->items[i].s.n);
        if (step_by > length || step_by < -length) /* there is no second element, and i must not overflow */
            break;
    }
    return v.kind == V_LIST ? out : value_bytes(r, &text);
}

/* --------------------------------------------------------------- operators */

static struct value concatenate(struct template_run *r, struct value a, struct value b)
{
    struct bytes text = {0};
    value_write(r, a, &text);
    value_write(r, b, &text);
    return value_bytes(r, &text);
}

static struct value repeat(struct template_run *r, struct value v, int64_t times)
{
    times = times < 0 ? 0 : times;
    size_t n = v.kind == V_STR ? v.s.n : v.list->n * sizeof(struct value);
    if (n && ((uint64_t)times > TEMPLATE_MAX_MEMORY / n || !run_room(r, n * (size_t)times)))
        return run_fail(r, "a value repeated too often");
    if (!n)
        return v;
    if (v.kind == V_STR) {
        struct bytes text = {0};
        for (int64_t i = 0; i < times; i++)
            bytes_append(&text, v.s.p, v.s.n);
        return value_bytes(r, &text);
    }
    struct value out = value_list(r, v.list->tuple);
    for (int64_t i = 0; i < times && !r->status; i++)
        for (size_t j = 0; j < v.list->n; j++)
            list_push(r, out.list, v.list->items[j]);
    return out;
}

static struct value add(struct template_run *r, struct value a, struct value b)
{
    if (a.kind == V_STR && b.kind == V_STR)
        return concatenate(r, a, b);
    if (a.kind != V_LIST || b.kind != V_LIST || a.list->tuple != b.list->tuple)
        return run_fail(r, "'%s' + '%s'", value_type(a), value_type(b));
    struct value out = value_list(r, a.list->tuple);
    for (size_t i = 0; i < a.list->n; i++)
        list_push(r, out.list, a.list->items[i]);
    for (size_t i = 0; i < b.list->n; i++)
        list_push(r, out.list, b.list->items[i]);
    return out;
}

static struct value whole(struct template_run *r, int op, int64_t x, int64_t y)
{
    int64_t z = 0;
    bool over = false;
    switch (op) {
    case '+':
        over = __builtin_add_overflow(x, y, &z);
        break;
    case '-':
        over = __builtin_sub_overflow(x, y, &z);
        break;
    case '*':
        over = __builtin_mul_overflow(x, y, &z);
        break;
    case OP_POW:
        for (z = 1; y-- > 0 && !over;)
            over = __builtin_mul_overflow(z, x, &z) || (x >= -1 && x <= 1 && (y = y % 2, false));
        break;
    default: /* rounds down, as Python does */
        over = y == -1 && x == INT64_MIN;
        z = over ? 0 : op == '%' ? x % y : x / y;
        if (!over && x % y && (x < 0) != (y < 0))
            z += op == '%' ? y : -1;
    }
    return over ? run_fail(r, "a number grows too large") : value_int(z);
}

static struct value arithmetic(struct template_run *r, int op, struct value a, struct value b)
{
    double x, y;
    if (a.kind == V_UNDEFINED || b.kind == V_UNDEFINED)
        return run_undefined(r, a.kind == V_UNDEFINED ? a : b);
    bool numbers = value_number(a, &x) && value_number(b, &y);
    if (!numbers && a.kind == V_BOOL)
        a = value_int(a.b);
    if (!numbers && b.kind == V_BOOL)
        b = value_int(b.b);
    if (!numbers && op == '+')
        return add(r, a, b);
    if (op == '*' && (a.kind == V_STR || a.kind == V_LIST) && b.kind == V_INT)
        return repeat(r, a, b.i);
    if (op == '*' && (b.kind == V_STR || b.kind == V_LIST) && a.kind == V_INT)
        return repeat(r, b, a.i);
    if (!numbers)
        return run_fail(r, "'%s' and '%s' in arithmetic", value_type(a), value_type(b));
    if (y == 0 && (op == '/' || op == '%' || op == OP_FLOOR))
        return run_fail(r, "division by zero");
    bool ints = a.kind != V_FLOAT && b.kind != V_FLOAT;
    int64_t i = a.kind == V_BOOL ? a.b : a.i, j = b.kind == V_BOOL ? b.b : b.i;
    if (ints && op != '/' && (op != OP_POW || j >= 0))
        return whole(r, op, i, j);
    switch (op) {
    case '+':
        return value_float(x + y);
    case '-':
        return value_float(x - y);
    case '*':
        return value_float(x * y);
    case '/':
        return value_float(x / y);
    case OP_FLOOR:
        return value_float(floor(x / y));
    case '%':
        return value_float(x - floor(x / y) * y);
    default:
        return value_float(pow(x, y));
    }
}

static struct value binary(struct template_run *r, struct scope *scope, const struct template_node *n)
{
    struct value a = eval(r, scope, n->kids[0]);
    if (n->op == OP_AND || n->op == OP_OR)
        return value_true(a) == (n->op == OP_OR) ? a : eval(r, scope, n->kids[1]);
    struct value b = eval(r, scope, n->kids[1]);
    r->at = n;
    return r->status ? value_none() : n->op == '~' ? concatenate(r, a, b) : arithmetic(r, n->op, a, b);
}

static bool contains(struct template_run *r, struct value in, struct value what)
{
    if (in.kind == V_STR) {
        if (what.kind != V_STR)
            run_fail(r, "'%s' in a text", value_type(what));
        return what.kind == V_STR && memmem(in.s.p, in.s.n, what.s.p, what.s.n);
    }
    if (in.kind == V_DICT)
        return dict_find(in.dict, what) != NULL;
    const struct template_list *l = value_iterate(r, in);
    for (size_t i = 0; i < l->n; i++)
        if (value_equal(l->items[i], what, 0))
            return true;
    return false;
}

static bool holds(struct template_run *r, int op, struct value a, struct value b)
{
    switch (op) {
    case OP_EQ:
        return value_equal(a, b, 0);
    case OP_NE:
        return !value_equal(a, b, 0);
    case OP_LT:
        return value_compare(r, a, b) < 0;
    case OP_LE:
        return value_compare(r, a, b) <= 0;
    case OP_GT:
        return value_compare(r, a, b) > 0;
    case OP_GE:
        return value_compare(r, a, b) >= 0;
    default:
        return contains(r, b, a) == (op == OP_IN);
    }
}

static struct value compare(struct template_run *r, struct scope *scope, const struct template_node *n)
{
    struct value left = eval(r, scope, n->kids[0]);
    for (const struct template_node *with = n->kids[1]; with && !r->status; with = with->next) {
        struct value right = eval(r, scope, with->kids[0]);
        r->at = with;
        if (r->status || !holds(r, with->op, left, right))
            return value_bool(false);
        left = right;
    }
    return value_bool(true);
}

static struct value unary(struct template_run *r, struct scope *scope, const struct template_node *n)
{
    struct value v = eval(r, scope, n->kids[0]);
    double x;
    if (n->op == '!')
        return value_bool(!value_true(v));
    if (v.kind == V_UNDEFINED)
        return run_undefined(r, v);
    if (!value_number(v, &x))
        return run_fail(r, "'%c' before a %s", n->op, value_type(v));
    if (v.kind == V_FLOAT)
        return value_float(n->op == '-' ? -x : x);
    return whole(r, n->op == '-' ? '-' : '+', 0, v.kind == V_BOOL ? v.b : v.i);
}

/* ------------------------------------------------------------------- calls */

static void eval_args(struct template_run *r, struct scope *scope, const struct template_node *n,
                      struct template_args *a)
{
    a->n = a->n_named = 0;
    for (; n && !r->status; n = n->next) {
        struct value v = eval(r, scope, n->kids[0]);
        if (n->kind == N_KEYWORD)
            a->named[a->n_named++] = (struct variable){n->text, v};
        else
            a->values[a->n++] = v;
    }
}

bool template_arg(const struct template_args *a, uint32_t i, const char *name, struct value *out)
{
    if (i < a->n) {
        *out = a->values[i];
        return true;
    }
    for (uint32_t j = 0; j < a->n_named; j++)
        if (a->named[j].name.n == strlen(name) && !memcmp(a->named[j].name.p, name, a->named[j].name.n)) {
            *out = a->named[j].value;
            return true;
        }
    return false;
}

/* The output of statements, as a value. */
static struct value captured(struct template_run *r, struct scope *scope, const struct template_node *body)
{
    struct bytes text = {0}, *out = r->out;
    r->out = &text;
    execute(r, scope, body);
    r->out = out;
    return value_bytes(r, &text);
}

static struct value run_macro(struct template_run *r, const struct macro *m, const struct template_args *a)
{
    const struct template_node *n = m->node;
    struct scope *scope = scope_new(r, m->scope);
    struct value v = value_none(), caller;
    uint32_t i = 0, loops = r->loops;
    if (!enter(r))
        return v;
    for (const struct template_node *p = n->kids[0]; p && !r->status; p = p->next, i++) {
        char name[64];
        snprintf(name, sizeof(name), "%.*s", p->text.n < 63 ? (int)p->text.n : 63, p->text.p);
        if (!template_arg(a, i, name, &v))
            v = p->kids[0] ? eval(r, scope, p->kids[0]) : undefined(p->text);
        scope_set(r, scope, p->text, v);
    }
    if (a->n > i)
        run_fail(r, "a macro got %u arguments, and takes %u", a->n, i);
    if (template_arg(a, UINT32_MAX, "caller", &caller))
        scope_set(r, scope, STR("caller"), caller);
    v = r->status ? value_none() : captured(r, scope, n->kids[1]);
    r->loops = loops;
    r->depth--;
    return v;
}

static struct value call_value(struct template_run *r, const struct template_node *n, struct value callee,
                               const struct template_args *a)
{
    r->at = n;
    if (r->status)
        return value_none();
    if (callee.kind == V_MACRO)
        return run_macro(r, callee.macro, a);
    if (callee.kind == V_METHOD)
        return method_call(r, callee.bound, a);
    if (callee.kind == V_FUNCTION)
        return function_call(r, (int)callee.i, a);
    if (callee.kind == V_UNDEFINED)
        return run_undefined(r, callee);
    return run_fail(r, "a %s can't be called", value_type(callee));
}

static struct value call(struct template_run *r, struct scope *scope, const struct template_node *n)
{
    struct template_args a;
    struct value callee = eval(r, scope, n->kids[0]);
    eval_args(r, scope, n->kids[1], &a);
    return call_value(r, n, callee, &a);
}

static struct value filtered(struct template_run *r, struct scope *scope, const struct template_node *n,
                             struct value text)
{
    struct template_args a;
    struct value v =
        n->kids[0] ? n->kids[0]->kind == N_FILTER ? filtered(r, scope, n->kids[0], text) : eval(r, scope, n->kids[0])
                   : text;
    eval_args(r, scope, n->kids[1], &a);
    r->at = n;
    return r->status ? value_none() : filter_apply(r, n->op, v, &a);
}

/* ------------------------------------------------------------- expressions */

static struct value list_of(struct template_run *r, struct scope *scope, const struct template_node *n)
{
    struct value l = value_list(r, n->kind == N_TUPLE);
    for (const struct template_node *k = n->kids[0]; k && !r->status; k = k->next)
        list_push(r, l.list, eval(r, scope, k->kids[0]));
    return l;
}

static struct value dict_of(struct template_run *r, struct scope *scope, const struct template_node *n)
{
    struct value d = value_dict(r);
    for (const struct template_node *k = n->kids[0]; k && !r->status; k = k->next) {
        struct value key = eval(r, scope, k->kids[0]);
        dict_set(r, d.dict, key, eval(r, scope, k->kids[1]));
    }
    return d;
}

static struct value eval_kind(struct template_run *r, struct scope *scope, const struct template_node *n)
{
    struct value v;
    struct template_args a;
    switch (n->kind) {
    case N_CONST:
        return n->value;
    case N_NAME:
        return lookup(scope, n->text);
    case N_LIST:
    case N_TUPLE:
        return list_of(r, scope, n);
    case N_DICT:
        return dict_of(r, scope, n);
    case N_ATTR:
        v = eval(r, scope, n->kids[0]);
        r->at = n;
        return r->status ? v : run_attribute(r, v, n->text);
    case N_ITEM:
        v = eval(r, scope, n->kids[0]);
        a.values[0] = eval(r, scope, n->kids[1]);
        r->at = n;
        return r->status ? v : run_item(r, v, a.values[0]);
    case N_SLICE:
        return slice(r, scope, n);
    case N_CALL:
        return call(r, scope, n);
    case N_FILTER:
        return filtered(r, scope, n, value_none());
    case N_TEST:
        v = eval(r, scope, n->kids[0]);
        eval_args(r, scope, n->kids[1], &a);
        r->at = n;
        return r->status ? v : value_bool(test_apply(r, n->op, v, &a));
    case N_UNARY:
        return unary(r, scope, n);
    case N_BINARY:
        return binary(r, scope, n);
    case N_COMPARE:
        return compare(r, scope, n);
    case N_COND:
        if (value_true(eval(r, scope, n->kids[0])))
            return eval(r, scope, n->kids[1]);
        return n->kids[2] ? eval(r, scope, n->kids[2]) : undefined(STR("the value of an if without else"));
    default:
        abort(); /* the parser puts no statement here */
    }
}

static struct value eval(struct template_run *r, struct scope *scope, const struct template_node *n)
{
    struct value v = value_none();
    if (step(r, n) && enter(r))
        v = eval_kind(r, scope, n);
    r->depth--;
    return r->status ? value_none() : v;
}

/* -------------------------------------------------------------- statements */

static void assign(struct template_run *r, struct scope *scope, const struct template_node *target, struct value v)
{
    if (target->kind == N_NAME) {
        scope_set(r, scope, target->text, v);
    } else if (target->kind == N_ATTR) {
        struct value ns = lookup(scope, target->kids[0]->text);
        if (ns.kind == V_NAMESPACE)
            dict_set(r, ns.dict, value_str(target->text.p, target->text.n), v);
        else
            run_fail(r, "'%.*s' is no namespace", (int)target->kids[0]->text.n, target->kids[0]->text.p);
    } else {
        const struct template_list *l = value_iterate(r, v);
        size_t n = 0;
        for (const struct template_node *k = target->kids[0]; k; k = k->next)
            n++;
        if (l->n != n) {
            run_fail(r, "%zu values for %zu names", l->n, n);
            return;
        }
        n = 0;
        for (const struct template_node *k = target->kids[0]; k; k = k->next)
            scope_set(r, scope, k->text, l->items[n++]);
    }
}

/* The elements that pass the loop's filter. */
static const struct template_list *chosen(struct template_run *r, struct scope *scope, const struct template_node *n,
                                          const struct template_list *all)
{
    if (!n->kids[4])
        return all;
    struct value kept = value_list(r, false);
    for (size_t i = 0; i < all->n && !r->status; i++) {
        struct scope *inner = scope_new(r, scope);
        assign(r, inner, n->kids[0], all->items[i]);
        if (value_true(eval(r, inner, n->kids[4])))
            list_push(r, kept.list, all->items[i]);
    }
    return kept.list;
}

static void run_for(struct template_run *r, struct scope *scope, const struct template_node *n)
{
    struct value v = eval(r, scope, n->kids[1]);
    r->at = n;
    if (r->status)
        return;
    const struct template_list *items = value_iterate(r, v);
    struct loop *loop = arena_take(&r->arena, sizeof(*loop));
    if (!r->status)
        items = chosen(r, scope, n, items);
    *loop = (struct loop){.items = items, .depth0 = r->loops};
    struct value it = {.kind = V_LOOP, .loop = loop};
    r->loops++;
    for (; loop->i < items->n && !r->status; loop->i++) {
        struct scope *inner = scope_new(r, scope);
        assign(r, inner, n->kids[0], items->items[loop->i]);
        scope_set(r, inner, STR("loop"), it);
        execute(r, inner, n->kids[2]);
        bool over = r->flow == FLOW_BREAK;
        r->flow = FLOW_ON;
        if (over)
            break;
    }
    r->loops--;
    if (!items->n)
        execute(r, scope, n->kids[3]);
}

static void run_call_block(struct template_run *r, struct scope *scope, const struct template_node *n)
{
    struct template_args a;
    struct macro *m = arena_take(&r->arena, sizeof(*m));
    *m = (struct macro){n, scope};
    struct value callee = eval(r, scope, n->kids[2]->kids[0]);
    eval_args(r, scope, n->kids[2]->kids[1], &a);
    if (a.n_named == MAX_ARGS) {
        run_fail(r, "too many arguments");
        return;
    }
    a.named[a.n_named++] = (struct variable){STR("caller"), {.kind = V_MACRO, .macro = m}};
    struct value v = call_value(r, n, callee, &a);
    value_write(r, v, r->out);
}

static void run_with(struct template_run *r, struct scope *scope, const struct template_node *n)
{
    struct scope *inner = n->op ? scope : scope_new(r, scope);
    for (const struct template_node *k = n->kids[0]; k && !r->status; k = k->next)
        assign(r, inner, k->kids[0], eval(r, scope, k->kids[1]));
    execute(r, inner, n->kids[1]);
}

static void run_statement(struct template_run *r, struct scope *scope, const struct template_node *n)
{
    struct value v;
    struct macro *m;
    switch (n->kind) {
    case N_TEXT:
        bytes_append(r->out, n->text.p, n->text.n);
        break;
    case N_OUTPUT:
        v = eval(r, scope, n->kids[0]);
        r->at = n;
        if (!r->status)
            value_write(r, v, r->out);
        break;
    case N_IF:
        execute(r, scope, value_true(eval(r, scope, n->kids[0])) ? n->kids[1] : n->kids[2]);
        break;
    case N_FOR:
        run_for(r, scope, n);
        break;
    case N_SET:
        assign(r, scope, n->kids[0], eval(r, scope, n->kids[1]));
        break;
    case N_SET_BLOCK:
        v = captured(r, scope_new(r, scope), n->kids[1]);
        assign(r, scope, n->kids[0], n->kids[2] ? filtered(r, scope, n->kids[2], v) : v);
        break;
    case N_MACRO:
        m = arena_take(&r->arena, sizeof(*m));
        *m = (struct macro){n, scope};
        scope_set(r, scope, n->text, (struct value){.kind = V_MACRO, .macro = m});
        break;
    case N_CALL_BLOCK:
        run_call_block(r, scope, n);
        break;
    case N_FILTER_BLOCK:
        v = filtered(r, scope, n->kids[0], captured(r, scope_new(r, scope), n->kids[1]));
        if (!r->status)
            value_write(r, v, r->out);
        break;
    case N_WITH:
        run_with(r, scope, n);
        break;
    case N_BREAK:
        r->flow = FLOW_BREAK;
        break;
    case N_CONTINUE:
        r->flow = FLOW_CONTINUE;
        break;
    default:
        abort(); /* the parser puts no expression here */
    }
}

static void execute(struct template_run *r, struct scope *scope, const struct template_node *n)
{
    if (enter(r))
        for (; n && !r->flow && step(r, n); n = n->next)
            run_statement(r, scope, n);
    r->depth--;
}

/* -------------------------------------------------------------------- open */

enum td_status template_parse(const char *source, size_t len, struct template **out, struct td_error *e)
{
    if (len > TEMPLATE_MAX_SOURCE)
        return td_fail(e, TD_ERR_UNSUPPORTED, "%zu bytes, at most %d", len, TEMPLATE_MAX_SOURCE);
    struct template *t = mem_zalloc(sizeof(*t));
    enum td_status s = template_lex(t, source, len, e);
    if (!s)
        s = template_build(t, e);
    free(t->tokens);
    t->tokens = NULL;
    if (s) {
        template_close(t);
        return s;
    }
    *out = t;
    return TD_OK;
}

void template_close(struct template *t)
{
    if (!t)
        return;
    arena_free(&t->arena);
    free(t);
}

enum td_status template_render(const struct template *t, json_t *variables, time_t now, struct bytes *out,
                               struct td_error *e)
{
    struct bytes text = {0};
    struct template_run r = {.out = &text, .e = e, .now = now ? now : time(NULL)};
    struct scope *globals = scope_new(&r, NULL);
    const char *key;
    size_t len;
    json_t *v;
    json_object_keylen_foreach(variables, key, len, v)
        scope_set(&r, globals, (struct str){key, len}, value_json(&r, v, 0));
    execute(&r, scope_new(&r, globals), t->body);
    if (!r.status && text.len > TEMPLATE_MAX_OUTPUT)
        r.status = td_fail(e, TD_ERR_NO_SPACE, "the template writes too much");
    if (!r.status)
        bytes_append(out, text.data, text.len);
    bytes_free(&text);
    arena_free(&r.arena);
    return r.status;
}
