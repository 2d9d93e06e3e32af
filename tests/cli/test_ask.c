/*
 * Requests as JSON members and as options (proto/ask): what each type takes, and the message that comes of
 * it.
 */

#include "base/mem.h"
#include "proto/ask/ask_bounds.h"
#include "proto/ask/ask_message.h"
#include "proto/ask/ask_params.h"
#include "tests/tap.h"

static const struct ask_param *param(const char *name)
{
    const struct ask_param *p = ask_param_find(name);
    ck_assert_msg(p != NULL, "no parameter %s", name);
    return p;
}

/* -------------------------------------------------------------- command line */

/* What ask_param_parse makes of a text: JSON, or the refusal. */
static const struct {
    const char *name, *text, *want;
    bool refused;
} TEXTS[] = {
    {"top_k", "12", "12"},
    {"top_k", "-1", "F: must be a whole number from 0 to 1073741824", true},
    {"top_k", "1.5", "F: '1.5' is not N", true},
    {"top_k", "", "F: '' is not N", true},
    {"top_k", "99999999999999999999", "F: '99999999999999999999' is not N", true},
    {"temperature", "0.5", "0.5"},
    {"temperature", "1e2", "100.0"},
    {"temperature", "-0.1", "F: must be a number from 0 to 100", true},
    {"temperature", "100.1", "F: must be a number from 0 to 100", true},
    {"temperature", "nan", "F: 'nan' is not X", true},
    {"temperature", "0.5x", "F: '0.5x' is not X", true},
    {"deadline_ms", "250", "250"},
    {"deadline_ms", "250ms", "250"},
    {"deadline_ms", "1.001s", "1001"}, /* 1.001 * 1000 is a little less than 1001 */
    {"deadline_ms", "5m", "300000"},
    {"deadline_ms", "0.5ms", "F: '0.5ms' is not TIME", true},
    {"deadline_ms", "5 weeks", "F: '5 weeks' is not TIME", true},
    {"deadline_ms", "5000000s", "F: must be a whole number from 0 to 4294967295", true},
    {"ttft_ms", "0.5ms", "0.5"},
    {"ttft_ms", "2s", "2000.0"},
    {"ttft_ms", "0", "0.0"},
    {"ttft_ms", "0.0001", "F: must be 0, or milliseconds from 0.001 to 1e+12", true},
    {"seed", "0", "0"},
    {"seed", "9223372036854775807", "9223372036854775807"},
    {"seed", "9223372036854775808", "\"9223372036854775808\""},
    {"seed", "18446744073709551615", "\"18446744073709551615\""},
    {"seed", "18446744073709551616", "F: '18446744073709551616' is not N", true},
    {"seed", "-1", "F: '-1' is not N", true},
    {"seed", "+1", "F: '+1' is not N", true},
    {"stop_ids", "1,2,3", "[1,2,3]"},
    {"stop_ids", "", "[]"},
    {"stop_ids", "1,", "F: '1,' is not ID,...", true},
    {"stop_ids", "1],[2", "F: '1],[2' is not ID,...", true},
    {"stop_ids", "1,-2", "F: entry 1 is not one of token ids", true},
    {"stop_ids", "4294967296", "F: entry 0 is not one of token ids", true},
    {"stop", "\"", "\"\\\"\""},
    {"stop", "", "F: must be one or a list of texts of 1 to 256 bytes", true},
    {"logit_bias", "{\"5\": -100}", "{\"5\":-100}"},
    {"logit_bias", "{\"5\": 101}", "F: '5': must be a number from -100 to 100", true},
    {"logit_bias", "{\"x\": 1}", "F: 'x' is no token id", true},
    {"logit_bias", "{\"\": 1}", "F: '' is no token id", true},
    {"logit_bias", "{\"5\": 1, \"5\": 2}", "F: '{\"5\": 1, \"5\": 2}' is not JSON", true},
    {"logit_bias", "[]", "F: must be an object of at most 1024 members", true},
    {"tools", "[{}]", "[{}]"},
    {"tools", "{}", "F: must be a list", true},
    {"variables", "{\"a\": true}", "{\"a\":true}"},
    {"variables", "[]", "F: must be an object", true},
    {"tenant", "me", "\"me\""},
    {"tenant", "12345678901234567890123456789012345678901234567890123456789012345", "F: 65 bytes, at most 64", true},
};
enum { N_TEXTS = sizeof(TEXTS) / sizeof(TEXTS[0]) };

