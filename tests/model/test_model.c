/* Model files: both styles of config.json, hostile safetensors and tokenizers, linear-time encoding. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/endian.h"
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

/* max_position_embeddings is 512, less than the scaled length. */
START_TEST(test_config_yarn_context_is_the_longer_of_what_is_scaled_and_what_is_said)
{
    static const struct {
        const char *scaling;
        uint32_t context;
    } CASES[] = {{"\"rope_type\":\"yarn\",\"factor\":4,\"original_max_position_embeddings\":512", 2048},
                 {"\"rope_type\":\"yarn\",\"factor\":4", 2048},
                 {"\"rope_type\":\"yarn\",\"factor\":4,\"original_max_position_embeddings\":64", 512},
                 {"\"rope_type\":\"yarn\",\"original_max_position_embeddings\":32", 512},
                 {"\"rope_type\":\"yarn\",\"factor\":1e6,\"original_max_position_embeddings\":1000000", 1 << 24},
                 {"\"rope_type\":\"linear\",\"factor\":4", 512},
                 {"\"rope_type\":\"dynamic\",\"factor\":4", 512}};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        struct model_config c;
        struct td_error e = {{0}};
        char text[1024];
        snprintf(text, sizeof(text), "{" COMMON ",\"rope_scaling\":{%s}}", CASES[i].scaling);
        ck_assert_msg(!parse(text, &c, &e), "%s", e.text);
        ck_assert_uint_eq(c.max_positions, CASES[i].context);
    }
}
END_TEST

static enum td_status parse_generation(const char *text, struct model_generation *out, struct td_error *e)
{
    static const char CONFIG[] = "{" COMMON "}";
    struct model_config c;
    enum td_status s = model_config_parse(CONFIG, strlen(CONFIG), text, strlen(text), &c, e);
    if (!s)
        *out = c.generation;
    return s;
}

START_TEST(test_generation_config_is_read_or_named)
{
    struct model_generation g;
    struct td_error e = {{0}};
    ck_assert_msg(
        !parse_generation("{\"do_sample\": true, \"min_p\": 0.25, \"typical_p\": 0.5, \"repetition_penalty\": 1.5, "
                          "\"suppress_tokens\": [3, 5], \"max_new_tokens\": 7, \"num_beams\": 1, "
                          "\"bad_words_ids\": null, \"max_length\": 1000000, \"pad_token_id\": 1}",
                          &g, &e),
        "%s", e.text);
    ck_assert(g.min_p == 0.25f && g.typical_p == 0.5f && g.repetition_penalty == 1.5f && g.temperature == 1);
    ck_assert(g.n_suppressed_ids == 2 && g.suppressed_ids[1] == 5 && g.max_tokens == 7);
    ck_assert_str_eq(g.ignored, "");
    ck_assert(!parse_generation("{\"min_p\": 0.25, \"top_k\": 4, \"num_beams\": 4, \"stop_strings\": [\"x\"], "
                                "\"no_repeat_ngram_size\": 3, \"max_length\": 20, \"guidance_scale\": 1.0}",
                                &g, &e));
    ck_assert(g.min_p == 0 && g.top_k == 0 && g.repetition_penalty == 1 && !g.max_tokens && !g.n_suppressed_ids);
    ck_assert_str_eq(g.ignored, "num_beams,max_length,stop_strings,no_repeat_ngram_size");
    ck_assert_int_eq(parse_generation("{\"repetition_penalty\": -1}", &g, &e), TD_ERR_CORRUPT);
    ck_assert_str_eq(e.text, "generation_config.json: repetition_penalty: not a number in its range");
    ck_assert_int_eq(parse_generation("{\"suppress_tokens\": [-1]}", &g, &e), TD_ERR_CORRUPT);
    ck_assert(!strncmp(e.text, "generation_config.json: suppress_tokens: ", 41));
}
END_TEST

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
    ck_assert(model_config_rope(&a, &a.rope[0], false, x) == 1);
    ck_assert(model_config_rope(&b, &b.rope[0], false, y) == 1);
    ck_assert_int_eq(memcmp(x, y, sizeof(x)), 0);
    ck_assert_int_eq(a.rope[0].type, ROPE_LLAMA3);
    ck_assert_uint_eq(a.head_dim, 16);
    ck_assert_uint_eq(a.n_eos_ids, 2);
    for (int i = 0; i < 8; i++) /* the unscaled part theta^(-2i/d): our exp and log against libm */
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
        {"{\"model_type\":\"bert\"}", "model_type: 'bert'"},
        {"{" COMMON ",\"hidden_act\":\"gelu\"}", "hidden_act"},
        {"{" COMMON ",\"attention_bias\":1}", "attention_bias"},
        {"{" COMMON ",\"quantization_config\":{\"quant_method\":\"mxfp4\"}}", "quant_method: 'mxfp4'"},
        {"{" COMMON ",\"quantization_config\":{\"quant_method\":\"awq\"}}", "quant_method: 'awq'"},
        {"{" COMMON ",\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[0,128]}}",
         "weight_block_size"},
        {"{" COMMON ",\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"config_groups\":"
         "{\"g\":{\"weights\":{\"num_bits\":8,\"type\":\"int\"}}}}}",
         "'int'"},
        {"{" COMMON ",\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"config_groups\":"
         "{\"g\":{\"weights\":{\"num_bits\":4,\"type\":\"float\"}}}}}",
         "num_bits"},
        {"{" COMMON ",\"attn_logit_softcapping\":50}", "attn_logit_softcapping"},
        {"{" COMMON ",\"use_bidirectional_attention\":true}", "use_bidirectional_attention"},
        {"{" COMMON ",\"layer_types\":[\"full_attention\"]}", "layer_types"},
        {"{" COMMON ",\"layer_types\":[\"full_attention\",\"chunked_attention\"]}", "'chunked_attention'"},
        {"{" COMMON ",\"layer_types\":[\"full_attention\",\"sliding_attention\"]}", "sliding_window"},
        {"{" COMMON ",\"num_key_value_heads\":3}", "num_key_value_heads"},
        {"{" COMMON ",\"head_dim\":15}", "head_dim"},
        {"{" COMMON ",\"rope_scaling\":{\"type\":\"mrope\"}}", "rope_type: 'mrope'"},
        {"{" COMMON ",\"rope_scaling\":{\"type\":\"linear\"}}", "factor"},
        {"{" COMMON ",\"rope_scaling\":{\"type\":\"longrope\",\"short_factor\":[1,2]}}", "short_factor"},
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

