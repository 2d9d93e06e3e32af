/* Single calls: which messages arrive, in which order, and how the call ends. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "echo.h"
#include "tests/tap.h"

#define AT_MOST_MS 30000

static struct echo_service *service;
static struct rpc_client *client;

static void setup(void)
{
    service = echo_open(&(struct echo_config){0});
    ck_assert_ptr_nonnull(service);
    client = echo_client(echo_address(service), 0);
    ck_assert_ptr_nonnull(client);
}

static void teardown(void)
{
    rpc_client_close(client);
    struct echo_stats stats = echo_stats(service);
    ck_assert_uint_eq(stats.n_double_ends, 0);
    ck_assert_uint_eq(stats.n_overlaps, 0);
    echo_close(service);
}

static Tandem__Test__EchoRequest echo_request(const char *text)
{
    Tandem__Test__EchoRequest request = TANDEM__TEST__ECHO_REQUEST__INIT;
    request.text = (ProtobufCBinaryData){strlen(text), (uint8_t *)(uintptr_t)text};
    return request;
}

static enum rpc_code unary(const ProtobufCMessage *request, Tandem__Test__EchoResponse **out, struct td_error *error)
{
    ProtobufCMessage *response = NULL;
    enum rpc_code code =
        rpc_unary(client, ECHO_PATH, request, &tandem__test__echo_response__descriptor, AT_MOST_MS, &response, error);
    *out = (Tandem__Test__EchoResponse *)response;
    return code;
}

static enum rpc_code unary_code(const ProtobufCMessage *request, struct td_error *error)
{
    Tandem__Test__EchoResponse *response = NULL;
    enum rpc_code code = unary(request, &response, error);
    if (response)
        tandem__test__echo_response__free_unpacked(response, NULL);
    return code;
}

START_TEST(test_rpc_unary_returns_the_answer)
{
    Tandem__Test__EchoRequest request = echo_request("hello");
    Tandem__Test__EchoResponse *response = NULL;
    for (int i = 0; i < 100; i++) {
        ck_assert_int_eq(unary(&request.base, &response, NULL), RPC_OK);
        ck_assert_uint_eq(response->text.len, 5);
        ck_assert_mem_eq(response->text.data, "hello", 5);
        ck_assert_int_gt(response->remaining_ms, AT_MOST_MS / 2);
        ck_assert_int_le(response->remaining_ms, AT_MOST_MS + 1000); /* gRPC rounds up on the wire */
        tandem__test__echo_response__free_unpacked(response, NULL);
    }
    ck_assert(echo_wait_ended(service, 100, AT_MOST_MS));
    ck_assert_int_eq(echo_stats(service).last_code, RPC_OK);
}
END_TEST

START_TEST(test_rpc_empty_message_travels)
{
    Tandem__Test__EchoRequest request = TANDEM__TEST__ECHO_REQUEST__INIT;
    Tandem__Test__EchoResponse *response = NULL;
    ck_assert_int_eq(unary(&request.base, &response, NULL), RPC_OK);
    ck_assert_uint_eq(response->text.len, 0);
    tandem__test__echo_response__free_unpacked(response, NULL);
}
END_TEST

START_TEST(test_rpc_status_carries_clean_text_and_retry_after)
{
    struct record *r = record_open();
    Tandem__Test__EchoRequest request = echo_request("bad \xff\x01 \xc3\xa9 \xe2\x82 end");
    request.fail_code = RPC_RESOURCE_EXHAUSTED;
    request.retry_after_ms = 1234;
    ck_assert_int_eq(record_start(r, client, ECHO_PATH, AT_MOST_MS), TD_OK);
    ck_assert_int_eq(rpc_call_send(record_call(r), &request.base), TD_OK);
    ck_assert(record_wait_end(r, AT_MOST_MS));
    struct record_view v = record_view(r);
    ck_assert_int_eq(v.code, RPC_RESOURCE_EXHAUSTED);
    ck_assert_str_eq(v.text, "bad ?  \xc3\xa9 ?? end");
    ck_assert_uint_eq(v.retry_after_ms, 1234);
    ck_assert_uint_eq(v.n_messages, 0);
    ck_assert_uint_eq(v.n_ends, 1);
    record_close(r);
}
END_TEST

