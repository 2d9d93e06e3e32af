/*
 * tandem bench router: the time of a decision, and the processor time of a router.
 *
 * Decisions are measured in this process: the prefix index and the scheduler with DECISION_WORKERS workers
 * and o->n_blocks known blocks. The processor time is that of a real tandem-router in a process of its own,
 * whatever else the machine does. Real gRPC clients in this process ask it for answers of simulated workers,
 * also in this process.
 */
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/random.h"
#include "base/thread.h"
#include "bench/bench.h"
#include "cli/ask.h"
#include "router/socket.h"
#include "sched/index.h"
#include "sched/scheduler.h"
#include "worker/worker.h"

extern char **environ;

enum {
    DECISION_WORKERS = 128,
    PROMPT_BLOCKS = 6250,
    BLOCK_TOKENS = 16,
    DECISIONS = 2000,
    PREFILLING = 40,
    ON_THE_WAY = 500,
    LONG_TOKENS = 100000,
    LONG_REQUESTS = 100,
    LONG_AT_ONCE = 4,
    STREAMS = 1000,
    STREAM_TOKENS = 200,
    N_WORKERS = 2,
    VOCAB = 1500,
};

/* --------------------------------------------------------------- decisions */

struct decisions {
    struct index *index;
    struct scheduler *scheduler;
    struct block_key *keys; /* keys of the requested chain */
    struct holder_set workers;
    uint32_t matched[INDEX_MAX_HOLDERS];
};

static struct block_key made_key(uint64_t chain, uint64_t i)
{
    struct block_key k;
    uint64_t a = random_at(chain, i, 1), b = random_at(chain, i, 2);
    memcpy(k.b, &a, 8);
    memcpy(k.b + 8, &b, 8);
    return k;
}

static void match_index(void *user, struct sched_request *q)
{
    struct decisions *d = user;
    memset(d->matched, 0, sizeof(d->matched));
    index_match_each(d->index, &d->workers, d->keys, PROMPT_BLOCKS, d->matched);
    q->matched_blocks = d->matched;
}

static void ignore_placement(void *user, struct sched_request *q)
{
    (void)user;
    (void)q;
}

static void ignore_refusal(void *user, struct sched_request *q, double retry_after_ms)
{
    (void)user;
    (void)q;
    (void)retry_after_ms;
}

static void fill_blocks(struct decisions *d, uint64_t n_blocks)
{
    enum { BATCH = 512 };
    struct block_event events[BATCH];
    for (uint64_t i = 0; i < n_blocks; i += BATCH) {
        uint32_t n = n_blocks - i < BATCH ? (uint32_t)(n_blocks - i) : BATCH;
        for (uint32_t j = 0; j < n; j++) {
            uint64_t at = i + j;
            events[j] = (struct block_event){BLOCK_ADDED, TIER_WORKER, (uint32_t)(at % PROMPT_BLOCKS),
                                             made_key(at / PROMPT_BLOCKS, at % PROMPT_BLOCKS)};
        }
        index_apply(d->index, (uint32_t)(i / BATCH % DECISION_WORKERS), events, n);
    }
}

static void open_decisions(struct decisions *d, uint64_t n_blocks)
{
    const struct scheduler_config c = {.profile = {{2, 2e-3, 1e-8}, {5, 3e-5, 8e-3}},
                                       .max_wait_ns = 120 * NS_PER_S,
                                       .max_queued_tokens = UINT64_MAX / 2,
                                       .max_queued = 1 << 20,
                                       .explain = true,
                                       .user = d,
                                       .place = ignore_placement,
                                       .refuse = ignore_refusal,
                                       .match = match_index};
    d->index = index_open(0);
    d->scheduler = scheduler_open(&c);
    for (uint32_t w = 0; w < DECISION_WORKERS; w++) {
        holder_set_add(&d->workers, w);
        scheduler_worker_up(d->scheduler, w,
                            &(struct sched_worker_info){.role = w % 2 ? ROLE_DECODE : ROLE_PREFILL,
                                                        .chunk_tokens = 8192,
                                                        .max_batch = 256,
                                                        .n_pages = 60000,
                                                        .max_context = 131072});
    }
    fill_blocks(d, n_blocks);
    d->keys = mem_array(PROMPT_BLOCKS, sizeof(*d->keys));
}

