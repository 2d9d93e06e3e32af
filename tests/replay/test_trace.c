/* The trace reader: both formats, what is refused and by which words, and the real files where they are. */
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/random.h"
#include "replay/trace.h"
#include "tests/replay/shared.h"
#include "tests/tap.h"

static enum td_status parse(const char *text, struct trace **out, struct td_error *e)
{
    return trace_parse(text, strlen(text), out, e);
}

START_TEST(test_trace_reads_mooncake_lines)
{
    static const char TEXT[] =
        "{\"timestamp\": 1000, \"input_length\": 700, \"output_length\": 5, \"hash_ids\": [3, 9]}\r\n"
        "\n"
        "{\"hash_ids\": [], \"timestamp\": 1000.5, \"input_length\": 1, \"output_length\": 0, \"x\": {}}";
    struct trace *t;
    ck_assert_int_eq(parse(TEXT, &t, NULL), TD_OK);
    ck_assert_uint_eq(t->n_requests, 2);
    ck_assert_uint_eq(t->n_blocks, 2);
    ck_assert_uint_eq(t->requests[0].arrival_ns, 0);
    ck_assert_uint_eq(t->requests[0].n_prompt, 700);
    ck_assert_uint_eq(t->requests[0].n_output, 5);
    ck_assert_uint_eq(t->requests[0].n_blocks, 2);
    ck_assert_uint_eq(trace_blocks(t, &t->requests[0])[1], 9);
    ck_assert_uint_eq(t->requests[1].arrival_ns, NS_PER_MS / 2);
    ck_assert_uint_eq(t->requests[1].n_blocks, 0);
    trace_close(t);
}
END_TEST

START_TEST(test_trace_reads_azure_lines_over_a_leap_day)
{
    static const char TEXT[] = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
                               "2024-02-28 23:59:59.5000000,374,44\r\n"
                               "2024-02-29 00:00:00,1,0\n"
                               "2024-03-01 00:00:00.000000001,4085,62\n";
    struct trace *t;
    ck_assert_int_eq(parse(TEXT, &t, NULL), TD_OK);
    ck_assert_uint_eq(t->n_requests, 3);
    ck_assert_uint_eq(t->n_blocks, 0);
    ck_assert_uint_eq(t->requests[0].n_prompt, 374);
    ck_assert_uint_eq(t->requests[1].arrival_ns, NS_PER_S / 2);
    ck_assert_uint_eq(t->requests[2].arrival_ns, NS_PER_S / 2 + 86400 * NS_PER_S + 1);
    ck_assert_uint_eq(t->requests[2].n_output, 62);
    trace_close(t);
}
END_TEST

START_TEST(test_trace_sorts_by_arrival_and_keeps_the_order_of_equals)
{
    enum { N = 1000 };
    struct bytes b = {0};
    struct trace *t;
    for (uint32_t i = 0; i < N; i++)
        bytes_printf(&b, "{\"timestamp\": %u, \"input_length\": %u, \"output_length\": 1, \"hash_ids\": [%u]}\n",
                     (unsigned)(random_at(1, i, 0) % 20), i + 1, i);
    ck_assert_int_eq(trace_parse(b.data, b.len, &t, NULL), TD_OK);
    ck_assert_uint_eq(t->n_requests, N);
    for (uint32_t i = 0; i < N; i++) {
        const struct trace_request *r = &t->requests[i];
        ck_assert_uint_eq(trace_blocks(t, r)[0], r->n_prompt - 1);
        ck_assert(!i || r->arrival_ns > r[-1].arrival_ns ||
                  (r->arrival_ns == r[-1].arrival_ns && r->n_prompt > r[-1].n_prompt));
    }
    trace_close(t);
    bytes_free(&b);
}
END_TEST

