/* The trace reader: all formats, packed or not; refusals and their texts; and the real files, where they
 * exist. */
#include <string.h>
#include <zlib.h>
#include <zstd.h>

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

START_TEST(test_trace_reads_azure_lines_of_2024_and_with_images)
{
    static const char TEXT[] = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
                               "2024-05-10 00:00:00.009930+00:00,2,2162,5\n"
                               "2024-05-10 00:00:01.009930+00:00,0,2399,6\n";
    struct trace *t;
    ck_assert_int_eq(parse(TEXT, &t, NULL), TD_OK);
    ck_assert_int_eq(t->format, TRACE_AZURE);
    ck_assert_uint_eq(t->requests[1].arrival_ns, NS_PER_S);
    ck_assert_uint_eq(t->requests[0].n_prompt, 2162);
    trace_close(t);
}
END_TEST

START_TEST(test_trace_reads_burstgpt_lines)
{
    static const char
        OLD[] = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
                "5,ChatGPT,472,18,490,Conversation log\n"
                "45.5,GPT-4,0,0,0,API log\n"
                "118.0,GPT-4,1087,0,1087,API log\n",
        NEW[] = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
                "1.25,7,3.1,ChatGPT,472.0,18.0,490,Conversation log\n"
                "2.25,,1,GPT-4,5,6,11,API log\n"
                "3.25,7,1,ChatGPT,6,6,12,API log\n";
    struct trace *t;
    ck_assert_int_eq(parse(OLD, &t, NULL), TD_OK);
    ck_assert_int_eq(t->format, TRACE_BURSTGPT);
    ck_assert_uint_eq(t->n_requests, 2);
    ck_assert_uint_eq(t->n_left_out, 1);
    ck_assert_uint_eq(t->requests[1].arrival_ns, 113 * NS_PER_S);
    ck_assert_str_eq(t->tenants[t->requests[1].tenant], "GPT-4");
    trace_close(t);
    ck_assert_int_eq(parse(NEW, &t, NULL), TD_OK);
    ck_assert_uint_eq(t->requests[0].session, t->requests[2].session);
    ck_assert_uint_eq(t->requests[1].session, 0);
    ck_assert_uint_eq(t->requests[0].n_output, 18);
    trace_close(t);
}
END_TEST

START_TEST(test_trace_reads_bailian_lines)
{
    static const char TEXT[] =
        "{\"chat_id\": 159, \"parent_chat_id\": -1, \"timestamp\": 61.25, \"input_length\": 20, \"output_length\": "
        "132, "
        "\"type\": \"text\", \"turn\": 1, \"hash_ids\": [1089, 1090]}\n"
        "{\"chat_id\": 160, \"parent_chat_id\": 159, \"timestamp\": 62, \"input_length\": 40, \"output_length\": 1, "
        "\"type\": \"search\", \"turn\": 2, \"hash_ids\": [1089, 1091, 7]}\n"
        "{\"chat_id\": 161, \"parent_chat_id\": -1, \"timestamp\": 62, \"input_length\": 4, \"output_length\": 1, "
        "\"type\": \"text\", \"turn\": 1, \"hash_ids\": [9]}\n";
    struct trace *t;
    ck_assert_int_eq(parse(TEXT, &t, NULL), TD_OK);
    ck_assert_int_eq(t->format, TRACE_BAILIAN);
    ck_assert_uint_eq(t->block_tokens, 16);
    ck_assert_uint_eq(t->requests[1].arrival_ns, 750 * NS_PER_MS);
    ck_assert_uint_eq(t->requests[0].session, t->requests[1].session);
    ck_assert_uint_ne(t->requests[0].session, t->requests[2].session);
    ck_assert_str_eq(t->tenants[t->requests[1].tenant], "search");
    trace_close(t);
}
END_TEST

#define HEAD "{\"tandem_trace\": 1, \"block_tokens\": 16}\n"
static const char OURS[] =
    HEAD "{\"timestamp\": 20, \"input_length\": 40, \"output_length\": 3, \"hash_ids\": [1, 2, 3], \"tenant\": \"a\", "
         "\"priority\": -2, \"ttft_ms\": 500, \"tpot_ms\": 9.3, \"id\": \"r0\", \"session\": \"x\"}\n"
         "{\"timestamp\": 50.5, \"input_length\": 7, \"output_length\": 2, \"session\": \"x\", \"follows\": \"r0\", "
         "\"delay_ms\": 1200}\n"
         "{\"timestamp\": 10, \"input_length\": 9, \"output_length\": 2, \"hash_ids\": []}\n";

