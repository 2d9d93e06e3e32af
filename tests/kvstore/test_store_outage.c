/*
 * The store on a disk of its own that other programs fill and free again, or that turns read-only: a tmpfs,
 * and an ext4 in a file. Durable blocks are lost only by eviction; writing resumes within 10 s; the store's
 * table equals the disk within 30 s; and blocks that were flushed meanwhile do not come back. Where file
 * systems can't be mounted, these tests are skipped by name.
 */
#include <linux/loop.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/wait.h>

#include "tests/kvstore/outage.h"
#include "tests/tap.h"

/* ------------------------------------------------------- file systems of our own */

static const char NO_MOUNT[] = "mounting is not permitted", NO_LOOP[] = "loop devices are not permitted",
                  NO_MKFS[] = "mkfs.ext4 is not installed";

/* From now on mounts of this process are visible to it alone, and end with it. Returns NULL, or why not. */
static const char *leave_mounts(void)
{
    return unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) ? NO_MOUNT : NULL;
}

static const char *try_tmpfs(const char *at, const char *options)
{
    const char *why = leave_mounts();
    return why ? why : mount("tmpfs", at, "tmpfs", 0, options) ? NO_MOUNT : NULL;
}

/* Attaches the file to a free loop device, which is freed when nothing has it open any more. -1: not
 * permitted. */
static int attach_loop(int file, char device[32])
{
    const struct loop_info64 info = {.lo_flags = LO_FLAGS_AUTOCLEAR};
    int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC), fd = -1;
    /* Another process may take the free device first. */
    for (int i = 0; control >= 0 && fd < 0 && i < 100; i++) {
        int n = ioctl(control, LOOP_CTL_GET_FREE);
        snprintf(device, 32, "/dev/loop%d", n);
        fd = n < 0 ? -1 : open(device, O_RDWR | O_CLOEXEC);
        if (fd < 0)
            break;
        if (ioctl(fd, LOOP_SET_FD, file) || ioctl(fd, LOOP_SET_STATUS64, &info)) {
            close(fd);
            fd = -1;
        }
    }
    if (control >= 0)
        close(control);
    return fd;
}

static bool make_ext4(const char *image)
{
    pid_t child = fork();
    if (!child) {
        execlp("mkfs.ext4", "mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", image,
               (char *)NULL);
        execl("/sbin/mkfs.ext4", "mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", image,
              (char *)NULL);
        _exit(127);
    }
    int status = -1;
    return child > 0 && waitpid(child, &status, 0) == child && !status;
}

/* Mounts an ext4 of mib MiB from a file that is already unlinked. Returns NULL, or why not. */
static const char *try_ext4(const char *at, uint32_t mib)
{
    char image[] = "/tmp/tandem-ext4-XXXXXX", device[32];
    const char *why = leave_mounts();
    int file = why ? -1 : mkstemp(image), loop = -1;
    if (!why && (ftruncate(file, (off_t)mib << 20) || !make_ext4(image)))
        why = NO_MKFS;
    if (!why && (loop = attach_loop(file, device)) < 0)
        why = NO_LOOP;
    if (!why && mount(device, at, "ext4", MS_NOATIME, NULL))
        why = NO_LOOP;
    if (loop >= 0)
        close(loop);
    if (file >= 0) {
        unlink(image);
        close(file);
    }
    return why;
}

static void mount_tmpfs(const char *at, const char *options)
{
    const char *why = try_tmpfs(at, options);
    ck_assert_msg(!why, "%s", why);
}

static void mount_ext4(const char *at, uint32_t mib)
{
    const char *why = try_ext4(at, mib);
    ck_assert_msg(!why, "%s", why);
}

/* Tries it in a process of its own, so that nothing stays mounted. Returns NULL, or why not. */
static const char *why_not(bool is_ext4)
{
    static const char *const WHY[] = {NULL, NO_MOUNT, NO_LOOP, NO_MKFS};
    char root[] = "/tmp/tandem-mount-XXXXXX";
    if (!mkdtemp(root))
        return NO_MOUNT;
    pid_t child = fork();
    if (!child) {
        const char *why = is_ext4 ? try_ext4(root, 64) : try_tmpfs(root, "size=1m");
        int code = 0;
        while (WHY[code] != why)
            code++;
        _exit(code);
    }
    int status = 0;
    bool is_known = child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) < 4;
    rmdir(root);
    return is_known ? WHY[WEXITSTATUS(status)] : NO_MOUNT;
}

