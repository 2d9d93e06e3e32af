/*
 * A worker's stream as the router sees it (router/peer.c): what outlives the stream, and what doesn't.
 */
#include <sys/mman.h>
#include <unistd.h>

#include "door.h"

enum { LIMIT_MS = 1500 };

static void setup(void)
{
    world_open("pd");
}

static struct peer *decode_peer(void)
{
    return router->peers[1];
}

static void drain(const char *name)
{
    struct td_error e = {{0}};
    ck_assert_msg(!peer_drain(router, name, LIMIT_MS, &e), "%s", e.text);
}

/* Drain messages on the peer's present stream; *limit_ms is that of the last one. */
static uint32_t drains_told(const struct peer *p, uint32_t *limit_ms)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < p->call->n_sent; i++) {
        const Tandem__Worker__V1__RouterMessage *m =
            (const Tandem__Worker__V1__RouterMessage *)(const void *)p->call->sent[i];
        if (m->kind_case != TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_DRAIN)
            continue;
        *limit_ms = m->drain->limit_ms;
        n++;
    }
    return n;
}

static void expect_drain_told_again(struct peer *p)
{
    uint32_t limit_ms = 0;
    ck_assert(p->draining);
    ck_assert(!peer_usable(p, clock_now(&router->clock)));
    ck_assert_uint_eq(drains_told(p, &limit_ms), 1);
    ck_assert_uint_eq(limit_ms, LIMIT_MS);
}

/* ------------------------------------------------------------------- drains */

START_TEST(test_a_drain_is_told_again_to_a_worker_that_was_silent)
{
    struct peer *p = decode_peer();
    drain("d1");
    expect_drain_told_again(p);
    p->heard_ns = 0;
    absence_init(&router->absence, &router->clock, UINT64_MAX / 2);
    peer_tick(p, router_patience(router) + (uint64_t)router->options.silence_ms * NS_PER_MS + 1);
    ck_assert_int_eq(p->state, PEER_LOST);
    world_connect(p, 101);
    expect_drain_told_again(p);
}
END_TEST

START_TEST(test_a_drain_is_told_again_to_a_worker_whose_stream_broke)
{
    struct peer *p = decode_peer();
    drain("d1");
    peer_gone(p, "DATA_LOSS: a message is missing or doubled");
    ck_assert(p->drained); /* as far as we know */
    world_connect(p, 101);
    ck_assert(!p->drained);
    expect_drain_told_again(p);
}
END_TEST

START_TEST(test_a_drain_is_told_again_to_a_worker_that_registers_again)
{
    struct td_error e = {{0}};
    ck_assert_int_eq(peer_register(router, "d7:1", &e), TD_OK);
    ck_assert_int_eq(peer_register(router, "d8:1", &e), TD_OK);
    struct peer *others = router->peers[2], *p = router->peers[3];
    world_connect(others, 107);
    world_connect(p, 108);
    drain("d7");
    drain("d8");
    peer_gone(others, "UNAVAILABLE: ");
    peer_gone(p, "UNAVAILABLE: ");
    ck_assert_int_eq(p->state, PEER_GONE);
    ck_assert_int_eq(peer_register(router, "d8:1", &e), TD_OK);
    ck_assert_int_eq(others->state, PEER_GONE);
    world_connect(p, 108);
    expect_drain_told_again(p);
}
END_TEST

START_TEST(test_a_drain_ends_with_the_process)
{
    struct peer *p = decode_peer();
    uint32_t limit_ms;
    drain("d1");
    peer_gone(p, "UNAVAILABLE: Socket closed");
    world_connect(p, 201);
    ck_assert(!p->draining);
    ck_assert(peer_usable(p, clock_now(&router->clock)));
    ck_assert_uint_eq(drains_told(p, &limit_ms), 0);
    peer_gone(p, "UNAVAILABLE: Socket closed");
    ck_assert(!p->drained);
}
END_TEST

