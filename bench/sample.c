/*
 * The sampler with several settings, on made-up logits as peaked as a model's. The limit is one read pass
 * over the vocabulary (finding the largest logit), measured beside each row. The copy of the logits with
 * which each draw begins is not counted.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "base/random.h"
#include "bench/bench.h"
#include "engine/sampler.h"
#include "kernels/kernels.h"

enum { VOCAB = 128 << 10, DRAWS = 50, PROMPT = 1000 };

static const struct {
    const char *name;
    struct sampling p;
} ROWS[] = {
    {"greedy", {.temperature = 0, .top_p = 1}},
    {"temperature", {.temperature = 1, .top_p = 1}},
    {"top-k 50", {.temperature = 1, .top_p = 1, .top_k = 50}},
    {"top-p 0.9", {.temperature = 1, .top_p = 0.9f}},
    {"top-k 50, top-p 0.9", {.temperature = 1, .top_p = 0.9f, .top_k = 50}},
    {"min-p 0.05", {.temperature = 1, .top_p = 1, .min_p = 0.05f}},
    {"typical-p 0.9", {.temperature = 1, .top_p = 1, .typical_p = 0.9f}},
    {"top-p 0.9, penalties", {.temperature = 1, .top_p = 0.9f, .presence_penalty = 0.5f}},
    {"greedy, 20 top log-probabilities", {.temperature = 0, .top_p = 1, .top_logprobs = 20}},
    {"top-p 0.99, flat logits", {.temperature = 20, .top_p = 0.99f}},
};

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Normally distributed logits with a few large ones: the nucleus of 0.9 has some tens of tokens. */
static void make_logits(float *logits)
{
    for (uint32_t i = 0; i < VOCAB; i++) {
        double u = random_unit(random_at(1, 1, i)), v = random_unit(random_at(1, 2, i));
        logits[i] = (float)(2 * sqrt(-2 * log(1 - u)) * cos(6.283185307179586 * v));
    }
    for (uint32_t i = 0; i < 64; i++)
        logits[random_at(1, 3, i) % VOCAB] = 10 + 8 * (float)random_unit(random_at(1, 4, i));
}

enum td_status bench_sample(const struct bench_options *o, struct bench_rows *out, struct td_error *e)
{
    (void)o;
    struct kernels *k = NULL;
    enum td_status status = kernels_open(&(struct kernels_config){.n_threads = 1}, &k, e);
    if (status)
        return status;
    struct sampler *s = sampler_open(VOCAB);
    float *logits = mem_array(VOCAB, sizeof(*logits)), *work = mem_array(VOCAB, sizeof(*work));
    uint32_t *tokens = mem_array(PROMPT, sizeof(*tokens)), sum = 0;
    make_logits(logits);
    for (uint32_t i = 0; i < PROMPT; i++)
        tokens[i] = (uint32_t)(random_at(1, 5, i) % VOCAB);
    for (size_t row = 0; row < sizeof(ROWS) / sizeof(ROWS[0]); row++) {
        struct sampling p = ROWS[row].p;
        double spent = 0, limit = 0;
        p.repetition_penalty = 1;
        p.max_tokens = 10;
        for (uint32_t i = 0; i < DRAWS; i++) {
            struct sampled token;
            memcpy(work, logits, VOCAB * sizeof(*work));
            double a = seconds();
            sum += k_argmax(work, VOCAB);
            double b = seconds();
            p.seed = i;
            const struct k_draw draw = sampling_draw(&p, PROMPT, PROMPT / 2);
            struct k_sampled drawn;
            k_sample_rows(k, work, VOCAB, 1, &draw, &drawn);
            sampler_finish(s, &p, tokens, PROMPT, PROMPT / 2, &drawn, NULL, work, &token);
            spent += seconds() - b;
            limit += b - a;
        }
        bench_add(out, "draws/s", DRAWS / spent, DRAWS / limit, "%d tokens, %s", VOCAB, ROWS[row].name);
    }
    out->rows[0].hash = sum;
    free(tokens);
    free(logits);
    free(work);
    sampler_close(s);
    kernels_close(k);
    return TD_OK;
}
