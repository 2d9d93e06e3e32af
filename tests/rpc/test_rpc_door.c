/*
 * The door of a server by itself: who is handed on, who is dropped when, and what makes room. Connections are
 * sockets of this process; what is handed on stays with the test, as it would with gRPC.
 */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <arpa/inet.h>

#include "base/clock.h"
#include "echo.h"
#include "proto/rpc/rpc_accept.h"
#include "proto/rpc/rpc_account.h"
#include "tests/tap.h"

static const char PREFACE[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
enum { MOST = 4, TAKEN_MAX = 512 };

static struct rpc_door *door;
static int taken[TAKEN_MAX]; /* descriptors that were handed on */
static atomic_uint n_taken;
static struct sockaddr_storage at;
static socklen_t at_len;

static uint64_t now_ns(void)
{
    struct clock c;
    clock_init_real(&c);
    return clock_now(&c);
}

#define UNTIL(condition)                                                                                               \
    do {                                                                                                               \
        uint64_t until_deadline = now_ns() + 10 * NS_PER_S;                                                            \
        while (!(condition)) {                                                                                         \
            usleep(1000);                                                                                              \
            ck_assert_msg(now_ns() < until_deadline, "waited in vain for: %s", #condition);                            \
        }                                                                                                              \
    } while (0)

static void take(void *user, int fd, bool is_local)
{
    (void)user, (void)is_local;
    taken[atomic_load(&n_taken)] = fd;
    atomic_fetch_add(&n_taken, 1);
}

enum { CALLS = 100 };

static void open_door_as(struct rpc_door_config c)
{
    static const struct log LOG = {.who = "test", .level = LOG_ERROR};
    c.preface = PREFACE;
    c.frozen_ms = 1000;
    c.max_calls = CALLS;
    c.log = &LOG;
    c.take = take;
    struct td_error e = {""};
    atomic_store(&n_taken, 0);
    ck_assert_msg(rpc_door_open(&c, &door, &e) == TD_OK, "%s", e.text);
    rpc_door_start(door);
    const char *address = rpc_door_address(door), *colon = strrchr(address, ':');
    if (!strncmp(address, "unix:", 5)) {
        struct sockaddr_un *u = (struct sockaddr_un *)&at;
        u->sun_family = AF_UNIX;
        snprintf(u->sun_path, sizeof(u->sun_path), "%s", address + 5);
        at_len = sizeof(*u);
        return;
    }
    struct sockaddr_in *v4 = (struct sockaddr_in *)&at;
    char host[64];
    snprintf(host, sizeof(host), "%.*s", (int)(colon - address), address);
    *v4 = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(colon + 1))};
    if (inet_pton(AF_INET, host, &v4->sin_addr) != 1)
        v4->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    at_len = sizeof(*v4);
}

static void open_door(const char *listen, uint32_t most, uint32_t per_address)
{
    open_door_as((struct rpc_door_config){.listen = listen, .max_connections = most, .max_per_address = per_address});
}