START_TEST(test_trace_reads_lines_of_its_own_format)
{
    struct trace *t;
    ck_assert_int_eq(parse(OURS, &t, NULL), TD_OK);
    const struct trace_request *r = t->requests; /* the last line arrived first */
    ck_assert_int_eq(t->format, TRACE_TANDEM);
    ck_assert_uint_eq(t->block_tokens, 16);
    ck_assert_uint_eq(r[0].n_prompt, 9);
    ck_assert_str_eq(t->tenants[r[1].tenant], "a");
    ck_assert_str_eq(t->tenants[r[2].tenant], "");
    ck_assert_int_eq(r[1].priority, -2);
    ck_assert(r[1].ttft_ms == 500 && r[1].tpot_ms == 9.3 && r[2].delay_ms == 1200);
    ck_assert_uint_eq(r[2].follows, 2);
    ck_assert_uint_eq(r[2].arrival_ns, 40 * NS_PER_MS + NS_PER_MS / 2);
    ck_assert(r[1].session && r[1].session == r[2].session && !r[0].session);
    trace_close(t);
}
END_TEST

static void check_same(const struct trace *a, const struct trace *b, bool all)
{
    ck_assert_uint_eq(a->n_requests, b->n_requests);
    for (uint64_t i = 0; i < a->n_requests; i++) {
        const struct trace_request *p = &a->requests[i], *q = &b->requests[i];
        ck_assert(p->arrival_ns == q->arrival_ns && p->n_prompt == q->n_prompt && p->n_output == q->n_output);
        ck_assert(!all || (p->n_blocks == q->n_blocks && p->follows == q->follows && p->ttft_ms == q->ttft_ms &&
                           p->tpot_ms == q->tpot_ms && p->priority == q->priority && p->delay_ms == q->delay_ms &&
                           !p->session == !q->session));
        ck_assert(!all || !memcmp(trace_blocks(a, p), trace_blocks(b, q), p->n_blocks * sizeof(uint64_t)));
        ck_assert(!all || !strcmp(a->tenants[p->tenant], b->tenants[q->tenant]));
    }
}

START_TEST(test_trace_written_is_read_again)
{
    static const enum trace_format FORMATS[] = {TRACE_TANDEM, TRACE_MOONCAKE, TRACE_AZURE};
    struct trace *t, *again;
    struct td_error e = {{0}};
    ck_assert_int_eq(parse(OURS, &t, NULL), TD_OK);
    for (int i = 0; i < 3; i++) {
        struct bytes text = {0};
        ck_assert_int_eq(trace_write(t, FORMATS[i], &text, &e), TD_OK);
        ck_assert_msg(!trace_parse(text.data, text.len, &again, &e), "%s", e.text);
        ck_assert_int_eq(again->format, FORMATS[i]);
        check_same(t, again, i == 0);
        trace_close(again);
        bytes_free(&text);
    }
    struct bytes none = {0};
    ck_assert_int_eq(trace_write(t, TRACE_BURSTGPT, &none, &e), TD_ERR_UNSUPPORTED);
    trace_close(t);
}
END_TEST

static void check_unpacked(const char *packed, size_t size, const char *text, size_t len)
{
    struct td_error e = {{0}};
    char *out = NULL;
    size_t n = 0;
    ck_assert_msg(!trace_unpack(packed, size, len, &out, &n, &e), "%s", e.text);
    ck_assert(n == len && !memcmp(out, text, len));
    free(out);
    ck_assert_int_eq(trace_unpack(packed, size, len - 1, &out, &n, &e), TD_ERR_NO_SPACE);
    ck_assert_int_eq(trace_unpack(packed, size - 1, len, &out, &n, &e), TD_ERR_INVALID);
}

