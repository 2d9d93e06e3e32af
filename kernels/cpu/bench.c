/*
 * The bench drives the public operations, and the pool directly for the limits: pieces of memory or of arithmetic are claimed
 * like pieces of an operation, so both suffer alike from a core that is busy elsewhere.
 *
 * Weights are rotated through copies that together exceed the caches, as the layers of a model do.
 */
#include "kernels/bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/pool.h"

enum { READ_PIECE = 1 << 20, PEAK_PIECES = 64, MAX_COPIES = 16, PAGE_TOKENS = 16, N_SEQS = 16 };

struct bench {
    struct kernels *k;
    struct pool *pool, *one; /* of all threads, of the caller alone */
    const struct cpu_ops *ops;
    struct clock clock;
    uint64_t row_ns;
    uint32_t shrink;
    size_t memory_bytes;
    uint8_t *memory; /* [2][memory_bytes]: what reads and copies go over */
    struct kernels_bench *out;
};

/* Rows of limits, in the order in which they stand. */
enum limit { LIMIT_READ_ONE, LIMIT_READ, LIMIT_COPY, LIMIT_F32, LIMIT_BF16, N_LIMITS };

/* Best time of one call, in seconds. */
static double best_seconds(const struct bench *b, void (*run)(void *arg), void *arg)
{
    uint64_t start = clock_now(&b->clock), best = UINT64_MAX;
    for (uint32_t i = 0; i < 3 || clock_now(&b->clock) - start < b->row_ns; i++) {
        uint64_t t = clock_now(&b->clock);
        run(arg);
        t = clock_now(&b->clock) - t;
        best = t < best ? t : best;
    }
    return (double)(best ? best : 1) / (double)NS_PER_S;
}

/* ------------------------------------------------------------------ limits */

struct limit_run {
    const struct bench *b;
    struct pool *pool;
    void (*piece)(void *arg, uint32_t piece, uint32_t thread);
    uint32_t n_pieces;
    double (*peak)(void);
};

static void run_limit(void *arg)
{
    struct limit_run *r = arg;
    pool_run(r->pool, r->piece, r, r->n_pieces);
}

static void read_piece(void *arg, uint32_t piece, uint32_t thread)
{
    (void)thread;
    const struct limit_run *r = arg;
    r->b->ops->read_stream(r->b->memory + (size_t)piece * READ_PIECE, READ_PIECE);
}

static void copy_piece(void *arg, uint32_t piece, uint32_t thread)
{
    (void)thread;
    const struct limit_run *r = arg;
    uint8_t *from = r->b->memory + (size_t)piece * READ_PIECE;
    memcpy(from + r->b->memory_bytes, from, READ_PIECE);
}

static void peak_piece(void *arg, uint32_t piece, uint32_t thread)
{
    (void)piece;
    (void)thread;
    const struct limit_run *r = arg;
    r->peak();
}

/* Raises the row to what is measured now. */
static void limit_row(struct bench *b, enum limit limit, const char *name, const char *unit, double value)
{
    struct kernels_bench_row *row = &b->out->rows[limit];
    snprintf(row->name, sizeof(row->name), "%s", name);
    row->unit = unit;
    row->value = value > row->value ? value : row->value;
}

/* Between any two shapes, so that a neighbour's burst on the machine doesn't lower the limits alone. */
static void measure_limits(struct bench *b)
{
    uint64_t row_ns = b->row_ns;
    b->row_ns /= 4;
    struct limit_run r = {.b = b, .pool = b->one, .piece = read_piece, .n_pieces = b->memory_bytes / READ_PIECE};
    double gigabytes = (double)b->memory_bytes * 1e-9;
    limit_row(b, LIMIT_READ_ONE, "memory read, 1 thread", "GB/s", gigabytes / best_seconds(b, run_limit, &r));
    r.pool = b->pool;
    limit_row(b, LIMIT_READ, "memory read", "GB/s", gigabytes / best_seconds(b, run_limit, &r));
    r.piece = copy_piece;
    limit_row(b, LIMIT_COPY, "memory copy", "GB/s", gigabytes / best_seconds(b, run_limit, &r));
    r = (struct limit_run){.b = b, .pool = b->pool, .piece = peak_piece, .n_pieces = PEAK_PIECES};
    r.peak = b->ops->peak_f32;
    double ops = r.peak() * PEAK_PIECES * 1e-9;
    limit_row(b, LIMIT_F32, "f32 fma", "GFLOP/s", ops / best_seconds(b, run_limit, &r));
    r.peak = b->ops->peak_bf16;
    ops = r.peak() * PEAK_PIECES * 1e-9;
    limit_row(b, LIMIT_BF16, "bf16 pairs", "GFLOP/s", ops / best_seconds(b, run_limit, &r));
    b->row_ns = row_ns;
}

/* -------------------------------------------------------------- operations */

