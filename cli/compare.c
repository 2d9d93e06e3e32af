/*
 * tandem compare: compares two reports, or several on each side: what changed, and whether that is noise
 * (replay/compare.h).
 *
 * --json: {"a": [labels], "b": [labels], "paired", "rows": [{"name", "a", "b", "change", "low", "high", "p",
 * "verdict"}]}. The change of a share is a difference, other changes are relative.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/table.h"
#include "replay/compare.h"

enum { MAX_REPORTS = 64 };
static const size_t MAX_REPORT_BYTES = (size_t)4 << 30;

struct compare_options {
    const char *html;
    int64_t seed;
    bool json;
};

#define AT(member) offsetof(struct compare_options, member)
static const struct option TABLE[] = {
    {"html", OPT_STRING, AT(html), NULL, "FILE", 0, 0, "writes one page with the plots of all reports"},
    {"seed", OPT_INT, AT(seed), "1", NULL, 0, 1e18, "seed of the resamplings"},
    {"json", OPT_BOOL, AT(json), NULL, NULL, 0, 0, "prints one JSON object"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};
#undef AT

struct reports {
    struct report_file *files[MAX_REPORTS];
    const struct report_run *runs[MAX_REPORTS];
    uint32_t n, n_a; /* n_a: reports of side a, which come first */
};

static const char *const VERDICTS[] = {"noise", "better", "worse"};

/* ----------------------------------------------------------------- reading */

static bool read_report(struct reports *all, const char *path)
{
    struct td_error e = {{0}};
    char *text;
    size_t len;
    if (all->n == MAX_REPORTS)
        return !cli_fail("compare", "more than %d reports", MAX_REPORTS);
    if (file_read(path, MAX_REPORT_BYTES, &text, &len, &e))
        return !cli_fail("compare", "%s", e.text);
    enum td_status s = report_parse(text, len, &all->files[all->n], &e);
    free(text);
    if (s)
        return !cli_fail("compare", "%s: %s", path, e.text);
    all->runs[all->n] = report_file_run(all->files[all->n]);
    if (!all->runs[all->n++]->n_requests)
        return !cli_fail("compare", "%s: the report has no request", path);
    return true;
}

/* Reads "A.json B.json" or "A1.json A2.json vs B1.json B2.json". Returns the exit code. */
static int read_all(struct reports *all, const char **paths, int n)
{
    if (n < 2)
        return cli_usage("compare", "give two reports, or several with vs between the two sides");
    for (int i = 0; i < n; i++) {
        bool between = !strcmp(paths[i], "vs");
        if (between && !all->n_a)
            all->n_a = all->n;
        else if (between)
            return cli_usage("compare", "give vs once: there are two sides");
        else if (!read_report(all, paths[i]))
            return 1;
    }
    if (!all->n_a && all->n == 2)
        all->n_a = 1;
    if (!all->n_a || all->n_a == all->n)
        return cli_usage("compare", "give two reports, or several with vs between the two sides");
    return 0;
}

/* ---------------------------------------------------------------- printing */

static json_t *json_real_or_null(double v)
{
    return isfinite(v) ? json_real(v) : json_null();
}

static json_t *json_labels(const struct reports *all, uint32_t from, uint32_t to)
{
    json_t *list = json_array();
    for (uint32_t i = from; i < to; i++)
        json_array_append_new(list, ask_text_json(all->runs[i]->label, strlen(all->runs[i]->label)));
    return list;
}

static void print_json(const struct reports *all, const struct compare_result *c)
{
    json_t *rows = json_array();
    for (int i = 0; i < COMPARE_ROWS; i++) {
        const struct compare_row *r = &c->rows[i];
        json_array_append_new(rows, json_pack("{s:s,s:o,s:o,s:o,s:o,s:o,s:o,s:s}", "name", r->name, "a",
                                              json_real_or_null(r->a), "b", json_real_or_null(r->b), "change",
                                              json_real_or_null(r->change), "low", json_real_or_null(r->low), "high",
                                              json_real_or_null(r->high), "p", json_real_or_null(r->p), "verdict",
                                              VERDICTS[r->verdict]));
    }
    cli_print_json(json_pack("{s:o,s:o,s:b,s:o}", "a", json_labels(all, 0, all->n_a), "b",
                             json_labels(all, all->n_a, all->n), "paired", (int)c->paired, "rows", rows));
}

