/* Adapters: compares an engine that has adapters with one whose weights contain them; and compares sequences
 * of several adapters in one batch with the same sequences alone, bit for bit. */
#include <math.h>

#include "base/random.h"
#include "engine/engine.h"
#include "model/adapter.h"
#include "tests/ask_device.h"
#include "tests/engine/checkpoint.h"

enum { N_ADAPTERS = 2, N_RUNS = 7, PROMPT = 40, TOKENS = 12, MAX_RANK = 6, MAX_MODULES = 8 };

/* The modules that an adapter changes in every layer, and its ranks. */
struct plan {
    const char *modules[MAX_MODULES];
    uint32_t ranks[MAX_MODULES];
    double alpha;
    bool by_root;
};

static const struct plan SPLIT[N_ADAPTERS] = {
    {{"self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"},
     {4, 4, 2, 4, 6},
     8,
     false},
    {{"self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj"}, {3, 1, 3}, 5, true}};
static const struct plan FUSED[N_ADAPTERS] = {
    {{"self_attn.qkv_proj", "self_attn.o_proj", "mlp.down_proj"}, {4, 3, 2}, 6, true},
    {{"self_attn.qkv_proj", "mlp.gate_up_proj"}, {2, 5}, 10, false}};
static const struct plan ATTENTION[N_ADAPTERS] = {{{"self_attn.q_proj", "self_attn.o_proj"}, {4, 4}, 8, false},
                                                  {{"self_attn.k_proj"}, {2}, 5, true}};

static const struct {
    const char *golden;
    const struct plan *plans;
} CASES[] = {{"mistral", SPLIT}, {"phi3", FUSED}, {"gemma3", SPLIT}, {"mixtral", ATTENTION}};
enum { N_CASES = sizeof(CASES) / sizeof(CASES[0]) };

static void golden_dir(char out[4096], int i)
{
    char path[128];
    snprintf(path, sizeof(path), "tests/model/golden/%s", CASES[i].golden);
    source_file(out, path);
}

static float *gaussian(size_t n, uint64_t seed, float scale)
{
    float *x = mem_array(n, sizeof(*x));
    for (size_t i = 0; i < n; i++)
        x[i] = (float)(random_unit(random_at(seed, 0, i)) + random_unit(random_at(seed, 1, i)) - 1) * scale;
    return x;
}

/* Adds B A of every module to the weights that it changes, and writes A and B. */
struct writer {
    const struct plan *plan;
    uint64_t seed;
    struct checkpoint adapter, merged;
};

static uint32_t find_module(const struct plan *p, const char *name)
{
    for (uint32_t i = 0; i < MAX_MODULES && p->modules[i]; i++) {
        char ending[64];
        snprintf(ending, sizeof(ending), ".%s.weight", p->modules[i]);
        size_t n = strlen(name), n_ending = strlen(ending);
        if (n > n_ending && !strcmp(name + n - n_ending, ending))
            return i;
    }
    return MAX_MODULES;
}

static void add_half(struct checkpoint *c, const char *tensor, char half, const float *x, uint64_t rows, uint64_t cols)
{
    char name[256];
    int n = (int)(strlen(tensor) - strlen(".weight"));
    snprintf(name, sizeof(name), "base_model.model.%.*s.lora_%c.weight", n, tensor, half);
    checkpoint_add(c, name, "F32", (uint64_t[]){rows, cols}, 2, x, rows * cols * sizeof(*x));
}

static void write_tensor(struct writer *w, const struct tensor *t, uint64_t seed)
{
    uint64_t n = 1, rows = t->shape[0], cols = t->n_dims > 1 ? t->shape[1] : 1;
    for (uint32_t d = 0; d < t->n_dims; d++)
        n *= t->shape[d];
    float *x = mem_array(n, sizeof(*x));
    k_convert_to_f32(t->data, t->type, n, x);
    uint32_t m = find_module(w->plan, t->name);
    if (m < MAX_MODULES) {
        uint32_t rank = w->plan->ranks[m];
        double scale = w->plan->alpha / (w->plan->by_root ? sqrt(rank) : rank);
        float *a = gaussian(rank * cols, seed, 0.2f), *b = gaussian(rows * rank, seed + 1, 0.2f);
        add_half(&w->adapter, t->name, 'A', a, rank, cols);
        add_half(&w->adapter, t->name, 'B', b, rows, rank);
        for (uint64_t o = 0; o < rows; o++)
            for (uint64_t i = 0; i < cols; i++) {
                double sum = 0;
                for (uint32_t r = 0; r < rank; r++)
                    sum += (double)b[o * rank + r] * (double)a[r * cols + i];
                x[o * cols + i] = (float)((double)x[o * cols + i] + scale * sum);
            }
        free(a);
        free(b);
    }
    checkpoint_add(&w->merged, t->name, "F32", t->shape, t->n_dims, x, n * sizeof(*x));
    free(x);
}

