/*
 * tandem bench cluster: time to first token of a split cluster beside one worker that does both phases, and
 * the part in which they differ. tandem bench overlap: the part of the KV transfer that prefill does not
 * hide, by length of the prompt.
 *
 * The clusters run in this process (real gRPC; transfers by loopback and by the mapped arena). They are asked
 * in turn, so that other work on the machine affects all of them. Prompts are random ids that no cache has
 * seen.
 */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/random.h"
#include "bench/bench.h"
#include "bench/thread_times.h"
#include "cli/ask.h"
#include "cli/local.h"
#include "model/config.h"

enum { ROUNDS = 15, N_LENGTHS = 3, TAILS_MAX = 4, VOCAB_USED = 1000 };

/* The clusters, which are asked in turn. */
enum { WHOLE, SPLIT, SPLIT_MAPPED, N_PLANS };
static const struct {
    const char *name, *plan;
    enum local_wire wire;
} PLANS[N_PLANS] = {{"one worker", "aggregated", LOCAL_LOOPBACK},
                    {"split", "split", LOCAL_LOOPBACK},
                    {"split, mapped arena", "split", LOCAL_NET}};

/* Parts of TTFT. PART_REST is the part that nobody measures: messages between router and workers, wake-ups,
 * the answer. */
enum { PART_TOKENIZE, PART_QUEUE, PART_PREFIX, PART_PREFILL, PART_EXPOSED, PART_REST, PART_TTFT, N_PARTS };
static const char *const PART_NAMES[N_PARTS] = {"tokenize",         "queue", "prefix load", "prefill",
                                                "exposed transfer", "rest",  "all"};

struct waiter {
    pthread_mutex_t lock; /* the rpc thread ends the call that the main thread waits for */
    pthread_cond_t changed;
    bool done;
};

