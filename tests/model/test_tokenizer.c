/* Compares tokenizers with every kind of component with the Hugging Face library on the same files
 * (tests/model/tokenizers, made by make_cases.py there). Also the cost of hostile texts. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "model/tokenizer.h"
#include "tests/tap.h"

static const char *const KEPT[] = {
    "byte-level-deepseek",
    "byte-level-gpt2",
    "byte-level-normalizer",
    "byte-level-o200k",
    "bytes-inside-a-sequence",
    "expressions",
    "gemma-like",
    "metaspace-splits",
    "phi-like",
    "properties",
    "subword",
    "unigram",
};
enum { N_KEPT = sizeof(KEPT) / sizeof(KEPT[0]) };

static json_t *load_kept(const char *name, struct tokenizer **t)
{
    char path[4096];
    json_error_t je;
    struct td_error e = {{0}};
    snprintf(path, sizeof(path), "%s/%s.json", TOKENIZERS, name);
    json_t *root = json_load_file(path, JSON_ALLOW_NUL, &je);
    ck_assert_msg(root != NULL, "%s: %s", path, je.text);
    char *text = json_dumps(json_object_get(root, "tokenizer"), 0);
    ck_assert_msg(!tokenizer_parse(text, strlen(text), t, &e), "%s: %s", name, e.text);
    free(text);
    return root;
}

static void ids_of(json_t *list, struct token_ids *out)
{
    size_t i;
    json_t *v;
    json_array_foreach(list, i, v) token_ids_push(out, (uint32_t)json_integer_value(v));
}

START_TEST(test_tokenizer_encodes_as_the_library_does)
{
    struct tokenizer *t;
    json_t *root = load_kept(KEPT[_i], &t), *list = json_object_get(root, "encode"), *c;
    size_t i;
    ck_assert_uint_gt(json_array_size(list), 8);
    for (int again = 0; again < 2; again++) /* the second time from the cache */
        json_array_foreach(list, i, c)
        {
            json_t *text = json_object_get(c, "text");
            struct token_ids want = {0}, got = {0};
            struct td_error e = {{0}};
            ids_of(json_object_get(c, "ids"), &want);
            ck_assert_msg(!tokenizer_encode(t, json_string_value(text), json_string_length(text),
                                            json_is_true(json_object_get(c, "add_special_tokens")), &got, &e),
                          "%s", e.text);
            bool same = got.n == want.n && (!got.n || !memcmp(got.ids, want.ids, got.n * sizeof(*got.ids)));
            ck_assert_msg(same, "%s: encode[%zu]", KEPT[_i], i);
            token_ids_free(&want);
            token_ids_free(&got);
        }
    json_decref(root);
    tokenizer_close(t);
}
END_TEST

START_TEST(test_tokenizer_decodes_as_the_library_does)
{
    struct tokenizer *t;
    json_t *root = load_kept(KEPT[_i], &t), *list = json_object_get(root, "decode"), *c;
    size_t i;
    ck_assert_uint_gt(json_array_size(list), 8);
    json_array_foreach(list, i, c)
    {
        struct token_ids ids = {0};
        ids_of(json_object_get(c, "ids"), &ids);
        for (int skip = 0; skip < 2; skip++) {
            json_t *want = json_object_get(c, skip ? "skipped" : "decoded");
            struct bytes got = {0};
            tokenizer_decode(t, ids.ids, ids.n, skip, &got);
            bool same = got.len == json_string_length(want) &&
                        (!got.len || !memcmp(got.data, json_string_value(want), got.len));
            ck_assert_msg(same, "%s: decode[%zu]: '%s'", KEPT[_i], i, got.data ? got.data : "");
            bytes_free(&got);
        }
        token_ids_free(&ids);
    }
    json_decref(root);
    tokenizer_close(t);
}
END_TEST

static const char *const STREAMED[] = {"gemma-like", "phi-like"};

START_TEST(test_tokenizer_streams_runs_of_bytes_as_the_library_does)
{
    struct tokenizer *t;
    json_t *root = load_kept(STREAMED[_i], &t), *list = json_object_get(root, "stream"), *c;
    size_t i;
    ck_assert_uint_gt(json_array_size(list), 50);
    json_array_foreach(list, i, c)
    {
        struct token_ids ids = {0};
        struct token_stream *s = token_stream_open(t, json_is_true(json_object_get(c, "skip_special_tokens")));
        ids_of(json_object_get(c, "ids"), &ids);
        for (size_t j = 0; j < ids.n; j++) {
            json_t *want = json_array_get(json_object_get(c, "pieces"), j);
            struct bytes got = {0};
            token_stream_push(s, ids.ids[j], &got);
            bool same = got.len == json_string_length(want) &&
                        (!got.len || !memcmp(got.data, json_string_value(want), got.len));
            ck_assert_msg(same, "%s: stream[%zu]: piece %zu is '%.*s', not '%s'", STREAMED[_i], i, j, (int)got.len,
                          got.data ? got.data : "", json_string_value(want));
            bytes_free(&got);
        }
        token_stream_close(s);
        token_ids_free(&ids);
    }
    json_decref(root);
    tokenizer_close(t);
}
END_TEST

