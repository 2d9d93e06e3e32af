/*
 * Functions that the subcommands of the tandem command share.
 *
 * A subcommand is one function with its own option table. Options come from flags, the environment
 * (TANDEM_COMMAND_NAME) and --config. The function returns the exit code: 0 done, 1 failed, 2 wrong use.
 * Answers go to stdout, all other text to stderr. A command that prints a table has --json, too.
 */
#pragma once

#include <jansson.h>
#include <stdbool.h>

#include "base/mem.h"
#include "base/options.h"
#include "proto/ask/ask_text.h"
#include "proto/rpc/rpc.h"
#include "tandem.pb-c.h"

int cli_up(int argc, char **argv);
int cli_down(int argc, char **argv);
int cli_generate(int argc, char **argv);
int cli_chat(int argc, char **argv);
int cli_status(int argc, char **argv);
int cli_health(int argc, char **argv);
int cli_audit(int argc, char **argv);
int cli_tokenize(int argc, char **argv);
int cli_bench(int argc, char **argv); /* in bench/bench.c, which only this program links */
int cli_explain(int argc, char **argv);
int cli_replay(int argc, char **argv);
int cli_simulate(int argc, char **argv);
int cli_trace(int argc, char **argv);
int cli_compare(int argc, char **argv);
int cli_scale(int argc, char **argv);
int cli_drain(int argc, char **argv);
int cli_store(int argc, char **argv);
int cli_cache(int argc, char **argv);
int cli_key(int argc, char **argv);
int cli_eval(int argc, char **argv);

/* Parses a subcommand's options. False: the caller returns *exit_out at once (help, or a printed error). */
bool cli_options(const char *command, const char *usage, const char *about, const struct option *table, int argc,
                 char **argv, void *values, const char **rest_out, int *n_rest_out, int *exit_out);

/* The same with all of `options` but its program, env_prefix and man_section, which follow from `command`:
 * for a command whose first word is one of a list. */
bool cli_options_words(const char *command, const struct options *options, int argc, char **argv, void *values,
                       const char **rest_out, int *n_rest_out, int *exit_out);

/* Prints "tandem COMMAND: text" on stderr. Returns 1. */
int cli_fail(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The same for wrong use; adds "; see tandem COMMAND --help". Returns 2. */
int cli_usage(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* True if n is from `least` to `most`. Else it prints that `what` is missing, or the first word too many, and
 * sets *exit_out to 2. */
bool cli_words(const char *command, const char *what, const char **words, int n, int least, int most, int *exit_out);

/* Returns option if it is given, else $TANDEM_ROUTER, else the default port on this machine. */
#define CLI_DEFAULT_ROUTER "127.0.0.1:7470"
#define CLI_DEFAULT_HTTP   "127.0.0.1:8000"
const char *cli_router(const char *option);
/* How commands reach a router with TLS: $TANDEM_TLS_CA (without it: plain text), _CERT, _KEY and _NAME. The
 * texts are the environment's. */
struct rpc_tls_files cli_tls(void);
/* api_key: an option; NULL: $TANDEM_API_KEY, if that is set. Returns NULL if the reason was printed. */
struct rpc_client *cli_connect(const char *command, const char *target, const char *api_key);
#define CLI_API_KEY_OPTION(offset)                                                                                     \
    {                                                                                                                  \
        "api-key", OPT_SECRET, offset, NULL, "TEXT", 0, 0, "API key; better set in the environment (TANDEM_API_KEY)"   \
    }

/* Prints why a call to the router failed, and what to try if nothing answers there. Returns 1. */
int cli_rpc_fail(const char *command, const char *router, enum rpc_code code, const char *text);

/* What ListModels tells about the model of a router. */
struct cli_model {
    uint32_t vocab_size, context_tokens; /* context_tokens = 0: no worker is up yet */
    bool takes_chats;
};
/* RPC_PERMISSION_DENIED: the key is not for the model. */
enum rpc_code cli_ask_model(struct rpc_client *client, uint32_t timeout_ms, struct cli_model *out, struct td_error *e);

/* Waits until the router knows its model, which it does once a worker is up. Says after a second on stderr
 * that it waits; after wait_ms it prints why the cluster is not ready and returns false. */
bool cli_wait_ready(const char *command, struct rpc_client *client, const char *router, int64_t wait_ms);

/* Reads a prompt from the command line or from standard input. False: the reason was printed (exit code 2);
 * an empty prompt is refused. */
bool cli_read_prompt(const char *command, const char **rest, int n_rest, struct bytes *out);
/* Makes the request for this prompt (cli/ask.h). With `chat` the prompt is a user's turn, if the model takes
 * chats. NULL: the reason was printed. */
json_t *cli_prompt_request(const char *command, struct rpc_client *client, const struct bytes *prompt, bool chat);

/* Reads a line of any length from stdin, without its end; false at end of input. Free with bytes_free(). */
bool cli_read_line(struct bytes *line);
void cli_print_json(json_t *object); /* prints one line on stdout and flushes it; takes the reference */