START_TEST(test_rpc_status_text_is_cut_to_one_kibibyte_between_characters)
{
    char text[3002] = {0};
    for (int i = 0; i < 1000; i++)
        memcpy(text + 1 + 3 * i, "\xe2\x82\xac", 3);
    text[0] = 'x';
    struct record *r = record_open();
    Tandem__Test__EchoRequest request = echo_request(text);
    request.fail_code = RPC_INTERNAL;
    ck_assert_int_eq(record_start(r, client, ECHO_PATH, AT_MOST_MS), TD_OK);
    ck_assert_int_eq(rpc_call_send(record_call(r), &request.base), TD_OK);
    ck_assert(record_wait_end(r, AT_MOST_MS));
    struct record_view v = record_view(r);
    ck_assert_uint_eq(strlen(v.text), 1024);
    ck_assert_mem_eq(v.text, text, 1024);
    record_close(r);
}
END_TEST

START_TEST(test_rpc_illegal_header_is_refused)
{
    static const char *const BAD[][3] = {
        {"x-test", "line\nbreak", NULL}, {"x test", "v", NULL}, {"x-bin", "v", NULL}, {"X-Upper", "v", NULL}};
    for (size_t i = 0; i < 4; i++) {
        struct record *r = record_open();
        ck_assert_int_eq(record_start_with(r, client, ECHO_PATH, 0, BAD[i]), TD_ERR_INVALID);
        ck_assert_ptr_null(record_call(r));
        record_close(r);
    }
}
END_TEST

START_TEST(test_rpc_server_sees_request_headers)
{
    static const char *const HEADERS[] = {"x-other", "1", "x-test", "tenant a", NULL};
    struct record *r = record_open();
    Tandem__Test__EchoRequest request = echo_request("x");
    ck_assert_int_eq(record_start_with(r, client, ECHO_PATH, 0, HEADERS), TD_OK);
    ck_assert_int_eq(rpc_call_send(record_call(r), &request.base), TD_OK);
    ck_assert(record_wait_end(r, AT_MOST_MS));
    ck_assert_str_eq(record_view(r).last_header, "tenant a");
    record_close(r);
}
END_TEST

/* ------------------------------------------------------------------ streams */

START_TEST(test_rpc_stream_of_100k_messages_arrives_in_order)
{
    uint64_t n = SLOWER > 1 ? 20000 : 100000;
    struct record *r = record_open();
    record_count(r, client, n, 64);
    ck_assert(record_wait_end(r, 2 * AT_MOST_MS));
    struct record_view v = record_view(r);
    ck_assert_int_eq(v.code, RPC_OK);
    ck_assert_uint_eq(v.n_messages, n);
    ck_assert(v.in_order);
    ck_assert_uint_eq(v.n_ends, 1);
    record_close(r);
}
END_TEST

START_TEST(test_rpc_full_queue_pushes_back_and_loses_nothing)
{
    struct record *r = record_open();
    record_block(r, true);
    record_count(r, client, 1000, 16384);
    uint64_t until_ms = echo_now_ms() + AT_MOST_MS;
    while (!echo_stats(service).n_full && echo_now_ms() < until_ms)
        record_wait_end(r, 10);
    ck_assert_uint_gt(echo_stats(service).n_full, 0);
    record_block(r, false);
    ck_assert(record_wait_end(r, AT_MOST_MS));
    struct record_view v = record_view(r);
    ck_assert_int_eq(v.code, RPC_OK);
    ck_assert_uint_eq(v.n_messages, 1000);
    ck_assert(v.in_order);
    record_close(r);
}
END_TEST

