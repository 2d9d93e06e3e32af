/* Statistics of traces, by hand and as published; traces that are cut, changed, made and fitted. */
#include <math.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "replay/evict_sim.h"
#include "replay/trace_make.h"
#include "replay/trace_stat.h"
#include "tests/replay/shared.h"
#include "tests/tap.h"

/* Four requests in two minutes, with blocks of 4 tokens. The first two chains share ids; 12 is a partial
 * block that comes twice. */
static const char TEXT[] =
    "{\"tandem_trace\": 1, \"block_tokens\": 4}\n"
    "{\"timestamp\": 0, \"input_length\": 10, \"output_length\": 5, \"hash_ids\": [1, 2, 12], \"tenant\": \"a\", "
    "\"id\": \"x\"}\n"
    "{\"timestamp\": 500, \"input_length\": 10, \"output_length\": 0, \"hash_ids\": [1, 2, 12], \"tenant\": \"b\"}\n"
    "{\"timestamp\": 61000, \"input_length\": 12, \"output_length\": 7, \"hash_ids\": [1, 3, 4], \"tenant\": \"a\", "
    "\"follows\": \"x\", \"delay_ms\": 100}\n"
    "{\"timestamp\": 125000, \"input_length\": 3, \"output_length\": 8, \"hash_ids\": [5], \"tenant\": \"b\"}\n";

static struct trace *parsed(const char *text)
{
    struct trace *t = NULL;
    struct td_error e = {{0}};
    ck_assert_msg(!trace_parse(text, strlen(text), &t, &e), "%s", e.text);
    return t;
}

START_TEST(test_trace_stat_is_what_a_hand_counts)
{
    struct trace *t = parsed(TEXT);
    struct trace_stat s;
    trace_stat_of(t, &s);
    ck_assert_uint_eq(s.n, 4);
    ck_assert_uint_eq(s.n_tokens_in, 35);
    ck_assert_uint_eq(s.n_tokens_out, 20);
    ck_assert_uint_eq(s.n_unanswered, 1);
    ck_assert_uint_eq(s.n_following, 1);
    ck_assert_double_eq_tol(s.span_s, 125, 1e-9);
    ck_assert_uint_eq(s.most_in_a_second, 2);
    ck_assert_uint_eq(s.most_in_a_minute, 2);
    ck_assert_uint_eq(s.least_in_a_minute, 1);
    ck_assert_uint_eq(s.n_blocks, 10);
    ck_assert_uint_eq(s.n_distinct, 6);
    ck_assert_uint_eq(s.n_used_once, 3);
    ck_assert_uint_eq(s.with_partial.asked, 10);
    ck_assert_uint_eq(s.with_partial.found, 4); /* blocks 1 2 12, then 1 */
    ck_assert_uint_eq(s.with_partial.found_tokens, 10 + 4);
    ck_assert_uint_eq(s.full_only.asked, 7);
    ck_assert_uint_eq(s.full_only.found, 3);
    ck_assert_uint_eq(s.full_only.found_tokens, 8 + 4);
    ck_assert_uint_eq(s.reuse_blocks.n, 4); /* each of the three after the two others, then 1 after these */
    ck_assert_double_eq_tol(s.reuse_blocks.mean, 2, 1e-9);
    ck_assert_double_eq_tol(s.reuse_s.max, 60.5, 1e-9);
    trace_close(t);
}
END_TEST

