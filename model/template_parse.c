/*
 * Tokens to a tree, by recursive descent over Jinja's grammar. Names of filters, tests and methods are looked
 * up here, so an unknown name is reported at load.
 */
#include <stdarg.h>
#include <stdlib.h>

#include "model/template_internal.h"

enum { MAX_PARSE_DEPTH = 100 };

struct parser {
    struct template *t;
    struct token *at;
    struct td_error *e;
    enum td_status status;
    uint32_t depth, loops;
};

static struct template_node *expression(struct parser *p);
static struct template_node *statements(struct parser *p, const char *const *ends, struct str *end_out);

/* ------------------------------------------------------------------ helpers */

__attribute__((format(printf, 4, 5))) static void fail(struct parser *p, const struct token *k, enum td_status s,
                                                       const char *format, ...)
{
    char text[160];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (!p->status)
        p->status = td_fail(p->e, s, "line %u, column %u: %s", k->line, k->column, text);
    while (p->at->kind != T_END) /* nothing more is read */
        p->at++;
}

static struct template_node *node_at(struct parser *p, enum node_kind kind, const struct token *k)
{
    struct template_node *n = arena_take(&p->t->arena, sizeof(*n));
    n->kind = kind;
    n->line = k->line;
    n->column = k->column;
    return n;
}

static struct template_node *node(struct parser *p, enum node_kind kind)
{
    return node_at(p, kind, p->at);
}

static bool is_op(const struct parser *p, const char *op)
{
    return p->at->kind == T_OP && p->at->text.n == strlen(op) && !memcmp(p->at->text.p, op, p->at->text.n);
}

static bool token_is(const struct token *k, const char *name)
{
    return k->kind == T_NAME && k->text.n == strlen(name) && !memcmp(k->text.p, name, k->text.n);
}

static bool is_name(const struct parser *p, const char *name)
{
    return token_is(p->at, name);
}

static bool take_op(struct parser *p, const char *op)
{
    bool yes = is_op(p, op);
    p->at += yes;
    return yes;
}

static bool take_name(struct parser *p, const char *name)
{
    bool yes = is_name(p, name);
    p->at += yes;
    return yes;
}

static const char *token_name(const struct token *k)
{
    static const char *const NAMES[] = {"text",   "'{{'",     "'}}'",     "'{%'", "'%}'",   "a name",
                                        "a text", "a number", "a number", "",     "the end"};
    return NAMES[k->kind];
}

static void unexpected(struct parser *p, const char *wanted)
{
    if (p->at->kind == T_OP || p->at->kind == T_NAME)
        fail(p, p->at, TD_ERR_CORRUPT, "expected %s, found '%.*s'", wanted, (int)p->at->text.n, p->at->text.p);
    else
        fail(p, p->at, TD_ERR_CORRUPT, "expected %s, found %s", wanted, token_name(p->at));
}

static void want_op(struct parser *p, const char *op)
{
    if (!take_op(p, op))
        unexpected(p, op);
}

static void want(struct parser *p, enum token_kind kind)
{
    if (p->at->kind == kind)
        p->at += kind != T_END;
    else
        unexpected(p, token_name(&(struct token){.kind = kind}));
}

static struct str want_name(struct parser *p)
{
    struct str s = {"", 0};
    if (p->at->kind == T_NAME)
        s = (p->at++)->text;
    else
        unexpected(p, "a name");
    return s;
}

static bool enter(struct parser *p)
{
    if (++p->depth > MAX_PARSE_DEPTH)
        fail(p, p->at, TD_ERR_UNSUPPORTED, "nested too deeply");
    return !p->status;
}

static struct template_node **append(struct template_node **end, struct template_node *n)
{
    *end = n;
    return &n->next;
}

static struct template_node *constant(struct parser *p, struct value v)
{
    struct template_node *n = node(p, N_CONST);
    n->value = v;
    p->at++;
    return n;
}

/* -------------------------------------------------------------- expressions */

