#include "base/options.h"

#include <ctype.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/man.h"
#include "base/mem.h"

enum { CONFIG_MAX_BYTES = 1 << 20 };

static bool is_option(const struct option *t)
{
    return t->name[0] != 0;
}

static const struct option *find_option(const struct options *o, const char *name, size_t len)
{
    for (const struct option *t = o->table; t->name; t++)
        if (is_option(t) && strlen(t->name) == len && !memcmp(t->name, name, len))
            return t;
    return NULL;
}

static bool choice_has(const char *choices, const char *text)
{
    size_t n = strlen(text);
    for (const char *c = choices; c; c = strchr(c, '|'), c = c ? c + 1 : NULL)
        if (n && !strncmp(c, text, n) && (c[n] == '|' || !c[n]))
            return true;
    return false;
}

/* The factor of a unit for this type of option; 0: not a unit of this type. */
static double unit_factor(enum option_type option_type, const char *unit)
{
    enum option_type type = option_type == OPT_LIMIT_MS ? OPT_MS : option_type;
    static const struct {
        enum option_type type;
        const char *unit;
        double factor;
    } UNITS[] = {{OPT_BYTES, "K", 0x1p10}, {OPT_BYTES, "M", 0x1p20}, {OPT_BYTES, "G", 0x1p30}, {OPT_BYTES, "T", 0x1p40},
                 {OPT_MS, "ms", 1},        {OPT_MS, "s", 1e3},       {OPT_MS, "m", 6e4},       {OPT_MS, "h", 3.6e6}};
    if (!*unit)
        return 1;
    for (size_t i = 0; i < sizeof(UNITS) / sizeof(UNITS[0]); i++)
        if (UNITS[i].type == type && !strcmp(UNITS[i].unit, unit))
            return UNITS[i].factor;
    return 0;
}

bool options_duration_ms(const char *text, double *ms_out)
{
    char *end = NULL;
    double v = strtod(text, &end), factor = end == text ? 0 : unit_factor(OPT_MS, end);
    *ms_out = v * factor;
    return factor > 0 && isfinite(*ms_out);
}

/* Bytes are rounded (1.1G). 0.29s are 290 ms, although a double can't hold that exactly. A value that
 * would become 0, or lose a fraction of a millisecond, is refused. */
static enum td_status set_whole(const struct option *t, const char *text, double v, void *at, struct td_error *e)
{
    double whole = round(v), slack = t->type == OPT_BYTES ? 0.5 : t->type == OPT_MS ? 1e-6 : 0;
    if (v > 9e15 || fabs(whole - v) > slack || (v > 0 && !(whole > 0)))
        return td_fail(e, TD_ERR_INVALID, "--%s: '%s' is not a whole number%s", t->name, text,
                       t->type == OPT_MS      ? " of milliseconds"
                       : t->type == OPT_BYTES ? " of bytes"
                                              : "");
    int64_t i = (int64_t)whole;
    memcpy(at, &i, sizeof(i));
    return TD_OK;
}

static enum td_status set_number(const struct option *t, const char *text, void *at, struct td_error *e)
{
    char *end = NULL;
    errno = 0;
    double v = strtod(text, &end);
    double factor = unit_factor(t->type, end);
    if (end == text || !factor || errno || !isfinite(v))
        return td_fail(e, TD_ERR_INVALID, "--%s: '%s' is not %s", t->name, text,
                       t->type == OPT_BYTES                           ? "a size (512, 64K, 16M, 2G)"
                       : t->type == OPT_MS || t->type == OPT_LIMIT_MS ? "a duration (250ms, 10s, 5m)"
                                                                      : "a number");
    v *= factor;
    bool free_range = t->min == 0 && t->max == 0;
    if (free_range ? v < 0 : v < t->min || v > t->max)
        return td_fail(e, TD_ERR_INVALID, free_range ? "--%s: %s is negative" : "--%s: %s is not in %.15g .. %.15g",
                       t->name, text, t->min, t->max);
    if (t->type == OPT_LIMIT_MS && v > 0 && v < OPTIONS_LEAST_MS)
        return td_fail(e, TD_ERR_INVALID, "--%s: %s is below %g ms", t->name, text, OPTIONS_LEAST_MS);
    if (t->type == OPT_DOUBLE || t->type == OPT_LIMIT_MS) {
        memcpy(at, &v, sizeof(v));
        return TD_OK;
    }
    return set_whole(t, text, v, at, e);
}