static void write_config(const struct writer *w, const char *more)
{
    char path[4200];
    json_error_t je;
    json_t *config = json_pack("{s:s, s:f, s:b, s:s}", "peft_type", "LORA", "lora_alpha", w->plan->alpha, "use_rslora",
                               w->plan->by_root, "bias", "none"),
           *other = json_loads(more, 0, &je);
    json_object_update(config, other);
    json_decref(other);
    snprintf(path, sizeof(path), "%s/adapter_config.json", w->adapter.dir);
    ck_assert_int_eq(json_dump_file(config, path, 0), 0);
    json_decref(config);
}

static void write_both(struct writer *w, int i, uint32_t adapter)
{
    char dir[4096];
    struct safetensors *file = NULL;
    struct td_error e;
    golden_dir(dir, i);
    *w = (struct writer){.plan = &CASES[i].plans[adapter]};
    checkpoint_new(&w->adapter);
    checkpoint_begin(&w->merged, dir, "{\"torch_dtype\": \"float32\"}", NULL);
    write_config(w, "{}");
    ck_assert_int_eq(safetensors_open_dir(dir, &file, &e), TD_OK);
    for (uint32_t t = 0; t < safetensors_count(file); t++)
        write_tensor(w, safetensors_at(file, t), 100 * (adapter + 1) + 2 * t);
    safetensors_close(file);
    checkpoint_end_as(&w->adapter, "adapter_model.safetensors");
    checkpoint_end(&w->merged);
}

static void remove_both(const struct writer *w)
{
    checkpoint_remove(&w->adapter);
    checkpoint_remove(&w->merged);
}

/* ----------------------------------------------------------------- engines */

struct run {
    struct seq *seq;
    uint32_t tokens[TOKENS], n_tokens;
    float logprobs[TOKENS], prompt_logprobs[PROMPT];
    bool ended;
};

static void on_admitted(void *user, struct seq *seq, uint32_t n)
{
    (void)user, (void)seq, (void)n;
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

struct side {
    struct clock clock;
    struct model *model;
    struct kernels *kernels[4];
    struct adapter *adapters[N_ADAPTERS];
    struct engine *engine;
    uint32_t n_ranks;
};

struct setting {
    const char *dir;
    enum compute compute;
    const struct writer *adapters; /* [N_ADAPTERS], or NULL */
    uint32_t n_tensor, n_pipeline;
};

static void side_open(struct side *f, const struct setting *s)
{
    struct td_error e = {{0}};
    *f = (struct side){.n_ranks = s->n_tensor * s->n_pipeline};
    clock_init_real(&f->clock);
    ck_assert_msg(!model_open(s->dir, &f->model, &e), "%s", e.text);
    for (uint32_t i = 0; i < N_ADAPTERS && s->adapters; i++)
        ck_assert_msg(!adapter_open(s->adapters[i].adapter.dir, model_config(f->model), &f->adapters[i], &e), "%s",
                      e.text);
    const struct kernels_config k = {.device = device_wanted(), .n_threads = 2, .compute = s->compute};
    ck_assert_msg(!kernels_open_ranks(&k, f->n_ranks, true, f->kernels, &e), "%s", e.text);
    const struct engine_config c = {.kernels = f->kernels,
                                    .n_tensor = s->n_tensor,
                                    .n_pipeline = s->n_pipeline,
                                    .piece_rows = 23,
                                    .model = f->model,
                                    .adapters = f->adapters,
                                    .n_adapters = s->adapters ? N_ADAPTERS : 0,
                                    .compute = s->compute,
                                    .kv_dtype = s->compute == COMPUTE_F32 ? NUM_F32 : NUM_BF16,
                                    .page_tokens = 16,
                                    .n_pages = 100,
                                    .max_batch = N_RUNS,
                                    .max_rows = 100,
                                    .chunk_tokens = 27,
                                    .clock = &f->clock,
                                    .callbacks = {NULL, on_admitted, NULL, on_token, on_end, NULL}};
    ck_assert_msg(!engine_open(&c, &f->engine, &e), "%s", e.text);
}

static void side_close(struct side *f)
{
    engine_close(f->engine);
    kernels_close_ranks(f->kernels, f->n_ranks);
    for (uint32_t i = 0; i < N_ADAPTERS; i++)
        adapter_close(f->adapters[i]);
    model_close(f->model);
}

/* The adapter of run i. Each run has a prompt of its own, too. */
static uint32_t adapter_of(uint32_t i)
{
    return (uint32_t[]){1, 0, 2, 1, 2, 0, 1}[i];
}

static void start(struct side *f, struct run *r, uint32_t i, uint32_t adapter)
{
    uint32_t ids[PROMPT], vocab = model_config(f->model)->vocab_size;
    struct td_error e = {{0}};
    *r = (struct run){0};
    for (uint32_t t = 0; t < PROMPT; t++)
        ids[t] = (uint32_t)(random_at(9, i, t) % vocab);
    const struct seq_params p = {.ids = ids,
                                 /* Different lengths, so that steps mix prompts and decoding. */
                                 .n_ids = PROMPT - i,
                                 .n_prompt = PROMPT - i,
                                 .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = TOKENS},
                                 .root.b = {(uint8_t)(1 + i), (uint8_t)adapter},
                                 .adapter = adapter,
                                 .prompt_logprobs = true,
                                 .user = r};
    ck_assert_msg(!engine_seq_open(f->engine, &p, &r->seq, &e), "%s", e.text);
}

