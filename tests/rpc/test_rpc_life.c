/* Servers and clients that come and go while calls run. */
#include <arpa/inet.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/thread.h"
#include "echo.h"
#include "tests/tap.h"

#define AT_MOST_MS 30000
#define N_STREAMS  50

static enum rpc_code ping(struct rpc_client *c, int64_t timeout_ms)
{
    Tandem__Test__EchoRequest request = TANDEM__TEST__ECHO_REQUEST__INIT;
    ProtobufCMessage *response = NULL;
    enum rpc_code code =
        rpc_unary(c, ECHO_PATH, &request.base, &tandem__test__echo_response__descriptor, timeout_ms, &response, NULL);
    if (response)
        protobuf_c_message_free_unpacked(response, NULL);
    return code;
}

static void streams_start(struct record **r, struct rpc_client *c)
{
    for (int i = 0; i < N_STREAMS; i++) {
        r[i] = record_open();
        record_count(r[i], c, 0, 256);
    }
    for (int i = 0; i < N_STREAMS; i++)
        ck_assert(record_wait_messages(r[i], 1, AT_MOST_MS));
}

static void streams_check_and_close(struct record **r, enum rpc_code code)
{
    for (int i = 0; i < N_STREAMS; i++) {
        ck_assert(record_wait_end(r[i], AT_MOST_MS));
        ck_assert_int_eq(record_view(r[i]).code, code);
        ck_assert_uint_eq(record_view(r[i]).n_ends, 1);
        ck_assert(record_view(r[i]).in_order);
        record_close(r[i]);
    }
}

START_TEST(test_rpc_server_close_ends_50_running_streams)
{
    struct echo_service *e = echo_open(&(struct echo_config){0});
    struct rpc_client *c = echo_client(echo_address(e), 0);
    struct record *r[N_STREAMS];
    streams_start(r, c);
    uint64_t start_ms = echo_now_ms();
    echo_close(e); /* its feeding threads go on sending meanwhile */
    ck_assert_uint_le(echo_now_ms() - start_ms, 3000 * SLOWER);
    streams_check_and_close(r, RPC_UNAVAILABLE);
    rpc_client_close(c);
}
END_TEST

START_TEST(test_rpc_client_close_ends_50_running_streams)
{
    struct echo_service *e = echo_open(&(struct echo_config){0});
    struct rpc_client *c = echo_client(echo_address(e), 0);
    struct record *r[N_STREAMS];
    streams_start(r, c);
    uint64_t start_ms = echo_now_ms();
    rpc_client_close(c);
    ck_assert_uint_le(echo_now_ms() - start_ms, 3000 * SLOWER);
    for (int i = 0; i < N_STREAMS; i++)
        ck_assert_uint_eq(record_view(r[i]).n_ends, 1); /* it has ended already, without waiting */
    streams_check_and_close(r, RPC_CANCELLED);
    ck_assert(echo_wait_ended(e, N_STREAMS, AT_MOST_MS));
    ck_assert_uint_eq(echo_stats(e).n_double_ends, 0);
    ck_assert_uint_eq(echo_stats(e).n_overlaps, 0);
    echo_close(e);
}
END_TEST

START_TEST(test_rpc_closing_what_was_never_used_is_quick)
{
    struct echo_service *e = echo_open(&(struct echo_config){0});
    struct rpc_client *c = echo_client(echo_address(e), 0);
    rpc_client_close(c);
    rpc_client_close(NULL);
    echo_close(e);
    rpc_server_close(NULL);
}
END_TEST

START_TEST(test_rpc_server_close_waits_for_a_call_nobody_answers)
{
    struct echo_service *e = echo_open(&(struct echo_config){0});
    struct rpc_client *c = echo_client(echo_address(e), 0);
    struct record *r = record_open();
    Tandem__Test__EchoRequest request = TANDEM__TEST__ECHO_REQUEST__INIT;
    request.hang = true;
    ck_assert_int_eq(record_start(r, c, ECHO_PATH, 0), TD_OK);
    ck_assert_int_eq(rpc_call_send(record_call(r), &request.base), TD_OK);
    ck_assert(echo_wait_opened(e, 1, AT_MOST_MS));
    echo_close(e);
    ck_assert(record_wait_end(r, AT_MOST_MS));
    ck_assert_int_eq(record_view(r).code, RPC_UNAVAILABLE);
    record_close(r);
    rpc_client_close(c);
}
END_TEST

/* ------------------------------------------------------------------ sends that race with the end */

