/*
 * A peer that breaks the protocol: the test speaks it itself, over the loopback wire, to a real xfer.
 * Whatever it sends, the xfer refuses it by name, ends what was open exactly once, writes nowhere it should
 * not, and goes on.
 */
#include "proto/wire/checksum.h"
#include "tests/transfer/node.h"
#include "transfer/xfer_msg.h"

struct rogue {
    struct wire *wire;
    struct wire_conn *conn;
    struct kv_layout layout;
    uint8_t hello_ours[XFER_MSG_HELLO_MAX], hello_theirs[XFER_MSG_HELLO_MAX];
    uint32_t hello_ours_len, hello_theirs_len;
    bool is_open, is_up, is_lost, is_closed, is_accepted, is_mute;
    char answer_role; /* 'a' is the right one */
    uint32_t n_said, n_heard;
    struct xfer_msg last;
    uint32_t n_of[MSG_USER + 1]; /* received messages, by type */
};

static struct xfer_hub *hub;
static struct node *node;
static struct rogue rogue;

static void say(const uint8_t *out, uint32_t n)
{
    uint8_t sealed[WIRE_HEADER_MAX];
    memcpy(sealed, out, n);
    wire_send(rogue.conn, sealed, xfer_msg_seal(sealed, n, ++rogue.n_said), NULL, 0, NULL, NULL);
}

static void say_hello(void)
{
    struct xfer_msg_hello h = {.incarnation = 666, .layout = rogue.layout, .name = "rogue"};
    rogue.hello_ours_len = xfer_msg_put_hello(rogue.hello_ours, &h);
    say(rogue.hello_ours, rogue.hello_ours_len);
}

static void say_auth(char role)
{
    uint8_t mac[XFER_MSG_MAC_BYTES], out[WIRE_HEADER_MAX];
    struct bytes said =
        rogue.is_accepted
            ? xfer_msg_said(role, rogue.hello_theirs, rogue.hello_theirs_len, rogue.hello_ours, rogue.hello_ours_len)
            : xfer_msg_said(role, rogue.hello_ours, rogue.hello_ours_len, rogue.hello_theirs, rogue.hello_theirs_len);
    secret_sign(NULL, said.data, said.len, mac);
    bytes_free(&said);
    say(out, xfer_msg_put_auth(out, mac));
}

static void on_accept(void *user, struct wire_conn *conn)
{
    conn->user = user;
    rogue.conn = conn;
    rogue.is_accepted = true;
    rogue.n_said = rogue.n_heard = 0;
}

static void on_open(void *user)
{
    ((struct rogue *)user)->is_open = true;
}

static void on_message(void *user, const uint8_t *header, uint32_t len)
{
    struct rogue *r = user;
    ck_assert_int_eq(xfer_msg_unseal(header, &len, ++r->n_heard, NULL), TD_OK);
    ck_assert_int_eq(xfer_msg_decode(header, len, &r->last, NULL), TD_OK);
    r->n_of[r->last.type]++;
    if (r->last.type == MSG_HELLO && !r->is_mute) {
        memcpy(r->hello_theirs, header, len);
        r->hello_theirs_len = len;
        if (r->is_accepted)
            say_hello();
        else
            say_auth('c');
    }
    if (r->last.type == MSG_AUTH) {
        r->is_up = true;
        if (r->is_accepted)
            say_auth(r->answer_role);
    }
}

static void *on_payload(void *user, const uint8_t *header, uint32_t header_len, uint64_t len, void **token_out)
{
    struct rogue *r = user;
    (void)len;
    (void)token_out;
    ck_assert_int_eq(xfer_msg_decode(header, header_len, &r->last, NULL), TD_OK);
    r->n_of[r->last.type]++;
    return NULL;
}

static void on_payload_done(void *user, void *token, enum td_status status)
{
    (void)user;
    (void)token;
    (void)status;
}

static void on_error(void *user, enum td_status why)
{
    (void)why;
    ((struct rogue *)user)->is_lost = true;
}

static void on_closed(void *user)
{
    ((struct rogue *)user)->is_closed = true;
}

