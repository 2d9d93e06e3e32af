/* The eviction simulator: cases by hand, comparison with an exhaustive search, and tandem's policy against
 * LRU on many loads. */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "replay/evict_sim.h"
#include "replay/trace_make.h"
#include "tests/replay/shared.h"
#include "tests/tap.h"

/* ------------------------------------------------------------------- loads */

static void add(struct bytes *b, const uint64_t *ids, uint32_t n)
{
    bytes_printf(b, "{\"timestamp\": 0, \"input_length\": %u, \"output_length\": 1, \"hash_ids\": [", n * 512);
    for (uint32_t i = 0; i < n; i++)
        bytes_printf(b, "%s%llu", i ? "," : "", (unsigned long long)ids[i]);
    bytes_append(b, "]}\n", 3);
}

static struct trace *parsed(struct bytes *b)
{
    struct trace *t = NULL;
    struct td_error e = {{0}};
    ck_assert_msg(!trace_parse(b->data, b->len, &t, &e), "%s", e.text);
    bytes_free(b);
    return t;
}

/* Appends n new ids to a chain. */
static void extend(uint64_t *ids, uint32_t *n_ids, uint32_t n, uint64_t *next)
{
    while (n--)
        ids[(*n_ids)++] = (*next)++;
}

static uint32_t between(uint64_t seed, uint64_t i, uint64_t what, uint32_t low, uint32_t high)
{
    return low + (uint32_t)(random_at(seed, i, what) % (high - low + 1));
}

/* Adds prompts that begin with system prompts by Zipf's law; the rest of a prompt is unique. After each
 * n_same requests all system prompts change. */
static void add_prompts(struct bytes *b, uint32_t n, uint32_t n_prompts, uint32_t n_same, uint64_t *next)
{
    for (uint32_t i = 0; i < n; i++) {
        uint64_t ids[64];
        uint32_t prompt = (uint32_t)(pow((double)n_prompts, random_unit(random_at(11, i, 0)))) - 1, n_ids = 0;
        uint64_t first = (uint64_t)(1 + i / n_same) * 1000000000 + prompt * 100;
        extend(ids, &n_ids, between(11, prompt, 1, 2, 16), &first);
        extend(ids, &n_ids, between(11, i, 2, 2, 20), next);
        add(b, ids, n_ids);
    }
}

/* Adds n_open conversations at a time, of up to n_turns turns. The next speaker is random. */
static void add_conversations(struct bytes *b, uint32_t n, uint32_t n_open, uint32_t n_turns, uint64_t *next)
{
    enum { MOST = 400 };
    uint64_t(*ids)[MOST] = mem_array(n_open, sizeof(*ids));
    uint32_t *n_ids = mem_array(n_open, sizeof(*n_ids)), *left = mem_array(n_open, sizeof(*left));
    for (uint32_t i = 0; i < n; i++) {
        uint32_t c = between(12, i, 0, 0, n_open - 1);
        if (!left[c]) {
            n_ids[c] = 0;
            ids[c][n_ids[c]++] = 7; /* all conversations share it */
            extend(ids[c], &n_ids[c], between(12, i, 1, 2, 30), next);
            left[c] = between(12, i, 2, 1, n_turns);
        }
        left[c]--;
        ids[c][n_ids[c]] = (*next)++; /* a partial last block */
        add(b, ids[c], n_ids[c] + 1);
        extend(ids[c], &n_ids[c], between(12, i, 3, 2, 6), next);
    }
    free(ids);
    free(n_ids);
    free(left);
}

static void add_scan(struct bytes *b, uint32_t n, uint32_t len, uint64_t *next)
{
    for (uint32_t i = 0; i < n; i++) {
        uint64_t ids[64];
        uint32_t n_ids = 0;
        extend(ids, &n_ids, len, next);
        add(b, ids, n_ids);
    }
}

enum { PROMPTS, PROMPTS_CHANGE, TALKS, LONG_TALKS, SCANS, PROMPTS_THEN_TALKS, TALKS_THEN_PROMPTS, LOADS };

