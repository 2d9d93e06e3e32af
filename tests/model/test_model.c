/* Model files: both styles of config.json, hostile safetensors and tokenizers, ChatML, linear-time encoding. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/endian.h"
#include "model/chat.h"
#include "model/config.h"
#include "model/model.h"
#include "model/tokenizer.h"
#include "tests/tap.h"

#define COMMON                                                                                                         \
    "\"model_type\":\"llama\",\"vocab_size\":100,\"hidden_size\":64,\"num_hidden_layers\":2,"                          \
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"intermediate_size\":96,\"max_position_embeddings\":512,"    \
    "\"rms_norm_eps\":1e-5,\"eos_token_id\":[3,7]"
#define LLAMA3 "\"factor\":8,\"low_freq_factor\":1,\"high_freq_factor\":4,\"original_max_position_embeddings\":64"

static enum td_status parse(const char *text, struct model_config *c, struct td_error *e)
{
    return model_config_parse(text, strlen(text), NULL, 0, c, e);
}

START_TEST(test_config_old_and_new_style_say_the_same)
{
    struct model_config a, b;
    struct td_error e = {{0}};
    double x[8], y[8];
    ck_assert_msg(
        !parse("{" COMMON ",\"rope_theta\":500000,\"rope_scaling\":{\"rope_type\":\"llama3\"," LLAMA3 "}}", &a, &e),
        "%s", e.text);
    ck_assert_msg(
        !parse("{" COMMON ",\"rope_parameters\":{\"rope_theta\":500000,\"rope_type\":\"llama3\"," LLAMA3 "}}", &b, &e),
        "%s", e.text);
    model_config_rope(&a, x);
    model_config_rope(&b, y);
    ck_assert_int_eq(memcmp(x, y, sizeof(x)), 0);
    ck_assert_int_eq(a.rope_type, ROPE_LLAMA3);
    ck_assert_uint_eq(a.head_dim, 16);
    ck_assert_uint_eq(a.n_eos_ids, 2);
    for (int i = 0; i < 8; i++) /* plain part: theta^(-2i/d), own exp and log against libm */
        if (6.283185307179586 / pow(500000, -2.0 * i / 16) < 64.0 / 4)
            ck_assert_double_eq_tol(x[i], pow(500000, -2.0 * i / 16), 1e-12);
}
END_TEST

START_TEST(test_config_refusals_name_the_field)
{
    static const struct {
        const char *text, *field;
    } BAD[] = {
        {"{", "line"},
        {"[]", "object"},
        {"{\"model_type\":\"bert\"}", "model_type"},
        {"{" COMMON ",\"hidden_act\":\"gelu\"}", "hidden_act"},
        {"{" COMMON ",\"attention_bias\":true}", "attention_bias"},
        {"{" COMMON ",\"num_key_value_heads\":3}", "num_key_value_heads"},
        {"{" COMMON ",\"head_dim\":15}", "head_dim"},
        {"{" COMMON ",\"rope_scaling\":{\"type\":\"yarn\"}}", "yarn"},
        {"{" COMMON ",\"vocab_size\":-1}", "vocab_size"},
        {"{" COMMON ",\"vocab_size\":1e300}", "vocab_size"},
        {"{" COMMON ",\"eos_token_id\":100}", "eos_token_id"},
    };
    for (size_t i = 0; i < sizeof(BAD) / sizeof(BAD[0]); i++) {
        struct model_config c;
        struct td_error e = {{0}};
        ck_assert_int_ne(parse(BAD[i].text, &c, &e), TD_OK);
        ck_assert_msg(strstr(e.text, BAD[i].field) != NULL, "'%s' does not name %s", e.text, BAD[i].field);
    }
}
END_TEST

static enum td_status open_tensors(const char *header, size_t data_len, uint64_t header_len)
{
    size_t n = strlen(header);
    uint8_t *file = mem_zalloc(8 + n + data_len);
    struct safetensors *s = NULL;
    put_u64(file, header_len ? header_len : n);
    memcpy(file + 8, header, n);
    enum td_status status = safetensors_open_memory(file, 8 + n + data_len, &s, NULL);
    safetensors_close(s);
    free(file);
    return status;
}

