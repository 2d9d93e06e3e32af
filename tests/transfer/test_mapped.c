/* The mapped arena: its promises beyond those of all backends, and when it must not be used. */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "base/endian.h"
#include "tests/tap.h"
#include "tests/transfer/node.h"
#include "transfer/wire.h"

enum { N = 16 };
#define LONG (20 * NS_PER_S)

static struct node *open_node(const char *backend, const char *name)
{
    return node_open(&(struct node_params){.backend = backend, .name = name, .n_pages = N, .layout = BIG_LAYOUT});
}

static void wait_for_transport(struct node *n, const char *word)
{
    char text[256] = "";
    uint64_t deadline = wall_ns() + 10 * NS_PER_S;
    while (!strstr(text, word) && wall_ns() < deadline)
        xfer_transport(n->x, text, sizeof(text));
    ck_assert_msg(strstr(text, word) != NULL, "transport is %s", text);
}

static void transfer(struct node *h, struct node *r, uint64_t counter)
{
    for (uint32_t i = 0; i < N; i++)
        node_fill(h, i, counter, i);
    node_grant(h, counter, LONG);
    node_announce(h, counter, 0, 0, N, 0, (uint16_t)h->layout.n_layers);
    xfer_lease_finish(h->x, node_id(counter), N, NULL, 0);
    node_pull(r, counter, h->address, 0, LONG);
    NODE_WAIT(r, r->pulls[counter].ends);
    ck_assert_int_eq(r->pulls[counter].status, TD_OK);
    for (uint32_t i = 0; i < N; i++)
        ck_assert(node_page_is(r, i, counter, i));
    NODE_WAIT(h, h->leases[counter].ends);
    ck_assert_int_eq(h->leases[counter].status, TD_OK);
}

static void close_pair(struct node *h, struct node *r)
{
    node_check_quiet(h);
    node_check_quiet(r);
    node_close(r);
    node_close(h);
}

START_TEST(test_mapped_pages_are_lent_and_checked)
{
    struct node *h = open_node("mapped", "holder"), *r = open_node("mapped", "reader");
    transfer(h, r, 1); /* the first bytes go through the connection, until the reader has mapped the arena */
    wait_for_transport(r, "mapped");
    wait_for_transport(h, "mapped");
    transfer(h, r, 2);
    ck_assert_uint_eq(xfer_stats(r->x).checksum_errors, 0);
    close_pair(h, r);
}
END_TEST

/* The holder breaks its promise and reuses leased pages: the reader must notice. */
START_TEST(test_mapped_page_that_changes_under_the_reader_fails_its_checksum)
{
    struct node *h = open_node("mapped", "holder"), *r = open_node("mapped", "reader");
    transfer(h, r, 1);
    wait_for_transport(h, "mapped");
    uint32_t n_caught = 0;
    uint64_t deadline = wall_ns() + 30 * NS_PER_S;
    for (uint64_t counter = 2; !n_caught && wall_ns() < deadline; counter++) {
        struct pull_record *p = &r->pulls[counter % NODE_IDS];
        bool is_ended = false;
        node_grant(h, counter, LONG);
        node_announce(h, counter, 0, 0, N, 0, (uint16_t)h->layout.n_layers);
        xfer_lease_finish(h->x, node_id(counter), N, NULL, 0);
        node_pull(r, counter, h->address, 0, LONG);
        for (uint64_t i = 0; !is_ended && wall_ns() < deadline; i++) {
            h->arena[i * 4096 % h->arena_bytes]++;
            pthread_mutex_lock(&r->lock);
            is_ended = p->ends;
            pthread_mutex_unlock(&r->lock);
        }
        NODE_WAIT(r, p->ends);
        n_caught += p->status == TD_ERR_CHECKSUM;
        ck_assert(p->status == TD_OK || p->status == TD_ERR_CHECKSUM);
        NODE_WAIT(h, h->leases[counter % NODE_IDS].ends);
        *p = (struct pull_record){0};
        h->leases[counter % NODE_IDS] = (struct lease_record){0};
    }
    ck_assert_uint_ge(n_caught, 1);
    ck_assert_uint_ge(xfer_stats(r->x).checksum_errors, 1);
    close_pair(h, r);
}
END_TEST

START_TEST(test_mapped_arena_can_be_written_by_nobody_else)
{
    void *arena;
    const void *view;
    int fd;
    ck_assert_int_eq(mem_map_shared(1 << 20, &arena, &fd), TD_OK);
    memset(arena, 7, 1 << 20);
    char path[64];
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    int again = open(path, O_RDWR | O_CLOEXEC); /* any process of this user may do that */
    ck_assert_int_ge(again, 0);
    ck_assert_ptr_eq(mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, again, 0), MAP_FAILED);
    ck_assert_int_eq((int)pwrite(again, "x", 1, 0), -1);
    ck_assert_int_eq(ftruncate(again, 0), -1);
    ck_assert_int_eq(mem_map_view(1 << 20, again, &view), TD_OK);
    ck_assert_int_eq(mprotect((void *)(uintptr_t)view, 1 << 20, PROT_READ | PROT_WRITE), -1);
    ((volatile char *)arena)[4096] = 9; /* the owner may still write, and the view shows it */
    ck_assert_int_eq(((const volatile char *)view)[4096], 9);
    close(again);
    close(fd);
    mem_unmap((void *)(uintptr_t)view, 1 << 20);
    mem_unmap(arena, 1 << 20);
}
END_TEST

