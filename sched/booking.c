#include "sched/booking.h"

#include <math.h>
#include <string.h>

static const double MOST_AHEAD_MS = 1e9; /* 11 days: more than any client is told; keeps the sum in range */

static double ms_until(uint64_t now, uint64_t at)
{
    return at > now ? (double)(at - now) * 1e-6 : -(double)(now - at) * 1e-6;
}

uint64_t bookings_earliest(const struct bookings *b, uint64_t now, double busy_ms, double wait_ms, double work_ms)
{
    double start = fmax(busy_ms, wait_ms); /* when its prefill would start, from now */
    if (b->n == BOOKINGS_MAX)
        return UINT64_MAX;
    for (uint32_t i = 0; i < b->n; i++) {
        double other = fmax(ms_until(now, b->list[i].at_ns) + b->list[i].wait_ms, 0);
        if (start + work_ms > other)
            start = fmax(start, other + b->list[i].work_ms);
    }
    return now + (uint64_t)(fmin(start - wait_ms, MOST_AHEAD_MS) * 1e6);
}

void bookings_add(struct bookings *b, const struct booking *booking)
{
    uint32_t i = b->n++;
    for (; i && b->list[i - 1].at_ns > booking->at_ns; i--)
        b->list[i] = b->list[i - 1];
    b->list[i] = *booking;
}

bool bookings_remove(struct bookings *b, uint64_t identity)
{
    uint32_t kept = 0, n = b->n;
    for (uint32_t i = 0; i < n; i++)
        if (b->list[i].identity != identity)
            b->list[kept++] = b->list[i];
    b->n = kept;
    return kept < n;
}

uint32_t bookings_expire(struct bookings *b, uint64_t now)
{
    uint32_t n = 0;
    while (n < b->n && now > b->list[n].at_ns + BOOKING_WINDOW)
        n++;
    b->n -= n;
    memmove(b->list, b->list + n, b->n * sizeof(b->list[0]));
    return n;
}

double bookings_limit_ms(const struct bookings *b, uint64_t now)
{
    double limit = INFINITY;
    for (uint32_t i = 0; i < b->n; i++)
        limit = fmin(limit, fmax(ms_until(now, b->list[i].at_ns), 0) + b->list[i].wait_ms);
    return limit;
}

double bookings_charge(const struct bookings *b, uint64_t tenant)
{
    double charge = 0;
    for (uint32_t i = 0; i < b->n; i++)
        charge += b->list[i].tenant == tenant ? b->list[i].charge : 0;
    return charge;
}
