/*
 * Compares the engine with golden token ids (deploy/demo-model, and any directory with a golden.json that
 * TANDEM_GOLDEN names): alone, in a crowd, in chunks, from the prefix cache, preempted, handed over page by
 * page.
 */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "engine/engine.h"
#include "engine/engine_internal.h"
#include "tests/ask_device.h"
#include "tests/tap.h"

enum { MAX_SEQS = 64, MAX_TOKENS = 512, MAX_RANKS = 4 };

struct run { /* a sequence of a test */
    struct seq *seq;
    uint32_t tokens[MAX_TOKENS], n_tokens;
    float logprobs[MAX_TOKENS];
    enum seq_finish finish;
    bool ended;
    uint32_t matched;
    bool adopts;
    bool keep; /* don't close it when it ends: the test looks at its pages */
    uint32_t n_preempted;
    uint64_t layer_pages; /* sum over on_pages_ready of pages * layers */
};

struct fixture {
    struct clock clock;
    struct kernels *kernels[MAX_RANKS];
    struct model *model;
    struct engine *engine;
    json_t *golden;
    struct run runs[MAX_SEQS];
    uint32_t n_runs;
    int64_t n_named;
};

static const char *golden_dir(void)
{
    const char *dir = getenv("TANDEM_GOLDEN");
    return dir ? dir : DEMO_MODEL;
}

static void on_admitted(void *user, struct seq *seq, uint32_t n)
{
    struct run *r = engine_seq_user(seq);
    r->matched = n;
    if (r->adopts)
        engine_seq_fill(((struct fixture *)user)->engine, seq);
}

static void on_pages_ready(void *user, struct seq *seq, uint32_t first, uint32_t n, uint16_t begin, uint16_t end)
{
    (void)user, (void)first;
    ((struct run *)engine_seq_user(seq))->layer_pages += (uint64_t)n * (end - begin);
}

static void on_token(void *user, struct seq *seq, const struct sampled *token)
{
    (void)user;
    struct run *r = engine_seq_user(seq);
    r->logprobs[r->n_tokens] = token->logprob;
    r->tokens[r->n_tokens++] = token->id;
}

static void on_end(void *user, struct seq *seq, enum seq_finish finish)
{
    (void)user;
    struct run *r = engine_seq_user(seq);
    r->finish = finish;
    r->n_preempted = engine_seq_times(seq).n_preempted;
    r->ended = true;
}

static void on_block(void *user, bool added, const struct block_key *key, uint32_t index)
{
    (void)key, (void)index;
    ((struct fixture *)user)->n_named += added ? 1 : -1;
}

static void open_engine_in(struct fixture *f, uint32_t n_pages, uint32_t chunk, uint32_t max_batch,
                           enum compute compute)
{
    struct td_error e = {{0}};
    uint32_t n_tensor, n_pipeline;
    ranks_wanted(&n_tensor, &n_pipeline);
    ck_assert_uint_le(n_tensor * n_pipeline, MAX_RANKS);
    kernels_close_ranks(f->kernels, MAX_RANKS);
    const struct kernels_config kernels = {.device = device_wanted(), .n_threads = 2, .compute = compute};
    ck_assert_msg(!kernels_open_ranks(&kernels, n_tensor * n_pipeline, ranks_share_device(), f->kernels, &e), "%s",
                  e.text);
    const struct engine_config config = {
        .kernels = f->kernels,
        .n_tensor = n_tensor,
        .n_pipeline = n_pipeline,
        .piece_rows = 31,
        .model = f->model,
        .compute = compute,
        .kv_dtype = compute == COMPUTE_F32 ? NUM_F32 : NUM_BF16,
        .page_tokens = 16,
        .n_pages = n_pages,
        .max_batch = max_batch,
        .max_rows = 512,
        .chunk_tokens = chunk,
        .clock = &f->clock,
        .callbacks = {f, on_admitted, on_pages_ready, on_token, on_end, on_block},
    };
    ck_assert_msg(engine_open(&config, &f->engine, &e) == TD_OK, "%s", e.text);
}

static void open_engine(struct fixture *f, uint32_t n_pages, uint32_t chunk, uint32_t max_batch)
{
    open_engine_in(f, n_pages, chunk, max_batch, COMPUTE_F32);
}

