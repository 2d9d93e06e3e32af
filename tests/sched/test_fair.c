/* The tenants' queue: whose turn it is, and what is owed to a tenant that was away or sent away. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/random.h"
#include "sched/fair.h"
#include "sched/ring.h"
#include "tests/tap.h"

enum { N = 200 };

struct item {
    uint64_t tenant;
    double key, amount;
};

static struct fair *open_with(const struct fair_weight *weights, uint32_t n)
{
    return fair_open(weights, n);
}

static uint64_t ms(double at)
{
    return (uint64_t)(at * 1e6);
}

/* Serves the first item, which is queued again at once, so that its tenant always waits. */
static struct item *serve(struct fair *f, double at_ms)
{
    fair_begin(f, ms(at_ms));
    struct item *i = fair_next(f);
    fair_remove(f, i->tenant, i->key, i->amount, i);
    fair_serve(f, i->tenant, i->amount, ms(at_ms));
    i->key = at_ms;
    fair_push(f, i->tenant, i->key, i->amount, i, ms(at_ms));
    return i;
}

START_TEST(test_fair_serves_backlogged_tenants_by_their_weights)
{
    const struct fair_weight weights[] = {{1, 1}, {2, 3}};
    struct fair *f = open_with(weights, 2);
    struct item items[20];
    double served[3] = {0};
    for (uint32_t i = 0; i < 20; i++) {
        items[i] = (struct item){1 + i % 2, i, 1};
        fair_push(f, items[i].tenant, items[i].key, items[i].amount, &items[i], 0);
    }
    /* Ten minutes of amounts of all sizes, with larger ones for the light tenant. */
    for (uint32_t i = 0; i < 6000; i++) {
        struct item *next = serve(f, i * 100.0);
        served[next->tenant] += next->amount;
        next->amount = (next->tenant == 1 ? 2000 : 700) * (0.1 + random_unit(random_at(1, i, 1)));
    }
    double share = served[1] / (served[1] + served[2]);
    ck_assert_msg(fabs(share - 0.25) < 0.25 * 0.05, "%f", share);
    fair_close(f);
}
END_TEST

/* How many of the first `n` turns of 100 ms the second of two equal tenants gets, after it was away; wanted:
 * it wanted to be served meanwhile. */
static uint32_t served_after(uint32_t n, bool wanted)
{
    struct fair *f = open_with(NULL, 0);
    struct item busy[4], other[4];
    for (uint32_t i = 0; i < 4; i++) {
        busy[i] = (struct item){1, i, 100};
        fair_push(f, 1, i, busy[i].amount, &busy[i], 0);
    }
    double now = 0;
    for (; now < 600e3; now += 100) {
        if (wanted)
            fair_want(f, 2, ms(now + 500));
        ck_assert_uint_eq(serve(f, now)->tenant, 1);
    }
    for (uint32_t i = 0; i < 4; i++) {
        other[i] = (struct item){2, now + i, 100};
        fair_push(f, 2, now + i, other[i].amount, &other[i], ms(now));
    }
    uint32_t second = 0;
    for (uint32_t i = 0; i < n; i++)
        second += serve(f, now + i * 100.0)->tenant == 2;
    fair_close(f);
    return second;
}

START_TEST(test_fair_gives_no_credit_to_a_tenant_that_wanted_nothing)
{
    uint32_t second = served_after(100, false);
    ck_assert_msg(second >= 49 && second <= 51, "%u", second);
}
END_TEST

START_TEST(test_fair_owes_a_tenant_that_was_sent_away_what_was_served_lately_at_most)
{
    /* FAIR_OWED is 20 turns: the tenant gets at most these, then every other turn. */
    uint32_t second = served_after(100, true);
    ck_assert_msg(second > 54 && second <= 61, "%u", second);
}
END_TEST

