/* Validation of requests (router/params.c): bounds, defaults, and refusals that name the field. */
#include "world.h"

#include <math.h>

/* The request that a test spoils. accepted() and refused() make it a good one again: one token, no wishes. */
static struct {
    Tandem__V1__GenerateRequest m;
    Tandem__V1__Sampling sampling;
    Tandem__V1__Stopping stopping;
    Tandem__V1__Slo slo;
    Tandem__V1__TokenPrompt tokens;
    Tandem__V1__ChatPrompt chat;
} f;
static struct model_config config; /* as the model's directory has it; tests change router->config */

static void reset(void)
{
    static uint32_t one = 5;
    tandem__v1__generate_request__init(&f.m);
    tandem__v1__sampling__init(&f.sampling);
    tandem__v1__stopping__init(&f.stopping);
    tandem__v1__slo__init(&f.slo);
    tandem__v1__token_prompt__init(&f.tokens);
    tandem__v1__chat_prompt__init(&f.chat);
    f.m.sampling = &f.sampling;
    f.m.stopping = &f.stopping;
    f.m.slo = &f.slo;
    f.tokens.n_ids = 1;
    f.tokens.ids = &one;
    f.m.prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_TOKENS;
    f.m.tokens = &f.tokens;
}

static void open_once(void)
{
    world_open("pd");
    config = router->config;
}

static void setup(void)
{
    router->config = config;
    router->known = true;
    router->n_adapters = 0;
    atomic_store(&router->max_context, config.max_positions);
    reset();
}

static struct params accepted(void)
{
    struct params p;
    struct td_error e = {{0}};
    ck_assert_msg(!params_parse(router, &f.m, INT64_MAX, &p, &e), "%s", e.text);
    reset();
    return p;
}

/* For requests of which only the acceptance matters. */
static void is_accepted(void)
{
    struct params p = accepted();
    params_free(&p);
}

static void refused_as(enum td_status status, const char *text)
{
    struct params p, untouched;
    struct td_error e = {{0}};
    memset(&p, 0x5a, sizeof(p));
    untouched = p;
    ck_assert_int_eq(params_parse(router, &f.m, INT64_MAX, &p, &e), status);
    ck_assert_str_eq(e.text, text);
    ck_assert_mem_eq(&p, &untouched, sizeof(p));
    reset();
}

static void refused(const char *text)
{
    refused_as(TD_ERR_INVALID, text);
}

static void set_text(const char *text)
{
    f.m.prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_TEXT;
    f.m.text = rpc_data(text);
}

/* Up to two messages; each must live until the request was parsed. */
static void set_chat(Tandem__V1__ChatMessage **messages, size_t n)
{
    f.m.prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_CHAT;
    f.m.chat = &f.chat;
    f.chat.messages = messages;
    f.chat.n_messages = n;
}

static void set_max_tokens(uint32_t n)
{
    f.stopping.has_max_tokens_case = TANDEM__V1__STOPPING__HAS_MAX_TOKENS_MAX_TOKENS;
    f.stopping.max_tokens = n;
}

static bool is_bytes(const struct bytes *b, const char *text)
{
    return b->len == strlen(text) && !memcmp(b->data ? b->data : "", text, b->len);
}

/* ------------------------------------------------------------------- numbers */

/* Numbers of Sampling: where they are in the request and in the worker's message, and their bounds. */
static const struct number {
    const char *refusal; /* of `above` */
    size_t at, case_at;  /* case_at 0: 0 means "not set" */
    int number;          /* of the field: the value of its case */
    size_t out;
    float least, most, below, above;
} NUMBERS[] = {
#define AT(field)  offsetof(Tandem__V1__Sampling, field)
#define OUT(field) offsetof(Tandem__Worker__V1__SamplingParams, field)
    {"sampling.temperature: 100.001 is not in 0 .. 100", AT(temperature), AT(has_temperature_case), 1, OUT(temperature),
     0, 100, -0.001f, 100.001f},
    {"sampling.top_p: 1.001 is not in 1e-06 .. 1", AT(top_p), AT(has_top_p_case), 3, OUT(top_p), 1e-6f, 1, 0, 1.001f},
    {"sampling.min_p: 1.001 is not in 0 .. 1", AT(min_p), AT(has_min_p_case), 4, OUT(min_p), 0, 1, -0.001f, 1.001f},
    {"sampling.typical_p: 1.001 is not in 0 .. 1", AT(typical_p), AT(has_typical_p_case), 11, OUT(typical_p), 0, 1,
     -0.001f, 1.001f},
    {"sampling.presence_penalty: 2.001 is not in -2 .. 2", AT(presence_penalty), 0, 0, OUT(presence_penalty), -2, 2,
     -2.001f, 2.001f},
    {"sampling.frequency_penalty: 2.001 is not in -2 .. 2", AT(frequency_penalty), 0, 0, OUT(frequency_penalty), -2, 2,
     -2.001f, 2.001f},
    {"sampling.repetition_penalty: 10.001 is not in 0.001 .. 10", AT(repetition_penalty),
     AT(has_repetition_penalty_case), 7, OUT(repetition_penalty), 0.001f, 10, 0, 10.001f},
#undef AT
#undef OUT
};
enum { N_NUMBERS = sizeof(NUMBERS) / sizeof(NUMBERS[0]) };

