#include <stdlib.h>

#include "base/process.h"
#include "kvstore/kvstore.h"

static void stop(void *store)
{
    kvstore_stop(store);
}

static void reload(void *store)
{
    kvstore_reload(store);
}

int main(int argc, char **argv)
{
    struct kvstore_config config = {.hub = NULL};
    struct td_error e = {""};
    struct kvstore *s = NULL;
    char *strings;
    enum options_action action;
    const struct options o = {
        .program = "tandem-kvstore",
        .man_section = 8,
        .usage = "--model DIR [--dir DIR] [options]",
        .about = "Keeps KV blocks of a tandem cluster in memory and on SSD. Workers and routers connect "
                 "to it; SIGTERM writes what is not yet on SSD and ends it.",
        .env_prefix = "TANDEM_KVSTORE",
        .table = KVSTORE_OPTIONS};
    enum td_status status = options_parse(&o, argc, argv, &config.options, NULL, NULL, &strings, &action, &e);
    if (!status && action == OPTIONS_RUN) {
        process_keep_private();
        struct process_signals *signals = process_signals_open(o.program);
        status = kvstore_open(&config, &s, &e);
        if (!status) {
            process_on_signals(signals, stop, reload, s);
            process_announce(kvstore_address(s));
            status = kvstore_run(s);
        }
        process_signals_close(signals);
        kvstore_close(s);
    }
    free(strings);
    return process_exit_status(o.program, status, e.text);
}
