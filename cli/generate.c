/*
 * tandem generate: one prompt, streamed, or many from standard input (--jsonl: one JSON object a line, see cli/ask.h).
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/ask.h"
#include "cli/local.h"
#include "sched/policy.h"

struct generate_options {
    const char *router, *model, *plan, *stop, *lora, *tenant, *salt, *worker_options;
    bool jsonl, json, local, chat, logprobs, ignore_eos, skip_special, timing;
    int64_t max_tokens, top_k, seed, deadline_ms, priority, concurrency, wait_ms;
    double temperature, top_p, min_p, typical_p, ttft_ms, tpot_ms;
};

#define AT(member) offsetof(struct generate_options, member)
static const struct option TABLE[] = {
    {"router", OPT_STRING, AT(router), NULL, "HOST:PORT", 0, 0, "default: $TANDEM_ROUTER, else " CLI_DEFAULT_ROUTER},
    {"jsonl", OPT_BOOL, AT(jsonl), NULL, NULL, 0, 0, "requests from standard input, one JSON object a line"},
    {"json", OPT_BOOL, AT(json), NULL, NULL, 0, 0, "the whole answer as one JSON object"},
    {"concurrency", OPT_INT, AT(concurrency), "64", NULL, 1, 65536, "with --jsonl: requests in flight at most"},
    {"wait-ms", OPT_MS, AT(wait_ms), "30000", NULL, 0, 3.6e6, "how long to wait for the cluster to be ready"},
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "One process instead of a cluster"},
    {"local", OPT_BOOL, AT(local), NULL, NULL, 0, 0, "run router and workers inside this process; needs --model"},
    {"model", OPT_STRING, AT(model), NULL, "DIR", 0, 0, "with --local: the model's directory"},
    {"plan", OPT_CHOICE, AT(plan), "auto", PLAN_FORCE_NAMES, 0, 0, "with --local: forces every placement"},
    {"worker-options", OPT_STRING, AT(worker_options), NULL, "'--A X ...'", 0, 0,
     "with --local: options of tandem-decode"},
    {"", OPT_STRING, 0, NULL, NULL, 0, 0, "Defaults for every request"},
    {"chat", OPT_BOOL, AT(chat), "true", NULL, 0, 0, "the text is a user's turn, if the model has a chat template"},
    {"max-tokens", OPT_INT, AT(max_tokens), "0", NULL, 0, 1e9, "0: the model's own, or as many as fit"},
    {"temperature", OPT_DOUBLE, AT(temperature), "-1", "X", -1, 100, "0: greedy; -1: the model's own"},
    {"top-k", OPT_INT, AT(top_k), "-1", "N", -1, 1e9, "-1: the model's own; 0: all"},
    {"top-p", OPT_DOUBLE, AT(top_p), "-1", "X", -1, 1, "-1: the model's own"},
    {"min-p", OPT_DOUBLE, AT(min_p), "-1", "X", -1, 1,
     "least share of the likeliest token's probability; -1: the model's own"},
    {"typical-p", OPT_DOUBLE, AT(typical_p), "-1", "X", -1, 1,
     "share of the most typical tokens; -1: the model's own; 0: all"},
    {"seed", OPT_INT, AT(seed), "-1", "N", -1, 9e15, "-1: drawn, and shown"},
    {"stop", OPT_STRING, AT(stop), NULL, "TEXT", 0, 0, "ends the answer, and is not shown"},
    {"ignore-eos", OPT_BOOL, AT(ignore_eos), NULL, NULL, 0, 0, "go on after the end token"},
    {"skip-special-tokens", OPT_BOOL, AT(skip_special), "true", NULL, 0, 0, "the text leaves out special tokens"},
    {"logprobs", OPT_BOOL, AT(logprobs), "true", NULL, 0, 0, "log-probabilities in JSON answers"},
    {"ttft-ms", OPT_LIMIT_MS, AT(ttft_ms), "0", NULL, 0, 3.6e6, "limit for the first token; 0: none"},
    {"tpot-ms", OPT_LIMIT_MS, AT(tpot_ms), "0", NULL, 0, 3.6e6, "limit for each further token; 0: none"},
    {"deadline-ms", OPT_MS, AT(deadline_ms), "0", NULL, 0, 3.6e6, "limit for all of it; 0: none"},
    {"priority", OPT_INT, AT(priority), "0", "N", -10, 10, "higher goes first"},
    {"lora", OPT_STRING, AT(lora), NULL, "NAME", 0, 0, "the adapter to answer with"},
    {"tenant", OPT_STRING, AT(tenant), NULL, "NAME", 0, 0, "whose request it is"},
    {"cache-salt", OPT_STRING, AT(salt), NULL, "TEXT", 0, 0, "shares cached prefixes only with the same"},
    {"timing", OPT_BOOL, AT(timing), "true", NULL, 0, 0, "where the time went, on stderr"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};

struct session {
    const struct generate_options *o;
    struct rpc_client *client;
    pthread_mutex_t lock; /* rpc threads finish asks, the main thread waits for them: a count, no queue needed */
    pthread_cond_t changed;
    int64_t n_flying;
    bool failed;
};

