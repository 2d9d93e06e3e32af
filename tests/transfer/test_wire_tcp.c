/*
 * The TCP transport by itself: two wires of this process, or a wire and a socket that sends arbitrary
 * bytes. Frames arrive whole and in order, however they are cut, and payloads land where they should. Bytes
 * that are no frame, come too early or never come cost one connection. The same with TLS; and what is not
 * said with the secret, or is changed on its way, ends the connection.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/endian.h"
#include "base/mem.h"
#include "base/random.h"
#include "base/secret.h"
#include "tests/tap.h"
#include "transfer/wire.h"

enum { MESSAGES_MAX = 4096, STRANGERS = 256, PREFIX = 16, MAGIC = 0x314d4454 };

struct end { /* a connection as its user sees it */
    struct wire_conn *conn;
    bool is_open, is_closed, is_refusing; /* is_refusing: payloads are discarded */
    uint32_t n_messages, n_errors, n_payloads, n_cancelled;
    enum td_status error;
    uint32_t lens[MESSAGES_MAX], sums[MESSAGES_MAX];
    uint8_t *landing;
    uint64_t landed;
};

struct side {
    struct wire *wire;
    struct end ends[4]; /* ends of accepted or own connections */
    struct end nobody;  /* shared by connections that only stay open */
    struct wire_conn *crowd[STRANGERS + 64];
    uint32_t n_ends, n_crowd, n_accepted;
    bool is_trusting; /* trusts the connections that it accepts */
};

static struct side sides[2];
static struct secret *encrypt[2]; /* by side; NULL: plain */
static void (*between)(void);     /* what else happens in a turn; NULL: nothing */

static uint64_t wall_ns(void)
{
    struct clock c;
    clock_init_real(&c);
    return clock_now(&c);
}

static uint32_t sum_of(const uint8_t *bytes, uint32_t len)
{
    uint32_t sum = 17;
    for (uint32_t i = 0; i < len; i++)
        sum = sum * 31 + bytes[i];
    return sum;
}

static void on_accept(void *user, struct wire_conn *conn)
{
    struct side *s = user;
    struct end *e = s->n_ends < 4 ? &s->ends[s->n_ends++] : &s->nobody;
    if (e == &s->nobody)
        s->crowd[s->n_crowd++] = conn;
    s->n_accepted++;
    e->conn = conn;
    conn->user = e;
    if (s->is_trusting)
        wire_trust(conn);
}

static void on_open(void *user)
{
    ((struct end *)user)->is_open = true;
    wire_trust(((struct end *)user)->conn);
}

static void on_message(void *user, const uint8_t *header, uint32_t len)
{
    struct end *e = user;
    ck_assert_uint_lt(e->n_messages, MESSAGES_MAX);
    e->lens[e->n_messages] = len;
    e->sums[e->n_messages++] = sum_of(header, len);
}

static void *on_payload(void *user, const uint8_t *header, uint32_t header_len, uint64_t len, void **token_out)
{
    struct end *e = user;
    on_message(user, header, header_len);
    if (e->is_refusing)
        return NULL;
    *token_out = e;
    e->landed += len;
    return e->landing + e->landed - len;
}

static void on_payload_done(void *user, void *token, enum td_status status)
{
    struct end *e = user;
    ck_assert_ptr_eq(token, e);
    e->n_payloads += !status;
    e->n_cancelled += status == TD_ERR_CANCELLED;
}

static void on_error(void *user, enum td_status why)
{
    struct end *e = user;
    e->n_errors++;
    e->error = why;
}

static void on_closed(void *user)
{
    ((struct end *)user)->is_closed = true;
}

static void side_open(struct side *s, bool listens)
{
    static const struct log LOG = {.who = "test", .level = LOG_ERROR};
    const struct wire_config c = {.listen = listens ? "127.0.0.1:0" : NULL,
                                  .encrypt = encrypt[s - sides],
                                  .log = &LOG,
                                  .events = {.user = s,
                                             .on_accept = on_accept,
                                             .on_open = on_open,
                                             .on_message = on_message,
                                             .on_payload = on_payload,
                                             .on_payload_done = on_payload_done,
                                             .on_error = on_error,
                                             .on_closed = on_closed}};
    *s = (struct side){.is_trusting = true};
    ck_assert_int_eq(wire_tcp_open(&c, &s->wire, NULL), TD_OK);
}

