/* The sampler: its distribution against exact probabilities (chi-square), its sets of candidates against a
 * simple implementation that sorts, and the settings that change logits before the draw. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "engine/sampler.h"
#include "tests/tap.h"

enum { VOCAB = 500, DRAWS = 20000 };

static void make_logits(float *logits, uint32_t n, uint64_t seed, double spread)
{
    for (uint32_t i = 0; i < n; i++) {
        double u = random_unit(random_at(seed, 1, i)), v = random_unit(random_at(seed, 2, i));
        logits[i] = (float)(spread * sqrt(-2 * log(1 - u)) * cos(6.283185307179586 * v));
    }
}

struct entry {
    double key, p;
    uint32_t id;
};

static int by_key(const void *a, const void *b)
{
    const struct entry *x = a, *y = b;
    return x->key != y->key ? (x->key > y->key ? -1 : 1) : x->id < y->id ? -1 : 1;
}

static uint32_t cut_share(struct entry *e, uint32_t n, double share)
{
    double total = 0, sum = 0;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < n; i++)
        total += e[i].p;
    while (kept < n && sum < share * total)
        sum += e[kept++].p;
    return kept ? kept : 1;
}

/* Exact probabilities by the definitions, by sorting. */
static void exact(const struct sampling *s, const float *logits, uint32_t vocab, double *p_out)
{
    struct entry *e = mem_array(vocab, sizeof(*e));
    uint32_t n = vocab;
    double top = -INFINITY, total = 0, entropy = 0;
    for (uint32_t i = 0; i < vocab; i++)
        top = fmax(top, (double)logits[i]);
    for (uint32_t i = 0; i < vocab; i++) {
        double p = exp(((double)logits[i] - top) / (double)s->temperature);
        e[i] = (struct entry){p, p, i};
    }
    qsort(e, n, sizeof(*e), by_key);
    if (s->top_k && s->top_k < n)
        n = s->top_k;
    if (s->top_p < 1)
        n = cut_share(e, n, (double)s->top_p);
    for (uint32_t i = 0; i < n; i++)
        if (e[i].p < (double)s->min_p)
            n = i;
    for (uint32_t i = 0; i < n; i++)
        total += e[i].p;
    if (s->typical_p > 0) {
        for (uint32_t i = 0; i < n; i++)
            entropy -= e[i].p / total * log(e[i].p / total);
        for (uint32_t i = 0; i < n; i++)
            e[i].key = -fabs(-log(e[i].p / total) - entropy);
        qsort(e, n, sizeof(*e), by_key);
        n = cut_share(e, n, (double)s->typical_p);
    }
    total = 0;
    memset(p_out, 0, vocab * sizeof(*p_out));
    for (uint32_t i = 0; i < n; i++)
        total += e[i].p;
    for (uint32_t i = 0; i < n; i++)
        p_out[e[i].id] = e[i].p / total;
    free(e);
}

static const struct sampling SETTINGS[] = {
    {.temperature = 1, .top_p = 1},
    {.temperature = 0.7f, .top_p = 1},
    {.temperature = 2, .top_p = 1, .top_k = 40},
    {.temperature = 1, .top_p = 0.9f},
    {.temperature = 1.5f, .top_p = 0.95f, .top_k = 200},
    {.temperature = 1, .top_p = 1, .min_p = 0.05f},
    {.temperature = 1, .top_p = 1, .typical_p = 0.8f},
    {.temperature = 1.2f, .top_p = 0.98f, .top_k = 300, .min_p = 0.01f, .typical_p = 0.9f},
    {.temperature = 1, .top_p = 0.5f, .top_k = 1},
    {.temperature = 100, .top_p = 0.999f},
};
enum { N_SETTINGS = sizeof(SETTINGS) / sizeof(SETTINGS[0]) };

