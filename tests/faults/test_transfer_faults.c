/*
 * Transfers under every fault of the wire, in virtual time: thousands of faults a second, and each run can be
 * repeated exactly by its seed (TANDEM_SEED=N runs that seed alone).
 *
 * Default: a few hundred faults of each kind. TANDEM_LONG=faults: about 100,000 in all.
 */
#include "tests/faults/world.h"
#include "tests/tap.h"

static const char *const ALL = "wire.connect:fail=0.02 wire.connect:delay=0.05/40ms wire.message:delay=0.01/30ms "
                               "wire.message:drop=0.004 wire.message:truncate=0.004 wire.message:duplicate=0.004 "
                               "wire.message:reorder=0.004 wire.message:corrupt=0.004 wire.message:fail=0.003 "
                               "wire.payload:delay=0.02/30ms wire.payload:truncate=0.02 wire.payload:duplicate=0.02 "
                               "wire.payload:reorder=0.02 wire.payload:corrupt=0.03 wire.payload:fail=0.02 "
                               "wire.payload:lie=0.02 wire.arrival:early=0.02 lease:reuse=0.02 lease:stale=0.02 "
                               "lease:expire=0.01";

static bool is_long(void)
{
    const char *v = getenv("TANDEM_LONG");
    return v && (!strcmp(v, "faults") || !strcmp(v, "all"));
}

static void run(struct world *w, uint64_t seed, const char *script, int n)
{
    world_open(w, seed, script, n);
    world_run(w);
    world_close(w);
}

static uint64_t n_faults(const struct world *w)
{
    uint64_t n = 0;
    for (int s = 0; s < FAULT_SITES; s++)
        for (int k = 0; k < FAULT_KINDS; k++)
            n += w->n_faults[s][k];
    return n;
}

START_TEST(test_transfer_without_faults_all_succeed)
{
    struct world w;
    run(&w, 1, "", 200);
    ck_assert_uint_gt(w.n_status[0], 150); /* the others were cancelled */
    ck_assert_uint_eq(w.n_status[0] + w.n_status[3] + w.n_status[4], 200);
    ck_assert_uint_eq(n_faults(&w), 0);
}
END_TEST

START_TEST(test_transfer_run_replays_exactly_from_its_seed)
{
    struct world a, b, c;
    run(&a, 11, ALL, 300);
    run(&b, 11, ALL, 300);
    run(&c, 12, ALL, 300);
    ck_assert_uint_eq(a.trace, b.trace);
    ck_assert_uint_ne(a.trace, c.trace);
    ck_assert(!memcmp(a.n_faults, b.n_faults, sizeof(a.n_faults)));
}
END_TEST

START_TEST(test_transfer_under_every_fault_gives_right_bytes_or_an_error)
{
    static const char *const KINDS[] = {"",        "delay",   "drop", "truncate", "duplicate",
                                        "reorder", "corrupt", "fail", "lie"};
    static const char *const SITES[] = {"connect", "message", "payload"};
    const char *one = getenv("TANDEM_SEED");
    uint64_t first = one ? strtoull(one, NULL, 10) : 100, n_seeds = one ? 1 : is_long() ? 200 : 4;
    struct world sum = {0};
    for (uint64_t seed = first; seed < first + n_seeds; seed++) {
        struct world w;
        run(&w, seed, ALL, 1000);
        for (int i = 0; i < 8; i++)
            sum.n_status[i] += w.n_status[i];
        for (int i = 0; i < FAULT_SITES * FAULT_KINDS; i++)
            (&sum.n_faults[0][0])[i] += (&w.n_faults[0][0])[i];
    }
    printf(
        "# %llu transfers: ok %llu, peer lost %llu, checksum %llu, cancelled %llu, stale %llu, deadline %llu, protocol "
        "%llu; %llu faults:",
        (unsigned long long)(1000 * n_seeds), (unsigned long long)sum.n_status[0], (unsigned long long)sum.n_status[1],
        (unsigned long long)sum.n_status[2], (unsigned long long)sum.n_status[3], (unsigned long long)sum.n_status[4],
        (unsigned long long)sum.n_status[5], (unsigned long long)sum.n_status[6], (unsigned long long)n_faults(&sum));
    for (int s = 0; s < 3; s++)
        for (int k = 0; k < FAULT_KINDS; k++)
            if (sum.n_faults[s][k])
                printf(" %s %s %llu,", SITES[s], KINDS[k], (unsigned long long)sum.n_faults[s][k]);
    printf("\n");
    fflush(stdout);
    ck_assert_uint_eq(sum.n_status[7], 0);
    ck_assert_uint_gt(sum.n_status[0], 400 * n_seeds); /* the world still works */
    ck_assert_uint_gt(sum.n_status[2], 0);
}
END_TEST

/* Runs transfers under one kind of fault alone. */
static void only(const char *script, int n, struct world *w)
{
    run(w, 21, script, n);
    ck_assert_uint_gt(n_faults(w), 0);
}

START_TEST(test_transfer_corrupt_payload_is_a_checksum_error_never_a_success)
{
    struct world w;
    only("wire.payload:corrupt=0.2", 300, &w);
    ck_assert_uint_gt(w.n_status[2], 20);
    ck_assert_uint_eq(w.n_status[1] + w.n_status[5] + w.n_status[6] + w.n_status[7], 0);
}
END_TEST

