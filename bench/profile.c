/*
 * Measures what tandem simulate needs to know of a worker on this machine: the times of single steps, and the
 * coefficients that fit them.
 *
 * Prompts of several lengths are computed in chunks, so there are chunks after many cached lengths. Batches
 * of several sizes decode with contexts of several lengths. Mixed steps compute a chunk of a prompt beside a
 * decoding batch; they are not part of the fit, but show how good the model of such a step is (sched/cost.h).
 * A time is the median of all steps of a kind. The file has these rows (replay/profile.h), so it can be read
 * again if the fit changes.
 */
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "bench/engine.h"
#include "replay/profile.h"

enum {
    CHUNK = 512,
    LONGEST = 4096,
    ANSWER = 17,
    MAX_BATCH = 16,
    BATCH_CONTEXT = 8192, /* most tokens of a batch's contexts, whose prompts must be computed first */
    MIXED_ANSWER = 128,   /* long enough for the batch to decode beside all of its prompts */
    MIN_CHUNK = 16,
    MIN_REPEATS = 3,
    MAX_KINDS = 256,
    MAX_TIMES = 1024,
};

struct profile_kind { /* steps that are alike; mixed steps have a prompt and a batch */
    double n_prompt, cached;
    uint32_t batch;
    double context; /* mean context of the sequences */
    double ms[MAX_TIMES];
    uint32_t n;
};

struct profile_bench {
    struct bench_engine m;
    uint64_t row_ns;
    uint32_t longest; /* longest prompt */
    struct profile_kind *kinds;
    uint32_t n_kinds;
    FILE *file; /* the rows are written to it; NULL: they are not written */
    bool is_counting;
    uint32_t n_rows, n_done;
    uint64_t told_ns;
};

static struct profile_kind *kind_of(struct profile_bench *b, double n_prompt, double cached, uint32_t batch,
                                    double context)
{
    for (uint32_t i = 0; i < b->n_kinds; i++) {
        struct profile_kind *k = &b->kinds[i];
        if (k->n_prompt == n_prompt && k->cached == cached && k->batch == batch && k->context == context)
            return k;
    }
    if (b->n_kinds == MAX_KINDS)
        return NULL;
    b->kinds[b->n_kinds] =
        (struct profile_kind){.n_prompt = n_prompt, .cached = cached, .batch = batch, .context = context};
    return &b->kinds[b->n_kinds++];
}

static void add_step(struct profile_kind *k, double ms)
{
    if (k && k->n < MAX_TIMES && ms > 0)
        k->ms[k->n++] = ms;
}

static double median(struct profile_kind *k)
{
    bench_sort(k->ms, k->n);
    return k->ms[k->n / 2];
}

/* ------------------------------------------------------------------- steps */

/* Runs a prompt alone; batch is not used. */
static enum td_status run_prompt(struct profile_bench *b, uint32_t batch, uint32_t n_prompt, struct td_error *e)
{
    (void)batch;
    enum td_status s = bench_engine_seq(&b->m, 0, n_prompt, 1, SEQ_FIRST_TOKEN, e);
    b->m.n_ended = 0;
    for (double cached = 0; !s && !b->m.n_ended;) {
        engine_step(b->m.engine);
        const struct cost_step step = engine_last_step(b->m.engine);
        add_step(kind_of(b, step.prefill_tokens, cached, 0, 0), step.ms);
        cached += step.prefill_tokens;
    }
    bench_engine_close_seqs(&b->m);
    return s;
}

static enum td_status run_batch(struct profile_bench *b, uint32_t batch, uint32_t context, struct td_error *e)
{
    enum td_status s = TD_OK;
    b->m.n_ended = b->m.n_tokens = 0;
    for (uint32_t i = 0; i < batch && !s; i++)
        s = bench_engine_seq(&b->m, i, context, ANSWER, SEQ_GENERATE, e);
    while (!s && !b->m.n_ended) {
        engine_step(b->m.engine);
        const struct cost_step step = engine_last_step(b->m.engine);
        if (!step.prefill_tokens && step.batch == batch)
            add_step(kind_of(b, 0, 0, batch, context + (ANSWER - 1) / 2), step.ms);
    }
    bench_engine_close_seqs(&b->m);
    return s;
}

/* Runs a prompt of two chunks beside the batch. */
static enum td_status run_beside(struct profile_bench *b, uint32_t batch, uint32_t slot, uint32_t chunk,
                                 struct td_error *e)
{
    b->m.seq_chunk_tokens = chunk;
    enum td_status s = bench_engine_seq(&b->m, slot, 2 * chunk, 1, SEQ_FIRST_TOKEN, e);
    b->m.seq_chunk_tokens = 0;
    for (double cached = 0; !s && cached < 2 * chunk;) {
        engine_step(b->m.engine);
        const struct cost_step step = engine_last_step(b->m.engine);
        if (step.batch == batch)
            add_step(kind_of(b, step.prefill_tokens, cached, batch, step.context / batch), step.ms);
        cached += step.prefill_tokens;
    }
    return s;
}