static bool turn(void)
{
    bool any = false;
    for (int i = 0; i < 2; i++)
        any |= sides[i].wire && wire_progress(sides[i].wire);
    if (between)
        between();
    return any;
}

#define UNTIL(condition)                                                                                               \
    do {                                                                                                               \
        uint64_t until_deadline = wall_ns() + 30 * NS_PER_S;                                                           \
        while (!(condition)) {                                                                                         \
            turn();                                                                                                    \
            ck_assert_msg(wall_ns() < until_deadline, "waited in vain for: %s", #condition);                           \
        }                                                                                                              \
    } while (0)

static void turns_for(uint64_t ns)
{
    for (uint64_t until = wall_ns() + ns; wall_ns() < until;)
        turn();
}

/* Connects sides[1] to sides[0]; ends[0] of each is their connection. */
static void pair_open(void)
{
    side_open(&sides[0], true);
    side_open(&sides[1], false);
    struct end *e = &sides[1].ends[0];
    e->conn = wire_connect(sides[1].wire, sides[0].wire->address, 0, e);
    UNTIL(e->is_open && sides[0].n_ends);
    if (!encrypt[0])
        return;
    wire_send(e->conn, "", 0, NULL, 0, NULL, NULL); /* makes the handshake */
    UNTIL(sides[0].ends[0].n_messages);
    wire_send(sides[0].ends[0].conn, "", 0, NULL, 0, NULL, NULL);
    UNTIL(e->n_messages);
    e->n_messages = sides[0].ends[0].n_messages = 0;
}

static struct secret *make_secret(const char *text)
{
    struct secret *s = NULL;
    struct td_error e;
    ck_assert_int_eq(secret_open(text, NULL, NULL, &s, &e), TD_OK);
    return s;
}

/* Each test runs plain, and with TLS. */
static void choose_tls(bool with_tls)
{
    encrypt[0] = with_tls ? make_secret("a secret of the test") : NULL;
    encrypt[1] = with_tls ? make_secret("a secret of the test") : NULL;
}

static void forget_tls(void)
{
    for (int i = 0; i < 2; i++) {
        secret_close(encrypt[i]);
        encrypt[i] = NULL;
    }
}

static void side_close(struct side *s)
{
    for (uint32_t i = 0; i < 4; i++)
        if (s->ends[i].conn && !s->ends[i].is_closed) {
            wire_close(s->ends[i].conn);
            UNTIL(s->ends[i].is_closed);
        }
    for (uint32_t i = 0; i < s->n_crowd; i++)
        wire_close(s->crowd[i]);
    UNTIL(!turn());
    wire_free(s->wire);
    s->wire = NULL;
}

static int socket_to(const struct side *s)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    a.sin_port = htons((uint16_t)atoi(strrchr(s->wire->address, ':') + 1));
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(connect(fd, (struct sockaddr *)&a, sizeof(a)), 0);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    return fd;
}

static void put_prefix(uint8_t out[PREFIX], uint32_t header_len, uint64_t payload_len)
{
    put_u32(out, MAGIC);
    put_u16(out + 4, (uint16_t)header_len);
    put_u16(out + 6, 0);
    put_u64(out + 8, payload_len);
}

/* Whether the other side has ended the connection. */
static bool is_ended(int fd)
{
    char byte;
    struct pollfd p = {.fd = fd, .events = POLLIN};
    return poll(&p, 1, 0) == 1 && recv(fd, &byte, 1, MSG_DONTWAIT) <= 0;
}

