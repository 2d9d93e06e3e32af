/*
 * A number that rises while others wait for it to: an eventcount (Reed and Kanodia 1979). Who waits spins for some microseconds, then sleeps
 * in the kernel; raising it costs a system call only if somebody sleeps.
 *
 *     seen = eventcount_read(e);        what is waited for is looked at after this, so that a rise in between is not missed
 *     eventcount_wait(e, seen);
 *
 * Threads: any. What a thread wrote before it raised the number is seen by who has waited for that, or read it.
 */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

struct eventcount { /* zero-initialised is 0 */
    _Atomic uint32_t value, n_asleep;
};

static inline uint32_t eventcount_read(struct eventcount *e)
{
    return atomic_load(&e->value);
}

void eventcount_raise(struct eventcount *e);
void eventcount_wait(struct eventcount *e, uint32_t seen); /* until it is another one */