#define ROGUE_UNTIL(condition)                                                                                         \
    do {                                                                                                               \
        uint64_t until_deadline = wall_ns() + 5 * NS_PER_S;                                                            \
        while (!(condition)) {                                                                                         \
            wire_progress(rogue.wire);                                                                                 \
            ck_assert_msg(wall_ns() < until_deadline, "waited in vain for: %s", #condition);                           \
        }                                                                                                              \
    } while (0)

static void setup(void)
{
    hub = xfer_hub_open();
    node = node_open(&(struct node_params){.backend = "loopback", .hub = hub, .name = "node", .n_pages = 8});
    rogue = (struct rogue){.layout = node->layout, .answer_role = 'a'};
    struct wire_config c = {.listen = "rogue",
                            .hub = hub,
                            .events = {&rogue, on_accept, on_open, on_message, on_payload, NULL, on_payload_done, NULL,
                                       on_error, on_closed}};
    struct td_error error;
    ck_assert_int_eq(wire_loopback_open(&c, &rogue.wire, &error), TD_OK);
}

static void teardown(void)
{
    if (rogue.conn && !rogue.is_closed) {
        wire_close(rogue.conn);
        ROGUE_UNTIL(rogue.is_closed);
    }
    node_check_quiet(node);
    node_close(node);
    wire_free(rogue.wire);
    xfer_hub_close(hub);
}

static void connect_only(void)
{
    rogue.conn = wire_connect(rogue.wire, node->address, 0, &rogue);
    ROGUE_UNTIL(rogue.is_open);
}

static void connect_up(void)
{
    connect_only();
    say_hello();
    ROGUE_UNTIL(rogue.is_up);
}

/* Lets the node pull from us, until it asks for the lease. */
static void be_pulled_from(uint64_t counter)
{
    node_pull(node, counter, "rogue", 0, 20 * NS_PER_S);
    ROGUE_UNTIL(rogue.n_of[MSG_PULL_OPEN]);
}

static void announce(uint64_t counter, uint32_t first, uint16_t n)
{
    uint8_t out[WIRE_HEADER_MAX];
    struct xfer_msg_unit u = {.id = node_id(counter), .first = first, .n = n, .layer_begin = 0, .layer_end = 4};
    say(out, xfer_msg_put_unit(out, MSG_ANNOUNCE, &u));
}

static void send_data(uint64_t counter, uint32_t index, uint32_t generation, uint64_t wrong, const uint8_t *bytes)
{
    uint8_t out[WIRE_HEADER_MAX];
    struct xfer_id id = node_id(counter);
    struct checksum_identity identity = {id.incarnation, id.counter, index, generation, 0, 4};
    struct xfer_msg_data d = {id, index, generation, 0, 4, checksum_bytes(&identity, bytes, node->page_bytes) ^ wrong};
    wire_send(rogue.conn, out, xfer_msg_put_data(out, &d), bytes, node->page_bytes, NULL, NULL);
}

static bool arena_is_zero(size_t from_page)
{
    for (size_t i = from_page * node->page_bytes; i < node->arena_bytes; i++)
        if (node->arena[i])
            return false;
    return true;
}

START_TEST(test_rogue_wrong_checksum_fails_the_pull)
{
    uint8_t *bytes = mem_zalloc(node->page_bytes);
    be_pulled_from(1);
    announce(1, 0, 1);
    ROGUE_UNTIL(rogue.n_of[MSG_PULL]);
    send_data(1, 0, 0, 1, bytes);
    ROGUE_UNTIL(rogue.n_of[MSG_RELEASE]);
    NODE_WAIT(node, node->pulls[1].ends == 1);
    ck_assert_int_eq(node->pulls[1].status, TD_ERR_CHECKSUM);
    ck_assert_int_eq(rogue.last.release.status, TD_ERR_CHECKSUM);
    ck_assert_uint_eq(xfer_stats(node->x).checksum_errors, 1);
    free(bytes);
}
END_TEST

START_TEST(test_rogue_bytes_of_another_page_fail_the_pull)
{
    uint8_t *bytes = mem_zalloc(node->page_bytes), out[WIRE_HEADER_MAX];
    memset(bytes, 7, node->page_bytes);
    be_pulled_from(1);
    announce(1, 0, 2);
    ROGUE_UNTIL(rogue.n_of[MSG_PULL]);
    struct checksum_identity other = {77, 1, 1, 0, 0, 4}; /* identity of page 1, sent as page 0 */
    struct xfer_msg_data d = {node_id(1), 0, 0, 0, 4, checksum_bytes(&other, bytes, node->page_bytes)};
    wire_send(rogue.conn, out, xfer_msg_put_data(out, &d), bytes, node->page_bytes, NULL, NULL);
    ROGUE_UNTIL(rogue.n_of[MSG_RELEASE]);
    NODE_WAIT(node, node->pulls[1].ends == 1);
    ck_assert_int_eq(node->pulls[1].status, TD_ERR_CHECKSUM);
    free(bytes);
}
END_TEST

START_TEST(test_rogue_data_not_asked_for_lands_nowhere)
{
    uint8_t *bytes = mem_zalloc(node->page_bytes);
    memset(bytes, 7, node->page_bytes);
    be_pulled_from(1);
    announce(1, 0, 1);
    ROGUE_UNTIL(rogue.n_of[MSG_PULL]);
    switch (_i) {
    case 0:
        send_data(1, 3, 0, 0, bytes); /* an index that was never announced */
        break;
    case 1:
        send_data(1, 0, 9, 0, bytes); /* another generation */
        break;
    case 2: { /* another length */
        uint8_t out[WIRE_HEADER_MAX];
        struct xfer_msg_data d = {node_id(1), 0, 0, 0, 4, 0};
        wire_send(rogue.conn, out, xfer_msg_put_data(out, &d), bytes, 100, NULL, NULL);
        break;
    }
    default:
        send_data(2, 0, 0, 0, bytes); /* an unknown transfer: nothing happens */
        announce(1, 5, 3);
        announce(1, 5, 1); /* announced twice */
        break;
    }
    NODE_WAIT(node, (wire_progress(rogue.wire), node->pulls[1].ends == 1));
    ck_assert_int_eq(node->pulls[1].status, TD_ERR_PROTOCOL);
    ck_assert(arena_is_zero(0));
    free(bytes);
}
END_TEST

START_TEST(test_rogue_data_sent_twice_lands_once)
{
    uint8_t *bytes = mem_zalloc(node->page_bytes), *other = mem_zalloc(node->page_bytes);
    memset(bytes, 7, node->page_bytes);
    memset(other, 8, node->page_bytes);
    be_pulled_from(1);
    announce(1, 0, 2);
    ROGUE_UNTIL(rogue.n_of[MSG_PULL]);
    send_data(1, 0, 0, 0, bytes);
    send_data(1, 0, 0, 0, other);
    NODE_WAIT(node, (wire_progress(rogue.wire), node->pulls[1].ends == 1));
    ck_assert_int_eq(node->pulls[1].status, TD_ERR_PROTOCOL);
    ck_assert_mem_eq(node->arena, bytes, node->page_bytes);
    free(bytes);
    free(other);
}
END_TEST

START_TEST(test_rogue_announcement_out_of_range_ends_the_pull)
{
    be_pulled_from(1);
    if (_i)
        announce(1, 1000000, 1); /* more pages than the arena has */
    else {
        uint8_t out[WIRE_HEADER_MAX];
        struct xfer_msg_unit u = {.id = node_id(1), .n = 1, .layer_begin = 3, .layer_end = 5};
        say(out, xfer_msg_put_unit(out, MSG_ANNOUNCE, &u));
    }
    NODE_WAIT(node, (wire_progress(rogue.wire), node->pulls[1].ends == 1));
    ck_assert_int_eq(node->pulls[1].status, TD_ERR_PROTOCOL);
    ck_assert_uint_eq(node->pulls[1].placed, 0);
}
END_TEST

START_TEST(test_rogue_finish_with_other_pages_ends_the_pull)
{
    uint8_t out[WIRE_HEADER_MAX];
    be_pulled_from(1);
    announce(1, 0, 2);
    say(out, xfer_msg_put_finish(out, node_id(1), 1, NULL, 0));
    NODE_WAIT(node, (wire_progress(rogue.wire), node->pulls[1].ends == 1));
    ck_assert_int_eq(node->pulls[1].status, TD_ERR_PROTOCOL);
}
END_TEST

START_TEST(test_rogue_nothing_is_accepted_before_the_proof)
{
    uint8_t out[WIRE_HEADER_MAX];
    node_grant(node, 1, 20 * NS_PER_S);
    connect_only();
    if (_i > 0)
        say_hello();
    if (_i < 2)
        say(out, xfer_msg_put_pull_open(out, node_id(1), 0));
    else
        say(out, xfer_msg_put_user(out, 1, 1, 0, "x", 1));
    ROGUE_UNTIL(rogue.is_lost);
    ck_assert_uint_eq(rogue.n_of[MSG_REFUSE] + rogue.n_of[MSG_ANNOUNCE], 0);
    ck_assert_uint_eq(node->ups, 0);
    ck_assert_uint_eq(node->n_messages, 0);
    xfer_lease_cancel(node->x, node_id(1));
}
END_TEST

/* The node must not accept its own proof, sent back, as that of the other role. */
START_TEST(test_rogue_proof_of_the_other_role_is_none)
{
    node_pull(node, 1, "rogue", 0, 20 * NS_PER_S);
    rogue.answer_role = 'c';
    NODE_WAIT(node, (wire_progress(rogue.wire), node->pulls[1].ends == 1));
    ck_assert_int_eq(node->pulls[1].status, TD_ERR_AUTH);
    ck_assert_uint_eq(node->ups, 0);
}
END_TEST

START_TEST(test_rogue_garbage_is_refused_with_a_reason)
{
    static const uint8_t garbage[] = {0xff, 0xff, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    if (_i)
        connect_up();
    else
        connect_only();
    say(garbage, sizeof(garbage));
    ROGUE_UNTIL(rogue.n_of[MSG_GOODBYE]);
    ck_assert_int_eq(rogue.last.goodbye.status, TD_ERR_PROTOCOL);
    ROGUE_UNTIL(rogue.is_lost);
    NODE_WAIT(node, node->downs == node->ups);
}
END_TEST

START_TEST(test_rogue_reader_gets_only_what_was_announced)
{
    uint8_t out[WIRE_HEADER_MAX];
    node_grant(node, 1, 20 * NS_PER_S);
    node_announce(node, 1, 0, 0, 2, 0, 2);
    connect_up();
    say(out, xfer_msg_put_pull_open(out, node_id(1), node->incarnation));
    ROGUE_UNTIL(rogue.n_of[MSG_ANNOUNCE]);
    ck_assert_uint_eq(rogue.last.unit.generations[1], 101);
    struct xfer_msg_unit u = {.id = node_id(1), .n = 1, .layer_begin = 0, .layer_end = 2, .generations = {100}};
    if (_i == 0)
        u.generations[0] = 99; /* stale */
    else if (_i == 1)
        u.layer_end = 3; /* a layer that is not announced yet */
    else
        u.first = 2;
    say(out, xfer_msg_put_unit(out, MSG_PULL, &u));
    ROGUE_UNTIL(rogue.n_of[MSG_REFUSE]);
    ck_assert_int_eq(rogue.last.refuse.reason, REFUSE_STALE);
    ck_assert_uint_eq(rogue.n_of[MSG_DATA], 0);
    /* Reports that it has everything, of a lease that is not finished. */
    say(out, xfer_msg_put_release(out, node_id(1), TD_OK));
    NODE_WAIT(node, (wire_progress(rogue.wire), node->leases[1].ends == 1));
    ck_assert_int_eq(node->leases[1].status, TD_ERR_CANCELLED);
}
END_TEST

/* The reader says how many layers a part may have. Whatever it says, everything that it asked for comes
 * exactly once. */
START_TEST(test_rogue_holder_cuts_pages_into_the_parts_asked_for)
{
    static const struct {
        uint16_t part_layers;
        uint32_t n_parts; /* parts of two pages with four layers each */
    } CASES[] = {{0, 2}, {1, 8}, {2, 4}, {3, 4}, {4, 2}, {UINT16_MAX, 2}};
    uint8_t out[WIRE_HEADER_MAX];
    node_grant(node, 1, 20 * NS_PER_S);
    node_announce(node, 1, 0, 0, 2, 0, 4);
    connect_up();
    say(out, xfer_msg_put_pull_open(out, node_id(1), node->incarnation));
    ROGUE_UNTIL(rogue.n_of[MSG_ANNOUNCE]);
    struct xfer_msg_unit u = {.id = node_id(1), .n = 2, .layer_begin = 0, .layer_end = 4, .generations = {100, 101}};
    u.part_layers = CASES[_i].part_layers;
    say(out, xfer_msg_put_unit(out, MSG_PULL, &u));
    ROGUE_UNTIL(rogue.n_of[MSG_DATA] == CASES[_i].n_parts);
    ck_assert_uint_eq(rogue.last.data.index, 1); /* page by page, the end of the last one at the end */
    ck_assert_uint_eq(rogue.last.data.layer_end, 4);
    say(out, xfer_msg_put_release(out, node_id(1), TD_ERR_CANCELLED));
    NODE_WAIT(node, (wire_progress(rogue.wire), node->leases[1].ends == 1));
    ck_assert_uint_eq(rogue.n_of[MSG_DATA], CASES[_i].n_parts);
    ck_assert_uint_eq(xfer_stats(node->x).bytes_out, 2 * node->page_bytes);
}
END_TEST

START_TEST(test_rogue_pull_of_an_unknown_lease_is_refused)
{
    uint8_t out[WIRE_HEADER_MAX];
    connect_up();
    struct xfer_msg_unit u = {.id = node_id(5), .n = 1, .layer_begin = 0, .layer_end = 1};
    say(out, xfer_msg_put_unit(out, MSG_PULL, &u));
    ROGUE_UNTIL(rogue.n_of[MSG_REFUSE]);
    ck_assert_int_eq(rogue.last.refuse.reason, REFUSE_UNKNOWN);
    say(out, xfer_msg_put_pull_open(out, node_id(5), node->incarnation + 1));
    ROGUE_UNTIL(rogue.n_of[MSG_REFUSE] == 2);
    ck_assert_int_eq(rogue.last.refuse.reason, REFUSE_STALE);
}
END_TEST

START_TEST(test_rogue_that_says_nothing_is_dropped)
{
    connect_up();
    NODE_WAIT(node, node->ups == 1);
    uint64_t begin = wall_ns();
    ROGUE_UNTIL(rogue.is_lost);
    ck_assert_uint_ge(wall_ns() - begin, 800 * NS_PER_MS);
    ck_assert_uint_ge(rogue.n_of[MSG_HEARTBEAT], 1);
    NODE_WAIT(node, node->downs == 1);
    ck_assert_int_eq(node->down_why, TD_ERR_PEER_LOST);
}
END_TEST

static uint32_t ups_of(struct node *n)
{
    pthread_mutex_lock(&n->lock);
    uint32_t ups = n->ups;
    pthread_mutex_unlock(&n->lock);
    return ups;
}

/* The waits between connections are 50, 100, 200 ms and so on, half of each random: about six connections in
 * that time, not thousands. */
START_TEST(test_rogue_that_dies_after_each_handshake_is_connected_to_ever_more_slowly)
{
    const char *address = "rogue";
    uint32_t n_lives = 0;
    uint64_t until = wall_ns() + 1500 * NS_PER_MS; /* the time is what is tested */
    xfer_want(node->x, &address, 1);
    while (wall_ns() < until) {
        wire_progress(rogue.wire);
        if (!rogue.conn || ups_of(node) == n_lives)
            continue;
        n_lives++;
        struct wire_conn *dying = rogue.conn;
        rogue.conn = NULL;
        rogue.is_closed = false;
        wire_close(dying);
        ROGUE_UNTIL(rogue.is_closed);
    }
    rogue.is_closed = false;
    xfer_want(node->x, NULL, 0);
    ck_assert_uint_ge(n_lives, 2);
    ck_assert_uint_le(n_lives, 12);
}
END_TEST

/* An attempt takes up to two silences if the other side says nothing. The next attempt begins after half a
 * silence. */
START_TEST(test_rogue_that_does_not_answer_holds_up_no_others)
{
    const uint64_t silence_ns = 3 * NS_PER_S;
    struct node *reader = node_open(&(struct node_params){
        .backend = "loopback", .hub = hub, .name = "reader", .n_pages = 1, .silence_ns = silence_ns});
    const char *addresses[] = {"rogue", node->address};
    rogue.is_mute = true;
    uint64_t begin = wall_ns();
    xfer_want(reader->x, addresses, 2);
    ROGUE_UNTIL(ups_of(reader) == 1);
    ck_assert_uint_lt(wall_ns() - begin, 2 * silence_ns);
    node_close(reader);
}
END_TEST

START_TEST(test_rogue_many_peers_are_connected_to_one_after_the_other)
{
    enum { PEERS = 12, EVERY_MS = 20 };
    struct node *peers[PEERS];
    const char *addresses[PEERS];
    for (int i = 0; i < PEERS; i++) {
        peers[i] = node_open(&(struct node_params){.backend = "loopback", .hub = hub, .name = "peer", .n_pages = 1});
        addresses[i] = peers[i]->address;
    }
    uint64_t begin = wall_ns();
    xfer_want(node->x, addresses, PEERS);
    NODE_WAIT(node, node->ups == PEERS);
    ck_assert_uint_ge(wall_ns() - begin, (PEERS - 1) * EVERY_MS * NS_PER_MS);
    xfer_want(node->x, NULL, 0);
    for (int i = 0; i < PEERS; i++)
        node_close(peers[i]);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("rogue");
    TCase *tc = tcase_create("loopback");
    tcase_add_checked_fixture(tc, setup, teardown);
    tcase_set_timeout(tc, 30);
    tcase_add_test(tc, test_rogue_wrong_checksum_fails_the_pull);
    tcase_add_test(tc, test_rogue_bytes_of_another_page_fail_the_pull);
    tcase_add_loop_test(tc, test_rogue_data_not_asked_for_lands_nowhere, 0, 4);
    tcase_add_test(tc, test_rogue_data_sent_twice_lands_once);
    tcase_add_loop_test(tc, test_rogue_announcement_out_of_range_ends_the_pull, 0, 2);
    tcase_add_test(tc, test_rogue_finish_with_other_pages_ends_the_pull);
    tcase_add_loop_test(tc, test_rogue_nothing_is_accepted_before_the_proof, 0, 3);
    tcase_add_test(tc, test_rogue_proof_of_the_other_role_is_none);
    tcase_add_loop_test(tc, test_rogue_garbage_is_refused_with_a_reason, 0, 2);
    tcase_add_loop_test(tc, test_rogue_reader_gets_only_what_was_announced, 0, 3);
    tcase_add_loop_test(tc, test_rogue_holder_cuts_pages_into_the_parts_asked_for, 0, 6);
    tcase_add_test(tc, test_rogue_pull_of_an_unknown_lease_is_refused);
    tcase_add_test(tc, test_rogue_that_says_nothing_is_dropped);
    tcase_add_test(tc, test_rogue_that_dies_after_each_handshake_is_connected_to_ever_more_slowly);
    tcase_add_test(tc, test_rogue_that_does_not_answer_holds_up_no_others);
    tcase_add_test(tc, test_rogue_many_peers_are_connected_to_one_after_the_other);
    suite_add_tcase(s, tc);
    SRunner *sr = srunner_create(s);
    srunner_run_all(sr, CK_ENV);
    int failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed ? 1 : 0;
}
