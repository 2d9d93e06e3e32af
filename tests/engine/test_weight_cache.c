/*
 * Files of packed weights: who writes them, who maps them, and which files are refused. The matrices here are
 * made up; test_ranks.c and test_weights.c check that an engine computes the same with them. The last test
 * pins the bytes of the format.
 */
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/endian.h"
#include "base/mem.h"
#include "base/random.h"
#include "engine/engine.h"
#include "engine/weight_cache.h"
#include "tests/tap.h"

enum { N_MATRICES = 5 };
static const uint64_t LENGTHS[N_MATRICES] = {640, 64, 100, 70000, 128};

static char root[64], dir[96];
static struct log logged = {.who = "test", .level = LOG_INFO};
static const struct weight_cache_key KEY = {
    .model = {{1, 2, 3}}, .isa = "plain", .compute = COMPUTE_F32, .n_tensor = 1, .end_layer = 4};
static const char FILE_NAME[] = "01020300000000000000000000000000-plain-f32-as-stored-rank0of1-layers0to4-v1.packed";

static void begin(void)
{
    char path[128];
    snprintf(root, sizeof(root), "/tmp/tandem-packed-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(root));
    snprintf(dir, sizeof(dir), "%s/a/cache", root);
    snprintf(path, sizeof(path), "%s/log", root);
    logged.fd = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    ck_assert_int_gt(logged.fd, 0);
}

static void end(void)
{
    char command[128];
    close(logged.fd);
    snprintf(command, sizeof(command), "rm -r %s", root);
    ck_assert_int_eq(system(command), 0);
}

static uint32_t count_logged(const char *words)
{
    char *text, path[128];
    size_t len;
    uint32_t n = 0;
    snprintf(path, sizeof(path), "%s/log", root);
    ck_assert_int_eq(file_read(path, 1 << 20, &text, &len, NULL), TD_OK);
    for (const char *at = text; (at = strstr(at, words)); at++)
        n++;
    free(text);
    return n;
}

static const char *path_of(const char *name)
{
    static char path[512];
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    return path;
}

static bool exists(const char *name)
{
    return !access(path_of(name), F_OK);
}

static void fill(uint32_t i, uint8_t *out)
{
    for (uint64_t b = 0; b < LENGTHS[i]; b++)
        out[b] = (uint8_t)random_at(7, i, b);
}

static void add(struct weight_cache *c, uint32_t i)
{
    uint8_t *data = mem_zalloc(LENGTHS[i]);
    fill(i, data);
    weight_cache_add(c, data, LENGTHS[i]);
    free(data);
}

static void check_mapped(struct weight_cache *c)
{
    for (uint32_t i = 0; i < N_MATRICES; i++) {
        uint64_t len = 0;
        uint8_t *want = mem_zalloc(LENGTHS[i]);
        const void *got = weight_cache_next(c, &len);
        fill(i, want);
        ck_assert_uint_eq(len, LENGTHS[i]);
        ck_assert_uint_eq((uintptr_t)got % 64, 0);
        ck_assert_mem_eq(got, want, len);
        free(want);
    }
}

/* Opens the cache, and writes the file if there is none to map. True: it wrote the file. */
static bool use(const struct weight_cache_key *key)
{
    struct weight_cache *c = weight_cache_open(dir, key, &logged);
    ck_assert_ptr_nonnull(c);
    bool is_building = weight_cache_is_building(c);
    for (uint32_t i = 0; i < N_MATRICES && is_building; i++)
        add(c, i);
    ck_assert(weight_cache_publish(c) == is_building);
    check_mapped(c);
    weight_cache_close(c);
    return is_building;
}

START_TEST(test_packed_weights_are_written_once_and_mapped_by_others)
{
    struct stat st;
    begin();
    ck_assert(use(&KEY));
    ck_assert(!use(&KEY));
    ck_assert(!use(&KEY));
    ck_assert_int_eq(stat(path_of(FILE_NAME), &st), 0);
    ck_assert_uint_eq(st.st_mode & 07777, 0600);
    ck_assert_int_eq(stat(dir, &st), 0);
    ck_assert_uint_eq(st.st_mode & 07777, 0700);
    ck_assert_uint_eq(count_logged(" warn "), 0);
    ck_assert_uint_eq(count_logged("written dir="), 1);
    end();
}
END_TEST

START_TEST(test_packed_weights_of_another_key_are_other_files)
{
    struct weight_cache_key keys[] = {KEY, KEY, KEY, KEY, KEY, KEY, KEY};
    keys[0].model.b[15] = 1;
    keys[1].isa = "avx2";
    keys[2].compute = COMPUTE_BF16;
    keys[3].weights = WEIGHTS_INT4;
    keys[4].n_tensor = 2;
    keys[5].first_layer = 1;
    keys[6].end_layer = 3;
    begin();
    ck_assert(use(&KEY));
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++)
        ck_assert(use(&keys[i]));
    ck_assert(!use(&KEY));
    end();
}
END_TEST

