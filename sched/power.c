#include "sched/power.h"

#include <assert.h>
#include <math.h>
#include <stdbool.h>

/*
 * Shares of the budget: a level is entered at or above `from` (the brake: only above), and left below
 * `until`.
 */
static const struct {
    double from, until;
    struct power_clocks clocks;
} LEVELS[POWER_LEVELS] = {
    {0, 0, {1, 1}},
    {0.80, 0.75, {0.904, 1}},
    {0.89, 0.84, {0.787, 1}},
    {0.89, 0.84, {0.787, 0.926}},
    {1, 0.95, {0.204, 0.204}},
};

enum { FIRST_IS_DOWN = 2, ALL_ARE_DOWN = 3 }; /* levels: the second one waits for the effect of the first */

/* The level that a sample asks for. s: the state in which the sample was drawn. */
static uint32_t level_for(struct power_state s, double share)
{
    uint32_t level = s.asked;
    if (share > LEVELS[POWER_BRAKE].from)
        return POWER_BRAKE;
    if (level == POWER_BRAKE)
        return share < LEVELS[POWER_BRAKE].until ? ALL_ARE_DOWN : POWER_BRAKE;
    while (share < LEVELS[level].until)
        level--;
    while (level < FIRST_IS_DOWN && share >= LEVELS[level + 1].from)
        level++;
    if (level == FIRST_IS_DOWN && s.held >= FIRST_IS_DOWN && share >= LEVELS[ALL_ARE_DOWN].from)
        level = ALL_ARE_DOWN;
    return level;
}

struct power_state power_observe(struct power_state s, double share, uint64_t now_ns)
{
    uint64_t delay_ns = s.asked == POWER_BRAKE ? POWER_BRAKE_NS : POWER_DELAY_NS;
    uint32_t level = level_for(s, share);
    bool was_awaited = s.held != s.asked;
    if (was_awaited && now_ns - s.asked_ns >= delay_ns)
        s.held = s.asked;
    if (level > s.asked || (level < s.asked && !was_awaited)) {
        s.asked = level;
        s.asked_ns = now_ns;
    }
    return s;
}

struct power_clocks power_clocks_at(uint32_t level)
{
    assert(level < POWER_LEVELS);
    return LEVELS[level].clocks;
}

double power_prefill_factor(double clock)
{
    return 1 / clock;
}

double power_decode_factor(double clock)
{
    return pow(clock, -0.25);
}

double power_draw_factor(double clock)
{
    return pow(clock, 1.2);
}
