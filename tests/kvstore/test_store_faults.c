/* The store on a disk that fails. Whatever the disk does, served bytes are right, every lookup is a hit or a
 * miss with a reason, and the tier recovers by itself. */
#include "kvstore/forgotten.h"
#include "tests/kvstore/outage.h"
#include "tests/tap.h"

START_TEST(test_store_disk_that_lies_and_corrupts_never_serves_wrong_bytes)
{
    struct world w;
    const char *more = getenv("TANDEM_LONG");
    uint32_t rounds = more && (!strcmp(more, "store") || !strcmp(more, "all")) ? 10000 / 30 : 8, n_found = 0;
    world_open(&w, 40, true);
    w.config.options.faults = "seed=11 disk.put:corrupt=0.08 disk.put:truncate=0.08 disk.put:duplicate=0.08 "
                              "disk.put:lie=0.08 disk.put:fail=0.02 disk.read:corrupt=0.05 disk.read:truncate=0.05 "
                              "disk.read:lie=0.05 disk.read:fail=0.05 disk.read:delay=0.02/1ms";
    world_start(&w);
    for (uint32_t round = 0; round < rounds; round++) {
        for (uint32_t chain = 0; chain < 6; chain++) /* thrice the DRAM: most of it is on disk */
            offer(&w, 100 * chain, 20);
        settle(&w);
        for (uint32_t chain = 0; chain < 6; chain++)
            n_found += lookup(&w, 100 * chain, 20, NULL); /* this compares every byte */
    }
    uint64_t n_bad = counted(&w, STORE_SSD_CORRUPT) + counted(&w, STORE_SSD_READ_ERRORS);
    uint64_t n_faults = 0;
    for (int kind = 0; kind < FAULT_KINDS; kind++)
        n_faults += faults_count(w.store->faults, FAULT_DISK_PUT, (enum fault_kind)kind) +
                    faults_count(w.store->faults, FAULT_DISK_READ, (enum fault_kind)kind);
    fprintf(stderr, "# %llu faults, %u blocks served and right, %llu found bad and deleted\n",
            (unsigned long long)n_faults, n_found, (unsigned long long)n_bad);
    ck_assert_uint_gt(n_faults, 50);
    ck_assert_uint_gt(n_bad, 10);
    ck_assert_uint_gt(n_found, 50);
    check_counters(&w);
    world_close(&w);
}
END_TEST

START_TEST(test_store_slow_disk_is_a_miss_in_time_and_is_used_again)
{
    struct world w;
    struct store_found f;
    world_open(&w, 32, true);
    world_start(&w);
    ck_assert_uint_eq(offer(&w, 0, 20), 20);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_SSD] == 20);
    stop_store(&w);
    w.config.options.read_deadline_ms = 200;
    w.config.options.faults = "disk.read:delay/900ms@1-5";
    start_store(&w);
    uint64_t before = wall_ns();
    ck_assert_uint_eq(lookup(&w, 0, 20, NULL), 0);
    ck_assert_uint_lt(wall_ns() - before, NS_PER_S * 8 / 10); /* it did not wait for the disk */
    before = wall_ns();
    ck_assert_uint_eq(lookup(&w, 0, 20, NULL), 0); /* the disk is not asked */
    ck_assert_uint_lt(wall_ns() - before, NS_PER_S / 10);
    ck_assert_uint_ge(counted(&w, STORE_MISS_SLOW), 40);
    uint64_t until = wall_ns() + 10 * NS_PER_S;
    while (lookup(&w, 0, 20, &f) < 20)
        ck_assert_msg(wall_ns() < until, "a disk that is fast again is not used");
    ck_assert_uint_gt(f.n_ssd + f.n_dram, 0);
    check_counters(&w);
    world_close(&w);
}
END_TEST

START_TEST(test_store_faults_on_the_wire_lose_no_block_and_no_count)
{
    struct world w;
    world_open(&w, 64, true);
    w.config.options.faults = "seed=5 wire.payload:corrupt=0.05";
    world_start(&w);
    uint32_t n_found = 0;
    ck_assert_uint_eq(offer(&w, 0, 30), 30);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_DRAM] == 30);
    for (uint32_t i = 0; i < 30; i++) {
        uint64_t id = ++w.next_id;
        node_pull(w.worker, id, kvstore_xfer_address(w.store), 0, 10 * NS_PER_S);
        send_keys(w.worker, kvstore_xfer_address(w.store), STORE_LOOKUP, id, 0, 30);
        NODE_WAIT(w.worker, w.worker->pulls[id].ends == 1);
        enum td_status s = w.worker->pulls[id].status;
        ck_assert_msg(s == TD_OK || s == TD_ERR_CHECKSUM, "status %s", td_status_name(s));
        for (uint32_t p = 0; s == TD_OK && p < 30; p++)
            ck_assert(node_page_is(w.worker, p, p, 0));
        n_found += s == TD_OK;
    }
    ck_assert_uint_gt(faults_count(w.store->faults, FAULT_WIRE_PAYLOAD, FAULT_CORRUPT), 0);
    ck_assert_uint_lt(n_found, 30);
    ROUTER_WAIT(w.router, !w.router->leased_pages);
    check_counters(&w);
    world_close(&w);
}
END_TEST

