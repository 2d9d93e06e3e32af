/*
 * The index of values on disk: it names what the files contain; readers never wait for more than one change
 * of it; and the cost to learn or forget a file depends on that file alone. The tests make files as RocksDB
 * makes them (kvstore/blobs.h).
 */
#include <pthread.h>
#include <stdatomic.h>

#include "base/clock.h"
#include "base/endian.h"
#include "base/mem.h"
#include "base/random.h"
#include "kvstore/blobs.h"
#include "tests/kvstore/dirs.h"
#include "tests/tap.h"

enum { RECORD_HEADER = 32, KEY_BYTES = 1 + BLOCK_KEY_BYTES, VALUE_BYTES = 24, FILE_HEADER = 30 };
enum { MODEL_FILES = 64, MODEL_KEYS = 400 };

static struct block_key key_of(uint64_t n)
{
    struct block_key k;
    uint64_t a = random_at(1, n, 0);
    memcpy(k.b, &a, 8);
    memcpy(k.b + 8, &n, 8);
    return k;
}

static void path_of(const struct temp_dir *d, uint64_t number, char path[128])
{
    snprintf(path, 128, "%s/%06llu.blob", d->root, (unsigned long long)number);
}

/* Appends records of these keys to a blob file, which it makes if need be. A value is the number of its
 * file. */
static void append_file(const struct temp_dir *d, uint64_t number, const uint64_t *keys, uint32_t n)
{
    struct bytes b = {0};
    char path[128];
    uint8_t record[RECORD_HEADER + KEY_BYTES + VALUE_BYTES] = {0}, header[FILE_HEADER] = {0};
    path_of(d, number, path);
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    ck_assert_int_ge(fd, 0);
    if (!lseek(fd, 0, SEEK_END))
        bytes_append(&b, header, sizeof(header));
    for (uint32_t i = 0; i < n; i++) {
        struct block_key k = key_of(keys[i]);
        put_u64(record, KEY_BYTES);
        put_u64(record + 8, VALUE_BYTES);
        record[RECORD_HEADER] = 'b';
        memcpy(record + RECORD_HEADER + 1, k.b, BLOCK_KEY_BYTES);
        put_u64(record + RECORD_HEADER + KEY_BYTES, number);
        put_u64(record + RECORD_HEADER + KEY_BYTES + 8, keys[i]);
        bytes_append(&b, record, sizeof(record));
    }
    ck_assert_int_eq(write(fd, b.data, b.len), (ssize_t)b.len);
    close(fd);
    bytes_free(&b);
}

static void make_file(const struct temp_dir *d, uint64_t number, uint64_t first_key, uint32_t n)
{
    uint64_t *keys = mem_array(n, sizeof(*keys));
    for (uint32_t i = 0; i < n; i++)
        keys[i] = first_key + i;
    append_file(d, number, keys, n);
    free(keys);
}

static void remove_file(const struct temp_dir *d, uint64_t number)
{
    char path[128];
    path_of(d, number, path);
    ck_assert_int_eq(unlink(path), 0);
}

struct index {
    struct temp_dir dir;
    struct dir_files *files;
    struct blobs *blobs;
    struct clock clock;
    void *buffer;
    size_t buffer_bytes;
};

static struct index index_make(void)
{
    struct index x = {.dir = temp_dir_make(), .buffer_bytes = blobs_buffer_bytes(VALUE_BYTES)};
    x.files = dir_files_open(x.dir.root);
    x.blobs = blobs_open(x.dir.root, x.files);
    clock_init_real(&x.clock);
    ck_assert_int_eq(mem_map(x.buffer_bytes, &x.buffer), TD_OK);
    return x;
}

static void index_close(struct index *x)
{
    blobs_close(x->blobs);
    dir_files_close(x->files);
    mem_unmap(x->buffer, x->buffer_bytes);
    temp_dir_remove(&x->dir);
}

static void scan(struct index *x)
{
    dir_files_update(x->files);
    ck_assert(blobs_scan(x->blobs, 0));
}

/* The file in which the key's value is by the index; 0: the index does not know the key. */
static uint64_t file_of_key(struct index *x, uint64_t n)
{
    struct block_key k = key_of(n);
    const void *value;
    size_t len;
    if (blobs_read(x->blobs, &k, x->buffer, x->buffer_bytes, &value, &len))
        return 0;
    ck_assert_uint_eq(len, VALUE_BYTES);
    ck_assert_uint_eq(get_u64((const uint8_t *)value + 8), n);
    return get_u64(value);
}