/* ------------------------------------------------------------------- damage */

static void flip(uint64_t at)
{
    uint8_t byte;
    int fd = open(path_of(FILE_NAME), O_RDWR);
    ck_assert_int_eq(pread(fd, &byte, 1, (off_t)at), 1);
    byte ^= 4;
    ck_assert_int_eq(pwrite(fd, &byte, 1, (off_t)at), 1);
    close(fd);
}

static uint64_t size_of_file(void)
{
    struct stat st;
    ck_assert_int_eq(stat(path_of(FILE_NAME), &st), 0);
    return (uint64_t)st.st_size;
}

static void cut(uint64_t len_bytes)
{
    ck_assert_int_eq(truncate(path_of(FILE_NAME), (off_t)len_bytes), 0);
}

static void replace_by_other_key(void)
{
    struct weight_cache_key other = KEY;
    char from[512];
    other.end_layer = 5;
    ck_assert(use(&other));
    snprintf(from, sizeof(from), "%s",
             path_of("01020300000000000000000000000000-plain-f32-as-stored-rank0of1-layers0to5-v1.packed"));
    ck_assert_int_eq(rename(from, path_of(FILE_NAME)), 0);
}

static void give_away(void)
{
    if (chown(path_of(FILE_NAME), 1, (gid_t)-1)) /* we are not root */
        ck_assert_int_eq(chmod(path_of(FILE_NAME), 0620), 0);
}

static void make_link(void)
{
    char other[512];
    snprintf(other, sizeof(other), "%s/elsewhere", root);
    ck_assert_int_eq(rename(path_of(FILE_NAME), other), 0);
    ck_assert_int_eq(symlink(other, path_of(FILE_NAME)), 0);
}

enum { N_DAMAGES = 14 };

static void damage(int how)
{
    uint64_t len = size_of_file();
    const uint64_t flips[] = {0, 9, 13, 30, 45, 236, 4096, 4096 + 640 + 64 + 128 + 69000, len - 1};
    if (how < 9)
        flip(flips[how]);
    else if (how == 9)
        cut(0);
    else if (how == 10)
        cut(len - 1);
    else if (how == 11)
        replace_by_other_key();
    else if (how == 12)
        give_away();
    else
        make_link();
}

START_TEST(test_packed_weights_that_are_damaged_or_somebody_elses_are_written_anew)
{
    begin();
    ck_assert(use(&KEY));
    damage(_i);
    ck_assert(use(&KEY));
    ck_assert_uint_eq(count_logged(" warn "), 1);
    ck_assert_uint_eq(count_logged("it is written anew"), 1);
    ck_assert(!use(&KEY));
    ck_assert_uint_eq(count_logged(" warn "), 1);
    end();
}
END_TEST

START_TEST(test_packed_weights_with_fewer_matrices_are_refused_and_removed)
{
    uint64_t len;
    begin();
    ck_assert(use(&KEY));
    struct weight_cache *c = weight_cache_open(dir, &KEY, &logged);
    check_mapped(c);
    ck_assert_ptr_null(weight_cache_next(c, &len));
    ck_assert_ptr_null(weight_cache_next(c, &len));
    weight_cache_close(c);
    ck_assert_uint_eq(count_logged(" warn "), 1);
    ck_assert(!exists(FILE_NAME));
    end();
}
END_TEST

/* ---------------------------------------------------- directories, full disks */

static void check_not_shared(void)
{
    ck_assert_ptr_null(weight_cache_open(dir, &KEY, &logged));
    ck_assert_uint_eq(count_logged(" warn "), 1);
}

START_TEST(test_packed_weights_are_private_where_the_directory_takes_no_file)
{
    begin();
    char path[512];
    snprintf(path, sizeof(path), "%s/a", root);
    close(open(path, O_WRONLY | O_CREAT, 0600)); /* a file is where the directory should be */
    check_not_shared();
    end();
}
END_TEST

