/* The RDMA card of a network device, read from a directory that looks like /sys. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "tests/tap.h"
#include "transfer/netaddr.h"

static char root[] = "/tmp/netaddr-XXXXXX";

static void make(const char *path, const char *text)
{
    char full[256];
    snprintf(full, sizeof(full), "%s/%s", root, path);
    for (char *slash = full + strlen(root) + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        mkdir(full, 0700);
        *slash = '/';
    }
    FILE *f = text ? fopen(full, "w") : NULL;
    if (!text)
        mkdir(full, 0700);
    if (f)
        fputs(text, f);
    if (f)
        fclose(f);
}

START_TEST(test_netaddr_finds_the_card_and_its_port)
{
    char out[64] = "unchanged", command[64];
    ck_assert_ptr_nonnull(mkdtemp(root));
    make("class/net/eth0/device/vendor", "0x1af4\n");
    make("class/net/ib0/device/infiniband/mlx5_3/node_type", "1: CA\n");
    make("class/net/ib0/dev_port", "1\n");
    make("class/net/roce0/device/infiniband/mlx5_bond_0", NULL);
    ck_assert(!netaddr_rdma_device(root, "eth0", out));
    ck_assert(!netaddr_rdma_device(root, "none", out));
    ck_assert_str_eq(out, "unchanged");
    ck_assert(netaddr_rdma_device(root, "ib0", out));
    ck_assert_str_eq(out, "mlx5_3:2");
    ck_assert(netaddr_rdma_device(root, "roce0", out));
    ck_assert_str_eq(out, "mlx5_bond_0:1");
    snprintf(command, sizeof(command), "rm -r %s", root);
    ck_assert_int_eq(system(command), 0);
}
END_TEST

START_TEST(test_netaddr_loopback_is_lo)
{
    struct sockaddr_storage address;
    socklen_t len;
    char device[64];
    ck_assert_int_eq(netaddr_resolve("127.0.0.1:7000", &address, &len, NULL), TD_OK);
    ck_assert(netaddr_device(&address, len, device));
    ck_assert_str_eq(device, "lo");
    ck_assert_int_eq(netaddr_resolve("no port", &address, &len, NULL), TD_ERR_INVALID);
}
END_TEST

START_TEST(test_netaddr_figures_need_no_name_service)
{
    static const char *const NUMERIC[] = {"127.0.0.1:1", "[::1]:1", ":1"}, *const NAMES[] = {"localhost:1", "a.b:1",
                                                                                             "1"};
    for (int i = 0; i < 3; i++) {
        ck_assert_msg(netaddr_is_numeric(NUMERIC[i]), "%s", NUMERIC[i]);
        ck_assert_msg(!netaddr_is_numeric(NAMES[i]), "%s", NAMES[i]);
    }
}
END_TEST

/* "" with AI_PASSIVE gives the any-address of each family, so there are several wherever there is IPv6. */
START_TEST(test_netaddr_attempts_take_the_addresses_of_a_name_in_turn)
{
    struct sockaddr_storage first, at;
    socklen_t len;
    uint32_t n = 0, n_other = 0;
    ck_assert_int_eq(netaddr_resolve(":7000", &first, &len, NULL), TD_OK);
    for (uint32_t i = 0; i < 4; i++) {
        ck_assert_int_eq(netaddr_resolve_nth(":7000", i, &at, &len, NULL), TD_OK);
        n += at.ss_family == first.ss_family;
        n_other += at.ss_family != first.ss_family;
        if (i == 0 || i == 2) /* with one or two addresses they come round again */
            ck_assert_mem_eq(&at, &first, sizeof(at));
    }
    ck_assert(n == 4 || (n == 2 && n_other == 2));
}
END_TEST

int main(void)
{
    Suite *s = suite_create("netaddr");
    TCase *tc = tcase_create("netaddr");
    tcase_set_timeout(tc, 10);
    tcase_add_test(tc, test_netaddr_finds_the_card_and_its_port);
    tcase_add_test(tc, test_netaddr_loopback_is_lo);
    tcase_add_test(tc, test_netaddr_figures_need_no_name_service);
    tcase_add_test(tc, test_netaddr_attempts_take_the_addresses_of_a_name_in_turn);
    suite_add_tcase(s, tc);
    return tap_main(s);
}