/* A worker that refuses a leg may have been asked to drain by another router, which repeats it if need be. */
START_TEST(test_only_a_drain_that_was_asked_for_is_told)
{
    struct peer *p = decode_peer();
    uint32_t limit_ms;
    peer_drains(p);
    world_connect((peer_gone(p, "UNAVAILABLE: "), p), 101);
    ck_assert(p->draining);
    ck_assert_uint_eq(drains_told(p, &limit_ms), 0);
}
END_TEST

START_TEST(test_a_worker_that_has_drained_is_said_once)
{
    struct peer *p = decode_peer();
    drain("d1");
    peer_gone(p, "UNAVAILABLE: Socket closed");
    uint64_t failures = p->breaker.failures;
    for (uint32_t i = 0; i < 3; i++) {
        p->retry_ns = 0;
        peer_tick(p, router_patience(router));
        ck_assert_int_eq(p->state, PEER_CONNECTING);
        peer_gone(p, "UNAVAILABLE: connection refused");
        ck_assert(p->drained);
    }
    ck_assert_uint_eq(p->breaker.failures, failures);
}
END_TEST

/* It stands still: gRPC gives up its connection, and then the attempts to make another. */
START_TEST(test_a_worker_that_answers_nothing_has_not_drained)
{
    static const char *const GIVES_UP[] = {
        "UNAVAILABLE: keepalive watchdog timeout",
        "UNAVAILABLE: failed to connect to all addresses; last error: UNKNOWN: ipv4:192.0.2.1:9: connection attempt "
        "timed out before receiving SETTINGS frame",
        "UNAVAILABLE: failed to connect to all addresses; last error: UNKNOWN: ipv4:192.0.2.1:9: Network is "
        "unreachable",
    };
    struct peer *p = decode_peer();
    drain("d1");
    for (uint32_t i = 0; i < sizeof(GIVES_UP) / sizeof(*GIVES_UP); i++) {
        peer_gone(p, GIVES_UP[i]);
        ck_assert_int_eq(p->state, PEER_LOST);
        ck_assert(p->draining && !p->drained);
        p->retry_ns = 0;
        peer_tick(p, router_patience(router));
        ck_assert_int_eq(p->state, PEER_CONNECTING);
    }
    peer_gone(p, "UNAVAILABLE: failed to connect to all addresses; last error: UNKNOWN: ipv4:192.0.2.1:9: Failed to "
                 "connect to remote host: Connection refused");
    ck_assert(p->drained);
}
END_TEST

/* ----------------------------------------------------------------- refusals */

/* How often text stands in what was logged. */
static uint32_t n_logged(int fd, const char *text)
{
    char all[8192];
    ssize_t len = pread(fd, all, sizeof(all) - 1, 0);
    uint32_t n = 0;
    ck_assert_int_ge(len, 0);
    all[len] = 0;
    for (const char *at = all; (at = strstr(at, text)); at++)
        n++;
    return n;
}

START_TEST(test_a_refusal_is_logged_once_and_again_when_it_changes)
{
    struct peer *p = decode_peer();
    router->log.fd = memfd_create("log", 0);
    peer_gone(p, "UNAVAILABLE: Socket closed");
    for (uint32_t i = 0; i < 6; i++) {
        if (i % 3 == 0) /* two reasons, each of them three times */
            router->layout.n_layers++;
        p->retry_ns = 0;
        peer_tick(p, router_patience(router));
        world_says_hello(p, 101);
        ck_assert_int_eq(p->state, PEER_REFUSED);
        peer_gone(p, "OK: ");
    }
    ck_assert_uint_eq(n_logged(router->log.fd, "worker refused peer=d1"), 2);
    close(router->log.fd);
}
END_TEST

