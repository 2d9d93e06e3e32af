/* The audit of a cluster (router/audit.c), and who can read from whom (router/pairs.c). */
#include "door.h"

#include "proto/wire/events.h"

#define AUDIT  "/tandem.admin.v1.Admin/Audit"
#define STATUS "/tandem.admin.v1.Admin/Status"

enum {
    ASKED = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_AUDIT,
    PEERS = TANDEM__WORKER__V1__ROUTER_MESSAGE__KIND_PEERS,
};

static void setup(void)
{
    world_open("pds");
}

static const Tandem__Admin__V1__AuditRequest REQUEST = TANDEM__ADMIN__V1__AUDIT_REQUEST__INIT;

static uint64_t nonce_of(const struct peer *p)
{
    const Tandem__Worker__V1__RouterMessage *m = NULL;
    ck_assert_uint_gt(told(p, ASKED, &m), 0);
    return m->audit->nonce;
}

/* p answers an audit: it has this number of blocks. */
static void says_audit(struct peer *p, uint64_t nonce, uint64_t blocks, uint64_t digest, const char *problem)
{
    Tandem__Worker__V1__WorkerMessage m = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
    Tandem__Worker__V1__Audit a = TANDEM__WORKER__V1__AUDIT__INIT;
    ProtobufCBinaryData problems[] = {rpc_data(problem ? problem : "")};
    a.nonce = nonce;
    a.free = 5;
    a.cached = 4;
    a.held = 3;
    a.leased = 2;
    a.quarantined = 1;
    a.total = 15;
    a.blocks = blocks;
    a.digest = digest;
    a.legs = 7;
    a.leases = 8;
    a.pulls = 9;
    a.n_problems = problem != NULL;
    a.problems = problems;
    m.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_AUDIT;
    m.audit = &a;
    worker_says(p, &m);
}

static void all_say(uint32_t from)
{
    for (uint32_t i = from; i < router->n_peers; i++)
        says_audit(router->peers[i], nonce_of(router->peers[i]), 0, 0, NULL);
}

/* Block events of p: a snapshot with one block. Returns the block's digest. */
static uint64_t says_block(struct peer *p)
{
    const struct block_event events[] = {{BLOCK_CLEARED, TIER_WORKER, 0, {{0}}}, {BLOCK_ADDED, TIER_WORKER, 0, {{7}}}};
    Tandem__Worker__V1__WorkerMessage m = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
    struct bytes b = {0};
    events_encode(&(struct events_header){p->incarnation, 1, 2}, events, &b);
    m.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_EVENTS;
    m.events = (ProtobufCBinaryData){b.len, (uint8_t *)b.data};
    worker_says(p, &m);
    bytes_free(&b);
    return block_digest(&events[1].key, TIER_WORKER);
}

/* -------------------------------------------------------------------- audit */

START_TEST(test_audit_puts_the_accounts_of_all_peers_together)
{
    struct rpc_call *call = door_open(AUDIT, &REQUEST.base);
    router_turn(router);
    ck_assert(!call->finished);
    all_say(0);
    ck_assert(call->finished);
    const Tandem__Admin__V1__AuditResponse *a = door_answer(call);
    static const char *const NAMES[] = {"p0", "d1", "s2"}, *const ROLES[] = {"prefill", "decode", "store"};
    ck_assert_uint_eq(a->n_workers, 3);
    for (int i = 0; i < 3; i++) {
        const Tandem__Admin__V1__WorkerAudit *w = a->workers[i];
        ck_assert(is_text(w->name, NAMES[i]) && is_text(w->role, ROLES[i]));
        ck_assert(w->pages->free == 5 && w->pages->cached == 4 && w->pages->held == 3 && w->pages->leased == 2 &&
                  w->pages->quarantined == 1 && w->pages->total == 15);
        ck_assert(w->legs == 7 && w->leases == 8 && w->pulls == 9);
        ck_assert_uint_eq(w->n_problems, 0);
    }
    door_close(call);
}
END_TEST