START_TEST(test_rpc_client_that_never_reads_fills_the_queue_and_is_aborted)
{
    struct record *r = record_open();
    record_block(r, true);
    Tandem__Test__CountRequest request = TANDEM__TEST__COUNT_REQUEST__INIT;
    request.payload_bytes = 16384;
    request.abort_when_full = true;
    ck_assert_int_eq(record_start(r, client, COUNT_PATH, 0), TD_OK);
    ck_assert_int_eq(rpc_call_send(record_call(r), &request.base), TD_OK);
    /* Although the client is still in its first on_message. */
    ck_assert(echo_wait_ended(service, 1, AT_MOST_MS));
    ck_assert_uint_le(record_view(r).n_messages, 1);
    ck_assert_int_eq(echo_stats(service).last_code, RPC_RESOURCE_EXHAUSTED);
    record_block(r, false);
    ck_assert(record_wait_end(r, AT_MOST_MS));
    ck_assert_int_eq(record_view(r).code, RPC_RESOURCE_EXHAUSTED);
    ck_assert_str_eq(record_view(r).text, "you do not read");
    record_close(r);
}
END_TEST

START_TEST(test_rpc_bidi_flows_both_ways_at_once)
{
    enum { N = 5000 };
    struct record *r = record_open();
    ck_assert_int_eq(record_start(r, client, CHAT_PATH, 0), TD_OK);
    char text[16];
    for (int i = 0; i < N; i++) {
        snprintf(text, sizeof(text), "%d", i);
        Tandem__Test__EchoRequest request = echo_request(text);
        enum td_status status;
        while ((status = rpc_call_send(record_call(r), &request.base)) == TD_ERR_NO_SPACE)
            record_wait_messages(r, record_view(r).n_messages + 1, 10);
        ck_assert_int_eq(status, TD_OK);
        if (i == 10)
            ck_assert(record_wait_messages(r, 1, AT_MOST_MS)); /* answers come before the half-close */
    }
    rpc_call_close_send(record_call(r));
    ck_assert(record_wait_end(r, AT_MOST_MS));
    struct record_view v = record_view(r);
    ck_assert_int_eq(v.code, RPC_OK);
    ck_assert_uint_eq(v.n_messages, N);
    ck_assert_str_eq(v.last_text, "4999");
    ck_assert_uint_eq(rpc_call_n_waiting(record_call(r)), 0);
    ck_assert(v.in_order);
    ck_assert_uint_eq(echo_stats(service).n_half_closed, 1);
    record_close(r);
}
END_TEST

START_TEST(test_rpc_server_may_end_a_stream_the_client_still_sends_on)
{
    struct record *r = record_open();
    Tandem__Test__EchoRequest request = echo_request("no");
    request.fail_code = RPC_ABORTED;
    ck_assert_int_eq(record_start(r, client, ECHO_PATH, 0), TD_OK);
    ck_assert_int_eq(rpc_call_send(record_call(r), &request.base), TD_OK);
    ck_assert(record_wait_end(r, AT_MOST_MS)); /* the call was never half-closed */
    ck_assert_int_eq(record_view(r).code, RPC_ABORTED);
    ck_assert(echo_wait_ended(service, 1, AT_MOST_MS));
    ck_assert_int_eq(echo_stats(service).last_code, RPC_OK);
    ck_assert_int_eq(rpc_call_send(record_call(r), &request.base), TD_ERR_CANCELLED);
    record_close(r);
}
END_TEST

START_TEST(test_rpc_request_stream_without_a_message_is_answered)
{
    struct record *r = record_open();
    ck_assert_int_eq(record_start(r, client, ECHO_PATH, 0), TD_OK);
    rpc_call_close_send(record_call(r));
    ck_assert(record_wait_end(r, AT_MOST_MS));
    ck_assert_int_eq(record_view(r).code, RPC_INVALID_ARGUMENT);
    ck_assert_str_eq(record_view(r).text, "no request");
    record_close(r);
}
END_TEST

/* ------------------------------------------------------------------ cancel, deadline */

START_TEST(test_rpc_cancel_reaches_the_server_within_100_ms)
{
    for (uint32_t i = 1; i <= 5; i++) {
        struct record *r = record_open();
        record_count(r, client, 0, 64); /* endless, at full speed: here it is hardest to notice anything */
        ck_assert(record_wait_messages(r, 100, AT_MOST_MS));
        uint64_t start_ms = echo_now_ms();
        rpc_call_cancel(record_call(r));
        ck_assert(echo_wait_ended(service, i, AT_MOST_MS));
        ck_assert_uint_le(echo_stats(service).last_end_ms - start_ms, 100 * SLOWER);
        ck_assert_int_eq(echo_stats(service).last_code, RPC_CANCELLED);
        ck_assert(record_wait_end(r, AT_MOST_MS));
        ck_assert_int_eq(record_view(r).code, RPC_CANCELLED);
        ck_assert(record_view(r).in_order);
        record_close(r);
    }
}
END_TEST

