/* Tenants that want more than their shares, for five minutes (ten with TANDEM_LONG=fairness): what each one
 * gets in every minute. */
#include <stdio.h>

#include "tests/replay/simulate_made.h"

enum { TENANTS = 3, MINUTES_MAX = 10 };

static uint32_t n_minutes(void)
{
    return tap_is_long("fairness") ? MINUTES_MAX : 5;
}

struct flood {
    double weight[TENANTS];  /* 0: there is no such tenant */
    double offered[TENANTS]; /* offered load, as a multiple of its share */
    double ttft_ms, tpot_ms, retry_share, max_wait_ms;
    uint32_t max_queued;
    double from_s[TENANTS]; /* when the tenant begins */
};

/* Tokens per second of these requests that four workers serve when all requests wait, without and with
 * limits; measured. */
static const double CAPACITY[] = {97000, 172000};

struct run {
    struct maker m;
    struct simulate_ask *asks;
    struct simulate_result r;
};

static struct run run_flood(const struct flood *f)
{
    struct run x = {.m = {{0}}};
    struct simulate_config c = config_of(2, 2);
    struct fair_weight weights[TENANTS];
    double next[TENANTS], sum = 0;
    uint32_t n = 0, cap = 0;
    for (uint32_t t = 0; t < TENANTS; t++) {
        sum += f->weight[t];
        next[t] = f->weight[t] > 0 ? f->from_s[t] * 1e3 : INFINITY;
        if (f->weight[t] > 0)
            weights[c.n_weights++] = (struct fair_weight){t + 1, f->weight[t]};
    }
    for (;; n++) {
        uint32_t t = 0;
        for (uint32_t i = 1; i < TENANTS; i++)
            t = next[i] < next[t] ? i : t;
        if (next[t] > n_minutes() * 60e3)
            break;
        if (n == cap) {
            cap = cap * 2 + 1024;
            x.asks = mem_resize(x.asks, cap, sizeof(*x.asks));
        }
        uint32_t n_prompt = (uint32_t)log_uniform(1200, 16000, n, 1), n_output = (uint32_t)log_uniform(10, 100, n, 2);
        add(&x.m, next[t], n_prompt, n_output, 0, 0);
        x.asks[n] = (struct simulate_ask){.tenant = t + 1, .follows = -1};
        double mean_tokens = 5714 + 39; /* means of these distributions */
        next[t] +=
            exponential(mean_tokens * 1e3 / (CAPACITY[f->ttft_ms > 0] * f->offered[t] * f->weight[t] / sum), n, 3);
    }
    c.asks = x.asks;
    c.weights = weights;
    c.ttft_ms = f->ttft_ms;
    c.tpot_ms = f->tpot_ms;
    c.retry_share = f->retry_share;
    c.max_queued = f->max_queued;
    c.max_wait_ms = f->max_wait_ms;
    c.noise = 0.05;
    simulate_run(&x.m.trace, &c, &x.r);
    return x;
}

static void fini(struct run *x)
{
    simulate_result_fini(&x->r);
    free(x->asks);
    maker_fini(&x->m);
}

static bool is_late(const struct flood *f, const struct simulated *q)
{
    return (f->ttft_ms > 0 && q->ttft_ms > f->ttft_ms) || (f->tpot_ms > 0 && q->tpot_ms > f->tpot_ms);
}

/* Adds the work of requests by the minute of their first token. Returns the largest difference from the
 * weights, from minute `first` on. */
