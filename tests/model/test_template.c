/* Compares templates with the output of jinja2 (tests/model/templates, made by make_cases.py there). Also
 * templates that are refused at load, and limits. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/chat.h"
#include "model/template.h"
#include "tests/tap.h"

static json_t *load_cases(void)
{
    json_error_t je;
    json_t *root = json_load_file(TEMPLATES "/cases.json", 0, &je);
    ck_assert_msg(root != NULL, "line %d: %s", je.line, je.text);
    return root;
}

static struct template *parse(const char *source, size_t len)
{
    struct template *t = NULL;
    struct td_error e = {{0}};
    ck_assert_msg(!template_parse(source, len, &t, &e), "%s\nin %s", e.text, source);
    return t;
}

START_TEST(test_template_renders_as_jinja2_does)
{
    json_t *root = load_cases(), *c;
    size_t i;
    ck_assert_uint_gt(json_array_size(json_object_get(root, "cases")), 50);
    json_array_foreach(json_object_get(root, "cases"), i, c)
    {
        json_t *source = json_object_get(c, "template"), *want = json_object_get(c, "text");
        struct template *t = parse(json_string_value(source), json_string_length(source));
        struct bytes got = {0};
        struct td_error e = {{0}};
        enum td_status s = template_render(t, json_object_get(root, "variables"), 0, &got, &e);
        if (want)
            ck_assert_msg(!s && got.len == json_string_length(want) &&
                              (!got.len || !memcmp(got.data, json_string_value(want), got.len)),
                          "%s\ngot    '%s' %s\nwanted '%s'", json_string_value(source), got.data ? got.data : "",
                          e.text, json_string_value(want));
        else
            ck_assert_msg(s == TD_ERR_INVALID && e.text[0] && !got.len, "%s: is '%s'", json_string_value(source),
                          got.data ? got.data : "");
        bytes_free(&got);
        template_close(t);
    }
    json_decref(root);
}
END_TEST

START_TEST(test_template_refusals_at_load_name_the_place)
{
    json_t *root = load_cases(), *c;
    size_t i;
    json_array_foreach(json_object_get(root, "refused"), i, c)
    {
        const char *source = json_string_value(json_object_get(c, "template")),
                   *names = json_string_value(json_object_get(c, "names"));
        struct template *t = NULL;
        struct td_error e = {{0}};
        ck_assert_msg(template_parse(source, strlen(source), &t, &e) != TD_OK, "accepted: %s", source);
        ck_assert_msg(strstr(e.text, names) && strstr(e.text, "line"), "'%s' does not name '%s'", e.text, names);
    }
    json_decref(root);
}
END_TEST

static const char *const ENDLESS[] = {
    "{% for a in range(9999) %}{% for b in range(9999) %}{% set x = a * b %}{% endfor %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% set ns = namespace(s='x') %}{% for a in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{{ 'x' * 999999999 }}",
    "{{ [1] * 99999999 }}",
    "{% for a in range(9999) %}{{ 'xxxxxxxxxx' * 9999 }}{% endfor %}",
    "{% set ns = namespace(l=[1]) %}{% for a in range(99) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "{{ ('x' * 9999999).split('x') | length }}",
};
enum { N_ENDLESS = sizeof(ENDLESS) / sizeof(ENDLESS[0]) };

/* Each case has a time limit of its own, because one of them takes seconds under a sanitizer. */
START_TEST(test_template_limits_hold)
{
    struct template *t = parse(ENDLESS[_i], strlen(ENDLESS[_i]));
    struct bytes out = {0};
    struct td_error e = {{0}};
    json_t *none = json_object();
    enum td_status s = template_render(t, none, 0, &out, &e);
    ck_assert_msg(s == TD_ERR_NO_SPACE || s == TD_ERR_INVALID, "%s: %s", ENDLESS[_i], td_status_name(s));
    ck_assert_msg(e.text[0] && !out.len, "%s", ENDLESS[_i]);
    json_decref(none);
    template_close(t);
}
END_TEST

START_TEST(test_template_tells_the_time_it_is_given)
{
    static const char SOURCE[] = "{{ strftime_now('%Y') }}";
    struct template *t = parse(SOURCE, sizeof(SOURCE) - 1);
    struct bytes out = {0};
    json_t *none = json_object();
    ck_assert_int_eq(template_render(t, none, 1000000000, &out, NULL), TD_OK);
    ck_assert_str_eq(out.data, "2001");
    bytes_free(&out);
    json_decref(none);
    template_close(t);
}
END_TEST

/* --------------------------------------------------------------------- chat */

static void write_file(const char *dir, const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    FILE *f = fopen(path, "w");
    ck_assert_ptr_nonnull(f);
    fputs(text, f);
    fclose(f);
}

