/*
 * Option tables: one table gives a program's flags, environment variables, config file keys, --help, manual
 * page (--help=man), --print-config and validation.
 *
 * Precedence: flag, then environment (TANDEM_ROLE_NAME, upper case, '-' as '_'), then config file (--config
 * FILE, a JSON object with the flags' names as keys), then default. Unknown flags and keys, malformed values
 * and values out of range are refused with one line that names the option and says what it accepts. A switch
 * takes no separate word as its value: --name=false, not --name false.
 *
 * Values are written to the caller's struct at each option's offset: const char *, bool, int64_t or double,
 * by type. Strings are borrowed from argv, the environment, the table, or *strings_out, which the caller
 * frees last.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/status.h"

enum option_type {
    OPT_STRING,
    OPT_BOOL,  /* --name, --no-name, --name=true|false */
    OPT_INT,   /* int64_t, within [min, max] */
    OPT_BYTES, /* int64_t; 512, 64K, 16M, 2G, 1T (powers of 1024) */
    OPT_MS,    /* int64_t milliseconds: 250, 250ms, 10s, 5m; fractions of a millisecond are refused */
    OPT_DOUBLE,
    OPT_CHOICE, /* const char *, one of "a|b|c" in choices */
    /* Double milliseconds, with fractions: 0 (none) or at least OPTIONS_LEAST_MS; written as OPT_MS. */
    OPT_LIMIT_MS,
    OPT_ADDRESS, /* const char *; HOST:PORT, several separated by commas; ports above 65535 are refused */
    OPT_SECRET,  /* const char *; not shown by --print-config */
};

#define OPTIONS_LEAST_MS 0.001 /* a shorter limit is probably a mistake */

struct option {
    const char *name; /* without dashes; NULL ends a table; "" makes a heading of `help` */
    enum option_type type;
    size_t offset;
    const char *fallback; /* default value as text; NULL: NULL, false or 0 */
    /* OPT_CHOICE: the choices; else the placeholder shown in --help; may be NULL. A DIR or FILE may not be
     * empty. */
    const char *choices;
    double min, max; /* bounds of numbers; both 0: any number >= 0 */
    const char *help;
};

/* What the first word after the program's name may be: a command of tandem, a kind of tandem trace. */
struct option_word {
    const char *name; /* NULL ends a list */
    const char *about;
    const struct option *table; /* options of this word alone; NULL: none */
};

struct options {
    const char *program;    /* "tandem-router" */
    const char *usage;      /* after the program's name: "[options] --model DIR" */
    const char *about;      /* one or two sentences; the first one is the manual page's summary */
    const char *env_prefix; /* "TANDEM_ROUTER"; NULL: no environment */
    const struct option *table;
    const struct option_word *words; /* NULL: none */
    const char *word;                /* what they are called, "COMMAND" */
    int man_section;                 /* 1: commands, 8: servers */
};

enum options_action {
    OPTIONS_RUN,
    OPTIONS_EXIT
}; /* EXIT: --help, --help=man, --version or --print-config was answered on stdout */

/*
 * argv[0] is skipped. Words that are not options are moved to rest_out (room for argc pointers; NULL: they
 * are refused). After "--" no word is an option. On failure error_out holds the line to print: TD_ERR_INVALID
 * is wrong use (exit status 2), TD_ERR_IO an answer that could not be written (exit status 1).
 */
enum td_status options_parse(const struct options *o, int argc, char **argv, void *values, const char **rest_out,
                             int *n_rest_out, char **strings_out, enum options_action *action_out,
                             struct td_error *error_out);

/* Prints the manual page in roff (man(7)), up to EXIT STATUS; the caller may add sections. `table` may be
 * NULL here. */
void options_print_man(const struct options *o, FILE *f);

/* Checks that the ports in "HOST:PORT[,HOST:PORT...]" are at most 65535, and not empty ("HOST:", which gRPC
 * takes for port 443). An address without a port passes. On TD_ERR_INVALID error_out names `what` and the
 * address. */
enum td_status options_check_ports(const char *what, const char *addresses, struct td_error *error_out);

/* Milliseconds of "250", "250ms", "10s", "5m" or "1h", as OPT_MS reads them, but fractions are allowed.
 * False: not a duration. */
bool options_duration_ms(const char *text, double *ms_out);