START_TEST(test_tcp_frames_arrive_whole_and_in_order_however_they_are_cut)
{
    enum { FRAMES = 300 };
    uint8_t header[WIRE_HEADER_MAX];
    uint32_t sums[FRAMES], lens[FRAMES];
    struct bytes all = {0};
    side_open(&sides[0], true);
    for (uint32_t i = 0; i < FRAMES; i++) {
        uint8_t prefix[PREFIX];
        lens[i] = i < 4 ? i * 682 : (uint32_t)random_at(1, i, 0) % (WIRE_HEADER_MAX + 1);
        for (uint32_t k = 0; k < lens[i]; k++)
            header[k] = (uint8_t)random_at(2, i, k);
        sums[i] = sum_of(header, lens[i]);
        put_prefix(prefix, lens[i], 0);
        bytes_append(&all, prefix, PREFIX);
        bytes_append(&all, header, lens[i]);
    }
    int fd = socket_to(&sides[0]);
    struct end *e = &sides[0].ends[0];
    for (size_t at = 0, n; at < all.len; at += n) { /* sends the first frames byte by byte */
        n = at < 3000 ? 1 : random_at(3, at, 0) % 40000 + 1;
        n = n < all.len - at ? n : all.len - at;
        ck_assert_int_eq(write(fd, all.data + at, n), (ssize_t)n);
        turn();
    }
    UNTIL(e->n_messages == FRAMES);
    ck_assert_mem_eq(e->lens, lens, sizeof(lens));
    ck_assert_mem_eq(e->sums, sums, sizeof(sums));
    bytes_free(&all);
    close(fd);
    UNTIL(e->n_errors == 1);
    ck_assert_int_eq(e->error, TD_ERR_PEER_LOST);
    side_close(&sides[0]);
}
END_TEST

static uint32_t n_done[3]; /* number of sent, cancelled and lost messages */

static void count_done(void *arg, enum td_status status)
{
    (void)arg;
    n_done[status == TD_OK ? 0 : status == TD_ERR_CANCELLED ? 1 : 2]++;
}

START_TEST(test_tcp_payloads_land_and_messages_between_them_keep_their_order)
{
    enum { PAYLOADS = 40, LEN_MAX = 3 << 20 };
    static const uint64_t LENS[] = {1, 15, 16 << 10, (16 << 10) + 1, LEN_MAX};
    uint8_t *from = mem_array(PAYLOADS, LEN_MAX), *to = mem_array(PAYLOADS, LEN_MAX);
    uint64_t total = 0;
    for (uint64_t i = 0; i < (uint64_t)PAYLOADS * LEN_MAX / 8; i++)
        ((uint64_t *)(void *)from)[i] = random_mix(i);
    choose_tls(_i / 2);
    pair_open();
    struct end *a = &sides[0].ends[0], *b = &sides[1].ends[0];
    bool is_refusing = a->is_refusing = _i % 2;
    a->landing = to;
    memset(n_done, 0, sizeof(n_done));
    for (uint32_t i = 0; i < PAYLOADS; i++) {
        uint8_t header[8];
        uint64_t len = i < 5 ? LENS[i] : random_at(4, i, 0) % LEN_MAX + 1;
        put_u64(header, i);
        wire_send(b->conn, header, 8, from + total, len, count_done, NULL);
        wire_send(b->conn, header, 7, NULL, 0, NULL, NULL);
        total += len;
    }
    UNTIL(a->n_messages == 2 * PAYLOADS && n_done[0] == PAYLOADS);
    for (uint32_t i = 0; i < 2 * PAYLOADS; i++)
        ck_assert_uint_eq(a->lens[i], 8 - i % 2);
    ck_assert_uint_eq(a->n_payloads, is_refusing ? 0 : PAYLOADS);
    ck_assert(is_refusing || !memcmp(from, to, total));
    side_close(&sides[1]);
    side_close(&sides[0]);
    forget_tls();
    free(from);
    free(to);
}
END_TEST

START_TEST(test_tcp_what_is_no_frame_ends_its_connection_alone)
{
    uint8_t prefix[PREFIX];
    side_open(&sides[0], true);
    sides[0].is_trusting = false;
    put_prefix(prefix, 8, 0);
    switch (_i) {
    case 0:
        prefix[0] ^= 1;
        break;
    case 1:
        prefix[6] = 1;
        break;
    case 2:
        put_u16(prefix + 4, WIRE_HEADER_MAX + 1);
        break;
    default:
        put_u64(prefix + 8, 1); /* a payload from a peer that has not proved the secret */
    }
    int good = socket_to(&sides[0]);
    UNTIL(sides[0].n_ends == 1);
    int bad = socket_to(&sides[0]);
    UNTIL(sides[0].n_ends == 2);
    ck_assert_int_eq(write(bad, prefix, PREFIX), PREFIX);
    UNTIL(sides[0].ends[1].n_errors);
    ck_assert_int_eq(sides[0].ends[1].error, TD_ERR_PROTOCOL);
    ck_assert_uint_eq(sides[0].ends[1].n_messages, 0);
    put_prefix(prefix, 0, 0);
    ck_assert_int_eq(write(good, prefix, PREFIX), PREFIX);
    UNTIL(sides[0].ends[0].n_messages == 1);
    ck_assert_uint_eq(sides[0].ends[1].n_errors, 1);
    side_close(&sides[0]);
    close(good);
    close(bad);
}
END_TEST

