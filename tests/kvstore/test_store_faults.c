/*
 * The store on a disk that fails: whatever happens below, what is served is right, every block asked for is a hit or a miss
 * with a reason, and the tier comes back by itself.
 */
#include <sched.h>
#include <sys/mount.h>

#include "kvstore/forgotten.h"
#include "kvstore/kvstore_internal.h"
#include "kvstore/offline.h"
#include "tests/kvstore/world.h"
#include "tests/tap.h"

static uint64_t counted(const struct world *w, uint32_t metric)
{
    return metrics_get(w->store->counters, metric);
}

static void check_counters(const struct world *w)
{
    static const uint32_t ENDS[] = {STORE_HITS_DRAM,    STORE_HITS_SSD,     STORE_MISS_ABSENT,
                                    STORE_MISS_NO_SLOT, STORE_MISS_CORRUPT, STORE_MISS_IO,
                                    STORE_MISS_SLOW,    STORE_MISS_ENDED,   STORE_MISS_STOPPING};
    static const uint32_t OFFERS[] = {STORE_PUTS, STORE_KNOWN, STORE_DROP_NO_SLOT, STORE_DROP_TRANSFER,
                                      STORE_DROP_STOPPING};
    uint64_t ends = 0, offers = 0;
    for (size_t i = 0; i < sizeof(ENDS) / sizeof(ENDS[0]); i++)
        ends += counted(w, ENDS[i]);
    for (size_t i = 0; i < sizeof(OFFERS) / sizeof(OFFERS[0]); i++)
        offers += counted(w, OFFERS[i]);
    ck_assert_uint_eq(counted(w, STORE_ASKED), ends);
    ck_assert_uint_eq(counted(w, STORE_OFFERED), offers);
}

/* Waits until nothing waits to be written. */
static void settle(struct world *w)
{
    uint64_t until = wall_ns() + 20 * NS_PER_S;
    bool is_quiet;
    do { /* its events are out when it has beaten once more */
        is_quiet = !ssd_tier_stats(w->store->ssd).queued_bytes;
        uint32_t loads = (uint32_t)ROUTER_READ(w->router, w->router->n_loads);
        ROUTER_WAIT(w->router, w->router->n_loads > loads);
        ck_assert_uint_lt(wall_ns(), until);
    } while (!is_quiet);
}

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
        for (uint32_t chain = 0; chain < 6;
             chain++) /* three times what DRAM holds, so that most of it comes from disk */
            offer(&w, 100 * chain, 20);
        settle(&w);
        for (uint32_t chain = 0; chain < 6; chain++)
            n_found += lookup(&w, 100 * chain, 20, NULL); /* compares every byte */
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
    ck_assert_uint_lt(wall_ns() - before, NS_PER_S * 8 / 10); /* not until the disk answers */
    before = wall_ns();
    ck_assert_uint_eq(lookup(&w, 0, 20, NULL), 0); /* it is not even tried */
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

/* ------------------------------------------------------- file systems of our own */

/* A small file system at the store's parent, seen by this process alone; false: not permitted here. */
static bool mount_small(const struct world *w, const char *options)
{
    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
        mount("tmpfs", w->dir.root, "tmpfs", 0, options)) {
        fprintf(stderr, "# skipped: mounting is not permitted here\n");
        return false;
    }
    return true;
}

static void world_skip(struct world *w)
{
    xfer_hub_close(w->hub);
    temp_dir_remove(&w->dir);
}

static void unmount(const struct world *w)
{
    umount2(w->dir.root, MNT_DETACH);
    rmdir(w->dir.root);
}

/* New blocks until one is durable again: what a worker that goes on offering sees. */
static void wait_durable(struct world *w, uint32_t first)
{
    uint64_t until = wall_ns() + 10 * NS_PER_S;
    for (uint32_t i = first; !ROUTER_READ(w->router, w->router->in_tier[TIER_SSD][i]); i++) {
        ck_assert_msg(wall_ns() < until, "nothing became durable within 10 s");
        offer(w, i + 1, 1);
        uint32_t loads = (uint32_t)ROUTER_READ(w->router, w->router->n_loads);
        ROUTER_WAIT(w->router, w->router->n_loads > loads || w->router->in_tier[TIER_SSD][i + 1]);
    }
}

static void fill_disk(const struct world *w)
{
    char path[96], zeros[4096] = {0};
    snprintf(path, sizeof(path), "%s/ballast", w->dir.root);
    int fd = open(path, O_WRONLY | O_CREAT, 0600);
    ck_assert_int_ge(fd, 0);
    while (write(fd, zeros, sizeof(zeros)) > 0)
        ;
    close(fd);
}

