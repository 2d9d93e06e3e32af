/*
 * Compares engines on several ranks with an engine on one rank, on the prompts of a golden directory
 * (deploy/demo-model, or TANDEM_GOLDEN): tokens, log-probabilities and all bytes of the pool are equal. Also
 * engines whose packed weights come from a file.
 */
#include <dirent.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/random.h"
#include "engine/engine.h"
#include "tests/ask_device.h"
#include "tests/tap.h"

enum { MAX_RUNS = 16, MAX_TOKENS = 256, MAX_PROMPT = 400, N_PAGES = 240, PAGE_TOKENS = 16, MAX_RANKS = 6 };

/* How an engine is opened. */
struct shape {
    uint32_t n_tensor, n_pipeline;
    enum compute compute;
    enum k_weights weights;
    const char *weight_cache; /* directory; NULL: none */
};

struct run {
    struct seq *seq;
    uint32_t prompt[MAX_PROMPT], n_prompt, tokens[MAX_TOKENS], n_tokens;
    float logprobs[MAX_TOKENS], prompt_logprobs[MAX_PROMPT];
    bool adopts, ended;
    /* Pages announced in all layers, and announced layers of the pages after them. */
    uint32_t n_told, told_layers;
    uint64_t told_sum; /* sum over all announced bytes at the time of announcement */
};

struct side { /* an engine and its runs */
    struct clock clock;
    struct model *model;
    json_t *golden;
    struct kernels *kernels[MAX_RANKS];
    struct shape shape;
    struct engine *engine;
    struct run runs[MAX_RUNS];
    uint32_t n_runs;
};

static const char *golden_dir(void)
{
    const char *dir = getenv("TANDEM_GOLDEN");
    return dir ? dir : DEMO_MODEL;
}

/* ------------------------------------------------------------------ callbacks */

/* Sum over layers [begin, end) of the sequence's page i. Sums of ranges add up to the sum of all layers. */
static uint64_t sum_of(const struct side *f, const struct run *r, uint32_t i, uint32_t begin, uint32_t end)
{
    const struct kv_layout *l = engine_layout(f->engine);
    uint32_t n;
    const uint8_t *page = kvpool_address(engine_pool(f->engine), engine_seq_pages(r->seq, &n)[i]);
    uint64_t sum = 0;
    for (size_t at = begin * kv_layout_layer_bytes(l); at < end * kv_layout_layer_bytes(l); at++)
        sum += random_mix((uint64_t)i << 32 | at) * (page[at] + 1ull);
    return sum;
}

static void on_admitted(void *user, struct seq *seq, uint32_t n)
{
    const struct run *r = engine_seq_user(seq);
    (void)n;
    if (r->adopts)
        engine_seq_fill(((struct side *)user)->engine, seq);
}

static void on_pages_ready(void *user, struct seq *seq, uint32_t first, uint32_t n, uint16_t begin, uint16_t end)
{
    const struct side *f = user;
    struct run *r = engine_seq_user(seq);
    ck_assert_uint_eq(first, r->n_told);
    ck_assert_uint_eq(begin, r->told_layers);
    for (uint32_t i = first; i < first + n; i++)
        r->told_sum += sum_of(f, r, i, begin, end);
    r->told_layers = end % engine_layout(f->engine)->n_layers;
    if (!r->told_layers)
        r->n_told += n;
}

static void on_token(void *user, struct seq *seq, const struct sampled *token)
{
    struct run *r = engine_seq_user(seq);
    (void)user;
    r->logprobs[r->n_tokens] = token->logprob;
    r->tokens[r->n_tokens++] = token->id;
}

static void on_end(void *user, struct seq *seq, enum seq_finish finish)
{
    (void)user, (void)finish;
    ((struct run *)engine_seq_user(seq))->ended = true;
}

/* ---------------------------------------------------------------- open, close */

