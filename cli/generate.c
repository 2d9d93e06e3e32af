/* tandem generate: answers one prompt and streams the answer, or answers many requests from standard input
 * (--jsonl: one JSON object a line, proto/ask/ask_params.h). */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/ask.h"
#include "cli/local.h"
#include "cli/params.h"
#include "sched/policy.h"

struct generate_options {
    const char *router, *api_key, *model, *plan, *worker_options;
    bool jsonl, json, local, chat, logprobs, timing;
    int64_t concurrency, wait_ms;
    struct cli_params params;
};

#define AT(member) offsetof(struct generate_options, member)
static const struct option TABLE[] = {
    {"router", OPT_ADDRESS, AT(router), NULL, "HOST:PORT", 0, 0, "default: $TANDEM_ROUTER, else " CLI_DEFAULT_ROUTER},
    CLI_API_KEY_OPTION(AT(api_key)),
    {"jsonl", OPT_BOOL, AT(jsonl), NULL, NULL, 0, 0,
     "reads requests from standard input, one JSON object a line; options are defaults of every line"},
    {"json", OPT_BOOL, AT(json), NULL, NULL, 0, 0, "prints the whole answer as one JSON object"},
    {"concurrency", OPT_INT, AT(concurrency), "64", NULL, 1, 65536, "with --jsonl: most requests in flight"},
    {"wait-ms", OPT_MS, AT(wait_ms), "30000", NULL, 0, 3.6e6, "how long to wait for the cluster to be ready"},
    {"chat", OPT_BOOL, AT(chat), "true", NULL, 0, 0, "the text is a user's turn, if the model has a chat template"},
    {"timing", OPT_BOOL, AT(timing), "true", NULL, 0, 0, "prints on stderr where the time went"},
    {"logprobs", OPT_BOOL, AT(logprobs), "true", NULL, 0, 0, "includes log-probabilities in JSON answers"},
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "One process instead of a cluster"},
    {"local", OPT_BOOL, AT(local), NULL, NULL, 0, 0, "runs router and workers inside this process; needs --model"},
    {"model", OPT_STRING, AT(model), NULL, "DIR", 0, 0, "with --local: the model's directory"},
    {"plan", OPT_CHOICE, AT(plan), "auto", PLAN_FORCE_NAMES, 0, 0, "with --local: forces every placement"},
    {"worker-options", OPT_STRING, AT(worker_options), NULL, "'--A X ...'", 0, 0,
     "with --local: options of tandem-decode"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};

struct generate_session {
    const struct generate_options *o;
    const char *router;
    struct rpc_client *client;
    /* Rpc threads finish asks and the main thread waits for them: a count is enough, a queue is not
     * needed. */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int64_t n_flying;
    bool failed;
    uint64_t n_lines, n_failed; /* lines of input; empty lines do not count */
    uint64_t first_failed;      /* number of the first line that failed; 0: none failed */
    char first_error[256];
};

static void add_defaults(const struct generate_options *o, json_t *r)
{
    cli_params_add(&o->params, r, o->jsonl);
    if (o->logprobs && (o->jsonl || o->json) && !json_object_get(r, "logprobs"))
        json_object_set_new(r, "logprobs", json_true());
}

/*
 * Comes last in the end of an ask: when the last one has landed, the main thread may go on, close the client
 * and leave the function that has s. rpc_client_close() waits for the threads that are still in here.
 */
