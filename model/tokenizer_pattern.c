/*
 * Expressions of tokenizer.json, by PCRE2. The library that defines what they mean uses Oniguruma in Ruby's syntax, so before
 * compiling, what both read differently is rewritten:
 *
 *   \s \S            Unicode's White_Space (PCRE2 would add U+180E)
 *   \w \W \b \B      by letters, marks, decimal digits and connectors (PCRE2: letters, numbers and _)
 *   \h \H            hexadecimal digits
 *   ^ $              at every line
 *   X{n,m}+          repeated again, not possessive
 *
 * and what PCRE2 has no word for is refused: classes in classes, and their intersections.
 */
#include <stdlib.h>
#include <string.h>

#include "model/tokenizer_internal.h"

enum { JIT_STACK_BYTES = 16 << 20, MATCH_LIMIT = 200 * 1000 * 1000 };

#define WORD         "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}"
#define AFTER_WORD   "(?<=[" WORD "])"
#define AFTER_OTHER  "(?<![" WORD "])"
#define BEFORE_WORD  "(?=[" WORD "])"
#define BEFORE_OTHER "(?![" WORD "])"

void matcher_init(struct matcher *m)
{
    m->match = pcre2_match_data_create(8, NULL);
    m->context = pcre2_match_context_create(NULL);
    m->stack = pcre2_jit_stack_create(64 << 10, JIT_STACK_BYTES, NULL);
    pcre2_jit_stack_assign(m->context, NULL, m->stack);
    pcre2_set_match_limit(m->context, MATCH_LIMIT);
}

void matcher_fini(struct matcher *m)
{
    pcre2_jit_stack_free(m->stack);
    pcre2_match_context_free(m->context);
    pcre2_match_data_free(m->match);
}

/* An escape; returns its length. */
static size_t rewrite_escape(const char *p, size_t left, bool in_class, struct bytes *out, const char **refused)
{
    static const struct {
        char letter;
        const char *outside, *inside;
    } ESCAPES[] = {{'s', "\\p{White_Space}", "\\p{White_Space}"},
                   {'S', "\\P{White_Space}", "\\P{White_Space}"},
                   {'w', "[" WORD "]", WORD},
                   {'W', "[^" WORD "]", NULL},
                   {'b', "(?:" AFTER_WORD BEFORE_OTHER "|" AFTER_OTHER BEFORE_WORD ")", "\\x08"},
                   {'B', "(?:" AFTER_WORD BEFORE_WORD "|" AFTER_OTHER BEFORE_OTHER ")", NULL},
                   {'h', "[0-9a-fA-F]", "0-9a-fA-F"},
                   {'H', "[^0-9a-fA-F]", NULL}};
    if (left < 2)
        return bytes_append(out, p, left), left;
    for (size_t i = 0; i < sizeof(ESCAPES) / sizeof(ESCAPES[0]); i++)
        if (ESCAPES[i].letter == p[1]) {
            const char *text = in_class ? ESCAPES[i].inside : ESCAPES[i].outside;
            if (!text)
                *refused = "\\W, \\H or \\B in a class";
            else
                bytes_append(out, text, strlen(text));
            return 2;
        }
    bytes_append(out, p, 2);
    return 2;
}

/* A class from its [ to its ]; returns its length. */
static size_t rewrite_class(const char *p, size_t left, struct bytes *out, const char **refused)
{
    size_t i = 1;
    bytes_append(out, p, 1);
    if (i < left && p[i] == '^')
        bytes_append(out, &p[i++], 1);
    if (i < left && p[i] == ']') /* a first one stands for itself */
        bytes_append(out, "\\]", 2), i++;
    while (i < left && p[i] != ']') {
        if (p[i] == '\\') {
            i += rewrite_escape(p + i, left - i, true, out, refused);
            continue;
        }
        bool posix = p[i] == '[' && i + 1 < left && p[i + 1] == ':';
        if (p[i] == '[' && !posix)
            *refused = "a class in a class";
        if (p[i] == '&' && i + 1 < left && p[i + 1] == '&')
            *refused = "an intersection of classes";
        if (posix) { /* up to its own ] */
            const char *end = memmem(p + i, left - i, ":]", 2);
            size_t n = end ? (size_t)(end - p) + 2 - i : 1;
            bytes_append(out, p + i, n);
            i += n;
        } else {
            bytes_append(out, &p[i++], 1);
        }
    }
    if (i < left)
        bytes_append(out, &p[i++], 1);
    return i;
}