/* Parses arguments after "(", including the ")". */
static struct template_node *arguments(struct parser *p)
{
    struct template_node *first = NULL, **end = &first;
    uint32_t n = 0;
    while (!p->status && !is_op(p, ")")) {
        if (is_op(p, "*") || is_op(p, "**"))
            fail(p, p->at, TD_ERR_UNSUPPORTED, "* or ** before an argument is not supported");
        if (++n > MAX_ARGS)
            fail(p, p->at, TD_ERR_UNSUPPORTED, "more than %d arguments", MAX_ARGS);
        if (p->at->kind == T_NAME && p->at[1].kind == T_OP && str_is(p->at[1].text, STR("="))) {
            struct template_node *k = node(p, N_KEYWORD);
            k->text = p->at->text;
            p->at += 2;
            k->kids[0] = expression(p);
            end = append(end, k);
        } else {
            struct template_node *k = node(p, N_ARGUMENT);
            k->kids[0] = expression(p);
            end = append(end, k);
        }
        if (!take_op(p, ","))
            break;
    }
    want_op(p, ")");
    return first;
}

/* Parses a, b, c up to a closing token. */
static struct template_node *elements(struct parser *p, const char *close)
{
    struct template_node *first = NULL, **end = &first;
    while (!p->status && !is_op(p, close)) {
        struct template_node *k = node(p, N_ARGUMENT);
        k->kids[0] = expression(p);
        end = append(end, k);
        if (!take_op(p, ","))
            break;
    }
    want_op(p, close);
    return first;
}

static struct template_node *dict(struct parser *p)
{
    struct template_node *d = node(p, N_DICT), **end = &d->kids[0];
    want_op(p, "{");
    while (!p->status && !is_op(p, "}")) {
        struct template_node *pair = node(p, N_PAIR);
        pair->kids[0] = expression(p);
        want_op(p, ":");
        pair->kids[1] = expression(p);
        end = append(end, pair);
        if (!take_op(p, ","))
            break;
    }
    want_op(p, "}");
    return d;
}

static struct template_node *parenthesis(struct parser *p)
{
    struct template_node *tuple = node(p, N_TUPLE);
    want_op(p, "(");
    if (take_op(p, ")"))
        return tuple;
    struct template_node *first = expression(p);
    if (take_op(p, ")"))
        return first;
    struct template_node *k = node(p, N_ARGUMENT);
    k->kids[0] = first;
    tuple->kids[0] = k;
    want_op(p, ",");
    k->next = elements(p, ")");
    return tuple;
}

static struct template_node *primary(struct parser *p)
{
    static const struct {
        const char *name;
        struct value value;
    } WORDS[] = {{"true", {V_BOOL, {.b = true}}},   {"True", {V_BOOL, {.b = true}}},  {"false", {V_BOOL, {.b = false}}},
                 {"False", {V_BOOL, {.b = false}}}, {"none", {V_NONE, {.b = false}}}, {"None", {V_NONE, {.b = false}}}};
    const struct token *k = p->at;
    if (k->kind == T_STR) { /* adjacent texts are one */
        struct bytes b = {0};
        struct template_node *n = node(p, N_CONST);
        for (; p->at->kind == T_STR; p->at++)
            bytes_append(&b, p->at->text.p, p->at->text.n);
        struct str s = arena_str(&p->t->arena, b.data ? b.data : "", b.len);
        n->value = value_str(s.p, s.n);
        bytes_free(&b);
        return n;
    }
    if (k->kind == T_INT)
        return constant(p, value_int(k->i));
    if (k->kind == T_FLOAT)
        return constant(p, value_float(k->f));
    if (k->kind == T_NAME) {
        for (size_t i = 0; i < sizeof(WORDS) / sizeof(WORDS[0]); i++)
            if (is_name(p, WORDS[i].name))
                return constant(p, WORDS[i].value);
        struct template_node *n = node(p, N_NAME);
        n->text = k->text;
        p->at++;
        return n;
    }
    if (is_op(p, "("))
        return parenthesis(p);
    if (is_op(p, "{"))
        return dict(p);
    struct template_node *list = node(p, N_LIST);
    if (take_op(p, "["))
        list->kids[0] = elements(p, "]");
    else
        unexpected(p, "a value");
    return list;
}

static struct template_node *subscript(struct parser *p, struct template_node *object)
{
    struct template_node *parts[3] = {NULL}, *n = node(p, N_ITEM);
    bool slice = false;
    int i = 0;
    while (!p->status && !is_op(p, "]") && i < 3) {
        if (!is_op(p, ":"))
            parts[i] = expression(p);
        if (!take_op(p, ":"))
            break;
        slice = true;
        i++;
    }
    want_op(p, "]");
    n->kids[0] = object;
    n->kids[1] = parts[0];
    if (!slice && !parts[0])
        unexpected(p, "a key");
    if (slice) {
        n->kind = N_SLICE;
        n->kids[2] = parts[1];
        n->kids[3] = parts[2];
    }
    return n;
}

