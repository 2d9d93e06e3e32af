/*
 * tandem bench cluster: time to first token of a split cluster beside one worker that does all of it.
 *
 * Both are whole clusters inside this process (real gRPC, loopback transfers), asked in turn, so that what the machine does
 * meanwhile hits both; prompts are random ids that no cache has seen.
 */
#include <pthread.h>
#include <stdlib.h>

#include "base/random.h"
#include "cli/ask.h"
#include "cli/bench.h"
#include "cli/local.h"

enum { ROUNDS = 9, N_PLANS = 2, N_LENGTHS = 3, VOCAB_USED = 1000 };

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

static enum td_status one_ttft(struct rpc_client *c, uint32_t n_tokens, uint64_t seed, double *ttft_out,
                               struct td_error *e)
{
    struct waiter w = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false};
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
        *ttft_out = a->end->timing->ttft;
    ask_free(a);
    return s;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static enum td_status measure(struct rpc_client *const clients[N_PLANS], struct bench_rows *out, struct td_error *e)
{
    static const uint32_t LENGTHS[N_LENGTHS] = {64, 512, 2048};
    double ms[N_PLANS][ROUNDS];
    for (int l = 0; l < N_LENGTHS; l++) {
        for (int round = -1; round < ROUNDS; round++) /* the first one warms up */
            for (int plan = 0; plan < N_PLANS; plan++) {
                double ttft;
                enum td_status s = one_ttft(clients[plan], LENGTHS[l], random_u64(), &ttft, e);
                if (s)
                    return s;
                if (round >= 0)
                    ms[plan][round] = ttft;
            }
        for (int plan = 0; plan < N_PLANS; plan++)
            qsort(ms[plan], ROUNDS, sizeof(double), by_value);
        bench_add(out, "ms", ms[1][ROUNDS / 2], 0, "TTFT of %u tokens, one worker", LENGTHS[l]);
        bench_add(out, "ms", ms[0][ROUNDS / 2], ms[1][ROUNDS / 2], "TTFT of %u tokens, split", LENGTHS[l]);
    }
    return TD_OK;
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
    for (int i = 0; i < N_PLANS && !s; i++) {
        s = local_open(o->model, args, PLANS[i], &clusters[i], e);
        const struct rpc_client_config c = {.target = s ? NULL : local_router(clusters[i])};
        if (!s)
            s = rpc_client_open(&c, &clients[i], e);
        if (!s && !cli_wait_ready("bench", clients[i], 10000))
            s = td_fail(e, TD_ERR_DEADLINE, "the cluster did not get ready");
    }
    if (!s)
        s = measure(clients, out, e);
    for (int i = 0; i < N_PLANS; i++) {
        rpc_client_close(clients[i]);
        local_close(clusters[i]);
    }
    return s;
}
