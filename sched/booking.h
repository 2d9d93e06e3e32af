/*
 * Bookings on one worker: a refused request is told when to come back, and then finds room.
 *
 * A booked request comes at at_ns, may then wait wait_ms, and needs work_ms. Until then the worker takes only
 * work that will be finished early enough for it. A client that comes more than BOOKING_WINDOW late loses its
 * place. So a booking that is not used costs the worker little, and for a booked request the retry-after is a
 * promise.
 *
 * Threads: one owner. A value; all zero is empty.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"

enum { BOOKINGS_MAX = 64 };
#define BOOKING_WINDOW (50 * NS_PER_MS)

struct booking {
    uint64_t identity, at_ns; /* sched_request.identity; when it was told to come back */
    double wait_ms, work_ms;  /* from at_ns: how long it may wait; then: how long its prefill takes */
    uint64_t tenant;
    double charge; /* tokens that the tenant will be charged for it */
};

struct bookings {
    struct booking list[BOOKINGS_MAX]; /* by at_ns, rising */
    uint32_t n;
};

/*
 * The earliest time at which a request that may wait wait_ms and needs work_ms can come, on a worker that is
 * busy for busy_ms. UINT64_MAX: all BOOKINGS_MAX places are taken.
 */
uint64_t bookings_earliest(const struct bookings *b, uint64_t now_ns, double busy_ms, double wait_ms, double work_ms);
/* at_ns must be what bookings_earliest() returned, or later. */
void bookings_add(struct bookings *b, const struct booking *booking);
bool bookings_remove(struct bookings *b, uint64_t identity);   /* whether it was there */
uint32_t bookings_expire(struct bookings *b, uint64_t now_ns); /* removes late bookings; returns how many */
/* Time from now within which new work must be finished, so that every booking is kept; INFINITY: any time. */
double bookings_limit_ms(const struct bookings *b, uint64_t now_ns);
double bookings_charge(const struct bookings *b, uint64_t tenant); /* sum over the tenant's bookings */