static void check_chat(const char *dir, const char *file, const char *tools, const char *wanted)
{
    struct chat_template *c;
    struct td_error e = {{0}};
    struct bytes out = {0};
    ck_assert_msg(!chat_template_open(dir, file, &c, &e), "%s", e.text);
    struct chat_request q = {.messages = json_pack("[{s:s, s:s}]", "role", "user", "content", "Hi"),
                             .tools = tools ? json_loads(tools, 0, NULL) : NULL,
                             .add_generation_prompt = true};
    ck_assert_msg(!chat_template_render(c, &q, &out, &e), "%s", e.text);
    ck_assert_str_eq(out.data, wanted);
    json_decref(q.messages);
    q.messages = json_array();
    ck_assert_int_eq(chat_template_render(c, &q, &out, &e), TD_ERR_INVALID);
    json_decref(q.messages);
    json_decref(q.tools);
    bytes_free(&out);
    chat_template_close(c);
}

static void refuses_tools(const char *dir, const char *file, const char *tools, const char *why)
{
    struct chat_template *c;
    struct td_error e = {{0}};
    struct bytes out = {0};
    ck_assert_msg(!chat_template_open(dir, file, &c, &e), "%s", e.text);
    struct chat_request q = {.messages = json_pack("[{s:s, s:s}]", "role", "user", "content", "Hi"),
                             .tools = json_loads(tools, 0, NULL)};
    ck_assert_int_ne(chat_template_render(c, &q, &out, &e), TD_OK);
    ck_assert_msg(strstr(e.text, why), "%s: %s", tools, e.text);
    json_decref(q.messages);
    json_decref(q.tools);
    chat_template_close(c);
}

START_TEST(test_chat_takes_the_template_that_applies)
{
    char dir[] = "/tmp/tandem-chat-XXXXXX", file[64], command[128];
    struct chat_template *c;
    struct td_error e = {{0}};
    ck_assert_ptr_nonnull(mkdtemp(dir));
    ck_assert_int_eq(chat_template_open(dir, NULL, &c, &e), TD_OK);
    ck_assert(!chat_template_present(c));
    struct chat_request q = {.messages = NULL};
    ck_assert_int_eq(chat_template_render(c, &q, NULL, &e), TD_ERR_UNSUPPORTED);
    chat_template_close(c);

    write_file(
        dir, "tokenizer_config.json",
        "{\"bos_token\":{\"content\":\"<s>\"},\"eos_token\":null,\"model_max_length\":1000000000000000019884624838656,"
        "\"chat_template\":[{\"name\":\"default\",\"template\":\"{{bos_token}}{{messages[0].content}}\"},"
        "{\"name\":\"tool_use\",\"template\":\"{{eos_token}}{{tools[0].name}}{{add_generation_prompt}}\"}]}");
    check_chat(dir, NULL, NULL, "<s>Hi");
    check_chat(dir, NULL, "[{\"name\":\"f\"}]", "fTrue");
    refuses_tools(dir, NULL, "[{\"name\":\"f\"},{\"name\":\"a b\"}]", "chat.tools[1]: must be a function");
    refuses_tools(dir, NULL, "[{\"type\":\"function\",\"function\":{\"name\":\"\"}}]", "chat.tools[0]");
    refuses_tools(dir, NULL, "[5]", "chat.tools[0]");
    refuses_tools(dir, NULL, "{}", "not a list");
    write_file(dir, "chat_template.jinja", "file {{ messages[0].role }}{{ tools is none }}");
    check_chat(dir, NULL, NULL, "file userTrue");
    snprintf(file, sizeof(file), "%s/other", dir);
    write_file(dir, "other", "{% for m in messages %}{{ m.content }}{% endfor %}{{ bos_token }}");
    check_chat(dir, file, NULL, "Hi<s>");
    refuses_tools(dir, file, "[{\"name\":\"f\"}]", "template can't offer functions");

    write_file(dir, "chat_template.jinja", "ok\n{% import 'x' %}");
    ck_assert_int_eq(chat_template_open(dir, NULL, &c, &e), TD_ERR_UNSUPPORTED);
    ck_assert_msg(strstr(e.text, "line 2, column 4") && strstr(e.text, "import"), "%s", e.text);
    ck_assert_int_eq(chat_template_open(dir, "none", &c, &e), TD_OK);
    chat_template_close(c);
    ck_assert_int_eq(chat_template_open(dir, "/nonexistent", &c, &e), TD_ERR_NOT_FOUND);
    snprintf(command, sizeof(command), "rm -r %s", dir);
    ck_assert_int_eq(system(command), 0);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("template");
    TCase *t = tcase_create("template");
    tcase_set_timeout(t, 60);
    tcase_add_test(t, test_template_renders_as_jinja2_does);
    tcase_add_test(t, test_template_refusals_at_load_name_the_place);
    tcase_add_loop_test(t, test_template_limits_hold, 0, N_ENDLESS);
    tcase_add_test(t, test_template_tells_the_time_it_is_given);
    tcase_add_test(t, test_chat_takes_the_template_that_applies);
    suite_add_tcase(s, t);
    return tap_main(s);
}