static void setup_with(struct fixture *f, uint32_t n_pages, uint32_t chunk, uint32_t max_batch)
{
    struct td_error e = {{0}};
    char path[4096];
    json_error_t je;
    *f = (struct fixture){0};
    clock_init_real(&f->clock);
    ck_assert_msg(model_open(golden_dir(), &f->model, &e) == TD_OK, "%s", e.text);
    snprintf(path, sizeof(path), "%s/golden.json", golden_dir());
    f->golden = json_load_file(path, 0, &je);
    ck_assert_msg(f->golden != NULL, "%s: %s", path, je.text);
    open_engine(f, n_pages, chunk, max_batch);
}

static void teardown(struct fixture *f)
{
    for (uint32_t i = 0; i < f->n_runs; i++)
        engine_seq_close(f->engine, f->runs[i].seq);
    struct kvpool_audit a = kvpool_audit(engine_pool(f->engine));
    ck_assert_uint_eq(a.free + a.cached, a.total);
    ck_assert_int_eq(f->n_named, a.cached);
    engine_close(f->engine);
    kernels_close_ranks(f->kernels, MAX_RANKS);
    model_close(f->model);
    json_decref(f->golden);
}

static uint32_t some_id(const struct fixture *f, uint32_t n)
{
    uint32_t vocab = model_config(f->model)->vocab_size;
    return n % (vocab < 500 ? vocab : 500);
}

static uint32_t ids_of(json_t *array, uint32_t *out)
{
    for (size_t i = 0; i < json_array_size(array); i++)
        out[i] = (uint32_t)json_integer_value(json_array_get(array, i));
    return (uint32_t)json_array_size(array);
}

static size_t n_cases(const struct fixture *f)
{
    return json_array_size(json_object_get(f->golden, "cases"));
}

static json_t *case_at(const struct fixture *f, size_t i)
{
    return json_array_get(json_object_get(f->golden, "cases"), i);
}

static struct run *start_params(struct fixture *f, struct seq_params p)
{
    struct run *r = &f->runs[f->n_runs++];
    struct td_error e = {{0}};
    ck_assert_uint_le(f->n_runs, MAX_SEQS);
    p.user = r;
    ck_assert_msg(engine_seq_open(f->engine, &p, &r->seq, &e) == TD_OK, "%s", e.text);
    return r;
}

static struct seq_params greedy(const uint32_t *ids, uint32_t n, uint32_t max_tokens)
{
    return (struct seq_params){
        .ids = ids,
        .n_ids = n,
        .n_prompt = n,
        .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = max_tokens},
    };
}

static struct run *start_case(struct fixture *f, size_t i)
{
    uint32_t ids[8192], n = ids_of(json_object_get(case_at(f, i), "prompt_ids"), ids);
    return start_params(f, greedy(ids, n, (uint32_t)json_array_size(json_object_get(case_at(f, i), "greedy_ids"))));
}

static void run_all(struct fixture *f)
{
    for (int steps = 0; steps < 100000; steps++) {
        bool left = false;
        for (uint32_t i = 0; i < f->n_runs; i++) {
            struct run *r = &f->runs[i];
            left |= !r->ended;
            if (r->ended && !r->keep) {
                engine_seq_close(f->engine, r->seq);
                r->seq = NULL;
            }
        }
        if (!left)
            return;
        ck_assert_uint_gt(engine_step(f->engine), 0);
    }
    ck_abort_msg("still running");
}

static void check_case(const struct fixture *f, const struct run *r, size_t i)
{
    json_t *c = case_at(f, i), *logprobs = json_object_get(c, "greedy_logprobs");
    uint32_t want[MAX_TOKENS], n = ids_of(json_object_get(c, "greedy_ids"), want);
    ck_assert_uint_eq(r->n_tokens, n);
    for (uint32_t t = 0; t < n; t++) {
        ck_assert_msg(r->tokens[t] == want[t], "case %zu token %u: %u, expected %u", i, t, r->tokens[t], want[t]);
        if (logprobs)
            ck_assert_double_eq_tol((double)r->logprobs[t], json_number_value(json_array_get(logprobs, t)), 5e-4);
    }
}

