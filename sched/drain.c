#include "sched/drain.h"

#include <math.h>

#include "base/clock.h"

static const double DRAIN_MS = 10000; /* time constant */

static struct drain fade(struct drain d, uint64_t now)
{
    double stays = exp(-clock_ms_between(d.at_ns, now) / DRAIN_MS);
    return (struct drain){d.work_ms * stays, d.ms * stays, now};
}

struct drain drain_begin(struct drain d, uint64_t now)
{
    return fade(d, now);
}

struct drain drain_observe(struct drain d, double work_ms, bool others_remain, uint64_t now)
{
    struct drain next = fade(d, now);
    if (others_remain) {
        next.work_ms += work_ms;
        next.ms += clock_ms_between(d.at_ns, now);
    }
    return next;
}

double drain_pace(const struct drain *d)
{
    return d->work_ms > 0 ? d->ms / d->work_ms : 0;
}
