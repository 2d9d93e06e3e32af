/* Quotas: a tenant that floods the store keeps to its share while other tenants need the room, and may have
 * all of it while none do. */
#include "kvstore/kvstore_internal.h"
#include "tests/kvstore/world.h"
#include "tests/tap.h"

enum { OURS = 7, FLOOD = 9 };

/* Waits until n more blocks are durable or were refused. */
static void wait_written(const struct world *w, const struct ssd_tier_stats *before, uint32_t n)
{
    uint64_t until = wall_ns() + 20 * NS_PER_S;
    struct ssd_tier_stats now;
    do {
        ck_assert_uint_lt(wall_ns(), until);
        usleep(1000);
        now = ssd_tier_stats(w->store->ssd);
    } while (now.written_bytes < before->written_bytes + n * PAGE && now.write_errors == before->write_errors);
}

/* Offers blocks [first, first + count) of a tenant, eight at a time, so that arrived blocks are written
 * before more come. */
static void offer_by_eights(struct world *w, uint32_t tenant, uint32_t first, uint32_t count)
{
    offering = tenant;
    for (uint32_t i = first; i < first + count; i += 8) {
        struct ssd_tier_stats before = w->store->ssd ? ssd_tier_stats(w->store->ssd) : (struct ssd_tier_stats){0};
        uint32_t wanted = offer(w, i, 8);
        if (w->store->ssd)
            wait_written(w, &before, wanted);
    }
}

START_TEST(test_a_flood_stays_within_its_quota_in_dram)
{
    static const char *const POLICIES[] = {"lru", "lfu", "s3fifo", "tandem"};
    bool has_quota = _i % 2;
    struct world w;
    world_open(&w, 40, false);
    w.config.options.eviction = POLICIES[_i / 2];
    w.config.options.tenant_quota = has_quota ? 0.5 : 1;
    world_start(&w);
    offer_by_eights(&w, OURS, 0, 16);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_DRAM] == 16);
    offer_by_eights(&w, FLOOD, 100, 160);
    uint32_t n_left = lookup(&w, 0, 16, NULL);
    if (has_quota)
        ck_assert_uint_eq(n_left, 16);
    else if (!strcmp(POLICIES[_i / 2], "lru"))
        ck_assert_uint_eq(n_left, 0);
    world_close(&w);
}
END_TEST

START_TEST(test_a_tenant_alone_may_fill_the_store)
{
    struct world w;
    world_open(&w, 40, false);
    w.config.options.tenant_quota = 0.25;
    world_start(&w);
    offer_by_eights(&w, OURS, 0, 40);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_DRAM] == 40);
    ck_assert_uint_eq(lookup(&w, 0, 40, NULL), 40);
    offer_by_eights(&w, 0, 100, 8); /* but it makes room for other tenants */
    ROUTER_WAIT(w.router, w.router->in_tier[TIER_DRAM][107]);
    ck_assert_uint_eq(lookup(&w, 100, 8, NULL), 8);
    ck_assert_uint_lt(lookup(&w, 0, 40, NULL), 40);
    world_close(&w);
}
END_TEST

START_TEST(test_a_named_tenant_has_a_share_of_its_own)
{
    struct world w;
    world_open(&w, 40, false);
    w.config.options.eviction = "lru";
    w.config.options.tenant_quotas = "flood=0.2,other=1";
    world_start(&w);
    offer_by_eights(&w, OURS, 0, 32);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_DRAM] == 32);
    offer_by_eights(&w, store_tenant("flood", 5), 100, 80);
    ck_assert_uint_eq(lookup(&w, 0, 32, NULL), 32);
    offer_by_eights(&w, FLOOD, 200, 80);
    ck_assert_uint_eq(lookup(&w, 0, 32, NULL), 0);
    world_close(&w);
}
END_TEST

