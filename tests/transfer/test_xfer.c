/* One suite for every backend: loopback, TCP, a mapped arena (over TCP), UCX with its own choice (shared
 * memory), and UCX over its own tcp. */
#include <sched.h>
#include <unistd.h>

#include "tests/transfer/node.h"

static const char *const BACKENDS[] = {"loopback", "tcp", "mapped", "ucx", "self,tcp"};
enum { N_BACKENDS = 5 };
#define LONG (20 * NS_PER_S)

static struct xfer_hub *hub;

static struct node *open_with(int backend, const char *name, uint32_t n_pages, struct node_params p)
{
    if (!hub)
        hub = xfer_hub_open();
    p.backend = BACKENDS[backend];
    p.hub = hub;
    p.name = name;
    p.n_pages = n_pages;
    return node_open(&p);
}

static struct node *open_node(int backend, const char *name, uint32_t n_pages)
{
    return open_with(backend, name, n_pages, (struct node_params){0});
}

static void close_pair(struct node *a, struct node *b)
{
    if (a)
        node_check_quiet(a);
    if (b)
        node_check_quiet(b);
    node_close(a);
    node_close(b);
    xfer_hub_close(hub);
    hub = NULL;
}

/* Grants a lease whose pages begin at first_page, announces all of it, and finishes it. */
static void offer(struct node *h, uint64_t counter, uint32_t first_page, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        node_fill(h, first_page + i, counter, i);
    node_grant(h, counter, LONG);
    node_announce(h, counter, first_page, 0, n, 0, (uint16_t)h->layout.n_layers);
    xfer_lease_finish(h->x, node_id(counter), n, "tail", 4);
}

static void check_rest_landed(struct node *r, uint64_t counter, uint32_t n_have, uint32_t n)
{
    struct pull_record *p = &r->pulls[counter % NODE_IDS];
    ck_assert_int_eq(p->status, TD_OK);
    ck_assert_uint_eq(p->ends, 1);
    ck_assert_uint_eq(p->n_pages, n);
    ck_assert_uint_eq(p->placed, n - n_have);
    ck_assert_uint_eq(p->bytes, (n - n_have) * r->page_bytes);
    for (uint32_t i = n_have; i < n; i++)
        ck_assert_msg(node_page_is(r, p->place_base + i, counter, i), "page %u of %llu differs", i,
                      (unsigned long long)counter);
}

static void check_landed(struct node *r, uint64_t counter, uint32_t n)
{
    check_rest_landed(r, counter, 0, n);
}

START_TEST(test_xfer_pages_arrive_bit_exact_announced_layer_by_layer)
{
    enum { N = 40 };
    struct node *h = open_node(_i, "holder", N), *r = open_node(_i, "reader", N);
    node_grant(h, 1, LONG);
    node_pull(r, 1, h->address, h->incarnation, LONG);
    for (uint32_t chunk = 0; chunk < N; chunk += 10) {
        for (uint16_t layer = 0; layer < h->layout.n_layers; layer++) {
            if (layer == 0)
                for (uint32_t i = chunk; i < chunk + 10; i++)
                    node_fill(h, i, 1, i);
            node_announce(h, 1, chunk, chunk, 10, layer, (uint16_t)(layer + 1));
        }
        NODE_WAIT(r, r->pulls[1].progress >= chunk + 10 && !r->pulls[1].ends);
    }
    xfer_lease_finish(h->x, node_id(1), N, "first token", 11);
    NODE_WAIT(r, r->pulls[1].ends);
    NODE_WAIT(h, h->leases[1].ends);
    check_landed(r, 1, N);
    ck_assert_uint_eq(r->pulls[1].tail_len, 11);
    ck_assert_mem_eq(r->pulls[1].tail, "first token", 11);
    ck_assert_int_eq(h->leases[1].status, TD_OK);
    ck_assert(!h->leases[1].in_doubt);
    struct xfer_stats hs = xfer_stats(h->x), rs = xfer_stats(r->x);
    ck_assert_uint_eq(rs.pages_in, N);
    ck_assert_uint_eq(rs.bytes_in, N * r->page_bytes);
    ck_assert_uint_eq(rs.pulls_ok, 1);
    ck_assert_uint_eq(hs.bytes_out, N * h->page_bytes);
    ck_assert_uint_eq(hs.pages_out, N);
    close_pair(r, h);
}
END_TEST

START_TEST(test_xfer_layers_may_be_announced_in_any_order)
{
    struct node *h = open_node(_i, "holder", 4), *r = open_node(_i, "reader", 4);
    for (uint32_t i = 0; i < 4; i++)
        node_fill(h, i, 3, i);
    node_grant(h, 3, LONG);
    node_pull(r, 3, h->address, 0, LONG);
    node_announce(h, 3, 2, 2, 2, 2, 4);
    node_announce(h, 3, 0, 0, 2, 3, 4);
    node_announce(h, 3, 0, 0, 4, 0, 2);
    node_announce(h, 3, 0, 0, 2, 2, 3);
    xfer_lease_finish(h->x, node_id(3), 4, NULL, 0);
    NODE_WAIT(r, r->pulls[3].ends);
    check_landed(r, 3, 4);
    close_pair(r, h);
}
END_TEST