/* The pieces of the ids make the text, but for what decoders strip at its ends. */
START_TEST(test_tokenizer_pieces_join_to_the_text)
{
    struct tokenizer *t;
    json_t *root = load_kept(KEPT[_i], &t), *list = json_object_get(root, "encode"), *c;
    size_t i;
    json_array_foreach(list, i, c)
    {
        struct token_ids ids = {0};
        struct bytes whole = {0}, joined = {0};
        struct token_stream *s = token_stream_open(t, true);
        ids_of(json_object_get(c, "ids"), &ids);
        tokenizer_decode(t, ids.ids, ids.n, false, &whole);
        for (size_t j = 0; j < ids.n; j++)
            token_stream_piece(s, ids.ids[j], &joined);
        token_stream_piece(s, UINT32_MAX, &joined); /* unknown: nothing */
        token_stream_close(s);
        bool is_replaced = whole.len && memmem(whole.data, whole.len, "\xef\xbf\xbd", 3);
        ck_assert_msg(is_replaced || !whole.len || memmem(joined.data, joined.len, whole.data, whole.len),
                      "%s: encode[%zu]: pieces make '%.*s', the text is '%.*s'", KEPT[_i], i, (int)joined.len,
                      joined.data ? joined.data : "", (int)whole.len, whole.data ? whole.data : "");
        token_ids_free(&ids);
        bytes_free(&whole);
        bytes_free(&joined);
    }
    json_decref(root);
    tokenizer_close(t);
}
END_TEST

START_TEST(test_tokenizer_streams_whole_characters_that_join_to_the_text)
{
    struct tokenizer *t;
    json_t *root = load_kept(KEPT[_i], &t), *list = json_object_get(root, "encode"), *c;
    size_t i;
    json_array_foreach(list, i, c)
    {
        struct token_ids ids = {0};
        struct bytes whole = {0}, joined = {0};
        struct token_stream *s = token_stream_open(t, true);
        ids_of(json_object_get(c, "ids"), &ids);
        tokenizer_decode(t, ids.ids, ids.n, true, &whole);
        for (size_t j = 0; j <= ids.n; j++) {
            size_t before = joined.len;
            if (j < ids.n)
                token_stream_push(s, ids.ids[j], &joined);
            else
                token_stream_flush(s, &joined);
            if (joined.len > before) /* a released piece begins with a whole character */
                ck_assert_int_ne((unsigned char)joined.data[before] & 0xc0, 0x80);
        }
        token_stream_close(s);
        ck_assert_uint_eq(joined.len, whole.len);
        ck_assert(!whole.len || !memcmp(joined.data, whole.data, whole.len));
        token_ids_free(&ids);
        bytes_free(&whole);
        bytes_free(&joined);
    }
    json_decref(root);
    tokenizer_close(t);
}
END_TEST

#define MODEL(vocab, merges) "\"model\":{\"type\":\"BPE\",\"vocab\":{" vocab "},\"merges\":[" merges "]}"
#define AB                   MODEL("\"a\":0,\"b\":1", "")

START_TEST(test_tokenizer_refusals_name_the_component)
{
    static const struct {
        const char *json, *named;
    } BAD[] = {
        {"{\"normalizer\":{\"type\":\"Magic\"}," AB "}", "normalizer is not supported: Magic"},
        {"{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Nmt\"}]}," AB "}", "Nmt"},
        {"{\"pre_tokenizer\":{\"type\":\"UnicodeScripts\"}," AB "}", "pre_tokenizer is not supported: UnicodeScripts"},
        {"{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[a&&b]\"},\"behavior\":\"Isolated\"}," AB "}",
         "intersection"},
        {"{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},\"behavior\":\"Sideways\"}," AB "}",
         "Sideways"},
        {"{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"ByteLevel\"},"
         "{\"type\":\"ByteLevel\"}]}," AB "}",
         "second ByteLevel"},
        {"{\"post_processor\":{\"type\":\"Odd\"}," AB "}", "post_processor is not supported: Odd"},
        {"{\"decoder\":{\"type\":\"CTC\"}," AB "}", "decoder is not supported: CTC"},
        {"{\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Fuse\"},{\"type\":\"ByteFallback\"}]}," AB "}",
         "ByteFallback"},
        {"{\"model\":{\"type\":\"WordPiece\",\"vocab\":{}}}", "WordPiece"},
        {"{\"model\":{\"type\":\"Unigram\",\"vocab\":[[\"a\",0]],\"unk_id\":7}}", "unk_id"},
        {"{\"model\":{\"type\":\"Unigram\",\"vocab\":[\"a\"]}}", "model.vocab[0]"},
        {"{\"model\":{\"type\":\"BPE\",\"dropout\":0.1,\"vocab\":{\"a\":0},\"merges\":[]}}", "dropout"},
        {"{" MODEL("\"a\":0", "\"a a\"") "}", "model.merges[0]"},
        {"{\"added_tokens\":[{\"id\":3,\"content\":\" \",\"normalized\":true}],\"normalizer\":{\"type\":\"Strip\"}," AB
         "}",
         "normalizing"},
    };
    for (size_t i = 0; i < sizeof(BAD) / sizeof(BAD[0]); i++) {
        struct tokenizer *t = NULL;
        struct td_error e = {{0}};
        ck_assert_msg(tokenizer_parse(BAD[i].json, strlen(BAD[i].json), &t, &e) != TD_OK, "%s", BAD[i].json);
        ck_assert_msg(strstr(e.text, BAD[i].named) != NULL, "'%s' does not name '%s'", e.text, BAD[i].named);
    }
}
END_TEST

