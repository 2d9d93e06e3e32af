/*
 * The parameters of a request: one table of names, types, bounds and meanings.
 *
 * A row is a member of a JSON request (tandem generate --jsonl). If it has a holder or is a switch, it is
 * also an option of the command line, with '-' for '_'. ask_message.h makes the message of a JSON request by
 * this table. Front ends must not have parameters of their own.
 *
 * Threads: the table is constant; any thread may call the functions.
 * Errors: TD_ERR_INVALID with a text that begins with the name that the caller gave.
 */
#pragma once

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum ask_type {
    ASK_BOOL,
    ASK_WHOLE,    /* whole number in min .. max */
    ASK_MS,       /* whole milliseconds; on the command line also 250ms, 10s, 5m, as ASK_LIMIT_MS */
    ASK_NUMBER,   /* number in min .. max */
    ASK_LIMIT_MS, /* 0 (none), or milliseconds from OPTIONS_LEAST_MS to max */
    ASK_SEED,     /* 0 .. 2^64 - 1; above 2^63 - 1 as a string of digits, which JSON readers keep exactly */
    ASK_TEXT,     /* at most max bytes; max 0: any length */
    ASK_TEXTS,    /* a text, or a list of at most max texts, each of 1 to ASK_MAX_STOP_BYTES bytes */
    ASK_IDS,      /* list of token ids; max 0: any length */
    ASK_BIASES,   /* object: token id -> bias in min .. max */
    ASK_MESSAGES, /* list of objects */
    ASK_LIST,
    ASK_OBJECT,
    ASK_LABEL, /* any JSON value */
};

/* At most one member of a group may be given. */
enum ask_group { ASK_ALONE, ASK_PROMPTS, ASK_TEMPERATURES, ASK_STRUCTURES };

struct ask_param {
    const char *name;
    enum ask_type type;
    double min, max;
    enum ask_group group;
    const char *needs;  /* another member that must be given, too; NULL: none */
    const char *holder; /* placeholder of the value in --help; NULL: not an option, unless is_switch */
    bool is_switch;     /* an ASK_BOOL that is a command line option */
    bool is_on;         /* an ASK_BOOL whose default is true */
    const char *help;
    size_t at;      /* for ask_message.c: offset of the value */
    size_t case_at; /* for ask_message.c: offset of the message's presence mark; 0: none */
    int present;
};

enum { ASK_N_PARAMS = 55 };
extern const struct ask_param ASK_PARAMS[ASK_N_PARAMS];

const struct ask_param *ask_param_find(const char *name); /* NULL: no such member */
/* Checks that a value has the parameter's type and is within its bounds. Errors call the parameter `name`. */
enum td_status ask_param_check(const struct ask_param *p, const char *name, const json_t *value,
                               struct td_error *error_out);
/* Converts a text of the command line and checks it: numbers, ids as "1,2,3", objects and lists as JSON.
 * The caller owns *value_out. */
enum td_status ask_param_parse(const struct ask_param *p, const char *name, const char *text, json_t **value_out,
                               struct td_error *error_out);
/* The member of the request that excludes p because it is in the same group; NULL: none. A switch that is
 * false excludes nothing. */
const char *ask_param_rival(const json_t *request, const struct ask_param *p);

/* A seed as a value that every JSON reader keeps exactly and that ASK_SEED accepts. */
json_t *ask_seed_json(uint64_t seed);
/* The number of an ASK_SEED value, which must have passed ask_param_check. */
uint64_t ask_seed_value(const json_t *value);
