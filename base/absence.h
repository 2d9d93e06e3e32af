/*
 * The time by which others are judged: the clock's, without the time that this process was stopped or starved.
 *
 * A process that stands still (SIGSTOP, a suspended machine, a container without CPU) hears nobody. What the others said waits
 * unread in its sockets; when the whole machine stood still, the others said nothing and are not to blame. Every limit on how
 * long somebody else may be silent, slow or in the way is therefore counted in this time. A client's deadline is the client's own
 * and is counted by the clock.
 *
 * The thread that judges reads this time at least once a turn. A reading that comes later than a turn (or than the moment until
 * which the thread meant to sleep, plus a turn) shows that the thread was away. Of its absence one turn counts, so that a
 * thread that is late at each reading still notices a death, only later. The messages that queued up are read meanwhile: the limits
 * are several turns long.
 *
 * Rejected: moving deadlines on after each absence (there are many, and one is always forgotten); CLOCK_BOOTTIME against
 * CLOCK_MONOTONIC (sees a suspended machine only); a thread that only ticks (that it ran does not show that this one did).
 *
 * Threads: one reads. Errors: none.
 */
#pragma once

#include <stdint.h>

#include "base/clock.h"
#include "base/log.h"

struct absence {
    const struct clock *clock;
    const struct log *log;
    uint64_t turn_ns; /* the longest time between two readings that is no absence */
    uint64_t read_ns; /* the clock at the last reading */
    uint64_t away_ns; /* absences so far: how far this time is behind the clock */
};

/* clock and log are borrowed. Absences of several turns are logged, unless log is NULL. */
void absence_init(struct absence *a, const struct clock *clock, uint64_t turn_ns, const struct log *log);
/* The time now; never goes back. sleep_until_ns: in this time, when the thread meant to read next; 0: within a turn. */
uint64_t absence_now(struct absence *a, uint64_t sleep_until_ns);
/* A moment of the clock, expressed in this time as it stands now; UINT64_MAX (never) stays. */
static inline uint64_t absence_of(const struct absence *a, uint64_t clock_ns)
{
    return clock_ns == UINT64_MAX ? clock_ns : clock_ns > a->away_ns ? clock_ns - a->away_ns : 0;
}
