#include "replay/compare.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"

enum { RESAMPLINGS = 1000, STRETCHES = 10, TIMES = 3 };

/* Ten stretches estimate a spread no better than ten numbers would. So intervals are widened by Student's t
 * with nine degrees of freedom over the normal quantile, and by sqrt(10 / 9) for the lost degree. */
static const double WIDER = 2.262 / 1.960 * 1.054;

/* All requests of one side. A resampling only sets weights (how often a request counts), so the values are
 * sorted once and not in each resampling. */
struct compare_side {
    const struct report_run *const *runs;
    uint32_t n_runs;
    uint64_t n, *first; /* [n_runs + 1] where each run begins in the concatenated requests */
    const struct report_request **requests;
    bool *met;
    double *values[TIMES];  /* TTFT, TPOT, latency; NAN: none */
    uint32_t *order[TIMES]; /* indexes of requests with a value, sorted by it */
    uint64_t n_order[TIMES];
    uint32_t *weights;
};

/* ------------------------------------------------------------------- sides */

struct ranked {
    double value;
    uint32_t index;
};

static int by_value(const void *a, const void *b)
{
    const struct ranked *x = a, *y = b;
    return (x->value > y->value) - (x->value < y->value);
}

static void rank(struct compare_side *s, int k)
{
    struct ranked *all = mem_array(s->n, sizeof(*all));
    for (uint64_t i = 0; i < s->n; i++)
        if (isfinite(s->values[k][i]))
            all[s->n_order[k]++] = (struct ranked){s->values[k][i], (uint32_t)i};
    qsort(all, s->n_order[k], sizeof(*all), by_value);
    for (uint64_t i = 0; i < s->n_order[k]; i++)
        s->order[k][i] = all[i].index;
    free(all);
}

static void side_init(struct compare_side *s, const struct report_run *const *runs, uint32_t n_runs)
{
    *s = (struct compare_side){.runs = runs, .n_runs = n_runs, .first = mem_array(n_runs + 1, sizeof(*s->first))};
    for (uint32_t r = 0; r < n_runs; r++)
        s->first[r + 1] = s->n += runs[r]->n_requests;
    s->requests = mem_array(s->n, sizeof(*s->requests));
    s->met = mem_array(s->n, sizeof(*s->met));
    s->weights = mem_array(s->n, sizeof(*s->weights));
    for (int k = 0; k < TIMES; k++) {
        s->values[k] = mem_array(s->n, sizeof(double));
        s->order[k] = mem_array(s->n, sizeof(uint32_t));
    }
    for (uint32_t r = 0; r < n_runs; r++)
        for (uint64_t i = 0; i < runs[r]->n_requests; i++) {
            const struct report_request *q = &runs[r]->requests[i];
            bool ok = q->outcome == REPORT_ANSWERED;
            uint64_t at = s->first[r] + i;
            s->requests[at] = q;
            s->met[at] = report_is_met(runs[r], q);
            s->values[0][at] = ok ? q->ttft_ms : NAN;
            s->values[1][at] = ok ? q->tpot_ms : NAN;
            s->values[2][at] = ok ? q->e2e_ms : NAN;
        }
    for (int k = 0; k < TIMES; k++)
        rank(s, k);
}

static void side_fini(struct compare_side *s)
{
    for (int k = 0; k < TIMES; k++) {
        free(s->values[k]);
        free(s->order[k]);
    }
    free(s->first);
    free(s->requests);
    free(s->met);
    free(s->weights);
}

/* ----------------------------------------------------------------- figures */

static double mean_of(const struct compare_side *s, int k)
{
    double sum = 0, n = 0;
    for (uint64_t i = 0; i < s->n_order[k]; i++) {
        uint32_t at = s->order[k][i];
        sum += s->weights[at] * s->values[k][at];
        n += s->weights[at];
    }
    return n > 0 ? sum / n : NAN;
}

