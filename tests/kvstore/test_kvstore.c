/* The store end to end: a store in this process, a worker that is an xfer over loopback, and a router
 * attached by gRPC. The last test runs tandem-kvstore itself over TCP and kills it. */
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/kvstore/world.h"
#include "tests/tap.h"

START_TEST(test_kvstore_says_what_it_is)
{
    struct world w;
    world_open(&w, 32, true);
    world_start(&w);
    ck_assert_str_eq(w.router->role, "store");
    ck_assert_str_eq(w.router->xfer_address, kvstore_xfer_address(w.store));
    ck_assert_uint_eq(w.router->n_pages, 32);
    ROUTER_WAIT(w.router, w.router->n_loads >= 3);
    ck_assert_uint_eq(ROUTER_READ(w.router, w.router->total_pages), 32);
    ck_assert_uint_eq(ROUTER_READ(w.router, w.router->free_pages), 32);
    world_close(&w);
}
END_TEST

START_TEST(test_kvstore_serves_what_was_offered)
{
    struct world w;
    struct store_found f;
    world_open(&w, 32, true);
    world_start(&w);
    ck_assert_uint_eq(offer(&w, 0, 10), 10);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_DRAM] == 10 && w.router->n_in[TIER_SSD] == 10);
    ck_assert_uint_eq(ROUTER_READ(w.router, w.router->index[7]), 7);
    ck_assert_uint_eq(lookup(&w, 0, 10, &f), 10);
    ck_assert_uint_eq(f.n_dram, 10);
    ck_assert_uint_eq(lookup(&w, 4, 20, &f), 6); /* the longest stored prefix of the requested blocks */
    ROUTER_WAIT(w.router, w.router->cached_pages == 10 && !w.router->leased_pages && w.router->store_blocks_ssd == 10 &&
                              w.router->store_blocks_dram == 10);
    world_close(&w);
}
END_TEST

START_TEST(test_kvstore_answers_a_lookup_of_nothing_at_once)
{
    struct world w;
    struct store_found f;
    world_open(&w, 8, false);
    world_start(&w);
    uint64_t before = wall_ns();
    ck_assert_uint_eq(lookup(&w, 0, 5, &f), 0);
    ck_assert_uint_lt(wall_ns() - before, 2 * NS_PER_S);
    ck_assert_uint_eq(offer(&w, 1, 3), 3);
    ck_assert_uint_eq(lookup(&w, 0, 4, &f), 0); /* without its head a prefix is not found */
    world_close(&w);
}
END_TEST

START_TEST(test_kvstore_wants_a_block_once)
{
    struct world w;
    uint16_t positions[8];
    world_open(&w, 32, false);
    world_start(&w);
    const char *store = kvstore_xfer_address(w.store);
    ck_assert_uint_eq(offer(&w, 0, 4), 4);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_DRAM] == 4);
    ck_assert_uint_eq(offer(&w, 0, 4), 0);
    ck_assert_uint_eq(offer_at(w.worker, store, ++w.next_id, 2, 5, positions), 3);
    ck_assert_uint_eq(positions[0], 2); /* block 4 */

    /* Another worker offers the blocks while the first one's pull waits for its lease. */
    struct node *other = node_open(
        &(struct node_params){.backend = "loopback", .hub = w.hub, .name = "other", .n_pages = 32, .layout = LAYOUT});
    uint64_t first = ++w.next_id, second = ++w.next_id;
    send_keys(w.worker, store, STORE_OFFER, first, 20, 4);
    NODE_WAIT(w.worker, is_want_of(w.worker, first));
    ck_assert_uint_eq(offer_at(other, store, second, 20, 4, NULL), 0);
    ck_assert_uint_eq(lookup(&w, 20, 4, NULL), 0); /* blocks on their way are not there yet */
    node_close(other);
    world_close(&w);
}
END_TEST