static void draw(struct sampler *s, const struct sampling *p, const uint32_t *tokens, uint32_t n_tokens,
                 uint32_t n_prompt, uint32_t vocab, float *logits, struct sampled *out)
{
    const struct k_draw by = sampling_draw(p, n_tokens, n_prompt);
    void *scratch = mem_array(vocab, k_draw_scratch_bytes(1));
    uint32_t id = k_draw(logits, vocab, k_argmax(logits, vocab), &by, scratch);
    const struct k_sampled drawn = {id, logits[id], k_logsumexp(logits, vocab)};
    sampler_finish(s, p, tokens, n_tokens, n_prompt, &drawn, NULL, logits, out);
    free(scratch);
}

/*
 * Chi-square: the sum of (seen - expected)^2 / expected over tokens that are expected at least five times;
 * all other tokens count as one. With d degrees of freedom, a correct sampler exceeds d + 5 sqrt(2 d) + 10
 * about once in 10^5 runs.
 */
START_TEST(test_sampler_draws_with_the_exact_probabilities)
{
    struct sampling p = SETTINGS[_i];
    struct sampler *s = sampler_open(VOCAB);
    float logits[VOCAB], work[VOCAB];
    double want[VOCAB], chi = 0, rest = 0, rest_seen = 0, degrees = 0;
    uint32_t seen[VOCAB] = {0};
    const uint32_t prompt[1] = {0};
    p.repetition_penalty = 1;
    p.max_tokens = 10;
    make_logits(logits, VOCAB, (uint64_t)_i, 2);
    exact(&p, logits, VOCAB, want);
    for (uint32_t i = 0; i < DRAWS; i++) {
        struct sampled out;
        memcpy(work, logits, sizeof(work));
        p.seed = i;
        draw(s, &p, prompt, 1, 1, VOCAB, work, &out);
        ck_assert_msg(want[out.id] > 0, "%u can't be drawn", out.id);
        seen[out.id]++;
    }
    for (uint32_t i = 0; i < VOCAB; i++) {
        double expected = want[i] * DRAWS;
        if (expected < 5) {
            rest += expected;
            rest_seen += seen[i];
            continue;
        }
        chi += (seen[i] - expected) * (seen[i] - expected) / expected;
        degrees++;
    }
    if (rest > 5) {
        chi += (rest_seen - rest) * (rest_seen - rest) / rest;
        degrees++;
    }
    ck_assert_msg(chi < degrees + 5 * sqrt(2 * degrees) + 10, "chi-square %.1f of %.0f", chi, degrees);
    sampler_close(s);
}
END_TEST

/* With a large vocabulary, only ids of the set that sorting chooses are ever drawn: equal logits, sets of any
 * size. */
START_TEST(test_sampler_chooses_the_sets_that_sorting_does)
{
    enum { LARGE = 20000 };
    struct sampler *s = sampler_open(LARGE);
    float *logits = mem_array(LARGE, sizeof(*logits)), *work = mem_array(LARGE, sizeof(*work));
    double *want = mem_array(LARGE, sizeof(*want));
    const uint32_t prompt[1] = {0};
    for (uint32_t i = 0; i < 40; i++) {
        struct sampling p = {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .max_tokens = 9};
        uint64_t r = random_at(7, 7, i);
        if (r & 1)
            p.top_k = 1 + (uint32_t)(random_at(7, 8, i) % (r & 2 ? 50 : 5000));
        else if (r & 4)
            p.top_p = (float)(0.01 + 0.98 * random_unit(random_at(7, 9, i)));
        else
            p.typical_p = (float)(0.01 + 0.98 * random_unit(random_at(7, 10, i)));
        make_logits(logits, LARGE, i, r & 8 ? 3 : 0.3);
        for (uint32_t j = 0; r & 16 && j < LARGE; j++)
            logits[j] = roundf(logits[j] * 4) / 4; /* makes many logits equal */
        exact(&p, logits, LARGE, want);
        uint32_t wrong = 0;
        for (uint32_t j = 0; j < 150; j++) {
            struct sampled out;
            memcpy(work, logits, LARGE * sizeof(*work));
            p.seed = j;
            draw(s, &p, prompt, 1, 1, LARGE, work, &out);
            wrong += want[out.id] == 0;
        }
        /* Sums of floats and of doubles may differ, so one id at the edge may be in or out. */
        ck_assert_msg(wrong <= 1, "%u draws outside: top_k %u top_p %g typical_p %g", wrong, p.top_k, (double)p.top_p,
                      (double)p.typical_p);
    }
    free(logits);
    free(work);
    free(want);
    sampler_close(s);
}
END_TEST

