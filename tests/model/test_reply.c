/* Text, reasoning and calls of answers in each convention. Each case is fed whole, byte by byte, and in
 * pieces of random lengths: what is told in all must be the same. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "model/reply.h"
#include "tests/tap.h"

static const char TOOLS[] =
    "[{\"type\": \"function\", \"function\": {\"name\": \"weather\", \"parameters\": {\"type\": \"object\", "
    "\"properties\": {"
    "\"city\": {\"type\": \"string\"}, \"days\": {\"type\": \"integer\"}, \"zip\": {\"type\": \"string\"}}}}},"
    " {\"type\": \"function\", \"function\": {\"name\": \"time\"}}]";

/* What a template of each convention has. */
static const char HERMES[] =
    "<tool_call>\\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\\n</tool_call>";
static const char CODER[] = "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>";
static const char GLM[] = "<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n<arg_value>";
static const char GRANITE[] = "{{ '<|tool_call|>' }}";
static const char MISTRAL[] = "{{ '[TOOL_CALLS][' }}";
static const char MISTRAL_ARGS[] = "{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}";
static const char LLAMA[] = "Respond in the format {\"name\": function name, \"parameters\": dictionary}. <|eot_id|>";
static const char PYTHON[] =
    "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]";
static const char DEEPSEEK[] = "'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n' + '```json'";
static const char DEEPSEEK31[] = "'<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments";
static const char HARMONY[] = "<|start|>assistant<|channel|>final<|message|>";