START_TEST(test_tcp_the_oldest_strangers_make_room)
{
    enum { MORE = 40 };
    int fds[STRANGERS + MORE];
    side_open(&sides[0], true);
    sides[0].is_trusting = false;
    for (int i = 0; i < STRANGERS + MORE; i++) {
        fds[i] = socket_to(&sides[0]);
        UNTIL(sides[0].n_accepted == (uint32_t)i + 1);
        if (i == 1)
            wire_trust(sides[0].ends[1].conn); /* whoever has proved itself stays */
    }
    for (int i = 0; i < STRANGERS + MORE; i++)
        if (i != 1 && i < MORE)
            UNTIL(is_ended(fds[i]));
        else
            ck_assert_msg(!is_ended(fds[i]), "%d", i);
    ck_assert_uint_eq(sides[0].ends[0].n_errors, 1);
    ck_assert_int_eq(sides[0].ends[0].error, TD_ERR_PEER_LOST);
    side_close(&sides[0]);
    for (int i = 0; i < STRANGERS + MORE; i++)
        close(fds[i]);
}
END_TEST

START_TEST(test_tcp_without_descriptors_a_connection_is_refused_and_nothing_spins)
{
    struct rlimit before, less;
    int held[256], n_held = 0, fd;
    side_open(&sides[0], true);
    fd = socket(AF_INET, SOCK_STREAM, 0); /* taken before descriptors run out */
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &before), 0);
    less = (struct rlimit){128, before.rlim_max};
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &less), 0);
    while (n_held < 256 && (held[n_held] = open("/dev/null", O_RDONLY)) >= 0)
        n_held++;
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    a.sin_port = htons((uint16_t)atoi(strrchr(sides[0].wire->address, ':') + 1));
    ck_assert_int_eq(connect(fd, (struct sockaddr *)&a, sizeof(a)), 0);
    UNTIL(is_ended(fd));
    UNTIL(!turn());
    ck_assert_int_eq(wire_arm(sides[0].wire), -1);
    struct pollfd p = {.fd = sides[0].wire->fd, .events = POLLIN};
    ck_assert_int_eq(poll(&p, 1, 100), 0); /* the wire may sleep */
    ck_assert_uint_eq(sides[0].n_accepted, 0);
    while (n_held)
        close(held[--n_held]);
    int again = socket_to(&sides[0]);
    UNTIL(sides[0].n_accepted == 1);
    close(again);
    close(fd);
    side_close(&sides[0]);
}
END_TEST

START_TEST(test_tcp_that_can_accept_nothing_pauses_and_goes_on)
{
    struct rlimit before, less;
    uint32_t n_busy = 0;
    side_open(&sides[0], true);
    int fd = socket_to(&sides[0]);
    ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &before), 0);
    less = (struct rlimit){3, before.rlim_max}; /* not even the spare descriptor can be opened again */
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &less), 0);
    for (uint64_t until = wall_ns() + 500 * NS_PER_MS; wall_ns() < until;)
        n_busy += turn();
    ck_assert_uint_eq(n_busy, 0);
    ck_assert_int_gt(wire_arm(sides[0].wire), 0);
    ck_assert_uint_eq(sides[0].n_accepted, 0);
    ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &before), 0);
    UNTIL(sides[0].n_accepted == 1);
    ck_assert_int_eq(wire_arm(sides[0].wire), -1);
    close(fd);
    side_close(&sides[0]);
}
END_TEST

