/*
 * tandem replay: sends a trace to a cluster and says how it did.
 *
 * Open loop: a request is sent when it is due, whatever became of the others; how late it was sent is reported, and a run whose
 * sender was too late says so. Prompts are made of the trace's block ids, so that equal ids are equal tokens and prefixes are
 * really shared; without ids all are unique. Ctrl-C stops sending and reports what ran.
 *
 * --json: {"requests", "sent", "ok", "refused", "failed", "met", "duration_s", "offered_rate", "goodput", "attainment",
 *          "attainment_admitted", "ttft_ms", "tpot_ms", "send_lag_ms", "refusal_ms": {"mean", "p50", "p90", "p99"},
 *          "cached_share", "prediction": {"n", "median", "p90", "last_value_median", "last_value_p90"},
 *          "came_back", "admitted_then", "retry_after_ms", "valid"}
 */
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/random.h"
#include "cli/ask.h"
#include "cli/cli.h"
#include "replay/trace.h"

enum { MAX_TRACE_BYTES = 1 << 30, ATTEMPTS = 2 };
static const double MAX_LAG_MS = 50; /* p99 of sending late, beyond which a run says little */
static const double WARM_MS = 60000; /* before which predictions are not counted */

struct replay_options {
    const char *router, *tenant;
    double rate, length_scale, retry_share;
    int64_t requests, block_tokens, ttft_ms, tpot_ms, seed, max_output;
    bool json;
};

#define AT(member) offsetof(struct replay_options, member)
static const struct option TABLE[] = {
    {"router", OPT_STRING, AT(router), NULL, "HOST:PORT", 0, 0, "default: $TANDEM_ROUTER, else " CLI_DEFAULT_ROUTER},
    {"rate", OPT_DOUBLE, AT(rate), "1", "X", 1e-6, 1e6, "so many times faster than the trace"},
    {"length-scale", OPT_DOUBLE, AT(length_scale), "1", "X", 1e-6, 1e3,
     "prompts and their blocks are so many times longer"},
    {"max-output", OPT_INT, AT(max_output), "0", NULL, 0, 1e9, "answers are cut to that; 0: as the trace says"},
    {"requests", OPT_INT, AT(requests), "0", NULL, 0, 1e12, "the first so many; 0: all"},
    {"block-tokens", OPT_INT, AT(block_tokens), "512", NULL, 1, 1 << 20, "of a block id in the trace"},
    {"ttft-ms", OPT_MS, AT(ttft_ms), "0", NULL, 0, 3.6e6, "limit asked for; 0: none"},
    {"tpot-ms", OPT_MS, AT(tpot_ms), "0", NULL, 0, 3.6e6, "limit asked for; 0: none"},
    {"tenant", OPT_STRING, AT(tenant), NULL, "NAME", 0, 0, "of all requests"},
    {"retry-share", OPT_DOUBLE, AT(retry_share), "0", "X", 0, 1,
     "of refused requests that come back once, when told to"},
    {"seed", OPT_INT, AT(seed), "1", NULL, 0, 1e18, "of the prompts' tokens"},
    {"json", OPT_BOOL, AT(json), NULL, NULL, 0, 0, "one JSON object"},
    {NULL, 0, 0, NULL, NULL, 0, 0, NULL},
};

struct replay;

struct attempt {
    struct replay *replay;
    struct ask *ask;
    uint64_t index, due_ns, sent_ns, done_ns;
    bool over;
};

struct replay {
    struct replay_options o;
    struct trace *trace;
    struct rpc_client *client;
    struct clock clock;
    uint32_t vocab, context;
    uint64_t n, n_sent, began_ns;
    struct attempt *attempts; /* [n][ATTEMPTS] */
    pthread_mutex_t lock;     /* rpc threads end what the main thread waits for */
    pthread_cond_t changed;
    uint64_t n_running, n_over, n_refused;
    struct attempt **back; /* to be sent again, by due_ns */
    uint64_t n_back;
};

static _Atomic bool interrupted;

static void on_interrupt(int signal)
{
    (void)signal;
    interrupted = true;
}

/* ----------------------------------------------------------------- sending */

static uint32_t scaled(const struct replay *r, double n)
{
    double tokens = round(n * r->o.length_scale);
    return tokens < 1 ? 1 : (uint32_t)tokens;
}

