/*
 * tandem replay: sends a trace to a cluster and reports how the cluster did (docs/replay.md).
 *
 * The loop is open unless --concurrency is given: a request is sent when it is due, whatever happened to
 * earlier ones. The report says how late requests were sent, and a run that sent them too late is marked as
 * not valid. The first Ctrl-C stops sending, waits for the running requests and reports; a second one stops
 * the waiting.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/replay.h"

enum { MAX_TRACE_BYTES = 1 << 30 };

#define AT(member) offsetof(struct replay_options, member)
static const struct option TABLE[] = {
    {"router", OPT_ADDRESS, AT(router), NULL, "HOST:PORT", 0, 0, "default: $TANDEM_ROUTER, else " CLI_DEFAULT_ROUTER},
    CLI_API_KEY_OPTION(AT(api_key)),
    {"admin", OPT_ADDRESS, AT(admin), NULL, "ADDR", 0, 0,
     "admin address of that router; default: $TANDEM_ADMIN, else its admin socket on this host"},
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "What is sent"},
    {"requests", OPT_INT, AT(requests), "0", NULL, 0, 1e12,
     "number of requests to send, from the first one on; 0: all"},
    {"length-scale", OPT_DOUBLE, AT(length_scale), "1", "X", 1e-6, 1e3, "factor for the lengths of prompts and blocks"},
    {"max-output", OPT_INT, AT(max_output), "0", NULL, 0, 1e9, "most tokens of an answer; 0: as in the trace"},
    {"block-tokens", OPT_INT, AT(block_tokens), "0", NULL, 0, 1 << 20, "tokens of a block id; 0: as in the trace"},
    {"ttft-ms", OPT_LIMIT_MS, AT(ttft_ms), "0", NULL, 0, 3.6e6,
     "TTFT limit of requests that have none in the trace; 0: none"},
    {"tpot-ms", OPT_LIMIT_MS, AT(tpot_ms), "0", NULL, 0, 3.6e6,
     "TPOT limit of requests that have none in the trace; 0: none"},
    {"tenant", OPT_STRING, AT(tenant), NULL, "NAME", 0, 0, "tenant of all requests; default: as in the trace"},
    {"seed", OPT_INT, AT(seed), "1", NULL, 0, 1e18, "seed of the prompts' tokens and of --poisson"},
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "When"},
    {"rate", OPT_DOUBLE, AT(rate), "1", "X", 1e-6, 1e6, "factor by which arrivals are faster than in the trace"},
    {"poisson", OPT_DOUBLE, AT(poisson), "0", "RATE", 0, 1e6,
     "independent arrivals, RATE a second on average (times --rate); 0: as in the trace"},
    {"concurrency", OPT_INT, AT(concurrency), "0", "N", 0, 1e6,
     "closed loop: keeps N requests running, whatever the trace's times; 0: open loop"},
    {"retry-share", OPT_DOUBLE, AT(retry_share), "0", "X", 0, 1,
     "share of the refused requests that come back once, when they are told to"},
    {"processes", OPT_INT, AT(processes), "1", "N", 1, REPLAY_MAX_PROCESSES, "processes that send requests"},
    {"max-lag", OPT_MS, AT(max_lag_ms), "50", NULL, 1, 3.6e6,
     "a run is not valid if the p99 of late sending exceeds this"},
    {"warm", OPT_MS, AT(warm_ms), "60s", NULL, 0, 3.6e6,
     "predictions for requests that arrive before this time are not counted"},
    {"find-max", OPT_BOOL, AT(find_max), NULL, NULL, 0, 0,
     "runs at several rates, and finds the highest that meets the limits"},
    {"find-rounds", OPT_INT, AT(find_rounds), "12", "N", 1, 100, "most rates that --find-max tries"},
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "Faults"},
    {"at", OPT_STRING, AT(at), NULL, "LIST", 0, 0,
     "TIME:ACTION:WORKER, several with commas: kill, stop, cont, term, drain, slow:WORKER/TIMES, scale:prefill=N, "
     "faults:NAME/SCRIPT (needs tandem up --faults; syntax: base/fault.h; an empty script ends faults)"},
    {"run-dir", OPT_STRING, AT(run_dir), NULL, "DIR", 0, 0, "run directory of the cluster (tandem up), for --at"},
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "Report"},
    {"output", OPT_STRING, AT(output), NULL, "FILE", 0, 0,
     "writes the report with every request as JSON, for tandem compare"},
    {"html", OPT_STRING, AT(html), NULL, "FILE", 0, 0, "writes the report as one page"},
    {"label", OPT_STRING, AT(label), "replay", "TEXT", 0, 0, "name of the run in comparisons"},
    {"progress", OPT_BOOL, AT(progress), "true", NULL, 0, 0, "prints a line on stderr each second"},
    {"json", OPT_BOOL, AT(json), NULL, NULL, 0, 0, "prints one JSON object, without the requests"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};

/* ------------------------------------------------------------------- trace */

/*
 * Leaves out requests that don't fit the model and requests that follow one of these, and says so. Moves the
 * others towards the front of the same array, so none is overwritten before it is read. Both `follows` and
 * new_index are 1 + an index, and a request follows only earlier ones (trace.h).
 */