static void set_number(const struct number *n, float value)
{
    memcpy((char *)&f.sampling + n->at, &value, sizeof(value));
    if (n->case_at)
        memcpy((char *)&f.sampling + n->case_at, &n->number, sizeof(n->number));
}

START_TEST(test_numbers_of_sampling_reach_their_bounds)
{
    const struct number *n = &NUMBERS[_i];
    const float good[] = {n->least, n->most};
    for (int i = 0; i < 2; i++) {
        float got;
        set_number(n, good[i]);
        struct params p = accepted();
        memcpy(&got, (char *)&p.sampling + n->out, sizeof(got));
        ck_assert_float_eq(got, good[i]);
        params_free(&p);
    }
}
END_TEST

START_TEST(test_numbers_of_sampling_stay_within_their_bounds)
{
    const struct number *n = &NUMBERS[_i];
    const char *colon = strchr(n->refusal, ':');
    const float bad[] = {n->below, n->above, NAN, INFINITY, -INFINITY};
    set_number(n, n->above);
    refused(n->refusal);
    for (int i = 0; i < 5; i++) {
        struct params p;
        struct td_error e;
        set_number(n, bad[i]);
        ck_assert_int_eq(params_parse(router, &f.m, INT64_MAX, &p, &e), TD_ERR_INVALID);
        ck_assert_mem_eq(e.text, n->refusal, (size_t)(colon - n->refusal));
        reset();
    }
}
END_TEST

START_TEST(test_what_is_not_set_comes_from_the_model)
{
    router->config.generation.top_k = 7;
    router->config.generation.min_p = 0.125f;
    router->config.generation.typical_p = 0.5f;
    router->config.generation.repetition_penalty = 1.25f;
    for (int i = 0; i < 2; i++) {
        if (i)
            f.m.sampling = NULL;
        struct params p = accepted();
        ck_assert_float_eq(p.sampling.temperature, 0.7f); /* generation_config.json of the demo model */
        ck_assert_float_eq(p.sampling.top_p, 0.95f);
        ck_assert_uint_eq(p.sampling.top_k, 7);
        ck_assert_float_eq(p.sampling.min_p, 0.125f);
        ck_assert_float_eq(p.sampling.typical_p, 0.5f);
        ck_assert_float_eq(p.sampling.repetition_penalty, 1.25f);
        ck_assert_float_eq(p.sampling.presence_penalty, 0);
        params_free(&p);
    }
}
END_TEST

START_TEST(test_zero_that_is_set_is_not_the_default)
{
    f.sampling.has_temperature_case = TANDEM__V1__SAMPLING__HAS_TEMPERATURE_TEMPERATURE;
    f.sampling.has_top_k_case = TANDEM__V1__SAMPLING__HAS_TOP_K_TOP_K;
    f.sampling.has_seed_case = TANDEM__V1__SAMPLING__HAS_SEED_SEED;
    router->config.generation.top_k = 7;
    struct params p = accepted();
    ck_assert_float_eq(p.sampling.temperature, 0);
    ck_assert_uint_eq(p.sampling.top_k, 0);
    ck_assert_uint_eq(p.sampling.seed, 0);
    params_free(&p);
}
END_TEST

START_TEST(test_a_seed_is_drawn_below_2_to_53_or_kept_whole)
{
    struct params a = accepted(), b = accepted();
    ck_assert_uint_lt(a.sampling.seed, 1ull << 53);
    ck_assert_uint_ne(a.sampling.seed, b.sampling.seed);
    f.sampling.has_seed_case = TANDEM__V1__SAMPLING__HAS_SEED_SEED;
    f.sampling.seed = UINT64_MAX;
    struct params c = accepted();
    ck_assert_uint_eq(c.sampling.seed, UINT64_MAX);
    params_free(&a);
    params_free(&b);
    params_free(&c);
}
END_TEST

START_TEST(test_top_k_and_the_number_of_choices_have_bounds)
{
    struct params p = accepted();
    ck_assert_uint_eq(p.n_choices, 1);
    params_free(&p);
    f.sampling.n = 16;
    p = accepted();
    ck_assert_uint_eq(p.n_choices, 16);
    params_free(&p);
    f.sampling.n = 17;
    refused("sampling.n: 17 choices, at most 16");
    f.sampling.has_top_k_case = TANDEM__V1__SAMPLING__HAS_TOP_K_TOP_K;
    f.sampling.top_k = 1 << 30;
    is_accepted();
    f.sampling.has_top_k_case = TANDEM__V1__SAMPLING__HAS_TOP_K_TOP_K;
    f.sampling.top_k = (1 << 30) + 1;
    refused("sampling.top_k: 1073741825 is absurd");
}
END_TEST

/* --------------------------------------------------------------------- lists */