START_TEST(test_kvstore_restart_serves_from_ssd)
{
    struct world w;
    struct store_found f;
    world_open(&w, 32, true);
    world_start(&w);
    ck_assert_uint_eq(offer(&w, 0, 12), 12);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_SSD] == 12);
    stop_store(&w);
    start_store(&w);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_SSD] == 12);
    ck_assert_uint_eq(ROUTER_READ(w.router, w.router->n_in[TIER_DRAM]), 0);
    ck_assert_uint_eq(ROUTER_READ(w.router, w.router->index[5]), 5);
    ck_assert_uint_eq(lookup(&w, 0, 12, &f), 12);
    ck_assert_uint_eq(f.n_ssd, 12);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_DRAM] == 12);
    ck_assert_uint_eq(lookup(&w, 0, 12, &f), 12);
    ck_assert_uint_eq(f.n_dram, 12);
    world_close(&w);
}
END_TEST

START_TEST(test_kvstore_small_dram_cools_blocks_to_ssd)
{
    struct world w;
    struct store_found f;
    world_open(&w, 8, true);
    world_start(&w);
    for (uint32_t i = 0; i < 10; i++) {
        ck_assert_uint_eq(offer(&w, 6 * i, 6), 6);
        ROUTER_WAIT(w.router, w.router->n_in[TIER_SSD] == 6 * (i + 1));
        ck_assert_uint_le(ROUTER_READ(w.router, w.router->n_in[TIER_DRAM]), 8);
    }
    for (uint32_t i = 0; i < 10; i++) {
        ck_assert_uint_eq(lookup(&w, 6 * i, 6, &f), 6);
        ck_assert_uint_le(ROUTER_READ(w.router, w.router->n_in[TIER_DRAM]), 8);
    }
    ck_assert_uint_eq(lookup(&w, 0, 60, &f), 8); /* at most as many as there are slots */
    world_close(&w);
}
END_TEST

START_TEST(test_kvstore_evicts_tails_before_heads)
{
    struct world w;
    world_open(&w, 8, false);
    world_start(&w);
    ck_assert_uint_eq(offer(&w, 0, 8), 8);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_DRAM] == 8);
    ck_assert_uint_eq(offer(&w, 100, 3), 3);
    ROUTER_WAIT(w.router, w.router->in_tier[TIER_DRAM][100] && w.router->in_tier[TIER_DRAM][102]);
    ck_assert_uint_eq(lookup(&w, 0, 8, NULL), 5);
    ck_assert_uint_eq(lookup(&w, 100, 3, NULL), 3);
    world_close(&w);
}
END_TEST

START_TEST(test_kvstore_pinned_blocks_survive)
{
    struct world w;
    world_open(&w, 8, false);
    world_start(&w);
    const char *store = kvstore_xfer_address(w.store);
    ck_assert_uint_eq(offer(&w, 0, 4), 4);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_DRAM] == 4);
    uint64_t id = ++w.next_id;
    send_keys(w.worker, store, STORE_LOOKUP, id, 0, 4); /* the worker does not pull yet */
    ROUTER_WAIT(w.router, w.router->leased_pages == 4);
    ck_assert_uint_eq(offer(&w, 100, 8), 4);
    ck_assert_uint_eq(offer(&w, 200, 8), 4);
    ROUTER_WAIT(w.router, w.router->in_tier[TIER_DRAM][203] && w.router->free_pages + w.router->cached_pages == 4);
    node_pull(w.worker, id, store, 0, 10 * NS_PER_S);
    NODE_WAIT(w.worker, w.worker->pulls[id].ends == 1);
    ck_assert_int_eq(w.worker->pulls[id].status, TD_OK);
    ck_assert_uint_eq(w.worker->pulls[id].n_pages, 4);
    for (uint32_t i = 0; i < 4; i++)
        ck_assert(node_page_is(w.worker, i, i, 0));
    ROUTER_WAIT(w.router, !w.router->leased_pages);
    world_close(&w);
}
END_TEST

/* With DRAM alone at most half of it can be pinned. A block that is pinned before it comes is kept when it
 * comes. */
