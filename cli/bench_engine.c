/*
 * The engine on a made-up model: a prompt of 512 tokens, then decoding with 1, 8 and 32 sequences of a short context, where
 * time goes to streaming the weights.
 *
 * A time is the median over prompts or steps. Every repetition computes the same tokens; their hash, with the bits of the
 * log-probabilities (which the last logits make), stands beside the figures, and must not change from one to the next.
 *
 * Arithmetic counts the matrices and attention, each multiply-add as two; of a prompt only the last token meets the head.
 * Limits come from a short run of the kernels' own bench.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/random.h"
#include "cli/bench.h"
#include "engine/engine.h"
#include "kernels/bench.h"
#include "worker/geometry.h"

enum {
    PROMPT = 512,
    SHORT_PROMPT = 16,
    DECODE_STEPS = 16,
    MAX_SEQS = 32,
    PAGE_TOKENS = 16,
    PAGES = MAX_SEQS * (SHORT_PROMPT + DECODE_STEPS + PAGE_TOKENS) / PAGE_TOKENS + 2 * PROMPT / PAGE_TOKENS,
    MIN_REPEATS = 2,
    MAX_TIMES = 4096,
};

struct engine_bench {
    struct clock clock;
    struct geometry geometry;
    struct kernels *kernels;
    struct model *model;
    struct engine *engine;
    struct bench_rows *out;
    uint64_t row_ns;
    double read_gb_s, peak_gflop_s; /* limits */
    struct seq *seqs[MAX_SEQS];
    uint32_t n_tokens, n_ended; /* of the run in progress, all sequences together */
    uint64_t hash;
    uint64_t times[MAX_TIMES];
    uint32_t n_times;
};

static void mix(struct engine_bench *b, uint64_t x)
{
    b->hash = random_mix(b->hash ^ x);
}

/* The order in which sequences of a step are reported is a part of what has to repeat. */
static void on_token(void *user, struct seq *seq, const struct sampled *token)
{
    struct engine_bench *b = user;
    uint32_t bits;
    (void)seq;
    memcpy(&bits, &token->logprob, sizeof(bits));
    mix(b, (uint64_t)token->id << 32 | bits);
    b->n_tokens++;
}

static void on_end(void *user, struct seq *seq, enum seq_finish finish)
{
    (void)seq, (void)finish;
    ((struct engine_bench *)user)->n_ended++;
}

static void on_admitted(void *user, struct seq *seq, uint32_t n_matched)
{
    (void)user, (void)seq, (void)n_matched;
}

static void on_pages_ready(void *user, struct seq *seq, uint32_t first, uint32_t n, uint16_t begin, uint16_t end)
{
    (void)user, (void)seq, (void)first, (void)n, (void)begin, (void)end;
}

static void on_block(void *user, bool added, const struct block_key *key, uint32_t chain_index)
{
    (void)user, (void)added, (void)key, (void)chain_index;
}

/* ------------------------------------------------------------------- rows */

static int by_time(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static double median_seconds(struct engine_bench *b)
{
    qsort(b->times, b->n_times, sizeof(*b->times), by_time);
    return (double)b->times[b->n_times / 2] / (double)NS_PER_S;
}

static void add_time(struct engine_bench *b, uint64_t since)
{
    if (b->n_times < MAX_TIMES)
        b->times[b->n_times++] = clock_now(&b->clock) - since;
}

/* Of all weights, those that n_rows rows read: experts that no row chose stay where they are. */
static double share_read(const struct model_config *c, uint32_t n_rows)
{
    double all = (double)model_config_n_params(c), active = (double)model_config_n_active_params(c);
    double n = c->moe.n_experts, used = c->moe.n_used;
    if (n <= used)
        return 1;
    double expert = (all - active) / (n - used),
           chosen = n * (1 - pow(1 - used / n, n_rows)); /* were they drawn evenly */
    return (all - expert * (n - chosen)) / all;
}

/* n_rows tokens went through the layers and n_heads of them through the head, over n_keys pairs of query and key. */
static void add_rows(struct engine_bench *b, const char *name, uint32_t n_rows, uint32_t n_heads, double n_keys)
{
    const struct model_config *c = &b->geometry.config;
    double q = (double)c->n_heads * c->head_dim, head = (double)c->hidden * c->vocab_size;
    double layers = (double)model_config_n_active_params(c) - head * (c->tied_embeddings ? 1 : 2);
    double ops = 2 * (layers * n_rows + head * n_heads) + 4 * q * c->n_layers * n_keys;
    double bytes = (double)engine_weight_bytes(b->engine) * share_read(c, n_rows), seconds = median_seconds(b);
    bench_add(b->out, "tokens/s", n_rows / seconds, 0, "%s", name)->hash = b->hash;
    bench_add(b->out, "GB/s", bytes * 1e-9 / seconds, b->read_gb_s, "%s, weights streamed", name);
    bench_add(b->out, "GFLOP/s", ops * 1e-9 / seconds, b->peak_gflop_s, "%s, arithmetic", name);
}

/* -------------------------------------------------------------------- runs */

static enum td_status open_seq(struct engine_bench *b, uint32_t slot, uint32_t n_prompt, enum seq_goal goal,
                               struct td_error *e)
{
    uint32_t ids[PROMPT];
    for (uint32_t i = 0; i < n_prompt; i++)
        ids[i] = (uint32_t)(random_at(1, slot, i) % b->geometry.config.vocab_size);
    const struct seq_params p = {.ids = ids,
                                 .n_ids = n_prompt,
                                 .n_prompt = n_prompt,
                                 .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = DECODE_STEPS + 1},
                                 .goal = goal};
    return engine_seq_open(b->engine, &p, &b->seqs[slot], e);
}