static void set_default(json_t *r, const char *member, json_t *value)
{
    if (!json_object_get(r, member))
        json_object_set(r, member, value);
    json_decref(value);
}

static void add_defaults(const struct generate_options *o, json_t *r)
{
    if (o->max_tokens)
        set_default(r, "max_tokens", json_integer(o->max_tokens));
    if (o->temperature >= 0)
        set_default(r, "temperature", json_real(o->temperature));
    if (o->top_k >= 0)
        set_default(r, "top_k", json_integer(o->top_k));
    if (o->top_p >= 0)
        set_default(r, "top_p", json_real(o->top_p));
    if (o->min_p >= 0)
        set_default(r, "min_p", json_real(o->min_p));
    if (o->typical_p >= 0)
        set_default(r, "typical_p", json_real(o->typical_p));
    if (o->seed >= 0)
        set_default(r, "seed", json_integer(o->seed));
    if (o->stop)
        set_default(r, "stop", json_string(o->stop));
    if (o->ignore_eos)
        set_default(r, "ignore_eos", json_true());
    if (!o->skip_special)
        set_default(r, "skip_special_tokens", json_false());
    if (o->logprobs && (o->jsonl || o->json))
        set_default(r, "logprobs", json_true());
    if (o->ttft_ms > 0)
        set_default(r, "ttft_ms", json_real(o->ttft_ms));
    if (o->tpot_ms > 0)
        set_default(r, "tpot_ms", json_real(o->tpot_ms));
    if (o->deadline_ms)
        set_default(r, "deadline_ms", json_integer(o->deadline_ms));
    if (o->priority)
        set_default(r, "priority", json_integer(o->priority));
    if (o->lora)
        set_default(r, "lora", json_string(o->lora));
    if (o->tenant)
        set_default(r, "tenant", json_string(o->tenant));
    if (o->salt)
        set_default(r, "cache_salt", json_string(o->salt));
}

