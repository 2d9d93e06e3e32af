/*
 * Power oversubscription (POLCA, Patel et al., ASPLOS'24): a row of machines draws less than it may nearly always, so more of them
 * stand in it than it could feed at once; when it gets near its budget clocks go down, first of those that were named for it.
 *
 *     level  at the row's share of its budget   clocks, as shares of the highest: first, others
 *     0                                         1      1
 *     1      >= 0.80                            0.904  1
 *     2      >= 0.89                            0.787  1
 *     3      >= 0.89, level 2 being in effect   0.787  0.926
 *     4      > 1                                0.204  0.204     the brake
 *
 * (The paper's 1275, 1110, 1305 and 288 of 1410 MHz.) Falling, levels are left 5 % lower: 2 and 3 below 0.84, 1 below 0.75; the
 * brake below 0.95, for level 3. A clock that was asked for holds POWER_DELAY_NS later (out of band), the brake POWER_BRAKE_NS, as
 * of the first sample then. Until it does, only a higher level may take its place: what was sent can't be called back, and a row that
 * flutters around a threshold would never see a clock go down. A sample at which a level begins to hold was still drawn by the one
 * before, so it can't ask for less either, nor for level 3.
 *
 * A pure function of what it is given. Threads: free for all.
 */
#pragma once

#include <stdint.h>

#include "base/clock.h"

enum { POWER_LEVELS = 5, POWER_BRAKE = 4 };
#define POWER_DELAY_NS (40 * NS_PER_S)
#define POWER_BRAKE_NS (5 * NS_PER_S)

struct power_state {      /* zeros: all clocks are up */
    uint32_t asked, held; /* levels: the one asked for, and the one in effect */
    uint64_t asked_ns;    /* when it was asked for */
};

struct power_clocks {
    double first, others; /* shares of the highest clock, (0, 1] */
};

/* A sample of the row's power, as a share of its budget: what is asked for, and what is in effect, from now_ns on. */
struct power_state power_observe(struct power_state s, double share, uint64_t now_ns);
struct power_clocks power_clocks_at(uint32_t level); /* level < POWER_LEVELS */

/*
 * What a clock does to a machine. Prompts are bound by compute, decode steps by memory, so the one takes 1 / clock as long, the other
 * clock^-0.25; what is drawn beyond idle goes with clock^1.2. At 0.787 that is a fifth less of the peak for 6 % longer decode
 * steps: the paper's "a fifth of peak power for at most 7 % of performance". An assumption, not a measurement.
 */
double power_prefill_factor(double clock); /* on the time of a step's prompts, >= 1 */
double power_decode_factor(double clock);  /* on the time of its decoding, >= 1 */
double power_draw_factor(double clock);    /* on watts beyond idle, <= 1 */