START_TEST(test_rpc_cancel_of_one_stream_among_many_is_noticed)
{
    enum { N = 16 };
    struct record *r[N];
    for (int i = 0; i < N; i++) {
        r[i] = record_open();
        record_count(r[i], client, 0, 64);
    }
    for (int i = 0; i < N; i++)
        ck_assert(record_wait_messages(r[i], 10, AT_MOST_MS));
    uint64_t start_ms = echo_now_ms();
    rpc_call_cancel(record_call(r[0]));
    ck_assert(echo_wait_ended(service, 1, AT_MOST_MS));
    ck_assert_uint_le(echo_stats(service).last_end_ms - start_ms, 500 * SLOWER);
    for (int i = 1; i < N; i++)
        rpc_call_cancel(record_call(r[i]));
    for (int i = 0; i < N; i++) {
        ck_assert(record_wait_end(r[i], AT_MOST_MS));
        record_close(r[i]);
    }
}
END_TEST

START_TEST(test_rpc_deadline_ends_both_sides)
{
    struct record *r = record_open();
    Tandem__Test__EchoRequest request = echo_request("");
    request.hang = true;
    uint64_t start_ms = echo_now_ms();
    ck_assert_int_eq(record_start(r, client, ECHO_PATH, 300), TD_OK);
    ck_assert_int_le(rpc_call_remaining_ms(record_call(r)), 300);
    ck_assert_int_eq(rpc_call_send(record_call(r), &request.base), TD_OK);
    ck_assert(record_wait_end(r, AT_MOST_MS));
    ck_assert_int_eq(record_view(r).code, RPC_DEADLINE_EXCEEDED);
    uint64_t took_ms = record_view(r).end_ms - start_ms;
    ck_assert_uint_ge(took_ms, 290);
    ck_assert_uint_le(took_ms, 300 + 300 * SLOWER);
    ck_assert_int_eq(rpc_call_remaining_ms(record_call(r)), 0);
    ck_assert(echo_wait_ended(service, 1, 1000 * SLOWER));
    ck_assert_int_eq(echo_stats(service).last_code, RPC_CANCELLED);
    record_close(r);
}
END_TEST

START_TEST(test_rpc_call_without_deadline_has_none)
{
    struct record *r = record_open();
    record_count(r, client, 1, 0);
    ck_assert_int_eq(rpc_call_remaining_ms(record_call(r)), INT64_MAX);
    ck_assert(record_wait_end(r, AT_MOST_MS));
    record_close(r);
}
END_TEST

/* ------------------------------------------------------------------ what must be refused */

START_TEST(test_rpc_unknown_method_is_unimplemented)
{
    Tandem__Test__EchoRequest request = echo_request("x");
    ProtobufCMessage *response = NULL;
    struct td_error error;
    ck_assert_int_eq(rpc_unary(client, "/tandem.test.Echo/Nothing", &request.base,
                               &tandem__test__echo_response__descriptor, AT_MOST_MS, &response, &error),
                     RPC_UNIMPLEMENTED);
    ck_assert_str_eq(error.text, "unknown method /tandem.test.Echo/Nothing");
    ck_assert_ptr_null(response);
}
END_TEST

START_TEST(test_rpc_message_of_another_shape_is_invalid)
{
    Tandem__Test__Misfit misfit = TANDEM__TEST__MISFIT__INIT;
    misfit.text = 1;
    struct td_error error;
    ck_assert_int_eq(unary_code(&misfit.base, &error), RPC_INVALID_ARGUMENT);
    ck_assert_str_eq(error.text, "tandem.test.EchoRequest: not parseable");
    ck_assert(echo_wait_ended(service, 1, AT_MOST_MS));
    ck_assert_int_eq(echo_stats(service).last_code, RPC_INVALID_ARGUMENT);
    ck_assert_uint_eq(echo_stats(service).n_requests, 0);
}
END_TEST

