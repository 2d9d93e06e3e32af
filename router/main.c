#include <stdlib.h>

#include "base/process.h"
#include "router/router.h"

static void stop(void *router)
{
    router_stop(router);
}

int main(int argc, char **argv)
{
    struct router_options values = {0};
    struct td_error e = {{0}};
    struct router *r = NULL;
    char *strings;
    enum options_action action;
    const struct options o = {.program = "tandem-router",
                              .usage = "--model DIR --workers ADDR,... [options]",
                              .about = "The router of a tandem cluster: the client API. SIGTERM drains it.",
                              .man_section = 8,
                              .env_prefix = "TANDEM_ROUTER",
                              .table = ROUTER_OPTIONS};
    enum td_status s = options_parse(&o, argc, argv, &values, NULL, NULL, &strings, &action, &e);
    if (!s && action == OPTIONS_RUN) {
        process_keep_private();
        struct process_signals *signals = process_signals_open(o.program);
        s = router_open(&values, &r, &e);
        if (!s) {
            process_on_signals(signals, stop, NULL, r);
            process_announce(router_address(r));
            s = router_run(r);
        }
        process_signals_close(signals);
        router_close(r);
    }
    free(strings);
    return process_exit_status(o.program, s, e.text);
}