/* Tokens of block i of a request: of its id, else of the request itself. */
static json_t *prompt_of(const struct replay *r, uint64_t index)
{
    const struct trace_request *t = &r->trace->requests[index];
    const uint64_t *blocks = trace_blocks(r->trace, t);
    uint32_t block = scaled(r, (double)r->o.block_tokens), n = scaled(r, t->n_prompt);
    json_t *ids = json_array();
    for (uint32_t i = 0; i < n; i++) {
        uint32_t b = i / block;
        uint64_t name = b < t->n_blocks ? random_mix(blocks[b]) : random_at(index, b, 1);
        uint64_t seed = random_at((uint64_t)r->o.seed, name, i % block);
        json_array_append_new(ids, json_integer((json_int_t)(seed % r->vocab)));
    }
    return ids;
}

static json_t *request_of(const struct replay *r, uint64_t index)
{
    const struct trace_request *t = &r->trace->requests[index];
    uint32_t n_output = t->n_output ? t->n_output : 1, room = r->context - scaled(r, t->n_prompt);
    if (r->o.max_output && n_output > r->o.max_output)
        n_output = (uint32_t)r->o.max_output;
    char id[32];
    snprintf(id, sizeof(id), "%" PRIu64, index);
    json_t *q = json_pack("{s:s,s:o,s:i,s:b,s:b,s:i,s:i}", "id", id, "prompt_ids", prompt_of(r, index), "max_tokens",
                          (int)(n_output < room ? n_output : room), "greedy", 1, "ignore_eos", 1, "ttft_ms",
                          (int)r->o.ttft_ms, "tpot_ms", (int)r->o.tpot_ms);
    if (r->o.tenant)
        json_object_set_new(q, "tenant", json_string(r->o.tenant));
    return q;
}

static void come_back(struct replay *r, struct attempt *a)
{
    struct attempt *next = a + 1;
    if (a->index * ATTEMPTS + r->attempts != a ||
        random_unit(random_at((uint64_t)r->o.seed, a->index, 3)) >= r->o.retry_share)
        return;
    *next = (struct attempt){.replay = r, .index = a->index, .due_ns = a->done_ns + a->ask->retry_after_ms * NS_PER_MS};
    uint64_t i = r->n_back++;
    for (; i && r->back[i - 1]->due_ns > next->due_ns; i--)
        r->back[i] = r->back[i - 1];
    r->back[i] = next;
}

static void on_done(struct ask *ask)
{
    struct attempt *a = ask->user;
    struct replay *r = a->replay;
    pthread_mutex_lock(&r->lock);
    a->ask = ask;
    a->done_ns = clock_now(&r->clock);
    a->over = true;
    r->n_running--;
    r->n_over++;
    if (ask->code == RPC_RESOURCE_EXHAUSTED) {
        r->n_refused++;
        if (ask->retry_after_ms)
            come_back(r, a);
    }
    pthread_cond_signal(&r->changed);
    pthread_mutex_unlock(&r->lock);
}

static void send_one(struct replay *r, struct attempt *a)
{
    json_t *request = request_of(r, a->index);
    pthread_mutex_lock(&r->lock);
    r->n_running++;
    r->n_sent++;
    a->sent_ns = clock_now(&r->clock);
    pthread_mutex_unlock(&r->lock);
    ask_start(r->client, request, NULL, on_done, a);
}

/* The next that is due: a new one, or one that comes back. NULL: none is left. */
static struct attempt *next_due(struct replay *r, uint64_t *next_new)
{
    struct attempt *fresh = *next_new < r->n ? &r->attempts[*next_new * ATTEMPTS] : NULL, *back;
    pthread_mutex_lock(&r->lock);
    back = r->n_back ? r->back[0] : NULL;
    if (back && fresh && fresh->due_ns <= back->due_ns)
        back = NULL;
    if (back)
        memmove(r->back, r->back + 1, --r->n_back * sizeof(struct attempt *));
    pthread_mutex_unlock(&r->lock);
    *next_new += !back && fresh;
    return back ? back : fresh;
}

static void progress(const struct replay *r)
{
    fprintf(stderr, "\r%.0f s: %" PRIu64 " of %" PRIu64 " sent, %" PRIu64 " in flight, %" PRIu64 " refused   ",
            (double)(clock_now(&r->clock) - r->began_ns) * 1e-9, r->n_sent, r->n, r->n_running, r->n_refused);
}