/* Quantile of the weighted values, interpolated as in report_stats_of(). */
static double quantile_of(const struct compare_side *s, int k, double share)
{
    uint64_t n = 0, before = 0;
    for (uint64_t i = 0; i < s->n_order[k]; i++)
        n += s->weights[s->order[k][i]];
    if (!n)
        return NAN;
    double at = share * (double)(n - 1), low = NAN;
    for (uint64_t i = 0; i < s->n_order[k]; i++) {
        uint32_t index = s->order[k][i];
        before += s->weights[index];
        if (isnan(low) && (double)before > floor(at))
            low = s->values[k][index];
        if ((double)before > floor(at) + 1 || before == n)
            return low + (at - floor(at)) * (s->values[k][index] - low);
    }
    return low;
}

static double share_of(const struct compare_side *s, enum report_outcome outcome, bool met)
{
    double n = 0, all = 0;
    for (uint64_t i = 0; i < s->n; i++) {
        all += s->weights[i];
        n += (met ? s->met[i] : s->requests[i]->outcome == outcome) ? s->weights[i] : 0;
    }
    return all > 0 ? n / all : NAN;
}

/* The same share, of the tokens of all offered prompts. */
static double token_share_of(const struct compare_side *s, enum report_outcome outcome, bool met)
{
    double n = 0, all = 0;
    for (uint64_t i = 0; i < s->n; i++) {
        double tokens = (double)s->weights[i] * s->requests[i]->n_prompt;
        all += tokens;
        n += (met ? s->met[i] : s->requests[i]->outcome == outcome) ? tokens : 0;
    }
    return all > 0 ? n / all : NAN;
}

/* Share of prompt tokens found in caches: of the answered requests' tokens, or of all offered tokens. */
static double found_share(const struct compare_side *s, bool of_all)
{
    double found = 0, all = 0;
    for (uint64_t i = 0; i < s->n; i++) {
        const struct report_request *q = s->requests[i];
        bool answered = q->outcome == REPORT_ANSWERED;
        all += answered || of_all ? (double)s->weights[i] * q->n_prompt : 0;
        for (int k = 0; k < 4 && answered; k++)
            found += (double)s->weights[i] * q->cached[k];
    }
    return all > 0 ? found / all : NAN;
}

static const struct {
    const char *name;
    int better; /* 1: a higher figure is better, -1: a lower one */
    bool is_share;
} FIGURES[COMPARE_ROWS] = {
    {"TTFT mean", -1, false},      {"TTFT p50", -1, false},  {"TTFT p90", -1, false},
    {"TTFT p99", -1, false},       {"TPOT mean", -1, false}, {"TPOT p50", -1, false},
    {"TPOT p90", -1, false},       {"TPOT p99", -1, false},  {"latency mean", -1, false},
    {"latency p99", -1, false},    {"met limits", 1, true},  {"refused", -1, true},
    {"prompt found", 1, true},     {"met, tokens", 1, true}, {"refused, tokens", -1, true},
    {"found of offered", 1, true},
};

static void figures_of(const struct compare_side *s, double out[COMPARE_ROWS])
{
    for (int k = 0; k < 2; k++) {
        out[4 * k] = mean_of(s, k);
        out[4 * k + 1] = quantile_of(s, k, 0.5);
        out[4 * k + 2] = quantile_of(s, k, 0.9);
        out[4 * k + 3] = quantile_of(s, k, 0.99);
    }
    out[8] = mean_of(s, 2);
    out[9] = quantile_of(s, 2, 0.99);
    out[10] = share_of(s, REPORT_ANSWERED, true);
    out[11] = share_of(s, REPORT_REFUSED, false);
    out[12] = found_share(s, false);
    out[13] = token_share_of(s, REPORT_ANSWERED, true);
    out[14] = token_share_of(s, REPORT_REFUSED, false);
    out[15] = found_share(s, true);
}

/* -------------------------------------------------------------- resampling */

