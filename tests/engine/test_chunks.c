/* Chunks of prompts beside decoding sequences, in virtual time: simulated steps sleep, and sleeping advances
 * the clock. */
#include <math.h>
#include <time.h>

#include "engine/engine.h"
#include "tests/tap.h"

enum { N_SEQS = 5, TOKENS = 100, PROMPT = 8000, LONG = N_SEQS - 1 };

struct run {
    struct seq *seq;
    uint64_t first_ns, last_ns; /* times of its first and its last token */
    uint32_t n_tokens;
    bool ended;
};

static struct clock now;
static struct engine *engine;
static struct run runs[N_SEQS];

int nanosleep(const struct timespec *wanted, struct timespec *left)
{
    (void)left;
    clock_advance(&now, (uint64_t)wanted->tv_sec * NS_PER_S + (uint64_t)wanted->tv_nsec);
    return 0;
}

static void on_token(void *user, struct seq *seq, const struct sampled *token)
{
    (void)user, (void)token;
    struct run *r = engine_seq_user(seq);
    r->last_ns = clock_now(&now);
    r->first_ns = r->n_tokens++ ? r->first_ns : r->last_ns;
}

static void on_end(void *user, struct seq *seq, enum seq_finish finish)
{
    (void)user, (void)finish;
    ((struct run *)engine_seq_user(seq))->ended = true;
}

/* A decode step takes 10 ms, and 1 ms for each sequence; a chunk takes 2 ms, and 0.1 ms for each token. */
static void setup(void)
{
    static const struct sim_cost COST = {{{2e6, 1e5, 0}, {1e7, 0, 1e6}}, 0};
    const struct model_dummy dummy = {.vocab_size = 997,
                                      .hidden = 64,
                                      .n_layers = 2,
                                      .n_heads = 1,
                                      .n_kv_heads = 1,
                                      .head_dim = 64,
                                      .intermediate = 64,
                                      .max_positions = 16384,
                                      .seed = 1};
    struct model_config shape;
    struct td_error e = {{0}};
    model_dummy_config(&dummy, &shape);
    clock_init_virtual(&now, NS_PER_S);
    const struct engine_config config = {.sim = &COST,
                                         .shape = &shape,
                                         .kv_dtype = NUM_BF16,
                                         .page_tokens = 16,
                                         .n_pages = 1000,
                                         .max_batch = 8,
                                         .max_rows = 2048,
                                         .chunk_tokens = 2048,
                                         .clock = &now,
                                         .callbacks = {.on_token = on_token, .on_end = on_end}};
    ck_assert_msg(!engine_open(&config, &engine, &e), "%s", e.text);
}

static void teardown(void)
{
    engine_close(engine);
}

static void start(struct run *r, uint32_t n_prompt, uint32_t n_output, double tpot_ms)
{
    static uint32_t ids[PROMPT], n_started; /* prompts differ from their first token on */
    struct td_error e = {{0}};
    const struct seq_params p = {.ids = ids,
                                 .n_ids = n_prompt,
                                 .n_prompt = n_prompt,
                                 .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = n_output},
                                 .goal = SEQ_GENERATE,
                                 .tpot_ms = tpot_ms,
                                 .user = r};
    n_started++;
    for (uint32_t i = 0; i < n_prompt; i++)
        ids[i] = (i + n_started * 31) % 997;
    *r = (struct run){0};
    ck_assert_msg(!engine_seq_open(engine, &p, &r->seq, &e), "%s", e.text);
}

/* Runs four sequences, and a long prompt that arrives when they have some tokens. Returns the worst TPOT of
 * the four; *prompt_ms_out: the time that the prompt took. */
