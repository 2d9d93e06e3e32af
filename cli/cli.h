/*
 * The tandem command: what its subcommands share.
 *
 * A subcommand is one function with its own option table, which is read from flags, TANDEM_COMMAND_NAME and
 * --config; it returns the exit code: 0 done, 1 failed, 2 wrong use. Answers go to stdout, words to stderr.
 * Tables have --json beside them.
 */
#pragma once

#include <jansson.h>
#include <stdbool.h>

#include "base/mem.h"
#include "base/options.h"
#include "proto/rpc/rpc.h"
#include "tandem.pb-c.h"

int cli_up(int argc, char **argv);
int cli_down(int argc, char **argv);
int cli_generate(int argc, char **argv);
int cli_chat(int argc, char **argv);
int cli_status(int argc, char **argv);
int cli_audit(int argc, char **argv);
int cli_tokenize(int argc, char **argv);
int cli_bench(int argc, char **argv); /* bench/bench.c, which is linked into this program alone */
int cli_explain(int argc, char **argv);
int cli_replay(int argc, char **argv);
int cli_simulate(int argc, char **argv);
int cli_trace(int argc, char **argv);
int cli_compare(int argc, char **argv);
int cli_scale(int argc, char **argv);
int cli_drain(int argc, char **argv);
int cli_store(int argc, char **argv);
int cli_cache(int argc, char **argv);

/* Parses a subcommand's options; *exit_out is set when the caller should return it at once (help, or an error
 * printed). */
bool cli_options(const char *command, const char *usage, const char *about, const struct option *table, int argc,
                 char **argv, void *values, const char **rest_out, int *n_rest_out, int *exit_out);

/* Prints "tandem COMMAND: text" on stderr; returns 1. */
int cli_fail(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The same for wrong use, with the command that tells the right one; returns 2. */
int cli_usage(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Whether there are `least` to `most` words that are no options; else says which `what` is missing or which
 * word is too many: exit code 2. */
bool cli_words(const char *command, const char *what, const char **words, int n, int least, int most, int *exit_out);

/* --router, else $TANDEM_ROUTER, else the default port on this machine. */
#define CLI_DEFAULT_ROUTER "127.0.0.1:7470"
const char *cli_router(const char *option);
struct rpc_client *cli_connect(const char *command, const char *target); /* NULL: said why */

/* A call to the router that failed: says so, and what to try if nobody answers there; returns 1. */
int cli_rpc_fail(const char *command, const char *router, enum rpc_code code, const char *text);

/* Waits until the router knows its model, which it does when a worker is up. False, and said why, after
 * wait_ms. */
bool cli_wait_ready(const char *command, struct rpc_client *client, const char *router, int64_t wait_ms);

/* A prompt from the command line, or from standard input, not empty. False: said why, exit code 2. */
bool cli_read_prompt(const char *command, const char **rest, int n_rest, struct bytes *out);
/* The request with this prompt (cli/ask.h): a user's turn, if chat and the model takes chats. NULL: said
 * why. */
json_t *cli_prompt_request(const char *command, struct rpc_client *client, const struct bytes *prompt, bool chat);

/* A line of input of any length, without its end; false at the end of input. Free with bytes_free. */
bool cli_read_line(struct bytes *line);
void cli_print_json(json_t *object); /* one line on stdout, flushed; takes the reference */

/* Text that may not be UTF-8 as a JSON string: invalid parts become U+FFFD. */
json_t *cli_json_text(const void *data, size_t len_bytes);