static struct template_node *member(struct parser *p, struct template_node *object)
{
    struct template_node *n = node(p, N_ATTR);
    n->kids[0] = object;
    if (p->at->kind == T_INT) {
        n->kind = N_ITEM;
        n->kids[1] = constant(p, value_int(p->at->i));
        return n;
    }
    const struct token *k = p->at;
    n->text = want_name(p);
    /* An unknown method. If the object is a plain name, it may be a macro in a namespace instead. */
    if (is_op(p, "(") && method_find(n->text) < 0 && object->kind != N_NAME)
        fail(p, k, TD_ERR_UNSUPPORTED, "method '%.*s' is not supported", (int)n->text.n, n->text.p);
    return n;
}

static struct template_node *call(struct parser *p, struct template_node *callee)
{
    struct template_node *n = node(p, N_CALL);
    want_op(p, "(");
    n->kids[0] = callee;
    n->kids[1] = arguments(p);
    return n;
}

static struct template_node *postfix(struct parser *p, struct template_node *n)
{
    while (!p->status) {
        if (take_op(p, "."))
            n = member(p, n);
        else if (take_op(p, "["))
            n = subscript(p, n);
        else if (is_op(p, "("))
            n = call(p, n);
        else
            break;
    }
    return n;
}

static struct str dotted_name(struct parser *p)
{
    struct str s = want_name(p);
    while (!p->status && is_op(p, ".")) {
        p->at++;
        want_name(p);
        fail(p, p->at - 1, TD_ERR_UNSUPPORTED, "a name with dots is not supported here");
    }
    return s;
}

static struct template_node *filter(struct parser *p, struct template_node *operand)
{
    struct template_node *n = node(p, N_FILTER);
    const struct token *k = p->at;
    struct str name = dotted_name(p);
    n->kids[0] = operand;
    n->op = p->status ? 0 : filter_find(name);
    if (n->op < 0)
        fail(p, k, TD_ERR_UNSUPPORTED, "filter '%.*s' is not supported", (int)name.n, name.p);
    if (take_op(p, "("))
        n->kids[1] = arguments(p);
    return n;
}

static bool begins_argument(const struct parser *p)
{
    static const char *const NOT[] = {"else", "or", "and", "if", "is", "in", "not"};
    if (p->at->kind == T_OP)
        return is_op(p, "[") || is_op(p, "{");
    for (size_t i = 0; i < sizeof(NOT) / sizeof(NOT[0]); i++)
        if (is_name(p, NOT[i]))
            return false;
    return p->at->kind == T_NAME || p->at->kind == T_STR || p->at->kind == T_INT || p->at->kind == T_FLOAT;
}

static struct template_node *test(struct parser *p, struct template_node *operand)
{
    struct template_node *n = node(p, N_TEST), *not = node(p, N_UNARY);
    bool negated = take_name(p, "not");
    const struct token *k = p->at;
    struct str name = dotted_name(p);
    n->kids[0] = operand;
    n->op = p->status ? 0 : test_find(name);
    if (n->op < 0)
        fail(p, k, TD_ERR_UNSUPPORTED, "test '%.*s' is not supported", (int)name.n, name.p);
    if (take_op(p, "(")) {
        n->kids[1] = arguments(p);
    } else if (begins_argument(p)) {
        n->kids[1] = node(p, N_ARGUMENT);
        n->kids[1]->kids[0] = postfix(p, primary(p));
    }
    if (!negated)
        return n;
    not ->op = '!';
    not ->kids[0] = n;
    return not ;
}

static struct template_node *filters(struct parser *p, struct template_node *n)
{
    while (!p->status) {
        if (take_op(p, "|"))
            n = filter(p, n);
        else if (take_name(p, "is"))
            n = test(p, n);
        else if (is_op(p, "("))
            n = call(p, n);
        else
            break;
    }
    return n;
}

static struct template_node *unary(struct parser *p, bool with_filters)
{
    struct template_node *n = node(p, N_UNARY);
    if (!enter(p))
        return n;
    if (is_op(p, "-") || is_op(p, "+")) {
        n->op = (p->at++)->text.p[0];
        n->kids[0] = unary(p, false);
    } else {
        n = postfix(p, primary(p));
    }
    p->depth--;
    return with_filters ? filters(p, n) : n;
}