/* ------------------------------------------------------------------------ cost */

struct cost {
    double looked_at, files, ms; /* cost to forget a file of 1000 records: places, directory entries, ms */
};

/* Cost to forget one file beside n_others others of that size. */
static struct cost cost_of_forgetting(uint32_t n_others)
{
    enum { RECORDS = 1000, N_FORGOTTEN = 5 };
    struct index x = index_make();
    for (uint32_t i = 0; i < n_others + N_FORGOTTEN; i++)
        make_file(&x.dir, 10 + i, (uint64_t)i * RECORDS, RECORDS);
    scan(&x);
    ck_assert_uint_eq(blobs_work(x.blobs).n_places, (n_others + N_FORGOTTEN) * RECORDS);
    uint64_t places = blobs_work(x.blobs).n_moved, looks = dir_files_n_looks(x.files), before = clock_now(&x.clock);
    for (uint32_t i = 0; i < N_FORGOTTEN; i++) {
        remove_file(&x.dir, 10 + i);
        scan(&x);
    }
    struct cost c = {.ms = (double)(clock_now(&x.clock) - before) * 1e-6 / N_FORGOTTEN,
                     .looked_at = (double)(blobs_work(x.blobs).n_moved - places) / N_FORGOTTEN,
                     .files = (double)(dir_files_n_looks(x.files) - looks) / N_FORGOTTEN};
    ck_assert_uint_eq(blobs_work(x.blobs).n_places, n_others * RECORDS);
    index_close(&x);
    return c;
}

START_TEST(test_blobs_forgetting_a_file_costs_in_proportion_to_that_file)
{
    struct cost few = cost_of_forgetting(20), many = cost_of_forgetting(200);
    fprintf(stderr,
            "# forgetting 1000 records beside 20,000 and 200,000: %.0f and %.0f places, %.1f and %.1f files looked at, "
            "%.2f and %.2f ms\n",
            few.looked_at, many.looked_at, few.files, many.files, few.ms, many.ms);
    ck_assert(many.looked_at < 2 * few.looked_at);
    ck_assert(many.files < 2 * few.files + 2);
}
END_TEST

struct prober {
    struct index *index;
    _Atomic bool is_over;
    uint64_t longest_ns, n;
};

enum { STAYING = 8, COMING = 60, RECORDS_EACH = 3000 };

/* Reads values that stay, and asks for keys that never existed. */
static void *probe(void *arg)
{
    struct prober *p = arg;
    struct block_key absent = key_of(UINT64_MAX);
    const void *value;
    size_t len;
    for (uint64_t i = 0; !atomic_load(&p->is_over); i++, p->n++) {
        uint64_t stays = random_at(6, i, 0) % (STAYING * RECORDS_EACH);
        ck_assert_uint_eq(file_of_key(p->index, stays), 10 + stays / RECORDS_EACH);
        memcpy(absent.b, &i, sizeof(i)); /* a different shard each time */
        uint64_t before = clock_now(&p->index->clock);
        ck_assert_int_eq(blobs_read(p->index->blobs, &absent, NULL, 0, &value, &len), TD_ERR_NOT_FOUND);
        uint64_t took = clock_now(&p->index->clock) - before;
        p->longest_ns = took > p->longest_ns ? took : p->longest_ns;
    }
    return NULL;
}

/*
 * Tables of 200,000 places grow and shrink while a reader reads. The time for which the reader has to wait is
 * measured as the number of places looked at while a shard was locked. A clock would measure the machine,
 * which may stop a thread for longer.
 */
START_TEST(test_blobs_readers_are_not_held_off_by_scanning)
{
    struct index x = index_make();
    struct prober p = {.index = &x};
    pthread_t thread;
    for (uint32_t i = 0; i < STAYING + COMING; i++) {
        make_file(&x.dir, 10 + i, (uint64_t)i * RECORDS_EACH, RECORDS_EACH);
        if (i == STAYING - 1)
            scan(&x);
    }
    pthread_create(&thread, NULL, probe, &p);
    scan(&x);
    for (uint32_t i = STAYING; i < STAYING + COMING; i++) {
        remove_file(&x.dir, 10 + i);
        scan(&x);
    }
    atomic_store(&p.is_over, true);
    pthread_join(thread, NULL);
    struct blobs_work work = blobs_work(x.blobs);
    fprintf(stderr, "# %llu probes beside scanning: the longest took %.2f ms, at most %llu places were locked\n",
            (unsigned long long)p.n, (double)p.longest_ns * 1e-6, (unsigned long long)work.longest_locked);
    ck_assert_uint_gt(p.n, 0);
    ck_assert_uint_gt(work.n_moved, COMING * RECORDS_EACH);
    ck_assert_uint_lt(work.longest_locked,
                      256); /* longest run of neighbours in a table that is at most three quarters full */
    index_close(&x);
}
END_TEST

