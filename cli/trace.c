/*
 * tandem trace: inspects request traces, changes them and makes new ones (docs/replay.md).
 *
 *   stat     lengths, rates and sharing of a trace, and what caches of several sizes would find in it
 *   convert  writes another format; also cuts a trace and scales rate, lengths and sharing
 *   slice    the same command, under the name that people look for
 *   synth    makes a trace of sessions, from a description or fitted to another trace
 */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/table.h"
#include "replay/evict_sim.h"
#include "replay/trace_make.h"
#include "replay/trace_stat.h"

enum { MAX_TRACE_BYTES = 1 << 30, MAX_CAPACITIES = 16 };

struct trace_options {
    const char *capacity, *format, *output, *tenant, *fit, *arrivals;
    double from_s, to_s, rate, length_scale, output_scale, prefix_scale, burstiness, turns;
    double prompt_sigma, more_sigma, output_sigma, think_sigma, think_s;
    int64_t skip, count, block_tokens, prompt, more, output_tokens, system, system_tokens, tenants, seed, requests;
    bool json, follows;
};

#define AT(member) offsetof(struct trace_options, member)
#define OUTPUT                                                                                                         \
    {"output", OPT_STRING, AT(output), NULL, "FILE", 0, 0, "default: stdout"},                                         \
    {                                                                                                                  \
        "format", OPT_CHOICE, AT(format), "tandem", "tandem|mooncake|azure", 0, 0, "format of the output"              \
    }
#define BLOCK_TOKENS                                                                                                   \
    {                                                                                                                  \
        "block-tokens", OPT_INT, AT(block_tokens), "0", NULL, 0, 1 << 20, "tokens of a block id; 0: as in the trace"   \
    }
#define END                                                                                                            \
    {                                                                                                                  \
        NULL, 0, 0, NULL, NULL, 0, 0, NULL                                                                             \
    }

static const struct option STAT_TABLE[] = {
    {"capacity", OPT_STRING, AT(capacity), "1000,5859,10000,30000,50000,100000", "LIST", 0, 0,
     "sizes of the caches to try, in blocks"},
    BLOCK_TOKENS,
    {"json", OPT_BOOL, AT(json), NULL, NULL, 0, 0, "prints one JSON object"},
    END,
};

static const struct option CHANGE_TABLE[] = {
    OUTPUT,
    BLOCK_TOKENS,
    {"from", OPT_DOUBLE, AT(from_s), "0", "SECONDS", 0, 0, "takes requests that arrive from this time on"},
    {"to", OPT_DOUBLE, AT(to_s), "0", "SECONDS", 0, 0, "takes requests that arrive before this time; 0: until the end"},
    {"tenant", OPT_STRING, AT(tenant), NULL, "NAME", 0, 0, "takes only requests of this tenant"},
    {"skip", OPT_INT, AT(skip), "0", "N", 0, 1e15, "leaves out the first N of these requests"},
    {"count", OPT_INT, AT(count), "0", "N", 0, 1e15, "then takes N requests; 0: all"},
    {"rate", OPT_DOUBLE, AT(rate), "1", "X", 1e-9, 1e9, "factor by which arrivals are faster"},
    {"length-scale", OPT_DOUBLE, AT(length_scale), "1", "X", 1e-6, 1e3,
     "factor for the lengths of prompts, answers and blocks"},
    {"output-scale", OPT_DOUBLE, AT(output_scale), "1", "X", 0, 1e3, "further factor for the lengths of answers"},
    {"prefix-scale", OPT_DOUBLE, AT(prefix_scale), "1", "X", 0, 100,
     "factor for the part that a prompt shares with others"},
    END,
};

