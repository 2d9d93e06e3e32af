/*
 * Goodput against load: rules that hold at every load, on small clusters and synthetic traces.
 * deploy/reproduce/goodput.py has the published traces and pools (tests/run.sh --long sweep).
 *
 * Load 1 is the highest rate at which 90 % of the requests meet their limits under tandem. A bed's gap_ms was
 * found by bisection and is written down here, so that every version of the code gets the same requests.
 * Counts are sums over the seeds of the noise. At one load all policies get the same requests, so counts
 * compare as rates do.
 */
#include <stdio.h>

#include "tests/replay/simulate_made.h"

enum { LOADS = 4, SEEDS = 2, N = 800 };
static const double LOAD[LOADS] = {0.5, 1, 2, 4};

enum way { TANDEM, MOONCAKE, SPLIT, AGGREGATED, BOTH, WAYS };
static const char *const NAMES[WAYS] = {"tandem", "mooncake", "all split", "all aggregated", "all do both"};

struct bed {
    const char *name;
    void (*make)(struct maker *m, uint32_t n, double gap_ms);
    uint32_t n_prefill, n_decode;
    double ttft_ms, tpot_ms, gap_ms;
    /* KV bytes of a token, as a multiple of the profile's: a few heavy sequences fill a worker. */
    double kv_weight;
    bool held_to_both; /* also compared with workers that all do both phases */
    double chunk_ms;   /* ms that a chunk takes beyond the profile, whatever its tokens; 0: none */
    uint32_t n;        /* number of requests; 0: N */
};

/* Makes long answers, so that decode workers are the bottleneck. */
static void make_answers(struct maker *m, uint32_t n, double gap_ms)
{
    double at = 0;
    for (uint32_t i = 0; i < n; i++) {
        add(m, at, (uint32_t)log_uniform(1000, 3000, i, 1), (uint32_t)log_uniform(200, 600, i, 2), 0, 0);
        at += exponential(gap_ms, i, 3);
    }
}

static const struct bed BEDS[] = {
    {"tight TPOT", make_mixed, 2, 2, 1000, 25, 26, 1, true},
    {"loose TPOT", make_mixed, 2, 2, 1000, 100, 23.5, 1, true},
    {"long answers", make_answers, 2, 1, 1000, 30, 68.5, 8, false},
    /* Slow chunks: a step with a chunk takes nearly the whole limit. Long queue: longer than a pass
     * looks at. */
    {"slow chunks", make_mixed, 2, 2, 2000, 40, 46, 1, false, 30, 400},
    {"long queue", make_mixed, 2, 2, 15000, 40, 12, 1, false, 0, 400},
};
enum { N_BEDS = sizeof(BEDS) / sizeof(BEDS[0]) };

struct point {
    uint32_t met, admitted, n;
};

static struct simulate_config config_for(const struct bed *bed, enum way way, bool known)
{
    struct simulate_config c = config_of(bed->n_prefill, bed->n_decode);
    if (way == BOTH) {
        c.n_decode += c.n_prefill;
        c.n_prefill = 0;
    }
    c.policy = way == MOONCAKE ? POLICY_MOONCAKE : POLICY_TANDEM;
    c.force = way == SPLIT ? FORCE_SPLIT : way == AGGREGATED ? FORCE_AGGREGATED : FORCE_NONE;
    c.max_tokens = known ? 0 : 2048;
    c.n_pages = 20000;
    c.ttft_ms = bed->ttft_ms;
    c.tpot_ms = bed->tpot_ms;
    c.noise = 0.05;
    c.cost.decode[1] *= bed->kv_weight;
    c.cost.prefill[0] += bed->chunk_ms;
    return c;
}

static struct point measure(const struct trace *trace, const struct bed *bed, enum way way, bool known, double load)
{
    struct simulate_config c = config_for(bed, way, known);
    struct point p = {0};
    c.rate = load;
    for (c.seed = 1; c.seed <= SEEDS; c.seed++) {
        struct simulate_result r;
        simulate_run(trace, &c, &r);
        for (uint64_t i = 0; i < r.n_requests; i++) {
            const struct simulated *q = &r.requests[i];
            p.admitted += !q->refused;
            p.met += !q->refused && q->ttft_ms <= c.ttft_ms && q->tpot_ms <= c.tpot_ms;
        }
        p.n += (uint32_t)r.n_requests;
        simulate_result_fini(&r);
    }
    return p;
}

static enum way best_other(const struct point of[WAYS])
{
    enum way best = MOONCAKE;
    for (enum way w = SPLIT; w <= AGGREGATED; w++)
        best = of[w].met > of[best].met ? w : best;
    return best;
}

/* Prints a broken rule. Returns the number of broken rules so far. */
static int broken(int n, bool is_broken, const char *rule, double load)
{
    if (is_broken)
        printf("# BROKEN at load %g: %s\n", load, rule);
    return n + is_broken;
}

/* Checks the rules at one load. most: the highest goodput at a lower load. */
static int check(const struct bed *bed, const struct point of[WAYS], double load, double least_admitted, double most)
{
    const struct point *t = &of[TANDEM];
    enum way best = best_other(of);
    int n = 0;
    printf("# load %g: met of %u:", load, t->n);
    for (enum way w = 0; w < WAYS; w++)
        printf(" %s %u%s", NAMES[w], of[w].met, w + 1 < WAYS ? "," : "");
    printf("; %.1f %% of the admitted\n", 100.0 * t->met / t->admitted);
    n = broken(n, t->met < 0.99 * of[best].met, NAMES[best], load);
    n = broken(n, bed->held_to_both && t->met < 0.98 * of[BOTH].met, NAMES[BOTH], load);
    n = broken(n, t->met * load < 0.95 * most, "goodput falls", load);
    n = broken(n, t->met < least_admitted * t->admitted, "too many of the admitted miss their limits", load);
    return n;
}

