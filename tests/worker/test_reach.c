/* The addresses that routers and peers are told, for every way to give --listen. */
#include <string.h>

#include "tests/tap.h"
#include "worker/reach.h"

static const struct {
    struct reach_config config;
    const char *xfer_listen;         /* NULL: refused */
    const char *rpc_listens, *rpc;   /* addresses told to routers */
    const char *xfer_listens, *xfer; /* addresses told to peers */
} CASES[] = {
    {{"127.0.0.1:0", NULL, NULL}, "127.0.0.1:0", "127.0.0.1:70", "127.0.0.1:70", "127.0.0.1:71", "127.0.0.1:71"},
    {{"10.0.0.5:70", NULL, NULL}, "10.0.0.5:0", "10.0.0.5:70", "10.0.0.5:70", "10.0.0.5:71", "10.0.0.5:71"},
    {{"10.0.0.5:70", "10.1.0.5:0", NULL}, "10.1.0.5:0", "10.0.0.5:70", "10.0.0.5:70", "10.1.0.5:71", "10.1.0.5:71"},
    {{"10.0.0.5:70", NULL, "a.example"}, "10.0.0.5:0", "10.0.0.5:70", "a.example:70", "10.0.0.5:71", "a.example:71"},
    {{"0.0.0.0:70", NULL, "a.example:9"}, "0.0.0.0:0", "0.0.0.0:70", "a.example:9", "0.0.0.0:71", "a.example:71"},
    {{":0", NULL, "10.0.0.5"}, ":0", "0.0.0.0:70", "10.0.0.5:70", "0.0.0.0:71", "10.0.0.5:71"},
    {{"0.0.0.0:0", "10.1.0.5:0", "h"}, "10.1.0.5:0", "0.0.0.0:70", "h:70", "10.1.0.5:71", "10.1.0.5:71"},
    {{"10.0.0.5:0", "0.0.0.0:0", "h:9"}, "0.0.0.0:0", "10.0.0.5:70", "h:9", "0.0.0.0:71", "h:71"},
    {{"[::]:0", NULL, "[fd00::5]:9"}, "[::]:0", "[::]:70", "[fd00::5]:9", "[::]:71", "[fd00::5]:71"},
    {{"[::]:0", NULL, "fd00::5"}, "[::]:0", "[::]:70", "[fd00::5]:70", "[::]:71", "[fd00::5]:71"},
    {{"unix:/run/w", NULL, NULL}, "127.0.0.1:0", "unix:/run/w", "unix:/run/w", "127.0.0.1:71", "127.0.0.1:71"},
    {{"*:0", NULL, "10.0.0.5"}, ":0", "[::]:70", "10.0.0.5:70", "0.0.0.0:71", "10.0.0.5:71"},
    {{"10.0.0.5:70", "*:71", "h"}, ":71", "10.0.0.5:70", "h:70", "0.0.0.0:71", "h:71"},
    {.config = {"*:70", NULL, NULL}},
    {.config = {"0.0.0.0:70", NULL, NULL}},
    {.config = {"[::]:70", NULL, NULL}},
    {.config = {":70", NULL, NULL}},
    {.config = {"10.0.0.5:70", "0.0.0.0:71", NULL}},
    {.config = {"10.0.0.5:70", NULL, "0.0.0.0:70"}},
};

START_TEST(test_reach_tells_what_others_can_connect_to)
{
    struct td_error e = {""};
    char out[REACH_BYTES];
    enum td_status s = reach_listen(&CASES[_i].config, out, &e);
    if (!CASES[_i].xfer_listen) {
        ck_assert_int_eq(s, TD_ERR_INVALID);
        ck_assert_ptr_nonnull(strstr(e.text, "--advertise"));
        return;
    }
    ck_assert_int_eq(s, TD_OK);
    ck_assert_str_eq(out, CASES[_i].xfer_listen);
    reach_rpc(&CASES[_i].config, CASES[_i].rpc_listens, out);
    ck_assert_str_eq(out, CASES[_i].rpc);
    reach_xfer(&CASES[_i].config, CASES[_i].xfer_listens, out);
    ck_assert_str_eq(out, CASES[_i].xfer);
}

START_TEST(test_reach_refuses_what_does_not_fit)
{
    char name[400], out[REACH_BYTES];
    struct td_error e = {""};
    memset(name, 'a', sizeof(name));
    name[sizeof(name) - 1] = 0;
    ck_assert_int_eq(reach_listen(&(struct reach_config){"h:0", NULL, name}, out, &e), TD_ERR_INVALID);
    ck_assert_int_eq(reach_listen(&(struct reach_config){name, NULL, NULL}, out, &e), TD_ERR_INVALID);
    ck_assert_int_eq(reach_listen(&(struct reach_config){"h:0", name, NULL}, out, &e), TD_ERR_INVALID);
}

int main(void)
{
    Suite *s = suite_create("reach");
    TCase *t = tcase_create("reach");
    tcase_add_loop_test(t, test_reach_tells_what_others_can_connect_to, 0, sizeof(CASES) / sizeof(CASES[0]));
    tcase_add_test(t, test_reach_refuses_what_does_not_fit);
    suite_add_tcase(s, t);
    return tap_main(s);
}