START_TEST(test_sampler_tells_the_likeliest_of_the_unmodified_distribution)
{
    struct sampler *s = sampler_open(VOCAB);
    float logits[VOCAB], copy[VOCAB];
    struct logit_bias bias = {3, 100};
    const uint32_t tokens[4] = {1, 2, 3, 4};
    struct sampling p = {.temperature = 0,
                         .top_p = 1,
                         .repetition_penalty = 1.5f,
                         .presence_penalty = 1,
                         .bias = &bias,
                         .n_bias = 1,
                         .max_tokens = 9,
                         .top_logprobs = 20};
    struct sampled out;
    double sum = 0;
    make_logits(logits, VOCAB, 3, 2);
    logits[50] = logits[60] = 9; /* equal logits: the lower id comes first */
    memcpy(copy, logits, sizeof(copy));
    draw(s, &p, tokens, 4, 2, VOCAB, logits, &out);
    ck_assert_uint_eq(out.id, 3);
    ck_assert_uint_eq(out.n_top, 20);
    ck_assert_uint_eq(out.top_ids[0], 50);
    ck_assert_uint_eq(out.top_ids[1], 60);
    for (uint32_t i = 0; i < VOCAB; i++)
        sum += exp((double)copy[i]);
    for (uint32_t i = 0; i < 20; i++) {
        ck_assert_double_eq_tol((double)out.top_logprobs[i], (double)copy[out.top_ids[i]] - log(sum), 1e-4);
        ck_assert(!i || out.top_logprobs[i] <= out.top_logprobs[i - 1]);
    }
    ck_assert_double_eq_tol((double)out.logprob, (double)copy[3] - log(sum), 1e-4);
    sampler_close(s);
}
END_TEST

START_TEST(test_bad_words_are_not_finished)
{
    struct sampler *s = sampler_open(VOCAB);
    float logits[VOCAB];
    const uint32_t ids[] = {5, 3, 9, 1, 3, 7}, lengths[] = {1, 2, 3};
    struct sampling p = {.top_p = 1,
                         .repetition_penalty = 1,
                         .max_tokens = 9,
                         .bad_ids = ids,
                         .n_bad_ids = 6,
                         .bad_lengths = lengths,
                         .n_bad = 3};
    /* tokens, how many of them are the prompt, the largest logits in their order, what is drawn */
    static const struct {
        uint32_t n, n_prompt, tokens[4], best[3], drawn;
    } CASES[] = {{1, 1, {2}, {5, 9, 7}, 9},         {2, 1, {2, 3}, {9, 5, 7}, 7}, {3, 1, {2, 1, 3}, {7, 9, 5}, 0},
                 {3, 2, {2, 1, 3}, {7, 9, 5}, 7},   {2, 2, {2, 3}, {9, 5, 7}, 9}, {3, 1, {2, 3, 1}, {9, 5, 7}, 9},
                 {4, 1, {2, 1, 3, 2}, {7, 9, 5}, 7}};
    struct sampled out;
    struct td_error e = {{0}};
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        for (uint32_t k = 0; k < VOCAB; k++)
            logits[k] = -(float)k;
        for (uint32_t k = 0; k < 3; k++)
            logits[CASES[i].best[k]] = 10 - (float)k;
        draw(s, &p, CASES[i].tokens, CASES[i].n, CASES[i].n_prompt, VOCAB, logits, &out);
        ck_assert_msg(out.id == CASES[i].drawn, "case %zu: %u", i, out.id);
    }
    ck_assert_int_eq(sampling_check(&p, VOCAB, &e), TD_OK);
    p.n_bad = 2;
    ck_assert_int_eq(sampling_check(&p, VOCAB, &e), TD_ERR_INVALID);
    ck_assert(!strncmp(e.text, "sampling.bad_words: ", 20));
    p.n_bad = 3;
    ck_assert_int_eq(sampling_check(&p, 9, &e), TD_ERR_INVALID);
    sampler_close(s);
}
END_TEST

