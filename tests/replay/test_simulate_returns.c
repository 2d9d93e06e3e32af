/*
 * Clients that come back when a refusal told them to. The aim: at least 90 % of them are admitted, and the
 * mean of the times that they are told is at most 1.5 times the mean of the waits that were necessary. The
 * first admissible moment is found by asking every 5 ms after a refusal whether the request would be admitted
 * as a new one.
 */
#include <stdio.h>

#include "tests/replay/simulate_made.h"

struct crowd {
    uint32_t n_routers;
    double load;             /* load, as a multiple of what 4 + 4 workers can serve */
    double returns;          /* share of the refused requests that come back once */
    double least, most_wait; /* least admitted share; most ratio of told to necessary wait */
};

static const double SERVED_GAP_MS = 25;

/*
 * A row with less than 0.9 or more than 1.5 has what holds today, which misses the aim. A worker keeps at
 * most BOOKINGS_MAX places, which is some seconds of its work. A client that is refused while all places are
 * taken is told a time without a place, and new requests arrive before it. With 128 places a worker 0.89 and
 * 0.98 were admitted at four times the load (10 % come back), and 0.93 to 0.96 at up to twice the load if all
 * come back; but then clients were told 1.7 to 2.7 times the first admissible wait, since places lie further
 * ahead than the gaps that a new request may find.
 */
static const struct crowd CROWDS[] = {
    /* The first four are run always, all of them with TANDEM_LONG=routers. */
    {1, 1.5, 0.1, 0.9, 1.5}, {2, 2, 0.1, 0.87, 1.5}, {1, 1.5, 1, 0.9, 2},  {2, 1.5, 1, 0.85, 1.5},
    {1, 2, 0.1, 0.9, 1.5},   {1, 4, 0.1, 0.6, 1.5},  {1, 2, 1, 0.75, 1.8}, {2, 1.5, 0.1, 0.87, 1.5},
    {1, 4, 1, 0.38, 1.5},    {2, 4, 0.1, 0.85, 1.6}, {2, 2, 1, 0.8, 1.8},  {2, 4, 1, 0.45, 1.8},
};
enum { N_CROWDS = sizeof(CROWDS) / sizeof(CROWDS[0]) };

struct sums {
    uint64_t refused, late, back, admitted, tried, taken, in_time;
    double told_ms, admissible_ms;
};

static void add_run(const struct simulate_config *c, const struct simulate_result *r, struct sums *s)
{
    for (uint64_t i = 0; i < r->n_requests; i++) {
        const struct simulated *q = &r->requests[i];
        s->refused += q->refused || q->came_back;
        s->back += q->came_back;
        s->admitted += q->came_back && q->admitted_then;
        s->taken += !q->refused;
        s->in_time += !q->refused && q->ttft_ms <= c->ttft_ms;
        if (!(q->retry_after_ms > 0) || !(q->admissible_ms > 0))
            continue;
        s->tried++;
        s->told_ms += q->retry_after_ms;
        s->admissible_ms += q->admissible_ms;
    }
    s->late += r->n_late_refused;
}

START_TEST(test_simulate_admits_those_that_come_back_when_they_were_told)
{
    const struct crowd *crowd = &CROWDS[_i];
    struct maker m = {{0}};
    struct simulate_config c = config_of(4, 4);
    struct simulate_result r;
    struct sums s = {0};
    make_mixed(&m, 3000, SERVED_GAP_MS / crowd->load);
    c.n_routers = crowd->n_routers;
    c.rpc_ms = 0.5;
    c.noise = 0.1;
    c.retry_share = crowd->returns;
    /* Share of the refused requests that are probed; each costs a few hundred trials. */
    c.probe_share = crowd->load < 4 ? 0.05 : 0.02;
    for (c.seed = 1; c.seed <= (crowd->returns < 1 ? 3 : 1); c.seed++) {
        simulate_run(&m.trace, &c, &r);
        add_run(&c, &r, &s);
        simulate_result_fini(&r);
    }
    double admitted = (double)s.admitted / (double)s.back, wait = s.told_ms / s.admissible_ms;
    printf("# %u routers, load %.1f, %.0f %% come back: %lu refused, %lu back, %.3f admitted; told %.0f ms, admissible "
           "after %.0f "
           "(%lu tried), ratio %.2f; in time %.3f, refused late %.3f\n",
           c.n_routers, crowd->load, crowd->returns * 100, (unsigned long)s.refused, (unsigned long)s.back, admitted,
           s.told_ms / (double)s.tried, s.admissible_ms / (double)s.tried, (unsigned long)s.tried, wait,
           (double)s.in_time / (double)s.taken, (double)s.late / (double)s.refused);
    ck_assert_msg(admitted >= crowd->least, "%f admitted", admitted);
    ck_assert_msg(wait <= crowd->most_wait, "told %f times what it takes", wait);
    /* Measured at four times the load: 0.948. */
    double in_time = crowd->n_routers > 1 && crowd->returns == 1 ? 0.94 : 0.95;
    ck_assert_msg((double)s.in_time >= in_time * (double)s.taken, "%lu of %lu", (unsigned long)s.in_time,
                  (unsigned long)s.taken);
    ck_assert_msg((double)s.late <= (crowd->n_routers == 1 && crowd->returns < 1 ? 0.01 : 0.1) * (double)s.refused + 1,
                  "%lu of %lu refused late", (unsigned long)s.late, (unsigned long)s.refused);
    maker_fini(&m);
}
END_TEST

int main(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0); /* so that output appears before a check fails */
    Suite *s = suite_create("simulate_returns");
    TCase *t = tcase_create("simulate_returns");
    tcase_set_timeout(t, 300);
    tcase_add_loop_test(t, test_simulate_admits_those_that_come_back_when_they_were_told, 0,
                        tap_is_long("routers") ? N_CROWDS : 4);
    suite_add_tcase(s, t);
    return tap_main(s);
}