struct racer {
    struct rpc_call *call;
    _Atomic bool stop;
    uint64_t n_sent;
};

static void *racer_run(void *arg)
{
    struct racer *racer = arg;
    Tandem__Test__EchoRequest request = TANDEM__TEST__ECHO_REQUEST__INIT;
    while (!atomic_load(&racer->stop)) {
        racer->n_sent += rpc_call_send(racer->call, &request.base) == TD_OK;
        rpc_call_queued_bytes(racer->call);
        rpc_call_remaining_ms(racer->call);
    }
    rpc_call_unref(racer->call);
    return NULL;
}

START_TEST(test_rpc_sends_from_two_threads_race_with_cancel)
{
    struct echo_service *e = echo_open(&(struct echo_config){0});
    struct rpc_client *c = echo_client(echo_address(e), 0);
    for (uint32_t i = 1; i <= 20; i++) {
        struct record *r = record_open();
        ck_assert_int_eq(record_start(r, c, CHAT_PATH, 0), TD_OK);
        struct racer racers[2];
        pthread_t threads[2];
        for (int k = 0; k < 2; k++) {
            racers[k] = (struct racer){.call = rpc_call_ref(record_call(r))};
            threads[k] = thread_start("racer", racer_run, &racers[k]);
        }
        ck_assert(record_wait_messages(r, 10, AT_MOST_MS));
        if (i % 2)
            rpc_call_cancel(record_call(r));
        else
            rpc_call_close_send(record_call(r));
        ck_assert(record_wait_end(r, AT_MOST_MS));
        for (int k = 0; k < 2; k++) {
            atomic_store(&racers[k].stop, true);
            pthread_join(threads[k], NULL);
        }
        ck_assert_int_eq(record_view(r).code, i % 2 ? RPC_CANCELLED : RPC_OK);
        if (i % 2 == 0)
            ck_assert_uint_eq(record_view(r).n_messages, racers[0].n_sent + racers[1].n_sent);
        ck_assert(echo_wait_ended(e, i, AT_MOST_MS));
        record_close(r);
    }
    ck_assert_uint_eq(echo_stats(e).n_double_ends, 0);
    ck_assert_uint_eq(echo_stats(e).n_overlaps, 0);
    rpc_client_close(c);
    echo_close(e);
}
END_TEST

static struct rpc_call *other_call;

static void meddle(struct rpc_call *call, const ProtobufCMessage *message)
{
    (void)message;
    Tandem__Test__EchoRequest request = TANDEM__TEST__ECHO_REQUEST__INIT;
    rpc_call_send(other_call, &request.base);
    rpc_call_cancel(other_call);
    rpc_call_cancel(call);
    rpc_call_cancel(call);
    rpc_call_send(call, &request.base);
    rpc_call_close_send(call);
    rpc_call_queued_bytes(call);
}

static _Atomic uint32_t n_meddled;

static void meddle_end(struct rpc_call *call, enum rpc_code code, const char *text)
{
    (void)code;
    (void)text;
    meddle(call, NULL);
    atomic_fetch_add(&n_meddled, 1);
}

START_TEST(test_rpc_callbacks_may_use_this_call_and_others)
{
    struct echo_service *e = echo_open(&(struct echo_config){0});
    struct rpc_client *c = echo_client(echo_address(e), 0);
    struct rpc_call_params params = {
        .path = CHAT_PATH,
        .response = &tandem__test__echo_response__descriptor,
        .handlers = {.on_message = meddle, .on_end = meddle_end},
    };
    struct rpc_call *call = NULL;
    ck_assert_int_eq(rpc_call_start(c, &params, &other_call), TD_OK);
    ck_assert_int_eq(rpc_call_start(c, &params, &call), TD_OK);
    Tandem__Test__EchoRequest request = TANDEM__TEST__ECHO_REQUEST__INIT;
    ck_assert_int_eq(rpc_call_send(call, &request.base), TD_OK);
    ck_assert(echo_wait_ended(e, 1, AT_MOST_MS));
    rpc_client_close(c);
    ck_assert_uint_eq(atomic_load(&n_meddled), 2);
    rpc_call_unref(call);
    rpc_call_unref(other_call);
    echo_close(e);
}
END_TEST

/* ------------------------------------------------------------------ peers that are not there */

