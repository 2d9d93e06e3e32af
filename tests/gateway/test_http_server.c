/* The HTTP server: what it reads, what it refuses, and what becomes of clients that leave or don't read. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <time.h>

#include "base/clock.h"
#include "base/thread.h"
#include "gateway/http_server.h"
#include "tests/tap.h"

enum {
    HEAD = 4096,
    BODY = 100000,
    REQUEST_MS = 1500,
    IDLE_MS = 1500,
    STALL_MS = 1500,
    FILLER_MS = 500,
    WAIT_MS = 20000
};

static struct http_server *server;
static uint64_t max_read_bytes = 1 << 20;
static atomic_int n_gone, n_drained;
static struct http_conn *held; /* of "/hold" and "/stream", which the test answers */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void hold(struct http_conn *c)
{
    pthread_mutex_lock(&lock);
    held = c;
    pthread_mutex_unlock(&lock);
}

static uint64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

#define UNTIL(condition)                                                                                               \
    do {                                                                                                               \
        uint64_t end_ms = now_ms() + WAIT_MS;                                                                          \
        while (!(condition)) {                                                                                         \
            ck_assert_msg(now_ms() < end_ms, "%s did not come", #condition);                                           \
            poll(NULL, 0, 2);                                                                                          \
        }                                                                                                              \
    } while (0)

static struct http_conn *wait_held(void)
{
    struct http_conn *c = NULL;
    uint64_t end_ms = now_ms() + WAIT_MS;
    while (!c && now_ms() < end_ms) {
        pthread_mutex_lock(&lock);
        c = held;
        held = NULL;
        pthread_mutex_unlock(&lock);
        if (!c)
            poll(NULL, 0, 2);
    }
    ck_assert_ptr_nonnull(c);
    return c;
}

/* Answers with what it got; "/hold" and "/stream" are left to the test. */
static void on_request(struct http_conn *c, void *user)
{
    struct bytes b = {0};
    (void)user;
    if (!strcmp(http_target(c), "/hold") || !strcmp(http_target(c), "/stream")) {
        hold(c);
        return;
    }
    const char *x = http_header(c, "X-Test");
    bytes_printf(&b, "%s %s x=%s body=%zu:%.20s", http_method(c), http_target(c), x ? x : "-", http_body(c)->len,
                 http_body(c)->len ? http_body(c)->data : "");
    http_answer(c, 200, "X-Mine: 1\r\n", b.data, b.len);
    bytes_free(&b);
}

static void on_gone(struct http_conn *c)
{
    (void)c;
    atomic_fetch_add(&n_gone, 1);
}

static void on_drained(struct http_conn *c)
{
    (void)c;
    atomic_fetch_add(&n_drained, 1);
}

static void describe(const char *target, int status, const char *why, struct bytes *out)
{
    bytes_printf(out, "%s|%d|%s", target, status, why);
}

static void setup(void)
{
    static const struct log LOG = {.who = "test", .level = LOG_ERROR};
    struct td_error e = {""};
    const struct http_server_config c = {.listen = "127.0.0.1:0",
                                         .n_threads = 2,
                                         .limits = {HEAD, BODY},
                                         .max_read_bytes = max_read_bytes,
                                         .request_ms = REQUEST_MS,
                                         .idle_ms = IDLE_MS,
                                         .stall_ms = STALL_MS,
                                         .filler_ms = FILLER_MS,
                                         .frozen_ms = 30000,
                                         .log = &LOG,
                                         .on_request = on_request,
                                         .on_gone = on_gone,
                                         .on_drained = on_drained,
                                         .describe = describe};
    ck_assert_msg(http_server_open(&c, &server, &e) == TD_OK, "%s", e.text);
}

static void setup_little(void)
{
    max_read_bytes = 20000;
    setup();
}

static void teardown(void)
{
    http_server_close(server);
}

static int dial(void)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    to.sin_port = htons((uint16_t)atoi(strrchr(http_server_address(server), ':') + 1));
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(connect(fd, (struct sockaddr *)&to, sizeof(to)), 0);
    return fd;
}

