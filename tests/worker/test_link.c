/* The stream between a router and a worker: how it begins and ends, and how a worker drains. */
#include "tests/worker/world.h"

static const int HELLO = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_HELLO;
static const char ORDER[] = "kind: a stream begins with a hello and a proof, one of each";
static struct leg_message leg;

/* ------------------------------------------------------------------- stream */

/* A stream to n that has not said anything. */
static struct router_end stream_to(struct node_worker *n)
{
    return (struct router_end){call_to(worker_address(n->w), "/tandem.worker.v1.Worker/Attach"), 9, 0};
}

static void check_refused(struct router_end *r, enum rpc_code code, const char *text)
{
    ck_assert(r->call->finished);
    ck_assert_int_eq(r->call->code, code);
    ck_assert_str_eq(r->call->text, text);
    router_leaves(r);
}

static void say_snapshot(struct router_end *r)
{
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__SnapshotRequest ask = TANDEM__WORKER__V1__SNAPSHOT_REQUEST__INIT;
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_SNAPSHOT;
    m.snapshot = &ask;
    router_says(r, &m);
}

START_TEST(test_link_answers_a_hello_with_what_it_is)
{
    struct node_worker *n = world_worker("prefill", NULL);
    struct router_end *r = &n->routers[0];
    const Tandem__Worker__V1__WorkerHello *h = message_at(r, 1)->hello;
    ck_assert_int_eq(message_at(r, 1)->kind_case, HELLO);
    ck_assert_uint_eq(h->protocol, LINK_PROTOCOL_VERSION);
    ck_assert(is_text(h->name, "p0") && is_text(h->role, "prefill") && is_text(h->numerics, "sim"));
    ck_assert_uint_eq(h->incarnation, n->w->incarnation);
    ck_assert_uint_eq(h->n_pages, WORLD_PAGES);
    ck_assert_uint_eq(h->max_context, 512);
    ck_assert_uint_eq(h->chunk_tokens, 16);
    ck_assert_uint_eq(h->vocab_size, 256);
    ck_assert_uint_eq(h->fingerprint.len, BLOCK_KEY_BYTES);
    ck_assert_uint_eq(h->n_adapters, 0);
    for (uint32_t i = 0; i < r->call->n_sent; i++)
        ck_assert_uint_eq(message_at(r, i)->number, i + 1);
    world_close();
}
END_TEST

START_TEST(test_link_refuses_a_stream_that_does_not_begin_well)
{
    struct node_worker *n = world_worker("prefill", NULL);
    struct router_end r = stream_to(n);
    router_says_hello(&r, 1);
    check_refused(&r, RPC_FAILED_PRECONDITION, "protocol version differs: this worker speaks 3");
    r = stream_to(n);
    router_says_hello(&r, LINK_PROTOCOL_VERSION);
    router_says_proof(&r, "another");
    check_refused(&r, RPC_UNAUTHENTICATED, "proof: not by this cluster's secret");
    r = stream_to(n);
    say_snapshot(&r);
    check_refused(&r, RPC_INVALID_ARGUMENT, ORDER);
    r = stream_to(n);
    router_says(&r, &(Tandem__Worker__V1__RouterMessage)TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT);
    check_refused(&r, RPC_INVALID_ARGUMENT, ORDER);
    r = stream_to(n); /* work before the proof */
    router_says_hello(&r, LINK_PROTOCOL_VERSION);
    say_snapshot(&r);
    check_refused(&r, RPC_INVALID_ARGUMENT, ORDER);
    Tandem__Worker__V1__RouterHello hello = TANDEM__WORKER__V1__ROUTER_HELLO__INIT;
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    r = stream_to(n);
    hello.protocol = LINK_PROTOCOL_VERSION;
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_HELLO;
    m.hello = &hello;
    router_says(&r, &m);
    check_refused(&r, RPC_INVALID_ARGUMENT, "nonce: has 16 bytes");
    turn_all();
    ck_assert_uint_eq(n->w->backlog.n_routers, 1); /* none of the routers that were refused was attached */
    world_close();
}
END_TEST