START_TEST(test_simulate_goodput_is_the_best_at_every_load)
{
    const struct bed *bed = &BEDS[_i / 2];
    bool known = _i % 2, is_ahead = false;
    struct maker m = {0};
    double most = 0;
    int n_broken = 0;
    bed->make(&m, bed->n ? bed->n : N, bed->gap_ms);
    printf("# %s, %u + %u, lengths %s\n", bed->name, bed->n_prefill, bed->n_decode, known ? "known" : "not known");
    for (int l = 0; l < LOADS; l++) {
        struct point of[WAYS];
        for (enum way w = 0; w < WAYS; w++)
            of[w] = measure(&m.trace, bed, w, known, LOAD[l]);
        n_broken += check(bed, of, LOAD[l], known ? 0.97 : 0.95, most);
        most = fmax(most, of[TANDEM].met * LOAD[l]);
        is_ahead |= of[TANDEM].met > of[best_other(of)].met;
    }
    n_broken = broken(n_broken, !is_ahead, "tandem is ahead at no load up to here", LOAD[LOADS - 1]);
    fflush(stdout);
    ck_assert_int_eq(n_broken, 0);
    maker_fini(&m);
}
END_TEST

/* ------------------------------------------------- the best split of the machines */

/*
 * Decoding is the bottleneck, and two thirds or half of the machines are prefill workers: too many, if every
 * request were split. Under tandem, workers of both roles do both phases, so its goodput is at least that of
 * the best split of the same machines, within 1 % as above. This is the answers bed of goodput.py at a
 * smaller scale. One prompt in a hundred is so long that a worker needs half of the TTFT limit for it: such
 * prompts are refused first when sequences decode on every worker.
 */
enum { N_ANSWERS = 1000, SPLIT_LOADS = 2 };
static const double PER_MACHINE[SPLIT_LOADS] = {5, 10}; /* requests per second and machine */
static const struct {
    uint32_t n_prefill, n_decode;
} POOLS[] = {{4, 2}, {2, 2}};
enum { N_POOLS = sizeof(POOLS) / sizeof(POOLS[0]) };

static void make_answers_and_long_prompts(struct maker *m, uint32_t n, double gap_ms)
{
    double at = 0;
    for (uint32_t i = 0; i < n; i++) {
        bool is_long = uniform(i, 4) < 0.01;
        double prompt = is_long ? log_uniform(20000, 35000, i, 1) : log_uniform(1000, 4000, i, 1);
        add(m, at, (uint32_t)prompt, (uint32_t)log_uniform(150, 1500, i, 2), 0, 0);
        at += exponential(gap_ms, i, 3);
    }
}

static struct bed answers_bed(uint32_t n_prefill, uint32_t n_decode)
{
    return (struct bed){.n_prefill = n_prefill, .n_decode = n_decode, .ttft_ms = 2000, .tpot_ms = 12, .kv_weight = 1};
}

static struct point best_split(const struct trace *trace, uint32_t n, bool known, double rate, uint32_t *n_prefill_out)
{
    struct point best = {0};
    *n_prefill_out = 0;
    for (uint32_t i = 1; i < n; i++) {
        struct bed bed = answers_bed(i, n - i);
        struct point p = measure(trace, &bed, SPLIT, known, rate);
        if (p.met <= best.met)
            continue;
        best = p;
        *n_prefill_out = i;
    }
    return best;
}

START_TEST(test_simulate_long_answers_do_not_miss_the_best_split_of_the_machines)
{
    struct bed bed = answers_bed(POOLS[_i / 2].n_prefill, POOLS[_i / 2].n_decode);
    uint32_t n = bed.n_prefill + bed.n_decode, n_prefill;
    bool known = _i % 2;
    int n_broken = 0;
    struct maker m = {0};
    make_answers_and_long_prompts(&m, N_ANSWERS, 1000);
    printf("# long answers, %u + %u, lengths %s\n", bed.n_prefill, bed.n_decode, known ? "known" : "not known");
    for (int l = 0; l < SPLIT_LOADS; l++) {
        double rate = PER_MACHINE[l] * n;
        struct point best = best_split(&m.trace, n, known, rate, &n_prefill);
        struct point tandem = measure(&m.trace, &bed, TANDEM, known, rate);
        printf("# %g/s: met of %u: tandem %u, all split on %u + %u %u\n", rate, tandem.n, tandem.met, n_prefill,
               n - n_prefill, best.met);
        n_broken = broken(n_broken, tandem.met < 0.99 * best.met, "the best split", rate);
    }
    fflush(stdout);
    ck_assert_int_eq(n_broken, 0);
    maker_fini(&m);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("simulate_goodput");
    TCase *t = tcase_create("simulate_goodput");
    tcase_set_timeout(t, 120);
    tcase_add_loop_test(t, test_simulate_goodput_is_the_best_at_every_load, 0, 2 * N_BEDS);
    tcase_add_loop_test(t, test_simulate_long_answers_do_not_miss_the_best_split_of_the_machines, 0, 2 * N_POOLS);
    suite_add_tcase(s, t);
    return tap_main(s);
}
