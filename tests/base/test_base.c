#include <fcntl.h>
#include <math.h>
#include <netdb.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/absence.h"
#include "base/clock.h"
#include "base/eventcount.h"
#include "base/fault.h"
#include "base/jobs.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/metrics.h"
#include "base/options.h"
#include "base/process.h"
#include "base/queue.h"
#include "base/random.h"
#include "base/thread.h"
#include "base/ticker.h"
#include "tests/tap.h"

START_TEST(test_status_groups_decide_the_reaction)
{
    ck_assert_int_eq(td_status_group(TD_OK), TD_GROUP_OK);
    ck_assert_int_eq(td_status_group(TD_NOT_YET), TD_GROUP_NOT_YET);
    ck_assert_int_eq(td_status_group(TD_ERR_STALE), TD_GROUP_CALL);
    ck_assert_int_eq(td_status_group(TD_ERR_CHECKSUM), TD_GROUP_PEER);
    ck_assert_int_eq(td_status_group(TD_ERR_IO), TD_GROUP_PROCESS);
    ck_assert_str_eq(td_status_name(TD_ERR_PEER_LOST), "peer_lost");
}
END_TEST

START_TEST(test_log_line_cannot_be_broken_by_a_value)
{
    char text[512] = {0};
    int fds[2];
    ck_assert_int_eq(pipe(fds), 0);
    struct log to_pipe = {.who = "test", .level = LOG_INFO, .fd = fds[1]}, *log = &to_pipe;
    log_info(log, "event req=%s", "a\nforged error");
    log_debug(log, "not shown");
    close(fds[1]);
    ssize_t n = read(fds[0], text, sizeof(text) - 1);
    ck_assert_int_gt(n, 0);
    ck_assert_ptr_eq(strchr(text, '\n'), text + n - 1);
    ck_assert_ptr_nonnull(strstr(text, "test info event req=a forged error"));
    ck_assert_ptr_null(strstr(text, "not shown"));
}
END_TEST

START_TEST(test_log_lines_that_strangers_cause_are_limited_and_counted)
{
    char text[8192] = "";
    int fds[2];
    ck_assert(!pipe2(fds, O_NONBLOCK));
    const struct log to_pipe = {.who = "router", .level = LOG_INFO, .fd = fds[1]}, *log = &to_pipe;
    struct log_limit limit = {0};
    uint32_t n_allowed = 0;
    for (int i = 0; i < 1000; i++)
        n_allowed += log_limit_allows(&limit, log);
    ck_assert_uint_ge(n_allowed, LOG_LIMITED);
    ck_assert_uint_le(n_allowed, 2 * LOG_LIMITED); /* a period may have ended meanwhile */
    uint32_t n_asked = atomic_load(&limit.n);
    while (read(fds[0], text, sizeof(text)) > 0)
        ;
    atomic_fetch_sub(&limit.window, 1); /* the period is over */
    ck_assert(log_limit_allows(&limit, log));
    ssize_t n = read(fds[0], text, sizeof(text) - 1);
    ck_assert_int_gt(n, 0);
    text[n] = 0;
    char expected[64];
    snprintf(expected, sizeof(expected), "left out n=%u", n_asked - LOG_LIMITED);
    ck_assert_msg(strstr(text, expected) != NULL, "%s", text);
    for (int i = 0; i < 500; i++) /* a place in the code; a second one has a limit of its own */
        log_limited(log, LOG_WARN, "wrong proof from=%d", i);
    n = read(fds[0], text, sizeof(text) - 1);
    ck_assert_int_gt(n, 0);
    text[n] = 0;
    uint32_t n_lines = 0;
    for (const char *at = text; (at = strchr(at, '\n')); at++)
        n_lines++;
    ck_assert_uint_ge(n_lines, LOG_LIMITED);
    ck_assert_uint_le(n_lines, 2 * LOG_LIMITED + 1);
    close(fds[0]);
    close(fds[1]);
}
END_TEST

START_TEST(test_log_word_is_one_word_whatever_it_is_made_of)
{
    char word[LOG_WORD_BYTES];
    unsigned char all[LOG_WORD_MAX + 8];
    ck_assert_str_eq(log_word("abc-7/x.Y", 9, word), "abc-7/x.Y");
    ck_assert_str_eq(log_word("a b='\"\\\n\x7f\xc3", 10, word), "a\\x20b\\x3d\\x27\\x22\\x5c\\x0a\\x7f\\xc3");
    ck_assert_str_eq(log_word(NULL, 0, word), "");
    /* Each byte takes four characters, and only the first LOG_WORD_MAX bytes count. */
    memset(all, 0, sizeof(all));
    ck_assert_uint_eq(strlen(log_word(all, sizeof(all), word)), LOG_WORD_BYTES - 1);
}
END_TEST

enum { TURN = 100 };

START_TEST(test_absence_counts_one_turn_of_a_long_gap_and_all_of_short_ones)
{
    struct clock c;
    struct absence a;
    clock_init_virtual(&c, 1000);
    absence_init(&a, &c, TURN);
    ck_assert_uint_eq(absence_now(&a, 0), 1000);
    clock_advance(&c, TURN);
    ck_assert_uint_eq(absence_now(&a, 0), 1100); /* late, but not absent */
    clock_advance(&c, 10000);
    ck_assert_uint_eq(absence_now(&a, 0), 1200); /* absent: only one turn counts */
    clock_advance(&c, 7);
    ck_assert_uint_eq(absence_now(&a, 0), 1207);
    ck_assert_uint_eq(absence_of(&a, clock_now(&c)), 1207);
    ck_assert_uint_eq(absence_of(&a, clock_now(&c) + 50), 1257);
    ck_assert_uint_eq(absence_of(&a, UINT64_MAX), UINT64_MAX);
    ck_assert_uint_eq(absence_of(&a, 5), 0);
}
END_TEST

START_TEST(test_absence_is_not_what_the_thread_meant_to_sleep)
{
    struct clock c;
    struct absence a;
    clock_init_virtual(&c, 1000);
    absence_init(&a, &c, TURN);
    clock_advance(&c, 5000);
    ck_assert_uint_eq(absence_now(&a, 6000), 6000);
    clock_advance(&c, 5000); /* stopped while it slept until 7000 */
    ck_assert_uint_eq(absence_now(&a, 7000), 7000 + TURN);
    clock_advance(&c, 30);
    ck_assert_uint_eq(absence_now(&a, UINT64_MAX), 7130);
    clock_advance(&c, 50000);
    ck_assert_uint_eq(absence_now(&a, UINT64_MAX), 57130); /* it meant to sleep that long: no absence */
}
END_TEST

