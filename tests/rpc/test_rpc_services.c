/* Health and reflection, asked through our own client. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "echo.h"
#include "grpc_health.pb-c.h"
#include "grpc_reflection.pb-c.h"
#include "proto/rpc/rpc_senders.h"
#include "tests/tap.h"

#define AT_MOST_MS      30000
#define REFLECTION_PATH "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
#define SERVING         GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING
#define NOT_SERVING     GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING
#define SERVICE_UNKNOWN GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVICE_UNKNOWN

static struct echo_service *service;
static struct rpc_client *client;

static void setup(void)
{
    service = echo_open(&(struct echo_config){0});
    client = echo_client(echo_address(service), 0);
}

static void teardown(void)
{
    rpc_client_close(client);
    echo_close(service);
}

/* ------------------------------------------------------------------ health */

static enum rpc_code check(const char *name, int *status_out)
{
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    request.service = (char *)(uintptr_t)name;
    ProtobufCMessage *response = NULL;
    enum rpc_code code = rpc_unary(client, "/grpc.health.v1.Health/Check", &request.base,
                                   &grpc__health__v1__health_check_response__descriptor, AT_MOST_MS, &response, NULL);
    if (response) {
        *status_out = (int)((Grpc__Health__V1__HealthCheckResponse *)response)->status;
        protobuf_c_message_free_unpacked(response, NULL);
    }
    return code;
}

START_TEST(test_rpc_health_check_tells_the_state)
{
    static const char *const NAMES[] = {"", "tandem.test.Echo"};
    int status = -1;
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(check(NAMES[i], &status), RPC_OK);
        ck_assert_int_eq(status, NOT_SERVING);
    }
    rpc_server_set_serving(echo_server(service), true);
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(check(NAMES[i], &status), RPC_OK);
        ck_assert_int_eq(status, SERVING);
    }
    ck_assert_int_eq(check("tandem.test.Ech", &status), RPC_NOT_FOUND);
    ck_assert_int_eq(check("tandem.test.Echo/Echo", &status), RPC_NOT_FOUND);
}
END_TEST

struct watch {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int seen[8];
    int n_seen;
    bool ended;
};