static const struct option SYNTH_TABLE[] = {
    OUTPUT,
    {"fit", OPT_STRING, AT(fit), NULL, "TRACE", 0, 0, "takes every value that is not given from this trace"},
    {"requests", OPT_INT, AT(requests), "1000", "N", 1, 1e8, "number of requests"},
    {"seed", OPT_INT, AT(seed), "1", NULL, 0, 1e18, "seed of the trace"},
    {"follows", OPT_BOOL, AT(follows), NULL, NULL, 0, 0, "thinking begins when the answer has ended"},
    {"tenants", OPT_INT, AT(tenants), "0", "N", 0, 100000,
     "number of tenants among which sessions are divided; 0: none is named"},
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "Description (-1: as fitted; without --fit the default in parentheses)"},
    {"rate", OPT_DOUBLE, AT(rate), "-1", "RATE", -1, 1e6, "requests per second (1)"},
    {"arrivals", OPT_CHOICE, AT(arrivals), "fitted", "fitted|poisson|even|gamma", 0, 0,
     "arrivals of sessions (poisson); gamma: by --burstiness"},
    {"burstiness", OPT_DOUBLE, AT(burstiness), "-1", "X", -1, 100,
     "variation of the gaps between sessions; above 1: bursts (2)"},
    {"turns", OPT_DOUBLE, AT(turns), "-1", "N", -1, 1e4, "mean requests of a session (1)"},
    {"think", OPT_DOUBLE, AT(think_s), "-1", "SECONDS", -1, 1e6, "median time between two requests of a session (10)"},
    {"think-sigma", OPT_DOUBLE, AT(think_sigma), "1", NULL, 0, 5,
     "sigma of these log-normal times; not for fitted ones"},
    {"prompt", OPT_INT, AT(prompt), "-1", "TOKENS", -1, 1e7, "median tokens of a session's first prompt (1000)"},
    {"prompt-sigma", OPT_DOUBLE, AT(prompt_sigma), "1", NULL, 0, 5,
     "sigma of these log-normal lengths; not for fitted ones"},
    {"more", OPT_INT, AT(more), "-1", "TOKENS", -1, 1e7, "median tokens that a later request adds (200)"},
    {"more-sigma", OPT_DOUBLE, AT(more_sigma), "1", NULL, 0, 5,
     "sigma of these log-normal lengths; not for fitted ones"},
    {"output-tokens", OPT_INT, AT(output_tokens), "-1", "TOKENS", -1, 1e7, "median tokens of an answer (200)"},
    {"output-sigma", OPT_DOUBLE, AT(output_sigma), "0.7", NULL, 0, 5,
     "sigma of these log-normal lengths; not for fitted ones"},
    {"system", OPT_INT, AT(system), "-1", "N", -1, 1e6,
     "number of system prompts, whose popularity follows Zipf's law (0)"},
    {"system-tokens", OPT_INT, AT(system_tokens), "-1", "TOKENS", -1, 1e6, "tokens of a system prompt (1024)"},
    {"block-tokens", OPT_INT, AT(block_tokens), "-1", "TOKENS", -1, 1 << 20, "tokens of a block id (512)"},
    END,
};
#undef AT

/* -------------------------------------------------------------------- stat */

/* "1000,10000,30000" */
static bool parse_capacities(const char *text, uint64_t *out, uint32_t *n_out)
{
    for (*n_out = 0;; text++) {
        char *end;
        errno = 0;
        uint64_t value = *text >= '0' && *text <= '9' ? strtoull(text, &end, 10) : 0;
        if (!value || errno || value > UINT32_MAX || *n_out == MAX_CAPACITIES || (*end && *end != ','))
            return false;
        out[(*n_out)++] = value;
        text = end;
        if (!*text)
            return true;
    }
}

struct hits { /* for one capacity, as shares of the blocks that were asked for */
    uint64_t blocks;
    double lru, tandem, optimum; /* with partial last blocks */
    double lru_full, tandem_full, optimum_full;
};

static void add_hits(const struct trace *t, uint32_t block_tokens, struct hits *hits, uint32_t n)
{
    struct evict_sim *s = evict_sim_open(t, block_tokens);
    for (uint32_t i = 0; i < n; i++) {
        struct evict_result r[3];
        evict_sim_run(s, EVICTION_LRU, hits[i].blocks, &r[0]);
        evict_sim_run(s, EVICTION_TANDEM, hits[i].blocks, &r[1]);
        evict_sim_optimum(s, hits[i].blocks, &r[2]);
        double *to = block_tokens ? &hits[i].lru_full : &hits[i].lru;
        for (int k = 0; k < 3; k++)
            to[k] = r[k].n_asked ? (double)r[k].n_hits / (double)r[k].n_asked : 0;
    }
    evict_sim_close(s);
}