START_TEST(test_trace_stat_reproduces_the_published_lru_table)
{
    static const struct {
        uint64_t blocks;
        int hits; /* share of the blocks that were asked for, in 1/10,000 */
    } LRU[] = {{1000, 445}, {5859, 1361}, {10000, 2116}, {30000, 3257}, {50000, 3546}, {100000, 3637}, {1000000, 3664}};
    char path[512];
    struct trace *t;
    struct td_error e = {{0}};
    struct evict_result r;
    struct trace_stat stat;
    if (!shared_path("test_trace_stat_reproduces_the_published_lru_table", "mooncake_conversation.jsonl", path,
                     sizeof(path)))
        return;
    ck_assert_msg(!trace_read(path, 1u << 28, &t, &e), "%s", e.text);
    struct evict_sim *s = evict_sim_open(t, 0);
    for (size_t i = 0; i < sizeof(LRU) / sizeof(LRU[0]); i++) {
        evict_sim_run(s, EVICTION_LRU, LRU[i].blocks, &r);
        ck_assert_int_eq((int)lround(1e4 * (double)r.n_hits / (double)r.n_asked), LRU[i].hits);
    }
    evict_sim_close(s);
    trace_stat_of(t, &stat);
    ck_assert_uint_eq(stat.n_distinct, 182790);
    ck_assert_uint_eq(stat.least_in_a_minute, 144);
    ck_assert_uint_eq(stat.most_in_a_minute, 247);
    ck_assert_uint_eq(stat.most_in_a_second, 28);
    ck_assert_uint_eq(stat.with_partial.found, 288500 - 182790);
    ck_assert_double_eq_tol((double)stat.with_partial.found_tokens / (double)stat.with_partial.asked_tokens, 0.374,
                            0.0005);
    trace_close(t);
}
END_TEST

static const struct trace_change SAME = {.rate = 1, .length_scale = 1, .output_scale = 1, .prefix_scale = 1};

START_TEST(test_trace_slice_takes_what_lies_between)
{
    struct trace *t = parsed(TEXT), *c;
    struct trace_change change = SAME;
    change.from_s = 0.5;
    change.to_s = 125;
    change.rate = 2;
    c = trace_changed(t, &change);
    ck_assert_uint_eq(c->n_requests, 2);
    ck_assert_uint_eq(c->requests[1].arrival_ns, 30250 * NS_PER_MS);
    ck_assert_uint_eq(c->requests[1].follows, 0); /* the request that it followed is cut off */
    ck_assert_uint_eq(trace_blocks(c, &c->requests[1])[1], 3);
    trace_close(c);
    change = SAME;
    change.tenant = "a";
    change.skip = 1;
    c = trace_changed(t, &change);
    ck_assert_uint_eq(c->n_requests, 1);
    ck_assert_uint_eq(c->requests[0].n_output, 7);
    trace_close(c);
    change = SAME;
    change.count = 3;
    c = trace_changed(t, &change);
    ck_assert_uint_eq(c->n_requests, 3);
    ck_assert_uint_eq(c->requests[2].follows, 1);
    trace_close(c);
    trace_close(t);
}
END_TEST

START_TEST(test_trace_scaled_keeps_what_is_shared)
{
    struct trace *t = parsed(TEXT), *c;
    struct trace_change change = SAME;
    struct trace_stat before, after;
    change.length_scale = 0.5;
    change.output_scale = 3;
    c = trace_changed(t, &change);
    ck_assert_uint_eq(c->block_tokens, 2);
    ck_assert_uint_eq(c->requests[0].n_prompt, 5);
    ck_assert_uint_eq(c->requests[3].n_output, 12);
    ck_assert_uint_eq(c->requests[1].n_output, 0);
    trace_stat_of(t, &before);
    trace_stat_of(c, &after);
    ck_assert_uint_eq(after.with_partial.found, before.with_partial.found);
    ck_assert_uint_eq(after.full_only.found, before.full_only.found);
    trace_close(c);
    trace_close(t);
}
END_TEST

START_TEST(test_trace_prefixes_grow_and_shrink_together)
{
    struct trace *t = parsed(TEXT), *c;
    struct trace_change change = SAME;
    struct trace_stat s;
    change.prefix_scale = 2;
    c = trace_changed(t, &change);
    ck_assert_uint_eq(c->requests[0].n_blocks, 6); /* all three blocks are shared */
    ck_assert_uint_eq(c->requests[0].n_prompt, 22);
    ck_assert_uint_eq(c->requests[2].n_blocks, 4); /* one of three blocks is shared */
    ck_assert_uint_eq(c->requests[3].n_blocks, 1);
    trace_stat_of(c, &s);
    ck_assert_uint_eq(s.with_partial.found, 8);
    trace_close(c);
    change.prefix_scale = 0;
    c = trace_changed(t, &change);
    ck_assert_uint_eq(c->requests[2].n_blocks, 2);
    ck_assert_uint_eq(c->requests[2].n_prompt, 8);
    trace_stat_of(c, &s);
    ck_assert_uint_eq(s.with_partial.found, 0);
    trace_close(c);
    trace_close(t);
}
END_TEST