START_TEST(test_kvstore_pinned_prompts_outlive_others_until_the_pin_is_over)
{
    struct world w;
    world_open(&w, 8, false);
    world_start(&w);
    router_say(w.router, true, 0, 6, 1500); /* only four of them can be pinned */
    offer(&w, 0, 6);
    for (uint32_t i = 0; i < 10; i++)
        offer(&w, 100 + 4 * i, 4);
    ck_assert_uint_eq(lookup(&w, 0, 6, NULL), 4);
    ROUTER_WAIT(w.router, w.router->in_tier[TIER_DRAM][3] && !w.router->in_tier[TIER_DRAM][5]);
    /* Until the pin has ended. */
    for (uint32_t i = 0; ROUTER_READ(w.router, w.router->in_tier[TIER_DRAM][3]); i++) {
        offer(&w, 1000 + 4 * i, 4);
        usleep(5000);
    }
    world_close(&w);
}
END_TEST

START_TEST(test_kvstore_forgets_what_it_is_told_to_in_both_tiers)
{
    struct world w;
    world_open(&w, 32, true);
    world_start(&w);
    offer(&w, 0, 20);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_SSD] == 20);
    router_say(w.router, true, 0, 20, 60000);
    router_say(w.router, false, 5, 15, 0);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_SSD] == 5 && w.router->n_in[TIER_DRAM] == 5);
    ck_assert_uint_eq(lookup(&w, 0, 20, NULL), 5);
    ck_assert_uint_eq(lookup(&w, 7, 3, NULL), 0);
    stop_store(&w); /* it does not come back after a restart either */
    start_store(&w);
    ck_assert_uint_eq(lookup(&w, 7, 3, NULL), 0);
    ck_assert_uint_eq(lookup(&w, 0, 5, NULL), 5);
    offer(&w, 7, 3);
    ck_assert_uint_eq(lookup(&w, 7, 3, NULL), 3);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_SSD] == 8);
    router_say(w.router, false, 0, 0, 0);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_SSD] == 0 && w.router->n_in[TIER_DRAM] == 0);
    world_close(&w);
}
END_TEST

START_TEST(test_kvstore_lease_nobody_pulls_lets_go)
{
    struct world w;
    world_open(&w, 8, false);
    w.config.options.lease_ms = 300;
    world_start(&w);
    ck_assert_uint_eq(offer(&w, 0, 8), 8);
    send_keys(w.worker, kvstore_xfer_address(w.store), STORE_LOOKUP, ++w.next_id, 0, 8);
    ROUTER_WAIT(w.router, w.router->leased_pages == 8);
    ROUTER_WAIT(w.router, w.router->cached_pages == 8);
    ck_assert_uint_eq(offer(&w, 100, 8), 8);
    world_close(&w);
}
END_TEST

START_TEST(test_kvstore_corrupt_block_ends_the_prefix_and_goes)
{
    struct world w;
    struct store_found f;
    char blocks[160];
    uint64_t pattern_of_3[8];
    uint16_t positions[8];
    world_open(&w, 32, true);
    world_start(&w);
    snprintf(blocks, sizeof(blocks), "%s/blocks", w.dir.store);
    ck_assert_uint_eq(offer(&w, 0, 8), 8);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_SSD] == 8);
    stop_store(&w);
    for (size_t i = 0; i < 8; i++)
        pattern_of_3[i] = pattern(3, 0, 100 + i);
    ck_assert_int_eq(temp_dir_flip(blocks, ".blob", pattern_of_3, sizeof(pattern_of_3)), 1);
    start_store(&w);
    ck_assert_uint_eq(lookup(&w, 0, 8, &f), 3);
    ck_assert_uint_eq(f.n_ssd, 3);
    ROUTER_WAIT(w.router, !w.router->in_tier[TIER_SSD][3] && w.router->n_in[TIER_SSD] == 7);
    ck_assert_uint_eq(lookup(&w, 0, 8, &f), 3);
    ck_assert_uint_eq(offer_at(w.worker, kvstore_xfer_address(w.store), ++w.next_id, 0, 8, positions), 1);
    ck_assert_uint_eq(positions[0], 3);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_SSD] == 8);
    ck_assert_uint_eq(lookup(&w, 0, 8, &f), 8);
    world_close(&w);
}
END_TEST