static struct trace *load(int kind)
{
    struct bytes b = {0};
    uint64_t next = 1000;
    if (kind == PROMPTS || kind == PROMPTS_CHANGE)
        add_prompts(&b, 6000, 300, kind == PROMPTS ? 6000 : 1000, &next);
    if (kind == TALKS)
        add_conversations(&b, 6000, 300, 8, &next);
    if (kind == LONG_TALKS)
        add_conversations(&b, 4000, 40, 50, &next);
    for (uint32_t i = 0; kind == SCANS && i < 10; i++) {
        uint64_t again = 1000000;
        add_conversations(&b, 300, 30, 8, &next);
        add_scan(&b, 100, 40, &next);
        add_scan(&b, 10, 20, &again);
    }
    if (kind == PROMPTS_THEN_TALKS || kind == TALKS_THEN_PROMPTS) {
        if (kind == PROMPTS_THEN_TALKS)
            add_prompts(&b, 4000, 300, 4000, &next);
        add_conversations(&b, 4000, 300, 8, &next);
        if (kind == TALKS_THEN_PROMPTS)
            add_prompts(&b, 4000, 300, 4000, &next);
    }
    return parsed(&b);
}

/* ------------------------------------------------------------------- tests */

START_TEST(test_evict_sim_counts_prefixes_by_hand)
{
    static const uint64_t A[] = {1, 2, 3}, B[] = {1, 2, 4}, C[] = {5, 2, 3};
    struct bytes b = {0};
    struct evict_result r;
    add(&b, A, 3);
    add(&b, B, 3);
    add(&b, C, 3); /* ids 2 and 3 after another head are different blocks */
    add(&b, A, 3);
    struct trace *t = parsed(&b);
    struct evict_sim *s = evict_sim_open(t, 0);
    evict_sim_run(s, EVICTION_LRU, 100, &r);
    ck_assert_uint_eq(r.n_asked, 12);
    ck_assert_uint_eq(r.n_first_uses, 7);
    ck_assert_uint_eq(r.n_hits, 5); /* hits: 1 2 of B, 1 2 3 of the second A */
    ck_assert_uint_eq(r.n_evicted, 0);
    evict_sim_run(s, EVICTION_LRU, 4, &r); /* C evicts 4 and 3, then 2: only 1 is left for A */
    ck_assert_uint_eq(r.n_hits, 3);
    evict_sim_run(s, EVICTION_LRU, 1, &r);
    ck_assert_uint_eq(r.n_hits, 1);
    evict_sim_optimum(s, 3, &r); /* 1, 2 and 3 stay */
    ck_assert_uint_eq(r.n_hits, 5);
    evict_sim_close(s);
    trace_close(t);
}
END_TEST

/* Exhaustive search for the most hits of any choice of kept blocks: blocks of uses[at..n) in order, the kept
 * ones as a set of bits. */
struct search {
    uint8_t uses[24], n;
    uint8_t parent[12];
    uint32_t capacity;
    int8_t best[24][1 << 12];
};

static int search_most(struct search *s, uint32_t at, uint32_t kept)
{
    if (at == s->n)
        return 0;
    if (s->best[at][kept] >= 0)
        return s->best[at][kept];
    uint32_t block = 1u << s->uses[at], with = kept | block;
    int best, hit = (kept & block) != 0;
    if ((uint32_t)__builtin_popcount(with) <= s->capacity) {
        best = search_most(s, at + 1, with);
    } else {
        best = 0;
        for (uint32_t i = 0; i < 12; i++) { /* the victim may be the new block, which is then not stored */
            int most = with & 1u << i ? search_most(s, at + 1, with & ~(1u << i)) : 0;
            best = most > best ? most : best;
        }
    }
    return s->best[at][kept] = (int8_t)(best + hit);
}

START_TEST(test_evict_sim_optimum_is_what_an_exhaustive_search_finds)
{
    /* Blocks 0 .. 11 form a tree: the parent of i is (i - 1) / 2. A request is a path from the root. */
    struct search *s = mem_zalloc(sizeof(*s));
    for (uint64_t round = 0; round < 40; round++) {
        struct bytes b = {0};
        struct evict_result r;
        s->n = 0;
        for (uint64_t i = 0;; i++) {
            uint64_t path[4];
            uint32_t n = 0;
            for (uint32_t x = between(20, round, i, 0, 11);; x = (x - 1) / 2) {
                memmove(path + 1, path, n * sizeof(path[0]));
                path[0] = x, n++;
                if (!x)
                    break;
            }
            if (s->n + n > 24)
                break;
            for (uint32_t k = 0; k < n; k++)
                s->uses[s->n++] = (uint8_t)path[k];
            add(&b, path, n);
        }
        struct trace *t = parsed(&b);
        struct evict_sim *sim = evict_sim_open(t, 0);
        for (s->capacity = 1; s->capacity <= 5; s->capacity++) {
            memset(s->best, -1, sizeof(s->best));
            evict_sim_optimum(sim, s->capacity, &r);
            ck_assert_int_eq((int)r.n_hits, search_most(s, 0, 0));
        }
        evict_sim_close(sim);
        trace_close(t);
    }
    free(s);
}
END_TEST