static void finish(struct side *f, struct run *r, uint32_t i)
{
    while (!r->ended)
        ck_assert_uint_gt(engine_step(f->engine), 0);
    const float *logprobs = engine_seq_prompt_scores(r->seq)->logprobs;
    for (uint32_t t = 1; t < PROMPT - i; t++)
        r->prompt_logprobs[t] = logprobs[t];
    engine_seq_close(f->engine, r->seq);
    r->seq = NULL;
}

static void run_alone(struct side *f, struct run *r, uint32_t i, uint32_t adapter)
{
    start(f, r, i, adapter);
    finish(f, r, i);
}

static void run_together(const struct setting *s, struct run runs[N_RUNS])
{
    struct side f;
    side_open(&f, s);
    for (uint32_t i = 0; i < N_RUNS; i++)
        start(&f, &runs[i], i, adapter_of(i));
    for (uint32_t i = 0; i < N_RUNS; i++)
        finish(&f, &runs[i], i);
    side_close(&f);
}

/* -------------------------------------------------------------------- tests */

START_TEST(test_adapter_gives_what_merged_weights_give)
{
    char dir[4096];
    golden_dir(dir, _i);
    struct writer writers[N_ADAPTERS];
    for (uint32_t a = 0; a < N_ADAPTERS; a++)
        write_both(&writers[a], _i, a);
    struct side f;
    side_open(&f, &(struct setting){dir, COMPUTE_F32, writers, 1, 1});
    struct run base;
    run_alone(&f, &base, 0, 0);
    for (uint32_t a = 0; a < N_ADAPTERS; a++) {
        struct side merged;
        struct run got, want;
        double changed = 0;
        side_open(&merged, &(struct setting){writers[a].merged.dir, COMPUTE_F32, NULL, 1, 1});
        run_alone(&f, &got, 0, a + 1);
        run_alone(&merged, &want, 0, 0);
        for (uint32_t t = 1; t < PROMPT; t++) {
            ck_assert_float_eq_tol(got.prompt_logprobs[t], want.prompt_logprobs[t], 2e-3f);
            changed += fabs((double)(got.prompt_logprobs[t] - base.prompt_logprobs[t]));
        }
        ck_assert_msg(changed > 0.05 * PROMPT, "adapter %u changes %g", a, changed);
        side_close(&merged);
    }
    side_close(&f);
    for (uint32_t a = 0; a < N_ADAPTERS; a++)
        remove_both(&writers[a]);
}
END_TEST

static void equal(const struct run *a, const struct run *b, const char *what)
{
    ck_assert_uint_eq(a->n_tokens, TOKENS);
    if (memcmp(a->tokens, b->tokens, sizeof(a->tokens)) || memcmp(a->logprobs, b->logprobs, sizeof(a->logprobs)) ||
        memcmp(a->prompt_logprobs, b->prompt_logprobs, sizeof(a->prompt_logprobs)))
        ck_abort_msg("another text %s", what);
}