START_TEST(test_blobs_scan_stops_when_its_time_is_up_and_goes_on_from_there)
{
    struct index x = index_make();
    uint32_t n_scans = 1;
    for (uint32_t i = 0; i < 20; i++)
        make_file(&x.dir, 10 + i, i * 1000, 1000);
    dir_files_update(x.files);
    for (uint64_t before = 0; !blobs_scan(x.blobs, 1); n_scans++, before = blobs_work(x.blobs).n_places)
        ck_assert_uint_le(blobs_work(x.blobs).n_places - before, 64);
    ck_assert_uint_gt(n_scans, 20);
    ck_assert_uint_eq(blobs_work(x.blobs).n_places, 20000);
    for (uint32_t i = 0; i < 20; i++)
        remove_file(&x.dir, 10 + i);
    dir_files_update(x.files);
    for (n_scans = 1; !blobs_scan(x.blobs, 1); n_scans++)
        ;
    ck_assert_uint_gt(n_scans, 20);
    ck_assert_uint_eq(blobs_work(x.blobs).n_places, 0);
    index_close(&x);
}
END_TEST

/* ----------------------------------------------------------------------- model */

struct model { /* which keys are in which file, as a plain array */
    bool is_there[MODEL_FILES], holds[MODEL_FILES][MODEL_KEYS];
};

static uint64_t model_file_of(const struct model *m, uint32_t key)
{
    for (uint32_t f = MODEL_FILES; f-- > 0;)
        if (m->is_there[f] && m->holds[f][key])
            return f + 1;
    return 0;
}

static void model_append(struct model *m, struct index *x, uint32_t file, uint64_t seed)
{
    uint64_t keys[MODEL_KEYS];
    uint32_t n = 0;
    for (uint32_t k = 0; k < MODEL_KEYS; k++)
        if (random_at(3, seed, k) % 16 == 0) {
            keys[n++] = k;
            m->holds[file][k] = true;
        }
    append_file(&x->dir, file + 1, keys, n);
    m->is_there[file] = true;
}

/*
 * Files appear, grow and go at random, as garbage collection and others would make them, with partial scans
 * between. For each key the index names the youngest file that has it. If the key was in a file that is gone,
 * the index may name none (RocksDB is asked then), but never a wrong one.
 */
START_TEST(test_blobs_index_equals_a_plain_model)
{
    struct index x = index_make();
    struct model *m = mem_zalloc(sizeof(*m));
    uint64_t n_named = 0, n_known = 0;
    for (uint32_t step = 0; step < 1500; step++) {
        uint32_t file = (uint32_t)(random_at(2, step, 0) % MODEL_FILES), what = (uint32_t)(random_at(2, step, 1) % 4);
        if (what < 2) {
            model_append(m, &x, file, step);
        } else if (m->is_there[file]) {
            remove_file(&x.dir, file + 1);
            m->is_there[file] = false;
            memset(m->holds[file], 0, sizeof(m->holds[file]));
            if (what == 3) /* the file is made again before the index notices */
                model_append(m, &x, file, step);
        }
        if (random_at(2, step, 2) % 3)
            continue;
        dir_files_update(x.files);
        while (!blobs_scan(x.blobs, 1 + random_at(2, step, 3) % 100000))
            ;
        for (uint32_t k = 0; k < MODEL_KEYS; k++) {
            uint64_t want = model_file_of(m, k), got = file_of_key(&x, k);
            ck_assert_msg(!got || (want && m->is_there[got - 1] && m->holds[got - 1][k]),
                          "step %u key %u: file %llu, not %llu", step, k, (unsigned long long)got,
                          (unsigned long long)want);
            n_named += got != 0;
            n_known += want != 0;
        }
    }
    fprintf(stderr, "# %llu keys lay somewhere, of %llu of them the index knew where\n", (unsigned long long)n_known,
            (unsigned long long)n_named);
    ck_assert_uint_gt(n_named, n_known / 2);
    free(m);
    index_close(&x);
}
END_TEST

