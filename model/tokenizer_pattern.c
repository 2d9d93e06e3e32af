/*
 * Expressions of tokenizer.json, by PCRE2. The library that defines their meaning uses Oniguruma with Ruby's
 * syntax. So before compiling, everything that the two read differently is rewritten:
 *
 *   \s \S            Unicode's White_Space (PCRE2 would add U+180E)
 *   \w \W \b \B      letters, marks, decimal digits and connectors (PCRE2: letters, numbers and _); outside
 *                    classes also six numbers of Latin-1
 *   \p{Han} \P{Han}  by the script, not its extensions
 *   \p{Letter}       and other long names of categories
 *   [:alpha:]        and its like, also as \p{Alpha}: by Unicode's properties, each as the library has it
 *   \h \H            hexadecimal digits
 *   ^ $              at every line
 *   X{n,m}+          repeated again, not possessive
 *
 * Constructs that PCRE2 does not have are refused: classes in classes, and their intersections.
 */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/tokenizer_internal.h"

enum { JIT_STACK_BYTES = 16 << 20, MATCH_LIMIT = 200 * 1000 * 1000 };

#define WORD         "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}"
#define ALONE        WORD "\\x{b2}\\x{b3}\\x{b9}\\x{bc}-\\x{be}" /* outside of a class */
#define AFTER_WORD   "(?<=[" ALONE "])"
#define AFTER_OTHER  "(?<![" ALONE "])"
#define BEFORE_WORD  "(?=[" ALONE "])"
#define BEFORE_OTHER "(?![" ALONE "])"
#define VISIBLE      "\\p{L}\\p{M}\\p{N}\\p{P}\\p{S}\\p{Cf}\\p{Co}"

enum { MAX_NAME = 40 };

/* The members of a class for each of Oniguruma's names, in lower case without blanks, - and _. */
static const struct {
    const char *name, *members, *of_property; /* members of \p{NAME}, if they differ */
} NAMES[] = {{"alnum", "\\p{Alphabetic}\\p{Nd}"},
             {"alpha", "\\p{Alphabetic}"},
             {"ascii", "\\x00-\\x7f"},
             {"blank", "\\t\\p{Zs}"},
             {"cntrl", "\\p{Cc}"},
             {"digit", "\\p{Nd}"},
             {"graph", VISIBLE},
             {"lower", "\\p{Lowercase}"},
             {"print", VISIBLE "\\p{Zs}"},
             {"punct", "\\p{P}\\p{S}", "\\p{P}"},
             {"space", "\\p{White_Space}"},
             {"upper", "\\p{Uppercase}"},
             {"word", WORD, ALONE},
             {"xdigit", "0-9a-fA-F"},
             {"casedletter", "\\p{L&}"},
             {"closepunctuation", "\\p{Pe}"},
             {"combiningmark", "\\p{M}"},
             {"connectorpunctuation", "\\p{Pc}"},
             {"control", "\\p{Cc}"},
             {"currencysymbol", "\\p{Sc}"},
             {"dashpunctuation", "\\p{Pd}"},
             {"decimalnumber", "\\p{Nd}"},
             {"enclosingmark", "\\p{Me}"},
             {"finalpunctuation", "\\p{Pf}"},
             {"format", "\\p{Cf}"},
             {"initialpunctuation", "\\p{Pi}"},
             {"letter", "\\p{L}"},
             {"letternumber", "\\p{Nl}"},
             {"lineseparator", "\\p{Zl}"},
             {"lowercaseletter", "\\p{Ll}"},
             {"mark", "\\p{M}"},
             {"mathsymbol", "\\p{Sm}"},
             {"modifierletter", "\\p{Lm}"},
             {"modifiersymbol", "\\p{Sk}"},
             {"nonspacingmark", "\\p{Mn}"},
             {"number", "\\p{N}"},
             {"openpunctuation", "\\p{Ps}"},
             {"other", "\\p{C}"},
             {"otherletter", "\\p{Lo}"},
             {"othernumber", "\\p{No}"},
             {"otherpunctuation", "\\p{Po}"},
             {"othersymbol", "\\p{So}"},
             {"paragraphseparator", "\\p{Zp}"},
             {"privateuse", "\\p{Co}"},
             {"punctuation", "\\p{P}"},
             {"separator", "\\p{Z}"},
             {"spaceseparator", "\\p{Zs}"},
             {"spacingmark", "\\p{Mc}"},
             {"surrogate", "\\p{Cs}"},
             {"symbol", "\\p{S}"},
             {"titlecaseletter", "\\p{Lt}"},
             {"unassigned", "\\p{Cn}"},
             {"uppercaseletter", "\\p{Lu}"}};

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

static const char *members_of(const char *name, size_t len, bool of_property)
{
    char plain[MAX_NAME] = "";
    size_t n = 0;
    for (size_t i = 0; i < len && n + 1 < sizeof(plain); i++)
        if (!strchr(" -_", name[i]))
            plain[n++] = (char)tolower((unsigned char)name[i]);
    for (size_t i = 0; i < sizeof(NAMES) / sizeof(NAMES[0]); i++)
        if (!strcmp(NAMES[i].name, plain))
            return of_property && NAMES[i].of_property ? NAMES[i].of_property : NAMES[i].members;
    return NULL;
}

