/*
 * How a batch runs on all ranks:
 *
 *   1. The caller publishes it in struct ranks and raises `begun`.
 *   2. Every rank runs it and meets the others in gathers. A rank raises `told` when layers of its pages are
 *      complete, and when it has ended.
 *   3. The caller runs rank 0, then waits for the others. Whenever it looks, it reports the layers that are
 *      complete on all ranks, in order.
 *
 * No locks: the members that describe a batch change only between batches, while the ranks wait for `begun`.
 * A rank writes its own progress (atomic); the caller reads it after `told`.
 */
#include "engine/ranks.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/eventcount.h"
#include "base/mem.h"
#include "base/thread.h"

enum { PIECE_ROWS = 256 };

struct rank {
    struct ranks *ranks;
    uint32_t index;
    struct forward_config config;
    struct forward *forward;
    enum td_status opened;
    struct td_error error;
    pthread_t thread;             /* not used by rank 0, which runs in the caller */
    _Atomic uint32_t done_layers; /* layers before this one are complete in the rank's pages */
};

struct ranks {
    uint32_t n, n_tensor, n_pipeline;
    struct rank *all; /* [n], stage by stage */
    /*
     * [n_pipeline] groups of stages, then [n_pipeline - 1][n_tensor] pairs of neighbours; NULL for a single
     * rank.
     */
    struct k_group **groups;
    struct eventcount begun;  /* a batch to run, or closing */
    struct eventcount told;   /* progress of any rank */
    _Atomic uint32_t n_ended; /* ranks other than 0 that have ended this turn */
    uint32_t n_started;       /* threads that were started */
    bool closing;
    const struct forward_batch *batch; /* NULL: run gathers only */
    uint32_t gather_rows;
    uint32_t told_layers; /* layers of the batch that were reported to the caller */
};

/* ------------------------------------------------------------------- one rank */

static void end_turn(struct rank *k)
{
    atomic_fetch_add(&k->ranks->n_ended, 1);
    eventcount_raise(&k->ranks->told);
}

/*
 * The number of leading layers that are complete: a stage counts as far as all its ranks are, and only if the
 * stages before it are complete.
 */
static uint32_t done_layers(const struct ranks *r)
{
    uint32_t done = 0;
    for (uint32_t i = 0; i < r->n; i += r->n_tensor) {
        uint32_t stage_done = UINT32_MAX;
        for (uint32_t t = 0; t < r->n_tensor; t++) {
            uint32_t own = atomic_load(&r->all[i + t].done_layers);
            stage_done = own < stage_done ? own : stage_done;
        }
        if (stage_done > done)
            done = stage_done;
        if (done < r->all[i].config.rank.end_layer)
            break;
    }
    return done;
}

/* On the engine thread: calls on_layers for layers that became complete. */
static void tell_caller(struct ranks *r)
{
    uint32_t done = done_layers(r);
    if (done > r->told_layers && r->batch->on_layers)
        r->batch->on_layers(r->batch->user, (uint16_t)r->told_layers, (uint16_t)done);
    r->told_layers = done;
}

static void on_queued(void *user, struct forward *f, uint16_t begin, uint16_t end)
{
    const struct forward_batch *b = ((struct rank *)user)->ranks->batch;
    if (b->on_queued)
        b->on_queued(b->user, f, begin, end);
}

static void on_layers(void *user, uint16_t begin, uint16_t end)
{
    struct rank *k = user;
    (void)begin;
    atomic_store(&k->done_layers, end);
    if (k->index)
        eventcount_raise(&k->ranks->told);
    else
        tell_caller(k->ranks);
}

static uint32_t view_of(const struct rank *k)
{
    return forward_has_own_pages(k->forward) ? k->index : 0;
}

static void run_rank(struct rank *k)
{
    if (!k->ranks->batch) {
        forward_run_gathers(k->forward, k->ranks->gather_rows);
        return;
    }
    struct forward_batch b = *k->ranks->batch;
    b.seqs += (size_t)view_of(k) * b.n_seqs;
    b.on_queued = on_queued;
    b.on_layers = on_layers;
    b.user = k;
    forward_run(k->forward, &b);
}