START_TEST(test_kvstore_survives_messages_that_make_no_sense)
{
    struct world w;
    world_open(&w, 8, false);
    world_start(&w);
    const char *store = kvstore_xfer_address(w.store);
    ck_assert_uint_eq(offer(&w, 0, 4), 4);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_DRAM] == 4);
    for (uint16_t kind = 0; kind < 6; kind++)
        for (uint32_t len = 0; len < 64; len += 7) {
            uint8_t noise[64];
            for (uint32_t i = 0; i < len; i++)
                noise[i] = (uint8_t)random_at(3, kind, len * 64 + i);
            xfer_send(w.worker->x, store, kind, noise, len);
        }
    /* One id twice, one key many times, and more keys than slots. */
    uint64_t id = ++w.next_id;
    struct block_key same[64];
    struct bytes b = {0};
    for (int i = 0; i < 64; i++)
        same[i] = block_of(0);
    const struct store_keys_msg m = {.id_incarnation = 77, .id_counter = id, .n_keys = 64, .keys = same[0].b};
    store_keys_encode(&m, &b);
    for (int i = 0; i < 3; i++)
        xfer_send(w.worker->x, store, STORE_LOOKUP, b.data, (uint32_t)b.len);
    bytes_free(&b);
    node_pull(w.worker, id, store, 0, 10 * NS_PER_S);
    NODE_WAIT(w.worker, w.worker->pulls[id].ends == 1);
    ck_assert_int_eq(w.worker->pulls[id].status, TD_OK);
    ck_assert_uint_eq(w.worker->pulls[id].n_pages, 8);
    ck_assert_uint_eq(lookup(&w, 0, 4, NULL), 4);
    world_close(&w);
}
END_TEST

START_TEST(test_kvstore_worker_that_dies_gives_slots_back)
{
    struct world w;
    world_open(&w, 8, false);
    world_start(&w);
    struct node *other = node_open(
        &(struct node_params){.backend = "loopback", .hub = w.hub, .name = "dying", .n_pages = 32, .layout = LAYOUT});
    send_keys(other, kvstore_xfer_address(w.store), STORE_OFFER, 400, 50, 6);
    NODE_WAIT(other, is_want_of(other, 400));
    ROUTER_WAIT(w.router, w.router->held_pages == 6);
    node_close(other);
    ROUTER_WAIT(w.router, w.router->free_pages == 8);
    ck_assert_uint_eq(offer(&w, 50, 8), 8);
    world_close(&w);
}
END_TEST

static struct node *open_dying(struct world *w, const char *listen)
{
    return node_open(&(struct node_params){
        .backend = "loopback", .hub = w->hub, .name = "dying", .listen = listen, .n_pages = 32, .layout = LAYOUT});
}

/* Waits until no slot is held or leased any more: at most 3 s after a peer's death. */
static void check_let_go(struct world *w, uint64_t died_ns)
{
    ROUTER_WAIT(w->router, !w->router->held_pages && !w->router->leased_pages);
    uint64_t took = wall_ns() - died_ns;
    fprintf(stderr, "# slots of a dead peer were taken for %llu ms\n", (unsigned long long)(took / NS_PER_MS));
    ck_assert_uint_le(took, 3 * NS_PER_S);
}

START_TEST(test_kvstore_worker_that_dies_between_lookup_and_pull_gives_slots_back_within_3_s)
{
    struct world w;
    world_open(&w, 8, false);
    world_start(&w);
    ck_assert_uint_eq(offer(&w, 0, 8), 8);
    struct node *dying = open_dying(&w, NULL);
    send_keys(dying, kvstore_xfer_address(w.store), STORE_LOOKUP, 400, 0, 8);
    ROUTER_WAIT(w.router, w.router->leased_pages == 8);
    uint64_t died = wall_ns();
    node_close(dying);
    check_let_go(&w, died);
    ck_assert_uint_eq(lookup(&w, 0, 8, NULL), 8);
    world_close(&w);
}
END_TEST

