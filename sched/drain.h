/*
 * The pace at which a queue is emptied: milliseconds of time for each millisecond of predicted work. The
 * latest seconds count most. Only time with a queue counts: requests that meet an empty queue say nothing
 * about it.
 *
 * A value: observing returns the next one.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct drain {
    double work_ms, ms; /* predicted work that left the queue; the time that this took. Both fade */
    uint64_t at_ns;     /* latest dispatch, or when the queue began */
};

/* The queue is not empty any more: time counts from now on. */
struct drain drain_begin(struct drain d, uint64_t now_ns);
/* A request with this predicted work is dispatched. others_remain: the queue is not empty afterwards. */
struct drain drain_observe(struct drain d, double work_ms, bool others_remain, uint64_t now_ns);
double drain_pace(const struct drain *d); /* 0: not known */