static double share(uint64_t part, uint64_t whole)
{
    return whole ? (double)part / (double)whole : 0;
}

static json_t *json_stats(const struct report_stats *s)
{
    if (!s->n)
        return json_null();
    return json_pack("{s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f}", "mean", s->mean, "std", s->std, "min", s->min, "p50",
                     s->p50, "p75", s->p75, "p90", s->p90, "p95", s->p95, "p99", s->p99, "max", s->max);
}

static json_t *json_ceiling(const struct trace_ceiling *c)
{
    return json_pack("{s:I,s:I,s:f,s:f}", "asked_blocks", (json_int_t)c->asked, "found_blocks", (json_int_t)c->found,
                     "block_share", share(c->found, c->asked), "token_share", share(c->found_tokens, c->asked_tokens));
}

static void print_json(const struct trace *t, const struct trace_stat *s, const struct hits *hits, uint32_t n)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < n; i++)
        json_array_append_new(list,
                              json_pack("{s:I,s:{s:f,s:f,s:f},s:{s:f,s:f,s:f}}", "blocks", (json_int_t)hits[i].blocks,
                                        "with_partial_last_blocks", "lru", hits[i].lru, "tandem", hits[i].tandem,
                                        "optimum", hits[i].optimum, "full_blocks_only", "lru", hits[i].lru_full,
                                        "tandem", hits[i].tandem_full, "optimum", hits[i].optimum_full));
    json_t *o = json_pack(
        "{s:s,s:I,s:I,s:I,s:I,s:f,s:f,s:f,s:I,s:I,s:I,s:I,s:I,s:o,s:o,s:I,s:I,s:I,s:o,s:o,s:o,s:o,s:I,s:I,s:I,s:o}",
        "format", trace_format_name(t->format), "requests", (json_int_t)s->n, "left_out", (json_int_t)t->n_left_out,
        "unanswered", (json_int_t)s->n_unanswered, "tenants", (json_int_t)(s->n_tenants - 1), "span_s", s->span_s,
        "rate", s->rate, "gap_cv", isfinite(s->gap_cv) ? s->gap_cv : 0, "most_in_a_second",
        (json_int_t)s->most_in_a_second, "least_in_a_minute", (json_int_t)s->least_in_a_minute, "most_in_a_minute",
        (json_int_t)s->most_in_a_minute, "input_tokens", (json_int_t)s->n_tokens_in, "output_tokens",
        (json_int_t)s->n_tokens_out, "prompt", json_stats(&s->prompt), "output", json_stats(&s->output), "blocks",
        (json_int_t)s->n_blocks, "distinct_blocks", (json_int_t)s->n_distinct, "blocks_used_once",
        (json_int_t)s->n_used_once, "ceiling_with_partial_last_blocks", json_ceiling(&s->with_partial),
        "ceiling_full_blocks_only", json_ceiling(&s->full_only), "reuse_distance_blocks", json_stats(&s->reuse_blocks),
        "reuse_after_s", json_stats(&s->reuse_s), "sessions", (json_int_t)s->n_sessions, "following",
        (json_int_t)s->n_following, "block_tokens", (json_int_t)t->block_tokens, "hits", list);
    cli_print_json(o);
}

static void add_row(struct table *t, const char *name, const struct report_stats *s)
{
    const double values[] = {s->mean, s->min, s->p50, s->p75, s->p90, s->p95, s->p99, s->max};
    table_cell(t, "%s", name);
    for (int i = 0; i < 8; i++)
        table_cell(t, s->n ? "%.*f" : "-", values[i] < 10 && values[i] != floor(values[i]), values[i]);
}

static void print_lengths(const struct trace_stat *s)
{
    static const char *const TITLES[] = {"", "mean", "min", "p50", "p75", "p90", "p95", "p99", "max"};
    struct table t;
    table_init(&t, 9, 1, TITLES);
    add_row(&t, "prompt tokens", &s->prompt);
    add_row(&t, "answer tokens", &s->output);
    if (s->reuse_blocks.n) {
        add_row(&t, "reuse distance, blocks", &s->reuse_blocks);
        add_row(&t, "reuse after, s", &s->reuse_s);
    }
    table_print(&t, stdout);
    table_fini(&t);
}