START_TEST(test_xfer_large_pages_travel_in_parts_within_the_credit)
{
    enum { N = 6 };
    struct node_params p = {.layout = HUGE_LAYOUT, .max_inflight_bytes = 1 << 20};
    struct node *h = open_with(_i, "holder", N, p), *r = open_with(_i, "reader", N, p);
    offer(h, 4, 0, N);
    node_pull(r, 4, h->address, 0, LONG);
    NODE_WAIT_S(r, 20, r->pulls[4].ends);
    check_landed(r, 4, N);
    close_pair(r, h);
}
END_TEST

START_TEST(test_xfer_empty_transfer_carries_its_tail)
{
    struct node *h = open_node(_i, "holder", 1), *r = open_node(_i, "reader", 1);
    offer(h, 5, 0, 0);
    node_pull(r, 5, h->address, 0, LONG);
    NODE_WAIT(r, r->pulls[5].ends);
    NODE_WAIT(h, h->leases[5].ends);
    check_landed(r, 5, 0);
    ck_assert_uint_eq(r->pulls[5].tail_len, 4);
    ck_assert_int_eq(h->leases[5].status, TD_OK);
    close_pair(r, h);
}
END_TEST

START_TEST(test_xfer_pages_that_are_had_are_neither_asked_for_nor_written)
{
    enum { N = 40, CHUNK = 10 };
    static const uint32_t HAVE[] = {1, 7, CHUNK, 25, N - 1, N};
    struct node *h = open_node(_i, "holder", N), *r = open_node(_i, "reader", N);
    uint64_t n_pulled = 0;
    for (uint32_t k = 0; k < sizeof(HAVE) / sizeof(HAVE[0]); k++) {
        uint64_t id = 50 + k;
        memset(r->arena, 0x5a, r->arena_bytes);
        node_grant(h, id, LONG);
        node_pull_rest(r, id, h->address, h->incarnation, LONG, HAVE[k]);
        for (uint32_t chunk = 0; chunk < N; chunk += CHUNK) {
            for (uint32_t i = chunk; i < chunk + CHUNK; i++)
                node_fill(h, i, id, i);
            for (uint16_t layer = 0; layer < h->layout.n_layers; layer++)
                node_announce(h, id, chunk, chunk, CHUNK, layer, (uint16_t)(layer + 1));
            if (chunk + CHUNK > HAVE[k])
                NODE_WAIT(r, r->pulls[id].progress >= chunk + CHUNK && !r->pulls[id].ends);
        }
        xfer_lease_finish(h->x, node_id(id), N, "tail", 4);
        NODE_WAIT(r, r->pulls[id].ends);
        NODE_WAIT(h, h->leases[id].ends);
        check_rest_landed(r, id, HAVE[k], N);
        ck_assert_uint_eq(r->pulls[id].tail_len, 4);
        ck_assert_int_eq(h->leases[id].status, TD_OK);
        for (size_t i = 0; i < HAVE[k] * r->page_bytes; i++)
            ck_assert_uint_eq(r->arena[i], 0x5a);
        n_pulled += N - HAVE[k];
    }
    ck_assert_uint_eq(xfer_stats(r->x).pages_in, n_pulled);
    ck_assert_uint_eq(xfer_stats(h->x).bytes_out, n_pulled * h->page_bytes);
    close_pair(r, h);
}
END_TEST

/* The reader asks for nothing, so nothing can stall: it waits as long as the holder takes, and keeps the
 * lease alive. */
START_TEST(test_xfer_pull_of_what_is_had_waits_for_the_finish)
{
    struct node *h = open_node(_i, "holder", 4), *r = open_node(_i, "reader", 4);
    node_grant(h, 60, 1200 * NS_PER_MS);
    node_pull_rest(r, 60, h->address, h->incarnation, LONG, 4);
    node_announce(h, 60, 0, 0, 3, 0, 4);
    uint64_t until = wall_ns() + 2500 * NS_PER_MS; /* the time itself is tested */
    pthread_mutex_lock(&r->lock);
    while (node_wait_turn(r, until))
        ck_assert_uint_eq(r->pulls[60].ends, 0);
    pthread_mutex_unlock(&r->lock);
    node_announce(h, 60, 3, 3, 1, 0, 4);
    xfer_lease_finish(h->x, node_id(60), 4, "first token", 11);
    NODE_WAIT(r, r->pulls[60].ends);
    NODE_WAIT(h, h->leases[60].ends);
    check_rest_landed(r, 60, 4, 4);
    ck_assert_mem_eq(r->pulls[60].tail, "first token", 11);
    ck_assert_int_eq(h->leases[60].status, TD_OK);
    ck_assert(!h->leases[60].in_doubt);
    ck_assert_uint_eq(xfer_stats(r->x).stalled, 0);
    close_pair(r, h);
}
END_TEST

START_TEST(test_xfer_having_more_than_the_lease_is_invalid)
{
    struct node *h = open_node(_i, "holder", 4), *r = open_node(_i, "reader", 4);
    node_pull_rest(r, 61, h->address, h->incarnation, LONG, 5); /* more pages than fit the arena */
    NODE_WAIT(r, r->pulls[61].ends);
    ck_assert_int_eq(r->pulls[61].status, TD_ERR_INVALID);
    offer(h, 62, 0, 3);
    node_pull_rest(r, 62, h->address, h->incarnation, LONG, 4);
    NODE_WAIT(r, r->pulls[62].ends);
    NODE_WAIT(h, h->leases[62].ends);
    ck_assert_int_eq(r->pulls[62].status, TD_ERR_INVALID);
    ck_assert_uint_eq(r->pulls[62].placed, 0);
    ck_assert_int_eq(h->leases[62].status, TD_ERR_CANCELLED);
    ck_assert(!h->leases[62].in_doubt);
    close_pair(r, h);
}
END_TEST