static enum td_status try_open(struct side *f, const struct shape *shape, struct td_error *e)
{
    char path[4096];
    *f = (struct side){.shape = *shape};
    clock_init_real(&f->clock);
    ck_assert_msg(model_open(golden_dir(), &f->model, e) == TD_OK, "%s", e->text);
    snprintf(path, sizeof(path), "%s/golden.json", golden_dir());
    f->golden = json_load_file(path, 0, NULL);
    ck_assert_ptr_nonnull(f->golden);
    const struct kernels_config kernels = {.device = device_wanted(), .n_threads = 3, .compute = shape->compute};
    uint32_t n = shape->n_tensor * shape->n_pipeline;
    ck_assert_msg(kernels_open_ranks(&kernels, n, ranks_share_device(), f->kernels, e) == TD_OK, "%s", e->text);
    const struct engine_config config = {
        .kernels = f->kernels,
        .n_tensor = shape->n_tensor,
        .n_pipeline = shape->n_pipeline,
        .piece_rows = 23,
        .model = f->model,
        .compute = shape->compute,
        .weights = shape->weights,
        .weight_cache = shape->weight_cache,
        .kv_dtype = shape->compute == COMPUTE_F32 ? NUM_F32 : NUM_BF16,
        .page_tokens = PAGE_TOKENS,
        .n_pages = N_PAGES,
        .max_batch = MAX_RUNS,
        .max_rows = 128,
        .chunk_tokens = 75,
        .clock = &f->clock,
        .callbacks = {f, on_admitted, on_pages_ready, on_token, on_end, NULL},
    };
    return engine_open(&config, &f->engine, e);
}

static void side_open(struct side *f, const struct shape *shape)
{
    struct td_error e = {{0}};
    ck_assert_msg(try_open(f, shape, &e) == TD_OK, "%s", e.text);
}

static void side_close(struct side *f)
{
    for (uint32_t i = 0; i < f->n_runs; i++)
        engine_seq_close(f->engine, f->runs[i].seq);
    engine_close(f->engine);
    kernels_close_ranks(f->kernels, f->shape.n_tensor * f->shape.n_pipeline);
    model_close(f->model);
    json_decref(f->golden);
}

/* ------------------------------------------------------------------- sequences */

static struct run *start(struct side *f, const uint32_t *ids, uint32_t n, uint32_t max_tokens, enum seq_goal goal)
{
    struct run *r = &f->runs[f->n_runs++];
    struct td_error e = {{0}};
    ck_assert(f->n_runs <= MAX_RUNS && n <= MAX_PROMPT && max_tokens <= MAX_TOKENS);
    memcpy(r->prompt, ids, n * sizeof(*ids));
    r->n_prompt = n;
    r->adopts = goal == SEQ_ADOPT;
    const struct seq_params p = {.ids = r->prompt,
                                 .n_ids = n,
                                 .n_prompt = n,
                                 .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = max_tokens},
                                 .goal = goal,
                                 /* A root of its own, so that nothing is found in the cache. */
                                 .root.b = {(uint8_t)f->n_runs},
                                 .prompt_logprobs = goal == SEQ_GENERATE && f->n_runs % 3 == 0,
                                 .user = r};
    ck_assert_msg(engine_seq_open(f->engine, &p, &r->seq, &e) == TD_OK, "%s", e.text);
    return r;
}

static void run_all(struct side *f)
{
    for (bool left = true; left;) {
        left = false;
        for (uint32_t i = 0; i < f->n_runs; i++)
            left |= !f->runs[i].ended;
        ck_assert(!left || engine_step(f->engine) > 0);
    }
    for (uint32_t i = 0; i < f->n_runs; i++) {
        const struct prompt_scores *scores = engine_seq_prompt_scores(f->runs[i].seq);
        for (uint32_t t = 1; scores && t < scores->n; t++)
            f->runs[i].prompt_logprobs[t] = scores->logprobs[t];
    }
}

static uint32_t golden_prompt(const struct side *f, size_t i, uint32_t *ids, uint32_t *n_out)
{
    json_t *cases = json_object_get(f->golden, "cases"), *c = json_array_get(cases, i % json_array_size(cases));
    json_t *prompt = json_object_get(c, "prompt_ids");
    uint32_t n = (uint32_t)json_array_size(prompt);
    for (uint32_t j = 0; j < n && j < MAX_PROMPT; j++)
        ids[j] = (uint32_t)json_integer_value(json_array_get(prompt, j));
    *n_out = n < MAX_PROMPT ? n : MAX_PROMPT;
    return (uint32_t)json_array_size(json_object_get(c, "greedy_ids"));
}

