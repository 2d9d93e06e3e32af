/*
 * Regular expressions, as JSON Schema has them (ECMA 262 with flag u), and the trees that EBNF shares.
 *
 * Understood: alternatives, groups (capturing or not, named or not), classes, ., \d \w \s \D \W \S,
 * \p{...} of general categories, escapes of control characters, \xHH, \uHHHH, \u{H...}, * + ? {n} {n,}
 * {n,m} (lazy ones mean the same here), and ^ and $ at the ends of a whole alternative. Not understood,
 * and refused by name: looking ahead or behind, back references, \b, flags.
 *
 * A class becomes ranges of the bytes of UTF-8; inside a JSON string also the escapes that stand for its
 * characters.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "grammar/grammar_internal.h"

enum { LAST = 0x10ffff, DEPTH_MOST = 100, UNROLL_MOST = 6, TIMES_MOST = 100000 };

enum pattern_kind { NODE_CLASS, NODE_CAT, NODE_ALT, NODE_TIMES, NODE_RULE };

struct gr_node {
    enum pattern_kind kind;
    struct gr_span *spans; /* CLASS: sorted, apart from each other; owned */
    uint32_t n_spans;
    const struct gr_node *a, *b; /* NULL: the empty text */
    uint32_t least, most;        /* TIMES; most: UINT32_MAX: no limit */
    uint32_t rule;
};

/* ---------------------------------------------------------------------- trees */

static struct gr_node *new_node(struct gr_tree *t, enum pattern_kind kind)
{
    struct gr_node *n = mem_zalloc(sizeof(*n));
    n->kind = kind;
    t->nodes = MEM_ROOM(t->nodes, t->n, t->cap, 64);
    return t->nodes[t->n++] = n;
}

void gr_tree_free(struct gr_tree *t)
{
    for (uint32_t i = 0; i < t->n; i++) {
        free(t->nodes[i]->spans);
        free(t->nodes[i]);
    }
    free(t->nodes);
}

static int by_first(const void *a, const void *b)
{
    const struct gr_span *x = a, *y = b;
    return (x->first > y->first) - (x->first < y->first);
}

struct gr_node *gr_node_class(struct gr_tree *t, const struct gr_span *spans, uint32_t n)
{
    struct gr_node *c = new_node(t, NODE_CLASS);
    struct gr_span *s = c->spans = mem_dup(spans, n * sizeof(*spans));
    qsort(s, n, sizeof(*s), by_first);
    for (uint32_t i = 0; i < n; i++) {
        if (c->n_spans && s[i].first <= s[c->n_spans - 1].last + 1) {
            if (s[i].last > s[c->n_spans - 1].last)
                s[c->n_spans - 1].last = s[i].last;
        } else {
            s[c->n_spans++] = s[i];
        }
    }
    return c;
}

static struct gr_node *class_of(struct gr_tree *t, uint32_t first, uint32_t last)
{
    return gr_node_class(t, &(struct gr_span){first, last}, 1);
}

static struct gr_node *class_of_rest(struct gr_tree *t, const struct gr_node *c)
{
    struct gr_span *rest = mem_array(c->n_spans + 1, sizeof(*rest));
    uint32_t n = 0, from = 0;
    for (uint32_t i = 0; i < c->n_spans; i++) {
        if (c->spans[i].first > from)
            rest[n++] = (struct gr_span){from, c->spans[i].first - 1};
        from = c->spans[i].last + 1;
    }
    if (from <= LAST)
        rest[n++] = (struct gr_span){from, LAST};
    struct gr_node *r = gr_node_class(t, rest, n);
    free(rest);
    return r;
}

struct gr_node *gr_node_cat(struct gr_tree *t, struct gr_node *a, struct gr_node *b)
{
    if (!a || !b)
        return a ? a : b;
    struct gr_node *n = new_node(t, NODE_CAT);
    n->a = a;
    n->b = b;
    return n;
}

struct gr_node *gr_node_alt(struct gr_tree *t, struct gr_node *a, struct gr_node *b)
{
    struct gr_node *n = new_node(t, NODE_ALT);
    n->a = a;
    n->b = b;
    return n;
}

struct gr_node *gr_node_times(struct gr_tree *t, struct gr_node *a, uint32_t least, uint32_t most)
{
    if (!a)
        return NULL;
    struct gr_node *n = new_node(t, NODE_TIMES);
    n->a = a;
    n->least = least;
    n->most = most;
    return n;
}