static struct template_node *full_unary(struct parser *p)
{
    return unary(p, true);
}

/* Left-associative operators of one precedence. */
struct level {
    struct {
        const char *text;
        int op;
    } ops[4];
    bool words;
};
static const struct level LEVELS[] = {
    {{{"or", OP_OR}}, true},
    {{{"and", OP_AND}}, true},
    {{{"+", '+'}, {"-", '-'}}, false},
    {{{"~", '~'}}, false},
    {{{"*", '*'}, {"/", '/'}, {"//", OP_FLOOR}, {"%", '%'}}, false},
    {{{"**", OP_POW}}, false},
};
enum { LEVEL_OR, LEVEL_AND, LEVEL_SUM, N_LEVELS = sizeof(LEVELS) / sizeof(LEVELS[0]) };

static struct template_node *not_expression(struct parser *p);

static struct template_node *binary(struct parser *p, int level)
{
    if (level == N_LEVELS)
        return full_unary(p);
    bool below_not = level == LEVEL_AND;
    struct template_node *left = below_not ? not_expression(p) : binary(p, level + 1);
    for (bool more = true; more && !p->status;) {
        more = false;
        for (int i = 0; i < 4 && LEVELS[level].ops[i].text && !more; i++) {
            const char *text = LEVELS[level].ops[i].text;
            struct template_node *n = NULL;
            const struct token *k = p->at;
            if (!(LEVELS[level].words ? take_name(p, text) : take_op(p, text)))
                continue;
            n = node_at(p, N_BINARY, k);
            n->op = LEVELS[level].ops[i].op;
            n->kids[0] = left;
            n->kids[1] = below_not ? not_expression(p) : binary(p, level + 1);
            left = n;
            more = true;
        }
    }
    return left;
}

static int comparison(struct parser *p)
{
    static const struct {
        const char *text;
        int op;
    } OPS[] = {{"==", OP_EQ}, {"!=", OP_NE}, {"<", OP_LT}, {"<=", OP_LE}, {">", OP_GT}, {">=", OP_GE}};
    for (size_t i = 0; i < sizeof(OPS) / sizeof(OPS[0]); i++)
        if (take_op(p, OPS[i].text))
            return OPS[i].op;
    if (take_name(p, "in"))
        return OP_IN;
    if (is_name(p, "not") && token_is(p->at + 1, "in")) {
        p->at += 2;
        return OP_NOT_IN;
    }
    return 0;
}

static struct template_node *parse_compare(struct parser *p)
{
    struct template_node *left = binary(p, LEVEL_SUM), *n = node(p, N_COMPARE), **end = &n->kids[1];
    for (int op; !p->status && (op = comparison(p));) {
        struct template_node *with = node(p, N_COMPARE_WITH);
        with->op = op;
        with->kids[0] = binary(p, LEVEL_SUM);
        end = append(end, with);
    }
    n->kids[0] = left;
    return n->kids[1] ? n : left;
}

static struct template_node *not_expression(struct parser *p)
{
    if (!is_name(p, "not"))
        return parse_compare(p);
    struct template_node *n = node(p, N_UNARY);
    n->op = '!';
    p->at++;
    if (enter(p))
        n->kids[0] = not_expression(p);
    p->depth--;
    return n;
}

static struct template_node *expression(struct parser *p)
{
    if (!enter(p))
        return node(p, N_CONST);
    struct template_node *n = binary(p, LEVEL_OR);
    while (!p->status && is_name(p, "if")) {
        struct template_node *c = node(p, N_COND);
        p->at++;
        c->kids[1] = n;
        c->kids[0] = binary(p, LEVEL_OR);
        if (take_name(p, "else"))
            c->kids[2] = expression(p);
        n = c;
    }
    p->depth--;
    return n;
}

/* Parses one expression, or several with commas: a tuple. */
static struct template_node *expressions(struct parser *p)
{
    struct template_node *first = expression(p);
    if (!is_op(p, ","))
        return first;
    struct template_node *tuple = node(p, N_TUPLE), *k = node(p, N_ARGUMENT), **end = &k->next;
    k->kids[0] = first;
    tuple->kids[0] = k;
    while (take_op(p, ",")) {
        k = node(p, N_ARGUMENT);
        k->kids[0] = expression(p);
        end = append(end, k);
    }
    return tuple;
}