START_TEST(test_tcp_close_ends_what_is_under_way_once)
{
    enum { LEN = 256 << 20 };
    uint8_t *from = mem_array(LEN, 1), *to = mem_array(LEN, 1);
    choose_tls(_i / 2);
    pair_open();
    struct end *a = &sides[0].ends[0], *b = &sides[1].ends[0];
    a->landing = to;
    memset(n_done, 0, sizeof(n_done));
    for (int i = 0; i < 4; i++)
        wire_send(b->conn, "h", 1, from + (uint64_t)i * LEN / 4, LEN / 4, count_done, NULL);
    UNTIL(a->n_messages);
    struct end *closes = _i % 2 ? a : b, *hears = _i % 2 ? b : a;
    wire_close(closes->conn);
    UNTIL(closes->is_closed && hears->n_errors);
    ck_assert_uint_eq(closes->n_errors, 0);
    ck_assert_int_eq(hears->error, TD_ERR_PEER_LOST);
    wire_send(hears->conn, "h", 1, NULL, 0, count_done, NULL); /* too late: the connection is closed */
    wire_close(hears->conn);
    UNTIL(hears->is_closed);
    ck_assert_uint_eq(n_done[0] + n_done[1] + n_done[2], 5);
    ck_assert_uint_ge(n_done[1] + n_done[2], 2);
    ck_assert_uint_eq(a->n_payloads + a->n_cancelled, a->n_messages);
    ck_assert_uint_eq(a->n_errors + b->n_errors, 1);
    turns_for(20 * NS_PER_MS);
    side_close(&sides[1]);
    side_close(&sides[0]);
    forget_tls();
    free(from);
    free(to);
}
END_TEST

START_TEST(test_tcp_what_was_said_before_a_close_is_heard)
{
    choose_tls(_i);
    for (int round = 0; round < 200; round++) {
        pair_open();
        struct end *a = &sides[0].ends[0], *b = &sides[1].ends[0];
        wire_send(a->conn, "other way", 9, NULL, 0, NULL, NULL); /* not read when the connection is closed */
        wire_send(b->conn, "goodbye", 7, NULL, 0, NULL, NULL);
        if (round % 2)
            turn();
        wire_close(b->conn);
        UNTIL(b->is_closed && a->n_errors);
        ck_assert_uint_eq(a->n_messages, 1);
        side_close(&sides[1]);
        side_close(&sides[0]);
    }
    forget_tls();
}
END_TEST

/* ---------------------------------------------------------------------------- TLS */

/* Connects, and says something from both sides. */
static void meet(void)
{
    side_open(&sides[0], true);
    side_open(&sides[1], false);
    struct end *e = &sides[1].ends[0];
    e->conn = wire_connect(sides[1].wire, sides[0].wire->address, 0, e);
    UNTIL((e->is_open && sides[0].n_ends) || e->n_errors);
    wire_send(e->conn, "one", 3, NULL, 0, NULL, NULL);
    wire_send(sides[0].ends[0].conn, "two", 3, NULL, 0, NULL, NULL);
}

/* a NULL: plain. Nothing that one side says is heard by the other, and both are told soon. */
START_TEST(test_tcp_who_has_another_secret_or_none_is_heard_by_nobody)
{
    static const char *const PAIRS[][2] = {{"a", "b"}, {"a", NULL}, {NULL, "a"}};
    uint64_t begin = wall_ns();
    for (int i = 0; i < 2; i++)
        encrypt[i] = PAIRS[_i][i] ? make_secret(PAIRS[_i][i]) : NULL;
    meet();
    struct end *a = &sides[0].ends[0], *b = &sides[1].ends[0];
    UNTIL(a->n_errors || b->n_errors);
    struct end *first = a->n_errors ? a : b, *other = a->n_errors ? b : a;
    wire_close(first->conn); /* as the protocol does */
    UNTIL(first->is_closed && other->n_errors);
    ck_assert_uint_lt(wall_ns() - begin, 2 * NS_PER_S);
    ck_assert_uint_eq(a->n_messages + b->n_messages, 0);
    side_close(&sides[1]);
    side_close(&sides[0]);
    forget_tls();
}
END_TEST

START_TEST(test_tcp_each_accepted_secret_opens_an_encrypted_connection)
{
    char path[] = "/tmp/tandem-secrets-XXXXXX";
    struct td_error e;
    int fd = mkstemp(path);
    ck_assert_int_eq(dprintf(fd, "new\nold\n"), 8);
    close(fd);
    ck_assert_int_eq(secret_open(NULL, path, NULL, &encrypt[0], &e), TD_OK);
    unlink(path);
    encrypt[1] = make_secret(_i ? "old" : "new");
    meet();
    UNTIL(sides[0].ends[0].n_messages && sides[1].ends[0].n_messages);
    side_close(&sides[1]);
    side_close(&sides[0]);
    forget_tls();
}
END_TEST