static struct trace_synth plain(uint64_t n)
{
    struct trace_synth d = {.n_requests = n, .seed = 1, .rate = 10, .burstiness = 1, .turns = 1, .block_tokens = 16};
    trace_law_lognormal(300, 0.5, &d.first);
    trace_law_lognormal(100, 0.5, &d.more);
    trace_law_lognormal(50, 1, &d.output);
    trace_law_lognormal(5, 0, &d.think_s);
    return d;
}

START_TEST(test_trace_synth_has_the_rate_and_lengths_asked_for)
{
    static const double BURSTINESS[] = {0, 1, 3};
    for (int i = 0; i < 3; i++) {
        struct trace_synth d = plain(20000);
        struct trace_stat s;
        d.burstiness = BURSTINESS[i];
        struct trace *t = trace_synth(&d);
        trace_stat_of(t, &s);
        ck_assert_uint_eq(s.n, 20000);
        ck_assert_double_eq_tol(s.rate, 10, i == 2 ? 0.6 : 0.25);
        ck_assert_double_eq_tol(s.gap_cv, BURSTINESS[i], i == 2 ? 0.2 : 0.03);
        ck_assert_double_eq_tol(s.prompt.p50, 300, 6);
        ck_assert_double_eq_tol(s.output.mean, 50 * exp(0.5), 4);
        ck_assert_uint_eq(s.with_partial.found, 0); /* prompts share nothing */
        trace_close(t);
    }
}
END_TEST

/* Also if the trace is shorter than a session: sessions that began before it bring their later requests. */
START_TEST(test_trace_synth_has_its_rate_from_the_first_second_on)
{
    double rates = 0, first = 0;
    for (uint64_t seed = 1; seed <= 5; seed++) {
        struct trace_synth d = plain(1000); /* the trace takes 100 s, a session 400 s on average */
        struct trace_stat s;
        d.seed = seed;
        d.turns = 5;
        trace_law_lognormal(60, 1, &d.think_s);
        struct trace *t = trace_synth(&d);
        trace_stat_of(t, &s);
        ck_assert_msg(s.n == 1000 && fabs(s.rate - 10) < 2, "seed %llu: %f", (unsigned long long)seed, s.rate);
        rates += s.rate / 5;
        for (uint64_t i = 0; i < s.n && t->requests[i].arrival_ns < s.span_s * 0.25e9; i++)
            first += 1.0 / 5;
        trace_close(t);
    }
    printf("# %f requests/s, %f in the first quarter\n", rates, first);
    ck_assert_double_eq_tol(rates, 10, 0.5);
    ck_assert_double_eq_tol(first, 250, 25);
}
END_TEST

START_TEST(test_trace_synth_sessions_share_and_wait)
{
    struct trace_synth d = plain(4000);
    struct trace_stat s;
    d.turns = 4;
    d.n_system = 3;
    d.system_tokens = 64;
    d.n_tenants = 2;
    d.follows = true;
    struct trace *t = trace_synth(&d);
    trace_stat_of(t, &s);
    ck_assert_double_eq_tol((double)s.n_following / (double)s.n, 0.75, 0.04);
    ck_assert_uint_eq(s.n_tenants, 3);
    ck_assert_double_gt((double)s.full_only.found / (double)s.full_only.asked, 0.6);
    for (uint64_t i = 0; i < t->n_requests; i++) {
        const struct trace_request *r = &t->requests[i], *before = r->follows ? &t->requests[r->follows - 1] : r;
        uint32_t n = before->n_prompt / 16;
        ck_assert(r->follows <= i && before->session == r->session && before->tenant == r->tenant && r->tenant);
        ck_assert(!memcmp(trace_blocks(t, r), trace_blocks(t, before), n * sizeof(uint64_t)));
        /* A block of one of three system prompts of four blocks. */
        ck_assert_uint_lt(trace_blocks(t, r)[3], 12);
        ck_assert(!r->follows || (r->delay_ms == 5000 && r->arrival_ns > before->arrival_ns));
    }
    struct trace *again = trace_synth(&d);
    ck_assert_mem_eq(t->requests, again->requests, t->n_requests * sizeof(*t->requests));
    trace_close(t);
    trace_close(again);
}
END_TEST

