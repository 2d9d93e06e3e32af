#include "base/clock.h"

#include <time.h>

static uint64_t real_now(const struct clock *clock)
{
    (void)clock;
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * NS_PER_S + (uint64_t)ts.tv_nsec;
}

static uint64_t virtual_now(const struct clock *clock)
{
    return atomic_load_explicit(&clock->virtual_ns, memory_order_acquire);
}

void clock_init_real(struct clock *clock)
{
    clock->now_ns = real_now;
    atomic_init(&clock->virtual_ns, 0);
}

void clock_init_virtual(struct clock *clock, uint64_t start_ns)
{
    clock->now_ns = virtual_now;
    atomic_init(&clock->virtual_ns, start_ns);
}

void clock_advance(struct clock *clock, uint64_t delta_ns)
{
    atomic_fetch_add_explicit(&clock->virtual_ns, delta_ns, memory_order_acq_rel);
}
