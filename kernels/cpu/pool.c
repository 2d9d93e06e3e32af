/*
 * How a job is published and claimed.
 *
 * `ticket` holds the number of the job in its high half and the count of unclaimed pieces in its low half. A
 * claim is a compare-and-swap that lowers the count. A thread with a claim may read the job's fields: the
 * caller does not leave pool_run(), and so does not write them again, before every claimed piece is done. A
 * thread without a claim reads none of them. So a late thread is harmless: it claims a piece of the job that
 * runs now, or nothing.
 *
 * Threads wait on `epoch`, the caller waits on `all_done`, which rises once for each job. Both are
 * eventcounts, not a mutex with a condition, because a wake-up then costs a system call only if a thread
 * sleeps.
 */
#include "kernels/cpu/pool.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/eventcount.h"
#include "base/mem.h"
#include "base/thread.h"

struct pool_worker {
    struct thread_pool *pool;
    uint32_t index;
    pthread_t thread;
};

struct thread_pool {
    _Alignas(64) _Atomic uint64_t ticket;
    _Alignas(64) _Atomic uint32_t n_done;
    _Alignas(64) struct eventcount epoch; /* rises with each job, and when the pool closes */
    struct eventcount all_done;           /* rises with the last piece of each job */
    _Atomic bool closing;
    void (*run)(void *arg, uint32_t piece, uint32_t thread);
    void *arg;
    uint32_t n_pieces;
    uint32_t n_threads;
    struct pool_worker *workers; /* [n_threads]; 0 stands for the caller */
};

static bool claim(struct thread_pool *p, uint32_t *left_out)
{
    uint64_t t = atomic_load_explicit(&p->ticket, memory_order_relaxed);
    while ((uint32_t)t) {
        if (atomic_compare_exchange_weak_explicit(&p->ticket, &t, t - 1, memory_order_acquire, memory_order_relaxed)) {
            *left_out = (uint32_t)t;
            return true;
        }
    }
    return false;
}

static void work(struct thread_pool *p, uint32_t thread)
{
    uint32_t left = 0;
    while (claim(p, &left)) {
        uint32_t n_pieces = p->n_pieces;
        p->run(p->arg, n_pieces - left, thread);
        if (atomic_fetch_add(&p->n_done, 1) + 1 == n_pieces)
            eventcount_raise(&p->all_done);
    }
}

static void *worker_main(void *arg)
{
    const struct pool_worker *w = arg;
    uint32_t seen = 0;
    while (!atomic_load(&w->pool->closing)) {
        eventcount_wait(&w->pool->epoch, seen);
        seen = eventcount_read(&w->pool->epoch);
        work(w->pool, w->index);
    }
    return NULL;
}

struct thread_pool *pool_open(uint32_t n_threads)
{
    void *memory = NULL;
    if (posix_memalign(&memory, _Alignof(struct thread_pool), sizeof(struct thread_pool)))
        abort();
    struct thread_pool *p = memory;
    *p = (struct thread_pool){.n_threads = n_threads, .workers = mem_array(n_threads, sizeof(struct pool_worker))};
    for (uint32_t i = 1; i < n_threads; i++) {
        char name[24];
        snprintf(name, sizeof(name), "kernels-%u", i);
        p->workers[i] = (struct pool_worker){.pool = p, .index = i};
        p->workers[i].thread = thread_start(name, worker_main, &p->workers[i]);
    }
    return p;
}

void pool_close(struct thread_pool *p)
{
    if (!p)
        return;
    atomic_store(&p->closing, true);
    eventcount_raise(&p->epoch);
    for (uint32_t i = 1; i < p->n_threads; i++)
        pthread_join(p->workers[i].thread, NULL);
    free(p->workers);
    free(p);
}

uint32_t pool_n_threads(const struct thread_pool *p)
{
    return p->n_threads;
}

void pool_run(struct thread_pool *p, void (*run)(void *arg, uint32_t piece, uint32_t thread), void *arg,
              uint32_t n_pieces)
{
    if (p->n_threads == 1 || n_pieces <= 1) {
        for (uint32_t i = 0; i < n_pieces; i++)
            run(arg, i, 0);
        return;
    }
    p->run = run;
    p->arg = arg;
    p->n_pieces = n_pieces;
    uint32_t seen = eventcount_read(&p->all_done);
    atomic_store(&p->n_done, 0);
    uint64_t job = (atomic_load(&p->ticket) >> 32) + 1;
    atomic_store_explicit(&p->ticket, job << 32 | n_pieces, memory_order_release);
    eventcount_raise(&p->epoch);
    work(p, 0);
    eventcount_wait(&p->all_done, seen);
}