static double thread_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

/* Submits and places one request whose chain some worker has in part. Returns microseconds of processor
 * time. */
static double decide(struct decisions *d, uint64_t number, uint64_t n_chains, struct sched_request *q)
{
    double retry_after_ms;
    for (uint32_t i = 0; i < PROMPT_BLOCKS; i++)
        d->keys[i] = made_key(random_at(7, number, 0) % n_chains, i);
    *q = (struct sched_request){.number = number,
                                .n_tokens = PROMPT_BLOCKS * BLOCK_TOKENS,
                                .max_tokens = 256,
                                .block_tokens = BLOCK_TOKENS,
                                .arrived_ns = number * NS_PER_MS * 10,
                                .deadline_ns = UINT64_MAX,
                                .workflow_deadline_ns = UINT64_MAX};
    double before = thread_us();
    scheduler_submit(d->scheduler, q, q->arrived_ns, &retry_after_ms);
    scheduler_run(d->scheduler, q->arrived_ns);
    return thread_us() - before;
}

static void bench_decisions(const struct bench_options *o, struct bench_rows *out)
{
    struct decisions d = {.matched = {0}};
    uint64_t n_blocks = (uint64_t)o->n_blocks, n_chains = n_blocks / PROMPT_BLOCKS + 1;
    struct sched_request *q = mem_array(DECISIONS, sizeof(*q));
    double *us = mem_array(DECISIONS, sizeof(*us));
    open_decisions(&d, n_blocks);
    for (uint32_t i = 0; i < DECISIONS; i++) {
        us[i] = decide(&d, i, n_chains, &q[i]);
        if (i >= PREFILLING) /* keeps PREFILLING prompts in computation, beside some hundred answers */
            scheduler_prefilled(d.scheduler, &q[i - PREFILLING], q[i].arrived_ns);
        if (i >= ON_THE_WAY)
            scheduler_end(d.scheduler, &q[i - ON_THE_WAY], q[i].arrived_ns, true);
    }
    bench_sort(us, DECISIONS);
    bench_add(out, "us", us[DECISIONS / 2], 0, "decision, %d workers, %llu blocks, %d-token prompts, p50",
              DECISION_WORKERS, (unsigned long long)n_blocks, LONG_TOKENS);
    bench_add(out, "us", us[DECISIONS * 99 / 100], 0, "decision, p99");
    for (uint32_t i = DECISIONS - ON_THE_WAY; i < DECISIONS; i++)
        scheduler_end(d.scheduler, &q[i], UINT64_MAX / 2, false);
    scheduler_close(d.scheduler);
    index_close(d.index);
    free(d.keys);
    free(q);
    free(us);
}

/* -------------------------------------------------------------- a real one */

struct real {
    pid_t router;
    char address[128], cluster[ROUTER_SOCKET_BYTES];
    struct worker *workers[N_WORKERS];
    pthread_t threads[N_WORKERS];
    struct rpc_client *client;
    pthread_mutex_t lock; /* rpc threads end calls that the main thread waits for */
    pthread_cond_t changed;
    uint32_t n_running, n_failed;
    uint64_t n_tokens;
};

/* Starts the router that lies beside this program or where a build leaves it. The router picks its port and
 * reports it. */
