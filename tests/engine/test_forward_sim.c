/* The simulated forward pass: its tokens depend on the KV as those of a real one do, and its steps take the
 * configured time. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "engine/forward_sim.h"
#include "sched/sequence.h"
#include "tests/tap.h"

enum { VOCAB = 997, PAGE = 16, N_PAGES = 8, N_TOKENS = 100, LAYERS = 4 };

static const struct kv_layout LAYOUT = {NUM_BF16, LAYERS, 2, 32, PAGE};
static struct clock clock_real;
static struct forward_sim *sim;
static uint8_t *pages[N_PAGES];
static uint32_t ids[N_TOKENS], positions[N_TOKENS];

static void setup_with(const struct sim_cost *cost)
{
    clock_init_real(&clock_real);
    ck_assert_int_eq(forward_sim_open(&LAYOUT, VOCAB, cost, &clock_real, &sim, NULL), TD_OK);
    for (int i = 0; i < N_PAGES; i++)
        pages[i] = mem_array(1, kv_layout_page_bytes(&LAYOUT));
    for (uint32_t i = 0; i < N_TOKENS; i++) {
        ids[i] = i * 7 % VOCAB;
        positions[i] = i;
    }
}

static void setup(void)
{
    setup_with(&(struct sim_cost){{{0}, {0}}, 0});
}

static void teardown(void)
{
    for (int i = 0; i < N_PAGES; i++)
        free(pages[i]);
    forward_sim_close(sim);
}

/* Computes tokens [first, first + n). Returns the token drawn after the last one. */
static uint32_t compute(uint32_t first, uint32_t n)
{
    static float logits[VOCAB];
    uint32_t last = n - 1, drawn = 0;
    const struct k_attn_seq seq = {.first_row = 0, .n_rows = n, .first_pos = first, .pages = pages};
    const struct k_draw greedy = {0};
    const struct forward_batch b = {.ids = ids + first,
                                    .positions = positions + first,
                                    .n_rows = n,
                                    .seqs = &seq,
                                    .n_seqs = 1,
                                    .logit_rows = &last,
                                    .draws = &greedy,
                                    .n_logit_rows = 1,
                                    .layers_per_call = LAYERS};
    struct k_sampled sampled;
    struct cost_step step = {0};
    sequence_add_to_step(&step, n, first + n, n > 1 ? first + n : first, first);
    forward_sim_run(sim, &b, &step, logits, &sampled);
    ck_assert(sampled.logit == logits[sampled.id]);
    for (uint32_t t = 0; t < VOCAB; t++)
        drawn = logits[t] > logits[drawn] ? t : drawn;
    return drawn;
}

START_TEST(test_sim_chunks_change_nothing)
{
    uint32_t whole = compute(0, N_TOKENS);
    for (uint32_t chunk = 1; chunk < N_TOKENS; chunk += 13) {
        uint32_t drawn = 0;
        for (uint32_t at = 0; at < N_TOKENS; at += chunk)
            drawn = compute(at, at + chunk < N_TOKENS ? chunk : N_TOKENS - at);
        ck_assert_uint_eq(drawn, whole);
    }
}
END_TEST

START_TEST(test_sim_another_token_anywhere_changes_what_is_drawn)
{
    uint32_t whole = compute(0, N_TOKENS);
    for (uint32_t i = 0; i < N_TOKENS; i += 9) {
        ids[i]++;
        ck_assert_uint_ne(compute(0, N_TOKENS), whole);
        ids[i]--;
    }
}
END_TEST

START_TEST(test_sim_last_page_of_another_prompt_changes_what_is_drawn)
{
    compute(0, N_TOKENS - 1);
    uint32_t right = compute(N_TOKENS - 1, 1);
    for (uint32_t layer = 0; layer < LAYERS; layer++) { /* make a page stale in one layer only */
        uint8_t *at = pages[(N_TOKENS - 2) / PAGE] + layer * kv_layout_layer_bytes(&LAYOUT);
        size_t n = kv_layout_layer_bytes(&LAYOUT);
        uint8_t *kept = mem_array(n, 1);
        memcpy(kept, at, n);
        memset(at, 0x5a, n);
        ck_assert_uint_ne(compute(N_TOKENS - 1, 1), right);
        memcpy(at, kept, n);
        free(kept);
        ck_assert_uint_eq(compute(N_TOKENS - 1, 1), right);
    }
}
END_TEST

START_TEST(test_sim_step_takes_the_time_of_the_cost_model)
{
    teardown();
    setup_with(&(struct sim_cost){{{2e6, 1e5, 1e3}, {5e6, 1e4, 1e6}}, 0});
    uint64_t before = clock_now(&clock_real);
    compute(0, 50); /* 2 + 5 + 2.5 ms */
    uint64_t prefill = clock_now(&clock_real) - before;
    ck_assert_uint_ge(prefill, 9500000);
    before = clock_now(&clock_real);
    compute(50, 1); /* 5 + 0.5 + 1 ms */
    uint64_t decode = clock_now(&clock_real) - before;
    ck_assert_uint_ge(decode, 6500000);
    ck_assert_msg(prefill < 1000000000 && decode < 1000000000, "%llu %llu", (unsigned long long)prefill,
                  (unsigned long long)decode);
}
END_TEST

START_TEST(test_sim_cost_is_three_numbers)
{
    double c[3];
    struct td_error e;
    ck_assert_int_eq(sim_cost_parse("sim-decode", "1,2.5,0", c, &e), TD_OK);
    ck_assert(c[0] == 1000 && c[1] == 2500 && c[2] == 0);
    static const char *const BAD[] = {"", "1,2", "1,2,3,4", "1,2,x", "1,-2,3", "1,2,3 "};
    for (int i = 0; i < 6; i++) {
        ck_assert_int_eq(sim_cost_parse("sim-decode", BAD[i], c, &e), TD_ERR_INVALID);
        ck_assert_ptr_nonnull(strstr(e.text, "sim-decode"));
    }
}
END_TEST

int main(void)
{
    Suite *s = suite_create("forward_sim");
    TCase *t = tcase_create("sim");
    tcase_add_checked_fixture(t, setup, teardown);
    tcase_set_timeout(t, 30);
    tcase_add_test(t, test_sim_chunks_change_nothing);
    tcase_add_test(t, test_sim_another_token_anywhere_changes_what_is_drawn);
    tcase_add_test(t, test_sim_last_page_of_another_prompt_changes_what_is_drawn);
    tcase_add_test(t, test_sim_step_takes_the_time_of_the_cost_model);
    tcase_add_test(t, test_sim_cost_is_three_numbers);
    suite_add_tcase(s, t);
    return tap_main(s);
}