START_TEST(test_biases_are_kept_and_bounded)
{
    static Tandem__V1__LogitBias b[ASK_MAX_BIASES + 1], *list[ASK_MAX_BIASES + 1];
    for (int i = 0; i <= ASK_MAX_BIASES; i++) {
        tandem__v1__logit_bias__init(&b[i]);
        list[i] = &b[i];
        b[i].id = (uint32_t)i;
        b[i].bias = i % 2 ? 100 : -100;
    }
    f.sampling.logit_bias = list;
    f.sampling.n_logit_bias = ASK_MAX_BIASES;
    struct params p = accepted();
    ck_assert_uint_eq(p.sampling.n_logit_bias, ASK_MAX_BIASES);
    ck_assert_uint_eq(p.sampling.logit_bias[1023]->id, 1023);
    ck_assert_float_eq(p.sampling.logit_bias[1023]->bias, 100);
    params_free(&p);
    f.sampling.logit_bias = list;
    f.sampling.n_logit_bias = ASK_MAX_BIASES + 1;
    refused("sampling.logit_bias: 1025 entries, at most 1024");
    f.sampling.logit_bias = list;
    f.sampling.n_logit_bias = 2;
    b[1].id = 1536;
    refused("sampling.logit_bias[1]: id 1536 or bias 100 out of range");
    f.sampling.logit_bias = list;
    f.sampling.n_logit_bias = 1;
    b[0].bias = -100.5f;
    refused("sampling.logit_bias[0]: id 0 or bias -100.5 out of range");
    f.sampling.logit_bias = list;
    f.sampling.n_logit_bias = 1;
    b[0].bias = NAN;
    refused("sampling.logit_bias[0]: id 0 or bias nan out of range");
}
END_TEST

START_TEST(test_ids_that_the_model_suppresses_are_never_drawn)
{
    Tandem__V1__LogitBias bias = TANDEM__V1__LOGIT_BIAS__INIT, *list[] = {&bias};
    router->config.generation.suppressed_ids[0] = 33;
    router->config.generation.n_suppressed_ids = 1;
    f.sampling.logit_bias = list;
    f.sampling.n_logit_bias = 1;
    bias.id = 12;
    bias.bias = 3;
    struct params p = accepted();
    ck_assert_uint_eq(p.sampling.n_logit_bias, 2);
    ck_assert_uint_eq(p.sampling.logit_bias[0]->id, 12);
    ck_assert_uint_eq(p.sampling.logit_bias[1]->id, 33);
    ck_assert_float_eq(p.sampling.logit_bias[1]->bias, -INFINITY);
    params_free(&p);
}
END_TEST

START_TEST(test_allowed_ids_are_kept_and_bounded)
{
    static uint32_t ids[ASK_MAX_ALLOWED + 1];
    ids[0] = 7;
    f.sampling.allowed_ids = ids;
    f.sampling.n_allowed_ids = ASK_MAX_ALLOWED;
    struct params p = accepted();
    ck_assert_uint_eq(p.sampling.n_allowed_ids, ASK_MAX_ALLOWED);
    ck_assert_uint_eq(p.sampling.allowed_ids[0], 7);
    ck_assert_ptr_ne(p.sampling.allowed_ids, ids);
    params_free(&p);
    f.sampling.allowed_ids = ids;
    f.sampling.n_allowed_ids = ASK_MAX_ALLOWED + 1;
    refused("sampling.allowed_ids: 4097 entries, at most 4096");
    f.sampling.allowed_ids = ids;
    f.sampling.n_allowed_ids = 2;
    ids[1] = 1536;
    refused("sampling.allowed_ids[1]: 1536 is not in the vocabulary of 1536");
}
END_TEST

START_TEST(test_some_allowed_id_can_be_drawn)
{
    static const char NONE[] = "sampling.allowed_ids: each of them ends the answer before stopping.min_tokens, or is "
                               "suppressed by generation_config.json";
    uint32_t ids[] = {1535, 33, 8}; /* the end, a suppressed one, an ordinary one */
    router->config.generation.suppressed_ids[0] = 33;
    router->config.generation.n_suppressed_ids = 1;
    f.sampling.allowed_ids = ids;
    f.sampling.n_allowed_ids = 2;
    is_accepted(); /* the end may come at once */
    f.sampling.allowed_ids = ids;
    f.sampling.n_allowed_ids = 2;
    f.stopping.min_tokens = 1;
    refused(NONE);
    f.sampling.allowed_ids = ids;
    f.sampling.n_allowed_ids = 3;
    f.stopping.min_tokens = 1;
    is_accepted();
    f.sampling.allowed_ids = ids;
    f.sampling.n_allowed_ids = 2;
    f.stopping.min_tokens = 1;
    f.stopping.ignore_eos = true;
    is_accepted();
    f.sampling.allowed_ids = &ids[1];
    f.sampling.n_allowed_ids = 1;
    refused(NONE);
}
END_TEST

START_TEST(test_stop_strings_are_copied_and_bounded)
{
    static char longest[ASK_MAX_STOP_BYTES + 1];
    ProtobufCBinaryData stops[ASK_MAX_STOP_STRINGS + 1];
    memset(longest, 'x', sizeof(longest));
    for (int i = 0; i <= ASK_MAX_STOP_STRINGS; i++)
        stops[i] = (ProtobufCBinaryData){ASK_MAX_STOP_BYTES, (uint8_t *)longest};
    stops[1] = (ProtobufCBinaryData){2, (uint8_t *)(uintptr_t) "\0b"};
    f.stopping.stop = stops;
    f.stopping.n_stop = ASK_MAX_STOP_STRINGS;
    struct params p = accepted();
    memset(longest, 'y', sizeof(longest));
    ck_assert_uint_eq(p.n_stop, ASK_MAX_STOP_STRINGS);
    ck_assert_uint_eq(p.stop[0].len, ASK_MAX_STOP_BYTES);
    ck_assert_int_eq(p.stop[0].data[255], 'x');
    ck_assert_uint_eq(p.stop[1].len, 2);
    ck_assert_mem_eq(p.stop[1].data, "\0b", 2);
    params_free(&p);
    f.stopping.stop = stops;
    f.stopping.n_stop = ASK_MAX_STOP_STRINGS + 1;
    refused("stopping.stop: 17 strings, at most 16");
    f.stopping.stop = stops;
    f.stopping.n_stop = 3;
    stops[2].len = ASK_MAX_STOP_BYTES + 1;
    refused("stopping.stop[2]: 257 bytes, expected 1 to 256");
    f.stopping.stop = stops;
    f.stopping.n_stop = 1;
    stops[0].len = 0;
    refused("stopping.stop[0]: 0 bytes, expected 1 to 256");
}
END_TEST