static void unmount(const struct world *w)
{
    umount2(w->dir.root, MNT_DETACH);
    rmdir(w->dir.root);
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

static void free_disk(const struct world *w)
{
    char path[96];
    snprintf(path, sizeof(path), "%s/ballast", w->dir.root);
    ck_assert_int_eq(unlink(path), 0);
}

START_TEST(test_store_on_a_full_disk_serves_on_and_writes_again_by_itself)
{
    struct world w;
    world_open(&w, 64, true);
    mount_tmpfs(w.dir.root, "size=24m");
    w.config.options.ssd_bytes = 16 << 20;
    world_start(&w);
    ck_assert_uint_eq(offer(&w, 0, 20), 20);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_SSD] == 20);
    fill_disk(&w);
    for (uint32_t i = 0; i < 4; i++)
        ck_assert_uint_eq(offer(&w, 1000 + 10 * i, 10), 10); /* they are taken, into DRAM */
    settle(&w);
    ck_assert(!ssd_tier_stats(w.store->ssd).is_writable);
    ck_assert_uint_eq(lookup(&w, 1030, 10, NULL), 10);
    free_disk(&w);
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
    w.config.options.ssd_bytes = 16 << 20; /* makes memtables of 256 KiB */
    mount_tmpfs(w.dir.root, "size=64m");
    world_start(&w);
    ck_assert_uint_eq(offer(&w, 0, 20), 20);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_SSD] == 20);
    stop_store(&w);
    start_store(&w); /* its blocks are now in files, not in DRAM */
    ck_assert_int_eq(mount(w.dir.store, w.dir.store, NULL, MS_BIND, NULL), 0);
    ck_assert_int_eq(mount(NULL, w.dir.store, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY, NULL), 0);
    for (uint32_t i = 0; i < 8; i++) /* more than a memtable, so files have to be made */
        ck_assert_uint_gt(offer(&w, 1000 + 50 * i, 50), 0);
    settle(&w);
    ck_assert(!ssd_tier_stats(w.store->ssd).is_writable);
    ck_assert_uint_eq(lookup(&w, 0, 20, &f), 20); /* blocks are still read */
    ck_assert_uint_eq(f.n_ssd, 20);
    ck_assert_int_eq(umount2(w.dir.store, MNT_DETACH), 0);
    wait_durable(&w, 2000);
    check_counters(&w);
    world_close(&w);
    unmount(&w);
}
END_TEST

/* ------------------------------------------------------------------ outages */

struct outages {
    struct world w;
    uint32_t next, n_rounds; /* next: number of the next new block */
    uint64_t seed, most_ns;  /* most_ns: longest time for which the disk stays full */
    bool forgotten[ROUTER_BLOCKS];
};

/* Checks that no durable block was lost: blocks left the disk only because they were evicted or flushed. */
static void check_nothing_lost(struct outages *o)
{
    check_counters(&o->w);
    ck_assert_uint_eq(counted(&o->w, STORE_SSD_LOST), 0);
    ck_assert_uint_eq(counted(&o->w, STORE_SSD_CORRUPT), 0);
    ck_assert_uint_eq(counted(&o->w, STORE_SSD_READ_ERRORS), 0);
    ck_assert_uint_eq(counted(&o->w, STORE_SSD_SET_ASIDE), 0);
}

/* Flushes about a tenth of the blocks on disk. */
static void flush_some(struct outages *o, uint64_t round)
{
    struct fake_router *r = o->w.router;
    uint32_t n = 0;
    for (uint32_t i = 0; i + 8 <= o->next; i += 8) { /* later blocks have not been offered yet */
        bool is_there = ROUTER_READ(r, r->in_tier[TIER_SSD][i]);
        if (!is_there || random_at(o->seed, i, round) % 10)
            continue;
        router_say(r, false, i, 8, 0);
        memset(&o->forgotten[i], true, 8);
        n += 8;
    }
    ck_assert_uint_gt(n, 0);
    uint32_t loads = (uint32_t)ROUTER_READ(r, r->n_loads);
    ROUTER_WAIT(r, r->n_loads > loads + 2);
}

/* Restarts the store while its disk is full. The blocks that it had are there afterwards, and the flushed
 * ones are not. */
static void restart_while_full(struct outages *o)
{
    static bool before[ROUTER_BLOCKS];
    struct fake_router *r = o->w.router;
    uint32_t n = 0;
    settle(&o->w);
    pthread_mutex_lock(&r->lock);
    memcpy(before, r->in_tier[TIER_SSD], sizeof(before));
    pthread_mutex_unlock(&r->lock);
    check_nothing_lost(o);
    stop_store(&o->w);
    start_store(&o->w);
    check_nothing_lost(o);
    r = o->w.router;
    for (uint32_t i = 0; i < ROUTER_BLOCKS; i++) {
        bool is_there = ROUTER_READ(r, r->in_tier[TIER_SSD][i]);
        ck_assert_msg(!o->forgotten[i] || !is_there, "block %u was flushed, and is back", i);
        ck_assert_msg(is_there || !before[i], "block %u was durable, and is lost", i);
        n += is_there;
    }
    for (uint32_t i = 0, found = 0; i < ROUTER_BLOCKS && found < 50; i += 8)
        if (before[i]) {
            ck_assert_uint_eq(lookup(&o->w, i, 1, NULL), 1);
            found++;
        }
    fprintf(stderr, "# started again on a full disk with %u blocks\n", n);
}