static void watch_message(struct rpc_call *call, const ProtobufCMessage *message)
{
    struct watch *w = rpc_call_user(call);
    pthread_mutex_lock(&w->lock);
    if (w->n_seen < 8)
        w->seen[w->n_seen++] = (int)((const Grpc__Health__V1__HealthCheckResponse *)message)->status;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

static void watch_end(struct rpc_call *call, enum rpc_code code, const char *text)
{
    (void)code;
    (void)text;
    struct watch *w = rpc_call_user(call);
    pthread_mutex_lock(&w->lock);
    w->ended = true;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

/* Waits for n messages; the time limit of the test ends a hang. */
static void watch_wait(struct watch *w, int n)
{
    pthread_mutex_lock(&w->lock);
    while (w->n_seen < n && !w->ended)
        pthread_cond_wait(&w->changed, &w->lock);
    pthread_mutex_unlock(&w->lock);
    ck_assert_int_eq(w->n_seen, n);
}

static struct rpc_call *watch_start(struct watch *w, const char *name)
{
    struct rpc_call_params params = {
        .path = "/grpc.health.v1.Health/Watch",
        .response = &grpc__health__v1__health_check_response__descriptor,
        .handlers = {.on_message = watch_message, .on_end = watch_end},
        .user = w,
    };
    struct rpc_call *call = NULL;
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    request.service = (char *)(uintptr_t)name;
    ck_assert_int_eq(rpc_call_start(client, &params, &call), TD_OK);
    ck_assert_int_eq(rpc_call_send(call, &request.base), TD_OK);
    rpc_call_close_send(call);
    return call;
}

/* Calls of a method that anybody may call: above a rate those from one address wait. */
START_TEST(test_rpc_health_checks_from_an_address_are_paced)
{
    char listen[64];
    ck_assert(echo_own_address(listen, sizeof(listen)));
    struct echo_service *there = echo_open(&(struct echo_config){.listen = listen});
    struct rpc_client *here = client;
    const int n = 3 * RPC_PACED_CALLS / 2; /* the first RPC_PACED_CALLS are granted at once */
    int status = 0;
    client = echo_client(echo_address(there), 0);
    uint64_t begin_ms = echo_now_ms();
    for (int i = 0; i < n; i++)
        ck_assert_int_eq(check("", &status), RPC_OK);
    ck_assert_uint_ge(echo_now_ms() - begin_ms, 1000 * (n - RPC_PACED_CALLS) / RPC_PACED_CALLS - 1);
    rpc_client_close(client);
    client = here;
    echo_close(there);
}
END_TEST

static void count_down(struct rpc_call *call, enum rpc_code code, const char *text)
{
    (void)text;
    atomic_uint *n = rpc_call_user(call);
    atomic_fetch_add(&n[code == RPC_OK ? 0 : code == RPC_RESOURCE_EXHAUSTED ? 1 : 2], 1);
}

static void start_check(struct rpc_client *c, atomic_uint *n_ended, struct rpc_call **out)
{
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    const struct rpc_call_params params = {.path = "/grpc.health.v1.Health/Check",
                                           .response = &grpc__health__v1__health_check_response__descriptor,
                                           .handlers = {.on_end = count_down},
                                           .user = n_ended};
    ck_assert_int_eq(rpc_call_start(c, &params, out), TD_OK);
    rpc_call_send(*out, &request.base);
    rpc_call_close_send(*out);
}

/* A client that gives up what the server let wait is no flood. */
START_TEST(test_rpc_calls_that_are_given_up_while_they_are_held_count_little)
{
    char listen[64];
    enum { N = 400 };
    static atomic_uint n_ended[3];
    struct rpc_call *calls[RPC_PACED_CALLS + N] = {0};
    ck_assert(echo_own_address(listen, sizeof(listen)));
    struct echo_service *there = echo_open(&(struct echo_config){.listen = listen});
    struct rpc_client *c = echo_client(echo_address(there), 0);
    for (int i = 0; i < RPC_PACED_CALLS + N; i++) /* the last ones are held */
        start_check(c, n_ended, &calls[i]);
    while (n_ended[0] < RPC_PACED_CALLS)
        sched_yield();
    for (int i = 0; i < RPC_PACED_CALLS + N; i++) {
        rpc_call_cancel(calls[i]);
        rpc_call_unref(calls[i]);
    }
    rpc_client_close(c);
    printf("# %u answered, %u given up\n", n_ended[0], n_ended[2]);
    usleep(300000); /* the server hears of it */
    c = echo_client(echo_address(there), 0);
    int status = 0;
    struct rpc_client *here = client;
    client = c;
    ck_assert_int_eq(check("", &status), RPC_OK); /* its address need not wait */
    client = here;
    rpc_client_close(c);
    echo_close(there);
}
END_TEST

/* Calls that would wait for too long are refused, and held ones are let go of when the server closes. */
START_TEST(test_rpc_server_closes_with_calls_that_are_held)
{
    char listen[64];
    ck_assert(echo_own_address(listen, sizeof(listen)));
    uint32_t n = 0;
    struct echo_service *there = echo_open(&(struct echo_config){.listen = listen});
    struct rpc_client *c = echo_client(echo_address(there), 0);
    static atomic_uint n_ended[3];
    for (; !n_ended[1] && n < 20 * RPC_PACED_CALLS; n++) {
        struct rpc_call *call = NULL;
        start_check(c, n_ended, &call);
        rpc_call_unref(call);
    }
    echo_close(there);
    rpc_client_close(c);
    printf("# %u answered, %u refused, %u ended with the server\n", n_ended[0], n_ended[1], n_ended[2]);
    ck_assert_uint_eq(n_ended[0] + n_ended[1] + n_ended[2], n);
    ck_assert_uint_ge(n_ended[1], 1);
    ck_assert_uint_ge(n_ended[2], 1);
}
END_TEST

START_TEST(test_rpc_health_watch_tells_each_change)
{
    static const char *const NAMES[] = {"", "tandem.test.Echo", "nothing"};
    struct watch w[3];
    struct rpc_call *calls[3];
    for (int i = 0; i < 3; i++) {
        w[i] = (struct watch){.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
        calls[i] = watch_start(&w[i], NAMES[i]);
        watch_wait(&w[i], 1);
    }
    rpc_server_set_serving(echo_server(service), true);
    rpc_server_set_serving(echo_server(service), true); /* no change, no message */
    rpc_server_set_serving(echo_server(service), false);
    for (int i = 0; i < 2; i++) {
        watch_wait(&w[i], 3);
        ck_assert_int_eq(w[i].seen[0], NOT_SERVING);
        ck_assert_int_eq(w[i].seen[1], SERVING);
        ck_assert_int_eq(w[i].seen[2], NOT_SERVING);
    }
    ck_assert_int_eq(w[2].seen[0], SERVICE_UNKNOWN);
    rpc_call_cancel(calls[0]); /* this call ends by cancelling, the others with the server */
    echo_close(service);
    service = NULL;
    rpc_client_close(client);
    client = NULL;
    for (int i = 0; i < 3; i++) {
        ck_assert(w[i].ended);
        rpc_call_unref(calls[i]);
    }
}
END_TEST

/* ------------------------------------------------------------------ reflection */

typedef Grpc__Reflection__V1alpha__ServerReflectionRequest reflection_request;
typedef Grpc__Reflection__V1alpha__ServerReflectionResponse reflection_response;

static reflection_response *ask(reflection_request *request)
{
    ProtobufCMessage *response = NULL;
    ck_assert_int_eq(rpc_unary(client, REFLECTION_PATH, &request->base,
                               &grpc__reflection__v1alpha__server_reflection_response__descriptor, AT_MOST_MS,
                               &response, NULL),
                     RPC_OK);
    return (reflection_response *)response;
}

START_TEST(test_rpc_reflection_lists_services)
{
    reflection_request request = GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_REQUEST__INIT;
    request.message_request_case = GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_LIST_SERVICES;
    request.list_services = (char *)(uintptr_t) "*";
    reflection_response *response = ask(&request);
    ck_assert_int_eq(response->message_response_case,
                     GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_LIST_SERVICES_RESPONSE);
    ck_assert_str_eq(response->original_request->list_services, "*");
    static const char *const NAMES[] = {"tandem.test.Echo", "grpc.health.v1.Health",
                                        "grpc.reflection.v1alpha.ServerReflection",
                                        "grpc.reflection.v1.ServerReflection"};
    ck_assert_uint_eq(response->list_services_response->n_service, 4);
    for (int i = 0; i < 4; i++)
        ck_assert_str_eq(response->list_services_response->service[i]->name, NAMES[i]);
    protobuf_c_message_free_unpacked(&response->base, NULL);
}
END_TEST

static size_t files_for_symbol(const char *symbol)
{
    reflection_request request = GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_REQUEST__INIT;
    request.message_request_case =
        GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_SYMBOL;
    request.file_containing_symbol = (char *)(uintptr_t)symbol;
    reflection_response *response = ask(&request);
    size_t n = 0;
    if (response->message_response_case ==
        GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_FILE_DESCRIPTOR_RESPONSE)
        n = response->file_descriptor_response->n_file_descriptor_proto;
    else
        ck_assert_int_eq(response->error_response->error_code, RPC_NOT_FOUND);
    protobuf_c_message_free_unpacked(&response->base, NULL);
    return n;
}

START_TEST(test_rpc_reflection_finds_files_by_symbol)
{
    ck_assert_uint_eq(files_for_symbol("tandem.test.Echo"), 1);
    ck_assert_uint_eq(files_for_symbol("tandem.test.Echo.Count"), 1);
    ck_assert_uint_eq(files_for_symbol("tandem.test.CountRequest"), 1);
    ck_assert_uint_eq(files_for_symbol("grpc.health.v1.HealthCheckResponse.ServingStatus"), 1);
    ck_assert_uint_eq(files_for_symbol("grpc.reflection.v1alpha.ServerReflection"), 1);
    ck_assert_uint_eq(files_for_symbol("grpc.reflection.v1.ServerReflection"), 1);
    ck_assert_uint_eq(files_for_symbol("tandem.test"), 0);
    ck_assert_uint_eq(files_for_symbol("tandem.test.Ech"), 0);
    ck_assert_uint_eq(files_for_symbol("tandem.test.Echo.Nothing"), 0);
    ck_assert_uint_eq(files_for_symbol(""), 0);
}
END_TEST

START_TEST(test_rpc_reflection_finds_a_file_by_name)
{
    reflection_request request = GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_REQUEST__INIT;
    request.message_request_case =
        GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_BY_FILENAME;
    request.file_by_filename = (char *)(uintptr_t) "echo.proto";
    reflection_response *response = ask(&request);
    ck_assert_uint_eq(response->file_descriptor_response->n_file_descriptor_proto, 1);
    ProtobufCBinaryData file = response->file_descriptor_response->file_descriptor_proto[0];
    ck_assert_uint_gt(file.len, 12);
    ck_assert_mem_eq(file.data,
                     "\x0a\x0a"
                     "echo.proto",
                     12); /* FileDescriptorProto.name comes first */
    protobuf_c_message_free_unpacked(&response->base, NULL);
}
END_TEST

START_TEST(test_rpc_reflection_refuses_what_it_does_not_know)
{
    reflection_request request = GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_REQUEST__INIT;
    reflection_response *response = ask(&request);
    ck_assert_int_eq(response->error_response->error_code, RPC_UNIMPLEMENTED);
    protobuf_c_message_free_unpacked(&response->base, NULL);
}
END_TEST

START_TEST(test_rpc_server_refuses_descriptors_that_are_none)
{
    static const uint8_t GARBAGE[] = {0x0a, 0x7f, 1, 2, 3};
    struct rpc_server_config config = {
        .listen = "127.0.0.1:0", .descriptors = GARBAGE, .descriptors_len_bytes = sizeof(GARBAGE)};
    struct rpc_server *s = NULL;
    struct td_error error;
    ck_assert_int_eq(rpc_server_open(&config, &s, &error), TD_ERR_INVALID);
    ck_assert_ptr_null(s);
    config.descriptors = NULL;
    config.descriptors_len_bytes = 0;
    ck_assert_int_eq(rpc_server_open(&config, &s, &error), TD_OK);
    rpc_server_close(s);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("rpc_services");
    TCase *tc = tcase_create("services");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, test_rpc_health_check_tells_the_state);
    tcase_add_test(tc, test_rpc_health_watch_tells_each_change);
    tcase_add_test(tc, test_rpc_reflection_lists_services);
    tcase_add_test(tc, test_rpc_reflection_finds_files_by_symbol);
    tcase_add_test(tc, test_rpc_reflection_finds_a_file_by_name);
    tcase_add_test(tc, test_rpc_reflection_refuses_what_it_does_not_know);
    tcase_add_test(tc, test_rpc_server_refuses_descriptors_that_are_none);
    static const char WHY[] = "this host has no address but loopback";
    char address[64];
    if (echo_own_address(address, sizeof(address))) {
        tcase_add_test(tc, test_rpc_health_checks_from_an_address_are_paced);
        tcase_add_test(tc, test_rpc_calls_that_are_given_up_while_they_are_held_count_little);
        tcase_add_test(tc, test_rpc_server_closes_with_calls_that_are_held);
    } else {
        tap_skip("test_rpc_health_checks_from_an_address_are_paced", WHY);
        tap_skip("test_rpc_calls_that_are_given_up_while_they_are_held_count_little", WHY);
        tap_skip("test_rpc_server_closes_with_calls_that_are_held", WHY);
    }
    suite_add_tcase(suite, tc);
    return tap_main(suite);
}