/* Each family fills in the members that its published files leave out. */
START_TEST(test_config_families_fill_in_what_files_leave_out)
{
#define SIZES                                                                                                          \
    "\"vocab_size\":100,\"hidden_size\":64,\"num_hidden_layers\":6,\"num_attention_heads\":4,\"intermediate_size\":"   \
    "96,"                                                                                                              \
    "\"max_position_embeddings\":512,\"rms_norm_eps\":1e-5"
    struct model_config c;
    struct td_error e = {{0}};
    ck_assert_msg(!parse("{\"model_type\":\"gemma3_text\"," SIZES ",\"sliding_window_pattern\":3}", &c, &e), "%s",
                  e.text);
    ck_assert(c.tied_embeddings && c.head_dim == 256 && c.window == 4096 && c.glu == GLU_GELU_TANH);
    ck_assert(c.layers[0] == LAYER_WINDOW && c.layers[1] == LAYER_WINDOW && !c.layers[2] && !c.layers[5]);
    ck_assert(c.rope[0].theta == 1e6 && c.rope[1].theta == 1e4 && c.logits_cap == 0);
    ck_assert_uint_eq(model_config_layout(&c, NUM_BF16, 16).window, 0); /* full layers keep all pages */
    ck_assert_msg(!parse("{\"model_type\":\"gemma2\"," SIZES "}", &c, &e), "%s", e.text);
    ck_assert(c.attn_cap == 50 && c.logits_cap == 30 && c.layers[0] == LAYER_WINDOW && !c.layers[1]);
    ck_assert_msg(!parse("{\"model_type\":\"mistral\"," SIZES "}", &c, &e), "%s", e.text);
    ck_assert_uint_eq(model_config_layout(&c, NUM_BF16, 16).window, 4096);
    ck_assert_msg(!parse("{\"model_type\":\"mistral\"," SIZES ",\"sliding_window\":null}", &c, &e), "%s", e.text);
    ck_assert_uint_eq(c.window, 0);
    ck_assert_msg(!parse("{\"model_type\":\"qwen2\"," SIZES ",\"sliding_window\":64}", &c, &e), "%s", e.text);
    ck_assert(c.window == 0 && c.qkv_bias && !c.out_bias);
    ck_assert_msg(!parse("{\"model_type\":\"qwen2\"," SIZES ",\"sliding_window\":64,\"use_sliding_window\":true,"
                         "\"max_window_layers\":4}",
                         &c, &e),
                  "%s", e.text);
    ck_assert(c.window == 64 && !c.layers[3] && c.layers[4] == LAYER_WINDOW);
    ck_assert_msg(!parse("{\"model_type\":\"qwen3_moe\"," SIZES ",\"num_experts\":8,\"num_experts_per_tok\":2,"
                         "\"moe_intermediate_size\":32,\"mlp_only_layers\":[3],\"decoder_sparse_step\":2}",
                         &c, &e),
                  "%s", e.text);
    ck_assert(!c.layers[0] && c.layers[1] == LAYER_MOE && !c.layers[3] && c.layers[5] == LAYER_MOE);
    ck_assert(c.moe.n_experts == 8 && c.moe.intermediate == 32 && !c.moe.normalized);
    ck_assert_msg(
        !parse("{\"model_type\":\"gpt_oss\"," SIZES ",\"num_local_experts\":8,\"num_experts_per_tok\":2}", &c, &e),
        "%s", e.text);
    ck_assert(c.qkv_bias && c.out_bias && c.glu == GLU_CLAMPED && c.glu_limit == 7 && c.window == 128);
}
END_TEST

