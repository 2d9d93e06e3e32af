/*
 * Commands against a real router in this process: what they print, and how they end. Calls are kept in memory
 * (tests/calls.h), and the test answers for workers and stores (tests/router/world.h).
 */
#include "tests/router/door.h"

#include <jansson.h>

#include "cli/cli.h"
#include "grpc_health.pb-c.h"
#include "tests/cli/run.h"

#define WORDS                                                                                                          \
    "Tell me a story about a fox and a lantern and the rain on the roof and the warm bread and the dog "               \
    "and the end of the story that ends well and all that comes after it when the fox is old"

static bool is_serving;
static const char *problem; /* that workers report in an audit; NULL: none */

static void says_audit(struct peer *p, uint64_t nonce)
{
    Tandem__Worker__V1__WorkerMessage m = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
    Tandem__Worker__V1__Audit a = TANDEM__WORKER__V1__AUDIT__INIT;
    ProtobufCBinaryData problems[] = {rpc_data(problem ? problem : "")};
    a.nonce = nonce;
    a.free = a.total = 4096;
    a.n_problems = problem != NULL;
    a.problems = problems;
    m.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_AUDIT;
    m.audit = &a;
    worker_says(p, &m);
}

static enum rpc_code check_health(ProtobufCMessage **response_out)
{
    Grpc__Health__V1__HealthCheckResponse *m = mem_zalloc(sizeof(*m));
    grpc__health__v1__health_check_response__init(m);
    m->status = is_serving ? GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING
                           : GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING;
    *response_out = &m->base;
    return RPC_OK;
}

/* A call of a command: the router answers, and workers do if it asks them. */
static enum rpc_code ask_router(const char *target, const char *path, const ProtobufCMessage *request,
                                ProtobufCMessage **response_out, struct td_error *text_out)
{
    (void)target;
    if (!strcmp(path, "/grpc.health.v1.Health/Check"))
        return check_health(response_out);
    struct rpc_call *call = door_open(path, request);
    router_turn(router);
    for (uint32_t i = 0; strstr(path, "Audit") && i < router->n_peers; i++) {
        const Tandem__Worker__V1__RouterMessage *m = NULL;
        if (told(router->peers[i], TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_AUDIT, &m))
            says_audit(router->peers[i], m->audit->nonce);
    }
    router_turns_until(call->finished);
    enum rpc_code code = call->code;
    if (code)
        td_fail(text_out, TD_ERR_REFUSED, "%s", call->text);
    else {
        *response_out = call->sent[0];
        call->sent[0] = call->sent[--call->n_sent]; /* the caller owns it now */
    }
    door_close(call);
    return code;
}

/* The workers of a placed request generate "Hi". */
static void generate_hi(struct request *q)
{
    struct client c = {.call = q->call, .q = q, .counter = q->counter};
    struct peer *prefill = q->prefill, *decode = q->decode;
    if (!prefill || !decode)
        return;
    worker_accepts(&c, decode);
    worker_token(&c, prefill, id_of_byte('H'), 0, -0.25f);
    if (prefill != decode)
        worker_ends(&c, prefill, "");
    worker_token(&c, decode, id_of_byte('i'), 1, -0.5f);
    worker_ends(&c, decode, "length");
}

/* A Generate of a command: goes to the router, whose answer comes back at once. */
static void answer_stream(struct rpc_call *call)
{
    if (strcmp(call->path, "/tandem.v1.Tandem/Generate"))
        return;
    struct rpc_call *at = door_open(call->path, call->sent[0]);
    uint64_t limit = door_wall_ns() + 20 * NS_PER_S;
    while (!at->finished && door_wall_ns() < limit) {
        struct request *q, *next;
        router_turn(router);
        TAILQ_FOREACH_SAFE (q, &router->requests, in_router, next)
            if (q->call == at && q->state == REQUEST_PLACED && q->prefill) {
                generate_hi(q);
                break; /* the list has changed */
            }
    }
    for (uint32_t i = 0; i < at->n_sent; i++)
        call_hears(call, at->sent[i]);
    call_ends(call, at->code, at->text, at->retry_after_ms);
    door_close(at);
}

static void setup(void)
{
    setenv("TANDEM_ROUTER", "127.0.0.1:1", 1);
    world_open("pds");
    calls_unary = ask_router;
    calls_stream = answer_stream;
    is_serving = true;
    problem = NULL;
}

static bool prints(const char *text)
{
    return strstr(ran.out, text) != NULL;
}

static json_t *printed(void)
{
    json_t *o = json_loads(ran.out, 0, NULL);
    ck_assert_msg(o != NULL, "no JSON: %s", ran.out);
    return o;
}