START_TEST(test_stop_ids_include_the_ends_of_the_model)
{
    uint32_t ids[ASK_MAX_STOP_IDS + 1] = {3};
    f.stopping.stop_ids = ids;
    f.stopping.n_stop_ids = 1;
    struct params p = accepted();
    ck_assert_uint_eq(p.sampling.n_stop_ids, 3);
    ck_assert_uint_eq(p.sampling.stop_ids[0], 3);
    ck_assert_uint_eq(p.sampling.stop_ids[1], 1535);
    ck_assert_uint_eq(p.sampling.stop_ids[2], 1533);
    params_free(&p);
    f.stopping.stop_ids = ids;
    f.stopping.n_stop_ids = ASK_MAX_STOP_IDS;
    f.stopping.ignore_eos = true;
    p = accepted();
    ck_assert_uint_eq(p.sampling.n_stop_ids, ASK_MAX_STOP_IDS);
    params_free(&p);
    f.stopping.stop_ids = ids;
    f.stopping.n_stop_ids = ASK_MAX_STOP_IDS + 1;
    refused("stopping.stop_ids: 57 entries, at most 56");
    f.stopping.stop_ids = ids;
    f.stopping.n_stop_ids = 2;
    ids[1] = 4000;
    refused("stopping.stop_ids[1]: 4000 is not in the vocabulary of 1536");
}
END_TEST

/* ------------------------------------------------------------------- lengths */

START_TEST(test_an_answer_fills_the_context_if_it_has_no_limit)
{
    struct params p = accepted();
    ck_assert_uint_eq(p.sampling.max_tokens, 8191);
    ck_assert(!p.max_tokens_given);
    params_free(&p);
    f.m.stopping = NULL;
    p = accepted();
    ck_assert_uint_eq(p.sampling.max_tokens, 8191);
    params_free(&p);
}
END_TEST

START_TEST(test_the_limit_of_the_model_gives_way_to_min_tokens_and_to_the_context)
{
    router->config.generation.max_tokens = 20;
    struct params p = accepted();
    ck_assert_uint_eq(p.sampling.max_tokens, 20);
    params_free(&p);
    f.stopping.min_tokens = 30;
    p = accepted();
    ck_assert_uint_eq(p.sampling.max_tokens, 30);
    params_free(&p);
    router->config.generation.max_tokens = 100000;
    p = accepted();
    ck_assert_uint_eq(p.sampling.max_tokens, 8191);
    params_free(&p);
}
END_TEST

START_TEST(test_lengths_that_do_not_fit_are_refused)
{
    set_max_tokens(8191);
    f.stopping.min_tokens = 8191;
    struct params p = accepted();
    ck_assert_uint_eq(p.sampling.max_tokens, 8191);
    ck_assert_uint_eq(p.sampling.min_tokens, 8191);
    ck_assert(p.max_tokens_given);
    params_free(&p);
    set_max_tokens(8192);
    refused("stopping.max_tokens: 8192 after a prompt of 1 is over the context of 8192");
    set_max_tokens(UINT32_MAX);
    refused("stopping.max_tokens: 4294967295 after a prompt of 1 is over the context of 8192");
    set_max_tokens(0);
    refused("stopping.max_tokens: 0 is only for prompt log-probabilities");
    set_max_tokens(4);
    f.stopping.min_tokens = 5;
    refused("stopping.min_tokens: 5 is more than max_tokens 4");
    f.stopping.min_tokens = 8192;
    refused("stopping.min_tokens: 8192 is more than max_tokens 8191");
}
END_TEST

START_TEST(test_scores_need_no_answer)
{
    f.m.want_prompt_logprobs = true;
    set_max_tokens(0);
    struct params p = accepted();
    ck_assert_uint_eq(p.sampling.max_tokens, 0);
    ck_assert(p.sampling.prompt_logprobs);
    params_free(&p);
    f.m.want_prompt_logprobs = true;
    set_max_tokens(0);
    f.sampling.n = 2;
    refused("sampling.n: 2 choices of no tokens");
}
END_TEST

START_TEST(test_scores_of_a_prompt_fit_into_one_message)
{
    static uint32_t ids[70000];
    atomic_store(&router->max_context, 200000);
    f.tokens.ids = ids;
    f.m.want_prompt_logprobs = true;
    f.tokens.n_ids = 65536;
    is_accepted();
    f.tokens.ids = ids;
    f.m.want_prompt_logprobs = true;
    f.tokens.n_ids = 65537;
    refused("want_prompt_logprobs: with top_logprobs 0 for prompts of at most 65536 tokens");
    f.tokens.ids = ids;
    f.m.want_prompt_logprobs = true;
    f.tokens.n_ids = 11916;
    f.m.top_logprobs = 20;
    refused("want_prompt_logprobs: with top_logprobs 20 for prompts of at most 11915 tokens");
}
END_TEST