START_TEST(test_sequences_of_several_adapters_are_as_alone_and_on_any_ranks)
{
    char dir[4096];
    golden_dir(dir, _i);
    struct writer writers[N_ADAPTERS];
    for (uint32_t a = 0; a < N_ADAPTERS; a++)
        write_both(&writers[a], _i, a);
    for (enum compute compute = COMPUTE_F32; compute <= COMPUTE_BF16; compute++) {
        const struct setting s = {dir, compute, writers, 1, 1}, two = {dir, compute, writers, 2, 1},
                             stages = {dir, compute, writers, 1, 2}, plain = {dir, compute, NULL, 1, 1};
        struct run together[N_RUNS], other[N_RUNS], alone;
        struct side f;
        run_together(&s, together);
        side_open(&f, &s);
        for (uint32_t i = 0; i < N_RUNS; i++) {
            run_alone(&f, &alone, i, adapter_of(i));
            equal(&alone, &together[i], "alone");
        }
        side_close(&f);
        side_open(&f, &plain);
        run_alone(&f, &alone, 1, 0);
        equal(&alone, &together[1], "of an engine without adapters");
        side_close(&f);
        run_together(&two, other);
        for (uint32_t i = 0; i < N_RUNS; i++)
            equal(&other[i], &together[i], "on two ranks");
        run_together(&stages, other);
        for (uint32_t i = 0; i < N_RUNS; i++)
            equal(&other[i], &together[i], "in two stages");
    }
    for (uint32_t a = 0; a < N_ADAPTERS; a++)
        remove_both(&writers[a]);
}
END_TEST

static void refused(const struct writer *w, const struct model *model, const char *word)
{
    struct adapter *a = NULL;
    struct td_error e = {{0}};
    ck_assert_int_ne(adapter_open(w->adapter.dir, model_config(model), &a, &e), TD_OK);
    ck_assert_ptr_null(a);
    ck_assert_msg(strstr(e.text, word), "'%s' does not say %s", e.text, word);
}

START_TEST(test_adapters_that_do_not_fit_are_refused_by_name)
{
    static const char *const CONFIGS[][2] = {{"{\"peft_type\": \"IA3\"}", "peft_type"},
                                             {"{\"use_dora\": true}", "use_dora"},
                                             {"{\"bias\": \"all\"}", "bias"},
                                             {"{\"modules_to_save\": [\"lm_head\"]}", "modules_to_save"},
                                             {"{\"alpha_pattern\": {\"q_proj\": 4}}", "alpha_pattern"},
                                             {"{\"lora_alpha\": null}", "lora_alpha"}};
    char dir[4096], path[4096];
    struct td_error e = {{0}};
    struct writer w;
    struct model *model = NULL, *other = NULL;
    struct adapter *a = NULL;
    golden_dir(dir, 0);
    write_both(&w, 0, 0);
    ck_assert_int_eq(model_open(dir, &model, &e), TD_OK);
    for (size_t i = 0; i < sizeof(CONFIGS) / sizeof(CONFIGS[0]); i++) {
        write_config(&w, CONFIGS[i][0]);
        refused(&w, model, CONFIGS[i][1]);
    }
    write_config(&w, "{}");
    ck_assert_int_eq(adapter_open(w.adapter.dir, model_config(model), &a, &e), TD_OK);
    adapter_close(a);
    ck_assert_int_eq(model_open(source_file(dir, "tests/model/golden/deepseek_v2"), &other, &e), TD_OK);
    refused(&w, other, "lora_");
    model_close(other);
    ck_assert_int_eq(model_open(source_file(dir, "tests/model/golden/phi3"), &other, &e), TD_OK);
    refused(&w, other, "lora_");
    model_close(other);
    snprintf(path, sizeof(path), "%s/adapter_model.safetensors", w.adapter.dir);
    ck_assert_int_eq(truncate(path, 100), 0);
    refused(&w, model, "safetensors");
    model_close(model);
    remove_both(&w);
}
END_TEST

START_TEST(test_engine_refuses_an_adapter_that_it_has_not)
{
    char dir[4096];
    struct side f;
    struct td_error e = {{0}};
    struct seq *seq = NULL;
    const uint32_t ids[] = {1, 2, 3};
    golden_dir(dir, 0);
    side_open(&f, &(struct setting){dir, COMPUTE_F32, NULL, 1, 1});
    const struct seq_params p = {.ids = ids,
                                 .n_ids = 3,
                                 .n_prompt = 3,
                                 .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = 1},
                                 .adapter = 1};
    ck_assert_int_eq(engine_seq_open(f.engine, &p, &seq, &e), TD_ERR_INVALID);
    ck_assert_ptr_nonnull(strstr(e.text, "adapter"));
    side_close(&f);
}
END_TEST

int main(void)
{
    if (skip_without_device("lora"))
        return 0;
    Suite *s = suite_create("lora");
    TCase *t = tcase_create("lora");
    tcase_set_timeout(t, 120);
    tcase_add_loop_test(t, test_adapter_gives_what_merged_weights_give, 0, N_CASES);
    tcase_add_loop_test(t, test_sequences_of_several_adapters_are_as_alone_and_on_any_ranks, 0, N_CASES);
    tcase_add_test(t, test_adapters_that_do_not_fit_are_refused_by_name);
    tcase_add_test(t, test_engine_refuses_an_adapter_that_it_has_not);
    suite_add_tcase(s, t);
    return tap_main(s);
}