START_TEST(test_texts_of_options_become_values_or_are_refused)
{
    struct td_error e = {{0}};
    json_t *v = NULL;
    enum td_status s = ask_param_parse(param(TEXTS[_i].name), "F", TEXTS[_i].text, &v, &e);
    ck_assert_int_eq(s, TEXTS[_i].refused ? TD_ERR_INVALID : TD_OK);
    if (s) {
        ck_assert_str_eq(e.text, TEXTS[_i].want);
        ck_assert_ptr_null(v);
        return;
    }
    char *got = json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY);
    ck_assert_str_eq(got, TEXTS[_i].want);
    free(got);
    json_decref(v);
}
END_TEST

START_TEST(test_a_seed_comes_back_from_what_is_printed)
{
    const uint64_t seeds[] = {0, 1, INT64_MAX, (uint64_t)INT64_MAX + 1, UINT64_MAX};
    for (int i = 0; i < 5; i++) {
        struct td_error e;
        json_t *v = ask_seed_json(seeds[i]);
        ck_assert_int_eq(ask_param_check(param("seed"), "seed", v, &e), TD_OK);
        ck_assert_uint_eq(ask_seed_value(v), seeds[i]);
        json_decref(v);
    }
}
END_TEST

/* ---------------------------------------------------------------- JSON lines */

static json_t *object(const char *text)
{
    json_t *o = json_loads(text, JSON_ALLOW_NUL, NULL);
    ck_assert_msg(json_is_object(o), "%s", text);
    return o;
}

/* Members that are refused, beside a prompt, and how. */
static const struct {
    const char *line, *want;
} LINES[] = {
    {"{\"max_token\": 5, \"prompt\": \"x\"}", "max_token: no such member"},
    {"{}", "prompt: none of prompt, prompt_ids, messages is there"},
    {"{\"prompt\": \"x\", \"prompt_ids\": [1]}", "prompt: can't be given together with prompt_ids"},
    {"{\"messages\": [], \"prompt\": \"x\"}", "messages: can't be given together with prompt"},
    {"{\"greedy\": true, \"temperature\": 1, \"prompt\": \"x\"}", "greedy: can't be given together with temperature"},
    {"{\"tools\": [], \"prompt\": \"x\"}", "tools: has a meaning only together with messages"},
    {"{\"add_special_tokens\": true, \"messages\": []}", "add_special_tokens: has a meaning only together with prompt"},
    {"{\"prompt\": 5}", "prompt: must be a text"},
    {"{\"prompt_ids\": [1, 1.5]}", "prompt_ids: entry 1 is not one of token ids"},
    {"{\"prompt_ids\": 1}", "prompt_ids: must be a list of token ids"},
    {"{\"messages\": [\"x\"]}", "messages: entry 0 is not one of objects"},
    {"{\"prompt\": \"x\", \"n\": 0}", "n: must be a whole number from 1 to 16"},
    {"{\"prompt\": \"x\", \"n\": true}", "n: must be a whole number from 1 to 16"},
    {"{\"prompt\": \"x\", \"n\": 2.0}", "n: must be a whole number from 1 to 16"},
    {"{\"prompt\": \"x\", \"echo\": 1}", "echo: must be true or false"},
    {"{\"prompt\": \"x\", \"priority\": 1.5}", "priority: must be a whole number from -10 to 10"},
    {"{\"prompt\": \"x\", \"priority\": -11}", "priority: must be a whole number from -10 to 10"},
    {"{\"prompt\": \"x\", \"seed\": -1}", "seed: must be a whole number from 0 to 2^64 - 1, over 2^63 - 1 in quotes"},
    {"{\"prompt\": \"x\", \"seed\": \"1x\"}",
     "seed: must be a whole number from 0 to 2^64 - 1, over 2^63 - 1 in quotes"},
    {"{\"prompt\": \"x\", \"stop\": [\"a\", \"\"]}", "stop: entry 1 is not one of texts of 1 to 256 bytes"},
    {"{\"prompt\": \"x\", \"stop\": [\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\","
     "\"a\",\"a\",\"a\",\"a\"]}",
     "stop: 17 entries, at most 16"},
    {"{\"prompt\": \"x\", \"tpot_ms\": -1}", "tpot_ms: must be 0, or milliseconds from 0.001 to 1e+12"},
    {"{\"prompt\": \"x\", \"ttft_ms\": \"2s\"}", "ttft_ms: must be 0, or milliseconds from 0.001 to 1e+12"},
};
enum { N_LINES = sizeof(LINES) / sizeof(LINES[0]) };

START_TEST(test_a_line_that_can_not_be_used_names_its_member)
{
    struct td_error e = {{0}};
    struct ask_message *m = NULL;
    json_t *line = object(LINES[_i].line);
    ck_assert_int_eq(ask_message_make(line, &m, &e), TD_ERR_INVALID);
    ck_assert_str_eq(e.text, LINES[_i].want);
    ck_assert_ptr_null(m);
    json_decref(line);
}
END_TEST

