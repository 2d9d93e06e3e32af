/*
 * --sweep: runs every combination of some options' values, several runs at a time. The options of a point are
 * those of the command, followed by the point's own, so that every option can be swept. Results are printed
 * in the order of the points, whichever run ends first.
 */
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/simulate.h"

enum { MAX_AXES = 8, MAX_VALUES = 1024, MAX_POINTS = 65536 };

struct axis {
    char *name;
    char **values;
    uint32_t n;
};

struct sweep {
    struct axis axes[MAX_AXES];
    uint32_t n_axes, n_points;
    struct simulate_point **points;
    struct report_summary *summaries;
    const struct trace *trace;
    const char *trace_name;
    _Atomic uint32_t next;
    pthread_mutex_t lock; /* guards done: threads finish points, the main thread prints them in order */
    pthread_cond_t changed;
    bool *done;
};

/* ------------------------------------------------------------------- points */

static void add_value(struct axis *a, const char *text)
{
    a->values = mem_resize(a->values, a->n + 1, sizeof(*a->values));
    a->values[a->n++] = mem_strdup(text);
}

static bool number(const char *text, const char *end, double *out)
{
    char *rest, *copy = strndup(text, (size_t)(end - text));
    *out = strtod(copy, &rest);
    bool ok = rest != copy && !*rest && isfinite(*out);
    free(copy);
    return ok;
}

/* Adds the values of "4..12" or "1..2:0.5"; any other text is one value, also a path with "..". */
static enum td_status add_values(struct axis *a, const char *text, struct td_error *e)
{
    const char *dots = strstr(text, ".."), *colon = strchr(text, ':'), *end = text + strlen(text);
    double from, to, by = 1;
    char one[64];
    if (!dots || !number(text, dots, &from)) {
        add_value(a, text);
        return TD_OK;
    }
    if (!number(dots + 2, colon ? colon : end, &to) || (colon && !number(colon + 1, end, &by)) || !(by > 0) ||
        !(to >= from) || (to - from) / by > MAX_VALUES)
        return td_fail(e, TD_ERR_INVALID, "--sweep %s=%s: expected FROM..TO or FROM..TO:BY", a->name, text);
    for (uint32_t i = 0; from + i * by <= to + by * 1e-9; i++) {
        snprintf(one, sizeof(one), "%.10g", from + i * by);
        add_value(a, one);
    }
    return TD_OK;
}

static enum td_status add_axis(struct sweep *s, char *text, struct td_error *e)
{
    char *equals = strchr(text, '='), *state = NULL;
    if (!equals || equals == text || s->n_axes == MAX_AXES)
        return td_fail(e, TD_ERR_INVALID, "--sweep '%s': expected NAME=VALUES, at most %d of them", text, MAX_AXES);
    *equals = 0;
    struct axis *a = &s->axes[s->n_axes++];
    enum td_status status = TD_OK;
    a->name = mem_strdup(text);
    for (char *v = strtok_r(equals + 1, "|", &state); v && !status; v = strtok_r(NULL, "|", &state))
        status = add_values(a, v, e);
    if (!status && !a->n)
        status = td_fail(e, TD_ERR_INVALID, "--sweep %s=: no values", a->name);
    return status;
}

static enum td_status parse_sweep(struct sweep *s, const char *text, struct td_error *e)
{
    char *copy = mem_strdup(text), *state = NULL;
    enum td_status status = TD_OK;
    uint64_t n = 1;
    for (char *t = strtok_r(copy, ",", &state); t && !status; t = strtok_r(NULL, ",", &state))
        status = add_axis(s, t, e);
    for (uint32_t i = 0; i < s->n_axes && n <= MAX_POINTS; i++)
        n *= s->axes[i].n;
    if (!status && (!s->n_axes || n > MAX_POINTS))
        status = td_fail(e, TD_ERR_INVALID, "--sweep: %s", s->n_axes ? "more than 65536 points" : "nothing to sweep");
    s->n_points = status ? 0 : (uint32_t)n;
    free(copy);
    return status;
}

/* Makes point `number`; the last axis varies fastest. False: the options don't make a point, and the reason
 * was printed. */