START_TEST(test_store_refuses_a_script_that_makes_no_sense)
{
    struct world w;
    struct kvstore *s = NULL;
    struct td_error e = {""};
    world_open(&w, 8, true);
    w.config.options.faults = "disk.put:sometimes";
    ck_assert_int_eq(kvstore_open(&w.config, &s, &e), TD_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(e.text, "disk.put:sometimes"));
    xfer_hub_close(w.hub);
    temp_dir_remove(&w.dir);
}
END_TEST

/* Sets the faults that the store meets from now on. */
static void set_faults(struct world *w, const char *script)
{
    FILE *f = fopen(w->config.options.faults + 1, "w");
    ck_assert_ptr_nonnull(f);
    ck_assert_int_ge(fputs(script, f), 0);
    fclose(f);
    if (w->store)
        kvstore_reload(w->store);
}

static void world_open_with_faults(struct world *w, char path[static 96])
{
    world_open(w, 256, true);
    snprintf(path, 96, "%s/faults", w->dir.root);
    static char option[98];
    snprintf(option, sizeof(option), "@%s", path);
    w->config.options.faults = option;
    w->config.options.ssd_bytes = 16 << 20;
    set_faults(w, "");
}

START_TEST(test_store_whose_writes_deletes_and_flushes_fail_knows_what_is_on_disk_afterwards)
{
    static const char *const SCRIPTS[] = {"disk.delete:full", "disk.put:full disk.delete:full", "disk.flush:full",
                                          "seed=2 disk.put:full=0.02 disk.delete:fail=0.2 disk.flush:fail=0.3",
                                          "seed=3 disk.put:fail=0.02 disk.delete:full=0.5 disk.flush:full=0.5"};
    struct world w;
    char path[96];
    uint32_t next = 0;
    world_open_with_faults(&w, path);
    world_start(&w);
    for (size_t i = 0; i < sizeof(SCRIPTS) / sizeof(SCRIPTS[0]); i++) {
        for (uint32_t n = 0; n < 4; n++, next += 100)
            offer(&w, next, 100);
        settle(&w);
        set_faults(&w, SCRIPTS[i]);
        router_say(w.router, false, next - 400, 40, 0);
        for (uint32_t n = 0; n < 6; n++, next += 100)
            offer(&w, next, 100);
        router_say(w.router, false, next - 200, 100, 0);
        settle(&w);
        ck_assert_msg(ssd_tier_stats(w.store->ssd).is_in_doubt, "nothing failed with %s", SCRIPTS[i]);
        set_faults(&w, "");
        wait_sure(&w);
        ck_assert_uint_gt(check_disk(&w, NULL), 0);
    }
    world_close(&w);
}
END_TEST

START_TEST(test_store_forgotten_keys_outlive_the_process_and_when_there_are_too_many_stand_for_all)
{
    struct temp_dir d = temp_dir_make();
    const struct log log = {.who = "test", .level = LOG_ERROR};
    struct block_key keys[3] = {block_of(7), block_of(3), block_of(5)}, written[3];
    char path[96];
    uint32_t n;
    snprintf(path, sizeof(path), "%s/forgotten", d.root);
    struct forgotten *f = forgotten_open(d.root, &log);
    for (int i = 0; i < 6; i++)
        forgotten_add(f, &keys[i % 3]);
    forgotten_close(f); /* closing writes no further byte */
    int fd = open(path, O_RDONLY);
    ck_assert_int_eq(pread(fd, written, sizeof(written), 0), sizeof(written));
    ck_assert_mem_eq(written, keys, sizeof(keys)); /* the format: keys in the order of arrival, each once */
    close(fd);
    f = forgotten_open(d.root, &log);
    forgotten_keys(f, &n);
    ck_assert_uint_eq(n, 3);
    ck_assert(forgotten_has(f, &keys[1]) && !forgotten_all(f));
    for (uint32_t i = 100; i < 100 + FORGOTTEN_MAX - 2; i++) {
        struct block_key k = block_of(i);
        ck_assert(!forgotten_all(f));
        forgotten_add(f, &k);
    }
    ck_assert(forgotten_all(f) && forgotten_has(f, &keys[0]));
    forgotten_close(f);
    f = forgotten_open(d.root, &log);
    ck_assert(forgotten_all(f));
    forgotten_clear(f);
    forgotten_close(f);
    f = forgotten_open(d.root, &log);
    forgotten_keys(f, &n);
    ck_assert(!n && !forgotten_all(f));
    forgotten_close(f);
    temp_dir_remove(&d);
}
END_TEST