START_TEST(test_xfer_pull_of_what_is_had_ends_with_its_peer_or_a_cancel)
{
    struct node *h = open_node(_i, "holder", 4), *r = open_node(_i, "reader", 4);
    for (uint64_t id = 63; id < 66; id++) {
        node_grant(h, id, LONG);
        node_announce(h, id, 0, 0, 4, 0, 4);
        node_pull_rest(r, id, h->address, h->incarnation, LONG, id == 65 ? 3 : 4);
    }
    NODE_WAIT(r, r->pulls[65].progress == 4); /* it came after the others, so all are open */
    xfer_pull_cancel(r->x, node_id(63));
    NODE_WAIT(r, r->pulls[63].ends);
    NODE_WAIT(h, h->leases[63].ends);
    ck_assert_int_eq(r->pulls[63].status, TD_ERR_CANCELLED);
    ck_assert_int_eq(h->leases[63].status, TD_ERR_CANCELLED);
    ck_assert(!h->leases[63].in_doubt);
    xfer_lease_cancel(h->x, node_id(64));
    NODE_WAIT(r, r->pulls[64].ends);
    ck_assert_int_eq(r->pulls[64].status, TD_ERR_CANCELLED);
    ck_assert_uint_eq(r->pulls[65].ends, 0);
    node_close(h);
    NODE_WAIT_S(r, 2, r->pulls[65].ends);
    ck_assert(r->pulls[65].status == TD_ERR_PEER_LOST || r->pulls[65].status == TD_ERR_CANCELLED);
    close_pair(r, NULL);
}
END_TEST

START_TEST(test_xfer_pull_that_overtakes_the_grant_is_asked_again)
{
    struct node *h = open_node(_i, "holder", 2), *r = open_node(_i, "reader", 2);
    node_pull(r, 6, h->address, h->incarnation, LONG);
    NODE_WAIT(r, r->ups);
    uint64_t deadline = wall_ns() + 5 * NS_PER_S;
    while (xfer_stats(h->x).not_yet < 3 && wall_ns() < deadline)
        sched_yield();
    ck_assert_uint_ge(xfer_stats(h->x).not_yet, 3);
    offer(h, 6, 0, 2);
    NODE_WAIT(r, r->pulls[6].ends);
    check_landed(r, 6, 2);
    close_pair(r, h);
}
END_TEST

/* Waits for one more refusal. The reader then does not ask again for 50 ms, its longest wait between two
 * questions. */
static void wait_refused(struct node *h)
{
    uint64_t deadline = wall_ns() + 10 * NS_PER_S, before = xfer_stats(h->x).not_yet;
    while (xfer_stats(h->x).not_yet == before && wall_ns() < deadline)
        sched_yield();
    ck_assert_uint_gt(xfer_stats(h->x).not_yet, before);
}

START_TEST(test_xfer_pull_that_overtakes_the_grant_need_not_ask_again)
{
    enum { TIMES = 5, QUESTIONS = 8 };
    struct node *h = open_node(_i, "holder", 1), *r = open_node(_i, "reader", 1);
    uint64_t least = UINT64_MAX;
    for (uint64_t id = 1; id <= TIMES; id++) {
        node_pull(r, id, h->address, h->incarnation, LONG);
        for (int i = 0; i < QUESTIONS; i++)
            wait_refused(h);
        uint64_t granted = wall_ns();
        offer(h, id, 0, 1);
        NODE_WAIT(r, r->pulls[id].ends);
        check_landed(r, id, 1);
        if (wall_ns() - granted < least)
            least = wall_ns() - granted;
    }
    ck_assert_uint_lt(least, 30 * NS_PER_MS);
    close_pair(r, h);
}
END_TEST

START_TEST(test_xfer_early_reader_that_gave_up_leaves_the_lease_to_another)
{
    struct node *h = open_node(_i, "holder", 1), *r = open_node(_i, "reader", 1), *other = open_node(_i, "other", 1);
    node_pull(r, 1, h->address, h->incarnation, LONG);
    wait_refused(h);
    xfer_pull_cancel(r->x, node_id(1));
    NODE_WAIT(r, r->pulls[1].ends);
    /* Comes after the message that the first pull gave up. */
    node_pull(r, 2, h->address, h->incarnation, LONG);
    offer(h, 2, 0, 0);
    NODE_WAIT(r, r->pulls[2].ends);
    node_pull(other, 1, h->address, h->incarnation, LONG);
    offer(h, 1, 0, 1);
    NODE_WAIT(other, other->pulls[1].ends);
    check_landed(other, 1, 1);
    node_close(other);
    close_pair(r, h);
}
END_TEST

START_TEST(test_xfer_pull_without_grant_ends_at_its_deadline)
{
    struct node *h = open_node(_i, "holder", 1), *r = open_node(_i, "reader", 1);
    node_pull(r, 7, h->address, 0, 300 * NS_PER_MS);
    NODE_WAIT_S(r, 3, r->pulls[7].ends);
    ck_assert_int_eq(r->pulls[7].status, TD_ERR_DEADLINE);
    close_pair(r, h);
}
END_TEST