START_TEST(test_packed_weights_are_private_where_others_may_write)
{
    begin();
    ck_assert(use(&KEY));
    ck_assert_int_eq(chmod(dir, 0777), 0);
    check_not_shared();
    ck_assert_int_eq(chmod(dir, 0755), 0);
    ck_assert(!use(&KEY));
    if (!chown(dir, 1, (gid_t)-1)) { /* fails if we are not root */
        ck_assert_ptr_null(weight_cache_open(dir, &KEY, &logged));
        ck_assert_uint_eq(count_logged(" warn "), 2);
    }
    end();
}
END_TEST

/* Adds matrices and ends; the cache gives up with one warning, and leaves no file behind. */
static void check_gives_up(void)
{
    struct weight_cache *c = weight_cache_open(dir, &KEY, &logged);
    ck_assert(weight_cache_is_building(c));
    for (uint32_t i = 0; i < N_MATRICES; i++)
        add(c, i);
    ck_assert(!weight_cache_publish(c));
    ck_assert(!weight_cache_is_building(c));
    weight_cache_close(c);
    ck_assert_uint_eq(count_logged(" warn "), 1);
    ck_assert_uint_eq(count_logged("not written"), 1);
    ck_assert(!exists(FILE_NAME));
    ck_assert_int_eq(rmdir(dir), 0); /* empty */
}

START_TEST(test_packed_weights_are_private_where_files_may_not_be_so_long)
{
    const struct rlimit limit = {20000, 20000};
    begin();
    signal(SIGXFSZ, SIG_IGN);
    ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
    check_gives_up();
    end();
}
END_TEST

/* Mounts a small file system at the parent of dir, visible to this process only. False: not permitted
 * here. */
static bool mount_small(const char *path)
{
    ck_assert_int_eq(mkdir(path, 0700), 0);
    if (!unshare(CLONE_NEWNS) && !mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) &&
        !mount("tmpfs", path, "tmpfs", 0, "size=32k"))
        return true;
    printf("# SKIP nothing may be mounted here\n");
    return false;
}

START_TEST(test_packed_weights_are_private_where_the_disk_is_full)
{
    begin();
    char path[512];
    snprintf(path, sizeof(path), "%s/a", root);
    if (mount_small(path)) {
        check_gives_up();
        ck_assert_uint_eq(count_logged("No space left"), 1);
        ck_assert_int_eq(umount(path), 0);
    }
    end();
}
END_TEST

START_TEST(test_packed_weights_are_private_where_the_directory_is_read_only)
{
    begin();
    char path[512];
    snprintf(path, sizeof(path), "%s/a", root);
    if (mount_small(path)) {
        ck_assert_int_eq(mkdir(dir, 0700), 0);
        ck_assert_int_eq(mount(NULL, path, NULL, MS_REMOUNT | MS_RDONLY, NULL), 0);
        check_not_shared();
        ck_assert_int_eq(umount(path), 0);
    }
    end();
}
END_TEST

/* ---------------------------------------------------------- several processes */

START_TEST(test_packed_weights_are_written_by_one_of_many_that_start_together)
{
    enum { N = 8 };
    pid_t children[N];
    uint32_t n_written = 0;
    begin();
    for (int i = 0; i < N; i++)
        if (!(children[i] = fork()))
            _exit(use(&KEY) ? 1 : 0);
    for (int i = 0; i < N; i++) {
        int status;
        ck_assert_int_eq(waitpid(children[i], &status, 0), children[i]);
        ck_assert(WIFEXITED(status) && WEXITSTATUS(status) <= 1);
        n_written += WEXITSTATUS(status) == 1;
    }
    ck_assert_uint_eq(n_written, 1);
    ck_assert_uint_eq(count_logged(" warn "), 0);
    ck_assert_uint_eq(count_logged("written dir="), 1);
    end();
}
END_TEST

/* Starts a process that begins to write and stands still. At SIGUSR1 it gives up. */
static pid_t start_builder(void)
{
    int ends[2];
    char byte;
    ck_assert_int_eq(pipe(ends), 0);
    pid_t pid = fork();
    if (!pid) {
        int sig;
        sigset_t set;
        sigemptyset(&set);
        sigaddset(&set, SIGUSR1);
        sigprocmask(SIG_BLOCK, &set, NULL);
        struct weight_cache *c = weight_cache_open(dir, &KEY, &logged);
        add(c, 0);
        add(c, 1);
        if (write(ends[1], "x", 1) == 1)
            sigwait(&set, &sig);
        weight_cache_close(c);
        _exit(0);
    }
    ck_assert_int_eq(read(ends[0], &byte, 1), 1);
    close(ends[0]);
    close(ends[1]);
    return pid;
}

