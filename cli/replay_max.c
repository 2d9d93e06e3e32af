/*
 * tandem replay --find-max: searches for the highest rate that is good enough, by two definitions
 * (replay/report.h): distserve requires that 90 % of all requests meet both limits, mlperf that 99 % meet the
 * TTFT limit and 99 % the TPOT limit.
 *
 * For each definition the rate is doubled or halved until a good and a bad rate are known. Then their
 * geometric mean is tried, until they are 5 % apart. Rounds of one definition count for the other, too. Each
 * round has prompts of its own, except for what the trace itself makes equal, so that blocks cached by an
 * earlier round don't help.
 */
#include <math.h>
#include <stdio.h>

#include "cli/replay.h"

static const double CLOSE_ENOUGH = 1.05;

enum definition { DISTSERVE, MLPERF, DEFINITIONS };

struct max_search {
    struct report_point *points; /* sorted by rate */
    uint32_t n, n_rounds;
};

static bool is_good(const struct report_point *p, enum definition d)
{
    return d == DISTSERVE ? p->met_share >= 0.9 : p->ttft_share >= 0.99 && p->tpot_share >= 0.99;
}

static double best_of(const struct max_search *s, enum definition d)
{
    double best = 0;
    for (uint32_t i = 0; i < s->n; i++)
        best = is_good(&s->points[i], d) ? fmax(best, s->points[i].rate) : best;
    return best;
}

/* The rate to try next; 0: the search has ended. */
static double next_rate(const struct max_search *s, enum definition d, double first)
{
    double good = best_of(s, d), bad = INFINITY;
    for (uint32_t i = 0; i < s->n; i++)
        if (!is_good(&s->points[i], d) && s->points[i].rate > good)
            bad = fmin(bad, s->points[i].rate);
    if (!s->n)
        return first;
    if (!(good > 0))
        return bad / 2;
    if (isinf(bad))
        return good * 2;
    return bad / good > CLOSE_ENOUGH ? sqrt(good * bad) : 0;
}

static void add_point(struct max_search *s, const struct report_point *p)
{
    s->points = mem_resize(s->points, s->n + 1, sizeof(*s->points));
    uint32_t i = s->n++;
    for (; i && s->points[i - 1].rate > p->rate; i--)
        s->points[i] = s->points[i - 1];
    s->points[i] = *p;
}

static bool run_round(struct replay *r, struct max_search *s, double rate)
{
    struct replay_result result;
    r->o.rate = rate;
    r->round++;
    replay_schedule(r);
    if (!replay_run(r, NULL) || replay_is_stopped())
        return false;
    replay_result_init(&result, r, NULL);
    const struct report_point p = report_point_of(&result.run);
    fprintf(stderr, "rate %.4g: %.2f/s, %.1f %% met both limits, %.1f %% TTFT, %.1f %% TPOT%s\n", p.rate,
            p.offered_rate, 100 * p.met_share, 100 * p.ttft_share, 100 * p.tpot_share,
            result.run.valid ? "" : "; NOT VALID");
    add_point(s, &p);
    replay_result_fini(&result);
    s->n_rounds++;
    return true;
}

struct report_point *replay_find_max(struct replay *r, uint32_t *n_out)
{
    struct max_search s = {.n = 0};
    double first = r->o.rate, rate, best;
    bool go = true;
    for (int d = 0; d < DEFINITIONS; d++)
        while (go && s.n_rounds < (uint32_t)r->o.find_rounds && (rate = next_rate(&s, (enum definition)d, first)) > 0)
            go = run_round(r, &s, rate);
    best = best_of(&s, DISTSERVE);
    /* The report is that of the last round, so the best rate runs once more. */
    if (go && best > 0 && fabs(best - r->o.rate) > 1e-9 * best)
        run_round(r, &s, best);
    *n_out = s.n;
    return s.points;
}