START_TEST(test_store_on_a_full_disk_serves_on_and_writes_again_by_itself)
{
    struct world w;
    char path[96];
    world_open(&w, 64, true);
    if (!mount_small(&w, "size=24m")) {
        world_skip(&w);
        return;
    }
    w.config.options.ssd_bytes = 16 << 20;
    world_start(&w);
    ck_assert_uint_eq(offer(&w, 0, 20), 20);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_SSD] == 20);
    fill_disk(&w);
    for (uint32_t i = 0; i < 4; i++)
        ck_assert_uint_eq(offer(&w, 1000 + 10 * i, 10), 10); /* taken, into DRAM */
    settle(&w);
    ck_assert(!ssd_tier_stats(w.store->ssd).is_writable);
    ck_assert_uint_eq(lookup(&w, 1030, 10, NULL), 10);
    snprintf(path, sizeof(path), "%s/ballast", w.dir.root);
    ck_assert_int_eq(unlink(path), 0);
    wait_durable(&w, 2000);
    ck_assert(ssd_tier_stats(w.store->ssd).is_writable);
    check_counters(&w);
    world_close(&w);
    unmount(&w);
}
END_TEST

START_TEST(test_store_on_a_disk_that_turns_read_only_serves_on_and_writes_again_by_itself)
{
    struct world w;
    struct store_found f;
    world_open(&w, 64, true);
    w.config.options.ssd_bytes = 16 << 20; /* memtables of 256 KiB */
    if (!mount_small(&w, "size=64m")) {
        world_skip(&w);
        return;
    }
    world_start(&w);
    ck_assert_uint_eq(offer(&w, 0, 20), 20);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_SSD] == 20);
    stop_store(&w);
    start_store(&w); /* what it holds lies in files, and not in DRAM */
    ck_assert_int_eq(mount(w.dir.store, w.dir.store, NULL, MS_BIND, NULL), 0);
    ck_assert_int_eq(mount(NULL, w.dir.store, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY, NULL), 0);
    for (uint32_t i = 0; i < 8; i++)
        ck_assert_uint_gt(offer(&w, 1000 + 50 * i, 50), 0); /* more than a memtable: files have to be made */
    settle(&w);
    ck_assert(!ssd_tier_stats(w.store->ssd).is_writable);
    ck_assert_uint_eq(lookup(&w, 0, 20, &f), 20); /* reading goes on */
    ck_assert_uint_eq(f.n_ssd, 20);
    ck_assert_int_eq(umount2(w.dir.store, MNT_DETACH), 0);
    wait_durable(&w, 2000);
    check_counters(&w);
    world_close(&w);
    unmount(&w);
}
END_TEST

/* --------------------------------------------------------------- outages */

static void wait_sure(struct world *w)
{
    uint64_t until = wall_ns() + 30 * NS_PER_S;
    while (ssd_tier_stats(w->store->ssd).is_in_doubt) {
        ck_assert_msg(wall_ns() < until, "what is on disk is not known after 30 s");
        uint32_t loads = (uint32_t)ROUTER_READ(w->router, w->router->n_loads);
        ROUTER_WAIT(w->router, w->router->n_loads > loads);
    }
}

static void note_on_disk(void *user, const struct offline_block *b)
{
    bool *is_there = user;
    ck_assert_int_eq(b->status, TD_OK);
    is_there[number_of(&b->header.key)] = true;
}

/* Stops the store and compares its directory with what it told the router. Returns how many blocks both have. */
static uint32_t check_disk(struct world *w)
{
    static bool told[ROUTER_BLOCKS], found[ROUTER_BLOCKS];
    uint32_t n_both = 0, n_orphans = 0, n_lost = 0;
    struct offline *o;
    struct clock clock;
    struct td_error e = {""};
    clock_init_real(&clock);
    settle(w);
    pthread_mutex_lock(&w->router->lock);
    memcpy(told, w->router->in_tier[TIER_SSD], sizeof(told));
    pthread_mutex_unlock(&w->router->lock);
    stop_store(w);
    const struct log log = {.who = "test", .level = LOG_ERROR};
    ck_assert_msg(!offline_open(w->dir.store, false, &clock, &log, &o, &e), "%s", e.text);
    memset(found, 0, sizeof(found));
    ck_assert_int_eq(offline_each(o, note_on_disk, found, &e), TD_OK);
    offline_close(o);
    for (uint32_t i = 0; i < ROUTER_BLOCKS; i++) {
        n_both += told[i] && found[i];
        n_orphans += found[i] && !told[i];
        n_lost += told[i] && !found[i];
    }
    fprintf(stderr, "# %u blocks on disk and known, %u on disk only, %u known only\n", n_both, n_orphans, n_lost);
    ck_assert_uint_eq(n_orphans, 0);
    ck_assert_uint_eq(n_lost, 0);
    start_store(w);
    return n_both;
}

/* Offers new blocks for so long, 5000 a second at most; returns the number after the last. */
static uint32_t offer_for(struct world *w, uint32_t first, uint64_t ns)
{
    for (uint64_t until = wall_ns() + ns; wall_ns() < until; first += 25) {
        offer(w, first, 25);
        nanosleep(&(struct timespec){.tv_nsec = 5 * NS_PER_MS}, NULL);
    }
    return first;
}

