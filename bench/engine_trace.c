#include "bench/engine_trace.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

enum { MOST_ROWS = 16 }; /* kernels beyond that are summed in the file alone */

struct engine_trace {
    json_t *file; /* array of events */
    struct k_trace_event *events;
    uint32_t n_events, n_rows;
    bool has_begun;
};

struct engine_trace *engine_trace_open(void)
{
    struct engine_trace *t = mem_zalloc(sizeof(*t));
    t->file = json_array();
    return t;
}

void engine_trace_close(struct engine_trace *t)
{
    if (!t)
        return;
    json_decref(t->file);
    free(t->events);
    free(t);
}

enum td_status engine_trace_begin(struct engine_trace *t, struct kernels *k, struct td_error *e)
{
    enum td_status s = k_trace_begin(k, e);
    t->has_begun = !s;
    t->n_events = 0;
    return s;
}

void engine_trace_end(struct engine_trace *t, struct kernels *k)
{
    if (!t->has_begun)
        return;
    t->has_begun = false;
    free(t->events);
    t->events = k_trace_end(k, &t->n_events);
}

struct kernel_sum {
    const char *name;
    double ms;
    uint32_t n;
};

static int by_ms(const void *a, const void *b)
{
    const struct kernel_sum *x = a, *y = b;
    return (x->ms < y->ms) - (x->ms > y->ms);
}

static void add_to_sums(struct kernel_sum *sums, uint32_t *n, const struct k_trace_event *e)
{
    uint32_t i = 0;
    while (i < *n && strcmp(sums[i].name, e->name) != 0)
        i++;
    if (i == *n)
        sums[(*n)++] = (struct kernel_sum){.name = e->name};
    sums[i].ms += (double)(e->end_ns - e->begin_ns) * 1e-6;
    sums[i].n++;
}

/* Time in which something ran. Events may overlap. */
static double busy_ms(const struct k_trace_event *events, uint32_t n)
{
    uint64_t busy = 0, end = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t from = events[i].begin_ns > end ? events[i].begin_ns : end;
        busy += events[i].end_ns > from ? events[i].end_ns - from : 0;
        end = events[i].end_ns > end ? events[i].end_ns : end;
    }
    return (double)busy * 1e-6;
}

static void keep_event(struct engine_trace *t, const struct k_trace_event *e)
{
    json_array_append_new(t->file,
                          json_pack("{s:s, s:s, s:f, s:f, s:i, s:i}", "name", e->name, "ph", "X", "ts",
                                    (double)(e->begin_ns - t->events[0].begin_ns) * 1e-3, "dur",
                                    (double)(e->end_ns - e->begin_ns) * 1e-3, "pid", (int)t->n_rows, "tid", 0));
}

void engine_trace_rows(struct engine_trace *t, const char *name, uint32_t n_steps, double step_ms,
                       struct bench_rows *out)
{
    if (!t->n_events)
        return;
    struct kernel_sum *sums = mem_array(t->n_events, sizeof(*sums));
    double busy = busy_ms(t->events, t->n_events) / n_steps;
    uint32_t n = 0;
    for (uint32_t i = 0; i < t->n_events; i++) {
        add_to_sums(sums, &n, &t->events[i]);
        keep_event(t, &t->events[i]);
    }
    json_array_append_new(t->file, json_pack("{s:s, s:s, s:i, s:{s:s}}", "name", "process_name", "ph", "M", "pid",
                                             (int)t->n_rows++, "args", "name", name));
    bench_add(out, "ms", busy < step_ms ? step_ms - busy : 0, step_ms, "%s, device idle", name);
    qsort(sums, n, sizeof(*sums), by_ms);
    for (uint32_t i = 0; i < n && i < MOST_ROWS; i++)
        bench_add(out, "ms", sums[i].ms / n_steps, step_ms, "  %.3g x %s", (double)sums[i].n / n_steps, sums[i].name);
    free(sums);
    t->n_events = 0;
}

enum td_status engine_trace_write(const struct engine_trace *t, const char *path, struct td_error *e)
{
    json_t *o = json_pack("{s:O}", "traceEvents", t->file);
    int failed = json_dump_file(o, path, JSON_COMPACT | JSON_REAL_PRECISION(12));
    json_decref(o);
    return failed ? td_fail(e, TD_ERR_IO, "--trace %s: can't be written", path) : TD_OK;
}