enum td_status options_check_ports(const char *what, const char *addresses, struct td_error *e)
{
    for (const char *at = addresses, *end; *at; at = *end ? end + 1 : end) {
        end = strchrnul(at, ',');
        const char *colon = memrchr(at, ':', (size_t)(end - at));
        size_t n = colon ? strspn(colon + 1, "0123456789") : 0;
        /* "fe80::" is a whole address. */
        bool is_first = colon && (colon == memchr(at, ':', (size_t)(end - at)) || colon[-1] == ']');
        if (is_first && colon + 1 == end)
            return td_fail(e, TD_ERR_INVALID, "%s: '%.*s': the port is missing", what, (int)(end - at), at);
        if (n && colon + 1 + n == end && strtoull(colon + 1, NULL, 10) > UINT16_MAX)
            return td_fail(e, TD_ERR_INVALID, "%s: '%.*s': a port is at most %d", what, (int)(end - at), at,
                           UINT16_MAX);
    }
    return TD_OK;
}

static bool all_have_ports(const char *addresses)
{
    for (const char *at = addresses, *end; *at; at = *end ? end + 1 : end) {
        end = strchrnul(at, ',');
        if (!memchr(at, ':', (size_t)(end - at)))
            return false;
    }
    return true;
}

/* A port is required if --help shows HOST:PORT; for HOST[:PORT] and others the program decides. */
static enum td_status set_address(const struct option *t, const char *text, void *at, struct td_error *e)
{
    char what[80];
    snprintf(what, sizeof(what), "--%s", t->name);
    enum td_status s = options_check_ports(what, text, e);
    if (!s && t->choices && !strncmp(t->choices, "HOST:PORT", 9) && !all_have_ports(text))
        s = td_fail(e, TD_ERR_INVALID, "%s: '%.150s': expected %s", what, text, t->choices);
    if (!s)
        memcpy(at, &text, sizeof(text));
    return s;
}

/* An empty path is an unset variable of a script. It would name files in the root or the current folder. */
static bool is_path(const struct option *t)
{
    return t->choices && (!strcmp(t->choices, "DIR") || !strcmp(t->choices, "FILE"));
}

static enum td_status set(const struct option *t, const char *text, void *values, struct td_error *e)
{
    char *at = (char *)values + t->offset;
    switch (t->type) {
    case OPT_ADDRESS:
        return set_address(t, text, at, e);
    case OPT_STRING:
    case OPT_SECRET:
        if (is_path(t) && !*text)
            return td_fail(e, TD_ERR_INVALID, "--%s: is empty; expected %s", t->name, t->choices);
        memcpy(at, &text, sizeof(text));
        return TD_OK;
    case OPT_CHOICE:
        if (!choice_has(t->choices, text))
            return td_fail(e, TD_ERR_INVALID, "--%s: '%s' is none of %s", t->name, text, t->choices);
        memcpy(at, &text, sizeof(text));
        return TD_OK;
    case OPT_BOOL: {
        bool on = !strcmp(text, "true") || !strcmp(text, "1");
        if (!on && strcmp(text, "false") && strcmp(text, "0"))
            return td_fail(e, TD_ERR_INVALID, "--%s: '%s' is neither true nor false", t->name, text);
        memcpy(at, &on, sizeof(on));
        return TD_OK;
    }
    case OPT_INT:
    case OPT_BYTES:
    case OPT_MS:
    case OPT_DOUBLE:
    case OPT_LIMIT_MS:
        return set_number(t, text, at, e);
    }
    return TD_ERR_INVALID;
}

static enum td_status from_environment(const struct options *o, void *values, struct td_error *e)
{
    for (const struct option *t = o->table; o->env_prefix && t->name; t++) {
        char name[128];
        int n = snprintf(name, sizeof(name), "%s_%s", o->env_prefix, t->name);
        for (int i = 0; i < n && i < (int)sizeof(name); i++)
            name[i] = name[i] == '-' ? '_' : (char)toupper((unsigned char)name[i]);
        const char *text = is_option(t) ? getenv(name) : NULL;
        enum td_status s = text ? set(t, text, values, e) : TD_OK;
        if (s)
            return s;
    }
    return TD_OK;
}

/* Reads a config file. Its strings must outlive the JSON, so they are kept in one allocation that the
 * caller frees. */