START_TEST(test_mapped_and_plain_peers_understand_each_other)
{
    static const char *const PAIRS[][2] = {
        {"mapped", "tcp"}, {"tcp", "mapped"}, {"auto", "mapped"}, {"mapped", "auto"}};
    struct node *h = open_node(PAIRS[_i][0], "holder"), *r = open_node(PAIRS[_i][1], "reader");
    transfer(h, r, 1);
    transfer(h, r, 2);
    close_pair(h, r);
}
END_TEST

/* ----------------------------------------- a holder that offers what it should not: raw messages over the
 * real transport */

struct rogue {
    struct wire *wire;
    struct wire_conn *conn;
    bool is_closed;
    uint32_t n_taken, n_lost;
};

static void rogue_accept(void *user, struct wire_conn *conn)
{
    ((struct rogue *)user)->conn = conn;
    conn->user = user;
}

static void rogue_message(void *user, const uint8_t *header, uint32_t len)
{
    ((struct rogue *)user)->n_taken += len == 8 && get_u16(header) == 0x4d02;
}

static void *rogue_payload(void *user, const uint8_t *header, uint32_t header_len, uint64_t len, void **token_out)
{
    (void)user, (void)header, (void)header_len, (void)len, (void)token_out;
    return NULL;
}

static void rogue_error(void *user, enum td_status why)
{
    (void)why;
    ((struct rogue *)user)->n_lost++;
}

static void rogue_closed(void *user)
{
    ((struct rogue *)user)->is_closed = true;
}

/* The reader under test: a wire without an xfer, which trusts its peer at once. */
struct plain {
    struct wire *wire;
    struct wire_conn *conn;
    bool is_open, is_lost, is_closed;
    uint32_t n_messages;
};

static void plain_accept(void *user, struct wire_conn *conn)
{
    (void)user, (void)conn;
}

static void plain_open(void *user)
{
    struct plain *p = user;
    p->is_open = true;
    wire_trust(p->conn);
}

static void plain_message(void *user, const uint8_t *header, uint32_t len)
{
    (void)header, (void)len;
    ((struct plain *)user)->n_messages++;
}

static void plain_error(void *user, enum td_status why)
{
    ck_assert_int_eq(why, TD_ERR_PROTOCOL);
    ((struct plain *)user)->is_lost = true;
}

static void plain_closed(void *user)
{
    ((struct plain *)user)->is_closed = true;
}

static void nothing_done(void *user, void *token, enum td_status status)
{
    (void)user, (void)token, (void)status;
}

static struct rogue rogue;
static struct plain plain;

#define UNTIL(condition)                                                                                               \
    do {                                                                                                               \
        uint64_t until_deadline = wall_ns() + 5 * NS_PER_S;                                                            \
        while (!(condition)) {                                                                                         \
            wire_progress(rogue.wire);                                                                                 \
            wire_progress(plain.wire);                                                                                 \
            ck_assert_msg(wall_ns() < until_deadline, "waited in vain for: %s", #condition);                           \
        }                                                                                                              \
    } while (0)

static void open_rogue(void)
{
    static const struct log LOG = {.who = "test", .level = LOG_ERROR};
    rogue = (struct rogue){0};
    plain = (struct plain){0};
    struct wire_config c = {.listen = "127.0.0.1:0", .transports = "auto", .log = &LOG};
    c.events = (struct wire_events){.user = &rogue,
                                    .on_accept = rogue_accept,
                                    .on_message = rogue_message,
                                    .on_payload = rogue_payload,
                                    .on_payload_done = nothing_done,
                                    .on_error = rogue_error,
                                    .on_closed = rogue_closed};
    ck_assert_int_eq(wire_tcp_open(&c, &rogue.wire, NULL), TD_OK);
    c.listen = NULL;
    c.events = (struct wire_events){.user = &plain,
                                    .on_accept = plain_accept,
                                    .on_open = plain_open,
                                    .on_message = plain_message,
                                    .on_payload = rogue_payload,
                                    .on_payload_done = nothing_done,
                                    .on_error = plain_error,
                                    .on_closed = plain_closed};
    ck_assert_int_eq(wire_mapped_open(&c, &plain.wire, NULL), TD_OK);
    plain.conn = wire_connect(plain.wire, rogue.wire->address, 0, &plain);
    UNTIL(plain.is_open && rogue.conn);
}

static void close_rogue(void)
{
    wire_close(plain.conn);
    wire_close(rogue.conn);
    UNTIL(plain.is_closed && rogue.is_closed);
    wire_free(plain.wire);
    wire_free(rogue.wire);
}

static void say(const void *message, uint32_t len)
{
    wire_send(rogue.conn, message, len, NULL, 0, NULL, NULL);
}

/* An offer that is right except for what the test changes. It is of our own process, which serves as well as
 * another. */
static void make_offer(uint8_t out[68], int fd, uint64_t inode, uint64_t len_bytes)
{
    memset(out, 0, 68);
    put_u16(out, 0x4d01);
    put_u32(out + 4, (uint32_t)getpid());
    put_u32(out + 8, (uint32_t)fd);
    put_u64(out + 16, len_bytes);
    put_u64(out + 24, inode);
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "r");
    ck_assert_ptr_nonnull(f);
    ck_assert_uint_eq(fread(out + 32, 1, 36, f), 36);
    fclose(f);
}