START_TEST(test_audit_compares_blocks_with_the_index)
{
    uint64_t digest = says_block(router->peers[0]);
    says_block(router->peers[1]);
    struct rpc_call *call = door_open(AUDIT, &REQUEST.base);
    router_turn(router);
    says_audit(router->peers[0], nonce_of(router->peers[0]), 1, digest, NULL);
    says_audit(router->peers[1], nonce_of(router->peers[1]), 3, 99, "page 5 leaks");
    all_say(2);
    const Tandem__Admin__V1__AuditResponse *a = door_answer(call);
    ck_assert_uint_eq(a->workers[0]->n_problems, 0);
    ck_assert_uint_eq(a->workers[0]->index_blocks, 1);
    ck_assert_uint_eq(a->workers[1]->n_problems, 2);
    ck_assert(is_text(a->workers[1]->problems[0], "page 5 leaks"));
    ck_assert(is_text(a->workers[1]->problems[1], "the router's index has 1 blocks of it, it has 3"));
    door_close(call);
    call = door_open(AUDIT, &REQUEST.base);
    router_turn(router);
    says_audit(router->peers[0], nonce_of(router->peers[0]), 1, digest + 1, NULL); /* as many, but others */
    router->peers[1]->snapshot_asked = true; /* the index waits for its blocks: nothing to compare with */
    says_audit(router->peers[1], nonce_of(router->peers[1]), 3, 99, NULL);
    all_say(2);
    a = door_answer(call);
    ck_assert(
        is_text(a->workers[0]->problems[0], "the router's index has 1 blocks of it, others than these, it has 1"));
    ck_assert_uint_eq(a->workers[1]->n_problems, 0);
    door_close(call);
}
END_TEST

START_TEST(test_audit_asks_again_until_there_is_an_answer)
{
    struct rpc_call *call = door_open(AUDIT, &REQUEST.base);
    router_turn(router);
    says_audit(router->peers[0], nonce_of(router->peers[0]), 0, 0, "page 5 leaks");
    says_audit(router->peers[2], nonce_of(router->peers[2]), 0, 0, NULL);
    uint64_t now = router_patience(router);
    audit_tick(router, now + 900 * NS_PER_MS);
    ck_assert_uint_eq(told(router->peers[1], ASKED, NULL), 1);
    audit_tick(router, now + 1001 * NS_PER_MS);
    ck_assert_uint_eq(told(router->peers[1], ASKED, NULL), 2);
    ck_assert_uint_eq(told(router->peers[0], ASKED, NULL), 1);
    says_audit(router->peers[0], nonce_of(router->peers[0]), 0, 0, "page 5 leaks"); /* once more: as before */
    says_audit(router->peers[1], nonce_of(router->peers[1]), 0, 0, NULL);
    const Tandem__Admin__V1__AuditResponse *a = door_answer(call);
    for (uint32_t i = 0; i < 3; i++)
        ck_assert_uint_eq(a->workers[i]->n_problems, i == 0);
    door_close(call);
}
END_TEST

START_TEST(test_audit_reports_a_peer_that_does_not_answer_and_goes_on)
{
    struct rpc_call *call = door_open(AUDIT, &REQUEST.base);
    router_turn(router);
    says_audit(router->peers[0], nonce_of(router->peers[0]), 0, 0, NULL);
    says_audit(router->peers[1], nonce_of(router->peers[1]) + 1, 0, 0, NULL); /* of another audit */
    world_lose(router->peers[2]);
    audit_tick(router, router_patience(router) + 4999 * NS_PER_MS);
    ck_assert(!call->finished);
    audit_tick(router, router_patience(router) + 5000 * NS_PER_MS);
    const Tandem__Admin__V1__AuditResponse *a = door_answer(call);
    ck_assert_uint_eq(a->n_workers, 3);
    ck_assert_uint_eq(a->workers[0]->n_problems, 0);
    for (int i = 1; i < 3; i++) {
        ck_assert_uint_eq(a->workers[i]->n_problems, 1);
        ck_assert(is_text(a->workers[i]->problems[0], "it does not answer"));
    }
    says_audit(router->peers[1], nonce_of(router->peers[1]), 0, 0, NULL); /* too late: ignored */
    door_close(call);
}
END_TEST

START_TEST(test_audit_does_not_wait_for_peers_that_are_lost_meanwhile_or_left)
{
    struct rpc_call *call = door_open(AUDIT, &REQUEST.base);
    router_turn(router);
    says_audit(router->peers[0], nonce_of(router->peers[0]), 0, 0, NULL);
    says_audit(router->peers[2], nonce_of(router->peers[2]), 0, 0, NULL);
    ck_assert(!call->finished);
    world_lose(router->peers[1]);
    router->peers[1]->drained = true;
    audit_tick(router, router_patience(router));
    ck_assert_uint_eq(((const Tandem__Admin__V1__AuditResponse *)door_answer(call))->n_workers, 2);
    door_close(call);
}
END_TEST