START_TEST(test_rpc_garbage_bytes_are_invalid)
{
    uint32_t seed = 1;
    uint32_t n_refused = 0;
    for (int i = 0; i < 200; i++) {
        uint8_t bytes[64];
        for (size_t k = 0; k < sizeof(bytes); k++) {
            seed = seed * 1664525u + 1013904223u;
            bytes[k] = (uint8_t)(seed >> 24);
        }
        /* An unknown field with a wrong length, followed by noise. */
        ProtobufCMessageUnknownField field = {
            .tag = 1, .wire_type = PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED, .len = 1 + (size_t)i % 63, .data = bytes};
        Tandem__Test__EchoRequest request = TANDEM__TEST__ECHO_REQUEST__INIT;
        request.base.n_unknown_fields = 1;
        request.base.unknown_fields = &field;
        enum rpc_code code = unary_code(&request.base, NULL);
        n_refused += code == RPC_INVALID_ARGUMENT;
        ck_assert_int_ne(code, RPC_UNAVAILABLE);
        ck_assert_int_ne(code, RPC_DEADLINE_EXCEEDED);
    }
    ck_assert_uint_gt(n_refused, 100);
    Tandem__Test__EchoRequest request = echo_request("still here");
    ck_assert_int_eq(unary_code(&request.base, NULL), RPC_OK);
}
END_TEST

START_TEST(test_rpc_answer_that_is_not_parseable_is_internal)
{
    Tandem__Test__EchoRequest request = echo_request("text");
    ProtobufCMessage *response = NULL;
    struct td_error error;
    ck_assert_int_eq(
        rpc_unary(client, ECHO_PATH, &request.base, &tandem__test__misfit__descriptor, AT_MOST_MS, &response, &error),
        RPC_INTERNAL);
    ck_assert_str_eq(error.text, "tandem.test.Misfit: not parseable");
}
END_TEST

START_TEST(test_rpc_message_that_unpacks_to_too_much_is_refused)
{
    enum { N = 1900000 };
    Tandem__Test__Item item = TANDEM__TEST__ITEM__INIT;
    Tandem__Test__Item **items = malloc(N * sizeof(*items));
    for (int i = 0; i < N; i++)
        items[i] = &item;
    Tandem__Test__EchoRequest request = echo_request("x");
    request.items = items;
    request.n_items = N; /* under 4 MiB on the wire, over 64 in memory */
    struct td_error error;
    ck_assert_int_eq(unary_code(&request.base, &error), RPC_INVALID_ARGUMENT);
    request.n_items = N / 10;
    ck_assert_int_eq(unary_code(&request.base, &error), RPC_OK);
    free(items);
}
END_TEST

START_TEST(test_rpc_oversized_request_is_exhausted)
{
    struct echo_service *small = echo_open(&(struct echo_config){.max_message_bytes = 65536});
    struct rpc_client *c = echo_client(echo_address(small), 0);
    uint8_t *bytes = calloc(1, 5 << 20);
    Tandem__Test__EchoRequest request = TANDEM__TEST__ECHO_REQUEST__INIT;
    ProtobufCMessage *response = NULL;
    request.text = (ProtobufCBinaryData){100000, bytes};
    ck_assert_int_eq(
        rpc_unary(c, ECHO_PATH, &request.base, &tandem__test__echo_response__descriptor, AT_MOST_MS, &response, NULL),
        RPC_RESOURCE_EXHAUSTED);
    ck_assert(echo_wait_ended(small, 1, AT_MOST_MS));
    ck_assert_uint_eq(echo_stats(small).n_requests, 0);
    request.text.len = 5 << 20; /* over the client's own limit: it is not sent */
    ck_assert_int_eq(
        rpc_unary(c, ECHO_PATH, &request.base, &tandem__test__echo_response__descriptor, AT_MOST_MS, &response, NULL),
        RPC_INVALID_ARGUMENT);
    ck_assert_uint_eq(echo_stats(small).n_opened, 1);
    request.text.len = 60000;
    ck_assert_int_eq(
        rpc_unary(c, ECHO_PATH, &request.base, &tandem__test__echo_response__descriptor, AT_MOST_MS, &response, NULL),
        RPC_OK);
    protobuf_c_message_free_unpacked(response, NULL);
    free(bytes);
    rpc_client_close(c);
    echo_close(small);
}
END_TEST

