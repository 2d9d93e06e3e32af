/*
 * Source to tokens, as Jinja's lexer does it with trim_blocks and lstrip_blocks: the line feed after a
 * statement or comment is dropped, and so are blanks before a statement or comment that begins a line. A -
 * next to a delimiter drops all white space on that side, a + keeps it.
 */
#include <stdlib.h>

#include "model/template_internal.h"

struct lexer {
    struct template *t;
    const char *p;
    size_t n, at;
    uint32_t line;
    size_t line_begin;
    struct td_error *e;
    enum td_status status;
};

static enum td_status fail_at(struct lexer *l, const char *what)
{
    if (!l->status)
        l->status = td_fail(l->e, TD_ERR_CORRUPT, "line %u, column %zu: %s", l->line, l->at - l->line_begin + 1, what);
    return l->status;
}

static void advance(struct lexer *l, size_t n)
{
    for (; n; n--, l->at++)
        if (l->p[l->at] == '\n') {
            l->line++;
            l->line_begin = l->at + 1;
        }
}

static struct token *push_token(struct lexer *l, enum token_kind kind)
{
    struct template *t = l->t;
    t->tokens = MEM_ROOM(t->tokens, t->n_tokens, t->cap_tokens, 256);
    struct token *k = &t->tokens[t->n_tokens++];
    *k = (struct token){.kind = kind, .line = l->line, .column = (uint32_t)(l->at - l->line_begin + 1)};
    return k;
}

static bool space(char c)
{
    return c == ' ' || (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x1f);
}

static bool looking_at(const struct lexer *l, const char *text)
{
    size_t n = strlen(text);
    return l->n - l->at >= n && !memcmp(l->p + l->at, text, n);
}

/* ------------------------------------------------------------------- text */

static const char *next_tag(const struct lexer *l)
{
    for (size_t i = l->at; i + 1 < l->n; i++)
        if (l->p[i] == '{' && (l->p[i + 1] == '{' || l->p[i + 1] == '%' || l->p[i + 1] == '#'))
            return l->p + i;
    return NULL;
}

/*
 * Emits the text up to the tag at end, without the white space that the tag drops. line_start: the text
 * begins a line.
 */
static void lex_text(struct lexer *l, const char *end, bool line_start)
{
    size_t n = (end ? (size_t)(end - l->p) : l->n) - l->at, keep = n;
    const char *text = l->p + l->at;
    char sign = end && end + 2 < l->p + l->n ? end[2] : 0;
    if (sign == '-') {
        while (keep && space(text[keep - 1]))
            keep--;
    } else if (end && sign != '+' && end[1] != '{') {
        size_t line = n;
        while (line && text[line - 1] != '\n')
            line--;
        size_t i = line;
        while (i < n && space(text[i]))
            i++;
        if (i == n && (line || line_start))
            keep = line;
    }
    if (keep) {
        struct token *k = push_token(l, T_TEXT);
        k->text = arena_str(&l->t->arena, text, keep);
    }
    advance(l, n);
}

/*
 * Skips a closing delimiter of n bytes and the white space that it drops. sign: the - or + before it, if any.
 * Returns whether a line begins there.
 */
static bool skip_end(struct lexer *l, size_t n, char sign, bool trim)
{
    advance(l, n);
    size_t before = l->at;
    if (sign == '-')
        while (l->at < l->n && space(l->p[l->at]))
            advance(l, 1);
    else if (sign != '+' && trim && l->at < l->n && l->p[l->at] == '\n')
        advance(l, 1);
    return l->at > before && l->p[l->at - 1] == '\n';
}

static bool lex_comment(struct lexer *l)
{
    const char *end = memmem(l->p + l->at + 2, l->n - l->at - 2, "#}", 2);
    if (!end) {
        fail_at(l, "the comment has no end");
        return false;
    }
    char sign = end > l->p + l->at + 2 ? end[-1] : 0;
    return skip_end(l, (size_t)(end - l->p) - l->at + 2, sign, true);
}

/* ------------------------------------------------------------- expressions */