START_TEST(test_store_restarted_while_its_disk_is_full_does_not_find_what_was_forgotten)
{
    struct world w;
    char path[96];
    world_open_with_faults(&w, path);
    world_start(&w);
    ck_assert_uint_eq(offer(&w, 0, 100), 100);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_SSD] == 100);
    set_faults(&w, "disk.put:full disk.delete:full disk.flush:full");
    router_say(w.router, false, 20, 30, 0);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_SSD] == 70);
    for (int i = 0; i < 2; i++) { /* twice, since nothing could be deleted meanwhile */
        stop_store(&w);
        start_store(&w);
        ck_assert_uint_eq(lookup(&w, 20, 30, NULL), 0);
        ck_assert_uint_eq(lookup(&w, 50, 50, NULL), 50);
    }
    ck_assert_uint_eq(offer(&w, 20, 30), 30); /* they are taken again as new blocks, into DRAM */
    settle(&w);
    ck_assert_uint_eq(ROUTER_READ(w.router, w.router->n_in[TIER_SSD]), 70);
    set_faults(&w, "");
    wait_sure(&w);
    ck_assert_uint_eq(check_disk(&w, NULL), 70);
    router_say(w.router, false, 0, 0, 0); /* all blocks, before any error */
    ROUTER_WAIT(w.router, !w.router->n_in[TIER_SSD]);
    ck_assert_uint_eq(offer(&w, 0, 100), 100);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_SSD] == 100);
    set_faults(&w, "disk.put:full disk.delete:full disk.flush:full");
    router_say(w.router, false, 0, 1, 0);
    settle(&w);
    router_say(w.router, false, 0, 0, 0); /* all blocks, after an error */
    ROUTER_WAIT(w.router, !w.router->n_in[TIER_SSD]);
    stop_store(&w);
    start_store(&w);
    ck_assert_uint_eq(lookup(&w, 1, 99, NULL), 0);
    set_faults(&w, "");
    wait_sure(&w);
    wait_durable(&w, 2000);
    world_close(&w);
}
END_TEST

/* Of the first n blocks those that were on SSD before and are not now. Under the router's lock. */
static uint32_t n_missing(const struct fake_router *r, const bool *before, uint32_t n)
{
    uint32_t sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += before[i] && !r->in_tier[TIER_SSD][i];
    return sum;
}

START_TEST(test_store_does_not_find_what_was_forgotten_behind_a_delete_that_failed_later)
{
    static bool before[ROUTER_BLOCKS], gone[ROUTER_BLOCKS];
    struct world w;
    char path[96];
    uint32_t next = 0, last = 0, n_gone = 0;
    world_open_with_faults(&w, path);
    w.config.options.ssd_bytes = 4 << 20;
    world_start(&w);
    for (; !counted(&w, STORE_EVICTED_SSD); next += 25)
        offer(&w, next, 25);
    settle(&w);
    pthread_mutex_lock(&w.router->lock);
    memcpy(before, w.router->in_tier[TIER_SSD], sizeof(before));
    pthread_mutex_unlock(&w.router->lock);
    for (uint32_t i = 0; i < next; i++)
        last = before[i] ? i : last;
    set_faults(&w, "disk.put:delay=1/1s disk.delete:full");
    offer(&w, next, 1);
    offer(&w, next + 1, 100); /* evicts some blocks, whose deletes wait behind the first put */
    router_say(w.router, false, last, 1, 0);
    ROUTER_WAIT(w.router, !w.router->in_tier[TIER_SSD][last]);
    ROUTER_WAIT(w.router, n_missing(w.router, before, next) > 1); /* they are reported one by one */
    for (uint32_t i = 0; i < next; i++)
        if (before[i] && !ROUTER_READ(w.router, w.router->in_tier[TIER_SSD][i])) {
            router_say(w.router, false, i, 1, 0);
            gone[i] = ++n_gone;
        }
    ck_assert_uint_gt(n_gone, 1);
    router_say(w.router, false, last - 1, 1, 0); /* messages are handled in order */
    ROUTER_WAIT(w.router, !w.router->in_tier[TIER_SSD][last - 1]);
    set_faults(&w, "disk.put:full disk.delete:full disk.flush:full");
    stop_store(&w);
    start_store(&w);
    for (uint32_t i = 0; i < next; i++)
        ck_assert_msg(!gone[i] || !ROUTER_READ(w.router, w.router->in_tier[TIER_SSD][i]),
                      "block %u was forgotten, and is back", i);
    world_close(&w);
}
END_TEST