START_TEST(test_trace_fit_describes_what_was_made)
{
    struct trace_synth d = plain(20000), f;
    d.turns = 3;
    d.n_system = 1;
    d.system_tokens = 128;
    struct trace *t = trace_synth(&d);
    trace_fit(t, &f);
    ck_assert_double_eq_tol(f.rate, 10, 0.5);
    ck_assert_double_eq_tol(f.turns, 3, 0.15);
    ck_assert_double_eq_tol(f.burstiness, 1, 0.1);
    ck_assert_uint_eq(f.system_tokens, 128);
    ck_assert_double_eq_tol(trace_law_draw(&f.first, 0.5), 300, 15);
    /* A partial block of the turn before counts, too. */
    ck_assert_double_eq_tol(trace_law_draw(&f.more, 0.5), 100, 20);
    ck_assert_double_eq_tol(trace_law_draw(&f.think_s, 0.5), 5, 0.2);
    trace_close(t);
}
END_TEST

START_TEST(test_trace_fit_of_the_mooncake_conversations_caches_alike)
{
    static const char NAME[] = "test_trace_fit_of_the_mooncake_conversations_caches_alike";
    static const uint64_t CAPACITIES[] = {5859, 10000, 30000};
    char path[512];
    struct trace *t;
    struct td_error e = {{0}};
    struct trace_synth f;
    if (!shared_path(NAME, "mooncake_conversation.jsonl", path, sizeof(path)))
        return;
    ck_assert_msg(!trace_read(path, 1u << 28, &t, &e), "%s", e.text);
    trace_fit(t, &f);
    f.n_requests = t->n_requests;
    f.seed = 1;
    struct trace *made = trace_synth(&f);
    struct evict_sim *a = evict_sim_open(t, 0), *b = evict_sim_open(made, 0);
    for (int i = 0; i < 3; i++) {
        struct evict_result x, y;
        evict_sim_run(a, EVICTION_LRU, CAPACITIES[i], &x);
        evict_sim_run(b, EVICTION_LRU, CAPACITIES[i], &y);
        double is = (double)x.n_hits / (double)x.n_asked, was = (double)y.n_hits / (double)y.n_asked;
        printf("# %llu blocks: lru finds %.4f in the trace, %.4f in one made like it\n",
               (unsigned long long)CAPACITIES[i], is, was);
        ck_assert_double_eq_tol(is, was, 0.15 * is);
    }
    evict_sim_close(a);
    evict_sim_close(b);
    trace_close(t);
    trace_close(made);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("trace_make");
    TCase *c = tcase_create("trace_make");
    tcase_set_timeout(c, 120);
    tcase_add_test(c, test_trace_stat_is_what_a_hand_counts);
    tcase_add_test(c, test_trace_stat_reproduces_the_published_lru_table);
    tcase_add_test(c, test_trace_slice_takes_what_lies_between);
    tcase_add_test(c, test_trace_scaled_keeps_what_is_shared);
    tcase_add_test(c, test_trace_prefixes_grow_and_shrink_together);
    tcase_add_test(c, test_trace_synth_has_the_rate_and_lengths_asked_for);
    tcase_add_test(c, test_trace_synth_has_its_rate_from_the_first_second_on);
    tcase_add_test(c, test_trace_synth_sessions_share_and_wait);
    tcase_add_test(c, test_trace_fit_describes_what_was_made);
    tcase_add_test(c, test_trace_fit_of_the_mooncake_conversations_caches_alike);
    suite_add_tcase(s, c);
    return tap_main(s);
}