START_TEST(test_tcp_bytes_that_are_no_handshake_end_their_connection_alone)
{
    static const uint8_t HELLO[] = {0x16, 3, 1, 0, 200, 1, 0, 0, 196, 3, 3, 9, 9, 9};
    uint8_t noise[5000], prefix[PREFIX];
    for (size_t i = 0; i < sizeof(noise); i++)
        noise[i] = (uint8_t)random_at(7, i, 0);
    choose_tls(true);
    side_open(&sides[0], true);
    sides[0].is_trusting = false;
    put_prefix(prefix, 0, 0);
    int fds[] = {socket_to(&sides[0]), socket_to(&sides[0]), socket_to(&sides[0])};
    UNTIL(sides[0].n_ends == 3);
    ck_assert_int_eq(write(fds[0], noise, sizeof(noise)), sizeof(noise));
    ck_assert_int_eq(write(fds[1], prefix, sizeof(prefix)), sizeof(prefix));
    ck_assert_int_eq(write(fds[2], HELLO, sizeof(HELLO)), sizeof(HELLO)); /* and no more: the proof's time ends it */
    UNTIL(sides[0].ends[0].n_errors + sides[0].ends[1].n_errors >= 2);
    UNTIL(!turn());
    ck_assert_int_eq(wire_arm(sides[0].wire), -1); /* it may sleep */
    close(fds[2]);
    UNTIL(sides[0].ends[0].n_errors + sides[0].ends[1].n_errors + sides[0].ends[2].n_errors == 3);
    side_close(&sides[0]);
    close(fds[0]);
    close(fds[1]);
    forget_tls();
}
END_TEST

/* Somebody on the path: carries bytes between two sockets, counts them, looks for some, and changes one. */
static struct {
    int fds[2];
    uint64_t n, changes_at; /* UINT64_MAX: none */
    bool has_seen;          /* the text went by */
} path;
static const char SEEN[] = "what nobody on the path may read";

static void carry(void)
{
    static uint8_t bytes[1 << 16];
    for (int i = 0; i < 2; i++) {
        ssize_t n = recv(path.fds[i], bytes, sizeof(bytes), MSG_DONTWAIT);
        if (n <= 0)
            continue;
        if (path.changes_at >= path.n && path.changes_at < path.n + (uint64_t)n)
            bytes[path.changes_at - path.n] ^= 0x10;
        path.n += (uint64_t)n;
        path.has_seen |= memmem(bytes, (size_t)n, SEEN, sizeof(SEEN) - 1) != NULL;
        for (ssize_t at = 0, sent; at<n; at += sent> 0 ? sent : 0) {
            sent = send(path.fds[!i], bytes + at, (size_t)(n - at), MSG_NOSIGNAL | MSG_DONTWAIT);
            if (sent < 0 && errno != EAGAIN)
                break;
            if (sent < 0) /* full: the other side has to read */
                wire_progress(sides[0].wire), wire_progress(sides[1].wire);
        }
    }
}

/* Connects sides[1] to sides[0] by such a path. */
static void pair_by_path(uint64_t changes_at)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(a);
    char address[32];
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    ck_assert_int_eq(bind(listener, (struct sockaddr *)&a, sizeof(a)), 0);
    ck_assert_int_eq(listen(listener, 1), 0);
    ck_assert_int_eq(getsockname(listener, (struct sockaddr *)&a, &len), 0);
    snprintf(address, sizeof(address), "127.0.0.1:%u", ntohs(a.sin_port));
    side_open(&sides[0], true);
    side_open(&sides[1], false);
    struct end *e = &sides[1].ends[0];
    e->conn = wire_connect(sides[1].wire, address, 0, e);
    UNTIL((path.fds[0] = accept(listener, NULL, NULL)) >= 0); /* the wire connects in a turn */
    path.fds[1] = socket_to(&sides[0]);
    path.n = 0;
    path.has_seen = false;
    path.changes_at = changes_at;
    close(listener);
    between = carry;
    UNTIL(e->is_open && sides[0].n_ends);
}

static void path_close(void)
{
    between = NULL;
    side_close(&sides[1]);
    side_close(&sides[0]);
    close(path.fds[0]);
    close(path.fds[1]);
    forget_tls();
}