/* An operation that moved bytes and did ops in some seconds; which limit binds it is settled in finish_rows(). */
struct work {
    double seconds, bytes, ops;
    enum limit arithmetic;
};

static void add_row(struct bench *b, struct work *works, const char *name, struct work work)
{
    struct kernels_bench_row *row = &b->out->rows[b->out->n_rows];
    snprintf(row->name, sizeof(row->name), "%s", name);
    works[b->out->n_rows++] = work;
}

static void finish_rows(struct kernels_bench *out, const struct work *works)
{
    for (uint32_t i = N_LIMITS; i < out->n_rows; i++) {
        const struct work *w = &works[i];
        struct kernels_bench_row *row = &out->rows[i];
        double memory = out->rows[LIMIT_READ].value, arithmetic = out->rows[w->arithmetic].value;
        bool by_memory = w->bytes / memory > w->ops / arithmetic;
        row->unit = by_memory ? "GB/s" : "GFLOP/s";
        row->limit = by_memory ? memory : arithmetic;
        row->value = (by_memory ? w->bytes : w->ops) * 1e-9 / w->seconds;
        row->share = row->value / row->limit;
    }
}

/* bf16 numbers between 1/64 and 1/32 in size, of both signs: no sum overflows and none becomes subnormal. */
static void fill_bf16(uint16_t *to, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = (uint16_t)(0x3c80 | (i * 2654435761u >> 16 & 0x807f));
}

struct linear_bench {
    struct kernels *k;
    struct k_matrix *copies[MAX_COPIES];
    uint32_t n_copies, n_rows;
    float *x, *y;
};

static void run_copies(void *arg)
{
    const struct linear_bench *l = arg;
    for (uint32_t i = 0; i < l->n_copies; i++)
        k_linear(l->k, l->copies[i], l->x, l->n_rows, l->y, false);
}

static enum td_status pack_copies(struct bench *b, struct linear_bench *l, uint32_t n_out, uint32_t n_in,
                                  enum compute compute)
{
    size_t n = (size_t)n_out * n_in;
    uint16_t *w = mem_array(n, sizeof(*w));
    fill_bf16(w, n);
    struct k_matrix_part part = {.data = w, .type = NUM_BF16, .n_out = n_out};
    enum td_status s = TD_OK;
    uint32_t wanted = (uint32_t)(b->memory_bytes / 2 / (n * 2));
    wanted = wanted < 1 ? 1 : wanted > MAX_COPIES ? MAX_COPIES : wanted;
    for (; !s && l->n_copies < wanted; l->n_copies += !s)
        s = k_matrix_pack(b->k, &part, 1, n_in, compute, &l->copies[l->n_copies]);
    free(w);
    return s;
}

static enum td_status bench_shape(struct bench *b, struct work *works, uint32_t n_out, uint32_t n_in,
                                  enum compute compute)
{
    static const uint32_t N_ROWS[] = {1, 8, 64, 512};
    struct linear_bench l = {.k = b->k};
    l.x = mem_array((size_t)512 * n_in, sizeof(float));
    l.y = mem_array((size_t)512 * n_out, sizeof(float));
    for (size_t i = 0; i < (size_t)512 * n_in; i++)
        l.x[i] = (float)(i % 17) - 8;
    enum td_status s = pack_copies(b, &l, n_out, n_in, compute);
    for (uint32_t i = 0; !s && i < 4; i++) {
        char name[64];
        l.n_rows = N_ROWS[i];
        snprintf(name, sizeof(name), "linear %s %ux%u T=%u", compute == COMPUTE_F32 ? "f32" : "bf16", n_out, n_in,
                 l.n_rows);
        struct work w = {.bytes = (double)k_matrix_bytes(b->k, l.copies[0]), .ops = 2.0 * n_out * n_in * l.n_rows};
        w.arithmetic = compute == COMPUTE_F32 ? LIMIT_F32 : LIMIT_BF16;
        w.seconds = best_seconds(b, run_copies, &l) / l.n_copies;
        add_row(b, works, name, w);
    }
    measure_limits(b);
    for (uint32_t i = 0; i < l.n_copies; i++)
        k_matrix_free(b->k, l.copies[i]);
    free(l.x);
    free(l.y);
    return s;
}

static enum td_status bench_linear(struct bench *b, struct work *works)
{
    enum td_status s = TD_OK;
    uint32_t small = 2048 / b->shrink, large = 8192 / b->shrink;
    for (enum compute c = COMPUTE_F32; !s && c <= COMPUTE_BF16; c++) {
        s = bench_shape(b, works, small, small, c);
        if (!s)
            s = bench_shape(b, works, large, small, c);
        if (!s)
            s = bench_shape(b, works, small, large, c);
    }
    return s;
}

struct attn_bench {
    struct kernels *k;
    struct k_attn attn;
};

static void run_attn(void *arg)
{
    const struct attn_bench *a = arg;
    k_attention(a->k, &a->attn);
}