START_TEST(test_absence_that_never_ends_still_lets_others_fall_silent)
{
    struct clock c;
    struct absence a;
    clock_init_virtual(&c, 0);
    absence_init(&a, &c, TURN);
    uint64_t began = absence_now(&a, 0);
    for (int i = 0; i < 10; i++) {
        clock_advance(&c, 50 * TURN);
        absence_now(&a, 0);
    }
    ck_assert_uint_eq(absence_now(&a, 0) - began, 10 * TURN);
}
END_TEST

START_TEST(test_absence_counts_no_time_in_which_nothing_can_be_heard)
{
    struct clock c;
    struct absence a;
    clock_init_virtual(&c, 1000);
    absence_init(&a, &c, TURN);
    clock_advance(&c, 60);
    absence_deaf(&a, true); /* the time before it counts */
    ck_assert_uint_eq(absence_now(&a, 0), 1060);
    for (int i = 0; i < 50; i++) {
        clock_advance(&c, 40);
        absence_deaf(&a, true);
        ck_assert_uint_eq(absence_now(&a, 0), 1060);
    }
    clock_advance(&c, 5000); /* and this thread is away, too */
    absence_deaf(&a, false);
    ck_assert_uint_eq(absence_now(&a, 0), 1060);
    clock_advance(&c, 30);
    ck_assert_uint_eq(absence_now(&a, 0), 1090);
    clock_advance(&c, 10 * TURN);
    ck_assert_uint_eq(absence_now(&a, 0), 1090 + TURN);
}
END_TEST

START_TEST(test_absence_before_turns_begin_is_not_logged)
{
    struct clock c;
    struct absence a;
    char line[256] = "";
    int fds[2];
    ck_assert_int_eq(pipe2(fds, O_NONBLOCK), 0);
    const struct log log = {.who = "test", .level = LOG_WARN, .fd = fds[1]};
    clock_init_virtual(&c, 1000);
    absence_init(&a, &c, TURN);
    clock_advance(&c, 50 * TURN); /* a process opens */
    absence_log(&a, &log);
    clock_advance(&c, TURN);
    absence_now(&a, 0);
    ck_assert_int_eq(read(fds[0], line, sizeof(line) - 1), -1);
    clock_advance(&c, 50 * TURN);
    absence_now(&a, 0);
    ck_assert_int_gt(read(fds[0], line, sizeof(line) - 1), 0);
    ck_assert_ptr_nonnull(strstr(line, "stopped or starved"));
    close(fds[0]);
    close(fds[1]);
}
END_TEST

START_TEST(test_virtual_clock_moves_only_when_told)
{
    struct clock c;
    clock_init_virtual(&c, 5);
    ck_assert_uint_eq(clock_now(&c), 5);
    clock_advance(&c, 10);
    ck_assert_uint_eq(clock_now(&c), 15);
}
END_TEST

struct item {
    struct mail mail;
    int sender, number;
};

struct sender {
    struct mailbox *box;
    int id;
};

static void *send_items(void *arg)
{
    struct sender *s = arg;
    for (int i = 0; i < 10000; i++) {
        struct item *it = mem_zalloc(sizeof(*it));
        it->sender = s->id;
        it->number = i;
        mailbox_push(s->box, &it->mail);
    }
    return NULL;
}

START_TEST(test_mailbox_keeps_each_senders_order_and_loses_nothing)
{
    struct mailbox box;
    struct sender senders[3];
    pthread_t threads[3];
    int next[3] = {0}, total = 0;
    mailbox_init(&box);
    for (int i = 0; i < 3; i++) {
        senders[i] = (struct sender){&box, i};
        threads[i] = thread_start("sender", send_items, &senders[i]);
    }
    while (total < 30000) {
        mailbox_wait(&box, 1000);
        for (struct mail *m = mailbox_take(&box), *n; m; m = n, total++) {
            struct item *it = (struct item *)m;
            n = m->next;
            ck_assert_int_eq(it->number, next[it->sender]++);
            free(it);
        }
    }
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    mailbox_fini(&box);
}
END_TEST

struct ping {
    struct eventcount turns[2]; /* [0] the test's turn, [1] the thread's */
    uint32_t ball;
};

static void *answer(void *arg)
{
    struct ping *p = arg;
    for (uint32_t i = 0; i < 2000; i++) {
        eventcount_wait(&p->turns[0], i);
        p->ball++;
        eventcount_raise(&p->turns[1]);
    }
    return NULL;
}

START_TEST(test_eventcount_wakes_who_waits_and_shows_what_was_written)
{
    struct ping p = {.ball = 0};
    pthread_t thread = thread_start("answer", answer, &p);
    for (uint32_t i = 0; i < 2000; i++) {
        p.ball++;
        eventcount_raise(&p.turns[0]);
        eventcount_wait(&p.turns[1], i);
        if (p.ball != 2 * (i + 1)) /* no assertion here: libcheck writes each one to a file */
            ck_abort_msg("%u after %u turns", p.ball, i + 1);
    }
    pthread_join(thread, NULL);
    ck_assert_uint_eq(eventcount_read(&p.turns[1]), 2000);
}
END_TEST

/* ---------------------------------------------------------------- options */

struct values {
    const char *name, *mode, *listen, *others, *dir;
    bool fast;
    int64_t count, size, wait;
    double share, limit;
};