/* The four ways in which split servers were seen to return wrong answers silently. world.h compares every
 * byte of a pull that ends with TD_OK with the leased bytes. */
static const char *const SILENT[] = {"lease:reuse=0.2", "lease:stale=0.2", "lease:expire=0.2",
                                     "wire.arrival:early=0.2"};

START_TEST(test_transfer_of_a_reused_stale_expired_or_early_page_is_never_a_success)
{
    enum { OK, LOST, CHECKSUM, CANCELLED, STALE, DEADLINE, PROTOCOL, OTHER };
    static const int ENDS[] = {CHECKSUM, PROTOCOL, STALE, CHECKSUM};
    struct world w;
    only(SILENT[_i], 300, &w);
    printf("# %s: ok %llu, lost %llu, checksum %llu, cancelled %llu, stale %llu, deadline %llu, protocol %llu, other "
           "%llu\n",
           SILENT[_i], (unsigned long long)w.n_status[OK], (unsigned long long)w.n_status[LOST],
           (unsigned long long)w.n_status[CHECKSUM], (unsigned long long)w.n_status[CANCELLED],
           (unsigned long long)w.n_status[STALE], (unsigned long long)w.n_status[DEADLINE],
           (unsigned long long)w.n_status[PROTOCOL], (unsigned long long)w.n_status[OTHER]);
    ck_assert_uint_gt(w.n_status[ENDS[_i]], 20);
    ck_assert_uint_gt(w.n_status[OK], 20);
    ck_assert_uint_eq(w.n_status[OTHER], 0);
}
END_TEST

START_TEST(test_transfer_that_says_done_without_sending_is_a_stall)
{
    struct world w;
    only("wire.payload:lie=0.1", 300, &w);
    ck_assert_uint_gt(w.n_status[1], 20); /* reported as lost, long before the deadline */
    ck_assert_uint_eq(w.n_status[5] + w.n_status[7], 0);
}
END_TEST

START_TEST(test_transfer_lost_doubled_or_damaged_message_ends_the_connection)
{
    static const char *const SCRIPTS[] = {"wire.message:drop=0.05", "wire.message:duplicate=0.05",
                                          "wire.message:reorder=0.05", "wire.message:truncate=0.05",
                                          "wire.message:corrupt=0.05"};
    for (int i = 0; i < 5; i++) {
        struct world w;
        only(SCRIPTS[i], 300, &w);
        ck_assert_uint_gt(w.n_status[1], 5);
        ck_assert_msg(!(w.n_status[2] + w.n_status[6] + w.n_status[7]), "%s: %llu %llu %llu", SCRIPTS[i],
                      (unsigned long long)w.n_status[2], (unsigned long long)w.n_status[6],
                      (unsigned long long)w.n_status[7]);
    }
}
END_TEST

START_TEST(test_transfer_with_one_bad_part_fails_whichever_part_it_is)
{
    static const char *const KINDS[] = {"corrupt", "truncate", "lie", "fail"};
    for (int kind = 0; kind < 4; kind++) {
        uint64_t n_struck = 0;
        for (int position = 1; position <= WORLD_RUN; position++) {
            struct world w;
            char script[64];
            snprintf(script, sizeof(script), "wire.payload:%s@%d", KINDS[kind], position);
            run(&w, 31, script, 1);
            n_struck += n_faults(&w);
            if (kind != 1 && n_faults(&w)) /* a cut may remove nothing */
                ck_assert_msg(!w.n_status[0], "%s at part %d", KINDS[kind], position);
        }
        ck_assert_uint_ge(n_struck, 2);
    }
}
END_TEST

START_TEST(test_transfer_doubled_payload_is_refused_not_written_twice)
{
    struct world w;
    only("wire.payload:duplicate=0.3", 300, &w);
    ck_assert_uint_eq(w.n_status[2] + w.n_status[7], 0);
}
END_TEST

START_TEST(test_transfer_late_and_overtaken_payloads_still_arrive)
{
    struct world w;
    only("wire.payload:delay=0.2/50ms wire.payload:reorder=0.2", 300, &w);
    ck_assert_uint_gt(w.n_status[0], 200);
    ck_assert_uint_eq(w.n_status[1] + w.n_status[2] + w.n_status[5] + w.n_status[6] + w.n_status[7], 0);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("transfer_faults");
    TCase *t = tcase_create("faults");
    tcase_set_timeout(t, is_long() ? 3000 : 120);
    tcase_add_test(t, test_transfer_without_faults_all_succeed);
    tcase_add_test(t, test_transfer_run_replays_exactly_from_its_seed);
    tcase_add_test(t, test_transfer_under_every_fault_gives_right_bytes_or_an_error);
    tcase_add_test(t, test_transfer_corrupt_payload_is_a_checksum_error_never_a_success);
    tcase_add_loop_test(t, test_transfer_of_a_reused_stale_expired_or_early_page_is_never_a_success, 0, 4);
    tcase_add_test(t, test_transfer_that_says_done_without_sending_is_a_stall);
    tcase_add_test(t, test_transfer_lost_doubled_or_damaged_message_ends_the_connection);
    tcase_add_test(t, test_transfer_with_one_bad_part_fails_whichever_part_it_is);
    tcase_add_test(t, test_transfer_doubled_payload_is_refused_not_written_twice);
    tcase_add_test(t, test_transfer_late_and_overtaken_payloads_still_arrive);
    suite_add_tcase(s, t);
    return tap_main(s);
}