/* Somebody who has seen one stream begins another with the same messages. */
START_TEST(test_link_refuses_a_proof_that_it_has_seen)
{
    struct node_worker *n = world_worker("prefill", NULL);
    struct router_end r = stream_to(n);
    router_says_hello(&r, LINK_PROTOCOL_VERSION);
    uint8_t mac[SECRET_MAC_BYTES];
    struct proof_said said = {.incarnation = r.incarnation, .router = "router"};
    ck_assert(proof_nonce_read(message_at(&n->routers[0], 0)->challenge->nonce, said.worker));
    proof_sign(NULL, ATTACH_ROUTER, &said, mac); /* as that of the first stream was made */
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__Proof proof = TANDEM__WORKER__V1__PROOF__INIT;
    proof.proof = (ProtobufCBinaryData){sizeof(mac), mac};
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_PROOF;
    m.proof = &proof;
    world_hush(n);
    router_says(&r, &m);
    check_refused(&r, RPC_UNAUTHENTICATED, "proof: not by this cluster's secret");
    r = stream_to(n); /* and the worker's own proof is none of a router */
    router_says_hello(&r, LINK_PROTOCOL_VERSION);
    ck_assert_uint_eq(message_at(&r, 0)->challenge->proof.len, sizeof(mac));
    memcpy(mac, message_at(&r, 0)->challenge->proof.data, sizeof(mac));
    router_says(&r, &m);
    check_refused(&r, RPC_UNAUTHENTICATED, "proof: not by this cluster's secret");
    turn_all();
    ck_assert_uint_eq(n->w->backlog.n_routers, 1);
    world_close();
}
END_TEST

/* A secret in a file: two are good while it is changed. */
START_TEST(test_link_proves_by_the_first_secret_and_takes_all)
{
    char path[] = "/tmp/tandem-secret-XXXXXX";
    int fd = mkstemp(path);
    ck_assert_int_eq(write(fd, "new\nold\n", 8), 8);
    const char *const more[] = {"--secret-file", path, NULL};
    struct td_error e = {{0}};
    struct node_worker *n = &workers[n_workers];
    ck_assert_msg(!world_try("prefill", more, &e), "%s", e.text);
    static const char *const SECRETS[] = {"old", "new", "none"};
    world_hush(n);
    for (int i = 0; i < 3; i++) {
        struct router_end r = stream_to(n);
        router_says_hello(&r, LINK_PROTOCOL_VERSION);
        struct proof_said said = {.incarnation = r.incarnation, .router = "router"};
        struct secret *new = NULL;
        ck_assert(proof_nonce_read(message_at(&r, 0)->challenge->nonce, said.worker));
        ck_assert(!secret_open("new", NULL, NULL, &new, NULL));
        said.address = worker_address(n->w);
        said.local = "10.0.0.1:7000"; /* tests/calls.c */
        ck_assert(proof_verify(new, ATTACH_WORKER, &said, message_at(&r, 0)->challenge->proof));
        secret_close(new);
        router_says_proof(&r, SECRETS[i]);
        ck_assert_int_eq(r.call->finished, i == 2);
        router_leaves(&r);
    }
    close(fd);
    unlink(path);
    world_close();
}
END_TEST

START_TEST(test_link_ends_a_stream_that_lost_or_doubled_a_message)
{
    struct node_worker *n = world_worker("prefill", NULL);
    for (int i = 0; i < 2; i++) {
        struct router_end *r = world_attach(n, 9);
        r->n_said = i ? 1 : 3;
        say_snapshot(r);
        ck_assert(r->call->finished && r->call->code == RPC_DATA_LOSS);
        router_leaves(r);
        n->n_routers--;
        turn_all();
        ck_assert_uint_eq(n->w->backlog.n_routers, 1);
    }
    struct router_end *r = world_attach(n, 9);
    router_says_hello(r, LINK_PROTOCOL_VERSION);
    ck_assert(r->call->finished && r->call->code == RPC_INVALID_ARGUMENT);
    world_close();
}
END_TEST

