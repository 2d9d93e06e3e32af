/* Reads a report that report_json() wrote. An error names the member that is missing or out of range. */
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "replay/report_internal.h"

enum {
    MAX_REQUESTS = 20000000,
    MAX_WORKERS = 100000,
    MAX_TENANTS = 1000000,
    MAX_REASONS = 100000,
    MAX_POINTS = 100000,
    MAX_TICKS = 10000000
};

struct report_file {
    struct report_run run;
    json_t *root; /* the runs' texts are borrowed from it */
    struct report_request *requests;
    struct report_worker *workers;
    struct report_point *points;
    const char **tenants, **reasons;
    float **loads; /* [n_workers] */
    float *token_ms;
    char *settings;
};

#define FAIL(e, ...) td_fail(e, TD_ERR_INVALID, __VA_ARGS__)

/* Reads a number; null becomes NAN. A missing member is refused. */
static enum td_status get_real(const json_t *o, const char *name, double *out, struct td_error *e)
{
    const json_t *v = json_object_get(o, name);
    if (!json_is_number(v) && !json_is_null(v))
        return FAIL(e, "%s: must be a number or null", name);
    *out = json_is_null(v) ? NAN : json_number_value(v);
    return TD_OK;
}

/* Reads a finite number >= 0. */
static enum td_status get_length(const json_t *o, const char *name, double *out, struct td_error *e)
{
    double value;
    enum td_status s = get_real(o, name, &value, e);
    if (!s && !(value >= 0 && value <= 1e15))
        s = FAIL(e, "%s: must be a number from 0 on", name);
    if (!s)
        *out = value;
    return s;
}

static enum td_status get_text(const json_t *o, const char *name, const char **out, struct td_error *e)
{
    const char *text = json_string_value(json_object_get(o, name));
    if (!text)
        return FAIL(e, "%s: must be a text", name);
    *out = text;
    return TD_OK;
}

/* Reads an array with `least` to `most` elements. */
static enum td_status get_list(const json_t *o, const char *name, size_t least, size_t most, const json_t **out,
                               struct td_error *e)
{
    const json_t *v = json_object_get(o, name);
    if (!json_is_array(v) || json_array_size(v) < least || json_array_size(v) > most)
        return FAIL(e, "%s: must be an array of %zu to %zu", name, least, most);
    *out = v;
    return TD_OK;
}

/* --------------------------------------------------------------------- run */

static enum td_status parse_run(struct report_file *f, struct td_error *e)
{
    struct report_run *r = &f->run;
    const struct {
        const char *name;
        double *value;
    } lengths[] = {{"ttft_slo_ms", &r->ttft_slo_ms},  {"tpot_slo_ms", &r->tpot_slo_ms}, {"rate", &r->rate},
                   {"duration_ms", &r->duration_ms},  {"arrivals_ms", &r->arrivals_ms}, {"warm_ms", &r->warm_ms},
                   {"load_tick_ms", &r->load_tick_ms}};
    const json_t *settings = json_object_get(f->root, "settings"), *valid = json_object_get(f->root, "valid");
    if (!json_is_integer(json_object_get(f->root, "version")) ||
        json_integer_value(json_object_get(f->root, "version")) != 1)
        return FAIL(e, "version: must be 1: this is no report of tandem, or a newer one");
    enum td_status s = get_text(f->root, "kind", &r->kind, e);
    if (!s)
        s = get_text(f->root, "label", &r->label, e);
    if (!s)
        s = get_text(f->root, "trace", &r->trace, e);
    for (size_t i = 0; !s && i < sizeof(lengths) / sizeof(lengths[0]); i++)
        s = get_length(f->root, lengths[i].name, lengths[i].value, e);
    if (!s && !json_is_boolean(valid))
        s = FAIL(e, "valid: must be true or false");
    if (!s && settings && !json_is_null(settings) && !json_is_object(settings))
        s = FAIL(e, "settings: must be an object or null");
    if (s)
        return s;
    r->valid = json_is_true(valid);
    r->why_invalid = json_string_value(json_object_get(f->root, "why_invalid"));
    if (json_is_object(settings))
        r->settings = f->settings = json_dumps(settings, JSON_COMPACT);
    return TD_OK;
}