START_TEST(test_xfer_lease_nobody_pulls_expires_and_is_refused_by_name)
{
    struct node *h = open_node(_i, "holder", 1), *r = open_node(_i, "reader", 1);
    node_grant(h, 8, 50 * NS_PER_MS);
    NODE_WAIT_S(h, 3, h->leases[8].ends);
    ck_assert_int_eq(h->leases[8].status, TD_ERR_DEADLINE);
    ck_assert(!h->leases[8].in_doubt);
    node_pull(r, 8, h->address, 0, LONG);
    NODE_WAIT_S(r, 5, r->pulls[8].ends);
    ck_assert_int_eq(r->pulls[8].status, TD_ERR_STALE);
    ck_assert_uint_ge(xfer_stats(h->x).refused_stale, 1);
    close_pair(r, h);
}
END_TEST

START_TEST(test_xfer_waiting_reader_keeps_its_lease_alive)
{
    struct node *h = open_node(_i, "holder", 1), *r = open_node(_i, "reader", 1);
    node_grant(h, 9, 1200 * NS_PER_MS);
    node_pull(r, 9, h->address, 0, LONG);
    NODE_WAIT(r, r->ups);
    /* The test is about time: two durations must pass. */
    uint64_t until = wall_ns() + 2500 * NS_PER_MS;
    pthread_mutex_lock(&h->lock);
    while (node_wait_turn(h, until))
        ck_assert_uint_eq(h->leases[9].ends, 0);
    pthread_mutex_unlock(&h->lock);
    node_fill(h, 0, 9, 0);
    node_announce(h, 9, 0, 0, 1, 0, 4);
    xfer_lease_finish(h->x, node_id(9), 1, NULL, 0);
    NODE_WAIT(r, r->pulls[9].ends);
    check_landed(r, 9, 1);
    close_pair(r, h);
}
END_TEST

START_TEST(test_xfer_stale_incarnation_is_refused)
{
    struct node *h = open_node(_i, "holder", 1), *r = open_node(_i, "reader", 1);
    offer(h, 10, 0, 1);
    node_pull(r, 10, h->address, h->incarnation + 1, LONG);
    NODE_WAIT(r, r->pulls[10].ends);
    ck_assert_int_eq(r->pulls[10].status, TD_ERR_STALE);
    xfer_lease_cancel(h->x, node_id(10));
    NODE_WAIT(h, h->leases[10].ends);
    ck_assert_int_eq(h->leases[10].status, TD_ERR_CANCELLED);
    close_pair(r, h);
}
END_TEST

START_TEST(test_xfer_lease_is_for_one_reader)
{
    struct node *h = open_node(_i, "holder", 2), *r = open_node(_i, "reader", 2), *s = open_node(_i, "second", 2);
    node_fill(h, 0, 11, 0);
    node_fill(h, 1, 11, 1);
    node_grant(h, 11, LONG);
    node_announce(h, 11, 0, 0, 1, 0, 4);
    node_pull(r, 11, h->address, 0, LONG);
    NODE_WAIT(r, r->pulls[11].progress == 1);
    node_pull(s, 11, h->address, 0, LONG);
    NODE_WAIT(s, s->pulls[11].ends);
    ck_assert_int_eq(s->pulls[11].status, TD_ERR_STALE);
    node_announce(h, 11, 1, 1, 1, 0, 4);
    xfer_lease_finish(h->x, node_id(11), 2, NULL, 0);
    NODE_WAIT(r, r->pulls[11].ends);
    check_landed(r, 11, 2);
    node_check_quiet(s);
    node_close(s);
    close_pair(r, h);
}
END_TEST

START_TEST(test_xfer_lease_named_for_a_reader_is_refused_to_others)
{
    struct node *h = open_node(_i, "holder", 1), *r = open_node(_i, "reader", 1);
    struct xfer_lease_params p = {.id = node_id(12),
                                  .reader_incarnation = r->incarnation + 1,
                                  .duration_ns = LONG,
                                  .on_end = node_on_lease_end,
                                  .user = h};
    xfer_lease_grant(h->x, &p);
    node_pull(r, 12, h->address, 0, LONG);
    NODE_WAIT(r, r->pulls[12].ends);
    ck_assert_int_eq(r->pulls[12].status, TD_ERR_STALE);
    xfer_lease_cancel(h->x, node_id(12));
    NODE_WAIT(h, h->leases[12].ends);
    close_pair(r, h);
}
END_TEST

START_TEST(test_xfer_lease_that_its_reader_gave_up_before_it_was_granted_ends_at_once)
{
    struct node *h = open_node(_i, "holder", 1), *r = open_node(_i, "reader", 1);
    const struct xfer_lease_params p = {.id = node_id(1),
                                        .reader_incarnation = r->incarnation,
                                        .reader_is_up = true,
                                        .duration_ns = LONG,
                                        .on_end = node_on_lease_end,
                                        .user = h};
    node_pull(r, 1, h->address, h->incarnation, LONG);
    wait_refused(h);
    xfer_pull_cancel(r->x, node_id(1));
    NODE_WAIT(r, r->pulls[1].ends);
    /* Comes after the message that the first pull gave up. */
    node_pull(r, 2, h->address, h->incarnation, LONG);
    offer(h, 2, 0, 0);
    NODE_WAIT(r, r->pulls[2].ends);
    xfer_lease_grant(h->x, &p);
    node_announce(h, 1, 0, 0, 1, 0, 4);
    xfer_lease_finish(h->x, node_id(1), 1, NULL, 0);
    NODE_WAIT(h, h->leases[1].ends == 1);
    ck_assert_int_eq(h->leases[1].status, TD_ERR_CANCELLED);
    ck_assert(!h->leases[1].in_doubt);
    close_pair(r, h);
}
END_TEST