/* In steps, so that what comes back in the meantime is seen, and progress is shown. */
static void sleep_until(struct replay *r, uint64_t due_ns, uint64_t *shown_ns)
{
    for (uint64_t now; !interrupted && (now = clock_now(&r->clock)) < due_ns;) {
        if (now > *shown_ns + NS_PER_S) {
            *shown_ns = now;
            progress(r);
        }
        uint64_t left = due_ns - now < 20 * NS_PER_MS ? due_ns - now : 20 * NS_PER_MS;
        nanosleep(&(struct timespec){.tv_nsec = (long)left}, NULL);
    }
}

static void drain(struct replay *r)
{
    pthread_mutex_lock(&r->lock);
    while (r->n_running)
        pthread_cond_wait(&r->changed, &r->lock);
    pthread_mutex_unlock(&r->lock);
}

static void run(struct replay *r)
{
    uint64_t next_new = 0, shown_ns = 0;
    for (struct attempt *a;;) {
        a = next_due(r, &next_new);
        if (!a) {
            drain(r);
            if (interrupted || !r->n_back)
                break;
            continue;
        }
        sleep_until(r, a->due_ns, &shown_ns);
        if (interrupted)
            break;
        send_one(r, a);
    }
    drain(r);
    fprintf(stderr, "\n");
}

/* ------------------------------------------------------------------ report */

struct sample {
    double *values;
    uint64_t n;
};