/* Each step puts ten letters between any two, so sixteen steps would take all memory. */
START_TEST(test_tokenizer_steps_that_multiply_a_text_end_with_an_error)
{
    struct bytes json = {0}, steps = {0};
    struct tokenizer *t = NULL;
    struct token_ids ids = {0};
    struct bytes back = {0};
    struct td_error e = {{0}};
    uint32_t a = 0;
    for (int i = 0; i < 16; i++)
        bytes_printf(&steps, "%s{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"x?\"},\"content\":\"aaaaaaaaaa\"}",
                     i ? "," : "");
    bytes_printf(&json,
                 "{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[%s]},"
                 "\"decoder\":{\"type\":\"Sequence\",\"decoders\":[%s]}," AB "}",
                 steps.data, steps.data);
    ck_assert_msg(!tokenizer_parse(json.data, json.len, &t, &e), "%s", e.text);
    ck_assert_int_eq(tokenizer_encode(t, "abab", 4, false, &ids, &e), TD_ERR_INVALID);
    ck_assert_msg(strstr(e.text, "normalizer 3 makes more than") != NULL, "%s", e.text);
    ck_assert_uint_eq(ids.n, 0);
    tokenizer_decode(t, &a, 1, true, &back);
    ck_assert_uint_gt(back.len, 1);
    ck_assert_uint_lt(back.len, 8192);
    bytes_free(&json);
    bytes_free(&steps);
    bytes_free(&back);
    token_ids_free(&ids);
    tokenizer_close(t);
}
END_TEST

/* Processor time in seconds for a text of len bytes. */
static double seconds_for(const struct tokenizer *t, const char *unit, size_t len)
{
    struct bytes text = {0};
    struct token_ids ids = {0};
    struct td_error e = {{0}};
    struct timespec a, b;
    while (text.len < len)
        bytes_append(&text, unit, strlen(unit));
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
    ck_assert_msg(!tokenizer_encode(t, text.data, text.len, false, &ids, &e), "%s", e.text);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b);
    token_ids_free(&ids);
    bytes_free(&text);
    return (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) * 1e-9;
}

/* Allows much slack under a sanitizer, whose memmem reads the rest of the text in each call. */
START_TEST(test_tokenizer_time_grows_with_the_text_and_no_faster)
{
    const char *sanitizer = getenv("TANDEM_SANITIZE");
    double slack = sanitizer && *sanitizer ? 60 : 0.2;
    static const char *const UNITS[] = {"a",
                                        " ",
                                        "\n",
                                        "1",
                                        "A",
                                        "=",
                                        "ab ",
                                        "\xe4\xb8\xad",
                                        "\xcc\x80\xcc\x96",
                                        "<|",
                                        "\xe2\x96\x81",
                                        "'",
                                        " \n\t",
                                        "A\xe4\xb8\xad",
                                        "\xe0\xb8\x81\xe0\xb8\xb3"};
    struct tokenizer *t;
    json_t *root = load_kept(KEPT[_i], &t);
    for (size_t i = 0; i < sizeof(UNITS) / sizeof(UNITS[0]); i++) {
        double small = seconds_for(t, UNITS[i], 1 << 14), large = seconds_for(t, UNITS[i], 1 << 18);
        ck_assert_msg(large < 64 * small + slack, "%s: '%s': %.0f ms, 16 times that: %.0f ms", KEPT[_i], UNITS[i],
                      small * 1e3, large * 1e3);
    }
    json_decref(root);
    tokenizer_close(t);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("tokenizer");
    TCase *t = tcase_create("tokenizer");
    tcase_set_timeout(t, 120);
    tcase_add_loop_test(t, test_tokenizer_encodes_as_the_library_does, 0, N_KEPT);
    tcase_add_loop_test(t, test_tokenizer_decodes_as_the_library_does, 0, N_KEPT);
    tcase_add_loop_test(t, test_tokenizer_streams_runs_of_bytes_as_the_library_does, 0, 2);
    tcase_add_loop_test(t, test_tokenizer_streams_whole_characters_that_join_to_the_text, 0, N_KEPT);
    tcase_add_loop_test(t, test_tokenizer_pieces_join_to_the_text, 0, N_KEPT);
    tcase_add_loop_test(t, test_tokenizer_time_grows_with_the_text_and_no_faster, 0, N_KEPT);
    tcase_add_test(t, test_tokenizer_refusals_name_the_component);
    tcase_add_test(t, test_tokenizer_steps_that_multiply_a_text_end_with_an_error);
    suite_add_tcase(s, t);
    return tap_main(s);
}
