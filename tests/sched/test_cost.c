/* What the scheduler learns: step times from noisy steps, lengths of answers from requests that ended. */
#include <math.h>
#include <string.h>

#include "base/random.h"
#include "sched/cost.h"
#include "sched/lengths.h"
#include "tests/tap.h"

static const char PROFILE[] = "3526,18.5,0.000535:5228,0.0293,8.088";

static struct cost_profile profile(double factor)
{
    struct cost_profile p;
    ck_assert_int_eq(cost_profile_parse(PROFILE, &p, NULL), TD_OK);
    for (int i = 0; i < 3; i++) {
        p.prefill[i] *= factor;
        p.decode[i] *= factor;
    }
    return p;
}

static double uniform(uint64_t i, uint64_t what)
{
    return random_unit(random_at(31, i, what));
}

static double log_normal(double sigma, uint64_t i)
{
    double normal = sqrt(-2 * log(uniform(i, 8) + 0x1p-54)) * cos(2 * M_PI * uniform(i, 9));
    return exp(sigma * normal - sigma * sigma / 2);
}

/* Makes steps like those of a busy worker: prompts of all sizes, batches that grow and shrink, sometimes
 * both. */
static struct cost_step make_step(const struct cost_profile *truth, uint64_t i, double sigma)
{
    struct cost_step s = {0};
    if (i % 3) {
        s.batch = 1 + (uint32_t)(uniform(i, 0) * 60);
        s.context = s.batch * (200 + 8000 * uniform(i, 1));
    }
    if (i % 3 != 1) {
        double n = floor(exp(log(32) + uniform(i, 2) * log(256))), cached = floor(uniform(i, 3) * 20000);
        s.n_prompts = 1;
        s.prefill_tokens = (uint32_t)n;
        s.prefill_square = n * (n + 2 * cached);
    }
    s.ms = cost_profile_step_ms(truth, &s);
    s.ms *= log_normal(sigma, i);
    return s;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median relative error on new steps without noise, for prompts and for decoding. */
static void measure(const struct cost_model *m, const struct cost_profile *truth, double *prefill_out,
                    double *decode_out)
{
    enum { N = 300 };
    double prefill[N], decode[N];
    uint32_t n_prefill = 0, n_decode = 0;
    for (uint64_t i = 100000; n_prefill < N || n_decode < N; i++) {
        struct cost_step s = make_step(truth, i, 0);
        if (i % 3 == 0 && n_prefill < N)
            prefill[n_prefill++] = fabs(
                cost_prefill_ms(m, s.prefill_tokens, (s.prefill_square / s.prefill_tokens - s.prefill_tokens) / 2, 0) /
                    s.ms -
                1);
        if (i % 3 == 1 && n_decode < N)
            decode[n_decode++] = fabs(cost_decode_ms(m, s.batch, s.context) / s.ms - 1);
    }
    qsort(prefill, N, sizeof(double), compare);
    qsort(decode, N, sizeof(double), compare);
    *prefill_out = prefill[N / 2];
    *decode_out = decode[N / 2];
}

START_TEST(test_cost_learns_from_a_profile_that_is_twice_off)
{
    const struct cost_profile truth = profile(1);
    for (int half = 0; half < 2; half++) {
        const struct cost_profile wrong = profile(half ? 0.5 : 2);
        struct cost_model m = cost_make(&wrong);
        double prefill, decode;
        measure(&m, &truth, &prefill, &decode);
        ck_assert(prefill > 0.4 && decode > 0.4);
        for (uint64_t i = 0; i < 100; i++) {
            const struct cost_step s = make_step(&truth, i, 0.1);
            m = cost_observe(m, &s);
        }
        measure(&m, &truth, &prefill, &decode);
        ck_assert_msg(prefill < 0.15 && decode < 0.15, "after 100 steps: %f %f", prefill, decode);
        for (uint64_t i = 100; i < 1500; i++) {
            const struct cost_step s = make_step(&truth, i, 0.1);
            m = cost_observe(m, &s);
        }
        measure(&m, &truth, &prefill, &decode);
        ck_assert_msg(prefill < 0.05 && decode < 0.05, "after 1500 steps: %f %f", prefill, decode);
        ck_assert(m.prefill_error.error < 0.25 && m.decode_error.error < 0.15);
    }
}
END_TEST

START_TEST(test_cost_learns_nothing_from_a_step_in_which_its_process_was_stopped)
{
    const struct cost_profile truth = profile(1);
    struct cost_model m = cost_make(&truth);
    double prefill, decode;
    for (uint64_t i = 0; i < 300; i++) {
        const struct cost_step s = make_step(&truth, i, 0.1);
        m = cost_observe(m, &s);
    }
    const struct cost_model before = m;
    for (uint64_t i = 300; i < 303; i++) { /* a step of a batch, one of a prompt, and one with both */
        struct cost_step s = make_step(&truth, i, 0);
        s.ms *= 50;
        m = cost_observe(m, &s);
    }
    measure(&m, &truth, &prefill, &decode);
    ck_assert_msg(prefill < 0.05 && decode < 0.05, "%f %f", prefill, decode);
    ck_assert(!memcmp(&m.prefill, &before.prefill, sizeof(m.prefill)));
    ck_assert(!memcmp(&m.decode, &before.decode, sizeof(m.decode)));
}
END_TEST

/*
 * A new model knows its machine only by a guess, so any speed looks possible. A step in which the process
 * stood still for three seconds must not decide how long prompts take, whichever of the first steps it is.
 */
START_TEST(test_cost_of_a_new_worker_is_not_that_of_one_step_in_which_its_process_was_stopped)
{
    static const double GUESSES[] = {1, 0.02, 50}; /* over the truth */
    enum { STEPS = 40, AFTER = 3 };
    const struct cost_profile truth = profile(1);
    for (uint32_t g = 0; g < 3; g++)
        for (uint64_t stopped = 0; stopped < STEPS; stopped++) {
            const struct cost_profile guess = profile(GUESSES[g]);
            const struct cost_model right = cost_make(&truth);
            const double ms = cost_prefill_ms(&right, 4000, 0, 512);
            struct cost_model m = cost_make(&guess);
            for (uint64_t i = 0; i <= stopped + AFTER; i++) {
                struct cost_step s = make_step(&truth, 3 * i, 0.05); /* prompts only */
                s.ms += i == stopped ? 3000 : 0;
                m = cost_observe(m, &s);
                double is = cost_prefill_ms(&m, 4000, 0, 512), most = 5 * fmax(GUESSES[g], 1) * ms;
                ck_assert_msg(i < stopped || is < most, "guess %g, stopped in step %u: %g ms after %u", GUESSES[g],
                              (unsigned)stopped, is, (unsigned)i);
                ck_assert_msg(i < stopped + AFTER || (is > 0.5 * ms && is < 2 * ms),
                              "guess %g, stopped in step %u: still %g ms", GUESSES[g], (unsigned)stopped, is);
            }
            /* A stop may look as if the slow guess were right. */
            ck_assert(GUESSES[g] > 1 || m.usual_prefill < 3 / GUESSES[g]);
        }
}
END_TEST

/* A guess of the wrong shape: chunks of one size take twice as long as predicted, those of the other half. */
START_TEST(test_cost_of_a_new_worker_is_learned_from_steps_that_are_off_in_turns)
{
    const struct cost_profile guess = {.prefill = {20, 0.05, 0}, .decode = {5, 0, 0}};
    for (int first = 0; first < 2; first++) {
        struct cost_model m = cost_make(&guess);
        for (int i = 0; i < 40; i++) {
            bool is_large = (i + first) % 2;
            m = cost_observe(m, &(struct cost_step){.n_prompts = 1,
                                                    .prefill_tokens = is_large ? 512 : 16,
                                                    .prefill_square = is_large ? 512 * 512 : 256,
                                                    .ms = is_large ? 105 : 8});
        }
        double large = cost_prefill_ms(&m, 512, 0, 0), small = cost_prefill_ms(&m, 16, 0, 0);
        ck_assert_msg(fabs(large - 105) < 5 && fabs(small - 8) < 1, "%f %f", large, small);
    }
}
END_TEST

/* The second long step shows that the first one was no accident. */
START_TEST(test_cost_of_a_new_worker_is_that_of_two_steps)
{
    const struct cost_profile guess = profile(1), truth = profile(30);
    struct cost_model m = cost_make(&guess);
    double prefill, decode;
    for (uint64_t i = 0; i < 8; i++) {
        const struct cost_step s = make_step(&truth, i, 0.05);
        if (i % 3 != 2) /* prompts, or decoding */
            m = cost_observe(m, &s);
    }
    measure(&m, &truth, &prefill, &decode);
    ck_assert_msg(prefill < 0.15 && decode < 0.15, "%f %f", prefill, decode);
}
END_TEST

/* Another program comes and takes 19 of 20 cycles, and goes. The model follows in either direction within 20
 * steps, ten of each kind. */
START_TEST(test_cost_follows_a_speed_that_changes_at_once)
{
    const struct cost_profile start = profile(1);
    struct cost_model m = cost_make(&start);
    const double factors[] = {1, 20, 1, 1.0 / 20, 1, 12, 1};
    double prefill, decode;
    uint64_t n = 0;
    for (uint32_t k = 0; k < sizeof(factors) / sizeof(factors[0]); k++) {
        const struct cost_profile truth = profile(factors[k]);
        for (uint32_t i = 0; i < (k ? 20 : 300); i++, n++) {
            const struct cost_step s = make_step(&truth, n, 0.1);
            m = cost_observe(m, &s);
        }
        measure(&m, &truth, &prefill, &decode);
        ck_assert_msg(prefill < 0.25 && decode < 0.25, "%u: %f %f", k, prefill, decode);
    }
}
END_TEST

/* Steps that take the same time whatever their size: noise must not make a busy worker look faster than an
 * idle one. */
START_TEST(test_cost_of_more_work_is_never_less)
{
    const struct cost_profile start = profile(1);
    struct cost_model m = cost_make(&start);
    for (uint64_t i = 0; i < 2000; i++) {
        /* The speed changes now and then. */
        double ms = (i / 500 % 2 ? 15 : 3) * (0.7 + 0.6 * uniform(i, 5));
        uint32_t batch = 5 + (uint32_t)(uniform(i, 6) * 4), tokens = 10 + (uint32_t)(uniform(i, 7) * 30);
        const struct cost_step decode = {.batch = batch, .context = batch * 50.0, .ms = ms};
        const struct cost_step prompt = {
            .n_prompts = 1, .prefill_tokens = tokens, .prefill_square = (double)tokens * tokens, .ms = ms};
        m = cost_observe(m, &decode);
        m = cost_observe(m, &prompt);
        ck_assert(cost_decode_ms(&m, 1, 50) <= cost_decode_ms(&m, 8, 400) + 1e-9);
        ck_assert(cost_prefill_ms(&m, 10, 0, 0) <= cost_prefill_ms(&m, 40, 0, 0) + 1e-9);
        ck_assert_msg(cost_prefill_ms(&m, 4000, 0, 0) < 100000, "%llu: %g ms", (unsigned long long)i,
                      cost_prefill_ms(&m, 4000, 0, 0));
        ck_assert(i < 20 || cost_decode_ms(&m, 6, 300) > 0.5);
    }
}
END_TEST

START_TEST(test_cost_of_a_mixed_step_lacks_the_fixed_part_of_a_decode_step)
{
    const struct cost_profile p = profile(1);
    struct cost_model m = cost_make(&p);
    struct cost_step both = {.prefill_tokens = 512, .prefill_square = 512 * 512, .batch = 4, .context = 8000};
    double prefill = cost_prefill_ms(&m, 512, 0, 0), decode = cost_decode_ms(&m, 4, 8000);
    double less = p.decode[0];
    ck_assert(fabs(cost_step_ms(&m, 512, 512 * 512, 4, 8000) - (prefill + decode - less)) < 1e-9);
    ck_assert(fabs(cost_profile_step_ms(&p, &both) - (prefill + decode - less)) < 1e-9);
    ck_assert(fabs(cost_step_ms(&m, 512, 512 * 512, 0, 0) - prefill) < 1e-9);
    ck_assert(fabs(cost_step_ms(&m, 0, 0, 4, 8000) - decode) < 1e-9);
    struct cost_step small = {/* Hidden behind the decoding. */
                              .prefill_tokens = 1,
                              .prefill_square = 1,
                              .batch = 4,
                              .context = 8000};
    const struct cost_profile free_chunks = {{0, p.prefill[1], p.prefill[2]}, {p.decode[0], p.decode[1], p.decode[2]}};
    m = cost_make(&free_chunks);
    ck_assert(fabs(cost_step_ms(&m, 1, 1, 4, 8000) - decode) < 1e-9);
    ck_assert(fabs(cost_profile_step_ms(&free_chunks, &small) - decode) < 1e-9);
}
END_TEST

/* Steps that are all alike can't tell batch and context apart. Knowledge of other steps must not get lost
 * meanwhile. */
START_TEST(test_cost_of_other_steps_stays_right_while_all_are_alike)
{
    const struct cost_profile truth = profile(1);
    struct cost_model m = cost_make(&truth);
    double prefill, decode;
    for (uint64_t i = 0; i < 20000; i++) {
        struct cost_step s = make_step(&truth, 1, 0);
        s.ms *= 1 + 0.1 * (random_unit(random_at(9, i, 0)) - 0.5);
        m = cost_observe(m, &s);
    }
    measure(&m, &truth, &prefill, &decode);
    ck_assert_msg(prefill < 0.3 && decode < 0.3, "%f %f", prefill, decode);
}
END_TEST

START_TEST(test_cost_of_an_unseen_worker_is_its_profile)
{
    const struct cost_profile p = profile(1);
    struct cost_model m = cost_make(&p);
    for (uint64_t i = 0; i < 50; i++) {
        double prefill = p.prefill[0] + p.prefill[1] * 1000 + p.prefill[2] * 1000.0 * (1000 + 2.0 * (double)i * 100);
        ck_assert(fabs(cost_prefill_ms(&m, 1000, (double)i * 100, 0) - prefill) < 1e-6);
        double decode = p.decode[0] + p.decode[1] * (double)i * 1000 + p.decode[2] * 7;
        ck_assert(fabs(cost_decode_ms(&m, 7, (double)i * 1000) - decode) < 1e-6);
    }
    ck_assert(cost_prefill_ms(&m, 0, 100, 512) == 0 && cost_decode_ms(&m, 0, 100) == 0);
    double whole = cost_prefill_ms(&m, 4096, 0, 0), cut = cost_prefill_ms(&m, 4096, 0, 1024);
    /* Only the fixed part counts more often. */
    ck_assert(fabs(cut - whole - 3 * p.prefill[0]) < 1e-6);
}
END_TEST

static void fade_all(struct cost_model *m, uint32_t n, double share)
{
    struct cost_model *models[8];
    bool idle[8];
    for (uint32_t k = 0; k < n; k++) {
        models[k] = &m[k];
        idle[k] = true;
    }
    cost_fade(models, idle, n, share);
}

static struct cost_model learned(double speed, uint64_t n_steps, uint64_t seed, double noise)
{
    struct cost_profile guess = profile(1), truth = profile(speed);
    struct cost_model m = cost_make(&guess);
    for (uint64_t i = 0; i < n_steps; i++) {
        struct cost_step s = make_step(&truth, i + seed, noise);
        m = cost_observe(m, &s);
    }
    return m;
}

/* A few unlucky steps made a machine look slow, and it gets no work that would correct this. */
START_TEST(test_cost_of_an_idle_machine_that_looks_slower_fades)
{
    struct cost_model m[4];
    for (uint32_t k = 0; k < 4; k++)
        m[k] = learned(k == 3 ? 1.15 : 1, k == 3 ? 20 : 300, 1000 * k, 0.02);
    double right = cost_prefill_ms(&m[0], 2000, 0, 0), first = cost_prefill_ms(&m[3], 2000, 0, 0);
    ck_assert_double_gt(first, 1.1 * right);
    fade_all(m, 4, 0);
    ck_assert_double_eq(cost_prefill_ms(&m[3], 2000, 0, 0), first);
    for (int i = 0; i < 100; i++)
        fade_all(m, 4, 0.1);
    ck_assert_double_lt(cost_prefill_ms(&m[3], 2000, 0, 0), 1.03 * right);
    ck_assert_double_lt(cost_decode_ms(&m[3], 8, 16000), 1.03 * cost_decode_ms(&m[0], 8, 16000));
}
END_TEST

/* Three machines: one became four times as slow just now; one always was 1.4 times as slow; one runs other
 * steps than the others. */
START_TEST(test_cost_of_other_machines_stays_as_it_is)
{
    struct cost_model m[5], before[5];
    struct cost_profile slow = profile(4), usual = profile(1);
    for (uint32_t k = 0; k < 5; k++)
        m[k] = learned(k == 3 ? 1.4 : 1, 1000, 1000 * k, 0.02);
    for (uint64_t i = 0; i < 50; i++) {
        struct cost_step s = make_step(&slow, i, 0.02), small = {.batch = 1, .context = 500};
        m[2] = cost_observe(m[2], &s);
        small.ms = cost_profile_step_ms(&usual, &small);
        m[4] = cost_observe(m[4], &small);
    }
    for (uint32_t k = 0; k < 5; k++)
        before[k] = m[k];
    for (int i = 0; i < 100; i++)
        fade_all(m, 5, 0.1);
    for (uint32_t k = 0; k < 5; k++) {
        double is = cost_prefill_ms(&m[k], 2000, 0, 0), was = cost_prefill_ms(&before[k], 2000, 0, 0);
        ck_assert_msg(fabs(is - was) < 0.03 * was, "%u: %g, was %g", k, is, was);
    }
}
END_TEST

START_TEST(test_cost_chunk_is_the_largest_that_stays_within_its_limit)
{
    const struct cost_profile p = profile(1);
    struct cost_model m = cost_make(&p);
    for (uint64_t i = 0; i < 2000; i++) {
        double limit = uniform(i, 0) * 200, batch = floor(uniform(i, 1) * 60), context = batch * 2000;
        double cached = uniform(i, 2) * 50000;
        uint32_t max = 1 + (uint32_t)(uniform(i, 3) * 8192);
        uint32_t chunk = cost_chunk_within(&m, limit, batch, context, cached, max);
        double n = chunk, more = n + 1;
        ck_assert_uint_le(chunk, max);
        ck_assert(!chunk || cost_step_ms(&m, n, n * (n + 2 * cached), batch, context) <= limit + 1e-9);
        ck_assert(chunk == max || cost_step_ms(&m, more, more * (more + 2 * cached), batch, context) > limit - 1e-9);
    }
}
END_TEST

START_TEST(test_cost_profile_says_what_is_wrong)
{
    static const char *const WRONG[] = {"",
                                        "1,2,3",
                                        "1,2,3:4,5",
                                        "1,2,3:4,5,6x",
                                        "1,2,3:4,5,-6",
                                        "nan,2,3:4,5,6",
                                        "1,2,inf:4,5,6",
                                        "1 2 3:4 5 6",
                                        "1,2,3:4,5,6:",
                                        "1,2,3:4,5,6:7,8",
                                        "1,2,3:4,5,6:-7,8,0",
                                        "1,2,3:4,5,6:7,8,2"};
    struct cost_profile p;
    for (size_t i = 0; i < sizeof(WRONG) / sizeof(WRONG[0]); i++) {
        struct td_error e = {0};
        ck_assert_int_eq(cost_profile_parse(WRONG[i], &p, &e), TD_ERR_INVALID);
        ck_assert_ptr_nonnull(strstr(e.text, "microseconds") ? e.text : strstr(e.text, "below 0"));
    }
    ck_assert_int_eq(cost_profile_parse("1000,0,0:2000,3,4e-1", &p, NULL), TD_OK);
    ck_assert(p.prefill[0] == 1 && p.decode[0] == 2 && fabs(p.decode[2] - 0.0004) < 1e-12);
    ck_assert(p.chunk_square == 0 && p.context_square == 0 && p.unshared == 0);
}
END_TEST

/* 100 prompt tokens beside contexts of 1,000 tokens: each part alone, and both. */
START_TEST(test_cost_profile_squares_and_unshared_part_count_in_a_step)
{
    struct cost_profile p;
    const struct cost_step prompt = {.n_prompts = 1, .prefill_tokens = 100, .prefill_square = 1e6};
    const struct cost_step batch = {.batch = 2, .context = 1000};
    struct cost_step both = batch;
    ck_assert_int_eq(cost_profile_parse("1000,10,0:2000,3,0:0.1,-0.001,0.5", &p, NULL), TD_OK);
    ck_assert(fabs(cost_profile_step_ms(&p, &prompt) - (1 + 1 + 1)) < 1e-9);
    ck_assert(fabs(cost_profile_step_ms(&p, &batch) - (2 + 3 - 1)) < 1e-9);
    both.n_prompts = 1;
    both.prefill_tokens = 100;
    ck_assert(fabs(cost_profile_step_ms(&p, &both) - (3 + 4 - 0.5 * 2)) < 1e-9);
    both.context = 1e6; /* beyond the top of the curve */
    ck_assert(cost_profile_step_ms(&p, &both) >= 2);
}
END_TEST

/* ----------------------------------------------------------------- lengths */

START_TEST(test_lengths_tell_two_tenants_apart)
{
    struct lengths l;
    lengths_init(&l);
    for (uint32_t i = 0; i < 400; i++) {
        lengths_observe(&l, 1, 20 + (uint32_t)(uniform(i, 0) * 20), 4000);
        lengths_observe(&l, 2, 800 + (uint32_t)(uniform(i, 1) * 400), 4000);
    }
    double brief = lengths_remaining(&l, 1, 0, 4000), lengthy = lengths_remaining(&l, 2, 0, 4000);
    double stranger = lengths_remaining(&l, 3, 0, 4000);
    ck_assert_msg(brief > 20 && brief < 90, "%f", brief);
    ck_assert_msg(lengthy > 800 && lengthy < 1150, "%f", lengthy);
    ck_assert_msg(stranger > 300 && stranger < 800, "%f", stranger);
}
END_TEST

START_TEST(test_lengths_remaining_is_the_mean_of_those_that_got_as_long)
{
    struct lengths l;
    lengths_init(&l);
    for (uint32_t i = 0; i < 2000; i++)
        lengths_observe(&l, 1, i % 4 ? 16 : 1024, 8192); /* three quarters are short, the others long */
    double fresh = lengths_remaining(&l, 1, 0, 8192), past = lengths_remaining(&l, 1, 40, 8192);
    double late = lengths_remaining(&l, 1, 900, 8192), longest = lengths_remaining(&l, 1, 3000, 8192);
    ck_assert_msg(fresh > 0.8 * 268 && fresh < 1.2 * 268, "%f", fresh);
    ck_assert_msg(past > 0.85 * 984 && past < 1.15 * 984, "%f", past);
    ck_assert_msg(late > 1 && late < 300, "%f", late);
    /* Already longer than any known answer: expect as much again. */
    ck_assert_msg(longest >= 1500 && longest <= 3000, "%f", longest);
}
END_TEST

START_TEST(test_lengths_trust_those_who_get_what_they_ask_for)
{
    struct lengths l;
    lengths_init(&l);
    for (uint64_t i = 0; i < 300; i++) {
        uint32_t n = 10 + (uint32_t)(uniform(i, 0) * 1000);
        lengths_observe(&l, 1, n, n);
        lengths_observe(&l, 2, n, 4000);
    }
    ck_assert(fabs(lengths_remaining(&l, 1, 0, 2000) - 2000) < 200);
    ck_assert(fabs(lengths_remaining(&l, 1, 500, 600) - 100) < 10);
    ck_assert(lengths_remaining(&l, 2, 0, 4000) < 800);
}
END_TEST

START_TEST(test_lengths_remaining_stays_below_max_tokens)
{
    struct lengths l;
    lengths_init(&l);
    ck_assert(lengths_remaining(&l, 1, 0, 10) <= 10);
    for (uint32_t i = 0; i < 100; i++)
        lengths_observe(&l, 1, 500, 8192);
    for (uint32_t n = 0; n <= 100; n++) {
        double left = lengths_remaining(&l, 1, n, 100);
        ck_assert(left <= 100 - n);
        ck_assert(n == 100 || left >= 1);
    }
    ck_assert(lengths_remaining(&l, 1, 200, 100) == 0);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("cost");
    TCase *t = tcase_create("cost");
    tcase_set_timeout(t, 30);
    tcase_add_test(t, test_cost_learns_from_a_profile_that_is_twice_off);
    tcase_add_test(t, test_cost_learns_nothing_from_a_step_in_which_its_process_was_stopped);
    tcase_add_test(t, test_cost_of_a_new_worker_is_not_that_of_one_step_in_which_its_process_was_stopped);
    tcase_add_test(t, test_cost_of_a_new_worker_is_that_of_two_steps);
    tcase_add_test(t, test_cost_of_a_new_worker_is_learned_from_steps_that_are_off_in_turns);
    tcase_add_test(t, test_cost_of_more_work_is_never_less);
    tcase_add_test(t, test_cost_follows_a_speed_that_changes_at_once);
    tcase_add_test(t, test_cost_of_a_mixed_step_lacks_the_fixed_part_of_a_decode_step);
    tcase_add_test(t, test_cost_of_other_steps_stays_right_while_all_are_alike);
    tcase_add_test(t, test_cost_of_an_unseen_worker_is_its_profile);
    tcase_add_test(t, test_cost_chunk_is_the_largest_that_stays_within_its_limit);
    tcase_add_test(t, test_cost_of_an_idle_machine_that_looks_slower_fades);
    tcase_add_test(t, test_cost_of_other_machines_stays_as_it_is);
    tcase_add_test(t, test_cost_profile_says_what_is_wrong);
    tcase_add_test(t, test_cost_profile_squares_and_unshared_part_count_in_a_step);
    tcase_add_test(t, test_lengths_tell_two_tenants_apart);
    tcase_add_test(t, test_lengths_remaining_is_the_mean_of_those_that_got_as_long);
    tcase_add_test(t, test_lengths_trust_those_who_get_what_they_ask_for);
    tcase_add_test(t, test_lengths_remaining_stays_below_max_tokens);
    suite_add_tcase(s, t);
    return tap_main(s);
}