/* ------------------------------------------------------------------- prompts */

START_TEST(test_a_prompt_is_text_ids_or_a_chat)
{
    uint32_t ids[] = {1, 2, 3};
    f.tokens.ids = ids;
    f.tokens.n_ids = 3;
    struct params p = accepted();
    ck_assert_uint_eq(p.n_ids, 3);
    ck_assert_uint_eq(p.sampling.n_prompt, 3);
    ck_assert_mem_eq(p.ids, ids, sizeof(ids));
    params_free(&p);
    set_text("one two");
    p = accepted();
    struct token_ids want = ids_of("one two");
    ck_assert_uint_eq(p.n_ids, want.n);
    ck_assert_mem_eq(p.ids, want.ids, want.n * sizeof(*want.ids));
    params_free(&p);
    token_ids_free(&want);
    f.m.prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT__NOT_SET;
    refused("prompt: none of text, tokens, chat is given");
}
END_TEST

START_TEST(test_prompts_that_can_not_be_used_are_refused)
{
    uint32_t ids[] = {1, 1536};
    f.tokens.ids = ids;
    f.tokens.n_ids = 2;
    refused("tokens.ids[1]: 1536 is not in the vocabulary of 1536");
    f.tokens.n_ids = 0;
    refused("prompt: empty");
    set_text("");
    refused("prompt: empty");
    set_text("ab\xff");
    refused("text: not UTF-8 at byte 2");
}
END_TEST

START_TEST(test_a_prompt_leaves_room_for_a_token)
{
    static uint32_t ids[8193];
    static char text[30000];
    f.tokens.ids = ids;
    f.tokens.n_ids = 8191;
    struct params p = accepted();
    ck_assert_uint_eq(p.sampling.max_tokens, 1);
    params_free(&p);
    f.tokens.ids = ids;
    f.tokens.n_ids = 8192;
    refused("prompt: 8192 tokens leave no room in the context of 8192");
    f.tokens.ids = ids;
    f.tokens.n_ids = 8192;
    f.m.want_prompt_logprobs = true;
    is_accepted();
    for (size_t i = 0; i < sizeof(text) - 1; i++)
        text[i] = "a "[i % 2];
    set_text(text);
    refused("prompt: more than 8192 tokens leave no room in the context of 8192");
}
END_TEST

START_TEST(test_a_chat_is_rendered_by_the_template_of_the_model)
{
    Tandem__V1__ChatMessage user = TANDEM__V1__CHAT_MESSAGE__INIT, json = TANDEM__V1__CHAT_MESSAGE__INIT;
    Tandem__V1__ChatMessage *messages[] = {&user, &json};
    user.role = rpc_data("user");
    user.content = rpc_data("Hi e\xcc\x81"); /* the tokenizer would make one character of e and its accent */
    json.json = rpc_data("{\"role\": \"assistant\", \"content\": \"Yes?\"}");
    set_chat(messages, 2);
    f.m.echo = true;
    struct params p = accepted();
    ck_assert(is_bytes(&p.echo, "<|im_start|>user\nHi e\xcc\x81<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"
                                "<|im_start|>assistant\n"));
    struct token_ids want = ids_of(p.echo.data);
    ck_assert_uint_eq(p.n_ids, want.n);
    ck_assert_mem_eq(p.ids, want.ids, want.n * sizeof(*want.ids));
    params_free(&p);
    token_ids_free(&want);
    set_chat(messages, 1);
    f.chat.no_generation_prompt = true;
    f.m.echo = true;
    p = accepted();
    ck_assert(is_bytes(&p.echo, "<|im_start|>user\nHi e\xcc\x81<|im_end|>\n"));
    params_free(&p);
}
END_TEST

START_TEST(test_a_chat_that_can_not_be_read_names_its_part)
{
    Tandem__V1__ChatMessage good = TANDEM__V1__CHAT_MESSAGE__INIT, bad = good, *messages[] = {&good, &bad};
    good.role = rpc_data("user");
    good.content = rpc_data("Hi");
    bad = good;
    bad.role = rpc_data("\xff");
    set_chat(messages, 2);
    refused("chat.messages[1].role: not UTF-8");
    bad = good;
    bad.content = rpc_data("a\xc3");
    set_chat(messages, 2);
    refused("chat.messages[1].content: not UTF-8");
    bad.json = rpc_data("[]");
    set_chat(messages, 2);
    refused("chat.messages[1].json: another type of value is expected");
    bad.json = rpc_data("{");
    set_chat(messages, 2);
    refused("chat.messages[1].json: string or '}' expected near end of file");
    set_chat(messages, 1);
    f.chat.tools = rpc_data("{}");
    refused("chat.tools: another type of value is expected");
    set_chat(messages, 1);
    f.chat.tools = rpc_data("[]");
    f.chat.variables = rpc_data("3");
    refused("chat.variables: '[' or '{' expected near '3'");
    set_chat(messages, 1);
    f.chat.variables = rpc_data("{}");
    is_accepted();
}
END_TEST