START_TEST(test_engine_golden_alone)
{
    struct fixture f;
    setup_with(&f, 400, 0, 8);
    for (size_t i = 0; i < n_cases(&f); i++) {
        struct run *r = start_case(&f, i);
        run_all(&f);
        check_case(&f, r, i);
    }
    teardown(&f);
}
END_TEST

/* Steps that are run before the first sequence change nothing, in pools of any size. */
START_TEST(test_engine_golden_after_it_was_warmed)
{
    static const uint32_t PAGES[] = {400, 1, 5, 9};
    for (size_t p = sizeof(PAGES) / sizeof(PAGES[0]); p--;) {
        struct fixture f;
        setup_with(&f, PAGES[p], 0, 8);
        engine_warm(f.engine);
        for (size_t i = 0; i < n_cases(&f) && !p; i++) {
            struct run *r = start_case(&f, i);
            run_all(&f);
            check_case(&f, r, i);
        }
        teardown(&f);
    }
}
END_TEST

START_TEST(test_engine_golden_all_together_in_chunks)
{
    static const uint32_t CHUNKS[] = {16, 64, 37, 512};
    struct fixture f;
    setup_with(&f, 800, CHUNKS[_i], 32);
    for (size_t i = 0; i < n_cases(&f); i++)
        start_case(&f, i);
    run_all(&f);
    for (size_t i = 0; i < n_cases(&f); i++)
        check_case(&f, &f.runs[i], i);
    teardown(&f);
}
END_TEST

/* There is no reference for bf16, but its tokens are the same in any batch and chunk. */
START_TEST(test_engine_bf16_same_alone_and_together_in_chunks)
{
    struct fixture f;
    setup_with(&f, 800, 0, 32);
    engine_close(f.engine);
    open_engine_in(&f, 800, 37, 32, COMPUTE_BF16);
    uint32_t n = (uint32_t)n_cases(&f);
    for (uint32_t i = 0; i < n; i++) {
        start_case(&f, i);
        run_all(&f);
    }
    kvpool_flush(engine_pool(f.engine));
    for (uint32_t i = 0; i < n; i++)
        start_case(&f, n - 1 - i);
    run_all(&f);
    for (uint32_t i = 0; i < n; i++) {
        const struct run *alone = &f.runs[i], *crowd = &f.runs[2 * n - 1 - i];
        ck_assert_mem_eq(alone->tokens, crowd->tokens, alone->n_tokens * sizeof(uint32_t));
        ck_assert_mem_eq(alone->logprobs, crowd->logprobs, alone->n_tokens * sizeof(float));
    }
    teardown(&f);
}
END_TEST

/* If all layers have the same window, a sequence holds the pages that the window covers, and one page at
 * either end. */
START_TEST(test_engine_gives_up_pages_behind_a_window)
{
    struct fixture f;
    setup_with(&f, 100, 16, 8);
    uint32_t window = engine_layout(f.engine)->window, ids[150], n_pages;
    for (uint32_t j = 0; j < 150; j++)
        ids[j] = some_id(&f, j * 13 + 7);
    struct run *r = start_params(&f, greedy(ids, 150, 60));
    while (!r->ended) {
        engine_step(f.engine);
        engine_seq_pages(r->seq, &n_pages);
        uint32_t held = n_pages - engine_seq_first_page(r->seq);
        ck_assert_uint_eq(kvpool_audit(engine_pool(f.engine)).held, held);
        if (window && r->n_tokens)
            ck_assert_uint_le(held, window / 16 + 2);
        else if (!window)
            ck_assert_uint_eq(engine_seq_first_page(r->seq), 0);
    }
    teardown(&f);
}
END_TEST

START_TEST(test_engine_golden_from_prefix_cache)
{
    struct fixture f;
    setup_with(&f, 800, 0, 8);
    for (int round = 0; round < 2; round++)
        for (size_t i = 0; i < n_cases(&f); i++) {
            struct run *r = start_case(&f, i);
            run_all(&f);
            check_case(&f, r, i);
            uint32_t n = (uint32_t)json_array_size(json_object_get(case_at(&f, i), "prompt_ids"));
            if (round)
                ck_assert_uint_eq(r->matched, (n - 1) / 16);
        }
    teardown(&f);
}
END_TEST