#define GOOD  "{\"timestamp\": 0, \"input_length\": 2, \"output_length\": 1, \"hash_ids\": [1]}\n"
#define AZURE "TIMESTAMP,ContextTokens,GeneratedTokens\n"
static const struct {
    const char *text, *words; /* all of which the message must have, with blanks between; "" any */
} REFUSED[] = {
    {"", "no request"},
    {"\n \n", "no request"},
    {AZURE, "no request"},
    {GOOD "{", "line 2"},
    {GOOD "\n[1]\n", "line 3"},
    {GOOD "{} x", "line 2"},
    {GOOD "{\"input_length\": 2, \"output_length\": 1, \"hash_ids\": [1]}", "line 2: timestamp"},
    {"{\"timestamp\": -1, \"input_length\": 2, \"output_length\": 1, \"hash_ids\": [1]}", "line 1: timestamp"},
    {"{\"timestamp\": 1e300, \"input_length\": 2, \"output_length\": 1, \"hash_ids\": [1]}", "line 1: timestamp"},
    {"{\"timestamp\": 0, \"input_length\": 0, \"output_length\": 1, \"hash_ids\": []}", "line 1: input_length"},
    {"{\"timestamp\": 0, \"input_length\": 2.5, \"output_length\": 1, \"hash_ids\": []}", "line 1: input_length"},
    {"{\"timestamp\": 0, \"input_length\": 4294967298, \"output_length\": 1, \"hash_ids\": []}",
     "line 1: input_length"},
    {"{\"timestamp\": 0, \"input_length\": 2, \"output_length\": \"1\", \"hash_ids\": []}", "line 1: output_length"},
    {"{\"timestamp\": 0, \"input_length\": 2, \"output_length\": -1, \"hash_ids\": []}", "line 1: output_length"},
    {"{\"timestamp\": 0, \"input_length\": 2, \"output_length\": 1}", "line 1: hash_ids"},
    {"{\"timestamp\": 0, \"input_length\": 2, \"output_length\": 1, \"hash_ids\": [1, 2, 3]}", "line 1: hash_ids"},
    {"{\"timestamp\": 0, \"input_length\": 2, \"output_length\": 1, \"hash_ids\": [1, -2]}", "line 1: hash_ids[1]"},
    {"{\"timestamp\": 0, \"timestamp\": 0, \"input_length\": 2, \"output_length\": 1, \"hash_ids\": []}", "line 1"},
    {AZURE "2023-11-16 18:15:46,374", "line 2: ContextTokens"},
    {AZURE "2023-11-16 18:15:46,0,1", "line 2: ContextTokens"},
    {AZURE "2023-11-16 18:15:46,9999999999,1", "line 2: ContextTokens"},
    {AZURE "2023-11-16 18:15:46,1,2,3", "line 2: GeneratedTokens"},
    {AZURE "2023-11-16 18:15:46,1,", "line 2: GeneratedTokens"},
    {AZURE "2023-13-16 18:15:46,1,2", "line 2: TIMESTAMP"},
    {AZURE "2023-11-16 24:15:46,1,2", "line 2: TIMESTAMP"},
    {AZURE "2023-11-16 18:15:46.,1,2", "line 2: TIMESTAMP"},
    {AZURE "2023-11-16T18:15:46,1,2", "line 2: TIMESTAMP"},
    {"TIMESTAMP,Context\n", "line 1"},
};

START_TEST(test_trace_refuses_what_makes_no_sense_by_line_and_name)
{
    struct td_error e = {{0}};
    struct trace *t = NULL;
    ck_assert_int_eq(parse(REFUSED[_i].text, &t, &e), TD_ERR_INVALID);
    ck_assert_ptr_null(t);
    ck_assert_msg(strstr(e.text, REFUSED[_i].words) != NULL, "'%s' in '%s'", REFUSED[_i].words, e.text);
}
END_TEST