START_TEST(test_special_tokens_are_added_to_texts_only)
{
    Tandem__V1__ChatMessage user = TANDEM__V1__CHAT_MESSAGE__INIT, *messages[] = {&user};
    user.role = rpc_data("user");
    for (int i = 0; i < 2; i++) {
        if (i)
            set_chat(messages, 1);
        f.m.has_add_special_tokens_case = TANDEM__V1__GENERATE_REQUEST__HAS_ADD_SPECIAL_TOKENS_ADD_SPECIAL_TOKENS;
        f.m.add_special_tokens = true;
        refused("add_special_tokens: only for text; ids and chats have theirs");
    }
    set_text("a");
    f.m.has_add_special_tokens_case = TANDEM__V1__GENERATE_REQUEST__HAS_ADD_SPECIAL_TOKENS_ADD_SPECIAL_TOKENS;
    f.m.add_special_tokens = true;
    is_accepted();
}
END_TEST

START_TEST(test_the_echo_is_the_text_of_the_prompt)
{
    uint32_t ids[] = {id_of_byte('a'), 1534, id_of_byte('b')};
    f.tokens.ids = ids;
    f.tokens.n_ids = 3;
    f.m.echo = true;
    struct params p = accepted();
    ck_assert(is_bytes(&p.echo, "a<|im_start|>b"));
    params_free(&p);
    set_text("a  e\xcc\x81");
    f.m.echo = true;
    p = accepted();
    ck_assert(is_bytes(&p.echo, "a  e\xcc\x81"));
    params_free(&p);
    p = accepted();
    ck_assert_uint_eq(p.echo.len, 0);
    params_free(&p);
}
END_TEST

START_TEST(test_a_prompt_that_is_too_large_is_seen_before_it_is_read)
{
    static char text[1 << 20];
    Tandem__V1__ChatMessage a = TANDEM__V1__CHAT_MESSAGE__INIT, b = a, *messages[] = {&a, &b};
    struct td_error e;
    size_t most = (size_t)tokenizer_max_token_bytes(router->tokenizer) * 8192;
    ck_assert_uint_lt(most, sizeof(text));
    set_text("");
    f.m.text = (ProtobufCBinaryData){most, (uint8_t *)text};
    ck_assert_int_eq(params_fits(router, &f.m, &e), TD_OK);
    f.m.text.len++;
    ck_assert_int_eq(params_fits(router, &f.m, &e), TD_ERR_INVALID);
    ck_assert_mem_eq(e.text, "text: ", 6);
    reset();
    f.tokens.n_ids = 8193;
    ck_assert_int_eq(params_fits(router, &f.m, &e), TD_ERR_INVALID);
    ck_assert_str_eq(e.text, "prompt: tokens.ids: 8193 leave no room in the context of 8192");
    reset();
    set_chat(messages, 2);
    a.content = b.content = (ProtobufCBinaryData){most / 2, (uint8_t *)text};
    ck_assert_int_eq(params_fits(router, &f.m, &e), TD_OK);
    b.content.len += 2;
    ck_assert_int_eq(params_fits(router, &f.m, &e), TD_ERR_INVALID);
    ck_assert_mem_eq(e.text, "chat.messages[1].content: ", 26);
    b.json = (ProtobufCBinaryData){3 * most, (uint8_t *)text}; /* six bytes may be one character */
    ck_assert_int_eq(params_fits(router, &f.m, &e), TD_OK);
    b.json.len += 12;
    ck_assert_int_eq(params_fits(router, &f.m, &e), TD_ERR_INVALID);
    ck_assert_mem_eq(e.text, "chat.messages[1].json: ", 23);
    set_chat(messages, 0);
    f.chat.tools = f.chat.variables = (ProtobufCBinaryData){3 * most + 6, (uint8_t *)text};
    ck_assert_int_eq(params_fits(router, &f.m, &e), TD_ERR_INVALID);
    ck_assert_mem_eq(e.text, "chat.tools and chat.variables: ", 31);
}
END_TEST

/* ------------------------------------------------------------- everything else */