/* calls: "name(arguments) name(arguments)" */
struct reply_case {
    const char *name, *source, *answer, *text, *reasoning, *calls;
};
static const struct reply_case CASES[] = {
    {"hermes", HERMES, "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>", "",
     "", "weather({\"city\":\"Paris\"})"},
    {"hermes", HERMES,
     "I look.\n\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"a</tool_call>\"}}\n</tool_call>\n"
     "<tool_call>{\"arguments\": {}, \"name\": \"time\"}</tool_call>\n",
     "I look.", "", "weather({\"city\":\"a</tool_call>\"}) time({})"},
    {"hermes", HERMES, "<tool_call>{\"name\": \"time\", \"arguments\": \"{}\"}</tool_call> Done.", "Done.", "",
     "time({})"},
    {"hermes", HERMES, "<think>\nHm. <b>\n</think>\n\n<tool_call>{\"name\": \"time\"}</tool_call>", "", "Hm. <b>",
     "time({})"},
    {"hermes", HERMES, "<think>a</think>b <think>c</think>\n", "b <think>c</think>\n", "a", ""},
    {"hermes", HERMES, "<think>never ends\n", "", "never ends", ""},
    /* the end is missing, and nothing else */
    {"hermes", HERMES, "<tool_call>{\"name\": \"time\", \"arguments\": {}}", "", "", "time({})"},
    /* no calls */
    {"hermes", HERMES, "<tool_call>{\"name\": \"tea\", \"arguments\": {}}</tool_call>",
     "<tool_call>{\"name\": \"tea\", \"arguments\": {}}</tool_call>", "", ""},
    {"hermes", HERMES, "<tool_call>{\"name\": \"time\", \"arguments\": {}</tool_call> x",
     "<tool_call>{\"name\": \"time\", \"arguments\": {}</tool_call> x", "", ""},
    {"hermes", HERMES, "<tool_call>{\"name\": \"time\", \"arguments\": [1]}</tool_call>",
     "<tool_call>{\"name\": \"time\", \"arguments\": [1]}</tool_call>", "", ""},
    {"hermes", HERMES, "<tool_call>{\"name\": \"ti", "<tool_call>{\"name\": \"ti", "", ""},
    {"hermes", HERMES, "a < b <tool", "a < b <tool", "", ""},
    {"hermes", HERMES, "<tool_call><tool_call>{\"name\": \"time\"}</tool_call>", "<tool_call>", "", "time({})"},
    {"hermes", HERMES, " spaces at both ends \n", "spaces at both ends \n", "", ""},
    {"hermes", HERMES, "", "", "", ""},
    {"qwen-coder", CODER,
     "<tool_call>\n<function=weather>\n<parameter=city>\nNew\nYork\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
     "<parameter=zip>\n10001\n</parameter>\n</function>\n</tool_call>",
     "", "", "weather({\"city\":\"New\\nYork\",\"days\":3,\"zip\":\"10001\"})"},
    {"qwen-coder", CODER, "<tool_call>\n<function=time>\n</function>\n</tool_call>", "", "", "time({})"},
    {"qwen-coder", CODER, "<tool_call>\n<function=time\n</tool_call>", "<tool_call>\n<function=time\n</tool_call>", "",
     ""},
    {"qwen-coder", CODER, "<tool_call>\n<function=time>\n<parameter=a>1</function>\n</tool_call>",
     "<tool_call>\n<function=time>\n<parameter=a>1</function>\n</tool_call>", "", ""},
    {"glm", GLM,
     "<think>so</think>\nSure.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
     "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
     "Sure.", "so", "weather({\"city\":\"Oslo\",\"days\":2})"},
    {"glm", GLM, "<tool_call>time</tool_call><tool_call>time\n</tool_call>", "", "", "time({}) time({})"},
    {"glm", GLM, "<tool_call>tea</tool_call>", "<tool_call>tea</tool_call>", "", ""},
    {"granite", GRANITE,
     "<|tool_call|>[{\"name\": \"time\", \"arguments\": {}}, {\"name\": \"weather\", \"arguments\": {\"days\": 1}}]",
     "", "", "time({}) weather({\"days\":1})"},
    {"granite", GRANITE, "<|tool_call|>[]", "<|tool_call|>[]", "", ""},
    {"mistral", MISTRAL, "[TOOL_CALLS][{\"name\": \"time\", \"arguments\": {}, \"id\": \"abcdefghi\"}]", "", "",
     "time({})"},
    {"mistral", MISTRAL, "[THINK]why[/THINK]because", "because", "why", ""},
    {"mistral-args", MISTRAL_ARGS,
     "Well.[TOOL_CALLS]weather[ARGS]{\"city\": \"Bonn\"}[TOOL_CALLS]time[CALL_ID]abcdefghi[ARGS]{}", "Well.", "",
     "weather({\"city\":\"Bonn\"}) time({})"},
    {"mistral-args", MISTRAL_ARGS, "[TOOL_CALLS]weather[ARGS]{\"city\": ]", "[TOOL_CALLS]weather[ARGS]{\"city\": ]", "",
     ""},
    {"llama-json", LLAMA, "{\"name\": \"weather\", \"parameters\": {\"city\": \"Rome\"}}", "", "",
     "weather({\"city\":\"Rome\"})"},
    {"llama-json", LLAMA,
     "<|python_tag|>{\"name\": \"time\", \"parameters\": {}}; {\"name\": \"time\", \"parameters\": {}}", "", "",
     "time({}) time({})"},
    {"llama-json", LLAMA, "{\"name\": \"time\", \"parameters\": {}}; {\"name\": \"time\", \"parameters\": {}}", "", "",
     "time({}) time({})"},
    {"llama-json", LLAMA, "{\"name\": \"time\", \"parameters\": {}} is a call",
     "{\"name\": \"time\", \"parameters\": {}} is a call", "", ""},
    {"llama-json", LLAMA, "{\"a\": 1}", "{\"a\": 1}", "", ""},
    {"llama-json", LLAMA, "See {\"name\": \"time\", \"parameters\": {}}",
     "See {\"name\": \"time\", \"parameters\": {}}", "", ""},
    {"llama-python", PYTHON,
     "[weather(city='Li\\'l \"x\"', days=-2), time( ), weather(zip=None, days=[1, {'a': True}])]", "", "",
     "weather({\"city\":\"Li'l \\\"x\\\"\",\"days\":-2}) time({}) weather({\"zip\":null,\"days\":[1,{\"a\":true}]})"},
    {"llama-python", PYTHON, "<|python_start|>[time()]<|python_end|>", "", "", "time({})"},
    {"llama-python", PYTHON, "[1, 2, 3] are numbers", "[1, 2, 3] are numbers", "", ""},
    {"llama-python", PYTHON, "[time(]", "[time(]", "", ""},
    {"llama-python", PYTHON, "[time()", "[time()", "", ""},
    {"deepseek-v3", DEEPSEEK,
     "Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"city\": "
     "\"Kyoto\"}\n```<｜tool▁call▁end｜>\n"
     "<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
     "Ok.", "", "weather({\"city\":\"Kyoto\"}) time({})"},
    {"deepseek-v3.1", DEEPSEEK31,
     "<think>t</"
     "think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
     "", "t", "time({})"},
    {"harmony", HARMONY,
     "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
     "<|constrain|>json<|message|>{\"city\":\"SF\"}<|call|>",
     "", "Need it.", "weather({\"city\":\"SF\"})"},
    {"harmony", HARMONY, "<|channel|>final<|message|>Hello.<|return|>", "Hello.", "", ""},
    {"harmony", HARMONY, " to=functions.time<|channel|>commentary<|message|>{}", "", "", "time({})"},
    {"harmony", HARMONY,
     "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
     "to=functions.tea<|message|>{}",
     "I look.{}", "", ""},
    {"harmony", HARMONY, "<|channel|>commentary to=functions.time<|message|>{\"a\":", "{\"a\":", "", ""},
    {"harmony", HARMONY, "Just text", "Just text", "", ""},
    {"harmony", HARMONY, "<|channel|>final<|message|>Yes.<|end|><|start|>assist", "Yes.", "", ""},
    {"harmony", HARMONY, "<|start|>assistant<|channel|>anal", "", "", ""},
    {"harmony", HARMONY, "<|start|><|start|>a<|start|>", "", "", ""},
    {"harmony", HARMONY, " to", "to", "", ""},
    {"harmony", HARMONY, " to=f", "", "", ""},
};
enum { N_CASES = sizeof(CASES) / sizeof(CASES[0]) };