START_TEST(test_engine_golden_preempted_and_resumed)
{
    struct fixture f;
    setup_with(&f, 800, 0, 32);
    size_t longest = 0;
    for (size_t i = 0; i < n_cases(&f); i++) {
        size_t n = json_array_size(json_object_get(case_at(&f, i), "prompt_ids")) +
                   json_array_size(json_object_get(case_at(&f, i), "greedy_ids"));
        longest = n > longest ? n : longest;
    }
    engine_close(f.engine);
    open_engine(&f, (uint32_t)longest / 16 + 6, 0, 32); /* room for little more than the longest sequence */
    uint32_t preempted = 0;
    for (size_t i = 0; i < n_cases(&f); i++)
        start_case(&f, i);
    run_all(&f);
    for (size_t i = 0; i < n_cases(&f); i++) {
        check_case(&f, &f.runs[i], i);
        preempted += f.runs[i].n_preempted;
    }
    ck_assert_uint_ge(f.n_runs, 4);
    /* Whether a preemption happens depends on the golden file's lengths; test_engine_preempts forces one. */
    (void)preempted;
    teardown(&f);
}
END_TEST

START_TEST(test_engine_preempts_the_newest_and_tokens_stay)
{
    struct fixture f;
    uint32_t ids[4][20], want[4][100];
    setup_with(&f, 400, 0, 8);
    for (uint32_t i = 0; i < 4; i++) {
        for (uint32_t j = 0; j < 20; j++)
            ids[i][j] = some_id(&f, i * 131 + j * 17 + 5);
        struct run *r = start_params(&f, greedy(ids[i], 20, 100));
        run_all(&f);
        memcpy(want[i], r->tokens, sizeof(want[i]));
    }
    f.n_runs = 0;
    memset(f.runs, 0, sizeof(f.runs));
    engine_close(f.engine);
    f.n_named = 0;
    open_engine(&f, 20, 0, 8); /* four sequences need 8 pages each */
    for (uint32_t i = 0; i < 4; i++)
        start_params(&f, greedy(ids[i], 20, 100));
    run_all(&f);
    uint32_t preempted = 0;
    for (uint32_t i = 0; i < 4; i++) {
        ck_assert_int_eq(memcmp(f.runs[i].tokens, want[i], sizeof(want[i])), 0);
        preempted += f.runs[i].n_preempted;
    }
    if (!engine_layout(f.engine)->window && !model_config_is_long(model_config(f.model), UINT32_MAX)) {
        /* With a window they fit. With longrope every sequence starts again. */
        ck_assert_uint_gt(preempted, 0);
        ck_assert_uint_eq(f.runs[0].n_preempted, 0);
    }
    teardown(&f);
}
END_TEST

/* A transfer without a wire: prefill in one sequence, then its pages are copied to a sequence that adopts
 * them. */
/* A sequence that gets the prompt and the first k tokens from elsewhere has the same rest, scores and end. */
START_TEST(test_engine_resumes_after_any_token)
{
    enum { N = 30, MAX = 40 };
    struct fixture f;
    uint32_t ids[N + MAX], stop;
    struct run want;
    setup_with(&f, 400, 0, 8);
    for (uint32_t j = 0; j < N; j++)
        ids[j] = some_id(&f, j * 17 + 5);
    struct seq_params p = greedy(ids, N, MAX);
    p.sampling.temperature = 1;
    p.sampling.seed = 3;
    p.sampling.presence_penalty = 0.5f;
    p.sampling.repetition_penalty = 1.1f;
    p.prompt_logprobs = _i % 2;
    if (_i / 2) { /* ends at a stop id, which min_tokens forbids at first */
        start_params(&f, p);
        run_all(&f);
        stop = f.runs[0].tokens[MAX - 5];
        f.n_runs = 0;
        memset(f.runs, 0, sizeof(f.runs));
        p.sampling.stop_ids = &stop;
        p.sampling.n_stop_ids = 1;
        p.sampling.min_tokens = 20;
    }
    start_params(&f, p);
    run_all(&f);
    want = f.runs[0];
    if (_i / 2 == 0 || !getenv("TANDEM_GOLDEN")) /* another model may end earlier */
        ck_assert_int_eq(want.finish, _i / 2 ? FINISH_STOP : FINISH_LENGTH);
    memcpy(ids + N, want.tokens, want.n_tokens * sizeof(*ids));
    for (uint32_t k = 1; k < want.n_tokens; k++) {
        f.n_runs = 0;
        memset(f.runs, 0, sizeof(f.runs));
        p.n_ids = N + k;
        uint64_t began = clock_now(&f.clock);
        struct run *r = start_params(&f, p);
        r->keep = true;
        run_all(&f);
        ck_assert_uint_eq(r->n_tokens, want.n_tokens - k);
        ck_assert_int_eq(memcmp(r->tokens, want.tokens + k, r->n_tokens * sizeof(*r->tokens)), 0);
        ck_assert_int_eq(memcmp(r->logprobs, want.logprobs + k, r->n_tokens * sizeof(*r->logprobs)), 0);
        ck_assert_int_eq(r->finish, want.finish);
        ck_assert_uint_lt(engine_seq_times(r->seq).decode_wait, clock_now(&f.clock) - began);
        engine_seq_close(f.engine, r->seq);
        r->seq = NULL;
    }
    teardown(&f);
}
END_TEST