/* Each copy ends exactly where its allocation does, so that a sanitizer sees one byte too many. */
START_TEST(test_trace_survives_every_cut_and_every_flipped_byte)
{
    static const char *const TEXTS[] = {
        GOOD "{\"timestamp\": 7, \"input_length\": 9, \"output_length\": 1, \"hash_ids\": [1]}\n",
        AZURE "2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50,396,109\n"};
    const char *text = TEXTS[_i];
    size_t n = strlen(text), n_ok = 0;
    for (size_t cut = 0; cut <= n; cut++) {
        for (uint32_t flip = 0; flip < 9; flip++) {
            struct trace *t = NULL;
            char *data = mem_dup(text, cut);
            if (flip && cut)
                data[random_at(cut, flip, 0) % cut] ^= (char)(1u << (flip - 1));
            n_ok += trace_parse(data, cut, &t, NULL) == TD_OK;
            trace_close(t);
            free(data);
        }
    }
    ck_assert_uint_gt(n_ok, 0);
    ck_assert_uint_lt(n_ok, 9 * n);
}
END_TEST

START_TEST(test_trace_read_names_the_file)
{
    struct td_error e = {{0}};
    struct trace *t;
    ck_assert_int_eq(trace_read("/nonexistent/x.jsonl", 1 << 20, &t, &e), TD_ERR_NOT_FOUND);
    ck_assert_ptr_nonnull(strstr(e.text, "/nonexistent/x.jsonl"));
}
END_TEST

START_TEST(test_trace_reads_the_mooncake_conversations)
{
    char path[512];
    struct trace *t;
    struct td_error e = {{0}};
    if (!shared_path("test_trace_reads_the_mooncake_conversations", "mooncake_conversation.jsonl", path, sizeof(path)))
        return;
    ck_assert_int_eq(trace_read(path, 1000, &t, &e), TD_ERR_NO_SPACE);
    ck_assert_msg(!trace_read(path, 1u << 28, &t, &e), "%s", e.text);
    uint64_t n_tokens = 0;
    for (uint64_t i = 0; i < t->n_requests; i++) {
        n_tokens += t->requests[i].n_prompt;
        ck_assert_uint_eq(t->requests[i].n_blocks, (t->requests[i].n_prompt + 511) / 512);
    }
    ck_assert_uint_eq(t->n_requests, 12031);
    ck_assert_uint_eq(t->n_blocks, 288500);
    ck_assert_uint_eq(t->requests[t->n_requests - 1].arrival_ns / NS_PER_S, 3536);
    ck_assert_uint_eq(n_tokens / 100000, 1447);
    trace_close(t);
}
END_TEST

START_TEST(test_trace_reads_the_azure_conversations)
{
    char path[512];
    struct trace *t;
    struct td_error e = {{0}};
    if (!shared_path("test_trace_reads_the_azure_conversations", "azure_2023_conv.csv", path, sizeof(path)))
        return;
    ck_assert_msg(!trace_read(path, 1u << 28, &t, &e), "%s", e.text);
    ck_assert_uint_eq(t->n_requests, 19366);
    ck_assert_uint_eq(t->requests[1].arrival_ns, 4314579000);
    ck_assert_uint_eq(t->requests[1].n_output, 109);
    trace_close(t);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("trace");
    TCase *c = tcase_create("trace");
    tcase_set_timeout(c, 60);
    tcase_add_test(c, test_trace_reads_mooncake_lines);
    tcase_add_test(c, test_trace_reads_azure_lines_over_a_leap_day);
    tcase_add_test(c, test_trace_sorts_by_arrival_and_keeps_the_order_of_equals);
    tcase_add_loop_test(c, test_trace_refuses_what_makes_no_sense_by_line_and_name, 0,
                        (int)(sizeof(REFUSED) / sizeof(REFUSED[0])));
    tcase_add_loop_test(c, test_trace_survives_every_cut_and_every_flipped_byte, 0, 2);
    tcase_add_test(c, test_trace_read_names_the_file);
    tcase_add_test(c, test_trace_reads_the_mooncake_conversations);
    tcase_add_test(c, test_trace_reads_the_azure_conversations);
    suite_add_tcase(s, c);
    return tap_main(s);
}