static int dial(const char *said, size_t n)
{
    int fd = socket(at.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(connect(fd, (struct sockaddr *)&at, at_len), 0);
    if (n)
        ck_assert_int_eq(send(fd, said, n, MSG_NOSIGNAL), (ssize_t)n);
    return fd;
}

static int greet(void)
{
    unsigned before = atomic_load(&n_taken);
    int fd = dial(PREFACE, sizeof(PREFACE) - 1);
    UNTIL(atomic_load(&n_taken) == before + 1);
    return fd;
}

/* Whether the other side has closed or cut it. */
static bool is_closed(int fd)
{
    char c;
    ssize_t n = recv(fd, &c, 1, MSG_DONTWAIT | MSG_PEEK);
    return n == 0 || (n < 0 && errno == ECONNRESET);
}

static void close_door(void)
{
    rpc_door_close(door);
    for (unsigned i = 0; i < atomic_load(&n_taken); i++)
        close(taken[i]);
}

START_TEST(test_door_hands_on_who_speaks_and_takes_no_byte)
{
    char bytes[sizeof(PREFACE)];
    open_door("127.0.0.1:0", 0, 0);
    int fd = dial(PREFACE, 10);
    usleep(20000);
    ck_assert_uint_eq(atomic_load(&n_taken), 0);
    ck_assert_int_eq(send(fd, PREFACE + 10, sizeof(PREFACE) - 11, MSG_NOSIGNAL), (ssize_t)sizeof(PREFACE) - 11);
    UNTIL(atomic_load(&n_taken) == 1);
    ck_assert_int_eq(recv(taken[0], bytes, sizeof(bytes), 0), (ssize_t)sizeof(PREFACE) - 1);
    ck_assert(!memcmp(bytes, PREFACE, sizeof(PREFACE) - 1));
    close(fd);
    close_door();
}
END_TEST

START_TEST(test_door_drops_another_protocol_at_once)
{
    open_door("127.0.0.1:0", 0, 0);
    int fds[] = {dial("GET / HTTP/1.1\r\n", 16), dial("PRJ", 3), dial("\x16\x03\x01", 3)};
    for (int i = 0; i < 3; i++) {
        UNTIL(is_closed(fds[i]));
        close(fds[i]);
    }
    ck_assert_uint_eq(atomic_load(&n_taken), 0);
    close_door();
}
END_TEST

START_TEST(test_door_drops_who_is_silent)
{
    open_door("127.0.0.1:0", 0, 0);
    int fd = dial("PRI", 3);
    uint64_t begin = now_ns();
    UNTIL(is_closed(fd));
    ck_assert_uint_ge(now_ns() - begin, (RPC_HANDSHAKE_MS - 500) * NS_PER_MS);
    ck_assert_uint_eq(rpc_door_stats(door).n_late, 1);
    close(fd);
    close_door();
}
END_TEST

START_TEST(test_door_drops_the_oldest_of_too_many_that_are_silent)
{
    static int crowd[RPC_WAITING_MAX + 10];
    open_door("127.0.0.1:0", 0, 0);
    for (int i = 0; i < RPC_WAITING_MAX + 10; i++)
        crowd[i] = dial(NULL, 0);
    for (int i = 0; i < 10; i++)
        UNTIL(is_closed(crowd[i]));
    int fd = greet(); /* who speaks comes in */
    for (int i = 0; i < RPC_WAITING_MAX + 10; i++)
        close(crowd[i]);
    close(fd);
    close_door();
}
END_TEST

START_TEST(test_door_closes_the_longest_idle_to_make_room)
{
    int fds[MOST + 2];
    uint64_t call[MOST];
    open_door("127.0.0.1:0", MOST, 0);
    for (int i = 0; i < MOST; i++) {
        fds[i] = greet();
        call[i] = rpc_door_call_begin(door, taken[i]);
        ck_assert_uint_ne(call[i], 0);
    }
    rpc_door_call_end(door, taken[2], call[2], false);
    rpc_door_call_end(door, taken[1], call[1], false);
    fds[MOST] = greet();
    UNTIL(is_closed(fds[2]));
    ck_assert(!is_closed(fds[1]) && !is_closed(fds[0]) && !is_closed(fds[3]));
    uint64_t last = rpc_door_call_begin(door, taken[MOST]);
    fds[MOST + 1] = greet();
    UNTIL(is_closed(fds[1]));
    ck_assert(!is_closed(fds[0]) && !is_closed(fds[3]) && !is_closed(fds[MOST]));
    ck_assert_uint_eq(rpc_door_stats(door).n_idle, 2);
    /* the end of a call on a connection that is gone, and whose descriptor another may have */
    rpc_door_call_end(door, taken[1], call[1], false);
    rpc_door_call_end(door, taken[MOST], last, false);
    for (int i = 0; i < MOST + 2; i++)
        close(fds[i]);
    close_door();
}
END_TEST

START_TEST(test_door_refuses_when_all_have_calls)
{
    int fds[MOST];
    open_door("127.0.0.1:0", MOST, 0);
    for (int i = 0; i < MOST; i++) {
        fds[i] = greet();
        rpc_door_call_begin(door, taken[i]);
    }
    int fd = dial(PREFACE, sizeof(PREFACE) - 1);
    UNTIL(is_closed(fd));
    close(fd);
    ck_assert_uint_eq(rpc_door_stats(door).n_refused, 1);
    /* One leaves, as gRPC would find it: its place is free, with nobody telling the door. */
    close(taken[3]);
    taken[3] = -1;
    close(fds[3]);
    fds[3] = greet();
    for (int i = 0; i < MOST; i++) {
        ck_assert(!is_closed(fds[i]));
        close(fds[i]);
    }
    close_door();
}
END_TEST

START_TEST(test_door_closes_who_makes_calls_for_nothing)
{
    open_door("127.0.0.1:0", 0, 0);
    int fds[] = {greet(), greet(), greet()};
    for (int i = 0; i <= RPC_WASTE_MOST; i++) { /* calls that are answered as many as it likes */
        rpc_door_call_end(door, taken[0], rpc_door_call_begin(door, taken[0]), 0);
        rpc_door_call_end(door, taken[1], rpc_door_call_begin(door, taken[1]), RPC_WASTE_YOUNG);
    }
    for (int i = 0; i <= RPC_WASTE_MOST / RPC_WASTE_SILENT; i++)
        rpc_door_call_end(door, taken[2], rpc_door_call_begin(door, taken[2]), RPC_WASTE_SILENT);
    UNTIL(is_closed(fds[1]) && is_closed(fds[2]));
    ck_assert(!is_closed(fds[0]));
    ck_assert_uint_eq(rpc_door_stats(door).n_flood, 2);
    for (int i = 0; i < 3; i++)
        close(fds[i]);
    close_door();
}
END_TEST

START_TEST(test_door_closes_those_whose_calls_do_not_end)
{
    open_door("127.0.0.1:0", 0, 0);
    int fds[] = {greet(), greet(), greet()};
    uint64_t others[RPC_CALLS_LEAST];
    for (int i = 0; i < RPC_CALLS_LEAST; i++)
        ck_assert((others[i] = rpc_door_call_begin(door, taken[0])) != 0);
    int begun = RPC_CALLS_LEAST;
    for (int i = 1; begun <= 2 * CALLS + RPC_CALLS_LEAST; i = 3 - i, begun++)
        ck_assert(rpc_door_call_begin(door, taken[i]) != 0);
    ck_assert(rpc_door_call_begin(door, taken[0]) != 0); /* it has few of them */
    ck_assert_uint_eq(rpc_door_call_begin(door, taken[1]), 0);
    UNTIL(is_closed(fds[1]));
    ck_assert(rpc_door_call_begin(door, taken[2]) != 0); /* those of the closed one are not counted any more */
    ck_assert_uint_eq(rpc_door_stats(door).n_flood, 1);
    for (int i = 0; i < RPC_CALLS_LEAST; i++)
        rpc_door_call_end(door, taken[0], others[i], 0);
    ck_assert(!is_closed(fds[0]) && !is_closed(fds[2]));
    for (int i = 0; i < 3; i++)
        close(fds[i]);
    close_door();
}
END_TEST

START_TEST(test_door_has_the_kernel_cut_who_reads_nothing)
{
    static char bytes[256 << 10];
    open_door("127.0.0.1:0", 0, 0);
    int fd = greet();
    ssize_t n = 0;
    UNTIL((n = send(taken[0], bytes, sizeof(bytes), MSG_DONTWAIT | MSG_NOSIGNAL)) < 0 && errno != EAGAIN);
    ck_assert_int_eq(errno, ETIMEDOUT);
    close(fd);
    close_door();
}
END_TEST

/* An address of this host that is not loopback; false: it has none. */
START_TEST(test_door_bounds_each_address)
{
    char listen[64];
    int fds[4];
    ck_assert(echo_own_address(listen, sizeof(listen)));
    open_door(listen, 100, 2);
    for (int i = 0; i < 2; i++) {
        fds[i] = greet();
        rpc_door_call_begin(door, taken[i]);
    }
    fds[2] = dial(PREFACE, sizeof(PREFACE) - 1);
    UNTIL(is_closed(fds[2]));
    ck_assert_uint_eq(rpc_door_stats(door).n_refused, 1);
    for (int i = 0; i < 3; i++)
        close(fds[i]);
    close_door();
}
END_TEST

START_TEST(test_door_lets_the_address_of_a_flood_wait)
{
    char listen[64];
    ck_assert(echo_own_address(listen, sizeof(listen)));
    open_door(listen, 100, 0);
    int flooding = greet(), other = greet();
    for (int i = 0; i <= RPC_WASTE_MOST / RPC_WASTE_SILENT; i++)
        rpc_door_call_end(door, taken[0], rpc_door_call_begin(door, taken[0]), RPC_WASTE_SILENT);
    uint64_t begin = now_ns();
    UNTIL(is_closed(flooding));
    int fd = dial(NULL, 0);
    UNTIL(is_closed(fd)); /* before it says anything */
    close(fd);
    ck_assert_uint_ge(rpc_door_stats(door).n_refused, 1);
    ck_assert(!is_closed(other)); /* it may be somebody else's */
    while (now_ns() - begin < (RPC_FLOOD_WAIT_MS + 100) * NS_PER_MS)
        usleep(10000);
    fd = greet();
    close(fd);
    close(flooding);
    close(other);
    close_door();
}
END_TEST

/* Calls that come to nothing, few of each connection, and connections that are never used. */
START_TEST(test_door_counts_the_waste_of_an_address_together)
{
    char listen[64];
    enum { CONNECTIONS = 20, EACH = (RPC_WASTE_MOST / CONNECTIONS - RPC_WASTE_UNUSED) / RPC_WASTE_YOUNG };
    ck_assert(echo_own_address(listen, sizeof(listen)));
    open_door(listen, 100, 0);
    for (int i = 0; i < CONNECTIONS; i++) {
        int fd = greet();
        for (int n = 0; n < EACH; n++)
            rpc_door_call_end(door, taken[i], rpc_door_call_begin(door, taken[i]), RPC_WASTE_YOUNG);
        ck_assert(!is_closed(fd));
        close(fd);
        close(taken[i]); /* as gRPC does */
        taken[i] = -1;
    }
    ck_assert_uint_eq(rpc_door_stats(door).n_flood, 0);
    int fd = greet(); /* what was used and is given up counts little */
    rpc_door_call_end(door, taken[CONNECTIONS], rpc_door_call_begin(door, taken[CONNECTIONS]), 0);
    for (int n = 0; n <= RPC_WASTE_UNUSED; n++)
        rpc_door_call_end(door, taken[CONNECTIONS], rpc_door_call_begin(door, taken[CONNECTIONS]), RPC_WASTE_YOUNG);
    UNTIL(rpc_door_stats(door).n_flood == 1 && is_closed(fd));
    close(fd);
    fd = dial(NULL, 0);
    UNTIL(is_closed(fd));
    close(fd);
    close_door();
}
END_TEST

/* What a connection sent before it was closed as a flood's is not handled any more. */
START_TEST(test_door_takes_what_a_flood_has_sent)
{
    char bytes[50000] = {0};
    memcpy(bytes, PREFACE, sizeof(PREFACE) - 1);
    open_door("127.0.0.1:0", 0, 0);
    int fd = dial(bytes, sizeof(bytes));
    UNTIL(atomic_load(&n_taken) == 1);
    for (int i = 0; i <= RPC_WASTE_MOST / RPC_WASTE_SILENT; i++)
        rpc_door_call_end(door, taken[0], rpc_door_call_begin(door, taken[0]), RPC_WASTE_SILENT);
    UNTIL(is_closed(fd));
    ck_assert_int_eq(recv(taken[0], bytes, sizeof(bytes), 0), 0);
    close(fd);
    close_door();
}
END_TEST

/* Sends the same to two connections with a call, of which one has proved itself. */
START_TEST(test_door_bounds_what_comes_before_a_proof)
{
    enum { BYTES = 50000, TIMES = 12 };
    static char bytes[BYTES];
    int fds[2];
    open_door_as((struct rpc_door_config){.listen = "127.0.0.1:0", .max_message_bytes = 1 << 20, .must_prove = true});
    for (int i = 0; i < 2; i++) {
        fds[i] = greet();
        uint64_t connection = rpc_door_call_begin(door, taken[i]);
        if (i)
            rpc_door_proved(door, taken[i], connection);
        for (int t = 0; t < TIMES && send(fds[i], bytes, BYTES, MSG_NOSIGNAL) == BYTES; t++)
            for (ssize_t got = 0, n = 1; got < BYTES && n > 0; got += n)
                n = recv(taken[i], bytes, BYTES, 0);
    }
    UNTIL(is_closed(fds[0]));
    usleep(4 * RPC_LOOK_MS * 1000);
    ck_assert(!is_closed(fds[1]));
    ck_assert_uint_eq(rpc_door_stats(door).n_flood, 1);
    for (int i = 0; i < 2; i++)
        close(fds[i]);
    close_door();
}
END_TEST

/* gRPC would read all that has come at once. A proof makes room. */
START_TEST(test_door_takes_little_at_a_time_before_a_proof)
{
    char listen[64];
    int windows[2];
    ck_assert(echo_own_address(listen, sizeof(listen)));
    open_door_as((struct rpc_door_config){.listen = listen, .max_message_bytes = 1 << 20, .must_prove = true});
    int fd = greet();
    uint64_t connection = rpc_door_call_begin(door, taken[0]);
    for (int i = 0; i < 2; i++) {
        socklen_t len = sizeof(windows[i]);
        ck_assert_int_eq(getsockopt(taken[0], IPPROTO_TCP, TCP_WINDOW_CLAMP, &windows[i], &len), 0);
        rpc_door_proved(door, taken[0], connection);
    }
    ck_assert_msg(windows[0] <= 1 << 15 && windows[1] >= 1 << 20, "%d %d", windows[0], windows[1]);
    close(fd);
    close_door();
}
END_TEST

/* What silent calls explained when they began is taken back, also if some of it is surplus by then. */
START_TEST(test_an_account_takes_back_what_silent_calls_explained)
{
    const struct rpc_allowance may = {.few = 100 << 10, .each = 10 << 10, .noise = 1 << 20, .noise_ns = NS_PER_S};
    uint64_t now = 1000 * NS_PER_S;
    struct rpc_account a = rpc_account_open(now);
    struct rpc_flow flow = {0};
    for (int i = 0; i < 20; i++)
        rpc_account_call(&a);
    ck_assert(!rpc_account_is_over(&a, &flow, 20, &may, now)); /* nothing was sent: the rest is surplus */
    for (int i = 0; i < 20; i++)
        rpc_account_unread(&a, 0, true, now);
    flow.read_bytes = may.few;
    ck_assert(!rpc_account_is_over(&a, &flow, 0, &may, now));
    flow.read_bytes++;
    ck_assert(rpc_account_is_over(&a, &flow, 0, &may, now));
    for (int i = 0; i < 20; i++) /* more than the surplus was */
        rpc_account_call(&a);
    ck_assert(!rpc_account_is_over(&a, &flow, 0, &may, now));
}
END_TEST

/* Makes calls that send many bytes and end without a message, from an address of which a call was answered,
 * or none. Returns how many began. */
static int calls_without_a_message(bool was_answered)
{
    enum { BYTES = 60000, CALLS_MOST = 40 };
    static char bytes[BYTES];
    char listen[64];
    ck_assert(echo_own_address(listen, sizeof(listen)));
    open_door_as((struct rpc_door_config){.listen = listen, .max_message_bytes = 1 << 16});
    int fd = greet(), n_begun = 0;
    uint64_t connection = rpc_door_call_begin(door, taken[0]);
    if (was_answered)
        rpc_door_answered(door, taken[0], connection);
    rpc_door_call_end(door, taken[0], connection, 0);
    for (; n_begun < CALLS_MOST && (connection = rpc_door_call_begin(door, taken[0])); n_begun++) {
        if (send(fd, bytes, BYTES, MSG_NOSIGNAL) != BYTES)
            break;
        for (ssize_t got = 0, n = 1; got < BYTES && n > 0; got += n)
            n = recv(taken[0], bytes, BYTES, 0);
        rpc_door_unread(door, taken[0], connection, false);
        rpc_door_call_end(door, taken[0], connection, 1);
    }
    ck_assert_uint_eq(rpc_door_stats(door).n_flood, n_begun < CALLS_MOST);
    ck_assert_int_eq(is_closed(fd), n_begun < CALLS_MOST);
    close(fd);
    close_door();
    return n_begun;
}

/* Calls that gRPC never hands over, because they were reset before. Not: a call that is under way; a
 * connection that is no stranger's any more, whose bytes are noise only after half a second. */
START_TEST(test_door_closes_strangers_that_send_much_without_a_call)
{
    enum { BYTES = 40000 };
    static char bytes[BYTES];
    char listen[64];
    ck_assert(echo_own_address(listen, sizeof(listen)));
    open_door_as((struct rpc_door_config){.listen = listen, .max_message_bytes = 1 << 20});
    int fds[] = {greet(), greet(), greet()};
    uint64_t calls[] = {0, rpc_door_call_begin(door, taken[1]), 0};
    for (int i = 0; i < 3; i++) {
        if (i == 2)
            rpc_door_answered(door, taken[1], calls[1]);
        ck_assert_int_eq(send(fds[i], bytes, BYTES, MSG_NOSIGNAL), BYTES);
        for (ssize_t got = 0, n = 1; got < BYTES && n > 0; got += n)
            n = recv(taken[i], bytes, BYTES, 0);
        if (!i)
            UNTIL(is_closed(fds[0]));
    }
    uint64_t begin = now_ns();
    usleep(4 * RPC_STRANGERS_LOOK_MS * 1000);
    bool is_noise = is_closed(fds[2]);
    ck_assert(!is_closed(fds[1]) && (!is_noise || now_ns() - begin > NS_PER_S / 4));
    ck_assert_uint_eq(rpc_door_stats(door).n_flood, 1 + is_noise);
    for (int i = 0; i < 3; i++)
        close(fds[i]);
    close_door();
}
END_TEST

START_TEST(test_door_takes_less_without_a_message_from_strangers)
{
    ck_assert_int_eq(calls_without_a_message(true), 40);
    int n = calls_without_a_message(false);
    ck_assert_msg(n > 4 && n < 20, "%d", n); /* 256 KiB, one message, and what is under way */
}
END_TEST

enum { NEW = 2 };

static void open_door_with_new(void)
{
    static char listen[64];
    ck_assert(echo_own_address(listen, sizeof(listen)));
    open_door_as((struct rpc_door_config){.listen = listen, .max_new = NEW});
}

START_TEST(test_door_holds_connections_until_those_before_are_used)
{
    enum { N = 12 };
    int fds[N];
    open_door_with_new();
    uint64_t begin = now_ns();
    for (int i = 0; i < N; i++)
        fds[i] = dial(PREFACE, sizeof(PREFACE) - 1);
    UNTIL(atomic_load(&n_taken) >= NEW);
    usleep(50000);
    unsigned first = atomic_load(&n_taken);
    rpc_door_call_end(door, taken[0], rpc_door_call_begin(door, taken[0]), 0);
    UNTIL(atomic_load(&n_taken) >= 1 + 2 * NEW); /* one that was used, and as many again for it */
    usleep(50000);
    unsigned second = atomic_load(&n_taken);
    if (now_ns() - begin < NS_PER_S) /* else the machine is busy, and they are no longer new */
        ck_assert(first == NEW && second == 1 + 2 * NEW);
    UNTIL(atomic_load(&n_taken) == N);
    ck_assert(now_ns() - begin >= NS_PER_S);
    for (int i = 0; i < N; i++)
        close(fds[i]);
    close_door();
}
END_TEST

START_TEST(test_door_bounds_no_address_of_a_trusted_proxy)
{
    enum { N = 12 };
    int fds[N];
    char listen[64], proxies[96];
    ck_assert(echo_own_address(listen, sizeof(listen)));
    snprintf(proxies, sizeof(proxies), "192.0.2.1,%.*s", (int)(strrchr(listen, ':') - listen), listen);
    open_door_as(
        (struct rpc_door_config){.listen = listen, .max_new = NEW, .max_per_address = NEW, .trusted_proxies = proxies});
    for (int i = 0; i < N; i++)
        fds[i] = greet();
    for (int i = 0; i <= RPC_WASTE_MOST / RPC_WASTE_SILENT; i++)
        rpc_door_call_end(door, taken[0], rpc_door_call_begin(door, taken[0]), RPC_WASTE_SILENT);
    int fd = greet();
    ck_assert(!is_closed(fds[0]) && !rpc_door_stats(door).n_flood);
    close(fd);
    for (int i = 0; i < N; i++)
        close(fds[i]);
    close_door();
}
END_TEST

START_TEST(test_door_counts_those_that_leave_while_they_are_held)
{
    enum { N = RPC_WASTE_MOST / RPC_WASTE_HELD + 1 };
    open_door_with_new();
    int new[NEW], fds[N];
    for (int i = 0; i < NEW; i++)
        new[i] = greet();
    int held = dial(PREFACE, sizeof(PREFACE) - 1);
    for (int i = 0; i < N; i++)
        fds[i] = dial(PREFACE, sizeof(PREFACE) - 1);
    for (int i = 0; i < N; i++)
        close(fds[i]);
    UNTIL(rpc_door_stats(door).n_flood == 1);
    UNTIL(is_closed(held));
    ck_assert_uint_eq(atomic_load(&n_taken), NEW);
    for (int i = 0; i < NEW; i++)
        close(new[i]);
    close(held);
    close_door();
}
END_TEST

START_TEST(test_door_closes_with_connections_that_are_held)
{
    open_door_with_new();
    int fds[NEW + 3];
    for (int i = 0; i < NEW + 3; i++)
        fds[i] = dial(PREFACE, sizeof(PREFACE) - 1);
    UNTIL(rpc_door_stats(door).n_accepted == NEW + 3 && !rpc_door_stats(door).n_waiting);
    close_door();
    for (int i = 0; i < NEW + 3; i++) {
        UNTIL(is_closed(fds[i]));
        close(fds[i]);
    }
}
END_TEST

/* gRPC hands on the calls of a connection that its client has closed already. */
START_TEST(test_door_drops_the_calls_of_a_client_that_has_left)
{
    open_door("127.0.0.1:0", 0, 0);
    int fd = greet();
    ck_assert(rpc_door_call_begin(door, taken[0]) != 0);
    close(fd);
    UNTIL(!rpc_door_call_begin(door, taken[0]));
    close_door();
}
END_TEST

START_TEST(test_door_survives_the_end_of_descriptors)
{
    open_door("127.0.0.1:0", 64, 0);
    static int crowd[200];
    int n = 0, fds[300], n_fds = 0;
    for (; n < 20; n++)
        crowd[n] = dial(NULL, 0);
    UNTIL(rpc_door_stats(door).n_waiting == (uint32_t)n);
    int last = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct rlimit few, was;
    getrlimit(RLIMIT_NOFILE, &was);
    few = was;
    few.rlim_cur = (rlim_t)last + 1;
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &few), 0);
    while (n_fds < 300 && (fds[n_fds] = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0)
        n_fds++;
    /* No descriptor is left. The socket was made before: the door drops a silent one for it. */
    ck_assert_int_eq(connect(last, (struct sockaddr *)&at, at_len), 0);
    ck_assert_int_eq(send(last, PREFACE, sizeof(PREFACE) - 1, MSG_NOSIGNAL), (ssize_t)sizeof(PREFACE) - 1);
    UNTIL(atomic_load(&n_taken) == 1 || is_closed(last));
    ck_assert_uint_eq(atomic_load(&n_taken), 1);
    setrlimit(RLIMIT_NOFILE, &was);
    close(greet());
    while (n_fds)
        close(fds[--n_fds]);
    while (n)
        close(crowd[--n]);
    close(last);
    close_door();
}
END_TEST