/* Runs one batch, and beside it a prompt for each size of chunk. */
static enum td_status run_mixed(struct profile_bench *b, uint32_t batch, uint32_t context, struct td_error *e)
{
    enum td_status s = TD_OK;
    b->m.n_ended = b->m.n_tokens = 0;
    for (uint32_t i = 0; i < batch && !s; i++)
        s = bench_engine_seq(&b->m, i, context, MIXED_ANSWER, SEQ_GENERATE, e);
    while (!s && engine_load(b->m.engine).waiting_tokens)
        engine_step(b->m.engine);
    for (uint32_t chunk = MIN_CHUNK, slot = batch; chunk <= CHUNK && 2 * chunk <= b->longest && !s; chunk *= 2)
        s = run_beside(b, batch, slot++, chunk, e);
    bench_engine_close_seqs(&b->m);
    return s;
}

typedef enum td_status run_kind(struct profile_bench *b, uint32_t batch, uint32_t n, struct td_error *e);

/* Prints the progress on stderr once a second, since the bench takes minutes. */
static void say_progress(struct profile_bench *b)
{
    uint64_t now = clock_now(&b->m.clock);
    b->n_done++;
    if (now < b->told_ns + NS_PER_S && b->n_done < b->n_rows)
        return;
    b->told_ns = now;
    fprintf(stderr, "tandem bench: profile: %u of %u rows\n", b->n_done, b->n_rows);
}

/* Repeats a kind of step. While b->is_counting, it only counts rows and runs nothing. */
static enum td_status repeat(struct profile_bench *b, run_kind *run, uint32_t batch, uint32_t n, struct td_error *e)
{
    uint64_t start = clock_now(&b->m.clock);
    if (b->is_counting) {
        b->n_rows++;
        return TD_OK;
    }
    enum td_status s = TD_OK;
    for (uint32_t i = 0; !s && (i < MIN_REPEATS || clock_now(&b->m.clock) - start < b->row_ns); i++)
        s = run(b, batch, n, e);
    if (!s)
        say_progress(b);
    return s;
}

static enum td_status measure_profile(struct profile_bench *b, struct td_error *e)
{
    enum td_status s = TD_OK;
    for (uint32_t n = 16; n <= b->longest && !s; n *= 2)
        s = repeat(b, run_prompt, 0, n, e);
    for (uint32_t batch = 1; batch <= MAX_BATCH && !s; batch *= 2)
        for (uint32_t n = 64; n <= b->longest && n * batch <= BATCH_CONTEXT && !s; n *= 4)
            s = repeat(b, run_batch, batch, n, e);
    for (uint32_t batch = 1; batch <= MAX_BATCH && !s; batch *= 4)
        for (uint32_t n = 64; n <= b->longest && n * batch <= BATCH_CONTEXT && !s; n *= 4)
            s = repeat(b, run_mixed, batch, n, e);
    return s;
}

/* -------------------------------------------------------------------- file */

static json_t *rows_as_json(struct profile_bench *b, const char *model)
{
    const struct geometry *g = &b->m.geometry;
    json_t *prefill = json_array(), *prefix = json_array(), *decode = json_array(), *mixed = json_array();
    for (uint32_t i = 0; i < b->n_kinds; i++) {
        struct profile_kind *k = &b->kinds[i];
        if (!k->n)
            continue;
        double ms = median(k);
        if (k->batch && k->n_prompt > 0)
            json_array_append_new(mixed, json_pack("{s:i, s:f, s:f, s:f, s:f}", "batch", (int)k->batch, "context",
                                                   k->context, "tokens", k->n_prompt, "prefix", k->cached, "ms", ms));
        else if (k->batch)
            json_array_append_new(
                decode, json_pack("{s:i, s:f, s:f}", "batch", (int)k->batch, "context", k->context, "ms", ms));
        else if (k->cached > 0)
            json_array_append_new(prefix, json_pack("{s:f, s:f, s:f}", "isl_total", k->cached + k->n_prompt, "prefix",
                                                    k->cached, "ms", ms));
        else
            json_array_append_new(prefill, json_pack("{s:i, s:f, s:f}", "batch", 1, "isl", k->n_prompt, "ms", ms));
    }
    return json_pack("{s:[{s:s, s:s, s:s, s:i, s:s, s:f, s:o, s:o, s:o, s:o}]}", "profiles", "gpu", "none", "model",
                     model, "backend", "tandem", "tp", 1, "precision", g->compute == COMPUTE_F32 ? "f32" : "bf16",
                     "kv_bytes_per_token", (double)kv_layout_page_bytes(&g->layout) / BENCH_PAGE_TOKENS, "prefill",
                     prefill, "prefill_prefix", prefix, "decode", decode, "mixed", mixed);
}

/* Opens the file before anything is measured, so that a bad name is reported at once. */
static enum td_status open_file(struct profile_bench *b, const char *path, struct td_error *e)
{
    b->file = path ? fopen(path, "w") : NULL;
    return path && !b->file ? td_fail(e, TD_ERR_IO, "--profile %s: %s", path, strerror(errno)) : TD_OK;
}