START_TEST(test_kvstore_offer_of_a_worker_that_dies_and_is_started_again_gives_slots_back_within_3_s)
{
    struct world w;
    world_open(&w, 8, false);
    world_start(&w);
    /* So that the store can't connect to the worker before it is dead. */
    struct node *dying = open_dying(&w, "elsewhere");
    snprintf(dying->address, sizeof(dying->address), "%s", "its-address");
    send_keys(dying, kvstore_xfer_address(w.store), STORE_OFFER, 400, 50, 6);
    ROUTER_WAIT(w.router, w.router->held_pages == 6);
    uint64_t died = wall_ns();
    node_close(dying);
    struct node *again = open_dying(&w, "its-address"); /* the new process does not know of the offer */
    check_let_go(&w, died);
    ck_assert_uint_eq(offer_at(again, kvstore_xfer_address(w.store), 401, 50, 8, NULL), 8);
    node_close(again);
    world_close(&w);
}
END_TEST

START_TEST(test_kvstore_stop_writes_what_is_dirty)
{
    struct world w;
    world_open(&w, 128, true);
    w.config.options.write_queue_bytes = PAGE; /* so that the writer is always behind */
    world_start(&w);
    ck_assert_uint_eq(offer(&w, 0, 100), 100);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_DRAM] == 100);
    stop_store(&w);
    start_store(&w);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_SSD] == 100);
    ck_assert_uint_eq(lookup(&w, 0, 100, NULL), 100);
    world_close(&w);
}
END_TEST

/* The writer is far behind, and offers would take every slot, so that blocks on SSD could not be read any
 * more. */
START_TEST(test_kvstore_new_blocks_leave_room_to_what_is_read)
{
    struct world w;
    struct store_found f;
    world_open(&w, 32, true);
    world_start(&w);
    ck_assert_uint_eq(offer(&w, 0, 8), 8);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_SSD] == 8);
    stop_store(&w);
    w.config.options.write_bytes_per_s = PAGE;
    start_store(&w);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_SSD] == 8);
    ck_assert_uint_eq(lookup(&w, 0, 4, &f), 4);
    uint32_t taken = offer(&w, 100, 32);
    ck_assert(taken >= 20 && taken <= 24);
    ck_assert_uint_eq(lookup(&w, 4, 4, &f), 4);
    ck_assert_uint_eq(f.n_ssd, 4);
    world_close(&w);
}
END_TEST

START_TEST(test_kvstore_ssd_capacity_evicts_the_oldest)
{
    struct world w;
    world_open(&w, 64, true);
    w.config.options.ssd_bytes = 8 << 20; /* about 860 blocks */
    world_start(&w);
    for (uint32_t i = 0; i < 60; i++) {
        ck_assert_uint_eq(offer(&w, 32 * i, 32), 32);
        ROUTER_WAIT(w.router, w.router->in_tier[TIER_SSD][32 * i + 31]);
    }
    ROUTER_WAIT(w.router, w.router->store_blocks_ssd < 900 && w.router->store_bytes_ssd <= 8 << 20);
    ck_assert(!ROUTER_READ(w.router, w.router->in_tier[TIER_SSD][0]));
    ck_assert_uint_gt(ROUTER_READ(w.router, w.router->n_in[TIER_SSD]), 700);
    ck_assert_uint_eq(lookup(&w, 0, 32, NULL), 0);
    ck_assert_uint_eq(lookup(&w, 32 * 50, 32, NULL), 32);
    world_close(&w);
}
END_TEST

