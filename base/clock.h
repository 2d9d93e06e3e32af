/*
 * Time behind one interface, so that the same code runs in real and in virtual time.
 *
 * Nanoseconds from an arbitrary start, never going back. Only differences within one process mean anything;
 * between processes remaining times are sent.
 *
 * Threads: any thread may read; one thread advances virtual time.
 */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

#define NS_PER_MS 1000000ull
#define NS_PER_S  1000000000ull

struct clock {
    uint64_t (*now_ns)(const struct clock *clock);
    _Atomic uint64_t virtual_ns; /* used by virtual clocks only */
};

static inline uint64_t clock_now(const struct clock *clock)
{
    return clock->now_ns(clock);
}

/* Milliseconds from from_ns to to_ns; 0 if to_ns is not later. */
static inline double clock_ms_between(uint64_t from_ns, uint64_t to_ns)
{
    return to_ns > from_ns ? (double)(to_ns - from_ns) * 1e-6 : 0;
}

void clock_init_real(struct clock *clock);
void clock_init_virtual(struct clock *clock, uint64_t start_ns);
void clock_advance(struct clock *clock, uint64_t delta_ns); /* virtual clocks only */