static void add(struct sample *s, double value)
{
    if (!(s->n & (s->n - 1)))
        s->values = mem_resize(s->values, s->n ? s->n * 2 : 1, sizeof(double));
    s->values[s->n++] = value;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void sort(struct sample *s)
{
    if (s->n)
        qsort(s->values, s->n, sizeof(double), by_value);
}

static double at(const struct sample *s, double share)
{
    return s->n ? s->values[(uint64_t)(share * (double)(s->n - 1))] : 0;
}

static double mean(const struct sample *s)
{
    double sum = 0;
    for (uint64_t i = 0; i < s->n; i++)
        sum += s->values[i];
    return s->n ? sum / (double)s->n : 0;
}

struct report {
    uint64_t ok, refused, failed, met, met_of_admitted, back, admitted_then;
    double cached, prompt, last_done_ms, retry_sum, last_ttft;
    struct sample ttft, tpot, lag, refusal, error, naive;
};

static void count_answer(const struct replay *r, const struct attempt *a, struct report *out)
{
    const Tandem__V1__GenerateEnd *end = a->ask->end;
    const Tandem__V1__CachedTokens *c = end->usage->cached_tokens;
    double ttft = end->timing->ttft, tpot = end->timing->tpot;
    bool met = (!r->o.ttft_ms || ttft <= (double)r->o.ttft_ms) && (!r->o.tpot_ms || tpot <= (double)r->o.tpot_ms);
    out->ok++;
    out->met += met;
    out->cached += c ? c->worker + c->peer + c->dram + c->ssd : 0;
    out->prompt += end->usage->prompt_tokens;
    add(&out->ttft, ttft);
    if (end->usage->completion_tokens > 1)
        add(&out->tpot, tpot);
    if ((double)(a->sent_ns - r->began_ns) * 1e-6 > WARM_MS && ttft > 0) {
        add(&out->error, fabs(end->predicted->ttft_ms - ttft) / ttft);
        if (out->last_ttft > 0)
            add(&out->naive, fabs(out->last_ttft - ttft) / ttft);
    }
    out->last_ttft = ttft;
}

static void count(const struct replay *r, const struct attempt *a, struct report *out)
{
    if (!a->over)
        return;
    double took = (double)(a->done_ns - a->sent_ns) * 1e-6;
    bool second = (a - r->attempts) % ATTEMPTS;
    out->last_done_ms = fmax(out->last_done_ms, (double)(a->done_ns - r->began_ns) * 1e-6);
    add(&out->lag, a->sent_ns > a->due_ns ? (double)(a->sent_ns - a->due_ns) * 1e-6 : 0);
    out->back += second;
    out->admitted_then += second && a->ask->code == RPC_OK;
    if (a->ask->code == RPC_OK) {
        count_answer(r, a, out);
    } else if (a->ask->code == RPC_RESOURCE_EXHAUSTED) {
        out->refused++;
        out->retry_sum += a->ask->retry_after_ms;
        add(&out->refusal, took);
    } else {
        out->failed++;
    }
}

static json_t *json_sample(const struct sample *s)
{
    return json_pack("{s:f,s:f,s:f,s:f}", "mean", mean(s), "p50", at(s, 0.5), "p90", at(s, 0.9), "p99", at(s, 0.99));
}

static void print_line(const char *name, const struct sample *s)
{
    printf("%-14s mean %9.1f  p50 %9.1f  p90 %9.1f  p99 %9.1f ms\n", name, mean(s), at(s, 0.5), at(s, 0.9),
           at(s, 0.99));
}

static void print_report(const struct replay *r, const struct report *p)
{
    double seconds = (double)(r->attempts[(r->n - 1) * ATTEMPTS].due_ns - r->began_ns) * 1e-9,
           all = (double)(p->ok + p->refused + p->failed - p->back);
    double rate = seconds > 0 ? all / seconds : 0, goodput = seconds > 0 ? (double)p->met / seconds : 0;
    bool valid = at(&p->lag, 0.99) <= MAX_LAG_MS;
    if (r->o.json) {
        cli_print_json(json_pack(
            "{s:I,s:I,s:I,s:I,s:I,s:I,s:f,s:f,s:f,s:f,s:f,s:o,s:o,s:o,s:o,s:f,s:{s:I,s:f,s:f,s:f,s:f},s:I,s:I,s:f,s:b}",
            "requests", (json_int_t)r->n, "sent", (json_int_t)r->n_sent, "ok", (json_int_t)p->ok, "refused",
            (json_int_t)p->refused, "failed", (json_int_t)p->failed, "met", (json_int_t)p->met, "duration_s", seconds,
            "offered_rate", rate, "goodput", goodput, "attainment", all > 0 ? (double)p->met / all : 0,
            "attainment_admitted", p->ok ? (double)p->met / (double)p->ok : 0, "ttft_ms", json_sample(&p->ttft),
            "tpot_ms", json_sample(&p->tpot), "send_lag_ms", json_sample(&p->lag), "refusal_ms",
            json_sample(&p->refusal), "cached_share", p->prompt > 0 ? p->cached / p->prompt : 0, "prediction", "n",
            (json_int_t)p->error.n, "median", at(&p->error, 0.5), "p90", at(&p->error, 0.9), "last_value_median",
            at(&p->naive, 0.5), "last_value_p90", at(&p->naive, 0.9), "came_back", (json_int_t)p->back, "admitted_then",
            (json_int_t)p->admitted_then, "retry_after_ms", p->refused ? p->retry_sum / (double)p->refused : 0, "valid",
            valid));
        return;
    }
    printf("%" PRIu64 " requests at %.2f/s: %" PRIu64 " answered, %" PRIu64 " refused, %" PRIu64 " failed\n", r->n_sent,
           rate, p->ok, p->refused, p->failed);
    printf("goodput        %.2f/s; %.1f %% of all met their limits, %.1f %% of the admitted\n", goodput,
           all > 0 ? 100 * (double)p->met / all : 0, p->ok ? 100 * (double)p->met / (double)p->ok : 0);
    print_line("TTFT", &p->ttft);
    print_line("TPOT", &p->tpot);
    print_line("refusal after", &p->refusal);
    print_line("sent late by", &p->lag);
    printf("cached         %.1f %% of the prompts' tokens\n", p->prompt > 0 ? 100 * p->cached / p->prompt : 0);
    printf("TTFT predicted within %.1f %% (median), %.1f %% (p90); by the last value %.1f %%, %.1f %%; %" PRIu64
           " after %.0f s\n",
           100 * at(&p->error, 0.5), 100 * at(&p->error, 0.9), 100 * at(&p->naive, 0.5), 100 * at(&p->naive, 0.9),
           p->error.n, WARM_MS * 1e-3);
    if (p->back)
        printf("came back      %" PRIu64 ", of whom %" PRIu64 " were admitted then; told to wait %.0f ms on average\n",
               p->back, p->admitted_then, p->refused ? p->retry_sum / (double)p->refused : 0);
    if (!valid)
        printf("NOT VALID: requests were sent too late (p99 over %.0f ms)\n", MAX_LAG_MS);
}

static void report(const struct replay *r)
{
    struct report p = {.ok = 0};
    for (uint64_t i = 0; i < r->n * ATTEMPTS; i++)
        count(r, &r->attempts[i], &p);
    struct sample *all[] = {&p.ttft, &p.tpot, &p.lag, &p.refusal, &p.error, &p.naive};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        sort(all[i]);
    print_report(r, &p);
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        free(all[i]->values);
}

/* -------------------------------------------------------------------- main */

static bool ask_model(struct replay *r)
{
    const Tandem__V1__ListModelsRequest request = TANDEM__V1__LIST_MODELS_REQUEST__INIT;
    ProtobufCMessage *m = NULL;
    struct td_error e;
    if (rpc_unary(r->client, "/tandem.v1.Tandem/ListModels", &request.base,
                  &tandem__v1__list_models_response__descriptor, 5000, &m, &e))
        return false;
    const Tandem__V1__ModelInfo *info = ((const Tandem__V1__ListModelsResponse *)m)->models[0];
    r->vocab = info->vocab_size;
    r->context = info->max_context_tokens;
    protobuf_c_message_free_unpacked(m, NULL);
    return true;
}

/* What does not fit the model is left out, and said. */
static void schedule(struct replay *r)
{
    uint64_t n = r->o.requests && (uint64_t)r->o.requests < r->trace->n_requests ? (uint64_t)r->o.requests
                                                                                 : r->trace->n_requests,
             left_out = 0;
    for (uint64_t i = 0; i < n; i++) {
        if (scaled(r, r->trace->requests[i].n_prompt) >= r->context)
            left_out++;
        else
            r->trace->requests[r->n++] = r->trace->requests[i];
    }
    if (left_out)
        fprintf(stderr, "%" PRIu64 " prompts are longer than the context of %u and left out\n", left_out, r->context);
    r->attempts = mem_array(r->n * ATTEMPTS, sizeof(*r->attempts));
    r->back = mem_array(r->n, sizeof(struct attempt *));
    r->began_ns = clock_now(&r->clock) + 100 * NS_PER_MS;
    for (uint64_t i = 0; i < r->n; i++)
        r->attempts[i * ATTEMPTS] =
            (struct attempt){.replay = r,
                             .index = i,
                             .due_ns = r->began_ns + (uint64_t)((double)r->trace->requests[i].arrival_ns / r->o.rate)};
}

static void close_replay(struct replay *r)
{
    for (uint64_t i = 0; i < r->n * ATTEMPTS; i++)
        if (r->attempts[i].ask)
            ask_free(r->attempts[i].ask);
    rpc_client_close(r->client);
    trace_close(r->trace);
    free(r->attempts);
    free(r->back);
    pthread_mutex_destroy(&r->lock);
    pthread_cond_destroy(&r->changed);
}

int cli_replay(int argc, char **argv)
{
    struct replay r = {.n = 0};
    struct td_error e = {{0}};
    const char **rest = mem_array((size_t)argc, sizeof(*rest)), *path;
    int exit_code, n_rest;
    bool go = cli_options("replay", "TRACE [options]", "Sends a trace (Mooncake JSONL, Azure CSV) to a cluster.", TABLE,
                          argc, argv, &r.o, rest, &n_rest, &exit_code);
    path = go && n_rest == 1 ? rest[0] : NULL;
    free(rest);
    if (!go)
        return exit_code;
    if (!path) {
        cli_fail("replay", "give one trace");
        return 2;
    }
    pthread_mutex_init(&r.lock, NULL);
    pthread_cond_init(&r.changed, NULL);
    clock_init_real(&r.clock);
    exit_code = 1;
    if (trace_read(path, MAX_TRACE_BYTES, &r.trace, &e))
        cli_fail("replay", "%s", e.text);
    else if ((r.client = cli_connect("replay", cli_router(r.o.router))) && cli_wait_ready("replay", r.client, 30000) &&
             ask_model(&r)) {
        signal(SIGINT, on_interrupt);
        signal(SIGTERM, on_interrupt);
        schedule(&r);
        exit_code = r.n ? 0 : cli_fail("replay", "no request of the trace fits the model");
        if (r.n) {
            run(&r);
            report(&r);
        }
    }
    close_replay(&r);
    return exit_code;
}