START_TEST(test_safetensors_hostile_headers_are_refused)
{
#define T(dtype, shape, offsets) "{\"a\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}}"
    ck_assert_int_eq(open_tensors(T("F32", "[2,2]", "[0,16]"), 16, 0), TD_OK);
    ck_assert_int_eq(open_tensors("{}", 0, 0), TD_OK);
    ck_assert_int_ne(open_tensors(T("F32", "[2,2]", "[0,16]"), 15, 0), TD_OK);
    ck_assert_int_ne(open_tensors(T("F32", "[2,2]", "[0,16]"), 17, 0), TD_OK);
    ck_assert_int_ne(open_tensors(T("F32", "[2,2]", "[0,12]"), 12, 0), TD_OK);
    ck_assert_int_ne(open_tensors(T("F32", "[2,2]", "[16,0]"), 16, 0), TD_OK);
    ck_assert_int_ne(open_tensors(T("F32", "[-2,-2]", "[0,16]"), 16, 0), TD_OK);
    ck_assert_int_ne(open_tensors(T("F32", "[4611686018427387904,4]", "[0,0]"), 0, 0), TD_OK);
    ck_assert_int_ne(open_tensors(T("F99", "[2,2]", "[0,16]"), 16, 0), TD_OK);
    ck_assert_int_ne(open_tensors(T("F32", "[1,1,1,1,4]", "[0,16]"), 16, 0), TD_OK);
    ck_assert_int_ne(open_tensors("{}", 0, UINT64_MAX), TD_OK);
    ck_assert_int_ne(open_tensors("{}", 0, 3), TD_OK);
    ck_assert_int_ne(open_tensors("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
                                  "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[2,6]}}",
                                  6, 0),
                     TD_OK);
    ck_assert_int_ne(open_tensors("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
                                  "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[8,12]}}",
                                  12, 0),
                     TD_OK);
#undef T
}
END_TEST

START_TEST(test_dummy_model_is_the_same_for_a_seed)
{
    struct model_dummy d = {.vocab_size = 100,
                            .hidden = 64,
                            .n_layers = 2,
                            .n_heads = 4,
                            .n_kv_heads = 2,
                            .head_dim = 16,
                            .intermediate = 96,
                            .max_positions = 128,
                            .seed = 7};
    struct model *a, *b, *c;
    const struct tensor *x, *y;
    struct td_error e;
    ck_assert_int_eq(model_open_dummy(&d, &a, &e), TD_OK);
    ck_assert_int_eq(model_open_dummy(&d, &b, &e), TD_OK);
    d.seed = 8;
    ck_assert_int_eq(model_open_dummy(&d, &c, &e), TD_OK);
    struct block_key ka = model_fingerprint(a), kb = model_fingerprint(b), kc = model_fingerprint(c);
    ck_assert(block_key_equal(&ka, &kb) && !block_key_equal(&ka, &kc));
    ck_assert_int_eq(model_tensor(a, "model.layers.1.mlp.down_proj.weight", 64, 96, &x, &e), TD_OK);
    ck_assert_int_eq(model_tensor(b, "model.layers.1.mlp.down_proj.weight", 64, 96, &y, &e), TD_OK);
    ck_assert_int_eq(memcmp(x->data, y->data, x->len_bytes), 0);
    ck_assert_int_eq(model_tensor(a, "model.layers.1.mlp.down_proj.weight", 64, 97, &x, &e), TD_ERR_CORRUPT);
    ck_assert_int_eq(model_tensor(a, "nonsense", 1, 1, &x, &e), TD_ERR_NOT_FOUND);
    double sum = 0, squares = 0;
    float *f = mem_array(64 * 96, sizeof(float));
    for (int i = 0; i < 64 * 96; i++) {
        uint32_t bits = (uint32_t)((const uint16_t *)y->data)[i] << 16;
        memcpy(&f[i], &bits, 4);
        sum += (double)f[i];
        squares += (double)f[i] * (double)f[i];
    }
    ck_assert_double_eq_tol(sum / (64 * 96), 0, 0.002);
    ck_assert_double_eq_tol(sqrt(squares / (64 * 96)), 0.02, 0.001);
    free(f);
    model_close(a);
    model_close(b);
    model_close(c);
}
END_TEST

START_TEST(test_tokenizer_round_trips_any_utf8)
{
    static const char *const TEXTS[] = {
        "",          " ", "Hello, world!", "\xc3\xa9\xe4\xb8\xad\xf0\x9f\x98\x80", "a  b\n\n\tc ", "<|im_start|>user",
        "1234567890"};
    struct tokenizer *t;
    struct td_error e;
    ck_assert_int_eq(tokenizer_open(DEMO_MODEL, &t, &e), TD_OK);
    for (size_t i = 0; i < sizeof(TEXTS) / sizeof(TEXTS[0]); i++) {
        struct token_ids ids = {0};
        struct bytes whole = {0}, streamed = {0};
        ck_assert_int_eq(tokenizer_encode(t, TEXTS[i], strlen(TEXTS[i]), false, &ids, &e), TD_OK);
        tokenizer_decode(t, ids.ids, ids.n, false, &whole);
        struct token_stream *s = token_stream_open(t, false);
        for (size_t j = 0; j < ids.n; j++)
            token_stream_push(s, ids.ids[j], &streamed);
        token_stream_flush(s, &streamed);
        token_stream_close(s);
        ck_assert_str_eq(whole.data ? whole.data : "", TEXTS[i]);
        ck_assert_str_eq(streamed.data ? streamed.data : "", TEXTS[i]);
        token_ids_free(&ids);
        bytes_free(&whole);
        bytes_free(&streamed);
    }
    tokenizer_close(t);
}
END_TEST