static void on_done(struct ask *a)
{
    struct waiter *w = a->user;
    pthread_mutex_lock(&w->lock);
    w->done = true;
    pthread_cond_signal(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

static enum td_status ask_once(struct rpc_client *c, uint32_t n_tokens, Tandem__V1__Timing *out, struct td_error *e)
{
    struct waiter w = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false};
    uint64_t seed = random_u64();
    json_t *ids = json_array();
    for (uint32_t i = 0; i < n_tokens; i++)
        json_array_append_new(ids, json_integer((json_int_t)(random_at(seed, i, 0) % VOCAB_USED)));
    json_t *r = json_pack("{s:o,s:i,s:b,s:b}", "prompt_ids", ids, "max_tokens", 4, "greedy", 1, "ignore_eos", 1);
    struct ask *a = ask_start(c, r, NULL, on_done, &w);
    pthread_mutex_lock(&w.lock);
    while (!w.done)
        pthread_cond_wait(&w.changed, &w.lock);
    pthread_mutex_unlock(&w.lock);
    enum td_status s = a->code ? td_fail(e, TD_ERR_REFUSED, "%s: %.200s", rpc_code_name(a->code), a->error) : TD_OK;
    if (!s)
        *out = *a->end->timing; /* a plain copy: the message has only numbers */
    ask_free(a);
    return s;
}

/* Threads that a request keeps busy, by the first letters of their names. The rest is rpc, router and
 * client. */
enum { THREADS_ENGINE, THREADS_KERNELS, THREADS_XFER, N_THREADS };
static const char *const THREAD_NAMES[N_THREADS] = {"engine", "kernels", "xfer"};

static void add_processor(struct bench_rows *out, uint32_t n_tokens, const struct thread_times times[N_PLANS])
{
    double whole = thread_times_ms(&times[WHOLE], "") / ROUNDS;
    for (int plan = 0; plan < N_PLANS; plan++) {
        double all = thread_times_ms(&times[plan], "") / ROUNDS, rest = all;
        for (int i = 0; i < N_THREADS; i++) {
            double ms = thread_times_ms(&times[plan], THREAD_NAMES[i]) / ROUNDS;
            rest -= ms;
            bench_add(out, "ms", ms, whole, "processor time of %u tokens and 4 more, %s: %s", n_tokens,
                      PLANS[plan].name, THREAD_NAMES[i]);
        }
        bench_add(out, "ms", rest, whole, "processor time of %u tokens and 4 more, %s: rpc, router, client", n_tokens,
                  PLANS[plan].name);
        bench_add(out, "ms", all, whole, "processor time of %u tokens and 4 more, %s: all", n_tokens, PLANS[plan].name);
    }
}

static void parts_of(const Tandem__V1__Timing *t, double out[N_PARTS])
{
    out[PART_TOKENIZE] = t->tokenize;
    out[PART_QUEUE] = t->queue;
    out[PART_PREFIX] = t->prefix_load;
    out[PART_PREFILL] = t->prefill;
    out[PART_EXPOSED] = t->exposed_transfer;
    out[PART_TTFT] = out[PART_REST] = t->ttft;
    for (int part = 0; part < PART_REST; part++)
        out[PART_REST] -= out[part];
}

static double median_of(const double values[ROUNDS])
{
    double sorted[ROUNDS];
    memcpy(sorted, values, sizeof(sorted));
    bench_sort(sorted, ROUNDS);
    return sorted[ROUNDS / 2];
}

/* Adds medians. What a split adds is the median of the rounds' own differences, so that other work on the
 * machine cancels out. */
static void add_length(struct bench_rows *out, uint32_t n_tokens, double ms[N_PLANS][N_PARTS][ROUNDS])
{
    double whole = median_of(ms[WHOLE][PART_TTFT]);
    for (int plan = 0; plan < N_PLANS; plan++)
        bench_add(out, "ms", median_of(ms[plan][PART_TTFT]), plan == WHOLE ? 0 : whole, "TTFT of %u tokens, %s",
                  n_tokens, PLANS[plan].name);
    for (int plan = SPLIT; plan < N_PLANS; plan++)
        for (int part = 0; part < N_PARTS; part++) {
            double more[ROUNDS];
            for (int round = 0; round < ROUNDS; round++)
                more[round] = ms[plan][part][round] - ms[WHOLE][part][round];
            bench_add(out, "ms", median_of(more), whole, "TTFT of %u tokens, %s, more than one worker: %s", n_tokens,
                      PLANS[plan].name, PART_NAMES[part]);
        }
}

static enum td_status measure_plans(struct rpc_client *const clients[N_PLANS], struct bench_rows *out,
                                    struct td_error *e)
{
    static const uint32_t LENGTHS[N_LENGTHS] = {64, 512, 2048};
    double ms[N_PLANS][N_PARTS][ROUNDS];
    for (int l = 0; l < N_LENGTHS; l++) {
        struct thread_times used[N_PLANS] = {{0}};
        for (int round = -1; round < ROUNDS; round++) /* round -1 warms up */
            for (int plan = 0; plan < N_PLANS; plan++) {
                Tandem__V1__Timing times;
                double parts[N_PARTS];
                if (round >= 0)
                    thread_times_add(&used[plan], -1);
                enum td_status s = ask_once(clients[plan], LENGTHS[l], &times, e);
                if (s)
                    return s;
                if (round >= 0)
                    thread_times_add(&used[plan], 1);
                parts_of(&times, parts);
                for (int part = 0; part < N_PARTS && round >= 0; part++)
                    ms[plan][part][round] = parts[part];
            }
        add_length(out, LENGTHS[l], ms);
        add_processor(out, LENGTHS[l], used);
    }
    return TD_OK;
}

static enum td_status open_cluster(const char *model, const char *const *args, const char *plan, enum local_wire wire,
                                   struct local **cluster_out, struct rpc_client **client_out, struct td_error *e)
{
    enum td_status s = local_open(model, args, plan, wire, cluster_out, e);
    if (s)
        return s;
    const struct rpc_client_config c = {.target = local_router(*cluster_out)};
    s = rpc_client_open(&c, client_out, e);
    return s || cli_wait_ready("bench", *client_out, c.target, 10000)
               ? s
               : td_fail(e, TD_ERR_DEADLINE, "the cluster did not get ready");
}

enum td_status bench_cluster(const struct bench_options *o, struct bench_rows *out, struct td_error *e)
{
    struct local *clusters[N_PLANS] = {NULL};
    struct rpc_client *clients[N_PLANS] = {NULL};
    if (!o->model)
        return td_fail(e, TD_ERR_INVALID, "give --model DIR");
    const char *args[] = {"--model", o->model, "--pool-bytes", "128M", "--log-level", "error", NULL};
    enum td_status s = TD_OK;
    for (int i = 0; i < N_PLANS && !s; i++)
        s = open_cluster(o->model, args, PLANS[i].plan, PLANS[i].wire, &clusters[i], &clients[i], e);
    if (!s)
        s = measure_plans(clients, out, e);
    for (int i = 0; i < N_PLANS; i++) {
        rpc_client_close(clients[i]);
        local_close(clusters[i]);
    }
    return s;
}

/* ----------------------------------------------------------------- overlap */

/* Measures the transfer time that is left after the compute of the last chunk, by length of the prompt.
 * Lengths are measured in turn; values are medians. */
static enum td_status measure_tails(const struct bench_options *o, const char *const *args, const uint32_t *lengths,
                                    uint32_t n_lengths, const char *engine, struct bench_rows *out, struct td_error *e)
{
    struct local *cluster = NULL;
    struct rpc_client *client = NULL;
    double ms[TAILS_MAX][ROUNDS];
    enum td_status s = open_cluster(o->model, args, "split", LOCAL_NET, &cluster, &client, e);
    for (int round = -1; round < ROUNDS && !s; round++)
        for (uint32_t l = 0; l < n_lengths && !s; l++) {
            Tandem__V1__Timing times;
            s = ask_once(client, lengths[l], &times, e);
            if (!s && round >= 0)
                ms[l][round] = times.exposed_transfer;
        }
    for (uint32_t l = 0; l < n_lengths && !s; l++) {
        bench_sort(ms[l], ROUNDS);
        bench_add(out, "ms", ms[l][ROUNDS / 2], ms[0][ROUNDS / 2], "exposed tail of %u tokens, %s engine", lengths[l],
                  engine);
    }
    rpc_client_close(client);
    local_close(cluster);
    return s;
}

enum td_status bench_overlap(const struct bench_options *o, struct bench_rows *out, struct td_error *e)
{
    static const uint32_t SIM[] = {1024, 4096, 16384, 32768 - 1024}, CPU[] = {256, 1024, 2048};
    struct model_config model;
    char dims[128];
    if (!o->model)
        return td_fail(e, TD_ERR_INVALID, "give --model DIR");
    enum td_status s = model_config_load(o->model, &model, e);
    if (s)
        return s;
    snprintf(dims, sizeof(dims), "layers=16,kv_heads=4,heads=4,head_dim=64,hidden=256,ffn=256,vocab=%u",
             model.vocab_size);
    const char *sim[] = {"--engine",       "sim",   "--dummy",    dims,   "--numerics",   "bf16",
                         "--chunk-tokens", "1024",  "--max-rows", "1024", "--pool-bytes", "1200M",
                         "--log-level",    "error", NULL};
    const char *cpu[] = {"--model", o->model, "--pool-bytes", "128M", "--log-level", "error", NULL};
    s = measure_tails(o, sim, SIM, 4, "simulated", out, e);
    return s ? s : measure_tails(o, cpu, CPU, 3, "CPU", out, e);
}
