/*
 * tandem bench router, the part with a queue: the time of decisions while WAITING requests wait for PREFILL +
 * DECODE workers that are full, and the cost of the books of RUNNING sequences on each decode worker.
 *
 * Requests come at the rate at which prompts are computed. All have the same TTFT limit, and most of them
 * wait for most of it. The scheduler has the router's default settings, and records its decisions (explain).
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/mem.h"
#include "bench/bench.h"
#include "sched/scheduler.h"

enum {
    PREFILL = 64,
    DECODE = 64,
    WORKERS = PREFILL + DECODE,
    RUNNING = 256,
    WAITING = 1000,
    DECISIONS = 4000,
    BLOCK_TOKENS = 16
};

struct queue { /* placed requests, oldest first */
    struct sched_request **at;
    uint32_t first, n, cap;
};

struct cluster {
    struct scheduler *scheduler;
    struct queue prompts[WORKERS], running[WORKERS];
    uint64_t now, number;
    uint32_t n_refused;
};

static void queue_push(struct queue *q, struct sched_request *r)
{
    if (q->first + q->n == q->cap) {
        memmove(q->at, q->at + q->first, q->n * sizeof(*q->at));
        q->first = 0;
        q->cap = q->n * 2 + 64;
        q->at = mem_resize(q->at, q->cap, sizeof(*q->at));
    }
    q->at[q->first + q->n++] = r;
}

static struct sched_request *pop(struct queue *q)
{
    q->n--;
    return q->at[q->first++];
}

static void begin_work(void *user, struct sched_request *r)
{
    struct cluster *c = user;
    queue_push(&c->prompts[r->plan.prefill], r);
    queue_push(&c->running[r->plan.decode], r);
}

static void count_refused(void *user, struct sched_request *r, double retry_after_ms)
{
    struct cluster *c = user;
    (void)retry_after_ms;
    c->n_refused++;
    free(r->matched_blocks);
    free(r);
}

static void match_nothing(void *user, struct sched_request *r)
{
    (void)user;
    memset(r->matched_blocks, 0, WORKERS * sizeof(*r->matched_blocks));
}

static void submit(struct cluster *c, uint32_t n_tokens, double ttft_ms)
{
    struct sched_request *r = mem_zalloc(sizeof(*r));
    double retry_after_ms;
    *r = (struct sched_request){.number = ++c->number,
                                .identity = c->number,
                                .n_tokens = n_tokens,
                                .max_tokens = 1000,
                                .block_tokens = BLOCK_TOKENS,
                                .ttft_ms = ttft_ms,
                                .tpot_ms = ttft_ms > 0 ? 100 : 0,
                                .arrived_ns = c->now,
                                .deadline_ns = UINT64_MAX,
                                .workflow_deadline_ns = UINT64_MAX,
                                .matched_blocks = mem_array(WORKERS, sizeof(uint32_t))};
    if (!scheduler_submit(c->scheduler, r, c->now, &retry_after_ms))
        count_refused(c, r, retry_after_ms);
}

static void open_cluster(struct cluster *c)
{
    const struct scheduler_config config = {.profile = {{2, 2e-3, 1e-8}, {5, 3e-5, 8e-3}},
                                            .max_wait_ns = 120 * NS_PER_S,
                                            .max_queued_tokens = 100000000,
                                            .max_queued = 4096,
                                            .explain = true,
                                            .user = c,
                                            .place = begin_work,
                                            .refuse = count_refused,
                                            .match = match_nothing};
    c->now = NS_PER_S;
    c->scheduler = scheduler_open(&config);
    for (uint32_t w = 0; w < WORKERS; w++)
        scheduler_worker_up(c->scheduler, w,
                            &(struct sched_worker_info){.role = w < PREFILL ? ROLE_PREFILL : ROLE_DECODE,
                                                        .chunk_tokens = 8192,
                                                        .max_batch = 512,
                                                        .n_pages = 200000,
                                                        .max_context = 131072,
                                                        .incarnation = w + 1});
}

/* Ends the oldest prompt of a worker. */
static void end_prompt(struct cluster *c, uint32_t w)
{
    if (c->prompts[w].n)
        scheduler_prefilled(c->scheduler, pop(&c->prompts[w]), c->now);
}

static void end_answer(struct cluster *c, uint32_t w)
{
    struct sched_request *r = c->running[w].n > RUNNING ? pop(&c->running[w]) : NULL;
    if (!r || r->on_prefill) {
        if (r)
            queue_push(&c->running[w], r);
        return;
    }
    scheduler_generated(r, 400);
    scheduler_end(c->scheduler, r, c->now, true);
    free(r->matched_blocks);
    free(r);
}

static double thread_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

/* Submits requests until all decode workers have their sequences and WAITING requests are queued. */
static void fill_cluster(struct cluster *c)
{
    for (uint32_t i = 0; i < DECODE * RUNNING; i++) {
        submit(c, 1000, 0);
        scheduler_run(c->scheduler, c->now);
        c->now += NS_PER_MS;
        for (uint32_t w = 0; w < WORKERS; w++)
            end_prompt(c, w);
    }
    while (scheduler_queued(c->scheduler) < WAITING && c->n_refused < WAITING) {
        submit(c, 4000, 30000);
        scheduler_run(c->scheduler, c->now);
    }
}

void bench_waiting(struct bench_rows *out)
{
    struct cluster *c = mem_zalloc(sizeof(*c));
    double *us = mem_array(DECISIONS, sizeof(*us)), run_us = 0;
    open_cluster(c);
    fill_cluster(c);
    uint32_t queued = scheduler_queued(c->scheduler), refused = c->n_refused;
    for (uint32_t i = 0; i < DECISIONS; i++) {
        c->now += NS_PER_MS / 6; /* 64 workers compute 6,000 prompts of 4,000 tokens a second */
        end_prompt(c, i % PREFILL);
        for (uint32_t w = 0; w < DECODE; w++)
            end_answer(c, PREFILL + w);
        double before = thread_us();
        scheduler_run(c->scheduler, c->now);
        double middle = thread_us();
        submit(c, 4000, 30000);
        us[i] = thread_us() - middle;
        run_us += middle - before;
    }
    bench_sort(us, DECISIONS);
    bench_add(out, "us", us[DECISIONS / 2], 0,
              "decision with %u waiting (%u refused), %d + %d workers with %d sequences, p50", queued,
              c->n_refused - refused, PREFILL, DECODE, RUNNING);
    bench_add(out, "us", us[DECISIONS * 99 / 100], 0, "the same, p99");
    bench_add(out, "us", run_us / DECISIONS, 0, "a pass that sends what workers take, mean");
    double before = thread_us();
    enum { LOOKS = 160 };
    for (uint32_t i = 0; i < LOOKS; i++) {
        c->now += 50 * NS_PER_MS / 4; /* a quarter of the workers is due */
        scheduler_refresh(c->scheduler, c->now);
    }
    bench_add(out, "cores", (thread_us() - before) * 1e-6 / (LOOKS * 0.0125), 0.05,
              "books of %d running sequences, every 50 ms", DECODE * RUNNING);
    /* The requests need no scheduler_end(): they are plain memory, freed below. */
    scheduler_close(c->scheduler);
    for (uint32_t w = 0; w < WORKERS; w++) {
        free(c->prompts[w].at);
        while (c->running[w].n) {
            struct sched_request *r = pop(&c->running[w]);
            free(r->matched_blocks);
            free(r);
        }
        free(c->running[w].at);
    }
    free(c);
    free(us);
}
