/*
 * The time by which other processes are judged: the clock's time less the time for which this process was
 * stopped or starved.
 *
 * A process that stands still (SIGSTOP, a suspended machine, a container without CPU) hears nobody. What its
 * peers said meanwhile waits unread in its sockets; if the whole machine stood still, the peers said nothing
 * and are not to blame. Therefore every limit on how long another process may be silent or slow is counted in
 * this time. A client's deadline is the client's own and is counted by the clock.
 *
 * The thread that judges reads this time at least once a turn. A reading that comes later than a turn after
 * the last one (or than a turn after the moment until which the thread meant to sleep) shows that the thread
 * was away. One turn of each absence counts, so that a thread that is late at each reading still notices a
 * death, only later. The messages that queued up are read meanwhile, because the limits are several turns
 * long.
 *
 * Where other threads hear for this one, they may starve while it runs. It says so if it finds out, and no
 * time passes until they hear again (absence_deaf).
 *
 * Rejected: moving deadlines after each absence (there are many, and one is always forgotten); comparing
 * CLOCK_BOOTTIME with CLOCK_MONOTONIC (sees a suspended machine only); a thread that only ticks (that it ran
 * does not show that this thread did).
 *
 * Threads: one thread reads. Errors: none.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/log.h"

struct absence {
    const struct clock *clock;
    const struct log *log; /* NULL: absences are not logged */
    uint64_t turn_ns;      /* the longest time between two readings that is not an absence */
    uint64_t read_ns;      /* the clock at the last reading */
    uint64_t away_ns;      /* sum of absences: how far this time is behind the clock */
    bool is_deaf;
    uint64_t deaf_ns; /* since then, by the clock */
};

/* clock is borrowed. */
void absence_init(struct absence *a, const struct clock *clock, uint64_t turn_ns);
/* From now on absences of several turns are logged. Called when the thread begins to take turns: how long a
 * process opens is no absence that anybody should be warned of. log is borrowed. */
void absence_log(struct absence *a, const struct log *log);
/* The time now; it never goes back. sleep_until_ns: until when, in this time, the thread meant to sleep;
 * 0: it did not sleep. */
uint64_t absence_now(struct absence *a, uint64_t sleep_until_ns);
/* Whether the threads that hear for this one have not run for a while. */
void absence_deaf(struct absence *a, bool is_deaf);
/* Converts a time of the clock to this time, by the absences so far. UINT64_MAX (never) stays. */
static inline uint64_t absence_of(const struct absence *a, uint64_t clock_ns)
{
    return clock_ns == UINT64_MAX ? clock_ns : clock_ns > a->away_ns ? clock_ns - a->away_ns : 0;
}