#define AT(m) offsetof(struct values, m)
static const struct option TABLE[] = {
    {"name", OPT_STRING, AT(name), "nobody", NULL, 0, 0, "a name"},
    {"mode", OPT_CHOICE, AT(mode), "auto", "auto|on|off", 0, 0, "a mode"},
    {"fast", OPT_BOOL, AT(fast), NULL, NULL, 0, 0, "hurry"},
    {"count", OPT_INT, AT(count), "3", NULL, 1, 10, "how many"},
    {"size", OPT_BYTES, AT(size), "1K", NULL, 0, 0, "how large"},
    {"wait", OPT_MS, AT(wait), "250ms", NULL, 0, 0, "how long"},
    {"share", OPT_DOUBLE, AT(share), "0.5", NULL, 0, 1, "of all"},
    {"limit", OPT_LIMIT_MS, AT(limit), "0", NULL, 0, 3.6e6, "how long at most"},
    {"listen", OPT_ADDRESS, AT(listen), "127.0.0.1:1", "HOST:PORT", 0, 0, "where"},
    {"dir", OPT_STRING, AT(dir), NULL, "DIR", 0, 0, "where files are"},
    {"others", OPT_ADDRESS, AT(others), NULL, "HOST[:PORT],...", 0, 0, "where others are"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};
static const struct options OPTIONS = {"test", "[options]", "About.", "TANDEM_TEST", TABLE};

static enum td_status parse(struct values *v, struct td_error *e, const char *const *args)
{
    static char *strings; /* texts that v points to, until the next parse */
    char *argv[16] = {(char *)(uintptr_t) "test"};
    int argc = 1;
    enum options_action action;
    while (*args)
        argv[argc++] = (char *)(uintptr_t)*args++;
    *v = (struct values){0};
    free(strings);
    strings = NULL;
    return options_parse(&OPTIONS, argc, argv, v, NULL, NULL, &strings, &action, e);
}
#define PARSE(v, e, ...) parse(v, e, (const char *const[]){__VA_ARGS__, NULL})

START_TEST(test_options_flag_beats_environment_beats_file_beats_default)
{
    struct values v;
    struct td_error e = {{0}};
    char path[] = "/tmp/tandem-options-XXXXXX";
    int fd = mkstemp(path);
    const char text[] = "{\"count\": 4, \"size\": \"2M\", \"name\": \"file\", \"fast\": true}";
    ck_assert_int_eq(write(fd, text, sizeof(text) - 1), sizeof(text) - 1);
    close(fd);
    setenv("TANDEM_TEST_NAME", "environment", 1);
    setenv("TANDEM_TEST_COUNT", "5", 1);
    ck_assert_msg(PARSE(&v, &e, "--count=6", "--config", path) == TD_OK, "%s", e.text);
    unlink(path);
    ck_assert_int_eq(v.count, 6);
    ck_assert_str_eq(v.name, "environment");
    ck_assert_int_eq(v.size, 2 << 20);
    ck_assert(v.fast);
    ck_assert_int_eq(v.wait, 250);
    ck_assert_double_eq(v.share, 0.5);
}
END_TEST

START_TEST(test_options_manual_page_escapes_what_roff_would_read)
{
    static const struct option RISKY[] = {
        {"dotted-name", OPT_STRING, AT(name), ".5", "a|b", 0, 0,
         ".first 'quoted' back\\slash \"two\"\n.second --flag `^~"},
        {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
    };
    const struct options o = {
        "tandem test", "[options]", "'Quoted.' First 1.5 of e.g.x. Second.", NULL, RISKY, NULL, NULL, 1};
    char *page = NULL;
    size_t len;
    FILE *f = open_memstream(&page, &len);
    options_print_man(&o, f);
    fclose(f);
    ck_assert_msg(strstr(page, "\ntandem\\-test \\- \\(aqQuoted.\\(aq First 1.5 of e.g.x\n"), "%s", page);
    ck_assert_msg(strstr(page, "\n\\fB\\-\\-dotted\\-name\\fR \\fIa|\\:b\\fR\n"), "%s", page);
    ck_assert_msg(
        strstr(page,
               "\n\\&.first \\(aqquoted\\(aq back\\eslash \\(dqtwo\\(dq .second \\-\\-flag \\(ga\\(ha\\(ti [\\&.5]\n"),
        "%s", page);
    free(page);
}
END_TEST

START_TEST(test_options_limits_keep_fractions_of_a_millisecond)
{
    struct values v;
    struct td_error e = {{0}};
    ck_assert_msg(PARSE(&v, &e, "--limit", "9.3", "--wait", "0.29s", "--size", "1.1K") == TD_OK, "%s", e.text);
    ck_assert_double_eq(v.limit, 9.3);
    ck_assert_int_eq(v.wait, 290);
    ck_assert_int_eq(v.size, 1126);
    ck_assert_msg(PARSE(&v, &e, "--limit", "0.0004s") == TD_OK && fabs(v.limit - 0.4) < 1e-12, "%f", v.limit);
    ck_assert_msg(PARSE(&v, &e, "--limit", "0") == TD_OK && !(v.limit > 0), "%f", v.limit);
    ck_assert_msg(PARSE(&v, &e, "--limit", "0.001") == TD_OK, "%s", e.text);
}
END_TEST

START_TEST(test_options_bad_values_are_refused_by_name)
{
    static const char *const BAD[][2] = {
        {"--count", "x"},       {"--count", "11"},     {"--count", "0"},         {"--count", "2.5"},
        {"--mode", "maybe"},    {"--size", "5Q"},      {"--size", "-1"},         {"--wait", "5 days"},
        {"--share", "nan"},     {"--share", "1.5"},    {"--wait", "9.3"},        {"--wait", "0.4"},
        {"--size", "0.4"},      {"--limit", "nan"},    {"--limit", "-1"},        {"--limit", "0.0005"},
        {"--limit", "1 day"},   {"--limit", "2h"},     {"--bogus", "1"},         {"--no-count", ""},
        {"--fast=7", ""},       {"--config", "/nope"}, {"--listen", "1.2.3.4:"}, {"--listen", "[::1]:"},
        {"--listen", ":99999"}, {"--listen", "host"},  {"--others", "a:1,b:"},   {"--dir=", ""},
        {"--help=html", ""},
    };
    for (size_t i = 0; i < sizeof(BAD) / sizeof(BAD[0]); i++) {
        struct values v;
        struct td_error e = {{0}};
        enum td_status s = *BAD[i][1] ? PARSE(&v, &e, BAD[i][0], BAD[i][1]) : PARSE(&v, &e, BAD[i][0]);
        ck_assert_int_eq(s, TD_ERR_INVALID);
        ck_assert_msg(!strncmp(e.text, BAD[i][0], 5), "'%s' for %s", e.text, BAD[i][0]);
    }
}
END_TEST

START_TEST(test_options_addresses_need_no_port_where_help_says_so)
{
    struct values v;
    struct td_error e = {{0}};
    ck_assert_msg(PARSE(&v, &e, "--listen", "[::1]:0", "--others", "a,::1,fe80::,[::1],b:2") == TD_OK, "%s", e.text);
    ck_assert_msg(PARSE(&v, &e, "--listen", "unix:/tmp/x") == TD_OK, "%s", e.text);
}
END_TEST

START_TEST(test_options_say_why_a_config_file_cannot_be_read)
{
    struct values v;
    struct td_error e = {{0}};
    char path[] = "/tmp/tandem-options-XXXXXX";
    int fd = mkstemp(path);
    ck_assert_int_eq(ftruncate(fd, 2 << 20), 0);
    close(fd);
    ck_assert_int_eq(PARSE(&v, &e, "--config", path), TD_ERR_INVALID);
    ck_assert_msg(!!strstr(e.text, "larger than 1048576 bytes"), "%s", e.text);
    unlink(path);
    ck_assert_int_eq(PARSE(&v, &e, "--config", "/nope"), TD_ERR_INVALID);
    ck_assert_str_eq(e.text, "--config /nope: No such file or directory");
}
END_TEST

START_TEST(test_metrics_render_prometheus_text)
{
    static const struct metric_info INFO[] = {{METRIC_COUNTER, "a_total", "A."}, {METRIC_SECONDS, "b_seconds", "B."}};
    struct metrics *m = metrics_open();
    struct metrics_set *x = metrics_add(m, INFO, 2, "peer=\"x\""), *y = metrics_add(m, INFO, 2, "peer=\"y\"");
    struct bytes b = {0};
    metrics_inc(x, 0, 2);
    metrics_inc(y, 0, 3);
    metrics_observe_ns(x, 1, 3000000);
    static const struct metric_info OTHER[] = {{METRIC_SECONDS, "v:b_seconds", "B."}, {METRIC_COUNTER, "v:a", "A."}};
    static const uint32_t IDS[] = {1, 0};
    metrics_alias(m, x, OTHER, IDS, 2, "model=\"m\"");
    metrics_render(m, &b);
    ck_assert_ptr_nonnull(strstr(b.data, "# TYPE v:a counter\nv:a{model=\"m\"} 2\n"));
    ck_assert_ptr_nonnull(strstr(b.data, "v:b_seconds_bucket{model=\"m\",le=\"0.005\"} 1\n"));
    ck_assert_ptr_nonnull(strstr(b.data, "# TYPE a_total counter\na_total{peer=\"x\"} 2\na_total{peer=\"y\"} 3\n"));
    ck_assert_ptr_nonnull(strstr(b.data, "b_seconds_bucket{peer=\"x\",le=\"0.002\"} 0\n"));
    ck_assert_ptr_nonnull(strstr(b.data, "b_seconds_bucket{peer=\"x\",le=\"0.005\"} 1\n"));
    ck_assert_ptr_nonnull(strstr(b.data, "b_seconds_count{peer=\"x\"} 1\n"));
    bytes_free(&b);
    metrics_close(m);
}
END_TEST

/* Connects to the port of an address that metrics are served at, by the host given, and asks for them. */
static bool metrics_come(const char *address, int family, const char *host)
{
    struct addrinfo hints = {.ai_family = family, .ai_socktype = SOCK_STREAM}, *at = NULL;
    const char ask[] = "GET /metrics HTTP/1.0\r\n\r\n";
    char got[16] = "";
    ck_assert_int_eq(getaddrinfo(host, strrchr(address, ':') + 1, &hints, &at), 0);
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool is_fine = fd >= 0 && !connect(fd, at->ai_addr, at->ai_addrlen) &&
                   send(fd, ask, sizeof(ask) - 1, MSG_NOSIGNAL) > 0 && recv(fd, got, 12, MSG_WAITALL) == 12;
    close(fd);
    freeaddrinfo(at);
    return is_fine && !strcmp(got + 8, " 200");
}

START_TEST(test_metrics_are_served_at)
{
    static const struct {
        const char *listen, *told, *host;
        int family;
    } CASES[] = {
        {"127.0.0.1:0", "127.0.0.1:", "127.0.0.1", AF_INET},
        {"localhost:0", "localhost:", "127.0.0.1", AF_INET}, /* it has both, in many a hosts file */
        {":0", ":", "127.0.0.1", AF_INET},
        {"[::1]:0", "[::1]:", "::1", AF_INET6},
    };
    struct metrics *m = metrics_open();
    struct metrics_http *h;
    struct td_error e;
    char address[64];
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        if (CASES[i].family == AF_INET6 && access("/proc/net/if_inet6", F_OK))
            continue;
        ck_assert_msg(metrics_http_open(m, CASES[i].listen, &h, address, &e) == TD_OK, "%s", e.text);
        ck_assert_msg(!strncmp(address, CASES[i].told, strlen(CASES[i].told)), "%s", address);
        ck_assert_msg(metrics_come(address, CASES[i].family, CASES[i].host), "%s", CASES[i].listen);
        metrics_http_close(h);
    }
    ck_assert_int_eq(metrics_http_open(m, "::1", &h, address, &e), TD_ERR_INVALID); /* host ":", port "1" */
    ck_assert_int_eq(metrics_http_open(m, "9100", &h, address, &e), TD_ERR_INVALID);
    metrics_close(m);
}
END_TEST

START_TEST(test_random_at_is_repeatable_and_even)
{
    double sum = 0;
    ck_assert_uint_eq(random_at(1, 2, 3), random_at(1, 2, 3));
    ck_assert_uint_ne(random_at(1, 2, 3), random_at(1, 3, 2));
    for (uint64_t i = 0; i < 100000; i++)
        sum += random_unit(random_at(42, 0, i));
    ck_assert_double_eq_tol(sum / 100000, 0.5, 0.005);
}
END_TEST

START_TEST(test_file_read_refuses_what_is_too_large)
{
    char *data;
    size_t n;
    struct td_error e;
    ck_assert_int_eq(file_read("/proc/self/exe", 1000, &data, &n, &e), TD_ERR_NO_SPACE);
    ck_assert_int_eq(file_read("/nonexistent", 1000, &data, &n, &e), TD_ERR_NOT_FOUND);
}
END_TEST

static size_t resident_bytes(void)
{
    long total = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    ck_assert_ptr_nonnull(f);
    ck_assert_int_eq(fscanf(f, "%ld %ld", &total, &resident), 2);
    fclose(f);
    return (size_t)resident * (size_t)sysconf(_SC_PAGESIZE);
}

START_TEST(test_freed_memory_returns_also_if_it_came_and_went_between_two_calls)
{
    enum { N = 2000, BYTES = 65536 };
    static void *held[N];
    if (getenv("TANDEM_SANITIZE")) /* their allocators keep what was freed */
        return;
    mem_return_freed(1);
    size_t before = resident_bytes();
    for (uint64_t i = 1; i < 4; i++) {
        for (int k = 0; k < N; k++)
            held[k] = memset(mem_zalloc(BYTES), 1, BYTES);
        void *last = mem_zalloc(BYTES); /* without it the allocator would return all by itself */
        for (int k = 0; k < N; k++)
            free(held[k]);
        ck_assert_uint_gt(resident_bytes(), before + N * BYTES / 2);
        mem_return_freed(1 + i * 11000000000ull);
        ck_assert_uint_lt(resident_bytes(), before + (32 << 20));
        free(last);
    }
}
END_TEST

START_TEST(test_memory_that_is_freed_after_some_was_returned_is_returned)
{
    enum { N = 2000, LEFT = 400, BYTES = 65536 }; /* what is freed later is less than 32 MiB */
    static void *held[N];
    if (getenv("TANDEM_SANITIZE")) /* their allocators keep what was freed */
        return;
    mem_return_freed(1);
    size_t before = resident_bytes();
    for (int k = 0; k < N; k++)
        held[k] = memset(mem_zalloc(BYTES), 1, BYTES);
    void *last = mem_zalloc(BYTES); /* without it the allocator would return all by itself */
    for (int k = LEFT; k < N; k++)
        free(held[k]);
    mem_return_freed(1 + 11000000000ull);
    for (int k = 0; k < LEFT; k++)
        free(held[k]);
    ck_assert_uint_gt(resident_bytes(), before + LEFT * BYTES / 2);
    mem_return_freed(1 + 2 * 11000000000ull);
    ck_assert_uint_lt(resident_bytes(), before + LEFT * BYTES / 2);
    free(last);
}
END_TEST

START_TEST(test_faults_happen_as_often_as_the_script_says_and_repeat)
{
    struct td_error e;
    struct faults *a, *b, *c;
    const char *script = "seed=3 wire.payload:corrupt=0.1 wire.payload:delay=0.2/7ms disk.read:fail@5-6 ";
    ck_assert_int_eq(faults_open(script, NULL, &a, &e), TD_OK);
    ck_assert_int_eq(faults_open(script, NULL, &b, &e), TD_OK);
    ck_assert_int_eq(faults_open("seed=4 wire.payload:corrupt=0.1 wire.payload:delay=0.2/7ms", NULL, &c, &e), TD_OK);
    int n_other = 0;
    for (int i = 1; i <= 10000; i++) {
        struct fault x = faults_draw(a, FAULT_WIRE_PAYLOAD), y = faults_draw(b, FAULT_WIRE_PAYLOAD);
        ck_assert(x.kind == y.kind && x.bits == y.bits);
        if (x.kind == FAULT_DELAY)
            ck_assert_uint_eq(x.delay_ns, 7 * NS_PER_MS);
        n_other += faults_draw(c, FAULT_WIRE_PAYLOAD).kind != x.kind;
        enum fault_kind read = faults_draw(a, FAULT_DISK_READ).kind;
        ck_assert_int_eq(read, i == 5 || i == 6 ? FAULT_FAIL : FAULT_NONE);
    }
    uint64_t n = faults_count(a, FAULT_WIRE_PAYLOAD, FAULT_CORRUPT);
    ck_assert(n > 900 && n < 1100);
    n = faults_count(a, FAULT_WIRE_PAYLOAD, FAULT_DELAY);
    ck_assert(n > 1650 && n < 1950); /* a fifth of the remaining nine tenths */
    ck_assert_int_gt(n_other, 1000);
    faults_close(a);
    faults_close(b);
    faults_close(c);
}
END_TEST

START_TEST(test_faults_script_that_makes_no_sense_is_refused_by_its_word)
{
    static const char *const BAD[] = {"wire.payload",
                                      "wire.payload:drop",
                                      "disk.read:corrupt=2",
                                      "wire.message:delay=1/",
                                      "wire.message:delay=1/5m",
                                      "wire.connect:fail@0",
                                      "wire.connect:fail@5-3",
                                      "seed=x",
                                      "disk.write:fail",
                                      "wire.message:drop=0.1x",
                                      "rpc.message:corrupt",
                                      "disk.read:full",
                                      "disk.delete:lie"};
    for (size_t i = 0; i < sizeof(BAD) / sizeof(BAD[0]); i++) {
        struct td_error e;
        struct faults *f;
        char script[128];
        snprintf(script, sizeof(script), "wire.connect:fail=0.5 %s", BAD[i]);
        ck_assert_msg(faults_open(script, NULL, &f, &e) == TD_ERR_INVALID, "%s", BAD[i]);
        ck_assert_ptr_nonnull(strstr(e.text, BAD[i]));
        ck_assert_ptr_null(f);
    }
    struct faults *none = (struct faults *)&none;
    ck_assert_int_eq(faults_open("  ", NULL, &none, NULL), TD_OK);
    ck_assert_ptr_null(none);
    ck_assert_int_eq(faults_draw(none, FAULT_DISK_PUT).kind, FAULT_NONE);
}
END_TEST

START_TEST(test_faults_of_a_disk_that_is_full_meet_puts_deletes_and_flushes)
{
    static const enum fault_site SITES[] = {FAULT_DISK_PUT, FAULT_DISK_DELETE, FAULT_DISK_FLUSH};
    struct log log = {.who = "test", .level = LOG_ERROR};
    struct faults *f;
    struct td_error e;
    ck_assert_int_eq(faults_open("disk.put:full@2 disk.delete:full@2 disk.flush:full@2", &log, &f, &e), TD_OK);
    for (int i = 0; i < 3; i++) {
        ck_assert_int_eq(faults_draw(f, SITES[i]).kind, FAULT_NONE);
        ck_assert_int_eq(faults_draw(f, SITES[i]).kind, FAULT_FULL);
        ck_assert_uint_eq(faults_count(f, SITES[i], FAULT_FULL), 1);
    }
    faults_close(f);
}
END_TEST

/* A script in a file that is replaced in one step, as tandem replay does it. */
struct script {
    char path[64], fresh[72], option[65];
};

static struct script script_new(void)
{
    struct script s = {.path = "/tmp/tandem-faults-XXXXXX"};
    close(mkstemp(s.path));
    unlink(s.path);
    snprintf(s.fresh, sizeof(s.fresh), "%s.new", s.path);
    snprintf(s.option, sizeof(s.option), "@%s", s.path);
    return s;
}

static void script_write(const struct script *s, const char *text)
{
    FILE *f = fopen(s->fresh, "w");
    ck_assert_ptr_nonnull(f);
    ck_assert_int_ge(fputs(text, f), 0);
    fclose(f);
    ck_assert_int_eq(rename(s->fresh, s->path), 0);
}

START_TEST(test_faults_of_a_file_change_when_it_is_read_again)
{
    struct script s = script_new();
    struct faults *f;
    ck_assert_int_eq(faults_open(s.option, NULL, &f, NULL), TD_OK);
    ck_assert_ptr_nonnull(f); /* no file yet: no faults yet */
    ck_assert_int_eq(faults_draw(f, FAULT_DISK_PUT).kind, FAULT_NONE);
    faults_reload(f);
    ck_assert_int_eq(faults_draw(f, FAULT_DISK_PUT).kind, FAULT_NONE);
    script_write(&s, "disk.put:fail\n");
    ck_assert_int_eq(faults_draw(f, FAULT_DISK_PUT).kind, FAULT_NONE);
    faults_reload(f);
    ck_assert_int_eq(faults_draw(f, FAULT_DISK_PUT).kind, FAULT_FAIL);
    script_write(&s, "wire.connect:fail disk.put:delay/3ms@6-7");
    faults_reload(f);
    for (int n = 5; n <= 8; n++) { /* the reload does not reset the count of operations */
        struct fault fault = faults_draw(f, FAULT_DISK_PUT);
        ck_assert_int_eq(fault.kind, n == 6 || n == 7 ? FAULT_DELAY : FAULT_NONE);
        ck_assert_uint_eq(fault.delay_ns, fault.kind ? 3 * NS_PER_MS : 0);
    }
    ck_assert_int_eq(faults_draw(f, FAULT_WIRE_CONNECT).kind, FAULT_FAIL);
    unlink(s.path);
    faults_reload(f);
    ck_assert_int_eq(faults_draw(f, FAULT_WIRE_CONNECT).kind, FAULT_NONE);
    ck_assert_uint_eq(faults_count(f, FAULT_DISK_PUT, FAULT_FAIL), 1); /* nor that of faults */
    ck_assert_uint_eq(faults_count(f, FAULT_DISK_PUT, FAULT_DELAY), 2);
    faults_close(f);
}
END_TEST

START_TEST(test_faults_file_that_makes_no_sense_changes_nothing)
{
    struct script s = script_new();
    struct faults *f;
    struct td_error e;
    char said[4096] = "", blanks[20000];
    int fds[2];
    ck_assert_int_eq(pipe(fds), 0);
    const struct log to_pipe = {.who = "test", .level = LOG_WARN, .fd = fds[1]};
    script_write(&s, "disk.read:sometimes");
    ck_assert_int_eq(faults_open(s.option, NULL, &f, &e), TD_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(e.text, "'disk.read:sometimes'"));
    script_write(&s, "disk.read:fail");
    ck_assert_int_eq(faults_open(s.option, &to_pipe, &f, NULL), TD_OK);
    script_write(&s, "disk.read:corrupt disk.read:sometimes");
    faults_reload(f);
    ck_assert_int_eq(faults_draw(f, FAULT_DISK_READ).kind, FAULT_FAIL);
    memset(blanks, ' ', sizeof(blanks) - 1);
    blanks[sizeof(blanks) - 1] = 0;
    script_write(&s, blanks);
    faults_reload(f);
    ck_assert_int_eq(faults_draw(f, FAULT_DISK_READ).kind, FAULT_FAIL);
    ck_assert_int_gt(read(fds[0], said, sizeof(said) - 1), 0);
    ck_assert_ptr_nonnull(strstr(said, "'disk.read:sometimes'"));
    ck_assert_ptr_nonnull(strstr(said, "larger than"));
    close(fds[0]);
    close(fds[1]);
    unlink(s.path);
    faults_close(f);
    faults_reload(NULL);
    ck_assert_int_eq(faults_open("disk.read:fail", NULL, &f, NULL), TD_OK);
    faults_reload(f); /* no file: nothing changes */
    ck_assert_int_eq(faults_draw(f, FAULT_DISK_READ).kind, FAULT_FAIL);
    faults_close(f);
}
END_TEST

static void *draw_many(void *arg)
{
    for (int i = 0; i < 50000; i++) {
        enum fault_kind kind = faults_draw(arg, FAULT_RPC_MESSAGE).kind;
        ck_assert(kind == FAULT_DROP || kind == FAULT_FAIL);
    }
    return NULL;
}

static void *reload_many(void *arg)
{
    for (int i = 0; i < 200; i++)
        faults_reload(arg);
    return NULL;
}

START_TEST(test_faults_are_drawn_by_some_threads_while_others_reload)
{
    struct script s = script_new();
    struct faults *f;
    pthread_t threads[4];
    script_write(&s, "rpc.message:drop");
    ck_assert_int_eq(faults_open(s.option, NULL, &f, NULL), TD_OK);
    for (int i = 0; i < 4; i++)
        threads[i] = thread_start("faults", i < 2 ? draw_many : reload_many, f);
    for (int i = 0; i < 200; i++)
        script_write(&s, i % 2 ? "rpc.message:drop" : "seed=2 rpc.message:fail");
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    ck_assert_uint_eq(faults_count(f, FAULT_RPC_MESSAGE, FAULT_DROP) + faults_count(f, FAULT_RPC_MESSAGE, FAULT_FAIL),
                      100000);
    faults_reload(f); /* the last written script is in force */
    ck_assert_int_eq(faults_draw(f, FAULT_RPC_MESSAGE).kind, FAULT_DROP);
    unlink(s.path);
    faults_close(f);
}
END_TEST

START_TEST(test_faults_of_a_file_are_exported_before_they_are_made)
{
    struct script s = script_new();
    struct faults *f;
    struct metrics *m = metrics_open();
    struct bytes b = {0};
    ck_assert_int_eq(faults_open(s.option, NULL, &f, NULL), TD_OK);
    faults_export(f, m);
    script_write(&s, "disk.put:fail");
    faults_reload(f);
    faults_draw(f, FAULT_DISK_PUT);
    metrics_render(m, &b);
    ck_assert_ptr_nonnull(strstr(b.data, "tandem_faults_total{site=\"disk.put\",kind=\"fail\"} 1\n"));
    ck_assert_ptr_nonnull(strstr(b.data, "tandem_faults_total{site=\"wire.connect\",kind=\"delay\"} 0\n"));
    ck_assert_ptr_null(strstr(b.data, "site=\"disk.put\",kind=\"drop\"")); /* a put can't be dropped */
    ck_assert_ptr_null(strstr(b.data, "kind=\"none\""));
    unlink(s.path);
    bytes_free(&b);
    faults_close(f);
    metrics_close(m);
}
END_TEST

/* ---------------------------------------------------------------- signals */

struct signals_seen {
    _Atomic int n_stop, n_reload;
    sem_t any;
};

static void on_stop(void *user)
{
    struct signals_seen *seen = user;
    seen->n_stop++;
    sem_post(&seen->any);
}

static void on_reload(void *user)
{
    struct signals_seen *seen = user;
    seen->n_reload++;
    sem_post(&seen->any);
}

static void wait_for_one(struct signals_seen *seen)
{
    struct timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += 10;
    ck_assert_int_eq(sem_timedwait(&seen->any, &deadline), 0);
}

static void wait_until_taken(int sig)
{
    sigset_t pending;
    for (int i = 0; i < 10000 && !sigpending(&pending) && sigismember(&pending, sig); i++)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    ck_assert(!sigismember(&pending, sig));
}

START_TEST(test_signals_stop_and_reload)
{
    struct signals_seen seen = {0};
    sem_init(&seen.any, 0, 0);
    struct process_signals *p = process_signals_open("test");
    kill(getpid(), SIGUSR1); /* it stays pending until somebody wants it */
    process_on_signals(p, on_stop, on_reload, &seen);
    wait_for_one(&seen);
    kill(getpid(), SIGTERM);
    wait_for_one(&seen);
    ck_assert(seen.n_reload == 1 && seen.n_stop == 1);
    process_signals_close(p);
    p = process_signals_open("test");
    process_on_signals(p, on_stop, NULL, &seen);
    /* SIGINT is delivered although it is not listed. */
    static const int NOTHING[] = {SIGUSR1, SIGUSR2, SIGHUP};
    for (int i = 0; i < 3; i++) {
        kill(getpid(), NOTHING[i]);
        wait_until_taken(NOTHING[i]);
    }
    kill(getpid(), SIGINT);
    wait_for_one(&seen);
    ck_assert(seen.n_reload == 1 && seen.n_stop == 2);
    process_signals_close(p);
    sem_destroy(&seen.any);
}
END_TEST

/* ------------------------------------------------------------------ jobs */

struct work {
    struct job job; /* first member */
    sem_t *gate;    /* the job first waits for it; NULL: it does not wait */
    _Atomic uint32_t *n_done;
    uint32_t *place_out; /* set to the number of jobs done before it */
    uint64_t nap_ns;     /* the time it takes */
};

static void work_run(struct job *job)
{
    struct work *w = (struct work *)job;
    if (w->gate)
        sem_wait(w->gate);
    nanosleep(&(struct timespec){.tv_nsec = (long)w->nap_ns}, NULL);
    uint32_t n = atomic_fetch_add(w->n_done, 1);
    if (w->place_out)
        *w->place_out = n;
    free(w);
}

static bool give_work(struct jobs *jobs, uint64_t owner, uint64_t cost, const struct work *like)
{
    struct work *w = mem_dup(like, sizeof(*like));
    w->job = (struct job){.run = work_run, .owner = owner, .cost_bytes = cost};
    uint32_t retry_after_ms = 0;
    bool taken = jobs_submit(jobs, &w->job, &retry_after_ms);
    if (!taken) {
        ck_assert_uint_ge(retry_after_ms, 1);
        free(w);
    }
    return taken;
}

static bool give(struct jobs *jobs, uint64_t owner, uint64_t cost, sem_t *gate, _Atomic uint32_t *n_done,
                 uint32_t *place)
{
    const struct work like = {.gate = gate, .n_done = n_done, .place_out = place};
    return give_work(jobs, owner, cost, &like);
}

START_TEST(test_jobs_of_one_owner_do_not_hold_up_another)
{
    sem_t gate;
    sem_init(&gate, 0, 0);
    _Atomic uint32_t n_done = 0;
    uint32_t place = UINT32_MAX;
    const struct jobs_config c = {.thread_name = "t", .n_threads = 1, .max_jobs = 1000, .max_bytes = 1 << 20};
    struct jobs *jobs = jobs_open(&c);
    ck_assert(give(jobs, 1, 10, &gate, &n_done, NULL)); /* runs, and holds the only thread */
    while (jobs_waiting_bytes(jobs))
        sched_yield();
    for (int i = 0; i < 100; i++)
        ck_assert(give(jobs, 1, 1000, NULL, &n_done, NULL));
    ck_assert(give(jobs, 2, 1000, NULL, &n_done, &place));
    sem_post(&gate);
    jobs_close(jobs);
    ck_assert_uint_eq(n_done, 102);
    ck_assert_uint_le(place, 3);
    sem_destroy(&gate);
}
END_TEST

START_TEST(test_jobs_queue_is_bounded_and_no_owner_gets_more_than_it_leaves)
{
    sem_t gate;
    sem_init(&gate, 0, 0);
    _Atomic uint32_t n_done = 0;
    uint32_t n[3] = {0};
    const struct jobs_config c = {.thread_name = "t", .n_threads = 1, .max_jobs = 100, .max_bytes = 64000};
    struct jobs *jobs = jobs_open(&c);
    ck_assert(give(jobs, 1, 10, &gate, &n_done, NULL));
    while (jobs_waiting_bytes(jobs))
        sched_yield();
    while (give(jobs, 1, 1000, NULL, &n_done, NULL))
        n[1]++;
    while (give(jobs, 2, 1000, NULL, &n_done, NULL))
        n[2]++;
    while (give(jobs, 3, 1, NULL, &n_done, NULL))
        n[0]++;
    ck_assert_uint_eq(n[1], 32); /* half of the bytes */
    ck_assert_uint_eq(n[2], 16);
    ck_assert_uint_eq(n[0], 26); /* half of the 52 places that are left */
    ck_assert_uint_le(jobs_waiting_bytes(jobs), 64000);
    sem_post(&gate);
    jobs_close(jobs);
    ck_assert_uint_eq(n_done, 1 + 32 + 16 + 26);
    sem_destroy(&gate);
}
END_TEST

/* One owner has small texts of long work. */
START_TEST(test_jobs_are_shared_by_time_and_not_by_bytes)
{
    sem_t gate;
    sem_init(&gate, 0, 0);
    _Atomic uint32_t n_done = 0;
    uint32_t place = UINT32_MAX;
    const struct work slow = {.n_done = &n_done, .nap_ns = 2 * NS_PER_MS};
    const struct jobs_config c = {.thread_name = "t", .n_threads = 1, .max_jobs = 1000, .max_bytes = 1 << 20};
    struct jobs *jobs = jobs_open(&c);
    ck_assert(give(jobs, 1, 1, &gate, &n_done, NULL));
    while (jobs_waiting_bytes(jobs))
        sched_yield();
    for (int i = 0; i < 100; i++)
        ck_assert(give_work(jobs, 1, 1, &slow));
    for (int i = 0; i < 20; i++)
        ck_assert(give(jobs, 2, 1000, NULL, &n_done, i == 19 ? &place : NULL));
    sem_post(&gate);
    jobs_close(jobs);
    ck_assert_uint_eq(n_done, 121);
    ck_assert_msg(place < 60, "the last of 20 short jobs was number %u", place); /* by bytes it is number 120 */
    sem_destroy(&gate);
}
END_TEST

/* The same, and it gives the next one only when the last one is done. */
START_TEST(test_jobs_of_an_owner_that_comes_and_goes_are_shared_by_time)
{
    _Atomic uint32_t n_slow = 0, n_fast = 0;
    const struct work slow = {.n_done = &n_slow, .nap_ns = 20 * NS_PER_MS};
    const struct work fast = {.n_done = &n_fast, .nap_ns = NS_PER_MS};
    const struct jobs_config c = {.thread_name = "t", .n_threads = 1, .max_jobs = 2000, .max_bytes = 1 << 20};
    struct jobs *jobs = jobs_open(&c);
    for (int i = 0; i < 500; i++)
        ck_assert(give_work(jobs, 2, 1, &fast));
    for (uint32_t i = 0; i < 10; i++) {
        ck_assert(give_work(jobs, 1, 1, &slow));
        while (n_slow == i)
            nanosleep(&(struct timespec){.tv_nsec = (long)NS_PER_MS / 10}, NULL);
    }
    uint32_t n = n_fast;
    jobs_close(jobs);
    ck_assert_msg(n > 30, "%u short jobs beside 10 long ones", n); /* turn by turn it is about 10 */
    ck_assert_uint_eq(n_fast, 500);
}
END_TEST

/* Jobs of many bytes are thought to take long, because small ones did, and do not. */
START_TEST(test_jobs_that_are_shorter_than_they_seemed_hold_up_nobody)
{
    _Atomic uint32_t n_done = 0;
    uint32_t place = UINT32_MAX;
    const struct work long_one = {.n_done = &n_done, .nap_ns = 20 * NS_PER_MS};
    const struct work short_one = {.n_done = &n_done, .nap_ns = 2 * NS_PER_MS};
    const struct jobs_config c = {.thread_name = "t", .n_threads = 2, .max_jobs = 1000, .max_bytes = 1 << 20};
    struct jobs *jobs = jobs_open(&c);
    ck_assert(give_work(jobs, 3, 1, &long_one));
    while (!n_done)
        nanosleep(&(struct timespec){.tv_nsec = (long)NS_PER_MS}, NULL);
    for (int i = 0; i < 300; i++)
        ck_assert(give_work(jobs, 1, 1000, &short_one));
    while (n_done < 20)
        nanosleep(&(struct timespec){.tv_nsec = (long)NS_PER_MS}, NULL);
    uint32_t n_before = n_done;
    ck_assert(give(jobs, 2, 1000, NULL, &n_done, &place));
    jobs_close(jobs);
    ck_assert_msg(place < n_before + 50, "it was number %u after %u", place, n_before);
}
END_TEST

static void count_tick(void *arg)
{
    atomic_fetch_add((_Atomic uint32_t *)arg, 1);
}

START_TEST(test_ticker_calls_again_and_again_and_ends_at_once)
{
    struct clock clock;
    _Atomic uint32_t n = 0;
    clock_init_real(&clock);
    struct ticker *often = ticker_start("often", NS_PER_MS, count_tick, &n);
    while (n < 5)
        sched_yield();
    ticker_stop(often);
    uint32_t n_often = n;
    struct ticker *rarely = ticker_start("rarely", 3600 * NS_PER_S, count_tick, &n);
    while (n == n_often)
        sched_yield();
    uint64_t asked = clock_now(&clock);
    ticker_stop(rarely);
    ck_assert_uint_lt(clock_now(&clock) - asked, 10 * NS_PER_S);
    ck_assert_uint_eq(n, n_often + 1);
    ticker_stop(NULL);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("base");
    TCase *t = tcase_create("base");
    tcase_set_timeout(t, 30);
    tcase_add_test(t, test_status_groups_decide_the_reaction);
    tcase_add_test(t, test_log_line_cannot_be_broken_by_a_value);
    tcase_add_test(t, test_log_lines_that_strangers_cause_are_limited_and_counted);
    tcase_add_test(t, test_log_word_is_one_word_whatever_it_is_made_of);
    tcase_add_test(t, test_absence_counts_one_turn_of_a_long_gap_and_all_of_short_ones);
    tcase_add_test(t, test_absence_is_not_what_the_thread_meant_to_sleep);
    tcase_add_test(t, test_absence_counts_no_time_in_which_nothing_can_be_heard);
    tcase_add_test(t, test_absence_that_never_ends_still_lets_others_fall_silent);
    tcase_add_test(t, test_absence_before_turns_begin_is_not_logged);
    tcase_add_test(t, test_virtual_clock_moves_only_when_told);
    tcase_add_test(t, test_mailbox_keeps_each_senders_order_and_loses_nothing);
    tcase_add_test(t, test_eventcount_wakes_who_waits_and_shows_what_was_written);
    tcase_add_test(t, test_options_flag_beats_environment_beats_file_beats_default);
    tcase_add_test(t, test_options_manual_page_escapes_what_roff_would_read);
    tcase_add_test(t, test_options_limits_keep_fractions_of_a_millisecond);
    tcase_add_test(t, test_options_bad_values_are_refused_by_name);
    tcase_add_test(t, test_options_addresses_need_no_port_where_help_says_so);
    tcase_add_test(t, test_options_say_why_a_config_file_cannot_be_read);
    tcase_add_test(t, test_metrics_render_prometheus_text);
    tcase_add_test(t, test_metrics_are_served_at);
    tcase_add_test(t, test_random_at_is_repeatable_and_even);
    tcase_add_test(t, test_file_read_refuses_what_is_too_large);
    tcase_add_test(t, test_freed_memory_returns_also_if_it_came_and_went_between_two_calls);
    tcase_add_test(t, test_memory_that_is_freed_after_some_was_returned_is_returned);
    tcase_add_test(t, test_faults_happen_as_often_as_the_script_says_and_repeat);
    tcase_add_test(t, test_faults_script_that_makes_no_sense_is_refused_by_its_word);
    tcase_add_test(t, test_faults_of_a_disk_that_is_full_meet_puts_deletes_and_flushes);
    tcase_add_test(t, test_faults_of_a_file_change_when_it_is_read_again);
    tcase_add_test(t, test_faults_file_that_makes_no_sense_changes_nothing);
    tcase_add_test(t, test_faults_are_drawn_by_some_threads_while_others_reload);
    tcase_add_test(t, test_faults_of_a_file_are_exported_before_they_are_made);
    tcase_add_test(t, test_signals_stop_and_reload);
    tcase_add_test(t, test_jobs_of_one_owner_do_not_hold_up_another);
    tcase_add_test(t, test_jobs_queue_is_bounded_and_no_owner_gets_more_than_it_leaves);
    tcase_add_test(t, test_jobs_are_shared_by_time_and_not_by_bytes);
    tcase_add_test(t, test_jobs_of_an_owner_that_comes_and_goes_are_shared_by_time);
    tcase_add_test(t, test_jobs_that_are_shorter_than_they_seemed_hold_up_nobody);
    tcase_add_test(t, test_ticker_calls_again_and_again_and_ends_at_once);
    suite_add_tcase(s, t);
    return tap_main(s);
}