static void close_seqs(struct engine_bench *b)
{
    for (uint32_t i = 0; i < MAX_SEQS; i++) {
        engine_seq_close(b->engine, b->seqs[i]);
        b->seqs[i] = NULL;
    }
    kvpool_flush(engine_pool(b->engine)); /* the next repetition computes its prompts again */
}

static enum td_status run_prefill(struct engine_bench *b, struct td_error *e)
{
    enum td_status s = open_seq(b, 0, PROMPT, SEQ_FIRST_TOKEN, e);
    uint64_t start = clock_now(&b->clock);
    while (!s && !b->n_ended)
        engine_step(b->engine);
    add_time(b, start);
    return s;
}

static enum td_status run_decode(struct engine_bench *b, uint32_t batch, struct td_error *e)
{
    enum td_status s = TD_OK;
    for (uint32_t i = 0; i < batch && !s; i++)
        s = open_seq(b, i, SHORT_PROMPT, SEQ_GENERATE, e);
    while (!s && b->n_tokens < batch)
        engine_step(b->engine);
    while (!s && !b->n_ended) {
        uint64_t start = clock_now(&b->clock);
        engine_step(b->engine);
        add_time(b, start);
    }
    return s;
}

/* batch 0: prefill. */
static enum td_status measure(struct engine_bench *b, const char *name, uint32_t batch, struct td_error *e)
{
    uint64_t start = clock_now(&b->clock), first_hash = 0;
    enum td_status s = TD_OK;
    b->n_times = 0;
    for (uint32_t i = 0; !s && (i < MIN_REPEATS || clock_now(&b->clock) - start < b->row_ns); i++) {
        b->n_tokens = b->n_ended = 0;
        b->hash = 1;
        s = batch ? run_decode(b, batch, e) : run_prefill(b, e);
        close_seqs(b);
        first_hash = i ? first_hash : b->hash;
        if (!s && b->hash != first_hash)
            s = td_fail(e, TD_ERR_CORRUPT, "%s: tokens or log-probabilities differ between repetitions", name);
    }
    double context = SHORT_PROMPT + DECODE_STEPS / 2.0;
    if (!s && batch)
        add_rows(b, name, batch, batch, context * batch);
    else if (!s)
        add_rows(b, name, PROMPT, 1, PROMPT * (PROMPT + 1) / 2.0);
    return s;
}

/* -------------------------------------------------------------- open, close */

static double limit_of(const struct kernels_bench *k, const char *name)
{
    for (uint32_t i = 0; i < k->n_rows; i++)
        if (!strcmp(k->rows[i].name, name))
            return k->rows[i].value;
    return 0;
}

static enum td_status measure_limits(struct engine_bench *b, uint32_t n_threads, struct td_error *e)
{
    struct kernels_bench *k = mem_zalloc(sizeof(*k));
    const struct kernels_bench_config c = {.n_threads = n_threads, .seconds_per_row = 0.05};
    const char *peak = b->geometry.compute == COMPUTE_F32 ? "f32 fma" : "bf16 pairs";
    enum td_status s = kernels_bench(&c, k, e);
    if (!s) {
        b->read_gb_s = limit_of(k, "memory read");
        b->peak_gflop_s = limit_of(k, peak);
        bench_add(b->out, "GB/s", b->read_gb_s, 0, "memory read");
        bench_add(b->out, "GFLOP/s", b->peak_gflop_s, 0, "%s", peak);
    }
    free(k);
    return s;
}

static enum td_status open_engine(struct engine_bench *b, uint32_t n_threads, struct td_error *e)
{
    const struct kernels_config k = {.n_threads = n_threads};
    enum td_status s = kernels_open(&k, &b->kernels, e);
    if (s)
        return s;
    const struct engine_config c = {
        .kernels = b->kernels,
        .model = b->model,
        .compute = b->geometry.compute,
        .kv_dtype = b->geometry.layout.dtype,
        .page_tokens = PAGE_TOKENS,
        .n_pages = PAGES,
        .max_batch = MAX_SEQS,
        .max_rows = PROMPT,
        .clock = &b->clock,
        .callbacks = {b, on_admitted, on_pages_ready, on_token, on_end, on_block},
    };
    return engine_open(&c, &b->engine, e);
}

enum td_status bench_engine(const struct bench_options *o, struct bench_rows *out, struct td_error *e)
{
    struct engine_bench *b = mem_zalloc(sizeof(*b));
    const struct geometry_options g = {
        .dummy = o->dummy, .numerics = o->numerics, .kv_dtype = "auto", .block_tokens = PAGE_TOKENS};
    clock_init_real(&b->clock);
    b->out = out;
    b->row_ns = (uint64_t)((o->seconds > 0 ? o->seconds : 2) * (double)NS_PER_S);
    enum td_status s = geometry_resolve(&g, &b->geometry, e);
    if (!s)
        s = measure_limits(b, (uint32_t)o->threads, e);
    if (!s)
        s = geometry_open_model(&g, &b->geometry, &b->model, e);
    if (!s)
        s = open_engine(b, (uint32_t)o->threads, e);
    if (!s)
        s = measure(b, "prefill 512 tokens", 0, e);
    if (!s)
        s = measure(b, "decode batch 1, context 16..32", 1, e);
    if (!s)
        s = measure(b, "decode batch 8, context 16..32", 8, e);
    if (!s)
        s = measure(b, "decode batch 32, context 16..32", MAX_SEQS, e);
    engine_close(b->engine);
    kernels_close(b->kernels);
    model_close(b->model);
    free(b);
    return s;
}