static const char *rewrite(struct slice in, struct bytes *out)
{
    const char *refused = NULL;
    size_t brace = SIZE_MAX; /* where the last {..} began, if it ended just here */
    for (size_t i = 0; i < in.len && !refused;) {
        char c = in.data[i];
        bool counted = i && in.data[i - 1] == '}' && brace != SIZE_MAX;
        if (c == '\\') {
            i += rewrite_escape(in.data + i, in.len - i, false, out, &refused);
        } else if (c == '[') {
            i += rewrite_class(in.data + i, in.len - i, out, &refused);
        } else if (c == '+' && counted) {
            refused = "{n,m} followed by +";
        } else {
            if (c == '{' && i + 1 < in.len && in.data[i + 1] >= '0' && in.data[i + 1] <= '9')
                brace = i;
            else if (c != '}' && c != ',' && (c < '0' || c > '9'))
                brace = SIZE_MAX;
            bytes_append(out, &c, 1);
            i++;
        }
    }
    return refused;
}

enum td_status pattern_compile(struct slice expression, struct pattern *out, struct td_error *e)
{
    struct bytes ours = {0};
    char text[100] = "";
    int code = 0;
    size_t at = 0;
    const char *refused = rewrite(expression, &ours);
    pcre2_code *re = NULL;
    if (!refused)
        re = pcre2_compile((PCRE2_SPTR)(ours.data ? ours.data : ""), ours.len,
                           PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &code, &at, NULL);
    bytes_free(&ours);
    if (!refused && !re)
        pcre2_get_error_message(code, (PCRE2_UCHAR *)text, sizeof(text));
    if (!re)
        return td_fail(e, TD_ERR_UNSUPPORTED, "expression '%.80s': %s", expression.data, refused ? refused : text);
    pcre2_jit_compile(re, PCRE2_JIT_COMPLETE); /* optional: matching works without */
    size_t jit = 0;
    pcre2_pattern_info(re, PCRE2_INFO_JITSIZE, &jit);
    *out = (struct pattern){.code = re, .jit = jit > 0};
    return TD_OK;
}

void pattern_free(struct pattern *p)
{
    pcre2_code_free(p->code);
}

static bool find(const struct pattern *p, struct matcher *m, struct slice text, struct scan *s)
{
    if (!p->code) {
        const char *hit = memmem(text.data + s->from, text.len - s->from, p->literal.data, p->literal.len);
        s->begin = hit ? (size_t)(hit - text.data) : 0;
        s->end = s->begin + p->literal.len;
        return hit != NULL;
    }
    int n = p->jit ? pcre2_jit_match(p->code, (PCRE2_SPTR)text.data, text.len, s->from, 0, m->match, m->context)
                   : pcre2_match(p->code, (PCRE2_SPTR)text.data, text.len, s->from, PCRE2_NO_UTF_CHECK, m->match,
                                 m->context);
    s->failed = n < 0 && n != PCRE2_ERROR_NOMATCH;
    if (n < 0)
        return false;
    const PCRE2_SIZE *v = pcre2_get_ovector_pointer(m->match);
    s->begin = v[0];
    s->end = v[1];
    return s->begin <= s->end; /* \K may turn them round */
}

bool pattern_next(const struct pattern *p, struct matcher *m, struct slice text, struct scan *s)
{
    while (s->from <= text.len) {
        if (!find(p, m, text, s))
            return false;
        if (s->begin == s->end && s->any && s->end == s->last_end) {
            s->from += s->from < text.len ? char_len((unsigned char)text.data[s->from]) : 1;
            continue;
        }
        s->from = s->last_end = s->end;
        s->any = true;
        return true;
    }
    return false;
}