START_TEST(test_rpc_absent_server_is_unavailable_at_once)
{
    struct echo_service *e = echo_open(&(struct echo_config){0});
    char address[128];
    snprintf(address, sizeof(address), "%s", echo_address(e));
    echo_close(e); /* a port that was free a moment ago */
    struct rpc_client *c = echo_client(address, 0);
    uint64_t start_ms = echo_now_ms();
    ck_assert_int_eq(ping(c, AT_MOST_MS), RPC_UNAVAILABLE);
    ck_assert_uint_le(echo_now_ms() - start_ms, 1000 * SLOWER);
    rpc_client_close(c);
}
END_TEST

START_TEST(test_rpc_client_finds_a_restarted_server)
{
    struct echo_service *e = echo_open(&(struct echo_config){0});
    char address[128];
    snprintf(address, sizeof(address), "%s", echo_address(e));
    struct rpc_client *c = echo_client(address, 0);
    ck_assert_int_eq(ping(c, AT_MOST_MS), RPC_OK);
    echo_close(e);
    uint64_t until_ms = echo_now_ms() + 1500;
    while (echo_now_ms() < until_ms) /* calls while the server is down must not lengthen the back-off */
        ck_assert_int_ne(ping(c, 100), RPC_OK);
    e = echo_open(&(struct echo_config){.listen = address});
    ck_assert_ptr_nonnull(e);
    uint64_t start_ms = echo_now_ms();
    while (ping(c, 1000) != RPC_OK)
        ck_assert_uint_le(echo_now_ms() - start_ms, 1500 * SLOWER);
    ck_assert_uint_le(echo_now_ms() - start_ms, 1500 * SLOWER);
    rpc_client_close(c);
    echo_close(e);
}
END_TEST

START_TEST(test_rpc_second_server_on_one_port_is_refused)
{
    struct echo_service *e = echo_open(&(struct echo_config){0});
    ck_assert_ptr_null(echo_open(&(struct echo_config){.listen = echo_address(e)}));
    ck_assert_ptr_null(echo_open(&(struct echo_config){.listen = "nonsense"}));
    echo_close(e);
}
END_TEST

START_TEST(test_rpc_every_address_may_be_written_without_a_host)
{
    static const char *const ANY[] = {":0", "*:0", "[::]:0", "0.0.0.0:0"};
    char address[64];
    struct echo_service *e = echo_open(&(struct echo_config){.listen = ANY[_i]});
    ck_assert_msg(e, "%s", ANY[_i]);
    snprintf(address, sizeof(address), "127.0.0.1%s", strrchr(echo_address(e), ':'));
    struct rpc_client *c = echo_client(address, 0);
    ck_assert_int_eq(ping(c, AT_MOST_MS), RPC_OK);
    rpc_client_close(c);
    echo_close(e);
}
END_TEST

static char seen_by_server[RPC_PEER_BYTES], seen_by_client[RPC_PEER_BYTES];
static sem_t has_ended;

static void open_nothing(struct rpc_call *call, void *user)
{
    (void)call, (void)user;
}

static void tell_local(struct rpc_call *call, const ProtobufCMessage *message)
{
    Tandem__Test__EchoResponse answer = TANDEM__TEST__ECHO_RESPONSE__INIT;
    (void)message;
    rpc_call_local(call, seen_by_server);
    rpc_call_send(call, &answer.base);
    rpc_call_finish(call, RPC_OK, "", 0);
}

static void take_peer(struct rpc_call *call, const ProtobufCMessage *message)
{
    (void)message;
    rpc_call_peer(call, seen_by_client);
}

static void tell_end(struct rpc_call *call, enum rpc_code code, const char *text)
{
    (void)call, (void)code, (void)text;
    sem_post(&has_ended);
}