static void check_offer_is_refused(const uint8_t offer[68])
{
    static const uint8_t ORDINARY[8] = {1};
    say(offer, 68);
    say(ORDINARY, 8);
    UNTIL(plain.n_messages == 1);                 /* the wire still receives messages */
    uint64_t until = wall_ns() + 300 * NS_PER_MS; /* only waiting shows that nothing comes */
    UNTIL(wall_ns() > until);
    ck_assert_uint_eq(rogue.n_taken, 0);
    ck_assert(!plain.is_lost);
}

START_TEST(test_mapped_offer_that_is_not_what_it_says_is_not_taken)
{
    void *arena;
    int fd, plain_fd = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    struct stat st, plain_st;
    uint8_t offer[68];
    ck_assert_int_eq(mem_map_shared(1 << 20, &arena, &fd), TD_OK);
    ck_assert_int_eq(ftruncate(plain_fd, 1 << 20), 0);
    ck_assert(!fstat(fd, &st) && !fstat(plain_fd, &plain_st));
    make_offer(offer, fd, st.st_ino, 1 << 20);
    switch (_i) {
    case 0:
        offer[32] ^= 1; /* another boot id, so another host */
        break;
    case 1:
        put_u64(offer + 24, st.st_ino + 1); /* another file than the descriptor's */
        break;
    case 2:
        put_u64(offer + 16, 2 << 20); /* longer than the file: a read beyond its end would be SIGBUS */
        break;
    case 3:
        make_offer(offer, plain_fd, plain_st.st_ino, 1 << 20); /* this file could be made shorter later */
        break;
    default:
        put_u32(offer + 8, 999999); /* no such descriptor */
    }
    open_rogue();
    check_offer_is_refused(offer);
    close_rogue();
    close(fd);
    close(plain_fd);
    mem_unmap(arena, 1 << 20);
}
END_TEST

START_TEST(test_mapped_lending_beyond_the_arena_ends_the_connection)
{
    void *arena;
    int fd;
    struct stat st;
    uint8_t offer[68], lend[25] = {0};
    ck_assert_int_eq(mem_map_shared(1 << 20, &arena, &fd), TD_OK);
    ck_assert_int_eq(fstat(fd, &st), 0);
    make_offer(offer, fd, st.st_ino, 1 << 20);
    open_rogue();
    say(offer, sizeof(offer));
    UNTIL(rogue.n_taken == 1);
    put_u16(lend, 0x4d03);
    put_u16(lend + 2, 1);
    put_u64(lend + 8, (1 << 20) - 10);
    put_u64(lend + 16, _i ? UINT64_MAX : 11);
    say(lend, sizeof(lend));
    UNTIL(plain.is_lost);
    close_rogue();
    close(fd);
    mem_unmap(arena, 1 << 20);
}
END_TEST

START_TEST(test_mapped_lending_before_an_offer_ends_the_connection)
{
    static const uint8_t LEND[25] = {0x03, 0x4d, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
    open_rogue();
    say(LEND, sizeof(LEND));
    UNTIL(plain.is_lost);
    close_rogue();
}
END_TEST

int main(void)
{
    Suite *s = suite_create("mapped");
    TCase *tc = tcase_create("mapped");
    tcase_set_timeout(tc, 60);
    tcase_add_test(tc, test_mapped_pages_are_lent_and_checked);
    tcase_add_test(tc, test_mapped_page_that_changes_under_the_reader_fails_its_checksum);
    tcase_add_test(tc, test_mapped_arena_can_be_written_by_nobody_else);
    tcase_add_loop_test(tc, test_mapped_and_plain_peers_understand_each_other, 0, 4);
    tcase_add_loop_test(tc, test_mapped_offer_that_is_not_what_it_says_is_not_taken, 0, 5);
    tcase_add_loop_test(tc, test_mapped_lending_beyond_the_arena_ends_the_connection, 0, 2);
    tcase_add_test(tc, test_mapped_lending_before_an_offer_ends_the_connection);
    suite_add_tcase(s, tc);
    return tap_main(s);
}