struct told {
    struct bytes text, reasoning, calls, *arguments;
    uint32_t n;
};

static void add(struct told *t, struct reply *r)
{
    const struct reply_delta *d = reply_delta(r);
    bytes_append(&t->text, d->text.data ? d->text.data : "", d->text.len);
    bytes_append(&t->reasoning, d->reasoning.data ? d->reasoning.data : "", d->reasoning.len);
    for (size_t i = 0; i < d->n_calls; i++) {
        const struct reply_call *c = &d->calls[i];
        ck_assert_uint_eq(c->index, c->name.len ? t->n : t->n - 1);
        if (c->name.len) {
            bytes_printf(&t->calls, "%s%s(", t->n ? ") " : "", c->name.data);
            t->n++;
        }
        bytes_append(&t->calls, c->arguments.data ? c->arguments.data : "", c->arguments.len);
    }
    reply_clear(r);
}

static void free_told(struct told *t)
{
    bytes_free(&t->text);
    bytes_free(&t->reasoning);
    bytes_free(&t->calls);
}

/* Feeds pieces of at most `most` bytes; 0: all at once. */
static struct told feed(const struct reply_params *p, const char *answer, size_t most, unsigned seed)
{
    struct told t = {0};
    struct reply *r = reply_open(p);
    size_t len = strlen(answer);
    for (size_t at = 0; at < len;) {
        size_t n = most ? 1 + (size_t)rand_r(&seed) % most : len;
        n = n < len - at ? n : len - at;
        reply_feed(r, answer + at, n);
        if (n % 3) /* else the next delta has more */
            add(&t, r);
        at += n;
    }
    reply_end(r);
    add(&t, r);
    ck_assert_uint_eq(t.n, reply_calls(r));
    reply_close(r);
    if (t.n)
        bytes_append(&t.calls, ")", 1);
    return t;
}

static const char *text_of(const struct bytes *b)
{
    return b->data ? b->data : "";
}

static void check_case(const struct reply_case *c, struct reply_params p, size_t most, unsigned seed)
{
    p.convention = convention_of(c->source, strlen(c->source));
    ck_assert_str_eq(convention_name(p.convention), c->name);
    struct told t = feed(&p, c->answer, most, seed);
    ck_assert_msg(!strcmp(text_of(&t.text), c->text), "%s: text '%s', expected '%s'", c->answer, text_of(&t.text),
                  c->text);
    ck_assert_msg(!strcmp(text_of(&t.reasoning), c->reasoning), "%s: reasoning '%s'", c->answer, text_of(&t.reasoning));
    ck_assert_msg(!strcmp(text_of(&t.calls), c->calls), "%s: calls '%s', expected '%s'", c->answer, text_of(&t.calls),
                  c->calls);
    free_told(&t);
}