static void run_outage(struct outages *o, uint32_t round)
{
    struct world *w = &o->w;
    uint32_t n_before;
    o->next = offer_for(w, o->next, random_at(o->seed, round, 0) % NS_PER_S);
    fill_disk(w);
    o->next = offer_for(w, o->next, random_at(o->seed, round, 1) % o->most_ns);
    n_before = (uint32_t)ROUTER_READ(w->router, w->router->n_in[TIER_SSD]);
    flush_some(o, round);
    o->next = offer_for(w, o->next, random_at(o->seed, round, 2) % NS_PER_S);
    if (round % 3 == 2)
        restart_while_full(o);
    free_disk(w);
    uint64_t freed = wall_ns();
    wait_durable(w, o->next); /* must happen within 10 s */
    uint64_t resumed = wall_ns();
    wait_sure(w); /* must happen within 30 s */
    check_nothing_lost(o);
    fprintf(stderr, "# round %u: %u blocks, %u after it; writing resumed after %.1f s, sure after %.1f s\n", round,
            n_before, (uint32_t)ROUTER_READ(w->router, w->router->n_in[TIER_SSD]), (double)(resumed - freed) * 1e-9,
            (double)(wall_ns() - freed) * 1e-9);
    o->next += 1000;
}

/* Runs the outages. The world must be open and its file system mounted. */
static void run_outages(struct outages *o, int64_t ssd_bytes)
{
    struct world *w = &o->w;
    w->config.options.ssd_bytes = ssd_bytes;
    world_start(w);
    while (!counted(w, STORE_EVICTED_SSD))
        o->next = offer_for(w, o->next, NS_PER_S / 10);
    uint32_t n_first = (uint32_t)ROUTER_READ(w->router, w->router->n_in[TIER_SSD]);
    for (uint32_t round = 0; round < o->n_rounds; round++) {
        run_outage(o, round);
        uint32_t n = check_disk(w, o->forgotten);
        ck_assert_msg(n > n_first / 2, "%u blocks of %u are left", n, n_first);
    }
    world_close(w);
    unmount(w);
}

START_TEST(test_store_whose_disk_others_fill_and_free_again_and_again_loses_no_more_than_it_evicts)
{
    struct outages *o = mem_zalloc(sizeof(*o));
    world_open(&o->w, 256, true);
    mount_tmpfs(o->w.dir.root, "size=40m");
    o->n_rounds = tap_is_long("store") ? 6 : 3;
    o->most_ns = tap_is_long("store") ? 5 * NS_PER_S : NS_PER_S;
    o->seed = 1;
    run_outages(o, 16 << 20);
    free(o);
}
END_TEST

/* An ext4 of 64 MiB, of which the store takes what others leave. The whole test has ten such disks, each
 * filled and freed six times. */
START_TEST(test_store_on_ext4_that_others_fill_and_free_loses_no_more_than_it_evicts)
{
    struct outages *o = mem_zalloc(sizeof(*o));
    world_open(&o->w, 256, true);
    mount_ext4(o->w.dir.root, 64);
    o->n_rounds = tap_is_long("store") ? 6 : 3;
    o->most_ns = tap_is_long("store") ? 5 * NS_PER_S : NS_PER_S;
    o->seed = 100 + (uint64_t)_i;
    run_outages(o, 64 << 20); /* more than the disk has */
    free(o);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kvstore outage");
    TCase *c = tcase_create("outage");
    const struct {
        const TTest *test;
        bool on_ext4;
        int n;
    } TESTS[] = {
        {test_store_on_a_full_disk_serves_on_and_writes_again_by_itself, false, 1},
        {test_store_on_a_disk_that_turns_read_only_serves_on_and_writes_again_by_itself, false, 1},
        {test_store_whose_disk_others_fill_and_free_again_and_again_loses_no_more_than_it_evicts, false, 1},
        {test_store_on_ext4_that_others_fill_and_free_loses_no_more_than_it_evicts, true,
         tap_is_long("store") ? 10 : 1},
    };
    const char *why[2] = {why_not(false), why_not(true)};
    /* Also under ThreadSanitizer: in one process, threads that RocksDB keeps from one test to the next see
     * the mounts of the test that made them. */
    setenv("CK_FORK", "yes", 1);
    tcase_set_timeout(c, tap_is_long("store") ? 3600 : 150);
    for (size_t i = 0; i < sizeof(TESTS) / sizeof(TESTS[0]); i++)
        if (why[TESTS[i].on_ext4])
            tap_skip(TESTS[i].test->name, why[TESTS[i].on_ext4]);
        else
            tcase_add_loop_test(c, TESTS[i].test, 0, TESTS[i].n);
    suite_add_tcase(s, c);
    return tap_main(s);
}