static void cut_trace(struct replay *r)
{
    struct trace *t = r->trace;
    uint64_t n = r->o.requests && (uint64_t)r->o.requests < t->n_requests ? (uint64_t)r->o.requests : t->n_requests;
    uint64_t *new_index = mem_array(t->n_requests, sizeof(*new_index)); /* 0: left out */
    for (uint64_t i = 0; i < n; i++) {
        struct trace_request q = t->requests[i];
        if (replay_prompt_tokens(r, i) >= r->board->context || (q.follows && !new_index[q.follows - 1])) {
            r->left_out++;
            continue;
        }
        q.follows = q.follows ? new_index[q.follows - 1] : 0;
        q.tenant = r->o.tenant ? 0 : q.tenant;
        t->requests[r->n] = q;
        new_index[i] = ++r->n;
    }
    free(new_index);
    if (r->left_out)
        fprintf(stderr, "%" PRIu64 " prompts are longer than the context of %u, or follow such, and are left out\n",
                r->left_out, r->board->context);
    if (r->o.tenant) {
        free(t->tenants[0]);
        t->tenants[0] = mem_strdup(r->o.tenant);
    }
    if (r->o.block_tokens)
        t->block_tokens = (uint32_t)r->o.block_tokens;
}

/* ------------------------------------------------------------------ report */

static bool write_file(const char *path, const struct bytes *text)
{
    FILE *f = fopen(path, "wb");
    bool ok = f && fwrite(text->data, 1, text->len, f) == text->len;
    if (f)
        ok = !fclose(f) && ok;
    if (!ok)
        cli_fail("replay", "%s: can't be written", path);
    return ok;
}

static bool write_report(const struct replay *r, const struct report_run *run)
{
    struct bytes text = {0};
    bool ok = true;
    if (r->o.json)
        report_json(run, false, &text);
    else
        report_table(run, &text);
    fwrite(text.data, 1, text.len, stdout);
    fflush(stdout);
    if (r->o.output) {
        bytes_clear(&text);
        report_json(run, true, &text);
        ok = write_file(r->o.output, &text) && ok;
    }
    if (r->o.html) {
        bytes_clear(&text);
        report_html((const struct report_run *const[]){run}, 1, &text);
        ok = write_file(r->o.html, &text) && ok;
    }
    bytes_free(&text);
    return ok;
}

/* Returns the exit code. It is 1 also if a sender died, or if the figures contradict each other. */
static int run_and_report(struct replay *r, struct replay_events *events, const char *trace_name)
{
    struct replay_result result;
    struct report_point *points = NULL;
    struct td_error e = {{0}};
    uint32_t n_points = 0;
    if (r->o.find_max)
        points = replay_find_max(r, &n_points);
    else if (!replay_run(r, events))
        return 1;
    replay_result_init(&result, r, events);
    result.run.trace = trace_name;
    result.run.points = points;
    result.run.n_points = n_points;
    bool ok = write_report(r, &result.run) && !r->n_senders_died;
    if (report_check(&result.run, &e))
        ok = !cli_fail("replay", "%s", e.text);
    replay_result_fini(&result);
    free(points);
    return ok ? 0 : 1;
}

/* -------------------------------------------------------------------- main */

static enum td_status check_options(const struct replay_options *o, struct replay_events *events, struct td_error *e)
{
    enum td_status s = replay_events_parse(o->at, events, e);
    if (!s && o->find_max && o->concurrency)
        s = td_fail(e, TD_ERR_INVALID,
                    "--find-max searches for a rate; it can't be used with --concurrency, which has no rate");
    if (!s && o->find_max && !(o->ttft_ms > 0) && !(o->tpot_ms > 0))
        s = td_fail(e, TD_ERR_INVALID, "--find-max needs a limit: --ttft-ms, --tpot-ms or both");
    if (!s && o->find_max && events->n)
        s = td_fail(e, TD_ERR_INVALID, "--find-max and --at can't be used together");
    return s ? s : replay_events_check(events, o->run_dir, e);
}

static int replay_trace(struct replay *r, struct replay_events *events, const char *path)
{
    struct td_error e = {{0}};
    const char *slash = strrchr(path, '/');
    if (trace_read(path, MAX_TRACE_BYTES, &r->trace, &e))
        return cli_fail("replay", "%s", e.text);
    r->board = replay_map(sizeof(*r->board)); /* before any child: they write their results there */
    replay_on_signal();
    if (replay_in_child(r, replay_probe)) /* puts the model's context on the board, which cut_trace() needs */
        return 1;
    cut_trace(r);
    if (!r->n)
        return cli_fail("replay", "no request of the trace fits the model");
    replay_schedule(r);
    return run_and_report(r, events, slash ? slash + 1 : path);
}

int cli_replay(int argc, char **argv)
{
    struct replay r = {.n = 0};
    struct replay_events events;
    struct td_error e = {{0}};
    const char **rest = mem_array((size_t)argc, sizeof(*rest)), *path;
    int exit_code, n_rest;
    bool go = cli_options("replay", "TRACE [options]", "Sends a trace to a cluster and reports how the cluster did.",
                          TABLE, argc, argv, &r.o, rest, &n_rest, &exit_code);
    go = go && cli_words("replay", "TRACE", rest, n_rest, 1, 1, &exit_code);
    path = go ? rest[0] : NULL;
    free(rest);
    if (!go)
        return exit_code;
    if (check_options(&r.o, &events, &e))
        return cli_usage("replay", "%s", e.text);
    clock_init_real(&r.clock);
    exit_code = replay_trace(&r, &events, path);
    trace_close(r.trace);
    free(r.due_ms);
    free(r.owner);
    free(r.first_token);
    return exit_code;
}