START_TEST(test_rpc_oversized_answer_is_exhausted)
{
    struct rpc_client *c = echo_client(echo_address(service), 65536);
    Tandem__Test__EchoRequest request = TANDEM__TEST__ECHO_REQUEST__INIT;
    request.answer_bytes = 100000;
    ProtobufCMessage *response = NULL;
    ck_assert_int_eq(
        rpc_unary(c, ECHO_PATH, &request.base, &tandem__test__echo_response__descriptor, AT_MOST_MS, &response, NULL),
        RPC_RESOURCE_EXHAUSTED);
    rpc_client_close(c);
}
END_TEST

/* ------------------------------------------------------------------ queue */

/* A call that is held lets others of its connection go on, and misses nothing. */
START_TEST(test_rpc_call_that_is_held_gets_its_messages_when_it_resumes)
{
    enum { N = 2000, OTHERS = 100 };
    struct record *r = record_open();
    struct td_error e = {""};
    record_count(r, client, N, 1000);
    rpc_call_hold(record_call(r));
    for (int i = 0; i < OTHERS; i++) {
        Tandem__Test__EchoRequest request = echo_request("x");
        ck_assert_msg(unary_code(&request.base, &e) == RPC_OK, "%s", e.text);
    }
    uint64_t before = record_view(r).n_messages; /* those that came before it was held */
    for (int i = 0; i < OTHERS; i++) {
        Tandem__Test__EchoRequest request = echo_request("x");
        ck_assert_msg(unary_code(&request.base, &e) == RPC_OK, "%s", e.text);
    }
    struct record_view v = record_view(r);
    ck_assert_uint_eq(v.n_messages, before);
    ck_assert_uint_lt(v.n_messages, N);
    ck_assert_uint_eq(v.n_ends, 0);
    rpc_call_resume(record_call(r));
    ck_assert(record_wait_end(r, AT_MOST_MS));
    v = record_view(r);
    ck_assert_uint_eq(v.n_messages, N);
    ck_assert(v.in_order);
    ck_assert_int_eq(v.code, RPC_OK);
    rpc_call_resume(record_call(r)); /* does nothing */
    record_close(r);
}
END_TEST

START_TEST(test_rpc_call_that_is_held_can_be_cancelled)
{
    struct record *r = record_open();
    record_count(r, client, 0, 1000);
    ck_assert(record_wait_messages(r, 1, AT_MOST_MS));
    rpc_call_hold(record_call(r));
    rpc_call_cancel(record_call(r));
    ck_assert(record_wait_end(r, AT_MOST_MS));
    ck_assert_int_eq(record_view(r).code, RPC_CANCELLED);
    ck_assert_uint_eq(record_view(r).n_ends, 1);
    record_close(r);
}
END_TEST

START_TEST(test_rpc_message_larger_than_the_queue_is_taken_once)
{
    struct rpc_client_config config = {.target = "127.0.0.1:1", .max_queued_bytes = 4096};
    struct rpc_client *c = NULL;
    ck_assert_int_eq(rpc_client_open(&config, &c, NULL), TD_OK);
    struct record *r = record_open();
    uint8_t bytes[8192] = {0};
    Tandem__Test__EchoRequest request = TANDEM__TEST__ECHO_REQUEST__INIT;
    request.text = (ProtobufCBinaryData){sizeof(bytes), bytes};
    struct rpc_call_params params = {
        .path = CHAT_PATH,
        .response = &tandem__test__echo_response__descriptor,
        .wait_for_ready = true, /* nobody listens, so nothing is sent */
    };
    struct rpc_call *call = NULL;
    ck_assert_int_eq(rpc_call_start(c, &params, &call), TD_OK);
    ck_assert_int_eq(rpc_call_send(call, &request.base), TD_OK);
    ck_assert_uint_ge(rpc_call_queued_bytes(call), sizeof(bytes));
    ck_assert_int_eq(rpc_call_send(call, &request.base), TD_ERR_NO_SPACE);
    ck_assert_uint_eq(rpc_call_n_waiting(call), 1);
    rpc_client_close(c);
    ck_assert_int_eq(rpc_call_send(call, &request.base), TD_ERR_CANCELLED);
    ck_assert_uint_eq(rpc_call_queued_bytes(call), 0);
    ck_assert_uint_eq(rpc_call_n_waiting(call), 0);
    rpc_call_unref(call);
    record_close(r);
}
END_TEST