START_TEST(test_store_that_is_stopped_while_it_writes_what_was_forgotten_does_not_find_it)
{
    struct world w;
    char path[96];
    world_open_with_faults(&w, path);
    world_start(&w);
    ck_assert_uint_eq(offer(&w, 0, 10), 10);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_SSD] == 10);
    set_faults(&w, "disk.put:delay=1/30s");
    ck_assert_uint_eq(offer(&w, 10, 1), 1);
    router_say(w.router, false, 10, 1, 0);
    router_say(w.router, false, 9, 1, 0);
    ROUTER_WAIT(w.router, !w.router->in_tier[TIER_SSD][9]);
    kvstore_stop(w.store); /* stop_store() stops it a second time, which ends it at once */
    stop_store(&w);
    start_store(&w);
    ck_assert_uint_eq(ROUTER_READ(w.router, w.router->n_in[TIER_SSD]), 9);
    ck_assert_uint_eq(lookup(&w, 10, 1, NULL), 0);
    world_close(&w);
}
END_TEST

/* Removes the directory, renames it, puts an empty one in its place, or takes away its parent, too, for a
 * while. */
START_TEST(test_store_whose_directory_is_removed_begins_anew)
{
    struct world w;
    char away[128];
    struct temp_dir moved;
    world_open(&w, 64, true);
    w.config.options.ssd_bytes = 16 << 20;
    world_start(&w);
    snprintf(away, sizeof(away), "%s.away", w.dir.store);
    snprintf(moved.root, sizeof(moved.root), "%.50s.away", w.dir.root);
    ck_assert_uint_eq(offer(&w, 0, 20), 20);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_SSD] == 20);
    if (_i == 0)
        temp_dir_remove_store(&w.dir);
    if (_i == 1 || _i == 2)
        ck_assert_int_eq(rename(w.dir.store, away), 0);
    if (_i == 2)
        ck_assert_int_eq(mkdir(w.dir.store, 0700), 0);
    if (_i == 3)
        ck_assert_int_eq(rename(w.dir.root, moved.root), 0);
    if (_i == 3) {
        uint64_t until = wall_ns() + 10 * NS_PER_S;
        while (!ssd_tier_stats(w.store->ssd).is_in_doubt)
            ck_assert_uint_lt(wall_ns(), until);
        ck_assert_uint_eq(lookup(&w, 0, 20, NULL), 20); /* they are in DRAM */
        offer(&w, 100, 20);
        settle(&w);
        ck_assert(!ROUTER_READ(w.router, w.router->in_tier[TIER_SSD][100]));
        ck_assert_int_eq(mkdir(w.dir.root, 0700), 0);
    }
    ROUTER_WAIT(w.router, w.router->n_left[TIER_SSD] >= 20); /* those in DRAM are written again at once */
    wait_durable(&w, 1000);
    wait_sure(&w);
    ck_assert_uint_gt(check_disk(&w, NULL), 0);
    check_counters(&w);
    world_close(&w);
    if (_i == 3)
        temp_dir_remove(&moved);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kvstore faults");
    TCase *c = tcase_create("faults");
    tcase_set_timeout(c, getenv("TANDEM_LONG") ? 3600 : 150);
    tcase_add_test(c, test_store_disk_that_lies_and_corrupts_never_serves_wrong_bytes);
    tcase_add_test(c, test_store_slow_disk_is_a_miss_in_time_and_is_used_again);
    tcase_add_test(c, test_store_faults_on_the_wire_lose_no_block_and_no_count);
    tcase_add_test(c, test_store_refuses_a_script_that_makes_no_sense);
    tcase_add_test(c, test_store_whose_writes_deletes_and_flushes_fail_knows_what_is_on_disk_afterwards);
    tcase_add_test(c, test_store_forgotten_keys_outlive_the_process_and_when_there_are_too_many_stand_for_all);
    tcase_add_test(c, test_store_restarted_while_its_disk_is_full_does_not_find_what_was_forgotten);
    tcase_add_test(c, test_store_does_not_find_what_was_forgotten_behind_a_delete_that_failed_later);
    tcase_add_test(c, test_store_that_is_stopped_while_it_writes_what_was_forgotten_does_not_find_it);
    tcase_add_loop_test(c, test_store_whose_directory_is_removed_begins_anew, 0, 4);
    suite_add_tcase(s, c);
    return tap_main(s);
}
