/*
 * The parameters of a request as options of a command. They come from the one table of parameters
 * (proto/ask/ask_params.h) and are the same in every command.
 *
 * A command has a struct cli_params among its values, and makes its option table with cli_params_table().
 */
#pragma once

#include "cli/cli.h"
#include "proto/ask/ask_params.h"

struct cli_params {
    const char *texts[ASK_N_PARAMS]; /* as given on the command line; NULL: not given */
    bool switches[ASK_N_PARAMS];
    json_t *given; /* object with the given parameters; made by cli_params_read() */
};

/*
 * Returns the command's own rows, then those of the parameters. A row of the command takes precedence over a
 * parameter of the same name. `at` is the offset of the struct cli_params in the command's values. Free with
 * free(); the names are in the same allocation.
 */
struct option *cli_params_table(const struct option *own, size_t at);

/* Reads and checks the given parameters. False: the reason was printed (exit code 2). Free with
 * cli_params_free(), in both cases. */
bool cli_params_read(const char *command, struct cli_params *p);
void cli_params_free(struct cli_params *p);

/* Adds the given parameters to a request that lacks them: a member of the request takes precedence. With
 * only_fitting, parameters that make no sense for this kind of prompt are left out. */
void cli_params_add(const struct cli_params *p, json_t *request, bool only_fitting);