START_TEST(test_tokenizer_refuses_what_is_not_utf8)
{
    static const char *const BAD[] = {"\xff", "a\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "abc\xe2\x82"};
    struct tokenizer *t;
    struct td_error e;
    ck_assert_int_eq(tokenizer_open(DEMO_MODEL, &t, &e), TD_OK);
    for (size_t i = 0; i < sizeof(BAD) / sizeof(BAD[0]); i++) {
        struct token_ids ids = {0};
        ck_assert_int_eq(tokenizer_encode(t, BAD[i], strlen(BAD[i]), false, &ids, &e), TD_ERR_INVALID);
        token_ids_free(&ids);
    }
    tokenizer_close(t);
}
END_TEST

START_TEST(test_tokenizer_long_runs_do_not_explode)
{
    static const char *const UNITS[] = {"a", " ", "\n", "1", "ab ", "\xe4\xb8\xad", "!"};
    struct tokenizer *t;
    struct td_error e;
    ck_assert_int_eq(tokenizer_open(DEMO_MODEL, &t, &e), TD_OK);
    for (size_t i = 0; i < sizeof(UNITS) / sizeof(UNITS[0]); i++) {
        struct token_ids ids = {0};
        struct bytes text = {0}, back = {0};
        while (text.len < 1000000)
            bytes_append(&text, UNITS[i], strlen(UNITS[i]));
        ck_assert_msg(!tokenizer_encode(t, text.data, text.len, false, &ids, &e), "%s", e.text);
        tokenizer_decode(t, ids.ids, ids.n, false, &back);
        ck_assert_uint_eq(back.len, text.len);
        ck_assert_int_eq(memcmp(back.data, text.data, text.len), 0);
        token_ids_free(&ids);
        bytes_free(&text);
        bytes_free(&back);
    }
    tokenizer_close(t);
}
END_TEST

START_TEST(test_tokenizer_hostile_files_are_refused)
{
    static const char *const BAD[] = {
        "",
        "[]",
        "{}",
        "{\"model\":{}}",
        "{\"model\":{\"type\":\"Unigram\"}}",
        "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":-1},\"merges\":[]}}",
        "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":99999999999},\"merges\":[]}}",
        "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1},\"merges\":[\"a b\"]}}",
        "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[\"a\"]}}",
        "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[]},\"added_tokens\":[{\"id\":1,\"content\":\"\"}]"
        "}",
        "{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(\"},\"behavior\":\"Isolated\"},"
        "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[]}}",
        "{\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"String\":\"\"},\"content\":\"x\"},"
        "\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[]}}",
    };
    for (size_t i = 0; i < sizeof(BAD) / sizeof(BAD[0]); i++) {
        struct tokenizer *t;
        struct td_error e = {{0}};
        ck_assert_msg(tokenizer_parse(BAD[i], strlen(BAD[i]), &t, &e) != TD_OK, "accepted: %s", BAD[i]);
        ck_assert_ptr_nonnull(strstr(e.text, "tokenizer.json"));
    }
}
END_TEST

START_TEST(test_chat_renders_chatml_and_refuses_roles)
{
    struct chat_template *c;
    struct td_error e;
    struct bytes b = {0};
    const struct chat_message m[] = {{"user", "Hi", 2}, {"assistant", "Yo", 2}, {"king", "x", 1}};
    ck_assert_int_eq(chat_template_open(DEMO_MODEL, &c, &e), TD_OK);
    ck_assert_int_eq(chat_template_render(c, m, 2, true, &b, &e), TD_OK);
    ck_assert_str_eq(b.data,
                     "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n<|im_start|>assistant\n");
    ck_assert_int_eq(chat_template_render(c, m, 3, true, &b, &e), TD_ERR_INVALID);
    ck_assert_int_eq(chat_template_render(c, m, 0, true, &b, &e), TD_ERR_INVALID);
    chat_template_close(c);
    bytes_free(&b);
    ck_assert_int_eq(chat_template_open("/nonexistent", &c, &e), TD_OK);
    ck_assert_int_eq(chat_template_render(c, m, 1, true, &b, &e), TD_ERR_UNSUPPORTED);
    chat_template_close(c);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("model");
    TCase *t = tcase_create("model");
    tcase_set_timeout(t, 60);
    tcase_add_test(t, test_config_old_and_new_style_say_the_same);
    tcase_add_test(t, test_config_refusals_name_the_field);
    tcase_add_test(t, test_safetensors_hostile_headers_are_refused);
    tcase_add_test(t, test_dummy_model_is_the_same_for_a_seed);
    tcase_add_test(t, test_tokenizer_round_trips_any_utf8);
    tcase_add_test(t, test_tokenizer_refuses_what_is_not_utf8);
    tcase_add_test(t, test_tokenizer_long_runs_do_not_explode);
    tcase_add_test(t, test_tokenizer_hostile_files_are_refused);
    tcase_add_test(t, test_chat_renders_chatml_and_refuses_roles);
    suite_add_tcase(s, t);
    return tap_main(s);
}
