#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "cli/cli.h"

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *about;
} COMMANDS[] = {
    {"up", cli_up, "start a cluster on this machine"},
    {"down", cli_down, "stop it"},
    {"generate", cli_generate, "answer a prompt, or many from standard input"},
    {"chat", cli_chat, "talk to the model"},
    {"status", cli_status, "workers, pages, bytes moved"},
    {"scale", cli_scale, "how many workers of each role there are"},
    {"drain", cli_drain, "a worker finishes and ends"},
    {"explain", cli_explain, "what the router weighed for a request"},
    {"replay", cli_replay, "send a trace to a cluster, and see how it did"},
    {"compare", cli_compare, "two reports: what changed, and whether it is noise"},
    {"simulate", cli_simulate, "what a cluster would do with a trace, in virtual time"},
    {"trace", cli_trace, "look into request traces, cut, convert and make them"},
    {"audit", cli_audit, "accounts for every page and block; exit code 1: not all are"},
    {"cache", cli_cache, "keep what is cached of a prompt for a time, or forget it"},
    {"tokenize", cli_tokenize, "text to token ids and back"},
    {"store", cli_store, "look into, check and tidy a store's directory while it does not run"},
    {"bench", cli_bench, "measure kernels, engine, transfer and store beside this machine's limits"},
};
enum { N_COMMANDS = sizeof(COMMANDS) / sizeof(COMMANDS[0]) };

static void usage(FILE *f)
{
    fputs("usage: tandem COMMAND [options]\n\n", f);
    for (int i = 0; i < N_COMMANDS; i++)
        fprintf(f, "  %-10s %s\n", COMMANDS[i].name, COMMANDS[i].about);
    fputs("\ntandem COMMAND --help lists a command's options.\n", f);
}

int main(int argc, char **argv)
{
    signal(SIGPIPE, SIG_IGN);
    const char *name = argc > 1 ? argv[1] : "";
    for (int i = 0; i < N_COMMANDS; i++)
        if (!strcmp(name, COMMANDS[i].name))
            return COMMANDS[i].run(argc - 1, argv + 1);
    if (!strcmp(name, "--version")) {
        printf("tandem %s\n", TANDEM_VERSION);
        return 0;
    }
    bool help = !strcmp(name, "--help") || !strcmp(name, "-h") || !strcmp(name, "help");
    usage(help ? stdout : stderr);
    return help ? 0 : 2;
}