static enum td_status start_router(struct real *x, const char *model, struct td_error *e)
{
    char bin[PATH_MAX / 2], path[PATH_MAX], ready[32];
    int fds[2];
    ssize_t n = readlink("/proc/self/exe", bin, sizeof(bin) - 1);
    if (n <= 0 || pipe(fds))
        return td_fail(e, TD_ERR_IO, "no pipe, or no /proc");
    bin[n] = 0;
    *strrchr(bin, '/') = 0;
    snprintf(path, sizeof(path), "%s/tandem-router", bin);
    if (access(path, X_OK))
        snprintf(path, sizeof(path), "%s/../router/tandem-router", bin);
    snprintf(ready, sizeof(ready), "%d", fds[1]);
    setenv("TANDEM_READY_FD", ready, 1);
    /* Where others keep the machine busy, the figures are worse; no request fails for it. */
    char *argv[] = {path,
                    "--model",
                    (char *)(uintptr_t)model,
                    "--listen",
                    "127.0.0.1:0",
                    "--cluster-listen",
                    "auto",
                    "--log-level",
                    "error",
                    "--max-message-bytes",
                    "16M",
                    "--stall-ms",
                    "60s",
                    "--silence-ms",
                    "60s",
                    "--dispatch-ms",
                    "60s",
                    "--gone-ms",
                    "60s",
                    "--replan-burst",
                    "100000",
                    NULL};
    int failed = posix_spawn(&x->router, path, NULL, NULL, argv, environ);
    unsetenv("TANDEM_READY_FD");
    close(fds[1]);
    size_t len = 0;
    for (ssize_t got; !failed && len < sizeof(x->address) - 1 &&
                      (got = read(fds[0], x->address + len, sizeof(x->address) - 1 - len)) > 0;)
        len += (size_t)got;
    close(fds[0]);
    x->address[strcspn(x->address, "\n")] = 0;
    return x->address[0] ? router_socket(x->address, "cluster", x->cluster, e)
                         : td_fail(e, TD_ERR_IO, "%s did not start", path);
}

static void *run_worker(void *w)
{
    worker_run(w);
    return NULL;
}

static enum td_status start_workers(struct real *x, struct td_error *e)
{
    for (int i = 0; i < N_WORKERS; i++) {
        struct worker_config c = {.role = "decode"};
        char name[16], *strings;
        enum options_action action;
        snprintf(name, sizeof(name), "decode-%d", i);
        char *argv[] = {"bench",
                        "--name",
                        name,
                        "--dummy",
                        "layers=1,kv_heads=1,heads=1,head_dim=8,hidden=8,ffn=8,vocab=1536,positions=131072",
                        "--numerics",
                        "bf16",
                        "--engine",
                        "sim",
                        "--sim-prefill",
                        "100,0,0",
                        "--sim-decode",
                        "1000,0,0",
                        "--pages",
                        "40000",
                        "--max-batch",
                        "1024",
                        "--max-rows",
                        "8192",
                        "--chunk-tokens",
                        "7168",
                        "--routers",
                        x->cluster,
                        "--log-level",
                        "error",
                        NULL};
        const struct options o = {.program = "bench", .usage = "", .about = "", .table = WORKER_OPTIONS};
        enum td_status s =
            options_parse(&o, sizeof(argv) / sizeof(argv[0]) - 1, argv, &c.options, NULL, NULL, &strings, &action, e);
        if (!s)
            s = worker_open(&c, &x->workers[i], e);
        if (s)
            return s;
        x->threads[i] = thread_start("engine", run_worker, x->workers[i]);
    }
    return TD_OK;
}

/* Processor time that the router has used so far, in seconds. */
static double router_seconds(const struct real *x)
{
    char path[64], text[1024];
    unsigned long user, kernel;
    snprintf(path, sizeof(path), "/proc/%d/stat", (int)x->router);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, text, sizeof(text) - 1) : -1;
    close(fd);
    if (n <= 0)
        return 0;
    text[n] = 0;
    const char *at = strrchr(text, ')');
    if (!at || sscanf(at + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &kernel) != 2)
        return 0;
    return (double)(user + kernel) / (double)sysconf(_SC_CLK_TCK);
}

static void on_done(struct ask *a)
{
    struct real *x = a->user;
    pthread_mutex_lock(&x->lock);
    x->n_running--;
    x->n_failed += a->code != RPC_OK;
    x->n_tokens += json_array_size(a->ids);
    pthread_cond_signal(&x->changed);
    pthread_mutex_unlock(&x->lock);
}

static json_t *made_request(uint64_t number, uint32_t n_tokens, uint32_t max_tokens)
{
    json_t *ids = json_array();
    for (uint32_t i = 0; i < n_tokens; i++)
        json_array_append_new(ids, json_integer((json_int_t)(random_at(number, i, 9) % VOCAB)));
    return json_pack("{s:o,s:i,s:b,s:b}", "prompt_ids", ids, "max_tokens", (int)max_tokens, "greedy", 1, "ignore_eos",
                     1);
}