START_TEST(test_link_lets_a_router_go_that_has_nothing_more_to_say_or_refuses_it)
{
    struct node_worker *n = world_worker("prefill", NULL);
    Tandem__Worker__V1__RouterMessage m = TANDEM__WORKER__V1__ROUTER_MESSAGE__INIT;
    Tandem__Worker__V1__Refusal refusal = TANDEM__WORKER__V1__REFUSAL__INIT;
    m.kind_case = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_REFUSAL;
    m.refusal = &refusal;
    world_hush(n);
    router_says(&n->routers[0], &m);
    call_says_all(n->routers[0].call);
    ck_assert(n->routers[0].call->finished && n->routers[0].call->code == RPC_OK);
    router_leaves(&n->routers[0]);
    turn_all();
    ck_assert_uint_eq(n->w->backlog.n_routers, 0);
    n->n_routers = 0;
    world_close();
}
END_TEST

START_TEST(test_link_cuts_off_a_router_that_does_not_read)
{
    struct node_worker *n = world_worker("decode", NULL);
    struct router_end *r = world_attach(n, 8);
    turn_all();
    leg_make(&leg, AGGREGATED, 1, 0, 40);
    leg.id.incarnation = 8;
    leg.sampling.max_tokens = 400;
    router_sends_leg(r, &leg);
    world_hush(n);
    r->call->reads = false;
    r->call->max_queued_bytes = 2000;
    turns_until(r->call->over);
    ck_assert_int_eq(r->call->code, RPC_RESOURCE_EXHAUSTED);
    router_leaves(r);
    n->n_routers--;
    check_quiet(n); /* its leg has ended with it */
    world_close();
}
END_TEST

START_TEST(test_link_sends_all_blocks_again_when_a_router_asks)
{
    struct node_worker *n = world_worker("decode", NULL);
    struct router_end *r = &n->routers[0];
    struct events_header h;
    leg_make(&leg, AGGREGATED, 1, 0, 40);
    router_sends_leg(r, &leg);
    turns_until(end_of(r, 1));
    uint32_t before = count_of(r, EVENTS);
    say_snapshot(r);
    turns_until(count_of(r, EVENTS) > before);
    ProtobufCBinaryData d = last_of(r, EVENTS)->events;
    ck_assert_int_eq(events_decode(d.data, d.len, &h), TD_OK);
    ck_assert_uint_eq(h.count, 3); /* cleared, then two full blocks */
    ck_assert_int_eq(events_at(d.data, 0).kind, BLOCK_CLEARED);
    ck_assert_int_eq(events_at(d.data, 1).kind, BLOCK_ADDED);
    ck_assert_uint_eq(audit_of(n)->blocks, 2);
    world_close();
}
END_TEST

/* -------------------------------------------------------------------- drain */

START_TEST(test_link_that_drains_finishes_its_legs_and_refuses_new_ones)
{
    struct node_worker *n = world_worker("decode", NULL);
    struct router_end *r = &n->routers[0];
    leg_make(&leg, AGGREGATED, 1, 0, 40);
    leg.sampling.max_tokens = 50;
    router_sends_leg(r, &leg);
    turns_until(tokens_of(r, 1).n == 1);
    router_drains(r, 0);
    leg_make(&leg, AGGREGATED, 2, 1, 40);
    router_sends_leg(r, &leg);
    router_drains(r, 1); /* a second one does not hurry it */
    ck_assert_int_eq(worker_run(n->w), TD_OK);
    check_end(r, 1, TD_OK, "");
    ck_assert_uint_eq(tokens_of(r, 1).n, 50);
    check_end(r, 2, TD_ERR_REFUSED, "worker is draining");
    const Tandem__Worker__V1__Load *load = last_of(r, LOAD)->load;
    ck_assert(load->draining);
    ck_assert_uint_eq(load->total_pages, WORLD_PAGES);
    ck_assert_uint_eq(load->heard, r->n_said);
    ck_assert_uint_eq(last_of(r, END)->number, last_of(r, TOKENS)->number + 1);
    world_close();
}
END_TEST