/* The thread of a rank other than 0: opens its forward pass, then runs a turn each time `begun` is raised. */
static void *rank_main(void *arg)
{
    struct rank *k = arg;
    struct ranks *r = k->ranks;
    k->opened = forward_open(&k->config, &k->forward, &k->error);
    end_turn(k);
    for (uint32_t seen = 0;; seen++) {
        eventcount_wait(&r->begun, seen);
        if (r->closing)
            return NULL;
        run_rank(k);
        end_turn(k);
    }
}

/* One turn of all ranks: runs what the caller has put into r, and returns when every rank has ended. */
static void run_all(struct ranks *r)
{
    atomic_store(&r->n_ended, 0);
    eventcount_raise(&r->begun);
    run_rank(&r->all[0]);
    for (bool ended = false; !ended;) {
        uint32_t seen = eventcount_read(&r->told);
        ended = atomic_load(&r->n_ended) == r->n - 1;
        if (r->batch)
            tell_caller(r);
        if (!ended)
            eventcount_wait(&r->told, seen);
    }
}

/* ----------------------------------------------------------------- open, close */

/* Configures rank t of stage s: the group of its stage, and its pairs with the neighbouring stages. */
static void configure(struct ranks *r, const struct ranks_config *config, uint32_t s, uint32_t t)
{
    struct rank *k = &r->all[s * r->n_tensor + t];
    uint32_t n_layers = config->forward.layout->n_layers, piece_rows = config->forward.rank.piece_rows;
    struct k_group **pairs = r->groups + r->n_pipeline + t;
    bool is_last = s + 1 == r->n_pipeline;
    k->ranks = r;
    k->index = s * r->n_tensor + t;
    k->config = config->forward;
    k->config.kernels = config->kernels[k->index];
    k->config.rank = (struct forward_rank){.rank = t,
                                           .n_tensor = r->n_tensor,
                                           .tensor = r->groups[s],
                                           .first_layer = n_layers * s / r->n_pipeline,
                                           .end_layer = n_layers * (s + 1) / r->n_pipeline,
                                           .before = s ? pairs[(s - 1) * r->n_tensor] : NULL,
                                           .after = is_last ? NULL : pairs[s * r->n_tensor],
                                           .piece_rows = piece_rows ? piece_rows : PIECE_ROWS};
    if (!is_last || t) {
        k->config.logits = NULL;
        k->config.sampled = NULL;
    }
}

static void open_groups(struct ranks *r, struct kernels *const *kernels)
{
    uint32_t n = r->n_tensor;
    for (uint32_t s = 0; s < r->n_pipeline && n > 1; s++)
        r->groups[s] = k_group_open(kernels + (size_t)s * n, n);
    for (uint32_t i = 0; i + n < r->n; i++)
        r->groups[r->n_pipeline + i] = k_group_open((struct kernels *const[]){kernels[i], kernels[i + n]}, 2);
}

static enum td_status open_forwards(struct ranks *r, struct td_error *error_out)
{
    for (uint32_t i = 0; i < r->n; i++)
        r->all[i].config.cache = forward_open_cache(&r->all[i].config);
    for (uint32_t i = 1; i < r->n; i++) {
        char name[16];
        snprintf(name, sizeof(name), "rank-%u", i);
        r->all[i].thread = thread_start(name, rank_main, &r->all[i]);
        r->n_started++;
    }
    struct rank *first = &r->all[0];
    first->opened = forward_open(&first->config, &first->forward, &first->error);
    for (uint32_t seen = eventcount_read(&r->told); atomic_load(&r->n_ended) < r->n - 1;
         seen = eventcount_read(&r->told))
        eventcount_wait(&r->told, seen);
    for (uint32_t i = 0; i < r->n; i++)
        if (r->all[i].opened) {
            *error_out = r->all[i].error;
            return r->all[i].opened;
        }
    return TD_OK;
}