static void put_codepoint(struct bytes *b, uint32_t c)
{
    char u[4];
    if (c < 0x80) {
        u[0] = (char)c;
        bytes_append(b, u, 1);
    } else if (c < 0x800) {
        u[0] = (char)(0xc0 | c >> 6), u[1] = (char)(0x80 | (c & 63));
        bytes_append(b, u, 2);
    } else if (c < 0x10000) {
        u[0] = (char)(0xe0 | c >> 12), u[1] = (char)(0x80 | (c >> 6 & 63)), u[2] = (char)(0x80 | (c & 63));
        bytes_append(b, u, 3);
    } else {
        u[0] = (char)(0xf0 | c >> 18), u[1] = (char)(0x80 | (c >> 12 & 63));
        u[2] = (char)(0x80 | (c >> 6 & 63)), u[3] = (char)(0x80 | (c & 63));
        bytes_append(b, u, 4);
    }
}

/* Appends the character of a Python escape at the backslash; returns its length. */
static size_t unescape(struct lexer *l, const char *p, size_t left, struct bytes *b)
{
    static const char FROM[] = "abfnrtv\\'\"", TO[] = "\a\b\f\n\r\t\v\\'\"";
    const char *simple = left > 1 && p[1] ? strchr(FROM, p[1]) : NULL;
    if (simple) {
        bytes_append(b, &TO[simple - FROM], 1);
        return 2;
    }
    if (left > 1 && p[1] == '\n')
        return 2;
    size_t digits = left < 2 ? 0 : p[1] == 'x' ? 2 : p[1] == 'u' ? 4 : p[1] == 'U' ? 8 : 0;
    uint32_t c = 0;
    if (digits) {
        for (size_t i = 0; i < digits; i++) {
            char d = 2 + i < left ? p[2 + i] : 0;
            int v = d >= '0' && d <= '9' ? d - '0' : (d | 32) >= 'a' && (d | 32) <= 'f' ? (d | 32) - 'a' + 10 : -1;
            if (v < 0)
                return fail_at(l, "a bad escape in a text"), left;
            c = c << 4 | (uint32_t)v;
        }
        if (c > 0x10ffff || (c >= 0xd800 && c < 0xe000))
            return fail_at(l, "an escape of no character"), left;
        put_codepoint(b, c);
        return 2 + digits;
    }
    size_t n = 1;
    for (; n < 4 && n < left && p[n] >= '0' && p[n] <= '7'; n++)
        c = c * 8 + (uint32_t)(p[n] - '0');
    if (n > 1)
        put_codepoint(b, c);
    else
        bytes_append(b, p, 1); /* the backslash stands for itself */
    return n;
}

static void lex_string(struct lexer *l)
{
    char quote = l->p[l->at];
    size_t end = l->at + 1;
    while (end < l->n && l->p[end] != quote)
        end += l->p[end] == '\\' ? 2 : 1;
    if (end >= l->n) {
        fail_at(l, "the text has no end");
        return;
    }
    struct bytes b = {0};
    for (size_t i = l->at + 1; i < end;) {
        if (l->p[i] == '\\')
            i += unescape(l, l->p + i, end - i, &b);
        else
            bytes_append(&b, &l->p[i++], 1);
    }
    struct token *k = push_token(l, T_STR);
    k->text = arena_str(&l->t->arena, b.data ? b.data : "", b.len);
    bytes_free(&b);
    advance(l, end + 1 - l->at);
}

static bool name_char(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (c >= '0' && c <= '9');
}

static bool digit(char c)
{
    return c >= '0' && c <= '9';
}

static void lex_number(struct lexer *l)
{
    char text[64];
    size_t n = 0, i = l->at;
    bool real = false;
    for (; i < l->n && n < sizeof(text) - 1; i++) {
        char c = l->p[i];
        bool point = c == '.' && !real && i + 1 < l->n && digit(l->p[i + 1]);
        bool sign = (c == '+' || c == '-') && n && (text[n - 1] | 32) == 'e';
        bool exponent =
            (c | 32) == 'e' && i + 1 < l->n &&
            (digit(l->p[i + 1]) || ((l->p[i + 1] == '-' || l->p[i + 1] == '+') && i + 2 < l->n && digit(l->p[i + 2])));
        if (!digit(c) && !point && !sign && !exponent && c != '_')
            break;
        real |= point || exponent;
        if (c != '_')
            text[n++] = c;
    }
    text[n] = 0;
    if (i < l->n && name_char(l->p[i])) {
        fail_at(l, "a number runs into a name");
        return;
    }
    struct token *k = push_token(l, real ? T_FLOAT : T_INT);
    k->i = strtoll(text, NULL, 10);
    k->f = strtod(text, NULL);
    k->text = arena_str(&l->t->arena, text, n);
    advance(l, i - l->at);
}