/* A client that is at the address which a server says to be its own talks to that server. */
START_TEST(test_rpc_both_ends_name_the_same_address)
{
    static const struct {
        const char *listen, *dialled, *seen;
    } CASES[] = {{"127.0.0.1:0", "127.0.0.1", "127.0.0.1"},
                 {"127.0.0.1:0", "localhost", "127.0.0.1"},
                 {"[::]:0", "127.0.0.2", "127.0.0.2"}, /* not as ::ffff:127.0.0.2 */
                 {"[::1]:0", "[::1]", "[::1]"}};
    const struct rpc_method method = {.path = ECHO_PATH,
                                      .request = &tandem__test__echo_request__descriptor,
                                      .handlers = {.on_message = tell_local},
                                      .on_open = open_nothing,
                                      .one_request = true};
    static const struct log QUIET = {.who = "test", .level = LOG_ERROR, .fd = 2};
    const struct rpc_server_config config = {
        .listen = CASES[_i].listen, .methods = &method, .n_methods = 1, .log = &QUIET};
    struct rpc_server *server = NULL;
    struct td_error e;
    char address[80], seen[RPC_PEER_BYTES];
    ck_assert_msg(!rpc_server_open(&config, &server, &e), "%s", e.text);
    const char *port = strrchr(rpc_server_address(server), ':');
    snprintf(address, sizeof(address), "%s%s", CASES[_i].dialled, port);
    snprintf(seen, sizeof(seen), "%s%s", CASES[_i].seen, port);
    struct rpc_client *c = echo_client(address, 0);
    const struct rpc_call_params params = {.path = ECHO_PATH,
                                           .response = &tandem__test__echo_response__descriptor,
                                           .handlers = {.on_message = take_peer, .on_end = tell_end}};
    Tandem__Test__EchoRequest request = TANDEM__TEST__ECHO_REQUEST__INIT;
    struct rpc_call *call = NULL;
    sem_init(&has_ended, 0, 0);
    ck_assert_int_eq(rpc_call_start(c, &params, &call), TD_OK);
    rpc_call_send(call, &request.base);
    rpc_call_close_send(call);
    sem_wait(&has_ended);
    ck_assert_str_eq(seen_by_server, seen);
    ck_assert_str_eq(seen_by_client, seen);
    rpc_call_peer(call, seen);
    ck_assert_str_eq(seen, "?"); /* it is over */
    rpc_call_unref(call);
    rpc_client_close(c);
    rpc_server_close(server);
}
END_TEST

/* A server takes RPC_CONNECTION_CALLS from another host on one connection; a client has more than one. */
START_TEST(test_rpc_client_has_as_many_connections_as_its_calls_need)
{
    char listen[64];
    enum { N = RPC_CONNECTION_CALLS + 50 };
    struct record *r[N];
    ck_assert(echo_own_address(listen, sizeof(listen)));
    struct echo_service *e = echo_open(&(struct echo_config){.listen = listen});
    struct rpc_client *c = echo_client(echo_address(e), 0);
    for (int i = 0; i < N; i++) {
        r[i] = record_open();
        ck_assert_int_eq(record_start(r[i], c, ECHO_PATH, 0), TD_OK); /* stays open */
    }
    ck_assert(echo_wait_opened(e, N, AT_MOST_MS));
    ck_assert_uint_ge(rpc_server_stats(echo_server(e)).connections, 2);
    for (int i = 0; i < N; i++) { /* those that have ended make room */
        rpc_call_cancel(record_call(r[i]));
        ck_assert(record_wait_end(r[i], AT_MOST_MS));
    }
    uint32_t before = rpc_server_stats(echo_server(e)).connections;
    for (int i = 0; i < 50; i++)
        ck_assert_int_eq(ping(c, AT_MOST_MS), RPC_OK);
    ck_assert_uint_eq(rpc_server_stats(echo_server(e)).connections, before);
    for (int i = 0; i < N; i++)
        record_close(r[i]);
    rpc_client_close(c);
    echo_close(e);
}
END_TEST

START_TEST(test_rpc_unix_socket_works)
{
    char listen[64];
    snprintf(listen, sizeof(listen), "unix:/tmp/tandem-rpc-%d.sock", (int)getpid());
    struct echo_service *e = echo_open(&(struct echo_config){.listen = listen});
    ck_assert_ptr_nonnull(e);
    ck_assert_str_eq(echo_address(e), listen);
    struct rpc_client *c = echo_client(listen, 0);
    ck_assert_int_eq(ping(c, AT_MOST_MS), RPC_OK);
    rpc_client_close(c);
    echo_close(e);
    unlink(listen + 5);
}
END_TEST

START_TEST(test_rpc_killed_client_ends_its_calls)
{
    struct echo_service *e = echo_open(&(struct echo_config){0});
    struct child child = child_start("count", echo_address(e));
    char line[64];
    ck_assert(child_read_line(&child, line, sizeof(line)));
    ck_assert_str_eq(line, "streaming");
    uint64_t start_ms = echo_now_ms();
    child_end(&child);
    ck_assert(echo_wait_ended(e, 1, AT_MOST_MS));
    ck_assert_uint_le(echo_stats(e).last_end_ms - start_ms, 1000 * SLOWER);
    ck_assert_int_eq(echo_stats(e).last_code, RPC_CANCELLED);
    echo_close(e);
}
END_TEST