START_TEST(test_xfer_lease_of_a_reader_that_goes_before_it_pulls_ends_at_once)
{
    struct node *h = open_node(_i, "holder", 1), *r = open_node(_i, "reader", 1);
    struct xfer_lease_params p = {.id = node_id(12),
                                  .reader_incarnation = r->incarnation,
                                  .reader_is_up = true,
                                  .duration_ns = LONG,
                                  .on_end = node_on_lease_end,
                                  .user = h};
    xfer_send(r->x, h->address, 9, "asks", 4);
    NODE_WAIT(h, h->n_messages == 1);
    ck_assert_uint_eq(xfer_peer_incarnation(h->peer), r->incarnation);
    xfer_lease_grant(h->x, &p);
    node_announce(h, 12, 0, 0, 1, 0, 4);
    xfer_lease_finish(h->x, node_id(12), 1, NULL, 0);
    node_close(r);
    NODE_WAIT(h, h->leases[12].ends == 1);
    ck_assert_int_eq(h->leases[12].status, TD_ERR_PEER_LOST);
    ck_assert(!h->leases[12].in_doubt);
    p.id = node_id(13); /* the reader left before the grant */
    xfer_lease_grant(h->x, &p);
    node_announce(h, 13, 0, 0, 1, 0, 4);
    xfer_lease_finish(h->x, node_id(13), 1, NULL, 0);
    NODE_WAIT(h, h->leases[13].ends == 1);
    ck_assert_int_eq(h->leases[13].status, TD_ERR_PEER_LOST);
    close_pair(h, NULL);
}
END_TEST

START_TEST(test_xfer_id_in_use_is_refused)
{
    struct node *h = open_node(_i, "holder", 1);
    node_grant(h, 13, LONG);
    node_grant(h, 13, LONG);
    NODE_WAIT(h, h->leases[13].ends == 1);
    ck_assert_int_eq(h->leases[13].status, TD_ERR_INVALID);
    xfer_lease_cancel(h->x, node_id(13));
    NODE_WAIT(h, h->leases[13].ends == 2);
    close_pair(h, NULL);
}
END_TEST

START_TEST(test_xfer_reader_without_room_ends_with_no_space)
{
    struct node *h = open_node(_i, "holder", 8), *r = open_node(_i, "reader", 8);
    r->pulls[14].place_limit = 3;
    offer(h, 14, 0, 8);
    node_pull(r, 14, h->address, 0, LONG);
    NODE_WAIT(r, r->pulls[14].ends);
    NODE_WAIT(h, h->leases[14].ends);
    ck_assert_int_eq(r->pulls[14].status, TD_ERR_NO_SPACE);
    ck_assert_int_eq(h->leases[14].status, TD_ERR_CANCELLED);
    ck_assert(!h->leases[14].in_doubt);
    close_pair(r, h);
}
END_TEST

START_TEST(test_xfer_wrong_secret_is_refused)
{
    struct node *h = open_with(_i, "holder", 1, (struct node_params){.secret = "right"});
    struct node *r = open_with(_i, "reader", 1, (struct node_params){.secret = "wrong"});
    node_pull(r, 15, h->address, 0, LONG);
    NODE_WAIT(r, r->pulls[15].ends);
    ck_assert_int_eq(r->pulls[15].status, TD_ERR_AUTH);
    ck_assert_uint_eq(h->ups, 0);
    ck_assert_uint_eq(r->ups, 0);
    xfer_send(r->x, h->address, 1, "x", 1);
    uint64_t deadline = wall_ns() + 5 * NS_PER_S;
    while (!xfer_stats(r->x).messages_dropped && wall_ns() < deadline)
        sched_yield();
    ck_assert_uint_eq(xfer_stats(r->x).messages_dropped, 1);
    ck_assert_uint_eq(h->n_messages, 0);
    close_pair(r, h);
}
END_TEST

enum { LAYOUT_FIELDS = 4 };

START_TEST(test_xfer_other_layout_is_refused)
{
    static const char *const NAMES[LAYOUT_FIELDS] = {"n_kv_heads", "page_tokens", "head_dim", "dtype"};
    struct kv_layout other = SMALL_LAYOUT;
    const uint32_t field = (uint32_t)_i / N_BACKENDS;
    other.n_kv_heads += field == 0;
    other.page_tokens *= field == 1 ? 2 : 1;
    other.head_dim *= field == 2 ? 2 : 1;
    other.dtype = field != 3 ? other.dtype : other.dtype == NUM_F32 ? NUM_BF16 : NUM_F32;
    char path[] = "/tmp/xfer-log-XXXXXX", text[8192] = "";
    int fd = mkstemp(path);
    struct node *h = open_node(_i % N_BACKENDS, "holder", 1);
    struct node *r = open_with(_i % N_BACKENDS, "reader", 1, (struct node_params){.layout = other});
    r->log.level = LOG_WARN;
    r->log.fd = fd;
    node_pull(r, 16, h->address, 0, LONG);
    NODE_WAIT(r, r->pulls[16].ends);
    ck_assert_int_eq(r->pulls[16].status, TD_ERR_VERSION);
    ck_assert_uint_eq(h->ups, 0);
    ck_assert(pread(fd, text, sizeof(text) - 1, 0) > 0);
    ck_assert_msg(strstr(text, NAMES[field]) != NULL, "%s is not named: %s", NAMES[field], text);
    close_pair(r, h);
    close(fd);
    unlink(path);
}
END_TEST