static bool make_point(struct sweep *s, uint32_t number, int argc, char **argv)
{
    struct simulate_point *p = s->points[number] = mem_zalloc(sizeof(*p));
    char **all = mem_array((size_t)argc + s->n_axes + 1, sizeof(*all));
    const char **rest = mem_array((size_t)argc + s->n_axes + 1, sizeof(*rest));
    struct bytes name = {0};
    struct td_error e = {{0}};
    int code, n_rest, n = argc;
    uint32_t left = number;
    memcpy(all, argv, (size_t)argc * sizeof(*all));
    p->words = mem_array(s->n_axes + 1, sizeof(*p->words));
    for (uint32_t i = s->n_axes; i-- > 0; left /= s->axes[i].n) {
        const struct axis *a = &s->axes[i];
        struct bytes option = {0};
        bytes_printf(&option, "--%s=%s", a->name, a->values[left % a->n]);
        all[argc + (int)i] = p->words[i] = option.data; /* the options point into it */
        n++;
    }
    for (uint32_t i = 0; i < s->n_axes; i++)
        bytes_printf(&name, "%s%s", i ? " " : "", all[argc + (int)i] + 2);
    p->overrides = name.data;
    bool ok = cli_options("simulate", "TRACE [options]", "", SIMULATE_TABLE, n, all, &p->o, rest, &n_rest, &code);
    if (ok && simulate_point_init(p, s->trace, &e))
        ok = !cli_fail("simulate", "%s: %s", p->overrides, e.text);
    p->config.keep_tokens = false; /* token times take too much memory for several runs at a time */
    p->config.load_tick_ms = 0;
    free(rest);
    free(all);
    return ok;
}

/* --------------------------------------------------------------------- run */

static void *work(void *arg)
{
    struct sweep *s = arg;
    for (uint32_t i; (i = atomic_fetch_add(&s->next, 1)) < s->n_points;) {
        simulate_point_run(s->points[i], s->trace, s->trace_name);
        report_summarize(&s->points[i]->report.run, &s->summaries[i]);
        pthread_mutex_lock(&s->lock);
        s->done[i] = true;
        pthread_cond_signal(&s->changed);
        pthread_mutex_unlock(&s->lock);
    }
    return NULL;
}

static double cached_share(const struct report_summary *r)
{
    uint64_t cached = 0;
    for (int i = 0; i < 4; i++)
        cached += r->cached_tokens[i];
    return r->input_tokens ? (double)cached / (double)r->input_tokens : 0;
}

static void print_head(const struct sweep *s)
{
    uint32_t width = 8;
    for (uint32_t i = 0; i < s->n_points; i++) {
        uint32_t len = (uint32_t)strlen(s->points[i]->overrides);
        width = len > width ? len : width;
    }
    printf("%-*s %9s %7s %8s %7s %6s %6s %8s %8s %8s %8s %7s %7s %7s %7s\n", (int)width, "", "goodput", "met",
           "refused", "tokens", "reuse", "of all", "TTFT", "p50", "p90", "p99", "TPOT", "p50", "p90", "p99");
}

static void print_point(const struct sweep *s, uint32_t i)
{
    const struct report_summary *r = &s->summaries[i];
    uint32_t width = 8;
    for (uint32_t k = 0; k < s->n_points; k++) {
        uint32_t len = (uint32_t)strlen(s->points[k]->overrides);
        width = len > width ? len : width;
    }
    printf("%-*s %9.3f %6.2f%% %8" PRIu64 " %6.2f%% %6.3f %6.3f %8.0f %8.0f %8.0f %8.0f %7.2f %7.2f %7.2f %7.2f\n",
           (int)width, s->points[i]->overrides, r->goodput_at_rate, 100 * r->attainment, r->refused,
           100 * r->offered.refused_token_share, cached_share(r), r->offered.cached_share, r->ttft.mean, r->ttft.p50,
           r->ttft.p90, r->ttft.p99, r->tpot.mean, r->tpot.p50, r->tpot.p90, r->tpot.p99);
    fflush(stdout);
}

/* Writes {"points": [{"point": "prefill=4 rate=2", "report": {...}}, ...]}. */
static void make_json(const struct sweep *s, struct bytes *out)
{
    bytes_printf(out, "{\"points\":[");
    for (uint32_t i = 0; i < s->n_points; i++) {
        bytes_printf(out, "%s{\"point\":", i ? "," : "");
        report_write_text(s->points[i]->overrides, out);
        bytes_printf(out, ",\"report\":");
        report_json(&s->points[i]->report.run, false, out);
        bytes_printf(out, "}");
    }
    bytes_printf(out, "]}\n");
}