START_TEST(test_trace_packed_by_gzip_or_zstd_is_unpacked)
{
    struct bytes text = {0};
    for (uint32_t i = 0; i < 40000; i++)
        bytes_printf(&text, "%llu\n", (unsigned long long)random_at(1, i, 0));
    size_t room = text.len + 1000;
    char *packed = mem_array(2 * room, 1);
    z_stream z = {.next_in = (Bytef *)text.data, .avail_in = (uInt)text.len, .next_out = (Bytef *)packed};
    z.avail_out = (uInt)room;
    ck_assert_int_eq(deflateInit2(&z, 6, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY), Z_OK);
    ck_assert_int_eq(deflate(&z, Z_FINISH), Z_STREAM_END);
    size_t n = room - z.avail_out;
    deflateEnd(&z);
    check_unpacked(packed, n, text.data, text.len);
    memcpy(packed + n, packed, n); /* two gzip members, as cat would make them */
    char *out;
    size_t len;
    ck_assert_int_eq(trace_unpack(packed, 2 * n, 2 * text.len, &out, &len, NULL), TD_OK);
    ck_assert_uint_eq(len, 2 * text.len);
    free(out);
    n = ZSTD_compress(packed, room, text.data, text.len, 3);
    ck_assert(!ZSTD_isError(n));
    check_unpacked(packed, n, text.data, text.len);
    free(packed);
    bytes_free(&text);
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
    /* words: the message must contain all of them; separated by blanks; "" matches any. */
    const char *text, *words;
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
    {AZURE "2023-11-16 18:15:46,374", "line 2: must have 3 columns"},
    {AZURE "2023-11-16 18:15:46,0,1", "line 2: ContextTokens"},
    {AZURE "2023-11-16 18:15:46,9999999999,1", "line 2: ContextTokens"},
    {AZURE "2023-11-16 18:15:46,1,2,3", "line 2: must have 3 columns"},
    {AZURE "2023-11-16 18:15:46,1,", "line 2: GeneratedTokens"},
    {AZURE "2023-13-16 18:15:46,1,2", "line 2: TIMESTAMP"},
    {AZURE "2023-11-16 24:15:46,1,2", "line 2: TIMESTAMP"},
    {AZURE "2023-11-16 18:15:46.,1,2", "line 2: TIMESTAMP"},
    {AZURE "2023-11-16T18:15:46,1,2", "line 2: TIMESTAMP"},
    {"TIMESTAMP,Context\n", "line 1"},
    {AZURE "2023-11-16 18:15:46,1,2\n2123-11-16 18:15:46,1,2\n", "30 years"},
    {AZURE "2024-05-10 00:00:00+01:00,1,2", "line 2: TIMESTAMP"},
    {"Timestamp,Model,Request tokens,Response tokens\nx,a,1,2\n", "line 2: Timestamp"},
    {"Timestamp,Model,Request tokens,Response tokens\n1,a,1.5,2\n", "line 2: Request tokens"},
    {"Timestamp,Model,Request tokens,Response tokens\n1,a,1\n", "line 2: must have 4 columns"},
    {"{\"tandem_trace\": 2}", "line 1: tandem_trace"},
    {"{\"tandem_trace\": 1, \"block_tokens\": 0}", "line 1: block_tokens"},
    {HEAD "{\"timestamp\": 0, \"input_length\": 2, \"output_length\": 1, \"priority\": 11}", "line 2: priority"},
    {HEAD "{\"timestamp\": 0, \"input_length\": 2, \"output_length\": 1, \"tenant\": 1}", "line 2: tenant"},
    {HEAD "{\"timestamp\": 0, \"input_length\": 2, \"output_length\": 1, \"follows\": \"r\"}", "line 2: follows"},
    {HEAD "{\"timestamp\": 1, \"input_length\": 2, \"output_length\": 1, \"id\": \"r\"}\n"
          "{\"timestamp\": 0, \"input_length\": 2, \"output_length\": 1, \"follows\": \"r\"}\n",
     "follows one that arrives later"},
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

/* Each copy ends exactly where its allocation ends, so that a sanitizer notices one byte too many. */
START_TEST(test_trace_survives_every_cut_and_every_flipped_byte)
{
    static const char *const TEXTS[] = {
        GOOD "{\"timestamp\": 7, \"input_length\": 9, \"output_length\": 1, \"hash_ids\": [1]}\n",
        AZURE "2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50,396,109\n", OURS};
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
    tcase_add_test(c, test_trace_reads_azure_lines_of_2024_and_with_images);
    tcase_add_test(c, test_trace_reads_burstgpt_lines);
    tcase_add_test(c, test_trace_reads_bailian_lines);
    tcase_add_test(c, test_trace_reads_lines_of_its_own_format);
    tcase_add_test(c, test_trace_written_is_read_again);
    tcase_add_test(c, test_trace_packed_by_gzip_or_zstd_is_unpacked);
    tcase_add_test(c, test_trace_sorts_by_arrival_and_keeps_the_order_of_equals);
    tcase_add_loop_test(c, test_trace_refuses_what_makes_no_sense_by_line_and_name, 0,
                        (int)(sizeof(REFUSED) / sizeof(REFUSED[0])));
    tcase_add_loop_test(c, test_trace_survives_every_cut_and_every_flipped_byte, 0, 3);
    tcase_add_test(c, test_trace_read_names_the_file);
    tcase_add_test(c, test_trace_reads_the_mooncake_conversations);
    tcase_add_test(c, test_trace_reads_the_azure_conversations);
    suite_add_tcase(s, c);
    return tap_main(s);
}
