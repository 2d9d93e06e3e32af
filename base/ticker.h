/*
 * A thread that calls a function again and again, such as those that send heartbeats and register
 * with routers. A wall clock that is set does not matter to it.
 *
 * A flag and a plain sleep were rejected: whoever ends the thread then waits for the rest of a period, and
 * with it every process that ends.
 */
#pragma once

#include <stdint.h>

struct ticker;

/* Starts a thread of this name (base/thread.h). It calls tick(arg) at once, and `period_ns` after each
 * return. */
struct ticker *ticker_start(const char *name, uint64_t period_ns, void (*tick)(void *arg), void *arg);

/* Wakes the thread, waits for a call that still runs, ends the thread and frees the ticker. NULL is fine. */
void ticker_stop(struct ticker *t);
