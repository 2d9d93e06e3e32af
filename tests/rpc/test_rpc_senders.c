/* What addresses have cost a door: floods that let them wait, and calls that are paced. By a clock of its
 * own. */
#include <arpa/inet.h>
#include <inttypes.h>
#include <netinet/in.h>

#include "base/clock.h"
#include "proto/rpc/rpc_senders.h"
#include "tests/tap.h"

static struct rpc_senders senders;
static uint64_t now = 1000 * NS_PER_S;

static struct rpc_origin origin(const char *address)
{
    struct sockaddr_storage a = {0};
    struct sockaddr_in *v4 = (struct sockaddr_in *)&a;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&a;
    if (inet_pton(AF_INET, address, &v4->sin_addr) == 1)
        a.ss_family = AF_INET;
    else if (inet_pton(AF_INET6, address, &v6->sin6_addr) == 1)
        a.ss_family = AF_INET6;
    return rpc_origin_of(&a);
}

START_TEST(test_origins)
{
    static const char *const NONE[] = {"127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "a unix socket"};
    for (unsigned i = 0; i < sizeof(NONE) / sizeof(NONE[0]); i++)
        ck_assert_msg(!origin(NONE[i]).key, "%s", NONE[i]);
    ck_assert(origin("10.0.0.1").key != origin("10.0.0.2").key);
    ck_assert(origin("10.0.0.1").key == origin("::ffff:10.0.0.1").key);
    ck_assert(origin("2001:db8::1").key == origin("2001:db8::ffff:2").key); /* one network */
    ck_assert(origin("2001:db8::1").key != origin("2001:db8:0:1::1").key);
    ck_assert(origin("2001:db8::1").key != origin("32.1.13.184").key); /* the same bytes */
    ck_assert(origin("2001:db8:ffff:ffff::1").key != origin("32.1.13.184").key);
    ck_assert(origin("0.0.0.0").key && origin("fe80::1").key);
}
END_TEST

START_TEST(test_origins_are_printed)
{
    static const char *const CASES[][2] = {{"10.0.0.1", "10.0.0.1"},
                                           {"::ffff:192.0.2.7", "192.0.2.7"},
                                           {"2001:db8:ffff:ffff:1:2:3:4", "2001:db8:ffff:ffff::/64"},
                                           {"fe80::1", "fe80::/64"},
                                           {"127.0.0.1", "here"}};
    for (unsigned i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        char out[RPC_ORIGIN_BYTES];
        rpc_origin_print(origin(CASES[i][0]), out);
        ck_assert_str_eq(out, CASES[i][1]);
    }
}
END_TEST

START_TEST(test_waste_of_all_from_an_address_counts_together)
{
    struct rpc_origin a = origin("10.0.0.1"), b = origin("10.0.0.2"), here = origin("127.0.0.1");
    for (int i = 0; i < RPC_WASTE_MOST; i++) {
        ck_assert(!rpc_senders_waste(&senders, a, 1, now));
        ck_assert(!rpc_senders_waste(&senders, here, RPC_WASTE_MOST + 1, now));
    }
    ck_assert(!rpc_senders_waste(&senders, b, 1, now));
    ck_assert(rpc_senders_waste(&senders, a, 1, now));
    ck_assert(!rpc_senders_waste(&senders, a, 1, now)); /* it begins anew */
    for (int s = 0; s < 10; s++) {                      /* slowly, as much as it likes */
        now += NS_PER_S + 1;
        ck_assert(!rpc_senders_waste(&senders, b, RPC_WASTE_MOST, now));
    }
}
END_TEST

START_TEST(test_an_address_waits_longer_for_each_flood)
{
    struct rpc_origin a = origin("10.0.0.1"), here = origin("127.0.0.1");
    uint64_t wait = RPC_FLOOD_WAIT_MS * NS_PER_MS, longest = wait << RPC_FLOOD_DOUBLINGS;
    rpc_senders_flood(&senders, here, now);
    ck_assert(!rpc_senders_must_wait(&senders, here, now));
    for (int i = 0; i < RPC_FLOOD_DOUBLINGS + 3; i++, wait = wait < longest ? 2 * wait : longest) {
        ck_assert(!rpc_senders_must_wait(&senders, a, now));
        rpc_senders_flood(&senders, a, now);
        ck_assert(rpc_senders_must_wait(&senders, a, now + wait - 1));
        ck_assert(!rpc_senders_must_wait(&senders, a, now + wait));
        now += wait;
    }
    now += RPC_FLOOD_MEMORY_MS * NS_PER_MS;
    rpc_senders_flood(&senders, a, now); /* it is forgotten */
    ck_assert(!rpc_senders_must_wait(&senders, a, now + RPC_FLOOD_WAIT_MS * NS_PER_MS));
}
END_TEST

START_TEST(test_those_that_wait_make_room_last)
{
    struct rpc_origin flooding = origin("10.1.0.1");
    char address[32];
    rpc_senders_flood(&senders, flooding, now);
    for (int i = 0; i < 3 * RPC_SENDERS; i++) {
        snprintf(address, sizeof(address), "10.2.%d.%d", i / 250, i % 250);
        rpc_senders_waste(&senders, origin(address), 1, ++now);
    }
    ck_assert(rpc_senders_must_wait(&senders, flooding, now));
    for (int i = 0; i < 3 * RPC_SENDERS; i++) { /* all that there is room for wait */
        snprintf(address, sizeof(address), "10.3.%d.%d", i / 250, i % 250);
        rpc_senders_flood(&senders, origin(address), ++now);
    }
    ck_assert(!rpc_senders_must_wait(&senders, flooding, now));
    ck_assert(rpc_senders_must_wait(&senders, origin(address), now));
}
END_TEST

START_TEST(test_calls_are_paced)
{
    struct rpc_origin a = origin("10.0.0.1"), b = origin("10.0.0.2"), here = origin("127.0.0.1");
    const uint64_t gap = NS_PER_S / RPC_PACED_CALLS;
    for (int i = 0; i < RPC_PACED_CALLS; i++)
        ck_assert(rpc_senders_pace(&senders, a, now) == now);
    uint64_t before = now, most = now + RPC_PACED_WAIT_MS * NS_PER_MS, n = 0, begins;
    while ((begins = rpc_senders_pace(&senders, a, now)) != UINT64_MAX) { /* one after the other */
        ck_assert_msg(begins <= before + gap && begins >= before && begins <= most, "%" PRIu64, n);
        before = begins;
        n++;
        ck_assert(rpc_senders_pace(&senders, here, now) == now);
    }
    ck_assert_msg(n * gap >= RPC_PACED_WAIT_MS * NS_PER_MS && n * gap <= RPC_PACED_WAIT_MS * NS_PER_MS + 2 * gap,
                  "%" PRIu64, n);
    ck_assert(rpc_senders_pace(&senders, b, now) == now);
    now += gap + 1; /* those that were refused take no time */
    ck_assert(rpc_senders_pace(&senders, a, now) <= most + gap + 1);
    for (int i = 0; i < 10 * RPC_PACED_CALLS; i++, now += gap) /* who keeps to the rate never waits */
        ck_assert(rpc_senders_pace(&senders, b, now) == now);
}
END_TEST

START_TEST(test_calls_of_an_address_are_held_until_others_were_answered)
{
    struct rpc_origin a = origin("10.0.0.1"), here = origin("127.0.0.1");
    const uint64_t wait = RPC_CREDIT_WAIT_MS * NS_PER_MS, gap = NS_PER_S / RPC_CREDIT_RATE;
    for (int i = 0; i < RPC_CREDIT_FIRST; i++)
        ck_assert(rpc_senders_credit(&senders, a, now) == now);
    for (int i = 0; i < 3; i++)
        ck_assert(rpc_senders_credit(&senders, a, now) == now + wait);
    rpc_senders_answered(&senders, a, now);
    for (int i = 0; i < RPC_CREDIT_EACH; i++)
        ck_assert(rpc_senders_credit(&senders, a, now) == now);
    ck_assert(rpc_senders_credit(&senders, a, now) == now + wait);
    for (int i = 0; i < 2 * RPC_CREDIT_MOST; i++) {
        rpc_senders_answered(&senders, a, now);
        ck_assert(rpc_senders_credit(&senders, here, now) == now);
    }
    for (int i = 0; i < RPC_CREDIT_MOST; i++)
        ck_assert(rpc_senders_credit(&senders, a, now) == now);
    for (int i = 0; i < RPC_CREDIT_EACH; i++)
        rpc_senders_credit(&senders, a, now);
    ck_assert(rpc_senders_credit(&senders, a, now) == now + wait);
    rpc_senders_answered(&senders, a, now);
    rpc_senders_flood(&senders, a, now); /* all trust is gone, and others come one after the other */
    for (uint64_t i = 0; i * gap <= RPC_PACED_WAIT_MS * NS_PER_MS; i++)
        ck_assert(rpc_senders_credit(&senders, a, now) == now + i * gap);
    ck_assert(rpc_senders_credit(&senders, a, now) == UINT64_MAX);
    rpc_senders_answered(&senders, a, now);
    ck_assert(rpc_senders_credit(&senders, a, now) == now);
    now += (RPC_FLOOD_WAIT_MS + RPC_FLOOD_MEMORY_MS) * NS_PER_MS;
    for (int i = 0; i < RPC_CREDIT_EACH; i++)
        rpc_senders_credit(&senders, a, now);
    ck_assert(rpc_senders_credit(&senders, a, now) == now + wait);
}
END_TEST

START_TEST(test_an_address_is_a_strangers_until_a_call_is_answered)
{
    struct rpc_origin a = origin("10.0.0.1"), here = origin("127.0.0.1");
    ck_assert(rpc_senders_is_stranger(&senders, a));
    rpc_senders_credit(&senders, a, now);
    for (uint32_t i = 1; i < 4; i++) {
        rpc_senders_flood(&senders, a, now);
        ck_assert(rpc_senders_is_stranger(&senders, a) && rpc_senders_floods(&senders, a, now) == i);
    }
    rpc_senders_answered(&senders, a, now);
    ck_assert(!rpc_senders_is_stranger(&senders, a) && rpc_senders_floods(&senders, a, now) == 3);
    ck_assert(!rpc_senders_is_stranger(&senders, here) && !rpc_senders_floods(&senders, here, now));
}
END_TEST

START_TEST(test_after_a_flood_less_waste_is_one)
{
    struct rpc_origin a = origin("10.0.0.1");
    for (int floods = 0; floods < RPC_FLOOD_DOUBLINGS; floods++, now += 2 * NS_PER_S) {
        for (int i = 0; i < RPC_WASTE_MOST >> floods; i++)
            ck_assert(!rpc_senders_waste(&senders, a, 1, now));
        ck_assert(rpc_senders_waste(&senders, a, 1, now));
        rpc_senders_flood(&senders, a, now);
    }
}
END_TEST

int main(void)
{
    Suite *s = suite_create("rpc senders");
    TCase *tc = tcase_create("senders");
    tcase_add_test(tc, test_origins);
    tcase_add_test(tc, test_origins_are_printed);
    tcase_add_test(tc, test_waste_of_all_from_an_address_counts_together);
    tcase_add_test(tc, test_an_address_waits_longer_for_each_flood);
    tcase_add_test(tc, test_those_that_wait_make_room_last);
    tcase_add_test(tc, test_calls_are_paced);
    tcase_add_test(tc, test_calls_of_an_address_are_held_until_others_were_answered);
    tcase_add_test(tc, test_after_a_flood_less_waste_is_one);
    tcase_add_test(tc, test_an_address_is_a_strangers_until_a_call_is_answered);
    suite_add_tcase(s, tc);
    return tap_main(s);
}