/* Runs five prompts of the directory together, one more that announces its pages, and a long one that is cut
 * into chunks. */
static void run_some(struct side *f)
{
    uint32_t ids[MAX_PROMPT], n, vocab = model_config(f->model)->vocab_size;
    for (size_t i = 0; i < 5; i++) {
        uint32_t max = golden_prompt(f, i, ids, &n);
        start(f, ids, n, max < 24 ? max : 24, SEQ_GENERATE);
    }
    golden_prompt(f, 5, ids, &n);
    start(f, ids, n, 8, SEQ_FIRST_TOKEN);
    for (uint32_t i = 0; i < 180; i++)
        ids[i] = 2 + (i * i * 7 + 3) % (vocab - 2);
    start(f, ids, 180, 8, SEQ_FIRST_TOKEN);
    run_all(f);
}

static void check_told_pages(const struct side *f)
{
    const struct kv_layout *l = engine_layout(f->engine);
    for (uint32_t i = 0; i < f->n_runs; i++) {
        const struct run *r = &f->runs[i];
        uint64_t sum = 0;
        for (uint32_t p = 0; p < r->n_told; p++)
            sum += sum_of(f, r, p, 0, l->n_layers);
        if (!l->window) /* with a window some pages are given up */
            ck_assert_uint_eq(sum, r->told_sum);
    }
    ck_assert_uint_eq(f->runs[f->n_runs - 1].n_told, (180 + PAGE_TOKENS - 1) / PAGE_TOKENS);
}

static void check_same(const struct side *one, const struct side *several)
{
    uint64_t bytes;
    ck_assert_uint_eq(one->n_runs, several->n_runs);
    for (uint32_t i = 0; i < one->n_runs; i++) {
        const struct run *a = &one->runs[i], *b = &several->runs[i];
        ck_assert_uint_eq(a->n_tokens, b->n_tokens);
        ck_assert_msg(!memcmp(a->tokens, b->tokens, sizeof(a->tokens)), "tokens of sequence %u", i);
        ck_assert_msg(!memcmp(a->logprobs, b->logprobs, sizeof(a->logprobs)), "log-probabilities of sequence %u", i);
        ck_assert_msg(!memcmp(a->prompt_logprobs, b->prompt_logprobs, sizeof(a->prompt_logprobs)),
                      "log-probabilities of the prompt of sequence %u", i);
    }
    const void *pages = kvpool_arena(engine_pool(one->engine), &bytes);
    ck_assert_msg(!memcmp(pages, kvpool_arena(engine_pool(several->engine), &bytes), bytes), "pages differ");
}

/* ------------------------------------------------------------------------ tests */

static const struct shape SHAPES[] = {{2, 1, COMPUTE_F32},  {1, 2, COMPUTE_F32},  {2, 2, COMPUTE_F32},
                                      {2, 1, COMPUTE_BF16}, {1, 2, COMPUTE_BF16}, {2, 2, COMPUTE_BF16}};

START_TEST(test_ranks_give_the_bits_of_one)
{
    static struct side one, several;
    side_open(&one, &(struct shape){1, 1, SHAPES[_i].compute});
    run_some(&one);
    check_told_pages(&one);
    side_open(&several, &SHAPES[_i]);
    run_some(&several);
    check_told_pages(&several);
    check_same(&one, &several);
    struct block_key a = engine_fingerprint(one.engine), b = engine_fingerprint(several.engine);
    ck_assert_mem_eq(a.b, b.b, sizeof(a.b));
    side_close(&one);
    side_close(&several);
}
END_TEST

/* Copies the prompt's pages from the first engine to the second, as the wire would: whole pages. */
static void hand_over(struct side *from, struct side *to, uint32_t i)
{
    struct run *first = &from->runs[i], *second = &to->runs[i];
    uint32_t n, begin = engine_seq_first_page(second->seq);
    const struct page_ref *a = engine_seq_pages(first->seq, &n), *b = engine_seq_pages(second->seq, &n);
    for (uint32_t p = begin; p < n; p++)
        memcpy(kvpool_address(engine_pool(to->engine), b[p]), kvpool_address(engine_pool(from->engine), a[p]),
               kv_layout_page_bytes(engine_layout(to->engine)));
    engine_seq_filled(to->engine, second->seq, first->n_prompt);
    second->tokens[second->n_tokens++] = first->tokens[0];
    engine_seq_append(to->engine, second->seq, first->tokens[0]);
}