START_TEST(test_tcp_somebody_on_the_path_reads_nothing_that_is_encrypted)
{
    static uint8_t from[300000], to[300000];
    choose_tls(_i);
    memset(from, 7, sizeof(from));
    memcpy(from + 100000, SEEN, sizeof(SEEN));
    pair_by_path(UINT64_MAX);
    sides[0].ends[0].landing = to;
    wire_send(sides[1].ends[0].conn, "h", 1, from, sizeof(from), NULL, NULL);
    UNTIL(sides[0].ends[0].n_payloads == 1);
    ck_assert_mem_eq(from, to, sizeof(from));
    ck_assert(path.has_seen == !_i);
    path_close();
}
END_TEST

START_TEST(test_tcp_a_bit_that_changes_on_the_path_ends_the_connection)
{
    enum { LEN = 64 << 10, ROUNDS = 60 };
    static uint8_t from[LEN], to[LEN];
    for (size_t i = 0; i < LEN; i++)
        from[i] = (uint8_t)random_at(8, i, 0);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        choose_tls(true);
        memset(to, 0, LEN);
        pair_by_path(random_at(9, round, 0) % (LEN + 1000)); /* in the handshake, or in what follows */
        struct end *a = &sides[0].ends[0], *b = &sides[1].ends[0];
        a->landing = to;
        wire_send(b->conn, "h", 1, from, LEN, NULL, NULL);
        UNTIL(a->n_errors || b->n_errors || a->n_payloads);
        ck_assert_uint_eq(a->n_payloads, 0);
        ck_assert_uint_gt(a->n_errors + b->n_errors, 0);
        for (size_t i = 0; i < LEN; i++) /* what has landed is right, and the rest has not */
            ck_assert_msg(to[i] == from[i] || !to[i], "round %u byte %zu", round, i);
        path_close();
    }
}
END_TEST

START_TEST(test_tcp_what_cannot_be_reached_is_an_error_and_a_close_comes_at_any_time)
{
    static const char *const ADDRESSES[] = {"127.0.0.1:1", "no-such-host.invalid:1", "localhost:1", "nonsense",
                                            "255.255.255.255:1"};
    for (int is_early = 0; is_early < 2; is_early++) {
        side_open(&sides[1], false);
        struct end *e = &sides[1].ends[0];
        e->conn = wire_connect(sides[1].wire, ADDRESSES[_i], 0, e);
        wire_send(e->conn, "h", 1, NULL, 0, NULL, NULL); /* sent before the connection is open: lost */
        if (!is_early)
            UNTIL(e->n_errors);
        wire_close(e->conn);
        UNTIL(e->is_closed);
        ck_assert(!e->is_open && (int)e->n_errors == !is_early);
        wire_free(sides[1].wire);
        sides[1].wire = NULL;
    }
}
END_TEST

int main(void)
{
    Suite *s = suite_create("wire_tcp");
    TCase *tc = tcase_create("tcp");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, test_tcp_frames_arrive_whole_and_in_order_however_they_are_cut);
    tcase_add_loop_test(tc, test_tcp_payloads_land_and_messages_between_them_keep_their_order, 0, 4);
    tcase_add_loop_test(tc, test_tcp_what_is_no_frame_ends_its_connection_alone, 0, 4);
    tcase_add_test(tc, test_tcp_the_oldest_strangers_make_room);
    tcase_add_test(tc, test_tcp_without_descriptors_a_connection_is_refused_and_nothing_spins);
    tcase_add_test(tc, test_tcp_that_can_accept_nothing_pauses_and_goes_on);
    tcase_add_loop_test(tc, test_tcp_close_ends_what_is_under_way_once, 0, 4);
    tcase_add_loop_test(tc, test_tcp_what_was_said_before_a_close_is_heard, 0, 2);
    tcase_add_loop_test(tc, test_tcp_who_has_another_secret_or_none_is_heard_by_nobody, 0, 3);
    tcase_add_loop_test(tc, test_tcp_each_accepted_secret_opens_an_encrypted_connection, 0, 2);
    tcase_add_test(tc, test_tcp_bytes_that_are_no_handshake_end_their_connection_alone);
    tcase_add_loop_test(tc, test_tcp_somebody_on_the_path_reads_nothing_that_is_encrypted, 0, 2);
    tcase_add_test(tc, test_tcp_a_bit_that_changes_on_the_path_ends_the_connection);
    tcase_add_loop_test(tc, test_tcp_what_cannot_be_reached_is_an_error_and_a_close_comes_at_any_time, 0, 5);
    suite_add_tcase(s, tc);
    return tap_main(s);
}
