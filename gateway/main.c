#include <stdlib.h>

#include "base/process.h"
#include "gateway/gateway.h"

static void stop(void *gateway)
{
    gateway_stop(gateway);
}

int main(int argc, char **argv)
{
    struct gateway_options values = {0};
    struct td_error e = {{0}};
    struct gateway *g = NULL;
    char *strings;
    enum options_action action;
    const struct options o = {.program = "tandem-gateway",
                              .usage = "--routers ADDR,... [options]",
                              .about = "HTTP for OpenAI clients of a tandem cluster. SIGTERM drains it.",
                              .man_section = 8,
                              .env_prefix = "TANDEM_GATEWAY",
                              .table = GATEWAY_OPTIONS};
    enum td_status s = options_parse(&o, argc, argv, &values, NULL, NULL, &strings, &action, &e);
    if (!s && action == OPTIONS_RUN) {
        process_keep_private();
        struct process_signals *signals = process_signals_open(o.program);
        s = gateway_open(&values, &g, &e);
        if (!s) {
            process_on_signals(signals, stop, NULL, g);
            process_announce(gateway_address(g));
            s = gateway_run(g);
        }
        process_signals_close(signals);
        gateway_close(g);
    }
    free(strings);
    return process_exit_status(o.program, s, e.text);
}