static json_t *tools(void)
{
    json_t *v = json_loads(TOOLS, 0, NULL);
    ck_assert_ptr_nonnull(v);
    return v;
}

START_TEST(test_answers_are_told_apart_however_they_come)
{
    const struct reply_params p = {.tools = tools(), .has_reasoning = true};
    check_case(&CASES[_i], p, 0, 0);
    check_case(&CASES[_i], p, 1, 0);
    for (unsigned seed = 1; seed <= 200; seed++)
        check_case(&CASES[_i], p, 2 + seed % 12, seed);
    json_decref(p.tools);
}
END_TEST

START_TEST(test_without_tools_calls_are_text)
{
    static const char ANSWER[] = "<tool_call>{\"name\": \"time\"}</tool_call>";
    const struct reply_case c = {"hermes", HERMES, ANSWER, ANSWER, "", ""};
    check_case(&c, (struct reply_params){.has_reasoning = true}, 1, 0);
}
END_TEST

START_TEST(test_reasoning_is_text_unless_it_is_told_apart)
{
    const struct reply_case text = {"hermes", HERMES, "<think>a</think>b", "<think>a</think>b", "", ""},
                            channel =
                                {"harmony",
                                 HARMONY,
                                 "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
                                 "ab",
                                 "",
                                 ""},
                            begun = {"hermes", HERMES, "a</think>\n\nb", "b", "a", ""};
    check_case(&text, (struct reply_params){0}, 1, 0);
    check_case(&channel, (struct reply_params){0}, 1, 0);
    check_case(&begun, (struct reply_params){.has_reasoning = true, .begins_reasoning = true}, 1, 0);
}
END_TEST

START_TEST(test_special_tokens_with_a_meaning_are_known)
{
    static const struct {
        const char *source, *token;
        bool is_call, is_reasoning;
    } TOKENS[] = {{HERMES, "<tool_call>", true, false},
                  {HERMES, "</think>", false, true},
                  {HERMES, "<|im_end|>", false, false},
                  {DEEPSEEK, "<｜tool▁sep｜>", true, false},
                  {DEEPSEEK, "<｜end▁of▁sentence｜>", false, false},
                  {MISTRAL_ARGS, "[ARGS]", true, false},
                  {MISTRAL_ARGS, "[THINK]", false, true},
                  {MISTRAL_ARGS, "<think>", false, false},
                  {HARMONY, "<|call|>", false, true},
                  {"none", "<think>", false, true},
                  {"none", "<tool_call>", false, false}};
    for (size_t i = 0; i < sizeof(TOKENS) / sizeof(TOKENS[0]); i++) {
        const struct convention *c = convention_of(TOKENS[i].source, strlen(TOKENS[i].source));
        size_t len = strlen(TOKENS[i].token);
        ck_assert(convention_is_mark_of_calls(c, TOKENS[i].token, len) == TOKENS[i].is_call);
        ck_assert(convention_is_mark_of_reasoning(c, TOKENS[i].token, len) == TOKENS[i].is_reasoning);
    }
    ck_assert(convention_ends_in_reasoning(NULL, "a <think>\n", 10) &&
              !convention_ends_in_reasoning(NULL, "a <think> b", 11));
    ck_assert(convention_reasons(NULL, "x </think>", 10) && !convention_reasons(NULL, "x", 1));
}
END_TEST

/* is_strict: arguments come as the model says them, and what a cut leaves is told, too. */
START_TEST(test_arguments_that_a_grammar_makes_are_told_as_they_come)
{
    static const struct reply_case STRICT[] = {
        {"hermes", HERMES,
         "Hm.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"a\\\"}{b\", \"days\": "
         "2}}\n</tool_call>",
         "Hm.", "", "weather({\"city\": \"a\\\"}{b\", \"days\": 2})"},
        {"mistral-args", MISTRAL_ARGS, "[TOOL_CALLS]weather[ARGS]{\"city\": [\"x\"]}[TOOL_CALLS]time[ARGS]{}", "", "",
         "weather({\"city\": [\"x\"]}) time({})"},
        {"harmony", HARMONY, "<|channel|>commentary to=functions.weather<|message|>{\"city\":  \"x\"}", "", "",
         "weather({\"city\":  \"x\"})"},
        {"hermes", HERMES, "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Par", "", "",
         "weather({\"city\": \"Par)"},
        {"llama-json", LLAMA, "{\"name\": \"weather\", \"parameters\": {\"city\": \"Rome\"}}", "", "",
         "weather({\"city\": \"Rome\"})"},
    };
    const struct reply_params p = {.tools = tools(), .is_strict = true};
    for (size_t i = 0; i < sizeof(STRICT) / sizeof(STRICT[0]); i++) {
        check_case(&STRICT[i], p, 0, 0);
        check_case(&STRICT[i], p, 1, 0);
        for (unsigned seed = 1; seed <= 100; seed++)
            check_case(&STRICT[i], p, 2 + seed % 12, seed);
    }
    json_decref(p.tools);
}
END_TEST