struct gr_node *gr_node_rule(struct gr_tree *t, uint32_t state)
{
    struct gr_node *n = new_node(t, NODE_RULE);
    n->rule = state;
    return n;
}

struct gr_node *gr_node_text(struct gr_tree *t, const char *text, size_t len)
{
    struct gr_node *all = NULL;
    for (size_t i = 0; i < len;) {
        utf8proc_int32_t c;
        utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)text + i, (utf8proc_ssize_t)(len - i), &c);
        if (n < 1)
            return NULL;
        all = gr_node_cat(t, all, class_of(t, (uint32_t)c, (uint32_t)c));
        i += (size_t)n;
    }
    return all;
}

/* -------------------------------------------------------------------- parsing */

struct parsing {
    struct gr_tree *t;
    const char *text;
    size_t len, at;
    uint32_t depth;
    bool begins, ends; /* the alternative that was read last has ^, $ */
    struct td_error *e;
};

static bool fail(struct parsing *p, enum td_status *s, enum td_status why, const char *what)
{
    *s = td_fail(p->e, why, "expression: %s, at byte %zu", what, p->at);
    return false;
}

static bool looking_at(const struct parsing *p, const char *what)
{
    size_t n = strlen(what);
    return p->len - p->at >= n && !memcmp(p->text + p->at, what, n);
}

static bool skip(struct parsing *p, const char *what)
{
    bool is_there = looking_at(p, what);
    p->at += is_there ? strlen(what) : 0;
    return is_there;
}

/* The character at p->at, which is passed. */
static bool next_character(struct parsing *p, uint32_t *out, enum td_status *s)
{
    utf8proc_int32_t c;
    if (p->at >= p->len)
        return fail(p, s, TD_ERR_INVALID, "it ends too early");
    utf8proc_ssize_t n =
        utf8proc_iterate((const utf8proc_uint8_t *)p->text + p->at, (utf8proc_ssize_t)(p->len - p->at), &c);
    if (n < 1)
        return fail(p, s, TD_ERR_INVALID, "not UTF-8");
    p->at += (size_t)n;
    *out = (uint32_t)c;
    return true;
}

static bool hex_digits(struct parsing *p, uint32_t least, uint32_t most, uint32_t *out, enum td_status *s)
{
    uint32_t n = 0, v = 0;
    for (; n < most && p->at < p->len; n++, p->at++) {
        char c = p->text[p->at] | 0x20;
        if (p->text[p->at] >= '0' && p->text[p->at] <= '9')
            v = v * 16 + (uint32_t)(p->text[p->at] - '0');
        else if (c >= 'a' && c <= 'f')
            v = v * 16 + (uint32_t)(c - 'a' + 10);
        else
            break;
    }
    *out = v;
    if (n < least || v > LAST)
        return fail(p, s, TD_ERR_INVALID, "wrong number in hexadecimal");
    return true;
}

/* Runs of characters of one general category, of all characters: made once, since that takes a hundredth of a
 * second. */
static struct run {
    struct gr_span span;
    const char *category;
} * runs;
static uint32_t n_runs;
static pthread_once_t runs_once = PTHREAD_ONCE_INIT;

static void make_runs(void)
{
    uint32_t cap = 0;
    for (uint32_t c = 0; c <= LAST; c++) {
        const char *category = utf8proc_category_string((utf8proc_int32_t)c);
        if (n_runs && !strcmp(runs[n_runs - 1].category, category)) {
            runs[n_runs - 1].span.last = c;
        } else {
            runs = MEM_ROOM(runs, n_runs, cap, 4096);
            runs[n_runs++] = (struct run){{c, c}, category};
        }
    }
}

/* Names of general categories: one letter for a group, two for one of them. */
static struct gr_node *category(struct gr_tree *t, const char *name, size_t len)
{
    pthread_once(&runs_once, make_runs);
    struct gr_span *spans = mem_array(n_runs, sizeof(*spans));
    uint32_t n = 0;
    for (uint32_t i = 0; i < n_runs; i++)
        if (!strncmp(runs[i].category, name, len))
            spans[n++] = runs[i].span;
    struct gr_node *node = n ? gr_node_class(t, spans, n) : NULL;
    free(spans);
    return node;
}

