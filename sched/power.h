/*
 * Power oversubscription (POLCA, Patel et al., ASPLOS'24). A row of machines almost always draws less than
 * its budget, so it has more machines than the budget could feed at full power. Near the budget, clocks go
 * down: first those of the machines that were named for it ("first"), then those of the others.
 *
 *     level  at the row's share of its budget   clocks, as shares of the highest: first, others
 *     0                                         1      1
 *     1      >= 0.80                            0.904  1
 *     2      >= 0.89                            0.787  1
 *     3      >= 0.89, level 2 in effect         0.787  0.926
 *     4      > 1                                0.204  0.204     the brake
 *
 * (The paper's 1275, 1110, 1305 and 288 of 1410 MHz.) Levels are left at 5 % less: 2 and 3 below 0.84, 1
 * below 0.75, the brake below 0.95, to level 3. A level takes effect at the first sample that is
 * POWER_DELAY_NS later than the request (out-of-band control), the brake POWER_BRAKE_NS later. Until then
 * only a higher level may replace it: a sent command can't be withdrawn, and a row that flutters around a
 * threshold would otherwise never see a clock go down. The sample at which a level takes effect was still
 * drawn at the former level, so it can't ask for less, nor for level 3.
 *
 * Pure functions; any thread.
 */
#pragma once

#include <stdint.h>

#include "base/clock.h"

enum { POWER_LEVELS = 5, POWER_BRAKE = 4 };
#define POWER_DELAY_NS (40 * NS_PER_S)
#define POWER_BRAKE_NS (5 * NS_PER_S)

struct power_state {      /* all zero: all clocks are up */
    uint32_t asked, held; /* the level that was asked for last; the level in effect */
    uint64_t asked_ns;    /* when `asked` was asked for */
};

struct power_clocks {
    double first, others; /* shares of the highest clock, (0, 1] */
};

/* The state after a sample of the row's power; share: of its budget. */
struct power_state power_observe(struct power_state s, double share, uint64_t now_ns);
struct power_clocks power_clocks_at(uint32_t level); /* clocks of a level < POWER_LEVELS */

/*
 * The effect of a clock on a machine; an assumption, not a measurement. Prompts are bound by compute and take
 * 1 / clock times as long; decode steps are bound by memory and take clock^-0.25 times as long; power beyond
 * idle is proportional to clock^1.2. At 0.787 the peak is a fifth lower and decode steps are 6 % longer, as
 * in the paper: "a fifth of peak power for at most 7 % of performance".
 */
double power_prefill_factor(double clock); /* factor on the time of a step's prompts, >= 1 */
double power_decode_factor(double clock);  /* factor on the time of its decoding, >= 1 */
double power_draw_factor(double clock);    /* factor on watts beyond idle, <= 1 */