START_TEST(test_kvstore_without_a_usable_directory_serves_from_dram)
{
    struct world w;
    world_open(&w, 8, true);
    w.config.options.dir = "/proc/no/such/directory";
    w.config.options.log_level = "error";
    world_start(&w);
    ck_assert_uint_eq(offer(&w, 0, 8), 8);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_DRAM] == 8);
    ck_assert_uint_eq(lookup(&w, 0, 8, NULL), 8);
    world_close(&w);
}
END_TEST

/* ----------------------------------------------------------------- the process */

struct process {
    pid_t pid;
    char address[128];
    uint64_t start_ns; /* time until the store reported where it listens */
};

static struct process spawn_store(const char *dir)
{
    extern char **environ;
    struct process p = {0};
    int ends[2];
    char fd[16];
    ck_assert_int_eq(pipe(ends), 0);
    snprintf(fd, sizeof(fd), "%d", ends[1]);
    fcntl(ends[0], F_SETFD, FD_CLOEXEC);
    setenv("TANDEM_READY_FD", fd, 1);
    char *argv[] = {(char *)(uintptr_t)TANDEM_KVSTORE,
                    (char *)(uintptr_t) "--dummy=" DIMS,
                    (char *)(uintptr_t) "--transports=tcp",
                    (char *)(uintptr_t) "--log-level=error",
                    (char *)(uintptr_t) "--dram-bytes=4M",
                    (char *)(uintptr_t) "--ssd-bytes=64M", /* a batch has 2 MiB, so some puts are logged */
                    (char *)(uintptr_t) "--dir",
                    (char *)(uintptr_t)dir,
                    NULL};
    uint64_t before = wall_ns();
    ck_assert_int_eq(posix_spawn(&p.pid, TANDEM_KVSTORE, NULL, NULL, argv, environ), 0);
    close(ends[1]);
    size_t n = 0;
    for (ssize_t got; n < sizeof(p.address) - 1 && (got = read(ends[0], p.address + n, sizeof(p.address) - 1 - n)) > 0;)
        n += (size_t)got;
    close(ends[0]);
    p.start_ns = wall_ns() - before;
    p.address[strcspn(p.address, "\n")] = 0;
    ck_assert_msg(p.address[0], "tandem-kvstore did not start");
    return p;
}

/* A worker that records which blocks were reported as durable; chains of CHAIN blocks. */
struct killing {
    struct temp_dir dir;
    struct node *worker;
    uint64_t next_id, slowest_ns;
    bool *durable; /* indexed by the number of the block */
    uint32_t n_checked;
};

enum { CHAIN = 200, DIR_ROUNDS = 16 }; /* rounds that fit into the directory without eviction */

static void check_durable(struct killing *k, struct fake_router *r, uint32_t first_chain, uint32_t n_chains)
{
    for (uint32_t c = first_chain; c < first_chain + n_chains; c++) {
        uint32_t first = c * CHAIN, n = 0;
        for (uint32_t i = first; i < first + CHAIN; i++)
            ck_assert_msg(!k->durable[i] || r->in_tier[TIER_SSD][i], "block %u was durable and is gone", i);
        while (n < CHAIN && k->durable[first + n])
            n++;
        /* The store answers with less while it has no slot or the disk is slow; what is lost stays away. */
        uint32_t found = 0;
        for (int tries = 0; n && found < n && tries < 10; tries++) {
            if (tries)
                usleep(100000u << tries / 2);
            found = lookup_at(k->worker, r->xfer_address, ++k->next_id, first, CHAIN, NULL);
        }
        ck_assert_uint_ge(found, n);
        k->n_checked += n;
    }
}

static void kill_round(struct killing *k, uint32_t round, uint32_t dir_round)
{
    struct process p = spawn_store(k->dir.store);
    struct fake_router *r = router_attach(p.address);
    k->slowest_ns = p.start_ns > k->slowest_ns ? p.start_ns : k->slowest_ns;
    check_durable(k, r, round - dir_round, dir_round);
    uint32_t first = round * CHAIN, least = (uint32_t)(random_at(8, round, 0) % (CHAIN - 10));
    ck_assert_uint_eq(offer_at(k->worker, r->xfer_address, ++k->next_id, first, CHAIN, NULL), CHAIN);
    ROUTER_WAIT(r, r->in_tier[TIER_SSD][first + least]); /* the rest is still being written */
    kill(p.pid, SIGKILL);
    ROUTER_WAIT(r, r->is_over);
    memcpy(k->durable, r->in_tier[TIER_SSD], ROUTER_BLOCKS);
    waitpid(p.pid, NULL, 0);
    router_detach(r);
}

