#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/man.h"
#include "base/process.h"
#include "cli/cli.h"

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *about;
} COMMANDS[] = {
    {"up", cli_up, "start a cluster on this machine"},
    {"down", cli_down, "stop that cluster"},
    {"generate", cli_generate, "answer a prompt, or many from standard input"},
    {"chat", cli_chat, "talk to the model"},
    {"status", cli_status, "show workers, pages and moved bytes"},
    {"health", cli_health, "ask processes whether they answer and serve"},
    {"scale", cli_scale, "set the number of workers of each role"},
    {"drain", cli_drain, "let a worker finish its work and end"},
    {"explain", cli_explain, "show what the router weighed for a request"},
    {"replay", cli_replay, "send a trace to a cluster, and see how it did"},
    {"compare", cli_compare, "compare two reports: what changed, and whether it is noise"},
    {"simulate", cli_simulate, "run a trace against a cluster in virtual time"},
    {"trace", cli_trace, "inspect, cut, convert and make request traces"},
    {"audit", cli_audit, "account for every page and block; exit code 1 if one is missing"},
    {"cache", cli_cache, "pin, release or flush the cached blocks of a prompt"},
    {"key", cli_key, "make an API key for a tenant"},
    {"tokenize", cli_tokenize, "turn text into token ids and back"},
    {"eval", cli_eval, "print how well the model predicts a text"},
    {"store", cli_store, "inspect, check and compact the directory of a store that is not running"},
    {"bench", cli_bench, "measure kernels, engine, transfer, store and more against this machine's limits"},
};
enum { N_COMMANDS = sizeof(COMMANDS) / sizeof(COMMANDS[0]) };

/* tests/cluster/test_usage.py runs each of them. */
static const char *const EXAMPLES[] = {
    "tandem up --model DIR --prefill 2 --decode 2",
    "tandem generate --temperature 0 --max-tokens 100 \"Why is the sky blue?\"",
    "tandem generate --jsonl --concurrency 16 < requests.jsonl",
    "tandem chat --system \"Answer in one sentence.\"",
    "tandem status --wait 30",
    "tandem health 127.0.0.1:7470",
    "tandem scale prefill=4 decode=6",
    "tandem cache pin --ttl 60m --tenant acme \"A prompt that comes often\"",
    "tandem replay TRACE --rate 2 --ttft-ms 1000 --tpot-ms 50 --output a.json",
    "tandem simulate TRACE --prefill 8 --decode 8 --ttft-ms 2000 --tpot-ms 30",
    "tandem trace synth --requests 1000 --output made.jsonl",
    "tandem key acme --file keys.json",
    "tandem eval README.md",
    "tandem store verify DIR",
};
enum { N_EXAMPLES = sizeof(EXAMPLES) / sizeof(EXAMPLES[0]) };

static void usage(FILE *f)
{
    fputs("usage: tandem COMMAND [options]\n\n", f);
    for (int i = 0; i < N_COMMANDS; i++)
        fprintf(f, "  %-10s %s\n", COMMANDS[i].name, COMMANDS[i].about);
    fputs("\nExamples\n", f);
    for (int i = 0; i < N_EXAMPLES; i++)
        fprintf(f, "  %s\n", EXAMPLES[i]);
    fputs("\ntandem help COMMAND, or tandem COMMAND --help, lists its options.\n", f);
}

static const char *const SERVERS[] = {"tandem-router", "tandem-gateway", "tandem-prefill", "tandem-decode",
                                      "tandem-kvstore"};
enum { N_SERVERS = sizeof(SERVERS) / sizeof(SERVERS[0]) };

static void print_man(FILE *f)
{
    struct option_word words[N_COMMANDS + 1] = {{0}};
    for (int i = 0; i < N_COMMANDS; i++)
        words[i] = (struct option_word){.name = COMMANDS[i].name, .about = COMMANDS[i].about};
    const struct options o = {.program = "tandem",
                              .usage = "COMMAND [options]",
                              .about =
                                  "Serves large language models from separate prefill and decode workers. Each command "
                                  "has a page of its own, such as tandem-up(1).",
                              .words = words,
                              .word = "COMMAND",
                              .man_section = 1};
    options_print_man(&o, f);
    man_heading(f, "EXAMPLES");
    for (int i = 0; i < N_EXAMPLES; i++)
        man_example(f, EXAMPLES[i]);
    man_heading(f, "SEE ALSO");
    for (int i = 0; i < N_COMMANDS; i++) {
        char page[64];
        snprintf(page, sizeof(page), "tandem %s", COMMANDS[i].name);
        man_reference(f, page, 1, false);
    }
    for (int i = 0; i < N_SERVERS; i++)
        man_reference(f, SERVERS[i], 8, i == N_SERVERS - 1);
}

static int find_command(const char *name)
{
    for (int i = 0; i < N_COMMANDS; i++)
        if (!strcmp(name, COMMANDS[i].name))
            return i;
    return -1;
}

/* Output may have met a full disk, so an exit code of 0 is only returned if stdout could be flushed. */
static int flush_output(int exit_code)
{
    if (!fflush(stdout) && !ferror(stdout))
        return exit_code;
    fprintf(stderr, "tandem: standard output can't be written\n");
    return exit_code ? exit_code : 1;
}

static int no_command(const char *name)
{
    fprintf(stderr, "tandem: '%s': no such command; tandem help lists them\n", name);
    return 2;
}

int main(int argc, char **argv)
{
    static char help_flag[] = "--help"; /* argv is not const */
    /* A write to a closed pipe or a full disk fails then, and flush_output() or the command says so. */
    process_default_fatal_signals();
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
    const char *name = argc > 1 ? argv[1] : NULL;
    bool help = name && (!strcmp(name, "--help") || !strcmp(name, "-h") || !strcmp(name, "help"));
    if (!name || (help && argc == 2)) {
        usage(name ? stdout : stderr);
        return flush_output(name ? 0 : 2);
    }
    if (!strcmp(name, "--version")) {
        printf("tandem %s\n", TANDEM_VERSION);
        return flush_output(0);
    }
    if (!strcmp(name, "--help=man")) {
        print_man(stdout);
        return flush_output(0);
    }
    int command = find_command(help ? argv[2] : name);
    if (command < 0)
        return no_command(help ? argv[2] : name);
    if (help)
        return flush_output(COMMANDS[command].run(2, (char *[]){argv[2], help_flag, NULL}));
    return flush_output(COMMANDS[command].run(argc - 1, argv + 1));
}