static void add_row(struct table *t, const struct compare_row *r)
{
    const char *unit = r->is_share ? "%" : "ms", *change_unit = r->is_share ? "points" : "%";
    double times = r->is_share ? 100 : 1;
    if (isnan(r->a) && isnan(r->b))
        return;
    table_cell(t, "%s", r->name);
    table_cell(t, isnan(r->a) ? "-" : "%.2f %s", times * r->a, unit);
    table_cell(t, isnan(r->b) ? "-" : "%.2f %s", times * r->b, unit);
    if (isnan(r->change) || isnan(r->p)) {
        for (int i = 0; i < 4; i++)
            table_cell(t, "-");
        return;
    }
    table_cell(t, "%+.1f %s", 100 * r->change, change_unit);
    table_cell(t, "%+.1f to %+.1f", 100 * r->low, 100 * r->high);
    table_cell(t, r->p <= 1e-3 ? "< 0.002" : "%.3f", r->p);
    table_cell(t, "%s", VERDICTS[r->verdict]);
}

static void print_table(const struct reports *all, const struct compare_result *c)
{
    static const char *const TITLES[] = {"", "a", "b", "change", "95 % of it", "p", ""};
    struct table t;
    table_init(&t, 7, 1 | 1 << 6, TITLES);
    for (int i = 0; i < COMPARE_ROWS; i++)
        add_row(&t, &c->rows[i]);
    for (uint32_t i = 0; i < all->n; i++) {
        const struct report_run *r = all->runs[i];
        printf("%s: %s of %s, %llu requests%s%s\n", i < all->n_a ? "a" : "b", r->label, r->trace,
               (unsigned long long)r->n_requests,
               r->valid ? "" : "; NOT VALID: ", r->valid || !r->why_invalid ? "" : r->why_invalid);
    }
    table_print(&t, stdout);
    table_fini(&t);
    printf("%s\n", c->paired ? "the same requests on both sides" : "not the same requests on both sides");
    if (c->n_runs == 1)
        printf("one run a side: what differs from run to run is not in the intervals; several, with vs between, show "
               "it\n");
}

static int write_page(const struct reports *all, const char *path)
{
    struct bytes page = {0};
    report_html(all->runs, all->n, &page);
    FILE *f = fopen(path, "wb");
    bool ok = f && fwrite(page.data, 1, page.len, f) == page.len;
    if (f)
        ok = !fclose(f) && ok;
    bytes_free(&page);
    return ok ? 0 : cli_fail("compare", "%s: can't be written", path);
}

int cli_compare(int argc, char **argv)
{
    struct compare_options o = {0};
    struct reports all = {.n = 0};
    struct compare_result c;
    const char **rest = mem_array((size_t)argc, sizeof(*rest));
    int exit_code, n_rest;
    bool go = cli_options("compare", "A.json B.json | A1.json A2.json ... vs B1.json B2.json ... [options]",
                          "What changed between reports (replay or simulate --output), and whether that is noise.",
                          TABLE, argc, argv, &o, rest, &n_rest, &exit_code);
    if (go) {
        exit_code = read_all(&all, rest, n_rest);
        go = !exit_code;
    }
    if (go) {
        compare_runs(all.runs, all.n_a, all.runs + all.n_a, all.n - all.n_a, (uint64_t)o.seed, &c);
        if (o.json)
            print_json(&all, &c);
        else
            print_table(&all, &c);
        exit_code = o.html ? write_page(&all, o.html) : 0;
    }
    for (uint32_t i = 0; i < all.n; i++)
        report_close(all.files[i]);
    free(rest);
    return exit_code;
}