START_TEST(test_rpc_code_of_status_is_total)
{
    ck_assert_int_eq(rpc_code_of_status(TD_OK), RPC_OK);
    ck_assert_int_eq(rpc_code_of_status(TD_ERR_REFUSED), RPC_RESOURCE_EXHAUSTED);
    ck_assert_int_eq(rpc_code_of_status(TD_ERR_PEER_LOST), RPC_UNAVAILABLE);
    ck_assert_str_eq(rpc_code_name(RPC_INVALID_ARGUMENT), "INVALID_ARGUMENT");
    ck_assert_str_eq(rpc_code_name(RPC_UNAUTHENTICATED), "UNAUTHENTICATED");
    ck_assert_str_eq(rpc_code_name((enum rpc_code)99), "UNKNOWN");
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("rpc_call");
    TCase *tc = tcase_create("call");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_set_timeout(tc, 100);
    tcase_add_test(tc, test_rpc_unary_returns_the_answer);
    tcase_add_test(tc, test_rpc_empty_message_travels);
    tcase_add_test(tc, test_rpc_status_carries_clean_text_and_retry_after);
    tcase_add_test(tc, test_rpc_status_text_is_cut_to_one_kibibyte_between_characters);
    tcase_add_test(tc, test_rpc_illegal_header_is_refused);
    tcase_add_test(tc, test_rpc_server_sees_request_headers);
    tcase_add_test(tc, test_rpc_stream_of_100k_messages_arrives_in_order);
    tcase_add_test(tc, test_rpc_full_queue_pushes_back_and_loses_nothing);
    tcase_add_test(tc, test_rpc_client_that_never_reads_fills_the_queue_and_is_aborted);
    tcase_add_test(tc, test_rpc_bidi_flows_both_ways_at_once);
    tcase_add_test(tc, test_rpc_server_may_end_a_stream_the_client_still_sends_on);
    tcase_add_test(tc, test_rpc_request_stream_without_a_message_is_answered);
    tcase_add_test(tc, test_rpc_cancel_reaches_the_server_within_100_ms);
    tcase_add_test(tc, test_rpc_cancel_of_one_stream_among_many_is_noticed);
    tcase_add_test(tc, test_rpc_deadline_ends_both_sides);
    tcase_add_test(tc, test_rpc_call_without_deadline_has_none);
    tcase_add_test(tc, test_rpc_unknown_method_is_unimplemented);
    tcase_add_test(tc, test_rpc_message_of_another_shape_is_invalid);
    tcase_add_test(tc, test_rpc_garbage_bytes_are_invalid);
    tcase_add_test(tc, test_rpc_answer_that_is_not_parseable_is_internal);
    tcase_add_test(tc, test_rpc_message_that_unpacks_to_too_much_is_refused);
    tcase_add_test(tc, test_rpc_oversized_request_is_exhausted);
    tcase_add_test(tc, test_rpc_oversized_answer_is_exhausted);
    tcase_add_test(tc, test_rpc_call_that_is_held_gets_its_messages_when_it_resumes);
    tcase_add_test(tc, test_rpc_call_that_is_held_can_be_cancelled);
    tcase_add_test(tc, test_rpc_message_larger_than_the_queue_is_taken_once);
    tcase_add_test(tc, test_rpc_code_of_status_is_total);
    suite_add_tcase(suite, tc);
    return tap_main(suite);
}