START_TEST(test_evict_sim_holds_for_every_load)
{
    static const uint64_t CAPACITIES[] = {300, 1000, 3000, 10000};
    struct trace *t = load(_i);
    struct evict_sim *s = evict_sim_open(t, 0);
    for (int k = 0; k < 4; k++) {
        struct evict_result best, lru, r, again;
        evict_sim_optimum(s, CAPACITIES[k], &best);
        evict_sim_run(s, EVICTION_LRU, CAPACITIES[k], &lru);
        ck_assert_uint_le(best.n_hits, best.n_asked - best.n_first_uses);
        for (int p = 0; p < EVICTION_POLICIES; p++) {
            evict_sim_run(s, (enum eviction_policy)p, CAPACITIES[k], &r);
            evict_sim_run(s, (enum eviction_policy)p, CAPACITIES[k], &again);
            ck_assert_uint_le(r.n_hits, best.n_hits);
            ck_assert_uint_eq(r.n_hits, again.n_hits);
            ck_assert_uint_eq(r.victims_hash, again.victims_hash);
            ck_assert(p == EVICTION_S3FIFO || !r.n_stranded);
        }
        printf("# load %d, %llu blocks: lru %.4f tandem %.4f optimum %.4f\n", _i, (unsigned long long)CAPACITIES[k],
               (double)lru.n_hits / (double)lru.n_asked, (double)r.n_hits / (double)r.n_asked,
               (double)best.n_hits / (double)best.n_asked);
        ck_assert_double_gt((double)r.n_hits, 0.99 * (double)lru.n_hits); /* r is the last result, tandem's */
    }
    evict_sim_close(s);
    trace_close(t);
}
END_TEST

static void check_beats_lru(const struct trace *t, const uint64_t *capacities, int n, double times)
{
    struct evict_sim *s = evict_sim_open(t, 0);
    for (int k = 0; k < n; k++) {
        struct evict_result lru, tandem;
        evict_sim_run(s, EVICTION_LRU, capacities[k], &lru);
        evict_sim_run(s, EVICTION_TANDEM, capacities[k], &tandem);
        printf("# %llu blocks: lru %.4f tandem %.4f\n", (unsigned long long)capacities[k],
               (double)lru.n_hits / (double)lru.n_asked, (double)tandem.n_hits / (double)tandem.n_asked);
        ck_assert_double_gt((double)tandem.n_hits, times * (double)lru.n_hits);
        ck_assert_uint_eq(tandem.n_stranded, 0);
    }
    evict_sim_close(s);
}

START_TEST(test_evict_sim_tandem_beats_lru_where_prompts_are_shared)
{
    static const uint64_t CAPACITIES[] = {300, 1000, 3000};
    struct trace *t = load(PROMPTS);
    check_beats_lru(t, CAPACITIES, 3, 1.1);
    trace_close(t);
}
END_TEST

/* Sessions of several turns after system prompts by Zipf's law, with the parameters of SESSIONS. */
static const struct made {
    double turns, think_s, think_sigma, first, first_sigma, more;
    uint32_t n_system, system_tokens;
} SESSIONS[] = {
    {.turns = 3,
     .think_s = 120,
     .think_sigma = 1,
     .first = 3000,
     .first_sigma = 1.2,
     .more = 900,
     .n_system = 20,
     .system_tokens = 1024},
    {.turns = 12,
     .think_s = 15,
     .think_sigma = 0.8,
     .first = 3000,
     .first_sigma = 1,
     .more = 1500,
     .n_system = 8,
     .system_tokens = 6144},
    {.turns = 1.5,
     .think_s = 40,
     .think_sigma = 1.5,
     .first = 2000,
     .first_sigma = 1,
     .more = 900,
     .n_system = 200,
     .system_tokens = 5120},
    {.turns = 4,
     .think_s = 200,
     .think_sigma = 0.3,
     .first = 5000,
     .first_sigma = 0.8,
     .more = 700,
     .n_system = 1,
     .system_tokens = 512},
};

static struct trace *made_trace(const struct made *m)
{
    struct trace_synth d = {.n_requests = 5000,
                            .seed = 9,
                            .rate = 3,
                            .burstiness = 2,
                            .turns = m->turns,
                            .n_system = m->n_system,
                            .system_tokens = m->system_tokens,
                            .block_tokens = 512};
    trace_law_lognormal(m->first, m->first_sigma, &d.first);
    trace_law_lognormal(m->more, 0.8, &d.more);
    trace_law_lognormal(300, 0.8, &d.output);
    trace_law_lognormal(m->think_s, m->think_sigma, &d.think_s);
    return trace_synth(&d);
}