static void landed(struct session *s, bool failed)
{
    pthread_mutex_lock(&s->lock);
    s->n_flying--;
    s->failed |= failed;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

static void wait_flying(struct session *s, int64_t below)
{
    pthread_mutex_lock(&s->lock);
    while (s->n_flying >= below)
        pthread_cond_wait(&s->changed, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

/* ------------------------------------------------------------------ jsonl */

static void line_done(struct ask *a)
{
    struct session *s = a->user;
    bool failed = a->code != RPC_OK;
    pthread_mutex_lock(&s->lock);
    cli_print_json(ask_result(a));
    pthread_mutex_unlock(&s->lock);
    ask_free(a);
    landed(s, failed);
}

static void start_line(struct session *s, const struct bytes *line)
{
    json_error_t je;
    json_t *r = json_loadb(line->data, line->len, JSON_ALLOW_NUL, &je);
    if (!json_is_object(r)) {
        json_decref(r);
        pthread_mutex_lock(&s->lock);
        cli_print_json(json_pack("{s:{s:s,s:s}}", "error", "code", "INVALID_ARGUMENT", "message",
                                 "the line is not a JSON object"));
        s->failed = true;
        pthread_mutex_unlock(&s->lock);
        return;
    }
    add_defaults(s->o, r);
    wait_flying(s, s->o->concurrency);
    pthread_mutex_lock(&s->lock);
    s->n_flying++;
    pthread_mutex_unlock(&s->lock);
    ask_start(s->client, r, NULL, line_done, s);
}

/* Answers carry their own errors, so the exit code only says whether all lines were answered. */
static int run_jsonl(struct session *s)
{
    struct bytes line = {0};
    while (cli_read_line(&line))
        if (line.len)
            start_line(s, &line);
    wait_flying(s, 1);
    bytes_free(&line);
    return 0;
}

/* -------------------------------------------------------------- one prompt */

static void show_text(struct ask *a, const void *text, size_t len)
{
    (void)a;
    fwrite(text, 1, len, stdout);
    fflush(stdout);
}

static void part(const char *name, double ms)
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
    part("tokenize", t->tokenize);
    part("queue", t->queue);
    part("prefix load", t->prefix_load);
    part("prefill", t->prefill);
    part("transfer", t->transfer);
    part("exposed transfer", t->exposed_transfer);
    part("decode wait", t->decode_wait);
    part("decode", t->decode);
    if (e->replans)
        part("stalled", t->stalled);
    part("residual", t->residual);
    fprintf(stderr, "  %-18s %9.1f ms   (predicted %.1f ms)\n  %-18s %9.2f ms   (%.1f tokens/s)\n  %-18s %9.1f ms\n",
            "TTFT", t->ttft, e->predicted->ttft_ms, "TPOT", t->tpot, t->tpot > 0 ? 1000 / t->tpot : 0, "total",
            t->total);
}

static void prompt_done(struct ask *a)
{
    struct session *s = a->user;
    bool failed = a->code != RPC_OK;
    if (s->o->json)
        cli_print_json(ask_result(a));
    else if (failed)
        cli_fail("generate", "%s: %s", rpc_code_name(a->code), a->error);
    else if (putchar('\n') != EOF && fflush(stdout) == 0 && s->o->timing)
        show_timing(a);
    ask_free(a);
    landed(s, failed);
}

static int run_prompt(struct session *s, const struct bytes *text)
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
    static char words[4096]; /* outlives the cluster: options borrow their texts */
    int n = 4;
    if (!o->model)
        return td_fail(e, TD_ERR_INVALID, "--local needs --model DIR");
    snprintf(words, sizeof(words), "%s", o->worker_options ? o->worker_options : "");
    for (char *save, *w = strtok_r(words, " ", &save); w && n < 63; w = strtok_r(NULL, " ", &save))
        args[n++] = w;
    return local_open(o->model, args, o->plan, LOCAL_LOOPBACK, out, e);
}

static int run(struct session *s, const char **rest, int n_rest)
{
    struct bytes prompt = {0};
    if (!s->o->jsonl && !cli_read_prompt("generate", rest, n_rest, &prompt))
        return 2;
    int exit_code = 1;
    if (cli_wait_ready("generate", s->client, s->o->wait_ms))
        exit_code = s->o->jsonl ? run_jsonl(s) : run_prompt(s, &prompt);
    bytes_free(&prompt);
    return exit_code;
}

int cli_generate(int argc, char **argv)
{
    struct generate_options o = {0};
    struct session s = {.o = &o};
    struct local *local = NULL;
    struct td_error e = {{0}};
    const char **rest = mem_array((size_t)argc, sizeof(*rest));
    int n_rest, exit_code;
    if (!cli_options("generate", "[options] [PROMPT]", "Generates text. Prints it as it comes.", TABLE, argc, argv, &o,
                     rest, &n_rest, &exit_code)) {
        free(rest);
        return exit_code;
    }
    pthread_mutex_init(&s.lock, NULL);
    pthread_cond_init(&s.changed, NULL);
    if (o.local && open_local(&o, &local, &e)) {
        free(rest);
        return cli_fail("generate", "%s", e.text);
    }
    exit_code = 1;
    s.client = cli_connect("generate", local ? local_router(local) : cli_router(o.router));
    if (s.client)
        exit_code = run(&s, rest, n_rest);
    rpc_client_close(s.client);
    local_close(local);
    free(rest);
    return exit_code;
}