static void print_hits(const struct trace_stat *s, const struct hits *hits, uint32_t n)
{
    static const char *const TITLES[] = {"cache, blocks", "lru",          "tandem",       "optimum",
                                         "full: lru",     "full: tandem", "full: optimum"};
    struct table t;
    table_init(&t, 7, 0, TITLES);
    for (uint32_t i = 0; i < n; i++) {
        const double *shares[] = {&hits[i].lru, &hits[i].lru_full};
        table_cell(&t, "%" PRIu64, hits[i].blocks);
        for (int k = 0; k < 6; k++)
            table_cell(&t, "%.4f", shares[k / 3][k % 3]);
    }
    double with = share(s->with_partial.found, s->with_partial.asked),
           full = share(s->full_only.found, s->full_only.asked);
    table_cell(&t, "without end");
    for (int k = 0; k < 6; k++)
        table_cell(&t, "%.4f", k < 3 ? with : full);
    printf("\nblocks found, of those asked for; partial last blocks counted, and only full ones\n");
    table_print(&t, stdout);
    table_fini(&t);
}

static void print_stat(const struct trace *t, const struct trace_stat *s, const struct hits *hits, uint32_t n)
{
    printf("%s, %" PRIu64 " requests in %.1f s: %.3f/s, %" PRIu64 " to %" PRIu64 " in a minute, at most %" PRIu64
           " in a second; gaps vary by %.2f\n",
           trace_format_name(t->format), s->n, s->span_s, s->rate, s->least_in_a_minute, s->most_in_a_minute,
           s->most_in_a_second, s->gap_cv);
    if (t->n_left_out || s->n_unanswered)
        printf("%" PRIu64 " lines without a prompt left out, %" PRIu64 " requests without an answer\n", t->n_left_out,
               s->n_unanswered);
    if (s->n_tenants > 1 || s->n_sessions)
        printf("%" PRIu64 " tenants, %" PRIu64 " sessions, %" PRIu64 " requests follow one\n", s->n_tenants - 1,
               s->n_sessions, s->n_following);
    print_lengths(s);
    if (!s->n_blocks)
        return;
    printf("\n%" PRIu64 " blocks of %u tokens, %" PRIu64 " distinct, %.1f %% of these used once\n", s->n_blocks,
           t->block_tokens, s->n_distinct, 100 * share(s->n_used_once, s->n_distinct));
    printf("most that a cache can find: with partial last blocks %.2f %% of the blocks, %.2f %% of the tokens\n",
           100 * share(s->with_partial.found, s->with_partial.asked),
           100 * share(s->with_partial.found_tokens, s->with_partial.asked_tokens));
    printf("                            full blocks only         %.2f %% of the blocks, %.2f %% of the tokens\n",
           100 * share(s->full_only.found, s->full_only.asked),
           100 * share(s->full_only.found_tokens, s->full_only.asked_tokens));
    print_hits(s, hits, n);
}

static struct trace *read_trace(const char *path, int64_t block_tokens)
{
    struct trace *t = NULL;
    struct td_error e = {{0}};
    if (trace_read(path, MAX_TRACE_BYTES, &t, &e))
        cli_fail("trace", "%s", e.text);
    else if (block_tokens > 0)
        t->block_tokens = (uint32_t)block_tokens;
    return t;
}

static int run_stat(const struct trace_options *o, const char *path)
{
    uint64_t capacities[MAX_CAPACITIES];
    struct hits hits[MAX_CAPACITIES] = {{0}};
    struct trace_stat s;
    uint32_t n;
    if (!parse_capacities(o->capacity, capacities, &n)) {
        cli_fail("trace", "--capacity: expected up to %d numbers of blocks, separated by commas", MAX_CAPACITIES);
        return 2;
    }
    struct trace *t = read_trace(path, o->block_tokens);
    if (!t)
        return 1;
    for (uint32_t i = 0; i < n; i++)
        hits[i].blocks = capacities[i];
    n = t->n_blocks ? n : 0;
    trace_stat_of(t, &s);
    if (n) {
        add_hits(t, 0, hits, n);
        add_hits(t, t->block_tokens, hits, n);
    }
    if (o->json)
        print_json(t, &s, hits, n);
    else
        print_stat(t, &s, hits, n);
    trace_close(t);
    return 0;
}

