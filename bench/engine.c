/*
 * The engine on a model, made up by default: prompts, then decoding, by batch and context. On the CPU
 * contexts are short, and time goes to streaming the weights. On a device sequences adopt the KV of a long
 * context; all their pages hold the same gaussian numbers.
 *
 * A time is the median over prompts or steps, as the host sees them. Every repetition computes the same
 * tokens. The hash of the tokens and of the bits of their log-probabilities, which follow from the last
 * logits, stands beside the figures; it must be the same in every repetition.
 *
 * Arithmetic counts the matrices and attention, a multiply-add as two operations; only the last token of a
 * prompt goes through the head. Limits come from a short run of the kernels' own bench.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/random.h"
#include "bench/bench.h"
#include "bench/engine.h"
#include "bench/engine_trace.h"
#include "bench/kernels_bench.h"
#include "kernels/scalar.h"

enum {
    DECODE_STEPS = 16,
    UNTRACED_STEPS = 4,
    MIN_REPEATS = 2,
    MAX_TIMES = 4096,
    GATHER_REPEATS = 9,
    MAX_RUNS = 8,
    SAMPLE_BYTES = 4096
};

struct engine_run {
    uint32_t n_prompt; /* prompt tokens of each sequence */
    uint32_t batch;    /* decoding sequences; 0: the prompt itself is measured */
};

static const struct engine_run CPU_RUNS[MAX_RUNS] = {{512, 0}, {16, 1}, {16, 8}, {16, 32}};
static const struct engine_run DEVICE_RUNS[MAX_RUNS] = {{2048, 0},  {16384, 0},  {1024, 1},  {4096, 1},
                                                        {4096, 64}, {4096, 128}, {2048, 256}};

struct engine_bench {
    struct bench_engine m;
    struct bench_rows *out;
    uint64_t row_ns;
    double read_gb_s, peak_gflop_s; /* measured limits */
    uint64_t times[MAX_TIMES];
    uint32_t n_times;
    struct engine_trace *trace; /* NULL: not asked for */
    bool is_traced;             /* this repetition */
    uint8_t *page;              /* KV that arrives; NULL: not needed yet */
};

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
        b->times[b->n_times++] = clock_now(&b->m.clock) - since;
}

/* Share of all weights that n_rows rows read. Experts that no row chose are not read. */
static double share_read(const struct model_config *c, uint32_t n_rows)
{
    double all = (double)model_config_n_params(c), active = (double)model_config_n_active_params(c);
    double n = c->moe.n_experts, used = c->moe.n_used;
    if (n <= used)
        return 1;
    double expert = (all - active) / (n - used),
           chosen = n * (1 - pow(1 - used / n, n_rows)); /* expected number, if rows choose evenly */
    return (all - expert * (n - chosen)) / all;
}

/* Adds the time of the exchanges between ranks in a step of n_rows, measured by themselves, beside the step's
 * time. */
static void add_gathers(struct engine_bench *b, const char *name, uint32_t n_rows, double seconds)
{
    double times[GATHER_REPEATS];
    for (uint32_t i = 0; i < GATHER_REPEATS; i++)
        times[i] = engine_measure_gathers(b->m.engine, n_rows);
    bench_sort(times, GATHER_REPEATS);
    if (times[0] > 0)
        bench_add(b->out, "ms", times[GATHER_REPEATS / 2] * 1e3, seconds * 1e3, "%s, gathers of all ranks", name);
}

/* Adds rows for a step: n_rows tokens through the layers, n_heads of them through the head, n_keys pairs of
 * query and key, reading the KV of n_read tokens. */
static void add_rows(struct engine_bench *b, const char *name, uint32_t n_rows, uint32_t n_heads, double n_keys,
                     double n_read)
{
    const struct model_config *c = &b->m.geometry.config;
    double q = (double)c->n_heads * c->head_dim, head = (double)c->hidden * c->vocab_size;
    double layers = (double)model_config_n_active_params(c) - head * (c->tied_embeddings ? 1 : 2);
    double ops = 2 * (layers * n_rows + head * n_heads) + 4 * q * c->n_layers * n_keys;
    double kv = (double)kv_layout_page_bytes(&b->m.geometry.layout) / b->m.geometry.layout.page_tokens;
    double bytes = (double)engine_weight_bytes(b->m.engine) * share_read(c, n_rows) + kv * n_read,
           seconds = median_seconds(b);
    bench_add(b->out, "tokens/s", n_rows / seconds, 0, "%s", name)->hash = b->m.hash;
    bench_add(b->out, "GB/s", bytes * 1e-9 / seconds, b->read_gb_s, "%s, weights and KV read", name);
    bench_add(b->out, "GFLOP/s", ops * 1e-9 / seconds, b->peak_gflop_s, "%s, arithmetic", name);
    add_gathers(b, name, n_rows, seconds);
}

/* -------------------------------------------------------------------- runs */