static bool parse_category(struct parsing *p, bool is_rest, struct gr_node **out, enum td_status *s)
{
    const char *close = p->at < p->len && p->text[p->at] == '{' ? memchr(p->text + p->at, '}', p->len - p->at) : NULL;
    size_t n = close ? (size_t)(close - p->text) - p->at - 1 : 0;
    *out = n == 1 || n == 2 ? category(p->t, p->text + p->at + 1, n) : NULL;
    if (!*out)
        return fail(p, s, TD_ERR_UNSUPPORTED, "\\p is only for general categories, such as \\p{L} or \\p{Lu}");
    if (is_rest)
        *out = class_of_rest(p->t, *out);
    p->at += n + 2;
    return true;
}

/* \d, \w, \s and what is not; NULL: another letter. */
static struct gr_node *shorthand(struct gr_tree *t, char c)
{
    static const struct gr_span DIGITS[] = {{'0', '9'}}, WORD[] = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}},
                                SPACE[] = {{9, 13},          {' ', ' '},       {0xa0, 0xa0},     {0x1680, 0x1680},
                                           {0x2000, 0x200a}, {0x2028, 0x2029}, {0x202f, 0x202f}, {0x205f, 0x205f},
                                           {0x3000, 0x3000}, {0xfeff, 0xfeff}};
    struct gr_node *n = (c | 0x20) == 'd'   ? gr_node_class(t, DIGITS, 1)
                        : (c | 0x20) == 'w' ? gr_node_class(t, WORD, 4)
                        : (c | 0x20) == 's' ? gr_node_class(t, SPACE, 10)
                                            : NULL;
    return n && c < 'a' ? class_of_rest(t, n) : n;
}

/* What follows a backslash: a class. */
static bool parse_escape(struct parsing *p, struct gr_node **out, enum td_status *s)
{
    static const char LETTERS[] = "nrtfv0", CONTROLS[] = "\n\r\t\f\v";
    uint32_t c;
    if (!next_character(p, &c, s))
        return false;
    if (c < 0x80 && (*out = shorthand(p->t, (char)c)))
        return true;
    if (c == 'p' || c == 'P')
        return parse_category(p, c == 'P', out, s);
    if (c == 'b' || c == 'B')
        return fail(p, s, TD_ERR_UNSUPPORTED, "\\b is not supported");
    if ((c >= '1' && c <= '9') || c == 'k')
        return fail(p, s, TD_ERR_UNSUPPORTED, "back references are not supported");
    if (c == 'x' && !hex_digits(p, 2, 2, &c, s))
        return false;
    if (c == 'u' && skip(p, "{")) {
        if (!hex_digits(p, 1, 6, &c, s))
            return false;
        if (!skip(p, "}"))
            return fail(p, s, TD_ERR_INVALID, "} is missing");
    } else if (c == 'u' && !hex_digits(p, 4, 4, &c, s)) {
        return false;
    } else if (c < 0x80 && c && strchr(LETTERS, (int)c)) {
        c = (uint32_t)CONTROLS[strchr(LETTERS, (int)c) - LETTERS];
    }
    *out = class_of(p->t, c, c);
    return true;
}

/* One member of a class: a character, or a class of several. */
static bool parse_member(struct parsing *p, struct gr_node **out, enum td_status *s)
{
    uint32_t c;
    if (skip(p, "\\b")) {
        *out = class_of(p->t, '\b', '\b');
        return true;
    }
    if (skip(p, "\\"))
        return parse_escape(p, out, s);
    if (!next_character(p, &c, s))
        return false;
    *out = class_of(p->t, c, c);
    return true;
}

static bool is_one(const struct gr_node *c)
{
    return c->n_spans == 1 && c->spans[0].first == c->spans[0].last;
}

/* Behind the opening bracket. */
static bool parse_class(struct parsing *p, struct gr_node **out, enum td_status *s)
{
    bool is_rest = skip(p, "^"), is_good = true;
    struct gr_span *spans = NULL;
    uint32_t n = 0, cap = 0;
    while (is_good && !skip(p, "]")) {
        struct gr_node *first, *last;
        is_good = parse_member(p, &first, s);
        if (is_good && is_one(first) && looking_at(p, "-") && p->at + 1 < p->len && p->text[p->at + 1] != ']') {
            p->at++;
            is_good = parse_member(p, &last, s);
            if (is_good && (!is_one(last) || last->spans[0].first < first->spans[0].first))
                is_good = fail(p, s, TD_ERR_INVALID, "the range of a class is wrong");
            if (is_good)
                first = class_of(p->t, first->spans[0].first, last->spans[0].first);
        }
        for (uint32_t i = 0; is_good && i < first->n_spans; i++) {
            spans = MEM_ROOM(spans, n, cap, 16);
            spans[n++] = first->spans[i];
        }
    }
    if (is_good)
        *out = gr_node_class(p->t, spans, n);
    if (is_good && is_rest)
        *out = class_of_rest(p->t, *out);
    free(spans);
    return is_good;
}