/* ----------------------------------------------------------------- writing */

static enum trace_format format_of(const char *name)
{
    enum trace_format f = TRACE_MOONCAKE;
    while (strcmp(trace_format_name(f), name))
        f++;
    return f;
}

static int write_trace(const struct trace *t, const struct trace_options *o)
{
    struct bytes text = {0};
    struct td_error e = {{0}};
    FILE *f = o->output ? fopen(o->output, "wb") : stdout;
    if (!f)
        return cli_fail("trace", "%s: %s", o->output, strerror(errno));
    bool ok = !trace_write(t, format_of(o->format), &text, &e) && fwrite(text.data, 1, text.len, f) == text.len;
    ok = !(o->output ? fclose(f) : fflush(f)) && ok;
    bytes_free(&text);
    return ok ? 0 : cli_fail("trace", "%s: can't be written: %s", o->output ? o->output : "stdout", strerror(errno));
}

static int run_change(const struct trace_options *o, const char *path)
{
    const struct trace_change change = {.from_s = o->from_s,
                                        .to_s = o->to_s,
                                        .skip = (uint64_t)o->skip,
                                        .count = (uint64_t)o->count,
                                        .rate = o->rate,
                                        .length_scale = o->length_scale,
                                        .output_scale = o->output_scale,
                                        .prefix_scale = o->prefix_scale,
                                        .tenant = o->tenant};
    struct trace *t = read_trace(path, o->block_tokens);
    if (!t)
        return 1;
    struct trace *changed = trace_changed(t, &change);
    int code = changed->n_requests ? write_trace(changed, o) : cli_fail("trace", "%s: no request is left", path);
    trace_close(changed);
    trace_close(t);
    return code;
}

/* ------------------------------------------------------------------- synth */

static void set_law(struct trace_law *law, double median, double sigma, double fallback, bool fitted)
{
    if (median >= 0 || !fitted)
        trace_law_lognormal(median >= 0 ? median : fallback, sigma, law);
}

static double given(double value, double fitted, double fallback, bool is_fitted)
{
    return value >= 0 ? value : is_fitted ? fitted : fallback;
}

static void describe_trace(const struct trace_options *o, bool fitted, struct trace_synth *d)
{
    d->n_requests = (uint64_t)o->requests;
    d->seed = (uint64_t)o->seed;
    d->follows = o->follows;
    d->n_tenants = (uint32_t)o->tenants;
    d->rate = fmax(given(o->rate, d->rate, 1, fitted), 1e-9);
    d->burstiness = given(o->burstiness, d->burstiness, 2, fitted);
    if (!strcmp(o->arrivals, "poisson") || (!strcmp(o->arrivals, "fitted") && !fitted && o->burstiness < 0))
        d->burstiness = 1;
    if (!strcmp(o->arrivals, "even"))
        d->burstiness = 0;
    d->turns = fmax(given(o->turns, d->turns, 1, fitted), 1);
    d->n_system = (uint32_t)given((double)o->system, d->n_system, 0, fitted);
    d->system_tokens = (uint32_t)given((double)o->system_tokens, d->system_tokens, 1024, fitted);
    d->block_tokens = (uint32_t)given((double)o->block_tokens, d->block_tokens, 512, fitted);
    d->block_tokens += !d->block_tokens;
    set_law(&d->first, (double)o->prompt, o->prompt_sigma, 1000, fitted);
    set_law(&d->more, (double)o->more, o->more_sigma, 200, fitted);
    set_law(&d->output, (double)o->output_tokens, o->output_sigma, 200, fitted);
    set_law(&d->think_s, o->think_s, o->think_sigma, 10, fitted);
}

