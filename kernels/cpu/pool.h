/*
 * Threads that share the pieces of one job at a time.
 *
 * Pieces are claimed one by one, so a thread that loses its core costs its piece and no more, and a job never waits for a
 * thread that has not woken up. The caller takes part. Idle threads spin for some microseconds (the next operation of a
 * forward pass is near), then sleep.
 *
 * Threads: one caller at a time.
 */
#pragma once

#include <stdint.h>

struct pool;

struct pool *pool_open(uint32_t n_threads); /* including the caller; >= 1 */
void pool_close(struct pool *p);            /* NULL is fine */
uint32_t pool_n_threads(const struct pool *p);

/* Calls run(arg, piece, thread) for every piece < n_pieces, in any order; thread < n_threads is never used twice at once. */
void pool_run(struct pool *p, void (*run)(void *arg, uint32_t piece, uint32_t thread), void *arg, uint32_t n_pieces);
