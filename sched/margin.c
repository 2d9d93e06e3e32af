#include "sched/margin.h"

#include <math.h>

/*
 * Weight of one error in the spread; least spread; step of margin_note(), as a share of the margin's maximum.
 */
static const double SPREAD_RATE = 0.05, LEAST_SPREAD = 1e-3, NOTE_STEP = 0.05;

struct margin margin_make(double first, double most)
{
    return (struct margin){first, most, first / 2};
}

static struct margin move(struct margin m, double step, bool is_above)
{
    m.value = fmin(fmax(m.value + step * (is_above - MARGIN_MISSES), 0), m.most);
    return m;
}

struct margin margin_observe(struct margin m, double error)
{
    error = fmin(fmax(error, -1), 2 * m.most);
    m.spread += SPREAD_RATE * (fabs(error) - m.spread);
    return move(m, fmax(m.spread, LEAST_SPREAD), error > m.value);
}

struct margin margin_note(struct margin m, bool missed)
{
    return move(m, NOTE_STEP * m.most, missed);
}