static int run_synth(const struct trace_options *o)
{
    struct trace_synth d = {.n_requests = 0};
    struct trace *like = NULL;
    if (o->fit) {
        like = read_trace(o->fit, 0);
        if (!like)
            return 1;
        trace_fit(like, &d);
        trace_close(like);
    }
    describe_trace(o, o->fit, &d);
    fprintf(stderr,
            "asked for: %" PRIu64
            " requests, %.3f/s, gaps of sessions vary by %.2f, %.2f turns; %u system prompts of %u tokens; first "
            "prompt %.0f, later %.0f more, answer %.0f tokens, %.1f s from one to the next (medians)\n",
            d.n_requests, d.rate, d.burstiness, d.turns, d.n_system, d.system_tokens, trace_law_draw(&d.first, 0.5),
            trace_law_draw(&d.more, 0.5), trace_law_draw(&d.output, 0.5), trace_law_draw(&d.think_s, 0.5));
    struct trace *t = trace_synth(&d);
    struct trace_stat s;
    trace_stat_of(t, &s);
    fprintf(stderr,
            "made: %" PRIu64 " requests in %.1f s, %.3f/s, gaps vary by %.2f, of %" PRIu64
            " sessions; prompt %.0f, answer %.0f tokens (medians)\n",
            s.n, s.span_s, s.rate, s.gap_cv, s.n_sessions, s.prompt.p50, s.output.p50);
    int code = write_trace(t, o);
    trace_close(t);
    return code;
}

/* -------------------------------------------------------------------- main */

static const struct {
    const char *name, *usage, *about;
    const struct option *table;
    int n_files;
} KINDS[] = {
    {"stat", "stat TRACE [options]", "Describes a trace, and says what caches would find in it.", STAT_TABLE, 1},
    {"convert", "convert TRACE [options]", "Writes a trace in another format; may also cut and scale it.", CHANGE_TABLE,
     1},
    {"slice", "slice TRACE [options]", "Writes a part of a trace; may also scale it.", CHANGE_TABLE, 1},
    {"synth", "synth [options]", "Makes a trace of sessions.", SYNTH_TABLE, 0},
};
enum { N_KINDS = sizeof(KINDS) / sizeof(KINDS[0]) };

static int no_kind(const char *word)
{
    if (word)
        return cli_usage("trace", "'%s': no such KIND", word);
    return cli_usage("trace", "KIND is missing");
}

/* --help without a kind. */
static int help(int argc, char **argv)
{
    static const struct option NONE[] = {{NULL, 0, 0, NULL, NULL, 0, 0, NULL}};
    struct option_word words[N_KINDS + 1] = {{0}};
    for (int i = 0; i < N_KINDS; i++)
        words[i] = (struct option_word){KINDS[i].name, KINDS[i].about, KINDS[i].table};
    const struct options o = {.usage = "KIND [options]",
                              .about = "Inspects, cuts, converts and makes request traces.",
                              .table = NONE,
                              .words = words,
                              .word = "KIND"};
    int exit_code;
    cli_options_words("trace", &o, argc, argv, NULL, NULL, NULL, &exit_code);
    return exit_code;
}

int cli_trace(int argc, char **argv)
{
    struct trace_options o = {0};
    const char **rest = mem_array((size_t)argc, sizeof(*rest)), *path = NULL;
    int exit_code = 2, n_rest = 0, kind = 0;
    while (kind < N_KINDS && (argc < 2 || strcmp(argv[1], KINDS[kind].name)))
        kind++;
    if (kind == N_KINDS && argc > 1 && !strncmp(argv[1], "--help", 6))
        exit_code = help(argc, argv);
    else if (kind == N_KINDS)
        exit_code = no_kind(argc > 1 ? argv[1] : NULL);
    bool go = kind < N_KINDS && cli_options("trace", KINDS[kind].usage, KINDS[kind].about, KINDS[kind].table, argc - 1,
                                            argv + 1, &o, rest, &n_rest, &exit_code);
    go = go && cli_words("trace", "TRACE", rest, n_rest, KINDS[kind].n_files, KINDS[kind].n_files, &exit_code);
    path = go && n_rest ? rest[0] : NULL;
    free(rest);
    if (!go)
        return exit_code;
    return !path ? run_synth(&o) : KINDS[kind].table == STAT_TABLE ? run_stat(&o, path) : run_change(&o, path);
}