/* Checks that the measured size is what du would report, whoever makes and removes files, also if the
 * kernel's queue overflows or the directory is moved. */
static void check_measured(struct index *x)
{
    uint64_t sum = 0, n = 0;
    DIR *d = opendir(x->dir.root);
    for (struct dirent *e; (e = readdir(d));) {
        struct stat st;
        ck_assert_int_eq(fstatat(dirfd(d), e->d_name, &st, 0), 0);
        sum += S_ISREG(st.st_mode) ? (uint64_t)st.st_blocks * 512 : 0;
        n += strstr(e->d_name, ".blob") != NULL;
    }
    closedir(d);
    dir_files_update(x->files);
    ck_assert_uint_eq(dir_files_disk_bytes(x->files), sum);
    ck_assert_uint_eq(dir_files_n_blobs(x->files), n);
}

START_TEST(test_dir_files_measures_what_lies_there)
{
    struct index x = index_make();
    char path[128], aside[160];
    for (uint32_t i = 0; i < 400; i++) {
        uint32_t number = (uint32_t)(random_at(4, i, 0) % 50) + 1;
        path_of(&x.dir, number, path);
        if (random_at(4, i, 1) % 3)
            make_file(&x.dir, number, i, 1 + (uint32_t)(random_at(4, i, 2) % 500));
        else
            unlink(path);
        snprintf(path, sizeof(path), "%s/MANIFEST-%u", x.dir.root, number % 3);
        FILE *f = fopen(path, i % 5 ? "a" : "w");
        fprintf(f, "%4000u\n", i);
        fclose(f);
        if (i % 7 == 0)
            check_measured(&x);
        if (i % 20 == 0)
            scan(&x);
    }
    path_of(&x.dir, 7, path);
    for (uint32_t i = 0; i < 40000; i++) /* more than the kernel's queue takes (16,384 by default) */
        ck_assert_int_eq(i % 2 ? unlink(path) : close(open(path, O_WRONLY | O_CREAT, 0600)), 0 * (int)i);
    make_file(&x.dir, 77, 0, 100);
    check_measured(&x);
    snprintf(aside, sizeof(aside), "%s.aside", x.dir.root);
    ck_assert_int_eq(rename(x.dir.root, aside), 0);
    ck_assert_int_eq(mkdir(x.dir.root, 0700), 0);
    make_file(&x.dir, 77, 5000, 100);
    check_measured(&x);
    scan(&x);
    ck_assert_uint_eq(blobs_work(x.blobs).n_places, 100); /* those of the new file of the same name */
    ck_assert_uint_eq(file_of_key(&x, 5000), 77);
    ck_assert_uint_eq(file_of_key(&x, 0), 0);
    nftw(aside, temp_dir_remove_one, 16, FTW_DEPTH | FTW_PHYS);
    index_close(&x);
}
END_TEST

/* Whether values can be read past the page cache here; if not, the index is not used (ssd.c). */
static bool reads_directly(void)
{
    char path[] = "/tmp/tandem-direct-XXXXXX";
    int made = mkstemp(path), fd = open(path, O_RDONLY | O_DIRECT);
    unlink(path);
    close(made);
    if (fd >= 0)
        close(fd);
    return fd >= 0;
}

int main(void)
{
    Suite *s = suite_create("kvstore blobs");
    TCase *c = tcase_create("blobs");
    tcase_set_timeout(c, 60);
    tcase_add_test(c, test_blobs_forgetting_a_file_costs_in_proportion_to_that_file);
    tcase_add_test(c, test_blobs_scan_stops_when_its_time_is_up_and_goes_on_from_there);
    if (reads_directly()) {
        tcase_add_test(c, test_blobs_readers_are_not_held_off_by_scanning);
        tcase_add_test(c, test_blobs_index_equals_a_plain_model);
        tcase_add_test(c, test_dir_files_measures_what_lies_there);
    } else {
        static const char WHY[] = "/tmp can't be read past the page cache";
        tap_skip("test_blobs_readers_are_not_held_off_by_scanning", WHY);
        tap_skip("test_blobs_index_equals_a_plain_model", WHY);
        tap_skip("test_dir_files_measures_what_lies_there", WHY);
    }
    suite_add_tcase(s, c);
    return tap_main(s);
}