START_TEST(test_packed_weights_whose_builder_is_killed_or_gives_up_are_begun_anew)
{
    static const int SIGNALS[] = {SIGKILL, SIGUSR1};
    char unfinished[256];
    begin();
    pid_t builder = start_builder();
    pid_t waiter = fork();
    if (!waiter)
        _exit(use(&KEY) ? 7 : 1);
    snprintf(unfinished, sizeof(unfinished), "%s.tmp", FILE_NAME);
    ck_assert(exists(unfinished) && !exists(FILE_NAME));
    while (!count_logged("waiting for it"))
        sched_yield();
    kill(builder, SIGNALS[_i]);
    int status;
    waitpid(builder, NULL, 0);
    ck_assert_int_eq(waitpid(waiter, &status, 0), waiter);
    ck_assert(WIFEXITED(status) && WEXITSTATUS(status) == 7);
    ck_assert(!exists(unfinished) && exists(FILE_NAME));
    ck_assert(!use(&KEY));
    ck_assert_uint_eq(count_logged(" warn "), 0);
    end();
}
END_TEST

START_TEST(test_packed_weights_whose_builder_stands_still_are_private)
{
    if (!tap_is_long("pack"))
        return;
    begin();
    pid_t builder = start_builder();
    check_not_shared();
    ck_assert_uint_eq(count_logged("makes no progress"), 1);
    kill(builder, SIGKILL);
    waitpid(builder, NULL, 0);
    end();
}
END_TEST

static void make_file(const char *name, int age_days)
{
    struct timespec times[2] = {{.tv_sec = time(NULL) - age_days * 86400L}};
    times[1] = times[0];
    int fd = open(path_of(name), O_WRONLY | O_CREAT, 0600);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(futimens(fd, times), 0);
    close(fd);
}

START_TEST(test_packed_weights_that_nobody_needs_are_removed_when_others_are_written)
{
    static const struct {
        const char *name;
        int age_days;
        bool stays;
    } FILES[] = {{"old-format-v0.packed", 0, false}, {"newer-format-v2.packed", 0, true}, {"used-v1.packed", 29, true},
                 {"unused-v1.packed", 31, false},    {"dead-v1.packed.tmp", 0, false},    {"notes.txt", 99, true},
                 {"x-v0.packed.txt", 99, true}};
    struct weight_cache_key other = KEY;
    begin();
    ck_assert(use(&KEY));
    for (size_t i = 0; i < sizeof(FILES) / sizeof(FILES[0]); i++)
        make_file(FILES[i].name, FILES[i].age_days);
    make_file("living-v1.packed.tmp", 0);
    int fd = open(path_of("living-v1.packed.tmp"), O_RDWR);
    ck_assert_int_eq(flock(fd, LOCK_EX), 0);
    other.rank = 1;
    ck_assert(use(&other));
    for (size_t i = 0; i < sizeof(FILES) / sizeof(FILES[0]); i++)
        ck_assert_msg(exists(FILES[i].name) == FILES[i].stays, "%s", FILES[i].name);
    ck_assert(exists(FILE_NAME) && exists("living-v1.packed.tmp"));
    close(fd);
    end();
}
END_TEST

START_TEST(test_packed_weights_lie_where_the_environment_says)
{
    char out[PATH_MAX];
    setenv("HOME", "/home/somebody", 1);
    setenv("XDG_CACHE_HOME", "/elsewhere", 1);
    ck_assert(weight_cache_default_dir(out));
    ck_assert_str_eq(out, "/elsewhere/tandem");
    setenv("XDG_CACHE_HOME", "relative", 1);
    ck_assert(weight_cache_default_dir(out));
    ck_assert_str_eq(out, "/home/somebody/.cache/tandem");
    unsetenv("XDG_CACHE_HOME");
    unsetenv("HOME");
    ck_assert(!weight_cache_default_dir(out));
}
END_TEST

/* ------------------------------------------------------------------ the bytes */