/* Reference values of transformers 5.23 (modeling_rope_utils) with head_dim 16: frequencies 1, 2 and 7, and
 * the factor of cos and sin. */
START_TEST(test_config_rope_scalings_are_those_of_the_reference)
{
    static const struct {
        const char *scaling;
        bool is_long;
        double freq[3], factor;
    } CASES[] = {{"{\"type\":\"linear\",\"factor\":4}", false, {0.079056941, 0.0250000004, 7.90569466e-05}, 1},
                 {"{\"rope_type\":\"dynamic\",\"factor\":4}", false, {0.316227764, 0.100000001, 0.000316227786}, 1},
                 {"{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,\"high_freq_factor\":4,\"original_max_"
                  "position_embeddings\":64}",
                  false,
                  {0.244384587, 0.0130422562, 3.95284733e-05},
                  1},
                 {"{\"rope_type\":\"yarn\",\"factor\":8,\"original_max_position_embeddings\":64}",
                  false,
                  {0.223994657, 0.0416666642, 3.95284733e-05},
                  1.20794415},
                 {"{\"rope_type\":\"yarn\",\"factor\":8,\"beta_fast\":16,\"beta_slow\":2,\"truncate\":false,\"original_"
                  "max_position_embeddings\":64}",
                  false,
                  {0.120533988, 0.0125000002, 3.95284733e-05},
                  1.20794415},
                 {"{\"rope_type\":\"yarn\",\"factor\":8,\"mscale\":0.707,\"mscale_all_dim\":1,\"original_max_position_"
                  "embeddings\":64}",
                  false,
                  {0.223994657, 0.0416666642, 3.95284733e-05},
                  0.949560882},
                 {"{\"rope_type\":\"longrope\",\"short_factor\":[1,1.1,1.2,1.3,1.4,1.5,1.6,1.7],\"long_factor\":[1,2,3,"
                  "4,5,6,7,8],\"original_max_position_embeddings\":128}",
                  false,
                  {0.287479758, 0.0833333358, 0.000186016332},
                  1.13389342},
                 {"{\"rope_type\":\"longrope\",\"short_factor\":[1,1.1,1.2,1.3,1.4,1.5,1.6,1.7],\"long_factor\":[1,2,3,"
                  "4,5,6,7,8],\"original_max_position_embeddings\":128}",
                  true,
                  {0.158113882, 0.0333333351, 3.95284733e-05},
                  1.13389342}};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        struct model_config c;
        struct td_error e = {{0}};
        char text[1024];
        double freq[8];
        snprintf(text, sizeof(text), "{" COMMON ",\"rope_scaling\":%s}", CASES[i].scaling);
        ck_assert_msg(!parse(text, &c, &e), "%s: %s", text, e.text);
        double factor = model_config_rope(&c, &c.rope[0], CASES[i].is_long, freq);
        ck_assert_double_eq_tol(factor, CASES[i].factor, 1e-6);
        for (int j = 0; j < 3; j++) {
            double got = freq[(int[]){1, 2, 7}[j]];
            ck_assert_msg(fabs(got / CASES[i].freq[j] - 1) < 1e-6, "case %zu: %.9g, expected %.9g", i, got,
                          CASES[i].freq[j]);
        }
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

int main(void)
{
    Suite *s = suite_create("model");
    TCase *t = tcase_create("model");
    tcase_set_timeout(t, 60);
    tcase_add_test(t, test_config_old_and_new_style_say_the_same);
    tcase_add_test(t, test_config_yarn_context_is_the_longer_of_what_is_scaled_and_what_is_said);
    tcase_add_test(t, test_generation_config_is_read_or_named);
    tcase_add_test(t, test_config_refusals_name_the_field);
    tcase_add_test(t, test_config_families_fill_in_what_files_leave_out);
    tcase_add_test(t, test_config_rope_scalings_are_those_of_the_reference);
    tcase_add_test(t, test_safetensors_hostile_headers_are_refused);
    tcase_add_test(t, test_dummy_model_is_the_same_for_a_seed);
    tcase_add_test(t, test_tokenizer_round_trips_any_utf8);
    tcase_add_test(t, test_tokenizer_refuses_what_is_not_utf8);
    tcase_add_test(t, test_tokenizer_long_runs_do_not_explode);
    tcase_add_test(t, test_tokenizer_hostile_files_are_refused);
    suite_add_tcase(s, t);
    return tap_main(s);
}