enum td_status ranks_open(const struct ranks_config *config, struct ranks **out, struct td_error *error_out)
{
    uint32_t n_tensor = config->n_tensor ? config->n_tensor : 1, n_layers = config->forward.layout->n_layers;
    uint32_t n_pipeline = config->n_pipeline ? config->n_pipeline : 1;
    if (n_pipeline > n_layers)
        return td_fail(error_out, TD_ERR_INVALID, "%u layers can't be shared among %u pipeline stages", n_layers,
                       n_pipeline);
    if (n_tensor > K_MAX_RANKS / n_pipeline)
        return td_fail(error_out, TD_ERR_INVALID, "%u tensor-parallel ranks in %u stages are more than %d", n_tensor,
                       n_pipeline, K_MAX_RANKS);
    struct ranks *r = mem_zalloc(sizeof(*r));
    r->n_tensor = n_tensor;
    r->n_pipeline = n_pipeline;
    r->n = n_tensor * n_pipeline;
    r->all = mem_array(r->n, sizeof(*r->all));
    r->groups = mem_array(r->n_pipeline + r->n, sizeof(struct k_group *));
    open_groups(r, config->kernels);
    for (uint32_t i = 0; i < r->n; i++)
        configure(r, config, i / n_tensor, i % n_tensor);
    enum td_status s = open_forwards(r, error_out);
    if (s) {
        ranks_close(r);
        return s;
    }
    if (r->n > 1)
        log_info(config->log, "ranks tensor=%u pipeline=%u exchange=%s", n_tensor, n_pipeline,
                 k_group_transport(r->groups[n_tensor > 1 ? 0 : n_pipeline]));
    *out = r;
    return TD_OK;
}

void ranks_close(struct ranks *r)
{
    if (!r)
        return;
    r->closing = true;
    eventcount_raise(&r->begun);
    for (uint32_t i = 0; i < r->n_started; i++)
        pthread_join(r->all[i + 1].thread, NULL);
    for (uint32_t i = 0; i < r->n; i++)
        forward_close(r->all[i].forward);
    for (uint32_t i = 0; i < r->n_pipeline + r->n; i++)
        k_group_close(r->groups[i]);
    free(r->groups);
    free(r->all);
    free(r);
}

uint64_t ranks_weight_bytes(const struct ranks *r)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < r->n; i++)
        bytes += forward_weight_bytes(r->all[i].forward);
    return bytes;
}

/* ---------------------------------------------------------------- pages, batches */

uint32_t ranks_n_views(const struct ranks *r)
{
    return view_of(&r->all[r->n - 1]) + 1;
}

uint8_t *ranks_page(const struct ranks *r, uint32_t view, uint32_t page)
{
    return forward_page(r->all[view].forward, page);
}

void ranks_write_page(struct ranks *r, uint32_t page)
{
    for (uint32_t i = 0; i < r->n; i++)
        forward_write_page(r->all[i].forward, page);
}

/* The largest of all ranks' marks: where it was not reached, the last one counts. */
uint64_t ranks_write_mark(struct ranks *r)
{
    uint64_t mark = 0;
    for (uint32_t i = 0; i < r->n; i++) {
        uint64_t own = forward_write_mark(r->all[i].forward);
        mark = own > mark ? own : mark;
    }
    return mark;
}

bool ranks_written(struct ranks *r, uint64_t mark)
{
    bool all = true;
    for (uint32_t i = 0; i < r->n; i++)
        all &= forward_written(r->all[i].forward, mark);
    return all;
}

void ranks_write_wait(struct ranks *r, uint64_t mark)
{
    for (uint32_t i = 0; i < r->n; i++)
        forward_write_wait(r->all[i].forward, mark);
}

void ranks_share_weights(struct ranks *r)
{
    for (uint32_t i = 0; i < r->n; i++)
        forward_share_weights(r->all[i].forward);
}

void ranks_run(struct ranks *r, const struct forward_batch *b)
{
    if (r->n == 1) {
        forward_run(r->all[0].forward, b);
        return;
    }
    r->batch = b;
    r->told_layers = 0;
    for (uint32_t i = 0; i < r->n; i++)
        atomic_store(&r->all[i].done_layers, 0);
    run_all(r);
}

double ranks_measure_gathers(struct ranks *r, uint32_t n_rows, const struct clock *clock)
{
    if (r->n == 1)
        return 0;
    r->batch = NULL;
    r->gather_rows = n_rows;
    uint64_t start = clock_now(clock);
    run_all(r);
    return (double)(clock_now(clock) - start) / (double)NS_PER_S;
}