/* p's heartbeat names all of its pages as free. */
static void says_pages(struct peer *p)
{
    Tandem__Worker__V1__WorkerMessage m = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
    Tandem__Worker__V1__Load load = TANDEM__WORKER__V1__LOAD__INIT;
    load.heard = load.taken = p->n_said;
    load.free_pages = load.total_pages = 4096;
    load.kv_bytes_in = 3 << 20;
    load.transport = rpc_data("mapped,tcp");
    m.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_LOAD;
    m.load = &load;
    worker_says(p, &m);
}

/* ------------------------------------------------------------------- status */

START_TEST(test_status_prints_each_worker_and_the_stores)
{
    for (uint32_t i = 0; i < 3; i++)
        says_pages(router->peers[i]);
    run(cli_status, "");
    ck_assert_int_eq(ran.code, 0);
    ck_assert(prints("model tandem-demo  fingerprint "));
    ck_assert(prints("requests: 0 queued, 0 running; 0 accepted"));
    ck_assert(prints("p0") && prints("d1") && prints("mapped,tcp") && prints("4096") && prints("3 MiB"));
    const char *stores = strstr(ran.out, "BLOCKS IN DRAM");
    ck_assert(stores && strstr(stores, "s2") && !strstr(stores, "p0"));
    ck_assert(!prints("can't connect"));
    router->ready = false;
    router->peers[1]->n_unreached = 1;
    scheduler_worker_reads(router->scheduler, 1, 0, false);
    run(cli_status, "");
    ck_assert(prints("; not placing requests yet"));
    ck_assert(prints("d1 can't connect to p0: they get no requests together"));
}
END_TEST

START_TEST(test_status_prints_one_json_object)
{
    says_pages(router->peers[0]);
    run(cli_status, "--json");
    json_t *o = printed();
    ck_assert_uint_eq(json_array_size(json_object_get(o, "workers")), 3);
    ck_assert_str_eq(json_string_value(json_object_get(o, "model")), "tandem-demo");
    ck_assert(json_is_true(json_object_get(o, "ready")));
    const json_t *w = json_array_get(json_object_get(o, "workers"), 0);
    ck_assert_str_eq(json_string_value(json_object_get(w, "state")), "ready");
    json_decref(o);
}
END_TEST

START_TEST(test_status_waits_until_all_are_ready)
{
    for (uint32_t i = 0; i < 2; i++)
        says_pages(router->peers[i]); /* a store may have none */
    run(cli_status, "--wait 5");
    ck_assert_int_eq(ran.code, 0);
    is_serving = false;
    run(cli_status, "--wait 0.001");
    ck_assert_int_eq(ran.code, 1);
    ck_assert_ptr_nonnull(strstr(ran.err, "not ready after 0.001 s: the router's health is not SERVING"));
    peer_drains(router->peers[1]);
    run(cli_status, "--wait 0.001");
    ck_assert_ptr_nonnull(strstr(ran.err, "d1: draining"));
}
END_TEST

START_TEST(test_commands_say_where_no_router_answers)
{
    calls_unary = NULL;
    run(cli_status, "");
    ck_assert_int_eq(ran.code, 1);
    ck_assert_ptr_nonnull(strstr(ran.err, "127.0.0.1:1: UNAVAILABLE"));
    ck_assert_ptr_nonnull(strstr(ran.err, "tandem up starts a cluster"));
    run(cli_audit, "");
    ck_assert_int_eq(ran.code, 1);
    run(cli_explain, "");
    ck_assert_int_eq(ran.code, 1);
    run(cli_cache, "flush --all");
    ck_assert_int_eq(ran.code, 1);
    run(cli_cache, "flush x --wait-ms 0");
    ck_assert_int_eq(ran.code, 1);
}
END_TEST

/* -------------------------------------------------------------------- audit */

START_TEST(test_audit_ends_with_1_if_something_is_not_accounted_for)
{
    run(cli_audit, "");
    ck_assert_int_eq(ran.code, 0);
    ck_assert(prints("every page and block is accounted for; 0 requests running"));
    ck_assert(!prints("PROBLEM"));
    problem = "page 5 leaks";
    run(cli_audit, "");
    ck_assert_int_eq(ran.code, 1);
    ck_assert(prints("PROBLEM p0: page 5 leaks\n"));
    ck_assert(prints("NOT everything is accounted for"));
    run(cli_audit, "--json");
    ck_assert_int_eq(ran.code, 1);
    json_t *o = printed();
    ck_assert(json_is_false(json_object_get(o, "ok")));
    const json_t *w = json_array_get(json_object_get(o, "workers"), 2);
    ck_assert_str_eq(json_string_value(json_object_get(w, "role")), "store");
    ck_assert_str_eq(json_string_value(json_array_get(json_object_get(w, "problems"), 0)), "page 5 leaks");
    ck_assert_int_eq(json_integer_value(json_object_get(json_object_get(w, "pages"), "total")), 4096);
    json_decref(o);
}
END_TEST