START_TEST(test_evict_sim_tandem_is_ahead_of_lru_unless_lru_finds_almost_all)
{
    static const uint64_t CAPACITIES[] = {300, 1000, 3000, 10000};
    struct trace *t = made_trace(&SESSIONS[_i]);
    struct evict_sim *s = evict_sim_open(t, 0);
    for (int k = 0; k < 4; k++) {
        struct evict_result best, lru, r;
        evict_sim_optimum(s, CAPACITIES[k], &best);
        evict_sim_run(s, EVICTION_LRU, CAPACITIES[k], &lru);
        evict_sim_run(s, EVICTION_TANDEM, CAPACITIES[k], &r);
        double n = (double)r.n_asked, gain = (double)r.n_hits - (double)lru.n_hits;
        printf("# sessions %d, %llu blocks: lru %.4f tandem %.4f optimum %.4f\n", _i, (unsigned long long)CAPACITIES[k],
               (double)lru.n_hits / n, (double)r.n_hits / n, (double)best.n_hits / n);
        if ((double)(best.n_hits - lru.n_hits) > 0.05 * n)
            ck_assert_double_gt(gain, 0);
        else
            ck_assert_double_ge(gain, -0.001 * n); /* LRU finds almost all hits that exist */
    }
    evict_sim_close(s);
    trace_close(t);
}
END_TEST

START_TEST(test_evict_sim_tandem_beats_lru_on_mooncake_conversations)
{
    static const uint64_t CAPACITIES[] = {1000, 10000, 30000}, SMALL[] = {1000, 10000};
    static const char NAME[] = "test_evict_sim_tandem_beats_lru_on_mooncake_conversations";
    char path[512];
    struct trace *t, half;
    struct td_error e = {{0}};
    struct evict_result r;
    if (!shared_path(NAME, "mooncake_conversation.jsonl", path, sizeof(path)))
        return;
    ck_assert_msg(!trace_read(path, 1u << 28, &t, &e), "%s", e.text);
    check_beats_lru(t, CAPACITIES, 3, 1.01);
    /* The simulator reproduces the figures published for this trace. */
    struct evict_sim *s = evict_sim_open(t, 0);
    evict_sim_run(s, EVICTION_LRU, 10000, &r);
    ck_assert_double_eq_tol((double)r.n_hits / (double)r.n_asked, 0.2116, 0.0001);
    evict_sim_optimum(s, 1000, &r);
    ck_assert_double_eq_tol((double)r.n_hits / (double)r.n_asked, 0.1907, 0.0001);
    evict_sim_run(s, EVICTION_TANDEM, 3000, &r);
    ck_assert_double_gt((double)r.n_hits / (double)r.n_asked, 0.133); /* 0.1303 with classes by uses alone */
    evict_sim_run(s, EVICTION_TANDEM, 5859, &r);
    ck_assert_double_gt((double)r.n_hits / (double)r.n_asked, 0.183); /* 0.1767 */
    evict_sim_close(s);
    s = evict_sim_open(t, 512);
    evict_sim_run(s, EVICTION_LRU, 10000, &r);
    ck_assert_uint_eq(r.n_asked, 276491); /* full blocks only */
    evict_sim_close(s);
    for (int i = 0; i < 2; i++) { /* each half in time: the choice does not fit the whole trace only */
        half = *t;
        half.n_requests /= 2;
        half.requests += (uint64_t)i * half.n_requests;
        check_beats_lru(&half, SMALL, 2, 1.02);
    }
    trace_close(t);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("evict_sim");
    TCase *c = tcase_create("evict_sim");
    tcase_set_timeout(c, 120);
    tcase_add_test(c, test_evict_sim_counts_prefixes_by_hand);
    tcase_add_test(c, test_evict_sim_optimum_is_what_an_exhaustive_search_finds);
    tcase_add_loop_test(c, test_evict_sim_holds_for_every_load, 0, LOADS);
    tcase_add_test(c, test_evict_sim_tandem_beats_lru_where_prompts_are_shared);
    tcase_add_loop_test(c, test_evict_sim_tandem_is_ahead_of_lru_unless_lru_finds_almost_all, 0,
                        sizeof(SESSIONS) / sizeof(SESSIONS[0]));
    tcase_add_test(c, test_evict_sim_tandem_beats_lru_on_mooncake_conversations);
    suite_add_tcase(s, c);
    return tap_main(s);
}
