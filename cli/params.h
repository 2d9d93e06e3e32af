/*
 * The options of a request on the command line: those of the one table of parameters
 * (proto/ask/ask_params.h), the same in every command.
 *
 * A command puts a struct cli_params into its values and makes its option table with cli_params_table().
 */
#pragma once

#include "cli/cli.h"
#include "proto/ask/ask_params.h"

struct cli_params {
    const char *texts[ASK_N_PARAMS]; /* as given; NULL: not given */
    bool switches[ASK_N_PARAMS];
    json_t *given; /* object of what was given, by cli_params_read */
};

/*
 * The command's own rows, then those of requests. A row of the command goes before a parameter of the same
 * name. `at` is the offset of the struct cli_params in the command's values. Free with free(); names are
 * within the allocation.
 */
struct option *cli_params_table(const struct option *own, size_t at);

/* Reads and checks what was given; false: said why, exit code 2. Free with cli_params_free. */
bool cli_params_read(const char *command, struct cli_params *p);
void cli_params_free(struct cli_params *p);

/*
 * Adds the parameters that were given to a request that lacks them: what the request says goes first. With
 * only_fitting those are left out that have no meaning for this kind of prompt.
 */
void cli_params_add(const struct cli_params *p, json_t *request, bool only_fitting);