/* ------------------------------------------------------------------ explain */

static struct client place(const char *label, uint32_t ttft_ms)
{
    Tandem__V1__GenerateRequest m = TANDEM__V1__GENERATE_REQUEST__INIT;
    Tandem__V1__Slo slo = TANDEM__V1__SLO__INIT;
    m.prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_TEXT;
    m.text = rpc_data(WORDS);
    m.request_id = rpc_data(label);
    slo.ttft_ms = ttft_ms;
    m.slo = &slo;
    return ask(&m);
}

START_TEST(test_explain_prints_what_was_weighed)
{
    struct client a = place("alpha", 0), b = place("be\033ta", 0);
    run(cli_explain, "alpha");
    ck_assert_int_eq(ran.code, 0);
    ck_assert(prints("request alpha, ") && prints("predicted TTFT"));
    ck_assert(prints("WORKER") && prints("p0") && prints("d1"));
    run(cli_explain, "--last 2");
    ck_assert(prints("request be?ta, ") && prints("request alpha, ")); /* no escape reaches the terminal */
    run(cli_explain, "--last 2 --json");
    json_t *o = printed();
    ck_assert_uint_eq(json_array_size(json_object_get(o, "decisions")), 2);
    const json_t *d = json_array_get(json_object_get(o, "decisions"), 1);
    ck_assert_str_eq(json_string_value(json_object_get(d, "request_id")), "alpha");
    ck_assert_uint_gt(json_array_size(json_object_get(d, "candidates")), 0);
    json_decref(o);
    run(cli_explain, "gamma");
    ck_assert_int_eq(ran.code, 1);
    ck_assert_ptr_nonnull(strstr(ran.err, "no decision about 'gamma' is kept"));
    rpc_call_unref(a.call);
    rpc_call_unref(b.call);
}
END_TEST

START_TEST(test_explain_prints_why_a_request_was_refused)
{
    struct client c = place("hurry", 1); /* 1 ms is too short for any worker */
    ck_assert(!is_alive(&c));
    run(cli_explain, "hurry");
    ck_assert_int_eq(ran.code, 0);
    ck_assert(prints("refused: ") && prints("to come back after"));
    rpc_call_unref(c.call);
}
END_TEST

/* -------------------------------------------------------------------- cache */

START_TEST(test_cache_pins_releases_and_flushes_a_prompt)
{
    run(cli_cache, "pin " WORDS);
    ck_assert_msg(ran.code == 0, "%s", ran.err);
    ck_assert(prints("prefix_tokens") && prints("told             3"));
    ck_assert_uint_gt(router->pinned.n_blocks, 0);
    run(cli_cache, "release --json " WORDS);
    ck_assert_int_eq(ran.code, 0);
    json_t *o = printed();
    ck_assert_int_eq(json_integer_value(json_object_get(o, "told")), 3);
    json_decref(o);
    ck_assert_uint_eq(router->pinned.n_blocks, 0);
    run(cli_cache, "pin --tenant a --cache-salt b --request {\"prompt\":\""
                   "One~two~three~four~five~six~seven~eight~"
                   "nine~ten~eleven~twelve~thirteen~fourteen~fifteen\"}");
    ck_assert_msg(ran.code == 0, "%s", ran.err);
    ck_assert_uint_gt(router->pinned.n_blocks, 0);
    run(cli_cache, "flush " WORDS);
    ck_assert_int_eq(ran.code, 0);
    ck_assert(prints("away             0"));
    ck_assert_uint_gt(router->pinned.n_blocks, 0); /* the other prompt */
    run(cli_cache, "flush --all");
    ck_assert_int_eq(ran.code, 0);
    ck_assert_uint_eq(router->pinned.n_blocks, 0);
}
END_TEST

START_TEST(test_cache_says_when_nothing_was_pinned)
{
    run(cli_cache, "pin Hi --no-chat");
    ck_assert_int_eq(ran.code, 1);
    ck_assert_ptr_nonnull(strstr(ran.err, "nothing is pinned: the prompt has no full block"));
    for (uint32_t i = 0; i < 3; i++)
        world_lose(router->peers[i]);
    run(cli_cache, "pin " WORDS);
    ck_assert_int_eq(ran.code, 1);
    ck_assert_ptr_nonnull(strstr(ran.err, "nothing is pinned yet: no worker or store is there"));
}
END_TEST

