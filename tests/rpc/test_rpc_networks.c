/* Lists of networks, as options give them, and addresses as text. */
#include <arpa/inet.h>
#include <netinet/in.h>

#include "proto/rpc/rpc_networks.h"
#include "tests/tap.h"

static struct sockaddr_storage address_of(const char *text)
{
    struct sockaddr_storage a = {0};
    if (inet_pton(AF_INET, text, &((struct sockaddr_in *)&a)->sin_addr) == 1)
        a.ss_family = AF_INET;
    else if (inet_pton(AF_INET6, text, &((struct sockaddr_in6 *)&a)->sin6_addr) == 1)
        a.ss_family = AF_INET6;
    return a;
}

static bool have(const struct rpc_networks *n, const char *address)
{
    const struct sockaddr_storage a = address_of(address);
    return rpc_networks_have(n, &a);
}

START_TEST(test_networks_have_their_addresses)
{
    static const struct {
        const char *list, *in, *out;
    } CASES[] = {
        {"10.0.0.7", "10.0.0.7", "10.0.0.6"},
        {"10.0.0.7", "::ffff:10.0.0.7", "::10.0.0.7"},
        {"::ffff:10.0.0.0/104", "10.9.9.9", "11.0.0.0"},
        {"10.1.2.3/8", "10.255.0.1", "11.0.0.1"},
        {"10.0.0.0/9", "10.127.255.255", "10.128.0.0"},
        {"0.0.0.0/0", "255.255.255.255", "2001:db8::1"},
        {"::/0", "10.0.0.1", "a unix socket"},
        {"2001:db8::/32", "2001:db8:ffff::1", "2001:db9::"},
        {"2001:db8::/33", "2001:db8:7fff::", "2001:db8:8000::"},
        {"2001:db8::1", "2001:db8::1", "2001:db8::2"},
        {"192.0.2.1, 10.0.0.0/8,::1", "::1", "192.0.2.2"},
        {"192.0.2.1,10.0.0.0/8 ", "10.0.0.1", "::1"},
    };
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        struct rpc_networks n;
        struct td_error e = {""};
        ck_assert_msg(rpc_networks_read("--option", CASES[i].list, &n, &e) == TD_OK, "%s: %s", CASES[i].list, e.text);
        ck_assert_msg(have(&n, CASES[i].in) && !have(&n, CASES[i].out), "%s", CASES[i].list);
        rpc_networks_free(&n);
    }
}
END_TEST

START_TEST(test_what_is_no_network_is_named)
{
    static const char *const WRONG[] = {"10.0.0",
                                        "10.0.0.256",
                                        "10.0.0.1/33",
                                        "10.0.0.1/",
                                        "10.0.0.1/-1",
                                        "10.0.0.1/ 8",
                                        "10.0.0.1/8x",
                                        "2001:db8::/129",
                                        "10.0.0.1,,::1",
                                        "10.0.0.1,",
                                        ",",
                                        "host",
                                        "10.0.0.1 10.0.0.2",
                                        "10.0.0.1:80",
                                        "10.0.0.1/99999999999999999999",
                                        "1111:2222:3333:4444:5555:6666:7777:8888:9999:aaaa:bbbb"};
    for (size_t i = 0; i < sizeof(WRONG) / sizeof(WRONG[0]); i++) {
        struct rpc_networks n;
        struct td_error e = {""};
        enum td_status s = rpc_networks_read("--option", WRONG[i], &n, &e);
        ck_assert_msg(s == TD_ERR_INVALID && !n.list && !n.n && !strncmp(e.text, "--option: '", 11), "%s: %s", WRONG[i],
                      e.text);
    }
}
END_TEST

START_TEST(test_no_list_has_nothing)
{
    struct rpc_networks n;
    ck_assert_int_eq(rpc_networks_read("--option", NULL, &n, NULL), TD_OK);
    ck_assert(!have(&n, "10.0.0.1"));
    ck_assert_int_eq(rpc_networks_read("--option", "", &n, NULL), TD_OK);
    ck_assert(!have(&n, "10.0.0.1") && !n.list);
}
END_TEST

START_TEST(test_addresses_are_written_as_grpc_writes_them)
{
    static const char *const CASES[][2] = {
        {"10.0.0.7", "10.0.0.7:4242"},
        {"::ffff:10.0.0.7", "10.0.0.7:4242"},
        {"2001:db8::1", "[2001:db8::1]:4242"},
        {"no address", "as it was"},
    };
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        char out[64] = "as it was";
        struct sockaddr_storage a = address_of(CASES[i][0]);
        ((struct sockaddr_in *)&a)->sin_port = htons(4242); /* at the same place in both */
        rpc_address_print(&a, out, sizeof(out));
        ck_assert_str_eq(out, CASES[i][1]);
    }
}
END_TEST

int main(void)
{
    Suite *s = suite_create("rpc networks");
    TCase *tc = tcase_create("networks");
    tcase_add_test(tc, test_networks_have_their_addresses);
    tcase_add_test(tc, test_what_is_no_network_is_named);
    tcase_add_test(tc, test_no_list_has_nothing);
    tcase_add_test(tc, test_addresses_are_written_as_grpc_writes_them);
    suite_add_tcase(s, tc);
    return tap_main(s);
}