START_TEST(test_store_whose_disk_others_fill_and_free_again_and_again_loses_no_more_than_it_evicts)
{
    struct world w;
    char path[96];
    uint32_t next = 0, n_first, n_last;
    world_open(&w, 256, true);
    if (!mount_small(&w, "size=40m")) {
        world_skip(&w);
        return;
    }
    w.config.options.ssd_bytes = 16 << 20;
    snprintf(path, sizeof(path), "%s/ballast", w.dir.root);
    world_start(&w);
    while (!counted(&w, STORE_EVICTED_SSD))
        next = offer_for(&w, next, NS_PER_S / 10);
    n_first = (uint32_t)ROUTER_READ(w.router, w.router->n_in[TIER_SSD]);
    for (uint32_t round = 0; round < 6; round++) {
        next = offer_for(&w, next, random_at(1, round, 0) % NS_PER_S);
        fill_disk(&w);
        next = offer_for(&w, next, random_at(1, round, 1) % (5 * NS_PER_S));
        ck_assert_int_eq(unlink(path), 0);
        wait_durable(&w, next); /* within 10 s */
        fprintf(stderr, "# round %u: %u blocks\n", round, (uint32_t)ROUTER_READ(w.router, w.router->n_in[TIER_SSD]));
        next += 1000;
    }
    check_counters(&w);
    wait_sure(&w);
    n_last = check_disk(&w);
    ck_assert_msg(n_last > n_first / 2, "%u blocks of %u are left", n_last, n_first);
    world_close(&w);
    unmount(&w);
}
END_TEST

/* From now on the store meets these faults. */
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
    char *option = mem_array(98, 1); /* the test's process ends with it */
    snprintf(option, 98, "@%s", path);
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
        ck_assert_uint_gt(check_disk(&w), 0);
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
    forgotten_close(f); /* no byte is written then that was not before */
    int fd = open(path, O_RDONLY);
    ck_assert_int_eq(pread(fd, written, sizeof(written), 0), sizeof(written));
    ck_assert_mem_eq(written, keys, sizeof(keys)); /* the format: as they came, each once */
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
    for (int i = 0; i < 2; i++) { /* and again: nothing could be deleted meanwhile */
        stop_store(&w);
        start_store(&w);
        ck_assert_uint_eq(lookup(&w, 20, 30, NULL), 0);
        ck_assert_uint_eq(lookup(&w, 50, 50, NULL), 50);
    }
    ck_assert_uint_eq(offer(&w, 20, 30), 30); /* as new blocks they are taken again, into DRAM */
    settle(&w);
    ck_assert_uint_eq(ROUTER_READ(w.router, w.router->n_in[TIER_SSD]), 70);
    set_faults(&w, "");
    wait_sure(&w);
    ck_assert_uint_eq(check_disk(&w), 70);
    router_say(w.router, false, 0, 0, 0); /* all, without an error */
    ROUTER_WAIT(w.router, !w.router->n_in[TIER_SSD]);
    ck_assert_uint_eq(offer(&w, 0, 100), 100);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_SSD] == 100);
    set_faults(&w, "disk.put:full disk.delete:full disk.flush:full");
    router_say(w.router, false, 0, 1, 0);
    settle(&w);
    router_say(w.router, false, 0, 0, 0); /* all, after one */
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

int main(void)
{
    Suite *s = suite_create("kvstore faults");
    TCase *c = tcase_create("faults");
    tcase_set_timeout(c, getenv("TANDEM_LONG") ? 3600 : 150);
    tcase_add_test(c, test_store_disk_that_lies_and_corrupts_never_serves_wrong_bytes);
    tcase_add_test(c, test_store_slow_disk_is_a_miss_in_time_and_is_used_again);
    tcase_add_test(c, test_store_faults_on_the_wire_lose_no_block_and_no_count);
    tcase_add_test(c, test_store_refuses_a_script_that_makes_no_sense);
    tcase_add_test(c, test_store_on_a_full_disk_serves_on_and_writes_again_by_itself);
    tcase_add_test(c, test_store_on_a_disk_that_turns_read_only_serves_on_and_writes_again_by_itself);
    tcase_add_test(c, test_store_whose_disk_others_fill_and_free_again_and_again_loses_no_more_than_it_evicts);
    tcase_add_test(c, test_store_whose_writes_deletes_and_flushes_fail_knows_what_is_on_disk_afterwards);
    tcase_add_test(c, test_store_forgotten_keys_outlive_the_process_and_when_there_are_too_many_stand_for_all);
    tcase_add_test(c, test_store_restarted_while_its_disk_is_full_does_not_find_what_was_forgotten);
    suite_add_tcase(s, c);
    return tap_main(s);
}
