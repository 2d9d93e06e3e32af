/*
 * How a job is published and claimed.
 *
 * `ticket` holds the job's number in its high half and the count of unclaimed pieces in its low half; claiming is a
 * compare-and-swap that lowers the count. A thread that holds a claim of a job may read the job's fields, because the caller
 * does not leave pool_run() (and so does not write them again) before every claimed piece is done; a thread without a claim
 * touches none of them. That is why a late thread is harmless: it either claims a piece of the job that runs now or nothing.
 *
 * Sleeping is by futex on `epoch` (threads) and on `n_done` (the caller), not by mutex and condition: a wake-up costs a
 * system call only if somebody sleeps.
 */
#include "kernels/cpu/pool.h"

#include <linux/futex.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/thread.h"

enum { SPINS = 4000 }; /* some 20 to 50 microseconds */

struct worker {
    struct pool *pool;
    uint32_t index;
    pthread_t thread;
};

struct pool {
    _Alignas(64) _Atomic uint64_t ticket;
    _Alignas(64) _Atomic uint32_t n_done;
    _Alignas(64) _Atomic uint32_t epoch; /* rises with each job and at the end */
    _Atomic uint32_t n_asleep;
    _Atomic bool caller_asleep;
    _Atomic bool closing;
    void (*run)(void *arg, uint32_t piece, uint32_t thread);
    void *arg;
    uint32_t n_pieces;
    uint32_t n_threads;
    struct worker *workers; /* [n_threads]; 0 is the caller */
};

static void futex_wait(_Atomic uint32_t *word, uint32_t seen)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int n)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0);
}

static void relax(void)
{
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

static bool claim(struct pool *p, uint32_t *left_out)
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

static void work(struct pool *p, uint32_t thread)
{
    uint32_t left = 0;
    while (claim(p, &left)) {
        uint32_t n_pieces = p->n_pieces;
        p->run(p->arg, n_pieces - left, thread);
        if (atomic_fetch_add(&p->n_done, 1) + 1 == n_pieces && atomic_load(&p->caller_asleep))
            futex_wake(&p->n_done, 1);
    }
}

static void wait_for_job(struct pool *p, uint32_t seen)
{
    for (uint32_t i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&p->epoch, memory_order_acquire) != seen)
            return;
        relax();
    }
    atomic_fetch_add(&p->n_asleep, 1);
    while (atomic_load(&p->epoch) == seen)
        futex_wait(&p->epoch, seen);
    atomic_fetch_sub(&p->n_asleep, 1);
}

static void *worker_main(void *arg)
{
    const struct worker *w = arg;
    uint32_t seen = 0;
    while (!atomic_load(&w->pool->closing)) {
        wait_for_job(w->pool, seen);
        seen = atomic_load(&w->pool->epoch);
        work(w->pool, w->index);
    }
    return NULL;
}

static void raise_epoch(struct pool *p)
{
    atomic_fetch_add(&p->epoch, 1);
    if (atomic_load(&p->n_asleep))
        futex_wake(&p->epoch, INT32_MAX);
}

struct pool *pool_open(uint32_t n_threads)
{
    void *memory = NULL;
    if (posix_memalign(&memory, _Alignof(struct pool), sizeof(struct pool)))
        abort();
    struct pool *p = memory;
    *p = (struct pool){.n_threads = n_threads, .workers = mem_array(n_threads, sizeof(struct worker))};
    for (uint32_t i = 1; i < n_threads; i++) {
        char name[24];
        snprintf(name, sizeof(name), "kernels-%u", i);
        p->workers[i] = (struct worker){.pool = p, .index = i};
        p->workers[i].thread = thread_start(name, worker_main, &p->workers[i]);
    }
    return p;
}

void pool_close(struct pool *p)
{
    if (!p)
        return;
    atomic_store(&p->closing, true);
    raise_epoch(p);
    for (uint32_t i = 1; i < p->n_threads; i++)
        pthread_join(p->workers[i].thread, NULL);
    free(p->workers);
    free(p);
}

uint32_t pool_n_threads(const struct pool *p)
{
    return p->n_threads;
}

static void wait_for_pieces(struct pool *p, uint32_t n_pieces)
{
    uint32_t done = 0;
    for (uint32_t i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&p->n_done, memory_order_acquire) == n_pieces)
            return;
        relax();
    }
    atomic_store(&p->caller_asleep, true);
    while ((done = atomic_load(&p->n_done)) != n_pieces)
        futex_wait(&p->n_done, done);
    atomic_store(&p->caller_asleep, false);
}

void pool_run(struct pool *p, void (*run)(void *arg, uint32_t piece, uint32_t thread), void *arg, uint32_t n_pieces)
{
    if (p->n_threads == 1 || n_pieces <= 1) {
        for (uint32_t i = 0; i < n_pieces; i++)
            run(arg, i, 0);
        return;
    }
    p->run = run;
    p->arg = arg;
    p->n_pieces = n_pieces;
    atomic_store(&p->n_done, 0);
    uint64_t job = (atomic_load(&p->ticket) >> 32) + 1;
    atomic_store_explicit(&p->ticket, job << 32 | n_pieces, memory_order_release);
    raise_epoch(p);
    work(p, 0);
    wait_for_pieces(p, n_pieces);
}
