/*
 * tandem bench cluster: time to first token of a split cluster beside one worker that does all of it.
 * tandem bench overlap: what of the KV transfer prefill does not hide, by length of the prompt.
 *
 * All are whole clusters inside this process (real gRPC; loopback transfers for cluster, UCX for overlap), asked in turn, so that what the machine does
 * meanwhile hits both; prompts are random ids that no cache has seen.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/random.h"
#include "cli/ask.h"
#include "cli/bench.h"
#include "cli/local.h"
#include "model/config.h"

enum { ROUNDS = 9, N_PLANS = 2, N_LENGTHS = 3, TAILS_MAX = 4, VOCAB_USED = 1000 };

struct waiter {
    pthread_mutex_t lock; /* the rpc thread ends what the main thread waits for */
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
        *out = *a->end->timing; /* numbers only */
    ask_free(a);
    return s;
}

static enum td_status measure(struct rpc_client *const clients[N_PLANS], struct bench_rows *out, struct td_error *e)
{
    static const uint32_t LENGTHS[N_LENGTHS] = {64, 512, 2048};
    double ms[N_PLANS][ROUNDS];
    for (int l = 0; l < N_LENGTHS; l++) {
        for (int round = -1; round < ROUNDS; round++) /* the first one warms up */
            for (int plan = 0; plan < N_PLANS; plan++) {
                Tandem__V1__Timing times;
                enum td_status s = ask_once(clients[plan], LENGTHS[l], &times, e);
                if (s)
                    return s;
                if (round >= 0)
                    ms[plan][round] = times.ttft;
            }
        for (int plan = 0; plan < N_PLANS; plan++)
            bench_sort(ms[plan], ROUNDS);
        bench_add(out, "ms", ms[1][ROUNDS / 2], 0, "TTFT of %u tokens, one worker", LENGTHS[l]);
        bench_add(out, "ms", ms[0][ROUNDS / 2], ms[1][ROUNDS / 2], "TTFT of %u tokens, split", LENGTHS[l]);
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
    static const char *const PLANS[N_PLANS] = {"split", "aggregated"};
    struct local *clusters[N_PLANS] = {NULL};
    struct rpc_client *clients[N_PLANS] = {NULL};
    if (!o->model)
        return td_fail(e, TD_ERR_INVALID, "give --model DIR");
    const char *args[] = {"--model", o->model, "--pool-bytes", "128M", "--log-level", "error", NULL};
    enum td_status s = TD_OK;
    for (int i = 0; i < N_PLANS && !s; i++)
        s = open_cluster(o->model, args, PLANS[i], LOCAL_LOOPBACK, &clusters[i], &clients[i], e);
    if (!s)
        s = measure(clients, out, e);
    for (int i = 0; i < N_PLANS; i++) {
        rpc_client_close(clients[i]);
        local_close(clusters[i]);
    }
    return s;
}

/* ----------------------------------------------------------------- overlap */

/* What of the transfer is left after the last chunk's compute, by length, in turn; medians. */
static enum td_status measure_tails(const struct bench_options *o, const char *const *args, const uint32_t *lengths,
                                    uint32_t n_lengths, const char *engine, struct bench_rows *out, struct td_error *e)
{
    struct local *cluster = NULL;
    struct rpc_client *client = NULL;
    double ms[TAILS_MAX][ROUNDS];
    enum td_status s = open_cluster(o->model, args, "split", LOCAL_UCX, &cluster, &client, e);
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
