/*
 * An eventcount (Reed and Kanodia 1979): a number that threads wait for to rise. A waiting thread spins for
 * some microseconds, then sleeps in the kernel. Raising the number costs a system call only if a thread
 * sleeps.
 *
 *     seen = eventcount_read(e);        check the condition after this: no rise is missed
 *     eventcount_wait(e, seen);
 *
 * Threads: any. What a thread wrote before it raised the number is visible to threads that waited for that
 * rise or read it.
 */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

struct eventcount { /* zero-initialised: the number 0 */
    _Atomic uint32_t value, n_asleep;
};

static inline uint32_t eventcount_read(struct eventcount *e)
{
    return atomic_load(&e->value);
}

void eventcount_raise(struct eventcount *e);
void eventcount_wait(struct eventcount *e, uint32_t seen); /* returns when the number differs from seen */