/* Takes the names of a sequence's blocks outside [begin, end) away. */
static void keep_blocks(struct fixture *f, const struct run *r, uint32_t begin, uint32_t end)
{
    uint32_t n, n_computed;
    const struct block_key *keys = engine_seq_keys(r->seq, &n, &n_computed);
    for (uint32_t i = 0; i < n; i++)
        if (i < begin || i >= end)
            kvpool_forget(engine_pool(f->engine), &keys[i]);
}

/* Copies the pages of `first` that `second` does not share, and the last token. */
static void hand_over(struct fixture *f, const struct run *first, struct run *second, uint32_t n_tokens)
{
    uint32_t n_from, n_to, begin = engine_seq_first_page(second->seq);
    const struct page_ref *from = engine_seq_pages(first->seq, &n_from), *to = engine_seq_pages(second->seq, &n_to);
    ck_assert_uint_eq(n_from, n_to);
    ck_assert_uint_eq(engine_seq_first_page(first->seq), begin);
    ck_assert_uint_eq(engine_first_page_after(f->engine, n_tokens), begin);
    for (uint32_t j = begin; j < n_to; j++) {
        ck_assert((to[j].index == from[j].index) == (j < second->matched));
        if (j >= second->matched)
            memcpy(kvpool_address(engine_pool(f->engine), to[j]), kvpool_address(engine_pool(f->engine), from[j]),
                   kv_layout_page_bytes(engine_layout(f->engine)));
    }
    second->tokens[second->n_tokens] = first->tokens[0];
    second->logprobs[second->n_tokens++] = first->logprobs[0];
    engine_seq_filled(f->engine, second->seq, n_tokens);
    engine_seq_append(f->engine, second->seq, first->tokens[0]);
}

/* Adopts pages from another sequence, while _i quarters of the needed full blocks are in the cache. */
START_TEST(test_engine_adopted_pages_give_same_tokens)
{
    struct fixture f;
    setup_with(&f, 800, 37, 8);
    for (size_t i = 0; i < n_cases(&f); i++) {
        uint32_t ids[8192], n = ids_of(json_object_get(case_at(&f, i), "prompt_ids"), ids);
        uint32_t max = (uint32_t)json_array_size(json_object_get(case_at(&f, i), "greedy_ids"));
        uint32_t begin = engine_first_page_after(f.engine, n), end = begin + (n / 16 - begin) * (uint32_t)_i / 4;
        struct seq_params p = greedy(ids, n, max);
        p.root.b[0] = (uint8_t)(i + 1); /* so that no case finds blocks of another one */
        p.goal = SEQ_FIRST_TOKEN;
        struct run *first = start_params(&f, p);
        first->keep = true;
        run_all(&f);
        ck_assert_uint_eq(first->n_tokens, 1);
        ck_assert_uint_eq(first->layer_pages, (uint64_t)((n + 15) / 16) * engine_layout(f.engine)->n_layers);
        keep_blocks(&f, first, begin, end);
        p.goal = SEQ_ADOPT;
        struct run *second = start_params(&f, p);
        second->adopts = true;
        ck_assert_uint_eq(engine_step(f.engine), 0); /* it is admitted and waits for its pages */
        ck_assert_int_eq(engine_seq_state(second->seq), SEQ_FILLING);
        ck_assert_uint_eq(second->matched, end);
        hand_over(&f, first, second, n);
        run_all(&f);
        check_case(&f, second, i);
    }
    teardown(&f);
}
END_TEST