/* Behind the beginning of a call: LONG_BYTES of an argument, and the end. */
static const struct {
    const char *source, *begin, *end;
} LONG[] = {
    {HERMES, "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"", "\"}}</tool_call>"},
    {"<tool_call><function=", "<tool_call><function=weather><parameter=city>", "</parameter></function></tool_call>"},
    {"<tool_call><arg_key>", "<tool_call>weather<arg_key>city</arg_key><arg_value>", "</arg_value></tool_call>"},
    {"[TOOL_CALLS][ARGS]", "[TOOL_CALLS]weather[ARGS]{\"city\": \"", "\"}"},
    {"func_name1(params_name1", "[weather(city='", "')]"},
    {"<|channel|><|message|>", "<|channel|>commentary to=functions.weather<|message|>{\"city\": \"", "\"}<|call|>"},
};

START_TEST(test_work_grows_with_the_length_of_a_call)
{
    enum { LONG_BYTES = 600000 };
    struct bytes answer = {0};
    bytes_append(&answer, LONG[_i].begin, strlen(LONG[_i].begin));
    while (answer.len < LONG_BYTES)
        bytes_append(&answer, "{ \\n ]}", 7);
    bytes_append(&answer, LONG[_i].end, strlen(LONG[_i].end) + 1);
    for (int is_strict = 0; is_strict < 2; is_strict++) {
        const struct reply_params p = {.convention = convention_of(LONG[_i].source, strlen(LONG[_i].source)),
                                       .tools = tools(),
                                       .is_strict = is_strict};
        clock_t began = clock();
        struct told t = feed(&p, answer.data, 3, 0);
        double s = (double)(clock() - began) / CLOCKS_PER_SEC;
        ck_assert_msg(t.calls.len > LONG_BYTES - 200 && !t.text.len, "%s: %zu bytes of calls, %zu of text",
                      LONG[_i].begin, t.calls.len, t.text.len);
        ck_assert_msg(s < 5, "%s: %.1f s", LONG[_i].begin, s);
        free_told(&t);
        json_decref(p.tools);
    }
    bytes_free(&answer);
}
END_TEST

START_TEST(test_no_convention_no_calls)
{
    ck_assert_ptr_null(convention_of("{{ messages }}", 14));
    ck_assert_str_eq(convention_name(NULL), "none");
    const struct reply_params p = {.tools = tools(), .has_reasoning = true};
    struct told t = feed(&p, "<think>a</think><tool_call>{\"name\": \"time\"}</tool_call>", 3, 1);
    ck_assert_str_eq(text_of(&t.reasoning), "a");
    ck_assert_str_eq(text_of(&t.text), "<tool_call>{\"name\": \"time\"}</tool_call>");
    free_told(&t);
    json_decref(p.tools);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("reply");
    TCase *all = tcase_create("answers");
    tcase_add_loop_test(all, test_answers_are_told_apart_however_they_come, 0, N_CASES);
    tcase_add_test(all, test_without_tools_calls_are_text);
    tcase_add_test(all, test_reasoning_is_text_unless_it_is_told_apart);
    tcase_add_test(all, test_special_tokens_with_a_meaning_are_known);
    tcase_add_test(all, test_arguments_that_a_grammar_makes_are_told_as_they_come);
    tcase_add_loop_test(all, test_work_grows_with_the_length_of_a_call, 0, sizeof(LONG) / sizeof(LONG[0]));
    tcase_add_test(all, test_no_convention_no_calls);
    suite_add_tcase(s, all);
    return tap_main(s);
}