static enum td_status from_config(const struct options *o, const char *path, void *values, char **strings_out,
                                  struct td_error *e)
{
    json_error_t je;
    char *data = NULL;
    size_t len = 0;
    struct stat file;
    /* Such a path is a shell's <(...), whose writer exists. */
    bool is_open = !strncmp(path, "/dev/", 5) || !strncmp(path, "/proc/", 6);
    if (!is_open && !stat(path, &file) && S_ISFIFO(file.st_mode))
        return td_fail(e, TD_ERR_INVALID, "--config %s: is a named pipe; give a regular file", path);
    struct td_error why;
    enum td_status s = file_read(path, CONFIG_MAX_BYTES, &data, &len, &why);
    if (s)
        return td_fail(e, TD_ERR_INVALID, "--config %s", why.text);
    json_t *root = json_loadb(data, len, JSON_REJECT_DUPLICATES, &je);
    free(data);
    if (!json_is_object(root)) {
        json_decref(root);
        return td_fail(e, TD_ERR_INVALID, "--config %s: line %d: %s", path, root ? 1 : je.line,
                       root ? "not a JSON object" : je.text);
    }
    const char *key;
    json_t *value;
    size_t room = 0;
    json_object_foreach(root, key, value) room += json_is_string(value) ? json_string_length(value) + 1 : 32;
    char *at = *strings_out = mem_zalloc(room + 1);
    json_object_foreach(root, key, value)
    {
        const struct option *t = find_option(o, key, strlen(key));
        if (!t) {
            s = td_fail(e, TD_ERR_INVALID, "--config %s: '%s' is no option of %s", path, key, o->program);
            break;
        }
        int n = 0;
        if (json_is_string(value))
            n = sprintf(at, "%s", json_string_value(value));
        else if (json_is_boolean(value))
            n = sprintf(at, "%s", json_is_true(value) ? "true" : "false");
        else if (json_is_number(value))
            n = sprintf(at, "%.17g", json_number_value(value));
        else
            s = td_fail(e, TD_ERR_INVALID, "--config %s: '%s' must be a text, a number or true/false", path, key);
        if (!s)
            s = set(t, at, values, e);
        at += n + 1;
        if (s)
            break;
    }
    json_decref(root);
    return s;
}

/* What a value is called in help; "": the option is a switch. */
static const char *kind_of(const struct option *t)
{
    static const char *const KINDS[] = {"TEXT", "", "N", "BYTES", "TIME", "X", "", "TIME", "HOST:PORT", "TEXT"};
    return t->choices ? t->choices : KINDS[t->type];
}

/* Options that every program has. */
static const struct {
    const char *name, *kind, *help;
} COMMON[] = {
    {"--config", "FILE", "reads options from a JSON object with these names as keys"},
    {"--print-config", "", "prints the values in force as such a file, and exits"},
    {"--version", "", "prints the version, and exits"},
    {"--help", "", "prints this, and exits; --help=man prints the manual page in roff"},
};
enum { N_COMMON = sizeof(COMMON) / sizeof(COMMON[0]), HELP_COLUMN = 34 };
#define ENVIRONMENT "Each option can also be set in the environment: %s_NAME, with '_' for '-'."

static void print_row(const char *dashes, const char *name, const char *kind, const char *help, const char *fallback)
{
    int n = printf("  %s%s%s%s", dashes, name, *kind ? " " : "", kind);
    printf("%*s%s", n < HELP_COLUMN ? HELP_COLUMN - n : 2, "", help);
    if (fallback)
        printf(" [%s]", fallback);
    putchar('\n');
}

static void print_help(const struct options *o)
{
    printf("usage: %s %s\n\n%s\n\n", o->program, o->usage, o->about);
    bool own_tables = false;
    for (const struct option_word *w = o->words; w && w->name; w++) {
        printf("  %-10s %s\n", w->name, w->about);
        own_tables |= w->table != NULL;
    }
    if (own_tables) {
        printf("\n%s %s --help lists the options.\n", o->program, o->word);
        return;
    }
    if (o->words)
        putchar('\n');
    for (const struct option *t = o->table; t->name; t++) {
        if (!is_option(t)) {
            printf("\n%s\n", t->help);
            continue;
        }
        print_row("--", t->name, kind_of(t), t->help, t->fallback);
    }
    putchar('\n');
    for (int i = 0; i < N_COMMON; i++)
        print_row("", COMMON[i].name, COMMON[i].kind, COMMON[i].help, NULL);
    if (o->env_prefix)
        printf("\n" ENVIRONMENT "\n", o->env_prefix);
}