START_TEST(test_sampler_allows_only_what_is_allowed)
{
    struct sampler *s = sampler_open(VOCAB);
    float logits[VOCAB];
    const uint32_t allowed[3] = {7, 400, 12}, stop[3] = {7, 12, 400}, prompt[1] = {0};
    struct sampling p = {.temperature = 3,
                         .top_p = 1,
                         .repetition_penalty = 1,
                         .allowed = allowed,
                         .n_allowed = 3,
                         .max_tokens = 9,
                         .min_tokens = 1};
    struct sampled out;
    uint32_t seen[VOCAB] = {0};
    for (p.seed = 0; p.seed < 300; p.seed++) {
        make_logits(logits, VOCAB, 3, 1);
        draw(s, &p, prompt, 1, 1, VOCAB, logits, &out);
        seen[out.id]++;
    }
    ck_assert_uint_eq(seen[7] + seen[400] + seen[12], 300);
    ck_assert(seen[7] && seen[400] && seen[12]);
    p.stop_ids = stop; /* min_tokens forbids the stop ids */
    p.n_stop_ids = 2;
    for (p.seed = 0; p.seed < 100; p.seed++) {
        make_logits(logits, VOCAB, 3, 1);
        draw(s, &p, prompt, 1, 1, VOCAB, logits, &out);
        ck_assert_uint_eq(out.id, 400);
    }
    struct td_error e = {{0}};
    ck_assert_int_eq(sampling_check(&p, VOCAB, &e), TD_OK);
    p.n_stop_ids = 3; /* all ids are forbidden */
    ck_assert_int_eq(sampling_check(&p, VOCAB, &e), TD_ERR_INVALID);
    ck_assert(!strncmp(e.text, "sampling.allowed_ids: ", 22));
    p.min_tokens = 0;
    ck_assert_int_eq(sampling_check(&p, VOCAB, &e), TD_OK);
    sampler_close(s);
}
END_TEST

START_TEST(test_sampler_penalties_are_counted_as_they_are_defined)
{
    struct sampler *s = sampler_open(4);
    const uint32_t tokens[6] = {0, 1, 2, 2, 2, 1};
    struct sampling p = {.temperature = 0,
                         .top_p = 1,
                         .repetition_penalty = 2,
                         .presence_penalty = 0.5f,
                         .frequency_penalty = 0.25f,
                         .max_tokens = 9};
    float logits[4] = {4, 4, 4, -1};
    struct sampled out;
    /* Id 0 is in the prompt, 1 in both, 2 was generated three times. */
    draw(s, &p, tokens, 6, 2, 4, logits, &out);
    ck_assert_double_eq((double)logits[0], 2);
    ck_assert_double_eq((double)logits[1], 2 - 0.5 - 0.25);
    ck_assert_double_eq((double)logits[2], 2 - 0.5 - 0.75);
    ck_assert_double_eq((double)logits[3], -1);
    ck_assert_uint_eq(out.id, 0);
    sampler_close(s);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("sampler");
    TCase *t = tcase_create("sampler");
    tcase_set_timeout(t, 120);
    tcase_add_loop_test(t, test_sampler_draws_with_the_exact_probabilities, 0, N_SETTINGS);
    tcase_add_test(t, test_sampler_chooses_the_sets_that_sorting_does);
    tcase_add_test(t, test_sampler_tells_the_likeliest_of_the_unmodified_distribution);
    tcase_add_test(t, test_sampler_allows_only_what_is_allowed);
    tcase_add_test(t, test_bad_words_are_not_finished);
    tcase_add_test(t, test_sampler_penalties_are_counted_as_they_are_defined);
    suite_add_tcase(s, t);
    return tap_main(s);
}