static double worst(const struct flood *f, const struct run *x, uint32_t first, const char *name)
{
    double work[MINUTES_MAX][TENANTS] = {{0}}, sum = 0, most = 0;
    uint32_t n_late = 0, n_done = 0, n_refused[TENANTS] = {0}, n_all[TENANTS] = {0};
    for (uint64_t i = 0; i < x->r.n_requests; i++) {
        const struct simulated *q = &x->r.requests[i];
        uint32_t minute = (uint32_t)((q->asked_ms + q->ttft_ms) / 60e3), t = (uint32_t)x->asks[i].tenant - 1;
        n_all[t]++;
        n_refused[t] += q->refused;
        if (q->refused || q->failed)
            continue;
        n_done++;
        n_late += is_late(f, q);
        if (minute < n_minutes())
            work[minute][t] += x->m.trace.requests[i].n_prompt + q->n_output;
    }
    for (uint32_t t = 0; t < TENANTS; t++)
        sum += f->weight[t];
    for (uint32_t k = first; k < n_minutes(); k++) {
        double all = work[k][0] + work[k][1] + work[k][2];
        for (uint32_t t = 0; t < TENANTS; t++)
            most = fmax(most, fabs(work[k][t] / all - f->weight[t] / sum));
        printf("# %s minute %u: %.3f %.3f %.3f of %.0f/s\n", name, k, work[k][0] / all, work[k][1] / all,
               work[k][2] / all, all / 60);
    }
    printf("# %s: worst %.3f; late %.4f of %u; refused", name, most, n_done ? (double)n_late / n_done : 0, n_done);
    for (uint32_t t = 0; t < TENANTS; t++)
        printf(" %.3f", n_all[t] ? (double)n_refused[t] / n_all[t] : 0);
    printf("\n");
    ck_assert_msg(n_late <= 0.05 * n_done, "%s: %u of %u late", name, n_late, n_done);
    return most;
}

static const struct {
    const char *name;
    struct flood f;
} FLOODS[] = {
    /* The first two are run always, all of them with TANDEM_LONG=fairness. */
    {"clients that come back",
     {.weight = {1, 3}, .offered = {5, 1.5}, .ttft_ms = 2000, .tpot_ms = 50, .retry_share = 1}},
    {"bounded queue", {.weight = {1, 3}, .offered = {5, 1.5}, .max_queued = 200}},
    {"limits", {.weight = {1, 3}, .offered = {5, 1.5}, .ttft_ms = 2000, .tpot_ms = 50}},
    {"three tenants", {.weight = {1, 2, 5}, .offered = {6, 1.4, 2}, .ttft_ms = 2000, .tpot_ms = 50}},
    {"limits, the heavy one floods", {.weight = {1, 3}, .offered = {1.3, 6}, .ttft_ms = 2000, .tpot_ms = 50}},
    {"limits of 1 s", {.weight = {1, 3}, .offered = {5, 1.5}, .ttft_ms = 1000, .tpot_ms = 50}},
    {"limits of 10 s", {.weight = {1, 3}, .offered = {5, 1.5}, .ttft_ms = 10000, .tpot_ms = 50}},
    {"bounded queue, clients that come back",
     {.weight = {1, 3}, .offered = {5, 1.5}, .max_queued = 200, .retry_share = 1}},
    {"long waits", {.weight = {1, 3}, .offered = {1.5, 1.3}, .max_queued = 100000, .max_wait_ms = 20000}},
    {"one begins later", {.weight = {1, 3}, .offered = {5, 1.5}, .ttft_ms = 2000, .tpot_ms = 50, .from_s = {0, 125}}},
};

START_TEST(test_simulate_tenants_get_their_shares_in_every_minute)
{
    const struct flood *f = &FLOODS[_i].f;
    struct run x = run_flood(f);
    double begins_s = fmax(f->from_s[0], fmax(f->from_s[1], f->from_s[2]));
    double most = worst(f, &x, (uint32_t)ceil(begins_s / 60), FLOODS[_i].name);
    ck_assert_msg(most <= 0.05, "%s: %.3f from the weights", FLOODS[_i].name, most);
    fini(&x);
}
END_TEST

int main(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0); /* so that output appears before a check fails */
    Suite *s = suite_create("simulate_fair");
    TCase *t = tcase_create("simulate_fair");
    tcase_set_timeout(t, 300);
    tcase_add_loop_test(t, test_simulate_tenants_get_their_shares_in_every_minute, 0,
                        tap_is_long("fairness") ? (int)(sizeof(FLOODS) / sizeof(FLOODS[0])) : 2);
    suite_add_tcase(s, t);
    return tap_main(s);
}