static enum td_status run_prefill(struct engine_bench *b, const struct engine_run *r, struct td_error *e)
{
    enum td_status s = bench_engine_seq(&b->m, 0, r->n_prompt, DECODE_STEPS + 1, SEQ_FIRST_TOKEN, e);
    uint64_t start = clock_now(&b->m.clock);
    if (!s && b->is_traced)
        s = engine_trace_begin(b->trace, b->m.kernels[0], e);
    while (!s && !b->m.n_ended)
        engine_step(b->m.engine);
    if (b->is_traced)
        engine_trace_end(b->trace, b->m.kernels[0]);
    else
        add_time(b, start);
    return s;
}

static void store(enum num_type type, uint8_t *at, float x)
{
    uint16_t half = type == NUM_BF16 ? scalar_to_bf16(x) : scalar_to_f16(x);
    uint8_t quarter = scalar_to_e4m3(x);
    if (type == NUM_F32)
        memcpy(at, &x, sizeof(x));
    else if (type == NUM_F8_E4M3)
        *at = quarter;
    else
        memcpy(at, &half, sizeof(half));
}

/* Pages that arrive are all alike: gaussian numbers, in the KV's type. */
static uint8_t *make_page(const struct kv_layout *l)
{
    size_t bytes = kv_layout_page_bytes(l), size = num_type_bytes(l->dtype), n = bytes / size;
    uint8_t *page = mem_array(n, size);
    for (size_t i = 0; i < n; i++) {
        double u = random_unit(random_at(7, 0, 2 * i)), v = random_unit(random_at(7, 0, 2 * i + 1));
        store(l->dtype, page + i * size, (float)(sqrt(-2 * log(1 - u)) * cos(2 * 3.14159265358979 * v)));
    }
    return page;
}

/*
 * The KV of the prompts arrives, and a first token is appended. Prompts are whole pages, so a page of an
 * earlier repetition holds either its prompt or what was decoded, which differs from the first token on.
 */
static void fill_adopted(struct engine_bench *b, const struct engine_run *r)
{
    struct kvpool *pool = engine_pool(b->m.engine);
    size_t page_bytes = kv_layout_page_bytes(&b->m.geometry.layout);
    engine_step(b->m.engine); /* admits */
    b->page = b->page ? b->page : make_page(&b->m.geometry.layout);
    for (uint32_t i = 0; i < r->batch; i++) {
        uint32_t n_pages = 0;
        const struct page_ref *pages = engine_seq_pages(b->m.seqs[i], &n_pages);
        for (uint32_t p = engine_seq_first_page(b->m.seqs[i]); p < n_pages; p++) {
            uint8_t *at = kvpool_address(pool, pages[p]);
            if (memcmp(at, b->page, page_bytes < SAMPLE_BYTES ? page_bytes : SAMPLE_BYTES) != 0)
                memcpy(at, b->page, page_bytes); /* else it has them since the last repetition */
        }
        engine_seq_filled(b->m.engine, b->m.seqs[i], r->n_prompt);
        engine_seq_append(b->m.engine, b->m.seqs[i], 0);
        b->m.n_tokens++;
    }
}

static enum td_status run_decode(struct engine_bench *b, const struct engine_run *r, struct td_error *e)
{
    bool adopts = kernels_config(b->m.kernels[0])->device != DEVICE_CPU;
    enum td_status s = TD_OK;
    for (uint32_t i = 0; i < r->batch && !s; i++)
        s = bench_engine_seq(&b->m, i, r->n_prompt, DECODE_STEPS + 1, adopts ? SEQ_ADOPT : SEQ_GENERATE, e);
    if (!s && adopts)
        fill_adopted(b, r);
    while (!s && b->m.n_tokens < r->batch)
        engine_step(b->m.engine);
    for (uint32_t i = 0; !s && !b->m.n_ended; i++) {
        if (b->is_traced && i == UNTRACED_STEPS)
            s = engine_trace_begin(b->trace, b->m.kernels[0], e);
        uint64_t start = clock_now(&b->m.clock);
        engine_step(b->m.engine);
        if (!b->is_traced)
            add_time(b, start);
    }
    if (b->is_traced)
        engine_trace_end(b->trace, b->m.kernels[0]);
    return s;
}

static void name_of(const struct engine_run *r, char out[64])
{
    if (r->batch)
        snprintf(out, 64, "decode batch %u, context %u..%u", r->batch, r->n_prompt, r->n_prompt + DECODE_STEPS);
    else
        snprintf(out, 64, "prefill %u tokens", r->n_prompt);
}

static enum td_status run_once(struct engine_bench *b, const struct engine_run *r, struct td_error *e)
{
    b->m.n_tokens = b->m.n_ended = 0;
    b->m.hash = 1;
    enum td_status s = r->batch ? run_decode(b, r, e) : run_prefill(b, r, e);
    bench_engine_close_seqs(&b->m);
    return s;
}