static void say(int fd, const char *text)
{
    ck_assert_int_eq(send(fd, text, strlen(text), MSG_NOSIGNAL), (ssize_t)strlen(text));
}

static char heard[1 << 20];

/* What comes until `want` is among it, or the connection ends (want NULL). */
static const char *hear(int fd, const char *want)
{
    size_t n = 0;
    uint64_t end_ms = now_ms() + WAIT_MS;
    *heard = 0;
    while (!want || !strstr(heard, want)) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        ck_assert_msg(now_ms() < end_ms, "only this came: %s", heard);
        if (poll(&p, 1, 100) < 1)
            continue;
        ssize_t got = recv(fd, heard + n, sizeof(heard) - 1 - n, 0);
        ck_assert_msg(got > 0 || !want, "the connection ended after: %s", heard);
        if (got <= 0)
            break;
        n += (size_t)got;
        heard[n] = 0;
    }
    return heard;
}

static int asked(const char *text)
{
    int fd = dial();
    say(fd, text);
    return fd;
}

START_TEST(test_http_a_request_is_answered_and_the_connection_stays)
{
    int fd = asked("GET /a?b=c HTTP/1.1\r\nHost: x\r\nx-test:  v \r\n\r\n");
    const char *got = hear(fd, "body=0:");
    ck_assert_ptr_nonnull(strstr(got, "HTTP/1.1 200 OK\r\n"));
    ck_assert_ptr_nonnull(strstr(got, "X-Mine: 1\r\n"));
    ck_assert_ptr_nonnull(strstr(got, "GET /a?b=c x=v body=0:"));
    ck_assert_ptr_null(strstr(got, "Connection: close"));
    say(fd, "POST /p HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello");
    ck_assert_ptr_nonnull(strstr(hear(fd, "body="), "POST /p x=- body=5:hello"));
    say(fd, "POST /p HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nTrailer: t\r\n\r\n");
    ck_assert_ptr_nonnull(strstr(hear(fd, "body="), "body=5:abcde"));
    say(fd, "GET /last HTTP/1.1\r\nConnection: close\r\n\r\n");
    ck_assert_ptr_nonnull(strstr(hear(fd, NULL), "Connection: close"));
    close(fd);
    ck_assert_uint_eq(http_server_stats(server).requests, 4);
}
END_TEST

START_TEST(test_http_requests_sent_together_are_answered_in_order)
{
    int fd = asked("GET /hold HTTP/1.1\r\n\r\nPOST /2 HTTP/1.1\r\nContent-Length: 2\r\n\r\nhiGET /3 HTTP/1.1\r\n\r\n");
    struct http_conn *c = wait_held();
    http_answer(c, 404, NULL, "first", 5);
    const char *got = hear(fd, "GET /3"), *first = strstr(got, "first"), *second = strstr(got, "body=2:hi");
    ck_assert(first && second && first < second && second < strstr(got, "GET /3"));
    close(fd);
}
END_TEST

START_TEST(test_http_a_request_may_come_in_single_bytes)
{
    static const char ALL[] = "POST /b HTTP/1.1\r\nX-Test: a b\r\nEmpty:\r\nContent-Length: 3\r\n\r\nxyz";
    int fd = dial();
    for (size_t i = 0; i + 1 < sizeof(ALL); i++)
        ck_assert_int_eq(send(fd, ALL + i, 1, 0), 1);
    ck_assert_ptr_nonnull(strstr(hear(fd, "body="), "POST /b x=a b body=3:xyz"));
    close(fd);
}
END_TEST

