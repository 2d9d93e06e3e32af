/*
 * Damage to the SSD tier's files and values while no store runs: flipped bits, cut files, values under wrong
 * keys. Whatever the damage, every lookup afterwards returns the right bytes or a miss with a reason, and the
 * store opens.
 *
 * 200 random injuries; TANDEM_LONG=store: 10,000.
 */
#include <pthread.h>

#include "base/mem.h"
#include "base/random.h"
#include "kvstore/ssd.h"
#include "kvstore/ssd_tier.h"
#include "tests/kvstore/dirs.h"
#include "tests/tap.h"

enum { N = 24, SEED = 4711 };
static const struct kv_layout LAYOUT = {NUM_F32, 4, 2, 16, 16}; /* 16 KiB a page */

enum { INJURY_FLIP, INJURY_CUT, INJURY_SWAP, INJURY_MOVE, INJURIES };

struct patient {
    struct temp_dir dir;
    char blocks[128];
    struct clock clock;
    struct log log;
    struct ssd_tier *tier;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t n_done;
    bool is_found[N];
    enum td_status status[N];
    uint8_t *pages, *landing;
    size_t page_bytes;
    uint64_t draws;
    uint32_t n_verified, n_missed[8], n_lookups, n_aside;
};

static char TOKENS[N];

static uint64_t draw(struct patient *p, uint64_t below)
{
    return random_at(SEED, p->draws++, 1) % below;
}

static struct block_key key_of(uint32_t n)
{
    uint64_t a = random_mix(n);
    struct block_key k = {{(uint8_t)n, 77}};
    memcpy(k.b + 2, &a, sizeof(a));
    return k;
}

static void on_found(void *user, const struct block_header *h)
{
    struct patient *p = user;
    const struct block_key *key = &h->key;
    struct block_key expected = key_of(key->b[0] % N);
    if (block_key_equal(&expected, key) && h->index == key->b[0])
        p->is_found[key->b[0]] = true;
}

static void on_done(void *user, void *token, enum td_status status)
{
    struct patient *p = user;
    pthread_mutex_lock(&p->lock);
    p->status[(char *)token - TOKENS] = status;
    p->n_done++;
    pthread_cond_signal(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

static void on_listed(void *user, struct bytes *keys)
{
    (void)user;
    bytes_free(keys);
}

static void on_over(void *user, uint64_t bytes)
{
    (void)user, (void)bytes;
}

static void wait_done(struct patient *p, uint32_t n)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 30;
    int r = 0;
    pthread_mutex_lock(&p->lock);
    while (p->n_done < n && !r)
        r = pthread_cond_timedwait(&p->changed, &p->lock, &until);
    p->n_done -= r ? 0 : n;
    pthread_mutex_unlock(&p->lock);
    ck_assert_int_eq(r, 0);
}

static void open_tier(struct patient *p)
{
    struct td_error e = {""};
    const struct ssd_tier_config c = {.dir = p->dir.store,
                                      .capacity_bytes = 64 << 20,
                                      .queue_bytes = 16 << 20,
                                      .n_readers = 2,
                                      .layout = &LAYOUT,
                                      .clock = &p->clock,
                                      .log = &p->log,
                                      .callbacks = {p, on_found, on_done, on_done, on_over, on_listed}};
    memset(p->is_found, 0, sizeof(p->is_found));
    enum td_status s = ssd_tier_open(&c, &p->tier, &e);
    ck_assert_msg(s == TD_OK, "the store does not open: %s", e.text);
    p->n_aside += ssd_tier_stats(p->tier).was_set_aside;
}

static void put_missing(struct patient *p)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < N; i++) {
        struct block_key k = key_of(i);
        if (p->is_found[i])
            continue;
        ck_assert_int_eq(ssd_tier_put(p->tier, &(struct ssd_put){k, i, 0, p->pages + i * p->page_bytes, TOKENS + i}),
                         TD_OK);
        n++;
    }
    wait_done(p, n);
}

/* Looks up every block: each gives the right bytes or a reason. Bad blocks are deleted, as the store does. */
static void look_up_all(struct patient *p)
{
    for (uint32_t i = 0; i < N; i++) {
        struct block_key k = key_of(i);
        ssd_tier_read(p->tier, &k, p->landing, TOKENS + i);
        wait_done(p, 1);
        p->n_lookups++;
        if (p->status[i] == TD_OK) {
            ck_assert_msg(!memcmp(p->landing, p->pages + i * p->page_bytes, p->page_bytes), "block %u: wrong bytes", i);
            p->n_verified++;
            continue;
        }
        p->is_found[i] = false;
        ssd_tier_delete(p->tier, &k, false);
        switch (p->status[i]) {
        case TD_ERR_NOT_FOUND:
            p->n_missed[0]++;
            break;
        case TD_ERR_CORRUPT:
            p->n_missed[1]++;
            break;
        case TD_ERR_CHECKSUM:
            p->n_missed[2]++;
            break;
        case TD_ERR_VERSION:
            p->n_missed[3]++;
            break;
        case TD_ERR_IO:
            p->n_missed[4]++;
            break;
        default:
            ck_abort_msg("block %u: status %s", i, td_status_name(p->status[i]));
        }
    }
}

/* ----------------------------------------------------------------- injuries */