START_TEST(test_ranks_hand_pages_to_any_other_number)
{
    static const struct shape PAIRS[][2] = {{{2, 1, COMPUTE_F32}, {1, 1, COMPUTE_F32}},
                                            {{1, 1, COMPUTE_F32}, {2, 2, COMPUTE_F32}},
                                            {{1, 2, COMPUTE_F32}, {2, 1, COMPUTE_F32}}};
    static struct side from, to;
    uint32_t ids[MAX_PROMPT], n;
    side_open(&from, &PAIRS[_i][0]);
    side_open(&to, &PAIRS[_i][1]);
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t max = golden_prompt(&from, i, ids, &n);
        start(&from, ids, n, max, SEQ_FIRST_TOKEN);
        start(&to, ids, n, max, SEQ_ADOPT);
    }
    run_all(&from);
    ck_assert_uint_eq(engine_step(to.engine), 0); /* it is admitted, and waits */
    for (uint32_t i = 0; i < 4; i++)
        hand_over(&from, &to, i);
    run_all(&to);
    for (uint32_t i = 0; i < 4; i++) {
        json_t *want = json_object_get(json_array_get(json_object_get(to.golden, "cases"), i), "greedy_ids");
        ck_assert_uint_eq(to.runs[i].n_tokens, json_array_size(want));
        for (uint32_t t = 0; t < to.runs[i].n_tokens; t++)
            ck_assert_int_eq(to.runs[i].tokens[t], json_integer_value(json_array_get(want, t)));
    }
    side_close(&from);
    side_close(&to);
}
END_TEST

/* Query heads of a latent layer can be on any rank, and shares may differ; other query heads go with their KV
 * heads. */
START_TEST(test_ranks_share_what_can_be_shared_or_name_both_numbers)
{
    static struct side one, three;
    struct td_error e = {{0}};
    char want[64];
    const struct shape shape = {3, 1, COMPUTE_F32};
    enum td_status s = try_open(&three, &shape, &e);
    const struct model_config *c = model_config(three.model);
    if (c->family->latent || c->n_kv_heads % 3 == 0) {
        ck_assert_msg(s == TD_OK, "%s", e.text);
        side_open(&one, &(struct shape){1, 1, COMPUTE_F32});
        run_some(&one);
        run_some(&three);
        check_same(&one, &three);
        side_close(&one);
    } else {
        snprintf(want, sizeof(want), "%u kv heads can't be shared evenly among 3", c->n_kv_heads);
        ck_assert_int_eq(s, TD_ERR_INVALID);
        ck_assert_msg(strstr(e.text, want) != NULL, "%s", e.text);
    }
    side_close(&three);
}
END_TEST

START_TEST(test_ranks_refuse_more_stages_than_layers)
{
    static struct side f;
    struct td_error e = {{0}};
    ck_assert_msg(model_open(golden_dir(), &f.model, &e) == TD_OK, "%s", e.text);
    uint32_t n_layers = model_config(f.model)->n_layers;
    model_close(f.model);
    if (n_layers >= MAX_RANKS)
        return;
    ck_assert_int_eq(try_open(&f, &(struct shape){1, n_layers + 1, COMPUTE_F32}, &e), TD_ERR_INVALID);
    ck_assert_msg(strstr(e.text, "layers can't be shared among") != NULL, "%s", e.text);
    side_close(&f);
}
END_TEST

/* Returns the number of files in a directory, and the state of the last one. Removes files and directory if
 * asked to. */
static uint32_t look_into(const char *dir, bool remove, struct stat *last_out)
{
    char path[4096];
    uint32_t n = 0;
    DIR *d = opendir(dir);
    ck_assert_ptr_nonnull(d);
    for (struct dirent *e; (e = readdir(d));) {
        snprintf(path, sizeof(path), "%s/%s", dir, e->d_name);
        if (e->d_name[0] == '.' || stat(path, last_out))
            continue;
        n++;
        ck_assert_msg(strstr(e->d_name, ".tmp") == NULL, "%s", e->d_name);
        if (remove)
            unlink(path);
    }
    closedir(d);
    if (remove)
        rmdir(dir);
    return n;
}