static void wait_below(struct real *x, uint32_t most)
{
    pthread_mutex_lock(&x->lock);
    while (x->n_running > most)
        pthread_cond_wait(&x->changed, &x->lock);
    pthread_mutex_unlock(&x->lock);
}

/* Sends n requests, at_once of them at a time. *seconds_out: the router's processor time. */
static enum td_status ask_many(struct real *x, uint32_t n, uint32_t at_once, uint32_t n_tokens, uint32_t max_tokens,
                               double *seconds_out, struct td_error *e)
{
    struct ask **asks = mem_array(n, sizeof(struct ask *));
    double before = router_seconds(x);
    x->n_tokens = x->n_failed = 0;
    for (uint32_t i = 0; i < n; i++) {
        json_t *request = made_request(random_u64(), n_tokens, max_tokens);
        wait_below(x, at_once - 1);
        pthread_mutex_lock(&x->lock);
        x->n_running++;
        pthread_mutex_unlock(&x->lock);
        asks[i] = ask_start(x->client, request, NULL, on_done, x);
    }
    wait_below(x, 0);
    *seconds_out = router_seconds(x) - before;
    enum td_status s = TD_OK;
    for (uint32_t i = 0; i < n; i++) {
        if (!s && asks[i]->code != RPC_OK)
            s = td_fail(e, TD_ERR_REFUSED, "%u of %u requests failed, the first with: %.200s", x->n_failed, n,
                        asks[i]->error);
        ask_free(asks[i]);
    }
    free(asks);
    return s;
}

static enum td_status measure_router(struct real *x, struct bench_rows *out, struct td_error *e)
{
    double seconds;
    enum td_status s = ask_many(x, 4, LONG_AT_ONCE, LONG_TOKENS, 1, &seconds, e);
    if (!s)
        s = ask_many(x, LONG_REQUESTS, LONG_AT_ONCE, LONG_TOKENS, 1, &seconds, e);
    if (s)
        return s;
    bench_add(out, "ms", seconds * 1e3 / LONG_REQUESTS, 0, "the router's processor time for a %d-token prompt",
              LONG_TOKENS);
    bench_add(out, "cores", seconds / LONG_REQUESTS * 100, 1, "the router, at 100 such prompts a second");
    s = ask_many(x, STREAMS, STREAMS, 32, STREAM_TOKENS, &seconds, e);
    if (!s)
        bench_add(out, "tokens/s", (double)x->n_tokens / seconds, 0, "streamed by one core of the router, %d at once",
                  STREAMS);
    return s;
}

static void stop_real(struct real *x)
{
    for (int i = 0; i < N_WORKERS; i++)
        if (x->workers[i])
            worker_stop(x->workers[i]);
    for (int i = 0; i < N_WORKERS; i++)
        if (x->threads[i])
            pthread_join(x->threads[i], NULL);
    rpc_client_close(x->client);
    for (int i = 0; i < N_WORKERS; i++)
        worker_close(x->workers[i]);
    if (x->router) {
        kill(x->router, SIGTERM);
        waitpid(x->router, NULL, 0);
    }
}

enum td_status bench_router(const struct bench_options *o, struct bench_rows *out, struct td_error *e)
{
    struct real x = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    if (!o->model)
        return td_fail(e, TD_ERR_INVALID, "give --model DIR: a vocabulary of 1536, as the demo model's");
    enum td_status s = start_router(&x, o->model, e); /* forks, so it comes before any thread */
    bench_decisions(o, out);
    bench_waiting(out);
    if (!s)
        s = start_workers(&x, e);
    const struct rpc_client_config c = {
        .target = x.address, .max_message_bytes = 16 << 20, .max_queued_bytes = 64 << 20};
    if (!s)
        s = rpc_client_open(&c, &x.client, e);
    if (!s && !cli_wait_ready("bench", x.client, x.address, 20000))
        s = td_fail(e, TD_ERR_DEADLINE, "the router did not get ready");
    if (!s)
        s = measure_router(&x, out, e);
    stop_real(&x);
    return s;
}