static void man_table(FILE *f, const struct option *table)
{
    char flag[80];
    for (const struct option *t = table; t && t->name; t++) {
        snprintf(flag, sizeof(flag), "--%s", t->name);
        if (is_option(t))
            man_item(f, flag, kind_of(t), t->help, t->fallback);
        else
            man_subheading(f, t->help);
    }
}

static void man_words(FILE *f, const struct options *o)
{
    char title[128];
    snprintf(title, sizeof(title), "%sS", o->word);
    man_heading(f, title);
    for (const struct option_word *w = o->words; w->name; w++)
        man_item(f, w->name, NULL, w->about, NULL);
}

/* Words that stand side by side and have one table are described together. */
static void man_word_tables(FILE *f, const struct option_word *words)
{
    char title[128];
    for (const struct option_word *w = words; w->name; w++) {
        if (!w->table)
            continue;
        int n = snprintf(title, sizeof(title), "Options of %s", w->name);
        for (; w[1].name && w[1].table == w->table && n < (int)sizeof(title); w++)
            n += snprintf(title + n, sizeof(title) - (size_t)n, " and %s", w[1].name);
        man_subheading(f, title);
        man_table(f, w->table);
    }
}

void options_print_man(const struct options *o, FILE *f)
{
    char text[256];
    man_open(f, o->program, o->man_section, o->about);
    man_heading(f, "SYNOPSIS");
    man_synopsis(f, o->program, o->usage);
    man_heading(f, "DESCRIPTION");
    man_text(f, o->about);
    if (o->words)
        man_words(f, o);
    if (o->table) {
        man_heading(f, "OPTIONS");
        man_table(f, o->table);
        if (o->words)
            man_word_tables(f, o->words);
        man_subheading(f, "Options of every program");
        for (int i = 0; i < N_COMMON; i++)
            man_item(f, COMMON[i].name, COMMON[i].kind, COMMON[i].help, NULL);
    }
    if (o->env_prefix) {
        snprintf(text, sizeof(text), ENVIRONMENT, o->env_prefix);
        man_heading(f, "ENVIRONMENT");
        man_text(f, text);
    }
    man_heading(f, "EXIT STATUS");
    man_text(f, "0: done. 1: failed. 2: wrong use, such as an unknown option.");
}

static void print_man(const struct options *o)
{
    options_print_man(o, stdout);
    man_heading(stdout, "SEE ALSO");
    man_reference(stdout, "tandem", 1, true);
}

static enum td_status answered(enum options_action *action_out, struct td_error *e)
{
    *action_out = OPTIONS_EXIT;
    return fflush(stdout) || ferror(stdout) ? td_fail(e, TD_ERR_IO, "standard output can't be written") : TD_OK;
}

static void print_config(const struct options *o, const void *values)
{
    json_t *root = json_object();
    for (const struct option *t = o->table; t->name; t++) {
        if (!is_option(t))
            continue;
        const char *at = (const char *)values + t->offset;
        json_t *v = NULL;
        switch (t->type) {
        case OPT_SECRET:
            break;
        case OPT_STRING:
        case OPT_ADDRESS:
        case OPT_CHOICE: {
            const char *text;
            memcpy(&text, at, sizeof(text));
            v = text ? json_string(text) : NULL;
            break;
        }
        case OPT_BOOL:
            v = json_boolean(*(const bool *)at);
            break;
        case OPT_DOUBLE:
        case OPT_LIMIT_MS: {
            double d;
            memcpy(&d, at, sizeof(d));
            v = json_real(d);
            break;
        }
        default: {
            int64_t i;
            memcpy(&i, at, sizeof(i));
            v = json_integer(i);
        }
        }
        if (v)
            json_object_set_new(root, t->name, v);
    }
    json_dumpf(root, stdout, JSON_INDENT(2));
    putchar('\n');
    json_decref(root);
}

struct parsed {
    const char *config;
    bool help, man, version, print;
};

/* Parses the argument at argv[*i] and advances *i over its value. values NULL: only looks for --config,
 * --help and the like, which are kept in `p`. */