static json_t *made_of; /* the message borrows from it */

static struct ask_message *make(const char *line)
{
    struct td_error e = {{0}};
    struct ask_message *m = NULL;
    made_of = object(line);
    ck_assert_msg(!ask_message_make(made_of, &m, &e), "%s", e.text);
    return m;
}

static void end(struct ask_message *m)
{
    ask_message_free(m);
    json_decref(made_of);
}

static void expect_bytes(ProtobufCBinaryData b, const char *text)
{
    ck_assert_uint_eq(b.len, strlen(text));
    ck_assert_mem_eq(b.data ? b.data : (uint8_t *)"", text, b.len);
}

START_TEST(test_what_a_line_does_not_say_is_not_set)
{
    struct ask_message *b = make("{\"prompt\": \"x\"}");
    const Tandem__V1__GenerateRequest *m = ask_message_get(b);
    ck_assert_int_eq(m->prompt_case, TANDEM__V1__GENERATE_REQUEST__PROMPT_TEXT);
    expect_bytes(m->text, "x");
    ck_assert(m->want_ids && !m->want_logprobs);
    ck_assert_int_eq(m->sampling->has_temperature_case, 0);
    ck_assert_int_eq(m->sampling->has_seed_case, 0);
    ck_assert_int_eq(m->stopping->has_max_tokens_case, 0);
    ck_assert_int_eq(m->has_add_special_tokens_case, 0);
    ck_assert_int_eq(m->has_skip_special_tokens_case, 0);
    end(b);
}
END_TEST

START_TEST(test_numbers_of_a_line_are_set_even_if_they_are_0)
{
    struct ask_message *b = make("{\"prompt_ids\": [7, 8], \"temperature\": 0, \"top_k\": 0, \"max_tokens\": 0,"
                                 " \"seed\": \"18446744073709551615\", \"priority\": -3, \"presence_penalty\": -1.5,"
                                 " \"skip_special_tokens\": false, \"logprobs\": true}");
    const Tandem__V1__GenerateRequest *m = ask_message_get(b);
    ck_assert_int_eq(m->prompt_case, TANDEM__V1__GENERATE_REQUEST__PROMPT_TOKENS);
    ck_assert_uint_eq(m->tokens->n_ids, 2);
    ck_assert_uint_eq(m->tokens->ids[1], 8);
    ck_assert_int_eq(m->sampling->has_temperature_case, TANDEM__V1__SAMPLING__HAS_TEMPERATURE_TEMPERATURE);
    ck_assert_int_eq(m->sampling->has_top_k_case, TANDEM__V1__SAMPLING__HAS_TOP_K_TOP_K);
    ck_assert_int_eq(m->stopping->has_max_tokens_case, TANDEM__V1__STOPPING__HAS_MAX_TOKENS_MAX_TOKENS);
    ck_assert_uint_eq(m->sampling->seed, UINT64_MAX);
    ck_assert_int_eq(m->priority, -3);
    ck_assert_float_eq(m->sampling->presence_penalty, -1.5f);
    ck_assert_int_eq(m->has_skip_special_tokens_case,
                     TANDEM__V1__GENERATE_REQUEST__HAS_SKIP_SPECIAL_TOKENS_SKIP_SPECIAL_TOKENS);
    ck_assert(!m->skip_special_tokens && m->want_logprobs);
    end(b);
}
END_TEST

START_TEST(test_greedy_is_temperature_0_and_false_is_nothing)
{
    struct ask_message *b = make("{\"prompt\": \"x\", \"greedy\": true}");
    const Tandem__V1__Sampling *s = ask_message_get(b)->sampling;
    ck_assert_int_eq(s->has_temperature_case, TANDEM__V1__SAMPLING__HAS_TEMPERATURE_TEMPERATURE);
    ck_assert_float_eq(s->temperature, 0);
    end(b);
    b = make("{\"prompt\": \"x\", \"greedy\": false, \"temperature\": 0.5}");
    s = ask_message_get(b)->sampling;
    ck_assert_float_eq(s->temperature, 0.5f);
    end(b);
}
END_TEST