static bool parse_alternatives(struct parsing *p, struct gr_node **out, enum td_status *s);

static bool parse_group(struct parsing *p, struct gr_node **out, enum td_status *s)
{
    bool begins = p->begins, ends = p->ends;
    if (looking_at(p, "?=") || looking_at(p, "?!") || looking_at(p, "?<=") || looking_at(p, "?<!"))
        return fail(p, s, TD_ERR_UNSUPPORTED, "looking ahead or behind is not supported");
    if (skip(p, "?<")) {
        while (p->at < p->len && p->text[p->at] != '>')
            p->at++;
        if (!skip(p, ">"))
            return fail(p, s, TD_ERR_INVALID, "the name of a group does not end");
    } else if (looking_at(p, "?") && !skip(p, "?:")) {
        return fail(p, s, TD_ERR_UNSUPPORTED, "flags of groups are not supported");
    }
    if (++p->depth > DEPTH_MOST)
        return fail(p, s, TD_ERR_NO_SPACE, "groups are nested too deeply");
    if (!parse_alternatives(p, out, s))
        return false;
    if (p->begins || p->ends)
        return fail(p, s, TD_ERR_UNSUPPORTED, "^ and $ are not supported within a group");
    p->begins = begins;
    p->ends = ends;
    p->depth--;
    return skip(p, ")") || fail(p, s, TD_ERR_INVALID, ") is missing");
}

