#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/random.h"
#include "bench/engine.h"

static void mix(struct bench_engine *b, uint64_t x)
{
    b->hash = random_mix(b->hash ^ x);
}

/* The hash also covers the order in which the sequences of a step are reported, which has to be the same. */
static void on_token(void *user, struct seq *seq, const struct sampled *token)
{
    struct bench_engine *b = user;
    uint32_t bits;
    (void)seq;
    memcpy(&bits, &token->logprob, sizeof(bits));
    mix(b, (uint64_t)token->id << 32 | bits);
    b->n_tokens++;
}

static void on_end(void *user, struct seq *seq, enum seq_finish finish)
{
    (void)seq, (void)finish;
    ((struct bench_engine *)user)->n_ended++;
}

static void on_admitted(void *user, struct seq *seq, uint32_t n_matched)
{
    (void)n_matched;
    const struct bench_engine *b = user;
    if (b->adopts)
        engine_seq_fill(b->engine, seq);
}

static void on_pages_ready(void *user, struct seq *seq, uint32_t first, uint32_t n, uint16_t begin, uint16_t end)
{
    (void)user, (void)seq, (void)first, (void)n, (void)begin, (void)end;
}

static void on_block(void *user, bool added, const struct block_key *key, uint32_t chain_index)
{
    (void)user, (void)added, (void)key, (void)chain_index;
}

static struct geometry_options options_of(const struct bench_options *o)
{
    return (struct geometry_options){.model = o->model,
                                     .dummy = o->model ? NULL : o->dummy,
                                     .numerics = o->numerics,
                                     .weights = o->weights,
                                     .kv_dtype = o->kv_dtype,
                                     .device = o->device,
                                     .invariant = o->invariant,
                                     .block_tokens = BENCH_PAGE_TOKENS};
}

enum td_status bench_engine_resolve(struct bench_engine *b, const struct bench_options *o, struct td_error *e)
{
    const struct geometry_options g = options_of(o);
    clock_init_real(&b->clock);
    return geometry_resolve(&g, &b->geometry, e);
}

enum td_status bench_engine_open(struct bench_engine *b, const struct bench_options *o, uint32_t pool_tokens,
                                 uint32_t max_rows, uint32_t chunk_tokens, struct td_error *e)
{
    const struct geometry_options g = options_of(o);
    struct kernels_config k = b->geometry.kernels;
    k.n_threads = (uint32_t)o->threads;
    enum td_status s = geometry_open_model(&g, &b->geometry, &b->model, e);
    if (!s)
        s = rank_options_open(&o->ranks, &k, b->kernels, e);
    if (s)
        return s;
    const struct engine_config c = {
        .kernels = b->kernels,
        .n_tensor = (uint32_t)o->ranks.n_tensor,
        .n_pipeline = (uint32_t)o->ranks.n_pipeline,
        .model = b->model,
        .compute = b->geometry.compute,
        .weights = b->geometry.weights,
        .kv_dtype = b->geometry.layout.dtype,
        .page_tokens = BENCH_PAGE_TOKENS,
        .n_pages = pool_tokens / BENCH_PAGE_TOKENS,
        .max_batch = BENCH_ENGINE_SEQS,
        .max_rows = max_rows,
        .chunk_tokens = chunk_tokens,
        .clock = &b->clock,
        .callbacks = {b, on_admitted, on_pages_ready, on_token, on_end, on_block},
    };
    return engine_open(&c, &b->engine, e);
}

void bench_engine_close(struct bench_engine *b)
{
    if (b->engine)
        bench_engine_close_seqs(b);
    engine_close(b->engine);
    kernels_close_ranks(b->kernels, K_MAX_RANKS);
    model_close(b->model);
}

enum td_status bench_engine_seq(struct bench_engine *b, uint32_t slot, uint32_t n_prompt, uint32_t max_tokens,
                                enum seq_goal goal, struct td_error *e)
{
    uint32_t *ids = mem_array(n_prompt, sizeof(*ids));
    for (uint32_t i = 0; i < n_prompt; i++)
        ids[i] = (uint32_t)(random_at(1, slot, i) % b->geometry.config.vocab_size);
    const struct seq_params p = {.ids = ids,
                                 .n_ids = n_prompt,
                                 .n_prompt = n_prompt,
                                 .sampling = {.top_p = 1, .repetition_penalty = 1, .max_tokens = max_tokens},
                                 .goal = goal,
                                 .chunk_tokens = b->seq_chunk_tokens};
    b->adopts = goal == SEQ_ADOPT;
    enum td_status s = engine_seq_open(b->engine, &p, &b->seqs[slot], e);
    free(ids);
    return s;
}

void bench_engine_close_seqs(struct bench_engine *b)
{
    for (uint32_t i = 0; i < BENCH_ENGINE_SEQS; i++) {
        engine_seq_close(b->engine, b->seqs[i]);
        b->seqs[i] = NULL;
    }
    kvpool_flush(engine_pool(b->engine)); /* the next repetition computes its prompts again */
}