static enum td_status parse_tenants(struct report_file *f, struct td_error *e)
{
    const json_t *list;
    enum td_status s = get_list(f->root, "tenants", 1, MAX_TENANTS, &list, e);
    if (s)
        return s;
    f->run.n_tenants = (uint32_t)json_array_size(list);
    f->tenants = mem_array(f->run.n_tenants, sizeof(*f->tenants));
    f->run.tenants = f->tenants;
    for (uint32_t i = 0; i < f->run.n_tenants; i++)
        if (!(f->tenants[i] = json_string_value(json_array_get(list, i))))
            return FAIL(e, "tenants[%u]: must be a text", i);
    return TD_OK;
}

/* Reasons came after version 1, so they may be missing. */
static enum td_status parse_reasons(struct report_file *f, struct td_error *e)
{
    const json_t *list;
    if (!json_object_get(f->root, "reasons"))
        return TD_OK;
    enum td_status s = get_list(f->root, "reasons", 0, MAX_REASONS, &list, e);
    if (s)
        return s;
    f->run.n_reasons = (uint32_t)json_array_size(list);
    f->reasons = mem_array(f->run.n_reasons, sizeof(*f->reasons));
    f->run.reasons = f->reasons;
    for (uint32_t i = 0; i < f->run.n_reasons; i++)
        if (!(f->reasons[i] = json_string_value(json_object_get(json_array_get(list, i), "reason"))))
            return FAIL(e, "reasons[%u].reason: must be a text", i);
    return TD_OK;
}

static enum td_status parse_worker(struct report_file *f, const json_t *o, uint32_t i, struct td_error *e)
{
    struct report_worker *w = &f->workers[i];
    const json_t *load = json_object_get(o, "load");
    enum td_status s = get_text(o, "name", &w->name, e);
    if (!s)
        s = get_text(o, "role", &w->role, e);
    if (!s)
        s = get_real(o, "busy_ms", &w->busy_ms, e);
    if (!s)
        s = get_real(o, "joules", &w->joules, e);
    if (s || !json_is_array(load))
        return s;
    if (json_array_size(load) > MAX_TICKS)
        return FAIL(e, "load: must be an array of at most %d shares", MAX_TICKS);
    w->n_load = (uint32_t)json_array_size(load);
    f->loads[i] = mem_array(w->n_load, sizeof(float));
    w->load = f->loads[i];
    for (uint32_t k = 0; k < w->n_load; k++)
        f->loads[i][k] = (float)json_number_value(json_array_get(load, k));
    return TD_OK;
}

static enum td_status parse_workers(struct report_file *f, struct td_error *e)
{
    const json_t *list;
    struct td_error inner;
    enum td_status s = get_list(f->root, "workers", 0, MAX_WORKERS, &list, e);
    if (s)
        return s;
    f->run.n_workers = (uint32_t)json_array_size(list);
    f->workers = mem_array(f->run.n_workers, sizeof(*f->workers));
    f->loads = mem_array(f->run.n_workers, sizeof(*f->loads));
    f->run.workers = f->workers;
    for (uint32_t i = 0; i < f->run.n_workers; i++)
        if (parse_worker(f, json_array_get(list, i), i, &inner))
            return FAIL(e, "workers[%u].%.200s", i, inner.text);
    return TD_OK;
}

