/*
 * Grammars: what each kind accepts and refuses, what is refused at compilation, by name, and that a mask has
 * exactly the tokens that the cursor would take.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "grammar/grammar.h"
#include "tests/tap.h"

/* -------------------------------------------------------------------- vocabulary */

#define LONGEST "cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc" /* 80 characters */
static const char *const PIECES[] = {"{\"",         "\":",         "\": ",
                                     "\",",         "\", \"",      "\"}",
                                     "\"]",         "},",          "}]",
                                     "[{",          "],",          "[\"",
                                     "\",\"",       "\":\"",       "\": \"",
                                     "true",        "false",       "null",
                                     "tru",         "nul",         " the",
                                     "the",         "abc",         "ab",
                                     "name",        "na",          "age",
                                     "\"name",      "\"age\":",    "12",
                                     "34",          "00",          "0.5",
                                     "-1",          "1e5",         "  ",
                                     "\n",          "\n  ",        "\\n",
                                     "\\u",         "\\u00",       "\\\"",
                                     "\xc3\xa9",    "\xe2\x82",    "\xf0\x9f\x98\x80",
                                     "caf\xc3\xa9", "2024-",       "-02-29",
                                     "T12:",        "hello world", "aaaaaaaaaaaaaaaa",
                                     "bbbb",        "\"}, {\"",    "\"\n}",
                                     "{}",          "[]",          "[[",
                                     "]]",          "1,",          "1]",
                                     "1}",          LONGEST};
enum { N_PIECES = sizeof(PIECES) / sizeof(PIECES[0]), N_TOKENS = 257 + N_PIECES };

static struct grammar_vocab *vocab;

static void piece(void *user, uint32_t id, const char **bytes, size_t *len)
{
    static char one[256];
    (void)user;
    if (id < 256) {
        one[id] = (char)id;
        *bytes = &one[id];
        *len = 1;
    } else if (id > 256) { /* 256 is a special token */
        *bytes = PIECES[id - 257];
        *len = strlen(*bytes);
    }
}

static void setup(void)
{
    vocab = grammar_vocab_open(N_TOKENS, piece, NULL);
}

static void teardown(void)
{
    grammar_vocab_close(vocab);
}

static struct grammar *compiled(enum grammar_kind kind, const char *text)
{
    struct grammar *g = NULL;
    struct td_error e = {{0}};
    enum td_status s = grammar_compile(vocab, kind, text, strlen(text), &g, &e);
    ck_assert_msg(s == TD_OK, "%s: %s", text, e.text);
    return g;
}

static bool accepts(struct grammar *g, const char *text)
{
    struct grammar_cursor *c = grammar_cursor_open(g);
    bool is_good = grammar_cursor_take_bytes(c, text, strlen(text)) && grammar_cursor_may_end(c);
    grammar_cursor_close(c);
    return is_good;
}

/* ---------------------------------------------------------------------- languages */

struct language {
    enum grammar_kind kind;
    const char *text;
    const char *good[12], *bad[12];
};