static void lex_name(struct lexer *l)
{
    size_t end = l->at;
    while (end < l->n && name_char(l->p[end]))
        end++;
    struct token *k = push_token(l, T_NAME);
    k->text = arena_str(&l->t->arena, l->p + l->at, end - l->at);
    advance(l, end - l->at);
}

static void lex_operator(struct lexer *l, int *open)
{
    static const char *const TWO[] = {"==", "!=", "<=", ">=", "//", "**"};
    static const char ONE[] = "+-/*%~[](){}<>=.:|,;";
    size_t n = 1;
    for (size_t i = 0; i < sizeof(TWO) / sizeof(TWO[0]); i++)
        if (looking_at(l, TWO[i]))
            n = 2;
    char c = l->p[l->at];
    if (!c || !strchr(ONE, c)) {
        if (n == 1) {
            fail_at(l, "a character that means nothing here");
            return;
        }
    }
    *open += c == '(' || c == '[' || c == '{' ? 1 : c == ')' || c == ']' || c == '}' ? -1 : 0;
    struct token *k = push_token(l, T_OP);
    k->text = arena_str(&l->t->arena, l->p + l->at, n);
    advance(l, n);
}

/* Lexes the inside of {{ or {%, up to its end. Returns whether a line begins there. */
static bool lex_tag(struct lexer *l, bool block)
{
    const char *end = block ? "%}" : "}}";
    int open = 0;
    push_token(l, block ? T_BLOCK : T_VARIABLE);
    advance(l, 2);
    if (l->at < l->n && (l->p[l->at] == '-' || (block && l->p[l->at] == '+')))
        advance(l, 1);
    while (!l->status && l->at < l->n) {
        char c = l->p[l->at];
        bool signed_end = (c == '-' || (c == '+' && block)) && l->n - l->at >= 3 && !memcmp(l->p + l->at + 1, end, 2);
        if (open <= 0 && (signed_end || looking_at(l, end))) {
            push_token(l, block ? T_BLOCK_END : T_VARIABLE_END);
            return skip_end(l, signed_end ? 3 : 2, signed_end ? c : 0, block);
        }
        if (space(c))
            advance(l, 1);
        else if (c == '\'' || c == '"')
            lex_string(l);
        else if (digit(c))
            lex_number(l);
        else if (name_char(c))
            lex_name(l);
        else
            lex_operator(l, &open);
    }
    fail_at(l, block ? "{% has no end" : "{{ has no end");
    return false;
}

enum td_status template_lex(struct template *t, const char *source, size_t len, struct td_error *e)
{
    struct bytes text = {0};
    for (size_t i = 0; i < len; i++) { /* every kind of line end becomes a line feed */
        if (source[i] != '\r')
            bytes_append(&text, &source[i], 1);
        else if (i + 1 == len || source[i + 1] != '\n')
            bytes_append(&text, "\n", 1);
    }
    if (text.len && text.data[text.len - 1] == '\n') /* the last line end is dropped */
        text.len--;
    struct lexer l = {.t = t, .p = text.data ? text.data : "", .n = text.len, .line = 1, .e = e};
    bool line_start = true;
    while (l.at < l.n && !l.status) {
        const char *tag = next_tag(&l);
        if (!tag || tag > l.p + l.at) {
            lex_text(&l, tag, line_start);
            line_start = false;
            continue;
        }
        if (tag[1] == '#')
            line_start = lex_comment(&l);
        else
            line_start = lex_tag(&l, tag[1] == '%');
    }
    push_token(&l, T_END);
    bytes_free(&text);
    return l.status;
}