static enum td_status write_file(struct profile_bench *b, const char *text, struct td_error *e)
{
    bool ok = fputs(text, b->file) >= 0 && fputc('\n', b->file) >= 0;
    ok &= !fclose(b->file);
    b->file = NULL;
    return ok ? TD_OK : td_fail(e, TD_ERR_IO, "--profile: %s", strerror(errno));
}

/* ------------------------------------------------------------------ output */

static void add_mixed(const struct profile_mixed *m, struct bench_rows *out)
{
    bench_add(out, "%", 100 * m->sum_error, 0, "mixed steps: median error of the sum");
    bench_add(out, "%", 100 * m->smaller_error, 0, "mixed steps: less the smaller fixed part");
    bench_add(out, "%", 100 * m->model_error, 0, "mixed steps: less the decode step's fixed part (the model)");
    bench_add(out, "%", 100 * m->share_error, 0, "mixed steps: less %.2f of it, the best share", m->share);
}

static void add_rows(struct profile_bench *b, const struct worker_profile *fit, struct bench_rows *out)
{
    static const char *const OF_PREFILL[] = {"a chunk", "a token", "n (n + 2 cached)"};
    static const char *const OF_DECODE[] = {"a step", "a token of context", "a sequence"};
    const double *p = fit->cost.prefill, *d = fit->cost.decode;
    for (uint32_t i = 0; i < b->n_kinds; i++) {
        struct profile_kind *k = &b->kinds[i];
        double n = k->n_prompt;
        const struct cost_step step = {.n_prompts = n > 0,
                                       .prefill_tokens = (uint32_t)n,
                                       .prefill_square = n * (n + 2 * k->cached),
                                       .batch = k->batch,
                                       .context = k->batch * k->context};
        double fitted = cost_profile_step_ms(&fit->cost, &step);
        if (!k->n)
            continue;
        if (k->batch && n > 0)
            bench_add(out, "ms", median(k), fitted,
                      "prefill of %.0f after %.0f, decode of %u behind %.0f; limit: the fit", n, k->cached, k->batch,
                      k->context);
        else if (k->batch)
            bench_add(out, "ms", median(k), fitted, "decode of %u behind %.0f; limit: the fit", k->batch, k->context);
        else
            bench_add(out, "ms", median(k), fitted, "prefill of %.0f after %.0f; limit: the fit", n, k->cached);
    }
    for (int i = 0; i < 3; i++)
        bench_add(out, "us", p[i] * 1e3, 0, "prefill: %s", OF_PREFILL[i]);
    for (int i = 0; i < 3; i++)
        bench_add(out, "us", d[i] * 1e3, 0, "decode: %s", OF_DECODE[i]);
    bench_add(out, "%", 100 * fit->fit_error, 0, "mean error of the fit");
    add_mixed(&fit->mixed, out);
}

static enum td_status finish_profile(struct profile_bench *b, const struct bench_options *o, struct bench_rows *out,
                                     struct td_error *e)
{
    json_t *json = rows_as_json(b, o->model ? o->model : o->dummy);
    char *text = json_dumps(json, JSON_INDENT(1) | JSON_REAL_PRECISION(6));
    struct worker_profile fit;
    enum td_status s = text ? profile_parse(text, strlen(text), NULL, &fit, e)
                            : td_fail(e, TD_ERR_INVALID, "--model: its name is not UTF-8");
    if (!s && b->file)
        s = write_file(b, text, e);
    if (!s)
        add_rows(b, &fit, out);
    free(text);
    json_decref(json);
    return s;
}

enum td_status bench_profile(const struct bench_options *o, struct bench_rows *out, struct td_error *e)
{
    struct profile_bench *b = mem_zalloc(sizeof(*b));
    b->kinds = mem_array(MAX_KINDS, sizeof(*b->kinds));
    b->row_ns = (uint64_t)((o->seconds > 0 ? o->seconds : 1) * (double)NS_PER_S);
    enum td_status s = bench_engine_resolve(&b->m, o, e);
    if (!s)
        s = open_file(b, o->profile, e);
    if (!s) {
        uint32_t most = b->m.geometry.config.max_positions - MIXED_ANSWER;
        b->longest = most < LONGEST ? most : LONGEST;
        s = bench_engine_open(&b->m, o, 2 * BATCH_CONTEXT + MAX_BATCH * (MIXED_ANSWER + BENCH_PAGE_TOKENS),
                              CHUNK + MAX_BATCH, CHUNK, e);
    }
    b->is_counting = true;
    if (!s)
        s = measure_profile(b, e);
    b->is_counting = false;
    if (!s)
        s = measure_profile(b, e);
    if (!s)
        s = finish_profile(b, o, out, e);
    bench_engine_close(&b->m);
    if (b->file)
        fclose(b->file);
    free(b->kinds);
    free(b);
    return s;
}