START_TEST(test_audit_that_runs_serves_a_second_call)
{
    struct rpc_call *first = door_open(AUDIT, &REQUEST.base);
    router_turn(router);
    struct rpc_call *second = door_open(AUDIT, &REQUEST.base);
    router_turn(router);
    ck_assert_uint_eq(told(router->peers[0], ASKED, NULL), 1);
    /* A worker that came meanwhile is not asked, and its answer is no part of this audit. */
    struct td_error e = {{0}};
    ck_assert_int_eq(peer_register(router, "d9:1", &e), TD_OK);
    world_connect(router->peers[3], 300);
    says_audit(router->peers[3], nonce_of(router->peers[0]), 0, 0, NULL);
    for (uint32_t i = 0; i < 3; i++)
        says_audit(router->peers[i], nonce_of(router->peers[i]), 0, 0, NULL);
    ck_assert_uint_eq(((const Tandem__Admin__V1__AuditResponse *)door_answer(first))->n_workers, 3);
    door_answer(second);
    door_close(first);
    door_close(second);
}
END_TEST

START_TEST(test_audit_without_peers_is_empty)
{
    world_close();
    world_open("");
    struct rpc_call *call = door_ask(AUDIT, &REQUEST.base);
    ck_assert_uint_eq(((const Tandem__Admin__V1__AuditResponse *)door_answer(call))->n_workers, 0);
    door_close(call);
}
END_TEST

START_TEST(test_audit_ends_with_the_router)
{
    struct rpc_call *call = door_open(AUDIT, &REQUEST.base);
    router_turn(router);
    says_audit(router->peers[0], nonce_of(router->peers[0]), 0, 0, "page 5 leaks");
    audit_drop(router);
    ck_assert_int_eq(call->code, RPC_UNAVAILABLE);
    ck_assert_str_eq(call->text, "the router is stopping");
    door_close(call);
}
END_TEST

/* -------------------------------------------------------------------- pairs */

/* The addresses that p was told last, as "s2:1 p0:1". */
static const char *told_peers(const struct peer *p)
{
    static char text[1024];
    const Tandem__Worker__V1__RouterMessage *m = NULL;
    *text = 0;
    if (told(p, PEERS, &m))
        for (size_t i = 0; i < m->peers->n_xfer_addresses; i++)
            snprintf(text + strlen(text), 64, "%s%.*s", i ? " " : "", (int)m->peers->xfer_addresses[i].len,
                     (const char *)m->peers->xfer_addresses[i].data);
    return text;
}

/* The router ticks. */
static void tick(void)
{
    world_wait_ms(100);
    for (uint32_t i = 0; i < router->n_peers; i++)
        router->peers[i]->heard_ns = router_patience(router);
    router_turn(router);
}

START_TEST(test_pairs_tells_each_worker_stores_first_then_those_that_hand_over)
{
    world_close();
    world_open("ppdds");
    tick();
    ck_assert_str_eq(told_peers(router->peers[2]), "s4:1 p0:1 p1:1 d3:1");
    ck_assert_str_eq(told_peers(router->peers[0]), "s4:1 p1:1 d2:1 d3:1");
    ck_assert_str_eq(told_peers(router->peers[1]), "s4:1 d2:1 d3:1 p0:1"); /* begins at its own place */
    ck_assert_uint_eq(told(router->peers[4], PEERS, NULL), 0);             /* a store reads from whom it asks */
    uint32_t before = told(router->peers[2], PEERS, NULL);
    router->pairs_changed = true;
    tick();
    ck_assert_uint_eq(told(router->peers[2], PEERS, NULL), before); /* the same list is not said twice */
    world_lose(router->peers[0]);
    tick();
    ck_assert_str_eq(told_peers(router->peers[2]), "s4:1 p1:1 d3:1");
}
END_TEST

START_TEST(test_pairs_tells_only_handovers_where_prefixes_are_computed)
{
    world_close();
    const char *const more[] = {"--prefix", "compute", NULL};
    world_open_with("ppds", more);
    tick();
    ck_assert_str_eq(told_peers(router->peers[2]), "p0:1 p1:1");
    ck_assert_str_eq(told_peers(router->peers[0]), "");
    ck_assert_uint_eq(told(router->peers[0], PEERS, NULL), 0); /* an empty list is what it has */
}
END_TEST

START_TEST(test_pairs_tells_at_most_sixteen_and_different_ones_to_different_workers)
{
    world_close();
    world_open("ddddddddddddddddddddd");
    tick();
    const Tandem__Worker__V1__RouterMessage *m = NULL;
    told(router->peers[0], PEERS, &m);
    ck_assert_uint_eq(m->peers->n_xfer_addresses, 16);
    ck_assert(is_text(m->peers->xfer_addresses[0], "d1:1"));
    told(router->peers[19], PEERS, &m);
    ck_assert(is_text(m->peers->xfer_addresses[0], "d20:1") && is_text(m->peers->xfer_addresses[1], "d0:1"));
}
END_TEST