START_TEST(test_fair_counts_the_weights_of_those_that_want_something)
{
    const struct fair_weight weights[] = {{1, 1}, {2, 3}};
    struct fair *f = open_with(weights, 2);
    struct item one = {1, 0, 7}, two = {2, 0, 5}, three = {2, 1, 5};
    ck_assert(fair_share(f, 1, 0) == 1 && !fair_last(f, false, NULL));
    fair_push(f, 1, 0, 7, &one, 0);
    ck_assert(fair_share(f, 1, 0) == 1 && fair_share(f, 2, 0) == 0.75);
    fair_want(f, 2, ms(100));
    ck_assert(fair_share(f, 1, ms(99)) == 0.25 && fair_share(f, 1, ms(100)) == 1);
    fair_push(f, 2, 0, 5, &two, ms(200));
    fair_push(f, 2, 1, 5, &three, ms(200));
    ck_assert(fair_count(f, 2) == 2 && fair_size(f, 2) == 10);
    /* One item for weight 1 is more than two for weight 3. */
    ck_assert_ptr_eq(fair_last(f, false, NULL), &one);
    fair_remove(f, 1, 0, 7, &one);
    ck_assert_ptr_eq(fair_last(f, true, NULL), &three);
    ck_assert(fair_size(f, 1) == 0 && fair_share(f, 2, ms(300)) == 1);
    fair_close(f);
}
END_TEST

START_TEST(test_fair_knows_what_others_may_still_bring_before_a_turn)
{
    struct fair *f = open_with(NULL, 0);
    struct item items[10], *next;
    for (uint32_t i = 0; i < 10; i++) {
        items[i] = (struct item){1, i, 10};
        fair_push(f, 1, i, 10, &items[i], 0);
    }
    fair_want(f, 2, ms(1000));
    fair_begin(f, 0);
    for (uint32_t i = 0; i < 10; i++) {
        ck_assert_ptr_nonnull(next = fair_next(f));
        ck_assert_msg(fabs(fair_to_come(f, 1) - 10.0 * i) < 1e-9, "%u: %f", i, fair_to_come(f, 1));
        fair_take(f, 1, next->amount);
    }
    fair_begin(f, ms(1000)); /* the tenant did not come back */
    fair_next(f);
    fair_take(f, 1, 10);
    ck_assert(fair_to_come(f, 1) == 0);
    fair_close(f);
}
END_TEST

START_TEST(test_fair_orders_by_key_inside_a_tenant_and_equals_as_they_came)
{
    struct fair *f = open_with(NULL, 0);
    struct item items[N];
    for (uint32_t i = 0; i < N; i++) {
        items[i] = (struct item){1, (double)(random_at(2, i, 0) % 20), 1};
        fair_push(f, 1, items[i].key, items[i].amount, &items[i], 0);
    }
    fair_begin(f, 0);
    struct item *before = fair_next(f), *next;
    uint32_t n = 1;
    for (; (next = fair_next(f)); before = next, n++) {
        ck_assert(before->key <= next->key);
        ck_assert(before->key < next->key || before < next);
    }
    ck_assert_uint_eq(n, N);
    fair_close(f);
}
END_TEST

START_TEST(test_fair_walk_takes_turns_as_serving_would)
{
    const struct fair_weight weights[] = {{1, 1}, {2, 3}};
    struct fair *f = open_with(weights, 2);
    struct item items[N], *next;
    uint32_t n[3] = {0};
    for (uint32_t i = 0; i < N; i++) {
        items[i] = (struct item){1 + i % 2, i, 10};
        fair_push(f, items[i].tenant, i, items[i].amount, &items[i], 0);
    }
    fair_begin(f, 0);
    for (uint32_t i = 0; i < 80 && (next = fair_next(f)); i++) {
        n[next->tenant]++;
        fair_take(f, next->tenant, next->amount);
    }
    ck_assert(n[1] >= 19 && n[1] <= 21);
    ck_assert(fair_tag(f, 1) == 0); /* walking the queue charges nothing */
    fair_begin(f, 0);
    for (uint32_t i = 0; i < N; i++)
        ck_assert_ptr_nonnull(fair_next(f));
    ck_assert_ptr_null(fair_next(f));
    fair_close(f);
}
END_TEST

START_TEST(test_fair_items_may_leave_in_the_middle_of_a_walk)
{
    for (uint64_t round = 0; round < 300; round++) {
        struct fair *f = open_with(NULL, 0);
        struct item items[N], *next;
        bool in[N], seen[N] = {false};
        for (uint32_t i = 0; i < N; i++) {
            items[i] = (struct item){random_at(round, i, 0) % 5, (double)(random_at(round, i, 1) % 50), 1};
            fair_push(f, items[i].tenant, items[i].key, items[i].amount, &items[i], 0);
            in[i] = true;
        }
        fair_begin(f, 0);
        for (uint32_t step = 0; (next = fair_next(f)); step++) {
            uint32_t i = (uint32_t)(next - items), other = (uint32_t)(random_at(round, step, 2) % N);
            ck_assert(in[i] && !seen[i]);
            seen[i] = true;
            fair_take(f, next->tenant, 1);
            if (step % 2 && in[i]) { /* removes the item just returned, or any other */
                fair_remove(f, next->tenant, next->key, next->amount, next);
                in[i] = false;
            }
            if (step % 3 == 0 && in[other]) {
                fair_remove(f, items[other].tenant, items[other].key, items[other].amount, &items[other]);
                in[other] = false;
            }
        }
        for (uint32_t i = 0; i < N; i++)
            ck_assert(seen[i] || !in[i]); /* no item that stayed was skipped */
        fair_close(f);
    }
}
END_TEST