START_TEST(test_link_refuses_its_legs_at_the_limit_of_a_drain)
{
    world_decode_us = "2000,0,0";
    struct node_worker *n = world_worker("decode", NULL);
    struct router_end *r = &n->routers[0];
    leg_make(&leg, AGGREGATED, 1, 0, 40);
    leg.sampling.max_tokens = 472; /* a second */
    router_sends_leg(r, &leg);
    turns_until(tokens_of(r, 1).n == 2);
    router_drains(r, 20);
    ck_assert_int_eq(worker_run(n->w), TD_OK);
    check_end(r, 1, TD_ERR_REFUSED, "worker is draining");
    uint32_t n_tokens = tokens_of(r, 1).n;
    ck_assert_uint_gt(n_tokens, 2);
    ck_assert_uint_lt(n_tokens, 472);
    world_close();
}
END_TEST

START_TEST(test_link_ends_its_legs_at_a_second_stop)
{
    struct node_worker *n = world_worker("decode", NULL);
    struct router_end *r = &n->routers[0];
    leg_make(&leg, AGGREGATED, 1, 0, 40);
    leg.sampling.max_tokens = 400;
    router_sends_leg(r, &leg);
    turns_until(tokens_of(r, 1).n == 2);
    worker_stop(n->w);
    worker_stop(n->w);
    ck_assert_int_eq(worker_run(n->w), TD_OK);
    check_end(r, 1, TD_ERR_PEER_LOST, "worker is stopping");
    ck_assert_uint_eq(tokens_of(r, 1).n, 2);
    world_close();
}
END_TEST

START_TEST(test_link_that_closes_leaves_no_page_held)
{
    struct node_worker *n = world_worker("decode", NULL);
    leg_make(&leg, AGGREGATED, 1, 0, 40);
    leg.sampling.max_tokens = 400;
    router_sends_leg(&n->routers[0], &leg);
    turns_until(tokens_of(&n->routers[0], 1).n == 2);
    leg_make(&leg, AGGREGATED, 2, 1, 40); /* still in the mailbox */
    router_sends_leg(&n->routers[0], &leg);
    world_close(); /* no page is held: engine_close() would abort */
}
END_TEST

START_TEST(test_link_that_drains_waits_for_the_reader_of_its_pages)
{
    const char *const brief[] = {"--lease-ms", "100", NULL};
    struct node_worker *n = world_worker("prefill", brief);
    struct router_end *r = &n->routers[0];
    leg_make(&leg, PREFILL, 1, 0, 40);
    leg.m.peer_incarnation = 5;
    router_sends_leg(r, &leg);
    turns_until(end_of(r, 1));
    uint64_t began = world_wall_ns();
    ck_assert_uint_eq(n->w->n_wire, 1);
    router_drains(r, 1); /* the limit is for legs: a reader gets its time */
    worker_run(n->w);
    ck_assert_uint_eq(n->w->n_wire, 0);
    ck_assert_uint_ge(world_wall_ns() - began, 50 * NS_PER_MS);
    world_close();
}
END_TEST

int main(void)
{
    Suite *s = suite_create("link");
    TCase *t = tcase_create("link");
    tcase_set_timeout(t, 60);
    tcase_add_test(t, test_link_answers_a_hello_with_what_it_is);
    tcase_add_test(t, test_link_refuses_a_stream_that_does_not_begin_well);
    tcase_add_test(t, test_link_refuses_a_proof_that_it_has_seen);
    tcase_add_test(t, test_link_proves_by_the_first_secret_and_takes_all);
    tcase_add_test(t, test_link_ends_a_stream_that_lost_or_doubled_a_message);
    tcase_add_test(t, test_link_lets_a_router_go_that_has_nothing_more_to_say_or_refuses_it);
    tcase_add_test(t, test_link_cuts_off_a_router_that_does_not_read);
    tcase_add_test(t, test_link_sends_all_blocks_again_when_a_router_asks);
    tcase_add_test(t, test_link_that_drains_finishes_its_legs_and_refuses_new_ones);
    tcase_add_test(t, test_link_refuses_its_legs_at_the_limit_of_a_drain);
    tcase_add_test(t, test_link_ends_its_legs_at_a_second_stop);
    tcase_add_test(t, test_link_that_closes_leaves_no_page_held);
    tcase_add_test(t, test_link_that_drains_waits_for_the_reader_of_its_pages);
    suite_add_tcase(s, t);
    return tap_main(s);
}