/* A heartbeat of p that names this address as not to be reached; NULL: none. */
static void says_unreached(struct peer *p, const char *address)
{
    Tandem__Worker__V1__WorkerMessage m = TANDEM__WORKER__V1__WORKER_MESSAGE__INIT;
    Tandem__Worker__V1__Load load = TANDEM__WORKER__V1__LOAD__INIT;
    ProtobufCBinaryData list[] = {rpc_data(address ? address : "")};
    load.heard = load.taken = p->n_said;
    load.n_unreached = address != NULL;
    load.unreached = list;
    m.kind_case = TANDEM__WORKER__V1__WORKER_MESSAGE__KIND_LOAD;
    m.load = &load;
    worker_says(p, &m);
}

START_TEST(test_pairs_that_can_not_connect_get_no_requests_together)
{
    world_close();
    const char *const more[] = {"--plan", "split", NULL};
    Tandem__V1__GenerateRequest g = TANDEM__V1__GENERATE_REQUEST__INIT;
    Tandem__Admin__V1__StatusRequest status = TANDEM__ADMIN__V1__STATUS_REQUEST__INIT;
    world_open_with("ppd", more);
    world_hush();
    g.prompt_case = TANDEM__V1__GENERATE_REQUEST__PROMPT_TEXT;
    g.text = rpc_data("Tell me a story");
    tick();
    says_unreached(router->peers[2], "p0:1");
    for (int i = 0; i < 4; i++) {
        struct client c = ask(&g);
        ck_assert_int_eq(c.q->state, REQUEST_PLACED);
        ck_assert_ptr_eq(c.q->prefill, router->peers[1]);
        request_gone(c.q);
        rpc_call_unref(c.call);
    }
    struct rpc_call *call = door_ask(STATUS, &status.base);
    const Tandem__Admin__V1__StatusResponse *a = door_answer(call);
    ck_assert_uint_eq(a->workers[2]->n_unreached, 1);
    ck_assert(is_text(a->workers[2]->unreached[0], "p0"));
    ck_assert_uint_eq(a->workers[1]->n_unreached, 0);
    door_close(call);
    says_unreached(router->peers[2], "p1:1"); /* now the other one */
    struct client c = ask(&g);
    ck_assert_ptr_eq(c.q->prefill, router->peers[0]);
    request_gone(c.q);
    rpc_call_unref(c.call);
    says_unreached(router->peers[2], NULL);
    ck_assert(scheduler_can_read(router->scheduler, 2, 0) && scheduler_can_read(router->scheduler, 2, 1));
    ck_assert_uint_eq(router->peers[2]->n_unreached, 0);
}
END_TEST

START_TEST(test_pairs_ignores_addresses_that_a_worker_need_not_reach)
{
    says_unreached(router->peers[1], "d1:1"); /* itself */
    says_unreached(router->peers[1], "nobody");
    says_unreached(router->peers[2], "p0:1"); /* a store */
    for (uint32_t i = 0; i < 3; i++)
        ck_assert_uint_eq(router->peers[i]->n_unreached, 0);
    ck_assert(scheduler_can_read(router->scheduler, 1, 0));
}
END_TEST

int main(void)
{
    Suite *s = suite_create("router_audit");
    TCase *t = tcase_create("router_audit");
    tcase_add_checked_fixture(t, setup, world_close);
    tcase_set_timeout(t, 60);
    tcase_add_test(t, test_audit_puts_the_accounts_of_all_peers_together);
    tcase_add_test(t, test_audit_compares_blocks_with_the_index);
    tcase_add_test(t, test_audit_asks_again_until_there_is_an_answer);
    tcase_add_test(t, test_audit_reports_a_peer_that_does_not_answer_and_goes_on);
    tcase_add_test(t, test_audit_does_not_wait_for_peers_that_are_lost_meanwhile_or_left);
    tcase_add_test(t, test_audit_that_runs_serves_a_second_call);
    tcase_add_test(t, test_audit_without_peers_is_empty);
    tcase_add_test(t, test_audit_ends_with_the_router);
    tcase_add_test(t, test_pairs_tells_each_worker_stores_first_then_those_that_hand_over);
    tcase_add_test(t, test_pairs_tells_only_handovers_where_prefixes_are_computed);
    tcase_add_test(t, test_pairs_tells_at_most_sixteen_and_different_ones_to_different_workers);
    tcase_add_test(t, test_pairs_that_can_not_connect_get_no_requests_together);
    tcase_add_test(t, test_pairs_ignores_addresses_that_a_worker_need_not_reach);
    suite_add_tcase(s, t);
    return tap_main(s);
}