/* --------------------------------------------------------------- statements */

/* Parses names with commas, or name.attribute. */
static struct template_node *target(struct parser *p, bool attribute)
{
    struct template_node *n = node(p, N_NAME);
    n->text = want_name(p);
    if (attribute && take_op(p, ".")) {
        n->kind = N_ATTR;
        n->kids[0] = node(p, N_NAME);
        n->kids[0]->text = n->text;
        n->text = want_name(p);
        return n;
    }
    if (!is_op(p, ","))
        return n;
    struct template_node *tuple = node(p, N_TUPLE), **end = &tuple->kids[0];
    end = append(end, n);
    while (!p->status && take_op(p, ",") && p->at->kind == T_NAME) {
        n = node(p, N_NAME);
        n->text = want_name(p);
        end = append(end, n);
    }
    return tuple;
}

static void end_block(struct parser *p)
{
    want(p, T_BLOCK_END);
}

static struct template_node *body_until(struct parser *p, const char *end)
{
    const char *const ends[] = {end, NULL};
    struct str which;
    struct template_node *body = statements(p, ends, &which);
    end_block(p);
    return body;
}

static struct template_node *if_statement(struct parser *p)
{
    static const char *const ENDS[] = {"elif", "else", "endif", NULL};
    struct template_node *n = node(p, N_IF);
    struct str which = {"", 0};
    n->kids[0] = expression(p);
    end_block(p);
    n->kids[1] = statements(p, ENDS, &which);
    if (str_is(which, STR("elif"))) {
        if (enter(p))
            n->kids[2] = if_statement(p);
        p->depth--;
        return n;
    }
    end_block(p);
    if (str_is(which, STR("else")))
        n->kids[2] = body_until(p, "endif");
    return n;
}

static struct template_node *for_statement(struct parser *p)
{
    static const char *const ENDS[] = {"else", "endfor", NULL};
    struct template_node *n = node(p, N_FOR);
    struct str which = {"", 0};
    bool bracket = take_op(p, "(");
    n->kids[0] = target(p, false);
    if (bracket)
        want_op(p, ")");
    if (!take_name(p, "in"))
        unexpected(p, "in");
    n->kids[1] = binary(p, LEVEL_OR);
    if (take_name(p, "if"))
        n->kids[4] = expression(p);
    if (is_name(p, "recursive"))
        fail(p, p->at, TD_ERR_UNSUPPORTED, "recursive loops are not supported");
    end_block(p);
    p->loops++;
    n->kids[2] = statements(p, ENDS, &which);
    p->loops--;
    end_block(p);
    if (str_is(which, STR("else")))
        n->kids[3] = body_until(p, "endfor");
    return n;
}

static struct template_node *set_statement(struct parser *p)
{
    struct template_node *n = node(p, N_SET);
    n->kids[0] = target(p, true);
    if (take_op(p, "=")) {
        n->kids[1] = expressions(p);
        end_block(p);
        return n;
    }
    n->kind = N_SET_BLOCK;
    while (!p->status && take_op(p, "|"))
        n->kids[2] = filter(p, n->kids[2]);
    end_block(p);
    n->kids[1] = body_until(p, "endset");
    return n;
}

static struct template_node *parameters(struct parser *p)
{
    struct template_node *first = NULL, **end = &first;
    want_op(p, "(");
    uint32_t count = 0;
    while (!p->status && !is_op(p, ")")) {
        struct template_node *n = node(p, N_PARAMETER);
        n->text = want_name(p);
        if (take_op(p, "="))
            n->kids[0] = expression(p);
        end = append(end, n);
        if (++count > MAX_ARGS)
            fail(p, p->at, TD_ERR_UNSUPPORTED, "more than %d parameters", MAX_ARGS);
        if (!take_op(p, ","))
            break;
    }
    want_op(p, ")");
    return first;
}

static struct template_node *macro_statement(struct parser *p)
{
    struct template_node *n = node(p, N_MACRO);
    uint32_t loops = p->loops;
    p->loops = 0;
    n->text = want_name(p);
    n->kids[0] = parameters(p);
    end_block(p);
    n->kids[1] = body_until(p, "endmacro");
    p->loops = loops;
    return n;
}