static const struct {
    const char *words, *said;
} CACHE[] = {
    {"", "say pin, release or flush"},
    {"drop x", "'drop' is none of pin, release, flush"},
    {"pin --all", "--all is only for flush"},
    {"flush x --all", "'x': --all and --request take no PROMPT"},
    {"pin --request 5", "--request: '5' is not a JSON object"},
    {"pin --request {\"promt\":\"x\"}", "promt"},
};

START_TEST(test_cache_refuses_words_that_make_no_sense)
{
    for (size_t i = 0; i < sizeof(CACHE) / sizeof(CACHE[0]); i++) {
        run(cli_cache, CACHE[i].words);
        ck_assert_msg(strstr(ran.err, CACHE[i].said) != NULL, "'%s' instead of '%s'", ran.err, CACHE[i].said);
        ck_assert_int_eq(ran.code, 2);
    }
}
END_TEST

/* ----------------------------------------------------------------- generate */

/* The router ends the stream well, but without its last message. */
static void cut_stream(struct rpc_call *call)
{
    if (!strcmp(call->path, "/tandem.v1.Tandem/Generate"))
        call_ends(call, RPC_OK, "", 0);
}

static void be_busy(struct rpc_call *call)
{
    if (!strcmp(call->path, "/tandem.v1.Tandem/Generate"))
        call_ends(call, RPC_RESOURCE_EXHAUSTED, "busy", 250);
}

START_TEST(test_generate_prints_the_text_and_where_the_time_went)
{
    run(cli_generate, "--no-chat --max-tokens 2 Tell~me");
    ck_assert_msg(ran.code == 0, "%s", ran.err);
    ck_assert_str_eq(ran.out, "Hi\n");
    ck_assert_ptr_nonnull(strstr(ran.err, "2 generated; "));
    ck_assert_ptr_nonnull(strstr(ran.err, "TTFT"));
    run(cli_generate, "--no-chat --no-timing Tell~me");
    ck_assert_str_eq(ran.err, "");
}
END_TEST

START_TEST(test_generate_prints_one_json_object_with_all_choices)
{
    run(cli_generate, "--json --n 2 --max-tokens 2 --no-chat --seed 5 Tell~me");
    ck_assert_msg(ran.code == 0, "%s", ran.err);
    json_t *o = printed();
    ck_assert_str_eq(json_string_value(json_object_get(o, "text")), "Hi");
    ck_assert_str_eq(json_string_value(json_object_get(o, "finish_reason")), "length");
    ck_assert_uint_eq(json_array_size(json_object_get(o, "token_ids")), 2);
    ck_assert_uint_eq(json_array_size(json_object_get(o, "logprobs")), 2);
    ck_assert_int_eq(json_integer_value(json_object_get(o, "seed")), 5);
    ck_assert_ptr_nonnull(json_object_get(json_object_get(o, "placement"), "plan"));
    const json_t *more = json_object_get(o, "choices");
    ck_assert_uint_eq(json_array_size(more), 1);
    ck_assert_str_eq(json_string_value(json_object_get(json_array_get(more, 0), "text")), "Hi");
    json_decref(o);
}
END_TEST

START_TEST(test_generate_answers_each_line_and_names_the_first_that_failed)
{
    static const char LINES[] = "{\"id\":\"a\",\"prompt\":\"Tell me\"}\n\n{\"prompt\":5}\n[1]\n"
                                "{\"prompt\":\"x\",\"top_p\":2}\n";
    uint32_t n = 0;
    give_input(LINES, sizeof(LINES) - 1);
    run(cli_generate, "--jsonl --max-tokens 2 --concurrency 2");
    ck_assert_int_eq(ran.code, 1);
    ck_assert_ptr_nonnull(strstr(ran.err, "3 of 4 lines failed; the first, line 3: INVALID_ARGUMENT"));
    for (char *save, *line = strtok_r(ran.out, "\n", &save); line; line = strtok_r(NULL, "\n", &save), n++) {
        json_t *o = json_loads(line, 0, NULL);
        ck_assert_msg(o != NULL, "no JSON: %s", line);
        const json_t *error = json_object_get(o, "error");
        if (!n) {
            ck_assert_str_eq(json_string_value(json_object_get(o, "id")), "a");
            ck_assert_str_eq(json_string_value(json_object_get(o, "text")), "Hi");
        } else {
            ck_assert_int_eq(json_integer_value(json_object_get(error, "line")), 2 + n);
            ck_assert_str_eq(json_string_value(json_object_get(error, "code")), "INVALID_ARGUMENT");
        }
        json_decref(o);
    }
    ck_assert_uint_eq(n, 4);
}
END_TEST