static enum td_status parse_points(struct report_file *f, struct td_error *e)
{
    const json_t *list;
    struct td_error inner;
    enum td_status s = get_list(f->root, "points", 0, MAX_POINTS, &list, e);
    if (s)
        return s;
    f->run.n_points = (uint32_t)json_array_size(list);
    f->points = mem_array(f->run.n_points, sizeof(*f->points));
    f->run.points = f->points;
    for (uint32_t i = 0; i < f->run.n_points; i++) {
        struct report_point *p = &f->points[i];
        const json_t *o = json_array_get(list, i);
        if (get_length(o, "rate", &p->rate, &inner) || get_length(o, "offered_rate", &p->offered_rate, &inner) ||
            get_length(o, "goodput", &p->goodput, &inner) || get_length(o, "met_share", &p->met_share, &inner) ||
            get_length(o, "ttft_share", &p->ttft_share, &inner) || get_length(o, "tpot_share", &p->tpot_share, &inner))
            return FAIL(e, "points[%u].%.200s", i, inner.text);
    }
    return TD_OK;
}

/* ---------------------------------------------------------------- requests */

/* Whether a value is in the range of its column. */
static bool is_in_range(const struct report_column *c, const struct report_run *r, double v)
{
    bool is_worker = c->type == COLUMN_I32;
    switch (c->type) {
    case COLUMN_OUTCOME:
        return v >= 0 && v <= REPORT_CUT_SHORT;
    case COLUMN_BOOL:
        return v >= 0 && v <= 1;
    case COLUMN_U32:
    case COLUMN_I32:
        if (c->offset == offsetof(struct report_request, tenant))
            return v >= 0 && v < (double)r->n_tenants;
        if (c->offset == offsetof(struct report_request, reason))
            return v >= 0 && v <= (double)r->n_reasons;
        return is_worker ? v >= -1 && v < (double)r->n_workers : v >= 0 && v <= UINT32_MAX;
    case COLUMN_LIMIT:
        return v >= 0 && v <= 1e15;
    case COLUMN_DOUBLE:
        return isnan(v) || (v >= -1e15 && v <= 1e15);
    }
    return false;
}

static bool set_cell(const struct report_file *f, const struct report_column *c, const json_t *v, uint64_t i)
{
    char *cell = (char *)&f->requests[i] + c->offset;
    bool whole = c->type != COLUMN_LIMIT && c->type != COLUMN_DOUBLE;
    double value = json_is_null(v) ? NAN : json_number_value(v);
    if ((whole ? !json_is_integer(v) : !json_is_number(v) && !json_is_null(v)) || !is_in_range(c, &f->run, value))
        return false;
    switch (c->type) {
    case COLUMN_OUTCOME:
    case COLUMN_U32:
        *(uint32_t *)(void *)cell = (uint32_t)value;
        break;
    case COLUMN_I32:
        *(int32_t *)(void *)cell = (int32_t)value;
        break;
    case COLUMN_BOOL:
        *(bool *)cell = value > 0;
        break;
    case COLUMN_LIMIT:
    case COLUMN_DOUBLE:
        *(double *)(void *)cell = value;
        break;
    }
    return true;
}

/* Reads a column: an array with a value for each request, or one value for all. */
static enum td_status parse_column(const struct report_file *f, const json_t *requests, const struct report_column *c,
                                   struct td_error *e)
{
    const json_t *list = json_object_get(requests, c->name);
    bool one = !json_is_array(list);
    if (!list && c->is_younger) {
        for (uint64_t i = 0; i < f->run.n_requests && c->type == COLUMN_DOUBLE; i++)
            *(double *)(void *)((char *)&f->requests[i] + c->offset) = NAN;
        return TD_OK;
    }
    if (!list || (!one && json_array_size(list) != f->run.n_requests))
        return FAIL(e, "requests.%s: must be a value, or an array of %llu", c->name,
                    (unsigned long long)f->run.n_requests);
    for (uint64_t i = 0; i < f->run.n_requests; i++)
        if (!set_cell(f, c, one ? list : json_array_get(list, i), i))
            return FAIL(e, "requests.%s[%llu]: not of its kind, or out of range", c->name, (unsigned long long)i);
    return TD_OK;
}