/* Frees a printed point, unless a JSON or a page still needs it. False: the run contradicts itself. */
static bool finish_point(struct sweep *s, uint32_t i, bool keep)
{
    const struct report_run *run = &s->points[i]->report.run;
    bool ok =
        run->valid || !cli_fail("simulate", "%s contradicts itself: %s", s->points[i]->overrides, run->why_invalid);
    if (!keep) {
        simulate_report_fini(&s->points[i]->report);
        simulate_result_fini(&s->points[i]->result);
        s->points[i]->report = (struct simulate_report){.requests = NULL};
    }
    return ok;
}

static bool run_all(struct sweep *s, const struct simulate_options *o)
{
    long n_cpus = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t n_threads = o->jobs ? (uint32_t)o->jobs : n_cpus > 0 ? (uint32_t)n_cpus : 1;
    pthread_t *threads = mem_array(n_threads, sizeof(*threads));
    bool ok = true;
    if (!o->json)
        print_head(s);
    for (uint32_t i = 0; i < n_threads; i++)
        pthread_create(&threads[i], NULL, work, s);
    for (uint32_t i = 0; i < s->n_points; i++) {
        pthread_mutex_lock(&s->lock);
        while (!s->done[i])
            pthread_cond_wait(&s->changed, &s->lock);
        pthread_mutex_unlock(&s->lock);
        if (!o->json)
            print_point(s, i);
        ok = finish_point(s, i, o->json || o->output || o->html) && ok;
    }
    for (uint32_t i = 0; i < n_threads; i++)
        pthread_join(threads[i], NULL);
    free(threads);
    return ok;
}

static bool write_files(const struct sweep *s, const struct simulate_options *o)
{
    struct bytes text = {0};
    bool ok = true;
    if (o->json || o->output)
        make_json(s, &text);
    if (o->json) {
        fwrite(text.data, 1, text.len, stdout);
        fflush(stdout);
    }
    if (o->output)
        ok = simulate_write_file(o->output, &text) && ok;
    if (o->html) {
        const struct report_run **runs = mem_array(s->n_points, sizeof(*runs));
        for (uint32_t i = 0; i < s->n_points; i++) {
            s->points[i]->report.run.label = s->points[i]->overrides;
            runs[i] = &s->points[i]->report.run;
        }
        bytes_clear(&text);
        report_html(runs, s->n_points, &text);
        ok = simulate_write_file(o->html, &text) && ok;
        free(runs);
    }
    bytes_free(&text);
    return ok;
}

int simulate_sweep(const struct trace *trace, const char *trace_name, const struct simulate_options *o, int argc,
                   char **argv)
{
    struct sweep s = {.trace = trace, .trace_name = trace_name};
    struct td_error e = {{0}};
    bool ok = true;
    int code = 2;
    pthread_mutex_init(&s.lock, NULL);
    pthread_cond_init(&s.changed, NULL);
    if (parse_sweep(&s, o->sweep, &e))
        ok = !cli_fail("simulate", "%s", e.text);
    s.points = mem_array(s.n_points, sizeof(struct simulate_point *));
    s.summaries = mem_array(s.n_points, sizeof(*s.summaries));
    s.done = mem_array(s.n_points, sizeof(*s.done));
    for (uint32_t i = 0; i < s.n_points && ok; i++)
        ok = make_point(&s, i, argc, argv);
    if (ok) {
        ok = run_all(&s, o);
        code = write_files(&s, o) && ok ? 0 : 1;
    }
    for (uint32_t i = 0; i < s.n_points && s.points[i]; i++) {
        simulate_point_fini(s.points[i]);
        free(s.points[i]);
    }
    for (uint32_t i = 0; i < s.n_axes; i++) {
        for (uint32_t k = 0; k < s.axes[i].n; k++)
            free(s.axes[i].values[k]);
        free(s.axes[i].values);
        free(s.axes[i].name);
    }
    free(s.points);
    free(s.summaries);
    free(s.done);
    pthread_mutex_destroy(&s.lock);
    pthread_cond_destroy(&s.changed);
    return code;
}
