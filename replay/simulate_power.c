/*
 * A power budget for all workers together: their power is sampled, and the control of sched/power.h turns the
 * samples into clocks.
 *
 * A sample is the power of each worker at that moment, not its mean since the last sample: a row of machines
 * must never exceed its budget, and a mean would hide that it did. Samples end when no request is open, so
 * that the run ends.
 */
#include <math.h>

#include "replay/simulate_internal.h"

enum { SAMPLE_MS = 2000 }; /* the interval at which POLCA reads a row's power */

static void post(struct sim *s)
{
    events_post(&s->events, s->now_ns + SAMPLE_MS * NS_PER_MS, EVENT_SAMPLE, 0, 0);
}

/* The level in force. With brake-only control, every level below the brake acts as 0. */
static uint32_t level_of(const struct sim *s)
{
    return s->c.power_brake_only && s->power.held != POWER_BRAKE ? 0 : s->power.held;
}

static double share_of_budget(const struct sim *s)
{
    double watts = 0;
    for (uint32_t w = 0; w < s->n_nodes; w++)
        watts += node_watts(&s->nodes[w]);
    return watts / s->c.power_budget_w;
}

/* Adds the time since the last sample to the level in force. */
static void note_level(struct sim *s, uint64_t until_ns)
{
    s->result->power.level_ms[level_of(s)] += clock_ms_between(s->sampled_ns, until_ns);
    s->sampled_ns = until_ns;
}

static void set_clocks(struct sim *s)
{
    struct power_clocks clocks = power_clocks_at(level_of(s));
    for (uint32_t w = 0; w < s->n_nodes; w++)
        node_set_clock(s, w, w + s->c.n_power_first >= s->n_nodes ? clocks.first : clocks.others);
}

void budget_open(struct sim *s)
{
    if (s->c.power_budget_w > 0)
        post(s);
}

void budget_sample(struct sim *s)
{
    struct simulated_power *out = &s->result->power;
    double share = share_of_budget(s);
    bool was_braked = s->power.asked == POWER_BRAKE;
    if (!s->n_open)
        return;
    note_level(s, s->now_ns);
    s->power = power_observe(s->power, share, s->now_ns);
    out->peak_share = fmax(out->peak_share, share);
    out->n_brakes += s->power.asked == POWER_BRAKE && !was_braked;
    set_clocks(s);
    post(s);
}

void budget_close(struct sim *s)
{
    if (s->c.power_budget_w > 0)
        note_level(s, ns_of(s->result->duration_ms));
}
