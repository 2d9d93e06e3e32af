/* For tests of the scheduler: a scheduler with workers of known speed, and a record of its decisions. */
#pragma once

#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "sched/scheduler.h"
#include "tests/tap.h"

enum { CHUNK = 512, BLOCK = 16, MANY = 4000 };
static const char PROFILE[] = "1000,100,0:5000,0.05,20";

struct cluster {
    struct scheduler *s;
    struct sched_request *placed[MANY], *refused[MANY];
    double retry_ms[MANY];
    uint32_t n_placed, n_refused;
    uint64_t now, number;
    bool frees; /* frees requests that are refused */
};

static inline struct sched_worker_stats stats_at(struct scheduler *s, uint32_t w, uint64_t now)
{
    scheduler_refresh(s, now);
    return scheduler_worker_stats(s, w);
}

static inline void on_place(void *user, struct sched_request *q)
{
    struct cluster *c = user;
    ck_assert_int_eq(q->state, SCHED_PREFILLING);
    c->placed[c->n_placed++ % MANY] = q;
}

static inline void on_refuse(void *user, struct sched_request *q, double retry_after_ms)
{
    struct cluster *c = user;
    ck_assert_int_eq(q->state, SCHED_OVER);
    c->retry_ms[c->n_refused % MANY] = retry_after_ms;
    c->refused[c->n_refused++ % MANY] = q;
    if (c->frees) /* overwritten, so that any later use is noticed */
        *q = (struct sched_request){.workflow_deadline_ns = UINT64_MAX, .keeper = POLICY_NO_KEEPER};
}

/* Called for each request whose turn it is. */
static inline void on_match(void *user, struct sched_request *q)
{
    struct cluster *c = user;
    for (uint32_t i = 0; i < c->n_refused && c->frees; i++)
        ck_assert_ptr_ne(q, c->refused[i % MANY]);
}

static inline struct scheduler_config config_of(struct cluster *c)
{
    struct scheduler_config config = {.force = FORCE_SPLIT,
                                      .match = on_match,
                                      .max_wait_ns = 100 * NS_PER_S,
                                      .max_queued_tokens = UINT64_MAX / 2,
                                      .max_queued = UINT32_MAX / 2,
                                      .user = c,
                                      .place = on_place,
                                      .refuse = on_refuse};
    ck_assert_int_eq(cost_profile_parse(PROFILE, &config.profile, NULL), TD_OK);
    return config; /* 10 tokens a millisecond */
}

static inline void worker_up(struct cluster *c, uint32_t w, enum worker_role role)
{
    scheduler_worker_up(
        c->s, w,
        &(struct sched_worker_info){
            .role = role, .chunk_tokens = CHUNK, .max_batch = 64, .n_pages = 20000, .max_context = 100000});
}

/* The first n_prefill workers prefill, the others decode. */
static inline struct cluster *cluster_with(const struct scheduler_config *config, uint32_t n_prefill, uint32_t n_decode)
{
    struct cluster *c = config->user;
    c->now = NS_PER_S;
    c->s = scheduler_open(config);
    for (uint32_t w = 0; w < n_prefill + n_decode; w++)
        worker_up(c, w, w < n_prefill ? ROLE_PREFILL : ROLE_DECODE);
    return c;
}

static inline struct cluster *cluster_open(uint32_t n_prefill, uint32_t n_decode)
{
    struct scheduler_config config = config_of(mem_zalloc(sizeof(struct cluster)));
    return cluster_with(&config, n_prefill, n_decode);
}

static inline void cluster_close(struct cluster *c)
{
    scheduler_close(c->s);
    free(c);
}

static inline struct sched_request request(struct cluster *c, uint32_t n_tokens)
{
    return (struct sched_request){.number = c->number++,
                                  .n_tokens = n_tokens,
                                  .max_tokens = 100,
                                  .block_tokens = BLOCK,
                                  .arrived_ns = c->now,
                                  .deadline_ns = UINT64_MAX,
                                  .workflow_deadline_ns = UINT64_MAX};
}

static inline bool submit(struct cluster *c, struct sched_request *q)
{
    double retry;
    q->arrived_ns = c->now;
    return scheduler_submit(c->s, q, c->now, &retry);
}

static inline void run(struct cluster *c)
{
    scheduler_run(c->s, c->now);
}

static inline void pass_ms(struct cluster *c, double ms)
{
    c->now += (uint64_t)(ms * 1e6);
}

static inline void assert_idle(struct cluster *c, uint32_t n_workers)
{
    ck_assert_uint_eq(scheduler_queued(c->s), 0);
    ck_assert_uint_eq(scheduler_queued_tokens(c->s), 0);
    for (uint32_t w = 0; w < n_workers; w++) {
        struct sched_worker_stats stats = stats_at(c->s, w, c->now);
        ck_assert_uint_eq(stats.n_prompts + stats.running, 0);
        ck_assert(stats.busy_ms == 0 && fabs(stats.pages) < 1e-9);
    }
}