START_TEST(test_lists_of_a_line_become_lists_of_the_message)
{
    struct ask_message *b = make("{\"prompt\": \"x\", \"stop\": [\"a\", \"b\\u0000c\"], \"stop_ids\": [4],"
                                 " \"allowed_ids\": [5, 6], \"logit_bias\": {\"9\": 2.5}}");
    const Tandem__V1__GenerateRequest *m = ask_message_get(b);
    ck_assert_uint_eq(m->stopping->n_stop, 2);
    ck_assert_uint_eq(m->stopping->stop[1].len, 3);
    ck_assert_uint_eq(m->stopping->n_stop_ids, 1);
    ck_assert_uint_eq(m->stopping->stop_ids[0], 4);
    ck_assert_uint_eq(m->sampling->n_allowed_ids, 2);
    ck_assert_uint_eq(m->sampling->allowed_ids[1], 6);
    ck_assert_uint_eq(m->sampling->n_logit_bias, 1);
    ck_assert_uint_eq(m->sampling->logit_bias[0]->id, 9);
    ck_assert_float_eq(m->sampling->logit_bias[0]->bias, 2.5f);
    end(b);
    b = make("{\"prompt\": \"x\", \"stop\": \"one\"}");
    ck_assert_uint_eq(ask_message_get(b)->stopping->n_stop, 1);
    expect_bytes(ask_message_get(b)->stopping->stop[0], "one");
    end(b);
}
END_TEST

START_TEST(test_messages_with_more_than_role_and_content_go_as_json)
{
    struct ask_message *b = make("{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"},"
                                 " {\"role\": \"tool\", \"content\": \"4\", \"name\": \"add\"},"
                                 " {\"role\": \"user\", \"content\": [1]}],"
                                 " \"tools\": [ 1 ], \"variables\": {\"a\": null}, \"add_generation_prompt\": false}");
    const Tandem__V1__GenerateRequest *m = ask_message_get(b);
    ck_assert_int_eq(m->prompt_case, TANDEM__V1__GENERATE_REQUEST__PROMPT_CHAT);
    ck_assert_uint_eq(m->chat->n_messages, 3);
    expect_bytes(m->chat->messages[0]->role, "user");
    expect_bytes(m->chat->messages[0]->content, "Hi");
    ck_assert_uint_eq(m->chat->messages[0]->json.len, 0);
    expect_bytes(m->chat->messages[1]->json, "{\"role\":\"tool\",\"content\":\"4\",\"name\":\"add\"}");
    expect_bytes(m->chat->messages[2]->json, "{\"role\":\"user\",\"content\":[1]}");
    expect_bytes(m->chat->tools, "[1]");
    expect_bytes(m->chat->variables, "{\"a\":null}");
    ck_assert(m->chat->no_generation_prompt);
    end(b);
    b = make("{\"messages\": []}");
    ck_assert(!ask_message_get(b)->chat->no_generation_prompt);
    end(b);
}
END_TEST

START_TEST(test_an_id_is_any_value_and_its_label_is_cut)
{
    struct ask_message *b = make("{\"prompt\": \"x\", \"id\": [1, 2]}");
    ck_assert_uint_eq(ask_message_get(b)->request_id.len, 0);
    end(b);
    b = make("{\"prompt\": \"x\", \"id\": \"12345678901234567890123456789012345678901234567890123456789012345\"}");
    ck_assert_uint_eq(ask_message_get(b)->request_id.len, ASK_MAX_LABEL_BYTES);
    end(b);
}
END_TEST

START_TEST(test_limits_are_rounded_up_for_older_routers)
{
    struct ask_message *b = make("{\"prompt\": \"x\", \"ttft_ms\": 0.25, \"tpot_ms\": 1e12}");
    const Tandem__V1__Slo *slo = ask_message_get(b)->slo;
    ck_assert_double_eq(slo->exact_ttft_ms, 0.25);
    ck_assert_uint_eq(slo->ttft_ms, 1);
    ck_assert_double_eq(slo->exact_tpot_ms, 1e12);
    ck_assert_uint_eq(slo->tpot_ms, UINT32_MAX);
    end(b);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("cli_ask");
    TCase *options = tcase_create("options"), *lines = tcase_create("lines");
    suite_add_tcase(s, options);
    suite_add_tcase(s, lines);
    tcase_add_loop_test(options, test_texts_of_options_become_values_or_are_refused, 0, N_TEXTS);
    tcase_add_test(options, test_a_seed_comes_back_from_what_is_printed);
    tcase_add_loop_test(lines, test_a_line_that_can_not_be_used_names_its_member, 0, N_LINES);
    tcase_add_test(lines, test_what_a_line_does_not_say_is_not_set);
    tcase_add_test(lines, test_numbers_of_a_line_are_set_even_if_they_are_0);
    tcase_add_test(lines, test_greedy_is_temperature_0_and_false_is_nothing);
    tcase_add_test(lines, test_lists_of_a_line_become_lists_of_the_message);
    tcase_add_test(lines, test_messages_with_more_than_role_and_content_go_as_json);
    tcase_add_test(lines, test_an_id_is_any_value_and_its_label_is_cut);
    tcase_add_test(lines, test_limits_are_rounded_up_for_older_routers);
    return tap_main(s);
}