/* Somebody else sits at a worker's address: he gets no proof of ours, and no work. */
START_TEST(test_a_worker_that_does_not_prove_the_secret_is_refused)
{
    static const char *const SECRETS[] = {"another", NULL};
    struct peer *p = decode_peer();
    world_hush();
    for (int i = 0; i < 2; i++) {
        peer_gone(p, "UNAVAILABLE: Socket closed");
        p->retry_ns = 0;
        peer_tick(p, router_patience(router));
        ck_assert_uint_eq(p->call->n_sent, 1); /* the hello */
        world_says_challenge(p, SECRETS[i]);
        ck_assert_uint_eq(told(p, TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_PROOF, NULL), i);
        ck_assert_int_eq(p->state, i ? PEER_CONNECTING : PEER_REFUSED);
    }
    world_hello(p, 101);
    world_says_challenge(p, NULL); /* there is one */
    ck_assert_int_eq(p->state, PEER_LOST);
}
END_TEST

/* A worker says where it is reached: nobody may stand between if the router knows another way to it. */
START_TEST(test_a_stream_that_somebody_passes_on_is_refused)
{
    static const struct {
        const char *address, *local;
        bool is_good, is_passed_on;
    } CASES[] = {{NULL, "", true, false},
                 {"elsewhere:1", "10.0.0.1:7000", true, false}, /* tests/calls.c: the router is connected to it */
                 {"elsewhere:1", "10.0.0.2:7000", true, true},  /* a proxy */
                 {"p0:1", "10.0.0.2:7000", false, true},
                 {"elsewhere:1", "10.0.0.3:7000", false, true}}; /* where p0 was reached */
    struct peer *p = decode_peer(), *prefill = router->peers[0];
    ck_assert_str_eq(prefill->address, "p0:1");
    snprintf(prefill->reached, sizeof(prefill->reached), "10.0.0.3:7000");
    world_hush();
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        peer_gone(p, "UNAVAILABLE: Socket closed");
        p->retry_ns = 0;
        peer_tick(p, router_patience(router));
        world_address = CASES[i].address;
        world_local = CASES[i].local;
        world_says_challenge(p, NULL);
        ck_assert_uint_eq(told(p, TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_PROOF, NULL), CASES[i].is_good);
        ck_assert_int_eq(p->state, CASES[i].is_good ? PEER_CONNECTING : PEER_REFUSED);
        ck_assert_int_eq(p->is_passed_on, CASES[i].is_passed_on);
    }
    ck_assert_str_eq(p->why, "address: somebody passes this stream on to the worker at elsewhere:1");
    peer_gone(prefill, "UNAVAILABLE: Socket closed"); /* also while it is away */
    p->retry_ns = 0;
    peer_gone(p, "OK: ");
    p->retry_ns = 0;
    peer_tick(p, router_patience(router));
    world_says_challenge(p, NULL);
    ck_assert_int_eq(p->state, PEER_REFUSED);
    world_address = NULL;
    world_local = "";
}
END_TEST

START_TEST(test_a_process_that_two_addresses_lead_to_counts_once)
{
    struct peer *p = decode_peer();
    world_hush();
    peer_gone(p, "UNAVAILABLE: Socket closed");
    p->retry_ns = 0;
    peer_tick(p, router_patience(router));
    world_says_hello(p, router->peers[0]->incarnation);
    ck_assert_int_eq(p->state, PEER_REFUSED);
    ck_assert_ptr_nonnull(strstr(p->why, "incarnation: this is the process at p0"));
    peer_gone(router->peers[0], "UNAVAILABLE: Socket closed"); /* this is the other way, through a proxy */
    peer_gone(p, "OK: ");
    world_address = "elsewhere:1";
    world_connect(p, router->peers[0]->incarnation);
    ck_assert(p->is_passed_on);
    world_address = NULL;
    world_connect(router->peers[0], p->incarnation); /* and back to the way without one */
    ck_assert_int_eq(p->state, PEER_LOST);
}
END_TEST

/* ------------------------------------------------------------------- values */