/* Draws runs and stretches. Paired sides pass the same seed, so both get the same stretches. */
static void resample(struct compare_side *s, uint64_t seed, uint64_t round)
{
    memset(s->weights, 0, s->n * sizeof(*s->weights));
    for (uint32_t k = 0; k < s->n_runs; k++) {
        uint32_t r = (uint32_t)(random_at(seed, round, k) % s->n_runs);
        uint64_t n = s->runs[r]->n_requests, length = (n + STRETCHES - 1) / STRETCHES, left = n;
        for (uint64_t i = 0; left; i++) {
            uint64_t start = random_at(seed + 1, round, (uint64_t)k << 32 | i) % n,
                     take = length < left ? length : left;
            for (uint64_t j = 0; j < take; j++)
                s->weights[s->first[r] + (start + j) % n]++;
            left -= take;
        }
    }
}

static bool are_paired(const struct compare_side *a, const struct compare_side *b)
{
    if (a->n_runs != b->n_runs || a->n != b->n || memcmp(a->first, b->first, (a->n_runs + 1) * sizeof(*a->first)))
        return false;
    for (uint64_t i = 0; i < a->n; i++)
        if (a->requests[i]->n_prompt != b->requests[i]->n_prompt || a->requests[i]->n_asked != b->requests[i]->n_asked)
            return false;
    return true;
}

static double change_of(int row, double a, double b)
{
    return FIGURES[row].is_share ? b - a : a > 0 ? b / a - 1 : NAN;
}

static int by_double(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void judge(struct compare_row *row, int better, double *changes, uint32_t n)
{
    uint32_t below = 0, above = 0;
    row->low = row->high = row->p = NAN;
    if (!n)
        return;
    for (uint32_t i = 0; i < n; i++) {
        changes[i] = row->change + WIDER * (changes[i] - row->change);
        below += changes[i] <= 0;
        above += changes[i] >= 0;
    }
    qsort(changes, n, sizeof(*changes), by_double);
    row->low = changes[(uint32_t)(0.025 * (n - 1))];
    row->high = changes[(uint32_t)ceil(0.975 * (n - 1))];
    row->p = fmin(1, fmax(2.0 * (below < above ? below : above) / n, 1e-3));
    if (row->low > 0 || row->high < 0)
        row->verdict = row->change * better > 0 ? COMPARE_BETTER : COMPARE_WORSE;
}

void compare_runs(const struct report_run *const *a, uint32_t n_a, const struct report_run *const *b, uint32_t n_b,
                  uint64_t seed, struct compare_result *out)
{
    struct compare_side x, y;
    double fx[COMPARE_ROWS], fy[COMPARE_ROWS], *changes = mem_array(COMPARE_ROWS * RESAMPLINGS, sizeof(*changes));
    uint32_t n_changes[COMPARE_ROWS] = {0};
    side_init(&x, a, n_a);
    side_init(&y, b, n_b);
    *out = (struct compare_result){.n_runs = n_a < n_b ? n_a : n_b, .paired = are_paired(&x, &y)};
    for (uint64_t i = 0; i < x.n; i++)
        x.weights[i] = 1;
    for (uint64_t i = 0; i < y.n; i++)
        y.weights[i] = 1;
    figures_of(&x, fx);
    figures_of(&y, fy);
    for (int k = 0; k < COMPARE_ROWS; k++)
        out->rows[k] = (struct compare_row){.name = FIGURES[k].name,
                                            .is_share = FIGURES[k].is_share,
                                            .a = fx[k],
                                            .b = fy[k],
                                            .change = change_of(k, fx[k], fy[k])};
    for (uint64_t round = 0; round < RESAMPLINGS; round++) {
        resample(&x, seed, round);
        resample(&y, out->paired ? seed : random_mix(seed), round);
        figures_of(&x, fx);
        figures_of(&y, fy);
        for (int k = 0; k < COMPARE_ROWS; k++) {
            double change = change_of(k, fx[k], fy[k]);
            if (isfinite(change))
                changes[k * RESAMPLINGS + n_changes[k]++] = change;
        }
    }
    for (int k = 0; k < COMPARE_ROWS; k++)
        judge(&out->rows[k], FIGURES[k].better, changes + k * RESAMPLINGS, n_changes[k]);
    side_fini(&x);
    side_fini(&y);
    free(changes);
}