/* While there is no room for the rest, the blocks found in the cache are released. */
START_TEST(test_engine_adopting_without_room_holds_nothing)
{
    enum { N = 100, PAGES = 7 };
    struct fixture f;
    uint32_t ids[N], by_sequences, by_transfers, n_pages;
    setup_with(&f, PAGES, 0, 8);
    for (uint32_t i = 0; i < N; i++)
        ids[i] = some_id(&f, i * 13 + 7);
    struct seq_params p = greedy(ids, N, 4);
    p.goal = SEQ_FIRST_TOKEN;
    struct run *first = start_params(&f, p);
    first->keep = true;
    run_all(&f);
    p.goal = SEQ_ADOPT;
    struct run *second = start_params(&f, p);
    second->adopts = true;
    engine_step(f.engine);
    if (!engine_first_page_after(f.engine, N)) { /* else pages behind the window make room */
        ck_assert_int_eq(engine_seq_state(second->seq), SEQ_WAITING);
        for (uint32_t i = 0; i < PAGES; i++) {
            kvpool_page_holds(engine_pool(f.engine), i, &by_sequences, &by_transfers);
            ck_assert_uint_eq(by_sequences, 1);
        }
    }
    engine_seq_close(f.engine, first->seq);
    first->seq = NULL;
    engine_step(f.engine);
    ck_assert_int_eq(engine_seq_state(second->seq), SEQ_FILLING);
    ck_assert_uint_eq(second->matched, N / 16);
    engine_seq_pages(second->seq, &n_pages);
    ck_assert_uint_eq(kvpool_audit(engine_pool(f.engine)).held, n_pages - engine_seq_first_page(second->seq));
    teardown(&f);
}
END_TEST

START_TEST(test_engine_seeded_sampling_same_in_any_batch)
{
    struct fixture f;
    setup_with(&f, 800, 0, 33);
    uint32_t ids[40];
    for (uint32_t j = 0; j < 40; j++)
        ids[j] = some_id(&f, j * 37 + 11);
    struct seq_params p = greedy(ids, 40, 60);
    p.sampling.temperature = 1.3f;
    p.sampling.top_p = 0.9f;
    p.sampling.top_k = 50;
    p.sampling.seed = 42;
    p.sampling.presence_penalty = 0.3f;
    struct run *alone = start_params(&f, p);
    run_all(&f);
    kvpool_flush(engine_pool(f.engine));
    for (uint32_t i = 0; i < 32; i++) { /* other sequences */
        uint32_t other[64];
        for (uint32_t j = 0; j < 64; j++)
            other[j] = some_id(&f, j * (i + 3) + i);
        start_params(&f, greedy(other, 3 + i, 50));
    }
    struct run *crowd = start_params(&f, p);
    run_all(&f);
    ck_assert_int_eq(memcmp(alone->tokens, crowd->tokens, 60 * sizeof(uint32_t)), 0);
    ck_assert_int_eq(memcmp(alone->logprobs, crowd->logprobs, 60 * sizeof(float)), 0);
    p.sampling.seed = 43;
    struct run *other = start_params(&f, p);
    run_all(&f);
    ck_assert_int_ne(memcmp(alone->tokens, other->tokens, 60 * sizeof(uint32_t)), 0);
    teardown(&f);
}
END_TEST

/* The token of rank r is the r-th most probable one; a token beyond the listed ones is no more probable than
 * the last. */
static void check_places(const struct prompt_scores *p, const uint32_t *ids)
{
    for (uint32_t t = 1; t < p->n; t++) {
        const uint32_t *top_ids = p->top_ids + (size_t)(t - 1) * p->n_top, rank = p->ranks[t];
        const float *top = p->top_logprobs + (size_t)(t - 1) * p->n_top;
        for (uint32_t i = 0; i < p->n_top; i++) {
            ck_assert(!i || top[i] <= top[i - 1]);
            ck_assert_int_eq(top_ids[i] == ids[t], i + 1 == rank);
        }
        if (rank <= p->n_top)
            ck_assert(top[rank - 1] == p->logprobs[t]);
        else
            ck_assert(p->logprobs[t] <= top[p->n_top - 1]);
        ck_assert_uint_ge(rank, 1);
    }
}

