/*
 * UCX as a layer over TCP: which transports need a trusted network, peers without the layer, and a peer that
 * speaks the layer's messages wrongly or before it has proved itself. (Its promises as a backend are in
 * test_xfer.c.)
 */
#include "base/endian.h"
#include "tests/tap.h"
#include "tests/transfer/node.h"
#include "transfer/wire_ucx.h"
#include "transfer/wire_wrap.h"

enum { HOST = 0x5501, WORKER = 0x5502, READY = 0x5503, PAGES = 4 };
#define LONG (20 * NS_PER_S)

START_TEST(test_ucx_networks_need_trust)
{
    static const struct {
        const char *list, *named; /* named: the transport that is refused; NULL: none */
    } CASES[] = {{"posix", NULL},         {"posix,cma", NULL}, {"sysv,self", NULL},  {"shm", NULL},
                 {"rc,tcp", "rc"},        {"tcp", "tcp"},      {"posix,tcp", "tcp"}, {"all", "all"},
                 {"^posix", "^posix"},    {"ud", "ud"},        {"posix,,rc", ""},    {"posix2", "posix2"},
                 {"cuda_ipc,posix", NULL}};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        struct td_error e = {""};
        enum td_status s = wire_ucx_check(CASES[i].list, false, false, &e);
        ck_assert_msg(s == (CASES[i].named ? TD_ERR_INVALID : TD_OK), "%s", CASES[i].list);
        ck_assert_msg(!CASES[i].named || (strstr(e.text, "--trusted-network") && strstr(e.text, CASES[i].named)), "%s",
                      e.text);
        ck_assert_int_eq(wire_ucx_check(CASES[i].list, true, false, &e), TD_OK);
        s = wire_ucx_check(CASES[i].list, true, true, &e); /* none of them encrypts */
        ck_assert_msg(s == (CASES[i].named ? TD_ERR_INVALID : TD_OK), "%s", CASES[i].list);
        ck_assert_msg(!s || strstr(e.text, "--kv-encrypt"), "%s", e.text);
    }
}
END_TEST

/* ------------------------------------------------------------- with and without */

static void transfer(struct node *h, struct node *r, uint64_t counter)
{
    for (uint32_t i = 0; i < PAGES; i++)
        node_fill(h, i, counter, i);
    node_grant(h, counter, LONG);
    node_announce(h, counter, 0, 0, PAGES, 0, (uint16_t)h->layout.n_layers);
    xfer_lease_finish(h->x, node_id(counter), PAGES, NULL, 0);
    node_pull(r, counter, h->address, 0, LONG);
    NODE_WAIT(r, r->pulls[counter].ends);
    ck_assert_int_eq(r->pulls[counter].status, TD_OK);
    for (uint32_t i = 0; i < PAGES; i++)
        ck_assert(node_page_is(r, i, counter, i));
    NODE_WAIT(h, h->leases[counter].ends);
}

START_TEST(test_ucx_a_peer_without_it_moves_pages_by_tcp)
{
    static const char *const PAIRS[][2] = {{"ucx", "mapped"}, {"mapped", "ucx"}, {"tcp", "ucx"}, {"ucx", "tcp"}};
    struct node *h = node_open(&(struct node_params){.backend = PAIRS[_i][0], .name = "holder", .n_pages = PAGES});
    struct node *r = node_open(&(struct node_params){.backend = PAIRS[_i][1], .name = "reader", .n_pages = PAGES});
    char text[256];
    for (uint64_t counter = 1; counter <= 20; counter++)
        transfer(h, r, counter);
    xfer_transport(r->x, text, sizeof(text));
    ck_assert_str_eq(text, "tcp");
    ck_assert_uint_eq(h->downs + r->downs, 0);
    node_close(r);
    node_close(h);
}
END_TEST

/* ----------------------------------------------------------- a peer by hand */

struct end { /* a connection as its user sees it */
    struct wire_conn *conn;
    bool is_open, is_closed;
    uint32_t n_messages, n_errors, n_hosts, n_workers;
    uint16_t flags; /* of HOST */
    enum td_status error;
};

static struct wire *wires[2]; /* [0]: UCX over TCP, listens; [1]: TCP alone, the peer by hand */
static struct end ends[2];
static bool trusts;

static void on_accept(void *user, struct wire_conn *conn)
{
    (void)user;
    ends[0].conn = conn;
    conn->user = &ends[0];
    if (trusts)
        wire_trust(conn);
}

static void on_open(void *user)
{
    struct end *e = user;
    e->is_open = true;
    wire_trust(e->conn);
}