static struct template_node *call_statement(struct parser *p)
{
    struct template_node *n = node(p, N_CALL_BLOCK);
    if (is_op(p, "("))
        n->kids[0] = parameters(p);
    n->kids[2] = postfix(p, primary(p));
    if (n->kids[2]->kind != N_CALL)
        unexpected(p, "a call");
    end_block(p);
    n->kids[1] = body_until(p, "endcall");
    return n;
}

static struct template_node *filter_statement(struct parser *p)
{
    struct template_node *n = node(p, N_FILTER_BLOCK);
    n->kids[0] = filter(p, NULL);
    while (!p->status && take_op(p, "|"))
        n->kids[0] = filter(p, n->kids[0]);
    end_block(p);
    n->kids[1] = body_until(p, "endfilter");
    return n;
}

static struct template_node *with_statement(struct parser *p)
{
    struct template_node *n = node(p, N_WITH), **end = &n->kids[0];
    while (!p->status && p->at->kind == T_NAME) {
        struct template_node *set = node(p, N_SET);
        set->kids[0] = node(p, N_NAME);
        set->kids[0]->text = want_name(p);
        want_op(p, "=");
        set->kids[1] = expression(p);
        end = append(end, set);
        if (!take_op(p, ","))
            break;
    }
    end_block(p);
    n->kids[1] = body_until(p, "endwith");
    return n;
}

/* Marks what an assistant said, for training. Here only its body matters. */
static struct template_node *generation_statement(struct parser *p)
{
    struct template_node *n = node(p, N_WITH);
    end_block(p);
    n->kids[1] = body_until(p, "endgeneration");
    n->op = 1; /* it has no scope of its own */
    return n;
}

static struct template_node *loop_control(struct parser *p, enum node_kind kind)
{
    struct template_node *n = node(p, kind);
    if (!p->loops)
        fail(p, p->at - 1, TD_ERR_CORRUPT, "outside of a loop");
    end_block(p);
    return n;
}

static struct template_node *statement(struct parser *p)
{
    static const struct {
        const char *name;
        struct template_node *(*parse)(struct parser *);
    } KNOWN[] = {{"if", if_statement},     {"for", for_statement},
                 {"set", set_statement},   {"macro", macro_statement},
                 {"call", call_statement}, {"filter", filter_statement},
                 {"with", with_statement}, {"generation", generation_statement}};
    const struct token *k = p->at;
    struct str name = want_name(p);
    for (size_t i = 0; i < sizeof(KNOWN) / sizeof(KNOWN[0]); i++)
        if (token_is(k, KNOWN[i].name))
            return KNOWN[i].parse(p);
    if (token_is(k, "break"))
        return loop_control(p, N_BREAK);
    if (token_is(k, "continue"))
        return loop_control(p, N_CONTINUE);
    if (!p->status)
        fail(p, k, TD_ERR_UNSUPPORTED, "statement '%.*s' is not supported", (int)name.n, name.p);
    return node(p, N_TEXT);
}

static bool ends_here(const struct parser *p, const char *const *ends)
{
    for (; *ends; ends++)
        if (token_is(p->at + 1, *ends))
            return true;
    return false;
}

/*
 * Parses statements up to one named in `ends`, which is consumed and returned. ends NULL: up to the end of
 * the source.
 */
static struct template_node *statements(struct parser *p, const char *const *ends, struct str *end_out)
{
    struct template_node *first = NULL, **end = &first, *n;
    enter(p);
    while (!p->status) {
        const struct token *k = p->at;
        if (k->kind == T_BLOCK && ends && ends_here(p, ends)) {
            *end_out = k[1].text;
            p->at += 2;
            break;
        }
        if (k->kind == T_END) {
            for (; ends && ends[1]; ends++) /* the last name closes the statement */
                ;
            if (ends)
                fail(p, k, TD_ERR_CORRUPT, "expected {%% %s %%}, found the end", ends[0]);
            break;
        }
        p->at++;
        if (k->kind == T_TEXT) {
            n = node_at(p, N_TEXT, k);
            n->text = k->text;
        } else if (k->kind == T_VARIABLE) {
            n = node_at(p, N_OUTPUT, k);
            n->kids[0] = expressions(p);
            want(p, T_VARIABLE_END);
        } else {
            n = statement(p);
        }
        end = append(end, n);
    }
    p->depth--;
    return first;
}

enum td_status template_build(struct template *t, struct td_error *e)
{
    struct parser p = {.t = t, .at = t->tokens, .e = e};
    t->body = statements(&p, NULL, NULL);
    return p.status;
}
