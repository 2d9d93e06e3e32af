/*
 * Appointments with one worker: a request that was refused is told when to come back, and then finds room.
 *
 * A booking keeps a worker from taking what would not be computed early enough for the one that is to come: from at_ns on it may
 * wait wait_ms and needs work_ms. Who does not come within BOOKING_WINDOW loses the place. So a refusal costs the
 * worker at most that window, and for a request with a booking "retry after" is a promise and not a guess.
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
    uint64_t identity, at_ns;
    double wait_ms, work_ms;
    uint64_t tenant;
    double charge; /* what the tenant will be charged for it */
};

struct bookings { /* by at_ns */
    struct booking list[BOOKINGS_MAX];
    uint32_t n;
};

/* When one that needs work_ms and may wait wait_ms can be there, if the worker is busy for busy_ms; UINT64_MAX: no place is left. */
uint64_t bookings_earliest(const struct bookings *b, uint64_t now_ns, double busy_ms, double wait_ms, double work_ms);
void bookings_add(struct bookings *b, const struct booking *booking); /* at what bookings_earliest() said */
bool bookings_remove(struct bookings *b, uint64_t identity);          /* whether it was there */
uint32_t bookings_expire(struct bookings *b, uint64_t now_ns);        /* how many did not come */
/* Within what time from now all work that is given to the worker must be done; INFINITY: any. */
double bookings_limit_ms(const struct bookings *b, uint64_t now_ns);
double bookings_charge(const struct bookings *b, uint64_t tenant); /* of all that are kept for it */