/* n_seqs sequences of n_rows each, at the end of the context; 32 heads over 8 of keys and values, 64 wide. */
static enum td_status bench_attention(struct bench *b, struct work *works, const char *name, uint32_t n_seqs,
                                      uint32_t n_rows)
{
    struct kv_layout layout = {NUM_BF16, 1, 8, 64, PAGE_TOKENS};
    uint32_t context = 2048 / b->shrink, n_heads = 32, stride = (n_heads + 2 * 8) * 64;
    uint32_t n_pages = context / PAGE_TOKENS, total = n_seqs * n_rows;
    size_t page_bytes = kv_layout_page_bytes(&layout), kv_bytes = page_bytes * n_pages * n_seqs;
    void *kv = NULL;
    enum td_status s = mem_map(kv_bytes, &kv);
    if (s)
        return s;
    fill_bf16(kv, kv_bytes / 2);
    uint8_t **pages = mem_array((size_t)n_pages * n_seqs, sizeof(*pages));
    for (uint32_t i = 0; i < n_pages * n_seqs; i++)
        pages[i] = (uint8_t *)kv + i * page_bytes;
    struct k_attn_seq seqs[N_SEQS];
    for (uint32_t i = 0; i < n_seqs; i++)
        seqs[i] = (struct k_attn_seq){i * n_rows, n_rows, context - n_rows, pages + (size_t)i * n_pages};
    float *qkv = mem_array((size_t)total * stride, sizeof(float)),
          *out = mem_array((size_t)total * 2048, sizeof(float));
    for (size_t i = 0; i < (size_t)total * stride; i++)
        qkv[i] = (float)(i % 17) - 8;
    struct attn_bench a = {b->k, {.layout = &layout, .n_heads = n_heads, .q = qkv, .k = qkv + n_heads * 64}};
    a.attn.v = a.attn.k + 8ul * 64;
    a.attn.q_stride = a.attn.kv_stride = stride;
    a.attn.v_dim = 64;
    a.attn.out = out;
    a.attn.scale = 0.125f;
    a.attn.seqs = seqs;
    a.attn.n_seqs = n_seqs;
    double keys = (context - n_rows) + (n_rows + 1) / 2.0; /* a row sees on average */
    struct work w = {.bytes = (double)kv_bytes, .ops = 4.0 * 64 * n_heads * keys * total, .arithmetic = LIMIT_F32};
    w.seconds = best_seconds(b, run_attn, &a);
    add_row(b, works, name, w);
    free(qkv);
    free(out);
    free(pages);
    mem_unmap(kv, kv_bytes);
    return TD_OK;
}

static enum td_status run_bench(struct bench *b)
{
    struct work works[KERNELS_BENCH_ROWS];
    b->out->n_rows = N_LIMITS;
    measure_limits(b);
    enum td_status s = bench_linear(b, works);
    if (!s)
        s = bench_attention(b, works, "attention decode, 16 sequences", N_SEQS, 1);
    if (!s)
        s = bench_attention(b, works, "attention prefill chunk", 1, 512 / b->shrink);
    if (s)
        return s;
    measure_limits(b);
    finish_rows(b->out, works);
    return TD_OK;
}

enum td_status kernels_bench(const struct kernels_bench_config *config, struct kernels_bench *out,
                             struct td_error *error_out)
{
    struct bench b = {.shrink = config->shrink ? config->shrink : 1, .ops = cpu_ops_get(config->isa)};
    if (b.ops && !b.ops->peak_f32)
        return td_fail(error_out, TD_ERR_UNSUPPORTED, "kernels.isa: the plain kernels are not made to be fast");
    struct kernels_config kernels = {.n_threads = config->n_threads, .isa = config->isa};
    enum td_status s = kernels_open(&kernels, &b.k, error_out);
    if (s)
        return s;
    struct kernels_bench *result = mem_zalloc(sizeof(*result));
    void *memory = NULL;
    *result = (struct kernels_bench){.isa = b.ops->name, .n_threads = kernels_n_threads(b.k)};
    b.out = result;
    b.row_ns = (uint64_t)((config->seconds_per_row > 0 ? config->seconds_per_row : 0.2) * (double)NS_PER_S);
    b.memory_bytes = ((size_t)256 << 20) / b.shrink / READ_PIECE * READ_PIECE;
    b.memory_bytes = b.memory_bytes ? b.memory_bytes : READ_PIECE;
    clock_init_real(&b.clock);
    s = mem_map(2 * b.memory_bytes, &memory);
    if (!s) {
        b.memory = memory;
        b.pool = pool_open(result->n_threads);
        b.one = pool_open(1);
        s = run_bench(&b);
        pool_close(b.pool);
        pool_close(b.one);
        mem_unmap(memory, 2 * b.memory_bytes);
    }
    kernels_close(b.k);
    if (s)
        td_fail(error_out, s, "kernels bench: not enough memory");
    else
        *out = *result;
    free(result);
    return s;
}