static const struct language LANGUAGES[] = {
    {GRAMMAR_REGEX, "ab*c", {"ac", "abc", "abbbbc"}, {"", "a", "abb", "abcd"}},
    {GRAMMAR_REGEX, "[a-c]{2,3}|x", {"ab", "abc", "x"}, {"a", "abca", "xx"}},
    {GRAMMAR_REGEX, "(foo|ba[rz])+\\d{0,2}", {"foo", "barbaz12", "foofoo1"}, {"fo", "foo123", "12"}},
    {GRAMMAR_REGEX,
     "a{20,30}",
     {"aaaaaaaaaaaaaaaaaaaa", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"},
     {"aaaaaaaaaaaaaaaaaaa", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}},
    {GRAMMAR_REGEX,
     "[^a]\\u00e9.",
     {"b\xc3\xa9x", "\xf0\x9f\x98\x80\xc3\xa9\xe2\x82\xac"},
     {"a\xc3\xa9x", "b\xc3\xa9\n", "b\xc3"}},
    {GRAMMAR_REGEX, "\\p{Lu}\\p{L}*", {"Abc", "\xc3\x89t\xc3\xa9"}, {"abc", "A1"}},
    {GRAMMAR_REGEX, "^a?b??c*?$", {"", "abc", "accc"}, {"ba"}},
    {GRAMMAR_CHOICE, "[\"yes\",\"yesterday\",\"no\"]", {"yes", "yesterday", "no"}, {"", "ye", "yester", "nope"}},
    {GRAMMAR_EBNF,
     "root ::= item (\",\" item)*  # a list\nitem ::= [a-z]+ | \"(\" root \")\"",
     {"a", "ab,c", "(a,(b)),c"},
     {"", "a,", "(a", "A"}},
    {GRAMMAR_EBNF, "start: \"x\" DIGIT{2} | \"y\"  // Lark\nDIGIT: /[0-9]/", {"x12", "y"}, {"x1", "x123", "xy"}},
    {GRAMMAR_JSON,
     "",
     {"{}", "{\"a\": [1, 2.5e3, \"x\\u00e9\", null]}", " { \"a\" : { } }"},
     {"[]", "{\"a\"}", "{\"a\":01}", "{,}"}},
    {GRAMMAR_SCHEMA, "true", {"1", "\"a\"", "[true]", "null"}, {"", "tru", "{"}},
    {GRAMMAR_SCHEMA,
     "{\"type\":\"string\"}",
     {"\"\"", "\"a\\\"b\"", "\"\xc3\xa9\\ud83d\\ude00\""},
     {"\"a", "\"\n\"", "\"\\x\"", "\"\xff\""}},
    {GRAMMAR_SCHEMA,
     "{\"type\":\"string\",\"minLength\":2,\"maxLength\":8}",
     {"\"ab\"", "\"\xc3\xa9\\u00e9\"", "\"\\ud83d\\ude00x\"", "\"12345678\""},
     {"\"a\"", "\"123456789\"", "\"\\ud83d\\ude00\""}},
    {GRAMMAR_SCHEMA,
     "{\"type\":\"array\",\"items\":{\"type\":\"string\",\"minLength\":1,\"maxLength\":40}}",
     {"[]", "[\"a\", \"1234567890123456789012345678901234567890\"]"},
     {"[\"\"]", "[\"12345678901234567890123456789012345678901\"]"}},
    {GRAMMAR_SCHEMA,
     "{\"type\":\"string\",\"maxLength\":24}",
     {"\"\"", "\"123456789012345678901234\""},
     {"\"1234567890123456789012345\""}},
    {GRAMMAR_SCHEMA,
     "{\"type\":\"string\",\"minLength\":20}",
     {"\"12345678901234567890\""},
     {"\"1234567890123456789\""}},
    {GRAMMAR_SCHEMA, "{\"type\":\"string\",\"minLength\":1}", {"\"a\"", "\"\\n\"", "\"ab\""}, {"\"\"", "\"", "1"}},
    {GRAMMAR_SCHEMA,
     "{\"type\":\"string\",\"minLength\":150,\"maxLength\":150}",
     {"\"" LONGEST "1234567890123456789012345678901234567890123456789012345678901234567890\""},
     {"\"" LONGEST "\"", "\"" LONGEST LONGEST "\""}},
    {GRAMMAR_SCHEMA,
     "{\"type\":\"string\",\"maxLength\":155}",
     {"\"\"", "\"" LONGEST "\""},
     {"\"" LONGEST LONGEST "\""}},
    {GRAMMAR_SCHEMA,
     "{\"type\":\"string\",\"minLength\":5,\"maxLength\":5}",
     {"\"12345\"", "\"1\\u00e9\xc3\xa9\\\\5\""},
     {"\"1234\"", "\"123456\""}},
    {GRAMMAR_SCHEMA,
     "{\"type\":\"string\",\"pattern\":\"x|yz\"}",
     {"\"x\"", "\"ayzb\"", "\"yx\""},
     {"\"y\"", "\"\"", "\"zy\""}},
    {GRAMMAR_SCHEMA,
     "{\"type\":\"string\",\"pattern\":\"^a.*z$\"}",
     {"\"az\"", "\"a\\\"z\"", "\"a\\u007a\""},
     {"\"a\"", "\"az1\"", "\"za\""}},
    {GRAMMAR_SCHEMA, "{\"type\":\"string\",\"pattern\":\"[0-9]\"}", {"\"a1b\"", "\"7\""}, {"\"\"", "\"ab\""}},
    {GRAMMAR_SCHEMA,
     "{\"type\":\"string\",\"format\":\"date\"}",
     {"\"2024-02-29\"", "\"2023-12-31\""},
     {"\"2023-02-29\"", "\"2023-13-01\"", "\"1900-02-29\""}},
    {GRAMMAR_SCHEMA, "{\"type\":\"integer\"}", {"0", "-12", "3.0"}, {"01", "1.5", "1e3", "-"}},
    {GRAMMAR_SCHEMA,
     "{\"type\":\"integer\",\"minimum\":17,\"maximum\":342}",
     {"17", "99", "100", "342", "200"},
     {"16", "343", "1", "1000", "-20"}},
    {GRAMMAR_SCHEMA,
     "{\"type\":\"integer\",\"minimum\":-5,\"exclusiveMaximum\":10}",
     {"-5", "-1", "0", "9"},
     {"-6", "10", "-10", "99"}},
    {GRAMMAR_SCHEMA, "{\"type\":\"integer\",\"minimum\":100}", {"100", "999", "123456"}, {"99", "0", "-100"}},
    {GRAMMAR_SCHEMA,
     "{\"type\":\"number\",\"exclusiveMinimum\":0,\"maximum\":1}",
     {"0.5", "0.001", "1", "1.0"},
     {"0", "0.0", "1.1", "-0.5", "2"}},
    {GRAMMAR_SCHEMA,
     "{\"type\":\"number\",\"minimum\":-2,\"maximum\":3,\"multipleOf\":0.1}",
     {"-2", "-1.5", "0.1", "2.9", "3", "-0.5"},
     {"-2.1", "3.1", "0.15"}},
    {GRAMMAR_SCHEMA,
     "{\"enum\":[\"a\",1,null,{\"x\":[1]}, \"\xc3\xa9\"]}",
     {"\"a\"", "1", "null", "{ \"x\" : [ 1 ] }", "\"\\u00e9\"", "\"\xc3\xa9\""},
     {"\"b\"", "2", "{}", "{\"x\":[]}", "true"}},
    {GRAMMAR_SCHEMA,
     "{\"type\":\"array\",\"items\":{\"type\":\"integer\"},\"minItems\":1,\"maxItems\":3}",
     {"[1]", "[1, 2,3]"},
     {"[]", "[1,2,3,4]", "[1,]", "[\"a\"]"}},
    {GRAMMAR_SCHEMA,
     "{\"type\":\"array\",\"prefixItems\":[{\"type\":\"integer\"},{\"type\":\"string\"}],\"items\":false}",
     {"[]", "[1]", "[1,\"a\"]"},
     {"[\"a\"]", "[1,2]", "[1,\"a\",1]"}},
    {GRAMMAR_SCHEMA,
     "{\"type\":\"array\",\"items\":[{\"type\":\"integer\"}],\"minItems\":2}",
     {"[1,2]", "[1,\"x\",null]"},
     {"[]", "[1]", "[\"a\",1]"}},
    {GRAMMAR_SCHEMA,
     "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\"},\"age\":{\"type\":\"integer\"}},\"required\":"
     "[\"name\"],"
     "\"additionalProperties\":false}",
     {"{\"name\":\"a\"}", "{\"age\":1,\"name\":\"a\"}", "{ \"name\" : \"a\" , \"age\" : 2 }"},
     {"{}", "{\"age\":1}", "{\"name\":\"a\",\"name\":\"b\"}", "{\"name\":1}", "{\"name\":\"a\",\"x\":1}",
      "{\"name\":\"a\",}"}},
    {GRAMMAR_SCHEMA,
     "{\"properties\":{\"name\":{\"type\":\"string\"}},\"type\":\"object\"}",
     {"{}", "{\"x\":1}", "{\"na\":1,\"names\":2,\"name\":\"\"}"},
     {"{\"name\":1}", "{\"n\\u0061me\":1}", "{\"x\":1,}"}},
    {GRAMMAR_SCHEMA,
     "{\"anyOf\":[{\"type\":\"integer\"},{\"type\":\"string\",\"maxLength\":2}]}",
     {"1", "\"ab\""},
     {"\"abc\"", "true"}},
    {GRAMMAR_SCHEMA,
     "{\"oneOf\":[{\"type\":\"object\",\"properties\":{\"k\":{\"const\":\"a\"},\"v\":{\"type\":\"integer\"}},"
     "\"required\":[\"k\",\"v\"]},"
     "{\"type\":\"object\",\"properties\":{\"k\":{\"const\":\"b\"}},\"required\":[\"k\"]}]}",
     {"{\"k\":\"a\",\"v\":1}", "{\"k\":\"b\"}"},
     {"{\"k\":\"a\"}", "{\"k\":\"c\"}"}},
    {GRAMMAR_SCHEMA,
     "{\"allOf\":[{\"type\":\"object\",\"properties\":{\"a\":{\"minimum\":1}}},{\"properties\":{\"a\":{\"type\":"
     "\"integer\"}},\"required\":[\"a\"]}]}",
     {"{\"a\":1}", "{\"a\":7,\"b\":0}"},
     {"{}", "{\"a\":0}", "{\"a\":1.5}"}},
    {GRAMMAR_SCHEMA,
     "{\"$defs\":{\"t\":{\"type\":\"object\",\"properties\":{\"c\":{\"type\":\"array\",\"items\":{\"$ref\":\"#/$defs/"
     "t\"}}},"
     "\"additionalProperties\":false}},\"$ref\":\"#/$defs/t\"}",
     {"{}", "{\"c\":[{},{\"c\":[]}]}"},
     {"{\"c\":[1]}", "{\"d\":1}"}},
    {GRAMMAR_SCHEMA, "{\"type\":[\"integer\",\"null\"]}", {"1", "null"}, {"\"a\"", "1.5"}},
};
enum { N_LANGUAGES = sizeof(LANGUAGES) / sizeof(LANGUAGES[0]) };

START_TEST(test_grammar_accepts_what_its_text_says)
{
    const struct language *l = &LANGUAGES[_i];
    struct grammar *g = compiled(l->kind, l->text);
    for (int i = 0; i < 12 && l->good[i]; i++)
        ck_assert_msg(accepts(g, l->good[i]), "%s: does not accept %s", l->text, l->good[i]);
    for (int i = 0; i < 12 && l->bad[i]; i++)
        ck_assert_msg(!accepts(g, l->bad[i]), "%s: accepts %s", l->text, l->bad[i]);
    grammar_unref(g);
}
END_TEST

/* ------------------------------------------------------------------------- masks */

static bool is_allowed(const struct grammar_cursor *c, uint32_t id)
{
    struct grammar_cursor *copy = grammar_cursor_copy(c);
    bool is_good = grammar_cursor_take(copy, id);
    grammar_cursor_close(copy);
    return is_good;
}

/* Random walks: each mask is what taking each token says. */
START_TEST(test_grammar_masks_have_the_tokens_that_are_taken)
{
    struct grammar *g = compiled(LANGUAGES[_i].kind, LANGUAGES[_i].text);
    uint32_t *words = mem_array(grammar_mask_words(vocab), sizeof(*words)), allowed[N_TOKENS];
    srand(1);
    for (int walk = 0; walk < 12; walk++) {
        struct grammar_cursor *c = grammar_cursor_open(g);
        for (int step = 0; step < 30; step++) {
            uint32_t n = 0;
            grammar_cursor_mask(c, words);
            for (uint32_t id = 0; id < N_TOKENS; id++) {
                bool is_set = words[id / 32] >> id % 32 & 1;
                ck_assert_msg(is_set == is_allowed(c, id), "%s: step %d: token %u", LANGUAGES[_i].text, step, id);
                if (is_set)
                    allowed[n++] = id;
            }
            ck_assert_msg(n || grammar_cursor_may_end(c), "%s: nothing is allowed, and it has not ended",
                          LANGUAGES[_i].text);
            if (!n)
                break;
            uint32_t id = allowed[(uint32_t)rand() % n];
            for (int k = 0; k < 4 && id < 257; k++) /* longer tokens more often */
                id = allowed[(uint32_t)rand() % n];
            ck_assert(grammar_cursor_take(c, id));
        }
        grammar_cursor_close(c);
    }
    free(words);
    grammar_unref(g);
}
END_TEST

/* ---------------------------------------------------------------------- refusals */

static const struct {
    enum grammar_kind kind;
    const char *text, *named;
} REFUSED[] = {
    {GRAMMAR_REGEX, "a(b", ")"},
    {GRAMMAR_REGEX, "a)b", ")"},
    {GRAMMAR_REGEX, "*a", "repeat"},
    {GRAMMAR_REGEX, "(?=a)b", "looking ahead"},
    {GRAMMAR_REGEX, "(a)\\1", "back references"},
    {GRAMMAR_REGEX, "[b-a]", "range"},
    {GRAMMAR_REGEX, "[a", "too early"},
    {GRAMMAR_REGEX, "a{3,2}", "count"},
    {GRAMMAR_REGEX, "\\bword", "\\b"},
    {GRAMMAR_EBNF, "root ::= other", "other"},
    {GRAMMAR_EBNF, "thing ::= \"a\"", "root"},
    {GRAMMAR_EBNF, "root ::= root \"a\" | \"b\"", "begins with itself"},
    {GRAMMAR_EBNF, "root ::= \"a", "literal"},
    {GRAMMAR_EBNF, "%import common.WS\nstart: \"a\"", "directives"},
    {GRAMMAR_CHOICE, "[]", "choice"},
    {GRAMMAR_CHOICE, "[1]", "choice[0]"},
    {GRAMMAR_SCHEMA, "{", "not JSON"},
    {GRAMMAR_SCHEMA, "{\"type\":\"thing\"}", "thing"},
    {GRAMMAR_SCHEMA, "{\"not\":{}}", "not"},
    {GRAMMAR_SCHEMA, "{\"type\":\"array\",\"uniqueItems\":true}", "uniqueItems"},
    {GRAMMAR_SCHEMA, "{\"$ref\":\"#/nothing\"}", "#/nothing"},
    {GRAMMAR_SCHEMA, "{\"$ref\":\"#\"}", ""},
    {GRAMMAR_SCHEMA, "{\"anyOf\":[{\"$ref\":\"#\"},{\"type\":\"null\"}]}", "begins with itself"},
    {GRAMMAR_SCHEMA, "{\"type\":\"integer\",\"minimum\":5,\"maximum\":4}", "bounds"},
    {GRAMMAR_SCHEMA, "{\"type\":\"string\",\"pattern\":\"a(\"}", "pattern"},
    {GRAMMAR_SCHEMA, "{\"oneOf\":[{\"type\":\"integer\"},{\"minimum\":1}]}", "oneOf"},
    {GRAMMAR_SCHEMA, "{\"type\":\"object\",\"required\":[\"a\"],\"additionalProperties\":false}", "'a'"},
    {GRAMMAR_SCHEMA, /* each asks for a property that is like itself */
     "{\"$defs\":{\"a\":{\"required\":[\"x\"],\"properties\":{\"x\":{\"$ref\":\"#/$defs/"
     "a\"}}},\"b\":{\"required\":[\"x\"],"
     "\"properties\":{\"x\":{\"$ref\":\"#/$defs/b\"}}}},\"oneOf\":[{\"$ref\":\"#/$defs/a\"},{\"$ref\":\"#/$defs/b\"}]}",
     "oneOf"},
};

START_TEST(test_grammar_refuses_by_name)
{
    struct grammar *g = NULL;
    struct td_error e = {{0}};
    enum td_status s = grammar_compile(vocab, REFUSED[_i].kind, REFUSED[_i].text, strlen(REFUSED[_i].text), &g, &e);
    ck_assert_msg(s < 0 && strstr(e.text, REFUSED[_i].named), "%s: %d '%s'", REFUSED[_i].text, s, e.text);
}
END_TEST

/* Texts that are short, and so ambiguous that following all their places would take minutes. */
static const struct {
    enum grammar_kind kind;
    const char *text;
} HOSTILE[] = {
    {GRAMMAR_REGEX, "(([a-z]{0,50}[0-9]{0,50}(foo|bar|baz{1,30}){0,20}){0,20})*(x|y|z){5,90}"},
    {GRAMMAR_REGEX, "((a{0,50}){0,50}){0,50}b"},
    {GRAMMAR_REGEX, "(a|aa|aaa|aaaa){0,1000}(a{0,99}b?){0,1000}c"},
    {GRAMMAR_REGEX, "(.{0,90}a.{0,90}b.{0,90}){20,400}"},
    {GRAMMAR_REGEX, "(((a*)*)*)*((a|b)*(a|c)*(a|d)*(a|e)*){0,60}"},
    {GRAMMAR_EBNF, "root ::= e\ne ::= \"a\" | \"a\" e | \"a\" e e | \"a\" e e e"},
    {GRAMMAR_EBNF, "root ::= (w w w w w w){1,300}\nw ::= [a-z]{0,9} [a-z]{0,9} x?\nx ::= [a-e]{0,30}"},
    {GRAMMAR_SCHEMA, "{\"type\":\"string\",\"pattern\":\"^((a{0,30}|[ab]{0,30}){0,30}){0,30}$\"}"},
    {GRAMMAR_SCHEMA, "{\"type\":\"array\",\"maxItems\":5000,\"items\":{\"anyOf\":[{\"type\":\"string\",\"pattern\":"
                     "\"^(a{0,9}){0,9}$\"},{\"type\":\"string\",\"pattern\":\"^([ab]{0,9}){0,99}$\"}]}}"},
};
enum { N_HOSTILE = sizeof(HOSTILE) / sizeof(HOSTILE[0]), N_WORDS = 30000, STEPS = 60 };
static const double MOST_S = 3;

/* A vocabulary of words of a few letters: most of these grammars allow most of its words. */
static void letters(void *user, uint32_t id, const char **bytes, size_t *len)
{
    static char word[12];
    uint32_t *seed = user;
    if (id < 256) {
        piece(NULL, id, bytes, len);
        return;
    }
    *len = 2 + id % (sizeof(word) - 1);
    for (size_t i = 0; i < *len; i++) {
        *seed = *seed * 1664525 + 1013904223;
        word[i] = "aaaabbcxz059"[(*seed >> 16) % 12];
    }
    *bytes = word;
}

/* Refused, or masks until it is said that it can't go on; in any case soon. */
START_TEST(test_grammar_that_is_too_ambiguous_costs_little)
{
    const char *text = HOSTILE[_i].text;
    struct grammar *g = NULL;
    struct td_error e = {{0}};
    uint32_t seed = 1;
    struct grammar_vocab *v = grammar_vocab_open(N_WORDS, letters, &seed);
    uint32_t *words = mem_array(grammar_mask_words(v), sizeof(*words));
    clock_t began = clock();
    if (!grammar_compile(NULL, HOSTILE[_i].kind, text, strlen(text), &g, &e))
        grammar_unref(g);
    if (!grammar_compile(v, HOSTILE[_i].kind, text, strlen(text), &g, &e)) {
        struct grammar_cursor *c = grammar_cursor_open(g);
        for (int step = 0; step < STEPS && grammar_cursor_mask(c, words); step++) {
            uint32_t id = 'a';
            while (id < N_WORDS && !(words[id / 32] >> id % 32 & 1))
                id++;
            if (!grammar_cursor_take(c, id < N_WORDS ? id : '"'))
                break;
        }
        grammar_cursor_close(c);
        grammar_unref(g);
    }
    double s = (double)(clock() - began) / CLOCKS_PER_SEC;
    ck_assert_msg(s < MOST_S, "%s: %.1f s", text, s);
    grammar_vocab_close(v);
    free(words);
}
END_TEST

/* A schema of n parts: in `each`, % is the part's number, @ the next one's. */
static void write_parts(struct bytes *b, const char *first, const char *each, int n, const char *last)
{
    char number[16];
    bytes_append(b, first, strlen(first));
    for (int i = 0; i < n; i++)
        for (const char *c = each; *c; c++) {
            snprintf(number, sizeof(number), "%d", *c == '@' ? i + 1 : i);
            if (*c == '@' || *c == '%')
                bytes_append(b, number, strlen(number));
            else
                bytes_append(b, c, 1);
        }
    bytes_append(b, last, strlen(last));
}

static const struct {
    const char *first, *each, *last;
    int n;
} LARGE[] = {
    {"{\"pattern\":\"", "a|", "a\"}", 120000}, /* each was a call within a call */
    {"{\"pattern\":\"", "\\\\p{L}", "\"}", 1000},
    {"{\"$ref\":\"#/$defs/a0\",\"$defs\":{",
     "\"a%\":{\"allOf\":[{\"$ref\":\"#/$defs/a@\"},{\"$ref\":\"#/$defs/a@\"}]},", "\"a30\":{}}}", 30},
    {"{\"oneOf\":[{\"$ref\":\"#/$defs/a0\"},{\"$ref\":\"#/$defs/a0\"}],\"$defs\":{",
     "\"a%\":{\"required\":[\"x\",\"y\"],\"properties\":{\"x\":{\"$ref\":\"#/$defs/a@\"},\"y\":{\"$ref\":\"#/$defs/"
     "a@\"}}},",
     "\"a30\":{}}}", 30},
    {"{\"oneOf\":[", "{\"const\":%},", "{\"const\":true}]}", 12000},
};
enum { N_LARGE = sizeof(LARGE) / sizeof(LARGE[0]) };

START_TEST(test_grammar_of_a_schema_that_grows_when_it_is_merged_is_refused_soon)
{
    struct bytes text = {0};
    struct grammar *g = NULL;
    struct td_error e = {{0}};
    write_parts(&text, LARGE[_i].first, LARGE[_i].each, LARGE[_i].n, LARGE[_i].last);
    clock_t began = clock();
    enum td_status s = grammar_compile(vocab, GRAMMAR_SCHEMA, (const char *)text.data, text.len, &g, &e);
    double seconds = (double)(clock() - began) / CLOCKS_PER_SEC;
    ck_assert_msg(s < 0, "%d", s);
    ck_assert_msg(seconds < MOST_S, "%.1f s: %s", seconds, e.text);
    bytes_free(&text);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("grammar");
    TCase *tc = tcase_create("grammar");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_set_timeout(tc, 60);
    tcase_add_loop_test(tc, test_grammar_accepts_what_its_text_says, 0, N_LANGUAGES);
    tcase_add_loop_test(tc, test_grammar_masks_have_the_tokens_that_are_taken, 0, N_LANGUAGES);
    tcase_add_loop_test(tc, test_grammar_refuses_by_name, 0, (int)(sizeof(REFUSED) / sizeof(REFUSED[0])));
    tcase_add_loop_test(tc, test_grammar_that_is_too_ambiguous_costs_little, 0, N_HOSTILE);
    tcase_add_loop_test(tc, test_grammar_of_a_schema_that_grows_when_it_is_merged_is_refused_soon, 0, N_LARGE);
    suite_add_tcase(s, tc);
    return tap_main(s);
}