static enum td_status parse_tokens(struct report_file *f, const json_t *lists, struct td_error *e)
{
    uint64_t n = 0, at = 0;
    if (!json_is_array(lists) || json_array_size(lists) != f->run.n_requests)
        return FAIL(e, "requests.token_ms: must be an array of %llu", (unsigned long long)f->run.n_requests);
    for (uint64_t i = 0; i < f->run.n_requests; i++)
        n += json_array_size(json_array_get(lists, i));
    f->token_ms = mem_array(n, sizeof(*f->token_ms));
    for (uint64_t i = 0; i < f->run.n_requests; i++) {
        const json_t *list = json_array_get(lists, i);
        if (json_is_null(list))
            continue;
        if (!json_is_array(list) || json_array_size(list) != f->requests[i].n_output)
            return FAIL(e, "requests.token_ms[%llu]: must be null, or of output_tokens times", (unsigned long long)i);
        f->requests[i].token_ms = f->token_ms + at;
        for (uint32_t k = 0; k < f->requests[i].n_output; k++) {
            const json_t *v = json_array_get(list, k);
            if (!json_is_number(v) || fabs(json_number_value(v)) > 1e15)
                return FAIL(e, "requests.token_ms[%llu][%u]: must be a number", (unsigned long long)i, k);
            f->token_ms[at++] = (float)json_number_value(v);
        }
    }
    return TD_OK;
}

static enum td_status parse_requests(struct report_file *f, struct td_error *e)
{
    const json_t *requests = json_object_get(f->root, "requests"), *n = json_object_get(requests, "n");
    if (!requests)
        return FAIL(e, "requests: not there: the report was written without them");
    /* A column that is one value for all requests takes no space in the file, so the file's size does not
     * limit n; the number of token_ms does. */
    if (!json_is_integer(n) || json_integer_value(n) < 0 || json_integer_value(n) > MAX_REQUESTS ||
        (uint64_t)json_integer_value(n) != json_array_size(json_object_get(requests, "token_ms")))
        return FAIL(e, "requests.n: must be from 0 to %d, and as many as token_ms has", MAX_REQUESTS);
    f->run.n_requests = (uint64_t)json_integer_value(n);
    f->requests = mem_array(f->run.n_requests, sizeof(*f->requests));
    f->run.requests = f->requests;
    enum td_status s = TD_OK;
    for (int i = 0; !s && i < REPORT_COLUMNS; i++)
        s = parse_column(f, requests, &report_columns[i], e);
    return s ? s : parse_tokens(f, json_object_get(requests, "token_ms"), e);
}

/* ------------------------------------------------------------------- whole */

enum td_status report_parse(const char *data, size_t size, struct report_file **out, struct td_error *error_out)
{
    struct report_file *f = mem_zalloc(sizeof(*f));
    json_error_t json_error;
    enum td_status s;
    f->root = json_loadb(data, size, JSON_REJECT_DUPLICATES, &json_error);
    if (!f->root)
        s = FAIL(error_out, "line %d, column %d: %s", json_error.line, json_error.column, json_error.text);
    else
        s = parse_run(f, error_out);
    if (!s)
        s = parse_tenants(f, error_out);
    if (!s)
        s = parse_reasons(f, error_out);
    if (!s)
        s = parse_workers(f, error_out);
    if (!s)
        s = parse_points(f, error_out);
    if (!s)
        s = parse_requests(f, error_out);
    if (s)
        report_close(f);
    else
        *out = f;
    return s;
}

const struct report_run *report_file_run(const struct report_file *f)
{
    return &f->run;
}

void report_close(struct report_file *f)
{
    if (!f)
        return;
    json_decref(f->root);
    for (uint32_t i = 0; f->loads && i < f->run.n_workers; i++)
        free(f->loads[i]);
    free(f->loads);
    free(f->requests);
    free(f->workers);
    free(f->points);
    free(f->tenants);
    free(f->reasons);
    free(f->token_ms);
    free(f->settings);
    free(f);
}