/* One more repetition, whose operations go to the trace. */
static enum td_status trace_run(struct engine_bench *b, const struct engine_run *r, const char *name,
                                struct td_error *e)
{
    uint32_t n_steps = r->batch ? DECODE_STEPS - UNTRACED_STEPS : 1;
    b->is_traced = true;
    enum td_status s = run_once(b, r, e);
    b->is_traced = false;
    if (!s)
        engine_trace_rows(b->trace, name, n_steps, median_seconds(b) * 1e3, b->out);
    return s;
}

static enum td_status measure_run(struct engine_bench *b, const struct engine_run *r, struct td_error *e)
{
    uint64_t start = clock_now(&b->m.clock), first_hash = 0;
    uint32_t n_before = b->out->n;
    enum td_status s = TD_OK;
    char name[64];
    name_of(r, name);
    b->n_times = 0;
    for (uint32_t i = 0; !s && (i < MIN_REPEATS || clock_now(&b->m.clock) - start < b->row_ns); i++) {
        s = run_once(b, r, e);
        first_hash = i ? first_hash : b->m.hash;
        if (!s && b->m.hash != first_hash)
            s = td_fail(e, TD_ERR_CORRUPT, "%s: tokens or log-probabilities differ between repetitions", name);
    }
    double n = r->n_prompt, context = (n + DECODE_STEPS / 2.0) * r->batch;
    if (!s && r->batch)
        add_rows(b, name, r->batch, r->batch, context, context);
    else if (!s)
        add_rows(b, name, r->n_prompt, 1, n * (n + 1) / 2, n);
    if (!s && b->trace)
        s = trace_run(b, r, name, e);
    for (uint32_t i = n_before; i < b->out->n; i++) /* progress: the table is printed at the end */
        fprintf(stderr, "%s: %.2f %s\n", b->out->rows[i].name, b->out->rows[i].value, b->out->rows[i].unit);
    return s;
}

/* Whether the row is asked for: `only` is parts of names, joined by +; an empty one asks for all rows. */
static bool is_wanted(const struct engine_run *r, const char *only)
{
    char name[64], part[64];
    name_of(r, name);
    bool found = !*only;
    for (const char *at = only; *at && !found; at += *at == '+') {
        size_t n = strcspn(at, "+");
        snprintf(part, sizeof(part), "%.*s", (int)n, at);
        found = n && strstr(name, part);
        at += n;
    }
    return found;
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
    struct kernels_bench_config c = {.kernels = b->m.geometry.kernels, .seconds_per_row = 0.2, .limits_only = true};
    const char *bf16 = c.kernels.device == DEVICE_CPU ? "bf16 pairs" : "bf16 product";
    const char *peak = b->m.geometry.compute == COMPUTE_F32 ? "f32 fma" : bf16;
    c.kernels.n_threads = n_threads;
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

enum td_status bench_engine(const struct bench_options *o, struct bench_rows *out, struct td_error *e)
{
    struct engine_bench *b = mem_zalloc(sizeof(*b));
    b->out = out;
    b->trace = o->trace ? engine_trace_open() : NULL;
    b->row_ns = (uint64_t)((o->seconds > 0 ? o->seconds : 2) * (double)NS_PER_S);
    enum td_status s = bench_engine_resolve(&b->m, o, e);
    if (!s && o->trace && rank_options_n(&o->ranks) > 1)
        s = td_fail(e, TD_ERR_UNSUPPORTED, "--trace: one rank only");
    if (!s)
        s = measure_limits(b, (uint32_t)o->threads, e);
    const struct engine_run *runs = b->m.geometry.kernels.device == DEVICE_CPU ? CPU_RUNS : DEVICE_RUNS;
    uint32_t pool_tokens = 0, longest = 0;
    for (uint32_t i = 0; i < MAX_RUNS && runs[i].n_prompt; i++) {
        if (!is_wanted(&runs[i], o->only))
            continue;
        uint32_t tokens = (runs[i].batch ? runs[i].batch : 2) * (runs[i].n_prompt + 2 * DECODE_STEPS);
        pool_tokens = tokens > pool_tokens ? tokens : pool_tokens;
        longest = !runs[i].batch && runs[i].n_prompt > longest ? runs[i].n_prompt : longest;
    }
    if (!s && !pool_tokens)
        s = td_fail(e, TD_ERR_INVALID, "--only %s: no row's name contains it", o->only);
    if (!s)
        s = bench_engine_open(&b->m, o, pool_tokens, longest ? longest : BENCH_ENGINE_SEQS, 0, e);
    for (uint32_t i = 0; i < MAX_RUNS && runs[i].n_prompt && !s; i++)
        if (is_wanted(&runs[i], o->only))
            s = measure_run(b, &runs[i], e);
    bench_engine_close(&b->m);
    if (!s && b->trace)
        s = engine_trace_write(b->trace, o->trace, e);
    engine_trace_close(b->trace);
    free(b->page);
    free(b);
    return s;
}