/* On SSD a block's header names its tenant, so that a restarted store knows it, too. */
START_TEST(test_a_flood_stays_within_its_quota_on_ssd_after_a_restart)
{
    bool has_quota = _i;
    struct world w;
    world_open(&w, 32, true);
    w.config.options.eviction = "lru";
    w.config.options.ssd_bytes = 4 << 20; /* about 430 blocks */
    w.config.options.tenant_quota = has_quota ? 0.5 : 1;
    world_start(&w);
    offer_by_eights(&w, OURS, 0, 160);
    stop_store(&w);
    start_store(&w);
    ROUTER_WAIT(w.router, w.router->n_in[TIER_SSD] == 160);
    offer_by_eights(&w, FLOOD, 200, 1200);
    uint32_t n_left = 0;
    for (uint32_t i = 0; i < 160; i += 16)
        n_left += lookup(&w, i, 16, NULL);
    if (has_quota)
        ck_assert_uint_eq(n_left, 160);
    else
        ck_assert_uint_eq(n_left, 0);
    world_close(&w);
}
END_TEST

/* More tenants than the store tells apart: every block belongs to some tenant, and everything goes on. */
START_TEST(test_many_tenants_share_what_is_left)
{
    struct store_table *t = table_open(100, true, EVICTION_TANDEM);
    table_set_quotas(t, 0.1, NULL, 0);
    for (uint32_t i = 0; i < 3000; i++) {
        struct block_key key = block_of(i);
        if (!table_slots_free(t)) {
            struct store_entry *victim = table_victim_over_quota(t, i % 97, true, UINT64_MAX);
            victim = victim ? victim : table_victim_clean(t, UINT64_MAX);
            victim = victim ? victim : table_victim_dirty(t, UINT64_MAX);
            ck_assert_ptr_nonnull(victim);
            table_set_dram(t, victim, DRAM_ABSENT);
        }
        struct store_entry *e = table_add(t, &key, 0, i % 97, i);
        table_touch(t, e, i);
        table_set_dram(t, e, DRAM_FILLING);
        table_set_dram(t, e, DRAM_READY);
    }
    struct table_audit a = table_audit(t);
    ck_assert_uint_eq(a.n_dram, 100);
    ck_assert_uint_eq(a.cached, 100);
    table_close(t);
}
END_TEST

START_TEST(test_quotas_that_make_no_sense_are_refused)
{
    static const char *const WRONG[] = {"a", "=0.5", "a=", "a=x", "a=0", "a=1.5", "a=-1", "a=nan", "a=0.5,b", "a=0.5x"};
    struct tenant_share *shares = NULL;
    struct td_error e;
    uint32_t n;
    for (size_t i = 0; i < sizeof(WRONG) / sizeof(WRONG[0]); i++)
        ck_assert_msg(quotas_parse(WRONG[i], &shares, &n, &e) == TD_ERR_INVALID, "'%s' was taken", WRONG[i]);
    ck_assert_int_eq(quotas_parse("a=0.5,default=1", &shares, &n, &e), TD_OK);
    ck_assert(n == 2 && shares[0].tenant == store_tenant("a", 1) && shares[0].share == 0.5);
    ck_assert(shares[1].tenant == 0 && shares[1].share == 1);
    free(shares);
    ck_assert_int_eq(quotas_parse(NULL, &shares, &n, &e), TD_OK);
    ck_assert(!n && !shares);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("kvstore quotas");
    TCase *c = tcase_create("quotas");
    tcase_set_timeout(c, 60);
    tcase_add_loop_test(c, test_a_flood_stays_within_its_quota_in_dram, 0, 8);
    tcase_add_test(c, test_a_tenant_alone_may_fill_the_store);
    tcase_add_test(c, test_a_named_tenant_has_a_share_of_its_own);
    tcase_add_loop_test(c, test_a_flood_stays_within_its_quota_on_ssd_after_a_restart, 0, 2);
    tcase_add_test(c, test_many_tenants_share_what_is_left);
    tcase_add_test(c, test_quotas_that_make_no_sense_are_refused);
    suite_add_tcase(s, c);
    return tap_main(s);
}