START_TEST(test_xfer_unreachable_address_ends_at_the_deadline)
{
    struct node *r = open_node(_i, "reader", 1);
    node_pull(r, 17, _i == 0 ? "nobody" : "127.0.0.1:9", 0, 400 * NS_PER_MS);
    NODE_WAIT_S(r, 3, r->pulls[17].ends);
    ck_assert_int_eq(r->pulls[17].status, TD_ERR_PEER_LOST);
    close_pair(r, NULL);
}
END_TEST

START_TEST(test_xfer_unreachable_address_is_not_waited_for_until_a_far_deadline)
{
    struct node *r = open_with(_i, "reader", 1, (struct node_params){.silence_ns = 300 * NS_PER_MS});
    node_pull(r, 18, _i == 0 ? "nobody" : "127.0.0.1:9", 0, LONG);
    NODE_WAIT_S(r, 10, r->pulls[18].ends); /* the deadline is at 20 */
    ck_assert_int_eq(r->pulls[18].status, TD_ERR_PEER_LOST);
    close_pair(r, NULL);
}
END_TEST

START_TEST(test_xfer_holder_is_reached_by_name)
{
    if (_i == 0)
        return; /* loopback has no host names */
    struct node *h = open_node(_i, "holder", 2), *r = open_node(_i, "reader", 2);
    char address[160];
    snprintf(address, sizeof(address), "localhost%s",
             strrchr(h->address, ':')); /* the name may give ::1 first, where nobody listens */
    offer(h, 19, 0, 2);
    node_pull(r, 19, address, 0, LONG);
    NODE_WAIT(r, r->pulls[19].ends);
    check_landed(r, 19, 2);
    close_pair(r, h);
}
END_TEST

START_TEST(test_xfer_holder_that_comes_late_is_reached)
{
    if (_i == 0)
        return; /* a loopback address is only known once the holder is open */
    struct node *first = open_node(_i, "first", 1);
    char address[160];
    snprintf(address, sizeof(address), "%s", first->address);
    node_close(first);
    struct node *r = open_node(_i, "reader", 2);
    node_pull(r, 18, address, 0, LONG);
    xfer_send(r->x, address, 4, "hello", 5);
    struct node *h = open_with(_i, "holder", 2, (struct node_params){.listen = address});
    offer(h, 18, 0, 2);
    NODE_WAIT(r, r->pulls[18].ends);
    check_landed(r, 18, 2);
    close_pair(r, h);
}
END_TEST

START_TEST(test_xfer_messages_arrive_whole_and_in_order)
{
    struct node *a = open_node(_i, "a", 1), *b = open_node(_i, "b", 1);
    uint32_t sizes[] = {0, 1, 2000, 2032, 2033, 100000, 3000000, 5};
    uint8_t *data = mem_zalloc(3000000);
    for (uint32_t i = 0; i < 3000000; i++)
        data[i] = (uint8_t)random_mix(i);
    for (uint32_t i = 0; i < 8; i++) {
        xfer_send(a->x, b->address, (uint16_t)(100 + i), data, sizes[i]);
        NODE_WAIT(b, b->n_messages == i + 1);
        ck_assert_uint_eq(b->message_kind, 100 + i);
        ck_assert_uint_eq(b->message.len, sizes[i]);
        if (sizes[i])
            ck_assert_mem_eq(b->message.data, data, sizes[i]);
        xfer_send_peer(b->x, b->peer, (uint16_t)(200 + i), data, sizes[i]);
        NODE_WAIT(a, a->n_messages == i + 1);
        ck_assert_uint_eq(a->message_kind, 200 + i);
        ck_assert_uint_eq(a->message.len, sizes[i]);
    }
    for (uint32_t i = 0; i < 500; i++)
        xfer_send(a->x, b->address, (uint16_t)i, data, i % 7 * 1000);
    NODE_WAIT(b, b->n_messages == 508);
    ck_assert_uint_eq(b->message_kind, 499);
    free(data);
    close_pair(a, b);
}
END_TEST

START_TEST(test_xfer_two_that_connect_to_each_other_are_one_peer_each)
{
    struct node *a = open_node(_i, "a", 4), *b = open_node(_i, "b", 4);
    a->pulls[21].place_base = b->pulls[20].place_base = 2;
    offer(a, 20, 0, 2);
    offer(b, 21, 0, 2);
    node_pull(b, 20, a->address, a->incarnation, LONG);
    node_pull(a, 21, b->address, b->incarnation, LONG);
    NODE_WAIT(a, a->pulls[21].ends);
    NODE_WAIT(b, b->pulls[20].ends);
    check_landed(a, 21, 2);
    check_landed(b, 20, 2);
    ck_assert_uint_eq(a->ups, 1);
    ck_assert_uint_eq(b->ups, 1);
    ck_assert_uint_eq(xfer_stats(a->x).peers_up, 1);
    node_check_quiet(a);
    node_close(a);
    NODE_WAIT(b, b->downs);
    ck_assert_uint_eq(b->downs, 1);
    ck_assert_int_eq(b->down_why, TD_OK);
    close_pair(b, NULL);
}
END_TEST