START_TEST(test_generate_says_why_a_request_was_refused)
{
    run(cli_generate, "--no-chat --ttft-ms 1 " WORDS);
    ck_assert_int_eq(ran.code, 1);
    ck_assert_str_eq(ran.out, "");
    ck_assert_ptr_nonnull(strstr(ran.err, "127.0.0.1:1: RESOURCE_EXHAUSTED: "));
    run(cli_generate, "--json --no-chat --ttft-ms 1 " WORDS);
    ck_assert_int_eq(ran.code, 1);
    json_t *o = printed();
    const json_t *error = json_object_get(o, "error");
    ck_assert_str_eq(json_string_value(json_object_get(error, "code")), "RESOURCE_EXHAUSTED");
    ck_assert_ptr_null(json_object_get(error, "retry_after_ms")); /* it would not help to come back */
    json_decref(o);
    calls_stream = be_busy;
    run(cli_generate, "--json --no-chat Tell~me");
    o = printed();
    ck_assert_int_eq(json_integer_value(json_object_get(json_object_get(o, "error"), "retry_after_ms")), 250);
    json_decref(o);
    calls_stream = answer_stream;
    router_stop(router);
    run(cli_generate, "--no-chat Tell~me");
    ck_assert_ptr_nonnull(strstr(ran.err, "UNAVAILABLE: router is draining"));
}
END_TEST

START_TEST(test_generate_does_not_take_a_stream_without_its_end_for_an_answer)
{
    calls_stream = cut_stream;
    run(cli_generate, "--no-chat Tell~me");
    ck_assert_int_eq(ran.code, 1);
    ck_assert_ptr_nonnull(strstr(ran.err, "INTERNAL: the stream ended without its last message"));
}
END_TEST

START_TEST(test_chat_answers_line_by_line)
{
    give_input("Hello\nAnd then?\n\nnot read\n", 26);
    run(cli_chat, "--max-tokens 2");
    if (!chat_template_present(router->chat)) {
        ck_assert_int_eq(ran.code, 1);
        return;
    }
    ck_assert_msg(ran.code == 0, "%s", ran.err);
    ck_assert_str_eq(ran.out, "Hi\nHi\n");
}
END_TEST

/* ----------------------------------------------------------------- tokenize */

START_TEST(test_tokenize_asks_the_router)
{
    run(cli_tokenize, "Tell~me~a~story");
    ck_assert_msg(ran.code == 0, "%s", ran.err);
    ck_assert_uint_gt(strlen(ran.out), 4);
    calls_unary = NULL;
    run(cli_tokenize, "Tell~me~a~story");
    ck_assert_int_eq(ran.code, 1);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("cli_calls");
    TCase *t = tcase_create("cli_calls");
    tcase_add_checked_fixture(t, setup, world_close);
    tcase_set_timeout(t, 60);
    tcase_add_test(t, test_status_prints_each_worker_and_the_stores);
    tcase_add_test(t, test_status_prints_one_json_object);
    tcase_add_test(t, test_status_waits_until_all_are_ready);
    tcase_add_test(t, test_commands_say_where_no_router_answers);
    tcase_add_test(t, test_audit_ends_with_1_if_something_is_not_accounted_for);
    tcase_add_test(t, test_explain_prints_what_was_weighed);
    tcase_add_test(t, test_explain_prints_why_a_request_was_refused);
    tcase_add_test(t, test_cache_pins_releases_and_flushes_a_prompt);
    tcase_add_test(t, test_cache_says_when_nothing_was_pinned);
    tcase_add_test(t, test_cache_refuses_words_that_make_no_sense);
    tcase_add_test(t, test_generate_prints_the_text_and_where_the_time_went);
    tcase_add_test(t, test_generate_prints_one_json_object_with_all_choices);
    tcase_add_test(t, test_generate_answers_each_line_and_names_the_first_that_failed);
    tcase_add_test(t, test_generate_says_why_a_request_was_refused);
    tcase_add_test(t, test_generate_does_not_take_a_stream_without_its_end_for_an_answer);
    tcase_add_test(t, test_chat_answers_line_by_line);
    tcase_add_test(t, test_tokenize_asks_the_router);
    suite_add_tcase(s, t);
    return tap_main(s);
}
