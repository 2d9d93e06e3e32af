/*
 * How fast a queue is emptied: the time that its work takes, over that work as it was predicted; the latest seconds count most. Only
 * time with a queue counts: what comes to an empty one says nothing.
 *
 * A value; observing gives the next one.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct drain {
    double work_ms, ms;
    uint64_t at_ns; /* the latest dispatch, or when the queue began */
};

/* The queue was empty, and is not any more. */
struct drain drain_begin(struct drain d, uint64_t now_ns);
/* A request with so much work leaves the queue, in which others remain or not. */
struct drain drain_observe(struct drain d, double work_ms, bool others_remain, uint64_t now_ns);
double drain_pace(const struct drain *d); /* milliseconds for one of work; 0: not known */