static double worst_tpot_ms(uint32_t tokens_before, double tpot_ms, double *prompt_ms_out)
{
    double worst = 0;
    uint64_t began = 0;
    for (int i = 0; i < LONG; i++)
        start(&runs[i], 16, TOKENS, tpot_ms);
    for (bool runs_on = true; runs_on;) {
        if (!began && runs[0].n_tokens >= tokens_before) {
            start(&runs[LONG], PROMPT, 2, 0);
            began = clock_now(&now);
        }
        ck_assert_uint_gt(engine_step(engine), 0);
        runs_on = !began;
        for (int i = 0; i < N_SEQS; i++)
            runs_on |= !runs[i].ended;
    }
    for (int i = 0; i < N_SEQS; i++) {
        struct run *r = &runs[i];
        if (i < LONG)
            worst = fmax(worst, (double)(r->last_ns - r->first_ns) * 1e-6 / (r->n_tokens - 1));
        engine_seq_close(engine, r->seq);
    }
    *prompt_ms_out = (double)(runs[LONG].first_ns - began) * 1e-6;
    return worst;
}

START_TEST(test_chunks_keep_the_tpot_of_those_that_decode_beside_them)
{
    double prompt_ms;
    for (uint32_t before = 1; before < TOKENS; before += 24) {
        double worst = worst_tpot_ms(before, 20, &prompt_ms);
        ck_assert_msg(worst <= 20, "TPOT %f ms with a prompt after %u tokens", worst, before);
        ck_assert_msg(worst > 15, "TPOT %f ms: prompts don't get what is left", worst);
    }
}
END_TEST

/* 8000 tokens alone take 808 ms in four chunks. The four sequences add 4 ms to each chunk, and wait for all
 * of it. */
START_TEST(test_chunks_are_whole_beside_sequences_without_a_limit)
{
    double limited_ms, prompt_ms, worst = worst_tpot_ms(1, 0, &prompt_ms);
    ck_assert_double_gt(worst, 21);
    ck_assert_double_eq_tol(prompt_ms, 808 + 4 * 4, 1);
    worst_tpot_ms(1, 20, &limited_ms);
    ck_assert_double_gt(limited_ms, prompt_ms);
}
END_TEST

/* The four sequences alone take 14 ms a step. Under a limit of 14 ms the prompt still gets some time, and
 * ends. */
START_TEST(test_chunks_get_on_beside_sequences_that_use_up_their_limit)
{
    double prompt_ms, worst = worst_tpot_ms(1, 14, &prompt_ms);
    ck_assert_double_gt(worst, 14);
    ck_assert_double_lt(worst, 14 + 1.7); /* a step computes at least 16 prompt tokens */
    ck_assert_double_lt(prompt_ms, 2500);
}
END_TEST

/* Time that fast steps saved allows larger chunks, but no step takes longer than four limits. */
START_TEST(test_chunks_may_use_time_that_was_saved_up_to_a_burst)
{
    double longest = 0;
    for (int i = 0; i < LONG; i++)
        start(&runs[i], 16, TOKENS, 40);
    while (runs[0].n_tokens < 60)
        engine_step(engine);
    start(&runs[LONG], PROMPT, 1, 0);
    while (!runs[LONG].ended) {
        uint64_t before = clock_now(&now);
        engine_step(engine);
        bool beside = !runs[0].ended;
        longest = beside ? fmax(longest, (double)(clock_now(&now) - before) * 1e-6) : longest;
    }
    for (int i = 0; i < N_SEQS; i++)
        engine_seq_close(engine, runs[i].seq);
    ck_assert_double_gt(longest, 2 * 40);
    ck_assert_double_le(longest, 4 * 40);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("chunks");
    TCase *t = tcase_create("chunks");
    tcase_add_checked_fixture(t, setup, teardown);
    tcase_set_timeout(t, 60);
    tcase_add_test(t, test_chunks_keep_the_tpot_of_those_that_decode_beside_them);
    tcase_add_test(t, test_chunks_are_whole_beside_sequences_without_a_limit);
    tcase_add_test(t, test_chunks_get_on_beside_sequences_that_use_up_their_limit);
    tcase_add_test(t, test_chunks_may_use_time_that_was_saved_up_to_a_burst);
    suite_add_tcase(s, t);
    return tap_main(s);
}
