/*
 * Threads that share the pieces of one job at a time.
 *
 * Pieces are claimed one by one. So a thread that loses its core costs its piece only, and a job never waits
 * for a thread that has not woken up. The caller takes part. Idle threads spin for some microseconds, because
 * the next operation of a forward pass comes soon, then sleep.
 *
 * Threads: one caller at a time.
 */
#pragma once

#include <stdint.h>

struct thread_pool;

struct thread_pool *pool_open(uint32_t n_threads); /* n_threads >= 1 includes the caller */
void pool_close(struct thread_pool *p);            /* NULL is fine */
uint32_t pool_n_threads(const struct thread_pool *p);

/*
 * Calls run(arg, piece, thread) for every piece < n_pieces, in any order. Calls with the same thread (<
 * n_threads) never overlap.
 */
void pool_run(struct thread_pool *p, void (*run)(void *arg, uint32_t piece, uint32_t thread), void *arg,
              uint32_t n_pieces);