static void landed(struct generate_session *s, bool failed)
{
    pthread_mutex_lock(&s->lock);
    s->n_flying--;
    s->failed |= failed;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

static void wait_flying(struct generate_session *s, int64_t below)
{
    pthread_mutex_lock(&s->lock);
    while (s->n_flying >= below)
        pthread_cond_wait(&s->changed, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

/* ------------------------------------------------------------------ jsonl */

struct line {
    struct generate_session *session;
    uint64_t number; /* of the line, from 1 */
};

/* Prints an answer; an error also has the line's number. Takes the reference. The lock is held. */
static void print_answer(struct generate_session *s, uint64_t number, json_t *answer)
{
    json_t *error = json_object_get(answer, "error");
    if (error) {
        json_object_set_new(error, "line", json_integer((json_int_t)number));
        s->n_failed++;
        if (!s->first_failed || number < s->first_failed) {
            s->first_failed = number;
            snprintf(s->first_error, sizeof(s->first_error), "%s: %s",
                     json_string_value(json_object_get(error, "code")),
                     json_string_value(json_object_get(error, "message")));
        }
    }
    cli_print_json(answer);
}

static void line_done(struct ask *a)
{
    struct line *line = a->user;
    struct generate_session *s = line->session;
    bool failed = a->code != RPC_OK;
    pthread_mutex_lock(&s->lock);
    print_answer(s, line->number, ask_result(a));
    pthread_mutex_unlock(&s->lock);
    ask_free(a);
    free(line);
    landed(s, failed);
}

static void refuse_line(struct generate_session *s, uint64_t number, const char *what)
{
    pthread_mutex_lock(&s->lock);
    print_answer(s, number,
                 json_pack("{s:{s:s,s:s}}", "error", "code", rpc_code_name(RPC_INVALID_ARGUMENT), "message", what));
    s->failed = true;
    pthread_mutex_unlock(&s->lock);
}

static void start_line(struct generate_session *s, const struct bytes *text, uint64_t number)
{
    json_error_t je;
    char what[256];
    json_t *r = json_loadb(text->data, text->len, JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES, &je);
    if (!json_is_object(r)) {
        snprintf(what, sizeof(what), "the line is not a JSON object%s%s", r ? "" : ": ", r ? "" : je.text);
        refuse_line(s, number, what);
        json_decref(r);
        return;
    }
    struct line *line = mem_zalloc(sizeof(*line));
    *line = (struct line){s, number};
    add_defaults(s->o, r);
    wait_flying(s, s->o->concurrency);
    pthread_mutex_lock(&s->lock);
    s->n_flying++;
    pthread_mutex_unlock(&s->lock);
    ask_start(s->client, r, NULL, line_done, line);
}

static int run_jsonl(struct generate_session *s)
{
    struct bytes line = {0};
    for (uint64_t number = 1; !ferror(stdout) && cli_read_line(&line); number++)
        if (line.len) {
            s->n_lines++;
            start_line(s, &line, number);
        }
    wait_flying(s, 1);
    bytes_free(&line);
    if (s->n_failed)
        cli_fail("generate", "%" PRIu64 " of %" PRIu64 " lines failed; the first, line %" PRIu64 ": %s", s->n_failed,
                 s->n_lines, s->first_failed, s->first_error);
    return s->failed;
}

/* -------------------------------------------------------------- one prompt */

static void show_text(struct ask *a, const void *text, size_t len)
{
    (void)a;
    fwrite(text, 1, len, stdout);
    fflush(stdout);
}

/* One line of the timing, unless it would show 0.0. */
static void print_part(const char *name, double ms)
{
    if (ms >= 0.05)
        fprintf(stderr, "  %-18s %9.1f ms\n", name, ms);
}

static void show_timing(const struct ask *a)
{
    const Tandem__V1__GenerateEnd *e = a->end;
    const Tandem__V1__Timing *t = e->timing;
    const Tandem__V1__CachedTokens *c = e->usage->cached_tokens;
    fprintf(stderr, "\n%u prompt tokens (%u cached), %u generated; %.*s: %.*s -> %.*s; seed %llu\n",
            e->usage->prompt_tokens, c->worker + c->peer + c->dram + c->ssd, e->usage->completion_tokens,
            (int)e->placement->plan.len, (const char *)e->placement->plan.data, (int)e->placement->prefill.len,
            (const char *)e->placement->prefill.data, (int)e->placement->decode.len,
            (const char *)e->placement->decode.data, (unsigned long long)e->seed);
    print_part("tokenize", t->tokenize);
    print_part("queue", t->queue);
    print_part("prefix load", t->prefix_load);
    print_part("prefill", t->prefill);
    print_part("transfer", t->transfer);
    print_part("exposed transfer", t->exposed_transfer);
    print_part("decode wait", t->decode_wait);
    print_part("decode", t->decode);
    if (e->replans)
        print_part("stalled", t->stalled);
    print_part("residual", t->residual);
    fprintf(stderr, "  %-18s %9.1f ms   (predicted %.1f ms)\n  %-18s %9.2f ms   (%.1f tokens/s)\n  %-18s %9.1f ms\n",
            "TTFT", t->ttft, e->predicted->ttft_ms, "TPOT", t->tpot, t->tpot > 0 ? 1000 / t->tpot : 0, "total",
            t->total);
}

static void prompt_done(struct ask *a)
{
    struct generate_session *s = a->user;
    bool failed = a->code != RPC_OK;
    if (s->o->json)
        cli_print_json(ask_result(a));
    else if (failed)
        cli_rpc_fail("generate", s->router, a->code, a->error);
    else if (putchar('\n') != EOF && fflush(stdout) == 0 && s->o->timing)
        show_timing(a);
    ask_free(a);
    landed(s, failed);
}

static int run_prompt(struct generate_session *s, const struct bytes *text)
{
    json_t *r = cli_prompt_request("generate", s->client, text, s->o->chat);
    if (!r)
        return 1;
    add_defaults(s->o, r);
    s->n_flying = 1;
    ask_start(s->client, r, s->o->json ? NULL : show_text, prompt_done, s);
    wait_flying(s, 1);
    return s->failed;
}

/* ------------------------------------------------------------------- start */

static enum td_status open_local(const struct generate_options *o, struct local **out, struct td_error *e)
{
    const char *args[64] = {"--model", o->model, "--log-level", "warn"};
    /* Static, because the options of the workers borrow their texts until the cluster closes. */
    static char words[4096];
    const char *given = o->worker_options ? o->worker_options : "";
    int n = 4;
    if (strlen(given) >= sizeof(words))
        return td_fail(e, TD_ERR_INVALID, "--worker-options: longer than %zu bytes", sizeof(words) - 1);
    snprintf(words, sizeof(words), "%s", given);
    /* One word more than local_open() takes, so that it refuses what is cut off here. */
    for (char *save, *w = strtok_r(words, " ", &save); w && n < 63; w = strtok_r(NULL, " ", &save))
        args[n++] = w;
    return local_open(o->model, args, o->plan, LOCAL_LOOPBACK, out, e);
}

static int run_requests(struct generate_session *s, const char **rest, int n_rest)
{
    struct bytes prompt = {0};
    if (!s->o->jsonl && !cli_read_prompt("generate", rest, n_rest, &prompt)) {
        bytes_free(&prompt);
        return 2;
    }
    int exit_code = 1;
    if (cli_wait_ready("generate", s->client, s->router, s->o->wait_ms))
        exit_code = s->o->jsonl ? run_jsonl(s) : run_prompt(s, &prompt);
    bytes_free(&prompt);
    return exit_code;
}

/* Checks that the options fit together, before anything is started. */
static bool is_usable(const struct generate_options *o, const char **rest, int n_rest, int *exit_out)
{
    json_t *n = json_object_get(o->params.given, "n");
    if (o->local && !o->model)
        *exit_out = cli_usage("generate", "--local needs --model DIR");
    else if (o->jsonl && n_rest)
        *exit_out = cli_usage("generate", "'%s': with --jsonl prompts come from standard input", rest[0]);
    else if (n && json_integer_value(n) > 1 && !o->jsonl && !o->json)
        *exit_out = cli_usage("generate", "--n: several answers need --json");
    else
        return true;
    return false;
}

static int connect_and_run(struct generate_session *s, const char **rest, int n_rest)
{
    struct local *local = NULL;
    struct td_error e = {{0}};
    int exit_code = 1;
    enum td_status opened = s->o->local ? open_local(s->o, &local, &e) : TD_OK;
    if (opened)
        return opened == TD_ERR_INVALID ? cli_usage("generate", "%s", e.text) : cli_fail("generate", "%s", e.text);
    s->router = local ? local_router(local) : cli_router(s->o->router);
    s->client = cli_connect("generate", s->router, s->o->api_key);
    if (s->client)
        exit_code = run_requests(s, rest, n_rest);
    rpc_client_close(s->client);
    local_close(local);
    return exit_code;
}

int cli_generate(int argc, char **argv)
{
    struct generate_options o = {0};
    struct generate_session s = {.o = &o};
    const char **rest = mem_array((size_t)argc, sizeof(*rest));
    struct option *table = cli_params_table(TABLE, AT(params));
    int n_rest, exit_code;
    if (cli_options("generate", "[options] [PROMPT]", "Generates text and prints it as it comes.", table, argc, argv,
                    &o, rest, &n_rest, &exit_code)) {
        pthread_mutex_init(&s.lock, NULL);
        pthread_cond_init(&s.changed, NULL);
        exit_code = 2;
        if (cli_params_read("generate", &o.params) && is_usable(&o, rest, n_rest, &exit_code))
            exit_code = connect_and_run(&s, rest, n_rest);
        cli_params_free(&o.params);
    }
    free(table);
    free(rest);
    return exit_code;
}