START_TEST(test_rpc_frozen_client_is_noticed)
{
    struct echo_service *e = echo_open(&(struct echo_config){0});
    struct child child = child_start("count", echo_address(e));
    char line[64];
    ck_assert(child_read_line(&child, line, sizeof(line)));
    kill(child.pid, SIGSTOP);
    uint64_t start_ms = echo_now_ms();
    ck_assert(echo_wait_ended(e, 1, AT_MOST_MS));
    ck_assert_uint_le(echo_stats(e).last_end_ms - start_ms, 4000 * SLOWER);
    child_end(&child);
    echo_close(e);
}
END_TEST

START_TEST(test_rpc_frozen_server_is_noticed)
{
    struct child child = child_start("server", "127.0.0.1:0");
    char address[64];
    ck_assert(child_read_line(&child, address, sizeof(address)));
    struct rpc_client *c = echo_client(address, 0);
    struct record *r = record_open();
    record_count(r, c, 0, 64);
    ck_assert(record_wait_messages(r, 10, AT_MOST_MS));
    kill(child.pid, SIGSTOP);
    uint64_t start_ms = echo_now_ms();
    ck_assert(record_wait_end(r, AT_MOST_MS));
    ck_assert_int_eq(record_view(r).code, RPC_UNAVAILABLE);
    ck_assert_uint_le(record_view(r).end_ms - start_ms, 4000 * SLOWER);
    ck_assert_msg(rpc_text_is_silence(record_view(r).text), "%s", record_view(r).text);
    child_end(&child);
    record_close(r);
    rpc_client_close(c);
}
END_TEST

/* How a call ends that finds nobody, and one that nobody answers. */
START_TEST(test_rpc_silence_is_told_from_absence)
{
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(any);
    char address[64];
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert(!bind(fd, (struct sockaddr *)&any, len) && !getsockname(fd, (struct sockaddr *)&any, &len));
    snprintf(address, sizeof(address), "127.0.0.1:%d", ntohs(any.sin_port));
    for (int listens = 0; listens < 2; listens++) {
        ck_assert(!listens || !listen(fd, 8));
        struct rpc_client *c = echo_client(address, 0);
        struct record *r = record_open();
        record_count(r, c, 0, 64);
        ck_assert(record_wait_end(r, AT_MOST_MS));
        ck_assert_int_eq(record_view(r).code, RPC_UNAVAILABLE);
        ck_assert_msg(rpc_text_is_silence(record_view(r).text) == listens, "%s", record_view(r).text);
        record_close(r);
        rpc_client_close(c);
    }
    close(fd);
}
END_TEST

/* A unix socket is the hard case: the kernel never gives up on a peer that is alive and does not read. */
static void close_server_with_frozen_client(const char *listen)
{
    struct echo_service *e = echo_open(&(struct echo_config){.listen = listen});
    ck_assert_ptr_nonnull(e);
    struct child child = child_start("count", echo_address(e));
    char line[64];
    ck_assert(child_read_line(&child, line, sizeof(line)));
    uint32_t n_full = echo_stats(e).n_full;
    kill(child.pid, SIGSTOP);
    uint64_t start_ms = echo_now_ms();
    /* Until both queues are full. */
    while (echo_stats(e).n_full < n_full + 10 && echo_now_ms() < start_ms + AT_MOST_MS)
        echo_wait_ended(e, 1, 10);
    start_ms = echo_now_ms();
    echo_close(e);
    ck_assert_uint_le(echo_now_ms() - start_ms, 6000 * SLOWER);
    child_end(&child);
}

START_TEST(test_rpc_server_close_does_not_wait_for_a_frozen_client)
{
    close_server_with_frozen_client("127.0.0.1:0");
}
END_TEST

START_TEST(test_rpc_server_close_does_not_wait_for_a_frozen_client_on_a_unix_socket)
{
    char listen[64];
    snprintf(listen, sizeof(listen), "unix:/tmp/tandem-rpc-%d.sock", (int)getpid());
    close_server_with_frozen_client(listen);
    unlink(listen + 5);
}
END_TEST