/* Opens a random file of the database that is not empty. */
static int open_some_file(struct patient *p, off_t *size_out)
{
    char names[256][64];
    uint32_t n = 0;
    DIR *d = opendir(p->blocks);
    ck_assert_ptr_nonnull(d);
    for (struct dirent *e; (e = readdir(d)) && n < 256;) {
        struct stat st;
        /* Text files, which RocksDB does not read. */
        bool is_log = !strncmp(e->d_name, "LOG", 3) || !strncmp(e->d_name, "OPTIONS", 7);
        if (!is_log && !fstatat(dirfd(d), e->d_name, &st, 0) && S_ISREG(st.st_mode) && st.st_size > 0)
            snprintf(names[n++], sizeof(names[0]), "%.63s", e->d_name);
    }
    ck_assert_uint_gt(n, 0);
    int fd = openat(dirfd(d), names[draw(p, n)], O_RDWR | O_CLOEXEC);
    struct stat st;
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(fstat(fd, &st), 0);
    closedir(d);
    *size_out = st.st_size;
    return fd;
}

static void injure_file(struct patient *p, int injury)
{
    off_t size;
    int fd = open_some_file(p, &size);
    off_t at = (off_t)draw(p, (uint64_t)size);
    uint8_t byte;
    if (injury == INJURY_CUT) {
        ck_assert_int_eq(ftruncate(fd, at), 0);
    } else {
        ck_assert_int_eq(pread(fd, &byte, 1, at), 1);
        byte ^= (uint8_t)(1u << draw(p, 8));
        ck_assert_int_eq(pwrite(fd, &byte, 1, at), 1);
    }
    close(fd);
}

static void *copy_value(struct ssd *db, uint32_t i, size_t *len_out)
{
    struct ssd_value v;
    struct block_key k = key_of(i);
    if (ssd_get(db, &k, &v))
        return NULL;
    void *copy = mem_dup(v.data, v.len_bytes);
    *len_out = v.len_bytes;
    ssd_release(db, &v);
    return copy;
}

static void put_value(struct ssd *db, uint32_t i, const uint8_t *value, size_t len)
{
    struct block_key k = key_of(i);
    if (value && len > BLOCK_HEADER_BYTES)
        ck_assert_int_eq(ssd_put(db, &k, value, value + BLOCK_HEADER_BYTES, len - BLOCK_HEADER_BYTES, true), TD_OK);
}

/* Puts whole, well-formed values under the keys of other blocks, which a checksum of the bytes alone would
 * not notice. */
static void injure_values(struct patient *p, int injury)
{
    struct ssd *db;
    struct td_error e;
    const struct ssd_config c = {
        .dir = p->dir.store, .mode = SSD_REPAIR, .capacity_bytes = 64 << 20, .clock = &p->clock, .log = &p->log};
    ck_assert_int_eq(ssd_open(&c, &db, &e), TD_OK);
    uint32_t a = (uint32_t)draw(p, N), b = (uint32_t)((a + 1 + draw(p, N - 1)) % N);
    size_t len_a = 0, len_b = 0;
    void *value_a = copy_value(db, a, &len_a), *value_b = copy_value(db, b, &len_b);
    put_value(db, b, value_a, len_a);
    if (injury == INJURY_SWAP)
        put_value(db, a, value_b, len_b);
    free(value_a);
    free(value_b);
    ssd_close(db);
}

/* ------------------------------------------------------------------- tests */

static struct patient *patient_make(void)
{
    struct patient *p = mem_zalloc(sizeof(*p));
    p->dir = temp_dir_make();
    snprintf(p->blocks, sizeof(p->blocks), "%s/blocks", p->dir.store);
    p->log = (struct log){.who = "damage"}; /* no output: errors are expected */
    p->log.fd = open("/dev/null", O_WRONLY | O_CLOEXEC);
    clock_init_real(&p->clock);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->changed, NULL);
    p->page_bytes = kv_layout_page_bytes(&LAYOUT);
    p->landing = mem_zalloc(p->page_bytes);
    p->pages = mem_array(N, p->page_bytes);
    for (uint32_t i = 0; i < N; i++)
        for (size_t w = 0; w < p->page_bytes / 8; w++) {
            uint64_t v = random_at(6, i, w);
            memcpy(p->pages + i * p->page_bytes + w * 8, &v, 8);
        }
    return p;
}

static void patient_free(struct patient *p)
{
    close(p->log.fd);
    temp_dir_remove(&p->dir);
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->changed);
    free(p->pages);
    free(p->landing);
    free(p);
}

START_TEST(test_store_damaged_on_disk_serves_right_bytes_or_misses_with_a_reason)
{
    const char *more = getenv("TANDEM_LONG");
    uint32_t rounds = more && (!strcmp(more, "store") || !strcmp(more, "all")) ? 10000 : 200, n_missed = 0;
    struct patient *p = patient_make();
    for (uint32_t round = 0; round <= rounds; round++) {
        open_tier(p);
        if (round)
            look_up_all(p);
        put_missing(p);
        ssd_tier_close(p->tier);
        int injury = (int)draw(p, INJURIES);
        if (injury == INJURY_FLIP || injury == INJURY_CUT)
            injure_file(p, injury);
        else
            injure_values(p, injury);
    }
    for (int i = 0; i < 8; i++)
        n_missed += p->n_missed[i];
    fprintf(stderr,
            "# %u injuries, %u lookups: %u right, missed: absent %u corrupt %u checksum %u version %u io %u; set aside "
            "%u times\n",
            rounds, p->n_lookups, p->n_verified, p->n_missed[0], p->n_missed[1], p->n_missed[2], p->n_missed[3],
            p->n_missed[4], p->n_aside);
    ck_assert_uint_eq(p->n_lookups, rounds * N);
    ck_assert_uint_eq(p->n_lookups, p->n_verified + n_missed);
    ck_assert_uint_gt(n_missed, rounds / 4);
    patient_free(p);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kvstore damage");
    TCase *c = tcase_create("damage");
    tcase_set_timeout(c, getenv("TANDEM_LONG") ? 7200 : 100);
    tcase_add_test(c, test_store_damaged_on_disk_serves_right_bytes_or_misses_with_a_reason);
    suite_add_tcase(s, c);
    return tap_main(s);
}