START_TEST(test_engine_prompt_logprobs_agree_with_golden)
{
    struct fixture f;
    setup_with(&f, 800, 0, 8);
    for (size_t i = 0; i < n_cases(&f); i++) {
        json_t *want = json_object_get(case_at(&f, i), "prompt_logprobs");
        uint32_t ids[8192], n = ids_of(json_object_get(case_at(&f, i), "prompt_ids"), ids);
        if (!want)
            continue;
        struct seq_params p = greedy(ids, n, 0);
        p.prompt_logprobs = true;
        p.sampling.top_logprobs = i % 2 ? 20 : 3;
        struct run *r = start_params(&f, p);
        r->keep = true;
        run_all(&f);
        ck_assert_uint_eq(r->n_tokens, 0);
        const struct prompt_scores *got = engine_seq_prompt_scores(r->seq);
        ck_assert_uint_eq(got->n, n);
        ck_assert(isnan(got->logprobs[0]) && !got->ranks[0] && got->n_top == p.sampling.top_logprobs);
        for (uint32_t t = 1; t < n; t++)
            ck_assert_double_eq_tol((double)got->logprobs[t], json_number_value(json_array_get(want, t)), 5e-4);
        check_places(got, ids);
    }
    teardown(&f);
}
END_TEST

/* Opens the model with another number in config.json; the engine refuses it, since the weights don't fit. */
START_TEST(test_engine_refuses_weights_that_the_configuration_does_not_describe)
{
    static const struct {
        const char *field;
        int more;
        const char *says;
    } CHANGES[] = {{"hidden_size", 2, "shape"}, {"vocab_size", 1, "shape"}, {"num_hidden_layers", 1, "is missing"}};
    struct fixture f;
    setup_with(&f, 100, 0, 8);
    char dir[] = "/tmp/tandem-engine-XXXXXX", path[4200], from[4200];
    ck_assert_ptr_nonnull(mkdtemp(dir));
    ck_assert_ptr_nonnull(realpath(golden_dir(), from));
    size_t n = strlen(from);
    snprintf(from + n, sizeof(from) - n, "/model.safetensors");
    snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    ck_assert_int_eq(symlink(from, path), 0);
    for (size_t i = 0; i < sizeof(CHANGES) / sizeof(CHANGES[0]); i++) {
        struct engine_config config = {.kernels = f.kernels,
                                       .compute = COMPUTE_F32,
                                       .kv_dtype = NUM_F32,
                                       .page_tokens = 16,
                                       .n_pages = 10,
                                       .max_batch = 1,
                                       .max_rows = 16,
                                       .clock = &f.clock};
        struct model *model = NULL;
        struct engine *engine = NULL;
        struct td_error e = {{0}};
        snprintf(from + n, sizeof(from) - n, "/config.json");
        json_t *c = json_load_file(from, 0, NULL);
        json_int_t old = json_integer_value(json_object_get(c, CHANGES[i].field));
        json_object_set_new(c, CHANGES[i].field, json_integer(old + CHANGES[i].more));
        json_object_del(c, "layer_types");
        snprintf(path, sizeof(path), "%s/config.json", dir);
        ck_assert_int_eq(json_dump_file(c, path, 0), 0);
        json_decref(c);
        ck_assert_msg(model_open(dir, &model, &e) == TD_OK, "%s", e.text);
        config.model = model;
        ck_assert_int_ne(engine_open(&config, &engine, &e), TD_OK);
        ck_assert_msg(strstr(e.text, "tensor ") && strstr(e.text, CHANGES[i].says), "%s", e.text);
        model_close(model);
        unlink(path);
    }
    snprintf(path, sizeof(path), "%s/model.safetensors", dir);
    unlink(path);
    rmdir(dir);
    teardown(&f);
}
END_TEST

