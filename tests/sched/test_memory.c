/*
 * Memory does not grow with past requests: 200,000 requests through the scheduler (ten million with
 * TANDEM_LONG=memory), each of another tenant and prompt, and ten million prefixes (a hundred million)
 * through a bounded index. The most heap in use (for the index, which maps its tables: resident memory) in
 * the second half must not exceed that of the first half by more than SLACK, which is less than one byte a
 * request.
 */
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/random.h"
#include "sched/index.h"
#include "sched/scheduler.h"
#include "tests/tap.h"

enum { AT_ONCE = 24, BLOCK = 16 };
static const size_t SLACK = 64 << 10;    /* allowed growth in bytes, */
static const double INDEX_GROWTH = 0.02; /* and of the index, which maps whole tables, as a share, too */

static uint64_t n_requests(void)
{
    return tap_is_long("memory") ? 10 * 1000 * 1000 : 200 * 1000;
}

static uint64_t n_prefixes(void)
{
    return (tap_is_long("memory") ? 100 : 10) * 1000 * 1000;
}

static size_t heap_bytes(void)
{
    struct mallinfo2 m = mallinfo2();
    return m.uordblks + m.hblkhd;
}

/* Includes memory that is mapped without malloc. */
static size_t resident_bytes(void)
{
    unsigned long all, pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    ck_assert_ptr_nonnull(f);
    ck_assert_int_eq(fscanf(f, "%lu %lu", &all, &pages), 2);
    fclose(f);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

static void keep_most(size_t now, size_t *most)
{
    *most = now > *most ? now : *most;
}

static void check_flat(const char *what, size_t before, size_t after, double growth)
{
    printf("# %s: at most %zu KiB in the first half, %zu KiB in the second\n", what, before >> 10, after >> 10);
    ck_assert_uint_le(after, before + (size_t)(growth * (double)before) + SLACK);
}

/* ------------------------------------------------------------------ scheduler */

struct traffic {
    struct scheduler *s;
    struct sched_request *placed[AT_ONCE * 8];
    uint32_t n_placed;
    uint64_t now, n_over;
};

static void on_place(void *user, struct sched_request *q)
{
    struct traffic *t = user;
    t->placed[t->n_placed++] = q;
}

static void on_refuse(void *user, struct sched_request *q, double retry_after_ms)
{
    struct traffic *t = user;
    (void)retry_after_ms;
    t->n_over++;
    free(q);
}

static void finish_placed(struct traffic *t)
{
    for (uint32_t i = 0; i < t->n_placed; i++) {
        struct sched_request *q = t->placed[i];
        t->now += NS_PER_MS;
        scheduler_prefilled(t->s, q, t->now);
        scheduler_moved(t->s, q, 1);
        scheduler_second_token(t->s, q, t->now + NS_PER_MS);
        scheduler_generated(q, 10);
        scheduler_decoded(t->s, q);
        scheduler_end(t->s, q, t->now, true);
        t->n_over++;
        free(q);
    }
    t->n_placed = 0;
}

START_TEST(test_memory_is_flat_over_many_requests)
{
    struct traffic t = {.now = NS_PER_S};
    struct scheduler_config config = {.max_wait_ns = 100 * NS_PER_S,
                                      .max_queued_tokens = 1 << 20,
                                      .max_queued = AT_ONCE,
                                      .user = &t,
                                      .place = on_place,
                                      .refuse = on_refuse};
    ck_assert_int_eq(cost_profile_parse("100,1,0:500,0.05,20", &config.profile, NULL), TD_OK);
    t.s = scheduler_open(&config);
    for (uint32_t w = 0; w < 4; w++)
        scheduler_worker_up(t.s, w,
                            &(struct sched_worker_info){.role = w < 2 ? ROLE_PREFILL : ROLE_DECODE,
                                                        .chunk_tokens = 512,
                                                        .max_batch = 64,
                                                        .n_pages = 20000,
                                                        .max_context = 100000});
    size_t before = 0, after = 0;
    uint64_t n = n_requests(), n_refused = 0;
    for (uint64_t i = 0; i < n; i++) {
        struct sched_request *q = mem_zalloc(sizeof(*q));
        double retry_after_ms;
        *q = (struct sched_request){.number = i,
                                    .tenant = random_at(1, 1, i),
                                    .identity = random_at(1, 2, i),
                                    .n_tokens = 100 + (uint32_t)(random_at(1, 3, i) % 1000),
                                    .max_tokens = 100,
                                    .block_tokens = BLOCK,
                                    .ttft_ms = i % 3 ? 0 : 50,
                                    .tpot_ms = i % 5 ? 0 : 20,
                                    .arrived_ns = t.now,
                                    .deadline_ns = UINT64_MAX,
                                    .workflow_deadline_ns = UINT64_MAX};
        if (!scheduler_submit(t.s, q, t.now, &retry_after_ms)) {
            n_refused++;
            free(q);
        }
        if (i % 12 == 11) {
            scheduler_run(t.s, t.now);
            finish_placed(&t);
            t.now += 5 * NS_PER_MS;
        }
        if (i % 1000 == 0)
            keep_most(heap_bytes(), i < n / 2 ? &before : &after);
    }
    while (scheduler_queued(t.s)) {
        scheduler_run(t.s, t.now += NS_PER_MS);
        finish_placed(&t);
    }
    printf("# %llu requests, %llu refused on arrival\n", (unsigned long long)n, (unsigned long long)n_refused);
    ck_assert_uint_eq(t.n_over + n_refused, n);
    ck_assert_uint_gt(t.n_over, n / 10);
    check_flat("scheduler", before, after, 0);
    scheduler_close(t.s);
}
END_TEST

/* ------------------------------------------------------------------ index */

/* Chains of 20 blocks from four holders, each of which keeps its last 50,000 blocks. The index may have
 * 150,000 in all. */
START_TEST(test_memory_is_flat_over_ten_million_prefixes)
{
    enum { CHAIN = 20, HOLDERS = 4, KEEPS = 50000 / CHAIN };
    struct index *x = index_open(150000);
    struct block_event events[2 * CHAIN];
    size_t before = 0, after = 0;
    uint64_t n = n_prefixes() / CHAIN;
    for (uint64_t i = 0; i < n; i++) {
        uint32_t count = 0, holder = (uint32_t)(i % HOLDERS);
        for (uint32_t k = 0; k < 2 * CHAIN; k++) {
            bool added = k < CHAIN;
            if (!added && i < KEEPS * HOLDERS)
                break;
            uint64_t chain = added ? i : i - KEEPS * HOLDERS, a = random_at(5, chain, k % CHAIN),
                     b = ~a * 0x9e3779b97f4a7c15ull;
            struct block_event *e = &events[count++];
            *e = (struct block_event){
                .kind = added ? BLOCK_ADDED : BLOCK_REMOVED, .tier = TIER_WORKER, .index = k % CHAIN};
            memcpy(e->key.b, &a, 8);
            memcpy(e->key.b + 8, &b, 8);
        }
        index_apply(x, holder, events, count);
        if (i % 1000 == 999)
            index_sweep(x, 1 << 15);
        if (i % 1000 == 0)
            keep_most(resident_bytes(), i < n / 2 ? &before : &after);
    }
    printf("# %llu prefixes, %llu blocks in the index, %llu dropped, %llu KiB by its own count\n",
           (unsigned long long)(n * CHAIN), (unsigned long long)index_blocks(x), (unsigned long long)index_dropped(x),
           (unsigned long long)index_bytes(x) >> 10);
    ck_assert_uint_le(index_blocks(x), 150000);
    ck_assert_uint_gt(index_dropped(x), 0);
    check_flat("index", before, after, INDEX_GROWTH);
    index_close(x);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("memory");
    TCase *t = tcase_create("memory");
    tcase_set_timeout(t, 1200);
#ifdef __SANITIZE_ADDRESS__
    const char *why = "AddressSanitizer keeps freed memory, and its heap has no figures";
    tap_skip("test_memory_is_flat_over_many_requests", why);
    tap_skip("test_memory_is_flat_over_ten_million_prefixes", why);
#else
    tcase_add_test(t, test_memory_is_flat_over_many_requests);
    tcase_add_test(t, test_memory_is_flat_over_ten_million_prefixes);
#endif
    suite_add_tcase(s, t);
    return tap_main(s);
}
