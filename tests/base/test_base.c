#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/metrics.h"
#include "base/options.h"
#include "base/queue.h"
#include "base/random.h"
#include "base/thread.h"
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

/* ---------------------------------------------------------------- options */

struct values {
    const char *name, *mode;
    bool fast;
    int64_t count, size, wait;
    double share;
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
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};
static const struct options OPTIONS = {"test", "[options]", "About.", "TANDEM_TEST", TABLE};

static enum td_status parse(struct values *v, struct td_error *e, const char *const *args)
{
    static char *strings; /* what v points into, until the next parse */
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

START_TEST(test_options_bad_values_are_refused_by_name)
{
    static const char *const BAD[][2] = {
        {"--count", "x"}, {"--count", "11"},  {"--count", "0"},     {"--count", "2.5"},    {"--mode", "maybe"},
        {"--size", "5Q"}, {"--size", "-1"},   {"--wait", "5 days"}, {"--share", "nan"},    {"--share", "1.5"},
        {"--bogus", "1"}, {"--no-count", ""}, {"--fast=7", ""},     {"--config", "/nope"},
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

START_TEST(test_metrics_render_prometheus_text)
{
    static const struct metric_info INFO[] = {{METRIC_COUNTER, "a_total", "A."}, {METRIC_SECONDS, "b_seconds", "B."}};
    struct metrics *m = metrics_open();
    struct metrics_set *x = metrics_add(m, INFO, 2, "peer=\"x\""), *y = metrics_add(m, INFO, 2, "peer=\"y\"");
    struct bytes b = {0};
    metrics_inc(x, 0, 2);
    metrics_inc(y, 0, 3);
    metrics_observe_ns(x, 1, 3000000);
    metrics_render(m, &b);
    ck_assert_ptr_nonnull(strstr(b.data, "# TYPE a_total counter\na_total{peer=\"x\"} 2\na_total{peer=\"y\"} 3\n"));
    ck_assert_ptr_nonnull(strstr(b.data, "b_seconds_bucket{peer=\"x\",le=\"0.002\"} 0\n"));
    ck_assert_ptr_nonnull(strstr(b.data, "b_seconds_bucket{peer=\"x\",le=\"0.005\"} 1\n"));
    ck_assert_ptr_nonnull(strstr(b.data, "b_seconds_count{peer=\"x\"} 1\n"));
    bytes_free(&b);
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
    ck_assert(n > 1650 && n < 1950); /* of the nine tenths that are left */
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
                                      "seed=x",
                                      "disk.write:fail",
                                      "wire.message:drop=0.1x",
                                      "rpc.message:corrupt"};
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

int main(void)
{
    Suite *s = suite_create("base");
    TCase *t = tcase_create("base");
    tcase_set_timeout(t, 30);
    tcase_add_test(t, test_status_groups_decide_the_reaction);
    tcase_add_test(t, test_log_line_cannot_be_broken_by_a_value);
    tcase_add_test(t, test_virtual_clock_moves_only_when_told);
    tcase_add_test(t, test_mailbox_keeps_each_senders_order_and_loses_nothing);
    tcase_add_test(t, test_options_flag_beats_environment_beats_file_beats_default);
    tcase_add_test(t, test_options_bad_values_are_refused_by_name);
    tcase_add_test(t, test_metrics_render_prometheus_text);
    tcase_add_test(t, test_random_at_is_repeatable_and_even);
    tcase_add_test(t, test_file_read_refuses_what_is_too_large);
    tcase_add_test(t, test_faults_happen_as_often_as_the_script_says_and_repeat);
    tcase_add_test(t, test_faults_script_that_makes_no_sense_is_refused_by_its_word);
    suite_add_tcase(s, t);
    return tap_main(s);
}