START_TEST(test_rpc_cancel_ends_a_call_whose_send_is_stuck)
{
    char listen[64];
    snprintf(listen, sizeof(listen), "unix:/tmp/tandem-rpc-%d.sock", (int)getpid());
    struct child child = child_start("server", listen);
    char address[64];
    ck_assert(child_read_line(&child, address, sizeof(address)));
    struct rpc_client *c = echo_client(address, 0);
    struct record *r = record_open();
    ck_assert_int_eq(record_start(r, c, CHAT_PATH, 0), TD_OK);
    uint8_t bytes[65536] = {0};
    Tandem__Test__EchoRequest request = TANDEM__TEST__ECHO_REQUEST__INIT;
    request.text = (ProtobufCBinaryData){sizeof(bytes), bytes};
    ck_assert_int_eq(rpc_call_send(record_call(r), &request.base), TD_OK);
    ck_assert(record_wait_messages(r, 1, AT_MOST_MS));
    kill(child.pid, SIGSTOP);
    while (rpc_call_send(record_call(r), &request.base) == TD_OK)
        ;
    uint64_t start_ms = echo_now_ms();
    rpc_call_cancel(record_call(r));
    ck_assert(record_wait_end(r, AT_MOST_MS));
    ck_assert_uint_le(record_view(r).end_ms - start_ms, 200 * SLOWER);
    ck_assert_int_eq(record_view(r).code, RPC_CANCELLED);
    child_end(&child);
    rpc_client_close(c);
    record_close(r);
    unlink(listen + 5);
}
END_TEST

/* Both sides ping every second. With gRPC's defaults the third ping would end the connection. */
START_TEST(test_rpc_silent_stream_stays_open)
{
    struct echo_service *e = echo_open(&(struct echo_config){0});
    struct rpc_client *c = echo_client(echo_address(e), 0);
    struct record *r = record_open();
    Tandem__Test__CountRequest request = TANDEM__TEST__COUNT_REQUEST__INIT;
    request.silent = true;
    ck_assert_int_eq(record_start(r, c, COUNT_PATH, 0), TD_OK);
    ck_assert_int_eq(rpc_call_send(record_call(r), &request.base), TD_OK);
    ck_assert(!record_wait_end(r, 6500));
    ck_assert_uint_eq(echo_stats(e).n_ended, 0);
    ck_assert_int_eq(ping(c, AT_MOST_MS), RPC_OK);
    rpc_client_close(c);
    ck_assert_uint_eq(record_view(r).n_ends, 1);
    record_close(r);
    echo_close(e);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("rpc_life");
    TCase *tc = tcase_create("life");
    tcase_set_timeout(tc, 100);
    tcase_add_test(tc, test_rpc_server_close_ends_50_running_streams);
    tcase_add_test(tc, test_rpc_client_close_ends_50_running_streams);
    tcase_add_test(tc, test_rpc_closing_what_was_never_used_is_quick);
    tcase_add_test(tc, test_rpc_server_close_waits_for_a_call_nobody_answers);
    tcase_add_test(tc, test_rpc_sends_from_two_threads_race_with_cancel);
    tcase_add_test(tc, test_rpc_callbacks_may_use_this_call_and_others);
    tcase_add_test(tc, test_rpc_absent_server_is_unavailable_at_once);
    tcase_add_test(tc, test_rpc_client_finds_a_restarted_server);
    tcase_add_test(tc, test_rpc_second_server_on_one_port_is_refused);
    tcase_add_loop_test(tc, test_rpc_every_address_may_be_written_without_a_host, 0, 4);
    tcase_add_loop_test(tc, test_rpc_both_ends_name_the_same_address, 0, 4);
    tcase_add_test(tc, test_rpc_unix_socket_works);
    tcase_add_test(tc, test_rpc_killed_client_ends_its_calls);
    tcase_add_test(tc, test_rpc_frozen_client_is_noticed);
    tcase_add_test(tc, test_rpc_frozen_server_is_noticed);
    tcase_add_test(tc, test_rpc_silence_is_told_from_absence);
    tcase_add_test(tc, test_rpc_server_close_does_not_wait_for_a_frozen_client);
    tcase_add_test(tc, test_rpc_server_close_does_not_wait_for_a_frozen_client_on_a_unix_socket);
    tcase_add_test(tc, test_rpc_cancel_ends_a_call_whose_send_is_stuck);
    tcase_add_test(tc, test_rpc_silent_stream_stays_open);
    static const char WHY[] = "this host has no address but loopback";
    char address[64];
    if (echo_own_address(address, sizeof(address))) {
        tcase_add_test(tc, test_rpc_client_has_as_many_connections_as_its_calls_need);
    } else {
        tap_skip("test_rpc_client_has_as_many_connections_as_its_calls_need", WHY);
    }
    suite_add_tcase(suite, tc);
    return tap_main(suite);
}
