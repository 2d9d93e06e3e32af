#include "cli/params.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_BYTES = 32 };

static size_t count_rows(const struct option *table)
{
    size_t n = 0;
    while (table[n].name)
        n++;
    return n;
}

static bool is_option(const struct ask_param *p)
{
    return p->holder || p->is_switch;
}

/* The parameter's name as an option: dashes take the place of underscores. */
static void flag_name(const struct ask_param *p, char out[NAME_BYTES])
{
    snprintf(out, NAME_BYTES, "%s", p->name);
    for (char *c = out; *c; c++)
        *c = *c == '_' ? '-' : *c;
}

static bool has_row(const struct option *table, const char *name)
{
    for (; table->name; table++)
        if (!strcmp(table->name, name))
            return true;
    return false;
}

static struct option make_row(const struct ask_param *p, const char *name, size_t at)
{
    size_t i = (size_t)(p - ASK_PARAMS);
    struct option row = {.name = name, .type = OPT_STRING, .choices = p->holder, .help = p->help};
    row.offset = at + offsetof(struct cli_params, texts) + i * sizeof(const char *);
    if (p->is_switch) {
        row.type = OPT_BOOL;
        row.offset = at + offsetof(struct cli_params, switches) + i * sizeof(bool);
        row.fallback = p->is_on ? "true" : NULL;
    }
    return row;
}

struct option *cli_params_table(const struct option *own, size_t at)
{
    size_t n = count_rows(own), n_most = n + ASK_N_PARAMS + 2;
    struct option *rows = mem_zalloc(n_most * sizeof(*rows) + ASK_N_PARAMS * NAME_BYTES);
    char *name = (char *)(rows + n_most);
    memcpy(rows, own, n * sizeof(*rows));
    rows[n++] = (struct option){.name = "", .help = "Parameters of a request"};
    for (const struct ask_param *p = ASK_PARAMS; p < ASK_PARAMS + ASK_N_PARAMS; p++) {
        flag_name(p, name);
        if (!is_option(p) || has_row(own, name))
            continue;
        rows[n++] = make_row(p, name, at);
        name += NAME_BYTES;
    }
    return rows;
}

static enum td_status read_one(struct cli_params *c, const struct ask_param *p, struct td_error *e)
{
    size_t i = (size_t)(p - ASK_PARAMS);
    char name[NAME_BYTES], flag[NAME_BYTES + 2];
    json_t *v = NULL;
    flag_name(p, name);
    snprintf(flag, sizeof(flag), "--%s", name);
    enum td_status s = c->texts[i] ? ask_param_parse(p, flag, c->texts[i], &v, e) : TD_OK;
    if (p->is_switch && c->switches[i] != p->is_on)
        v = json_boolean(c->switches[i]);
    if (v)
        json_object_set_new(c->given, p->name, v);
    if (v && ask_param_rival(c->given, p))
        s = td_fail(e, TD_ERR_INVALID, "%s: can't be given together with --%s", flag, ask_param_rival(c->given, p));
    return s;
}

bool cli_params_read(const char *command, struct cli_params *c)
{
    struct td_error e = {{0}};
    c->given = json_object();
    for (const struct ask_param *p = ASK_PARAMS; p < ASK_PARAMS + ASK_N_PARAMS; p++)
        if (is_option(p) && read_one(c, p, &e)) {
            cli_fail(command, "%s", e.text);
            return false;
        }
    return true;
}

void cli_params_free(struct cli_params *c)
{
    json_decref(c->given);
}

void cli_params_add(const struct cli_params *c, json_t *request, bool only_fitting)
{
    const char *name;
    json_t *v;
    json_object_foreach(c->given, name, v)
    {
        const struct ask_param *p = ask_param_find(name);
        bool fits = (!p->needs || json_object_get(request, p->needs)) && !ask_param_rival(request, p);
        if ((fits || !only_fitting) && !json_object_get(request, name))
            json_object_set(request, name, v);
    }
}