static bool parse_atom(struct parsing *p, struct gr_node **out, enum td_status *s)
{
    static const struct gr_span LINE_ENDS[] = {{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};
    uint32_t c;
    if (skip(p, "("))
        return parse_group(p, out, s);
    if (skip(p, "["))
        return parse_class(p, out, s);
    if (skip(p, "\\"))
        return parse_escape(p, out, s);
    if (skip(p, ".")) {
        *out = class_of_rest(p->t, gr_node_class(p->t, LINE_ENDS, 3));
        return true;
    }
    if (looking_at(p, "*") || looking_at(p, "+") || looking_at(p, "?"))
        return fail(p, s, TD_ERR_INVALID, "there is nothing to repeat");
    if (!next_character(p, &c, s))
        return false;
    *out = class_of(p->t, c, c);
    return true;
}

static bool number(struct parsing *p, uint32_t *out)
{
    size_t from = p->at;
    for (*out = 0; p->at < p->len && p->text[p->at] >= '0' && p->text[p->at] <= '9' && *out <= TIMES_MOST; p->at++)
        *out = *out * 10 + (uint32_t)(p->text[p->at] - '0');
    return p->at > from;
}

/* {n}, {n,}, {n,m} at p->at; anything else is a brace like other characters. */
static bool parse_counts(struct parsing *p, uint32_t *least, uint32_t *most)
{
    size_t from = p->at;
    bool is_good = skip(p, "{") && number(p, least);
    *most = *least;
    if (is_good && skip(p, ",") && !number(p, most))
        *most = UINT32_MAX;
    is_good = is_good && skip(p, "}");
    p->at = is_good ? p->at : from;
    return is_good;
}

static bool parse_times(struct parsing *p, struct gr_node **node, enum td_status *s)
{
    uint32_t least, most;
    if (skip(p, "*"))
        least = 0, most = UINT32_MAX;
    else if (skip(p, "+"))
        least = 1, most = UINT32_MAX;
    else if (skip(p, "?"))
        least = 0, most = 1;
    else if (!parse_counts(p, &least, &most))
        return true;
    skip(p, "?");
    if (least > TIMES_MOST || (most != UINT32_MAX && (most > TIMES_MOST || most < least)))
        return fail(p, s, TD_ERR_INVALID, "a count is too large, or the wrong way round");
    *node = gr_node_times(p->t, *node, least, most);
    return true;
}

/* One alternative: pieces up to | or ). */
static bool parse_pieces(struct parsing *p, struct gr_node **out, enum td_status *s)
{
    *out = NULL;
    p->begins = skip(p, "^");
    p->ends = false;
    while (p->at < p->len && p->text[p->at] != '|' && p->text[p->at] != ')') {
        struct gr_node *n = NULL;
        if (skip(p, "$")) {
            p->ends = true;
            if (p->at < p->len && p->text[p->at] != '|' && p->text[p->at] != ')')
                return fail(p, s, TD_ERR_UNSUPPORTED, "$ is only supported at the end");
            return true;
        }
        if (looking_at(p, "^"))
            return fail(p, s, TD_ERR_UNSUPPORTED, "^ is only supported at the beginning");
        if (!parse_atom(p, &n, s) || !parse_times(p, &n, s))
            return false;
        *out = gr_node_cat(p->t, *out, n);
    }
    return true;
}

static bool parse_alternatives(struct parsing *p, struct gr_node **out, enum td_status *s)
{
    bool begins, ends;
    if (!parse_pieces(p, out, s))
        return false;
    begins = p->begins;
    ends = p->ends;
    while (skip(p, "|")) {
        struct gr_node *other;
        if (!parse_pieces(p, &other, s))
            return false;
        if (p->depth && (p->begins || p->ends))
            return fail(p, s, TD_ERR_UNSUPPORTED, "^ and $ are not supported within a group");
        *out = gr_node_alt(p->t, *out, other);
    }
    p->begins = begins;
    p->ends = ends;
    return true;
}

struct alternatives {
    struct gr_node *node; /* NULL: the empty text, or none */
    bool has_any;
};

static void add_alternative(struct gr_tree *t, struct alternatives *a, struct gr_node *n)
{
    a->node = a->has_any ? gr_node_alt(t, a->node, n) : n;
    a->has_any = true;
}

/* The whole text: each alternative may be found anywhere, but where ^ and $ say otherwise. Those that may are
 * looked for together, as one place of masks. */
static bool parse_whole(struct parsing *p, bool is_search, struct gr_node **out, enum td_status *s)
{
    struct alternatives anywhere = {0}, all = {0};
    do {
        struct gr_node *n;
        if (!parse_pieces(p, &n, s))
            return false;
        if (is_search && !p->ends)
            n = gr_node_cat(p->t, n, gr_node_times(p->t, class_of(p->t, 0, LAST), 0, UINT32_MAX));
        add_alternative(p->t, is_search && !p->begins ? &anywhere : &all, n);
    } while (skip(p, "|"));
    if (anywhere.has_any) {
        struct gr_node *before = gr_node_times(p->t, class_of(p->t, 0, LAST), 0, UINT32_MAX);
        add_alternative(p->t, &all, gr_node_cat(p->t, before, anywhere.node));
    }
    *out = all.node;
    return p->at == p->len || fail(p, s, TD_ERR_INVALID, ") is not opened");
}

enum td_status gr_parse_pattern(struct gr_tree *t, const char *text, size_t len, bool is_search, struct gr_node **out,
                                struct td_error *e)
{
    struct parsing p = {.t = t, .text = text, .len = len, .e = e};
    enum td_status s = TD_OK;
    parse_whole(&p, is_search, out, &s);
    return s;
}

enum td_status gr_parse_class(struct gr_tree *t, const char *text, size_t len, size_t *at, struct gr_node **out,
                              struct td_error *e)
{
    struct parsing p = {.t = t, .text = text, .len = len, .at = *at + 1, .e = e};
    enum td_status s = TD_OK;
    parse_class(&p, out, &s);
    *at = p.at;
    return s;
}

/* ------------------------------------------------------------------- emitting */

/*
 * Characters are written with digits: the bytes of UTF-8, or four digits in hexadecimal. A range of
 * characters is cut into products of ranges of digits, as RE2 and others do: [1a5, 3b7] is 1a[5-f],
 * 1[b-f][0-f], 2[0-f][0-f], 3[0-a][0-f], 3b[0-7]. Two products of the same class have equal or separate
 * ranges at the first place where they differ, so that a tree of them decides each byte at once.
 */
enum { DIGITS_MOST = 4 };
struct product {
    struct gr_span digits[DIGITS_MOST];
    uint32_t n;
};
struct products {
    struct product *list;
    uint32_t n, cap;
    uint8_t lead; /* what the first byte of UTF-8 has besides its bits, and the others have 0x80 */
    bool is_hex;
};

static void products_add(struct products *l, const struct gr_span *digits, uint32_t n)
{
    l->list = MEM_ROOM(l->list, l->n, l->cap, 16);
    struct product *p = &l->list[l->n++];
    *p = (struct product){.n = n};
    for (uint32_t i = 0; i < n; i++) {
        uint32_t more = l->is_hex ? 0 : i ? 0x80 : l->lead;
        p->digits[i] = (struct gr_span){digits[i].first | more, digits[i].last | more};
    }
}

/* Digit k of n of a number in base 2^bits, the most significant first. */
static uint32_t digit(uint32_t v, uint32_t n, uint32_t k, uint32_t bits)
{
    return v >> (n - 1 - k) * bits & ((1u << bits) - 1);
}

/* Cuts [first, last], numbers of n digits whose first k are in `digits` already. */
static void cut_digits(struct products *l, uint32_t first, uint32_t last, uint32_t n, uint32_t k, uint32_t bits,
                       struct gr_span *digits)
{
    uint32_t top = (1u << bits) - 1, low = (1u << (n - 1 - k) * bits) - 1;
    uint32_t a = digit(first, n, k, bits), b = digit(last, n, k, bits);
    if (k + 1 == n || (!(first & low) && (last & low) == low)) { /* all numbers that begin so */
        digits[k] = (struct gr_span){a, b};
        for (uint32_t i = k + 1; i < n; i++)
            digits[i] = (struct gr_span){0, top};
        products_add(l, digits, n);
        return;
    }
    if (a == b) {
        digits[k] = (struct gr_span){a, a};
        cut_digits(l, first & low, last & low, n, k + 1, bits, digits);
        return;
    }
    if (first & low) { /* of the first digit only the higher ones */
        digits[k] = (struct gr_span){a, a};
        cut_digits(l, first & low, low, n, k + 1, bits, digits);
        first = (first | low) + 1;
    }
    uint32_t whole = (last & low) == low ? last : (last & ~low) - 1; /* and of the last one only the lower ones */
    if (first <= whole && whole <= last)
        cut_digits(l, first, whole, n, k, bits, digits);
    if (whole != last) {
        digits[k] = (struct gr_span){b, b};
        cut_digits(l, 0, last & low, n, k + 1, bits, digits);
    }
}

static int by_digits(const void *a, const void *b)
{
    const struct product *x = a, *y = b;
    for (uint32_t i = 0; i < x->n && i < y->n; i++)
        if (x->digits[i].first != y->digits[i].first)
            return x->digits[i].first < y->digits[i].first ? -1 : 1;
    return 0;
}

/* Adds the bytes of a range of digits. */
static uint32_t digit_bytes(struct gr_range *out, struct gr_span d, bool is_hex, uint32_t next)
{
    uint32_t n = 0, first = d.first > 10 ? d.first : 10;
    if (!is_hex) {
        out[n++] = (struct gr_range){(uint8_t)d.first, (uint8_t)d.last, next};
        return n;
    }
    if (d.first < 10)
        out[n++] = (struct gr_range){(uint8_t)('0' + d.first), (uint8_t)('0' + (d.last < 9 ? d.last : 9)), next};
    if (d.last >= 10) {
        out[n++] = (struct gr_range){(uint8_t)('A' + first - 10), (uint8_t)('A' + d.last - 10), next};
        out[n++] = (struct gr_range){(uint8_t)('a' + first - 10), (uint8_t)('a' + d.last - 10), next};
    }
    return n;
}

/* The ranges of the products' digits from k on, each leading to the tree of the digits behind it. They are
 * sorted. Returns how many; out has room for 256. */
static uint32_t tree(struct gr_program *p, const struct product *list, uint32_t n, uint32_t k, bool is_hex,
                     uint32_t next, struct gr_range *out)
{
    uint32_t n_out = 0;
    for (uint32_t i = 0; i < n;) {
        uint32_t from = i, to = next;
        while (i < n && list[i].digits[k].first == list[from].digits[k].first)
            i++;
        if (k + 1 < list[from].n && k + 1 < DIGITS_MOST) {
            struct gr_range below[256];
            uint32_t n_below = tree(p, list + from, i - from, k + 1, is_hex, next, below);
            to = gr_bytes(p, below, n_below);
        }
        n_out += digit_bytes(out + n_out, list[from].digits[k], is_hex, to);
    }
    return n_out;
}

/* Adds the characters of a span as UTF-8; surrogates are none. */
static void add_span(struct products *l, struct gr_span span)
{
    static const struct {
        uint32_t first, last;
        uint8_t lead, n;
    } LENGTHS[] = {{0, 0x7f, 0, 1},
                   {0x80, 0x7ff, 0xc0, 2},
                   {0x800, 0xd7ff, 0xe0, 3},
                   {0xe000, 0xffff, 0xe0, 3},
                   {0x10000, LAST, 0xf0, 4}};
    for (size_t i = 0; i < sizeof(LENGTHS) / sizeof(LENGTHS[0]); i++) {
        struct gr_span s = {span.first > LENGTHS[i].first ? span.first : LENGTHS[i].first,
                            span.last < LENGTHS[i].last ? span.last : LENGTHS[i].last},
                       digits[DIGITS_MOST];
        l->lead = LENGTHS[i].lead;
        if (s.first <= s.last && LENGTHS[i].n == 1)
            products_add(l, &s, 1);
        else if (s.first <= s.last)
            cut_digits(l, s.first, s.last, LENGTHS[i].n, 0, 6, digits);
    }
}

uint32_t gr_four_digits(struct gr_program *p, const struct gr_span *spans, uint32_t n, uint32_t next)
{
    struct products l = {.is_hex = true};
    struct gr_span digits[4];
    struct gr_range ranges[256];
    for (uint32_t i = 0; i < n; i++)
        cut_digits(&l, spans[i].first, spans[i].last, 4, 0, 4, digits);
    qsort(l.list, l.n, sizeof(*l.list), by_digits);
    uint32_t n_ranges = tree(p, l.list, l.n, 0, true, next, ranges);
    free(l.list);
    return gr_bytes(p, ranges, n_ranges);
}

/* \uD83D\uDE00: all characters beyond 0xffff, or none: a class that has some of them has them as UTF-8. */
static uint32_t pair(struct gr_program *p, uint32_t next)
{
    const struct gr_span high = {0xd800, 0xdbff}, low = {0xdc00, 0xdfff};
    return gr_four_digits(p, &high, 1, gr_text(p, "\\u", 2, gr_four_digits(p, &low, 1, next)));
}

static bool has(const struct gr_node *c, uint32_t first, uint32_t last)
{
    for (uint32_t i = 0; i < c->n_spans; i++)
        if (c->spans[i].first <= first && last <= c->spans[i].last)
            return true;
    return false;
}

/* What follows the backslash of an escape that stands for a character of the class. */
static uint32_t emit_escapes(struct gr_program *p, const struct gr_node *c, uint32_t next)
{
    static const char LETTERS[] = "\"\\/bfnrt", MEANT[] = "\"\\/\b\f\n\r\t";
    struct gr_span *spans = mem_array(2 * (size_t)c->n_spans + 1, sizeof(*spans));
    struct gr_range ranges[16];
    uint32_t n = 0, n_ranges = 0, states[2], n_states = 0;
    for (int i = 0; LETTERS[i]; i++)
        if (has(c, (uint8_t)MEANT[i], (uint8_t)MEANT[i]))
            ranges[n_ranges++] = (struct gr_range){(uint8_t)LETTERS[i], (uint8_t)LETTERS[i], next};
    for (uint32_t i = 0; i < c->n_spans; i++) {
        struct gr_span s = c->spans[i];
        if (s.first <= 0xd7ff)
            spans[n++] = (struct gr_span){s.first, s.last < 0xd7ff ? s.last : 0xd7ff};
        if (s.last >= 0xe000 && s.first <= 0xffff)
            spans[n++] = (struct gr_span){s.first > 0xe000 ? s.first : 0xe000, s.last < 0xffff ? s.last : 0xffff};
    }
    if (n)
        states[n_states++] = gr_four_digits(p, spans, n, next);
    if (has(c, 0x10000, LAST))
        states[n_states++] = pair(p, next);
    if (n_states)
        ranges[n_ranges++] = (struct gr_range){'u', 'u', gr_split(p, states, n_states)};
    free(spans);
    return gr_bytes(p, ranges, n_ranges);
}

static uint32_t emit_class(struct gr_program *p, const struct gr_node *c, enum gr_domain domain, uint32_t next)
{
    /* Characters that a JSON string has as they are: all but controls, the quote and the backslash. */
    static const struct gr_span PLAIN[] = {{0x20, 0x21}, {0x23, 0x5b}, {0x5d, LAST}};
    struct products l = {0};
    struct gr_range ranges[256];
    for (uint32_t i = 0; i < c->n_spans; i++)
        for (int k = 0; k < (domain == GR_RAW ? 1 : 3); k++) {
            struct gr_span s = c->spans[i];
            if (domain == GR_IN_STRING) {
                s.first = s.first > PLAIN[k].first ? s.first : PLAIN[k].first;
                s.last = s.last < PLAIN[k].last ? s.last : PLAIN[k].last;
            }
            if (s.first <= s.last)
                add_span(&l, s);
        }
    if (l.n)
        qsort(l.list, l.n, sizeof(*l.list), by_digits);
    uint32_t n = tree(p, l.list, l.n, 0, false, next, ranges);
    free(l.list);
    if (domain == GR_IN_STRING && c->n_spans)
        ranges[n++] = (struct gr_range){'\\', '\\', emit_escapes(p, c, next)};
    return gr_bytes(p, ranges, n);
}

/* -------------------------------------------------------------------- all of it */

static uint32_t emit_loop(struct gr_program *p, const struct gr_node *a, enum gr_domain domain, uint32_t next)
{
    uint32_t later = gr_later(p), loop = gr_either(p, gr_emit(p, a, domain, later), next);
    gr_become(p, later, loop);
    return loop;
}

/* Whether the node repeats any character, down to the end of a string. */
static bool is_length(const struct gr_program *p, const struct gr_node *n, enum gr_domain domain, uint32_t next)
{
    bool is_any = n->a && n->a->kind == NODE_CLASS && has(n->a, 0, LAST);
    return is_any && domain == GR_IN_STRING && next == p->strings.end && next != GR_END;
}

static uint32_t emit_length(struct gr_program *p, uint32_t least, uint32_t most)
{
    const struct gr_strings *s = &p->strings;
    uint32_t next = most == UINT32_MAX ? s->rest : s->end;
    if (most != UINT32_MAX && most > least)
        next = gr_call(p, gr_repeat(p, s->character, 0, most - least), false, next);
    return least ? gr_call(p, gr_repeat(p, s->character, least, least), false, next) : next;
}

static uint32_t emit_times(struct gr_program *p, const struct gr_node *n, enum gr_domain domain, uint32_t next)
{
    if (is_length(p, n, domain, next))
        return emit_length(p, n->least, n->most);
    if (n->least > UNROLL_MOST || (n->most != UINT32_MAX && n->most > UNROLL_MOST))
        return gr_call(p, gr_repeat(p, gr_emit(p, n->a, domain, GR_END), n->least, n->most), false, next);
    uint32_t end = next;
    if (n->most == UINT32_MAX)
        next = emit_loop(p, n->a, domain, next);
    for (uint32_t i = n->most; n->most != UINT32_MAX && i > n->least; i--)
        next = gr_either(p, gr_emit(p, n->a, domain, next), end); /* (a(a)?)? */
    for (uint32_t i = 0; i < n->least; i++)
        next = gr_emit(p, n->a, domain, next);
    return next;
}

uint32_t gr_emit(struct gr_program *p, const struct gr_node *n, enum gr_domain domain, uint32_t next)
{
    if (p->is_full)
        return GR_END;
    for (; n && n->kind == NODE_CAT; n = n->a)
        next = gr_emit(p, n->b, domain, next);
    if (!n)
        return next;
    switch (n->kind) {
    case NODE_CLASS:
        return emit_class(p, n, domain, next);
    case NODE_ALT: { /* (((a|b)|c)|d), of which there may be many: not by calling itself */
        uint32_t others = gr_emit(p, n->b, domain, next);
        for (n = n->a; n && n->kind == NODE_ALT; n = n->a)
            others = gr_either(p, gr_emit(p, n->b, domain, next), others);
        return gr_either(p, gr_emit(p, n, domain, next), others);
    }
    case NODE_TIMES:
        return emit_times(p, n, domain, next);
    case NODE_RULE:
        return gr_call(p, n->rule, true, next);
    case NODE_CAT:
        break;
    }
    return next;
}