START_TEST(test_engine_refuses_bad_requests_by_field)
{
    static const struct {
        const char *field;
        float temperature, top_p, repetition;
        uint32_t n, max_tokens, bad_id;
    } BAD[] = {
        {"prompt", 0, 1, 1, 0, 8, 0},       {"prompt.ids[0]", 0, 1, 1, 4, 8, 1u << 30},
        {"max_tokens", 0, 1, 1, 4, 0, 0},   {"max_tokens", 0, 1, 1, 4, UINT32_MAX, 0},
        {"context", 0, 1, 1, 4, 100000, 0}, {"temperature", NAN, 1, 1, 4, 8, 0},
        {"temperature", -1, 1, 1, 4, 8, 0}, {"temperature", 999999, 1, 1, 4, 8, 0},
        {"top_p", 1, NAN, 1, 4, 8, 0},      {"top_p", 1, -1, 1, 4, 8, 0},
        {"top_p", 1, 0, 1, 4, 8, 0},        {"repetition_penalty", 1, 1, 0, 4, 8, 0},
    };
    struct fixture f;
    setup_with(&f, 100, 0, 8);
    for (size_t i = 0; i < sizeof(BAD) / sizeof(BAD[0]); i++) {
        uint32_t ids[4] = {BAD[i].bad_id, 1, 2, 3};
        struct seq_params p = greedy(ids, BAD[i].n, BAD[i].max_tokens);
        struct td_error e = {{0}};
        struct seq *seq = NULL;
        p.sampling.temperature = BAD[i].temperature;
        p.sampling.top_p = BAD[i].top_p;
        p.sampling.repetition_penalty = BAD[i].repetition;
        ck_assert_int_eq(engine_seq_open(f.engine, &p, &seq, &e), TD_ERR_INVALID);
        ck_assert_msg(strstr(e.text, BAD[i].field) != NULL, "'%s' does not name %s", e.text, BAD[i].field);
    }
    const double no_limits[] = {-1, (double)NAN, (double)INFINITY, -(double)INFINITY};
    for (int i = 0; i < 4; i++) {
        const uint32_t ids[] = {1, 2, 3};
        struct seq_params p = greedy(ids, 3, 8);
        struct td_error e = {{0}};
        struct seq *seq = NULL;
        p.tpot_ms = no_limits[i];
        ck_assert_int_eq(engine_seq_open(f.engine, &p, &seq, &e), TD_ERR_INVALID);
        ck_assert_msg(strstr(e.text, "leg.tpot_ms") != NULL, "'%s' does not name leg.tpot_ms", e.text);
    }
    teardown(&f);
}
END_TEST

int main(void)
{
    if (skip_without_device("engine"))
        return 0;
    Suite *s = suite_create("engine");
    TCase *t = tcase_create("golden"), *adopting = tcase_create("adopting"); /* CK_RUN_CASE runs one of them */
    tcase_set_timeout(t, 60);
    tcase_set_timeout(adopting, 60);
    tcase_add_test(t, test_engine_golden_alone);
    tcase_add_test(t, test_engine_golden_after_it_was_warmed);
    tcase_add_loop_test(t, test_engine_golden_all_together_in_chunks, 0, 4);
    tcase_add_test(t, test_engine_bf16_same_alone_and_together_in_chunks);
    tcase_add_test(t, test_engine_gives_up_pages_behind_a_window);
    tcase_add_test(t, test_engine_golden_from_prefix_cache);
    tcase_add_test(t, test_engine_golden_preempted_and_resumed);
    tcase_add_test(t, test_engine_preempts_the_newest_and_tokens_stay);
    tcase_add_loop_test(t, test_engine_resumes_after_any_token, 0, 4);
    tcase_add_test(t, test_engine_seeded_sampling_same_in_any_batch);
    tcase_add_test(t, test_engine_prompt_logprobs_agree_with_golden);
    tcase_add_test(t, test_engine_refuses_weights_that_the_configuration_does_not_describe);
    tcase_add_test(t, test_engine_refuses_bad_requests_by_field);
    tcase_add_loop_test(adopting, test_engine_adopted_pages_give_same_tokens, 0, 5);
    tcase_add_test(adopting, test_engine_adopting_without_room_holds_nothing);
    suite_add_tcase(s, t);
    suite_add_tcase(s, adopting);
    return tap_main(s);
}