/* The checksum of the file's table, which contains the checksums of all matrices of the demo model. */
static uint64_t packed_sum(enum compute compute, enum k_weights weights, enum kernels_isa isa)
{
    struct clock clock;
    struct td_error e = {{0}};
    struct model *model;
    struct kernels *kernels;
    struct engine *engine;
    char command[256], *text;
    size_t len;
    const struct kernels_config k = {.n_threads = 2, .isa = isa, .compute = compute};
    clock_init_real(&clock);
    ck_assert_msg(!model_open(DEMO_MODEL, &model, &e) && !kernels_open(&k, &kernels, &e), "%s", e.text);
    const struct engine_config c = {.kernels = &kernels,
                                    .model = model,
                                    .compute = compute,
                                    .weights = weights,
                                    .weight_cache = dir,
                                    .log = &logged,
                                    .kv_dtype = NUM_BF16,
                                    .page_tokens = 16,
                                    .n_pages = 4,
                                    .max_batch = 1,
                                    .max_rows = 16,
                                    .clock = &clock};
    ck_assert_msg(!engine_open(&c, &engine, &e), "%s", e.text);
    engine_close(engine);
    kernels_close(kernels);
    model_close(model);
    snprintf(command, sizeof(command), "cd %s && mv *.packed ../packed", dir);
    ck_assert_int_eq(system(command), 0);
    snprintf(command, sizeof(command), "%s/a/packed", root);
    ck_assert_int_eq(file_read(command, 1 << 30, &text, &len, NULL), TD_OK);
    uint64_t sum = get_u64((const uint8_t *)text + 32);
    free(text);
    return sum;
}

/* A change of one of these numbers must raise WEIGHT_FILE_FORMAT: files of other processes and days have the
 * old bytes. */
START_TEST(test_packed_bytes_are_those_of_the_format)
{
    static const struct {
        enum compute compute;
        enum k_weights weights;
        uint64_t sum;
    } FORMS[] = {{COMPUTE_F32, WEIGHTS_AS_STORED, 0x233476f3e65c2538},
                 {COMPUTE_BF16, WEIGHTS_AS_STORED, 0xb767802650eaed4a},
                 {COMPUTE_F32, WEIGHTS_INT8, 0x51c8157cd8e28c77},
                 {COMPUTE_BF16, WEIGHTS_FP8, 0x7b7838d1eb56a196},
                 {COMPUTE_BF16, WEIGHTS_INT4, 0x15bbee491bee619a}};
    begin();
    for (enum kernels_isa isa = ISA_AUTO; isa <= ISA_PLAIN; isa++) {
        uint64_t sum = packed_sum(FORMS[_i].compute, FORMS[_i].weights, isa);
        ck_assert_msg(sum == FORMS[_i].sum, "form %d: 0x%016llx", _i, (unsigned long long)sum);
    }
    end();
}
END_TEST

int main(void)
{
    Suite *s = suite_create("weight_cache");
    TCase *t = tcase_create("files");
    tcase_set_timeout(t, tap_is_long("pack") ? 180 : 60);
    tcase_add_test(t, test_packed_weights_are_written_once_and_mapped_by_others);
    tcase_add_test(t, test_packed_weights_of_another_key_are_other_files);
    tcase_add_loop_test(t, test_packed_weights_that_are_damaged_or_somebody_elses_are_written_anew, 0, N_DAMAGES);
    tcase_add_test(t, test_packed_weights_with_fewer_matrices_are_refused_and_removed);
    tcase_add_test(t, test_packed_weights_are_private_where_the_directory_takes_no_file);
    tcase_add_test(t, test_packed_weights_are_private_where_others_may_write);
    if (tap_forks()) { /* limits and mounts must belong to a process of the test's own */
        tcase_add_test(t, test_packed_weights_are_private_where_files_may_not_be_so_long);
        tcase_add_test(t, test_packed_weights_are_private_where_the_disk_is_full);
        tcase_add_test(t, test_packed_weights_are_private_where_the_directory_is_read_only);
        tcase_add_test(t, test_packed_weights_lie_where_the_environment_says);
    }
    tcase_add_test(t, test_packed_weights_are_written_by_one_of_many_that_start_together);
    tcase_add_loop_test(t, test_packed_weights_whose_builder_is_killed_or_gives_up_are_begun_anew, 0, 2);
    tcase_add_test(t, test_packed_weights_whose_builder_stands_still_are_private);
    tcase_add_test(t, test_packed_weights_that_nobody_needs_are_removed_when_others_are_written);
    tcase_add_loop_test(t, test_packed_bytes_are_those_of_the_format, 0, 5);
    suite_add_tcase(s, t);
    return tap_main(s);
}