START_TEST(test_http_what_cannot_be_read_is_refused)
{
    static char head[HEAD + 200], body[128];
    memset(head, 'a', sizeof(head) - 1);
    memcpy(head, "GET /", 5);
    snprintf(body, sizeof(body), "POST /x HTTP/1.1\r\nContent-Length: %d\r\n\r\n", BODY + 1);
    static char many[8000];
    strcpy(many, "GET /many HTTP/1.1\r\n");
    for (int i = 0; i < HTTP_HEADERS_MOST + 1; i++)
        strcat(many, "a: b\r\n");
    strcat(many, "\r\n");
    const char *const CASES[][2] = {
        {"nonsense\r\n\r\n", "|400|not HTTP"},
        {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "400"},
        {"GET / HTTP/2.0\r\n\r\n", "505"},
        {"CONNECT a:1 HTTP/1.1\r\n\r\n", "501"},
        {"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", "400"},
        {"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "400"},
        {"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", "400"},
        {"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "400"},
        {"GET / HTTP/1.1\r\nA\x01: b\r\n\r\n", "400"},
        {head, "|431|request line and headers: over 4096 bytes"},
        {many, "/many|431|headers: more than 100"},
        {body, "/x|413|body: over 100000 bytes"},
    };
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        int fd = asked(CASES[i][0]);
        const char *got = hear(fd, NULL);
        ck_assert_msg(strstr(got, CASES[i][1]) && strstr(got, "Connection: close"), "%zu: %s", i, got);
        close(fd);
    }
    ck_assert_uint_eq(http_server_stats(server).refused, sizeof(CASES) / sizeof(CASES[0]));
    int fd = asked("GET /still HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n");
    ck_assert_ptr_nonnull(strstr(hear(fd, "body="), "GET /still"));
    close(fd);
}
END_TEST

START_TEST(test_http_a_body_in_chunks_is_bounded_too)
{
    static char chunk[8300];
    int fd = asked("POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n");
    snprintf(chunk, sizeof(chunk), "2000\r\n%08192d\r\n", 0);
    for (int i = 0; i < BODY / 8192 + 1; i++)
        say(fd, chunk);
    ck_assert_ptr_nonnull(strstr(hear(fd, NULL), "/x|413|body"));
    close(fd);
}
END_TEST

START_TEST(test_http_a_client_is_told_to_go_on)
{
    int fd = asked("POST /x HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n");
    hear(fd, "HTTP/1.1 100 Continue\r\n\r\n");
    say(fd, "ok");
    ck_assert_ptr_nonnull(strstr(hear(fd, "body="), "body=2:ok"));
    close(fd);
}
END_TEST

START_TEST(test_http_slow_and_idle_clients_are_let_go)
{
    int slow = asked("POST /x HTTP/1.1\r\nContent-Length: 5\r\n\r\nhel"), idle = asked("GET / HTTP/1.1\r\n\r\n");
    hear(idle, "body=");
    ck_assert_ptr_nonnull(strstr(hear(slow, NULL), "/x|408|"));
    ck_assert_str_eq(hear(idle, NULL), "");
    close(slow);
    close(idle);
}
END_TEST

START_TEST(test_http_an_answer_may_be_a_stream)
{
    int fd = asked("GET /stream HTTP/1.1\r\n\r\n");
    struct http_conn *c = wait_held();
    http_begin(c, 200, "Content-Type: text/event-stream\r\n", ": nothing\n\n");
    ck_assert(http_write(c, "one", 3));
    ck_assert_ptr_nonnull(strstr(hear(fd, "one\r\n"), "Transfer-Encoding: chunked\r\n"));
    hear(fd, "b\r\n: nothing\n\n\r\n");
    ck_assert(http_write(c, "", 0)); /* would end it */
    ck_assert(http_write(c, "two", 3));
    http_end(c);
    ck_assert_ptr_nonnull(strstr(hear(fd, "0\r\n\r\n"), "3\r\ntwo\r\n0\r\n\r\n"));
    say(fd, "GET /next HTTP/1.1\r\n\r\n");
    hear(fd, "GET /next");
    close(fd);
}
END_TEST

START_TEST(test_http_a_stream_without_chunks_ends_with_the_connection)
{
    int fd = asked("GET /stream HTTP/1.0\r\n\r\n");
    struct http_conn *c = wait_held();
    http_begin(c, 200, NULL, NULL);
    http_write(c, "one", 3);
    http_write(c, "two", 3);
    http_end(c);
    const char *got = hear(fd, NULL);
    ck_assert_ptr_nonnull(strstr(got, "\r\n\r\nonetwo"));
    ck_assert_ptr_null(strstr(got, "chunked"));
    close(fd);
}
END_TEST

START_TEST(test_http_a_client_that_hangs_up_is_noticed)
{
    for (int i = 0; i < 20; i++) {
        int fd = asked("GET /hold HTTP/1.1\r\n\r\n");
        struct http_conn *c = wait_held();
        uint64_t began = now_ms();
        if (i % 2)
            http_begin(c, 200, NULL, NULL);
        close(fd);
        UNTIL(atomic_load(&n_gone) == i + 1);
        ck_assert_uint_lt(now_ms() - began, 1000);
        if (i % 2) {
            http_write(c, "x", 1);
            http_end(c);
        } else {
            http_answer(c, 200, NULL, "x", 1);
        }
    }
    ck_assert_uint_eq(http_server_stats(server).gone, 20);
}
END_TEST

/* Reads the bytes that are there, or that come within 10 ms. Returns their number. */
static size_t take(int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    ssize_t n = poll(&p, 1, 10) == 1 ? recv(fd, heard, sizeof(heard), 0) : 0;
    ck_assert_int_ge(n, 0);
    return (size_t)n;
}

START_TEST(test_http_a_slow_reader_stops_its_writer)
{
    static char piece[16384];
    memset(piece, 'p', sizeof(piece));
    int fd = asked("GET /stream HTTP/1.1\r\n\r\n");
    struct http_conn *c = wait_held();
    http_begin(c, 200, NULL, NULL);
    size_t sent = 0, got = 0;
    while (http_write(c, piece, sizeof(piece)) && sent < 1 << 28)
        sent += sizeof(piece);
    ck_assert_uint_lt(sent, 1 << 26);
    ck_assert_int_eq(atomic_load(&n_drained), 0);
    sent += sizeof(piece);
    while (!atomic_load(&n_drained))
        got += take(fd);
    ck_assert(http_write(c, "end", 3));
    http_end(c);
    while (got < sent)
        got += take(fd);
    ck_assert_uint_ge(got, sent);
    ck_assert_int_eq(atomic_load(&n_gone), 0);
    close(fd);
}
END_TEST

START_TEST(test_http_a_client_that_takes_nothing_is_dropped)
{
    static char piece[16384];
    int fd = asked("GET /stream HTTP/1.1\r\n\r\n");
    struct http_conn *c = wait_held();
    http_begin(c, 200, NULL, NULL);
    while (http_write(c, piece, sizeof(piece)))
        continue;
    UNTIL(atomic_load(&n_gone) == 1);
    http_end(c);
    ck_assert_uint_eq(http_server_stats(server).stalled, 1);
    close(fd);
}
END_TEST

START_TEST(test_http_bodies_of_all_together_are_bounded)
{
    enum { N = 8 };
    static char part[6000];
    int fds[N], n_refused = 0;
    snprintf(part, sizeof(part), "POST /x HTTP/1.1\r\nContent-Length: 6000\r\n\r\n%05000d", 0);
    for (int i = 0; i < N; i++)
        fds[i] = asked(part);
    UNTIL(http_server_stats(server).refused >= N - 4);
    for (int i = 0; i < N; i++) {
        char got[1024] = "";
        ssize_t n = recv(fds[i], got, sizeof(got) - 1, MSG_DONTWAIT);
        n_refused += n > 0 && strstr(got, "429 Too Many") && strstr(got, "Retry-After: 1");
        close(fds[i]);
    }
    ck_assert_int_ge(n_refused, N - 4);
    int fd = asked("POST /y HTTP/1.1\r\nContent-Length: 2\r\n\r\nok");
    hear(fd, "body=2:ok");
    close(fd);
}
END_TEST

START_TEST(test_http_a_server_that_drains_finishes_what_it_has)
{
    int busy = asked("GET /stream HTTP/1.1\r\n\r\n"), idle = asked("GET / HTTP/1.1\r\n\r\n");
    hear(idle, "body=");
    struct http_conn *c = wait_held();
    http_begin(c, 200, NULL, NULL);
    http_server_drain(server);
    send(idle, "GET /more HTTP/1.1\r\n\r\n", 22, MSG_NOSIGNAL);
    const char *got = hear(idle, NULL);
    ck_assert(!*got || strstr(got, "503"));
    http_write(c, "all of it", 9);
    http_end(c);
    ck_assert_ptr_nonnull(strstr(hear(busy, NULL), "all of it\r\n0\r\n\r\n"));
    close(busy);
    close(idle);
}
END_TEST

/* ------------------------------------------------------------- many at once */

enum { WRITERS = 4, ROUNDS = 200 };

static void *ask_and_leave(void *arg)
{
    unsigned seed = (unsigned)(uintptr_t)arg;
    for (int i = 0; i < ROUNDS; i++) {
        int fd = dial();
        say(fd, "GET /a HTTP/1.1\r\n\r\nGET /b HTTP/1.1\r\n\r\n");
        char got[4096];
        if (rand_r(&seed) % 2)
            (void)!recv(fd, got, sizeof(got), 0);
        close(fd);
    }
    return NULL;
}

START_TEST(test_http_clients_come_and_go_at_any_moment)
{
    pthread_t threads[WRITERS];
    for (int i = 0; i < WRITERS; i++)
        threads[i] = thread_start("client", ask_and_leave, (void *)(uintptr_t)(i + 1));
    for (int i = 0; i < WRITERS; i++)
        pthread_join(threads[i], NULL);
    int fd = asked("GET /z HTTP/1.1\r\n\r\n");
    hear(fd, "GET /z");
    close(fd);
    UNTIL(http_server_stats(server).connections == 0);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("http_server");
    TCase *tc = tcase_create("server"), *little = tcase_create("little memory");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_add_checked_fixture(little, setup_little, teardown);
    tcase_set_timeout(tc, 60);
    tcase_set_timeout(little, 60);
    tcase_add_test(tc, test_http_a_request_is_answered_and_the_connection_stays);
    tcase_add_test(tc, test_http_requests_sent_together_are_answered_in_order);
    tcase_add_test(tc, test_http_a_request_may_come_in_single_bytes);
    tcase_add_test(tc, test_http_what_cannot_be_read_is_refused);
    tcase_add_test(tc, test_http_a_body_in_chunks_is_bounded_too);
    tcase_add_test(tc, test_http_a_client_is_told_to_go_on);
    tcase_add_test(tc, test_http_slow_and_idle_clients_are_let_go);
    tcase_add_test(tc, test_http_an_answer_may_be_a_stream);
    tcase_add_test(tc, test_http_a_stream_without_chunks_ends_with_the_connection);
    tcase_add_test(tc, test_http_a_client_that_hangs_up_is_noticed);
    tcase_add_test(tc, test_http_a_slow_reader_stops_its_writer);
    tcase_add_test(tc, test_http_a_client_that_takes_nothing_is_dropped);
    tcase_add_test(tc, test_http_a_server_that_drains_finishes_what_it_has);
    tcase_add_test(tc, test_http_clients_come_and_go_at_any_moment);
    tcase_add_test(little, test_http_bodies_of_all_together_are_bounded);
    suite_add_tcase(suite, tc);
    suite_add_tcase(suite, little);
    return tap_main(suite);
}