START_TEST(test_the_context_follows_the_workers_that_are_there)
{
    struct peer *p = decode_peer();
    uint32_t all = router->config.max_positions;
    ck_assert_uint_eq(atomic_load(&router->max_context), all);
    peer_gone(p, "UNAVAILABLE: Socket closed");
    world_max_context = 64;
    world_connect(p, 101);
    ck_assert_uint_eq(atomic_load(&router->max_context), 64);
    peer_gone(p, "UNAVAILABLE: Socket closed");
    ck_assert_uint_eq(atomic_load(&router->max_context), all);
    peer_gone(router->peers[0], "UNAVAILABLE: Socket closed"); /* the last one: they may come back */
    ck_assert_uint_eq(atomic_load(&router->max_context), all);
    world_max_context = 0;
}
END_TEST

START_TEST(test_values_that_can_not_be_are_refused)
{
    static const struct {
        uint32_t max_context, n_pages;
        const char *name, *why;
    } CASES[] = {{1, 4096, NULL, "max_context: 1 is not in 16..16777216"},
                 {1u << 31, 4096, NULL, "max_context: 2147483648 is not in 16..16777216"},
                 {0, 0, NULL, "n_pages: there is no page for KV"},
                 {0, 4096, "d\x1b[2J", "name: empty, or not printable UTF-8"},
                 {0, 4096, "d\xc2\x9b", "name: empty, or not printable UTF-8"},
                 {0, 4096, "d\xff", "name: empty, or not printable UTF-8"},
                 {0, 4096, "", "name: empty, or not printable UTF-8"}};
    struct peer *p = decode_peer();
    uint32_t before = atomic_load(&router->max_context);
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        peer_gone(p, "UNAVAILABLE: Socket closed");
        world_max_context = CASES[i].max_context;
        world_n_pages = CASES[i].n_pages;
        world_name = CASES[i].name;
        p->retry_ns = 0;
        peer_tick(p, router_patience(router));
        world_says_hello(p, 101);
        ck_assert_int_eq(p->state, PEER_REFUSED);
        ck_assert_str_eq(p->why, CASES[i].why);
        ck_assert_str_eq(p->name, CASES[i].name ? p->address : "d1");
        ck_assert_uint_eq(atomic_load(&router->max_context), before);
    }
    world_name = NULL;
    world_max_context = 0;
    world_n_pages = 4096;
}
END_TEST

int main(void)
{
    Suite *s = suite_create("router_peer");
    TCase *drains = tcase_create("drains"), *refusals = tcase_create("refusals");
    suite_add_tcase(s, drains);
    suite_add_tcase(s, refusals);
    tcase_add_checked_fixture(drains, setup, world_close);
    tcase_add_test(drains, test_a_drain_is_told_again_to_a_worker_that_was_silent);
    tcase_add_test(drains, test_a_drain_is_told_again_to_a_worker_whose_stream_broke);
    tcase_add_test(drains, test_a_drain_is_told_again_to_a_worker_that_registers_again);
    tcase_add_test(drains, test_a_drain_ends_with_the_process);
    tcase_add_test(drains, test_only_a_drain_that_was_asked_for_is_told);
    tcase_add_test(drains, test_a_worker_that_has_drained_is_said_once);
    tcase_add_test(drains, test_a_worker_that_answers_nothing_has_not_drained);
    tcase_add_checked_fixture(refusals, setup, world_close);
    tcase_add_test(refusals, test_the_context_follows_the_workers_that_are_there);
    tcase_add_test(refusals, test_values_that_can_not_be_are_refused);
    tcase_add_test(refusals, test_a_worker_that_does_not_prove_the_secret_is_refused);
    tcase_add_test(refusals, test_a_stream_that_somebody_passes_on_is_refused);
    tcase_add_test(refusals, test_a_process_that_two_addresses_lead_to_counts_once);
    tcase_add_test(refusals, test_a_refusal_is_logged_once_and_again_when_it_changes);
    return tap_main(s);
}