static void on_message(void *user, const uint8_t *header, uint32_t len)
{
    struct end *e = user;
    uint16_t type = len >= 2 ? get_u16(header) : 0;
    e->n_messages++;
    if (type == HOST)
        e->flags = get_u16(header + 2);
    e->n_hosts += type == HOST;
    e->n_workers += type == WORKER;
}

static void *on_payload(void *user, const uint8_t *header, uint32_t header_len, uint64_t len, void **token_out)
{
    (void)user;
    (void)header;
    (void)header_len;
    (void)len;
    (void)token_out;
    return NULL;
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

#define UNTIL(condition)                                                                                               \
    do {                                                                                                               \
        uint64_t until_deadline = wall_ns() + 5 * NS_PER_S;                                                            \
        while (!(condition)) {                                                                                         \
            wire_progress(wires[0]);                                                                                   \
            wire_progress(wires[1]);                                                                                   \
            ck_assert_msg(wall_ns() < until_deadline, "waited in vain for: %s", #condition);                           \
        }                                                                                                              \
    } while (0)

static void open_pair(bool is_trusting)
{
    static const struct log LOG = {.who = "test", .level = LOG_ERROR};
    struct wire_config c = {.listen = "127.0.0.1:0",
                            .transports = "ucx",
                            .log = &LOG,
                            .events = {.on_accept = on_accept,
                                       .on_open = on_open,
                                       .on_message = on_message,
                                       .on_payload = on_payload,
                                       .on_error = on_error,
                                       .on_closed = on_closed}};
    struct td_error e = {""};
    memset(ends, 0, sizeof(ends));
    trusts = is_trusting;
    ck_assert_msg(wire_ucx_open(&c, &wires[0], &e) == TD_OK, "%s", e.text);
    c.listen = NULL;
    ck_assert_msg(wire_tcp_open(&c, &wires[1], &e) == TD_OK, "%s", e.text);
    ends[1].conn = wire_connect(wires[1], wires[0]->address, 0, &ends[1]);
    UNTIL(ends[1].is_open && ends[0].conn);
}

static void close_pair(void)
{
    for (int i = 0; i < 2; i++)
        wire_close(ends[i].conn);
    UNTIL(ends[0].is_closed && ends[1].is_closed);
    wire_free(wires[1]);
    wire_free(wires[0]);
}

static uint32_t put_message(uint8_t *out, uint16_t type, uint16_t n, uint32_t check, const void *bytes, uint32_t len)
{
    put_u16(out, type);
    put_u16(out + 2, n);
    put_u32(out + 4, check);
    if (len)
        memcpy(out + 8, bytes, len);
    return 8 + len;
}

static void say(uint16_t type, uint16_t n, uint32_t check, const void *bytes, uint32_t len)
{
    uint8_t out[WIRE_HEADER_MAX];
    uint32_t size = put_message(out, type, n, check, bytes, len);
    wire_send(ends[1].conn, out, size, NULL, 0, NULL, NULL);
}

static void say_host(uint16_t flags)
{
    char boot_id[WRAP_BOOT_ID_BYTES];
    wrap_boot_id(boot_id);
    say(HOST, flags, 0, boot_id, sizeof(boot_id));
}

/* Messages of the layer are the protocol's business, which refuses them, until the peer has proved itself. */
START_TEST(test_ucx_takes_nothing_before_the_proof)
{
    open_pair(false);
    say_host(3);
    say(WORKER, 4, 0, "\x12\x34\x56\x78", 4);
    say(READY, 0, 0, NULL, 0);
    UNTIL(ends[0].n_messages == 3);
    ck_assert_uint_eq(ends[0].n_errors, 0);
    ck_assert_uint_eq(ends[1].n_messages, 0); /* it was told nothing either: no HOST, no address of a worker */
    close_pair();
}
END_TEST

START_TEST(test_ucx_peers_say_host_then_worker)
{
    open_pair(true);
    UNTIL(ends[1].n_hosts == 1);
    ck_assert_uint_eq(ends[1].n_workers, 0); /* not before it has said that it is on this host */
    if (ends[1].flags & WIRE_UCX_SHM) {      /* else /dev/shm is too small here */
        say_host(WIRE_UCX_SHM);
        UNTIL(ends[1].n_workers == 1);
    }
    close_pair();
}
END_TEST

/* Whoever knows the secret may err, too: the connection ends, this process does not. */
START_TEST(test_ucx_a_wrong_message_costs_the_connection)
{
    static const struct {
        uint16_t type, n;
        bool host_first;
        uint32_t check;
        const char *bytes;
        uint32_t len;
    } CASES[] = {
        {HOST, 1, false, 0, "short", 5},  /* no boot id */
        {HOST, 1, true, 0, NULL, 0},      /* and a second HOST */
        {WORKER, 4, false, 0, "abcd", 4}, /* before HOST */
        {WORKER, 4, true, 1, "abcd", 4},  /* damaged */
        {WORKER, 9, true, 0, "abcd", 4},  /* shorter than it says */
        {WORKER, 0, true, 0, NULL, 0},    /* empty */
        {READY, 0, true, 0, NULL, 0},     /* before WORKER */
        {READY, 0, false, 0, "more", 4},  /* too long */
    };
    open_pair(true);
    UNTIL(ends[1].n_hosts == 1);
    if (CASES[_i].host_first)
        say_host(0);
    say(CASES[_i].type, CASES[_i].n, CASES[_i].check, CASES[_i].bytes, CASES[_i].len);
    UNTIL(ends[0].n_errors == 1);
    ck_assert_int_eq(ends[0].error, TD_ERR_PROTOCOL);
    close_pair();
}
END_TEST

/* ----------------------------------------------------- UCX's own connections */

static void on_endpoint_error(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    (void)ep;
    *(ucs_status_t *)arg = status;
}

static void worker_turns(ucp_worker_h worker, uint32_t n_ms)
{
    for (uint32_t i = 0; i < n_ms; i++) {
        while (ucp_worker_progress(worker))
            ;
        usleep(1000);
    }
}

static void endpoint_close(ucp_worker_h worker, ucp_ep_h ep)
{
    ucp_request_param_t p = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_EP_CLOSE_FLAG_FORCE};
    ucs_status_ptr_t request = ucp_ep_close_nbx(ep, &p);
    while (UCS_PTR_IS_PTR(request) && ucp_request_check_status(request) == UCS_INPROGRESS)
        ucp_worker_progress(worker);
    if (UCS_PTR_IS_PTR(request))
        ucp_request_free(request);
}

/* A peer connects by UCX's tcp, and is gone before this process answers on that connection. UCX tries once
 * more with a connection of its own; when that is refused at once, UCX 1.13 fails an assertion of its own. */
START_TEST(test_ucx_tcp_survives_a_peer_that_left_while_connecting)
{
    struct td_error e = {""};
    ucp_context_h context;
    ucp_worker_h here, peer;
    ucp_ep_h to_here, to_peer;
    ucp_address_t *here_address, *peer_address;
    size_t n_bytes;
    int fd;
    ucs_status_t why = UCS_OK, peer_why = UCS_OK;
    wire_ucx_setup();
    ck_assert_msg(wire_ucx_context_open("tcp", "lo", &context, &e) == TD_OK, "%s", e.text);
    ck_assert_int_eq(wire_ucx_worker_open(context, &here, &fd), TD_OK);
    ck_assert_int_eq(wire_ucx_worker_open(context, &peer, &fd), TD_OK);
    ck_assert_int_eq(ucp_worker_get_address(here, &here_address, &n_bytes), UCS_OK);
    ck_assert_int_eq(ucp_worker_get_address(peer, &peer_address, &n_bytes), UCS_OK);
    uint8_t *kept = mem_zalloc(n_bytes);
    memcpy(kept, peer_address, n_bytes);
    ucp_worker_release_address(peer, peer_address);

    ck_assert_int_eq(wire_ucx_endpoint_open(peer, (uint8_t *)here_address, on_endpoint_error, &peer_why, &to_here),
                     UCS_OK);
    worker_turns(peer, 20);
    worker_turns(here, 50); /* answers, which the peer does not read */
    endpoint_close(peer, to_here);
    ucp_worker_destroy(peer);
    if (wire_ucx_endpoint_open(here, kept, on_endpoint_error, &why, &to_peer) == UCS_OK) {
        worker_turns(here, 200);
        ck_assert_int_ne(why, UCS_OK);
        endpoint_close(here, to_peer);
    }
    ucp_worker_release_address(here, here_address);
    ucp_worker_destroy(here);
    ucp_cleanup(context);
    free(kept);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("ucx");
    TCase *tc = tcase_create("layer");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, test_ucx_networks_need_trust);
    tcase_add_loop_test(tc, test_ucx_a_peer_without_it_moves_pages_by_tcp, 0, 4);
    tcase_add_test(tc, test_ucx_takes_nothing_before_the_proof);
    tcase_add_test(tc, test_ucx_peers_say_host_then_worker);
    tcase_add_loop_test(tc, test_ucx_a_wrong_message_costs_the_connection, 0, 8);
    tcase_add_test(tc, test_ucx_tcp_survives_a_peer_that_left_while_connecting);
    suite_add_tcase(s, tc);
    return tap_main(s);
}