START_TEST(test_labels_are_copied_and_bounded)
{
    static char longest[ASK_MAX_LABEL_BYTES + 1];
    static const struct {
        size_t at, out;
        const char *refusal;
    } LABELS[] = {
#define LABEL(field, member)                                                                                           \
    {offsetof(Tandem__V1__GenerateRequest, field), offsetof(struct params, member), #field ": 65 bytes, at most 64"}
        LABEL(tenant, tenant),    LABEL(cache_salt, salt), LABEL(workflow_id, workflow),
        LABEL(request_id, label), LABEL(lora, lora),
#undef LABEL
    };
    memset(longest, 'n', sizeof(longest));
    router->known = false; /* no worker yet: any adapter may exist */
    for (int i = 0; i < 5; i++) {
        ProtobufCBinaryData label = {ASK_MAX_LABEL_BYTES, (uint8_t *)longest};
        memcpy((char *)&f.m + LABELS[i].at, &label, sizeof(label));
        struct params p = accepted();
        const struct bytes *got = (struct bytes *)((char *)&p + LABELS[i].out);
        ck_assert_uint_eq(got->len, ASK_MAX_LABEL_BYTES);
        ck_assert_mem_eq(got->data, longest, got->len);
        ck_assert_ptr_ne(got->data, longest);
        params_free(&p);
        label.len++;
        memcpy((char *)&f.m + LABELS[i].at, &label, sizeof(label));
        refused(LABELS[i].refusal);
    }
}
END_TEST

START_TEST(test_a_request_without_a_label_gets_one)
{
    struct params a = accepted(), b = accepted();
    ck_assert_uint_eq(a.label.len, 16);
    ck_assert_uint_eq(strspn(a.label.data, "0123456789abcdef"), 16);
    ck_assert_str_ne(a.label.data, b.label.data);
    params_free(&a);
    params_free(&b);
}
END_TEST

START_TEST(test_only_the_model_that_is_served_is_found)
{
    f.m.model = rpc_data("tandem-demo");
    is_accepted();
    f.m.model = rpc_data("tandem-dem");
    refused_as(TD_ERR_NOT_FOUND, "model: this cluster serves 'tandem-demo'");
}
END_TEST

START_TEST(test_an_adapter_that_is_not_served_is_refused_with_the_names)
{
    f.m.lora = rpc_data("poet");
    refused_as(TD_ERR_NOT_FOUND, "lora: 'poet' is not served; there are no adapters");
    router->n_adapters = 2;
    strcpy(router->adapters[0].name, "cook");
    strcpy(router->adapters[1].name, "poetry");
    f.m.lora = rpc_data("poet");
    refused_as(TD_ERR_NOT_FOUND, "lora: 'poet' is not served; there are: cook, poetry");
    f.m.lora = rpc_data("cook");
    struct params p = accepted();
    ck_assert(is_bytes(&p.lora, "cook"));
    params_free(&p);
}
END_TEST

START_TEST(test_priorities_have_bounds)
{
    const int32_t good[] = {-10, 10};
    for (int i = 0; i < 2; i++) {
        f.m.priority = good[i];
        struct params p = accepted();
        ck_assert_int_eq(p.priority, good[i]);
        params_free(&p);
    }
    f.m.priority = 11;
    refused("priority: 11 is not in -10 .. 10");
    f.m.priority = -11;
    refused("priority: -11 is not in -10 .. 10");
}
END_TEST

START_TEST(test_exact_limits_go_before_whole_ones)
{
    f.slo.ttft_ms = 5;
    f.slo.exact_ttft_ms = 0.25;
    f.slo.tpot_ms = 7;
    struct params p = accepted();
    ck_assert_double_eq(p.ttft_ms, 0.25);
    ck_assert_double_eq(p.tpot_ms, 7);
    params_free(&p);
    f.m.slo = NULL;
    p = accepted();
    ck_assert_double_eq(p.ttft_ms, 0);
    ck_assert_double_eq(p.tpot_ms, 0);
    params_free(&p);
}
END_TEST

START_TEST(test_limits_that_make_no_sense_are_refused)
{
    f.slo.exact_ttft_ms = -1;
    refused("slo.exact_ttft_ms: -1 is not 0, nor in 0.001 .. 1e12");
    f.slo.exact_ttft_ms = NAN;
    refused("slo.exact_ttft_ms: nan is not 0, nor in 0.001 .. 1e12");
    f.slo.exact_tpot_ms = 0.0005;
    refused("slo.exact_tpot_ms: 0.0005 is not 0, nor in 0.001 .. 1e12");
    f.slo.exact_tpot_ms = 1.5e12;
    refused("slo.exact_tpot_ms: 1.5e+12 is not 0, nor in 0.001 .. 1e12");
    f.slo.exact_tpot_ms = 1e12;
    f.slo.exact_ttft_ms = 0.001;
    is_accepted();
}
END_TEST

START_TEST(test_the_earlier_deadline_counts)
{
    const struct {
        uint32_t own_ms;
        int64_t grpc_ms, want_ms;
    } CASES[] = {{0, INT64_MAX, INT64_MAX}, {0, 70, 70}, {50, INT64_MAX, 50}, {50, 70, 50}, {80, 70, 70}};
    for (int i = 0; i < 5; i++) {
        struct params p;
        struct td_error e;
        f.slo.deadline_ms = CASES[i].own_ms;
        ck_assert_int_eq(params_parse(router, &f.m, CASES[i].grpc_ms, &p, &e), TD_OK);
        ck_assert_int_eq(p.remaining_ms, CASES[i].want_ms);
        params_free(&p);
    }
}
END_TEST

START_TEST(test_wishes_are_taken_over)
{
    struct params p = accepted();
    ck_assert(!p.want_ids && !p.want_logprobs && !p.want_prompt_logprobs && !p.bypass_cache && p.skip_special);
    ck_assert(!p.sampling.logprobs && !p.sampling.prompt_logprobs);
    ck_assert_uint_eq(p.sampling.top_logprobs, 0);
    params_free(&p);
    f.m.want_ids = f.m.want_logprobs = f.m.want_prompt_logprobs = f.m.bypass_cache = true;
    f.m.has_skip_special_tokens_case = TANDEM__V1__GENERATE_REQUEST__HAS_SKIP_SPECIAL_TOKENS_SKIP_SPECIAL_TOKENS;
    f.m.workflow_deadline_ms = 90;
    f.m.workflow_steps_left = 3;
    f.m.top_logprobs = 20;
    p = accepted();
    ck_assert(p.want_ids && p.want_logprobs && p.want_prompt_logprobs && p.bypass_cache && !p.skip_special);
    ck_assert(p.sampling.logprobs && p.sampling.prompt_logprobs);
    ck_assert_uint_eq(p.sampling.top_logprobs, 20);
    ck_assert_uint_eq(p.workflow_deadline_ms, 90);
    ck_assert_uint_eq(p.workflow_steps_left, 3);
    params_free(&p);
    f.m.top_logprobs = 21;
    refused("top_logprobs: 21, at most 20");
}
END_TEST

START_TEST(test_a_copy_shares_nothing_and_has_the_original_prompt)
{
    uint32_t ids[] = {4, 5}, stops[] = {3};
    Tandem__V1__LogitBias bias = TANDEM__V1__LOGIT_BIAS__INIT, *biases[] = {&bias};
    ProtobufCBinaryData stop = rpc_data("stop");
    bias.id = 9;
    f.tokens.ids = ids;
    f.tokens.n_ids = 2;
    f.m.tenant = rpc_data("me");
    f.m.echo = true;
    f.sampling.logit_bias = biases;
    f.sampling.n_logit_bias = 1;
    f.sampling.allowed_ids = ids;
    f.sampling.n_allowed_ids = 2;
    f.stopping.stop = &stop;
    f.stopping.n_stop = 1;
    f.stopping.stop_ids = stops;
    f.stopping.n_stop_ids = 1;
    struct params p = accepted();
    p.ids = mem_resize(p.ids, 3, sizeof(*p.ids)); /* as after a re-plan */
    p.ids[p.n_ids++] = 77;
    struct params copy = params_copy(&p);
    params_free(&p);
    ck_assert_uint_eq(copy.n_ids, 2);
    ck_assert_mem_eq(copy.ids, ids, sizeof(ids));
    ck_assert_uint_eq(copy.sampling.logit_bias[0]->id, 9);
    ck_assert_uint_eq(copy.sampling.allowed_ids[1], 5);
    ck_assert_uint_eq(copy.sampling.stop_ids[0], 3);
    ck_assert(is_bytes(&copy.stop[0], "stop"));
    ck_assert(is_bytes(&copy.tenant, "me"));
    ck_assert_uint_gt(copy.echo.len, 0);
    params_free(&copy);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("router_params");
    TCase *numbers = tcase_create("numbers"), *lists = tcase_create("lists"), *lengths = tcase_create("lengths"),
          *prompts = tcase_create("prompts"), *rest = tcase_create("rest");
    TCase *cases[] = {numbers, lists, lengths, prompts, rest};
    for (int i = 0; i < 5; i++) {
        tcase_add_unchecked_fixture(cases[i], open_once, world_close);
        tcase_add_checked_fixture(cases[i], setup, NULL);
        suite_add_tcase(s, cases[i]);
    }
    tcase_add_loop_test(numbers, test_numbers_of_sampling_reach_their_bounds, 0, N_NUMBERS);
    tcase_add_loop_test(numbers, test_numbers_of_sampling_stay_within_their_bounds, 0, N_NUMBERS);
    tcase_add_test(numbers, test_what_is_not_set_comes_from_the_model);
    tcase_add_test(numbers, test_zero_that_is_set_is_not_the_default);
    tcase_add_test(numbers, test_a_seed_is_drawn_below_2_to_53_or_kept_whole);
    tcase_add_test(numbers, test_top_k_and_the_number_of_choices_have_bounds);
    tcase_add_test(lists, test_biases_are_kept_and_bounded);
    tcase_add_test(lists, test_ids_that_the_model_suppresses_are_never_drawn);
    tcase_add_test(lists, test_allowed_ids_are_kept_and_bounded);
    tcase_add_test(lists, test_some_allowed_id_can_be_drawn);
    tcase_add_test(lists, test_stop_strings_are_copied_and_bounded);
    tcase_add_test(lists, test_stop_ids_include_the_ends_of_the_model);
    tcase_add_test(lengths, test_an_answer_fills_the_context_if_it_has_no_limit);
    tcase_add_test(lengths, test_the_limit_of_the_model_gives_way_to_min_tokens_and_to_the_context);
    tcase_add_test(lengths, test_lengths_that_do_not_fit_are_refused);
    tcase_add_test(lengths, test_scores_need_no_answer);
    tcase_add_test(lengths, test_scores_of_a_prompt_fit_into_one_message);
    tcase_add_test(prompts, test_a_prompt_is_text_ids_or_a_chat);
    tcase_add_test(prompts, test_prompts_that_can_not_be_used_are_refused);
    tcase_add_test(prompts, test_a_prompt_leaves_room_for_a_token);
    tcase_add_test(prompts, test_a_chat_is_rendered_by_the_template_of_the_model);
    tcase_add_test(prompts, test_a_chat_that_can_not_be_read_names_its_part);
    tcase_add_test(prompts, test_special_tokens_are_added_to_texts_only);
    tcase_add_test(prompts, test_the_echo_is_the_text_of_the_prompt);
    tcase_add_test(prompts, test_a_prompt_that_is_too_large_is_seen_before_it_is_read);
    tcase_add_test(rest, test_labels_are_copied_and_bounded);
    tcase_add_test(rest, test_a_request_without_a_label_gets_one);
    tcase_add_test(rest, test_only_the_model_that_is_served_is_found);
    tcase_add_test(rest, test_an_adapter_that_is_not_served_is_refused_with_the_names);
    tcase_add_test(rest, test_priorities_have_bounds);
    tcase_add_test(rest, test_exact_limits_go_before_whole_ones);
    tcase_add_test(rest, test_limits_that_make_no_sense_are_refused);
    tcase_add_test(rest, test_the_earlier_deadline_counts);
    tcase_add_test(rest, test_wishes_are_taken_over);
    tcase_add_test(rest, test_a_copy_shares_nothing_and_has_the_original_prompt);
    return tap_main(s);
}