START_TEST(test_kvstore_process_killed_and_restarted_serves_what_was_durable)
{
    const char *more = getenv("TANDEM_LONG");
    uint32_t rounds = more && (!strcmp(more, "store") || !strcmp(more, "all")) ? 1000 : 5;
    struct killing k = {.dir = temp_dir_make(), .durable = mem_zalloc(ROUTER_BLOCKS)};
    k.worker =
        node_open(&(struct node_params){.backend = "tcp", .name = "worker", .n_pages = WORKER_PAGES, .layout = LAYOUT});
    for (uint32_t round = 0; round < rounds; round++) {
        if (round % DIR_ROUNDS == 0)
            temp_dir_remove_store(&k.dir);
        kill_round(&k, round, round % DIR_ROUNDS);
    }
    struct process p = spawn_store(k.dir.store);
    kill(p.pid, SIGTERM);
    int status;
    ck_assert_int_eq(waitpid(p.pid, &status, 0), p.pid);
    ck_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    fprintf(stderr, "# %u kills, %u durable blocks looked up after them and right, started again within %.0f ms\n",
            rounds, k.n_checked, (double)k.slowest_ns * 1e-6);
    ck_assert_uint_gt(k.n_checked, 100);
    node_close(k.worker);
    temp_dir_remove(&k.dir);
    free(k.durable);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kvstore");
    TCase *c = tcase_create("kvstore");
    tcase_set_timeout(c, getenv("TANDEM_LONG") ? 3600 : 100);
    tcase_add_test(c, test_kvstore_says_what_it_is);
    tcase_add_test(c, test_kvstore_serves_what_was_offered);
    tcase_add_test(c, test_kvstore_answers_a_lookup_of_nothing_at_once);
    tcase_add_test(c, test_kvstore_wants_a_block_once);
    tcase_add_test(c, test_kvstore_restart_serves_from_ssd);
    tcase_add_test(c, test_kvstore_small_dram_cools_blocks_to_ssd);
    tcase_add_test(c, test_kvstore_evicts_tails_before_heads);
    tcase_add_test(c, test_kvstore_pinned_blocks_survive);
    tcase_add_test(c, test_kvstore_pinned_prompts_outlive_others_until_the_pin_is_over);
    tcase_add_test(c, test_kvstore_forgets_what_it_is_told_to_in_both_tiers);
    tcase_add_test(c, test_kvstore_lease_nobody_pulls_lets_go);
    tcase_add_test(c, test_kvstore_corrupt_block_ends_the_prefix_and_goes);
    tcase_add_test(c, test_kvstore_survives_messages_that_make_no_sense);
    tcase_add_test(c, test_kvstore_worker_that_dies_gives_slots_back);
    tcase_add_test(c, test_kvstore_worker_that_dies_between_lookup_and_pull_gives_slots_back_within_3_s);
    tcase_add_test(c, test_kvstore_offer_of_a_worker_that_dies_and_is_started_again_gives_slots_back_within_3_s);
    tcase_add_test(c, test_kvstore_stop_writes_what_is_dirty);
    tcase_add_test(c, test_kvstore_new_blocks_leave_room_to_what_is_read);
    tcase_add_test(c, test_kvstore_ssd_capacity_evicts_the_oldest);
    tcase_add_test(c, test_kvstore_without_a_usable_directory_serves_from_dram);
    tcase_add_test(c, test_kvstore_process_killed_and_restarted_serves_what_was_durable);
    suite_add_tcase(s, c);
    return tap_main(s);
}