START_TEST(test_xfer_many_leases_at_once)
{
    enum { LEASES = 100, PAGES = 5 };
    struct node *h = open_node(_i, "holder", LEASES * PAGES), *r = open_node(_i, "reader", LEASES * PAGES);
    for (uint32_t i = 0; i < LEASES; i++)
        r->pulls[i + 1].place_base = i * PAGES;
    for (uint32_t i = 0; i < LEASES; i++) { /* half of the pulls come before their lease */
        if (i % 2)
            node_pull(r, i + 1, h->address, h->incarnation, LONG);
        offer(h, i + 1, i * PAGES, PAGES);
        if (i % 2 == 0)
            node_pull(r, i + 1, h->address, h->incarnation, LONG);
    }
    NODE_WAIT_S(r, 20, r->pulls_ended == LEASES);
    NODE_WAIT(h, h->leases_ended == LEASES);
    for (uint32_t i = 0; i < LEASES; i++) {
        check_landed(r, i + 1, PAGES);
        ck_assert_int_eq(h->leases[i + 1].status, TD_OK);
    }
    close_pair(r, h);
}
END_TEST

/* Cancels at a random moment between "not begun" and "done": each side gets one end, and reused pages stay as
 * they were made. */
static void cancel_at_random(int backend, bool by_reader)
{
    enum { N = 16, ROUNDS = 12 };
    struct node_params p = {.layout = BIG_LAYOUT, .max_inflight_bytes = 4 << 20};
    struct node *h = open_with(backend, "holder", N, p), *r = open_with(backend, "reader", N, p);
    for (uint64_t k = 1; k <= ROUNDS; k++) {
        offer(h, k, 0, N);
        node_pull(r, k, h->address, h->incarnation, LONG);
        uint32_t at = (uint32_t)(random_u64() % N);
        NODE_WAIT(r, r->pulls[k].progress >= at || r->pulls[k].ends);
        if (by_reader)
            xfer_pull_cancel(r->x, node_id(k));
        else
            xfer_lease_cancel(h->x, node_id(k));
        NODE_WAIT_S(r, 3, r->pulls[k].ends);
        if (!at)
            xfer_lease_cancel(h->x, node_id(k)); /* the pull may have ended before the holder heard of it */
        memset(r->arena, 0x5a, r->arena_bytes);  /* the pages are ours again: a late write is noticed below */
        NODE_WAIT_S(h, 3, h->leases[k].ends);
        memset(h->arena, 0xa5, h->arena_bytes);
        ck_assert(r->pulls[k].status == TD_OK || r->pulls[k].status == TD_ERR_CANCELLED);
        ck_assert(h->leases[k].status == TD_OK || h->leases[k].status == TD_ERR_CANCELLED);
        ck_assert(!h->leases[k].in_doubt);
    }
    offer(h, 100, 0, N);
    size_t n_kept = 0;
    while (n_kept < r->arena_bytes && r->arena[n_kept] == 0x5a)
        n_kept++;
    ck_assert_uint_eq(n_kept, r->arena_bytes);
    node_pull(r, 100, h->address, h->incarnation, LONG);
    NODE_WAIT(r, r->pulls[100].ends);
    check_landed(r, 100, N);
    for (uint64_t k = 1; k <= ROUNDS; k++) {
        ck_assert_uint_eq(r->pulls[k].ends, 1);
        ck_assert_uint_eq(h->leases[k].ends, 1);
    }
    close_pair(r, h);
}

START_TEST(test_xfer_cancel_by_reader_waits_for_inflight)
{
    cancel_at_random(_i, true);
}
END_TEST

START_TEST(test_xfer_cancel_by_holder_waits_for_inflight)
{
    cancel_at_random(_i, false);
}
END_TEST

START_TEST(test_xfer_goodbye_is_told_from_a_death)
{
    struct node *h = open_node(_i, "holder", 4), *r = open_node(_i, "reader", 4);
    node_grant(h, 30, LONG);
    node_pull(r, 30, h->address, 0, LONG);
    NODE_WAIT(r, r->ups);
    NODE_WAIT(h, h->ups);
    uint64_t begin = wall_ns();
    node_close(h);
    ck_assert_uint_lt(wall_ns() - begin, 2 * NS_PER_S);
    NODE_WAIT_S(r, 2, r->pulls[30].ends);
    ck_assert(r->pulls[30].status == TD_ERR_PEER_LOST || r->pulls[30].status == TD_ERR_CANCELLED);
    NODE_WAIT_S(r, 2, r->downs);
    ck_assert_int_eq(r->down_why, TD_OK);
    close_pair(r, NULL);
}
END_TEST

START_TEST(test_xfer_close_ends_what_is_open)
{
    struct node_params p = {.layout = BIG_LAYOUT};
    struct node *h = open_with(_i, "holder", 24, p), *r = open_with(_i, "reader", 24, p);
    offer(h, 40, 0, 24);
    node_grant(h, 41, LONG);
    node_pull(r, 40, h->address, 0, LONG);
    node_pull(r, 42, h->address, 0, LONG);
    NODE_WAIT(r, r->pulls[40].progress > 0 || r->pulls[40].ends);
    xfer_close(r->x);
    ck_assert_uint_eq(r->pulls[40].ends, 1);
    ck_assert_uint_eq(r->pulls[42].ends, 1);
    ck_assert_int_eq(r->pulls[42].status, TD_ERR_CANCELLED);
    NODE_WAIT_S(h, 3, h->leases[40].ends);
    xfer_close(h->x);
    ck_assert_uint_eq(h->leases[40].ends, 1);
    ck_assert_uint_eq(h->leases[41].ends, 1);
    ck_assert_int_eq(h->leases[41].status, TD_ERR_CANCELLED);
    r->x = h->x = NULL;
    node_close(r);
    node_close(h);
    xfer_hub_close(hub);
    hub = NULL;
}
END_TEST