static bool is_script(const char *name, size_t len)
{
    char text[MAX_NAME + 8];
    int code;
    size_t at;
    snprintf(text, sizeof(text), "\\p{sc:%.*s}", (int)len, name);
    pcre2_code *re =
        len < MAX_NAME ? pcre2_compile((PCRE2_SPTR)text, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &code, &at, NULL)
                       : NULL;
    pcre2_code_free(re);
    return re != NULL;
}

/* Appends a class with these members, or with all others. */
static void put_members(const char *members, bool negated, bool in_class, struct bytes *out, const char **refused)
{
    bool is_one = !strncmp(members, "\\p{", 3) && !strchr(members + 3, '\\');
    if (in_class && !negated)
        bytes_printf(out, "%s", members);
    else if (in_class && is_one)
        bytes_printf(out, "\\P%s", members + 2);
    else if (in_class)
        *refused = "a negated name of several properties in a class";
    else
        bytes_printf(out, "[%s%s]", negated ? "^" : "", members);
}

/* Rewrites \p{NAME}, \P{NAME} or \p{^NAME}; returns its length. */
static size_t rewrite_property(const char *p, size_t left, bool in_class, struct bytes *out, const char **refused)
{
    const char *end = left > 2 && p[2] == '{' ? memchr(p, '}', left) : NULL, *name = p + 3;
    if (!end)
        return bytes_append(out, p, 2), 2;
    bool is_turned = *name == '^', negated = (p[1] == 'P') != is_turned;
    name += is_turned;
    size_t len = (size_t)(end - name);
    const char *members = members_of(name, len, true);
    if (members)
        put_members(members, negated, in_class, out, refused);
    else
        bytes_printf(out, "\\%c{%s%.*s}", negated ? 'P' : 'p', is_script(name, len) ? "sc:" : "", (int)len, name);
    return (size_t)(end + 1 - p);
}

/* Rewrites an escape; returns its length. */
static size_t rewrite_escape(const char *p, size_t left, bool in_class, struct bytes *out, const char **refused)
{
    static const struct {
        char letter;
        const char *outside, *inside;
    } ESCAPES[] = {{'s', "\\p{White_Space}", "\\p{White_Space}"},
                   {'S', "\\P{White_Space}", "\\P{White_Space}"},
                   {'w', "[" ALONE "]", WORD},
                   {'W', "[^" ALONE "]", NULL},
                   {'b', "(?:" AFTER_WORD BEFORE_OTHER "|" AFTER_OTHER BEFORE_WORD ")", "\\x08"},
                   {'B', "(?:" AFTER_WORD BEFORE_WORD "|" AFTER_OTHER BEFORE_OTHER ")", NULL},
                   {'h', "[0-9a-fA-F]", "0-9a-fA-F"},
                   {'H', "[^0-9a-fA-F]", NULL}};
    if (left < 2)
        return bytes_append(out, p, left), left;
    if (p[1] == 'p' || p[1] == 'P')
        return rewrite_property(p, left, in_class, out, refused);
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

/* Rewrites [:NAME:] or [:^NAME:] in a class; returns its length. */
static size_t rewrite_posix(const char *p, size_t left, struct bytes *out, const char **refused)
{
    const char *name = p + 2, *end = memmem(name, left - 2, ":]", 2);
    if (!end)
        return bytes_append(out, p, 1), 1;
    bool negated = *name == '^';
    name += negated;
    const char *members = members_of(name, (size_t)(end - name), false);
    if (members)
        put_members(members, negated, true, out, refused);
    else
        bytes_append(out, p, (size_t)(end + 2 - p));
    return (size_t)(end + 2 - p);
}

/* Rewrites a class from its [ to its ]; returns its length. */
static size_t rewrite_class(const char *p, size_t left, struct bytes *out, const char **refused)
{
    size_t i = 1;
    bytes_append(out, p, 1);
    if (i < left && p[i] == '^')
        bytes_append(out, &p[i++], 1);
    if (i < left && p[i] == ']') /* a ] at the beginning stands for itself */
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
        if (posix) {
            i += rewrite_posix(p + i, left - i, out, refused);
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
    size_t brace = SIZE_MAX; /* where the last {..} began, if it ends just before p[i] */
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
    return s->begin <= s->end; /* \K may put the begin behind the end */
}

bool pattern_next(const struct pattern *p, struct matcher *m, struct slice text, struct scan *s)
{
    while (s->from <= text.len) {
        if (!find(p, m, text, s))
            return false;
        if (s->begin == s->end && s->any && s->end == s->last_end) {
            s->from += s->from < text.len ? utf8_length((unsigned char)text.data[s->from]) : 1;
            continue;
        }
        s->from = s->last_end = s->end;
        s->any = true;
        return true;
    }
    return false;
}