static enum td_status one_flag(const struct options *o, int argc, char **argv, int *i, void *values, struct parsed *p,
                               struct td_error *e)
{
    const char *name = argv[*i] + 2, *eq = strchr(name, '=');
    size_t len = eq ? (size_t)(eq - name) : strlen(name);
    const char *value = eq ? eq + 1 : *i + 1 < argc ? argv[*i + 1] : NULL;
    if (!strcmp(name, "help") || !strcmp(name, "version") || !strcmp(name, "print-config")) {
        p->help |= name[0] == 'h';
        p->version |= name[0] == 'v';
        p->print |= name[0] == 'p';
        return TD_OK;
    }
    if (!strcmp(name, "help=man")) {
        p->man = true;
        return TD_OK;
    }
    if (len == 4 && !memcmp(name, "help", 4))
        return td_fail(e, TD_ERR_INVALID, "--help: '%s' is not man", eq + 1);
    bool config = len == 6 && !memcmp(name, "config", 6);
    const struct option *t = config ? NULL : find_option(o, name, len);
    bool off = !t && len > 3 && !memcmp(name, "no-", 3);
    if (off && (t = find_option(o, name + 3, len - 3)) && t->type != OPT_BOOL)
        t = NULL;
    if (!t && !config)
        return td_fail(e, TD_ERR_INVALID, "--%.*s: no such option; %s --help lists them", (int)len, name, o->program);
    if (t && t->type == OPT_BOOL && !eq && value && (!strcmp(value, "true") || !strcmp(value, "false")))
        return td_fail(e, TD_ERR_INVALID, "'%s': write --%s=%s; the word would not belong to the option", value,
                       t->name, value);
    if (t && t->type == OPT_BOOL)
        return values ? set(t, off ? "false" : eq ? value : "true", values, e) : TD_OK;
    if (!value)
        return td_fail(e, TD_ERR_INVALID, "--%.*s: needs a value", (int)len, name);
    *i += !eq;
    if (config)
        p->config = value;
    return t && values ? set(t, value, values, e) : TD_OK;
}

static enum td_status walk(const struct options *o, int argc, char **argv, void *values, const char **rest_out,
                           int *n_rest, struct parsed *p, struct td_error *e)
{
    *n_rest = 0;
    for (int i = 1; i < argc; i++) {
        bool end = !strcmp(argv[i], "--");
        if (!end && !strcmp(argv[i], "-h")) {
            p->help = true;
        } else if (!end && !strncmp(argv[i], "--", 2)) {
            enum td_status s = one_flag(o, argc, argv, &i, values, p, e);
            if (s)
                return s;
        } else {
            for (i += end; i < argc; i++) {
                if (!rest_out)
                    return td_fail(e, TD_ERR_INVALID, "'%s': %s takes only options; see --help", argv[i], o->program);
                rest_out[(*n_rest)++] = argv[i];
                if (!end)
                    break;
            }
        }
    }
    return TD_OK;
}

enum td_status options_parse(const struct options *o, int argc, char **argv, void *values, const char **rest_out,
                             int *n_rest_out, char **strings_out, enum options_action *action_out,
                             struct td_error *error_out)
{
    struct parsed p = {0};
    int n_rest = 0;
    *strings_out = NULL;
    *action_out = OPTIONS_RUN;
    enum td_status s = TD_OK;
    for (const struct option *t = o->table; t->name && !s; t++)
        if (is_option(t) && t->fallback)
            s = set(t, t->fallback, values, error_out);
    if (!s)
        /* First pass: --config, --help and the like. */
        s = walk(o, argc, argv, NULL, rest_out, &n_rest, &p, error_out);
    if (!s && (p.help || p.man)) {
        (p.man ? print_man : print_help)(o);
        return answered(action_out, error_out);
    }
    if (!s && p.version) {
        printf("%s %s\n", o->program, TANDEM_VERSION);
        return answered(action_out, error_out);
    }
    if (!s && p.config)
        s = from_config(o, p.config, values, strings_out, error_out);
    if (!s)
        s = from_environment(o, values, error_out);
    if (!s)
        s = walk(o, argc, argv, values, rest_out, &n_rest, &p, error_out);
    if (!s && p.print) {
        print_config(o, values);
        s = answered(action_out, error_out);
    }
    if (n_rest_out)
        *n_rest_out = n_rest;
    return s;
}