START_TEST(test_xfer_idle_connection_stays_up_and_costs_little)
{
    struct node *a = open_node(_i, "a", 1), *b = open_node(_i, "b", 1);
    xfer_send(a->x, b->address, 1, "x", 1);
    NODE_WAIT(b, b->n_messages == 1);
    struct timespec t0, t1;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t0);
    uint64_t until = wall_ns() + 2 * NS_PER_S; /* two silences must pass */
    pthread_mutex_lock(&b->lock);
    while (node_wait_turn(b, until))
        ck_assert_uint_eq(b->downs, 0);
    pthread_mutex_unlock(&b->lock);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t1);
    double cpu_s = (double)(t1.tv_sec - t0.tv_sec) + (double)(t1.tv_nsec - t0.tv_nsec) * 1e-9;
    ck_assert_msg(cpu_s < 0.4, "two idle xfers used %.2f s of processor in 2 s", cpu_s);
    ck_assert_uint_eq(a->downs, 0);
    close_pair(a, b);
}
END_TEST

START_TEST(test_xfer_transport_is_read_back)
{
    static const char *const EXPECTED[] = {"loopback", "tcp", "mapped", "posix", "tcp/lo"};
    struct node *a = open_node(_i, "a", 1), *b = open_node(_i, "b", 1);
    char text[256];
    xfer_transport(a->x, text, sizeof(text));
    ck_assert_str_eq(text, "");
    xfer_send(a->x, b->address, 1, "x", 1);
    NODE_WAIT(b, b->n_messages == 1);
    uint64_t deadline = wall_ns() + 5 * NS_PER_S; /* a mapped arena is offered after the peer is up */
    do
        xfer_transport(a->x, text, sizeof(text));
    while (!strstr(text, EXPECTED[_i]) && wall_ns() < deadline);
    ck_assert_msg(strstr(text, EXPECTED[_i]) != NULL, "transport is %s", text);
    close_pair(a, b);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("xfer");
    TCase *tc = tcase_create("every backend");
    tcase_set_timeout(tc, 60);
    const TTest *const tests[] = {
        test_xfer_pages_arrive_bit_exact_announced_layer_by_layer,
        test_xfer_layers_may_be_announced_in_any_order,
        test_xfer_large_pages_travel_in_parts_within_the_credit,
        test_xfer_empty_transfer_carries_its_tail,
        test_xfer_pages_that_are_had_are_neither_asked_for_nor_written,
        test_xfer_pull_of_what_is_had_waits_for_the_finish,
        test_xfer_having_more_than_the_lease_is_invalid,
        test_xfer_pull_of_what_is_had_ends_with_its_peer_or_a_cancel,
        test_xfer_pull_that_overtakes_the_grant_is_asked_again,
        test_xfer_pull_that_overtakes_the_grant_need_not_ask_again,
        test_xfer_early_reader_that_gave_up_leaves_the_lease_to_another,
        test_xfer_pull_without_grant_ends_at_its_deadline,
        test_xfer_lease_nobody_pulls_expires_and_is_refused_by_name,
        test_xfer_waiting_reader_keeps_its_lease_alive,
        test_xfer_stale_incarnation_is_refused,
        test_xfer_lease_is_for_one_reader,
        test_xfer_lease_named_for_a_reader_is_refused_to_others,
        test_xfer_lease_that_its_reader_gave_up_before_it_was_granted_ends_at_once,
        test_xfer_lease_of_a_reader_that_goes_before_it_pulls_ends_at_once,
        test_xfer_id_in_use_is_refused,
        test_xfer_reader_without_room_ends_with_no_space,
        test_xfer_wrong_secret_is_refused,
        test_xfer_unreachable_address_ends_at_the_deadline,
        test_xfer_unreachable_address_is_not_waited_for_until_a_far_deadline,
        test_xfer_holder_that_comes_late_is_reached,
        test_xfer_holder_is_reached_by_name,
        test_xfer_messages_arrive_whole_and_in_order,
        test_xfer_two_that_connect_to_each_other_are_one_peer_each,
        test_xfer_many_leases_at_once,
        test_xfer_cancel_by_reader_waits_for_inflight,
        test_xfer_cancel_by_holder_waits_for_inflight,
        test_xfer_goodbye_is_told_from_a_death,
        test_xfer_close_ends_what_is_open,
        test_xfer_idle_connection_stays_up_and_costs_little,
        test_xfer_transport_is_read_back,
    };
    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++)
        tcase_add_loop_test(tc, tests[i], 0, N_BACKENDS);
    tcase_add_loop_test(tc, test_xfer_other_layout_is_refused, 0, N_BACKENDS * LAYOUT_FIELDS);
    suite_add_tcase(s, tc);
    SRunner *sr = srunner_create(s);
    srunner_run_all(sr, CK_ENV);
    int failed = srunner_ntests_failed(sr);
    srunner_free(sr);
    return failed ? 1 : 0;
}