START_TEST(test_weights_packed_by_another_process_give_the_same_bits)
{
    static const struct shape CACHED[] = {{1, 1, COMPUTE_F32, WEIGHTS_AS_STORED},
                                          {1, 1, COMPUTE_F32, WEIGHTS_INT4},
                                          {1, 1, COMPUTE_BF16, WEIGHTS_INT8},
                                          {2, 2, COMPUTE_BF16, WEIGHTS_AS_STORED}};
    static struct side alone, first, second;
    struct shape shape = CACHED[_i];
    struct stat written, mapped;
    char dir[] = "/tmp/tandem-packed-XXXXXX";
    if (device_wanted() != DEVICE_CPU)
        return;
    ck_assert_ptr_nonnull(mkdtemp(dir));
    side_open(&alone, &shape);
    run_some(&alone);
    shape.weight_cache = dir;
    side_open(&first, &shape);
    ck_assert_uint_eq(look_into(dir, false, &written), shape.n_tensor * shape.n_pipeline);
    run_some(&first);
    side_open(&second, &shape);
    run_some(&second);
    ck_assert_uint_eq(look_into(dir, true, &mapped), shape.n_tensor * shape.n_pipeline);
    ck_assert_uint_eq(mapped.st_ino, written.st_ino); /* the file was not written again */
    check_same(&alone, &first);
    check_same(&alone, &second);
    ck_assert_uint_eq(engine_weight_bytes(alone.engine), engine_weight_bytes(second.engine));
    side_close(&alone);
    side_close(&first);
    side_close(&second);
}
END_TEST

/* Each process has several files to write. One could wait for a file that another process writes, while that
 * one waits for a file of the first. */
START_TEST(test_processes_that_write_packed_weights_of_several_ranks_do_not_wait_for_each_other)
{
    enum { N = 3, ROUNDS = 4, LIMIT_S = 40 }; /* a builder that stands still is waited for for 60 s */
    static struct side one;
    char dir[] = "/tmp/tandem-packed-XXXXXX";
    struct stat st;
    if (device_wanted() != DEVICE_CPU)
        return;
    for (int round = 0; round < ROUNDS; round++) {
        struct shape shape = {2, 2, COMPUTE_F32, WEIGHTS_AS_STORED, dir};
        pid_t children[N];
        time_t begun = time(NULL);
        strcpy(dir + sizeof(dir) - 7, "XXXXXX");
        ck_assert_ptr_nonnull(mkdtemp(dir));
        for (int i = 0; i < N; i++)
            if (!(children[i] = fork())) {
                side_open(&one, &shape);
                side_close(&one);
                _exit(0);
            }
        for (int i = 0; i < N; i++) {
            int status = 1;
            ck_assert_int_eq(waitpid(children[i], &status, 0), children[i]);
            ck_assert_int_eq(status, 0);
        }
        ck_assert_uint_eq(look_into(dir, true, &st), 4);
        ck_assert_int_lt(time(NULL) - begun, LIMIT_S);
    }
}
END_TEST

int main(void)
{
    if (skip_without_device("ranks"))
        return 0;
    Suite *s = suite_create("ranks");
    TCase *t = tcase_create("golden");
    tcase_set_timeout(t, 60);
    tcase_add_loop_test(t, test_ranks_give_the_bits_of_one, 0, (int)(sizeof(SHAPES) / sizeof(SHAPES[0])));
    tcase_add_loop_test(t, test_ranks_hand_pages_to_any_other_number, 0, 3);
    tcase_add_test(t, test_ranks_share_what_can_be_shared_or_name_both_numbers);
    tcase_add_test(t, test_ranks_refuse_more_stages_than_layers);
    tcase_add_loop_test(t, test_weights_packed_by_another_process_give_the_same_bits, 0, 4);
    if (tap_forks())
        tcase_add_test(t, test_processes_that_write_packed_weights_of_several_ranks_do_not_wait_for_each_other);
    suite_add_tcase(s, t);
    return tap_main(s);
}