START_TEST(test_door_listens_where_it_is_told)
{
    static const char *const OPENS[][2] = {
        {"127.0.0.1:0", "127.0.0.1:"}, {":0", "[::]:"}, {"*:0", "[::]:"}, {"localhost:0", "localhost:"}};
    static const char *const FAILS[] = {"nothing", "203.0.113.1:1", "unix:", "127.0.0.1:http-of-nobody"};
    struct rpc_door_config c = {.frozen_ms = 1000, .take = take};
    struct td_error e;
    for (size_t i = 0; i < sizeof(OPENS) / sizeof(OPENS[0]); i++) {
        open_door(OPENS[i][0], 0, 0);
        ck_assert_msg(!strncmp(rpc_door_address(door), OPENS[i][1], strlen(OPENS[i][1])), "%s", rpc_door_address(door));
        close(greet());
        close_door();
    }
    for (size_t i = 0; i < sizeof(FAILS) / sizeof(FAILS[0]); i++) {
        c.listen = FAILS[i];
        ck_assert_msg(rpc_door_open(&c, &door, &e) != TD_OK, "%s", FAILS[i]);
        ck_assert_msg(strstr(e.text, FAILS[i]) != NULL, "%s", e.text);
    }
}
END_TEST

START_TEST(test_door_of_a_unix_socket_replaces_one_that_was_left)
{
    char listen[100];
    snprintf(listen, sizeof(listen), "unix:/tmp/tandem-door-%d.sock", (int)getpid());
    struct sockaddr_un left = {.sun_family = AF_UNIX};
    snprintf(left.sun_path, sizeof(left.sun_path), "%s", listen + 5);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ck_assert_int_eq(bind(fd, (struct sockaddr *)&left, sizeof(left)), 0);
    close(fd);
    open_door(listen, 0, 0);
    close(greet());
    close_door();
    ck_assert_int_ne(access(listen + 5, F_OK), 0);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("rpc door");
    TCase *tc = tcase_create("door");
    tcase_set_timeout(tc, 30);
    tcase_add_test(tc, test_door_hands_on_who_speaks_and_takes_no_byte);
    tcase_add_test(tc, test_door_drops_another_protocol_at_once);
    tcase_add_test(tc, test_door_drops_who_is_silent);
    tcase_add_test(tc, test_door_drops_the_oldest_of_too_many_that_are_silent);
    tcase_add_test(tc, test_door_closes_the_longest_idle_to_make_room);
    tcase_add_test(tc, test_door_refuses_when_all_have_calls);
    tcase_add_test(tc, test_door_closes_who_makes_calls_for_nothing);
    tcase_add_test(tc, test_door_closes_those_whose_calls_do_not_end);
    tcase_add_test(tc, test_door_has_the_kernel_cut_who_reads_nothing);
    tcase_add_test(tc, test_an_account_takes_back_what_silent_calls_explained);
    tcase_add_test(tc, test_door_takes_what_a_flood_has_sent);
    tcase_add_test(tc, test_door_bounds_what_comes_before_a_proof);
    tcase_add_test(tc, test_door_drops_the_calls_of_a_client_that_has_left);
    tcase_add_test(tc, test_door_survives_the_end_of_descriptors);
    tcase_add_test(tc, test_door_listens_where_it_is_told);
    tcase_add_test(tc, test_door_of_a_unix_socket_replaces_one_that_was_left);
    static const char WHY[] = "this host has no address but loopback";
    char address[64];
    const struct {
        const char *name;
        const TTest *test;
    } THERE[] = {
        {"test_door_bounds_each_address", test_door_bounds_each_address},
        {"test_door_lets_the_address_of_a_flood_wait", test_door_lets_the_address_of_a_flood_wait},
        {"test_door_counts_the_waste_of_an_address_together", test_door_counts_the_waste_of_an_address_together},
        {"test_door_holds_connections_until_those_before_are_used",
         test_door_holds_connections_until_those_before_are_used},
        {"test_door_bounds_no_address_of_a_trusted_proxy", test_door_bounds_no_address_of_a_trusted_proxy},
        {"test_door_counts_those_that_leave_while_they_are_held",
         test_door_counts_those_that_leave_while_they_are_held},
        {"test_door_takes_little_at_a_time_before_a_proof", test_door_takes_little_at_a_time_before_a_proof},
        {"test_door_closes_strangers_that_send_much_without_a_call",
         test_door_closes_strangers_that_send_much_without_a_call},
        {"test_door_takes_less_without_a_message_from_strangers",
         test_door_takes_less_without_a_message_from_strangers},
        {"test_door_closes_with_connections_that_are_held", test_door_closes_with_connections_that_are_held}};
    bool is_there = echo_own_address(address, sizeof(address));
    for (size_t i = 0; i < sizeof(THERE) / sizeof(THERE[0]); i++)
        if (is_there)
            tcase_add_test(tc, THERE[i].test);
        else
            tap_skip(THERE[i].name, WHY);
    suite_add_tcase(s, tc);
    return tap_main(s);
}