START_TEST(test_fair_tags_rise_by_work_over_weight_and_never_fall_below_zero)
{
    const struct fair_weight weights[] = {{7, 4}};
    struct fair *f = open_with(weights, 1);
    fair_serve(f, 7, 400, 0);
    fair_serve(f, 8, 400, 0);
    ck_assert(fabs(fair_tag(f, 7) - 100) < 1e-9 && fabs(fair_tag(f, 8) - 400) < 1e-9);
    fair_correct(f, 8, -100);
    ck_assert(fabs(fair_tag(f, 8) - 300) < 1e-9);
    fair_correct(f, 8, -1000);
    ck_assert(fair_tag(f, 8) == 0);
    fair_close(f);
    fair_close(NULL);
}
END_TEST

START_TEST(test_fair_weights_are_parsed_and_what_is_wrong_is_named)
{
    static const struct {
        const char *text, *named;
    } BAD[] = {{"a", "'a'"},         {"a=", "'a='"},       {"=1", "'=1'"},         {"a=1,b=0", "'b=0'"},
               {"a=-1", "'a=-1'"},   {"a=inf", "'a=inf'"}, {",a=1", "''"},         {"a=1x", "'a=1x'"},
               {"a=nan", "'a=nan'"}, {"a=1,,b=1", "''"},   {"a=1,b=2,a=3", "'a'"}, {"a=1 ", "'a=1 "}};
    struct fair_weight *weights = NULL;
    struct td_error e;
    uint32_t n = 0;
    ck_assert_int_eq(fair_weights_parse("light=1,heavy=2.5", &weights, &n, &e), TD_OK);
    ck_assert_uint_eq(n, 2);
    ck_assert(weights[0].tenant == ring_id("light", 5) && weights[0].weight == 1);
    ck_assert(weights[1].tenant == ring_id("heavy", 5) && weights[1].weight == 2.5);
    free(weights);
    for (size_t i = 0; i < sizeof(BAD) / sizeof(BAD[0]); i++) {
        n = 7;
        ck_assert_int_eq(fair_weights_parse(BAD[i].text, &weights, &n, &e), TD_ERR_INVALID);
        ck_assert_msg(strstr(e.text, "--tenants") && strstr(e.text, BAD[i].named) && n == 7, "%s: %s", BAD[i].text,
                      e.text);
    }
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(fair_weights_parse(i ? "" : NULL, &weights, &n, &e), TD_OK);
        ck_assert(!n && !weights);
    }
}
END_TEST

int main(void)
{
    Suite *s = suite_create("fair");
    TCase *t = tcase_create("fair");
    tcase_set_timeout(t, 30);
    tcase_add_test(t, test_fair_serves_backlogged_tenants_by_their_weights);
    tcase_add_test(t, test_fair_gives_no_credit_to_a_tenant_that_wanted_nothing);
    tcase_add_test(t, test_fair_owes_a_tenant_that_was_sent_away_what_was_served_lately_at_most);
    tcase_add_test(t, test_fair_counts_the_weights_of_those_that_want_something);
    tcase_add_test(t, test_fair_knows_what_others_may_still_bring_before_a_turn);
    tcase_add_test(t, test_fair_orders_by_key_inside_a_tenant_and_equals_as_they_came);
    tcase_add_test(t, test_fair_walk_takes_turns_as_serving_would);
    tcase_add_test(t, test_fair_items_may_leave_in_the_middle_of_a_walk);
    tcase_add_test(t, test_fair_tags_rise_by_work_over_weight_and_never_fall_below_zero);
    tcase_add_test(t, test_fair_weights_are_parsed_and_what_is_wrong_is_named);
    suite_add_tcase(s, t);
    return tap_main(s);
}
